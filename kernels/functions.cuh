// The operations of the expressions of cupynorm.fuse (cupynorm/_expressions.py), as C++ that a prologue or an epilogue
// calls. NaN goes through all of them, as through NumPy's.
#pragma once

#include "types.cuh"

template <typename T>
__device__ __forceinline__ T infinity() {
  return static_cast<T>(float_from_bits(0x7f800000u));
}
template <typename T>
__device__ __forceinline__ T not_a_number() {
  return static_cast<T>(float_from_bits(0x7fc00000u));
}

__device__ __forceinline__ float exponential(float a) { return expf(a); }
__device__ __forceinline__ double exponential(double a) { return exp(a); }
__device__ __forceinline__ float logarithm(float a) { return logf(a); }
__device__ __forceinline__ double logarithm(double a) { return log(a); }
__device__ __forceinline__ float power(float a, float b) { return powf(a, b); }
__device__ __forceinline__ double power(double a, double b) { return pow(a, b); }
// Within 12 units roundoff. tanhf takes a third more instructions.
__device__ __forceinline__ float hyperbolic_tangent(float a) {
  const float square = a * a;
  float polynomial = 0.01643758f;
  polynomial = fused_multiply_add(polynomial, square, -0.05267181f);
  polynomial = fused_multiply_add(polynomial, square, 0.13320725f);
  polynomial = fused_multiply_add(polynomial, square, -0.33332947f);
  const float small = a * fused_multiply_add(square, polynomial, 1.0f);  // -0 gives -0
  const float of_sum = reciprocal_within_an_ulp(exp2f(2.88539008f * a) + 1.0f);
  return absolute(a) < 0.55f ? small : fused_multiply_add(-2.0f, of_sum, 1.0f);
}
__device__ __forceinline__ double hyperbolic_tangent(double a) { return tanh(a); }
__device__ __forceinline__ float error_function(float a) { return erff(a); }
__device__ __forceinline__ double error_function(double a) { return erf(a); }

// exp(-|a|), within 10 units roundoff. A factor makes up for what the rounding of the product loses. expf takes three
// more instructions.
__device__ __forceinline__ float decay(float a) {
  const float magnitude = at_most(absolute(a), 128.0f);  // inf - inf would be NaN
  const float exponent = -1.44269504f * magnitude;
  const float lost = fused_multiply_add(exponent, -0.69314718f, -magnitude);
  const float close = exp2f(exponent);
  return fused_multiply_add(close, lost, close);
}
__device__ __forceinline__ double decay(double a) { return exp(-absolute(a)); }

template <typename T>
__device__ __forceinline__ T sigmoid(T a) {
  return reciprocal_within_an_ulp(T(1) + exponential(-a));
}
// The sigmoids of a and of -a, for programs that need both. They have all but a product in common.
template <typename T>
__device__ __forceinline__ T sigmoid_of_pair(T a) {
  const T vanishing = decay(a);
  const T of_magnitude = reciprocal_within_an_ulp(T(1) + vanishing);
  return a < T(0) ? vanishing * of_magnitude : of_magnitude;
}
template <typename T>
__device__ __forceinline__ T sigmoid_of_negative(T a) {
  const T vanishing = decay(a);
  const T of_magnitude = reciprocal_within_an_ulp(T(1) + vanishing);
  return a < T(0) ? of_magnitude : vanishing * of_magnitude;
}
__device__ __forceinline__ float softplus(float a) {
  return log1pf(decay(a)) + (a > 0.0f ? a : a != a ? a : 0.0f);
}
__device__ __forceinline__ double softplus(double a) {
  return log1p(decay(a)) + (a > 0.0 ? a : a != a ? a : 0.0);
}

// exp(-a * a / 2). The square is rounded. Far out this counts as much as a rounding of a.
__device__ __forceinline__ float bell(float a) { return exp2f(-0.72134752f * (a * a)); }
__device__ __forceinline__ double bell(double a) { return exp(-0.5 * (a * a)); }
// The density and the distribution function of the normal distribution. The latter is bell(a) * t * polynomial(t) at
// -|a|, with t = 1 / (1 + 0.4025 * |a|). The coefficients are a fit over |a| up to 13.6. The result is off by up to 10
// units roundoff of the function and of |a| times the density (notes.md#fused-norms).
template <typename T>
__device__ __forceinline__ T normal_pdf(T a) {
  return T(0.3989422804014327) * bell(a);
}
__device__ __forceinline__ float normal_cdf(float a) {
  const float t = reciprocal_within_an_ulp(fused_multiply_add(absolute(a), 0.4025f, 1.0f));
  float polynomial = -0.0377886258f;
  polynomial = fused_multiply_add(polynomial, t, 0.189514324f);
  polynomial = fused_multiply_add(polynomial, t, -0.344841182f);
  polynomial = fused_multiply_add(polynomial, t, 0.212922409f);
  polynomial = fused_multiply_add(polynomial, t, 0.0108496612f);
  polynomial = fused_multiply_add(polynomial, t, 0.149873152f);
  polynomial = fused_multiply_add(polynomial, t, 0.15881227f);
  polynomial = fused_multiply_add(polynomial, t, 0.160657972f);
  const float tail = bell(a) * (t * polynomial);
  return a < 0.0f ? tail : 1.0f - tail;
}
__device__ __forceinline__ double normal_cdf(double a) {
  return 0.5 * erfc(-a * 0.70710678118654752);
}

template <typename T>
__device__ __forceinline__ T sign(T a) {
  return a > T(0) ? T(1) : a < T(0) ? T(-1) : a;
}
template <typename T>
__device__ __forceinline__ T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}
template <typename T>
__device__ __forceinline__ T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}

// A value as a reader of a stored one sees it.
template <typename Stored, typename T>
__device__ __forceinline__ T rounded_to(T value) {
  return convert<T>(convert<Stored>(value));
}
