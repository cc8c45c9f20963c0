// Kernels that do what no kernel may. Each does it once, on the line that says so. Blocks have 64
// threads and 256 bytes of shared memory. `values` has 64 elements that nothing wrote.
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

// The first of two warps only arrives. Only the second knows what both did.
template <typename T>
__global__ void reads_after_it_arrives(T* values) {
  shared()[thread_index()] = 1;
  if (thread_index() < 32) {
    arrive_at_barrier(1, 64);
    values[0] = shared()[32];  // fault
  } else {
    named_barrier(1, 64);
    values[1] = shared()[0];
  }
}

template <typename T>
__global__ void writes_after_it_arrives(T* values) {
  if (thread_index() < 32) {
    shared()[thread_index()] = 1;
    arrive_at_barrier(1, 64);
    shared()[thread_index()] = 2;
  } else {
    named_barrier(1, 64);
    values[thread_index()] = shared()[thread_index() - 32];  // fault
  }
}

template <typename T>
__global__ void arrives_twice(T*) {
  if (thread_index() > 31) return;
  arrive_at_barrier(1, 64);
  arrive_at_barrier(1, 64);  // fault
}

template <typename T>
__global__ void waits_where_nobody_arrives(T*) {
  if (thread_index() > 31) named_barrier(1, 64);  // fault
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

template <typename T>
__global__ void reads_what_another_lane_wrote_before_a_shuffle(T* values) {
  shared()[thread_index()] = 1;
  shuffle_xor(1.0f, 1);
  values[thread_index()] = shared()[thread_index() ^ 1];  // fault
}

template <typename T>
__global__ void writes_what_another_lane_reads_after_a_shuffle(T* values) {
  shared()[thread_index()] = 1;
  block_barrier();
  shuffle_xor(1.0f, 1);
  values[thread_index()] = shared()[thread_index() | 1];
  if (thread_index() == 1) shared()[1] = 2;  // fault
}

// ---- asynchronous copies -------------------------------------------------------------------------

// Each thread copies its own element, a 1 in device memory, to shared memory.
template <typename T>
__device__ __forceinline__ void copy_own_element(T* values) {
  values[thread_index()] = 1;
  copy_async<4>(shared() + thread_index(), values + thread_index(), true);
  commit_copies();
}

template <typename T>
__global__ void reads_its_copy_before_the_wait(T* values) {
  copy_own_element(values);
  if (shared()[thread_index()] > 0) wait_for_copies<0>();  // fault
}

template <typename T>
__global__ void writes_to_its_copy_before_the_wait(T* values) {
  copy_own_element(values);
  shared()[thread_index()] = 0;  // fault
  wait_for_copies<0>();
}

template <typename T>
__global__ void waits_for_all_but_the_last_copy(T* values) {
  copy_own_element(values);
  wait_for_copies<1>();
  values[thread_index()] = shared()[thread_index()];  // fault
}

template <typename T>
__global__ void waits_for_a_group_that_is_open(T* values) {
  values[thread_index()] = 1;
  copy_async<4>(shared() + thread_index(), values + thread_index(), true);
  wait_for_copies<0>();
  values[thread_index()] += shared()[thread_index()];  // fault
}

template <typename T>
__global__ void reads_another_threads_copy(T* values) {
  copy_own_element(values);
  wait_for_copies<0>();
  if (thread_index() == 1) values[1] = shared()[0];  // fault
}

template <typename T>
__global__ void passes_a_barrier_before_the_wait(T* values) {
  copy_own_element(values);
  block_barrier();
  if (thread_index() == 0) values[1] = shared()[1];  // fault
  wait_for_copies<0>();
}

template <typename T>
__global__ void writes_what_it_copies(T* values) {
  copy_own_element(values);
  values[thread_index()] = 2;  // fault
  wait_for_copies<0>();
}

template <typename T>
__global__ void writes_what_another_thread_copies(T* values) {
  copy_own_element(values);
  block_barrier();
  if (thread_index() == 0) values[1] = 2;  // fault
  wait_for_copies<0>();
}

template <typename T>
__global__ void copies_what_another_thread_writes(T* values) {
  values[thread_index()] = 1;
  if (thread_index() == 1) copy_async<4>(shared(), values, true);  // fault
}

template <typename T>
__global__ void copies_onto_what_another_thread_reads(T* values) {
  shared()[thread_index()] = 1;
  block_barrier();
  const T read = shared()[thread_index() / 2];
  values[thread_index()] = read;
  if (thread_index() == 1) copy_async<4>(shared(), values + 1, true);  // fault
}

template <typename T>
__global__ void copies_onto_a_copy(T* values) {
  copy_own_element(values);
  copy_async<4>(shared() + thread_index(), values, false);  // fault
}

template <typename T>
__global__ void copies_what_nothing_wrote(T* values) {
  copy_async<16>(shared(), values, true);  // fault
}

template <typename T>
__global__ void copies_from_past_the_array(T* values) {
  values[thread_index()] = 0;
  if (thread_index() == 62) copy_async<8>(shared(), values + 64, false);
  if (thread_index() == 63) copy_async<8>(shared() + 2, values + 64, true);  // fault
}

template <typename T>
__global__ void copies_to_past_shared_memory(T* values) {
  copy_async<16>(shared() + 4 * thread_index(), values, false);  // fault
}

template <typename T>
__global__ void copies_across_an_alignment(T* values) {
  copy_async<16>(shared() + 2, values, false);  // fault
}

template <typename T>
__global__ void copies_from_across_an_alignment(T* values) {
  copy_async<8>(shared(), values + 1, false);  // fault
}

template <typename T>
__global__ void ends_before_its_copy(T* values) {
  values[thread_index()] = 1;
  copy_async<4>(shared() + thread_index(), values + thread_index(), true);  // fault
  commit_copies();
}

// ---- clusters of two blocks ----------------------------------------------------------------------

__device__ __forceinline__ void cluster_barrier() {
  arrive_at_cluster_barrier();
  wait_at_cluster_barrier();
}

template <typename T>
__global__ void races_in_a_cluster(T* values) {
  cluster_barrier();
  values[thread_index()] = block_in_cluster();  // fault
}

template <typename T>
__global__ void leaves_a_block_at_the_clusters_barrier(T*) {
  if (block_in_cluster() == 0) cluster_barrier();  // fault
}

template <typename T>
__global__ void leaves_threads_at_the_clusters_barrier(T*) {
  if (thread_index() < 40) cluster_barrier();  // fault
}

// Two mailboxes, and 60 elements after them.
__device__ __forceinline__ Mailbox* mailbox() {
  return static_cast<Mailbox*>(dynamic_shared_memory());
}
__device__ __forceinline__ float* letters() { return shared() + 4; }

__device__ __forceinline__ void open_mailboxes() {
  if (thread_index() < 2) open_mailbox(mailbox() + thread_index());
  cluster_barrier();
}

// Thread 0 of each block sends its letter to both blocks. Each block expects as many bytes.
__device__ __forceinline__ void exchange_letters(int turn, int bytes) {
  if (thread_index() != 0) return;
  expect_bytes(mailbox() + turn, bytes);
  for (int block = 0; block < 2; ++block) {
    send_to_block(letters() + block_in_cluster(), mailbox() + turn, block, {1.0f});
  }
}

template <typename T>
__global__ void counts_where_nothing_was_written(T* values) {
  report_arrival(reinterpret_cast<unsigned*>(values));  // fault
}

template <typename T>
__global__ void counts_past_the_array(T* values) {
  report_arrival(reinterpret_cast<unsigned*>(values + 64));  // fault
}

// Two warps of each block arrive after the block has met.
template <typename T>
__device__ unsigned* count_of_warps(T* values) {
  unsigned* count = reinterpret_cast<unsigned*>(values);
  if (block_index() == 0 && thread_index() == 0) *count = 0;
  cluster_barrier();
  const int warp = 2 * block_in_cluster() + thread_index() / 32;
  if (thread_index() % 32 == 5) values[4 + warp] = 1;
  report_arrival(count);
  return count;
}

template <typename T>
__global__ void waits_for_one_arrival_too_many(T* values) {
  wait_for_arrivals(count_of_warps(values), 5);  // fault
}

template <typename T>
__global__ void waits_for_one_arrival_too_few(T* values) {
  wait_for_arrivals(count_of_warps(values), 3);
  if (values[7] == 2) values[8] = 1;  // fault
}

template <typename T>
__global__ void sends_to_no_mailbox(T*) {
  cluster_barrier();
  send_to_block(letters(), mailbox(), 0, {1.0f});  // fault
}

template <typename T>
__global__ void sends_before_the_mailbox_may_be_open(T*) {
  if (thread_index() == 0) open_mailbox(mailbox());
  block_barrier();
  if (block_in_cluster() == 1) send_to_block(letters(), mailbox(), 0, {1.0f});  // fault
  cluster_barrier();
}

template <typename T>
__global__ void expects_in_a_mailbox_that_may_not_be_open(T*) {
  if (thread_index() == 0) open_mailbox(mailbox());
  if (thread_index() == 1) expect_bytes(mailbox(), 4);  // fault
}

template <typename T>
__global__ void expects_twice(T*) {
  open_mailboxes();
  if (thread_index() < 2) expect_bytes(mailbox(), 8);  // fault
}

template <typename T>
__global__ void expects_too_much(T*) {
  open_mailboxes();
  exchange_letters(0, 12);
  wait_for_bytes<true>(mailbox(), 0);  // fault
}

template <typename T>
__global__ void expects_too_little(T* values) {
  open_mailboxes();
  exchange_letters(0, 4);
  if (block_in_cluster() == 0) {
    wait_for_bytes<true>(mailbox(), 0);
    if (thread_index() < 2) values[thread_index()] = letters()[thread_index()];  // fault
  }
  cluster_barrier();
}

template <typename T>
__global__ void reads_its_own_letter_before_the_wait(T* values) {
  open_mailboxes();
  exchange_letters(0, 8);
  if (block_in_cluster() == 0 && thread_index() == 0) values[0] = letters()[0];  // fault
  wait_for_bytes<true>(mailbox(), 0);
}

template <typename T>
__global__ void reads_what_a_thread_beside_it_waited_for(T* values) {
  open_mailboxes();
  exchange_letters(0, 8);
  if (thread_index() != 1) wait_for_bytes<true>(mailbox(), 0);
  if (thread_index() == 1) values[block_index()] = letters()[0];  // fault
}

template <typename T>
__global__ void waits_for_the_time_before(T* values) {
  open_mailboxes();
  exchange_letters(0, 8);
  wait_for_bytes<true>(mailbox(), 1);
  if (block_in_cluster() == 0) values[thread_index()] = letters()[0];  // fault
  wait_for_bytes<true>(mailbox(), 0);
}

template <typename T>
__global__ void waits_for_the_time_after(T*) {
  open_mailboxes();
  exchange_letters(0, 8);
  wait_for_bytes<true>(mailbox(), 0);
  wait_for_bytes<true>(mailbox(), 1);  // fault
}

template <typename T>
__global__ void sends_over_what_may_not_have_been_read(T* values) {
  open_mailboxes();
  exchange_letters(0, 8);
  wait_for_bytes<true>(mailbox(), 0);
  if (block_in_cluster() == 1) values[thread_index()] = letters()[0];
  if (block_in_cluster() == 0 && thread_index() == 0) {
    send_to_block(letters(), mailbox() + 1, 1, {2.0f});  // fault
  }
  cluster_barrier();
}

template <typename T>
__global__ void writes_to_a_mailbox(T*) {
  open_mailboxes();
  if (thread_index() == 0) shared()[1] = 0;  // fault
}

template <typename T>
__global__ void sends_to_a_block_that_has_ended(T*) {
  open_mailboxes();
  if (block_in_cluster() == 1 && thread_index() == 0) {
    send_to_block(letters(), mailbox(), 0, {1.0f});  // fault
  }
}

template <typename T>
__global__ void ends_before_its_letters_come(T*) {
  open_mailboxes();
  if (block_in_cluster() == 0 && thread_index() == 0) {
    send_to_block(letters(), mailbox(), 1, {1.0f});  // fault
  }
  block_barrier();
}

template <typename T>
__global__ void sends_to_no_block_of_the_cluster(T*) {
  open_mailboxes();
  if (thread_index() == 0)
    send_to_block(letters(), mailbox(), block_in_cluster() + 1, {1.0f});  // fault
  cluster_barrier();
}

template <typename T>
__global__ void sends_to_past_shared_memory(T*) {
  open_mailboxes();
  send_to_block(letters() + thread_index(), mailbox(), 0, {1.0f});  // fault
}

template <typename T>
__global__ void sends_across_an_alignment(T*) {
  open_mailboxes();
  double* const between = reinterpret_cast<double*>(letters() + 1);
  if (thread_index() == 0) send_to_block(between, mailbox(), 0, {1.0});  // fault
  cluster_barrier();
}

// ---- copies in bulk ------------------------------------------------------------------------------

// Thread 0 of the first block opens a mailbox and has 16 elements copied after it.
__device__ __forceinline__ void copy_letters(float* values) {
  values[thread_index()] = 1;
  if (thread_index() == 0) open_mailbox(mailbox());
  block_barrier();
  if (thread_index() != 0) return;
  expect_bytes(mailbox(), 64);
  copy_bulk(letters(), values, 64, mailbox(), {});
}

template <typename T>
__global__ void reads_a_bulk_copy_before_the_wait(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  block_barrier();
  values[thread_index()] = letters()[0];  // fault
  wait_for_bytes<false>(mailbox(), 0);
}

template <typename T>
__global__ void writes_what_a_bulk_copy_reads(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  block_barrier();
  values[thread_index() % 16] = 2;  // fault
  wait_for_bytes<false>(mailbox(), 0);
}

template <typename T>
__global__ void copies_in_bulk_onto_what_another_thread_reads(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  wait_for_bytes<false>(mailbox(), 0);
  block_barrier();
  if (thread_index() == 63) values[16] = letters()[0];
  if (thread_index() != 0) return;
  expect_bytes(mailbox(), 64);
  copy_bulk(letters(), values, 64, mailbox(), {});  // fault
}

template <typename T>
__global__ void copies_in_bulk_what_no_mailbox_expects(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  wait_for_bytes<false>(mailbox(), 0);
  block_barrier();
  if (thread_index() == 0) copy_bulk(letters(), values, 16, mailbox(), {});  // fault
}

template <typename T>
__global__ void copies_in_bulk_across_an_alignment(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  wait_for_bytes<false>(mailbox(), 0);
  block_barrier();
  if (thread_index() == 0) copy_bulk(letters() + 1, values, 16, mailbox(), {});  // fault
}

template <typename T>
__global__ void copies_in_bulk_to_past_shared_memory(T* values) {
  if (block_index() > 0) return;
  copy_letters(values);
  wait_for_bytes<false>(mailbox(), 0);
  if (thread_index() == 0) copy_bulk(letters() + 56, values, 32, mailbox(), {});  // fault
}

template <typename T>
__global__ void ends_before_its_bulk_copy(T* values) {
  if (thread_index() == 0) {
    values[0] = values[1] = values[2] = values[3] = 1;
    open_mailbox(mailbox());
    expect_bytes(mailbox(), 16);
    copy_bulk(letters(), values, 16, mailbox(), {});  // fault
  }
}
