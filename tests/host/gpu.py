"""A GPU for `cupynorm._launch`: CuPy's arrays and functions, as far as it uses them, by NumPy, and
the function of the CUDA driver that launches.

`_launch`, `_plans` and `_driver` are executed a second time with these in place, so that their own
code lays out the rows, chooses the grid, packs the arguments and allocates scratch. Memory comes as
from CuPy's pool, aligned and holding NaN; kernels may touch what an array holds and nothing beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import math
import mmap
import struct
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

import cupynorm
from cupynorm import NormBackward, NormForward, _jit
from cupynorm._checks import trailing_axes
from cupynorm._jit import Instantiation
from host.build import Build, KernelError, runtime

__all__ = ["Array", "Gpu"]

MAP_NORESERVE = 0x4000  # of Linux; not every Python names it
ALIGNMENT = 512  # as of CuPy's pool
# What a block may have without asking, on every GPU.
MOST_SHARED_BYTES = 48 << 10
# Single elements that kernels never get to see: _launch copies such arrays.
MOST_SPANS = 4096


class Array(np.ndarray):
    """A NumPy array that says where it is as a CuPy array does."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)


class Memory:
    """Allocates arrays, and tells the runtime what kernels may touch."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.kept: list[Any] = []

    def empty(self, shape: Any, dtype: Any) -> Array:
        return self._allocate(shape, np.dtype(dtype), initialized=False)

    def zeros(self, shape: Any, dtype: Any) -> Array:
        array = self._allocate(shape, np.dtype(dtype), initialized=True)
        array[...] = 0
        return array

    def array(self, values: Any, order: str = "C") -> Array:
        values = np.asarray(values)
        array = self._allocate(values.shape, values.dtype, initialized=True)
        array[...] = values
        return array

    def sparse(self, values: np.ndarray, layout: Any) -> Array:
        """Return an array in a layout that spans more memory than there is; gaps take none."""
        strides = [s * values.itemsize for s in layout.strides(values.shape)]
        nbytes = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, nbytes + values.itemsize, flags)
        self.kept.append(memory)
        whole = np.frombuffer(memory, values.dtype).view(Array)
        array = np.lib.stride_tricks.as_strided(whole, values.shape, strides, subok=True)
        array[...] = values
        self._register(array, True)
        return array

    def as_strided(self, array: Array, shape: tuple[int, ...], strides: Any) -> Array:
        """Return a view; kernels may no longer touch what lies between its elements."""
        view = np.lib.stride_tricks.as_strided(array, shape, strides, subok=True)
        self.runtime.forget(array.ctypes.data)
        if view.size:
            self._register(view, True)
        return view

    def _allocate(self, shape: Any, dtype: np.dtype[Any], initialized: bool) -> Array:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = np.full(nbytes + 2 * ALIGNMENT, 0xFF, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.kept.append(memory)
        array = memory[start : start + nbytes].view(dtype).reshape(shape).view(Array)
        if nbytes:
            self._register(array, initialized)
        return array

    def _register(self, array: Array, initialized: bool) -> None:
        """Register runs of contiguous elements, each of them a span."""
        run = array.itemsize
        axes = [(n, s) for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
        while axes and axes[-1][1] == run:
            run *= axes.pop()[0]
        begins = np.zeros(1, np.int64)
        for n, stride in axes:
            if stride:
                begins = (begins[:, None] + np.arange(n) * stride).reshape(-1)
        if len(begins) <= MOST_SPANS:
            name = f"an array {list(array.shape)} of {8 * array.itemsize}-bit elements"
            begins = begins + array.ctypes.data
            self.runtime.register(begins, run, array.itemsize, initialized, name)

    def split(self, address: int, parts: tuple[int, ...]) -> None:
        """Make each part of an allocation a span of its own, of elements of 4 bytes."""
        if sum(parts):
            self.runtime.forget(address)
        for nbytes in parts:
            if nbytes:
                begin = np.array([address])
                self.runtime.register(begin, nbytes, 4, False, f"{nbytes} bytes of scratch")
            address += nbytes

    def forget_all(self) -> None:
        self.kept.clear()
        self.runtime.forget_all()


class Gpu:
    """Runs cupynorm's launches with kernels of a build; without one it only notes which.

    Attributes
    ----------
    cupy : module
        What stands in for CuPy.
    repeats : bool
        Whether a call that need not be prepared again is made twice; the second result counts.
    launched : list of Instantiation
        The kernels that ran, in order.
    """

    def __init__(self, build: Build | None, multiprocessors: int = 2) -> None:
        self.build = build
        self.checked = build is not None and build.counts is None
        self.memory = Memory(runtime())
        self.launched: list[Instantiation] = []
        self.repeats = False
        self.cupy: Any = _cupy(self.memory)
        self._loaded: dict[int, tuple[Instantiation, Any]] = {}
        self._driver: Any = _copy("_driver")
        self._driver.driver = lambda: SimpleNamespace(launchKernel=self._run)
        self._plans: Any = _copy("_plans")
        self._plans._driver = SimpleNamespace(Kernel=self._kernel)
        self._plans._jit = SimpleNamespace(
            load=self._load,
            forward_instantiation=_jit.forward_instantiation,
            backward_instantiations=_jit.backward_instantiations,
        )
        self._plans._multiprocessors = lambda device: multiprocessors
        self._launch: Any = _copy("_launch", self.cupy)
        self._launch._plans = SimpleNamespace(
            forward_plan=self._plans.forward_plan,
            backward_plan=lambda *key: _Split(self._plans.backward_plan(*key), self.memory),
        )

    def forward(
        self,
        norm: str,
        x: Array,
        weight: Any = None,
        bias: Any = None,
        *,
        eps: float,
        axis: Any = None,
        zero_centered: bool = False,
        out_dtype: Any = None,
        out: Any = None,
        store_statistics: bool = True,
    ) -> Any:
        result, call = self._launch.forward(
            norm,
            x,
            weight,
            bias,
            eps=eps,
            k=_normalized_axes(x, axis, weight, bias),
            zero_centered=zero_centered,
            out_dtype=(x if out is None else out).dtype if out_dtype is None else out_dtype,
            out=out,
            store_statistics=store_statistics,
        )
        if self.repeats and call is not None and out is None:
            return call.run(x, weight, bias, None)
        return result

    def backward(
        self,
        norm: str,
        dy: Array,
        x: Array,
        weight: Any,
        mean: Any,
        rstd: Array,
        *,
        bias: Any,
        axis: Any = None,
        zero_centered: bool = False,
        dx: Any = None,
    ) -> NormBackward:
        result, call = self._launch.backward(
            norm,
            dy,
            x,
            weight,
            mean,
            rstd,
            bias=bias,
            k=_normalized_axes(x, axis, weight, bias),
            zero_centered=zero_centered,
            dx=dx,
        )
        if self.repeats and call is not None and dx is None:
            like = bias if isinstance(bias, Array) else None
            result = call.run(dy, x, weight, mean, rstd, like, None)
        return cast("NormBackward", result)

    def run(self, kernel: Instantiation, blocks: int, *arguments: Any) -> None:
        """Launch a kernel outside the package; arrays are passed by their addresses."""
        values = tuple(a.data.ptr if isinstance(a, Array) else a for a in arguments)
        parameters = "".join(_letter(a) for a in arguments)
        launched = self._kernel(
            kernel.expression,
            self._load(kernel, 0),
            kernel.block_threads,
            kernel.shared_bytes,
            parameters,
        )
        launched.launch(0, blocks, values)

    @contextlib.contextmanager
    def fresh_memory(self) -> Iterator[None]:
        """Give back, at the end, whatever was allocated."""
        try:
            yield
        finally:
            self.memory.forget_all()

    def to_numpy(self, result: Any) -> Any:
        """Return a result's arrays, all of whose elements must have been written."""
        if result is None:
            return None
        if isinstance(result, NormForward | NormBackward):
            return type(result)(*map(self.to_numpy, result))
        if self.checked and result.size and result.flags.c_contiguous:
            missing = self.memory.runtime.first_unwritten(result.ctypes.data, result.nbytes)
            if missing >= 0:
                index = np.unravel_index(missing // result.itemsize, result.shape)
                raise KernelError(
                    f"element {[int(i) for i in index]} of a {result.dtype} result of shape "
                    f"{result.shape} was never written, by {self.launched[-1].expression}"
                )
        return np.array(result).view(np.ndarray)

    def _load(self, kernel: Instantiation, device: int) -> Any:
        """Return what stands in for CuPy's Function."""
        library = self.build and self.build.load(kernel)
        handle = len(self._loaded) + 1
        self._loaded[handle] = kernel, library
        return SimpleNamespace(ptr=handle)

    def _kernel(self, name: str, function: Any, *layout: Any) -> Any:
        """Return a `_driver.Kernel`; its parameters must have the sizes of the kernel's."""
        _, library = self._loaded[function.ptr]
        if library is not None:
            for i, letter in enumerate((*layout[-1], "0s")):
                given, wanted = struct.calcsize(letter), library.parameter_bytes(i)
                if given != wanted:
                    what = f"argument {i} has {given} bytes, its parameter {wanted}"
                    raise KernelError(f"{name}: {what}")
        return self._driver.Kernel(name, function, *layout)

    def _run(
        self,
        handle: int,
        blocks: int,
        blocks_y: int,
        blocks_z: int,
        threads: int,
        threads_y: int,
        threads_z: int,
        shared_bytes: int,
        stream: int,
        arguments: int,
        extra: int,
    ) -> None:
        """Stand in for the driver's function that launches."""
        kernel, library = self._loaded[handle]
        if library is None:
            self.launched.append(kernel)
            return
        if shared_bytes > MOST_SHARED_BYTES:
            raise KernelError(f"{kernel.expression}: {shared_bytes} bytes of shared memory")
        self.launched.append(kernel)
        # The first template parameter is x's dtype, or that of the partials.
        flush = "<double" not in kernel.expression
        addresses = ctypes.c_void_p(arguments)
        problem = self.memory.runtime.launch(
            library.call_kernel, blocks, threads, shared_bytes, addresses, flush
        )
        if problem:
            raise KernelError(f"{kernel.expression}, {problem}")


class _Split:
    """A backward plan whose kernels may not run from one part of its scratch into another."""

    def __init__(self, plan: Any, memory: Memory) -> None:
        self.plan, self.memory = plan, memory
        self.scratch_bytes = plan.scratch_bytes

    def launch(self, stream: int, m: int, *addresses: int) -> None:
        self.memory.split(addresses[-1], self.plan.scratch_parts(m))
        self.plan.launch(stream, m, *addresses)


def _letter(argument: Any) -> str:
    """Return struct's letter for an argument."""
    if isinstance(argument, int):
        return "q"
    return "P" if isinstance(argument, Array) else np.dtype(argument.dtype).char


def _normalized_axes(x: Array, axis: Any, weight: Any, bias: Any) -> int:
    ndims = (getattr(operand, "ndim", None) for operand in (weight, bias))
    return trailing_axes(x.ndim, axis, *ndims)


def _cupy(memory: Memory) -> Any:
    cupy = ModuleType("cupy")
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: False)
    tricks = SimpleNamespace(as_strided=memory.as_strided)
    contents = {
        "ndarray": memory.empty,  # called as a constructor
        "empty": memory.empty,
        "zeros": memory.zeros,
        "array": memory.array,
        "asarray": memory.array,
        "lib": SimpleNamespace(stride_tricks=tricks),
        "cuda": SimpleNamespace(
            alloc=lambda nbytes: memory.empty(nbytes, np.uint8).data,
            get_current_stream=lambda: stream,
            runtime=SimpleNamespace(getDevice=lambda: 0),
        ),
    }
    vars(cupy).update(contents)
    return cupy


_copies = itertools.count()


def _copy(name: str, cupy: ModuleType | None = None) -> ModuleType:
    """Return a module of cupynorm executed again: its caches hold what is of this GPU alone."""
    path = f"{cupynorm.__path__[0]}/{name}.py"
    own = f"cupynorm.{name}_on_host_{next(_copies)}"
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {own: module} | ({"cupy": cupy} if cupy else {})):
        spec.loader.exec_module(module)
    return module
