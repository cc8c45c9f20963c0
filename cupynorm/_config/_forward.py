"""How a forward pass lays rows over threads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupynorm._config._limits import (
    FIRST_WITH_ASYNCHRONOUS_COPIES,
    FIRST_WITH_CLUSTERS,
    HOLD_2048_THREADS,
    LEAST_FILLED,
    MOST_CLUSTER_BLOCKS,
    MULTIPROCESSORS,
    at_lines,
    leave_l1_room,
    most_cluster_blocks,
    moves_8_bytes,
    pack_length,
    shared_limit,
    slots_of,
    streaming_blocks,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._spec import ITEMSIZE, ForwardSpec

# An L2 of 4 to 6 MiB, as some GPUs before have, would give up what is fetched ahead unread.
FIRST_WITH_ROWS_AHEAD = 90
STAGED_THREADS = 512  # at most, of a block that stages rows in the forward pass
TWO_CLUSTERS_THREADS = 256  # the same, where two are on a multiprocessor
MOST_SHORT_ELEMENTS = 1 << 23  # of few rows of less than a warp


@dataclass(frozen=True)
class ResidentForward:
    """Rows held in registers, read once, each by `row_threads` threads of `cluster_blocks` blocks.

    In several blocks they give the bits of one block with all these threads, for few rows.
    `pack_length`: the elements of 16 bytes, or of 8 (_own_pack_length).
    `rare_last`: what is rare comes last in the code, for few rows. `hold_weight`: weight and bias
    are asked for with the row, not after it is measured. `full`: the row fills its threads' packs
    exactly. `blocks_ahead`: a block has the L2 fetch the rows of the one so many later, or none if
    0; of an x of 32 MiB or more `blocks_ahead_if_large`.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    pack_length: int
    cluster_blocks: int
    vector: int
    rare_last: bool
    blocks_ahead: int
    blocks_ahead_if_large: int
    hold_weight: bool
    full: bool

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


@dataclass(frozen=True)
class StagedForward:
    """Rows in the shared memory of a cluster of blocks, `stages` of them at a time.

    Two blocks a multiprocessor let two clusters be at once. `hold_weight`, `hold_bias`: it is in
    registers, else in shared memory. `counted`: of many rows a cluster takes the next when it has
    room, as a count in device memory says; else in turn. `cells`: they are copied by cells, as rows
    are that accesses of 4 bytes or less move: see kernels/unaligned.cuh. `through_l1`: those of 16
    bytes by way of L1, as smaller ones. `turned`: to places as far from a line as they are: see
    kernels/stage.cuh.
    """

    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    cluster_blocks: int
    stages: int
    vector: int
    hold_weight: bool
    hold_bias: bool
    counted: bool
    cells: bool
    through_l1: bool
    turned: bool
    full: bool


@dataclass(frozen=True)
class StreamingForward:
    """Rows of any length, read twice, each by a cluster of blocks.

    A thread asks for `packs_per_thread` at once.
    """

    cluster_blocks: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    vector: int


def resident_forward_bytes(spec: ForwardSpec, config: ResidentForward) -> int:
    """Return the shared memory of a block: see kernels/forward.cu."""
    blocks = config.cluster_blocks
    size = team_bytes(spec.x, config.row_threads, config.block_threads, blocks, split=True)
    unaligned = config.vector == 1 and ITEMSIZE[spec.x] <= 4 and config.packs_per_thread > 2
    if unaligned and ITEMSIZE[spec.y] <= 4:
        size += config.block_threads * config.pack_length * ITEMSIZE[spec.y]
    return size


def staged_forward_bytes(spec: ForwardSpec, config: StagedForward) -> int:
    """Return the shared memory of a block: see kernels/forward_staged.cu."""
    packs = config.block_threads * config.packs_per_thread
    size = team_bytes(spec.x, config.block_threads, config.block_threads, config.cluster_blocks)
    size += 128  # the next rows' numbers, and the rest of their line
    size += config.stages * packs * 16
    if config.cells:
        size += config.stages * packs // 32 * 16
    for dtype, held in ((spec.weight, config.hold_weight), (spec.bias, config.hold_bias)):
        if dtype and not held:
            size += packs * pack_length(spec.x) * ITEMSIZE[dtype]
    return size


