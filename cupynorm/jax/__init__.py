"""RMSNorm and LayerNorm within JAX programs.

`rms_norm` and `layer_norm` are those of `cupynorm`, as JAX functions. They work under ``jit``,
``grad``, ``jvp``, ``vmap``, ``scan``, ``checkpoint`` and ``shard_map``, and on arrays that are
split over the devices of a mesh. Its axes may be Auto or Explicit. On CUDA GPUs XLA calls the
kernels of this package. Elsewhere the same formula runs in jax.numpy. Each function may add a
residual to x first.

Rows stay where they are, even if the devices do not share them evenly. No x, dy, y or dx, nor a
residual, is sent to another device, with three exceptions: the normalized axes themselves are
split, x and the residual are split along different axes over the same devices, or a ``shard_map``
over other axes leaves rows split over Auto axes. The gradients of weight and bias are summed over
the devices in the compute dtype. Where these vary from row to row, they are split as the rows are.
Derivatives are taken in both modes, any number of times.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import jax

if jax.__version_info__ < (0, 10, 2):
    raise ImportError(f"cupynorm.jax needs JAX 0.10.2 or newer, found {jax.__version__}")

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cupynorm import _checks
from cupynorm._arrays import DTYPES, NO_STRIDES, check_known, to_numpy
from cupynorm._operation import Axis, ForwardSpec, Kind, Norm, Options, Relu
from cupynorm._quantize import Quantize, check_call, check_scale_dtype, dtype_of_y
from cupynorm.jax import _formula
from cupynorm.jax._derivatives import differentiable, wide
from cupynorm.jax._operations import explicit_split, split_as, split_of, varying_alike
from cupynorm.jax._quantize import behind, normalized
from cupynorm.jax._vectors import as_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it, and nothing else imports it

__all__ = ["layer_norm", "rms_norm"]


class _Options(TypedDict, total=False):
    eps: float
    axis: Axis
    zero_centered: bool
    relu: Relu
    out_dtype: Any
    residual_dtype: Any


@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: None = None,
    quantize: None = None,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any,
    quantize: None = None,
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def rms_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    quantize: Quantize,
    **options: Unpack[_Options],
) -> tuple[jax.Array, ...]: ...
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
    quantize: Quantize | None = None,
) -> Any:
    """Divide each row by its root mean square, then scale and shift it.

    ``y = x / sqrt(mean(x**2) + eps) * weight + bias``, computed in float32 (float64 where x is
    float64) and rounded once, to y's dtype.

    Parameters
    ----------
    x : array, shape (..., N)
        A JAX array, traced or not, a NumPy array, or anything with ``__jax_array__``, such as a
        parameter of Flax. Its dtype is float64, float32, float16 or bfloat16. A NumPy array of
        float64 becomes float32 unless JAX has x64 enabled, as in ``jax.numpy``.
    weight, bias : array, optional
        They have any of the four dtypes, and broadcast to x's shape by NumPy's rule. A shape of
        (N,) serves all rows. Rows have vectors of their own where a kept axis is not 1: (H, N) is
        one for each head of an x of shape (..., H, N), and (B, 1, N) one for each example. Where a
        normalized axis is 1, an element serves several of a row.
    eps : float
        Added to the mean square. It is a Python number, not a traced one.
    axis : int or tuple of int, optional
        The axes to normalize over, in any place. Together they are one row of N elements. The
        default is the last axis, whatever shape weight has. To normalize two axes together with a
        weight of shape (512, 512), say ``axis=(-2, -1)``: else each row has a weight of its own.
    zero_centered : bool
        Scale by ``1 + weight``, added in the compute dtype.
    relu : (float, float), optional
        Clamp y to [lower, upper] before it is rounded. The bounds are Python numbers; ``-math.inf``
        and ``math.inf`` leave a side open. Gradients pass where y was strictly between.
    out_dtype : dtype, optional
        y's dtype. The default is x's.
    residual : array, shape of x, optional
        An array to add to x first, of any of the four dtypes, x's or another. ``s = x + residual``
        is added in the compute dtype and rounded once, and s is normalized. The bits of y are those
        of a call on s.
    residual_dtype : dtype, optional
        s's dtype. The default is residual's.
    quantize : Quantize, optional
        Return y in eight bits an element, with scales. out_dtype is None then. A scale that is
        given may be traced. On a GPU the norm's kernel quantizes rows that registers hold. XLA does
        others, and all rows if quantize asks for amax. There is no gradient of it.

    Returns
    -------
    jax.Array, or tuple of them
        y, of x's shape, split over devices as x is. With a residual, y and s. They are split as x
        is, and along the kept axes that x does not split, as residual is.

        With quantize, q, scale and, if it is asked for, amax instead of y, as from
        `cupynorm.rms_norm`, and s behind them. amax is that of all devices, within shard_map that
        of one.

    Raises
    ------
    TypeError
        If an argument is not an array or has another dtype, if eps, axis, zero_centered or relu has
        another type, or if out_dtype or residual_dtype is float64 while JAX has it disabled.
    ValueError
        If a shape, axis, eps or zero_centered does not fit, if relu's lower bound is not below its
        upper bound, or if there is a residual_dtype without a residual. If an option does not go
        with quantize.
    NotImplementedError
        If quantized results are differentiated: pass ``jax.lax.stop_gradient(x)``. If a shape is
        symbolic, as in ``jax.export``. If gradients are compiled for CUDA on a machine without a
        GPU.
    ImportError
        If JAX has a CUDA GPU, and CuPy cannot be imported.

    See Also
    --------
    cupynorm.rms_norm : the eager function, with the formula's source.

    Notes
    -----
    Under ``vmap`` the batch is one more leading axis, and the call is still one kernel launch. Each
    example may have a weight and a bias of its own, and has gradients of its own. XLA computes
    three things from the formula: the tangents of forward mode, derivatives of derivatives, and the
    gradient of a ``vmap`` over a bias where there is no weight.

    Kernels read a weight and a bias of one shape that vary over adjacent kept axes, and over the
    first of the normalized axes. XLA repeats others along further axes, and sums their gradients.
    Normalized axes that are not the last ones are transposed to the end, and the results back.

    With a residual, s is kept for the gradients instead of x and residual. The gradient of s is
    added to that of the norm before it is rounded, in the same kernel. If s is not used further,
    nothing is read for it.

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

    This is how the layers of a transformer use a residual:

    >>> y, s = cupynorm.jax.rms_norm(x, weight, residual=np.float32([[0, 8], [0.5, 0.5]]))
    >>> s
    Array([[3., 4.],
           [1., 1.]], dtype=float32)
    >>> np.asarray(y).round(3)
    array([[0.849, 2.263],
           [1.   , 2.   ]], dtype=float32)
    """
    return _norm("rms_norm", **locals())


@overload
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: None = None,
    quantize: None = None,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any,
    quantize: None = None,
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    quantize: Quantize,
    **options: Unpack[_Options],
) -> tuple[jax.Array, ...]: ...
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
    quantize: Quantize | None = None,
) -> Any:
    """Bring each row to mean 0 and variance 1, then scale and shift it.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 (float64 where
    x is float64) and rounded once, to y's dtype. The variance is the biased one. A corrected
    two-pass sum computes it, so a large mean costs no digits.

    Parameters
    ----------
    x, weight, bias, axis, zero_centered, relu, out_dtype, residual, residual_dtype, quantize
        As for `rms_norm`.
    eps : float
        Added to the variance. It is a Python number, not a traced one.

    Returns
    -------
    jax.Array, or tuple of them
        y, of x's shape. With a residual, y and ``s = x + residual``. With quantize, q and scale
        instead of y. They are split over devices as those of `rms_norm` are.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As for `rms_norm`.

    See Also
    --------
    cupynorm.layer_norm : the eager function, with the formula's source.

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


