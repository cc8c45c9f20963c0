// What the streaming kernels share: the walk over a row that no thread can hold, and sums that stay
// exact to the last bits however long it is.
#pragma once

#include "types.cuh"

// Calls visit(first column) for each pack of a row that this thread owns; with WholeWarps, also for
// packs past the row's end as long as another lane of the warp has one inside it.
template <int Vector, int BlockThreads, int Length, bool WholeWarps = false, typename Visit>
__device__ __forceinline__ void for_each_pack(long long n_cols, Visit visit) {
  constexpr long long kStep = static_cast<long long>(BlockThreads) * Length;
  const int ahead = WholeWarps ? thread_index() % 32 * Length : 0;  // of the warp's first lane
#pragma unroll(WholeWarps ? 1 : 2)
  for (long long first = static_cast<long long>(thread_index()) * Length; first - ahead < n_cols;
       first += kStep) {
    visit(first);
  }
}

// A sum that carries the rounding error of each addition along (Kahan, CACM 8(1), 1965).
template <typename T>
struct CompensatedSum {
  T sum = 0;
  T lost = 0;

  __device__ __forceinline__ void add(T value) {
    const T corrected = value - lost;
    const T next = sum + corrected;
    lost = (next - sum) - corrected;
    sum = next;
  }
  // Without the correction where it is inf - inf: the sum itself says inf or NaN as IEEE would.
  __device__ __forceinline__ T total() const { return lost == lost ? sum - lost : sum; }
};
