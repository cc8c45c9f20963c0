"""Calls of norms of `cupynorm.fuse` on a GPU: one kernel each way, with the prologue and epilogue.

Nothing here knows arrays: a `Memory` does. What a kernel cannot serve is left to the operations of
a framework, in `_fuse`: axes that are not the last ones, a weight that varies from row to row, and
calls without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cupynorm import _background, _checks, _plans
from cupynorm._arrays import is_number, row_stride
from cupynorm._compile import (
    Instantiation,
    fused_backward_instantiations,
    fused_forward_instantiation,
)
from cupynorm._driver import MOST_BLOCKS, Kernel, Launch
from cupynorm._fused_source import Input, Op, Spec, backward_op, forward_op
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
from cupynorm._operation import ITEMSIZE, Kind
from cupynorm._prepared import Dialect, Launches, key_function, launches_maker, remember

if TYPE_CHECKING:
    from cupynorm._fuse import Fused, Given, Options

__all__ = [
    "Call",
    "Memory",
    "Pass",
    "Shapes",
    "again",
    "arranged",
    "backward",
    "forward",
    "pass_of",
    "sources",
]

# A thread may spill so many, which takes less time than fewer blocks (notes.md#fused-norms).
MOST_LOCAL_BYTES = 64


class Memory(Protocol):
    """A framework's arrays. Dtypes are given by name, and strides in elements."""

    # Kinds that it does not know are those of inputs and gradients of outputs. A `run` returns None
    # where arrays are not like those of the first call.
    dialect: Dialect

    def dtype(self, array: Any) -> str: ...
    def strides(self, array: Any) -> tuple[int, ...]: ...
    def address(self, array: Any) -> int: ...
    def native(self, dtype: str) -> Any:
        """Return the framework's own dtype."""

    def kept(self, array: Any) -> Any:
        """Return an array, which a CUDA graph that is being captured keeps."""

    def contiguous(self, array: Any) -> Any: ...
    def cast(self, array: Any, dtype: str) -> Any: ...
    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return a contiguous copy, broadcast to a shape."""

    def summed(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Undo a broadcast, in a fixed order, and cast."""

    def device(self, array: Any) -> int: ...
    def on(self, device: int) -> AbstractContextManager[Any]:
        """Make a device current, and CuPy's current stream that of the framework."""


@dataclass(frozen=True)
class Call:
    """A call as kernels take it: a spec, sizes, and what a launch gets by name.

    `copies`: what brings an array into a layout that kernels take, one after another. `masks`: of
    each array, the bits that its address may not have. `values` are strides and steps.
    """

    spec: Spec
    m: int
    n: int
    vector: int
    kept: tuple[int, ...]
    copies: dict[str, tuple[Callable[[Any], Any], ...]]
    masks: dict[str, int]
    values: dict[str, float]
    is_aligned: bool  # no address makes accesses narrower


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


def arranged(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    outputs: Sequence[str],
    of_outputs: Sequence[Any] = (),
) -> Call | None:
    """Return a call as kernels take it, None if they do not serve it.

    `of_outputs`: the gradients of the outputs, in a backward pass.
    """
    x, shape = given.x, tuple(given.x.shape)
    axes = _checks.normalized_axes(len(shape), options.axis)
    k = len(axes)
    kept, of_row = shape[: len(shape) - k], shape[len(shape) - k :]
    m, n = math.prod(kept), math.prod(of_row)
    if axes != tuple(range(len(shape) - k, len(shape))) or not m or not n:
        return None
    copies: dict[str, tuple[Callable[[Any], Any], ...]] = {}
    moved: dict[str, int] = {}  # the bytes of an element, 0 if it is not moved by packs
    values: dict[str, float] = {}
    layout, addresses = n | pack_length(memory.dtype(x)), 0

    def add(name: str, array: Any, place: str, *made: Callable[[Any], Any]) -> None:
        nonlocal layout, addresses
        itemsize = ITEMSIZE[_dtype_read(memory.dtype(array))]
        strides = memory.strides(array)
        stride: int | None = n
        if not made and place == "rows":
            in_bytes = [itemsize * stride for stride in strides]
            in_bytes = [0] * (len(shape) - len(strides)) + in_bytes
            stride = row_stride(shape, in_bytes, itemsize, k)
        elif not made and not _is_contiguous(array.shape, strides):
            stride = None
        if stride is None:
            made, stride = (memory.contiguous,), n
        copies[name] = made
        if place == "rows":
            values[f"stride_{name}"] = stride
            layout |= stride
        if place == "number":
            values[f"step_{name}"] = int(math.prod(array.shape) == m)
        elif not made:
            addresses |= memory.address(array) // itemsize
        moved[name] = 0 if place == "number" else itemsize

    add("in_x", x, "rows")
    for name, vector in (("weight", given.weight), ("bias", given.bias)):
        if vector is not None:
            ones = (1,) * (len(shape) - len(vector.shape)) + tuple(vector.shape)
            if not set(ones[: len(kept)]) <= {1} or ones[len(kept) :] != of_row:
                return None
            add(name, vector, "vector")
    inputs = []
    for name in fused.inputs:
        array = given.inputs[name]
        if is_number(array):
            inputs.append(Input(name, "constant"))
            continue
        dtype = memory.dtype(array)
        place = _place(array.shape, shape, k)
        own = place == "vector" or (place == "rows" and tuple(array.shape) == shape)
        made: list[Callable[[Any], Any]] = []
        if dtype == "bool":
            made = [partial(memory.cast, dtype=_dtype_read(dtype)), memory.contiguous]
        if place == "spread":
            made.append(partial(memory.expanded, shape=shape))
        at: Any = "rows" if place == "spread" else place
        differentiated = None if dtype == "bool" else dtype
        gradient = differentiated and (differentiated if own else compute)
        inputs.append(Input(name, at, _dtype_read(dtype), gradient, differentiated))
        add(f"in_{name}", array, at, *made)
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
    masks = {name: max(0, vector * itemsize - 1) for name, itemsize in moved.items()}
    is_aligned = vector == layout & -layout
    return Call(spec, m, n, vector, kept, copies, masks, values, is_aligned)


