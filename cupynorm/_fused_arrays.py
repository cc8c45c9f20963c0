"""CuPy's arrays, as the kernels of norms of `cupynorm.fuse` take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy

from cupynorm._arrays import dtype_name, is_number, rounded, sum_to_shape, to_numpy
from cupynorm._calls import CUPY, contiguous, keep_if_captured, kept_if_captured, on

__all__ = ["CuPyMemory"]

# A call looks these up.
_ndarray = cupy.ndarray
_alloc = cupy.cuda.alloc
_get_device = cupy.cuda.runtime.getDevice
_get_current_stream = cupy.cuda.get_current_stream
_is_number = is_number

_SIGNATURE = "({0}.dtype, {0}.shape, {0}.strides)"
_DIALECT = replace(
    CUPY,
    names=globals(),
    copy="{0} = {0}_copy({0})",
    accepts=CUPY.accepts | {None: "(type({0}) is _ndarray or _is_number({0}))"},
    signature=CUPY.signature | {None: f"({_SIGNATURE} if type({{0}}) is _ndarray else 0)"},
)


class CuPyMemory:
    """CuPy's arrays, as `_fused_calls` takes them."""

    dialect = _DIALECT

    def dtype(self, array: Any) -> str:
        return dtype_name(array.dtype)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(stride // array.itemsize for stride in array.strides)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def native(self, dtype: str) -> Any:
        return to_numpy(dtype)

    def kept(self, array: Any) -> Any:
        keep_if_captured(array, _get_current_stream())
        return array

    def contiguous(self, array: Any) -> Any:
        return array if array.flags.c_contiguous else contiguous(array)

    def cast(self, array: Any, dtype: str) -> Any:
        with kept_if_captured():
            return array.astype(dtype)

    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:
        return self.contiguous(cupy.broadcast_to(array, shape))

    def summed(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        with kept_if_captured():
            return rounded(cupy, sum_to_shape(array, shape), dtype)

    def device(self, array: Any) -> int:
        return int(array.data.device_id)

    def on(self, device: int) -> Any:
        return on(device)
