"""How rows that lie side by side are laid over threads, as the channels of images do."""

from __future__ import annotations

from dataclasses import dataclass

from cupynorm._layout.architectures import pack_length, shared_limit
from cupynorm._layout.reduction import Reduction, reduction_of
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

# 128 and 64 bytes of x side by side. A block's other threads have other columns, and each has sums
# of its own columns' gradients, so that backward has fewer lanes.
MOST_LANES = {ForwardSpec: 8, BackwardSpec: 4}
# Of a multiprocessor, of 128 and of 256 threads: as many as have registers.
MOST_BLOCKS = {
    (ForwardSpec, "rms_norm"): (8, 4),
    (ForwardSpec, "layer_norm"): (8, 4),
    (BackwardSpec, "rms_norm"): (6, 3),
    (BackwardSpec, "layer_norm"): (4, 2),
}
COLUMNS_OF_MORE_THREADS = 256


@dataclass(frozen=True)
class Strided:
    """A block has all columns of `lanes` packs of neighbouring rows in shared memory."""

    block_threads: int
    lanes: int
    blocks_per_multiprocessor: int
    scratch_bytes: int
    shared_bytes: int
    vector: int
    reduction: Reduction | None


def strided(
    spec: ForwardSpec | BackwardSpec, n: int, vector: int, architecture: int
) -> Strided | None:
    """Return the configuration for rows of n elements. None if a row has no room.

    Two blocks of a multiprocessor are better than one, since one of them may load.
    """
    is_long = n >= COLUMNS_OF_MORE_THREADS
    threads = 256 if is_long else 128
    most = MOST_BLOCKS[type(spec), spec.norm][is_long]
    for blocks in (2, 1):
        lanes = MOST_LANES[type(spec)]
        while lanes > 1:
            scratch = _scratch_bytes(spec, threads, lanes)
            nbytes = scratch + _bytes_of_columns(spec, n, threads, lanes)
            if nbytes <= shared_limit(architecture, blocks):
                while nbytes > shared_limit(architecture, most):
                    most -= 1
                of_sums = reduction_of(spec, n) if isinstance(spec, BackwardSpec) else None
                return Strided(threads, lanes, most, scratch, nbytes, vector, of_sums)
            lanes //= 2
    return None


def _scratch_bytes(spec: ForwardSpec | BackwardSpec, threads: int, lanes: int) -> int:
    """Return the bytes where groups meet: three sums of each row for every warp."""
    rows = lanes * pack_length(spec.x)
    return 3 * rows * threads // 32 * ITEMSIZE[compute_dtype(spec.x)]


def _bytes_of_columns(spec: ForwardSpec | BackwardSpec, n: int, threads: int, lanes: int) -> int:
    """Return the bytes of a tile, and of the sums of its columns' gradients."""
    slots = -(-n // (threads // lanes)) * threads  # of packs
    if isinstance(spec, ForwardSpec):
        return slots * pack_length(spec.x) * ITEMSIZE[spec.x]
    of_sums = 2 * spec.gradients * ITEMSIZE[compute_dtype(spec.x)]
    return slots * (pack_length(spec.x) * (ITEMSIZE[spec.x] + ITEMSIZE[spec.dy]) + of_sums)
