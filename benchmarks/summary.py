"""From measurements to statements: ratios, their geometric means, and the worst shape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.backends import KINDS
from benchmarks.problems import OPERATIONS
from benchmarks.results import Record, by_problem, of_kind
from cupynorm._bench import Problem

# If a problem's limit takes less, GB/s say little: the launch is most of the time.
SMALL_SECONDS = 10e-6
NAMES = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm"}


class Ratio(NamedTuple):
    """Our speed over the best peer's and over the limit's; above 1 is faster.

    `as_called` is the former for calls as users make them, ours and the best peer's in that
    respect. `unmeasured` names the peers measured on other problems but not on this one.
    """

    problem: Problem
    to_peer: float | None
    to_limit: float | None
    peer: str | None
    as_called: float | None
    unmeasured: tuple[str, ...]


class Summary(NamedTuple):
    """One operation over all its shapes."""

    operation: str
    shapes: int
    missing: list[Problem]  # cupynorm has no time of them: wrong, failed, not reached
    to_peer: float | None
    to_limit: float | None
    ahead: int  # shapes at least as fast as the best peer
    compared: int  # shapes with a peer
    incomplete: int  # of these, shapes on which some peer was not measured
    worst: Ratio | None
    as_called: float | None  # to the best peer, by calls as users make them
    ahead_as_called: int
    compared_as_called: int
    partial: dict[str, int]  # peers not timed on all shapes, and on how many they were


def ratios(measurements: Iterable[dict[str, Any]]) -> list[Ratio]:
    """Return the ratios of each problem on which cupynorm was timed."""
    measurements = list(measurements)
    everywhere = _peers(measurements)
    found = []
    for problem, cell in by_problem(measurements):
        ours = min(of_kind(cell, "ours").values(), default=None)
        if ours is None:
            continue
        peers, limits = of_kind(cell, "peer"), of_kind(cell, "limit")
        peer = min(peers, key=peers.__getitem__, default=None)
        calls = of_kind(cell, "peer", called=True).values()
        our_call = min(of_kind(cell, "ours", called=True).values(), default=None)
        found.append(
            Ratio(
                problem,
                None if peer is None else peers[peer] / ours,
                min(limits.values()) / ours if limits else None,
                peer,
                min(calls) / our_call if calls and our_call is not None else None,
                tuple(name for name in everywhere if name not in cell),
            )
        )
    return found


def _peers(measurements: Iterable[Record]) -> list[str]:
    """Return the peers that have any record, in the order of the tables."""
    recorded = {record["backend"] for record in measurements}
    return [name for name, kind in KINDS.items() if kind == "peer" and name in recorded]


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def summarize(measurements: Iterable[dict[str, Any]]) -> list[Summary]:
    """Return a summary of each operation measured."""
    measurements = list(measurements)
    found = {ratio.problem: ratio for ratio in ratios(measurements)}
    everywhere = _peers(measurements)
    summaries = []
    for operation in OPERATIONS:
        cells = {p: cell for p, cell in by_problem(measurements) if p.operation == operation}
        if not cells:
            continue
        problems = list(cells)
        timed_peers = [of_kind(cell, "peer") for cell in cells.values()]
        counts = {name: sum(name in times for times in timed_peers) for name in everywhere}
        own = [found[problem] for problem in problems if problem in found]
        compared = [(r.to_peer, r) for r in own if r.to_peer is not None]
        to_limit = [r.to_limit for r in own if r.to_limit is not None]
        as_called = [r.as_called for r in own if r.as_called is not None]
        summaries.append(
            Summary(
                operation,
                len(problems),
                [problem for problem in problems if problem not in found],
                geometric_mean([value for value, _ in compared]),
                geometric_mean(to_limit),
                sum(value >= 1 for value, _ in compared),
                len(compared),
                sum(bool(r.unmeasured) for _, r in compared),
                min(compared, key=lambda pair: pair[0])[1] if compared else None,
                geometric_mean(as_called),
                sum(value >= 1 for value in as_called),
                len(as_called),
                {name: count for name, count in counts.items() if count < len(problems)},
            )
        )
    return summaries


def sentence(summary: Summary) -> str:
    """Return the summary on one line."""
    parts = [f"{summary.operation}: timed {timed(summary)}"]
    if summary.to_limit is not None:
        parts.append(f"{summary.to_limit:.3f} of the limit")
    worst = summary.worst
    if summary.to_peer is not None and worst is not None and worst.to_peer is not None:
        parts.append(f"{summary.to_peer:.3f} of the best peer (geometric means)")
        parts.append(f"ahead on {summary.ahead} of {summary.compared}")
        parts.append(f"worst {worst.to_peer:.3f} of {worst.peer} at {label(worst.problem)}")
    if summary.as_called is not None:
        parts.append(
            f"as called {summary.as_called:.3f}, "
            f"ahead on {summary.ahead_as_called} of {summary.compared_as_called}"
        )
    if summary.partial:
        parts.append(f"peers timed on fewer: {partial(summary)}")
    return ", ".join(parts)


def timed(summary: Summary) -> str:
    """Return on how many shapes cupynorm was timed, and name the others."""
    count = f"{summary.shapes - len(summary.missing)} of {summary.shapes} shapes"
    if not summary.missing:
        return count
    return f"{count}, without {'; '.join(map(label, summary.missing))}"


def partial(summary: Summary) -> str:
    """Name the peers that were not timed on all shapes, and on how many they were."""
    return ", ".join(f"{name} {count}" for name, count in summary.partial.items())


def small(cell: dict[str, Record]) -> bool:
    """Tell whether the limit takes less than SMALL_SECONDS."""
    return min(of_kind(cell, "limit").values(), default=SMALL_SECONDS) < SMALL_SECONDS


def digits(value: float) -> str:
    """Return a figure with at least three digits."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def short(commit: str) -> str:
    """Return the start of each commit's name, and the remark that follows it."""
    return " ".join(word[:12] for word in commit.split(" "))


def label(problem: Problem) -> str:
    """Return the shape and the dtypes."""
    return f"{problem.rows}x{problem.cols} {problem.dtype},{problem.weight_dtype}"
