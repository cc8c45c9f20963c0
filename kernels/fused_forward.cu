// Forward of a norm of cupynorm.fuse, for rows that fit in registers, and for longer ones.
//
//   value, others = prologue(x, inputs)
//   y = ((value - mean) * rstd) * (weight [+ 1 if kZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   outputs = epilogue(y, x, inputs)
//
// Op:        cupynorm/_fused_source.py writes it from the programs of the prologue and the epilogue. It has the
//            functions that this file calls as Op::..., and the struct of arguments.
// Inputs:    of x's shape, with strides of their own ("rows"); one row for all ("vectors"); one element a row, or one
//            for all ("numbers").
// Grid:      teams of kRowThreads threads, one row each; blocks of kBlockThreads threads, on grid.x. A long row has a
//            cluster of kClusterBlocks blocks.
// Traffic:   x and the inputs are read once, the outputs written once.
// Thread:    packs rank, rank + kRowThreads, ... of its block's columns (kPacksPerThread of them).
// kHoldValues: the value stays in registers. Else it is computed from x and inputs each time it is needed.
// kFull:     the row's columns fill the team's packs exactly.
// kStreams:  the row is longer than the team's packs. Each step takes one tile of so many columns after another, and
//            reads it again: once, if kCentered twice, for the statistics, and from the row's end for the outputs.
// Order:     a thread's packs in turn, compensated from pack to pack if kStreams; then the team's reduction: first the
//            sum of values, if kCentered, then the sums of the squares of deviations from their mean. It is a function
//            of n_cols, the dtypes and the programs.
// Result:    the thread of rank 0 of a team, of its first block, writes the row's mean and rstd.
#include "affine.cuh"
#include "functions.cuh"
#include "gradient.cuh"
#include "statistics.cuh"
#include "stream.cuh"
#include "team.cuh"

template <typename Op, typename Layout>
struct FusedForward {
  using T = typename Op::T;
  using Arguments = typename Op::Arguments;
  static constexpr int kPacks = Layout::kPacksPerThread, kLength = Layout::kPackLength;
  static constexpr int kColumns = Layout::kClusterBlocks * Layout::kRowThreads * kPacks * kLength;
  static constexpr int kSums = Op::kCentered ? 2 : 1;
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  using Index = typename ColumnOf<Layout::kStreams>::type;
  template <int Count>
  using SumsOf = SumsOfPacks<T, Count, Layout::kStreams>;

  // The arrays are separate (notes.md#state-in-structs).
  struct Arrays {
    typename Op::template Rows<kLength> rows[kPacks];
    typename Op::template Vectors<kLength> vectors[kPacks];
    Pack<typename Op::Weight, kLength> weights[Layout::kHoldWeight ? kPacks : 1];
    Pack<typename Op::Bias, kLength> biases[Layout::kHoldWeight ? kPacks : 1];
    T held[Layout::kHoldValues ? kPacks : 1][kLength];
  };

  const Arguments& args;
  TeamOf& team;
  Arrays& arrays;
  const Index n_cols = Layout::kFull ? kColumns : static_cast<Index>(args.n_cols);
  const long long row = block_index() / Layout::kClusterBlocks * TeamOf::kTeams + team.team;
  const bool active = TeamOf::kTeams == 1 || row < args.n_rows;
  const typename Op::Numbers numbers;
  Statistics<T> statistics;
  Scale<T> scale;
  T unit = 1, inv_unit = 1;
  Index tile = 0;  // its first column

  __device__ __forceinline__ FusedForward(const Arguments& args, TeamOf& team, Arrays& arrays)
      : args(args), team(team), arrays(arrays), numbers(Op::numbers_of(args, active ? row : 0)) {}

  __device__ __forceinline__ Index first_column(int p) const {
    return tile + team.template first_column<kPacks, kLength>(p);
  }
  __device__ __forceinline__ Index end_of_row(int p) const {
    if constexpr (Layout::kStreams) return n_cols;
    return team.template end_of_row<kPacks, kLength>(p, static_cast<int>(n_cols));
  }
  __device__ __forceinline__ bool is_inside(int p, int i) const {
    return Layout::kFull || inside<Layout::kVector>(first_column(p), i, end_of_row(p));
  }

