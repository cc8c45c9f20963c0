// Backward of RMSNorm and LayerNorm for rows that lie side by side (strided.cuh); formulas as in backward_pipelined.cu.
//
// Layout:    dy, x and dx are (outer, n_cols, n_inner), contiguous; mean and rstd (outer, n_inner). partials as in
//            backward_pipelined.cu, one for each block. dx may be dy.
// Grid:      no more blocks than run at once. Block b takes tiles b, b + blocks, ... . While it writes dx of one, it asks
//            for the next, column by column, in the place of what it has read.
// Traffic:   dy and x read once, dx written once, partials written once.
// Order:     a column's weight gradients: a pack's rows in turn, then the tiles of a block, compensated, then the lanes.
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
  // Of each gradient the sum so far of each of the thread's columns, and what rounding lost of it.
  T* const gradients = reinterpret_cast<T*>(stage_of_dy + tile.rounds * StageOfDY::kBytes);
  T mean[kLength], rstd[kLength];
  RowMeans<Op::kCentered, T> means[kLength];

  __device__ __forceinline__ explicit StridedBackward(const BackwardStridedArguments<Op>& args)
      : args(args), tile(args.n_cols, args.n_inner) {
#pragma unroll 1
    for (int i = 0; i < 2 * kGradients * tile.rounds; ++i) *gradient(i) = 0;
  }
  __device__ __forceinline__ T* gradient(int i) const {
    return gradients + i * Layout::kBlockThreads + thread_index();
  }
  __device__ __forceinline__ void fetch() {
    tile.template fetch<StageOfX>(stage_of_x, args.x);
    tile.template fetch<StageOfDY>(stage_of_dy, args.dy);
  }
  __device__ __forceinline__ void begin() {
    commit_copies();
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const bool is_row = tile.here.first + i < tile.n_inner;
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
  __device__ __forceinline__ void add_gradient(T of_pack, int index, int round) const {
    T* const sum = gradient(2 * (index * tile.rounds + round));
    T* const lost = sum + Layout::kBlockThreads;
    CompensatedSum<T> exact{*sum, *lost};
    exact.add(of_pack);
    *sum = exact.sum;
    *lost = exact.lost;
  }
  // `asks`: for the next tile as well, in the place of what it has read.
  __device__ __forceinline__ void write_dx(const typename Tile::Place& next, bool asks) const {
    const long long ahead = tile.begin_of(0, next) - tile.begin_of(0, tile.here);
#pragma unroll 1
    for (int round = 0; round < tile.rounds; ++round) {
      const int column = tile.column(round);
      if (column >= tile.n_cols) break;
      const Pack<X, kLength> pack = StageOfX::read(stage_of_x, round);
      const Pack<DY, kLength> pack_dy = StageOfDY::read(stage_of_dy, round);
      const T weight = weight_of_column<Op, T>(args.weight, column);
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
      Pack<DX, kLength> dx;
      dx.set(of_x);
      const long long begin = tile.begin_of(column, tile.here);
      store<Layout::kVector>(dx, args.dx + begin, tile.here.first, tile.n_inner);
      if constexpr (kDWeight) add_gradient(of_weight, 0, round);
      if constexpr (kDBias) add_gradient(of_bias, kGradients - 1, round);
      if (asks) {
        tile.template fetch_ahead<StageOfX>(stage_of_x, round, args.x, begin + ahead, next);
        tile.template fetch_ahead<StageOfDY>(stage_of_dy, round, args.dy, begin + ahead, next);
      }
    }
  }
  // Each warp has all rows of the tile, so all warps say the same.
  __device__ __forceinline__ bool has_wild_rows() const {
    bool wild = false;
    if constexpr (kSame<T, float>) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) wild |= is_wild(means[i]);
    }
    return any_in_warp(wild);
  }
  // Writes dx of wild rows (gradient.cuh) in double, one after another, so that the code takes few registers. x and dy
  // wait in shared memory, even in place.
  __device__ __forceinline__ void write_wild_rows() {
    if constexpr (kSame<T, float>) {
      unsigned wild = 0;
#pragma unroll
      for (int i = 0; i < kLength; ++i) wild |= is_wild(means[i]) ? 1u << i : 0u;
#pragma unroll 1
      for (int i = 0; i < kLength; ++i) {
        const bool is_own = (wild >> i & 1) != 0;
        if (any_in_warp(is_own)) write_wild_row(i, is_own);  // each warp has all rows of the tile
      }
    }
  }
  __device__ __forceinline__ void write_wild_row(int i, bool is_own) {
    const bool is_row = is_own && tile.here.first + i < tile.n_inner;
    const double row_mean = Op::kCentered && is_row ? args.mean[tile.row() + i] : 0;
    const double row_rstd = is_row ? args.rstd[tile.row() + i] : 0;
    const auto g_of = [&](int round) {
      return element<StageOfDY, DY>(stage_of_dy, round, i) *
             weight_of_column<Op, double>(args.weight, tile.column(round));
    };
    const auto h_of = [&](int round) {
      return (element<StageOfX, X>(stage_of_x, round, i) - row_mean) * row_rstd;
    };
    double sums[kSums] = {};
#pragma unroll 1
    for (int round = 0; round < tile.rounds && tile.column(round) < tile.n_cols; ++round) {
      sums[0] += g_of(round) * h_of(round);
      if constexpr (Op::kCentered) sums[1] += g_of(round), sums[2] += h_of(round);
    }
    T in_range[kSums][kLength] = {};
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      in_range[k][0] = static_cast<T>(k < 2 ? sums[k] * kIntoRange : sums[k]);
    }
    tile.template meet<Sum>(in_range, scratch);
    if (!is_row) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      sums[k] = k < 2 ? in_range[k][0] / kIntoRange : in_range[k][0];
    }
    const RowMeans<Op::kCentered, double> exact(sums, 1.0, args.inv_n);
