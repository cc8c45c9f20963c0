"""The passes as operations that torch differentiates, batches, traces, compiles and shards.

A call on plain tensors goes straight to the kernels, through an autograd.Function where gradients
are recorded: what torch.library puts around an operation costs more than the launch. Where torch
must see the call, under torch.compile and export, in a dispatch mode, or with a subclass such as
DTensor, it is an operation of torch.library, with the same formulas.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from cupynorm import _checks
from cupynorm._operation import Norm, Relu, bitmask_bytes
from cupynorm.torch import _formulas, _kernels
from cupynorm.torch._kernels import NUMPY_DTYPES, Asked, check_tensor, compute_type

__all__ = ["PLAIN", "norm_backward", "norm_forward", "normalize", "normalize_plain"]

# The values that are not tensors begin with an int, from which on DTensor tells calls apart.
FORWARD = (
    "(Tensor x, Tensor? weight, Tensor? bias, int k, str norm, float eps, bool zero_centered, "
    "float[]? relu, ScalarType? out_dtype, bool training) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor bitmask)"
)
BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, Tensor? bitmask, int k, "
    "str norm, float eps, bool zero_centered, ScalarType? bias_dtype) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)"
)

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


# ---- which way a call goes -----------------------------------------------------------------------


# By names of this module: to look each up in torch's takes a tenth of a microsecond.
_is_grad_enabled = torch.is_grad_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # elsewhere a dispatch mode tells
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing
_transforms_active = torch._C._are_functorch_transforms_active
_functorch = torch._C._functorch
_is_wrapped = _functorch.is_functorch_wrapped_tensor
# Gradients that autograd batches, of is_grads_batched=True, are tensors as others but for this.
_is_batched = _functorch.is_legacy_batchedtensor


def _is_seen(*tensors: Any) -> bool:
    """Tell whether torch must see a call on these tensors; transforms are another matter."""
    return bool(_dispatch_modes() or _is_jit_tracing() or any(map(_says_more, tensors)))


def _says_more(tensor: Any) -> bool:
    """Tell whether a tensor is more than the numbers in its memory, of which torch knows."""
    if type(tensor) not in PLAIN:
        return True
    return tensor is not None and bool(
        not (tensor.is_cuda or tensor.is_cpu)
        or tensor.is_neg()  # as the imaginary part of a conjugate, whose memory has the other sign
        or tensor._is_zerotensor()  # which has no memory
        or _is_wrapped(tensor)  # has none of its own
        or _is_batched(tensor)
    )


def _alive(name: str, tensor: Any) -> Any:
    """Return what a tensor that has outlived its transform stands for, as torch does."""
    if tensor is None or not _is_wrapped(tensor):
        return tensor
    while _functorch.is_dead_tensor_wrapper(tensor):
        tensor = _functorch.unwrap_if_dead(tensor)
    if _functorch.is_batchedtensor(tensor) and not _transforms_active():
        raise ValueError(f"{name} must not outlive the torch.func.vmap of which it is one example")
    return tensor


def _is_recorded(*tensors: Any) -> bool:
    """Tell whether gradients of a call on these tensors may be asked for."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    # Within a transform, only its own tensors say so.
    return torch.compiler.is_compiling() or _transforms_active()


def normalize_plain(x: Any, weight: Any, bias: Any, options: Asked) -> Any:
    """Return what `normalize` does, of tensors of the `PLAIN` types."""
    if (
        _is_traced_by_dynamo()
        or _transforms_active()
        or _dispatch_modes()
        or _is_jit_tracing()
        or forward_ad._current_level >= 0
    ):
        return normalize(x, weight, bias, options)
    try:
        if _is_grad_enabled() and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
        ):
            return _apply_recorded(x, weight, bias, options)
        return _kernels.forward((x, weight, bias), options, False)[0]
    except (RuntimeError, ValueError):  # of what has no memory here: to ask first takes time
        if not _is_seen(x, weight, bias):
            raise
    return normalize(x, weight, bias, options)


def normalize(x: Any, weight: Any, bias: Any, options: Asked) -> Any:
    """Return y; what `norm_backward` needs is kept where gradients may be asked for."""
    if not torch.compiler.is_compiling():
        x, weight, bias = map(_alive, ("x", "weight", "bias"), (x, weight, bias))
    arguments: Any = (x, weight, bias, *options, _is_recorded(x, weight, bias))
    return norm_forward(*arguments)[0]


