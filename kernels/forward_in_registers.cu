// Forward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in
// registers.
//
//   y = ((x - mean) * rstd) * (weight [+ 1 if kZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   [of x + residual in place of x, stored to residual_out, if AddResidual: prologue.cuh]
//   [y = min(max(y, lower), upper) if Clamp, its bitmask stored with the statistics: epilogue.cuh]
//
// Layout:    x and y are n_rows rows of n_cols elements, rows x_stride and y_stride elements apart;
//            weight and bias are one row (others: groups.cuh); mean and rstd one value a row; bitmask (n_cols + 7) / 8
//            bytes a row. y may be x. kFull: the row's columns fill the team's packs exactly.
// Grid:      teams of kRowThreads threads, one row each; blocks of kBlockThreads threads, on grid.x. Or a row has a
//            cluster of kClusterBlocks blocks of kRowThreads threads, with the bits of one block of all these
//            threads. Or, kFolded, it has a block whose threads are two each, with the bits of twice as many.
// Traffic:   x read once, y written once; weight and bias from cache. In LayerNorm's rows of several warps every
//            thread also reads the first pack.
// Thread:    packs rank, rank + threads of the team, ... of its row (kPacksPerThread of them), of kPackLength
//            elements: 16 bytes, or 8 for some rows that have no whole packs of 16 (cupynorm/_layout chooses).
// Order:     a thread's packs in turn, or by halves if each thread of a warp has four, then the team's reduction. It
//            is a function of n_cols, the dtypes and options, never of n_rows or alignment.
// Result:    the thread of rank 0 of a team, of its first block, writes the row's mean and rstd.
// kRareLast: the code for rows out of range lies behind everything else. This is for few rows, as in decoding, where
//            registers are to spare. The bits are the same.
// kBlocksAhead: while a block waits for its rows, it has the L2 fetch those of the block so many later, or, for a
//            large x, kBlocksAheadIfLarge later; 0 is none.
#include "affine.cuh"
#include "epilogue.cuh"
#include "groups.cuh"
#include "prologue.cuh"
#include "quantize.cuh"
#include "statistics.cuh"
#include "team.cuh"
#include "unaligned.cuh"

// Has the L2 fetch a row of weight or bias, by the first threads of the grid or group, a line of 128 bytes
// each. Arrays that are not held are asked for only when a row has been measured, and the first
// blocks would then all wait for memory (notes.md#first-blocks-that-wait-for-the-weight).
template <int BlockThreads, typename T>
__device__ __forceinline__ void prefetch_row(const T* row, long long block, int n_cols) {
  if constexpr (kPresent<T>) {
    constexpr int kOfLine = 128 / static_cast<int>(sizeof(T));
    const long long first = (block * BlockThreads + thread_index()) * kOfLine;
    if (first < n_cols) prefetch(row + first);
  }
}

// Has a team's first threads make the L2 fetch a row that a later block reads, if there is one.
template <int OfThread, typename X>
__device__ __forceinline__ void prefetch_row_ahead(const X* x, long long x_stride, long long row,
                                                   long long n_rows, int rank, int n_cols) {
  constexpr int kOfLine = 128 / static_cast<int>(sizeof(X));
  constexpr int kLines = (OfThread + kOfLine - 1) / kOfLine;  // of the elements that a thread holds
#pragma unroll
  for (int line = 0; line < kLines; ++line) {
    const int first = (rank * kLines + line) * kOfLine;
    if (row < n_rows && first < n_cols) prefetch(x + (row * x_stride + first));
  }
}

template <typename Op>
using InRegistersArguments =
    typename Either<Op::Epilogue::kQuantizes, QuantizedArguments<Op>, ForwardArguments<Op>>::type;

