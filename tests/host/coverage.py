"""Which lines of `kernels/` ran, over all instantiations. gcov counts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from host.build import Build

__all__ = ["coverage"]

FILES_A_CALL = 16


def line_counts(build: Build) -> dict[str, dict[int, int]]:
    """Return how often each line ran, by file and number, in a build that counts lines."""
    build.write_counts()
    assert build.counts is not None
    files = sorted(build.counts.glob("*.gcda"))
    calls = [files[i : i + FILES_A_CALL] for i in range(0, len(files), FILES_A_CALL)]
    counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for report in pool.map(_gcov, calls):
            for line in report.splitlines():
                for file in json.loads(line)["files"]:
                    path = Path(file["file"])
                    if path.parent == build.directory and path.suffix in (".cu", ".cuh"):
                        for entry in file["lines"]:
                            counts[path.name][entry["line_number"]] += entry["count"]
    return counts


# Statements that do nothing at run time, and openings of such scopes.
DECLARATION = re.compile(r"(constexpr|static|static_assert|struct|template|using)\b")
DECLARATIVE_SCOPE = re.compile(r"\bstruct\b|\bstatic constexpr\b")


def statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of every statement of a source that does something.

    They are read from the text, so a template that nothing instantiates is not overlooked.
    """
    first, statement, scopes = 0, "", [False]
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("//")[0].strip()
        if not line or line.startswith("#"):
            continue
        first, statement = (first, f"{statement} {line}") if statement else (number, line)
        executed = line.endswith(";") and re.search(r"[=(+]", statement)
        if executed and not DECLARATION.match(statement) and not scopes[-1]:
            yield first, number
        for brace in re.findall(r"[{}]", line):
            if brace == "{":
                scopes.append(bool(DECLARATIVE_SCOPE.search(statement)))
            else:
                scopes.pop()
        if line.endswith((";", "{", "}", ":")):
            statement = ""


def coverage(build: Build) -> tuple[int, list[str]]:
    """Return how many statements `kernels/` has, and place and text of those that never ran."""
    counts, total, missed = line_counts(build), 0, []
    for path in sorted(build.directory.glob("*.cu*")):
        if path.name == "device.cuh":
            continue
        text = path.read_text(encoding="utf-8")
        for first, last in statements(text):
            total += 1
            if not any(counts[path.name][line] for line in range(first, last + 1)):
                missed.append(f"{path.name}:{first}: {text.splitlines()[first - 1].strip()}")
    return total, missed


def _gcov(files: list[Path]) -> str:
    command = ["gcov", "--json-format", "--stdout", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
