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
__device__ __forceinline__ float hyperbolic_tangent(float a) { return tanhf(a); }
__device__ __forceinline__ double hyperbolic_tangent(double a) { return tanh(a); }
__device__ __forceinline__ float error_function(float a) { return erff(a); }
__device__ __forceinline__ double error_function(double a) { return erf(a); }
__device__ __forceinline__ double normal_cdf(double a) {
  return 0.5 * erfc(-a * 0.70710678118654752);
}

template <typename T>
__device__ __forceinline__ T sigmoid(T a) {
  return reciprocal_within_an_ulp(T(1) + exponential(-a));
}
// The sigmoids of a and of -a, for programs that need both. They have all but a product in common.
template <typename T>
__device__ __forceinline__ T sigmoid_of_pair(T a) {
  const T vanishing = exponential(-absolute(a));
  const T of_magnitude = reciprocal_within_an_ulp(T(1) + vanishing);
  return a < T(0) ? vanishing * of_magnitude : of_magnitude;
}
template <typename T>
__device__ __forceinline__ T sigmoid_of_negative(T a) {
  const T vanishing = exponential(-absolute(a));
  const T of_magnitude = reciprocal_within_an_ulp(T(1) + vanishing);
  return a < T(0) ? of_magnitude : vanishing * of_magnitude;
}
__device__ __forceinline__ float softplus(float a) {
  return log1pf(expf(-fabsf(a))) + (a > 0.0f ? a : a != a ? a : 0.0f);
}
__device__ __forceinline__ double softplus(double a) {
  return log1p(exp(-fabs(a))) + (a > 0.0 ? a : a != a ? a : 0.0);
}

// The distribution function of the normal distribution, within 8 units roundoff. For z = |a| / sqrt(2) and
// t = 1 / (1 + z / 2), erfc(z) = exp(-z * z) * t * polynomial(t): the coefficients are a Chebyshev fit over z up to 10.2,
// with a relative error of 2.3e-8. erfcf takes 15 instructions more.
__device__ __forceinline__ float normal_cdf(float a) {
  const float magnitude = absolute(a) > 16.0f ? 16.0f : absolute(a);
  const float t = reciprocal_within_an_ulp(fused_multiply_add(magnitude, 0.35355338f, 1.0f));
  float polynomial = 0.012931548f;
  polynomial = fused_multiply_add(polynomial, t, -0.126394972f);
  polynomial = fused_multiply_add(polynomial, t, 0.435397476f);
  polynomial = fused_multiply_add(polynomial, t, -0.677403510f);
  polynomial = fused_multiply_add(polynomial, t, 0.426370472f);
  polynomial = fused_multiply_add(polynomial, t, -0.100500531f);
  polynomial = fused_multiply_add(polynomial, t, 0.226112455f);
  polynomial = fused_multiply_add(polynomial, t, 0.238559380f);
  polynomial = fused_multiply_add(polynomial, t, 0.282863349f);
  polynomial = fused_multiply_add(polynomial, t, 0.282064348f);
  // The square is rounded, and the exponential magnifies what it lost.
  const float square = magnitude * magnitude;
  const float lost = fused_multiply_add(magnitude, magnitude, -square);
  const float bell = exponential(-0.5f * square);
  const float tail = 0.5f * t * polynomial * fused_multiply_add(bell, -0.5f * lost, bell);
  return a < 0.0f ? tail : 1.0f - tail;
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
