"""Calls of a `cupynorm.Fused` on JAX arrays: XLA fuses what is around a norm of this package."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cupynorm.jax
from cupynorm._arrays import is_number, to_numpy
from cupynorm._expressions import functions, kind_of
from cupynorm._fuse import Fused, Given, Options, Tools

__all__ = ["call"]


def call(fused: Fused, given: Given, options: Options) -> tuple[jax.Array, ...]:
    """Return the outputs."""
    for name, array in (("weight", given.weight), ("bias", given.bias), *given.inputs.items()):
        if not (array is None or is_number(array) or isinstance(array, jax.Array | np.ndarray)):
            raise TypeError(f"{name} must be a JAX or NumPy array, as x is; got {kind_of(array)}")
    inputs = {name: _as_jax(array) for name, array in given.inputs.items()}
    given = given._replace(inputs=inputs)
    compute = fused.check(given, options)
    dtypes = fused.dtypes_of_outputs(given.x.dtype, options.out_dtype)
    return fused.apply(_TOOLS, given, options, compute, dtypes)[0]


def _as_jax(array: Any) -> Any:
    """Return an input as an array, or a number. An integer that jit traces counts as a number."""
    if is_number(array):
        return array
    array = jnp.asarray(array)  # float64 only if JAX has it enabled
    is_integer = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
    return jax.lax.stop_gradient(array.astype(jnp.float32)) if is_integer else array


def _cast(values: Any, dtype: str) -> jax.Array:
    return jnp.asarray(values).astype(to_numpy(dtype))


def _normalize(norm: str, x: jax.Array, *vectors: Any, **options: Any) -> tuple[Any, Any, Any]:
    function = cupynorm.jax.rms_norm if norm == "rms_norm" else cupynorm.jax.layer_norm
    return function(x, *vectors, **options), None, None


def _stored(value: jax.Array, dtype: str) -> jax.Array:
    """Round a value, by an addition that is exact if the result is finite."""
    # Without the barrier, XLA may leave out a cast to a narrower dtype and back.
    rounded = jax.lax.optimization_barrier(_cast(value, dtype)).astype(value.dtype)
    return value + jax.lax.stop_gradient(rounded - value)


_TOOLS = Tools(
    functions(
        jnp,
        erf=jax.scipy.special.erf,
        erfc=jax.scipy.special.erfc,
        # JAX would differentiate the formulas of these to NaN where exp overflows.
        sigmoid=jax.nn.sigmoid,
        softplus=jax.nn.softplus,
        abs=lambda a: a * jnp.sign(a),  # JAX's own has a derivative of 1 at 0
    ),
    widen=_cast,
    cast=_cast,
    copy=lambda array: array,
    number=lambda value, like: jnp.full((), float(value), like.dtype),
    broadcast=lambda values, like: jnp.broadcast_to(values, like.shape),
    stored=_stored,
    normalize=_normalize,
)
