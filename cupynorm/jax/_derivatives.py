"""The norm as a function that JAX differentiates, in reverse, as often as one likes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax

from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Options, compute_dtype
from cupynorm.jax import _formula
from cupynorm.jax._operations import Operation, split_as
from cupynorm.jax._refusals import in_reverse

__all__ = ["differentiable", "wide"]


@functools.cache
def differentiable(spec: ForwardSpec, options: Options) -> Any:
    """Return y as a function of x, (weight, bias), and these two widened; None if not in the spec.

    The first derivative is the backward kernel, on what the forward one stored for it; further
    ones are those of the formula, in jax.numpy. It is with respect to the widened: what sums over
    devices, or over a batch, does so before a gradient is rounded to a narrower dtype. As given,
    weight and bias are what the forward kernel reads, and count as constants.
    """
    storing_nothing = Operation(spec, options)
    storing = Operation(replace(spec, store_statistics=True), options)
    backward_spec = BackwardSpec(
        norm=spec.norm,
        x=spec.x,
        dy=spec.y,
        weight=wide(spec.x, spec.weight),
        dbias=wide(spec.x, spec.bias),
        zero_centered=spec.zero_centered,
        bitmask=spec.relu,
    )
    backward = Operation(backward_spec, options)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def infer(x: Any, affine: Any, widened: Any) -> Any:
        (y,) = storing_nothing(*_present(x, *affine))
        return y

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def train(x: Any, affine: Any, widened: Any) -> tuple[Any, tuple[Any, ...]]:
        y, *stored = storing(*_present(x, *affine))
        return y, tuple(stored)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def gradients(dy: Any, x: Any, weight: Any, stored: Any) -> tuple[Any, tuple[Any, Any]]:
        dx, *sums = backward(*_present(dy, x, weight, *stored))
        dweight = None if spec.weight is None else sums.pop(0)
        return dx, (dweight, *(sums or [None]))

    def infer_forward(x: Any, affine: Any, widened: Any) -> tuple[Any, Any]:
        y, stored = train(x, affine, widened)
        return y, (x, widened[0], stored)

    def infer_backward(given: Any, dy: Any) -> tuple[Any, ...]:
        # JAX takes a dy that is not split as y is, such as one that is not on y's Explicit mesh.
        dx, sums = gradients(split_as(given[0], dy), *given)
        return dx, None, sums

    def train_forward(x: Any, affine: Any, widened: Any) -> tuple[Any, Any]:
        y, given = infer_forward(x, affine, widened)
        return (y, given[-1]), given

    def train_backward(given: Any, cotangents: Any) -> tuple[Any, ...]:
        # Nothing comes back through what is stored: see gradients_backward.
        return infer_backward(given, cotangents[0])

    def gradients_forward(*arrays: Any) -> tuple[Any, Any]:
        return gradients(*arrays), arrays

    def gradients_backward(given: Any, cotangents: Any) -> tuple[Any, ...]:
        # As functions of x, of which the statistics were computed. The bitmask is a step function.
        *arrays, stored = given
        bitmask = stored[-1] if spec.relu else None
        formula = functools.partial(_formula.backward_of_x, backward_spec, options, bitmask)
        _, pull_back = jax.vjp(formula, *arrays)
        return *pull_back((cotangents[0], *cotangents[1])), None

    infer.defvjp(infer_forward, infer_backward)
    train.defvjp(train_forward, train_backward)
    gradients.defvjp(gradients_forward, gradients_backward)

    def norm(x: Any, affine: Any, widened: Any) -> Any:
        return infer(in_reverse(x), affine, jax.tree.map(in_reverse, widened))

    return jax.jit(norm, inline=True)


def wide(x: str, dtype: str | None) -> str | None:
    """Return the wider of a dtype and that which rows of x are computed in."""
    return dtype and max(compute_dtype(x), dtype, key=ITEMSIZE.__getitem__)


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple(array for array in arrays if array is not None)
