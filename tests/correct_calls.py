"""Correct calls of the functions that take NumPy arrays. Tests make one argument wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupynorm

FORWARD = (
    cupynorm.rms_norm,
    cupynorm.layer_norm,
    cupynorm.rms_norm_forward,
    cupynorm.layer_norm_forward,
)
BACKWARD = (cupynorm.rms_norm_backward, cupynorm.layer_norm_backward)
every_function = pytest.mark.parametrize("function", FORWARD + BACKWARD, ids=lambda f: f.__name__)

SHAPE = (2, 3, 4)
ARRAYS = (
    *("dy", "x", "residual", "dresidual_out", "weight", "bias", "mean", "rstd", "bitmask"),
    *("out", "dx", "residual_out"),
)
ALL_DTYPES = ("float64", "float32", "float16", "bfloat16")


def parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def correct(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a correct call's arrays. Outputs hold a value that no result has."""
    rng = np.random.default_rng(0)
    shapes = {"weight": SHAPE[-1:], "bias": SHAPE[-1:], "mean": SHAPE[:-1], "rstd": SHAPE[:-1]}
    arrays = {name: rng.random(shapes.get(name, SHAPE), np.float32) for name in ARRAYS}
    arrays["bitmask"] = rng.integers(0, 16, (2, 3, 1), np.uint8)
    arrays["out"][...] = arrays["dx"][...] = arrays["residual_out"][...] = 777
    return {name: arrays[name] for name in parameters(function) if name in arrays}


def zeros(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)
