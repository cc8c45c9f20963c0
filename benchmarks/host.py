"""The host's time a call, and the first call of a process, with its caches cold and warm."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.backends import ALL
from benchmarks.backends.base import Backend
from benchmarks.measure import reason
from benchmarks.problems import Problem, select
from benchmarks.timing import host_seconds
from cupynorm import _bench

SHAPE = (16, 4096)  # so small that a call never waits for the device

STATES = ("cold", "warm")  # of the caches of a first call, in turn
PROCESS_SECONDS = 120  # the most for a first call

# Where each library keeps its compiled code.
CACHES = (
    "CUDA_CACHE_PATH",
    "CUPY_CACHE_DIR",
    "JAX_COMPILATION_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


def problems() -> Iterable[Problem]:
    return select("quick", shapes=[SHAPE])


def host_times(
    backends: Iterable[Backend], done: Collection[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield the host's time of each operation by each backend, except the pairs done already."""
    import cupy

    backends = tuple(backends)
    for problem in problems():
        inputs = _bench.inputs(problem, 0, cupy)
        for backend in backends:
            if (problem.operation, backend.name) in done:
                continue
            record: dict[str, Any] = {"operation": problem.operation, "backend": backend.name}
            try:
                call = backend.prepare(problem, inputs)
                record["seconds"] = asdict(host_seconds(call.run, cupy.cuda.Device().synchronize))
            except Exception as error:
                record["reason"] = reason(error)
            yield record


def first_calls(backends: Iterable[Backend], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the time of each backend's first call in a new process, twice on one cache.

    None starts after `deadline`, by the monotonic clock.
    """
    for backend in backends:
        if backend.kind == "limit" or time.monotonic() > deadline:
            continue
        with tempfile.TemporaryDirectory() as caches:
            places = {name: str(Path(caches) / name.lower()) for name in CACHES}
            # By default JAX caches only what took a second to compile.
            places["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            for cache in STATES:
                record: dict[str, Any] = {"backend": backend.name, "cache": cache}
                try:
                    done = subprocess.run(
                        [sys.executable, "-m", "benchmarks.host", backend.name, str(time.time())],
                        env=os.environ | places,
                        capture_output=True,
                        text=True,
                        check=True,
                        timeout=PROCESS_SECONDS,
                    )
                    record |= json.loads(done.stdout.splitlines()[-1])
                except subprocess.CalledProcessError as error:
                    record["reason"] = (error.stderr.strip().splitlines() or ["no message"])[-1]
                except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
                    record["reason"] = reason(error)
                yield record


def first_call(name: str, started: float) -> dict[str, float]:
    """Time a process that was `started` then: until its library is ready, and its first calls.

    Ready means that everything is imported and the GPU is in use. Python's start counts too.
    Nothing has been compiled by then: the data are NumPy's.
    """
    (backend,) = (cls() for cls in ALL if cls.name == name)
    backend.version()
    backend.synchronize()
    ready = time.time()
    import cupy

    problem = next(iter(problems()))
    inputs = {
        key: cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)
        for key, array in _bench.inputs(problem, 0, np).items()
    }
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    call = backend.prepare(problem, inputs)
    call.run()
    backend.synchronize()
    called = time.perf_counter()
    call.run()
    backend.synchronize()
    again = time.perf_counter()
    return {
        "import_seconds": ready - started,
        "first_seconds": called - start,
        "second_seconds": again - called,
    }


def line(what: str, record: dict[str, Any]) -> str:
    """Return a record of a table as one line."""
    values = {k: v for k, v in record.items() if k not in ("seconds", "reason")}
    shown = [f"{v:.4f} s {k}" if isinstance(v, float) else str(v) for k, v in values.items()]
    if "seconds" in record:
        shown.append(f"{1e6 * record['seconds']['median']:.2f} us")
    if "reason" in record:
        shown.append(record["reason"])
    return f"{what}: " + ", ".join(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=first_call.__doc__)
    parser.add_argument("backend")
    parser.add_argument("started", type=float, help="in seconds, as time.time()")
    given = parser.parse_args()
    print(json.dumps(first_call(given.backend, given.started)))
