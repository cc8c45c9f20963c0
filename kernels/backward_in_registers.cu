// Backward of few rows, each held in registers; formulas, names and the bits of dx as in backward_pipelined.cu.
//
// Few rows wait for latency: that of memory and, with empty caches, that of instructions. So each row has a team, and
// nothing is copied, taken in turn or kept for a next row.
//
// Layout:    as backward_pipelined.cu. Without kColumnLanes, dweight and dbias hold a row for each row of x, or for
//            each block if blocks have several teams: these are partials for reduce_partials.cu. dx may be dy. With
//            kColumnLanes it overlaps neither dy nor x. means_of_h holds one value a row, which centres xhat again,
//            if there are kColumnLanes and kCentered.
// Grid:      a cluster of kClusterBlocks blocks of kRowThreads threads a row, or a block of kBlockThreads for as many
//            rows as it has teams, on grid.x. Other blocks, if any, sum the weight gradients of kColumnLanes packs
//            each. They are further such clusters, before those of rows or behind them (kLast). If kCentered, they
//            are a kernel that overlaps with the first and waits for its end.
// Traffic:   x, dy and bitmask read once. If blocks sum columns they are read twice, once mostly from the L2. weight
//            once by each row's team; dx written once, dweight and dbias once for each block.
// Thread:    pack p of its block's columns for p = rank, rank + kRowThreads, ... (kPacksPerThread of
//            them). For columns: pack `lane`, every kGroups-th row.
// Order:     dx: as backward_pipelined.cu. Weight gradients: a block's teams in turn, then reduce_partials.cu. For
//            columns: a thread's rows in turn, then a butterfly over its warp's, then the warps in turn.
// Result:    dx; dweight and dbias.
#include "gradient.cuh"
#include "epilogue.cuh"
#include "team.cuh"

// Sums the weight gradients of kColumnLanes packs, the first of which begins at column `first`.
template <typename Op, typename Layout>
__device__ __forceinline__ void sum_columns(const BackwardInRegistersArguments<Op>& args,
                                            int n_cols, int first) {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using DWeight = typename Op::DWeight;
  using DBias = typename Op::DBias;
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr int kWarps = Layout::kBlockThreads / 32;
  constexpr int kLanes = Layout::kColumnLanes;
  constexpr int kGroups = Layout::kBlockThreads / kLanes;  // each sums every kGroups-th row
  // Rows of a thread in flight. Four of float64 spill with a bitmask on sm_100.
  constexpr bool kNarrow = sizeof(DY) <= sizeof(X) && (sizeof(X) <= 4 || !Op::Epilogue::kHasBits);
  constexpr int kAtOnce = Layout::kVector == kLength && kNarrow ? 4 : 2;
  constexpr int kColumns = kLanes * kLength;
  constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  const int n_rows = static_cast<int>(args.n_rows);
  const int lane = thread_index() % kLanes, warp = thread_index() / 32;
  const int group_of_warp = thread_index() % 32 / kLanes;
  const int own = first + lane * kLength;

  // 1. Each group sums its rows, as long as the first group of its warp has some: all lanes shuffle
  // below.
  T of_weight[kLength] = {}, of_bias[kLength] = {};
#pragma unroll 1
  for (int begin = warp * (32 / kLanes); begin < n_rows; begin += kAtOnce * kGroups) {
    Pack<X, kLength> row_x[kAtOnce];
    Pack<DY, kLength> row_dy[kAtOnce];
    T row_mean[kAtOnce], row_rstd[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = begin + group_of_warp + k * kGroups;
      const int n = row < n_rows ? n_cols : 0;
      load<Layout::kVector>(row_x[k], args.x + row * args.x_stride, own, n);
      load<Layout::kVector>(row_dy[k], args.dy + row * args.dy_stride, own, n);
      row_mean[k] = Op::kCentered && row < n_rows ? args.mean[row] : T(0);
      row_rstd[k] = row < n_rows ? args.rstd[row] : T(0);
      if constexpr (Op::Epilogue::kHasBits) {
        Op::Epilogue::backward(row_dy[k],
                               load_bits(args.bitmask + row * bitmask_bytes(n_cols), own, n), own);
      }
    }
    // Every block says so when its first warp has a row. A kernel that follows both then follows
    // this one.
    if constexpr (Op::kCentered) wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = begin + group_of_warp + k * kGroups;
      const T mean_of_h = Op::kCentered && row < n_rows ? args.means_of_h[row] : T(0);
      const Centring<Op::kCentered, T> centring(row_mean[k], row_rstd[k]);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T of_row = row_dy[k].template get<T>(i);
        const T xhat = centring.xhat_of(row_x[k].template get<T>(i), mean_of_h);
        of_weight[i] = fused_multiply_add(of_row, xhat, of_weight[i]);
        of_bias[i] += of_row;
      }
    }
  }

  // 2. Those of the thread's warp are added, then all.
