"""One norm over several devices by JAX: ``python -m benchmarks.sharding_jax results.json``.

x is split over its rows; the weight is on each device. "weak": so many rows a device, of which n do
n times the work; "strong": so many rows in all. A step is the forward and the backward pass of one
compiled program. Times are those of the wall clock, of programs that queue up; what the devices
exchange in them is listed.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cupynorm.jax
from benchmarks import results
from benchmarks.problems import parse_pair, shape

ROUNDS = 5
ROUND_SECONDS = 0.2

COLLECTIVE = re.compile(
    r"= (\([^)]*\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharding_jax", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--shape", type=shape, default=(32768, 8192), metavar="MxN")
    parser.add_argument("--norm", choices=("rms_norm", "layer_norm"), default="rms_norm")
    parser.add_argument(
        "--dtypes", type=parse_pair, default=("bfloat16", "float32"), metavar="X,WEIGHT"
    )
    parser.add_argument(
        "--devices", nargs="+", type=int, help="how many to use (default: 1, 2, 4, ..., all)"
    )
    return parser.parse_args(arguments)


def counts(available: int) -> list[int]:
    """Return the powers of two up to what there is, and that."""
    return sorted({*(2**i for i in range(available.bit_length())), available})


def collectives(program: Any) -> list[str]:
    """Return what the devices exchange in a compiled program: each operation and what it yields."""
    return [f"{kind} {types}" for types, kind in COLLECTIVE.findall(program.as_text())]


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of a call in a queue of calls: the median of some rounds."""
    jax.block_until_ready(call())
    # Virtual CPU devices share threads, too few for more than one program that exchanges something.
    queues = jax.default_backend() != "cpu"
    calls, times = 1, []
    while len(times) < ROUNDS:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
            if not queues:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        elapsed = time.perf_counter() - start
        if elapsed < ROUND_SECONDS / 2:
            calls = max(2 * calls, int(calls * ROUND_SECONDS / max(elapsed, 1e-6)))
        else:
            times.append(elapsed / calls)
    return statistics.median(times)


def measure(options: argparse.Namespace, scaling: str, count: int) -> dict[str, Any]:
    """Time the forward pass and the step over some devices."""
    rows, cols = options.shape
    rows *= count if scaling == "weak" else 1
    dtype, weight_dtype = options.dtypes
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("rows"))
    whole = NamedSharding(mesh, PartitionSpec())
    norm = getattr(cupynorm.jax, options.norm)

    def arrays() -> tuple[Any, ...]:
        x, dy = (jax.random.normal(key, (rows, cols), dtype) for key in jax.random.split(KEY))
        return x, jnp.ones(cols, weight_dtype), dy

    x, weight, dy = jax.jit(arrays, out_shardings=(split, whole, split))()

    def step(x: Any, weight: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(norm, x, weight)
        return y, *pull_back(dy)

    programs = {
        "forward": (jax.jit(norm).lower(x, weight).compile(), (x, weight)),
        "step": (jax.jit(step).lower(x, weight, dy).compile(), (x, weight, dy)),
    }
    record: dict[str, Any] = {"scaling": scaling, "devices": count, "rows": rows, "cols": cols}
    for name, (program, arguments) in programs.items():
        record[name] = {
            "seconds": seconds(lambda program=program, given=arguments: program(*given)),
            "collectives": collectives(program),
        }
    return record


KEY = jax.random.key(0)


def speedup(record: dict[str, Any], one: dict[str, Any], name: str) -> float:
    """Return how many times the work of one device is done in the same time."""
    work = record["rows"] / one["rows"]
    return work * one[name]["seconds"] / record[name]["seconds"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind,
        "available": jax.device_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": results.commit(),
        "machine": results.machine() if jax.default_backend() != "cpu" else None,
        "norm": options.norm,
        "dtypes": options.dtypes,
        "measurements": [],
    }
    print(
        f"{options.norm}, x {options.dtypes[0]}, weight {options.dtypes[1]}, {device.device_kind}"
    )
    print(f"{'':8}{'devices':>8}{'x':>16}{'forward':>12}{'':>8}{'step':>12}{'':>8}  exchanged")
    for scaling in ("weak", "strong"):
        one = None
        for count in options.devices or counts(jax.device_count()):
            record = measure(options, scaling, count)
            report["measurements"].append(record)
            one = record if one is None else one
            cells = [f"{scaling:8}{count:8}{record['rows']:>9}x{record['cols']:<6}"]
            for name in ("forward", "step"):
                record[name]["speedup"] = speedup(record, one, name)
                cells.append(
                    f"{1e3 * record[name]['seconds']:9.3f} ms{record[name]['speedup']:7.2f}x"
                )
            exchanged = record["forward"]["collectives"] + record["step"]["collectives"]
            print(*cells, "", "; ".join(exchanged) or "nothing", flush=True)
            options.results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
