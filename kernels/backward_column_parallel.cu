// Backward of RMSNorm and LayerNorm for rows longer than a cluster holds; formulas and names as in
// backward_pipelined.cu.
//
// The columns are dealt out to the blocks, which all run at once (a cooperative launch). Each block has its strip of
// every row, and the weight gradients of its columns to itself. Rows are taken in groups. kStages groups are in shared
// memory or on their way there. The threads of the columns form the sums of a group kAhead groups before they write its
// dx. In between a warp of its own, a messenger, tells the other blocks the sums and adds up those of all. That takes 2
// to 4 us, for which the columns do not wait.
//
// Wild:      when the columns are to write dx of a wild row (gradient.cuh), they form its sums again and tell each
//            other themselves.
// Layout:    as backward_pipelined.cu. exchange is (kPlaces, kGroupRows, kSums, strips), for groups in turn, and in
//            float64 (2, kSums, strips * kWarps), for wild rows in turn. arrived is (kPlaces + 2, kCountStride), 0
//            before the launch. The first of each place counts the blocks, or warps, that have told their sums. Each
//            count has a line of its own (notes.md#columns-and-the-l2).
// Grid:      block b has kStripThreads packs of columns, from pack b * kStripThreads on.
// Traffic:   x, dy, weight and bitmask read once; dx, dweight and dbias written once. If kAccumulates, dweight and
//            dbias are read once too.
// Thread:    one pack of columns, of all rows. The warps beyond kStripThreads are messengers, each for every
//            kMessengers-th group.
// Order:     a thread's elements in turn, a butterfly in each warp, the warps in turn. Over strips: those of a lane in
//            turn (lane, lane + 32, ...), then a butterfly. Weight gradients: up to kTurns rows in turn, then such sums
//            of all rows in turn.
// Result:    dx, dweight and dbias.
#include "gradient.cuh"
#include "epilogue.cuh"
#include "stage.cuh"

constexpr int kAhead = 3, kStages = kAhead + 2;
// Once the means of group g are known, the sums of g + kMessengers are formed next, for the same
// messenger. So its next group can reuse what the columns and a messenger share of a group: its
// barriers and the sums of warps.
constexpr int kMessengers = kAhead + 1;
// The statistics of its rows cannot be shared so. They are stored kMessengers groups before their
// sums are formed, when the columns may be at dx of kMessengers groups before that. Nor can the
// words that blocks tell each other. A messenger that tells of group g has heard of g - kMessengers
// from all, and their same messengers had read by then what was told kMessengers groups before.
constexpr int kPlaces = 2 * kMessengers;
constexpr int kCountStride = 32, kMostStrips = 128;

// The sum over all lanes of the warp, for each row and sum, by butterflies side by side.
template <typename T, int Rows, int Sums>
__device__ __forceinline__ void add_up_lanes(T (&sums)[Rows][Sums]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
#pragma unroll
      for (int i = 0; i < Sums; ++i) sums[k][i] += shuffle_xor(sums[k][i], distance);
    }
  }
}

// So many rows of a group have their sums formed at once: all, or half of 4 or 6 that would have
// more sums than `most`.
__device__ __forceinline__ constexpr int rows_at_once(int group_rows, int sums, int most) {
  return group_rows * sums <= most ? group_rows : group_rows / 2;
}

// Writes this thread's dx of a wild row. Each warp of the columns of all blocks tells the others
// its sums, as the own-th of `warps`, in their place of `exchanged`, for the `times`-th time.
template <typename Row>
__device__ NOT_INLINED void write_own_part(Row row, long long first, long long n_cols,
                                           double* exchanged, int own, int warps, unsigned* told,
                                           unsigned times, float inv_n) {
  const long long step = Row::kLength, end = first + step < n_cols ? first + step : n_cols;
  const int lane = thread_index() % 32;
  double sums[1][Row::kSums] = {};
  row.sum(sums[0], first, step, end);
  add_up_lanes(sums);
#pragma unroll
  for (int i = 0; i < Row::kSums; ++i) {
    if (lane == 0) exchanged[i * warps + own] = sums[0][i];
    sums[0][i] = 0;
  }
  report_arrival(told);
  wait_for_arrivals(told, times * warps);
#pragma unroll 1
  for (int other = lane; other < warps; other += 32) {
#pragma unroll
    for (int i = 0; i < Row::kSums; ++i) sums[0][i] += exchanged[i * warps + other];
  }
  add_up_lanes(sums);
  row.write(typename Row::Means(sums[0], 1.0, inv_n), first, step, end);
}

