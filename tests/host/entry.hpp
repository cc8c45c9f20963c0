// What the loader finds of a compiled kernel: ENTRY, of a name and an instantiation, makes a function
// that calls it and one that tells the bytes of its argument, a struct, which comes as cuLaunchKernel
// takes it, by its address.

namespace {
// The address is the loader's memory, which is none of a kernel's.
template <typename Arguments>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Arguments), void** arguments) {
  kernel(*static_cast<Arguments*>(arguments[0]));
}
template <typename Arguments>
constexpr int bytes_of(void (*)(Arguments)) {
  return static_cast<int>(sizeof(Arguments));
}
}  // namespace

#define ENTRY(NAME, ...)                                                           \
  extern "C" void call_##NAME(void** arguments) { call(&__VA_ARGS__, arguments); } \
  extern "C" int bytes_of_##NAME() { return bytes_of(&__VA_ARGS__); }

#ifdef COVERAGE
extern "C" {
void __gcov_dump();
void write_coverage() { __gcov_dump(); }
}
#endif
