"""What is seen while it runs: a live table with progress, or plain lines where no terminal is."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.results import Record, by_problem, gigabytes_per_second
from cupynorm._bench import Problem

ROWS = 24


def cell(record: Record | None) -> str:
    """Return GB/s, or what happened instead."""
    if record is None:
        return ""
    speed = gigabytes_per_second(record)
    return record["status"] if speed is None else f"{speed:.0f}"


class Display:
    """Shows the measurements of `report` as they come."""

    def __init__(self, report: dict[str, Any], backends: list[str], total: int) -> None:
        self._report, self._backends = report, backends
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("GB/s", total=total)
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

    def finished(self, problem: Problem) -> None:
        """Show a problem's measurements."""
        self._progress.advance(self._task)
        if self._console.is_terminal:
            self._live.update(Group(self._table(), self._progress), refresh=True)
            return
        own = [r for r in self._report["measurements"] if r["rows"] == problem.rows]
        cells = dict(by_problem(own)).get(problem, {})
        self._line(_name(problem), [cell(cells.get(name)) for name in self._backends])

    def _line(self, name: str, cells: list[str]) -> None:
        self.say(
            f"{name:<54}" + "".join(f"{text.removeprefix('torch.')[:12]:>13}" for text in cells)
        )

    def _table(self) -> Table:
        table = Table()
        table.add_column("GB/s")
        for name in self._backends:
            table.add_column(name, justify="right")
        for problem, cells in list(by_problem(self._report["measurements"]))[-ROWS:]:
            table.add_row(_name(problem), *(cell(cells.get(name)) for name in self._backends))
        return table


def _name(problem: Problem) -> str:
    shape = f"{problem.rows}x{problem.cols}"
    return f"{problem.operation} {shape} {problem.dtype},{problem.weight_dtype}"
