"""Time each norm beside the limit that the memory sets: a copy, or a sum of two arrays.

It needs CuPy alone, and times calls as users make them, once a result is right. The benchmark in
benchmarks/ of the repository, which adds other libraries and the time of the kernels alone, checks
by the same tolerances and measures by the same bytes, data and clock.
"""

from __future__ import annotations

import argparse

from cupynorm import _oracle
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


def main(options: argparse.Namespace) -> int:
    """Print GB/s of each norm, of the limit, and their ratio; return 1 if a result is wrong."""
    import cupy

    clock = Clock()
    print("GB/s of the bytes that must move; the limit is a copy, or a sum of two arrays.\n")
    print(
        f"{'norm':<12}{'direction':<10}{'x':<24}{'weight':<10}{'limit':>8}{'ours':>8}{'ratio':>7}"
    )
    wrong = 0
    for rows, cols in options.shapes:
        for norm in ("rms_norm", "layer_norm"):
            for direction in ("forward", "backward"):
                problem = Problem(norm, direction, rows, cols, options.dtype, options.weight_dtype)
                arrays = inputs(problem, 0, cupy)
                move, call = limit(problem, arrays), ours(problem, arrays)
                poison(arrays)
                outputs = dict(zip(problem.outputs, call(), strict=True))
                reason = _oracle.verdict(_oracle.errors(problem, arrays, outputs, cupy))
                del outputs
                fastest = 1e-9 * problem.bytes / clock.measure([move]).median
                line = (
                    f"{norm:<12}{direction:<10}{f'{rows}x{cols} {options.dtype}':<24}"
                    f"{options.weight_dtype:<10}{fastest:>8.0f}"
                )
                if reason is None:
                    speed = 1e-9 * problem.bytes / clock.measure([call]).median
                    line += f"{speed:>8.0f}{speed / fastest:>7.2f}"
                else:
                    wrong += 1
                    line += f"   WRONG, not timed: {reason}"
                print(line, flush=True)
    if wrong:
        print(f"\n{wrong} of {4 * len(options.shapes)} results are WRONG.")
    return 1 if wrong else 0
