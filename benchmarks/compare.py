"""What moved between two results files: ``python -m benchmarks.compare old.json new.json``.

A change counts as moved if it exceeds both the spread of the repeats and what the limits, the same
work in both runs, moved by themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.backends import ALL, KINDS
from benchmarks.summary import SMALL_SECONDS, digits, geometric_mean, label, short, small
from cupynorm._bench import Problem

Key = tuple[Problem, str]


class Change(NamedTuple):
    """One backend on one problem in both files.

    `speedup` is the old time over the new; `moved` says that it is further from 1 than those of the
    limits, and that the intervals from the lowest to the highest median of a round do not touch.
    """

    problem: Problem
    backend: str
    old: str
    new: str
    speedup: float | None
    moved: bool


class Drift(NamedTuple):
    """The factors within which the limits' own times lie between two files.

    Those of small problems, whose time is mostly the launch, differ more. 1 where no limit is in
    both files.
    """

    small: float
    large: float


def drift(old: dict[str, Any], new: dict[str, Any]) -> Drift:
    """Return how much the limits moved, the most of all that both files have."""
    tiny = _small(new)
    found = {True: 1.0, False: 1.0}
    for (problem, backend), earlier, record in _common(old, new):
        was, now = results.seconds(earlier), results.seconds(record)
        if KINDS[backend] == "limit" and was is not None and now is not None:
            is_small = problem in tiny
            found[is_small] = max(found[is_small], was / now, now / was)
    return Drift(found[True], found[False])


def compare(
    old: dict[str, Any], new: dict[str, Any], backends: tuple[str, ...] = ()
) -> Iterator[Change]:
    """Yield a change for everything that both files have."""
    limits, tiny = drift(old, new), _small(new)
    for (problem, backend), earlier, record in _common(old, new):
        if backends and backend not in backends:
            continue
        a, b = results.counting(earlier), results.counting(record)
        if a is None or b is None:
            was, now = earlier["status"], record["status"]
            yield Change(problem, backend, was, now, None, was != now)
            continue
        speedup = a["median"] / b["median"]
        apart = a["high"] < b["low"] or b["high"] < a["low"]
        beyond = max(speedup, 1 / speedup) > (limits.small if problem in tiny else limits.large)
        was, now = (digits(1e-9 * problem.bytes / timing["median"]) for timing in (a, b))
        yield Change(problem, backend, was, now, speedup, apart and beyond)


def _common(
    old: dict[str, Any], new: dict[str, Any]
) -> Iterator[tuple[Key, results.Record, results.Record]]:
    before = _by_key(old)
    for key, record in _by_key(new).items():
        if key in before:
            yield key, before[key], record


def _by_key(report: dict[str, Any]) -> dict[Key, results.Record]:
    return {(results.problem_of(r), r["backend"]): r for r in report["measurements"]}


def _small(report: dict[str, Any]) -> set[Problem]:
    cells: dict[Problem, dict[str, results.Record]] = {}  # those that only a limit has, too
    for (problem, backend), record in _by_key(report).items():
        cells.setdefault(problem, {})[backend] = record
    return {problem for problem, cell in cells.items() if small(cell)}


def differences(old: dict[str, Any], new: dict[str, Any], backends: Iterable[str]) -> Iterator[str]:
    """Yield what else differs: the machine, the versions, and what only one of the files has."""
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
        "--fail-below", type=float, metavar="RATIO", help="exit 1 if anything moved below this"
    )
    options = parser.parse_args(arguments)
    for path in (options.old, options.new):
        if not path.is_file():
            parser.error(f"there is no file {path}")
    old, new = results.load(options.old), results.load(options.new)
    for name, file in (("old", old), ("new", new)):
        machine = file["machine"]
        print(f"{name}: {short(file['commit'])} on {machine['gpu']}, driver {machine['driver']}")
    for difference in differences(old, new, options.backends):
        print(difference)
    limits = drift(old, new)
    print(
        f"The limits moved by a factor of up to {limits.large:.3f}, those of less than "
        f"{1e6 * SMALL_SECONDS:.0f} us up to {limits.small:.3f}: what moved by less did not move."
    )
    changes = list(compare(old, new, tuple(options.backends)))
    shown = {
        f"{c.backend}: {c.problem.operation} {label(c.problem)}": c
        for c in changes
        if c.moved or options.all
    }
    width = max(map(len, shown), default=0)
    if shown:
        print(f"\n{'GB/s':<{width}}{'old':>10}{'new':>10}{'ratio':>8}")
    for name, change in shown.items():
        ratio = "" if change.speedup is None else f"{change.speedup:.3f}"
        still = "" if change.moved else "  not moved"
        print(f"{name:<{width}}{change.old:>10}{change.new:>10}{ratio:>8}{still}")
    mean = geometric_mean([c.speedup for c in changes if c.speedup is not None])
    moved = sum(change.moved for change in changes)
    if not changes:
        print("\nThe files have nothing in common.")
    elif mean is None:
        print(f"\n{moved} of {len(changes)} moved; none has a time in both files.")
    else:
        print(f"\n{moved} of {len(changes)} moved; geometric mean of all ratios {mean:.3f}")
    fail_below = options.fail_below
    slower = [
        c
        for c in changes
        if fail_below is not None and c.moved and (c.speedup is None or c.speedup < fail_below)
    ]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
