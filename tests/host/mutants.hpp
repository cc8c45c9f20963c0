
// Mutants have these in the kernels' text (mutants.py). A number stands for each mutant.
// `host::is_mutant` is asked only where the mutant would act differently, and never by the
// compiler.
namespace host {
bool is_mutant(int number);
}
namespace mutants {

#define MUTANTS_INLINE inline __attribute__((always_inline))

MUTANTS_INLINE constexpr bool is(int number) {
  return __builtin_is_constant_evaluated() ? false : host::is_mutant(number);
}
template <typename T>
MUTANTS_INLINE constexpr auto negated(T value) {
  return -value;
}
// A NaN counts as the same as itself here.
template <typename T>
MUTANTS_INLINE constexpr bool same(T a, T b) {
  return a == b || (a != a && b != b);
}
MUTANTS_INLINE constexpr bool same(OwnPlace a, OwnPlace b) { return a.address == b.address; }
template <int Number, typename T>
MUTANTS_INLINE constexpr T either(T original, T mutant) {
  if (Number < 0 || __builtin_is_constant_evaluated() || same(original, mutant)) return original;
  return host::is_mutant(Number) ? mutant : original;
}

// Infix comes after an infix operator: `a < Infix<0, -1>() < b` is `a < b`, or `a <= b` by mutant
// 0.
template <int First, int Second>
struct Infix {};
template <typename OfMutants, typename T>
struct Left {
  T value;
};

#define MUTANTS_INFIX(SIGN, ORIGINAL, FIRST, SECOND)                                           \
  template <int First, int Second, typename A>                                                 \
  MUTANTS_INLINE constexpr Left<Infix<First, Second>, A> operator SIGN(A a,                    \
                                                                       Infix<First, Second>) { \
    return {a};                                                                                \
  }                                                                                            \
  template <int First, int Second, typename A, typename B>                                     \
  MUTANTS_INLINE constexpr auto operator SIGN(Left<Infix<First, Second>, A> left, B b) {       \
    const A a = left.value;                                                                    \
    using T = decltype(ORIGINAL);                                                              \
    return either<Second, T>(either<First, T>(ORIGINAL, FIRST), SECOND);                       \
  }
MUTANTS_INFIX(<, a < b, a <= b, a < b)
MUTANTS_INFIX(<=, a <= b, a < b, a <= b)
MUTANTS_INFIX(>, a > b, a >= b, a > b)
MUTANTS_INFIX(>=, a >= b, a > b, a >= b)
MUTANTS_INFIX(==, a == b, a != b, a == b)
MUTANTS_INFIX(!=, a != b, a == b, a != b)
MUTANTS_INFIX(+, a + b, a, a + negated(b))
MUTANTS_INFIX(-, a - b, a, a + b)
MUTANTS_INFIX(*, a* b, a, a* b)
MUTANTS_INFIX(/, a / b, a, a / b)
MUTANTS_INFIX(%, a % b, a, a % b)
MUTANTS_INFIX(<<, a << b, a, a << b)
MUTANTS_INFIX(>>, a >> b, a, a >> b)
MUTANTS_INFIX(&, a& b, a, a& b)
MUTANTS_INFIX(|, a | b, a, a | b)
MUTANTS_INFIX(^, a ^ b, a, a ^ b)

// `-Sign<0>() * a` is `-a`, or `a` by mutant 0.
template <int Number>
struct Sign {};
template <int Number>
struct Minus {};
template <int Number>
MUTANTS_INLINE constexpr Minus<Number> operator-(Sign<Number>) {
  return {};
}
template <int Number, typename A>
MUTANTS_INLINE constexpr auto operator*(Minus<Number>, A a) {
  return either<Number, decltype(-a)>(-a, a);
}

// Conditions, and sides of choices.
template <int Number>
MUTANTS_INLINE constexpr bool turned(bool condition) {
  return is(Number) != condition;
}
template <int Number>
MUTANTS_INLINE constexpr bool always(bool condition) {
  return condition || is(Number);
}
template <int Number>
MUTANTS_INLINE constexpr bool never(bool condition) {
  return condition && !is(Number);
}

// Calls of a function. The function comes as an argument.
template <int Number, typename Function, typename T>
MUTANTS_INLINE constexpr T smaller(Function larger, T a, T b) {
  return either<Number, T>(larger(a, b), a < b ? a : b);
}
template <int Number, typename Function, typename T>
MUTANTS_INLINE constexpr T product(Function fused_multiply_add, T a, T b, T c) {
  return either<Number, T>(fused_multiply_add(a, b, c), a * b);
}
template <int Number, typename Function, typename T, typename... Others>
MUTANTS_INLINE constexpr T itself(Function function, T value, Others... others) {
  return either<Number, T>(function(value, others...), value);
}

}  // namespace mutants
