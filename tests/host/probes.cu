// The primitives of device.cuh by themselves: element i of results from element i of values.
#include "types.cuh"

template <typename From, typename To>
__global__ void convert_all(const From* values, To* results, long long n) {
  for (long long i = thread_index(); i < n; i += 32) results[i] = convert<To>(values[i]);
}

template <typename T>
__global__ void reciprocal_square_roots(const T* values, T* results, long long n) {
  for (long long i = thread_index(); i < n; i += 32) results[i] = reciprocal_square_root(values[i]);
}
