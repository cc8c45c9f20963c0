"""Calls whose weight and bias vary over kept axes, or whose axes are not the last, and formulas.

The formulas are plain: they take any module that broadcasts as NumPy does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EPS = 0.1
RELU = (-0.5, 0.75)

# x, axis, weight, bias
CALLS: dict[str, tuple[tuple[int, ...], Any, Any, Any]] = {
    "per head": ((2, 3, 5, 8), None, (5, 8), (5, 8)),
    "a factor per head": ((2, 3, 5, 8), -1, (5, 1), None),
    "a factor a row, as many as columns": ((2, 4, 4), None, (4, 1), (4, 1)),
    "AdaLN": ((3, 5, 8), None, (3, 1, 8), (3, 1, 8)),
    "GroupNorm": ((2, 3, 4, 3, 2), (2, 3, 4), (3, 4, 1, 1), (3, 4, 1, 1)),
    "channels": ((2, 6, 3, 4), 1, (6, 1, 1), (6, 1, 1)),
    "channels, bias alone": ((2, 6, 3, 4), 1, None, (6, 1, 1)),
    "first axis": ((7, 5), 0, (7, 1), (7, 1)),
    "first axis, a weight per row": ((7, 5), 0, (5,), (7, 5)),
    "first and last axis": ((3, 4, 5), (0, 2), (3, 1, 5), (3, 1, 5)),
    "unlike axes": ((3, 4, 5), (0, -1), (4, 1), (3, 1, 1)),
}


def axes_of(case: str) -> tuple[int, ...]:
    shape, axis, _, _ = CALLS[case]
    axes = (-1,) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(sorted(a % len(shape) for a in axes))


def arrays_of(case: str, dtype: Any = np.float64) -> tuple[Any, ...]:
    """Return x, weight, bias, residual, and gradients of y and of the sum."""
    shape, _, *affine = CALLS[case]
    rng = np.random.default_rng(0)
    x, residual, dy, of_total = rng.standard_normal((4, *shape)).astype(dtype)
    weight, bias = (None if of is None else rng.standard_normal(of).astype(dtype) for of in affine)
    return x, weight, bias, residual, dy, of_total


def before_relu(xp: Any, norm: str, axes: tuple[int, ...], s: Any, weight: Any, bias: Any) -> Any:
    """Return xhat * weight + bias."""
    centred = s - (s.mean(axes, keepdims=True) if norm == "layer_norm" else 0)
    xhat = centred / xp.sqrt((centred * centred).mean(axes, keepdims=True) + EPS)
    return xhat * (1 if weight is None else weight) + (0 if bias is None else bias)
