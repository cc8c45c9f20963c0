"""Each kernel in each class of dtypes and with each option, under NVIDIA's compute-sanitizer.

Norms of `cupynorm.fuse` and quantized norms are among them.

`python tests/sanitized.py` needs a GPU and `compute-sanitizer`. It first runs the cases alone, so
that their kernels are compiled. Then it runs them under each tool, and says in a line which passed.
Every result is held to the reference. `python tests/sanitized.py memcheck` runs one tool. With
`--seconds 50` each run begins no case after 50 seconds. Cases come in such an order that any number
of them meets as many kernels as it can.

If a run fails, all that it said follows, each report below the case in which something was found.
A tool does not follow all that orders two accesses. Reports of the kernels in UNFOLLOWED are
counted, and the run passes if there are no others.

Rows are of so many bytes that an H200 chooses the kernel that their name tells
(`test_sanitized.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from device import kernels_of_many_rows, to_cupy, to_numpy
from fused_gpu import FUSED, call_of_many, check_passes, passes
from host.checks import NORMS, Case, check_problem
from residuals import OfCupyNorm, check_residual, with_residual
from strategies import DTYPES, RELUS, make_values
from sums import check_sums, with_sums

from cupynorm import Quantize, testing
from cupynorm._background import SWITCH
from cupynorm._environment import gpu_problem

ALONE = "alone"
RAN = "cases that ran: "  # what a run says at its end
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
COMMAND = ("compute-sanitizer", "--error-exitcode", "1", "--report-api-errors", "no")
# Python imports for several seconds before it starts CUDA.
COMMAND += ("--launch-timeout", "120")
# Reports that do not count must not hide others.
FURTHER = {"racecheck": ("--print-limit", "100000")}

MAILBOX = "Sums of warps are written again when the block's sum has come by st.async, made of them."
# What a tool does not follow, by tool and kernel. The host's race detector follows it, and notices
# if it is missing (data/mutations.txt).
UNFOLLOWED = {
    ("racecheck", "norm_forward_pipelined"): MAILBOX,
    ("racecheck", "norm_backward_pipelined"): MAILBOX,
    ("racecheck", "fused_forward"): MAILBOX,
    ("racecheck", "fused_backward"): MAILBOX,
    ("racecheck", "norm_backward_column_parallel"): (
        "The warp that writes means only arrives at the barrier where those that read them wait."
    ),
}


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
SUMS = "given sums"  # once for each kind of rows and norm
# A norm has one of the two dtypes of 16 bits.
CLASSES = {
    "rms_norm": ("bfloat16", "float32", "float64"),
    "layer_norm": ("float16", "float32", "float64"),
}
EACH = 2  # options of each kind of rows, norm and dtype


@dataclasses.dataclass(frozen=True)
class Sanitized:
    """A case, the name of its option, and whether its kernels are those of many rows."""

    case: Case
    option: str
    many: bool

    @property
    def residual(self) -> str | None:
        return RESIDUALS.get(self.option)

    def __str__(self) -> str:
        return str(self.case)

    def check(self, caller: Any) -> None:
        """Run inference, forward and backward, and check every field of each."""
        problem = self.case.problem()
        if self.option == SUMS:
            check_sums(caller, with_sums(problem, "float32", "float64", offset=1))
            return
        if self.residual is None:
            check_problem(caller, problem, in_place=self.case.in_place, infers=self.case.infers)
            return
        layout = problem.layouts["x"]
        check_residual(caller, with_residual(problem, self.residual, self.case.x, layout=layout))


@dataclasses.dataclass(frozen=True)
class OfFused:
    """A call of a norm of `cupynorm.fuse`, by its name."""

    name: str
    option: ClassVar[str] = "fused"
    many: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    def check(self, caller: Any) -> None:
        """Run forward and backward, and check every field of each."""
        call = CALLS_OF_FUSED[self.name]
        check_passes(call, *passes(call, caller.put, caller.get))


CALLS_OF_FUSED = {name: call for name, (call, _) in FUSED.items()}
CALLS_OF_FUSED["fused, streamed"] = call_of_many(2, 300001)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows in registers, whose y is quantized."""

    norm: str
    x: str
    m: int
    n: int
    how: Quantize
    residual: str | None = None
    many: bool = False
    option: ClassVar[str] = "quantized"

    def __str__(self) -> str:
        return f"quantized to {self.how.dtype}-{self.norm}-{self.x}-{self.m}x{self.n}"

    @property
    def arrays(self) -> dict[str, Any]:
        shapes = {"x": (self.x, (self.m, self.n)), "weight": ("float32", (self.n,))}
        if self.residual:
            shapes["residual"] = self.residual, (self.m, self.n)
        return {
            name: make_values("normal", shape, DTYPES[dtype], seed)
            for seed, (name, (dtype, shape)) in enumerate(shapes.items())
        }

    def call(self, caller: Any) -> Callable[[], tuple[Any, ...]]:
        """Return inference on arrays that the caller has put in place."""
        given = {name: caller.put(array) for name, array in self.arrays.items()}
        how = self.how
        if how.is_given:
            how = dataclasses.replace(how, scale=caller.put(how.scale))
        return lambda: caller.quantized(self.norm, **given, eps=1e-5, quantize=how)

    def check(self, caller: Any) -> None:
        """Run inference, and check codes, scales and the sum."""
        result = tuple(map(caller.get, self.call(caller)()))
        testing.check_quantized(self.norm, result, **self.arrays, eps=1e-5, quantize=self.how)


