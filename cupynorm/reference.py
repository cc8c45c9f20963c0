"""RMSNorm and LayerNorm in NumPy: the oracle for every kernel, and the path without a GPU.

Everything is computed in float64 and rounded once, to the dtype of each output. The public
functions take NumPy arrays, and refuse what `cupynorm.rms_norm` and its siblings refuse of these.

Rows of float64 are scaled by a power of two before anything is squared, so none of them overflows
or underflows on the way. NaN and inf stay in their row. If a row of RMSNorm holds an inf, rstd is
0, and y is NaN at the inf and 0 elsewhere. If a row of LayerNorm does, all of it is NaN.

The functions go through the rows by blocks, whose float64 copies stay in a core's cache. Where x
and dy are of narrower dtypes ("narrow"), float64 has bits to spare: sums are added in the fastest
order, and rstd is multiplied by.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, overload

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupynorm import _checks, _quantize
from cupynorm._arrays import NUMPY, to_numpy
from cupynorm._bitmask import pack, unpack
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    Axis,
    ForwardSpec,
    Norm,
    NormBackward,
    NormForward,
    Options,
    Relu,
    Spec,
    has_residual,
    shapes_of_results,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it, and nothing else imports it

__all__ = [
    "amax",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "quantize",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
]

Array = NDArray[Any]
Float64 = NDArray[np.float64]

BLOCK = 1 << 16  # elements: 512 KiB in float64, and two arrays of them are in use at once
BUFFER = 512  # elements: NumPy copies what broadcasts over rows of which two fit
DOT = 1 << 13  # elements: BLAS may divide longer dot products among threads, and so add otherwise


# ---- the equations, in float64 -------------------------------------------------------------------


def widen(array: Array, memory: Float64 | None = None) -> Float64:
    """Return a C-ordered float64 copy, in the first rows of `memory` if that is given."""
    if memory is None:
        return np.array(array, dtype=np.float64, order="C")
    copy = memory[: len(array)]
    copy[...] = array
    return copy


def effective_weight(weight: Array | None, zero_centered: bool) -> Float64:
    """Return the factor of xhat: weight, 1 + weight, or 1 without a weight."""
    if weight is None:
        return np.ones((), np.float64)
    wide = np.asarray(weight, np.float64)
    return wide + 1.0 if zero_centered else wide


def add_residual(x: Array, residual: Array, dtype: DTypeLike) -> Array:
    """Return x + residual, added in the compute dtype of the two and rounded to `dtype`."""
    wide = any(np.dtype(of) == np.float64 for of in (x.dtype, residual.dtype, dtype))
    compute = np.float64 if wide else np.float32
    with np.errstate(all="ignore"):
        return round_once(widen(x.astype(compute) + residual.astype(compute)), dtype)


def mean_of(array: Float64, k: int) -> Float64:
    """Return the mean over the last k axes, which keep a size of 1."""
    total: Float64 = np.add.reduce(array, axis=tuple(range(-k, 0)), keepdims=True)
    return np.divide(total, math.prod(array.shape[array.ndim - k :]), out=total)


def mean_of_products(a: Float64, b: Float64, k: int, narrow: bool) -> Float64:
    """Return the mean of a * b over the last k axes, which keep a size of 1."""
    if not narrow:
        return mean_of(a * b, k)
    kept, count = a.shape[: a.ndim - k], math.prod(a.shape[a.ndim - k :])
    a, b = a.reshape(*kept, count), b.reshape(*kept, count)
    total = np.vecdot(a[..., :DOT], b[..., :DOT])  # a call of BLAS for each row, whatever the rest
    for start in range(DOT, count, DOT):
        total += np.vecdot(a[..., start : start + DOT], b[..., start : start + DOT])
    return np.asarray(total / count).reshape(kept + (1,) * k)


def normalize(
    norm: Norm, x: Array, k: int, eps: float, memory: Float64 | None = None
) -> tuple[Float64, Float64 | None, Float64]:
    """Return xhat, mean and rstd over the last k axes; mean and rstd keep axes of size 1."""
    axes, narrow = tuple(range(-k, 0)), x.dtype != np.float64
    wide = widen(x, memory)
    d, exponent = wide, np.zeros((), np.int32)
    if not narrow:
        # Dividing by the larger of max|x| and sqrt(eps) leaves nothing above 1. Values that
        # underflow then are too small to count. frexp leaves the exponent of inf and NaN
        # unspecified.
        largest = np.maximum(np.abs(wide).max(axis=axes, keepdims=True), math.sqrt(eps))
        exponent = np.where(np.isfinite(largest), np.frexp(largest)[1], 0)
        d = np.ldexp(wide, -exponent)
    mean = None
    if norm == "layer_norm":
        first = mean_of(d, k)
        d -= first
        correction = mean_of(d, k)
        d -= correction
        mean = np.ldexp(first + correction, exponent)
    rms = np.sqrt(mean_of_products(d, d, k, narrow))
    # hypot, since an eps whose square is out of range still decides the rstd of large equal values.
    root = np.hypot(rms, np.ldexp(math.sqrt(eps), -exponent))
    inverse = 1.0 / root
    if narrow:
        d *= inverse
    else:
        d /= root
    return d, mean, np.ldexp(inverse, -exponent)


def normalize_by(
    norm: Norm, x: Array, mean: Array | None, rstd: Array, k: int, memory: Float64 | None = None
) -> tuple[Float64, Float64]:
    """Return xhat and rstd from stored statistics. The mean serves only as a shift.

    rstd keeps axes of size 1. If it is inf, it was out of its dtype's range, as for a row of
    subnormal numbers with an eps of 0. Such a row is normalized again.
    """
    wide_rstd = widen(rstd).reshape(rstd.shape + (1,) * k)
    if norm == "rms_norm":
        xhat = widen(x, memory)
        xhat *= wide_rstd
    else:
        assert mean is not None  # noqa: S101 - narrows the type; the callers always have it here
        xhat, factor = widen(x, memory), wide_rstd
        shift = widen(mean).reshape(wide_rstd.shape)
        if x.dtype == np.float64:
            # In parts, since x - mean may overflow where x * rstd does not.
            significand, exponent = np.frexp(wide_rstd)
            down = np.where(np.isfinite(significand), np.minimum(exponent, 0), 0)
            xhat, shift = np.ldexp(xhat, down), np.ldexp(shift, down)
            factor = np.ldexp(significand, exponent - down)
        xhat -= shift
        xhat *= factor
        xhat -= mean_of(xhat, k)
    lost = np.isposinf(wide_rstd)
    if lost.any():
        again, _, exact_rstd = normalize(norm, x, k, 0.0)
        return np.where(lost, again, xhat), np.where(lost, exact_rstd, wide_rstd)
    return xhat, wide_rstd


def affine(xhat: Float64, weight: Array | None, bias: Array | None, zero_centered: bool) -> Float64:
    """Return xhat * weight + bias, in the memory of xhat."""
    if weight is not None:
        xhat *= effective_weight(weight, zero_centered)
    if bias is not None:
        xhat += np.asarray(bias, np.float64)
    return xhat


def clamp(y: Float64, relu: tuple[float, float], x: Array) -> tuple[Float64, NDArray[np.bool_]]:
    """Return y, clamped to bounds in x's compute dtype, and a mask of the values between them."""
    with np.errstate(over="ignore"):
        lower, upper = np.array(relu, np.float64).astype(compute_dtype(x)).astype(np.float64)
    return np.clip(y, lower, upper), (lower < y) & (y < upper)


