"""What `sharding_torch` and `sharding_jax` share: options, speed-ups and the table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.problems import parse_pair, shape

CALLS = ("forward", "step")
MODES = {"seconds": "as called", "graph_seconds": "CUDA graph"}
HEAD = ("scaling", "devices", "x", "", "forward, ms", "", "step, ms", "", "exchanged")


def parse(module: str, description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--shape", type=shape, default=(32768, 8192), metavar="MxN")
    parser.add_argument("--norm", choices=("rms_norm", "layer_norm"), default="rms_norm")
    parser.add_argument("--layers", type=int, default=4, help="norms in a row (default: 4)")
    parser.add_argument(
        "--dtypes", type=parse_pair, default=("bfloat16", "float32"), metavar="X,WEIGHT"
    )
    parser.add_argument(
        "--devices", nargs="+", type=int, help="how many to use (default: 1, 2, 4, ..., all)"
    )
    options = parser.parse_args(arguments)
    if options.layers < 1:
        parser.error(f"--layers must be at least 1, got {options.layers}")
    if options.devices and min(options.devices) < 1:
        parser.error(f"--devices must be at least 1, got {min(options.devices)}")
    return options


def counts(available: int) -> list[int]:
    """Return the powers of two up to the number there is, and that."""
    return sorted({*(2**i for i in range(available.bit_length())), available})


def add_speedups(record: dict[str, Any], one: dict[str, Any]) -> None:
    """Add how many times the work of the record `one` is done in the same time."""
    work = record["rows"] / one["rows"]
    for name in CALLS:
        for mode in MODES:
            if mode in record[name]:
                before, now = one[name][mode], record[name][mode]
                record[name][mode.replace("seconds", "speedup")] = (
                    work * before / now if before and now else None
                )


def table(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of a record under HEAD: a row as called, and one of the graphs if any."""
    exchanged = [f"{what} in {name}" for name in CALLS for what in record[name]["collectives"]]
    for mode, label in MODES.items():
        if any(record[name].get(mode) for name in CALLS):
            x = f"{record['rows']}x{record['cols']}"
            cells = [record["scaling"], str(record["devices"]), x, label]
            for name in CALLS:
                time = record[name].get(mode)
                speedup = record[name].get(mode.replace("seconds", "speedup"))
                cells += [
                    "" if time is None else f"{1e3 * time:.3f}",
                    "" if speedup is None else f"{speedup:.2f}x",
                ]
            yield [*cells, "; ".join(exchanged) or "nothing"]


def line(cells: Sequence[str]) -> str:
    """Return a row of the table as a line to print."""
    *columns, exchanged = cells
    widths = (8, 8, 14, 11, 12, 7, 12, 7)
    return "".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)) + exchanged
