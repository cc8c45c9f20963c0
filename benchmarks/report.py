"""Write a results file into the README: ``python -m benchmarks.report results.json``.

Its figures go beside the results file. Those of several GPUs have a section of their own:
``python -m benchmarks.report --scaling sharding_torch.json sharding_jax.json``, and so has the
clamped ReLU: ``python -m benchmarks.report --relu relu.json``. Nothing between the README's markers
is written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import plots, relu, results, scaling
from benchmarks.backends import ALL
from benchmarks.problems import OPERATIONS
from benchmarks.summary import label, ratios, summarize, timed

README = Path(__file__).parent / "README.md"
BEGIN = "<!-- results: written by `python -m benchmarks.report` -->"
END = "<!-- end of results -->"
BEGIN_SCALING = "<!-- scaling: written by `python -m benchmarks.report --scaling` -->"
END_SCALING = "<!-- end of scaling -->"
BEGIN_RELU = "<!-- relu: written by `python -m benchmarks.report --relu` -->"
END_RELU = "<!-- end of relu -->"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("results", type=Path, nargs="?", help="a file of benchmarks.run")
    what.add_argument("--scaling", type=Path, nargs="+", help="files of benchmarks.sharding_*")
    what.add_argument("--relu", type=Path, help="a file of benchmarks.relu")
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    if options.scaling:
        section = _scaling(options.scaling, options.readme.parent)
        _replace(options.readme, BEGIN_SCALING, END_SCALING, section)
        return
    if options.relu:
        section = _relu(results.load(options.relu), options.relu, options.readme.parent)
        _replace(options.readme, BEGIN_RELU, END_RELU, section)
        return
    report = results.load(options.results)
    _around(options.readme, BEGIN, END)  # before the figures are drawn in vain
    figures = plots.draw(report, options.results.with_suffix(""))
    write(report, options.results, figures, options.readme)


def write(report: dict[str, Any], source: Path, figures: Iterable[Path], readme: Path) -> None:
    """Replace what is between the README's markers of results."""
    _replace(readme, BEGIN, END, _section(report, source, figures, readme.parent))


def _replace(readme: Path, begin: str, end: str, section: Iterable[str]) -> None:
    before, after = _around(readme, begin, end)
    lines = "\n".join(section).strip("\n")
    readme.write_text(f"{before}{begin}\n\n{lines}\n\n{end}{after}", encoding="utf-8")


def _around(readme: Path, begin: str, end: str) -> tuple[str, str]:
    """Return what is before and after two markers; a ValueError says that one is missing."""
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{readme} must have the lines {begin!r} and {end!r}")
    return before, after


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _scaling(sources: Iterable[Path], folder: Path) -> Iterator[str]:
    for source in sources:
        report = json.loads(source.read_text(encoding="utf-8"))
        framework = "torch" if "torch" in report else "jax"
        yield (
            f"\nFrom [{source.name}]({_relative(source, folder)}), "
            f"{framework} {report[framework]}, {report['device']}, commit {report['commit']}: "
            f"{report['layers']} {report['norm']}, x {report['dtypes'][0]}, weights "
            f"{report['dtypes'][1]}.\n"
        )
        records = sorted(report["measurements"], key=lambda r: r["scaling"], reverse=True)
        yield from _table(list(scaling.HEAD), (row for r in records for row in scaling.table(r)))
        refusals = dict.fromkeys(
            f"{name}: `{r[name]['not_captured'].replace('`', '')}`"
            for r in records
            for name in scaling.CALLS
            if "not_captured" in r[name]
        )
        yield from (f"\nNot captured into a CUDA graph, {refusal}" for refusal in refusals)


def _relu(report: dict[str, Any], source: Path, folder: Path) -> Iterator[str]:
    yield from _origin(report, source, folder)
    yield "\nMicroseconds:\n"
    cells = list(results.by_problem(report["measurements"]))
    yield from _table(list(relu.TIMES), (relu.times(problem, cell) for problem, cell in cells))
    yield (
        "\nError of each output against float64: in the 2-norm, relative to the exact result; and "
        "of the worst element, over the bound of `cupynorm.testing`.\n"
    )
    yield from _table(
        list(relu.ERRORS), (row for problem, cell in cells for row in relu.errors(problem, cell))
    )
    yield from _remarks(report["measurements"])


def _origin(report: dict[str, Any], source: Path, folder: Path) -> Iterator[str]:
    """Yield where the figures come from: the file, the machine and the versions."""
    yield f"From [{source.name}]({_relative(source, folder)}), started {report['started']}."
    if not report.get("complete"):
        yield "\n**This run did not finish; what it did not reach is missing.**"
    yield ""
    facts = _facts(report, report["machine"])
    yield from _table(["", ""], [[name, str(fact)] for name, fact in facts])