// What the columns and the messengers of a block share.
template <typename Op, typename Layout>
struct ColumnParallel {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using DBias = typename Op::DBias;
  using DResidualOut = typename Op::DResidualOut;
  using T = Compute<X>;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kWarps = Layout::kStripThreads / 32;
  static constexpr int kSums = kGradientSums<Op::kCentered>;
  using StageOfX = Stage<X, kLength, 1, Layout::kStripThreads>;
  using StageOfDY = Stage<DY, kLength, 1, Layout::kStripThreads>;
  using StageOfTotal = Stage<DResidualOut, kLength, 1, Layout::kStripThreads>;  // of dresidual_out
  static constexpr int kBeforeTotal = StageOfX::kBytes + StageOfDY::kBytes;
  static constexpr int kStageBytes = kBeforeTotal + StageOfTotal::kBytes;
  // The barriers at which the columns and a messenger meet, and the one at which all begin.
  static constexpr int kMeeting = Layout::kStripThreads + 32;
  static constexpr int kAll = Layout::kStripThreads + 32 * kMessengers;

  // What all threads know of a row.
  struct OfRow {
    T mean, rstd;
    RowMeans<Op::kCentered, T> means;  // as mark_if_wild leaves them
  };

  const BackwardColumnParallelArguments<Op>& args;
  const long long n_cols = args.n_cols;
  char* const stages = static_cast<char*>(dynamic_shared_memory());
  OfRow* const of_rows =
      reinterpret_cast<OfRow*>(stages + kStages * Layout::kGroupRows * kStageBytes);
  T* const sums_of_warps = reinterpret_cast<T*>(of_rows + kPlaces * Layout::kGroupRows);
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int strips = static_cast<int>(block_count());
  const int groups = static_cast<int>((args.n_rows + Layout::kGroupRows - 1) / Layout::kGroupRows);

  __device__ __forceinline__ explicit ColumnParallel(
      const BackwardColumnParallelArguments<Op>& args)
      : args(args) {}

  __device__ __forceinline__ long long row_of(int group, int r) const {
    return static_cast<long long>(group) * Layout::kGroupRows + r;
  }
  __device__ __forceinline__ int rows_of(int group) const {
    const long long rows = args.n_rows - row_of(group, 0);
    return rows < Layout::kGroupRows ? static_cast<int>(rows) : Layout::kGroupRows;
  }
  __device__ __forceinline__ OfRow* of_group(int group) const {
    return of_rows + group % kPlaces * Layout::kGroupRows;
  }
  __device__ __forceinline__ T* sums_of(int group) const {
    return sums_of_warps + group % kMessengers * (kWarps * Layout::kGroupRows * kSums);
  }
  // Three barriers: the first statistics are here, the sums of a group are here, and its means are
  // here. One kind of warps waits at each, and the other only arrives: those that wait at a barrier
  // must do so in one place of the code.
  static constexpr int kBegun = 1 + 2 * kMessengers;
  static __device__ __forceinline__ int summed(int group) { return 1 + group % kMessengers; }
  static __device__ __forceinline__ int known(int group) {
    return 1 + kMessengers + group % kMessengers;
  }
};

// A warp that tells the other blocks the sums of every kMessengers-th group, and adds up those of
// all.
template <typename Op, typename Layout>
struct Messenger : ColumnParallel<Op, Layout> {
  using Base = ColumnParallel<Op, Layout>;
  using Base::args, Base::kMeeting, Base::kSums, Base::kWarps, Base::lane, Base::strips;
  using typename Base::OfRow;
  using typename Base::T;

