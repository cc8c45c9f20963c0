// The way out of a norm whose result is quantized, Op::Epilogue = Quantize, for rows in registers.
//
// y is rounded to Op::Via. Then q = saturate(round(y / scale)) has eight bits, Op::Y: to nearest even, of a quotient
// that is a float. A NaN stays NaN in a float8 type, and is 0 in int8.
//
// Scale:     kGivenScale: it is read, one for all. Else it is max|y| / L, clipped to [lower, upper], and written: for
//            each row, or for each kScaleColumns columns if that is not 0. NaN does not count in max|y|. L is the
//            largest number of Y. If Scale is a byte, it is a power of two as its exponent (float8_e8m0fnu): the
//            largest that is not above max|y| / P, where P is the largest power of two of Y. Scales of blocks lie row
//            by row. If kColumnMajor they lie column by column, whose beginnings are the least multiple of 4 apart that
//            is not below n_rows.
// Amax:      kFindsAmax: amax becomes the largest magnitude of y in all rows, where NaN does not count either.
// Division:  mostly a product with the reciprocal, after it is known that this gives the same codes; else the product is
//            corrected by what it exceeds y by (notes.md#exact-quotients).
#pragma once

#include "affine.cuh"

struct Quantize : Identity {
  static constexpr bool kQuantizes = true;
};

template <typename Q>
struct FormatOf;
template <>
struct FormatOf<float8_e4m3fn> {
  static constexpr float kLargest = 448, kPerPower = 0x1p-8f;
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr unsigned kLargestBits = 0x7e;
};
template <>
struct FormatOf<float8_e5m2> {
  static constexpr float kLargest = 57344, kPerPower = 0x1p-15f;
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr unsigned kLargestBits = 0x7b;
};
template <>
struct FormatOf<int8> {
  static constexpr float kLargest = 127;
};

// The bits of a float8 number, where no instruction makes them.
template <typename Q>
__device__ __forceinline__ unsigned float_to_float8_bits(float value) {
  using Format = FormatOf<Q>;
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr unsigned kLeastNormal = static_cast<unsigned>(128 - Format::kBias) << 23;
  const unsigned word = float_bits(value), size = word & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7f;
  unsigned code = 0;
  if (size < kLeastNormal) {
    // This sum has the spacing of Q's subnormal numbers, so the addition rounds to them.
    constexpr unsigned kOffset = static_cast<unsigned>(128 - Format::kBias + kShift) << 23;
    code = float_bits(absolute(value) + float_from_bits(kOffset)) - kOffset;
  } else {
    const unsigned odd = size >> kShift & 1u;
    code = (size + ((1u << (kShift - 1)) - 1u) + odd) >> kShift;
    code -= static_cast<unsigned>(127 - Format::kBias) << Format::kMantissa;
  }
  return (code < Format::kLargestBits ? code : Format::kLargestBits) | (word >> 24 & 0x80u);
}

// The codes of two values, the first in the lower byte.
template <typename Q>
__device__ __forceinline__ unsigned two_codes(float first, float second) {
  if constexpr (kSame<Q, int8>) {
    return float_to_int8_bits(first) | float_to_int8_bits(second) << 8;
  } else if constexpr (!kConvertsToFloat8) {
    return float_to_float8_bits<Q>(first) | float_to_float8_bits<Q>(second) << 8;
  } else if constexpr (kSame<Q, float8_e4m3fn>) {
    return floats_to_e4m3_bits(first, second);
  } else {
    return floats_to_e5m2_bits(first, second);
  }
}

// A call, so that the code of all other divisions does not grow by this one.
NOT_INLINED __device__ float divided(float value, float scale) { return value / scale; }

// Division by a scale, so that codes are those of the exactly rounded quotient.
struct Divisor {
  float scale, inverse;
  // Whether a product with the inverse gives the codes, and whether a corrected one does. Else the GPU divides.
  bool by_product = false, by_correction;

  // `largest`: of the magnitudes to be divided, or 0 if quotients are kept in range.
  __device__ __forceinline__ Divisor(float scale, float largest)
      : scale(scale),
        inverse(reciprocal_in_range(scale)),
        by_correction(scale >= 0x1p-60f && scale <= 0x1p60f && largest <= 0x1p60f * scale) {}

  // Finds whether products serve all numbers of 16 bits: no boundary between two codes, times the scale, is next to one
  // of these. The boundaries have 5 significant bits, those of int8 have 8. Lanes try some boundaries each. A row has
  // whole warps, so that all lanes have one scale and vote together.
  template <typename Q, typename Via, int RowThreads>
  __device__ __forceinline__ void try_products() {
    constexpr int kBoundaries = kSame<Q, int8> ? 128 : 16, kLanes = 32;
    if constexpr (sizeof(Via) == 2 && RowThreads >= kLanes) {
      constexpr unsigned kBelow =
          (1u << (kSame<Via, bfloat16> ? 16 : 13)) - 1;  // the last bit of Via
      constexpr unsigned kNear = 8;  // more than the errors of two products and a quotient
      bool is_near = false;
#pragma unroll
      for (int first = 0; first < kBoundaries; first += kLanes) {
        const int boundary = kBoundaries + first + thread_index() % kLanes;
        const unsigned product = float_bits(static_cast<float>(boundary) * scale);
        is_near |= ((product + kNear) & kBelow) <= 2 * kNear;
      }
      const bool is_power = (float_bits(scale) & 0x7fffffu) == 0;
      by_product = by_correction && !any_in_warp(is_near && !is_power);
    }
  }

