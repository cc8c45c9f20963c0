// Device primitives. Everything that only a GPU provides sits behind the functions of this file. So
// the kernels above it are plain C++, and a host build can replace this file.
#pragma once

#define NOT_INLINED __noinline__

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ long long block_index() { return blockIdx.x; }
__device__ __forceinline__ long long block_count() { return gridDim.x; }

// All 32 lanes of the warp must take part in these five.
template <typename T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
template <typename T>
__device__ __forceinline__ T from_first_lane(T value) {
  return __shfl_sync(0xffffffffu, value, 0);
}
// The value of the lane before; the first lane gets its own.
template <typename T>
__device__ __forceinline__ T from_lane_before(T value) {
  return __shfl_up_sync(0xffffffffu, value, 1);
}
__device__ __forceinline__ bool any_in_warp(bool condition) {
  return __any_sync(0xffffffffu, condition) != 0;
}
// The other lanes see what a lane wrote before.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// Waits for every thread of the block.
__device__ __forceinline__ void block_barrier() { __syncthreads(); }
// Waits for `threads` (a multiple of 32) threads of the block that name the same barrier; 0 is the
// block's.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counts as one of them and does not wait. Those that wait see what it did before.
__device__ __forceinline__ void arrive_at_barrier(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void* dynamic_shared_memory() {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  return shared_memory;
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies `Bytes` as those below do (sm_80 on). The first `read` are read and the others are zero.
template <int Bytes, bool ThroughL1>
__device__ __forceinline__ void copy_first_async(void* shared, const void* global, int read) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = shared_address(shared);
  if constexpr (Bytes == 16 && !ThroughL1) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                 "n"(Bytes), "r"(read)
                 : "memory");
  }
#endif
}
// Asynchronous copies into shared memory (sm_80 on). Older architectures copy at once. `Bytes` is
// 4, 8 or 16. If `valid` is false, zeros are written and nothing is read. A thread sees its copies
// after its own wait. Others see them after a barrier. 16 bytes bypass the L1 unless `ThroughL1`.
template <int Bytes, bool ThroughL1>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  copy_first_async<Bytes, ThroughL1>(shared, global, valid ? Bytes : 0);
#else
#pragma unroll
  for (int offset = 0; offset < Bytes; offset += 4) {
    *reinterpret_cast<unsigned*>(static_cast<char*>(shared) + offset) =
        valid ? *reinterpret_cast<const unsigned*>(static_cast<const char*>(global) + offset) : 0;
  }
#endif
}
// Copies `Bytes` at a multiple of as many (sm_80 on). The first `bytes` count, an even number; more
// than `Bytes` means all. The others are zero. The first `skipped` may be anything: they may lie
// before all rows, but in the same 16 bytes as an element that is read.
template <int Bytes>
__device__ __forceinline__ void copy_cell_async(void* shared, const void* global, int bytes,
                                                bool all_or_none, [[maybe_unused]] int skipped) {
  if (all_or_none) {  // an unknown size takes eight instructions more
    copy_async<Bytes, false>(shared, global, bytes > 0);
  } else {
    const int read = bytes < 0 ? 0 : bytes < Bytes ? bytes : Bytes;
    copy_first_async<Bytes, false>(shared, global, read);
  }
}
// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `Groups` of the groups that this thread closed last are in flight.
template <int Groups>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
#endif
}

// Clusters of blocks (sm_90 on).
__device__ __forceinline__ int block_in_cluster() {
#if __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
// A barrier of every thread of the cluster, in two halves. The first half is relaxed. After the
// second, mailboxes that were opened before the first are seen to be open, and nothing else is.
__device__ __forceinline__ void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A barrier between the blocks of a grid that all run at once (a cooperative launch). A warp, with
// all its lanes, counts itself as arrived. Every thread that has waited for the count sees what
// they wrote (a release and an acquire of the GPU's scope). The count is 0 before the launch.
__device__ __forceinline__ void report_arrival(unsigned* arrived) {
  __syncwarp();
  if (thread_index() % 32 == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
  }
}
__device__ __forceinline__ void wait_for_arrivals(const unsigned* arrived, unsigned expected) {
  unsigned found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(arrived) : "memory");
  } while (found < expected);
}

