"""Write a results file as tables and figures: ``python -m benchmarks.report results.json``.

The tables go into results.md next to the file, or between the markers of the file that --readme
names. The figures go into the folder results next to the file. --headline writes only one table for
each pass, between its own markers. Several GPUs, the clamped ReLU, a residual, weights that vary
from row to row, norms of cupynorm.fuse and quantized outputs have sections of their own. Nothing
between the markers is written by hand. With R=benchmarks/results, the pages are from

    python -m benchmarks.report $R/h200_standard.json --headline benchmarks/README.md
    python -m benchmarks.report $R/h200_standard.json --readme docs/tables.md
    python -m benchmarks.report --residual $R/residual_h200.json --readme benchmarks/README.md
    python -m benchmarks.report --groups $R/groups_h200.json --readme benchmarks/README.md
    python -m benchmarks.report --fused $R/fused_h200.json --readme benchmarks/README.md
    python -m benchmarks.report --quantized $R/quantized_h200.json --readme benchmarks/README.md
    python -m benchmarks.report --relu $R/relu_h200.json --readme benchmarks/README.md
    python -m benchmarks.report --scaling $R/sharding_{torch,jax}_h200.json \\
        --readme benchmarks/README.md
"""

from __future__ import annotations

import argparse
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks import fused, groups, plots, quantized, relu, residual, results, scaling
from benchmarks.backends import ALL, KINDS
from benchmarks.fusions import Benchmark
from benchmarks.host import STATES
from benchmarks.measure import MOST_SAID
from benchmarks.problems import DECODE, OPERATIONS, PAIRS, select
from benchmarks.results import Record
from benchmarks.summary import (
    NAMES,
    SMALL_SECONDS,
    Ratio,
    digits,
    geometric_mean,
    label,
    partial,
    ratios,
    short,
    small,
    summarize,
    timed,
)
from cupynorm._bench import Direction, Problem

BEGIN = "<!-- results: written by `python -m benchmarks.report` -->"
END = "<!-- end of results -->"
BEGIN_HEADLINE = "<!-- headline: written by `python -m benchmarks.report --headline` -->"
END_HEADLINE = "<!-- end of headline -->"
BEGIN_SCALING = "<!-- scaling: written by `python -m benchmarks.report --scaling` -->"
END_SCALING = "<!-- end of scaling -->"
BEGIN_RELU = "<!-- relu: written by `python -m benchmarks.report --relu` -->"
END_RELU = "<!-- end of relu -->"
# Benchmarks of one operation, by the option that takes their file.
FUSIONS = {
    "residual": residual.BENCHMARK,
    "groups": groups.BENCHMARK,
    "fused": fused.BENCHMARK,
    "quantized": quantized.BENCHMARK,
}
STOPPED = "The run was stopped before its end: what it did not reach is missing."
HOST_SPREAD = 1.05  # smaller differences of host times are not shown
# Shown as called and as kernels alone: where the host counts most, and two large ones.
AS_CALLED = (
    *((shape, PAIRS[1]) for shape in DECODE),
    *((shape, PAIRS[0]) for shape in ((32768, 256), (32768, 4096))),
)


