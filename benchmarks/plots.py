"""Figures from measurements: GB/s over N, decoding's time over M, and ratios to the best peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.backends import ALL
from benchmarks.problems import DECODE, OPERATIONS
from benchmarks.results import Record, by_problem, seconds
from benchmarks.summary import Ratio, label, ratios, short
from cupynorm._bench import Problem

FORMATS = ("png", "svg")
# Okabe and Ito's colours, told apart by the colour-blind too.
COLOURS = (
    *("#0072B2", "#332288", "#882255", "#E69F00", "#009E73"),
    *("#117733", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#6B4F00"),
)
MARKERS = "opDdhs^vPX*"


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figures of each operation that there is anything to show in; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    # So that the same figures give the same files.
    matplotlib.rcParams["svg.hashsalt"] = "cupynorm"
    title = f"{results['machine']['gpu']}, {short(results['commit'])}"
    found = ratios(results["measurements"])
    paths = []
    for operation in OPERATIONS:
        own = [r for r in results["measurements"] if f"{r['norm']} {r['direction']}" == operation]
        bars = [r for r in found if r.problem.operation == operation and r.to_peer is not None]
        name = operation.replace(" ", "_")
        if own:
            paths += _save(lines(f"{operation}, {title}", own), folder / f"{name}_speed")
        figure = decoding(f"{operation}, {title}", own)
        if figure is not None:
            paths += _save(figure, folder / f"{name}_decoding")
        if bars:
            paths += _save(ratio_bars(f"{operation}, {title}", bars), folder / f"{name}_ratio")
    return paths


def lines(title: str, measurements: Iterable[Record]) -> Figure:
    """Draw GB/s over N, one line a backend, of the pair of dtypes with the most widths.

    Where a width was measured with several numbers of rows, that with the most counts. A line joins
    neighbouring widths of the same number of rows; the axis names those that differ from most.
    """
    tallest: dict[tuple[str, str], dict[int, tuple[Problem, dict[str, Record]]]] = {}
    for problem, cell in by_problem(measurements):
        widths = tallest.setdefault((problem.dtype, problem.weight_dtype), {})
        if problem.cols not in widths or widths[problem.cols][0].rows < problem.rows:
            widths[problem.cols] = (problem, cell)
    pair, widths = max(tallest.items(), key=lambda item: len(item[1]))
    measured = [widths[cols] for cols in sorted(widths)]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for name, names, style in _backends(measured[0][0].direction):
        points: dict[int, list[tuple[int, float | None]]] = {}
        for problem, cell in measured:
            time = _fastest(cell, names)
            speed = None if time is None else 1e-9 * problem.bytes / time
            points.setdefault(problem.rows, []).append((problem.cols, speed))
        _plot(axes, name, [part for own in points.values() for part in _parts(own)], style)
    rows = {problem.cols: problem.rows for problem, _ in measured}
    most = max(rows.values(), key=list(rows.values()).count)
    ticks = [f"{cols}" if m == most else f"{cols}, M = {m}" for cols, m in rows.items()]
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(rows), ticks, rotation=45, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.set_xlabel("N, values a row")
    axes.set_ylabel("GB/s of the bytes that must move")
    axes.set_title(f"{title}\nM = {most}, x {pair[0]}, weight {pair[1]}")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def decoding(title: str, measurements: Iterable[Record]) -> Figure | None:
    """Draw the time over M, a panel a width, one line a backend; None without two M of a width.

    It is of the decoding shapes, in the pair of dtypes with the most of them.
    """
    measured = [(p, cell) for p, cell in by_problem(measurements) if (p.rows, p.cols) in DECODE]
    pairs = Counter((problem.dtype, problem.weight_dtype) for problem, _ in measured)
    pair = max(pairs, key=pairs.__getitem__, default=None)
    own = [(p, cell) for p, cell in measured if (p.dtype, p.weight_dtype) == pair]
    cells = {(problem.rows, problem.cols): cell for problem, cell in own}
    rows, widths = sorted({m for m, _ in cells}), sorted({n for _, n in cells})
    if pair is None or len(cells) == len(widths):
        return None
    figure = Figure(figsize=(3 + 2.4 * len(widths), 5), layout="constrained")
    panels = figure.subplots(1, len(widths), sharex=True, sharey=True, squeeze=False)
    labelled: set[str] = set()
    for cols, axes in zip(widths, panels.flat, strict=True):
        for name, names, style in _backends(own[0][0].direction):
            times = [(m, _fastest(cells.get((m, cols), {}), names)) for m in rows]
            parts = _parts((m, None if time is None else 1e6 * time) for m, time in times)
            _plot(axes, "_" if name in labelled else name, parts, style)
            if parts:
                labelled.add(name)
        axes.set_title(f"N = {cols}", fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(rows, [f"{m}" for m in rows])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.grid(alpha=0.3)
    figure.supxlabel("M, rows")
    figure.supylabel("microseconds")
    figure.suptitle(f"{title}\nx {pair[0]}, weight {pair[1]}")
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def _backends(direction: str) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield what has a line: its name, the backends whose best it shows, its style."""
    limit = {"color": "black", "linestyle": "--", "marker": "_", "markersize": 10}
    names = [b.name for b in ALL if b.kind == "limit"]
    yield "copy" if direction == "forward" else "add", names, limit
    others = (b.name for b in ALL if b.kind != "limit")
    for name, colour, marker in zip(others, COLOURS, MARKERS, strict=True):
        style: dict[str, Any] = {"color": colour, "marker": marker}
        yield name, [name], style | ({"linewidth": 3} if name == "cupynorm" else {})


