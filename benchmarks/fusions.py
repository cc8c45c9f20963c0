"""The loop of a benchmark that compares passes of one operation with the limit and the peers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.backends.base import Backend
from benchmarks.measure import Check, finite, measure, reason
from benchmarks.results import Record
from benchmarks.timing import Clock, rotations
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem
from cupynorm._oracle import Errors

__all__ = ["Benchmark", "judged"]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of its own module, whose name is `program`.

    `errors`: what a record's errors are, in a sentence and as heads of two columns.
    `backends`: the limit first, and cupynorm second. `inputs`: from a problem, a seed and CuPy to
    arrays by name. `is_measured`: whether a library has the operation of a problem. `title`: what a
    table says of a record's problem, under `columns`.
    """

    program: str
    problems: Callable[[], Iterable[Problem]]
    backends: Sequence[type[Backend]]
    inputs: Callable[[Any, int, Any], dict[str, Any]]
    check: Check
    is_measured: Callable[[Any, Backend], bool]
    columns: Sequence[str]
    title: Callable[[Record], Sequence[str]]
    errors: tuple[str, str, str] = (
        "The largest errors against float64: in the 2-norm, relative to the exact result; and of "
        "an element, over the bound of `cupynorm.testing`. A library that rounds to 16 bits "
        "between its steps exceeds that bound where the terms of an element cancel.",
        "in the 2-norm",
        "of an element",
    )

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends[2:])

    @property
    def head(self) -> tuple[str, ...]:
        return (*self.columns, "limit", "cupynorm", "of the limit", *self.peers)

    def row(self, cell: dict[str, Record]) -> list[str]:
        """Return a table's row of a problem under `head`: times in microseconds."""
        times = {name: results.seconds(record) for name, record in cell.items()}

        def shown(name: str) -> str:
            time = times.get(name)
            if time is not None:
                return f"{1e6 * time:.1f}"
            return cell[name]["status"] if name in cell else ""

        limit, ours = (backend.name for backend in self.backends[:2])
        known = times.get(limit) and times.get(ours)
        share = f"{times[limit] / times[ours]:.2f}" if known else ""
        return [
            *self.title(next(iter(cell.values()))),
            shown(limit),
            shown(ours),
            share,
            *map(shown, self.peers),
        ]

    def main(self, arguments: Sequence[str] | None, description: str | None) -> int:
        """Measure all problems into a file, and print a table."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}", description=description)
        parser.add_argument("results", type=Path, help="the JSON file to write")
        parser.add_argument("--workers", type=int, default=1, help="compile ahead, by processes")
        options = parser.parse_args(arguments)
        missing = gpu_problem()
        if missing:
            print(f"There is nothing to time: {missing}.")
            return 1
        problems = list(self.problems())
        if options.workers > 1:
            with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
                pool.map(functools.partial(_compile, self.program), problems, chunksize=1)
        import cupy

        clock = Clock()
        backends, facts = [], {}
        for backend in (kind() for kind in self.backends):
            try:
                facts[backend.name] = backend.version()
                backends.append(backend)
            except ImportError as error:
                facts[backend.name] = f"missing: {reason(error)}"
        report = results.new(facts, list(sys.argv[1:] if arguments is None else arguments))
        # Imports so far stay. So it is quick to collect what each backend leaves behind.
        gc.collect()
        gc.freeze()
        print(_line(self.head))
        for problem in problems:
            sets = [
                self.inputs(problem, seed, cupy)
                for seed in range(rotations(problem.bytes, clock.cache_bytes))
            ]
            cell = {
                backend.name: measure(problem, backend, sets, clock, cupy, self.check)
                for backend in backends
                if self.is_measured(problem, backend)
            }
            report["measurements"] += cell.values()
            print(_line(self.row(cell)), flush=True)
            for record in cell.values():
                if record.get("reason"):
                    print(f"{record['backend']}: {record['reason']}", file=sys.stderr)
            del sets
            cupy.get_default_memory_pool().free_all_blocks()
            results.save(report, options.results)
        report["complete"] = True
        results.save(report, options.results)
        return 0

    def compile(self, problem: Any) -> None:
        """Fill the disk caches with the code that a problem compiles."""
        import cupy

        for backend in (kind() for kind in self.backends):
            if self.is_measured(problem, backend):
                with contextlib.suppress(Exception):  # reported where it is measured
                    backend.prepare(problem, self.inputs(problem, 0, cupy)).run()
                    backend.synchronize()
                    backend.release()


def judged(backend: Backend, found: dict[str, Errors]) -> Record:
    """Return the record of a check by the errors of each output.

    cupynorm must keep its bound at every element. A peer may round to 16 bits between its steps,
    and what it adds afterwards may cancel. So its errors count in the 2-norm alone.
    """
    most = 1.0 if backend.kind == "ours" else math.inf
    wrong = [
        f"{name} is off by {e.relative:.2g}, {e.over_bound:.3g} of its bound"
        for name, e in found.items()
        if not (e.relative <= e.tolerance and e.over_bound <= most)  # NaN is wrong too
    ]
    return {
        "status": "wrong" if wrong else "ok",
        "reason": "; ".join(wrong) or None,
        "errors": {name: [finite(value) for value in e[:2]] for name, e in found.items()},
    }


def _compile(program: str, problem: Any) -> None:
    import importlib

    importlib.import_module(program).BENCHMARK.compile(problem)


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{max(14, min(len(cell) + 2, 21))}}" for cell in cells)