def markers(name: str) -> tuple[str, str]:
    """Return what stands before and behind a section of FUSIONS."""
    begin = f"<!-- {name}: written by `python -m benchmarks.report --{name}` -->"
    return begin, f"<!-- end of {name} -->"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("results", type=Path, nargs="?", help="a file of benchmarks.run")
    what.add_argument("--scaling", type=Path, nargs="+", help="files of benchmarks.sharding_*")
    what.add_argument("--relu", type=Path, help="a file of benchmarks.relu")
    for name in FUSIONS:
        what.add_argument(f"--{name}", type=Path, help=f"a file of benchmarks.{name}")
    parser.add_argument(
        "--readme", type=Path, help="what to write into (default: the file's name with .md)"
    )
    parser.add_argument("--headline", type=Path, help="write into this file a table a pass alone")
    options = parser.parse_args(arguments)
    if options.headline and (options.readme or not options.results):
        parser.error("--headline is of a file of benchmarks.run, and takes the place of --readme")
    given = {name: path for name in FUSIONS if (path := getattr(options, name))}
    one = options.relu or next(iter(given.values()), options.results)
    sources = options.scaling or [one]
    readme = options.headline or options.readme or sources[0].with_suffix(".md")
    for source in sources:
        if not source.is_file():
            parser.error(f"there is no file {source}")
    if not readme.parent.is_dir():
        parser.error(f"there is no folder {readme.parent}")
    try:
        if options.scaling:
            reports = [_load_scaling(source) for source in sources]
            begin, end = BEGIN_SCALING, END_SCALING
        elif options.relu:
            report = results.load(options.relu, "benchmarks.relu")
            begin, end = BEGIN_RELU, END_RELU
        elif given:
            ((name, path),) = given.items()
            report = results.load(path, f"benchmarks.{name}")
            begin, end = markers(name)
        else:
            report = results.load(options.results, "benchmarks.run")
            report["measurements"] = _ordered(report["measurements"])
            begin, end = (BEGIN_HEADLINE, END_HEADLINE) if options.headline else (BEGIN, END)
        before, after = _around(readme, begin, end)
    except ValueError as error:
        parser.error(str(error))
    if options.scaling:
        section = _scaling(zip(sources, reports, strict=True), readme.parent)
    elif options.relu:
        section = _relu(report, options.relu, readme.parent)
    elif given:
        section = _fusion(FUSIONS[name], report, path, readme.parent)
    elif options.headline:
        section = _headline(report, options.results, readme.parent)
    else:
        figures = plots.draw(report, options.results.with_suffix(""))
        section = _section(report, options.results, figures, readme.parent)
    lines = "\n".join(section).strip("\n")
    readme.write_text(f"{before}{begin}\n\n{lines}\n\n{end}{after}", encoding="utf-8")
    print(f"written into {readme}")


def _around(readme: Path, begin: str, end: str) -> tuple[str, str]:
    """Return the text before and after two markers, in a file or for a new one.

    A ValueError says that one is missing.
    """
    if not readme.exists():
        return "# Benchmark\n\n", "\n"
    before, found, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{readme} must have the lines {begin!r} and {end!r}")
    return before, after


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _load_scaling(path: Path) -> dict[str, Any]:
    expected = f"{path} must be a file of benchmarks.sharding_torch or benchmarks.sharding_jax"
    report = results.read(path, expected)
    if not {"layers", "measurements"} <= report.keys():
        raise ValueError(f"{expected}, got one of another kind")
    return report


def _scaling(reports: Iterable[tuple[Path, dict[str, Any]]], folder: Path) -> Iterator[str]:
    for source, report in reports:
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
            f"{name}: `{_said(r[name]['not_captured']).replace('`', '')}`"
            for r in records
            for name in scaling.CALLS
            if "not_captured" in r[name]
        )
        yield from (f"\nNot captured into a CUDA graph, {refusal}" for refusal in refusals)


def _relu(report: dict[str, Any], source: Path, folder: Path) -> Iterator[str]:
    yield from _origin(report, source, folder)
    yield ""
    yield from _versions(report)
    yield "\nMicroseconds:\n"
    cells = list(results.by_problem(report["measurements"]))
    yield from _table(list(relu.TIMES), (relu.times(problem, cell) for problem, cell in cells))
    if not report.get("complete"):
        yield f"\n{STOPPED}"
    yield (
        "\nError of each output against float64: in the 2-norm, relative to the exact result; and "
        "of the worst element, over the bound of `cupynorm.testing`.\n"
    )
    yield from _table(
        list(relu.ERRORS), (row for problem, cell in cells for row in relu.errors(problem, cell))
    )
    yield from _remarks(report["measurements"])


def _fusion(
    benchmark: Benchmark, report: dict[str, Any], source: Path, folder: Path
) -> Iterator[str]:
    yield from _origin(report, source, folder)
    yield ""
    yield from _versions(report)
    yield "\nMicroseconds:\n"
    cells = results.by_problem(report["measurements"])
    yield from _table(benchmark.head, (benchmark.row(cell) for _, cell in cells))
    if not report.get("complete"):
        yield f"\n{STOPPED}"
    text, *heads = benchmark.errors
    yield f"\n{text}\n"
    yield from _table(["library", "output", *heads], _errors(report["measurements"]))
    yield from _remarks(report["measurements"])


def _errors(records: Iterable[Record]) -> Iterator[list[str]]:
    """Yield the largest errors of each library's outputs. One that is not finite is the largest."""
    largest: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for name, found in record.get("errors", {}).items():
            before = largest.setdefault((record["backend"], name), [0.0, 0.0])
            before[:] = [
                max(one, math.inf if other is None else other)
                for one, other in zip(before, found, strict=True)
            ]
    for (library, name), (relative, over_bound) in largest.items():
        yield [library, name, f"{relative:.2e}", f"{over_bound:.3g}"]


