// Runs a kernel on the host, and checks every access to memory. Each thread of a cluster of blocks
// has a fiber. A cluster is one block as a rule, or all blocks of a grid that runs at once.
//
// Kernels are compiled with -fsanitize=thread and the like. With these options g++ calls a function
// before each access. Those functions are defined here, instead of the sanitizers' own. Memory that
// a kernel may touch is registered in spans, each with a shadow: who last wrote and read every
// granule, and when. The shadow shows accesses out of bounds, reads of what nothing wrote, and
// races. An asynchronous copy is performed at the wait that completes it. From its issue until
// then, nobody may touch its target or write its source.
//
// Fibers run in the order of their indices, each until it has to wait. So nothing depends on time.
// The first problem ends the launch and is reported. Nothing is written out of bounds, and nothing
// hangs.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using Address = std::uintptr_t;
// Counts the stretches of a thread between its barriers. 0 is never, 1 is before any launch.
using Time = std::uint32_t;

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxClusterBlocks = 128;
constexpr int kMaxFibers = kMaxClusterBlocks * kMaxThreads;
constexpr int kBarriers = 16;
constexpr std::size_t kStackBytes = 256 << 10;
constexpr long long kMaxEvents = 100'000'000;  // of a launch. With more, a loop does not end

// ---- what is known of memory -------------------------------------------------------------------

struct Access {
  Time time = 0;
  std::uint32_t thread = 0;  // of the grid
  const void* place = nullptr;
};

// Two readers are enough to show a race: barriers order all threads of a team, or none.
struct Granule {
  Access written, read[2];
  // `sources` are asynchronous copies in flight from here. `targets` are copies in flight to here,
  // sent values and mailboxes.
  std::uint32_t sources = 0, targets = 0;
};

struct Span {
  Address begin = 0, end = 0;
  Address granule_bytes = 1;
  bool initialized = false;  // before any launch
  std::string name;
  // Zeros. Most of them take no memory until a kernel touches them.
  std::unique_ptr<Granule[], decltype(&std::free)> granules{nullptr, &std::free};

  Span() = default;
  Span(Address begin, Address end, Address granule_bytes, bool initialized, std::string name)
      : begin(begin),
        end(end),
        granule_bytes(granule_bytes),
        initialized(initialized),
        name(std::move(name)) {
    forget();
  }
  void forget() {
    const Address count = (end - begin + granule_bytes - 1) / granule_bytes;
    granules.reset(static_cast<Granule*>(std::calloc(count, sizeof(Granule))));
  }
  bool lacks(const Granule& granule) const { return granule.written.time == 0 && !initialized; }
  bool holds(Address first, Address last) const { return begin <= first && last <= end; }
};

std::map<Address, Span> spans;  // by their ends
Span* last_hit = nullptr;
std::vector<Span> shared_memory;      // of each block of the cluster
int current = -1, current_block = 0;  // in the cluster

Span* find_registered(Address first, Address last) {
  if (last_hit != nullptr && last_hit->holds(first, last)) return last_hit;
  const auto next = spans.upper_bound(first);
  if (next == spans.end() || !next->second.holds(first, last)) return nullptr;
  return last_hit = &next->second;
}

Span* find(Address first, Address last) {
  Span& own = shared_memory[current_block];
  return own.holds(first, last) ? &own : find_registered(first, last);
}

int mutant = -1;                  // the kernels' mutant that runs
std::vector<char> mutants_asked;  // by number

// ---- threads -------------------------------------------------------------------------------------

enum class State {
  kReady,
  kAtShuffle,
  kAtVote,
  kAtWarpBarrier,
  kAtBarrier,
  kAtClusterBarrier,
  kAtMailbox,
  kAtArrivals,
  kFinished
};

// A copy from global to shared memory. Without a source it writes zeros.
struct Copy {
  Address target, source;
  unsigned bytes;
  Span* source_span;
  int group;  // among the thread's groups
  const void* place;
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  bool started = false;
  State state = State::kFinished;
  const void* place = nullptr;  // where it waits
  int detail = 0;               // the shuffle's distance or the barrier's number
  int bytes = 0;                // of a shuffle's value
  std::uint32_t expected = 0;   // arrivals
  int collectives = 0;
  Time now = 0;
  std::size_t known = 0;     // an index of `knowledge`: what other threads did
  std::vector<Copy> copies;  // in flight
  int groups = 0;            // closed groups of copies
  bool arrived = false;      // at the cluster's barrier, but not waiting there yet
};

// A lane may enter the next collective before the slowest lane has read this one. So there are two
// sets of slots.
struct Warp {
  int arrived = 0;
  std::uint64_t slots[2][kWarp];
  Time met[kWarp];    // when its lanes met last
  Time wrote[kWarp];  // and at its barrier, where they see earlier writes of others
};

// What some threads have done and known. Others learn it.
struct Joint {
  std::vector<Time> times;
  std::vector<std::size_t> from;
  std::map<std::size_t, std::size_t> after;  // by what a thread knew before
  std::vector<int> waiting;                  // for more arrivals
};

struct Barrier {
  int threads = 0;
  std::vector<int> waiting;
  std::vector<int> arrived;  // threads that do not wait
  Joint before;              // what these have done
};

struct Sent {
  Address address;
  unsigned bytes;
  Access access;
};

struct BulkCopy {
  Copy copy;
  Access access;
};

// Full when one thread has said how many bytes to expect and the bytes have come. This repeats.
struct Mailbox {
  Access opened;
  int times_full = 0;
  bool expects = false;
  int missing = 0;  // bytes. More may come than are expected yet
  std::vector<Sent> sent;
  std::vector<BulkCopy> copies;  // in flight
  Joint filled, was_full;
};

std::vector<Fiber> fibers(kMaxThreads);
std::vector<Warp> warps(kMaxFibers / kWarp);
Barrier barriers[kMaxClusterBlocks][kBarriers];
Barrier cluster_barrier;
std::map<Address, Joint> arrivals;                  // by count, of the threads that are in it
std::map<std::pair<Address, int>, Access> counted;  // by count and block: its last counting up
std::map<Address, Mailbox> mailboxes[kMaxClusterBlocks];
// By thread: the last time of its own that a barrier has made visible. Threads that met at a
// barrier share one entry.
std::vector<std::vector<Time>> knowledge;

