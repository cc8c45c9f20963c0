"""Figures from measurements: GB/s over N against the limit, and ratios to the best peer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.backends import ALL
from benchmarks.problems import OPERATIONS
from benchmarks.results import by_problem, gigabytes_per_second
from benchmarks.summary import Ratio, label, ratios
from cupynorm._bench import Problem

FORMATS = ("png", "svg")
# Okabe and Ito's colours, told apart by the colour-blind too.
COLOURS = (
    *("#0072B2", "#332288", "#882255", "#E69F00", "#009E73"),
    *("#117733", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#6B4F00"),
)
MARKERS = "opDdhs^vPX*"


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write a figure of lines and one of bars for each operation; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    # So that the same figures give the same files.
    matplotlib.rcParams["svg.hashsalt"] = "cupynorm"
    title = f"{results['machine']['gpu']}, {results['commit'][:12]}"
    found = ratios(results["measurements"])
    paths = []
    for operation in OPERATIONS:
        own = [r for r in results["measurements"] if f"{r['norm']} {r['direction']}" == operation]
        bars = [r for r in found if r.problem.operation == operation and r.to_peer is not None]
        name = operation.replace(" ", "_")
        if own:
            paths += _save(lines(f"{operation}, {title}", own), folder / f"{name}_speed")
        if bars:
            paths += _save(ratio_bars(f"{operation}, {title}", bars), folder / f"{name}_ratio")
    return paths


def lines(title: str, measurements: Iterable[dict[str, Any]]) -> Figure:
    """Draw GB/s over N, one line a backend, of the pair of dtypes with the most widths.

    Where a width was measured with several numbers of rows, that with the most counts. A line joins
    what has the same number of rows; the axis names those that differ from most.
    """
    tallest: dict[tuple[str, str], dict[int, tuple[Problem, dict[str, Any]]]] = {}
    for problem, cell in by_problem(measurements):
        widths = tallest.setdefault((problem.dtype, problem.weight_dtype), {})
        if problem.cols not in widths or widths[problem.cols][0].rows < problem.rows:
            widths[problem.cols] = (problem, cell)
    pair, widths = max(tallest.items(), key=lambda item: len(item[1]))
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    styled = zip((b.name for b in ALL if b.kind != "limit"), COLOURS, MARKERS, strict=True)
    styles: dict[str, dict[str, Any]] = {
        name: {"color": colour, "marker": marker} for name, colour, marker in styled
    }
    styles["cupynorm"]["linewidth"] = 3
    forward = next(iter(widths.values()))[0].direction == "forward"
    limit = "copy" if forward else "add"
    backends = {limit: [b.name for b in ALL if b.kind == "limit"]} | {
        name: [name] for name in styles
    }
    styles[limit] = {"color": "black", "linestyle": "--", "marker": "_", "markersize": 10}
    for name, names in backends.items():
        for part, points in enumerate(_lines(widths, names)):
            named = {} if part else {"label": name}
            axes.plot(*zip(*points, strict=True), **styles[name], **named)
    rows = {cols: problem.rows for cols, (problem, _) in sorted(widths.items())}
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


def _lines(
    widths: dict[int, tuple[Problem, dict[str, Any]]], names: Iterable[str]
) -> list[list[tuple[int, float]]]:
    """Return width and speed, the best of the backends named where there is one, by their rows."""
    lines: dict[int, list[tuple[int, float]]] = {}
    for cols, (problem, cell) in sorted(widths.items()):
        speeds = [gigabytes_per_second(cell[name]) for name in names if name in cell]
        known = [speed for speed in speeds if speed is not None]
        if known:
            lines.setdefault(problem.rows, []).append((cols, max(known)))
    return list(lines.values())


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
        text = f" {value:.2f} of {ratio.peer}"
        axes.text(max(value, 1.0), place, text, va="center", fontsize="x-small")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.25 * max(1.0, *values))
    axes.invert_yaxis()
    axes.set_xlabel("speed over the best peer's; right of the line is faster")
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
