"""A kernel's arithmetic in NumPy: every operation in the compute dtype, sums in a kernel's order.

Without a `bug` it is as careful as a kernel can be expected to be, and must pass the checks. Each
bug is a mistake that a kernel might have, and must fail them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm._operation import NormBackward, NormForward
from cupynorm.reference import Array, Norm, round_once

PACK, MOST_PACKS = 4, 8  # adjacent elements in a pack, and the most packs of a thread
BLOCKS = 4


def forward(
    norm: Norm,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    zero_centered: bool = False,
    out_dtype: Any = None,
    bug: str = "",
) -> NormForward:
    """Return y, mean and rstd over the last of x's two axes."""
    compute = _compute(x)
    one = compute.type(1)
    values = _flush(x.astype(compute))
    n = compute.type(values.shape[1] - (bug == "n_minus_1"))
    eps = {"eps_omitted": 0.0, "eps_1e-5_for_1e-6": 1e-5}.get(bug, eps)
    counted = _counted(values.shape[1], bug)

    def mean_of(terms: Array) -> Array:
        return _flush(_sum(terms[:, :counted]) / n)

    with np.errstate(all="ignore"):
        # A row whose squares leave the range is scaled by the power of two above its largest
        # element.
        largest = np.abs(values).max(axis=1, keepdims=True)
        rms = np.sqrt(np.square(largest / np.sqrt(n)) + compute.type(eps))
        info = np.finfo(compute)
        usual = (rms > info.smallest_normal**0.4) & (largest < info.max**0.4)
        exponent = np.where(usual | ~np.isfinite(largest), 0, np.frexp(largest)[1])
        d = np.ldexp(values, -exponent)
        mean = None
        if norm == "layer_norm" and bug == "one_pass_variance":
            first = mean_of(d)
            variance = mean_of(d * d) - first * first
            d, mean = d - first, first
        elif norm == "layer_norm":
            first = mean_of(d)
            d = _flush(d - first)
            c = mean_of(d) * (bug != "not_recentred")
            variance = mean_of(_flush(d * d)) - c * c
            d, mean = _flush(d - c), np.ldexp(first + c, exponent)
        else:
            variance = mean_of(_flush(d * d))
        variance = np.where(variance < 0, 0, variance).astype(compute)
        root_eps = np.ldexp(np.sqrt(compute.type(eps)), -exponent)
        scaled_rstd = np.where(
            usual,
            one / np.sqrt(variance + compute.type(eps)),
            one / np.hypot(np.sqrt(variance), root_eps),
        ).astype(compute)
        # rsqrt.approx may be off by two units in the last place.
        scaled_rstd = scaled_rstd * (one + 2 * info.eps)
        if bug == "rstd_rounded_early":
            scaled_rstd = scaled_rstd.astype(x.dtype).astype(compute)
        xhat = _flush(d * scaled_rstd)
        if bug == "xhat_rounded_early":
            xhat = xhat.astype(x.dtype).astype(compute)
        y = xhat
        if weight is not None:
            y = y * _weight(weight, compute, zero_centered, bug)
        if bias is not None and bug != "bias_missing":
            y = y + bias.astype(compute)
        y = round_once(_flush(y).astype(np.float64), out_dtype or x.dtype)
        if bug == "last_column_unwritten":
            y[:, -1] = 0
        elif bug == "one_nan":
            y[-1, 0] = np.nan
        elif bug == "nan_dropped":
            y = np.where(np.isnan(y), np.zeros((), y.dtype), y)
        elif bug == "infinity_clamped":
            y = np.where(np.isinf(y), np.finfo(np.float16).max, y).astype(y.dtype)
        elif bug == "rows_swapped":
            y[[0, 1]] = y[[1, 0]]
        rstd = _flush(np.ldexp(scaled_rstd, -exponent))
        return NormForward(y, None if mean is None else _flush(mean[:, 0]), rstd[:, 0])


