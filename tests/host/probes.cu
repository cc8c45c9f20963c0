// The primitives of device.cuh by themselves.
#include "types.cuh"

template <typename From, typename To>
struct Probed {
  const From* values;
  To* results;
  long long n;
};

// Each element i of results comes from element i of values.
template <typename From, typename To>
__global__ void convert_all(const Probed<From, To> args) {
  const auto [values, results, n] = args;
  for (long long i = thread_index(); i < n; i += 32) results[i] = convert<To>(values[i]);
}

template <typename T>
__global__ void reciprocal_square_roots(const Probed<T, T> args) {
  const auto [values, results, n] = args;
  for (long long i = thread_index(); i < n; i += 32) results[i] = reciprocal_square_root(values[i]);
}

// Pairs of elements are rounded to 16 bits at once.
template <typename To>
__global__ void convert_pairs(const Probed<float, unsigned> args) {
  const auto [values, results, n] = args;
  for (long long i = thread_index(); i < n; i += 32) {
    const float first = values[2 * i], second = values[2 * i + 1];
    results[i] = kSame<To, float16> ? floats_to_float16_bits(first, second)
                                    : floats_to_bfloat16_bits(first, second);
  }
}

// Copies n rows of 4-byte elements through shared memory, with the next two rows in flight. Zeros
// stand for what a row does not have. A row is as wide as a block.
template <typename T, int Bytes>
__global__ void copy_rows(const Probed<T, T> args) {
  const T* const values = args.values;
  T* const results = args.results;
  const long long n = args.n;
  constexpr int kLength = Bytes / 4;
  T* stages = static_cast<T*>(dynamic_shared_memory());
  const int width = 32 * kLength;
  const int column = thread_index() * kLength;
  const auto fetch = [&](long long row) {
    copy_async<Bytes>(stages + row % 3 * width + column, values + row * width + column, row < n);
    commit_copies();
  };
  for (int row = 0; row < 3; ++row) fetch(row);
  for (long long row = 0; row <= n; ++row) {
    wait_for_copies<2>();
    for (int i = column; i < column + kLength; ++i) {
      results[row * width + i] = stages[row % 3 * width + i];
    }
    fetch(row + 3);
  }
}

// Each block of a cluster adds, in order, what all blocks send it: n times, values[block] * k.
template <typename T, int ClusterBlocks>
__global__ void sum_over_clusters(const Probed<T, T> args) {
  const auto [values, results, n] = args;
  Mailbox* mailboxes = static_cast<Mailbox*>(dynamic_shared_memory());
  T* letters = reinterpret_cast<T*>(mailboxes + 2);
  if (thread_index() < 2) open_mailbox(mailboxes + thread_index());
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
  const T value = values[block_index()];
  T sum = 0;
  for (int k = 0; k < n; ++k) {
    T* half = letters + k % 2 * ClusterBlocks * 2;
    Mailbox* mailbox = mailboxes + k % 2;
    // By what it sends, each warp tells the others that it has read what came last time.
    const bool sends = thread_index() % 32 == 0;
    if (thread_index() == 0) expect_bytes(mailbox, ClusterBlocks * 2 * static_cast<int>(sizeof(T)));
    for (int block = 0; sends && block < ClusterBlocks; ++block) {
      const int slot = 2 * block_in_cluster() + thread_index() / 32;
      send_to_block(half + slot, mailbox, block, {value * k});
    }
    wait_for_bytes<true>(mailbox, k / 2 % 2);
    for (int slot = 0; slot < 2 * ClusterBlocks; ++slot) sum += half[slot];
    any_in_warp(true);
  }
  results[block_index() * 64 + thread_index()] = sum;
}

// Lanes write what others read before they met.
template <typename T>
__global__ void rotate_in_place(T* values) {
  const T value = values[(thread_index() + 1) % 32];
  any_in_warp(true);
  values[thread_index()] = value;
}
