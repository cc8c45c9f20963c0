"""The bitmask of a clamped ReLU: one bit an element, eight to a byte."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any, TypeVar, overload

import numpy as np

from cupynorm import _arrays
from cupynorm._operation import bitmask_bytes

__all__ = ["pack", "pack_bitmask", "unpack", "unpack_bitmask"]


_Array = TypeVar("_Array")


@overload
def pack_bitmask(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]: ...
@overload
def pack_bitmask(mask: _Array) -> _Array: ...
def pack_bitmask(mask: Any) -> Any:
    """Pack booleans into bits, eight to a byte, along the last axis.

    Element ``8 * j + b`` of a row is bit b of its byte j. Bit 0 is the least significant. The spare
    bits of the last byte are 0. `rms_norm_forward` and `layer_norm_forward` return such a
    ``bitmask``, and their backward functions take it. If several axes are normalized, a row is all
    of them in C order.

    Parameters
    ----------
    mask : array of bool, shape (..., N)
        A NumPy, CuPy or DLPack array.

    Returns
    -------
    array of uint8, shape (..., ceil(N / 8))
        Of mask's framework, on its device.

    Raises
    ------
    TypeError
        If mask is not an array, or not of bool.
    ValueError
        If mask has no axis.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> cupynorm.pack_bitmask(np.array([[True] * 9, [False] * 8 + [True]]))
    array([[255,   1],
           [  0,   1]], dtype=uint8)
    """
    family = _arrays.family_of("mask", mask).with_device_of(mask)
    mask = family.take("mask", mask, dtypes=("bool",))
    if mask.dtype != np.bool_:
        raise TypeError(f"mask.dtype must be bool, got {mask.dtype}")
    if mask.ndim == 0:
        raise ValueError("mask must have at least one axis, got a 0-dimensional array")
    with _arrays.on_device_of(mask):
        return family.give(pack(mask))


@overload
def unpack_bitmask(
    bitmask: np.ndarray[Any, Any], n: int
) -> np.ndarray[Any, np.dtype[np.bool_]]: ...
@overload
def unpack_bitmask(bitmask: _Array, n: int) -> _Array: ...
def unpack_bitmask(bitmask: Any, n: int) -> Any:
    """Unpack the bits of `pack_bitmask`, or of a forward pass, into booleans.

    Parameters
    ----------
    bitmask : array of uint8, shape (..., ceil(n / 8))
        A NumPy, CuPy or DLPack array. The spare bits of a row's last byte are ignored.
    n : int
        Elements of a row: the product of the normalized axes.

    Returns
    -------
    array of bool, shape (..., n)
        Of bitmask's framework, on its device.

    Raises
    ------
    TypeError
        If bitmask is not an array, or not of uint8. If n is not an int.
    ValueError
        If bitmask has no axis, or its last is not ``ceil(n / 8)`` long. If n is negative.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> cupynorm.unpack_bitmask(np.array([5], dtype=np.uint8), 4)
    array([ True, False,  True, False])
    """
    if not isinstance(n, numbers.Integral) or isinstance(n, bool):
        raise TypeError(f"n must be an int, got {n!r}")
    n = int(n)
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    family = _arrays.family_of("bitmask", bitmask).with_device_of(bitmask)
    bitmask = family.take("bitmask", bitmask, dtypes=("uint8",))
    if bitmask.dtype != np.uint8:
        raise TypeError(f"bitmask.dtype must be uint8, got {bitmask.dtype}")
    if bitmask.ndim == 0:
        raise ValueError("bitmask must have at least one axis, got a 0-dimensional array")
    if bitmask.shape[-1] != bitmask_bytes(n):
        raise ValueError(
            f"bitmask must have {bitmask_bytes(n)} bytes in each row of {n} bits, "
            f"got shape {bitmask.shape}"
        )
    with _arrays.on_device_of(bitmask):
        return family.give(unpack(bitmask, n))


def pack(mask: Any) -> Any:
    """Pack an array of NumPy or CuPy along the last axis."""
    *kept, n = mask.shape
    if _arrays.is_numpy(mask):
        # As two axes: NumPy packs at most 32.
        packed = np.packbits(mask.reshape(math.prod(kept), n), axis=1, bitorder="little")
        return packed.reshape(*kept, bitmask_bytes(n))
    import cupy

    packed = cupy.empty((*kept, bitmask_bytes(n)), np.uint8)
    return _kernels()[0](mask, n, bitmask_bytes(n), packed)


def unpack(bitmask: Any, n: int) -> Any:
    """Unpack n bits of an array of NumPy or CuPy along the last axis."""
    *kept, n_bytes = bitmask.shape
    if _arrays.is_numpy(bitmask):
        rows = bitmask.reshape(math.prod(kept), n_bytes)
        bits = np.unpackbits(rows, axis=1, count=n, bitorder="little")
        return bits.view(np.bool_).reshape(*kept, n)
    import cupy

    mask = cupy.empty((*kept, n), np.bool_)
    return _kernels()[1](bitmask, n, bitmask_bytes(n), mask)


# Both kernels begin with this: the first element of byte i, and how many it has.
_BYTE = """
    const long long column = i % n_bytes * 8;
    const long long first = i / n_bytes * n + column;
    const int count = column + 8 < n ? 8 : n - column;
"""


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Return CuPy's kernels that pack and unpack, with a thread for each byte.

    CuPy's own packbits and unpackbits know no axis, and packbits counts in 32 bits.
    """
    import cupy

    pack_bits = cupy.ElementwiseKernel(
        "raw bool mask, int64 n, int64 n_bytes",
        "uint8 packed",
        _BYTE
        + """
    unsigned int byte = 0;
    for (int bit = 0; bit < count; ++bit) byte |= (unsigned int)mask[first + bit] << bit;
    packed = byte;
""",
        "cupynorm_pack_bitmask",
    )
    unpack_bits = cupy.ElementwiseKernel(
        "uint8 byte, int64 n, int64 n_bytes",
        "raw bool mask",
        _BYTE + "for (int bit = 0; bit < count; ++bit) mask[first + bit] = byte >> bit & 1;",
        "cupynorm_unpack_bitmask",
    )
    return pack_bits, unpack_bits
