"""The programs of a norm of `cupynorm.fuse` as C++: the `Op` of its kernels.

kernels/fused_forward.cu and fused_backward.cu have what all such norms share. An Op has the rest:
the arguments, what is read and written of a pack, and the steps of the programs for an element.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from cupynorm._expressions import CONDITIONS, SHOWN, Program, gradients
from cupynorm._operation import CPP_TYPES, ITEMSIZE, Norm

__all__ = ["Input", "Op", "Spec", "backward_op", "forward_op"]

# Of x's shape; one row for all rows; one element a row, or one for all; a number of the call.
Place = Literal["rows", "vector", "number", "constant"]

_OF_SAME_NAME = "sigmoid", "normal_cdf", "normal_pdf", "softplus", "sign"
_CALLS = {
    **{name: f"{name}({{}})" for name in _OF_SAME_NAME},
    **{"abs": "absolute({})", "exp": "exponential({})", "log": "logarithm({})"},
    **{"sqrt": "square_root({})", "tanh": "hyperbolic_tangent({})", "erf": "error_function({})"},
    **{"maximum": "maximum({}, {})", "minimum": "minimum({}, {})", "power": "power({}, {})"},
    **{"where": "{} ? {} : {}", "and": "{} && {}", "or": "{} || {}", "not": "!{}"},
}
# The others are written as in Python, without the parentheses.
_TEXTS = {name: text.strip("()") for name, text in SHOWN.items()} | _CALLS
# Steps that take many instructions: a value made of them is not computed twice.
_HEAVY = frozenset(("sigmoid", "normal_cdf", "softplus", "exp", "log", "tanh", "erf", "power"))
_HEAVY |= {"normal_pdf", "divide", "sqrt"}


@dataclass(frozen=True)
class Input:
    """An input of a fused norm, in addition to x. `gradient`: the dtype of its own, if it has one.
    `given`: the dtype that it came with.

    The gradient of a vector is written by the kernel that sums partials, and that of a number is
    one a row, in the compute dtype.
    """

    name: str
    place: Place
    dtype: str | None = None
    gradient: str | None = None
    given: str | None = None


@dataclass(frozen=True)
class Spec:
    """A pass of a fused norm to compile. Dtypes are given by name.

    `outputs`: those of the epilogue, then those of the prologue. `of_outputs`: the dtypes of their
    gradients, None for one that is 0; empty in a forward pass.
    """

    norm: Norm
    prologue: Program
    epilogue: Program
    zero_centered: bool
    compute: str
    x: str
    weight: str | None
    bias: str | None
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    of_outputs: tuple[str | None, ...] = ()

    def at(self, place: Place) -> tuple[Input, ...]:
        """Return the inputs at a place."""
        return tuple(given for given in self.inputs if given.place == place)

    @property
    def rows(self) -> tuple[Input, ...]:
        """x, and the inputs of its shape."""
        return (Input("x", "rows", self.x, self.x), *self.at("rows"))

    @property
    def read(self) -> tuple[tuple[str, str], ...]:
        """The names and dtypes of all arrays whose rows are read."""
        of_outputs = ((f"dy_{k}", dtype) for k, dtype in enumerate(self.of_outputs) if dtype)
        return (*((f"in_{i.name}", i.dtype or "") for i in self.rows), *of_outputs)

    @property
    def dtypes_given(self) -> dict[str, str | None]:
        """The dtypes of the inputs, as they were given."""
        return {i.name: i.given for i in self.inputs}

    @property
    def others(self) -> int:
        """How many outputs the prologue has."""
        return len(self.prologue.results) - 1

    @property
    def stored_value(self) -> str | None:
        """The dtype to which the value is rounded, if an output holds it."""
        of_value, *of_others = self.prologue.results
        if of_value not in of_others:
            return None
        return self.outputs[len(self.epilogue.results) + of_others.index(of_value)]

    @property
    def is_value_heavy(self) -> bool:
        """Whether the value takes many instructions."""
        needed = _needed(self.prologue, self.prologue.results[:1])
        return any(_is_heavy(self.prologue, i) for i in needed)

    @property
    def is_epilogue_heavy(self) -> bool:
        """Whether what comes after the norm takes many instructions."""
        return any(_is_heavy(self.epilogue, i) for i in range(len(self.epilogue.steps)))

    @property
    def differentiated(self) -> Differentiated:
        """The names of what has a gradient, where it is in order."""
        after = set(self.epilogue.arguments)
        before = set(self.prologue.arguments)
        rows = [i.name for i in self.rows if i.gradient]
        return Differentiated(
            held=tuple(n for n in rows if n in after and n in before),
            before=tuple(n for n in rows if n not in after),
            after=tuple(n for n in rows if n not in before),
            vectors=tuple(i.name for i in self.at("vector") if i.gradient),
            numbers=tuple(i.name for i in self.at("number") if i.gradient),
        )

    @property
    def sums_over_rows(self) -> tuple[tuple[str, str], ...]:
        """The names and dtypes of the gradients that are summed over rows, in partials' order."""
        named = (("weight", self.weight), ("bias", self.bias))
        of_vectors = {i.name: i.gradient for i in self.at("vector")}
        others = ((name, of_vectors[name]) for name in self.differentiated.vectors)
        return tuple((name, dtype) for name, dtype in (*named, *others) if dtype)


