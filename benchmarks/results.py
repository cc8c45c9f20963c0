"""The results file: what was measured, on what, and how it is read back."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.backends import KINDS
from cupynorm._bench import Problem

FORMAT = 2  # a table of records, not a list
# The method of measuring times. It counts up when older files are no longer comparable. 1, not
# named in older files: the flush of the L2 left lines that were loaded with evict_last. 2: it
# displaces those too. 3: JAX is charged for its launch as cupynorm's kernel is, not as a kernel of
# one number is. 4: at most four runs are queued, and problems of up to an eighth of the L2 have
# eight sets of arrays, not two. 5: they have 50.
METHOD = 5
SEPARATOR = " and "  # of the GPUs of a file whose parts were joined
ROOT = Path(__file__).resolve().parent.parent

Record = dict[str, Any]


def new(backends: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    """Return a results file without results."""
    return {
        "format": FORMAT,
        "method": METHOD,
        **session(arguments),
        "commit": commit(),
        "machine": machine(),
        "backends": backends,
        "measurements": [],
        "host": [],
        "first_calls": [],
    }


def session(arguments: list[str]) -> dict[str, Any]:
    """Return when a run or its resumption was started, and with which arguments."""
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": [Path(argument).name for argument in arguments],  # no directories
    }


def resume(results: dict[str, Any], arguments: list[str]) -> None:
    """Add a session to a results file, if it is of this commit and machine.

    A file that was never resumed, or is older than sessions, has none.
    """
    here = {"commit": commit(), **machine()}
    there = {"commit": results["commit"], **results["machine"]}
    changed = [
        f"{name} {there.get(name, 'unknown')!r}, now {here.get(name, 'unknown')!r}"
        for name in here | there
        if there.get(name) != here.get(name)
    ]
    if changed:
        raise ValueError(f"the file is of another commit or machine: {'; '.join(changed)}")
    results.setdefault("sessions", []).append(session(arguments))
    results["complete"] = False  # until it is again, and not if it is killed


def machine() -> dict[str, Any]:
    """Name the machine."""
    import cupy
    import numpy as np

    runtime = cupy.cuda.runtime
    device = cupy.cuda.Device()
    properties = runtime.getDeviceProperties(device.id)
    return {
        "gpu": properties["name"].decode(),
        "uuid": properties["uuid"].hex()[:8],  # the start only: CuPy ends it at a zero byte
        "memory_bytes": int(properties["totalGlobalMem"]),
        "l2_bytes": int(device.attributes["L2CacheSize"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "compute_capability": device.compute_capability,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit() -> str:
    """Return the measured commit. For a copy without its history it is in $COMMIT."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    sources = ("cupynorm", "kernels", "benchmarks/*.py")  # of any depth
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *sources)
    return os.environ.get("COMMIT") or (found or "unknown") + (" and changes" if changed else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else ""


def save(results: dict[str, Any], path: Path) -> None:
    """Write a results file, whole or not at all; floats of six digits.

    A list of records becomes a table, an object with columns and rows. A value that is None is not
    kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = []
    for name, value in _rounded(results).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            columns, rows = _table(value)
            lines = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
            text = f'{{"columns": {json.dumps(columns)}, "rows": [\n{lines}\n ]}}'
        else:
            text = json.dumps(value)
        fields.append(f" {json.dumps(name)}: {text}")
    partial = path.with_suffix(".partial")
    partial.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    partial.replace(path)


def _table(records: list[Record]) -> tuple[list[tuple[str, ...]], list[list[Any]]]:
    """Return columns and rows. A column is the names that lead to a value within a record."""
    rows = [dict(_values(record)) for record in records]
    columns = list(dict.fromkeys(place for row in rows for place in row))
    return columns, [[row.get(place) for place in columns] for row in rows]


def _values(record: Record, within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value of a record and of those within it, after the names that lead to it."""
    for name, value in record.items():
        if isinstance(value, dict) and value:
            yield from _values(value, (*within, name))
        elif value is not None:
            yield (*within, name), value


def _records(table: Any) -> Any:
    """Return the records of a table, or anything else as it is."""
    if not isinstance(table, dict) or table.keys() != {"columns", "rows"}:
        return table
    records: list[Record] = []
    for row in table["rows"]:
        records.append({})
        for (*within, name), value in zip(table["columns"], row, strict=True):
            if value is not None:
                place = records[-1]
                for outer in within:
                    place = place.setdefault(outer, {})
                place[name] = value
    return records


def _rounded(value: Any) -> Any:
    """Return a value for JSON, with floats of six digits: no clock here tells more."""
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load(path: Path, module: str | None = None) -> dict[str, Any]:
    """Read a results file, by `module` if one is given.

    A ValueError says that it is none.
    """
    expected = f"{path} must be a file of {module or 'benchmarks'}"
    results = read(path, expected)
    if results.get("format") != FORMAT:
        raise ValueError(f"{expected}, of format {FORMAT}, got one of {results.get('format')!r}")
    missing = {"machine", "backends", "measurements", "host", "first_calls"} - results.keys()
    if missing:
        raise ValueError(f"{expected}, got one without {', '.join(sorted(missing))}")
    found = _written_by(results)
    if module not in (None, found):
        raise ValueError(f"{expected}, got one of {found}")
    return results


def read(path: Path, expected: str) -> dict[str, Any]:
    """Read what `save` wrote; a ValueError says what was expected and what is there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError, too
        raise ValueError(f"{expected}, got no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{expected}, an object, got JSON of a {type(found).__name__}")
    return {name: _records(value) for name, value in found.items()}


def is_whole(report: dict[str, Any]) -> bool:
    """Tell whether each present library was measured on each problem that any was.

    The faces do not count. They run cupynorm's kernels, on as many problems as one likes.
    """
    done = {(problem_of(r), r["backend"]) for r in report["measurements"]}
    there = [
        name
        for name, fact in report["backends"].items()
        if not fact.startswith("missing") and KINDS.get(name) != "face"
    ]
    return done >= {(problem, name) for problem, _ in done for name in there}


def _written_by(results: dict[str, Any]) -> str:
    """Name the module that wrote a file, by its records. The file itself does not say."""
    names = {record.get("backend") for record in results["measurements"]}
    if None in names:
        return "benchmarks.regimes"
    if "cupynorm, torch" in names:
        return "benchmarks.quantized"
    kinds = [record for record in results["measurements"] if "kind" in record]
    if kinds:
        return "benchmarks.groups" if "shape" in kinds[0] else "benchmarks.fused"
    if "torch add, cupynorm" in names:
        return "benchmarks.residual"
    return "benchmarks.relu" if names & {"plain", "relu"} else "benchmarks.run"


def problem_of(record: Record) -> Problem:
    """Return the problem of a record."""
    return Problem(**{name: record[name] for name in Problem.__dataclass_fields__})


def seconds(record: Record, *, called: bool = False) -> float | None:
    """Return a record's time: that of the timing that counts, or of its call, if it has one."""
    if called:
        timing = record.get("times", {}).get("call") if record["status"] == "ok" else None
    else:
        timing = counting(record)
    return None if timing is None else timing["median"]


def counting(record: Record) -> Record | None:
    """Return the timing that counts: of the kernels alone, or else of the call or a queue of calls.

    For a limit it is the shorter of the two: from 512 MiB on, a graph copies at two thirds of the
    speed.
    """
    times = record.get("times")
    if record["status"] != "ok" or not times:
        return None
    if KINDS.get(record["backend"]) == "limit":
        return min(times.values(), key=lambda timing: timing["median"])
    timing: Record = next(times[name] for name in ("kernels", "call", "queue") if name in times)
    return timing


def gigabytes_per_second(record: Record) -> float | None:
    """Return the speed of a record."""
    time = seconds(record)
    return None if time is None else 1e-9 * problem_of(record).bytes / time


def by_problem(records: Iterable[Record]) -> Iterator[tuple[Problem, dict[str, Record]]]:
    """Yield each problem with its records by backend, in the order measured.

    A problem with a limit only, which a run did not get to, is left out.
    """
    # Some benchmarks have several kinds of one norm and size.
    groups: dict[tuple[Problem, Any], dict[str, Record]] = {}
    for record in records:
        key = problem_of(record), record.get("kind")
        groups.setdefault(key, {})[record["backend"]] = record
    for (problem, _), cell in groups.items():
        if any(KINDS.get(name) != "limit" for name in cell):
            yield problem, cell


def of_kind(cell: dict[str, Record], kind: str, *, called: bool = False) -> dict[str, float]:
    """Return the times of the backends of a kind that have one, or those of their calls."""
    times = {
        name: seconds(record, called=called)
        for name, record in cell.items()
        if KINDS.get(name) == kind
    }
    return {name: time for name, time in times.items() if time is not None}
