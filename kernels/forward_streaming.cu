// Forward of RMSNorm and LayerNorm for rows of any length: as forward.cu, but the row is read again
// for each step instead of being held in registers.
//
// Layout:    as forward.cu.
// Grid:      one block of BlockThreads threads a row, on grid.x.
// Traffic:   x read twice (RMSNorm) or three times (LayerNorm), once more for its largest element
//            and once for each measurement where a row is out of range; y written once.
// Thread:    packs rank, rank + BlockThreads, ... of the row.
// Order:     a thread's packs in turn, compensated from pack to pack; then the block's reduction.
// Result:    thread 0 writes the row's mean and rstd.
#include "affine.cuh"
#include "relu.cuh"
#include "statistics.cuh"
#include "stream.cuh"
#include "team.cuh"

template <bool Centered, int Vector, typename X, int BlockThreads>
__device__ __forceinline__ Statistics<Compute<X>> measure(Team<BlockThreads, BlockThreads>& block,
                                                          const X* row, long long n_cols,
                                                          Compute<X> inv_n, Compute<X> inv_unit) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Statistics<T> statistics;
  // 1. A first mean.
  if constexpr (Centered) {
    CompensatedSum<T> sum;
    for_each_pack<Vector, BlockThreads, kLength>(n_cols, [&](long long first) {
      Pack<X, kLength> pack;
      load<Vector>(pack, row, first, n_cols);
      T of_pack = 0;
#pragma unroll
      for (int i = 0; i < kLength; ++i) of_pack += pack.template get<T>(i) * inv_unit;
      sum.add(of_pack);
    });
    T total[1] = {sum.total()};
    block.template reduce<Sum>(total);
    statistics.shift = total[0] * inv_n;
  }
  // 2. Sums of d and d*d.
  CompensatedSum<T> sum, sum_of_squares;
  for_each_pack<Vector, BlockThreads, kLength>(n_cols, [&](long long first) {
    Pack<X, kLength> pack;
    load<Vector>(pack, row, first, n_cols);
    T of_pack = 0, squares_of_pack = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      T d = pack.template get<T>(i) * inv_unit - statistics.shift;
      if (Centered && !inside<Vector>(first, i, n_cols)) d = 0;
      of_pack += d;
      squares_of_pack = fused_multiply_add(d, d, squares_of_pack);
    }
    if constexpr (Centered) sum.add(of_pack);
    sum_of_squares.add(squares_of_pack);
  });
  T totals[2] = {sum.total(), sum_of_squares.total()};
  block.template reduce<Sum>(totals);
  finish<Centered>(statistics, totals[0], totals[1], inv_n);
  return statistics;
}

template <typename X, typename Weight, typename Bias, typename Y, bool Centered, bool ZeroCentered,
          bool StoreStatistics, bool Relu, int BlockThreads, int Vector>
__global__ __launch_bounds__(BlockThreads, 1) void norm_forward_streaming(
    const X* x, long long x_stride, const Weight* weight, const Bias* bias, Y* y,
    long long y_stride, Compute<X>* mean, Compute<X>* rstd, unsigned char* bitmask,
    long long n_rows, long long n_cols, Compute<X> inv_n, Compute<X> eps, Compute<X> lower,
    Compute<X> upper) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Team<BlockThreads, BlockThreads> block;
  const long long row_index = block_index();
  const X* row = x + row_index * x_stride;
  Y* normalized_row = y + row_index * y_stride;

  // 1. Mean and variance; a row out of range is measured again in a unit that brings it into it.
  T unit = 1, inv_unit = 1;
  Statistics<T> statistics = measure<Centered, Vector>(block, row, n_cols, inv_n, inv_unit);
  Scale<T> scale = scale_in_range(statistics.variance, eps);
  if constexpr (kCanLeaveRange<X>) {
    if (!in_range(statistics.variance + eps)) {
      T largest[1] = {0};
      for_each_pack<Vector, BlockThreads, kLength>(n_cols, [&](long long first) {
        Pack<X, kLength> pack;
        load<Vector>(pack, row, first, n_cols);
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          largest[0] = larger(absolute(pack.template get<T>(i)), largest[0]);
        }
      });
      block.template reduce<Max>(largest);
      unit = Range<T>::unit(larger(largest[0], square_root(eps)));
      inv_unit = T(1) / unit;
      statistics = measure<Centered, Vector>(block, row, n_cols, inv_n, inv_unit);
      scale = scale_in_unit(statistics.variance, eps, unit);
    }
  }

  // 2. Normalize and store. In place, a pack is read and written by the same thread.
  constexpr bool kStoreBits = Relu && StoreStatistics;
  for_each_pack<Vector, BlockThreads, kLength, kStoreBits>(n_cols, [&](long long first) {
    Pack<X, kLength> pack;
    Pack<Weight, kLength> weights;
    Pack<Bias, kLength> biases;
    load<Vector>(pack, row, first, n_cols);
    if constexpr (kPresent<Weight>) load<Vector>(weights, weight, first, n_cols);
    if constexpr (kPresent<Bias>) load<Vector>(biases, bias, first, n_cols);
    Pack<Y, kLength> normalized;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T deviated = deviation<Centered>(statistics, pack.template get<T>(i) * inv_unit);
      T value = affine<ZeroCentered>(deviated * scale.of_row, weights, biases, i);
      if constexpr (Relu) {
        const bool strictly_inside = clamp(value, lower, upper);
        if (strictly_inside && inside<Vector>(first, i, n_cols)) bits |= 1u << i;
      }
      normalized.set(i, value);
    }
    store<Vector>(normalized, normalized_row, first, n_cols);
    if constexpr (kStoreBits) {
      store_bits<kLength>(bits, bitmask + row_index * bitmask_bytes(n_cols), first, n_cols);
    }
  });

  // 3. Keep what backward needs.
  if constexpr (StoreStatistics) {
    if (block.rank == 0) {
      if constexpr (Centered) {
        mean[row_index] = (statistics.shift + statistics.correction) * unit;
      }
      rstd[row_index] = scale.rstd;
    }
  }
}
