// Forward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in
// registers.
//
//   y = ((x - mean) * rstd) * (weight [+ 1 if kZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   [y = min(max(y, lower), upper) if Clamp, its bitmask stored with the statistics: epilogue.cuh]
//
// Layout:    x and y are n_rows rows of n_cols elements, rows x_stride and y_stride elements apart;
//            weight and bias are one row; mean and rstd one value a row; bitmask (n_cols + 7) / 8
//            bytes a row. y may be x. kFull: the row's columns fill the team's packs exactly.
// Grid:      teams of kRowThreads threads, one row each; blocks of kBlockThreads threads, on grid.x; or
//            a row to a cluster of kClusterBlocks blocks of kRowThreads threads, with the bits of one
//            block of all these threads; or, kFolded, to a block whose threads are two each, with the
//            bits of twice as many.
// Traffic:   x read once, y written once; weight and bias from cache, and the first pack by every
//            thread of LayerNorm's rows of several warps.
// Thread:    packs rank, rank + threads of the team, ... of its row (kPacksPerThread of them), of
//            kPackLength elements: 16 bytes, or 8 where rows have no whole packs of 16 (cupynorm/_layout says
//            of which).
// Order:     a thread's packs in turn, or by halves where a warp has four of each thread, then the
//            team's reduction: a function of n_cols, the dtypes and options, never of n_rows or alignment.
// Result:    the thread of rank 0 of a team, of its first block, writes the row's mean and rstd.
// kRareLast: what rows out of range need lies behind the end of all else: for few rows, as in decoding,
//            where registers are to spare. The same bits.
// kBlocksAhead: while a block waits for its rows it has the L2 fetch those of the block so many later,
//            of a large x kBlocksAheadIfLarge; 0 is none.
#include "affine.cuh"
#include "epilogue.cuh"
#include "statistics.cuh"
#include "team.cuh"
#include "unaligned.cuh"

// Has the L2 fetch a row of weight or bias, by the first threads of the grid, a line of 128 bytes each.
// What is not held is asked for only when a row has been measured, and the first blocks would then all
// wait for memory: LayerNorm takes 37.0 us, not 37.7, at 131072x256, 16.3, not 17.2, at 2048x4096; but
// 21.5 where each of the first 1056 blocks asks for all lines (bfloat16, H200).
template <int BlockThreads, typename T>
__device__ __forceinline__ void prefetch_row(const T* row, int n_cols) {
  if constexpr (kPresent<T>) {
    constexpr int kOfLine = 128 / static_cast<int>(sizeof(T));
    const long long first = (block_index() * BlockThreads + thread_index()) * kOfLine;
    if (first < n_cols) prefetch(row + first);
  }
}

// Has the L2 fetch a row that a later block reads, if there is one, by a team's first threads.
template <int OfThread, typename X>
__device__ __forceinline__ void prefetch_row_ahead(const X* x, long long x_stride, long long row,
                                                   long long n_rows, int rank, int n_cols) {
  constexpr int kOfLine = 128 / static_cast<int>(sizeof(X));
  static_assert(OfThread * static_cast<int>(sizeof(X)) <= 128,
                "a line a thread is as much as it holds, or more");
  const int first = rank * kOfLine;
  if (row < n_rows && first < n_cols) prefetch(x + (row * x_stride + first));
}

// Statistics of the whole team's row in registers, from sums of d*d, where Centered of d, and where
// Shifted of |d|: d = x - shift, or x where not Shifted. Element i of pack p is at column
// first_column(p) + i; those past the row's end are 0. `always`: see the kernel.
template <bool Centered, bool Shifted, int Vector, typename X, int Length, int PacksPerThread,
          typename TeamOf>
