"""Time each norm against the limit that the memory sets: a copy, or a sum of two arrays.

It needs CuPy alone. It times calls as users make them, once a result is right. The benchmark in
benchmarks/ of the repository adds other libraries and the time of the kernels alone. It has the
same tolerances, bytes, data and clock.
"""

from __future__ import annotations

import argparse
import os

from cupynorm import _oracle
from cupynorm._background import SWITCH
from cupynorm._bench import DTYPES, Clock, Problem, inputs, limit, ours, poison

__all__ = ["add_arguments", "main", "shape"]

SHAPES = tuple((32768, n) for n in (256, 1024, 4096, 16384))


def shape(text: str) -> tuple[int, int]:
    """Read a shape such as 32768x4096."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"must be rows x columns, as 32768x4096, got {text!r}")
    return int(sizes[0]), int(sizes[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        default=SHAPES,
        metavar="MxN",
        help=f"rows x columns (default: {' '.join(f'{m}x{n}' for m, n in SHAPES)})",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of x (%(default)s)")
    parser.add_argument(
        "--weight-dtype", choices=DTYPES, default="float32", help="of weight (%(default)s)"
    )


def measure(problem: Problem, clock: Clock) -> tuple[float, float] | str:
    """Return the seconds of the limit and of the call, or what is wrong with its result."""
    import cupy

    arrays = inputs(problem, 0, cupy)
    call = ours(problem, arrays)
    poison(arrays)
    outputs = dict(zip(problem.outputs, call(), strict=True))
    wrong = _oracle.what_is_wrong(problem, arrays, outputs, cupy)
    if wrong is not None:
        return f"WRONG, not timed: {wrong}"
    del outputs
    return clock.measure([limit(problem, arrays)]).median, clock.measure([call]).median


def main(options: argparse.Namespace) -> int:
    """Print GB/s of each norm, of the limit, and their ratio; return 1 if a result is wrong."""
    os.environ[SWITCH] = "0"  # the kernel that is timed is the call's own
    clock = Clock()
    print("GB/s of the bytes that must move; the limit is a copy, or a sum of two arrays. Calls as")
    print("users make them, each checked against float64 before.\n")
    row = "{:<12}{:<10}{:<24}{:<10}{:>8}{:>8}{:>7}"
    print(row.format("norm", "direction", "x", "weight", "limit", "ours", "ratio"))
    failed = 0
    for rows, cols in options.shapes:
        for norm in ("rms_norm", "layer_norm"):
            for direction in ("forward", "backward"):
                problem = Problem(norm, direction, rows, cols, options.dtype, options.weight_dtype)
                try:
                    found = measure(problem, clock)
                except MemoryError as error:
                    found = f"not measured: {error}"
                if isinstance(found, str):
                    failed += 1
                    cells = (found, "", "")
                else:
                    fastest, speed = (1e-9 * problem.bytes / seconds for seconds in found)
                    cells = (f"{fastest:.0f}", f"{speed:.0f}", f"{speed / fastest:.2f}")
                what = f"{rows}x{cols} {options.dtype}"
                print(row.format(norm, direction, what, options.weight_dtype, *cells), flush=True)
    if failed:
        print(f"\n{failed} of {4 * len(options.shapes)} results are wrong or missing.")
    return 1 if failed else 0
