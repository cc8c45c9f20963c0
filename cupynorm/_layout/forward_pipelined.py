"""How a forward pass lays rows that wait in shared memory over clusters of blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    MAX_CLUSTER_BLOCKS,
    gpu_of,
    is_wide,
    is_y_wider,
    max_cluster_blocks,
    moves_8_bytes,
    pack_length,
    shared_limit,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._layout.tuning_sm90 import ForwardPipelined as Tuned
from cupynorm._operation import ITEMSIZE, ForwardSpec


@dataclass(frozen=True)
class ForwardPipelined:
    """Rows in the shared memory of a cluster of blocks, `stages` of them at a time.

    Two blocks a multiprocessor let two clusters run at once. `hold_weight`, `hold_bias`: it is in
    registers, else in shared memory. `counted`: with many rows, a cluster that has room takes the
    next row from a count in device memory, else in turn. `cells`: rows are copied by cells, as
    accesses of 4 bytes or less need: see kernels/unaligned.cuh. `residual_ahead`: the residual
    waits in shared memory too, else it is read where it is added.
    """

    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    cluster_blocks: int
    stages: int
    vector: int
    hold_weight: bool
    hold_bias: bool
    counted: bool
    cells: bool
    full: bool
    residual_ahead: bool = False


def forward_pipelined_bytes(spec: ForwardSpec, config: ForwardPipelined) -> int:
    """Return the shared memory of a block: see kernels/forward_pipelined.cu."""
    packs = config.block_threads * config.packs_per_thread
    size = team_bytes(spec.x, config.block_threads, config.block_threads, config.cluster_blocks)
    size += 128  # the next rows' numbers, and the rest of their line
    of_stage = [spec.branch or spec.x, spec.residual if config.residual_ahead else None]
    elements = packs * pack_length(spec.x)
    size += config.stages * elements * sum(ITEMSIZE[dtype] for dtype in of_stage if dtype)
    if config.cells:
        size += config.stages * packs // 32 * 16
    for dtype, held in ((spec.weight, config.hold_weight), (spec.bias, config.hold_bias)):
        if dtype and not held:
            size += elements * ITEMSIZE[dtype]
    return size


def pipelined_with_residual(
    spec: ForwardSpec, config: ForwardPipelined, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration for a residual, with the bits of that without.

    None if an x wider than the sum leaves no room.
    """
    config = dataclasses.replace(config, cells=False)  # residual_out is not written in words
    limit = shared_limit(architecture, config.blocks_per_multiprocessor)
    held = dataclasses.replace(config, hold_weight=True, hold_bias=True)
    found = (
        dataclasses.replace(of, stages=stages, residual_ahead=ahead)
        for ahead, of in ((True, config), (False, config), (False, held))
        for stages in range(config.stages, 1, -1)
    )
    return next((of for of in found if forward_pipelined_bytes(spec, of) <= limit), None)


