"""Figures from measurements: the time of decoding over M, and the speed of training over N.

Decoding's times are divided by the copy's or the add's. Near those, tenths of a microsecond count.
``python -m benchmarks.plots results.json docs/speed.svg`` draws the README's figure of both passes
of both norms.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import matplotlib
from matplotlib.figure import Figure

from benchmarks.backends import ALL
from benchmarks.problems import DECODE, OPERATIONS, PAIRS, TRAINING
from benchmarks.results import Record, by_problem, load, seconds
from benchmarks.summary import NAMES, short
from cupynorm._bench import Direction, Problem
from cupynorm.reference import Norm

# With text kept as text a figure is a third of the size.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cupynorm"}
# Okabe and Ito's colours. The colour-blind can tell them apart too.
COLOURS = (
    *("#0072B2", "#332288", "#117733", "#E69F00", "#009E73"),
    *("#882255", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#6B4F00"),
)
MARKERS = "opDdhs^vPX*"
# Decoding's figures end at this time over the limit's, unless cupynorm's is longer. So those near
# the limit can be told apart.
BEYOND = {"forward": 2.0, "backward": 3.0}


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the figure of each operation that has decoding to show; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{results['machine']['gpu']}, {short(results['commit'])}"
    paths = []
    for operation in OPERATIONS:
        own = [r for r in results["measurements"] if f"{r['norm']} {r['direction']}" == operation]
        figure = decoding(f"{operation}, {title}", own)
        if figure is not None:
            name = f"{operation.replace(' ', '_')}_decoding.svg"
            paths.append(_save(figure, folder / name))
    return paths


def decoding(title: str, measurements: Iterable[Record]) -> Figure | None:
    """Draw the time over the limit's, a panel a width, over M; None without two M of a width.

    It shows the decoding shapes, in the pair of dtypes with the most of them. The points of one M
    are drawn next to each other. Points beyond BEYOND, and beyond all of cupynorm's, are cut off.
    """
    measured = [(p, cell) for p, cell in by_problem(measurements) if (p.rows, p.cols) in DECODE]
    pairs = Counter((problem.dtype, problem.weight_dtype) for problem, _ in measured)
    pair = max(pairs, key=pairs.__getitem__, default=None)
    own = [(p, cell) for p, cell in measured if (p.dtype, p.weight_dtype) == pair]
    cells = {(problem.rows, problem.cols): cell for problem, cell in own}
    rows, widths = sorted({m for m, _ in cells}), sorted({n for _, n in cells})
    if pair is None or len(cells) == len(widths):
        return None
    direction = own[0][0].direction
    (limit, limits, _), *backends = _backends(direction)
    drawn = []
    for name, names, style in backends:
        found = {place: _over(cell, names, limits) for place, cell in cells.items()}
        if any(value is not None for value in found.values()):
            drawn.append((name, found, style))
    values = [1.0, *(v for _, found, _ in drawn for v in found.values() if v is not None)]
    ours = [v for name, found, _ in drawn if name == "cupynorm" for v in found.values() if v]
    top = max([BEYOND[direction], *(math.ceil(10 * value) / 10 for value in ours)])
    columns = min(2, len(widths))
    down = -(-len(widths) // columns)
    figure = Figure(figsize=(2 + 4.5 * columns, 1 + 4 * down), layout="constrained")
    panels = list(figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[len(widths) :]:
        axes.remove()
    legend: dict[str, Any] = {}
    for cols, axes in zip(widths, panels, strict=False):
        axes.axhline(1, color="black", linestyle="--", label=limit)
        for index, (name, found, style) in enumerate(drawn):
            shift = 0.7 * ((index + 0.5) / len(drawn) - 0.5)
            points = ((at + shift, found.get((m, cols))) for at, m in enumerate(rows))
            _plot(axes, name, _parts(points), style)
        for between in range(1, len(rows)):
            axes.axvline(between - 0.5, color="black", linewidth=0.8, alpha=0.2)
        axes.set_title(f"N = {cols}", fontsize="medium")
        axes.set_xticks(range(len(rows)), [f"{m}" for m in rows])
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.set_ylim(min(values) - 0.05, min(top, max(values) + 0.05))
        axes.grid(axis="y", alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.supxlabel("M, rows")
    figure.supylabel(f"time over the {limit}'s")
    cut = f"; beyond {top:g} times the {limit} not shown" if max(values) > top else ""
    figure.suptitle(f"{title}\nx {pair[0]}, weight {pair[1]}{cut}")
    names = [limit, *(name for name, _, _ in drawn)]
    handles = [legend[name] for name in names]
    figure.legend(handles, names, fontsize="small", loc="outside right upper")
    return figure


def _backends(direction: str) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield what has a line: its name, the backends whose best it shows, its style."""
    limit = {"color": "black", "linestyle": "--", "marker": "_", "markersize": 10}
    names = [b.name for b in ALL if b.kind == "limit"]
    yield "copy" if direction == "forward" else "add", names, limit
    others = (b.name for b in ALL if b.kind != "limit")
    for name, colour, marker in zip(others, COLOURS, MARKERS, strict=True):
        # Ours is thick and under the others, whose markers are open. So neither hides the other.
        own = {"linewidth": 4, "markersize": 9} if name == "cupynorm" else {"fillstyle": "none"}
        yield name, [name], {"color": colour, "marker": marker} | own


