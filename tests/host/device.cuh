// The host twin of kernels/device.cuh: the same functions, for kernels that g++ compiles and
// runtime.cpp runs. A GPU's single instructions are done here on bits, or by a C function that
// rounds as the instruction does.
#pragma once

#include <math.h>

#define __device__
#define __global__
#define __host__
#define __grid_constant__
#ifdef COVERAGE
#define __forceinline__ inline  // gcov does not count the line of an inlined call
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define NOT_INLINED __attribute__((noinline))
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Defined in runtime.cpp. A function that suspends a thread lets the others of its block run.
namespace host {
int thread_index();
long long block_index();
long long block_count();
void exchange(void* value, int bytes, int lane_mask);
void from_first_lane(void* value, int bytes);
void from_lane_before(void* value, int bytes);
bool any_in_warp(bool condition);
void warp_barrier();
void barrier(int barrier, int threads);
void arrive_at_barrier(int barrier, int threads);
void block_barrier();
void* dynamic_shared_memory();
void copy_async(void* shared, const void* global, int bytes, bool valid);
void commit_copies();
void wait_for_copies(int groups);
void prefetch(const void* memory);
void loads_are_unused(bool unused);
int block_in_cluster();
void arrive_at_cluster_barrier();
void wait_at_cluster_barrier();
void open_mailbox(void* mailbox);
void expect_bytes(void* mailbox, int bytes);
void send_to_block(void* shared, void* mailbox, int block, const void* value, int bytes);
void wait_for_bytes(void* mailbox, int parity);
void copy_bulk(void* shared, const void* global, int bytes, void* mailbox);
int count_up(int* count);
void raise_to(float* number, float to);
void report_arrival(unsigned* arrived);
void wait_for_arrivals(const unsigned* arrived, unsigned expected);
}  // namespace host

__forceinline__ int thread_index() { return host::thread_index(); }
__forceinline__ long long block_index() { return host::block_index(); }
__forceinline__ long long block_count() { return host::block_count(); }

template <typename T>
__forceinline__ T shuffle_xor(T value, int lane_mask) {
  host::exchange(&value, sizeof(T), lane_mask);
  return value;
}
template <typename T>
__forceinline__ T from_first_lane(T value) {
  host::from_first_lane(&value, sizeof(T));
  return value;
}
template <typename T>
__forceinline__ T from_lane_before(T value) {
  host::from_lane_before(&value, sizeof(T));
  return value;
}
__forceinline__ void warp_barrier() { host::warp_barrier(); }
__forceinline__ bool any_in_warp(bool condition) { return host::any_in_warp(condition); }
__forceinline__ void block_barrier() { host::block_barrier(); }
__forceinline__ void named_barrier(int barrier, int threads) { host::barrier(barrier, threads); }
__forceinline__ void arrive_at_barrier(int barrier, int threads) {
  host::arrive_at_barrier(barrier, threads);
}
__forceinline__ void* dynamic_shared_memory() { return host::dynamic_shared_memory(); }

template <int Bytes, bool ThroughL1 = false>
__forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "as wide as cp.async copies");
  host::copy_async(shared, global, Bytes, valid);
}
template <int Bytes>
__forceinline__ void copy_cell_async(void* shared, const void* global, int bytes, bool all_or_none,
                                     int skipped) {
  if (all_or_none && bytes > 0) bytes = Bytes;
  if (skipped >= bytes) skipped = 0;  // nothing of a row: what is there is read too
  if (bytes <= 0 || (skipped == 0 && bytes >= Bytes)) {
    return host::copy_async(shared, global, Bytes, bytes > 0);
  }
  // Writes zeros by one access. It must be at a multiple of its size, as the GPU's copy must.
  if constexpr (Bytes == 16) *static_cast<uint4*>(shared) = {};
  if constexpr (Bytes == 8) *static_cast<uint2*>(shared) = {};
  char* const target = static_cast<char*>(shared);
  const char* const source = static_cast<const char*>(global);
  for (int word = 0; word < Bytes; word += 4) {
    const int first = skipped > word ? skipped : word, end = bytes < word + 4 ? bytes : word + 4;
    if (first < end) host::copy_async(target + first, source + first, end - first, true);
  }
}
__forceinline__ void commit_copies() { host::commit_copies(); }
template <int Groups>
__forceinline__ void wait_for_copies() {
  static_assert(Groups >= 0, "a number of groups");
  host::wait_for_copies(Groups);
}

__forceinline__ void prefetch(const void* memory) {
#ifdef COVERAGE
  (void)memory;  // it is not known then which part kernels have written
#else
  host::prefetch(memory);
#endif
}
struct CachePolicy {};
constexpr bool kCopiesTakePolicies = true;
struct OwnPlace {
  char* address;

