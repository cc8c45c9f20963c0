// Forward of RMSNorm (kCentered = false) and LayerNorm (kCentered = true), for rows that fit in the
// shared memory of a block, or of a cluster of blocks, but not in registers.
//
//   y = ((x - mean) * rstd) * (weight [+ 1 if kZeroCentered]) + bias,   rstd = 1 / sqrt(variance + eps)
//   [of x + residual in place of x, stored to residual_out, if AddResidual: prologue.cuh]
//   [y = min(max(y, lower), upper) if Clamp, its bitmask stored with the statistics: epilogue.cuh]
//
// Layout:    x and y are n_rows rows of n_cols elements, rows x_stride and y_stride elements apart;
//            weight and bias are one row (others: groups.cuh); mean and rstd one value a row; bitmask (n_cols + 7) / 8
//            bytes a row. y may be x. A row has at least one whole pack, in LayerNorm at least
//            kFirstElements. kFull: its columns fill the team's packs exactly.
// Grid:      no more clusters of kClusterBlocks blocks than rows, nor than run at once. Each has kStages - 1 rows on
//            their way into shared memory. They take rows in turn. If kCounted and there is a `count`, 0 before the
//            launch, each takes the next row when it has room for one, since some multiprocessors are slower
//            (notes.md#rows-taken-by-a-count).
// Traffic:   x read once; in LayerNorm every warp also reads the first 64 elements. y written once; weight and bias
//            once a block.
// Thread:    pack p of its block's columns for p = rank, rank + kBlockThreads, ... (kPacksPerThread
//            of them).
// kCells:    stage.cuh; for rows whose addresses allow accesses of 4 bytes or less. Their y leaves by words
//            (unaligned.cuh) if it is no wider than x. The lanes exchange the words in x's place.
// kResidualAhead: the residual waits in shared memory as well. Otherwise it is read where it is added, twice.
// Order:     a thread's packs in turn, then the team's reduction. It is a function of n_cols, the dtypes and the
//            epilogue, never of n_rows or alignment.
// Result:    thread 0 of a cluster's first block writes the row's mean and rstd.
#include "affine.cuh"
#include "epilogue.cuh"
#include "groups.cuh"
#include "prologue.cuh"
#include "stage.cuh"
#include "statistics.cuh"
#include "team.cuh"

// The kernel's state and its steps.
template <typename Op, typename Layout>
struct PipelinedForward {
  using Arguments = ForwardPipelinedArguments<Op>;
  using X = typename Op::X;
  using Branch = typename Op::Branch;
  using Residual = typename Op::Residual;
  using Weight = typename Op::Weight;
  using Bias = typename Op::Bias;
  using Y = typename Op::Y;
  using T = Compute<X>;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kPacks = Layout::kPacksPerThread;
  using TeamOf = Team<Layout::kBlockThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  using StageOfX = Stage<Branch, kLength, kPacks, Layout::kBlockThreads, Layout::kCells ? 32 : 0>;
  static constexpr bool kAdds = Op::Prologue::kAdds;
  using Ahead = typename Either<Layout::kResidualAhead, Residual, None>::type;
  using StageOfResidual = Stage<Ahead, kLength, kPacks, Layout::kBlockThreads>;
  static constexpr int kStageBytes = StageOfX::kBytes + StageOfResidual::kBytes;
  static_assert(!kAdds || !Layout::kCells, "residual_out does not leave by words");
  using StageOfWeight = Stage<Weight, kLength, kPacks, Layout::kBlockThreads>;
  using StageOfBias = Stage<Bias, kLength, kPacks, Layout::kBlockThreads>;
  static constexpr int kColumns =
      Layout::kClusterBlocks * Layout::kBlockThreads * Layout::kPacksPerThread * kLength;
  static_assert(Layout::kStages >= 2, "the first row and the second are asked for at once");
  static_assert(TeamOf::template scratch_bytes<T>() % 128 == 0, "stages begin at a line");
  // A float32 bias of 16 blocks comes after the first row's sums (notes.md#bias-of-16-blocks).
  static constexpr bool kBiasLater = Layout::kClusterBlocks == 16 && sizeof(Bias) == 4;
  static constexpr bool kStoresWords = StageOfX::kCells && sizeof(Y) <= sizeof(X);
  // So many warps ask the count, one after the other.
  static constexpr int kTurns = Layout::kBlockThreads / 32 < 4 ? Layout::kBlockThreads / 32 : 4;
  static constexpr int kSums = Op::kCentered ? 3 : 1;
  // Elements that serve several columns are few, and read as they are needed. So a cluster takes rows of all vectors, as
  // if there were one group: group_step rows in a row have one vector.
  static constexpr bool kByIndex = Op::kRepeats > 0;
  // If a pack's columns have one element, it is asked for before the row's sums are waited for.
  static constexpr bool kOneElement = Op::kRepeats >= kLength;

