// Backward of RMSNorm and LayerNorm for rows of any length; formulas and names as in backward_pipelined.cu.
//
// Two kernels. norm_backward_coefficients reduces each row to what dx needs of it:
//   recentre = mean(h), mean_of_g = mean(g), mean_of_g_xhat = mean(g * xhat),
//   h = (x - mean) * rstd, xhat = h - recentre;
// norm_backward_columns then walks down the columns, writes dx and sums the weight gradients.
//
// Layout:    as backward_pipelined.cu; coefficients are (4, n_rows) in the order above, RMSNorm uses the last two. The
//            fourth is 1 of wild rows (gradient.cuh), whose means of g and of g * xhat are multiplied by
//            kIntoRange, else 0.
// Traffic:   x, dy and bitmask read twice, dx written once, partials written once, and read and written
//            once more for each further kTurns rows of a chunk.
#include "affine.cuh"
#include "gradient.cuh"
#include "relu.cuh"
#include "stream.cuh"
#include "team.cuh"

// Grid:      a cluster of ClusterBlocks blocks of BlockThreads threads a row, on grid.x.
// Thread:    t of the cluster's T has packs t, t + T, ... of the row.
// Order:     a thread's packs in turn, compensated from pack to pack; then the cluster's reduction.
// Result:    thread 0 of a cluster's first block writes the row's coefficients.
template <typename X, typename DY, typename Weight, bool Centered, bool ZeroCentered, bool Bitmask,
          int ClusterBlocks, int BlockThreads, int Vector>
__global__ __launch_bounds__(BlockThreads, 1) void norm_backward_coefficients(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask,
    Compute<X>* coefficients, long long n_rows, long long n_cols, Compute<X> inv_n) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Team<BlockThreads, BlockThreads, ClusterBlocks> team;
  const long long row = block_index() / ClusterBlocks;
  const T row_mean = Centered ? mean[row] : T(0);
  const T row_rstd = rstd[row];

  CompensatedSum<T> sum_of_g_h, sum_of_g, sum_of_h;
  for_each_pack<ClusterBlocks, BlockThreads, kLength>(n_cols, [&](long long first) {
    Pack<X, kLength> pack_x;
    Pack<DY, kLength> pack_dy;
    Pack<Weight, kLength> weights;
    load<Vector, false>(pack_x, x + row * x_stride, first, n_cols);
    load<Vector, false>(pack_dy, dy + row * dy_stride, first, n_cols);
    if constexpr (Bitmask) {
      keep(pack_dy, load_bits(bitmask + row * bitmask_bytes(n_cols), first, n_cols), first);
    }
    load<Vector, false>(weights, weight, first, n_cols);
    T of_g_h = 0, of_g = 0, of_h = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      // Past the end x is 0, too: one mean for each access.
      const T mean_inside = inside<Vector>(first, i, n_cols) ? row_mean : T(0);
      const T h = (pack_x.template get<T>(i) - mean_inside) * row_rstd;
      T g = pack_dy.template get<T>(i);
      if constexpr (kPresent<Weight>) g *= weight_at<ZeroCentered, T>(weights, i);
      of_g_h = fused_multiply_add(g, h, of_g_h);
      if constexpr (Centered) {
        of_g += g;
        of_h += h;
      }
    }
    sum_of_g_h.add(of_g_h);
    if constexpr (Centered) {
      sum_of_g.add(of_g);
      sum_of_h.add(of_h);
    }
  });
  T sums[kGradientSums<Centered>] = {sum_of_g_h.total()};
  if constexpr (Centered) {
    sums[1] = sum_of_g.total();
    sums[2] = sum_of_h.total();
  }
  team.meet();
  team.template reduce<Sum>(sums);
  const auto store_means = [&](const auto& means, auto into_range, T is_wild_row) {
    if (team.block > 0 || team.rank > 0) return;
    if constexpr (Centered) {
      coefficients[row] = static_cast<T>(means.h);
      coefficients[n_rows + row] = static_cast<T>(means.g * into_range);
    }
    coefficients[2 * n_rows + row] = static_cast<T>(means.g_xhat * into_range);
    coefficients[3 * n_rows + row] = is_wild_row;
  };
  const RowMeans<Centered, T> means(sums, T(1), inv_n);  // of h itself: no significand is left
  if constexpr (kSame<T, float>) {
    if (is_wild(means)) {
      const WildRow<ZeroCentered, Centered, Bitmask, long long, X, DY, Weight> again = {
          dy + row * dy_stride,
          x + row * x_stride,
          weight,
          bitmask + row * bitmask_bytes(n_cols),
          nullptr,
          row_mean,
          row_rstd};
      double wild_sums[kGradientSums<Centered>] = {};
      constexpr long long kStep = static_cast<long long>(ClusterBlocks) * BlockThreads * kLength;
      again.sum(wild_sums, thread_in_cluster<ClusterBlocks, BlockThreads>() * kLength, kStep,
                n_cols);
      add_up_wild(team, wild_sums);
      store_means(RowMeans<Centered, double>(wild_sums, 1.0, inv_n), kIntoRange, T(1));
      return;
    }
  }
  store_means(means, T(1), T(0));
}

