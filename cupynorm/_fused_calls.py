"""Calls of norms of `cupynorm.fuse` on a GPU: one kernel each way, with the prologue and epilogue.

Nothing here knows arrays: a `Memory` does. What a kernel cannot serve is left to the operations of
a framework, in `_fuse`: axes that are not the last ones, a weight that varies from row to row, and
calls without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cupynorm import _background, _checks, _plans
from cupynorm._arrays import is_number, row_stride
from cupynorm._compile import (
    Instantiation,
    fused_backward_instantiations,
    fused_forward_instantiation,
)
from cupynorm._driver import Kernel, Launch
from cupynorm._fused_source import Input, Spec, backward_op, forward_op
from cupynorm._layout import (
    FusedBackward,
    FusedForward,
    Reduction,
    fused_backward,
    fused_forward,
    pack_length,
    partials_stride,
    reduction_of_gradients,
    without_clusters,
)
from cupynorm._layout.fused import STREAMED_ROWS
from cupynorm._operation import ITEMSIZE
from cupynorm._prepared import remember

if TYPE_CHECKING:
    from cupynorm._fuse import Fused, Given, Options

__all__ = ["Memory", "again", "again_backward", "backward", "forward", "sources"]

MOST_BLOCKS = (1 << 31) - 1
# A thread may spill so many, which takes less time than fewer blocks (notes.md#fused-norms).
MOST_LOCAL_BYTES = 64


class Memory(Protocol):
    """A framework's arrays. Dtypes are given by name, and strides in elements."""

    def dtype(self, array: Any) -> str: ...
    def strides(self, array: Any) -> tuple[int, ...]: ...
    def address(self, array: Any) -> int: ...
    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any: ...
    def scratch(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """Return an empty array for this call, which a CUDA graph keeps."""

    def contiguous(self, array: Any) -> Any: ...
    def cast(self, array: Any, dtype: str) -> Any: ...
    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return a contiguous copy, broadcast to a shape."""

    def summed(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Undo a broadcast, in a fixed order, and cast."""

    def signature(self, array: Any) -> Hashable:
        """Return the dtype, the shape, the strides and the device. None if it is no such array."""

    def device(self, array: Any) -> int: ...
    def on(self, device: int) -> AbstractContextManager[Any]:
        """Make a device current, and CuPy's current stream that of the framework."""

    def stream(self, device: int) -> int: ...


@dataclass(frozen=True)
class _Call:
    """A call as kernels take it: a spec, sizes, and what a launch gets by name.

    `arrays` are those that kernels read, perhaps copies. `masks` are the bits that no address of
    theirs may have. `values` are strides and steps.
    """

    spec: Spec
    m: int
    n: int
    vector: int
    kept: tuple[int, ...]
    arrays: dict[str, Any]
    masks: dict[str, int]
    values: dict[str, float]
    is_typical: bool  # nothing was copied, and no address makes accesses narrower


def _place(shape: Sequence[int], x_shape: tuple[int, ...], k: int) -> str:
    """Return where an input's elements are; "spread" if no kernel reads it in place."""
    full = (1,) * (len(x_shape) - len(shape)) + tuple(shape)
    kept, normalized = full[: len(full) - k], full[len(full) - k :]
    if full == x_shape:
        return "rows"
    if set(kept) <= {1} and normalized == x_shape[len(x_shape) - k :]:
        return "vector"
    if set(normalized) <= {1} and (kept == x_shape[: len(kept)] or set(kept) <= {1}):
        return "number"
    return "spread"


def _arranged(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    outputs: Sequence[str],
    of_outputs: Sequence[Any] = (),
) -> _Call | None:
    """Return a call as kernels take it, None if they do not serve it."""
    x, shape = given.x, tuple(given.x.shape)
    axes = _checks.normalized_axes(len(shape), options.axis)
    k = len(axes)
    kept, of_row = shape[: len(shape) - k], shape[len(shape) - k :]
    m, n = math.prod(kept), math.prod(of_row)
    if axes != tuple(range(len(shape) - k, len(shape))) or not m or not n:
        return None
    arrays: dict[str, Any] = {}
    moved: dict[str, int] = {}  # by packs: the bytes of an element
    values: dict[str, float] = {}
    layout, addresses, has_copies = n | pack_length(memory.dtype(x)), 0, False

    def add(name: str, array: Any, place: str, is_copy: bool = False) -> None:
        nonlocal layout, addresses, has_copies
        itemsize = ITEMSIZE[memory.dtype(array)]
        taken = array
        if place == "rows":
            strides = [itemsize * stride for stride in memory.strides(array)]
            strides = [0] * (len(shape) - len(strides)) + strides
            stride = row_stride(shape, strides, itemsize, k)
            if stride is None:
                taken, stride = memory.contiguous(array), n
            values[f"stride_{name}"] = stride
            layout |= stride
        else:
            taken = memory.contiguous(array)
        if place == "number":
            values[f"step_{name}"] = int(math.prod(array.shape) == m)
        else:
            addresses |= memory.address(taken) // itemsize
            moved[name] = itemsize
        arrays[name] = taken
        has_copies |= is_copy or taken is not array

    add("in_x", x, "rows")
    for name, vector in (("weight", given.weight), ("bias", given.bias)):
        if vector is not None:
            ones = (1,) * (len(shape) - len(vector.shape)) + tuple(vector.shape)
            if set(ones[: len(kept)]) > {1} or ones[len(kept) :] != of_row:
                return None
            add(name, vector, "vector")
    inputs = []
    for name in fused.inputs:
        array = given.inputs[name]
        if is_number(array):
            inputs.append(Input(name, "constant"))
            continue
        dtype: str | None = memory.dtype(array)
        place = _place(array.shape, shape, k)
        is_copy = dtype == "bool" or place == "spread"
        if dtype == "bool":
            array, dtype = memory.cast(array, "float16"), None
        if place == "spread":
            array = memory.expanded(array, shape)
        own = place == "vector" or (place == "rows" and tuple(array.shape) == shape)
        at: Any = "rows" if place == "spread" else place
        gradient = dtype and (dtype if own else compute)
        inputs.append(Input(name, at, memory.dtype(array), gradient, dtype))
        add(f"in_{name}", array, at, is_copy)
    for i, of_output in enumerate(of_outputs):
        if of_output is not None:
            add(f"dy_{i}", of_output, "rows")
    of_weight, of_bias = (
        None if vector is None else memory.dtype(vector) for vector in (given.weight, given.bias)
    )
    spec = Spec(
        fused.norm,
        fused.prologue,
        fused.epilogue,
        bool(options.zero_centered),
        compute,
        memory.dtype(x),
        of_weight,
        of_bias,
        tuple(inputs),
        tuple(outputs),
        tuple(None if of is None else memory.dtype(of) for of in of_outputs),
    )
    vector = (layout | addresses) & -(layout | addresses)
    is_typical = vector == layout & -layout and not has_copies
    masks = {name: vector * moved[name] - 1 if name in moved else 0 for name in arrays}
    return _Call(spec, m, n, vector, kept, arrays, masks, values, is_typical)


# ---- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    kernels: tuple[Kernel, ...]
    config: FusedForward | FusedBackward
    at_once: int  # clusters of blocks

    @property
    def rows_per_block(self) -> int:
        return self.config.block_threads // self.config.row_threads


Config = TypeVar("Config", FusedForward, FusedBackward)


def _plan(
    config_of: Callable[[int], Config],
    kernels_of: Callable[[Config], tuple[Instantiation, ...]],
    device: int,
) -> _Plan:
    """Return a plan whose kernels spill little, with as many blocks at once as that allows.

    `config_of`: the configuration for an architecture.
    """
    architecture = _plans.architecture(device)
    config = config_of(architecture)
    while True:
        kernels = _background.load(kernels_of(config), device)
        is_fast = kernels[0].local_bytes() <= MOST_LOCAL_BYTES
        if is_fast or config.blocks_per_multiprocessor == 1:
            break
        fewer = max(1, 3 * config.blocks_per_multiprocessor // 4)
        config = replace(config, blocks_per_multiprocessor=fewer)
    if config.cluster_blocks > 1:
        at_once = kernels[0].clusters_at_once()
        if at_once == 0:  # a slice of a GPU
            return _plan(lambda of: config_of(without_clusters(of)), kernels_of, device)
    else:
        at_once = kernels[0].blocks_at_once() * _plans.multiprocessors(device)
    return _Plan(kernels, config, at_once)


def _shared(spec: Spec) -> list[str]:
    vectors = (given.dtype for given in spec.at("vector"))
    return [dtype for dtype in (spec.weight, spec.bias, *vectors) if dtype]


def _forward_config(spec: Spec, n: int, vector: int, architecture: int) -> FusedForward:
    return fused_forward(
        *(spec.x, spec.compute, n, [dtype for _, dtype in spec.read], _shared(spec)),
        heavy=spec.is_value_heavy,
        vector=vector,
        architecture=architecture,
    )


def _backward_config(spec: Spec, n: int, vector: int, architecture: int) -> FusedBackward:
    return fused_backward(
        *(spec.x, spec.compute, n, [dtype for _, dtype in spec.read], _shared(spec)),
        kept=1 + len(spec.sums_over_rows) + len(spec.differentiated.held),
        vector=vector,
        architecture=architecture,
    )


def _reduction(spec: Spec, n: int) -> Reduction:
    return reduction_of_gradients(max(1, len(spec.sums_over_rows)), spec.compute, n)


@cache
def _forward_plan(spec: Spec, n: int, vector: int, device: int) -> _Plan:
    return _plan(
        lambda architecture: _forward_config(spec, n, vector, architecture),
        lambda config: (fused_forward_instantiation(spec, config),),
        device,
    )


@cache
def _backward_plan(spec: Spec, n: int, vector: int, device: int) -> _Plan:
    return _plan(
        lambda architecture: _backward_config(spec, n, vector, architecture),
        lambda config: fused_backward_instantiations(spec, config, _reduction(spec, n)),
        device,
    )


# ---- calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """An array that a call makes. `place`: where its address is among the operands, if there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: int | None = None
    is_scratch: bool = False


@dataclass(frozen=True)
class _Ready:
    """A call that is prepared: it serves all calls on arrays like its own.

    `reads`: the names of the arrays that kernels read, the bits that no address of theirs may have,
    and the places of the addresses among the operands. `sums`: launches that sum partials, the
    bytes before these, and the gradients. `given`: a gradient's shape and dtype, if it is made in
    others.
    """

    told: Any  # what checks found
    device: int
    launch: Launch
    operands: tuple[float, ...]
    reads: tuple[tuple[str, int, int], ...]
    constants: tuple[tuple[str, int], ...]
    made: tuple[_Made, ...]
    sums: tuple[tuple[Launch, int, tuple[str, ...]], ...] = ()
    given: tuple[tuple[str, tuple[int, ...], str], ...] = ()

    def run(
        self, memory: Memory, x: Any, arrays: Mapping[str, Any], numbers: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return what is made, by name; None if an array is not aligned like that of this call."""
        operands = list(self.operands)
        for name, mask, place in self.reads:
            address = memory.address(arrays[name])
            if address & mask:
                return None
            operands[place] = address
        for name, place in self.constants:
            try:
                operands[place] = float(numbers[name])
            except OverflowError:  # checks say so
                return None
        made = {}
        for one in self.made:
            allocate = memory.scratch if one.is_scratch else memory.empty
            made[one.name] = array = allocate(one.shape, one.dtype, x)
            if one.place is not None:
                operands[one.place] = memory.address(array)
        stream = memory.stream(self.device)
        self.launch(stream, tuple(operands))  # type: ignore[arg-type]
        for launch, before, names in self.sums:
            targets = [memory.address(made[name]) for name in names]
            source = memory.address(made["partials"]) + before
            launch(stream, (source, *targets, *(0 for _ in range(2 - len(targets)))))
        for name, shape, dtype in self.given:
            made[name] = memory.summed(made[name], shape, dtype)
        return made


def _ready(
    call: _Call,
    told: Any,
    device: int,
    kernel: Kernel,
    blocks: int,
    arguments: Sequence[tuple[str, str]],
    numbers: Mapping[str, float],
    made: Sequence[_Made],
    others: Mapping[str, Any],
    **further: Any,
) -> _Ready:
    """Prepare a launch. `others`: arrays that are read, by name, in addition to the call's."""
    names = [name for name, _ in arguments if name not in numbers]
    places = {name: place for place, name in enumerate(names)}
    read = [*call.masks.items(), *((name, 0) for name in others)]
    constants = [i.name for i in call.spec.at("constant")]
    return _Ready(
        told,
        device,
        kernel.prepared(blocks, numbers),
        tuple(call.values.get(name, 0) for name in names),
        tuple((name, mask, places[name]) for name, mask in read),
        tuple((name, places[f"in_{name}"]) for name in constants),
        tuple(replace(one, place=places.get(one.name, one.place)) for one in made),
        **further,
    )


def _key(memory: Memory, given: Given, options: Options, *others: Any) -> Hashable:
    """Return all that preparing a call depends on, but for addresses.

    A number stands for all numbers. None if another class of arrays is among the arguments.
    """

    def of(argument: Any) -> Any:
        if argument is None:
            return "none"
        return "number" if is_number(argument) else memory.signature(argument)

    signatures = [
        of(argument)
        for argument in (given.x, given.weight, given.bias, *given.inputs.values(), *others)
    ]
    if None in signatures:
        return None
    return (
        repr(options),  # which may hold what cannot be hashed
        tuple(given.inputs),
        tuple(signatures),
    )


def _keep(fused: Fused, key: tuple[Any, Hashable], ready: _Ready) -> None:
    if key[1] is not None:
        remember(fused.prepared, key, ready)


def _named(given: Given) -> dict[str, Any]:
    named = {"in_x": given.x, "weight": given.weight, "bias": given.bias}
    return named | {f"in_{name}": array for name, array in given.inputs.items()}


def again(
    memory: Memory, fused: Fused, given: Given, options: Options, *, statistics: bool
) -> Result | None:
    """Return what `forward` does, for arrays like those of an earlier call, else None."""
    key = _key(memory, given, options)
    ready = None if key is None else fused.prepared.get((statistics, key))
    if ready is None:
        return None
    with memory.on(ready.device):
        made = ready.run(memory, given.x, _named(given), given.inputs)
    return made and _result(made, len(ready.told))


Result = tuple[tuple[Any, ...], Any, Any]  # the outputs, mean and rstd


def _result(made: dict[str, Any], outputs: int) -> Result:
    return (
        tuple(made[f"y_{k}"] for k in range(outputs)),
        made.get("mean"),
        made.get("rstd"),
    )


def forward(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    dtypes: Sequence[str],
    *,
    statistics: bool = True,
) -> Result | None:
    """Return the outputs, of these dtypes, and the statistics; None if there is no kernel."""
    device = memory.device(given.x)
    with memory.on(device):
        call = _arranged(memory, fused, given, options, compute, dtypes)
        if call is None:
            return None
        plan = _forward_plan(call.spec, call.n, call.vector, device)
        blocks = -(-call.m // plan.rows_per_block) * plan.config.cluster_blocks
        if blocks > MOST_BLOCKS:
            return None
        made = [_Made(f"y_{k}", tuple(given.x.shape), dtype) for k, dtype in enumerate(dtypes)]
        if statistics:
            names = ("mean", "rstd") if fused.norm == "layer_norm" else ("rstd",)
            made += (_Made(name, call.kept, compute) for name in names)
        numbers = {"n_rows": call.m, "n_cols": call.n, "inv_n": 1 / call.n}
        numbers["eps"] = fused.eps(options)
        arguments = forward_op(call.spec).arguments
        kernel = plan.kernels[0]
        told = tuple(dtypes)
        ready = _ready(call, told, device, kernel, blocks, arguments, numbers, made, {})
        found = ready.run(memory, given.x, call.arrays, given.inputs)
    if call.is_typical:
        _keep(fused, (statistics, _key(memory, given, options)), ready)
    assert found is not None  # noqa: S101 - the addresses are those that it was prepared for
    return _result(found, len(dtypes))


def backward(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    dtypes: Sequence[str],
    of_outputs: Sequence[Any],
    mean: Any,
    rstd: Any,
) -> dict[str, Any] | None:
    """Return gradients by name, of the shapes and dtypes of what they are gradients of.

    None if no kernel serves the call. What has no gradient is left out.
    """
    found = again_backward(memory, fused, given, options, of_outputs, mean, rstd)
    if found is not None:
        return found
    x, device = given.x, memory.device(given.x)
    given_statistics = {"mean": mean, "rstd": rstd} if mean is not None else {"rstd": rstd}
    statistics = {name: memory.contiguous(one) for name, one in given_statistics.items()}
    with memory.on(device):
        call = _arranged(memory, fused, given, options, compute, dtypes, of_outputs)
        if call is None:
            return None
        plan = _backward_plan(call.spec, call.n, call.vector, device)
        ready = _ready_backward(call, plan, given, device, compute, statistics)
        found = ready.run(memory, x, call.arrays | statistics, given.inputs)
    if call.is_typical and all(statistics[n] is one for n, one in given_statistics.items()):
        _keep(fused, (None, _key(memory, given, options, *of_outputs, mean, rstd)), ready)
    assert found is not None  # noqa: S101 - the addresses are those that it was prepared for
    return _gradients(found)


def again_backward(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    of_outputs: Sequence[Any],
    mean: Any,
    rstd: Any,
) -> dict[str, Any] | None:
    """Return what `backward` does, for arrays like those of an earlier call, else None."""
    key = _key(memory, given, options, *of_outputs, mean, rstd)
    ready = None if key is None else fused.prepared.get((None, key))
    if ready is None:
        return None
    named = {f"dy_{k}": of for k, of in enumerate(of_outputs)} | {"mean": mean, "rstd": rstd}
    with memory.on(ready.device):
        found = ready.run(memory, given.x, _named(given) | named, given.inputs)
    return found and _gradients(found)


def _gradients(made: dict[str, Any]) -> dict[str, Any]:
    names = (name for name in made if name != "partials")
    return {name.removeprefix("d_"): made[name] for name in names}


def _ready_backward(
    call: _Call,
    plan: _Plan,
    given: Given,
    device: int,
    compute: str,
    statistics: Mapping[str, Any],
) -> _Ready:
    spec, n, names = call.spec, call.n, call.spec.differentiated
    shape = tuple(given.x.shape)
    clusters = min(-(-call.m // plan.rows_per_block), plan.at_once)
    if plan.config.streams:
        clusters = max(clusters, -(-call.m // STREAMED_ROWS))
    own = {"x": given.x, "weight": given.weight, "bias": given.bias, **given.inputs}
    dtype_of = {"x": spec.x, **spec.dtypes_given}
    of_rows = {i.name: i.gradient or "" for i in spec.rows}
    column = call.kept + (1,) * (len(shape) - len(call.kept))
    made, summed = [], []
    for name in (*names.rows, *names.numbers):
        is_rows = name in names.rows
        of, dtype = (shape, of_rows[name]) if is_rows else (column, compute)
        wanted = tuple(own[name].shape), dtype_of[name]
        made.append(_Made(f"d_{name}", of, dtype, is_scratch=(of, dtype) != wanted))
        if (of, dtype) != wanted:
            summed.append((f"d_{name}", *wanted))
    of_sum = clusters * partials_stride(n)
    sums = spec.sums_over_rows
    made.append(_Made("partials", (max(1, len(sums) * of_sum),), compute, is_scratch=True))
    launches = []
    columns = _reduction(spec, n).columns
    for j, kernel in enumerate(plan.kernels[1:]):
        pair = sums[2 * j : 2 * j + 2]
        for name, dtype in pair:
            made.append(_Made(f"d_{name}", tuple(own[name].shape), dtype))
        numbers = {"n_partials": clusters, "n_cols": n}
        launch = kernel.prepared(len(pair) * -(-n // columns), numbers)
        before = 2 * j * of_sum * ITEMSIZE[compute]
        launches.append((launch, before, tuple(f"d_{name}" for name, _ in pair)))
    return _ready(
        call,
        None,
        device,
        plan.kernels[0],
        clusters * plan.config.cluster_blocks,
        backward_op(spec).arguments,
        {"n_rows": call.m, "n_cols": n, "inv_n": 1 / n},
        made,
        statistics,
        sums=tuple(launches),
        given=tuple(summed),
    )


# ---- sources -------------------------------------------------------------------------------------


class _Shapes:
    """Arrays of which only shapes and dtypes count, as if contiguous and aligned."""

    def dtype(self, array: Any) -> str:
        return str(array.dtype).rpartition(".")[2]

    def strides(self, array: Any) -> tuple[int, ...]:
        shape = tuple(array.shape)
        return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def address(self, array: Any) -> int:
        return 0

    def contiguous(self, array: Any) -> Any:
        return array

    def cast(self, array: Any, dtype: str) -> Any:
        return SimpleNamespace(shape=array.shape, dtype=dtype)

    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:
        return SimpleNamespace(shape=shape, dtype=array.dtype)


def sources(
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    dtypes: Sequence[str],
    *,
    backward: bool,
    architecture: int,
) -> dict[str, str]:
    """Return the texts of a pass's kernels by name; none if no kernel serves the call."""
    memory: Any = _Shapes()
    of_outputs = [SimpleNamespace(shape=given.x.shape, dtype=dtype) for dtype in dtypes]
    of_outputs = of_outputs if backward else []
    call = _arranged(memory, fused, given, options, compute, dtypes, of_outputs)
    if call is None:
        return {}
    of = call.spec, call.n, call.vector, architecture
    kernels: tuple[Instantiation, ...]
    if backward:
        reduction = _reduction(call.spec, call.n)
        kernels = fused_backward_instantiations(call.spec, _backward_config(*of), reduction)
    else:
        kernels = (fused_forward_instantiation(call.spec, _forward_config(*of)),)
    return {kernel.name: kernel.source() for kernel in kernels}