def _dtype_read(dtype: str) -> str:
    """Return the dtype in which kernels read an array."""
    return "float16" if dtype == "bool" else dtype


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether an array is C-contiguous."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# ---- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    kernels: tuple[Kernel, ...]
    config: FusedForward | FusedBackward
    at_once: int  # clusters of blocks

    @property
    def rows_per_block(self) -> int:
        return self.config.block_threads // self.config.row_threads

    def blocks(self, m: int) -> int:
        """Return the blocks of a forward pass."""
        return -(-m // self.rows_per_block) * self.config.cluster_blocks

    def clusters(self, m: int) -> int:
        """Return the clusters of blocks of a backward pass."""
        clusters = min(-(-m // self.rows_per_block), self.at_once)
        return max(clusters, -(-m // STREAMED_ROWS)) if self.config.streams else clusters

    def sums(self, spec: Spec, n: int, clusters: int) -> list[tuple[Launch, int]]:
        """Return the launches that sum partials, and the bytes of those before theirs."""
        of_sum, columns = _bytes_of_sum(spec, n, clusters), _reduction(spec, n).columns
        numbers, found = {"n_partials": clusters, "n_cols": n}, []
        for j, kernel in enumerate(self.kernels[1:]):
            count = len(spec.sums_over_rows[2 * j : 2 * j + 2])
            found.append((kernel.prepared(count * -(-n // columns), numbers), 2 * j * of_sum))
        return found


def _bytes_of_sum(spec: Spec, n: int, clusters: int) -> int:
    """Return the bytes of the partials of one sum over rows."""
    return clusters * partials_stride(n) * ITEMSIZE[spec.compute]


def _sizes(m: int, n: int) -> dict[str, float]:
    return {"n_rows": m, "n_cols": n, "inv_n": 1 / n}


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
        heavy_value=spec.is_value_heavy,
        heavy_epilogue=spec.is_epilogue_heavy,
        vector=vector,
        architecture=architecture,
    )


def _backward_config(spec: Spec, n: int, vector: int, architecture: int) -> FusedBackward:
    return fused_backward(
        *(spec.x, spec.compute, n, [dtype for _, dtype in spec.read], _shared(spec)),
        kept=1 + len(spec.sums_over_rows) + len(spec.differentiated.held),
        heavy_value=spec.is_value_heavy,
        heavy_epilogue=spec.is_epilogue_heavy,
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


# ---- launches at addresses -----------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A pass over contiguous rows of n elements, for a framework that allocates all arrays.

    `operands`: the names of what a launch takes. They are those of the first kernel, as an `Op` has
    them, and then ``d_`` and the name of each sum over rows. `partials` is scratch.
    """

    spec: Spec
    n: int
    plan: _Plan
    operands: tuple[str, ...]

    def scratch_bytes(self, m: int) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        if not self.spec.sums_over_rows or not self.spec.of_outputs:
            return 0
        of_sum = _bytes_of_sum(self.spec, self.n, self.plan.clusters(m))
        return len(self.spec.sums_over_rows) * of_sum

    def prepared(self, m: int, eps: float) -> Launch:
        """Return the launch over m rows. It takes a stream and operands."""
        plan, sizes = self.plan, _sizes(m, self.n)
        if not self.spec.of_outputs:
            return plan.kernels[0].prepared(plan.blocks(m), sizes | {"eps": eps})
        clusters, count = plan.clusters(m), len(self.spec.sums_over_rows)
        launch_rows = plan.kernels[0].prepared(clusters * plan.config.cluster_blocks, sizes)
        sums = plan.sums(self.spec, self.n, clusters)
        if not sums:
            return launch_rows
        place, rows = self.operands.index("partials"), len(self.operands) - count

        def launch(stream: int, operands: tuple[int, ...]) -> None:
            launch_rows(stream, operands[:rows])
            partials, targets = operands[place], (*operands[rows:], 0)
            for j, (launch_sums, before) in enumerate(sums):
                launch_sums(stream, (partials + before, *targets[2 * j : 2 * j + 2]))

        return launch


def pass_of(spec: Spec, n: int, device: int) -> Pass:
    """Return a pass over aligned rows that lie one after the other, loaded on the device."""
    divisors = n | pack_length(spec.x)
    told = spec, n, divisors & -divisors, device
    if spec.of_outputs:
        plan, op = _backward_plan(*told), backward_op(spec)
        targets = [f"d_{name}" for name, _ in spec.sums_over_rows]
    else:
        plan, op, targets = _forward_plan(*told), forward_op(spec), []
    known = {*_sizes(1, n), "eps"}
    names = [name for name, _ in op.arguments if name not in known]
    return Pass(spec, n, plan, (*names, *targets))


# ---- calls ---------------------------------------------------------------------------------------

Result = tuple[tuple[Any, ...], Any, Any]  # the outputs, mean and rstd
Run = Callable[[tuple[Any, ...]], Any]


@dataclass
class _New:
    """The arrays that a call makes, by name, and what a `run` knows of them."""

    memory: Memory
    names: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: str, vector: int = 1) -> None:
        """Add an array that is written by so many elements at once."""
        self.names.append(name)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        found = {"shape": shape, "strides": strides, "dtype": self.memory.native(dtype)}
        self.known |= {f"{name}_{of}": value for of, value in found.items()}
        if vector > 1 and Kind.ROWS in self.memory.dialect.checked_new:
            self.known[f"{name}_mask"] = vector * ITEMSIZE[dtype] - 1
            self.checked.append(name)


def _names(given: Given, *others: str) -> dict[str, str]:
    """Return the names of arrays in the code of a call, by those of the kernel's arguments."""
    inputs = {f"in_{name}": f"in_{i}" for i, name in enumerate(given.inputs)}
    return {"in_x": "x", "weight": "weight", "bias": "bias", **inputs, **{n: n for n in others}}


def _run(
    memory: Memory,
    call: Call,
    device: int,
    arguments: dict[str, str],
    taken: tuple[Any, ...],
    op: Op,
    launch: Launch,
    numbers: Mapping[str, float],
    new: _New,
    result: str,
    further: Mapping[str, str] | None = None,
    sums: Sequence[tuple[str, tuple[str, ...]]] = (),
    summed: Sequence[str] = (),
) -> Run:
    """Return the `run` of a call.

    `arguments`: the names of what it takes in its code, by those of the kernel's arguments.
    `taken`: what it takes now. `numbers`: what the launch has already. `further`: the names in the
    code of what it makes, where they are others. `sums` and `summed`: the further launches, and the
    arrays that are summed behind these, as `Launches` has them.
    """
    given = {n: of for (n, of), a in zip(arguments.items(), taken, strict=True) if a is not None}
    constants = tuple(given.pop(f"in_{i.name}") for i in call.spec.at("constant"))
    known = new.known | {"launch": launch, "device": device, "index": device}
    operands = []
    of_code = {name: name for name in new.names} | given | dict(further or {})
    of_code |= {name: of for name, of in arguments.items() if of in constants}
    for place, (name, _) in enumerate(op.arguments):
        if name in call.values:
            known[f"value_{place}"] = call.values[name]
            operands.append(f"value_{place}")
        elif name not in numbers:
            operands.append(of_code.get(name, "0"))
    checked, copied = [], []
    for name, of in given.items():
        if call.masks.get(name):
            known[f"{of}_mask"] = call.masks[name]
            checked.append(of)
        if call.copies.get(name):
            known[f"{of}_copy"] = _in_turn(call.copies[name])
            copied.append(of)
    launches = Launches(
        arguments=tuple(arguments.values()),
        given=tuple(given.values()),
        new=tuple(new.names),
        has_scratch=bool(sums),
        launches=(("launch", tuple(operands)), *sums),
        result=result,
        numbers=constants,
        copied=tuple(copied),
        checked=tuple(checked),
        checked_new=tuple(new.checked),
        summed=tuple(summed),
    )
    return launches_maker(memory.dialect, launches)(known)


def _in_turn(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def apply(array: Any) -> Any:
        for function in functions:
            array = function(array)
        return array

    return functions[0] if len(functions) == 1 else apply


# How a key takes a call's options: those that it has as they are, and the names of the inputs.
_PLAIN = {
    "told": "",
    "eps": "(eps is None or type(eps) is float)",
    "axis": "axis is None",
    "zero_centered": "type(zero_centered) is bool",
    "out_dtype": "out_dtype is None",
    "names": "",
}


@cache
def _key_function(dialect: Dialect, count: int, outputs: int) -> Any:
    """Return what makes the key of a call of so many arrays: see `again`."""
    behind = _behind(outputs)
    inputs = (f"in_{i}" for i in range(count - 3 - len(behind)))
    return key_function(dialect, _PLAIN, ("x", "weight", "bias", *inputs, *behind))


def _key(memory: Memory, arrays: tuple[Any, ...], told: tuple[Any, ...], outputs: int) -> Hashable:
    """Return all that preparing a call depends on, except addresses.

    A number stands for all numbers. None if another class of arrays is among the arguments.
    """
    key_of = _key_function(memory.dialect, len(arrays), outputs)
    key: Hashable = key_of(told, arrays)
    if key is None:  # other options may not be hashable
        key = key_of((repr(told), None, None, False, None, None), arrays)
    return key


def again(
    memory: Memory,
    fused: Fused,
    arrays: tuple[Any, ...],
    told: tuple[Any, ...],
    outputs: int = 0,
) -> Any:
    """Return what an earlier call on arrays like these would, None if there was none.

    Parameters
    ----------
    arrays : tuple
        x, weight, bias and the inputs; behind these, in a backward pass, mean, rstd and the
        gradients of outputs.
    told : tuple
        Whether statistics are returned, or "backward"; the options; the inputs' names, a tuple.
    outputs : int
        How many outputs have gradients, in a backward pass.
    """
    run = fused.prepared.get(_key(memory, arrays, told, outputs))
    if run is None:
        return None
    made = run(arrays)
    if made is None:
        with memory.on(memory.device(arrays[0])):  # another one may be current
            made = run(arrays)
    return made


def _remember(
    memory: Memory,
    fused: Fused,
    arrays: tuple[Any, ...],
    told: tuple[Any, ...],
    outputs: int,
    run: Run,
) -> None:
    key = _key(memory, arrays, told, outputs)
    if key is not None:
        remember(fused.prepared, key, run)


@cache
def _behind(outputs: int) -> tuple[str, ...]:
    """Return the names of the arrays that a backward pass reads behind the inputs."""
    return ("mean", "rstd", *(f"dy_{k}" for k in range(outputs))) if outputs else ()


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
    """Return the outputs, of these dtypes, and the statistics.

    The result is None if no kernel serves the call, or new arrays are less aligned than it writes.
    """
    device = memory.device(given.x)
    with memory.on(device):
        call = arranged(memory, fused, given, options, compute, dtypes)
        if call is None:
            return None
        plan = _forward_plan(call.spec, call.n, call.vector, device)
        blocks = plan.blocks(call.m)
        if blocks > MOST_BLOCKS:
            return None
        new = _New(memory)
        for k, dtype in enumerate(dtypes):
            new.add(f"y_{k}", tuple(given.x.shape), dtype, call.vector)
        if statistics:
            for name in ("mean", "rstd") if fused.norm == "layer_norm" else ("rstd",):
                new.add(name, call.kept, compute)
        numbers = _sizes(call.m, call.n) | {"eps": fused.eps(options)}
        outputs = ", ".join(f"y_{k}" for k in range(len(dtypes)))
        of_rows = (name if name in new.names else "None" for name in ("mean", "rstd"))
        arrays = (given.x, given.weight, given.bias, *given.inputs.values())
        run = _run(
            *(memory, call, device, _names(given), arrays, forward_op(call.spec)),
            *(plan.kernels[0].prepared(blocks, numbers), numbers, new),
            f"({outputs},), {', '.join(of_rows)}",
        )
        found: Result = run(arrays)
    if call.is_aligned:
        _remember(memory, fused, arrays, (statistics, *options, tuple(given.inputs)), 0, run)
    return found


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
) -> tuple[Any, ...] | None:
    """Return the gradients of x, weight, bias and the inputs, in the order of `fused.inputs`.

    They have the shapes and dtypes of what they are gradients of. What has none is None. The result
    is None as that of `forward` is.
    """
    arrays = (given.x, given.weight, given.bias, *given.inputs.values(), mean, rstd, *of_outputs)
    told = ("backward", *options, tuple(given.inputs))
    found: tuple[Any, ...] | None = again(memory, fused, arrays, told, len(of_outputs))
    if found is not None:
        return found
    device = memory.device(given.x)
    with memory.on(device):
        call = arranged(memory, fused, given, options, compute, dtypes, of_outputs)
        if call is None:
            return None
        for name, one in (("mean", mean), ("rstd", rstd)):
            if one is not None and not _is_contiguous(one.shape, memory.strides(one)):
                call.copies[name] = (memory.contiguous,)
        plan = _backward_plan(call.spec, call.n, call.vector, device)
        run = _prepared_backward(memory, fused, call, plan, given, device, compute, arrays)
        found = run(arrays)
    if call.is_aligned:
        _remember(memory, fused, arrays, told, len(of_outputs), run)
    return found


def _prepared_backward(
    memory: Memory,
    fused: Fused,
    call: Call,
    plan: _Plan,
    given: Given,
    device: int,
    compute: str,
    arrays: tuple[Any, ...],
) -> Run:
    spec, n, names = call.spec, call.n, call.spec.differentiated
    shape = tuple(given.x.shape)
    clusters = plan.clusters(call.m)
    own = {"x": given.x, "weight": given.weight, "bias": given.bias, **given.inputs}
    dtype_of = {"x": spec.x, **spec.dtypes_given}
    of_rows = {i.name: i.gradient or "" for i in spec.rows}
    column = call.kept + (1,) * (len(shape) - len(call.kept))
    new, summed = _New(memory), []
    known = new.known
    known["gradients"] = fused.class_of_gradients
    # What an argument of the kernel is called in the code, which has no names of inputs.
    of_gradient = {name: f"d_{i}" for i, name in enumerate(("x", "weight", "bias", *fused.inputs))}
    for name in (*names.rows, *names.numbers):
        is_rows = name in names.rows
        of, dtype = (shape, of_rows[name]) if is_rows else (column, compute)
        wanted = tuple(own[name].shape), dtype_of[name] or ""
        new.add(of_gradient[name], of, dtype, call.vector if is_rows else 1)
        if (of, dtype) != wanted:
            known[f"{of_gradient[name]}_sum"] = _summed(memory, *wanted)
            summed.append(of_gradient[name])
    sums = spec.sums_over_rows
    for name, dtype in sums:
        new.add(of_gradient[name], tuple(own[name].shape), dtype)
    of_sums = len(sums) * _bytes_of_sum(spec, n, clusters)
    known |= {"scratch_bytes": of_sums, "scratch_shape": (of_sums,)}
    launches = []
    for j, (launch, before) in enumerate(plan.sums(spec, n, clusters)):
        known |= {f"launch_{j}": launch, f"before_{j}": before}
        targets = [of_gradient[name] for name, _ in sums[2 * j : 2 * j + 2]]
        launches.append((f"launch_{j}", (f"scratch_address + before_{j}", *(*targets, "0")[:2])))
    of_launch = _sizes(call.m, n)
    launch = plan.kernels[0].prepared(clusters * plan.config.cluster_blocks, of_launch)
    results = (of if of in new.names else "None" for of in of_gradient.values())
    others = _behind(len(spec.of_outputs))
    return _run(
        *(memory, call, device, _names(given, *others), arrays, backward_op(spec)),
        *(launch, of_launch, new),
        f"gradients({', '.join(results)})",
        further={f"d_{name}": of for name, of in of_gradient.items()}
        | ({"partials": "scratch_address"} if sums else {}),
        sums=launches,
        summed=summed,
    )


def _summed(memory: Memory, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any]:
    return lambda array: memory.summed(memory.kept(array), shape, dtype)


# ---- sources -------------------------------------------------------------------------------------


class Shapes:
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

    cast = expanded = contiguous


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
    memory: Any = Shapes()
    of_outputs = [SimpleNamespace(shape=given.x.shape, dtype=dtype) for dtype in dtypes]
    of_outputs = of_outputs if backward else []
    call = arranged(memory, fused, given, options, compute, dtypes, of_outputs)
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
