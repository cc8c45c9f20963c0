"""Random valid calls for as long as asked, each held to the reference, while memory stays flat.

`python -m benchmarks.soak --seconds 600 --seed 0` needs what the tests need (the extra `test`).

The seed of a call decides everything about it. Seeds count up from `--seed`. A call that fails
prints its own, and `--only SEED` repeats it. Dtypes, options and widths are of a limited number of
kinds, since each kind compiles kernels. Threads compile, as they do for users. Without a GPU,
NumPy, torch and JAX compute on the CPU.

What the frameworks' allocators have handed out must be the same at the half and at the end. The
device's memory also holds kernels that were loaded meanwhile, and is only shown.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import results
from cupynorm import _compile, testing
from cupynorm._background import SWITCH
from cupynorm._environment import describe, gpu_problem

# JAX would take three quarters of the GPU at its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.append(str(results.ROOT / "tests"))  # whose generators are not installed

from device import to_cupy, to_numpy
from host.checks import check_problem
from residuals import check_residual, with_residual
from sanitized import Caller
from strategies import DTYPES, REGIMES, RELUS, Layout, Problem, make_values

NORMS = ("rms_norm", "layer_norm")
KINDS = 48
# Each way to work on rows, whole packs and not.
WIDTHS = (1, 5, 40, 64, 300, 768, 1000, 2048, 4096, 4097, 8192, 12288, 16384, 20001, 32768, 65536)
WIDTHS += (131072, 262152)
MOST_ROWS, MOST_ELEMENTS = 5000, 2**20
LAYOUTS = (Layout(), Layout(gap=8), Layout(gap=1, offset=3))
# JAX compiles each of its programs, so that it has fewer calls, on values in its formula's range.
SHARES = {"NumPy": 8, "CuPy": 8, "torch": 8, "JAX": 1}
REGIMES_OF_JAX = ("normal", "mean_1e2", "mixed_rows")
STREAMS = 4
LINE_SECONDS = 60


@dataclass(frozen=True)
class Drawn:
    """A call: its problem, the dtypes of its residual and of the sum, and how it is made."""

    framework: str
    problem: Problem
    residual: tuple[str, str] | None
    stream: int
    in_place: bool
    infers: bool

    def __str__(self) -> str:
        problem = self.problem
        said = f"{self.framework} {problem.norm}, {problem.description}, {problem.regime}"
        options = problem.forward_options | {"residual": self.residual, "dx=dy": self.in_place}
        return f"{said}, {options}"


def draw(seed: int, frameworks: Sequence[str]) -> Drawn:
    """Return the call of a seed."""
    of_call = np.random.default_rng([0, seed])
    of_kind = np.random.default_rng([1, int(of_call.integers(KINDS))])

    def one_of(options: Any, rng: Any = of_kind) -> Any:
        return options[int(rng.integers(len(options)))]

    shares = [SHARES[name] for name in frameworks]
    framework = one_of(
        [n for n, s in zip(frameworks, shares, strict=True) for _ in range(s)], of_call
    )
    norm, n, layout = one_of(NORMS), one_of(WIDTHS), one_of(LAYOUTS)
    x, y, dy = (DTYPES[one_of([*DTYPES])] for _ in range(3))
    weight, bias = (one_of([None, *DTYPES.values()]) for _ in range(2))
    zero_centered = weight is not None and bool(of_kind.random() < 0.3)
    relu, wants_dbias = one_of([None, *RELUS]), bool(of_kind.random() < 0.5)
    residual = None if of_kind.random() < 0.6 else (one_of([*DTYPES]), one_of([*DTYPES]))
    k = 2 if n % 2 == 0 and of_kind.random() < 0.2 else 1
    row = (2, n // 2) if k == 2 else (n,)
    most = max(1, min(MOST_ROWS, MOST_ELEMENTS // n))
    m = int(math.exp(of_call.uniform(0, math.log(most + 1))))
    if framework == "JAX":
        y = dy  # a gradient has its array's dtype
    regime = one_of(REGIMES_OF_JAX if framework == "JAX" else REGIMES, of_call)
    shape, seeds = (m, *row), iter(range(10 * seed, 10 * seed + 10))

    def values(of: str, shape: tuple[int, ...], dtype: Any, where: Layout) -> Any:
        if dtype is None:
            return None
        drawn = make_values(of, shape, dtype, next(seeds), min(k, len(shape)))
        return where.apply(np, drawn)

    rows = Layout(k=k, gap=layout.gap, offset=layout.offset)
    problem = Problem(
        norm=norm,
        k=k,
        eps=1e-5,
        axis=tuple(range(-k, 0)),
        zero_centered=zero_centered,
        relu=relu,
        out_dtype=y,
        wants_dbias=wants_dbias,
        regime=regime,
        seed=seed,
        layouts={"x": rows, "dy": rows, "weight": Layout(k=k), "bias": Layout(k=k)},
        x=values(regime, shape, x, rows),
        dy=values("normal", shape, dy, rows),
        weight=values("normal", row, weight, Layout(k=k)),
        bias=values("normal", row, bias, Layout(k=k)),
    )
    return Drawn(
        framework,
        problem,
        residual,
        stream=int(of_call.integers(STREAMS)),
        in_place=x == y == dy and bool(of_call.random() < 0.5),
        infers=bool(of_call.random() < 0.5),
    )


# ---- frameworks ----------------------------------------------------------------------------------


def _check_by(caller: Caller, drawn: Drawn) -> None:
    if drawn.residual is None:
        check_problem(caller, drawn.problem, in_place=drawn.in_place, infers=drawn.infers)
        return
    layout = drawn.problem.layouts["x"]
    check_residual(caller, with_residual(drawn.problem, *drawn.residual, layout=layout))


def numpy_checks() -> Callable[[Drawn], None]:
    caller = Caller(np, np.array, lambda result: result)
    return lambda drawn: _check_by(caller, drawn)


def cupy_checks() -> Callable[[Drawn], None]:
    import cupy

    caller = Caller(cupy, to_cupy, to_numpy)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]

    def check(drawn: Drawn) -> None:
        stream = streams[drawn.stream]
        with stream:
            _check_by(caller, drawn)
        stream.synchronize()

    return check


def torch_checks(device: str) -> Callable[[Drawn], None]:
    import torch
    from torch_checks import check_problem as check_by_torch

    streams = [torch.cuda.Stream() for _ in range(STREAMS if device == "cuda" else 0)]

    def check(drawn: Drawn) -> None:
        with torch.cuda.stream(streams[drawn.stream]) if streams else contextlib.nullcontext():
            check_by_torch(drawn.problem, device, dtypes=drawn.residual)

    return check


def jax_checks() -> Callable[[Drawn], None]:
    import jax
    import jax_calls

    def check(drawn: Drawn) -> None:
        problem, given = drawn.problem, {}
        if drawn.residual is not None:
            of_residual, of_total = (DTYPES[name] for name in drawn.residual)
            shape, k = problem.x.shape, problem.k
            given["residual"] = make_values("normal", shape, of_residual, problem.seed, k)
            given["dresidual_out"] = make_values("normal", shape, of_total, problem.seed + 1, k)
            given["residual_dtype"] = of_total
        with jax.enable_x64(True):
            jax_calls.check(
                problem.norm,
                problem.x,
                problem.weight,
                problem.bias,
                dy=problem.dy,
                k=problem.k,
                eps=problem.eps,
                zero_centered=problem.zero_centered,
                relu=problem.relu,
                optimized=True,
                **given,
            )

    return check


def frameworks_here() -> dict[str, Callable[[Drawn], None]]:
    """Return what checks a call of each framework that is installed, on a GPU if there is one."""
    has_gpu = gpu_problem() is None
    found = {"CuPy": cupy_checks()} if has_gpu else {"NumPy": numpy_checks()}
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available() == has_gpu:
            found["torch"] = torch_checks("cuda" if has_gpu else "cpu")
    if importlib.util.find_spec("jax"):
        import jax

        if (jax.default_backend() == "gpu") == has_gpu:
            found["JAX"] = jax_checks()
    return found


# ---- memory --------------------------------------------------------------------------------------


def memory() -> dict[str, int]:
    """Return the bytes that each allocator has handed out, and those of the device in use."""
    gc.collect()
    if gpu_problem():
        return {}
    import cupy

    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    found = {"CuPy": int(pool.used_bytes())}
    pool.free_all_blocks()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch"] = int(torch.cuda.memory_allocated())
        torch.cuda.empty_cache()
    free, total = cupy.cuda.Device().mem_info
    return found | {"device": int(total - free)}


def growth(half: dict[str, int], end: dict[str, int]) -> dict[str, int]:
    """Return by how many bytes the allocators' memory grew, where it did."""
    grown = {name: end[name] - half[name] for name in half if name != "device"}
    return {name: nbytes for name, nbytes in grown.items() if nbytes > 0}


