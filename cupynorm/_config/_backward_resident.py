"""How a backward pass lays few rows that registers hold over threads, with the bits of many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cupynorm._config._backward_staged import StagedBackward
from cupynorm._config._limits import (
    FIRST_WITH_OVERLAP,
    MOST_CLUSTER_BLOCKS,
    pack_length,
    shared_limit,
    team_bytes,
)
from cupynorm._config._reduction import Reduction
from cupynorm._spec import ITEMSIZE, BackwardSpec, compute_dtype

# Beyond, the partials of each row are too many: of 256 rows of 4096 LayerNorm takes 14.4 us where
# staged rows take 12.3 (bfloat16, H200).
MOST_RESIDENT_ROWS = 64  # with partials: where dx is given, of short rows, without overlap
MOST_RESIDENT_BLOCKS = 128  # as many as were measured: LayerNorm's 64 rows of 16384, two each

# Blocks for the weight gradients against partials, of RMSNorm and LayerNorm: 256 rows of 8192 take
# 12.8 us against 14.6 and 14.6 against 17.9, 512 20.6 against 18.6 and 23.5 against 22.3; 160 of
# 2048 9.3 against 8.8 and 9.9 against 10.1. Of rows that have 4, 8 and 16 blocks: 128 of 32768 17.7
# against 18.3 and 19.7 against 22.3, 256 33.6 against 24.2 and 34.6 against 28.2; 64 of 65536 18.1
# against 18.5 and 21.3 against 22.3; 32 of 131072 19.9 against 19.3 and 25.1 against 23.2
# (bfloat16, H200).
MOST_ROWS_BESIDE_COLUMNS = 256
MOST_SHORT_ROWS_BESIDE_COLUMNS = 128  # held by fewer than 512 threads
MOST_BLOCKS_BESIDE_COLUMNS = 512
MOST_BLOCKS_OF_LONGEST_ROWS = 256  # clusters of MOST_CLUSTER_BLOCKS

# 64 rows of 4096 take 7.6 us, by 256 threads 7.8, 128 rows 9.7 and 11.0, 8 rows 7.1 and 6.6
# (bfloat16, H200).
LAYER_NORM_COLUMN_THREADS = 512

# Of a block whose teams have a row each, by the packs of a thread. By 2 packs some of 1024 threads
# spill up to 28 bytes: LayerNorm's 1000 rows of 2000 with a bitmask and a float32 weight around
# zero, which take 12.6 us, not 13.2. By 3 and 5, of more threads than here, 28 and 36 (bfloat16,
# H200).
MOST_THREADS_OF_TEAMS = {1: 1024, 2: 1024, 3: 512, 4: 512, 5: 256, 6: 256, 7: 256}
# With 64, two teams, 256 rows of 1024 take 6.9 us against 6.7 (RMSNorm, bfloat16, H200).
LEAST_THREADS_OF_TEAMS = 128
# No more teams than kTurns of kernels/gradient.cuh, as their gradients are added one after another,
# and of several warps no more than kernels/team.cuh has barriers for.
TEAMS = (2, 4, 8, 16, 32, 64)
MOST_TEAMS_OF_SEVERAL_WARPS = 15


@dataclass(frozen=True)
class ResidentBackward:
    """Few rows held in registers, each by `cluster_blocks` blocks of `row_threads` threads.

    Or several rows by a block of `block_threads`, which adds up their weight gradients. What the
    blocks of a lone row write are the weight gradients; else they are summed by further blocks, of
    `column_threads`, which read x and dy themselves, or where that is 0 by the `reduction` from
    partials. The further blocks are in the same kernel; for LayerNorm, whose xhat is centred by a
    sum of its row, in a second one that overlaps with it.
    """

    row_threads: int
    block_threads: int
    packs_per_thread: int
    cluster_blocks: int
    vector: int
    full: bool
    column_threads: int
    reduction: Reduction | None

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


def few_rows_backward_configs(
    spec: BackwardSpec,
    config: StagedBackward,
    architecture: int,
    multiprocessors: int,
    *,
    dx_given: bool = False,
) -> tuple[tuple[int, ResidentBackward], ...]:
    """Return the configurations of few rows, each behind the most rows that it is for, ascending.

    `dx_given`: dx may be dy, and no block may read what another writes.

    dx has the bits that `config`, that of many rows, gives it. RMSNorm of one row of 4096 takes
    5.6 to 6.2 us against 8.7, LayerNorm 5.8 to 6.1 against 10.0; of 64 rows 8.3 against 9.7 and 9.7
    against 10.9, with partials; with columns RMSNorm of 64 rows of 8192 6.4, with partials 9.6
    (bfloat16, H200).
    """
    lone = ResidentBackward(
        row_threads=config.row_threads,
        block_threads=config.row_threads,
        packs_per_thread=config.packs_per_thread,
        cluster_blocks=config.cluster_blocks,
        vector=config.vector,
        full=config.full,
        column_threads=0,
        reduction=None,
    )
    found = []
    if config.row_threads >= 32:  # a block is whole warps
        of_a_row_each = _of_a_row_each(spec, config, lone, architecture, dx_given=dx_given)
        found = [(1, lone), of_a_row_each]
    most = found[-1][0] if found else 0  # up to which blocks of several rows were not tried
    of_several = _of_several_rows(spec, config, lone, architecture, multiprocessors)
    return (*found, *(few for few in of_several if few[0] > most))


def _of_a_row_each(
    spec: BackwardSpec,
    config: StagedBackward,
    lone: ResidentBackward,
    architecture: int,
    *,
    dx_given: bool,
) -> tuple[int, ResidentBackward]:
    """Return that of several rows whose blocks have one each, behind the most rows."""
    column_threads, reduction = 0, None
    if config.row_threads >= 128 and spec.gradients and not dx_given:
        if spec.norm == "rms_norm":
            column_threads = config.row_threads
        elif architecture >= FIRST_WITH_OVERLAP:
            column_threads = LAYER_NORM_COLUMN_THREADS
    most_rows, most_blocks = MOST_RESIDENT_ROWS, MOST_RESIDENT_BLOCKS
    if column_threads:
        most_rows, most_blocks = MOST_ROWS_BESIDE_COLUMNS, MOST_BLOCKS_BESIDE_COLUMNS
        if config.row_threads * config.cluster_blocks < 512:
            most_rows = MOST_SHORT_ROWS_BESIDE_COLUMNS
        if config.cluster_blocks == MOST_CLUSTER_BLOCKS:
            most_blocks = MOST_BLOCKS_OF_LONGEST_ROWS
    elif config.reduction is not None:
        reduction = dataclasses.replace(config.reduction, groups=16)  # up to 4 partials each
    few = dataclasses.replace(lone, column_threads=column_threads, reduction=reduction)
    return min(most_rows, most_blocks // config.cluster_blocks), few


def _of_several_rows(
    spec: BackwardSpec,
    config: StagedBackward,
    lone: ResidentBackward,
    architecture: int,
    multiprocessors: int,
) -> Iterator[tuple[int, ResidentBackward]]:
    """Yield those whose blocks have 2, 4, 8, ... rows, as many blocks as run at once.

    What they leave out is the rows' way through shared memory, and all that is for a next row:
    LayerNorm takes 8.2 us, not 9.7, for 256 rows of 2048, 9.1, not 10.6, for 512, 11.8, not 12.9,
    for 1024, 10.7, not 12.5, for 512 of 3072, RMSNorm 8.3, not 8.7, for 512 of 2048, 10.3, not
    10.9, for 1024, 9.4, not 10.5, for 512 of 3072; but LayerNorm's 2048 of 2048, twice as
    many as run at once, 18.4, not 16.5 (bfloat16, H200).
    """
    if not spec.gradients or config.cluster_blocks > 1 or config.cells:
        return
    most_threads = MOST_THREADS_OF_TEAMS.get(config.packs_per_thread, 0)
    most_teams = MOST_TEAMS_OF_SEVERAL_WARPS if config.row_threads > 32 else TEAMS[-1]
    for teams in TEAMS:
        threads = teams * config.row_threads
        if teams > most_teams or not LEAST_THREADS_OF_TEAMS <= threads <= most_threads:
            continue
        few = dataclasses.replace(lone, block_threads=threads, reduction=config.reduction)
        if resident_backward_bytes(spec, few) <= shared_limit(architecture):
            yield teams * multiprocessors, few


def resident_backward_bytes(spec: BackwardSpec, config: ResidentBackward) -> int:
    """Return the shared memory of a block: see kernels/backward_resident.cu."""
    threads = config.row_threads
    size = team_bytes(spec.x, threads, config.block_threads, config.cluster_blocks)
    if config.rows_per_block > 1:
        values = spec.gradients * config.block_threads * config.packs_per_thread
        size += values * pack_length(spec.x) * ITEMSIZE[compute_dtype(spec.x)]
    if config.column_threads and spec.norm == "rms_norm":
        size = max(size, resident_columns_bytes(spec, config))
    return size


def resident_columns_bytes(spec: BackwardSpec, config: ResidentBackward) -> int:
    """Return the shared memory of a block that sums the weight gradients of 32 packs."""
    values = spec.gradients * config.column_threads * pack_length(spec.x)
    return values * ITEMSIZE[compute_dtype(spec.x)]
