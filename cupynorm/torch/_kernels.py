"""Forward and backward passes on plain tensors, outside autograd: on a GPU by the kernels, into
memory of torch's allocator and on torch's current stream; on the CPU by `cupynorm.reference`.

What follows from shapes, strides, dtypes, devices and options alone is checked and worked out once,
and remembered: a call then costs its allocations, the addresses and the launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cupynorm import _checks, reference
from cupynorm._arrays import BFLOAT16, DTYPES, row_stride
from cupynorm._environment import import_cupy
from cupynorm._layout import pack_length
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Norm, bitmask_bytes
from cupynorm._prepared import remember

__all__ = [
    "NUMPY_DTYPES",
    "Options",
    "Relu",
    "backward",
    "check_dense",
    "check_tensor",
    "compute_type",
    "forward",
]

NUMPY_DTYPES = {getattr(torch, name): dtype for dtype, name in DTYPES.items()}
NAMES = {getattr(torch, name): name for name in ITEMSIZE}

Relu = tuple[float, float] | None
Shape = tuple[int, ...]
# k, norm, eps, zero_centered, relu and out_dtype. As one argument they are sooner handed on.
Options = tuple[int, Norm, float, bool, Relu, torch.dtype | None]


def compute_type(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that rows of x are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- the device, as it is reached ----------------------------------------------------------------


def _has_kernels(x: torch.Tensor) -> bool:
    return bool(x.is_cuda)


def _load(make: str, device: Any, spec: ForwardSpec | BackwardSpec, *sizes: int) -> Any:
    """Return a plan for the current device; compile and load its kernels at need."""
    cupy = import_cupy("x is on a GPU")
    from cupynorm import _plans

    # On torch's stream, so that nothing is loaded while that is captured into a graph.
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        return getattr(_plans, make)(spec, *sizes, device.index)


# Without the objects that torch.cuda makes of them; a build without CUDA has neither.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# ---- tensors as the kernels take them ------------------------------------------------------------


def check_dense(name: str, tensor: Any) -> None:
    """Check what must come first, as other tensors may have no shape that can be asked for."""
    if type(tensor).__name__ == "ExpandedWeight":  # of which torch refuses all that is asked here
        raise NotImplementedError(
            f"{name} must not be an ExpandedWeight, as of call_for_per_sample_grads: use "
            "torch.func.vmap and torch.func.grad for the gradients of each example"
        )
    if tensor is not None and (tensor.is_nested or tensor.layout is not torch.strided):
        nested = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {nested}")


def check_tensor(name: str, tensor: Any, x: Any) -> None:
    """Check what needs no shape, which may be symbolic."""
    check_dense(name, tensor)
    if tensor.dtype not in NUMPY_DTYPES:
        raise TypeError(
            f"{name}.dtype must be float64, float32, float16 or bfloat16, got {tensor.dtype}"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device, {x.device}; got {tensor.device}")


def _check_device(x: Any) -> None:
    if not (x.is_cuda or x.is_cpu):
        raise NotImplementedError(f"x must be on the CPU or a CUDA GPU, got {x.device}")


def _outline(name: str, tensor: Any, x: Any) -> Any:
    """Return a NumPy array of a tensor's shape and dtype, for the checks: it holds one element."""
    if tensor is None:
        return None
    check_tensor(name, tensor, x)
    return np.broadcast_to(np.zeros((), NUMPY_DTYPES[tensor.dtype]), tensor.shape)


def _stride(tensor: Any, k: int) -> int | None:
    """Return the distance in elements between rows, or None where they must be copied."""
    return row_stride(tensor.shape, tensor.stride(), 1, k)


def _without_memory(name: str, tensor: Any) -> int:
    """Return 0, the address of what has no elements; refuse what keeps its values elsewhere."""
    if tensor.numel():
        raise ValueError(
            f"{name} must have memory, got {tensor.numel()} elements at address 0: its storage was "
            "freed, as FSDP frees that of parameters between calls"
        )
    return 0


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def _contiguous_strides(shape: Shape) -> Shape:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def _divisors(x: Any, n: int, *strides: int) -> int:
    """Return a number whose lowest set bit divides the pack, the row and the row strides.

    With the addresses of inputs, it tells how many elements one access moves: the largest power of
    two that divides all. Outputs need not be asked: torch allocates at multiples of more.
    """
    divisors = n | pack_length(NAMES[x.dtype])
    if x.numel() > n:
        for stride in strides:
            divisors |= stride
    return divisors


