"""The norm as a function that JAX differentiates in reverse, any number of times."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Options, compute_dtype
from cupynorm.jax import _formula
from cupynorm.jax._operations import Operation, split_as
from cupynorm.jax._refusals import in_reverse

__all__ = ["differentiable", "wide"]


@functools.cache
def differentiable(spec: ForwardSpec, options: Options) -> Any:
    """Return a function of x, residual, (weight, bias), and these two widened; None if not in spec.

    It returns y and residual_out, None where there is no residual.

    The first derivative is the backward kernel, on the arrays that the forward kernel stored.
    Further ones are those of the formula in jax.numpy. Derivatives are with respect to the widened
    arrays: sums over devices, or over a batch, come before the rounding to a narrower dtype. The
    forward kernel reads weight and bias as given, and these count as constants.
    """
    of_x = spec.branch or spec.x
    storing_nothing = Operation(spec, options)
    storing = Operation(replace(spec, store_statistics=True), options)

    def backward_spec(has_dresidual_out: bool) -> BackwardSpec:
        dtypes = {
            "x": spec.x,
            "dy": spec.y,
            "weight": wide(spec.x, spec.weight),
            "bitmask": storing.spec.dtypes["bitmask"],
            "dresidual_out": spec.x if has_dresidual_out else None,
            "dx": of_x,
            "dbias": wide(spec.x, spec.bias),
            "dresidual": spec.residual,
        }
        return BackwardSpec.of(options, dtypes)

    def forward(operation: Operation, x: Any, residual: Any, affine: Any) -> tuple[Any, Any]:
        """Return y and residual_out, and the other stored arrays by name."""
        weight, bias = affine
        made = operation.by_name(x=x, residual=residual, weight=weight, bias=bias)
        return (made.pop("y"), made.pop("residual_out", None)), made

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def infer(*given: Any) -> Any:
        x, residual, affine, _ = given
        return forward(storing_nothing, x, residual, affine)[0]

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def train(*given: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
        x, residual, affine, _ = given
        return forward(storing, x, residual, affine)

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def gradients(given: Any, stored: Any) -> dict[str, Any]:
        backward = Operation(backward_spec(given["dresidual_out"] is not None), options)
        return backward.by_name(**given, **stored)

    def infer_forward(*primals: Any) -> tuple[Any, Any]:
        x, residual, affine, widened = custom_vjp_primal_tree_values(primals)
        (y, total), stored = train(x, residual, affine, widened)
        return (y, total), (x if total is None else total, widened[0], stored)

    def infer_backward(given: Any, cotangents: Any) -> tuple[Any, ...]:
        # JAX takes a dy that is not split as y is, such as one that is not on y's Explicit mesh.
        x, weight, stored = given
        dy, of_total = (
            None if a is None or isinstance(a, SymbolicZero) else split_as(x, a) for a in cotangents
        )
        if dy is None:  # y was not used
            dx, dresidual = (
                None if of_total is None or dtype is None else _formula.rounded(of_total, dtype)
                for dtype in (of_x, spec.residual)
            )
            return dx, dresidual, None, None
        arrays = {"dy": dy, "x": x, "dresidual_out": of_total, "weight": weight}
        made = gradients(arrays, stored)
        dx = made["dx"]
        dresidual = made.get("dresidual", dx) if spec.residual else None
        return dx, dresidual, None, (made.get("dweight"), made.get("dbias"))

    def train_forward(*primals: Any) -> tuple[Any, Any]:
        results, given = infer_forward(*primals)
        return (results, given[-1]), given

    def train_backward(given: Any, cotangents: Any) -> tuple[Any, ...]:
        # Nothing comes back through the stored arrays: see gradients_backward.
        return infer_backward(given, cotangents[0])

    def gradients_forward(*arrays: Any) -> tuple[Any, Any]:
        return gradients(*arrays), arrays

    def gradients_backward(arrays: Any, cotangents: Any) -> tuple[Any, ...]:
        # As functions of x, since the statistics were computed from it. The bitmask is a step
        # function.
        given, stored = arrays
        told, bits = backward_spec(given["dresidual_out"] is not None), stored.get("bitmask")

        def formula(given: Any) -> dict[str, Any]:
            return _formula.backward_of_x(told, options, given | {"bitmask": bits})

        _, pull_back = jax.vjp(formula, given)
        return *pull_back(cotangents), None

    # A cotangent that is known to be 0 is no array.
    infer.defvjp(infer_forward, infer_backward, symbolic_zeros=True)
    train.defvjp(train_forward, train_backward, symbolic_zeros=True)
    gradients.defvjp(gradients_forward, gradients_backward)

    def norm(x: Any, residual: Any, affine: Any, widened: Any) -> Any:
        x, residual, widened = jax.tree.map(in_reverse, (x, residual, widened))
        return infer(x, residual, affine, widened)

    return jax.jit(norm, inline=True)


def wide(x: str, dtype: str | None) -> str | None:
    """Return the wider of a dtype and the compute dtype of x."""
    return dtype and max(compute_dtype(x), dtype, key=ITEMSIZE.__getitem__)