// Grid:      block_index = chunk * tiles + tile: tiles of BlockThreads packs cover the columns; chunk c
//            of n_partials takes rows c, c + n_partials, ...
// Thread:    one pack of columns, down the rows of its chunk, each prefetched.
// Order:     up to kTurns rows in turn, then such sums in turn, then reduce_partials.cu.
// Result:    partials, of chunk c in row c.
template <typename X, typename DY, typename Weight, bool Centered, bool ZeroCentered, bool DBias,
          bool Bitmask, int BlockThreads, int Vector>
__global__ __launch_bounds__(BlockThreads, 2) void norm_backward_columns(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask,
    const Compute<X>* coefficients, X* dx, long long dx_stride, Compute<X>* partials,
    long long n_partials, long long n_rows, long long n_cols) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr long long kTile = static_cast<long long>(BlockThreads) * kLength;
  const long long tiles = (n_cols + kTile - 1) / kTile;
  const long long chunk = block_index() / tiles;
  const long long first = block_index() % tiles * kTile + thread_index() * kLength;

  Pack<Weight, kLength> weights;
  load<Vector, false>(weights, weight, first, n_cols);
  T dweight[kLength] = {}, dbias[kLength] = {};
  // Moves one gradient from registers to this chunk's partials.
  bool flushed = false;
  const auto flush = [&](T(&gradient)[kLength], long long index) {
    T* target = partials + (index * n_partials + chunk) * partials_stride(n_cols);
    Pack<T, kLength> sums;
    load<kLength>(sums, target, first, flushed ? n_cols : 0);
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      sums.set(i, sums.template get<T>(i) + gradient[i]);
      gradient[i] = 0;
    }
    store<kLength>(sums, target, first, n_cols);
  };
  const auto flush_all = [&] {
    if constexpr (kPresent<Weight>) flush(dweight, 0);
    if constexpr (DBias) flush(dbias, kPresent<Weight> ? 1 : 0);
    flushed = true;
  };
  Pack<X, kLength> next_x;
  Pack<DY, kLength> next_dy;
  unsigned next_bits = 0;
  const auto load_next = [&](long long row) {
    const long long n = row < n_rows ? n_cols : 0;
    load<Vector, false>(next_x, x + row * x_stride, first, n);
    load<Vector, false>(next_dy, dy + row * dy_stride, first, n);
    if constexpr (Bitmask) {
      next_bits = load_bits(bitmask + row * bitmask_bytes(n_cols), first, n);
    }
  };

  load_next(chunk);
  int turn = 0;
  for (long long row = chunk; row < n_rows; row += n_partials) {
    const Pack<X, kLength> row_x = next_x;
    Pack<DY, kLength> row_dy = next_dy;
    if constexpr (Bitmask) keep(row_dy, next_bits, first);
    load_next(row + n_partials);
    const T row_mean = Centered ? mean[row] : T(0);
    const T row_rstd = rstd[row];
    const T recentre = Centered ? coefficients[row] : T(0);
    const T mean_of_g = Centered ? coefficients[n_rows + row] : T(0);
    const T mean_of_g_xhat = coefficients[2 * n_rows + row];
    Pack<X, kLength> gradient;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T upstream = row_dy.template get<T>(i);
      T g = upstream;
      if constexpr (kPresent<Weight>) g *= weight_at<ZeroCentered, T>(weights, i);
      T xhat = (row_x.template get<T>(i) - row_mean) * row_rstd;
      if constexpr (Centered) xhat -= recentre;
      const T projected = fused_multiply_add(-xhat, mean_of_g_xhat, g - mean_of_g);
      gradient.set(i, projected * row_rstd);
      dweight[i] = fused_multiply_add(upstream, xhat, dweight[i]);
      dbias[i] += upstream;
    }
    bool wild = false;
    if constexpr (kSame<T, float>) wild = coefficients[3 * n_rows + row] != 0;
    if (wild) {
      RowMeans<Centered, double> means;
      means.h = recentre;
      means.g = mean_of_g / kIntoRange;
      means.g_xhat = mean_of_g_xhat / kIntoRange;
      const WildRow<ZeroCentered, Centered, Bitmask, long long, X, DY, Weight> again = {
          dy + row * dy_stride,
          x + row * x_stride,
          weight,
          bitmask + row * bitmask_bytes(n_cols),
          dx + row * dx_stride,
          static_cast<float>(row_mean),
          static_cast<float>(row_rstd)};
      again.write(means, first, kTile, first + kLength < n_cols ? first + kLength : n_cols);
    } else {
      store<Vector, false, false>(gradient, dx + row * dx_stride, first, n_cols);
    }
    if (++turn == kTurns) {
      flush_all();
      turn = 0;
    }
  }
  if (turn > 0 || !flushed) flush_all();  // of a chunk without rows, zeros
}