# ---- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass without its addresses."""

    spec: ForwardSpec
    m: int
    n: int
    kept: tuple[int, ...]
    kept_strides: tuple[int, ...]  # contiguous
    y: torch.dtype
    y_is_as_x: bool  # in dtype and as contiguous
    statistics: torch.dtype
    numbers: tuple[float, ...]  # eps and the bounds of relu
    has_kernels: bool
    index: int | None  # of the device
    copies: bool  # where a row stride cannot tell where x lies, or weight or bias has one
    x_stride: int
    itemsize: int
    weight_itemsize: int
    bias_itemsize: int
    divisors: int
    launches: dict[int, tuple[Any, int]]  # and bytes of scratch, by the elements of an access


_forwards: dict[Any, _Forward] = {}


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: Options,
    training: bool,
) -> tuple[Any, Any, Any, Any]:
    """Return y and, for training, mean, rstd and bitmask, each None where it does not apply.

    weight and bias have the shape of x's last k axes.
    """
    device = x.device
    try:
        # What is contiguous needs no strides: they are the same but for axes of one element.
        key = (
            (x.shape, x.is_contiguous() or x.stride(), x.dtype, device),
            weight
            if weight is None
            else (weight.shape, weight.is_contiguous(), weight.dtype, weight.device),
            bias if bias is None else (bias.shape, bias.is_contiguous(), bias.dtype, bias.device),
            options,
            training,
        )
        call = _forwards.get(key)
    except (TypeError, RuntimeError):  # what cannot be remembered, or is sparse, is not taken
        _resolve_forward(x, weight, bias, *options, training)
        raise
    if call is None:
        call = remember(_forwards, key, _resolve_forward(x, weight, bias, *options, training))
    if not call.has_kernels:
        return _forward_on_cpu(call, options[0], x, weight, bias)
    index = call.index
    if _current_device() != index:
        with torch.cuda.device(device):
            return forward(x, weight, bias, options, training)

    if call.y_is_as_x:
        y = torch.empty_like(x)
    else:
        y = torch.empty_like(x, dtype=call.y, memory_format=torch.contiguous_format)
    mean = rstd = bitmask = None
    if training:
        # torch.empty takes twice as long over a tuple.
        rstd = torch.empty_strided(
            call.kept, call.kept_strides, dtype=call.statistics, device=device
        )
        if call.spec.norm == "layer_norm":
            mean = torch.empty_like(rstd)
        if call.spec.relu:
            shape = (*call.kept, bitmask_bytes(call.n))
            bitmask = torch.empty(shape, dtype=torch.uint8, device=device)
    if call.copies:
        x, weight, bias = map(_contiguous, (x, weight, bias))
    x_address = x.data_ptr() or _without_memory("x", x)
    divisors = call.divisors | x_address // call.itemsize
    weight_address = bias_address = 0
    if weight is not None:
        weight_address = weight.data_ptr() or _without_memory("weight", weight)
        divisors |= weight_address // call.weight_itemsize
    if bias is not None:
        bias_address = bias.data_ptr() or _without_memory("bias", bias)
        divisors |= bias_address // call.bias_itemsize
    vector = divisors & -divisors
    launch = call.launches.get(vector)
    if launch is None:
        plan = _load("forward_plan", device, call.spec, call.m, call.n, vector)
        prepared = plan.prepared(call.m, *call.numbers)
        launch = call.launches[vector] = prepared, plan.scratch_bytes(call.m)
    launch_kernel, scratch_bytes = launch
    operands: tuple[int, ...] = (
        x_address,
        call.x_stride,
        weight_address,
        bias_address,
        y.data_ptr(),
        call.n,
        0 if mean is None else mean.data_ptr(),
        0 if rstd is None else rstd.data_ptr(),
        0 if bitmask is None else bitmask.data_ptr(),
    )
    if scratch_bytes:
        # Freed on return, and handed out again only to what comes later on this stream.
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        operands += (scratch.data_ptr(),)
    launch_kernel(_current_stream(index), operands)
    return y, mean, rstd, bitmask