def _origin(report: dict[str, Any], source: Path, folder: Path) -> Iterator[str]:
    """Yield where the figures come from."""
    yield (
        f"From [{source.name}]({_relative(source, folder)}), {report['machine']['gpu']}, commit "
        f"{short(report['commit'])}, started {report['started']}{_resumed(report)}."
    )


def _resumed(report: dict[str, Any]) -> str:
    """Say how often a run went on, or on how many GPUs."""
    gpus = report["machine"].get("uuid", "").split(results.SEPARATOR)
    if len(gpus) > 1:
        return f", on {len(gpus)} GPUs of this kind, each problem on one of them"
    times = len(report.get("sessions", ()))
    return f", resumed {times} time{'s' * (times > 1)} on the same GPU" if times else ""


def _section(
    report: dict[str, Any], source: Path, figures: Sequence[Path], folder: Path
) -> Iterator[str]:
    measured = report["measurements"]
    yield from _origin(report, source, folder)
    yield "\n### Summary\n"
    yield (
        "Speed of cupynorm over that of the best peer and of the limit: geometric means over the "
        "shapes of the tables below; above 1 is faster. By the kernels alone, and by calls as "
        "users make them, on the shapes with both; JAX, whose calls no event brackets, is not "
        "among these. `*`: of a shape that some peer was not measured on. `†`: the best peer is "
        "JAX, whose time lacks what is between its kernels. The last column names the peers that "
        "have no time on some of the shapes, and on how many they have one. Of a limit, `c` says "
        "that its call counts, `g` its replay in a CUDA graph.\n"
    )
    yield from _table(
        [
            *("operation", "timed", "to the limit", "to the best peer", "ahead", "worst shape"),
            *("as called, to the best peer", "ahead", "peers on fewer shapes"),
        ],
        [
            [
                s.operation,
                timed(s),
                _ratio(s.to_limit),
                _ratio(s.to_peer, "*" if s.incomplete else ""),
                f"{s.ahead} of {s.compared}",
                ""
                if s.worst is None
                else f"{label(s.worst.problem)}: {_to_peer(s.worst)} of {s.worst.peer}",
                _ratio(s.as_called, "*" if s.incomplete else ""),
                f"{s.ahead_as_called} of {s.compared_as_called}",
                partial(s),
            ]
            for s in summarize(measured)
        ],
    )
    yield from _unreached(report)
    found = {ratio.problem: ratio for ratio in ratios(measured)}
    for operation in OPERATIONS:
        own = [r for r in measured if f"{r['norm']} {r['direction']}" == operation]
        if not own:
            continue
        yield f"\n### {operation}"
        stem = operation.replace(" ", "_")
        for path in figures:
            if path.stem.startswith(stem):
                yield f"\n![{path.stem}]({_relative(path, folder)})"
        yield from _speeds(own, found)
        yield from _as_called(own)
    yield from _remarks(measured)
    yield from _host(report)
    yield from _first_calls(report)
    yield "\n### Versions\n"
    yield from _versions(report)


def _ordered(records: Iterable[Record]) -> list[Record]:
    """Return them in the order of the standard set, in whatever order measured; others follow."""
    places = {problem: place for place, problem in enumerate(select("standard"))}
    return sorted(records, key=lambda r: places.get(results.problem_of(r), len(places)))


def _unreached(report: dict[str, Any]) -> Iterator[str]:
    """Yield on one line what is missing: the backends that were not measured on every problem."""
    cells = [cell for _, cell in results.by_problem(report["measurements"])]
    counts = {
        name: sum(name in cell for cell in cells)
        for name, fact in report["backends"].items()
        if not fact.startswith("missing")
    }
    # A face is measured only where asked for.
    counts = {name: count for name, count in counts.items() if count or KINDS.get(name) != "face"}
    fewer = [f"{name} on {count}" for name, count in counts.items() if count < len(cells)]
    if fewer:
        yield f"\nMeasured on fewer than the {len(cells)} problems: {', '.join(fewer)}."
    elif not report.get("complete"):
        yield f"\n{STOPPED}"


