"""How a forward pass lays rows that registers hold over threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupynorm._layout.architectures import (
    LEAST_FILLED,
    MULTIPROCESSORS,
    REGISTERS_PER_MULTIPROCESSOR,
    affine_bytes,
    affine_registers,
    gpu_of,
    is_wide,
    is_y_wider,
    moves_8_bytes,
    pack_length,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._operation import ITEMSIZE, ForwardSpec

MOST_SHORT_ELEMENTS = 1 << 23  # of few rows of less than a warp


@dataclass(frozen=True)
class ForwardInRegisters:
    """Rows held in registers, read once, each by `row_threads` threads of `cluster_blocks` blocks.

    In several blocks they give the bits of one block with all these threads, `folded` those of
    twice as many threads with half the packs, for few rows.
    `pack_length`: the elements of 16 bytes, or of 8 (_own_pack_length).
    `rare_last`: what is rare comes last in the code, for few rows. `hold_weight`: weight and bias
    are asked for with the row, not after it is measured. `full`: the row fills its threads' packs
    exactly. `blocks_ahead`: a block has the L2 fetch the rows of the one so many later, or none if
    0; of an x of 32 MiB or more `blocks_ahead_if_large`.
    """

    row_threads: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    pack_length: int
    cluster_blocks: int
    folded: bool
    vector: int
    rare_last: bool
    blocks_ahead: int
    blocks_ahead_if_large: int
    hold_weight: bool
    full: bool

    @property
    def rows_per_block(self) -> int:
        return self.block_threads // self.row_threads


def forward_in_registers_bytes(spec: ForwardSpec, config: ForwardInRegisters) -> int:
    """Return the shared memory of a block: see kernels/forward_in_registers.cu."""
    threads = config.row_threads, config.block_threads
    if config.folded:  # its warps have two sums each
        threads = 2 * config.row_threads, 2 * config.block_threads
    size = team_bytes(spec.x, *threads, config.cluster_blocks, split=True)
    unaligned = config.vector == 1 and ITEMSIZE[spec.x] <= 4 and config.packs_per_thread > 2
    if unaligned and ITEMSIZE[spec.y] <= 4:
        size += config.block_threads * config.pack_length * ITEMSIZE[spec.y]
    return size


def has_fewest_threads(spec: ForwardSpec, packs: int) -> bool:
    """Return whether a row has as few threads as hold it by 8 packs each, or 6 of some.

    LayerNorm of bfloat16 waits for its instructions and for weight and bias, of which each thread
    of a row loads its share. So it is as fast as a copy, or nearly, at any N: 2**27 elements take
    131 us at 11008 where they took 169 by 4 packs, with a float32 weight and bias 133 at 7680, not
    149 (H200). Where 4 packs fill a power of two of threads they are 6% slower at most, and few
    rows sooner: 512 rows of 16384 took 16.4 us, by 8 packs 17.7 in another order. With a float32
    weight and bias that ends at 4096: 2**27 elements take 132 us at 8192, by 4 packs 144. Beside
    768 to 960 threads a multiprocessor 8 packs may spill, and are faster still than beside fewer:
    134 us, not 139, at 10240. Of float16 more than 5 packs do.
    """
    usual = packs & (packs - 1) == 0 and (packs <= 512 or affine_bytes(spec) <= 4)
    fits = spec.norm == "layer_norm" and spec.x == "bfloat16" and not is_wide(spec)
    return fits and packs > 128 and not usual


@dataclass(frozen=True)
class _Row:
    """A row in registers, and the threads whose packs it is."""

    spec: ForwardSpec
    n: int
    vector: int
    architecture: int
    packs: int  # of 16 bytes
    row_threads: int
    packs_of_16_bytes: int  # of a thread
    own_pack_length: int  # the elements of 16 bytes, or of 8

    @property
    def own_packs_per_thread(self) -> int:
        return -(-self.n // (self.row_threads * self.own_pack_length))

    @property
    def is_full(self) -> bool:
        return self.n == self.row_threads * self.own_packs_per_thread * self.own_pack_length

    @property
    def of_halves(self) -> bool:
        return self.own_pack_length < pack_length(self.spec.x)

    @property
    def is_plain(self) -> bool:
        return not (self.spec.relu or self.spec.zero_centered)

    @property
    def has_fewest_threads(self) -> bool:
        return has_fewest_threads(self.spec, self.packs)

    @property
    def affine(self) -> int:
        """The registers that would hold a thread's weight and bias."""
        return affine_registers(self.spec, self.packs_of_16_bytes)

    @property
    def has_slim_affine(self) -> bool:
        return self.affine <= 16 and widest(self.spec.weight, self.spec.bias) <= 2

    @property
    def is_crowded(self) -> bool:
        """Whether short rows of LayerNorm gain more by more threads than by holding these.

        They take 68.9 us against 72.2 at 1048576x64, 132 against 141 at 128; 14.7 against 13.9 at
        32768x256 (bfloat16, H200).
        """
        return self.spec.norm == "layer_norm" and self.packs <= 16 and self.affine > 24


