"""How a backward pass lays few rows that registers hold over threads, with the bits of many."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    MOST_CLUSTER_BLOCKS,
    gpu_of,
    pack_length,
    shared_limit,
    team_bytes,
)
from cupynorm._layout.backward_pipelined import BackwardPipelined
from cupynorm._layout.reduction import Reduction
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype

# Beyond, the partials of each row are too many: of 256 rows of 4096 LayerNorm takes 14.4 us where
# pipelined rows take 12.3 (bfloat16, H200).
# Rows with partials are those where dx is given, LayerNorm's short ones and those of sm_80; as many
# have no weight gradients.
MOST_RESIDENT_ROWS = 64
MOST_RESIDENT_BLOCKS = 128  # as many as were measured: LayerNorm's 64 rows of 16384, two each

# Rows of one block each beside blocks of columns, at most, by the least columns that they have room
# for, on so many multiprocessors, and by the bytes of x and dy, which are read twice, against rows
# in shared memory or several a block: RMSNorm's 768 of 1024 take 7.5 us against 7.9, 1024 8.5
# against 8.3; 1536 of 2048 12.2 against 12.6, 1536 of 4096 17.3 against 18.1; 614 of 5120 13.0
# against 14.0, 1228 21.3 against 18.4; 768 of 8192 17.8 against 18.5, 1024 22.7 against 21.1.
# LayerNorm's 256 of 2048 7.7 against 8.2, 384 9.2 against 8.8; 768 of 4096 14.7 against 15.0, 1024
# 18.3 against 16.4; 512 of 5120 13.5 against 15.1, of 6144 15.3 against 14.7; 256 of 8192 11.2
# against 16.0 (bfloat16, H200).
MOST_ROWS_BESIDE_COLUMNS = {
    "rms_norm": ((4097, 768), (2048, 1536), (0, 768)),
    "layer_norm": ((4096, 768), (0, 256)),
}
MEASURED_MULTIPROCESSORS = 132
MOST_BYTES_BESIDE_COLUMNS = {"rms_norm": 3 * 2**23, "layer_norm": 5 * 2**21}
# What is moved by less than packs: RMSNorm's 128 of 4097 8.8 us against 16.0, 512 19.7 against
# 15.9, LayerNorm's 256 12.0 against 14.1, 512 18.5 against 17.4 (bfloat16, H200).
MOST_IN_PARTS_BESIDE_COLUMNS = 256
# Of 2, 4, 8 and 16 blocks each: 256 of 16384 14.2 against 18.2 and 17.0 against 20.1, RMSNorm's 512
# 23.6 against 21.0; its 128 of 32768 16.9 against 17.1, 256 24.6 against 21.3; 128 of 65536 30.6
# against 21.3; 32 of 131072 18.2 against 16.3 and 20.4 against 19.1 (bfloat16, H200).
MOST_BLOCKS_BESIDE_COLUMNS = 512
MOST_BLOCKS_OF_LONGEST_ROWS = 256  # clusters of MOST_CLUSTER_BLOCKS
# LayerNorm's kernel of columns begins when all blocks of rows are under way, of which a
# multiprocessor therefore holds so many threads, by 64 registers, or up to 85 where blocks do not
# fill it: 256 rows of 8192 take 11.1 us, by 72 12.6 (bfloat16, H200).
THREADS_OF_ROWS = 1024


@dataclass(frozen=True)
class _Columns:
    """How the blocks of columns are laid out: lanes side by side have a pack each."""

    threads: int  # of a block; RMSNorm's, in the kernel of the rows, of as many rows as fit
    least_lanes: int  # doubled up to a warp while there would be more blocks
    most_blocks: int


# RMSNorm's 64 rows of 1024, several a block, take 4.9 us, by 512 threads 5.6; 64 of 8192 6.1 by 16
# lanes, 6.4 by 8; 512 of 2048 10.2 by 16, 8.0 by 8 and 7.4 by 4; 512 of 8192 13.6 by 8, and by 4,
# in 256 blocks, 16.1. LayerNorm's registers hold 4 rows of each thread while the kernel waits for
# that of the rows: 64 of 2048 take 6.3 by 16 lanes of 256 threads, 6.6 by 8 of 512, 256 8.7 and
# 7.7; 64 of 32768 11.8 by 16 lanes, in 256 blocks, 12.0 by 32 (us, bfloat16, H200).
FEW_ROWS = 64
COLUMNS_OF_FEW_ROWS = {
    "rms_norm": _Columns(threads=256, least_lanes=16, most_blocks=128),
    "layer_norm": _Columns(threads=256, least_lanes=16, most_blocks=256),
}
COLUMNS_OF_MORE_ROWS = {
    "rms_norm": _Columns(threads=256, least_lanes=4, most_blocks=128),
    "layer_norm": _Columns(threads=512, least_lanes=8, most_blocks=128),
}

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
class BackwardInRegisters:
    """Few rows held in registers, each by `cluster_blocks` blocks of `row_threads` threads.

    Or several rows by a block of `block_threads`, of which a multiprocessor has registers for
    `blocks_per_multiprocessor`. The blocks of a lone row write the weight gradients. Of more they
    are summed by further blocks, of `column_threads` for `column_lanes` packs each, which read x
    and dy themselves, or where those are 0 by the `reduction`, from a partial of each block. The
    further blocks are in the same kernel; for LayerNorm, whose xhat is centred by a sum of its row,
    in a second one that overlaps with it.
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
    config: BackwardPipelined,
    architecture: int,
    multiprocessors: int,
    *,
    dx_given: bool = False,
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return the configurations of few rows, each behind the most rows that it is for, ascending.

    `dx_given`: dx may be dy, and no block may read what another writes.

    dx has the bits that `config`, that of many rows, gives it. RMSNorm of one row of 4096 takes
    5.6 to 6.2 us against 8.7, LayerNorm 5.8 to 6.1 against 10.0; of 64 rows 8.3 against 9.7 and 9.7
    against 10.9, with partials; beside blocks of columns RMSNorm takes 4.9 us, not 5.9, for 64 rows
    of 1024, 5.0, not 7.9, for 128 of 2048, 8.8, not 10.9, for 512 of 4096, LayerNorm 7.7, not 9.0,
    for 128 of 4096 (bfloat16, H200).
    """
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
    # The blocks of a lone row write its weight gradients; without any it has the kernel of more. A
    # block is whole warps.
    if config.row_threads >= 32 and config.reduction is not None:
        found = ((1, lone), *found)
    most = found[-1][0] if found else 0
    of_several = _of_several_rows(spec, config, lone, architecture, multiprocessors)
    return (*found, *(few for few in of_several if few[0] > most))


def _with_partials(
    config: BackwardPipelined, lone: BackwardInRegisters
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return that of a row a block, which writes partials, if a row has a warp or more."""
    if lone.row_threads < 32:
        return ()
    reduction = config.reduction
    if reduction is not None:
        reduction = dataclasses.replace(reduction, groups=16)  # up to 4 partials each
    most_rows = min(MOST_RESIDENT_ROWS, MOST_RESIDENT_BLOCKS // lone.cluster_blocks)
    return ((most_rows, dataclasses.replace(lone, reduction=reduction)),)


def _beside_columns(
    spec: BackwardSpec, lone: BackwardInRegisters, architecture: int, multiprocessors: int
) -> tuple[tuple[int, BackwardInRegisters], ...]:
    """Return those of rows whose weight gradients further blocks sum, in place of partials."""
    rows = lone
    if spec.norm == "layer_norm":
        if lone.row_threads < 128 or not gpu_of(architecture).overlap:
            return ()
        # What is moved in parts, is wider or has more packs a thread spills by so few registers.
        wide = ITEMSIZE[spec.dy] > ITEMSIZE[spec.x] or spec.weight == "float64"
        if lone.packs_per_thread <= 2 and lone.vector == pack_length(spec.x) and not wide:
            blocks = THREADS_OF_ROWS // lone.block_threads
            rows = dataclasses.replace(lone, blocks_per_multiprocessor=blocks)
    few = _with_columns(spec, rows, COLUMNS_OF_FEW_ROWS[spec.norm])
    more = _with_columns(spec, rows, COLUMNS_OF_MORE_ROWS[spec.norm])
    most_rows = _most_rows_beside_columns(spec, lone, multiprocessors)
    if most_rows <= FEW_ROWS or more == few:
        return ((most_rows, few),)
    return (FEW_ROWS, few), (most_rows, more)


def _with_columns(
    spec: BackwardSpec, rows: BackwardInRegisters, columns: _Columns
) -> BackwardInRegisters:
    lanes = columns.least_lanes
    while lanes < 32 and rows.packs > columns.most_blocks * lanes:
        lanes *= 2
    block_threads, threads = rows.block_threads, columns.threads
    if spec.norm == "rms_norm":  # in the kernel of the rows, whose blocks are as large
        if rows.cluster_blocks == 1:
            block_threads *= max(1, threads // rows.row_threads)
        threads = block_threads
    return dataclasses.replace(
        rows, block_threads=block_threads, column_threads=threads, column_lanes=lanes
    )


def _most_rows_beside_columns(
    spec: BackwardSpec, lone: BackwardInRegisters, multiprocessors: int
) -> int:
    norm, blocks = spec.norm, lone.cluster_blocks
    if blocks == MOST_CLUSTER_BLOCKS:
        return MOST_BLOCKS_OF_LONGEST_ROWS // blocks
    if blocks > 1:
        return MOST_BLOCKS_BESIDE_COLUMNS // blocks
    columns = lone.packs * pack_length(spec.x)
    most_rows = next(most for least, most in MOST_ROWS_BESIDE_COLUMNS[norm] if columns >= least)
    if lone.vector < pack_length(spec.x):
        most_rows = min(most_rows, MOST_IN_PARTS_BESIDE_COLUMNS)
    row_bytes = columns * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy])
    most_rows = min(most_rows, MOST_BYTES_BESIDE_COLUMNS[norm] // row_bytes)
    share = min(multiprocessors, MEASURED_MULTIPROCESSORS)
    return max(FEW_ROWS, most_rows * share // MEASURED_MULTIPROCESSORS)


def _of_several_rows(
    spec: BackwardSpec,
    config: BackwardPipelined,
    lone: BackwardInRegisters,
    architecture: int,
    multiprocessors: int,
) -> Iterator[tuple[int, BackwardInRegisters]]:
    """Yield those whose blocks have 2, 4, 8, ... rows, as many blocks as run at once.

    What they leave out is the rows' way through shared memory, and all that is for a next row:
    LayerNorm takes 9.1 us, not 10.6, for 512 rows of 2048, 11.8, not 12.9, for 1024, 10.7, not
    12.5, for 512 of 3072, RMSNorm 10.0, not 10.5, for 4096 of 512, 9.6, not 10.3, for 8192 of 256;
    but LayerNorm's 2048 of 2048, twice as many as run at once, 18.4, not 16.5 (bfloat16, H200).
    """
    if not spec.gradients or config.cluster_blocks > 1 or config.cells:
        return
    most_threads = MOST_THREADS_OF_TEAMS.get(config.packs_per_thread, 0)
    if spec.dresidual_out:  # beside which the most would spill
        most_threads = min(most_threads, 512)
    most_teams = MOST_TEAMS_OF_SEVERAL_WARPS if config.row_threads > 32 else TEAMS[-1]
    for teams in TEAMS:
        threads = teams * config.row_threads
        if teams > most_teams or not LEAST_THREADS_OF_TEAMS <= threads <= most_threads:
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
