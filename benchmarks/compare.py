"""What moved between two results files: ``python -m benchmarks.compare old.json new.json``.

A change counts as moved if it exceeds the spread of the repeats. It must also exceed the move of
the same problem's limit, which is the same work in both runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.backends import ALL, KINDS
from benchmarks.summary import SMALL_SECONDS, digits, geometric_mean, label, short, small
from cupynorm._bench import Problem

Key = tuple[Problem, str]
# This replaces a limit that one file lacks. Few limits move more, and a single one does not hide
# all problems of its size.
QUANTILE = 0.9


class Change(NamedTuple):
    """One backend on one problem in both files.

    `speedup` is the old time over the new. `drift` is the factor by which the problem's limit
    moved. `moved` says that the speedup is further from 1 than that, and that the intervals from
    the lowest to the highest median of a round do not touch.
    """

    problem: Problem
    backend: str
    old: str
    new: str
    speedup: float | None
    drift: float
    moved: bool


class Drift(NamedTuple):
    """The factors by which the limits' own times differ between two files.

    `own` has that of each problem with a limit in both, the larger if it has two. `small` and
    `large` are quantiles of these, or 1 without any. Small problems differ more, since their time
    is mostly the launch.
    """

    own: dict[Problem, float]
    small: float
    large: float


def drift(old: dict[str, Any], new: dict[str, Any]) -> Drift:
    """Return how much the limits in both files have moved."""
    own: dict[Problem, float] = {}
    for (problem, backend), earlier, record in _common(old, new):
        was, now = results.seconds(earlier), results.seconds(record)
        if KINDS.get(backend) == "limit" and was is not None and now is not None:
            own[problem] = max(own.get(problem, 1.0), was / now, now / was)
    tiny = _small(old, new)
    small, large = (
        [factor for problem, factor in own.items() if (problem in tiny) == is_small] or [1.0]
        for is_small in (True, False)
    )
    return Drift(own, float(np.quantile(small, QUANTILE)), float(np.quantile(large, QUANTILE)))


def compare(
    old: dict[str, Any], new: dict[str, Any], backends: tuple[str, ...] = ()
) -> Iterator[Change]:
    """Yield a change for each measurement that both files have."""
    limits, tiny = drift(old, new), _small(old, new)
    for (problem, backend), earlier, record in _common(old, new):
        if backends and backend not in backends:
            continue
        factor = limits.own.get(problem, limits.small if problem in tiny else limits.large)
        a, b = results.counting(earlier), results.counting(record)
        if a is None or b is None:
            was, now = earlier["status"], record["status"]
            yield Change(problem, backend, was, now, None, factor, was != now)
            continue
        speedup = a["median"] / b["median"]
        apart = a["high"] < b["low"] or b["high"] < a["low"]
        beyond = max(speedup, 1 / speedup) > factor
        was, now = (digits(1e-9 * problem.bytes / timing["median"]) for timing in (a, b))
        yield Change(problem, backend, was, now, speedup, factor, apart and beyond)


def _common(
    old: dict[str, Any], new: dict[str, Any]
) -> Iterator[tuple[Key, results.Record, results.Record]]:
    before = _by_key(old)
    for key, record in _by_key(new).items():
        if key in before:
            yield key, before[key], record


def _by_key(report: dict[str, Any]) -> dict[Key, results.Record]:
    return {(results.problem_of(r), r["backend"]): r for r in report["measurements"]}


def _small(*reports: dict[str, Any]) -> set[Problem]:
    """Return the problems that are small in any of the files, as one may lack the limit."""
    found = set()
    for report in reports:
        cells: dict[Problem, dict[str, results.Record]] = {}  # with those that have only a limit
        for (problem, backend), record in _by_key(report).items():
            cells.setdefault(problem, {})[backend] = record
        found |= {problem for problem, cell in cells.items() if small(cell)}
    return found


def differences(old: dict[str, Any], new: dict[str, Any], backends: Iterable[str]) -> Iterator[str]:
    """Yield what else differs: method, machine, versions, and measurements in only one file."""
    was, now = (report.get("method", 1) for report in (old, new))
    if was != now:
        yield (
            f"WARNING: the method differs: {was}, {now} (METHOD of benchmarks/results.py): what "
            "moved may be how it was measured"
        )
    for part, names in (("machine", old["machine"] | new["machine"]), ("backends", backends)):
        for name in names:
            was, now = (report[part].get(name, "nothing") for report in (old, new))
            if was != now:
                yield f"{name} differs: {was}, {now}"
    keys = {"old": _by_key(old), "new": _by_key(new)}
    for name, other in (("old", "new"), ("new", "old")):
        for backend in backends:
            alone = [p for p, b in keys[name] if b == backend and (p, b) not in keys[other]]
            if alone:
                first = f"{alone[0].operation} {label(alone[0])}"
                more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
                yield f"only in {name}: {backend}: {first}{more}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path, help="a file of benchmarks.run")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=[b.name for b in ALL],
        default=("cupynorm",),
        metavar="NAME",
        help="what to compare (default: cupynorm)",
    )
    parser.add_argument("--all", action="store_true", help="also what did not move")
    parser.add_argument(
        "--fail-below",
        type=float,
        metavar="RATIO",
        help="exit 1 if anything moved below this, or lost its time",
    )
    options = parser.parse_args(arguments)
    for path in (options.old, options.new):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    try:
        old, new = (results.load(path, "benchmarks.run") for path in (options.old, options.new))
    except ValueError as error:
        parser.error(str(error))
    for name, file in (("old", old), ("new", new)):
        machine = file["machine"]
        print(f"{name}: {short(file['commit'])} on {machine['gpu']}, driver {machine['driver']}")
    for difference in differences(old, new, options.backends):
        print(difference)
    limits = drift(old, new)
    changes = list(compare(old, new, tuple(options.backends)))
    if not changes:
        names = ", ".join(options.backends)
        parser.error(f"{options.old} and {options.new} must have problems of {names} in common")
    without = sum(c.problem not in limits.own for c in changes)
    print(
        "What moved did so by more than its repeats differ and by more than its own limit (l).\n"
        f"Where its limit is not in both files ({without} of {len(changes)}), the {QUANTILE:g} "
        f"quantile of the limits of its size stands for it (q): {limits.small:.3f} under "
        f"{1e6 * SMALL_SECONDS:.0f} us, {limits.large:.3f} from there on."
    )
    shown = {
        f"{c.backend}: {c.problem.operation} {label(c.problem)}": c
        for c in changes
        if c.moved or options.all
    }
    width = max(map(len, shown), default=0)
    if shown:
        print(f"\n{'GB/s':<{width}}{'old':>10}{'new':>10}{'ratio':>8}{'limit':>10}")
    for name, change in shown.items():
        ratio = "" if change.speedup is None else f"{change.speedup:.3f}"
        rule = f"{change.drift:.3f} {'l' if change.problem in limits.own else 'q'}"
        still = "" if change.moved else "  not moved"
        print(f"{name:<{width}}{change.old:>10}{change.new:>10}{ratio:>8}{rule:>10}{still}")
    mean = geometric_mean([c.speedup for c in changes if c.speedup is not None])
    moved = sum(change.moved for change in changes)
    if mean is None:
        print(f"\n{moved} of {len(changes)} moved; none has a time in both files.")
    else:
        print(f"\n{moved} of {len(changes)} moved; geometric mean of all ratios {mean:.3f}")
    fail_below = options.fail_below
    slower = [
        c
        for c in changes
        if fail_below is not None
        and c.moved
        and (c.old == "ok" if c.speedup is None else c.speedup < fail_below)
    ]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