def masked(dy: Array, bitmask: Array | None, k: int) -> Array:
    """Return dy, 0 where its bit is not set."""
    if bitmask is None:
        return dy
    n = math.prod(dy.shape[dy.ndim - k :])
    return np.where(unpack(bitmask, n).reshape(dy.shape), dy, np.zeros((), dy.dtype))


def forward_float64(
    norm: Norm,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    k: int,
    eps: float,
    zero_centered: bool,
    relu: Relu = None,
    memory: Float64 | None = None,
) -> NormForward:
    """Return y, mean and rstd in float64, before any rounding, and the bitmask."""
    kept = x.shape[: x.ndim - k]
    with np.errstate(all="ignore"):
        xhat, mean, rstd = normalize(norm, x, k, eps, memory)
        y = affine(xhat, weight, bias, zero_centered)
        bitmask = None
        if relu is not None:
            y, inside = clamp(y, relu, x)
            bitmask = pack(inside.reshape(*kept, math.prod(x.shape[x.ndim - k :])))
        mean = None if mean is None else mean.reshape(kept)
        return NormForward(y, mean, rstd.reshape(kept), bitmask)


def backward_float64(
    norm: Norm,
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    k: int,
    zero_centered: bool,
    bias_shape: tuple[int, ...] | None,
    memory: tuple[Float64 | None, Float64 | None] = (None, None),
) -> NormBackward:
    """Return dx, dweight and dbias in float64, before any rounding."""
    narrow = all(array.dtype != np.float64 for array in (dy, x))
    with np.errstate(all="ignore"):
        g = widen(dy, memory[0])
        xhat, wide_rstd = normalize_by(norm, x, mean, rstd, k, memory[1])
        dbias = None if bias_shape is None else sum_to_shape(g, bias_shape, narrow=narrow)
        dweight = None
        if weight is not None:
            dweight = sum_to_shape(g, weight.shape, xhat, narrow=narrow)
            g *= effective_weight(weight, zero_centered)
        # Both are written over: fewer arrays stay in the cache.
        slope = mean_of_products(g, xhat, k, narrow)
        mean_g = mean_of(g, k) if norm == "layer_norm" else None
        g -= np.multiply(xhat, slope, out=xhat)
        if mean_g is not None:
            g -= mean_g
        g *= wide_rstd
        return NormBackward(g, dweight, dbias)