char* stacks = nullptr;
jmp_buf scheduler;
int threads = 0, cluster_blocks = 1, cluster_threads = 0;
int turn_threads = 0;  // of a cluster or a block: they go on as far as they can before others do
long long first_block = 0, blocks = 0, events = 0;
std::uint32_t first_thread = 0;  // of the cluster, in the grid
int running[kMaxClusterBlocks];  // threads of a block that have not finished
// By the block that was sent to, and by thread: the last such access.
std::map<int, Access> sent_from_outside[kMaxClusterBlocks];
Time launched = 1, latest = 1;
void (*kernel)(void**) = nullptr;
void** kernel_arguments = nullptr;

// ---- reports ---------------------------------------------------------------------------------------

struct Report {
  std::string message;  // {0}, {1}, ... stand for places
  std::vector<const void*> places;
} report;

std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

std::string placed(const void* place) {
  report.places.push_back(place);
  return format("{%zu}", report.places.size() - 1);
}

std::string here() {
  return format("block %lld, thread %d: ", first_block + current_block, current % threads);
}

[[noreturn]] void give_up() { _longjmp(scheduler, 2); }

#define CALLER __builtin_return_address(0)

// ---- accesses ------------------------------------------------------------------------------------

std::string describe(Address address) {
  const Span* nearest = nullptr;
  Address distance = 0;
  const auto consider = [&](const Span& span) {
    if (span.begin == span.end) return;
    const Address away = address < span.begin  ? span.begin - address
                         : address >= span.end ? address - span.end + 1
                                               : 0;
    if (nearest == nullptr || away < distance) nearest = &span, distance = away;
  };
  for (const auto& [end, span] : spans) consider(span);
  for (const Span& span : shared_memory) consider(span);
  if (nearest == nullptr) return " in no array";
  if (address < nearest->begin) {
    return format(", %zu bytes before ", nearest->begin - address) + nearest->name;
  }
  if (address >= nearest->end) {
    return format(", %zu bytes past the end of ", address - nearest->end) + nearest->name;
  }
  return format(" at byte %zu of ", address - nearest->begin) + nearest->name;
}

[[noreturn]] void report_access(const char* what, Address address, unsigned bytes,
                                const void* place, const Access* other = nullptr,
                                const char* others = "", const char* missing = "barrier") {
  report.message =
      here() + format("%s %u bytes", what, bytes) + describe(address) + ", at " + placed(place);
  if (other != nullptr) {
    report.message += format(", which block %u, thread %u %s ", other->thread / threads,
                             other->thread % threads, others);
    report.message += "at " + placed(other->place) + format(" with no %s between", missing);
  }
  give_up();
}

// Whether no barrier lies between an earlier access and the present thread. Clusters know nothing
// of each other. Launches are in order.
bool races(const Access& earlier, bool was_read = false) {
  if (earlier.time <= launched) return false;
  const std::uint32_t other = earlier.thread - first_thread;
  if (other >= static_cast<std::uint32_t>(cluster_threads)) return true;
  if (static_cast<int>(other) == current) return false;
  // When lanes meet, what a lane read is done. What it wrote need not be there for the others until
  // they meet at their barrier.
  if (other / kWarp == static_cast<std::uint32_t>(current / kWarp)) {
    const Warp& warp = warps[current / kWarp];
    if ((was_read ? warp.met : warp.wrote)[other % kWarp] >= earlier.time) return false;
  }
  return knowledge[fibers[current].known][other] < earlier.time;
}

void count_events(int count, const void* place) {
  if ((events += count) > kMaxEvents) {
    report.message = here() + "does not end, at " + placed(place);
    give_up();
  }
}

Access access_at(const void* place) {
  return {fibers[current].now, first_thread + static_cast<std::uint32_t>(current), place};
}

template <typename Visit>
void for_each_granule(Span& span, Address address, unsigned bytes, Visit visit) {
  const Address first = (address - span.begin) / span.granule_bytes;
  const Address last = (address + bytes - 1 - span.begin) / span.granule_bytes;
  for (Address i = first; i <= last; ++i) visit(span.granules[i]);
}

void note_read(Granule& granule, const Access& access) {
  if (granule.read[0].thread != access.thread) granule.read[1] = granule.read[0];
  granule.read[0] = access;
}

// Reports an access to memory that a copy in flight touches.
[[noreturn]] void report_copy(const Span& span, Address address, unsigned bytes, bool write,
                              const void* place) {
  const auto granule = [&](Address at) { return (at - span.begin) / span.granule_bytes; };
  const auto meets = [&](Address other, const Copy& copy) {
    return granule(other) <= granule(address + bytes - 1) &&
           granule(address) <= granule(other + copy.bytes - 1);
  };
  for (int i = 0; i < cluster_threads; ++i) {
    for (const Copy& copy : fibers[i].copies) {
      const bool to = meets(copy.target, copy);
      if (!to && !(write && copy.source_span != nullptr && meets(copy.source, copy))) continue;
      const Access other = {0, first_thread + static_cast<std::uint32_t>(i), copy.place};
      report_access(write ? "race: writes" : "race: reads", address, bytes, place, &other,
                    to ? "copies to" : "copies from", "wait");
    }
  }
  for (int block = 0; block < cluster_blocks; ++block) {
    for (const auto& [opened_at, mailbox] : mailboxes[block]) {
      for (const auto& [copy, access] : mailbox.copies) {
        const bool to = meets(copy.target, copy);
        if (!to && !(write && meets(copy.source, copy))) continue;
        report_access(write ? "race: writes" : "race: reads", address, bytes, place, &access,
                      to ? "copies to" : "copies from", "wait");
      }
      for (const Sent& sent : mailbox.sent) {
        if (granule(sent.address) <= granule(address + bytes - 1) &&
            granule(address) <= granule(sent.address + sent.bytes - 1)) {
          report_access(write ? "race: writes" : "race: reads", address, bytes, place, &sent.access,
                        "sends to", "wait");
        }
      }
    }
  }
  report_access(write ? "mailbox: writes" : "mailbox: reads", address, bytes, place);
}

