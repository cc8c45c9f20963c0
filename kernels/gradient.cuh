// What the backward kernels share: how many rows' weight gradients are added in sequence and, for
// rows that are read once, the formulas of backward_pipelined.cu's header.
#pragma once

#include "affine.cuh"
#include "epilogue.cuh"
#include "groups.cuh"
#include "prologue.cuh"
#include "statistics.cuh"
#include "team.cuh"

// Weight gradients of so many rows are added one after another in registers. Equal terms round the
// same way each time, so long sequences lose digits (notes.md#rows-added-in-sequence).
constexpr int kTurns = 64;

// The distance of two rows of partial sums. It is whole packs of any dtype, so that rows of any
// length are moved whole.
__device__ __forceinline__ constexpr long long partials_stride(long long n_cols) {
  return (n_cols + 7) & ~7LL;
}

// Stores a pack of values to elements `first` ... of a row of n, if it is present. The threads of a
// row are RowThreads, as for store_by_sectors.
template <int Vector, int RowThreads, typename T, typename Out, int Length, typename Index>
__device__ __forceinline__ void write(const T (&values)[Length], Out* row, Index first, Index n) {
  if constexpr (kPresent<Out>) {
    Pack<Out, Length> pack;
    pack.set(values);
    store_by_sectors<Vector, RowThreads>(pack, row, first, n);
  }
}

// Writes one sum of a weight gradient to an array that a caller gave, or adds it to what is there: in the wider of the
// two types, rounded once.
template <typename Op, typename T, typename Out>
__device__ __forceinline__ void write_sum(T sum, Out* element) {
  if constexpr (Op::kAccumulates) {
    using Wide = decltype(T() + Compute<Out>());
    *element = convert<Out>(convert<Wide>(*element) + static_cast<Wide>(sum));
  } else {
    *element = convert<Out>(sum);
  }
}

// The same for a pack of sums, as `write` takes them. An array that was given is aligned to its elements alone.
template <typename Op, int Vector, typename T, typename Out, int Length, typename Index>
__device__ __forceinline__ void write_sums(const T (&sums)[Length], Out* gradient, Index first,
                                           Index n) {
  if constexpr (kPresent<Out> && Op::kGiven) {
#pragma unroll
    for (int i = 0; i < Length; ++i) {
      if (first + i < n) write_sum<Op>(sums[i], gradient + first + i);
    }
  } else {
    write<Vector, 1>(sums, gradient, first, n);
  }
}

// Adds a pack of the sums of weight gradients that begin at `others`.
template <typename T, int Width>
__device__ __forceinline__ void add_gradients(Pack<T, Width>& sums, const T* others) {
  Pack<T, Width> added;
  load<Width>(added, others, 0, Width);
#pragma unroll
  for (int k = 0; k < Width; ++k) sums.set(k, sums.template get<T>(k) + added.template get<T>(k));
}

// The first value if all bits of the mask are set, the second if none is. A condition would become a branch, and the
// shuffles of `fold` would be in it.
__device__ __forceinline__ float one_of(unsigned mask, float a, float b) {
  return float_from_bits((float_bits(a) & mask) | (float_bits(b) & ~mask));
}
__device__ __forceinline__ double one_of(unsigned mask, double a, double b) {
  const unsigned long long wide = static_cast<unsigned long long>(mask) << 32 | mask;
  return double_from_bits((double_bits(a) & wide) | (double_bits(b) & ~wide));
}

// Sums values over so many neighbouring lanes. Each step leaves a lane half of the values, as long as there are several.
// Lane l of L ends with value l * Count / L, or that and the next ones.
template <int Lanes, int Count, typename T>
__device__ __forceinline__ void fold(T (&values)[Count], int lane) {
  int left = Count;
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    if (left == 1) {
      values[0] += shuffle_xor(values[0], distance);
      continue;
    }
    left /= 2;
    unsigned upper = 0u - (static_cast<unsigned>(lane / distance) & 1);
    make_opaque(upper);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const T kept = one_of(upper, values[left + i], values[i]);
      values[i] = kept + shuffle_xor(one_of(upper, values[i], values[left + i]), distance);
    }
  }
}

