// Forward of RMSNorm and LayerNorm for rows of any length: as forward_in_registers.cu, but the row is read again
// instead of being held in registers.
//
// Layout:    as forward_in_registers.cu; LayerNorm's rows have at least kFirstElements.
// Grid:      a cluster of kClusterBlocks blocks of kBlockThreads threads a row, on grid.x.
// Residual:  added at each reading, and the sum is stored with y, if AddResidual: prologue.cuh.
// Traffic:   x read twice, the second time from the row's end, which L1 and L2 still have. The L2 is told to keep it,
//            and then that it is done with. LayerNorm reads x once more if the first mean was far off. A row out of
//            range is read once more for its largest element, and once for each measurement. y written once, past
//            the L1.
// Thread:    t of the cluster's T has packs t, t + T, ... of the row. kPacksPerThread of them, those of one tile of
//            the row, are in flight at a time.
// Order:     a thread's packs in turn, compensated from pack to pack; then the cluster's reduction. It is a function
//            of n_cols, kBlockThreads and kClusterBlocks, never of n_rows, kPacksPerThread or alignment.
// Result:    thread 0 of a cluster's first block writes the row's mean and rstd.
#include "affine.cuh"
#include "epilogue.cuh"
#include "groups.cuh"
#include "prologue.cuh"
#include "statistics.cuh"
#include "stream.cuh"
#include "team.cuh"

// A row's packs as they are normalized: those of x, or of its sum with the residual.
template <typename Op, int Vector>
struct RowOf {
  using X = typename Op::X;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  const typename Op::Branch* x;
  const typename Op::Residual* residual;

  __device__ __forceinline__ RowOf behind(long long columns) const {
    return {x + columns, residual + columns};
  }
  template <typename Index, typename Policy = NoPolicy>
  __device__ __forceinline__ Pack<X, kLength> load_pack(Index first, Index n,
                                                        Policy policy = {}) const {
    Pack<typename Op::Branch, kLength> of_x;
    Pack<typename Op::Residual, kLength> of_residual;
    load<Vector, false>(of_x, x, first, n, policy);
    if constexpr (Op::Prologue::kAdds) load<Vector, false>(of_residual, residual, first, n, policy);
    return Op::Prologue::template forward<X>(of_x, of_residual);
  }
};

// The packs of a row that a thread has at one time.
template <typename Op, int ClusterBlocks, int BlockThreads, int PacksPerThread, int Vector>
struct TileOf {
  using Row = RowOf<Op, Vector>;
  static constexpr int kLength = Row::kLength;
  static constexpr int kRowThreads = ClusterBlocks * BlockThreads;
  static constexpr int kColumns = kRowThreads * PacksPerThread * kLength;
  Pack<typename Op::X, kLength> packs[PacksPerThread];

  // The column of pack p, counted from the tile's first.
  static __device__ __forceinline__ int first_column(int p) {
    return (p * kRowThreads + thread_in_cluster<ClusterBlocks, BlockThreads>()) * kLength;
  }
  // All packs are asked for before the first is used.
  __device__ __forceinline__ TileOf(const Row& start, int columns, CachePolicy policy) {
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      packs[p] = start.load_pack(first_column(p), columns, policy);
    }
  }
};

// The kernel's state and its steps.
template <typename Op, typename Layout>
struct StreamingForward {
  using X = typename Op::X;
  using Weight = typename Op::Weight;
  using Bias = typename Op::Bias;
  using Y = typename Op::Y;
  using T = Compute<X>;
  using TileOfX = TileOf<Op, Layout::kClusterBlocks, Layout::kBlockThreads, Layout::kPacksPerThread,
                         Layout::kVector>;
  using TeamOf = Team<Layout::kBlockThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  static constexpr int kLength = TileOfX::kLength;
  static constexpr int kSums = Op::kCentered ? 3 : 1;

  const ForwardArguments<Op>& args;
  TeamOf& team;
  const long long n_cols = args.n_cols;
  const long long row_index =
      place_of_block<Op, Layout::kClusterBlocks>(args).block / Layout::kClusterBlocks;
  using Row = typename TileOfX::Row;
  const Row row = {args.x + row_index * args.x_stride,
                   args.residual + row_index * args.residual_stride};
  Statistics<T> statistics;
  Scale<T> scale;
  T unit = 1, inv_unit = 1;

  __device__ __forceinline__ StreamingForward(const ForwardArguments<Op>& args, TeamOf& team)
      : args(args), team(team) {}

