// The way out of a norm, Op::Epilogue, in all regimes. It changes the normalized, scaled and shifted value before that
// is rounded and stored. Backward, it turns the gradient of the result into that of the value.
//
// Identity:  The value stays as it is.
// Clamp:     The clamped ReLU, min(max(y, lower), upper), with one bit an element, set where lower < y < upper.
// Quantize:  The value is rounded to Op::Via, and then to eight bits with a scale (quantize.cuh).
// Bitmask:   A row of n columns has (n + 7) / 8 bytes. Column 8 j + b is bit b of byte j. The bits past the row's end
//            are zero. A pack of 8 elements is one byte. Shorter packs share a byte with their neighbours.
#pragma once

#include "operation.cuh"
#include "pack.cuh"

__host__ __device__ constexpr long long bitmask_bytes(long long n_cols) { return (n_cols + 7) / 8; }

struct Identity {
  static constexpr bool kHasBits = false, kQuantizes = false;

  template <bool Marks, typename T, typename Arguments>
  static __device__ __forceinline__ void forward(T&, const Arguments&, unsigned&, int) {}
};

struct Clamp {
  static constexpr bool kHasBits = true, kQuantizes = false;

  // Clamps y, but keeps a NaN. If Marks, sets bit i of `bits` if it was strictly between the
  // bounds.
  template <bool Marks, typename T, typename Arguments>
  static __device__ __forceinline__ void forward(T& y, const Arguments& args, unsigned& bits,
                                                 int i) {
    if constexpr (Marks) set_if_strictly_between(bits, 1u << i, y, args.lower, args.upper);
    y = between(y, args.lower, args.upper);
  }

  // Zeroes the elements of the pack at column `first` whose bits in `byte` are zero, even if they
  // are NaN.
  template <typename T, int Length, typename Index>
  static __device__ __forceinline__ void backward(Pack<T, Length>& pack, unsigned byte,
                                                  Index first) {
    const unsigned bits = Length == 8 ? byte : byte >> (first % 8);
    // Each of four bits becomes the top one of a byte: bit k moves by 7 * k + 7, and no others meet
    // there. A pack of up to four elements has only the first of these words.
    constexpr unsigned kToTops = 1u << 7 | 1u << 14 | 1u << 21 | 1u << 28;
    const unsigned tops[2] = {(bits & 15u) * kToTops, Length > 4 ? (bits >> 4) * kToTops : 0u};
#pragma unroll
    for (int word = 0; word < Pack<T, Length>::kWords; ++word) {
      const int first_element = word * 4 / static_cast<int>(sizeof(T));
      const int last_element = (word * 4 + 3) / static_cast<int>(sizeof(T));
      pack.words[word] &= spread_tops(tops[first_element / 4], first_element % 4, last_element % 4);
    }
  }
};

// Stores the bits of the pack at column `first` if it lies inside a row of n. Neighbouring lanes
// hold the packs of the same byte. Every lane of the warp takes part; n = 0 stores nothing.
template <int Vector, int Length, typename Index>
__device__ __forceinline__ void store_bits(unsigned bits, unsigned char* row, Index first,
                                           Index n) {
  if constexpr (Vector < 8) {
    const Index left = n - first < Length ? n - first : Length;
    bits &= left > 0 ? (1u << left) - 1 : 0u;
  }
  unsigned byte = bits << (first % 8);
#pragma unroll
  for (int lanes = 1; lanes < 8 / Length; lanes *= 2) byte |= shuffle_xor(byte, lanes);
  if (first % 8 == 0 && first < n) row[first / 8] = static_cast<unsigned char>(byte);
}

// Returns the byte with the bits of the pack at column `first`, zero past the row's end. The bits
// are taken out of it where they are used, so that nothing waits for the load earlier.
template <typename Index>
__device__ __forceinline__ unsigned load_bits(const unsigned char* row, Index first, Index n) {
  return first < n ? row[first / 8] : 0u;
}
