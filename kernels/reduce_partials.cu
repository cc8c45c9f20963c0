// The weight gradients from the blocks' partial sums: dweight[j] = sum over p of partials[0][p][j],
// dbias[j] = sum over p of partials[1][p][j] (partials[0] where there is no weight).
//
// Layout:    partials as backward.cu writes them, (gradients, n_partials, n_cols).
// Grid:      a block for each 32 columns of each gradient, on grid.x.
// Traffic:   partials read once, gradients written once.
// Thread:    column = thread % 32, partials thread / 32, + Groups, + 2 * Groups, ...
// Order:     a thread's partials in turn, then the groups in turn: fixed.
// Result:    thread c < 32 writes column c of the block.
#include "types.cuh"

template <typename T, typename DWeight, typename DBias, int Groups>
__global__ __launch_bounds__(32 * Groups) void reduce_partials(const T* partials, DWeight* dweight,
                                                               DBias* dbias, long long n_partials,
                                                               long long n_cols) {
  const long long tiles = (n_cols + 31) / 32;
  const long long gradient = block_index() / tiles;
  const long long column = block_index() % tiles * 32 + thread_index() % 32;
  const int group = thread_index() / 32;

  // 1. Each group sums its partials, once the kernel that writes them has ended.
  wait_for_previous_kernel();
  T sum = 0;
  if (column < n_cols) {
    const T* source = partials + gradient * n_partials * n_cols + column;
#pragma unroll 4
    for (long long p = group; p < n_partials; p += Groups) sum += source[p * n_cols];
  }
  T* sums = static_cast<T*>(dynamic_shared_memory());
  sums[thread_index()] = sum;
  block_barrier();

  // 2. The first warp sums the groups.
  if (group == 0 && column < n_cols) {
    for (int other = 1; other < Groups; ++other) sum += sums[other * 32 + thread_index()];
    if (kPresent<DWeight> && gradient == 0) {
      if constexpr (kPresent<DWeight>) dweight[column] = convert<DWeight>(sum);
    } else {
      if constexpr (kPresent<DBias>) dbias[column] = convert<DBias>(sum);
    }
  }
}
