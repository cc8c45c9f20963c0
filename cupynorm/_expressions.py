"""Python functions as programs of elementwise steps: traced once, evaluated, differentiated.

A program keeps the order in which a function adds and multiplies, so the compute dtype rounds as
the function says. It is data: equal if the steps are equal, and easy to pickle. Its gradient is a
program too, made in reverse, and some times as long.

SymPy would do this in less code of ours. But it takes values for real numbers: it distributes
(x - r) / 3 into two terms that cancel, and a derivative's length doubles with each level.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import numbers
import operator
import reprlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "COMPARISONS",
    "Expression",
    "Program",
    "as_condition",
    "as_expression",
    "functions",
    "gradients",
    "kind_of",
    "of_numpy",
    "trace",
]

_REAL = numbers.Real, ml_dtypes.bfloat16
Step = tuple[str, tuple[Any, ...]]  # an operation, and the numbers of its operands

ARITHMETIC = frozenset(("add", "subtract", "multiply", "divide"))
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
CONDITIONS = frozenset((*COMPARISONS, "and", "or", "not"))
SHOWN = {
    **{"add": "({} + {})", "subtract": "({} - {})", "multiply": "({} * {})"},
    **{"divide": "({} / {})", "power": "({} ** {})", "negative": "(-{})"},
    **{"less": "({} < {})", "less_equal": "({} <= {})", "greater": "({} > {})"},
    **{"greater_equal": "({} >= {})", "equal": "({} == {})", "not_equal": "({} != {})"},
    **{"and": "({} & {})", "or": "({} | {})", "not": "(~{})"},
}
MOST_SHOWN = 500  # characters of an operation: what is used twice would be written twice


@dataclass(frozen=True, eq=False)
class Program:
    """Values of an elementwise function.

    The values are numbered: first the arguments, then those of the steps. The step "number" has a
    float in place of an operand.
    """

    arguments: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @property
    def _key(self) -> str:
        return repr((self.arguments, self.steps, self.results))  # -0.0 is another number than 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def evaluate(self, tools: Any, like: Any, arguments: Any) -> list[Any]:
        """Return the results, by the functions of `tools`, of arguments by their order.

        `tools.number` makes an array of a number, in the dtype of `like`.
        """
        values = list(arguments)
        for operation, operands in self.steps:
            if operation == "number":
                values.append(operands[0])
                continue
            of = [values[i] for i in operands]
            # Two numbers make no array of the dtype, so they are made arrays first.
            if operation not in ARITHMETIC or all(isinstance(v, float) for v in of):
                of = [tools.number(v, like) if isinstance(v, float) else v for v in of]
            values.append(tools.functions[operation](*of))
        return [values[i] for i in self.results]

    def copies(self) -> list[bool]:
        """Tell which results are an argument itself, or another result again."""
        return [
            place < len(self.arguments) or place in self.results[:i]
            for i, place in enumerate(self.results)
        ]

    def __str__(self) -> str:
        texts = list(self.arguments)
        for operation, operands in self.steps:
            if operation == "number":
                number = repr(operands[0]).removesuffix(".0")
                texts.append(f"({number})" if number.startswith("-") else number)
            else:
                of = [texts[i] for i in operands]
                call = f"{operation}({', '.join(of)})"
                text = SHOWN[operation].format(*of) if operation in SHOWN else call
                texts.append(text if len(text) <= MOST_SHOWN else "(...)")
        shown = ", ".join(_without_parentheses(texts[i]) for i in self.results)
        return f"lambda {', '.join(self.arguments)}: " + (
            shown if len(self.results) == 1 else f"({shown})"
        )


def _without_parentheses(text: str) -> str:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i + 1 < len(text):
            return text
    return text[1:-1] if text.startswith("(") else text


# ---- what a function is called with --------------------------------------------------------------


class Untraceable(TypeError):
    """An operation that has no place in a program. Its text says what to write instead."""


class _Builder:
    """The steps of a program in the making. Equal steps are one."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self.arguments = arguments
        self.steps: list[Step] = []
        self._places: dict[tuple[str, str], int] = {}

    def argument(self, name: str) -> Expression:
        return Expression(self, self.arguments.index(name))

    def number(self, value: float) -> Expression:
        return self._step("number", (value,))

    def made(self, operation: str, *operands: Expression) -> Expression:
        for operand in operands:
            self.check_own(operand)
        return self._step(operation, tuple(operand.place for operand in operands))

    def check_own(self, value: Expression) -> None:
        if value.builder is not self:
            raise Untraceable("a value of another function has no place in this one")

    def _step(self, operation: str, operands: tuple[Any, ...]) -> Expression:
        # In words, since 0.0 equals -0.0, and a NaN nothing.
        key = operation, repr(operands)
        if key not in self._places:
            self._places[key] = len(self.arguments) + len(self.steps)
            self.steps.append((operation, operands))
        return Expression(self, self._places[key])

    def program(self, results: tuple[Expression, ...]) -> Program:
        """Return the program of the steps that results need."""
        for result in results:
            self.check_own(result)
        count = len(self.arguments)
        needed, pending = set(), [result.place for result in results]
        while pending:
            place = pending.pop()
            if place >= count and place not in needed:
                needed.add(place)
                operation, operands = self.steps[place - count]
                pending += () if operation == "number" else operands
        places = {i: i for i in range(count)}
        places |= {place: count + i for i, place in enumerate(sorted(needed))}
        steps = []
        for place in sorted(needed):
            operation, operands = self.steps[place - count]
            moved = operands if operation == "number" else tuple(places[i] for i in operands)
            steps.append((operation, moved))
        return Program(self.arguments, tuple(steps), tuple(places[r.place] for r in results))