  // A row's first mean, and its sums of d * d, d and |d|, with d = x - guess.
  struct Sums {
    T guess;
    T of_row[kSums];
  };
  // A measured row. Its packs were divided by `unit` and are read from `distance` on.
  struct Measured {
    Statistics<T> statistics;
    Scale<T> scale;
    T unit;
    int distance;
  };

  // The arrays are separate, since as members they would keep all others in memory until loops over
  // them are unrolled (notes.md#state-in-structs).
  struct Arrays {
    int rows[Layout::kStages];  // this row, and those in flight
    Pack<Branch, kLength> first_pack;
    Pack<Residual, kLength> first_residual;
    Pack<Weight, kLength> weight[Layout::kHoldWeight ? Layout::kPacksPerThread : 1];
    Pack<Bias, kLength> bias[Layout::kHoldBias ? Layout::kPacksPerThread : 1];
    int elements[kOneElement ? kPacks : 1];  // of a vector, one a pack
    Weight weight_of_pack[kOneElement ? kPacks : 1];
    Bias bias_of_pack[kOneElement ? kPacks : 1];
  };

  const Arguments& args;
  Arrays& arrays;
  TeamOf team;
  int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  char* const shared = static_cast<char*>(dynamic_shared_memory());
  int* const sent_rows = reinterpret_cast<int*>(shared + TeamOf::template scratch_bytes<T>());
  char* const stages = shared + TeamOf::template scratch_bytes<T>() + 128;
  char* const stage_of_weight = stages + Layout::kStages * kStageBytes;
  char* const stage_of_bias = stage_of_weight + (Layout::kHoldWeight ? 0 : StageOfWeight::kBytes);
  const PlaceOfBlock place = place_of_block<Op, Layout::kClusterBlocks>(args);
  const int cluster = static_cast<int>(place.block / Layout::kClusterBlocks);
  const int clusters = static_cast<int>(place.blocks / Layout::kClusterBlocks);
  int fetched = cluster;  // the row to be asked for next, and where it is
  const Branch* fetched_x;
  const Residual* fetched_residual;
  const CachePolicy policy;
  OwnPlace own;    // in the stage to be filled next
  T inv_unit = 1;  // kAdds: the factor of a row that is read
  // Rows from first_counted on are counted. The first one that a warp tells was dealt out, and is
  // negative.
  const int first_counted = (Layout::kStages + kTurns) * clusters;
  const int warp = team.rank / 32;
  int turn = 0, asked = cluster + (warp - kTurns) * clusters;

  __device__ __forceinline__ PipelinedForward(const Arguments& args, Arrays& arrays)
      : args(args),
        arrays(arrays),
        fetched_x(args.x + fetched * args.x_stride),
        fetched_residual(args.residual + fetched * args.residual_stride),
        policy(evict_last_if_large(rows_of_all<Op>(args) * n_cols *
                                   (kBytesOf<Branch> + kBytesOf<Residual>))),
        own(own_place(Stage<X, kLength, kPacks, Layout::kBlockThreads>::place(stages, 0, 0))) {
#pragma unroll
    for (int i = 0; i < Layout::kStages; ++i) arrays.rows[i] = cluster + i * clusters;
  }

  // ---- places ----

