// Rows that wait in shared memory. A thread copies the packs that it will read itself,
// asynchronously and some rows ahead, so it waits only for its own copies (and, by cells, for a
// barrier of its warp). Registers hold one pack at a time, or the part of a row that is needed
// again (HoldRow in backward_pipelined.cu). Or one thread copies all packs of its team in bulk.
#pragma once

#include "unaligned.cuh"

// The places of one operand's packs, for all threads of a block. A place is a piece of up to 16
// bytes. Those of neighbouring threads lie side by side, so that an access of a warp meets every
// bank equally often. CellLanes: rows may be at any address (unaligned.cuh). Each thread copies the
// cells in which its packs begin, and the last of so many lanes, which share a row, copies one more
// (notes.md#rows-in-cells-backward).
template <typename T, int Length, int PacksPerThread, int BlockThreads, int CellLanes = 0>
struct Stage {
  static constexpr bool kCells = CellLanes > 0 && sizeof(T) <= 4;
  static constexpr int kPackBytes = Length * static_cast<int>(sizeof(T));
  static constexpr int kPieceBytes = kPackBytes < 16 ? kPackBytes : 16;
  static constexpr int kPieces = kPackBytes / kPieceBytes;
  static constexpr int kPlaces =
      kCells ? BlockThreads * kPackBytes + BlockThreads / CellLanes * kPieceBytes
             : BlockThreads * kPackBytes;  // one pack of each thread
  // Whole pieces of any operand, since there may be an odd number of 8-byte cells.
  static constexpr int kBytes = (PacksPerThread * kPlaces + 15) / 16 * 16;

  static __device__ __forceinline__ char* place(char* stage, int p, int piece) {
    return stage + ((p * kPieces + piece) * BlockThreads + thread_index()) * kPieceBytes;
  }

  // Asks for pack p of a row, elements first ... first + Length - 1. Those past n are zero.
  // `ThroughL1`: other teams of the multiprocessor ask for the same row, or copies ask for the same
  // sectors of 32 bytes, since each copies a part of a wider pack.
  template <int Vector, bool ThroughL1 = false>
  static __device__ __forceinline__ void fetch(char* stage, int p, const T* row, int first, int n) {
    constexpr int kAccess =
        kAccessBytes<T, Vector> < kPieceBytes ? kAccessBytes<T, Vector> : kPieceBytes;
    // Small accesses are made in turn: side by side they take up to 50 registers more.
    constexpr int kUnrolled = kAccess >= 8 ? kPackBytes / kAccess : 1;
#pragma unroll kUnrolled
    for (int begin = 0; begin < kPackBytes; begin += kAccess) {
      const int element = begin / static_cast<int>(sizeof(T));
      const bool valid = inside<Vector>(first, element, n);
      const char* source = reinterpret_cast<const char*>(row + first) + begin;
      char* target = place(stage, p, begin / kPieceBytes) + begin % kPieceBytes;
      if constexpr (kAccess >= 4) {
        copy_async<kAccess, ThroughL1>(target, source, valid);
      } else {
        *reinterpret_cast<unsigned short*>(target) =
            valid ? *reinterpret_cast<const unsigned short*>(source) : 0;
      }
    }
  }

  static __device__ __forceinline__ char* place_of_cells(char* stage, int p, int lane) {
    constexpr int kOfLanes = CellLanes * kPackBytes + kPieceBytes;
    return stage + p * kPlaces + thread_index() / CellLanes * kOfLanes + lane * kPackBytes;
  }
  // Asks for pack p of a row of n elements by cells, if there is one. A barrier of the warp shows
  // the cells to the lanes. `packs_behind`: so many packs of each thread are known to begin in the
  // row after this one.
  static __device__ __forceinline__ void fetch_cells(char* stage, int p, const T* row, int first,
                                                     int n, int packs_behind) {
    const int lane = thread_index() % CellLanes, before = bytes_before<T, Length>(row);
    const char* const source = reinterpret_cast<const char*>(row + first) - before;
    char* const target = place_of_cells(stage, p, lane);
    // The row's first cell may begin before the row.
    const int left = n > 0 ? (n - first) * static_cast<int>(sizeof(T)) + before : 0;
#pragma unroll
    for (int i = 0; i <= kPieces; ++i) {
      if (i < kPieces || lane == CellLanes - 1) {
        copy_cell_async<kPieceBytes>(target + i * kPieceBytes, source + i * kPieceBytes,
                                     left - i * kPieceBytes, packs_behind > (i == kPieces),
                                     i == 0 && first == 0 ? before : 0);
      }
    }
  }
  // `before`: bytes_before of the row.
  static __device__ __forceinline__ Pack<T, Length> read_cells(char* stage, int p, int before) {
    unsigned words[(kPackBytes + kPieceBytes) / 4] = {};
    const char* const place = place_of_cells(stage, p, thread_index() % CellLanes);
#pragma unroll
    for (int i = 0; i <= kPieces; ++i) {
      read_words<kPieceBytes>(words, place, i * kPieceBytes);
    }
    return pack_of_cells<T, Length>(words, before);
  }
  // It goes to the place of the cell in which it begins. This thread reads it as a pack with
  // nothing before it.
  static __device__ __forceinline__ void write_cells(const Pack<T, Length>& pack, char* stage,
                                                     int p) {
    static_assert(kPackBytes == 16, "of x");
    write_words<16>(pack.words, place_of_cells(stage, p, thread_index() % CellLanes), 0);
  }

