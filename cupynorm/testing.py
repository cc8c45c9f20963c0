"""How close a result must be: one rounding from a careful computation in the compute dtype.

`assert_one_rounding` is the comparison. `check_forward` and `check_backward` apply it to every
field of a result, with the exact values of `cupynorm.reference` and the magnitudes derived here.
They also check the results of a kernel of your own, once these are NumPy arrays.

The bound on each element is ``ulp_T / 2 + 16 * u * S``. The first term is the rounding to the dtype
T of the output, the second covers everything before it. u is the unit roundoff of the compute
dtype, 2**-24 or 2**-53. The magnitude S is the sum of the absolute values of the terms that make up
the result. Each term carries a few roundings of u relative to it. The factor 16 leaves room for
sums in any order that adds no more than some 64 terms one after the other.

Let m be the mean over a row, w the weight or 1 + weight, and g = dy * w:

=========  =======================================================================================
y          ``(a * |xhat| + m|xhat| + s * rstd) * |w| + |b|``; RMSNorm: ``|xhat * w| + |b|``
mean       ``m|x|``
rstd       ``a * rstd``; RMSNorm: ``rstd``
dx         ``rstd * (|g| + m|g| + H * |m(g * xhat)| + |xhat| * m(|g| * H))``;
           RMSNorm: ``rstd * (|g| + |xhat| * m|g * xhat|)``
dweight    the sum over rows of ``|dy| * H``; RMSNorm: of ``|dy * xhat|``
dbias      the sum over rows of ``|dy|``; both gain the ``|value|`` that they are added to
dresidual  as dx, which both gain ``|dresidual_out|``
=========  =======================================================================================

LayerNorm's additional terms come from its mean. The first mean of the corrected two-pass may be off
by ``s = 8u * m|x|``. So the recentred difference is off by some u of
``|x - mean| + m|x - mean| + s``. In the variance ``c**2 <= s**2`` cancels, so it is off by some u
of ``a = 1 + (s * rstd)**2``, relative. In backward, ``h = (x - mean) * rstd`` with the stored mean,
and recentring makes ``xhat = h - m(h)`` off by some u of ``H = |h| + m|h|``. A float64 weight is
rounded to float32 before 1 is added to it, so ``|w|`` gains ``|weight| / 16``.

A clamp moves no two values apart. So y keeps its magnitude within ``16 * u * S`` of a ReLU's
bounds, and beyond them it must be a bound, rounded. The bitmask must be that of exact y, bit for
bit. Elements within ``16 * u * S`` of a bound may have either bit.

With a residual, residual_out must be x + residual, bit for bit, as NumPy adds them in the compute
dtype and rounds the sum to residual_out's dtype. Everything else is checked on residual_out as
given.

A norm of `cupynorm.fuse` takes steps before and after it: functions f of values a, which are off
already. To first order the error of f is what the step itself loses, which is at most 16 u of it,
and the slope ``df/da`` times the error of each a. So f has the magnitude ``|f| + sum |df/da| *
S(a)``. A step that never rounds, such as a maximum, has no ``|f|``. An argument has the magnitude 0
if the compute dtype holds it. Gradients are steps of values, slopes and other gradients, so they
follow the same rule. A term t of a sum or a mean over elements counts as ``max(|t|, S(t))``, since
sums of exact terms are rounded too.

Let the norm be that of a value v, and dv its gradient. An error e of v changes ``rstd**-2`` by
``2 * m((v - mean) * e)``. So it changes rstd by ``-rstd**2 * m(xhat * e)``, and xhat by ``rstd *
(e - xhat * m(xhat * e))``. LayerNorm subtracts ``m(e)`` from e first:

=======  =========================================================================================
S(rstd)  as rstd above, and ``rstd**2 * m(|xhat| * S(v))``
S(xhat)  as y without w and b, and ``rstd * (S(v) + |xhat| * m(|xhat| * S(v)))``; LayerNorm: and
         ``rstd * m(S(v))``
S(y)     as y above, and ``|w|`` times what xhat gains
S(dv)    that of the steps ``(g - (xhat * m(g * xhat) + m(g))) * rstd``; RMSNorm: without ``m(g)``
dweight  the sum over rows of the step ``dy * xhat``
dbias    the sum over rows of dy
=======  =========================================================================================

Rounding may decide a comparison whose sides are closer than their errors. Either side of its
`where` is right then, and their distance is an error of it. The slopes of a ReLU, clip, abs,
maximum or minimum are such a `where`. So a gradient that close to the kink may have the slope of
either side, and all that is computed from it is granted the difference.

CuPy compiles for the GPU with flush-to-zero, so in float32 any value below 2**-126 may count as
zero. Each input, statistic and product is granted an absolute error of 4 * 2**-126, which goes
through the equations above. A row may be divided by its largest element before that, so xhat is
granted sqrt(N) times as much. The bound itself has another 2**-126. It has it too where a float64
computation is rounded to a narrower output, which may go through float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from cupynorm import _quantize, reference
from cupynorm._arrays import NUMPY, is_number, to_numpy
from cupynorm._bitmask import unpack
from cupynorm._checks import (
    Asked,
    AskedBackward,
    as_called,
    check_call,
    check_norm,
    like_or_whether,
    moved,
    normalized_axes,
    order_of,
    to_dtype,
)
from cupynorm._expression_errors import Pair, magnitudes, of_formula, of_numbers
from cupynorm._expressions import Program, gradients
from cupynorm._fuse import NUMPY_TOOLS, Fused, FusedForward, Given, Options
from cupynorm._operation import (
    Axis,
    Norm,
    NormBackward,
    NormForward,
    Relu,
    bitmask_bytes,
    has_residual,
)
from cupynorm._quantize import Quantize
from cupynorm.reference import Array, Float64

__all__ = [
    "assert_one_rounding",
    "check_backward",
    "check_forward",
    "check_fused",
    "check_fused_backward",
    "check_quantized",
]

# So many elements are checked at a time. A float64 temporary of them, 2 MB, stays in cache.
CHUNK_ELEMENTS = 1 << 18


def assert_one_rounding(
    actual: Array, exact: Array, magnitude: Array, compute_dtype: DTypeLike, name: str
) -> float:
    """Assert that `actual` is `exact`, up to one rounding and the noise of the compute dtype.

    Each element must satisfy ``|actual - exact| <= ulp / 2 + 16 * u * magnitude + tiny``. Here ulp
    is the spacing of actual's dtype at the far end of that interval, and u the unit roundoff of
    `compute_dtype`. tiny is the smallest normal number of float32, or of float64 where both actual
    and `compute_dtype` are float64. actual must be NaN exactly where exact is.
    An infinity must have exact's sign, and exact must round to an infinity there, in actual's dtype
    or in the compute dtype. Within ``16 * u * magnitude`` of that threshold, actual may be finite
    or infinite.

    Parameters
    ----------
    actual : array
        The result, of any floating dtype up to float64.
    exact : array of float64
        The exact result, not rounded, of actual's shape.
    magnitude : array of float64
        The sum of the absolute values of the terms that make up exact. Its shape broadcasts to
        actual's. It is finite wherever exact is, and nowhere negative.
    compute_dtype : dtype
        float32 or float64.
    name : str
        The array's name in the message.

    Returns
    -------
    float
        The largest ratio of error to bound; 0.0 for an empty array.

    Raises
    ------
    AssertionError
        If an element exceeds its bound, or the shape is wrong. The message names the array, the
        worst element's index, its value, the exact value, the bound and the ratio.
    TypeError
        If actual's dtype or compute_dtype is another one.
    ValueError
        If the magnitude is negative, or not finite where exact is, so that it would bound nothing,
        or has a shape that does not broadcast.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm.testing import assert_one_rounding
    >>> exact = np.array([0.5, 1 / 3])
    >>> assert_one_rounding(exact.astype(np.float16), exact, exact, np.float32, "third") <= 1.0
    True
    >>> wrong = np.array([1.0, 1 / 3], np.float16)
    >>> assert_one_rounding(wrong, exact, exact, np.float32, "third")
    Traceback (most recent call last):
    ...
    AssertionError: third[0] is 1.0, exactly 0.5: off by 0.5, 2.04e+03 times the bound of 0.000245
    """
    actual, exact, magnitude = map(np.asarray, (actual, exact, magnitude))
    if actual.shape != exact.shape:
        raise AssertionError(f"{name} must have shape {exact.shape}, got {actual.shape}")
    dtype = actual.dtype
    if not _is_floating(dtype):
        raise TypeError(f"{name} must have a floating dtype up to float64, got {dtype}")
    words = "compute_dtype must be float32 or float64, got"
    try:
        compute = to_dtype("compute_dtype", compute_dtype)
    except TypeError:
        raise TypeError(f"{words} {compute_dtype}") from None
    if compute.itemsize < 4:
        raise TypeError(f"{words} {compute}")
    try:
        slack = np.broadcast_to(16 * _unit_roundoff(compute) * magnitude, exact.shape)
    except ValueError as mismatch:
        raise ValueError(
            f"the magnitude of {name} must broadcast to shape {exact.shape}, got {magnitude.shape}"
        ) from mismatch
    if not np.all(np.isfinite(slack) | ~np.isfinite(exact)):
        raise ValueError(f"the magnitude of {name} must be finite wherever its exact value is")
    negative = magnitude[magnitude < 0]
    if negative.size:
        raise ValueError(f"the magnitude of {name} must be at least 0, got {negative.min()}")
    with np.errstate(all="ignore"):
        far = np.abs(exact) + slack
        near = np.abs(exact) - slack
        wide = actual.astype(np.float64)
        bound = _half_ulp(far, dtype) + slack + _smallest_normal(compute, dtype)
        error = np.abs(wide - exact)
        ratio = np.where(np.isfinite(error), error / bound, np.inf)
        overflow = min(_overflow_threshold(dtype), _overflow_threshold(compute))
        must_be_inf = (near >= overflow) | np.isinf(exact)
        may_be_inf = (far >= overflow) | must_be_inf
        right_inf = np.isinf(wide) & may_be_inf & (np.sign(wide) == np.sign(exact))
        ratio = np.where(must_be_inf, np.inf, ratio)
        ratio = np.where(right_inf | (np.isnan(wide) & np.isnan(exact)), 0.0, ratio)
    if ratio.size == 0:
        return 0.0
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    largest = float(ratio[worst])
    if largest > 1.0:
        index = ", ".join(str(int(i)) for i in worst)
        raise AssertionError(
            f"{name}[{index}] is {float(wide[worst])!r}, exactly {float(exact[worst])!r}: off by "
            f"{float(error[worst])!r}, {largest:.3g} times the bound of {float(bound[worst]):.3g}"
        )
    return largest


def check_forward(
    norm: Norm,
    result: NormForward | Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: DTypeLike | None = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
) -> dict[str, float]:
    """Assert that a forward pass is right: shapes, dtypes, and each value by `assert_one_rounding`.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        Which norm it is.
    result : NormForward, array or pair of arrays
        The results, as NumPy arrays. All fields of a NormForward are checked: y, mean (None for
        RMSNorm), rstd, bitmask (None without relu) and residual_out (None without a residual). A
        bare array is the y of inference. With a residual, inference returns a pair.
    x, weight, bias, eps, axis, zero_centered, relu, out_dtype, residual, residual_dtype
        The arguments, as NumPy arrays; see `cupynorm.rms_norm`.

    Returns
    -------
    dict of float
        The largest ratio of error to bound of each field except the bitmask, such as
        ``{"y": 0.98, "rstd": 0.1}``.

    Raises
    ------
    AssertionError
        If a field is missing, is there but should be None, or has a wrong shape, dtype or value.
    TypeError, ValueError
        If an argument does not fit the others, as for `cupynorm.rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference, testing
    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    >>> ratios = testing.check_forward("rms_norm", reference.rms_norm_forward(x), x, eps=1e-6)
    >>> sorted(ratios)
    ['rstd', 'y']
    """
    check_norm(norm)
    arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    asked = Asked(
        norm,
        training=True,
        axis=axis,
        zero_centered=zero_centered,
        eps=eps,
        relu=relu,
        out_dtype=out_dtype,
        residual_dtype=residual_dtype,
    )
    arrays, _, told = check_call(NUMPY, arrays, asked)
    dtypes = {"y": _dtype("out_dtype", out_dtype, x.dtype)}
    shapes = {"y": x.shape}
    x, residual, weight, bias = arrays.values()  # type: ignore[assignment]
    k = told.k
    if isinstance(result, NormForward):
        fields = result._asdict()
    elif residual is None:
        fields = {"y": result}
    elif isinstance(result, tuple | list) and len(result) == 2:
        fields = dict(zip(("y", "residual_out"), result, strict=True))
    else:
        raise TypeError(
            "result must be a NormForward or, with a residual, a pair of arrays; got "
            f"{_kind(result)}"
        )
    if residual is not None:
        total = {"residual_out": fields.pop("residual_out")}
        of_total = {"residual_out": _dtype("residual_dtype", residual_dtype, residual.dtype)}
        _assert_layout(total, {"residual_out": shapes["y"]}, of_total)
        x = _assert_total(_moved(total, told.order)["residual_out"], x, residual)
    compute, kept = reference.compute_dtype(x), x.shape[: x.ndim - k]
    if isinstance(result, NormForward):
        for name in ("rstd",) if norm == "rms_norm" else ("mean", "rstd"):
            dtypes[name], shapes[name] = compute, kept
    ratios = dict.fromkeys(shapes, 0.0)
    has_bitmask = isinstance(result, NormForward) and relu is not None
    if has_bitmask:
        dtypes["bitmask"] = np.dtype(np.uint8)
        shapes["bitmask"] = (*kept, bitmask_bytes(math.prod(x.shape[x.ndim - k :])))
    _assert_layout(fields, shapes, dtypes)
    fields = _moved(fields, told.order)
    for where, rows, w, b in _chunks(x, weight, bias, k):
        exact, magnitude = _forward_bounds(norm, rows(x), w, b, k, eps, zero_centered, compute)
        if relu is not None:
            inside, either = _clamp_bounds(exact, magnitude, rows(x), relu, compute)
            if has_bitmask:
                _assert_bits(rows(fields["bitmask"]), inside, either, k, "bitmask" + where)
        for name in ratios:
            largest = assert_one_rounding(
                rows(fields[name]), exact[name], magnitude[name], compute, name + where
            )
            ratios[name] = max(ratios[name], largest)
    return ratios


def check_fused(
    fused: Fused,
    outputs: Array | tuple[Array, ...] | FusedForward,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float | None = None,
    axis: Axis = None,
    zero_centered: bool = False,
    out_dtype: Any = None,
    **inputs: Any,
) -> tuple[float, ...]:
    """Assert that the outputs of a norm of `cupynorm.fuse` are right, by `assert_one_rounding`.

    Parameters
    ----------
    fused : Fused
        Which norm it is.
    outputs : array, tuple of arrays or FusedForward
        What a call or `forward` returned, as NumPy arrays.
    x, weight, bias, eps, axis, zero_centered, out_dtype, **inputs
        The arguments, as NumPy arrays.

    Returns
    -------
    tuple of float
        The largest ratio of error to bound of each output.

    Raises
    ------
    AssertionError
        If an output is missing, or has a wrong shape, dtype or value.
    TypeError, ValueError
        If an argument does not fit the others, as for a call.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> from cupynorm import testing
    >>> doubled = cupynorm.fuse("rms_norm", epilogue=lambda y: 2 * y)
    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    >>> testing.check_fused(doubled, doubled(x), x)[0] <= 1
    True
    """
    _check_fused(fused)
    given, options = Given(x, weight, bias, inputs), Options(eps, axis, zero_centered, out_dtype)
    call = _FusedCall(fused, given, options)
    made: Any = outputs.outputs if isinstance(outputs, FusedForward) else outputs
    made = made if isinstance(made, tuple) else (made,)
    dtypes = [np.dtype(d) for d in map(to_numpy, fused.dtypes_of_outputs(x.dtype, out_dtype))]
    names = [f"output {i}" for i in range(len(dtypes))]
    if len(made) != len(names):
        raise AssertionError(f"there must be {len(names)} outputs, got {len(made)}")
    fields = dict(zip(names, made, strict=True))
    _assert_layout(fields, dict.fromkeys(names, x.shape), dict(zip(names, dtypes, strict=True)))
    with np.errstate(all="ignore"):
        value, *others = call.entered(made)
        y, _ = call.normalized(value, call.weight, call.bias)
        pairs = *call.evaluated(fused.epilogue, y=y), *others
        ratios = []
        for pair, (name, array) in zip(pairs, fields.items(), strict=True):
            exact, size = map(call.whole, pair)
            ratios.append(assert_one_rounding(call.placed(array), exact, size, call.compute, name))
    return tuple(ratios)


def check_fused_backward(
    fused: Fused, result: Any, dy: Any, forward: FusedForward
) -> dict[str, float]:
    """Assert that the gradients of a norm of `cupynorm.fuse` are right, as `check_fused` does.

    torch and JAX differentiate steps by formulas of their own where no kernel of the norm does.
    These may lose more: that of a sigmoid, ``y * (1 - y)``, does so where y is close to 1.

    Parameters
    ----------
    fused : Fused
        Which norm it is.
    result : named tuple
        What its `backward` returned, as NumPy arrays.
    dy, forward
        The arguments of `backward`, as NumPy arrays. Of forward, only the arguments count, and the
        output that holds what is normalized, if there is one. The statistics are computed from
        these.

    Returns
    -------
    dict of float
        The largest ratio of error to bound of each gradient, such as ``{"dx": 0.1}``.

    Raises
    ------
    AssertionError
        If a gradient is missing, is there but should be None, or has a wrong shape, dtype or value.
    TypeError, ValueError
        If an argument does not fit the others, as for a call.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> from cupynorm import testing
    >>> doubled = cupynorm.fuse("rms_norm", epilogue=lambda y: 2 * y)
    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    >>> forward = doubled.forward(x)
    >>> testing.check_fused_backward(doubled, doubled.backward(x, forward), x, forward)["dx"] <= 1
    True
    """
    _check_fused(fused)
    fused.check_own(forward)
    call = _FusedCall(fused, forward.given, forward.options)
    compute, x = call.compute, forward.given.x
    named = {"x": x, "weight": forward.given.weight, "bias": forward.given.bias}
    arrays = {
        name: array
        for name, array in (named | dict(forward.given.inputs)).items()
        if not (array is None or is_number(array) or array.dtype == np.bool_)
    }
    of_outputs = [
        None if of is None else of_numbers(call.placed(of), compute)
        for of in fused.taken_gradients(NUMPY, dy, x)
    ]
    names = [f"d{name}" for name in (*named, *fused.inputs)]
    if any(not hasattr(result, name) for name in names):
        raise TypeError(f"result must have {', '.join(names)}, got {_kind(result)}")
    fields = {name: getattr(result, name) for name in names}
    shapes, dtypes = (
        {f"d{name}": getattr(array, of) for name, array in arrays.items()}
        for of in ("shape", "dtype")
    )
    _assert_layout(fields, shapes, dtypes)
    with np.errstate(all="ignore"):
        found = call.differentiated(forward.outputs, of_outputs, set(arrays))
        ratios = {}
        for name, array in arrays.items():
            pair = call.summed(found[name], array.shape)
            ratios[f"d{name}"] = assert_one_rounding(fields[f"d{name}"], *pair, compute, f"d{name}")
    return ratios


def check_quantized(
    norm: Norm,
    result: tuple[Array, ...],
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    quantize: Quantize,
    eps: float,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
) -> float:
    """Assert that the results of a norm with `quantize` are right.

    y may be off by its bound before it is rounded to `via`. All steps from there on are monotone,
    so scales lie between those of the ends of this interval, and so does each element of q, with
    the scale that was returned. Where the interval holds no boundary between two numbers of q,
    there is only one right answer.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        Which norm it is.
    result : tuple of arrays
        q, scale, amax if quantize asks for it and, with a residual, residual_out, as NumPy arrays.
        Those that are eight bits of another dtype may be of uint8.
    x, weight, bias, quantize, eps, axis, zero_centered, relu, residual, residual_dtype
        The arguments, with NumPy arrays; see `cupynorm.rms_norm`.

    Returns
    -------
    float
        The share of elements of q that more than one answer was right for.

    Raises
    ------
    AssertionError
        If an array has a wrong shape, dtype or value.
    TypeError, ValueError
        If an argument does not fit the others, as for `cupynorm.rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> from cupynorm import testing
    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    >>> quantize = cupynorm.Quantize("int8", "row")
    >>> result = cupynorm.rms_norm(x, quantize=quantize)
    >>> testing.check_quantized("rms_norm", result, x, quantize=quantize, eps=1e-6) < 0.1
    True
    """
    check_norm(norm)
    x = NUMPY.take("x", x)
    axes = _quantize.check_call(quantize, x, axis, None)
    given = _quantize.taken_scale(quantize, NUMPY, x)
    arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    told: dict[str, Any] = {"axis": axis, "zero_centered": zero_centered, "eps": eps, "relu": relu}
    asked = Asked(norm, training=False, residual_dtype=residual_dtype, **told)
    moved_arrays, spec, options = check_call(NUMPY, arrays, asked)
    names = ["q", "scale"] + (["amax"] if quantize.amax else [])
    names += [] if residual is None else ["residual_out"]
    if not isinstance(result, tuple | list) or len(result) != len(names):
        count = len(result) if isinstance(result, tuple | list) else type(result).__name__
        raise AssertionError(f"result must be {', '.join(names)}, a tuple of arrays; got {count}")
    fields = dict(zip(names, result, strict=True))
    dtypes = {"q": np.dtype(quantize.dtype), "scale": np.dtype(quantize.scale_dtype)}
    dtypes |= {"amax": np.dtype(np.float32)} if quantize.amax else {}
    for name, dtype in dtypes.items():
        if getattr(fields[name], "dtype", None) == np.uint8 and dtype != np.int8:
            fields[name] = fields[name].view(dtype)
    of_rows = tuple(1 if i - x.ndim in axes else n for i, n in enumerate(x.shape))
    shapes = {"q": x.shape, "scale": of_rows if given is None else given.shape}
    shapes |= {"amax": (1,)} if quantize.amax else {}
    if quantize.block is not None:
        shapes["scale"] = (*x.shape[:-1], -(-x.shape[-1] // quantize.block))
    if residual is not None:
        shapes["residual_out"], dtypes["residual_out"] = x.shape, to_numpy(spec.x)
    _assert_layout(fields, shapes, dtypes)
    if given is not None:
        _assert_between(fields["scale"], given, given, "scale")
    order, k = options.order, options.k
    amax = fields.pop("amax", None)
    q, scale, *totals = (
        a if order is None or a.ndim != x.ndim else a.transpose(order) for a in fields.values()
    )
    x, residual, weight, bias = moved_arrays.values()
    if residual is not None:
        x = _assert_total(totals[0], x, residual)
    via = to_numpy(_quantize.dtype_of_y(quantize, moved_arrays["x"], x.dtype))
    compute, open_to_two = reference.compute_dtype(x), 0
    largest = [0.0, 0.0]  # at least and at most
    for where, rows, w, b in _chunks(x, weight, bias, k):
        exact, magnitude = _forward_bounds(norm, rows(x), w, b, k, eps, zero_centered, compute)
        if relu is not None:
            _clamp_bounds(exact, magnitude, rows(x), relu, compute)
        ends = _ends_of_y(exact["y"], magnitude["y"], via, compute)
        scales = scale if given is not None else rows(scale)
        if given is None:
            _assert_scales(scales, ends, quantize, k, "scale" + where)
        open_to_two += _assert_codes(rows(q), scales, ends, quantize, "q" + where)
        largest = [
            float(np.fmax.reduce(size, axis=None, initial=so_far))
            for size, so_far in zip(_sizes(ends), largest, strict=True)
        ]
    if amax is not None:
        with np.errstate(over="ignore"):
            low, high = (np.full(1, size, np.float32) for size in largest)
        _assert_between(amax, low, high, "amax")
    return open_to_two / max(1, q.size)


def _ends_of_y(
    exact: Array, magnitude: Array, via: np.dtype[Any], compute: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the least and the largest y that are right, rounded to the dtype `via`."""
    with np.errstate(all="ignore"):
        slack = 16 * _unit_roundoff(compute) * magnitude + _smallest_normal(compute, via)
        beyond, ends = _overflow_threshold(compute), []
        for end in (exact - slack, exact + slack):
            far = np.where(np.abs(end) >= beyond, np.copysign(np.inf, end), end)
            ends.append(reference.round_once(np.where(np.isinf(exact), exact, far), via))
    return ends[0], ends[1]