def norm_forward(
    x: Any,
    weight: Any,
    bias: Any,
    k: int,
    norm: Norm,
    eps: float,
    zero_centered: bool,
    relu: Relu,
    out_dtype: torch.dtype | None,
    training: bool,
) -> tuple[Any, Any, Any, Any]:
    """Return y and, for training, what `norm_backward` needs.

    An array that does not apply is None, or empty where the call was an operation of torch.library.
    """
    arguments = (x, weight, bias, k, norm, eps, zero_centered, relu, out_dtype, training)
    if torch.compiler.is_compiling():
        _share_out()
        return _forward_operation(*arguments)
    if _transforms_active():
        return _Forward.apply(*arguments)
    if _is_seen(x, weight, bias):
        _share_out()
        return _forward_operation(*arguments)
    if training or forward_ad._current_level >= 0:  # where it says that it has no jvp
        return _apply_forward(*arguments)
    options = (k, norm, eps, zero_centered, relu, out_dtype)
    return _kernels.forward((x, weight, bias), options, training)


def norm_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bitmask: Any,
    k: int,
    norm: Norm,
    eps: float,
    zero_centered: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any]:
    """Return dx, dweight and dbias; one that does not apply is None, or empty."""
    if torch.compiler.is_compiling():
        run = _backward_operation
    elif _transforms_active():
        run = _Backward.apply
    elif (
        type(dy) not in PLAIN
        or type(x) not in PLAIN
        or type(weight) not in PLAIN
        or type(mean) not in PLAIN
        or type(rstd) not in PLAIN
        or type(bitmask) not in PLAIN
        or _dispatch_modes()
        or _is_jit_tracing()
    ):
        run = _backward_operation
    else:
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # as in norm_forward
            try:
                return _kernels.backward(
                    (dy, x, weight, mean, rstd, bitmask), (k, norm, eps, zero_centered), bias_dtype
                )
            except (RuntimeError, ValueError):  # as in normalize_plain
                if not _is_seen(dy, x, weight, mean, rstd, bitmask):
                    raise
        names = ("dy", "x", "weight", "mean", "rstd", "bitmask")
        tensors = (dy, x, weight, mean, rstd, bitmask)
        dy, x, weight, mean, rstd, bitmask = map(_alive, names, tensors)
        run = _backward_operation if _is_batched(dy) else _apply_backward
    return run(dy, x, weight, mean, rstd, bitmask, k, norm, eps, zero_centered, bias_dtype)


def _share_out() -> None:
    """Tell DTensor how the operations are split, if it is in use; importing it takes a while."""
    if "torch.distributed.tensor" in sys.modules:
        from cupynorm.torch import _sharding

        _sharding.register()


# As torch.compiler.assume_constant_result does, which would import the compiler for it: 1.6 s.
_share_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- derivatives ---------------------------------------------------------------------------------


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, k, norm, eps, zero_centered, relu, _, ctx.training = inputs
    _, mean, rstd, bitmask = output
    ctx.mark_non_differentiable(*[t for t in (mean, rstd, bitmask) if t is not None])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        x,
        weight,
        mean if norm == "layer_norm" else None,
        rstd,
        None if relu is None else bitmask,
    )
    ctx.options = k, norm, eps, zero_centered
    ctx.has_weight = weight is not None
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate_forward(ctx: Any, dy: Any, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    if not ctx.training:
        raise RuntimeError("norm_forward was called with training=False: nothing was kept for it")
    bias_dtype = ctx.bias_dtype if ctx.needs_input_grad[2] else None
    arguments: tuple[Any, ...] = (dy, *ctx.saved_tensors, *ctx.options, bias_dtype)
    dx, dweight, dbias = norm_backward(*arguments)
    return (
        dx,
        dweight if ctx.has_weight else None,
        None if bias_dtype is None else dbias,
        *(None,) * 7,
    )


def _keep_for_second_backward(ctx: Any, inputs: Any, output: Any) -> None:
    dy, x, weight, _, _, bitmask, *options, bias_dtype = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, weight, bitmask)
    ctx.options = options
    ctx.has_bias = bias_dtype is not None


