"""Fused RMSNorm and LayerNorm, forward and backward, for NumPy, CuPy, torch and JAX arrays."""

from cupynorm._bitmask import pack_bitmask, unpack_bitmask
from cupynorm._operation import NormBackward, NormForward
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
    "NormBackward",
    "NormForward",
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
