// Backward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in the
// shared memory of a block or of a cluster of blocks.
//
//   xhat = (x - mean) * rstd,   g = dy * (weight [+ 1])
//   dx = rstd * (g - xhat * mean(g * xhat) [- mean(g)]),   dweight = sum dy * xhat,   dbias = sum dy
//   [dy = 0 where its bit of the bitmask is 0, if Clamp: epilogue.cuh]
//   [dx + dresidual_out, stored to dx and, if that has another dtype, to dresidual: prologue.cuh]
//
// The stored mean is rounded, by 0.03 at 1e6 in float32. So it serves only as a shift, and xhat is centred again by
// its own mean over the row. One reduction gives all three sums.
//
// Layout:    x, dy and dx are n_rows rows of n_cols elements with strides of their own; weight is one
//            row; mean and rstd one value a row; bitmask (n_cols + 7) / 8 bytes a row; partials
//            hold a row of sums for each cluster, partials_stride(n_cols) apart, those of dweight
//            (if there is a weight) before those of dbias. dx may be dy or dresidual_out. kFull: the row's columns
//            fill the team's packs exactly.
// Grid:      any number of clusters of kClusterBlocks blocks, but no more than rows if kClusterBlocks > 1 or kBulk.
//            Their teams (of kRowThreads threads a block) take rows in turn. The next kStages - 1 rows are on their
//            way into shared memory; fewer if kBulk; kStages if kHoldRow.
// Traffic:   x, dy and bitmask read once, dx written once, partials written once; weight once a team. If a gradient's
//            sums wait in partials, these are read and written once more for each kTurns rows of a team.
// Thread:    pack p of its block's columns for p = rank, rank + kRowThreads, ... (kPacksPerThread of
//            them). It keeps their weight gradients.
// Order:     dx: a thread's packs in turn, then the team's reduction. Weight gradients: up to kTurns rows of a team in
//            turn, then the block's teams in turn, then such sums in turn, then reduce_partials.cu. No sum is one long
//            sequence, and the bits are the same from run to run.
// Sums:      kSharedSums gradients wait in shared memory for the next kTurns rows. The other waits in registers
//            (kHoldSums) or in partials. The bits are the same.
// kByIndex:  if a pack's columns have one element of weight and bias (groups.cuh), the weight's is asked for with the row,
//            and each team has partials. These have a value for the packs of kLanesAlike lanes. If there are fewer groups
//            than vectors (by_rows), clusters take the rows of all vectors, which take turns, and partials are those of
//            one row each.
// kHoldRow:  xhat and dy stay in registers from the sums on, so the row's place is free for a later row before the sums
//            are complete. For RMSNorm, whose xhat is not centred.
// kBulk:     one thread asks for its team's rows, and a mailbox for each stage says when one is there. Otherwise each
//            thread asks for its own packs. Bulk copies take fewer instructions, for rows that fill their packs. Row r
//            of a team waits in stage r % kStages. When the sums of row r are complete, all threads of the team have
//            sent theirs, and before that they were done with row r - 1; if kHoldRow, with what they read of row r.
//            Otherwise a cluster sends the sums of row r before it writes dx of row r - 1, so it is done with row
//            r - 2. The stage of that row is free, for the row kStages later. A row past the last is neither asked for
//            nor waited for, so each cluster must have a row.
// kCells:    stage.cuh; for rows whose addresses allow accesses of 4 bytes or less.
// kTotalAhead: dresidual_out waits in shared memory as well. Otherwise it is read where it is added.
// kThroughL1: copies of 16 bytes come by way of the L1, as all smaller ones do. Otherwise they bypass it.
// Wild:      rows on whose way to dx float32 overflows are computed again at the end: gradient.cuh.
// Result:    partials, those of cluster c in row c.
#include "gradient.cuh"
#include "epilogue.cuh"
#include "stage.cuh"
#include "team.cuh"

template <typename Op, typename Layout>
struct PipelinedBackward {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using DX = typename Op::DX;
  using DResidual = typename Op::DResidual;
  using DResidualOut = typename Op::DResidualOut;
  using T = Compute<X>;
  static constexpr int kPacks = Layout::kPacksPerThread;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kSums = kGradientSums<Op::kCentered>;
  static constexpr bool kDWeight = kPresent<typename Op::DWeight>;
  static constexpr bool kDBias = kPresent<typename Op::DBias>;

  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  static constexpr int kTeams = TeamOf::kTeams;
  static constexpr int kLanes = Layout::kRowThreads < 32 ? Layout::kRowThreads : 32;
  static constexpr int kStep = Layout::kRowThreads * kLength;
  static constexpr int kColumns = Layout::kClusterBlocks * kPacks * kStep;

