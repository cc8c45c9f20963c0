"""What moved between two results files: ``python -m benchmarks.compare old.json new.json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.backends import ALL
from benchmarks.summary import geometric_mean
from cupynorm._bench import Problem


class Change(NamedTuple):
    """One backend on one problem in both files.

    `speedup` is the old time over the new; `moved` says that the intervals from the lowest to the
    highest median of a round do not touch.
    """

    problem: Problem
    backend: str
    old: str
    new: str
    speedup: float | None
    moved: bool


def compare(
    old: dict[str, Any], new: dict[str, Any], backends: tuple[str, ...] = ()
) -> Iterator[Change]:
    """Yield a change for everything that both files have."""
    before = {(results.problem_of(r), r["backend"]): r for r in old["measurements"]}
    for record in new["measurements"]:
        problem, backend = results.problem_of(record), record["backend"]
        earlier = before.get((problem, backend))
        if earlier is None or (backends and backend not in backends):
            continue
        a, b = results.fastest(earlier), results.fastest(record)
        if a is None or b is None:
            was, now = earlier["status"], record["status"]
            yield Change(problem, backend, was, now, None, was != now)
            continue
        apart = a["high"] < b["low"] or b["high"] < a["low"]
        shown = [f"{results.gigabytes_per_second(r):.0f}" for r in (earlier, record)]
        yield Change(problem, backend, *shown, a["median"] / b["median"], apart)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--backends", nargs="+", choices=[b.name for b in ALL], default=("cupynorm",)
    )
    parser.add_argument("--all", action="store_true", help="also what did not move")
    parser.add_argument(
        "--fail-below", type=float, metavar="RATIO", help="exit 1 if anything moved below this"
    )
    options = parser.parse_args(arguments)
    old, new = results.load(options.old), results.load(options.new)
    for name, file in (("old", old), ("new", new)):
        machine = file["machine"]
        print(f"{name}: {file['commit'][:12]} on {machine['gpu']}, driver {machine['driver']}")
    changes = list(compare(old, new, tuple(options.backends)))
    print(f"\n{'GB/s':<62}{'old':>8}{'new':>8}{'ratio':>8}")
    for change in changes:
        if change.moved or options.all:
            p = change.problem
            where = f"{p.operation} {p.rows}x{p.cols} {p.dtype},{p.weight_dtype}"
            ratio = "" if change.speedup is None else f"{change.speedup:.3f}"
            still = "" if change.moved else "  within the spread"
            named = f"{change.backend}: {where}"
            print(f"{named:<62}{change.old:>8}{change.new:>8}{ratio:>8}{still}")
    mean = geometric_mean([c.speedup for c in changes if c.speedup is not None])
    moved = sum(change.moved for change in changes)
    if mean is not None:
        print(f"\n{moved} of {len(changes)} moved; geometric mean of all ratios {mean:.3f}")
    else:
        print("\nThe files have nothing in common.")
    fail_below = options.fail_below
    slower = [
        c
        for c in changes
        if fail_below is not None and c.moved and (c.speedup is None or c.speedup < fail_below)
    ]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
