// Device primitives: everything that only a GPU provides sits behind the functions of this file, so
// that the kernels above it are plain C++ and a host build can put its own versions in their place.
#pragma once

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ long long block_index() { return blockIdx.x; }
__device__ __forceinline__ long long block_count() { return gridDim.x; }

// All 32 lanes of the warp must take part in these two.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
__device__ __forceinline__ bool any_in_warp(bool condition) {
  return __any_sync(0xffffffffu, condition) != 0;
}

// Every thread of the block.
__device__ __forceinline__ void block_barrier() { __syncthreads(); }
// `threads` (a multiple of 32) threads of the block that name the same barrier; 0 is the block's own.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void* dynamic_shared_memory() {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  return shared_memory;
}

// The compiler may no longer assume that it knows this value.
__device__ __forceinline__ void make_opaque(unsigned& word) { asm volatile("" : "+r"(word)); }
__device__ __forceinline__ void make_opaque(int& word) { asm volatile("" : "+r"(word)); }
__device__ __forceinline__ unsigned float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned long long double_bits(double value) {
  return static_cast<unsigned long long>(__double_as_longlong(value));
}
__device__ __forceinline__ double double_from_bits(unsigned long long bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}

// IEEE 754 binary16 and bfloat16 by their bits, so that no CUDA header is needed. All round to
// nearest even; a float64 is rounded once, never by way of float32.
__device__ __forceinline__ float float16_bits_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ unsigned short float_to_float16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ unsigned short double_to_float16_bits(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}
__device__ __forceinline__ unsigned short float_to_bfloat16_bits(float value) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned word = float_bits(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the NaN that newer GPUs give
  return static_cast<unsigned short>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
#endif
}
__device__ __forceinline__ unsigned short double_to_bfloat16_bits(double value) {
  // Rounding to odd keeps a sticky bit below float32's last, so the second rounding is the only one.
  const float toward_zero = __double2float_rz(value);
  const bool inexact = static_cast<double>(toward_zero) != value;
  return float_to_bfloat16_bits(float_from_bits(float_bits(toward_zero) | (inexact ? 1u : 0u)));
}

// The compiler contracts nothing (--fmad=false): a fused multiply-add happens where it is written.
__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
// Correctly rounded for float32, one ulp for float64.
__device__ __forceinline__ float reciprocal_square_root(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double reciprocal_square_root(double value) {
  return __drcp_rn(__dsqrt_rn(value));
}
__device__ __forceinline__ float square_root(float value) { return __fsqrt_rn(value); }
__device__ __forceinline__ double square_root(double value) { return __dsqrt_rn(value); }