  T of_mean = 0, of_rstd = 0;  // stored when the messenger is done with the group before

  using Base::Base;

  __device__ __forceinline__ void load_statistics(int group) {
    const long long row = this->row_of(group, lane);
    const bool valid = lane < Layout::kGroupRows && row < args.n_rows;
    if constexpr (Op::kCentered) of_mean = valid ? args.mean[row] : T(0);
    of_rstd = valid ? args.rstd[row] : T(0);
  }
  __device__ __forceinline__ void store_statistics(int group) {
    if (lane < Layout::kGroupRows) {
      this->of_group(group)[lane].mean = of_mean;
      this->of_group(group)[lane].rstd = of_rstd;
    }
  }
  // Tells the sums of this block's warps, and waits until all blocks have told theirs.
  __device__ __forceinline__ void exchange(int group, int rows, T* exchanged) {
    for (int i = lane; i < rows * kSums; i += 32) {
      T sum = 0;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        sum += this->sums_of(group)[other * Layout::kGroupRows * kSums + i];
      }
      exchanged[i * strips + block_index()] = sum;
    }
    const int place = group % kPlaces;
    report_arrival(args.arrived + place * kCountStride);
    wait_for_arrivals(args.arrived + place * kCountStride,
                      static_cast<unsigned>(group / kPlaces + 1) * strips);
  }
  // The means of the group's rows, from what all blocks have told.
  __device__ __forceinline__ void add_up(int group, int rows, const T* exchanged) {
    // So many rows that up to 36 sums of each lane are in flight.
    constexpr int kAtOnce = rows_at_once(Layout::kGroupRows, kSums, 9);
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += kAtOnce) {
      T sums[kAtOnce][kSums] = {};
      const T* sources[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // It replaces a row past the last, without a branch around each.
        const int row = begin + k < rows ? begin + k : rows - 1;
        sources[k] = exchanged + row * kSums * strips + lane;
      }
#pragma unroll
      for (int strip = 0; strip < kMostStrips; strip += 32) {
        const bool valid = strip + lane < strips;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) {
            sums[k][i] += valid ? sources[k][i * strips + strip] : T(0);
          }
        }
      }
      add_up_lanes(sums);
      if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          OfRow& of_row = this->of_group(group)[begin + k];
          const Centring<Op::kCentered, T> centring(of_row.mean, of_row.rstd);
          of_row.means = RowMeans<Op::kCentered, T>(sums[k], centring.significand, args.inv_n);
          mark_if_wild(of_row.means, false);
        }
      }
    }
  }
  __device__ __forceinline__ void run(int messenger) {
    load_statistics(messenger);
    store_statistics(messenger);
    arrive_at_barrier(Base::kBegun, Base::kAll);
#pragma unroll 1
    for (int group = messenger; group < this->groups; group += kMessengers) {
      load_statistics(group + kMessengers);
      const int rows = this->rows_of(group);
      T* const exchanged = args.exchange + group % kPlaces * Layout::kGroupRows * kSums * strips;
      named_barrier(this->summed(group), kMeeting);
      exchange(group, rows, exchanged);
      add_up(group, rows, exchanged);
      store_statistics(group + kMessengers);
      arrive_at_barrier(this->known(group), kMeeting);
    }
  }
};

// A thread's pack of columns, of all rows.
template <typename Op, typename Layout>
struct Columns : ColumnParallel<Op, Layout> {
  using Base = ColumnParallel<Op, Layout>;
  using Base::args, Base::groups, Base::kBeforeTotal, Base::kLength, Base::kMeeting,
      Base::kStageBytes, Base::kSums, Base::kWarps, Base::lane, Base::n_cols, Base::stages,
      Base::strips, Base::warp;
  using typename Base::DBias;
  using typename Base::DResidualOut;
  using typename Base::DY;
  using typename Base::OfRow;
  using typename Base::StageOfDY;
  using typename Base::StageOfTotal;
  using typename Base::StageOfX;
  using typename Base::T;
  using typename Base::Weight;
  using typename Base::X;

