"""Quantized outputs of the norms within JAX programs: operations of jax.numpy, which XLA fuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupynorm import _quantize
from cupynorm._quantize import BLOCK_MX, MX_SCALE, Quantize

__all__ = ["dequantized", "quantized"]


def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "quantize has no gradient: call the norm on jax.lax.stop_gradient of its arguments"
    )


_without_gradient = jax.custom_jvp(lambda y: y)
_without_gradient.defjvp(_refuse)


def quantized(y: Any, axes: tuple[int, ...], quantize: Quantize, scale: Any) -> tuple[Any, ...]:
    """Return q, scale and, if it is asked for, amax. `scale` is a given one, or None."""
    y = _without_gradient(y)
    if scale is None:
        scale = _quantize.scales_of(jnp, y, axes, quantize)
    factor = _quantize.power_of(scale) if quantize.block == BLOCK_MX else scale
    factor = _quantize.expanded(jnp, factor, y.shape, quantize.block)
    # XLA would multiply by one over a number that it knows. NaN over one is NaN, too.
    factor = jnp.where(jnp.isnan(y), np.float32(1), factor)
    q = _quantize.codes_of(jnp, y, factor, quantize.dtype).view(np.dtype(quantize.dtype))
    amax = (_quantize.amax_of(jnp, y),) if quantize.amax else ()
    return q, scale.view(np.dtype(quantize.scale_dtype)), *amax


def dequantized(q: Any, scale: Any, dtype: str, block: int | None) -> jax.Array:
    """Return q * scale."""
    q = q.view(np.dtype(dtype)).astype(np.float32)
    factor = scale.view(np.dtype(MX_SCALE)).astype(np.float32) if block == BLOCK_MX else scale
    return q * _quantize.expanded(jnp, factor, q.shape, block)
