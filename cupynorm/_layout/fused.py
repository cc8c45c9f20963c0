"""How the rows of a norm of `cupynorm.fuse` are laid over threads.

Of the arrays of a row, only the bytes of an element matter: `nbytes` of those that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
LEAST_BLOCK_THREADS = 256
MOST_STAGES = 4


@dataclass(frozen=True)
class FusedForward:
    """Rows in registers: see kernels/fused_forward.cu."""

    row_threads: int
    block_threads: int
    cluster_blocks: int
    packs_per_thread: int
    pack_length: int
    vector: int
    full: bool
    hold_values: bool
    blocks_per_multiprocessor: int


@dataclass(frozen=True)
class FusedBackward:
    """Rows that wait in shared memory: see kernels/fused_backward.cu."""

    row_threads: int
    block_threads: int
    cluster_blocks: int
    packs_per_thread: int
    pack_length: int
    vector: int
    full: bool
    stages: int
    blocks_per_multiprocessor: int


def _teams(x: str, n: int, architecture: int, vector: int) -> Iterator[dict[str, int | bool]]:
    """Yield what both passes' layouts have in common, first as few blocks and packs as hold a row.

    A thread of a row has up to two packs, or up to four where a row cannot have several blocks.
    """
    length, blocks = pack_length(x), 1
    packs = -(-n // length)
    most_packs = 2 if gpu_of(architecture).clusters else 4
    while blocks <= max_cluster_blocks(architecture):
        for of_thread in range(1, most_packs + 1):
            threads = team_threads(-(-packs // blocks), of_thread)
            if threads <= MOST_THREADS:
                teams = max(1, LEAST_BLOCK_THREADS // threads) if blocks == 1 else 1
                yield {
                    "row_threads": threads,
                    "block_threads": threads * teams,
                    "cluster_blocks": blocks,
                    "packs_per_thread": of_thread,
                    "pack_length": length,
                    "vector": min(vector, length),
                    "full": blocks * threads * of_thread * length == n,
                }
                break
        blocks *= 2


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
    heavy: bool,
    vector: int,
    architecture: int,
    most_blocks: int,
) -> FusedForward | None:
    """Return the configuration of a forward pass; None if rows of n are too long.

    `read`: the dtypes of arrays whose rows are read. `shared`: those of weight, bias and vectors.
    `heavy`: the value takes many instructions. At most `most_blocks` are on a multiprocessor.
    """
    words = ITEMSIZE[compute] // 4
    of_pack = sum(ITEMSIZE[dtype] for dtype in (*read, *shared)) * pack_length(x) // 4
    of_pack += pack_length(x) * words if heavy else 0
    first = None
    for common in _teams(x, n, architecture, vector):
        registers = 16 * words + of_pack * common["packs_per_thread"] + pack_length(x) * words
        blocks = min(most_blocks, _blocks(registers, common["block_threads"], architecture))
        config = FusedForward(**common, hold_values=heavy, blocks_per_multiprocessor=blocks)  # type: ignore[arg-type]
        first = first or config
        # While one block waits for its sums, another one loads.
        if blocks > 1:
            return config
    return first


def fused_backward(
    x: str,
    compute: str,
    n: int,
    read: Sequence[str],
    shared: Sequence[str],
    *,
    kept: int,
    vector: int,
    architecture: int,
    most_blocks: int,
) -> FusedBackward | None:
    """Return the configuration of a backward pass; None if rows of n are too long.

    `kept`: how many values of the compute dtype a thread keeps of an element.
    """
    common = next(_teams(x, n, architecture, vector), None)
    if common is None:
        return None
    words, length = ITEMSIZE[compute] // 4, pack_length(x)
    of_pack = sum(ITEMSIZE[dtype] for dtype in shared) * length // 4 + kept * length * words
    registers = 24 * words + of_pack * common["packs_per_thread"] + length * words
    blocks = min(most_blocks, _blocks(registers, common["block_threads"], architecture))
    while blocks >= 1:
        for stages in range(MOST_STAGES, 1, -1):
            config = FusedBackward(**common, stages=stages, blocks_per_multiprocessor=blocks)  # type: ignore[arg-type]
            nbytes = fused_backward_bytes(x, compute, read, config)
            if nbytes <= shared_limit(architecture, blocks):
                return config
        blocks -= 1
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
