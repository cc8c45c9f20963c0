// Rows that do not all share one row of weight and bias (kGrouped). They are n_groups groups of n_rows rows. Each group
// is served as all rows are without groups, by blocks of its own.
//
// Rows:      row r of group g is row g * group_step + r * row_step of the arrays. Either the rows of a group lie one after
//            the other, and row_step is 1, or those of all groups take turns, and group_step is 1.
// Vectors:   group g has vector g % n_vectors of weight and of bias. Vectors are weight_step and bias_step elements
//            apart. A step is 0 if all groups share one.
// kRepeats:  if not 0, an element of a vector serves n_repeats neighbouring columns, a multiple of kRepeats. If that is a
//            pack's length or more, all columns of a pack have one element.
// Blocks:    n_clusters clusters for each group, in the order of the rows, so that blocks that run at the same time read
//            memory side by side. A number of a cluster, times n_magic, shifted by n_shift, is divided by n_groups if
//            groups take turns, else by n_clusters.
// Partials:  those of a gradient lie together, and among them those of a vector, or those of all vectors take turns.
// One group: if groups take turns, all rows may be taken as one group, of n_vectors vectors (backward_pipelined.cu).
#pragma once

#include "epilogue.cuh"
#include "operation.cuh"

// Where a block stands: its group, its number within that, and how many blocks a group has.
struct PlaceOfBlock {
  long long group, block, blocks;
};

template <typename Op, int ClusterBlocks, typename Arguments>
__device__ __forceinline__ PlaceOfBlock place_of_block(const Arguments& args) {
  if constexpr (!Op::kGrouped) {
    return {0, block_index(), block_count()};
  } else {
    // A grid has less than 2^31 blocks. A division would take a tenth of a microsecond.
    const unsigned cluster = static_cast<unsigned>(block_index()) / ClusterBlocks;
    const unsigned rank = static_cast<unsigned>(block_index()) % ClusterBlocks;
    const unsigned quotient = static_cast<unsigned>(
        cluster * static_cast<unsigned long long>(args.n_magic) >> args.n_shift);
    const bool take_turns = args.row_step > 1;
    const unsigned divisor = static_cast<unsigned>(take_turns ? args.n_groups : args.n_clusters);
    const unsigned remainder = cluster - quotient * divisor;
    const long long within = take_turns ? quotient : remainder;
    return {take_turns ? remainder : quotient, within * ClusterBlocks + rank,
            args.n_clusters * ClusterBlocks};
  }
}

// The number of the vector of a group.
template <typename Op>
__device__ __forceinline__ long long vector_of_group(const Groups<Op>& args, long long group) {
  if (args.n_groups == args.n_vectors) return group;
  return static_cast<unsigned>(group) % static_cast<unsigned>(args.n_vectors);
}

// The number of a row of the group, from the group's first row, among the rows of all groups.
template <typename Op>
__device__ __forceinline__ long long place_of_row(const Groups<Op>& args, long long row) {
  if constexpr (Op::kGrouped) {
    return row * args.row_step;
  } else {
    return row;
  }
}

// How many rows there are in all groups.
template <typename Op, typename Arguments>
__device__ __forceinline__ long long rows_of_all(const Arguments& args) {
  if constexpr (Op::kGrouped) {
    return args.n_rows * args.n_groups;
  } else {
    return args.n_rows;
  }
}

// The row of a block that starts `blocks` later, and behind which row there is none, as this group counts rows.
struct RowAhead {
  long long row, end;
};
template <typename Op, typename Arguments>
__device__ __forceinline__ RowAhead row_ahead(const Arguments& args, long long group, long long row,
                                              int blocks, int rows_of_block) {
  if constexpr (Op::kGrouped) {
    if (args.row_step == 1) {  // the next group's rows lie behind this one's
      return {row + blocks * rows_of_block, (args.n_groups - group) * args.n_rows};
    }
    // All groups have a block before this one has another.
    const int rounds = blocks / static_cast<int>(args.n_groups);
    return {row + (rounds > 0 ? rounds : 1) * rows_of_block, args.n_rows};
  } else {
    return {row + blocks * rows_of_block, args.n_rows};
  }
}

// The elements of a vector for a row of so many columns.
template <typename Op, typename Index>
__device__ __forceinline__ Index elements_of_vector(const Groups<Op>& args, Index n_cols) {
  if constexpr (Op::kRepeats > 0) {
    return static_cast<Index>(n_cols / args.n_repeats);
  } else {
    return n_cols;
  }
}