  __device__ __forceinline__ T guess() const {
    T guess = 0;
    if constexpr (Op::kCentered) {
      Pack<typename Op::Branch, kLength> of_x;
      Pack<typename Op::Residual, kLength> of_residual;
      load_first<Layout::kVector>(of_x, row.x);
      if constexpr (Op::Prologue::kAdds) load_first<Layout::kVector>(of_residual, row.residual);
      guess = first_mean_by_warp<T>(Op::Prologue::template forward<X>(of_x, of_residual));
    }
    return guess;
  }
  // Adds up a row, each element multiplied by inv_unit: d = x - shift.
  static __device__ __forceinline__ void sum_up(const Row& row, long long n_cols, T shift,
                                                T inv_unit, T (&sums)[kSums]) {
    CompensatedSum<T> exact[Op::kCentered ? 2 : 1];
    for_each_tile<TileOfX::kColumns, false>(n_cols, [&](long long base, int columns) {
      const TileOfX x(row.behind(base), columns, evict_last());
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        T of_pack[kSums] = {};
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          T d = x.packs[p].template get<T>(i) * inv_unit;
          // Past the end x is 0, too, so one shift serves an access.
          if constexpr (Op::kCentered) {
            d -= inside<Layout::kVector>(x.first_column(p), i, columns) ? shift : T(0);
          }
          add_deviation(of_pack, d);
        }
        exact[0].add(of_pack[0]);
        if constexpr (Op::kCentered) {
          exact[1].add(of_pack[1]);
          sums[2] += of_pack[2];  // a judgment alone: it need not be exact
        }
      }
    });
    sums[0] = exact[0].total();
    if constexpr (Op::kCentered) sums[1] = exact[1].total();
  }
  // Measures the row from a first mean. If that was far off, a second round starts from the mean
  // found.
  __device__ __forceinline__ void measure(T from) {
    Statistics<T> statistics;
    statistics.shift = from;
    for (bool again = false;; again = true) {
      T sums[kSums] = {};
      sum_up(row, n_cols, statistics.shift, inv_unit, sums);
      team.template reduce<Sum>(sums);
      finish<Op::kCentered>(statistics, sums, args.inv_n);
      if (!Op::kCentered || again || !was_far(statistics)) break;
      statistics.shift += statistics.correction;
    }
    if constexpr (Op::kCentered) settle(statistics);
    this->statistics = statistics;
  }
  static __device__ __forceinline__ T largest_of_thread(const Row& row, long long n_cols) {
    T largest = 0;
    for_each_pack<Layout::kClusterBlocks, Layout::kBlockThreads, kLength>(
        n_cols, [&](long long first) {
          const Pack<X, kLength> pack = row.load_pack(first, n_cols);
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            largest = larger(absolute(pack.template get<T>(i)), largest);
          }
        });
    return largest;
  }
  // Measures the row. A row out of range is measured again in a unit that brings it into range.
  __device__ __forceinline__ void measure_row(T guess) {
    measure(guess);
    scale = scale_in_range(statistics.variance, args.eps);
    if constexpr (kCanLeaveRange<X>) {
      if (!in_range(statistics.variance + args.eps)) {
        T largest[1] = {largest_of_thread(row, n_cols)};
        team.template reduce<Max>(largest);
        unit = unit_of(larger(largest[0], square_root(args.eps)));
        inv_unit = T(1) / unit;
        measure(T(0));
        scale = scale_in_unit(statistics.variance, args.eps, unit);
      }
    }
  }
  // The values of y from a pack of x, and their bits.
  __device__ __forceinline__ unsigned normalize(T (&values)[kLength], const Pack<X, kLength>& pack,
                                                T offset, const Pack<Weight, kLength>& weights,
                                                const Pack<Bias, kLength>& biases) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T in_unit = pack.template get<T>(i) * inv_unit;
      const T d = in_unit - statistics.shift;
      const T xhat =
          Op::kCentered ? fused_multiply_add(d, scale.of_row, offset) : in_unit * scale.of_row;
      values[i] = affine<Op>(xhat, weights, biases, i);
      Op::Epilogue::template forward<Op::kStoresBits>(values[i], args, bits, i);
    }
    return bits;
  }
  // Normalizes and stores the row. In place, the same thread reads and writes a pack.
  __device__ __forceinline__ void write_y() const {
    Y* const normalized_row = args.y + row_index * args.y_stride;
    const T offset = -statistics.correction * scale.of_row;
    const long long place = place_of_row<Op>(args, row_index);
    for_each_tile<TileOfX::kColumns, true>(n_cols, [&](long long base, int columns) {
      const TileOfX of_x(row.behind(base), columns, evict_first());
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        const int first = of_x.first_column(p);
        Pack<Weight, kLength> weights;
        Pack<Bias, kLength> biases;
        if constexpr (Op::kRepeats > 0) {
          load_repeated<Op>(weights, args.weight, base + first, base + columns, args.n_repeats);
          load_repeated<Op>(biases, args.bias, base + first, base + columns, args.n_repeats);
        } else {
          load<Layout::kVector, false>(weights, args.weight + base, first, columns);
          load<Layout::kVector, false>(biases, args.bias + base, first, columns);
        }
        if constexpr (Op::Prologue::kAdds) {
          store<Layout::kVector, true, false>(
              of_x.packs[p], args.residual_out + row_index * args.residual_out_stride + base, first,
              columns);
        }
        T values[kLength];
        const unsigned bits = normalize(values, of_x.packs[p], offset, weights, biases);
        Pack<Y, kLength> normalized;
        normalized.set(values);
        store<Layout::kVector, true, false>(normalized, normalized_row + base, first, columns);
        if constexpr (Op::kStoresBits) {
          store_bits<Layout::kVector, kLength>(
              bits, args.bitmask + place * bitmask_bytes(n_cols) + base / 8, first, columns);
        }
      }
    });
  }
  // What the backward pass needs, if it is asked for.
  __device__ __forceinline__ void store_statistics() const {
    if (args.rstd != nullptr && team.block == 0 && team.rank == 0) {
      const long long place = place_of_row<Op>(args, row_index);
      if constexpr (Op::kCentered) {
        args.mean[place] = (statistics.shift + statistics.correction) * unit;
      }
      args.rstd[place] = scale.rstd;
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_streaming(const __grid_constant__ ForwardArguments<Op> given) {
  using Forward = StreamingForward<Op, Layout>;
  const auto& args = of_group<Op, Layout::kClusterBlocks>(given);
  typename Forward::TeamOf team;
  Forward forward(args, team);
  const auto guess = forward.guess();
  team.meet();
  forward.measure_row(guess);
  forward.write_y();
  forward.store_statistics();
}