#pragma unroll
  for (int distance = 16; distance >= kLanes; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if constexpr (kPresent<DWeight>) of_weight[i] += shuffle_xor(of_weight[i], distance);
      if constexpr (kPresent<DBias>) of_bias[i] += shuffle_xor(of_bias[i], distance);
    }
  }
  T* sums = static_cast<T*>(dynamic_shared_memory());
  T* own_sums = sums + warp * kGradients * kColumns + lane * kLength;
  if (group_of_warp == 0) {
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if constexpr (kPresent<DWeight>) own_sums[i] = of_weight[i];
      if constexpr (kPresent<DBias>) own_sums[(kGradients - 1) * kColumns + i] = of_bias[i];
    }
  }
  block_barrier();
  for (int i = thread_index(); i < kGradients * kColumns; i += Layout::kBlockThreads) {
    const int column = first + i % kColumns;
    T sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += sums[other * kGradients * kColumns + i];
    if (column < n_cols) {
      if constexpr (kPresent<DWeight>) {
        if (i < kColumns) write_sum<Op>(sum, args.dweight + column);
      }
      if constexpr (kPresent<DBias>) {
        if (i >= (kGradients - 1) * kColumns) write_sum<Op>(sum, args.dbias + column);
      }
    }
  }
}

// A row, or as many rows as there are teams, from its packs to dx and its share of the weight
// gradients.
template <typename Op, typename Layout>
struct RowInRegisters {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using DWeight = typename Op::DWeight;
  using DBias = typename Op::DBias;
  using DResidualOut = typename Op::DResidualOut;
  using T = Compute<X>;
  static constexpr int kPacks = Layout::kPacksPerThread;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kColumns = Layout::kClusterBlocks * Layout::kRowThreads * kPacks * kLength;
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  static constexpr int kTeams = TeamOf::kTeams;
  static constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  // Gradients wait for the block's sums.
  static constexpr bool kKeeps = kTeams > 1 && Layout::kColumnLanes == 0;
  // A kernel follows that sums columns, or partials.
  static constexpr bool kFollowed = Layout::kColumnLanes > 0 ? Op::kCentered : kGradients > 0;
  // If registers are to spare, dresidual_out is asked for with the row.
  static constexpr bool kTotalEarly =
      Layout::kBlockThreads * Layout::kBlocksPerMultiprocessor * kPacks <= 1024;
  static_assert(kTeams == 1 || !Op::kCentered || Layout::kColumnLanes == 0,
                "each row tells its mean of h");
  static_assert(Layout::kColumnLanes > 0 || kSame<DWeight, T> + kSame<DBias, T> == kGradients,
                "a block writes partials");

  const BackwardInRegistersArguments<Op>& args;
  int n_cols;
  TeamOf team;
  const long long row;
  const bool has_row;
  Pack<X, kLength> row_x[kPacks];
  Pack<DY, kLength> row_dy[kPacks];
  Pack<DResidualOut, kLength> of_total[kPacks];
  Pack<Weight, kLength> weights[kPacks];

  // `block`: counted among those that have rows.
  __device__ __forceinline__ RowInRegisters(const BackwardInRegistersArguments<Op>& args,
                                            int n_cols, long long block)
      : args(args),
        n_cols(n_cols),
        row(block / Layout::kClusterBlocks * kTeams + team.team),
        has_row(kTeams == 1 || row < args.n_rows) {}

