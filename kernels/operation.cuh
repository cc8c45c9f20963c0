// What a kernel is given: the type `Op` says what is computed, the type `Layout` says how rows are laid over
// threads, and one struct of arguments has what differs from launch to launch. cupynorm/_compile.py writes the
// types and lists the members of the structs in this order. `cupynorm.kernel_source` shows them.
//
// Op:        It has what the kernel depends on, and no more. The dtypes are types: X, DY, Weight, Bias, Y, DWeight and
//            DBias, None if absent. Forward has the Prologue (prologue.cuh). Both have the Epilogue (epilogue.cuh) and
//            the options kCentered (LayerNorm, else RMSNorm), kZeroCentered (1 is added to the weight), kGrouped and
//            kRepeats (groups.cuh: rows do not all share one row of weight and bias). If
//            kStoresBits, forward stores the bits of the Epilogue. If that is Quantize, Y has eight bits, and there are
//            Via, Scale, kGivenScale, kScaleColumns, kColumnMajor and kFindsAmax (quantize.cuh). X is the type of what
//            is normalized. With a Residual, that is the sum of it and a Branch. DWeight and DBias are the types that
//            the kernel itself writes: for partials, the compute type. DResidual is None if it is DX. A kernel that
//            writes the gradients themselves has kGiven (a caller gave the arrays) and kAccumulates (it adds to them).
// Layout:    The fields of a configuration of cupynorm/_layout that the kernel needs: row_threads as kRowThreads.
// Arguments: Sizes and other numbers come first, then arrays as a caller passes them. A row's stride is in elements.
//            Inference has no mean and no rstd.
#pragma once

#include "types.cuh"

// The numbers that groups.cuh explains.
template <typename Op, bool = Op::kGrouped>
struct Groups {};
template <typename Op>
struct Groups<Op, true> {
  long long n_groups, n_vectors, n_repeats, n_clusters, n_magic, n_shift;
  long long group_step, row_step, weight_step, bias_step;
};

template <typename Op>
struct ForwardArguments : Groups<Op> {
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

// lower and upper are the bounds of a scale that is computed.
template <typename Op>
struct QuantizedArguments : ForwardArguments<Op> {
  typename Op::Scale* scale;  // one that is given, or one for each row or block
  float* amax;                // one, 0 before the launch, or null
};

template <typename Op>
struct ForwardPipelinedArguments : ForwardArguments<Op> {
  int* count;  // counts the rows that were handed out, or is null
};

template <typename Op>
struct ForwardStridedArguments : ForwardArguments<Op> {
  long long n_inner;
};

template <typename Op>
struct BackwardArguments : Groups<Op> {
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
struct BackwardStridedArguments : BackwardArguments<Op> {
  Compute<typename Op::X>* partials;
  long long n_inner;
};

template <typename Op>
struct ReductionArguments : Groups<Op> {
  long long n_partials, n_cols;
  const Compute<typename Op::X>* partials;
  typename Op::DWeight* dweight;
  typename Op::DBias* dbias;
};