void check_granules(Span& span, Address address, unsigned bytes, bool write, const void* place) {
  const Access access = access_at(place);
  for_each_granule(span, address, bytes, [&](Granule& granule) {
    if (granule.targets != 0 || (write && granule.sources != 0)) {
      report_copy(span, address, bytes, write, place);
    }
    if (!write && span.lacks(granule)) {
      report_access("uninitialized: reads", address, bytes, place);
    }
    if (races(granule.written)) {
      report_access(write ? "race: writes" : "race: reads", address, bytes, place, &granule.written,
                    "wrote");
    }
    if (write) {
      for (const Access& read : granule.read) {
        if (races(read, true)) report_access("race: writes", address, bytes, place, &read, "read");
      }
      granule.written = access;
    } else {
      note_read(granule, access);
    }
  });
}

// Checks that memory may be read. Others may write it in the meantime.
void prefetch(Address address, const void* place) {
  Span* span = find(address, address + 1);
  if (span == nullptr) report_access("out of bounds: fetches", address, 1, place);
  for_each_granule(*span, address, 1, [&](const Granule& granule) {
    if (span->lacks(granule)) report_access("uninitialized: fetches", address, 1, place);
  });
}

// Of the present thread, which does not let others run in the meantime.
bool unused_loads = false;

bool is_on_a_stack(Address address) {
  return address - reinterpret_cast<Address>(stacks) < kMaxFibers * kStackBytes;
}

void check_access(const void* memory, unsigned bytes, bool write, const void* place) {
  const Address address = reinterpret_cast<Address>(memory);
  if (is_on_a_stack(address)) return;
  count_events(1, place);
  if (unused_loads && !write) return prefetch(address, place);
  Span* span = find(address, address + bytes);
  if (span == nullptr) {
    report_access(write ? "out of bounds: writes" : "out of bounds: reads", address, bytes, place);
  }
  check_granules(*span, address, bytes, write, place);
}

// Checks that an access is aligned to its size, except for a thread's own variables: g++ writes
// several of them at once. With -fsanitize=alignment, kernels take half as long again to compile.
void check_aligned_access(const void* memory, unsigned bytes, bool write, const void* place) {
  const Address address = reinterpret_cast<Address>(memory);
  if (address % bytes != 0 && !is_on_a_stack(address)) {
    report_access(write ? "misaligned: writes" : "misaligned: reads", address, bytes, place);
  }
  check_access(memory, bytes, write, place);
}

// Returns the present block's shared memory. Accesses by instructions other than loads and stores
// must lie in it.
Span& own_memory(const char* what, Address address, unsigned bytes, const void* place) {
  count_events(1, place);
  Span& own = shared_memory[current_block];
  if (!own.holds(address, address + bytes)) {
    report_access(format("out of bounds: %s", what).c_str(), address, bytes, place);
  }
  if (address % bytes != 0) {
    report_access(format("misaligned: %s", what).c_str(), address, bytes, place);
  }
  return own;
}

// ---- asynchronous copies ---------------------------------------------------------------------------

void begin_copy(Address target, Address source, unsigned bytes, bool valid, const void* place) {
  Span& own = own_memory("copies to", target, bytes, place);
  if (source % bytes != 0) report_access("misaligned: copies from", source, bytes, place);
  Fiber& fiber = fibers[current];
  Copy copy = {target, source, bytes, nullptr, fiber.groups, place};
  if (valid) {
    copy.source_span = find_registered(source, source + bytes);
    if (copy.source_span == nullptr) {
      report_access("out of bounds: copies from", source, bytes, place);
    }
    check_granules(*copy.source_span, source, bytes, false, place);
  }
  check_granules(own, target, bytes, true, place);
  if (valid) {
    for_each_granule(*copy.source_span, source, bytes, [](Granule& g) { ++g.sources; });
  }
  for_each_granule(own, target, bytes, [](Granule& g) { ++g.targets; });
  fiber.copies.push_back(copy);
}

void forget_source(const Copy& copy) {
  if (copy.source_span == nullptr) return;
  for_each_granule(*copy.source_span, copy.source, copy.bytes, [](Granule& g) { --g.sources; });
}

void end_copy(const Copy& copy) {
  const Access access = access_at(copy.place);
  void* target = reinterpret_cast<void*>(copy.target);
  if (copy.source_span == nullptr) {
    std::memset(target, 0, copy.bytes);
  } else {
    std::memcpy(target, reinterpret_cast<const void*>(copy.source), copy.bytes);
    forget_source(copy);
    for_each_granule(*copy.source_span, copy.source, copy.bytes,
                     [&](Granule& granule) { note_read(granule, access); });
  }
  for_each_granule(shared_memory[current_block], copy.target, copy.bytes, [&](Granule& granule) {
    --granule.targets;
    granule.written = access;
  });
}

void end_copies(int groups, const void* place) {
  count_events(1, place);
  Fiber& fiber = fibers[current];
  const auto under_way =
      std::find_if(fiber.copies.begin(), fiber.copies.end(),
                   [&](const Copy& copy) { return copy.group >= fiber.groups - groups; });
  std::for_each(fiber.copies.begin(), under_way, end_copy);
  fiber.copies.erase(fiber.copies.begin(), under_way);
}

// ---- waiting -------------------------------------------------------------------------------------

const char* name_of(State state) {
  switch (state) {
    case State::kAtShuffle:
      return "wait in a shuffle of distance";
    case State::kAtVote:
      return "wait in a vote";
    case State::kAtWarpBarrier:
      return "wait at the warp's barrier";
    case State::kAtBarrier:
      return "wait at barrier";
    case State::kAtClusterBarrier:
      return "wait at the cluster's barrier";
    case State::kAtMailbox:
      return "wait for a mailbox";
    case State::kAtArrivals:
      return "wait for arrivals";
    default:
      return "have finished";
  }
}

