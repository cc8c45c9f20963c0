// Runs a kernel on the host, a fiber for each thread of a block, and checks every access to memory.
//
// Kernels are compiled with -fsanitize=thread and the like, by which g++ calls a function before
// each access; those functions are defined here, in place of the sanitizers' own. Memory that a
// kernel may touch is registered in spans, each with a shadow: who wrote and read every granule
// last, and when. From it follow accesses out of bounds, reads of what nothing wrote, and races.
//
// Fibers run in the order of their indices, each until it has to wait: nothing depends on time. The
// first problem ends the launch and is reported; nothing is written out of bounds, nothing hangs.
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
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

using Address = std::uintptr_t;
// Counts the stretches of a thread between its barriers. 0 is never, 1 is before any launch.
using Time = std::uint32_t;

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kBarriers = 16;
constexpr std::size_t kStackBytes = 256 << 10;
constexpr long long kMaxEvents = 100'000'000;  // of a launch; beyond, a loop does not end

// ---- what is known of memory -------------------------------------------------------------------

struct Access {
  Time time = 0;
  std::uint32_t thread = 0;  // of the grid
  const void* place = nullptr;
};

// Two readers are enough to see a race: barriers order all threads of a team, or none.
struct Granule {
  Access written, read[2];
};

struct Span {
  Address begin = 0, end = 0;
  Address granule_bytes = 1;
  std::string name;
  std::vector<Granule> granules;

  Span() = default;
  Span(Address begin, Address end, Address granule_bytes, bool initialized, std::string name)
      : begin(begin), end(end), granule_bytes(granule_bytes), name(std::move(name)) {
    Granule granule;
    granule.written.time = initialized ? 1 : 0;
    granules.assign((end - begin + granule_bytes - 1) / granule_bytes, granule);
  }
  bool holds(Address first, Address last) const { return begin <= first && last <= end; }
};

std::map<Address, Span> spans;  // by their ends
Span* last_hit = nullptr;
Span shared;

Span* find(Address first, Address last) {
  if (last_hit != nullptr && last_hit->holds(first, last)) return last_hit;
  if (shared.holds(first, last)) return &shared;
  const auto next = spans.upper_bound(first);
  if (next == spans.end() || !next->second.holds(first, last)) return nullptr;
  return last_hit = &next->second;
}

// ---- threads -------------------------------------------------------------------------------------

enum class State { kReady, kAtShuffle, kAtVote, kAtBarrier, kFinished };

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  bool started = false;
  State state = State::kFinished;
  const void* place = nullptr;  // where it waits
  int detail = 0;               // the shuffle's distance or the barrier's number
  int bytes = 0;                // of a shuffle's value
  int collectives = 0;
  Time now = 0;
  std::size_t known = 0;  // what other threads did, as an index of `knowledge`
};

// A lane may enter the next collective before the slowest has read of this one: two sets of slots.
struct Warp {
  int arrived = 0;
  std::uint64_t slots[2][kWarp];
};

struct Barrier {
  int threads = 0;
  std::vector<int> waiting;
};

std::vector<Fiber> fibers(kMaxThreads);
std::vector<Warp> warps(kMaxThreads / kWarp);
Barrier barriers[kBarriers];
// By thread, the last time of its own that a barrier has made visible. Threads that met at a
// barrier share one.
std::vector<std::vector<Time>> knowledge;

char* stacks = nullptr;
jmp_buf scheduler;
int threads = 0, current = -1;
long long block = 0, blocks = 0, events = 0;
Time launched = 1, latest = 1;
void (*kernel)(void**) = nullptr;
void** kernel_arguments = nullptr;

// ---- reports ---------------------------------------------------------------------------------------

struct Report {
  std::string message;  // names a place by {0}, {1}, ...
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

std::string here() { return format("block %lld, thread %d: ", block, current); }

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
  consider(shared);
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
                                const char* others = "") {
  report.message =
      here() + format("%s %u bytes", what, bytes) + describe(address) + ", at " + placed(place);
  if (other != nullptr) {
    report.message += format(", which block %u, thread %u %s ", other->thread / threads,
                             other->thread % threads, others);
    report.message += "at " + placed(other->place) + " with no barrier between";
  }
  give_up();
}

// Whether no barrier lies between an earlier access and the present thread. Blocks know nothing of
// one another; launches are in order.
bool races(const Access& earlier) {
  if (earlier.time <= launched) return false;
  if (earlier.thread / threads != block) return true;
  const int other = static_cast<int>(earlier.thread % threads);
  return other != current && knowledge[fibers[current].known][other] < earlier.time;
}