template <typename Op>
__device__ __forceinline__ void begin_at(ForwardArguments<Op>& args, long long row) {
  args.x += row * args.x_stride;
  args.residual += row * args.residual_stride;
  args.y += row * args.y_stride;
  args.residual_out += row * args.residual_out_stride;
  args.x_stride *= args.row_step;
  args.residual_stride *= args.row_step;
  args.y_stride *= args.row_step;
  args.residual_out_stride *= args.row_step;
  if (args.rstd != nullptr) {  // else nothing is kept
    if constexpr (Op::kCentered) args.mean += row;
    args.rstd += row;
    args.bitmask += row * bitmask_bytes(args.n_cols);
  }
}
template <typename Op>
__device__ __forceinline__ void begin_at(BackwardArguments<Op>& args, long long row) {
  args.dy += row * args.dy_stride;
  args.x += row * args.x_stride;
  args.dresidual_out += row * args.dresidual_out_stride;
  args.dx += row * args.dx_stride;
  args.dresidual += row * args.dresidual_stride;
  args.dy_stride *= args.row_step;
  args.x_stride *= args.row_step;
  args.dresidual_out_stride *= args.row_step;
  args.dx_stride *= args.row_step;
  args.dresidual_stride *= args.row_step;
  if constexpr (Op::kCentered) args.mean += row;
  args.rstd += row;
  args.bitmask += row * bitmask_bytes(args.n_cols);
}
template <typename Op>
__device__ __forceinline__ void take_vector(ForwardArguments<Op>& args, long long vector) {
  args.weight += vector * args.weight_step;
  args.bias += vector * args.bias_step;
}
template <typename Op>
__device__ __forceinline__ void take_vector(BackwardArguments<Op>& args, long long vector) {
  args.weight += vector * args.weight_step;
}

// The arguments of a block's group. Without groups, they are those given.
template <typename Op, int ClusterBlocks, typename Arguments>
__device__ __forceinline__ decltype(auto) of_group(const Arguments& given) {
  if constexpr (!Op::kGrouped) {
    return (given);
  } else {
    Arguments args = given;
    const long long group = place_of_block<Op, ClusterBlocks>(given).group;
    begin_at<Op>(args, group * args.group_step);
    take_vector<Op>(args, vector_of_group<Op>(args, group));
    return args;
  }
}

// The row of partials that a block writes for gradient `index`: it is number `block` of the `blocks` of its group that
// write some.
template <typename Op>
__device__ __forceinline__ long long row_of_partials(const Groups<Op>& args, long long group,
                                                     int index, long long block, long long blocks) {
  if constexpr (Op::kGrouped) {
    const long long groups_of_vector = args.n_groups / args.n_vectors;
    const long long vector = vector_of_group<Op>(args, group);
    const long long slot = vector * groups_of_vector + (group - vector) / args.n_vectors;
    return (index * args.n_groups + slot) * blocks + block;
  } else {
    return index * blocks + block;
  }
}

// Which rows of partials are summed to one vector of a gradient, and where it begins. No row at all, -1, if another
// block sums what all vectors share. A vector's rows are group_step rows behind those of the vector before it, and
// row_step apart.
struct SumOfPartials {
  long long first, n_partials, target, step;
};

template <typename Op>
__device__ __forceinline__ SumOfPartials sum_of_partials(const ReductionArguments<Op>& args,
                                                         long long vector, bool is_first) {
  if constexpr (Op::kGrouped) {
    const bool of_weight = kPresent<typename Op::DWeight> && is_first;
    const long long step = of_weight ? args.weight_step : args.bias_step;
    const long long first = is_first ? 0 : args.n_vectors * args.n_partials;
    if (step == 0) return {first, vector > 0 ? -1 : args.n_vectors * args.n_partials, 0, 1};
    // Without vectors there is still a block, for what all share.
    const bool is_there = vector < args.n_vectors;
    return {first + vector * args.group_step, is_there ? args.n_partials : -1, vector * step,
            args.row_step};
  } else {
    return {is_first ? 0 : args.n_partials, args.n_partials, 0, 1};
  }
}

// The quotient of two numbers that are not negative.
template <typename Index>
__device__ __forceinline__ Index quotient(Index column, long long repeats) {
  if ((static_cast<unsigned long long>(column) | static_cast<unsigned long long>(repeats)) >> 32 ==
      0) {  // a long division takes a hundred instructions
    return static_cast<Index>(static_cast<unsigned>(column) / static_cast<unsigned>(repeats));
  }
  return static_cast<Index>(column / repeats);
}

// Loads a pack of columns of a vector, each element of which serves `repeats` columns. The loads do not wait for each
// other. Columns past the row's end get its last element.
template <typename Op, typename T, int Length, typename Index>
__device__ __forceinline__ void load_repeated(Pack<T, Length>& pack, const T* vector, Index first,
                                              Index n, long long repeats) {
  if constexpr (kPresent<T>) {
    const Index last = n - 1;
    const Index begin = first < last ? first : last;
    Index element = quotient(begin, repeats);
    if constexpr (Op::kRepeats >= Length) {
      const Compute<T> value = convert<Compute<T>>(vector[element]);
#pragma unroll
      for (int i = 0; i < Length; ++i) pack.set(i, value);
    } else {
      Index left = static_cast<Index>(repeats - (begin - element * repeats));  // of this element's
      T elements[Length];
#pragma unroll
      for (int i = 0; i < Length; ++i) {
        elements[i] = vector[element];
        if (--left == 0 && begin + i < last) {
          ++element;
          left = static_cast<Index>(repeats);
        }
      }
#pragma unroll
      for (int i = 0; i < Length; ++i) pack.set(i, convert<Compute<T>>(elements[i]));
    }
  }
}
