"""Norms of `cupynorm.fuse` by their kernels, which run on the host: see host/gpu.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from fused_norms import Call
from host.gpu import ARCHITECTURE, Gpu, Kernel, launched

import cupynorm
import cupynorm.math as cm
from cupynorm import _fuse, _fused_calls, _plans, testing
from cupynorm._arrays import is_number, to_numpy
from cupynorm._compile import Instantiation
from cupynorm._operation import Kind
from cupynorm._prepared import Dialect
from cupynorm.reference import round_once, sum_to_shape


class HostMemory:
    """The arrays of a host's GPU, as `_fused_calls` takes them."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        layout = "({0}.dtype, {0}.shape, {0}.strides)"
        self.dialect = Dialect(
            names={"_empty": gpu.memory.empty, "is_number": is_number},
            accepts={},
            signature=dict.fromkeys(Kind, layout)
            | {None: f"(0 if is_number({{0}}) else {layout})"},
            device="",
            before="",
            copy="{0} = {0}_copy({0})",
            look="",
            elsewhere="",
            address="{0}.ctypes.data",
            checked=frozenset(),
            checked_new=frozenset(),
            misaligned="return None",
            allocate="_empty({0}_shape, {0}_dtype)",
            stream="0",
            handle="stream",
            scratch="scratch = _empty(scratch_shape, 'u1'); scratch_address = scratch.ctypes.data",
        )

    def dtype(self, array: Any) -> str:
        return str(array.dtype)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(stride // array.itemsize for stride in array.strides)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def native(self, dtype: str) -> Any:
        return to_numpy(dtype)

    def kept(self, array: Any) -> Any:
        return array

    def contiguous(self, array: Any) -> Any:
        return array if array.flags.c_contiguous else self.gpu.memory.array(array)

    def cast(self, array: Any, dtype: str) -> Any:
        return self.gpu.memory.array(array.astype(dtype))

    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:
        return self.gpu.memory.array(np.broadcast_to(array, shape))

    def summed(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        assert array.dtype.itemsize > 2  # CuPy cannot compute with bfloat16
        wide = sum_to_shape(self.gpu.to_numpy(array).astype(np.float64), shape)
        return self.gpu.memory.array(round_once(wide, to_numpy(dtype)))

    def device(self, array: Any) -> int:
        return 0

    def on(self, device: int) -> Any:
        return contextlib.nullcontext()


@contextlib.contextmanager
def on_host(gpu: Gpu, multiprocessors: int = 2) -> Iterator[None]:
    """Have norms of `cupynorm.fuse` take the host's GPU for that of NumPy arrays."""
    background = SimpleNamespace(
        load=lambda kernels, device: tuple(Kernel(gpu, kernel) for kernel in kernels)
    )
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("multiprocessors", lambda device: multiprocessors),
            ("architecture", lambda device: gpu.architecture),
        ):
            stack.enter_context(mock.patch.object(_plans, name, value))
        stack.enter_context(mock.patch.object(_fused_calls, "_background", background))
        tools = dataclasses.replace(_fuse.NUMPY_TOOLS, memory=HostMemory(gpu))
        stack.enter_context(mock.patch.object(_fuse, "_tools_of", return_value=tools))

        def again(fused: Any, *told: Any) -> Any:
            return _fused_calls.again(tools.memory, fused, *told)

        stack.enter_context(mock.patch.object(_fuse.Fused, "_again", again))
        for plan in (_fused_calls._forward_plan, _fused_calls._backward_plan):
            plan.cache_clear()
            stack.callback(plan.cache_clear)
        yield


GATED = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cm.silu(z))
MANY = cupynorm.fuse(
    "layer_norm",
    prologue=lambda x, r, a: (x + r * a, x + r * a, x - r),
    epilogue=lambda y, x, s, z, a, c: (y * cm.gelu(z) * s + x * a, cm.where(c > 0, y, cm.tanh(y))),
)


FUNCTIONS = cupynorm.fuse(
    "layer_norm",
    prologue=lambda x: x * cm.sigmoid(x),
    epilogue=lambda y: (
        cm.maximum(cm.softplus(y), cm.minimum(cm.abs(y), 2))
        + cm.where(y > np.inf, np.nan, cm.gelu(y))
    ),
)