@dataclass(frozen=True)
class Differentiated:
    """The inputs that have gradients.

    `held`: of rows, read by the prologue and the epilogue. `before` and `after`: by one of these.
    """

    held: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    vectors: tuple[str, ...]
    numbers: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        return self.held + self.before + self.after


@dataclass(frozen=True)
class Op:
    """The text of an Op's members, and its struct of arguments as in `_compile.ARGUMENTS`."""

    text: str
    arguments: tuple[tuple[str, str], ...]


@dataclass
class _Text:
    """Members of a struct in the making."""

    lines: list[str] = field(default_factory=list)
    arguments: list[tuple[str, str]] = field(default_factory=list)

    def member(self, line: str) -> None:
        self.lines.append(f"  {line}")

    def function(self, head: str, body: Iterable[str], template: str = "int Length") -> None:
        if template:
            self.member(f"template <{template}>")
        self.member(f"static __device__ __forceinline__ {head} {{")
        self.lines += [f"    {line}" for line in body]
        self.member("}")

    def op(self) -> Op:
        # NVRTC takes names of ASCII letters alone.
        text = re.sub(r"[^\x00-\x7f]", lambda m: f"_u{ord(m[0]):x}_", "\n".join(self.lines))
        return Op(text, tuple(self.arguments))

    def argument(self, kind: str, name: str, letter: str) -> None:
        self.arguments.append((name, letter))
        self.lines.append(f"    {kind} {name};")


def _head(spec: Spec) -> _Text:
    """Begin an Op with what both passes have."""
    text = _Text()
    text.member(f"using T = {CPP_TYPES[spec.compute]};")
    text.member(f"using Weight = {CPP_TYPES[spec.weight]};")
    text.member(f"using Bias = {CPP_TYPES[spec.bias]};")
    flags = {
        "kCentered": spec.norm == "layer_norm",
        "kZeroCentered": spec.zero_centered,
    }
    for name, flag in flags.items():
        text.member(f"static constexpr bool {name} = {str(flag).lower()};")
    return text


def _arguments(text: _Text, spec: Spec, numbers: Sequence[str], written: Mapping[str, str]) -> None:
    """Add the struct of arguments: sizes, arrays that are read, those written, and numbers."""
    letter = "d" if spec.compute == "float64" else "f"
    text.member("struct Arguments {")
    text.argument("long long", "n_rows", "q")
    text.argument("long long", "n_cols", "q")
    for name in numbers:
        text.argument("T", name, letter)
    for name, dtype in spec.read:
        text.argument(f"const {CPP_TYPES[dtype]}*", name, "P")
        text.argument("long long", f"stride_{name}", "q")
    for given in (*spec.at("vector"), *spec.at("number")):
        text.argument(f"const {CPP_TYPES[given.dtype]}*", f"in_{given.name}", "P")
        if given.place == "number":
            text.argument("long long", f"step_in_{given.name}", "q")
    text.argument("const Weight*", "weight", "P")
    text.argument("const Bias*", "bias", "P")
    for name, kind in written.items():
        text.argument(f"{kind}*", name, "P")
    for given in spec.at("constant"):
        text.argument("T", f"in_{given.name}", letter)
    text.member("};")


