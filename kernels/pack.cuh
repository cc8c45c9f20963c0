// A pack is the piece of a row that one thread holds: `Length` consecutive elements, 16 bytes of x.
//
// Which elements form a pack never depends on alignment, so neither do the bits of a reduction. What
// alignment decides is `Vector`, the elements moved by one access: a power of two that divides
// Length, the row's length, every row stride and every pointer. So an access lies inside the row or
// outside it, never across its end.
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
  // Elements are kept as they are stored: half the registers of float32 for a 16-bit type.
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

// Between two uses of packs that stay in registers. Without it the compiler converts a row once and
// keeps the converted values as well: 90 registers instead of 56 for 4 packs of bfloat16 on sm_90,
// and spills at 8.
template <typename T, int Length, int Count>
__device__ __forceinline__ void forget_conversions(Pack<T, Length> (&packs)[Count]) {
#pragma unroll
  for (int p = 0; p < Count; ++p) {
#pragma unroll
    for (int word = 0; word < Pack<T, Length>::kWords; ++word) make_opaque(packs[p].words[word]);
  }
}

// Where a load leaves its lines to the L2.
struct NoPolicy {};
template <typename Access>
__device__ __forceinline__ Access read_access(const Access* memory, NoPolicy) {
  return *memory;
}
template <typename Access>
__device__ __forceinline__ Access read_access(const Access* memory, CachePolicy policy) {
  if constexpr (sizeof(Access) == 16) {
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

// Elements first ... first + Length - 1 of a row of n; those past its end are zero.
// Index is int where a row fits in registers: fewer of them go into addresses.
template <int Vector, typename T, int Length, typename Index, typename Policy = NoPolicy>
__device__ __forceinline__ void load(Pack<T, Length>& pack, const T* row, Index first, Index n,
                                     Policy policy = {}) {
  constexpr int kBytes = kAccessBytes<T, Vector>;
#pragma unroll
  for (int word = 0; word < Pack<T, Length>::kWords; ++word) pack.words[word] = 0;
#pragma unroll
  for (int begin = 0; begin < Length; begin += Vector) {
    if (first + begin < n) {
#pragma unroll
      for (int offset = 0; offset < Vector * static_cast<int>(sizeof(T)); offset += kBytes) {
        read_words<kBytes>(pack.words, row + first, begin * static_cast<int>(sizeof(T)) + offset,
                           policy);
      }
    }
  }
}

template <int Vector, bool PastL1 = false, typename T, int Length, typename Index>
__device__ __forceinline__ void store(const Pack<T, Length>& pack, T* row, Index first, Index n) {
  constexpr int kBytes = kAccessBytes<T, Vector>;
#pragma unroll
  for (int begin = 0; begin < Length; begin += Vector) {
    if (first + begin < n) {
#pragma unroll
      for (int offset = 0; offset < Vector * static_cast<int>(sizeof(T)); offset += kBytes) {
        write_words<kBytes, PastL1>(pack.words, row + first,
                                    begin * static_cast<int>(sizeof(T)) + offset);
      }
    }
  }
}

template <int Vector, int Length, typename Index>
__device__ __forceinline__ void load(Pack<None, Length>&, const None*, Index, Index) {}

// Whether element i of the pack that begins at `first` lies inside a row of n. Vector divides n, so
// one comparison serves the elements of an access.
template <int Vector, typename Index>
__device__ __forceinline__ bool inside(Index first, int i, Index n) {
  return first + i / Vector * Vector < n;
}
