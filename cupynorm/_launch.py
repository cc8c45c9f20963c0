"""Launches on CuPy arrays whose arguments are checked: results are allocated on x's device, and
kernels launched on CuPy's current stream there. Nothing synchronizes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from cupynorm import _jit
from cupynorm._arrays import DTYPES, row_stride
from cupynorm._bitmask import bitmask_bytes
from cupynorm._config import (
    ResidentBackward,
    ResidentForward,
    backward_config,
    forward_config,
    pack_length,
)
from cupynorm._results import NormBackward, NormForward
from cupynorm._spec import BackwardSpec, ForwardSpec, Norm, compute_dtype

__all__ = ["backward", "forward", "load_backward", "load_forward"]

# The column kernel of the streaming backward uses up to 64 registers at 256 threads.
COLUMN_BLOCKS_PER_MULTIPROCESSOR = 4


# ---- arrays as the kernels take them -------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """An array as rows of n contiguous elements, row_stride elements apart."""

    pointer: int
    row_stride: int
    divisors: int  # its lowest set bit divides every row's address, in elements


def _rows(array: Any, k: int, n: int) -> tuple[Any, _Rows]:
    """Return the array, copied if it does not consist of contiguous rows, and its rows."""
    itemsize = array.itemsize
    stride: int | None = n
    if not array.flags.c_contiguous:
        stride = row_stride(array.shape, array.strides, itemsize, k)
    if stride is None:
        array, stride = _contiguous(array), n
    pointer = array.data.ptr
    divisors = pointer // itemsize | (stride if array.size > n else 0)
    return array, _Rows(pointer, stride, divisors)


def _operand(array: Any) -> Any:
    """Return an array that the kernels take without strides, copied if it has some."""
    return array if array is None or array.flags.c_contiguous else _contiguous(array)


def _contiguous(array: Any) -> Any:
    # As integers: CuPy copies them whether or not it can compute with the dtype.
    bits = array.view(f"u{array.itemsize}")
    return _kept_by_graph(cupy.array(bits, order="C")).view(array.dtype)


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _vector(x: str, n: int, rows: tuple[_Rows, ...], operands: tuple[Any, ...]) -> int:
    """Return how many elements one access moves: the largest power of two that divides all."""
    divisors = n | pack_length(x)
    for row in rows:
        divisors |= row.divisors
    for array in operands:
        if array is not None:
            divisors |= array.data.ptr // array.itemsize
    return divisors & -divisors


def _name(array: Any) -> str | None:
    return None if array is None else DTYPES[array.dtype]


# ---- devices and scratch -------------------------------------------------------------------------


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def _on(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, unless it is."""
    if device == cupy.cuda.runtime.getDevice():
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)  # type: ignore[no-any-return]


# What launches that a CUDA graph captured have used beside their arguments. A replay uses it again,
# and nothing tells when the graph is gone.
_kept_by_graphs: list[Any] = []


def _kept_by_graph(array: Any) -> Any:
    if cupy.cuda.get_current_stream().is_capturing():
        _kept_by_graphs.append(array)
    return array


def _scratch(size: int, dtype: str) -> Any:
    return _kept_by_graph(cupy.empty(size, dtype))


# ---- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ForwardPlan:
    function: Any
    block: tuple[int]
    rows_per_block: int
    shared_bytes: int


@functools.cache
def load_forward(spec: ForwardSpec, n: int, vector: int, device: int) -> _ForwardPlan:
    """Return a forward pass ready to launch on `device`, the current one."""
    config = forward_config(spec, n, vector)
    kernel = _jit.forward_instantiation(spec, config)
    return _ForwardPlan(
        function=_jit.load(kernel, device),
        block=(kernel.block_threads,),
        rows_per_block=config.rows_per_block if isinstance(config, ResidentForward) else 1,
        shared_bytes=kernel.shared_bytes,
    )