class Expression:
    """A value of a program in the making: what a traced function is called with, and makes."""

    __array_ufunc__ = None  # NumPy's numbers leave the operation to this class
    __slots__ = ("builder", "place")

    def __init__(self, builder: _Builder, place: int) -> None:
        self.builder = builder
        self.place = place

    @property
    def step(self) -> Step | None:
        """The step that makes the value; None of an argument."""
        i = self.place - len(self.builder.arguments)
        return None if i < 0 else self.builder.steps[i]

    @property
    def is_condition(self) -> bool:
        return self.step is not None and self.step[0] in CONDITIONS

    def check_number(self) -> None:
        if self.is_condition:
            raise Untraceable(
                "a comparison is no number: write cupynorm.math.where(comparison, 1, 0)"
            )

    def _with(self, operation: str, other: Any, *, swapped: bool = False) -> Any:
        if isinstance(other, Expression):
            second = other
        elif isinstance(other, _REAL) and not isinstance(other, bool):
            second = self.builder.number(_to_float(other))
        else:
            raise Untraceable(
                f"an argument cannot be combined with a {kind_of(other)}: give what differs from "
                "call to call a name, as a further argument"
            )
        if operation not in ("and", "or"):
            self.check_number()
            second.check_number()
        pair = (second, self) if swapped else (self, second)
        return self.builder.made(operation, *pair)

    def __add__(self, other: Any) -> Any:
        return self._with("add", other)

    def __radd__(self, other: Any) -> Any:
        return self._with("add", other, swapped=True)

    def __sub__(self, other: Any) -> Any:
        return self._with("subtract", other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("subtract", other, swapped=True)

    def __mul__(self, other: Any) -> Any:
        return self._with("multiply", other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("multiply", other, swapped=True)

    def __truediv__(self, other: Any) -> Any:
        return self._with("divide", other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with("divide", other, swapped=True)

    def __pow__(self, other: Any) -> Any:
        self.check_number()
        # Small whole powers are products, as torch, JAX and NumPy compute them.
        if isinstance(other, _REAL) and not isinstance(other, bool):
            power = _to_float(other)
            if power in (1, 2, 3):
                return functools.reduce(operator.mul, [self] * int(power))
            if power == -1:
                return 1 / self
            if power == 0.5:
                return self.builder.made("sqrt", self)
            if power == 0:
                return self.builder.number(1.0)
        return self._with("power", other)

    def __rpow__(self, other: Any) -> Any:
        return self._with("power", other, swapped=True)

    def __neg__(self) -> Any:
        self.check_number()
        return self.builder.made("negative", self)

    def __pos__(self) -> Any:
        self.check_number()
        return self

    def __abs__(self) -> Any:
        self.check_number()
        return self.builder.made("abs", self)

    def __lt__(self, other: Any) -> Any:
        return self._with("less", other)

    def __le__(self, other: Any) -> Any:
        return self._with("less_equal", other)

    def __gt__(self, other: Any) -> Any:
        return self._with("greater", other)

    def __ge__(self, other: Any) -> Any:
        return self._with("greater_equal", other)

    def __eq__(self, other: Any) -> Any:
        return self._with("equal", other)

    def __ne__(self, other: Any) -> Any:
        return self._with("not_equal", other)

    __hash__ = None  # type: ignore[assignment]  # an equality is a value here

    def __and__(self, other: Any) -> Any:
        return as_condition(self)._with("and", as_condition(other))

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return as_condition(self)._with("or", as_condition(other))

    __ror__ = __or__

    def __invert__(self) -> Any:
        return self.builder.made("not", as_condition(self))

    def __bool__(self) -> bool:
        raise Untraceable(
            "a branch would be taken for all elements at once: write "
            "cupynorm.math.where(condition, x, other), with & | ~ between comparisons"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Untraceable(
            "NumPy's functions take arrays. A sum, a mean or a maximum over elements has no place "
            "here, and for functions of an element there is cupynorm.math"
        )

    def __float__(self) -> float:
        raise Untraceable("an argument has no value yet: use the functions of cupynorm.math")

    __int__ = __index__ = __complex__ = __float__

    def __setitem__(self, *_: Any) -> None:
        raise Untraceable("an argument cannot be written to: return an expression of it")

    def __getitem__(self, _: Any) -> Any:
        raise Untraceable("an argument is one element: it has no index")

    __iter__ = None

    def __floordiv__(self, _: Any) -> Any:
        raise Untraceable("// and % are not among the operations: use + - * / **")

    __rfloordiv__ = __mod__ = __rmod__ = __floordiv__


def _to_float(value: Any) -> float:
    """Return a real number as a float."""
    try:
        return float(value)
    except OverflowError:
        raise Untraceable(f"{reprlib.repr(value)} is out of the range of float64") from None


def as_expression(name: str, value: Any, builder: _Builder | None) -> Expression:
    """Return an operand of a function of `cupynorm.math`. One of its operands has the builder."""
    if isinstance(value, Expression):
        if value.is_condition:
            raise Untraceable(f"{name} must be a number, got a comparison: use it in where")
        return value
    if isinstance(value, _REAL) and not isinstance(value, bool) and builder is not None:
        return builder.number(_to_float(value))
    raise Untraceable(
        f"{name} must be an argument of the function that cupynorm.fuse traces, or an expression "
        f"of these, got {kind_of(value)}"
    )


def as_condition(value: Any) -> Expression:
    """Return a condition. An argument of bools is one where it is not 0."""
    if not isinstance(value, Expression):
        raise Untraceable(
            "a condition is made of comparisons, with & | ~ between them; got "
            f"{reprlib.repr(value)}"
        )
    return value if value.is_condition else value != 0


def kind_of(value: Any) -> str:
    """Name the type of a value for a message."""
    root = type(value).__module__.split(".")[0]
    return type(value).__qualname__ if root == "builtins" else f"{root}.{type(value).__qualname__}"


def trace(what: str, function: Callable[..., Any], first: str) -> Program:
    """Return what a function computes. Its first argument is renamed; `what` is it in messages.

    Raises
    ------
    TypeError
        If it is no function of named arguments, or computes what has no place in a program.
    ValueError
        If it names an argument in a way that is not allowed.
    """
    _, *others = _arguments(what, function)
    if first in others:
        raise ValueError(f"{what} must name no input {first}, as its first argument is called here")
    builder = _Builder((first, *others))
    try:
        returned = function(*map(builder.argument, builder.arguments))
        results = returned if isinstance(returned, tuple) else (returned,)
        if not results:
            raise Untraceable("it returns an empty tuple")
        return builder.program(tuple(_result(builder, result) for result in results))
    except Exception as error:
        raise TypeError(_failure(what, function, error)) from error


def _result(builder: _Builder, result: Any) -> Expression:
    if isinstance(result, _REAL) and not isinstance(result, bool):
        return builder.number(_to_float(result))
    if isinstance(result, Expression) and not result.is_condition:
        return result
    kind = "a comparison" if isinstance(result, Expression) else f"a {kind_of(result)}"
    raise Untraceable(f"it must return an expression of its arguments, or a tuple; got {kind}")


def _arguments(what: str, function: Any) -> tuple[str, ...]:
    if not callable(function):
        raise TypeError(f"{what} must be a function, got {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(
            f"{what} must be a Python function whose arguments have names, got {function!r}"
        ) from None
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            kind = parameter.kind.description
            raise TypeError(f"{what} must take plain arguments by name, got {kind} {parameter}")
        if parameter.default is not parameter.empty:
            raise TypeError(f"{what} must take arguments without defaults, got {parameter}")
        if parameter.name.startswith("_"):
            raise ValueError(
                f"{what} must name its arguments without a leading underscore, got {parameter.name}"
            )
    if not parameters:
        raise TypeError(f"{what} must take at least one argument, got none")
    return tuple(parameter.name for parameter in parameters)


def _failure(what: str, function: Any, error: Exception) -> str:
    """Say where a trace failed, and what to write instead."""
    ours = __file__, str(Path(__file__).with_name("math.py"))
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if f.filename not in ours]
    code = getattr(function, "__code__", None)
    of_user = [f for f in frames if code is not None and f.filename == code.co_filename] or frames
    where, line = what, ""
    if of_user:
        last = of_user[-1]
        where = f"{what}, at {last.filename}:{last.lineno},"
        line = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    shown = f" `{line}`:" if line else ""
    if "__array_ufunc__" in str(error):
        error = Untraceable("NumPy's functions take arrays: use those of cupynorm.math")
    text = f"{where} cannot be traced:{shown} {error}"
    if isinstance(error, Untraceable):
        return text
    return f"{text}. It may use + - * / **, comparisons, numbers and the functions of cupynorm.math"


# ---- gradients -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def gradients(program: Program, of_results: tuple[str, ...], names: tuple[str, ...]) -> Program:
    """Return the gradients of named arguments, as a program of the arguments and those of results.

    `of_results` names the gradients of results: `_0` is that of the first. Others are 0.
    """
    builder = _Builder((*program.arguments, *of_results))
    values = [builder.argument(name) for name in program.arguments]
    for operation, operands in program.steps:
        if operation == "number":
            values.append(builder.number(operands[0]))
        else:
            values.append(builder.made(operation, *(values[i] for i in operands)))
    found: dict[int, Any] = {}

    def pass_on(place: int, gradient: Any) -> None:
        if gradient is not None:
            found[place] = found[place] + gradient if place in found else gradient

    for name in of_results:
        pass_on(program.results[int(name[1:])], builder.argument(name))
    first = len(program.arguments)
    for place in reversed(range(first, len(values))):
        operation, operands = program.steps[place - first]
        if operation == "number" or place not in found:
            continue
        slopes = SLOPES[operation](values[place], found[place], *(values[i] for i in operands))
        for operand, slope in zip(operands, slopes, strict=True):
            pass_on(operand, slope)
    zero = builder.number(0.0)
    places = {name: i for i, name in enumerate(program.arguments)}
    return builder.program(tuple(found.get(places[name], zero) for name in names))


def _where(condition: Any, value: Any, other: Any) -> Any:
    return condition.builder.made(
        "where",
        condition,
        *(v if isinstance(v, Expression) else condition.builder.number(v) for v in (value, other)),
    )


def _call(operation: str, *operands: Any) -> Any:
    return operands[0].builder.made(operation, *operands)


def _of_power(y: Any, g: Any, x: Any, p: Any) -> tuple[Any, Any]:
    """Return the gradients of x**p. At 0**p with p >= 0 that of p is 0, as in torch."""
    if p.step is not None and p.step[0] == "number":
        power = p.step[1][0]
        return g * (power * x ** (power - 1)), None
    of_x = _where(p == 0, 0.0, p * _call("power", x, p - 1))
    of_p = _where((x == 0) & (p >= 0), 0.0, y * _call("log", x))
    return g * of_x, g * of_p


def _of_larger(g: Any, is_first: Any, is_other: Any) -> tuple[Any, Any]:
    half = 0.5 * g
    return (
        _where(is_first, g, _where(is_other, 0.0, half)),
        _where(is_other, g, _where(is_first, 0.0, half)),
    )


TWO_OVER_ROOT_PI, ONE_OVER_ROOT_TWO_PI = 2 / math.sqrt(math.pi), 1 / math.sqrt(2 * math.pi)

# From a result, its gradient and the operands to the gradients of these, None for 0.
SLOPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "add": lambda y, g, a, b: (g, g),
    "subtract": lambda y, g, a, b: (g, -g),
    "multiply": lambda y, g, a, b: (g * b, g * a),
    "divide": lambda y, g, a, b: (g / b, -(g * y / b)),
    "negative": lambda y, g, a: (-g,),
    "power": _of_power,
    "abs": lambda y, g, a: (g * _call("sign", a),),
    "sign": lambda y, g, a: (None,),
    "exp": lambda y, g, a: (g * y,),
    "log": lambda y, g, a: (g / a,),
    "sqrt": lambda y, g, a: (0.5 * g / y,),
    "tanh": lambda y, g, a: (g * (1 - y * y),),
    "erf": lambda y, g, a: (g * (TWO_OVER_ROOT_PI * _call("exp", -(a * a))),),
    "sigmoid": lambda y, g, a: (g * (y * _call("sigmoid", -a)),),
    "normal_cdf": lambda y, g, a: (g * _call("normal_pdf", a),),
    "normal_pdf": lambda y, g, a: (-(g * (y * a)),),
    "softplus": lambda y, g, a: (g * _call("sigmoid", a),),
    "maximum": lambda y, g, a, b: _of_larger(g, a > b, b > a),
    "minimum": lambda y, g, a, b: _of_larger(g, a < b, b < a),
    "where": lambda y, g, c, a, b: (None, _where(c, g, 0.0), _where(c, 0.0, g)),
    **dict.fromkeys(COMPARISONS, lambda y, g, a, b: (None, None)),
    **dict.fromkeys(("and", "or"), lambda y, g, a, b: (None, None)),
    "not": lambda y, g, a: (None,),
}


# ---- the operations by the functions of a framework ----------------------------------------------


def functions(xp: Any, **others: Any) -> dict[str, Callable[..., Any]]:
    """Return the operations for arrays of a namespace like NumPy's, with others in their place."""
    found: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "divide": lambda a, b: a / b,
        "negative": lambda a: -a,
        "power": lambda a, b: a**b,
        "abs": abs,
        **{name: getattr(xp, name) for name in ("sign", "exp", "log", "sqrt", "tanh", "where")},
        "maximum": xp.maximum,
        "minimum": xp.minimum,
        "sigmoid": lambda a: 1 / (1 + xp.exp(-a)),
        "normal_cdf": lambda a: 0.5 * others["erfc"](-a * math.sqrt(0.5)),
        "normal_pdf": lambda a: ONE_OVER_ROOT_TWO_PI * xp.exp(-0.5 * (a * a)),
        "softplus": lambda a: xp.log1p(xp.exp(-abs(a))) + xp.where(a > 0, a, xp.zeros_like(a)),
        "less": lambda a, b: a < b,
        "less_equal": lambda a, b: a <= b,
        "greater": lambda a, b: a > b,
        "greater_equal": lambda a, b: a >= b,
        "equal": lambda a, b: a == b,
        "not_equal": lambda a, b: a != b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "not": lambda a: ~a,
    }
    return found | others


def of_numpy() -> Mapping[str, Callable[..., Any]]:
    """Return the operations for NumPy arrays."""

    def by_elements(function: Callable[[float], float]) -> Callable[..., Any]:
        vectorized = np.vectorize(function, otypes=[np.float64])
        return lambda a: vectorized(a).astype(np.asarray(a).dtype)

    erf, erfc = by_elements(math.erf), by_elements(math.erfc)
    return functions(np, erf=erf, erfc=erfc)
