// The affine step of a norm: xhat * (weight [+ 1]) + bias, where weight and bias may be absent; and what
// comes before and after it, of rows that are held or pipelined.
#pragma once

#include "relu.cuh"

template <bool ZeroCentered, typename T, typename Weight, int Length>
__device__ __forceinline__ T weight_at(const Pack<Weight, Length>& weights, int i) {
  // The 1 is added in the compute type: a bfloat16 1 + w would lose small weights.
  return ZeroCentered ? T(1) + weights.template get<T>(i) : weights.template get<T>(i);
}

template <bool ZeroCentered, typename T, typename Weight, typename Bias, int Length>
__device__ __forceinline__ T affine(T xhat, const Pack<Weight, Length>& weights,
                                    const Pack<Bias, Length>& biases, int i) {
  if constexpr (kPresent<Weight> && kPresent<Bias>) {
    return fused_multiply_add(xhat, weight_at<ZeroCentered, T>(weights, i),
                              biases.template get<T>(i));
  } else if constexpr (kPresent<Weight>) {
    return xhat * weight_at<ZeroCentered, T>(weights, i);
  } else if constexpr (kPresent<Bias>) {
    return xhat + biases.template get<T>(i);
  } else {
    return xhat;
  }
}

// The values of y from a pack of x: xhat = (x - shift) * scale [+ offset if Centered], the affine step, and
// if Relu the clamp, of which it returns the bits if Marks.
template <bool Centered, bool ZeroCentered, bool Relu, bool Marks, typename T, typename X,
          typename Weight, typename Bias, int Length>
__device__ __forceinline__ unsigned normalize_pack(T (&values)[Length], const Pack<X, Length>& pack,
                                                   T shift, T scale, T offset,
                                                   const Pack<Weight, Length>& weights,
                                                   const Pack<Bias, Length>& biases, T lower,
                                                   T upper) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < Length; ++i) {
    const T d = pack.template get<T>(i) - shift;
    const T xhat = Centered ? fused_multiply_add(d, scale, offset) : d * scale;
    values[i] = affine<ZeroCentered>(xhat, weights, biases, i);
    if constexpr (Relu) clamp<Marks>(values[i], lower, upper, bits, i);
  }
  return bits;
}
