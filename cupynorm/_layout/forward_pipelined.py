"""How a forward pass lays rows that wait in shared memory over clusters of blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    MOST_CLUSTER_BLOCKS,
    gpu_of,
    is_wide,
    is_y_wider,
    most_cluster_blocks,
    moves_8_bytes,
    pack_length,
    shared_limit,
    slots_of,
    team_bytes,
    team_threads,
    widest,
)
from cupynorm._operation import ITEMSIZE, ForwardSpec

PIPELINED_THREADS = 512  # at most, of a block that stages rows in the forward pass
TWO_CLUSTERS_THREADS = 256  # the same, where two are on a multiprocessor


@dataclass(frozen=True)
class ForwardPipelined:
    """Rows in the shared memory of a cluster of blocks, `stages` of them at a time.

    Two blocks a multiprocessor let two clusters be at once. `hold_weight`, `hold_bias`: it is in
    registers, else in shared memory. `counted`: of many rows a cluster takes the next when it has
    room, as a count in device memory says; else in turn. `cells`: they are copied by cells, as rows
    are that accesses of 4 bytes or less move: see kernels/unaligned.cuh. `residual_ahead`: the
    residual waits there as well, else it is read where it is added.
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
    residual_ahead: bool = (
        False  # the residual waits there as well, else it is read where it is added
    )


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
    """Return the configuration with what a residual needs, and the bits that it has without.

    None where an x wider than the sum leaves no room.
    """
    config = dataclasses.replace(config, cells=False)  # residual_out does not leave by words
    limit = (shared_limit(architecture) + 1024) // config.blocks_per_multiprocessor - 1024
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
    """Return the configuration of rows in shared memory, or None where that has no room."""
    for of_clusters in _deep_forward, _two_clusters_forward, _one_cluster_forward:
        config = of_clusters(spec, n, packs, vector, architecture)
        if config is not None:
            return _by_cells(spec, config, architecture)
    return None


