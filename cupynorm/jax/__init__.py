"""RMSNorm and LayerNorm within JAX's programs.

`rms_norm` and `layer_norm` are those of `cupynorm`, as functions of JAX: under ``jit``, ``grad``,
``vmap``, ``scan``, ``checkpoint`` and ``shard_map``, and on arrays that are split over the devices
of a mesh, whose axes may be Auto or Explicit. On CUDA GPUs they are the kernels of this package,
called by XLA; elsewhere, the same formula in jax.numpy. Each may add a residual to x first.

Rows stay where they are, also where the devices do not share them evenly: no x, dy, y or dx, nor
what is added to them, is sent to another device, unless the normalized axes themselves are split,
which is undone first, or a ``shard_map`` over other axes leaves them split over Auto ones. The
gradients of weight and bias are summed over the devices in the compute dtype.
Derivatives are taken in reverse, as often as one likes; forward mode (``jvp``, ``jacfwd``) is
refused, when a program is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(f"cupynorm.jax needs JAX 0.10.2 or newer, found {jax.__version__}")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cupynorm import _checks
from cupynorm._arrays import DTYPES, check_no_mask, to_numpy
from cupynorm._operation import Norm, Relu
from cupynorm.jax import _formula
from cupynorm.jax._derivatives import differentiable, wide
from cupynorm.jax._operations import split_as

__all__ = ["layer_norm", "rms_norm"]

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
    residual: Any = None,
    residual_dtype: Any = None,
) -> Any:
    """Divide each row by its root mean square, then scale and shift it.

    ``y = x / sqrt(mean(x**2) + eps) * weight + bias``, computed in float32 (float64 where x is
    float64) and rounded once, to y's dtype.

    Parameters
    ----------
    x : array, shape (..., N)
        A JAX array, traced or not, a NumPy array, or what has ``__jax_array__``, as a parameter of
        Flax does; of float64, float32, float16 or bfloat16. A NumPy array of float64 becomes
        float32 unless JAX has x64 enabled, as in ``jax.numpy``.
    weight, bias : array, optional
        Of the shape of x's normalized axes and of any of the four dtypes; where axis is given,
        there may be axes of 1 before those.
    eps : float
        Added to the mean square; a Python number, not a traced one.
    axis : int or tuple of int, optional
        The trailing axes to normalize over, together one row of N elements; by default the last. A
        weight or bias of more axes than one needs it.
    zero_centered : bool
        Scale by ``1 + weight``, added in the compute dtype.
    relu : (float, float), optional
        Clamp y to [lower, upper] before it is rounded; Python numbers, of which ``-math.inf`` and
        ``math.inf`` leave a side open. Gradients pass where y was strictly between.
    out_dtype : dtype, optional
        y's dtype; by default x's.
    residual : array, shape of x, optional
        What is added to x first, of any of the four dtypes, x's or another: the norm is that of
        ``s = x + residual``, added in the compute dtype and rounded once. The bits of y are those
        of a call on s.
    residual_dtype : dtype, optional
        s's dtype; by default residual's.

    Returns
    -------
    jax.Array, or pair of them
        y, of x's shape, split over devices as x is; with a residual y and s, split as x is or,
        over an Explicit mesh where x is not split, as residual is.

    Raises
    ------
    TypeError
        If an argument is no array or has another dtype, if eps, axis, zero_centered or relu is of
        another kind, or if out_dtype or residual_dtype is float64 while JAX has it disabled.
    ValueError
        If a shape, axis, eps or zero_centered does not fit, if relu's lower bound is not below its
        upper one, or if there is a residual_dtype and no residual.
    NotImplementedError
        If weight or bias would broadcast over the kept axes of x, or a shape is symbolic, as of
        ``jax.export``. And when a program is compiled: of forward mode, and of gradients for CUDA
        where JAX has no GPU.
    ImportError
        If JAX has a CUDA GPU, and CuPy cannot be imported.

    See Also
    --------
    cupynorm.rms_norm : the function on arrays as they are, with the formula's source.

    Notes
    -----
    Under ``vmap``, the batch is one more leading axis, and still one kernel launch. A weight or
    bias that is mapped over as well, or their gradient for each example, is left to XLA's own
    kernels of the formula.

    With a residual, s is all that is kept of x and residual for the gradients. What comes back to s
    is added to the gradient of the norm before that is rounded, in the same kernel; where s is of
    no further use, nothing is read for it.

    Examples
    --------
    >>> import jax
    >>> import numpy as np
    >>> import cupynorm.jax
    >>> x, weight = np.float32([[3, -4], [0.5, 0.5]]), np.float32([1, 2])
    >>> np.asarray(jax.jit(cupynorm.jax.rms_norm)(x, weight)).round(3)
    array([[ 0.849, -2.263],
           [ 1.   ,  2.   ]], dtype=float32)
    >>> dweight = jax.grad(lambda weight: cupynorm.jax.rms_norm(x, weight).sum())(weight)
    >>> np.asarray(dweight).round(3)
    array([ 1.849, -0.131], dtype=float32)

    With a residual, as between the layers of a transformer:

    >>> y, s = cupynorm.jax.rms_norm(x, weight, residual=np.float32([[0, 8], [0.5, 0.5]]))
    >>> s
    Array([[3., 4.],
           [1., 1.]], dtype=float32)
    >>> np.asarray(y).round(3)
    array([[0.849, 2.263],
           [1.   , 2.   ]], dtype=float32)
    """
    return _norm("rms_norm", **locals())


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
    residual: Any = None,
    residual_dtype: Any = None,
) -> Any:
    """Bring each row to mean 0 and variance 1, then scale and shift it.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 (float64 where
    x is float64) and rounded once, to y's dtype. The variance is the biased one, by a corrected
    two-pass sum, so that a large mean costs no digits.

    Parameters
    ----------
    x, weight, bias, axis, zero_centered, relu, out_dtype, residual, residual_dtype
        As of `rms_norm`.
    eps : float
        Added to the variance; a Python number, not a traced one.

    Returns
    -------
    jax.Array, or pair of them
        y, of x's shape, and with a residual ``s = x + residual``, split over devices as those of
        `rms_norm` are.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As `rms_norm`.

    See Also
    --------
    cupynorm.layer_norm : the function on arrays as they are, with the formula's source.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm.jax
    >>> x = np.float32([[1, 3], [1e6, 1e6 + 2]])
    >>> np.asarray(cupynorm.jax.layer_norm(x, bias=np.float32([0, 10]))).round(3)
    array([[-1., 11.],
           [-1., 11.]], dtype=float32)
    """
    return _norm("layer_norm", **locals())


def _norm(norm: Norm, x: Any, weight: Any, bias: Any, residual: Any, **options: Any) -> Any:
    """Return what the function of this name does, by the names of its arguments."""
    for name, option in options.items():
        for value in option if isinstance(option, tuple) else (option,):
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"{name} must be known when a program is traced: jit has it in "
                    f"static_argnames; got {value}"
                )
    given = {"x": _array("x", x)} | {
        name: None if array is None else _array(name, array)
        for name, array in (("weight", weight), ("bias", bias), ("residual", residual))
    }
    outlines = {name: _outline(array) for name, array in given.items()}
    asked = _checks.Asked(norm, training=False, **options)
    spec, told = _checks.check_forward(outlines, asked)
    x, weight, bias, residual = given.values()
    k = told.k
    for name, dtype in (("out_dtype", to_numpy(spec.y)), ("residual_dtype", to_numpy(spec.x))):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(f"{name} must be one that JAX has enabled, got {dtype} without x64")
    weight, bias = (
        a if a is None or a.ndim == k else a.reshape(x.shape[x.ndim - k :]) for a in (weight, bias)
    )
    widened = [a if a is None else _widened(spec.x, a) for a in (weight, bias)]
    like = _more_split(x, residual)
    arrays = *jax.lax.stop_gradient((weight, bias)), *widened
    rows, added, *affine = _over_one_mesh(k, like, x, residual, *arrays)
    norm_of = differentiable(spec, told)
    y, total = norm_of(rows, added, tuple(affine[:2]), tuple(affine[2:]))
    return split_as(like, y) if total is None else (split_as(like, y), split_as(like, total))


def _array(name: str, array: Any) -> Any:
    if isinstance(array, np.ndarray):
        check_no_mask(name, array)
        return jnp.asarray(array)
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # of which NumPy knows nothing
            raise TypeError(
                f"{name}.dtype must be float64, float32, float16 or bfloat16, got {array.dtype}"
            )
        if any(map(jax.export.is_symbolic_dim, array.shape)):
            raise NotImplementedError(
                f"{name} must have a shape of numbers, got the symbolic {array.shape}: a kernel is "
                "chosen when the program is traced"
            )
        return array
    if hasattr(array, "__jax_array__"):
        return _array(name, array.__jax_array__())
    kind = f"{type(array).__module__.split('.')[0]}.{type(array).__qualname__}"
    raise TypeError(f"{name} must be a JAX or NumPy array, got {kind}")


def _widened(x: str, array: Any) -> Any:
    dtype = wide(x, DTYPES[array.dtype])
    return array if array.dtype == dtype else _formula.widened(array, dtype)


def _outline(array: Any) -> Any:
    """Return a NumPy array of an array's shape and dtype, for the checks: it holds one element."""
    return None if array is None else np.broadcast_to(np.zeros((), array.dtype), array.shape)