  // A copy of half a pack is of half a sector, which would be asked of the L2 twice past the L1
  // (notes.md#halves-of-packs).
  static constexpr bool kHalves = sizeof(DY) > sizeof(X);
  static constexpr bool kHalvesOfTotal = sizeof(DResidualOut) > sizeof(X);
  static constexpr int kOnTheirWay = 2;
  static_assert(kStages == kAhead + kOnTheirWay, "the sums of as many are formed ahead");

  const long long first = (block_index() * Layout::kStripThreads + thread_index()) * kLength;
  // Elements of this thread's pack that lie inside a row.
  const int n_own = static_cast<int>(first < n_cols ? n_cols - first : 0);
  // The L2 keeps what is read before what is written (notes.md#columns-and-the-l2).
  const CachePolicy policy = evict_last();
  Pack<Weight, kLength> weights;
  unsigned bits[Op::Epilogue::kHasBits ? Layout::kGroupRows : 1] = {};  // summed next
  typename Op::DX* dx_row = args.dx + first;
  T of_weight[kLength] = {}, of_bias[kLength] = {};
  T dweight_sums[kLength] = {}, dbias_sums[kLength] = {};
  int wild_rows = 0;  // so far

  using Base::Base;

  __device__ __forceinline__ char* place_of(int group, int r) const {
    return stages + (group % kStages * Layout::kGroupRows + r) * kStageBytes;
  }
  __device__ __forceinline__ const unsigned char* bits_of(long long row) const {
    return args.bitmask + row * bitmask_bytes(n_cols);
  }
  __device__ __forceinline__ void fetch(int group, int r) const {
    const long long row = this->row_of(group, r);
    const int n = row < args.n_rows ? n_own : 0;
    const X* const source_x = args.x + row * args.x_stride + first;
    const DY* const source_dy = args.dy + row * args.dy_stride + first;
    const DResidualOut* const source_total =
        args.dresidual_out + row * args.dresidual_out_stride + first;
    char* const place = place_of(group, r);
    if constexpr (Op::Epilogue::kHasBits) {
      if (lane == 0 && n > 0) prefetch(bits_of(row) + first / 8);
    }
    if constexpr (StageOfX::template kTakesPolicy<Layout::kVector> &&
                  StageOfDY::template kTakesPolicy<Layout::kVector>) {
      // Exchanged for each row, as copies with a policy need it (device.cuh).
      const OwnPlace own = own_place(StageOfX::place(place, 0, 0));
      StageOfX::template fetch<false>(own, 0, source_x, 0, n, policy);
      StageOfDY::template fetch<kHalves>(own + StageOfX::kBytes, 0, source_dy, 0, n, policy);
      StageOfTotal::template fetch<Layout::kVector, kHalvesOfTotal>(place + kBeforeTotal, 0,
                                                                    source_total, 0, n);
    } else {
      StageOfX::template fetch<Layout::kVector>(place, 0, source_x, 0, n);
      StageOfDY::template fetch<Layout::kVector, kHalves>(place + StageOfX::kBytes, 0, source_dy, 0,
                                                          n);
      StageOfTotal::template fetch<Layout::kVector, kHalvesOfTotal>(place + kBeforeTotal, 0,
                                                                    source_total, 0, n);
    }
  }
  __device__ __forceinline__ void fetch_group(int group) const {
#pragma unroll 1
    for (int r = 0; r < Layout::kGroupRows; ++r) fetch(group, r);
    commit_copies();
  }
  __device__ __forceinline__ Pack<X, kLength> read_x(int group, int r) const {
    return StageOfX::read(place_of(group, r), 0);
  }
  __device__ __forceinline__ Pack<DY, kLength> read_dy(int group, int r) const {
    return StageOfDY::read(place_of(group, r) + StageOfX::kBytes, 0);
  }
  // Asks the L2 for the bits of the group whose sums are formed next. It has them fetched with the
  // rows (notes.md#bits-beside-columns).
  __device__ __forceinline__ void ask_for_bits(int group) {
    if constexpr (Op::Epilogue::kHasBits) {
#pragma unroll
      for (int r = 0; r < Layout::kGroupRows; ++r) {
        const long long row = this->row_of(group, r);
        bits[r] = load_bits(bits_of(row), first, row < args.n_rows ? n_cols : 0);
      }
    }
  }
  // dy of a pack. From then on its place holds what the bitmask lets through.
  __device__ __forceinline__ Pack<DY, kLength> masked_dy(int group, int r) const {
    Pack<DY, kLength> pack = read_dy(group, r);
    if constexpr (Op::Epilogue::kHasBits) {
      Op::Epilogue::backward(pack, bits[r], first);
      StageOfDY::write(pack, place_of(group, r) + StageOfX::kBytes, 0);
    }
    return pack;
  }

