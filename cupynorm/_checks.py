"""Validation of the arguments of the public functions: errors name the argument, what came and
what was expected, before anything is allocated or written.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynorm._arrays import BFLOAT16, DTYPES, device_of, is_numpy, row_stride
from cupynorm._bitmask import bitmask_bytes
from cupynorm._operation import compute_dtype

__all__ = [
    "check_backward",
    "check_forward",
    "check_numbers",
    "check_pair",
    "check_row",
    "check_zero_centered",
    "to_dtype",
    "to_eps",
    "trailing_axes",
]

_REAL = numbers.Real, BFLOAT16.type


def trailing_axes(
    x_ndim: int, axis: int | Sequence[int] | None, weight: Any = None, bias: Any = None
) -> int:
    """Return how many trailing axes of x are normalized; bias may be True or False."""
    if axis is None:
        if x_ndim == 0:
            raise ValueError("x must have at least one axis, got a 0-dimensional array")
        for name, array in (("weight", weight), ("bias", bias)):
            if getattr(array, "ndim", 1) != 1:
                shape = tuple(array.shape)
                raise ValueError(
                    f"{name} must have one axis where axis is None, got shape {shape}"
                    f"{_readings(name, shape, x_ndim)}"
                )
        return 1
    axes = axis if isinstance(axis, Sequence) else (axis,)
    if isinstance(axis, str | bytes) or not all(
        isinstance(a, numbers.Integral) and not isinstance(a, bool) for a in axes
    ):
        raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}")
    places = [int(a) + x_ndim if a < 0 else int(a) for a in axes]
    # Neither by sorting nor by `in`: torch.compile can do neither where an axis varies.
    last = range(x_ndim - len(axes), x_ndim)
    trailing = all(any(place == wanted for place in places) for wanted in last)
    if not 1 <= len(axes) <= x_ndim or not trailing:
        raise ValueError(
            f"axis must name trailing axes of x, such as -1 or (-2, -1); got {axis!r} for an x of "
            f"{x_ndim} axes"
        )
    return len(axes)


def _readings(name: str, shape: tuple[int, ...], x_ndim: int) -> str:
    """Say what a weight or bias may mean that has several axes, and what to pass for it."""
    count = len(shape)
    if count > 1 and set(shape[:-1]) == {1}:
        return f": pass axis=-1, or {name}.reshape(-1)"
    if not 1 < count <= x_ndim:
        return ""
    return (
        f": pass axis={tuple(range(-count, 0))} to normalize {count} axes together, or axis=-1 to "
        f"normalize the last alone, where a {name} that varies over the others, as one per head "
        "does, is not supported yet"
    )


def to_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """Return one of the four dtypes, from anything that names it, such as torch.bfloat16."""
    if isinstance(dtype, np.dtype) and dtype in DTYPES:
        return dtype
    candidates = () if dtype is None else (dtype, str(dtype).rpartition(".")[2])
    for candidate in candidates:  # NumPy takes None for float64
        try:
            converted: np.dtype[Any] = np.dtype(candidate)
        except (TypeError, ValueError, SyntaxError):
            continue
        if converted in DTYPES:
            return converted
    raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {dtype}")


def check_forward(
    x: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float,
    axis: int | Sequence[int] | None,
    zero_centered: bool,
    relu: Any,
    out_dtype: Any,
    out: Any,
) -> tuple[int, Any, tuple[float, float] | None]:
    """Check a forward pass; return the number of normalized axes, y's dtype and relu's bounds."""
    k = _check_operands(x, weight, bias, axis, zero_centered)
    bounds = check_numbers(np.dtype(compute_dtype(DTYPES[x.dtype])), eps, relu)
    dtype = x.dtype if out_dtype is None else to_dtype("out_dtype", out_dtype)
    if out is not None:
        if out_dtype is None:
            dtype = to_dtype("out.dtype", out.dtype)
        _check_like("out", out, x, x.shape, dtype)
        _check_writable("out", out, k)
    return k, dtype, bounds


def check_numbers(compute: np.dtype[Any], eps: Any, relu: Any) -> tuple[float, float] | None:
    """Check eps and the bounds of relu; return these, rounded to the compute dtype.

    A bound of -0.0 becomes 0.0: what is remembered by the bounds cannot tell them apart.
    """
    number = to_eps(eps)
    if not 0 <= number < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
    info = np.finfo(compute)
    if 0 < number < float(info.tiny) or number > float(info.max):
        raise ValueError(f"eps must be 0 or a normal {compute} number, got {eps!r}")
    if relu is None:
        return None
    check_pair(relu)
    with np.errstate(over="ignore"):
        lower, upper = (float(compute.type(_to_float(bound))) + 0.0 for bound in relu)
    if not lower < upper:
        raise ValueError(f"relu must be (lower, upper) with lower < upper as {compute}, got {relu}")
    return lower, upper


def to_eps(eps: Any) -> float:
    """Return eps as a float; -0.0 becomes 0.0, from which a row of zeros has rstd = inf."""
    if not isinstance(eps, _REAL) or isinstance(eps, bool):
        raise TypeError(f"eps must be a real number, got {eps!r}")
    return _to_float(eps) + 0.0


def check_pair(relu: Any) -> None:
    """Check that bounds are two numbers."""
    if (
        not isinstance(relu, Sequence)
        or len(relu) != 2
        or not all(isinstance(b, _REAL) and not isinstance(b, bool) for b in relu)
    ):
        raise TypeError(f"relu must be a pair of real numbers (lower, upper) or None, got {relu!r}")


def _to_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return -math.inf if str(number).startswith("-") else math.inf


def check_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any,
    bitmask: Any,
    axis: int | Sequence[int] | None,
    zero_centered: bool,
    dx: Any,
) -> int:
    """Check a backward pass; return the number of normalized axes."""
    k = _check_operands(x, weight, None if isinstance(bias, bool) else bias, axis, zero_centered)
    _check_like("dy", dy, x, x.shape, None)
    statistics = np.dtype(compute_dtype(DTYPES[x.dtype]))
    for name, array in (("mean", mean), ("rstd", rstd)):
        if array is not None:
            _check_like(name, array, x, x.shape[: x.ndim - k], statistics)
    if bitmask is not None:
        width = bitmask_bytes(math.prod(x.shape[x.ndim - k :]))
        _check_like("bitmask", bitmask, x, (*x.shape[: x.ndim - k], width), np.dtype(np.uint8))
    if dx is not None:
        _check_like("dx", dx, x, x.shape, x.dtype)
        _check_writable("dx", dx, k)
    return k


def _check_operands(
    x: Any, weight: Any, bias: Any, axis: int | Sequence[int] | None, zero_centered: bool
) -> int:
    to_dtype("x.dtype", x.dtype)
    _check_memory("x", x, x)
    check_zero_centered(zero_centered, has_weight=weight is not None)
    k = trailing_axes(x.ndim, axis, weight, bias)
    normalized = x.shape[x.ndim - k :]
    if 0 in normalized:
        raise ValueError(f"x must have at least one element in each row, got shape {x.shape}")
    for name, array in (("weight", weight), ("bias", bias)):
        if array is None:
            continue
        to_dtype(f"{name}.dtype", array.dtype)
        _check_memory(name, array, x)
        if axis is None and array.shape != normalized:
            raise ValueError(
                f"{name} must have the shape of x's normalized axes, {normalized}; got "
                f"{array.shape}"
            )
        check_row(name, array.shape, x.shape, k)
    return k


def check_row(name: str, shape: tuple[int, ...], x_shape: tuple[int, ...], k: int) -> None:
    """Check that a weight or bias has one row for all of x, apart from leading axes of 1."""
    normalized = x_shape[len(x_shape) - k :]
    if shape == normalized:
        return
    pairs = zip(reversed(shape), reversed(x_shape), strict=False)
    if len(shape) > len(x_shape) or not all(n == 1 or n == of_x for n, of_x in pairs):
        raise ValueError(f"{name} must broadcast to x's shape {x_shape}, got {shape}")
    if shape != (1,) * (len(shape) - k) + normalized:
        raise NotImplementedError(
            f"{name} of shape {shape} varies over the kept axes of x, or repeats over the "
            f"normalized ones, {normalized}: broadcasting weights are not supported yet"
        )


def check_zero_centered(zero_centered: Any, *, has_weight: bool) -> None:
    """Check an option by itself."""
    if not isinstance(zero_centered, bool | np.bool_):
        raise TypeError(f"zero_centered must be True or False, got {zero_centered!r}")
    if zero_centered and not has_weight:
        raise ValueError("zero_centered must be False without a weight, got True")


def _check_memory(name: str, array: Any, x: Any) -> None:
    if is_numpy(array) != is_numpy(x) or (not is_numpy(x) and array.device != x.device):
        raise ValueError(f"{name} must be on x's device, {device_of(x)}; got {device_of(array)}")
    if not is_numpy(array) and array.data.ptr % array.itemsize:
        raise ValueError(
            f"{name} must be aligned to its elements of {array.itemsize} bytes, "
            f"got address {array.data.ptr:#x}"
        )


def _check_like(name: str, array: Any, x: Any, shape: tuple[int, ...], dtype: Any) -> None:
    _check_memory(name, array, x)
    if dtype is None:
        to_dtype(f"{name}.dtype", array.dtype)
    elif array.dtype != dtype:
        raise TypeError(f"{name}.dtype must be {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")


def _check_writable(name: str, array: Any, k: int) -> None:
    if is_numpy(array):
        if not array.flags.writeable:
            raise ValueError(f"{name} must be writable, got a read-only array")
        if _overlaps_itself(array):
            raise ValueError(
                f"{name} must not overlap itself; got strides {array.strides} for shape "
                f"{array.shape} of {array.itemsize} bytes"
            )
        return
    if array.size == 0:
        return
    stride = row_stride(array.shape, array.strides, array.itemsize, k)
    n = math.prod(array.shape[array.ndim - k :])
    if stride is None or (array.size > n and abs(stride) < n):
        raise ValueError(
            f"{name} must hold contiguous rows that do not overlap, one stride apart; got strides "
            f"{array.strides} for shape {array.shape}"
        )


def _overlaps_itself(array: Any) -> bool:
    """Tell whether elements share memory."""
    if array.size == 0:
        return False
    axes = [(abs(step), n) for n, step in zip(array.shape, array.strides, strict=True) if n > 1]
    reach = array.itemsize  # of what the axes of smaller strides cover
    for step, n in sorted(axes):
        if step < reach:
            break
        reach += step * (n - 1)
    else:
        return False
    # Axes may interleave all the same.
    places = np.zeros(1, np.int64)
    for step, n in axes:
        places = np.add.outer(places, step * np.arange(n)).ravel()
    return bool(np.any(np.diff(np.sort(places)) < array.itemsize))
