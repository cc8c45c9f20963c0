"""Modules that replace torch.nn's."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter

from cupynorm._checks import check_numbers, check_zero_centered, to_dtype
from cupynorm._operation import Norm, Relu
from cupynorm.torch._functions import normalize
from cupynorm.torch._kernels import check_tensor

__all__ = ["GroupNorm", "LayerNorm", "Module", "RMSNorm", "shape_of"]


def _is_called(module: Any, arguments: Any) -> None:
    """Do nothing. With a hook, torch.nn.TransformerEncoderLayer calls the module.

    Otherwise in inference it computes a plain LayerNorm itself, from its norms' weight, bias and
    eps.
    """


def _plain(number: Any) -> Any:
    """Turn a NumPy number into a Python number. torch.compile makes a tensor of the former."""
    return number.item() if isinstance(number, np.generic) else number


def _with_shapes(x: Any) -> tuple[Any, ...]:
    """Return the parts of x that have a shape: none if torch.fx traces."""
    if not isinstance(x, torch.Tensor):
        return ()
    return x.unbind() if x.is_nested and x.layout is torch.strided else (x,)


def shape_of(normalized_shape: Any, dtype: Any) -> tuple[int, ...]:
    """Return a module's shape. torch's modules refuse others in words that name no argument."""
    try:
        several = isinstance(normalized_shape, Iterable)
        sizes = tuple(normalized_shape) if several else (normalized_shape,)
        if any(isinstance(n, bool) for n in sizes):
            raise TypeError
        shape = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(
            f"normalized_shape must be an int or a tuple of ints, got {normalized_shape!r}"
        ) from None
    if any(n < 0 for n in shape):
        raise ValueError(f"normalized_shape must not be negative, got {normalized_shape!r}")
    _check_dtype(dtype)
    return shape


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
    if dtype is not None:
        to_dtype("dtype", dtype)


def _check_input(name: str, x: Any) -> None:
    """Check a module's input, by the name that its caller knows."""
    if isinstance(x, torch.Tensor):
        check_tensor(name, x, x)
    elif not torch.overrides.has_torch_function((x,)):  # else it has words of its own
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")


class Module(torch.nn.Module):
    """What all modules here add to torch.nn's."""

    weight: Any
    bias: Any
    zero_centered: bool = False

    def reset_parameters(self) -> None:
        """Let the norm begin without an effect of its weight and bias."""
        if self.weight is not None:
            (torch.nn.init.zeros_ if self.zero_centered else torch.nn.init.ones_)(self.weight)
        if getattr(self, "bias", None) is not None:
            torch.nn.init.zeros_(self.bias)

    def _get_name(self) -> str:
        """Return what the module's repr calls it: torch.nn's class has the same name."""
        name = type(self).__name__
        ours = type(self).__module__.startswith("cupynorm.torch.")
        return f"cupynorm.torch.{name}" if ours else name