  OwnPlace operator+(int bytes) const { return {address + bytes}; }
  char* pointer() const { return address; }
};
__forceinline__ OwnPlace own_place(char* shared) { return {shared}; }
template <bool ThroughL1>
__forceinline__ void copy_async(OwnPlace place, const void* global, bool valid, CachePolicy) {
  host::copy_async(place.address, global, 16, valid);
}
__forceinline__ CachePolicy evict_first() { return {}; }
__forceinline__ CachePolicy evict_last() { return {}; }
__forceinline__ bool is_large(long long) { return false; }
__forceinline__ CachePolicy evict_last_if_large(long long) { return {}; }
__forceinline__ uint4 load_with_policy(const uint4* memory, CachePolicy) { return *memory; }
__forceinline__ uint2 load_with_policy(const uint2* memory, CachePolicy) { return *memory; }
constexpr bool kReadsAroundRows = false;
__forceinline__ void store_past_l1(uint4* memory, uint4 value) { *memory = value; }

__forceinline__ int block_in_cluster() { return host::block_in_cluster(); }
// Here all earlier writes are seen after the wait. On a GPU only open mailboxes are.
__forceinline__ void arrive_at_cluster_barrier() { host::arrive_at_cluster_barrier(); }
__forceinline__ void wait_at_cluster_barrier() { host::wait_at_cluster_barrier(); }

__forceinline__ int count_up(int* count) { return host::count_up(count); }
__forceinline__ void raise_to(float* number, float to) { host::raise_to(number, to); }
__forceinline__ void report_arrival(unsigned* arrived) { host::report_arrival(arrived); }
__forceinline__ void wait_for_arrivals(const unsigned* arrived, unsigned expected) {
  host::wait_for_arrivals(arrived, expected);
}

using Mailbox = unsigned long long;
__forceinline__ void open_mailbox(Mailbox* mailbox) { host::open_mailbox(mailbox); }
__forceinline__ void expect_bytes(Mailbox* mailbox, int bytes) {
  host::expect_bytes(mailbox, bytes);
}
template <int Count, typename T>
constexpr int kSentBytes = (Count == 3 ? 4 : Count) * static_cast<int>(sizeof(T));
template <int Count, typename T>
__forceinline__ void send_to_block(T* shared, Mailbox* mailbox, int block,
                                   const T (&values)[Count]) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "as wide as st.async stores");
  constexpr int kSent = kSentBytes<Count, T> / sizeof(T), kMessage = sizeof(T) == 4 ? kSent : 1;
  T sent[kSent] = {};
  for (int i = 0; i < Count; ++i) sent[i] = values[i];
  for (int i = 0; i < kSent; i += kMessage) {
    host::send_to_block(shared + i, mailbox, block, sent + i, kMessage * sizeof(T));
  }
}
template <bool FromOtherBlocks>
__forceinline__ void wait_for_bytes(Mailbox* mailbox, int parity) {
  host::wait_for_bytes(mailbox, parity);
}
__forceinline__ void copy_bulk(void* shared, const void* global, int bytes, Mailbox* mailbox,
                               CachePolicy) {
  host::copy_bulk(shared, global, bytes, mailbox);
}
__forceinline__ void show_mailboxes() {}

// Kernels run one after another.
__forceinline__ void wait_for_previous_kernel() {}
__forceinline__ void let_next_kernel_start() {}

__forceinline__ void loads_are_unused(bool unused) { host::loads_are_unused(unused); }

__forceinline__ void make_opaque(unsigned& word) { asm volatile("" : "+r"(word)); }
__forceinline__ void make_opaque(int& word) { asm volatile("" : "+r"(word)); }
__forceinline__ void make_opaque(long long& word) { asm volatile("" : "+r"(word)); }

__forceinline__ unsigned shifted_right(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> bits);
}
__forceinline__ unsigned shifted_left(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (32 - bits));
}

template <typename To, typename From>
__forceinline__ To same_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept, not converted");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}
__forceinline__ unsigned float_bits(float value) { return same_bits<unsigned>(value); }
__forceinline__ float float_from_bits(unsigned bits) { return same_bits<float>(bits); }
__forceinline__ unsigned long long double_bits(double value) {
  return same_bits<unsigned long long>(value);
}
__forceinline__ double double_from_bits(unsigned long long bits) { return same_bits<double>(bits); }

