"""LayerNorm with a clamped ReLU and its bitmask, against the plain norm and cuDNN's graph.

``python -m benchmarks.relu benchmarks/results/relu_h200.json``

Forward is the one for training, with statistics and bitmask. Times and checks of all outputs and
rows are those of `benchmarks.run`. Backward is checked against the exact result for the bitmask
that it read, its own library's. cupynorm must keep the bound of `cupynorm.testing` too.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cupynorm
from benchmarks import cudnn_graphs, results
from benchmarks.backends import cudnn_peer
from benchmarks.backends.base import Backend, Call, CuPyBackend, Outputs
from benchmarks.measure import judge, measure, reason
from benchmarks.results import Record
from benchmarks.timing import Clock, rotations
from cupynorm import _bench, _oracle
from cupynorm._bench import ALL_ONES, EPS, Problem
from cupynorm._environment import gpu_problem

RELU = (0.0, 6.0)
CASES = (
    ((4096, 768), ("float32", "float32")),  # as in cuDNN's sample
    ((32768, 4096), ("float32", "float32")),
    ((32768, 1024), ("bfloat16", "float32")),
    ((32768, 4096), ("bfloat16", "float32")),
    ((32768, 16384), ("bfloat16", "float32")),
)
TIMES = ("x, weight", "MxN", "direction", "plain", "with ReLU", "of plain", "cuDNN", "of cuDNN")
ERRORS = ("x, weight", "MxN", "output", "cupynorm", "of its bound", "cuDNN", "of that bound")
STORED = ("y", "mean", "rstd", "bitmask")


class Ours(CuPyBackend):
    """On CuPy arrays, plain or with the ReLU."""

    kind = "ours"

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
            lambda: cupynorm.layer_norm_backward(inputs["dy"], x, weight, mean, rstd, **options)[:3]
        )


class Cudnn(cudnn_peer.Cudnn):
    """As in cuDNN's sample."""

    relu = RELU

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch

        given = {name: tensors[name] for name in ("x", "weight", "bias")}
        run = self.bound(
            dataclasses.replace(problem, direction="forward"),
            given,
            lambda: cudnn_graphs.forward(problem.norm, **given, eps=EPS[problem.norm], relu=RELU),
        )
        names = STORED
        if problem.direction == "backward":
            stored = run()
            read = {name: tensors[name] for name in ("dy", "x", "weight")}
            read |= {name: stored[name] for name in ("mean", "rstd", "bitmask")}
            run = self.bound(
                problem,
                read,
                lambda: cudnn_graphs.backward(problem.norm, **read, dbias=True),
            )
            names = problem.outputs
        for output in run().values():
            output.view(torch.uint8).fill_(ALL_ONES)
        return cudnn_peer.once(run, names)


def check(
    problem: Problem, backend: Any, inputs: dict[str, Any], outputs: Outputs, xp: Any
) -> Record:
    """Return the record of a check: of all that forward stores, or of the gradients.

    `backend` is `Ours` or `Cudnn`.
    """
    if problem.direction == "forward":
        named = _stored(backend, outputs, xp)
        bitmask = named.pop("bitmask", None)
        record = judge(problem, inputs, named, xp, relu=backend.relu)
        if bitmask is not None:
            record["wrong_bits"] = _oracle.wrong_bits(problem, inputs, bitmask, backend.relu, xp)
            if record["wrong_bits"] and record["status"] == "ok":
                record |= {"status": "wrong", "reason": f"{record['wrong_bits']} wrong bits"}
    else:
        named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
        # The bits that it read: the same call gives the same. Otherwise dx would be wrong.
        forward = dataclasses.replace(problem, direction="forward")
        stored = _stored(backend, backend.prepare(forward, inputs).run(), xp)
        backend.synchronize()
        record = judge(problem, inputs, named, xp, bitmask=stored.get("bitmask"))
    if backend.kind == "ours" and record["status"] == "ok":
        beyond = [name for name, (_, over) in record["errors"].items() if not over <= 1]
        if beyond:
            record |= {"status": "wrong", "reason": f"beyond the bound: {', '.join(beyond)}"}
    return record