// The kernel's state and its steps.
template <typename Op, typename Layout>
struct InRegistersForward {
  using X = typename Op::X;
  using Branch = typename Op::Branch;
  using Residual = typename Op::Residual;
  using Weight = typename Op::Weight;
  using Bias = typename Op::Bias;
  using Y = typename Op::Y;
  using T = Compute<X>;
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks, true,
                      Layout::kFolded>;
  static constexpr int kLength = Layout::kPackLength;
  static constexpr int kBytes = kLength * static_cast<int>(sizeof(X));  // of a pack
  static constexpr int kColumns =
      TeamOf::kThreads * Layout::kPacksPerThread * kLength;  // or fewer, unless kFull
  static_assert(!Layout::kFolded || (Layout::kFull && Layout::kPacksPerThread % 2 == 0),
                "each of the two threads has as many packs, all inside");
  // A thread's columns are counted from its first. Pack p is at p * kStep. The row ends at n_left,
  // or, for all packs but the last, beyond p * kStep as well.
  static constexpr int kStep = TeamOf::kThreads * kLength;
  // A row of several warps is measured from a first mean, since a second round would have to wait
  // for all of them. Other rows are measured from 0, which costs rows around 0 nothing.
  static constexpr bool kGuesses = Op::kCentered && TeamOf::kThreads > 32;
  static constexpr bool kFromZero = Op::kCentered && !kGuesses;
  static_assert(!kGuesses || TeamOf::kTeams == 1,
                "the block's row exists: its first pack may be read");
  // If threads have many packs and few registers, the work on each pack before the row is
  // normalized is in a branch of its own. Its condition is always true, but the compiler cannot
  // know that. Otherwise ptxas mixes the work of all packs, and spills (notes.md#packs-kept-apart).
  static constexpr int kRegisters =
      65536 / (Layout::kBlockThreads * Layout::kBlocksPerMultiprocessor);
  static constexpr bool kApart = sizeof(X) == 2 && Layout::kPacksPerThread * kLength > 32 &&
                                 TeamOf::kThreads > 32 && kRegisters < (Op::kCentered ? 128 : 80);
  // Rows that allow only accesses of single elements are moved by cells and words (unaligned.cuh,
  // notes.md#rows-by-cells-and-words).
  static constexpr bool kAdds = Op::Prologue::kAdds;
  static constexpr bool kUnaligned =
      Layout::kVector == 1 && sizeof(X) <= 4 && Layout::kPacksPerThread > 2 && !kAdds;
  static_assert(!kUnaligned || Layout::kClusterBlocks == 1, "few rows are whole packs");
  static constexpr bool kStoresWords = kUnaligned && sizeof(Y) <= 4;
  static constexpr int kLanes = Layout::kRowThreads < 32 ? Layout::kRowThreads : 32;
  using WordsOfY = Words<Y, kLength, kLanes>;
  static constexpr bool kHolds = Layout::kHoldWeight && (kPresent<Weight> || kPresent<Bias>);
  // No load may pass a store, so weight and bias that are not held are asked for a pack ahead, if
  // registers allow (notes.md#a-weight-asked-for-a-pack-ahead).
  static constexpr bool kNarrow = sizeof(Weight) <= 2 && sizeof(Bias) <= 2;
  static constexpr bool kAsksAhead =
      !Layout::kHoldWeight && (kNarrow || Layout::kPacksPerThread * kBytes > 64);
  static constexpr int kAhead = 16 / kBytes;  // packs: 16 bytes of x

  // The arrays are separate, as is the team. As members they would keep all others in memory until
  // loops over them are unrolled (notes.md#state-in-structs).
  struct Arrays {
    Pack<X, kLength> packs[Layout::kPacksPerThread];
    Pack<Branch, 16 / sizeof(X)> first_pack;  // a sample, whatever the length of the others
    Pack<Residual, 16 / sizeof(X)> first_residual;
    Pack<Branch, kLength> branches[kAdds ? Layout::kPacksPerThread : 1];
    Pack<Residual, kLength> residuals[kAdds ? Layout::kPacksPerThread : 1];
    Pack<X, kLength> next_cells[kUnaligned ? Layout::kPacksPerThread : 1];
    Pack<Weight, kLength> weights[Layout::kPacksPerThread];
    Pack<Bias, kLength> biases[Layout::kPacksPerThread];
  };

  Statistics<T> statistics;
  Scale<T> scale;
  const InRegistersArguments<Op>& args;
  TeamOf& team;
  Pack<X, kLength> (&packs)[Layout::kPacksPerThread];
  Arrays& arrays;
  const int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  const PlaceOfBlock place = place_of_block<Op, Layout::kClusterBlocks>(args);
  const long long row = place.block / Layout::kClusterBlocks * team.kTeams + team.team;
  // A team without a row stays, since a warp's lanes reduce together. A block of one row has a row.
  const bool active = team.kTeams == 1 || row < args.n_rows;
  const int n_left = Layout::kFull ? n_cols : n_cols - first_column(0);
  const bool always = !kApart || args.inv_n > T(0);
  const long long bytes = rows_of_all<Op>(args) * n_cols * (kBytesOf<Branch> + kBytesOf<Residual>);
  T unit = 1;

