"""What a pass does on a device, prepared once: kernels, grids and scratch, on raw addresses.

Nothing here knows arrays: the calls of CuPy, torch and JAX meet here. A launch allocates, compiles
and synchronizes nothing. Addresses are integers, 0 for an absent array. Strides are in elements.
The device is the current one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

from cupynorm import _background, _compile
from cupynorm._driver import MOST_BLOCKS, Kernel, Launch, set_to_zero
from cupynorm._groups import Groups, clusters_of_group, time_of_waves
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardConfig,
    BackwardInRegisters,
    BackwardPipelined,
    BackwardStreaming,
    ForwardInRegisters,
    ForwardStreaming,
    Strided,
    backward_config,
    by_index,
    column_parallel_counts_bytes,
    column_parallel_exchange_bytes,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
    pack_length,
    partials_stride,
    quantized_config,
    strided,
    without_clusters,
)
from cupynorm._operation import (
    BACKWARD,
    ITEMSIZE,
    BackwardSpec,
    ForwardSpec,
    QuantizedSpec,
    compute_dtype,
)

__all__ = [
    "BackwardPlan",
    "ForwardPlan",
    "backward_plan",
    "forward_plan",
    "kernels_of",
    "quantized_plan",
    "strided_plan",
]

# The streaming backward's column kernel has 64 to 96 registers, so two to four blocks run.
COLUMN_BLOCKS_PER_MULTIPROCESSOR = 4

COUNT_BYTES = 16  # a count in device memory is an int; what follows it is aligned

# From so many rows a cluster on, a count hands them out. It has to be set to zero. LayerNorm of
# 16384 takes 73.1 us against 74.0 with 32 rows, and 41.0 against 40.3 with 16. RMSNorm of 65536
# takes 140.3 against 142.0 and 74.9 against 75.7, of 131072 69.9 against 70.5 and 38.9 against 38.3
# (bfloat16, H200).
LEAST_COUNTED = 32

_Ints = tuple[int, ...]  # addresses; a stride follows that of rows
# The operands of a backward pass: those before the weight gradients, these, and the rest. The last
# one is scratch.
_ROWS = slice(BACKWARD.operands.index("dweight"))
_GRADIENTS = slice(_ROWS.stop, BACKWARD.operands.index("dbias") + 1)
_BEHIND = slice(_GRADIENTS.stop, len(BACKWARD.operands))


def _sizes(m: int, n: int) -> dict[str, float]:
    """Return the numbers that every pass over m rows of n elements gets."""
    return {"n_rows": m, "n_cols": n, "inv_n": 1 / n}


def _shares(m: int, groups: Groups | None) -> tuple[int, int]:
    """Return how many rows a group has, and how many groups there are."""
    return (m, 1) if groups is None else (groups.rows, groups.count)


def _shared_by(most: int, n_groups: int, at_once: int) -> int:
    """Return by how many clusters each group's rows are shared, at most one for a row or block."""
    if n_groups == 1:
        return min(most, at_once)
    return clusters_of_group(most, n_groups, at_once) if most else 0


def _launch_nothing(stream: int, operands: _Ints) -> None:
    pass


def _zero_amax(stream: int, operands: _Ints) -> None:
    set_to_zero(stream, operands[-1], ITEMSIZE["float32"])


def _behind_zero(launch: Launch) -> Launch:
    """Return a launch that sets amax to zero first."""

    def launch_behind_zero(stream: int, operands: _Ints) -> None:
        _zero_amax(stream, operands)
        launch(stream, operands)

    return launch_behind_zero


@cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def architecture(device: int) -> int:
    """Return a device's compute capability, 90 for 9.0."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


@dataclass(frozen=True)
class ForwardPlan:
    """A forward pass over rows of n elements."""

    kernel: Kernel
    n: int
    rows_per_block: int
    cluster_blocks: int
    most_clusters: int | None  # that take several rows one after another; None if each takes one
    counted: bool  # whether many rows are handed out by a count
    as_one: bool = False  # whether groups are launched as one
    stands_in: bool = False  # for one with the same bits, whose kernel is being compiled
    finds_amax: bool = False  # the last operand, which rows raise from zero

    def scratch_bytes(self, m: int) -> int:
        """Return the bytes of scratch that a launch over m rows can use, for a count."""
        if not self.counted or self.most_clusters is None:
            return 0
        return COUNT_BYTES if m >= LEAST_COUNTED * self.most_clusters else 0

    def prepared(
        self, m: int, eps: float, lower: float, upper: float, groups: Groups | None = None
    ) -> Launch:
        """Return the launch over m rows, or groups of them. It takes a stream and operands.

        The operands are x, x_stride, weight, bias, y, y_stride, mean, rstd, bitmask and, if m rows
        can use it, scratch. If scratch is 0, rows are taken in turn.
        """
        rows, n_groups = _shares(m, None if self.as_one else groups)
        clusters = self._clusters(rows, n_groups)
        blocks = clusters * n_groups * self.cluster_blocks
        if blocks == 0:
            return _zero_amax if self.finds_amax else _launch_nothing
        numbers = _sizes(rows, self.n) | {"eps": eps, "lower": lower, "upper": upper}
        if groups is not None:
            numbers |= groups.numbers(self.n, clusters, as_one=self.as_one)
        if self.scratch_bytes(m) == 0:
            without_count = {} if self.most_clusters is None else {"count": 0}
            launch = self.kernel.prepared(blocks, numbers | without_count)
            return _behind_zero(launch) if self.finds_amax else launch
        launch_rows = self.kernel.prepared(blocks, numbers)

        def launch_with_count(stream: int, operands: _Ints) -> None:
            count = operands[-1]
            if count:
                set_to_zero(stream, count, COUNT_BYTES)
            launch_rows(stream, operands)

        return launch_with_count

    def _clusters(self, rows: int, n_groups: int) -> int:
        """Return how many clusters of blocks each group has."""
        clusters = -(-rows // self.rows_per_block)
        if self.most_clusters is None:
            return clusters
        return _shared_by(clusters, n_groups, self.most_clusters)


def forward_plan(
    spec: ForwardSpec, m: int, n: int, vector: int, device: int, *, soon: bool = False
) -> ForwardPlan:
    """Return a forward pass ready to launch on `device`, the current one; compile it if needed.

    It serves m rows, and all numbers of rows with the same kernel. Few rows may have a kernel of
    their own, with the same bits. If a plan is wanted `soon`, and its kernel is missing where
    another of these is loaded, that one stands in, and a thread compiles the kernel.
    """
    tiers = few_rows(spec, n, vector, device)
    config = next((config for most, config in tiers if m <= most), None)
    if soon:
        own = _forward_kernel(spec, n, vector, device, config)
        others = () if _background.is_wanted_now(own, device) else (*_configs(tiers),)
        for other in reversed(others):  # that of many first, and that of the fewest last
            if _compile.is_loaded(_forward_kernel(spec, n, vector, device, other), device):
                _background.start((own,), device)
                return replace(forward_plan_of(spec, n, vector, device, other), stands_in=True)
    return forward_plan_of(spec, n, vector, device, config)


def quantized_plan(
    spec: QuantizedSpec, m: int, n: int, vector: int, device: int, *, soon: bool = False
) -> ForwardPlan | None:
    """Return the `forward_plan` of a pass that quantizes y, None if no kernel serves it."""
    if quantized_config(spec, n, vector, architecture(device)) is None:
        return None
    return forward_plan(spec, m, n, vector, device, soon=soon)


def _configs(tiers: tuple[tuple[int, Any], ...]) -> Iterator[Any]:
    """Yield the configurations of few rows, ascending, and None for that of many."""
    yield from (config for _, config in tiers)
    yield None


# A call whose arrays are copied, or are poorly aligned, asks for this again each time.
@cache
def _forward_kernel(
    spec: ForwardSpec, n: int, vector: int, device: int, config: ForwardInRegisters | None
) -> _compile.Instantiation:
    """Return the kernel of a configuration of few rows, or of that of many."""
    of_any = config or forward_config(spec, n, vector, architecture(device))
    return _compile.forward_instantiation(spec, of_any)


@cache
def few_rows(
    spec: ForwardSpec, n: int, vector: int, device: int
) -> tuple[tuple[int, ForwardInRegisters], ...]:
    """Return the configurations of few rows, each after the most rows that it serves."""
    capability = architecture(device)
    config = forward_config(spec, n, vector, capability)
    return few_rows_configs(spec, config, n, capability, multiprocessors(device))


@cache
def forward_plan_of(
    spec: ForwardSpec, n: int, vector: int, device: int, config_of_few: ForwardInRegisters | None
) -> ForwardPlan:
    """Return the plan of `forward_plan`, by this configuration of few rows or that of many."""
    config = config_of_few or forward_config(spec, n, vector, architecture(device))
    (kernel,) = _background.load((_compile.forward_instantiation(spec, config),), device)
    clusters = multiprocessors(device)
    if config.cluster_blocks > 1:
        at_once = kernel.clusters_at_once()
        if at_once == 0:  # a slice of a GPU
            config = forward_config(spec, n, vector, without_clusters(architecture(device)))
            (kernel,) = _background.load((_compile.forward_instantiation(spec, config),), device)
        else:
            clusters = at_once
    if isinstance(config, ForwardInRegisters):
        return ForwardPlan(
            *(kernel, n, config.rows_per_block, config.cluster_blocks, None),
            counted=False,
            finds_amax=isinstance(spec, QuantizedSpec) and spec.amax,
        )
    if isinstance(config, ForwardStreaming):
        return ForwardPlan(kernel, n, 1, config.cluster_blocks, None, counted=False)
    return ForwardPlan(
        *(kernel, n, 1, config.cluster_blocks, clusters, config.counted),
        as_one=spec.repeats > 0,
    )


class _Split(NamedTuple):
    """How a launch's rows are shared."""

    n_groups: int
    clusters: int  # of each group
    partials: int  # of a gradient
    as_one: bool = False  # whether clusters take rows of all groups, as if these were one


