"""Join the parts of a run that several GPUs of one kind shared.

``python -m benchmarks.join whole.json part.json part.json`` writes whole.json. Each part is a file
of benchmarks.run, from one GPU and with some operations (--operations), so that figures to compare
come from one GPU. The parts share no problem. The versions and sizes of their machines must agree.
The whole took as long as its longest part.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import results

Report = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.join",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("whole", type=Path, metavar="WHOLE", help="the file to write")
    parser.add_argument("parts", type=Path, nargs="+", metavar="PART", help="files to read")
    options = parser.parse_args(arguments)
    if options.whole.exists():
        parser.error(f"{options.whole} exists: name another file")
    for path, count in Counter(options.parts).items():
        if count > 1:
            parser.error(f"{path} must be named once, got {count} times")
        if not path.is_file():
            parser.error(f"there is no file {path}")
    try:
        parts = {str(path): results.load(path, "benchmarks.run") for path in options.parts}
        results.save(join(parts), options.whole)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def join(parts: Mapping[str, Report]) -> Report:
    """Return the whole of parts by name; a ValueError says why they do not fit together."""
    (name, first), *others = parts.items()
    for other_name, other in others:
        here, there = _common(first), _common(other)
        of_one = first["backends"].keys() ^ other["backends"].keys()  # what only one has
        differs = [
            f"{k} {here.get(k)!r} and {there.get(k)!r}"
            for k in here | there
            if k not in of_one and here.get(k) != there.get(k)
        ]
        if differs:
            raise ValueError(f"{name} and {other_name} differ: {'; '.join(differs)}")
    uuids = [part["machine"].get("uuid", "unknown") for part in parts.values()]
    for what, taken in (
        ("GPU", uuids),
        ("problem", (p for part in parts.values() for p in dict.fromkeys(_problems(part)))),
        ("host time", ((r["operation"], r["backend"]) for r in _all(parts, "host"))),
        ("first call", ((r["backend"], r["cache"]) for r in _all(parts, "first_calls"))),
    ):
        (again, times), *_ = Counter(taken).most_common(1) or [(None, 0)]
        if times > 1:
            raise ValueError(f"more than one of {', '.join(parts)} has the {what} {again}")
    return {
        **first,
        "machine": first["machine"] | {"uuid": results.SEPARATOR.join(uuids)},
        "backends": {k: fact for part in parts.values() for k, fact in part["backends"].items()},
        "sessions": [session for part in parts.values() for session in _sessions(part)][1:],
        **{name: _all(parts, name) for name in ("measurements", "host", "first_calls")},
        "elapsed_seconds": max(part.get("elapsed_seconds", 0.0) for part in parts.values()),
        "complete": all(part.get("complete") for part in parts.values()),
    }


def _all(parts: Mapping[str, Report], name: str) -> list[Any]:
    return [record for part in parts.values() for record in part[name]]


def _problems(part: Report) -> Iterable[Any]:
    return map(results.problem_of, part["measurements"])


def _sessions(part: Report) -> list[dict[str, Any]]:
    """Return when and how a run was begun, and each time that it went on."""
    begun = {name: part.get(name) for name in ("started", "arguments")}
    return [begun, *part.get("sessions", ())]


def _common(part: Report) -> dict[str, Any]:
    """Return what parts of one run must share, and the libraries that they measured."""
    what = {"commit": part["commit"], "method of timing": part.get("method")}
    machine = {name: fact for name, fact in part["machine"].items() if name != "uuid"}
    return what | machine | part["backends"]


if __name__ == "__main__":
    main()