  using StageOfX = Stage<X, kLength, kPacks, Layout::kBlockThreads, Layout::kCells ? kLanes : 0>;
  using StageOfDY = Stage<DY, kLength, kPacks, Layout::kBlockThreads, Layout::kCells ? kLanes : 0>;
  using Ahead = typename Either<Layout::kTotalAhead, DResidualOut, None>::type;
  using StageOfTotal =  // of dresidual_out
      Stage<Ahead, kLength, kPacks, Layout::kBlockThreads, Layout::kCells ? kLanes : 0>;
  // Whether a pack's columns have one element of weight and bias, as those of so many lanes have.
  static constexpr bool kByIndex = Op::kRepeats >= kLength;
  static constexpr int kLanesAlike =
      kByIndex && Op::kRepeats / kLength < kLanes ? Op::kRepeats / kLength : kLanes;
  using Staged = typename Either<kByIndex, None, Weight>::type;
  using StageOfWeight = Stage<Staged, kLength, kPacks, Layout::kBlockThreads>;
  using StageOfSums = Stage<T, kLength, kPacks, Layout::kRowThreads>;
  static constexpr int kBeforeTotal = StageOfX::kBytes + StageOfDY::kBytes;
  static constexpr int kStageBytes = kBeforeTotal + StageOfTotal::kBytes;
  static constexpr int kReadBytes = kBytesOf<X> + kBytesOf<DY> + kBytesOf<Ahead>;
  static constexpr int kMailboxBytes =
      Layout::kBulk
          ? (kTeams * Layout::kStages * static_cast<int>(sizeof(Mailbox)) + 127) / 128 * 128
          : 0;

  // Wide accesses to dx are made side by side, from registers. Small ones would take up to 50
  // registers more, so they are made in turn, from shared memory (notes.md#small-accesses-in-turn).
  static constexpr bool kWide = kAccessBytes<X, Layout::kVector> >= 8;
  // A cluster forms the sums of the next row while those of this one are in flight.
  static constexpr bool kAhead = Layout::kClusterBlocks > 1 && !Layout::kHoldRow;
  // kBulk: after so many turns a row's place is known to be free.
  static constexpr int kLate = Layout::kHoldRow ? 0 : kAhead ? 2 : 1;
  // Rows asked for before the loop, and those of them that are asked for first. The others would
  // delay these (notes.md#the-first-rows-first).
  static constexpr int kFetched = Layout::kBulk ? Layout::kStages - kLate : Layout::kStages;
  static constexpr int kFirst =
      (Layout::kBulk || Layout::kClusterBlocks > 1) && kFetched > 2 ? 2 : kFetched;
  // The latter, if nothing except dx is written and its packs have the size of those of x.
  static constexpr bool kByPlace = !kWide && sizeof(DX) == sizeof(X) && !kPresent<DResidual>;
  // If there are several teams, each thread counts from addresses of its own
  // (notes.md#a-threads-own-addresses).
  static constexpr bool kOwnAddresses = kTeams > 1 && !Layout::kBulk && kWide;
  static constexpr bool kFromOwnPlace =
      Layout::kBulk || (kOwnAddresses && StageOfX::kPackBytes == 16 &&
                        StageOfDY::kPackBytes == 16 && StageOfTotal::kPackBytes == 16);
  // LayerNorm in clusters spills some bytes with a policy. Rows that come by way of the L1 push
  // them out of it (notes.md#policies-beside-l1).
  static constexpr bool kPolicy =
      !(Layout::kThroughL1 && Op::kCentered && Layout::kClusterBlocks > 1);
  // A block's lone team has a row. ptxas chooses other registers if the code says so. It says so
  // where that is faster (notes.md#a-lone-team-has-a-row).
  static constexpr bool kHasRow =
      kTeams == 1 && (Layout::kBulk || Op::kCentered == (Layout::kClusterBlocks == 1));
  // kBulk: the one thread that asks. It is not in the first warp, which expects a cluster's sums.
  static constexpr int kAsker = Layout::kRowThreads - 32;

  static_assert(StageOfX::kBytes % 16 == 0 && kStageBytes % 16 == 0, "for accesses of 16 bytes");
  static_assert(!Layout::kHoldRow ||
                    (!Op::kCentered && kWide && !Layout::kCells && !Layout::kTotalAhead),
                "xhat is not centred again, and a stage is done with when it is read");
  static_assert(!Layout::kCells || (kSame<DX, X> && !kPresent<DResidual>), "dx leaves by words");
  static_assert(!Layout::kBulk || kCopiesTakePolicies, "only there the copies are made");
  static_assert(!Layout::kBulk || (Layout::kFull && Layout::kVector == kLength &&
                                   Layout::kRowThreads >= 64 && !Layout::kTotalAhead),
                "for whole rows of warps, of x and dy alone");
  static_assert(!Layout::kBulk || Layout::kStages > kLate + kAhead,
                "a row is asked for before it is waited for");
  static_assert(TeamOf::template scratch_bytes<T>() % 128 == 0, "stages begin at a line");
  static_assert(!Layout::kHoldSums || (kTeams == 1 && Layout::kSharedSums + 1 == kDWeight + kDBias),
                "of one gradient, a thread's own");

  // What else of a row is asked for ahead, into registers.
  struct Beside {
    T mean = 0, rstd = 0;
    unsigned bits[Op::Epilogue::kHasBits ? kPacks : 1] = {};
    Weight weights[kByIndex ? kPacks : 1] = {};
    // kCells: from a thread's places to those that it reads.
    int distance_of_x = 0, distance_of_dy = 0, distance_of_total = 0;
  };

