"""How a forward pass lays rows over threads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupynorm._layout.architectures import (
    gpu_of,
    has_heavy_affine,
    is_wide,
    is_y_wider,
    pack_length,
    streaming_blocks,
)
from cupynorm._layout.forward_in_registers import (
    ForwardInRegisters,
    forward_in_registers,
    has_fewest_threads,
    in_registers_quantized,
    in_registers_with_residual,
)
from cupynorm._layout.forward_pipelined import (
    ForwardPipelined,
    forward_pipelined,
    pipelined_with_residual,
)
from cupynorm._layout.tuning_sm90 import Forward as Tuned
from cupynorm._operation import ITEMSIZE, ForwardSpec, QuantizedSpec


@dataclass(frozen=True)
class ForwardStreaming:
    """Rows of any length, read twice, each by a cluster of blocks.

    A thread loads `packs_per_thread` at once.
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
    if isinstance(spec, QuantizedSpec):
        quantized = quantized_config(spec, n, vector, architecture)
        if quantized is None:
            raise ValueError(f"no kernel quantizes rows of {n} elements, {vector} at once: {spec}")
        return quantized
    config = _config_for_all(spec, n, vector, architecture)
    if spec.grouped and isinstance(config, ForwardPipelined):
        return dataclasses.replace(config, counted=False)  # each group would take a count
    return config


def quantized_config(
    spec: QuantizedSpec, n: int, vector: int, architecture: int
) -> ForwardInRegisters | None:
    """Return the configuration of a quantized pass. None if no kernel serves it.

    It has the bits of the pass that writes y. Registers hold the rows, which are moved by packs.
    Neighbouring lanes share a scale.
    """
    config = forward_config(spec.of_y, n, vector, architecture)
    if spec.x == "float64" or spec.relu or spec.grouped or is_wide(spec):
        return None
    if not isinstance(config, ForwardInRegisters) or config.vector != config.pack_length:
        return None
    if config.pack_length < 4:  # its codes would not fill a word
        return None
    if spec.scale_columns and config.row_threads * config.pack_length % spec.scale_columns:
        return None
    return in_registers_quantized(spec, config, architecture)


def _config_for_all(
    spec: ForwardSpec, n: int, vector: int, architecture: int
) -> ForwardInRegisters | ForwardPipelined | ForwardStreaming:
    """Return the configuration of rows that share one row of weight and bias."""
    config = _plain_config(spec.without_residual, n, vector, architecture)
    if spec.residual is None:
        return config
    if isinstance(config, ForwardInRegisters):
        return in_registers_with_residual(spec, config)
    if isinstance(config, ForwardStreaming):  # its packs would spill
        blocks = max(1, config.blocks_per_multiprocessor // 2)
        return dataclasses.replace(config, blocks_per_multiprocessor=blocks)
    packs = -(-n // pack_length(spec.x))
    pipelined = pipelined_with_residual(spec, config, architecture)
    return pipelined or _streaming_forward(spec, packs, vector, architecture)


def _plain_config(
    spec: ForwardSpec, n: int, vector: int, architecture: int
) -> ForwardInRegisters | ForwardPipelined | ForwardStreaming:
    """Return the configuration of rows without a residual."""
    packs = -(-n // pack_length(spec.x))
    max_packs = _max_packs_in_registers(spec, packs)
    if packs > _max_packs_sooner_in_registers(spec, n, max_packs):
        pipelined = forward_pipelined(spec, n, packs, vector, architecture)
        if pipelined is not None:
            return pipelined
        if packs > max_packs:
            return _streaming_forward(spec, packs, vector, architecture)
    return forward_in_registers(spec, n, packs, vector, architecture)


def _max_packs_in_registers(spec: ForwardSpec, packs: int) -> int:
    """Return the packs of the longest row that registers hold."""
    if is_wide(spec):
        return Tuned.max_packs_wide
    if has_fewest_threads(spec, packs):
        return Tuned.max_packs_by_fewest_threads
    return Tuned.max_packs


def _max_packs_sooner_in_registers(spec: ForwardSpec, n: int, max_packs: int) -> int:
    """Return the packs of the longest row that is faster there than in shared memory.

    Shared memory leaves registers for weight and bias from row to row. That pays if they are larger
    than a row of 16 bits (notes.md#in-registers-or-in-shared-memory).
    """
    exceed = has_heavy_affine(spec) and not is_wide(spec)
    if exceed and spec.norm == "layer_norm" and ITEMSIZE[spec.x] == 2:
        max_packs //= Tuned.share_beside_heavy_affine
    return min(max_packs, Tuned.max_packs_odd) if n % 2 else max_packs


def _streaming_forward(
    spec: ForwardSpec, packs: int, vector: int, architecture: int
) -> ForwardStreaming:
    """Return the configuration of rows that are read twice."""
    gpu, whole = gpu_of(architecture), vector == pack_length(spec.x)
    cluster_blocks = streaming_blocks(packs, architecture)
    block_threads = 512 if is_wide(spec) or cluster_blocks > 1 else 1024
    # From sm_100 on, 64 registers do not hold a cluster's addresses with a weight around zero. On
    # sm_120, whose multiprocessors have fewer threads, they hold hardly any.
    clustered = cluster_blocks > 1 and not spec.zero_centered and gpu.threads == 2048
    # They do not hold 8 elements of weight and bias in float64 either. From sm_100 on, a ReLU,
    # single elements, a y wider than x or LayerNorm's sums do not fit.
    slim = whole and not (is_wide(spec) or spec.relu or is_y_wider(spec))
    slim = slim and (spec.norm == "rms_norm" or gpu.timed)
    blocks_per_multiprocessor = 2 if slim and clustered else 1
    if clustered and spec.norm == "rms_norm" and Tuned.rms_norm_streams_by_more_blocks:
        cluster_blocks, block_threads = 4 * cluster_blocks, block_threads // 2
        blocks_per_multiprocessor *= 2
    return ForwardStreaming(
        cluster_blocks=cluster_blocks,
        block_threads=block_threads,
        blocks_per_multiprocessor=blocks_per_multiprocessor,
        # 64 registers hold 2 packs of float64, or of elements moved one by one.
        packs_per_thread=4 if whole and spec.x != "float64" else 2,
        vector=vector,
    )
