"""``python -m cupynorm``: what this machine has, then each norm run, checked and timed.

``python -m cupynorm bench`` times them against the limit that the memory sets, over some shapes.
``python -m cupynorm --version`` prints the version alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cupynorm
from cupynorm import _bench_command, testing
from cupynorm._environment import cache_is_writable, describe, gpu_problem
from cupynorm._operation import Norm

EPS = 1e-5
NORMS: tuple[Norm, ...] = ("rms_norm", "layer_norm")


class Problem(NamedTuple):
    """What to normalize: x is rows x cols of `dtype`."""

    rows: int
    cols: int
    dtype: np.dtype[Any]
    weight_dtype: np.dtype[Any]


FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GPU_PROBLEMS = (Problem(4096, 768, FLOAT16, FLOAT16), Problem(32768, 4096, BFLOAT16, FLOAT32))
CPU_PROBLEMS = (Problem(512, 768, FLOAT16, FLOAT16), Problem(256, 4096, BFLOAT16, FLOAT32))


@dataclass(frozen=True)
class Machine:
    """How arrays move to the device and back, and how a call is timed there."""

    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    seconds: Callable[[Callable[[], object]], float]


class Outcome(NamedTuple):
    """One pass of one norm: its time, the bytes that it must move, and its errors."""

    direction: str
    seconds: float
    traffic: int
    right: bool
    errors: str


def cpu() -> Machine:
    """Return the CPU, by NumPy."""

    def seconds(call: Callable[[], object]) -> float:
        spans = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            spans.append(time.perf_counter() - start)
        return statistics.median(spans)

    return Machine(put=np.asarray, get=np.asarray, seconds=seconds)


def gpu() -> Machine:
    """Return the current GPU, by CuPy."""
    import cupy

    from cupynorm._bench import Clock

    clock = Clock()

    def seconds(call: Callable[[], object]) -> float:
        return statistics.median(clock.sample([call], 15))

    return Machine(put=cupy.asarray, get=cupy.asnumpy, seconds=seconds)


def run(norm: Norm, problem: Problem, machine: Machine) -> Iterator[Outcome]:
    """Yield the outcome of the forward pass, then of the backward pass on what it stored."""
    rng = np.random.default_rng(0)
    shape = (problem.rows, problem.cols)
    x = rng.standard_normal(shape, np.float32).astype(problem.dtype)
    dy = rng.standard_normal(shape, np.float32).astype(problem.dtype)
    weight = rng.uniform(0.5, 1.5, problem.cols).astype(problem.weight_dtype)
    has_bias = norm == "layer_norm"
    bias = rng.standard_normal(problem.cols).astype(problem.weight_dtype) if has_bias else None
    affine_bytes = weight.nbytes * (1 + has_bias)
    there_x, there_dy, there_weight = machine.put(x), machine.put(dy), machine.put(weight)
    there_bias = None if bias is None else machine.put(bias)

    def fields(result: Any) -> Iterator[Any]:
        return (None if field is None else machine.get(field) for field in result)

    def forward() -> Any:
        return getattr(cupynorm, f"{norm}_forward")(there_x, there_weight, there_bias, eps=EPS)

    stored = forward()
    here = cupynorm.NormForward(*fields(stored))
    right, errors = verdict(testing.check_forward, norm, here, x, weight, bias, eps=EPS)
    traffic = 2 * x.nbytes + affine_bytes
    yield Outcome("forward", machine.seconds(forward), traffic, right, errors)

    def backward() -> Any:
        stats = (stored.mean, stored.rstd) if norm == "layer_norm" else (stored.rstd,)
        function = getattr(cupynorm, f"{norm}_backward")
        return function(there_dy, there_x, there_weight, *stats, bias=has_bias)

    gradients = cupynorm.NormBackward(*fields(backward()))
    given = (dy, x, weight, here.mean, here.rstd)
    right, errors = verdict(testing.check_backward, norm, gradients, *given, bias=has_bias)
    traffic = 3 * x.nbytes + weight.nbytes + affine_bytes
    yield Outcome("backward", machine.seconds(backward), traffic, right, errors)


def verdict(check: Callable[..., dict[str, float]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Return whether a check passes, and by how much or why not."""
    try:
        ratios = check(*args, **kwargs)
    except AssertionError as error:
        return False, str(error)
    return True, ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def row(*cells: str) -> str:
    """Lay out one line of the table."""
    return "{:<11}{:<10}{:<20}{:<10}{:>9}{:>9}  {:<7}{}".format(*cells)


def report(norm: Norm, problem: Problem, outcome: Outcome) -> str:
    """Return the outcome's line of the table."""
    return row(
        norm,
        outcome.direction,
        f"{problem.rows}x{problem.cols} {problem.dtype}",
        str(problem.weight_dtype),
        f"{1e3 * outcome.seconds:.4f}",
        f"{1e-9 * outcome.traffic / outcome.seconds:.1f}",
        "right" if outcome.right else "WRONG",
        outcome.errors,
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return 0 if every result is right, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m cupynorm",
        description="Show what this machine offers, then run, check and time each norm's passes.",
    )
    version = f"cupynorm {cupynorm.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command")
    bench = commands.add_parser(
        "bench",
        help="time each norm against the memory's limit",
        description=_bench_command.__doc__,
    )
    _bench_command.add_arguments(bench)
    options = parser.parse_args(arguments)

    print(version)
    for name, fact in describe().items():
        print(f"  {name:<13} {fact}")

    missing = gpu_problem()
    if not missing and not cache_is_writable():
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # for this process, so that it can compile
    if options.command == "bench":
        if missing:
            print(f"\nThere is nothing to time: {missing}.")
            return 1
        print()
        return _bench_command.main(options)
    if missing:
        print(f"\nNo GPU can be used: {missing}. So: smaller arrays, on the CPU, by NumPy.")
    machine, problems = (cpu(), CPU_PROBLEMS) if missing else (gpu(), GPU_PROBLEMS)

    print("\n" + row("norm", "direction", "x", "weight", "ms", "GB/s", "", "error / bound"))
    outcomes = []
    for problem in problems:
        for norm in NORMS:
            for outcome in run(norm, problem, machine):
                print(report(norm, problem, outcome), flush=True)
                outcomes.append(outcome)
    wrong = sum(not outcome.right for outcome in outcomes)
    print(f"\n{wrong} of {len(outcomes)} results are WRONG." if wrong else "\nAll are right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `head` has read enough; what Python flushes at its exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