def sum_to_shape(
    array: Float64, shape: tuple[int, ...], factor: Float64 | None = None, *, narrow: bool = False
) -> Float64:
    """Undo a broadcast: sum array * factor over the axes along which `shape` was repeated.

    The sum adds halves to each other, so its error grows with the logarithm of the length. Narrow
    values are added one after the other, as NumPy does over a leading axis. The result is new.
    """
    full = (1,) * (array.ndim - len(shape)) + tuple(shape)
    summed = [a for a in range(array.ndim) if full[a] == 1]
    kept = [a for a in range(array.ndim) if full[a] != 1]
    if narrow:
        axes = string.ascii_letters[: array.ndim]
        of_kept = "".join(axes[a] for a in kept)
        if factor is not None:
            return np.asarray(np.einsum(f"{axes},{axes}->{of_kept}", array, factor)).reshape(shape)
        return np.asarray(np.add.reduce(array, axis=tuple(summed))).reshape(shape)
    count = math.prod(array.shape[a] for a in summed)
    terms = (array if factor is None else array * factor).transpose(*summed, *kept)
    terms = terms.reshape(count, *(n for n in full if n != 1))
    if count == 0:
        return np.zeros(shape)
    while len(terms) > 1:
        half = len(terms) // 2
        pairs: Float64 = terms[:half] + terms[half : 2 * half]
        if len(terms) % 2:
            pairs[0] += terms[-1]
        terms = pairs
    return np.array(terms[0]).reshape(shape)


# ---- the one rounding ----------------------------------------------------------------------------