  BackwardPipelinedArguments<Op> args;
  TeamOf team;
  int n_cols;
  char* mailboxes;
  Mailbox* mailbox;  // of stage 0
  char *stages, *stage_of_weight, *stage_of_teams, *stage_of_sums;
  long long group;  // groups.cuh
  bool by_rows = false;
  unsigned vector_ahead = 0, vector_step = 0;  // of the row for which load_beside is called next
  T* own_partials;                             // of the first gradient
  long long partials_step = 0, partials_of_gradient;
  int elements[kByIndex ? kPacks : 1] = {};  // of a vector, one a pack
  long long cluster, clusters, rows_a_turn;
  long long row;
  int counted_from;           // the column from which a thread counts
  int stage = 0, parity = 0;  // number of the row; kBulk: how often the stage has been filled

  // The row to be asked for next, and where it is.
  long long fetched;
  const X* fetched_x;
  const DY* fetched_dy;
  const DResidualOut* fetched_total;
  CachePolicy policy;
  OwnPlace own;  // in the stage to be filled next; kBulk: in the first

  const T *mean_ahead, *rstd_ahead;  // the row for which load_beside is called next
  Beside current, next, after_next;
  T sums[kSums];  // sums of g * d, g and d; h = (x - mean) * rstd follows from d
  T held_xhat[Layout::kHoldRow ? kPacks : 1][kLength];
  Pack<DY, kLength> held_dy[Layout::kHoldRow ? kPacks : 1];
  Pack<Weight, kLength> held_weight[Layout::kHoldWeight ? kPacks : 1];
  DX* dx_row;
  long long dx_step;
  T wild = 0;  // NaN once a row was wild: this takes one register and no branch

  static constexpr int kSumsOfPack = kByIndex ? 1 : kLength;
  T dweight[kDWeight ? kPacks : 1][kSumsOfPack] = {};
  T dbias[kDBias ? kPacks : 1][kSumsOfPack] = {};
  T held_sums[Layout::kHoldSums ? kPacks : 1][kLength] = {};
  bool flushed = false;

  __device__ __forceinline__ explicit PipelinedBackward(const BackwardPipelinedArguments<Op>& given)
      : args(of_group<Op, Layout::kClusterBlocks>(given)) {
    // Otherwise values made of the strides are kept from row to row, and spilled in some kernels.
    make_opaque(args.x_stride);
    make_opaque(args.dy_stride);
    if constexpr (kPresent<DResidualOut>) make_opaque(args.dresidual_out_stride);
    n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
    mailboxes = static_cast<char*>(dynamic_shared_memory()) + TeamOf::template scratch_bytes<T>();
    mailbox =
        reinterpret_cast<Mailbox*>(mailboxes) + (kTeams > 1 ? team.team * Layout::kStages : 0);
    stages = mailboxes + kMailboxBytes;
    stage_of_weight = stages + Layout::kStages * kStageBytes;
    stage_of_teams = stage_of_weight + (Layout::kHoldWeight ? 0 : StageOfWeight::kBytes);
    stage_of_sums = stage_of_teams + (kTeams > 1 ? kTeams * StageOfSums::kBytes : 0);
    const PlaceOfBlock place = place_of_block<Op, Layout::kClusterBlocks>(given);
    group = place.group;
    cluster = place.block / Layout::kClusterBlocks;
    clusters = place.blocks / Layout::kClusterBlocks;
    rows_a_turn = clusters * kTeams;
    row = fetched = cluster * kTeams + team.team;
    counted_from = kOwnAddresses ? first_column(0) : 0;
    fetched_x = args.x + row * args.x_stride + counted_from;
    fetched_dy = args.dy + row * args.dy_stride + counted_from;
    fetched_total = args.dresidual_out + row * args.dresidual_out_stride + counted_from;
    policy = evict_last_if_large(rows_of_all<Op>(args) * n_cols * kReadBytes);
    own = own_place(StageOfX::place(stages, 0, 0));
  }

  // ---- columns -----------------------------------------------------------------------------------

  __device__ __forceinline__ int first_column(int p) const {
    return team.template first_column<kPacks, kLength>(p);
  }
  __device__ __forceinline__ int end_of_row(int p) const {
    return team.template end_of_row<kPacks, kLength>(p, n_cols);
  }
  // Pack p and the row's end, from where the thread counts.
  __device__ __forceinline__ int column(int p) const {
    return kOwnAddresses ? p * kStep : first_column(p);
  }
  __device__ __forceinline__ int left_of_row(int p) const {
    if constexpr (!kOwnAddresses) return end_of_row(p);
    return Layout::kFull || p + 1 < kPacks ? (p + 1) * kStep : n_cols - counted_from;
  }
  // Otherwise each element's comparison with it is kept for the next step.
  __device__ __forceinline__ void forget_comparisons() {
    if constexpr (!Layout::kFull) make_opaque(n_cols);
  }

  // ---- rows on their way into shared memory ---------------------------------------------------------

