"""Random valid calls for as long as asked, each held to the reference, while memory stays flat.

`python -m benchmarks.soak --seconds 600 --seed 0` needs what the tests need (the extra `test`).

The seed of a call, and which frameworks there are, decide everything about it but one thing: a
torch tensor has the alignment of the NumPy array that it copies. Seeds count up from `--seed` for
half of the time. The second half repeats the calls of the first, so that they load few further
kernels, and memory must be flat. A call that fails prints its seed. Where there are the same
frameworks, `--only SEED` repeats it. Dtypes, options and widths are of a limited number of kinds,
since each kind compiles kernels. Threads compile, as they do for users. Without a GPU, NumPy, torch
and JAX compute on the CPU.

Calls are plain ones, and such with a residual, with gradients that are added to given ones (which
torch and JAX lack), with quantized outputs, or of a norm of `cupynorm.fuse`.

What the frameworks' allocators have handed out must be the same at the half and at the end. The
process's resident memory varies by some MiB. It must not grow by more than 32 MiB in the third
quarter and again in the last. JAX's programs are dropped before it is read, since each shape has
its own. The device's memory is shared with other processes, and is only shown.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
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

import cupynorm
import cupynorm.math as cm
from benchmarks import results
from cupynorm import NormBackward, Quantize, _compile, testing
from cupynorm._background import SWITCH
from cupynorm._environment import describe, gpu_problem
from cupynorm.reference import round_once

# JAX would take three quarters of the GPU at its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.append(str(results.ROOT / "tests"))  # whose generators are not installed

from device import to_cupy, to_numpy
from fused_gpu import FUNCTIONS, GATED, MANY, check_passes, passes
from fused_norms import Call
from host.checks import check_problem
from quantized_gpu import AMAX, BY_COLUMN, HOWS, told_in
from residuals import check_residual, with_residual
from sanitized import Caller
from strategies import DTYPES, REGIMES, RELUS, Layout, Problem, make_values
from sums import check_sums, with_sums

NORMS = ("rms_norm", "layer_norm")
WAYS = (*("plain", "plain", "plain", "residual", "residual"), "sums", "quantized", "fused")
QUANTIZED = (*HOWS, *AMAX, *BY_COLUMN)
KINDS = len(WAYS) * len(QUANTIZED)
# Each way to work on rows, whole packs and not.
WIDTHS = (1, 5, 40, 64, 300, 768, 1000, 2048, 4096, 4097, 8192, 12288, 16384, 20001, 32768, 65536)
WIDTHS += (131072, 262152)
MOST_ROWS, MOST_ELEMENTS = 5000, 2**20
LAYOUTS = (Layout(), Layout(gap=8), Layout(gap=1, offset=3))
# JAX compiles each of its programs, so that it has fewer calls, on values in its formula's range.
SHARES = {"NumPy": 8, "CuPy": 8, "torch": 8, "JAX": 1}
REGIMES_OF_JAX = ("normal", "mean_1e2", "mixed_rows")
# Bounds of gradients are computed in float64, in which products of other values are out of range.
REGIMES_OF_FUSED = (*REGIMES_OF_JAX, "odd_start", "zero_rows", "nonfinite", "tiny")
# Where the rows lie in x, and along which axes a weight varies.
ROWS_LAST = ("rows", "axes")
PLACES = ("rows", *ROWS_LAST, *ROWS_LAST, "heads", "AdaLN", "channels first", "apart")
FUSED = (
    *(GATED, FUNCTIONS, MANY),
    cupynorm.fuse("rms_norm", prologue=lambda x, z: x * cm.silu(z)),
    cupynorm.fuse("layer_norm", epilogue=lambda y, x, s: cm.minimum(y, s) + x / 2),
)
STREAMS = 4
LINE_SECONDS = 60
RESIDENT = Path("/proc/self/statm")  # of Linux
TOLERANCE = 32 << 20  # bytes


@dataclass(frozen=True)
class Drawn:
    """A call: its problem, what is done besides, and how it is made."""

    framework: str
    place: str
    problem: Problem
    residual: tuple[str, str] | None  # the dtypes of it and of the sum
    sums: tuple[str, str] | None  # the dtypes of a given dweight and dbias
    quantize: Quantize | None
    fused: Call | None
    stream: int
    in_place: bool
    infers: bool

    def __str__(self) -> str:
        problem = self.problem
        said = f"{self.framework} {problem.norm}, {problem.description}, {problem.regime}"
        options = problem.forward_options | {"residual": self.residual, "dx=dy": self.in_place}
        options |= {"sums": self.sums, "quantize": self.quantize}
        return f"{said}, {options}" + (f", {self.fused.fused}" if self.fused else "")


def placed(place: str, m: int, n: int) -> tuple[tuple[int, ...], Any, Any, Any]:
    """Return x's shape, rows last, the order of its axes, those of a row, and a weight's shape."""
    some, half = max(1, m // 2), n // 2
    return {
        "rows": ((m, n), (0, 1), (-1,), (n,)),
        "axes": ((m, 2, half), (0, 1, 2), (-2, -1), (2, half)),
        "heads": ((some, 2, n), (0, 1, 2), (-1,), (2, n)),
        "AdaLN": ((2, some, n), (0, 1, 2), (-1,), (2, 1, n)),
        "channels first": ((2, some, n), (0, 2, 1), (1,), (n, 1)),
        "apart": ((m, 2, half), (1, 0, 2), (0, 2), (2, 1, half)),
    }[place]


def draw(seed: int, frameworks: Sequence[str]) -> Drawn:
    """Return the call of a seed."""
    kind = seed % KINDS
    turn, of_kind = kind // len(WAYS), np.random.default_rng([1, kind])
    of_call = np.random.default_rng([0, seed])

    def one_of(options: Any, rng: Any = of_kind) -> Any:
        return options[int(rng.integers(len(options)))]

    shares = [SHARES[name] for name in frameworks]
    framework = one_of(
        [n for n, s in zip(frameworks, shares, strict=True) for _ in range(s)], of_call
    )
    # These take turns, so that each is met.
    way, place = WAYS[kind % len(WAYS)], PLACES[turn % len(PLACES)]
    how = QUANTIZED[turn % len(QUANTIZED)]
    fused = FUSED[turn % len(FUSED)]
    norm, n, layout = one_of(NORMS), one_of(WIDTHS), one_of(LAYOUTS)
    x, y, dy = (DTYPES[one_of([*DTYPES])] for _ in range(3))
    weight, bias = (one_of([None, *DTYPES.values()]) for _ in range(2))
    zero_centered = weight is not None and bool(of_kind.random() < 0.3)
    relu, wants_dbias = one_of([None, *RELUS]), bool(of_kind.random() < 0.5)
    pair = one_of([*DTYPES]), one_of([*DTYPES])  # of dtypes
    has_residual = way == "residual" or (way == "quantized" and bool(of_kind.random() < 0.4))
    if n % 2 and place in ("axes", "apart"):
        place = "rows"
    if way == "residual" and place not in ROWS_LAST:  # its checks know no others
        place = "rows"
    if framework == "JAX":  # whose arrays have no strides
        how = dataclasses.replace(how, column_major=False)
    if way == "quantized" and how.is_by_block:
        place = "rows"  # a row of blocks is the last axis
    by_formula = framework in ("torch", "JAX") and (place not in ROWS_LAST or way == "fused")
    if by_formula:  # the gradients are checked without what a kernel stores for them
        y, relu = x, None
    elif framework == "JAX":
        y = dy  # a gradient has its array's dtype
    m = int(math.exp(of_call.uniform(0, math.log(max(1, min(MOST_ROWS, MOST_ELEMENTS // n)) + 1))))
    regimes = REGIMES_OF_FUSED if way == "fused" else REGIMES
    regime = one_of(REGIMES_OF_JAX if framework == "JAX" or by_formula else regimes, of_call)
    shape, order, axis, row = placed(place, m, n)
    k, seeds = len(axis), iter(range(10 * seed, 10 * seed + 10))

    def values(of: str, shape: tuple[int, ...], dtype: Any, where: Layout) -> Any:
        if dtype is None:
            return None
        drawn = make_values(of, shape, dtype, next(seeds), min(k, len(shape)))
        return where.apply(np, drawn)

    rows = Layout(k=k, gap=layout.gap, offset=layout.offset)
    problem = Problem(
        norm=fused.norm if way == "fused" else norm,
        k=k,
        eps=1e-5,
        axis=axis,
        zero_centered=zero_centered,
        relu=relu,
        out_dtype=y,
        wants_dbias=wants_dbias,
        regime=regime,
        seed=seed,
        layouts={"x": rows, "dy": rows, "weight": Layout(k=k), "bias": Layout(k=k)},
        x=values(regime, shape, x, rows).transpose(order),
        dy=values("normal", shape, dy, rows).transpose(order),
        weight=values("normal", row, weight, Layout(k=k)),
        bias=values("normal", row, bias, Layout(k=k)),
    )
    call = None
    if way == "fused":
        column = np.zeros(shape).transpose(order).mean(axis, keepdims=True).shape
        shapes = {"a": column, "s": row}
        inputs = {
            name: make_values("normal", shapes.get(name, problem.x.shape), DTYPES[pair[0]], i)
            for i, name in enumerate(fused.inputs, 10 * seed + 4)
        }
        options = {"eps": 1e-5, "axis": axis, "zero_centered": zero_centered}
        call = Call(fused, problem.x, problem.weight, problem.bias, options, inputs)
    return Drawn(
        framework,
        place,
        problem,
        residual=pair if has_residual else None,
        sums=pair if way == "sums" and framework in ("NumPy", "CuPy") else None,
        quantize=how if way == "quantized" else None,
        fused=call,
        stream=int(of_call.integers(STREAMS)),
        in_place=x == y == dy and bool(of_call.random() < 0.5),
        infers=bool(of_call.random() < 0.5),
    )


# ---- frameworks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Face:
    """How a framework's functions are called.

    `passes` takes a function of arrays by name, these arrays, and the gradients of its outputs. It
    returns the outputs and the gradients of the arrays. Where it is None, there is no such way.
    """

    module: Any
    put: Callable[[Any], Any]
    get: Callable[[Any], Any]
    check_plain: Callable[[Drawn], Any]
    passes: Callable[..., tuple[Any, dict[str, Any]]] | None = None

    def check(self, drawn: Drawn) -> None:
        if drawn.quantize is not None:
            self._check_quantized(drawn.problem, drawn.residual, drawn.quantize)
        elif drawn.fused is not None:
            self._check_fused(drawn.fused)
        elif self.passes is not None and drawn.place not in ROWS_LAST:
            self._check_elsewhere(drawn.problem)
        else:
            self.check_plain(drawn)

    def _check_quantized(self, problem: Problem, residual: Any, how: Quantize) -> None:
        norm, options = problem.norm, problem.forward_options
        del options["out_dtype"]
        arrays = {name: getattr(problem, name) for name in ("x", "weight", "bias")}
        if residual is not None:
            values = make_values("normal", problem.x.shape, DTYPES[residual[0]], problem.seed)
            arrays["residual"] = values
        given = {name: None if array is None else self.put(array) for name, array in arrays.items()}
        told = told_in(how, self.put)
        result = getattr(self.module, norm)(**given, **options, quantize=told)
        testing.check_quantized(
            norm, tuple(map(self.get, result)), **arrays, **options, quantize=how
        )

    def _check_fused(self, call: Call) -> None:
        if self.passes is None:
            check_passes(call, *passes(call, self.put, self.get))
            return
        of_outputs = [
            make_values("normal", call.x.shape, call.x.dtype, i) for i in range(call.fused.count)
        ]
        outputs, found = self.passes(call.of, call.arrays, of_outputs)
        names = "x", "weight", "bias", *call.fused.inputs
        gradients = call.fused.class_of_gradients(*map(found.get, names))
        check_passes(call, outputs, gradients, of_outputs)

    def _check_elsewhere(self, problem: Problem) -> None:
        """Check y and its gradients by the statistics of NumPy."""
        norm, options = problem.norm, {"eps": problem.eps, **problem.options}
        arrays = {name: getattr(problem, name) for name in ("x", "weight", "bias")}
        present = {name: array for name, array in arrays.items() if array is not None}
        dy = round_once(problem.dy.astype(np.float64), problem.x.dtype)
        assert self.passes is not None
        function = functools.partial(getattr(self.module, norm), **options)
        (y,), found = self.passes(function, present, [dy])
        testing.check_forward(norm, y, **arrays, **options)
        kept = getattr(cupynorm, f"{norm}_forward")(**arrays, **options)
        gradients = NormBackward(*map(found.get, arrays))
        told = problem.x, problem.weight, kept.mean, kept.rstd
        bias = False if problem.bias is None else problem.bias
        testing.check_backward(norm, gradients, dy, *told, bias=bias, **problem.options)


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def face_of(caller: Caller) -> Face:
    def check_plain(drawn: Drawn) -> None:
        problem = drawn.problem
        if drawn.sums is not None:
            check_sums(caller, with_sums(problem, *drawn.sums, offset=drawn.stream))
        elif drawn.residual is not None:
            layout = problem.layouts["x"]
            check_residual(caller, with_residual(problem, *drawn.residual, layout=layout))
        else:
            check_problem(caller, problem, in_place=drawn.in_place, infers=drawn.infers)

    return Face(cupynorm, caller.put, caller.get, check_plain)


def numpy_checks() -> Callable[[Drawn], None]:
    return face_of(Caller(np, np.array, lambda result: result)).check


def cupy_checks() -> Callable[[Drawn], None]:
    import cupy

    face = face_of(Caller(cupy, to_cupy, to_numpy))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]

    def check(drawn: Drawn) -> None:
        stream = streams[drawn.stream]
        with stream:
            face.check(drawn)
        stream.synchronize()

    return check


def torch_checks(device: str) -> Callable[[Drawn], None]:
    import torch
    from torch_checks import check_problem as check_by_torch
    from torch_checks import to_numpy, to_torch

    import cupynorm.torch

    streams = [torch.cuda.Stream() for _ in range(STREAMS if device == "cuda" else 0)]

    def put(array: Any) -> Any:
        return to_torch(array, device)

    def get(tensor: Any) -> Any:
        is_byte = tensor.itemsize == 1 and tensor.dtype != torch.int8
        return to_numpy(tensor.view(torch.uint8) if is_byte else tensor)

    def passes(function: Any, arrays: dict[str, Any], of_outputs: list[Any]) -> Any:
        tensors = {name: put(array).requires_grad_() for name, array in arrays.items()}
        outputs = _as_tuple(function(**tensors))
        found = torch.autograd.grad(
            outputs, [*tensors.values()], [*map(put, of_outputs)], materialize_grads=True
        )
        return tuple(map(get, outputs)), dict(zip(tensors, map(get, found), strict=True))

    def check_plain(drawn: Drawn) -> None:
        check_by_torch(drawn.problem, device, dtypes=drawn.residual)

    face = Face(cupynorm.torch, put, get, check_plain, passes)

    def check(drawn: Drawn) -> None:
        with torch.cuda.stream(streams[drawn.stream]) if streams else contextlib.nullcontext():
            face.check(drawn)

    return check


def jax_checks() -> Callable[[Drawn], None]:
    import jax
    import jax_calls

    import cupynorm.jax

    def passes(function: Any, arrays: dict[str, Any], of_outputs: list[Any]) -> Any:
        def both(arrays: Any, of_outputs: Any) -> Any:
            outputs, pull_back = jax.vjp(lambda arrays: _as_tuple(function(**arrays)), arrays)
            return outputs, *pull_back(of_outputs)

        return jax_calls.on_host(jax.jit(both)(arrays, tuple(of_outputs)))

    def check_plain(drawn: Drawn) -> None:
        problem, given = drawn.problem, {}
        if drawn.residual is not None:
            of_residual, of_total = (DTYPES[name] for name in drawn.residual)
            shape, k = problem.x.shape, problem.k
            given["residual"] = make_values("normal", shape, of_residual, problem.seed, k)
            given["dresidual_out"] = make_values("normal", shape, of_total, problem.seed + 1, k)
            given["residual_dtype"] = of_total
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

    face = Face(cupynorm.jax, jax.numpy.asarray, np.asarray, check_plain, passes)

    def check(drawn: Drawn) -> None:
        with jax.enable_x64(True):
            face.check(drawn)

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
    """Return the bytes that each allocator has handed out, and those that memories hold in all."""
    gc.collect()
    found = {}
    if not gpu_problem():
        import cupy

        cupy.cuda.Device().synchronize()
        pool = cupy.get_default_memory_pool()
        found["CuPy"] = int(pool.used_bytes())
        pool.free_all_blocks()
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            found["torch"] = int(torch.cuda.memory_allocated())
            torch.cuda.empty_cache()
        free, total = cupy.cuda.Device().mem_info
        found["device"] = int(total - free)
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.clear_caches()
        stats = [device.memory_stats() for device in jax.local_devices()]
        if all(stats):  # CPUs have none
            found["JAX"] = sum(int(of["bytes_in_use"]) for of in stats)
    if RESIDENT.exists():
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        found["process"] = int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def growth(half: dict[str, int], later: dict[str, int], end: dict[str, int]) -> dict[str, int]:
    """Return by how many bytes memory grew, where it did."""
    grown = {name: end[name] - half[name] for name in half if name not in ("device", "process")}
    if "process" in half:
        steps = later["process"] - half["process"], end["process"] - later["process"]
        grown["process"] = sum(steps) if min(steps) > TOLERANCE else 0
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
    return ", ".join(held) or "unknown"


def soak(
    frameworks: dict[str, Callable[[Drawn], None]], seconds: float, seed: int
) -> dict[str, Any]:
    """Make calls for so many seconds, from a first seed on. Return what was found."""
    tally, seen, marks = Tally(), [], []
    start = time.monotonic()
    line, made, distinct = LINE_SECONDS, 0, 0
    while (now := time.monotonic() - start) < seconds:
        if len(marks) < 2 and now >= seconds * (2 + len(marks)) / 4:
            marks.append(memory())
            distinct = distinct or made
        if now >= line:
            line += LINE_SECONDS
            held = memory()
            seen.append({"seconds": now, "kernels": len(_compile._functions), **held})
            print(f"{now:.0f} s: {tally}; {said(held)}", flush=True)
        call(seed + (made % distinct if distinct else made), frameworks, tally)
        made += 1
    after = memory()
    grown = growth(*marks, after) if len(marks) == 2 else {}
    half = said([*marks, after][0])
    print(f"{tally}; memory at the half {half}, at the end {said(after)}")
    if grown:
        print(f"memory GREW: {said(grown)}")
    return {
        "calls": dict(tally.calls),
        "distinct": distinct or made,
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
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds must be a positive number, got {options.seconds}")
    for name in ("seed", "only"):
        seed = getattr(options, name)
        if seed is not None and seed < 0:
            parser.error(f"--{name} must be at least 0, got {seed}")
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
        versions = {k: v for k, v in describe().items() if k != "kernel cache"}  # which is a path
        head = {"commit": results.commit(), "versions": versions}
        asked = {"seed": options.seed, "seconds": options.seconds}
        results.save(head | asked | found, options.results)
    return int(bool(found["failed"] or found["grown"]))


if __name__ == "__main__":
    os.environ[SWITCH] = "1"  # benchmarks turn it off
    sys.exit(main())
