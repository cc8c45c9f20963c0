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
    """As ResidentForward, with the weight gradients; one block a multiprocessor."""

    row_threads: int
    block_threads: int
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


def forward_config(spec: ForwardSpec, n: int, vector: int) -> ResidentForward | StreamingForward:
    """Return the configuration of a forward pass over rows of n elements."""
    length = pack_length(spec.x)
    packs = -(-n // length)
    # Operands of float64 widen a pack of a narrower x: up to 168 registers at 4 packs.
    wide = max(ITEMSIZE[d] for d in (spec.weight, spec.bias, spec.y) if d) > max(
        4, ITEMSIZE[spec.x]
    )
    if packs > 4 * (256 if wide else 512 if length == 8 else 768):
        # The bitmask beside operands of float64 spilled at the 64 registers of 1024 threads.
        return StreamingForward(block_threads=512 if wide and spec.relu else 1024, vector=vector)
    row_threads = _team(packs, 2 if packs <= 64 else 4)
    if spec.relu:
        row_threads = max(row_threads, 8 // length)  # a byte of the bitmask is of neighbours
    # A row of several warps has a block to itself: sharing cost 13% at N = 2048 (bfloat16, H200).
    block_threads = max(row_threads, 128) if row_threads <= 32 else row_threads
    # Threads that a multiprocessor must hold at once bound their registers: 64 at 1024 threads, by
    # which LayerNorm at N = 8192 gained 12% over 512 (bfloat16, H200). What would spill has fewer
    # threads: up to 122 registers where single 16-bit elements are moved; 96 for float16, for a
    # wider y and for the rows of a warp.
    if wide:
        threads = 256
    elif length == 8 and vector < length:
        threads = 512
    elif (
        row_threads <= 32
        or vector < length
        or spec.x == "float16"
        or ITEMSIZE[spec.y] > ITEMSIZE[spec.x]
    ):
        threads = 640
    else:
        threads = 1024
    return ResidentForward(
        row_threads=row_threads,
        block_threads=block_threads,
        blocks_per_multiprocessor=max(1, threads // block_threads),
        packs_per_thread=-(-packs // row_threads),
        vector=vector,
    )


def _backward_registers(
    spec: BackwardSpec, packs: int, *, vector: int, hold_weight: bool, prefetch: bool
) -> int:
    """Return an upper bound of the registers of a resident backward, fitted to NVRTC's counts."""
    length = pack_length(spec.x)
    row = 4 + length * ITEMSIZE[spec.dy] // 4
    compute = length * ITEMSIZE[compute_dtype(spec.x)] // 4
    row += spec.bitmask
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
    # A row of a warp is short enough to be fetched when its turn comes; longer ones are asked for a
    # row ahead: LayerNorm at N = 4096 gained 9% by it (bfloat16, H200).
    prefetch = packs > 64

    def fits(packs_per_thread: int, threads: int, vector: int, hold: bool, prefetch: bool) -> bool:
        registers = _backward_registers(
            spec, packs_per_thread, vector=vector, hold_weight=hold, prefetch=prefetch
        )
        return registers <= min(255, REGISTERS_PER_MULTIPROCESSOR // threads // 8 * 8)

    # The fewest packs a thread, and so the most threads, that fit; single elements leave no room to
    # prefetch. Both must fit, so that a row's bits do not depend on its alignment.
    for packs_per_thread, threads in ((2, 512), (3, 384), (4, 256), (2, 256)):
        row_threads = _team(packs, packs_per_thread)
        if (
            row_threads <= threads
            and fits(packs_per_thread, threads, length, False, prefetch)
            and fits(packs_per_thread, threads, 1, False, False)
        ):
            break
    else:
        return StreamingBackward(row_threads=512, column_threads=256, vector=vector)
    aligned = vector == length
    # One block of several rows a multiprocessor writes the fewest partial sums.
    return ResidentBackward(
        row_threads=row_threads,
        block_threads=max(1, threads // row_threads) * row_threads,
        packs_per_thread=-(-packs // row_threads),
        vector=vector,
        hold_weight=(
            aligned
            and spec.weight is not None
            and fits(packs_per_thread, threads, length, True, prefetch)
        ),
        prefetch=aligned and prefetch,
    )
