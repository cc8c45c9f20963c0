"""The public functions.

They check their arguments. NumPy arrays then go to `reference`, and GPU arrays to the kernels. The
results are arrays of the caller's framework.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynorm import _arrays, _checks, reference
from cupynorm._operation import NormBackward, NormForward, Relu
from cupynorm._prepared import remember

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
]

Axis = int | Sequence[int] | None


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
        They have the shape of x's normalized axes and any of the four dtypes. If axis is given,
        axes of 1 may come before those.
    eps : float
        Added to the mean square.
    axis : int or tuple of int, optional
        The trailing axes to normalize over. Together they are one row of N elements. The default is
        the last axis. A weight or bias of more than one axis needs this argument.
    zero_centered : bool
        Scale by ``1 + weight``, added in the compute dtype.
    relu : (float, float), optional
        Clamp y to [lower, upper] before it is rounded. ``(0, math.inf)`` is the plain ReLU, and
        ``-math.inf`` clamps at one side only. The bounds are rounded to the compute dtype. -0.0
        counts as 0.0, and NaN stays NaN.
    out_dtype : dtype, optional
        y's dtype. The default is out's, or else x's.
    out : array, optional
        The array to write y to. It has x's shape, and on a GPU contiguous rows one stride apart. It
        may be x or residual itself. Other overlap with an argument is not detected and gives wrong
        values.
    residual : array, shape of x, optional
        An array to add to x first, of any of the four dtypes. ``s = x + residual`` is added in the
        compute dtype and rounded once, and s is normalized. The bits of y are those of a call on s.
    residual_dtype : dtype, optional
        s's dtype. The default is residual_out's, or else residual's.
    residual_out : array, optional
        The array to write s to, as `out`. It may be x or residual itself, but not `out`.

    Returns
    -------
    array, or pair of arrays
        y, of x's shape and framework. It is `out` if given, else a new C-contiguous array. With a
        residual, y and s.

    Raises
    ------
    TypeError
        If an argument is not an array, or belongs to another framework, or has another dtype, such
        as float64 while JAX has it disabled. If it is more than its numbers, such as a masked
        array, a DTensor or a tensor that requires grad. If eps, axis or zero_centered has another
        type, or relu is not a pair of real numbers.
    ValueError
        If a shape, a device, axis, eps or zero_centered does not fit, if relu's lower bound is not
        below its upper bound, or if out cannot be written.
    NotImplementedError
        If weight or bias would broadcast over the kept axes of x.
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
    row of y depend on that row, N, the dtypes, the options and the GPU architecture. They never
    depend on the other rows.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[3.0, -4.0], [0.5, 0.5]], dtype=np.float32)
    >>> cupynorm.rms_norm(x, np.array([1.0, 2.0], dtype=np.float32)).round(3)
    array([[ 0.849, -2.263],
           [ 1.   ,  2.   ]], dtype=float32)
    """
    return _forward(
        *(x, weight, bias, out, residual, residual_out),
        ("rms_norm", False, axis, zero_centered, eps, relu, out_dtype, residual_dtype),
    )


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
) -> Any:
    """Bring each row to mean 0 and variance 1, then scale and shift it.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 (float64 where
    x is float64) and rounded once, to y's dtype. The variance is the biased one. A corrected
    two-pass sum computes it, so a large mean costs no digits.

    Parameters
    ----------
    x, weight, bias, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out
        As for `rms_norm`.
    eps : float
        Added to the variance.

    Returns
    -------
    array, or pair of arrays
        y, of x's shape and framework. It is `out` if given, else a new C-contiguous array. With a
        residual, y and ``s = x + residual``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
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
    return _forward(
        *(x, weight, bias, out, residual, residual_out),
        ("layer_norm", False, axis, zero_centered, eps, relu, out_dtype, residual_dtype),
    )


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
) -> NormForward:
    """Compute `rms_norm`, and return the arrays that `rms_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, eps, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out
        As for `rms_norm`.

    Returns
    -------
    NormForward
        ``y`` is that of `rms_norm`. ``rstd`` is ``1 / sqrt(mean(x**2) + eps)`` of each row. It has
        x's shape without the normalized axes and is float32 (float64 where x is). With relu,
        ``bitmask`` has shape (..., ceil(N / 8)) and a bit for each element, set where
        lower < y < upper before rounding; `pack_bitmask` has the layout. ``mean`` is None, and so
        is ``bitmask`` without relu. With a residual, ``residual_out`` is ``s = x + residual``,
        which is the x of `rms_norm_backward`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
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
    result: NormForward = _forward(
        *(x, weight, bias, out, residual, residual_out),
        ("rms_norm", True, axis, zero_centered, eps, relu, out_dtype, residual_dtype),
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
) -> NormForward:
    """Compute `layer_norm`, and return the arrays that `layer_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, eps, axis, zero_centered, relu, out_dtype, out, residual, residual_dtype, \
