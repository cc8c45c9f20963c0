// Backward of few rows, each held in registers; formulas, names and the bits of dx as in backward_pipelined.cu.
//
// What few rows wait for is latency: of memory and, with empty caches, of instructions. So each has a
// team, and nothing is copied, taken in turn or kept for a next row.
//
// Layout:    as backward_pipelined.cu; without ColumnLanes, dweight and dbias hold a row for each row of x or, of
//            blocks of several teams, for each block: partials for reduce_partials.cu, but of a lone row
//            whose block has one team the weight gradients. dx may be dy, but overlaps neither dy nor x
//            where there are ColumnLanes. means_of_h holds one value a row, by which xhat is centred
//            again, where there are some and Centered.
// Grid:      a cluster of ClusterBlocks blocks of RowThreads threads a row, or a block of BlockThreads
//            for as many rows as it has teams, on grid.x. Blocks that sum the weight gradients of
//            ColumnLanes packs each, if any: as more such clusters, before those of rows or behind
//            (kLast) or, where Centered, as a kernel that overlaps with the first and waits for its end.
// Traffic:   x, dy and bitmask read once, twice where blocks sum columns, one of the times mostly from
//            L2; weight once by each row's team; dx written once, dweight and dbias once for each block.
// Thread:    pack p of its block's columns for p = rank, rank + RowThreads, ... (PacksPerThread of
//            them). Of columns: pack `lane`, every kGroups-th row.
// Order:     dx: as backward_pipelined.cu. Weight gradients: a block's teams in turn, then reduce_partials.cu; of
//            columns a thread's rows in turn, then a butterfly over its warp's, then the warps in turn.
// Result:    dx; dweight and dbias.
#include "gradient.cuh"
#include "relu.cuh"
#include "team.cuh"

// The weight gradients of Lanes packs, of which the first begins at column `first`.
template <int BlockThreads, int Lanes, bool Centered, bool Bitmask, int Vector, typename X,
          typename DY, typename DWeight, typename DBias>
__device__ __forceinline__ void sum_columns(const DY* dy, long long dy_stride, const X* x,
                                            long long x_stride, const Compute<X>* mean,
                                            const Compute<X>* rstd, const unsigned char* bitmask,
                                            const Compute<X>* means_of_h, DWeight* dweight,
                                            DBias* dbias, int n_rows, int n_cols, int first) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr int kWarps = BlockThreads / 32;
  constexpr int kGroups = BlockThreads / Lanes;  // each with every kGroups-th row
  // Rows of a thread that are on their way. Four of float64 spill beside a bitmask on sm_100.
  constexpr bool kNarrow = sizeof(DY) <= sizeof(X) && (sizeof(X) <= 4 || !Bitmask);
  constexpr int kAtOnce = Vector == kLength && kNarrow ? 4 : 2;
  constexpr int kColumns = Lanes * kLength;
  constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  const int lane = thread_index() % Lanes, warp = thread_index() / 32;
  const int group_of_warp = thread_index() % 32 / Lanes;
  const int own = first + lane * kLength;

  // 1. Each group sums its rows, as long as the first of its warp has some: all lanes shuffle below.
  T of_weight[kLength] = {}, of_bias[kLength] = {};