def _headline(report: dict[str, Any], source: Path, folder: Path) -> Iterator[str]:
    """Yield a table a pass: decoding and the rest, to the limit, the best peer and each peer."""
    measured = report["measurements"]
    peers = [b.name for b in ALL if b.kind == "peer"]
    peers = [name for name in peers if any(r["backend"] == name for r in measured)]
    yield from _origin(report, source, folder)
    groups = {
        "other shapes": [r for r in measured if (r["rows"], r["cols"]) not in DECODE],
        "decoding": [r for r in measured if (r["rows"], r["cols"]) in DECODE],
    }
    for direction in get_args(Direction):
        rows = [
            [
                f"{NAMES[s.operation.split()[0]]}, {group}"
                + (f", {timed(s)}" if s.missing else ""),
                _ratio(s.to_limit),
                _ratio(s.to_peer, "*" if s.incomplete else ""),
                f"{s.ahead} of {s.compared}",
                ""
                if s.worst is None
                else f"{_to_peer(s.worst)} of {s.worst.peer}, {label(s.worst.problem)}",
                *_to_each(records, s.operation, peers),
            ]
            for group, records in groups.items()
            for s in summarize(records)
            if s.operation.endswith(direction)
        ]
        if rows:
            yield f"\n**{direction.capitalize()}**\n"
            head = ("", "to the limit", "to the best peer", "ahead at", "worst shape")
            yield from _table([*head, *(f"to {name}" for name in peers)], rows)
    yield from _unreached(report)


def _to_each(records: Iterable[Record], operation: str, peers: list[str]) -> Iterator[str]:
    """Yield the geometric mean of the speed over each peer's, and of how many shapes."""
    cells = [cell for p, cell in results.by_problem(records) if p.operation == operation]
    for name in peers:
        pairs = [
            [results.seconds(cell[backend]) for backend in (name, "cupynorm") if backend in cell]
            for cell in cells
        ]
        values = [pair[0] / pair[1] for pair in pairs if len(pair) == 2 and None not in pair]
        count = f" ({len(values)})" * (0 < len(values) < len(cells))
        yield _ratio(geometric_mean(values)) + count


