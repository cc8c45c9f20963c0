// Backward of RMSNorm and LayerNorm for rows that lie side by side (strided.cuh); formulas as in backward_pipelined.cu.
//
// Layout:    dy, x and dx are (outer, n_cols, n_inner), contiguous; mean and rstd (outer, n_inner). partials as in
//            backward_pipelined.cu, one for each block. dx may be dy.
// Grid:      block b takes tiles b, b + blocks, ... .
// Traffic:   dy and x read once, dx written once, partials written once.
// Order:     a column's weight gradients: a pack's rows in turn, then the lanes, then the tiles of a block, compensated.
#include "gradient.cuh"
#include "stream.cuh"
#include "strided.cuh"

template <typename Op, typename Layout>
struct StridedBackward {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using DX = typename Op::DX;
  using T = Compute<X>;
  using Tile = StridedTile<X, Layout>;
  static constexpr int kLength = Tile::kLength;
  static constexpr bool kDWeight = kPresent<typename Op::DWeight>;
  static constexpr bool kDBias = kPresent<typename Op::DBias>;
  static constexpr int kGradients = kDWeight + kDBias;
  static constexpr int kSums = kGradientSums<Op::kCentered>;
  using StageOfX = Stage<X, kLength, 1, Layout::kBlockThreads>;
  using StageOfDY = Stage<DY, kLength, 1, Layout::kBlockThreads>;
  static_assert(!Op::Epilogue::kHasBits && !kPresent<typename Op::DResidualOut> &&
                    !kPresent<typename Op::DResidual>,
                "for norms by themselves");

  const BackwardStridedArguments<Op>& args;
  Tile tile;
  char* const scratch = static_cast<char*>(dynamic_shared_memory());
  char* const stage_of_x = scratch + Layout::kScratchBytes;
  char* const stage_of_dy = stage_of_x + tile.rounds * StageOfX::kBytes;
  // Of each gradient and column the sum so far, and what rounding lost of it.
  T* const gradients = reinterpret_cast<T*>(stage_of_dy + tile.rounds * StageOfDY::kBytes);
  T mean[kLength], rstd[kLength];
  RowMeans<Op::kCentered, T> means[kLength];

