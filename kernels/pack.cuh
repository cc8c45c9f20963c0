// A pack is the piece of a row that one thread holds: `Length` consecutive elements, 16 bytes of x, or 8
// (forward_in_registers.cu).
//
// Alignment never decides which elements form a pack, so the bits of a reduction do not depend on it. Alignment
// decides `Vector`, the elements moved by one access. It is a power of two that divides Length, the row's length,
// every row stride and every pointer. So an access lies inside the row or outside it, never across its end. If
// Vector is 1, whole packs of 16-bit elements still move by pairs, in kernels that do not move them as
// unaligned.cuh says (notes.md#packs-by-pairs).
#pragma once

#include "types.cuh"

template <int Bytes>
struct AccessOf;
template <>
struct AccessOf<2> {
  using type = unsigned short;
};
template <>
struct AccessOf<4> {
  using type = unsigned;
};
template <>
struct AccessOf<8> {
  using type = uint2;
};
template <>
struct AccessOf<16> {
  using type = uint4;
};

template <typename T, int Length>
struct Pack {
  // Elements are kept as they are stored, so a 16-bit type takes half the registers of float32.
  static constexpr int kWords = Length * static_cast<int>(sizeof(T)) / 4;
  unsigned words[kWords];

  template <typename To>
  __device__ __forceinline__ To get(int i) const {
    if constexpr (sizeof(T) == 2) {
      return convert<To>(T{static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)))});
    } else if constexpr (sizeof(T) == 4) {
      return convert<To>(float_from_bits(words[i]));
    } else {
      return convert<To>(
          double_from_bits(static_cast<unsigned long long>(words[2 * i + 1]) << 32 | words[2 * i]));
    }
  }

  template <typename From>
  __device__ __forceinline__ void set(const From (&values)[Length]) {
    if constexpr (kSame<From, float> && (kSame<T, float16> || kSame<T, bfloat16>)) {
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const float first = values[2 * word], second = values[2 * word + 1];
        words[word] = kSame<T, float16> ? floats_to_float16_bits(first, second)
                                        : floats_to_bfloat16_bits(first, second);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Length; ++i) set(i, values[i]);
    }
  }

  // Sets all elements to one.
  __device__ __forceinline__ void fill(T element) {
    if constexpr (sizeof(T) == 2) {
      for (unsigned& word : words) word = element.bits * 0x10001u;
    } else {
#pragma unroll
      for (int i = 0; i < Length; ++i) set(i, element);
    }
  }

  template <typename From>
  __device__ __forceinline__ void set(int i, From value) {
    const T element = convert<T>(value);
    if constexpr (sizeof(T) == 2) {
      const unsigned shift = 16 * (i % 2);
      words[i / 2] = (words[i / 2] & (0xffff0000u >> shift)) | static_cast<unsigned>(element.bits)
                                                                   << shift;
    } else if constexpr (sizeof(T) == 4) {
      words[i] = float_bits(element);
    } else {
      words[2 * i] = static_cast<unsigned>(double_bits(element));
      words[2 * i + 1] = static_cast<unsigned>(double_bits(element) >> 32);
    }
  }
};

template <int Length>
struct Pack<None, Length> {};

// Put this between two uses of packs that stay in registers. Without it the compiler converts a row
// once and keeps the converted values as well (notes.md#packs-that-stay-in-registers).
template <typename T, int Length, int Count>
__device__ __forceinline__ void forget_conversions(Pack<T, Length> (&packs)[Count]) {
#pragma unroll
  for (int p = 0; p < Count; ++p) {
#pragma unroll
    for (int word = 0; word < Pack<T, Length>::kWords; ++word) make_opaque(packs[p].words[word]);
  }
}

// Says how a load leaves its lines to the L2.
struct NoPolicy {};
template <typename Access>
__device__ __forceinline__ Access read_access(const Access* memory, NoPolicy) {
  return *memory;
}
template <typename Access>
__device__ __forceinline__ Access read_access(const Access* memory, CachePolicy policy) {
  if constexpr (sizeof(Access) >= 8) {
    return load_with_policy(memory, policy);
  } else {
    return *memory;
  }
}

