"""The public functions.

They check their arguments. NumPy arrays then go to `reference`, and GPU arrays to the kernels. The
results are arrays of the caller's framework.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from cupynorm import _arrays, _checks, _quantize, reference
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    Axis,
    BackwardSpec,
    ForwardSpec,
    NormBackward,
    NormForward,
    Pass,
    Relu,
)
from cupynorm._prepared import remember
from cupynorm._quantize import Quantize

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it, and nothing else imports it

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
]

_X = TypeVar("_X")
_Residual = TypeVar("_Residual")


class _Options(TypedDict, total=False):
    eps: float
    axis: Axis
    zero_centered: bool
    relu: Relu


class _AnyOptions(_Options, total=False):
    """With these the results' types are open: those of NumPy's arrays hold their dtype."""

    out_dtype: Any
    out: Any
    residual: Any
    residual_dtype: Any
    residual_out: Any


@overload
def rms_norm(
    x: _X,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: None = None,
    **options: Unpack[_Options],
) -> _X: ...
@overload
def rms_norm(
    x: _X, weight: Any = None, bias: Any = None, *, residual: _Residual, **options: Unpack[_Options]
) -> tuple[_X, _Residual]: ...
@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    quantize: Quantize,
    **options: Unpack[_AnyOptions],
) -> tuple[Any, ...]: ...
@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    quantize: None = None,
    **options: Unpack[_AnyOptions],
) -> Any: ...
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: Any = None,
    out: Any = None,
    residual: Any = None,
    residual_dtype: Any = None,
    residual_out: Any = None,
    quantize: Quantize | None = None,
) -> Any:
    """Divide each row by its root mean square, then scale and shift it.

    ``y = x / sqrt(mean(x**2) + eps) * weight + bias``, computed in float32 (float64 where x is
    float64) and rounded once, to y's dtype.

    Parameters
    ----------
    x : array, shape (..., N)
        A NumPy or CuPy array, or any array with ``__dlpack__`` such as a torch tensor or a JAX
        array. Its dtype is float64, float32, float16 or bfloat16. All arrays of a call belong to
        one framework and are on one device. Rows may be any distance apart: leading axes that
        collapse to one stride are read in place.
    weight, bias : array, optional
        They have any of the four dtypes, and broadcast to x's shape by NumPy's rule. A shape of
        (N,) serves all rows. Rows have vectors of their own where a kept axis is not 1: (H, N) is
        one for each head of an x of shape (..., H, N), and (B, 1, N) one for each example. Where a
        normalized axis is 1, an element serves several of a row: (C, 1, 1) has one for each
        channel of rows of shape (C, H, W). It is read by its index, and not repeated in memory.
        See Notes for what is.
    eps : float
        Added to the mean square.
    axis : int or tuple of int, optional
        The axes to normalize over, in any place. Together they are one row of N elements. The
        default is the last axis, whatever shape weight has. To normalize two axes together with a
        weight of shape (512, 512), say ``axis=(-2, -1)``: else each row has a weight of its own.
    zero_centered : bool
        Scale by ``1 + weight``, added in the compute dtype.
    relu : (float, float), optional
        Clamp y to [lower, upper] before it is rounded. ``(0, math.inf)`` is the plain ReLU, and
        ``-math.inf`` clamps at one side only. The bounds are rounded to the compute dtype. -0.0
        counts as 0.0, and NaN stays NaN.
    out_dtype : dtype, optional
        y's dtype. The default is out's, or else x's.
    out : array, optional
        The array to write y to. It has x's shape, and on a GPU contiguous rows one stride apart. If
        the normalized axes are not the last ones, it may have any layout, which may cost a copy. It
        may be x or residual itself. Other overlap with an argument is not detected and gives wrong
        values.
    residual : array, shape of x, optional
        An array to add to x first, of any of the four dtypes. ``s = x + residual`` is added in the
        compute dtype and rounded once, and s is normalized. The bits of y are those of a call on s.
    residual_dtype : dtype, optional
        s's dtype. The default is residual_out's, or else residual's.
    residual_out : array, optional
        The array to write s to, as `out`. It may be x or residual itself, but not `out`.
    quantize : Quantize, optional
        Return y in eight bits an element, with scales. out_dtype and out are None then. On a GPU
        the norm's kernel quantizes rows that registers hold, and operations of CuPy do others.

    Returns
    -------
    array, or tuple of arrays
        y, of x's shape and framework. It is `out` if given, else a new array, C-contiguous if the
        normalized axes are the last ones. With a residual, y and s.

        With quantize, q and scale instead of y, and s behind them: ``(q, scale)`` or ``(q, scale,
        s)``. If quantize asks for amax, it comes behind the scale. q has x's shape. A scale for
        each row has x's shape with 1 for the normalized axes, and scales of blocks have shape
        (..., ceil(N / block)). In CuPy, and where else a framework lacks a dtype of eight bits, the
        array is of uint8.

    Raises
    ------
    TypeError
        If an argument is not an array, or belongs to another framework, or has another dtype, such
        as float64 while JAX has it disabled. If it is more than its numbers, such as a masked
        array, a DTensor or a tensor that requires grad. If eps, axis or zero_centered has another
        type, or relu is not a pair of real numbers.
    ValueError
        If a shape, a device, axis, eps or zero_centered does not fit, if relu's lower bound is not
        below its upper bound, if out cannot be written, or if an option does not go with quantize.
    ImportError
        If x is on a GPU, and CuPy cannot be imported.
    RuntimeError
        If the call is captured into a CUDA graph before its kernel was loaded (see `warmup`), or if
        CuPy cannot write its kernel cache.

    See Also
    --------
    rms_norm_forward : also returns the arrays that backward needs.

    Notes
    -----
    Formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019,
    arXiv:1910.07467, with eps inside the root as in torch.nn.functional.rms_norm. The bits of a
    row of y depend on that row, N, the dtypes, the options and the GPU architecture. If the
    normalized axes are not the last ones, they also depend on how the arrays lie in memory. They
    never depend on the other rows.

    On a GPU the kernels read vectors that vary over one range of adjacent kept axes, both over the
    same ones or one over none, and over the first of the normalized axes, both over the same ones.
    Those of other shapes are repeated to one of these by a copy, in the compute dtype. Their
    gradients are summed to their shapes afterwards, in a fixed order.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[3.0, -4.0], [0.5, 0.5]], dtype=np.float32)
    >>> cupynorm.rms_norm(x, np.array([1.0, 2.0], dtype=np.float32)).round(3)
    array([[ 0.849, -2.263],
           [ 1.   ,  2.   ]], dtype=float32)
    """
    arrays = x, residual, weight, bias, out, residual_out
    asked = "rms_norm", False, axis, zero_centered, eps, relu, out_dtype, residual_dtype
    if quantize is not None:
        return _quantized(arrays, asked, quantize)
    return _call(FORWARD, x, arrays, asked)


@overload
def layer_norm(
    x: _X,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: None = None,
    **options: Unpack[_Options],
) -> _X: ...
@overload
def layer_norm(
    x: _X, weight: Any = None, bias: Any = None, *, residual: _Residual, **options: Unpack[_Options]
) -> tuple[_X, _Residual]: ...
@overload
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    quantize: Quantize,
    **options: Unpack[_AnyOptions],
) -> tuple[Any, ...]: ...
@overload
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    quantize: None = None,
    **options: Unpack[_AnyOptions],
) -> Any: ...
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: Any = None,
    out: Any = None,
    residual: Any = None,
    residual_dtype: Any = None,
    residual_out: Any = None,
    quantize: Quantize | None = None,
) -> Any:
    """Bring each row to mean 0 and variance 1, then scale and shift it.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 (float64 where
    x is float64) and rounded once, to y's dtype. The variance is the biased one. A corrected
    two-pass sum computes it, so a large mean costs no digits.

    Parameters
    ----------
    x, weight, bias, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out, quantize
        As for `rms_norm`.
    eps : float
        Added to the variance.

    Returns
    -------
    array, or tuple of arrays
        y, of x's shape and framework, as `rms_norm` returns it. With a residual, y and
        ``s = x + residual``. With quantize, q and scale instead of y.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `rms_norm`.

    See Also
    --------
    layer_norm_forward : also returns the arrays that backward needs.

    Notes
    -----
    Formula: Ba, Kiros and Hinton, "Layer Normalization", 2016, arXiv:1607.06450. Variance: Chan,
    Golub and LeVeque, "Algorithms for Computing the Sample Variance", The American Statistician
    37(3), 1983, equation 1.7.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[1.0, 3.0], [1e6, 1e6 + 2]], dtype=np.float32)
    >>> cupynorm.layer_norm(x, bias=np.array([0.0, 10.0], dtype=np.float32)).round(3)
    array([[-1., 11.],
           [-1., 11.]], dtype=float32)
    """
    arrays = x, residual, weight, bias, out, residual_out
    asked = "layer_norm", False, axis, zero_centered, eps, relu, out_dtype, residual_dtype
    if quantize is not None:
        return _quantized(arrays, asked, quantize)
    return _call(FORWARD, x, arrays, asked)


def rms_norm_forward(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: Any = None,
    out: Any = None,
    residual: Any = None,
    residual_dtype: Any = None,
    residual_out: Any = None,
    quantize: Quantize | None = None,
) -> NormForward:
    """Compute `rms_norm`, and return the arrays that `rms_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, eps, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out, quantize
        As for `rms_norm`.

    Returns
    -------
    NormForward
        ``y`` is that of `rms_norm`. ``rstd`` is ``1 / sqrt(mean(x**2) + eps)`` of each row. It has
        x's shape without the normalized axes and is float32 (float64 where x is). With relu,
        ``bitmask`` has shape (..., ceil(N / 8)) and a bit for each element, set where
        lower < y < upper before rounding; `pack_bitmask` has the layout. ``mean`` is None, and so
        is ``bitmask`` without relu. With a residual, ``residual_out`` is ``s = x + residual``,
        which is the x of `rms_norm_backward`. With quantize, ``y`` is q, ``scale`` is what to
        multiply it by, and ``amax`` is there if quantize asks for it. The dy of `rms_norm_backward`
        is then the gradient of their product: the rounding counts as the identity (a
        straight-through estimator, arXiv:1308.3432).

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[3.0, -4.0], [0.5, 0.5]], dtype=np.float32)
    >>> cupynorm.rms_norm_forward(x).rstd.round(3)
    array([0.283, 2.   ], dtype=float32)
    >>> result = cupynorm.rms_norm_forward(x, relu=(0, 6))
    >>> result.y.round(3), result.bitmask
    (array([[0.849, 0.   ],
           [1.   , 1.   ]], dtype=float32), array([[1],
           [3]], dtype=uint8))
    """
    arrays = x, residual, weight, bias, out, residual_out
    asked = ("rms_norm", True, axis, zero_centered, eps, relu, out_dtype, residual_dtype)
    result: NormForward = (
        _call(FORWARD, x, arrays, asked)
        if quantize is None
        else _quantized(arrays, asked, quantize)
    )
    return result


def layer_norm_forward(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: Any = None,
    out: Any = None,
    residual: Any = None,
    residual_dtype: Any = None,
    residual_out: Any = None,
    quantize: Quantize | None = None,
) -> NormForward:
    """Compute `layer_norm`, and return the arrays that `layer_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, eps, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out, quantize
        As for `layer_norm`.

    Returns
    -------
    NormForward
        ``y`` is that of `layer_norm`. ``mean`` and ``rstd = 1 / sqrt(var(x) + eps)`` of each row
        have x's shape without the normalized axes and are float32 (float64 where x is).
        ``bitmask``, ``residual_out``, ``scale`` and ``amax`` are as for `rms_norm_forward`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> result = cupynorm.layer_norm_forward(np.array([[1.0, 3.0], [4.0, 8.0]], dtype=np.float32))
    >>> result.mean, result.rstd.round(3)
    (array([2., 6.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    arrays = x, residual, weight, bias, out, residual_out
    asked = ("layer_norm", True, axis, zero_centered, eps, relu, out_dtype, residual_dtype)
    result: NormForward = (
        _call(FORWARD, x, arrays, asked)
        if quantize is None
        else _quantized(arrays, asked, quantize)
    )
    return result


def rms_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    rstd: Any,
    *,
    bias: Any = False,
    bitmask: Any = None,
    axis: Axis = None,
    zero_centered: bool = False,
    dx: Any = None,
    dresidual_out: Any = None,
    dx_dtype: Any = None,
    dresidual_dtype: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    accumulate: bool = False,
) -> NormBackward:
    """Compute the gradients of `rms_norm`.

    With ``xhat = x * rstd`` and ``g = dy * weight`` (``1 + weight`` if zero_centered)::

        dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum(dy * xhat),  dbias = sum(dy)

    Means are over a row. Sums are over all that an element of weight or bias serves, in a fixed
    order. With a bitmask, dy counts as 0 in all of them wherever its bit is not set.

    Parameters
    ----------
    dy : array, shape of x
        Gradient of y, of any of the four dtypes. It may have strides of its own, such as an
        expanded dy.
    x, weight, axis, zero_centered
        As given to the forward function.
    rstd : array
        The one that `rms_norm_forward` returned.
    bias : bool or array
        Whether to compute dbias. The default is False, and None counts as False. True gives dbias
        weight's shape and dtype, or without a weight x's normalized shape and dtype, with 1 for
        kept axes behind the first normalized one: (C, 1, 1) for axis=1 of (B, C, H, W). An array,
        the forward's bias, gives dbias its own shape and dtype.
    bitmask : array of uint8, shape (..., ceil(N / 8)), optional
        The one that the forward function returned, if it had relu. It is copied unless it is
        C-contiguous.
    dx : array, optional
        The array to write dx to. It has x's shape and dx's dtype, and on a GPU the layout of
        rms_norm's out. It may be dy or dresidual_out itself. If it is, rows whose sums overflow
        float32 may become NaN or infinite on a GPU. Otherwise they are computed again.
    dresidual_out : array, shape of x, optional
        The gradient of the forward's residual_out, if it had a residual. That residual_out is x
        here. The gradient is added to dx in the compute dtype, before the one rounding.
    dx_dtype, dresidual_dtype : dtype, optional
        The dtypes of the forward's x and residual. The default is x's here. If both are the same
        dtype, dresidual is dx.
    dweight, dbias : array, optional
        The arrays to write dweight and dbias to. They have the shapes of these, and any of the four
        dtypes: float32 sums of a bfloat16 weight keep their digits. On a GPU they are C-contiguous
        with the normalized axes last. They overlap no other argument.
    accumulate : bool
        Add dweight and dbias to what the given arrays hold, as gradients of several batches are
        added up. Each sum is added once, in the compute dtype or in the array's if that is wider,
        and is rounded once. All that are computed must be given. Of no rows, they stay as they are.

    Returns
    -------
    NormBackward
        ``dx``. ``dweight``, of weight's shape and dtype, None without a weight. ``dbias``, None
        unless asked for. Each is the given array, if there is one. ``dresidual``, None unless
        dresidual_out or one of the two dtypes is given; without them it is dx. The bits are the
        same from run to run. A given dx or dresidual_out, or a dtype of dx, may change those of
        dweight and dbias, whose sums over the rows may go in another order.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `rms_norm`.

    Notes
    -----
    The formulas follow from that of `rms_norm`. See also Zhang and Sennrich, arXiv:1910.07467,
    section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[3.0, -4.0], [0.5, 0.5]], dtype=np.float32)
    >>> weight = np.array([1.0, 2.0], dtype=np.float32)
    >>> rstd = cupynorm.rms_norm_forward(x, weight).rstd
    >>> cupynorm.rms_norm_backward(np.ones_like(x), x, weight, rstd, bias=True).dbias
    array([2., 2.], dtype=float32)
    >>> total = np.zeros(2, dtype=np.float32)
    >>> into = {"dweight": total, "accumulate": True}
    >>> for dy in (np.ones_like(x), x):
    ...     dx = cupynorm.rms_norm_backward(dy, x, weight, rstd, **into).dx
    >>> total.round(3)
    array([4.894, 4.894], dtype=float32)
    """
    like, bias = _checks.like_or_whether(bias)
    result: NormBackward = _call(
        BACKWARD,
        x,
        (dy, x, dresidual_out, weight, None, rstd, bitmask, dx, dweight, dbias, like),
        ("rms_norm", axis, zero_centered, bias, dx_dtype, dresidual_dtype, accumulate),
    )
    return result


def layer_norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    bias: Any = True,
    bitmask: Any = None,
    axis: Axis = None,
    zero_centered: bool = False,
    dx: Any = None,
    dresidual_out: Any = None,
    dx_dtype: Any = None,
    dresidual_dtype: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    accumulate: bool = False,
) -> NormBackward:
    """Compute the gradients of `layer_norm`.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight`` (``1 + weight`` if zero_centered)::

        dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dweight = sum(dy * xhat),
        dbias = sum(dy)

    Means are over a row. Sums are over all that an element of weight or bias serves, in a fixed
    order. With a bitmask, dy counts as 0 in all of them wherever its bit is not set.

    Parameters
    ----------
    dy, x, weight, rstd, bias, bitmask, axis, zero_centered, dx, dresidual_out, dx_dtype, \
dresidual_dtype, dweight, dbias, accumulate
        As for `rms_norm_backward`, except that bias is True by default.
    mean : array
        The one that `layer_norm_forward` returned. It serves only as a shift: xhat is centred again
        by its own mean, so the rounding of a large mean costs nothing.

    Returns
    -------
    NormBackward
        ``dx``. ``dweight``, None without a weight. ``dbias``, None unless asked for. ``dresidual``,
        as for `rms_norm_backward`. The bits are the same from run to run, and change with what is
        given, as said there.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `rms_norm`.

    Notes
    -----
    The formulas follow from that of `layer_norm`. See also Ba, Kiros and Hinton, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[1.0, 3.0], [4.0, 8.0]], dtype=np.float32)
    >>> forward = cupynorm.layer_norm_forward(x)
    >>> backward = cupynorm.layer_norm_backward(x, x, None, forward.mean, forward.rstd)
    >>> backward.dbias
    array([ 5., 11.], dtype=float32)
    """
    like, bias = _checks.like_or_whether(bias)
    result: NormBackward = _call(
        BACKWARD,
        x,
        (dy, x, dresidual_out, weight, mean, rstd, bitmask, dx, dweight, dbias, like),
        ("layer_norm", axis, zero_centered, bias, dx_dtype, dresidual_dtype, accumulate),
    )
    return result


def _quantized(arrays: tuple[Any, ...], asked: tuple[Any, ...], quantize: Any) -> Any:
    """Return the result of a forward pass whose y is quantized."""
    x, residual, weight, bias, out, residual_out = arrays
    *options, out_dtype, residual_dtype = asked
    _, training, axis, *_ = options
    family, key = _arrays.family_of("x", x), None
    if family.is_cupy and isinstance(quantize, Quantize) and out is None:
        calls = _cupy_calls()
        given = x, residual, weight, bias, residual_out, quantize.given
        key = calls.quantized_key((*asked, quantize.told), given)
        run = calls.calls.get(key)
        if run is not None:
            result = run(given)
            if result is not None:
                return result
    family = family.with_device_of(x)
    taken = family.take("x", x)  # says if it has no shape, as a nested tensor
    axes = _quantize.check_call(quantize, x, axis, out_dtype, out)
    scale = _quantize.taken_scale(quantize, family, x)
    like = x if residual is None else residual if residual_out is None else residual_out
    total = residual_dtype or getattr(like, "dtype", None)
    via = _quantize.dtype_of_y(quantize, x, total)
    if quantize.column_major:
        family.check_has_strides("quantize.column_major")
    if quantize.via == via:
        family.check_holds("quantize.via", _arrays.to_numpy(via))
    asked = (*options, via, residual_dtype)
    found = None
    if family is not _arrays.NUMPY:
        found = _by_one_kernel(family, key, arrays, asked, quantize, scale)
    if found is None:
        with _quantize.kept_if_captured(taken):
            made = _call(FORWARD, x, arrays, asked)
            if not training:
                y, total = (made, None) if residual is None else made
                made = NormForward(y, residual_out=total)
            y = family.take("y", made.y)
            codes, scale, amax = _quantize.of_arrays(y, axes, quantize, scale)
        found = made._replace(y=codes, scale=scale, amax=family.give_present(amax))
    q = family.give_as(quantize.dtype, found.y)
    scale = quantize.scale
    if not quantize.is_given:
        scale = family.give_as(quantize.scale_dtype, found.scale)
    if training:
        return found._replace(y=q, scale=scale)
    others = found.amax, found.residual_out
    return (q, scale, *(array for array in others if array is not None))


def _by_one_kernel(
    family: _arrays.Family,
    key: Any,
    arrays: tuple[Any, ...],
    asked: tuple[Any, ...],
    quantize: Quantize,
    scale: Any,
) -> NormForward | None:
    """Return what a forward pass makes, y and its scales as CuPy has them; None without a kernel.

    All else is as the caller's framework has it.
    """
    given = dict(zip(FORWARD.arguments, arrays, strict=True))
    taken, spec, options = _checks.check_call(family, given, _checks.Asked(*asked))
    if _arrays.is_numpy(taken["x"]):
        return None
    calls = _cupy_calls()
    if not isinstance(spec, ForwardSpec):
        return None
    family.check_holds("residual_dtype", _arrays.to_numpy(spec.x))
    written, run = calls.first_quantized(spec, options, taken, quantize.told, scale)
    if not written:
        return None
    if key is not None and run is not None:
        remember(calls.calls, key, run)
    place = given["residual_out"]
    results = {name: family.give_present(written[name]) for name in ("mean", "rstd", "amax")}
    results["residual_out"] = (
        family.give_present(written["residual_out"])
        if place is None
        else family.give_back(place, taken["residual_out"])
    )
    return NormForward(y=written["y"], scale=written["scale"], **results)


@functools.cache
def _cupy_calls() -> Any:
    from cupynorm import _calls

    return _calls


def _begin_anew() -> None:
    """Forget, in a forked process, its parent's calls. First calls say that CUDA is not there."""
    if _cupy_calls.cache_info().currsize:
        _cupy_calls().calls.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _call(table: Pass, x: Any, arrays: tuple[Any, ...], asked: tuple[Any, ...]) -> Any:
    """Return the result of a pass on the arrays of its table, with the options of `_checks`."""
    family, key = _arrays.family_of("x", x), None
    if family.is_cupy:
        calls = _cupy_calls()
        key_of = calls.forward_key if table is FORWARD else calls.backward_key
        key = key_of(asked, arrays)
        run = calls.calls.get(key)
        if run is not None:
            result = run(arrays)
            if result is not None:
                return result
    given = dict(zip(table.arguments, arrays, strict=True))
    return _checked_call(table, family.with_device_of(x), key, given, asked)


def _checked_call(
    table: Pass, family: _arrays.Family, key: Any, given: dict[str, Any], asked: tuple[Any, ...]
) -> Any:
    """Check a call, make it and, if it has a key, keep what makes it again."""
    named = _checks.Asked(*asked) if table is FORWARD else _checks.AskedBackward(*asked)
    arrays, spec, options = _checks.check_call(family, given, named)
    for name, option in table.dtypes_asked.items():
        if name in spec.writes:
            family.check_holds(option, _arrays.to_numpy(spec.dtypes[name]))
    if _arrays.is_numpy(arrays["x"]):
        written = reference.compute(spec, options, arrays)
    else:
        calls = _cupy_calls()
        written, run = calls.first_call(spec, options, arrays)
        if key is not None and run is not None and options.order is None:
            remember(calls.calls, key, run)
    written = _checks.as_called(options, written, given)
    results = {
        name: family.give_present(array)
        if given.get(name) is None
        else family.give_back(given[name], arrays[name])
        for name, array in written.items()
    }
    if isinstance(spec, BackwardSpec):
        if options.has_residual and "dresidual" not in spec.writes:
            results["dresidual"] = results["dx"]
        return NormBackward(**results)
    if options.training:
        return NormForward(**results)
    first, *others = (results[name] for name in spec.returned)
    return (first, *others) if others else first