  // Whether packs can be asked for with a policy: in pieces of 16 bytes, since the thread's own
  // place counts those. float64 was not measured, as its backward once spilled with a policy.
  template <int Vector>
  static constexpr bool kTakesPolicy =
      kCopiesTakePolicies && Vector == Length && kPieceBytes == 16 && sizeof(T) < 8;

  // The same with a policy, by this thread's place for the first piece of a stage.
  template <bool ThroughL1>
  static __device__ __forceinline__ void fetch(OwnPlace own, int p, const T* row, int first, int n,
                                               CachePolicy policy) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      copy_async<ThroughL1>(own + (p * kPieces + piece) * BlockThreads * kPieceBytes,
                            reinterpret_cast<const char*>(row + first) + piece * kPieceBytes,
                            first < n, policy);
    }
  }

  // Has this thread copy all packs of its team. The team's first thread is `first_thread` of the
  // block, and its first pack is at `source`.
  template <int RowThreads>
  static __device__ __forceinline__ void fetch_bulk(char* stage, int first_thread, const T* source,
                                                    Mailbox* mailbox, CachePolicy policy) {
    static_assert(kPackBytes == 16, "the packs of neighbouring threads are side by side");
    constexpr int kAtOnce = RowThreads == BlockThreads ? PacksPerThread : 1;
#pragma unroll
    for (int p = 0; p < PacksPerThread; p += kAtOnce) {
      copy_bulk(stage + (p * BlockThreads + first_thread) * kPackBytes,
                source + p * RowThreads * Length, kAtOnce * RowThreads * kPackBytes, mailbox,
                policy);
    }
  }

  // Stores pack p to a row of n from its place, in turn for the same reason.
  template <int Vector>
  static __device__ __forceinline__ void store(char* stage, int p, T* row, int first, int n) {
    constexpr int kAccess = kAccessBytes<T, Vector>;
    using Access = typename AccessOf<kAccess>::type;
#pragma unroll 1
    for (int begin = 0; begin < kPackBytes; begin += kAccess) {
      if (inside<Vector>(first, begin / static_cast<int>(sizeof(T)), n)) {
        const char* source = place(stage, p, begin / kPieceBytes) + begin % kPieceBytes;
        *reinterpret_cast<Access*>(reinterpret_cast<char*>(row + first) + begin) =
            *reinterpret_cast<const Access*>(source);
      }
    }
  }

  static __device__ __forceinline__ void write(const Pack<T, Length>& pack, char* stage, int p) {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      write_words<kPieceBytes>(pack.words, place(stage, p, piece) - piece * kPieceBytes,
                               piece * kPieceBytes);
    }
  }

  static __device__ __forceinline__ Pack<T, Length> read(char* stage, int p) {
    Pack<T, Length> pack;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      read_words<kPieceBytes>(pack.words, place(stage, p, piece) - piece * kPieceBytes,
                              piece * kPieceBytes);
    }
    return pack;
  }
  // The same by this thread's place for the first piece of the stage.
  static __device__ __forceinline__ Pack<T, Length> read(OwnPlace own, int p) {
    static_assert(kPieces == 1, "a pack is in one place");
    Pack<T, Length> pack;
    read_words<kPieceBytes>(pack.words, own.pointer() + p * BlockThreads * kPieceBytes, 0);
    return pack;
  }
};
template <int Length, int PacksPerThread, int BlockThreads, int CellLanes>
struct Stage<None, Length, PacksPerThread, BlockThreads, CellLanes> {
  static constexpr int kBytes = 0, kPackBytes = 16;
  static constexpr bool kCells = false;
  template <int Vector>
  static constexpr bool kTakesPolicy = false;
  template <int Vector, bool ThroughL1 = false>
  static __device__ __forceinline__ void fetch(char*, int, const None*, int, int) {}
  static __device__ __forceinline__ Pack<None, Length> read(char*, int) { return {}; }
  static __device__ __forceinline__ Pack<None, Length> read(OwnPlace, int) { return {}; }
};
