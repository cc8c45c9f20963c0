"""How a backward pass lays rows longer than a cluster holds over blocks, in strips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._layout.architectures import gpu_of, pack_length, shared_limit
from cupynorm._layout.tuning_sm90 import BackwardColumnParallel as Tuned
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype

# Blocks that all run at once, one on each multiprocessor. An H200 has 132.
MAX_STRIPS = 128

# As in kernels/backward_column_parallel.cu: groups in shared memory, warps that exchange sums, and
# the places of those sums and of wild rows.
STAGES, MESSENGERS, PLACES, WILD_PLACES = 5, 4, 8, 2


@dataclass(frozen=True)
class BackwardColumnParallel:
    """Rows longer than a cluster holds. Each block has a strip of them, `strip_threads` packs wide.

    Rows come in groups of `group_rows`. A cooperative launch has `strips` blocks. It begins when
    the GPU has room for them all. Each block sums its weight gradients alone.
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

    They are read once. Streamed rows are read twice (notes.md#column-parallel-rows). N alone
    decides, never the alignment, since the bits of dx must not depend on it. So rows of whole packs
    at unaligned addresses use strips too, though these are slower there.
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
    """Return the bytes of device memory of the blocks' counts, a line each."""
    return (PLACES + WILD_PLACES) * 128


def column_parallel_exchange_bytes(spec: BackwardSpec, config: BackwardColumnParallel) -> int:
    """Return the bytes of device memory for the sums of rows that the blocks exchange."""
    sums = _gradient_sums(spec) * config.strips
    of_groups = PLACES * config.group_rows * sums * ITEMSIZE[compute_dtype(spec.x)]
    return of_groups + WILD_PLACES * sums * (config.strip_threads // 32) * ITEMSIZE["float64"]


def _gradient_sums(spec: BackwardSpec) -> int:
    """Return how many sums of a row dx needs."""
    return 3 if spec.norm == "layer_norm" else 1
