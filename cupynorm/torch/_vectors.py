"""weight and bias as the operations take them, from any that broadcast over x.

An operation takes both in one shape, which kernels can read (`cupynorm._groups`). Its backward pass
returns dbias in the weight's shape; without a weight, in that of the normalized axes.
"""

from __future__ import annotations

from typing import Any

import torch

from cupynorm._groups import common_shape

__all__ = ["alike"]

_Shape = tuple[int, ...]


def alike(x: Any, k: int, weight: Any, bias: Any, compute: torch.dtype) -> tuple[Any, Any]:
    """Return weight and bias as an operation takes them, for an x whose last k axes are normalized.

    torch differentiates what changes them. Copies are not narrower than the compute dtype, so that
    their gradients are summed before they are rounded.
    """
    ndim, of_x = x.ndim, _pattern(x.shape, x.ndim)
    given = [vector for vector in (weight, bias) if vector is not None]
    patterns = [_pattern(vector.shape, ndim) for vector in given]
    common = common_shape(of_x, k, patterns)
    of_row = (1,) * (ndim - k) + of_x[ndim - k :]
    if weight is None and common == of_row:
        return None, _broadcast(x, bias, common, k, compute)
    if any(pattern != common for pattern in patterns) or len({v.ndim for v in given}) > 1:
        weight, bias = (_broadcast(x, v, common, ndim, compute) for v in (weight, bias))
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    return weight, bias


def _pattern(shape: Any, ndim: int) -> _Shape:
    """Return a shape of so many axes with a 2 for every size that is not 1.

    Sizes may be unknown while a program is traced. They count as others than 1.
    """
    return (1,) * (ndim - len(shape)) + tuple(1 if _is_one(n) else 2 for n in shape)


def _is_one(size: Any) -> bool:
    if not (torch.compiler.is_compiling() or isinstance(size, torch.SymInt)):
        return bool(size == 1)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size == 1)


def _broadcast(x: Any, vector: Any, pattern: _Shape, ndim: int, compute: torch.dtype) -> Any:
    """Return a vector with the last axes of a pattern, which has x's sizes for 2."""
    if vector is None:
        return None
    whole = vector.reshape((1,) * (x.ndim - vector.ndim) + tuple(vector.shape))
    if _pattern(whole.shape, x.ndim) != pattern:
        wide = torch.promote_types(vector.dtype, compute)
        sizes = [1 if n == 1 else size for n, size in zip(pattern, x.shape, strict=True)]
        whole = _repeated(whole.to(wide), sizes)
    return whole.reshape(whole.shape[x.ndim - ndim :])


# ---- copies in a compiled program ----------------------------------------------------------------


def _repeated(vector: Any, sizes: list[Any]) -> Any:
    """Return a vector that is repeated to some sizes.

    The compiler would sum its gradients in an order of its own. These operations do as autograd.
    """
    if torch.compiler.is_compiling() and type(vector) in (torch.Tensor, torch.nn.Parameter):
        return _repeat(vector, sizes)
    return vector.expand(sizes)


def _copied(vector: torch.Tensor, sizes: Any) -> torch.Tensor:
    return vector.expand(sizes).clone(memory_format=torch.contiguous_format)


def _summed(gradients: torch.Tensor, sizes: Any) -> torch.Tensor:
    return gradients.sum_to_size(sizes).clone(memory_format=torch.contiguous_format)


def _of_new(tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
    return tensor.new_empty(sizes)


def _keep_sizes(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.sizes = inputs[0].shape


def _of_batch(operation: Any) -> Any:
    def rule(info: Any, in_dims: Any, tensor: Any, sizes: Any) -> tuple[Any, int]:
        return operation(tensor.movedim(in_dims[0], 0), (info.batch_size, *sizes)), 0

    return rule


_SCHEMA = "(Tensor tensor, SymInt[] sizes) -> Tensor"
_repeat = torch.library.custom_op("cupynorm::repeat", _copied, mutates_args=(), schema=_SCHEMA)
_sum = torch.library.custom_op("cupynorm::sum_repeats", _summed, mutates_args=(), schema=_SCHEMA)
for _operation, _adjoint in ((_repeat, _sum), (_sum, _repeat)):
    _operation.register_fake(_of_new)
    _operation.register_vmap(_of_batch(_operation))
    _operation.register_autograd(
        lambda ctx, gradient, adjoint=_adjoint: (adjoint(gradient, ctx.sizes), None),
        setup_context=_keep_sizes,
    )