def _reading(text: _Text, spec: Spec) -> None:
    """Add what is read of a pack and of a row."""
    text.member("template <int Length>")
    text.member("struct Rows {")
    text.lines += [f"    Pack<{CPP_TYPES[dtype]}, Length> {name};" for name, dtype in spec.read]
    text.member("};")
    vectors, numbers = spec.at("vector"), (*spec.at("number"), *spec.at("constant"))
    text.member("template <int Length>")
    text.member("struct Vectors {")
    text.lines += [f"    Pack<{CPP_TYPES[i.dtype]}, Length> in_{i.name};" for i in vectors]
    text.member("};")
    text.member("struct Numbers {")
    text.lines += [f"    T in_{i.name};" for i in numbers]
    text.member("};")
    needed = {
        f"in_{spec.prologue.arguments[place]}"
        for place in _used(spec.prologue, spec.prologue.results[:1])
        if place < len(spec.prologue.arguments)
    }
    text.function(
        "void load_rows(Rows<Length>& rows, const Arguments& args, long long row, Index first, "
        "Index end, CachePolicy policy)",
        (
            f"{'' if name in needed else 'if constexpr (!ForValue) '}load<Vector>("
            f"rows.{name}, args.{name} + row * args.stride_{name}, first, end, policy);"
            for name, _ in spec.read
        ),
        "int Vector, bool ForValue, int Length, typename Index",
    )
    text.function(
        "void load_vectors(Vectors<Length>& vectors, const Arguments& args, Index first, "
        "Index end)",
        (
            f"load_operand<Vector>(vectors.in_{i.name}, args.in_{i.name}, first, end);"
            for i in vectors
        ),
        "int Vector, int Length, typename Index",
    )
    values = (
        f"args.in_{i.name}"
        if i.place == "constant"
        else f"convert<T>(args.in_{i.name}[row * args.step_in_{i.name}])"
        for i in numbers
    )
    text.function(
        "Numbers numbers_of(const Arguments& args, long long row)",
        (f"return {{{', '.join(values)}}};",),
        "",
    )
    of_element = sum(ITEMSIZE[dtype] for _, dtype in spec.read)
    text.function(
        "long long bytes_of_rows(const Arguments& args)",
        (f"return args.n_rows * args.n_cols * {of_element};",),
        "",
    )
    body = _statements(spec, spec.prologue, spec.prologue.results[:1])
    value = body.results[0]
    if spec.stored_value:
        value = f"rounded_to<{CPP_TYPES[spec.stored_value]}>({value})"
    text.function(f"T value({_ELEMENT})", (*body.lines, f"return {value};"))


_ELEMENT = "const Rows<Length>& rows, const Vectors<Length>& vectors, const Numbers& numbers, int i"


# ---- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Body:
    lines: tuple[str, ...]
    results: tuple[str, ...]


def _is_heavy(program: Program, step: int) -> bool:
    operation, operands = program.steps[step]
    by_number = operation == "divide" and _reciprocal(program, operands[1]) is not None
    return operation in _HEAVY and not by_number


def _needed(program: Program, results: Sequence[int]) -> list[int]:
    """Return the steps that results need, by their numbers."""
    first = len(program.arguments)
    needed, pending = set(), list(results)
    while pending:
        place = pending.pop()
        if place >= first and place - first not in needed:
            needed.add(place - first)
            operation, operands = program.steps[place - first]
            pending += () if operation == "number" else operands
    return sorted(needed)


def _used(program: Program, results: Sequence[int]) -> set[int]:
    """Return the places of all that results are made of, and their own."""
    steps = (program.steps[i] for i in _needed(program, results))
    operands = (of for operation, of in steps if operation != "number")
    return {int(place) for of in operands for place in of} | set(results)


