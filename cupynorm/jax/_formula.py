"""The norms in jax.numpy. They run off CUDA, and give tangents and second derivatives everywhere.

They compute as the kernels do: in the compute dtype, with rows scaled by a power of two before
anything is squared, the corrected two-pass variance, and one rounding at the end. `reference` has
the same equations in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cupynorm import _arrays
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    BackwardSpec,
    ForwardSpec,
    Norm,
    Options,
    Pass,
    bitmask_bytes,
    compute_dtype,
    shapes_of_results,
)
from cupynorm.jax._vectors import as_rows, sum_to

__all__ = ["FORMULAS", "backward_of_x", "cast", "from_numpy", "tangents_of_forward"]

# Terms added one after the other: the number that `testing` allows a sum.
RUN = 64


# The arrays of a pass by the names of its table, None for absent ones.
Arrays = Mapping[str, Any]


def forward(spec: ForwardSpec, options: Options, arrays: Arrays) -> dict[str, Any]:
    """Return the results of a forward pass, with the statistics in any case."""
    x, bias, k, total = arrays["x"], arrays["bias"], options.k, None
    if spec.residual is not None:
        x = total = _added(x, arrays["residual"], spec.x)
    xhat, mean, rstd = _normalize(spec.norm, _wide(spec, x), k, options.eps)
    y = xhat * _scale(spec, arrays["weight"], x.ndim)
    if bias is not None:
        y = y + as_rows(bias.astype(y.dtype), x.ndim)
    bitmask = None
    if options.relu is not None:
        lower, upper = options.relu
        bitmask = _pack((lower < y) & (y < upper), k)
        y = jnp.clip(y, lower, upper)
    kept = x.shape[: x.ndim - k]
    return {
        "y": _round(y, spec.y),
        "mean": None if mean is None else mean.reshape(kept),
        "rstd": rstd.reshape(kept),
        "bitmask": bitmask,
        "residual_out": total,
    }


def backward(spec: BackwardSpec, options: Options, arrays: Arrays) -> dict[str, Any]:
    """Return the results of a backward pass, from what was stored."""
    k = options.k
    rstd = jnp.expand_dims(arrays["rstd"], tuple(range(-k, 0)))
    wide = _wide(spec, arrays["x"])
    if spec.norm == "rms_norm":
        xhat = wide * rstd
    else:
        # In parts, since x - mean may overflow where x * rstd does not.
        up, down = _powers(jnp.minimum(rstd, 1))
        mean = jnp.expand_dims(arrays["mean"], tuple(range(-k, 0)))
        xhat = (wide * down - mean * down) * (rstd * up)
        xhat = xhat - _mean(xhat, k)
    found = _gradients(spec, k, arrays, xhat, rstd)
    # If a product on the way to it overflows, dx is found another way.
    lost = ~jnp.isfinite(found["dx"]).all(tuple(range(-k, 0)), keepdims=True)
    dx = jax.lax.cond(
        lost.any(),
        lambda dx: jnp.where(lost, _dx_in_range(spec, k, arrays, xhat, rstd), dx),
        lambda dx: dx,
        found["dx"],
    )
    found |= {"dx": dx, "dresidual": dx}
    return {name: _round(array, spec.dtypes[name]) for name, array in found.items()}


# By the tables of the passes.
FORMULAS: dict[Pass, Any] = {FORWARD: forward, BACKWARD: backward}


def backward_of_x(spec: BackwardSpec, options: Options, arrays: Arrays) -> dict[str, Any]:
    """Return `backward` as a function of all that is no statistic, to be differentiated."""
    xhat, _, rstd = _normalize(spec.norm, _wide(spec, arrays["x"]), options.k, options.eps)
    found = _gradients(spec, options.k, arrays, xhat, rstd)
    return {name: found[name].astype(spec.dtypes[name]) for name in spec.writes}


def tangents_of_forward(
    spec: ForwardSpec, options: Options, kept: Arrays, tangents: Arrays
) -> dict[str, Any]:
    """Return the tangents of y and residual_out, from those of the operands that have one.

    Of the kept arrays it reads the normalized x, the weight and the bitmask.
    """

    def normalized(x: Any) -> Any:
        return _normalize(spec.norm, x, options.k, options.eps)[0]

    x, slopes = _wide(spec, kept["x"]), {name: _wide(spec, a) for name, a in tangents.items()}
    total = sum((slopes[name] for name in ("x", "residual") if name in slopes), jnp.zeros_like(x))
    xhat, of_xhat = jax.jvp(normalized, (x,), (total,))
    y = of_xhat * _scale(spec, kept.get("weight"), x.ndim)
    if "weight" in slopes:
        y = y + xhat * as_rows(slopes["weight"], x.ndim)
    if "bias" in slopes:
        y = y + as_rows(slopes["bias"], x.ndim)
    y = _masked(spec, y, kept.get("bitmask"))
    return {"y": cast(y, spec.y), "residual_out": cast(total, spec.x)}


def from_numpy(name: str, array: Any) -> jax.Array:
    """Return an argument that is a NumPy array as one of JAX, of float64 only if it is enabled."""
    _arrays.check_no_mask(name, array)
    try:
        return jnp.asarray(array)
    except TypeError:
        raise TypeError(f"{name}.dtype must be one that JAX has, got {array.dtype}") from None


def cast(array: Any, dtype: Any) -> Any:
    """Return an array in a dtype, rounded once; so is what comes back to it."""
    return _cast.bind(array, dtype=jnp.dtype(dtype))


def _added(x: Any, residual: Any, dtype: str) -> Any:
    """Return x + residual, added in the compute dtype of all three and rounded once."""
    wide = "float64" if "float64" in (x.dtype.name, residual.dtype.name, dtype) else "float32"
    total = _round(x.astype(wide) + residual.astype(wide), dtype)
    return jax.lax.optimization_barrier(total)  # lest XLA drop the rounding


def _gradients(spec: BackwardSpec, k: int, arrays: Arrays, xhat: Any, rstd: Any) -> dict[str, Any]:
    """Return the results of a backward pass before rounding."""
    dy = _masked(spec, arrays["dy"], arrays["bitmask"])
    g = dy * _scale(spec, arrays["weight"], dy.ndim)
    dx = g - xhat * _mean(g * xhat, k)
    if spec.norm == "layer_norm":
        dx = dx - _mean(g, k)
    dx = dx * rstd
    if spec.dresidual_out is not None:
        dx = dx + _wide(spec, arrays["dresidual_out"])
    shapes = shapes_of_results(spec, k, arrays)
    return {
        "dx": dx,
        "dweight": None if spec.weight is None else sum_to(dy * xhat, shapes["dweight"]),
        "dbias": None if spec.dbias is None else sum_to(dy, shapes["dbias"]),
        "dresidual": dx,
    }


def _dx_in_range(spec: BackwardSpec, k: int, arrays: Arrays, xhat: Any, rstd: Any) -> Any:
    """Return dx by products of significands. Their powers of four are counted separately."""
    dy, weight = _masked(spec, arrays["dy"], arrays["bitmask"]), arrays["weight"]
    g, of_g = _significand(dy)
    if weight is not None:
        scale, of_scale = _significand(_scale(spec, weight, dy.ndim))
        g, of_g = g * scale, of_g + of_scale
    top = of_g.max(tuple(range(-k, 0)), keepdims=True)
    beside_top = _times_four_to(g, of_g - top)
    others = xhat * _mean(beside_top * xhat, k)
    if spec.norm == "layer_norm":
        others = others + _mean(beside_top, k)
    rstd, of_rstd = _significand(rstd)

    def total(less: int) -> Any:
        """Return dx, divided by a power of four."""
        own = _times_four_to(g * rstd, of_g + of_rstd - less)
        dx = own - _times_four_to(others * rstd, top + of_rstd - less)
        if spec.dresidual_out is None:
            return dx
        return dx + _times_four_to(_wide(spec, arrays["dresidual_out"]), -less)

    dx = total(0)
    for less in (40, 120):  # the terms may overflow where their sum does not
        dx = jnp.where(jnp.isfinite(dx), dx, _times_four_to(total(less), less))
    return dx


def _significand(array: Any) -> tuple[Any, Any]:
    """Return an array divided by powers of four, so that 1 to 4 is left, and the exponents."""
    down, _ = _powers(jnp.abs(array))
    _, exponent = jnp.frexp(down)
    return array * down * down, 1 - exponent


def _times_four_to(array: Any, exponent: Any) -> Any:
    """Return an array times powers of four, which may be out of range."""
    most = jnp.finfo(array.dtype).maxexp - 2
    power = jnp.ldexp(jnp.ones((), array.dtype), jnp.clip(exponent, -most, most))
    power = jax.lax.optimization_barrier(power)  # XLA would square a constant, out of range
    return array * power * power


def _masked(spec: ForwardSpec | BackwardSpec, rows: Any, bitmask: Any) -> Any:
    """Return rows in the compute dtype, 0 where their bit is not set."""
    rows = _wide(spec, rows)
    return rows if bitmask is None else jnp.where(_unpack(bitmask, rows.shape), rows, 0)


def _wide(spec: ForwardSpec | BackwardSpec, array: Any) -> Any:
    return array.astype(compute_dtype(spec.x))


def _scale(spec: ForwardSpec | BackwardSpec, weight: Any, ndim: int) -> Any:
    if weight is None:
        return 1
    wide = as_rows(_wide(spec, weight), ndim)
    return wide + 1 if spec.zero_centered else wide


def _normalize(norm: Norm, x: Any, k: int, eps: float) -> tuple[Any, Any, Any]:
    """Return xhat, mean and rstd, which keep axes of size 1."""
    axes = tuple(range(-k, 0))
    # As in `reference`: after division by the larger of max|x| and sqrt(eps), rounded to a power of
    # two, nothing that counts overflows or underflows when squared.
    largest = jnp.abs(jax.lax.stop_gradient(x)).max(axes, keepdims=True)
    down, up = _powers(jnp.maximum(largest, math.sqrt(eps)))
    d, rest, mean = x * down, down, None
    if norm == "layer_norm":
        first = _mean(d, k)
        d = d - first
        correction = _mean(d, k)
        d = d - correction
        mean = (first + correction) * up
        # If all values are equal, only eps is left. Their size must not push it out of range.
        values = jax.lax.stop_gradient(x)
        equal = values.max(axes, keepdims=True) == values.min(axes, keepdims=True)
        d = d - jnp.where(equal, jax.lax.stop_gradient(d), 0)
        rest = jnp.where(equal, up / (math.sqrt(eps) or 1), down)
    d = d * rest
    root = jnp.sqrt(_mean(d * d, k) + jnp.square(math.sqrt(eps) * down * rest))
    return d / root, mean, 1 / root * down * rest


def _powers(largest: Any) -> tuple[Any, Any]:
    """Return p and 1 / p, powers of two, where largest * p * p is about 1; or 1 for inf and NaN.

    Square roots, since 1 / largest itself may be out of range.
    """
    info = jnp.finfo(largest.dtype)
    word = jnp.dtype(f"int{info.bits}")
    half = ((jax.lax.bitcast_convert_type(largest, word) >> info.nmant) - info.maxexp + 1) >> 1
    half = jnp.where(jnp.isfinite(largest), half, 0)

    def power(exponent: Any) -> Any:
        bits = (exponent + info.maxexp - 1) << info.nmant
        return jax.lax.bitcast_convert_type(bits, largest.dtype)

    return power(-half), power(half)


def _mean(array: Any, k: int) -> Any:
    """Return the mean over the last k axes, keeping them, by sums of at most RUN terms."""
    count = math.prod(array.shape[array.ndim - k :])
    total = array
    for _ in range(k):
        while total.shape[-1] > RUN:
            padding = -total.shape[-1] % RUN
            total = jnp.pad(total, [(0, 0)] * (total.ndim - 1) + [(0, padding)])
            *kept, n = total.shape  # without rows JAX cannot infer a size
            total = total.reshape(*kept, n // RUN, RUN).sum(-1)
        total = total.sum(-1)
    return jnp.expand_dims(total / count, tuple(range(-k, 0)))


def _round(values: Any, dtype: str | None) -> Any:
    """Round once, to nearest and ties to even; the derivative is not that of a rounding."""
    if dtype is None:
        return None
    if dtype not in ("bfloat16", "float16") or values.dtype != jnp.float64:
        return values.astype(dtype)
    # XLA goes through float32, and so rounds twice. See `reference.round_once`.
    return _arrays.rounded_to_odd(jnp, values).astype(dtype)


# As a function of values it is linear, though it works on bits, which have no derivative.
_cast = Primitive("cupynorm_cast")
_cast.def_impl(lambda array, dtype: _round(array, dtype.name))
_cast.def_abstract_eval(lambda array, dtype: array.update(dtype=dtype))
mlir.register_lowering(_cast, mlir.lower_fun(_cast.impl, multiple_results=False))
ad.deflinear2(_cast, lambda cotangent, array, dtype: [cast(cotangent, array.aval.dtype)])
batching.defvectorized(_cast)


def _pack(mask: Any, k: int) -> Any:
    """Return the bits of each row, as `cupynorm.pack_bitmask` packs them."""
    kept, n = mask.shape[: mask.ndim - k], math.prod(mask.shape[mask.ndim - k :])
    width = bitmask_bytes(n)
    bits = mask.reshape(*kept, n).astype(jnp.uint8)
    bits = jnp.pad(bits, [(0, 0)] * len(kept) + [(0, 8 * width - n)])
    bits = bits.reshape(*kept, width, 8)
    places = bits << jax.lax.broadcasted_iota(jnp.uint8, bits.shape, bits.ndim - 1)
    return places.sum(-1, dtype=jnp.uint8)


def _unpack(bitmask: Any, shape: tuple[int, ...]) -> Any:
    """Return the mask, of a shape that begins with the bitmask's leading axes."""
    kept = bitmask.shape[:-1]
    n = math.prod(shape[len(kept) :])
    places = jax.lax.broadcasted_iota(jnp.uint8, (*bitmask.shape, 8), bitmask.ndim)
    bits = bitmask[..., None] >> places & 1
    return bits.reshape(*kept, 8 * bitmask.shape[-1])[..., :n].reshape(shape).astype(bool)