// h = (x - mean) * rstd is computed as d * significand with d = x * power + offset. power is the
// power of two at or below rstd. So d is rounded as x - mean is, in one instruction, and not at all
// if they are close. All d of a constant row are 0. With rstd as the power, each would be what
// -mean * rstd lost (notes.md#a-power-of-two-for-rstd). The offset overflows only for constant
// rows.
template <bool Centered, typename T>
struct Centring {
  T power, offset = 0, significand = 1;

  __device__ __forceinline__ Centring(T mean, T rstd) : power(rstd) {
    if constexpr (Centered) {
      const T below = Range<T>::power_of_two_below(rstd), product = -mean * below;
      const bool overflows = absolute(product) > Range<T>::kLargest;
      power = overflows ? T(0) : below;
      offset = overflows ? T(0) : product;
      significand = rstd * Range<T>::reciprocal(below);
    }
  }
  // Past the row's end x is 0, and so is d: one offset serves an access, instead of one d an
  // element.
  __device__ __forceinline__ T d_of(T value, bool is_inside = true) const {
    return Centered ? fused_multiply_add(value, power, is_inside ? offset : T(0)) : value * power;
  }
  // xhat, centred again by the mean of h over the row.
  __device__ __forceinline__ T xhat_of(T value, T mean_of_h) const {
    return Centered ? fused_multiply_add(d_of(value), significand, -mean_of_h) : d_of(value);
  }
};

// Sums of g * d and, for LayerNorm, of g and d.
template <bool Centered>
constexpr int kGradientSums = Centered ? 3 : 1;

// Adds a pack of a row, which begins at element `first` of n.
template <typename Op, int Vector, typename T, typename X, typename DY, typename Weight, int Length>
__device__ __forceinline__ void add_to_sums(T (&sums)[kGradientSums<Op::kCentered>],
                                            const Centring<Op::kCentered, T>& centring,
                                            const Pack<X, Length>& x, const Pack<DY, Length>& dy,
                                            const Pack<Weight, Length>& weights, int first, int n) {
#pragma unroll
  for (int i = 0; i < Length; ++i) {
    T g = dy.template get<T>(i);
    if constexpr (kPresent<Weight>) g *= weight_at<Op, T>(weights, i);
    const T d = centring.d_of(x.template get<T>(i), inside<Vector>(first, i, n));
    sums[0] = fused_multiply_add(g, d, sums[0]);
    if constexpr (Op::kCentered) {
      sums[1] += g;
      sums[2] += d;
    }
  }
}

// Returns the mean of g * xhat from the row's sums of g * h and of g, and from the mean of h, which
// centres xhat. The mean of h is a rounding error. With an infinite dy it would give an infinity of
// either sign, so it is left out then.
template <typename T>
__device__ __forceinline__ T mean_of_g_xhat(T sum_of_g_h, T sum_of_g, T mean_of_h, T inv_n) {
  const T centred = absolute(sum_of_g) <= Range<T>::kLargest ? mean_of_h * sum_of_g : T(0);
  return (sum_of_g_h - centred) * inv_n;
}

// What dx needs of a row: the mean of h, which centres xhat, and the means of g and of g * xhat.
template <bool Centered, typename T>
struct RowMeans {
  T h = 0, g = 0, g_xhat;

  RowMeans() = default;
  // Takes the sums of add_to_sums, with the significand of their Centring.
  __device__ __forceinline__ RowMeans(const T (&sums)[kGradientSums<Centered>], T significand,
                                      T inv_n)
      : g_xhat(sums[0] * inv_n) {
    if constexpr (Centered) {
      h = sums[2] * significand * inv_n;
      g = sums[1] * inv_n;
      g_xhat = mean_of_g_xhat(sums[0] * significand, sums[1], h, inv_n);
    }
  }
};

