"""Launches on CuPy arrays: results are allocated on x's device, and kernels launched on CuPy's
current stream there. Nothing synchronizes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable
from typing import Any

import cupy
import numpy as np

from cupynorm._arrays import row_stride, to_numpy
from cupynorm._checks import Asked
from cupynorm._layout import pack_length
from cupynorm._operation import (
    KINDS,
    MOVED_BY_PACKS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    NormBackward,
    NormForward,
    Options,
    Spec,
    shape_of,
)
from cupynorm._plans import backward_plan, forward_plan
from cupynorm._prepared import Dialect, key_function, run_maker

__all__ = ["backward", "backward_key", "calls", "forward", "forward_key"]

# A call looks these up by names of this module.
_ndarray = cupy.ndarray
_alloc = cupy.cuda.alloc
_dtype = np.dtype
_get_device = cupy.cuda.runtime.getDevice
_get_current_stream = cupy.cuda.get_current_stream

CUPY = Dialect(
    names=globals(),
    is_packed=False,
    accepts=dict.fromkeys((*Kind, None), "type({0}) is _ndarray"),
    signature=dict.fromkeys((*Kind, None), "({0}.dtype, {0}.shape, {0}.strides)"),
    device="x.data.device_id",
    before="if _get_device() != device: return None",
    copy="",  # what has to be copied is not remembered
    look="{0}_data = {0}.data",
    elsewhere="{0}_data.device_id != device",
    address="{0}_data.ptr",
    checked=frozenset((*Kind, None)) - {Kind.BITS},
    checked_new=frozenset({Kind.ROWS}),  # an allocator may align less
    misaligned="return None",
    allocate="_ndarray({0}_shape, {0}_dtype)",
    allocate_like="",
    stream="_get_current_stream()",
    handle="stream.ptr",
    scratch="scratch = _alloc(scratch_bytes); scratch_address = scratch.ptr; "
    "_keep_if_captured(scratch, stream)",
)

# The `run` of each call so far, by all that preparing it depended on. `run` itself checks the rest:
# the addresses, the current device, and the devices of the arrays beside x.
calls: dict[Hashable, Callable[..., Any]] = {}

_are_ints = frozenset((int,)).issuperset
_are_numbers = frozenset((int, float)).issuperset

# What options must be for a call to have a key.
_PLAIN = {
    "norm": "",
    "training": "",
    "axis": "(axis is None or type(axis) is int"
    " or (type(axis) is tuple and _are_ints(map(type, axis))))",
    "zero_centered": "type(zero_centered) is bool",
    "eps": "type(eps) is float",
    "relu": "(relu is None or (type(relu) is tuple and _are_numbers(map(type, relu))))",
    "out_dtype": "(out_dtype is None or isinstance(out_dtype, (_dtype, str, type)))",
    "bias": "(bias is None or type(bias) is bool)",
}
_PLAIN |= {
    name: _PLAIN["out_dtype"].replace("out_dtype", name)
    for name in ("residual_dtype", "dx_dtype", "dresidual_dtype")
}
_OF_BACKWARD = (
    *("norm", "training", "axis", "zero_centered", "bias"),
    *("dx_dtype", "dresidual_dtype"),
)
forward_key = key_function(
    CUPY,
    {name: _PLAIN[name] for name in Asked._fields},
    ("x", "weight", "bias", "y", "residual", "residual_out"),
)
backward_key = key_function(
    CUPY,
    {name: _PLAIN[name] for name in _OF_BACKWARD},
    ("dy", "x", "rstd", "weight", "mean", "bitmask", "dx", "like", "dresidual_out"),
)

# ---- arrays as the kernels take them -------------------------------------------------------------


def _contiguous(array: Any) -> Any:
    # As integers: CuPy copies them whether or not it can compute with the dtype.
    bits = array.view(f"u{array.itemsize}")
    copy = cupy.array(bits, order="C")
    _keep_if_captured(copy, cupy.cuda.get_current_stream())
    return copy.view(array.dtype)


def _taken(name: str, array: Any, k: int, n: int) -> tuple[Any, int | None]:
    """Return an array as kernels take it, copied at need, and how far apart rows are."""
    has_rows = KINDS.get(name) is Kind.ROWS
    if array is None or array.flags.c_contiguous:
        return array, n if has_rows else None
    stride = row_stride(array.shape, array.strides, array.itemsize, k) if has_rows else None
    return (_contiguous(array), n if has_rows else None) if stride is None else (array, stride)


# ---- devices and scratch -------------------------------------------------------------------------


def _on(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, unless it is."""
    if device == _get_device():
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)  # type: ignore[no-any-return]


# What launches that a CUDA graph captured have used beside their arguments. A replay uses it again,
# and nothing tells when the graph is gone.
_kept_by_graphs: list[Any] = []


def _keep_if_captured(memory: Any, stream: Any) -> None:
    if stream.is_capturing():
        _kept_by_graphs.append(memory)


# ---- calls ---------------------------------------------------------------------------------------