def _norm(
    norm: Norm,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    quantize: Any = None,
    **options: Any,
) -> Any:
    """Return what the function of this name does, by the names of its arguments."""
    check_known(**options)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    if quantize is not None:
        return _quantized(norm, quantize, given, options)
    made = _made(norm, given, options)
    return made["y"] if residual is None else (made["y"], made["residual_out"])


def _made(
    norm: Norm, arrays: dict[str, Any], options: dict[str, Any], how: Any = None, scale: Any = None
) -> dict[str, jax.Array]:
    """Return what the norm makes, by name.

    If y is quantized, `how` is `Quantize.told`, and `scale` is a given one, or None.
    """
    given: dict[str, Any] = {
        name: None if array is None and name != "x" else _array(name, array)
        for name, array in arrays.items()
    }
    outlines = {name: _outline(array) for name, array in given.items()}
    asked = _checks.Asked(norm, training=False, **options)
    _, checked, told = _checks.check_arrays(outlines, asked)
    spec = cast("ForwardSpec", checked)
    for name, dtype in (("out_dtype", to_numpy(spec.y)), ("residual_dtype", to_numpy(spec.x))):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(f"{name} must be one that JAX has enabled, got {dtype} without x64")
    if told.order is not None:
        moved = {
            n: None if a is None else _checks.moved(told.order, n, a) for n, a in given.items()
        }
        made = _made(norm, moved, options | {"axis": told.axis}, how, scale)
        back = sorted(range(len(told.order)), key=told.order.__getitem__)
        return {name: array.transpose(back) for name, array in made.items()}
    x, weight, bias, residual = given.values()
    k = told.k
    pairs: list[tuple[Any, ...]] = [(weight, bias)]
    if how is None:
        # Sums over what a vector was broadcast to come before the rounding to a narrower dtype.
        pairs.append(tuple(a if a is None else _widened(spec.x, a) for a in (weight, bias)))
    weight, bias, *wide_vectors = (
        array for pair in pairs for array in _of_one_shape(x.shape[x.ndim - k :], told, *pair)
    )
    told = replace(told, groups=None)  # each device has its own
    of_weight = None if weight is None else DTYPES[weight.dtype]
    spec = ForwardSpec.of(told, spec.dtypes | {"weight": of_weight})
    like, split = explicit_split(k, x, residual)
    if how is None:
        vectors = *jax.lax.stop_gradient((weight, bias)), *wide_vectors
        rows, added, *affine = _over_one_mesh(k, like, split, x, residual, *vectors)
        y, total = differentiable(spec, told)(rows, added, tuple(affine[:2]), tuple(affine[2:]))
        made = {"y": y, "residual_out": total}
    else:
        arrays_read = _over_one_mesh(k, like, split, x, residual, weight, bias, scale)
        made = normalized(spec, told, how, *arrays_read)
    of_scales = PartitionSpec(*split[: x.ndim - k], *k * (None,))
    return {
        name: split_as(like, array, of_scales if name == "scale" else split)
        for name, array in made.items()
        if array is not None
    }


