// Backward of RMSNorm and LayerNorm for rows of any length; formulas and names as in backward_pipelined.cu.
//
// There are two kernels. norm_backward_coefficients reduces each row to what dx needs of it:
//   recentre = mean(h), mean_of_g = mean(g), mean_of_g_xhat = mean(g * xhat),
//   h = (x - mean) * rstd, xhat = h - recentre;
// norm_backward_columns then walks down the columns, writes dx and sums the weight gradients.
//
// Layout:    as backward_pipelined.cu; coefficients are (4, n_rows) in the order above; RMSNorm uses the last two. The
//            fourth is 1 for wild rows (gradient.cuh), whose means of g and of g * xhat are multiplied by
//            kIntoRange, else 0.
// Traffic:   x, dy and bitmask read twice, dx written once, partials written once. Partials are read and written once
//            more for each further kTurns rows of a chunk.
#include "affine.cuh"
#include "gradient.cuh"
#include "epilogue.cuh"
#include "stream.cuh"
#include "team.cuh"

// Grid:      a cluster of kClusterBlocks blocks of kRowThreads threads a row, on grid.x.
// Thread:    t of the cluster's T has packs t, t + T, ... of the row.
// Order:     a thread's packs in turn, compensated from pack to pack; then the cluster's reduction.
// Result:    thread 0 of a cluster's first block writes the row's coefficients.
template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kRowThreads, 1)
    norm_backward_coefficients(const __grid_constant__ BackwardStreamingArguments<Op> given) {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using T = Compute<X>;
  const auto& args = of_group<Op, Layout::kClusterBlocks>(given);
  const PlaceOfBlock place_of = place_of_block<Op, Layout::kClusterBlocks>(given);
  const long long n_cols = args.n_cols;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  Team<Layout::kRowThreads, Layout::kRowThreads, Layout::kClusterBlocks> team;
  const long long row = place_of.block / Layout::kClusterBlocks;
  const long long place = place_of_row<Op>(args, row);
  const T row_mean = Op::kCentered ? args.mean[place] : T(0);
  const T row_rstd = args.rstd[place];
  T* const coefficients = args.coefficients + place_of.group * 4 * args.n_rows;

  CompensatedSum<T> sum_of_g_h, sum_of_g, sum_of_h;
  for_each_pack<Layout::kClusterBlocks, Layout::kRowThreads, kLength>(n_cols, [&](long long first) {
    Pack<X, kLength> pack_x;
    Pack<DY, kLength> pack_dy;
    Pack<Weight, kLength> weights;
    load<Layout::kVector, false>(pack_x, args.x + row * args.x_stride, first, n_cols);
    load<Layout::kVector, false>(pack_dy, args.dy + row * args.dy_stride, first, n_cols);
    if constexpr (Op::Epilogue::kHasBits) {
      Op::Epilogue::backward(
          pack_dy, load_bits(args.bitmask + place * bitmask_bytes(n_cols), first, n_cols), first);
    }
    if constexpr (Op::kRepeats > 0) {
      load_repeated<Op>(weights, args.weight, first, n_cols, args.n_repeats);
    } else {
      load<Layout::kVector, false>(weights, args.weight, first, n_cols);
    }
    T of_g_h = 0, of_g = 0, of_h = 0;
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      // Past the end x is 0, too, so one mean serves an access.
      const T mean_inside = inside<Layout::kVector>(first, i, n_cols) ? row_mean : T(0);
      const T h = (pack_x.template get<T>(i) - mean_inside) * row_rstd;
      T g = pack_dy.template get<T>(i);
      if constexpr (kPresent<Weight>) g *= weight_at<Op, T>(weights, i);
      of_g_h = fused_multiply_add(g, h, of_g_h);
      if constexpr (Op::kCentered) {
        of_g += g;
        of_h += h;
      }
    }
    sum_of_g_h.add(of_g_h);
    if constexpr (Op::kCentered) {
      sum_of_g.add(of_g);
      sum_of_h.add(of_h);
    }
  });
  T sums[kGradientSums<Op::kCentered>] = {sum_of_g_h.total()};
  if constexpr (Op::kCentered) {
    sums[1] = sum_of_g.total();
    sums[2] = sum_of_h.total();
  }
  team.meet();
  team.template reduce<Sum>(sums);
  const auto store_means = [&](const auto& means, auto into_range, T is_wild_row) {
    if (team.block > 0 || team.rank > 0) return;
    if constexpr (Op::kCentered) {
      coefficients[row] = static_cast<T>(means.h);
      coefficients[args.n_rows + row] = static_cast<T>(means.g * into_range);
    }
    coefficients[2 * args.n_rows + row] = static_cast<T>(means.g_xhat * into_range);
    coefficients[3 * args.n_rows + row] = is_wild_row;
  };
  const RowMeans<Op::kCentered, T> means(sums, T(1),
                                         args.inv_n);  // of h itself, since no significand is left
  if constexpr (kSame<T, float>) {
    if (is_wild(means)) {
      const WildRow<Op, long long> again(args, row, row_mean, row_rstd);
      double wild_sums[kGradientSums<Op::kCentered>] = {};
      constexpr long long kStep =
          static_cast<long long>(Layout::kClusterBlocks) * Layout::kRowThreads * kLength;
      again.sum(wild_sums,
                thread_in_cluster<Layout::kClusterBlocks, Layout::kRowThreads>() * kLength, kStep,
                n_cols);
      add_up_wild(team, wild_sums);
      store_means(RowMeans<Op::kCentered, double>(wild_sums, 1.0, args.inv_n), kIntoRange, T(1));
      return;
    }
  }
  store_means(means, T(1), T(0));
}

