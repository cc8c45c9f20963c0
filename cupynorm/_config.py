"""How to compute it: the regime, and how a row is laid over threads.

Pure functions of the spec, the row length N, the GPU's architecture and `vector`, the elements
moved by one access. What the bits of a row depend on (row_threads or, of staged rows,
block_threads, packs_per_thread, cluster_blocks; strips and their strip_threads) follows from the
spec, N and the architecture alone, and from whether the GPU has room for clusters, or for strips
all at once; vector decides only what does not show in y, the statistics and dx. Few rows may be
laid out otherwise, by kernels that give the same bits.

A pack is 16 bytes of x. Registers and shared memory bound what a block may hold:
tests/test_compile.py compiles those of some row lengths for every supported architecture and fails
on a spill that it does not list.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cupynorm._spec import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

__all__ = [
    "BackwardConfig",
    "Reduction",
    "ResidentBackward",
    "ResidentForward",
    "StagedBackward",
    "StagedForward",
    "StreamingBackward",
    "StreamingForward",
    "StripsBackward",
    "backward_config",
    "few_rows_backward_config",
    "few_rows_configs",
    "forward_config",
    "pack_length",
    "reduction_bytes",
    "resident_backward_bytes",
    "resident_columns_bytes",
    "shared_limit",
    "staged_backward_bytes",
    "staged_forward_bytes",
    "strips_backward_bytes",
    "strips_counts_bytes",
    "strips_exchange_bytes",
    "team_bytes",
]

REGISTERS_PER_MULTIPROCESSOR = 65536

# KiB of shared memory that a block may have: CUDA C++ Programming Guide, "Compute Capabilities".
# Newer GPUs than these have at least the last.
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}
SHARED_KIB_OF_OTHERS = 99

# Those whose multiprocessors hold 2048 threads; the others hold 1024 or 1536.
HOLD_2048_THREADS = (80, 90, 100, 103)

MULTIPROCESSORS = 128  # roughly, of the GPUs that this is tuned for

FIRST_WITH_CLUSTERS = 90
FIRST_WITH_OVERLAP = 90  # of a kernel with the one before it
# An L2 of 4 to 6 MiB, as some GPUs before have, would give up what is fetched ahead unread.
FIRST_WITH_ROWS_AHEAD = 90
MOST_CLUSTER_BLOCKS = 16

STAGED_THREADS = 512  # at most, of a block that stages rows in the forward pass
TWO_CLUSTERS_THREADS = 256  # the same, where two are on a multiprocessor

MOST_SHORT_ELEMENTS = 1 << 23  # of few rows of less than a warp

LEAST_FILLED = 12  # packs: shorter rows, by fewer than 4 threads, were not measured


@dataclass(frozen=True)
class ResidentForward:
    """Rows held in registers, read once, each by `row_threads` threads of `cluster_blocks` blocks.

    In several blocks they give the bits of one block with all these threads, for few rows.
    `rare_last`: what is rare comes last in the code, for few rows. `hold_weight`: weight and bias
    are asked for with the row, not after it is measured. `full`: the row fills its threads' packs
    exactly. `blocks_ahead`: a block has the L2 fetch the rows of the one so many later, or none if
    0; of an x of 32 MiB or more `blocks_ahead_if_large`.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
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
    room, as a count in device memory says; else in turn.
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


@dataclass(frozen=True)
class Reduction:
    """How partial weight gradients are summed: by `groups` of a block's threads side by side.

    Each thread has `width` neighbouring columns, 16 bytes.
    """

    groups: int
    width: int
    vector: int
    block_threads: ClassVar[int] = 256

    @property
    def columns(self) -> int:
        return self.block_threads // self.groups * self.width