// Returns who waits where. Threads with the same fate are together.
std::string describe_threads(int first, int count) {
  std::string text;
  for (int begin = first; begin < first + count;) {
    const Fiber& fiber = fibers[begin];
    int end = begin + 1;
    while (end < first + count && fibers[end].state == fiber.state &&
           fibers[end].detail == fiber.detail && fibers[end].place == fiber.place) {
      ++end;
    }
    text += begin == first ? "" : "; ";
    text +=
        format("threads %d to %d %s", begin % threads, (end - 1) % threads, name_of(fiber.state));
    if (fiber.state == State::kAtShuffle) text += format(" %d", fiber.detail);
    if (fiber.state == State::kAtBarrier) {
      text += format(" %d of %d threads", fiber.detail,
                     barriers[begin / threads][fiber.detail].threads);
    }
    if (fiber.state != State::kFinished) text += " at " + placed(fiber.place);
    begin = end;
  }
  return text;
}

void wait() {
  if (_setjmp(fibers[current].context) == 0) _longjmp(scheduler, 1);
}

void arrive(State state, int detail, int bytes, const void* place) {
  count_events(10, place);
  Fiber& fiber = fibers[current];
  fiber.state = state, fiber.detail = detail, fiber.bytes = bytes, fiber.place = place;
}

// All lanes leave `mine` in the present slots. They go on once the last lane has done so.
const std::uint64_t* meet(State state, std::uint64_t mine, int detail, int bytes,
                          const void* place) {
  const int first = current / kWarp * kWarp;
  Warp& warp = warps[current / kWarp];
  arrive(state, detail, bytes, place);
  std::uint64_t* slots = warp.slots[fibers[current].collectives++ % 2];
  slots[current % kWarp] = mine;
  if (++warp.arrived < kWarp) {
    wait();
    return slots;
  }
  for (int i = first; i < first + kWarp; ++i) {
    const Fiber& lane = fibers[i];
    if (lane.state != state || lane.detail != detail || lane.bytes != bytes) {
      report.message = here() + "the lanes of a warp disagree: " + describe_threads(first, kWarp);
      give_up();
    }
  }
  for (int i = first; i < first + kWarp; ++i) {
    fibers[i].state = State::kReady;
    if (state == State::kAtWarpBarrier) warp.wrote[i - first] = fibers[i].now;
    warp.met[i - first] = fibers[i].now++;
    latest = std::max(latest, fibers[i].now);
  }
  warp.arrived = 0;
  return slots;
}

void learn(std::vector<Time>& mine, const std::vector<Time>& others) {
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = std::max(mine[i], others[i]);
}

// All threads that have waited learn what any of them knew and did.
void end_barrier(Barrier& barrier) {
  std::vector<Time> joined(cluster_threads);
  if (!barrier.arrived.empty()) learn(joined, barrier.before.times);
  std::size_t merged = knowledge.size();
  for (int i : barrier.waiting) {
    if (fibers[i].known == merged) continue;
    merged = fibers[i].known;
    learn(joined, knowledge[merged]);
  }
  for (int i : barrier.waiting) {
    joined[i] = fibers[i].now++;
    latest = std::max(latest, fibers[i].now);
    fibers[i].known = knowledge.size();
    fibers[i].state = State::kReady;
  }
  knowledge.push_back(std::move(joined));
  barrier = {barrier.threads, {}, {}, {}};
}

Barrier& barrier_at(int number, int count, const void* place) {
  arrive(State::kAtBarrier, number, 0, place);
  if (number < 0 || number >= kBarriers || count <= 0 || count % kWarp != 0 || count > threads) {
    report.message =
        here() + format("no barrier %d of %d threads, at ", number, count) + placed(place);
    give_up();
  }
  Barrier& barrier = barriers[current_block][number];
  if (!(barrier.waiting.empty() && barrier.arrived.empty()) && barrier.threads != count) {
    report.message =
        here() +
        format("barrier %d is of %d threads, and of %d at ", number, barrier.threads, count) +
        placed(place);
    give_up();
  }
  barrier.threads = count;
  return barrier;
}

bool is_complete(const Barrier& barrier) {
  return static_cast<int>(barrier.waiting.size() + barrier.arrived.size()) == barrier.threads;
}

void meet_at_barrier(int number, int count, const void* place) {
  Barrier& barrier = barrier_at(number, count, place);
  barrier.waiting.push_back(current);
  if (!is_complete(barrier)) return wait();
  end_barrier(barrier);
}

void meet_at_cluster_barrier(const void* place) {
  arrive(State::kAtClusterBarrier, 0, 0, place);
  cluster_barrier.waiting.push_back(current);
  if (static_cast<int>(cluster_barrier.waiting.size()) < cluster_threads) return wait();
  end_barrier(cluster_barrier);
}

// ---- mailboxes -------------------------------------------------------------------------------------

// Adds what the present thread did before, and what its warp did before its lanes last met.
void leave(Joint& joint) {
  Fiber& fiber = fibers[current];
  joint.times.resize(cluster_threads);
  if (std::find(joint.from.begin(), joint.from.end(), fiber.known) == joint.from.end()) {
    joint.from.push_back(fiber.known);
    learn(joint.times, knowledge[fiber.known]);
  }
  const int first = current / kWarp * kWarp;
  for (int i = 0; i < kWarp; ++i) {
    joint.times[first + i] = std::max(joint.times[first + i], warps[current / kWarp].met[i]);
  }
  joint.times[current] = fiber.now++;
  latest = std::max(latest, fiber.now);
}

void take(Joint& joint) {
  Fiber& fiber = fibers[current];
  const auto [after, is_new] = joint.after.try_emplace(fiber.known, knowledge.size());
  if (is_new) {
    knowledge.push_back(knowledge[fiber.known]);
    learn(knowledge.back(), joint.times);
  }
  fiber.known = after->second;
}

// Counts as one of a barrier's threads, and goes on. The others learn what it has done.
void arrive_at_barrier(int number, int count, const void* place) {
  Barrier& barrier = barrier_at(number, count, place);
  fibers[current].state = State::kReady;
  if (std::find(barrier.arrived.begin(), barrier.arrived.end(), current) != barrier.arrived.end()) {
    report.message = here() + format("arrives at barrier %d twice, at ", number) + placed(place);
    give_up();
  }
  barrier.arrived.push_back(current);
  leave(barrier.before);
  if (is_complete(barrier)) end_barrier(barrier);
}

