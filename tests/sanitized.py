"""Each kernel in each class of dtypes, under NVIDIA's compute-sanitizer; plain rows by each option.

Norms of `cupynorm.fuse`, quantized norms, norms over any axes, and weights that vary from row to
row are among them.

`python tests/sanitized.py` needs a GPU and `compute-sanitizer`. It first runs the cases alone, so
that their kernels are compiled. Then it runs them under each tool, and says in a line which passed.
Every result is held to the reference. `python tests/sanitized.py memcheck` runs one tool. With
`--seconds 50` each run begins no case after 50 seconds. Cases come in such an order that any number
of them meets as many kernels as it can.

If a run fails, all that it said follows, each report below the case in which something was found.
A tool does not follow all that orders two accesses. Reports of the kernels in UNFOLLOWED are
counted, and the run passes if there are no others.

Rows are of so many bytes that an H200 chooses the kernel that their name tells. No kernel is left
out (`test_sanitized.py`).
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
from strategies import DTYPES, RELUS, Layout, Problem, make_values
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
GROUPS, AXES = "groups", "axes"  # of cases by OfAxes
# A norm has one of the two dtypes of 16 bits.
CLASSES = {
    "rms_norm": ("bfloat16", "float32", "float64"),
    "layer_norm": ("float16", "float32", "float64"),
}
EACH = 2  # options of each kind of rows, norm and dtype


@dataclasses.dataclass(frozen=True)
class OfAxes:
    """A case over any axes, whose weight and bias have shapes of their own."""

    name: str
    norm: Any
    x: str
    shape: tuple[int, ...]
    weight: tuple[int, ...] | None
    bias: tuple[int, ...] | None
    axis: tuple[int, ...] = (-1,)
    regime: str = "normal"  # of x and dy
    relu: tuple[float, float] | None = None
    zero_centered: bool = False
    in_place: bool = False
    vectors: tuple[str, str] = ("float32", "bfloat16")  # the dtypes of weight and bias
    infers: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.name}-{self.norm}-{self.x}-{'x'.join(map(str, self.shape))}"

    def problem(self) -> Problem:
        def drawn(shape: tuple[int, ...] | None, dtype: str, regime: str, seed: int) -> Any:
            return None if shape is None else make_values(regime, shape, DTYPES[dtype], seed)

        return Problem(
            norm=self.norm,
            k=len(self.axis),
            eps=1e-5,
            axis=self.axis,
            zero_centered=self.zero_centered,
            relu=self.relu,
            out_dtype=DTYPES[self.x],
            wants_dbias=self.bias is not None,
            regime=self.regime,
            seed=1,
            layouts=dict.fromkeys(("x", "dy", "weight", "bias"), Layout()),
            x=drawn(self.shape, self.x, self.regime, 1),
            dy=drawn(self.shape, self.x, self.regime, 2),
            weight=drawn(self.weight, self.vectors[0], "normal", 3),
            bias=drawn(self.bias, self.vectors[1], "normal", 4),
        )


@dataclasses.dataclass(frozen=True)
class Sanitized:
    """A case, the name of its option, and whether its kernels are those of many rows."""

    case: Case | OfAxes
    option: str
    many: bool = False

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


_CLIPS: dict[str, Any] = {"relu": RELUS[1]}
_AROUND_0: dict[str, Any] = {"zero_centered": True}
# Weight or bias varies from row to row. An element of them serves one column, or some: fewer than a
# pack has, or whole packs. Rows of a vector lie one after the other, or those of all take turns.
OF_GROUPS = (
    OfAxes("heads", "rms_norm", "bfloat16", (3, 5, 4, 128), (4, 128), None, **_AROUND_0),
    OfAxes("AdaLN", "layer_norm", "float16", (2, 70, 96), (2, 1, 96), (2, 1, 96), **_CLIPS),
    OfAxes("AdaLN", "rms_norm", "float64", (2, 3, 5, 40), (3, 1, 40), (40,), in_place=True),
    OfAxes("one weight, many biases", "layer_norm", "float32", (2, 7, 96), (96,), (2, 1, 96)),
    OfAxes("a number a row", "rms_norm", "float32", (9, 48), (9, 1), None, **_AROUND_0),
    OfAxes("a number a row", "layer_norm", "float64", (9, 48), (9, 1), (9, 1), **_CLIPS),
    OfAxes(
        *("GroupNorm", "layer_norm", "float16", (2, 4, 3, 6, 4), (4, 3, 1, 1), (4, 3, 1, 1)),
        axis=(2, 3, 4),
    ),
    OfAxes(
        *("GroupNorm by columns", "layer_norm", "float32", (2, 2, 3, 7), (2, 3, 1), (2, 3, 1)),
        **{"axis": (2, 3)} | _CLIPS,
    ),
    OfAxes("bias by channels", "rms_norm", "float64", (2, 5, 3, 8), None, (3, 1), axis=(2, 3)),
    OfAxes(
        *("several rows a block", "rms_norm", "bfloat16", (60, 11, 4, 64), (11, 4, 1), (11, 4, 1)),
        axis=(2, 3),
    ),
    # Few rows have a cluster for each, of other kernels than many.
    OfAxes(
        *("clusters", "layer_norm", "float16", (2, 3, 16, 1024), (3, 16, 1), (3, 16, 1)),
        **{"axis": (2, 3), "vectors": ("float16", "float16")},
    ),
    # Clusters take rows of all vectors, in both passes.
    OfAxes(
        *("all as one", "layer_norm", "float16", (2, 3, 16, 1024), (3, 16, 1), (3, 16, 1)),
        **{"axis": (2, 3)} | _CLIPS,
    ),
    OfAxes("pipelined", "layer_norm", "float32", (2, 3, 12288), (3, 12288), (3, 12288), **_CLIPS),
    OfAxes(
        *("pipelined by columns", "rms_norm", "float32", (2, 2, 3, 8193), (2, 3, 1), None),
        axis=(2, 3),
    ),
    OfAxes(
        *("pipelined by packs", "layer_norm", "float16", (2, 2, 16, 1200), (2, 16, 1)),
        *((2, 16, 1), (2, 3)),
    ),
    OfAxes("streamed", "layer_norm", "float32", (1, 2, 400004), (2, 400004), (400004,)),
    OfAxes(
        *("streamed by columns", "rms_norm", "float32", (1, 2, 2, 200002), (2, 2, 1), None),
        axis=(2, 3),
    ),
    OfAxes(
        *("streamed by packs", "layer_norm", "float16", (2, 1, 1, 800008), (1, 1, 1)),
        *((2, 1, 1, 1), (2, 3)),
    ),
)
# Rows lie side by side.
OF_AXES = (
    OfAxes("channels", "rms_norm", "bfloat16", (12, 40, 16, 8), (40, 1, 1), None, (1,)),
    OfAxes("channels", "layer_norm", "float16", (12, 40, 16, 8), (40, 1, 1), (40, 1, 1), (1,)),
    OfAxes(
        *("channels in place", "layer_norm", "float32", (3, 33, 16), (33, 1), (33, 1), (1,)),
        in_place=True,
    ),
    OfAxes(
        *("channels at any address", "rms_norm", "float32", (3, 33, 7, 3), (33, 1, 1), None, (1,)),
        **_AROUND_0,
    ),
    OfAxes(
        *("channels out of range", "layer_norm", "float32", (9, 70, 50), (70, 1), (70, 1), (1,)),
        regime="extreme",
    ),
    OfAxes("first axis", "rms_norm", "float64", (130, 64), (130, 1), (130, 1), (0,)),
    OfAxes("two axes", "layer_norm", "float64", (2, 5, 9, 24), (5, 9, 1), None, (1, 2)),
    # Blocks take several tiles, one after the other.
    OfAxes("many channels", "layer_norm", "float16", (400, 20, 80), (20, 1), (20, 1), (1,)),
    OfAxes("without a weight", "rms_norm", "bfloat16", (3, 40, 50), None, None, (1,)),
)


def _cases_of_axes() -> Iterator[Sanitized]:
    yield from (Sanitized(case, GROUPS) for case in OF_GROUPS)
    yield from (Sanitized(case, AXES) for case in OF_AXES)
    (clusters,) = (case for case in OF_GROUPS if case.name == "clusters")
    yield Sanitized(clusters, GROUPS, many=True)
    # Each kernel that sums them up, of weights and of biases.
    of_sums = "a number a row", "AdaLN", "channels"
    yield from (
        Sanitized(case, SUMS)
        for case in (*OF_GROUPS, *OF_AXES)
        if case.name in of_sums and case.norm == "layer_norm"
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
CASES = (*QUANTIZED, *map(OfFused, CALLS_OF_FUSED), *_cases_of_axes(), *_cases())


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
