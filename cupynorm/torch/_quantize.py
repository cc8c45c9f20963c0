"""Quantized outputs of the norms on tensors: by the norm's kernel, or by steps after it.

The steps are operations of their own, which torch's compilers do not look into. These would
multiply by one over a number that they know, and divide inexactly on a GPU. On a GPU a compiler
finds one operation for the norm and its steps, which calls the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cupynorm._operation import QUANTIZED, Norm
from cupynorm._quantize import (
    BLOCK_MX,
    LARGEST,
    MX_SCALE,
    PER_POWER,
    Quantize,
    check_scale_dtype,
    dtype_of_scales,
    strides_by_column,
)
from cupynorm.torch import _kernels
from cupynorm.torch._kernels import check_dense
from cupynorm.torch._operations import PLAIN, is_distributed, is_seen

__all__ = [
    "amax_of",
    "by_kernel",
    "check_scale",
    "codes_of",
    "dequantized",
    "quantized",
    "scales_of",
]


def check_scale(quantize: Quantize, x: torch.Tensor) -> None:
    """Check a scale that is given."""
    scale = quantize.scale
    if not quantize.is_given:
        return
    if not isinstance(scale, torch.Tensor):
        kind = type(scale).__name__
        raise TypeError(f"quantize.scale must be a torch tensor, as x is; got {kind}")
    check_dense("quantize.scale", scale)
    if type(scale) not in PLAIN and is_distributed(scale):
        raise TypeError("quantize.scale must be a plain tensor, as x is; got a DTensor")
    check_scale_dtype(scale)
    if scale.device != x.device:
        raise ValueError(f"quantize.scale must be on x's device, {x.device}; got {scale.device}")


def quantized(
    y: torch.Tensor, axes: tuple[int, ...], quantize: Quantize
) -> tuple[torch.Tensor, ...]:
    """Return q, scale and, if it is asked for, amax."""
    dtype, block, scale = quantize.dtype, quantize.block, quantize.scale
    _check_not_differentiated(y, *((scale,) if quantize.is_given else ()))
    if not quantize.is_given:
        if quantize.column_major:
            _check_not_batched(y)
        how = quantize.scale_min, quantize.scale_max, quantize.column_major
        scale = scales_of(y, axes, dtype, block, *how)
    amax = (amax_of(y),) if quantize.amax else ()
    return codes_of(y, scale, dtype, block), scale, *amax


def _check_not_batched(y: torch.Tensor) -> None:
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(y):
        raise ValueError(
            "quantize.column_major must be False within torch.vmap, which puts the scales of "
            "examples one behind another; got True"
        )


# ---- the norm's kernel ---------------------------------------------------------------------------


def by_kernel(
    norm: Norm,
    tensors: tuple[Any, ...],
    axes: tuple[int, ...],
    asked: tuple[Any, ...],
    quantize: Quantize,
) -> tuple[torch.Tensor, ...] | None:
    """Return q, scale, amax if it is asked for and, with a residual, the sum.

    None if no kernel serves the call.

    `asked` has eps, zero_centered, relu, the dtype of y and that of the sum.
    """
    x, residual, *vectors = tensors
    eps, zero_centered, relu, via, residual_dtype = asked
    k, given = len(axes), quantize.given
    if not (x.is_cuda and relu is None and axes == tuple(range(-k, 0))):
        return None
    if not all(isinstance(tensor, torch.Tensor | None) for tensor in tensors):
        return None  # the norm says what is wrong
    if type(eps) is not float or type(zero_centered) is not bool:
        return None
    if any(vector is not None and vector.shape != x.shape[-k:] for vector in vectors):
        return None
    dtype, how, block, _, *others = quantize.told
    told = (k, norm, eps, zero_centered, via, residual_dtype)
    if torch.compiler.is_compiling():
        q, scale, amax, total = _compiled(*tensors, given, *told, dtype, how, block, *others)
    else:
        present = [tensor for tensor in (*tensors, given) if tensor is not None]
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return None
        is_kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present)
        if is_kept or is_seen(*present):
            return None
        found = _launched(tensors, given, told, quantize.told)
        if found is None:
            return None
        q, scale, amax, total = found
    results = q, scale if given is None else given, *((amax,) if quantize.amax else ())
    return results if residual is None else (*results, total)


def _launched(
    tensors: tuple[Any, ...], given: Any, told: tuple[Any, ...], how: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    k, norm, eps, zero_centered, via, residual_dtype = told
    of_norm = k, norm, eps, zero_centered, None, via, residual_dtype, False
    into = () if given is None else tuple(given if n == "scale" else None for n in QUANTIZED.writes)
    run = _kernels.find(QUANTIZED, tensors, (*of_norm, how), into)
    found = run((*tensors, *into))
    if found is None:
        return None
    named = dict(zip(QUANTIZED.writes, found, strict=True))
    return named["y"], named["scale"], named["amax"], named["residual_out"]


@torch.library.custom_op("cupynorm::quantized_norm", mutates_args=())
def _compiled(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    given: torch.Tensor | None,
    k: int,
    norm: str,
    eps: float,
    zero_centered: bool,
    via: torch.dtype,
    residual_dtype: torch.dtype | None,
    dtype: str,
    how: str,
    block: int | None,
    scale_min: float,
    scale_max: float,
    column_major: bool,
    amax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, the scale, amax and the sum. What is given, or not there, has no elements."""
    from cupynorm.torch import _functions  # which imports this module

    tensors = x, residual, weight, bias
    told = k, norm, eps, zero_centered, via, residual_dtype
    bounds = scale_min, scale_max, column_major
    of_scale = dtype, how, block, None, *bounds, amax
    found = _launched(tensors, given, told, of_scale) if x.is_cuda else None
    if found is None:
        axes = tuple(range(-k, 0))
        asked = eps, axes, zero_centered, None, via, residual_dtype
        results: Any = _functions.normalize(norm, tensors, asked)  # type: ignore[arg-type]
        y, total = (results, None) if residual is None else results
        scale = scales_of(y, axes, dtype, block, *bounds) if given is None else given
        found = codes_of(y, scale, dtype, block), scale, amax_of(y) if amax else None, total
    q, scale, *others = found
    scale = scale if given is None else x.new_empty(0)  # results share no memory
    return q, scale, *(x.new_empty(0) if other is None else other for other in others)