[[noreturn]] void report_mailbox(const std::string& what, const void* place) {
  report.message = here() + what + ", at " + placed(place);
  give_up();
}

void open_mailbox(Address address, const void* place) {
  Span& own = own_memory("opens a mailbox in", address, 8, place);
  check_granules(own, address, 8, true, place);
  for_each_granule(own, address, 8, [](Granule& g) { ++g.targets; });
  mailboxes[current_block][address].opened = access_at(place);
}

// Returns a block's mailbox at the place where the present block has its own.
Mailbox& mailbox_of(int block, Address address, const void* place) {
  const Span& own = own_memory("takes for a mailbox", address, 8, place);
  const auto found = mailboxes[block].find(shared_memory[block].begin + (address - own.begin));
  if (found == mailboxes[block].end()) report_mailbox("no mailbox is open there", place);
  Mailbox& mailbox = found->second;
  if (races(mailbox.opened)) {
    report_mailbox("the mailbox was opened with no barrier between", place);
  }
  return mailbox;
}

void wake_at_mailboxes(int block) {
  for (int i = block * threads; i < (block + 1) * threads; ++i) {
    if (fibers[i].state == State::kAtMailbox) fibers[i].state = State::kReady;
  }
}

void close_if_full(int block, Mailbox& mailbox) {
  if (!mailbox.expects || mailbox.missing != 0) return;
  for (const Sent& sent : mailbox.sent) {
    for_each_granule(shared_memory[block], sent.address, sent.bytes,
                     [](Granule& g) { --g.targets; });
  }
  mailbox.sent.clear();
  mailbox.was_full = std::move(mailbox.filled);
  mailbox.filled = Joint();
  mailbox.expects = false;
  ++mailbox.times_full;
  wake_at_mailboxes(block);
}

void expect_bytes(Address address, int bytes, const void* place) {
  Mailbox& mailbox = mailbox_of(current_block, address, place);
  if (mailbox.expects) report_mailbox("the mailbox already expects bytes", place);
  mailbox.expects = true;
  mailbox.missing += bytes;
  leave(mailbox.filled);
  close_if_full(current_block, mailbox);
}

void send_to_block(Address address, Address to_mailbox, int block, const void* value,
                   unsigned bytes, const void* place) {
  Span& own = own_memory("sends to", address, bytes, place);
  if (block < 0 || block >= cluster_blocks) {
    report_mailbox(format("sends to block %d of a cluster of %d", block, cluster_blocks), place);
  }
  if (running[block] == 0) {
    report_mailbox(format("sends to block %lld, which has ended", first_block + block), place);
  }
  Mailbox& mailbox = mailbox_of(block, to_mailbox, place);
  Span& memory = shared_memory[block];
  const Sent sent = {memory.begin + (address - own.begin), bytes, access_at(place)};
  check_granules(memory, sent.address, bytes, true, place);
  std::memcpy(reinterpret_cast<void*>(sent.address), value, bytes);
  for_each_granule(memory, sent.address, bytes, [](Granule& g) { ++g.targets; });
  mailbox.sent.push_back(sent);
  if (block != current_block) sent_from_outside[block][current] = sent.access;
  mailbox.missing -= static_cast<int>(bytes);
  leave(mailbox.filled);
  close_if_full(block, mailbox);
}

void copy_bulk(Address target, Address source, unsigned bytes, Address to_mailbox,
               const void* place) {
  count_events(1 + bytes / 16, place);
  Span& own = shared_memory[current_block];
  if (!own.holds(target, target + bytes)) {
    report_access("out of bounds: copies to", target, bytes, place);
  }
  if (target % 16 != 0 || bytes % 16 != 0) {
    report_access("misaligned: copies to", target, bytes, place);
  }
  if (source % 16 != 0) report_access("misaligned: copies from", source, bytes, place);
  Span* from = find_registered(source, source + bytes);
  if (from == nullptr) report_access("out of bounds: copies from", source, bytes, place);
  Mailbox& mailbox = mailbox_of(current_block, to_mailbox, place);
  if (!mailbox.expects) report_mailbox("a copy that the mailbox does not expect", place);
  check_granules(*from, source, bytes, false, place);
  check_granules(own, target, bytes, true, place);
  for_each_granule(*from, source, bytes, [](Granule& g) { ++g.sources; });
  for_each_granule(own, target, bytes, [](Granule& g) { ++g.targets; });
  mailbox.copies.push_back({{target, source, bytes, from, 0, place}, access_at(place)});
  leave(mailbox.filled);
  wake_at_mailboxes(current_block);
}

// Bulk copies arrive when a thread waits for them, and not sooner. A thread that reads them later,
// behind a barrier, is not asked whether it waited too.
void receive(Mailbox& mailbox) {
  for (const auto& [copy, access] : mailbox.copies) {
    std::memcpy(reinterpret_cast<void*>(copy.target), reinterpret_cast<const void*>(copy.source),
                copy.bytes);
    forget_source(copy);
    for_each_granule(shared_memory[current_block], copy.target, copy.bytes,
                     [](Granule& g) { --g.targets; });
    mailbox.missing -= static_cast<int>(copy.bytes);
  }
  mailbox.copies.clear();
  close_if_full(current_block, mailbox);
}

void wait_for_bytes(Address address, int parity, const void* place) {
  Mailbox& mailbox = mailbox_of(current_block, address, place);
  for (;;) {
    receive(mailbox);
    if (mailbox.times_full % 2 != parity) break;
    arrive(State::kAtMailbox, 0, 0, place);
    wait();
  }
  if (mailbox.times_full > 0) take(mailbox.was_full);
}

// ---- counts ----------------------------------------------------------------------------------------

// Returns a count in device memory: of arrivals, or of what was handed out.
std::uint32_t* count_at(Address address, const void* place) {
  Span* span = find_registered(address, address + 4);
  if (span == nullptr) report_access("out of bounds: counts in", address, 4, place);
  for_each_granule(*span, address, 4, [&](const Granule& granule) {
    if (span->lacks(granule)) report_access("uninitialized: counts in", address, 4, place);
  });
  return reinterpret_cast<std::uint32_t*>(address);
}

