// Backward of a norm of cupynorm.fuse, for rows that fit in the shared memory of a block or of a cluster of blocks, and
// for longer ones.
//
//   value, y:  computed again from x, the inputs, mean and rstd, as forward does (fused_forward.cu)
//   dy, d_inputs = gradients of the epilogue, from those of its outputs
//   g = dy * (weight [+ 1]),   d_value = rstd * (g - xhat * mean(g * xhat) [- mean(g)])
//   dx, d_inputs += gradients of the prologue, from d_value and from those of its further outputs
//   dweight = sum dy * xhat,   dbias = sum dy,   and the sums of d_inputs for inputs that rows share
//
// The stored mean is rounded, so it serves only as a shift. LayerNorm's xhat is centred again by its own mean.
//
// Op:        cupynorm/_fused_source.py writes it, as for fused_forward.cu.
// Grid:      any number of clusters of kClusterBlocks blocks. Their teams (of kRowThreads threads a block) take rows in
//            turn. The next kStages - 1 rows are on their way into shared memory, and each thread reads what it copied.
// Traffic:   x, inputs and the outputs' gradients are read once, gradients written once, and partials once for each
//            kTurns rows of a team.
// Thread:    packs rank, rank + kRowThreads, ... of its block's columns (kPacksPerThread of them). It keeps g, and the
//            sums over rows.
// kStreams:  the row is longer than the team's packs, and none waits in shared memory. Each step takes one tile of so
//            many columns after another, and reads it again: once, if kCentered twice, for sums, and from the row's
//            end for the gradients. Each row is added to partials. A cluster has at most kTurns rows.
// Order:     a thread's packs in turn, compensated from pack to pack if kStreams; then the team's reduction. Sums over
//            rows: up to kTurns rows of a team in turn, then the block's teams in turn, then such sums in turn, then
//            reduce_partials.cu. The bits are the same from run to run.
// Result:    partials: for each sum over rows, a row for each cluster, partials_stride(n_cols) apart.
#include "affine.cuh"
#include "functions.cuh"
#include "gradient.cuh"
#include "stage.cuh"
#include "stream.cuh"
#include "team.cuh"

// Asks for a pack of an array.
template <typename StageOf, int Vector, typename T>
__device__ __forceinline__ void fetch_pack(char* stage, int p, const T* row, int first, int end,
                                           CachePolicy policy) {
  if constexpr (StageOf::template kTakesPolicy<Vector>) {
    StageOf::template fetch<false>(own_place(StageOf::place(stage, 0, 0)), p, row, first, end,
                                   policy);
  } else {
    StageOf::template fetch<Vector>(stage, p, row, first, end);
  }
}

template <typename Op, typename Layout>
struct FusedBackward {
  using T = typename Op::T;
  using Arguments = typename Op::Arguments;
  static constexpr int kPacks = Layout::kPacksPerThread, kLength = Layout::kPackLength;
  static constexpr int kColumns = Layout::kClusterBlocks * Layout::kRowThreads * kPacks * kLength;
  static constexpr bool kDWeight = kPresent<typename Op::Weight>;
  static constexpr int kFirstVector = kDWeight + Op::kDBias;
  static constexpr int kVectorSums = kFirstVector + Op::kVectors;
  static constexpr int kSums = Op::kCentered ? 2 : 1;
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  static constexpr int kTeams = TeamOf::kTeams;
  using Stages = typename Op::template Stages<kLength, kPacks, Layout::kBlockThreads>;
  using Rows = typename Op::template Rows<kLength>;
  using Vectors = typename Op::template Vectors<kLength>;
  using Index = typename ColumnOf<Layout::kStreams>::type;
  template <int Count>
  using SumsOf = SumsOfPacks<T, Count, Layout::kStreams>;

  struct Arrays {
    Rows rows[Layout::kStreams ? kPacks : 1];  // of a tile
    Vectors vectors[kPacks];
    Pack<typename Op::Weight, kLength> weights[kPacks];
    Pack<typename Op::Bias, kLength> biases[kPacks];
    T g[kPacks][kLength];
    T held[kPacks][Op::kHeld + 1][kLength];  // gradients of rows by the epilogue
    T sums_over_rows[kVectorSums + 1][kPacks][kLength];
  };

