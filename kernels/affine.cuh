// The affine step of a norm: xhat * (weight [+ 1]) + bias, where weight and bias may be absent.
#pragma once

#include "pack.cuh"

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
