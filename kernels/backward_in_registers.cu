// Backward of few rows, each held in registers; formulas, names and the bits of dx as in backward_pipelined.cu.
//
// What few rows wait for is latency: of memory and, with empty caches, of instructions. So each has a
// team, and nothing is copied, taken in turn or kept for a next row.
//
// Layout:    as backward_pipelined.cu; without kColumnLanes, dweight and dbias hold a row for each row of x or, of
//            blocks of several teams, for each block: partials for reduce_partials.cu, but of a lone row
//            whose block has one team the weight gradients. dx may be dy, but overlaps neither dy nor x
//            where there are kColumnLanes. means_of_h holds one value a row, by which xhat is centred
//            again, where there are some and kCentered.
// Grid:      a cluster of kClusterBlocks blocks of kRowThreads threads a row, or a block of kBlockThreads
//            for as many rows as it has teams, on grid.x. Blocks that sum the weight gradients of
//            kColumnLanes packs each, if any: as more such clusters, before those of rows or behind
//            (kLast) or, where kCentered, as a kernel that overlaps with the first and waits for its end.
// Traffic:   x, dy and bitmask read once, twice where blocks sum columns, one of the times mostly from
//            L2; weight once by each row's team; dx written once, dweight and dbias once for each block.
// Thread:    pack p of its block's columns for p = rank, rank + kRowThreads, ... (kPacksPerThread of
//            them). Of columns: pack `lane`, every kGroups-th row.
// Order:     dx: as backward_pipelined.cu. Weight gradients: a block's teams in turn, then reduce_partials.cu; of
//            columns a thread's rows in turn, then a butterfly over its warp's, then the warps in turn.
// Result:    dx; dweight and dbias.
#include "gradient.cuh"
#include "epilogue.cuh"
#include "team.cuh"

// The weight gradients of kColumnLanes packs, of which the first begins at column `first`.
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
  constexpr int kGroups = Layout::kBlockThreads / kLanes;  // each with every kGroups-th row
  // Rows of a thread that are on their way. Four of float64 spill beside a bitmask on sm_100.
  constexpr bool kNarrow = sizeof(DY) <= sizeof(X) && (sizeof(X) <= 4 || !Op::Epilogue::kHasBits);
  constexpr int kAtOnce = Layout::kVector == kLength && kNarrow ? 4 : 2;
  constexpr int kColumns = kLanes * kLength;
  constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  const int n_rows = static_cast<int>(args.n_rows);
  const int lane = thread_index() % kLanes, warp = thread_index() / 32;
  const int group_of_warp = thread_index() % 32 / kLanes;
  const int own = first + lane * kLength;

  // 1. Each group sums its rows, as long as the first of its warp has some: all lanes shuffle below.
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
    // By every block, as its first warp has a row: what follows both kernels then follows this one.
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

  // 2. Those of its warp, then of all.
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
        if (i < kColumns) args.dweight[column] = convert<DWeight>(sum);
      }
      if constexpr (kPresent<DBias>) {
        if (i >= (kGradients - 1) * kColumns) args.dbias[column] = convert<DBias>(sum);
      }
    }
  }
}

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, Layout::kBlocksPerMultiprocessor)
    norm_backward_in_registers(const __grid_constant__ BackwardInRegistersArguments<Op> args) {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using DWeight = typename Op::DWeight;
  using DBias = typename Op::DBias;
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr int kColumns =
      Layout::kClusterBlocks * Layout::kRowThreads * Layout::kPacksPerThread * kLength;
  int n_cols = Layout::kFull ? kColumns : static_cast<int>(args.n_cols);
  using TeamOf = Team<Layout::kRowThreads, Layout::kBlockThreads, Layout::kClusterBlocks>;
  constexpr int kTeams = TeamOf::kTeams;
  static_assert(kTeams == 1 || !Op::kCentered || Layout::kColumnLanes == 0,
                "each row tells its mean of h");
  long long block = block_index();
  if constexpr (Layout::kColumnLanes > 0 && !Op::kCentered) {
    // Those of columns, which take longest, come first, 256 rows of 16384 14.2 us, and last 15.7; but last
    // beside clusters of more than two, 8 of 65536 7.0 us, and first 8.2 (RMSNorm, bfloat16, H200).
    constexpr bool kLast = Layout::kClusterBlocks > 2;
    const long long of_rows = (args.n_rows + kTeams - 1) / kTeams * Layout::kClusterBlocks;
    const long long of_columns = block_count() - of_rows;
    if (kLast ? block >= of_rows : block < of_columns) {
      const int columns = static_cast<int>(kLast ? block - of_rows : block);
      sum_columns<Op, Layout>(args, n_cols, columns * Layout::kColumnLanes * kLength);
      return;
    }
    if constexpr (!kLast) block -= of_columns;
  }
  TeamOf team;
  const auto first_column = [&](int p) {
    return team.template first_column<Layout::kPacksPerThread, kLength>(p);
  };
  const auto end_of_row = [&](int p) {
    return team.template end_of_row<Layout::kPacksPerThread, kLength>(p, n_cols);
  };

  // 1. The row.
  constexpr bool kKeeps =
      kTeams > 1 && Layout::kColumnLanes == 0;  // gradients, for the block's sums
  constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  // A kernel follows that sums columns, or partials. As such count all gradients of T, though those of a
  // lone row, after which none follows, may be of T as well.
  constexpr bool kPartials = kGradients > 0 && kSame<DWeight, T> + kSame<DBias, T> == kGradients;
  constexpr bool kFollowed = Layout::kColumnLanes > 0 ? Op::kCentered : kPartials;
  if constexpr (kFollowed && !kKeeps) let_next_kernel_start();
  const long long row = block / Layout::kClusterBlocks * kTeams + team.team;
  const bool has_row = kTeams == 1 || row < args.n_rows;
  Pack<X, kLength> row_x[Layout::kPacksPerThread];
  Pack<DY, kLength> row_dy[Layout::kPacksPerThread];
  Pack<Weight, kLength> weights[Layout::kPacksPerThread];
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    const int n = has_row ? end_of_row(p) : 0;
    load<Layout::kVector>(row_x[p], args.x + row * args.x_stride, first_column(p), n);
    load<Layout::kVector>(row_dy[p], args.dy + row * args.dy_stride, first_column(p), n);
    load_operand<Layout::kVector>(weights[p], args.weight, first_column(p), end_of_row(p));
  }
  const T row_rstd = has_row ? args.rstd[row] : T(0);
  const Centring<Op::kCentered, T> centring(Op::kCentered && has_row ? args.mean[row] : T(0),
                                            row_rstd);
  if constexpr (Op::Epilogue::kHasBits) {
    const unsigned char* bytes = args.bitmask + row * bitmask_bytes(n_cols);
#pragma unroll
    for (int p = 0; p < Layout::kPacksPerThread; ++p) {
      const int n = has_row ? n_cols : 0;
      Op::Epilogue::backward(row_dy[p], load_bits(bytes, first_column(p), n), first_column(p));
    }
  }

  // 2. Its sums.
  T sums[kGradientSums<Op::kCentered>] = {};
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    add_to_sums<Op, Layout::kVector>(sums, centring, row_x[p], row_dy[p], weights[p],
                                     first_column(p), end_of_row(p));
  }
  team.meet();
  team.template reduce<Sum>(sums);
  const RowMeans<Op::kCentered, T> means(sums, centring.significand, args.inv_n);
  const bool wild = is_wild(means);
  if constexpr (Layout::kColumnLanes > 0 && Op::kCentered) {
    if (team.block == 0 && team.rank == 0) args.means_of_h[row] = means.h;
  }

  // 3. dx and the weight gradients, which of several teams wait in shared memory.
  if constexpr (!Layout::kFull) make_opaque(n_cols);
  // Of 64 registers a thread none keeps an address beside the row.
  if constexpr (Layout::kBlockThreads * Layout::kBlocksPerMultiprocessor >= 1024) {
    make_opaque(team.rank);
  }
  T* const of_teams = reinterpret_cast<T*>(static_cast<char*>(dynamic_shared_memory()) +
                                           TeamOf::template scratch_bytes<T>());
  const auto keep_gradient = [&](const T(&values)[kLength], int index, int p) {
    Pack<T, kLength> pack;
    pack.set(values);
    store<kLength>(pack, of_teams + (index * kTeams + team.team) * kColumns, first_column(p),
                   kColumns);
  };
