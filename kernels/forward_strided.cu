// Forward of RMSNorm and LayerNorm for rows that lie side by side (strided.cuh), such as the channels of an image.
//
// Layout:    x and y are (outer, n_cols, n_inner), contiguous; mean and rstd (outer, n_inner). y may be x.
// Grid:      a block for each tile, on grid.x.
// Traffic:   x read once, y written once.
// Result:    the first group writes mean and rstd of its rows.
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
  Statistics<T> statistics[kLength];
  Scale<T> scale[kLength];
  T unit[kLength], inv_unit[kLength];

  __device__ __forceinline__ explicit StridedForward(const ForwardStridedArguments<Op>& args)
      : args(args), tile(args.n_cols, args.n_inner) {
    tile.begin(block_index());
#pragma unroll
    for (int i = 0; i < kLength; ++i) unit[i] = inv_unit[i] = 1;
  }
  __device__ __forceinline__ void load() {
    tile.template fetch<StageOfX>(stage, args.x);
    commit_copies();
    wait_for_copies<0>();
  }
  __device__ __forceinline__ T value(const Pack<X, kLength>& pack, int i) const {
    return pack.template get<T>(i) * inv_unit[i];
  }
  // Measures the rows from their means, which are sums of the whole rows.
  __device__ __forceinline__ void measure() {
    if constexpr (Op::kCentered) {
      T sums[1][kLength];
      tile.sum_columns(sums, [&](auto& into, int round, int) {
        const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
        for (int i = 0; i < kLength; ++i) into[0][i] += value(pack, i);
      });
      tile.template meet<Sum>(sums, scratch);
#pragma unroll
      for (int i = 0; i < kLength; ++i) statistics[i].shift = sums[0][i] * args.inv_n;
    }
    constexpr int kSums = Op::kCentered ? 2 : 1;
    T sums[kSums][kLength];
    tile.sum_columns(sums, [&](auto& into, int round, int) {
      const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T d = value(pack, i) - statistics[i].shift;
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
      finish<Op::kCentered>(statistics[i], of_row, args.inv_n);
      if constexpr (Op::kCentered) settle(statistics[i]);
    }
  }
  // Measures the rows. Those out of range are measured again in a unit that brings them into range.
  __device__ __forceinline__ void measure_rows() {
    measure();
    bool wild = false;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      scale[i] = scale_in_range(statistics[i].variance, args.eps);
      wild |= !in_range(statistics[i].variance + args.eps);
    }
    if constexpr (kCanLeaveRange<X>) {
      // Each warp has all rows of the tile, so all warps say the same.
      if (any_in_warp(wild)) {
        T largest[1][kLength];
        tile.sum_columns(largest, [&](auto& into, int round, int) {
          const Pack<X, kLength> pack = StageOfX::read(stage, round);
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            into[0][i] = larger(absolute(pack.template get<T>(i)), into[0][i]);
          }
        });
        tile.template meet<Max>(largest, scratch);
        bool was_wild[kLength];
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          was_wild[i] = !in_range(statistics[i].variance + args.eps);
          if (was_wild[i]) {
            unit[i] = unit_of(larger(largest[0][i], square_root(args.eps)));
            inv_unit[i] = T(1) / unit[i];
            statistics[i] = {};
          }
        }
        measure();
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          if (was_wild[i]) scale[i] = scale_in_unit(statistics[i].variance, args.eps, unit[i]);
        }
      }
    }
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
        const T d = value(pack, i) - statistics[i].shift;
        const T offset = -statistics[i].correction * scale[i].of_row;
        const T xhat =
            Op::kCentered ? fused_multiply_add(d, scale[i].of_row, offset) : d * scale[i].of_row;
        values[i] =
            kPresent<typename Op::Bias> ? fused_multiply_add(xhat, weight, bias) : xhat * weight;
      }
      Pack<typename Op::Y, kLength> normalized;
      normalized.set(values);
      store<Layout::kVector>(normalized, args.y + tile.place(column), tile.first, tile.n_inner);
    }
  }
  __device__ __forceinline__ void store_statistics() const {
    if (args.rstd == nullptr || tile.group > 0) return;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if (tile.first + i >= tile.n_inner) continue;
      if constexpr (Op::kCentered) {
        args.mean[tile.row() + i] = (statistics[i].shift + statistics[i].correction) * unit[i];
      }
      args.rstd[tile.row() + i] = scale[i].rstd;
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_strided(const __grid_constant__ ForwardStridedArguments<Op> args) {
  StridedForward<Op, Layout> forward(args);
  forward.load();
  forward.measure_rows();
  forward.store_statistics();
  forward.write_y();
}