  // Asks for the first rows and the weight.
  __device__ __forceinline__ void begin() {
    fetch_group(0);
    load<Layout::kVector>(weights, args.weight + first, 0, n_own);
    fetch_group(1);
    named_barrier(Base::kBegun, Base::kAll);
  }

  // Each warp's sums of a group's rows.
  __device__ __forceinline__ void sum_up(int group) {
    constexpr int kAtOnce =
        Layout::kVector < kLength ? 1 : rows_at_once(Layout::kGroupRows, kSums, 12);
    static_assert(Layout::kGroupRows % kAtOnce == 0, "no row past the group's last is summed");
    T* const target = this->sums_of(group) + warp * Layout::kGroupRows * kSums;
    const int rows = this->rows_of(group);
#pragma unroll(Op::Epilogue::kHasBits ? Layout::kGroupRows : 1)
    for (int begin = 0; begin < Layout::kGroupRows; begin += kAtOnce) {
      if (begin >= rows) continue;
      T sums[kAtOnce][kSums] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const OfRow& of_row = this->of_group(group)[begin + k];
        const Centring<Op::kCentered, T> centring(of_row.mean, of_row.rstd);
        add_to_sums<Op, Layout::kVector>(sums[k], centring, read_x(group, begin + k),
                                         masked_dy(group, begin + k), weights, 0, n_own);
      }
      add_up_lanes(sums);
      if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < kSums; ++i) target[(begin + k) * kSums + i] = sums[k][i];
        }
      }
    }
    ask_for_bits(group + 1);
    arrive_at_barrier(this->summed(group), kMeeting);
  }
  // The sums of the first groups, each as soon as it is there. No more than two groups are in
  // flight: with all five the first one comes later (notes.md#the-first-rows-first).
  __device__ __forceinline__ void begin_sums() {
    ask_for_bits(0);
#pragma unroll
    for (int group = 0; group < kAhead; ++group) {
      wait_for_copies<kOnTheirWay - 1>();
      if (group < groups) sum_up(group);
      fetch_group(group + kOnTheirWay);
    }
  }

  // Writes dx of a row and adds its share of the weight gradients. The row's place is given to a
  // later row. Returns whether the row is wild; then nothing is stored.
  __device__ __forceinline__ bool write_dx(int group, int r) {
    const Pack<X, kLength> row_x = read_x(group, r);
    const Pack<DY, kLength> row_dy = read_dy(group, r);
    const OfRow of_row = this->of_group(group)[r];
    const Centring<Op::kCentered, T> centring(of_row.mean, of_row.rstd);
    const auto of_total = StageOfTotal::read(place_of(group, r) + kBeforeTotal, 0);
    T gradient[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T xhat = centring.xhat_of(row_x.template get<T>(i), of_row.means.h);
      const T upstream = row_dy.template get<T>(i);
      const T of_norm = dx_of<Op>(upstream, xhat, weights, i, of_row.means, of_row.rstd);
      gradient[i] = gradient_of_inputs(of_norm, of_total, i);
      of_weight[i] = fused_multiply_add(upstream, xhat, of_weight[i]);
      of_bias[i] += upstream;
    }
    Pack<typename Op::DX, kLength> stored;
    stored.set(gradient);
    const bool wild = kSame<T, float> && of_row.means.g_xhat != of_row.means.g_xhat;
    const int n_stored = wild ? 0 : n_own;
    store<Layout::kVector>(stored, dx_row, 0, n_stored);
    if constexpr (kPresent<typename Op::DResidual>) {
      Pack<typename Op::DResidual, kLength> of_residual;
      of_residual.set(gradient);
      store<Layout::kVector>(
          of_residual, args.dresidual + this->row_of(group, r) * args.dresidual_stride + first, 0,
          n_stored);
    }
    dx_row += args.dx_stride;
    fetch(group + kStages, r);
    return wild;
  }
  // `wild_of_group`: a bit for each row.
  __device__ __forceinline__ void write_wild_rows(int group, unsigned wild_of_group) {
    if constexpr (kSame<T, float>) {
#pragma unroll 1
      for (int r = 0; wild_of_group >> r != 0; ++r) {
        if ((wild_of_group >> r & 1) == 0) continue;
        // Two places alternate. A warp that tells of a row has heard of the one before from all,
        // and they had read by then what was told of the one before that.
        const long long row = this->row_of(group, r);
        const int place = wild_rows % 2, warps = kWarps * strips;
        double* const exchanged = reinterpret_cast<double*>(
            args.exchange + kPlaces * Layout::kGroupRows * kSums * strips);
        const OfRow& of_row = this->of_group(group)[r];
        const WildRow<Op, long long> again(args, row, of_row.mean, of_row.rstd);
        write_own_part(again, first, n_cols, exchanged + place * kSums * warps,
                       static_cast<int>(block_index()) * kWarps + warp, warps,
                       args.arrived + (kPlaces + place) * kCountStride, wild_rows / 2 + 1,
                       args.inv_n);
        ++wild_rows;
      }
    }
  }
  __device__ __forceinline__ void do_group(int group) {
    unsigned wild_of_group = 0;
    // Two rows at once, if registers allow.
    constexpr int kUnrolled =
        Layout::kVector == kLength && Layout::kGroupRows > 1 && sizeof(DY) <= sizeof(X) ? 2 : 1;
#pragma unroll kUnrolled
    for (int r = 0; r < this->rows_of(group); ++r) {
      if (write_dx(group, r)) wild_of_group |= 1u << r;
    }
    commit_copies();
    write_wild_rows(group, wild_of_group);
    if ((group + 1) % (kTurns / Layout::kGroupRows) == 0 || group + 1 == groups) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        dweight_sums[i] += of_weight[i];
        dbias_sums[i] += of_bias[i];
        of_weight[i] = of_bias[i] = 0;
      }
    }
  }
  __device__ __forceinline__ void write_gradients() const {
    write_sums<Op, Layout::kVector>(dweight_sums, args.dweight + first, 0, n_own);
    write_sums<Op, Layout::kVector>(dbias_sums, args.dbias + first, 0, n_own);
  }
  __device__ __forceinline__ void run() {
    begin();
    begin_sums();
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      if (group + kAhead < groups) {
        wait_for_copies<kOnTheirWay - 1>();
        sum_up(group + kAhead);
      }
      named_barrier(this->known(group), kMeeting);
      do_group(group);
    }
    write_gradients();
  }
};

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kStripThreads + 32 * kMessengers, 1)
    norm_backward_column_parallel(
        const __grid_constant__ BackwardColumnParallelArguments<Op> args) {
  const int warp = thread_index() / 32;
  constexpr int kWarps = Layout::kStripThreads / 32;
  if (warp >= kWarps) {
    Messenger<Op, Layout>(args).run(warp - kWarps);
  } else {
    Columns<Op, Layout>(args).run();
  }
}