  __device__ __forceinline__ InRegistersForward(const InRegistersArguments<Op>& args, TeamOf& team,
                                                Arrays& arrays)
      : args(args), team(team), packs(arrays.packs), arrays(arrays) {}

  // ---- places ----

  __device__ __forceinline__ int first_column(int p) const {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  }
  __device__ __forceinline__ int end_of_row(int p) const {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  }
  __device__ __forceinline__ int left_of_row(int p) const {
    return active ? team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_left) : 0;
  }

  // ---- the row, weight and bias ----

  // The cells of the row, if cells move it.
  __device__ __forceinline__ auto cells_of_row() const {
    if constexpr (kUnaligned) {
      const int n_cols = Layout::kFull ? kColumns : this->n_cols;  // a member is not a constant yet
      return Cells<X, kLength>(args.x + row * args.x_stride, team.rank, active ? n_cols : 0);
    } else {
      return None{};
    }
  }
  __device__ __forceinline__ void load_first_pack() {
    if constexpr (kGuesses && kUnaligned) {
      const Cells<X, 16 / sizeof(X)> firsts(args.x + row * args.x_stride, 0, n_cols);
      arrays.first_pack = firsts.pack(firsts.load(0), firsts.load(1));
    } else if constexpr (kGuesses) {
      load<Layout::kVector>(arrays.first_pack, args.x + row * args.x_stride, 0, n_cols);
      if constexpr (kAdds)
        load<Layout::kVector>(arrays.first_residual, args.residual + row * args.residual_stride, 0,
                              n_cols);
    }
  }
  template <typename CellsOfX>
  __device__ __forceinline__ void load_row(const CellsOfX& cells) {
    const CachePolicy policy = evict_last_if_large(bytes);
    const Branch* own_x = args.x + (row * args.x_stride + first_column(0));
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (kUnaligned) {
        packs[p] = cells.load(p * team.kThreads, policy);
        arrays.next_cells[p] = cells.load(p * team.kThreads + 1, policy);
      } else if constexpr (kAdds) {
        const Residual* residual = args.residual + (row * args.residual_stride + first_column(0));
        load<Layout::kVector>(arrays.branches[p], own_x, p * kStep, left_of_row(p), policy);
        load<Layout::kVector>(arrays.residuals[p], residual, p * kStep, left_of_row(p), policy);
      } else if constexpr (Layout::kRareLast) {  // few rows, never large
        load<Layout::kVector>(packs[p], own_x, p * kStep, left_of_row(p));
      } else {
        load<Layout::kVector>(packs[p], own_x, p * kStep, left_of_row(p), policy);
      }
    }
  }
  __device__ __forceinline__ void load_affine(int p) {
    const int first = first_column(p), end = end_of_row(p);
    if constexpr (Op::kRepeats > 0) {
      load_repeated<Op>(arrays.weights[p], args.weight, first, end, args.n_repeats);
      load_repeated<Op>(arrays.biases[p], args.bias, first, end, args.n_repeats);
    } else {
      load_operand<Layout::kVector>(arrays.weights[p], args.weight, first, end);
      load_operand<Layout::kVector>(arrays.biases[p], args.bias, first, end);
    }
  }
  // Asks for the row, for weight and bias if they are held, and then for a row of a later block.
  template <typename CellsOfX>
  __device__ __forceinline__ void ask_for_all(const CellsOfX& cells) {
    if constexpr (!Layout::kHoldWeight) {
      const int elements = elements_of_vector<Op>(args, n_cols);
      prefetch_row<Layout::kBlockThreads>(args.weight, place.block, elements);
      prefetch_row<Layout::kBlockThreads>(args.bias, place.block, elements);
    }
    load_first_pack();
    load_row(cells);
    if constexpr (Layout::kHoldWeight) {
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) load_affine(p);
    }
    // This branch is behind the loads of the held arrays. Otherwise the compiler moves it past them
    // (notes.md#a-branch-behind-the-loads).
    const bool large = is_large(bytes);
    if (large ? Layout::kBlocksAheadIfLarge > 0 : Layout::kBlocksAhead > 0) {
      const int blocks = large ? Layout::kBlocksAheadIfLarge : Layout::kBlocksAhead;
      const RowAhead ahead = row_ahead<Op>(args, place.group, row, blocks, team.kTeams);
      prefetch_row_ahead<Layout::kPacksPerThread * kLength>(args.x, args.x_stride, ahead.row,
                                                            ahead.end, team.rank, n_cols);
      if constexpr (kAdds) {
        prefetch_row_ahead<Layout::kPacksPerThread * kLength>(
            args.residual, args.residual_stride, ahead.row, ahead.end, team.rank, n_cols);
      }
    }
  }
  __device__ __forceinline__ void add_residual() {
    if constexpr (kAdds) {
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        packs[p] = Op::Prologue::template forward<X>(arrays.branches[p], arrays.residuals[p]);
      }
    }
  }
  // Behind the team's first reduction, since in place others may still have to read the row's first
  // elements.
  __device__ __forceinline__ void store_total() const {
    if constexpr (kAdds) {
      X* const own = args.residual_out + (row * args.residual_out_stride + first_column(0));
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        store_by_sectors<Layout::kVector, Layout::kRowThreads>(packs[p], own, p * kStep,
                                                               left_of_row(p));
      }
    }
  }
  // Whether the row ends in this cell, which is one of the last pack, or the last thread's next one
  // of the pack before.
  template <typename CellsOfX>
  static __device__ __forceinline__ bool is_last(const CellsOfX& cells, int p, int next) {
    return p + 1 + next >= Layout::kPacksPerThread && cells.is_last(p * TeamOf::kThreads + next);
  }
  // Makes packs of the cells that were loaded.
  template <typename CellsOfX>
  __device__ __forceinline__ void join_cells([[maybe_unused]] const CellsOfX& cells) {
    if constexpr (kUnaligned) {
      bool any_is_last = false;
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        any_is_last |= is_last(cells, p, 0) || is_last(cells, p, 1);
      }
      Pack<X, kLength> last = {};
      if (any_is_last) cells.load_last(last);
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        choose(packs[p], is_last(cells, p, 0), last);
        choose(arrays.next_cells[p], is_last(cells, p, 1), last);
      }
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        packs[p] = cells.pack(packs[p], arrays.next_cells[p]);
      }
    }
  }

  // ---- mean and variance ----

  // The statistics of the whole team's row in registers, from sums of d*d, of d for LayerNorm, and
  // of |d| if Shifted: d = x - shift, or x if not Shifted. Columns past the row's end are 0.
  template <bool Shifted>
  __device__ __forceinline__ Statistics<T> measure(T shift) {
    constexpr int kSums = !Op::kCentered ? 1 : Shifted ? 3 : 2;
    T of_packs[Layout::kPacksPerThread][kSums] =
        {};  // separate sums are a shorter chain of roundings
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const int first = first_column(p);
      const int end = end_of_row(p);
      if (always) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          T d = packs[p].template get<T>(i);
          // Past the end x is 0, too, so one shift serves an access.
          if constexpr (Shifted) d -= inside<Layout::kVector>(first, i, end) ? shift : T(0);
          add_deviation(of_packs[p], d);
        }
      }
    }
    T sums[2][kSums] = {};  // the second thread of a folded team alone
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      if constexpr (TeamOf::kThreads <= 32 && Layout::kPacksPerThread == 4) {
        // As twice as many lanes sum them by 2, since rows of less than a warp may have these.
        sums[0][k] = (of_packs[0][k] + of_packs[2][k]) + (of_packs[1][k] + of_packs[3][k]);
      } else {
#pragma unroll
        for (int p = 0; p < Layout::kPacksPerThread; ++p) {
          sums[TeamOf::kFolded ? p % 2 : 0][k] += of_packs[p][k];
        }
      }
    }
    team.template reduce<Sum>(sums[0], sums[1]);
    Statistics<T> found;
    if constexpr (Shifted) found.shift = shift;
    finish<Op::kCentered>(found, sums[0], args.inv_n);
    forget_conversions(packs);
    return found;
  }
  // Measures a row again from the mean found if its first mean was far off. Rows that only share
  // the warp with it keep their bits.
  __device__ __forceinline__ void recentre(bool far) {
    if (team.any(far)) {
      const T shift = statistics.shift + statistics.correction;
      const Statistics<T> again = measure<true>(shift);
      if (far) statistics = again;
    }
    if (far) settle(statistics);
  }
  // Both rounds are one piece of code, since skipped code still costs instruction fetches. RMSNorm
  // has one round, but the compiler sees a loop there too, and ptxas moves no loads of the weight
  // into a loop (notes.md#a-loop-of-one-round).
  __device__ __forceinline__ void measure_from(T shift) {
    const bool only_round = !kHolds || args.n_rows > 0;
    bool recentred = false;
#pragma unroll 1
    for (;;) {
      statistics = measure<Op::kCentered>(shift);
      if (Op::kCentered ? recentred || !was_far(statistics) : only_round) break;
      shift += statistics.correction;
      recentred = true;
    }
    if constexpr (Op::kCentered) settle(statistics);
  }
  __device__ __forceinline__ T guess() const {
    if constexpr (!kGuesses) return T(0);
    return first_mean<T>(
        Op::Prologue::template forward<X>(arrays.first_pack, arrays.first_residual));
  }
  // Measures the row. Returns whether its first mean was far off, so that it must be measured
  // again.
  __device__ __forceinline__ bool measure_row() {
    bool far = false;
    if constexpr (kFromZero) {
      statistics = measure<false>(T(0));
      far = active && zero_was_far<kColumns>(statistics);  // a team without a row has zeros
      // One row in twenty is far, and among some hundred rows all wait for the slowest. Here that
      // row finds the code that normalizes where the others' instructions are
      // (notes.md#rare-rows-of-few).
      if constexpr (Layout::kRareLast) {
        recentre(far);
        far = false;
      }
    } else if constexpr (kGuesses && Layout::kRareLast) {
      // Before a loop, ptxas would make a thread wait for weight and bias as well
      // (notes.md#rare-rows-of-few).
      statistics = measure<true>(guess());
      far = was_far(statistics);
      if (!far) settle(statistics);
    } else {
      measure_from(guess());
    }
    scale = scale_in_range(statistics.variance, args.eps);
    return far;
  }
  __device__ __forceinline__ bool is_wild() const {
    return kCanLeaveRange<X> && !in_range(statistics.variance + args.eps);
  }
  __device__ __forceinline__ void bring_into_range(bool wild) {
    T largest[1] = {0};
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if (always) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          largest[0] = larger(absolute(packs[p].template get<T>(i)), largest[0]);
        }
      }
    }
    team.template reduce<Max>(largest, largest);
    if (wild) unit = unit_of(larger(largest[0], square_root(args.eps)));
    // With a held weight of RMSNorm, conversions are kept for the products, and up to 8 bytes
    // spilled.
    if constexpr (kHolds && !Op::kCentered && !Layout::kRareLast && TeamOf::kThreads > 32) {
      forget_conversions(packs);
    }
    const T inv_unit = T(1) / unit;
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if (always) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          packs[p].set(i, packs[p].template get<T>(i) * inv_unit);
        }
      }
    }
  }
  // Measures a row again: from the mean found if its first mean was far off, and after an exact
  // scaling if it is out of range. Rows that only share the warp with it get the same bits again.
  __device__ __forceinline__ void measure_rare_row(bool far, bool wild) {
    if constexpr (Op::kCentered && kFromZero != Layout::kRareLast) {
      recentre(far);
      scale = scale_in_range(statistics.variance, args.eps);
      wild = is_wild();
    }
    if (team.any(wild)) {
      bring_into_range(wild);
      if constexpr (kFromZero) {
        statistics = measure<false>(T(0));
        recentre(zero_was_far<kColumns>(statistics));
      } else {
        measure_from(T(0));
      }
      if (wild) scale = scale_in_unit(statistics.variance, args.eps, unit);
    }
  }

  // ---- the statistics and y ----

  // What the backward pass needs, if it is asked for.
  __device__ __forceinline__ void store_statistics() const {
    if (args.rstd != nullptr && active && team.rank == 0 && team.block == 0) {
      const long long at = place_of_row<Op>(args, row);
      if constexpr (Op::kCentered)
        args.mean[at] = (statistics.shift + statistics.correction) * unit;
      args.rstd[at] = scale.rstd;
    }
  }
  // Where this thread's y begins; for words also the first lane's column and where the lanes
  // exchange them.
  struct PlaceOfY {
    Y* own;
    int lane, of_first_lane;
    char* exchange;
  };
  __device__ __forceinline__ PlaceOfY place_of_y() const {
    PlaceOfY place;
    place.own = args.y + (row * args.y_stride + first_column(0));
    place.lane = team.rank % kLanes;
    place.of_first_lane = first_column(0) - place.lane * kLength;
    place.exchange = static_cast<char*>(dynamic_shared_memory()) +
                     TeamOf::template scratch_bytes<T>() +
                     thread_index() / kLanes * WordsOfY::kBytes;
    return place;
  }
  __device__ __forceinline__ auto words_of_y(const PlaceOfY& place) const {
    if constexpr (kStoresWords) {
      return WordsOfY(args.y, row * args.y_stride + place.of_first_lane, place.lane);
    } else {
      return None{};
    }
  }
  // Asks for weight and bias that are not held, before pack p is normalized.
  __device__ __forceinline__ void load_affine_before(int p) {
    if constexpr (kAsksAhead) {
      if (p + kAhead < Layout::kPacksPerThread) load_affine(p + kAhead);
    } else if constexpr (!Layout::kHoldWeight) {
      if (p % kAhead == 0) {
#pragma unroll
        for (int q = p; q < p + kAhead && q < Layout::kPacksPerThread; ++q) load_affine(q);
      }
    }
  }
  template <typename WordsOrNone>
  __device__ __forceinline__ void normalize(T shift, const PlaceOfY& place,
                                            [[maybe_unused]] const WordsOrNone& words) {
    const T offset = -statistics.correction * scale.of_row;
    if constexpr (kAsksAhead) {
#pragma unroll
      for (int p = 0; p < kAhead && p < Layout::kPacksPerThread; ++p) load_affine(p);
    }
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      load_affine_before(p);
      T values[kLength];
      const unsigned bits = normalize_pack<Op>(values, packs[p], shift, scale.of_row, offset,
                                               arrays.weights[p], arrays.biases[p], args);
      Pack<Y, kLength> normalized;
      normalized.set(values);
      if constexpr (kStoresWords) {
        const int left = active ? n_cols - place.of_first_lane - p * kStep : 0;
        const bool whole = team.kTeams == 1 && p + 1 < Layout::kPacksPerThread;
        if (p > 0) warp_barrier();
        words.store(normalized, place.exchange, p * kStep, left, whole);
      } else {
        static_assert(Layout::kRowThreads <= 32 || Layout::kRowThreads == Layout::kBlockThreads,
                      "a lone team has a row");
        store_by_sectors<Layout::kVector, Layout::kRowThreads>(normalized, place.own, p * kStep,
                                                               left_of_row(p));
      }
      if constexpr (Op::kStoresBits) {
        static_assert(Layout::kRowThreads * kLength >= 8,
                      "a byte of the bitmask lies in neighbouring lanes");
        store_bits<Layout::kVector, kLength>(
            bits, args.bitmask + place_of_row<Op>(args, row) * bitmask_bytes(n_cols),
            first_column(p), active ? n_cols : 0);
      }
    }
  }
  // y, quantized. If the row has one scale, y waits for it in registers.
  __device__ __forceinline__ void quantize(T shift, Y* own) {
    using Quantized = Quantizer<Op, kLength>;
    static_assert(Layout::kVector == kLength, "codes are stored by whole packs");
    static_assert(Op::kScaleColumns == 0 || (Op::kScaleColumns % kLength == 0 &&
                                             Layout::kRowThreads % Quantized::kLanes == 0),
                  "lanes share a scale");
    const T offset = -statistics.correction * scale.of_row;
    Pack<typename Op::Via, kLength> rounded[Layout::kPacksPerThread];
    Divisor divisor(Op::kGivenScale ? static_cast<float>(*args.scale) : 1.0f, 0);
    if constexpr (Op::kGivenScale) {
      divisor.try_products<Y, typename Op::Via, Layout::kRowThreads>();
    }
    Largest<typename Op::Via> largest;
    if constexpr (kAsksAhead) {
#pragma unroll
      for (int p = 0; p < kAhead && p < Layout::kPacksPerThread; ++p) load_affine(p);
    }
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      load_affine_before(p);
      T values[kLength];
      normalize_pack<Op>(values, packs[p], shift, scale.of_row, offset, arrays.weights[p],
                         arrays.biases[p], args);
      rounded[p].set(values);
      const bool is_inside = p * kStep < left_of_row(p);
      if constexpr (Quantized::kOfRow || Op::kFindsAmax) {
        if (is_inside) largest.add(rounded[p]);
      }
      if constexpr (!Quantized::kOfRow) {
        if constexpr (!Op::kGivenScale) {
          Largest<typename Op::Via> of_pack;
          if (is_inside) of_pack.add(rounded[p]);
          const T of_block = Quantized::largest_of_lanes(of_pack.value());
          const auto scale_of_block = Quantized::scale_of(of_block, args);
          store_scale_of_block(scale_of_block, p);
          divisor = Quantized::divisor_of_block(scale_of_block, of_block);
        }
        store_codes(rounded[p], divisor, own, p);
      }
    }
    if constexpr (Quantized::kOfRow) {
      T of_row[1] = {largest.value()};
      team.template reduce<Max>(of_row, of_row);
      const auto scale_of_row = Quantized::scale_of(of_row[0], args);
      if (active && team.rank == 0 && team.block == 0) args.scale[row] = scale_of_row;
      divisor = Divisor(scale_of_row, of_row[0]);
      divisor.try_products<Y, typename Op::Via, Layout::kRowThreads>();
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) store_codes(rounded[p], divisor, own, p);
    }
    if constexpr (Op::kFindsAmax) {
      const T of_warp = Quantized::template largest_of_lanes<32>(largest.value());
      if (thread_index() % 32 == 0) raise_to(args.amax, of_warp);
    }
  }
  template <typename Rounded>
  __device__ __forceinline__ void store_codes(const Rounded& y, const Divisor& divisor, Y* own,
                                              int p) const {
    store<Layout::kVector>(Quantizer<Op, kLength>::codes(y, divisor), own, p * kStep,
                           left_of_row(p));
  }
  template <typename Scale>
  __device__ __forceinline__ void store_scale_of_block(Scale of_block, int p) const {
    const int first = first_column(p);
    const bool is_first = first % Op::kScaleColumns == 0 && p * kStep < left_of_row(p);
    if constexpr (Op::kColumnMajor) {
      const long long apart = (args.n_rows + 3) / 4 * 4;
      if (is_first) args.scale[first / Op::kScaleColumns * apart + row] = of_block;
    } else {
      const int blocks = (n_cols + Op::kScaleColumns - 1) / Op::kScaleColumns;
      if (is_first) args.scale[row * blocks + first / Op::kScaleColumns] = of_block;
    }
  }
  template <typename WordsOrNone>
  __device__ __forceinline__ void write(T shift, const PlaceOfY& place, const WordsOrNone& words) {
    if constexpr (Op::Epilogue::kQuantizes) {
      quantize(shift, place.own);
    } else {
      normalize(shift, place, words);
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_in_registers(const __grid_constant__ InRegistersArguments<Op> given) {
  using Forward = InRegistersForward<Op, Layout>;
  using T = typename Forward::T;
  const auto args = of_group<Op, Layout::kClusterBlocks>(
      given);  // without a copy some kernels take up to 32 registers more
  typename Forward::TeamOf team;
  typename Forward::Arrays arrays;
  Forward forward(args, team, arrays);
  const auto cells = forward.cells_of_row();
  forward.ask_for_all(cells);
  team.meet();
  forward.join_cells(cells);
  forward.add_residual();
  const bool far = forward.measure_row();
  forward.store_total();
  const bool wild = forward.is_wild();
  // The same for a whole team, and for the lanes of a warp.
  const bool usual = !team.any(far || wild);
  const auto place = forward.place_of_y();
  const auto words = forward.words_of_y(place);
  // The code after the return is not fetched. Many rows would pay for this with registers
  // (notes.md#rare-rows-behind-the-end).
  if constexpr (Layout::kRareLast) {
    if (usual) {
      forward.store_statistics();
      forward.write(forward.statistics.shift, place, words);
      return;
    }
  }
  if (!usual) forward.measure_rare_row(far, wild);
  forward.store_statistics();
  if (Forward::kFromZero && usual) {
    forward.write(T(0), place, words);
  } else {
    forward.write(forward.statistics.shift, place, words);
  }
}