def _differentiate_backward(ctx: Any, a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    dy, x, weight, bitmask = ctx.saved_tensors
    b = None if weight is None else b
    c = c if ctx.has_bias else None
    gradients = _formulas.gradients_of_backward(a, b, c, dy, x, weight, bitmask, *ctx.options)
    return (*gradients, *(None,) * 8)


# ---- a batch of calls at once --------------------------------------------------------------------


def _forward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap, which makes one call of many where the weight is shared."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        tensors, options = arguments[:3], arguments[3:]
        _, norm, _, _, relu, _, training = options
        x_dim, *dims = in_dims[:3]
        if dims == [None, None]:
            results = run(tensors[0].movedim(x_dim, 0), *tensors[1:], *options)
        elif info.batch_size == 0:
            affine = (_of_example(t, d) for t, d in zip(tensors[1:], dims, strict=True))
            results = run(_batched(tensors[0], x_dim, 0), *affine, *options)
        else:
            examples = [
                run(*(_example(t, d, i) for t, d in zip(tensors, in_dims, strict=False)), *options)
                for i in range(info.batch_size)
            ]
            results = tuple(
                None if parts[0] is None else torch.stack(parts)
                for parts in zip(*examples, strict=True)
            )
        there = (True, training and norm == "layer_norm", training, training and relu is not None)
        return results, tuple(0 if is_there else None for is_there in there)

    return rule


def _batched(tensor: Any, dim: int | None, size: int) -> Any:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _of_example(tensor: Any, dim: int | None) -> Any:
    """Return a tensor like one of an example, where there is none."""
    return tensor if dim is None else tensor.new_empty(tensor.movedim(dim, 0).shape[1:])


def _example(tensor: Any, dim: int | None, i: int) -> Any:
    return tensor if dim is None else tensor.select(dim, i)


def _backward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap: one call for dx, and formulas for the sums of each example."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        k, norm, eps, zero_centered, bias_dtype = arguments[6:]
        tensors: Any = (
            _batched(t, d, info.batch_size) for t, d in zip(arguments[:6], in_dims, strict=False)
        )
        dy, x, weight, mean, rstd, bitmask = tensors
        dtype = compute_type(x)
        w = _formulas.effective_weight(weight, zero_centered, dtype)
        if weight is not None:
            w = w.reshape(info.batch_size, *(1,) * (x.ndim - 1 - k), *weight.shape[1:])
        inside = _formulas.masked(dy, bitmask, k, dtype)
        dx, *unused = run(inside * w, x, None, mean, rstd, None, k, norm, eps, False, None)
        dweight, dbias = unused
        if weight is not None:
            xhat, _ = _formulas.normalized(norm, x, k, eps)
            sums = _formulas.sum_over_rows(inside * xhat, 1, k)
            dweight = _formulas.round_once(sums, weight.dtype)
        if bias_dtype is not None:
            dbias = _formulas.round_once(_formulas.sum_over_rows(inside, 1, k), bias_dtype)
        out_dims = (0, None if weight is None else 0, None if bias_dtype is None else 0)
        return (dx, dweight, dbias), out_dims

    return rule


# ---- as functions of autograd --------------------------------------------------------------------


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "the norms of cupynorm.torch have no jvp, the forward mode of autograd: use "
        "jacrev(jacrev(f)) for hessian(f)"
    )


class _Forward(torch.autograd.Function):
    # What lies below the transforms may be a tracer's, or a subclass, as well.
    @staticmethod
    def forward(x: Any, weight: Any, bias: Any, *options: Any) -> Any:
        if _is_seen(x, weight, bias):
            _share_out()
            return _forward_operation(x, weight, bias, *options)
        return _kernels.forward((x, weight, bias), options[:-1], options[-1])

    setup_context = staticmethod(_keep_for_backward)
    backward = staticmethod(_differentiate_forward)
    vmap = staticmethod(_forward_of_batch(norm_forward))
    jvp = staticmethod(_refuse_forward_mode)


class _Backward(torch.autograd.Function):
    setup_context = staticmethod(_keep_for_second_backward)
    backward = staticmethod(_differentiate_backward)
    vmap = staticmethod(_backward_of_batch(norm_backward))
    jvp = staticmethod(_refuse_forward_mode)

    @staticmethod
    def forward(
        dy: Any,
        x: Any,
        weight: Any,
        mean: Any,
        rstd: Any,
        bitmask: Any,
        k: int,
        norm: Norm,
        eps: float,
        zero_centered: bool,
        bias_dtype: torch.dtype | None,
    ) -> Any:
        tensors = dy, x, weight, mean, rstd, bitmask
        if _is_seen(*tensors):
            return _backward_operation(*tensors, k, norm, eps, zero_centered, bias_dtype)
        return _kernels.backward(tensors, (k, norm, eps, zero_centered), bias_dtype)


