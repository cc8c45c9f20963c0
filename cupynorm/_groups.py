"""How rows share weight and bias, where these broadcast over x in another way than one row does.

The kernels know one form: see `Groups`, and kernels/groups.cuh. Vectors of any other form are
copied into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Groups",
    "check_alike",
    "clusters_of_group",
    "common_shape",
    "groups_of",
    "time_of_waves",
    "to_repeat",
]

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The kept axes as three, (outer, vectors, inner): each vector serves outer * inner rows.

    Attributes
    ----------
    outer, vectors, inner : int
        The sizes of the three axes. The middle one is that of weight and bias.
    repeats : int
        How many neighbouring columns an element of a vector serves.
    weight, bias : bool
        Whether there is one for each vector, or all share one.
    """

    outer: int
    vectors: int
    inner: int
    repeats: int
    weight: bool
    bias: bool

    @property
    def count(self) -> int:
        """How many groups there are. Rows of all groups take turns if `inner` is 1."""
        return self.vectors if self.inner == 1 else self.outer * self.vectors

    @property
    def rows(self) -> int:
        """How many rows a group has."""
        return self.outer if self.inner == 1 else self.inner

    def alike(self, most: int) -> int:
        """Return how many neighbouring columns, a power of two up to most, have one element."""
        both = self.repeats | most
        return both & -both

    def numbers(self, n: int, clusters: int, *, as_one: bool = False) -> dict[str, int]:
        """Return the numbers of kernels/groups.cuh for rows of n elements.

        Each group has so many clusters of blocks. `as_one`: there is one for all rows.
        """
        take_turns = self.inner == 1 and self.vectors > 1 and not as_one
        elements = n // self.repeats
        # Numbers below 2**31 are divided exactly: Granlund and Montgomery, "Division by invariant
        # integers using multiplication", theorem 4.2.
        divisor = max(1, self.count if take_turns else clusters)
        shift = 31 + (divisor - 1).bit_length()
        return {
            "n_groups": 1 if as_one else self.count,
            "n_vectors": self.vectors,
            "n_repeats": self.repeats,
            "n_clusters": clusters,
            "n_magic": (1 << shift) // divisor + 1,
            "n_shift": shift,
            "group_step": 1 if take_turns else self.inner,
            "row_step": self.vectors if take_turns else 1,
            "weight_step": elements if self.weight else 0,
            "bias_step": elements if self.bias else 0,
        }


def time_of_waves(rows: int, groups: int, clusters: int, at_once: int) -> int:
    """Return how long all groups take by so many clusters each, if a row takes 1.

    Clusters run in waves. Each takes as long as its most rows, and about a row more to begin.
    """
    return -(-groups * clusters // at_once) * (-(-rows // clusters) + 1)


def clusters_of_group(rows: int, groups: int, at_once: int) -> int:
    """Return by how many clusters the rows of a group are best shared, of all groups' at_once."""
    best, least = 1, float("inf")
    for waves in range(1, 9):
        clusters = min(waves * at_once // max(1, groups), rows)
        if clusters > 0:
            time = time_of_waves(rows, groups, clusters, at_once)
            if time < least:
                best, least = clusters, time
    return best


def _padded(shape: Sequence[int], ndim: int) -> _Shape:
    return (1,) * (ndim - len(shape)) + tuple(shape)


def common_shape(x_shape: Sequence[int], k: int, shapes: Sequence[Sequence[int]]) -> _Shape:
    """Return the least shape of x's axes to which vectors broadcast, and that kernels can read.

    It has 1 before and after a range of kept axes, and behind some of the last k.

    Examples
    --------
    >>> common_shape((2, 16, 8, 64), 1, [(8, 1), (64,)])
    (1, 1, 8, 64)
    >>> common_shape((2, 32, 4, 7, 7), 3, [(32, 4, 1, 1)])
    (1, 32, 4, 1, 1)
    """
    ndim = len(x_shape)
    padded = [_padded(shape, ndim) for shape in shapes]
    varied = [i for i in range(ndim) if any(shape[i] != 1 for shape in padded)]
    kept = [i for i in varied if i < ndim - k]
    inside = [i for i in varied if i >= ndim - k]
    whole = {*range(kept[0], kept[-1] + 1)} if kept else set()
    whole |= {*range(ndim - k, inside[-1] + 1)} if inside else set()
    return tuple(x_shape[i] if i in whole else 1 for i in range(ndim))


def to_repeat(
    x_shape: Sequence[int], k: int, **shapes: Sequence[int] | None
) -> tuple[_Shape, tuple[str, ...]]:
    """Return the shape of `common_shape`, and the names of the vectors to repeat to it.

    Kernels can read the others as they are.
    """
    given = {name: shape for name, shape in shapes.items() if shape is not None}
    common = common_shape(x_shape, k, [*given.values()])
    kept = len(x_shape) - k
    readable = common, (1,) * kept + common[kept:]
    names = (name for name, shape in given.items() if _padded(shape, len(x_shape)) not in readable)
    return common, tuple(names)


def check_alike(x_shape: Sequence[int], k: int, **shapes: Sequence[int] | None) -> None:
    """Check that kernels can read vectors of these shapes, by name."""
    common, names = to_repeat(x_shape, k, **shapes)
    for name in names:
        raise NotImplementedError(
            f"{name} of shape {tuple(shapes[name] or ())} must vary over adjacent axes of x, and "
            f"over the same ones as the other of weight and bias: broadcast it to {common}"
        )


def groups_of(
    x_shape: Sequence[int],
    k: int,
    weight: Sequence[int] | None,
    bias: Sequence[int] | None,
) -> Groups | None:
    """Return the groups of an x for weight and bias of these shapes; None if all rows share one.

    Each has the shape that `common_shape` returns, or that with no kept axes: see `to_repeat`.
    """
    shapes = [shape for shape in (weight, bias) if shape is not None]
    common = common_shape(x_shape, k, shapes)
    ndim = len(x_shape)
    kept, row = common[: ndim - k], common[ndim - k :]
    vectors = math.prod(kept)
    repeats = math.prod(x_shape[ndim - k :]) // math.prod(row) if shapes else 1
    if vectors == repeats == 1:
        return None
    varied = [i for i, n in enumerate(kept) if n != 1]
    first, end = (varied[0], varied[-1] + 1) if varied else (ndim - k, ndim - k)

    def varies(shape: Sequence[int] | None) -> bool:
        return shape is not None and _padded(shape, ndim)[: ndim - k] == kept and vectors != 1

    return Groups(
        outer=math.prod(x_shape[:first]),
        vectors=vectors,
        inner=math.prod(x_shape[end : ndim - k]),
        repeats=repeats,
        weight=varies(weight),
        bias=varies(bias),
    )
