"""A pass as an operation that JAX may batch, and split over devices.

The kinds of its arrays decide how. Rows may be split over their leading axes, and their last k axes
are whole. A statistic has only the leading axes, and bits and scales have more. A vector broadcasts
to x. It is split along the leading axes along which it varies, and is the same on the other
devices. If it is a result, it is the sum over these. A dbias has the weight's shape; without a
weight, that of the last k axes.

The layers are, from inner to outer: the kernel, or the formula where there is no kernel; the split
over devices; the batching. JAX can differentiate none of them, so derivatives are defined outside.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cupynorm._groups import groups_of
from cupynorm._operation import (
    KINDS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    Options,
    Spec,
    shapes_of_results,
    sharing,
)
from cupynorm.jax import _formula, _kernels
from cupynorm.jax._vectors import for_each, readable, sum_to

__all__ = [
    "Operation",
    "explicit_split",
    "is_inside",
    "repeated",
    "split",
    "split_as",
    "split_of",
    "varying_alike",
]

Arrays = Any  # a tuple of arrays, or of JAX's stand-ins for them


@dataclass(frozen=True)
class Operation:
    """A pass over the last k axes. Which rows share a vector is told by the shapes of a call."""

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

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of its arrays by name."""
        return KINDS

    @property
    def numbers(self) -> dict[str, Any]:
        """What a launch is told in addition to sizes, by name."""
        return {"eps": self.options.eps, "relu": self.options.relu}

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that have kernels."""
        return _kernels.platforms()

    def x_of(self, operands: Any) -> Any:
        """Return the item of x among items of the operands."""
        return operands[self.operands.index("x")]

    def named(self, operands: Any) -> dict[str, Any]:
        """Return the items of operands by name, None for absent ones."""
        named = dict(zip(self.operands, operands, strict=True))
        return dict.fromkeys(self.spec.table.reads) | named

    def formula(self, *operands: Any) -> Arrays:
        """Return the results as jax.numpy computes them."""
        computed = _formula.FORMULAS[self.spec.table](self.spec, self.options, self.named(operands))
        return tuple(computed[name] for name in self.results)

    def kernel(self, platform: str, *operands: Any) -> Arrays:
        """Return the results as the kernels of a platform compute them."""
        shape, k = self.x_of(operands).shape, self.options.k
        wanted = shapes_of_results(self.spec, k, self.named(operands))
        arrays = dict(zip(self.operands, operands, strict=True))
        vectors = {name: a for name, a in arrays.items() if KINDS[name] is Kind.VECTOR}
        arrays |= readable(shape, k, vectors)
        types = jax.eval_shape(self.formula, *arrays.values())
        results = dict(zip(self.results, types, strict=True))
        shapes = {name: array.shape for name, array in (arrays | results).items()}
        groups = groups_of(shape, k, shapes.get("weight"), shapes.get("bias", shapes.get("dbias")))
        made = _kernels.call(
            platform,
            replace(self.spec, **sharing(groups)),
            math.prod(shape[:-k]),
            math.prod(shape[-k:]),
            groups,
            self.numbers,
            arrays,
            results,
        )
        return tuple(
            sum_to(array, wanted[name]) if KINDS[name] is Kind.VECTOR else array
            for name, array in zip(self.results, made, strict=True)
        )

    def shapes(self, operands: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results by name."""
        return shapes_of_results(self.spec, self.options.k, self.named(operands))

    def local(self, *operands: Any) -> Arrays:
        """Return the results for the rows of one device."""
        kernels = {p: functools.partial(self.kernel, p) for p in self.platforms}
        return jax.lax.platform_dependent(*operands, default=self.formula, **kernels)

    def local_sum(
        self,
        kept: Any,
        splits: dict[str, PartitionSpec],
        *operands: Any,
        has_rows: Any = True,
    ) -> Arrays:
        """Return the same, if the leading axes of rows are split as `kept`, and arrays so.

        `has_rows`: whether the device has any, of those that are not padding.
        """

        def summed(name: str, array: Any) -> Any:
            array = array if has_rows is True else jnp.where(has_rows, array, 0)
            own = _axes_of(splits[name])
            others = tuple(axis for axis in _axes_of(kept) if axis not in own)
            # XLA takes no sum over axes that are one device together. JAX's types may ask for one.
            split = math.prod(map(jax.lax.axis_size, others)) > 1
            tracked = not jax.typeof(array).manual_axis_type.varying.isdisjoint(others)
            return jax.lax.psum(array, others) if split or tracked else array

        return tuple(
            summed(name, array) if self.kinds[name] is Kind.VECTOR else array
            for name, array in zip(self.results, self.local(*operands), strict=True)
        )

    def splits(self, kept: Any, operands: Any) -> dict[str, PartitionSpec]:
        """Return how all arrays are split where the leading axes of rows are split as `kept`."""
        ndim = len(self.x_of(operands).shape)
        shapes = {n: a.shape for n, a in zip(self.operands, operands, strict=True)}
        shapes |= self.shapes(operands)
        return {n: split_of(self.kinds[n], shape, kept, ndim) for n, shape in shapes.items()}

    def without_padding(self, valid: dict[int, Any], local: Arrays) -> Arrays:
        """Return a device's operands without what lies outside the whole array.

        `valid`: how many places are inside, at most 0 if none is, of each axis that is padded.
        """
        mask = is_inside(valid, self.x_of(local).shape)

        def masked(kind: Kind, array: Any) -> Any:
            if kind is Kind.VECTOR:
                return array
            rows = jnp.expand_dims(mask, tuple(range(mask.ndim, array.ndim)))
            # Zeros with a mean and an rstd of 1: nothing of such a row is out of range.
            return jnp.where(rows, array, int(kind is Kind.STATISTIC))

        return tuple(map(masked, map(self.kinds.__getitem__, self.operands), local))

    def __call__(self, *operands: Any) -> Arrays:
        return _batched(self)(*operands)

    def by_name(self, **arrays: Any) -> dict[str, Any]:
        """Return the results by name, from arrays by name. None stands for an absent one."""
        results = self(*(arrays[name] for name in self.operands))
        return dict(zip(self.results, results, strict=True))