def _deep_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of 16 blocks, of 5 to 8 packs a thread, of rows that fill them.

    They would be read twice: 28 us against 39 for LayerNorm of 32 rows of 262144 float32, 264
    against 440 of 512, 104 against 169 of 256 rows of 393216 bfloat16 (H200). The weight is held
    however it is aligned, as shared memory mostly has no room for it; beside it a row's end would
    spill, and more than what does a ReLU in LayerNorm's 7 and 8 packs of 16 bits.
    """
    cluster_blocks = MOST_CLUSTER_BLOCKS
    too_many = _cluster(packs, PIPELINED_THREADS * 4) == 2 * cluster_blocks
    if not gpu_of(architecture).clusters or not too_many:
        return None
    packs_per_thread, rest = divmod(n, cluster_blocks * PIPELINED_THREADS * pack_length(spec.x))
    spills = spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2 and spec.relu
    if rest or is_wide(spec) or spec.x == "float64" or (spills and packs_per_thread > 6):
        return None
    three = _three_stages(spec, n, vector, cluster_blocks, PIPELINED_THREADS, packs_per_thread)
    tried = [three]
    # A float32 bias leaves shared memory no third stage beside 8 packs of float32, but registers
    # hold it: LayerNorm of 32 rows of 262144 takes 24.5 us, not 25.5, of 512 257, not 262, of one,
    # which waits for it, 9.1, not 8.7 (H200). With a ReLU or moved by single elements it spills.
    if spec.x == "float32" and vector == pack_length(spec.x) and not spec.relu:
        tried.append(dataclasses.replace(three, hold_bias=True))
    # In two stages they take 26.5 us by a kernel that can count, 25.4 by one that cannot; 2048 of
    # them 1016 by a count, 1024 without (H200).
    counted = three.counted and spec.norm == "rms_norm"
    tried.append(dataclasses.replace(three, stages=2, counted=counted))
    fitting = (d for d in tried if forward_pipelined_bytes(spec, d) <= shared_limit(architecture))
    return next(fitting, None)


def _two_clusters_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of clusters of which two are at once, with room for three stages.

    Of each multiprocessor a cluster has a block of up to 256 threads, whose 5 to 7 packs of the
    weight are mostly in registers: one works while the other waits. LayerNorm, with the bias in
    shared memory, takes 172 us against 229 for 1024 rows of 163840, 171 against 195 for 8192 of
    20480, 75 against 94 for 512 of 69632 float32; by two stages 203, 192 and, of 24576, no less
    than by one cluster. RMSNorm takes 195 against 212 for 1024 of 196608, 384 against 394 for 4096
    of 98304; but 198 against 193 for 8192 of 24576 by clusters of two, 514 against 503 of 65536
    with 8 packs (bfloat16, weight and bias of either width, H200). Not with a ReLU beside more than
    5 packs, which would spill more than those do. Of odd length LayerNorm takes 146 us against 177
    for 4096 of 20001, 138 against 156 for 820 of 81921, 136 against 157 for 680 of 98305 with a
    bfloat16 weight and bias, RMSNorm 95 against 111 for 1630 of 40961 (bfloat16, float32 weight and
    bias unless said, H200).
    """
    cluster_blocks = _cluster(packs, PIPELINED_THREADS * 4)
    if not 1 < cluster_blocks <= most_cluster_blocks(architecture) or is_wide(spec):
        return None
    block_packs = -(-packs // cluster_blocks)
    most_packs = 5 if spec.relu else 7 if spec.norm == "layer_norm" else 6
    widths = range(-(-block_packs // TWO_CLUSTERS_THREADS), most_packs + 1)
    measured = spec.x != "float64" and (spec.norm == "layer_norm" or cluster_blocks > 2)
    if not (widths and measured):
        return None
    packs_per_thread = min(
        widths, key=lambda width: slots_of(block_packs, team_threads(block_packs, width))
    )
    block_threads = team_threads(block_packs, packs_per_thread)
    config = _three_stages(
        spec,
        n,
        vector,
        cluster_blocks,
        block_threads,
        packs_per_thread,
        blocks_per_multiprocessor=2,
    )
    # With the KiB that each block has besides, and cells where no address allows anything else.
    # Beside them a ReLU, or a wider y, which is stored by elements, would spill up to 156 bytes:
    # whole packs at such an address have the weight in shared memory, and mostly one block, but the
    # same threads, for the same bits.
    crowded = spec.relu or is_y_wider(spec)
    always = dataclasses.replace(config, cells=(n & -n) * ITEMSIZE[spec.x] <= 4)
    needed = 2 * (forward_pipelined_bytes(spec, always) + 1024)
    if needed > shared_limit(architecture) + 1024 or (crowded and always.cells):
        return None
    return dataclasses.replace(config, hold_weight=not crowded or vector * ITEMSIZE[spec.x] > 4)


def _one_cluster_forward(
    spec: ForwardSpec, n: int, packs: int, vector: int, architecture: int
) -> ForwardPipelined | None:
    """Return the configuration of a block or a cluster, of up to PIPELINED_THREADS threads a block.

    4 packs a thread, 3 where that leaves few threads: of the widths tried (192 to 1024 threads, 1
    to 8 packs) the fastest, or within 3%, from N = 11008 to 131072; LayerNorm of 2**27 elements
    takes 141 us at 12288 by 384 threads, of 512, a quarter of them idle, 161; at 9216 154 by 384 of
    3 packs, 167 by 288 of 4 (bfloat16, H200).
    """
    cluster_blocks = _cluster(packs, PIPELINED_THREADS * 4)
    if cluster_blocks > most_cluster_blocks(architecture):
        return None
    block_packs = -(-packs // cluster_blocks)
    packs_per_thread = 4 if block_packs > 4 * 288 else 3
    block_threads = team_threads(block_packs, packs_per_thread)
    # By accesses of 8 bytes RMSNorm takes 142 us, not 152, for 1024 rows of 131076, LayerNorm 209,
    # not 225, and with a 16-bit weight RMSNorm 141, not 143, for 8192 of 16388, but LayerNorm 207,
    # not 187, for those of 131076 (bfloat16, H200). With a ReLU or a wider y LayerNorm's 4 packs
    # would spill, and elsewhere float64.
    by_8_bytes = moves_8_bytes(spec.x, vector) and spec.x != "float64"
    by_8_bytes = by_8_bytes and (widest(spec.weight, spec.bias) > 2 or cluster_blocks <= 2)
    if spec.norm == "layer_norm" and packs_per_thread == 4:
        by_8_bytes = by_8_bytes and not (spec.relu or is_y_wider(spec))
    hold = (vector == pack_length(spec.x) or by_8_bytes) and not is_wide(spec)
    three = dataclasses.replace(
        _three_stages(spec, n, vector, cluster_blocks, block_threads, packs_per_thread),
        hold_weight=hold,
        hold_bias=hold,
    )
    two = dataclasses.replace(three, stages=2)
    # Whatever the alignment, so that a row's bits do not depend on it.
    least_held = dataclasses.replace(two, hold_weight=False, hold_bias=False)
    if forward_pipelined_bytes(spec, least_held) > shared_limit(architecture):
        return None
    # LayerNorm's 2048 rows of 131072 take 270 us with 3, 324 with 2, 271 with 4 (bfloat16, float32
    # weight and bias, H200).
    return three if forward_pipelined_bytes(spec, three) <= shared_limit(architecture) else two


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
    """Return whether clusters may take rows as they have room for them.

    RMSNorm of 4096 rows of 131072 takes 504 us against 522, of 163840 with a ReLU or a zero-centred
    weight 628 against 668, LayerNorm of 32768 of 16384 503 against 529, of 16384 of 32768 505
    against 532; but of 8192 of 65536, where its blocks wait for the sums of three others, 534
    against 519, unless another cluster is on their multiprocessors: 321 against 351 for 8192 of
    40960. By 16 blocks it loses even then: 179 against 172 for 1024 of 163840 (bfloat16). Of
    float32 LayerNorm takes 130 us against 136 for 2048 of 32768, 993 against 1028 for 8192 of
    65536, 756 against 803 for 4096 of 98304, 226 against 234 for 512 of 229376; but by 16 blocks of
    4 packs a thread 2095 against 2047 for 8192 of 131072 (H200).
    """
    if spec.norm == "rms_norm" or cluster_blocks <= 2:
        return True
    of_most_blocks = cluster_blocks == MOST_CLUSTER_BLOCKS
    if spec.x == "float32":
        return packs_per_thread > 4 or not of_most_blocks
    return blocks_per_multiprocessor == 2 and not of_most_blocks


def _cluster(packs: int, packs_per_block: int) -> int:
    """Return the power of two of blocks that hold `packs` packs."""
    return 1 << (-(-packs // packs_per_block) - 1).bit_length()


def _by_cells(spec: ForwardSpec, config: ForwardPipelined, architecture: int) -> ForwardPipelined:
    """Return the configuration by cells, if they fit, of rows that are moved by 4 bytes or less.

    RMSNorm of 4096 rows of 20001 takes 110 us, not 261, LayerNorm 176, not 397; where accesses are
    of two elements RMSNorm of 20002 104, not 120, LayerNorm by two clusters 125, not 150.
    LayerNorm's one cluster holds the weight besides: 130 us, not 144, for 5000 of 12289, 142, not
    147, for 2720 of 24577; but RMSNorm's would take 106, not 95, for 4096 of 16385 (bfloat16,
    float32 weight and bias, H200), and beside a ReLU, a wider y or operands of float64 up to 192
    bytes would be spilled.
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
