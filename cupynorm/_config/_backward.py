"""How a backward pass lays rows over threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._config._backward_resident import ResidentBackward
from cupynorm._config._backward_staged import StagedBackward, staged_backward
from cupynorm._config._backward_strips import StripsBackward, strips_backward
from cupynorm._config._limits import pack_length, streaming_blocks
from cupynorm._config._reduction import Reduction, reduction_of
from cupynorm._spec import BackwardSpec


@dataclass(frozen=True)
class StreamingBackward:
    """One kernel reduces each row to coefficients, another walks down the columns.

    A row is that of `cluster_blocks` blocks of `row_threads` threads each.
    """

    cluster_blocks: int
    vector: int
    reduction: Reduction | None
    row_threads: ClassVar[int] = 512
    column_threads: ClassVar[int] = 256


BackwardConfig = StagedBackward | ResidentBackward | StripsBackward | StreamingBackward


def backward_config(
    spec: BackwardSpec, n: int, vector: int, architecture: int, *, in_strips: bool = True
) -> StagedBackward | StripsBackward | StreamingBackward:
    """Return the configuration of a backward pass over rows of n elements.

    `in_strips`: the GPU has room for strips, should they be the fastest.
    """
    staged = staged_backward(spec, n, vector, architecture)
    if staged is not None:
        return staged
    strips = strips_backward(spec, n, vector, architecture) if in_strips else None
    return strips or StreamingBackward(
        cluster_blocks=streaming_blocks(-(-n // pack_length(spec.x)), architecture),
        vector=vector,
        reduction=reduction_of(spec, n),
    )