def _statements(spec: Spec, program: Program, results: Sequence[int], **expressions: str) -> _Body:
    """Return a program's steps in C++, and the results. `expressions` are those of arguments."""
    places = {i.name: i.place for i in spec.inputs} | {"x": "rows"}

    def read(name: str) -> str:
        if name in expressions:
            return expressions[name]
        if places[name] == "rows":
            return f"rows.in_{name}.template get<T>(i)"
        if places[name] == "vector":
            return f"vectors.in_{name}.template get<T>(i)"
        return f"numbers.in_{name}"

    first = len(program.arguments)
    steps = _needed(program, results)
    negated = {i: _negated(program, *program.steps[i]) for i in steps}
    contracted = {i: found for i in steps if (found := _contracted(program, i))}
    left_out = {found.product for found in contracted.values()}
    of_negatives = Counter(program.steps[i][1][0] for i in steps if negated[i] is not None)
    left_out |= {place for place, uses in of_negatives.items() if uses == _uses(program)[place]}
    texts = dict(_TEXTS)
    if spec.of_outputs:  # gradients have the sigmoid of -a with that of a
        texts["sigmoid"] = "sigmoid_of_pair({})"
    used = _used(program, results)
    names: dict[int, str] = {}
    lines = []
    for place, name in enumerate(program.arguments):
        if place in used:
            names[place] = f"v{place}"
            lines.append(f"const T v{place} = {read(name)};")
    for i in steps:
        operation, operands = program.steps[i]
        if operation == "number":
            names[first + i] = _number(operands[0])
            continue
        if first + i in left_out:
            continue
        kind = "bool" if operation in CONDITIONS else "T"
        of_negative = negated[i]
        if i in contracted:
            made = contracted[i].text(names)
        elif operation == "divide" and (factor := _reciprocal(program, operands[1])):
            made = f"{names[operands[0]]} * {factor}"
        elif of_negative is None:
            made = texts[operation].format(*(names[place] for place in operands))
        else:
            made = f"sigmoid_of_negative({names[of_negative]})"
        names[first + i] = f"v{first + i}"
        lines.append(f"const {kind} v{first + i} = {made};")
    return _Body(tuple(lines), tuple(names[place] for place in results))


@dataclass(frozen=True)
class _Contracted:
    """The sum of a product and another value, which is rounded once: their places and signs."""

    product: int
    factors: tuple[int, int]
    other: int
    signs: tuple[str, str]

    def text(self, names: Mapping[int, str]) -> str:
        first, second = (names[place] for place in self.factors)
        of_product, of_other = self.signs
        return f"fused_multiply_add({of_product}{first}, {second}, {of_other}{names[self.other]})"


def _contracted(program: Program, step: int) -> _Contracted | None:
    """Return a step as one with a product before it, if only this step needs the product."""
    operation, operands = program.steps[step]
    if operation not in ("add", "subtract"):
        return None
    first = len(program.arguments)
    for position, place in enumerate(operands):
        made, factors = program.steps[place - first] if place >= first else ("argument", ())
        if made == "multiply" and _uses(program)[place] == 1:
            signs = ("", "-") if position == 0 else ("-", "")
            signs = signs if operation == "subtract" else ("", "")
            return _Contracted(place, factors, operands[1 - position], signs)
    return None


@functools.cache
def _uses(program: Program) -> Counter[int]:
    """Count how often steps and results use each value."""
    of = [operands for operation, operands in program.steps if operation != "number"]
    return Counter(chain(program.results, *of))


def _reciprocal(program: Program, place: int) -> str | None:
    """Return one over a number by which a program divides. A product takes a fifth of the time."""
    first = len(program.arguments)
    if place < first or program.steps[place - first][0] != "number":
        return None
    value = program.steps[place - first][1][0]
    in_range = _LEAST_DIVISOR <= abs(value) <= 1 / _LEAST_DIVISOR
    return _number(1 / value) if in_range else None


_LEAST_DIVISOR = 2.0**-100  # so that the reciprocal is a normal number of float32


