// Rows that do not begin at multiples of 16 bytes, still moved by whole lines.
//
// Load:      A pack of such a row lies in two cells. A cell is the aligned 16 bytes of memory, or as many bytes as a
//            pack has if it is shorter. Both cells are loaded, and the pack is shifted out of them.
// Store:     Packs are stored by words of 4 bytes, neighbouring words by neighbouring lanes. The lanes exchange them
//            in shared memory. If 16-bit elements are at odd addresses, no multiples of 4, a pack begins in the middle
//            of a word.
#pragma once

#include "pack.cuh"

template <typename T, int Length>
constexpr int kCellBytes =
    Length * static_cast<int>(sizeof(T)) < 16 ? Length * static_cast<int>(sizeof(T)) : 16;

// The bytes of a cell before the pack that begins in it. They are the same for all packs of a row.
template <typename T, int Length>
__device__ __forceinline__ int bytes_before(const T* row) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(row) & (kCellBytes<T, Length> - 1));
}

// The pack that begins so many bytes after its cells do. The cells are given as words.
template <typename T, int Length, int Words>
__device__ __forceinline__ Pack<T, Length> pack_of_cells(unsigned (&words)[Words], int before) {
  constexpr int kOfCell = kCellBytes<T, Length> / 4;
  static_assert(Words == Pack<T, Length>::kWords + kOfCell,
                "those of the cell behind the pack, too");
#pragma unroll
  for (int step = kOfCell / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {  // to a constant: otherwise 12 words go to local memory
      if (i + step < Words) words[i] = before & (4 * step) ? words[i + step] : words[i];
    }
  }
  Pack<T, Length> pack;
#pragma unroll
  for (int i = 0; i < Pack<T, Length>::kWords; ++i) {
    pack.words[i] =
        sizeof(T) == 2 ? shifted_right(words[i], words[i + 1], before & 2 ? 16 : 0) : words[i];
  }
  return pack;
}

// The cells of a row of n elements, from the one in which a thread's first pack begins. Pack i
// begins in cell i. The part of the row's first cell before the row is loaded and not used. Nothing
// behind the row is loaded with its last cell.
template <typename T, int Length>
struct Cells {
  using Cell = Pack<T, Length>;
  const T* start;  // of the first cell
  int before;      // elements of a cell before the pack that begins in it
  int left;        // elements from the first cell's start to the row's end, if there is a row
  int skipped;     // elements of the first cell before the row

  __device__ __forceinline__ Cells(const T* row, int rank, int n) {
    before = bytes_before<T, Length>(row) / static_cast<int>(sizeof(T));
    start = row - before + rank * Length;
    left = n > 0 ? before + n - rank * Length : 0;
    skipped = rank == 0 ? before : 0;
  }

  // Cell i if all of it lies inside the row, or else zeros.
  template <typename Policy = NoPolicy>
  __device__ __forceinline__ Cell load(int i, Policy policy = {}) const {
    Cell cell = {};
    if (left >= (i + 1) * Length) {
      if (kReadsAroundRows || i > 0 || skipped == 0) {
        read_words<kCellBytes<T, Length>>(cell.words, start + i * Length, 0, policy);
      } else {
        load_elements(cell, 0, Length);
      }
    }
    return cell;
  }
  // Whether the row ends in the middle of cell i, and that cell.
  __device__ __forceinline__ bool is_last(int i) const {
    return i * Length < left && left < (i + 1) * Length;
  }
  __device__ __forceinline__ void load_last(Cell& cell) const {
    load_elements(cell, left / Length, left % Length);
  }

