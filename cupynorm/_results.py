"""What the forward and backward functions return."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NormBackward", "NormForward"]


class NormForward(NamedTuple):
    """Result of a forward pass; a field that does not apply is None.

    Attributes
    ----------
    y : array
        The normalized array, of x's shape.
    mean : array or None
        Mean of each row in the compute dtype, of x's shape without the normalized axes;
        None for RMSNorm.
    rstd : array
        ``1 / sqrt(variance + eps)`` of each row (RMSNorm: of the mean square), as ``mean``.
    bitmask : array of uint8 or None
        Where y was strictly between relu's bounds, before it was rounded, a bit an element, as
        `pack_bitmask` packs them: of x's shape without the normalized axes, and ceil(N / 8); None
        without relu.
    """

    y: Any
    mean: Any = None
    rstd: Any = None
    bitmask: Any = None


class NormBackward(NamedTuple):
    """Result of a backward pass; a field that does not apply is None.

    Attributes
    ----------
    dx : array
        Gradient of x, of its shape and dtype.
    dweight : array or None
        Gradient of the weight, of its shape and dtype; None without a weight.
    dbias : array or None
        Gradient of the bias; None where it was not asked for.
    """

    dx: Any
    dweight: Any = None
    dbias: Any = None