# ---- what the types say of devices ---------------------------------------------------------------


def _over_one_mesh(k: int, like: Any, x: Any, residual: Any, *affine: Any) -> list[Any]:
    """Return arrays with whole rows on each device, and varying over the same axes.

    Rows are split as one array is. Their types say so where a mesh has Explicit axes, and within
    shard_map. JAX undoes it in the gradients, and can do so only here, outside of custom_vjp.
    """
    kept = jax.typeof(like).sharding.spec[: like.ndim - k]
    rows = PartitionSpec(*kept, *k * (None,))
    whole = [a if a is None else split_as(like, a, rows) for a in (x, residual)]
    for array in affine:
        whole.append(
            array if array is None else split_as(array, array, PartitionSpec(*k * (None,)))
        )
    varying = frozenset().union(*(_varying(a) for a in whole if a is not None))
    return [
        a
        if a is None or varying == _varying(a)
        else jax.lax.pcast(a, tuple(varying - _varying(a)), to="varying")
        for a in whole
    ]


def _varying(array: Any) -> Any:
    """Return the axes of a surrounding shard_map over which an array varies, if JAX tracks them."""
    return jax.typeof(array).manual_axis_type.varying


def _more_split(x: Any, residual: Any) -> Any:
    """Return which of two arrays says how both are split over an Explicit mesh: x, if it is."""
    if residual is None or any(jax.typeof(x).sharding.spec):
        return x
    return residual