template <int Vector, typename T, typename Out, int Length>
__device__ __forceinline__ void store_streamed(const T (&values)[Length], Out* row, long long first,
                                               long long n) {
  if constexpr (kPresent<Out>) {
    Pack<Out, Length> pack;
    pack.set(values);
    store<Vector, false, false>(pack, row, first, n);
  }
}

// Grid:      block_index = chunk * tiles + tile: tiles of kColumnThreads packs cover the columns; chunk c
//            of n_partials takes rows c, c + n_partials, ...
// Thread:    one pack of columns, down the rows of its chunk, each prefetched.
// Order:     up to kTurns rows in turn, then such sums in turn, then reduce_partials.cu.
// Result:    partials, those of chunk c in row c.
template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kColumnThreads, 2)
    norm_backward_columns(const __grid_constant__ BackwardStreamingArguments<Op> given) {
  using X = typename Op::X;
  using DY = typename Op::DY;
  using Weight = typename Op::Weight;
  using DResidualOut = typename Op::DResidualOut;
  using T = Compute<X>;
  const auto& args = of_group<Op, 1>(given);
  const PlaceOfBlock place_of = place_of_block<Op, 1>(given);
  const long long n_cols = args.n_cols;
  constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  constexpr bool kDBias = kPresent<typename Op::DBias>;
  constexpr long long kTile = static_cast<long long>(Layout::kColumnThreads) * kLength;
  const long long tiles = (n_cols + kTile - 1) / kTile;
  const long long chunk = place_of.block / tiles;
  const long long first = place_of.block % tiles * kTile + thread_index() * kLength;
  const T* const coefficients = args.coefficients + place_of.group * 4 * args.n_rows;

  Pack<Weight, kLength> weights;
  if constexpr (Op::kRepeats > 0) {
    load_repeated<Op>(weights, args.weight, first, n_cols, args.n_repeats);
  } else {
    load<Layout::kVector, false>(weights, args.weight, first, n_cols);
  }
  // Whether a pack's columns have one gradient. Then partials have a value for each pack.
  constexpr bool kOfPacks = Op::kRepeats >= kLength;
  T dweight[kLength] = {}, dbias[kLength] = {};
  // Moves one gradient from registers to this chunk's partials.
  bool flushed = false;
  const auto flush = [&](T(&gradient)[kLength], int index) {
    const long long row_of_sums =
        row_of_partials<Op>(args, place_of.group, index, chunk, args.n_partials);
    if constexpr (kOfPacks) {
      T* const target = args.partials + row_of_sums * partials_stride(n_cols / kLength);
      T sum = 0;
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        sum += gradient[i];
        gradient[i] = 0;
      }
      if (first < n_cols)
        target[first / kLength] = (flushed ? target[first / kLength] : T(0)) + sum;
    } else {
      T* const target = args.partials + row_of_sums * partials_stride(n_cols);
      Pack<T, kLength> sums;
      load<kLength>(sums, target, first, flushed ? n_cols : 0);
#pragma unroll
      for (int i = 0; i < kLength; ++i) {
        sums.set(i, sums.template get<T>(i) + gradient[i]);
        gradient[i] = 0;
      }
      store<kLength>(sums, target, first, n_cols);
    }
  };
  const auto flush_all = [&] {
    if constexpr (kPresent<Weight>) flush(dweight, 0);
    if constexpr (kDBias) flush(dbias, kPresent<Weight> ? 1 : 0);
    flushed = true;
  };
  Pack<X, kLength> next_x;
  Pack<DY, kLength> next_dy;
  Pack<DResidualOut, kLength> next_total;
  unsigned next_bits = 0;
  const auto load_next = [&](long long row) {
    const long long n = row < args.n_rows ? n_cols : 0;
    load<Layout::kVector, false>(next_x, args.x + row * args.x_stride, first, n);
    load<Layout::kVector, false>(next_dy, args.dy + row * args.dy_stride, first, n);
    load<Layout::kVector, false>(next_total, args.dresidual_out + row * args.dresidual_out_stride,
                                 first, n);
    if constexpr (Op::Epilogue::kHasBits) {
      next_bits =
          load_bits(args.bitmask + place_of_row<Op>(args, row) * bitmask_bytes(n_cols), first, n);
    }
  };

  load_next(chunk);
  int turn = 0;
  for (long long row = chunk; row < args.n_rows; row += args.n_partials) {
    const Pack<X, kLength> row_x = next_x;
    Pack<DY, kLength> row_dy = next_dy;
    const Pack<DResidualOut, kLength> of_total = next_total;
    if constexpr (Op::Epilogue::kHasBits) Op::Epilogue::backward(row_dy, next_bits, first);
    load_next(row + args.n_partials);
    const long long place = place_of_row<Op>(args, row);
    const T row_mean = Op::kCentered ? args.mean[place] : T(0);
    const T row_rstd = args.rstd[place];
    const T recentre = Op::kCentered ? coefficients[row] : T(0);
    const T mean_of_g = Op::kCentered ? coefficients[args.n_rows + row] : T(0);
    const T mean_of_g_xhat = coefficients[2 * args.n_rows + row];
    T gradient[kLength];
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      const T upstream = row_dy.template get<T>(i);
      T g = upstream;
      if constexpr (kPresent<Weight>) g *= weight_at<Op, T>(weights, i);
      T xhat = (row_x.template get<T>(i) - row_mean) * row_rstd;
      if constexpr (Op::kCentered) xhat -= recentre;
      const T projected = fused_multiply_add(-xhat, mean_of_g_xhat, g - mean_of_g);
      gradient[i] = gradient_of_inputs(projected * row_rstd, of_total, i);
      dweight[i] = fused_multiply_add(upstream, xhat, dweight[i]);
      dbias[i] += upstream;
    }
    bool wild = false;
    if constexpr (kSame<T, float>) wild = coefficients[3 * args.n_rows + row] != 0;
    if (wild) {
      RowMeans<Op::kCentered, double> means;
      means.h = recentre;
      means.g = mean_of_g / kIntoRange;
      means.g_xhat = mean_of_g_xhat / kIntoRange;
      const WildRow<Op, long long> again(args, row, row_mean, row_rstd);
      again.write(means, first, kTile, first + kLength < n_cols ? first + kLength : n_cols);
    } else {
      store_streamed<Layout::kVector>(gradient, args.dx + row * args.dx_stride, first, n_cols);
      store_streamed<Layout::kVector>(gradient, args.dresidual + row * args.dresidual_stride, first,
                                      n_cols);
    }
    if (++turn == kTurns) {
      flush_all();
      turn = 0;
    }
  }
  if (turn > 0 || !flushed) flush_all();  // zeros for a chunk without rows
}