def forward(
    norm: Norm,
    x: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float,
    k: int,
    zero_centered: bool,
    out_dtype: Any,
    out: Any,
    relu: tuple[float, float] | None,
    store_statistics: bool,
) -> NormForward:
    """Launch a forward pass over the last k axes of x."""
    kept = x.shape[: x.ndim - k]
    n = math.prod(x.shape[x.ndim - k :])
    device = x.device.id
    with _on(device):
        statistics = compute_dtype(DTYPES[x.dtype])
        y = cupy.empty(x.shape, out_dtype) if out is None else out
        rstd = cupy.empty(kept, statistics) if store_statistics else None
        mean = cupy.empty(kept, statistics) if store_statistics and norm == "layer_norm" else None
        bitmask = None
        if relu is not None and store_statistics:
            bitmask = cupy.empty((*kept, bitmask_bytes(n)), np.uint8)
        result = NormForward(y, mean, rstd, bitmask)
        m = math.prod(kept)
        if m == 0:
            return result

        x, x_rows = _rows(x, k, n)
        _, y_rows = _rows(y, k, n)
        weight, bias = _operand(weight), _operand(bias)
        spec = ForwardSpec(
            norm=norm,
            x=DTYPES[x.dtype],
            weight=_name(weight),
            bias=_name(bias),
            y=DTYPES[y.dtype],
            zero_centered=bool(zero_centered),
            store_statistics=store_statistics,
            relu=relu is not None,
        )
        vector = _vector(spec.x, n, (x_rows, y_rows), (weight, bias))
        plan = load_forward(spec, n, vector, device)
        compute = np.float64 if statistics == "float64" else np.float32
        lower, upper = (0.0, 0.0) if relu is None else relu
        plan.function(
            (-(-m // plan.rows_per_block),),
            plan.block,
            (
                x_rows.pointer,
                x_rows.row_stride,
                _pointer(weight),
                _pointer(bias),
                y_rows.pointer,
                y_rows.row_stride,
                _pointer(mean),
                _pointer(rstd),
                _pointer(bitmask),
                m,
                n,
                compute(1 / n),
                compute(eps),
                compute(lower),
                compute(upper),
            ),
            plan.shared_bytes,
        )
    return result


# ---- backward ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BackwardPlan:
    config: Any
    launches: tuple[tuple[Any, tuple[int], int], ...]  # function, block, shared bytes


@functools.cache
def load_backward(spec: BackwardSpec, n: int, vector: int, device: int) -> _BackwardPlan:
    """Return a backward pass ready to launch on `device`, the current one."""
    config = backward_config(spec, n, vector)
    return _BackwardPlan(
        config,
        tuple(
            (_jit.load(kernel, device), (kernel.block_threads,), kernel.shared_bytes)
            for kernel in _jit.backward_instantiations(spec, config)
        ),
    )


def backward(
    norm: Norm,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any,
    bitmask: Any,
    k: int,
    zero_centered: bool,
    dx: Any,
) -> NormBackward:
    """Launch a backward pass over the last k axes of x.

    Scratch is one row of partial sums a block for each weight gradient, at most
    4 * multiprocessors rows of N values of the compute dtype, and three values a row of x where
    rows are too long for registers.
    """
    n = math.prod(x.shape[x.ndim - k :])
    m = x.size // n
    device = x.device.id
    with _on(device):
        dx = cupy.empty(x.shape, x.dtype) if dx is None else dx
        allocate = cupy.empty if m else cupy.zeros
        dweight = None if weight is None else allocate(weight.shape, weight.dtype)
        dbias = None
        if bias is True:
            like = x if weight is None else weight
            dbias = allocate(x.shape[x.ndim - k :] if weight is None else weight.shape, like.dtype)
        elif bias is not False:
            dbias = allocate(bias.shape, bias.dtype)
        result = NormBackward(dx, dweight, dbias)
        if m == 0:
            return result

        x, x_rows = _rows(x, k, n)
        dy, dy_rows = _rows(dy, k, n)
        _, dx_rows = _rows(dx, k, n)
        weight, mean, rstd = _operand(weight), _operand(mean), _operand(rstd)
        bitmask = _operand(bitmask)
        spec = BackwardSpec(
            norm=norm,
            x=DTYPES[x.dtype],
            dy=DTYPES[dy.dtype],
            weight=_name(weight),
            dbias=_name(dbias),
            zero_centered=bool(zero_centered),
            bitmask=bitmask is not None,
        )
        vector = _vector(spec.x, n, (x_rows, dy_rows, dx_rows), (weight,))
        plan = load_backward(spec, n, vector, device)
        statistics = compute_dtype(spec.x)
        inv_n = (np.float64 if statistics == "float64" else np.float32)(1 / n)
        operands = (
            dy_rows.pointer,
            dy_rows.row_stride,
            x_rows.pointer,
            x_rows.row_stride,
            _pointer(weight),
            _pointer(mean),
            _pointer(rstd),
            _pointer(bitmask),
        )
        gradient = (dx_rows.pointer, dx_rows.row_stride)
        multiprocessors = _multiprocessors(device)
        config, launches = plan.config, plan.launches
        if isinstance(config, ResidentBackward):
            n_partials = min(-(-m // config.rows_per_block), multiprocessors)
            partials = _scratch(spec.gradients * n_partials * n, statistics)
            _launch(
                launches[0], n_partials, (*operands, *gradient, _pointer(partials), m, n, inv_n)
            )
        else:
            tiles = -(-n // (config.column_threads * pack_length(spec.x)))
            chunks = -(-multiprocessors * COLUMN_BLOCKS_PER_MULTIPROCESSOR // tiles)
            n_partials = min(m, chunks)
            partials = _scratch(spec.gradients * n_partials * n, statistics)
            coefficients = _scratch(3 * m, statistics)
            _launch(launches[0], m, (*operands, _pointer(coefficients), m, n, inv_n))
            _launch(
                launches[1],
                tiles * n_partials,
                (
                    *operands,
                    _pointer(coefficients),
                    *gradient,
                    _pointer(partials),
                    n_partials,
                    m,
                    n,
                ),
            )
        if spec.gradients:
            _launch(
                launches[-1],
                spec.gradients * -(-n // 32),
                (_pointer(partials), _pointer(dweight), _pointer(dbias), n_partials, n),
            )
    return result


def _launch(kernel: tuple[Any, tuple[int], int], blocks: int, arguments: tuple[Any, ...]) -> None:
    function, block, shared_bytes = kernel
    function((blocks,), block, arguments, shared_bytes)
