"""Join runs on several GPUs of one machine: ``python -m benchmarks.join all.json a.json b.json``.

Each problem must be in one of the files alone, so that what is compared is of one GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join", description=__doc__)
    parser.add_argument("joined", type=Path, help="the file to write")
    parser.add_argument("results", type=Path, nargs="+", help="files of benchmarks.run")
    options = parser.parse_args(arguments)
    if options.joined.exists():
        parser.error(f"{options.joined} exists: name another file")
    try:
        reports = [results.load(path, "benchmarks.run") for path in options.results]
        results.save(join(reports), options.joined)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def join(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one file's contents; a ValueError says why they do not belong together."""
    first, *others = map(_common, reports)
    for other in others:
        differs = sorted(k for k in first | other if first.get(k) != other.get(k))
        if differs:
            raise ValueError(f"the files are of another commit or machine: {', '.join(differs)}")
    problems = [{results.problem_of(r) for r in report["measurements"]} for report in reports]
    if len(set().union(*problems)) < sum(map(len, problems)):
        raise ValueError("a problem is in more than one of the files")
    return {
        **reports[0],
        "machine": {
            **reports[0]["machine"],
            "uuid": results.SEPARATOR.join(report["machine"]["uuid"] for report in reports),
        },
        "backends": {k: fact for report in reports for k, fact in report["backends"].items()},
        "sessions": [session for report in reports for session in _sessions(report)][1:],
        **{
            name: [record for report in reports for record in report[name]]
            for name in ("measurements", "host", "first_calls")
        },
        "elapsed_seconds": max(report.get("elapsed_seconds", 0.0) for report in reports),
        "complete": all(report.get("complete") for report in reports),
    }


def _sessions(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return when and how a run was begun, and each time that it went on."""
    begun = {name: report[name] for name in ("started", "arguments")}
    return [begun, *report.get("sessions", ())]


def _common(report: dict[str, Any]) -> dict[str, Any]:
    """Return what runs on GPUs of one machine must have in common."""
    what = {"commit": report["commit"], "method of timing": report.get("method")}
    return what | {name: fact for name, fact in report["machine"].items() if name != "uuid"}


if __name__ == "__main__":
    main()