__device__ __forceinline__ Statistics<Compute<X>> measure(TeamOf& team,
                                                          Pack<X, Length> (&row)[PacksPerThread],
                                                          Compute<X> shift, int n_cols,
                                                          Compute<X> inv_n, bool always) {
  using T = Compute<X>;
  constexpr int kSums = !Centered ? 1 : Shifted ? 3 : 2;
  T of_packs[PacksPerThread][kSums] = {};  // each by itself: a shorter chain of roundings
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    const int first = team.template first_column<PacksPerThread, Length>(p);
    const int end = team.template end_of_row<PacksPerThread, Length>(p, n_cols);
    if (always) {
#pragma unroll
      for (int i = 0; i < Length; ++i) {
        T d = row[p].template get<T>(i);
        // Past the end x is 0, too: one shift for each access.
        if constexpr (Shifted) d -= inside<Vector>(first, i, end) ? shift : T(0);
        add_deviation(of_packs[p], d);
      }
    }
  }
  T sums[2][kSums] = {};  // the second of a folded team alone
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if constexpr (TeamOf::kThreads <= 32 && PacksPerThread == 4) {
      // As twice as many lanes sum them by 2, which rows of less than a warp may have.
      sums[0][k] = (of_packs[0][k] + of_packs[2][k]) + (of_packs[1][k] + of_packs[3][k]);
    } else {
#pragma unroll
      for (int p = 0; p < PacksPerThread; ++p) {
        sums[TeamOf::kFolded ? p % 2 : 0][k] += of_packs[p][k];
      }
    }
  }
  team.template reduce<Sum>(sums[0], sums[1]);
  Statistics<T> statistics;
  if constexpr (Shifted) statistics.shift = shift;
  finish<Centered>(statistics, sums[0], inv_n);
  forget_conversions(row);
  return statistics;
}

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_in_registers(const __grid_constant__ ForwardArguments<Op> given) {
  const auto args =
      given;  // as parameters of their own: some kernels take up to 32 registers more else
  using X = typename Op::X;
  using Weight = typename Op::Weight;
  using Bias = typename Op::Bias;
  using Y = typename Op::Y;
  using T = Compute<X>;
  constexpr int kLength = Layout::kPackLength;
  static_assert(!Layout::kFolded || (Layout::kFull && Layout::kPacksPerThread % 2 == 0),
                "each of the two threads has as many packs, all inside");
  Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks, true, Layout::kFolded>
      team;
  constexpr int kColumns =
      team.kThreads * Layout::kPacksPerThread * kLength;  // or fewer, unless kFull
  const int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  const long long row = block_index() / Layout::kClusterBlocks * team.kTeams + team.team;
  // A team without a row does not leave: a warp's lanes reduce together. A block of one row has one.
  const bool active = team.kTeams == 1 || row < args.n_rows;
  const auto first_column = [&](int p) {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  };
  const auto end_of_row = [&](int p) {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  };
  // A thread's columns counted from its first: pack p is at p * kStep, and the row ends at n_left, or
  // for all but the last at what is beyond p * kStep as well.
  constexpr int kStep = team.kThreads * kLength;
  const int n_left = Layout::kFull ? n_cols : n_cols - first_column(0);
  const auto left_of_row = [&](int p) {
    return active ? team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_left) : 0;
  };
  // A row of several warps is measured from a first mean, since a second round would have to wait
  // for all of them; others from 0, at no cost to rows around 0.
  constexpr bool kGuesses = Op::kCentered && team.kThreads > 32;
  static_assert(!kGuesses || team.kTeams == 1,
                "the block's row exists: its first pack may be read");

  // What is done with each pack before the row is normalized has a branch of its own, on what is always true,
  // though the compiler cannot know, where threads have many packs and few registers: ptxas mixes the work of
  // all packs else, and spills. LayerNorm takes 68 us, not 76, for 7281 rows of 9216, 79, not 86, for 5600 of
  // 12002, RMSNorm 11.1, not 12.0, for 512 of float16, 12288; but where registers are to spare LayerNorm
  // 5.9, not 5.5, for 64 of 6144 (bfloat16 unless said, H200).
  constexpr int kRegisters = 65536 / (Layout::kBlockThreads * Layout::kBlocksPerMultiprocessor);
  constexpr bool kApart = sizeof(X) == 2 && Layout::kPacksPerThread * kLength > 32 &&
                          team.kThreads > 32 && kRegisters < (Op::kCentered ? 128 : 80);
  const bool always = !kApart || args.inv_n > T(0);

  // Rows that allow accesses of single elements alone, by cells and words (unaligned.cuh): RMSNorm takes
  // 84 us, not 109, for 16384 of 4097, 77, not 127, for 8192 of 8191, LayerNorm 109, not 138, and 97, not
  // 128; of float32 134, not 164, and 148, not 152; by 3 packs of 8 bytes 130, not 154, for 1000000 of 65, but
  // by 2 of 16 LayerNorm took 32.7, not 28.2, for 262144 of 33, and where accesses of two elements are allowed
  // RMSNorm, by packs of 16 bytes, 82, not 78, for 16384 of 4098 (bfloat16, H200).
  constexpr int kBytes = kLength * static_cast<int>(sizeof(X));  // of a pack
  constexpr bool kUnaligned = Layout::kVector == 1 && sizeof(X) <= 4 && Layout::kPacksPerThread > 2;
  constexpr bool kStoresWords = kUnaligned && sizeof(Y) <= 4;
  constexpr int kLanes = Layout::kRowThreads < 32 ? Layout::kRowThreads : 32;
  using WordsOfY = Words<Y, kLength, kLanes>;
  static_assert(!kUnaligned || Layout::kClusterBlocks == 1, "few rows are whole packs");
  const auto cells = [&] {
    if constexpr (kUnaligned) {
      return Cells<X, kLength>(args.x + row * args.x_stride, team.rank, active ? n_cols : 0);
    } else {
      return None{};
    }
  }();

  // 1. Read the row.
  if constexpr (!Layout::kHoldWeight) {
    prefetch_row<Layout::kBlockThreads>(args.weight, n_cols);
    prefetch_row<Layout::kBlockThreads>(args.bias, n_cols);
  }
  Pack<X, kLength> packs[Layout::kPacksPerThread];
  Pack<X, 16 / sizeof(X)> first_pack;  // a sample, whatever the length of the others
  if constexpr (kGuesses && kUnaligned) {
    const Cells<X, 16 / sizeof(X)> firsts(args.x + row * args.x_stride, 0, n_cols);
    first_pack = firsts.pack(firsts.load(0), firsts.load(1));
  } else if constexpr (kGuesses) {
    load<Layout::kVector>(first_pack, args.x + row * args.x_stride, 0, n_cols);
  }
  const long long bytes = args.n_rows * n_cols * static_cast<int>(sizeof(X));
  const CachePolicy policy = evict_last_if_large(bytes);
  const X* own_x = args.x + (row * args.x_stride + first_column(0));
  Pack<X, kLength> next_cells[kUnaligned ? Layout::kPacksPerThread : 1];
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    if constexpr (kUnaligned) {
      packs[p] = cells.load(p * team.kThreads, policy);
      next_cells[p] = cells.load(p * team.kThreads + 1, policy);
    } else if constexpr (Layout::kRareLast) {  // few rows, never large
      load<Layout::kVector>(packs[p], own_x, p * kStep, left_of_row(p));
    } else {
      load<Layout::kVector>(packs[p], own_x, p * kStep, left_of_row(p), policy);
    }
  }
  Pack<Weight, kLength> weights[Layout::kPacksPerThread];
  Pack<Bias, kLength> biases[Layout::kPacksPerThread];
  const auto load_affine = [&](int p) {
    load_operand<Layout::kVector>(weights[p], args.weight, first_column(p), end_of_row(p));
    load_operand<Layout::kVector>(biases[p], args.bias, first_column(p), end_of_row(p));
  };
  if constexpr (Layout::kHoldWeight) {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) load_affine(p);
  }
  // Behind the loads of what is held, which the compiler moves past the branch otherwise: 8.0 us, not
  // 8.9, at LayerNorm's 4096x768 (float16, H200).
  const bool large = is_large(bytes);
  if (large ? Layout::kBlocksAheadIfLarge > 0 : Layout::kBlocksAhead > 0) {
    const int ahead = large ? Layout::kBlocksAheadIfLarge : Layout::kBlocksAhead;
    prefetch_row_ahead<Layout::kPacksPerThread * kLength>(
        args.x, args.x_stride, row + ahead * team.kTeams, args.n_rows, team.rank, n_cols);
  }

  // 2. Mean and variance. A row whose first mean was far off is measured again from the mean found,
  // one out of range is brought into it, exactly, first; those that only share the warp with it get
  // the same bits again.
  team.meet();
  if constexpr (kUnaligned) {
    // The row ends in one of the last pack's cells, or in the last thread's next one of the pack before.
    const auto is_last = [&](int p, int next) {
      return p + 1 + next >= Layout::kPacksPerThread && cells.is_last(p * team.kThreads + next);
    };
    bool any_is_last = false;
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) any_is_last |= is_last(p, 0) || is_last(p, 1);
    Pack<X, kLength> last = {};
    if (any_is_last) cells.load_last(last);
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      choose(packs[p], is_last(p, 0), last);
      choose(next_cells[p], is_last(p, 1), last);
    }
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      packs[p] = cells.pack(packs[p], next_cells[p]);
    }
  }
  Statistics<T> statistics;
  Scale<T> scale;
  T unit = 1;
  const auto is_wild = [&] {
    return kCanLeaveRange<X> && !in_range(statistics.variance + args.eps);
  };
  const auto bring_into_range = [&](bool wild) {
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
  };
  // Those that only share the warp with one that is measured again keep the bits they had.
  const auto recentre = [&](bool far) {
    if (team.any(far)) {
      const T shift = statistics.shift + statistics.correction;
      const Statistics<T> again =
          measure<true, true, Layout::kVector>(team, packs, shift, n_cols, args.inv_n, always);
      if (far) statistics = again;
    }
    if (far) settle(statistics);
  };
  // One piece of code for both rounds: skipped code still costs instruction fetches.
  // With nothing to skip LayerNorm takes 5.9 us, not 6.3, for 64 rows of 4096. RMSNorm has one round,
  // which where it holds the weight is a loop for all that the compiler knows: into a loop ptxas moves
  // no loads, and those of the weight had come after the row was there. 9.0 us, not 10.1, at
  // 4096x1024, 13.0, not 13.7, at 2048x4096, 127.1, not 127.9, at 32768x4096 (bfloat16, H200).
  constexpr bool kHolds = Layout::kHoldWeight && (kPresent<Weight> || kPresent<Bias>);
  const bool only_round = !kHolds || args.n_rows > 0;
  const auto measure_from = [&](T shift) {
    bool recentred = false;
#pragma unroll 1
    for (;;) {
      statistics = measure<Op::kCentered, Op::kCentered, Layout::kVector>(
          team, packs, shift, n_cols, args.inv_n, always);
      if (Op::kCentered ? recentred || !was_far(statistics) : only_round) break;
      shift += statistics.correction;
      recentred = true;
    }
    if constexpr (Op::kCentered) settle(statistics);
  };
  constexpr bool kFromZero = Op::kCentered && !kGuesses;
  bool far = false;
  if constexpr (kFromZero) {
    statistics =
        measure<true, false, Layout::kVector>(team, packs, T(0), n_cols, args.inv_n, always);
    far = active && zero_was_far<kColumns>(statistics);  // a team without a row has zeros
    // One row in twenty is far, and of some hundred all wait for the slowest: it finds the code that
    // normalizes where the others' instructions are. LayerNorm takes 5.16 us, not 5.33, for 512 rows
    // of 1024, 4.45, not 4.60, for 64, but 4.05, not 3.99, for one (bfloat16, H200).
    if constexpr (Layout::kRareLast) {
      recentre(far);
      far = false;
    }
  } else if constexpr (kGuesses && Layout::kRareLast) {
    // No loop, before which ptxas has a thread wait for weight and bias as well: LayerNorm takes 5.75 us,
    // not 5.86, for 64 rows of 8192, 4.96, not 5.13, for 8 (bfloat16, H200).
    statistics = measure<true, true, Layout::kVector>(team, packs, first_mean<T>(first_pack),
                                                      n_cols, args.inv_n, always);
    far = was_far(statistics);
    if (!far) settle(statistics);
  } else {
    measure_from(kGuesses ? first_mean<T>(first_pack) : T(0));
  }
  scale = scale_in_range(statistics.variance, args.eps);
  const bool usual = !team.any(far || is_wild());

  // 3. Keep what backward needs.
  const auto store_statistics = [&] {
    if constexpr (Op::kStoresStatistics) {
      if (active && team.rank == 0 && team.block == 0) {
        if constexpr (Op::kCentered)
          args.mean[row] = (statistics.shift + statistics.correction) * unit;
        args.rstd[row] = scale.rstd;
      }
    }
  };

  // 4. Normalize and store. No load may pass a store, so that what is not held is asked for a pack
  // ahead, where registers allow: for LayerNorm at N = 8192 256 us against 260 with weight and bias
  // of bfloat16, 257 against 263 with 8 packs a thread and float32; but for RMSNorm at 4096, with a
  // weight of float32, 139 against 130 (H200).
  constexpr bool kNarrow = sizeof(Weight) <= 2 && sizeof(Bias) <= 2;
  constexpr bool kAsksAhead =
      !Layout::kHoldWeight && (kNarrow || Layout::kPacksPerThread * kBytes > 64);
  constexpr int kAhead = 16 / kBytes;  // packs: 16 bytes of x
  Y* own_y = args.y + (row * args.y_stride + first_column(0));
  // Those of the first lane, and the place where the lanes exchange words.
  const int lane = team.rank % kLanes, of_first_lane = first_column(0) - lane * kLength;
  const auto words_of_y = [&] {
    if constexpr (kStoresWords) {
      return WordsOfY(args.y, row * args.y_stride + of_first_lane, lane);
    } else {
      return None{};
    }
  }();
  char* const words = static_cast<char*>(dynamic_shared_memory()) +
                      team.template scratch_bytes<T>() + thread_index() / kLanes * WordsOfY::kBytes;
  const auto normalize = [&](T shift) {
    const T offset = -statistics.correction * scale.of_row;
    if constexpr (kAsksAhead) {
#pragma unroll
      for (int p = 0; p < kAhead && p < Layout::kPacksPerThread; ++p) load_affine(p);
    }
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (kAsksAhead) {
        if (p + kAhead < Layout::kPacksPerThread) load_affine(p + kAhead);
      } else if constexpr (!Layout::kHoldWeight) {
        if (p % kAhead == 0) {
#pragma unroll
          for (int q = p; q < p + kAhead && q < Layout::kPacksPerThread; ++q) load_affine(q);
        }
      }
      T values[kLength];
      const unsigned bits = normalize_pack<Op>(values, packs[p], shift, scale.of_row, offset,
                                               weights[p], biases[p], args);
      Pack<Y, kLength> normalized;
      normalized.set(values);
      if constexpr (kStoresWords) {
        const int left = active ? n_cols - of_first_lane - p * kStep : 0;
        const bool whole = team.kTeams == 1 && p + 1 < Layout::kPacksPerThread;
        if (p > 0) warp_barrier();
        words_of_y.store(normalized, words, p * kStep, left, whole);
      } else {
        static_assert(Layout::kRowThreads <= 32 || Layout::kRowThreads == Layout::kBlockThreads,
                      "a lone team has a row");
        store_by_sectors<Layout::kVector, Layout::kRowThreads>(normalized, own_y, p * kStep,
                                                               left_of_row(p));
      }
      if constexpr (Op::Epilogue::kHasBits && Op::kStoresStatistics) {
        static_assert(Layout::kRowThreads * kLength >= 8,
                      "a byte of the bitmask lies in neighbouring lanes");
        store_bits<Layout::kVector, kLength>(bits, args.bitmask + row * bitmask_bytes(n_cols),
                                             first_column(p), active ? n_cols : 0);
      }
    }
  };

  // `usual` is the same in a whole team, and in the lanes of a warp. What comes after the return is
  // not fetched; many rows would pay with registers: RMSNorm takes 21.9 us, not 20.9, at 32768x512
  // (bfloat16, H200).
  if constexpr (Layout::kRareLast) {
    if (usual) {
      store_statistics();
      normalize(statistics.shift);
      return;
    }
  }
  if (!usual) {
    if constexpr (Op::kCentered && kFromZero != Layout::kRareLast) {
      recentre(far);
      scale = scale_in_range(statistics.variance, args.eps);
    }
    const bool wild = is_wild();
    if (team.any(wild)) {
      bring_into_range(wild);
      if constexpr (kFromZero) {
        statistics =
            measure<true, false, Layout::kVector>(team, packs, T(0), n_cols, args.inv_n, always);
        recentre(zero_was_far<kColumns>(statistics));
      } else {
        measure_from(T(0));
      }
      if (wild) scale = scale_in_unit(statistics.variance, args.eps, unit);
    }
  }
  store_statistics();
  if (kFromZero && usual) {
    normalize(T(0));
  } else {
    normalize(statistics.shift);
  }
}
