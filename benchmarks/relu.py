"""LayerNorm with a clamped ReLU and its bitmask, beside the plain norm and beside cuDNN's graph.

``python -m benchmarks.relu benchmarks/results/relu_h200.json``

Forward is the one for training, with statistics and bitmask. Times are those of `benchmarks.run`:
the call as made or its kernels replayed from a CUDA graph, whichever is less. A result is compared
with the float64 reference, on some of its rows, before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupynorm
from benchmarks import cudnn_graphs, oracle, results
from benchmarks.backends.base import Backend, Call, CuPyBackend, TorchBackend
from benchmarks.measure import reason
from benchmarks.timing import Clock, rotations
from cupynorm import _bench, reference
from cupynorm._bench import EPS, Problem

RELU = (0.0, 6.0)
CASES = (
    ((4096, 768), ("float32", "float32")),  # as in cuDNN's sample
    ((32768, 4096), ("float32", "float32")),
    ((32768, 1024), ("bfloat16", "float32")),
    ((32768, 4096), ("bfloat16", "float32")),
    ((32768, 16384), ("bfloat16", "float32")),
)
CHECKED_ROWS = 64


class Ours(CuPyBackend):
    """On CuPy arrays, plain or with the ReLU."""

    def __init__(self, name: str, relu: tuple[float, float] | None) -> None:
        self.name = name  # type: ignore[misc]
        self.relu = relu

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))

        def forward() -> tuple[Any, ...]:
            result = cupynorm.layer_norm_forward(
                x, weight, bias, eps=EPS[problem.norm], relu=self.relu
            )
            return tuple(field for field in result if field is not None)

        if problem.direction == "forward":
            return Call(forward)
        _, mean, rstd, *bitmask = forward()
        options = {"bitmask": bitmask[0]} if bitmask else {}
        return Call(
            lambda: cupynorm.layer_norm_backward(inputs["dy"], x, weight, mean, rstd, **options)
        )


class Cudnn(TorchBackend):
    """As cuDNN's sample builds it."""

    name = "cuDNN"
    modules = ("torch", "cudnn")
    distribution = "nvidia-cudnn-frontend"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        x, weight, bias = (tensors[name] for name in ("x", "weight", "bias"))
        run = cudnn_graphs.forward(problem.norm, x, weight, bias, eps=EPS[problem.norm], relu=RELU)
        names: tuple[str, ...] = ("y", "mean", "rstd", "bitmask")
        if problem.direction == "backward":
            stored = run()
            run = cudnn_graphs.backward(
                problem.norm,
                tensors["dy"],
                x,
                weight,
                stored["mean"],
                stored["rstd"],
                dbias=True,
                bitmask=stored["bitmask"],
            )
            names = ("dx", "dweight", "dbias")
        return Call(lambda: tuple(run()[name] for name in names))


def check(problem: Problem, relu: Any, inputs: dict[str, Any], output: Any) -> None:
    """Raise a ValueError if y or dx is not as exact as `benchmarks.oracle` asks for."""
    import cupy

    def rows(array: Any) -> np.ndarray:
        return cupy.asnumpy(oracle.widen(array[:CHECKED_ROWS]))

    x = rows(inputs["x"])
    weight, bias = (cupy.asnumpy(oracle.widen(inputs[name])) for name in ("weight", "bias"))
    exact = reference.layer_norm_forward(x, weight, bias, eps=EPS[problem.norm], relu=relu)
    wanted = exact.y
    if problem.direction == "backward":
        wanted = reference.layer_norm_backward(
            rows(inputs["dy"]), x, weight, exact.mean, exact.rstd, bitmask=exact.bitmask
        ).dx
    errors = np.linalg.norm(rows(output) - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    # Of the rows, the median one: a bit of an element at a bound may be either, and dx shows it.
    error = np.median(errors)
    if not error <= oracle.TOLERANCE[problem.dtype]:
        raise ValueError(f"wrong: relative error {error:.1e}")


def microseconds(
    backend: Backend, relu: Any, problem: Problem, sets: Sequence[dict[str, Any]], clock: Clock
) -> tuple[float | None, dict[str, Any]]:
    """Return the time that counts, and the record."""
    import cupy

    record: dict[str, Any] = {"backend": backend.name, "status": "failed"}
    try:
        backend.version()
        calls = [backend.prepare(problem, inputs) for inputs in sets]
        (output,) = backend.collect(calls[0].run()[:1], cupy)
        backend.synchronize()
        check(problem, relu, sets[0], output)
        del output
        replays = [r for inputs in sets if (r := backend.capture(problem, inputs)) is not None]
        times = backend.measure(clock, calls, replays)
        record["times"] = {name: vars(timing) for name, timing in times.items()}
        record["status"] = "ok"
    except Exception as error:  # whatever a library raises is its answer
        record["reason"] = reason(error)
    seconds = results.seconds(record)
    return None if seconds is None else 1e6 * seconds, record


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relu", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    options = parser.parse_args(arguments)
    import cupy

    clock = Clock()
    backends: list[tuple[Backend, Any]] = [
        (Ours("plain", None), None),
        (Ours("relu", RELU), RELU),
        (Cudnn(), RELU),
    ]
    facts = {"cupynorm": cupynorm.__version__}
    try:
        facts["cuDNN"] = backends[-1][0].version()
    except ImportError as error:
        facts["cuDNN"] = reason(error)
    report = results.new(facts, list(sys.argv[1:] if arguments is None else arguments))
    print(
        f"{'x, weight':<20}{'rows x columns':<16}{'direction':<10}{'plain us':>10}{'relu us':>10}"
        f"{'of plain':>9}{'cuDNN us':>10}{'of cuDNN':>9}"
    )

    def shown(time: float | None) -> str:
        return f"{time:.1f}".rjust(10) if time else "-".rjust(10)

    def ratio(part: float | None, whole: float | None) -> str:
        return f"{part / whole:.2f}".rjust(9) if part and whole else "-".rjust(9)

    for (n_rows, n_cols), (dtype, weight_dtype) in CASES:
        for direction in ("forward", "backward"):
            problem = Problem("layer_norm", direction, n_rows, n_cols, dtype, weight_dtype)  # type: ignore[arg-type]
            sets = [
                _bench.inputs(problem, seed, cupy)
                for seed in range(rotations(problem.bytes, clock.cache_bytes))
            ]
            times = []
            for backend, relu in backends:
                time, record = microseconds(backend, relu, problem, sets, clock)
                times.append(time)
                report["measurements"].append(vars(problem) | record)
                backend.release()
                if "reason" in record:
                    print(f"{backend.name}: {record['reason']}", file=sys.stderr)
            plain, fused, peer = times
            columns = (
                *(f"{dtype}, {weight_dtype}".ljust(20), f"{n_rows} x {n_cols}".ljust(16)),
                *(direction.ljust(10), shown(plain), shown(fused), ratio(fused, plain)),
                *(shown(peer), ratio(fused, peer)),
            )
            print(*columns, sep="", flush=True)
            results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
