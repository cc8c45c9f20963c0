// The weight gradients from the blocks' partial sums: dweight[j] = sum over p of partials[0][p][j],
// dbias[j] = sum over p of partials[1][p][j] (partials[0] where there is no weight).
//
// Layout:    partials as backward.cu writes them, (gradients, n_partials, n_cols).
// Grid:      a block for each BlockThreads / Groups columns of each gradient, on grid.x.
// Traffic:   partials read once, gradients written once.
// Thread:    column thread % kColumns, partials thread / kColumns, + Groups, + 2 * Groups, ...
// Order:     a thread's partials in turn, then the groups in turn: fixed.
// Result:    thread c < kColumns writes column c of the block.
#include "types.cuh"

template <typename T, typename DWeight, typename DBias, int BlockThreads, int Groups>
__global__ __launch_bounds__(BlockThreads) void reduce_partials(const T* partials, DWeight* dweight,
                                                                DBias* dbias, long long n_partials,
                                                                long long n_cols) {
  constexpr int kAtOnce = 4;  // partials of a thread that are on their way
  constexpr int kColumns = BlockThreads / Groups;
  static_assert(kColumns % 32 == 0, "a warp is of one group");
  const long long tiles = (n_cols + kColumns - 1) / kColumns;
  const long long gradient = block_index() / tiles;
  const long long column = block_index() % tiles * kColumns + thread_index() % kColumns;
  const int group = thread_index() / kColumns;

  // 1. Each group sums its partials, once the kernel that writes them has ended.
  wait_for_previous_kernel();
  T sum = 0;
  if (column < n_cols) {
    const T* source = partials + gradient * n_partials * n_cols + column;
#pragma unroll 1
    for (long long first = group; first < n_partials; first += kAtOnce * Groups) {
      T values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const long long p = first + i * Groups;
        values[i] = p < n_partials ? source[p * n_cols] : T(0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += values[i];
    }
  }
  T* sums = static_cast<T*>(dynamic_shared_memory());
  sums[thread_index()] = sum;
  block_barrier();

  // 2. The first group sums them all.
  if (group == 0 && column < n_cols) {
    for (int other = 1; other < Groups; ++other) sum += sums[other * kColumns + thread_index()];
    if (kPresent<DWeight> && gradient == 0) {
      if constexpr (kPresent<DWeight>) dweight[column] = convert<DWeight>(sum);
    } else {
      if constexpr (kPresent<DBias>) dbias[column] = convert<DBias>(sum);
    }
  }
}
