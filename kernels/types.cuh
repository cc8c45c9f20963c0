// Element types, and their conversions to and from the compute type (float, or double for double).
#pragma once

#include "device.cuh"

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};
// Of eight bits, which results are quantized to (quantize.cuh).
struct float8_e4m3fn {
  unsigned char bits;
};
struct float8_e5m2 {
  unsigned char bits;
};
struct int8 {
  unsigned char bits;
};
struct None {};  // an absent operand

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

template <typename T>
constexpr bool kPresent = !kSame<T, None>;

template <bool First, typename A, typename B>
struct Either {
  using type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using type = B;
};

template <typename X>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
// The type in which rows of X are computed and their statistics stored.
template <typename X>
using Compute = typename ComputeOf<X>::type;

template <typename To, typename From>
__device__ __forceinline__ To convert(From value) {
  if constexpr (kSame<From, float16>) {
    return static_cast<To>(float16_bits_to_float(value.bits));
  } else if constexpr (kSame<From, bfloat16>) {
    return static_cast<To>(float_from_bits(static_cast<unsigned>(value.bits) << 16));
  } else if constexpr (kSame<To, float16>) {
    if constexpr (kSame<From, double>) return float16{double_to_float16_bits(value)};
    if constexpr (kSame<From, float>) return float16{float_to_float16_bits(value)};
  } else if constexpr (kSame<To, bfloat16>) {
    if constexpr (kSame<From, double>) return bfloat16{double_to_bfloat16_bits(value)};
    if constexpr (kSame<From, float>) return bfloat16{float_to_bfloat16_bits(value)};
  } else {
    return static_cast<To>(value);
  }
}

// The larger one; b if a is NaN.
template <typename T>
__device__ __forceinline__ T larger(T a, T b) {
  return a > b ? a : b;
}