def _fastest(cell: dict[str, Record], names: Iterable[str]) -> float | None:
    times = [seconds(cell[name]) for name in names if name in cell]
    return min((time for time in times if time is not None), default=None)


def _over(cell: dict[str, Record], names: Iterable[str], limits: Iterable[str]) -> float | None:
    time, limit = _fastest(cell, names), _fastest(cell, limits)
    return None if time is None or limit is None else time / limit


def _parts(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Return the parts between points without a value."""
    parts: list[list[tuple[float, float]]] = [[]]
    for place, value in points:
        if value is None:
            parts.append([])
        else:
            parts[-1].append((place, value))
    return [part for part in parts if part]


def _plot(
    axes: Any, name: str, parts: Iterable[Sequence[tuple[float, float]]], style: dict[str, Any]
) -> None:
    """Draw the parts of a backend's line, once in the legend."""
    for index, part in enumerate(parts):
        axes.plot(*zip(*part, strict=True), **style, label="_" if index else name)


def overview(results: dict[str, Any]) -> Figure:
    """Draw the speed over the limit's of both passes of both norms, for the shapes of training."""
    figure = Figure(figsize=(10, 4.1), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    operations = itertools.product(get_args(Norm), get_args(Direction))
    cells = dict(by_problem(results["measurements"]))
    widths = [cols for _, cols in TRAINING]
    legend: dict[str, Any] = {}
    for axes, (norm, direction) in zip(panels.flat, operations, strict=True):
        own = [cells.get(Problem(norm, direction, *shape, *PAIRS[0]), {}) for shape in TRAINING]
        (_, limits, _), *backends = _backends(direction)
        for name, names, style in backends:
            if "torch eager" in names or (name != "cupynorm" and name.startswith("cupynorm")):
                continue
            times = (_over(cell, names, limits) for cell in own)
            points = ((n, t and 1 / t) for n, t in zip(widths, times, strict=True))
            # cupynorm is above the others, since there are enough to hide it.
            _plot(axes, name, _parts(points), style | {"zorder": 3 if name == "cupynorm" else 2})
        axes.axhline(1, color="black", linestyle="--", linewidth=1)
        one = "a copy" if direction == "forward" else "an add"
        axes.set_title(f"{NAMES[norm]} {direction}: 1 is the speed of {one}", fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.08)
        axes.set_xticks(widths, [f"{n}" if n < 1024 else f"{n // 1024}K" for n in widths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        legend |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    for axes in panels[-1]:
        axes.set_xlabel("values a row (K: 1024)")
    figure.supylabel("speed over the memory's limit", fontsize="medium")
    x, weight = PAIRS[0]
    figure.suptitle(
        f"{results['machine']['gpu']}, {short(results['commit'])}: x {x}, weight {weight}; "
        "32K rows (16K of 64K values, 8K of 128K)",
        fontsize="medium",
    )
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend))
    return figure


def _save(figure: Figure, path: Path) -> Path:
    # No date, and fixed names: the same figures give the same files.
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None})
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", type=Path, help="a file of benchmarks.run")
    parser.add_argument("figure", type=Path, help="the SVG to write")
    options = parser.parse_args(arguments)
    print(
        f"written into {_save(overview(load(options.results, 'benchmarks.run')), options.figure)}"
    )


if __name__ == "__main__":
    main()