#pragma unroll 1
    for (int round = 0; round < tile.rounds && tile.column(round) < tile.n_cols; ++round) {
      const double projected = g_of(round) - (h_of(round) - exact.h) * exact.g_xhat - exact.g;
      args.dx[tile.begin_of(tile.column(round), tile.here) + tile.here.first + i] =
          convert<DX>(projected * row_rstd);
    }
  }
  template <typename StageOf, typename Element>
  static __device__ __forceinline__ double element(char* stage, int round, int i) {
    const int offset = i * static_cast<int>(sizeof(Element));
    const char* const piece = StageOf::place(stage, round, offset / StageOf::kPieceBytes);
    return convert<double>(
        *reinterpret_cast<const Element*>(piece + offset % StageOf::kPieceBytes));
  }
  __device__ __forceinline__ void write_partials() const {
#pragma unroll
    for (int index = 0; index < kGradients; ++index) {
      T* const target =
          args.partials + (index * block_count() + block_index()) * partials_stride(args.n_cols);
#pragma unroll 1
      for (int round = 0; round < tile.rounds; ++round) {
        const T* const sum = gradient(2 * (index * tile.rounds + round));
        T total = *sum - *(sum + Layout::kBlockThreads);
#pragma unroll
        for (int distance = 1; distance < Tile::kLanes; distance *= 2) {
          total += shuffle_xor(total, distance);
        }
        const int column = tile.column(round);
        if (tile.lane == 0 && column < tile.n_cols) target[column] = total;
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
  long long tile = block_index();
  backward.tile.here = backward.tile.place_of(tile);
  if (tile < tiles) backward.fetch();
  while (tile < tiles) {
    backward.begin();
    backward.sum_up();
    tile += block_count();
    const bool waits = backward.has_wild_rows();  // which are read again
    const auto next = backward.tile.place_of(tile);
    backward.write_dx(next, tile < tiles && !waits);
    if (waits) backward.write_wild_rows();
    backward.tile.here = next;
    if (waits && tile < tiles) backward.fetch();
  }
  if constexpr (Backward::kGradients > 0) let_next_kernel_start();
  backward.write_partials();
}
