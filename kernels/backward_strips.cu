// Backward of RMSNorm and LayerNorm for rows longer than a cluster holds; formulas and names as in
// backward.cu.
//
// The columns are dealt out to the blocks, which all run at once (a cooperative launch): each has its
// strip of every row, and the weight gradients of its columns to itself. Rows are taken in groups, two of which are in shared
// memory: while the blocks tell each other their sums of one, those of the next are formed.
//
// Layout:    as backward.cu. exchange: (2, GroupRows, kSums, strips), for two groups in turn. arrived:
//            0; counts the warps that have told their block's sums of a group.
// Grid:      block b has BlockThreads packs of columns, from pack b * BlockThreads on.
// Traffic:   x, dy and weight read once, bitmask twice; dx, dweight and dbias written once.
// Thread:    one pack of columns, of all rows.
// Order:     a thread's elements in turn, a butterfly in each warp, the warps in turn; of all strips,
//            those of a lane in turn (lane, lane + 32, ...), then a butterfly. Weight gradients: up to
//            kTurns rows in turn, then such sums of all rows in turn.
// Result:    dx, dweight and dbias.
#include "gradient.cuh"
#include "relu.cuh"
#include "stage.cuh"

template <typename X, typename DY, typename Weight, typename DBias, bool Centered,
          bool ZeroCentered, bool Bitmask, int BlockThreads, int GroupRows, int Vector>
__global__ __launch_bounds__(BlockThreads, 1) void norm_backward_strips(
    const DY* dy, long long dy_stride, const X* x, long long x_stride, const Weight* weight,
    const Compute<X>* mean, const Compute<X>* rstd, const unsigned char* bitmask, X* dx,
    long long dx_stride, Weight* dweight, DBias* dbias, unsigned* arrived, Compute<X>* exchange,
    long long n_rows, long long n_cols, Compute<X> inv_n) {
  using T = Compute<X>;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr int kWarps = BlockThreads / 32;
  constexpr int kSums = kGradientSums<Centered>;
  constexpr int kLastWarp = kWarps - 1;
  static_assert(GroupRows <= 32, "a lane looks up each row");
  using StageOfX = Stage<X, kLength, 1, BlockThreads>;
  using StageOfDY = Stage<DY, kLength, 1, BlockThreads>;
  constexpr int kStageBytes = StageOfX::kBytes + StageOfDY::kBytes;
  // What all threads know of a row. Of four groups: a slow warp still reads of the one before while
  // the last warp stores the statistics of the one after the next.
  struct OfRow {
    T mean, rstd;
    RowMeans<Centered, T> means;
  };
  constexpr int kKnown = 4;

  char* const stages = static_cast<char*>(dynamic_shared_memory());
  OfRow* const of_rows = reinterpret_cast<OfRow*>(stages + 2 * GroupRows * kStageBytes);
  T* const sums_of_warps = reinterpret_cast<T*>(of_rows + kKnown * GroupRows);  // of two groups
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int strips = static_cast<int>(block_count());
  const int groups = static_cast<int>((n_rows + GroupRows - 1) / GroupRows);
  const long long first = (block_index() * BlockThreads + thread_index()) * kLength;
  // Elements of this thread's pack that lie inside a row.
  const int n_own = static_cast<int>(first < n_cols ? n_cols - first : 0);

  const auto row_of = [&](int group, int r) {
    return static_cast<long long>(group) * GroupRows + r;
  };
  const auto rows_of = [&](int group) {
    const long long rows = n_rows - row_of(group, 0);
    return rows < GroupRows ? static_cast<int>(rows) : GroupRows;
  };
  const auto place_of = [&](int group, int r) {
    return stages + (group % 2 * GroupRows + r) * kStageBytes;
  };
  const auto of_group = [&](int group) { return of_rows + group % kKnown * GroupRows; };
  const auto fetch = [&](int group, int r) {
    const long long row = row_of(group, r);
    const int n = row < n_rows ? n_own : 0;
    char* const place = place_of(group, r);
    StageOfX::template fetch<Vector>(place, 0, x + row * x_stride + first, 0, n);
    StageOfDY::template fetch<Vector>(place + StageOfX::kBytes, 0, dy + row * dy_stride + first, 0,
                                      n);
  };
  const auto read_x = [&](int group, int r) { return StageOfX::read(place_of(group, r), 0); };
  // dy of a pack, as the bitmask lets it through.
  const auto read_dy = [&](int group, int r) {
    Pack<DY, kLength> pack = StageOfDY::read(place_of(group, r) + StageOfX::kBytes, 0);
    if constexpr (Bitmask) {
      const long long row = row_of(group, r);
      const unsigned char* bytes = bitmask + row * bitmask_bytes(n_cols);
      keep(pack, load_bits(bytes, first, row < n_rows ? n_cols : 0), first);
    }
    return pack;
  };
  // The statistics of a group, which the last warp looks up, a lane for each row.
  struct Beside {
    T mean = 0, rstd = 0;
  };
  const bool looks_up = warp == kLastWarp && lane < GroupRows;
  const auto load_beside = [&](int group) {
    Beside beside;
    const long long row = row_of(group, lane);
    if (looks_up && row < n_rows) {
      if constexpr (Centered) beside.mean = mean[row];
      beside.rstd = rstd[row];
    }
    return beside;
  };
  const auto store_beside = [&](int group, const Beside& beside) {
    if (looks_up) {
      of_group(group)[lane].mean = beside.mean;
      of_group(group)[lane].rstd = beside.rstd;
    }
  };

  // 1. Ask for the weight and the first rows.
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll 1
    for (int r = 0; r < GroupRows; ++r) fetch(group, r);
    commit_copies();
  }
  Pack<Weight, kLength> weights;
  if constexpr (kPresent<Weight>) load<Vector>(weights, weight + first, 0, n_own);
  const Beside of_first = load_beside(0), of_second = load_beside(1);
  store_beside(0, of_first);
  store_beside(1, of_second);
  block_barrier();

  // 2. Each warp's sums of a group's rows.
  const auto sum_up = [&](int group) {
    // All of them, where registers allow: one by one 32 rows of 262144 float32 take 45 us, not 41.
    constexpr int kAtOnce = Vector < kLength          ? 1
                            : GroupRows * kSums <= 21 ? GroupRows
                                                      : GroupRows / 2;
    static_assert(GroupRows % kAtOnce == 0, "the same each time");
    T* const target = sums_of_warps + (group % 2 * kWarps + warp) * GroupRows * kSums;
#pragma unroll 1
    for (int begin = 0; begin < rows_of(group); begin += kAtOnce) {
      T sums[kAtOnce][kSums] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const OfRow& of_row = of_group(group)[begin + k];
        const Centring<Centered, T> centring(of_row.mean, of_row.rstd);
        add_to_sums<ZeroCentered, Vector>(sums[k], centring, read_x(group, begin + k),
                                          read_dy(group, begin + k), weights, 0, n_own);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[k][i] += shuffle_xor(sums[k][i], distance);
        }
      }
      if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) target[(begin + k) * kSums + i] = sums[k][i];
        }
      }
    }
  };
  // The block's, which its last warp tells the others; a block's barrier after sum_up.
  const auto exchange_of = [&](int group) {
    return exchange + group % 2 * GroupRows * kSums * strips;
  };
  const auto tell = [&](int group) {
    if (warp != kLastWarp) return;
    const T* const source = sums_of_warps + group % 2 * kWarps * GroupRows * kSums;
    for (int i = lane; i < rows_of(group) * kSums; i += 32) {
      T sum = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) sum += source[other * GroupRows * kSums + i];
      exchange_of(group)[i * strips + block_index()] = sum;
    }
    report_arrival(arrived);
  };
  if (groups > 0) {
    wait_for_copies<1>();
    sum_up(0);
    block_barrier();
    tell(0);
  }

  T dweight_sums[kLength] = {}, dbias_sums[kLength] = {};
  T of_weight[kLength] = {}, of_bias[kLength] = {};
  X* dx_row = dx + first;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    // 3. The sums of all blocks, a warp for each row; and those of the next rows here.
    const Beside after_next = load_beside(group + 2);
    if (warp < rows_of(group)) {
      wait_for_arrivals(arrived, static_cast<unsigned>(group + 1) * strips);
#pragma unroll 1
      for (int r = warp; r < rows_of(group); r += kWarps) {
        const T* const source = exchange_of(group) + r * kSums * strips;
        T sums[kSums] = {};
#pragma unroll 4
        for (int strip = lane; strip < strips; strip += 32) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[i] += source[i * strips + strip];
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[i] += shuffle_xor(sums[i], distance);
        }
        if (lane == 0) {
          OfRow& of_row = of_group(group)[r];
          const Centring<Centered, T> centring(of_row.mean, of_row.rstd);
          of_row.means = RowMeans<Centered, T>(sums, centring.significand, inv_n);
        }
      }
    }
    if (group + 1 < groups) {
      wait_for_copies<0>();
      sum_up(group + 1);
    }
    store_beside(group + 2, after_next);
    block_barrier();
    if (group + 1 < groups) tell(group + 1);

    // 4. dx, and the weight gradients; what was read makes room for a later row.
    constexpr int kUnrolled = Vector == kLength ? 2 : 1;
