"""weight and bias, and their gradients, as arrays that broadcast to x by NumPy's rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cupynorm._groups import common_shape

__all__ = ["as_rows", "for_each", "readable", "sum_to"]


def as_rows(array: Any, ndim: int) -> Any:
    """Return a vector with as many axes as rows, since JAX may be told not to add any."""
    return jnp.expand_dims(array, tuple(range(ndim - array.ndim)))


def for_each(vectors: Any, ndim: int) -> Any:
    """Return a vector for each example, as they broadcast over examples of so many axes."""
    return jnp.expand_dims(vectors, tuple(range(1, ndim + 2 - vectors.ndim)))


def readable(x_shape: tuple[int, ...], k: int, vectors: Mapping[str, Any]) -> dict[str, Any]:
    """Return vectors by name, in one shape that kernels can read: see `cupynorm._groups`."""
    ndim = len(x_shape)
    common = common_shape(x_shape, k, [vector.shape for vector in vectors.values()])
    return {
        name: vector
        if (1,) * (ndim - vector.ndim) + vector.shape == common
        else jnp.broadcast_to(as_rows(vector, ndim), common)
        for name, vector in vectors.items()
    }


def sum_to(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the sum over the axes along which a vector of this shape was repeated."""
    if array.shape == shape:
        return array
    added = array.ndim - len(shape)
    repeated = [i for i in range(added, array.ndim) if shape[i - added] == 1]
    total = jnp.sum(array, (*range(added), *repeated), keepdims=True)
    return jax.lax.squeeze(total, tuple(range(added)))
