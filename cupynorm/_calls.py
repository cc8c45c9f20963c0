"""Launches on CuPy arrays whose arguments are checked: results are allocated on x's device, and
kernels launched on CuPy's current stream there. Nothing synchronizes.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from cupynorm._arrays import DTYPES, row_stride
from cupynorm._bitmask import bitmask_bytes
from cupynorm._checks import to_eps
from cupynorm._layout import pack_length
from cupynorm._operation import (
    BackwardSpec,
    ForwardSpec,
    Norm,
    NormBackward,
    NormForward,
    compute_dtype,
)
from cupynorm._plans import BackwardPlan, ForwardPlan, backward_plan, forward_plan

__all__ = ["BackwardCall", "ForwardCall", "backward", "forward"]

# ---- arrays as the kernels take them -------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """An array as rows of n contiguous elements, `stride` elements apart."""

    array: Any
    stride: int


def _rows(array: Any, k: int, n: int) -> _Rows:
    """Return the array, copied if it does not consist of contiguous rows, and its row stride."""
    stride: int | None = n
    if not array.flags.c_contiguous:
        stride = row_stride(array.shape, array.strides, array.itemsize, k)
    return _Rows(_contiguous(array), n) if stride is None else _Rows(array, stride)


def _operand(array: Any) -> Any:
    """Return an array that the kernels take without strides, copied if it has some."""
    return array if array is None or array.flags.c_contiguous else _contiguous(array)


def _contiguous(array: Any) -> Any:
    # As integers: CuPy copies them whether or not it can compute with the dtype.
    bits = array.view(f"u{array.itemsize}")
    copy = cupy.array(bits, order="C")
    _keep_if_captured(copy, cupy.cuda.get_current_stream())
    return copy.view(array.dtype)


def _vector(x: str, n: int, rows: tuple[_Rows, ...], operands: tuple[Any, ...]) -> tuple[int, bool]:
    """Return how many elements one access moves, and whether no address makes them fewer.

    That is the largest power of two that divides a row, the strides and the addresses.
    """
    layout = n | pack_length(x)
    addresses = 0
    for row in rows:
        layout |= row.stride
        addresses |= row.array.data.ptr // row.array.itemsize
    for array in operands:
        if array is not None:
            addresses |= array.data.ptr // array.itemsize
    vector = (layout | addresses) & -(layout | addresses)
    return vector, vector == layout & -layout


def _name(array: Any) -> str | None:
    return None if array is None else DTYPES[array.dtype]


def _mask(array: Any, elements: int = 1) -> int:
    """Return the bits of an address that some elements leave at zero."""
    return 0 if array is None else elements * array.itemsize - 1


# ---- devices and scratch -------------------------------------------------------------------------

_get_device = cupy.cuda.runtime.getDevice
_get_current_stream = cupy.cuda.get_current_stream


def _on(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, unless it is."""
    if device == _get_device():
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)  # type: ignore[no-any-return]


# What launches that a CUDA graph captured have used beside their arguments. A replay uses it again,
# and nothing tells when the graph is gone.
_kept_by_graphs: list[Any] = []


def _keep_if_captured(memory: Any, stream: Any) -> None:
    if stream.is_capturing():
        _kept_by_graphs.append(memory)


# In `run` of a call each array is looked at in place: a function for it costs 20 ns more an array
# (CPython 3.11), and a backward call has seven.

# ---- forward -------------------------------------------------------------------------------------