// Element i of a pack's dx.
template <typename Op, typename T, typename Weight, int Length>
__device__ __forceinline__ T dx_of(T dy, T xhat, const Pack<Weight, Length>& weights, int i,
                                   const RowMeans<Op::kCentered, T>& means, T rstd) {
  const T along = fused_multiply_add(-xhat, means.g_xhat, -means.g);
  if constexpr (kPresent<Weight>) {
    return fused_multiply_add(dy, weight_at<Op, T>(weights, i), along) * rstd;
  } else {
    return (dy + along) * rstd;
  }
}

// A row's sums, or the last addition of dx_of, may overflow float32 on the way to a dx that does
// not. A row whose means exceed kTame is `wild`. Its dx is computed again in float64, element by
// element, unless dx was written over dy. Functions do so at the end of a kernel, so that other
// rows keep their registers. In other rows dx_of adds at most (sqrt(N) + 1) * kTame to g, which is
// less than half a unit in the last place of float32's largest number.
constexpr float kTame = 1.2089258196146292e24f;  // 2^80

template <bool Centered, typename T>
__device__ __forceinline__ bool is_wild(const RowMeans<Centered, T>& means, T most = kTame) {
  if constexpr (!kSame<T, float>) return false;
  const bool is_tame = absolute(means.g_xhat) <= most;
  if constexpr (Centered) return !(is_tame && absolute(means.g) <= most);
  return !is_tame;
}

// Whether dx overwrites an array that would have to be read again.
template <typename Op>
__device__ __forceinline__ bool is_in_place(const BackwardArguments<Op>& args) {
  const void* const dx = args.dx;
  if constexpr (kPresent<typename Op::DResidualOut>) {
    if (dx == args.dresidual_out) return true;
  }
  return dx == args.dy;
}

// Marks a wild row, and so all dx of it, by a NaN in place of the mean of g * xhat. If dx is in
// place, a row of finite means stays as it is.
template <bool Centered, typename T>
__device__ __forceinline__ void mark_if_wild(RowMeans<Centered, T>& means, bool in_place) {
  const T most = in_place ? Range<T>::kLargest : T(kTame);
  if (is_wild(means, most)) means.g_xhat = static_cast<T>(float_from_bits(0x7fffffffu));
}

template <typename Op, typename Index>
struct WildRow {
  using X = typename Op::X;
  using Weight = typename Op::Weight;
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kSums = kGradientSums<Op::kCentered>;
  using Means = RowMeans<Op::kCentered, double>;

  using DResidualOut = typename Op::DResidualOut;

  const typename Op::DY* dy;
  const X* x;
  const DResidualOut* dresidual_out;
  const Weight* weight;
  const unsigned char* bits;
  typename Op::DX* dx;
  typename Op::DResidual* dresidual;
  const Groups<Op>& groups;
  float mean, rstd;

  __device__ __forceinline__ WildRow(const BackwardArguments<Op>& args, long long row, float mean,
                                     float rstd)
      : dy(args.dy + row * args.dy_stride),
        x(args.x + row * args.x_stride),
        dresidual_out(args.dresidual_out + row * args.dresidual_out_stride),
        weight(args.weight),
        bits(args.bitmask + place_of_row<Op>(args, row) * bitmask_bytes(args.n_cols)),
        dx(args.dx + row * args.dx_stride),
        dresidual(args.dresidual + row * args.dresidual_stride),
        groups(args),
        mean(mean),
        rstd(rstd) {}