def _assert_scales(
    scale: Array, ends: tuple[Array, Array], quantize: Quantize, k: int, name: str
) -> None:
    """Assert that scales lie between those of the ends of y."""
    told = np.dtype(quantize.dtype), reference.compute_dtype(ends[0]), tuple(range(-k, 0))
    bounds = quantize.block, quantize.scale_min, quantize.scale_max
    with np.errstate(all="ignore"):
        least, most = (
            reference.scales(np.where(np.isnan(size), 0.0, size), *told, *bounds)
            for size in _sizes(ends)
        )
    _assert_between(scale, least, most, name)


def _sizes(ends: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the least and the largest magnitudes between the ends of y."""
    low, high = map(reference.widen, ends)
    return np.maximum(np.maximum(low, -high), 0), np.maximum(np.abs(low), np.abs(high))


def _assert_codes(
    q: Array, scale: Array, ends: tuple[Array, Array], quantize: Quantize, name: str
) -> int:
    """Assert that q lies between that of the ends of y; return where these differ."""
    dtype, compute = np.dtype(quantize.dtype), reference.compute_dtype(ends[0])
    with np.errstate(all="ignore"):
        low, high = (
            reference.nearest(
                reference.quotients(reference.widen(end), scale, compute, quantize.block), dtype
            )
            for end in ends
        )
    _assert_between(q, low, high, name)
    return int(np.count_nonzero(reference.widen(low) < reference.widen(high)))


def _assert_between(actual: Array, low: Array, high: Array, name: str) -> None:
    """Assert that values lie between two others, and are NaN where these are."""
    wide, low, high = map(reference.widen, (actual, low, high))
    right = ((low <= wide) & (wide <= high)) | (np.isnan(wide) & np.isnan(low))
    if not right.all():
        index = tuple(int(i) for i in np.argwhere(~right)[0])
        raise AssertionError(
            f"{name}{list(index)} is {float(wide[index])!r}, expected {float(low[index])!r} to "
            f"{float(high[index])!r}; {np.count_nonzero(~right)} are wrong in all"
        )


def check_backward(
    norm: Norm,
    result: NormBackward,
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    bias: bool | Array,
    bitmask: Array | None = None,
    axis: Axis = None,
    zero_centered: bool = False,
    dresidual_out: Array | None = None,
    dx_dtype: DTypeLike | None = None,
    dresidual_dtype: DTypeLike | None = None,
    dweight: Array | None = None,
    dbias: Array | None = None,
    accumulate: bool = False,
) -> dict[str, float]:
    """Assert that a backward pass is right, as `check_forward` does.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        Which norm it is.
    result : NormBackward
        The results, as NumPy arrays.
    dy, x, weight, mean, rstd, bias, bitmask, axis, zero_centered, dresidual_out, dx_dtype, \
dresidual_dtype, dweight, dbias, accumulate
        The arguments, as NumPy arrays; see `cupynorm.layer_norm_backward`. mean is None for
        RMSNorm. dweight and dbias are as they were before the call. The statistics and the bitmask
        are taken as given, right or wrong, except an rstd of inf. That one was out of range, so it
        is computed from x with eps = 0.

    Returns
    -------
    dict of float
        The largest ratio of error to bound of each field that is not None.

    Raises
    ------
    AssertionError
        If a field is missing, is there but should be None, or has a wrong shape, dtype or value.
    TypeError, ValueError
        If an argument does not fit the others, as for `cupynorm.rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupynorm import reference, testing
    >>> x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    >>> _, mean, rstd, *_ = reference.layer_norm_forward(x)
    >>> result = reference.layer_norm_backward(x, x, None, mean, rstd, bias=False)
    >>> ratios = testing.check_backward("layer_norm", result, x, x, None, mean, rstd, bias=False)
    >>> sorted(ratios)
    ['dx']
    """
    check_norm(norm)
    if not isinstance(result, NormBackward):
        raise TypeError(f"result must be a NormBackward, got {_kind(result)}")
    like, whether = like_or_whether(bias)
    arrays = {"dy": dy, "x": x, "dresidual_out": dresidual_out, "weight": weight, "mean": mean}
    arrays |= {"rstd": rstd, "bitmask": bitmask, "dx": None, "like": like}
    before: dict[str, Any] = {"dweight": dweight, "dbias": dbias}
    of_rows = dx_dtype, dresidual_dtype
    asked = AskedBackward(norm, axis, zero_centered, whether, *of_rows, accumulate)
    vectors = {"weight": weight, "like": like}
    arrays, _, told = check_call(NUMPY, arrays | before, asked)
    dy, x, dresidual_out, weight, *_ = arrays.values()  # type: ignore[assignment]
    like, before = arrays["like"], {name: arrays[name] for name in before}
    bias = bool(whether) if like is None else like
    if told.order is not None and bias is True and weight is None:  # it gets all of x's axes
        bias = np.empty([1] * (x.ndim - told.k) + [*x.shape[x.ndim - told.k :]], x.dtype)
    k = told.k
    compute = reference.compute_dtype(x)
    of_x = _dtype("dx_dtype", dx_dtype, x.dtype)
    dtypes, shapes = {"dx": of_x}, {"dx": x.shape}
    inputs = ["dx"]
    if has_residual(dresidual_out, dx_dtype, dresidual_dtype):
        inputs.append("dresidual")
        dtypes["dresidual"] = _dtype("dresidual_dtype", dresidual_dtype, x.dtype)
        shapes["dresidual"] = x.shape
    if weight is not None:
        dtypes["dweight"], shapes["dweight"] = weight.dtype, weight.shape
    bias_shape, bias_dtype = reference.bias_like(x, weight, bias, k)
    if bias_shape is not None:
        dtypes["dbias"], shapes["dbias"] = bias_dtype, bias_shape
    dtypes |= {name: array.dtype for name, array in before.items() if array is not None}
    outlines = {name: np.broadcast_to(np.zeros(()), shape) for name, shape in shapes.items()}
    called = {name: a.shape for name, a in as_called(told, outlines, vectors).items()}
    _assert_layout(result._asdict(), called, dtypes)
    result = NormBackward(**_moved(result._asdict(), told.order))
    ratios = dict.fromkeys(inputs, 0.0)
    sums = {name: np.zeros(shape) for name, shape in shapes.items() if name not in inputs}
    sum_magnitudes = {name: np.zeros(shape) for name, shape in shapes.items() if name not in inputs}
    dbias_like = None if bias_shape is None else np.empty(bias_shape)
    for where, rows, w, b in _chunks(x, weight, dbias_like, k):
        kept_dy = reference.masked(rows(dy), rows(bitmask), k)
        exact, magnitude = _backward_bounds(
            norm, kept_dy, rows(x), w, rows(mean), rows(rstd), b, k, zero_centered, compute
        )
        if dresidual_out is not None:
            with np.errstate(all="ignore"):
                of_total = reference.widen(rows(dresidual_out))
                exact["dx"], magnitude["dx"] = (
                    exact["dx"] + of_total,
                    magnitude["dx"] + np.abs(of_total),
                )
        for name in inputs:
            largest = assert_one_rounding(
                rows(getattr(result, name)), exact["dx"], magnitude["dx"], compute, name + where
            )
            ratios[name] = max(ratios[name], largest)
        for name in sums:
            sums[name] += exact[name]
            sum_magnitudes[name] += magnitude[name]
    for name in sums:
        actual = getattr(result, name)
        if accumulate:
            held = reference.widen(before[name]).reshape(shapes[name])
            sums[name] += held
            sum_magnitudes[name] += np.abs(held) + _flushed(compute)
        ratios[name] = assert_one_rounding(actual, sums[name], sum_magnitudes[name], compute, name)
    return ratios


def _moved(fields: dict[str, Any], order: tuple[int, ...] | None) -> dict[str, Any]:
    """Return results of the right shapes with x's axes in an order."""
    if order is None:
        return fields
    return {n: None if a is None else moved(order, n, a) for n, a in fields.items()}


def _kind(value: Any) -> str:
    return type(value).__name__


def _check_fused(fused: Any) -> None:
    if not isinstance(fused, Fused):
        raise TypeError(f"fused must be a norm of cupynorm.fuse, got {_kind(fused)}")


def _dtype(name: str, asked: Any, default: np.dtype[Any]) -> np.dtype[Any]:
    return default if asked is None else to_dtype(name, asked)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    try:
        return dtype.kind != "c" and bool(_info(dtype).bits <= 64)
    except ValueError:
        return False


def _assert_total(actual: Array, x: Array, residual: Array) -> Array:
    """Assert that residual_out is x + residual, and return it."""
    exact = reference.add_residual(x, residual, actual.dtype)
    wrong = (actual != exact) & ~(np.isnan(actual) & np.isnan(exact))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"residual_out{list(index)} is {float(actual[index])!r}, x + residual "
            f"{float(exact[index])!r}"
        )
    return np.asarray(actual)


# ---- the magnitudes ------------------------------------------------------------------------------


class _FusedCall:
    """A call of a norm of `cupynorm.fuse`, whose arrays have x's shape, normalized axes last.

    Values come in pairs with their magnitudes.
    """

    def __init__(self, fused: Fused, given: Given, options: Options) -> None:
        self.fused, self.options = fused, options
        NUMPY.check_type("x", given.x)
        _, given, compute = fused.taken(given, options)
        self.compute = np.dtype(compute)
        ndim = given.x.ndim
        axes = normalized_axes(ndim, options.axis)
        self.shape, self.k = given.x.shape, len(axes)
        self.order = order_of(ndim, axes) or tuple(range(ndim))
        self.weight, self.bias = map(self.placed, (given.weight, given.bias))
        self.known = {
            name: of_numbers(array if is_number(array) else self.placed(array), self.compute)
            for name, array in {"x": given.x, **given.inputs}.items()
        }

    def placed(self, array: Any) -> Any:
        return None if array is None else np.broadcast_to(array, self.shape).transpose(self.order)

    def whole(self, array: Any) -> Any:
        return np.broadcast_to(array, [self.shape[axis] for axis in self.order])

    def evaluated(self, program: Program, **others: Pair) -> list[Pair]:
        return magnitudes(program, NUMPY_TOOLS, self.known | others, self.compute)

    def formula(self, function: Callable[..., Any], *pairs: Pair) -> Pair:
        return of_formula(function, NUMPY_TOOLS, self.compute, *pairs)

    def entered(self, outputs: Sequence[Array]) -> list[Pair]:
        """Return the results of the prologue. If outputs hold the first, it is what they hold."""
        first, *others = self.evaluated(self.fused.prologue)
        of_value, *of_others = self.fused.prologue.results
        if of_value in of_others:
            place = len(self.fused.epilogue.results) + of_others.index(of_value)
            first = reference.widen(self.placed(outputs[place])), 0.0
        return [(self.whole(first[0]), self.whole(first[1])), *others]

    def normalized(
        self, value: Pair, weight: Array | None, bias: Array | None
    ) -> tuple[Pair, Pair]:
        """Return y and rstd."""
        (x, size), k, eps = value, self.k, self.fused.eps(self.options)
        zero_centered = self.options.zero_centered
        exact, own = _forward_bounds(
            self.fused.norm, x, weight, bias, k, eps, zero_centered, self.compute
        )
        xhat, _, rstd = reference.normalize(self.fused.norm, x, k, eps)
        of_mean = reference.mean_of(size * np.abs(xhat), k)
        passed = size + np.abs(xhat) * of_mean
        if self.fused.norm == "layer_norm":
            passed += reference.mean_of(size, k)
        factor = np.abs(reference.effective_weight(weight, zero_centered))
        # A row with an infinity has an rstd of 0, and zeros, whatever its other values lost.
        exact_row = rstd == 0
        of_y, of_rstd = (
            np.where((lost == 0) | exact_row, 0.0, lost * rstd * by)
            for lost, by in ((passed, factor), (of_mean, rstd))
        )
        return (exact["y"], own["y"] + of_y), (rstd, own["rstd"].reshape(rstd.shape) + of_rstd)

    def differentiated(
        self, outputs: Sequence[Array], of_outputs: Sequence[Pair | None], names: set[str]
    ) -> dict[str, Pair]:
        """Return the gradients of named arguments, before any sum over what they share."""
        value, *_ = self.entered(outputs)
        y, _ = self.normalized(value, self.weight, self.bias)
        xhat, rstd = self.normalized(value, None, None)
        count = len(self.fused.epilogue.results)
        found = self._pulled_back(self.fused.epilogue, of_outputs[:count], names | {"y"}, y=y)
        g = dy = found.pop("y")
        if self.weight is not None:
            zero_centered = self.options.zero_centered
            factor = reference.effective_weight(self.weight, zero_centered)
            of_weight = factor, _weight_size(self.weight, zero_centered, self.compute)
            g = self.formula(lambda dy, w: dy * w, dy, of_weight)
        found["weight"], found["bias"] = self.formula(lambda dy, xhat: dy * xhat, dy, xhat), dy
        along = self._mean(self.formula(lambda g, xhat: g * xhat, g, xhat))
        mean = self._mean(g) if self.fused.norm == "layer_norm" else (0.0, 0.0)
        of_value = self.formula(
            lambda g, xhat, along, mean, rstd: (g - (xhat * along + mean)) * rstd,
            *(g, xhat, along, mean, rstd),
        )
        before = self._pulled_back(self.fused.prologue, [of_value, *of_outputs[count:]], names)
        for name, pair in before.items():
            both = name in found
            found[name] = self.formula(lambda a, b: a + b, found[name], pair) if both else pair
        return found

    def _pulled_back(
        self, program: Program, of_results: Sequence[Pair | None], names: set[str], **others: Pair
    ) -> dict[str, Pair]:
        """Return the gradients of the arguments of a program, from those of its results."""
        given = {f"_{i}": of for i, of in enumerate(of_results) if of is not None}
        wanted = tuple(name for name in program.arguments if name in names)
        found = self.evaluated(gradients(program, tuple(given), wanted), **given, **others)
        return dict(zip(wanted, found, strict=True))

    def _terms(self, pair: Pair) -> Pair:
        """Return what is added up. What was exact has a magnitude, too: its sum is rounded."""
        value, size = map(self.whole, pair)
        return value, np.maximum(size, np.abs(value))

    def _mean(self, pair: Pair) -> Pair:
        value, size = self._terms(pair)
        return reference.mean_of(value, self.k), reference.mean_of(size, self.k)

    def summed(self, pair: Pair, shape: tuple[int, ...]) -> Pair:
        """Undo a broadcast, and the order of the axes."""
        value, size = map(self.whole, pair) if shape == self.shape else self._terms(pair)
        back = np.argsort(self.order)
        value, size = (reference.sum_to_shape(a.transpose(back), shape) for a in (value, size))
        return value, size


def _forward_bounds(
    norm: Norm,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    k: int,
    eps: float,
    zero_centered: bool,
    compute: np.dtype[Any],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the exact y, mean and rstd, and the magnitude of each."""
    kept, axes, tiny = x.shape[: x.ndim - k], tuple(range(-k, 0)), _flushed(compute)
    with np.errstate(all="ignore"):
        xhat, mean, rstd = reference.normalize(norm, x, k, eps)
        size = np.abs(xhat)
        y = reference.affine(xhat, weight, bias, zero_centered)
        inflation: float | Float64 = 1.0
        if mean is not None:
            mean_abs = np.abs(reference.widen(x)).mean(axis=axes, keepdims=True)
            shift = 8 * _unit_roundoff(compute) * mean_abs * rstd
            inflation = 1 + np.minimum(shift, 1e15) ** 2  # beyond, it bounds nothing anyway
            size = inflation * size + size.mean(axis=axes, keepdims=True) + shift
        n = math.prod(x.shape[x.ndim - k :])
        size += tiny * (math.sqrt(n) + rstd * (1 + size))
        size *= _weight_size(weight, zero_centered, compute)
        size += tiny if bias is None else np.abs(reference.widen(bias)) + tiny
        rstd_size = (inflation + tiny * rstd) * rstd + tiny
    exact = {"y": y, "rstd": rstd.reshape(kept)}
    magnitude = {"y": size, "rstd": rstd_size.reshape(kept)}
    if mean is not None:
        exact["mean"], magnitude["mean"] = mean.reshape(kept), mean_abs.reshape(kept) + tiny
    return exact, magnitude


def _clamp_bounds(
    exact: dict[str, Array],
    magnitude: dict[str, Array],
    x: Array,
    relu: tuple[float, float],
    compute: np.dtype[Any],
) -> tuple[Array, Array]:
    """Clamp the exact y. Return the bits of the bitmask, and where either bit is right."""
    with np.errstate(all="ignore"):
        y, tiny = exact["y"], float(_info(compute).smallest_normal)
        slack = 16 * _unit_roundoff(compute) * magnitude["y"] + tiny
        clamped, inside = reference.clamp(y, relu, x)
        lower, upper = (reference.clamp(np.array(end), relu, x)[0] for end in (-np.inf, np.inf))
        either = (np.abs(y - lower) <= slack) | (np.abs(y - upper) <= slack)
        beyond = ~inside & ~either & ~np.isnan(y)
        magnitude["y"] = np.where(beyond | np.isinf(y), 0.0, magnitude["y"])
        exact["y"] = clamped
    return inside, either


def _assert_bits(bitmask: Array, inside: Array, either: Array, k: int, name: str) -> None:
    """Assert that a bitmask has the bits of `inside`, except where `either`, and no others."""
    kept = inside.shape[: inside.ndim - k]
    n = math.prod(inside.shape[inside.ndim - k :])
    bits = unpack(bitmask, 8 * bitmask.shape[-1])
    wrong = bits.copy()  # the spare ones, if set
    wrong[..., :n] = (bits[..., :n] != inside.reshape(*kept, n)) & ~either.reshape(*kept, n)
    if wrong.any():
        *row, column = (int(i) for i in np.argwhere(wrong)[0])
        what = f"that of column {column}" if column < n else "a spare one"
        raise AssertionError(
            f"{name}{row} has {np.count_nonzero(wrong)} wrong bits in all; the first, {what}, is "
            f"{int(bits[(*row, column)])}"
        )


def _backward_bounds(
    norm: Norm,
    dy: Array,
    x: Array,
    weight: Array | None,
    mean: Array | None,
    rstd: Array,
    bias: Array | None,
    k: int,
    zero_centered: bool,
    compute: np.dtype[Any],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the exact dx, dweight and dbias, and the magnitude of each."""
    axes, tiny = tuple(range(-k, 0)), _flushed(compute)
    result = reference.backward_float64(
        norm,
        dy,
        x,
        weight,
        mean,
        rstd,
        k=k,
        zero_centered=zero_centered,
        bias_shape=None if bias is None else bias.shape,
    )
    with np.errstate(all="ignore"):
        dy_size = np.abs(reference.widen(dy)) + tiny
        g_size = dy_size * _weight_size(weight, zero_centered, compute) + tiny
        xhat, r = reference.normalize_by(norm, x, mean, rstd, k)
        if mean is None:
            h_size = np.abs(xhat) + tiny * (1 + r)
            slope_size = np.mean(g_size * h_size, axis=axes, keepdims=True) + tiny
            size = g_size + h_size * slope_size
        else:
            h = np.abs((reference.widen(x) - reference.widen(mean).reshape(r.shape)) * r)
            h_size = h + h.mean(axis=axes, keepdims=True) + tiny * (1 + r)
            g = reference.widen(dy) * reference.effective_weight(weight, zero_centered)
            slope = np.abs(np.mean(g * xhat, axis=axes, keepdims=True))
            slope_size = np.mean(g_size * h_size, axis=axes, keepdims=True) + tiny
            size = g_size + g_size.mean(axis=axes, keepdims=True)
            size += h_size * slope + np.abs(xhat) * slope_size
        exact, magnitude = {"dx": result.dx}, {"dx": size * r}
        if weight is not None:
            exact["dweight"] = result.dweight
            magnitude["dweight"] = reference.sum_to_shape(dy_size * h_size + tiny, weight.shape)
        if bias is not None:
            exact["dbias"] = result.dbias
            magnitude["dbias"] = reference.sum_to_shape(dy_size, bias.shape)
    return exact, magnitude


def _weight_size(weight: Array | None, zero_centered: bool, compute: np.dtype[Any]) -> Float64:
    size = np.abs(reference.effective_weight(weight, zero_centered)) + _flushed(compute)
    if weight is not None and zero_centered and weight.dtype.itemsize > compute.itemsize:
        size += np.abs(weight) / 16
    return size


# ---- dtypes and rows -----------------------------------------------------------------------------


def _info(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _unit_roundoff(dtype: np.dtype[Any]) -> float:
    return float(_info(dtype).eps) / 2


def _smallest_normal(compute: np.dtype[Any], output: np.dtype[Any]) -> float:
    """Return the value below which a result may count as zero."""
    is_wide = compute == output == np.float64
    return float(_info(np.dtype(np.float64 if is_wide else np.float32)).smallest_normal)


def _flushed(compute: np.dtype[Any]) -> float:
    """Return the magnitude that grants an absolute error of four smallest normal numbers."""
    return float(_info(compute).smallest_normal) / (4 * _unit_roundoff(compute))


def _half_ulp(values: Array, dtype: np.dtype[Any]) -> Float64:
    """Return half the spacing of `dtype` at each float64 value."""
    info = _info(dtype)
    exponent = np.frexp(np.minimum(values, float(info.max)))[1] - 1
    half: Float64 = np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant - 1)
    return half


def _overflow_threshold(dtype: np.dtype[Any]) -> float:
    """Return the least value that rounds to infinity."""
    largest = float(_info(dtype).max)
    with np.errstate(over="ignore"):
        return float(largest + _half_ulp(np.array(largest), dtype))


def _assert_layout(
    fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtypes: dict[str, np.dtype[Any]]
) -> None:
    for name, actual in fields.items():
        if name not in shapes:
            if actual is not None:
                raise AssertionError(f"{name} must be None, got an array of shape {actual.shape}")
            continue
        if actual is None:
            raise AssertionError(f"{name} must not be None")
        if not isinstance(actual, np.ndarray | np.generic):
            raise TypeError(f"{name} must be a NumPy array, got {_kind(actual)}")
        if actual.shape != shapes[name]:
            raise AssertionError(f"{name} must have shape {shapes[name]}, got {actual.shape}")
        if actual.dtype != dtypes[name]:
            raise AssertionError(f"{name} must have dtype {dtypes[name]}, got {actual.dtype}")


Rows = Callable[[Any], Any]


def _chunks(
    x: Array, weight: Array | None, bias: Array | None, k: int
) -> Iterator[tuple[str, Rows, Array | None, Array | None]]:
    """Yield some rows at a time: their index in words, their selector, weight and bias."""
    lead = x.ndim - k
    if any(array is not None and array.ndim > k for array in (weight, bias)):
        yield "", lambda array: array, weight, bias  # the weight differs from row to row
        return
    count = math.prod(x.shape[:lead])
    step = max(1, CHUNK_ELEMENTS // math.prod(x.shape[lead:]))
    for start in range(0, count, step):

        def rows(array: Any, start: int = start) -> Any:
            if array is None:
                return None
            return array.reshape(count, *array.shape[lead:])[start : start + step]

        yield f"[{start}:]" if count > step else "", rows, weight, bias