class ForwardCall:
    """A forward pass over arrays of certain shapes, strides and dtypes, on a device."""

    def __init__(
        self,
        plan: ForwardPlan,
        vector: int,
        x: _Rows,
        weight: Any,
        bias: Any,
        y: _Rows,
        eps: float,
        kept: tuple[int, ...],
        relu: tuple[float, float] | None,
        statistics: str | None,
        centered: bool,
    ) -> None:
        m = math.prod(kept)
        lower, upper = (0.0, 0.0) if relu is None else relu
        self._launch = plan.prepared(m, to_eps(eps), lower, upper)
        self._scratch_bytes = plan.scratch_bytes(m)
        self._device = x.array.device.id
        self._shape, self._dtype = x.array.shape, y.array.dtype
        self._x_stride, self._y_stride = x.stride, y.stride
        self._x_mask, self._y_mask = _mask(x.array, vector), _mask(y.array, vector)
        self._weight_mask, self._bias_mask = _mask(weight, vector), _mask(bias, vector)
        self._kept = kept
        self._statistics = statistics  # the dtype, if they are stored
        self._centered = centered
        # The shape of what is stored with the statistics.
        self._bitmask = None if relu is None else (*kept, bitmask_bytes(plan.n))

    def run(self, x: Any, weight: Any, bias: Any, out: Any) -> Any:
        """Launch; return y, or NormForward where statistics are stored.

        None, before anything is launched, if it is another device that is current or that an array
        is on, or if an address is less aligned than those of the first call.
        """
        device = self._device
        if _get_device() != device:
            return None
        x_address = x.data.ptr
        misaligned = x_address & self._x_mask
        weight_address = bias_address = mean_address = rstd_address = bitmask_address = 0
        if weight is not None:
            data = weight.data
            if data.device_id != device:
                return None
            weight_address = data.ptr
            misaligned |= weight_address & self._weight_mask
        if bias is not None:
            data = bias.data
            if data.device_id != device:
                return None
            bias_address = data.ptr
            misaligned |= bias_address & self._bias_mask
        y = cupy.ndarray(self._shape, self._dtype) if out is None else out
        data = y.data
        y_address = data.ptr
        if misaligned or y_address & self._y_mask or data.device_id != device:
            return None
        result = y
        if self._statistics is not None:
            mean = bitmask = None
            if self._centered:
                mean = cupy.ndarray(self._kept, self._statistics)
                mean_address = mean.data.ptr
            rstd = cupy.ndarray(self._kept, self._statistics)
            rstd_address = rstd.data.ptr
            if self._bitmask is not None:
                bitmask = cupy.ndarray(self._bitmask, np.uint8)
                bitmask_address = bitmask.data.ptr
            result = NormForward(y, mean, rstd, bitmask)
        operands: tuple[int, ...] = (
            x_address,
            self._x_stride,
            weight_address,
            bias_address,
            y_address,
            self._y_stride,
            mean_address,
            rstd_address,
            bitmask_address,
        )
        stream = _get_current_stream()
        if self._scratch_bytes:
            scratch = cupy.cuda.alloc(self._scratch_bytes)
            _keep_if_captured(scratch, stream)
            operands += (scratch.ptr,)
        self._launch(stream.ptr, operands)
        return result


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
) -> tuple[Any, ForwardCall | None]:
    """Launch a forward pass over the last k axes of x.

    Returns
    -------
    array or NormForward
        NormForward if the statistics are stored, else y.
    ForwardCall or None
        What serves arrays like these again; None if some were copied or are poorly aligned.
    """
    kept = x.shape[: x.ndim - k]
    n = math.prod(x.shape[x.ndim - k :])
    device = x.device.id
    with _on(device):
        y = _rows(cupy.ndarray(x.shape, out_dtype) if out is None else out, k, n)
        rows, scale, shift = _rows(x, k, n), _operand(weight), _operand(bias)
        spec = ForwardSpec(
            norm=norm,
            x=DTYPES[x.dtype],
            weight=_name(weight),
            bias=_name(bias),
            y=DTYPES[y.array.dtype],
            zero_centered=bool(zero_centered),
            store_statistics=store_statistics,
            relu=relu is not None,
        )
        vector, aligned = _vector(spec.x, n, (rows, y), (scale, shift))
        call = ForwardCall(
            forward_plan(spec, math.prod(kept), n, vector, device),
            vector,
            rows,
            scale,
            shift,
            y,
            eps,
            kept,
            relu,
            compute_dtype(spec.x) if store_statistics else None,
            norm == "layer_norm",
        )
        result = call.run(rows.array, scale, shift, y.array)
    in_place = rows.array is x and scale is weight and shift is bias
    return result, call if aligned and in_place else None


# ---- backward ------------------------------------------------------------------------------------


