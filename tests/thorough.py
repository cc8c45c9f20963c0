"""How much of the repeated coverage runs: a part, or with CUPYNORM_THOROUGH=1 all of it."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

__all__ = ["THOROUGH", "by_turns", "examples", "in_pairs", "of_each_name", "one_in"]

THOROUGH = os.environ.get("CUPYNORM_THOROUGH", "0") != "0"

Case = TypeVar("Case")


def examples(number: int, *, of: int) -> int:
    """Return how many examples to draw: `number`, or all `of` them."""
    return of if THOROUGH else number


def one_in(number: int) -> int:
    """Return the step at which cases are taken: one in `number`, or each."""
    return 1 if THOROUGH else number


def in_pairs(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return some cases of a product, in which each two values of two parameters meet, or all."""
    lists = [list(of_one) for of_one in values]
    every = list(itertools.product(*(range(len(of_one)) for of_one in lists)))
    # A value is named by its parameter and its place there.
    pairs = {case: list(itertools.combinations(enumerate(case), 2)) for case in every}
    number = len(set().union(*pairs.values()))
    met: Counter[Any] = Counter()
    chosen = []
    while len(met) < number:  # the case with the most new pairs, or with those that are rarest
        best = max(every, key=lambda case: sum(4.0 ** -met[pair] for pair in pairs[case]))
        met.update(pairs[best])
        chosen.append(best)
    return [
        tuple(of_one[i] for of_one, i in zip(lists, case, strict=True))
        for case in (every if THOROUGH else sorted(chosen))
    ]


def of_each_name(cases: Iterable[Case]) -> list[Case]:
    """Return every third case of each name, but at least one. The name decides which."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.name, []).append(case)  # type: ignore[attr-defined]
    chosen: list[Case] = []
    for name, group in groups.items():
        first = zlib.crc32(name.encode()) % min(one_in(3), len(group))
        chosen += group[first :: one_in(3)]
    return chosen


def by_turns(cases: Iterable[Case]) -> list[Case]:
    """Return one of the cases that differ only in the norm. The norms take turns."""
    groups: dict[Any, list[Case]] = {}
    seen: Counter[str] = Counter()
    for case in cases:
        name, norm = str(case), case.norm  # type: ignore[attr-defined]
        groups.setdefault((name.replace(norm, ""), seen[name]), []).append(case)
        seen[name] += 1
    every = groups.values()
    if THOROUGH:
        return [case for group in every for case in group]
    return [group[i % len(group)] for i, group in enumerate(every)]