  // Asks for a pack of an operand. Its part of a stage begins `before` bytes behind that of x.
  template <typename StageOf, typename Element>
  __device__ __forceinline__ void fetch_pack(int into, int before, int p, const Element* source,
                                             int n) {
    char* const place = stages + into * kStageBytes + before;
    if constexpr (StageOf::template kTakesPolicy<Layout::kVector> && kPolicy) {
      StageOf::template fetch<Layout::kThroughL1>(own + before, p, source, column(p), n, policy);
    } else if constexpr (StageOf::kCells) {
      // The packs behind this one are not known to begin in a row, if they belong to a cluster.
      StageOf::fetch_cells(place, p, source, column(p), n,
                           Layout::kClusterBlocks == 1 ? kPacks - 1 - p : 0);
    } else {
      StageOf::template fetch<Layout::kVector, Layout::kThroughL1>(place, p, source, column(p), n);
    }
  }
  __device__ __forceinline__ void fetch(int into, int p) {
    const int n = fetched < args.n_rows ? (Layout::kCells ? n_cols : left_of_row(p)) : 0;
    fetch_pack<StageOfX>(into, 0, p, fetched_x, n);
    fetch_pack<StageOfDY>(into, StageOfX::kBytes, p, fetched_dy, n);
    if constexpr (Layout::kTotalAhead)
      fetch_pack<StageOfTotal>(into, kBeforeTotal, p, fetched_total, n);
  }
  __device__ __forceinline__ void fetched_all(int into) {
    own = own + (into + 1 == Layout::kStages ? -(Layout::kStages - 1) * kStageBytes : kStageBytes);
    commit_copies();
    fetched += rows_a_turn;
    fetched_x += rows_a_turn * args.x_stride;
    fetched_dy += rows_a_turn * args.dy_stride;
    fetched_total += rows_a_turn * args.dresidual_out_stride;
  }

