// What a kernel is told: the operation by the type `Op`, how rows are laid over threads by the type `Layout`,
// and what differs from launch to launch by one struct of arguments. cupynorm/_compile.py writes the types, which
// `cupynorm.kernel_source` shows, and lists the members of the structs in this order.
//
// Op:        the dtypes as types, X, DY, Weight, Bias, Y, DWeight and DBias, None for what is absent; forward
//            the Prologue (prologue.cuh), and the Epilogue (epilogue.cuh); and the options, kCentered (LayerNorm, else RMSNorm),
//            kZeroCentered (1 is added to the weight) and kStoresStatistics. It has what the kernel depends on, and
//            no more. X is of what is normalized: with a Residual, of the sum of that and a Branch. DWeight and DBias
//            are of what the kernel itself writes: the compute type for partials. DResidual is None where it is DX.
// Layout:    the fields of a configuration of cupynorm/_layout that the kernel needs, row_threads as kRowThreads.
// Arguments: sizes and other numbers first, then arrays as a caller passes them; a row's stride is in elements.
#pragma once

#include "types.cuh"

template <typename Op>
struct ForwardArguments {
  long long n_rows, n_cols;
  Compute<typename Op::X> inv_n, eps, lower, upper;  // 1 / n_cols; the bounds of the ReLU
  const typename Op::Branch* x;
  long long x_stride;
  const typename Op::Residual* residual;
  long long residual_stride;
  const typename Op::Weight* weight;
  const typename Op::Bias* bias;
  typename Op::Y* y;
  long long y_stride;
  Compute<typename Op::X>* mean;
  Compute<typename Op::X>* rstd;
  unsigned char* bitmask;
  typename Op::X* residual_out;
  long long residual_out_stride;
};

template <typename Op>
struct ForwardPipelinedArguments : ForwardArguments<Op> {
  int* count;  // of the rows that were handed out, or null
};

template <typename Op>
struct BackwardArguments {
  long long n_rows, n_cols;
  Compute<typename Op::X> inv_n;
  const typename Op::DY* dy;
  long long dy_stride;
  const typename Op::X* x;
  long long x_stride;
  const typename Op::DResidualOut* dresidual_out;
  long long dresidual_out_stride;
  const typename Op::Weight* weight;
  const Compute<typename Op::X>* mean;
  const Compute<typename Op::X>* rstd;
  const unsigned char* bitmask;
  typename Op::DX* dx;
  long long dx_stride;
  typename Op::DWeight* dweight;
  typename Op::DBias* dbias;
  typename Op::DResidual* dresidual;
  long long dresidual_stride;
};

template <typename Op>
struct BackwardPipelinedArguments : BackwardArguments<Op> {
  Compute<typename Op::X>* partials;
};

template <typename Op>
struct BackwardInRegistersArguments : BackwardArguments<Op> {
  Compute<typename Op::X>* means_of_h;
};

template <typename Op>
struct BackwardColumnParallelArguments : BackwardArguments<Op> {
  unsigned* arrived;
  Compute<typename Op::X>* exchange;
};

template <typename Op>
struct BackwardStreamingArguments : BackwardArguments<Op> {
  Compute<typename Op::X>* partials;
  Compute<typename Op::X>* coefficients;
  long long n_partials;
};

template <typename Op>
struct ReductionArguments {
  long long n_partials, n_cols;
  const Compute<typename Op::X>* partials;
  typename Op::DWeight* dweight;
  typename Op::DBias* dbias;
};