// Moves `Bytes` bytes between memory and the words of a pack, at byte `offset` of both.
template <int Bytes, typename Policy = NoPolicy>
__device__ __forceinline__ void read_words(unsigned* words, const void* memory, int offset,
                                           Policy policy = {}) {
  using Access = typename AccessOf<Bytes>::type;
  const Access loaded = read_access(
      reinterpret_cast<const Access*>(static_cast<const char*>(memory) + offset), policy);
  unsigned* target = words + offset / 4;
  if constexpr (Bytes == 2) {
    *target |= static_cast<unsigned>(loaded) << (8 * (offset % 4));
  } else if constexpr (Bytes == 4) {
    *target = loaded;
  } else if constexpr (Bytes == 8) {
    target[0] = loaded.x, target[1] = loaded.y;
  } else {
    target[0] = loaded.x, target[1] = loaded.y, target[2] = loaded.z, target[3] = loaded.w;
  }
}
template <int Bytes, bool PastL1 = false>
__device__ __forceinline__ void write_words(const unsigned* words, void* memory, int offset) {
  using Access = typename AccessOf<Bytes>::type;
  Access* stored = reinterpret_cast<Access*>(static_cast<char*>(memory) + offset);
  const unsigned* source = words + offset / 4;
  if constexpr (Bytes == 2) {
    *stored = static_cast<unsigned short>(*source >> (8 * (offset % 4)));
  } else if constexpr (Bytes == 4) {
    *stored = *source;
  } else if constexpr (Bytes == 8) {
    *stored = uint2{source[0], source[1]};
  } else {
    const uint4 value{source[0], source[1], source[2], source[3]};
    if constexpr (PastL1) {
      store_past_l1(stored, value);
    } else {
      *stored = value;
    }
  }
}

template <typename T, int Vector>
constexpr int kAccessBytes =
    Vector * static_cast<int>(sizeof(T)) < 16 ? Vector * static_cast<int>(sizeof(T)) : 16;

template <int Vector, typename T>
constexpr bool kByPairs = Vector == 1 && sizeof(T) == 2;

__device__ __forceinline__ bool is_odd(const void* memory) {
  return (reinterpret_cast<unsigned long long>(memory) & 2) != 0;
}

// A pack from the pairs that it lies in. An odd pack begins with the second element of the first
// pair.
template <typename T, int Length>
__device__ __forceinline__ void set_from_pairs(Pack<T, Length>& pack,
                                               const unsigned (&pairs)[Pack<T, Length>::kWords + 1],
                                               bool odd) {
#pragma unroll
  for (int i = 0; i < Pack<T, Length>::kWords; ++i) {
    pack.words[i] = shifted_right(pairs[i], pairs[i + 1], odd ? 16 : 0);
  }
}

// At an odd address, no multiple of 4, all but a pack's first and last element are pairs. Both
// functions do nothing unless `whole`; the pack of a load is zero then. There is no branch, so that
// the loads of several packs are in flight at once.
template <typename T, int Length>
__device__ __forceinline__ void load_pairs(Pack<T, Length>& pack, const T* memory, bool whole) {
  constexpr int kWords = Pack<T, Length>::kWords;
  const bool odd = is_odd(memory);
  const T* const even = memory - odd;  // of the pair that the pack begins in
  unsigned pairs[kWords + 1] = {};
  if (whole && odd) read_words<2>(pairs, memory - 1, 2);
  if (whole && !odd) read_words<4>(pairs, even, 0);
#pragma unroll
  for (int i = 1; i < kWords; ++i) {
    if (whole) read_words<4>(pairs, even, 4 * i);
  }
  if (whole && odd) read_words<2>(pairs, even, 4 * kWords);
  set_from_pairs(pack, pairs, odd);
}
template <typename T, int Length>
__device__ __forceinline__ void store_pairs(const Pack<T, Length>& pack, T* memory, bool whole) {
  constexpr int kWords = Pack<T, Length>::kWords;
  const bool odd = is_odd(memory);
  T* const even = memory - odd;
  if (whole && odd) write_words<2>(pack.words, memory, 0);
  if (whole && !odd) write_words<4>(pack.words, memory, 0);
  unsigned pairs[kWords];
#pragma unroll
  for (int i = 1; i < kWords; ++i) {
    pairs[i] = shifted_left(pack.words[i - 1], pack.words[i], odd ? 16 : 0);
    if (whole) write_words<4>(pairs, even, 4 * i);
  }
  if (whole && odd) write_words<2>(pack.words, memory, 4 * kWords - 2);
}

// Loads elements first ... first + Length - 1 of a row of n; those past its end are zero. Index is
// int for a row that fits in registers, since addresses then take fewer of them. MayPair is false
// where rows are read twice (notes.md#packs-by-pairs).
template <int Vector, bool MayPair = true, typename T, int Length, typename Index,
          typename Policy = NoPolicy>
