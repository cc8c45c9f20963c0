"""How a backward pass lays few rows that registers hold over threads, with the bits of many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    MAX_CLUSTER_BLOCKS,
    gpu_of,
    pack_length,
    shared_limit,
    team_bytes,
)
from cupynorm._layout.backward_pipelined import BackwardPipelined
from cupynorm._layout.reduction import Reduction
from cupynorm._layout.tuning_sm90 import BackwardInRegisters as Tuned
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype

MAX_BLOCKS_WITH_PARTIALS = 128  # as many as were measured
MEASURED_MULTIPROCESSORS = 132
# At most kTurns of kernels/gradient.cuh, since the teams add their gradients one after another.
# Teams of several warps are at most the barriers of kernels/team.cuh.
TEAMS = (2, 4, 8, 16, 32, 64)
MAX_TEAMS_OF_SEVERAL_WARPS = 15


@dataclass(frozen=True)
class BackwardInRegisters:
    """Few rows held in registers, each by `cluster_blocks` blocks of `row_threads` threads.

    Or a block of `block_threads` holds several rows. A multiprocessor has registers for
    `blocks_per_multiprocessor`. Further blocks sum the weight gradients. Each has `column_threads`
    for `column_lanes` packs, and reads x and dy itself. If those are 0, the `reduction` sums a
    partial of each block. RMSNorm has the further blocks in the same kernel. LayerNorm has them in
    a second one that overlaps with it, since a sum of its row centres xhat.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    cluster_blocks: int
    vector: int
    full: bool
    column_threads: int
    column_lanes: int
    reduction: Reduction | None

    @property
    def packs(self) -> int:
        """Return how many packs of a row there is room for."""
        return self.cluster_blocks * self.row_threads * self.packs_per_thread

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


