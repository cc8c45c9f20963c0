"""What to compute: a norm's operands and options, without sizes, addresses or devices.

A new fusion is a new field here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CPP_TYPES", "ITEMSIZE", "BackwardSpec", "ForwardSpec", "Norm", "compute_dtype"]

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
