"""The norm as a function that JAX differentiates, in reverse, as often as one likes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from cupynorm._spec import BackwardSpec, ForwardSpec
from cupynorm.jax import _formula
from cupynorm.jax._operations import Backward, Forward

__all__ = ["differentiable"]


@functools.cache
def differentiable(spec: ForwardSpec, k: int, eps: float) -> Callable[[Any, Any, Any], Any]:
    """Return y as a function of x, weight and bias; an array that the spec lacks is None.

    The first derivative is the backward kernel, on statistics that the forward one stored; further
    ones are those of the formula, in jax.numpy.
    """
    infer = Forward(spec, k, eps)
    train = Forward(replace(spec, store_statistics=True), k, eps)
    backward_spec = BackwardSpec(
        norm=spec.norm,
        x=spec.x,
        dy=spec.y,
        weight=spec.weight,
        dbias=spec.bias,
        zero_centered=spec.zero_centered,
    )
    backward = Backward(backward_spec, k, eps)
    formula = functools.partial(_formula.backward_of_x, backward_spec, k, eps)

    @jax.custom_vjp
    def inferred(x: Any, weight: Any, bias: Any) -> Any:
        (y,) = infer(*_present(x, weight, bias))
        return y

    @jax.custom_vjp
    def trained(x: Any, weight: Any, bias: Any) -> tuple[Any, tuple[Any, ...]]:
        y, *statistics = train(*_present(x, weight, bias))
        return y, tuple(statistics)

    @jax.custom_vjp
    def gradients(
        dy: Any, x: Any, weight: Any, statistics: tuple[Any, ...]
    ) -> tuple[Any, Any, Any]:
        dx, *sums = backward(*_present(x, dy, weight, *statistics))
        dweight = None if spec.weight is None else sums.pop(0)
        return dx, dweight, *(sums or [None])

    def forward(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        y, statistics = trained(x, weight, bias)
        return y, (x, weight, statistics)

    def pull_back(stored: Any, dy: Any) -> tuple[Any, Any, Any]:
        return gradients(dy, *stored)

    inferred.defvjp(forward, pull_back)

    def forward_twice(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        y, stored = forward(x, weight, bias)
        return (y, stored[-1]), stored

    # Nothing flows back through the statistics: `gradients` depends on x as if it computed them.
    trained.defvjp(forward_twice, lambda stored, given: pull_back(stored, given[0]))

    def keep(*arrays: Any) -> tuple[Any, Any]:
        return gradients(*arrays), arrays

    def pull_back_twice(stored: Any, given: Any) -> tuple[Any, ...]:
        *arrays, statistics = stored
        _, pull = jax.vjp(formula, *arrays)
        return *pull(given), jax.tree.map(jnp.zeros_like, statistics)

    gradients.defvjp(keep, pull_back_twice)
    return inferred  # type: ignore[no-any-return]


def _present(*arrays: Any) -> tuple[Any, ...]:
    return tuple(array for array in arrays if array is not None)
