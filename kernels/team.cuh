// The threads that work on one row, and their reductions.
//
// A block of BlockThreads threads holds BlockThreads / RowThreads teams. A team is a part of a warp (RowThreads a
// power of two up to 32) or whole warps (a multiple of 32). Or it is all threads of ClusterBlocks blocks, which then
// have BlockThreads = RowThreads each.
//
// Order:     a butterfly in each warp, one over the warps of a block, one over the blocks, which every warp repeats.
//            Addition commutes, so every thread of the team ends with the same bits. The order depends on RowThreads
//            and ClusterBlocks alone.
// Split:     The threads of a Split cluster are those of one block of as many, with its packs and its bits.
// Folded:    Each thread of a Folded team is two threads, with the packs and the bits of twice as many threads. Its
//            packs alternate between the one and the other, which is RowThreads further on.
#pragma once

#include "types.cuh"

struct Sum {
  template <typename T>
  __device__ static __forceinline__ T combine(T a, T b) {
    return a + b;
  }
};
struct Max {  // for values that are not negative and not NaN
  template <typename T>
  __device__ static __forceinline__ T combine(T a, T b) {
    return larger(a, b);
  }
};

template <int RowThreads, int BlockThreads, int ClusterBlocks = 1, bool Split = false,
          bool Folded = false>
struct Team {
  static_assert(BlockThreads % 32 == 0 && BlockThreads % RowThreads == 0, "teams fill the block");
  static_assert(RowThreads % 32 == 0 || 32 % RowThreads == 0, "a team is whole warps or a part");
  static constexpr int kTeams = BlockThreads / RowThreads;
  static constexpr int kThreads = ClusterBlocks * RowThreads;  // of a team
  static constexpr int kWarps = RowThreads > 32 ? RowThreads / 32 : 1;
  static_assert(kWarps == 1 || kTeams <= 15, "each team of several warps has a named barrier");
  static_assert(ClusterBlocks == 1 || kTeams == 1, "a cluster is one team");
  static_assert(!Folded || (ClusterBlocks == 1 && kTeams == 1 && RowThreads % 32 == 0),
                "the folded team is the block");
  static constexpr bool kFolded = Folded;
  // A cluster's blocks tell each other one sum each. One warp of a block forms it from the block's
  // warps. One sum of each warp, up to 256 for every warp to read, took longer
  // (notes.md#one-sum-a-block-of-a-cluster).
  static constexpr bool kByBlocks = ClusterBlocks > 1 && kWarps > 1 && !Split;
  // Every warp combines these values last.
  static constexpr int kSlots =
      kByBlocks ? ClusterBlocks : ClusterBlocks * kWarps * (Folded ? 2 : 1);
  static_assert(kSlots <= 32, "a lane reads one");
  static constexpr int kMaxValues = 4;  // that one reduction may combine
  static constexpr int kMailboxBytes = ClusterBlocks > 1 ? 16 : 0;

  int team;  // of the block's
  int rank;  // this thread's place among those of its team in this block
  int block = ClusterBlocks > 1 ? block_in_cluster() : 0;
  int reductions = 0;  // finished

  __device__ __forceinline__ Team()
      : team(static_cast<int>(static_cast<unsigned>(thread_index()) / RowThreads)),
        rank(static_cast<int>(static_cast<unsigned>(thread_index()) % RowThreads)) {
    if constexpr (ClusterBlocks > 1) {
      if (rank == 0) {
        open_mailbox(mailbox(0));
        open_mailbox(mailbox(1));
      }
      arrive_at_cluster_barrier();
    }
  }
  // Opens the mailboxes of a cluster's blocks, once, before the first reduction. This is best done
  // after the row is asked for, since another block may not have started
  // (notes.md#mailboxes-open-after-the-loads).
  __device__ __forceinline__ void meet() const {
    if constexpr (ClusterBlocks > 1) wait_at_cluster_barrier();
  }

  // The first column of a thread's pack p, among those that its block holds.
  template <int PacksPerThread, int Length>
  __device__ __forceinline__ int first_column(int p) const {
    const int before = Split ? p * ClusterBlocks + block : block * PacksPerThread + p;
    return (before * RowThreads + rank) * Length;
  }

  // A pack p lies inside a row of n columns if it is below this. In a team of one block, or a Split
  // one, no thread has more packs than the row needs: n >= (PacksPerThread - 1) * kThreads *
  // Length. There all packs but each thread's last lie inside. For those the bound is a constant,
  // and the comparison folds away.
  template <int PacksPerThread, int Length>
  static __device__ __forceinline__ int end_of_row(int p, int n) {
    constexpr int kColumns = PacksPerThread * kThreads * Length;
    return (ClusterBlocks == 1 || Split) && p + 1 < PacksPerThread ? kColumns : n;
  }