# ---- over devices --------------------------------------------------------------------------------


def split(operation: Operation, *operands: Any) -> Arrays:
    """Return the results. Each device computes those of its rows."""
    x = operation.x_of(operands)
    if x.size == 0:
        return operation.formula(*operands)
    kept = jax.typeof(x).sharding.spec[: -operation.options.k]
    mesh, axes = jax.typeof(x).sharding.mesh, _axes_of(kept)
    if axes:
        # An Explicit mesh says in the types how x is split, and no partitioner is asked.
        inside = jax.sharding.get_abstract_mesh()
        with jax.sharding.use_abstract_mesh(mesh) if inside.empty else contextlib.nullcontext():
            splits = operation.splits(kept, operands)
            mapped = jax.shard_map(
                functools.partial(operation.local_sum, kept, splits),
                in_specs=tuple(map(splits.__getitem__, operation.operands)),
                out_specs=tuple(map(splits.__getitem__, operation.results)),
                axis_names=set(axes),
                # Within a shard_map over other axes, the results vary along those as x does.
                check_vma=bool(jax.typeof(x).manual_axis_type.varying),
            )
            # Outside of jit, JAX cannot map over some of a mesh's axes.
            return jax.jit(mapped)(*operands)
    kinds = jax.sharding.get_abstract_mesh().axis_types
    # If all axes are Explicit, none splits an array whose type does not say so.
    if AxisType.Manual in kinds or (kinds and AxisType.Auto not in kinds):
        return operation.local(*operands)
    return _partitioned(operation)(*operands)


def split_as(like: Any, array: Any, spec: PartitionSpec | None = None) -> Any:
    """Return an array split over an Explicit mesh as another one is, or by a spec of its own.

    If the other is on no mesh, the array stays on its own.
    """
    sharding, own = jax.typeof(like).sharding, jax.typeof(array).sharding
    spec = sharding.spec if spec is None else spec
    if own.spec == spec:
        return array
    mesh = own.mesh if sharding.mesh.empty else sharding.mesh
    return jax.sharding.reshard(array, NamedSharding(mesh, spec))