  __device__ __forceinline__ bool asks() const { return team.rank == kAsker; }
  __device__ __forceinline__ void fetch_bulk(int into, long long of_row) {
    if constexpr (Layout::kBulk) {
      if (of_row >= args.n_rows) return;
      char* const place = stages + into * kStageBytes;
      const int thread = thread_index() - kAsker, first = first_column(0) - kAsker * kLength;
      expect_bytes(mailbox + into, kStep * kPacks * kReadBytes);
      StageOfX::template fetch_bulk<Layout::kRowThreads>(
          place, thread, args.x + of_row * args.x_stride + first, mailbox + into, policy);
      StageOfDY::template fetch_bulk<Layout::kRowThreads>(place + StageOfX::kBytes, thread,
                                                          args.dy + of_row * args.dy_stride + first,
                                                          mailbox + into, policy);
    }
  }
  __device__ __forceinline__ void fetch_rows(int first, int end) {
    if constexpr (Layout::kBulk) {
      if (asks()) {
#pragma unroll 1
        for (int into = first; into < end; ++into) fetch_bulk(into, row + into * rows_a_turn);
      }
    } else {
#pragma unroll
      for (int into = first; into < end; ++into) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) fetch(into, p);
        fetched_all(into);
      }
    }
  }
  __device__ __forceinline__ void open_mailboxes() {
    if constexpr (Layout::kBulk) {
      commit_copies();
      if (asks()) {
#pragma unroll 1
        for (int i = 0; i < Layout::kStages; ++i) open_mailbox(mailbox + i);
        show_mailboxes();
      }
    }
  }
  // By cells, lanes show each other what they have copied.
  __device__ __forceinline__ void meet_lanes() const {
    if constexpr (Layout::kCells) warp_barrier();
  }
  __device__ __forceinline__ unsigned vector_of_row(long long of_row) const {
    return static_cast<unsigned>(of_row) % static_cast<unsigned>(args.n_vectors);
  }
  // Where the thread's packs have their elements, and its team its partials.
  __device__ __forceinline__ void find_elements() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      elements[p] = first_column(p) < n_cols ? quotient(first_column(p), args.n_repeats) : 0;
    }
    const long long stride = partials_stride(n_cols / (kLanesAlike * kLength));
    by_rows = args.n_groups < args.n_vectors;
    if (by_rows) {
      vector_ahead = vector_of_row(row);
      vector_step = vector_of_row(rows_a_turn);
      own_partials = args.partials + row * stride;
      partials_step = rows_a_turn * stride;
      partials_of_gradient = args.n_rows * stride;
    } else {
      own_partials = args.partials + row_of_partials<Op>(args, group, 0, row, rows_a_turn) * stride;
      partials_of_gradient = args.n_groups * rows_a_turn * stride;
    }
  }
  __device__ __forceinline__ void ask_for_elements(Beside& beside) const {
    if constexpr (kPresent<Weight>) {
      const Weight* const vector = args.weight + vector_ahead * args.weight_step;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) beside.weights[p] = vector[elements[p]];
    }
  }
  __device__ __forceinline__ Beside load_beside(long long of_row) {
    Beside beside;
    if constexpr (StageOfX::kCells)
      beside.distance_of_x = bytes_before<X, kLength>(args.x + of_row * args.x_stride);
    if constexpr (StageOfDY::kCells)
      beside.distance_of_dy = bytes_before<DY, kLength>(args.dy + of_row * args.dy_stride);
    if constexpr (StageOfTotal::kCells)
      beside.distance_of_total = bytes_before<DResidualOut, kLength>(
          args.dresidual_out + of_row * args.dresidual_out_stride);
    if (of_row < args.n_rows) {
      const long long place = place_of_row<Op>(args, of_row);
      if constexpr (Op::kCentered) beside.mean = kOwnAddresses ? *mean_ahead : args.mean[place];
      beside.rstd = kOwnAddresses ? *rstd_ahead : args.rstd[place];
      if constexpr (kByIndex) ask_for_elements(beside);
      if constexpr (Op::Epilogue::kHasBits) {
        const unsigned char* bytes = args.bitmask + place * bitmask_bytes(n_cols);
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          beside.bits[p] = load_bits(bytes, first_column(p), n_cols);
        }
      }
    }
    if constexpr (Op::kCentered) mean_ahead += place_of_row<Op>(args, rows_a_turn);
    rstd_ahead += place_of_row<Op>(args, rows_a_turn);
    if constexpr (kByIndex) {
      vector_ahead += vector_step;
      if (vector_ahead >= args.n_vectors) vector_ahead -= static_cast<unsigned>(args.n_vectors);
    }
    return beside;
  }

  __device__ __forceinline__ Pack<Weight, kLength> repeated_weights(int p) const {
    Pack<Weight, kLength> pack;
    if constexpr (Op::kRepeats > 0) {
      load_repeated<Op>(pack, args.weight, first_column(p), end_of_row(p), args.n_repeats);
    }
    return pack;
  }
  // Asks for the weight, the first rows and what goes with them.
  __device__ __forceinline__ void begin() {
    if constexpr (!Layout::kHoldWeight && !kByIndex) {
      // By way of the L1. Past it all teams would ask the L2 for the same lines, one after another
      // (notes.md#the-weight-by-way-of-l1).
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (Op::kRepeats > 0 && kPresent<Weight>) {
          StageOfWeight::write(repeated_weights(p), stage_of_weight, p);
        } else {
          StageOfWeight::template fetch<Layout::kVector, true>(stage_of_weight, p, args.weight,
                                                               first_column(p), end_of_row(p));
        }
      }
    }
    open_mailboxes();
    fetch_rows(0, kFirst);
    if constexpr (Layout::kBulk) {
      block_barrier();
      wait_for_copies<0>();
    }
    if constexpr (kByIndex) find_elements();
    mean_ahead = Op::kCentered ? args.mean + place_of_row<Op>(args, row) : nullptr;
    rstd_ahead = args.rstd + place_of_row<Op>(args, row);
    next = load_beside(row);
    after_next = load_beside(row + rows_a_turn);
    if constexpr (Layout::kHoldWeight) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (Op::kRepeats > 0) {
          held_weight[p] = repeated_weights(p);
        } else {
          load<Layout::kVector>(held_weight[p], args.weight, first_column(p), end_of_row(p));
        }
      }
    }
  }

  // ---- what is read of a row ---------------------------------------------------------------------

  __device__ __forceinline__ Pack<Weight, kLength> weights_of(int p, const Beside& beside) const {
    if constexpr (kByIndex) {
      Pack<Weight, kLength> pack;
      if constexpr (kPresent<Weight>) pack.fill(beside.weights[p]);
      return pack;
    } else if constexpr (Layout::kHoldWeight) {
      return held_weight[p];
    } else {
      return StageOfWeight::read(stage_of_weight, p);
    }
  }
  template <typename StageOf>
  __device__ __forceinline__ auto read(int before, int from, int p, int distance) const {
    if constexpr (kFromOwnPlace) {
      return StageOf::read(own + (Layout::kBulk ? from * kStageBytes : 0) + before, p);
    } else if constexpr (StageOf::kCells) {
      return StageOf::read_cells(stages + from * kStageBytes + before, p, distance);
    } else {
      return StageOf::read(stages + from * kStageBytes + before, p);
    }
  }
  __device__ __forceinline__ Pack<X, kLength> read_x(int from, int p, const Beside& beside) const {
    return read<StageOfX>(0, from, p, beside.distance_of_x);
  }
  __device__ __forceinline__ Pack<DResidualOut, kLength> read_total(int p, bool has_row) const {
    if constexpr (Layout::kTotalAhead) {
      return read<StageOfTotal>(kBeforeTotal, stage, p, current.distance_of_total);
    } else {
      Pack<DResidualOut, kLength> pack;
      load<Layout::kVector>(pack, args.dresidual_out + row * args.dresidual_out_stride,
                            first_column(p), has_row ? end_of_row(p) : 0);
      return pack;
    }
  }
  // dy of a pack, as the epilogue passes it.
  __device__ __forceinline__ Pack<DY, kLength> read_dy(int from, int p,
                                                       const Beside& beside) const {
    Pack<DY, kLength> pack = read<StageOfDY>(StageOfX::kBytes, from, p, beside.distance_of_dy);
    if constexpr (Op::Epilogue::kHasBits) {
      Op::Epilogue::backward(pack, beside.bits[p], first_column(p));
    }
    return pack;
  }

  // ---- the sums of a row -------------------------------------------------------------------------

  __device__ __forceinline__ void sum_up(int from, const Beside& beside, T (&into)[kSums]) {
    forget_comparisons();
    const Centring<Op::kCentered, T> centring(beside.mean, beside.rstd);
#pragma unroll
    for (int i = 0; i < kSums; ++i) into[i] = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Pack<X, kLength> row_x = read_x(from, p, beside);
      const Pack<DY, kLength> row_dy = read_dy(from, p, beside);
      add_to_sums<Op, Layout::kVector>(into, centring, row_x, row_dy, weights_of(p, beside),
                                       first_column(p), end_of_row(p));
      if constexpr (Layout::kHoldRow) {
        held_dy[p] = row_dy;
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          held_xhat[p][i] = centring.xhat_of(row_x.template get<T>(i), 0);
        }
        if constexpr (!Layout::kBulk) fetch(from, p);
      }
    }
    if constexpr (Layout::kHoldRow && !Layout::kBulk) fetched_all(from);
  }

  // The sums of a cluster's first row, and the rows that were not asked for at once.
  __device__ __forceinline__ void begin_sums() {
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
  }

  // kAhead: this row's sums are in flight, and those of the next row follow, if there is one.
  __device__ __forceinline__ void finish_sums(bool more, int next_stage, int next_parity,
                                              T (&next_sums)[kSums]) {
    if constexpr (!Layout::kBulk) wait_for_copies<Layout::kStages - 2>();
    meet_lanes();
    if (more) {
      if constexpr (Layout::kBulk) wait_for_bytes<false>(mailbox + next_stage, next_parity);
      sum_up(next_stage, next, next_sums);
    }
    team.template finish_reduction<Sum>(sums);
    if (more) team.template begin_reduction<Sum>(next_sums);
  }
  // Otherwise the row is waited for, and its sums as well.
  __device__ __forceinline__ void reduce_sums() {
    if constexpr (!Layout::kBulk) {
      wait_for_copies<Layout::kStages - 1>();
      meet_lanes();
    } else if (kTeams == 1 || row < args.n_rows) {
      wait_for_bytes<false>(mailbox + stage, parity);
    } else {  // in the last turn, next to a team that has a row
      char* const place = stages + stage * kStageBytes;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        StageOfX::write(Pack<X, kLength>{}, place, p);
        StageOfDY::write(Pack<DY, kLength>{}, place + StageOfX::kBytes, p);
      }
    }
    sum_up(stage, current, sums);
    team.template reduce<Sum>(sums);
  }
  // kBulk: a stage is free for the row kStages later than the one that was in it.
  __device__ __forceinline__ void ask_for_a_later_row() {
    if constexpr (Layout::kBulk) {
      if (asks()) {
        fetch_bulk(stage >= kLate ? stage - kLate : stage - kLate + Layout::kStages,
                   row + (Layout::kStages - kLate) * rows_a_turn);
      }
    }
  }

  // ---- dx, and the row's share of the weight gradients ----------------------------------------------

  // The gradient of a pack's inputs, from its xhat and dy.
  __device__ __forceinline__ void differentiate(T (&gradient)[kLength], int p,
                                                const T (&xhat)[kLength],
                                                const Pack<DY, kLength>& row_dy,
                                                const Pack<DResidualOut, kLength>& of_total,
                                                const RowMeans<Op::kCentered, T>& means) {
    const Pack<Weight, kLength> weights = weights_of(p, current);
    T of_weight = 0, of_bias = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T upstream = row_dy.template get<T>(i);
      const T of_x = dx_of<Op>(upstream, xhat[i], weights, i, means, current.rstd);
      gradient[i] = gradient_of_inputs(of_x, of_total, i);
      T& sum_of_weight = kByIndex ? of_weight : dweight[kDWeight ? p : 0][kByIndex ? 0 : i];
      T& sum_of_bias = kByIndex ? of_bias : dbias[kDBias ? p : 0][kByIndex ? 0 : i];
      if constexpr (kDWeight) sum_of_weight = fused_multiply_add(upstream, xhat[i], sum_of_weight);
      if constexpr (kDBias) sum_of_bias += upstream;
    }
    if constexpr (kByIndex && kDWeight) dweight[p][0] += of_weight;
    if constexpr (kByIndex && kDBias) dbias[p][0] += of_bias;
  }

  // If x moves by cells, dx leaves by words.
  __device__ __forceinline__ auto words_of_dx() const {
    if constexpr (StageOfX::kCells) {
      const int lane = team.rank % kLanes, of_first_lane = first_column(0) - lane * kLength;
      return Words<X, kLength, kLanes>(args.dx, row * args.dx_stride + of_first_lane, lane);
    } else {
      return None{};
    }
  }
  template <typename WordsOfDX>
  __device__ __forceinline__ void store_gradient(const T (&gradient)[kLength], int p, bool stores,
                                                 const WordsOfDX& words) {
    Pack<DX, kLength> stored;
    stored.set(gradient);
    char* const place = stages + stage * kStageBytes;
    const int n_stored = stores ? left_of_row(p) : 0;
    if constexpr (StageOfX::kCells) {
      const int of_first_lane = first_column(0) - team.rank % kLanes * kLength;
      words.store(
          stored, StageOfX::place_of_cells(place, p, 0), p * kStep,
          stores ? n_cols - of_first_lane - p * kStep : 0,
          kTeams == 1 && (Layout::kFull || (Layout::kClusterBlocks == 1 && p + 1 < kPacks)));
      warp_barrier();
    } else if constexpr (kByPlace) {
      using StageOfDX = Stage<DX, kLength, kPacks, Layout::kBlockThreads>;
      StageOfDX::write(stored, place, p);
      StageOfDX::template store<Layout::kVector>(place, p, dx_row, column(p), n_stored);
    } else {
      store<Layout::kVector>(stored, dx_row, column(p), n_stored);
    }
    if constexpr (kPresent<DResidual>) {
      Pack<DResidual, kLength> of_residual;
      of_residual.set(gradient);
      store<Layout::kVector>(of_residual,
                             args.dresidual + row * args.dresidual_stride + counted_from, column(p),
                             n_stored);
    }
  }
  // The row's place is given to a later row, if it has not been yet.
  __device__ __forceinline__ void write_dx() {
    const Centring<Op::kCentered, T> centring(current.mean, current.rstd);
    RowMeans<Op::kCentered, T> means(sums, centring.significand, args.inv_n);
    mark_if_wild(means, is_in_place<Op>(args));
    forget_comparisons();
    const bool stores = kHasRow || row < args.n_rows;
    const auto words = words_of_dx();
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
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
      const Pack<DResidualOut, kLength> of_total = read_total(p, stores);
      T gradient[kLength];
      differentiate(gradient, p, xhat, row_dy, of_total, means);
      if constexpr (!Layout::kHoldRow) meet_lanes();  // before others fill what this one read
      store_gradient(gradient, p, stores, words);
      if constexpr (!Layout::kBulk && !Layout::kHoldRow) fetch(stage, p);
    }
    if constexpr (!Layout::kBulk && !Layout::kHoldRow) fetched_all(stage);
    wild += means.g_xhat * 0;
  }

  // ---- a row after another ------------------------------------------------------------------------

  __device__ __forceinline__ void begin_rows() {
    dx_row = args.dx + row * args.dx_stride + counted_from;
    dx_step = rows_a_turn * args.dx_stride;
    if constexpr (kOwnAddresses) make_opaque(dx_step);  // otherwise it is computed each time
  }
  // `more`: there is another row behind this one.
  __device__ __forceinline__ void do_row(bool more) {
    current = next;
    next = after_next;
    after_next = load_beside(row + 2 * rows_a_turn);
    const int next_stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    const int next_parity = stage + 1 == Layout::kStages ? parity ^ 1 : parity;
    T next_sums[kSums];
    if constexpr (kAhead) {
      finish_sums(more, next_stage, next_parity, next_sums);
    } else {
      reduce_sums();
    }
    ask_for_a_later_row();
    write_dx();
    parity = next_parity;
    stage = next_stage;
    row += rows_a_turn;
    dx_row += dx_step;
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = next_sums[i];
    }
  }

  // ---- the weight gradients' sums -----------------------------------------------------------------

  // kByIndex: the same for both gradients, from the sums of packs. The partials are short, and each team has some.
  __device__ __forceinline__ void flush_packs() {
    constexpr int kPlaces = kPacks > 4 ? 8 : kPacks > 2 ? 4 : kPacks;  // a power of two
    constexpr int kCount = (kDWeight + kDBias) * kPlaces;
    T sums[kCount] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kDWeight) sums[p] = dweight[p][0];
      if constexpr (kDBias) sums[kCount - kPlaces + p] = dbias[p][0];
      if constexpr (kDWeight) dweight[p][0] = 0;
      if constexpr (kDBias) dbias[p][0] = 0;
    }
    fold<kLanesAlike>(sums, team.rank);
    constexpr int kLeft = kCount > kLanesAlike ? kCount / kLanesAlike : 1;
    constexpr int kLanesEach = kLanesAlike * kLeft / kCount;
    const bool stores =
        team.rank % kLanesEach == 0 && (!by_rows || row - rows_a_turn < args.n_rows);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const int place = team.rank % kLanesAlike / kLanesEach * kLeft + i;
      const int first = first_column(place % kPlaces);
      if (stores && place % kPlaces < kPacks && first < n_cols) {
        T* const sum =
            own_partials + place / kPlaces * partials_of_gradient + first / (kLanesAlike * kLength);
        *sum = (flushed ? *sum : T(0)) + sums[i];
      }
    }
    own_partials += partials_step;
  }
  // Adds one gradient of the last rows to its sums so far. These wait in shared memory, in
  // registers or in partials, and go to partials when they are complete.
  __device__ __forceinline__ void flush(T (&gradient)[kPacks][kLength], int index, bool complete) {
    T* const target = args.partials + row_of_partials<Op>(args, group, index, cluster, clusters) *
                                          partials_stride(n_cols);
    char* const place = stage_of_sums + index * StageOfSums::kBytes;
    if constexpr (kTeams == 1) {
      flush_own(gradient, index, target, place, complete);
    } else {
      const bool shared = index < Layout::kSharedSums;
      flush_teams(gradient, target, shared ? reinterpret_cast<T*>(place) : target, complete);
    }
  }
  __device__ __forceinline__ void flush_own(T (&gradient)[kPacks][kLength], int index, T* target,
                                            char* place, bool complete) {
    const bool shared = index < Layout::kSharedSums, in_partials = !(shared || Layout::kHoldSums);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Pack<T, kLength> total = {};
      if (shared) {
        if (flushed) total = StageOfSums::read(place, p);
      } else if constexpr (Layout::kHoldSums) {
        total.set(held_sums[p]);
      } else {
        load<kLength>(total, target, first_column(p), flushed ? end_of_row(p) : 0);
      }
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        total.set(i, total.template get<T>(i) + gradient[p][i]);
        gradient[p][i] = 0;
      }
      if (in_partials) {
        // By sectors only the last time. Otherwise a lane would read what another has stored, which
        // takes a barrier, and LayerNorm's 6 and 7 packs would spill.
        store<kLength>(total, target, first_column(p), end_of_row(p));
      } else if (complete) {
        store_by_sectors<kLength, Layout::kRowThreads>(total, target, first_column(p),
                                                       end_of_row(p));
      } else if (shared) {
        StageOfSums::write(total, place, p);
      } else if constexpr (Layout::kHoldSums) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) held_sums[p][i] = total.template get<T>(i);
      }
    }
  }
  // The sums of several teams meet in shared memory, one team after another. Accesses are of 16
  // bytes, since rows of partials are whole packs (notes.md#sums-of-teams-by-16-bytes).
  __device__ __forceinline__ void flush_teams(T (&gradient)[kPacks][kLength], T* target, T* so_far,
                                              bool complete) {
    T* const of_teams = reinterpret_cast<T*>(stage_of_teams);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Pack<T, kLength> of_team;
      of_team.set(gradient[p]);
#pragma unroll
      for (int i = 0; i < kLength; ++i) gradient[p][i] = 0;
      store<kLength>(of_team, of_teams + team.team * kColumns, first_column(p), kColumns);
    }
    block_barrier();
    T* const now = complete ? target : so_far;
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int first = thread_index() * kWidth; first < n_cols;
         first += Layout::kBlockThreads * kWidth) {
      Pack<T, kWidth> total;
      load<kWidth>(total, of_teams + first, 0, kWidth);
#pragma unroll 4
      for (int i = 1; i < kTeams; ++i) add_gradients(total, of_teams + i * kColumns + first);
      if (flushed) add_gradients(total, so_far + first);
      store<kWidth>(total, now + first, 0, kWidth);
    }
    block_barrier();
  }
  __device__ __forceinline__ void flush_all(bool complete) {
    forget_comparisons();
    if constexpr (kByIndex) {
      if constexpr (kDWeight || kDBias) flush_packs();
    } else {
      if constexpr (kDWeight) flush(dweight, 0, complete);
      if constexpr (kDBias) flush(dbias, kDWeight ? 1 : 0, complete);
    }
    flushed = !by_rows;
  }

  // Writes dx of wild rows.
  __device__ __forceinline__ void write_wild_rows(const BackwardPipelinedArguments<Op>& all) {
    if constexpr (kSame<T, float>) {
      if (!team.any(wild != T(0)) || is_in_place<Op>(args)) return;
      warp_barrier();  // lanes may have stored parts of each other's dx
      const auto& given = of_group<Op, Layout::kClusterBlocks>(all);
      const int first = first_column(0);
#pragma unroll 1
      for (long long block_row = cluster * kTeams; block_row < args.n_rows;
           block_row += rows_a_turn) {
        row = block_row + team.team;
        float first_dx = 0;
        if (row < args.n_rows && first < n_cols)
          first_dx = convert<float>(args.dx[row * args.dx_stride + first]);
        const bool skips = first_dx == first_dx;
        if constexpr (kByIndex) {
          auto of_row = given;
          if (by_rows) take_vector<Op>(of_row, vector_of_row(row));
          team = write_wild_row<Op, kPacks>(team, skips, row, of_row);
        } else {
          team = write_wild_row<Op, kPacks>(team, skips, row, given);
        }
      }
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_backward_pipelined(const __grid_constant__ BackwardPipelinedArguments<Op> given) {
  using Pass = PipelinedBackward<Op, Layout>;
  Pass pass(given);
  pass.begin();
  pass.begin_sums();
  pass.begin_rows();
  const int turns = pass.by_rows ? 1 : kTurns;
  int turn = 0;
  for (long long block_row = pass.cluster * Pass::kTeams; block_row < pass.args.n_rows;
       block_row += pass.rows_a_turn) {
    pass.do_row(block_row + pass.rows_a_turn < pass.args.n_rows);
    if (++turn == turns) {
      pass.flush_all(false);
      turn = 0;
    }
  }
  // Not earlier (notes.md#when-the-reduction-may-start). Without weight gradients no kernel
  // follows.
  if constexpr (Pass::kDWeight || Pass::kDBias) let_next_kernel_start();
  if (!pass.by_rows) pass.flush_all(true);
  pass.write_wild_rows(given);
}
