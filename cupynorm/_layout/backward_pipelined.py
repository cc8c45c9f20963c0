"""How a backward pass lays rows that wait in shared memory over teams of threads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cupynorm._layout.architectures import (
    MAX_CLUSTER_BLOCKS,
    MAX_SHARED_BESIDE_L1,
    REGISTERS_PER_MULTIPROCESSOR,
    gpu_of,
    leave_l1_room,
    max_cluster_blocks,
    moves_8_bytes,
    pack_length,
    shared_limit,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._layout.reduction import Reduction, by_index, reduction_of
from cupynorm._layout.tuning_sm90 import AnyPass as Common
from cupynorm._layout.tuning_sm90 import BackwardPipelined as Tuned
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype


@dataclass(frozen=True)
class BackwardPipelined:
    """Like ForwardPipelined, with the weight gradients. Each team of a block has a row.

    `hold_row`: xhat and dy stay in registers after a row's sums. `shared_sums`: how many gradients
    keep the sums of past rows in shared memory. `hold_sums`: the other one keeps them in registers,
    else in device memory. `bulk`: one thread of a team copies its rows, else each thread copies its
    own packs. `cells`: copies are by cells, as for rows at any address: see kernels/unaligned.cuh.
    `through_l1`: copies of 16 bytes go through L1, like smaller ones. `total_ahead`: dresidual_out
    waits in shared memory too, else it is read where it is added.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    cluster_blocks: int
    stages: int
    vector: int
    hold_weight: bool
    hold_row: bool
    shared_sums: int
    hold_sums: bool
    full: bool
    bulk: bool
    cells: bool
    through_l1: bool
    total_ahead: bool
    reduction: Reduction | None

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


