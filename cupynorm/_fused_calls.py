"""Calls of norms of `cupynorm.fuse` on a GPU: one kernel each way, with the prologue and epilogue.

Nothing here knows arrays: a `Memory` does. What a kernel cannot serve is left to the operations of
a framework, in `_fuse`: axes that are not the last ones, a weight that varies from row to row,
rows that are too long for a cluster of blocks, and calls without rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cupynorm import _background, _checks, _plans
from cupynorm._arrays import row_stride
from cupynorm._compile import (
    Instantiation,
    fused_backward_instantiations,
    fused_forward_instantiation,
)
from cupynorm._driver import Kernel
from cupynorm._fused_source import Input, Spec, backward_op, forward_op
from cupynorm._layout import (
    FusedBackward,
    FusedForward,
    fused_backward,
    fused_forward,
    pack_length,
    partials_stride,
    reduction_of_gradients,
)
from cupynorm._operation import ITEMSIZE

if TYPE_CHECKING:
    from cupynorm._fuse import Fused, Given, Options

__all__ = ["Memory", "backward", "forward"]

MOST_BLOCKS = (1 << 31) - 1


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

    def device(self, array: Any) -> int: ...
    def on(self, device: int) -> AbstractContextManager[Any]:
        """Make a device current, and CuPy's current stream that of the framework."""

    def stream(self, device: int) -> int: ...