#pragma unroll 1
  for (int begin = warp * (32 / Lanes); begin < n_rows; begin += kAtOnce * kGroups) {
    Pack<X, kLength> row_x[kAtOnce];
    Pack<DY, kLength> row_dy[kAtOnce];
    T row_mean[kAtOnce], row_rstd[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = begin + group_of_warp + k * kGroups;
      const int n = row < n_rows ? n_cols : 0;
      load<Vector>(row_x[k], x + row * x_stride, own, n);
      load<Vector>(row_dy[k], dy + row * dy_stride, own, n);
      row_mean[k] = Centered && row < n_rows ? mean[row] : T(0);
      row_rstd[k] = row < n_rows ? rstd[row] : T(0);
      if constexpr (Bitmask) {
        keep(row_dy[k], load_bits(bitmask + row * bitmask_bytes(n_cols), own, n), own);
      }
    }
    // By every block, as its first warp has a row: what follows both kernels then follows this one.
    if constexpr (Centered) wait_for_previous_kernel();
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = begin + group_of_warp + k * kGroups;
      const T mean_of_h = Centered && row < n_rows ? means_of_h[row] : T(0);
      const Centring<Centered, T> centring(row_mean[k], row_rstd[k]);
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
  for (int distance = 16; distance >= Lanes; distance /= 2) {
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
  for (int i = thread_index(); i < kGradients * kColumns; i += BlockThreads) {
    const int column = first + i % kColumns;
    T sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += sums[other * kGradients * kColumns + i];
    if (column < n_cols) {
      if constexpr (kPresent<DWeight>) {
        if (i < kColumns) dweight[column] = convert<DWeight>(sum);
      }
      if constexpr (kPresent<DBias>) {
        if (i >= (kGradients - 1) * kColumns) dbias[column] = convert<DBias>(sum);
      }
    }
  }
}

template <typename X, typename DY, typename Weight, typename DWeight, typename DBias, bool Centered,
          bool ZeroCentered, bool Bitmask, int ColumnLanes, int ClusterBlocks, int RowThreads,
          int BlockThreads, int BlocksPerMultiprocessor, int PacksPerThread, bool Full, int Vector>
__global__ __launch_bounds__(BlockThreads, BlocksPerMultiprocessor) void norm_backward_in_registers(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask, X* dx,
    long long dx_stride, DWeight* dweight, DBias* dbias, Compute<X>* means_of_h, long long n_rows,
    long long row_length, Compute<X> inv_n) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr int kColumns = ClusterBlocks * RowThreads * PacksPerThread * kLength;
  int n_cols = Full ? kColumns : static_cast<int>(row_length);
  using TeamOf = Team<RowThreads, BlockThreads, ClusterBlocks>;
  constexpr int kTeams = TeamOf::kTeams;
  static_assert(kTeams == 1 || !Centered || ColumnLanes == 0, "each row tells its mean of h");
  long long block = block_index();
  if constexpr (ColumnLanes > 0 && !Centered) {
    // Those of columns, which take longest, come first, 256 rows of 16384 14.2 us, and last 15.7; but last
    // beside clusters of more than two, 8 of 65536 7.0 us, and first 8.2 (RMSNorm, bfloat16, H200).
    constexpr bool kLast = ClusterBlocks > 2;
    const long long of_rows = (n_rows + kTeams - 1) / kTeams * ClusterBlocks;
    const long long of_columns = block_count() - of_rows;
    if (kLast ? block >= of_rows : block < of_columns) {
      const int columns = static_cast<int>(kLast ? block - of_rows : block);
      sum_columns<BlockThreads, ColumnLanes, false, Bitmask, Vector>(
          dy, dy_stride, x, x_stride, mean, rstd, bitmask, means_of_h, dweight, dbias,
          static_cast<int>(n_rows), n_cols, columns * ColumnLanes * kLength);
      return;
    }
    if constexpr (!kLast) block -= of_columns;
  }
  TeamOf team;
  const auto first_column = [&](int p) {
    return team.template first_column<PacksPerThread, kLength>(p);
  };
  const auto end_of_row = [&](int p) {
    return team.template end_of_row<PacksPerThread, kLength>(p, n_cols);
  };

  // 1. The row.
  constexpr bool kKeeps = kTeams > 1 && ColumnLanes == 0;  // gradients, for the block's sums
  constexpr int kGradients = kPresent<DWeight> + kPresent<DBias>;
  // A kernel follows that sums columns, or partials. As such count all gradients of T, though those of a
  // lone row, after which none follows, may be of T as well.
  constexpr bool kPartials = kGradients > 0 && kSame<DWeight, T> + kSame<DBias, T> == kGradients;
  constexpr bool kFollowed = ColumnLanes > 0 ? Centered : kPartials;
  if constexpr (kFollowed && !kKeeps) let_next_kernel_start();
  const long long row = block / ClusterBlocks * kTeams + team.team;
  const bool has_row = kTeams == 1 || row < n_rows;
  Pack<X, kLength> row_x[PacksPerThread];
  Pack<DY, kLength> row_dy[PacksPerThread];
  Pack<Weight, kLength> weights[PacksPerThread];
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    const int n = has_row ? end_of_row(p) : 0;
    load<Vector>(row_x[p], x + row * x_stride, first_column(p), n);
    load<Vector>(row_dy[p], dy + row * dy_stride, first_column(p), n);
    load_operand<Vector>(weights[p], weight, first_column(p), end_of_row(p));
  }
  const T row_rstd = has_row ? rstd[row] : T(0);
  const Centring<Centered, T> centring(Centered && has_row ? mean[row] : T(0), row_rstd);
  if constexpr (Bitmask) {
    const unsigned char* bytes = bitmask + row * bitmask_bytes(n_cols);
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      const int n = has_row ? n_cols : 0;
      keep(row_dy[p], load_bits(bytes, first_column(p), n), first_column(p));
    }
  }

  // 2. Its sums.
  T sums[kGradientSums<Centered>] = {};
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    add_to_sums<ZeroCentered, Vector>(sums, centring, row_x[p], row_dy[p], weights[p],
                                      first_column(p), end_of_row(p));
  }
  team.meet();
  team.template reduce<Sum>(sums);
  const RowMeans<Centered, T> means(sums, centring.significand, inv_n);
  const bool wild = is_wild(means);
  if constexpr (ColumnLanes > 0 && Centered) {
    if (team.block == 0 && team.rank == 0) means_of_h[row] = means.h;
  }

  // 3. dx and the weight gradients, which of several teams wait in shared memory.
  if constexpr (!Full) make_opaque(n_cols);
  T* const of_teams = reinterpret_cast<T*>(static_cast<char*>(dynamic_shared_memory()) +
                                           TeamOf::template scratch_bytes<T>());
  const auto keep_gradient = [&](const T(&values)[kLength], int index, int p) {
    Pack<T, kLength> pack;
    pack.set(values);
    store<kLength>(pack, of_teams + (index * kTeams + team.team) * kColumns, first_column(p),
                   kColumns);
  };