// A block must know of its last count. Otherwise the numbers that it gets need not grow.
int count_up(Address address, const void* place) {
  std::uint32_t* count = count_at(address, place);
  Access& last = counted[{address, current_block}];
  if (races(last)) report_access("race: counts up", address, 4, place, &last, "counted up");
  last = access_at(place);
  return static_cast<int>((*count)++);
}

void raise_to(Address address, float to, const void* place) {
  float number;
  std::memcpy(&number, count_at(address, place), sizeof(number));
  if (!(number >= 0 && to >= 0)) {
    report.message = here() + format("raises %g to %g, at ", number, to) + placed(place);
    give_up();
  }
  number = std::max(number, to);
  std::memcpy(count_at(address, place), &number, sizeof(number));
}

// Reports the arrival of a warp, once all its lanes are there.
void report_arrival(Address address, const void* place) {
  meet(State::kAtVote, 0, 0, 0, place);
  if (current % kWarp != 0) return;
  ++*count_at(address, place);
  Joint& joint = arrivals[address];
  leave(joint);
  joint.after.clear();
  const auto goes_on = [&](int thread) {
    const bool enough = *count_at(address, place) >= fibers[thread].expected;
    if (enough) fibers[thread].state = State::kReady;
    return enough;
  };
  auto& waiting = joint.waiting;
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), goes_on), waiting.end());
}

void wait_for_arrivals(Address address, std::uint32_t expected, const void* place) {
  if (*count_at(address, place) < expected) {
    arrive(State::kAtArrivals, 0, 0, place);
    fibers[current].expected = expected;
    arrivals[address].waiting.push_back(current);
    wait();
  }
  take(arrivals[address]);
}

// ---- clusters ------------------------------------------------------------------------------------

// Data that other blocks send to a block that ends may still be in flight, unless one of the
// block's threads knows that it has come.
void end_block() {
  const int first = current_block * threads;
  for (const auto& [address, mailbox] : mailboxes[current_block]) {
    if (mailbox.copies.empty()) continue;
    report.message = here() + "the block ends, and nobody waited for the copy at " +
                     placed(mailbox.copies.front().copy.place);
    give_up();
  }
  for (const auto& [thread, sent] : sent_from_outside[current_block]) {
    const auto knows = [&, thread = thread, time = sent.time](const Fiber& fiber) {
      return knowledge[fiber.known][thread] >= time;
    };
    if (std::none_of(fibers.begin() + first, fibers.begin() + first + threads, knows)) {
      report.message = here() +
                       format("the block ends, to which block %u, thread %u sends at ",
                              sent.thread / threads, sent.thread % threads) +
                       placed(sent.place) + " with no wait between";
      give_up();
    }
  }
}

void end_thread() {
  Fiber& fiber = fibers[current];
  for (const Copy& copy : fiber.copies) {
    if (copy.source_span == nullptr) continue;
    report.message = here() + "ends and did not wait for the copy at " + placed(copy.place);
    give_up();
  }
  fiber.state = State::kFinished;
  fiber.place = nullptr;
  fiber.detail = 0;
  if (--running[current_block] == 0) end_block();
}

// A fiber serves a thread of each cluster in turn.
void serve() {
  for (;;) {
    kernel(kernel_arguments);
    end_thread();
    wait();
  }
}

void resume(int thread) {
  current = thread, current_block = thread / threads;
  const int how = _setjmp(scheduler);
  if (how != 0) return;
  Fiber& fiber = fibers[current];
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Returns whether every thread of the present cluster has finished.
bool run_cluster() {
  for (Span& span : shared_memory) {
    std::memset(reinterpret_cast<void*>(span.begin), 0xff, span.end - span.begin);
    span.forget();
  }
  first_thread = static_cast<std::uint32_t>(first_block * threads);
  knowledge.assign(1, std::vector<Time>(cluster_threads, launched));
  for (int i = 0; i < cluster_threads / kWarp; ++i) {
    warps[i].arrived = 0;
    std::fill(warps[i].wrote, warps[i].wrote + kWarp, launched);
    std::fill(warps[i].met, warps[i].met + kWarp, launched);
  }
  cluster_barrier.waiting.clear();
  arrivals.clear();
  counted.clear();
  for (int block = 0; block < cluster_blocks; ++block) {
    for (Barrier& barrier : barriers[block]) barrier = {};
    running[block] = threads;
    sent_from_outside[block].clear();
    mailboxes[block].clear();
  }
  for (int i = 0; i < cluster_threads; ++i) {
    fibers[i].state = State::kReady;
    fibers[i].now = launched + 1;
    fibers[i].known = 0;
    fibers[i].collectives = 0;
    fibers[i].arrived = false;
    fibers[i].copies.clear();
    fibers[i].groups = 0;
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (int begin = 0; begin < cluster_threads; begin += turn_threads) {
      for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (int i = begin; i < begin + turn_threads; ++i) {
          if (fibers[i].state != State::kReady) continue;
          progress = goes_on = true;
          resume(i);
          if (!report.message.empty()) return false;
        }
      }
    }
  }
  for (int block = 0; block < cluster_blocks; ++block) {
    if (running[block] == 0) continue;
    report.message += report.message.empty() ? "" : "; ";
    report.message += format("block %lld: no thread can go on: ", first_block + block) +
                      describe_threads(block * threads, threads);
  }
  return report.message.empty();
}

// CuPy compiles with -ftz=true, so subnormal float32 operands and results count as zero. On the
// host this mode also affects float64. So kernels that compute in float64 run without it.
class FlushToZero {
 public:
  explicit FlushToZero(bool flush) {
    if (flush) _mm_setcsr(saved_ | 0x8040);
  }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

// A fault that no check foresees, such as an overrun of a local array through a pointer, ends the
// launch and not the tests.
class CatchFaults {
 public:
  CatchFaults() {
    alternate_.ss_sp = stack_;
    alternate_.ss_size = sizeof(stack_);
    alternate_.ss_flags = 0;
    sigaltstack(&alternate_, &saved_alternate_);
    struct sigaction action = {};
    action.sa_sigaction = report_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &action, &saved_[i]);
  }
  ~CatchFaults() {
    for (int i = 0; i < kSignals; ++i) sigaction(kNumbers[i], &saved_[i], nullptr);
    sigaltstack(&saved_alternate_, nullptr);
  }

