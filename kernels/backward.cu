// Backward of RMSNorm (Centered = false) and LayerNorm (Centered = true), for rows that fit in
// registers.
//
//   xhat = (x - mean) * rstd,   g = dy * (weight [+ 1])
//   dx = rstd * (g - xhat * mean(g * xhat) [- mean(g)]),   dweight = sum dy * xhat,   dbias = sum dy
//   [dy = 0 where its bit of the bitmask is, if Bitmask: relu.cuh]
//
// The stored mean is rounded, by 0.03 at 1e6 in float32: it serves as a shift, and xhat is centred
// again by its own mean over the row. One reduction gives all three sums.
//
// Layout:    x, dy and dx are n_rows rows of n_cols elements with strides of their own; weight is one
//            row; mean and rstd one value a row; bitmask (n_cols + 7) / 8 bytes a row; partials holds a
//            row of n_cols sums for each block, those of dweight (if there is a weight) before
//            those of dbias. dx may be dy.
// Grid:      any number of blocks; teams of RowThreads threads take rows in turn; with Prefetch, the
//            next row is asked for before the present one is worked on.
// Traffic:   x, dy and bitmask read once, dx written once, partials written once; weight from cache.
// Thread:    pack p of its row for p = rank, rank + RowThreads, ... (PacksPerThread of them), whose
//            columns' weight gradients it keeps.
// Order:     dx as in forward.cu; weight gradients: up to kTurns rows of a team in turn, then the
//            block's teams in turn, then such sums in turn, then reduce_partials.cu. No sum is one
//            long sequence, and the bits are the same from run to run.
// Result:    partials, of block b in row b.
#include "affine.cuh"
#include "gradient.cuh"
#include "relu.cuh"
#include "team.cuh"

template <typename X, typename DY, typename Weight, bool Centered, bool ZeroCentered, bool DBias,
          bool Bitmask, bool HoldWeight, bool Prefetch, int RowThreads, int BlockThreads,
          int PacksPerThread, int Vector>
