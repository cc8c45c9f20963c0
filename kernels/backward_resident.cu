// Backward of few rows, each held in registers; formulas, names and the bits of dx as in backward.cu.
//
// What few rows wait for is latency: of memory and, with empty caches, of instructions. So each has a
// team, and nothing is copied, taken in turn or kept for a next row.
//
// Layout:    as backward.cu; dweight and dbias hold a row for each row of x, so that those of a lone
//            row are the weight gradients; of several they are partials for reduce_partials.cu.
// Grid:      a cluster of ClusterBlocks blocks of RowThreads threads a row, on grid.x.
// Traffic:   x, dy, bitmask and weight read once, dx, dweight and dbias written once, for each row.
// Thread:    pack p of its block's columns for p = rank, rank + RowThreads, ... (PacksPerThread of
//            them).
// Order:     dx: as backward.cu.
// Result:    dx; dweight and dbias.
#include "gradient.cuh"
#include "relu.cuh"
#include "team.cuh"

// Stores a pack of values to elements `first` ... of a row of n, if that is present.
template <int Vector, typename T, typename Out, int Length>
__device__ __forceinline__ void write(const T (&values)[Length], Out* row, int first, int n) {
  if constexpr (kPresent<Out>) {
    Pack<Out, Length> pack;
    pack.set(values);
    store<Vector>(pack, row, first, n);
  }
}

template <typename X, typename DY, typename Weight, typename DWeight, typename DBias, bool Centered,
          bool ZeroCentered, bool Bitmask, int ClusterBlocks, int RowThreads, int PacksPerThread,
          bool Full, int Vector>
__global__ __launch_bounds__(RowThreads, 1) void norm_backward_resident(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask, X* dx,
    long long dx_stride, DWeight* dweight, DBias* dbias, long long row_length, Compute<X> inv_n) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Team<RowThreads, RowThreads, ClusterBlocks> team;
  constexpr int kColumns = ClusterBlocks * RowThreads * PacksPerThread * kLength;
  int n_cols = Full ? kColumns : static_cast<int>(row_length);
  const auto first_column = [&](int p) {
    return team.template first_column<PacksPerThread, kLength>(p);
  };

  // 1. The row.
  let_next_kernel_start();
  const long long row = block_index() / ClusterBlocks;
  Pack<X, kLength> row_x[PacksPerThread];
  Pack<DY, kLength> row_dy[PacksPerThread];
  Pack<Weight, kLength> weights[PacksPerThread];
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    load<Vector>(row_x[p], x + row * x_stride, first_column(p), n_cols);
    load<Vector>(row_dy[p], dy + row * dy_stride, first_column(p), n_cols);
    load<Vector>(weights[p], weight, first_column(p), n_cols);
  }
  const T row_rstd = rstd[row];
  const Centring<Centered, T> centring(Centered ? mean[row] : T(0), row_rstd);
  if constexpr (Bitmask) {
    const unsigned char* bytes = bitmask + row * bitmask_bytes(n_cols);
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      keep(row_dy[p], load_bits(bytes, first_column(p), n_cols), first_column(p));
    }
  }

  // 2. Its sums.
  T sums[kGradientSums<Centered>] = {};
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    add_to_sums<ZeroCentered, Vector>(sums, centring, row_x[p], row_dy[p], weights[p],
                                      first_column(p), n_cols);
  }
  team.template reduce<Sum>(sums);
  const RowMeans<Centered, T> means(sums, inv_n);

  // 3. dx and the weight gradients.
  if constexpr (!Full) make_opaque(n_cols);
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    T of_x[kLength], of_weight[kLength], of_bias[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T xhat = centring.h_of(row_x[p].template get<T>(i)) - means.h;
      of_bias[i] = row_dy[p].template get<T>(i);
      of_weight[i] = of_bias[i] * xhat;
      of_x[i] = dx_of<ZeroCentered>(of_bias[i], xhat, weights[p], i, means, row_rstd);
    }
    write<Vector>(of_x, dx + row * dx_stride, first_column(p), n_cols);
    write<Vector>(of_weight, dweight + row * n_cols, first_column(p), n_cols);
    write<Vector>(of_bias, dbias + row * n_cols, first_column(p), n_cols);
  }
}