def _section(
    report: dict[str, Any], source: Path, figures: Iterable[Path], folder: Path
) -> Iterator[str]:
    yield from _origin(report, source, folder)
    yield "\n### Summary\n"
    yield (
        "Speed of cupynorm over that of the best peer and of the limit: geometric means over the "
        "shapes of the tables below; above 1 is faster.\n"
    )
    yield from _table(
        ["operation", "timed", "to the limit", "to the best peer", "ahead", "worst shape"],
        [
            [
                s.operation,
                timed(s),
                _ratio(s.to_limit),
                _ratio(s.to_peer),
                f"{s.ahead} of {s.compared}",
                ""
                if s.worst is None
                else f"{label(s.worst.problem)}: {_ratio(s.worst.to_peer)} of {s.worst.peer}",
            ]
            for s in summarize(report["measurements"])
        ],
    )
    pngs = [path for path in figures if path.suffix == ".png"]
    for operation in OPERATIONS:
        own = [r for r in report["measurements"] if f"{r['norm']} {r['direction']}" == operation]
        if not own:
            continue
        yield f"\n### {operation}\n"
        stem = operation.replace(" ", "_")
        for path in pngs:
            if path.stem.startswith(stem):
                svg = _relative(path.with_suffix(".svg"), folder)
                yield f"[![{path.stem}]({_relative(path, folder)})]({svg})\n"
        yield "GB/s:\n"
        yield from _speeds(own)
    yield from _remarks(report["measurements"])
    yield from _host(report["host"])
    yield from _first_calls(report["first_calls"])


def _facts(report: dict[str, Any], machine: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "GPU", f"{machine['gpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB"
    yield "driver", machine["driver"]
    yield "CUDA runtime, NVRTC", f"{machine['cuda_runtime']}, {machine['nvrtc']}"
    yield "Python, NumPy, CuPy", ", ".join(machine[k] for k in ("python", "numpy", "cupy"))
    yield "commit", report["commit"]
    yield from report["backends"].items()


def _speeds(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    records = list(records)
    names = [b.name for b in ALL if any(r["backend"] == b.name for r in records)]
    by_ratio = {ratio.problem: ratio for ratio in ratios(records)}
    rows = []
    for problem, cell in results.by_problem(records):
        row = [f"{problem.rows}x{problem.cols}", f"{problem.dtype}, {problem.weight_dtype}"]
        for name in names:
            record = cell.get(name)
            speed = None if record is None else results.gigabytes_per_second(record)
            row.append(f"{speed:.0f}" if speed is not None else record["status"] if record else "")
        ratio = by_ratio.get(problem)
        row += [_ratio(ratio.to_limit), _ratio(ratio.to_peer)] if ratio else ["", ""]
        rows.append(row)
    yield from _table(["MxN", "x, weight", *names, "to the limit", "to the best peer"], rows)


def _remarks(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what was not timed, and what was measured in another way, each under its heading."""
    for heading, lines in (
        ("Not timed, and why", list(_refusals(records))),
        ("Measured otherwise than stated", list(_notes(records))),
    ):
        if lines:
            yield f"\n### {heading}\n"
            yield from lines


def _refusals(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if record["status"] != "ok":
            key = (record["backend"], record["status"], str(record.get("reason")))
            problem = results.problem_of(record)
            shapes.setdefault(key, []).append(
                f"{problem.operation} {problem.rows}x{problem.cols} "
                f"{problem.dtype},{problem.weight_dtype}"
            )
    for (backend, status, why), where in shapes.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        said = why.split(" {")[0].replace("`", "")  # without what a library dumps of itself
        yield f"- {backend}, {status}: {where[0]}{more}: `{said}`"


def _notes(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    notes = {
        (r["backend"], r[key]) for r in records for key in ("note", "not_captured") if r.get(key)
    }
    yield from (f"- {backend}: {note}" for backend, note in sorted(notes))


def _host(records: list[dict[str, Any]]) -> Iterator[str]:
    if records:
        yield "\n### Host time a call, µs\n"
        yield "16 rows of 4096 bfloat16, float32 weight; the time to return, not to finish.\n"
        yield from _pivot(
            records,
            list(OPERATIONS),
            lambda r: r["operation"],
            lambda r: f"{1e6 * r['seconds']['median']:.1f}" if "seconds" in r else "failed",
        )


def _first_calls(records: list[dict[str, Any]]) -> Iterator[str]:
    if records:
        yield "\n### First call of a process, ms\n"
        yield (
            "The same RMSNorm forward pass, in a new process whose GPU is in use already: the "
            "import, and the call with all that it compiles; on an empty disk cache and on a full "
            "one.\n"
        )

        def shown(record: dict[str, Any]) -> str:
            if "first_seconds" not in record:
                return "failed"
            return f"{1e3 * record['import_seconds']:.0f} + {1e3 * record['first_seconds']:.0f}"

        yield from _pivot(records, ["cold", "warm"], lambda r: r["cache"], shown)


def _pivot(
    records: list[dict[str, Any]],
    columns: list[str],
    column: Callable[[dict[str, Any]], str],
    shown: Callable[[dict[str, Any]], str],
) -> Iterator[str]:
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        rows.setdefault(record["backend"], {})[column(record)] = shown(record)
    present = [c for c in columns if any(c in cells for cells in rows.values())]
    table = [[name, *(cells.get(c, "") for c in present)] for name, cells in rows.items()]
    yield from _table(["", *present], table)


def _table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