def _may_equal(sizes: tuple[Any, ...], expected: tuple[int, ...]) -> bool:
    """Compare sizes while torch compiles; those that are still open when the program runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if len(sizes) != len(expected):
        return False
    pairs = list(zip(sizes, expected, strict=True))
    if not all(guard_or_true(size == wanted) for size, wanted in pairs):
        return False
    for size, wanted in pairs:
        # torch 2.11 compiles no other check, and no message that reads a variable.
        torch._check(size == wanted, lambda: "rows must have the shape of normalized_shape")
    return True


class _Norm(Module):
    """What those add whose rows are the last axes."""

    normalized_shape: tuple[int, ...]
    eps: Any
    elementwise_affine: bool
    relu: Relu = None
    _input = "x"  # what torch.nn's forward calls it

    def _extend(self, zero_centered: bool, relu: Relu) -> None:
        check_zero_centered(zero_centered, has_weight=self.elementwise_affine)
        by_dtype = self.eps is None and isinstance(self, torch.nn.RMSNorm)
        check_numbers(np.dtype(np.float64), 0.0 if by_dtype else self.eps, relu)
        if not by_dtype:
            self.eps = float(self.eps)  # torch.compile makes tensors of NumPy's numbers
        self.zero_centered = bool(zero_centered)
        self.relu = relu if relu is None else (_plain(relu[0]), _plain(relu[1]))
        self.reset_parameters()
        plain = isinstance(self, torch.nn.LayerNorm) and not zero_centered and relu is None
        if self.bias is not None and not plain:
            self.register_forward_pre_hook(_is_called)

    def _normalize(self, norm: Norm, x: Any, residual: Any) -> Any:
        # They usually are here. To ask the module for one takes 0.4 us more.
        parameters, expected = self._parameters, self.normalized_shape
        k = len(expected)
        weight = parameters["weight"] if "weight" in parameters else self.weight
        # It may have been deleted.
        bias = parameters["bias"] if "bias" in parameters else getattr(self, "bias", None)
        if weight is None or 1 in expected:  # else x is checked against it
            self._check_shape(x)
        axis = None if k == 1 else range(-k, 0)
        asked = self.eps, axis, self.zero_centered, self.relu, None, None
        try:
            return normalize(norm, (x, residual, weight, bias), asked)
        except (TypeError, ValueError, NotImplementedError):
            self._check_shape(x)  # not before each call: it takes a microsecond
            if not getattr(x, "is_nested", False):
                _check_input(self._input, x)
            raise

    def _check_shape(self, x: Any) -> None:
        expected, is_compiling = self.normalized_shape, torch.compiler.is_compiling()
        for part in _with_shapes(x):
            sizes = tuple(part.shape[-len(expected) :])
            if not (_may_equal(sizes, expected) if is_compiling else sizes == expected):
                raise ValueError(
                    f"{self._input} must end in the axes of normalized_shape, {expected}; got "
                    f"shape {tuple(part.shape)}"
                )

    def extra_repr(self) -> str:
        """Return the options that the module's repr shows."""
        shown = super().extra_repr()
        if self.zero_centered:
            shown += ", zero_centered=True"
        return shown if self.relu is None else f"{shown}, relu={self.relu}"


