"""The bitmask of a clamped ReLU: one bit an element, eight to a byte."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any

import numpy as np

from cupynorm import _arrays

__all__ = ["bitmask_bytes", "pack", "pack_bitmask", "unpack", "unpack_bitmask"]


def bitmask_bytes(n: int) -> int:
    """Return the bytes of a row of n bits."""
    return -(-n // 8)


def pack_bitmask(mask: Any) -> Any:
    """Pack booleans into bits, eight to a byte, along the last axis.

    Element ``8 * j + b`` of a row is bit b of its byte j, bit 0 being the least significant; the
    spare bits of the last byte are 0. That is what `rms_norm_forward` and `layer_norm_forward`
    return, and what their backward functions take, as ``bitmask``; where several axes are
    normalized, a row is all of them in C order.

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
        If mask is no array, or not of bool.
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
    family = _arrays.family_of("mask", mask)
    mask = family.take("mask", mask, dtypes=("bool",))
    if mask.dtype != np.bool_:
        raise TypeError(f"mask.dtype must be bool, got {mask.dtype}")
    if mask.ndim == 0:
        raise ValueError("mask must have at least one axis, got a 0-dimensional array")
    with _device_of(mask):
        return family.give(pack(_module_of(mask), mask))


def unpack_bitmask(bitmask: Any, n: int) -> Any:
    """Unpack the bits of `pack_bitmask`, or of a forward pass, into booleans.

    Parameters
    ----------
    bitmask : array of uint8, shape (..., ceil(n / 8))
        A NumPy, CuPy or DLPack array; the spare bits of a row's last byte are ignored.
    n : int
        Elements of a row: the product of the normalized axes.

    Returns
    -------
    array of bool, shape (..., n)
        Of bitmask's framework, on its device.

    Raises
    ------
    TypeError
        If bitmask is no array, or not of uint8; if n is no int.
    ValueError
        If bitmask has no axis, or its last is not ``ceil(n / 8)`` long; if n is negative.

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
    family = _arrays.family_of("bitmask", bitmask)
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
    with _device_of(bitmask):
        return family.give(unpack(_module_of(bitmask), bitmask, n))


def pack(xp: Any, mask: Any) -> Any:
    """Pack along the last axis; xp is numpy or cupy."""
    # Not by xp.packbits: CuPy's knows no axis, and counts in 32 bits.
    packed = xp.zeros((*mask.shape[:-1], bitmask_bytes(mask.shape[-1])), np.uint8)
    for bit in range(8):
        part = mask[..., bit::8].astype(np.uint8)
        packed[..., : part.shape[-1]] |= part << np.uint8(bit)
    return packed


def unpack(xp: Any, bitmask: Any, n: int) -> Any:
    """Unpack n bits along the last axis; xp is numpy or cupy."""
    mask = xp.empty((*bitmask.shape[:-1], n), np.bool_)
    for bit in range(8):
        part = mask[..., bit::8]
        part[...] = bitmask[..., : part.shape[-1]] & np.uint8(1 << bit) != 0
    return mask


def _module_of(array: Any) -> Any:
    if _arrays.is_numpy(array):
        return np
    import cupy

    return cupy


def _device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if _arrays.is_numpy(array) else array.device