 private:
  static constexpr int kSignals = 4;
  static constexpr int kNumbers[kSignals] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

  static void report_fault(int number, siginfo_t*, void* context) {
    const auto* at = static_cast<const ucontext_t*>(context);
    const char* instruction = reinterpret_cast<const char*>(at->uc_mcontext.gregs[REG_RIP]);
    report.message = here() + format("signal %d, at ", number) + placed(instruction + 1);
    give_up();
  }

  alignas(16) char stack_[64 << 10];
  stack_t alternate_ = {}, saved_alternate_ = {};
  struct sigaction saved_[kSignals];
};

}  // namespace

// ---- for device.cuh ------------------------------------------------------------------------------

namespace host {

// Which mutants would have done something else, and which one does: see mutants.hpp.
bool is_mutant(int number) {
  if (number >= static_cast<int>(mutants_asked.size())) mutants_asked.resize(number + 1);
  mutants_asked[number] = 1;
  return number == mutant;
}

int thread_index() { return current - current_block * threads; }
long long block_index() { return first_block + current_block; }
long long block_count() { return blocks; }
int block_in_cluster() { return current_block; }

void exchange(void* value, int bytes, int lane_mask) {
  std::uint64_t mine = 0;
  std::memcpy(&mine, value, bytes);
  if (lane_mask <= 0 || lane_mask >= kWarp) {
    report.message = here() + format("shuffles over %d lanes, at ", lane_mask) + placed(CALLER);
    give_up();
  }
  const std::uint64_t* slots = meet(State::kAtShuffle, mine, lane_mask, bytes, CALLER);
  std::memcpy(value, &slots[current % kWarp ^ lane_mask], bytes);
}

void from_first_lane(void* value, int bytes) {
  std::uint64_t mine = 0;
  std::memcpy(&mine, value, bytes);
  const std::uint64_t* slots = meet(State::kAtShuffle, mine, 0, bytes, CALLER);
  std::memcpy(value, &slots[0], bytes);
}

void from_lane_before(void* value, int bytes) {
  std::uint64_t mine = 0;
  std::memcpy(&mine, value, bytes);
  const std::uint64_t* slots = meet(State::kAtShuffle, mine, -1, bytes, CALLER);
  std::memcpy(value, &slots[std::max(current % kWarp - 1, 0)], bytes);
}

void warp_barrier() { meet(State::kAtWarpBarrier, 0, 0, 0, CALLER); }

bool any_in_warp(bool condition) {
  const std::uint64_t* slots = meet(State::kAtVote, condition, 0, 0, CALLER);
  return std::any_of(slots, slots + kWarp, [](std::uint64_t vote) { return vote != 0; });
}

void barrier(int barrier, int count) { meet_at_barrier(barrier, count, CALLER); }
void arrive_at_barrier(int barrier, int count) { ::arrive_at_barrier(barrier, count, CALLER); }
void block_barrier() { meet_at_barrier(0, threads, CALLER); }

void arrive_at_cluster_barrier() { fibers[current].arrived = true; }
void wait_at_cluster_barrier() {
  if (!fibers[current].arrived) {
    report.message =
        here() + "waits at the cluster's barrier without having arrived, at " + placed(CALLER);
    give_up();
  }
  fibers[current].arrived = false;
  meet_at_cluster_barrier(CALLER);
}

void* dynamic_shared_memory() {
  return reinterpret_cast<void*>(shared_memory[current_block].begin);
}

void open_mailbox(void* mailbox) { ::open_mailbox(reinterpret_cast<Address>(mailbox), CALLER); }
void expect_bytes(void* mailbox, int bytes) {
  ::expect_bytes(reinterpret_cast<Address>(mailbox), bytes, CALLER);
}
void send_to_block(void* shared, void* mailbox, int block, const void* value, int bytes) {
  ::send_to_block(reinterpret_cast<Address>(shared), reinterpret_cast<Address>(mailbox), block,
                  value, bytes, CALLER);
}
void wait_for_bytes(void* mailbox, int parity) {
  ::wait_for_bytes(reinterpret_cast<Address>(mailbox), parity, CALLER);
}

void report_arrival(unsigned* arrived) {
  ::report_arrival(reinterpret_cast<Address>(arrived), CALLER);
}
void wait_for_arrivals(const unsigned* arrived, unsigned expected) {
  ::wait_for_arrivals(reinterpret_cast<Address>(arrived), expected, CALLER);
}

void prefetch(const void* memory) { ::prefetch(reinterpret_cast<Address>(memory), CALLER); }
void loads_are_unused(bool unused) { unused_loads = unused; }
int count_up(int* count) { return ::count_up(reinterpret_cast<Address>(count), CALLER); }
void raise_to(float* number, float to) {
  ::raise_to(reinterpret_cast<Address>(number), to, CALLER);
}

void copy_bulk(void* shared, const void* global, int bytes, void* mailbox) {
  ::copy_bulk(reinterpret_cast<Address>(shared), reinterpret_cast<Address>(global), bytes,
              reinterpret_cast<Address>(mailbox), CALLER);
}

void copy_async(void* shared, const void* global, int bytes, bool valid) {
  begin_copy(reinterpret_cast<Address>(shared), reinterpret_cast<Address>(global), bytes, valid,
             CALLER);
}
void commit_copies() { ++fibers[current].groups; }
void wait_for_copies(int groups) { end_copies(groups, CALLER); }

}  // namespace host

// ---- for g++ -------------------------------------------------------------------------------------

