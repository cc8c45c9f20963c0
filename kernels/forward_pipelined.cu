// Forward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in the
// shared memory of a block, or of a cluster of blocks, but not in registers.
//
//   y = ((x - mean) * rstd) * (weight [+ 1 if kZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   [y = min(max(y, lower), upper) if Clamp, its bitmask stored with the statistics: epilogue.cuh]
//
// Layout:    x and y are n_rows rows of n_cols elements, rows x_stride and y_stride elements apart;
//            weight and bias are one row; mean and rstd one value a row; bitmask (n_cols + 7) / 8
//            bytes a row. y may be x. A row has at least one whole pack, of LayerNorm at least
//            kFirstElements. kFull: its columns fill the team's packs exactly.
// Grid:      no more clusters of kClusterBlocks blocks than rows, nor than run at once, each with
//            kStages - 1 rows on their way into shared memory. They take rows in turn; if kCounted and
//            given a `count`, 0 before the launch, each takes the next row when it has room for one,
//            since some multiprocessors are 4% slower.
// Traffic:   x read once, of LayerNorm the first 64 elements by every warp besides; y written once;
//            weight and bias once a block.
// Thread:    pack p of its block's columns for p = rank, rank + kBlockThreads, ... (kPacksPerThread
//            of them).
// kCells:    stage.cuh; of rows whose addresses allow accesses of 4 bytes or less. Their y leaves by words
//            (unaligned.cuh), if it is no wider than x, in whose place its lanes exchange them.
// Order:     a thread's packs in turn, then the team's reduction: a function of n_cols, the dtypes
//            and the epilogue, never of n_rows or alignment.
// Result:    thread 0 of a cluster's first block writes the row's mean and rstd.
#include "affine.cuh"
#include "epilogue.cuh"
#include "stage.cuh"
#include "statistics.cuh"
#include "team.cuh"

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_pipelined(const __grid_constant__ ForwardPipelinedArguments<Op> args) {
  using X = typename Op::X;
  using Weight = typename Op::Weight;
  using Bias = typename Op::Bias;
  using Y = typename Op::Y;
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  using TeamOf = Team<Layout::kBlockThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  using StageOfX =
      Stage<X, kLength, Layout::kPacksPerThread, Layout::kBlockThreads, Layout::kCells ? 32 : 0>;
  using StageOfWeight = Stage<Weight, kLength, Layout::kPacksPerThread, Layout::kBlockThreads>;
  using StageOfBias = Stage<Bias, kLength, Layout::kPacksPerThread, Layout::kBlockThreads>;
  TeamOf team;
  constexpr int kColumns =
      Layout::kClusterBlocks * Layout::kBlockThreads * Layout::kPacksPerThread * kLength;
  int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  const auto first_column = [&](int p) {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  };
  const auto end_of_row = [&](int p) {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  };
  static_assert(Layout::kStages >= 2, "the first row and the second are asked for at once");
  static_assert(TeamOf::template scratch_bytes<T>() % 128 == 0, "stages begin at a line");
  char* const shared = static_cast<char*>(dynamic_shared_memory());
  int* const sent_rows = reinterpret_cast<int*>(shared + TeamOf::template scratch_bytes<T>());
  char* const stages = shared + TeamOf::template scratch_bytes<T>() + 128;
  char* const stage_of_weight = stages + Layout::kStages * StageOfX::kBytes;
  char* const stage_of_bias = stage_of_weight + (Layout::kHoldWeight ? 0 : StageOfWeight::kBytes);

  // 1. Ask for the first rows, the weight and the bias.
  const int group = static_cast<int>(block_index() / Layout::kClusterBlocks);
  const int groups = static_cast<int>(block_count() / Layout::kClusterBlocks);
  int rows[Layout::kStages];  // this one, and those that are on their way
#pragma unroll
  for (int i = 0; i < Layout::kStages; ++i) rows[i] = group + i * groups;
  int fetched = group;  // the row to be asked for next, and where it is
  const X* fetched_x = args.x + fetched * args.x_stride;
  const CachePolicy policy =
      evict_last_if_large(args.n_rows * n_cols * static_cast<int>(sizeof(X)));
  OwnPlace own = own_place(StageOfX::place(stages, 0, 0));  // in the stage to be filled next
  const auto fetch = [&](int stage, int p) {
    const int n = fetched < args.n_rows ? (Layout::kCells ? n_cols : end_of_row(p)) : 0;
    if constexpr (StageOfX::kCells) {
      StageOfX::fetch_cells(stages + stage * StageOfX::kBytes, p, fetched_x, first_column(p), n,
                            Layout::kClusterBlocks == 1 ? Layout::kPacksPerThread - 1 - p : 0);
    } else if constexpr (StageOfX::template kTakesPolicy<Layout::kVector>) {
      StageOfX::template fetch<false>(own, p, fetched_x, first_column(p), n, policy);
    } else {
      StageOfX::template fetch<Layout::kVector>(stages + stage * StageOfX::kBytes, p, fetched_x,
                                                first_column(p), n);
    }
  };
  const auto fetched_all = [&](int stage) {
    own = own + (stage + 1 == Layout::kStages ? -(Layout::kStages - 1) * StageOfX::kBytes
                                              : StageOfX::kBytes);
    commit_copies();
    fetched += groups;
    fetched_x += groups * args.x_stride;
  };
  Pack<X, kLength> first_pack;
  const auto load_first_pack = [&](int of_row) {
    if constexpr (Op::kCentered) {
      // Past the last row the last one: a load under a condition ends in a move that waits for it.
      // In place another block may be writing that row, but nothing is made of what is read.
      const long long there = of_row < args.n_rows ? of_row : args.n_rows - 1;
      load_first<Layout::kVector>(first_pack, args.x + there * args.x_stride);
    }
  };
  const auto guess_of_first_pack = [&] {
    T guess = 0;
    if constexpr (Op::kCentered) {
      // Nothing is computed from it earlier: that would wait for the load as well, 0.7 us a row.
#pragma unroll
      for (unsigned& word : first_pack.words) make_opaque(word);
      guess = first_mean_by_warp<T>(first_pack);
    }
    return guess;
  };
  // The first row before the weight and bias, which are needed later; of the others, the second alone
  // before the first one's sums, which they would delay. With all at once LayerNorm of 64 rows of
  // 131072 takes 17.6 us, not 16.4, of 512 of 32768 24.0, not 22.7 (bfloat16, H200).
  const auto fetch_row = [&](int stage) {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) fetch(stage, p);
  };
  load_first_pack(rows[0]);
  fetch_row(0);
  fetched_all(0);
  fetch_row(1);
  // By way of L1, since a copy of half a float32 pack is of half a sector: LayerNorm of 512 rows of 20480
  // takes 18.0 us, not 23.1, of 4096 90, not 96 (bfloat16, float32 weight and bias, H200; on other GPUs so,
  // too, though not measured).
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    if constexpr (!Layout::kHoldWeight) {
      StageOfWeight::template fetch<Layout::kVector, true>(stage_of_weight, p, args.weight,
                                                           first_column(p), end_of_row(p));
    }
    if constexpr (!Layout::kHoldBias) {
      StageOfBias::template fetch<Layout::kVector, true>(stage_of_bias, p, args.bias,
                                                         first_column(p), end_of_row(p));
    }
  }
  fetched_all(1);
  Pack<Weight, kLength> held_weight[Layout::kHoldWeight ? Layout::kPacksPerThread : 1];
  Pack<Bias, kLength> held_bias[Layout::kHoldBias ? Layout::kPacksPerThread : 1];
  const auto load_held = [&](auto& pack, const auto* operand, int p) {
    // By the other RMSNorm's with a ReLU would spill 64 bytes, not 56 (NVRTC 12.9).
    if constexpr (Layout::kPacksPerThread == 8) {
      load<Layout::kVector>(pack, operand, first_column(p), end_of_row(p));
    } else {
      load_operand<Layout::kVector>(pack, operand, first_column(p), end_of_row(p));
    }
  };
  const auto load_bias = [&] {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (Layout::kHoldBias) load_held(held_bias[p], args.bias, p);
    }
  };
  // By 16 blocks a float32 bias after the first row's sums: LayerNorm of 32 rows of 262144 takes 17.4
  // us, not 17.7, of float32 24.5, not 24.7, and one row 9.1, not 9.5; but a bfloat16 one 17.6, not
  // 17.1, and by fewer blocks 64 rows of 16384 7.8, not 7.5 (bfloat16, H200).
  constexpr bool kBiasLater = Layout::kClusterBlocks == 16 && sizeof(Bias) == 4;
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    if constexpr (Layout::kHoldWeight) load_held(held_weight[p], args.weight, p);
  }
  if constexpr (!kBiasLater) load_bias();

  // From a thread's place to what it reads, of all packs of a row.
  const auto distance_of = [&](int of_row) {
    const X* const row = args.x + of_row * args.x_stride;
    return StageOfX::kCells ? bytes_before<X, kLength>(row) : 0;
  };
  // By cells lanes show each other what they have copied.
  const auto meet_lanes = [&] {
    if constexpr (StageOfX::kCells) warp_barrier();
  };
  const auto read = [&](int stage, int p, int distance) {
    char* const place = stages + stage * StageOfX::kBytes;
    if constexpr (StageOfX::kCells) {
      return StageOfX::read_cells(place, p, distance);
    } else {
      return StageOfX::read(place, p);
    }
  };

  // 2. Sums of d * d, d and |d|, d = x - shift.
  constexpr int kSums = Op::kCentered ? 3 : 1;
  const auto sum_up = [&](int stage, int distance, T shift, T(&sums)[kSums]) {
    if constexpr (!Layout::kFull)
      make_opaque(n_cols);  // else each element's comparison with it is kept for the next step
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> pack = read(stage, p, distance);
      T of_pack[kSums] = {};
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        // Past the end x is 0, too: one shift for each access.
        const bool is_inside =
            !Op::kCentered || inside<Layout::kVector>(first_column(p), i, end_of_row(p));
        add_deviation(of_pack, pack.template get<T>(i) - (is_inside ? shift : T(0)));
      }
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += of_pack[k];
    }
  };
  // Measures a row of known sums.
  const auto measured = [&](int stage, int distance, T guess, T(&sums)[kSums]) {
    Statistics<T> statistics;
    statistics.shift = guess;
    finish<Op::kCentered>(statistics, sums, args.inv_n);
    if constexpr (Op::kCentered) {
      if (was_far(statistics)) {
        Statistics<T> again;
        again.shift = statistics.shift + statistics.correction;
        sum_up(stage, distance, again.shift, sums);
        team.template reduce<Sum>(sums);
        finish<Op::kCentered>(again, sums, args.inv_n);
        statistics = again;
      }
      settle(statistics);
    }
    return statistics;
  };

  // 3. Which row is asked for next. Some warps of a cluster's first block ask the count by turns, and
  // tell the others with the sums of a later row: it takes 2 to 4 us, for which one warp would wait
  // at each row (527 us against 503 for LayerNorm of 32768 rows of 16384, bfloat16, H200). Each asks
  // after the one before it, so that rows only grow, and past the last come none.
  constexpr int kTurns = Layout::kBlockThreads / 32 < 4 ? Layout::kBlockThreads / 32 : 4;
  const int first_counted = (Layout::kStages + kTurns) * groups;
  const int warp = team.rank / 32;
  // Rows from first_counted on: what a warp tells first was dealt out beforehand, and is negative.
  int turn = 0, asked = group + (warp - kTurns) * groups;
  const auto begin_reduction = [&](T(&sums)[kSums]) {
    if constexpr (Layout::kCounted) {
      const bool sends = team.block == 0 && warp == turn;
      team.template begin_reduction<Sum>(sums, sends, asked, sent_rows, [&] {
        if (args.count == nullptr) {
          asked += kTurns * groups;
        } else if (team.rank % 32 == 0) {
          asked = count_up(args.count);
        }
      });
      turn = turn + 1 == kTurns ? 0 : turn + 1;
    } else {
      team.template begin_reduction<Sum>(sums);
    }
  };

  T guess = guess_of_first_pack();
  load_first_pack(rows[1]);
  T sums[kSums];
  wait_for_copies<1>();
  meet_lanes();
  sum_up(0, distance_of(rows[0]), guess, sums);
  team.meet();
  begin_reduction(sums);
  if constexpr (kBiasLater) load_bias();