@dataclass(frozen=True)
class _Call:
    """A call as kernels take it: a spec, sizes, and the operands of a launch by name."""

    spec: Spec
    m: int
    n: int
    vector: int
    kept: tuple[int, ...]
    operands: dict[str, float]
    copies: list[Any]  # which the operands point to


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
    operands: dict[str, float] = {}
    copies: list[Any] = []
    divisors = n | pack_length(memory.dtype(x))

    def add(name: str, array: Any, place: str) -> None:
        nonlocal divisors
        itemsize = ITEMSIZE[memory.dtype(array)]
        if place == "rows":
            strides = [itemsize * stride for stride in memory.strides(array)]
            stride = row_stride(shape, strides, itemsize, k)
            if stride is None:
                array, stride = memory.contiguous(array), n
            operands[f"stride_{name}"] = stride
            divisors |= stride
        else:
            array = memory.contiguous(array)
        if place == "number":
            operands[f"step_{name}"] = int(math.prod(array.shape) == m)
        else:
            divisors |= memory.address(array) // itemsize
        operands[name] = memory.address(array)
        copies.append(array)

    add("in_x", x, "rows")
    for name, vector in (("weight", given.weight), ("bias", given.bias)):
        operands[name] = 0
        if vector is not None:
            ones = (1,) * (len(shape) - len(vector.shape)) + tuple(vector.shape)
            if set(ones[: len(kept)]) > {1} or ones[len(kept) :] != of_row:
                return None
            add(name, vector, "vector")
    inputs = []
    for name in fused.inputs:
        array = given.inputs[name]
        if not hasattr(array, "shape") or isinstance(array, float):
            inputs.append(Input(name, "constant"))
            operands[f"in_{name}"] = float(array)
            continue
        dtype: str | None = memory.dtype(array)
        if dtype == "bool":
            array, dtype = memory.cast(array, "float16"), None
        place = _place(array.shape, shape, k)
        if place == "spread":
            array = memory.expanded(array, shape)
        own = place in ("rows", "vector")
        at: Any = "rows" if place == "spread" else place
        gradient = dtype and (dtype if own else compute)
        inputs.append(Input(name, at, memory.dtype(array), gradient))
        add(f"in_{name}", array, at)
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
    return _Call(spec, m, n, divisors & -divisors, kept, operands, copies)


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
    config_of: Callable[[int], Config | None],
    kernels_of: Callable[[Config], tuple[Instantiation, ...]],
    device: int,
) -> _Plan | None:
    """Return a plan whose kernels do not spill, with as many blocks at once as that allows."""
    most = _MOST_BLOCKS_AT_ONCE
    while True:
        config = config_of(most)
        if config is None:
            return None
        kernels = _background.load(kernels_of(config), device)
        if config.blocks_per_multiprocessor == 1 or kernels[0].local_bytes() == 0:
            break
        most = max(1, 3 * config.blocks_per_multiprocessor // 4)
    if config.cluster_blocks > 1:
        at_once = kernels[0].clusters_at_once()
    else:
        at_once = kernels[0].blocks_at_once() * _plans.multiprocessors(device)
    return _Plan(kernels, config, at_once) if at_once else None


_MOST_BLOCKS_AT_ONCE = 32


def _shared(spec: Spec) -> list[str]:
    vectors = (given.dtype for given in spec.at("vector"))
    return [dtype for dtype in (spec.weight, spec.bias, *vectors) if dtype]


@cache
def _forward_plan(spec: Spec, n: int, vector: int, device: int) -> _Plan | None:
    def config_of(most: int) -> FusedForward | None:
        return fused_forward(
            *(spec.x, spec.compute, n, [dtype for _, dtype in spec.read], _shared(spec)),
            heavy=spec.is_value_heavy,
            vector=vector,
            most_blocks=most,
            architecture=_plans.architecture(device),
        )

    return _plan(config_of, lambda config: (fused_forward_instantiation(spec, config),), device)


@cache
def _backward_plan(spec: Spec, n: int, vector: int, device: int) -> _Plan | None:
    sums = len(spec.sums_over_rows)
    reduction = reduction_of_gradients(max(1, sums), spec.compute, n)

    def config_of(most: int) -> FusedBackward | None:
        return fused_backward(
            *(spec.x, spec.compute, n, [dtype for _, dtype in spec.read], _shared(spec)),
            kept=1 + sums + len(spec.differentiated.held),
            vector=vector,
            most_blocks=most,
            architecture=_plans.architecture(device),
        )

    def kernels_of(config: FusedBackward) -> tuple[Instantiation, ...]:
        return fused_backward_instantiations(spec, config, reduction)

    return _plan(config_of, kernels_of, device)


# ---- calls ---------------------------------------------------------------------------------------


def _launch(
    kernel: Kernel,
    blocks: int,
    arguments: Sequence[tuple[str, str]],
    numbers: Mapping[str, float],
    operands: Mapping[str, float],
    stream: int,
) -> None:
    others = tuple(operands[name] for name, _ in arguments if name not in numbers)
    kernel.prepared(blocks, numbers)(stream, others)  # type: ignore[arg-type]


def forward(
    memory: Memory,
    fused: Fused,
    given: Given,
    options: Options,
    compute: str,
    dtypes: Sequence[str],
    *,
    statistics: bool = True,
) -> tuple[tuple[Any, ...], Any, Any] | None:
    """Return the outputs, of these dtypes, and the statistics; None if no kernel serves the call."""
    device = memory.device(given.x)
    with memory.on(device):
        call = _arranged(memory, fused, given, options, compute, dtypes)
        plan = None if call is None else _forward_plan(call.spec, call.n, call.vector, device)
        if call is None or plan is None:
            return None
        config = plan.config
        blocks = -(-call.m // plan.rows_per_block) * config.cluster_blocks
        if blocks > MOST_BLOCKS:
            return None
        shape = tuple(given.x.shape)
        outputs = tuple(memory.empty(shape, dtype, given.x) for dtype in dtypes)
        centered = statistics and fused.norm == "layer_norm"
        mean = memory.empty(call.kept, compute, given.x) if centered else None
        rstd = memory.empty(call.kept, compute, given.x) if statistics else None
        written = {f"y_{k}": output for k, output in enumerate(outputs)}
        written |= {"mean": mean, "rstd": rstd}
        addresses = {n: 0 if a is None else memory.address(a) for n, a in written.items()}
        numbers = {"n_rows": call.m, "n_cols": call.n, "inv_n": 1 / call.n}
        numbers["eps"] = fused.eps(options)
        arguments = forward_op(call.spec).arguments
        operands = call.operands | addresses
        _launch(plan.kernels[0], blocks, arguments, numbers, operands, memory.stream(device))
        return outputs, mean, rstd


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
    device = memory.device(given.x)
    with memory.on(device):
        call = _arranged(memory, fused, given, options, compute, dtypes, of_outputs)
        plan = None if call is None else _backward_plan(call.spec, call.n, call.vector, device)
        if call is None or plan is None:
            return None
        spec, n, config = call.spec, call.n, plan.config
        clusters = min(-(-call.m // plan.rows_per_block), plan.at_once)
        x, names = given.x, spec.differentiated
        of_rows = {i.name: i.gradient or "" for i in spec.rows}
        found = {name: memory.empty(tuple(x.shape), of_rows[name], x) for name in names.rows}
        column = (*call.kept, *(1 for _ in range(x.ndim - len(call.kept))))
        found |= {name: memory.scratch(column, compute, x) for name in names.numbers}
        statistics = {"mean": mean, "rstd": rstd}
        kept = {name: s if s is None else memory.contiguous(s) for name, s in statistics.items()}
        addresses = {name: 0 if s is None else memory.address(s) for name, s in kept.items()}
        addresses |= {f"d_{name}": memory.address(array) for name, array in found.items()}
        of_sum = clusters * partials_stride(n)
        sums = spec.sums_over_rows
        partials = memory.scratch((max(1, len(sums)) * of_sum,), compute, x)
        addresses["partials"] = memory.address(partials)
        numbers = {"n_rows": call.m, "n_cols": n, "inv_n": 1 / n}
        operands, stream = call.operands | addresses, memory.stream(device)
        arguments = backward_op(spec).arguments
        blocks = clusters * config.cluster_blocks
        _launch(plan.kernels[0], blocks, arguments, numbers, operands, stream)
        given_by_name = {"weight": given.weight, "bias": given.bias, **given.inputs}
        of_sums = {"n_partials": clusters, "n_cols": n}
        columns = reduction_of_gradients(max(1, len(sums)), compute, n).columns
        for j, kernel in enumerate(plan.kernels[1:]):
            pair = sums[2 * j : 2 * j + 2]
            for name, dtype in pair:
                found[name] = memory.empty(tuple(given_by_name[name].shape), dtype, x)
            targets = [memory.address(found[name]) for name, _ in pair]
            source = addresses["partials"] + 2 * j * of_sum * ITEMSIZE[compute]
            launch = kernel.prepared(len(pair) * -(-n // columns), of_sums)
            launch(stream, (source, *targets, *(0 for _ in range(2 - len(pair)))))
    for name, array in found.items():
        own = x if name == "x" else given_by_name[name]
        if tuple(array.shape) != tuple(own.shape) or memory.dtype(array) != memory.dtype(own):
            found[name] = memory.summed(array, tuple(own.shape), memory.dtype(own))
    return found