@dataclass(frozen=True)
class BackwardPlan(ABC):
    """A backward pass over rows of n elements, by kernels of one regime.

    Scratch has the partial sums of the weight gradients, if the last kernel is to sum them. They
    are a row of `partials_stride` values of the compute dtype for each gradient and cluster of
    blocks. There are at most 4 * multiprocessors clusters, or 64 if that is more, or one for each
    group of rows. If clusters take rows of all groups, they are such a row for each row.
    """

    kernels: tuple[Kernel, ...]
    n: int
    gradients: int
    itemsize: int  # of the compute dtype
    cluster_blocks: int
    rows_per_partial: int
    most_partials: int
    # Of the last kernel, which sums them: for each gradient so many blocks, or one an element if
    # these serve several columns. 0 if there are none.
    reduction_blocks: int
    most_summed: int  # columns that may be summed to one value of a partial
    partials_per_block: int  # or per cluster
    accumulate: bool  # as `BackwardSpec`

    stands_in: ClassVar[bool] = False  # for another one

    def _split(self, m: int, groups: Groups | None) -> _Split:
        """Return how m rows are shared by clusters of blocks."""
        rows, n_groups = _shares(m, groups)
        clusters = _shared_by(-(-rows // self.rows_per_partial), n_groups, self.most_partials)
        return _Split(n_groups, clusters, n_groups * clusters * self.partials_per_block)

    def _columns_summed(self, groups: Groups | None) -> int:
        """Return how many columns are summed to one value of a partial."""
        return 1 if groups is None else groups.alike(self.most_summed)

    def _partial_bytes(self, m: int, groups: Groups | None) -> int:
        if not self.reduction_blocks:
            return 0
        rows = self.gradients * self._split(m, groups).partials
        return rows * partials_stride(self.n // self._columns_summed(groups)) * self.itemsize

    def scratch_bytes(self, m: int, groups: Groups | None = None) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        return self._partial_bytes(m, groups)

    def _numbers(
        self, m: int, groups: Groups | None, clusters: int, *, as_one: bool = False
    ) -> dict[str, float]:
        """Return the numbers of a kernel of the rows, of so many clusters for each group."""
        rows, _ = _shares(m, None if as_one else groups)
        of_groups = {} if groups is None else groups.numbers(self.n, clusters, as_one=as_one)
        return _sizes(rows, self.n) | of_groups

    def _prepared_sums(self, m: int, groups: Groups | None) -> Launch:
        split, columns = self._split(m, groups), self._columns_summed(groups)
        sizes: dict[str, float] = {"n_partials": split.partials, "n_cols": self.n // columns}
        blocks = self.gradients * self.reduction_blocks
        if groups is not None:
            vectors = max(1, groups.vectors)
            of_vector = split.partials // vectors
            sizes |= groups.numbers(self.n, 1) | {"n_partials": of_vector}
            # Partials of rows take turns, as the rows do.
            steps = (1, vectors) if split.as_one else (of_vector, 1)
            sizes |= zip(("group_step", "row_step"), steps, strict=True)
            if groups.repeats > 1:
                sizes["n_repeats"] = groups.repeats // columns
                blocks = self.gradients * (self.n // groups.repeats)
            blocks *= vectors
        if blocks > MOST_BLOCKS:
            raise NotImplementedError(
                f"weight and bias must have at most {MOST_BLOCKS} elements together where each "
                f"serves several columns, got {blocks}"
            )
        return self.kernels[-1].prepared(blocks, sizes)

    def prepared(self, m: int, groups: Groups | None = None) -> Launch:
        """Return the launch over m rows, or groups of them. It takes a stream and operands.

        The operands are dy, dy_stride, x, x_stride, weight, mean, rstd, bitmask, dx, dx_stride,
        dweight, dbias and scratch. Without rows, the weight gradients are 0, or stay as they are if
        sums are added to them.
        """
        if self.accumulate and not m:
            return _launch_nothing
        launch_rows = self._prepared_rows(m, groups)
        if not self.reduction_blocks:
            return launch_rows
        launch_sums = self._prepared_sums(m, groups)

        def launch_rows_and_sums(stream: int, operands: _Ints) -> None:
            launch_rows(stream, operands)
            launch_sums(stream, (operands[-1], *operands[_GRADIENTS]))

        return launch_rows_and_sums

    @abstractmethod
    def _prepared_rows(self, m: int, groups: Groups | None) -> Launch:
        """Return the launch of all kernels except the sums of partials."""


@dataclass(frozen=True)
class PipelinedPlan(BackwardPlan):
    """Rows that wait in shared memory."""

    def _split(self, m: int, groups: Groups | None) -> _Split:
        """Return how m rows are shared by clusters of blocks.

        Groups of few rows, which take turns, leave clusters idle. So clusters may take rows of all
        groups, if the columns of a pack have one element of weight and bias. Then each row has
        partials. These are written and read, in addition to a 16-bit x, dy and dx.
        """
        split = super()._split(m, groups)
        if not m or groups is None or groups.inner > 1 or groups.vectors < 2:
            return split
        at_once, in_turn = self.most_partials, self.rows_per_partial
        rows, rows_of_group = -(-m // in_turn), -(-groups.rows // in_turn)
        clusters = min(rows, at_once)
        of_partials = 4 * self.gradients / (3 * self._columns_summed(groups))
        as_one = time_of_waves(rows, 1, clusters, at_once) * (1 + of_partials)
        apart = time_of_waves(rows_of_group, split.n_groups, split.clusters, at_once)
        if self.most_summed > 1 and as_one < apart:
            return _Split(1, clusters, m, as_one=True)
        return split

    def _prepared_rows(self, m: int, groups: Groups | None) -> Launch:
        if not m:
            return _launch_nothing
        split = self._split(m, groups)
        blocks = split.n_groups * split.clusters * self.cluster_blocks
        numbers = self._numbers(m, groups, split.clusters, as_one=split.as_one)
        return self.kernels[0].prepared(blocks, numbers)


@dataclass(frozen=True)
class InRegistersPlan(BackwardPlan):
    """Few rows, held in registers.

    Further blocks may sum their weight gradients. Then LayerNorm's scratch has a value for each
    row, and RMSNorm needs none.
    """

    column_blocks: int  # that sum weight gradients, or 0
    column_kernel: bool  # whether they have their own, else they are in that of the rows

    def scratch_bytes(self, m: int, groups: Groups | None = None) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        return m * self.itemsize if self.column_kernel else self._partial_bytes(m, groups)

    def _prepared_rows(self, m: int, groups: Groups | None) -> Launch:
        if not m:
            return _launch_nothing
        partials, n = self._split(m, groups).clusters, self.n
        blocks = partials * self.cluster_blocks
        if not self.column_kernel:
            blocks += self.column_blocks
        sizes = _sizes(m, n)
        launch_rows = self.kernels[0].prepared(blocks, sizes)
        if self.column_kernel:
            launch_columns = self.kernels[1].prepared(self.column_blocks, sizes)

            def launch_with_columns(stream: int, operands: _Ints) -> None:
                launch_rows(stream, operands)
                launch_columns(stream, operands)

            return launch_with_columns
        if self.reduction_blocks:
            # The partials of the bias begin here.
            of_bias = (self.gradients - 1) * partials * partials_stride(n) * self.itemsize

            def launch_with_partials(stream: int, operands: _Ints) -> None:
                scratch = operands[-1]
                sums = scratch, scratch + of_bias
                launch_rows(stream, (*operands[_ROWS], *sums, *operands[_BEHIND], scratch))

            return launch_with_partials
        return launch_rows


@dataclass(frozen=True)
class ColumnParallelPlan(BackwardPlan):
    """Rows in strips, one for each block. Scratch has counts and the sums that blocks exchange."""

    strips: int
    exchange_bytes: int

    def scratch_bytes(self, m: int, groups: Groups | None = None) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        return column_parallel_counts_bytes() + self.exchange_bytes

    def _prepared_rows(self, m: int, groups: Groups | None) -> Launch:
        counts_bytes = column_parallel_counts_bytes()
        launch_rows = self.kernels[0].prepared(self.strips, _sizes(m, self.n))

        def launch(stream: int, operands: _Ints) -> None:
            counts = operands[-1]
            set_to_zero(stream, counts, counts_bytes)
            launch_rows(stream, (*operands, counts + counts_bytes))

        return launch


@dataclass(frozen=True)
class StreamingPlan(BackwardPlan):
    """Rows read twice, then by tiles of columns. Scratch has four values for each row."""

    tiles: int

    def scratch_bytes(self, m: int, groups: Groups | None = None) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        return self._partial_bytes(m, groups) + 4 * m * self.itemsize

    def _prepared_rows(self, m: int, groups: Groups | None) -> Launch:
        if not m:
            return _launch_nothing
        split, partial_bytes = self._split(m, groups), self._partial_bytes(m, groups)
        of_rows, of_columns, *_ = self.kernels
        rows, n_groups = _shares(m, groups)
        of_columns_each = self.tiles * split.clusters
        numbers = {"n_partials": split.clusters}
        launch_rows = of_rows.prepared(
            m * self.cluster_blocks, self._numbers(m, groups, rows) | numbers
        )
        launch_columns = of_columns.prepared(
            of_columns_each * n_groups, self._numbers(m, groups, of_columns_each) | numbers
        )

        def launch(stream: int, operands: _Ints) -> None:
            with_coefficients = (*operands, operands[-1] + partial_bytes)
            launch_rows(stream, with_coefficients)
            launch_columns(stream, with_coefficients)

        return launch


def backward_plan(
    spec: BackwardSpec,
    m: int,
    n: int,
    vector: int,
    device: int,
    *,
    dx_given: bool = False,
    soon: bool = False,
) -> BackwardPlan:
    """Return a backward pass ready to launch on `device`, the current one; compile it if needed.

    It serves m rows, and all numbers of rows with the same kernels. Few rows may have some of their
    own, with the same bits of dx. Those of dweight and dbias may differ, so nothing stands in. But
    if a plan is wanted `soon` and its kernel was missing, threads then compile those of all other
    numbers of rows. dx may be dy only if `dx_given`.
    """
    tiers = few_rows_backward(spec, n, vector, device, dx_given) if m else ()
    few = next((tier for tier in tiers if m <= tier[0]), None)
    first, *_ = _backward_kernels(spec, n, vector, device, few and few[1])
    was_missing = not _compile.is_loaded(first, device)
    plan = few and few_rows_backward_plan(spec, n, *few, device)
    plan = plan or many_rows_backward_plan(spec, n, vector, device)
    if soon and was_missing:
        _background.start(kernels_of(spec, n, vector, device, dx_given=dx_given), device)
    return plan


@cache  # as `_forward_kernel`
def _backward_kernels(
    spec: BackwardSpec, n: int, vector: int, device: int, config: BackwardInRegisters | None
) -> tuple[_compile.Instantiation, ...]:
    """Return the kernels of a configuration of few rows, or of that of many."""
    of_any = config or backward_config(spec, n, vector, architecture(device))
    return _compile.backward_instantiations(spec, of_any)


@dataclass(frozen=True)
class StridedPlan:
    """A pass over rows of n elements that lie side by side: see kernels/strided.cuh."""

    kernels: tuple[Kernel, ...]
    spec: ForwardSpec | BackwardSpec
    n: int
    config: Strided
    most_blocks: int | None  # that take several tiles one after another; None if each takes one

    def _blocks(self, m: int, inner: int) -> int:
        rows = self.config.lanes * pack_length(self.spec.x)
        tiles = m // inner * -(-inner // rows) if m else 0
        return tiles if self.most_blocks is None else min(tiles, self.most_blocks)

    def scratch_bytes(self, m: int, inner: int) -> int:
        """Return the bytes of scratch that a launch over m rows needs, for partial sums."""
        if self.config.reduction is None or isinstance(self.spec, ForwardSpec):
            return 0
        partials = self.spec.gradients * self._blocks(m, inner) * partials_stride(self.n)
        return partials * ITEMSIZE[compute_dtype(self.spec.x)]

    def prepared(self, m: int, inner: int, *of_forward: float) -> Launch:
        """Return the launch over m rows, of which so many lie side by side.

        It takes a stream and the operands of the pass; the strides among these do not count.
        `of_forward` is eps and the bounds of a ReLU, which there is none of.
        """
        blocks = self._blocks(m, inner)
        numbers = _sizes(m, self.n) | {"n_inner": inner}
        numbers |= zip(("eps", "lower", "upper"), of_forward, strict=False)
        launch_rows = self.kernels[0].prepared(blocks, numbers) if blocks else _launch_nothing
        if self.config.reduction is None:
            return launch_rows
        gradients = self.spec.gradients if isinstance(self.spec, BackwardSpec) else 0
        of_sums = gradients * -(-self.n // self.config.reduction.columns)
        launch_sums = self.kernels[-1].prepared(of_sums, {"n_partials": blocks, "n_cols": self.n})

        def launch(stream: int, operands: _Ints) -> None:
            launch_rows(stream, operands)
            launch_sums(stream, (operands[-1], *operands[_GRADIENTS]))

        return launch


@cache
def strided_plan(
    spec: ForwardSpec | BackwardSpec, n: int, vector: int, device: int
) -> StridedPlan | None:
    """Return a pass over rows that lie side by side, ready to launch; None if it has no kernel.

    Norms with groups, a residual or a ReLU have none, and too long rows have none.
    """
    clamps = isinstance(spec, ForwardSpec) and spec.relu
    others = "residual", "bitmask", "dresidual_out", "dresidual"
    if spec.grouped or clamps or any(map(spec.dtypes.get, others)):
        return None
    config = strided(spec, n, vector, architecture(device))
    if config is None:
        return None
    if isinstance(spec, ForwardSpec):
        kernels = _background.load((_compile.forward_instantiation(spec, config),), device)
        return StridedPlan(kernels, spec, n, config, None)
    kernels = _background.load(_compile.backward_instantiations(spec, config), device)
    most = multiprocessors(device) * config.blocks_per_multiprocessor
    return StridedPlan(kernels, spec, n, config, most)


def kernels_of(
    spec: ForwardSpec | BackwardSpec, n: int, vector: int, device: int, *, dx_given: bool
) -> Iterator[_compile.Instantiation]:
    """Yield what a pass over any number of rows launches, some more than once."""
    if isinstance(spec, ForwardSpec):
        for config in _configs(few_rows(spec, n, vector, device)):
            yield _forward_kernel(spec, n, vector, device, config)
    else:
        for config in _configs(few_rows_backward(spec, n, vector, device, dx_given)):
            yield from _backward_kernels(spec, n, vector, device, config)


@cache
def few_rows_backward(
    spec: BackwardSpec, n: int, vector: int, device: int, dx_given: bool
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return the configurations of few rows, each after the most rows that it serves."""
    if spec.grouped:
        return ()
    capability = architecture(device)
    config = backward_config(spec, n, vector, capability)
    return few_rows_backward_configs(
        spec, config, capability, multiprocessors(device), dx_given=dx_given
    )


@cache
def few_rows_backward_plan(
    spec: BackwardSpec, n: int, most: int, config: BackwardInRegisters, device: int
) -> BackwardPlan | None:
    """Return the plan of `backward_plan` for up to `most` rows, or None without room."""
    kernels = _load_backward(spec, config, device)
    # The kernel of many rows has clusters of as many blocks, and takes more of a multiprocessor. If
    # it had no room for them, many rows would have other teams, and dx other bits.
    if config.cluster_blocks > 1 and kernels[0].clusters_at_once(alone=True) == 0:
        return None
    column_blocks, column_kernel = 0, False
    if config.column_threads:
        column_kernel = spec.norm == "layer_norm"
        # Blocks in the kernel of the rows come in clusters as well.
        clustered = 1 if column_kernel else config.cluster_blocks
        columns = config.column_lanes * pack_length(spec.x)
        column_blocks = -(-n // (clustered * columns)) * clustered
    rows = config.rows_per_block
    most_blocks = -(-most // rows)
    common = _common(spec, n, config, kernels, rows_per_partial=rows, most_partials=most_blocks)
    return InRegistersPlan(**common, column_blocks=column_blocks, column_kernel=column_kernel)


@cache
def many_rows_backward_plan(spec: BackwardSpec, n: int, vector: int, device: int) -> BackwardPlan:
    """Return the plan of `backward_plan` for any number of rows."""
    capability = architecture(device)
    config = backward_config(spec, n, vector, capability)
    kernels = _load_backward(spec, config, device)
    at_once = multiprocessors(device)
    if (
        isinstance(config, BackwardColumnParallel)
        and config.strips > at_once * kernels[0].blocks_at_once()
    ):
        config = backward_config(spec, n, vector, capability, column_parallel=False)
        kernels = _load_backward(spec, config, device)
    clusters = at_once
    if config.cluster_blocks > 1:
        clusters = kernels[0].clusters_at_once()
        if clusters == 0:  # a slice of a GPU
            config = backward_config(spec, n, vector, without_clusters(capability))
            kernels = _load_backward(spec, config, device)
            clusters = at_once
    if isinstance(config, BackwardPipelined):
        if config.cluster_blocks == 1:
            clusters *= config.blocks_per_multiprocessor
        rows = config.rows_per_block
        common = _common(spec, n, config, kernels, rows_per_partial=rows, most_partials=clusters)
        return PipelinedPlan(**common)
    if isinstance(config, BackwardStreaming):
        tiles = -(-n // (config.column_threads * pack_length(spec.x)))
        most = -(-at_once * COLUMN_BLOCKS_PER_MULTIPROCESSOR // tiles)
        common = _common(spec, n, config, kernels, rows_per_partial=1, most_partials=most)
        return StreamingPlan(**common, tiles=tiles)
    common = _common(spec, n, config, kernels, rows_per_partial=1, most_partials=0)
    exchange_bytes = column_parallel_exchange_bytes(spec, config)
    return ColumnParallelPlan(**common, strips=config.strips, exchange_bytes=exchange_bytes)


def _common(
    spec: BackwardSpec,
    n: int,
    config: BackwardConfig,
    kernels: tuple[Kernel, ...],
    *,
    rows_per_partial: int,
    most_partials: int,
) -> dict[str, Any]:
    """Return the fields of a BackwardPlan."""
    sums, most_summed = config.reduction, pack_length(spec.x) if by_index(spec) else 1
    if by_index(spec) and isinstance(config, BackwardPipelined):
        most_summed *= min(32, config.row_threads)
    return {
        "kernels": kernels,
        "n": n,
        "gradients": spec.gradients,
        "itemsize": ITEMSIZE[compute_dtype(spec.x)],
        "cluster_blocks": config.cluster_blocks,
        "rows_per_partial": rows_per_partial,
        "most_partials": most_partials,
        "reduction_blocks": 0 if sums is None else -(-n // sums.columns),
        "most_summed": most_summed,
        "partials_per_block": rows_per_partial if by_index(spec) else 1,
        "accumulate": spec.accumulate,
    }


def _load_backward(spec: BackwardSpec, config: BackwardConfig, device: int) -> tuple[Kernel, ...]:
    return _background.load(_compile.backward_instantiations(spec, config), device)
