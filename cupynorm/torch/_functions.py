"""The functions. They apply torch's autocast, count the axes, and call the operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
import torch

from cupynorm import _checks
from cupynorm._operation import FORWARD, Axis, Norm, Relu
from cupynorm._prepared import remember
from cupynorm._quantize import Quantize, check_call, dtype_of_y
from cupynorm.torch import _operations
from cupynorm.torch._kernels import Tensors, check_dense, compute_type_of_total
from cupynorm.torch._quantize import by_kernel, check_scale, quantized
from cupynorm.torch._vectors import alike

if TYPE_CHECKING:
    from typing_extensions import Unpack  # type checkers know it, and nothing else imports it

__all__ = ["layer_norm", "normalize", "rms_norm"]

_OPTIONAL = (torch.Tensor, type(None))
_PLAIN = _operations.PLAIN  # a name of this module saves a look-up, and a microsecond counts here
_is_autocast_enabled = torch.is_autocast_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_HALVES = (torch.float16, torch.bfloat16)
_NUMBERS = frozenset((float, int))

# Torch's autocast for CUDA computes these of its norms in float32, rms_norm from 2.13 on.
_IN_FLOAT32 = frozenset(
    norm
    for norm in ("rms_norm", "layer_norm")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{norm}", "AutocastCUDA")
)


class _Options(TypedDict, total=False):
    axis: Axis
    zero_centered: bool
    relu: Relu
    out_dtype: torch.dtype | None
    residual_dtype: torch.dtype | None


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    residual: None = None,
    quantize: None = None,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    residual: torch.Tensor,
    quantize: None = None,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    residual: torch.Tensor | None = None,
    quantize: Quantize,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, ...]: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: torch.dtype | None = None,
    residual: torch.Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
) -> Any:
    """Divide each row by its root mean square, then scale and shift it.

    ``y = x / sqrt(mean(x**2) + eps) * weight + bias``, computed in float32 (float64 where x is
    float64) and rounded once, to y's dtype. It can be differentiated in reverse, any number of
    times, and in forward mode.

    Parameters
    ----------
    x : Tensor, shape (..., N)
        Its dtype is float64, float32, float16 or bfloat16. Rows may be any distance apart: leading
        axes that collapse to one stride are read in place. It may be a nested tensor whose ragged
        axis is kept.
    weight, bias : Tensor, optional
        They have any of the four dtypes, are on x's device, and broadcast to x's shape by NumPy's
        rule. A shape of (N,) serves all rows, (H, N) has one for each head of an x of shape
        (..., H, N), and (B, 1, N) one for each example. Where a normalized axis is 1, an element
        serves several of a row. Kernels read vectors that vary over adjacent kept axes and over
        the first of the normalized ones, both over the same. Others are copied into such a form.
    eps : float, optional
        Added to the mean square. None means the epsilon of the compute dtype, which is the default
        of ``torch.nn.functional.rms_norm``.
    axis : int or tuple of int, optional
        The axes to normalize over, in any place. Together they are one row of N elements. The
        default is the last axis, whatever shape weight has. If they are not the last ones, y has
        them last in memory, and x is copied unless its memory has them last already.
    zero_centered : bool
        Scale by ``1 + weight``, added in the compute dtype.
    relu : (float, float), optional
        Clamp y to [lower, upper] before it is rounded. The gradient is 0 unless lower < y < upper.
        One bit an element is kept for the backward pass.
    out_dtype : torch.dtype, optional
        y's dtype. The default is x's. Under autocast for CUDA it is float32 if x is float16 or
        bfloat16 and torch's own norm does the same: layer_norm, and from torch 2.13 on rms_norm.
    residual : Tensor, shape of x, optional
        A tensor to add to x first, of any of the four dtypes. ``s = x + residual`` is added in the
        compute dtype and rounded once, and s is normalized. The bits of y are those of a call on s.
        If x is nested, residual is nested with the same lengths.
    residual_dtype : torch.dtype, optional
        s's dtype. The default is residual's, under autocast too.
    quantize : Quantize, optional
        Return y in eight bits an element, with scales. out_dtype is None then, and autocast changes
        nothing. On a GPU the norm's kernel quantizes rows that registers hold, and torch's
        operations do others. There is no gradient.

    Returns
    -------
    Tensor, or tuple of tensors
        y, of x's shape, contiguous if the last axes are normalized. With a residual, y and s. Both
        may be differentiated: the gradient of s is added to those of x and residual before each is
        rounded to the dtype of its tensor.

        With quantize, q, scale and, if it is asked for, amax instead of y, as from
        `cupynorm.rms_norm`, and s behind them.

    Raises
    ------
    TypeError
        If an argument is not a tensor or has another dtype, or if eps, axis, zero_centered or relu
        has another type.
    ValueError
        If a shape, a device, axis, eps, zero_centered or relu does not fit, if there is a
        residual_dtype without a residual, or if a tensor's memory was freed or it outlived the
        ``torch.func.vmap`` that made it. If an option does not go with quantize.
    NotImplementedError
        If a gradient of quantized results is asked for: call within ``torch.no_grad()``. If weight
        or bias is an ExpandedWeight. If axis names an axis of a nested x that is ragged, or is not
        one of the last, or if weight or bias varies over a ragged axis. In forward mode within
        forward mode, and in that of an exported or compiled norm. On a device that is neither the
        CPU nor a CUDA GPU.
    ImportError
        If x is on a GPU, and CuPy cannot be imported.
    RuntimeError
        If the call is captured into a CUDA graph before its kernel was loaded.

    See Also
    --------
    RMSNorm : the module.
    cupynorm.rms_norm : the formula's source, and the function without autograd.

    Notes
    -----
    The call keeps x, weight, one or two statistics of each row and the bits of relu for the
    backward pass. With a residual it keeps s instead of x. The weight gradients have the same bits
    from run to run. Torch computes tangents and second derivatives from formulas in the compute
    dtype.

    If x is a DTensor that is split over axes that are kept, y and dx are split as x is. Nothing is
    communicated. A weight that varies over such an axis is split along it, and so is its gradient.
    The gradient of any other is a partial sum. If a residual is split in another way than x,
    DTensor splits one of them anew.

    Examples
    --------
    >>> import torch
    >>> import cupynorm.torch
    >>> x = torch.tensor([[3.0, -4.0], [0.5, 0.5]])
    >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> y = cupynorm.torch.rms_norm(x, weight)
    >>> y.detach()
    tensor([[ 0.8485, -2.2627],
            [ 1.0000,  2.0000]])
    >>> y.sum().backward()
    >>> weight.grad
    tensor([ 1.8485, -0.1314])

    A block adds to a stream and normalizes it:

    >>> stream = torch.ones(2, 2)
    >>> y, stream = cupynorm.torch.rms_norm(x.bfloat16(), residual=stream)
    >>> stream
    tensor([[ 4.0000, -3.0000],
            [ 1.5000,  1.5000]])
    """
    tensors = x, residual, weight, bias
    asked = eps, axis, zero_centered, relu, out_dtype, residual_dtype
    if quantize is not None:
        return _quantized("rms_norm", tensors, asked, quantize)
    return normalize("rms_norm", tensors, asked)


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: None = None,
    quantize: None = None,
    **options: Unpack[_Options],
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor,
    quantize: None = None,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    quantize: Quantize,
    **options: Unpack[_Options],
) -> tuple[torch.Tensor, ...]: ...
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = None,
    zero_centered: bool = False,
    relu: Relu = None,
    out_dtype: torch.dtype | None = None,
    residual: torch.Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    quantize: Quantize | None = None,
) -> Any:
    """Bring each row to mean 0 and variance 1, then scale and shift it.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, computed in float32 (float64 where x
    is float64) and rounded once, to y's dtype. The variance is the biased one. A corrected two-pass
    sum computes it, so a large mean costs no digits. The function can be differentiated as
    `rms_norm` can.

    Parameters
    ----------
    x, weight, bias, axis, zero_centered, relu, out_dtype, residual, residual_dtype, quantize
        As for `rms_norm`.
    eps : float
        Added to the variance.

    Returns
    -------
    Tensor, or tuple of tensors
        y, of x's shape, contiguous if the last axes are normalized. With a residual, y and
        ``s = x + residual``. With quantize, q and scale instead of y.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
        As for `rms_norm`.

    See Also
    --------
    LayerNorm : the module.
    cupynorm.layer_norm : the formula's source, and the function without autograd.

    Examples
    --------
    >>> import torch
    >>> import cupynorm.torch
    >>> x = torch.tensor([[1.0, 3.0], [1e6, 1e6 + 2]])
    >>> cupynorm.torch.layer_norm(x, bias=torch.tensor([0.0, 10.0]))
    tensor([[-1.0000, 11.0000],
            [-1.0000, 11.0000]])
    """
    tensors = x, residual, weight, bias
    asked = eps, axis, zero_centered, relu, out_dtype, residual_dtype
    if quantize is not None:
        return _quantized("layer_norm", tensors, asked, quantize)
    return normalize("layer_norm", tensors, asked)


# The options of both, in the order in which `normalize` takes them.
_ASKED = "eps", "axis", "zero_centered", "relu", "out_dtype", "residual_dtype"


def normalize(norm: Norm, tensors: Tensors, asked: tuple[Any, ...]) -> Any:
    """Return the norm of what a forward pass reads, with the options of `_ASKED`."""
    x, residual, weight, bias = tensors
    is_plain = (
        x is not None
        and type(x) in _PLAIN
        and type(residual) in _PLAIN
        and type(weight) in _PLAIN
        and type(bias) in _PLAIN
    )
    if not is_plain and not (
        isinstance(x, torch.Tensor)
        and isinstance(residual, _OPTIONAL)
        and isinstance(weight, _OPTIONAL)
        and isinstance(bias, _OPTIONAL)
    ):
        return _overridden(norm, tensors, asked)
    eps, axis, zero_centered, relu, out_dtype, residual_dtype = asked
    # Most calls have no axis; modules of several have a range, which holds nothing but ints. The
    # rest is checked by the first of such calls.
    k = 1 if axis is None else len(axis) if type(axis) is range else 0
    order = None
    if not (
        is_plain
        and 0 < k <= x.ndim
        and (weight is None or weight.ndim == k)
        and (bias is None or bias.ndim == k)
        and (axis is None or axis == range(-k, 0))
        and (bias is None or not _is_traced_by_dynamo())
    ):
        check_dense("weight", weight)
        check_dense("bias", bias)
        axes = _checks.normalized_axes(x.ndim, axis)
        k, order = len(axes), _checks.order_of(x.ndim, axes)
        if not x.is_nested:
            compute = compute_type_of_total(x, residual, residual_dtype)
            tensors = _arranged(tensors, axes, order, compute, is_plain)
            x, residual, weight, bias = tensors
    if type(zero_centered) is not bool:  # 0 is remembered as False is
        _checks.check_zero_centered(zero_centered, has_weight=weight is not None)
        zero_centered = bool(zero_centered)
    # True is remembered as 1 is. A number that a trace leaves open is one.
    if type(eps) is not float and not isinstance(eps, torch.SymFloat | torch.SymInt):
        if eps is None and norm == "rms_norm":  # the dtype's, of what is normalized
            eps = torch.finfo(compute_type_of_total(x, residual, residual_dtype)).eps
        else:
            eps = float(eps) if _is_number_compiled(eps) else _checks.to_eps(eps)
    if relu is not None:
        relu = _pair(relu)
    if (
        out_dtype is None
        and norm in _IN_FLOAT32
        and _is_autocast_enabled("cuda")
        and x.is_cuda
        and x.dtype in _HALVES
    ):
        out_dtype = torch.float32
    if x.is_nested:
        if order is not None:
            raise NotImplementedError(f"axis must name the last axes of a nested x, got {axis!r}")
        asked = eps, range(-k, 0), zero_centered, relu, out_dtype, residual_dtype
        return _of_nested(norm, tensors, asked)
    told = (k, norm, eps, zero_centered, relu, out_dtype, residual_dtype)
    if not is_plain:
        check_dense("residual", residual)
        results = _operations.normalize(tensors, told)
    else:
        try:
            results = _operations.normalize_plain(tensors, told)
        except NotImplementedError:  # perhaps of vectors: a check before each call takes time
            compute = compute_type_of_total(x, residual, residual_dtype)
            vectors = alike(x, k, weight, bias, compute)
            if vectors[0] is weight and vectors[1] is bias:
                raise
            results = _operations.normalize_plain((x, residual, *vectors), told)
    return results if order is None else _restored(results, order)


def _quantized(norm: Norm, tensors: Tensors, asked: tuple[Any, ...], quantize: Any) -> Any:
    """Return q, scale, amax if it is asked for and, with a residual, the sum."""
    x, residual, *_ = tensors
    if not isinstance(x, torch.Tensor):
        return _overridden(norm, tensors, asked, quantize)
    *options, out_dtype, residual_dtype = asked
    check_dense("x", x)
    axes = check_call(quantize, x, options[1], out_dtype)
    if type(x) not in _PLAIN and _operations.is_distributed(x):
        raise TypeError("x must be a plain tensor with quantize, got a DTensor")
    check_scale(quantize, x)
    total = residual_dtype or getattr(x if residual is None else residual, "dtype", None)
    via = getattr(torch, dtype_of_y(quantize, x, total))
    eps, _, zero_centered, relu = options
    of_kernel = eps, zero_centered, relu, via, residual_dtype
    found = by_kernel(norm, tensors, axes, of_kernel, quantize)
    if found is not None:
        return found
    results = normalize(norm, tensors, (*options, via, residual_dtype))
    y, *others = results if residual is not None else (results,)
    return (*quantized(y, axes, quantize), *others)


# The shapes, with the normalized axes, of tensors that an operation takes as they are.
_taken: dict[Any, bool] = {}


def _arranged(
    tensors: Tensors,
    axes: tuple[int, ...],
    order: tuple[int, ...] | None,
    compute: torch.dtype,
    is_plain: bool,
) -> Tensors:
    """Return what a pass reads with x's axes in an order, and vectors as an operation takes them.

    In a program that is compiled sizes may be unknown: the operation checks them.
    """
    x, residual, weight, bias = tensors
    is_compiling = torch.compiler.is_compiling()
    shapes: Any = None
    if order is None and not is_compiling and (is_plain or _operations.is_distributed(x)):
        shapes = axes, x.shape, *(None if v is None else v.shape for v in (weight, bias))
        try:
            if shapes in _taken:
                return tensors
        except TypeError:  # a trace leaves a size open
            shapes = None
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and not (is_compiling and vector.ndim <= x.ndim):
            _checks.check_vector(name, tuple(vector.shape), tuple(x.shape), axes)
    if order is not None:
        check_dense("residual", residual)
        if residual is not None and (
            residual.ndim != x.ndim or not (is_compiling or residual.shape == x.shape)
        ):
            shapes = tuple(x.shape), tuple(residual.shape)
            raise ValueError(f"residual must have shape {shapes[0]}, got {shapes[1]}")
        x, residual, weight, bias = (_moved(t, order) for t in (x, residual, weight, bias))
    vectors = alike(x, len(axes), weight, bias, compute)
    if shapes is not None and vectors[0] is weight and vectors[1] is bias:
        remember(_taken, shapes, True)
    return x, residual, *vectors


def _moved(tensor: Any, order: tuple[int, ...]) -> Any:
    """Return a tensor with all of x's axes, in an order."""
    if tensor is None:
        return None
    return tensor.reshape((1,) * (len(order) - tensor.ndim) + tuple(tensor.shape)).permute(order)