# ---- the run -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a run has found so far."""

    calls: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)  # error over bound, by framework
    failed: list[int] = field(default_factory=list)  # seeds

    def __str__(self) -> str:
        made = ", ".join(f"{count} {name}" for name, count in sorted(self.calls.items()))
        worst = max(self.worst.values(), default=0.0)
        return f"{made} calls, {len(self.failed)} failed, worst error {worst:.3f} of the bound"


@contextlib.contextmanager
def recorded(tally: Tally, framework: str) -> Iterator[None]:
    """Keep the largest ratio of an error to its bound while a block of checks runs."""
    compare = testing.assert_one_rounding

    def kept(*arguments: Any) -> float:
        ratio = compare(*arguments)
        tally.worst[framework] = max(ratio, tally.worst.get(framework, 0.0))
        return ratio

    with mock.patch.object(testing, "assert_one_rounding", kept):
        yield


def call(seed: int, frameworks: dict[str, Callable[[Drawn], None]], tally: Tally) -> None:
    """Make and check the call of a seed. A failure is printed and counted."""
    drawn = draw(seed, sorted(frameworks))
    try:
        with recorded(tally, drawn.framework), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            frameworks[drawn.framework](drawn)
    except Exception as error:  # whatever it is, the call's seed repeats it
        tally.failed.append(seed)
        print(f"seed {seed} FAILED: {drawn}\n  {type(error).__name__}: {error}", flush=True)
    tally.calls[drawn.framework] += 1