  __device__ __forceinline__ explicit StridedBackward(const BackwardStridedArguments<Op>& args)
      : args(args), tile(args.n_cols, args.n_inner) {
    // The first lane of a column's threads is the one that adds to its sums.
    if (tile.lane > 0) return;
    for (int column = tile.group; column < tile.n_cols; column += Tile::kGroups) {
#pragma unroll
      for (int k = 0; k < 2 * kGradients; ++k) gradients[k * tile.n_cols + column] = 0;
    }
  }
  __device__ __forceinline__ void load() {
    tile.template fetch<StageOfX>(stage_of_x, args.x);
    tile.template fetch<StageOfDY>(stage_of_dy, args.dy);
    commit_copies();
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const bool is_row = tile.first + i < tile.n_inner;
      mean[i] = Op::kCentered && is_row ? args.mean[tile.row() + i] : T(0);
      rstd[i] = is_row ? args.rstd[tile.row() + i] : T(0);
    }
    wait_for_copies<0>();
  }
  __device__ __forceinline__ Centring<Op::kCentered, T> centring(int i) const {
    return {mean[i], rstd[i]};
  }
  __device__ __forceinline__ void sum_up() {
    T sums[kSums][kLength];
    tile.sum_columns(sums, [&](auto& into, int round, int column) {
      const Pack<X, kLength> pack = StageOfX::read(stage_of_x, round);
      const Pack<DY, kLength> pack_dy = StageOfDY::read(stage_of_dy, round);
      const T weight = weight_of_column<Op, T>(args.weight, column);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T g = pack_dy.template get<T>(i) * weight;
        const T d = centring(i).d_of(pack.template get<T>(i));
        into[0][i] = fused_multiply_add(g, d, into[0][i]);
        if constexpr (Op::kCentered) {
          into[1][i] += g;
          into[2][i] += d;
        }
      }
    });
    tile.template meet<Sum>(sums, scratch);
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      T of_row[kSums];
#pragma unroll
      for (int k = 0; k < kSums; ++k) of_row[k] = sums[k][i];
      means[i] = RowMeans<Op::kCentered, T>(of_row, centring(i).significand, args.inv_n);
    }
  }
  __device__ __forceinline__ void add_gradient(T of_pack, int index, int column) const {
#pragma unroll
    for (int distance = 1; distance < Tile::kLanes; distance *= 2) {
      of_pack += shuffle_xor(of_pack, distance);
    }
    if (tile.lane > 0 || column >= tile.n_cols) return;
    T& sum = gradients[2 * index * tile.n_cols + column];
    T& lost = gradients[(2 * index + 1) * tile.n_cols + column];
    CompensatedSum<T> exact{sum, lost};
    exact.add(of_pack);
    sum = exact.sum;
    lost = exact.lost;
  }
  __device__ __forceinline__ void write_dx() const {
#pragma unroll 1
    for (int round = 0; round < tile.rounds; ++round) {
      const int column = tile.column(round);  // the last may lie outside; its dy is 0
      const int inside = column < tile.n_cols ? column : 0;
      const Pack<X, kLength> pack = StageOfX::read(stage_of_x, round);
      const Pack<DY, kLength> pack_dy = StageOfDY::read(stage_of_dy, round);
      const T weight = weight_of_column<Op, T>(args.weight, inside);
      T of_x[kLength], of_weight = 0, of_bias = 0;
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T upstream = pack_dy.template get<T>(i);
        const T xhat = centring(i).xhat_of(pack.template get<T>(i), means[i].h);
        const T along = fused_multiply_add(-xhat, means[i].g_xhat, -means[i].g);
        of_x[i] = fused_multiply_add(upstream, weight, along) * rstd[i];
        of_weight = fused_multiply_add(upstream, xhat, of_weight);
        of_bias += upstream;
      }
      Pack<DX, kLength> gradient;
      gradient.set(of_x);
      store<Layout::kVector>(gradient, args.dx + tile.place(inside), tile.first,
                             column < tile.n_cols ? tile.n_inner : 0);
      if constexpr (kDWeight) add_gradient(of_weight, 0, column);
      if constexpr (kDBias) add_gradient(of_bias, kGradients - 1, column);
    }
  }
  // Writes dx of wild rows (gradient.cuh) in double. x and dy wait in shared memory, even in place.
  __device__ __forceinline__ void write_wild_rows() {
    if constexpr (kSame<T, float>) {
      bool wild[kLength], any = false;
#pragma unroll
      for (int i = 0; i < kLength; ++i) any |= wild[i] = is_wild(means[i]);
      if (!any_in_warp(any)) return;  // each warp has all rows of the tile
      double sums[kSums][kLength];
      tile.sum_columns(sums, [&](auto& into, int round, int column) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          const double g = g_of(round, column, i), h = h_of(round, i);
          into[0][i] += g * h;
          if constexpr (Op::kCentered) into[1][i] += g, into[2][i] += h;
        }
      });
      T in_range[kSums][kLength];
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          in_range[k][i] = static_cast<T>(k < 2 ? sums[k][i] * kIntoRange : sums[k][i]);
        }
      }
      tile.template meet<Sum>(in_range, scratch);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        if (!wild[i] || tile.first + i >= tile.n_inner) continue;
        double of_row[kSums];
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
          of_row[k] = k < 2 ? in_range[k][i] / kIntoRange : in_range[k][i];
        }
        const RowMeans<Op::kCentered, double> exact(of_row, 1.0, args.inv_n);
#pragma unroll 1
        for (int round = 0; round < tile.rounds; ++round) {
          const int column = tile.column(round);
          if (column >= tile.n_cols) break;
          const double projected =
              g_of(round, column, i) - (h_of(round, i) - exact.h) * exact.g_xhat - exact.g;
          args.dx[tile.place(column) + tile.first + i] = convert<DX>(projected * rstd[i]);
        }
      }
    }
  }
  __device__ __forceinline__ double g_of(int round, int column, int i) const {
    const Pack<DY, kLength> pack = StageOfDY::read(stage_of_dy, round);
    return pack.template get<double>(i) * weight_of_column<Op, double>(args.weight, column);
  }
  __device__ __forceinline__ double h_of(int round, int i) const {
    const Pack<X, kLength> pack = StageOfX::read(stage_of_x, round);
    return (pack.template get<double>(i) - mean[i]) * rstd[i];
  }
  __device__ __forceinline__ void write_partials() const {
    if (tile.lane > 0) return;
#pragma unroll
    for (int index = 0; index < kGradients; ++index) {
      T* const target =
          args.partials + (index * block_count() + block_index()) * partials_stride(args.n_cols);
      for (int column = tile.group; column < tile.n_cols; column += Tile::kGroups) {
        target[column] = gradients[2 * index * tile.n_cols + column] -
                         gradients[(2 * index + 1) * tile.n_cols + column];
      }
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_backward_strided(const __grid_constant__ BackwardStridedArguments<Op> args) {
  using Backward = StridedBackward<Op, Layout>;
  Backward backward(args);
  const long long tiles = args.n_rows / args.n_inner * backward.tile.tiles_of_outer;
  for (long long tile = block_index(); tile < tiles; tile += block_count()) {
    backward.tile.begin(tile);
    backward.load();
    backward.sum_up();
    backward.write_dx();
    backward.write_wild_rows();
  }
  if constexpr (Backward::kGradients > 0) let_next_kernel_start();
  backward.write_partials();
}
