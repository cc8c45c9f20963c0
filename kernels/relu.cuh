// The clamped ReLU after a norm, and its bitmask: one bit an element, set where lower < y < upper.
//
// Layout:    a row of n columns has (n + 7) / 8 bytes; column 8 j + b is bit b of byte j, and the
//            bits past the row's end are zero. A pack of 8 elements is one byte; those of fewer
//            share one with their neighbours.
#pragma once

#include "pack.cuh"

__host__ __device__ constexpr long long bitmask_bytes(long long n_cols) { return (n_cols + 7) / 8; }

// Clamps y, a NaN excepted, and says whether it was strictly between the bounds.
template <typename T>
__device__ __forceinline__ bool clamp(T& y, T lower, T upper) {
  const bool strictly_inside = lower < y && y < upper;
  y = between(y, lower, upper);
  return strictly_inside;
}

// Stores the bits of a pack that begins at column `first`; neighbouring lanes hold the packs of the
// same byte. Every lane of the warp takes part; n = 0 stores nothing.
template <int Length, typename Index>
__device__ __forceinline__ void store_bits(unsigned bits, unsigned char* row, Index first,
                                           Index n) {
  unsigned byte = bits << (first % 8);
#pragma unroll
  for (int lanes = 1; lanes < 8 / Length; lanes *= 2) byte |= shuffle_xor(byte, lanes);
  if (first % 8 == 0 && first < n) row[first / 8] = static_cast<unsigned char>(byte);
}

// The byte that holds the bits of the pack that begins at column `first`, zero past the row's end.
// The bits are taken out of it where they are used, so that nothing waits for the load before.
template <typename Index>
__device__ __forceinline__ unsigned load_bits(const unsigned char* row, Index first, Index n) {
  return first < n ? row[first / 8] : 0u;
}

// Zeroes the elements of the pack that begins at column `first` whose bits in `byte` are zero, be
// they NaN.
template <typename T, int Length, typename Index>
__device__ __forceinline__ void keep(Pack<T, Length>& pack, unsigned byte, Index first) {
  const unsigned bits = Length == 8 ? byte : byte >> (first % 8);
#pragma unroll
  for (int word = 0; word < Pack<T, Length>::kWords; ++word) {
    if constexpr (sizeof(T) == 2) {
      // Each of two bits spread over its half of the word; selects spilled at 4 packs of float16 on sm_90.
      const unsigned pair = bits >> (2 * word);
      pack.words[word] &= ((pair & 1u) | (pair & 2u) << 15) * 0xffffu;
    } else if (!(bits >> (word * 4 / static_cast<int>(sizeof(T))) & 1)) {
      pack.words[word] = 0;
    }
  }
}