  const Arguments& args;
  TeamOf& team;
  Arrays& arrays;
  const Index n_cols = Layout::kFull ? kColumns : static_cast<Index>(args.n_cols);
  const long long cluster = block_index() / Layout::kClusterBlocks;
  const long long clusters = block_count() / Layout::kClusterBlocks;
  const long long rows_a_turn = clusters * kTeams;
  char* const stages =
      static_cast<char*>(dynamic_shared_memory()) + TeamOf::template scratch_bytes<T>();
  T* const of_teams = reinterpret_cast<T*>(stages + Layout::kStages * Stages::kBytes);
  long long row = cluster * kTeams + team.team, fetched = row;
  int stage = 0, next_stage = 0;
  Index tile = 0;  // its first column
  const CachePolicy policy = evict_last_if_large(Op::bytes_of_rows(args));

  __device__ __forceinline__ FusedBackward(const Arguments& args, TeamOf& team, Arrays& arrays)
      : args(args), team(team), arrays(arrays) {}

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

  // ---- rows on their way into shared memory ----

  __device__ __forceinline__ void fetch(int p) {
    Stages::template fetch<Layout::kVector>(stages + next_stage * Stages::kBytes, args, fetched, p,
                                            first_column(p),
                                            fetched < args.n_rows ? end_of_row(p) : 0, policy);
  }
  __device__ __forceinline__ void fetched_all() {
    commit_copies();
    fetched += rows_a_turn;
    next_stage = next_stage + 1 == Layout::kStages ? 0 : next_stage + 1;
  }
  __device__ __forceinline__ void load_shared() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const Index first = first_column(p), end = end_of_row(p);
      Op::template load_vectors<Layout::kVector>(arrays.vectors[p], args, first, end);
      load_operand<Layout::kVector>(arrays.weights[p], args.weight, first, end);
      load_operand<Layout::kVector>(arrays.biases[p], args.bias, first, end);
    }
  }
  __device__ __forceinline__ void begin() {
    if constexpr (!Layout::kStreams) {
#pragma unroll
      for (int i = 0; i < Layout::kStages; ++i) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) fetch(p);
        fetched_all();
      }
      load_shared();
    }
    forget_sums();
    team.meet();
  }
  __device__ __forceinline__ Rows read(int p) const {
    if constexpr (Layout::kStreams) return arrays.rows[p];
    return Stages::read(stages + stage * Stages::kBytes, p);
  }

  // ---- rows that are read again ----

  // Calls visit() for all packs of the row: at once, or a tile at a time. If ForValue, only what the
  // value needs is read. The last time it starts at the row's end, which the L2 still has.
  template <bool ForValue, bool IsLast, typename Visit>
  __device__ __forceinline__ void for_each_tile(Visit visit) {
    if constexpr (Layout::kStreams) {
      const Index last = (n_cols - 1) / kColumns * kColumns;
#pragma unroll 1
      for (Index columns = 0; columns <= last; columns += kColumns) {
        tile = IsLast ? last - columns : columns;
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          Op::template load_rows<Layout::kVector, ForValue>(arrays.rows[p], args, row,
                                                            first_column(p), n_cols,
                                                            IsLast ? evict_first() : evict_last());
        }
        load_shared();
        visit();
      }
    } else {
      visit();
    }
  }

  // ---- a row ----

  __device__ __forceinline__ void do_row() {
    const bool active = row < args.n_rows;
    const typename Op::Numbers numbers = Op::numbers_of(args, active ? row : 0);
    const T rstd = active ? args.rstd[row] : T(0);
    const Centring<Op::kCentered, T> centring(Op::kCentered && active ? args.mean[row] : T(0),
                                              rstd);
    if constexpr (!Layout::kStreams) wait_for_copies<Layout::kStages - 1>();
    T mean_of_h = 0;
    if constexpr (Op::kCentered) {
      T sum[1] = {0};
      SumsOf<1> total;
      for_each_tile<true, false>([&] {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          const Rows rows = read(p);
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            const T d = centring.d_of(Op::value(rows, arrays.vectors[p], numbers, i));
            sum[0] += is_inside(p, i) ? d : T(0);
          }
          total.take(sum);
        }
      });
      total.give(sum);
      team.template reduce<Sum>(sum);
      mean_of_h = sum[0] * centring.significand * args.inv_n;
    }
    T sums[kSums] = {};
    T of_numbers[Op::kNumbers + 1] = {};
    SumsOf<kSums> totals;
    SumsOf<Op::kNumbers + 1> totals_of_numbers;
    for_each_tile<false, false>([&] {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        leave_backwards<!Layout::kStreams>(sums, of_numbers, p, active, numbers, centring,
                                           mean_of_h);
        totals.take(sums);
      }
    });
    totals.give(sums);
    team.template reduce<Sum>(sums);
    RowMeans<Op::kCentered, T> means;  // times rstd
    means.g_xhat = sums[0] * args.inv_n * rstd;
    if constexpr (Op::kCentered) means.g = sums[1] * args.inv_n * rstd;
    for_each_tile<false, true>([&] {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if constexpr (Layout::kStreams) {
          leave_backwards<true>(sums, of_numbers, p, active, numbers, centring, mean_of_h);
        }
        enter_backwards(of_numbers, p, active, numbers, centring, mean_of_h, means, rstd);
        totals_of_numbers.take(of_numbers);
        if constexpr (!Layout::kStreams) fetch(p);
      }
      if constexpr (Layout::kStreams) flush(row >= rows_a_turn);
    });
    if constexpr (!Layout::kStreams) fetched_all();
    totals_of_numbers.give(of_numbers);