class BackwardCall:
    """A backward pass over arrays of certain shapes, strides and dtypes, on a device."""

    def __init__(
        self,
        plan: BackwardPlan,
        vector: int,
        dy: _Rows,
        x: _Rows,
        weight: Any,
        mean: Any,
        rstd: Any,
        bias: Any,
        dx: _Rows,
        dbias: tuple[tuple[int, ...], Any] | None,
        m: int,
    ) -> None:
        self._launch = plan.prepared(m)
        self._scratch_bytes = plan.scratch_bytes(m)
        self._device = x.array.device.id
        self._shape, self._dtype = x.array.shape, x.array.dtype
        self._dbias = dbias  # shape and dtype
        self._dy_stride, self._x_stride, self._dx_stride = dy.stride, x.stride, dx.stride
        self._dy_mask, self._x_mask = _mask(dy.array, vector), _mask(x.array, vector)
        self._dx_mask, self._weight_mask = _mask(dx.array, vector), _mask(weight, vector)
        self._statistics_mask, self._bias_mask = _mask(rstd), _mask(bias)

    def run(
        self,
        dy: Any,
        x: Any,
        weight: Any,
        mean: Any,
        rstd: Any,
        bias: Any,
        bitmask: Any,
        dx: Any,
    ) -> Any:
        """Launch; return NormBackward, or None as a ForwardCall does. `bias`: an array or None."""
        device = self._device
        if _get_device() != device:
            return None
        x_address = x.data.ptr
        dy_data, rstd_data = dy.data, rstd.data
        if dy_data.device_id != device or rstd_data.device_id != device:
            return None
        dy_address, rstd_address = dy_data.ptr, rstd_data.ptr
        misaligned = (
            x_address & self._x_mask
            | dy_address & self._dy_mask
            | rstd_address & self._statistics_mask
        )
        weight_address = mean_address = bitmask_address = 0
        dweight_address = dbias_address = scratch_address = 0
        if weight is not None:
            data = weight.data
            if data.device_id != device:
                return None
            weight_address = data.ptr
            misaligned |= weight_address & self._weight_mask
        if mean is not None:
            data = mean.data
            if data.device_id != device:
                return None
            mean_address = data.ptr
            misaligned |= mean_address & self._statistics_mask
        if bias is not None:  # only its shape and dtype serve, but it is an argument
            data = bias.data
            if data.device_id != device:
                return None
            misaligned |= data.ptr & self._bias_mask
        if bitmask is not None:
            data = bitmask.data
            if data.device_id != device:
                return None
            bitmask_address = data.ptr
        if dx is None:
            dx = cupy.ndarray(self._shape, self._dtype)
        data = dx.data
        dx_address = data.ptr
        if misaligned or dx_address & self._dx_mask or data.device_id != device:
            return None
        dweight = dbias = None
        if weight is not None:
            dweight = cupy.ndarray(weight.shape, weight.dtype)
            dweight_address = dweight.data.ptr
        if self._dbias is not None:
            dbias = cupy.ndarray(*self._dbias)
            dbias_address = dbias.data.ptr
        stream = _get_current_stream()
        if self._scratch_bytes:
            scratch = cupy.cuda.alloc(self._scratch_bytes)
            scratch_address = scratch.ptr
            _keep_if_captured(scratch, stream)
        operands = (
            dy_address,
            self._dy_stride,
            x_address,
            self._x_stride,
            weight_address,
            mean_address,
            rstd_address,
            bitmask_address,
            dx_address,
            self._dx_stride,
            dweight_address,
            dbias_address,
            scratch_address,
        )
        self._launch(stream.ptr, operands)
        return NormBackward(dx, dweight, dbias)


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
) -> tuple[NormBackward, BackwardCall | None]:
    """Launch a backward pass over the last k axes of x; `bias` is a bool or an array.

    Returns
    -------
    NormBackward
        The gradients.
    BackwardCall or None
        What serves arrays like these again; None if some were copied or are poorly aligned.
    """
    n = math.prod(x.shape[x.ndim - k :])
    device = x.device.id
    like = None if isinstance(bias, bool) else bias
    dbias = None
    if bias is True:
        shape = x.shape[x.ndim - k :] if weight is None else weight.shape
        dbias = shape, (x if weight is None else weight).dtype
    elif like is not None:
        dbias = like.shape, like.dtype
    with _on(device):
        target = _rows(cupy.ndarray(x.shape, x.dtype) if dx is None else dx, k, n)
        rows, gradient = _rows(x, k, n), _rows(dy, k, n)
        operands = _operand(weight), _operand(mean), _operand(rstd)
        bits = _operand(bitmask)
        spec = BackwardSpec(
            norm=norm,
            x=DTYPES[x.dtype],
            dy=DTYPES[dy.dtype],
            weight=_name(weight),
            dbias=None if dbias is None else DTYPES[dbias[1]],
            zero_centered=bool(zero_centered),
            bitmask=bitmask is not None,
        )
        vector, aligned = _vector(spec.x, n, (rows, gradient, target), operands[:1])
        call = BackwardCall(
            backward_plan(spec, x.size // n, n, vector, device, dx_given=dx is not None),
            vector,
            gradient,
            rows,
            *operands,
            like,
            target,
            dbias,
            x.size // n,
        )
        result = call.run(gradient.array, rows.array, *operands, like, bits, target.array)
    given = dy, x, weight, mean, rstd, bitmask
    taken = gradient.array, rows.array, *operands, bits
    in_place = all(a is b for a, b in zip(given, taken, strict=True))
    return result, call if aligned and in_place else None
