// Kernels that do what no kernel may, each once, on the line that says so. Blocks have 64 threads
// and 256 bytes of shared memory; values has 64 elements.
#include "device.cuh"

__device__ __forceinline__ float* shared() { return static_cast<float*>(dynamic_shared_memory()); }

template <typename T>
__global__ void reads_before_the_array(T* values) {
  values[0] = values[thread_index() - 1];  // fault
}

template <typename T>
__global__ void writes_past_the_array(T* values) {
  values[thread_index() + 1] = 0;  // fault
}

template <typename T>
__global__ void overruns_shared_memory(T*) {
  shared()[thread_index() * 2] = 0;  // fault
}

template <typename T>
__global__ void reads_shared_memory_that_nothing_wrote(T* values) {
  if (thread_index() < 32) shared()[thread_index()] = 0;
  block_barrier();
  values[thread_index()] = shared()[thread_index()];  // fault
}

template <typename T>
__global__ void reads_device_memory_that_nothing_wrote(T* values) {
  if (values[thread_index()] > 0) values[0] = 1;  // fault
}

template <typename T>
__global__ void reads_what_another_thread_writes(T* values) {
  shared()[thread_index()] = 1;
  if (thread_index() > 0) values[thread_index()] = shared()[thread_index() - 1];  // fault
}

template <typename T>
__global__ void writes_what_another_thread_reads(T* values) {
  shared()[thread_index()] = 1;
  block_barrier();
  values[thread_index()] = shared()[thread_index() | 1];
  shared()[thread_index()] = 2;  // fault
}

template <typename T>
__global__ void writes_what_another_block_wrote(T* values) {
  values[thread_index()] = block_index();  // fault
}

template <typename T>
__global__ void synchronizes_only_half_of_the_readers(T* values) {
  if (thread_index() < 32) shared()[thread_index()] = 1;
  named_barrier(1 + thread_index() / 32, 32);
  values[thread_index()] = shared()[thread_index() % 32];  // fault
}

template <typename T>
__global__ void leaves_threads_at_a_barrier(T*) {
  if (thread_index() < 40) block_barrier();  // fault
}

template <typename T>
__global__ void meets_at_two_barriers(T*) {
  if (thread_index() < 32) {
    named_barrier(1, 64);  // fault
  } else {
    named_barrier(2, 64);
  }
}

template <typename T>
__global__ void counts_a_barrier_in_two_ways(T*) {
  named_barrier(1, thread_index() < 32 ? 64 : 32);  // fault
}

template <typename T>
__global__ void has_no_such_barrier(T*) {
  named_barrier(16, 64);  // fault
}

template <typename T>
__global__ void shuffles_without_a_lane(T* values) {
  if (thread_index() == 7) return;
  values[thread_index()] = shuffle_xor(1.0f, 1);  // fault
}

template <typename T>
__global__ void shuffles_at_two_distances(T* values) {
  values[thread_index()] = shuffle_xor(1.0f, thread_index() % 32 < 31 ? 1 : 2);  // fault
}

template <typename T>
__global__ void shuffles_beyond_the_warp(T* values) {
  values[thread_index()] = shuffle_xor(1.0f, 32);  // fault
}

template <typename T>
__global__ void shuffles_and_votes(T* values) {
  values[thread_index()] = 0;
  if (thread_index() % 32 == 31) {
    any_in_warp(true);  // fault
  } else {
    shuffle_xor(1.0f, 1);
  }
}

template <typename T>
__global__ void reads_across_an_alignment(T* values) {
  struct alignas(16) Four {
    T element[4];
  };
  const Four four = *reinterpret_cast<const Four*>(values + 1);  // fault
  values[0] = four.element[1];
}

template <typename T>
__global__ void leaves_a_local_array(T* values) {
  T local[4] = {};
  values[thread_index()] = local[thread_index()];  // fault
}

template <typename T>
__global__ void overflows_an_index(T* values) {
  int index = 1 << 30;
  make_opaque(index);
  values[thread_index()] = index * 4;  // fault
}

template <typename T>
__global__ void divides_by_zero(T* values) {
  int index = 0;
  make_opaque(index);
  values[thread_index()] = 1 / index;  // fault
}

template <typename T>
__global__ void crashes(T*) {
  if (thread_index() == 5) __builtin_trap();  // fault
}

template <typename T>
__global__ void never_ends(T*) {
  for (;;) block_barrier();  // fault
}