@_compiled.register_fake
def _(
    x: Any, residual: Any, weight: Any, bias: Any, given: Any, k: Any, norm: Any, eps: Any,
    zero_centered: Any, via: Any, residual_dtype: Any, dtype: Any, how: Any, block: Any,
    scale_min: Any, scale_max: Any, column_major: Any, amax: Any,
) -> Any:  # fmt: skip
    q, scale, total = x.new_empty(x.shape, dtype=getattr(torch, dtype)), x.new_empty(0), None
    if given is None:
        scale = _new_scales(x, tuple(range(-k, 0)), block, column_major)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
    of_all = _new_amax(x) if amax else x.new_empty(0)
    return q, scale, of_all, x.new_empty(0) if total is None else total


# ---- steps ---------------------------------------------------------------------------------------


def dequantized(q: torch.Tensor, scale: torch.Tensor, dtype: str, block: int | None) -> Any:
    """Return q * scale."""
    if block == BLOCK_MX and scale.dtype == torch.uint8:
        scale = scale.view(getattr(torch, MX_SCALE))
    values = (q.view(getattr(torch, dtype)) if q.dtype == torch.uint8 else q).float()
    if block is None:
        return values * _expanded(scale, values, None)
    # torch's compiler for CPUs leaves elements out where repeated scales are cut to q's length.
    kept, n, blocks = q.shape[:-1], q.shape[-1], scale.shape[-1]
    if blocks * block != n:
        values = torch.nn.functional.pad(values, (0, blocks * block - n))
    values = values.reshape(*kept, blocks, block) * scale.float()[..., None]
    return values.reshape(*kept, blocks * block)[..., :n]


