"""The host's time of small calls against torch's, of a norm of `cupynorm.fuse`, and of the parts.

`python -m benchmarks.calls` takes seconds. Nothing waits for the device. Its queue holds the
launches of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupynorm
from benchmarks.host import SHAPE
from benchmarks.timing import host_seconds
from cupynorm import _bench
from cupynorm._environment import gpu_problem

Rows = Iterator[tuple[str, Callable[[], object]]]
Shape = tuple[int, int]

# Few rows of the plain norm have a backward pass of one launch. So many have the two of fused ones.
MANY_ROWS: Shape = (2048, 1024)


def calls(
    norm: str, dtype: str, weight_dtype: str, shape: Shape = SHAPE
) -> tuple[dict[str, Any], Rows]:
    """Return the arrays of a norm, and its public calls on them."""
    import cupy

    problem = _bench.Problem(norm, "backward", *shape, dtype, weight_dtype)  # type: ignore[arg-type]
    arrays = _bench.inputs(problem, 0, cupy)
    x, dy, weight, bias = (arrays.get(name) for name in ("x", "dy", "weight", "bias"))
    out = cupy.empty_like(x)
    forward = getattr(cupynorm, norm)
    stored = getattr(cupynorm, f"{norm}_forward")
    backward = getattr(cupynorm, f"{norm}_backward")
    kept = stored(x, weight, bias)
    statistics = (kept.rstd,) if norm == "rms_norm" else (kept.mean, kept.rstd)

    def rows() -> Rows:
        yield f"{norm}", lambda: forward(x, weight, bias)
        yield f"{norm}, out=", lambda: forward(x, weight, bias, out=out)
        yield f"{norm}_forward", lambda: stored(x, weight, bias)
        yield f"{norm}_backward", lambda: backward(dy, x, weight, *statistics)
        yield f"{norm}_backward, dx=", lambda: backward(dy, x, weight, *statistics, dx=out)

    return arrays | {"out": out}, rows()


def fused_calls(arrays: dict[str, Any]) -> Rows:
    """Yield the calls of an RMSNorm with a gate. Each reads an array more, and backward makes one.

    They have the names of those of `calls`.
    """
    gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cupynorm.math.silu(z))
    x, weight, dy = arrays["x"], arrays["weight"], arrays["dy"]
    kept = gated.forward(x, weight, z=dy)
    yield "rms_norm", lambda: gated(x, weight, z=dy)
    yield "rms_norm_forward", lambda: gated.forward(x, weight, z=dy)
    yield "rms_norm_backward", lambda: gated.backward(dy, kept)


def torch_call(norm: str, arrays: dict[str, Any]) -> Callable[[], object]:
    """Return torch's own function. It has kernels only for a weight of x's dtype."""
    import torch

    x = torch.from_dlpack(arrays["x"])
    weight = torch.from_dlpack(arrays["weight"]).to(x.dtype)
    eps = _bench.EPS[norm]  # type: ignore[index]
    if norm == "rms_norm":
        return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    bias = torch.from_dlpack(arrays["bias"]).to(x.dtype)
    return lambda: torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def parts(arrays: dict[str, Any]) -> Rows:
    """Yield the parts of `rms_norm(x, weight, out=out)` and of an allocation, from outside in."""
    import cupy

    from cupynorm import _arrays, _calls, _plans
    from cupynorm._arrays import DTYPES
    from cupynorm._checks import Asked
    from cupynorm._operation import FORWARD, ForwardSpec

    x, weight, out = arrays["x"], arrays["weight"], arrays["out"]
    given = {"x": x, "weight": weight, "y": out}
    arguments = tuple(given.get(name) for name in FORWARD.arguments)

    def find() -> Any:
        _arrays.family_of("x", x)
        options = Asked("rms_norm", training=False, axis=None, zero_centered=False, eps=1e-6)
        return _calls.calls.get(_calls.forward_key(tuple(options), arguments))

    cupynorm.rms_norm(x, weight, out=out)
    run = find()
    stream, (m, n) = cupy.cuda.get_current_stream().ptr, SHAPE
    named = {"x": x.data.ptr, "x_stride": n, "weight": weight.data.ptr}
    named |= {"y": out.data.ptr, "y_stride": n}
    operands = tuple(named.get(name, 0) for name in FORWARD.operands)
    names = DTYPES[x.dtype], DTYPES[weight.dtype]
    spec = ForwardSpec("rms_norm", *names, None, names[0], False, False, False)
    plan = _plans.forward_plan(spec, m, n, 16 // x.itemsize, x.device.id)
    scalars = (1e-6, 0.0, 0.0)  # eps, and the bounds of no ReLU
    launch = plan.prepared(m, *scalars)
    kernel, blocks = plan.kernel, plan._clusters(m, 1) * plan.cluster_blocks
    given = dict(zip(FORWARD.operands, operands, strict=True))
    given |= dict(zip(("eps", "lower", "upper"), scalars, strict=True))
    frame = kernel._new_frame(blocks, given | {"n_rows": m, "n_cols": n, "inv_n": 1 / n})
    config = (kernel._handle, blocks, 1, 1, kernel._block_threads, 1, 1, kernel._shared_bytes)
    yield "look-up: key and dictionary", find
    yield "prepared call: addresses, devices, kernel", lambda: run(arguments)
    yield "kernel: packing, driver", lambda: launch(stream, operands)
    yield "driver alone", lambda: kernel._start(*config, stream, frame[1], 0)
    yield "current device", cupy.cuda.runtime.getDevice
    yield "current stream", cupy.cuda.get_current_stream
    yield "whether it is captured", lambda: cupy.cuda.get_current_stream().is_capturing()
    yield "cupy.empty", lambda: cupy.empty(SHAPE, x.dtype)
    yield "cupy.ndarray", lambda: cupy.ndarray(SHAPE, x.dtype)
    yield "cupy.cuda.alloc", lambda: cupy.cuda.alloc(x.nbytes)
    yield "an empty lambda", lambda: None


def main(dtype: str, weight_dtype: str) -> int:
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}.")
        return 1
    import cupy

    synchronize = cupy.cuda.Device().synchronize

    def microseconds(call: Callable[[], object]) -> float:
        return 1e6 * host_seconds(call, synchronize).median

    shown = f"{SHAPE[0]}x{SHAPE[1]} {dtype}, weight {weight_dtype}"
    print(f"Host time of a call, {shown}; CuPy {cupy.__version__}, NumPy {np.__version__}\n")
    for norm in ("rms_norm", "layer_norm"):
        arrays, rows = calls(norm, dtype, weight_dtype)
        reference = None
        with contextlib.suppress(ImportError):
            reference = microseconds(torch_call(norm, arrays))
            print(f"{f'torch.nn.functional.{norm}':<44}{reference:7.2f} us")
        for name, call in rows:
            taken = microseconds(call)
            ratio = "" if reference is None else f"{taken / reference:7.2f} x"
            print(f"{name:<44}{taken:7.2f} us{ratio}")
        print()
    print("Those of a norm of cupynorm.fuse, with a gate, against the plain norm's")
    for shape in (SHAPE, MANY_ROWS):
        arrays, rows = calls("rms_norm", dtype, weight_dtype, shape)
        plain = dict(rows)
        for name, call in fused_calls(arrays):
            taken, own = microseconds(call), microseconds(plain[name])
            shown = f"fused {name}, {shape[0]}x{shape[1]}"
            print(f"{shown:<44}{taken:7.2f} us{taken / own:7.2f} x {own:.2f}")
    print()
    arrays, _ = calls("rms_norm", dtype, weight_dtype)
    for name, call in parts(arrays):
        print(f"{name:<44}{microseconds(call):7.2f} us")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    for name, about in (("--dtype", "of x"), ("--weight-dtype", "of weight")):
        parser.add_argument(
            name, choices=_bench.DTYPES, default="bfloat16", help=f"{about} (%(default)s)"
        )
    options = parser.parse_args()
    sys.exit(main(options.dtype, options.weight_dtype))