__device__ __forceinline__ void load(Pack<T, Length>& pack, const T* row, Index first, Index n,
                                     Policy policy = {}) {
  constexpr int kBytes = kAccessBytes<T, Vector>;
#pragma unroll
  for (int word = 0; word < Pack<T, Length>::kWords; ++word) pack.words[word] = 0;
  const bool in_pairs = MayPair && kByPairs<Vector, T> && first + Length <= n;
  if constexpr (MayPair && kByPairs<Vector, T>) load_pairs(pack, row + first, in_pairs);
#pragma unroll
  for (int begin = 0; begin < Length; begin += Vector) {
    if (first + begin < n && !in_pairs) {
#pragma unroll
      for (int offset = 0; offset < Vector * static_cast<int>(sizeof(T)); offset += kBytes) {
        read_words<kBytes>(pack.words, row + first, begin * static_cast<int>(sizeof(T)) + offset,
                           policy);
      }
    }
  }
}

template <int Vector, bool PastL1 = false, bool MayPair = true, typename T, int Length,
          typename Index>
__device__ __forceinline__ void store(const Pack<T, Length>& pack, T* row, Index first, Index n) {
  constexpr int kBytes = kAccessBytes<T, Vector>;
  const bool in_pairs = MayPair && kByPairs<Vector, T> && first + Length <= n;
  if constexpr (MayPair && kByPairs<Vector, T>) store_pairs(pack, row + first, in_pairs);
#pragma unroll
  for (int begin = 0; begin < Length; begin += Vector) {
    if (first + begin < n && !in_pairs) {
#pragma unroll
      for (int offset = 0; offset < Vector * static_cast<int>(sizeof(T)); offset += kBytes) {
        write_words<kBytes, PastL1>(pack.words, row + first,
                                    begin * static_cast<int>(sizeof(T)) + offset);
      }
    }
  }
}

// The same for a row of RowThreads threads. If these are several warps, all of them must be there,
// since all lanes must take part. Packs of 32 bytes are stored by halves. Neighbouring lanes
// exchange one half, so that together they store a sector, if the row begins at one. `first` and n
// may count from the lane's own first pack (notes.md#stores-by-sectors).
template <int Vector, int RowThreads, typename T, int Length, typename Index>
__device__ __forceinline__ void store_by_sectors(const Pack<T, Length>& pack, T* row, Index first,
                                                 Index n) {
  constexpr int kHalf = Length / 2;
  if constexpr (RowThreads > 32 && kHalf * sizeof(T) == 16 && kAccessBytes<T, Vector> == 16) {
    const bool odd = thread_index() % 2 == 1;
    // The parts of the even and the odd lane's pack that this lane stores.
    unsigned of_first[4];
    unsigned of_second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = pack.words[i], high = pack.words[4 + i];
      const unsigned received = shuffle_xor(odd ? low : high, 1);
      of_first[i] = odd ? received : low;
      of_second[i] = odd ? high : received;
    }
    const Index element = odd ? first - kHalf : first;
    if (element < n) write_words<16>(of_first, row + element, 0);
    if (element + Length < n) write_words<16>(of_second, row + element + Length, 0);
  } else {
    store<Vector>(pack, row, first, n);
  }
}

template <int Vector, bool MayPair = true, int Length, typename Index>
__device__ __forceinline__ void load(Pack<None, Length>&, const None*, Index, Index) {}

// The same for weight or bias. As a rule their packs are at multiples of their length, or of 16
// bytes, even if those of rows are not (notes.md#weight-by-whole-packs).
template <int Vector, typename T, int Length, typename Index>
__device__ __forceinline__ void load_operand(Pack<T, Length>& pack, const T* row, Index first,
                                             Index n) {
  constexpr int kBytes = kAccessBytes<T, Vector>, kAll = Length * static_cast<int>(sizeof(T));
  constexpr int kPiece = kAll < 16 ? kAll : 16;
  if constexpr (kBytes == kPiece) {
    load<Vector>(pack, row, first, n);
  } else {
    const bool aligned = (reinterpret_cast<unsigned long long>(row) & (kPiece - 1)) == 0;
    const bool in_words = aligned && first + Length <= n;
#pragma unroll
    for (int word = 0; word < Pack<T, Length>::kWords; ++word) pack.words[word] = 0;
#pragma unroll
    for (int offset = 0; offset < kAll; offset += kPiece) {
      if (in_words) read_words<kPiece>(pack.words, row + first, offset);
    }
    if (!in_words) {
#pragma unroll
      for (int offset = 0; offset < kAll; offset += kBytes) {
        if (first + offset / static_cast<int>(sizeof(T)) < n) {
          read_words<kBytes>(pack.words, row + first, offset);
        }
      }
    }
  }
}
template <int Vector, int Length, typename Index>
__device__ __forceinline__ void load_operand(Pack<None, Length>&, const None*, Index, Index) {}

// Whether element i of the pack at `first` lies inside a row of n. Vector divides n, so one
// comparison serves the elements of an access.
template <int Vector, typename Index>
__device__ __forceinline__ bool inside(Index first, int i, Index n) {
  return first + i / Vector * Vector < n;
}
