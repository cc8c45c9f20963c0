"""The norm as a function that JAX differentiates in both modes, any number of times."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax

from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Options, compute_dtype
from cupynorm.jax import _formula
from cupynorm.jax._operations import Operation, split_as
from cupynorm.jax._rules import Function, Linear

__all__ = ["differentiable", "wide"]


@functools.cache
def differentiable(spec: ForwardSpec, options: Options) -> Any:
    """Return a function of x, residual, (weight, bias), and these two widened; None if not in spec.

    It returns y and residual_out, None where there is no residual.

    In reverse, the first derivative is the backward kernel, on the arrays that the forward kernel
    stored. Forward mode and further derivatives are those of the formula in jax.numpy. They are
    with respect to the widened arrays: sums over devices, or over a batch, come before the rounding
    to a narrower dtype. The forward kernel reads weight and bias as given, and these count as
    constants.
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

    def infer(x: Any, residual: Any, affine: Any, widened: Any) -> Any:
        return forward(storing_nothing, x, residual, affine)[0]

    def train(x: Any, residual: Any, affine: Any, widened: Any) -> tuple[Any, Any]:
        return forward(storing, x, residual, affine)

    def backward(given: Any, stored: Any) -> dict[str, Any]:
        told = backward_spec(given["dresidual_out"] is not None)
        return Operation(told, options).by_name(**given, **stored)

    def infer_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (results, _), (slopes, _) = train_jvp(primals, tangents)
        return results, slopes

    def train_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        x, _, _, (weight, _) = primals
        slope, of_residual, _, (of_weight, of_bias) = tangents
        (y, total), stored = trained(*primals)
        kept = {"x": x if total is None else total, "weight": weight, **stored}
        given = {"x": slope, "residual": of_residual, "weight": of_weight, "bias": of_bias}
        of_y, of_total = pushed(present(kept), present(given))
        # Nothing goes on through the stored arrays: see gradients_jvp.
        return ((y, total), stored), ((of_y, of_total), dict.fromkeys(stored))

    def push(kept: Any, tangents: Any) -> tuple[Any, Any]:
        made = _formula.tangents_of_forward(spec, options, kept, tangents)
        return made["y"], made["residual_out"] if spec.residual else None

    def pull(kept: Any, cotangents: Any) -> dict[str, Any]:
        # JAX takes a dy that is not split as y is, such as one that is not on y's Explicit mesh.
        x = kept["x"]
        dy, of_total = (None if a is None else split_as(x, a) for a in cotangents)
        if dy is None:  # y was not used
            dx, dresidual = (
                None if of_total is None or dtype is None else _formula.cast(of_total, dtype)
                for dtype in (of_x, spec.residual)
            )
            return {"dx": dx, "dresidual": dresidual}
        arrays = {"dy": dy, "x": x, "dresidual_out": of_total, "weight": kept.get("weight")}
        made = gradients(arrays, {name: kept[name] for name in storing.results if name in kept})
        return {"dresidual": made["dx"], **made}

    def gradients_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # As functions of x, since the statistics were computed from it. The bitmask is a step
        # function.
        given, stored = primals
        told, bits = backward_spec(given["dresidual_out"] is not None), stored.get("bitmask")
        slopes = present(tangents[0])

        def formula(moved: Any) -> dict[str, Any]:
            return _formula.backward_of_x(told, options, given | {"bitmask": bits} | moved)

        moved = {name: given[name] for name in slopes}
        # Until it is transposed, only what the formula reads is kept.
        _, made = jax.jvp(jax.checkpoint(formula), (moved,), (slopes,))
        return gradients(*primals), made

    trained, gradients = Function(train, train_jvp), Function(backward, gradients_jvp)
    pushed = Linear(push, pull, (spec.y, spec.x if spec.residual else None))
    return jax.jit(Function(infer, infer_jvp), inline=True)


def present(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def wide(x: str, dtype: str | None) -> str | None:
    """Return the wider of a dtype and the compute dtype of x."""
    return dtype and max(compute_dtype(x), dtype, key=ITEMSIZE.__getitem__)