  // The quotients of a pack. If Saturates, values may be any, and quotients beyond all numbers of eight bits become one
  // of these.
  template <bool Saturates, typename Via, int Length>
  __device__ __forceinline__ void divide(float (&quotients)[Length],
                                         const Pack<Via, Length>& y) const {
    if (by_product) {
#pragma unroll
      for (int i = 0; i < Length; ++i) quotients[i] = y.template get<float>(i) * inverse;
    } else if (by_correction) {
#pragma unroll
      for (int i = 0; i < Length; ++i) {
        const float value = y.template get<float>(i);
        float close = value * inverse;
        if constexpr (Saturates) close = between(close, -0x1p20f, 0x1p20f);
        // Its sign is such that the quotient of -0 is -0.
        const float excess = fused_multiply_add(close, scale, -value);
        quotients[i] = fused_multiply_add(-excess, inverse, close);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Length; ++i) quotients[i] = divided(y.template get<float>(i), scale);
    }
  }
};

// The largest magnitude of numbers, where NaN does not count.
template <typename Via>
struct Largest {
  static constexpr bool kByPairs = kComparesPairs && sizeof(Via) == 2;
  unsigned pair = 0;
  float number = 0;

  template <int Length>
  __device__ __forceinline__ void add(const Pack<Via, Length>& pack) {
    if constexpr (kByPairs) {
#pragma unroll
      for (int word = 0; word < Pack<Via, Length>::kWords; ++word) {
        pair = kSame<Via, bfloat16> ? larger_bfloat16_pair(pair, pack.words[word])
                                    : larger_float16_pair(pair, pack.words[word]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Length; ++i) {
        number = larger_number(number, absolute(pack.template get<float>(i)));
      }
    }
  }
  __device__ __forceinline__ float value() const {
    if constexpr (kByPairs) {
      const Pack<Via, 2> both = {{pair}};
      return larger_number(absolute(both.template get<float>(0)),
                           absolute(both.template get<float>(1)));
    } else {
      return number;
    }
  }
};

// What a kernel does with a row of y in packs of so many elements.
template <typename Op, int Length>
struct Quantizer {
  using Via = typename Op::Via;
  using Q = typename Op::Y;
  using Scale = typename Op::Scale;
  static constexpr bool kOfRow = !Op::kGivenScale && Op::kScaleColumns == 0;
  static constexpr bool kIsPower = kSame<Scale, unsigned char>;
  static constexpr int kLanes = Op::kScaleColumns / Length;  // that share a scale

  // The largest of so many lanes, by default those that share a scale. All of the warp take part.
  template <int Lanes = kLanes>
  static __device__ __forceinline__ float largest_of_lanes(float largest) {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
      largest = larger(largest, shuffle_xor(largest, distance));
    }
    return largest;
  }
  // A magnitude over the largest number of Q, exactly rounded unless below 2^-126, and without a branch
  // (notes.md#exact-quotients).
  static __device__ __forceinline__ float over_largest(float magnitude) {
    constexpr float kLargest = FormatOf<Q>::kLargest, kInverse = 1.0f / kLargest;
    const bool is_small = magnitude < 0x1p-60f;
    const float value = is_small ? magnitude * 0x1p80f : magnitude;
    const float close = value * kInverse;
    const float quotient =
        fused_multiply_add(fused_multiply_add(-close, kLargest, value), kInverse, close);
    // The difference of an infinity from itself is NaN.
    return is_small ? quotient * 0x1p-80f : quotient < value ? quotient : value;
  }
  // The scale for a largest magnitude, as it is stored.
  static __device__ __forceinline__ Scale scale_of(float largest,
                                                   const QuantizedArguments<Op>& args) {
    if constexpr (kIsPower) {
      const float ratio = between(largest * FormatOf<Q>::kPerPower, args.lower, args.upper);
      return static_cast<Scale>(float_bits(ratio) >> 23);
    } else {
      return between(over_largest(largest), args.lower, args.upper);
    }
  }
  static __device__ __forceinline__ Divisor divisor_of_block(Scale scale, float largest) {
    if constexpr (kIsPower) {
      Divisor divisor(float_from_bits(static_cast<unsigned>(scale) << 23), largest);
      divisor.by_product = divisor.by_correction;  // a product with a power of two is exact
      return divisor;
    } else {
      return Divisor(scale, largest);
    }
  }
  static __device__ __forceinline__ Pack<Q, Length> codes(const Pack<Via, Length>& y,
                                                          const Divisor& divisor) {
    float quotients[Length];
    divisor.template divide<Op::kGivenScale>(quotients, y);
    Pack<Q, Length> pack;
#pragma unroll
    for (int word = 0; word < Length / 4; ++word) {
      const float* const four = quotients + 4 * word;
      pack.words[word] = two_codes<Q>(four[0], four[1]) | two_codes<Q>(four[2], four[3]) << 16;
    }
    return pack;
  }
};