def _negated(program: Program, operation: str, operands: tuple[int, ...]) -> int | None:
    """Return the place of a if a step is the sigmoid of -a."""
    first = len(program.arguments)
    if operation != "sigmoid" or operands[0] < first:
        return None
    before, (place, *_) = program.steps[operands[0] - first]
    return place if before == "negative" else None


def _number(value: float) -> str:
    if math.isnan(value):
        return "not_a_number<T>()"
    if math.isinf(value):
        return "infinity<T>()" if value > 0 else "(-infinity<T>())"
    return f"T({value!r})"


# ---- the passes ----------------------------------------------------------------------------------


@functools.cache
def forward_op(spec: Spec) -> Op:
    """Return the Op of a forward pass."""
    text = _head(spec)
    count = len(spec.epilogue.results)
    text.member(f"static constexpr int kOutputs = {count};")
    # float16's squares neither overflow nor vanish.
    plain = spec.x == "float16" and spec.prologue.results[0] == 0
    text.member(f"static constexpr bool kCanLeaveRange = {str(not plain).lower()};")
    written = {f"y_{k}": CPP_TYPES[dtype] for k, dtype in enumerate(spec.outputs)}
    numbers = "inv_n", "eps"
    _arguments(text, spec, numbers, written | {"mean": "T", "rstd": "T"})
    _reading(text, spec)
    names = [name for name, _ in spec.read]
    text.function(
        "void forget(Rows<Length>& rows)",
        (f"for (unsigned& word : rows.{n}.words) make_opaque(word);" for n in names),
    )
    body = _statements(spec, spec.epilogue, spec.epilogue.results, y="y")
    text.function(
        f"void epilogue(T (&outputs)[kOutputs], T y, {_ELEMENT})",
        (*body.lines, *(f"outputs[{k}] = {r};" for k, r in enumerate(body.results))),
    )
    stores = "const Arguments& args, long long row, Index first, Index end"
    text.function(
        f"void store_outputs(const T (&outputs)[kOutputs][Length], {stores})",
        (_store(f"y_{k}", f"outputs[{k}]") for k in range(count)),
        _STORES,
    )
    others = []
    if spec.others:
        body = _statements(spec, spec.prologue, spec.prologue.results[1:])
        places = range(count, count + spec.others)
        others = [
            *(f"T of_{k}[Length];" for k in places),
            "#pragma unroll",
            "for (int i = 0; i < Length; ++i) {",
            *(f"  {line}" for line in body.lines),
            *(f"  of_{k}[i] = {r};" for k, r in zip(places, body.results, strict=True)),
            "}",
            *(_store(f"y_{k}", f"of_{k}") for k in places),
        ]
    of_pack = _ELEMENT.removesuffix(", int i")
    text.function(f"void store_others({of_pack}, {stores})", others, _STORES)
    return text.op()


_STORES = "int Vector, int RowThreads, int Length, typename Index"


def _store(name: str, values: str) -> str:
    return f"write<Vector, RowThreads>({values}, args.{name} + row * args.n_cols, first, end);"


@functools.cache
def backward_op(spec: Spec) -> Op:
    """Return the Op of a backward pass."""
    text = _head(spec)
    names = spec.differentiated
    counts = {
        "kRows": len(names.rows),
        "kVectors": len(names.vectors),
        "kNumbers": len(names.numbers),
        "kHeld": len(names.held),
    }
    text.member(f"static constexpr bool kDBias = {str(spec.bias is not None).lower()};")
    for name, count in counts.items():
        text.member(f"static constexpr int {name} = {count};")
    dtypes = {i.name: i.gradient for i in spec.rows}
    written = {f"d_{name}": CPP_TYPES[dtypes[name]] for name in names.rows}
    written |= {f"d_{name}": "T" for name in names.numbers}
    statistics = {"mean": "const T", "rstd": "const T"}
    _arguments(text, spec, ("inv_n",), statistics | written | {"partials": "T"})
    _reading(text, spec)
    _stages(text, spec)
    results = len(spec.epilogue.results)
    given = [k for k, dtype in enumerate(spec.of_outputs) if dtype]
    of_epilogue = {f"_{k}": f"dy_{k}" for k in given if k < results}
    of_prologue = {f"_{k - results + 1}": f"dy_{k}" for k in given if k >= results}
    _gradients(text, spec, "epilogue", of_epilogue)
    _gradients(text, spec, "prologue", of_prologue)
    stores = "const Arguments& args, long long row, Index first, Index end"
    for where, stored in (("epilogue", names.after), ("prologue", names.held + names.before)):
        text.function(
            f"void store_behind_{where}(const T (&of_rows)[kRows + 1][Length], {stores})",
            (_store(f"d_{name}", f"of_rows[{names.rows.index(name)}]") for name in stored),
            _STORES,
        )
    text.function(
        "void store_of_number(int k, T sum, const Arguments& args, long long row)",
        (f"if (k == {k}) args.d_{name}[row] = sum;" for k, name in enumerate(names.numbers)),
        "",
    )
    return text.op()


