"""What a user sees while it runs: a live table with progress, or plain lines without a terminal."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.results import Record, by_problem, gigabytes_per_second, problem_of
from cupynorm._bench import Problem

LINES = 4  # of the console that the rows cannot use: the progress, two of head, the cursor's


def cell(record: Record | None) -> str:
    """Return GB/s, or what happened instead."""
    if record is None:
        return ""
    speed = gigabytes_per_second(record)
    return record["status"] if speed is None else f"{speed:.0f}"


class Display:
    """Shows the measurements of `report` as they come."""

    def __init__(
        self,
        report: dict[str, Any],
        backends: list[str],
        total: int,
        console: Console | None = None,
    ) -> None:
        self._report, self._backends = report, backends
        self._console = console or Console()
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self._task = self._progress.add_task("", total=total)
        # It is drawn when something begins or ends. A thread would delay the host's side of what is
        # timed.
        self._live = Live(console=self._console, auto_refresh=False)
        if not self._console.is_terminal:
            self._line("", backends)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def begin(self, problem: Problem, backend: str) -> None:
        """Show what is measured now."""
        self._progress.update(self._task, description=f"{_short(problem)}, {backend}")
        self._draw()

    def finished(self, problem: Problem) -> None:
        """Show a problem's measurements."""
        self._progress.advance(self._task)
        if self._console.is_terminal:
            self._draw()
            return
        own = [r for r in self._report["measurements"] if r["rows"] == problem.rows]
        cells = dict(by_problem(own)).get(problem, {})
        self._line(_name(problem), [cell(cells.get(name)) for name in self._backends])

    def _draw(self) -> None:
        if self._console.is_terminal:
            self._live.update(Group(self._progress, self._table()), refresh=True)

    def _line(self, name: str, cells: list[str]) -> None:
        self.say(
            f"{name:<54}" + "".join(f"{text.removeprefix('torch.')[:12]:>13}" for text in cells)
        )

    def _table(self) -> Table:
        """Return the problems measured last, and the backends, that the console has room for."""
        measured = self._report["measurements"]
        cells = dict(by_problem(measured))
        newest = dict.fromkeys(map(problem_of, reversed(measured)))
        rows = [problem for problem in newest if problem in cells]
        rows = rows[: max(1, self._console.height - LINES)][::-1]
        columns = [["GB/s", *map(_short, rows)]]
        for name in self._backends:
            columns.append([_head(name), *(cell(cells[problem].get(name)) for problem in rows)])
        table = Table(box=None, padding=(0, 1, 0, 0))
        room = self._console.width
        shown = []
        for head, *texts in columns:
            room -= 1 + max(map(len, [*head.split("\n"), *texts]))
            if room < 0:
                break
            table.add_column(head, justify="right" if shown else "left", no_wrap=True)
            shown.append(texts)
        for row in zip(*shown, strict=True):
            table.add_row(*row)
        return table


def _name(problem: Problem) -> str:
    shape = f"{problem.rows}x{problem.cols}"
    return f"{problem.operation} {shape} {problem.dtype},{problem.weight_dtype}"


def _short(problem: Problem) -> str:
    """Return the name such as "rms fwd 32768x4096 bf16,f32"."""
    name = _name(problem).replace("_norm", "").replace("float", "f")
    return name.replace("forward", "fwd").replace("backward", "bwd")


def _head(backend: str) -> str:
    """Return a backend's name on narrow lines: its first word and, if it has more, its last."""
    first, *others = re.findall(r"\w+", backend.replace("cupynorm", "ours"))
    return "\n".join([first, *(word[:8] for word in others[-1:])])