// Rounds a finite or infinite float64 to a 16-bit format, to nearest even. NaN becomes 0x7fff, as
// on a GPU.
template <int FractionBits>
inline unsigned short rounded(double value) {
  constexpr int kBias = (1 << (14 - FractionBits)) - 1;
  constexpr unsigned kInfinity = ((1u << (15 - FractionBits)) - 1) << FractionBits;
  const unsigned long long bits = double_bits(value), magnitude = bits & ~(1ull << 63);
  if (magnitude > 0x7ffull << 52) return 0x7fff;
  const unsigned sign = static_cast<unsigned>(bits >> 48) & 0x8000u;
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  if (exponent > kBias) return static_cast<unsigned short>(sign | kInfinity);
  const int subnormal = exponent < 1 - kBias ? 1 - kBias - exponent : 0;
  const int dropped = 52 - FractionBits + subnormal;
  if (dropped > 54) return static_cast<unsigned short>(sign);  // below half the least number
  const unsigned long long significand = (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
  const unsigned long long odd = significand >> dropped & 1;
  const unsigned long long kept = (significand + (1ull << (dropped - 1)) - 1 + odd) >> dropped;
  // The leading one of the significand carries into the exponent. So does rounding it up.
  const int below = subnormal ? 0 : exponent + kBias - 1;
  return static_cast<unsigned short>(
      sign | ((static_cast<unsigned>(below) << FractionBits) + static_cast<unsigned>(kept)));
}
__forceinline__ float float16_bits_to_float(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u,
                 fraction = bits & 0x3ffu;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return float_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
__forceinline__ unsigned short float_to_float16_bits(float value) { return rounded<10>(value); }
__forceinline__ unsigned short double_to_float16_bits(double value) { return rounded<10>(value); }
__forceinline__ unsigned short float_to_bfloat16_bits(float value) {
  // In integers. As a float64, a subnormal float32 would count as zero here, but not on a GPU.
  const unsigned word = float_bits(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}
__forceinline__ unsigned short double_to_bfloat16_bits(double value) { return rounded<7>(value); }
__forceinline__ unsigned floats_to_float16_bits(float first, float second) {
  return float_to_float16_bits(first) | static_cast<unsigned>(float_to_float16_bits(second)) << 16;
}
__forceinline__ unsigned floats_to_bfloat16_bits(float first, float second) {
  return float_to_bfloat16_bits(first) | static_cast<unsigned>(float_to_bfloat16_bits(second))
                                             << 16;
}

constexpr bool kConvertsToFloat8 = false;
__forceinline__ unsigned floats_to_e4m3_bits(float, float) { return 0; }
__forceinline__ unsigned floats_to_e5m2_bits(float, float) { return 0; }
__forceinline__ unsigned float_to_int8_bits(float value) {
  if (value != value) return 0;
  const float whole = __builtin_rintf(value);
  return static_cast<unsigned>(static_cast<int>(whole < -128  ? -128
                                                : whole > 127 ? 127
                                                              : whole)) &
         0xffu;
}

__forceinline__ float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
__forceinline__ double fused_multiply_add(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
template <typename T>
__forceinline__ T add_with_subnormals(T a, T b) {
  return a + b;
}
__forceinline__ float at_most(float value, float upper) { return value > upper ? upper : value; }
template <typename T>
__forceinline__ T between(T value, T lower, T upper) {
  return value < lower ? lower : value > upper ? upper : value;
}
template <typename T>
__forceinline__ void set_if_strictly_between(unsigned& bits, unsigned bit, T value, T lower,
                                             T upper) {
  if (lower < value && value < upper) bits |= bit;
}
__forceinline__ unsigned spread_tops(unsigned tops, int low, int high) {
  const auto half = [&](int byte) { return tops >> (8 * byte + 7) & 1 ? 0xffffu : 0u; };
  return half(low) | half(high) << 16;
}
constexpr bool kComparesPairs = false;
__forceinline__ unsigned larger_bfloat16_pair(unsigned, unsigned) { return 0; }
__forceinline__ unsigned larger_float16_pair(unsigned, unsigned) { return 0; }
__forceinline__ float larger_number(float a, float b) { return __builtin_fmaxf(a, b); }
__forceinline__ float absolute(float value) { return __builtin_fabsf(value); }
__forceinline__ double absolute(double value) { return __builtin_fabs(value); }
template <typename T>
__forceinline__ T reciprocal_within_an_ulp(T value) {
  return T(1) / value;
}
__forceinline__ float reciprocal_in_range(float value) { return 1.0f / value; }
__forceinline__ float square_root(float value) { return __builtin_sqrtf(value); }
__forceinline__ double square_root(double value) { return __builtin_sqrt(value); }
// The first of two roundings is too fine to change the second.
__forceinline__ float reciprocal_square_root(float value) {
  return static_cast<float>(1.0L / __builtin_sqrtl(value));
}
__forceinline__ double reciprocal_square_root(double value) { return 1.0 / __builtin_sqrt(value); }
