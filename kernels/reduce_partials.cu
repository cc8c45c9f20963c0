// The weight gradients from the blocks' partial sums: dweight[j] = sum over p of partials[0][p][j],
// dbias[j] = sum over p of partials[1][p][j] (partials[0] without a weight).
//
// Layout:    partials as backward_pipelined.cu writes them, (gradients, n_partials, partials_stride(n_cols));
//            16-byte aligned.
// Grid:      a block for each kColumns columns of each gradient and, if kGrouped, each vector, on grid.x.
// Traffic:   partials read once, gradients written once and, if kAccumulates, read once.
// Thread:    columns kWidth * (thread % kLanes) on, as many as fill 16 bytes, of partials
//            thread / kLanes, + Groups, + 2 * Groups, ...
// Order:     a thread's partials in turn, then a butterfly over the groups of its warp, then the
//            warps, or groups of more than a warp, in turn.
// Result:    thread t < kLanes writes its columns, by accesses of kVector or, if kGiven, one by one.
#include "gradient.cuh"

// At least 4 blocks a multiprocessor. By itself, ptxas aims at 8 and waits in between.
template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, 4)
    reduce_partials(const __grid_constant__ ReductionArguments<Op> args) {
  using T = Compute<typename Op::X>;
  using DWeight = typename Op::DWeight;
  const long long n_cols = args.n_cols;
  constexpr int kAtOnce = 5;  // partials of a thread in flight
  constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  constexpr int kLanes = Layout::kBlockThreads / Layout::kGroups;
  constexpr int kColumns = kLanes * kWidth;
  constexpr int kWarps = Layout::kBlockThreads / 32;
  constexpr int kSums =
      Layout::kGroups < kWarps ? Layout::kGroups : kWarps;  // of a column, in shared memory
  const long long tiles = (n_cols + kColumns - 1) / kColumns;
  const unsigned blocks =
      (kPresent<DWeight> + kPresent<typename Op::DBias>)*static_cast<unsigned>(tiles);
  const long long vector = Op::kGrouped ? static_cast<unsigned>(block_index()) / blocks : 0;
  const long long block =
      Op::kGrouped ? static_cast<unsigned>(block_index()) % blocks : block_index();
  const long long tile = block - (block < tiles ? 0 : tiles);
  const bool is_first = block < tiles;
  const SumOfPartials sum_of = sum_of_partials<Op>(args, vector, is_first);
  if (sum_of.n_partials < 0) return;
  const int lane = thread_index() % kLanes, group = thread_index() / kLanes;
  const long long column = tile * kColumns + lane * kWidth;
  const int n = static_cast<int>(column + kWidth < n_cols ? kWidth : n_cols - column);

  // 1. Each group sums its partials, once the kernel that writes them has ended.
  wait_for_previous_kernel();
  T sum[kWidth] = {};
  // Some kernels leave the memory behind a row's end unwritten.
  const bool whole = Layout::kVector == kWidth || n == kWidth;
  const long long stride = partials_stride(n_cols), step = Layout::kGroups * stride;
  const T* source = args.partials + (sum_of.first + group) * stride + column;
#pragma unroll 1
  for (int left = static_cast<int>(sum_of.n_partials) - group; left > 0;
       left -= kAtOnce * Layout::kGroups) {
    Pack<T, kWidth> values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      load<kWidth>(values[i], source + i * step, 0, whole && left > i * Layout::kGroups ? n : 0);
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        load<1>(values[i], source + i * step, 0, left > i * Layout::kGroups ? n : 0);
      }
    }
    source += kAtOnce * step;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += values[i].template get<T>(k);
    }
  }

  // 2. The groups of a warp are added, then the warps, or the groups of several warps.
#pragma unroll
  for (int distance = 16; distance >= kLanes; distance /= 2) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += shuffle_xor(sum[k], distance);
  }
  Pack<T, kWidth> pack;
  pack.set(sum);
  T* sums = static_cast<T*>(dynamic_shared_memory()) + lane * kWidth;
  if (thread_index() % 32 < kLanes) {
    const int row = kLanes < 32 ? thread_index() / 32 : group;
    store<kWidth>(pack, sums, row * kColumns, kSums * kColumns);
  }
  block_barrier();
  if (group > 0) return;
#pragma unroll
  for (int row = 1; row < kSums; ++row) {
    load<kWidth>(pack, sums, row * kColumns, kSums * kColumns);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[k] += pack.template get<T>(k);
  }
  // Each thread works by itself, as those of the other groups have left.
  if (kPresent<DWeight> && is_first) {
    write_sums<Op, Layout::kVector>(sum, args.dweight + sum_of.target + column, 0, n);
  } else {
    write_sums<Op, Layout::kVector>(sum, args.dbias + sum_of.target + column, 0, n);
  }
}
