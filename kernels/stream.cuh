// What the streaming kernels share: the walk over a row that no thread can hold, and sums that stay
// exact to the last bits however long the row is.
#pragma once

#include "types.cuh"

// This thread among those of its cluster. It is computed at each use, since a kept one takes a
// register.
template <int ClusterBlocks, int BlockThreads>
__device__ __forceinline__ int thread_in_cluster() {
  return (ClusterBlocks > 1 ? block_in_cluster() * BlockThreads : 0) + thread_index();
}

// Calls visit(first column) for each pack of a row that this thread owns.
template <int ClusterBlocks, int BlockThreads, int Length, typename Visit>
__device__ __forceinline__ void for_each_pack(long long n_cols, Visit visit) {
  constexpr long long kStep = static_cast<long long>(ClusterBlocks) * BlockThreads * Length;
  const long long thread = thread_in_cluster<ClusterBlocks, BlockThreads>();
#pragma unroll 2
  for (long long first = thread * Length; first < n_cols; first += kStep) {
    visit(first);
  }
}

// Calls visit(first column, columns) for each tile of a row, in all threads, from the row's start
// or from its end. Two copies of visit are inlined. In one of them the compiler knows that the tile
// is whole.
template <int Columns, bool Backwards, typename Visit>
__device__ __forceinline__ void for_each_tile(long long n_cols, Visit visit) {
  const long long end = n_cols / Columns * Columns;
  const int rest = static_cast<int>(n_cols - end);
  if constexpr (Backwards) {
    if (rest > 0) visit(end, rest);
#pragma unroll 1
    for (long long base = end - Columns; base >= 0; base -= Columns) {
      visit(base, Columns);
    }
  } else {
#pragma unroll 1
    for (long long base = 0; base < end; base += Columns) visit(base, Columns);
    if (rest > 0) visit(end, rest);
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
    // For an infinity, inf - inf would be lost. The sum itself says inf or NaN, as IEEE 754 would.
    if (lost != lost) lost = 0;
    sum = next;
  }
  __device__ __forceinline__ T total() const { return sum - lost; }
};

// Sums of a thread's packs. If Compensated, each pack's are taken, so that they are not lost in
// those of all, and given back at the end.
template <typename T, int Count, bool Compensated>
struct SumsOfPacks {
  CompensatedSum<T> totals[Compensated ? Count : 1];

  __device__ __forceinline__ void take(T (&sums)[Count]) {
    if constexpr (Compensated) {
#pragma unroll
      for (int k = 0; k < Count; ++k) {
        totals[k].add(sums[k]);
        sums[k] = 0;
      }
    }
  }
  __device__ __forceinline__ void give(T (&sums)[Count]) const {
    if constexpr (Compensated) {
#pragma unroll
      for (int k = 0; k < Count; ++k) sums[k] = totals[k].total();
    }
  }
};

// A column of a row: an int for one that a team holds, since addresses then take fewer registers.
template <bool Streams>
struct ColumnOf {
  using type = int;
};
template <>
struct ColumnOf<true> {
  using type = long long;
};