#pragma unroll kUnrolled
    for (int r = 0; r < rows_of(group); ++r) {
      const Pack<X, kLength> row_x = read_x(group, r);
      const Pack<DY, kLength> row_dy = read_dy(group, r);
      const OfRow of_row = of_group(group)[r];
      const Centring<Centered, T> centring(of_row.mean, of_row.rstd);
      T gradient[kLength];
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        const T xhat = centring.xhat_of(row_x.template get<T>(i), of_row.means.h);
        const T upstream = row_dy.template get<T>(i);
        gradient[i] = dx_of<ZeroCentered>(upstream, xhat, weights, i, of_row.means, of_row.rstd);
        of_weight[i] = fused_multiply_add(upstream, xhat, of_weight[i]);
        of_bias[i] += upstream;
      }
      Pack<X, kLength> stored;
      stored.set(gradient);
      store<Vector>(stored, dx_row, 0, n_own);
      dx_row += dx_stride;
      fetch(group + 2, r);
    }
    commit_copies();
    if ((group + 1) % (kTurns / GroupRows) == 0 || group + 1 == groups) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        dweight_sums[i] += of_weight[i];
        dbias_sums[i] += of_bias[i];
        of_weight[i] = of_bias[i] = 0;
      }
    }
  }

  // 5. The weight gradients.
  if constexpr (kPresent<Weight>) {
    Pack<Weight, kLength> stored;
    stored.set(dweight_sums);
    store<Vector>(stored, dweight + first, 0, n_own);
  }
  if constexpr (kPresent<DBias>) {
    Pack<DBias, kLength> stored;
    stored.set(dbias_sums);
    store<Vector>(stored, dbias + first, 0, n_own);
  }
}
