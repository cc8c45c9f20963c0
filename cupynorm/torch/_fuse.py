"""Norms of `cupynorm.fuse` on tensors: torch's operations around a norm of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from cupynorm._checks import check_numbers, check_zero_centered
from cupynorm._expressions import functions, kind_of
from cupynorm._fuse import Fused as FusedNorm
from cupynorm._fuse import Given, Options, Tools, is_number
from cupynorm.torch._functions import layer_norm, rms_norm
from cupynorm.torch._modules import Module, check_made

__all__ = ["Fused", "call"]


def call(fused: FusedNorm, given: Given, options: Options) -> tuple[torch.Tensor, ...]:
    """Return the outputs."""
    for name, tensor in (("weight", given.weight), ("bias", given.bias), *given.inputs.items()):
        if tensor is None or is_number(tensor):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, as x is; got {kind_of(tensor)}")
        if tensor.device != given.x.device:
            raise ValueError(f"{name} must be on x's device, {given.x.device}; got {tensor.device}")
    compute = fused.check(given, options)
    dtypes = fused.dtypes_of_outputs(given.x.dtype, options.out_dtype)
    return fused.apply(_TOOLS, given, options, compute, dtypes)[0]


def _cast(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(getattr(torch, dtype))


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


def _broadcast(values: Any, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        return torch.full_like(like, values)
    return values.expand(like.shape).contiguous()


# A compiler would leave out a cast to a narrower dtype and back.
@torch.library.custom_op("cupynorm::round_to", mutates_args=())
def _round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype, copy=True)


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
    widen=_cast,
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
        check_made(normalized_shape, dtype)
        check_zero_centered(zero_centered, has_weight=elementwise_affine)
        self.fused = fused
        self.eps = fused.eps(Options(eps))
        check_numbers(np.dtype(np.float64), self.eps, None)
        self.zero_centered = bool(zero_centered)
        sizes = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        self.normalized_shape = tuple(map(int, sizes))
        has_bias = fused.norm == "layer_norm" if bias is None else bias
        for name, there in (("weight", True), ("bias", has_bias)):
            parameter = None
            if elementwise_affine and there:
                made = torch.empty(self.normalized_shape, device=device, dtype=dtype)
                parameter = torch.nn.Parameter(made)
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, /, *, out_dtype: Any = None, **inputs: Any) -> Any:
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
