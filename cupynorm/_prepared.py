"""Calls on CuPy arrays that were made before, by all that was looked at when they were.

A key holds everything that checking and preparing a call depends on, but for what a call looks at
again: the addresses, the devices of the arrays beside x, and the current device. What is not of
the plainest kind has no key, and takes the way of a first call: a value may equal another one that
is accepted, and yet be refused, as False equals 0.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

__all__ = ["backward_key", "calls", "forward_key", "remember"]

# Each number of rows is a call of its own. A key and its call take some 4 kB, of a backward pass up
# to 7.
MOST_CALLS = 4096

calls: dict[Hashable, Any] = {}

_NUMBERS = frozenset((float, int))
_INTS = frozenset((int,))


def remember(calls: dict[Any, Any], key: Any, call: Any) -> Any:
    """Keep a call for the next one that has its key, and return it."""
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[key] = call
    return call


def _is_tuple_of_ints(axis: Any) -> bool:
    return type(axis) is tuple and _INTS.issuperset(map(type, axis))


def forward_key(
    array_type: type[Any],
    norm: str,
    x: Any,
    weight: Any,
    bias: Any,
    eps: Any,
    axis: Any,
    zero_centered: Any,
    relu: Any,
    out_dtype: Any,
    out: Any,
    store_statistics: bool,
) -> Hashable:
    """Return the key of a forward call whose arrays are of this very type, or None."""
    if (
        type(x) is not array_type
        or not (weight is None or type(weight) is array_type)
        or not (bias is None or type(bias) is array_type)
        or not (out is None or type(out) is array_type)
        or type(eps) is not float
        or not (axis is None or type(axis) is int or _is_tuple_of_ints(axis))
        or type(zero_centered) is not bool
        or not (relu is None or (type(relu) is tuple and _NUMBERS.issuperset(map(type, relu))))
        or not (out_dtype is None or isinstance(out_dtype, np.dtype | str | type))
    ):
        return None
    return (
        norm,
        store_statistics,
        x.data.device_id,
        x.dtype,
        x.shape,
        x.strides,
        None if weight is None else (weight.dtype, weight.shape, weight.strides),
        None if bias is None else (bias.dtype, bias.shape, bias.strides),
        eps,
        axis,
        zero_centered,
        relu,
        out_dtype,
        None if out is None else (out.dtype, out.shape, out.strides),
    )


def backward_key(
    array_type: type[Any],
    norm: str,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bias: Any,
    bitmask: Any,
    axis: Any,
    zero_centered: Any,
    dx: Any,
) -> Hashable:
    """Return the key of a backward call whose arrays are of this very type, or None."""
    if (
        type(x) is not array_type
        or type(dy) is not array_type
        or not (weight is None or type(weight) is array_type)
        or not (mean is None or type(mean) is array_type)
        or type(rstd) is not array_type
        or not (bias is None or type(bias) is bool or type(bias) is array_type)
        or not (bitmask is None or type(bitmask) is array_type)
        or not (dx is None or type(dx) is array_type)
        or not (axis is None or type(axis) is int or _is_tuple_of_ints(axis))
        or type(zero_centered) is not bool
    ):
        return None
    return (
        norm,
        x.data.device_id,
        x.dtype,
        x.shape,
        x.strides,
        dy.dtype,
        dy.shape,
        dy.strides,
        None if weight is None else (weight.dtype, weight.shape, weight.strides),
        None if mean is None else (mean.dtype, mean.shape, mean.strides),
        rstd.dtype,
        rstd.shape,
        rstd.strides,
        bias if bias is None or type(bias) is bool else (bias.dtype, bias.shape, bias.strides),
        None if bitmask is None else (bitmask.dtype, bitmask.shape, bitmask.strides),
        axis,
        zero_centered,
        None if dx is None else (dx.dtype, dx.shape, dx.strides),
    )