// Counts up by one, together with all blocks, and returns the count before. Only the use of the
// result waits for it. ptxas turns an atomic addition into one for the whole warp, whose shuffle
// waits at once, so this is an increment with a bound that is never reached
// (notes.md#who-asks-the-count).
__device__ __forceinline__ int count_up(int* count) {
  int before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(count)
               : "memory");
  return before;
}

// Raises a number to another one, as all blocks do. Neither is negative, so that their bits are in
// their order. Most read that theirs is not larger, and the L2 need not order them all at one
// address. The read is not ordered with the others' writes: it finds some number of before, as a
// word never tears, and an old one only costs a further operation.
__device__ __forceinline__ void raise_to(float* number, float to) {
  float found;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(found) : "l"(number) : "memory");
  if (to > found) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(number), "r"(__float_as_uint(to))
                 : "memory");
  }
}

// A mailbox counts the bytes that the blocks of a cluster send to its block, or that copy_bulk
// brings. A barrier that says when all have come would also wait for each block's stores to device
// memory.
using Mailbox = unsigned long long;
// By one thread, before a barrier of all who use it.
__device__ __forceinline__ void open_mailbox(Mailbox* mailbox) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mailbox)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// By one thread, each time.
__device__ __forceinline__ void expect_bytes(Mailbox* mailbox, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mailbox)),
      "r"(bytes)
      : "memory");
#endif
}
// The address in `block` of the cluster that corresponds to `shared` in this one.
__device__ __forceinline__ unsigned address_in_block(const void* shared, int block) {
  unsigned address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(shared)), "r"(block));
#endif
  return address;
}
// Stores values at `block`'s `shared`, and counts them in that block's `mailbox`: kSentBytes, in
// one message if float32 allows.
template <int Count, typename T>
constexpr int kSentBytes = (Count == 3 ? 4 : Count) * static_cast<int>(sizeof(T));
template <int Count, typename T>
__device__ __forceinline__ void send_to_block(T* shared, Mailbox* mailbox, int block,
                                              const T (&values)[Count]) {
#if __CUDA_ARCH__ >= 900
  const unsigned address = address_in_block(shared, block);
  const unsigned counter = address_in_block(mailbox, block);
  if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (int i = 0; i < kSentBytes<Count, T> / 8; ++i) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
              address + 8 * i),
          "d"(i < Count ? values[i] : T(0)), "r"(counter)
          : "memory");
    }
  } else if constexpr (Count == 1) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
        "f"(values[0]), "r"(counter)
        : "memory");
  } else if constexpr (Count == 2) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            address),
        "f"(values[0]), "f"(values[1]), "r"(counter)
        : "memory");
  } else {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(Count > 3 ? values[Count - 1] : T(0)),
        "r"(counter)
        : "memory");
  }
#endif
}
// Waits until the expected bytes have come, for the time whose number has this lowest bit. An
// acquire of the cluster shows those that other blocks sent. It makes the warp give up what the L1
// holds.
template <bool FromOtherBlocks>
__device__ __forceinline__ void wait_for_bytes(Mailbox* mailbox, int parity) {
#if __CUDA_ARCH__ >= 900
  if constexpr (FromOtherBlocks) {
    asm volatile(
        "{\n"
        ".reg .pred come;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 come, [%0], %1;\n"
        "@!come bra again;\n"
        "}" ::"r"(shared_address(mailbox)),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred come;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 come, [%0], %1;\n"
        "@!come bra again;\n"
        "}" ::"r"(shared_address(mailbox)),
        "r"(parity)
        : "memory");
  }
#endif
}

