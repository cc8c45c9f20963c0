"""Launches on CuPy arrays: results are allocated on x's device, and kernels launched on CuPy's
current stream there. Nothing synchronizes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from cupynorm._arrays import (
    DTYPES,
    rounded,
    row_stride,
    rows_side_by_side,
    sum_to_shape,
    to_numpy,
    widened,
)
from cupynorm._checks import Asked, AskedBackward
from cupynorm._groups import groups_of, to_repeat
from cupynorm._layout import pack_length, quantized_config
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    KINDS,
    MOVED_BY_PACKS,
    QUANTIZED,
    SUMS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    NormBackward,
    NormForward,
    Options,
    Pass,
    QuantizedSpec,
    Spec,
    compute_dtype,
    shapes_of_results,
    sharing,
)
from cupynorm._plans import (
    BackwardPlan,
    ForwardPlan,
    architecture,
    backward_plan,
    forward_plan,
    quantized_plan,
    strided_plan,
)
from cupynorm._prepared import Dialect, key_function, run_maker
from cupynorm._quantize import new_by_columns, pass_of_kernel

__all__ = [
    "backward_key",
    "calls",
    "contiguous",
    "first_call",
    "first_quantized",
    "forward_key",
    "keep_if_captured",
    "kept_if_captured",
    "on",
    "quantized_key",
]

# A call looks these up by names of this module.
_ndarray = cupy.ndarray
_alloc = cupy.cuda.alloc
_dtype = np.dtype
_get_device = cupy.cuda.runtime.getDevice
_get_current_stream = cupy.cuda.get_current_stream

CUPY = Dialect(
    names=globals(),
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
    stream="_get_current_stream()",
    handle="stream.ptr",
    scratch="scratch = _alloc(scratch_bytes); scratch_address = scratch.ptr; "
    "keep_if_captured(scratch, stream)",
)

# The `run` of each call so far, by all that preparing it depended on. `run` itself checks the rest:
# the addresses, the current device, and the devices of the other arrays than x.
calls: dict[Hashable, Callable[..., Any]] = {}

_are_ints = frozenset((int,)).issuperset
_are_numbers = frozenset((int, float)).issuperset

# What options must be for a call to have a key; any dtype may be asked for in the same ways.
_PLAIN = {
    "norm": "",
    "training": "",
    "axis": "(axis is None or type(axis) is int"
    " or (type(axis) is tuple and _are_ints(map(type, axis))))",
    "zero_centered": "type(zero_centered) is bool",
    "eps": "type(eps) is float",
    "relu": "(relu is None or (type(relu) is tuple and _are_numbers(map(type, relu))))",
    "bias": "(bias is None or type(bias) is bool)",
    "accumulate": "type(accumulate) is bool",
    "quantize": "",
}
_PLAIN_DTYPE = "({0} is None or isinstance({0}, (_dtype, str, type)))"


def _key_of(table: Pass, fields: tuple[str, ...]) -> Callable[..., Hashable]:
    conditions = {name: _PLAIN.get(name, _PLAIN_DTYPE.format(name)) for name in fields}
    return key_function(CUPY, conditions, table.arguments)


forward_key, backward_key = (
    _key_of(table, asked._fields) for table, asked in ((FORWARD, Asked), (BACKWARD, AskedBackward))
)
quantized_key = _key_of(QUANTIZED, (*Asked._fields, "quantize"))

# ---- arrays as the kernels take them -------------------------------------------------------------


def contiguous(array: Any) -> Any:
    """Return a C-contiguous copy."""
    # As integers: CuPy copies them whether or not it can compute with the dtype.
    bits = array.view(f"u{array.itemsize}")
    copy = cupy.array(bits, order="C")
    keep_if_captured(copy, cupy.cuda.get_current_stream())
    return copy.view(array.dtype)


def _taken(name: str, array: Any, k: int, n: int) -> tuple[Any, int | None]:
    """Return an array as kernels take it, copied at need, and how far apart rows are."""
    has_rows = KINDS.get(name) is Kind.ROWS
    if array is None or array.flags.c_contiguous:
        return array, n if has_rows else None
    stride = row_stride(array.shape, array.strides, array.itemsize, k) if has_rows else None
    return (contiguous(array), n if has_rows else None) if stride is None else (array, stride)


# ---- devices and scratch -------------------------------------------------------------------------


def on(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make a device current, unless it is."""
    if device == _get_device():
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)  # type: ignore[no-any-return]


