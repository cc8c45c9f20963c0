"""Norms of `cupynorm.fuse` by their kernels, which run on the host: see host/gpu.py."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from host.gpu import Gpu, Kernel

from cupynorm import _fuse, _fused_calls, _plans
from cupynorm._arrays import to_numpy
from cupynorm.reference import round_once, sum_to_shape


class HostMemory:
    """The arrays of a host's GPU, as `_fused_calls` takes them."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def dtype(self, array: Any) -> str:
        return str(array.dtype)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(stride // array.itemsize for stride in array.strides)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self.gpu.memory.empty(shape, to_numpy(dtype))

    scratch = empty

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

    def signature(self, array: Any) -> Any:
        return array.dtype, array.shape, array.strides

    def device(self, array: Any) -> int:
        return 0

    def on(self, device: int) -> Any:
        return contextlib.nullcontext()

    def stream(self, device: int) -> int:
        return 0


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
        for plan in (_fused_calls._forward_plan, _fused_calls._backward_plan):
            plan.cache_clear()
            stack.callback(plan.cache_clear)
        yield
