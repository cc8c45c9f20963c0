"""How a forward pass lays rows over threads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    affine_bytes,
    gpu_of,
    is_wide,
    is_y_wider,
    pack_length,
    streaming_blocks,
)
from cupynorm._layout.forward_in_registers import (
    ForwardInRegisters,
    forward_in_registers,
    has_fewest_threads,
    in_registers_with_residual,
)
from cupynorm._layout.forward_pipelined import (
    ForwardPipelined,
    forward_pipelined,
    pipelined_with_residual,
)
from cupynorm._operation import ITEMSIZE, ForwardSpec


@dataclass(frozen=True)
class ForwardStreaming:
    """Rows of any length, read twice, each by a cluster of blocks.

    A thread asks for `packs_per_thread` at once.
    """

    cluster_blocks: int
    block_threads: int
    blocks_per_multiprocessor: int
    packs_per_thread: int
    vector: int


def forward_config(
    spec: ForwardSpec, n: int, vector: int, architecture: int
) -> ForwardInRegisters | ForwardPipelined | ForwardStreaming:
    """Return the configuration of a forward pass over rows of n elements."""
    config = _plain_config(spec.without_residual, n, vector, architecture)
    if spec.residual is None:
        return config
    if isinstance(config, ForwardStreaming):  # whose packs would spill
        blocks = max(1, config.blocks_per_multiprocessor // 2)
        return dataclasses.replace(config, blocks_per_multiprocessor=blocks)
    if isinstance(config, ForwardPipelined):
        packs = -(-n // pack_length(spec.x))
        pipelined = pipelined_with_residual(spec, config, architecture)
        return pipelined or _streaming_forward(spec, packs, vector, architecture)
    return in_registers_with_residual(spec, config)


def _plain_config(
    spec: ForwardSpec, n: int, vector: int, architecture: int
) -> ForwardInRegisters | ForwardPipelined | ForwardStreaming:
    """Return that of rows without a residual."""
    packs = -(-n // pack_length(spec.x))
    wide = is_wide(spec)
    # Where weight and bias together are more than a 16-bit row, registers hold them from row to
    # row: at N = 16384, 0.91 of the copy's speed against 0.87; where they are no more, it is 0.99
    # without (bfloat16, H200). LayerNorm of float32 and float64 has 8 packs a thread instead, and
    # RMSNorm: 79.8 us, not 82.6, for 4096 rows of 16384, 16.0, not 27.1, for 512 (bfloat16, float32
    # weight and bias, H200).
    exceed = spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2
    exceed = exceed and affine_bytes(spec) > 4 and not wide
    # LayerNorm of 24576 takes 132 us in registers, 153 in shared memory (2**27 elements), with a
    # float32 weight and bias 83 and 80 (2**26 elements; bfloat16, H200).
    fewest_threads = has_fewest_threads(spec, packs)
    most_packs = 1024 if wide else 3072 if fewest_threads else 2048
    most_in_registers = most_packs // 2 if exceed else most_packs
    if n % 2:  # 142 us, not 167, for 4096 of 20001 (bfloat16 throughout, H200)
        most_in_registers = min(most_in_registers, 2048)
    if packs > most_in_registers:
        pipelined = forward_pipelined(spec, n, packs, vector, architecture)
        if pipelined is not None:
            return pipelined
        if packs > most_packs:
            return _streaming_forward(spec, packs, vector, architecture)
    return forward_in_registers(spec, n, packs, vector, architecture)


def _streaming_forward(
    spec: ForwardSpec, packs: int, vector: int, architecture: int
) -> ForwardStreaming:
    """Return the configuration of rows that are read twice."""
    wide, whole = is_wide(spec), vector == pack_length(spec.x)
    # 64 registers hold 2 packs of float64, or of elements moved one by one.
    fewer = not whole or spec.x == "float64"
    cluster_blocks = streaming_blocks(packs, architecture)
    block_threads = 512 if wide or cluster_blocks > 1 else 1024
    # 64 registers do not hold 8 elements of weight and bias in float64; nor, from sm_100 on, a
    # cluster's addresses beside a ReLU, a weight around zero, single elements, a y wider than x or
    # LayerNorm's sums; on sm_120 hardly any.
    plain = whole and not (wide or spec.relu or is_y_wider(spec))
    clustered = cluster_blocks > 1 and not spec.zero_centered
    clustered = clustered and gpu_of(architecture).threads == 2048
    slim = plain and (spec.norm == "rms_norm" or gpu_of(architecture).timed)
    blocks_per_multiprocessor = 2 if slim and clustered else 1
    if clustered and spec.norm == "rms_norm":
        # 28.4 us against 34.6 at 32x262144 float32 (pipelined since), where twice the threads then
        # have a row; LayerNorm, whose blocks wait for more sums, takes 43.6 and 37.1 (H200).
        cluster_blocks, block_threads = 4 * cluster_blocks, block_threads // 2
        blocks_per_multiprocessor *= 2
    return ForwardStreaming(
        cluster_blocks=cluster_blocks,
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks_per_multiprocessor,
        packs_per_thread=2 if fewer else 4,
        vector=vector,
    )
