// The way in of a norm, Op::Prologue, in all regimes. It turns the arrays that are read into the value to normalize.
// Backward, it turns the gradient of that value into the gradients of those arrays.
//
// Plain:       x is normalized.
// AddResidual: x + residual is normalized, rounded to X, as residual_out holds it. Both have the gradient of the sum:
//              the norm's gradient, plus dresidual_out if there is one.
#pragma once

#include "operation.cuh"
#include "pack.cuh"

// The bytes of an element, 0 if it is absent.
template <typename T>
constexpr int kBytesOf = kPresent<T> ? static_cast<int>(sizeof(T)) : 0;

struct Plain {
  static constexpr bool kAdds = false;

  template <typename X, int Length>
  static __device__ __forceinline__ Pack<X, Length> forward(const Pack<X, Length>& x,
                                                            const Pack<None, Length>&) {
    return x;
  }
};

struct AddResidual {
  static constexpr bool kAdds = true;

  template <typename X, typename Branch, typename Residual, int Length>
  static __device__ __forceinline__ Pack<X, Length> forward(
      const Pack<Branch, Length>& x, const Pack<Residual, Length>& residual) {
    using T = decltype(Compute<X>{} + Compute<Branch>{} + Compute<Residual>{});
    T sums[Length];
#pragma unroll
    for (int i = 0; i < Length; ++i) {
      sums[i] = add_with_subnormals(x.template get<T>(i), residual.template get<T>(i));
    }
    Pack<X, Length> pack;
    pack.set(sums);
    return pack;
  }
};

// Returns the gradient of the inputs from that of the normalized value, for element i of a pack.
template <typename T, typename DResidualOut, int Length>
__device__ __forceinline__ T gradient_of_inputs(T gradient,
                                                const Pack<DResidualOut, Length>& dresidual_out,
                                                int i) {
  if constexpr (kPresent<DResidualOut>) {
    return gradient + dresidual_out.template get<T>(i);
  } else {
    return gradient;
  }
}
