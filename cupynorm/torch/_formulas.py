"""Formulas that torch differentiates, for what the kernels do not compute.

These are the gradients of the backward pass, and the tangents of both passes.

With xhat = (x - mean) * rstd, mean absent in RMSNorm, w the weight or 1 + weight, g = dy * w, m(.)
the mean over a row, and P(v) = v - m(v) - xhat * m(v * xhat), whose m(v) is absent in RMSNorm, the
backward pass is::

    dx = rstd * P(g),  dweight = sum(dy * xhat),  dbias = sum(dy)

From ``d xhat = rstd * P(dx)`` and ``d rstd = -rstd**2 * m(xhat * dx)`` follow the gradients of its
results' sum, weighted by a, b and c, with s = m(a * g) - m(a) * m(g) - m(a * xhat) * m(g * xhat),
whose second term is absent in RMSNorm::

    dy:      w * rstd * P(a) + b * xhat + c
    weight:  sum(dy * rstd * P(a))
    x:       rstd * P(b * dy - rstd * (a * m(g * xhat) + g * m(a * xhat))) - rstd**2 * s * xhat

With a residual, dx and dresidual are both ``rstd * P(g) + dresidual_out``. Then a is the sum of
their weights, and the gradient of dresidual_out.

In forward mode, with a dot for a tangent and s = m(xhat * x.), the two passes have::

    xhat.:    rstd * P(x.)
    y.:       xhat. * w + xhat * w. + bias.
    dx.:      rstd * (P(g.) - xhat. * m(g * xhat) - xhat * m(g * xhat.) - s * rstd * P(g))
    dweight.: sum(dy. * xhat + dy * xhat.)
    dbias.:   sum(dy.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cupynorm._operation import Options
from cupynorm.torch._kernels import compute_type

__all__ = [
    "effective_weight",
    "gradients_of_backward",
    "masked",
    "normalized",
    "round_once",
    "tangents_of_backward",
    "tangents_of_forward",
]


def effective_weight(options: Options, weight: Any, dtype: torch.dtype) -> Any:
    """Return the factor of xhat."""
    if weight is None:
        return 1.0
    return weight.to(dtype) + 1 if options.zero_centered else weight.to(dtype)


def masked(dy: Any, bitmask: Any, k: int, dtype: torch.dtype) -> Any:
    """Return dy, 0 where its bit is not set."""
    dy = dy.to(dtype)
    if bitmask is None:
        return dy
    n = math.prod(dy.shape[dy.ndim - k :])
    # Powers of two are numbers here. A DTensor takes no array of them, and it shifts wrongly (torch
    # 2.11 to 2.13).
    bits = [bitmask & 1 << place for place in range(8)]
    mask = torch.stack(bits, -1).flatten(-2)[..., :n]
    return torch.where(mask.reshape(dy.shape) != 0, dy, 0.0)


def normalized(options: Options, x: Any) -> tuple[Any, Any]:
    """Return xhat and rstd, as functions of x that torch differentiates."""
    axes, eps = options.axis, options.eps
    d = x.to(compute_type(x.dtype))
    # As in `reference`: by a power of two that brings the larger of max|x| and sqrt(eps) near 1.
    # Then nothing that counts overflows or underflows when squared. By its root, twice: it may be
    # out of range itself. torch 2.11 has no frexp of a DTensor, and 0 has no logarithm.
    least = max(math.sqrt(eps), torch.finfo(d.dtype).tiny)
    largest = d.detach().abs().amax(axes, keepdim=True).clamp(min=least)
    largest = torch.where(largest.isfinite(), largest, 1.0)
    down = torch.exp2(-(torch.log2(largest) / 2).floor())
    d, rest = d * down, down
    if options.norm == "layer_norm":
        equal = d.detach().amax(axes, keepdim=True) == d.detach().amin(axes, keepdim=True)
        d = d - d.mean(axes, keepdim=True)
        d = d - d.mean(axes, keepdim=True)  # what that mean was off by
        # If all values are equal, only eps is left. Their size must not push it out of range.
        d = d - torch.where(equal, d.detach(), 0.0)
        rest = torch.where(equal, 1 / (math.sqrt(eps) or 1) / down, down)
    d = d * rest
    root = torch.sqrt((d * d).mean(axes, keepdim=True) + (math.sqrt(eps) * down * rest).square())
    return d / root, 1 / root * down * rest


def round_once(values: Any, dtype: torch.dtype) -> Any:
    """Round to a dtype, to nearest and ties to even, as a function that torch differentiates."""
    info = torch.finfo(dtype)
    if values.dtype == torch.float64 and info.bits == 16:
        # torch goes through float32, and so would round twice. The number added here has its last
        # bit in float64 where the values have theirs in the dtype, down to its subnormals.
        size = values.detach().abs().clamp(info.smallest_normal, info.max)
        power = torch.exp2(torch.log2(size).floor() + 1)
        shift = power * (0.75 * info.eps / torch.finfo(torch.float64).eps)
        rounded = (values + shift - shift).to(dtype)
        return torch.where(rounded == 0, values.to(dtype), rounded)  # has the sign
    return values.to(dtype)


def _mean(options: Options) -> Callable[[Any], Any]:
    """Return m(.), the mean over a row."""
    return lambda v: v.mean(options.axis, keepdim=True)


def _projection(options: Options, xhat: Any) -> Callable[[Any], Any]:
    """Return P(.)."""
    m = _mean(options)

    def project(v: Any) -> Any:
        projected = v - xhat * m(v * xhat)
        return projected - m(v) if options.norm == "layer_norm" else projected

    return project


def gradients_of_backward(
    given: dict[str, Any], read: dict[str, Any], options: Options
) -> dict[str, Any]:
    """Return the gradients of dy, x, dresidual_out and weight, given those of a pass's results.

    All arrays are named, and None if absent. `read` has dy, x, weight and bitmask. The gradient of
    dresidual_out is not rounded to its dtype.
    """
    dy, x, weight, bitmask = (read[name] for name in ("dy", "x", "weight", "bitmask"))
    dtype, k, m = compute_type(x.dtype), options.k, _mean(options)
    of_rows = [given[name].to(dtype) for name in ("dx", "dresidual") if given[name] is not None]
    a, b, c = sum(of_rows) if of_rows else None, given["dweight"], given["dbias"]
    xhat, rstd = normalized(options, x)
    project = _projection(options, xhat)
    w = effective_weight(options, weight, dtype)
    inside = masked(dy, bitmask, k, dtype)
    grad_dy, grad_x = torch.zeros_like(xhat), torch.zeros_like(xhat)
    grad_weight = None
    if a is not None:
        g = inside * w
        scaled = rstd * project(a)
        grad_dy = grad_dy + w * scaled
        a_slope, g_slope = m(a * xhat), m(g * xhat)
        s = m(a * g) - a_slope * g_slope
        s = s - m(a) * m(g) if options.norm == "layer_norm" else s
        grad_x = grad_x - rstd * project(rstd * (a * g_slope + g * a_slope))
        grad_x = grad_x - rstd * (rstd * s) * xhat  # rstd**2 may overflow
        if weight is not None:
            grad_weight = round_once((inside * scaled).sum_to_size(weight.shape), weight.dtype)
    if b is not None:
        b = b.to(dtype)
        grad_dy = grad_dy + b * xhat
        grad_x = grad_x + rstd * project(b * inside)
    if c is not None:
        grad_dy = grad_dy + c.to(dtype)
    return {
        "dy": round_once(masked(grad_dy, bitmask, k, dtype), dy.dtype),
        "x": grad_x.to(x.dtype),
        "dresidual_out": a,
        "weight": grad_weight,
    }


def tangents_of_forward(
    given: dict[str, Any], read: dict[str, Any], options: Options
) -> dict[str, Any]:
    """Return the tangents of y and residual_out in the compute dtype, given those of the inputs.

    All arrays are named, and None if absent. `read` has the normalized x, weight and bitmask.
    """
    x, weight = read["x"], read["weight"]
    dtype = compute_type(x.dtype)
    of_rows = [given[name].to(dtype) for name in ("x", "residual") if given[name] is not None]
    xhat, rstd = normalized(options, x)
    total: Any = sum(of_rows, start=torch.zeros_like(xhat))
    y = rstd * _projection(options, xhat)(total) * effective_weight(options, weight, dtype)
    if given["weight"] is not None:
        y = y + xhat * given["weight"].to(dtype)
    if given["bias"] is not None:
        y = y + given["bias"].to(dtype)
    return {"y": masked(y, read["bitmask"], options.k, dtype), "residual_out": total}


def tangents_of_backward(
    given: dict[str, Any], read: dict[str, Any], options: Options
) -> dict[str, Any]:
    """Return the tangents of a backward pass's results in the compute dtype, given its inputs'.

    All arrays are named, and None if absent. `read` has dy, x, weight and bitmask.
    """
    dy, x, weight, bitmask = (read[name] for name in ("dy", "x", "weight", "bitmask"))
    dtype, k, m = compute_type(x.dtype), options.k, _mean(options)
    xhat, rstd = normalized(options, x)
    project = _projection(options, xhat)
    w = effective_weight(options, weight, dtype)
    inside = masked(dy, bitmask, k, dtype)
    g = inside * w
    of_inside, of_g, of_xhat = (torch.zeros_like(xhat) for _ in range(3))
    if given["dy"] is not None:
        of_inside = masked(given["dy"], bitmask, k, dtype)
        of_g = of_inside * w
    if given["weight"] is not None:
        of_g = of_g + inside * given["weight"].to(dtype)
    dx = rstd * project(of_g)
    if given["x"] is not None:
        of_x = given["x"].to(dtype)
        of_xhat = rstd * project(of_x)
        dx = dx - rstd * (of_xhat * m(g * xhat) + xhat * m(g * of_xhat))
        dx = dx - rstd * m(xhat * of_x) * (rstd * project(g))
    if given["dresidual_out"] is not None:
        dx = dx + given["dresidual_out"].to(dtype)
    of_vectors = x.shape[x.ndim - k :] if weight is None else weight.shape
    return {
        "dx": dx,
        "dweight": (of_inside * xhat + inside * of_xhat).sum_to_size(of_vectors),
        "dbias": of_inside.sum_to_size(of_vectors),
        "dresidual": dx,
    }