def _fastest(cell: dict[str, Record], names: Iterable[str]) -> float | None:
    times = [seconds(cell[name]) for name in names if name in cell]
    return min((time for time in times if time is not None), default=None)


def _parts(points: Iterable[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """Return what lies between points without a value."""
    parts: list[list[tuple[int, float]]] = [[]]
    for place, value in points:
        if value is None:
            parts.append([])
        else:
            parts[-1].append((place, value))
    return [part for part in parts if part]


def _plot(
    axes: Any, name: str, parts: Iterable[Sequence[tuple[int, float]]], style: dict[str, Any]
) -> None:
    """Draw the parts of a backend's line, in the legend once."""
    for index, part in enumerate(parts):
        axes.plot(*zip(*part, strict=True), **style, label="_" if index else name)


def ratio_bars(title: str, found: list[Ratio]) -> Figure:
    """Draw cupynorm's speed over the best peer's, a bar a shape."""
    figure = Figure(figsize=(9, 1.6 + 0.22 * len(found)), layout="constrained")
    axes = figure.add_subplot()
    values = [ratio.to_peer or 0.0 for ratio in found]
    axes.barh(range(len(found)), values, color=[COLOURS[4 if v >= 1 else 7] for v in values])
    names = [label(ratio.problem) for ratio in found]
    axes.set_yticks(range(len(found)), names, fontsize="small")
    for place, (value, ratio) in enumerate(zip(values, found, strict=True)):
        # Right of the bar and of the line at 1.
        text = f" {value:.2f}{'*' if ratio.unmeasured else ''} of {ratio.peer}"
        axes.text(max(value, 1.0), place, text, va="center", fontsize="x-small")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.25 * max(1.0, *values))
    axes.invert_yaxis()
    missing = "; * not all peers were measured there" if any(r.unmeasured for r in found) else ""
    axes.set_xlabel(f"speed over the best peer's; right of the line is faster{missing}")
    axes.set_title(title)
    return figure


def _save(figure: Figure, stem: Path) -> list[Path]:
    paths = []
    for extension in FORMATS:
        path = stem.with_suffix(f".{extension}")
        # No date, for the same reason as the salt.
        metadata = {"Date": None} if extension == "svg" else {"Software": None}
        figure.savefig(path, dpi=120, metadata=metadata)
        paths.append(path)
    return paths