def compute_dtype(x: Array) -> np.dtype[Any]:
    """Return the dtype that a kernel computes in, which is that of the statistics."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def round_once(values: Float64, dtype: DTypeLike) -> Array:
    """Round float64 values to `dtype`, to nearest and ties to even, in a single rounding."""
    with np.errstate(all="ignore"):
        if np.dtype(dtype) != ml_dtypes.bfloat16:
            return values.astype(dtype)
        # ml_dtypes goes through float32 and so rounds twice: 1 + 2**-8 + 2**-40 becomes 1. A
        # float32 in the middle between two results, 0x8000 at its end, says no more on which side
        # of it the value lies.
        single = np.array(values, np.float32, order="C")
        bits = single.view(np.uint32).reshape(-1)
        ties = np.flatnonzero(bits.astype(np.uint16) == 0x8000)
        if ties.size:
            exact, at = np.abs(values.reshape(-1)[ties]), np.abs(single.reshape(-1)[ties])
            bits[ties] += (exact > at).astype(np.uint32) - (exact < at).astype(np.uint32)
        return single.astype(dtype)


def round_into(out: Array, values: Float64) -> None:
    """Do as `round_once`, to the dtype and the memory of an array."""
    if out.dtype == ml_dtypes.bfloat16:
        out[...] = round_once(values, out.dtype)
    else:
        out[...] = values


# ---- quantized values ----------------------------------------------------------------------------


def quantize(
    y: Array,
    dtype: DTypeLike,
    scale: Any,
    *,
    block: int | None = None,
    axis: Axis = None,
    scale_min: float = 2.0**-126,
    scale_max: float = float(np.finfo(np.float32).max),
) -> tuple[Array, Array]:
    """Return q and scale of an array that a norm has written; see `cupynorm.Quantize`.

    Each quotient is looked up among all numbers of dtype.

    Raises
    ------
    TypeError, ValueError
        If y is no NumPy array of floats, or `cupynorm.Quantize` would refuse another argument.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference
    >>> q, scale = reference.quantize(np.float32([[0.0, -127.0, 2.5]]), np.int8, "row")
    >>> q, scale
    (array([[   0, -127,    2]], dtype=int8), array([[1.]], dtype=float32))
    """
    how = _quantize.Quantize(dtype, scale, block, scale_min=scale_min, scale_max=scale_max)
    y = _taken_y(y)
    axes = _quantize.check_call(how, y, axis, None)
    given = _quantize.taken_scale(how, NUMPY, y, "scale")
    q_dtype, compute = np.dtype(how.dtype), compute_dtype(y)
    with np.errstate(all="ignore"):
        if given is None:
            size = np.where(np.isnan(y), 0.0, np.abs(widen(y)))
            given = scales(size, q_dtype, compute, axes, block, how.scale_min, how.scale_max)
        return nearest(quotients(widen(y), given, compute, block), q_dtype), given


def amax(y: Array) -> Array:
    """Return the largest magnitude of an array that a norm has written, one float32.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference
    >>> reference.amax(np.float32([[0.0, -127.0], [np.nan, 2.5]]))
    array([127.], dtype=float32)
    """
    y = _taken_y(y)
    with np.errstate(all="ignore"):
        largest = np.where(np.isnan(y), 0.0, np.abs(widen(y))).max(initial=0.0)
        return np.full(1, largest, np.float32)


def _taken_y(y: Any) -> Array:
    taken: Array = NUMPY.take("y", y)
    _checks.to_dtype("y.dtype", taken.dtype)
    return taken


def scales(
    size: Float64,
    dtype: np.dtype[Any],
    compute: np.dtype[Any],
    axes: tuple[int, ...],
    block: int | None,
    scale_min: float,
    scale_max: float,
) -> Array:
    """Return the scales of rows, or of their blocks, from the magnitudes of their elements."""
    largest = numbers_of(dtype)[-1]
    if block is None:
        top = size.max(axis=axes, keepdims=True)
    else:
        top = np.maximum.reduceat(size, np.arange(0, size.shape[-1], block), axis=-1)
    if block == 32:
        ratio = np.clip(top / 2.0 ** np.floor(np.log2(largest)), scale_min, scale_max)
        return np.asarray(np.ldexp(1.0, np.frexp(ratio)[1] - 1).astype(ml_dtypes.float8_e8m0fnu))
    ratio = (top / largest).astype(compute).astype(np.float32)
    return np.asarray(np.clip(ratio, np.float32(scale_min), np.float32(scale_max)))


def quotients(y: Float64, scale: Array, compute: np.dtype[Any], block: int | None) -> Float64:
    """Return y / scale as the compute dtype rounds it."""
    wide = widen(scale)
    if block is not None:
        wide = np.repeat(wide, block, axis=-1)[..., : y.shape[-1]]
    elif wide.size == 1:
        wide = wide.reshape(())
    return widen((y / wide).astype(compute))


def numbers_of(dtype: np.dtype[Any]) -> Float64:
    """Return the finite numbers of a dtype from 0 on, ascending. The place of each is its code."""
    if dtype == np.int8:
        return np.arange(128.0)
    every = widen(np.arange(128, dtype=np.uint8).view(dtype))
    return every[np.isfinite(every)]


def nearest(values: Float64, dtype: np.dtype[Any]) -> Array:
    """Return values as the nearest numbers of a dtype, of two the one whose code is even."""
    numbers = numbers_of(dtype)
    if dtype == np.int8:
        numbers = np.append(numbers, 128.0)
    middle = (numbers[:-1] + numbers[1:]) / 2
    below, above = (np.searchsorted(middle, np.abs(values), side) for side in ("left", "right"))
    found = np.copysign(numbers[np.where(below == above, below, below + below % 2)], values)
    if dtype == np.int8:
        return np.where(np.isnan(values), 0.0, np.minimum(found, 127.0)).astype(dtype)
    return np.where(np.isnan(values), np.nan, found).astype(dtype)


# ---- rows by blocks ------------------------------------------------------------------------------


def _blocks(
    x: Array, k: int, weight: Array | None, bias: bool | Array | None
) -> tuple[tuple[int, ...], tuple[int, ...], list[slice]]:
    """Return a shape of x, the shape of its statistics, and the blocks of the first axis.

    That axis has the leading axes of x that weight and bias lack. No rows have no blocks.
    """
    operands = [array.ndim for array in (weight, bias) if isinstance(array, np.ndarray)]
    leading = x.ndim - max(k, *operands, 0)
    shape = (math.prod(x.shape[:leading]), *x.shape[leading:])
    count = max(1, BLOCK // max(1, math.prod(shape[1:])))
    blocks = [slice(start, start + count) for start in range(0, shape[0] if x.size else 0, count)]
    return shape, shape[: len(shape) - k], blocks


def _memory(rows: Array, blocks: list[slice]) -> Float64:
    """Return memory for the float64 copy of a block. It serves all, so it stays in the cache."""
    return np.empty_like(rows[next(iter(blocks), slice(0))], dtype=np.float64, order="C")


def _returned(array: Array, shape: tuple[int, ...], out: Array | None = None) -> Array:
    """Return an array in a shape, or `out` with its values."""
    if out is None:
        return array.reshape(shape)
    out[...] = array.reshape(shape)
    return out


def _add(sums: list[Float64 | None], term: Float64) -> None:
    """Add to sums of 1, 2, 4, ... blocks, so that the error grows as in `sum_to_shape`."""
    for i, held in enumerate(sums):
        if held is None:
            sums[i] = term
            return
        term, sums[i] = held + term, None
    sums.append(term)


def _total(
    sums: list[Float64 | None],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    out: Array | None,
    accumulate: bool,
) -> Array:
    """Return the total of `_add`, in `out` if that is given, or added to what is there."""
    held = [partial for partial in sums if partial is not None]
    total = functools.reduce(np.add, held) if held else np.zeros(shape)
    if out is None:
        return round_once(np.asarray(total), dtype)  # a sum of arrays without axes is a number
    if held or not accumulate:
        out[...] = round_once(widen(out) + total if accumulate else np.asarray(total), out.dtype)
    return out


# ---- the public functions, which hand on all their arguments by name -----------------------------


@np.errstate(all="ignore")
def _forward(
    norm: Norm,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
    axis: tuple[int, ...],
    zero_centered: bool,
    relu: Relu,
    out_dtype: DTypeLike | None,
    out: Array | None,
    residual: Array | None,
    residual_dtype: DTypeLike | None,
    residual_out: Array | None,
) -> NormForward:
    k = len(axis)
    shape, of_statistics, blocks = _blocks(x, k, weight, bias)
    rows, added, total = x.reshape(shape), residual, None
    y = np.empty(shape, out_dtype or (x.dtype if out is None else out.dtype))
    if residual is not None:
        like = residual if residual_out is None else residual_out
        added, total = residual.reshape(shape), np.empty(shape, residual_dtype or like.dtype)
    dtype = compute_dtype(x if total is None else total)
    mean = np.empty(of_statistics, dtype) if norm == "layer_norm" else None
    rstd = np.empty(of_statistics, dtype)
    factor = None if weight is None else effective_weight(weight, zero_centered)  # of all blocks
    offset = None if bias is None else np.asarray(bias, np.float64)
    mask_bytes = -(-math.prod(x.shape[x.ndim - k :]) // 8)
    bitmask = None if relu is None else np.empty((*of_statistics, mask_bytes), np.uint8)
    memory = _memory(rows, blocks)
    np.setbufsize(BUFFER)  # until errstate is left
    for block in blocks:
        values = rows[block]
        if added is not None and total is not None:
            values = total[block] = add_residual(values, added[block], total.dtype)
        exact = forward_float64(
            norm,
            values,
            factor,
            offset,
            k=k,
            eps=eps,
            zero_centered=False,
            relu=relu,
            memory=memory,
        )
        round_into(y[block], exact.y)
        round_into(rstd[block], exact.rstd)
        if mean is not None:
            round_into(mean[block], exact.mean)
        if bitmask is not None:
            bitmask[block] = exact.bitmask
    kept = x.shape[: x.ndim - k]
    return NormForward(
        _returned(y, x.shape, out),
        None if mean is None else _returned(mean, kept),
        _returned(rstd, kept),
        None if bitmask is None else _returned(bitmask, (*kept, mask_bytes)),
        None if total is None else _returned(total, x.shape, residual_out),
    )


@np.errstate(all="ignore")
def _backward(
    norm: Norm,
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    bias: bool | Array,
    bitmask: Array | None,
    axis: tuple[int, ...],
    zero_centered: bool,
    dx: Array | None,
    dresidual_out: Array | None,
    dx_dtype: DTypeLike | None,
    dresidual_dtype: DTypeLike | None,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
) -> NormBackward:
    k = len(axis)
    bias_shape, bias_dtype = bias_like(x, weight, bias, k)
    shape, of_statistics, blocks = _blocks(x, k, weight, bias)
    dy, rows, rstd = dy.reshape(shape), x.reshape(shape), rstd.reshape(of_statistics)
    mean = None if mean is None else mean.reshape(of_statistics)
    bitmask = None if bitmask is None else bitmask.reshape(*of_statistics, bitmask.shape[-1])
    added = None if dresidual_out is None else dresidual_out.reshape(shape)
    of_x, of_residual = np.empty(shape, dx_dtype or x.dtype), None
    if np.dtype(dresidual_dtype or x.dtype) != of_x.dtype:
        of_residual = np.empty(shape, dresidual_dtype or x.dtype)
    of_weight: list[Float64 | None] = []
    of_bias: list[Float64 | None] = []
    factor = None if weight is None else effective_weight(weight, zero_centered)  # of all blocks
    memory = _memory(rows, blocks), _memory(rows, blocks)
    np.setbufsize(BUFFER)  # until errstate is left
    for block in blocks:
        exact = backward_float64(
            norm,
            masked(dy[block], None if bitmask is None else bitmask[block], k),
            rows[block],
            factor,
            None if mean is None else mean[block],
            rstd[block],
            k=k,
            zero_centered=False,
            bias_shape=bias_shape,
            memory=memory,
        )
        of_total = exact.dx if added is None else exact.dx + widen(added[block])
        if exact.dweight is not None:
            _add(of_weight, exact.dweight)
        if exact.dbias is not None:
            _add(of_bias, exact.dbias)
        round_into(of_x[block], of_total)
        if of_residual is not None:
            round_into(of_residual[block], of_total)
    result = dresidual = _returned(of_x, x.shape, dx)
    if of_residual is not None:
        dresidual = _returned(of_residual, x.shape)
    return NormBackward(
        result,
        None
        if weight is None
        else _total(of_weight, weight.shape, weight.dtype, dweight, accumulate),
        None if bias_shape is None else _total(of_bias, bias_shape, bias_dtype, dbias, accumulate),
        dresidual if has_residual(dresidual_out, dx_dtype, dresidual_dtype) else None,
    )


def compute(spec: Spec, options: Options, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a pass writes, by the names of its table, of NumPy arrays by theirs."""
    dtypes = {name: dtype and to_numpy(dtype) for name, dtype in spec.dtypes.items()}
    given: dict[str, Any] = {name: arrays[name] for name in spec.table.reads}
    given |= {"axis": options.axis, "zero_centered": options.zero_centered}
    result: NormForward | NormBackward
    if isinstance(spec, ForwardSpec):
        result = _forward(
            spec.norm,
            **given,
            eps=options.eps,
            relu=options.relu,
            out_dtype=dtypes["y"],
            out=arrays.get("y"),
            residual_dtype=dtypes["residual_out"],
            residual_out=arrays.get("residual_out"),
        )
    else:
        dbias = shapes_of_results(spec, options.k, arrays).get("dbias")
        result = _backward(
            spec.norm,
            **given,
            bias=False if dbias is None else np.empty(dbias, dtypes["dbias"]),
            dx=arrays.get("dx"),
            dx_dtype=dtypes["dx"],
            dresidual_dtype=dtypes["dresidual"] or dtypes["dx"],
            dweight=arrays.get("dweight"),
            dbias=arrays.get("dbias"),
            accumulate=options.accumulate,
        )
    present = spec.dtypes
    return {n: getattr(result, n) if present[n] else None for n in spec.table.writes}


