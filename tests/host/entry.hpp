// What the loader finds in a compiled kernel: KERNEL, an instantiation, and its parameters. Its
// arguments come as cuLaunchKernel takes them, an address each.
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
using KernelSignature = decltype(signature_of(&KERNEL));
}  // namespace

extern "C" {
void call_kernel(void** arguments) { KernelSignature::call_with(&KERNEL, arguments); }
// 0 past the last parameter.
int parameter_bytes(int index) { return KernelSignature::bytes_of(index); }

#ifdef COVERAGE
void __gcov_dump();
void write_coverage() { __gcov_dump(); }
#endif
}