  // Bytes at the start of dynamic shared memory that reductions of T use. These are whole lines of
  // 128, since an asynchronous copy to the middle of a line reads each sector from the L2 twice.
  template <typename T>
  __host__ __device__ static constexpr int scratch_bytes() {
    constexpr int kAll = 2 * kTeams * kSlots + (kByBlocks ? kWarps : 0);
    constexpr int kBytes = kMailboxBytes + kAll * kMaxValues * static_cast<int>(sizeof(T));
    return kSlots == 1 ? 0 : (kBytes + 127) / 128 * 128;
  }

  // Every thread of the team gets the combination of all threads' values.
  template <typename Operation, int Count, typename T>
  __device__ __forceinline__ void reduce(T (&values)[Count]) {
    begin_reduction<Operation>(values);
    finish_reduction<Operation>(values);
  }

  // The same. Each thread of a Folded team also has `seconds`, the values of the second of its two
  // threads. These may be `values` themselves, if they are of both. Lanes 0 to 15 continue with the
  // first values, 16 to 31 with the second. In other teams `seconds` is not read.
  template <typename Operation, int Count, typename T>
  __device__ __forceinline__ void reduce(T (&values)[Count], const T (&seconds)[Count]) {
    if constexpr (Folded) {
      static_assert(Count <= kMaxValues, "more values than the scratch has room for");
      const bool has_seconds = rank % 32 >= 16;
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const T own = has_seconds ? seconds[i] : values[i];
        const T others = has_seconds ? values[i] : seconds[i];
        values[i] = Operation::combine(own, shuffle_xor(others, 16));
      }
      butterfly<Operation, 16>(values);
      if (rank % 16 == 0) {
        slots<Count, T>()[rank / 32 + (has_seconds ? kWarps : 0)] = slot_of(values);
      }
      finish_reduction<Operation>(values);
    } else {
      reduce<Operation>(values);
    }
  }

  // A reduction in two halves, between which a thread need not wait for the others. One runs at a
  // time. In the first half, one warp of each block of a cluster waits for the block's others.
  template <typename Operation, int Count, typename T>
  __device__ __forceinline__ void begin_reduction(T (&values)[Count]) {
    send<Operation>(values, rank == 0);
  }
  // The same, with a word. One warp of the team's first block gives every thread a word of its lane
  // 0; all its lanes say that it `sends`. `words` has two places, which alternate. What the warp
  // then asks for, by `ask`, comes before everything that threads of its block do after the
  // reduction.
  template <typename Operation, int Count, typename T, typename Ask>
  __device__ __forceinline__ void begin_reduction(T (&values)[Count], bool sends, int word,
                                                  int* words, const Ask& ask) {
    static_assert(kSlots > 1, "a barrier lies between what is sent and what is read");
    send<Operation>(values, false);  // first, since all wait for the last of these
    int* const place = words + reductions % 2;
    if (sends) {
      if constexpr (ClusterBlocks > 1) {
        const float bits[1] = {float_from_bits(static_cast<unsigned>(from_first_lane(word)))};
        if (rank % 32 < ClusterBlocks) {
          send_to_block(reinterpret_cast<float*>(place), mailbox(reductions % 2), rank % 32, bits);
        }
      } else if (rank % 32 == 0) {
        *place = word;
      }
      ask();
    }
    if constexpr (ClusterBlocks > 1) {
      if (rank % 32 == 0 && (block == 0 ? sends : rank == 0)) {
        expect_bytes(mailbox(reductions % 2),
                     kSlots * kSentBytes<Count, T> + static_cast<int>(sizeof(word)));
      }
    }
  }
  // The word that came with the last finished reduction, before the next one begins.
  __device__ __forceinline__ int received(const int* words) const {
    return words[(reductions + 1) % 2];
  }

  template <typename Operation, int Count, typename T>
  __device__ __forceinline__ void finish_reduction(T (&values)[Count]) {
    if constexpr (kSlots > 1) {
      if constexpr (ClusterBlocks > 1) {
        wait_for_bytes<true>(mailbox(reductions % 2), reductions / 2 % 2);
      } else if constexpr (kTeams == 1) {
        block_barrier();
      } else {
        named_barrier(team + 1, RowThreads);
      }
      // Two halves of the scratch alternate. A thread is at most one reduction ahead of the
      // slowest, so one barrier (one mailbox) a reduction is enough.
      combine<Operation, kSlots>(values, slots<Count, T>());
      ++reductions;
    }
  }

  // Whether any thread of the team, or of a team that shares its warp, says so. `condition` is the
  // same in all threads of a team.
  __device__ __forceinline__ bool any(bool condition) const {
    return RowThreads < 32 ? any_in_warp(condition) : condition;
  }

 private:
  // Sends this warp's values to all who wait for them, once combined. The one that `announces` them
  // says how many bytes will come to its block.
  template <typename Operation, int Count, typename T>
  __device__ __forceinline__ void send(T (&values)[Count], bool announces) {
    static_assert(!Folded, "its threads have seconds, too");
    static_assert(Count <= kMaxValues, "more values than the scratch has room for");
    butterfly<Operation, (RowThreads < 32 ? RowThreads : 32)>(values);
    if constexpr (kSlots > 1) {
      const int lane = rank % 32, warp = rank / 32;
      Slot<Count, T>* const all = slots<Count, T>();
      if constexpr (ClusterBlocks == 1) {
        if (lane == 0) all[warp] = slot_of(values);
      } else {
        if (announces) expect_bytes(mailbox(reductions % 2), kSlots * kSentBytes<Count, T>);
        bool tells = true;
        if constexpr (kByBlocks) {
          Slot<Count, T>* const of_warps = slots_of_warps<Count, T>();
          if (lane == 0) of_warps[warp] = slot_of(values);
          tells = warp == reductions % kWarps;  // the halves alternate, as it waits for the others
          if (tells) {
            named_barrier(1, BlockThreads);
            combine<Operation, kWarps>(values, of_warps);
          } else {
            arrive_at_barrier(1, BlockThreads);
          }
        }
        const int place = kByBlocks ? block : block * kWarps + warp;
        if (tells && lane < ClusterBlocks) {
          send_to_block(all[place].values, mailbox(reductions % 2), lane, values);
        }
      }
    }
  }

  // The values of a warp or of a block, side by side. In float32 they are one message and one
  // access.
  template <int Count, typename T>
  struct alignas(kSentBytes<Count, T> < 16 ? kSentBytes<Count, T> : 16) Slot {
    T values[kSentBytes<Count, T> / sizeof(T)];
  };
  template <int Count, typename T>
  static __device__ __forceinline__ Slot<Count, T> slot_of(const T (&values)[Count]) {
    Slot<Count, T> slot = {};
#pragma unroll
    for (int i = 0; i < Count; ++i) slot.values[i] = values[i];
    return slot;
  }
  // A team has two sets, which alternate. Behind them is one set for a block's warps. It is enough,
  // since a warp writes there again only after its block's sum has come, which was made of them.
  template <int Count, typename T>
  __device__ __forceinline__ Slot<Count, T>* slots() const {
    return slots_behind<Count, T>((reductions % 2 * kTeams + team) * kSlots);
  }
  template <int Count, typename T>
  static __device__ __forceinline__ Slot<Count, T>* slots_of_warps() {
    return slots_behind<Count, T>(2 * kSlots);
  }
  template <int Count, typename T>
  static __device__ __forceinline__ Slot<Count, T>* slots_behind(int others) {
    char* const first = static_cast<char*>(dynamic_shared_memory()) + kMailboxBytes;
    constexpr int kBytes = kMaxValues * static_cast<int>(sizeof(T));
    return reinterpret_cast<Slot<Count, T>*>(first + others * kBytes);
  }
  // Combines the values of some slots, in every lane.
  template <typename Operation, int Slots, int Count, typename T>
  __device__ __forceinline__ void combine(T (&values)[Count], const Slot<Count, T>* slots) const {
    constexpr int kLanes = power_of_two_above(Slots);
    Slot<Count, T> slot = {};
    if (Slots == kLanes || rank % kLanes < Slots) slot = slots[rank % kLanes];
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = slot.values[i];
    butterfly<Operation, kLanes>(values);
  }
  __device__ __forceinline__ static Mailbox* mailbox(int turn) {
    return static_cast<Mailbox*>(dynamic_shared_memory()) + turn;
  }

  __host__ __device__ static constexpr int power_of_two_above(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
  }

  template <typename Operation, int Lanes, int Count, typename T>
  __device__ __forceinline__ void butterfly(T (&values)[Count]) const {
#pragma unroll
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        values[i] = Operation::combine(values[i], shuffle_xor(values[i], distance));
      }
    }
  }
};
