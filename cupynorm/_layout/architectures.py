"""What a GPU has for a block, and how both passes divide a row: packs, threads, blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from cupynorm._layout.tuning_sm90 import AnyPass as Tuned
from cupynorm._operation import ITEMSIZE, ForwardSpec, compute_dtype

REGISTERS_PER_MULTIPROCESSOR = 65536


@dataclass(frozen=True)
class Architecture:
    """What GPUs of a compute capability have: CUDA C++ Programming Guide, "Compute Capabilities".

    `shared_kib`: shared memory of a block. `threads`: of a multiprocessor. `bulk_copies`: one
    thread can copy a whole row. `overlap`: programmatic dependent launch. `large_l2`: 50 MiB or
    more, so that rows fetched ahead stay there. `timed`: layouts were timed on it. The others have
    the same layouts, except those that spill there or rely on its L1.
    """

    shared_kib: int
    threads: int
    asynchronous_copies: bool = True
    clusters: bool = True
    bulk_copies: bool = True
    overlap: bool = True
    large_l2: bool = True
    timed: bool = False


_BEFORE_CLUSTERS = {"clusters": False, "bulk_copies": False, "overlap": False, "large_l2": False}

ARCHITECTURES = {
    75: Architecture(64, 1024, asynchronous_copies=False, **_BEFORE_CLUSTERS),
    80: Architecture(163, 2048, **_BEFORE_CLUSTERS),
    86: Architecture(99, 1536, **_BEFORE_CLUSTERS),
    87: Architecture(163, 1536, **_BEFORE_CLUSTERS),
    89: Architecture(99, 1536, **_BEFORE_CLUSTERS),
    90: Architecture(227, 2048, timed=True),
    100: Architecture(227, 2048),  # untimed, like the next ones
    103: Architecture(227, 2048),
    120: Architecture(99, 1536),
}


@cache
def gpu_of(architecture: int) -> Architecture:
    """Return what GPUs of a compute capability have, 90 for 9.0; the least for an unlisted one."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    before = max((known for known in ARCHITECTURES if known < architecture), default=75)
    return replace(ARCHITECTURES[before], shared_kib=99, threads=1536, timed=False)


# Of an H200's 256 KiB, shared memory takes 228, or 196 or less. L1 takes the rest.
MAX_SHARED_BESIDE_L1 = 196 << 10
MAX_CLUSTER_BLOCKS = 16


def without_clusters(architecture: int) -> int:
    """Return the capability whose layouts suit a slice of a GPU with no room for clusters."""
    return next(of for of in (80, 86) if shared_limit(of) <= shared_limit(architecture))


def pack_length(x: str) -> int:
    """Return the elements of a pack."""
    return 16 // ITEMSIZE[x]


def moves_8_bytes(x: str, vector: int) -> bool:
    """Return whether accesses of `vector` elements are of 8 bytes or more."""
    return vector * ITEMSIZE[x] >= 8


def shared_limit(architecture: int, blocks: int = 1) -> int:
    """Return the bytes of shared memory for each of so many blocks of a multiprocessor.

    The system takes a KiB more for each.
    """
    return ((gpu_of(architecture).shared_kib << 10) + 1024) // blocks - 1024


def leave_l1_room(blocks: int, block_bytes: int) -> bool:
    """Return whether so many blocks on a multiprocessor leave its L1 room for rows."""
    return blocks * (block_bytes + 1024) <= MAX_SHARED_BESIDE_L1


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


def team_threads(packs: int, packs_per_thread: int) -> int:
    """Return the threads that hold `packs` packs: a power of two up to 32, then whole warps."""
    threads = -(-packs // packs_per_thread)
    if threads <= 32:
        return 1 << (threads - 1).bit_length()
    return -(-threads // 32) * 32


def slots_of(packs: int, threads: int) -> int:
    """Return the packs that so many threads hold of a row, with those past its end."""
    return threads * -(-packs // threads)


def widest(*dtypes: str | None) -> int:
    """Return the bytes of an element of the widest operand that is present."""
    return max((ITEMSIZE[dtype] for dtype in dtypes if dtype), default=0)


def streaming_blocks(packs: int, architecture: int) -> int:
    """Return the blocks that stream a row.

    Few long rows with one block each would leave multiprocessors idle
    (notes.md#rows-that-are-read-twice).
    """
    long = packs > Tuned.max_packs_streamed_by_one_block
    return 4 if long and gpu_of(architecture).clusters else 1


def max_cluster_blocks(architecture: int) -> int:
    """Return the most blocks of a cluster, 1 if there are no clusters."""
    return MAX_CLUSTER_BLOCKS if gpu_of(architecture).clusters else 1


# ---- how wide weight, bias and y are, compared with x --------------------------------------------


def is_wide(spec: ForwardSpec) -> bool:
    """Return whether float64 operands widen a pack of a narrower x, to 168 registers."""
    return widest(spec.weight, spec.bias, spec.y) > max(4, ITEMSIZE[spec.x])


def is_y_wider(spec: ForwardSpec) -> bool:
    """Return whether a pack of y has more bytes than one of x."""
    return ITEMSIZE[spec.y] > ITEMSIZE[spec.x]


def affine_bytes(spec: ForwardSpec) -> int:
    """Return the bytes of an element of the weight and one of the bias."""
    return widest(spec.weight) + widest(spec.bias)


def has_heavy_affine(spec: ForwardSpec) -> bool:
    """Return whether an element of weight and bias together exceeds 4 bytes."""
    return affine_bytes(spec) > 4


def affine_registers(spec: ForwardSpec, packs_per_thread: int) -> int:
    """Return the registers that hold a thread's weight and bias."""
    return packs_per_thread * pack_length(spec.x) * affine_bytes(spec) // 4
