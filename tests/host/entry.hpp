// What the loader finds of a compiled kernel: ENTRY, of a name and an instantiation, makes a function
// that calls it and one that tells the bytes of each parameter, 0 past the last. Its arguments come as
// cuLaunchKernel takes them, an address each.
#include <utility>

namespace {
// The addresses are the loader's memory, which is none of a kernel's.
template <typename... Parameters, std::size_t... Index>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void** arguments,
                                                 std::index_sequence<Index...>) {
  kernel(*static_cast<Parameters*>(arguments[Index])...);
}

template <typename... Parameters>
struct Signature {
  static void call_with(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
  }
  static int bytes_of(int index) {
    constexpr int kBytes[] = {static_cast<int>(sizeof(Parameters))...};
    return index < static_cast<int>(sizeof...(Parameters)) ? kBytes[index] : 0;
  }
};
template <typename... Parameters>
Signature<Parameters...> signature_of(void (*)(Parameters...));
}  // namespace

#define ENTRY(NAME, ...)                                                      \
  extern "C" void call_##NAME(void** arguments) {                             \
    decltype(signature_of(&__VA_ARGS__))::call_with(&__VA_ARGS__, arguments); \
  }                                                                           \
  extern "C" int bytes_of_##NAME(int index) {                                 \
    return decltype(signature_of(&__VA_ARGS__))::bytes_of(index);             \
  }

#ifdef COVERAGE
extern "C" {
void __gcov_dump();
void write_coverage() { __gcov_dump(); }
}
#endif
