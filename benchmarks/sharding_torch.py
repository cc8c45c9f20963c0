"""A stack of norms over several GPUs by DTensor.

``python -m benchmarks.sharding_torch benchmarks/results/sharding_torch_h200.json``

Each GPU has a process, over NCCL. x is split over its rows. The weights are on each device. "weak":
so many rows a device, and n devices do n times the work. "strong": so many rows in all. It is a
stack because a network has one: y of a norm is x of the next, and each has its own weight. The sum
of a gradient over the devices begins when the gradient is there. It overlaps with the kernels of
the norms before. With a single norm that sum would be exposed, and so would the cost of a call. A
step is the forward and the backward pass to x and to all weights, and those sums.

Times are of the whole stack, by the wall clock, with calls that queue up, in the slowest process.
"as called" includes the host. The other time is a replay from a CUDA graph, with its all-reduces.
The devices' exchanges are counted. Without a GPU, processes on the CPU over gloo show that it runs,
and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import cupynorm.torch
from benchmarks import results, scaling
from benchmarks.measure import reason

ROUNDS = 5
ROUND_SECONDS = 0.2


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
    # The same in all processes: each knows the slowest time. The CPU's time says nothing.
    while device == "cuda" and elapsed < ROUND_SECONDS / 2:
        calls = max(2 * calls, int(calls * ROUND_SECONDS / max(elapsed, 1e-6)))
        elapsed = run(calls)
    return statistics.median(run(calls) for _ in range(ROUNDS)) / calls


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def capture(call: Callable[[], Any]) -> tuple[Callable[[], None], list[str]]:
    """Return the replay of a call from a CUDA graph, and why some process has none."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refusal = None
    try:
        # NCCL's watchdog thread queries events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except Exception as error:  # whatever torch raises is its answer
        refusal = reason(error)
    refusals: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)  # if one process cannot replay, none may
    return graph.replay, [r for r in refusals if r is not None]


def measure(options: argparse.Namespace, kind: str, count: int, device: str) -> dict[str, Any]:
    """Time the forward pass and the step, in each of `count` processes."""
    rows, cols = options.shape
    rows *= count if kind == "weak" else 1
    mesh = init_device_mesh(device, (count,))
    x_dtype, weight_dtype = (getattr(torch, name) for name in options.dtypes)

    def split() -> Any:
        share = rows // count + (mesh.get_local_rank() < rows % count)
        part = torch.randn(share, cols, device=device, dtype=x_dtype)
        whole = torch.Size((rows, cols))
        return DTensor.from_local(part, mesh, [Shard(0)], shape=whole, stride=(cols, 1))

    def sum_over_devices(dweight: Any) -> Any:
        return dweight.redistribute(placements=[Replicate()], async_op=True)

    weights = []
    for _ in range(options.layers):
        ones = torch.ones(cols, device=device, dtype=weight_dtype)
        weight = DTensor.from_local(ones, mesh, [Replicate()], run_check=False).requires_grad_()
        weight.register_hook(sum_over_devices)
        weights.append(weight)
    x, dy = split().requires_grad_(), split()
    norm = getattr(cupynorm.torch, options.norm)

    def stack() -> Any:
        y = x
        for weight in weights:
            y = norm(y, weight)
        return y

    def forward() -> None:
        with torch.no_grad():
            stack()

    def step() -> list[Any]:
        _, *dweights = torch.autograd.grad(stack(), (x, *weights), dy)
        sums = [dweight.to_local() for dweight in dweights]
        return [s.wait() if isinstance(s, AsyncCollectiveTensor) else s for s in sums]

    record: dict[str, Any] = {
        "scaling": kind,
        "devices": count,
        "rows": rows,
        "cols": cols,
        "layers": options.layers,
    }
    for name, call in (("forward", forward), ("step", step)):
        with CommDebugMode() as communicated:
            call()
        record[name] = {
            "seconds": seconds(call, device),
            "graph_seconds": None,
            "collectives": [f"{n} {k}" for k, n in communicated.get_comm_counts().items()],
        }
        if device == "cuda":
            replay, refusals = capture(call)
            if refusals:
                record[name]["not_captured"] = refusals[0]
            else:
                record[name]["graph_seconds"] = seconds(replay, device)
    return record


def work(rank: int, options: argparse.Namespace, count: int, directory: str) -> None:
    """Measure as one of several processes. The first one writes the records."""
    # They meet at a file: a port that is free now may be taken by then.
    meeting: dict[str, Any] = {"init_method": f"file://{directory}/rendezvous"}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
        meeting["device_id"] = torch.device("cuda", rank)
    torch.manual_seed(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=count, **meeting)
    try:
        records = [measure(options, kind, count, device) for kind in ("weak", "strong")]
        if rank == 0:
            (Path(directory) / "records.json").write_text(json.dumps(records), encoding="utf-8")
        dist.barrier()  # gloo aborts a process whose peer left in the middle of a collective
    finally:
        dist.destroy_process_group()
    # DTensor's caches keep the mesh, and so gloo's threads (torch 2.13). If one has yet to release
    # a tensor as the interpreter ends, the process aborts. So leave without ending it.
    sys.stdout.flush()
    os._exit(0)


def spawn(options: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(work, (options, count, directory), nprocs=count)
        text = (Path(directory) / "records.json").read_text(encoding="utf-8")
    records: list[dict[str, Any]] = json.loads(text)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    options = scaling.parse(
        "benchmarks.sharding_torch", __doc__, sys.argv[1:] if arguments is None else arguments
    )
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
        "layers": options.layers,
        "dtypes": options.dtypes,
        "measurements": [],
    }
    print(f"{options.layers} {options.norm}, x, weight {', '.join(options.dtypes)}, {name}")
    print(scaling.line(scaling.HEAD))
    first: dict[str, Any] = {}
    for count in options.devices or scaling.counts(max(1, gpus)):
        for record in spawn(options, count):
            scaling.add_speedups(record, first.setdefault(record["scaling"], record))
            for cells in scaling.table(record):
                print(scaling.line(cells), flush=True)
            for call in scaling.CALLS:
                if "not_captured" in record[call]:
                    print(f"{call} not captured: {record[call]['not_captured']}", file=sys.stderr)
            report["measurements"].append(record)
            results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