def _stages(text: _Text, spec: Spec) -> None:
    """Add the places of a row's arrays in shared memory."""
    text.member("template <int Length, int PacksPerThread, int BlockThreads>")
    text.member("struct Stages {")
    inner = _Text()
    for name, dtype in spec.read:
        kind = f"Stage<{CPP_TYPES[dtype]}, Length, PacksPerThread, BlockThreads>"
        inner.member(f"using Of_{name} = {kind};")
    sizes = " + ".join(f"Of_{name}::kBytes" for name, _ in spec.read)
    inner.member(f"static constexpr int kBytes = {sizes};")
    fetches, reads = [], ["Rows<Length> rows;"]
    for name, _ in spec.read:
        source = f"args.{name} + row * args.stride_{name}"
        fetches.append(f"fetch_pack<Of_{name}, Vector>(stage, p, {source}, first, end, policy);")
        fetches.append(f"stage += Of_{name}::kBytes;")
        reads.append(f"rows.{name} = Of_{name}::read(stage, p);")
        reads.append(f"stage += Of_{name}::kBytes;")
    inner.function(
        "void fetch(char* stage, const Arguments& args, long long row, int p, int first, int end, "
        "CachePolicy policy)",
        fetches,
        "int Vector",
    )
    inner.function("Rows<Length> read(char* stage, int p)", (*reads, "return rows;"), "")
    text.lines += [f"  {line}" for line in inner.lines]
    text.member("};")


def _gradients(text: _Text, spec: Spec, where: str, given: Mapping[str, str]) -> None:
    """Add the gradients of what the prologue or the epilogue reads."""
    program: Program = getattr(spec, where)
    names = spec.differentiated
    parameter = "y" if where == "epilogue" else "of_value"
    expressions = {one: f"rows.{name}.template get<T>(i)" for one, name in given.items()}
    if where == "epilogue":
        expressions["y"] = "y"
    else:
        expressions["_0"] = parameter
    targets = {
        **{name: f"of_rows[{k}]" for k, name in enumerate(names.rows)},
        **{name: f"of_vectors[{k}]" for k, name in enumerate(names.vectors)},
        **{name: f"of_numbers[{k}]" for k, name in enumerate(names.numbers)},
    }
    wanted = tuple(name for name in program.arguments if name in targets or name == "y")
    found = gradients(program, tuple(name for name in expressions if name != "y"), wanted)
    body = _statements(spec, found, found.results, **expressions)
    result = dict(zip(wanted, body.results, strict=True))
    returned = f"return {result.pop('y')};" if where == "epilogue" else ""
    zeros = [f"of_rows[{k}] = 0;" for k, name in enumerate(names.rows) if name not in result]
    parameters = (
        "T (&of_rows)[kRows + 1], T (&of_vectors)[kVectors + 1], T (&of_numbers)[kNumbers + 1]"
    )
    kind = "T" if returned else "void"
    text.function(
        f"{kind} differentiate_{where}({parameters}, T {parameter}, {_ELEMENT})",
        (
            *body.lines,
            *zeros,
            *(f"{targets[name]} = {value};" for name, value in result.items()),
            *((returned,) if returned else ()),
        ),
    )