def forward(
    spec: ForwardSpec,
    options: Options,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    residual: Any,
    residual_out: Any,
) -> tuple[Any, Callable[..., Any] | None]:
    """Launch a forward pass.

    Returns
    -------
    array, pair or NormForward
        NormForward if the statistics are stored, else y, or y and residual_out.
    callable or None
        The `run` that serves arrays like these again; None if some were copied or are poorly
        aligned.
    """

    def plan(m: int, n: int, vector: int, device: int) -> Any:
        made = forward_plan(spec, m, n, vector, device)
        return made.prepared(m, *options.numbers), made.scratch_bytes(m)

    arguments = {"x": x, "weight": weight, "bias": bias, "y": out}
    arguments |= {"residual": residual, "residual_out": residual_out}
    result = "({y}, {residual_out})" if spec.residual else "{y}"
    result = f"{NormForward.__name__}({{fields}})" if options.training else result
    return _launch(spec, options.k, plan, arguments, {}, result)


def backward(
    spec: BackwardSpec,
    options: Options,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    bitmask: Any,
    dx: Any,
    like: Any,
    dresidual_out: Any,
    *,
    has_residual: bool,
) -> tuple[NormBackward, Callable[..., Any] | None]:
    """Launch a backward pass; `like`: the bias, if dbias is to have its shape.

    `has_residual`: dresidual is wanted, which is dx where both have one dtype.

    Returns
    -------
    NormBackward
        The gradients.
    callable or None
        The `run` that serves arrays like these again; None if some were copied or are poorly
        aligned.
    """

    def plan(m: int, n: int, vector: int, device: int) -> Any:
        made = backward_plan(spec, m, n, vector, device, dx_given=dx is not None)
        return made.prepared(m), made.scratch_bytes(m)

    arguments = {"dy": dy, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
    arguments |= {"bitmask": bitmask, "dx": dx, "like": like, "dresidual_out": dresidual_out}
    # Leading axes of 1 of a weight or bias are its gradient's, too.
    shapes = {} if weight is None else {"dweight": weight.shape, "dbias": weight.shape}
    if like is not None:
        shapes["dbias"] = like.shape
    is_dx = has_residual and spec.dresidual is None
    fields = "{dx}, {dweight}, {dbias}, {dx}" if is_dx else "{fields}"
    result = f"{NormBackward.__name__}({fields})"
    return _launch(spec, options.k, plan, arguments, shapes, result)


def _launch(
    spec: Spec,
    k: int,
    plan: Callable[..., tuple[Any, int]],
    arguments: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    result: str,
) -> tuple[Any, Callable[..., Any] | None]:
    """Launch a pass on its arguments, by name; return its result, and the `run` of calls like it.

    `plan` returns what launches m rows of n by accesses of some elements, and its bytes of scratch.
    `shapes` are those of results that do not follow from their kinds. `result` is the expression of
    what is returned: see `run_maker`.
    """
    x = arguments["x"]
    device, dtypes = x.device.id, spec.dtypes
    m, n = math.prod(x.shape[: x.ndim - k]), math.prod(x.shape[x.ndim - k :])
    known: dict[str, Any] = {"device": device}
    for name in spec.writes:
        known[f"{name}_shape"] = shapes.get(name) or shape_of(KINDS[name], x.shape, k)
        known[f"{name}_dtype"] = to_numpy(dtypes[name])

    def run_of(given: dict[str, Any]) -> Callable[..., Any]:
        names = tuple(name for name, array in given.items() if array is not None)
        make = run_maker(
            *(CUPY, spec.table, tuple(given), names, spec.writes, result),
            has_scratch=known["scratch_bytes"] > 0,
        )
        return make(known)

    with _on(device):
        taken: dict[str, Any] = {}
        new_rows = {name: None for name in spec.writes if KINDS[name] is Kind.ROWS}
        for name, array in (new_rows | arguments).items():
            if array is None and name in spec.writes:
                array = _ndarray(known[f"{name}_shape"], known[f"{name}_dtype"])
            taken[name], known[f"{name}_stride"] = _taken(name, array, k, n)
        there = {name: array for name, array in taken.items() if array is not None}
        vector, is_aligned = _vector(spec.x, n, there, known)
        for name, array in there.items():
            moved = vector if KINDS.get(name) in MOVED_BY_PACKS else 1
            known[f"{name}_mask"] = moved * array.itemsize - 1
        known["launch"], known["scratch_bytes"] = plan(m, n, vector, device)
        launched = run_of(taken)(*taken.values())
    given = {name: array for name, array in arguments.items() if array is not None}
    copied = any(taken[name] is not array for name, array in given.items())
    # Later calls allocate their results. This one had them before, to know how they are aligned.
    return launched, None if copied or not is_aligned else run_of(arguments)


def _vector(x: str, n: int, arrays: dict[str, Any], known: dict[str, Any]) -> tuple[int, bool]:
    """Return how many elements one access moves, and whether no address makes them fewer.

    That is the largest power of two that divides a row, the strides and the addresses.
    """
    layout, addresses = n | pack_length(x), 0
    for name, array in arrays.items():
        if KINDS.get(name) in MOVED_BY_PACKS:
            layout |= known[f"{name}_stride"] or 0
            addresses |= array.data.ptr // array.itemsize
    vector = (layout | addresses) & -(layout | addresses)
    return vector, vector == layout & -layout
