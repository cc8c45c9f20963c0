"""What to compute: a norm's operands and options, and what comes of them, without sizes, addresses
or devices.

A new fusion is a new field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = [
    "CPP_TYPES",
    "ITEMSIZE",
    "BackwardSpec",
    "ForwardSpec",
    "Norm",
    "NormBackward",
    "NormForward",
    "compute_dtype",
]

Norm = Literal["rms_norm", "layer_norm"]

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# The kernels' name of each dtype; an absent operand is None in both languages.
CPP_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "float16",
    "bfloat16": "bfloat16",
    None: "None",
}


def compute_dtype(x: str) -> str:
    """Return the dtype that rows of x are computed and their statistics stored in."""
    return "float64" if x == "float64" else "float32"


@dataclass(frozen=True)
class ForwardSpec:
    """A forward pass; dtypes by name, None for an operand that is absent."""

    norm: Norm
    x: str
    weight: str | None
    bias: str | None
    y: str
    zero_centered: bool
    store_statistics: bool  # and, with relu, the bitmask
    relu: bool


@dataclass(frozen=True)
class BackwardSpec:
    """A backward pass; dx has x's dtype, dweight weight's, and exists where weight does."""

    norm: Norm
    x: str
    dy: str
    weight: str | None
    dbias: str | None
    zero_centered: bool
    bitmask: bool

    @property
    def gradients(self) -> int:
        """How many gradients are summed over the rows."""
        return (self.weight is not None) + (self.dbias is not None)


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
