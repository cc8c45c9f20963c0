"""Quantized outputs of the norms within JAX programs: by the norm's kernel, or by steps after it.

The steps are operations of jax.numpy, which XLA fuses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cupynorm import _quantize
from cupynorm._operation import ForwardSpec, Kind, Options, QuantizedSpec
from cupynorm._quantize import BLOCK_MX, MX_SCALE, Quantize
from cupynorm.jax import _kernels
from cupynorm.jax._operations import Arrays, Operation, split_as

__all__ = ["behind", "dequantized", "normalized", "quantized"]


# ---- with the norm -------------------------------------------------------------------------------


def normalized(
    of_y: ForwardSpec, options: Options, how: tuple[Any, ...], *arrays: Any
) -> dict[str, Any]:
    """Return what a forward pass makes whose y is quantized. `how` is `Quantize.told`.

    The arrays are those that the pass reads, and a scale of shape (1,), None where there is none. A
    scale that is given is no result.
    """
    *arrays_of_y, scale = _without_gradient(*arrays)
    given = dict(zip(of_y.table.reads, arrays_of_y, strict=True))
    n = math.prod(given["x"].shape[-options.k :])
    operation = Quantizing(*_quantize.pass_of_kernel(of_y, options, how, n))
    return operation.by_name(**given, scale=scale)


def behind(y: Any, axes: tuple[int, ...], quantize: Quantize, scale: Any) -> tuple[Any, ...]:
    """Return what `quantized` returns for the y that a norm has written.

    So an amax is that of all devices and, under vmap, of an example.
    """
    y, divisor = _without_gradient(y, scale)
    split = jax.typeof(y).sharding.spec
    if quantize.block is not None:  # rows are whole on each device of an Explicit mesh
        y = split_as(y, y, PartitionSpec(*split[:-1], None))
    q, of_q, *amax = quantized(y, axes, quantize, divisor)
    return split_as(y, q, split), of_q if scale is None else scale, *amax


def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "quantize has no gradient: call the norm on jax.lax.stop_gradient of its arguments"
    )


_without_gradient = jax.custom_jvp(lambda *arrays: arrays)
_without_gradient.defjvp(_refuse)


@dataclass(frozen=True)
class Quantizing(Operation):
    """A forward pass whose y is quantized. A scale that is given is one more vector."""

    spec: QuantizedSpec

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the arrays that it takes."""
        return (*self.spec.reads, "scale") if self.spec.scale_given else self.spec.reads

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the arrays that it returns."""
        return tuple(n for n in self.spec.writes if n != "scale" or not self.spec.scale_given)

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of its arrays by name."""
        kinds = super().kinds
        return {**kinds, "scale": Kind.VECTOR} if self.spec.scale_given else kinds

    @property
    def numbers(self) -> dict[str, Any]:
        """What a launch is told in addition to sizes, by name."""
        return super().numbers | {"scale_bounds": self.options.scale_bounds}

    @property
    def of_y(self) -> Operation:
        """The pass that writes y."""
        return Operation(self.spec.of_y, self.options)

    def formula(self, *operands: Any) -> Arrays:
        """Return the results as jax.numpy computes them."""
        return self._behind(self.of_y.formula, operands)

    def kernel(self, platform: str, *operands: Any) -> Arrays:
        """Return the results as the kernels of a platform compute them: one, or that of y."""
        given, k = self.named(operands), self.options.k
        shape, row = given["x"].shape, given["x"].shape[-k:]
        vectors = (given[name] for name in ("weight", "bias"))
        are_shared = all(vector is None or vector.shape == row for vector in vectors)
        if self.spec.scale_given:
            are_shared &= given["scale"].size == 1
        m, n = math.prod(shape[:-k]), math.prod(row)
        if are_shared and _kernels.has_kernel(platform, self.spec, m, n):
            return super().kernel(platform, *operands)
        return self._behind(functools.partial(self.of_y.kernel, platform), operands)

    def _behind(self, norm: Callable[..., Arrays], operands: Arrays) -> Arrays:
        """Return the results by steps behind a norm, which writes y."""
        made = dict(zip(self.of_y.results, norm(*operands[: len(self.spec.reads)]), strict=True))
        scale = self.named(operands)["scale"] if self.spec.scale_given else None
        made["y"], made["scale"] = quantized(made["y"], self.options.axis, self.how, scale)
        return tuple(made[name] for name in self.results)

    @property
    def how(self) -> Quantize:
        """How y is quantized. A block that is the row counts as one."""
        block = self.spec.scale_columns or None
        lower, upper = cast("tuple[float, float]", self.options.scale_bounds)
        how = "block" if block else "row"
        return Quantize(self.spec.q, how, block, scale_min=lower, scale_max=upper)


# ---- steps ---------------------------------------------------------------------------------------


def quantized(y: Any, axes: tuple[int, ...], quantize: Quantize, scale: Any) -> tuple[Any, ...]:
    """Return q, scale and, if it is asked for, amax. `scale` is a given one, or None."""
    if scale is None:
        scale = _quantize.scales_of(jnp, y, axes, quantize, _divide)
    factor = _quantize.power_of(scale) if quantize.block == BLOCK_MX else scale
    factor = _quantize.expanded(jnp, factor, y.shape, quantize.block)
    q = _quantize.codes_of(jnp, y, factor, quantize.dtype, _divide)
    q = q.view(np.dtype(quantize.dtype))
    amax = (_quantize.amax_of(jnp, y),) if quantize.amax else ()
    return q, scale.view(np.dtype(quantize.scale_dtype)), *amax


def _divide(a: Any, b: Any) -> Any:
    """Return a / b to the nearest number.

    XLA divides float32 on a GPU with an error of up to an ulp. It divides float64 to the nearest,
    and a float64 quotient of float32 numbers rounds to the float32 one.
    """
    # XLA would multiply by one over a number that it knows. NaN over one is NaN, too.
    b = jnp.where(jnp.isnan(a), a.dtype.type(1), b)
    if a.dtype == np.float64:
        return a / b
    with jax.enable_x64(True):
        # LLVM knows of that rounding, and would divide the float32 numbers if it saw both.
        a, b = (2 * values.astype(np.float64) for values in (a, b))
        return (a / b).astype(np.float32)


def dequantized(q: Any, scale: Any, dtype: str, block: int | None) -> jax.Array:
    """Return q * scale."""
    q = q.view(np.dtype(dtype)).astype(np.float32)
    factor = scale.view(np.dtype(MX_SCALE)).astype(np.float32) if block == BLOCK_MX else scale
    return q * _quantize.expanded(jnp, factor, q.shape, block)
