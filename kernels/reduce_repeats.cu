// The weight gradients from the blocks' partial sums, where an element of weight or bias serves n_repeats columns
// (groups.cuh): the sum over these columns and over the partials of its vector.
//
// Layout:    partials as reduce_partials.cu reads them, or those of all vectors take turns (groups.cuh).
// Grid:      a block for each element of each gradient and vector, on grid.x.
// Traffic:   partials read once, gradients written once and, if kAccumulates, read once.
// Thread:    t of T has values t, t + T, ... of the block's, which are n_repeats from each partial.
// Order:     a thread's values in turn, compensated, then the block's reduction.
// Result:    thread 0 writes the element.
#include "gradient.cuh"
#include "stream.cuh"

template <typename Op, typename Layout>
__global__ void __launch_bounds__(Layout::kBlockThreads)
    reduce_repeats(const __grid_constant__ ReductionArguments<Op> args) {
  using T = Compute<typename Op::X>;
  using DWeight = typename Op::DWeight;
  constexpr int kGradients = kPresent<DWeight> + kPresent<typename Op::DBias>;
  const long long elements = elements_of_vector<Op>(args, args.n_cols);
  const long long element = block_index() % elements;
  const long long of_vector = block_index() / elements;
  const bool is_first = of_vector % kGradients == 0;
  const SumOfPartials sum_of = sum_of_partials<Op>(args, of_vector / kGradients, is_first);
  if (sum_of.n_partials < 0) return;

  wait_for_previous_kernel();
  const long long stride = partials_stride(args.n_cols), repeats = args.n_repeats;
  const T* const source = args.partials + sum_of.first * stride + element * repeats;
  const long long partial_step = Layout::kBlockThreads / repeats;
  const long long column_step = Layout::kBlockThreads % repeats;
  CompensatedSum<T> exact;
  long long partial = thread_index() / repeats, column = thread_index() % repeats;
#pragma unroll 4
  while (partial < sum_of.n_partials) {
    exact.add(source[partial * sum_of.step * stride + column]);
    partial += partial_step;
    column += column_step;
    if (column >= repeats) {
      column -= repeats;
      ++partial;
    }
  }
  T sum[1] = {exact.total()};
  Team<Layout::kBlockThreads, Layout::kBlockThreads> team;
  team.meet();
  team.template reduce<Sum>(sum);
  if (thread_index() > 0) return;
  if constexpr (kPresent<DWeight>) {
    if (is_first) write_sum<Op>(sum[0], args.dweight + sum_of.target + element);
  }
  if constexpr (kPresent<typename Op::DBias>) {
    if (!kPresent<DWeight> || !is_first) {
      write_sum<Op>(sum[0], args.dbias + sum_of.target + element);
    }
  }
}