# The scratch of launches that a CUDA graph captured. A replay uses it again, and nothing tells when
# the graph is gone.
_kept_by_graphs: list[Any] = []


def keep_if_captured(memory: Any, stream: Any) -> None:
    """Keep memory for ever if a CUDA graph captures what reads or writes it."""
    if stream.is_capturing():
        _kept_by_graphs.append(memory)


def kept_if_captured() -> contextlib.AbstractContextManager[Any]:
    """Do as `keep_if_captured` with all memory that CuPy's functions allocate."""
    if not cupy.cuda.get_current_stream().is_capturing():
        return contextlib.nullcontext()
    allocate = cupy.cuda.get_allocator()

    def kept(nbytes: int) -> Any:
        _kept_by_graphs.append(allocate(nbytes))
        return _kept_by_graphs[-1]

    return cupy.cuda.using_allocator(kept)  # type: ignore[no-any-return]


# ---- calls ---------------------------------------------------------------------------------------

_VECTORS = "weight", "bias", "like"  # that are given
MOST_ROWS_SIDE_BY_SIDE = (1 << 31) - 64  # the kernels count them, and a tile more, by ints


def first_call(
    spec: Spec, options: Options, arguments: dict[str, Any]
) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """Launch a pass on the arguments of its table, by name.

    Returns
    -------
    dict of arrays
        What the table writes by name, None where there is no such array.
    callable or None
        The `run` that serves arrays like these again; None if some were copied or are poorly
        aligned, or if the kernel only stands in for another one.
    """
    x, k, table = arguments["x"], options.k, spec.table
    device = x.device.id
    m, n = math.prod(x.shape[: x.ndim - k]), math.prod(x.shape[x.ndim - k :])
    known: dict[str, Any] = {"device": device}
    shapes = {name: getattr(arguments.get(name), "shape", None) for name in _VECTORS}
    common, repeated = to_repeat(x.shape, k, **shapes)
    if repeated:
        return _on_repeated(spec, options, arguments, common, repeated), None
    if options.order is not None:
        with on(device):
            results = _side_by_side(spec, options, arguments)
            if results is None:
                results = _copied_into_outputs(spec, options, arguments)
        if results is not None:
            return results, None
    for name, shape in shapes_of_results(spec, k, arguments).items():
        known[f"{name}_shape"], known[f"{name}_dtype"] = shape, to_numpy(spec.dtypes[name])
    made: tuple[str, ...] = ()
    if isinstance(spec, QuantizedSpec) and spec.column_major:
        made = ("scale",)
        known["scale_new"] = functools.partial(new_by_columns, cupy, known["scale_shape"])

    def run_of(
        given: dict[str, Any], result: str, apart: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        names = tuple(name for name, array in given.items() if array is not None)
        make = run_maker(
            *(CUPY, table, tuple(given), names, spec.writes, result),
            has_scratch=known["scratch_bytes"] > 0,
            made=made,
            apart=apart,
        )
        return make(known)

    with on(device):
        taken: dict[str, Any] = {}
        new_rows = {name: None for name in spec.writes if KINDS[name] is Kind.ROWS}
        for name, array in (new_rows | arguments).items():
            if array is None and name in spec.writes and name not in made:
                array = _ndarray(known[f"{name}_shape"], known[f"{name}_dtype"])
            taken[name], known[f"{name}_stride"] = _taken(name, array, k, n)
        there = {name: array for name, array in taken.items() if array is not None}
        vector, is_aligned = _vector(spec.x, n, there, known)
        for name, array in there.items():
            moved = vector if _is_moved_by_packs(name) else 1
            known[f"{name}_mask"] = moved * array.itemsize - 1
        plan: ForwardPlan | BackwardPlan | None
        if isinstance(spec, ForwardSpec):
            if isinstance(spec, QuantizedSpec):
                plan = quantized_plan(spec, m, n, vector, device, soon=True)
            else:
                plan = forward_plan(spec, m, n, vector, device, soon=True)
            if plan is None:
                return {}, None  # see `first_quantized`
            known["launch"] = plan.prepared(m, *options.numbers, options.groups)
            known["scratch_bytes"] = plan.scratch_bytes(m)
        else:
            dx_given = arguments["dx"] is not None
            plan = backward_plan(spec, m, n, vector, device, dx_given=dx_given, soon=True)
            known["launch"] = plan.prepared(m, options.groups)
            known["scratch_bytes"] = plan.scratch_bytes(m, options.groups)
        written = run_of(taken, "({fields})")(tuple(taken.values()))
    given = {name: array for name, array in arguments.items() if array is not None}
    copied = any(taken[name] is not array for name, array in given.items())
    # Later calls allocate their results. This one had them before, to know how they are aligned.
    run = None
    if is_aligned and not copied and not plan.stands_in:
        # As `_checks` has it. A scale that is given is only read.
        outputs = tuple(name for name in spec.writes if name in given and name != "scale")
        run = run_of(arguments, _returned(spec, options), apart=outputs)
    return dict(zip(table.writes, written, strict=True)), run


def first_quantized(
    spec: ForwardSpec,
    options: Options,
    arguments: dict[str, Any],
    told: tuple[Any, ...],
    scale: Any,
) -> tuple[dict[str, Any], Callable[..., Any] | None]:
    """Do as `first_call`, with a forward pass whose y is quantized; no arrays if no kernel does.

    `told` is `Quantize.told`, and `scale` is a given one, or None.
    """
    x = arguments["x"]
    n = math.prod(x.shape[x.ndim - options.k :])
    vectors = (arguments[name] for name in ("weight", "bias"))
    if options.order is not None or any(v is not None and v.size != n for v in vectors):
        return {}, None
    quantized, options = pass_of_kernel(spec, options, told, n)
    best = n | pack_length(spec.x)
    if quantized_config(quantized, n, best & -best, architecture(x.device.id)) is None:
        return {}, None
    placed = {name: (arguments | {"scale": scale})[name] for name in QUANTIZED.arguments}
    return first_call(quantized, options, placed)


def _copied_into_outputs(
    spec: Spec, options: Options, arguments: dict[str, Any]
) -> dict[str, Any] | None:
    """Launch a pass, and copy results into outputs of a layout that no kernel writes.

    None if there are no such outputs.
    """
    placed = {
        name: array
        for name in spec.writes
        if (array := arguments.get(name)) is not None
        and row_stride(array.shape, array.strides, array.itemsize, options.k) is None
    }
    if not placed:
        return None
    written, _ = first_call(spec, options, arguments | dict.fromkeys(placed))
    for name, array in placed.items():
        bits = f"u{array.itemsize}"  # as in `contiguous`
        array.view(bits)[...] = written[name].view(bits)
        keep_if_captured(written[name], _get_current_stream())
    return written | placed


def _on_repeated(
    spec: Spec,
    options: Options,
    arguments: dict[str, Any],
    common: tuple[int, ...],
    names: tuple[str, ...],
) -> dict[str, Any]:
    """Launch a pass on vectors of which those of these names are repeated to a common shape.

    Copies are not narrower than the compute dtype, so that their gradients are summed before they
    are rounded.
    """
    x, of_bias = arguments["x"], "bias" if isinstance(spec, ForwardSpec) else "like"
    placed = {name: arguments[name] for name in SUMS if arguments.get(name) is not None}
    given = arguments | dict.fromkeys(placed)
    with on(x.device.id), kept_if_captured():
        for name in names:
            of = given[name].dtype
            wide = "float64" if of == np.float64 else compute_dtype(spec.x)
            if name == "like":
                given[name] = _ndarray(common, wide)  # only its shape and dtype count
            else:
                given[name] = contiguous(cupy.broadcast_to(widened(given[name], wide), common))
        weight, bias = given["weight"], given[of_bias]
        if bias is None and isinstance(spec, BackwardSpec) and spec.dbias is not None:
            bias = weight  # dbias is like it
        shapes = (None if vector is None else vector.shape for vector in (weight, bias))
        groups = groups_of(x.shape, options.k, *shapes)
        dtypes = {"weight": weight, "bias" if of_bias == "bias" else "dbias": bias}
        wider = {name: DTYPES[v.dtype] for name, v in dtypes.items() if v is not None}
        told = replace(options, groups=groups)
        if placed and isinstance(spec, BackwardSpec):  # sums are added to these when complete
            told = replace(told, sums_given=False, accumulate=False)
            wider |= dict.fromkeys(placed, compute_dtype(spec.x))
            spec = replace(spec, sums_given=False, accumulate=False)
        of_copies: Any = replace(spec, **wider, **sharing(groups))
        written, _ = first_call(of_copies, told, given)
        if isinstance(spec, BackwardSpec):
            like = arguments["weight"] if arguments["like"] is None else arguments["like"]
            for name, vector in (("dweight", arguments["weight"]), ("dbias", like)):
                total, place = written[name], placed.get(name)
                if total is None:
                    continue
                is_repeated = vector is not None and total.shape != vector.shape
                if is_repeated:
                    total = sum_to_shape(total, vector.shape)
                if place is not None and not (options.accumulate and x.size == 0):
                    total = total.astype(compute_dtype(spec.x))
                    if options.accumulate:
                        wide = "float64" if place.dtype == np.float64 else str(total.dtype)
                        total = widened(place, wide) + total.astype(wide)
                    bits = f"u{place.itemsize}"  # as in `contiguous`
                    found = rounded(cupy, total, DTYPES[place.dtype])
                    place.view(bits)[...] = found.reshape(place.shape).view(bits)
                if place is not None:
                    written[name] = place
                elif is_repeated:
                    written[name] = rounded(cupy, total, spec.dtypes[name] or "")
    return written


def _side_by_side(spec: Spec, options: Options, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Launch a pass on rows that lie side by side; None if they do not, or have no kernel."""
    order, k, x = options.order or (), options.k, arguments["x"]
    n = math.prod(x.shape[x.ndim - k :])
    m = x.size // n
    given = {name: array for name, array in arguments.items() if array is not None}
    rows = [array for name, array in given.items() if KINDS.get(name) is Kind.ROWS]
    found = {rows_side_by_side(a.shape, a.strides, a.itemsize, k) for a in rows}
    inner = found.pop()
    if found or inner is None or not 0 < m < MOST_ROWS_SIDE_BY_SIDE:
        return None
    in_memory = sorted(range(len(order)), key=order.__getitem__)
    written: dict[str, Any] = {}
    for name, shape in shapes_of_results(spec, k, arguments).items():
        dtype = to_numpy(spec.dtypes[name])
        if name in given:
            written[name] = given[name]
        elif KINDS[name] is Kind.ROWS:
            written[name] = _ndarray(tuple(shape[i] for i in in_memory), dtype).transpose(order)
            rows.append(written[name])
        else:
            written[name] = _ndarray(shape, dtype)
    divisors = inner | pack_length(spec.x)
    for array in rows:
        divisors |= array.data.ptr // array.itemsize
    plan = strided_plan(spec, n, divisors & -divisors, x.device.id)
    if plan is None:
        return None
    read = {
        name: array if KINDS[name] is Kind.ROWS or array.flags.c_contiguous else contiguous(array)
        for name, array in given.items()
        if name in spec.table.reads
    }
    addresses = {name: array.data.ptr for name, array in (read | written).items()}
    operands = [addresses.get(name, 0) for name in spec.table.operands]  # strides do not count
    stream = _get_current_stream()
    if spec.table.takes_scratch:
        scratch = _alloc(plan.scratch_bytes(m, inner))
        keep_if_captured(scratch, stream)
        operands.append(scratch.ptr)
    numbers = options.numbers if isinstance(spec, ForwardSpec) else ()
    plan.prepared(m, inner, *numbers)(stream.ptr, tuple(operands))
    return dict.fromkeys(spec.table.writes) | written


def _returned(spec: Spec, options: Options) -> str:
    """Return the expression of what a call returns: see `run_maker`."""
    if isinstance(spec, BackwardSpec):
        is_dx = options.has_residual and spec.dresidual is None
        fields = "{dx}, {dweight}, {dbias}, {dx}" if is_dx else "{fields}"
        return f"{NormBackward.__name__}({fields})"
    if options.training:
        return f"{NormForward.__name__}({{fields}})"
    if isinstance(spec, QuantizedSpec):
        names = "y", "scale", *(name for name in ("amax", "residual_out") if name in spec.writes)
        return f"({', '.join(f'{{{name}}}' for name in names)})"
    first, *others = (f"{{{name}}}" for name in spec.returned)
    return f"({', '.join((first, *others))})" if others else first


def _is_moved_by_packs(name: str) -> bool:
    return KINDS.get(name) in MOVED_BY_PACKS and name not in SUMS


def _vector(x: str, n: int, arrays: dict[str, Any], known: dict[str, Any]) -> tuple[int, bool]:
    """Return how many elements one access moves, and whether no address makes them fewer.

    That is the largest power of two that divides a row, the strides and the addresses.
    """
    layout, addresses = n | pack_length(x), 0
    for name, array in arrays.items():
        if _is_moved_by_packs(name):
            layout |= known[f"{name}_stride"] or 0
            addresses |= array.data.ptr // array.itemsize
    vector = (layout | addresses) & -(layout | addresses)
    return vector, vector == layout & -layout
