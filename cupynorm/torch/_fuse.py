"""Norms of `cupynorm.fuse` on tensors: by kernels, or torch's operations around a norm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from cupynorm._arrays import is_number
from cupynorm._checks import check_numbers, check_zero_centered
from cupynorm._environment import import_cupy
from cupynorm._expressions import functions, kind_of
from cupynorm._fuse import Fused as FusedNorm
from cupynorm._fuse import Given, Options, Tools
from cupynorm._operation import Kind
from cupynorm.torch._formulas import round_once
from cupynorm.torch._functions import layer_norm, rms_norm
from cupynorm.torch._kernels import TORCH, check_dense, without_memory
from cupynorm.torch._modules import Module, shape_of
from cupynorm.torch._operations import check_distributed, is_seen

__all__ = ["Fused", "call"]


def call(fused: FusedNorm, given: Given, options: Options) -> tuple[torch.Tensor, ...]:
    """Return the outputs."""
    if _have_kernels(given):
        inputs = given.inputs
        arrays = (given.x, given.weight, given.bias, *inputs.values())
        found: tuple[torch.Tensor, ...] | None
        keeps = torch.is_grad_enabled()
        found = _ByKernels.apply(fused, options, keeps, tuple(inputs), *arrays)
        if found is not None:
            return found
    checked = _checked(fused, given, options)
    try:
        return fused.apply(_TOOLS, given, options, *checked)[0]
    except RuntimeError:  # DTensor raises it for a tensor that is none, unless it has one element
        several = {n: t for n, t in given.inputs.items() if not is_number(t) and t.numel() != 1}
        check_distributed({"x": given.x, **several})
        raise


def _checked(fused: FusedNorm, given: Given, options: Options) -> tuple[str, tuple[str, ...]]:
    """Check a call. Return the compute dtype, and those of the outputs."""
    fused.check_names(given)
    check_dense("x", given.x)
    for name, tensor in (("weight", given.weight), ("bias", given.bias), *given.inputs.items()):
        if tensor is None or (name in given.inputs and is_number(tensor)):
            continue
        if not isinstance(tensor, torch.Tensor):
            number = "a number or " if name in given.inputs else ""
            raise TypeError(
                f"{name} must be {number}a torch tensor, as x is; got {kind_of(tensor)}"
            )
        check_dense(name, tensor)
        if tensor.device != given.x.device:
            raise ValueError(f"{name} must be on x's device, {given.x.device}; got {tensor.device}")
    compute = fused.check(given, options)
    return compute, fused.dtypes_of_outputs(given.x.dtype, options.out_dtype)


# ---- kernels, outside of compilers and transforms ------------------------------------------------

_PLAIN = torch.Tensor, torch.nn.Parameter
_LAYOUT = "({0}.dtype, {0}.shape, {0}.stride(), {0}.device)"
_DIALECT = dataclasses.replace(
    TORCH,
    names=TORCH.names | {"_PLAIN": _PLAIN, "is_number": is_number},
    accepts=dict.fromkeys((*Kind, None), "type({0}) in _PLAIN")
    | {None: "(type({0}) in _PLAIN or is_number({0}))"},
    signature=dict.fromkeys((*Kind, None), _LAYOUT)
    | {None: f"({_LAYOUT} if type({{0}}) in _PLAIN else 0)"},
    before="if _current_device() != index: return None",
    copy="{0} = {0}_copy({0})",
    misaligned="return None",
)


def _have_kernels(given: Given) -> bool:
    """Tell whether a call is on plain tensors of a GPU, and is neither traced nor transformed."""
    if not given.x.is_cuda or torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    arguments = (given.x, given.weight, given.bias, *given.inputs.values())
    return not is_seen(*(a for a in arguments if isinstance(a, torch.Tensor)))


class _Memory:
    """torch's tensors, as `_fused_calls` takes them."""

    dialect = _DIALECT

    def dtype(self, tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def strides(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tensor.stride()

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() or without_memory("a tensor", tensor)

    def native(self, dtype: str) -> Any:
        return getattr(torch, dtype)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # a CUDA graph has a memory pool of its own

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return _cast(tensor, dtype)

    def expanded(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor.expand(shape).contiguous()

    def summed(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self.cast(tensor.sum_to_size(shape), dtype)

    def device(self, tensor: torch.Tensor) -> int:
        return int(tensor.device.index)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        cupy = import_cupy("x is on a GPU")
        with torch.cuda.device(device), cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            yield


_MEMORY = _Memory()


class _ByKernels(torch.autograd.Function):
    """A norm by its kernels. Derivatives of gradients are those of torch's operations."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedNorm,
        options: Options,
        keeps: bool,
        names: tuple[str, ...],
        *arrays: Any,
    ) -> Any:
        from cupynorm import _fused_calls

        keeps = keeps and any(ctx.needs_input_grad)
        given = _given(names, arrays)
        found = _fused_calls.again(_MEMORY, fused, arrays, (keeps, *options, names))
        if found is None:
            told = options, *_checked(fused, given, options)
            found = _fused_calls.forward(_MEMORY, fused, given, *told, statistics=keeps)
        if found is None:
            return None
        outputs, mean, rstd = found
        ctx.told = fused, options, names
        ctx.numbers = [None if isinstance(a, torch.Tensor) else a for a in arrays]
        ctx.set_materialize_grads(False)
        tensors = (a if isinstance(a, torch.Tensor) else None for a in arrays)
        ctx.save_for_backward(*tensors, mean, rstd)
        return outputs

    @staticmethod
    def backward(ctx: Any, *of_outputs: Any) -> Any:
        from cupynorm import _fused_calls

        fused, options, names = ctx.told
        *tensors, mean, rstd = ctx.saved_tensors
        arrays = [n if t is None else t for t, n in zip(tensors, ctx.numbers, strict=True)]
        wanted = ctx.needs_input_grad[-len(arrays) :]
        if all(gradient is None for gradient in of_outputs):
            return (*_NOT_ARRAYS, *(None for _ in arrays))
        given = _given(names, arrays)
        is_differentiated = torch.is_grad_enabled()
        found = None
        given_of = [of for of in of_outputs if of is not None]
        is_dense = all(of.layout is torch.strided for of in given_of)
        if not is_differentiated and is_dense and not is_seen(*given_of):
            read = (*arrays, mean, rstd, *of_outputs)
            told = ("backward", *options, names)
            found = _fused_calls.again(_MEMORY, fused, read, told, len(of_outputs))
            if found is None:
                checked = options, *_checked(fused, given, options), of_outputs
                found = _fused_calls.backward(_MEMORY, fused, given, *checked, mean, rstd)
        if found is not None:
            by_name = dict(zip(("x", "weight", "bias", *fused.inputs), found, strict=True))
            by_place = zip(("x", "weight", "bias", *names), wanted, strict=True)
            gradients = (by_name[name] if needed else None for name, needed in by_place)
            return (*_NOT_ARRAYS, *gradients)
        with torch.enable_grad():
            # One tensor may be given twice.
            of = [a.view_as(a) if w else a for a, w in zip(arrays, wanted, strict=True)]
            told = options, *_checked(fused, given, options)
            outputs = fused.apply(_TOOLS, _given(names, of), *told)[0]
            made = [k for k, gradient in enumerate(of_outputs) if gradient is not None]
            steps = torch.autograd.grad(
                [outputs[k] for k in made],
                [a for a, needed in zip(of, wanted, strict=True) if needed],
                [of_outputs[k] for k in made],
                create_graph=is_differentiated,
                allow_unused=True,
            )
        left = iter(steps)
        return (*_NOT_ARRAYS, *(next(left) if needed else None for needed in wanted))


_NOT_ARRAYS = (None,) * 4  # the gradients of what `_ByKernels` is told


def _given(names: tuple[str, ...], arrays: Sequence[Any]) -> Given:
    x, weight, bias, *inputs = arrays
    return Given(x, weight, bias, dict(zip(names, inputs, strict=True)))


# ---- torch's operations --------------------------------------------------------------------------


def _cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    rounded: torch.Tensor = round_once(values, getattr(torch, dtype))
    return rounded


def _widen(values: torch.Tensor, dtype: str) -> torch.Tensor:
    wide = getattr(torch, dtype)
    if wide != torch.float64 or values.dtype not in (torch.float16, torch.bfloat16):
        return values.to(wide)
    if torch.compiler.is_compiling():  # torch traces no function with a jvp
        return values.to(wide)
    return _Widened.apply(values, wide)


class _Widened(torch.autograd.Function):
    """A cast to float64 whose gradient is rounded once. Torch's goes through float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        return values.to(wide)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype, ctx.wide = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return round_once(dy, ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return tangent.to(ctx.wide)


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


def _broadcast(values: Any, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        return torch.full_like(like, values)
    return values.expand(like.shape).contiguous()


# A compiler would leave out a cast to a narrower dtype and back.
@torch.library.custom_op("cupynorm::round_to", mutates_args=())
def _round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded: torch.Tensor = round_once(values, dtype)
    return rounded.clone() if rounded is values else rounded  # no operation returns its argument


@_round_to.register_fake
def _(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(values, dtype=dtype)


@_round_to.register_vmap
def _(info: Any, in_dims: Any, values: torch.Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    return _round_to(values, dtype), in_dims[0]


def _stored(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round a value, by an addition that is exact if the result is finite."""
    rounded = _round_to(value.detach(), getattr(torch, dtype)).to(value.dtype)
    return value + (rounded - value).detach()


def _normalize(norm: str, x: torch.Tensor, *vectors: Any, **options: Any) -> tuple[Any, Any, Any]:
    function: Any = rms_norm if norm == "rms_norm" else layer_norm
    return function(x, *vectors, out_dtype=x.dtype, **options), None, None


_TOOLS = Tools(
    functions(
        torch,
        erf=torch.special.erf,
        erfc=torch.special.erfc,
        # Autograd would differentiate the formulas of these to NaN where exp overflows.
        sigmoid=torch.sigmoid,
        softplus=lambda a: -torch.nn.functional.logsigmoid(-a),
    ),
    widen=_widen,
    cast=_cast,
    copy=torch.clone,
    number=_number,
    broadcast=_broadcast,
    stored=_stored,
    normalize=_normalize,
)


class Fused(Module):
    """A norm of `cupynorm.fuse` as a module, with its weight and bias.

    Parameters
    ----------
    fused : cupynorm.Fused
        What `cupynorm.fuse` returned.
    normalized_shape : int or tuple of int
        The last axes of the input, over which it is normalized.
    eps : float, optional
        The default is that of the norm.
    elementwise_affine : bool
        Whether there is a weight.
    bias : bool, optional
        Whether there is a bias too. The default is True for layer_norm, and False for rms_norm.
    zero_centered : bool
        Whether the weight is stored minus one. It then begins at zero.
    device, dtype
        Of the weight and the bias.

    Attributes
    ----------
    weight, bias : Parameter or None
        They have shape ``normalized_shape``.

    Raises
    ------
    TypeError, ValueError
        If fused is no norm of `cupynorm.fuse`, normalized_shape is no shape, or a call would refuse
        eps, zero_centered or dtype.

    Examples
    --------
    >>> import torch
    >>> import cupynorm.torch
    >>> gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cupynorm.math.silu(z))
    >>> norm = cupynorm.torch.Fused(gated, 4)
    >>> norm(torch.ones(2, 4), z=torch.zeros(2, 4)).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """

    def __init__(
        self,
        fused: FusedNorm,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(fused, FusedNorm):
            raise TypeError(f"fused must be a norm of cupynorm.fuse, got {fused!r}")
        self.normalized_shape = shape_of(normalized_shape, dtype)
        check_zero_centered(zero_centered, has_weight=elementwise_affine)
        self.fused = fused
        self.eps = fused.eps(Options(eps))
        check_numbers(np.dtype(np.float64), self.eps, None)
        self.zero_centered = bool(zero_centered)
        has_bias = fused.norm == "layer_norm" if bias is None else bias
        for name, there in (("weight", True), ("bias", has_bias)):
            parameter = None
            if elementwise_affine and there:
                made = torch.empty(self.normalized_shape, device=device, dtype=dtype)
                parameter = torch.nn.Parameter(made)
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def forward(self, /, x: torch.Tensor, *, out_dtype: Any = None, **inputs: Any) -> Any:
        """Return what the norm computes of x and its further inputs, by their names.

        out_dtype is that of a call of `fused`.
        """
        k = len(self.normalized_shape)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch tensor, got a {type(x).__qualname__}")
        if tuple(x.shape[-k:]) != self.normalized_shape:
            raise ValueError(
                f"x must end in the axes of normalized_shape, {self.normalized_shape}; got shape "
                f"{tuple(x.shape)}"
            )
        return self.fused(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            axis=tuple(range(-k, 0)),
            zero_centered=self.zero_centered,
            out_dtype=out_dtype,
            **inputs,
        )

    def extra_repr(self) -> str:
        """Return the options that the module's repr shows."""
        shown = f"{self.fused!r}, {self.normalized_shape}, eps={self.eps}"
        shown += f", elementwise_affine={self.weight is not None}, bias={self.bias is not None}"
        return f"{shown}, zero_centered=True" if self.zero_centered else shown