def _restored(results: Any, order: tuple[int, ...]) -> Any:
    """Return results with x's axes as they were."""
    back = sorted(range(len(order)), key=order.__getitem__)
    if isinstance(results, tuple):
        return tuple(result.permute(back) for result in results)
    return results.permute(back)


def _of_nested(norm: Norm, tensors: Tensors, asked: tuple[Any, ...]) -> Any:
    """Return a nested tensor of the same lengths and layout; with a residual, two."""
    x, residual, weight, bias = tensors
    others = _of_parts("weight", weight, x), _of_parts("bias", bias, x)
    _, axis, *_, out_dtype, residual_dtype = asked
    k = len(axis)
    if residual is not None:
        _check_nested(residual, x)
    if x.layout is torch.strided:
        if k == x.ndim > 1:
            raise NotImplementedError(f"axis must not name axis 0 of a nested x; got the last {k}")
        parts = x.unbind()
        added = (None,) * len(parts) if residual is None else residual.unbind()
        results = [
            normalize(norm, (part, to_add, *others), asked)
            for part, to_add in zip(parts, added, strict=True)
        ]
        if residual is None:
            return _nested(results, out_dtype or x.dtype, x)
        return (
            _nested([y for y, _ in results], out_dtype or x.dtype, x),
            _nested([total for _, total in results], residual_dtype or residual.dtype, x),
        )
    ragged = x._ragged_idx
    if ragged >= x.ndim - k:
        raise NotImplementedError(
            f"axis must not name the ragged axis of x, {ragged} of {x.ndim}; got the last {k}"
        )
    values = [None if t is None else t.values() for t in (x, residual)]
    if x.lengths() is not None and torch.is_grad_enabled():
        own = _belongs(x, ragged)
        values = [None if v is None else torch.where(own, v, 0) for v in values]
    results = normalize(norm, (*values, *others), asked)
    return _jagged(results, x) if residual is None else tuple(_jagged(r, x) for r in results)


