"""How a forward pass lays rows that registers hold over threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cupynorm._layout.architectures import (
    REGISTERS_PER_MULTIPROCESSOR,
    affine_registers,
    gpu_of,
    has_heavy_affine,
    is_wide,
    is_y_wider,
    moves_8_bytes,
    pack_length,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._layout.tuning_sm90 import AnyPass as Common
from cupynorm._layout.tuning_sm90 import FewRowsForward as FewRows
from cupynorm._layout.tuning_sm90 import ForwardInRegisters as Tuned
from cupynorm._operation import ITEMSIZE, ForwardSpec, QuantizedSpec


@dataclass(frozen=True)
class ForwardInRegisters:
    """Rows held in registers, read once, each by `row_threads` threads of `cluster_blocks` blocks.

    Several blocks give the bits of one block with all these threads. `folded` ones give those of
    twice as many threads with half the packs, for few rows. `pack_length`: the elements of 16
    bytes, or of 8 (_own_pack_length). `rare_last`: rare cases come last in the code, for few rows.
    `hold_weight`: weight and bias are loaded with the row, not after its statistics. `full`: the
    row fills its threads' packs exactly. `blocks_ahead`: a block has the L2 fetch the rows of the
    block so many later, or none if 0. `blocks_ahead_if_large`: the same for an x of 32 MiB or more.
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
    if config.folded:  # each of its warps has two sums
        threads = 2 * config.row_threads, 2 * config.block_threads
    size = team_bytes(spec.x, *threads, config.cluster_blocks, split=True)
    unaligned = config.vector == 1 and ITEMSIZE[spec.x] <= 4 and config.packs_per_thread > 2
    if unaligned and ITEMSIZE[spec.y] <= 4:
        size += config.block_threads * config.pack_length * ITEMSIZE[spec.y]
    return size


def has_fewest_threads(spec: ForwardSpec, packs: int) -> bool:
    """Return whether a row has the fewest threads that hold it, with 8 packs each, or 6.

    LayerNorm of bfloat16 waits for weight and bias, and each thread of a row loads a share of them
    (notes.md#the-fewest-threads). float16 would spill with more than 5 packs.
    """
    if spec.norm == "rms_norm" or spec.x != "bfloat16" or is_wide(spec):
        return False
    if packs <= Tuned.fewest_threads_beyond_packs:
        return False
    power_of_two = packs & (packs - 1) == 0
    short = packs <= Tuned.max_packs_of_a_power_of_two
    return not (power_of_two and (short or not has_heavy_affine(spec)))


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
        """The registers that a thread's weight and bias would take."""
        return affine_registers(self.spec, self.packs_of_16_bytes)

    @property
    def has_slim_affine(self) -> bool:
        return self.affine <= 16 and widest(self.spec.weight, self.spec.bias) <= 2

    @property
    def is_crowded(self) -> bool:
        """Whether short rows of LayerNorm gain more from more threads than from holding these."""
        many = self.affine > Tuned.held_max_registers_of_short_rows
        return self.spec.norm == "layer_norm" and self.packs <= 16 and many

    @property
    def moves_packs(self) -> bool:
        return self.vector == pack_length(self.spec.x)

    @property
    def is_slim(self) -> bool:
        """Whether NVRTC needs 80 registers, not 88: from sm_90 on, for RMSNorm's full rows."""
        full = self.is_full and self.is_plain and self.spec.norm == "rms_norm"
        return full and gpu_of(self.architecture).clusters

    @property
    def is_timed(self) -> bool:
        """Whether more threads were measured. Elsewhere up to 140 bytes would spill."""
        return gpu_of(self.architecture).timed


