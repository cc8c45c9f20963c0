// Backward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in the
// shared memory of a block or of a cluster of blocks.
//
//   xhat = (x - mean) * rstd,   g = dy * (weight [+ 1])
//   dx = rstd * (g - xhat * mean(g * xhat) [- mean(g)]),   dweight = sum dy * xhat,   dbias = sum dy
//   [dy = 0 where its bit of the bitmask is, if Clamp: epilogue.cuh]
//
// The stored mean is rounded, by 0.03 at 1e6 in float32: it serves as a shift, and xhat is centred
// again by its own mean over the row. One reduction gives all three sums.
//
// Layout:    x, dy and dx are n_rows rows of n_cols elements with strides of their own; weight is one
//            row; mean and rstd one value a row; bitmask (n_cols + 7) / 8 bytes a row; partials
//            holds a row of sums for each cluster, partials_stride(n_cols) apart, those of dweight
//            (if there is a weight) before those of dbias. dx may be dy. kFull: the row's columns
//            fill the team's packs exactly.
// Grid:      any number of clusters of kClusterBlocks blocks, where those are several or kBulk no more
//            than rows; their teams (of kRowThreads threads a block) take rows in turn, the next
//            kStages - 1 of which, fewer where kBulk, and kStages where kHoldRow, are on their way into
//            shared memory.
// Traffic:   x, dy and bitmask read once, dx written once, partials written once; weight once a
//            team. Of a gradient whose sums wait in partials these are read and written once more
//            for each kTurns rows of a team.
// Thread:    pack p of its block's columns for p = rank, rank + kRowThreads, ... (kPacksPerThread of
//            them), whose weight gradients it keeps.
// Order:     dx: a thread's packs in turn, then the team's reduction; weight gradients: up to kTurns
//            rows of a team in turn, then the block's teams in turn, then such sums in turn, then
//            reduce_partials.cu. No sum is one long sequence, and the bits are the same from run to
//            run.
// Sums:      those of so many gradients wait in shared memory for the next kTurns rows (kSharedSums),
//            the other's in registers (kHoldSums), or else in partials. The same bits.
// kHoldRow:  xhat and dy stay in registers from the sums on, and what was read of a row makes room for a
//            later one before the sums are complete. Of RMSNorm, whose xhat is not centred.
// kBulk:     one thread asks for its team's rows, and a mailbox for each stage says when one is there,
//            instead of each thread for its own packs: fewer instructions, for rows that fill their
//            packs. Row r of a team waits in stage r % kStages. When the sums of row r are complete,
//            all threads of the team have sent theirs, and have before done with row r - 1; where
//            kHoldRow, with what they read of row r; else in a cluster, which sends those of row r
//            before it writes dx of row r - 1, with row r - 2. That row's stage is free, for the row
//            kStages later. A row past the last is not asked for, nor waited for: each cluster must have
//            one.
// kCells:    stage.cuh; of rows whose addresses allow accesses of 4 bytes or less.
// kThroughL1: copies of 16 bytes come by way of L1, not past it, as all smaller ones do.
// Wild:      rows on the way to whose dx float32 overflows are computed again at the end: gradient.cuh.
// Result:    partials, of cluster c in row c.
#include "gradient.cuh"
#include "epilogue.cuh"
#include "stage.cuh"
#include "team.cuh"

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_backward_pipelined(const __grid_constant__ BackwardPipelinedArguments<Op> given) {
  // Else what is made of the strides is kept from row to row, and in some kernels spilled.
  auto args = given;
  make_opaque(args.x_stride);
  make_opaque(args.dy_stride);
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr bool kDWeight = kPresent<typename Op::DWeight>;
  constexpr bool kDBias = kPresent<typename Op::DBias>;
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  constexpr int kLanes = Layout::kRowThreads < 32 ? Layout::kRowThreads : 32;
  using StageOfX = Stage<X, kLength, Layout::kPacksPerThread, Layout::kBlockThreads,
                         Layout::kCells ? kLanes : 0>;
  using StageOfDY = Stage<DY, kLength, Layout::kPacksPerThread, Layout::kBlockThreads,
                          Layout::kCells ? kLanes : 0>;
  using StageOfWeight = Stage<Weight, kLength, Layout::kPacksPerThread, Layout::kBlockThreads>;
  constexpr int kStageBytes = StageOfX::kBytes + StageOfDY::kBytes;
  // Wide accesses to dx are made side by side, from registers; small ones, of which that takes up to 50
  // more, in turn, from shared memory: RMSNorm of 65536 rows of 300 so took 51 us, not 42 (bfloat16, H200).
  constexpr bool kWide = kAccessBytes<X, Layout::kVector> >= 8;
  static_assert(StageOfX::kBytes % 16 == 0 && kStageBytes % 16 == 0, "for accesses of 16 bytes");
  constexpr int kTeams = TeamOf::kTeams;
  TeamOf team;
  constexpr int kColumns =
      Layout::kClusterBlocks * Layout::kRowThreads * Layout::kPacksPerThread * kLength;
  int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  const auto first_column = [&](int p) {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  };
  const auto end_of_row = [&](int p) {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  };
  static_assert(!Layout::kHoldRow || (!Op::kCentered && kWide && !Layout::kCells),
                "xhat is not centred again, and a stage is done with when it is read");
  // In a cluster the sums of the next row are formed while those of this one are on their way.
  constexpr bool kAhead = Layout::kClusterBlocks > 1 && !Layout::kHoldRow;
  // kBulk: turns after which a row's place is known to be free.
  constexpr int kLate = Layout::kHoldRow ? 0 : kAhead ? 2 : 1;
  static_assert(!Layout::kBulk || kCopiesTakePolicies, "only there the copies are made");
  static_assert(
      !Layout::kBulk || (Layout::kFull && Layout::kVector == kLength && Layout::kRowThreads >= 64),
      "for whole rows of warps");
  static_assert(!Layout::kBulk || Layout::kStages > kLate + kAhead,
                "a row is asked for before it is waited for");
  constexpr int kMailboxBytes =
      Layout::kBulk
          ? (kTeams * Layout::kStages * static_cast<int>(sizeof(Mailbox)) + 127) / 128 * 128
          : 0;
  static_assert(TeamOf::template scratch_bytes<T>() % 128 == 0, "stages begin at a line");
  char* const mailboxes =
      static_cast<char*>(dynamic_shared_memory()) + TeamOf::template scratch_bytes<T>();
  Mailbox* const mailbox =  // of stage 0
      reinterpret_cast<Mailbox*>(mailboxes) + (kTeams > 1 ? team.team * Layout::kStages : 0);
  char* const stages = mailboxes + kMailboxBytes;

  char* const stage_of_weight = stages + Layout::kStages * kStageBytes;

  // 1. Ask for the weight and the first rows.
  const long long group = block_index() / Layout::kClusterBlocks,
                  groups = block_count() / Layout::kClusterBlocks;
  const long long rows_a_turn = groups * kTeams;
  long long row = group * kTeams + team.team;
  long long fetched = row;  // the row to be asked for next, and where it is
  // Of several teams each thread has a row's address anyway: it has that of its own first column, from
  // which it counts (as in forward_in_registers.cu), those of the statistics, which move on from turn to turn, and
  // its own place in the stage that is read, which is filled next. LayerNorm takes 20.0 us, not 20.5, at
  // 32768x256, RMSNorm 19.1, not 19.5; with the column alone LayerNorm 57.5, not 58.1, at 32768x1024
  // (bfloat16, float32 weight and bias, H200).
  constexpr bool kOwnAddresses = kTeams > 1 && !Layout::kBulk && kWide;
  constexpr int kStep = Layout::kRowThreads * kLength;
  const int counted_from = kOwnAddresses ? first_column(0) : 0;
  const auto column = [&](int p) { return kOwnAddresses ? p * kStep : first_column(p); };
  const auto left_of_row = [&](int p) {
    if constexpr (!kOwnAddresses) return end_of_row(p);
    return Layout::kFull || p + 1 < Layout::kPacksPerThread ? (p + 1) * kStep
                                                            : n_cols - counted_from;
  };
  const X* fetched_x = args.x + row * args.x_stride + counted_from;
  const DY* fetched_dy = args.dy + row * args.dy_stride + counted_from;
  constexpr int kReadBytes = static_cast<int>(sizeof(X)) + static_cast<int>(sizeof(DY));
  const CachePolicy policy = evict_last_if_large(args.n_rows * n_cols * kReadBytes);
  // Beside it LayerNorm in clusters spills some bytes, which rows that come by way of L1 push out of
  // there: 142 us, not 126, for 1024 rows of 65544, and 117 without (bfloat16, H200).
  constexpr bool kPolicy = !(Layout::kThroughL1 && Op::kCentered && Layout::kClusterBlocks > 1);
  // In the stage to be filled next; where kBulk, in the first.
  OwnPlace own = own_place(StageOfX::place(stages, 0, 0));
  // Packs of each thread that are known to begin in a row behind pack p.
  const auto packs_behind = [&](int p) {
    return Layout::kClusterBlocks == 1 ? Layout::kPacksPerThread - 1 - p : 0;
  };
  const auto fetch = [&](int stage, int p) {
    const int n = fetched < args.n_rows ? (Layout::kCells ? n_cols : left_of_row(p)) : 0;
    char* const place = stages + stage * kStageBytes;
    if constexpr (StageOfX::template kTakesPolicy<Layout::kVector> && kPolicy) {
      StageOfX::template fetch<Layout::kThroughL1>(own, p, fetched_x, column(p), n, policy);
    } else if constexpr (StageOfX::kCells) {
      StageOfX::fetch_cells(place, p, fetched_x, column(p), n, packs_behind(p));
    } else {
      StageOfX::template fetch<Layout::kVector, Layout::kThroughL1>(place, p, fetched_x, column(p),
                                                                    n);
    }
    if constexpr (StageOfDY::template kTakesPolicy<Layout::kVector> && kPolicy) {
      StageOfDY::template fetch<Layout::kThroughL1>(own + StageOfX::kBytes, p, fetched_dy,
                                                    column(p), n, policy);
    } else if constexpr (StageOfDY::kCells) {
      StageOfDY::fetch_cells(place + StageOfX::kBytes, p, fetched_dy, column(p), n,
                             packs_behind(p));
    } else {
      StageOfDY::template fetch<Layout::kVector, Layout::kThroughL1>(place + StageOfX::kBytes, p,
                                                                     fetched_dy, column(p), n);
    }
  };
  const auto fetched_all = [&](int stage) {
    own = own + (stage + 1 == Layout::kStages ? -(Layout::kStages - 1) * kStageBytes : kStageBytes);
    commit_copies();
    fetched += rows_a_turn;
    fetched_x += rows_a_turn * args.x_stride;
    fetched_dy += rows_a_turn * args.dy_stride;
  };
  constexpr int kAsker =
      Layout::kRowThreads - 32;  // not in the first warp, which expects a cluster's sums
  const bool asks = team.rank == kAsker;
  const auto fetch_bulk = [&](int stage, long long of_row) {
    if constexpr (Layout::kBulk) {
      if (of_row >= args.n_rows) return;
      char* const place = stages + stage * kStageBytes;
      const int thread = thread_index() - kAsker, first = first_column(0) - kAsker * kLength;
      expect_bytes(mailbox + stage,
                   Layout::kRowThreads * Layout::kPacksPerThread * kLength * kReadBytes);
      StageOfX::template fetch_bulk<Layout::kRowThreads>(
          place, thread, args.x + of_row * args.x_stride + first, mailbox + stage, policy);
      StageOfDY::template fetch_bulk<Layout::kRowThreads>(place + StageOfX::kBytes, thread,
                                                          args.dy + of_row * args.dy_stride + first,
                                                          mailbox + stage, policy);
    }
  };
  if constexpr (!Layout::kHoldWeight) {
    // Past L1 all teams' copies are of the same lines of the L2, one after another: RMSNorm of 32768 rows
    // of 256 took 62.8 us, not 20.3 (bfloat16, float32 weight, bitmask, H200).
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      StageOfWeight::template fetch<Layout::kVector, true>(stage_of_weight, p, args.weight,
                                                           first_column(p), end_of_row(p));
    }
  }
  if constexpr (Layout::kBulk) {
    commit_copies();
    if (asks) {
#pragma unroll 1
      for (int stage = 0; stage < Layout::kStages; ++stage) open_mailbox(mailbox + stage);
      show_mailboxes();
    }
  }
  const auto fetch_rows = [&](int first, int end) {
    if constexpr (Layout::kBulk) {
      if (asks) {
#pragma unroll 1
        for (int stage = first; stage < end; ++stage) fetch_bulk(stage, row + stage * rows_a_turn);
      }
    } else {
#pragma unroll
      for (int stage = first; stage < end; ++stage) {
#pragma unroll
        for (int p = 0; p < Layout::kPacksPerThread; ++p) fetch(stage, p);
        fetched_all(stage);
      }
    }
  };
  // The others once the first has come, which they would delay: LayerNorm of 512 rows of 16384 takes
  // 25.7 us, not 26.3, of 8192 20.4, not 21.3, RMSNorm of 2048 of 40960 128, not 130; but of 512 of 4096,
  // by single blocks whose threads copy their own packs, 12.3 us, not 12.0 (bfloat16, H200).
  constexpr int kFetched = Layout::kBulk ? Layout::kStages - kLate : Layout::kStages;
  constexpr int kFirst =
      (Layout::kBulk || Layout::kClusterBlocks > 1) && kFetched > 2 ? 2 : kFetched;
  fetch_rows(0, kFirst);
  if constexpr (Layout::kBulk) {
    block_barrier();
    wait_for_copies<0>();
  }
  // What else of a row is asked for ahead, into registers.
  struct Beside {
    T mean = 0, rstd = 0;
    unsigned bits[Op::Epilogue::kHasBits ? Layout::kPacksPerThread : 1] = {};
    int distance_of_x = 0, distance_of_dy = 0;  // kCells: from a thread's places to what it reads
  };
  // Of the row that is asked for next: each call of load_beside is for that.
  const T* mean_ahead = Op::kCentered ? args.mean + row : nullptr;
  const T* rstd_ahead = args.rstd + row;
  const auto load_beside = [&](long long of_row) {
    Beside beside;
    if constexpr (StageOfX::kCells)
      beside.distance_of_x = bytes_before<X, kLength>(args.x + of_row * args.x_stride);
    if constexpr (StageOfDY::kCells)
      beside.distance_of_dy = bytes_before<DY, kLength>(args.dy + of_row * args.dy_stride);
    if (of_row < args.n_rows) {
      if constexpr (Op::kCentered) beside.mean = kOwnAddresses ? *mean_ahead : args.mean[of_row];
      beside.rstd = kOwnAddresses ? *rstd_ahead : args.rstd[of_row];
      if constexpr (Op::Epilogue::kHasBits) {
        const unsigned char* bytes = args.bitmask + of_row * bitmask_bytes(n_cols);
#pragma unroll
        for (int p = 0; p < Layout::kPacksPerThread; ++p) {
          beside.bits[p] = load_bits(bytes, first_column(p), n_cols);
        }
      }
    }
    if constexpr (Op::kCentered) mean_ahead += rows_a_turn;
    rstd_ahead += rows_a_turn;
    return beside;
  };
  Beside next = load_beside(row), after_next = load_beside(row + rows_a_turn);

  T dweight[kDWeight ? Layout::kPacksPerThread : 1][kLength] = {};
  T dbias[kDBias ? Layout::kPacksPerThread : 1][kLength] = {};
  // Adds one gradient of the last rows to its sums so far, which wait in shared memory, in registers or
  // in partials, and when they are complete go there; that of several teams comes by way of shared
  // memory, one team after another.
  using StageOfSums = Stage<T, kLength, Layout::kPacksPerThread, Layout::kRowThreads>;
  char* const stage_of_teams = stage_of_weight + (Layout::kHoldWeight ? 0 : StageOfWeight::kBytes);
  char* const stage_of_sums = stage_of_teams + (kTeams > 1 ? kTeams * StageOfSums::kBytes : 0);
  static_assert(!Layout::kHoldSums || (kTeams == 1 && Layout::kSharedSums + 1 == kDWeight + kDBias),
                "of one gradient, a thread's own");
  T held_sums[Layout::kHoldSums ? Layout::kPacksPerThread : 1][kLength] = {};
  bool flushed = false;
  const auto flush = [&](T(&gradient)[Layout::kPacksPerThread][kLength], int index, bool complete) {
    T* const target = args.partials + (index * groups + group) * partials_stride(n_cols);
    char* const place = stage_of_sums + index * StageOfSums::kBytes;
    const bool shared = index < Layout::kSharedSums, in_partials = !(shared || Layout::kHoldSums);
    if constexpr (kTeams == 1) {
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        Pack<T, kLength> sums = {};
        if (shared) {
          if (flushed) sums = StageOfSums::read(place, p);
        } else if constexpr (Layout::kHoldSums) {
          sums.set(held_sums[p]);
        } else {
          load<kLength>(sums, target, first_column(p), flushed ? end_of_row(p) : 0);
        }
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          sums.set(i, sums.template get<T>(i) + gradient[p][i]);
          gradient[p][i] = 0;
        }
        if (in_partials) {
          // By sectors, the last ones alone, as else a lane would read what another has stored, they
          // would take a barrier and spill 20 to 48 bytes of LayerNorm's 6 and 7 packs.
          store<kLength>(sums, target, first_column(p), end_of_row(p));
        } else if (complete) {
          store_by_sectors<kLength, Layout::kRowThreads>(sums, target, first_column(p),
                                                         end_of_row(p));
        } else if (shared) {
          StageOfSums::write(sums, place, p);
        } else if constexpr (Layout::kHoldSums) {
#pragma unroll
          for (int i = 0; i < kLength; ++i) held_sums[p][i] = sums.template get<T>(i);
        }
      }
    } else {
      T* const of_teams = reinterpret_cast<T*>(stage_of_teams);
#pragma unroll
      for (int p = 0; p < Layout::kPacksPerThread; ++p) {
        Pack<T, kLength> sums;
        sums.set(gradient[p]);
#pragma unroll
        for (int i = 0; i < kLength; ++i) gradient[p][i] = 0;
        store<kLength>(sums, of_teams + team.team * kColumns, first_column(p), kColumns);
      }
      block_barrier();
      T* const so_far = shared ? reinterpret_cast<T*>(place) : target;
      T* const now = complete ? target : so_far;
      // By 16 bytes, as rows of partials are whole packs, too: LayerNorm takes 13.0 us, not 13.2, for 1024
      // rows of 2048 (bfloat16), 14.0, not 14.3, for 4096 of 768 (float16, H200).
      constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
      for (int first = thread_index() * kWidth; first < n_cols;
           first += Layout::kBlockThreads * kWidth) {
        Pack<T, kWidth> sums;
        load<kWidth>(sums, of_teams + first, 0, kWidth);
#pragma unroll 4
        for (int i = 1; i < kTeams; ++i) add_gradients(sums, of_teams + i * kColumns + first);
        if (flushed) add_gradients(sums, so_far + first);
        store<kWidth>(sums, now + first, 0, kWidth);
      }
      block_barrier();
    }
  };
  const auto flush_all = [&](bool complete) {
    if constexpr (!Layout::kFull) make_opaque(n_cols);
    if constexpr (kDWeight) flush(dweight, 0, complete);
    if constexpr (kDBias) flush(dbias, kDWeight ? 1 : 0, complete);
    flushed = true;
  };
  Pack<Weight, kLength> held_weight[Layout::kHoldWeight ? Layout::kPacksPerThread : 1];
  if constexpr (Layout::kHoldWeight) {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      load<Layout::kVector>(held_weight[p], args.weight, first_column(p), end_of_row(p));
    }
  }
  // A pack of the weight, from registers or from shared memory.
  const auto weights_of = [&](int p) {
    if constexpr (Layout::kHoldWeight) {
      return held_weight[p];
    } else {
      return StageOfWeight::read(stage_of_weight, p);
    }
  };

  // 2. Sums of g * d, g and d, of which h = (x - mean) * rstd is made, xhat before it is centred again.
  constexpr int kSums = kGradientSums<Op::kCentered>;
  constexpr bool kFromOwnPlace =
      Layout::kBulk || (kOwnAddresses && StageOfX::kPackBytes == 16 && StageOfDY::kPackBytes == 16);
  const auto place_read = [&](int stage) {
    return own + (Layout::kBulk ? stage * kStageBytes : 0);
  };
  // A pack of the operand whose stage begins `before` bytes behind that of x.
  const auto read = [&](auto operand, int before, int stage, int p, int distance) {
    using StageOf = decltype(operand);
    if constexpr (kFromOwnPlace) {
      return StageOf::read(place_read(stage) + before, p);
    } else if constexpr (StageOf::kCells) {
      return StageOf::read_cells(stages + stage * kStageBytes + before, p, distance);
    } else {
      return StageOf::read(stages + stage * kStageBytes + before, p);
    }
  };
  const auto read_x = [&](int stage, int p, const Beside& of_row) {
    return read(StageOfX{}, 0, stage, p, of_row.distance_of_x);
  };
  // dy of a pack, as the bitmask lets it through.
  const auto read_dy = [&](int stage, int p, const Beside& of_row) {
    Pack<DY, kLength> pack = read(StageOfDY{}, StageOfX::kBytes, stage, p, of_row.distance_of_dy);
    if constexpr (Op::Epilogue::kHasBits) {
      Op::Epilogue::backward(pack, of_row.bits[p], first_column(p));
    }
    return pack;
  };
  // By cells lanes show each other what they have copied.
  const auto meet_lanes = [&] {
    if constexpr (Layout::kCells) warp_barrier();
  };
  T held_xhat[Layout::kHoldRow ? Layout::kPacksPerThread : 1][kLength];
  Pack<DY, kLength> held_dy[Layout::kHoldRow ? Layout::kPacksPerThread : 1];
  const auto sum_up = [&](int stage, const Beside& of_row, T(&sums)[kSums]) {
    if constexpr (!Layout::kFull)
      make_opaque(n_cols);  // else each element's comparison with it is kept for the next step
    const Centring<Op::kCentered, T> centring(of_row.mean, of_row.rstd);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> row_x = read_x(stage, p, of_row);
      const Pack<DY, kLength> row_dy = read_dy(stage, p, of_row);
      add_to_sums<Op, Layout::kVector>(sums, centring, row_x, row_dy, weights_of(p),
                                       first_column(p), end_of_row(p));
      if constexpr (Layout::kHoldRow) {
        held_dy[p] = row_dy;
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          held_xhat[p][i] = centring.xhat_of(row_x.template get<T>(i), 0);
        }
        if constexpr (!Layout::kBulk) fetch(stage, p);
      }
    }
    if constexpr (Layout::kHoldRow && !Layout::kBulk) fetched_all(stage);
  };

  T sums[kSums];
  int turn = 0, stage = 0;
  int parity = 0;  // kBulk: of the times that the stage has been filled
  if constexpr (kAhead) {
    if constexpr (Layout::kBulk) {
      wait_for_bytes<false>(mailbox, 0);
    } else {
      wait_for_copies<kFirst - 1>();
      meet_lanes();
    }
    sum_up(0, next, sums);
  }
  team.meet();
  if constexpr (kAhead) {
    team.template begin_reduction<Sum>(sums);
    fetch_rows(kFirst, kFetched);
  } else if constexpr (kFirst < kFetched) {
    if constexpr (!Layout::kBulk) {
      wait_for_copies<kFirst - 1>();
    } else if (row < args.n_rows) {
      wait_for_bytes<false>(mailbox, 0);
    }
    fetch_rows(kFirst, kFetched);
  }
  T wild = 0;  // NaN once a row was wild: one register and no branch
  X* dx_row = args.dx + row * args.dx_stride + counted_from;
  long long dx_step = rows_a_turn * args.dx_stride;
  if constexpr (kOwnAddresses) make_opaque(dx_step);  // else it is computed each time
  for (long long block_row = group * kTeams; block_row < args.n_rows; block_row += rows_a_turn) {
    // 3. The row's sums.
    const Beside current = next;
    next = after_next;
    after_next = load_beside(row + 2 * rows_a_turn);
    const int next_stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    const int next_parity = stage + 1 == Layout::kStages ? parity ^ 1 : parity;
    char* const place = stages + stage * kStageBytes;
    T next_sums[kSums];
    if constexpr (kAhead) {
      const bool more = block_row + rows_a_turn < args.n_rows;
      if constexpr (!Layout::kBulk) wait_for_copies<Layout::kStages - 2>();
      meet_lanes();
      if (more) {
        if constexpr (Layout::kBulk) wait_for_bytes<false>(mailbox + next_stage, next_parity);
        sum_up(next_stage, next, next_sums);
      }
      team.template finish_reduction<Sum>(sums);
      if (more) team.template begin_reduction<Sum>(next_sums);
    } else {
      if constexpr (!Layout::kBulk) {
        wait_for_copies<Layout::kStages - 1>();
        meet_lanes();
      } else if (kTeams == 1 || row < args.n_rows) {
        wait_for_bytes<false>(mailbox + stage, parity);
      } else {  // in the last turn, beside a team that has a row
#pragma unroll
        for (int p = 0; p < Layout::kPacksPerThread; ++p) {
          StageOfX::write(Pack<X, kLength>{}, place, p);
          StageOfDY::write(Pack<DY, kLength>{}, place + StageOfX::kBytes, p);
        }
      }
      sum_up(stage, current, sums);
      team.template reduce<Sum>(sums);
    }
    if constexpr (Layout::kBulk) {
      if (asks) {
        fetch_bulk(stage >= kLate ? stage - kLate : stage - kLate + Layout::kStages,
                   row + (Layout::kStages - kLate) * rows_a_turn);
      }
    }
    const Centring<Op::kCentered, T> centring(current.mean, current.rstd);
    RowMeans<Op::kCentered, T> means(sums, centring.significand, args.inv_n);
    mark_if_wild(means, args.dx == static_cast<const void*>(args.dy));

    // 4. dx, and this row's share of the weight gradients; what was read makes room for a later row, if
    // it has not yet.
    if constexpr (!Layout::kFull) make_opaque(n_cols);
    // A block's lone team has a row. But where that is said, by other registers, rows that are not kBulk may
    // be slower: RMSNorm's 8192 of 8196 take 115 us, not 110 (float32 weight), though 4096 of 16388, in
    // clusters, 109, not 123; LayerNorm's 111, not 114, but 133, not 129 (bfloat16, H200).
    constexpr bool kHasRow =
        kTeams == 1 && (Layout::kBulk || Op::kCentered == (Layout::kClusterBlocks == 1));
    const bool stores = kHasRow || row < args.n_rows;
    const int lane = team.rank % kLanes, of_first_lane = first_column(0) - lane * kLength;
    const auto words = [&] {
      if constexpr (StageOfX::kCells) {
        return Words<X, kLength, kLanes>(args.dx, row * args.dx_stride + of_first_lane, lane);
      } else {
        return None{};
      }
    }();
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const int n_stored = stores ? left_of_row(p) : 0;
      T xhat[kLength];
      Pack<DY, kLength> row_dy;
      if constexpr (Layout::kHoldRow) {
        row_dy = held_dy[p];
#pragma unroll
        for (int i = 0; i < kLength; ++i) xhat[i] = held_xhat[p][i];
      } else {
        const Pack<X, kLength> row_x = read_x(stage, p, current);
        row_dy = read_dy(stage, p, current);
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          xhat[i] = centring.xhat_of(row_x.template get<T>(i), means.h);
        }
      }
      const Pack<Weight, kLength> weights = weights_of(p);
      T gradient[kLength];
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T upstream = row_dy.template get<T>(i);
        gradient[i] = dx_of<Op>(upstream, xhat[i], weights, i, means, current.rstd);
        if constexpr (kDWeight)
          dweight[p][i] = fused_multiply_add(upstream, xhat[i], dweight[p][i]);
        if constexpr (kDBias) dbias[p][i] += upstream;
      }
      Pack<X, kLength> stored;
      stored.set(gradient);
      if constexpr (!Layout::kHoldRow) meet_lanes();  // before others fill what this one read
      if constexpr (StageOfX::kCells) {
        words.store(stored, StageOfX::place_of_cells(place, p, 0), p * kStep,
                    stores ? n_cols - of_first_lane - p * kStep : 0,
                    kTeams == 1 && (Layout::kFull || (Layout::kClusterBlocks == 1 &&
                                                      p + 1 < Layout::kPacksPerThread)));
        warp_barrier();
      } else if constexpr (kWide) {
        store<Layout::kVector>(stored, dx_row, column(p), n_stored);
      } else {
        StageOfX::write(stored, place, p);
        StageOfX::template store<Layout::kVector>(place, p, dx_row, column(p), n_stored);
      }
      if constexpr (!Layout::kBulk && !Layout::kHoldRow) fetch(stage, p);
    }
    if constexpr (!Layout::kBulk && !Layout::kHoldRow) fetched_all(stage);
    stage = next_stage;
    parity = next_parity;
    row += rows_a_turn;
    dx_row += dx_step;
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = next_sums[i];
    }

    wild += means.g_xhat * 0;

    // 5. Now and then, weight gradients leave the registers.
    if (++turn == kTurns) {
      flush_all(false);
      turn = 0;
    }
  }
  // No sooner: 1.2 % in the mean of 28 problems, up to 4 (RMSNorm 4096x2048 19.8 us, not 20.7; bfloat16, H200).
  if constexpr (kDWeight || kDBias) let_next_kernel_start();  // else none follows
  flush_all(true);

  // 6. dx of wild rows.
  if constexpr (kSame<T, float>) {
    if (!team.any(wild != T(0)) || args.dx == static_cast<const void*>(args.dy)) return;
    warp_barrier();  // lanes may have stored each other's dx
    const int first = first_column(0);
#pragma unroll 1
    for (long long block_row = group * kTeams; block_row < args.n_rows; block_row += rows_a_turn) {
      row = block_row + team.team;
      float own = 0;
      if (row < args.n_rows && first < n_cols)
        own = convert<float>(args.dx[row * args.dx_stride + first]);
      team = write_wild_row<Op, Layout::kPacksPerThread>(team, own == own, row, given);
    }
  }
}