def _resolve_forward(
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
) -> _Forward:
    _check_device(x)
    if not isinstance(out_dtype, torch.dtype | None):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {out_dtype!r}")
    axis = None if k == 1 else tuple(range(-k, 0))
    spec, told = _checks.check_forward(
        _outline("x", x, x),
        _outline("weight", weight, x),
        _outline("bias", bias, x),
        None,
        _checks.Asked(norm, training, axis, zero_centered, eps, relu, out_dtype),
    )
    n = math.prod(x.shape[x.ndim - k :])
    x_stride = _stride(x, k)
    copies = x_stride is None or not all(t is None or t.is_contiguous() for t in (weight, bias))
    x_stride = n if copies or x_stride is None else x_stride
    m, kept = x.numel() // n, tuple(x.shape[: x.ndim - k])
    y_dtype = getattr(torch, spec.y)
    return _Forward(
        spec=spec,
        m=m,
        n=n,
        kept=kept,
        kept_strides=_contiguous_strides(kept),
        y=y_dtype,
        y_is_as_x=y_dtype == x.dtype and x.is_contiguous() and m > 0,
        statistics=compute_type(x),
        numbers=(told.eps, *((0.0, 0.0) if told.relu is None else told.relu)),
        has_kernels=_has_kernels(x),
        index=x.device.index,
        copies=copies,
        x_stride=x_stride,
        itemsize=x.itemsize,
        weight_itemsize=0 if weight is None else weight.itemsize,
        bias_itemsize=0 if bias is None else bias.itemsize,
        divisors=_divisors(x, n, x_stride),
        launches={},
    )


# ---- backward ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Backward:
    """A backward pass without its addresses."""

    spec: BackwardSpec
    m: int
    n: int
    has_kernels: bool
    copies_dy: bool
    copies_x: bool
    dy_stride: int
    x_stride: int
    dx_is_as_x: bool  # as contiguous
    divisors: int
    launches: dict[int, tuple[Any, int]]  # and elements of scratch, by the elements of an access