#pragma unroll
  for (int p = 0; p < Layout::kPacksPerThread; ++p) {
    T of_x[kLength], of_weight[kLength], of_bias[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T xhat = centring.xhat_of(row_x[p].template get<T>(i), means.h);
      of_bias[i] = row_dy[p].template get<T>(i);
      of_weight[i] = of_bias[i] * xhat;
      of_x[i] = dx_of<Op>(of_bias[i], xhat, weights[p], i, means, row_rstd);
    }
    write<Layout::kVector, Layout::kRowThreads>(of_x, args.dx + row * args.dx_stride,
                                                first_column(p), has_row ? end_of_row(p) : 0);
    if constexpr (kKeeps) {
      if constexpr (kPresent<DWeight>) keep_gradient(of_weight, 0, p);
      if constexpr (kPresent<DBias>) keep_gradient(of_bias, kGradients - 1, p);
    } else if constexpr (Layout::kColumnLanes == 0) {
      write<Layout::kVector, Layout::kRowThreads>(
          of_weight, args.dweight + row * partials_stride(n_cols), first_column(p), end_of_row(p));
      write<Layout::kVector, Layout::kRowThreads>(
          of_bias, args.dbias + row * partials_stride(n_cols), first_column(p), end_of_row(p));
    }
  }

  // 4. Those of a block.
  if constexpr (kKeeps) {
    static_assert(kPartials, "of each block");
    let_next_kernel_start();
    block_barrier();
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int i = thread_index() * kWidth; i < kGradients * kColumns;
         i += Layout::kBlockThreads * kWidth) {
      const int index = i / kColumns, column = i % kColumns;
      if (column >= n_cols) continue;
      const T* const first = of_teams + index * kTeams * kColumns + column;
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
      store<kWidth>(total, gradient + block_index() * partials_stride(n_cols) + column, 0, kWidth);
    }
  }

  // 5. dx of a wild row.
  if constexpr (kSame<T, float>) {
    if (team.any(wild) && args.dx != static_cast<const void*>(args.dy)) {
      warp_barrier();      // lanes may have stored each other's dx
      make_opaque(block);  // else addresses of the row are kept until here
      write_wild_row<Op, Layout::kPacksPerThread>(
          team, !wild, block / Layout::kClusterBlocks * kTeams + team.team, args);
    }
  }
}

// The weight gradients of few rows of LayerNorm, while norm_backward_in_registers is under way.
template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads, 1) norm_backward_in_registers_columns(
    const __grid_constant__ BackwardInRegistersArguments<Op> args) {
  static_assert(Op::kCentered, "RMSNorm's are summed beside the rows");
  constexpr int kColumns = Layout::kColumnLanes * (16 / static_cast<int>(sizeof(typename Op::X)));
  sum_columns<Op, Layout>(args, static_cast<int>(args.n_cols),
                          static_cast<int>(block_index()) * kColumns);
}