def forward_in_registers(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardInRegisters:
    """Return the configuration of rows in registers, of so many packs of 16 bytes."""
    row = _row(spec, n, packs, vector, architecture)
    # A row of several warps has a block to itself: sharing cost 13% at N = 2048 (bfloat16, H200).
    block_threads = max(row.row_threads, 64)
    hold_weight = _holds_affine(row)
    # At least two, as next to nothing spills: LayerNorm of float16 by 512 threads had 72 registers
    # and one block, and takes 14.7 us, not 16.3, at 512x16384, and by accesses of 8 bytes, with a
    # bfloat16 weight and bias, 352, not 474, for 16384 of 20004, by 384 threads, which spill 16
    # bytes, 362, not 449, for 14000 of 23196 (H200).
    least = 2 if moves_8_bytes(spec.x, vector) else 1
    blocks = max(least, _threads_at_once(row, hold_weight) // block_threads)
    blocks_ahead, blocks_ahead_if_large = _rows_ahead(row, blocks, hold_weight)
    return ForwardInRegisters(
        row_threads=row.row_threads,
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks,
        packs_per_thread=row.own_packs_per_thread,
        pack_length=row.own_pack_length,
        cluster_blocks=1,
        folded=False,
        vector=vector,
        rare_last=False,
        blocks_ahead=blocks_ahead,
        blocks_ahead_if_large=blocks_ahead_if_large,
        hold_weight=hold_weight,
        full=row.is_full,
    )


def _row(spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int) -> _Row:
    """Return the threads and packs of a row."""
    row_threads = team_threads(packs, _packs_per_thread(spec, n, packs))
    packs_per_thread = -(-packs // row_threads)
    own_length = _own_pack_length(spec, n, packs, row_threads, packs_per_thread)
    if own_length < pack_length(spec.x) and row_threads < 32 and packs_per_thread >= 4:
        row_threads *= 2
    if spec.relu:
        row_threads = max(row_threads, 8 // own_length)  # a byte of the bitmask is of neighbours
    packs_per_thread = -(-packs // row_threads)
    return _Row(spec, n, vector, architecture, packs, row_threads, packs_per_thread, own_length)


def _packs_per_thread(spec: ForwardSpec, n: int, packs: int) -> int:
    """Return how many packs of a row each thread of a ForwardInRegisters holds."""
    # 8 packs of float64 and float32 need 72 to 95 registers: 254 us against 268 in shared memory
    # for 16384 rows of 8192 float32, 158 against 199 of 5000, 501 against 543 for 32768 of 4096
    # float64 (H200).
    wider = spec.norm == "layer_norm" and ITEMSIZE[spec.x] >= 4 and packs > 1024
    if wider:
        return 8
    if has_fewest_threads(spec, packs):
        # With a bfloat16 weight and bias, by more threads besides, 97 us, not 114, for 6500 of
        # 10241, but 107 and 107 for 4800 of 14001; with float32 ones 8 packs are as fast, but for
        # those of 96 threads, whose warps the schedulers share unevenly: 93 us, not 101, for 11000
        # of 6001, 80, not 97, of 6002 (bfloat16, H200).
        fewer = n % 2 and packs <= 1536 and affine_bytes(spec) <= 4
        of_96_threads = n % 4 and 640 < packs <= 768
        return 6 if fewer or of_96_threads else 8
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
    elif packs > 512 and affine_bytes(spec) > 4:
        widths = 7, 6, 5, 4
    return min(widths, key=lambda width: slots_of(packs, team_threads(packs, width)))


def _own_pack_length(
    spec: ForwardSpec, n: int, packs: int, row_threads: int, packs_per_thread: int
) -> int:
    """Return the elements of a pack of a row in registers: 16 bytes, or mostly 8 if none is whole.

    Then neighbouring threads have neighbouring accesses; by halves of packs of 16 bytes each access
    of a warp would meet half of each sector: RMSNorm takes 23.0 us, not 29.7, for 65536 rows of 300
    with twice the threads, LayerNorm 26.0, not 30.8, and 142, not 175, for 13000 of 10004; but 414,
    not 366, for 14000 of 23196, of which 16 a thread leave too few registers for two blocks. By
    accesses of 4 bytes RMSNorm takes 74 us, not 117, for 260000 of 258, 72, not 79, for 16384 of
    4098, LayerNorm 81, not 105, and 79, not 108. Where rows are of odd length shifts cost as much
    as that saves: RMSNorm would take 83, not 80, for 16384 of 4097. But a float32 weight and bias
    are read by whole lines: LayerNorm takes 82 us, not 91, for 65536 of 777, 102, not 116, for 4097
    (with bfloat16 ones 100 and 100), and short rows have twice the threads: RMSNorm takes 71, not
    88, for 262144 of 129, LayerNorm 77, not 103 (bfloat16, float32 weight and bias, H200). The
    alignment does not matter, as the bits must not depend on it.
    """
    length = pack_length(spec.x)
    too_many = packs_per_thread == 8 and row_threads > 320
    if ITEMSIZE[spec.x] > 4 or n % length == 0 or too_many:
        return length
    wide_affine = spec.norm == "layer_norm" and spec.x == "bfloat16" and affine_bytes(spec) > 4
    return length // 2 if n % 2 == 0 or packs <= 64 or wide_affine else length


def _holds_affine(row: _Row) -> bool:
    """Return whether registers hold weight and bias, beside 40 to 60 for the rest.

    A row of more warps waits longer for the slowest than it gains: 3% at N = 8192 (bfloat16,
    float32 weight). A 16-bit weight costs half as many: 5.9 us against 6.4 at 1x8192, 4089 GB/s
    against 4088 at 32768x8192. Beside a ReLU or a weight around zero fewer threads would be left:
    66.7 us, not 73.9 and 71.1, at 13107x5120, 67.2 and 67.0, not 72.0 and 69.8, at 8192x8192. Not
    in LayerNorm's rows of several warps: 4144 GB/s against 3659 at N = 4096, 3920 against 3605 at
    2048 (bfloat16, H200); few rows have few_rows_configs.
    """
    spec = row.spec
    if is_wide(spec) or (spec.norm == "layer_norm" and row.row_threads > 32):
        return False
    # By accesses of 8 bytes RMSNorm with a 16-bit weight takes 81 us, not 96, for 262144 rows of
    # 300, with a float32 one 115, not 119, for 131072 of 900, but with a 16-bit one 140, not 134,
    # for 32768 of 4100, LayerNorm 133, not 121, for 131072 of 900, though in packs of 8 bytes 58.5,
    # not 65.7, for 262144 of 204; RMSNorm's held by 96 threads 71.6, not 68.1, for 32768 of 2052
    # (bfloat16, H200).
    by_8_bytes = moves_8_bytes(spec.x, row.vector) and row.is_plain and row.row_threads <= 64
    by_8_bytes = by_8_bytes and (spec.norm == "rms_norm" or row.of_halves)
    if row.vector < pack_length(spec.x) and not by_8_bytes:
        return False
    most_held = 24 if row.is_crowded else 16 if spec.x == "float64" else 32
    most_threads = 256 if row.has_slim_affine and row.is_plain else 128
    if spec.norm == "rms_norm" and spec.x == "float64" and row.packs_of_16_bytes > 4:
        most_held, most_threads = 32, 256  # 497 us, not 503, at 32768x4096 (H200)
    return row.row_threads <= most_threads and row.affine <= most_held


def _threads_at_once(row: _Row, hold_weight: bool) -> int:
    """Return the threads that a multiprocessor must hold at once, which bound their registers.

    What would spill has fewer: up to 122 registers where single 16-bit elements are moved.
    """
    spec, length, packs = row.spec, pack_length(row.spec.x), row.packs_of_16_bytes
    # From there on NVRTC needs 80 registers, not 88.
    slim = gpu_of(row.architecture).clusters and row.is_full and row.is_plain
    slim = slim and spec.norm == "rms_norm"
    if is_wide(spec):
        return 256
    if slim and hold_weight and row.has_slim_affine and packs == 4:
        return 1024  # 512 rows at once: 8.74 us against 9.73 at 512x8192 (bfloat16, H200)
    # On other GPUs, where nothing was measured, up to 44 bytes would be spilled.
    measured = gpu_of(row.architecture).timed and not is_y_wider(spec)
    measured = measured and ITEMSIZE[spec.x] == 2 and row.vector == length and packs == 4
    if measured and spec.norm == "rms_norm" and hold_weight and not slim:
        # 66.6 us, not 69.8, for 24892 rows of 2696, by 1024 67.6; of more threads a row, of which
        # registers happened to allow 768 or more, 66.6 by 1024, not 69.5, for 11915 of 5632; with a
        # float32 weight 70.8, not 75.1, for 24892 of 2696, by 896 82.5, but 67.6, not 67.0, for
        # 16878 of 3976 around zero, whose registers allow as many as it is (bfloat16, H200).
        if not row.has_slim_affine:
            return 768 if row.row_threads == 96 else 640
        return 1024 if row.row_threads > 128 else 896
    if measured and spec.norm == "layer_norm" and spec.x == "float16" and row.row_threads > 128:
        # 253.3 us, not 256.3, for 32768 rows of 8192, 160, not 170, for 16384 of 10240; rows of
        # fewer threads, which have 800 and more at once as it is, gain nothing (H200).
        return 1024
    if length == 8 and row.vector < row.own_pack_length:
        if packs <= 4:
            return 768
        usual = row.is_plain and not is_y_wider(spec)
        if row.has_fewest_threads and usual and row.n % length and gpu_of(row.architecture).timed:
            # 91 us, not 108, for 5600 of 12001, 85, not 90, for 11000 of 6001, 105, not 110, for
            # 32768 of 2049, with a float32 weight and bias 101, not 107, where 640 and 672 had been
            # at once, and of 7 packs 102 by 640, not 129 by 512, for 6500 of 10241 (bfloat16,
            # H200). On other GPUs nothing was measured.
            return 768 if packs <= 6 and row.row_threads > 32 else 640
        return 512 if spec.norm == "layer_norm" or not row.is_plain else 640
    if packs > 4 and row.has_fewest_threads:
        # Of packs of 8 bytes 11 or 12 a thread: 136 us against 148 by 640 at 4100, 101 against 104
        # at 3004. More, or beside a ReLU, leave too few registers: 163 against 145 at 8196, 153
        # against 127 at 6004. Of 9 or 10 by 512 73 against 75 at 2052 (bfloat16, H200).
        if row.of_halves and (packs != 6 or not row.is_plain):
            return 640 if packs > 5 else 512
        # 132 us against 137 by 640 at 7168, 134 against 139 at 10240; by 960 68.7 against 72.9 at
        # 18432, 67.9 against 68.4 at 14336, but 69.4 against 68.2 at 10240, where 32 bytes would be
        # spilled; at 20480, where 28 would, 69.9 and 71.3, and 70.3 in another run. On other GPUs
        # nothing was measured.
        return 960 if 192 < row.row_threads < 320 and gpu_of(row.architecture).timed else 800
    if packs > 6 and (spec.norm == "rms_norm" or spec.x == "float16"):
        return 512
    if packs > 4 or (hold_weight and not slim):
        return 640
    if row.is_crowded and row.is_full and row.is_plain:
        return 1024
    return 768


def _rows_ahead(row: _Row, blocks: int, hold_weight: bool) -> tuple[int, int]:
    """Return how many blocks ahead rows are fetched, and of a large x.

    There rows ahead mostly cost more than they save: RMSNorm takes 37.5 us, not 35.8, at
    32768x1024, LayerNorm 103.4, not 99.9, for 16384 of 6144, which have the fewest threads. But
    other rows of LayerNorm gain: of up to a warp 36.5, not 37.7, at 32768x1024, 36.7, not 38.0,
    with a bfloat16 weight and bias, 36.1, not 37.6, at 131072x256, though 67.6, not 67.1, at
    1048576x64; longer ones half as far 68.7, not 69.4, at 32768x2048, 252.6, not 255.1, at 8192,
    501, not 532, at 16384, of float16 255.4, not 270.2, at 8192, 117.6, not 131.8, for 16384 of
    7168. And RMSNorm's of 256 threads of 4 packs, the weight not held: 251.3, not 252.7, at
    32768x8192. Those of more than 384 threads half as far whatever the size: 22.9, not 23.5, for
    1000 of LayerNorm's 16384 (bfloat16, H200).
    """
    spec = row.spec
    ahead = blocks_ahead_of(blocks, row.packs_of_16_bytes, row.architecture)
    if spec.norm == "rms_norm":
        of_most_threads = (row.row_threads, row.packs_of_16_bytes) == (256, 4)
        gains = ITEMSIZE[spec.x] == 2 and of_most_threads and not hold_weight
        return ahead, ahead // 2 if gains else 0
    if row.row_threads <= 32:
        return ahead, ahead
    if row.has_fewest_threads:
        return ahead, 0
    return (ahead // 2 if row.row_threads > 384 else ahead), ahead // 2


def blocks_ahead_of(
    blocks_per_multiprocessor: int, packs_per_thread: int, architecture: int
) -> int:
    """Return how many blocks ahead rows are fetched: those that all multiprocessors have at once.

    That is 2.5 to 8 MiB; of more than 4 packs a thread, as many packs as of 4. LayerNorm takes
    14.2 us, not 15.4, at 8192x1024, 13.4, not 13.9, at 32768x256, 15.4, not 16.1, at 4096x2048,
    RMSNorm 12.6, not 12.9, at 32768x256 (bfloat16, float32 weight and bias); with bfloat16 ones
    LayerNorm 19.7, not 20.7, at 4096x3584, and 20.7 by twice as far. The number of multiprocessors
    is not asked for, which costs 0.1 us at 4096x128 (RMSNorm of float16, H200).
    """
    if not gpu_of(architecture).large_l2:
        return 0
    return MULTIPROCESSORS * blocks_per_multiprocessor * 4 // max(4, packs_per_thread)


# ---- few rows, with the bits of many -------------------------------------------------------------


def in_registers_with_residual(spec: ForwardSpec, config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration with registers for x and the residual, side by side as they come."""
    elements = config.packs_per_thread * config.pack_length
    needed = 40 + elements * (widest(spec.branch) + widest(spec.residual)) // 4
    if config.hold_weight:
        needed += elements * affine_bytes(spec) // 4
    # A quarter of a multiprocessor has whole warps.
    threads = REGISTERS_PER_MULTIPROCESSOR // min(255, needed) // 128 * 128
    blocks = max(1, min(config.blocks_per_multiprocessor, threads // config.block_threads))
    return replace(config, blocks_per_multiprocessor=blocks)


def few_rows_configs(
    spec: ForwardSpec, config: ForwardInRegisters, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ForwardInRegisters], ...]:
    """Return the configurations of few rows, each behind the most rows that it is for, ascending.

    They have the bits of `config`. Where all run at once, rows of a warp or several hold weight and
    bias, for registers are to spare: LayerNorm with both in bfloat16 takes 5.57 us, not 6.72, for
    one row of 4096, 7.97, not 8.70, for 512, but 11.8, not 10.4, for 512 of 8192, more than run at
    once; with both in float32 6.14, not 7.26, for 512 of 1024. What is rare comes last in their
    code: over some 20 shapes of decoding RMSNorm is 2.6% faster, LayerNorm 1%. Of the longest rows
    more than `config` runs at once do so by 64 registers a thread: 512 of RMSNorm's 16384 take
    13.1 us, not 14.6, 512 of 12288 11.3, not 13.3, of LayerNorm's 16384 13.6, not 15.1 (bfloat16),
    528 of 14336 12.9, not 13.9 (float16), 512 of 8192 13.2, not 15.2, 600 of 6144 12.2, not 14.1
    (float32, H200).
    """
    # By accesses of 8 bytes RMSNorm takes 5.1 us, not 5.7, for 64 rows of 4100, 4.8, not 5.4, of
    # 1500, but LayerNorm 5.7, not 5.5, and 9.1, not 8.2, for 512 of 4100, though in packs of 8
    # bytes 5.2, not 6.2, 7.8, not 8.4, and 4.9, not 5.6, for 64 of 1500 (bfloat16, H200).
    halves = config.pack_length < pack_length(spec.x)
    least = 8 if spec.norm == "rms_norm" or halves else 16
    if config.vector * ITEMSIZE[spec.x] < least or is_wide(spec):
        return ()
    if config.row_threads < 32:
        return _short_rows_configs(spec, config, n, architecture, multiprocessors)
    configs = []
    packs = _packs_of_16_bytes(spec, config)
    affine = affine_registers(spec, packs)
    most_held, threads = 64, 512
    # Beside the row's own; more would spill, or does by more threads.
    if ITEMSIZE[spec.x] == 2:
        needed = affine + 4 * packs + 4 * spec.zero_centered
        needed += 3 * packs * spec.relu
        threads = 384 if needed > 80 else 512
        if packs == 8 and spec.relu:
            most_held = 32
    elif packs == 8:
        most_held = (64 if spec.x == "float32" else 32) if config.full else 0
    elif spec.x == "float64" and packs > 4 and not config.full:
        most_held = 0
    if 0 < affine <= most_held:
        blocks = max(1, threads // config.block_threads)
        held = replace(
            _none_ahead(config),
            rare_last=True,
            hold_weight=True,
            blocks_per_multiprocessor=blocks,
        )
        if gpu_of(architecture).clusters:
            configs += [_split(held, split) for split in _split_blocks(spec, config)]
        configs.append(held)
    by_64_registers = _by_64_registers(spec, config, packs, architecture)
    if by_64_registers is not None:
        if not configs or configs[-1].blocks_per_multiprocessor < config.blocks_per_multiprocessor:
            configs.append(config)
        configs.append(by_64_registers)
    if spec.residual is not None:
        configs = [in_registers_with_residual(spec, few) for few in configs]
    return tuple((_most_at_once(few, multiprocessors), few) for few in configs)


def _by_64_registers(
    spec: ForwardSpec, config: ForwardInRegisters, packs: int, architecture: int
) -> ForwardInRegisters | None:
    """Return the configuration of more rows at once, by 64 registers a thread, or None.

    Of RMSNorm's 8 packs a thread of 16 bits, where a bias would be spilled; where it was measured,
    of LayerNorm's 8 of float32 and of its 4 of 16 bits where a row has 12, 14 or 16 warps, whose
    threads are two each then. Of rows of 224 threads of float32 registers happen to allow as many
    as it is: 528 of 7168 take 12.3 us, so 12.6; rows of 10 warps take 10.3, not 9.9, for 400 of
    10240, 13.5, not 13.9, for 792 (float16, H200).
    """
    two_bytes = ITEMSIZE[spec.x] == 2
    folded = False
    if spec.norm == "rms_norm":
        gains = two_bytes and packs == 8 and spec.bias is None
        gains = gains and gpu_of(architecture).clusters
    else:
        folded = two_bytes and packs == 4 and config.row_threads in (384, 448, 512)
        of_float32 = spec.x == "float32" and packs == 8 and config.row_threads != 224
        gains = gpu_of(architecture).timed and (folded or of_float32)
    whole = config.full and config.vector == pack_length(spec.x)
    plain = not (spec.relu or spec.zero_centered) and ITEMSIZE[spec.y] == ITEMSIZE[spec.x]
    if not (gains and whole and plain):
        return None
    times = 2 if folded else 1
    threads = config.row_threads // times
    return replace(
        _none_ahead(config),
        hold_weight=False,
        folded=folded,
        row_threads=threads,
        block_threads=threads,
        packs_per_thread=times * config.packs_per_thread,
        blocks_per_multiprocessor=1024 // threads,
    )


def _packs_of_16_bytes(spec: ForwardSpec, config: ForwardInRegisters) -> int:
    """Return how many such packs a thread's would be."""
    return -(-config.packs_per_thread * config.pack_length // pack_length(spec.x))


def _none_ahead(config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration of rows that all run at once, of which none is fetched ahead."""
    return replace(config, blocks_ahead=0, blocks_ahead_if_large=0)


def _most_at_once(few: ForwardInRegisters, multiprocessors: int) -> int:
    """Return how many rows run at once, those of clusters with a multiprocessor for each block.

    64 rows of 8192 in clusters take 5.79 us, as one block each 5.62 (bfloat16, H200).
    """
    if few.cluster_blocks > 1:
        return multiprocessors // few.cluster_blocks
    return few.rows_per_block * few.blocks_per_multiprocessor * multiprocessors


def _short_rows_configs(
    spec: ForwardSpec, config: ForwardInRegisters, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ForwardInRegisters], ...]:
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
    packs = _packs_of_16_bytes(spec, config)
    if packs > 4:  # beside which a second copy of what is rare spills
        return ()
    more: tuple[tuple[int, ForwardInRegisters], ...] = ()
    if packs == 4 and config.pack_length == pack_length(spec.x):
        blocks = 768 // config.block_threads
        blocks_ahead = blocks_ahead_of(blocks, 2, architecture)
        few = replace(
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
    at_once = replace(at_once, rare_last=True)
    return (_most_at_once(at_once, multiprocessors), at_once), *more


def _split_blocks(spec: ForwardSpec, config: ForwardInRegisters) -> tuple[int, ...]:
    """Return the blocks, of two warps or more, of clusters that have few rows: the most first.

    A block waits for its instructions and loads, of which each of a cluster has its share:
    LayerNorm takes 5.3 us, not 6.2, for 8 rows of 16384, 5.2, not 5.4, for 8 of 8192, RMSNorm 5.3,
    not 5.6, for 8 of 16384. Clusters of 2 and of 8 gain less, but of 2 more rows are at once:
    LayerNorm takes 6.6 us, not 6.9, for 64 of 16384; but 6.7, not 6.65, for 64 of 12288, 5.7 with
    and without for 64 of 8192, RMSNorm 6.2, not 6.1, for 64 of 16384. In shorter rows they wait for
    each other as long: 4.94 us, not 4.91, for 8 of 4096 (bfloat16, H200). Sums of float64 keep the
    sign of one of two NaNs, and which the compiler decides for each kernel: those would differ. A
    ReLU beside 8 packs would spill, and so would 16 of 8 bytes.
    """
    packs = _packs_of_16_bytes(spec, config)
    if spec.x == "float64" or (packs == 8 and (spec.relu or config.packs_per_thread > 8)):
        return ()
    if config.row_threads < 256 or config.row_threads % 128:
        return ()
    slots = config.row_threads * packs  # those past the end too
    if slots >= 2048:
        return (4, 2) if spec.norm == "layer_norm" else (4,)
    return (4,) if spec.norm == "layer_norm" else ()


def _split(config: ForwardInRegisters, blocks: int) -> ForwardInRegisters:
    """Return the configuration of a row whose warps are those of a cluster of blocks."""
    threads = config.row_threads // blocks
    return replace(
        config,
        row_threads=threads,
        block_threads=threads,
        blocks_per_multiprocessor=config.blocks_per_multiprocessor * blocks,
        cluster_blocks=blocks,
    )