_backwards: dict[Any, _Backward] = {}


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    bitmask: torch.Tensor | None,
    k: int,
    norm: Norm,
    zero_centered: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Any, Any, Any]:
    """Return dx, dweight and dbias, each None where it does not apply.

    mean, rstd and bitmask are as `forward` returned them; dbias is wanted where its dtype is given.
    """
    options = (k, norm, zero_centered, bias_dtype, bitmask is None)
    try:
        key = (
            (dy.shape, dy.is_contiguous() or dy.stride(), dy.dtype, dy.device),
            (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device),
            weight if weight is None else (weight.shape, weight.dtype, weight.device),
            options,
        )
        call = _backwards.get(key)
    except RuntimeError:  # as in forward
        _resolve_backward(dy, x, weight, *options)
        raise
    if call is None:
        call = remember(_backwards, key, _resolve_backward(dy, x, weight, *options))
    if not call.has_kernels:
        return _backward_on_cpu(call.spec, k, dy, x, weight, mean, rstd, bitmask)
    device = x.device
    if _current_device() != device.index:
        with torch.cuda.device(device):
            return backward(dy, x, weight, mean, rstd, bitmask, k, norm, zero_centered, bias_dtype)

    if call.dx_is_as_x:
        dx = torch.empty_like(x)
    else:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = dbias = None
    if weight is not None:
        if not weight.is_contiguous():
            weight = weight.contiguous()
        dweight = torch.empty_like(weight)
    if bias_dtype is not None:
        if dweight is not None and bias_dtype == dweight.dtype:
            dbias = torch.empty_like(dweight)
        else:
            dbias = torch.empty(x.shape[x.ndim - k :], dtype=bias_dtype, device=device)
    if call.copies_dy:
        dy = dy.contiguous()
    if call.copies_x:
        x = x.contiguous()
    # Contiguous as `forward` and most users made them; what hooks bring back need not be.
    if not rstd.is_contiguous() or not (mean is None or mean.is_contiguous()):
        mean, rstd = _contiguous(mean), _contiguous(rstd)
    if not (bitmask is None or bitmask.is_contiguous()):
        bitmask = bitmask.contiguous()
    dy_address = dy.data_ptr() or _without_memory("dy", dy)
    x_address = x.data_ptr() or _without_memory("x", x)
    divisors = call.divisors | dy_address // dy.itemsize | x_address // x.itemsize
    weight_address = 0
    if weight is not None:
        weight_address = weight.data_ptr() or _without_memory("weight", weight)
        divisors |= weight_address // weight.itemsize
    vector = divisors & -divisors
    launch = call.launches.get(vector)
    if launch is None:
        plan = _load("backward_plan", device, call.spec, call.m, call.n, vector)
        elements = -(-plan.scratch_bytes(call.m) // x.itemsize)
        launch = call.launches[vector] = plan.prepared(call.m), elements
    launch_kernels, scratch_elements = launch
    # Freed on return, and handed out again only to what comes later on this stream.
    scratch = x.new_empty(scratch_elements)  # of another dtype it takes longer
    operands = (
        dy_address,
        call.dy_stride,
        x_address,
        call.x_stride,
        weight_address,
        0 if mean is None else mean.data_ptr(),
        rstd.data_ptr(),
        0 if bitmask is None else bitmask.data_ptr(),
        dx.data_ptr(),
        call.n,
        0 if dweight is None else dweight.data_ptr(),
        0 if dbias is None else dbias.data_ptr(),
        scratch.data_ptr(),
    )
    launch_kernels(_current_stream(device.index), operands)
    return dx, dweight, dbias


def _resolve_backward(
    dy: Any,
    x: Any,
    weight: Any,
    k: int,
    norm: Norm,
    zero_centered: bool,
    bias_dtype: torch.dtype | None,
    no_bitmask: bool,
) -> _Backward:
    _check_device(x)
    for name, tensor in (("x", x), ("dy", dy), ("weight", weight)):
        if tensor is not None:
            check_tensor(name, tensor, x)
    if dy.shape != x.shape:
        raise ValueError(f"dy must have shape {tuple(x.shape)}, got {tuple(dy.shape)}")
    n = math.prod(x.shape[x.ndim - k :])
    strides = _stride(dy, k), _stride(x, k)
    dy_stride, x_stride = (n if stride is None else stride for stride in strides)
    return _Backward(
        spec=BackwardSpec(
            norm=norm,
            x=NAMES[x.dtype],
            dy=NAMES[dy.dtype],
            weight=None if weight is None else NAMES[weight.dtype],
            dbias=None if bias_dtype is None else NAMES[bias_dtype],
            zero_centered=zero_centered,
            bitmask=not no_bitmask,
        ),
        m=x.numel() // n,
        n=n,
        has_kernels=_has_kernels(x),
        copies_dy=strides[0] is None,
        copies_x=strides[1] is None,
        dy_stride=dy_stride,
        x_stride=x_stride,
        dx_is_as_x=x.is_contiguous() and x.numel() > 0,
        divisors=_divisors(x, n, dy_stride, x_stride),
        launches={},
    )


# ---- on the CPU ----------------------------------------------------------------------------------


def _to_numpy(name: str, tensor: Any) -> Any:
    """Return a copy: memory that NumPy has seen cannot be resized, as FSDP resizes parameters."""
    if tensor is None:
        return None
    if not tensor.data_ptr():  # which fails, too, where a launch would
        _without_memory(name, tensor)
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if tensor.dtype == torch.bfloat16:  # which NumPy's side of torch does not know
        return copy.view(torch.int16).numpy().view(BFLOAT16)
    return copy.numpy()


def _from_numpy(array: Any) -> Any:
    if array is None:
        return None
    if array.dtype == BFLOAT16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.new_empty(array.shape)  # whose strides are no zeros


def _forward_on_cpu(
    call: _Forward, k: int, x: Any, weight: Any, bias: Any
) -> tuple[Any, Any, Any, Any]:
    spec = call.spec
    eps, *bounds = call.numbers
    result = getattr(reference, f"{spec.norm}_forward")(
        *map(_to_numpy, ("x", "weight", "bias"), (x, weight, bias)),
        eps=eps,
        axis=tuple(range(-k, 0)),
        zero_centered=spec.zero_centered,
        relu=tuple(bounds) if spec.relu else None,
        out_dtype=NUMPY_DTYPES[call.y],
    )
    given = tuple(map(_from_numpy, result))
    return given if spec.store_statistics else (given[0], None, None, None)


def _backward_on_cpu(
    spec: BackwardSpec,
    k: int,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bitmask: Any,
) -> tuple[Any, Any, Any]:
    statistics = {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
    bias: Any = False
    if spec.dbias is not None:
        bias = np.empty(tuple(x.shape[x.ndim - k :]), NUMPY_DTYPES[getattr(torch, spec.dbias)])
    result = getattr(reference, f"{spec.norm}_backward")(
        *map(_to_numpy, ("dy", "x", "weight"), (dy, x, weight)),
        *map(_to_numpy, statistics, statistics.values()),
        bias=bias,
        bitmask=_to_numpy("bitmask", bitmask),
        axis=tuple(range(-k, 0)),
        zero_centered=spec.zero_centered,
    )
    return tuple(map(_from_numpy, result))