def bias_like(
    x: Array, weight: Array | None, bias: bool | Array, k: int
) -> tuple[tuple[int, ...] | None, np.dtype[Any]]:
    """Return the shape and dtype of dbias. The shape is None if it is not asked for."""
    if isinstance(bias, np.ndarray):
        return bias.shape, bias.dtype
    shape, dtype = (
        (x.shape[x.ndim - k :], x.dtype) if weight is None else (weight.shape, weight.dtype)
    )
    return (shape if bias else None), dtype


def _checked_forward(norm: Norm, given: dict[str, Any]) -> NormForward:
    """Return the results of a forward pass, with the arguments of a public function by name."""
    called = {name: given["out" if name == "y" else name] for name in FORWARD.arguments}
    options = {name: given[name] for name in _checks.Asked._fields if name in given}
    asked = _checks.Asked(norm, training=True, **options)
    arrays, spec, told = _checks.check_call(NUMPY, called, asked)
    return NormForward(**_checks.as_called(told, compute(spec, told, arrays), called))


def _checked_backward(norm: Norm, given: dict[str, Any]) -> NormBackward:
    """Do as `_checked_forward`, for the other pass."""
    like, whether = _checks.like_or_whether(given["bias"])
    arrays = {name: given[name] for name in BACKWARD.arguments if name != "like"}
    options = {name: given[name] for name in _checks.AskedBackward._fields if name in given}
    asked = _checks.AskedBackward(norm, **options | {"bias": whether})
    arrays |= {"like": like}
    arrays, spec, told = _checks.check_call(NUMPY, arrays, asked)
    results = _checks.as_called(told, compute(spec, told, arrays), given | {"like": like})
    if told.has_residual and results["dresidual"] is None:
        results["dresidual"] = results["dx"]
    return NormBackward(**results)


