// Rows that lie side by side, as the channels of images do: x is (outer, n_cols, n_inner), and a row has the elements of
// one outer index and one inner one, n_inner apart. The same kernels would read it after a copy that makes rows of
// columns; these read it in place, once.
//
// Grid:      a block has one tile at a time: all columns of kTile neighbouring rows of one outer index, in shared memory.
// Thread:    lane l = thread % kLanes has pack l of the tile's rows, and column k * kGroups + thread / kLanes for k = 0, 1,
//            ... . It reads only what it has copied, so that the block meets for the sums alone.
// Order:     a thread's columns by kTurnsOfColumns, then these sums, then a butterfly over the groups of a warp, then the
//            warps in turn. It is a function of n_cols, the dtypes and the layout.
#pragma once

#include "affine.cuh"
#include "stage.cuh"
#include "statistics.cuh"
#include "team.cuh"

// So many columns of a thread are added one after another: see kTurns in gradient.cuh.
constexpr int kTurnsOfColumns = 32;

template <typename X, typename Layout>
struct StridedTile {
  static constexpr int kLength = 16 / static_cast<int>(sizeof(X));
  static constexpr int kLanes = Layout::kLanes;
  static constexpr int kGroups = Layout::kBlockThreads / kLanes;
  static constexpr int kTile = kLanes * kLength;
  static constexpr int kWarps = Layout::kBlockThreads / 32;
  static_assert(kLanes <= 32 && Layout::kBlockThreads % 32 == 0, "each warp has all lanes");

  const int n_cols, n_inner;
  const int lane = thread_index() % kLanes, group = thread_index() / kLanes;
  const int rounds = (n_cols + kGroups - 1) / kGroups;  // columns of a thread
  const long long tiles_of_outer = (n_inner + kTile - 1) / kTile;
  struct Place {
    long long outer;
    int first;  // of the thread's rows, among those of this outer index
  };
  Place here = {};  // of the tile that is worked on
  bool used = false;

  __device__ __forceinline__ StridedTile(long long n_cols, long long n_inner)
      : n_cols(static_cast<int>(n_cols)), n_inner(static_cast<int>(n_inner)) {}

  __device__ __forceinline__ Place place_of(long long tile) const {
    const int of_outer = static_cast<int>(tile % tiles_of_outer);
    return {tile / tiles_of_outer, of_outer * kTile + lane * kLength};
  }
  __device__ __forceinline__ int column(int round) const { return round * kGroups + group; }
  // Where a column of this outer index begins.
  __device__ __forceinline__ long long begin_of(int column, const Place& place) const {
    return (place.outer * n_cols + column) * n_inner;
  }
  // The statistics of the thread's first row.
  __device__ __forceinline__ long long row() const { return here.outer * n_inner + here.first; }

  // Asks for the tile that is worked on next.
  template <typename StageOf, typename Element>
  __device__ __forceinline__ void fetch(char* stage, const Element* array) const {
#pragma unroll 4
    for (int round = 0; round < rounds; ++round) {
      const int c = column(round);
      StageOf::template fetch<Layout::kVector>(stage, round,
                                               array + begin_of(c < n_cols ? c : 0, here),
                                               here.first, c < n_cols ? n_inner : 0);
    }
  }
  // Asks for a pack that begins `begin` elements from the array, of another tile. The thread has read this tile's pack.
  template <typename StageOf, typename Element>
  __device__ __forceinline__ void fetch_ahead(char* stage, int round, const Element* array,
                                              long long begin, const Place& place) const {
    StageOf::template fetch<Layout::kVector>(stage, round, array + begin, place.first, n_inner);
  }
  // Calls `add` with each of the thread's columns and with sums that begin at 0. Adds these up.
  template <int Sums, typename T, typename Add>
  __device__ __forceinline__ void sum_columns(T (&sums)[Sums][kLength], const Add& add) const {
#pragma unroll
    for (int k = 0; k < Sums; ++k) {
#pragma unroll
      for (int i = 0; i < kLength; ++i) sums[k][i] = 0;
    }
#pragma unroll 1
    for (int begin = 0; begin < rounds; begin += kTurnsOfColumns) {
      const int end = begin + kTurnsOfColumns < rounds ? begin + kTurnsOfColumns : rounds;
      T of_turn[Sums][kLength] = {};
#pragma unroll 2
      for (int round = begin; round < end; ++round) {
        if (column(round) < n_cols) add(of_turn, round, column(round));
      }
#pragma unroll
      for (int k = 0; k < Sums; ++k) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) sums[k][i] += of_turn[k][i];
      }
    }
  }
  // Combines what the groups have for the rows of a lane, and gives it to all of them.
  template <typename Combine, int Sums, typename T>
  __device__ __forceinline__ void meet(T (&values)[Sums][kLength], char* scratch) {
    constexpr int kWidth =
        16 / static_cast<int>(sizeof(T)) < kLength ? 16 / static_cast<int>(sizeof(T)) : kLength;
    using Piece = Pack<T, kWidth>;
    T* const shared = reinterpret_cast<T*>(scratch);
#pragma unroll
    for (int distance = kLanes; distance < 32; distance *= 2) {
#pragma unroll
      for (int k = 0; k < Sums; ++k) {
#pragma unroll
        for (int i = 0; i < kLength; ++i) {
          values[k][i] = Combine::combine(values[k][i], shuffle_xor(values[k][i], distance));
        }
      }
    }
    if (used) block_barrier();  // the last values have been read
    used = true;
    const int warp = thread_index() / 32;
    if (thread_index() % 32 < kLanes) {
#pragma unroll
      for (int k = 0; k < Sums; ++k) {
#pragma unroll
        for (int begin = 0; begin < kLength; begin += kWidth) {
          Piece piece;
#pragma unroll
          for (int i = 0; i < kWidth; ++i) piece.set(i, values[k][begin + i]);
          store<kWidth>(piece, shared, ((warp * Sums + k) * kLanes + lane) * kLength + begin,
                        kWarps * Sums * kTile);
        }
      }
    }
    block_barrier();
#pragma unroll
    for (int k = 0; k < Sums; ++k) {
#pragma unroll
      for (int begin = 0; begin < kLength; begin += kWidth) {
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
          Piece piece;
          load<kWidth>(piece, shared, ((other * Sums + k) * kLanes + lane) * kLength + begin,
                       kWarps * Sums * kTile);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const T value = piece.template get<T>(i);
            T& total = values[k][begin + i];
            total = other == 0 ? value : Combine::combine(total, value);
          }
        }
      }
    }
  }
};

// The element of a weight, or 1; of a bias, or 0.
template <typename Op, typename T, typename Weight>
__device__ __forceinline__ T weight_of_column(const Weight* weight, int column) {
  if constexpr (kPresent<Weight>) {
    const T value = convert<T>(weight[column]);
    return Op::kZeroCentered ? T(1) + value : value;
  } else {
    return T(1);
  }
}
template <typename T, typename Bias>
__device__ __forceinline__ T bias_of_column(const Bias* bias, int column) {
  if constexpr (kPresent<Bias>) {
    return convert<T>(bias[column]);
  } else {
    return T(0);
  }
}