// A kernel that overlaps with the one before it (programmatic dependent launch, sm_90 on) waits
// here until that one has ended and its memory can be read. The one before says how early the
// blocks of the next may take free places.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// How soon the L2 gives up the lines that a load brings. Policies are used from sm_90 on, and were
// measured only there (H200, an L2 of 60 MiB).
struct CachePolicy {
  unsigned long long bits;
};
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy{};
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}
__device__ __forceinline__ CachePolicy evict_last() {
  CachePolicy policy{};
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy.bits));
#endif
  return policy;
}
// evict_last for a kernel that reads so many bytes of rows, else no policy. For large rows the L2
// is told to keep these lines before others, though the kernel reads none again: so it gives up
// what the kernel writes (notes.md#evict_last-for-large-rows). selp selects it, since NVRTC makes a
// branch of a conditional expression, and loads then wait behind the branch.
constexpr long long kLargeBytes = 32 << 20;
__device__ __forceinline__ bool is_large(long long bytes) { return bytes >= kLargeBytes; }
__device__ __forceinline__ CachePolicy evict_last_if_large(long long bytes) {
  CachePolicy policy{};
#if __CUDA_ARCH__ >= 900
  asm("{\n"
      ".reg .pred last;\n"
      ".reg .b64 normal;\n"
      "setp.ne.s32 last, %1, 0;\n"
      "createpolicy.fractional.L2::evict_normal.b64 normal, 1.0;\n"
      "createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n"
      "selp.b64 %0, %0, normal, last;\n"
      "}"
      : "=l"(policy.bits)
      : "r"(static_cast<int>(is_large(bytes))));
#endif
  return policy;
}
// Whether asynchronous copies can be asked for with a policy.
#if __CUDA_ARCH__ >= 900
constexpr bool kCopiesTakePolicies = true;
#else
constexpr bool kCopiesTakePolicies = false;
#endif
// A thread's own place in shared memory.
struct OwnPlace {
  unsigned address;

  __device__ __forceinline__ OwnPlace operator+(int bytes) const { return {address + bytes}; }
  __device__ __forceinline__ char* pointer() const {
    return static_cast<char*>(__cvta_shared_to_generic(address));
  }
};
// Has one thread copy `bytes`, a multiple of 16, from and to multiples of 16. The block's `mailbox`
// counts them. If the copy overwrites what threads have read, a barrier must lie in between.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, int bytes,
                                          Mailbox* mailbox, CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(mailbox)), "l"(policy.bits)
      : "memory");
#endif
}
// Makes such copies see the mailboxes that this thread has opened.
__device__ __forceinline__ void show_mailboxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// All 32 lanes of the warp must take part.
__device__ __forceinline__ OwnPlace own_place(const void* shared) {
  return {shuffle_xor(shared_address(shared), 0)};
}
// An asynchronous copy of 16 bytes with a policy, if kCopiesTakePolicies. The place in shared
// memory is given as the thread's own, after an exchange that leaves it as it is. If NVRTC (12.9,
// 13.2) sees that a part of it belongs to the block, it makes LDGSTS [R109+UR0], desc[UR1]. That
// instruction is illegal: its place and its policy overlap in the uniform registers.
// tests/test_compile.py looks for such.
template <bool ThroughL1>
__device__ __forceinline__ void copy_async(OwnPlace place, const void* global, bool valid,
                                           CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  const int read = valid ? 16 : 0;
  if constexpr (ThroughL1) {
    asm volatile(
        "cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(place.address),
        "l"(global), "r"(read), "l"(policy.bits)
        : "memory");
  } else {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(place.address),
        "l"(global), "r"(read), "l"(policy.bits)
        : "memory");
  }
#endif
}
// There is no memory clobber: no element is loaded after the kernel has written it.
__device__ __forceinline__ uint4 load_with_policy(const uint4* memory, CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  uint4 value;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(memory), "l"(policy.bits));
  return value;
#else
  return *memory;
#endif
}

__device__ __forceinline__ uint2 load_with_policy(const uint2* memory, CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  uint2 value;
  asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(value.x), "=r"(value.y)
               : "l"(memory), "l"(policy.bits));
  return value;
#else
  return *memory;
#endif
}