  __device__ __forceinline__ int first_column(int p) const {
    return team.template first_column<kPacks, kLength>(p);
  }
  __device__ __forceinline__ int end_of_row(int p) const {
    return team.template end_of_row<kPacks, kLength>(p, n_cols);
  }
  __device__ __forceinline__ T* gradients_of_teams() const {
    return reinterpret_cast<T*>(static_cast<char*>(dynamic_shared_memory()) +
                                TeamOf::template scratch_bytes<T>());
  }

  __device__ __forceinline__ void load_total(int p, int n) {
    load<Layout::kVector>(of_total[p], args.dresidual_out + row * args.dresidual_out_stride,
                          first_column(p), n);
  }
  __device__ __forceinline__ void load_packs() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int n = has_row ? end_of_row(p) : 0;
      load<Layout::kVector>(row_x[p], args.x + row * args.x_stride, first_column(p), n);
      load<Layout::kVector>(row_dy[p], args.dy + row * args.dy_stride, first_column(p), n);
      if constexpr (kTotalEarly) load_total(p, n);
      load_operand<Layout::kVector>(weights[p], args.weight, first_column(p), end_of_row(p));
    }
  }
  __device__ __forceinline__ void apply_bitmask() {
    if constexpr (Op::Epilogue::kHasBits) {
      const unsigned char* bytes = args.bitmask + row * bitmask_bytes(n_cols);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int n = has_row ? n_cols : 0;
        Op::Epilogue::backward(row_dy[p], load_bits(bytes, first_column(p), n), first_column(p));
      }
    }
  }
  __device__ __forceinline__ RowMeans<Op::kCentered, T> reduce(
      const Centring<Op::kCentered, T>& centring) {
    T sums[kGradientSums<Op::kCentered>] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      add_to_sums<Op, Layout::kVector>(sums, centring, row_x[p], row_dy[p], weights[p],
                                       first_column(p), end_of_row(p));
    }
    team.meet();
    team.template reduce<Sum>(sums);
    return RowMeans<Op::kCentered, T>(sums, centring.significand, args.inv_n);
  }

  __device__ __forceinline__ void keep_gradient(const T (&values)[kLength], int index,
                                                int p) const {
    Pack<T, kLength> pack;
    pack.set(values);
    store<kLength>(pack, gradients_of_teams() + (index * kTeams + team.team) * kColumns,
                   first_column(p), kColumns);
  }
  template <typename Out>
  __device__ __forceinline__ void write_gradient(const T (&values)[kLength], Out* gradient,
                                                 int p) const {
    write<Layout::kVector, Layout::kRowThreads>(values, gradient + row * partials_stride(n_cols),
                                                first_column(p), end_of_row(p));
  }
  // Writes dx, and the weight gradients. Those of several teams wait in shared memory.
  __device__ __forceinline__ void write_all(const Centring<Op::kCentered, T>& centring,
                                            const RowMeans<Op::kCentered, T>& means, T rstd) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      T of_x[kLength], of_weight[kLength], of_bias[kLength];
      const int n = has_row ? end_of_row(p) : 0;
      if constexpr (!kTotalEarly) load_total(p, n);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T xhat = centring.xhat_of(row_x[p].template get<T>(i), means.h);
        of_bias[i] = row_dy[p].template get<T>(i);
        of_weight[i] = of_bias[i] * xhat;
        const T of_norm = dx_of<Op>(of_bias[i], xhat, weights[p], i, means, rstd);
        of_x[i] = gradient_of_inputs(of_norm, of_total[p], i);
      }
      write<Layout::kVector, Layout::kRowThreads>(of_x, args.dx + row * args.dx_stride,
                                                  first_column(p), n);
      write<Layout::kVector, Layout::kRowThreads>(
          of_x, args.dresidual + row * args.dresidual_stride, first_column(p), n);
      if constexpr (kKeeps) {
        if constexpr (kPresent<DWeight>) keep_gradient(of_weight, 0, p);
        if constexpr (kPresent<DBias>) keep_gradient(of_bias, kGradients - 1, p);
      } else if constexpr (Layout::kColumnLanes == 0) {
        write_gradient(of_weight, args.dweight, p);
        write_gradient(of_bias, args.dbias, p);
      }
    }
  }
  // The weight gradients of a block, from those that its teams keep.
  __device__ __forceinline__ void sum_teams() const {
    if constexpr (kKeeps) {
      let_next_kernel_start();
      block_barrier();
      constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
      for (int i = thread_index() * kWidth; i < kGradients * kColumns;
           i += Layout::kBlockThreads * kWidth) {
        const int index = i / kColumns, column = i % kColumns;
        if (column >= n_cols) continue;
        const T* const first = gradients_of_teams() + index * kTeams * kColumns + column;
        Pack<T, kWidth> total;
        load<kWidth>(total, first, 0, kWidth);
#pragma unroll
        for (int other = 1; other < kTeams; ++other) add_gradients(total, first + other * kColumns);
        T* gradient;
        if constexpr (kGradients == 2) {
          gradient = index == 0 ? args.dweight : args.dbias;
        } else if constexpr (kPresent<DWeight>) {
          gradient = args.dweight;
        } else {
          gradient = args.dbias;
        }
        store<kWidth>(total, gradient + block_index() * partials_stride(n_cols) + column, 0,
                      kWidth);
      }
    }
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_backward_in_registers(const __grid_constant__ BackwardInRegistersArguments<Op> args) {
  using Row = RowInRegisters<Op, Layout>;
  using T = typename Row::T;
  int n_cols = Layout::kFull ? Row::kColumns : static_cast<int>(args.n_cols);
  long long block = block_index();
  if constexpr (Layout::kColumnLanes > 0 && !Op::kCentered) {
    // Blocks of columns take longest, so they come first, except next to clusters of more than two
    // blocks. There they come last (notes.md#columns-beside-few-rows).
    constexpr bool kLast = Layout::kClusterBlocks > 2;
    const long long of_rows =
        (args.n_rows + Row::kTeams - 1) / Row::kTeams * Layout::kClusterBlocks;
    const long long of_columns = block_count() - of_rows;
    if (kLast ? block >= of_rows : block < of_columns) {
      const int columns = static_cast<int>(kLast ? block - of_rows : block);
      sum_columns<Op, Layout>(args, n_cols, columns * Layout::kColumnLanes * Row::kLength);
      return;
    }
    if constexpr (!kLast) block -= of_columns;
  }
  if constexpr (Row::kFollowed && !Row::kKeeps) let_next_kernel_start();

  Row row(args, n_cols, block);
  row.load_packs();
  const T rstd = row.has_row ? args.rstd[row.row] : T(0);
  const Centring<Op::kCentered, T> centring(
      Op::kCentered && row.has_row ? args.mean[row.row] : T(0), rstd);
  row.apply_bitmask();
  const RowMeans<Op::kCentered, T> means = row.reduce(centring);
  const bool wild = is_wild(means);
  if constexpr (Layout::kColumnLanes > 0 && Op::kCentered) {
    if (row.team.block == 0 && row.team.rank == 0) args.means_of_h[row.row] = means.h;
  }

  if constexpr (!Layout::kFull) make_opaque(row.n_cols);
  // With 64 registers a thread, none keeps an address besides the row.
  if constexpr (Layout::kBlockThreads * Layout::kBlocksPerMultiprocessor >= 1024) {
    make_opaque(row.team.rank);
  }
  row.write_all(centring, means, rstd);
  row.sum_teams();

  // Writes dx of a wild row.
  if constexpr (kSame<T, float>) {
    if (row.team.any(wild) && !is_in_place<Op>(args)) {
      warp_barrier();      // lanes may have stored parts of each other's dx
      make_opaque(block);  // otherwise addresses of the row are kept until here
      write_wild_row<Op, Layout::kPacksPerThread>(
          row.team, !wild, block / Layout::kClusterBlocks * Row::kTeams + row.team.team, args);
    }
  }
}

// Sums the weight gradients of few rows of LayerNorm while norm_backward_in_registers is under way.
template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, 1) norm_backward_in_registers_columns(
    const __grid_constant__ BackwardInRegistersArguments<Op> args) {
  static_assert(Op::kCentered, "RMSNorm's are summed beside the rows");
  constexpr int kColumns = Layout::kColumnLanes * (16 / static_cast<int>(sizeof(typename Op::X)));
  sum_columns<Op, Layout>(args, static_cast<int>(args.n_cols),
                          static_cast<int>(block_index()) * kColumns);
}
