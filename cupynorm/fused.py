"""Norms that models use, each a line of `cupynorm.fuse`.

They take the arrays that a norm of `cupynorm.fuse` takes. torch tensors and JAX arrays may be
differentiated. To compute gradients by hand, fuse the same line yourself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import numpy as np

from cupynorm import _arrays, _checks
from cupynorm import math as of
from cupynorm._fuse import fuse

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it, and nothing else imports it

__all__ = ["deep_norm", "l2_norm", "rms_norm_gated"]

_GATE_LAST = fuse("rms_norm", epilogue=lambda y, z: y * of.silu(z))
_GATE_FIRST = fuse("rms_norm", prologue=lambda x, z: x * of.silu(z))
_DEEP = fuse("layer_norm", prologue=lambda x, branch, alpha: alpha * x + branch)
_UNIT = fuse("rms_norm", epilogue=lambda y, length: y * length)

_X = TypeVar("_X")


class _Options(TypedDict, total=False):
    eps: float | None
    axis: Any
    zero_centered: bool


class _AnyOptions(_Options, total=False):
    out_dtype: Any


@overload
def rms_norm_gated(
    x: _X, weight: Any, z: Any, *, gate_first: bool = ..., **options: Unpack[_Options]
) -> _X: ...
@overload
def rms_norm_gated(
    x: Any, weight: Any, z: Any, *, gate_first: bool = ..., **options: Unpack[_AnyOptions]
) -> Any: ...
def rms_norm_gated(
    x: Any,
    weight: Any,
    z: Any,
    *,
    gate_first: bool = False,
    eps: float | None = None,
    **options: Any,
) -> Any:
    """Normalize x and multiply it by a gate, ``silu(z)``.

    Parameters
    ----------
    x, weight : array
        As for `cupynorm.rms_norm`. weight may be None.
    z : array
        The gate, which broadcasts to x's shape.
    gate_first : bool
        Normalize ``x * silu(z)`` instead, as Mamba-2 does.
    eps : float, optional
        Added to the mean square. The default is that of `cupynorm.rms_norm`.
    **options
        axis, zero_centered and out_dtype, as for a norm of `cupynorm.fuse`.

    Returns
    -------
    array
        ``rms_norm(x, weight) * silu(z)``, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As for `cupynorm.rms_norm`.

    Notes
    -----
    Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, and Dao and Gu,
    "Transformers are SSMs", arXiv:2405.21060, for `gate_first`.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x, z = np.array([[3.0, -4.0]]), np.array([[0.0, 1.0]])
    >>> cupynorm.fused.rms_norm_gated(x, None, z).round(3)
    array([[ 0.   , -0.827]])
    >>> cupynorm.fused.rms_norm_gated(x, None, z, gate_first=True).round(3)
    array([[ 0.   , -1.414]])
    """
    if not isinstance(gate_first, bool):
        raise TypeError(f"gate_first must be True or False, got {gate_first!r}")
    return (_GATE_FIRST if gate_first else _GATE_LAST)(x, weight, z=z, eps=eps, **options)


@overload
def deep_norm(
    x: _X,
    branch: Any,
    alpha: Any,
    weight: Any = ...,
    bias: Any = ...,
    **options: Unpack[_Options],
) -> _X: ...
@overload
def deep_norm(
    x: Any,
    branch: Any,
    alpha: Any,
    weight: Any = ...,
    bias: Any = ...,
    **options: Unpack[_AnyOptions],
) -> Any: ...
def deep_norm(
    x: Any,
    branch: Any,
    alpha: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float | None = None,
    **options: Any,
) -> Any:
    """Scale the residual stream, add a branch to it, and apply LayerNorm.

    Parameters
    ----------
    x, branch : array
        The stream, and what a sublayer returned.
    alpha : float or array
        The scale of x. DeepNorm takes ``(2 * layers) ** 0.25`` for a decoder.
    weight, bias : array, optional
        As for `cupynorm.layer_norm`.
    eps : float, optional
        Added to the variance. The default is that of `cupynorm.layer_norm`.
    **options
        axis, zero_centered and out_dtype, as for a norm of `cupynorm.fuse`.

    Returns
    -------
    array
        ``layer_norm(alpha * x + branch, weight, bias)``, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As for `cupynorm.layer_norm`.

    Notes
    -----
    Source: Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", arXiv:2203.00555.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x, branch = np.array([[1.0, 2.0]]), np.array([[0.0, 1.0]])
    >>> cupynorm.fused.deep_norm(x, branch, 2.0).round(3)
    array([[-1.,  1.]])
    """
    return _DEEP(x, weight, bias, branch=branch, alpha=alpha, eps=eps, **options)


@overload
def l2_norm(x: _X, *, eps: float = ..., axis: Any = ..., out_dtype: None = None) -> _X: ...
@overload
def l2_norm(x: Any, *, eps: float = ..., axis: Any = ..., out_dtype: Any) -> Any: ...
def l2_norm(x: Any, *, eps: float = 1e-6, axis: Any = None, out_dtype: Any = None) -> Any:
    """Divide each row by its length.

    Parameters
    ----------
    x : array
        As for `cupynorm.rms_norm`.
    eps : float
        Added to the sum of squares.
    axis, out_dtype
        As for a norm of `cupynorm.fuse`.

    Returns
    -------
    array
        ``x / sqrt(sum(x**2) + eps)``, of x's shape.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As for `cupynorm.rms_norm`. ValueError, too, if ``eps / N`` is neither 0 nor a normal number
        of the compute dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> cupynorm.fused.l2_norm(np.array([[3.0, -4.0]]), eps=0.0)
    array([[ 0.6, -0.8]])
    """
    if not hasattr(x, "shape"):
        _arrays.family_of("x", x)  # says what x must be
    _checks.check_numbers(np.dtype(np.float64), eps, None)
    axes = _checks.normalized_axes(x.ndim, axis)
    _checks.check_rows(x.shape, axes)
    n = 1
    for i in axes:
        n *= x.shape[i]
    return _UNIT(x, length=n**-0.5, eps=eps / n, axis=axis, out_dtype=out_dtype)