def _stored(backend: Backend, outputs: Outputs, xp: Any) -> dict[str, Any]:
    named = dict(zip(STORED, backend.collect(outputs, xp), strict=False))  # plain has no bitmask
    # cuDNN's have shape (rows, 1).
    return named | {name: named[name].reshape(-1) for name in ("mean", "rstd")}


def times(problem: Problem, cell: dict[str, Record]) -> list[str]:
    """Return the cells of a problem under TIMES, in microseconds."""

    def seconds(name: str) -> float | None:
        return results.seconds(cell[name]) if name in cell else None

    def shown(name: str) -> str:
        time = seconds(name)
        return cell[name]["status"] if time is None and name in cell else _number(time, 1e6, 1)

    def ratio(whole: str) -> str:
        parts = seconds("relu"), seconds(whole)
        return _number(parts[0] / parts[1] if parts[0] and parts[1] else None, 1, 2)

    return [
        *(*_where(problem), problem.direction, shown("plain"), shown("relu")),
        *(ratio("plain"), shown("cuDNN"), ratio("cuDNN")),
    ]


def errors(problem: Problem, cell: dict[str, Record]) -> Iterator[list[str]]:
    """Yield the cells of each output of a problem under ERRORS, and those of the bits."""
    names = dict.fromkeys(
        name for side in ("relu", "cuDNN") for name in cell.get(side, {}).get("errors", ())
    )
    for name in names:
        row = [*_where(problem), name]
        for side in ("relu", "cuDNN"):
            found = cell.get(side, {}).get("errors", {}).get(name)
            row += ["", ""] if found is None else [_scientific(found[0]), _number(found[1], 1, 3)]
        yield row
    bits = [cell.get(side, {}).get("wrong_bits") for side in ("relu", "cuDNN")]
    if any(count is not None for count in bits):
        cells = ["" if count is None else f"{count} wrong" for count in bits]
        yield [*_where(problem), "bitmask", cells[0], "", cells[1], ""]


def _where(problem: Problem) -> tuple[str, str]:
    return f"{problem.dtype}, {problem.weight_dtype}", f"{problem.rows}x{problem.cols}"


def _number(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f"{factor * value:.{digits}f}"


def _scientific(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<20}{cells[1]:<14}{cells[2]:<10}" + "".join(f"{c:>14}" for c in cells[3:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relu", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    options = parser.parse_args(arguments)
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}.")
        return 1
    import cupy

    clock = Clock()
    backends: list[Backend] = [Ours("plain", None), Ours("relu", RELU), Cudnn()]
    facts = {"cupynorm": cupynorm.__version__}
    try:
        facts["cuDNN"] = backends[-1].version()
    except ImportError as error:
        facts["cuDNN"] = f"missing: {reason(error)}"
        del backends[-1]
    report = results.new(facts, list(sys.argv[1:] if arguments is None else arguments))
    print(_line(TIMES))
    for (n_rows, n_cols), (dtype, weight_dtype) in CASES:
        for direction in ("forward", "backward"):
            problem = Problem("layer_norm", direction, n_rows, n_cols, dtype, weight_dtype)  # type: ignore[arg-type]
            sets = [
                _bench.inputs(problem, seed, cupy)
                for seed in range(rotations(problem.bytes, clock.cache_bytes))
            ]
            cell = {b.name: measure(problem, b, sets, clock, cupy, check) for b in backends}
            report["measurements"] += cell.values()
            print(_line(times(problem, cell)), flush=True)
            for row in errors(problem, cell):
                print(_line(row))
            for record in cell.values():
                if record.get("reason"):
                    print(f"{record['backend']}: {record['reason']}", file=sys.stderr)
            results.save(report, options.results)
    report["complete"] = True
    results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
