"""How a backward pass lays rows over threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._layout.architectures import pack_length, streaming_blocks
from cupynorm._layout.backward_column_parallel import (
    BackwardColumnParallel,
    backward_column_parallel,
)
from cupynorm._layout.backward_in_registers import BackwardInRegisters
from cupynorm._layout.backward_pipelined import BackwardPipelined, backward_pipelined
from cupynorm._layout.reduction import Reduction, reduction_of
from cupynorm._operation import BackwardSpec


@dataclass(frozen=True)
class BackwardStreaming:
    """One kernel reduces each row to coefficients, another walks down the columns.

    `cluster_blocks` blocks of `row_threads` threads each share a row.
    """

    cluster_blocks: int
    vector: int
    reduction: Reduction | None
    row_threads: ClassVar[int] = 512
    column_threads: ClassVar[int] = 256


BackwardConfig = (
    BackwardPipelined | BackwardInRegisters | BackwardColumnParallel | BackwardStreaming
)


def backward_config(
    spec: BackwardSpec, n: int, vector: int, architecture: int, *, column_parallel: bool = True
) -> BackwardPipelined | BackwardColumnParallel | BackwardStreaming:
    """Return the configuration of a backward pass over rows of n elements.

    `column_parallel`: the GPU has room for all strips at once, in case they are the fastest.
    """
    pipelined = backward_pipelined(spec, n, vector, architecture)
    if pipelined is not None:
        return pipelined
    if column_parallel and not spec.grouped:
        by_strips = backward_column_parallel(spec, n, vector, architecture)
        if by_strips is not None:
            return by_strips
    return BackwardStreaming(
        cluster_blocks=streaming_blocks(-(-n // pack_length(spec.x)), architecture),
        vector=vector,
        reduction=reduction_of(spec, n),
    )