def drawn(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    return round_once(values, np.dtype(dtype))


def passes(call: Call, put: Any, get: Any) -> tuple[Any, Any, Any]:
    """Return a call's outputs and gradients as NumPy arrays, and the gradients of its outputs."""
    rng = np.random.default_rng(0)
    shape, dtype = call.x.shape, call.x.dtype
    of_outputs = [rng.standard_normal(shape).astype(dtype) for _ in range(call.fused.count)]
    forward = call.of(call.fused.forward, convert=put)
    found = call.fused.backward([put(of) for of in of_outputs], forward)
    gradients = (None if of is None else get(of) for of in found)
    return tuple(map(get, forward.outputs)), type(found)(*gradients), of_outputs


def check_passes(call: Call, outputs: Any, gradients: Any, of_outputs: Any) -> None:
    """Check what `passes` returned against its bounds."""
    named = {"x": call.x, "weight": call.weight, "bias": call.bias}
    result = outputs if call.fused.count > 1 else outputs[0]
    testing.check_fused(call.fused, result, **named, **call.options, **call.inputs)
    of_numpy = call.of(call.fused.forward)._replace(outputs=outputs)
    testing.check_fused_backward(call.fused, gradients, of_outputs, of_numpy)


def check(gpu: Gpu, call: Call, *, by_kernels: bool = True) -> None:
    """Check outputs and gradients against their bounds."""
    gpu.launched.clear()
    call.fused.prepared.clear()  # calls of another build's kernels
    get = gpu.to_numpy if by_kernels else np.array
    with gpu.fresh_memory(), on_host(gpu):
        for _ in range(2):  # the second is prepared
            found = passes(call, gpu.memory.array, get)
    assert any(kernel.name == "fused_backward" for kernel in gpu.launched) == by_kernels
    check_passes(call, *found)


def kernels_of(call: Call, architecture: int = ARCHITECTURE) -> list[Instantiation]:
    """Return the kernels of a call, where one block of each runs at once."""

    def run(gpu: Gpu) -> None:
        gpu.blocks_at_once = 1
        call.fused.prepared.clear()
        with on_host(gpu):
            passes(call, gpu.memory.array, gpu.to_numpy)

    return launched(run, architecture=architecture)


def call_of_many(rows: int, n: int) -> Call:
    """Return a call with an input at every place, a row out of range, and one far from 0."""
    shape = (rows, n)
    inputs = {
        **{"r": drawn(1, shape, np.float16), "a": drawn(2, (rows, 1)), "s": drawn(3, (n,))},
        **{"z": drawn(4, shape), "c": drawn(5, shape) > 0},
    }
    of_vectors = drawn(7, (n,)), drawn(8, (n,))
    x = drawn(6, shape)
    x[1] *= np.float32(1e25)
    inputs["r"][1] = 0
    x[2:3] += 10000  # whose mean is rounded
    return Call(MANY, x, *of_vectors, {"zero_centered": True}, inputs)


def _calls() -> Iterator[tuple[str, Call, int]]:
    """Yield calls that reach the lines of the kernels, by name, with an architecture."""
    for name, n, rows, architecture in (
        ("parts of a warp", 40, 70, 90),
        ("clusters", 20000, 2, 90),
        ("rows that are read again", 9000, 3, 75),
    ):
        yield f"fused, {name}", call_of_many(rows, n), architecture
    for dtype in (np.float32, np.float64):
        arrays = drawn(9, (5, 8), dtype), drawn(10, (8,)), drawn(11, (8,))
        yield f"fused, functions of {np.dtype(dtype)}", Call(FUNCTIONS, *arrays, {}, {}), 90
    for name, rows in (("a gate", 5), ("sums that are written twice", 4 * 64 + 5)):
        x, z = drawn(1, (rows, 1000)), drawn(2, (rows, 1000))
        yield f"fused, {name}", Call(GATED, x, drawn(3, (1000,)), None, {}, {"z": z}), 90


FUSED = {name: (call, architecture) for name, call, architecture in _calls()}


def check_fused_call(build: Any, name: str) -> None:
    call, architecture = FUSED[name]
    gpu = Gpu(build, architecture=architecture)
    gpu.blocks_at_once = 1
    check(gpu, call)