@torch.library.custom_op("cupynorm::scales_of", mutates_args=())
def scales_of(
    y: torch.Tensor,
    axes: Sequence[int],
    dtype: str,
    block: int | None,
    scale_min: float,
    scale_max: float,
    column_major: bool,
) -> torch.Tensor:
    size = _sizes(y)
    if block is None:
        size = size.amax(axes, keepdim=True)
    else:
        size = torch.nn.functional.pad(size, (0, -size.shape[-1] % block))
        size = size.reshape(*size.shape[:-1], size.shape[-1] // block, block).amax(-1)
    if block == BLOCK_MX:
        ratio = _narrowed(size * PER_POWER[dtype])
        exponent = ratio.clamp(scale_min, scale_max).view(torch.int32) >> 23
        return exponent.to(torch.uint8).view(getattr(torch, MX_SCALE))
    # torch would multiply by one over a number on a GPU.
    largest = torch.full((), LARGEST[dtype], dtype=size.dtype, device=size.device)
    scale = (size / largest).float().clamp(scale_min, scale_max)
    return _new_scales(y, axes, block, column_major).copy_(scale) if column_major else scale


@scales_of.register_fake
def _(
    y: Any, axes: Any, dtype: Any, block: Any, scale_min: Any, scale_max: Any, column_major: Any
) -> Any:
    return _new_scales(y, axes, block, column_major)


@scales_of.register_vmap
def _(info: Any, dims: Any, y: torch.Tensor, *how: Any) -> tuple[torch.Tensor, int]:
    return scales_of(y.movedim(dims[0], 0), *how), 0  # axes are counted from the end


def _new_scales(
    y: torch.Tensor, axes: Sequence[int], block: int | None, column_major: bool
) -> torch.Tensor:
    if block is None:
        shape = [1 if i - y.ndim in axes else n for i, n in enumerate(y.shape)]
    else:
        shape = [*y.shape[:-1], (y.shape[-1] + block - 1) // block]
    dtype = getattr(torch, dtype_of_scales(block))
    if column_major:
        return y.new_empty_strided(shape, strides_by_column(shape), dtype=dtype)
    return y.new_empty(shape, dtype=dtype)


@torch.library.custom_op("cupynorm::amax_of", mutates_args=())
def amax_of(y: torch.Tensor) -> torch.Tensor:
    size = _sizes(y)
    return (size.amax() if y.numel() else size.new_zeros(())).float().reshape(1)


@amax_of.register_fake
def _new_amax(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty(1, dtype=torch.float32)


@amax_of.register_vmap
def _(info: Any, dims: Any, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    sizes = _sizes(y.movedim(dims[0], 0)).flatten(1)
    # An example may have no element.
    return torch.nn.functional.pad(sizes, (0, 1)).amax(1, keepdim=True).float(), 0


@torch.library.custom_op("cupynorm::codes_of", mutates_args=())
def codes_of(y: torch.Tensor, scale: torch.Tensor, dtype: str, block: int | None) -> torch.Tensor:
    wide = _widened(y)
    values = _narrowed(wide / _expanded(scale, y, block).to(wide.dtype))
    if dtype == "int8":
        values = values.round().clamp(-128, 127).nan_to_num(0)
    else:  # a cast does not saturate
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.to(getattr(torch, dtype), memory_format=torch.contiguous_format)


@codes_of.register_fake
def _(y: Any, scale: Any, dtype: Any, block: Any) -> Any:
    return y.new_empty(y.shape, dtype=getattr(torch, dtype))


@codes_of.register_vmap
def _(
    info: Any, dims: Any, y: torch.Tensor, scale: torch.Tensor, dtype: str, block: int | None
) -> tuple[torch.Tensor, int]:
    y, scale = (
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((y, dims[0]), (scale, dims[1]))
    )
    if scale.numel() == info.batch_size:  # one for all elements of an example
        scale = scale.reshape(-1, *(1,) * (y.ndim - 1))
    return codes_of(y, scale, dtype, block), 0


# An operation of its own, so that a compiled function raises when it runs backward, and no earlier.
@torch.library.custom_op("cupynorm::gradient_of_quantized", mutates_args=())
def _refused(dy: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return _refuse()


@_refused.register_fake
def _(dy: Any, size: Any, dtype: Any) -> Any:
    return dy.new_empty(size, dtype=dtype)


def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "quantize has no gradient: call the norm within torch.no_grad(), or on tensors that do not "
        "require grad"
    )


def _check_not_differentiated(*tensors: torch.Tensor) -> None:
    """Refuse tangents, which an operation would lose, and torch.func.grad: int8 would be constant.

    A gradient of autograd's is refused when it is asked for.
    """
    if torch.compiler.is_compiling():
        return
    has_level = forward_ad._current_level >= 0
    for tensor in tensors:
        if has_level and forward_ad.unpack_dual(tensor).tangent is not None:
            _refuse()
        if tensor.requires_grad and torch._C._are_functorch_transforms_active():
            _refuse()


def _keep_forms(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.forms = [(i.shape, i.dtype) if isinstance(i, torch.Tensor) else None for i in inputs]


def _refuse_backward(ctx: Any, *gradients: Any) -> Any:
    dy = next(gradient for gradient in gradients if gradient is not None)
    return tuple(None if form is None else _refused(dy, *form) for form in ctx.forms)


for _operation in (scales_of, amax_of, codes_of, _compiled):
    _operation.register_autograd(_refuse_backward, setup_context=_keep_forms)


def _sizes(y: torch.Tensor) -> torch.Tensor:
    wide = _widened(y)
    return torch.where(wide.isnan(), 0.0, wide.abs())


def _widened(y: torch.Tensor) -> torch.Tensor:
    return y if y.dtype == torch.float64 else y.float()


def _narrowed(values: torch.Tensor) -> torch.Tensor:
    """Return values as float32, as `_arrays.rounded_to_odd` does."""
    single = values.float()
    if values.dtype != torch.float64:
        return single
    bits = single.view(torch.int32)
    toward_zero = bits - (single.abs() > values.abs()).int()
    return torch.where(single == values, bits, toward_zero | 1).view(torch.float32)


def _expanded(scale: torch.Tensor, q: torch.Tensor, block: int | None) -> torch.Tensor:
    """Return scales in float32 that broadcast to q."""
    if block is not None:
        return scale.float().repeat_interleave(block, -1)[..., : q.shape[-1]]
    return scale.reshape(()) if scale.numel() == 1 else scale
