"""The norm as a function that JAX differentiates, in reverse, as often as one likes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from cupynorm._spec import BackwardSpec, ForwardSpec
from cupynorm.jax import _formula
from cupynorm.jax._operations import Backward, Forward

__all__ = ["differentiable"]


@functools.cache
def differentiable(spec: ForwardSpec, k: int, eps: float) -> Any:
    """Return y as a function of x, weight and bias; an array that the spec lacks is None.

    The first derivative is the backward kernel, on statistics that the forward one stored; further
    ones are those of the formula, in jax.numpy.
    """
    without_statistics = Forward(spec, k, eps)
    with_statistics = Forward(replace(spec, store_statistics=True), k, eps)
    backward_spec = BackwardSpec(
        norm=spec.norm,
        x=spec.x,
        dy=spec.y,
        weight=spec.weight,
        dbias=spec.bias,
        zero_centered=spec.zero_centered,
    )
    backward = Backward(backward_spec, k, eps)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def infer(x: Any, weight: Any, bias: Any) -> Any:
        (y,) = without_statistics(*_present(x, weight, bias))
        return y

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def train(x: Any, weight: Any, bias: Any) -> tuple[Any, tuple[Any, ...]]:
        y, *statistics = with_statistics(*_present(x, weight, bias))
        return y, tuple(statistics)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def gradients(dy: Any, x: Any, weight: Any, statistics: tuple[Any, ...]) -> tuple[Any, ...]:
        dx, *sums = backward(*_present(x, dy, weight, *statistics))
        dweight = None if spec.weight is None else sums.pop(0)
        return dx, dweight, *(sums or [None])

    def infer_forward(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        y, statistics = train(x, weight, bias)
        return y, (x, weight, statistics)

    def infer_backward(stored: Any, dy: Any) -> Any:
        return gradients(dy, *stored)

    def train_forward(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        y, stored = infer_forward(x, weight, bias)
        return (y, stored[-1]), stored

    def train_backward(stored: Any, given: Any) -> Any:
        # Nothing comes back through the statistics: see gradients_backward.
        return infer_backward(stored, given[0])

    def gradients_forward(*arrays: Any) -> tuple[Any, Any]:
        return gradients(*arrays), arrays

    def gradients_backward(stored: Any, given: Any) -> tuple[Any, ...]:
        # As functions of x, which the statistics were computed from.
        *arrays, statistics = stored
        formula = functools.partial(_formula.backward_of_x, backward_spec, k, eps)
        _, pull_back = jax.vjp(formula, *arrays)
        return *pull_back(given), jax.tree.map(jnp.zeros_like, statistics)

    infer.defvjp(infer_forward, infer_backward)
    train.defvjp(train_forward, train_backward)
    gradients.defvjp(gradients_forward, gradients_backward)
    return jax.jit(infer, inline=True)


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple(array for array in arrays if array is not None)
