// What the loader finds of a compiled kernel. ENTRY takes a name and an instantiation, and makes
// two functions. One calls the kernel. Its argument is a struct, which comes by its address, as for
// cuLaunchKernel. The other returns the bytes of the argument.

namespace {
// The address is in the loader's memory, which belongs to no kernel.
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
