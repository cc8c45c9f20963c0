"""A forward or a backward pass as an operation that JAX may batch, and split over devices.

Its arrays are of four kinds. Of `rows`, leading axes may be split, and the last k are whole; a
`statistic` has the leading axes alone, and `bits` have one more; a `row` has the last k alone, the
same on each device: where it is a result, it is the sum over theirs.

From inner to outer: the kernel, or the formula where there is none; what splits it over devices;
what batches it. Neither of these can be differentiated, so that derivatives are defined outside.
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cupynorm._spec import BackwardSpec, ForwardSpec
from cupynorm.jax import _formula, _kernels

__all__ = ["Backward", "Forward"]

ROWS, ROW, STATISTIC, BITS = "rows", "row", "statistic", "bits"
KINDS = {
    **dict.fromkeys(("x", "y", "dx", "dy"), ROWS),
    **dict.fromkeys(("weight", "bias", "dweight", "dbias"), ROW),
    **dict.fromkeys(("mean", "rstd"), STATISTIC),
    "bitmask": BITS,
}

Arrays = Any  # a tuple, of what JAX makes of arrays


@dataclass(frozen=True)
class _Operation:
    """What is computed over the last k axes; the first operand consists of rows."""

    spec: Any
    k: int
    eps: float = 0.0
    relu: _formula.Relu = None

    @property
    @abstractmethod
    def operands(self) -> tuple[str, ...]:
        """The names of the arrays that it takes."""

    @property
    @abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names of the arrays that it returns."""

    @abstractmethod
    def formula(self, *operands: Any) -> Arrays:
        """Return the results as jax.numpy computes them."""

    def kernel(self, platform: str, *operands: Any) -> Arrays:
        """Return the results as the kernels of a platform compute them."""
        shape = operands[0].shape
        types = jax.eval_shape(self.formula, *operands)
        return _kernels.call(
            platform,
            self.spec,
            math.prod(shape[: -self.k]),
            math.prod(shape[-self.k :]),
            {"eps": self.eps, "relu": self.relu},
            dict(zip(self.operands, operands, strict=True)),
            dict(zip(self.results, types, strict=True)),
        )

    def local(self, *operands: Any) -> Arrays:
        """Return the results of what one device holds."""
        kernels = {p: functools.partial(self.kernel, p) for p in _kernels.platforms()}
        return jax.lax.platform_dependent(*operands, default=self.formula, **kernels)

    def local_sum(self, axes: tuple[str, ...], *operands: Any) -> Arrays:
        """Return the same, where other devices along these axes of the mesh hold other rows."""
        results = zip(self.results, self.local(*operands), strict=True)
        return tuple(
            jax.lax.psum(array, axes) if axes and KINDS[name] == ROW else array
            for name, array in results
        )

    def __call__(self, *operands: Any) -> Arrays:
        return _batched(self)(*operands)


class Forward(_Operation):
    """A forward pass, of a `ForwardSpec`."""

    spec: ForwardSpec

    @property
    def operands(self) -> tuple[str, ...]:
        return _present(x=True, weight=self.spec.weight, bias=self.spec.bias)

    @property
    def results(self) -> tuple[str, ...]:
        stored = self.spec.store_statistics
        mean = stored and self.spec.norm == "layer_norm"
        return _present(y=True, mean=mean, rstd=stored, bitmask=stored and self.spec.relu)

    def formula(self, *operands: Any) -> Arrays:
        given = dict(zip(self.operands, operands, strict=True))
        arrays = (given.get(name) for name in ("x", "weight", "bias"))
        result = _formula.forward(self.spec, self.k, self.eps, self.relu, *arrays)
        named = dict(zip(("y", "mean", "rstd", "bitmask"), result, strict=True))
        return tuple(named[name] for name in self.results)


class Backward(_Operation):
    """A backward pass, of a `BackwardSpec`."""

    spec: BackwardSpec

    @property
    def operands(self) -> tuple[str, ...]:
        spec, mean = self.spec, self.spec.norm == "layer_norm"
        return _present(
            x=True, dy=True, weight=spec.weight, mean=mean, rstd=True, bitmask=spec.bitmask
        )

    @property
    def results(self) -> tuple[str, ...]:
        return _present(dx=True, dweight=self.spec.weight, dbias=self.spec.dbias)

    def formula(self, *operands: Any) -> Arrays:
        given = dict(zip(self.operands, operands, strict=True))
        names = ("dy", "x", "weight", "mean", "rstd", "bitmask")
        arrays = (given.get(name) for name in names)
        result = _formula.backward(self.spec, self.k, *arrays)
        return tuple(array for array in result if array is not None)