extern "C" {

void choose_mutant(int number) {
  mutant = number;
  mutants_asked.clear();
}
bool mutant_asked(int number) {
  return number < static_cast<int>(mutants_asked.size()) && mutants_asked[number] != 0;
}

#define ACCESSES(bytes)                                                                           \
  void __tsan_read##bytes(void* memory) { check_aligned_access(memory, bytes, false, CALLER); }   \
  void __tsan_write##bytes(void* memory) { check_aligned_access(memory, bytes, true, CALLER); }   \
  void __tsan_unaligned_read##bytes(void* memory) { check_access(memory, bytes, false, CALLER); } \
  void __tsan_unaligned_write##bytes(void* memory) { check_access(memory, bytes, true, CALLER); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES

void __tsan_read_range(void* memory, long bytes) {
  check_access(memory, static_cast<unsigned>(bytes), false, CALLER);
}
void __tsan_write_range(void* memory, long bytes) {
  check_access(memory, static_cast<unsigned>(bytes), true, CALLER);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void __ubsan_handle_out_of_bounds(void*, void* index) {
  report.message =
      here() +
      format("index %td is outside a local array, at ", reinterpret_cast<std::ptrdiff_t>(index)) +
      placed(CALLER);
  give_up();
}

#define OVERFLOWS(operation)                                       \
  void __ubsan_handle_##operation(void*, void*, void*) {           \
    report.message = here() + #operation ", at " + placed(CALLER); \
    give_up();                                                     \
  }
OVERFLOWS(add_overflow)
OVERFLOWS(sub_overflow)
OVERFLOWS(mul_overflow)
OVERFLOWS(divrem_overflow)
OVERFLOWS(negate_overflow)
OVERFLOWS(shift_out_of_bounds)
#undef OVERFLOWS

// ---- for the loader --------------------------------------------------------------------------------

// Registers `count` runs of `bytes` bytes that kernels may touch, instead of any that lay there.
void register_spans(const Address* begins, long long count, long long bytes, int granule_bytes,
                    int initialized, const char* name) {
  for (long long i = 0; i < count; ++i) {
    const Address end = begins[i] + bytes;
    auto old = spans.upper_bound(begins[i]);
    while (old != spans.end() && old->second.begin < end) old = spans.erase(old);
    spans[end] = Span(begins[i], end, granule_bytes, initialized != 0, name);
  }
  last_hit = nullptr;
}

void forget_span(Address address) {
  const auto next = spans.upper_bound(address);
  if (next != spans.end() && next->second.begin <= address) spans.erase(next);
  last_hit = nullptr;
}

void forget_all_spans() {
  spans.clear();
  last_hit = nullptr;
}

// Is called before a launch. The range must be registered.
void set_to_zero(Address begin, long long bytes) {
  std::memset(reinterpret_cast<void*>(begin), 0, bytes);
  for_each_granule(*find_registered(begin, begin + bytes), begin, static_cast<unsigned>(bytes),
                   [](Granule& granule) { granule.written.time = 1; });
}

// Returns the first byte of a registered range that nothing wrote, or -1.
long long first_unwritten(Address begin, long long bytes) {
  const Span* span = find_registered(begin, begin + bytes);
  if (span == nullptr) return 0;
  for (Address i = (begin - span->begin) / span->granule_bytes;
       span->begin + i * span->granule_bytes < begin + bytes; ++i) {
    if (span->lacks(span->granules[i])) {
      return static_cast<long long>(span->begin + i * span->granule_bytes - begin);
    }
  }
  return -1;
}

// Returns 1 if the launch went well. Otherwise the report says why.
int launch(void (*call)(void**), long long grid, int block_threads, int blocks_in_cluster,
           int shared_bytes, void** arguments, int flush_to_zero, int apart) {
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kMaxFibers * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      report.message = "no memory for the stacks";
      return 0;
    }
    stacks = static_cast<char*>(memory);
  }
  report = Report();
  kernel = call, kernel_arguments = arguments;
  threads = block_threads, blocks = grid, cluster_blocks = blocks_in_cluster, events = 0;
  if (threads <= 0 || threads > kMaxThreads || threads % kWarp != 0 || grid <= 0) {
    report.message = format("a grid of %lld blocks of %d threads", grid, threads);
    return 0;
  }
  if (cluster_blocks <= 0 || cluster_blocks > kMaxClusterBlocks || grid % cluster_blocks != 0) {
    report.message = format("a grid of %lld blocks in clusters of %d", grid, cluster_blocks);
    return 0;
  }
  cluster_threads = cluster_blocks * threads;
  turn_threads = apart ? threads : cluster_threads;
  std::vector<std::vector<std::uint64_t>> words(cluster_blocks,
                                                std::vector<std::uint64_t>(shared_bytes / 8 + 17));
  for (int block = 0; block < cluster_blocks; ++block) {
    const Address aligned = (reinterpret_cast<Address>(words[block].data()) + 127) / 128 * 128;
    const char* name =
        cluster_blocks == 1 ? "shared memory" : "shared memory of block %d of the cluster";
    shared_memory.emplace_back(aligned, aligned + shared_bytes, 4, false, format(name, block));
  }
  const FlushToZero mode(flush_to_zero != 0);  // before the contexts, which save it
  if (fibers.size() < static_cast<std::size_t>(cluster_threads)) fibers.resize(cluster_threads);
  for (int i = 0; i < cluster_threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.started = false;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks + i * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, serve, 0);
  }
  const CatchFaults faults;
  launched = ++latest;
  ++latest;
  for (first_block = 0; first_block < grid; first_block += cluster_blocks) {
    if (!run_cluster()) break;
  }
  for (int i = 0; i < cluster_threads; ++i) {
    for (const Copy& copy : fibers[i].copies) forget_source(copy);
    fibers[i].copies.clear();
  }
  shared_memory.clear();
  return report.message.empty();
}

const char* report_message() { return report.message.c_str(); }
int report_places() { return static_cast<int>(report.places.size()); }
// A place of the report: its library, and the position of the access or call in it.
const char* report_library(int place) {
  Dl_info info;
  return dladdr(report.places[place], &info) != 0 ? info.dli_fname : "";
}
long long report_offset(int place) {
  Dl_info info;
  if (dladdr(report.places[place], &info) == 0) return 0;
  // The address is that of the next instruction.
  return static_cast<const char*>(report.places[place]) - static_cast<const char*>(info.dli_fbase) -
         1;
}
}