def _check_nested(residual: Any, x: Any) -> None:
    """Check that a residual has values in the same places as a nested x."""
    if not residual.is_nested or residual.layout is not x.layout:
        kind = residual.layout if residual.is_nested else "a dense tensor"
        raise TypeError(f"residual must be nested as x, of layout {x.layout}; got {kind}")
    if x.layout is torch.strided:
        shapes = [[tuple(part.shape) for part in t.unbind()] for t in (x, residual)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"residual must have parts of shapes {shapes[0]}, got {shapes[1]}")
        return
    # Jagged tensors share an axis only if they share the tensor of their lengths.
    alike = residual.shape == x.shape and residual.values().shape == x.values().shape
    if alike and x.lengths() is not None:
        alike = residual.offsets() is x.offsets()
    if not alike:
        raise ValueError(
            f"residual must be of x's shape, {tuple(x.shape)}, and share its offsets; got "
            f"{tuple(residual.shape)}"
        )


def _of_parts(name: str, vector: Any, x: Any) -> Any:
    """Return a weight or bias for the parts of a nested x, which lack its first axis."""
    if vector is None or vector.ndim > x.ndim:  # the latter is refused for a part
        return vector
    sizes = (1,) * (x.ndim - vector.ndim) + tuple(vector.shape)
    shared = (0,) if x.layout is torch.strided else (0, x._ragged_idx)
    if any(sizes[axis] != 1 for axis in shared):
        raise NotImplementedError(
            f"{name} must be the same along axes {shared} of a nested x, got shape "
            f"{tuple(vector.shape)}"
        )
    return vector.reshape(sizes[1:]) if vector.ndim == x.ndim else vector