@dataclass(frozen=True)
class StagedBackward:
    """As StagedForward, with the weight gradients; a block has a row for each of its teams.

    `shared_sums`: of how many gradients the sums of rows so far wait in shared memory. `hold_sums`:
    the other's in registers, else in device memory. `bulk`: one thread of a team copies its rows,
    else each thread the packs that it will read.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    cluster_blocks: int
    stages: int
    vector: int
    hold_weight: bool
    shared_sums: int
    hold_sums: bool
    full: bool
    bulk: bool
    reduction: Reduction | None

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


@dataclass(frozen=True)
class ResidentBackward:
    """Few rows held in registers, each by `cluster_blocks` blocks of `row_threads` threads.

    What a lone row writes are the weight gradients; those of several are summed by further blocks,
    of `column_threads`, which read x and dy themselves, or where that is 0 by the `reduction` from
    partials. The further blocks are in the same kernel; for LayerNorm, whose xhat is centred by a
    sum of its row, in a second one that overlaps with it.
    """

    row_threads: int
    packs_per_thread: int
    cluster_blocks: int
    vector: int
    full: bool
    column_threads: int
    reduction: Reduction | None


@dataclass(frozen=True)
class StreamingBackward:
    """One kernel reduces each row to coefficients, another walks down the columns.

    A row is that of `cluster_blocks` blocks of `row_threads` threads each.
    """

    cluster_blocks: int
    row_threads: int
    column_threads: int
    vector: int
    reduction: Reduction | None


@dataclass(frozen=True)
class StripsBackward:
    """Rows longer than a cluster holds, each block a strip of them all, `strip_threads` packs wide.

    They are taken in groups of `group_rows`. A cooperative launch of `strips` blocks, which begins
    when the GPU has room for them all; none shares its weight gradients with another.
    """

    strips: int
    strip_threads: int
    group_rows: int
    vector: int
    cluster_blocks: ClassVar[int] = 1
    reduction: ClassVar[None] = None

    @property
    def block_threads(self) -> int:
        return self.strip_threads + 32 * STRIPS_MESSENGERS


BackwardConfig = StagedBackward | ResidentBackward | StripsBackward | StreamingBackward


def pack_length(x: str) -> int:
    """Return the elements of a pack."""
    return 16 // ITEMSIZE[x]


def shared_limit(architecture: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    return SHARED_KIB.get(architecture, SHARED_KIB_OF_OTHERS) << 10


def team_bytes(
    x: str, row_threads: int, block_threads: int, cluster_blocks: int = 1, *, split: bool = False
) -> int:
    """Return the shared memory of a Team's reductions: see kernels/team.cuh."""
    warps = max(1, row_threads // 32)
    if cluster_blocks * warps == 1:
        return 0
    mailboxes = 16 if cluster_blocks > 1 else 0
    if cluster_blocks > 1 and warps > 1 and not split:
        slots = 2 * cluster_blocks + warps
    else:
        slots = 2 * (block_threads // row_threads * cluster_blocks) * warps
    return -(-(mailboxes + 4 * slots * ITEMSIZE[compute_dtype(x)]) // 128) * 128


def _team(packs: int, packs_per_thread: int) -> int:
    """Return the threads that hold `packs` packs: a power of two up to 32, then whole warps."""
    threads = -(-packs // packs_per_thread)
    if threads <= 32:
        return 1 << (threads - 1).bit_length()
    return -(-threads // 32) * 32


def _slots(packs: int, threads: int) -> int:
    """Return the packs that so many threads hold of a row, those past its end among them."""
    return threads * -(-packs // threads)


def _widest(*dtypes: str | None) -> int:
    return max((ITEMSIZE[dtype] for dtype in dtypes if dtype), default=0)


# ---- forward -------------------------------------------------------------------------------------


def staged_forward_bytes(spec: ForwardSpec, config: StagedForward) -> int:
    """Return the shared memory of a block: see kernels/forward_staged.cu."""
    packs = config.block_threads * config.packs_per_thread
    size = team_bytes(spec.x, config.block_threads, config.block_threads, config.cluster_blocks)
    size += 128  # the next rows' numbers, and the rest of their line
    size += config.stages * packs * 16
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
    if packs > (most_packs // 2 if exceed else most_packs):
        staged = _staged_forward(spec, n, packs, vector, architecture, wide=wide)
        if staged is not None:
            return staged
        if packs > most_packs:
            return _streaming_forward(spec, packs, vector, architecture, wide=wide)
    row_threads = _team(packs, _packs_per_thread(spec, packs))
    if spec.relu:
        row_threads = max(row_threads, 8 // length)  # a byte of the bitmask is of neighbours
    packs_per_thread = -(-packs // row_threads)
    # A row of several warps has a block to itself: sharing cost 13% at N = 2048 (bfloat16, H200).
    block_threads = max(row_threads, 64)
    full = n == row_threads * packs_per_thread * length
    # Registers for weight and bias beside 40 to 60 for the rest. A row of more warps waits longer
    # for the slowest than it gains: 3% at N = 8192 (bfloat16, float32 weight, H200). A 16-bit
    # weight costs half as many: 5.9 us against 6.4 at 1x8192, 4089 GB/s against 4088 at 32768x8192.
    # Beside a ReLU or a weight around zero fewer threads would be left: 66.7 us, not 73.9 and 71.1,
    # at 13107x5120, 67.2 and 67.0, not 72.0 and 69.8, at 8192x8192 (bfloat16, H200).
    plain = not (spec.relu or spec.zero_centered)
    affine = _affine_registers(spec, packs_per_thread)
    most_held = 16 if spec.x == "float64" else 32
    # With more threads instead, LayerNorm takes 68.9 us against 72.2 at 1048576x64, 132 against 141
    # at 128; 14.7 against 13.9 at 32768x256 (bfloat16, H200).
    crowded = spec.norm == "layer_norm" and packs <= 16 and affine > 24
    if crowded:
        most_held = 24
    slim_weight = affine <= 16 and _widest(spec.weight, spec.bias) <= 2
    most_threads = 256 if slim_weight and plain else 128
    if spec.norm == "rms_norm" and spec.x == "float64" and packs_per_thread > 4:
        most_held, most_threads = 32, 256  # 497 us, not 503, at 32768x4096 (H200)
    # Not in LayerNorm's rows of several warps: 4144 GB/s against 3659 at N = 4096, 3920 against
    # 3605 at 2048 (bfloat16, H200); few rows have few_rows_configs.
    never = wide or (spec.norm == "layer_norm" and row_threads > 32)
    hold_weight = vector == length and row_threads <= most_threads and not never
    hold_weight = hold_weight and affine <= most_held
    # Threads that a multiprocessor must hold at once bound their registers. What would spill has
    # fewer: up to 122 registers where single 16-bit elements are moved.
    slim = spec.norm == "rms_norm" and full and plain
    slim = slim and architecture >= FIRST_WITH_CLUSTERS  # where NVRTC needs 80 registers, not 88
    if wide:
        threads = 256
    elif slim and hold_weight and slim_weight and packs_per_thread == 4:
        threads = 1024  # 512 rows at once: 8.74 us against 9.73 at 512x8192 (bfloat16, H200)
    elif length == 8 and vector < length:
        threads = 384 if packs_per_thread <= 4 else 256
    elif packs_per_thread > 4 and fewest_threads:
        threads = 800  # 132 us against 137 by 640 at 7168, 134 against 139 at 10240
    elif packs_per_thread > 6 and (spec.norm == "rms_norm" or spec.x == "float16"):
        threads = 512
    elif packs_per_thread > 4 or (hold_weight and not slim):
        threads = 640
    elif crowded and full and length == 8 and plain:
        threads = 1024
    else:
        threads = 768
    # At least two, as nothing spills: LayerNorm of float16 by 512 threads had 72 registers and one
    # block, and takes 14.7 us, not 16.3, at 512x16384 (H200).
    blocks = max(2 if vector == length else 1, threads // block_threads)
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
        packs_per_thread=packs_per_thread,
        cluster_blocks=1,
        vector=vector,
        rare_last=False,
        blocks_ahead=blocks_ahead,
        blocks_ahead_if_large=blocks_ahead_if_large,
        hold_weight=hold_weight,
        full=full,
    )


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
    if config.vector < pack_length(spec.x) or _is_wide(spec):
        return ()
    if config.row_threads < 32:
        return _short_rows_configs(spec, config, n, architecture, multiprocessors)
    configs = []
    affine = _affine_registers(spec, config.packs_per_thread)
    most_held, threads = 64, 512
    # Beside the row's own; more would spill, or does by more threads.
    if ITEMSIZE[spec.x] == 2:
        needed = affine + 4 * config.packs_per_thread + 4 * spec.zero_centered
        needed += 3 * config.packs_per_thread * spec.relu
        threads = 384 if needed > 80 else 512
        if config.packs_per_thread == 8 and spec.relu:
            most_held = 32
    elif config.packs_per_thread == 8:
        most_held = (64 if spec.x == "float32" else 32) if config.full else 0
    elif spec.x == "float64" and config.packs_per_thread > 4 and not config.full:
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
    plain = plain and ITEMSIZE[spec.x] == ITEMSIZE[spec.y] == 2
    plain = plain and architecture >= FIRST_WITH_CLUSTERS
    if plain and spec.norm == "rms_norm" and config.packs_per_thread == 8:
        if not configs or configs[-1].blocks_per_multiprocessor < config.blocks_per_multiprocessor:
            configs.append(config)
        blocks = 1024 // config.block_threads
        configs.append(
            dataclasses.replace(
                _none_ahead(config), hold_weight=False, blocks_per_multiprocessor=blocks
            )
        )
    return tuple((_most_at_once(few, multiprocessors), few) for few in configs)


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
    if config.packs_per_thread > 4:  # beside which a second copy of what is rare spills
        return ()
    more: tuple[tuple[int, ResidentForward], ...] = ()
    if config.packs_per_thread == 4:
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
    ReLU beside 8 packs would spill.
    """
    if spec.x == "float64" or (spec.relu and config.packs_per_thread == 8):
        return ()
    if config.row_threads < 256 or config.row_threads % 128:
        return ()
    slots = config.row_threads * config.packs_per_thread  # packs, those past the end too
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
    return _widest(spec.weight, spec.bias, spec.y) > max(4, ITEMSIZE[spec.x])


def _affine_bytes(spec: ForwardSpec) -> int:
    """Return the bytes of an element of the weight and one of the bias."""
    return _widest(spec.weight) + _widest(spec.bias)


def _affine_registers(spec: ForwardSpec, packs_per_thread: int) -> int:
    """Return the registers that hold a thread's weight and bias."""
    return packs_per_thread * pack_length(spec.x) * _affine_bytes(spec) // 4


def _packs_per_thread(spec: ForwardSpec, packs: int) -> int:
    """Return how many packs of a row each thread of a ResidentForward holds."""
    # 8 packs of float64 and float32 need 72 to 95 registers: 254 us against 268 in shared memory
    # for 16384 rows of 8192 float32, 158 against 199 of 5000, 501 against 543 for 32768 of 4096
    # float64 (H200).
    wider = spec.norm == "layer_norm" and ITEMSIZE[spec.x] >= 4 and packs > 1024
    if wider or _has_fewest_threads(spec, packs):
        return 8
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
    return min(widths, key=lambda width: _slots(packs, _team(packs, width)))


def _has_fewest_threads(spec: ForwardSpec, packs: int) -> bool:
    """Return whether a row has as few threads as hold it by 8 packs each.

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
        and ITEMSIZE[spec.y] <= ITEMSIZE[spec.x] <= 4
        and _widest(spec.weight) <= 4
    )


def _streaming_forward(
    spec: ForwardSpec, packs: int, vector: int, architecture: int, *, wide: bool
) -> StreamingForward:
    """Return the configuration of rows that are read twice."""
    whole = vector == pack_length(spec.x)
    # The fastest of a trial of RMSNorm: 2 packs of 2048 threads at N = 32768, 4 of 1024 at 65536
    # (bfloat16, H200). 64 registers hold 2 packs of float64, or of elements moved one by one.
    paired = _paired(spec, packs, architecture)
    fewer = paired or not whole or spec.x == "float64"
    cluster_blocks = _streaming_blocks(packs, architecture)
    block_threads = 512 if wide or cluster_blocks > 1 else 1024
    # 64 registers do not hold 8 elements of weight and bias in float64; nor, from sm_100 on, a
    # cluster's addresses beside a ReLU, a weight around zero, single elements, a y wider than x or
    # LayerNorm's sums; on sm_120 hardly any.
    plain = whole and not (wide or spec.relu) and ITEMSIZE[spec.y] <= ITEMSIZE[spec.x]
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


def _streaming_blocks(packs: int, architecture: int) -> int:
    """Return the blocks that stream a row.

    With one, 32 rows of 262144 float32 keep 32 of an H200's 132 multiprocessors busy. Clusters of 4
    blocks of 512 threads, two a multiprocessor, all run at once; of 8 or 16 such, fewer rows do.
    """
    return 4 if architecture >= FIRST_WITH_CLUSTERS and packs > 8192 else 1


def _staged_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int, *, wide: bool
) -> StagedForward | None:
    """Return the configuration of rows in the shared memory of blocks of up to STAGED_THREADS.

    As in `_deep_forward` or `_two_clusters_forward`, or else 4 packs a thread, 3 where that leaves
    few threads: of the widths tried (192 to 1024 threads, 1 to 8 packs) the fastest, or within 3%,
    from N = 11008 to 131072; LayerNorm of 2**27 elements takes 141 us at 12288 by 384 threads, of
    512, a quarter of them idle, 161; at 9216 154 by 384 of 3 packs, 167 by 288 of 4 (bfloat16,
    H200).
    """
    for of_clusters in _deep_forward, _two_clusters_forward:
        found = of_clusters(spec, n, packs, vector, architecture, wide=wide)
        if found is not None:
            return found
    cluster_blocks = _cluster(packs, STAGED_THREADS * 4)
    if cluster_blocks > _most_cluster_blocks(architecture):
        return None
    block_packs = -(-packs // cluster_blocks)
    packs_per_thread = 4 if block_packs > 4 * 288 else 3
    block_threads = _team(block_packs, packs_per_thread)
    hold = vector == pack_length(spec.x) and not wide
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
        full=n == columns,
    )


def _deep_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int, *, wide: bool
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
    if rest or wide or spec.x == "float64" or (spills and packs_per_thread > 6):
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
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int, *, wide: bool
) -> StagedForward | None:
    """Return the configuration of clusters of which two are at once, with room for three stages.

    Of each multiprocessor a cluster has a block of up to 256 threads, whose 5 to 7 packs of the
    weight are in registers: one works while the other waits. LayerNorm, with the bias in shared
    memory, takes 172 us against 229 for 1024 rows of 163840, 171 against 195 for 8192 of 20480, 75
    against 94 for 512 of 69632 float32; by two stages 203, 192 and, of 24576, no less than by one
    cluster. RMSNorm takes 195 against 212 for 1024 of 196608, 384 against 394 for 4096 of 98304;
    but 198 against 193 for 8192 of 24576 by clusters of two, 514 against 503 of 65536 with 8 packs
    (bfloat16, weight and bias of either width, H200). Not with a ReLU beside more than 5 packs,
    which would spill more than those do, nor of a part of a pack, whose weight is in shared memory
    and leaves no room for another block.
    """
    cluster_blocks = _cluster(packs, STAGED_THREADS * 4)
    if not 1 < cluster_blocks <= _most_cluster_blocks(architecture):
        return None
    if wide or n % pack_length(spec.x):
        return None
    block_packs = -(-packs // cluster_blocks)
    most_packs = 5 if spec.relu else 7 if spec.norm == "layer_norm" else 6
    widths = range(-(-block_packs // TWO_CLUSTERS_THREADS), most_packs + 1)
    measured = spec.x != "float64" and (spec.norm == "layer_norm" or cluster_blocks > 2)
    if not (widths and measured):
        return None
    packs_per_thread = min(widths, key=lambda width: _slots(block_packs, _team(block_packs, width)))
    block_threads = _team(block_packs, packs_per_thread)
    config = _three_stages(
        spec,
        n,
        vector,
        cluster_blocks,
        block_threads,
        packs_per_thread,
        blocks_per_multiprocessor=2,
    )
    # With the KiB that each block has besides. Rows whose address is no multiple of 16 bytes have
    # the weight in shared memory, and mostly one block, but the same threads, for the same bits.
    if 2 * (staged_forward_bytes(spec, config) + 1024) > shared_limit(architecture) + 1024:
        return None
    return dataclasses.replace(config, hold_weight=vector == pack_length(spec.x))


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


def _most_cluster_blocks(architecture: int) -> int:
    return MOST_CLUSTER_BLOCKS if architecture >= FIRST_WITH_CLUSTERS else 1


# ---- backward ------------------------------------------------------------------------------------

# Blocks that all run at once, one on each multiprocessor: an H200 has 132.
MOST_STRIPS = 128
# As kernels/backward_strips.cu has them: groups in shared memory, warps that exchange sums, and the
# places of what they exchange.
STRIPS_STAGES, STRIPS_MESSENGERS, STRIPS_PLACES = 5, 4, 8

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


def staged_backward_bytes(spec: BackwardSpec, config: StagedBackward) -> int:
    """Return the shared memory of a block: see kernels/backward.cu."""
    elements = config.block_threads * config.packs_per_thread * pack_length(spec.x)
    size = team_bytes(spec.x, config.row_threads, config.block_threads, config.cluster_blocks)
    size += config.stages * elements * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy])
    if spec.weight is not None and not config.hold_weight:
        size += elements * ITEMSIZE[spec.weight]
    if spec.gradients and config.rows_per_block > 1:
        size += elements * ITEMSIZE[compute_dtype(spec.x)]
    if config.bulk:
        size += -(-config.rows_per_block * config.stages * 8 // 128) * 128
    sums = elements // config.rows_per_block * ITEMSIZE[compute_dtype(spec.x)]
    return size + config.shared_sums * sums


def _backward_registers(
    spec: BackwardSpec, packs: int, *, vector: int, hold_weight: bool, clustered: bool
) -> int:
    """Return an upper bound of the registers of a staged backward, fitted to NVRTC's counts."""
    length = pack_length(spec.x)
    word = ITEMSIZE[compute_dtype(spec.x)] // 4
    registers = 52 + packs * length * word * spec.gradients
    if _widest(spec.dy, spec.weight, spec.x) > 4:
        registers += packs * length
    if hold_weight:
        registers += packs * length * _widest(spec.weight) // 4
    if ITEMSIZE[spec.dy] > ITEMSIZE[spec.x]:
        registers += 4 * packs
    if spec.bitmask:  # by twice as many LayerNorm took 255 us, not 174, for 12288 rows of 9216
        registers += 12 * packs
    if clustered:
        registers += 12
    if vector < length:
        registers += packs * (packs + 4) - 1
    return registers


def backward_config(
    spec: BackwardSpec, n: int, vector: int, architecture: int, *, in_strips: bool = True
) -> StagedBackward | StripsBackward | StreamingBackward:
    """Return the configuration of a backward pass over rows of n elements.

    `in_strips`: the GPU has room for strips, should they be the fastest.
    """
    packs = -(-n // pack_length(spec.x))
    for layout in _backward_layouts(packs, spec.gradients, architecture):
        config = _staged_backward(spec, n, vector, architecture, *layout)
        if config is not None:
            return config
    strips = _strips_backward(spec, n, vector, architecture) if in_strips else None
    return strips or StreamingBackward(
        cluster_blocks=_streaming_blocks(packs, architecture),
        row_threads=512,
        column_threads=256,
        vector=vector,
        reduction=_reduction(spec, n),
    )


def few_rows_backward_config(
    spec: BackwardSpec,
    config: StagedBackward,
    m: int,
    architecture: int,
    *,
    dx_given: bool = False,
) -> ResidentBackward | None:
    """Return the configuration of m rows, if they are few enough for one of their own.

    `dx_given`: dx may be dy, and no block may read what another writes.

    dx has the bits that `config`, that of many rows, gives it. RMSNorm of one row of 4096 takes
    5.6 to 6.2 us against 8.7, LayerNorm 5.8 to 6.1 against 10.0; of 64 rows 8.3 against 9.7 and 9.7
    against 10.9, with partials; with columns RMSNorm of 64 rows of 8192 6.4, with partials 9.6
    (bfloat16, H200).
    """
    if config.row_threads < 32:
        return None
    several = m > 1 and spec.gradients > 0
    column_threads = 0
    if several and config.row_threads >= 128 and not dx_given:
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
    if m > most_rows or m * config.cluster_blocks > most_blocks:
        return None
    reduction = None
    if config.reduction is not None and several and not column_threads:
        reduction = dataclasses.replace(config.reduction, groups=16)  # up to 4 partials each
    return ResidentBackward(
        row_threads=config.row_threads,
        packs_per_thread=config.packs_per_thread,
        cluster_blocks=config.cluster_blocks,
        vector=config.vector,
        full=config.full,
        column_threads=column_threads,
        reduction=reduction,
    )


def resident_backward_bytes(spec: BackwardSpec, config: ResidentBackward) -> int:
    """Return the shared memory of a block: see kernels/backward_resident.cu."""
    threads = config.row_threads
    size = team_bytes(spec.x, threads, threads, config.cluster_blocks)
    if config.column_threads and spec.norm == "rms_norm":
        size = max(size, resident_columns_bytes(spec, config))
    return size


def resident_columns_bytes(spec: BackwardSpec, config: ResidentBackward) -> int:
    """Return the shared memory of a block that sums the weight gradients of 32 packs."""
    values = spec.gradients * config.column_threads * pack_length(spec.x)
    return values * ITEMSIZE[compute_dtype(spec.x)]


def reduction_bytes(config: Reduction) -> int:
    """Return the shared memory of a block: see kernels/reduce_partials.cu."""
    rows = min(config.groups, config.block_threads // 32)
    return rows * (config.block_threads // config.groups) * 16


def strips_backward_bytes(spec: BackwardSpec, config: StripsBackward) -> int:
    """Return the shared memory of a block: see kernels/backward_strips.cu."""
    row = config.strip_threads * pack_length(spec.x) * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy])
    of_warps = STRIPS_MESSENGERS * _gradient_sums(spec) * config.strip_threads // 32
    known = STRIPS_PLACES * 5  # values of each row
    sums = (of_warps + known) * ITEMSIZE[compute_dtype(spec.x)]
    return config.group_rows * (STRIPS_STAGES * row + sums)


def strips_counts_bytes() -> int:
    """Return the bytes of device memory of the counts, a line each, of blocks that have told."""
    return STRIPS_PLACES * 128


def strips_exchange_bytes(spec: BackwardSpec, config: StripsBackward) -> int:
    """Return the bytes of device memory in which the blocks exchange their sums of rows."""
    values = STRIPS_PLACES * config.group_rows * _gradient_sums(spec) * config.strips
    return values * ITEMSIZE[compute_dtype(spec.x)]


def _gradient_sums(spec: BackwardSpec) -> int:
    """Return how many sums dx needs of a row."""
    return 3 if spec.norm == "layer_norm" else 1


def _strips_backward(
    spec: BackwardSpec, n: int, vector: int, architecture: int
) -> StripsBackward | None:
    """Return the configuration of rows that no cluster holds, by strips of 192 to 512 packs.

    Read once, not twice as they would be streamed: RMSNorm of 32 rows of 262144 float32 takes
    35 us, not 58, LayerNorm 37, not 61; of 512 rows 386, not 653, and 391, not 674. Below 192 packs
    what the blocks tell each other shows: 256 rows of 133120 bfloat16 take 83 us, by clusters 62,
    and 110, by clusters 71; and so do packs that are moved by single elements: of 200001 612, not
    314, and 638, not 367 (H200). N alone decides, never the alignment, since the bits of dx must
    not depend on it: rows of whole packs are in strips at unaligned addresses, too, though slower
    there.
    """
    whole, rest = divmod(n, pack_length(spec.x))
    strip_threads = -(-whole // (32 * MOST_STRIPS)) * 32
    if architecture < FIRST_WITH_CLUSTERS or rest or not 192 <= strip_threads <= 512:
        return None
    strips = -(-whole // strip_threads)
    # Not 5, of which LayerNorm's messengers have one on its way at a time: 256 rows of 262144 take
    # 143 us, not 121 (bfloat16, H200).
    for group_rows in (6, 4, 3, 2, 1):
        config = StripsBackward(strips, strip_threads, group_rows, vector)
        if strips_backward_bytes(spec, config) <= shared_limit(architecture):
            return config
    return None


def _reduction(spec: BackwardSpec, n: int) -> Reduction | None:
    """Return how the partials of many rows are summed, the fewer the longer a row is.

    By as many groups as leave a thread about 5 partials, which are on their way at once, 9 at most:
    there are 264 to 528 of short rows, 132 up to N = 8192 (H200). Four columns a thread, in blocks
    of 256, where it had been one in blocks of up to 1024, and 9 partials, 4 of them at once:
    RMSNorm takes 12.2 us at 4096x768, not 13.6, 17.3 at 512x8192, not 18.1, LayerNorm 20.8 at
    32768x256, not 22.3 (bfloat16, H200).
    """
    if not spec.gradients:
        return None
    groups = max(1, 64 >> (-(-spec.gradients * n // 8192) - 1).bit_length())
    width = 16 // ITEMSIZE[compute_dtype(spec.x)]
    return Reduction(groups=groups, width=width, vector=width if n % width == 0 else 1)


# By the packs that a thread has of a row that a warp holds: the most packs of such a row, the
# threads of a block, the blocks of a multiprocessor, and the stages. With two gradients 2 packs by
# blocks of half as many threads: LayerNorm takes 56.2 us, not 57.2, for 131072 rows of 256 and for
# 65536 of 512; but RMSNorm without a bias 55.2, not 55.0, and 55.1, not 54.9 (bfloat16, float32
# weight, H200).
SHORT_LAYOUTS = {
    1: (16, 256, 3, 4),
    2: (64, 256, 2, 2),
    3: (96, 128, 3, 2),
    4: (128, 128, 2, 2),
    5: (160, 128, 2, 2),
}
# By the packs that a thread has of a longer one, the threads of a multiprocessor: their registers
# hold the weight and its gradients.
LONG_THREADS = {2: 512, 3: 384, 4: 256, 5: 256}


# row_threads, block_threads, blocks a multiprocessor, cluster_blocks and stages.
_Layout = tuple[int, int, int, int, int]


def _backward_layouts(packs: int, gradients: int, architecture: int) -> Iterator[_Layout]:
    """Yield the layouts of rows of so many packs, the fastest first, then for what does not fit.

    What decides is whether the row fills its packs, and the teams their multiprocessor: LayerNorm
    of 1280 takes 201 us by 32 threads of 5 packs, 226 by 96 of 2; of 4608 199 by two teams of 192
    threads, 242 by one of 288; of 18432 205 by two blocks of 384 threads, 280 by four of 256 (2**27
    elements of bfloat16, float32 weight and bias, H200). benchmarks/notes.md has more.
    """
    yield from _short_layouts(packs, gradients)
    yield from _long_layouts(packs, gradients, architecture)
    # More registers and shared memory for a short row's, where it has operands of float64 or the
    # architecture little shared memory.
    for width, block_threads in ((2, 512), (4, 256), (2, 256), (2, 128)):
        row_threads = _team(packs, width)
        if row_threads <= 32:
            yield row_threads, block_threads, 1, 1, 3
    # And for one of up to 1024 packs, which two blocks hold.
    if 512 < packs <= 1024 and architecture >= FIRST_WITH_CLUSTERS:
        yield 256, 256, 1, 2, 3


def _short_layouts(packs: int, gradients: int) -> list[_Layout]:
    """Return those of rows that a warp holds, by how many packs its threads leave empty."""
    ranked = []
    for width, (most_packs, block_threads, blocks, stages) in SHORT_LAYOUTS.items():
        if width == 2 and gradients == 2:
            block_threads, blocks = 128, 4
        row_threads = _team(packs, width)
        if packs <= most_packs and row_threads <= 32 and (width <= 2 or packs >= LEAST_FILLED):
            rank = _slots(packs, row_threads), width
            ranked.append((rank, (row_threads, block_threads, blocks, 1, stages)))
    return [layout for _, layout in sorted(ranked)]


def _long_layouts(packs: int, gradients: int, architecture: int) -> list[_Layout]:
    """Return those of longer rows, by how well they use what LONG_THREADS could hold."""
    ranked = []
    for cluster_blocks, width in itertools.product((1, 2, 4, 8, 16), LONG_THREADS):
        most = LONG_THREADS[width]
        row_threads = _team(-(-packs // cluster_blocks), width)
        # 5 packs leave shorter rows few threads; beyond `most` they spill.
        if width == 5 and (packs <= 512 or row_threads > most):
            continue
        # Empty slots are waited for, and packs are compared with the row's end.
        filled = (packs / _slots(packs, cluster_blocks * row_threads)) ** 2
        if cluster_blocks > 1:
            if packs <= 1024 or cluster_blocks > _most_cluster_blocks(architecture):
                continue
            for blocks in range(1, most // row_threads + 1):
                used = blocks * row_threads / most
                rank = used * filled, -cluster_blocks, width
                ranked.append((rank, (row_threads, row_threads, blocks, cluster_blocks, 3)))
        elif row_threads >= 64:
            if width == 4 and gradients == 2:
                most = 320
                # Then the weight stays in shared memory: 246 us at 9728, where 256 threads of 5
                # packs take 203.
                if packs % row_threads:
                    filled *= 0.8
            # By a block of 640, 512 rows of 5120 took 23.6 us, by one of 320 16.3; by one of 448
            # that of 5376 takes 113 us, by one of 352 threads of 2 packs 123 (LayerNorm, bfloat16,
            # H200).
            most_threads = max(most, 448 if width <= 3 else row_threads)
            for block_threads in range(row_threads, min(most_threads, 512) + 1, row_threads):
                used = min(block_threads / most, most / block_threads)
                rank = used * filled, -1, -width
                ranked.append((rank, (row_threads, block_threads, 1, 1, 3)))
    return [layout for _, layout in sorted(ranked, reverse=True)]


def _staged_backward(
    spec: BackwardSpec,
    n: int,
    vector: int,
    architecture: int,
    row_threads: int,
    block_threads: int,
    blocks_per_multiprocessor: int,
    cluster_blocks: int,
    stages: int,
) -> StagedBackward | None:
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
    full = n == cluster_blocks * row_threads * packs_per_thread * length
    for fewer in range(stages, 1, -1):
        config = StagedBackward(
            row_threads=row_threads,
            block_threads=block_threads,
            blocks_per_multiprocessor=blocks_per_multiprocessor,
            packs_per_thread=packs_per_thread,
            cluster_blocks=cluster_blocks,
            stages=fewer,
            vector=vector,
            hold_weight=(spec.weight is not None and vector == length and fits(True, length)),
            shared_sums=0,
            hold_sums=False,
            full=full,
            bulk=False,
            reduction=_reduction(spec, n),
        )
        # A block's own 1 KiB is the system's.
        limit = (shared_limit(architecture) + 1024) // blocks_per_multiprocessor - 1024
        most = max(
            staged_backward_bytes(spec, config),
            staged_backward_bytes(spec, dataclasses.replace(config, hold_weight=False)),
        )
        if most <= limit:
            in_bulk = _in_bulk(spec, config, architecture, limit)
            # Otherwise copied, 4 packs beside both gradients leave no room for the weight, but in
            # clusters, whose blocks are smaller.
            crowded = packs_per_thread == 4 and spec.gradients == 2 and cluster_blocks == 1
            crowded = crowded and row_threads > 32
            found = in_bulk or dataclasses.replace(
                config, hold_weight=config.hold_weight and not crowded
            )
            return _sharing_sums(spec, found, limit)
    return None


def _sharing_sums(spec: BackwardSpec, config: StagedBackward, limit: int) -> StagedBackward:
    """Return the configuration with sums of rows in shared memory, as far as there is room.

    In partials they are read and written once every 64 rows, which all threads wait for: LayerNorm
    takes 758 us, not 786, for 32768 rows of 16384, 378, not 389, of 8192, RMSNorm 768, not 782, and
    384, not 391. Beside six stages there is room for one gradient's alone, and registers for the
    other's: 1475 us, not 1516, for LayerNorm of 32768 rows of 32768 (1545 with both in partials),
    1553 by five stages. L1 has what shared memory leaves, and in it what is spilled by 5 packs a
    thread: LayerNorm of 4096 rows of 40960 takes 253 us with one gradient's sums there, 323 with
    both, 261 with none (bfloat16, float32 weight and bias, H200). Where elements are moved one by
    one a block without room for them leaves room for a second of another cluster.
    """
    if config.vector < pack_length(spec.x):
        return config
    used = staged_backward_bytes(spec, config)
    size = staged_backward_bytes(spec, dataclasses.replace(config, shared_sums=1)) - used
    shared = min(spec.gradients, (limit - used) // size)
    if config.packs_per_thread > 4:
        shared = min(shared, 1)
    hold = config.bulk and config.cluster_blocks > 1 and shared == spec.gradients - 1
    return dataclasses.replace(config, shared_sums=shared, hold_sums=hold)


def _in_bulk(
    spec: BackwardSpec, config: StagedBackward, architecture: int, limit: int
) -> StagedBackward | None:
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
    10240, which spill otherwise.

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
    if architecture != 90 or not (plain and ahead):
        return None
    packs = config.blocks_per_multiprocessor * config.block_threads * config.packs_per_thread
    of_five = clustered and (in_pairs or spec.norm == "rms_norm" or packs > 1024)
    if of_five and config.packs_per_thread > 4:  # shared memory would have no room for the sums
        return None
    stages = 5 if of_five else 6 if clustered else 4
    in_bulk = dataclasses.replace(config, bulk=True, stages=stages)
    return in_bulk if staged_backward_bytes(spec, in_bulk) <= limit else None