__global__ __launch_bounds__(BlockThreads, 1) void norm_backward(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask, X* dx,
    long long dx_stride, Compute<X>* partials, long long n_rows, long long row_length,
    Compute<X> inv_n) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr bool kDWeight = kPresent<Weight>;
  constexpr int kTeams = BlockThreads / RowThreads;
  Team<RowThreads, BlockThreads> team;
  int n_cols = static_cast<int>(row_length);
  const auto first_column = [&](int p) { return (p * RowThreads + team.rank) * kLength; };

  T dweight[kDWeight ? PacksPerThread : 1][kLength] = {};
  T dbias[DBias ? PacksPerThread : 1][kLength] = {};
  // Moves one gradient from registers to this block's partials, by way of shared memory: the
  // block's teams one after another.
  bool flushed = false;
  const auto flush = [&](T(&gradient)[PacksPerThread][kLength], long long index) {
    constexpr int kColumns = RowThreads * PacksPerThread * kLength;
    T* shared = static_cast<T*>(dynamic_shared_memory()) +
                Team<RowThreads, BlockThreads>::template scratch_bytes<T>() / sizeof(T);
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      Pack<T, kLength> sums;
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        sums.set(i, gradient[p][i]);
        gradient[p][i] = 0;
      }
      store<kLength>(sums, shared + team.team * kColumns, first_column(p), kColumns);
    }
    block_barrier();
    T* target = partials + (index * block_count() + block_index()) * n_cols;
    for (int column = thread_index(); column < n_cols; column += BlockThreads) {
      T sum = shared[column];
#pragma unroll 4
      for (int i = 1; i < kTeams; ++i) sum += shared[i * kColumns + column];
      target[column] = flushed ? target[column] + sum : sum;
    }
    block_barrier();
  };
  const auto flush_all = [&] {
    make_opaque(n_cols);
    if constexpr (kDWeight) flush(dweight, 0);
    if constexpr (DBias) flush(dbias, kDWeight ? 1 : 0);
    flushed = true;
  };
  T held_weight[HoldWeight ? PacksPerThread : 1][kLength];
  if constexpr (HoldWeight) {
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      Pack<Weight, kLength> weights;
      load<Vector>(weights, weight, first_column(p), n_cols);
#pragma unroll
      for (int i = 0; i < kLength; ++i) held_weight[p][i] = weight_at<ZeroCentered, T>(weights, i);
    }
  }
  // g of a pack; its weights come from registers, or once more from cache.
  const auto scaled = [&](const Pack<DY, kLength>& pack, int p, T(&g)[kLength]) {
    Pack<Weight, kLength> weights;
    if constexpr (kDWeight && !HoldWeight) load<Vector>(weights, weight, first_column(p), n_cols);
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      g[i] = pack.template get<T>(i);
      if constexpr (HoldWeight) {
        g[i] *= held_weight[p][i];
      } else if constexpr (kDWeight) {
        g[i] *= weight_at<ZeroCentered, T>(weights, i);
      }
    }
  };

  struct Row {
    Pack<X, kLength> x[PacksPerThread];
    Pack<DY, kLength> dy[PacksPerThread];
    unsigned bits[Bitmask ? PacksPerThread : 1] = {};
    T mean = 0, rstd = 0;
  };
  const auto fetch = [&](Row& fetched, long long row) {
    const bool active = row < n_rows;
    const int n = active ? n_cols : 0;
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      load<Vector>(fetched.x[p], x + row * x_stride, first_column(p), n);
      load<Vector>(fetched.dy[p], dy + row * dy_stride, first_column(p), n);
      if constexpr (Bitmask) {
        fetched.bits[p] = load_bits(bitmask + row * bitmask_bytes(n_cols), first_column(p), n);
      }
    }
    if constexpr (Centered) fetched.mean = active ? mean[row] : T(0);
    fetched.rstd = active ? rstd[row] : T(0);
  };

  const long long rows_a_turn = block_count() * kTeams;
  long long block_row = block_index() * kTeams;
  Row next;
  if constexpr (Prefetch) fetch(next, block_row + team.team);
  int turn = 0;
  for (; block_row < n_rows; block_row += rows_a_turn) {
    // 1. Take the row, and ask for the next.
    const long long row = block_row + team.team;
    Row current;
    if constexpr (Prefetch) {
      current = next;
      fetch(next, row + rows_a_turn);
    } else {
      fetch(current, row);
    }
    if constexpr (Bitmask) {
#pragma unroll
      for (int p = 0; p < PacksPerThread; ++p) {
        keep(current.dy[p], current.bits[p], first_column(p));
      }
    }

    // 2. Sums of g * h, g and h, where h = (x - mean) * rstd is xhat before it is centred again.
    make_opaque(n_cols);  // else each element's comparison with it is kept for the next step
    T sums[Centered ? 3 : 1] = {};
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      T g[kLength];
      scaled(current.dy[p], p, g);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        T h = (current.x[p].template get<T>(i) - current.mean) * current.rstd;
        sums[0] = fused_multiply_add(g[i], h, sums[0]);
        if constexpr (Centered) {
          if (!inside<Vector>(first_column(p), i, n_cols)) h = 0;
          sums[1] += g[i];
          sums[2] += h;
        }
      }
    }
    team.template reduce<Sum>(sums);
    forget_conversions(current.x);
    forget_conversions(current.dy);
    T recentre = 0, mean_of_g = 0, mean_of_g_xhat = sums[0] * inv_n;
    if constexpr (Centered) {
      recentre = sums[2] * inv_n;
      mean_of_g = sums[1] * inv_n;
      mean_of_g_xhat = (sums[0] - recentre * sums[1]) * inv_n;
    }

    // 3. dx, and this row's share of the weight gradients.
    make_opaque(n_cols);
#pragma unroll
    for (int p = 0; p < PacksPerThread; ++p) {
      T g[kLength];
      scaled(current.dy[p], p, g);
      Pack<X, kLength> gradient;
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        T xhat = (current.x[p].template get<T>(i) - current.mean) * current.rstd;
        if constexpr (Centered) xhat -= recentre;
        const T projected = fused_multiply_add(-xhat, mean_of_g_xhat, g[i] - mean_of_g);
        gradient.set(i, projected * current.rstd);
        const T upstream = current.dy[p].template get<T>(i);
        if constexpr (kDWeight) dweight[p][i] = fused_multiply_add(upstream, xhat, dweight[p][i]);
        if constexpr (DBias) dbias[p][i] += upstream;
      }
      store<Vector>(gradient, dx + row * dx_stride, first_column(p), row < n_rows ? n_cols : 0);
    }

    // 4. Now and then, weight gradients leave the registers.
    if (++turn == kTurns) {
      flush_all();
      turn = 0;
    }
  }
  flush_all();
}
