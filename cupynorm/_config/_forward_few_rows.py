"""How a forward pass lays few rows that registers hold over threads, with the bits of many."""

from __future__ import annotations

import dataclasses

from cupynorm._config._forward_operands import affine_registers, is_wide
from cupynorm._config._forward_resident import ResidentForward, blocks_ahead_of
from cupynorm._config._limits import FIRST_WITH_CLUSTERS, pack_length
from cupynorm._spec import ITEMSIZE, ForwardSpec

MOST_SHORT_ELEMENTS = 1 << 23  # of few rows of less than a warp


def few_rows_configs(
    spec: ForwardSpec, config: ResidentForward, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ResidentForward], ...]:
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
        held = dataclasses.replace(
            _none_ahead(config),
            rare_last=True,
            hold_weight=True,
            blocks_per_multiprocessor=blocks,
        )
        if architecture >= FIRST_WITH_CLUSTERS:
            configs += [_split(held, split) for split in _split_blocks(spec, config)]
        configs.append(held)
    by_64_registers = _by_64_registers(spec, config, packs, architecture)
    if by_64_registers is not None:
        if not configs or configs[-1].blocks_per_multiprocessor < config.blocks_per_multiprocessor:
            configs.append(config)
        configs.append(by_64_registers)
    return tuple((_most_at_once(few, multiprocessors), few) for few in configs)


def _by_64_registers(
    spec: ForwardSpec, config: ResidentForward, packs: int, architecture: int
) -> ResidentForward | None:
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
        gains = gains and architecture >= FIRST_WITH_CLUSTERS
    else:
        folded = two_bytes and packs == 4 and config.row_threads in (384, 448, 512)
        of_float32 = spec.x == "float32" and packs == 8 and config.row_threads != 224
        gains = architecture == 90 and (folded or of_float32)
    whole = config.full and config.vector == pack_length(spec.x)
    plain = not (spec.relu or spec.zero_centered) and ITEMSIZE[spec.y] == ITEMSIZE[spec.x]
    if not (gains and whole and plain):
        return None
    times = 2 if folded else 1
    threads = config.row_threads // times
    return dataclasses.replace(
        _none_ahead(config),
        hold_weight=False,
        folded=folded,
        row_threads=threads,
        block_threads=threads,
        packs_per_thread=times * config.packs_per_thread,
        blocks_per_multiprocessor=1024 // threads,
    )


def _packs_of_16_bytes(spec: ForwardSpec, config: ResidentForward) -> int:
    """Return how many such packs a thread's would be."""
    return -(-config.packs_per_thread * config.pack_length // pack_length(spec.x))


def _none_ahead(config: ResidentForward) -> ResidentForward:
    """Return the configuration of rows that all run at once, of which none is fetched ahead."""
    return dataclasses.replace(config, blocks_ahead=0, blocks_ahead_if_large=0)


def _most_at_once(few: ResidentForward, multiprocessors: int) -> int:
    """Return how many rows run at once, those of clusters with a multiprocessor for each block.

    64 rows of 8192 in clusters take 5.79 us, as one block each 5.62 (bfloat16, H200).
    """
    if few.cluster_blocks > 1:
        return multiprocessors // few.cluster_blocks
    return few.rows_per_block * few.blocks_per_multiprocessor * multiprocessors


def _short_rows_configs(
    spec: ForwardSpec, config: ResidentForward, n: int, architecture: int, multiprocessors: int
) -> tuple[tuple[int, ResidentForward], ...]:
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
    more: tuple[tuple[int, ResidentForward], ...] = ()
    if packs == 4 and config.pack_length == pack_length(spec.x):
        blocks = 768 // config.block_threads
        blocks_ahead = blocks_ahead_of(blocks, 2, architecture)
        few = dataclasses.replace(
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
    at_once = dataclasses.replace(at_once, rare_last=True)
    return (_most_at_once(at_once, multiprocessors), at_once), *more


def _split_blocks(spec: ForwardSpec, config: ResidentForward) -> tuple[int, ...]:
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


def _split(config: ResidentForward, blocks: int) -> ResidentForward:
    """Return the configuration of a row whose warps are those of a cluster of blocks."""
    threads = config.row_threads // blocks
    return dataclasses.replace(
        config,
        row_threads=threads,
        block_threads=threads,
        blocks_per_multiprocessor=config.blocks_per_multiprocessor * blocks,
        cluster_blocks=blocks,
    )
