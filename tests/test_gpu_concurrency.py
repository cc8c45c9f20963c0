"""Threads, streams, graphs and processes, each against the same calls made alone: equal bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import kernels_of_many_rows, poison, to_cupy, to_numpy, wait_for_threads
from residuals import OfCupyNorm
from sanitized import CALLS_OF_FUSED, CASES, Caller, OfFused, Quantized, Sanitized
from strategies import DTYPES, make_values

import cupynorm
from cupynorm._background import SWITCH

pytestmark = pytest.mark.gpu

NORMS = ("rms_norm", "layer_norm")


class Passes:
    """A case's forward and backward pass on arrays that are on the GPU."""

    def __init__(self, one: Sanitized) -> None:
        import cupy

        self.case, self.problem = one.case, one.case.problem()
        self.caller = OfCupyNorm(cupy, to_cupy, to_numpy)
        self.arrays = self.problem.on(cupy)
        self.residual = None
        if one.residual is not None:
            shape = self.problem.x.shape
            self.residual = to_cupy(make_values("normal", shape, DTYPES[one.residual], 5))

    def run(self) -> list[Any]:
        """Return all results, each of its own memory."""
        x, dy, weight, bias = (self.arrays[name] for name in ("x", "dy", "weight", "bias"))
        norm, given, asked = self.problem.norm, {}, {}
        if self.residual is not None:
            given = {"residual": self.residual, "residual_dtype": x.dtype}
            asked = {"dresidual_out": x, "dresidual_dtype": self.residual.dtype}
        forward = self.caller.forward(
            norm, x, weight, bias, **given, **self.problem.forward_options
        )
        if self.case.in_place:
            dy = asked["dx"] = bits(dy).copy().view(dy.dtype)
        backward = self.caller.backward(
            norm,
            dy,
            x if self.residual is None else forward.residual_out,
            weight,
            forward.mean,
            forward.rstd,
            bias=self.problem.wants_dbias if bias is None else bias,
            bitmask=forward.bitmask,
            **self.problem.options,
            **asked,
        )
        return [result for result in (*forward, *backward) if result is not None]


class PassesOfFused:
    """The passes of a norm of `cupynorm.fuse`, on arrays that are on the GPU."""

    def __init__(self, one: OfFused) -> None:
        call = CALLS_OF_FUSED[one.name]
        self.fused = call.fused
        self.given, self.named = call.of(lambda *given, **named: (given, named), convert=to_cupy)
        self.dy = [to_cupy(make_values("normal", call.x.shape, call.x.dtype, 5))] * self.fused.count

    def run(self) -> list[Any]:
        """Return all results, each of its own memory."""
        forward = self.fused.forward(*self.given, **self.named)
        results = (*forward.outputs, *self.fused.backward(self.dy, forward))
        return [result for result in results if result is not None]


class PassOfQuantized:
    """The pass of a quantized norm, on arrays that are on the GPU."""

    def __init__(self, one: Quantized) -> None:
        import cupy

        self.call = one.call(Caller(cupy, to_cupy, to_numpy))
        self.made = slice(0, 1) if one.how.is_given else slice(None)  # a given scale is no result

    def run(self) -> list[Any]:
        """Return all results, each of its own memory."""
        return list(self.call()[self.made])


KINDS = {Sanitized: Passes, OfFused: PassesOfFused, Quantized: PassOfQuantized}


@pytest.fixture(params=CASES, ids=str)
def passes(request: pytest.FixtureRequest) -> Iterator[Any]:
    one = request.param
    with kernels_of_many_rows() if one.many else contextlib.nullcontext():
        yield KINDS[type(one)](one)


def bits(array: Any) -> Any:
    return array.view(f"u{array.itemsize}")


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(to_numpy(bits(one)), to_numpy(bits(other)))


# ---- streams and graphs --------------------------------------------------------------------------


def test_streams_at_once_have_the_bits_of_calls_alone(passes: Any) -> None:
    import cupy

    expected = passes.run()
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    results = []
    for _ in range(3):
        for stream in streams:
            with stream:
                results.append(passes.run())
    for stream in streams:
        stream.synchronize()
    for found in results:
        assert_same_bits(found, expected)


