// Mean and variance of a row, and the range in which they can be trusted.
//
// The variance is the corrected two-pass. With a first mean m, d = x - m, c = sum(d)/N and
// variance = sum(d*d)/N - c*c, so neither a large mean nor the rounding of m costs digits. m is the mean of the row's
// first elements, half of it, or 0. If it was far off, the row is measured again from m + c.
// RMSNorm has no mean: d = x, c = 0.
#pragma once

#include "pack.cuh"

template <typename T>
struct Statistics {
  T shift = 0;       // m: d = x - m is formed again with it
  T correction = 0;  // c: the row's mean is m + c
  T magnitude = 0;   // mean of |d|, if it was summed
  T variance = 0;    // RMSNorm: the mean square
};

// Adds to the sums of d*d and, if there are as many sums, of d and |d|.
template <int Sums, typename T>
__device__ __forceinline__ void add_deviation(T (&sums)[Sums], T d) {
  sums[0] = fused_multiply_add(d, d, sums[0]);
  if constexpr (Sums > 1) sums[1] += d;
  if constexpr (Sums > 2) sums[2] += absolute(d);
}

// Returns the statistics from the row's sums of d*d and, if they were taken, of d and |d|. If the
// variance is NaN, the mean is NaN too. Otherwise the mean of a row with one inf would be inf or
// NaN, depending on whether the inf lies in the first pack.
template <bool Centered, int Sums, typename T>
__device__ __forceinline__ void finish(Statistics<T>& statistics, const T (&sums)[Sums], T inv_n) {
  static_assert(Sums > 1 || !Centered, "LayerNorm needs the sum of d");
  statistics.variance = sums[0] * inv_n;
  if constexpr (Sums > 2) statistics.magnitude = sums[2] * inv_n;
  if constexpr (Centered) {
    statistics.correction = sums[1] * inv_n;
    const T variance = statistics.variance - statistics.correction * statistics.correction;
    statistics.variance = variance < T(0) ? T(0) : variance;
    if (variance != variance) statistics.correction = variance;
  }
}

// Returns a first mean for a whole row from its first pack, of which each thread has a copy. It is
// the pack's mean if its elements lie close together, else half of it, which may serve rows around
// 0 as well. So fewer rows are measured again (notes.md#how-often-rows-are-measured-again).
template <typename T, typename X, int Length>
__device__ __forceinline__ T first_mean(const Pack<X, Length>& pack) {
  T sum = 0, sum_of_squares = 0;
#pragma unroll
  for (int i = 0; i < Length; ++i) {
    const T x = pack.template get<T>(i);
    sum += x;
    sum_of_squares = fused_multiply_add(x, x, sum_of_squares);
  }
  const bool close = sum * sum >= T(0.7) * Length * sum_of_squares;
  return sum * (close ? T(1) / Length : T(0.5) / Length);
}

// The same from the row's first kFirstElements. Each lane of a warp has a pack of them. In rows of
// one distribution it is an eighth of a deviation off. It serves kernels that hide the three to
// five shuffles, and for which a second round is expensive
// (notes.md#how-often-rows-are-measured-again). The row must have as many elements.
constexpr int kFirstElements = 64;
template <int Length>
constexpr int kFirstLanes = kFirstElements / Length;
template <int Vector, typename X, int Length>
__device__ __forceinline__ void load_first(Pack<X, Length>& pack, const X* row) {
  load<Vector>(pack, row, thread_index() % kFirstLanes<Length> * Length, kFirstElements);
}
template <typename T, typename X, int Length>
__device__ __forceinline__ T first_mean_by_warp(const Pack<X, Length>& pack) {
  T sum = 0;
#pragma unroll
  for (int i = 0; i < Length; ++i) sum += pack.template get<T>(i);
#pragma unroll
  for (int distance = kFirstLanes<Length> / 2; distance > 0; distance /= 2) {
    sum += shuffle_xor(sum, distance);
  }
  return sum * (T(1) / kFirstElements);
}