def forward_pipelined(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of rows in shared memory, or None if they do not fit."""
    for of_clusters in _deep_forward, _two_clusters_forward, _one_cluster_forward:
        config = of_clusters(spec, n, packs, vector, architecture)
        if config is not None:
            return _by_cells(spec, config, architecture)
    return None


def _deep_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of 16 blocks, of 5 to 8 packs a thread, of rows that fill them.

    They would be read twice (notes.md#sixteen-blocks-of-more-packs). Registers hold the weight at
    any alignment, as shared memory mostly has no room for it. A row's end would spill with it.
    """
    too_many = _cluster(packs, Tuned.max_threads * 4) == 2 * MAX_CLUSTER_BLOCKS
    if not gpu_of(architecture).clusters or not too_many or is_wide(spec) or spec.x == "float64":
        return None
    threads = MAX_CLUSTER_BLOCKS * Tuned.max_threads
    packs_per_thread, rest = divmod(n, threads * pack_length(spec.x))
    crowded = spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2 and spec.relu
    if rest or (crowded and packs_per_thread > 6):
        return None
    three = _three_stages(spec, n, vector, MAX_CLUSTER_BLOCKS, Tuned.max_threads, packs_per_thread)
    tried = [three]
    # Registers hold a float32 bias if shared memory then has no room for a third stage. With a ReLU
    # or single elements it would spill.
    if spec.x == "float32" and vector == pack_length(spec.x) and not spec.relu:
        tried.append(dataclasses.replace(three, hold_bias=True))
    # With two stages LayerNorm is faster by a kernel that cannot count.
    counted = three.counted and spec.norm == "rms_norm"
    tried.append(dataclasses.replace(three, stages=2, counted=counted))
    fitting = (d for d in tried if forward_pipelined_bytes(spec, d) <= shared_limit(architecture))
    return next(fitting, None)


def _two_clusters_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration with two clusters at once, with room for three stages.

    A cluster has a small block on each multiprocessor, whose packs of the weight are mostly in
    registers. One cluster works while the other waits (notes.md#two-clusters-at-once).
    """
    cluster_blocks = _cluster(packs, Tuned.max_threads * 4)
    if not 1 < cluster_blocks <= max_cluster_blocks(architecture):
        return None
    if is_wide(spec) or spec.x == "float64":
        return None
    if spec.norm == "rms_norm" and cluster_blocks <= Tuned.two_clusters_beyond_blocks:
        return None
    block_packs = -(-packs // cluster_blocks)
    packs_per_thread = _packs_of_two_clusters(spec, block_packs)
    if packs_per_thread is None:
        return None
    config = _three_stages(
        spec,
        n,
        vector,
        cluster_blocks,
        team_threads(block_packs, packs_per_thread),
        packs_per_thread,
        blocks_per_multiprocessor=2,
    )
    # Cells, if no address allows anything else. With them a ReLU or a wider y, which is stored by
    # elements, would spill up to 156 bytes. Whole packs at such an address keep the weight in
    # shared memory, and mostly have one block. Their threads are the same, for the same bits.
    crowded = spec.relu or is_y_wider(spec)
    always = dataclasses.replace(config, cells=(n & -n) * ITEMSIZE[spec.x] <= 4)
    needed = forward_pipelined_bytes(spec, always)
    if needed > shared_limit(architecture, 2) or (crowded and always.cells):
        return None
    return dataclasses.replace(config, hold_weight=not crowded or vector * ITEMSIZE[spec.x] > 4)


def _packs_of_two_clusters(spec: ForwardSpec, block_packs: int) -> int | None:
    """Return the packs of a thread that leave the fewest empty, or None if all are too many.

    With more packs a ReLU would spill.
    """
    least = -(-block_packs // Tuned.two_clusters_max_threads)
    most = Tuned.two_clusters_max_packs
    if spec.norm == "layer_norm":
        most = Tuned.two_clusters_max_packs_of_layer_norm
    if spec.relu:
        most = 5
    return min(
        range(least, most + 1),
        key=lambda width: slots_of(block_packs, team_threads(block_packs, width)),
        default=None,
    )


def _one_cluster_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of a block or a cluster, of 4 packs a thread.

    It has 3 packs if 4 would leave few threads (notes.md#one-cluster-of-blocks).
    """
    cluster_blocks = _cluster(packs, Tuned.max_threads * 4)
    if cluster_blocks > max_cluster_blocks(architecture):
        return None
    block_packs = -(-packs // cluster_blocks)
    packs_per_thread = 4 if block_packs > Tuned.three_packs_max else 3
    block_threads = team_threads(block_packs, packs_per_thread)
    hold = _one_cluster_holds(spec, vector, cluster_blocks, packs_per_thread)
    most = dataclasses.replace(
        _three_stages(spec, n, vector, cluster_blocks, block_threads, packs_per_thread),
        stages=Tuned.stages,
        hold_weight=hold,
        hold_bias=hold,
    )
    two = dataclasses.replace(most, stages=2)
    # It must fit at any alignment, so that a row's bits do not depend on that.
    least_held = dataclasses.replace(two, hold_weight=False, hold_bias=False)
    if forward_pipelined_bytes(spec, least_held) > shared_limit(architecture):
        return None
    return most if forward_pipelined_bytes(spec, most) <= shared_limit(architecture) else two


def _one_cluster_holds(
    spec: ForwardSpec, vector: int, cluster_blocks: int, packs_per_thread: int
) -> bool:
    """Return whether registers hold weight and bias."""
    if is_wide(spec):
        return False
    if vector == pack_length(spec.x):
        return True
    if not moves_8_bytes(spec.x, vector) or spec.x == "float64":  # it would spill
        return False
    narrow = widest(spec.weight, spec.bias) <= 2
    if narrow and cluster_blocks > Tuned.held_by_8_bytes_max_blocks:
        return False
    spills = spec.norm == "layer_norm" and packs_per_thread == 4
    return not (spills and (spec.relu or is_y_wider(spec)))


def _three_stages(
    spec: ForwardSpec,
    n: int,
    vector: int,
    cluster_blocks: int,
    block_threads: int,
    packs_per_thread: int,
    blocks_per_multiprocessor: int = 1,
) -> ForwardPipelined:
    """Return the configuration of three stages with the weight held, the bias in shared memory."""
    columns = cluster_blocks * block_threads * packs_per_thread * pack_length(spec.x)
    return ForwardPipelined(
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks_per_multiprocessor,
        packs_per_thread=packs_per_thread,
        cluster_blocks=cluster_blocks,
        stages=3,
        vector=vector,
        hold_weight=True,
        hold_bias=False,
        counted=_counted(spec, cluster_blocks, packs_per_thread, blocks_per_multiprocessor),
        cells=False,
        full=n == columns,
    )


def _counted(
    spec: ForwardSpec, cluster_blocks: int, packs_per_thread: int, blocks_per_multiprocessor: int
) -> bool:
    """Return whether clusters take the next row when they have room for it.

    That slows LayerNorm's larger clusters. They wait for the sums of many others, with no other
    cluster on their multiprocessors (notes.md#rows-taken-by-a-count).
    """
    if spec.norm == "rms_norm" or cluster_blocks <= Tuned.counted_max_blocks:
        return True
    largest = cluster_blocks == MAX_CLUSTER_BLOCKS
    if spec.x == "float32":
        return not largest or packs_per_thread > Tuned.counted_float32_beyond_packs
    return not largest and blocks_per_multiprocessor == 2


def _cluster(packs: int, packs_per_block: int) -> int:
    """Return the power of two of blocks that hold `packs` packs."""
    return 1 << (-(-packs // packs_per_block) - 1).bit_length()


def _by_cells(spec: ForwardSpec, config: ForwardPipelined, architecture: int) -> ForwardPipelined:
    """Return the configuration by cells, if they fit, of rows moved by 4 bytes or less.

    LayerNorm's one cluster then holds the weight too, unless up to 192 bytes would spill
    (notes.md#rows-by-cells).
    """
    if config.vector * ITEMSIZE[spec.x] > 4:
        return config
    if not gpu_of(architecture).asynchronous_copies:
        return config
    plain = not (spec.relu or is_wide(spec) or is_y_wider(spec))
    hold = config.hold_weight or (spec.norm == "layer_norm" and plain)
    for stages in range(config.stages, 1, -1):
        found = dataclasses.replace(config, hold_weight=hold, cells=True, stages=stages)
        if forward_pipelined_bytes(spec, found) <= shared_limit(architecture):
            return found
    return config
