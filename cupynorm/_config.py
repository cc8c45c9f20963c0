"""How to compute it: the regime, and how a row is laid over threads.

Pure functions of the spec, the row length N and `vector`, the elements moved by one access. What
the bits of a row depend on (the regime, row_threads, packs_per_thread) follows from the spec and N
alone; vector decides only what does not show in them. (The order in which weight gradients are
summed over rows is that of the blocks, which vector does affect.)

A pack is 16 bytes of x. Registers bound what a thread may hold: NVRTC's counts for sm_75 and sm_90
are beside each limit, and tests/test_compile.py compiles the configurations for every supported
architecture and fails on a spill.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupynorm._spec import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

__all__ = [
    "ResidentBackward",
    "ResidentForward",
    "StreamingBackward",
    "StreamingForward",
    "backward_config",
    "forward_config",
    "pack_length",
]

REGISTERS_PER_MULTIPROCESSOR = 65536


@dataclass(frozen=True)
class ResidentForward:
    """Rows held in registers, read once, by teams of `row_threads` threads."""

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    vector: int

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


@dataclass(frozen=True)
class StreamingForward:
    """Rows of any length, read again for each step, one block a row."""

    block_threads: int
    vector: int


@dataclass(frozen=True)
class ResidentBackward:
    """As ResidentForward; the weight, if held, and its gradients stay in registers as well."""

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    vector: int
    hold_weight: bool
    prefetch: bool

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


@dataclass(frozen=True)
class StreamingBackward:
    """One kernel reduces each row to coefficients, another walks down the columns."""

    row_threads: int
    column_threads: int
    vector: int


def pack_length(x: str) -> int:
    """Return the elements of a pack."""
    return 16 // ITEMSIZE[x]


def _team(packs: int, packs_per_thread: int) -> int:
    """Return the threads that hold `packs` packs: a power of two up to 32, then whole warps."""
    threads = -(-packs // packs_per_thread)
    if threads <= 32:
        return 1 << (threads - 1).bit_length()
    return -(-threads // 32) * 32


def _block(row_threads: int, block_threads: int) -> int:
    """Return the size of a block of whole teams near `block_threads`, in whole warps."""
    return max(1, block_threads // row_threads) * row_threads


def forward_config(spec: ForwardSpec, n: int, vector: int) -> ResidentForward | StreamingForward:
    """Return the configuration of a forward pass over rows of n elements."""
    length = pack_length(spec.x)
    packs = -(-n // length)
    # At 4 packs of a 16-bit dtype, up to 168 registers with float64 operands, 128 where single
    # elements are moved, 96 else; 80 for wider dtypes.
    wide = max(ITEMSIZE[d] for d in (spec.weight, spec.bias, spec.y) if d) > max(
        4, ITEMSIZE[spec.x]
    )
    if packs > 4 * (256 if wide else 512 if length == 8 else 768):
        return StreamingForward(block_threads=1024, vector=vector)
    row_threads = _team(packs, min(4, -(-packs // 32)))
    packs_per_thread = -(-packs // row_threads)
    block_threads = _block(row_threads, 128)
    threads = 256 if wide else 512 if length == 8 and vector < length else 640
    return ResidentForward(
        row_threads=row_threads,
        block_threads=block_threads,
        blocks_per_multiprocessor=max(1, threads // block_threads),
        packs_per_thread=packs_per_thread,
        vector=vector,
    )


def _backward_registers(
    spec: BackwardSpec, packs: int, *, vector: int, hold_weight: bool, prefetch: bool
) -> int:
    """Return an upper bound of the registers of a resident backward, fitted to NVRTC's counts."""
    length = pack_length(spec.x)
    row = 4 + length * ITEMSIZE[spec.dy] // 4
    compute = length * ITEMSIZE[compute_dtype(spec.x)] // 4
    words = row * (1 + prefetch) + compute * (spec.gradients + hold_weight)
    scratch = 12 if vector == length else 21
    if "float64" in (spec.dy, spec.weight) and spec.x != "float64":
        scratch += 24
    return 30 + int(packs * (1.3 * words + scratch))


def backward_config(
    spec: BackwardSpec, n: int, vector: int
) -> ResidentBackward | StreamingBackward:
    """Return the configuration of a backward pass over rows of n elements."""
    length = pack_length(spec.x)
    packs = -(-n // length)

    def fits(packs_per_thread: int, threads: int, vector: int, hold: bool, prefetch: bool) -> bool:
        registers = _backward_registers(
            spec, packs_per_thread, vector=vector, hold_weight=hold, prefetch=prefetch
        )
        # Four warps, one on each scheduler, share the registers alike.
        available = REGISTERS_PER_MULTIPROCESSOR // (-(-threads // 128) * 128)
        return registers <= min(255, available // 8 * 8)

    # The fewest packs that fit, from one in the rows of a warp and two in longer ones; decided for
    # the worst alignment, so that a row's bits do not depend on it.
    for packs_per_thread in range(min(2, -(-packs // 32)), 5):
        row_threads = _team(packs, packs_per_thread)
        block_threads = _block(row_threads, 256)
        if row_threads <= 512 and fits(packs_per_thread, block_threads, 1, False, False):
            break
    else:
        return StreamingBackward(row_threads=512, column_threads=256, vector=vector)
    # Most threads first, then the most kept in registers; with the addresses of single elements
    # there is no room to prefetch.
    threads, hold_weight, prefetch = next(
        (threads, hold, prefetch)
        for threads in (512, 256)
        for prefetch in ((True, False) if vector == length else (False,))
        for hold in (True, False)
        if threads >= block_threads or threads == 256
        if fits(packs_per_thread, max(threads, block_threads), vector, hold, prefetch)
    )
    return ResidentBackward(
        row_threads=row_threads,
        block_threads=block_threads,
        blocks_per_multiprocessor=max(1, threads // block_threads),
        packs_per_thread=packs_per_thread,
        vector=vector,
        hold_weight=hold_weight and spec.weight is not None,
        prefetch=prefetch,
    )
