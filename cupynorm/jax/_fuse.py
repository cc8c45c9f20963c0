"""Calls of a `cupynorm.Fused` on JAX arrays: by kernels, or by operations around a norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupynorm import _checks
from cupynorm._arrays import is_number, to_numpy
from cupynorm._expressions import kind_of
from cupynorm._fuse import Fused, Given, Options
from cupynorm._operation import Kind
from cupynorm._operation import Options as OptionsOfNorm
from cupynorm.jax import _formula
from cupynorm.jax._derivatives import wide
from cupynorm.jax._fusion import OPERATIONS, Fusion, Spec, differentiable, name_of_input
from cupynorm.jax._operations import explicit_split, split_as, split_of, varying_alike
from cupynorm.jax._vectors import as_rows

__all__ = ["call"]


def call(fused: Fused, given: Given, options: Options) -> tuple[jax.Array, ...]:
    """Return the outputs."""
    fused.check_names(given)
    inputs = {name: _opened(array) for name, array in given.inputs.items()}
    given = Given(given.x, _opened(given.weight), _opened(given.bias), inputs)
    for name, array in (("weight", given.weight), ("bias", given.bias), *given.inputs.items()):
        is_given = isinstance(array, jax.Array | np.ndarray)
        if not (array is None or is_given or (name in given.inputs and is_number(array))):
            number = "a number or " if name in given.inputs else ""
            raise TypeError(
                f"{name} must be {number}a JAX or NumPy array, as x is; got {kind_of(array)}"
            )
    inputs = {name: _as_jax(name, array) for name, array in given.inputs.items()}
    has_float64 = given.x.dtype == jnp.float64 or any(map(_is_float64, inputs.values()))
    inputs = {name: _strong(array, has_float64) for name, array in inputs.items()}
    vectors = {
        name: array if array is None else _as_jax(name, array)
        for name, array in (("weight", given.weight), ("bias", given.bias))
    }
    given = given._replace(inputs=inputs, **vectors)
    compute = fused.check(given, options)
    dtypes = fused.dtypes_of_outputs(given.x.dtype, options.out_dtype)
    outputs = _by_kernels(fused, given, options, compute, dtypes)
    if outputs is not None:
        return outputs
    return fused.apply(OPERATIONS, given, options, compute, dtypes)[0]


def _opened(array: Any) -> Any:
    """Return the array of an object that holds one, such as an `nnx.Param`."""
    is_open = isinstance(array, jax.Array) or not hasattr(array, "__jax_array__")
    return array if is_open else array.__jax_array__()


def _as_jax(name: str, array: Any) -> Any:
    """Return an argument as an array, or a number."""
    if is_number(array):
        return array
    return _formula.from_numpy(name, array) if isinstance(array, np.ndarray) else array


def _is_float64(array: Any) -> bool:
    return not is_number(array) and array.dtype == jnp.float64 and not jax.typeof(array).weak_type


def _strong(array: Any, has_float64: bool) -> Any:
    """Return an input. A number that jit traces has JAX's widest dtype, which says nothing.

    An integer that it traces counts as a number.
    """
    if is_number(array):
        return array
    is_integer = array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer)
    is_weak = jnp.issubdtype(array.dtype, jnp.floating) and jax.typeof(array).weak_type
    if not (is_integer or is_weak):
        return array
    strong = array.astype(jnp.float64 if has_float64 else jnp.float32)
    return jax.lax.stop_gradient(strong) if is_integer else strong


def _by_kernels(
    fused: Fused, given: Given, options: Options, compute: str, dtypes: tuple[str, ...]
) -> tuple[jax.Array, ...] | None:
    """Return the outputs of an operation that has kernels, None if they do not serve the call."""
    x = given.x
    axes = _checks.normalized_axes(x.ndim, options.axis)
    k = len(axes)
    if axes != tuple(range(x.ndim - k, x.ndim)) or any(map(jax.export.is_symbolic_dim, x.shape)):
        return None
    named = {"x": x, "weight": given.weight, "bias": given.bias, **given.inputs}
    arrays = {}
    constant = []
    for name, array in named.items():
        if array is None:
            continue
        place = name_of_input(name)
        is_constant = is_number(array) or array.dtype == bool
        whole = jnp.full((), float(array), compute) if is_number(array) else array
        arrays[place] = as_rows(whole, x.ndim)
        constant += [place] if is_constant else []
    # Of a lone row, all but x are vectors: vmap may share them.
    inputs = [place for place, array in arrays.items() if array.shape == x.shape and x.ndim > k]
    rows = {"x", *inputs} - {"weight", "bias"}
    kinds = {place: Kind.ROWS if place in rows else Kind.VECTOR for place in arrays}
    spec = Spec(fused, compute, tuple(kinds.items()), tuple(constant), dtypes)
    told = OptionsOfNorm(fused.norm, k, bool(options.zero_centered), float(fused.eps(options)))
    operation = Fusion(spec, told)
    if not operation.is_served(tuple(arrays.values())):
        return None
    given_arrays = {n: a for n, a in named.items() if not (a is None or is_number(a))}
    asked = [(f"{name}.dtype", array.dtype) for name, array in given_arrays.items()]
    for name, dtype in (*asked, *(("out_dtype", to_numpy(dtype)) for dtype in dtypes)):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(f"{name} must be one that JAX has enabled, got {dtype} without x64")
    # Sums over what a vector was broadcast to come before the rounding to a narrower dtype.
    widened = {
        name: _formula.cast(arrays[name], wide(compute, arrays[name].dtype.name))
        for name, kind in kinds.items()
        if kind is Kind.VECTOR and name not in constant
    }
    like, split = explicit_split(k, *(arrays[n] for n, kind in kinds.items() if kind is Kind.ROWS))
    places = [*arrays, *widened]
    whole = [
        split_as(like, a, split_of(kinds[name], a.shape, split[: x.ndim - k], x.ndim))
        for name, a in zip(places, (*arrays.values(), *widened.values()), strict=True)
    ]
    alike = varying_alike(whole)
    outputs = differentiable(operation)(
        dict(zip(arrays, alike, strict=False)),
        dict(zip(widened, alike[len(arrays) :], strict=True)),
    )
    return tuple(split_as(like, output, split) for output in outputs)