class _Options(TypedDict, total=False):
    eps: float
    axis: Axis
    zero_centered: bool
    relu: Relu
    out_dtype: DTypeLike | None
    out: Array | None
    residual_dtype: DTypeLike | None
    residual_out: Array | None


@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: None = None,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array,
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...
def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    residual_out: Array | None = None,
) -> Any:
    """Return the RMSNorm of a NumPy array; see `cupynorm.rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference
    >>> reference.rms_norm(np.array([3.0, -4.0]), eps=0.0).round(3)
    array([ 0.849, -1.131])
    """
    result = _checked_forward("rms_norm", locals())
    return result.y if residual is None else (result.y, result.residual_out)


@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: None = None,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array,
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    residual_out: Array | None = None,
) -> Any:
    """Return the LayerNorm of a NumPy array; see `cupynorm.layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference
    >>> reference.layer_norm(np.array([1.0, 3.0]), eps=0.0)
    array([-1.,  1.])
    """
    result = _checked_forward("layer_norm", locals())
    return result.y if residual is None else (result.y, result.residual_out)


def rms_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    residual_out: Array | None = None,
) -> NormForward:
    """Return y, rstd and bitmask; see `cupynorm.rms_norm_forward`."""
    return _checked_forward("rms_norm", locals())