class _Recorded(torch.autograd.Function):
    """`_Forward` where no transform looks on: what is kept is no result, and options are one."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, options: Any) -> Any:
        y, mean, rstd, bitmask = _kernels.forward((x, weight, bias), options, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, rstd, bitmask)
        ctx.options = options, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if dy is None:
            return None, None, None, None
        (k, norm, eps, zero_centered, *_), bias_dtype = ctx.options
        if bias_dtype is not None and not ctx.needs_input_grad[2]:
            bias_dtype = None
        x, weight, mean, rstd, bitmask = ctx.saved_tensors
        dx, dweight, dbias = norm_backward(
            dy, x, weight, mean, rstd, bitmask, k, norm, eps, zero_centered, bias_dtype
        )
        return (
            dx,
            None if weight is None else dweight,
            None if bias_dtype is None else dbias,
            None,
        )


# Past what Function.apply does for transforms of functions, which costs 13 us.
_apply_recorded = super(torch.autograd.Function, _Recorded).apply
_apply_forward = super(torch.autograd.Function, _Forward).apply
_apply_backward = super(torch.autograd.Function, _Backward).apply


# ---- as operations of torch.library --------------------------------------------------------------


def _empty_for_none(like: torch.Tensor, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return tensors that an operation may return: it has no optional results."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


def _run_forward(x: Any, weight: Any, bias: Any, *options: Any) -> tuple[torch.Tensor, ...]:
    k, norm, eps, zero_centered, relu, out_dtype, training = options
    relu = None if relu is None else tuple(relu)
    options = (k, norm, eps, zero_centered, relu, out_dtype)
    return _empty_for_none(x, _kernels.forward((x, weight, bias), options, training))


def _check_row(name: str, tensor: Any, normalized: Any) -> None:
    def message() -> str:
        return (
            f"{name} must have the shape of x's normalized axes, {tuple(normalized)}; got "
            f"{tuple(tensor.shape)}"
        )

    torch._check_value(tensor.ndim == len(normalized), message)
    for size, wanted in zip(tensor.shape, normalized, strict=True):
        torch._check_value(size == wanted, message)  # when the program runs, if not known before


def _outline_forward(
    x: Any,
    weight: Any,
    bias: Any,
    k: int,
    norm: Norm,
    eps: float,
    zero_centered: bool,
    relu: Relu,
    out_dtype: torch.dtype | None,
    training: bool,
) -> tuple[torch.Tensor, ...]:
    # What the kernels will ask for, when a program is traced: shapes may be symbolic.
    normalized = x.shape[x.ndim - k :]
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_tensor(name, tensor, x)
            if name != "x":
                _check_row(name, tensor, normalized)
    if any(isinstance(size, int) and size == 0 for size in normalized):
        raise ValueError(
            f"x must have at least one element in each row, got shape {tuple(x.shape)}"
        )
    if out_dtype is not None:
        _checks.to_dtype("out_dtype", out_dtype)
    _checks.check_zero_centered(zero_centered, has_weight=weight is not None)
    compute = NUMPY_DTYPES[compute_type(x)]
    _checks.check_numbers(compute, eps, None if relu is None else tuple(relu))
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    kept = x.shape[: x.ndim - k]
    mean = rstd = bitmask = None
    if training:
        rstd = x.new_empty(kept, dtype=compute_type(x))
        if norm == "layer_norm":
            mean = torch.empty_like(rstd)
        if relu is not None:
            n = math.prod(normalized)
            bitmask = x.new_empty((*kept, bitmask_bytes(n)), dtype=torch.uint8)
    return _empty_for_none(x, (y, mean, rstd, bitmask))


def _run_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *tensors, k, norm, eps, zero_centered, bias_dtype = arguments
    gradients = _kernels.backward(tuple(tensors), (k, norm, eps, zero_centered), bias_dtype)
    return _empty_for_none(tensors[1], gradients)


def _outline_backward(
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bitmask: Any,
    k: int,
    norm: Norm,
    eps: float,
    zero_centered: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:
    normalized = x.shape[x.ndim - k :]
    dweight = None if weight is None else x.new_empty(normalized, dtype=weight.dtype)
    dbias = None if bias_dtype is None else x.new_empty(normalized, dtype=bias_dtype)
    return _empty_for_none(x, (x.new_empty(x.shape), dweight, dbias))


# torch.library.impl does not hand on the keys.
_library = torch.library.Library("cupynorm", "FRAGMENT")
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _has_tangent(argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    return forward_ad.unpack_dual(argument).tangent is not None


def _define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    outline: Callable[..., Any],
    setup_context: Callable[..., Any],
    backward: Callable[..., Any],
    of_batch: Callable[..., Any],
) -> Any:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"cupynorm::{name}", outline)
    operation = getattr(torch.ops.cupynorm, name).default
    recorded = make_autograd_impl(operation, Info(backward, setup_context))

    def dispatched(keys: Any, *arguments: Any) -> Any:
        """Do as torch.library.register_autograd, but pass on at once what nobody else looks at.

        A compiled program comes here in each call, its gradients long taken care of.
        """
        if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
            _refuse_forward_mode()
        asked = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        following = (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
        if asked or following not in _DEVICES:
            return recorded(keys, *arguments)
        return run(*arguments)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"cupynorm::{name}", of_batch(operation))
    return operation


_forward_operation = _define(
    "norm_forward",
    FORWARD,
    _run_forward,
    _outline_forward,
    _keep_for_backward,
    _differentiate_forward,
    _forward_of_batch,
)
_backward_operation = _define(
    "norm_backward",
    BACKWARD,
    _run_backward,
    _outline_backward,
    _keep_for_second_backward,
    _differentiate_backward,
    _backward_of_batch,
)
