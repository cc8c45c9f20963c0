// What the backward kernels share: for how long weight gradients are added up and, where rows are read
// once, the formulas of backward.cu's header.
#pragma once

#include "affine.cuh"
#include "statistics.cuh"

// Rows whose weight gradients are added one after another in registers. Equal terms round the same
// way each time: 248 of them in sequence lost 31 units in the last place, 64 lose 8.
constexpr int kTurns = 64;

// The distance of two rows of partial sums: whole packs of any dtype, so that those of a row of any
// length are moved whole.
__device__ __forceinline__ constexpr long long partials_stride(long long n_cols) {
  return (n_cols + 7) & ~7LL;
}

// Stores a pack of values to elements `first` ... of a row of n, if that is present; of RowThreads threads
// as store_by_sectors wants them.
template <int Vector, int RowThreads, typename T, typename Out, int Length, typename Index>
__device__ __forceinline__ void write(const T (&values)[Length], Out* row, Index first, Index n) {
  if constexpr (kPresent<Out>) {
    Pack<Out, Length> pack;
    pack.set(values);
    store_by_sectors<Vector, RowThreads>(pack, row, first, n);
  }
}

// Adds the sums of weight gradients that begin at `others`, a pack of them.
template <typename T, int Width>
__device__ __forceinline__ void add_gradients(Pack<T, Width>& sums, const T* others) {
  Pack<T, Width> added;
  load<Width>(added, others, 0, Width);
#pragma unroll
  for (int k = 0; k < Width; ++k) sums.set(k, sums.template get<T>(k) + added.template get<T>(k));
}

// h = (x - mean) * rstd as d * significand, d = x * power + offset, where power is the power of two at
// or below rstd: d is rounded as x - mean is, not at all where they are close, in one instruction. All
// d of a constant row are 0; with rstd for the power each was what -mean * rstd had lost, and dweight
// 2e-4 off in rows of 1e9. The offset overflows for constant rows alone.
template <bool Centered, typename T>
struct Centring {
  T power, offset = 0, significand = 1;

  __device__ __forceinline__ Centring(T mean, T rstd) : power(rstd) {
    if constexpr (Centered) {
      const T below = Range<T>::power_of_two_below(rstd), product = -mean * below;
      const bool overflows = absolute(product) > Range<T>::kLargest;
      power = overflows ? T(0) : below;
      offset = overflows ? T(0) : product;
      significand = rstd * Range<T>::reciprocal(below);
    }
  }
  // Past the row's end, where x is 0, it is 0: by an offset for each access, not a d for each element.
  __device__ __forceinline__ T d_of(T value, bool is_inside = true) const {
    return Centered ? fused_multiply_add(value, power, is_inside ? offset : T(0)) : value * power;
  }
  // xhat, which is centred again by the mean of h over the row.
  __device__ __forceinline__ T xhat_of(T value, T mean_of_h) const {
    return Centered ? fused_multiply_add(d_of(value), significand, -mean_of_h) : d_of(value);
  }
};

// Sums of g * d and, for LayerNorm, of g and d.
template <bool Centered>
constexpr int kGradientSums = Centered ? 3 : 1;

// Adds a pack of a row, which begins at element `first` of n.
template <bool ZeroCentered, int Vector, bool Centered, typename T, typename X, typename DY,
          typename Weight, int Length>
__device__ __forceinline__ void add_to_sums(T (&sums)[kGradientSums<Centered>],
                                            const Centring<Centered, T>& centring,
                                            const Pack<X, Length>& x, const Pack<DY, Length>& dy,
                                            const Pack<Weight, Length>& weights, int first, int n) {
#pragma unroll
  for (int i = 0; i < Length; ++i) {
    T g = dy.template get<T>(i);
    if constexpr (kPresent<Weight>) g *= weight_at<ZeroCentered, T>(weights, i);
    const T d = centring.d_of(x.template get<T>(i), inside<Vector>(first, i, n));
    sums[0] = fused_multiply_add(g, d, sums[0]);
    if constexpr (Centered) {
      sums[1] += g;
      sums[2] += d;
    }
  }
}

// The mean of g * xhat from the row's sums of g * h and of g, and the mean of h by which xhat is
// centred. Of an infinite dy that mean, a rounding error, would make an infinity of either sign.
template <typename T>
__device__ __forceinline__ T mean_of_g_xhat(T sum_of_g_h, T sum_of_g, T mean_of_h, T inv_n) {
  const T centred = absolute(sum_of_g) <= Range<T>::kLargest ? mean_of_h * sum_of_g : T(0);
  return (sum_of_g_h - centred) * inv_n;
}

// What dx needs of a row: the mean of h, by which xhat is centred, and those of g and of g * xhat.
template <bool Centered, typename T>
struct RowMeans {
  T h = 0, g = 0, g_xhat;

  // From the sums of add_to_sums, with the significand of their Centring.
  __device__ __forceinline__ RowMeans(const T (&sums)[kGradientSums<Centered>], T significand,
                                      T inv_n)
      : g_xhat(sums[0] * inv_n) {
    if constexpr (Centered) {
      h = sums[2] * significand * inv_n;
      g = sums[1] * inv_n;
      g_xhat = mean_of_g_xhat(sums[0] * significand, sums[1], h, inv_n);
    }
  }
};

// Element i of a pack's dx.
template <bool ZeroCentered, bool Centered, typename T, typename Weight, int Length>
__device__ __forceinline__ T dx_of(T dy, T xhat, const Pack<Weight, Length>& weights, int i,
                                   const RowMeans<Centered, T>& means, T rstd) {
  const T along = fused_multiply_add(-xhat, means.g_xhat, -means.g);
  if constexpr (kPresent<Weight>) {
    return fused_multiply_add(dy, weight_at<ZeroCentered, T>(weights, i), along) * rstd;
  } else {
    return (dy + along) * rstd;
  }
}
