"""A first reading of speed: GB/s beside the copy and the add, host time, first call.

Needs a GPU, CuPy and torch. Prints a table and writes it with the machine's versions:

    python benchmarks/first_reading.py benchmarks/results/first_reading.json
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

import cupynorm

SHAPES = (
    *((32768, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    (16384, 65536),
    (8192, 131072),
)
TALL = ((1048576, 64), (1048576, 128))
# More than the L2 of any GPU so far, and longer on the device than a call is on the host: else the
# device would wait for launches between the events.
FLUSH_BYTES = 1 << 30

FIRST_CALL = """
import time
start = time.perf_counter()
import cupy
cupy.ones(1, cupy.float32) + 1
cupy.cuda.Device().synchronize()
imported = time.perf_counter()
import cupynorm
own_import = time.perf_counter() - imported
x = cupy.empty((16, 4096), cupy.float16)
w = cupy.empty(4096, cupy.float32)
called = time.perf_counter()
cupynorm.rms_norm(x, w)
cupy.cuda.Device().synchronize()
print(own_import, time.perf_counter() - called)
"""


def device_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time on the device, the L2 flushed before each call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times) / 1e3


def host_seconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """Return the host's time of a call, without waiting for the device."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
    return best


def throughput(m: int, n: int) -> dict[str, float]:
    """Return GB/s of one shape: bfloat16 x and dy, float32 weight."""
    x, dy, z = (torch.randn(m, n, device="cuda").bfloat16() for _ in range(3))
    weight = torch.randn(n, device="cuda")
    cx, cdy, cw = (cupy.from_dlpack(t) for t in (x, dy, weight))
    y, dx = cupy.empty(cx.shape, cx.dtype), cupy.empty(cx.shape, cx.dtype)
    rms, layer = cupynorm.rms_norm_forward(cx, cw), cupynorm.layer_norm_forward(cx, cw)
    calls = {
        "copy": lambda: z.copy_(x),
        "add": lambda: torch.add(x, dy, out=z),
        "rms_norm forward": lambda: cupynorm.rms_norm(cx, cw, out=y),
        "rms_norm backward": lambda: cupynorm.rms_norm_backward(cdy, cx, cw, rms.rstd, dx=dx),
        "layer_norm forward": lambda: cupynorm.layer_norm(cx, cw, cw, out=y),
        "layer_norm backward": lambda: cupynorm.layer_norm_backward(
            cdy, cx, cw, layer.mean, layer.rstd, bias=True, dx=dx
        ),
    }
    moved = {name: (2 if name == "copy" or "forward" in name else 3) * m * n * 2 for name in calls}
    repeats = 30 if m * n < 2**29 else 10
    return {name: moved[name] / device_seconds(call, repeats) / 1e9 for name, call in calls.items()}


def throughputs() -> list[dict[str, Any]]:
    """Return GB/s of every shape."""
    rows = []
    for m, n in (*SHAPES, *TALL):
        measured = throughput(m, n)
        print(f"{m:>8}x{n:<7}", *(f"{value:7.0f}" for value in measured.values()), flush=True)
        rows.append({"shape": [m, n], **measured})
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    return rows


def host_times() -> dict[str, float]:
    """Return microseconds of the host a call, 16x4096 bfloat16 with a weight."""
    x = torch.randn(16, 4096, device="cuda").bfloat16()
    w = torch.randn(4096, device="cuda").bfloat16()
    cx, cw = cupy.from_dlpack(x), cupy.from_dlpack(w)
    y = cupy.empty(cx.shape, cx.dtype)
    kept = cupynorm.rms_norm_forward(cx, cw)
    calls = {
        "torch.nn.functional.rms_norm": lambda: torch.nn.functional.rms_norm(x, (4096,), w),
        "rms_norm": lambda: cupynorm.rms_norm(cx, cw),
        "rms_norm out=": lambda: cupynorm.rms_norm(cx, cw, out=y),
        "rms_norm_forward": lambda: cupynorm.rms_norm_forward(cx, cw),
        "rms_norm_backward": lambda: cupynorm.rms_norm_backward(cx, cx, cw, kept.rstd),
        "rms_norm of torch tensors": lambda: cupynorm.rms_norm(x, w),
    }
    return {name: host_seconds(call) * 1e6 for name, call in calls.items()}


def first_calls() -> dict[str, list[float]]:
    """Return milliseconds of importing cupynorm and of its first call, cold and warm."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CUPY_CACHE_DIR": cache}
        runs = [
            subprocess.run(
                [sys.executable, "-c", FIRST_CALL],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
            for _ in range(3)
        ]
    return {
        name: [float(v) * 1e3 for v in run]
        for name, run in zip(("cold", "warm", "warm again"), runs, strict=True)
    }


def machine() -> dict[str, str]:
    """Name what was measured on."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {
        "gpu": properties["name"].decode(),
        "driver": driver,
        "cupy": cupy.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cupynorm": cupynorm.__version__,
        "commit": os.environ.get("COMMIT", "unknown"),
    }


def main(target: str) -> None:
    print("        shape     copy     add  rms fwd rms bwd  ln fwd  ln bwd   (GB/s)")
    report: dict[str, Any] = {"machine": machine(), "throughput": throughputs()}
    report["host_us"] = host_times()
    for name, value in report["host_us"].items():
        print(f"{name:>32} {value:7.2f} us")
    report["first_call_ms"] = first_calls()
    for name, value in report["first_call_ms"].items():
        print(f"{name:>32} import {value[0]:7.1f} ms, first call {value[1]:7.1f} ms")
    Path(target).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
