"""How long the first calls of a process wait for compilations.

``python -m benchmarks.first_calls first_calls.json``

A process makes the calls of one width, of bfloat16 with a float32 weight and, for LayerNorm, a
float32 bias: inference, a forward pass for training and a backward pass, each over 1, 4, 16, ...
and 32768 rows. The first process begins with an empty cache. The second one finds what the first
one compiled. This is done without threads (`CUPYNORM_BACKGROUND` is 0) and with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.host import STATES
from cupynorm._background import SWITCH
from cupynorm._environment import gpu_problem

NORMS = ("rms_norm", "layer_norm")
N = 4096
ROWS = (*(4**i for i in range(8)), 32768)
STALL = 0.05  # seconds: a call that takes more waits for a compilation
PROCESS_SECONDS = 120


def calls(norm: str) -> list[dict[str, Any]]:
    """Make the calls; return what each is, and its time."""
    import cupy

    import cupynorm
    from cupynorm._arrays import BFLOAT16

    # Values do not matter, and CuPy need not compile anything for these.
    x = cupy.zeros((ROWS[-1], N), "uint16").view(BFLOAT16)
    weight = cupy.zeros(N, "float32")
    affine = {"weight": weight} if norm == "rms_norm" else {"weight": weight, "bias": weight}
    infer, forward, backward = (
        getattr(cupynorm, norm + suffix) for suffix in ("", "_forward", "_backward")
    )
    bias = None if norm == "rms_norm" else weight
    kept: dict[int, Any] = {}

    def train(m: int) -> None:
        kept[m] = forward(x[:m], **affine)

    def differentiate(m: int) -> None:
        statistics = [s for s in (kept[m].mean, kept[m].rstd) if s is not None]
        backward(x[:m], x[:m], weight, *statistics, bias=bias)

    steps = {"inference": lambda m: infer(x[:m], **affine), "forward": train}
    steps["backward"] = differentiate
    taken = []
    for what, step in steps.items():
        for m in ROWS:
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            step(m)
            cupy.cuda.Device().synchronize()
            taken.append({"call": what, "rows": m, "seconds": time.perf_counter() - start})
    return taken


def measure(norm: str, switch: str) -> list[dict[str, Any]]:
    """Return a record of a process with an empty cache, and of a second one."""
    records = []
    with tempfile.TemporaryDirectory() as cache:
        for state in STATES:
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.first_calls", "--process", norm],
                env=os.environ | {"CUPY_CACHE_DIR": cache, SWITCH: switch},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=PROCESS_SECONDS,
            )
            whole = time.perf_counter() - start
            record = {"norm": norm, "threads": switch != "0", "cache": state}
            made = json.loads(done.stdout.splitlines()[-1])
            records.append(record | {"process_seconds": whole, "calls": made})
    return records


def row(record: dict[str, Any]) -> str:
    """Return a line of the table, in Markdown."""
    seconds = [call["seconds"] for call in record["calls"]]
    stalls = [f"{1e3 * taken:.0f}" for taken in seconds if taken > STALL]
    threads = "with threads" if record["threads"] else "without"
    cells = (
        record["norm"],
        threads,
        record["cache"],
        f"{len(stalls)}",
        " ".join(stalls),
        f"{1e3 * sum(seconds):.0f}",
        f"{record['process_seconds']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_calls", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="the JSON file to write")
    parser.add_argument("--process", choices=NORMS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.process:
        print(json.dumps(calls(options.process)))
        return 0
    if options.results is None or options.results.exists():
        parser.error(f"name a new file, got {options.results}")
    if missing := gpu_problem():
        print(f"There is nothing to time: {missing}.")
        return 1
    report: dict[str, Any] = {
        "commit": results.commit(),
        "machine": results.machine(),
        "cpus": os.cpu_count(),
        "n": N,
        "measurements": [],
    }
    head = ("norm", "compiled", "cache", "stalls", "ms each", "ms of all calls", "s a process")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for norm in NORMS:
        for switch in ("0", "1"):
            for record in measure(norm, switch):
                print(row(record), flush=True)
                report["measurements"].append(record)
                results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
