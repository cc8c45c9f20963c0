"""A stack of norms over several devices by JAX.

``python -m benchmarks.sharding_jax benchmarks/results/sharding_jax_h200.json``

x is split over its rows. The weights are on each device. "weak": so many rows a device, and n
devices do n times the work. "strong": so many rows in all. It is a stack because a network has one:
y of a norm is x of the next, and each has its own weight. A step is the forward and the backward
pass to x and to all weights, in one compiled program. XLA may sum a gradient over the devices while
others are computed, or sum all at once. The stack shares one dispatch by the host to all devices. A
single norm would be charged with both. XLA is told to replay a program of any size from a command
buffer. By default it does so for five operations or more, as a network has.

Times are of the whole stack, by the wall clock, with programs that queue up. The devices' exchanges
in them are listed.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cupynorm.jax
from benchmarks import results, scaling

ROUNDS = 5
ROUND_SECONDS = 0.2

COLLECTIVE = re.compile(
    r"= (\([^)]*\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
LAYOUT = re.compile(r"\{[^}]*\}")
COMPILER_OPTIONS = {"xla_gpu_graph_min_graph_size": 1}


def collectives(program: Any) -> list[str]:
    """Return the devices' exchanges in a compiled program: each operation and its result."""
    found = COLLECTIVE.findall(program.as_text())
    return [f"{kind} {LAYOUT.sub('', types)}" for types, kind in found]


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of a call in a queue of calls: the median of some rounds."""
    jax.block_until_ready(call())
    # Virtual CPU devices share threads, too few for several programs with exchanges. Their time
    # says nothing, so one call is a round.
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
        if queues and elapsed < ROUND_SECONDS / 2:
            calls = max(2 * calls, int(calls * ROUND_SECONDS / max(elapsed, 1e-6)))
        else:
            times.append(elapsed / calls)
    return statistics.median(times)


def measure(options: argparse.Namespace, kind: str, count: int) -> dict[str, Any]:
    """Time the forward pass and the step over some devices."""
    rows, cols = options.shape
    rows *= count if kind == "weak" else 1
    dtype, weight_dtype = options.dtypes
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("rows",), axis_types=(AxisType.Auto,), devices=devices)
    split = NamedSharding(mesh, PartitionSpec("rows"))
    whole = NamedSharding(mesh, PartitionSpec())
    norm = getattr(cupynorm.jax, options.norm)

    def arrays() -> tuple[Any, ...]:
        x, dy = (jax.random.normal(key, (rows, cols), dtype) for key in jax.random.split(KEY))
        return x, [jnp.ones(cols, weight_dtype) for _ in range(options.layers)], dy

    x, weights, dy = jax.jit(arrays, out_shardings=(split, whole, split))()

    def forward(x: Any, weights: Any) -> Any:
        for weight in weights:
            x = norm(x, weight)
        return x

    def step(x: Any, weights: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(forward, x, weights)
        return y, *pull_back(dy)

    programs = {
        "forward": (jax.jit(forward, compiler_options=COMPILER_OPTIONS), (x, weights)),
        "step": (jax.jit(step, compiler_options=COMPILER_OPTIONS), (x, weights, dy)),
    }
    record: dict[str, Any] = {
        "scaling": kind,
        "devices": count,
        "rows": rows,
        "cols": cols,
        "layers": options.layers,
    }
    for name, (function, arguments) in programs.items():
        program = function.lower(*arguments).compile()
        record[name] = {
            "seconds": seconds(lambda program=program, given=arguments: program(*given)),
            "collectives": collectives(program),
        }
    return record


KEY = jax.random.key(0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = scaling.parse(
        "benchmarks.sharding_jax", __doc__, sys.argv[1:] if arguments is None else arguments
    )
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind,
        "available": jax.device_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": results.commit(),
        "machine": results.machine() if jax.default_backend() != "cpu" else None,
        "norm": options.norm,
        "layers": options.layers,
        "dtypes": options.dtypes,
        "measurements": [],
    }
    name = device.device_kind
    print(f"{options.layers} {options.norm}, x, weight {', '.join(options.dtypes)}, {name}")
    print(scaling.line(scaling.HEAD))
    for kind in ("weak", "strong"):
        one = None
        for count in options.devices or scaling.counts(jax.device_count()):
            record = measure(options, kind, count)
            one = record if one is None else one
            scaling.add_speedups(record, one)
            for cells in scaling.table(record):
                print(scaling.line(cells), flush=True)
            report["measurements"].append(record)
            results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