  __device__ __forceinline__ double g(Index column) const {
    const bool is_kept = !Op::Epilogue::kHasBits || (bits[column / 8] >> (column % 8) & 1) != 0;
    const double upstream = is_kept ? convert<double>(dy[column]) : 0.0;
    if constexpr (!kPresent<Weight>)
      return upstream;
    else
      return upstream *
             (convert<double>(weight[element_at(column)]) + (Op::kZeroCentered ? 1.0 : 0.0));
  }
  __device__ __forceinline__ double h(Index column) const {
    return (convert<double>(x[column]) - (Op::kCentered ? mean : 0.0)) * rstd;
  }
  // Sums over the packs of a thread, which begin at `first`, `step` apart, in a row of n columns;
  // of h, not of d.
  __device__ __forceinline__ void sum(double (&sums)[kSums], Index first, Index step,
                                      Index n) const {
    for_each_column(first, step, n, [&](Index column) {
      sums[0] += g(column) * h(column);
      if constexpr (Op::kCentered) sums[1] += g(column), sums[2] += h(column);
    });
  }
  __device__ __forceinline__ void write(const Means& means, Index first, Index step,
                                        Index n) const {
    for_each_column(first, step, n, [&](Index column) {
      const double projected = g(column) - (h(column) - means.h) * means.g_xhat - means.g;
      const auto gradient = of_inputs(projected * rstd, column);
      dx[column] = convert<typename Op::DX>(gradient);
      if constexpr (kPresent<typename Op::DResidual>)
        dresidual[column] = convert<typename Op::DResidual>(gradient);
    });
  }

 private:
  __device__ __forceinline__ Index element_at(Index column) const {
    if constexpr (Op::kRepeats > 0) {
      return static_cast<Index>(column / groups.n_repeats);
    } else {
      return column;
    }
  }
  // dresidual_out is added in float, as to the dx of any other row.
  __device__ __forceinline__ auto of_inputs(double of_x, Index column) const {
    if constexpr (kPresent<DResidualOut>)
      return static_cast<float>(of_x) + convert<float>(dresidual_out[column]);
    else
      return of_x;
  }
  template <typename Visit>
  static __device__ __forceinline__ void for_each_column(Index first, Index step, Index n,
                                                         const Visit& visit) {
#pragma unroll 1
    for (Index pack = first; pack < n; pack += step) {
#pragma unroll 1
      for (Index column = pack; column < pack + kLength && column < n; ++column) visit(column);
    }
  }
};

// Brings sums of g and of g * h into float32's range. |g| is at most 2^256. The sum of |h| is at
// most N, since the mean of h * h is at most 1, so an N of 2^31 fits. Values that vanish are far
// below those that overflowed.
constexpr double kIntoRange = 6.842277657836021e-49;  // 2^-160

// Adds up the sums of a team's threads in a reduction of float32.
template <int Sums, typename TeamOf>
__device__ __forceinline__ void add_up_wild(TeamOf& team, double (&sums)[Sums]) {
  float in_range[Sums];
#pragma unroll
  for (int i = 0; i < Sums; ++i) {
    in_range[i] = static_cast<float>(i < 2 ? sums[i] * kIntoRange : sums[i]);
  }
  team.template reduce<Sum>(in_range);
#pragma unroll
  for (int i = 0; i < Sums; ++i) sums[i] = i < 2 ? in_range[i] / kIntoRange : in_range[i];
}

// Writes dx of a team's wild row. All teams of a warp take part. One that `skips` does nothing
// else. Returns the team, whose reductions have advanced by one.
template <typename Op, int PacksPerThread, typename TeamOf>
__device__ NOT_INLINED TeamOf write_wild_row(TeamOf team, bool skips, long long row,
                                             const BackwardArguments<Op>& args) {
  using Row = WildRow<Op, int>;
  const long long place = place_of_row<Op>(args, row);
  const Row wild(args, row, Op::kCentered && !skips ? args.mean[place] : 0.0f,
                 skips ? 0.0f : args.rstd[place]);
  const int first = team.template first_column<PacksPerThread, Row::kLength>(0);
  const int step = team.template first_column<PacksPerThread, Row::kLength>(1) - first;
  const int last = first + PacksPerThread * step, n_cols = static_cast<int>(args.n_cols);
  const int end = skips ? 0 : n_cols < last ? n_cols : last;
  double sums[Row::kSums] = {};
  wild.sum(sums, first, step, end);
  add_up_wild(team, sums);
  wild.write(typename Row::Means(sums, 1.0, args.inv_n), first, step, end);
  return team;
}
