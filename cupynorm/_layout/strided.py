"""How rows that lie side by side are laid over threads, as the channels of images do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._layout.architectures import pack_length, shared_limit
from cupynorm._layout.reduction import Reduction, reduction_of
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

MOST_LANES = 8  # 128 bytes of x side by side
MOST_BLOCKS = {ForwardSpec: 4, BackwardSpec: 2}  # of a multiprocessor: 64 and 128 registers


@dataclass(frozen=True)
class Strided:
    """A block has all columns of `lanes` packs of neighbouring rows in shared memory."""

    lanes: int
    blocks_per_multiprocessor: int
    scratch_bytes: int
    shared_bytes: int
    vector: int
    reduction: Reduction | None
    block_threads: ClassVar[int] = 256


def strided(
    spec: ForwardSpec | BackwardSpec, n: int, vector: int, architecture: int
) -> Strided | None:
    """Return the configuration for rows of n elements. None if a row has no room.

    Two blocks of a multiprocessor are better than one, since one of them may load.
    """
    for blocks in (2, 1):
        lanes = MOST_LANES
        while lanes > 1:
            scratch = _scratch_bytes(spec, lanes)
            nbytes = scratch + _bytes_of_columns(spec, n, lanes)
            if nbytes <= shared_limit(architecture, blocks):
                most = MOST_BLOCKS[type(spec)]
                fitting = next(b for b in range(most, 0, -1) if fits(nbytes, architecture, b))
                of_sums = reduction_of(spec, n) if isinstance(spec, BackwardSpec) else None
                return Strided(lanes, fitting, scratch, nbytes, vector, of_sums)
            lanes //= 2
    return None


def fits(nbytes: int, architecture: int, blocks: int) -> bool:
    """Tell whether so many blocks of a multiprocessor have so much shared memory each."""
    return nbytes <= shared_limit(architecture, blocks)


def _scratch_bytes(spec: ForwardSpec | BackwardSpec, lanes: int) -> int:
    """Return the bytes where groups meet: three sums of each row for every warp."""
    rows = lanes * pack_length(spec.x)
    return 3 * rows * Strided.block_threads // 32 * ITEMSIZE[compute_dtype(spec.x)]


def _bytes_of_columns(spec: ForwardSpec | BackwardSpec, n: int, lanes: int) -> int:
    """Return the bytes of a tile, and of the sums of its columns' gradients."""
    rounds = -(-n // (Strided.block_threads // lanes))
    of_pack = rounds * Strided.block_threads * pack_length(spec.x)
    if isinstance(spec, ForwardSpec):
        return of_pack * ITEMSIZE[spec.x]
    of_sums = 2 * spec.gradients * n * ITEMSIZE[compute_dtype(spec.x)]
    return of_pack * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy]) + of_sums