def layer_norm_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    residual_out: Array | None = None,
) -> NormForward:
    """Return y, mean, rstd and bitmask; see `cupynorm.layer_norm_forward`."""
    return _checked_forward("layer_norm", locals())


def rms_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    rstd: Array,
    *,
    bias: bool | Array = False,
    bitmask: Array | None = None,
    axis: Axis = None,
    zero_centered: bool = False,
    dx: Array | None = None,
    dresidual_out: Array | None = None,
    dx_dtype: DTypeLike | None = None,
    dresidual_dtype: DTypeLike | None = None,
    dweight: Array | None = None,
    dbias: Array | None = None,
    accumulate: bool = False,
) -> NormBackward:
    """Return the gradients of RMSNorm; see `cupynorm.rms_norm_backward`."""
    return _checked_backward("rms_norm", {"mean": None} | locals())


def layer_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    bias: bool | Array = True,
    bitmask: Array | None = None,
    axis: Axis = None,
    zero_centered: bool = False,
    dx: Array | None = None,
    dresidual_out: Array | None = None,
    dx_dtype: DTypeLike | None = None,
    dresidual_dtype: DTypeLike | None = None,
    dweight: Array | None = None,
    dbias: Array | None = None,
    accumulate: bool = False,
) -> NormBackward:
    """Return the gradients of LayerNorm; see `cupynorm.layer_norm_backward`."""
    return _checked_backward("layer_norm", locals())
