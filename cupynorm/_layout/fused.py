"""How the rows of a norm of `cupynorm.fuse` are laid over threads.

Of the arrays of a row, only the bytes of an element matter: `nbytes` of those that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from cupynorm._layout.architectures import (
    REGISTERS_PER_MULTIPROCESSOR,
    gpu_of,
    max_cluster_blocks,
    pack_length,
    shared_limit,
    team_bytes,
    team_threads,
)
from cupynorm._operation import ITEMSIZE

MOST_THREADS = 512
# Of a block with several rows.
MOST_PACKS_OF_TEAMS, MOST_TEAM_THREADS = 512, 256
MOST_STAGES = 3
# Packs of a thread, and the threads of a block's row that may have as many
# (notes.md#fused-norms).
Choice = tuple[int, range]
ANY, UP_TO_256 = range(1, MOST_THREADS + 1), range(1, 257)
FORWARD_PACKS: tuple[Choice, ...] = ((4, UP_TO_256), (8, UP_TO_256), (2, ANY), (1, ANY))
BACKWARD_PACKS: tuple[Choice, ...] = ((2, UP_TO_256), (4, ANY), (2, ANY), (1, ANY))
PACKS_OF_TWO_ARRAYS: tuple[Choice, ...] = ((4, ANY), (2, ANY), (1, ANY))  # of x and one gradient
PACKS_OF_HEAVY_EPILOGUE: tuple[Choice, ...] = (
    *((4, range(65, 129)), (2, UP_TO_256)),
    *((4, range(257, MOST_THREADS + 1)), (1, ANY)),
)
PACKS_OF_HEAVY_VALUE: tuple[Choice, ...] = ((2, ANY), (4, ANY), (1, ANY))
# A thread with 4 packs and a heavy step has the former, if it needs up to the latter.
FEW_REGISTERS, MOST_AS_FEW = 64, 80
REGISTERS_OF_HEAVY_EPILOGUE = 168  # of a thread with 4 packs: with fewer they spill
MOST_REGISTERS = 128  # by which 512 threads are on a multiprocessor
MOST_THREADS_OF_TEAMS = 512  # of a multiprocessor, if a backward block has several rows
TOO_FEW_THREADS = 256  # of a multiprocessor, with 4 packs each: 2 packs have more at once
MOST_PACKS_BESIDE_WEIGHT = 2  # with more, the weight comes when the row is measured
STREAMING_THREADS, STREAMING_PACKS = 256, 2
STREAMED_ROWS = 64  # of a cluster in a backward pass: kTurns of kernels/gradient.cuh


@dataclass(frozen=True)
class FusedForward:
    """Rows in registers, or of any length if `streams`: see kernels/fused_forward.cu."""

    row_threads: int
    block_threads: int
    cluster_blocks: int
    packs_per_thread: int
    pack_length: int
    vector: int
    full: bool
    hold_values: bool
    hold_weight: bool
    streams: bool
    blocks_per_multiprocessor: int


@dataclass(frozen=True)
class FusedBackward:
    """Rows that wait in shared memory, or of any length if `streams`.

    See kernels/fused_backward.cu.
    """

    row_threads: int
    block_threads: int
    cluster_blocks: int
    packs_per_thread: int
    pack_length: int
    vector: int
    full: bool
    stages: int
    streams: bool
    blocks_per_multiprocessor: int


def _teams(
    x: str,
    n: int,
    architecture: int,
    vector: int,
    choices: Sequence[Choice],
) -> Iterator[dict[str, int]]:
    """Yield what both passes' layouts have in common, those of as few blocks as possible first.

    `choices`: packs of a thread, and the threads of a block's row that may have as many.
    """
    length, blocks = pack_length(x), 1
    packs = -(-n // length)
    while blocks <= max_cluster_blocks(architecture):
        of_block = -(-packs // blocks)
        for most_packs, allowed in choices:
            threads = team_threads(of_block, most_packs)
            if threads not in allowed or (blocks > 1 and threads <= 32):
                continue
            of_thread = -(-of_block // threads)  # each but the last lies inside of a row
            of_teams = min(MOST_PACKS_OF_TEAMS // most_packs, MOST_TEAM_THREADS)
            teams = max(1, of_teams // threads) if blocks == 1 else 1
            yield {
                "row_threads": threads,
                "block_threads": threads * teams,
                "cluster_blocks": blocks,
                "packs_per_thread": of_thread,
                "pack_length": length,
                "vector": min(vector, length),
                "full": blocks * threads * of_thread * length == n,
            }
        blocks *= 2


def _streams(
    x: str, architecture: int, vector: int, of_thread: int, of_pack: int
) -> tuple[dict[str, int], int]:
    """Return what both passes' layouts of any row have in common, and the blocks at once.

    `of_thread` and `of_pack`: the registers of a thread, and those more of each pack.
    """
    length = pack_length(x)
    packs = STREAMING_PACKS if of_thread + of_pack * STREAMING_PACKS <= MOST_REGISTERS else 1
    common = {
        "row_threads": STREAMING_THREADS,
        "block_threads": STREAMING_THREADS,
        "cluster_blocks": max_cluster_blocks(architecture),
        "packs_per_thread": packs,
        "pack_length": length,
        "vector": min(vector, length),
        "full": False,
    }
    return common, _blocks(of_thread + of_pack * packs, STREAMING_THREADS, architecture)


def _blocks(registers: int, block_threads: int, architecture: int) -> int:
    """Return the blocks of a multiprocessor whose threads have so many registers."""
    allocated = -(-registers // 8) * 8
    by_registers = REGISTERS_PER_MULTIPROCESSOR // (allocated * block_threads)
    return max(1, min(by_registers, gpu_of(architecture).threads // block_threads))


def fused_forward(
    x: str,
    compute: str,
    n: int,
    read: Sequence[str],
    shared: Sequence[str],
    *,
    heavy_value: bool,
    heavy_epilogue: bool,
    vector: int,
    architecture: int,
) -> FusedForward:
    """Return the configuration of a forward pass.

    `read`: the dtypes of arrays whose rows are read. `shared`: those of weight, bias and vectors.
    `heavy_value`, `heavy_epilogue`: the value, or the epilogue, takes many instructions.
    """
    words, length = ITEMSIZE[compute] // 4, pack_length(x)
    of_rows = sum(ITEMSIZE[dtype] for dtype in read) * length // 4
    of_shared = sum(ITEMSIZE[dtype] for dtype in shared) * length // 4
    of_rows = max(of_rows, length * words) if heavy_value else of_rows
    first = None
    for common in _teams(x, n, architecture, vector, FORWARD_PACKS):
        packs = common["packs_per_thread"]
        holds = packs <= MOST_PACKS_BESIDE_WEIGHT
        registers = 28 * words + of_rows * packs + of_shared * (packs if holds else 1)
        registers += length * words
        as_few = (heavy_value or heavy_epilogue) and packs == 4 and registers <= MOST_AS_FEW
        allotted = min(registers, FEW_REGISTERS) if as_few else registers
        blocks = _blocks(allotted, common["block_threads"], architecture)
        config = FusedForward(
            **common,  # type: ignore[arg-type]
            hold_values=heavy_value,
            hold_weight=holds,
            streams=False,
            blocks_per_multiprocessor=blocks,
        )
        first = first or config
        # While one block waits for its sums, another one loads.
        if blocks > 1 and registers <= MOST_REGISTERS:
            return config
    if first is not None:
        return first
    of_thread, of_pack = (40 + length) * words, of_rows + of_shared
    common, blocks = _streams(x, architecture, vector, of_thread, of_pack)
    return FusedForward(
        **common,  # type: ignore[arg-type]
        hold_values=False,
        hold_weight=False,
        streams=True,
        blocks_per_multiprocessor=blocks,
    )


def fused_backward(
    x: str,
    compute: str,
    n: int,
    read: Sequence[str],
    shared: Sequence[str],
    *,
    kept: int,
    heavy_value: bool,
    heavy_epilogue: bool,
    vector: int,
    architecture: int,
) -> FusedBackward:
    """Return the configuration of a backward pass.

    `kept`: how many values of the compute dtype a thread keeps of an element. `heavy_value`,
    `heavy_epilogue`: the value, or the epilogue, takes many instructions.
    """
    heavy = heavy_epilogue and not heavy_value and len(read) > 2
    if heavy:
        choices = [PACKS_OF_HEAVY_EPILOGUE, BACKWARD_PACKS]  # the latter where no cluster fits
    elif len(read) <= 2:
        choices = [PACKS_OF_TWO_ARRAYS]
    else:
        choices = [PACKS_OF_HEAVY_VALUE if heavy_value else BACKWARD_PACKS]
    words, length = ITEMSIZE[compute] // 4, pack_length(x)
    of_pack = sum(ITEMSIZE[dtype] for dtype in shared) * length // 4 + kept * length * words
    first = None
    for common in chain(*(_teams(x, n, architecture, vector, some) for some in choices)):
        packs, threads = common["packs_per_thread"], common["block_threads"]
        registers = 24 * words + of_pack * packs + length * words
        spacious = heavy and packs == 4 and threads <= 128
        allotted = max(REGISTERS_OF_HEAVY_EPILOGUE, registers) if spacious else registers
        blocks = _blocks(allotted, threads, architecture)
        if threads > common["row_threads"]:
            blocks = min(blocks, MOST_THREADS_OF_TEAMS // threads)
        stages = MOST_STAGES if packs < 4 else 2
        config = _with_stages(x, compute, read, common, blocks, stages, architecture)
        if config is not None and registers <= MOST_REGISTERS:
            at_once = config.blocks_per_multiprocessor * threads
            if packs < 4 or at_once > TOO_FEW_THREADS:
                return config
        first = first or config
    if first is not None:
        return first
    of_rows = sum(ITEMSIZE[dtype] for dtype in read) * length // 4
    of_thread = (40 + length) * words
    common, blocks = _streams(x, architecture, vector, of_thread, of_rows + of_pack)
    return FusedBackward(
        **common,  # type: ignore[arg-type]
        stages=0,
        streams=True,
        blocks_per_multiprocessor=blocks,
    )


def _with_stages(
    x: str,
    compute: str,
    read: Sequence[str],
    common: dict[str, int],
    blocks: int,
    most_stages: int,
    architecture: int,
) -> FusedBackward | None:
    """Return a configuration of up to so many blocks whose stages fit; None if none fits."""
    for at_once in range(blocks, 0, -1):
        for stages in range(most_stages, 1, -1):
            told = {"stages": stages, "streams": False, "blocks_per_multiprocessor": at_once}
            config = FusedBackward(**common, **told)  # type: ignore[arg-type]
            nbytes = fused_backward_bytes(x, compute, read, config)
            if nbytes <= shared_limit(architecture, at_once):
                return config
    return None


def fused_forward_bytes(compute: str, config: FusedForward) -> int:
    """Return the shared memory of a block."""
    return team_bytes(compute, config.row_threads, config.block_threads, config.cluster_blocks)


def fused_backward_bytes(x: str, compute: str, read: Sequence[str], config: FusedBackward) -> int:
    """Return the shared memory of a block: reductions, stages, and the sums of teams."""
    elements = config.packs_per_thread * config.block_threads * pack_length(x)
    teams = config.block_threads // config.row_threads
    return (
        team_bytes(compute, config.row_threads, config.block_threads, config.cluster_blocks)
        + config.stages * sum(elements * ITEMSIZE[dtype] for dtype in read)
        + (elements * ITEMSIZE[compute] if teams > 1 else 0)
    )