def _present(**arrays: Any) -> tuple[str, ...]:
    return tuple(name for name, there in arrays.items() if there)


# ---- over devices --------------------------------------------------------------------------------


def _split(operation: _Operation, *operands: Any) -> Arrays:
    """Return the results, each device computing those of its rows."""
    x = operands[0]
    if x.size == 0:
        return operation.formula(*operands)
    kept = jax.typeof(x).sharding.spec[: -operation.k]
    axes = _axes(kept)
    if axes:
        # An Explicit mesh says in the types how x is split, where no partitioner is asked.
        mesh = jax.typeof(x).sharding.mesh
        inside = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh) if inside.empty else contextlib.nullcontext():
            return jax.shard_map(
                functools.partial(operation.local_sum, axes),
                in_specs=tuple(_spec(name, kept, operation.k) for name in operation.operands),
                out_specs=tuple(_spec(name, kept, operation.k) for name in operation.results),
                axis_names=set(axes),
                # Within a shard_map over other axes, the results vary along those as x does.
                check_vma=bool(jax.typeof(x).manual_axis_type.varying),
            )(*operands)
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return operation.local(*operands)
    return _partitioned(operation)(*operands)


@functools.cache
def _partitioned(operation: _Operation) -> Any:
    """Return the operation as what XLA's partitioner splits, in an Auto mesh."""

    def computed(*operands: Any) -> Arrays:
        return operation.local(*operands)

    def rule(mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        kept = [f"b{i}" for i in range(operands[0].rank - operation.k)]
        whole = [f"n{i}" for i in range(operation.k)]
        # Of a weight's own, lest it pass on to x how it is split itself, along other axes.
        of_row = [f"w{i}" for i in range(operation.k)]
        dims = {ROWS: [*kept, *whole], STATISTIC: kept, BITS: [*kept, "bytes"], ROW: of_row}
        sides = (
            ", ".join(" ".join(dims[KINDS[name]]) for name in names)
            for names in (operation.operands, operation.results)
        )
        text = " -> ".join(sides)
        # A factor may be named only where it occurs.
        uncut = tuple(factor for factor in (*whole, *of_row, "bytes") if factor in text)
        return text, {"need_replication_factors": uncut}

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        kept = operands[0].sharding.spec[: -operation.k]

        def shardings(names: tuple[str, ...]) -> Arrays:
            return tuple(NamedSharding(mesh, _spec(name, kept, operation.k)) for name in names)

        def lowered(*local: Any) -> Arrays:
            return operation.local_sum(_axes(kept), *local)

        return mesh, lowered, shardings(operation.results), shardings(operation.operands)

    split = custom_partitioning(computed)
    split.def_partition(partition, sharding_rule=rule)
    return split


def _axes(spec: Any) -> tuple[str, ...]:
    """Return the mesh's axes that a partition spec names."""
    return tuple(
        axis
        for entry in spec
        for axis in (() if entry is None else entry if isinstance(entry, tuple) else (entry,))
    )


def _spec(name: str, kept: Any, k: int) -> PartitionSpec:
    """Return how an array is split where the leading axes of rows are split as `kept`."""
    kind = KINDS[name]
    whole = {STATISTIC: 0, BITS: 1}.get(kind, k)  # axes, which no device has a part of
    return PartitionSpec(*(() if kind == ROW else kept), *whole * (None,))


# ---- batched -------------------------------------------------------------------------------------


@functools.cache
def _batched(operation: _Operation) -> Any:
    def call(*operands: Any) -> Arrays:
        return _split(operation, *operands)

    def rule(size: int, batched: list[bool], *operands: Any) -> tuple[Arrays, tuple[bool, ...]]:
        names, results = operation.operands, operation.results
        axes = tuple(0 if there else None for there in batched)
        by_formula = jax.vmap(operation.formula, in_axes=axes, axis_size=size)(*operands)
        everywhere = (True,) * len(results)
        if any(there and KINDS[name] == ROW for name, there in zip(names, batched, strict=True)):
            # A row that differs from one part of the batch to the next has no kernel.
            return by_formula, everywhere
        given = [
            a if there or KINDS[name] == ROW else jnp.broadcast_to(a, (size, *a.shape))
            for name, a, there in zip(names, operands, batched, strict=True)
        ]
        # The batch is a leading axis like others, but for what is summed over those.
        together = operation(*given)
        return tuple(
            formula if KINDS[name] == ROW else kernel
            for name, formula, kernel in zip(results, by_formula, together, strict=True)
        ), everywhere

    batched = custom_vmap(call)
    batched.def_vmap(rule)
    # For calls outside of jit, those of an eager jax.grad included.
    return jax.jit(batched, inline=True)
