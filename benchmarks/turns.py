"""Kernels of several checkouts, timed in turns: ``python -m benchmarks.turns OLD NEW``.

Processes of the same code differ by up to 5 % at some microseconds. Most changes of a kernel gain
less. So one process imports all checkouts, which are folders with `cupynorm/` and `kernels/`. It
calls them on the same arrays and captures the calls into CUDA graphs. The graphs take turns, each
after a flush of the L2. It prints the times in microseconds, the speed over the first checkout's,
and whose outputs differ in any bit. A backward pass has the statistics of its own checkout's
forward pass. A checkout given twice shows the noise. `--backends` times other libraries too. They
differ from run to run, as processes do. Nothing is checked: `benchmarks.run` and the tests do that.
Without `--shapes` it times the quick set.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import problems
from benchmarks.backends import KINDS, discover
from benchmarks.backends.base import Backend, Call, CuPyBackend, Replay
from benchmarks.measure import same_bits
from benchmarks.summary import geometric_mean, label
from benchmarks.timing import Clock, rotations
from cupynorm import _bench
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem

PACKAGE = "cupynorm"
LAUNCHES = 4  # of a checkout in a turn


class Checkout(CuPyBackend):
    """The cupynorm of a folder, imported along with others of the same name."""

    kind = "ours"

    def __init__(self, root: Path) -> None:
        if not (root / PACKAGE / "__init__.py").is_file():
            raise ValueError(f"{root} must have a package {PACKAGE} in it")
        self.name = str(root)  # type: ignore[misc]
        self.root = root.resolve()
        self._modules: dict[str, ModuleType] = {}
        with self.current():
            import cupynorm._bench as bench

            self._call: Callable[..., Any] = bench.ours

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have imports find this cupynorm, those inside of functions too."""
        others = _taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.root))
        try:
            yield
        finally:
            sys.path.remove(str(self.root))
            self._modules = _taken_out()
            sys.modules.update(others)

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        return Call(self._call(problem, inputs))

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay:
        with self.current():
            return super().capture(problem, inputs)


def _taken_out() -> dict[str, ModuleType]:
    """Take cupynorm out of the imported modules, and return it."""
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def typical_times(
    clock: Clock, launches: Sequence[Sequence[Callable[[], object]]], rounds: int
) -> list[float]:
    """Return the time of each checkout's launches, which take turns in both directions.

    The first round warms up. So does the first launch of a turn, since the one before is another's.
    Each turn goes on with the next set of arrays after the last one counted, so that 17 rounds have
    each of 50. The time is the mean of the middle half. Events come in steps of up to 0.2 us
    (H200), and a median would be rounded to those.
    """
    times: list[list[float]] = [[] for _ in launches]
    for turn in range(rounds + 1):
        for index in range(len(launches))[:: -1 if turn % 2 else 1]:
            first = turn * (LAUNCHES - 1) % len(launches[index])
            taken = clock.sample([*launches[index][first:], *launches[index][:first]], LAUNCHES)
            if turn:
                times[index] += taken[1:]
    quarter = len(times[0]) // 4
    return [statistics.fmean(sorted(found)[quarter : len(found) - quarter]) for found in times]


def captured(backend: Backend, problem: Problem, inputs: dict[str, Any]) -> Replay:
    """Return a graph that can be launched again and again; a ValueError says why there is none."""
    replay = backend.capture(problem, inputs)
    if replay is None:
        raise ValueError(f"{backend.name} cannot be captured into a CUDA graph")
    if replay.reset is not None:
        raise ValueError(f"{backend.name} writes over its inputs in {problem.operation}")
    return replay


def time(
    problem: Problem, backends: Sequence[Backend], clock: Clock, rounds: int, xp: Any
) -> tuple[list[float], list[bool]]:
    """Return the times, the first checkout's first, and which of the others have its bits.

    Other libraries have their own bits, and count as alike.
    """
    sets = [
        _bench.inputs(problem, seed, xp)
        for seed in range(rotations(problem.bytes, clock.cache_bytes))
    ]
    replays = [[captured(backend, problem, inputs) for inputs in sets] for backend in backends]
    for replay in itertools.chain(*replays):
        replay.launch()
    expected, *others = (first.outputs for first, *_ in replays)
    alike = [
        backend.kind != "ours" or same_bits(expected, outputs, xp)
        for backend, outputs in zip(backends[1:], others, strict=True)
    ]
    return typical_times(clock, [[r.launch for r in replay] for replay in replays], rounds), alike


def row(what: str, times: Sequence[str], speeds: Sequence[str]) -> str:
    """Return a line of the table."""
    cells = (*(f"{cell:>10}" for cell in times), *(f"{cell:>8}" for cell in speeds))
    return f"{what:<54}{''.join(cells)}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", help="their folders, the oldest first")
    problems.add_selection(parser, "quick")
    peers = [name for name, kind in KINDS.items() if kind == "peer"]
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=peers,
        default=[],
        metavar="NAME",
        help=f"other libraries than the checkouts, among {', '.join(peers)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=17, metavar="N", help="turns of each (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    chosen = problems.selected(parser, options)
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}.")
        return 1
    import cupy

    try:
        checkouts = [Checkout(root) for root in options.checkouts]
    except ValueError as error:
        parser.error(str(error))
    found, facts = discover(options.backends) if options.backends else ({}, {})
    for name in options.backends:
        if name not in found:
            parser.error(f"{name}: {facts[name]}")
    backends = [*checkouts, *(found[name] for name in options.backends)]
    names = [f"[{i}]" for i in range(len(backends))]
    print(*(f"{i} {backend.name}" for i, backend in zip(names, backends, strict=True)))
    print(row("us; speed over [0]", names, names[1:]))
    clock = Clock()
    speeds: list[list[float]] = [[] for _ in backends[1:]]
    for problem in chosen:
        times, alike = time(problem, backends, clock, options.rounds, cupy)
        for speed, seconds in zip(speeds, times[1:], strict=True):
            speed.append(times[0] / seconds)
        last = [f"{speed[-1]:.3f}" for speed in speeds]
        line = row(f"{problem.operation} {label(problem)}", [f"{1e6 * t:.2f}" for t in times], last)
        differ = [i for i, same in zip(names[1:], alike, strict=True) if not same]
        print(line + "".join(f"  bits of {i} differ" for i in differ), flush=True)
        for backend in backends:
            backend.release()
    if speeds:
        means = [f"{geometric_mean(speed):.3f}" for speed in speeds]
        print(row(f"geometric mean of {len(chosen)}", ["" for _ in backends], means))
    return 0


if __name__ == "__main__":
    sys.exit(main())
