"""A threshold between layouts, measured again: ``python -m benchmarks.tune KEY [KEY ...]``.

Without a key it lists the rows of cupynorm/_layout/tuning_sm90.py: key, choice, recorded gain and
the section of notes.md. With a key, or the name of a table for all its rows, it times the choice
and the candidates of tuning_cases.py on the present GPU. Each is captured into CUDA graphs with the
row's choice replaced. The graphs take turns, each after a flush of the L2, as in benchmarks.turns.
A candidate that does not change a shape's layout is not timed there. Without a GPU it prints what
it would measure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks import turns
from benchmarks.backends.base import Call, CuPyBackend, Replay
from benchmarks.backends.ours import forget
from benchmarks.problems import shape
from benchmarks.summary import label
from benchmarks.timing import Clock
from benchmarks.tuning_cases import CASES
from cupynorm import _bench, _plans
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem
from cupynorm._layout import (
    backward_config,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
    pack_length,
)
from cupynorm._layout.tuning_sm90 import ROWS
from cupynorm._operation import BackwardSpec, ForwardSpec

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def problems_of(key: str) -> list[Problem]:
    """Return where a row shows."""
    norm, direction, pair, *shapes = CASES[key][0].split()
    dtypes = [DTYPES[name] for name in pair.split(",")]
    return [
        Problem(norm, direction, *shape(text), *dtypes)  # type: ignore[arg-type]
        for text in shapes
    ]


def candidates(key: str) -> list[Any]:
    """Return the choices to compare, the row's own first."""
    return [ROWS[key].choice, *CASES[key][1]]


@contextmanager
def replaced(key: str, choice: Any) -> Iterator[None]:
    """Have layouts chosen with another choice in a row. Plans and calls are forgotten."""
    row = ROWS[key]
    recorded = row.choice
    row.choice = choice
    forget()
    try:
        yield
    finally:
        row.choice = recorded
        forget()


def layout(problem: Problem, architecture: int = 90, multiprocessors: int = 132) -> Any:
    """Return the chosen layout of a problem."""
    n, x, weight = problem.cols, problem.dtype, problem.weight_dtype
    bias = weight if problem.has_bias else None
    vector = next(v for v in (8, 4, 2, 1) if pack_length(x) % v == 0 and n % v == 0)
    few: tuple[tuple[int, Any], ...]
    if problem.direction == "forward":
        forward = ForwardSpec(problem.norm, x, weight, bias, x, False, False, False)
        config: Any = forward_config(forward, n, vector, architecture)
        few = few_rows_configs(forward, config, n, architecture, multiprocessors)
    else:
        backward = BackwardSpec(problem.norm, x, x, weight, bias, False, False)
        config = backward_config(backward, n, vector, architecture)
        few = few_rows_backward_configs(backward, config, architecture, multiprocessors)
    return next((of_few for most, of_few in few if problem.rows <= most), config)


class Candidate(CuPyBackend):
    """This cupynorm with another choice in a row."""

    kind = "ours"

    def __init__(self, key: str, choice: Any) -> None:
        self.name = f"{key} = {choice}"  # type: ignore[misc]
        self.key, self.choice = key, choice

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        return Call(_bench.ours(problem, inputs))

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay:
        with replaced(self.key, self.choice):
            return super().capture(problem, inputs)


def differing(key: str, problem: Problem, *gpu: int) -> list[Any]:
    """Return the candidates that give a problem another layout than the row's choice."""
    found, recorded = [], layout(problem, *gpu)
    for choice in CASES[key][1]:
        with replaced(key, choice):
            if layout(problem, *gpu) != recorded:
                found.append(choice)
    return found


def measured(key: str, problem: Problem, clock: Clock, rounds: int, gpu: Sequence[int]) -> str:
    """Return a line of the table: the times in us, what wins and by how much."""
    import cupy

    choices = [ROWS[key].choice, *differing(key, problem, *gpu)]
    what = f"  {problem.operation} {label(problem)}"
    if len(choices) == 1:
        return f"{what}: the same layout by all candidates"
    backends = [Candidate(key, choice) for choice in choices]
    times, _ = turns.time(problem, backends, clock, rounds, cupy)
    backends[0].release()
    best = min(range(len(times)), key=times.__getitem__)
    gain = 100 * (min(times[1:]) / times[0] - 1)  # of the recorded choice, over the best other
    told = ", ".join(f"{c} {1e6 * t:.2f}" for c, t in zip(choices, times, strict=True))
    return f"{what}: {told} us; {choices[best]} wins, gain of {choices[0]} {gain:+.1f} %"


def listed(key: str) -> str:
    """Return the text of a row."""
    row = ROWS[key]
    return f"{key} = {row.choice}  gain {row.gain}  notes.md#{row.note}"


def would_measure(key: str) -> Iterator[str]:
    """Yield what would be measured for a row, on sm_90."""
    for problem in problems_of(key):
        choices = ", ".join(map(str, [ROWS[key].choice, *differing(key, problem)]))
        yield f"  {problem.operation} {label(problem)}: {choices}"


def selected(names: Sequence[str]) -> list[str]:
    """Return the keys of names of rows and tables; a ValueError names those that are neither."""
    found: dict[str, None] = {}
    for name in names:
        keys = [key for key in ROWS if name in (key, key.partition(".")[0])]
        if not keys:
            raise ValueError(
                f"{name} is no row and no table: `python -m benchmarks.tune` lists them"
            )
        found.update(dict.fromkeys(keys))
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="rows, or tables of rows")
    parser.add_argument(
        "--rounds", type=int, default=17, metavar="N", help="turns of each (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        keys = selected(options.keys)
    except ValueError as error:
        parser.error(str(error))
    if not keys:
        print(*map(listed, ROWS), sep="\n")
        return 0
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}. On an H200 there would be:")
        for key in keys:
            print(listed(key), *would_measure(key), sep="\n")
        return 1
    clock, gpu = Clock(), (_plans.architecture(0), _plans.multiprocessors(0))
    for key in keys:
        print(listed(key))
        for problem in problems_of(key):
            print(measured(key, problem, clock, options.rounds, gpu), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
