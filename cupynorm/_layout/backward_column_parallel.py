"""How a backward pass lays rows longer than a cluster holds over blocks, in strips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._layout.architectures import gpu_of, pack_length, shared_limit
from cupynorm._layout.tuning_sm90 import BackwardColumnParallel as Tuned
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype

# Blocks that all run at once, one on each multiprocessor: an H200 has 132.
MAX_STRIPS = 128

# As kernels/backward_column_parallel.cu has them: groups in shared memory, warps that exchange
# sums, and the places of what they exchange; and those of wild rows.
STAGES, MESSENGERS, PLACES, WILD_PLACES = 5, 4, 8, 2


@dataclass(frozen=True)
class BackwardColumnParallel:
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
        return self.strip_threads + 32 * MESSENGERS


def backward_column_parallel(
    spec: BackwardSpec, n: int, vector: int, architecture: int
) -> BackwardColumnParallel | None:
    """Return the configuration of rows that no cluster holds, by strips of up to 512 packs.

    They are read once, not twice as they would be streamed (notes.md#column-parallel-rows). N alone
    decides, never the alignment, since the bits of dx must not depend on it: rows of whole packs
    are so at unaligned addresses, too, though slower there.
    """
    whole, rest = divmod(n, pack_length(spec.x))
    strip_threads = -(-whole // (32 * MAX_STRIPS)) * 32
    if not gpu_of(architecture).clusters or rest:
        return None
    if not Tuned.min_threads <= strip_threads <= 512:
        return None
    strips = -(-whole // strip_threads)
    for group_rows in Tuned.group_rows:
        config = BackwardColumnParallel(strips, strip_threads, group_rows, vector)
        if backward_column_parallel_bytes(spec, config) <= shared_limit(architecture):
            return config
    return None


def backward_column_parallel_bytes(spec: BackwardSpec, config: BackwardColumnParallel) -> int:
    """Return the shared memory of a block: see kernels/backward_column_parallel.cu."""
    itemsizes = [ITEMSIZE[dtype] for dtype in (spec.x, spec.dy, spec.dresidual_out) if dtype]
    row = config.strip_threads * pack_length(spec.x) * sum(itemsizes)
    of_warps = MESSENGERS * _gradient_sums(spec) * config.strip_threads // 32
    known = PLACES * 5  # values of each row
    sums = (of_warps + known) * ITEMSIZE[compute_dtype(spec.x)]
    return config.group_rows * (STAGES * row + sums)


def column_parallel_counts_bytes() -> int:
    """Return the bytes of device memory of the counts, a line each, of blocks that have told."""
    return (PLACES + WILD_PLACES) * 128


def column_parallel_exchange_bytes(spec: BackwardSpec, config: BackwardColumnParallel) -> int:
    """Return the bytes of device memory in which the blocks exchange their sums of rows."""
    sums = _gradient_sums(spec) * config.strips
    of_groups = PLACES * config.group_rows * sums * ITEMSIZE[compute_dtype(spec.x)]
    return of_groups + WILD_PLACES * sums * (config.strip_threads // 32) * ITEMSIZE["float64"]


def _gradient_sums(spec: BackwardSpec) -> int:
    """Return how many sums dx needs of a row."""
    return 3 if spec.norm == "layer_norm" else 1