def few_rows_backward_configs(
    spec: BackwardSpec,
    config: object,
    architecture: int,
    multiprocessors: int,
    *,
    dx_given: bool = False,
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return the configurations of few rows, each after the most rows that it serves, ascending.

    `dx_given`: dx may be dy, and no block may read what another writes.

    dx has the same bits as by `config`, that of many rows (notes.md#few-rows-backward). Only rows
    that wait in shared memory have any.
    """
    if not isinstance(config, BackwardPipelined):
        return ()
    lone = BackwardInRegisters(
        row_threads=config.row_threads,
        block_threads=config.row_threads,
        blocks_per_multiprocessor=1,
        packs_per_thread=config.packs_per_thread,
        cluster_blocks=config.cluster_blocks,
        vector=config.vector,
        full=config.full,
        column_threads=0,
        column_lanes=0,
        reduction=None,
    )
    beside_columns: tuple[tuple[int, BackwardInRegisters], ...] = ()
    if spec.gradients and not dx_given:
        beside_columns = _beside_columns(spec, lone, architecture, multiprocessors)
    found = beside_columns or _with_partials(config, lone)
    most = found[-1][0] if found else 0
    of_several = _of_several_rows(spec, config, lone, architecture, multiprocessors)
    return (*found, *(few for few in of_several if few[0] > most))


def _with_partials(
    config: BackwardPipelined, lone: BackwardInRegisters
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return that of one row a block, with partials, if a row has a warp or more."""
    if lone.row_threads < 32:
        return ()
    reduction = config.reduction
    if reduction is not None:
        reduction = dataclasses.replace(reduction, groups=16)  # up to 4 partials each
    max_rows = min(Tuned.max_rows_with_partials, MAX_BLOCKS_WITH_PARTIALS // lone.cluster_blocks)
    return ((max_rows, dataclasses.replace(lone, reduction=reduction)),)


def _beside_columns(
    spec: BackwardSpec, lone: BackwardInRegisters, architecture: int, multiprocessors: int
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return those of rows whose weight gradients further blocks sum, instead of partials.

    For LayerNorm these blocks are a kernel that begins when all blocks of rows have started
    (notes.md#blocks-of-columns).
    """
    rows = lone
    few_columns, more_columns = Tuned.columns_of_few_rows, Tuned.columns_of_more_rows
    if spec.norm == "layer_norm":
        few_columns = Tuned.columns_of_few_rows_of_layer_norm
        more_columns = Tuned.columns_of_more_rows_of_layer_norm
        if lone.row_threads < 128 or not gpu_of(architecture).overlap:
            return ()
        if _has_registers_to_spare(spec, lone):
            blocks = Tuned.threads_of_rows // lone.block_threads
            rows = dataclasses.replace(lone, blocks_per_multiprocessor=blocks)
    few = _with_columns(spec, rows, *few_columns)
    more = _with_columns(spec, rows, *more_columns)
    max_rows = _max_rows_beside_columns(spec, lone, multiprocessors)
    if max_rows <= Tuned.few_rows or more == few:
        return ((max_rows, few),)
    return (Tuned.few_rows, few), (max_rows, more)


def _has_registers_to_spare(spec: BackwardSpec, lone: BackwardInRegisters) -> bool:
    """Tell whether the fewer registers that more blocks leave suffice."""
    wide = ITEMSIZE[spec.dy] > ITEMSIZE[spec.x] or spec.weight == "float64"
    return lone.packs_per_thread <= 2 and lone.vector == pack_length(spec.x) and not wide


def _with_columns(
    spec: BackwardSpec, rows: BackwardInRegisters, threads: int, lanes: int, max_blocks: int
) -> BackwardInRegisters:
    """Return the rows next to blocks of columns, whose adjacent lanes have a pack each."""
    while lanes < 32 and rows.packs > max_blocks * lanes:
        lanes *= 2
    block_threads = rows.block_threads
    if spec.norm == "rms_norm":  # in the kernel of the rows, with blocks of the same size
        if rows.cluster_blocks == 1:
            block_threads *= max(1, threads // rows.row_threads)
        threads = block_threads
    return dataclasses.replace(
        rows, block_threads=block_threads, column_threads=threads, column_lanes=lanes
    )


def _max_rows_beside_columns(
    spec: BackwardSpec, lone: BackwardInRegisters, multiprocessors: int
) -> int:
    """Return up to how many rows this beats shared memory and several rows a block."""
    blocks = lone.cluster_blocks
    if blocks == MAX_CLUSTER_BLOCKS:
        return Tuned.max_blocks_of_longest_rows // blocks
    if blocks > 1:
        return Tuned.max_blocks_beside_columns // blocks
    by_columns: tuple[tuple[int, int], ...] = Tuned.max_rows_beside_columns
    max_bytes = Tuned.max_bytes_beside_columns
    if spec.norm == "layer_norm":
        by_columns = Tuned.max_rows_beside_columns_of_layer_norm
        max_bytes = Tuned.max_bytes_beside_columns_of_layer_norm
    columns = lone.packs * pack_length(spec.x)
    max_rows = next(most for least, most in by_columns if columns >= least)
    if lone.vector < pack_length(spec.x):
        max_rows = min(max_rows, Tuned.max_rows_in_parts_beside_columns)
    row_bytes = columns * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy])
    max_rows = min(max_rows, max_bytes // row_bytes)
    share = min(multiprocessors, MEASURED_MULTIPROCESSORS)
    return max(Tuned.few_rows, max_rows * share // MEASURED_MULTIPROCESSORS)


def _of_several_rows(
    spec: BackwardSpec,
    config: BackwardPipelined,
    lone: BackwardInRegisters,
    architecture: int,
    multiprocessors: int,
) -> Iterator[tuple[int, BackwardInRegisters]]:
    """Yield those of blocks with 2, 4, 8, ... rows, and with all blocks running at once.

    They skip shared memory, and all work for a next row (notes.md#several-rows-a-block).
    """
    if not spec.gradients or config.cluster_blocks > 1 or config.cells:
        return
    max_threads = Tuned.max_threads_of_teams.get(config.packs_per_thread, 0)
    if spec.dresidual_out:  # with it the most threads would spill
        max_threads = min(max_threads, 512)
    max_teams = MAX_TEAMS_OF_SEVERAL_WARPS if config.row_threads > 32 else TEAMS[-1]
    for teams in TEAMS:
        threads = teams * config.row_threads
        if teams > max_teams or not Tuned.min_threads_of_teams <= threads <= max_threads:
            continue
        few = dataclasses.replace(lone, block_threads=threads, reduction=config.reduction)
        if backward_in_registers_bytes(spec, few) <= shared_limit(architecture):
            yield teams * multiprocessors, few


def backward_in_registers_bytes(spec: BackwardSpec, config: BackwardInRegisters) -> int:
    """Return the shared memory of a block: see kernels/backward_in_registers.cu."""
    threads = config.row_threads
    size = team_bytes(spec.x, threads, config.block_threads, config.cluster_blocks)
    if config.rows_per_block > 1 and not config.column_threads:
        values = spec.gradients * config.block_threads * config.packs_per_thread
        size += values * pack_length(spec.x) * ITEMSIZE[compute_dtype(spec.x)]
    if config.column_threads and spec.norm == "rms_norm":
        size = max(size, backward_columns_bytes(spec, config))
    return size


def backward_columns_bytes(spec: BackwardSpec, config: BackwardInRegisters) -> int:
    """Return the shared memory of a block that sums the weight gradients of columns."""
    warps = config.column_threads // 32
    values = spec.gradients * warps * config.column_lanes * pack_length(spec.x)
    return values * ITEMSIZE[compute_dtype(spec.x)]
