// Forward of RMSNorm and LayerNorm for rows that lie side by side (strided.cuh), such as the channels of an image.
//
// Layout:    x and y are (outer, n_cols, n_inner), contiguous; mean and rstd (outer, n_inner). y may be x.
// Grid:      a block for each tile, on grid.x. Blocks that take tiles in turn and ask for the next one ahead have smaller
//            tiles, and are slower (notes.md#rows-side-by-side).
// Traffic:   x read once, y written once.
// Result:    the first group writes mean and rstd.
#include "prologue.cuh"
#include "strided.cuh"

template <typename Op, typename Layout>
struct StridedForward {
  using X = typename Op::X;
  using T = Compute<X>;
  using Tile = StridedTile<X, Layout>;
  static constexpr int kLength = Tile::kLength;
  using StageOfX = Stage<X, kLength, 1, Layout::kBlockThreads>;
  static_assert(!Op::Prologue::kAdds && !Op::Epilogue::kHasBits, "for norms by themselves");

  const ForwardStridedArguments<Op>& args;
  Tile tile;
  char* const scratch = static_cast<char*>(dynamic_shared_memory());
  char* const stage = scratch + Layout::kScratchBytes;
  // xhat = (x - shift) * scale + offset
  T shift[kLength], scale[kLength], offset[kLength];

  __device__ __forceinline__ explicit StridedForward(const ForwardStridedArguments<Op>& args)
      : args(args), tile(args.n_cols, args.n_inner) {}
  __device__ __forceinline__ void load(long long number) {
    tile.here = tile.place_of(number);
    tile.template fetch<StageOfX>(stage, args.x);
    commit_copies();
    wait_for_copies<0>();
  }
  // Measures the rows from their means, which are sums of the whole rows. Returns their variances in `variance`, and
  // what the means lack in `offset`.
  __device__ __forceinline__ void measure(T (&variance)[kLength]) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) shift[i] = 0;
    if constexpr (Op::kCentered) {
      T sums[1][kLength];
      tile.sum_columns(sums, [&](auto& into, int round, int) {
        const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
        for (int i = 0; i < kLength; ++i) into[0][i] += pack.template get<T>(i);
      });
      tile.template meet<Sum>(sums, scratch);
#pragma unroll
      for (int i = 0; i < kLength; ++i) shift[i] = sums[0][i] * args.inv_n;
    }
    constexpr int kSums = Op::kCentered ? 2 : 1;
    T sums[kSums][kLength];
    tile.sum_columns(sums, [&](auto& into, int round, int) {
      const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T d = pack.template get<T>(i) - shift[i];
        into[0][i] = fused_multiply_add(d, d, into[0][i]);
        if constexpr (Op::kCentered) into[1][i] += d;
      }
    });
    tile.template meet<Sum>(sums, scratch);
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      T of_row[kSums];
#pragma unroll
      for (int k = 0; k < kSums; ++k) of_row[k] = sums[k][i];
      Statistics<T> statistics;
      statistics.shift = shift[i];
      finish<Op::kCentered>(statistics, of_row, args.inv_n);
      if constexpr (Op::kCentered) settle(statistics);
      shift[i] = statistics.shift;
      offset[i] = statistics.correction;
      variance[i] = statistics.variance;
    }
  }
  // Measures the rows and writes their statistics.
  __device__ __forceinline__ void measure_rows() {
    T variance[kLength];
    measure(variance);
    bool wild = false;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      wild |= !in_range(variance[i] + args.eps);
      scale[i] = scale_in_range(variance[i], args.eps).of_row;
    }
    // Each warp has all rows of the tile, so all warps say the same.
    if (kCanLeaveRange<X> && any_in_warp(wild)) {
      measure_again(variance);
    } else {
#pragma unroll
      for (int i = 0; i < kLength; ++i) store_statistics(i, shift[i] + offset[i], scale[i]);
    }
#pragma unroll
    for (int i = 0; i < kLength; ++i) offset[i] = -offset[i] * scale[i];
  }
  // Divides rows out of range by a unit that brings them into range, where they wait, and measures them again.
  __device__ __forceinline__ void measure_again(T (&variance)[kLength]) {
    T largest[1][kLength];
    tile.sum_columns(largest, [&](auto& into, int round, int) {
      const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        into[0][i] = larger(absolute(pack.template get<T>(i)), into[0][i]);
      }
    });
    tile.template meet<Max>(largest, scratch);
    T unit[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const bool is_wild = !in_range(variance[i] + args.eps);
      unit[i] = is_wild ? unit_of(larger(largest[0][i], square_root(args.eps))) : T(1);
    }
#pragma unroll 1
    for (int round = 0; round < tile.rounds; ++round) {
      Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        if (unit[i] != T(1)) pack.set(i, pack.template get<T>(i) * (T(1) / unit[i]));
      }
      StageOfX::write(pack, stage, round);
    }
    measure(variance);
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const Scale<T> found = unit[i] == T(1) ? scale_in_range(variance[i], args.eps)
                                             : scale_in_unit(variance[i], args.eps, unit[i]);
      scale[i] = found.of_row;
      store_statistics(i, (shift[i] + offset[i]) * unit[i], found.rstd);
    }
  }
  __device__ __forceinline__ void store_statistics(int i, T mean, T rstd) const {
    if (args.rstd == nullptr || tile.group > 0 || tile.here.first + i >= tile.n_inner) return;
    if constexpr (Op::kCentered) args.mean[tile.row() + i] = mean;
    args.rstd[tile.row() + i] = rstd;
  }
  __device__ __forceinline__ void write_y() const {
#pragma unroll 2
    for (int round = 0; round < tile.rounds; ++round) {
      const int column = tile.column(round);
      if (column >= tile.n_cols) break;
      const Pack<X, kLength> pack = StageOfX::read(stage, round);
      const T weight = weight_of_column<Op, T>(args.weight, column);
      const T bias = bias_of_column<T>(args.bias, column);
      T values[kLength];
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T d = pack.template get<T>(i) - shift[i];
        const T xhat = Op::kCentered ? fused_multiply_add(d, scale[i], offset[i]) : d * scale[i];
        values[i] =
            kPresent<typename Op::Bias> ? fused_multiply_add(xhat, weight, bias) : xhat * weight;
      }
      Pack<typename Op::Y, kLength> normalized;
      normalized.set(values);
      store<Layout::kVector>(normalized, args.y + tile.begin_of(column, tile.here), tile.here.first,
                             tile.n_inner);
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_strided(const __grid_constant__ ForwardStridedArguments<Op> args) {
  StridedForward<Op, Layout> forward(args);
  forward.load(block_index());
  forward.measure_rows();
  forward.write_y();
}