def said(memory: dict[str, int]) -> str:
    held = (f"{name} {nbytes / 2**20:.1f} MiB" for name, nbytes in memory.items())
    return ", ".join(held) or "nothing on a GPU"


def soak(
    frameworks: dict[str, Callable[[Drawn], None]], seconds: float, seed: int
) -> dict[str, Any]:
    """Make calls for so many seconds. Return what was found."""
    tally, seen = Tally(), []
    start = time.monotonic()
    half, line = seconds / 2, LINE_SECONDS
    before: dict[str, int] | None = None
    while (now := time.monotonic() - start) < seconds:
        if before is None and now >= half:
            before = memory()
        if now >= line:
            line += LINE_SECONDS
            held = memory()
            seen.append({"seconds": now, "kernels": len(_compile._functions), **held})
            print(f"{now:.0f} s: {tally}; {said(held)}", flush=True)
        call(seed, frameworks, tally)
        seed += 1
    after = memory()
    grown = growth(before or {}, after)
    held = f"at the half {said(after if before is None else before)}, at the end {said(after)}"
    print(f"{tally}; memory {held}")
    if grown:
        print(f"memory GREW: {said(grown)}")
    return {
        "calls": dict(tally.calls),
        "worst": tally.worst,
        "failed": tally.failed,
        "grown": grown,
        "memory": [*seen, {"seconds": seconds, "kernels": len(_compile._functions), **after}],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="the JSON file to write")
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the first call (default: 0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="make the call of this seed alone")
    options = parser.parse_args(arguments)
    frameworks = frameworks_here()
    print(f"{', '.join(frameworks)}: {describe()['GPU']}")
    if options.only is not None:
        tally = Tally()
        print(f"seed {options.only}: {draw(options.only, sorted(frameworks))}")
        call(options.only, frameworks, tally)
        print(tally)
        return min(len(tally.failed), 1)
    found = soak(frameworks, options.seconds, options.seed)
    if options.results:
        head = {"commit": results.commit(), "versions": describe()}
        asked = {"seed": options.seed, "seconds": options.seconds}
        results.save(head | asked | found, options.results)
    return int(bool(found["failed"] or found["grown"]))


if __name__ == "__main__":
    os.environ[SWITCH] = "1"  # benchmarks turn it off
    sys.exit(main())