void count_events(int count, const void* place) {
  if ((events += count) > kMaxEvents) {
    report.message = here() + "does not end, at " + placed(place);
    give_up();
  }
}

void check_access(const void* memory, unsigned bytes, bool write, const void* place) {
  const Address address = reinterpret_cast<Address>(memory);
  if (address - reinterpret_cast<Address>(stacks) < kMaxThreads * kStackBytes) return;
  count_events(1, place);
  Span* span = find(address, address + bytes);
  if (span == nullptr) {
    report_access(write ? "out of bounds: writes" : "out of bounds: reads", address, bytes, place);
  }
  Access access;
  access.time = fibers[current].now;
  access.thread = static_cast<std::uint32_t>(block * threads + current);
  access.place = place;
  const Address first = (address - span->begin) / span->granule_bytes;
  const Address last = (address + bytes - 1 - span->begin) / span->granule_bytes;
  for (Address i = first; i <= last; ++i) {
    Granule& granule = span->granules[i];
    if (!write && granule.written.time == 0) {
      report_access("uninitialized: reads", address, bytes, place);
    }
    if (races(granule.written)) {
      report_access(write ? "race: writes" : "race: reads", address, bytes, place, &granule.written,
                    "wrote");
    }
    if (write) {
      for (const Access& read : granule.read) {
        if (races(read)) report_access("race: writes", address, bytes, place, &read, "read");
      }
      granule.written = access;
    } else {
      if (granule.read[0].thread != access.thread) granule.read[1] = granule.read[0];
      granule.read[0] = access;
    }
  }
}

// ---- waiting -------------------------------------------------------------------------------------

const char* name_of(State state) {
  switch (state) {
    case State::kAtShuffle:
      return "wait in a shuffle of distance";
    case State::kAtVote:
      return "wait in a vote";
    case State::kAtBarrier:
      return "wait at barrier";
    default:
      return "have finished";
  }
}

// Who waits where, threads of the same fate together.
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
    text += format("threads %d to %d %s", begin, end - 1, name_of(fiber.state));
    if (fiber.state == State::kAtShuffle) text += format(" %d", fiber.detail);
    if (fiber.state == State::kAtBarrier) {
      text += format(" %d of %d threads", fiber.detail, barriers[fiber.detail].threads);
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

// All lanes leave `mine` in the present slots and go on once the last one has.
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
  for (int i = first; i < first + kWarp; ++i) fibers[i].state = State::kReady;
  warp.arrived = 0;
  return slots;
}

void meet_at_barrier(int number, int count, const void* place) {
  arrive(State::kAtBarrier, number, 0, place);
  if (number < 0 || number >= kBarriers || count <= 0 || count % kWarp != 0 || count > threads) {
    report.message =
        here() + format("no barrier %d of %d threads, at ", number, count) + placed(place);
    give_up();
  }
  Barrier& barrier = barriers[number];
  if (!barrier.waiting.empty() && barrier.threads != count) {
    report.message =
        here() +
        format("barrier %d is of %d threads, and of %d at ", number, barrier.threads, count) +
        placed(place);
    give_up();
  }
  barrier.threads = count;
  barrier.waiting.push_back(current);
  if (static_cast<int>(barrier.waiting.size()) < count) return wait();
  // What one knew all know, and what each has done.
  std::vector<Time> joined = knowledge[fibers[current].known];
  std::size_t merged = fibers[current].known;
  for (int i : barrier.waiting) {
    if (fibers[i].known == merged) continue;
    merged = fibers[i].known;
    for (int j = 0; j < threads; ++j) joined[j] = std::max(joined[j], knowledge[merged][j]);
  }
  for (int i : barrier.waiting) {
    joined[i] = fibers[i].now++;
    latest = std::max(latest, fibers[i].now);
    fibers[i].known = knowledge.size();
    fibers[i].state = State::kReady;
  }
  knowledge.push_back(std::move(joined));
  barrier.waiting.clear();
}

// ---- blocks --------------------------------------------------------------------------------------

// A fiber serves a thread of each block in turn.
void serve() {
  for (;;) {
    kernel(kernel_arguments);
    fibers[current].state = State::kFinished;
    fibers[current].place = nullptr;
    fibers[current].detail = 0;
    wait();
  }
}