SCALE = np.array([0.037], np.float32)
QUANTIZED = (
    Quantized("rms_norm", "bfloat16", 70, 128, Quantize("float8_e4m3fn", "row")),
    Quantized("layer_norm", "float16", 9, 1000, Quantize("int8", SCALE)),
    Quantized("layer_norm", "bfloat16", 9, 1024, Quantize("float8_e5m2", "block", block=32)),
    Quantized("rms_norm", "float32", 5, 2000, Quantize("int8", "row", via=None), "bfloat16"),
    Quantized("rms_norm", "bfloat16", 5, 5000, Quantize("float8_e4m3fn", "block", block=128)),
    Quantized("rms_norm", "bfloat16", 70, 1000, Quantize("float8_e4m3fn", SCALE, amax=True)),
    Quantized(
        "rms_norm",
        "float32",
        9,
        2048,
        Quantize("float8_e4m3fn", "block", block=128, column_major=True),
    ),
    Quantized("rms_norm", "bfloat16", 300, 256, Quantize("float8_e4m3fn", SCALE, amax=True)),
    Quantized("layer_norm", "float16", 300, 4096, Quantize("float8_e5m2", "row"), "float32", True),
)


def _case(name: str, norm: str, x: str, option: str) -> Sanitized:
    rows, given = ROWS[name], OPTIONS.get(option, {})
    n = rows.nbytes // DTYPES[x].itemsize
    case = Case(f"{name}, {option}", norm, min(rows.m, MOST // n), n, x, **given)
    return Sanitized(case, option, rows.many)


def _cases() -> Iterator[Sanitized]:
    """Yield the cases. The options take turns, so that each kernel meets each of them."""
    options = itertools.cycle(NAMES)
    by_rows: list[list[Sanitized]] = []
    for name, norm in itertools.product(ROWS, NORMS):
        classes = CLASSES[norm]
        cases = [
            _case(name, norm, x, option)
            for x in classes
            for option in itertools.islice(options, EACH)
        ]
        turn = len(by_rows) % len(classes)  # so that the first cases have all classes
        cases = cases[EACH * turn :] + cases[: EACH * turn]
        by_rows.append([*cases, _case(name, norm, classes[turn], SUMS)])
    yield from itertools.chain(*zip(*by_rows, strict=True))


# Most of the first ones are small.
CASES = (*QUANTIZED, *map(OfFused, CALLS_OF_FUSED), *_cases())


class Caller(OfCupyNorm):
    """The public functions, in the form that `check_problem` takes too."""

    build = True

    def __init__(self, xp: Any, put: Any, get: Any) -> None:
        super().__init__(xp, put, get)
        self.cupy, self.to_numpy = xp, get

    def quantized(self, norm: str, **options: Any) -> Any:
        return self.infer(norm, **options)

    def forward(
        self, norm: str, *arguments: Any, store_statistics: bool = True, **options: Any
    ) -> Any:
        call = super().forward if store_statistics else self.infer
        return call(norm, *arguments, **options)

    def fresh_memory(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def run(caller: Any, *, threads: int, says: bool, seconds: float = math.inf) -> int:
    """Run the cases on a GPU, those of few rows first, and return how many ran.

    None begins after so many seconds, of which few rows and many have their shares.
    """
    end = time.monotonic()

    def check(one: Sanitized | Quantized | OfFused) -> int:
        if time.monotonic() > end:
            return 0
        if says:
            print(one, flush=True)
        one.check(caller)
        return 1

    ran = 0
    for many in (False, True):
        cases = [one for one in CASES if one.many == many]
        end += seconds * len(cases) / len(CASES)
        with (
            kernels_of_many_rows() if many else contextlib.nullcontext(),
            ThreadPoolExecutor(threads) as pool,
        ):
            ran += sum(pool.map(check, cases))
    return ran


def run_on_gpu(*, alone: bool, seconds: float) -> None:
    import cupy

    # Each array has memory of its own, so that its bounds are seen.
    cupy.cuda.set_allocator(None)
    # Under a tool, cases run one after another, since it reports below a case's name.
    threads = os.cpu_count() or 1
    caller = Caller(cupy, to_cupy, to_numpy)
    ran = run(caller, threads=threads if alone else 1, says=not alone, seconds=seconds)
    print(f"{RAN}{ran}", flush=True)


def unfollowed(tool: str, said: str) -> Counter[str] | None:
    """Count the reports by kernel if UNFOLLOWED has them all, and the run ended well."""
    kernels = re.findall(r"=+ Error: Race reported between .* at (?:void )?(\w+)", said)
    shown = re.search(r"=+ RACECHECK SUMMARY: (\d+) hazards? displayed", said)
    known = {kernel for of, kernel in UNFOLLOWED if of == tool}
    all_known = shown is not None and int(shown[1]) == len(kernels) > 0 and known >= {*kernels}
    return Counter(kernels) if all_known and f"\n{RAN}" in said else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/sanitized.py", description=__doc__)
    parser.add_argument("tools", nargs="*", help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="no case of a run begins later"
    )
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
        run_on_gpu(alone=options.run == ALONE, seconds=options.seconds)
        return 0
    failed = 0
    for tool in (ALONE, *(options.tools or TOOLS)):
        under = () if tool == ALONE else (*COMMAND, "--tool", tool, *FURTHER.get(tool, ()))
        # Each call runs its own kernel.
        environment = os.environ | {SWITCH: "0"}
        started = time.monotonic()
        program = (sys.executable, str(Path(__file__)), "--run", tool)
        program += ("--seconds", str(options.seconds))
        done = subprocess.run(
            (*under, *program),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        reports = unfollowed(tool, done.stdout) if done.returncode else Counter()
        outcome = "passed" if reports is not None else f"FAILED with {done.returncode}"
        ran = re.findall(f"^{RAN}(\\d+)$", done.stdout, re.MULTILINE)
        which = f"{ran[-1] if ran else 'not all'} of {len(CASES)} cases"
        print(f"{tool}: {outcome}, {which}, {time.monotonic() - started:.0f} s", flush=True)
        for kernel, count in (reports or {}).items():
            print(f"  does not count: {kernel}, reports: {count}. {UNFOLLOWED[tool, kernel]}")
        if reports is None:
            print(done.stdout, flush=True)
        failed += reports is None
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