  __device__ __forceinline__ int first_column(int p) const {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  }
  __device__ __forceinline__ int end_of_row(int p) const {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  }
  // From a thread's place to the one that it reads, for all packs of a row.
  __device__ __forceinline__ int distance_of(int of_row) const {
    const Branch* const row = args.x + of_row * args.x_stride;
    return StageOfX::kCells ? bytes_before<Branch, kLength>(row) : 0;
  }
  // By cells, lanes show each other what they have copied.
  static __device__ __forceinline__ void meet_lanes() {
    if constexpr (StageOfX::kCells) warp_barrier();
  }
  __device__ __forceinline__ Pack<Branch, kLength> read_x(int stage, int p, int distance) const {
    char* const place = stages + stage * kStageBytes;
    if constexpr (StageOfX::kCells) {
      return StageOfX::read_cells(place, p, distance);
    } else {
      return StageOfX::read(place, p);
    }
  }
  __device__ __forceinline__ Pack<Residual, kLength> read_residual(int stage, int p,
                                                                   long long row) const {
    if constexpr (!kAdds || Layout::kResidualAhead) {
      return StageOfResidual::read(stages + stage * kStageBytes + StageOfX::kBytes, p);
    } else {
      Pack<Residual, kLength> pack;
      load<Layout::kVector>(pack, args.residual + row * args.residual_stride, first_column(p),
                            end_of_row(p));
      return pack;
    }
  }
  // The value to normalize, as it was read.
  __device__ __forceinline__ Pack<X, kLength> read_total(int stage, int p, int distance,
                                                         long long row) const {
    return Op::Prologue::template forward<X>(read_x(stage, p, distance),
                                             read_residual(stage, p, row));
  }
  // The same in the unit that brings the row into range. Plain rows are multiplied where they wait.
  __device__ __forceinline__ Pack<X, kLength> in_unit(Pack<X, kLength> pack) const {
    if constexpr (kAdds && kCanLeaveRange<X>) {
      if (inv_unit != T(1)) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) pack.set(i, pack.template get<T>(i) * inv_unit);
      }
    }
    return pack;
  }
  __device__ __forceinline__ Pack<X, kLength> read(int stage, int p, int distance,
                                                   long long row) const {
    return in_unit(read_total(stage, p, distance, row));
  }

  // ---- asking for rows, weight and bias ----

  __device__ __forceinline__ void fetch(int stage, int p) {
    const int n = fetched < args.n_rows ? (Layout::kCells ? n_cols : end_of_row(p)) : 0;
    if constexpr (StageOfX::kCells) {
      StageOfX::fetch_cells(stages + stage * kStageBytes, p, fetched_x, first_column(p), n,
                            Layout::kClusterBlocks == 1 ? Layout::kPacksPerThread - 1 - p : 0);
    } else if constexpr (StageOfX::template kTakesPolicy<Layout::kVector>) {
      StageOfX::template fetch<false>(own, p, fetched_x, first_column(p), n, policy);
    } else {
      StageOfX::template fetch<Layout::kVector>(stages + stage * kStageBytes, p, fetched_x,
                                                first_column(p), n);
    }
    if constexpr (StageOfResidual::template kTakesPolicy<Layout::kVector>) {
      StageOfResidual::template fetch<false>(own + StageOfX::kBytes, p, fetched_residual,
                                             first_column(p), n, policy);
    } else if constexpr (Layout::kResidualAhead) {
      StageOfResidual::template fetch<Layout::kVector>(
          stages + stage * kStageBytes + StageOfX::kBytes, p, fetched_residual, first_column(p), n);
    }
  }
  __device__ __forceinline__ void fetch_row(int stage) {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) fetch(stage, p);
  }
  __device__ __forceinline__ void fetched_all(int stage) {
    own = own + (stage + 1 == Layout::kStages ? -(Layout::kStages - 1) * kStageBytes : kStageBytes);
    commit_copies();
    fetched += clusters;
    fetched_x += clusters * args.x_stride;
    fetched_residual += clusters * args.residual_stride;
  }
  __device__ __forceinline__ void load_first_pack(int of_row) {
    if constexpr (Op::kCentered) {
      // Past the last row, the last one's is loaded and not used. A load under a condition ends in
      // a move that waits for it. Another block may write y over it.
      const long long there = of_row < args.n_rows ? of_row : args.n_rows - 1;
      loads_are_unused(of_row >= args.n_rows);
      load_first<Layout::kVector>(arrays.first_pack, args.x + there * args.x_stride);
      if constexpr (kAdds)
        load_first<Layout::kVector>(arrays.first_residual,
                                    args.residual + there * args.residual_stride);
      loads_are_unused(false);
    }
  }
  __device__ __forceinline__ T guess_of_first_pack() {
    T guess = 0;
    if constexpr (Op::kCentered) {
      // Nothing is computed from it earlier, since that would wait for the load as well.
#pragma unroll
      for (unsigned& word : arrays.first_pack.words) make_opaque(word);
      if constexpr (kAdds) {
#pragma unroll
        for (unsigned& word : arrays.first_residual.words) make_opaque(word);
      }
      guess = first_mean_by_warp<T>(
          Op::Prologue::template forward<X>(arrays.first_pack, arrays.first_residual));
    }
    return guess;
  }
  // Copies of half a pack are of half a sector, so they come by way of the L1
  // (notes.md#weight-and-bias-by-way-of-l1).
  __device__ __forceinline__ void fetch_weight_and_bias() {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (!Layout::kHoldWeight && !kByIndex) {
        StageOfWeight::template fetch<Layout::kVector, true>(stage_of_weight, p, args.weight,
                                                             first_column(p), end_of_row(p));
      }
      if constexpr (!Layout::kHoldBias && !kByIndex) {
        StageOfBias::template fetch<Layout::kVector, true>(stage_of_bias, p, args.bias,
                                                           first_column(p), end_of_row(p));
      }
    }
  }
  template <typename Operand>
  __device__ __forceinline__ void load_held(Pack<Operand, kLength>& pack, const Operand* operand,
                                            int p) const {
    // With load_operand, 8 packs would spill more (notes.md#held-weights-by-plain-loads).
    if constexpr (Layout::kPacksPerThread == 8) {
      load<Layout::kVector>(pack, operand, first_column(p), end_of_row(p));
    } else {
      load_operand<Layout::kVector>(pack, operand, first_column(p), end_of_row(p));
    }
  }
  __device__ __forceinline__ void load_weight() {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (Layout::kHoldWeight && !kByIndex) load_held(arrays.weight[p], args.weight, p);
    }
  }
  __device__ __forceinline__ void load_bias() {
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      if constexpr (Layout::kHoldBias && !kByIndex) load_held(arrays.bias[p], args.bias, p);
    }
  }
  // The third row and later ones are asked for after the first row's sums, which they would delay
  // (notes.md#rows-asked-for-before-the-first-sums).
  __device__ __forceinline__ void ask_for_first_rows() {
    load_first_pack(arrays.rows[0]);
    fetch_row(0);
    fetched_all(0);
    fetch_row(1);
    fetch_weight_and_bias();
    fetched_all(1);
    load_weight();
    if constexpr (!kBiasLater) load_bias();
  }
  __device__ __forceinline__ void ask_for_later_rows() {
    if constexpr (kBiasLater) load_bias();
#pragma unroll
    for (int stage = 2; stage < Layout::kStages; ++stage) {
      fetch_row(stage);
      fetched_all(stage);
    }
  }

  // ---- sums ----

  __device__ __forceinline__ void sum_up(int stage, int distance, long long row, T shift,
                                         T (&sums)[kSums]) {
    if constexpr (!Layout::kFull)
      make_opaque(n_cols);  // else each element's comparison with it is kept for the next step
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = 0;
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> pack = read(stage, p, distance, row);
      T of_pack[kSums] = {};
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        // Past the end x is 0, too, so one shift serves an access.
        const bool is_inside =
            !Op::kCentered || inside<Layout::kVector>(first_column(p), i, end_of_row(p));
        add_deviation(of_pack, pack.template get<T>(i) - (is_inside ? shift : T(0)));
      }
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] += of_pack[k];
    }
  }
  // Some warps of a cluster's first block ask the count, each after the one before it, so that rows
  // only grow. They tell the others with the sums of a later row (notes.md#who-asks-the-count).
  __device__ __forceinline__ void begin_reduction(T (&sums)[kSums]) {
    if constexpr (Layout::kCounted) {
      const bool sends = team.block == 0 && warp == turn;
      team.template begin_reduction<Sum>(sums, sends, asked, sent_rows, [&] {
        if (args.count == nullptr) {
          asked += kTurns * clusters;
        } else if (team.rank % 32 == 0) {
          asked = count_up(args.count);
        }
      });
      turn = turn + 1 == kTurns ? 0 : turn + 1;
    } else {
      team.template begin_reduction<Sum>(sums);
    }
  }
  __device__ __forceinline__ void sum_up_first_row(Sums& sums) {
    sums.guess = guess_of_first_pack();
    load_first_pack(arrays.rows[1]);
    wait_for_copies<1>();
    meet_lanes();
    sum_up(0, distance_of(arrays.rows[0]), arrays.rows[0], sums.guess, sums.of_row);
    team.meet();
    begin_reduction(sums.of_row);
  }
  __device__ __forceinline__ bool has_row() const { return arrays.rows[0] < args.n_rows; }
  __device__ __forceinline__ bool has_next_row() const { return arrays.rows[1] < args.n_rows; }
  // Forms the sums of the next row, if there is one.
  __device__ __forceinline__ void sum_up_next_row(Sums& next, int next_stage, bool more) {
    next.guess = guess_of_first_pack();
    if constexpr (Layout::kStages > 2) {
      load_first_pack(arrays.rows[2]);
    } else if constexpr (!Layout::kCounted) {
      load_first_pack(fetched);
    }
    wait_for_copies<Layout::kStages - 2>();
    meet_lanes();
    if (more)
      sum_up(next_stage, distance_of(arrays.rows[1]), arrays.rows[1], next.guess, next.of_row);
  }
  // Ends the sums of this row. The row to be asked for next comes with them.
  __device__ __forceinline__ void finish_reduction(T (&sums)[kSums]) {
    team.template finish_reduction<Sum>(sums);
    if constexpr (Layout::kCounted) {
      fetched = first_counted + team.received(sent_rows);
      fetched_x = args.x + fetched * args.x_stride;
      fetched_residual = args.residual + fetched * args.residual_stride;
      if constexpr (Layout::kStages == 2) load_first_pack(fetched);
    }
  }

  // ---- mean and variance ----

  // Measures a row whose sums are known.
  __device__ __forceinline__ Statistics<T> measure(int stage, int distance, T guess,
                                                   T (&sums)[kSums]) {
    Statistics<T> statistics;
    statistics.shift = guess;
    finish<Op::kCentered>(statistics, sums, args.inv_n);
    if constexpr (Op::kCentered) {
      if (was_far(statistics)) {
        Statistics<T> again;
        again.shift = statistics.shift + statistics.correction;
        sum_up(stage, distance, arrays.rows[0], again.shift, sums);
        team.template reduce<Sum>(sums);
        finish<Op::kCentered>(again, sums, args.inv_n);
        statistics = again;
      }
      settle(statistics);
    }
    return statistics;
  }
  // Finds the largest element of a row, pack by pack. Packs side by side would take the registers
  // of 7 or 8 held packs of the weight.
  __device__ __forceinline__ T largest_of_row(int stage, int distance) {
    T largest[1] = {0};
#pragma unroll 1
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> pack = read(stage, p, distance, arrays.rows[0]);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        largest[0] = larger(absolute(pack.template get<T>(i)), largest[0]);
      }
    }
    team.template reduce<Max>(largest);
    return largest[0];
  }
  __device__ __forceinline__ void multiply_row(int stage, int distance, T factor) const {
#pragma unroll 1
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      Pack<Branch, kLength> pack = read_x(stage, p, distance);
#pragma unroll
      for (int i = 0; i < kLength; ++i) pack.set(i, pack.template get<T>(i) * factor);
      if constexpr (StageOfX::kCells) {
        warp_barrier();
        StageOfX::write_cells(pack, stages + stage * kStageBytes, p);
      } else {
        StageOfX::write(pack, stages + stage * kStageBytes, p);
      }
    }
  }
  // Brings a row into range, exactly, and measures it again.
  __device__ __forceinline__ void bring_into_range(Measured& row, int stage, T (&sums)[kSums]) {
    const T largest = largest_of_row(stage, row.distance);
    row.unit = unit_of(larger(largest, square_root(args.eps)));
    if constexpr (kAdds) {
      inv_unit = T(1) / row.unit;
    } else {
      multiply_row(stage, row.distance, T(1) / row.unit);
    }
    if constexpr (StageOfX::kCells) row.distance = 0;
    meet_lanes();
    sum_up(stage, row.distance, arrays.rows[0], T(0), sums);
    team.template reduce<Sum>(sums);
    row.statistics = measure(stage, row.distance, T(0), sums);
    row.scale = scale_in_unit(row.statistics.variance, args.eps, row.unit);
  }
  __device__ __forceinline__ Measured measure_row(int stage, Sums& sums) {
    Measured row;
    row.distance = distance_of(arrays.rows[0]);
    row.statistics = measure(stage, row.distance, sums.guess, sums.of_row);
    row.scale = scale_in_range(row.statistics.variance, args.eps);
    row.unit = 1;
    if constexpr (kCanLeaveRange<X>) {
      if (!in_range(row.statistics.variance + args.eps)) {
        bring_into_range(row, stage, sums.of_row);
      }
    }
    return row;
  }

  // ---- y and the statistics ----

  // kByIndex: the vectors of a row, of which only some elements are read.
  __device__ __forceinline__ long long vector_of_row(long long row) const {
    if constexpr (kByIndex) {
      const unsigned vector = static_cast<unsigned>(row) / static_cast<unsigned>(args.group_step);
      return vector % static_cast<unsigned>(args.n_vectors);
    } else {
      return 0;
    }
  }
  __device__ __forceinline__ void find_elements() {
    if constexpr (kOneElement) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int first = first_column(p) < n_cols ? first_column(p) : 0;
        arrays.elements[p] = quotient(first, args.n_repeats);
      }
    }
  }
  __device__ __forceinline__ void ask_for_elements() {
    if constexpr (kOneElement) {
      const long long vector = vector_of_row(arrays.rows[0]);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (kPresent<Weight>)
          arrays.weight_of_pack[p] = args.weight[vector * args.weight_step + arrays.elements[p]];
        if constexpr (kPresent<Bias>)
          arrays.bias_of_pack[p] = args.bias[vector * args.bias_step + arrays.elements[p]];
      }
    }
  }
  template <typename Operand, int Count>
  __device__ __forceinline__ Pack<Operand, kLength> by_index(
      const Operand* vector, int p, const Operand (&of_packs)[Count]) const {
    Pack<Operand, kLength> pack = {};
    if constexpr (kOneElement && kPresent<Operand>) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) pack.set(i, convert<Compute<Operand>>(of_packs[p]));
    } else {
      load_repeated<Op>(pack, vector, first_column(p), end_of_row(p), args.n_repeats);
    }
    return pack;
  }
  __device__ __forceinline__ Pack<Weight, kLength> weight_of(
      int p, [[maybe_unused]] long long vector) const {
    if constexpr (kByIndex) {
      return by_index(args.weight + vector * args.weight_step, p, arrays.weight_of_pack);
    } else if constexpr (Layout::kHoldWeight) {
      return arrays.weight[p];
    } else {
      return StageOfWeight::read(stage_of_weight, p);
    }
  }
  __device__ __forceinline__ Pack<Bias, kLength> bias_of(int p,
                                                         [[maybe_unused]] long long vector) const {
    if constexpr (kByIndex) {
      return by_index(args.bias + vector * args.bias_step, p, arrays.bias_of_pack);
    } else if constexpr (Layout::kHoldBias) {
      return arrays.bias[p];
    } else {
      return StageOfBias::read(stage_of_bias, p);
    }
  }
  // The words of y from an element on, if words store it.
  __device__ __forceinline__ auto words_of_y([[maybe_unused]] long long first) const {
    if constexpr (kStoresWords) {
      return Words<Y, kLength, 32>(args.y, first, team.rank % 32);
    } else {
      return None{};
    }
  }
  // Normalizes and stores the row. Each pack that was read makes room for one of a later row.
  __device__ __forceinline__ void write_y(const Measured& measured, int stage) {
    // Otherwise addresses of each pack are kept from row to row, and up to 128 bytes are spilled.
    make_opaque(team.rank);
    if constexpr (!Layout::kFull) make_opaque(n_cols);
    const Statistics<T>& statistics = measured.statistics;
    const Scale<T>& scale = measured.scale;
    const T offset = -statistics.correction * scale.of_row;
    const long long row = arrays.rows[0], vector = vector_of_row(row);
    constexpr int kStep = Layout::kBlockThreads * kLength;
    const int of_first_lane = first_column(0) - team.rank % 32 * kLength;
    const auto words = words_of_y(row * args.y_stride + of_first_lane);
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const Pack<X, kLength> total = read_total(stage, p, measured.distance, row);
      if constexpr (kAdds) {
        store_by_sectors<Layout::kVector, Layout::kBlockThreads>(
            total, args.residual_out + row * args.residual_out_stride, first_column(p),
            end_of_row(p));
      }
      const Pack<X, kLength> pack = in_unit(total);
      const Pack<Weight, kLength> weights = weight_of(p, vector);
      const Pack<Bias, kLength> biases = bias_of(p, vector);
      T values[kLength];
      const unsigned bits = normalize_pack<Op>(values, pack, statistics.shift, scale.of_row, offset,
                                               weights, biases, args);
      Pack<Y, kLength> normalized;
      normalized.set(values);
      meet_lanes();  // before others fill the place that this one read
      if constexpr (kStoresWords) {
        words.store(
            normalized, StageOfX::place_of_cells(stages + stage * kStageBytes, p, 0), p * kStep,
            n_cols - of_first_lane - p * kStep,
            Layout::kFull || (Layout::kClusterBlocks == 1 && p + 1 < Layout::kPacksPerThread));
        warp_barrier();
      } else {
        store_by_sectors<Layout::kVector, Layout::kBlockThreads>(
            normalized, args.y + row * args.y_stride, first_column(p), end_of_row(p));
      }
      if constexpr (Op::kStoresBits) {
        store_bits<Layout::kVector, kLength>(
            bits, args.bitmask + place_of_row<Op>(args, row) * bitmask_bytes(n_cols),
            first_column(p), n_cols);
      }
      fetch(stage, p);
    }
  }
  __device__ __forceinline__ void go_on(int stage) {
    inv_unit = 1;
#pragma unroll
    for (int i = 0; i + 1 < Layout::kStages; ++i) arrays.rows[i] = arrays.rows[i + 1];
    arrays.rows[Layout::kStages - 1] = fetched;
    fetched_all(stage);
  }
  // What the backward pass needs, if it is asked for.
  __device__ __forceinline__ void keep_statistics(const Measured& measured, long long row) const {
    if (args.rstd != nullptr && team.block == 0 && team.rank == 0) {
      const Statistics<T>& statistics = measured.statistics;
      const long long place = place_of_row<Op>(args, row);
      if constexpr (Op::kCentered)
        args.mean[place] = (statistics.shift + statistics.correction) * measured.unit;
      args.rstd[place] = measured.scale.rstd;
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_forward_pipelined(const __grid_constant__ ForwardPipelinedArguments<Op> given) {
  using Forward = PipelinedForward<Op, Layout>;
  const auto& args = of_group<Op, Layout::kClusterBlocks>(given);
  typename Forward::Arrays arrays;
  Forward forward(args, arrays);
  forward.find_elements();
  forward.ask_for_first_rows();
  typename Forward::Sums sums;
  forward.sum_up_first_row(sums);
  forward.ask_for_later_rows();
  int stage = 0;
  while (forward.has_row()) {
    const int next_stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    const bool more = forward.has_next_row();
    forward.ask_for_elements();
    // The next row is summed up while the sums of this one move between the threads.
    typename Forward::Sums next_sums;
    forward.sum_up_next_row(next_sums, next_stage, more);
    forward.finish_reduction(sums.of_row);
    const typename Forward::Measured measured = forward.measure_row(stage, sums);
    if (more) forward.begin_reduction(next_sums.of_row);
    const long long row = arrays.rows[0];
    forward.write_y(measured, stage);
    forward.go_on(stage);
    forward.keep_statistics(measured, row);
    stage = next_stage;
    sums = next_sums;
  }
}