class _BiasOfRMSNorm:
    """The parameter `bias`. It is None if a torch.nn.RMSNorm, which has none, changed its class."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        parameters = module._parameters
        if "bias" not in parameters:
            if "_is_made_here" in vars(module):  # its bias was deleted since
                raise AttributeError(f"{type(module).__name__!r} object has no attribute 'bias'")
            parameters["bias"] = None  # else one that is assigned would seem to be there already
        return parameters["bias"]


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """`rms_norm` as a module, which replaces ``torch.nn.RMSNorm``.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype
        As for ``torch.nn.RMSNorm``. eps defaults to the epsilon of the compute dtype.
    bias : bool
        Whether there is a bias too.
    zero_centered : bool
        Whether the weight is stored minus one. It then begins at zero. The weight that
        ``torch.nn.RMSNorm`` stores is one more.
    relu : (float, float), optional
        Bounds to clamp to.

    Attributes
    ----------
    weight, bias : Parameter or None
        They have shape ``normalized_shape``. Without a bias the state_dict is that of
        ``torch.nn.RMSNorm``.

    Raises
    ------
    TypeError, ValueError
        If normalized_shape is no shape, or `rms_norm` would refuse dtype, eps, zero_centered or
        relu.

    Examples
    --------
    >>> import torch
    >>> from cupynorm.torch import RMSNorm
    >>> norm = RMSNorm(4, eps=1e-6)
    >>> norm.load_state_dict(torch.nn.RMSNorm(4).state_dict())
    <All keys matched successfully>
    >>> norm(torch.ones(2, 4)).sum()
    tensor(8.0000, grad_fn=<SumBackward0>)

    With a residual it returns two tensors: the norm of the sum, and the sum.

    >>> y, residual = norm(torch.ones(2, 4), torch.ones(2, 4))
    >>> residual.sum()
    tensor(16.)
    """

    bias = _BiasOfRMSNorm()

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = False,
        zero_centered: bool = False,
        relu: Relu = None,
    ) -> None:
        shape = shape_of(normalized_shape, dtype)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        parameter = None
        if elementwise_affine and bias:
            parameter = Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        self.register_parameter("bias", parameter)
        self._is_made_here = True
        self._extend(zero_centered, relu)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return `rms_norm` of x; with a residual, that of ``x + residual``, and the sum."""
        return self._normalize("rms_norm", x, residual)

    def extra_repr(self) -> str:
        """Return the options that the module's repr shows."""
        shown = super().extra_repr()
        return shown if getattr(self, "bias", None) is None else f"{shown}, bias=True"


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """`layer_norm` as a module, which replaces ``torch.nn.LayerNorm``.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype
        As for ``torch.nn.LayerNorm``.
    zero_centered : bool
        Whether the weight is stored minus one. It then begins at zero. The weight that
        ``torch.nn.LayerNorm`` stores is one more.
    relu : (float, float), optional
        Bounds to clamp to.

    Attributes
    ----------
    weight, bias : Parameter or None
        They have shape ``normalized_shape``. The state_dict is that of ``torch.nn.LayerNorm``.

    Raises
    ------
    TypeError, ValueError
        If normalized_shape is no shape, or `layer_norm` would refuse dtype, eps, zero_centered or
        relu.

    Examples
    --------
    >>> import torch
    >>> from cupynorm.torch import LayerNorm
    >>> norm = LayerNorm(4)
    >>> norm.load_state_dict(torch.nn.LayerNorm(4).state_dict())
    <All keys matched successfully>
    >>> LayerNorm(4, zero_centered=True).weight
    Parameter containing:
    tensor([0., 0., 0., 0.], requires_grad=True)
    >>> y, residual = norm(torch.ones(2, 4), torch.ones(2, 4))
    >>> residual.sum()
    tensor(16.)
    """

    _input = "input"

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered: bool = False,
        relu: Relu = None,
    ) -> None:
        shape = shape_of(normalized_shape, dtype)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self._extend(zero_centered, relu)

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Return `layer_norm` of the input; with a residual, that of the sum, and the sum."""
        return self._normalize("layer_norm", input, residual)


@torch.fx.wrap
def _group_norm(x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    """Return what GroupNorm computes. A trace of torch.fx has a call of this."""
    batch, channels, *sizes = x.shape
    of_group = num_groups, channels // num_groups
    shape = *of_group, *(1,) * len(sizes)
    vectors = (v if v is None else v.reshape(shape) for v in (weight, bias))
    tensors = x.reshape(batch, *of_group, *sizes), None, *vectors
    asked = eps, range(-1 - len(sizes), 0), False, None, None, None
    return normalize("layer_norm", tensors, asked).reshape(x.shape)


class GroupNorm(Module, torch.nn.GroupNorm):
    """LayerNorm over groups of channels, as a module which replaces ``torch.nn.GroupNorm``.

    Its input has shape (batch, num_channels, ...). A group is several channels in turn, with all
    that is in them. It is one row of `layer_norm`, whose weight and bias have an element for each
    channel. The result is contiguous.

    Parameters
    ----------
    num_groups, num_channels, eps, affine, device, dtype, bias
        As for ``torch.nn.GroupNorm``.

    Attributes
    ----------
    weight, bias : Parameter or None
        They have shape ``(num_channels,)``. The state_dict is that of ``torch.nn.GroupNorm``.

    Raises
    ------
    TypeError, ValueError
        If num_groups or num_channels is no number of groups or channels, if these do not divide
        into those, or if `layer_norm` would refuse dtype or eps.

    Examples
    --------
    >>> import torch
    >>> from cupynorm.torch import GroupNorm
    >>> norm = GroupNorm(2, 6, dtype=torch.float32)
    >>> norm.load_state_dict(torch.nn.GroupNorm(2, 6).state_dict())
    <All keys matched successfully>
    >>> norm(torch.ones(1, 6, 4, 4)).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        for name, count in (("num_groups", num_groups), ("num_channels", num_channels)):
            if not isinstance(count, numbers.Integral) or isinstance(count, bool):
                raise TypeError(f"{name} must be an int, got {count!r}")
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if num_channels % num_groups:
            raise ValueError(
                f"num_channels must be a multiple of num_groups, {num_groups}; got {num_channels}"
            )
        _check_dtype(dtype)
        check_numbers(np.dtype(np.float64), eps, None)
        super().__init__(int(num_groups), int(num_channels), float(eps), affine, device, dtype)
        if not bias:  # a keyword of torch.nn's since 2.13
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `layer_norm` of each group of the input's channels."""
        if not isinstance(input, torch.fx.Proxy):  # which a trace has
            _check_input("input", input)
            if input.ndim < 2 or input.shape[1] != self.num_channels:
                raise ValueError(
                    f"input must have num_channels, {self.num_channels}, on axis 1; got shape "
                    f"{tuple(input.shape)}"
                )
            if 0 in input.shape[2:]:
                raise ValueError(
                    f"input must have elements in each group, got shape {tuple(input.shape)}"
                )
        result: torch.Tensor = _group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        return result