#pragma unroll
  for (int stage = 2; stage < Layout::kStages; ++stage) {
    fetch_row(stage);
    fetched_all(stage);
  }
  int stage = 0;
  while (rows[0] < args.n_rows) {
    // 4. The sums of the next row, while those of this one are on their way between the threads.
    const int next_stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    const bool more = rows[1] < args.n_rows;
    T next_sums[kSums], next_guess = guess_of_first_pack();
    if constexpr (Layout::kStages > 2) {
      load_first_pack(rows[2]);
    } else if constexpr (!Layout::kCounted) {
      load_first_pack(fetched);
    }
    wait_for_copies<Layout::kStages - 2>();
    meet_lanes();
    if (more) sum_up(next_stage, distance_of(rows[1]), next_guess, next_sums);
    team.template finish_reduction<Sum>(sums);
    if constexpr (Layout::kCounted) {
      fetched = first_counted + team.received(sent_rows);
      fetched_x = args.x + fetched * args.x_stride;
      if constexpr (Layout::kStages == 2) load_first_pack(fetched);
    }

    // 5. Mean and variance; a row out of range is brought into it, exactly, and measured again.
    int distance = distance_of(rows[0]);
    Statistics<T> statistics = measured(stage, distance, guess, sums);
    Scale<T> scale = scale_in_range(statistics.variance, args.eps);
    T unit = 1;
    if constexpr (kCanLeaveRange<X>) {
      if (!in_range(statistics.variance + args.eps)) {
        // Pack by pack: side by side they take the registers of 7 or 8 held packs of the weight.
        T largest[1] = {0};
#pragma unroll 1
        for (int p = 0; p < Layout::kPacksPerThread; ++p) {
          const Pack<X, kLength> pack = read(stage, p, distance);
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            largest[0] = larger(absolute(pack.template get<T>(i)), largest[0]);
          }
        }
        team.template reduce<Max>(largest);
        unit = unit_of(larger(largest[0], square_root(args.eps)));
        const T inv_unit = T(1) / unit;
#pragma unroll 1
        for (int p = 0; p < Layout::kPacksPerThread; ++p) {
          Pack<X, kLength> pack = read(stage, p, distance);
#pragma unroll
          for (int i = 0; i < kLength; ++i) pack.set(i, pack.template get<T>(i) * inv_unit);
          if constexpr (StageOfX::kCells) {
            warp_barrier();
            StageOfX::write_cells(pack, stages + stage * StageOfX::kBytes, p);
          } else {
            StageOfX::write(pack, stages + stage * StageOfX::kBytes, p);
          }
        }
        if constexpr (StageOfX::kCells) distance = 0;
        meet_lanes();
        sum_up(stage, distance, T(0), sums);
        team.template reduce<Sum>(sums);
        statistics = measured(stage, distance, T(0), sums);
        scale = scale_in_unit(statistics.variance, args.eps, unit);
      }
    }
    if (more) begin_reduction(next_sums);

    // 6. Normalize and store; what was read makes room for a later row.
    make_opaque(
        team.rank);  // else addresses of each pack are kept from row to row, and up to 128 bytes spilled
    if constexpr (!Layout::kFull) make_opaque(n_cols);
    const T offset = -statistics.correction * scale.of_row;
    const long long row = rows[0];
    constexpr int kStep = Layout::kBlockThreads * kLength;
    const int of_first_lane = first_column(0) - team.rank % 32 * kLength;
    constexpr bool kStoresWords = StageOfX::kCells && sizeof(Y) <= sizeof(X);
    const auto words = [&] {
      if constexpr (kStoresWords) {
        return Words<Y, kLength, 32>(args.y, row * args.y_stride + of_first_lane, team.rank % 32);
      } else {
        return None{};
      }
    }();
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> pack = read(stage, p, distance);
      Pack<Weight, kLength> weights;
      Pack<Bias, kLength> biases;
      if constexpr (Layout::kHoldWeight) {
        weights = held_weight[p];
      } else {
        weights = StageOfWeight::read(stage_of_weight, p);
      }
      if constexpr (Layout::kHoldBias) {
        biases = held_bias[p];
      } else {
        biases = StageOfBias::read(stage_of_bias, p);
      }
      T values[kLength];
      const unsigned bits = normalize_pack<Op>(values, pack, statistics.shift, scale.of_row, offset,
                                               weights, biases, args);
      Pack<Y, kLength> normalized;
      normalized.set(values);
      meet_lanes();  // before others fill what this one read
      if constexpr (kStoresWords) {
        words.store(
            normalized, StageOfX::place_of_cells(stages + stage * StageOfX::kBytes, p, 0),
            p * kStep, n_cols - of_first_lane - p * kStep,
            Layout::kFull || (Layout::kClusterBlocks == 1 && p + 1 < Layout::kPacksPerThread));
        warp_barrier();
      } else {
        store_by_sectors<Layout::kVector, Layout::kBlockThreads>(
            normalized, args.y + row * args.y_stride, first_column(p), end_of_row(p));
      }
      if constexpr (Op::Epilogue::kHasBits && Op::kStoresStatistics) {
        store_bits<Layout::kVector, kLength>(bits, args.bitmask + row * bitmask_bytes(n_cols),
                                             first_column(p), n_cols);
      }
      fetch(stage, p);
    }
#pragma unroll
    for (int i = 0; i + 1 < Layout::kStages; ++i) rows[i] = rows[i + 1];
    rows[Layout::kStages - 1] = fetched;
    fetched_all(stage);

    // 7. Keep what backward needs.
    if constexpr (Op::kStoresStatistics) {
      if (team.block == 0 && team.rank == 0) {
        if constexpr (Op::kCentered)
          args.mean[row] = (statistics.shift + statistics.correction) * unit;
        args.rstd[row] = scale.rstd;
      }
    }
    stage = next_stage;
    guess = next_guess;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = next_sums[i];
  }
}
