"""How far each library is off on hard rows: a large mean, or very large values.

``python -m benchmarks.accuracy benchmarks/results/accuracy_h200.json``

Every value of a call is compared with float64, as `benchmarks.run` does before it times. It prints
a table in Markdown with two figures for each output: the error in the 2-norm, relative to the exact
result, and in parentheses the worst element's error over the bound of `cupynorm.testing`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.backends import discover
from benchmarks.backends.base import Backend
from benchmarks.measure import check, reason
from benchmarks.problems import OPERATIONS
from benchmarks.results import Record
from cupynorm import _bench
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem

# The factor of x of N(0, 1), and what is added then.
KINDS = {
    "mean 0": (1.0, 0.0),
    "mean 1e4": (1.0, 1e4),
    "mean 1e6": (1.0, 1e6),
    "size 1e25": (1e25, 0.0),
}
SHAPE = (4096, 4096)
PAIR = ("float32", "float32")
FIELDS = ("norm", "direction", "rows", "cols", "dtype", "weight_dtype")


def inputs(problem: Problem, kind: str, xp: Any) -> dict[str, Any]:
    """Draw the arrays, with an x of a kind."""
    scale, mean = KINDS[kind]
    arrays = _bench.inputs(problem, 0, xp)
    arrays["x"] = arrays["x"] * arrays["x"].dtype.type(scale) + arrays["x"].dtype.type(mean)
    return arrays


def measure(problem: Problem, kind: str, backend: Backend, xp: Any) -> Record:
    """Return the errors of one call; an exception becomes its reason."""
    record = {**asdict(problem), "kind": kind, "backend": backend.name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arrays = inputs(problem, kind, xp)
            call = backend.prepare(problem, arrays)
            backend.poison(problem, arrays)
            outputs = call.run()
            backend.synchronize()
            record |= {"note": call.note} | check(problem, backend, arrays, outputs, xp)
    except Exception as error:  # whatever a library raises is its answer
        record |= {"status": "failed", "reason": reason(error)}
    gc.collect()
    backend.release()
    return record


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a table: a row for each kind and output, a column for each library."""
    names = list(dict.fromkeys(record["backend"] for record in records))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        for output in record["errors"] if "errors" in record else ["y", "dx"]:
            if output not in Problem(**{k: record[k] for k in FIELDS}).outputs:
                continue
            row = cells.setdefault((record["norm"], record["kind"], output), {})
            row[record["backend"]] = _shown(record.get("errors", {}).get(output))
    yield f"| norm | x | output | {' | '.join(names)} |"
    yield f"|{' --- |' * (3 + len(names))}"
    for key, row in cells.items():
        yield f"| {' | '.join([*key, *(row.get(name, '') for name in names)])} |"


def _shown(error: Sequence[float | None] | None) -> str:
    if error is None:
        return "failed"
    relative, over_bound = error
    if relative is None or over_bound is None:
        return "not finite"
    return f"{relative:.1e} ({over_bound:.3g})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--backends", nargs="+", default=(), help="the libraries (default: all)")
    options = parser.parse_args(arguments)
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to measure: {missing}.")
        return 1
    import cupy

    backends, facts = discover(options.backends)
    report = results.new(facts, list(sys.argv[1:] if arguments is None else arguments))
    chosen = [b for b in backends.values() if b.kind in ("ours", "peer")]
    for kind in KINDS:
        for operation in OPERATIONS:
            problem = Problem(*operation.split(), *SHAPE, *PAIR)  # type: ignore[arg-type]
            report["measurements"] += [measure(problem, kind, b, cupy) for b in chosen]
            results.save(report, options.results)
    report["complete"] = True
    results.save(report, options.results)
    print("\n".join(table(report["measurements"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