def forward_config(
    spec: ForwardSpec, n: int, vector: int, architecture: int
) -> ResidentForward | StagedForward | StreamingForward:
    """Return the configuration of a forward pass over rows of n elements."""
    length = pack_length(spec.x)
    packs = -(-n // length)
    wide = _is_wide(spec)
    # Where weight and bias together are more than a 16-bit row, registers hold them from row to
    # row: at N = 16384, 0.91 of the copy's speed against 0.87; where they are no more, it is 0.99
    # without (bfloat16, H200). LayerNorm of float32 and float64 has 8 packs a thread instead, and
    # RMSNorm: 79.8 us, not 82.6, for 4096 rows of 16384, 16.0, not 27.1, for 512 (bfloat16, float32
    # weight and bias, H200).
    exceed = spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2
    exceed = exceed and _affine_bytes(spec) > 4 and not wide
    # LayerNorm of 24576 takes 132 us in registers, 153 in shared memory (2**27 elements), with a
    # float32 weight and bias 83 and 80 (2**26 elements; bfloat16, H200).
    fewest_threads = _has_fewest_threads(spec, packs)
    most_packs = 1024 if wide else 3072 if fewest_threads else 2048
    most_resident = most_packs // 2 if exceed else most_packs
    if n % 2:  # 142 us, not 167, for 4096 of 20001 (bfloat16 throughout, H200)
        most_resident = min(most_resident, 2048)
    if packs > most_resident:
        staged = _staged_forward(spec, n, packs, vector, architecture)
        if staged is not None:
            return _at_no_lines(spec, n, _by_cells(spec, staged, architecture), architecture)
        if packs > most_packs:
            return _streaming_forward(spec, packs, vector, architecture)
    row_threads = team_threads(packs, _packs_per_thread(spec, n, packs))
    packs_per_thread = -(-packs // row_threads)
    own_length = _own_pack_length(spec, n, packs, row_threads, packs_per_thread)
    halves = own_length < length
    if halves and row_threads < 32 and packs_per_thread >= 4:
        row_threads *= 2
    if spec.relu:
        row_threads = max(row_threads, 8 // own_length)  # a byte of the bitmask is of neighbours
    packs_per_thread = -(-packs // row_threads)
    own_packs = -(-n // (row_threads * own_length))
    # A row of several warps has a block to itself: sharing cost 13% at N = 2048 (bfloat16, H200).
    block_threads = max(row_threads, 64)
    full = n == row_threads * own_packs * own_length
    # Registers for weight and bias beside 40 to 60 for the rest. A row of more warps waits longer
    # for the slowest than it gains: 3% at N = 8192 (bfloat16, float32 weight, H200). A 16-bit
    # weight costs half as many: 5.9 us against 6.4 at 1x8192, 4089 GB/s against 4088 at 32768x8192.
    # Beside a ReLU or a weight around zero fewer threads would be left: 66.7 us, not 73.9 and 71.1,
    # at 13107x5120, 67.2 and 67.0, not 72.0 and 69.8, at 8192x8192 (bfloat16, H200).
    plain, wider_y = not (spec.relu or spec.zero_centered), _is_y_wider(spec)
    affine = _affine_registers(spec, packs_per_thread)
    most_held = 16 if spec.x == "float64" else 32
    # With more threads instead, LayerNorm takes 68.9 us against 72.2 at 1048576x64, 132 against 141
    # at 128; 14.7 against 13.9 at 32768x256 (bfloat16, H200).
    crowded = spec.norm == "layer_norm" and packs <= 16 and affine > 24
    if crowded:
        most_held = 24
    slim_weight = affine <= 16 and widest(spec.weight, spec.bias) <= 2
    most_threads = 256 if slim_weight and plain else 128
    if spec.norm == "rms_norm" and spec.x == "float64" and packs_per_thread > 4:
        most_held, most_threads = 32, 256  # 497 us, not 503, at 32768x4096 (H200)
    # Not in LayerNorm's rows of several warps: 4144 GB/s against 3659 at N = 4096, 3920 against
    # 3605 at 2048 (bfloat16, H200); few rows have few_rows_configs.
    never = wide or (spec.norm == "layer_norm" and row_threads > 32)
    # By accesses of 8 bytes RMSNorm with a 16-bit weight takes 81 us, not 96, for 262144 rows of
    # 300, with a float32 one 115, not 119, for 131072 of 900, but with a 16-bit one 140, not 134,
    # for 32768 of 4100, LayerNorm 133, not 121, for 131072 of 900, though in packs of 8 bytes 58.5,
    # not 65.7, for 262144 of 204; RMSNorm's held by 96 threads 71.6, not 68.1, for 32768 of 2052
    # (bfloat16, H200).
    by_8_bytes = moves_8_bytes(spec.x, vector) and plain and row_threads <= 64
    by_8_bytes = by_8_bytes and (spec.norm == "rms_norm" or halves)
    may_hold = vector == length or by_8_bytes
    hold_weight = may_hold and row_threads <= most_threads and not never
    hold_weight = hold_weight and affine <= most_held
    # Threads that a multiprocessor must hold at once bound their registers. What would spill has
    # fewer: up to 122 registers where single 16-bit elements are moved.
    slim = spec.norm == "rms_norm" and full and plain
    slim = slim and architecture >= FIRST_WITH_CLUSTERS  # where NVRTC needs 80 registers, not 88
    if wide:
        threads = 256
    elif slim and hold_weight and slim_weight and packs_per_thread == 4:
        threads = 1024  # 512 rows at once: 8.74 us against 9.73 at 512x8192 (bfloat16, H200)
    elif length == 8 and vector < own_length:
        threads = 512 if spec.norm == "layer_norm" or not plain else 640
        if packs_per_thread <= 4:
            threads = 768
        elif fewest_threads and n % length and plain and not wider_y and architecture == 90:
            # 91 us, not 99, for 16384 of 4097, 97 for 6500 of 10241 by 6 packs (_packs_per_thread),
            # with a float32 weight and bias 97, not 101, and of 7 packs 102, not 128 (bfloat16,
            # H200). On other GPUs, where nothing was measured, up to 140 bytes would be spilled.
            threads = 672 if packs_per_thread <= 6 else 640
    elif packs_per_thread > 4 and fewest_threads:
        threads = 800  # 132 us against 137 by 640 at 7168, 134 against 139 at 10240
        # Of packs of 8 bytes 11 or 12 a thread: 136 us against 148 by 640 at 4100, 101 against 104
        # at 3004. More, or beside a ReLU, leave too few registers: 163 against 145 at 8196, 153
        # against 127 at 6004. Of 9 or 10 by 512 73 against 75 at 2052 (bfloat16, H200).
        if halves and (packs_per_thread != 6 or not plain):
            threads = 640 if packs_per_thread > 5 else 512
    elif packs_per_thread > 6 and (spec.norm == "rms_norm" or spec.x == "float16"):
        threads = 512
    elif packs_per_thread > 4 or (hold_weight and not slim):
        threads = 640
    elif crowded and full and length == 8 and plain:
        threads = 1024
    else:
        threads = 768
    # At least two, as next to nothing spills: LayerNorm of float16 by 512 threads had 72 registers
    # and one block, and takes 14.7 us, not 16.3, at 512x16384, and by accesses of 8 bytes, with a
    # bfloat16 weight and bias, 352, not 474, for 16384 of 20004, by 384 threads, which spill 16
    # bytes, 362, not 449, for 14000 of 23196 (H200).
    blocks = max(2 if moves_8_bytes(spec.x, vector) else 1, threads // block_threads)
    blocks_ahead = _blocks_ahead(blocks, packs_per_thread, architecture)
    # Of a large x rows ahead mostly cost more than they save: RMSNorm takes 37.5 us, not 35.8, at
    # 32768x1024, LayerNorm 103.4, not 99.9, for 16384 of 6144, which have the fewest threads. But
    # other rows of LayerNorm gain: of up to a warp 36.5, not 37.7, at 32768x1024, 36.7, not 38.0,
    # with a bfloat16 weight and bias, 36.1, not 37.6, at 131072x256, though 67.6, not 67.1, at
    # 1048576x64; longer ones half as far 68.7, not 69.4, at 32768x2048, 252.6, not 255.1, at 8192,
    # 501, not 532, at 16384, of float16 255.4, not 270.2, at 8192, 117.6, not 131.8, for 16384 of
    # 7168. And RMSNorm's of 256 threads of 4 packs, the weight not held: 251.3, not 252.7, at
    # 32768x8192. Those of more than 384 threads half as far whatever the size: 22.9, not 23.5, for
    # 1000 of LayerNorm's 16384 (bfloat16, H200).
    blocks_ahead_if_large = 0
    if spec.norm == "rms_norm":
        of_most_threads = (row_threads, packs_per_thread) == (256, 4)
        if ITEMSIZE[spec.x] == 2 and of_most_threads and not hold_weight:
            blocks_ahead_if_large = blocks_ahead // 2
    elif row_threads <= 32:
        blocks_ahead_if_large = blocks_ahead
    elif not fewest_threads:
        blocks_ahead_if_large = blocks_ahead // 2
        if row_threads > 384:
            blocks_ahead = blocks_ahead_if_large
    return ResidentForward(
        row_threads=row_threads,
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks,
        packs_per_thread=own_packs,
        pack_length=own_length,
        cluster_blocks=1,
        vector=vector,
        rare_last=False,
        blocks_ahead=blocks_ahead,
        blocks_ahead_if_large=blocks_ahead_if_large,
        hold_weight=hold_weight,
        full=full,
    )


def _own_pack_length(
    spec: ForwardSpec, n: int, packs: int, row_threads: int, packs_per_thread: int
) -> int:
    """Return the elements of a pack of a row in registers: 16 bytes, or mostly 8 if none is whole.

    Then neighbouring threads have neighbouring accesses; by halves of packs of 16 bytes each access
    of a warp would meet half of each sector: RMSNorm takes 23.0 us, not 29.7, for 65536 rows of 300
    with twice the threads, LayerNorm 26.0, not 30.8, and 142, not 175, for 13000 of 10004; but 414,
    not 366, for 14000 of 23196, of which 16 a thread leave too few registers for two blocks. By
    accesses of 4 bytes RMSNorm takes 74 us, not 117, for 260000 of 258, 72, not 79, for 16384 of
    4098, LayerNorm 81, not 105, and 79, not 108. Where rows are of odd length shifts cost as much
    as that saves: RMSNorm would take 83, not 80, for 16384 of 4097. But a float32 weight and bias
    are read by whole lines: LayerNorm takes 82 us, not 91, for 65536 of 777, 102, not 116, for 4097
    (with bfloat16 ones 100 and 100), and short rows have twice the threads: RMSNorm takes 71, not
    88, for 262144 of 129, LayerNorm 77, not 103 (bfloat16, float32 weight and bias, H200). The
    alignment does not matter, as the bits must not depend on it.
    """
    length = pack_length(spec.x)
    too_many = packs_per_thread == 8 and row_threads > 320
    if ITEMSIZE[spec.x] > 4 or n % length == 0 or too_many:
        return length
    wide_affine = spec.norm == "layer_norm" and spec.x == "bfloat16" and _affine_bytes(spec) > 4
    return length // 2 if n % 2 == 0 or packs <= 64 or wide_affine else length


def _blocks_ahead(blocks_per_multiprocessor: int, packs_per_thread: int, architecture: int) -> int:
    """Return how many blocks ahead rows are fetched: those that all multiprocessors have at once.

    That is 2.5 to 8 MiB; of more than 4 packs a thread, as many packs as of 4. LayerNorm takes
    14.2 us, not 15.4, at 8192x1024, 13.4, not 13.9, at 32768x256, 15.4, not 16.1, at 4096x2048,
    RMSNorm 12.6, not 12.9, at 32768x256 (bfloat16, float32 weight and bias); with bfloat16 ones
    LayerNorm 19.7, not 20.7, at 4096x3584, and 20.7 by twice as far. The number of multiprocessors
    is not asked for, which costs 0.1 us at 4096x128 (RMSNorm of float16, H200).
    """
    if architecture < FIRST_WITH_ROWS_AHEAD:
        return 0
    return MULTIPROCESSORS * blocks_per_multiprocessor * 4 // max(4, packs_per_thread)


def few_rows_configs(
    spec: ForwardSpec, config: ResidentForward, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ResidentForward], ...]:
    """Return the configurations of few rows, each behind the most rows that it is for, ascending.

    They have the bits of `config`. Where all run at once, rows of a warp or several hold weight and
    bias, for registers are to spare: LayerNorm with both in bfloat16 takes 5.57 us, not 6.72, for
    one row of 4096, 7.97, not 8.70, for 512, but 11.8, not 10.4, for 512 of 8192, more than run at
    once; with both in float32 6.14, not 7.26, for 512 of 1024. What is rare comes last in their
    code: over some 20 shapes of decoding RMSNorm is 2.6% faster, LayerNorm 1%. Of RMSNorm's longest
    rows more than `config` runs at once do so by 64 registers a thread, which spills where a row is
    out of range: 512 of 16384 take 13.1 us, not 14.6, 512 of 12288 11.3, not 13.3 (bfloat16, H200).
    """
    # By accesses of 8 bytes RMSNorm takes 5.1 us, not 5.7, for 64 rows of 4100, 4.8, not 5.4, of
    # 1500, but LayerNorm 5.7, not 5.5, and 9.1, not 8.2, for 512 of 4100, though in packs of 8
    # bytes 5.2, not 6.2, 7.8, not 8.4, and 4.9, not 5.6, for 64 of 1500 (bfloat16, H200).
    halves = config.pack_length < pack_length(spec.x)
    least = 8 if spec.norm == "rms_norm" or halves else 16
    if config.vector * ITEMSIZE[spec.x] < least or _is_wide(spec):
        return ()
    if config.row_threads < 32:
        return _short_rows_configs(spec, config, n, architecture, multiprocessors)
    configs = []
    packs = _packs_of_16_bytes(spec, config)
    affine = _affine_registers(spec, packs)
    most_held, threads = 64, 512
    # Beside the row's own; more would spill, or does by more threads.
    if ITEMSIZE[spec.x] == 2:
        needed = affine + 4 * packs + 4 * spec.zero_centered
        needed += 3 * packs * spec.relu
        threads = 384 if needed > 80 else 512
        if packs == 8 and spec.relu:
            most_held = 32
    elif packs == 8:
        most_held = (64 if spec.x == "float32" else 32) if config.full else 0
    elif spec.x == "float64" and packs > 4 and not config.full:
        most_held = 0
    if 0 < affine <= most_held:
        blocks = max(1, threads // config.block_threads)
        held = dataclasses.replace(
            _none_ahead(config),
            rare_last=True,
            hold_weight=True,
            blocks_per_multiprocessor=blocks,
        )
        if architecture >= FIRST_WITH_CLUSTERS:
            configs += [_split(held, split) for split in _split_blocks(spec, config)]
        configs.append(held)
    plain = config.full and not (spec.bias or spec.relu or spec.zero_centered)
    plain = plain and config.vector == pack_length(spec.x)
    plain = plain and ITEMSIZE[spec.x] == ITEMSIZE[spec.y] == 2
    plain = plain and architecture >= FIRST_WITH_CLUSTERS
    if plain and spec.norm == "rms_norm" and packs == 8:
        if not configs or configs[-1].blocks_per_multiprocessor < config.blocks_per_multiprocessor:
            configs.append(config)
        blocks = 1024 // config.block_threads
        configs.append(
            dataclasses.replace(
                _none_ahead(config), hold_weight=False, blocks_per_multiprocessor=blocks
            )
        )
    return tuple((_most_at_once(few, multiprocessors), few) for few in configs)


def _packs_of_16_bytes(spec: ForwardSpec, config: ResidentForward) -> int:
    """Return how many such packs a thread's would be."""
    return -(-config.packs_per_thread * config.pack_length // pack_length(spec.x))


def _none_ahead(config: ResidentForward) -> ResidentForward:
    """Return the configuration of rows that all run at once, of which none is fetched ahead."""
    return dataclasses.replace(config, blocks_ahead=0, blocks_ahead_if_large=0)


def _most_at_once(few: ResidentForward, multiprocessors: int) -> int:
    """Return how many rows run at once, those of clusters with a multiprocessor for each block.

    64 rows of 8192 in clusters take 5.79 us, as one block each 5.62 (bfloat16, H200).
    """
    if few.cluster_blocks > 1:
        return multiprocessors // few.cluster_blocks
    return few.rows_per_block * few.blocks_per_multiprocessor * multiprocessors


def _short_rows_configs(
    spec: ForwardSpec, config: ResidentForward, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ResidentForward], ...]:
    """Return what `few_rows_configs` does, for rows of less than a warp.

    LayerNorm's of 4 packs a thread have twice the threads, whose registers then hold weight and
    bias: 13.9 us, not 15.0, at 32768x256, 7.2, not 7.5, at 8192x256, 14.0, not 15.1, at 16384x512,
    but 22.7, not 21.8, at 65536x256 and 23.2, not 21.7, at 32768x512. Rows of 2 packs a thread lose
    by it: RMSNorm takes 14.4 us, not 12.8, at 32768x256 (bfloat16, float32 weight and bias, H200).
    Where all run at once none is fetched ahead: 4.79 us, not 4.88, for RMSNorm of 4096x128
    (float16, H200); and what is rare comes last for LayerNorm, of whose rows one in twenty is
    measured again: 5.55 us, not 5.73, at 4096x256, 4.80, not 4.88, at 1024x256 (bfloat16, H200).
    """
    at_once = _none_ahead(config)
    if spec.norm == "rms_norm":
        return ((_most_at_once(at_once, multiprocessors), at_once),) if config.blocks_ahead else ()
    packs = _packs_of_16_bytes(spec, config)
    if packs > 4:  # beside which a second copy of what is rare spills
        return ()
    more: tuple[tuple[int, ResidentForward], ...] = ()
    if packs == 4 and config.pack_length == pack_length(spec.x):
        blocks = 768 // config.block_threads
        blocks_ahead = _blocks_ahead(blocks, 2, architecture)
        few = dataclasses.replace(
            config,
            row_threads=2 * config.row_threads,
            blocks_per_multiprocessor=blocks,
            packs_per_thread=2,
            blocks_ahead=blocks_ahead,
            blocks_ahead_if_large=blocks_ahead,  # never: the two alike leave no branch
            hold_weight=bool(spec.weight or spec.bias),
        )
        more = ((MOST_SHORT_ELEMENTS // n, few),)
        at_once = _none_ahead(few)
    at_once = dataclasses.replace(at_once, rare_last=True)
    return (_most_at_once(at_once, multiprocessors), at_once), *more


def _split_blocks(spec: ForwardSpec, config: ResidentForward) -> tuple[int, ...]:
    """Return the blocks, of two warps or more, of clusters that have few rows: the most first.

    A block waits for its instructions and loads, of which each of a cluster has its share:
    LayerNorm takes 5.3 us, not 6.2, for 8 rows of 16384, 5.2, not 5.4, for 8 of 8192, RMSNorm 5.3,
    not 5.6, for 8 of 16384. Clusters of 2 and of 8 gain less, but of 2 more rows are at once:
    LayerNorm takes 6.6 us, not 6.9, for 64 of 16384; but 6.7, not 6.65, for 64 of 12288, 5.7 with
    and without for 64 of 8192, RMSNorm 6.2, not 6.1, for 64 of 16384. In shorter rows they wait for
    each other as long: 4.94 us, not 4.91, for 8 of 4096 (bfloat16, H200). Sums of float64 keep the
    sign of one of two NaNs, and which the compiler decides for each kernel: those would differ. A
    ReLU beside 8 packs would spill, and so would 16 of 8 bytes.
    """
    packs = _packs_of_16_bytes(spec, config)
    if spec.x == "float64" or (packs == 8 and (spec.relu or config.packs_per_thread > 8)):
        return ()
    if config.row_threads < 256 or config.row_threads % 128:
        return ()
    slots = config.row_threads * packs  # those past the end too
    if slots >= 2048:
        return (4, 2) if spec.norm == "layer_norm" else (4,)
    return (4,) if spec.norm == "layer_norm" else ()


def _split(config: ResidentForward, blocks: int) -> ResidentForward:
    """Return the configuration of a row whose warps are those of a cluster of blocks."""
    threads = config.row_threads // blocks
    return dataclasses.replace(
        config,
        row_threads=threads,
        block_threads=threads,
        blocks_per_multiprocessor=config.blocks_per_multiprocessor * blocks,
        cluster_blocks=blocks,
    )


def _is_wide(spec: ForwardSpec) -> bool:
    """Return whether operands of float64 widen a pack of a narrower x: up to 168 registers."""
    return widest(spec.weight, spec.bias, spec.y) > max(4, ITEMSIZE[spec.x])


def _is_y_wider(spec: ForwardSpec) -> bool:
    """Return whether a pack of y has more bytes than one of x."""
    return ITEMSIZE[spec.y] > ITEMSIZE[spec.x]


def _affine_bytes(spec: ForwardSpec) -> int:
    """Return the bytes of an element of the weight and one of the bias."""
    return widest(spec.weight) + widest(spec.bias)


def _affine_registers(spec: ForwardSpec, packs_per_thread: int) -> int:
    """Return the registers that hold a thread's weight and bias."""
    return packs_per_thread * pack_length(spec.x) * _affine_bytes(spec) // 4


def _packs_per_thread(spec: ForwardSpec, n: int, packs: int) -> int:
    """Return how many packs of a row each thread of a ResidentForward holds."""
    # 8 packs of float64 and float32 need 72 to 95 registers: 254 us against 268 in shared memory
    # for 16384 rows of 8192 float32, 158 against 199 of 5000, 501 against 543 for 32768 of 4096
    # float64 (H200).
    wider = spec.norm == "layer_norm" and ITEMSIZE[spec.x] >= 4 and packs > 1024
    if wider:
        return 8
    if _has_fewest_threads(spec, packs):
        # With a bfloat16 weight and bias, by more threads besides, 97 us, not 114, for 6500 of
        # 10241, but 107 and 107 for 4800 of 14001; with float32 ones 8 packs are as fast, but for
        # those of 96 threads, whose warps the schedulers share unevenly: 93 us, not 101, for 11000
        # of 6001, 80, not 97, of 6002 (bfloat16, H200).
        fewer = n % 2 and packs <= 1536 and _affine_bytes(spec) <= 4
        of_96_threads = n % 4 and 640 < packs <= 768
        return 6 if fewer or of_96_threads else 8
    # Of the others those that the row fills best: LayerNorm of 2**27 elements takes 131 us at 320
    # by 8 threads of 5 packs, 187 by 32 of 2, 131 at 512 by 16 of 4, 144 by 32 of 2; RMSNorm 129 at
    # 3584 by 64 of 7, 135 by 224 of 2 (bfloat16, float32 weight and bias, H200).
    widths: tuple[int, ...] = 4, 3, 5, 6, 7
    if packs < LEAST_FILLED:
        return 2
    if packs <= (16 if spec.norm == "layer_norm" and spec.x == "bfloat16" else 64):
        widths = 2, 3, 5
    elif packs > 1024:
        widths = (8, 7, 6, 5) if spec.norm == "rms_norm" else (4, 5, 6, 7)
    elif packs > 512 and _affine_bytes(spec) > 4:
        widths = 7, 6, 5, 4
    return min(widths, key=lambda width: slots_of(packs, team_threads(packs, width)))


def _has_fewest_threads(spec: ForwardSpec, packs: int) -> bool:
    """Return whether a row has as few threads as hold it by 8 packs each, or 6 of some.

    LayerNorm of bfloat16 waits for its instructions and for weight and bias, of which each thread
    of a row loads its share. So it is as fast as a copy, or nearly, at any N: 2**27 elements take
    131 us at 11008 where they took 169 by 4 packs, with a float32 weight and bias 133 at 7680, not
    149 (H200). Where 4 packs fill a power of two of threads they are 6% slower at most, and few
    rows sooner: 512 rows of 16384 take 16.4 us, by 8 packs 17.7. With a float32 weight and bias
    that ends at 4096: 2**27 elements take 132 us at 8192, by 4 packs 144. Beside 768 to 800 threads
    a multiprocessor 8 packs may spill, and are faster still than beside fewer: 134 us, not 139, at
    10240. Of float16 more than 5 packs do.
    """
    usual = packs & (packs - 1) == 0 and (packs <= 512 or _affine_bytes(spec) <= 4)
    fits = spec.norm == "layer_norm" and spec.x == "bfloat16" and not _is_wide(spec)
    return fits and packs > 128 and not usual


def _paired(spec: ForwardSpec, packs: int, architecture: int) -> bool:
    """Return whether rows may be streamed by two blocks a multiprocessor, of 32 registers a thread.

    The fastest of a trial at N = 32768; at 65536 it was one block (bfloat16, H200). NVRTC fits no
    bias, ReLU, or y wider than x into 32 registers.
    """
    return (
        2048 < packs <= 4096
        and architecture in HOLD_2048_THREADS
        and spec.norm == "rms_norm"
        and not (spec.bias or spec.relu)
        and not _is_y_wider(spec)
        and widest(spec.x, spec.weight) <= 4
    )


def _streaming_forward(
    spec: ForwardSpec, packs: int, vector: int, architecture: int
) -> StreamingForward:
    """Return the configuration of rows that are read twice."""
    wide, whole = _is_wide(spec), vector == pack_length(spec.x)
    # The fastest of a trial of RMSNorm: 2 packs of 2048 threads at N = 32768, 4 of 1024 at 65536
    # (bfloat16, H200). 64 registers hold 2 packs of float64, or of elements moved one by one.
    paired = _paired(spec, packs, architecture)
    fewer = paired or not whole or spec.x == "float64"
    cluster_blocks = streaming_blocks(packs, architecture)
    block_threads = 512 if wide or cluster_blocks > 1 else 1024
    # 64 registers do not hold 8 elements of weight and bias in float64; nor, from sm_100 on, a
    # cluster's addresses beside a ReLU, a weight around zero, single elements, a y wider than x or
    # LayerNorm's sums; on sm_120 hardly any.
    plain = whole and not (wide or spec.relu or _is_y_wider(spec))
    clustered = cluster_blocks > 1 and architecture in HOLD_2048_THREADS and not spec.zero_centered
    slim = plain and (spec.norm == "rms_norm" or architecture == 90)
    blocks_per_multiprocessor = 2 if slim and (paired or clustered) else 1
    if clustered and spec.norm == "rms_norm":
        # 28.4 us against 34.6 at 32x262144 float32 (staged since), where twice the threads then
        # have a row; LayerNorm, whose blocks wait for more sums, takes 43.6 and 37.1 (H200).
        cluster_blocks, block_threads = 4 * cluster_blocks, block_threads // 2
        blocks_per_multiprocessor *= 2
    return StreamingForward(
        cluster_blocks=cluster_blocks,
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks_per_multiprocessor,
        packs_per_thread=2 if fewer else 4,
        vector=vector,
    )


def _staged_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> StagedForward | None:
    """Return the configuration of rows in the shared memory of blocks of up to STAGED_THREADS.

    As in `_deep_forward` or `_two_clusters_forward`, or else 4 packs a thread, 3 where that leaves
    few threads: of the widths tried (192 to 1024 threads, 1 to 8 packs) the fastest, or within 3%,
    from N = 11008 to 131072; LayerNorm of 2**27 elements takes 141 us at 12288 by 384 threads, of
    512, a quarter of them idle, 161; at 9216 154 by 384 of 3 packs, 167 by 288 of 4 (bfloat16,
    H200).
    """
    for of_clusters in _deep_forward, _two_clusters_forward:
        found = of_clusters(spec, n, packs, vector, architecture)
        if found is not None:
            return found
    cluster_blocks = _cluster(packs, STAGED_THREADS * 4)
    if cluster_blocks > most_cluster_blocks(architecture):
        return None
    block_packs = -(-packs // cluster_blocks)
    packs_per_thread = 4 if block_packs > 4 * 288 else 3
    block_threads = team_threads(block_packs, packs_per_thread)
    # By accesses of 8 bytes RMSNorm takes 142 us, not 152, for 1024 rows of 131076, LayerNorm 209,
    # not 225, and with a 16-bit weight RMSNorm 141, not 143, for 8192 of 16388, but LayerNorm 207,
    # not 187, for those of 131076 (bfloat16, H200). With a ReLU or a wider y LayerNorm's 4 packs
    # would spill, and elsewhere float64.
    by_8_bytes = moves_8_bytes(spec.x, vector) and spec.x != "float64"
    by_8_bytes = by_8_bytes and (widest(spec.weight, spec.bias) > 2 or cluster_blocks <= 2)
    if spec.norm == "layer_norm" and packs_per_thread == 4:
        by_8_bytes = by_8_bytes and not (spec.relu or _is_y_wider(spec))
    hold = (vector == pack_length(spec.x) or by_8_bytes) and not _is_wide(spec)
    three = dataclasses.replace(
        _three_stages(spec, n, vector, cluster_blocks, block_threads, packs_per_thread),
        hold_weight=hold,
        hold_bias=hold,
    )
    two = dataclasses.replace(three, stages=2)
    # Whatever the alignment, so that a row's bits do not depend on it.
    least_held = dataclasses.replace(two, hold_weight=False, hold_bias=False)
    if staged_forward_bytes(spec, least_held) > shared_limit(architecture):
        return None
    # LayerNorm's 2048 rows of 131072 take 270 us with 3, 324 with 2, 271 with 4 (bfloat16, float32
    # weight and bias, H200).
    return three if staged_forward_bytes(spec, three) <= shared_limit(architecture) else two


def _three_stages(
    spec: ForwardSpec,
    n: int,
    vector: int,
    cluster_blocks: int,
    block_threads: int,
    packs_per_thread: int,
    blocks_per_multiprocessor: int = 1,
) -> StagedForward:
    """Return the configuration of three stages with the weight held, the bias in shared memory."""
    columns = cluster_blocks * block_threads * packs_per_thread * pack_length(spec.x)
    return StagedForward(
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks_per_multiprocessor,
        packs_per_thread=packs_per_thread,
        cluster_blocks=cluster_blocks,
        stages=3,
        vector=vector,
        hold_weight=True,
        hold_bias=False,
        counted=_counted(spec, cluster_blocks, packs_per_thread, blocks_per_multiprocessor),
        cells=False,
        through_l1=False,
        turned=False,
        full=n == columns,
    )


def _by_cells(spec: ForwardSpec, config: StagedForward, architecture: int) -> StagedForward:
    """Return the configuration by cells, if they fit, of rows that are moved by 4 bytes or less.

    RMSNorm of 4096 rows of 20001 takes 110 us, not 261, LayerNorm 176, not 397; where accesses are
    of two elements RMSNorm of 20002 104, not 120, LayerNorm by two clusters 125, not 150.
    LayerNorm's one cluster holds the weight besides: 130 us, not 144, for 5000 of 12289, 142, not
    147, for 2720 of 24577; but RMSNorm's would take 106, not 95, for 4096 of 16385 (bfloat16,
    float32 weight and bias, H200), and beside a ReLU, a wider y or operands of float64 up to 192
    bytes would be spilled.
    """
    if config.vector * ITEMSIZE[spec.x] > 4:
        return config
    if architecture < FIRST_WITH_ASYNCHRONOUS_COPIES:
        return config
    plain = not (spec.relu or _is_wide(spec) or _is_y_wider(spec))
    hold = config.hold_weight or (spec.norm == "layer_norm" and plain)
    for stages in range(config.stages, 1, -1):
        found = dataclasses.replace(config, hold_weight=hold, cells=True, stages=stages)
        if staged_forward_bytes(spec, found) <= shared_limit(architecture):
            return found
    return config


def _at_no_lines(
    spec: ForwardSpec, n: int, config: StagedForward, architecture: int
) -> StagedForward:
    """Return the configuration by way of L1, or to turned places, of rows that begin at no lines.

    Past L1 their copies ask the L2 for sectors of 32 bytes that their neighbours ask for as well:
    RMSNorm of 4096 rows of 16392 takes 80 us, by way of L1 73, LayerNorm 82 and 80. Where that has
    no room, LayerNorm's 20008 takes 108 us, to turned places 98, but 16392 by them 75 and 81. By
    cells LayerNorm of 4096 rows of 20001 float32 would take 205 us by way of L1, not 192, RMSNorm
    174, not 180, and 111, not 109, of bfloat16 (bfloat16 unless said, H200; other GPUs were not
    measured).
    """
    if architecture != 90 or config.cells or at_lines(n, config.vector, spec.x):
        return config
    if leave_l1_room(config.blocks_per_multiprocessor, staged_forward_bytes(spec, config)):
        return dataclasses.replace(config, through_l1=True)
    return dataclasses.replace(config, turned=config.vector == pack_length(spec.x))


def _deep_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> StagedForward | None:
    """Return the configuration of 16 blocks, of 5 to 8 packs a thread, of rows that fill them.

    They would be read twice: 28 us against 39 for LayerNorm of 32 rows of 262144 float32, 264
    against 440 of 512, 104 against 169 of 256 rows of 393216 bfloat16 (H200). The weight is held
    however it is aligned, as shared memory mostly has no room for it; beside it a row's end would
    spill, and more than what does a ReLU in LayerNorm's 7 and 8 packs of 16 bits.
    """
    cluster_blocks = MOST_CLUSTER_BLOCKS
    too_many = _cluster(packs, STAGED_THREADS * 4) == 2 * cluster_blocks
    if architecture < FIRST_WITH_CLUSTERS or not too_many:
        return None
    packs_per_thread, rest = divmod(n, cluster_blocks * STAGED_THREADS * pack_length(spec.x))
    spills = spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2 and spec.relu
    if rest or _is_wide(spec) or spec.x == "float64" or (spills and packs_per_thread > 6):
        return None
    three = _three_stages(spec, n, vector, cluster_blocks, STAGED_THREADS, packs_per_thread)
    tried = [three]
    # A float32 bias leaves shared memory no third stage beside 8 packs of float32, but registers
    # hold it: LayerNorm of 32 rows of 262144 takes 24.5 us, not 25.5, of 512 257, not 262, of one,
    # which waits for it, 9.1, not 8.7 (H200). With a ReLU or moved by single elements it spills.
    if spec.x == "float32" and vector == pack_length(spec.x) and not spec.relu:
        tried.append(dataclasses.replace(three, hold_bias=True))
    # In two stages they take 26.5 us by a kernel that can count, 25.4 by one that cannot; 2048 of
    # them 1016 by a count, 1024 without (H200).
    counted = three.counted and spec.norm == "rms_norm"
    tried.append(dataclasses.replace(three, stages=2, counted=counted))
    fitting = (d for d in tried if staged_forward_bytes(spec, d) <= shared_limit(architecture))
    return next(fitting, None)


def _two_clusters_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> StagedForward | None:
    """Return the configuration of clusters of which two are at once, with room for three stages.

    Of each multiprocessor a cluster has a block of up to 256 threads, whose 5 to 7 packs of the
    weight are mostly in registers: one works while the other waits. LayerNorm, with the bias in
    shared memory, takes 172 us against 229 for 1024 rows of 163840, 171 against 195 for 8192 of
    20480, 75 against 94 for 512 of 69632 float32; by two stages 203, 192 and, of 24576, no less
    than by one cluster. RMSNorm takes 195 against 212 for 1024 of 196608, 384 against 394 for 4096
    of 98304; but 198 against 193 for 8192 of 24576 by clusters of two, 514 against 503 of 65536
    with 8 packs (bfloat16, weight and bias of either width, H200). Not with a ReLU beside more than
    5 packs, which would spill more than those do. Of odd length LayerNorm takes 146 us against 177
    for 4096 of 20001, 138 against 156 for 820 of 81921, 136 against 157 for 680 of 98305 with a
    bfloat16 weight and bias, RMSNorm 95 against 111 for 1630 of 40961 (bfloat16, float32 weight and
    bias unless said, H200).
    """
    cluster_blocks = _cluster(packs, STAGED_THREADS * 4)
    if not 1 < cluster_blocks <= most_cluster_blocks(architecture) or _is_wide(spec):
        return None
    block_packs = -(-packs // cluster_blocks)
    most_packs = 5 if spec.relu else 7 if spec.norm == "layer_norm" else 6
    widths = range(-(-block_packs // TWO_CLUSTERS_THREADS), most_packs + 1)
    measured = spec.x != "float64" and (spec.norm == "layer_norm" or cluster_blocks > 2)
    if not (widths and measured):
        return None
    packs_per_thread = min(
        widths, key=lambda width: slots_of(block_packs, team_threads(block_packs, width))
    )
    block_threads = team_threads(block_packs, packs_per_thread)
    config = _three_stages(
        spec,
        n,
        vector,
        cluster_blocks,
        block_threads,
        packs_per_thread,
        blocks_per_multiprocessor=2,
    )
    # With the KiB that each block has besides, and cells where no address allows anything else.
    # Beside them a ReLU, or a wider y, which is stored by elements, would spill up to 156 bytes:
    # whole packs at such an address have the weight in shared memory, and mostly one block, but the
    # same threads, for the same bits.
    crowded = spec.relu or _is_y_wider(spec)
    always = dataclasses.replace(config, cells=(n & -n) * ITEMSIZE[spec.x] <= 4)
    needed = 2 * (staged_forward_bytes(spec, always) + 1024)
    if needed > shared_limit(architecture) + 1024 or (crowded and always.cells):
        return None
    return dataclasses.replace(config, hold_weight=not crowded or vector * ITEMSIZE[spec.x] > 4)


def _counted(
    spec: ForwardSpec, cluster_blocks: int, packs_per_thread: int, blocks_per_multiprocessor: int
) -> bool:
    """Return whether clusters may take rows as they have room for them.

    RMSNorm of 4096 rows of 131072 takes 504 us against 522, of 163840 with a ReLU or a zero-centred
    weight 628 against 668, LayerNorm of 32768 of 16384 503 against 529, of 16384 of 32768 505
    against 532; but of 8192 of 65536, where its blocks wait for the sums of three others, 534
    against 519, unless another cluster is on their multiprocessors: 321 against 351 for 8192 of
    40960. By 16 blocks it loses even then: 179 against 172 for 1024 of 163840 (bfloat16). Of
    float32 LayerNorm takes 130 us against 136 for 2048 of 32768, 993 against 1028 for 8192 of
    65536, 756 against 803 for 4096 of 98304, 226 against 234 for 512 of 229376; but by 16 blocks of
    4 packs a thread 2095 against 2047 for 8192 of 131072 (H200).
    """
    if spec.norm == "rms_norm" or cluster_blocks <= 2:
        return True
    of_most_blocks = cluster_blocks == MOST_CLUSTER_BLOCKS
    if spec.x == "float32":
        return packs_per_thread > 4 or not of_most_blocks
    return blocks_per_multiprocessor == 2 and not of_most_blocks


def _cluster(packs: int, packs_per_block: int) -> int:
    """Return the power of two of blocks that hold `packs` packs."""
    return 1 << (-(-packs // packs_per_block) - 1).bit_length()
