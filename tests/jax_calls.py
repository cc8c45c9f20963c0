"""What the JAX tests share: one call and its gradients, each field held to the oracle."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fused_gpu import check_passes
from fused_norms import Call

import cupynorm.jax
from cupynorm import NormBackward, NormForward, testing
from cupynorm._arrays import DTYPES as NAMES
from cupynorm._operation import ForwardSpec, Options
from cupynorm.jax._operations import Operation

EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}


def on_host(arrays: Any) -> Any:
    return jax.tree.map(np.asarray, arrays)


def name_of(array: Any) -> str | None:
    return None if array is None else NAMES[array.dtype]


def check(
    norm: str,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    dy: Any,
    k: int = 1,
    eps: float | None = None,
    zero_centered: bool = False,
    relu: tuple[float, float] | None = None,
    residual: Any = None,
    residual_dtype: Any = None,
    dresidual_out: Any = None,
    optimized: bool = False,
) -> None:
    """Check the function and its gradients, then the passes that they are made of.

    dy has y's dtype. Only the passes show the statistics that the gradients depend on. With a
    residual and no dresidual_out, the gradients are those of y alone. With `optimized`, XLA
    optimizes the code, as it does for users. Other tests do not need that (conftest.py).
    """
    eps = EPS[norm] if eps is None else eps
    options = {"axis": tuple(range(-k, 0)), "zero_centered": zero_centered}
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    has_total = dresidual_out is not None
    of_results = (dy, dresidual_out) if has_total else dy

    def function(arrays: Any) -> Any:
        return getattr(cupynorm.jax, norm)(
            **arrays,
            eps=eps,
            relu=relu,
            out_dtype=dy.dtype,
            residual_dtype=residual_dtype,
            **options,
        )

    def differentiated(arrays: Any) -> Any:
        results = function(arrays)
        return results if residual is None or has_total else results[0]

    def both(of_results: Any, arrays: Any) -> Any:
        trained, pull_back = jax.vjp(differentiated, arrays)
        return function(arrays), trained, *pull_back(of_results)

    as_for_users: dict[str, Any] = {"xla_backend_optimization_level": 3}
    if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
        as_for_users["xla_cpu_use_fusion_emitters"] = True
    chosen = as_for_users if optimized else None
    computed = jax.jit(both, compiler_options=chosen)(of_results, arrays)
    inferred, trained, gradients = on_host(computed)
    result = NormBackward(**{f"d{name}": gradient for name, gradient in gradients.items()})

    named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    dtypes = {name: name_of(array) for name, array in named.items()} | {"y": name_of(dy)}
    if residual_dtype is not None:
        dtypes["residual_out"] = NAMES[np.dtype(residual_dtype)]
    told = Options(norm, k, zero_centered, eps, relu, training=True)
    operation = Operation(ForwardSpec.of(told, dtypes), told)
    forward = NormForward(
        **on_host(operation.by_name(**(dict.fromkeys(operation.operands) | arrays)))
    )
    if residual is not None and not has_total:
        trained = trained, inferred[1]
    checks = {"eps": eps, "relu": relu, "out_dtype": dy.dtype, **options}
    checks |= {"residual": residual, "residual_dtype": residual_dtype}
    for y in (forward, inferred, trained):
        testing.check_forward(norm, y, x, weight, bias, **checks)
    total = x if residual is None else forward.residual_out
    given = (dy, total, weight, forward.mean, forward.rstd)
    wanted = {"bias": False if bias is None else bias, "bitmask": forward.bitmask}
    if residual is not None:
        wanted |= {"dx_dtype": x.dtype, "dresidual_dtype": residual.dtype}
        wanted |= {"dresidual_out": dresidual_out}
    testing.check_backward(norm, result, *given, **wanted, **options)


def check_fused(call: Call) -> None:
    """Check the outputs and the gradients of a norm of `cupynorm.fuse` against their bounds."""

    def both(arrays: Any, of_outputs: Any) -> Any:
        def function(arrays: Any) -> Any:
            outputs = call.of(**arrays)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        outputs, pull_back = jax.vjp(function, arrays)
        (found,) = pull_back(
            tuple(a.astype(o.dtype) for a, o in zip(of_outputs, outputs, strict=True))
        )
        return function(arrays), outputs, found

    rng = np.random.default_rng(0)
    # Of float32, since without x64 JAX would round float64 to float32 first.
    of = [rng.standard_normal(call.x.shape, np.float32) for _ in range(call.fused.count)]
    inferred, trained, found = on_host(jax.jit(both)(call.arrays, of))
    of = [a.astype(o.dtype) for a, o in zip(of, trained, strict=True)]
    names = "x", "weight", "bias", *call.fused.inputs
    gradients = call.fused.class_of_gradients(*map(found.get, names))
    # XLA may contract the formula's operations in one of the two, and so change the last bit.
    for outputs in (inferred, trained):
        check_passes(call, tuple(outputs), gradients, of)


def through_layers(norm: Any) -> tuple[Any, Any]:
    """Return a loss of x and weights, by a rematerialized scan over layers, and by a loop."""

    def layer(x: Any, weight: Any) -> tuple[Any, None]:
        return x + norm(x, weight), None

    def scanned(x: Any, weights: Any) -> Any:
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    def unrolled(x: Any, weights: Any) -> Any:
        for weight in weights:
            x, _ = layer(x, weight)
        return jnp.sum(x**2)

    return scanned, unrolled


def gradients_through_layers(x: Any, weights: Any) -> tuple[Any, Any]:
    """Return gradients through a rematerialized scan over layers, and through a loop."""
    both = through_layers(cupynorm.jax.rms_norm)
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x, weights) for f in both)
    return found, expected
