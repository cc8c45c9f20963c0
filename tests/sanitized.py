"""Each kernel in each class of dtypes and with each option, under NVIDIA's compute-sanitizer.

`python tests/sanitized.py` needs a GPU and `compute-sanitizer`. It first runs the cases alone, so
that their kernels are compiled. Then it runs them under each tool, and says which passed. Every
result is held to the reference. `python tests/sanitized.py memcheck` runs one tool.

A tool reports below the case that it found something in. Rows are of so many bytes that an H200
chooses the kernel that their name tells (`test_sanitized.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from device import kernels_of_many_rows, to_cupy, to_numpy
from host.checks import NORMS, Case, check_problem
from residuals import OfCupyNorm, check_residual, with_residual
from strategies import DTYPES, RELUS

from cupynorm._background import SWITCH
from cupynorm._environment import gpu_problem

ALONE = "alone"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
COMMAND = ("compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no")
# Python imports for several seconds before it starts CUDA.
COMMAND += ("--launch-timeout", "120")


@dataclasses.dataclass(frozen=True)
class Rows:
    """So many rows of so many bytes, but at most MOST elements.

    If `many`, their kernels are those of many rows.
    """

    m: int
    nbytes: int
    many: bool = False


# By what is special about their kernels.
ROWS = {
    "parts of a warp": Rows(70, 80),
    "warps": Rows(9, 8192),
    "several warps": Rows(5, 32768),
    "clusters": Rows(5, 65536),
    "strips": Rows(3, 524288),
    "streamed": Rows(2, 1600016),
    "parts of a warp, many": Rows(300, 80, many=True),
    "warps, many": Rows(300, 8192, many=True),
    # Two rows for each cluster, one after the other, if they are of 8 or 4 bytes.
    "clusters, many": Rows(150, 65536, many=True),
}
MOST = 2**21
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weight and bias": {"weight": None, "bias": None, "wants_dbias": False},
    "zero_centered": {"weight": "bfloat16", "bias": "float64", "zero_centered": True},
    "relu": {"relu": RELUS[1]},
    "strided": {"gap": 8, "bias": None, "dy": "float32"},
    "unaligned": {"offset": 1, "weight_offset": 1, "y": "float32"},
    "in place": {"in_place": True},
}
# The sum has x's dtype.
RESIDUALS = {"residual": "bfloat16", "wide residual": "float32"}
NAMES = (*OPTIONS, *RESIDUALS)
# A norm has one of the two dtypes of 16 bits.
CLASSES = {
    "rms_norm": ("bfloat16", "float32", "float64"),
    "layer_norm": ("float16", "float32", "float64"),
}
EACH = 2  # options of each kind of rows, norm and dtype


@dataclasses.dataclass(frozen=True)
class Sanitized:
    """A case, whether its kernels are those of many rows, and the dtype of its residual."""

    case: Case
    many: bool
    residual: str | None

    def __str__(self) -> str:
        return str(self.case)

    def check(self, caller: Any) -> None:
        """Run inference, forward and backward, and check every field of each."""
        problem = self.case.problem()
        if self.residual is None:
            check_problem(caller, problem, in_place=self.case.in_place, infers=self.case.infers)
            return
        layout = problem.layouts["x"]
        check_residual(caller, with_residual(problem, self.residual, self.case.x, layout=layout))


def _cases() -> Iterator[Sanitized]:
    """Yield the cases. The options take turns, so that each kernel meets each of them."""
    turn = 0
    for name, rows in ROWS.items():
        for norm in NORMS:
            for x in CLASSES[norm]:
                for option in (NAMES[(turn + i) % len(NAMES)] for i in range(EACH)):
                    n = rows.nbytes // DTYPES[x].itemsize
                    m, given = min(rows.m, MOST // n), OPTIONS.get(option, {})
                    case = Case(f"{name}, {option}", norm, m, n, x, **given)
                    yield Sanitized(case, rows.many, RESIDUALS.get(option))
                turn += EACH


CASES = tuple(_cases())


class Caller(OfCupyNorm):
    """The public functions, in the form that `check_problem` takes too."""

    build = True

    def __init__(self, xp: Any, put: Any, get: Any) -> None:
        super().__init__(xp, put, get)
        self.cupy, self.to_numpy = xp, get

    def forward(
        self, norm: str, *arguments: Any, store_statistics: bool = True, **options: Any
    ) -> Any:
        call = super().forward if store_statistics else self.infer
        return call(norm, *arguments, **options)

    def fresh_memory(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def run(caller: Any, *, threads: int, says: bool) -> None:
    """Run all cases on a GPU, those of few rows first."""

    def check(one: Sanitized) -> None:
        if says:
            print(one, flush=True)
        one.check(caller)

    for many in (False, True):
        with (
            kernels_of_many_rows() if many else contextlib.nullcontext(),
            ThreadPoolExecutor(threads) as pool,
        ):
            list(pool.map(check, (one for one in CASES if one.many == many)))


def run_on_gpu(*, alone: bool) -> None:
    import cupy

    # Each array has memory of its own, so that its bounds are seen.
    cupy.cuda.set_allocator(None)
    # Under a tool, cases run one after another, since it reports below a case's name.
    threads = os.cpu_count() or 1
    run(Caller(cupy, to_cupy, to_numpy), threads=threads if alone else 1, says=not alone)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/sanitized.py", description=__doc__)
    parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--run", choices=(ALONE, *TOOLS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.tools) - {*TOOLS}
    if unknown:
        parser.error(f"tools: must be of {', '.join(TOOLS)}, got {', '.join(sorted(unknown))}")
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to run: {missing}.")
        return 1
    if options.run:
        run_on_gpu(alone=options.run == ALONE)
        return 0
    print(f"{len(CASES)} cases")
    failed = 0
    for tool in (ALONE, *(options.tools or TOOLS)):
        under = () if tool == ALONE else (*COMMAND, "--tool", tool)
        # Each call runs its own kernel.
        environment = os.environ | {SWITCH: "0"}
        started = time.monotonic()
        program = (sys.executable, str(Path(__file__)), "--run", tool)
        done = subprocess.run((*under, *program), env=environment)
        outcome = "passed" if done.returncode == 0 else f"FAILED with {done.returncode}"
        print(f"{tool}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
        failed += done.returncode != 0
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