#pragma unroll
    for (int k = 0; k < Op::kNumbers; ++k) {
      T sum[1] = {of_numbers[k]};
      team.template reduce<Sum>(sum);
      if (active && team.rank == 0 && team.block == 0) Op::store_of_number(k, sum[0], args, row);
    }
    stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    row += rows_a_turn;
  }

  // The gradients of a pack's y and of what the epilogue reads. If not Keeps, only the row's sums.
  template <bool Keeps>
  __device__ __forceinline__ void leave_backwards(T (&sums)[kSums],
                                                  T (&of_numbers)[Op::kNumbers + 1], int p,
                                                  bool active, const typename Op::Numbers& numbers,
                                                  const Centring<Op::kCentered, T>& centring,
                                                  T mean_of_h) {
    const Rows rows = read(p);
    T of_rows[Op::kRows + 1][kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T value = Op::value(rows, arrays.vectors[p], numbers, i);
      const T xhat = centring.xhat_of(value, mean_of_h);
      const T y = affine<Op>(xhat, arrays.weights[p], arrays.biases[p], i);
      T of_element[Op::kRows + 1], of_vectors[Op::kVectors + 1] = {},
                                                             of_number[Op::kNumbers + 1] = {};
      const T dy = Op::differentiate_epilogue(of_element, of_vectors, of_number, y, rows,
                                              arrays.vectors[p], numbers, i);
      const bool counts = is_inside(p, i) && (kTeams == 1 || active);  // outside it may be NaN
      const T upstream = counts ? dy : T(0);
      T g = upstream;
      if constexpr (kDWeight) g *= weight_at<Op, T>(arrays.weights[p], i);
      if constexpr (kDWeight && Keeps) {
        T& sum = arrays.sums_over_rows[0][p][i];
        sum = fused_multiply_add(upstream, counts ? xhat : T(0), sum);
      }
      if constexpr (Op::kDBias && Keeps) arrays.sums_over_rows[kDWeight][p][i] += upstream;
      arrays.g[p][i] = g;
      sums[0] = fused_multiply_add(g, counts ? xhat : T(0), sums[0]);
      if constexpr (Op::kCentered) sums[1] += g;
      if constexpr (Keeps) add_shared(of_vectors, of_number, of_numbers, p, i, counts);
#pragma unroll
      for (int k = 0; k < Op::kRows; ++k) {
        of_rows[k][i] = of_element[k];
        if (k < Op::kHeld) arrays.held[p][k][i] = of_element[k];
      }
    }
    if constexpr (Keeps) {
      Op::template store_behind_epilogue<Layout::kVector, Layout::kRowThreads>(
          of_rows, args, row, first_column(p), active ? end_of_row(p) : 0);
    }
  }
  // Those of a pack's x and of what the prologue reads.
  __device__ __forceinline__ void enter_backwards(T (&of_numbers)[Op::kNumbers + 1], int p,
                                                  bool active, const typename Op::Numbers& numbers,
                                                  const Centring<Op::kCentered, T>& centring,
                                                  T mean_of_h,
                                                  const RowMeans<Op::kCentered, T>& means, T rstd) {
    const Rows rows = read(p);
    T of_rows[Op::kRows + 1][kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T value = Op::value(rows, arrays.vectors[p], numbers, i);
      const T xhat = centring.xhat_of(value, mean_of_h);
      const T along = fused_multiply_add(-xhat, means.g_xhat, -means.g);
      const T of_value = fused_multiply_add(arrays.g[p][i], rstd, along);
      T of_element[Op::kRows + 1], of_vectors[Op::kVectors + 1] = {},
                                                             of_number[Op::kNumbers + 1] = {};
      Op::differentiate_prologue(of_element, of_vectors, of_number, of_value, rows,
                                 arrays.vectors[p], numbers, i);
      add_shared(of_vectors, of_number, of_numbers, p, i,
                 is_inside(p, i) && (kTeams == 1 || active));
#pragma unroll
      for (int k = 0; k < Op::kRows; ++k) {
        of_rows[k][i] = k < Op::kHeld ? arrays.held[p][k][i] + of_element[k] : of_element[k];
      }
    }
    Op::template store_behind_prologue<Layout::kVector, Layout::kRowThreads>(
        of_rows, args, row, first_column(p), active ? end_of_row(p) : 0);
  }
  // Adds the gradients of what elements share.
  __device__ __forceinline__ void add_shared(const T (&of_vectors)[Op::kVectors + 1],
                                             const T (&of_number)[Op::kNumbers + 1],
                                             T (&of_numbers)[Op::kNumbers + 1], int p, int i,
                                             bool counts) {
#pragma unroll
    for (int k = 0; k < Op::kVectors; ++k) {
      arrays.sums_over_rows[kFirstVector + k][p][i] += counts ? of_vectors[k] : T(0);
    }
#pragma unroll
    for (int k = 0; k < Op::kNumbers; ++k) of_numbers[k] += counts ? of_number[k] : T(0);
  }

  // ---- the sums over rows ----

  __device__ __forceinline__ void forget_sums() {
#pragma unroll
    for (int k = 0; k < kVectorSums; ++k) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) arrays.sums_over_rows[k][p][i] = 0;
      }
    }
  }
  // Writes the sums of the last rows to partials, or adds them to what is there.
  __device__ __forceinline__ void flush(bool adds) {
#pragma unroll
    for (int k = 0; k < kVectorSums; ++k) {
      T* const target = args.partials + (k * clusters + cluster) * partials_stride(n_cols);
      if constexpr (kTeams == 1) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
          Pack<T, kLength> total = {};
          load<kLength>(total, target, first_column(p), adds ? end_of_row(p) : 0);
#pragma unroll
          for (int i = 0; i < kLength; ++i) {
            total.set(i, total.template get<T>(i) + arrays.sums_over_rows[k][p][i]);
          }
          store<kLength>(total, target, first_column(p), end_of_row(p));
        }
      } else {
        add_up_teams(target, k, adds);
      }
    }
    forget_sums();
  }
  // The sums of several teams meet in shared memory, one team after another.
  __device__ __forceinline__ void add_up_teams(T* target, int k, bool adds) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      Pack<T, kLength> of_team;
      of_team.set(arrays.sums_over_rows[k][p]);
      store<kLength>(of_team, of_teams + team.team * kColumns, first_column(p), kColumns);
    }
    block_barrier();
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int first = thread_index() * kWidth; first < n_cols;
         first += Layout::kBlockThreads * kWidth) {
      Pack<T, kWidth> total;
      load<kWidth>(total, of_teams + first, 0, kWidth);
#pragma unroll 4
      for (int i = 1; i < kTeams; ++i) add_gradients(total, of_teams + i * kColumns + first);
      if (adds) add_gradients(total, target + first);
      store<kWidth>(total, target + first, 0, kWidth);
    }
    block_barrier();
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    fused_backward(const __grid_constant__ typename Op::Arguments args) {
  using Backward = FusedBackward<Op, Layout>;
  typename Backward::TeamOf team;
  typename Backward::Arrays arrays;
  Backward backward(args, team, arrays);
  backward.begin();
  int turn = 0;
  bool flushed = false;
  for (long long block_row = backward.cluster * Backward::kTeams; block_row < args.n_rows;
       block_row += backward.rows_a_turn) {
    backward.do_row();
    if (!Layout::kStreams && ++turn == kTurns) {
      backward.flush(flushed);
      flushed = true;
      turn = 0;
    }
  }
  if constexpr (Backward::kVectorSums > 0) let_next_kernel_start();
  if constexpr (!Layout::kStreams) backward.flush(flushed);
}