def _nested(parts: list[Any], dtype: torch.dtype, x: Any) -> Any:
    return torch.nested.as_nested_tensor(parts, dtype=dtype, device=x.device)


def _jagged(values: Any, x: Any) -> Any:
    """Return a jagged tensor with values where x has its own."""
    return torch.nested.nested_tensor_from_jagged(
        values,
        x.offsets(),
        x.lengths(),
        jagged_dim=x._ragged_idx,
        # These are known. To find them again, attention would wait for the device.
        min_seqlen=x._maybe_min_seqlen,
        max_seqlen=x._maybe_max_seqlen,
    )


def _belongs(x: Any, ragged: int) -> Any:
    """Tell which values of a jagged tensor are its own.

    The gaps between its parts may hold NaN, and a dy of 0 would bring it into a weight gradient.
    """
    values, begins = x.values(), x.offsets()[:-1]
    ones = torch.ones_like(begins)
    changes = begins.new_zeros(values.shape[ragged - 1] + 1).index_add(0, begins, ones)
    changes = changes.index_add(0, begins + x.lengths(), -ones)
    return (changes.cumsum(0)[:-1] > 0).reshape(-1, *(1,) * (values.ndim - ragged))


def _overridden(norm: Norm, given: Tensors, asked: tuple[Any, ...], quantize: Any = None) -> Any:
    """Have a tensor's substitute, such as a proxy of torch.fx, return what it likes."""
    if torch.overrides.has_torch_function(given):
        x, residual, *affine = given
        options = dict(zip(_ASKED, asked, strict=True)) | {"residual": residual}
        options |= {} if quantize is None else {"quantize": quantize}
        return torch.overrides.handle_torch_function(globals()[norm], given, x, *affine, **options)
    name, wrong = next(
        (name, array)
        for name, array in zip(FORWARD.reads, given, strict=True)
        if not isinstance(array, torch.Tensor) and (array is not None or name == "x")
    )
    raise TypeError(f"{name} must be a torch tensor, got {type(wrong).__name__}")


def _pair(relu: Any) -> Any:
    # A tuple is part of the key of a call. An operation would turn other numbers into floats. Most
    # bounds are numbers at first sight: the whole check takes 2 us.
    if not (type(relu) is tuple and _NUMBERS.issuperset(map(type, relu))):
        if isinstance(relu, tuple | list) and any(map(_is_number_compiled, relu)):
            relu = [float(bound) if _is_number_compiled(bound) else bound for bound in relu]
        _checks.check_pair(relu)
    return tuple(relu)


def _is_number_compiled(number: Any) -> bool:
    """Tell whether it was a NumPy number: torch.compile has an array instead."""
    return torch.compiler.is_compiling() and isinstance(number, np.ndarray)
