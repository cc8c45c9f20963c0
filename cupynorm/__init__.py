"""Fused RMSNorm and LayerNorm, forward and backward, for NumPy, CuPy, torch and JAX arrays."""

import importlib.util
from typing import TYPE_CHECKING, Any

from cupynorm import fused as fused
from cupynorm import math as math  # not in __all__: it would hide Python's
from cupynorm._bitmask import pack_bitmask, unpack_bitmask
from cupynorm._fuse import Fused, FusedForward, fuse
from cupynorm._operation import NormBackward, NormForward
from cupynorm._quantize import Quantize, dequantize
from cupynorm._warmup import kernel_source, supports, warmup
from cupynorm.norms import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)

__all__ = [
    "Fused",
    "FusedForward",
    "NormBackward",
    "NormForward",
    "Quantize",
    "dequantize",
    "fuse",
    "kernel_source",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "pack_bitmask",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "supports",
    "unpack_bitmask",
    "warmup",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cupynorm import jax as jax
    from cupynorm import testing as testing
    from cupynorm import torch as torch

_LATER = "jax", "testing", "torch"


def __getattr__(name: str) -> Any:
    """Import what needs a framework, or is seldom needed, on first use."""
    if name in _LATER:
        try:
            return importlib.import_module(f"cupynorm.{name}")
        except ImportError as error:  # hasattr and help expect no other error than this
            raise AttributeError(f"cupynorm.{name} cannot be imported: {error}") from error
    raise AttributeError(f"module 'cupynorm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "testing", *filter(importlib.util.find_spec, ("jax", "torch"))})