  __device__ __forceinline__ void load_affine(int place, int p) {
    load_operand<Layout::kVector>(arrays.weights[place], args.weight, first_column(p),
                                  end_of_row(p));
    load_operand<Layout::kVector>(arrays.biases[place], args.bias, first_column(p), end_of_row(p));
  }
  // If ForValue, only what the value needs.
  template <bool ForValue = false>
  __device__ __forceinline__ void load_all(CachePolicy policy) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Op::template load_rows<Layout::kVector, ForValue>(arrays.rows[p], args, row, first_column(p),
                                                        active ? end_of_row(p) : 0, policy);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Op::template load_vectors<Layout::kVector>(arrays.vectors[p], args, first_column(p),
                                                 end_of_row(p));
      if constexpr (Layout::kHoldWeight) load_affine(p, p);
    }
  }
  // Calls visit() for all packs of the row: at once, or a tile at a time. The last time it starts at
  // the row's end, which the L2 still has.
  template <bool IsLast, typename Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) {
    if constexpr (Layout::kStreams) {
      const Index last = (n_cols - 1) / kColumns * kColumns;
#pragma unroll 1
      for (Index columns = 0; columns <= last; columns += kColumns) {
        tile = IsLast ? last - columns : columns;
        load_all<!IsLast>(IsLast ? evict_first() : evict_last());
        visit();
      }
    } else {
      visit();
    }
  }
  // Computes the values, if they are held, and stores what else the prologue makes.
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (Layout::kHoldValues) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          arrays.held[p][i] = Op::value(arrays.rows[p], arrays.vectors[p], numbers, i);
        }
      }
      Op::template store_others<Layout::kVector, Layout::kRowThreads>(
          arrays.rows[p], arrays.vectors[p], numbers, args, row, first_column(p),
          active ? end_of_row(p) : 0);
    }
  }
  __device__ __forceinline__ T value(int p, int i) const {
    if constexpr (Layout::kHoldValues) return arrays.held[p][i];
    return Op::value(arrays.rows[p], arrays.vectors[p], numbers, i);
  }
  // Otherwise the compiler keeps values that are to be computed again.
  __device__ __forceinline__ void forget_values() {
    if constexpr (!Layout::kHoldValues) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) Op::forget(arrays.rows[p]);
    }
  }

  // Each value is multiplied by a power of two.
  __device__ __forceinline__ Statistics<T> measure(T factor) {
    Statistics<T> found;
    if constexpr (Op::kCentered) {
      T sum[1] = {0};
      SumsOf<1> total;
      for_each_tile<false>([&] {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          T of_pack = 0;
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            of_pack += is_inside(p, i) ? value(p, i) * factor : T(0);
          }
          sum[0] += of_pack;
          total.take(sum);
        }
      });
      total.give(sum);
      team.template reduce<Sum>(sum);
      found.shift = sum[0] * args.inv_n;
      forget_values();
    }
    T sums[kSums] = {};
    SumsOf<kSums> totals;
    for_each_tile<false>([&] {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        T of_pack[kSums] = {};
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          add_deviation(of_pack, is_inside(p, i) ? value(p, i) * factor - found.shift : T(0));
        }
#pragma unroll
        for (int k = 0; k < kSums; ++k) sums[k] += of_pack[k];
        totals.take(sums);
      }
    });
    totals.give(sums);
    team.template reduce<Sum>(sums);
    finish<Op::kCentered>(found, sums, args.inv_n);
    if constexpr (Op::kCentered) settle(found);
    forget_values();
    return found;
  }
  // Measures the row, once more after an exact scaling if it is out of range. Rows that only share a
  // warp with it keep their bits.
  __device__ __forceinline__ void measure_row() {
    statistics = measure(T(1));
    scale = scale_in_range(statistics.variance, args.eps);
    const bool wild = Op::kCanLeaveRange && active && !in_range(statistics.variance + args.eps);
    if (!team.any(wild)) return;
    T largest[1] = {0};
    for_each_tile<false>([&] {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          const T magnitude = absolute(value(p, i));
          if (is_inside(p, i)) largest[0] = larger(magnitude, largest[0]);
        }
      }
    });
    team.template reduce<Max>(largest);
    if (wild) unit = unit_of(larger(largest[0], square_root(args.eps)));
    inv_unit = T(1) / unit;
    const Statistics<T> again = measure(inv_unit);
    if (wild) {
      statistics = again;
      scale = scale_in_unit(statistics.variance, args.eps, unit);
    }
  }
  __device__ __forceinline__ void store_statistics() const {
    if (args.rstd != nullptr && active && team.rank == 0 && team.block == 0) {
      if constexpr (Op::kCentered) {
        args.mean[row] = (statistics.shift + statistics.correction) * unit;
      }
      args.rstd[row] = scale.rstd;
    }
  }
  __device__ __forceinline__ void leave() {
    const T offset = -statistics.correction * scale.of_row;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int place = Layout::kHoldWeight ? p : 0;
      if constexpr (!Layout::kHoldWeight) load_affine(place, p);
      T outputs[Op::kOutputs][kLength];
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        // The product with a power of two is exact. It comes first, as both factors' may overflow.
        T xhat = value(p, i) * inv_unit * scale.of_row;
        if constexpr (Op::kCentered) {
          const T d = fused_multiply_add(value(p, i), inv_unit, -statistics.shift);
          xhat = fused_multiply_add(d, scale.of_row, offset);
        }
        const T y = affine<Op>(xhat, arrays.weights[place], arrays.biases[place], i);
        T of_element[Op::kOutputs];
        Op::epilogue(of_element, y, arrays.rows[p], arrays.vectors[p], numbers, i);
#pragma unroll
        for (int k = 0; k < Op::kOutputs; ++k) outputs[k][i] = of_element[k];
      }
      Op::template store_outputs<Layout::kVector, Layout::kRowThreads>(
          outputs, args, row, first_column(p), active ? end_of_row(p) : 0);
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    fused_forward(const __grid_constant__ typename Op::Arguments args) {
  using Forward = FusedForward<Op, Layout>;
  typename Forward::TeamOf team;
  typename Forward::Arrays arrays;
  Forward forward(args, team, arrays);
  if constexpr (!Layout::kStreams) forward.load_all(evict_last_if_large(Op::bytes_of_rows(args)));
  team.meet();
  if constexpr (!Layout::kStreams) forward.enter();
  forward.measure_row();
  forward.store_statistics();
  forward.template for_each_tile<true>([&] {
    if constexpr (Layout::kStreams) forward.enter();
    forward.leave();
  });
}
