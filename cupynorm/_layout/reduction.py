"""How partial weight gradients of rows are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cupynorm._layout.architectures import pack_length
from cupynorm._layout.tuning_sm90 import Reduction as Tuned
from cupynorm._operation import ITEMSIZE, BackwardSpec, compute_dtype

MOST_GROUPS_OF_VECTORS = 8


@dataclass(frozen=True)
class Reduction:
    """How partial weight gradients are summed: by `groups` of a block's threads side by side.

    Each thread has `width` neighbouring columns, 16 bytes.
    """

    groups: int
    width: int
    vector: int
    block_threads: ClassVar[int] = 256

    @property
    def columns(self) -> int:
        return self.block_threads // self.groups * self.width


def reduction_of(spec: BackwardSpec, n: int) -> Reduction | None:
    """Return how the partials of many rows are summed, None if there are none."""
    if not spec.gradients:
        return None
    # Each vector of groups has few partials.
    most = MOST_GROUPS_OF_VECTORS if spec.grouped else Tuned.max_groups
    return reduction_of_gradients(spec.gradients, compute_dtype(spec.x), n, most)


def reduction_of_gradients(
    gradients: int, compute: str, n: int, most_groups: int = Tuned.max_groups
) -> Reduction:
    """Return how the partials of so many gradients are summed, by fewer groups the longer a row is.

    So a thread has about 5 partials, which it loads at once (notes.md#partial-sums-of-gradients).
    """
    groups = max(1, Tuned.max_groups >> (-(-gradients * n // 8192) - 1).bit_length())
    width = 16 // ITEMSIZE[compute]
    return Reduction(
        groups=min(groups, most_groups), width=width, vector=width if n % width == 0 else 1
    )


def by_index(spec: BackwardSpec) -> bool:
    """Tell whether the columns of each pack have one element of weight and bias."""
    return spec.repeats >= pack_length(spec.x)


def partials_stride(n: int) -> int:
    """Return the elements from one row of partials to the next: see kernels/gradient.cuh."""
    return -(-n // 8) * 8


def reduction_bytes(config: Reduction) -> int:
    """Return the shared memory of a block: see kernels/reduce_partials.cu."""
    rows = min(config.groups, config.block_threads // 32)
    return rows * (config.block_threads // config.groups) * 16
