"""A pass as an operation that JAX may batch, and split over devices.

The kinds of its arrays decide how. Rows may be split over their leading axes, and their last k axes
are whole. A statistic has only the leading axes, and bits have one more. A vector has only the last
k axes and is the same on each device. If it is a result, it is the sum over the devices.

The layers are, from inner to outer: the kernel, or the formula where there is no kernel; the split
over devices; the batching. JAX can differentiate none of them, so derivatives are defined outside.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cupynorm._operation import KINDS, Kind, Options, Spec
from cupynorm.jax import _formula, _kernels

__all__ = ["Operation", "axes_of", "split_as"]

Arrays = Any  # a tuple of arrays, or of JAX's stand-ins for them


@dataclass(frozen=True)
class Operation:
    """A pass over the last k axes."""

    spec: Spec
    options: Options

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the arrays that it takes."""
        return self.spec.reads

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the arrays that it returns."""
        return self.spec.writes

    def x_of(self, operands: Any) -> Any:
        """Return the item of x among items of the operands."""
        return operands[self.operands.index("x")]

    def formula(self, *operands: Any) -> Arrays:
        """Return the results as jax.numpy computes them."""
        arrays = dict.fromkeys(self.spec.table.reads)
        arrays |= zip(self.operands, operands, strict=True)
        computed = _formula.FORMULAS[self.spec.table](self.spec, self.options, arrays)
        return tuple(computed[name] for name in self.results)

    def kernel(self, platform: str, *operands: Any) -> Arrays:
        """Return the results as the kernels of a platform compute them."""
        shape, k = self.x_of(operands).shape, self.options.k
        types = jax.eval_shape(self.formula, *operands)
        return _kernels.call(
            platform,
            self.spec,
            math.prod(shape[:-k]),
            math.prod(shape[-k:]),
            {"eps": self.options.eps, "relu": self.options.relu},
            dict(zip(self.operands, operands, strict=True)),
            dict(zip(self.results, types, strict=True)),
        )

    def local(self, *operands: Any) -> Arrays:
        """Return the results for the rows of one device."""
        kernels = {p: functools.partial(self.kernel, p) for p in _kernels.platforms()}
        return jax.lax.platform_dependent(*operands, default=self.formula, **kernels)

    def local_sum(self, axes: tuple[str, ...], *operands: Any) -> Arrays:
        """Return the same, if other devices along these axes of the mesh hold other rows."""
        results = zip(self.results, self.local(*operands), strict=True)
        return tuple(
            jax.lax.psum(array, axes) if axes and KINDS[name] is Kind.VECTOR else array
            for name, array in results
        )

    def __call__(self, *operands: Any) -> Arrays:
        return _batched(self)(*operands)

    def by_name(self, **arrays: Any) -> dict[str, Any]:
        """Return the results by name, from arrays by name. None stands for an absent one."""
        results = self(*(arrays[name] for name in self.operands))
        return dict(zip(self.results, results, strict=True))


# ---- over devices --------------------------------------------------------------------------------


def _split(operation: Operation, *operands: Any) -> Arrays:
    """Return the results. Each device computes those of its rows."""
    x = operation.x_of(operands)
    if x.size == 0:
        return operation.formula(*operands)
    kept = jax.typeof(x).sharding.spec[: -operation.options.k]
    mesh, axes = jax.typeof(x).sharding.mesh, axes_of(kept)
    # XLA takes no sum over axes that are one device together.
    if math.prod(mesh.shape[axis] for axis in axes) > 1:
        # An Explicit mesh says in the types how x is split, and no partitioner is asked.
        inside = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh) if inside.empty else contextlib.nullcontext():
            return jax.shard_map(
                functools.partial(operation.local_sum, axes),
                in_specs=tuple(
                    _split_of(name, kept, operation.options.k) for name in operation.operands
                ),
                out_specs=tuple(
                    _split_of(name, kept, operation.options.k) for name in operation.results
                ),
                axis_names=set(axes),
                # Within a shard_map over other axes, the results vary along those as x does.
                check_vma=bool(jax.typeof(x).manual_axis_type.varying),
            )(*operands)
    kinds = jax.sharding.get_abstract_mesh().axis_types
    # If all axes are Explicit, none splits an array whose type does not say so.
    if AxisType.Manual in kinds or (kinds and AxisType.Auto not in kinds):
        return operation.local(*operands)
    return _partitioned(operation)(*operands)


def split_as(like: Any, array: Any, spec: PartitionSpec | None = None) -> Any:
    """Return an array split over an Explicit mesh as another one is, or by a spec of its own."""
    sharding = jax.typeof(like).sharding
    spec = sharding.spec if spec is None else spec
    if jax.typeof(array).sharding.spec == spec:
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))


@functools.cache
def _partitioned(operation: Operation) -> Any:
    """Return the operation for XLA's partitioner, which splits it in an Auto mesh."""

    def computed(*operands: Any) -> Arrays:
        return operation.local(*operands)

    def rule(mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        kept = [f"b{i}" for i in range(operation.x_of(operands).rank - operation.options.k)]
        whole = [f"n{i}" for i in range(operation.options.k)]
        # A weight has its own, lest it pass on to x how it is split along other axes.
        vector = [f"w{i}" for i in range(operation.options.k)]
        dims = {
            Kind.ROWS: [*kept, *whole],
            Kind.STATISTIC: kept,
            Kind.BITS: [*kept, "bytes"],
            Kind.VECTOR: vector,
        }
        names = [*operation.operands, *operation.results]
        sides = [" ".join(dims[KINDS[name]]) for name in names]
        count = len(operation.operands)
        # A factor may be named only if it occurs, and in that order.
        uncut = dict.fromkeys(factor for side in sides for factor in side.split())
        return (
            f"{', '.join(sides[:count])} -> {', '.join(sides[count:])}",
            {"need_replication_factors": tuple(f for f in uncut if f not in kept)},
        )

    def shardings(operands: Any) -> tuple[Any, Any, Arrays, Arrays]:
        """Return a mesh, how kept axes are split over it, and how results and operands are."""
        x, named = operation.x_of(operands), zip(operation.operands, operands, strict=True)
        rows = [x, *(a for name, a in named if KINDS[name] is Kind.ROWS and name != "x")]
        mesh, kept = _common_split([a.sharding for a in rows], len(x.shape), operation.options.k)
        of_results, of_operands = (
            tuple(NamedSharding(mesh, _split_of(name, kept, operation.options.k)) for name in names)
            for names in (operation.results, operation.operands)
        )
        return mesh, kept, of_results, of_operands

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        mesh, kept, of_results, of_operands = shardings(operands)
        has_float64 = any(array.dtype == jnp.float64 for array in (*operands, *results))

        def lowered(*local: Any) -> Arrays:
            # XLA calls from its own thread, where the caller's enable_x64 is not in force.
            with jax.enable_x64(has_float64):
                if Kind.VECTOR in map(KINDS.__getitem__, operation.results):
                    shape = operation.x_of(operands).shape
                    local = _without_padding(operation, mesh, kept, shape, local)
                return operation.local_sum(axes_of(kept), *local)

        return mesh, lowered, of_results, of_operands

    def infer(mesh: Any, operands: Any, results: Any) -> Arrays:
        return shardings(operands)[2]

    split = custom_partitioning(computed)
    split.def_partition(
        partition,
        infer_sharding_from_operands=infer,  # instead of the rule, if JAX is told to
        decode_shardings=False,
        sharding_rule=rule,
    )
    return split


def _common_split(shardings: Any, ndim: int, k: int) -> tuple[AbstractMesh, Any]:
    """Return a mesh, and a split over it of kept axes, from arrays that each split them.

    Each axis follows the first of those arrays that cut it into the most parts. The others are then
    cut where they lie, and none is gathered. If two split different axes over the same devices, the
    earlier one prevails.
    """
    known = [_places(sharding, ndim)[:, : ndim - k] for sharding in shardings if sharding]
    common, *others = known or [np.zeros((1, ndim - k))]
    for places in others:
        for i in range(ndim - k):
            if len(set(places[:, i])) > len(set(common[:, i])):
                finer = common.copy()
                finer[:, i] = places[:, i]
                if _mesh_of(finer)[0].axis_names:
                    common = finer
    return _mesh_of(common)


def _places(sharding: Any, ndim: int) -> Any:
    """Return where along each axis of an array the part of each device begins."""
    count = sharding.num_devices
    parts = sharding.devices_indices_map(ndim * (count,)).values()
    return np.array([[axis.start or 0 for axis in part] for part in parts])


def _mesh_of(places: Any) -> tuple[AbstractMesh, tuple[tuple[str, ...], ...]]:
    """Return a mesh, and the spec of an array over it, from where the array's parts begin.

    The program's own mesh may not do. XLA splits one of its axes between several axes of an array
    that was reshaped, and may know of no mesh. So the axes are the digits of a device's number.
    """
    ndim = places.shape[1]
    axes: list[tuple[int, Any]] = []  # of each axis the size, and the distance of neighbours
    while len(places) > 1:
        for size in range(2, len(places) + 1):
            if len(places) % size == 0:
                digits = places.reshape(-1, size, ndim)
                step = digits[0, 1] - digits[0, 0]
                regular = digits == digits[:, :1] + np.arange(size)[:, None] * step
                if regular.all() and (step >= 0).all() and np.count_nonzero(step) < 2:
                    break
        else:
            return AbstractMesh((), ()), ndim * ((),)  # no mesh has devices in such an order
        axes.insert(0, (size, step))
        places = digits[:, 0]
    names = [f"axis{i}" for i in range(len(axes))]
    mesh = AbstractMesh(tuple(size for size, _ in axes), tuple(names))
    spec = []
    for i in range(ndim):
        along = [(step[i], name) for name, (_, step) in zip(names, axes, strict=True) if step[i]]
        spec.append(tuple(name for _, name in sorted(along, reverse=True)))
    return mesh, tuple(spec)


def _without_padding(
    operation: Operation, mesh: Any, kept: Any, shape: tuple[int, ...], local: Arrays
) -> Arrays:
    """Return a device's operands without what lies outside the whole array, of a given shape.

    XLA pads an axis that its devices do not divide. The padding may hold anything.
    """
    here = operation.x_of(local).shape[: len(kept)]
    inside = []
    for i, names in enumerate(kept):
        if here[i] * math.prod(mesh.shape[name] for name in names) == shape[i]:
            continue
        device = 0
        for name in names:
            device = device * mesh.shape[name] + jax.lax.axis_index(name)
        inside.append(device * here[i] + jax.lax.broadcasted_iota(jnp.int32, here, i) < shape[i])
    if not inside:
        return local
    mask = functools.reduce(operator.and_, inside)

    def masked(kind: Kind, array: Any) -> Any:
        if kind is Kind.VECTOR:
            return array
        rows = jnp.expand_dims(mask, tuple(range(mask.ndim, array.ndim)))
        # Zeros with a mean and an rstd of 1: nothing of such a row is out of range.
        return jnp.where(rows, array, int(kind is Kind.STATISTIC))

    return tuple(map(masked, map(KINDS.__getitem__, operation.operands), local))


def axes_of(spec: Any) -> tuple[str, ...]:
    """Return the mesh's axes that a partition spec names."""
    return tuple(
        axis
        for entry in spec
        for axis in (() if entry is None else entry if isinstance(entry, tuple) else (entry,))
    )


def _split_of(name: str, kept: Any, k: int) -> PartitionSpec:
    """Return how an array is split where the leading axes of rows are split as `kept`."""
    kind = KINDS[name]
    whole = {Kind.STATISTIC: 0, Kind.BITS: 1}.get(kind, k)  # axes that are not split
    return PartitionSpec(*(() if kind is Kind.VECTOR else kept), *whole * (None,))


# ---- batched -------------------------------------------------------------------------------------


@functools.cache
def _batched(operation: Operation) -> Any:
    def call(*operands: Any) -> Arrays:
        return _split(operation, *operands)

    def rule(size: int, batched: list[bool], *operands: Any) -> tuple[Arrays, tuple[bool, ...]]:
        vectors = [KINDS[name] is Kind.VECTOR for name in operation.operands]
        axes = tuple(0 if there else None for there in batched)
        by_formula = jax.vmap(operation.formula, in_axes=axes, axis_size=size)(*operands)
        everywhere = (True,) * len(by_formula)
        if any(map(operator.and_, vectors, batched)):
            # A vector that differs from one part of the batch to the next has no kernel.
            return by_formula, everywhere
        given = [
            a if there or is_vector else jnp.broadcast_to(a, (size, *a.shape))
            for is_vector, a, there in zip(vectors, operands, batched, strict=True)
        ]
        # The batch is a leading axis like others, except for results that are summed over those.
        together = operation(*given)
        return tuple(
            formula if KINDS[name] is Kind.VECTOR else kernel
            for name, formula, kernel in zip(operation.results, by_formula, together, strict=True)
        ), everywhere

    batched = custom_vmap(call)
    batched.def_vmap(rule)
    # For calls outside of jit, those of an eager jax.grad included.
    return jax.jit(batched, inline=True)
