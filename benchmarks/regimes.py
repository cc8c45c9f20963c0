"""What Nsight Compute sees of the memory: one shape for each way that kernels work on rows.

`python -m benchmarks.regimes benchmarks/results/regimes_h200.json` needs `ncu`, and permission to
read the GPU's counters. Caches are empty before each kernel. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from cupynorm import _bench
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem

BF16 = ("bfloat16", "float32")
REGIMES: tuple[tuple[str, Problem], ...] = (
    ("several rows a warp", Problem("layer_norm", "forward", 1048576, 64, *BF16)),
    ("a row a half warp", Problem("rms_norm", "forward", 32768, 256, *BF16)),
    ("a row a block", Problem("rms_norm", "forward", 32768, 4096, *BF16)),
    ("a row in shared memory", Problem("layer_norm", "forward", 32768, 16384, *BF16)),
    ("a row read twice", Problem("rms_norm", "forward", 4096, 262152, *BF16)),
    ("a row a cluster", Problem("layer_norm", "forward", 16384, 65536, *BF16)),
    ("decoding", Problem("rms_norm", "forward", 64, 8192, "bfloat16", "bfloat16")),
    ("several rows a block", Problem("layer_norm", "backward", 32768, 256, *BF16)),
    ("a row a block", Problem("rms_norm", "backward", 32768, 4096, *BF16)),
    ("a row a cluster", Problem("rms_norm", "backward", 16384, 65536, *BF16)),
    ("rows in strips", Problem("rms_norm", "backward", 32, 262144, "float32", "float32")),
)
METRICS = {  # and the factors of their values
    "gpu__time_duration.sum": ("seconds", 1e-9),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("percent_of_peak", 1),
    "dram__bytes_read.sum": ("bytes_read", 1),
    "dram__bytes_write.sum": ("bytes_written", 1),
}
LAST_OF_BACKWARD = ("reduce_partials", "norm_backward_column_parallel")
HEAD = ("pass", "MxN", "rows", "kernel", "us", "% of the memory's peak", "GB/s")


def launch() -> None:
    """Run each regime once under the profiler, after a call that loads the kernels."""
    import cupy

    for _, problem in REGIMES:
        call = _bench.ours(problem, _bench.inputs(problem, 0, cupy))
        call()
        cupy.cuda.runtime.profilerStart()
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()
        del call
        cupy.get_default_memory_pool().free_all_blocks()


def profile() -> str:
    """Return ncu's output for `launch`, as CSV."""
    command = ["ncu", "--csv", "--print-units", "base", "--profile-from-start", "off"]
    command += ["--clock-control", "none", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "benchmarks.regimes", "--launch"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def parse(printed: str) -> list[dict[str, Any]]:
    """Return a record for each kernel, with the regime it belongs to."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = kernels.setdefault(row["ID"], {"kernel": _short(row["Kernel Name"])})
        name, factor = METRICS[row["Metric Name"]]
        kernel[name] = factor * float(row["Metric Value"].replace(",", ""))
    left = iter(kernels.values())
    records = []
    for regime, problem in REGIMES:
        for kernel in left:
            records.append({"regime": regime, **vars(problem), **kernel})
            if problem.direction == "forward" or kernel["kernel"] in LAST_OF_BACKWARD:
                break
        else:
            raise ValueError(f"ncu must see all kernels of {problem}, got {len(kernels)} in all")
    if next(left, None) is not None:
        raise ValueError(f"ncu must see {len(records)} kernels, got {len(kernels)}")
    return records


def _short(kernel: str) -> str:
    """Return a kernel's name without its type and template arguments."""
    return kernel.partition("<")[0].removeprefix("void ")


def table(records: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each kernel."""
    for r in records:
        moved = r["bytes_read"] + r["bytes_written"]
        yield [
            f"{r['norm']} {r['direction']}",
            f"{r['rows']}x{r['cols']} {r['dtype']},{r['weight_dtype']}",
            r["regime"],
            r["kernel"],
            f"{1e6 * r['seconds']:.1f}",
            f"{r['percent_of_peak']:.1f}",
            f"{1e-9 * moved / r['seconds']:.0f}",
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regimes", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="the JSON file to write")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.results is None and not options.launch:
        parser.error("results: the JSON file to write must be given")
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}.")
        return 1
    if options.launch:
        launch()
        return 0
    report = results.new({}, [])
    report["measurements"] = parse(profile())
    report["complete"] = True
    results.save(report, options.results)
    for row in [list(HEAD), ["---"] * len(HEAD), *table(report["measurements"])]:
        print(f"| {' | '.join(row)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