def backward(
    norm: Norm,
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    dbias: np.dtype[Any] | None,
    zero_centered: bool = False,
    bug: str = "",
) -> NormBackward:
    """Return dx, dweight and, if it has a dtype, dbias."""
    compute = _compute(x)
    n = compute.type(x.shape[1] - (bug == "n_minus_1"))
    counted = _counted(x.shape[1], bug)

    def mean_of(terms: Array) -> Array:
        return _flush(_sum(terms[:, :counted]) / n)

    with np.errstate(all="ignore"):
        dy, x_dtype = _flush(dy.astype(compute)), x.dtype
        x, r = _flush(x.astype(compute)), rstd[:, None]
        g = dy
        if weight is not None:
            g = _flush(dy * _weight(weight, compute, zero_centered, bug))
        if mean is None:
            xhat = _flush(x * r)
        else:
            xhat = _flush(_flush(x - mean[:, None]) * r)
            if bug != "not_recentred":
                xhat = xhat - mean_of(xhat)
        if bug == "xhat_rounded_early":
            xhat = xhat.astype(x_dtype).astype(compute)
        slope = mean_of(_flush(g * xhat))
        dx = g - (0 if bug == "slope_missing" else _flush(xhat * slope))
        if mean is not None and bug != "mean_of_g_missing":
            dx = dx - mean_of(g)
        if bug != "rstd_missing":
            dx = dx * r
        dx = round_once(_flush(dx).astype(np.float64), x_dtype)
        narrow = x_dtype if bug == "sums_in_16_bits" else compute
        kept = slice(1, None) if bug == "row_missing" else slice(None)
        dweight = dbias_sum = None
        if weight is not None:
            terms = dy if bug == "dweight_of_dy" else _flush(dy * xhat)
            dweight = round_once(_sum_rows(terms[kept], narrow), weight.dtype)
        if dbias is not None:
            dbias_sum = round_once(_sum_rows(dy[kept], narrow), dbias)
            if bug == "dbias_shifted":
                dbias_sum = np.roll(dbias_sum, 1)
        return NormBackward(dx, dweight, dbias_sum)


def _compute(x: Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def _counted(n: int, bug: str) -> int:
    """Return how many elements of a row enter its sums."""
    dropped = {"last_dropped": 1, "last_8_dropped": 8, "last_32nd_dropped": n // 32}
    return n - dropped.get(bug, 0)


def _flush(values: Array) -> Array:
    """Return values with subnormal float32 numbers set to zero, as CuPy's compiled code does."""
    if values.dtype == np.float64:
        return values
    smallest = np.finfo(np.float32).smallest_normal
    return np.where(np.abs(values) < smallest, np.float32(0), values).astype(np.float32)


def _weight(weight: Array, compute: np.dtype[Any], zero_centered: bool, bug: str) -> Array:
    w = weight.astype(compute)
    if bug == "weight_shifted":
        w = np.roll(w, 1)
    added: Array = w + compute.type(zero_centered != (bug == "zero_centered_mistaken"))
    return added


def _sum(terms: Array) -> Array:
    """Return each row's sum: a thread adds up its packs' sums, then a tree adds up the threads'."""
    threads = 32
    while threads * PACK * MOST_PACKS < terms.shape[1]:
        threads *= 2
    steps = -(-terms.shape[1] // (threads * PACK))
    padded = np.zeros((terms.shape[0], steps * threads * PACK), terms.dtype)
    padded[:, : terms.shape[1]] = terms
    packs = padded.reshape(-1, steps, threads, PACK)
    partial = np.zeros((terms.shape[0], threads), terms.dtype)
    for step in range(steps):
        of_pack = packs[:, step, :, 0].copy()
        for element in range(1, PACK):
            of_pack += packs[:, step, :, element]
        partial += of_pack
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    return partial


def _sum_rows(terms: Array, dtype: Any) -> Array:
    """Return the sum over rows: each block adds its rows in order, then the blocks are added."""
    total = np.zeros(terms.shape[1], dtype)
    for block in range(BLOCKS):
        partial = np.zeros(terms.shape[1], dtype)
        for row in terms[block::BLOCKS]:
            partial = (partial + row.astype(dtype)).astype(dtype)
        total = (total + partial).astype(dtype)
    return total.astype(np.float64)
