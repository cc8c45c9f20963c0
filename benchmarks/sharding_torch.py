"""One norm over several GPUs by DTensor: ``python -m benchmarks.sharding_torch results.json``.

A process a GPU, over NCCL. x is split over its rows; the weight is on each device. "weak": so many
rows a device, of which n do n times the work; "strong": so many rows in all. A step is the forward
and the backward pass, and the sum of the weight's gradient over the devices. Times are those of the
wall clock, of calls that queue up, in the slowest process; what the devices exchange is counted.
Where there is no GPU, processes on the CPU over gloo show that it runs, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cupynorm.torch
from benchmarks import results
from benchmarks.problems import parse_pair, shape

ROUNDS = 5
ROUND_SECONDS = 0.2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharding_torch", description=__doc__
    )
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


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return the time of a call in a queue of calls, in the slowest process: a median of rounds."""

    def run(times: int) -> float:
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait(device)
        slowest = torch.tensor(time.perf_counter() - start, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    run(3)
    calls, elapsed = 1, run(1)
    while elapsed < ROUND_SECONDS / 2:  # the same in all processes, who know the slowest one's time
        calls = max(2 * calls, int(calls * ROUND_SECONDS / max(elapsed, 1e-6)))
        elapsed = run(calls)
    return statistics.median(run(calls) for _ in range(ROUNDS)) / calls


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, scaling: str, count: int, device: str) -> dict[str, Any]:
    """Time the forward pass and the step, in each of `count` processes."""
    rows, cols = options.shape
    rows *= count if scaling == "weak" else 1
    mesh = init_device_mesh(device, (count,))
    x_dtype, weight_dtype = (getattr(torch, name) for name in options.dtypes)

    def split() -> Any:
        share = rows // count + (mesh.get_local_rank() < rows % count)
        part = torch.randn(share, cols, device=device, dtype=x_dtype)
        whole = torch.Size((rows, cols))
        return DTensor.from_local(part, mesh, [Shard(0)], shape=whole, stride=(cols, 1))

    ones = torch.ones(cols, device=device, dtype=weight_dtype)
    weight = DTensor.from_local(ones, mesh, [Replicate()], run_check=False).requires_grad_()
    x, dy = split().requires_grad_(), split()
    norm = getattr(cupynorm.torch, options.norm)

    def forward() -> None:
        with torch.no_grad():
            norm(x, weight)

    def step() -> None:
        _, dweight = torch.autograd.grad(norm(x, weight), (x, weight), dy)
        dweight.redistribute(placements=[Replicate()])

    record: dict[str, Any] = {"scaling": scaling, "devices": count, "rows": rows, "cols": cols}
    for name, call in (("forward", forward), ("step", step)):
        with CommDebugMode() as communicated:
            call()
        exchanged = {str(k): n for k, n in communicated.get_comm_counts().items()}
        record[name] = {"seconds": seconds(call, device), "collectives": exchanged}
    return record


def work(rank: int, options: argparse.Namespace, count: int, port: int, target: str) -> None:
    """Measure as one of several processes; the first one writes the records."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=count)
    try:
        records = [measure(options, scaling, count, device) for scaling in ("weak", "strong")]
        if rank == 0:
            Path(target).write_text(json.dumps(records), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def spawn(options: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "records.json")
        torch.multiprocessing.spawn(work, (options, count, port, target), nprocs=count)
        records: list[dict[str, Any]] = json.loads(Path(target).read_text(encoding="utf-8"))
    return records


def speedup(record: dict[str, Any], one: dict[str, Any], name: str) -> float:
    """Return how many times the work of one device is done in the same time."""
    more = record["rows"] / one["rows"]
    return more * one[name]["seconds"] / record[name]["seconds"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name() if gpus else platform.processor() or "CPU"
    report: dict[str, Any] = {
        "device": name,
        "available": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": results.commit(),
        "machine": results.machine() if gpus else None,
        "norm": options.norm,
        "dtypes": options.dtypes,
        "measurements": [],
    }
    print(f"{options.norm}, x {options.dtypes[0]}, weight {options.dtypes[1]}, {name}")
    print(f"{'':8}{'devices':>8}{'x':>16}{'forward':>12}{'':>8}{'step':>12}{'':>8}  exchanged")
    first: dict[str, Any] = {}
    for count in options.devices or counts(max(1, gpus)):
        for record in spawn(options, count):
            one = first.setdefault(record["scaling"], record)
            cells = [f"{record['scaling']:8}{count:8}{record['rows']:>9}x{record['cols']:<6}"]
            for call in ("forward", "step"):
                record[call]["speedup"] = speedup(record, one, call)
                cells.append(
                    f"{1e3 * record[call]['seconds']:9.3f} ms{record[call]['speedup']:7.2f}x"
                )
            exchanged = [
                f"{n} {kind} in {call}"
                for call in ("forward", "step")
                for kind, n in record[call]["collectives"].items()
            ]
            print(*cells, "", "; ".join(exchanged) or "nothing", flush=True)
            report["measurements"].append(record)
            options.results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