  // The pack that begins in `cell` and ends in `next`.
  __device__ __forceinline__ Cell pack(const Cell& cell, const Cell& next) const {
    constexpr int kWords = Cell::kWords;
    unsigned words[2 * kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = cell.words[i], words[kWords + i] = next.words[i];
    return pack_of_cells<T, Length>(words, before * static_cast<int>(sizeof(T)));
  }

 private:
  __device__ __forceinline__ void load_elements(Cell& cell, int i, int count) const {
#pragma unroll
    for (int element = 0; element < Length; ++element) {
      if (element < count && (i > 0 || element >= skipped)) {
        constexpr int kBytes = kAccessBytes<T, 1>;
        read_words<kBytes>(cell.words, start + i * Length, element * kBytes);
      }
    }
  }
};

// Replaces a cell by `other` if `chosen`, word by word. The compiler would turn a choice between
// two cells into one between their places in memory.
template <typename T, int Length>
__device__ __forceinline__ void choose(Pack<T, Length>& cell, bool chosen,
                                       const Pack<T, Length>& other) {
#pragma unroll
  for (int i = 0; i < Pack<T, Length>::kWords; ++i) {
    cell.words[i] = chosen ? other.words[i] : cell.words[i];
  }
}

// The packs of `Lanes` lanes side by side in a row, and the words of memory that they lie in. There
// are as many words as the packs have, and one more if the row is odd, since the first word begins
// with the element before. A lane moves each word so many further on, from one that it finds once.
// Packs further on in the row are at distances that are known when the kernel is compiled.
template <typename T, int Length, int Lanes>
struct Words {
  static constexpr int kOfPack = Pack<T, Length>::kWords;
  static constexpr int kPackBytes = 4 * kOfPack;
  static constexpr int kBytes = Lanes * kPackBytes;  // in shared memory

  int lane;
  bool odd;
  T* rows;
  long long own;  // the bytes from there to this lane's first word

  // For the lanes' packs, the first of which begins at element `packs` of `rows`.
  __device__ __forceinline__ Words(T* rows, long long packs, int lane)
      : lane(lane), odd(sizeof(T) == 2 && is_odd(rows + packs)), rows(rows) {
    own = packs * static_cast<int>(sizeof(T)) - 2 * odd + 4 * lane;
    make_opaque(own);  // else each word finds it again
  }

  // Stores packs `distance` elements further on, by way of `words`. `left` is the number of
  // elements from there to the row's end. whole: it is at least the packs' number of elements. All
  // lanes of the warp take part. They have met since they last used `words`.
  __device__ __forceinline__ void store(const Pack<T, Length>& pack, char* words, int distance,
                                        int left, bool whole) const {
    unsigned shifted[kOfPack];
    unsigned before = 0;
    if constexpr (sizeof(T) == 2) before = from_lane_before(pack.words[kOfPack - 1]);
#pragma unroll
    for (int i = 0; i < kOfPack; ++i) {
      const unsigned low = i > 0 ? pack.words[i - 1] : before;
      shifted[i] = sizeof(T) == 2 ? shifted_left(low, pack.words[i], odd ? 16 : 0) : pack.words[i];
    }
    constexpr int kAccess = kPackBytes < 16 ? kPackBytes : 16;
#pragma unroll
    for (int offset = 0; offset < kPackBytes; offset += kAccess) {
      write_words<kAccess>(shifted, words + lane * kPackBytes, offset);
    }
    warp_barrier();
    char* const first =
        reinterpret_cast<char*>(rows) + own + distance * static_cast<int>(sizeof(T));
    const int bytes_left = left * static_cast<int>(sizeof(T)) + 2 * odd - 4 * lane;
#pragma unroll
    for (int i = 0; i < kOfPack; ++i) {
      constexpr int kStep = 4 * Lanes;
      unsigned word[1] = {};
      read_words<4>(word, words + 4 * lane + kStep * i, 0);
      const bool begins_before = i == 0 && lane == 0 && odd;  // with another pack's element
      const bool all = whole || bytes_left >= kStep * i + 4;
      if (all && begins_before) write_words<2>(word, first, 2);
      if (all && !begins_before) write_words<4>(word, first + kStep * i, 0);
      if constexpr (sizeof(T) == 2) {
        const bool half = !whole && bytes_left == kStep * i + 2;
        if (half && !begins_before) write_words<2>(word, first + kStep * i, 0);
      }
    }
    // The last element is that of a word which ends behind these packs.
    if (odd && lane == Lanes - 1 && (whole || left >= Lanes * Length)) {
      write_words<2>(pack.words, first + 4 * Lanes * kOfPack - 4 * lane - kPackBytes + 2,
                     kPackBytes - 2);
    }
  }
};