def backward_pipelined_bytes(spec: BackwardSpec, config: BackwardPipelined) -> int:
    """Return the shared memory of a block: see kernels/backward_pipelined.cu."""
    elements = config.block_threads * config.packs_per_thread * pack_length(spec.x)
    size = team_bytes(spec.x, config.row_threads, config.block_threads, config.cluster_blocks)
    of_total = spec.dresidual_out if config.total_ahead else None
    itemsizes = [ITEMSIZE[dtype] for dtype in (spec.x, spec.dy, of_total) if dtype]
    size += config.stages * elements * sum(itemsizes)
    if config.cells:
        groups = config.block_threads // min(32, config.row_threads) * config.packs_per_thread
        for itemsize in itemsizes:
            cell = min(16, pack_length(spec.x) * itemsize) if itemsize <= 4 else 0
            size += config.stages * -(-groups * cell // 16) * 16
    if spec.weight is not None and not config.hold_weight and not by_index(spec):
        size += elements * ITEMSIZE[spec.weight]
    if spec.gradients and config.rows_per_block > 1 and not by_index(spec):
        size += elements * ITEMSIZE[compute_dtype(spec.x)]
    if config.bulk:
        size += -(-config.rows_per_block * config.stages * 8 // 128) * 128
    sums = elements // config.rows_per_block * ITEMSIZE[compute_dtype(spec.x)]
    return size + config.shared_sums * sums


def backward_pipelined(
    spec: BackwardSpec, n: int, vector: int, architecture: int
) -> BackwardPipelined | None:
    """Return the configuration of rows in shared memory, or None if they do not fit."""
    plain = spec.without_residual
    for layout in _backward_layouts(plain, n, architecture):
        config = _of_layout(plain, n, vector, architecture, layout)
        if config is not None:
            return _with_residual(spec, config, architecture)
    return None


def _with_residual(
    spec: BackwardSpec, config: BackwardPipelined, architecture: int
) -> BackwardPipelined:
    """Return the configuration for a residual, with the bits of that without."""
    if spec == spec.without_residual:
        return config
    # With cells dx is written in words of x's dtype.
    cells = config.cells and spec.dx is None and spec.dresidual is None
    config = dataclasses.replace(config, cells=cells, hold_row=False)
    if spec.dresidual_out is None:
        return config
    limit = shared_limit(architecture, config.blocks_per_multiprocessor)
    if config.bulk:  # slower with fewer stages: notes.md#a-residual-in-the-same-pass
        config = dataclasses.replace(config, bulk=False, stages=3, shared_sums=0, hold_sums=False)
        hold = config.hold_weight and not _is_crowded(spec, config, architecture)
        config = dataclasses.replace(config, hold_weight=hold)
        beside = dataclasses.replace(config, total_ahead=True)
        if backward_pipelined_bytes(spec, beside) <= limit:
            return _sharing_sums(spec, beside, limit)
    for stages in range(config.stages, 1, -1):
        ahead = dataclasses.replace(config, stages=stages, total_ahead=True)
        if backward_pipelined_bytes(spec, ahead) <= limit:
            return ahead
    return config


class _Layout(NamedTuple):
    """Threads and stages of rows of some length, before it is known whether they fit."""

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    cluster_blocks: int
    stages: int


def _backward_layouts(spec: BackwardSpec, n: int, architecture: int) -> Iterator[_Layout]:
    """Yield the layouts of rows of n elements, the fastest first, then for what does not fit.

    The order depends on how well rows fill their packs, and teams their multiprocessor
    (notes.md#teams-that-fill-their-packs).
    """
    packs = -(-n // pack_length(spec.x))
    whole = n % pack_length(spec.x) == 0
    yield from _short_layouts(spec, packs)
    beyond, up_to = Tuned.seven_packs_of_a_warp
    if spec.norm == "layer_norm" and whole and beyond < packs <= up_to:
        yield _Layout(32, 128, 2, 1, 2)
    yield from _long_layouts(spec, packs, whole, architecture)
    # A short row needs more registers and shared memory with operands of float64. Or the
    # architecture has little shared memory.
    for width, block_threads in ((2, 512), (4, 256), (2, 256), (2, 128)):
        row_threads = team_threads(packs, width)
        if row_threads <= 32:
            yield _Layout(row_threads, block_threads, 1, 1, 3)
    # The same for up to 1024 packs, in two blocks.
    if 512 < packs <= 1024 and gpu_of(architecture).clusters:
        yield _Layout(256, 256, 1, 2, 3)


def _short_layouts(spec: BackwardSpec, packs: int) -> list[_Layout]:
    """Return those of rows that a warp holds, by how many packs its threads leave empty."""
    ranked = []
    layouts = Tuned.short_layouts
    if spec.norm == "layer_norm":
        layouts = Tuned.short_layouts_of_layer_norm
    for width, (most_packs, block_threads, blocks, stages) in layouts.items():
        row_threads = team_threads(packs, width)
        if packs <= most_packs and (width <= 2 or packs >= Common.min_packs_filled):
            rank = slots_of(packs, row_threads), width
            ranked.append((rank, _Layout(row_threads, block_threads, blocks, 1, stages)))
    return [layout for _, layout in sorted(ranked)]


@dataclass(frozen=True)
class _Team:
    """A longer row, and its threads in each block, with `width` packs each."""

    spec: BackwardSpec
    packs: int
    whole: bool  # the last pack is inside the row
    architecture: int
    cluster_blocks: int
    width: int
    row_threads: int

    @property
    def most(self) -> int:
        """The threads of a multiprocessor."""
        return Tuned.long_threads[self.width]

    @property
    def slots(self) -> int:
        return slots_of(self.packs, self.cluster_blocks * self.row_threads)

    @property
    def is_full(self) -> bool:
        return self.packs == self.slots and self.whole

    @property
    def filled(self) -> float:
        """A row waits for empty slots, and compares packs with its end."""
        return (self.packs / self.slots) ** 2

    @property
    def may_hold_rows(self) -> bool:
        return _may_hold_rows(self.spec, self.architecture) and self.spec.gradients < 2


def _long_layouts(spec: BackwardSpec, packs: int, whole: bool, architecture: int) -> list[_Layout]:
    """Return those of longer rows, by how well they use the threads of a multiprocessor."""
    ranked: list[tuple[tuple[float, int, int], _Layout]] = []
    for cluster_blocks, width in itertools.product((1, 2, 4, 8, 16), Tuned.long_threads):
        row_threads = team_threads(-(-packs // cluster_blocks), width)
        team = _Team(spec, packs, whole, architecture, cluster_blocks, width, row_threads)
        if not _is_candidate(team):
            continue
        if cluster_blocks == 1:
            ranked += _of_one_block(team)
        elif packs > 1024 and cluster_blocks <= max_cluster_blocks(architecture):
            ranked += _of_cluster(team)
    return [layout for _, layout in sorted(ranked, reverse=True)]


def _is_candidate(team: _Team) -> bool:
    """Tell whether so many packs a thread may be faster than fewer, and do not spill."""
    width, threads, blocks = team.width, team.row_threads, team.cluster_blocks
    if width == 5 and team.packs <= Tuned.five_packs_beyond:  # few threads would be left
        return False
    if width >= 5 and threads > team.most:
        return False
    if width < 6:
        return True
    by_cells = team.spec.x != "float64" and gpu_of(team.architecture).asynchronous_copies
    if team.slots < width * blocks * threads or not (team.whole or by_cells):
        return False
    held = (blocks, threads, width) == (1, Tuned.six_packs_held_threads, 6)
    if held and team.may_hold_rows and team.whole and not team.is_full:
        return True
    return _by_many_packs(team)


def _by_many_packs(team: _Team) -> bool:
    """Tell whether rows are faster by 6 or 7 packs a thread: notes.md#six-and-seven-packs."""
    blocks = team.cluster_blocks
    if (blocks == 1) != (team.row_threads <= Tuned.many_packs_max_threads):
        return False
    if team.spec.norm == "rms_norm":  # with a bias it spills
        return blocks >= Tuned.many_packs_min_blocks and team.spec.gradients < 2
    if not team.whole and blocks not in (1, MAX_CLUSTER_BLOCKS):
        return False
    # Full rows of smaller clusters can be copied in bulk, by fewer packs.
    return blocks >= Tuned.many_packs_min_blocks or not team.is_full


def _of_cluster(team: _Team) -> Iterator[tuple[tuple[float, int, int], _Layout]]:
    """Yield the ranked layouts of a row by one block on each of several multiprocessors."""
    threads, blocks = team.row_threads, team.cluster_blocks
    two_of_two_packs = blocks == 2 and team.width == 2 and threads >= Tuned.two_packs_min_threads
    for at_once in range(1, team.most // threads + 1):
        used = at_once * threads / team.most
        if two_of_two_packs and team.may_hold_rows:
            used = 1.0
        rank = used * team.filled, -blocks, team.width
        yield rank, _Layout(threads, threads, at_once, blocks, 3)


def _of_one_block(team: _Team) -> Iterator[tuple[tuple[float, int, int], _Layout]]:
    """Yield the ranked layouts of a row by one block, which may have several rows."""
    row_threads = team.row_threads
    if row_threads < 64:
        return
    most = team.most
    for block_threads in range(row_threads, min(_max_threads(team, most), 512) + 1, row_threads):
        used = min(block_threads / most, most / block_threads)
        rank = used * team.filled, -1, -team.width
        yield rank, _Layout(row_threads, block_threads, 1, 1, 3)


def _max_threads(team: _Team, most: int) -> int:
    """Return the threads of the largest block: notes.md#teams-that-fill-their-packs."""
    if team.width > 3:
        return max(most, team.row_threads)
    # Rows of 3 packs by two teams of 224 spill with two gradients. Rows that sm_90 copies in bulk
    # do not, nor rows of no whole packs, whose weight is not held.
    timed = gpu_of(team.architecture).timed
    in_bulk = team.packs == team.slots and team.spec.norm == "layer_norm" and timed
    crowded = team.spec.gradients == 2 or team.may_hold_rows
    if team.width == 3 and crowded and team.whole and not in_bulk:
        return max(most, min(team.row_threads, Tuned.few_packs_max_threads))
    return max(most, Tuned.few_packs_max_threads)


def _of_layout(
    spec: BackwardSpec, n: int, vector: int, architecture: int, layout: _Layout
) -> BackwardPipelined | None:
    """Return the configuration of a layout, or None if it does not fit."""
    length = pack_length(spec.x)
    packs_per_thread = -(-n // (length * layout.row_threads * layout.cluster_blocks))
    fits = functools.partial(_fits_registers, spec, layout, packs_per_thread, architecture)
    # It must fit at any alignment, so that a row's bits do not depend on that.
    if not (fits(length, hold_weight=False) and fits(1, hold_weight=False)):
        return None
    by_8_bytes = moves_8_bytes(spec.x, vector)
    by_cells = not by_8_bytes and gpu_of(architecture).asynchronous_copies
    # It must also fit in any way that rows are copied. By single elements 7 packs took four times
    # as long.
    in_part = packs_per_thread >= 6 and n % length > 0
    choices = (True,) if by_cells and in_part else (True, False) if by_cells else (False,)
    limit = shared_limit(architecture, layout.blocks_per_multiprocessor)
    for cells, stages in itertools.product(choices, range(layout.stages, 1, -1)):
        # A held weight spills with cells, except those of float32 without a bitmask.
        holds = by_8_bytes or (cells and spec.x == "float32" and not spec.bitmask)
        holds = holds and spec.weight is not None and not by_index(spec)
        config = BackwardPipelined(
            row_threads=layout.row_threads,
            block_threads=layout.block_threads,
            blocks_per_multiprocessor=layout.blocks_per_multiprocessor,
            packs_per_thread=packs_per_thread,
            cluster_blocks=layout.cluster_blocks,
            stages=stages,
            vector=vector,
            hold_weight=holds and fits(vector, hold_weight=True),
            hold_row=False,
            shared_sums=0,
            hold_sums=False,
            full=_is_full(spec, n, layout, packs_per_thread),
            bulk=False,
            cells=cells,
            through_l1=False,
            total_ahead=False,
            reduction=reduction_of(spec, n),
        )
        least_held = dataclasses.replace(config, hold_weight=False, cells=cells or in_part)
        if max(backward_pipelined_bytes(spec, c) for c in (config, least_held)) <= limit:
            return _completed(spec, config, limit, architecture)
    return None


def _is_full(spec: BackwardSpec, n: int, layout: _Layout, packs_per_thread: int) -> bool:
    """Tell whether the compiler is told that a row fills its packs.

    In a cluster it is not told beyond 4 packs: up to 44 bytes would spill, 120 with a bitmask.
    """
    threads = layout.cluster_blocks * layout.row_threads
    fills = n == threads * packs_per_thread * pack_length(spec.x)
    return fills and (packs_per_thread <= 4 or layout.cluster_blocks == 1)


def _fits_registers(
    spec: BackwardSpec,
    layout: _Layout,
    packs_per_thread: int,
    architecture: int,
    vector: int,
    *,
    hold_weight: bool,
) -> bool:
    """Tell whether a thread's registers suffice, by NVRTC's usual needs."""
    block_threads = layout.block_threads
    # A quarter of a multiprocessor has whole warps: 320 threads have the registers of 384.
    threads = -(-block_threads * layout.blocks_per_multiprocessor // 128) * 128
    max_registers = min(255, REGISTERS_PER_MULTIPROCESSOR // threads // 8 * 8)
    # With both, a weight held by 416 or 448 threads would spill 12 bytes on sm_100.
    both = spec.zero_centered and spec.bitmask and spec.gradients == 2
    if both and hold_weight and architecture >= 100 and block_threads % 128:
        max_registers -= 8
    return max_registers >= _backward_registers(
        spec,
        packs_per_thread,
        vector=vector,
        hold_weight=hold_weight,
        clustered=layout.cluster_blocks > 1,
    )


def _backward_registers(
    spec: BackwardSpec, packs: int, *, vector: int, hold_weight: bool, clustered: bool
) -> int:
    """Return an estimate of the registers of a pipelined backward, fitted to NVRTC's counts."""
    length = pack_length(spec.x)
    word = ITEMSIZE[compute_dtype(spec.x)] // 4
    registers = 52 + packs * length * word * spec.gradients
    if widest(spec.dy, spec.weight, spec.x) > 4:
        registers += packs * length
    if hold_weight:
        registers += packs * length * widest(spec.weight) // 4
    if _is_dy_wider(spec):
        registers += 4 * packs
    if spec.bitmask:
        registers += 12 * packs
    if clustered:
        registers += 12
    if vector < length:
        registers += packs * (packs + 4) - 1
    return registers


def _completed(
    spec: BackwardSpec, config: BackwardPipelined, limit: int, architecture: int
) -> BackwardPipelined:
    """Return the configuration with all choices that do not decide whether it fits."""
    config = dataclasses.replace(config, hold_row=_holds_row(spec, config, architecture))
    found = _in_bulk(spec, config, architecture, limit)
    if found is None:
        hold = config.hold_weight and not _is_crowded(spec, config, architecture)
        found = dataclasses.replace(config, hold_weight=hold)
    return _in_all_room(spec, found, limit, architecture)


def _is_crowded(spec: BackwardSpec, config: BackwardPipelined, architecture: int) -> bool:
    """Tell whether registers have no room for the weight, if rows are not copied in bulk.

    4 packs with both gradients leave none, except in clusters, whose blocks are smaller. 6 or 7
    would spill 130 bytes, except where rows are held, which have one gradient.
    """
    if config.packs_per_thread > 5:
        return not config.hold_row
    if spec.gradients < 2:
        return False
    threads = config.row_threads
    # They would spill to an L1 that a wider dy goes through (notes.md#a-dy-wider-than-x).
    if threads == 512 and gpu_of(architecture).timed and _copies_halves(spec, config):
        return True
    return config.packs_per_thread == 4 and config.cluster_blocks == 1 and threads > 32


def _may_hold_rows(spec: BackwardSpec, architecture: int) -> bool:
    """Tell whether xhat and dy of a row can stay in registers, if it fits and is well aligned.

    RMSNorm has registers to spare, but not with a float64 weight. With a bitmask it takes longer,
    since ptxas then loads its bits later. float64 gains nothing.
    """
    if spec.norm == "layer_norm" or spec.bitmask:
        return False
    narrow = ITEMSIZE[spec.dy] <= ITEMSIZE[spec.x] <= 4 and spec.weight != "float64"
    return narrow and gpu_of(architecture).asynchronous_copies


def _holds_row(spec: BackwardSpec, config: BackwardPipelined, architecture: int) -> bool:
    """Tell whether xhat and dy of a row stay in registers.

    That saves a tenth of the instructions, and a stage is filled again a reduction earlier. In
    clusters they replace the next row's sums (notes.md#rows-that-stay-in-registers).
    """
    if not (moves_8_bytes(spec.x, config.vector) and _may_hold_rows(spec, architecture)):
        return False
    packs, threads = config.packs_per_thread, config.row_threads
    both = spec.gradients == 2
    if config.cluster_blocks > 1:
        by_many_threads = threads >= Tuned.held_row_min_threads
        by_many_threads = by_many_threads or (config.cluster_blocks == 2 and packs == 2)
        spills = both and architecture >= 120  # up to 24 bytes
        few_blocks = config.cluster_blocks <= Tuned.held_row_max_blocks
        return few_blocks and (packs == 5 or by_many_threads) and not spills
    if packs >= 6:  # such rows are only candidates if held, and do not spill
        return True
    if threads <= 32 and packs < Tuned.held_row_min_packs:
        return False
    # More would spill up to 280 bytes. 1152 slots are 3 packs of 384 threads.
    fewer = spec.zero_centered or not gpu_of(architecture).clusters
    most = (1024 if fewer else 1152) if both else 1280
    return packs * config.block_threads * config.blocks_per_multiprocessor <= most


def _in_all_room(
    spec: BackwardSpec, config: BackwardPipelined, limit: int, architecture: int
) -> BackwardPipelined:
    """Return the configuration with all else that shared memory and L1 have room for.

    If dy is wider than x, each copy has half of a pack of 32 bytes, and copies past L1 ask the L2
    for the same sectors twice. Sums and a third stage give way if L1 then has room for such rows
    (notes.md#a-dy-wider-than-x). Other GPUs were not measured.
    """
    if not (gpu_of(architecture).timed and _copies_halves(spec, config)):
        return _sharing_sums(spec, config, limit)
    room_beside_l1 = MAX_SHARED_BESIDE_L1 // config.blocks_per_multiprocessor - 1024
    through_l1 = dataclasses.replace(config, through_l1=True)
    for stages in (config.stages, 2):
        fewer = dataclasses.replace(through_l1, stages=stages)
        sharing = _sharing_sums(spec, fewer, room_beside_l1)
        if _leaves_l1_room(spec, sharing):
            return sharing
    return _sharing_sums(spec, through_l1, limit)


def _sharing_sums(spec: BackwardSpec, config: BackwardPipelined, limit: int) -> BackwardPipelined:
    """Return the configuration with sums of rows in shared memory, as far as there is room.

    Partials would be read and written every 64 rows, and all threads wait for that. With many packs
    a thread, spills need the L1 that sums of both gradients would take (notes.md#sums-of-rows).
    """
    in_parts = config.vector < pack_length(spec.x) and config.rows_per_block == 1
    if in_parts or by_index(spec):
        return config
    used = backward_pipelined_bytes(spec, config)
    size = backward_pipelined_bytes(spec, dataclasses.replace(config, shared_sums=1)) - used
    shared = max(0, min(spec.gradients, (limit - used) // size))
    if config.packs_per_thread > Tuned.both_sums_max_packs:
        shared = min(shared, 1)
    hold = config.bulk and config.cluster_blocks > 1 and shared == spec.gradients - 1
    return dataclasses.replace(config, shared_sums=shared, hold_sums=hold)


def _is_dy_wider(spec: BackwardSpec) -> bool:
    """Return whether a pack of dy has more bytes than one of x."""
    return ITEMSIZE[spec.dy] > ITEMSIZE[spec.x]


def _copies_halves(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    """Tell whether dy's packs are copied by halves, or less. Cells are not: lanes share them."""
    return _is_dy_wider(spec) and not config.cells


def _leaves_l1_room(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    return leave_l1_room(config.blocks_per_multiprocessor, backward_pipelined_bytes(spec, config))


def _in_bulk(
    spec: BackwardSpec, config: BackwardPipelined, architecture: int, limit: int
) -> BackwardPipelined | None:
    """Return the configuration with bulk copies, if they are faster and fit; the bits stay."""
    gpu = gpu_of(architecture)
    if not (gpu.bulk_copies and _can_be_in_bulk(spec, config) and _gains_in_bulk(spec, config)):
        return None
    if not gpu.timed and _is_crowded_in_bulk(spec, config):
        return None
    in_bulk = dataclasses.replace(config, bulk=True, stages=_bulk_stages(spec, config))
    return in_bulk if backward_pipelined_bytes(spec, in_bulk) <= limit else None


def _can_be_in_bulk(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    """Tell whether a row is copied as it is, and shared memory has room.

    Without gradients a multiprocessor has room for two blocks with the other copies.
    """
    whole = config.full and config.vector == pack_length(spec.x) and config.row_threads >= 64
    return whole and ITEMSIZE[spec.x] == ITEMSIZE[spec.dy] and spec.gradients > 0


def _is_crowded_in_bulk(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    """Tell whether up to 16 bytes would spill on sm_100, though none do on sm_90."""
    if spec.gradients < 2 or not config.hold_weight:
        return False
    if spec.zero_centered and spec.bitmask and config.block_threads > 448:
        return True
    # With whole quarters of a multiprocessor each thread has more registers.
    quarters = config.block_threads % 128 == 0
    return not quarters and (config.packs_per_thread >= 3 or config.hold_row)


def _gains_in_bulk(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    """Tell whether bulk copies are faster: LayerNorm waits for its instructions, and saves 6 %.

    RMSNorm gains where notes.md#bulk-copies says so, but not if 3 packs are held.
    """
    size, blocks = ITEMSIZE[spec.x], config.cluster_blocks
    if config.hold_row and config.packs_per_thread == 3:
        return False
    if spec.norm == "layer_norm":
        return size >= 4 or blocks != 2
    if blocks > 1:
        return size >= 4 or blocks == 2
    at_least, less_than = Tuned.bulk_threads_of_one_team
    one_team = config.rows_per_block == 1 and at_least <= config.block_threads < less_than
    return size == 8 or one_team


def _bulk_stages(spec: BackwardSpec, config: BackwardPipelined) -> int:
    """Return the stages of rows that are copied in bulk."""
    if config.cluster_blocks == 1:
        return Tuned.bulk_stages
    packs = config.blocks_per_multiprocessor * config.block_threads * config.packs_per_thread
    # With more packs, 6 stages leave no room for the sums of rows.
    if config.cluster_blocks == 2 or spec.norm == "rms_norm" or packs > 1024:
        return Tuned.bulk_stages_in_pairs
    return Tuned.bulk_stages_in_clusters