def forward_in_registers(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardInRegisters:
    """Return the configuration of rows in registers, of so many packs of 16 bytes."""
    row = _row(spec, n, packs, vector, architecture)
    # A row of several warps has a block to itself: sharing costs 13 % at N = 2048.
    block_threads = max(row.row_threads, 64)
    hold_weight = _holds_affine(row)
    # At least two blocks, as almost nothing spills (notes.md#threads-at-once).
    least = 2 if moves_8_bytes(spec.x, vector) else 1
    blocks = max(least, _threads_at_once(row, hold_weight) // block_threads)
    blocks_ahead, blocks_ahead_if_large = _rows_ahead(row, blocks)
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
        row_threads = max(row_threads, 8 // own_length)  # neighbours share a byte of the bitmask
    packs_per_thread = -(-packs // row_threads)
    return _Row(spec, n, vector, architecture, packs, row_threads, packs_per_thread, own_length)


def _packs_per_thread(spec: ForwardSpec, n: int, packs: int) -> int:
    """Return how many packs of a row each thread of a ForwardInRegisters holds."""
    wider = spec.norm == "layer_norm" and ITEMSIZE[spec.x] >= 4
    if wider and packs > Tuned.eight_packs_beyond:
        return 8
    if has_fewest_threads(spec, packs):
        return _packs_of_fewest_threads(spec, n, packs)
    if packs < Common.min_packs_filled:
        return 2
    # For the others, those that the row fills best.
    widths = _widths(spec, packs)
    return min(widths, key=lambda width: slots_of(packs, team_threads(packs, width)))


def _packs_of_fewest_threads(spec: ForwardSpec, n: int, packs: int) -> int:
    """Return 8, or 6 if more threads are faster: notes.md#the-fewest-threads."""
    if n % 2 and packs <= Tuned.six_packs_odd_max and not has_heavy_affine(spec):
        return 6
    beyond, up_to = Tuned.six_packs_between  # 96 threads, whose warps are shared unevenly
    if n % 4 and beyond < packs <= up_to:
        return 6
    return 8


def _widths(spec: ForwardSpec, packs: int) -> tuple[int, ...]:
    """Return the packs of a thread to choose from: notes.md#packs-of-a-thread."""
    if packs <= Tuned.short_max_packs:
        return Tuned.short_widths
    if packs > 1024:
        return Tuned.long_widths if spec.norm == "rms_norm" else Tuned.long_widths_of_layer_norm
    return Tuned.widths


def _own_pack_length(
    spec: ForwardSpec, n: int, packs: int, row_threads: int, packs_per_thread: int
) -> int:
    """Return the elements of a pack of a row in registers: 16 bytes, or mostly 8 if none is whole.

    With 8, neighbouring threads have neighbouring accesses. With halves of 16 bytes each access of
    a warp would touch half of each sector (notes.md#packs-of-8-bytes). The alignment does not
    matter, as the bits must not depend on it.
    """
    length = pack_length(spec.x)
    if ITEMSIZE[spec.x] > 4 or n % length == 0:
        return length
    if packs_per_thread == 8 and row_threads > Tuned.halves_max_threads:
        return length
    if n % 2 == 0 or packs <= Tuned.halves_odd_max_packs:
        return length // 2
    # At odd lengths shifts cost as much as that saves, but a wide weight is read by whole lines.
    of_layer_norm = spec.norm == "layer_norm" and spec.x == "bfloat16"
    return length // 2 if of_layer_norm and has_heavy_affine(spec) else length


def _holds_affine(row: _Row) -> bool:
    """Return whether registers hold weight and bias: notes.md#weight-and-bias-in-registers.

    With more warps a row waits longer for the slowest than it gains.
    """
    spec = row.spec
    within_warps = spec.norm == "layer_norm" or spec.bias is not None
    if is_wide(spec) or (within_warps and row.row_threads > 32):
        return False
    if not row.moves_packs and not _holds_by_8_bytes(row):
        return False
    max_registers, max_threads = _most_held(row)
    return row.row_threads <= max_threads and row.affine <= max_registers


def _holds_by_8_bytes(row: _Row) -> bool:
    if not (moves_8_bytes(row.spec.x, row.vector) and row.is_plain):
        return False
    if row.row_threads > Tuned.held_max_threads_by_8_bytes:
        return False
    return row.spec.norm == "rms_norm" or row.of_halves


def _most_held(row: _Row) -> tuple[int, int]:
    """Return the most registers of weight and bias, next to 40 to 60 others, and threads."""
    # A 16-bit weight takes half as many. A ReLU or a weight around zero leaves no room for more.
    slim = row.has_slim_affine and row.is_plain
    threads = Tuned.held_max_threads_if_slim if slim else Tuned.held_max_threads
    if row.is_crowded:
        return Tuned.held_max_registers_of_short_rows, threads
    return Tuned.held_max_registers, threads


def _threads_at_once(row: _Row, hold_weight: bool) -> int:
    """Return the threads that a multiprocessor must hold at once, which limit their registers.

    There are fewer if registers would spill: up to 122 are needed to move single 16-bit elements.
    All figures are in notes.md#threads-at-once.
    """
    spec, packs = row.spec, row.packs_of_16_bytes
    if is_wide(spec):
        return Tuned.threads_wide
    if row.is_slim and hold_weight and row.has_slim_affine and packs == 4:
        return Tuned.threads_holding_slim_full_rows
    if _four_packs_were_timed(row):
        if spec.norm == "rms_norm" and hold_weight and not row.is_slim:
            return _threads_holding_four_packs(row)
        if spec.norm == "layer_norm" and spec.x == "float16" and row.row_threads > 128:
            return Tuned.threads_of_float16
    if ITEMSIZE[spec.x] == 2 and row.vector < row.own_pack_length:
        return _threads_in_parts(row)
    if packs > 4 and row.has_fewest_threads:
        return _threads_by_fewest(row)
    if packs > 4 or (hold_weight and not row.is_slim):
        return Tuned.threads_holding
    return Tuned.threads


def _four_packs_were_timed(row: _Row) -> bool:
    """Return whether more threads of 4 packs of 16 bits were measured."""
    spec = row.spec
    whole = ITEMSIZE[spec.x] == 2 and row.moves_packs and row.packs_of_16_bytes == 4
    return whole and row.is_timed and not is_y_wider(spec)


def _threads_holding_four_packs(row: _Row) -> int:
    """Return `_threads_at_once` for RMSNorm's rows that hold the weight and 4 packs."""
    if row.has_slim_affine:
        if row.row_threads > 128:
            return Tuned.threads_holding_slim_by_many
        return Tuned.threads_holding_slim
    return Tuned.threads_holding_by_96 if row.row_threads == 96 else Tuned.threads_holding


def _threads_in_parts(row: _Row) -> int:
    """Return `_threads_at_once` for 16-bit rows that are moved by less than their packs."""
    spec, packs = row.spec, row.packs_of_16_bytes
    if packs <= 4:
        return Tuned.threads_in_parts
    usual = row.is_plain and not is_y_wider(spec)
    odd = row.n % pack_length(spec.x) > 0
    if row.has_fewest_threads and usual and odd and row.is_timed:
        if packs <= 6 and row.row_threads > 32:
            return Tuned.threads_in_parts_by_fewest
        return Tuned.threads_in_parts_by_fewest_of_more
    return Tuned.threads_in_parts_of_more


def _threads_by_fewest(row: _Row) -> int:
    """Return `_threads_at_once` for rows with the fewest threads."""
    packs = row.packs_of_16_bytes
    if row.of_halves and packs == 5:
        return Tuned.threads_of_ten_halves
    if row.of_halves and (packs != 6 or not row.is_plain):  # 11 or 12 leave registers next to them
        return Tuned.threads_of_halves
    if 192 < row.row_threads < 320 and row.is_timed:
        return Tuned.threads_by_fewest_of_224_to_288
    return Tuned.threads_by_fewest


def _rows_ahead(row: _Row, blocks: int) -> tuple[int, int]:
    """Return how many blocks ahead rows are fetched, and the same for a large x.

    For a large x this mostly costs more than it saves. LayerNorm gains without the fewest threads
    (notes.md#rows-fetched-ahead).
    """
    ahead = blocks_ahead_of(blocks, row.packs_of_16_bytes, row.architecture)
    if row.spec.norm == "rms_norm":
        return ahead, 0
    if row.row_threads <= 32:
        return ahead, ahead
    if row.has_fewest_threads:
        return ahead, 0
    if row.row_threads > Tuned.half_as_far_beyond_threads:
        return ahead // 2, ahead // 2
    return ahead, ahead // 2


def blocks_ahead_of(
    blocks_per_multiprocessor: int, packs_per_thread: int, architecture: int
) -> int:
    """Return how many blocks ahead rows are fetched: those that all multiprocessors have at once.

    That is 2.5 to 8 MiB. With more than 4 packs a thread, it is as many packs as with 4. A look-up
    of the number of multiprocessors would cost each call time.
    """
    if not gpu_of(architecture).large_l2:
        return 0
    blocks = Tuned.blocks_ahead_multiprocessors * blocks_per_multiprocessor
    return blocks * 4 // max(4, packs_per_thread)


# ---- few rows, with the bits of many -------------------------------------------------------------


def in_registers_with_residual(spec: ForwardSpec, config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration with registers for x and the residual, which are loaded together."""
    elements = config.packs_per_thread * config.pack_length
    # An estimate, fitted to NVRTC's counts.
    needed = 40 + elements * (widest(spec.branch) + widest(spec.residual)) // 4
    if config.hold_weight:
        needed += affine_registers(spec, elements // pack_length(spec.x))
    # A quarter of a multiprocessor has whole warps.
    threads = REGISTERS_PER_MULTIPROCESSOR // min(255, needed) // 128 * 128
    blocks = max(1, min(config.blocks_per_multiprocessor, threads // config.block_threads))
    return replace(config, blocks_per_multiprocessor=blocks)


def in_registers_quantized(
    spec: QuantizedSpec, config: ForwardInRegisters, architecture: int
) -> ForwardInRegisters:
    """Return the configuration of many quantized rows: that of y, or a faster one.

    The memory moves three quarters as many bytes, so that the longest rows need more blocks at
    once (notes.md#quantized-rows).
    """
    whole = config.full and config.pack_length == 8 and not spec.zero_centered
    if not (whole and gpu_of(architecture).timed):
        return config
    if spec.norm == "layer_norm":
        return _folded_quantized(spec, config)
    if config.packs_per_thread < 8 or widest(spec.y) > 2 or affine_registers(spec, 8) > 32:
        return config
    if spec.residual is None:
        return replace(config, blocks_per_multiprocessor=768 // config.block_threads)
    return replace(config, hold_weight=config.row_threads == 256)


def _folded_quantized(spec: QuantizedSpec, config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration by half of the threads, where instructions limit LayerNorm.

    A row's sums take as many instructions in each of its warps (notes.md#quantized-rows).
    """
    threads = config.row_threads // 2
    if spec.residual is not None or config.packs_per_thread != 4 or threads < 64:
        return config
    by_row = not spec.scale_given and spec.scale_columns == 0
    at_once = 1024 if by_row and threads > 64 else 768
    return replace(
        config,
        folded=True,
        row_threads=threads,
        block_threads=threads,
        packs_per_thread=8,
        blocks_per_multiprocessor=at_once // threads,
    )


def _unfolded(config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration of the same bits by twice as many threads."""
    if not config.folded:
        return config
    return replace(
        config,
        folded=False,
        row_threads=2 * config.row_threads,
        block_threads=2 * config.block_threads,
        packs_per_thread=config.packs_per_thread // 2,
        blocks_per_multiprocessor=-(-config.blocks_per_multiprocessor // 2),
    )


def few_rows_configs(
    spec: ForwardSpec, config: object, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ForwardInRegisters], ...]:
    """Return the configurations of few rows, each after the most rows that it serves, ascending.

    They have the bits of `config`. Only rows in registers have any. Rows that all run at once hold
    weight and bias, since registers are to spare. Rare cases come last in their code
    (notes.md#few-rows-hold-weight-and-bias).
    """
    if not isinstance(config, ForwardInRegisters):
        return ()
    if isinstance(spec, QuantizedSpec):
        return few_rows_configs(spec.of_y, _unfolded(config), n, architecture, multiprocessors)
    halves = config.pack_length < pack_length(spec.x)
    least = 8 if spec.norm == "rms_norm" or halves else 16
    if config.vector * ITEMSIZE[spec.x] < least or is_wide(spec):
        return ()
    if config.row_threads < 32:
        return _short_rows_configs(spec, config, n, architecture, multiprocessors)
    configs = _holding_configs(spec, config, architecture)
    by_64_registers = _by_64_registers(spec, config, architecture)
    if by_64_registers is not None:
        if not configs or configs[-1].blocks_per_multiprocessor < config.blocks_per_multiprocessor:
            configs.append(config)
        configs.append(by_64_registers)
    if spec.residual is not None:
        configs = [in_registers_with_residual(spec, few) for few in configs]
    return tuple((_max_at_once(few, multiprocessors), few) for few in configs)


def _holding_configs(
    spec: ForwardSpec, config: ForwardInRegisters, architecture: int
) -> list[ForwardInRegisters]:
    """Return the configurations that hold weight and bias, those in clusters first."""
    affine = affine_registers(spec, _packs_of_16_bytes(spec, config))
    if not 0 < affine <= _max_held(spec, config):
        return []
    held = replace(
        _none_ahead(config),
        rare_last=True,
        hold_weight=True,
        blocks_per_multiprocessor=max(1, _threads_of_few(spec, config) // config.block_threads),
    )
    if not gpu_of(architecture).clusters:
        return [held]
    return [*(_split(held, blocks) for blocks in _split_blocks(spec, config)), held]


def _max_held(spec: ForwardSpec, config: ForwardInRegisters) -> int:
    """Return the most registers of weight and bias, next to the row's own, that do not spill."""
    packs, held = _packs_of_16_bytes(spec, config), FewRows.held_max_registers
    if ITEMSIZE[spec.x] == 2:
        return held // 2 if packs == 8 and spec.relu else held
    if packs == 8 and config.full:
        return held if spec.x == "float32" else held // 2
    if packs == 8 or (spec.x == "float64" and packs > 4 and not config.full):
        return 0
    return held


def _threads_of_few(spec: ForwardSpec, config: ForwardInRegisters) -> int:
    """Return the threads that a multiprocessor holds at once, if rows hold weight and bias."""
    packs = _packs_of_16_bytes(spec, config)
    needed = affine_registers(spec, packs) + 4 * packs + 4 * spec.zero_centered
    needed += 3 * packs * spec.relu
    if ITEMSIZE[spec.x] == 2 and needed > 80:  # more threads would spill
        return FewRows.threads_if_crowded
    return FewRows.threads


def _by_64_registers(
    spec: ForwardSpec, config: ForwardInRegisters, architecture: int
) -> ForwardInRegisters | None:
    """Return the configuration of more rows at once, by 64 registers a thread, or None.

    Some of these rows are folded: each thread is two (notes.md#few-rows-by-64-registers).
    """
    packs = _packs_of_16_bytes(spec, config)
    whole = config.full and config.vector == pack_length(spec.x)
    plain = not (spec.relu or spec.zero_centered) and ITEMSIZE[spec.y] == ITEMSIZE[spec.x]
    if not (whole and plain and _gains_by_64_registers(spec, config, packs, architecture)):
        return None
    folded = spec.norm == "layer_norm" and packs == 4
    times = 2 if folded else 1
    threads = config.row_threads // times
    return replace(
        _none_ahead(config),
        hold_weight=False,
        folded=folded,
        row_threads=threads,
        block_threads=threads,
        packs_per_thread=times * config.packs_per_thread,
        blocks_per_multiprocessor=FewRows.threads_at_once // threads,
    )


def _gains_by_64_registers(
    spec: ForwardSpec, config: ForwardInRegisters, packs: int, architecture: int
) -> bool:
    two_bytes = ITEMSIZE[spec.x] == 2
    if spec.norm == "rms_norm":  # a bias would spill
        return two_bytes and packs == 8 and spec.bias is None and gpu_of(architecture).clusters
    if not gpu_of(architecture).timed:
        return False
    if two_bytes:
        return packs == 4 and config.row_threads in FewRows.folded_threads
    return spec.x == "float32" and packs == 8


def _packs_of_16_bytes(spec: ForwardSpec, config: ForwardInRegisters) -> int:
    """Return how many packs of 16 bytes a thread would have."""
    return -(-config.packs_per_thread * config.pack_length // pack_length(spec.x))


def _none_ahead(config: ForwardInRegisters) -> ForwardInRegisters:
    """Return the configuration of rows that all run at once, so that none is fetched ahead."""
    return replace(config, blocks_ahead=0, blocks_ahead_if_large=0)


def _max_at_once(few: ForwardInRegisters, multiprocessors: int) -> int:
    """Return how many rows run at once. In clusters, each block has a multiprocessor."""
    if few.cluster_blocks > 1:
        return multiprocessors // few.cluster_blocks
    return few.rows_per_block * few.blocks_per_multiprocessor * multiprocessors


def _short_rows_configs(
    spec: ForwardSpec, config: ForwardInRegisters, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ForwardInRegisters], ...]:
    """Return what `few_rows_configs` returns, for rows of less than a warp.

    None is fetched ahead if all run at once. For LayerNorm rare cases come last
    (notes.md#few-rows-of-less-than-a-warp).
    """
    at_once = _none_ahead(config)
    if spec.norm == "rms_norm":
        return ((_max_at_once(at_once, multiprocessors), at_once),) if config.blocks_ahead else ()
    packs = _packs_of_16_bytes(spec, config)
    if packs > 4:  # then a second copy of the rare cases spills
        return ()
    if packs < 4 or config.pack_length < pack_length(spec.x):
        at_once = replace(at_once, rare_last=True)
        return ((_max_at_once(at_once, multiprocessors), at_once),)
    few = _by_twice_the_threads(spec, config, architecture)
    at_once = replace(_none_ahead(few), rare_last=True)
    most = FewRows.max_short_elements // n
    return (_max_at_once(at_once, multiprocessors), at_once), (most, few)


def _by_twice_the_threads(
    spec: ForwardSpec, config: ForwardInRegisters, architecture: int
) -> ForwardInRegisters:
    """Return that of LayerNorm's rows of 4 packs. Registers then hold weight and bias."""
    blocks = 768 // config.block_threads
    blocks_ahead = blocks_ahead_of(blocks, 2, architecture)
    return replace(
        config,
        row_threads=2 * config.row_threads,
        blocks_per_multiprocessor=blocks,
        packs_per_thread=2,
        blocks_ahead=blocks_ahead,
        blocks_ahead_if_large=blocks_ahead,  # never large: two equal values leave no branch
        hold_weight=bool(spec.weight or spec.bias),
    )


def _split_blocks(spec: ForwardSpec, config: ForwardInRegisters) -> tuple[int, ...]:
    """Return the blocks, of two warps or more, of the clusters for few rows: the most first.

    A block waits for its instructions and loads. Each block of a cluster has a share of them
    (notes.md#few-rows-in-clusters).
    """
    packs = _packs_of_16_bytes(spec, config)
    if spec.x == "float64":  # the compiler decides for each kernel which of two NaNs gives its sign
        return ()
    if packs == 8 and (spec.relu or config.packs_per_thread > 8):  # it would spill
        return ()
    if config.row_threads < FewRows.split_min_threads or config.row_threads % 128:
        return ()
    long = config.row_threads * packs >= FewRows.split_min_packs  # with those past the end
    if spec.norm == "rms_norm":
        return (4,) if long else ()
    return FewRows.split_blocks_of_layer_norm if long else (4,)


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