def test_each_pass_is_captured_and_replayed(passes: Any) -> None:
    import cupy

    expected = passes.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        passes.run()  # CuPy has memory for the captured ones after these
        stream.synchronize()
        stream.begin_capture()
        captured = passes.run()
        graph = stream.end_capture()
    for _ in range(3):
        for result in captured:
            bits(result)[...] = 0x7B
        poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(captured, expected)


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_threads_make_first_calls_at_once(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    if background:
        monkeypatch.delenv(SWITCH)
    built, raw_module = [], cupy.RawModule

    def counted(**arguments: Any) -> Any:
        built.append(arguments["code"])
        return raw_module(**arguments)

    monkeypatch.setattr(cupy, "RawModule", counted)
    # Of no other test, and with kernels of their own, since a process loads each once.
    n = 5208 if background else 1304
    kinds = [(norm, name) for norm in NORMS for name in DTYPES]
    arrays = {
        name: [to_cupy(make_values("normal", (16, n), DTYPES[name], seed)) for seed in (1, 2)]
        for name in DTYPES
    }

    def call(norm: str, name: str) -> list[Any]:
        x, dy = arrays[name]
        forward = getattr(cupynorm, f"{norm}_forward")(x, x[0])
        statistics = [one for one in (forward.mean, forward.rstd) if one is not None]
        backward = getattr(cupynorm, f"{norm}_backward")(dy, x, x[0], *statistics, bias=True)
        return [one for one in (*forward, *backward) if one is not None]

    barrier = threading.Barrier(4 * len(kinds))
    results: list[tuple[Any, list[Any]]] = []

    def first_call(kind: tuple[str, str]) -> None:
        barrier.wait(60)
        results.append((kind, call(*kind)))

    threads = [threading.Thread(target=first_call, args=(kind,)) for kind in 4 * kinds]
    assert len(threads) == 32
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for_threads()
    assert len(results) == len(threads)
    assert len(built) == len(set(built)) >= 2 * len(kinds)
    count = len(built)
    for kind, found in results:
        assert_same_bits(found, call(*kind))
    assert len(built) == count


# ---- processes -----------------------------------------------------------------------------------

START = """
import hashlib, os, sys, warnings
import cupy
import cupynorm

def step(n=1312):
    x = (cupy.arange(16 * n, dtype=cupy.float32) % 37 - 18).reshape(16, n)
    forward = cupynorm.layer_norm_forward(x, x[0], x[1])
    backward = cupynorm.layer_norm_backward(x, x, x[0], forward.mean, forward.rstd)
    return x, forward, backward

def digest(forward, backward):
    fields = [field for field in (*forward, *backward) if field is not None]
    return hashlib.sha1(b"".join(cupy.asnumpy(field).tobytes() for field in fields)).hexdigest()

"""


def start(program: str, cache: Path) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", START + program],
        env=os.environ | {"CUPY_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said_by(process: Any) -> str:
    said, problem = process.communicate(timeout=180)
    assert process.returncode == 0, problem
    return str(said)


def test_processes_on_one_cache_start_together_and_after_damage(tmp_path: Path) -> None:
    program = "print(digest(*step()[1:]))"
    processes = [start(program, tmp_path) for _ in range(6)]
    (first,) = {said_by(process) for process in processes}
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(files) >= 3  # few rows' forward, backward, its partials; and CuPy's own
    for i, (file, kept) in enumerate(files.items()):
        file.write_bytes((kept[: len(kept) // 2], b"", b"another program's")[i % 3])
    assert said_by(start(program, tmp_path)) == first
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == files


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_was_forked_after_a_call_says_what_to_do(tmp_path: Path) -> None:
    program = """
warnings.simplefilter("ignore")
x, forward, backward = step()
weight, bias = x[0], x[1]
expected = digest(forward, backward)
gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * z)
of_gated = gated.forward(x, z=x)
gated.backward(x, of_gated)
quantized = cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", "row"))
child = os.fork()
if child == 0:
    for call in (
        lambda: cupynorm.layer_norm_forward(x, weight, bias),
        lambda: cupynorm.rms_norm(x),
        lambda: cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", "row")),
        lambda: cupynorm.layer_norm_backward(x, x, weight, forward.mean, forward.rstd),
        lambda: gated(x, z=x),
        lambda: gated.backward(x, of_gated),
        lambda: cupynorm.dequantize(*quantized),
    ):
        try:
            call()
        except RuntimeError as error:
            print(error)
    print(cupynorm.supports("rms_norm", 64, "float32"), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert digest(*step()[1:]) == expected
"""
    *calls, supported = said_by(start(program, tmp_path)).splitlines()
    assert len(calls) == 7
    assert all("'spawn' or 'forkserver'" in said for said in (*calls, supported))
    assert all(said.startswith("cupynorm cannot use the GPU here: ") for said in calls)