// Whether 16 bytes may be read if some of them lie before all rows. None lies beyond the memory's
// end.
constexpr bool kReadsAroundRows = true;

// Has the L2 fetch the line of an address.
__device__ __forceinline__ void prefetch(const void* memory) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(memory));
}

// Stores 16 bytes that nobody reads soon, so that the L1 keeps what it has.
__device__ __forceinline__ void store_past_l1(uint4* memory, uint4 value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(memory),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Says whether the loads from here on are of values that nothing uses. Other threads may write these
// in the meantime. The tests' runtime for the host would take that for a race.
__device__ __forceinline__ void loads_are_unused(bool) {}

// The compiler may no longer assume that it knows this value.
__device__ __forceinline__ void make_opaque(unsigned& word) { asm volatile("" : "+r"(word)); }
__device__ __forceinline__ void make_opaque(int& word) { asm volatile("" : "+r"(word)); }
__device__ __forceinline__ void make_opaque(long long& word) { asm volatile("" : "+l"(word)); }
// Returns the 32 bits from bit `bits` of `low` on; `high` has the rest, 0 <= bits < 32. The second
// returns those that end as many bits before the end of `high`.
__device__ __forceinline__ unsigned shifted_right(unsigned low, unsigned high, unsigned bits) {
  return __funnelshift_r(low, high, bits);
}
__device__ __forceinline__ unsigned shifted_left(unsigned low, unsigned high, unsigned bits) {
  return __funnelshift_l(low, high, bits);
}
__device__ __forceinline__ unsigned float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned long long double_bits(double value) {
  return static_cast<unsigned long long>(__double_as_longlong(value));
}
__device__ __forceinline__ double double_from_bits(unsigned long long bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}

// IEEE 754 binary16 and bfloat16 from their bits, so that no CUDA header is needed. All round to
// nearest even. A float64 is rounded once, never by way of float32.
__device__ __forceinline__ float float16_bits_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ unsigned short float_to_float16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ unsigned short double_to_float16_bits(double value) {
  unsigned short bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}
__device__ __forceinline__ unsigned short float_to_bfloat16_bits(float value) {
#if __CUDA_ARCH__ >= 800
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned word = float_bits(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // the NaN that newer GPUs give
  return static_cast<unsigned short>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
#endif
}
// Two at once, the first in the lower half.
__device__ __forceinline__ unsigned floats_to_float16_bits(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
#else
  return float_to_float16_bits(first) | static_cast<unsigned>(float_to_float16_bits(second)) << 16;
#endif
}
__device__ __forceinline__ unsigned floats_to_bfloat16_bits(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
#else
  return float_to_bfloat16_bits(first) | static_cast<unsigned>(float_to_bfloat16_bits(second))
                                             << 16;
#endif
}
__device__ __forceinline__ unsigned short double_to_bfloat16_bits(double value) {
  // Rounding to odd keeps a sticky bit below float32's last, so the second rounding is the only one.
  const float toward_zero = __double2float_rz(value);
  const bool inexact = static_cast<double>(toward_zero) != value;
  return float_to_bfloat16_bits(float_from_bits(float_bits(toward_zero) | (inexact ? 1u : 0u)));
}

// Numbers of eight bits: to nearest even, saturated. Two float8 numbers at once, the first in the lower half, by an
// instruction of sm_89 on. quantize.cuh has the bits for others.
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsToFloat8 = true;
#else
constexpr bool kConvertsToFloat8 = false;
#endif
__device__ __forceinline__ unsigned floats_to_e4m3_bits(float first, float second) {
  unsigned short bits = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
#endif
  return bits;
}
__device__ __forceinline__ unsigned floats_to_e5m2_bits(float first, float second) {
  unsigned short bits = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
#endif
  return bits;
}
// A NaN gives 0.
__device__ __forceinline__ unsigned float_to_int8_bits(float value) {
  int number;
  asm("cvt.rni.s8.f32 %0, %1;" : "=r"(number) : "f"(value));
  return static_cast<unsigned>(number) & 0xffu;
}

// The compiler contracts nothing (--fmad=false), so a fused multiply-add happens only where it is
// written.
__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
// A sum in which subnormal numbers count. Elsewhere these kernels are compiled to take them for 0.
__device__ __forceinline__ float add_with_subnormals(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ double add_with_subnormals(double a, double b) { return a + b; }
// Of two pairs of bfloat16 or float16 numbers, the larger magnitudes that are no NaN, with any signs (sm_86 on).
#if __CUDA_ARCH__ >= 860
constexpr bool kComparesPairs = true;
#else
constexpr bool kComparesPairs = false;
#endif
__device__ __forceinline__ unsigned larger_bfloat16_pair(unsigned a, unsigned b) {
  unsigned larger = 0;
#if __CUDA_ARCH__ >= 860
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#endif
  return larger;
}
__device__ __forceinline__ unsigned larger_float16_pair(unsigned a, unsigned b) {
  unsigned larger = 0;
#if __CUDA_ARCH__ >= 860
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#endif
  return larger;
}
// The larger one that is no NaN.
__device__ __forceinline__ float larger_number(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float absolute(float value) { return fabsf(value); }
__device__ __forceinline__ double absolute(double value) { return fabs(value); }
// The value, or the bound that it exceeds; a NaN stays.
__device__ __forceinline__ float at_most(float value, float upper) {
#if __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(upper));
  return value;
#else
  return value > upper ? upper : value;
#endif
}
__device__ __forceinline__ float between(float value, float lower, float upper) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(lower));
#else
  value = value < lower ? lower : value;
#endif
  return at_most(value, upper);
}
__device__ __forceinline__ double between(double value, double lower, double upper) {
  return value < lower ? lower : value > upper ? upper : value;
}
// Sets a bit of `bits` if lower < value < upper, in three instructions; the compiler makes seven of
// the C++. It takes subnormal values for 0, as the compiler does.
__device__ __forceinline__ void set_if_strictly_between(unsigned& bits, unsigned bit, float value,
                                                        float lower, float upper) {
  asm("{\n"
      "  .reg .pred inside;\n"
      "  setp.gt.ftz.f32 inside, %2, %3;\n"
      "  setp.lt.and.ftz.f32 inside, %2, %4, inside;\n"
      "  @inside or.b32 %0, %0, %1;\n"
      "}"
      : "+r"(bits)
      : "r"(bit), "f"(value), "f"(lower), "f"(upper));
}
__device__ __forceinline__ void set_if_strictly_between(unsigned& bits, unsigned bit, double value,
                                                        double lower, double upper) {
  if (lower < value && value < upper) bits |= bit;
}
// A word whose lower half is all ones or all zeros, as the top bit of byte `low` of `tops` says,
// and its upper half as that of byte `high`.
__device__ __forceinline__ unsigned spread_tops(unsigned tops, int low, int high) {
  const unsigned selector = 0x8888u | static_cast<unsigned>(low * 0x11 | high * 0x1100);
  unsigned spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(tops), "r"(selector));
  return spread;
}
// Correctly rounded for float32, one ulp for float64.
__device__ __forceinline__ float reciprocal_square_root(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double reciprocal_square_root(double value) {
  return __drcp_rn(__dsqrt_rn(value));
}
__device__ __forceinline__ float reciprocal_within_an_ulp(float value) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(value));
  return reciprocal;
}
__device__ __forceinline__ double reciprocal_within_an_ulp(double value) { return 1.0 / value; }
// Correctly rounded for magnitudes from 2^-60 to 2^60 (notes.md#exact-quotients).
__device__ __forceinline__ float reciprocal_in_range(float value) {
  const float close = reciprocal_within_an_ulp(value);
  return fused_multiply_add(fused_multiply_add(-value, close, 1.0f), close, close);
}
__device__ __forceinline__ float square_root(float value) { return __fsqrt_rn(value); }
__device__ __forceinline__ double square_root(double value) { return __dsqrt_rn(value); }
