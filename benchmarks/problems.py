"""What is measured: operations, shapes and dtypes."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from cupynorm._bench import Direction, Problem
from cupynorm._bench_command import shape
from cupynorm.reference import Norm

Shape = tuple[int, int]
Pair = tuple[str, str]

OPERATIONS = tuple(
    f"{norm} {direction}"
    for norm, direction in itertools.product(get_args(Norm), get_args(Direction))
)
PAIRS: tuple[Pair, ...] = (
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("float64", "float64"),
)

# The shapes of PyTorch's benchmark of norms (benchmarks/dynamo/genai_layers).
TRAINING: tuple[Shape, ...] = (
    *((32768, 2**k) for k in range(8, 16)),
    (16384, 65536),
    (8192, 131072),
)
NOTEBOOKS: tuple[Shape, ...] = ((4096, 128), (4096, 768))
DECODE: tuple[Shape, ...] = tuple(itertools.product((1, 8, 64, 512), (1024, 4096, 8192, 16384)))
TALL: tuple[Shape, ...] = ((1048576, 64), (1048576, 128))
WIDE: tuple[Shape, ...] = ((32, 262144),)
SHAPES = (*TRAINING, *NOTEBOOKS, *DECODE, *TALL, *WIDE)

# Each group in the dtypes it is met in, and one shape in all of them. `full` has every product.
# What says most comes first, in case the time does not suffice.
STANDARD: tuple[tuple[Shape, Pair], ...] = (
    *((s, PAIRS[0]) for s in TRAINING),
    *((s, PAIRS[0]) for s in TALL),
    *((s, PAIRS[3]) for s in WIDE),
    *(((32768, 4096), pair) for pair in PAIRS[1:]),
    *((s, PAIRS[2]) for s in NOTEBOOKS),
    *((s, PAIRS[1]) for s in DECODE),
)
QUICK: tuple[tuple[Shape, Pair], ...] = (
    *((s, PAIRS[0]) for s in ((32768, 256), (32768, 1024), (32768, 4096), (32768, 16384))),
    ((8192, 131072), PAIRS[0]),
    ((4096, 768), PAIRS[2]),
    ((8, 4096), PAIRS[1]),
    ((1048576, 64), PAIRS[0]),
)
# Hidden sizes of models that are no powers of two, with weights of x's dtype.
HIDDEN: tuple[tuple[Shape, Pair], ...] = tuple(
    ((16384, cols), PAIRS[1])
    for cols in (
        *(768, 1280, 1600, 2304, 2560, 3072, 3584),
        *(5120, 5376, 6656, 7168, 9216, 12288, 18432),
    )
)
# Rows of odd length, which lie at any multiple of an element's size.
ODD: tuple[tuple[Shape, Pair], ...] = (
    *(
        (s, PAIRS[0])
        for s in ((65536, 777), (65536, 1001), (16384, 4097), (8192, 8191), (4096, 20001))
    ),
    ((16384, 4097), PAIRS[3]),
)
SETS = {
    "quick": QUICK,
    "hidden": HIDDEN,
    "odd": ODD,
    "standard": STANDARD,
    "full": tuple(itertools.product(SHAPES, PAIRS)),
}


def parse_pair(text: str) -> Pair:
    """Read a pair of dtypes such as bfloat16,float32."""
    pair = tuple(text.split(","))
    if pair not in PAIRS:
        known = " ".join(map(",".join, PAIRS))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text!r}")
    return pair  # type: ignore[return-value]


def select(
    name: str,
    operations: Iterable[str] = OPERATIONS,
    shapes: Sequence[Shape] = (),
    pairs: Sequence[Pair] = (),
) -> Iterator[Problem]:
    """Yield the problems of a set, or those of the shapes given, in the pairs given if any.

    The backward passes of decoding, which nobody runs as such, come last.
    """
    cases = SETS[name]
    if shapes:
        cases = tuple(itertools.product(shapes, pairs or PAIRS[:1]))
    elif pairs:
        cases = tuple(case for case in cases if case[1] in pairs)
    chosen = [operation for operation in OPERATIONS if operation in tuple(operations)]
    problems = [
        Problem(*operation.split(), *case, *pair)  # type: ignore[arg-type, call-arg]
        for (case, pair), operation in itertools.product(cases, chosen)
    ]
    yield from sorted(
        problems, key=lambda p: p.direction == "backward" and (p.rows, p.cols) in DECODE
    )


def one_of(names: Iterable[str]) -> str:
    """List names, in quotes where there is a space in one."""
    return ", ".join(f'"{name}"' if " " in name else name for name in names)


def add_selection(parser: argparse.ArgumentParser, default: str) -> Callable[..., None]:
    """Add the arguments that `selected` reads; return what adds one that takes several values."""

    def several(name: str, metavar: str, about: str, default: Any = (), **kind: Any) -> None:
        parser.add_argument(name, nargs="+", metavar=metavar, help=about, default=default, **kind)

    parser.add_argument(
        "--set",
        choices=SETS,
        default=default,
        dest="name",
        metavar="NAME",
        help=f"shapes and dtypes: one of {one_of(SETS)} (default: %(default)s)",
    )
    several(
        "--operations",
        "PASS",
        f"only some of {one_of(OPERATIONS)}",
        OPERATIONS,
        choices=OPERATIONS,
    )
    several(
        "--shapes",
        "MxN",
        "these instead of the set's, as 32768x4096, in bfloat16,float32 unless --dtypes says other",
        type=shape,
    )
    several(
        "--dtypes", "X,WEIGHT", f"only some of {' '.join(map(','.join, PAIRS))}", type=parse_pair
    )
    return several


def selected(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Problem]:
    """Return the problems that the arguments of `add_selection` name, at least one."""
    found = list(select(options.name, options.operations, options.shapes, options.dtypes))
    if not found:
        parser.error(f"no shape of --set {options.name} has these --dtypes: give --shapes, too")
    return found


__all__ = [
    "OPERATIONS",
    "PAIRS",
    "SETS",
    "SHAPES",
    "Problem",
    "add_selection",
    "one_of",
    "parse_pair",
    "select",
    "selected",
    "shape",
]
