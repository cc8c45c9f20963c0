"""How a backward pass lays rows that wait in shared memory over teams of threads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cupynorm._layout.architectures import (
    LEAST_FILLED,
    MOST_CLUSTER_BLOCKS,
    MOST_SHARED_BESIDE_L1,
    REGISTERS_PER_MULTIPROCESSOR,
    gpu_of,
    leave_l1_room,
    most_cluster_blocks,
    moves_8_bytes,
    pack_length,
    shared_limit,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._layout.reduction import Reduction, reduction_of
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype


@dataclass(frozen=True)
class BackwardPipelined:
    """As ForwardPipelined, with the weight gradients; each team of a block has a row.

    `hold_row`: xhat and dy stay in registers from a row's sums on. `shared_sums`: of how many
    gradients the sums of rows so far wait in shared memory. `hold_sums`: the other's in registers,
    else in device memory. `bulk`: one thread of a team copies its rows, else each thread the packs
    that it will read. `cells`: by cells, as rows at any address are: see kernels/unaligned.cuh.
    `through_l1`: copies of 16 bytes come by way of L1, as smaller ones do. `total_ahead`:
    dresidual_out waits in shared memory as well, else it is read where it is added.
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
    if spec.weight is not None and not config.hold_weight:
        size += elements * ITEMSIZE[spec.weight]
    if spec.gradients and config.rows_per_block > 1:
        size += elements * ITEMSIZE[compute_dtype(spec.x)]
    if config.bulk:
        size += -(-config.rows_per_block * config.stages * 8 // 128) * 128
    sums = elements // config.rows_per_block * ITEMSIZE[compute_dtype(spec.x)]
    return size + config.shared_sums * sums


def backward_pipelined(
    spec: BackwardSpec, n: int, vector: int, architecture: int
) -> BackwardPipelined | None:
    """Return the configuration of rows in shared memory, or None where that has no room."""
    plain = spec.without_residual
    for layout in _backward_layouts(plain, n, architecture):
        config = _of_layout(plain, n, vector, architecture, layout)
        if config is not None:
            return _with_residual(spec, config, architecture)
    return None


def _with_residual(
    spec: BackwardSpec, config: BackwardPipelined, architecture: int
) -> BackwardPipelined:
    """Return the configuration with what a residual needs, and the bits that it has without."""
    if spec == spec.without_residual:
        return config
    # By cells dx leaves in words, of x's dtype.
    cells = config.cells and spec.dx is None and spec.dresidual is None
    config = dataclasses.replace(config, cells=cells, hold_row=False)
    if spec.dresidual_out is None:
        return config
    limit = (shared_limit(architecture) + 1024) // config.blocks_per_multiprocessor - 1024
    least = 4 if config.bulk and config.cluster_blocks > 1 else 2
    for stages in range(config.stages, least - 1, -1):
        ahead = dataclasses.replace(config, stages=stages, total_ahead=True)
        if backward_pipelined_bytes(spec, ahead) <= limit:
            return ahead
    return config


# By the packs that a thread has of a row that a warp holds: the most packs of such a row, the
# threads of a block, the blocks of a multiprocessor, and the stages.
SHORT_LAYOUTS = {
    1: (16, 256, 3, 4),
    2: (64, 256, 2, 2),
    3: (96, 128, 3, 2),
    4: (128, 128, 2, 2),
    5: (160, 128, 2, 2),
}
# It takes 56.2 us, not 57.2, for 131072 rows of 256 and for 65536 of 512; but RMSNorm 55.2, not
# 55.0, and 55.1, not 54.9 (bfloat16, float32 weight and bias, H200).
SHORT_LAYOUTS_OF_LAYER_NORM = {**SHORT_LAYOUTS, 2: (64, 128, 4, 2)}

# By the packs that a thread has of a longer one, the threads of a multiprocessor: their registers
# hold the weight, up to 5 packs of it, and its gradients.
LONG_THREADS = {2: 512, 3: 384, 4: 256, 5: 256, 6: 256, 7: 256}


class _Layout(NamedTuple):
    """Threads and stages of rows of some length, before it is known whether they find room."""

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    cluster_blocks: int
    stages: int


def _backward_layouts(spec: BackwardSpec, n: int, architecture: int) -> Iterator[_Layout]:
    """Yield the layouts of rows of n elements, the fastest first, then for what does not fit.

    What decides is whether the row fills its packs, and the teams their multiprocessor: LayerNorm
    of 1280 takes 201 us by 32 threads of 5 packs, 226 by 96 of 2; of 4608 199 by two teams of 192
    threads, 242 by one of 288; of 18432 205 by two blocks of 384 threads, 280 by four of 256 (2**27
    elements of bfloat16, float32 weight and bias, H200). benchmarks/notes.md has more.
    """
    packs = -(-n // pack_length(spec.x))
    whole = n % pack_length(spec.x) == 0
    yield from _short_layouts(spec, packs)
    # 7 packs a thread, two blocks of four rows: 107 us, not 121, for 41943 rows of 1600, but
    # RMSNorm 105, not 107, of 1792 105, not 104.
    if spec.norm == "layer_norm" and whole and 192 < packs <= 224:
        yield _Layout(32, 128, 2, 1, 2)
    yield from _long_layouts(spec, packs, whole, architecture)
    # More registers and shared memory for a short row's, where it has operands of float64 or the
    # architecture little shared memory.
    for width, block_threads in ((2, 512), (4, 256), (2, 256), (2, 128)):
        row_threads = team_threads(packs, width)
        if row_threads <= 32:
            yield _Layout(row_threads, block_threads, 1, 1, 3)
    # And for one of up to 1024 packs, which two blocks hold.
    if 512 < packs <= 1024 and gpu_of(architecture).clusters:
        yield _Layout(256, 256, 1, 2, 3)


def _short_layouts(spec: BackwardSpec, packs: int) -> list[_Layout]:
    """Return those of rows that a warp holds, by how many packs its threads leave empty."""
    ranked = []
    layouts = SHORT_LAYOUTS_OF_LAYER_NORM if spec.norm == "layer_norm" else SHORT_LAYOUTS
    for width, (most_packs, block_threads, blocks, stages) in layouts.items():
        row_threads = team_threads(packs, width)
        if packs <= most_packs and (width <= 2 or packs >= LEAST_FILLED):
            rank = slots_of(packs, row_threads), width
            ranked.append((rank, _Layout(row_threads, block_threads, blocks, 1, stages)))
    return [layout for _, layout in sorted(ranked)]


def _long_layouts(spec: BackwardSpec, packs: int, whole: bool, architecture: int) -> list[_Layout]:
    """Return those of longer rows, by how well they use what LONG_THREADS could hold.

    `whole`: the last pack is inside the row.
    """
    ranked = []
    may_hold = _may_hold_rows(spec, architecture) and spec.gradients < 2
    for cluster_blocks, width in itertools.product((1, 2, 4, 8, 16), LONG_THREADS):
        most = LONG_THREADS[width]
        row_threads = team_threads(-(-packs // cluster_blocks), width)
        # 5 packs leave shorter rows few threads; beyond `most` they spill.
        if (width == 5 and packs <= 512) or (width >= 5 and row_threads > most):
            continue
        slots = slots_of(packs, cluster_blocks * row_threads)
        if width >= 6:
            fewer_would_do = slots < width * cluster_blocks * row_threads
            by_cells = spec.x != "float64" and gpu_of(architecture).asynchronous_copies
            if fewer_would_do or not (whole or by_cells):
                continue
            full = packs == slots and whole
            # RMSNorm's that are held: 131 us, not 134, for 16384 rows of 5376, 142, not 148, of
            # 5760, with a float32 weight 140, not 154; but 152, not 148, of 6144, which fill them,
            # and by 7 packs 163, not 158, of 6656 (bfloat16, H200).
            held = (cluster_blocks, row_threads, width) == (1, 128, 6) and may_hold
            held = held and whole and not full
            if not (held or _by_many_packs(spec, full, whole, row_threads, cluster_blocks)):
                continue
        # Empty slots are waited for, and packs are compared with the row's end.
        filled = (packs / slots) ** 2
        if cluster_blocks > 1:
            if packs <= 1024 or cluster_blocks > most_cluster_blocks(architecture):
                continue
            for blocks in range(1, most // row_threads + 1):
                used = blocks * row_threads / most
                # RMSNorm of 16384 rows of 12288 takes 285 us so, 297 by three small blocks on each
                # multiprocessor; by four blocks 334, not 295, for 8192 of 24576 (bfloat16, H200).
                two_of_two_packs = cluster_blocks == 2 and width == 2 and row_threads >= 352
                if two_of_two_packs and may_hold:
                    used = 1.0
                rank = used * filled, -cluster_blocks, width
                layout = _Layout(row_threads, row_threads, blocks, cluster_blocks, 3)
                ranked.append((rank, layout))
        elif row_threads >= 64:
            if width == 4 and spec.gradients == 2:
                most = 320
                # Then the weight stays in shared memory: 246 us at 9728, where 256 threads of 5
                # packs take 203.
                if packs % row_threads:
                    filled *= 0.8
            # By a block of 640, 512 rows of 5120 took 23.6 us, by one of 320 16.3; by one of 448
            # that of 5376 takes 113 us, by one of 352 threads of 2 packs 123 (LayerNorm, bfloat16,
            # H200).
            most_threads = max(most, 448 if width <= 3 else row_threads)
            # By two teams of 224 that of 5248 spills beside two gradients, 151 us, by 128 threads
            # of 6 packs 104; but not what is copied in bulk, nor rows of no whole packs, whose
            # weight is not held. RMSNorm's that may be held have 6 packs there as well (above).
            in_bulk = packs == slots and spec.norm == "layer_norm" and gpu_of(architecture).timed
            if width == 3 and (spec.gradients == 2 or may_hold) and whole and not in_bulk:
                most_threads = max(most, min(row_threads, 448))
            for block_threads in range(row_threads, min(most_threads, 512) + 1, row_threads):
                used = min(block_threads / most, most / block_threads)
                rank = used * filled, -1, -width
                ranked.append((rank, _Layout(row_threads, block_threads, 1, 1, 3)))
    return [layout for _, layout in sorted(ranked, reverse=True)]


def _by_many_packs(
    spec: BackwardSpec, fills_them: bool, whole: bool, row_threads: int, cluster_blocks: int
) -> bool:
    """Tell whether rows are sooner by 6 or 7 packs a thread, if they fit.

    LayerNorm's, by up to 128 threads or in clusters of blocks of 224 and 256: 107 us, not 115, for
    20971 rows of 3200, 107, not 117, for 10485 of 6400, 111, not 129, for 2621 of 25600, and in
    place of rows that fewer packs copy in bulk 108, not 113, for 10082 of 6656 (of float32 3328 and
    float64 1664 take 1 and 4 % longer); but by 256 threads without a cluster 150, not 111, for 4854
    of 13824, by a cluster of blocks of 128 117, not 109, for 5592 of 12000. And of either norm by 8
    and 16 blocks: LayerNorm 111, not 140, RMSNorm 105, not 122, for 682 of 98304; else RMSNorm 106,
    not 103, for 3048 of 22016, and with a bias, beside which it spills, 132, not 107, for 322 of
    208000. By up to 4 blocks not where the row `fills_them`, and could be copied in bulk by fewer:
    111, not 108, of 24576 (bfloat16, float32 weight and bias, H200). Where the last pack is not
    `whole`, LayerNorm's in one block, 161, not 201, for 11184 of 6001, or in 16, where they would
    be streamed, 297, not 469, for 335 of 200001; but 250, not 232, for 2621 of 25601, 281, not 259,
    for 682 of 98305.
    """
    if (cluster_blocks == 1) != (row_threads <= 128):
        return False
    if not whole and spec.norm == "layer_norm" and cluster_blocks not in (1, MOST_CLUSTER_BLOCKS):
        return False
    if spec.norm == "rms_norm":
        return cluster_blocks >= 8 and spec.gradients < 2
    return cluster_blocks >= 8 or not fills_them


def _of_layout(
    spec: BackwardSpec, n: int, vector: int, architecture: int, layout: _Layout
) -> BackwardPipelined | None:
    """Return the configuration of a layout, or None where it finds no room."""
    row_threads, block_threads, blocks_per_multiprocessor, cluster_blocks, stages = layout
    length = pack_length(spec.x)
    packs_per_thread = -(-n // (length * row_threads * cluster_blocks))
    # A quarter of a multiprocessor has whole warps: 320 threads have the registers of 384.
    threads = -(-block_threads * blocks_per_multiprocessor // 128) * 128
    most_registers = min(255, REGISTERS_PER_MULTIPROCESSOR // threads // 8 * 8)

    # Held beside both, by 416 and 448 threads, 12 bytes would spill on sm_100.
    both = spec.zero_centered and spec.bitmask and spec.gradients == 2
    spare = 8 if both and architecture >= 100 and block_threads % 128 else 0

    def fits(hold_weight: bool, vector: int) -> bool:
        return most_registers >= spare * hold_weight + _backward_registers(
            spec,
            packs_per_thread,
            vector=vector,
            hold_weight=hold_weight,
            clustered=cluster_blocks > 1,
        )

    # Whatever the alignment, so that a row's bits do not depend on it.
    if not (fits(False, length) and fits(False, 1)):
        return None
    # Beyond 4 packs in a cluster the compiler is not told that the row fills them: it would spill
    # up to 44 bytes, 120 beside a bitmask. LayerNorm of 819 rows of 81920 takes 109 us, not 111.
    full = n == cluster_blocks * row_threads * packs_per_thread * length
    full = full and (packs_per_thread <= 4 or cluster_blocks == 1)
    by_8_bytes = moves_8_bytes(spec.x, vector)
    by_cells = not by_8_bytes and gpu_of(architecture).asynchronous_copies
    choices = (True, False) if by_cells else (False,)
    # A block's own 1 KiB is the system's.
    limit = (shared_limit(architecture) + 1024) // blocks_per_multiprocessor - 1024
    # How rows are copied does not decide it either: by single elements 7 packs took four times as
    # long.
    in_part = packs_per_thread >= 6 and n % length > 0
    # Held beside cells, of float32 2 to 5 % sooner, if without a bitmask, which would spill; of 16
    # bits LayerNorm takes 222 us, not 215, for 41943 of 1601. Held where accesses are of 8 bytes,
    # 218 us, not 228, for 16384 of 8188 (bfloat16, H200).
    for cells, fewer in itertools.product(choices, range(stages, 1, -1)):
        holds = by_8_bytes or (cells and spec.x == "float32" and not spec.bitmask)
        config = BackwardPipelined(
            row_threads=row_threads,
            block_threads=block_threads,
            blocks_per_multiprocessor=blocks_per_multiprocessor,
            packs_per_thread=packs_per_thread,
            cluster_blocks=cluster_blocks,
            stages=fewer,
            vector=vector,
            hold_weight=spec.weight is not None and holds and fits(True, vector),
            hold_row=False,
            shared_sums=0,
            hold_sums=False,
            full=full,
            bulk=False,
            cells=cells,
            through_l1=False,
            total_ahead=False,
            reduction=reduction_of(spec, n),
        )
        if in_part and by_cells and not cells:
            continue
        least_held = dataclasses.replace(config, hold_weight=False, cells=cells or in_part)
        if max(backward_pipelined_bytes(spec, c) for c in (config, least_held)) <= limit:
            return _completed(spec, config, limit, architecture)
    return None


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
    if spec.bitmask:  # by twice as many LayerNorm took 255 us, not 174, for 12288 rows of 9216
        registers += 12 * packs
    if clustered:
        registers += 12
    if vector < length:
        registers += packs * (packs + 4) - 1
    return registers


def _completed(
    spec: BackwardSpec, config: BackwardPipelined, limit: int, architecture: int
) -> BackwardPipelined:
    """Return the configuration with all that does not decide whether it fits."""
    config = dataclasses.replace(config, hold_row=_holds_row(spec, config, architecture))
    found = _in_bulk(spec, config, architecture, limit)
    if found is None:
        hold = config.hold_weight and not _is_crowded(spec, config, architecture)
        found = dataclasses.replace(config, hold_weight=hold)
    return _in_all_room(spec, found, limit, architecture)


def _is_crowded(spec: BackwardSpec, config: BackwardPipelined, architecture: int) -> bool:
    """Tell whether registers have no room for the weight, where rows are not copied in bulk.

    4 packs beside both gradients leave none, but in clusters, whose blocks are smaller; nor do 6 or
    7, which would spill 130 bytes, but where rows are held, which have one gradient. Both gradients
    of 512 threads would spill beside a wider dy, to an L1 by way of which it comes: LayerNorm takes
    140 us, not 162, for 8192 rows of 8192 (float16, dy float32, H200).
    """
    both, threads = spec.gradients == 2, config.row_threads
    if config.packs_per_thread > 5:
        return not config.hold_row
    if both and threads == 512 and gpu_of(architecture).timed and _copies_halves(spec, config):
        return True
    return both and config.packs_per_thread == 4 and config.cluster_blocks == 1 and threads > 32


def _may_hold_rows(spec: BackwardSpec, architecture: int) -> bool:
    """Tell whether xhat and dy of a row can stay in registers, if it fits and is well aligned.

    RMSNorm has them to spare, but not beside a float64 weight. Beside a bitmask it takes 1 to 4 %
    longer by 2 and 4 packs a thread, as ptxas then asks for its bits later; float64 gains nothing
    (bfloat16, H200).
    """
    narrow = ITEMSIZE[spec.dy] <= ITEMSIZE[spec.x] <= 4 and spec.weight != "float64"
    with_room = spec.norm == "rms_norm" and not spec.bitmask and narrow
    return with_room and gpu_of(architecture).asynchronous_copies


def _holds_row(spec: BackwardSpec, config: BackwardPipelined, architecture: int) -> bool:
    """Tell whether xhat and dy of a row stay in registers.

    A tenth of the instructions less, and a stage is filled again a reduction earlier: 377 us, not
    384, for 32768 rows of 8192, 192, not 196, of 4096, 123, not 128, for 16384 of 5120, 215, not
    223, of 9216. But 105, not 103, for 1048576 of 64, 19.7, not 19.4, for 32768 of 256. In clusters
    they come instead of the next row's sums: by two and four blocks 228, not 233, for 8192 of 19200
    and 472, not 490, of 40960, 311, not 323, of 26000; by 256 threads of 4 packs 398, not 383, of
    32768, by three small blocks a multiprocessor 278, not 269, for 16384 of 11264 (bfloat16, H200).
    """
    if not (moves_8_bytes(spec.x, config.vector) and _may_hold_rows(spec, architecture)):
        return False
    packs, threads = config.packs_per_thread, config.row_threads
    both = spec.gradients == 2
    if config.cluster_blocks > 1:
        by_many_threads = threads >= 384 or (config.cluster_blocks == 2 and packs == 2)
        spills = both and architecture >= 120  # up to 24 bytes
        return config.cluster_blocks <= 4 and (packs == 5 or by_many_threads) and not spills
    if packs >= 6:  # only where they are held, and do not spill
        return True
    if threads <= 32 and packs < 3:
        return False
    # Of more there would be spills of up to 280 bytes. 1152 slots have 3 packs of 384 threads.
    fewer = spec.zero_centered or not gpu_of(architecture).clusters
    most = (1024 if fewer else 1152) if both else 1280
    return packs * config.block_threads * config.blocks_per_multiprocessor <= most


def _in_all_room(
    spec: BackwardSpec, config: BackwardPipelined, limit: int, architecture: int
) -> BackwardPipelined:
    """Return the configuration with what shared memory and L1 have room for besides.

    Of a dy wider than x, of whose packs of 32 bytes each copies a half, copies past L1 ask the L2
    for the same sectors twice. Sums, and a third stage, leave room in L1 for such rows, if without
    them there is: RMSNorm takes 138 us by two stages, 156 by three, for 16384 of 4104 (float16, dy
    float32, H200). By way of L1 it takes 256 us, not 354, for 32768 rows of 4096, LayerNorm, with
    what L1 is left, 199, not 236, for 16384 of 5376 (float16, dy float32, H200); other GPUs were
    not measured.
    """
    if not (gpu_of(architecture).timed and _copies_halves(spec, config)):
        return _sharing_sums(spec, config, limit)
    room_beside_l1 = MOST_SHARED_BESIDE_L1 // config.blocks_per_multiprocessor - 1024
    through_l1 = dataclasses.replace(config, through_l1=True)
    for stages in (config.stages, 2):
        fewer = dataclasses.replace(through_l1, stages=stages)
        sharing = _sharing_sums(spec, fewer, room_beside_l1)
        if _leaves_l1_room(spec, sharing):
            return sharing
    return _sharing_sums(spec, through_l1, limit)


def _sharing_sums(spec: BackwardSpec, config: BackwardPipelined, limit: int) -> BackwardPipelined:
    """Return the configuration with sums of rows in shared memory, as far as there is room.

    In partials they are read and written once every 64 rows, which all threads wait for: LayerNorm
    takes 758 us, not 786, for 32768 rows of 16384, 378, not 389, of 8192, RMSNorm 768, not 782, and
    384, not 391. Beside six stages there is room for one gradient's alone, and registers for the
    other's: 1475 us, not 1516, for LayerNorm of 32768 rows of 32768 (1545 with both in partials),
    1553 by five stages. L1 has what shared memory leaves, and in it what is spilled by 5 packs a
    thread: LayerNorm of 4096 rows of 40960 takes 253 us with one gradient's sums there, 323 with
    both, 261 with none (bfloat16, float32 weight and bias, H200). Where accesses are of less than
    16 bytes those of several teams alone: with a weight held LayerNorm takes 206 us, not 223 with
    neither, for 32768 rows of 4100, but 239, not 218, for 16384 of 8188, by one.
    """
    if config.vector < pack_length(spec.x) and config.rows_per_block == 1:
        return config
    used = backward_pipelined_bytes(spec, config)
    size = backward_pipelined_bytes(spec, dataclasses.replace(config, shared_sums=1)) - used
    shared = max(0, min(spec.gradients, (limit - used) // size))
    if config.packs_per_thread > 4:
        shared = min(shared, 1)
    hold = config.bulk and config.cluster_blocks > 1 and shared == spec.gradients - 1
    return dataclasses.replace(config, shared_sums=shared, hold_sums=hold)


def _is_dy_wider(spec: BackwardSpec) -> bool:
    """Return whether a pack of dy has more bytes than one of x."""
    return ITEMSIZE[spec.dy] > ITEMSIZE[spec.x]


def _copies_halves(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    """Tell whether dy's packs are copied by halves, or less: not by cells, which lanes share."""
    return _is_dy_wider(spec) and not config.cells


def _leaves_l1_room(spec: BackwardSpec, config: BackwardPipelined) -> bool:
    return leave_l1_room(config.blocks_per_multiprocessor, backward_pipelined_bytes(spec, config))


def _in_bulk(
    spec: BackwardSpec, config: BackwardPipelined, architecture: int, limit: int
) -> BackwardPipelined | None:
    """Return the configuration with bulk copies, where they are ahead and fit; the bits stay.

    LayerNorm, whose instructions are what it waits for, saves 6% of them: 197 us against 205 at
    N = 4096, 306 against 327 at 6144, 396 against 402 at 8192, 397 against 408 for 8192 rows of
    32768, 400 against 408 for 4096 of 65536. But of 16 bits, in clusters of two, 387 against 384
    for 16384 rows of 16384, where RMSNorm takes 752 against 762 for 32768. Elsewhere RMSNorm of 16
    bits takes 1 to 2% more, and rows that do not fill their packs 677 against 636 for 8192 of
    40960 (bfloat16, H200). Of float64 either norm gains up to 5%, but RMSNorm by 16 blocks, and in
    clusters so does float32: 380 against 394 and 383 against 395 for 16384 of 4096 float64, 392
    against 384 for RMSNorm's 2048 of 32768, 382 against 391 for its 8192 of 16384 float32, 381
    against 387 for LayerNorm's 16384 of 8192. And RMSNorm by one team of 320 to 448 threads: 147
    against 157 for 16384 of 6144, 102 against 107 for 10082 of 6656 (bfloat16), 100 against 105 for
    10922 of 3072 float32, but 1% more by 480 and 512; with a bias 110 against 140 for 6553 of
    10240, which spill otherwise. Not of 3 packs that are held: 222 against 216 for 16384 of 9216,
    434 against 421 of 18432 (bfloat16, H200).

    In LayerNorm's larger clusters 6 stages: with 5, 417 where 6 take 397; but 5 where 6 leave no
    room for the sums of rows, by 3 packs a thread: 153 against 161 for 8192 of 12288. In RMSNorm's
    5: 382 and 381 for 8192 of 16384 and 4096 of 32768 float32, with 6 389 and 380. Without
    gradients two blocks of the others' shared memory find room on a multiprocessor.
    """
    size = ITEMSIZE[spec.x]
    plain = config.full and config.vector == pack_length(spec.x) and config.row_threads >= 64
    plain = plain and size == ITEMSIZE[spec.dy] and spec.gradients > 0
    clustered, in_pairs = config.cluster_blocks > 1, config.cluster_blocks == 2
    if spec.norm == "layer_norm":
        ahead = size >= 4 or not in_pairs
    elif clustered:
        ahead = size >= 4 or in_pairs
    else:
        alone = config.rows_per_block == 1 and 320 <= config.block_threads < 480
        ahead = size == 8 or alone
    three_packs_held = config.hold_row and config.packs_per_thread == 3
    if not gpu_of(architecture).timed or three_packs_held or not (plain and ahead):
        return None
    packs = config.blocks_per_multiprocessor * config.block_threads * config.packs_per_thread
    of_five = clustered and (in_pairs or spec.norm == "rms_norm" or packs > 1024)
    stages = 5 if of_five else 6 if clustered else 4
    in_bulk = dataclasses.replace(config, bulk=True, stages=stages)
    return in_bulk if backward_pipelined_bytes(spec, in_bulk) <= limit else None
