// The affine step of a norm: xhat * (weight [+ 1]) + bias. Weight and bias may be absent. Rows that
// are held or pipelined share the steps before and after it.
#pragma once

#include "operation.cuh"
#include "epilogue.cuh"

template <typename Op, typename T, typename Weight, int Length>
__device__ __forceinline__ T weight_at(const Pack<Weight, Length>& weights, int i) {
  // The 1 is added in the compute type: a bfloat16 1 + w would lose small weights.
  return Op::kZeroCentered ? T(1) + weights.template get<T>(i) : weights.template get<T>(i);
}

template <typename Op, typename T, typename Weight, typename Bias, int Length>
__device__ __forceinline__ T affine(T xhat, const Pack<Weight, Length>& weights,
                                    const Pack<Bias, Length>& biases, int i) {
  if constexpr (kPresent<Weight> && kPresent<Bias>) {
    return fused_multiply_add(xhat, weight_at<Op, T>(weights, i), biases.template get<T>(i));
  } else if constexpr (kPresent<Weight>) {
    return xhat * weight_at<Op, T>(weights, i);
  } else if constexpr (kPresent<Bias>) {
    return xhat + biases.template get<T>(i);
  } else {
    return xhat;
  }
}

// Returns the values of y from a pack of x: xhat = (x - shift) * scale [+ offset if kCentered], the
// affine step and the epilogue. If kStoresBits, it returns the epilogue's bits as well.
template <typename Op, typename T, typename X, typename Weight, typename Bias, int Length>
__device__ __forceinline__ unsigned normalize_pack(T (&values)[Length], const Pack<X, Length>& pack,
                                                   T shift, T scale, T offset,
                                                   const Pack<Weight, Length>& weights,
                                                   const Pack<Bias, Length>& biases,
                                                   const ForwardArguments<Op>& args) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < Length; ++i) {
    const T d = pack.template get<T>(i) - shift;
    const T xhat = Op::kCentered ? fused_multiply_add(d, scale, offset) : d * scale;
    values[i] = affine<Op>(xhat, weights, biases, i);
    Op::Epilogue::template forward<Op::kStoresBits>(values[i], args, bits, i);
  }
  return bits;
}
