"""What the JAX tests share: one call and its gradients, each field held to the oracle."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

import cupynorm.jax
from cupynorm import NormBackward, NormForward, testing
from cupynorm._arrays import DTYPES as NAMES
from cupynorm._operation import ForwardSpec, Options
from cupynorm.jax import _kernels
from cupynorm.jax._operations import Operation

EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}


def on_host(arrays: Any) -> Any:
    return jax.tree.map(np.asarray, arrays)


def name_of(array: Any) -> str | None:
    return None if array is None else NAMES[array.dtype]


@functools.lru_cache
def _both(providers: Any, norm: str, there: tuple[bool, bool], options: Any) -> Any:
    """Return a program, compiled once for arrays that are alike: inference, and both passes."""

    def function(x: Any, *arrays: Any) -> Any:
        given = iter(arrays)
        affine = (next(given) if is_there else None for is_there in there)
        return getattr(cupynorm.jax, norm)(x, *affine, **dict(options))

    def both(dy: Any, *arrays: Any) -> Any:
        y, pull_back = jax.vjp(function, *arrays)
        return function(*arrays), y, pull_back(dy)

    return jax.jit(both)


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
) -> None:
    """Check the function and its gradients, then the very passes that these are made of.

    dy has y's dtype. Only the passes show the statistics that the gradients depend on.
    """
    eps = EPS[norm] if eps is None else eps
    options = {"axis": tuple(range(-k, 0)), "zero_centered": zero_centered}
    given = [a for a in (x, weight, bias) if a is not None]
    there = weight is not None, bias is not None
    asked = {"eps": eps, "relu": relu, "out_dtype": dy.dtype, **options}
    both = _both(tuple(_kernels._providers.items()), norm, there, tuple(asked.items()))
    inferred, trained, gradients = on_host(both(dy, *given))
    there = iter(gradients)
    result = NormBackward(*(None if a is None else next(there) for a in (x, weight, bias)))

    spec = ForwardSpec(
        norm,
        *map(name_of, (x, weight, bias, dy)),
        zero_centered,
        store_statistics=True,
        relu=relu is not None,
    )
    operation = Operation(spec, Options(norm, k, zero_centered, eps, relu, training=True))
    forward = NormForward(**dict(zip(operation.results, on_host(operation(*given)), strict=True)))
    for y in (forward, inferred, trained):
        testing.check_forward(norm, y, x, weight, bias, **asked)
    given = (dy, x, weight, forward.mean, forward.rstd)
    wanted = {"bias": False if bias is None else bias, "bitmask": forward.bitmask}
    testing.check_backward(norm, result, *given, **wanted, **options)