residual_out
        As for `layer_norm`.

    Returns
    -------
    NormForward
        ``y`` is that of `layer_norm`. ``mean`` and ``rstd = 1 / sqrt(var(x) + eps)`` of each row
        have x's shape without the normalized axes and are float32 (float64 where x is).
        ``bitmask`` and ``residual_out`` are as for `rms_norm_forward`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As for `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> result = cupynorm.layer_norm_forward(np.array([[1.0, 3.0], [4.0, 8.0]], dtype=np.float32))
    >>> result.mean, result.rstd.round(3)
    (array([2., 6.], dtype=float32), array([1. , 0.5], dtype=float32))
    """
    result: NormForward = _forward(
        *(x, weight, bias, out, residual, residual_out),
        ("layer_norm", True, axis, zero_centered, eps, relu, out_dtype, residual_dtype),
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
) -> NormBackward:
    """Compute the gradients of `rms_norm`.

    With ``xhat = x * rstd`` and ``g = dy * weight`` (``1 + weight`` if zero_centered)::

        dx = rstd * (g - xhat * mean(g * xhat)),  dweight = sum(dy * xhat),  dbias = sum(dy)

    Means are over a row, sums over the rows. With a bitmask, dy counts as 0 in all of them wherever
    its bit is not set.

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
        weight's shape and dtype, or without a weight x's normalized shape and dtype. An array, the
        forward's bias, gives it its own shape and dtype.
    bitmask : array of uint8, shape (..., ceil(N / 8)), optional
        The one that the forward function returned, if it had relu. It is copied unless it is
        C-contiguous.
    dx : array, optional
        The array to write dx to. It has x's shape and dx's dtype, and on a GPU contiguous rows one
        stride apart. It may be dy or dresidual_out itself. If it is, rows whose sums overflow
        float32 may become NaN or infinite on a GPU. Otherwise they are computed again.
    dresidual_out : array, shape of x, optional
        The gradient of the forward's residual_out, if it had a residual. That residual_out is x
        here. The gradient is added to dx in the compute dtype, before the one rounding.
    dx_dtype, dresidual_dtype : dtype, optional
        The dtypes of the forward's x and residual. The default is x's here. If both are the same
        dtype, dresidual is dx.

    Returns
    -------
    NormBackward
        ``dx``. ``dweight``, None without a weight. ``dbias``, None unless asked for. ``dresidual``,
        None unless dresidual_out or one of the two dtypes is given; without them it is dx. The bits
        are the same from run to run. A given dx may change the bits of dweight and dbias.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
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
    """
    return _backward(
        *(dy, x, weight, None, rstd, bitmask, dx, dresidual_out, bias),
        ("rms_norm", axis, zero_centered, dx_dtype, dresidual_dtype),
    )


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
) -> NormBackward:
    """Compute the gradients of `layer_norm`.

    With ``xhat = (x - mean) * rstd`` and ``g = dy * weight`` (``1 + weight`` if zero_centered)::

        dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  dweight = sum(dy * xhat),
        dbias = sum(dy)

    Means are over a row, sums over the rows. With a bitmask, dy counts as 0 in all of them wherever
    its bit is not set.

    Parameters
    ----------
    dy, x, weight, rstd, bias, bitmask, axis, zero_centered, dx, dresidual_out, dx_dtype, \
dresidual_dtype
        As for `rms_norm_backward`, except that bias is True by default.
    mean : array
        The one that `layer_norm_forward` returned. It serves only as a shift: xhat is centred again
        by its own mean, so the rounding of a large mean costs nothing.

    Returns
    -------
    NormBackward
        ``dx``. ``dweight``, None without a weight. ``dbias``, None unless asked for. ``dresidual``,
        as for `rms_norm_backward`. The bits are the same from run to run. A given dx may change the
        bits of dweight and dbias.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
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
    return _backward(
        *(dy, x, weight, mean, rstd, bitmask, dx, dresidual_out, bias),
        ("layer_norm", axis, zero_centered, dx_dtype, dresidual_dtype),
    )


@functools.cache
def _cupy_calls() -> Any:
    from cupynorm import _calls

    return _calls


def _forward(
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual: Any,
    residual_out: Any,
    asked: tuple[Any, ...],
) -> Any:
    """Return NormForward if the statistics are stored, else y, or y and residual_out."""
    family = _arrays.family_of("x", x)
    key = None
    if family.is_cupy:
        calls = _cupy_calls()
        key = calls.forward_key(asked, x, weight, bias, out, residual, residual_out)
        run = calls.calls.get(key)
        if run is not None:
            result = run(x, weight, bias, out, residual, residual_out)
            if result is not None:
                return result
    family = family.with_device_of(x)
    x = family.take("x", x)
    weight = None if weight is None else family.take("weight", weight)
    bias = None if bias is None else family.take("bias", bias)
    residual = None if residual is None else family.take("residual", residual)
    target = None if out is None else family.take("out", out, output=True)
    total = None
    if residual_out is not None:
        total = family.take("residual_out", residual_out, output=True)
    spec, options = _checks.check_forward(
        x, weight, bias, target, _checks.Asked(*asked), residual, total
    )
    dtype = _arrays.to_numpy(spec.y)
    family.check_holds("out_dtype", dtype)
    family.check_holds("residual_dtype", _arrays.to_numpy(spec.x))
    if _arrays.is_numpy(x):
        result = getattr(reference, f"{spec.norm}_forward")(
            x,
            weight,
            bias,
            eps=options.eps,
            axis=options.axis,
            zero_centered=options.zero_centered,
            relu=options.relu,
            out_dtype=dtype,
            out=target,
            residual=residual,
            residual_dtype=_arrays.to_numpy(spec.x),
            residual_out=total,
        )
        if not options.training:
            result = result.y if residual is None else (result.y, result.residual_out)
    else:
        calls = _cupy_calls()
        result, run = calls.forward(
            spec, options, x, weight, bias, target, residual=residual, residual_out=total
        )
        if key is not None and run is not None:
            remember(calls.calls, key, run)

    def give_out(array: Any, given: Any, taken: Any) -> Any:
        return family.give_present(array) if given is None else family.give_back(given, taken)

    if not options.training and residual is None:
        return give_out(result, out, target)
    y = give_out(result[0], out, target)
    summed = give_out(result[-1], residual_out, total)
    if not options.training:
        return y, summed
    return NormForward._make([y, *map(family.give_present, result[1:-1]), summed])


def _backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bitmask: Any,
    dx: Any,
    dresidual_out: Any,
    bias: Any,
    asked: tuple[Any, ...],
) -> NormBackward:
    family = _arrays.family_of("x", x)
    norm, axis, zero_centered, dx_dtype, dresidual_dtype = asked
    key = None
    if family.is_cupy:
        calls = _cupy_calls()
        like, wanted = (bias, None) if type(bias) is family.array_type else (None, bias)
        options = norm, True, axis, zero_centered, wanted, dx_dtype, dresidual_dtype
        key = calls.backward_key(
            options, dy, x, rstd, weight, mean, bitmask, dx, like, dresidual_out
        )
        run = calls.calls.get(key)
        if run is not None:
            again: NormBackward | None = run(
                dy, x, weight, mean, rstd, bitmask, dx, like, dresidual_out
            )
            if again is not None:
                return again
    family = family.with_device_of(x)
    arrays = {"x": family.take("x", x), "dy": family.take("dy", dy)}
    arrays["weight"] = None if weight is None else family.take("weight", weight)
    arrays["mean"] = None if norm == "rms_norm" else family.take("mean", mean)
    arrays["rstd"] = family.take("rstd", rstd)
    bias = False if bias is None else bias
    if isinstance(bias, bool | np.bool_):
        bias = bool(bias)
    else:
        family.check_type("bias", bias, besides="True, False, None or ")
        bias = family.take("bias", bias)
    arrays["bitmask"] = bitmask
    if bitmask is not None:
        arrays["bitmask"] = family.take("bitmask", bitmask, dtypes=("uint8",))
    arrays["dx"] = target = None if dx is None else family.take("dx", dx, output=True)
    arrays["dresidual_out"] = None
    if dresidual_out is not None:
        arrays["dresidual_out"] = family.take("dresidual_out", dresidual_out)
    spec, told = _checks.check_backward(
        arrays, bias, _checks.Asked(norm, True, axis, zero_centered), dx_dtype, dresidual_dtype
    )
    has_residual = any(given is not None for given in (dresidual_out, dx_dtype, dresidual_dtype))
    if _arrays.is_numpy(arrays["x"]):
        statistics = {name: arrays[name] for name in ("mean", "rstd") if name in spec.reads}
        result = getattr(reference, f"{norm}_backward")(
            *(arrays[name] for name in ("dy", "x", "weight")),
            **statistics,
            bias=bias,
            bitmask=arrays["bitmask"],
            axis=told.axis,
            zero_centered=told.zero_centered,
            dx=target,
            dresidual_out=arrays["dresidual_out"],
            dx_dtype=_arrays.to_numpy(spec.dtypes["dx"]),
            dresidual_dtype=_arrays.to_numpy(spec.dresidual or spec.dtypes["dx"]),
        )
    else:
        calls = _cupy_calls()
        like = None if isinstance(bias, bool) else bias
        result, run = calls.backward(spec, told, **arrays, like=like, has_residual=has_residual)
        if key is not None and run is not None:
            remember(calls.calls, key, run)
    of_x = family.give(result.dx) if dx is None else family.give_back(dx, target)
    of_residual = None
    if has_residual:
        of_residual = of_x if spec.dresidual is None else family.give(result.dresidual)
    return NormBackward._make([of_x, *map(family.give_present, result[1:3]), of_residual])
