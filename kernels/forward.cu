// Forward of RMSNorm (Centered = false) and LayerNorm (Centered = true), for rows that fit in
// registers.
//
//   y = ((x - mean) * rstd) * (weight [+ 1 if ZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   [y = min(max(y, lower), upper) if Relu, its bitmask stored with the statistics: relu.cuh]
//
// Layout:    x and y are n_rows rows of n_cols elements, rows x_stride and y_stride elements apart;
//            weight and bias are one row; mean and rstd one value a row; bitmask (n_cols + 7) / 8
//            bytes a row. y may be x.
// Grid:      teams of RowThreads threads, one row each; blocks of BlockThreads threads, on grid.x.
// Traffic:   x read once, y written once; weight and bias from cache.
// Thread:    pack p of its row for p = rank, rank + RowThreads, ... (PacksPerThread of them).
// Order:     a thread's packs in turn, then the team's reduction: a function of n_cols and the
//            dtype of x, never of n_rows or alignment.
// Result:    the thread of rank 0 of a team writes the row's mean and rstd.
#include "affine.cuh"
#include "relu.cuh"
#include "statistics.cuh"
#include "team.cuh"

// The whole team's row in registers: element i of pack p is at column (p * RowThreads + rank) * Length + i.
template <bool Centered, int Vector, typename X, int Length, int PacksPerThread, int RowThreads,
          int BlockThreads>
__device__ __forceinline__ Statistics<Compute<X>> measure(Team<RowThreads, BlockThreads>& team,
                                                          Pack<X, Length> (&row)[PacksPerThread],
                                                          int n_cols, Compute<X> inv_n) {
  using T = Compute<X>;
  Statistics<T> statistics;
  // 1. A first mean; columns past the row's end are zero and add nothing.
  if constexpr (Centered) {
    T sum[1] = {0};
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
#pragma unroll
      for (int i = 0; i < Length; ++i) sum[0] += row[p].template get<T>(i);
    }
    team.template reduce<Sum>(sum);
    statistics.shift = sum[0] * inv_n;
    forget_conversions(row);
  }
  // 2. Sums of d and d*d.
  T sums[Centered ? 2 : 1] = {};
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    const int first = (p * RowThreads + team.rank) * Length;
#pragma unroll
    for (int i = 0; i < Length; ++i) {
      T d = row[p].template get<T>(i) - statistics.shift;
      if constexpr (Centered) {
        if (!inside<Vector>(first, i, n_cols)) d = 0;
        sums[1] += d;
      }
      sums[0] = fused_multiply_add(d, d, sums[0]);
    }
  }
  team.template reduce<Sum>(sums);
  finish<Centered>(statistics, sums[Centered ? 1 : 0], sums[0], inv_n);
  forget_conversions(row);
  return statistics;
}

template <typename X, typename Weight, typename Bias, typename Y, bool Centered, bool ZeroCentered,
          bool StoreStatistics, bool Relu, int RowThreads, int BlockThreads,
          int BlocksPerMultiprocessor, int PacksPerThread, int Vector>
__global__ __launch_bounds__(BlockThreads, BlocksPerMultiprocessor) void norm_forward(
    const X* x, long long x_stride, const Weight* weight, const Bias* bias, Y* y,
    long long y_stride, Compute<X>* mean, Compute<X>* rstd, unsigned char* bitmask,
    long long n_rows, long long row_length, Compute<X> inv_n, Compute<X> eps, Compute<X> lower,
    Compute<X> upper) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Team<RowThreads, BlockThreads> team;
  const int n_cols = static_cast<int>(row_length);
  const long long row = block_index() * team.kTeams + team.team;
  const bool active = row < n_rows;  // no early exit: a warp's lanes reduce together

  // 1. Read the row.
  Pack<X, kLength> packs[PacksPerThread];
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    const int first = (p * RowThreads + team.rank) * kLength;
    load<Vector>(packs[p], x + row * x_stride, first, active ? n_cols : 0);
  }

  // 2. Mean and variance; a row out of range is brought into it, exactly, and measured again.
  Statistics<T> statistics = measure<Centered, Vector>(team, packs, n_cols, inv_n);
  Scale<T> scale = scale_in_range(statistics.variance, eps);
  T unit = 1;
  if constexpr (kCanLeaveRange<X>) {
    const bool wild = !in_range(statistics.variance + eps);
    if (team.any(wild)) {
      T largest[1] = {0};
#pragma unroll
      for (int p = 0; p < PacksPerThread; ++p) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          largest[0] = larger(absolute(packs[p].template get<T>(i)), largest[0]);
        }
      }
      team.template reduce<Max>(largest);
      // Rows that only share the warp keep unit 1 and get the bits they had.
      if (wild) unit = Range<T>::unit(larger(largest[0], square_root(eps)));
      const T inv_unit = T(1) / unit;
#pragma unroll
      for (int p = 0; p < PacksPerThread; ++p) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          packs[p].set(i, packs[p].template get<T>(i) * inv_unit);
        }
      }
      statistics = measure<Centered, Vector>(team, packs, n_cols, inv_n);
      if (wild) scale = scale_in_unit(statistics.variance, eps, unit);
    }
  }

  // 3. Normalize and store.
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    const int first = (p * RowThreads + team.rank) * kLength;
    Pack<Weight, kLength> weights;
    Pack<Bias, kLength> biases;
    if constexpr (kPresent<Weight>) load<Vector>(weights, weight, first, n_cols);
    if constexpr (kPresent<Bias>) load<Vector>(biases, bias, first, n_cols);
    Pack<Y, kLength> normalized;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T deviated = deviation<Centered>(statistics, packs[p].template get<T>(i));
      T value = affine<ZeroCentered>(deviated * scale.of_row, weights, biases, i);
      if constexpr (Relu) {
        const bool strictly_inside = clamp(value, lower, upper);
        if (strictly_inside && inside<Vector>(first, i, n_cols)) bits |= 1u << i;
      }
      normalized.set(i, value);
    }
    store<Vector>(normalized, y + row * y_stride, first, active ? n_cols : 0);
    if constexpr (Relu && StoreStatistics) {
      static_assert(RowThreads * kLength >= 8, "a byte of the bitmask lies in neighbouring lanes");
      store_bits<kLength>(bits, bitmask + row * bitmask_bytes(n_cols), first, active ? n_cols : 0);
    }
  }

  // 4. Keep what backward needs.
  if constexpr (StoreStatistics) {
    if (active && team.rank == 0) {
      if constexpr (Centered) mean[row] = (statistics.shift + statistics.correction) * unit;
      rstd[row] = scale.rstd;
    }
  }
}
