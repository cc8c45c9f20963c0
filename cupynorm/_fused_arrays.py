"""CuPy's arrays, as the kernels of norms of `cupynorm.fuse` take them."""

from __future__ import annotations

from typing import Any

import cupy

from cupynorm._arrays import dtype_name, rounded, sum_to_shape, to_numpy
from cupynorm._calls import contiguous, keep_if_captured, kept_if_captured, on

__all__ = ["CuPyMemory"]

# A call looks these up.
_ndarray = cupy.ndarray
_get_current_stream = cupy.cuda.get_current_stream


class CuPyMemory:
    """CuPy's arrays, as `_fused_calls` takes them."""

    def dtype(self, array: Any) -> str:
        return dtype_name(array.dtype)

    def strides(self, array: Any) -> tuple[int, ...]:
        return tuple(stride // array.itemsize for stride in array.strides)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return _ndarray(shape, to_numpy(dtype))

    def scratch(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return _kept(self.empty(shape, dtype, like))

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

    def signature(self, array: Any) -> Any:
        if type(array) is not _ndarray:
            return None
        return array.dtype, array.shape, array.strides, array.data.device_id

    def device(self, array: Any) -> int:
        return int(array.data.device_id)

    def on(self, device: int) -> Any:
        return on(device)

    def stream(self, device: int) -> int:
        return int(_get_current_stream().ptr)


def _kept(array: Any) -> Any:
    """Return an array, which a CUDA graph that is being captured keeps."""
    keep_if_captured(array, _get_current_stream())
    return array