def repeated(like: Any, array: Any, size: int) -> Any:
    """Return an array for each example of a batch that is split as another one's is."""
    shape, sharding = (size, *array.shape), jax.typeof(like).sharding
    of_batch, *_ = sharding.spec
    if of_batch is None:
        return jnp.broadcast_to(array, shape)
    spec = PartitionSpec(of_batch, *jax.typeof(array).sharding.spec)
    return jnp.broadcast_to(array, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def varying_alike(arrays: list[Any]) -> list[Any]:
    """Return arrays that vary over the same axes of a surrounding shard_map, if JAX tracks them."""

    def varying(array: Any) -> Any:
        return jax.typeof(array).manual_axis_type.varying

    axes = frozenset().union(*(varying(a) for a in arrays if a is not None))
    return [
        a
        if a is None or axes == varying(a)
        else jax.lax.pcast(a, tuple(axes - varying(a)), to="varying")
        for a in arrays
    ]


@functools.cache
def _partitioned(operation: Operation) -> Any:
    """Return the operation for XLA's partitioner, which splits it in an Auto mesh."""

    def computed(*operands: Any) -> Arrays:
        return operation.local(*operands)

    def rule(mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        ndim = operation.x_of(operands).rank
        kept = [f"b{i}" for i in range(ndim - operation.options.k)]
        whole = [f"n{i}" for i in range(operation.options.k)]
        dims = {
            Kind.ROWS: [*kept, *whole],
            Kind.STATISTIC: kept,
            Kind.BITS: [*kept, "bytes"],
            Kind.SCALES: [*kept, *(f"{factor}s" for factor in whole)],
        }

        # Vectors have their own, lest they pass on to x how they are split.
        own = [f"{factor}v" for factor in (*kept, *whole)]

        def of_vector(shape: Any) -> list[str]:
            axes = range(ndim - len(shape), ndim)
            return [f"one{i}" if n == 1 else own[i] for i, n in zip(axes, shape, strict=True)]

        types = zip((*operation.operands, *operation.results), (*operands, *results), strict=True)
        sides = [
            " ".join(of_vector(a.shape) if kind is Kind.VECTOR else dims[kind])
            for kind, a in ((operation.kinds[name], a) for name, a in types)
        ]
        count = len(operation.operands)
        of_rows = {*kept, *own[: len(kept)]}
        # A factor may be named only if it occurs, and in that order.
        uncut = dict.fromkeys(factor for side in sides for factor in side.split())
        return (
            f"{', '.join(sides[:count])} -> {', '.join(sides[count:])}",
            {"need_replication_factors": tuple(f for f in uncut if f not in of_rows)},
        )

    def shardings(operands: Any) -> tuple[Any, Any, Arrays, Arrays]:
        """Return a mesh, how kept axes are split over it, and how results and operands are."""
        x, named = operation.x_of(operands), zip(operation.operands, operands, strict=True)
        kinds = operation.kinds
        rows = [x, *(a for name, a in named if kinds[name] is Kind.ROWS and name != "x")]
        mesh, kept = _common_split([a.sharding for a in rows], len(x.shape), operation.options.k)
        splits = operation.splits(kept, operands)
        of_results, of_operands = (
            tuple(NamedSharding(mesh, splits[name]) for name in names)
            for names in (operation.results, operation.operands)
        )
        return mesh, kept, of_results, of_operands

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        mesh, kept, of_results, of_operands = shardings(operands)
        # Of the spec as well: no array has the dtype of a y that is quantized.
        dtypes = *vars(operation.spec).values(), *(a.dtype.name for a in (*operands, *results))
        has_float64 = "float64" in dtypes

        def lowered(*local: Any) -> Arrays:
            # XLA calls from its own thread, where the caller's enable_x64 is not in force.
            with jax.enable_x64(has_float64):
                has_rows: Any = True
                if Kind.VECTOR in map(operation.kinds.__getitem__, operation.results):
                    shape = operation.x_of(operands).shape
                    local, has_rows = _without_padding(operation, mesh, kept, shape, local)
                splits = operation.splits(kept, operands)
                return operation.local_sum(kept, splits, *local, has_rows=has_rows)

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
) -> tuple[Arrays, Any]:
    """Return a device's operands without what lies outside the whole array, of a given shape.

    And return whether anything is left. XLA pads an axis that its devices do not divide. The
    padding may hold anything.
    """
    here = operation.x_of(local).shape[: len(kept)]
    valid = {}
    for i, names in enumerate(kept):
        if here[i] * math.prod(mesh.shape[name] for name in names) == shape[i]:
            continue
        device = 0
        for name in names:
            device = device * mesh.shape[name] + jax.lax.axis_index(name)
        valid[i] = shape[i] - device * here[i]
    if not valid:
        return local, True
    has_rows = functools.reduce(operator.and_, (n > 0 for n in valid.values()))
    return operation.without_padding(valid, local), has_rows


def is_inside(valid: dict[int, Any], shape: tuple[int, ...]) -> Any:
    """Return which rows of a shape are inside, along the axes before the last padded one."""
    here = shape[: max(valid) + 1]
    inside = (jax.lax.broadcasted_iota(jnp.int32, here, i) < n for i, n in valid.items())
    return functools.reduce(operator.and_, inside)


def _axes_of(spec: Any) -> tuple[str, ...]:
    """Return the mesh's axes that a partition spec names."""
    return tuple(
        axis
        for entry in spec
        for axis in (() if entry is None else entry if isinstance(entry, tuple) else (entry,))
    )


def explicit_split(k: int, x: Any, *others: Any) -> tuple[Any, PartitionSpec]:
    """Return which of some arrays has the Explicit mesh of all, and how results are split over it.

    They are split as x is. Along axes that x does not split they are split as the others are, over
    the rest of the mesh. Others may be None.
    """
    like, spec = x, jax.typeof(x).sharding.spec
    for other in others:
        if other is None:
            continue
        of_other = jax.typeof(other).sharding.spec
        if not any(spec):
            like, spec = other, of_other
            continue
        entries = list(spec)
        for i, entry in enumerate(of_other[: x.ndim - k]):
            if entries[i] is None and not set(_axes_of([entry])) & set(_axes_of(entries)):
                entries[i] = entry
        spec = PartitionSpec(*entries)
    return like, spec


def split_of(kind: Kind, shape: tuple[int, ...], kept: Any, ndim: int) -> PartitionSpec:
    """Return how an array of a kind is split where the leading axes of rows are split as `kept`.

    `ndim` is the number of axes of rows. An axis of size 1 of a vector is not split, nor are the
    last ones.
    """
    if kind is not Kind.VECTOR:
        return PartitionSpec(*kept, *(len(shape) - len(kept)) * (None,))
    of_rows = [*kept, *(ndim - len(kept)) * (None,)][ndim - len(shape) :]
    return PartitionSpec(*(None if n == 1 else of for n, of in zip(shape, of_rows, strict=True)))


# ---- batched -------------------------------------------------------------------------------------


@functools.cache
def _batched(operation: Operation) -> Any:
    def call(*operands: Any) -> Arrays:
        return split(operation, *operands)

    def rule(size: int, batched: list[bool], *operands: Any) -> tuple[Arrays, tuple[bool, ...]]:
        """Return the results of one call, in which each example is a group of rows."""
        spec, given = operation.spec, operation.named(operands)
        there = dict(zip(operation.operands, batched, strict=True))
        x, like = given["x"], operands[batched.index(True)]
        if isinstance(spec, BackwardSpec) and spec.dbias and spec.weight is None:
            # Ones give dbias a shape for each example.
            spec = replace(spec, weight=spec.dbias)
            row = x.shape[x.ndim - operation.options.k :]
            given["weight"], there["weight"] = jnp.ones_like(given["dy"], spec.dbias, row), False
        ndim, inserted = x.ndim - there["x"], 0
        for name, is_there in there.items():
            is_vector = operation.kinds[name] is Kind.VECTOR
            # Vectors may be shared, but where they have a gradient it is one for each example.
            shared = is_vector and isinstance(spec, ForwardSpec)
            if not is_there and not shared:
                given[name] = repeated(like, given[name], size)
            if is_vector and (is_there or not shared):
                inserted = ndim + 1 - given[name].ndim
                given[name] = for_each(given[name], ndim)
        made = replace(operation, spec=spec).by_name(**given)
        results = (
            jax.lax.squeeze(made[name], tuple(range(1, 1 + inserted)))
            if KINDS[name] is Kind.VECTOR
            else made[name]
            for name in operation.results
        )
        return tuple(results), (True,) * len(operation.results)

    batched = custom_vmap(call)
    batched.def_vmap(rule)
    # For calls outside of jit, those of an eager jax.grad included.
    return jax.jit(batched, inline=True)