def _quantized(
    norm: Norm, quantize: Any, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[jax.Array, ...]:
    """Return q, scale, amax if it is asked for and, with a residual, the sum."""
    x = _array("x", arrays["x"])
    axes = check_call(quantize, x, options["axis"], options["out_dtype"])
    if quantize.column_major:
        raise ValueError(NO_STRIDES.format("quantize.column_major"))
    scale = one = None
    if quantize.is_given:
        check_scale_dtype(quantize.scale)
        scale = _array("quantize.scale", quantize.scale)
        one = scale.reshape(1)
    residual = None if arrays["residual"] is None else _array("residual", arrays["residual"])
    total = options["residual_dtype"] or (x if residual is None else residual).dtype
    via = dtype_of_y(quantize, x, total)
    if quantize.via == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise TypeError(f"quantize.via must be one that JAX has enabled, got {via} without x64")
    given = arrays | {"x": x, "residual": residual}
    options = options | {"out_dtype": via}
    if quantize.amax:
        made = _made(norm, given, options)
        results = behind(made["y"], axes, quantize, scale)
    else:
        made = {"scale": scale} | _made(norm, given, options, quantize.told, one)
        results = made["y"], made["scale"]
    return results if residual is None else (*results, made["residual_out"])


def _of_one_shape(row: tuple[int, ...], told: Options, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Return weight and bias in one shape, that of a row if all rows share them.

    The backward pass gives both gradients that shape. Of a bias alone, it knows only that of a row.
    """
    given = [array for array in (weight, bias) if array is not None]
    # Without groups, a vector of as many elements is a row, and others are shorter.
    if told.groups is None and all(array.size == math.prod(row) for array in given):
        return tuple(a if a is None or a.shape == row else a.reshape(row) for a in (weight, bias))
    shape = np.broadcast_shapes(*(array.shape for array in given))
    weight, bias = (
        a if a is None or a.shape == shape else jnp.broadcast_to(as_rows(a, len(shape)), shape)
        for a in (weight, bias)
    )
    return jnp.ones_like(bias) if weight is None else weight, bias


def _array(name: str, array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return _formula.from_numpy(name, array)
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):  # NumPy knows none of them
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
    return array if array.dtype == dtype else _formula.cast(array, dtype)


def _outline(array: Any) -> Any:
    """Return a NumPy array of an array's shape and dtype, for the checks: it holds one element."""
    return None if array is None else np.broadcast_to(np.zeros((), array.dtype), array.shape)


# ---- what the types say of devices ---------------------------------------------------------------


def _over_one_mesh(
    k: int, like: Any, split: PartitionSpec, x: Any, residual: Any, *affine: Any
) -> list[Any]:
    """Return arrays with whole rows on each device, and varying over the same axes.

    Rows are split along the kept axes by a spec, over the mesh of one array. So are vectors where
    they vary. Their types say so where a mesh has Explicit axes, and within shard_map. JAX undoes
    it in the gradients, and can do so only here, outside of the rules for derivatives.
    """
    kept = split[: like.ndim - k]
    kinds = Kind.ROWS, Kind.ROWS, *(Kind.VECTOR for _ in affine)
    whole = [
        a if a is None else split_as(like, a, split_of(kind, a.shape, kept, like.ndim))
        for kind, a in zip(kinds, (x, residual, *affine), strict=True)
    ]
    return varying_alike(whole)