#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    T of_x[kLength], of_weight[kLength], of_bias[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T xhat = centring.xhat_of(row_x[p].template get<T>(i), means.h);
      of_bias[i] = row_dy[p].template get<T>(i);
      of_weight[i] = of_bias[i] * xhat;
      of_x[i] = dx_of<ZeroCentered>(of_bias[i], xhat, weights[p], i, means, row_rstd);
    }
    write<Vector, RowThreads>(of_x, dx + row * dx_stride, first_column(p),
                              has_row ? end_of_row(p) : 0);
    if constexpr (kKeeps) {
      if constexpr (kPresent<DWeight>) keep_gradient(of_weight, 0, p);
      if constexpr (kPresent<DBias>) keep_gradient(of_bias, kGradients - 1, p);
    } else if constexpr (ColumnLanes == 0) {
      write<Vector, RowThreads>(of_weight, dweight + row * partials_stride(n_cols), first_column(p),
                                end_of_row(p));
      write<Vector, RowThreads>(of_bias, dbias + row * partials_stride(n_cols), first_column(p),
                                end_of_row(p));
    }
  }

  // 4. Those of a block.
  if constexpr (kKeeps) {
    static_assert(kPartials, "of each block");
    let_next_kernel_start();
    block_barrier();
    constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int i = thread_index() * kWidth; i < kGradients * kColumns; i += BlockThreads * kWidth) {
      const int index = i / kColumns, column = i % kColumns;
      if (column >= n_cols) continue;
      const T* const first = of_teams + index * kTeams * kColumns + column;
      Pack<T, kWidth> total;
      load<kWidth>(total, first, 0, kWidth);
#pragma unroll
      for (int other = 1; other < kTeams; ++other) add_gradients(total, first + other * kColumns);
      T* gradient;
      if constexpr (kGradients == 2) {
        gradient = index == 0 ? dweight : dbias;
      } else if constexpr (kPresent<DWeight>) {
        gradient = dweight;
      } else {
        gradient = dbias;
      }
      store<kWidth>(total, gradient + block_index() * partials_stride(n_cols) + column, 0, kWidth);
    }
  }

  // 5. dx of a wild row.
  if constexpr (kSame<T, float>) {
    if (team.any(wild) && dx != static_cast<const void*>(dy)) {
      warp_barrier();      // lanes may have stored each other's dx
      make_opaque(block);  // else addresses of the row are kept until here
      write_wild_row<ZeroCentered, Centered, Bitmask, PacksPerThread>(
          team, !wild, block / ClusterBlocks * kTeams + team.team, dy, dy_stride, x, x_stride,
          weight, mean, rstd, bitmask, dx, dx_stride, n_cols, inv_n);
    }
  }
}

// The weight gradients of few rows of LayerNorm, while norm_backward_in_registers is under way.
template <typename X, typename DY, typename Weight, typename DWeight, typename DBias, bool Bitmask,
          int ColumnLanes, int BlockThreads, int Vector>
__global__ __launch_bounds__(BlockThreads, 1) void norm_backward_in_registers_columns(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* /*weight*/,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask,
    const Compute<X>* means_of_h, DWeight* dweight, DBias* dbias, long long n_rows,
    long long n_cols) {
  constexpr int kColumns = ColumnLanes * (16 / static_cast<int>(sizeof(X)));
  sum_columns<BlockThreads, ColumnLanes, true, Bitmask, Vector>(
      dy, dy_stride, x, x_stride, mean, rstd, bitmask, means_of_h, dweight, dbias,
      static_cast<int>(n_rows), static_cast<int>(n_cols),
      static_cast<int>(block_index()) * kColumns);
}