def _versions(report: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the machine and of the versions."""
    machine = report["machine"]
    yield from _table(
        ["", ""],
        [
            ["GPU", f"{machine['gpu']}, {machine['memory_bytes'] / 2**30:.0f} GiB"],
            ["driver", machine["driver"]],
            ["CUDA runtime, NVRTC", f"{machine['cuda_runtime']}, {machine['nvrtc']}"],
            ["Python, NumPy, CuPy", ", ".join(machine[k] for k in ("python", "numpy", "cupy"))],
            ["commit", short(report["commit"])],
            *([name, fact] for name, fact in report["backends"].items()),
        ],
    )


def _speeds(records: Iterable[Record], found: dict[Problem, Ratio]) -> Iterator[str]:
    """Yield a table of GB/s, and one of the times of the small problems."""
    cells = list(results.by_problem(records))
    for heading, is_small, shown in (
        ("GB/s", False, _gigabytes_per_second),
        (f"µs, where the limit takes less than {1e6 * SMALL_SECONDS:.0f}", True, _us),
    ):
        chosen = [(problem, cell) for problem, cell in cells if small(cell) == is_small]
        if not chosen:
            continue
        yield f"\n{heading}:\n"
        names = [b.name for b in ALL if any(b.name in cell for _, cell in chosen)]
        rows = []
        for problem, cell in chosen:
            row = [*_stated(problem)]
            row += [_shown(cell[name], shown) if name in cell else "" for name in names]
            ratio = found.get(problem)
            row += [_ratio(ratio.to_limit), _to_peer(ratio)] if ratio else ["", ""]
            rows.append(row)
        yield from _table(["MxN", "x, weight", *names, "to the limit", "to the best peer"], rows)


def _stated(problem: Problem) -> tuple[str, str]:
    return f"{problem.rows}x{problem.cols}", f"{problem.dtype}, {problem.weight_dtype}"


def _gigabytes_per_second(record: Record, seconds: float) -> str:
    return f"{1e-9 * results.problem_of(record).bytes / seconds:.0f}"


def _us(record: Record, seconds: float) -> str:
    return digits(1e6 * seconds)


def _shown(record: Record, shown: Callable[[Record, float], str]) -> str:
    """Return the figure, or what happened instead. A limit's says which of its times it is."""
    seconds = results.seconds(record)
    if seconds is None:
        return str(record["status"])
    called = results.counting(record) is record["times"].get("call")
    mark = (" c" if called else " g") if KINDS[record["backend"]] == "limit" else ""
    return shown(record, seconds) + mark


def _as_called(records: Iterable[Record]) -> Iterator[str]:
    """Yield a table of the call against its kernels alone, for problems timed as both."""
    chosen = [
        (problem, {name: record["times"] for name, record in cell.items() if _both(record)})
        for problem, cell in results.by_problem(records)
        if ((problem.rows, problem.cols), (problem.dtype, problem.weight_dtype)) in AS_CALLED
    ]
    names = [b.name for b in ALL if any(b.name in times for _, times in chosen)]
    if names:
        yield "\nµs of the call as a user makes it / of its kernels alone:\n"
        yield from _table(
            ["MxN", "x, weight", *names],
            (
                [
                    *_stated(problem),
                    *(
                        " / ".join(digits(1e6 * times[n][t]["median"]) for t in ("call", "kernels"))
                        if n in times
                        else ""
                        for n in names
                    ),
                ]
                for problem, times in chosen
            ),
        )


def _both(record: Record) -> bool:
    times = record.get("times", {}) if record["status"] == "ok" else {}
    return {"call", "kernels"} <= times.keys() and KINDS[record["backend"]] != "limit"


def _remarks(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what was not timed, and what was measured in another way, each under a heading."""
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
        yield f"- {backend}, {status}: {where[0]}{more}: `{_said(why).replace('`', '')}`"


def _notes(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    notes = {
        (r["backend"], r[key]) for r in records for key in ("note", "not_captured") if r.get(key)
    }
    yield from (f"- {backend}: {_said(note)}" for backend, note in sorted(notes))


def _said(why: str) -> str:
    """Return a reason without a library's dumps; a mark shows each cut.

    A reason that `measure.reason` cut is longer than MOST_SAID, by the error's type. So it is cut
    again.
    """
    said = re.sub(r" (?:\{|Traceback ).*", " …", why)
    return textwrap.shorten(said, MOST_SAID, placeholder=" …")


def _host(report: dict[str, Any]) -> Iterator[str]:
    records = report["host"]
    if records:
        yield "\n### Host time a call, µs\n"
        yield (
            "16 rows of 4096 bfloat16, float32 weight; the time to return, not to finish: the "
            "median of three rounds, and where they differ by more than 5% the lowest and the "
            f"highest.{_drift(records)}\n"
        )

        def shown(record: dict[str, Any]) -> str:
            if "seconds" not in record:
                return "failed"
            median, low, high = (1e6 * record["seconds"][k] for k in ("median", "low", "high"))
            return f"{median:.1f}" + (
                f" ({low:.1f} to {high:.1f})" if high > HOST_SPREAD * low else ""
            )

        yield from _pivot(records, list(OPERATIONS), lambda r: r["operation"], shown)
        yield from _without(report, records)


def _drift(records: Iterable[dict[str, Any]]) -> str:
    """Return what the limits say of the host: their call is the same for both norms."""
    same: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if KINDS.get(record["backend"]) == "limit" and "seconds" in record:
            direction = record["operation"].split()[1]
            same.setdefault((record["backend"], direction), []).append(record["seconds"]["median"])
    most = max((max(times) / min(times) for times in same.values()), default=1.0)
    if most <= HOST_SPREAD:
        return ""
    return (
        " The host drifts by more than rounds in a row show: a limit's call is the same for both "
        f"norms, and its medians differ by up to {100 * (most - 1):.0f}%; a lesser difference "
        "between two cells says little."
    )


def _first_calls(report: dict[str, Any]) -> Iterator[str]:
    records = report["first_calls"]
    if records:
        yield "\n### First call of a process, ms\n"
        yield (
            "The same RMSNorm forward pass, in a new process: from its start until all is imported "
            "and the GPU in use, and the call with all that it compiles; on an empty disk cache "
            "and on a full one. Each was measured once.\n"
        )

        def shown(record: dict[str, Any]) -> str:
            if "first_seconds" not in record:
                return "failed"
            return f"{1e3 * record['import_seconds']:.0f} + {1e3 * record['first_seconds']:.0f}"

        yield from _pivot(records, list(STATES), lambda r: r["cache"], shown)
        yield from _without(report, records)


def _without(report: dict[str, Any], records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield which backends for users were there, but are not in a table."""
    measured = {record["backend"] for record in records}
    missing = [
        b.name
        for b in ALL
        if not (b.kind == "limit" or b.emulated)
        and b.name not in measured
        and not report["backends"].get(b.name, "missing").startswith("missing")
    ]
    if missing:
        yield f"\nNot measured: {', '.join(missing)}."


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


def _ratio(value: float | None, marks: str = "") -> str:
    return "" if value is None else f"{value:.2f}{marks}"


def _to_peer(ratio: Ratio) -> str:
    return _ratio(ratio.to_peer, "*" * bool(ratio.unmeasured) + "†" * (ratio.peer == "JAX"))


if __name__ == "__main__":
    main()