void resume() {
  const int how = _setjmp(scheduler);
  if (how != 0) return;
  Fiber& fiber = fibers[current];
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Returns whether every thread of the present block has finished.
bool run_block() {
  std::memset(reinterpret_cast<void*>(shared.begin), 0xff, shared.end - shared.begin);
  std::fill(shared.granules.begin(), shared.granules.end(), Granule());
  knowledge.assign(1, std::vector<Time>(threads, launched));
  for (Warp& warp : warps) warp.arrived = 0;
  for (Barrier& barrier : barriers) barrier.waiting.clear();
  for (int i = 0; i < threads; ++i) {
    fibers[i].state = State::kReady;
    fibers[i].now = launched + 1;
    fibers[i].known = 0;
    fibers[i].collectives = 0;
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].state != State::kReady) continue;
      progress = true;
      current = i;
      resume();
      if (!report.message.empty()) return false;
    }
  }
  const auto finished = [](const Fiber& fiber) { return fiber.state == State::kFinished; };
  if (std::all_of(fibers.begin(), fibers.begin() + threads, finished)) return true;
  report.message =
      format("block %lld: no thread can go on: ", block) + describe_threads(0, threads);
  return false;
}

// CuPy compiles with -ftz=true: subnormal float32 operands and results count as zero. On the host
// the mode holds for float64 as well, so that kernels which compute in float64 run without it.
class FlushToZero {
 public:
  explicit FlushToZero(bool flush) {
    if (flush) _mm_setcsr(saved_ | 0x8040);
  }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_ = _mm_getcsr();
};

// What no check foresees, such as an overrun of a local array through a pointer, ends the launch and
// not the tests.
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

int thread_index() { return current; }
long long block_index() { return block; }
long long block_count() { return blocks; }

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

bool any_in_warp(bool condition) {
  const std::uint64_t* slots = meet(State::kAtVote, condition, 0, 0, CALLER);
  return std::any_of(slots, slots + kWarp, [](std::uint64_t vote) { return vote != 0; });
}

void barrier(int barrier, int count) { meet_at_barrier(barrier, count, CALLER); }
void block_barrier() { meet_at_barrier(0, threads, CALLER); }

void* dynamic_shared_memory() { return reinterpret_cast<void*>(shared.begin); }

}  // namespace host

// ---- for g++ -------------------------------------------------------------------------------------

extern "C" {

#define ACCESSES(bytes)                                                                           \
  void __tsan_read##bytes(void* memory) { check_access(memory, bytes, false, CALLER); }           \
  void __tsan_write##bytes(void* memory) { check_access(memory, bytes, true, CALLER); }           \
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

void __ubsan_handle_type_mismatch_v1(void*, void* memory) {
  report.message = here() + "misaligned: reads or writes" +
                   describe(reinterpret_cast<Address>(memory)) + ", at " + placed(CALLER);
  give_up();
}
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

// `count` runs of `bytes` bytes that kernels may touch.
void register_spans(const Address* begins, long long count, long long bytes, int granule_bytes,
                    int initialized, const char* name) {
  for (long long i = 0; i < count; ++i) {
    const Address end = begins[i] + bytes;
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

// The first byte of a registered range that nothing wrote, or -1.
long long first_unwritten(Address begin, long long bytes) {
  const Span* span = find(begin, begin + bytes);
  if (span == nullptr) return 0;
  for (Address i = (begin - span->begin) / span->granule_bytes;
       span->begin + i * span->granule_bytes < begin + bytes; ++i) {
    if (span->granules[i].written.time == 0) {
      return static_cast<long long>(span->begin + i * span->granule_bytes - begin);
    }
  }
  return -1;
}

// Returns 1 if the launch went well; if not, the report says why.
int launch(void (*call)(void**), long long grid, int block_threads, int shared_bytes,
           void** arguments, int flush_to_zero) {
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      report.message = "no memory for the stacks";
      return 0;
    }
    stacks = static_cast<char*>(memory);
  }
  report = Report();
  kernel = call, kernel_arguments = arguments;
  threads = block_threads, blocks = grid, events = 0;
  if (threads <= 0 || threads > kMaxThreads || threads % kWarp != 0 || grid <= 0) {
    report.message = format("a grid of %lld blocks of %d threads", grid, threads);
    return 0;
  }
  std::vector<std::uint64_t> words(shared_bytes / 8 + 3);
  const Address aligned = (reinterpret_cast<Address>(words.data()) + 15) / 16 * 16;
  shared = Span(aligned, aligned + shared_bytes, 4, false, "shared memory");
  const FlushToZero mode(flush_to_zero != 0);  // before the contexts, which save it
  for (int i = 0; i < threads; ++i) {
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
  for (block = 0; block < grid; ++block) {
    if (!run_block()) break;
  }
  shared = Span();
  return report.message.empty();
}

const char* report_message() { return report.message.c_str(); }
int report_places() { return static_cast<int>(report.places.size()); }
// A place of the report: its library, and where in it the access or the call is.
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