// Whether the first mean was so far from the row's mean that a second round must start from that.
// The error of the sum of d stays in c, and is of the order of the mean of |d|. That mean may be at
// most 3 times what it would be around the row's own mean, even if few outliers make the deviation.
template <typename T>
__device__ __forceinline__ bool was_far(const Statistics<T>& statistics) {
  return T(1.5) * absolute(statistics.correction) > statistics.magnitude;
}
// The same for a first mean of 0, for rows of up to Columns. The mean is far if it is more than 2
// standard errors off, as in one row around 0 in twenty. The error of the sum stays in c, and shows
// in a row whose deviation comes from a few outliers, since all others may lie at the mean itself.
// If the squares of both vanish, the mean counts as far, in a row of zeros too.
template <int Columns, typename T>
__device__ __forceinline__ bool zero_was_far(const Statistics<T>& statistics) {
  constexpr T kMost = T(4) / Columns;
  return statistics.correction * statistics.correction >= kMost * statistics.variance;
}

// Returns the mean as one number, and what rounding lost of it. Then d is as exact as x and the
// mean allow, however far off the first mean was (Knuth's two-sum).
template <typename T>
__device__ __forceinline__ void settle(Statistics<T>& statistics) {
  const T mean = statistics.shift + statistics.correction;
  const T added = mean - statistics.shift;
  statistics.correction = (statistics.shift - (mean - added)) + (statistics.correction - added);
  statistics.shift = mean;
}

// Range. Squares of float32 overflow from 1.8e19 and vanish below 1e-19. If a row's variance + eps
// is outside [kSmallest, kLargest], the row is divided by `unit`, a power of two near its largest
// element (or near sqrt(eps), if larger), and measured again. Inside, what vanished is below 2^-24
// of the sum.
template <typename T>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmallest = 7.888609052210118e-31f;  // 2^-100
  static constexpr float kLargest = 3.4028234663852886e38f;
  // The power of two at or below a non-negative value, from its exponent's bits. Only normal
  // numbers with a normal reciprocal, 2^-126 to 2^126, are returned: the nearest of them.
  static __device__ __forceinline__ float power_of_two_below(float value) {
    const unsigned exponent = float_bits(value) & 0x7f800000u;
    const unsigned least = 0x00800000u, most = 0x7e800000u;
    return float_from_bits(exponent < least ? least : exponent < most ? exponent : most);
  }
  static __device__ __forceinline__ float reciprocal(float power) {
    return float_from_bits(0x7f000000u - float_bits(power));
  }
};
template <>
struct Range<double> {
  static constexpr double kSmallest = 1.026342e-289;  // near 2^-960
  static constexpr double kLargest = 1.7976931348623157e308;
  static __device__ __forceinline__ double power_of_two_below(double value) {
    const unsigned long long exponent = double_bits(value) & 0x7ff0000000000000ull;
    const unsigned long long least = 0x0010000000000000ull, most = 0x7fd0000000000000ull;
    return double_from_bits(exponent < least ? least : exponent < most ? exponent : most);
  }
  static __device__ __forceinline__ double reciprocal(double power) {
    return double_from_bits(0x7fe0000000000000ull - double_bits(power));
  }
};

// The divisor of a row whose largest element is `largest`; inf has no unit.
template <typename T>
__device__ __forceinline__ T unit_of(T largest) {
  return largest <= Range<T>::kLargest ? Range<T>::power_of_two_below(largest) : T(1);
}

template <typename T>
__device__ __forceinline__ bool in_range(T variance_plus_eps) {
  return variance_plus_eps >= Range<T>::kSmallest && variance_plus_eps <= Range<T>::kLargest;
}

// The factor of a measured row, and the rstd to store. They differ by the unit of the row.
template <typename T>
struct Scale {
  T of_row;
  T rstd;
};

template <typename T>
__device__ __forceinline__ Scale<T> scale_in_range(T variance, T eps) {
  const T rstd = reciprocal_square_root(variance + eps);
  return {rstd, rstd};
}

// For a row that was measured in a unit. eps / unit^2 may not be representable, so the root is
// taken as a hypotenuse.
template <typename T>
__device__ __forceinline__ Scale<T> scale_in_unit(T variance, T eps, T unit) {
  if (variance != variance) return {variance, variance};
  const T deviation = square_root(variance);
  const T root = square_root(eps) / unit;
  const T longer = larger(deviation, root), shorter = deviation > root ? root : deviation;
  const T ratio = longer > T(0) ? shorter / longer : T(0);
  const T of_row = T(1) / (longer * square_root(fused_multiply_add(ratio, ratio, T(1))));
  if (variance == T(0) && eps > T(0)) return {T(0), reciprocal_square_root(eps)};
  return {of_row, of_row / unit};
}

// float16's squares neither overflow nor vanish.
template <typename X>
constexpr bool kCanLeaveRange = !kSame<X, float16>;
