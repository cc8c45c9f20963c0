"""How wide weight, bias and y are beside x."""

from __future__ import annotations

from cupynorm._config._limits import pack_length, widest
from cupynorm._spec import ITEMSIZE, ForwardSpec


def is_wide(spec: ForwardSpec) -> bool:
    """Return whether operands of float64 widen a pack of a narrower x: up to 168 registers."""
    return widest(spec.weight, spec.bias, spec.y) > max(4, ITEMSIZE[spec.x])


def is_y_wider(spec: ForwardSpec) -> bool:
    """Return whether a pack of y has more bytes than one of x."""
    return ITEMSIZE[spec.y] > ITEMSIZE[spec.x]


def affine_bytes(spec: ForwardSpec) -> int:
    """Return the bytes of an element of the weight and one of the bias."""
    return widest(spec.weight) + widest(spec.bias)


def affine_registers(spec: ForwardSpec, packs_per_thread: int) -> int:
    """Return the registers that hold a thread's weight and bias."""
    return packs_per_thread * pack_length(spec.x) * affine_bytes(spec) // 4
