"""RMSNorm and LayerNorm inside JAX's programs.

The functions of `cupynorm` of the same names, under `jit`, `grad`, `vmap`, `scan`, `checkpoint`,
`shard_map`, and on arrays sharded over a mesh of Auto or Explicit axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cupynorm import _checks
from cupynorm._arrays import DTYPES
from cupynorm._spec import ForwardSpec, Norm, compute_dtype
from cupynorm.jax._derivatives import differentiable

__all__ = ["layer_norm", "rms_norm"]

Axis = int | Sequence[int] | None


def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    out_dtype: Any = None,
) -> jax.Array:
    return _norm("rms_norm", x, weight, bias, eps, axis, zero_centered, out_dtype)


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    out_dtype: Any = None,
) -> jax.Array:
    return _norm("layer_norm", x, weight, bias, eps, axis, zero_centered, out_dtype)


def _norm(
    norm: Norm,
    x: Any,
    weight: Any,
    bias: Any,
    eps: float,
    axis: Axis,
    zero_centered: bool,
    out_dtype: Any,
) -> Any:
    x = _array("x", x)
    weight = None if weight is None else _array("weight", weight)
    bias = None if bias is None else _array("bias", bias)
    k, y = _checks.check_forward(
        _outline(x),
        _outline(weight),
        _outline(bias),
        eps=eps,
        axis=axis,
        zero_centered=zero_centered,
        out_dtype=out_dtype,
        out=None,
    )
    if jnp.zeros((), y).dtype != y:
        raise TypeError(f"out_dtype must be enabled by jax_enable_x64, got {y}")
    spec = ForwardSpec(
        norm=norm,
        x=DTYPES[x.dtype],
        weight=None if weight is None else DTYPES[weight.dtype],
        bias=None if bias is None else DTYPES[bias.dtype],
        y=DTYPES[y],
        zero_centered=bool(zero_centered),
        store_statistics=False,
    )
    arrays = _over_one_mesh(k, (x, weight, bias))
    return _split_as(x, differentiable(spec, k, float(eps))(*arrays))


def _array(name: str, array: Any) -> Any:
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(
            f"{name} must be a JAX or NumPy array, got {type(array).__module__.split('.')[0]}."
            f"{type(array).__qualname__}"
        )
    return jnp.asarray(array)


def _outline(array: Any) -> Any:
    """Return a NumPy array of the same shape and dtype that holds one element, to be checked."""
    return None if array is None else np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _over_one_mesh(k: int, arrays: tuple[Any, Any, Any]) -> list[Any]:
    """Return x, weight and bias with whole rows on each device, and varying over the same axes.

    Their types say so where a mesh has Explicit axes, and within shard_map. JAX undoes it in the
    gradients, and can do so only here, outside of custom_vjp.
    """
    varying = frozenset().union(*(_varying(a) for a in arrays if a is not None))
    x, weight, bias = (a if a is None else _with_whole_rows(a, k) for a in arrays)
    # The gradients of these two are summed over the devices: in the compute dtype or wider.
    weight, bias = (
        a
        if a is None or varying == _varying(a)
        else a.astype(jnp.promote_types(a.dtype, compute_dtype(DTYPES[x.dtype])))
        for a in (weight, bias)
    )
    return [
        a if a is None else jax.lax.pcast(a, tuple(varying - _varying(a)), to="varying")
        for a in (x, weight, bias)
    ]


def _varying(array: Any) -> Any:
    """Return the axes of a surrounding shard_map over which an array varies, if it is tracked."""
    return jax.typeof(array).manual_axis_type.varying


def _with_whole_rows(array: Any, k: int) -> Any:
    kept = jax.typeof(array).sharding.spec[: array.ndim - k]
    return _split_as(array, array, PartitionSpec(*kept, *k * (None,)))


def _split_as(like: Any, array: Any, spec: PartitionSpec | None = None) -> Any:
    """Return the array split over an Explicit mesh as another one is, or by a spec of its own."""
    sharding = jax.typeof(like).sharding
    spec = sharding.spec if spec is None else spec
    if jax.typeof(array).sharding.spec == spec:
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))
