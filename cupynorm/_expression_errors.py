"""How far the values of a program may be off, to first order.

Each value has a magnitude S: it may be off by ``16 * u * S``, where u is the unit roundoff. That of
a step f of values a, each with a magnitude of its own, is ``|f| + sum |df/da| * S(a)``: what the
step loses itself (up to 16 u, in the functions of `cupynorm.math` too), and what it makes of the
errors of its operands. If the two sides of a comparison are closer than their errors, either side
of a `where` may be taken, and their distance is an error too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupynorm._expressions import COMPARISONS, Program, gradients

__all__ = ["magnitudes", "of_number"]

Pair = tuple[Any, Any]  # a value and its magnitude, of float64
_KINKED = frozenset(("abs", "maximum", "minimum"))


def magnitudes(
    program: Program, tools: Any, arguments: Mapping[str, Pair], compute: np.dtype[Any]
) -> list[Pair]:
    """Return the value and the magnitude of each result, from those of the arguments.

    `tools` are those of NumPy arrays.
    """
    unit = 8 * float(np.finfo(compute).eps)  # 16 * u
    least = float(np.finfo(compute).tiny) if compute == np.float32 else 0.0
    pairs = [arguments[name] for name in program.arguments]
    for operation, operands in program.steps:
        of = [pairs[i] for i in operands] if operation != "number" else []
        values = [value for value, _ in of]
        if operation == "number":
            pairs.append(of_number(operands[0], compute))
        elif operation == "where":
            pairs.append(_of_where(of, unit))
        elif operation in COMPARISONS:
            (left, of_left), (right, of_right) = of
            size = of_left + of_right
            is_open = (abs(left - right) <= unit * size) & (size > 0)
            pairs.append((tools.functions[operation](left, right), is_open))
        elif operation in ("and", "or", "not"):
            is_open = np.logical_or.reduce(np.broadcast_arrays(*(either for _, either in of)))
            pairs.append((tools.functions[operation](*values), is_open))
        else:
            value = tools.functions[operation](*values)
            size = _size(operation, tools, value, of, unit)
            # A GPU takes float32's subnormal numbers for 0.
            vanishes = (abs(value) < least) & (value != 0)
            pairs.append((value, size + np.where(vanishes, least / unit, 0.0)))
    return [pairs[i] for i in program.results]


def of_number(number: Any, compute: np.dtype[Any]) -> Pair:
    """Return a number, which is off if the compute dtype does not hold it."""
    value = np.float64(number)
    if 0 < abs(value) < np.finfo(compute).tiny:  # it may be taken for 0
        return value, abs(value) / (8 * float(np.finfo(compute).eps))
    with np.errstate(over="ignore"):
        return value, 0.0 if compute.type(value) == value else abs(value)


def _of_where(of: Sequence[Pair], unit: float) -> Pair:
    (holds, is_open), (one, of_one), (other, of_other) = of
    either = np.maximum(of_one, of_other) + abs(one - other) / unit
    return np.where(holds, one, other), np.where(is_open, either, np.where(holds, of_one, of_other))


def _size(operation: str, tools: Any, value: Any, of: Sequence[Pair], unit: float) -> Any:
    """Return the magnitude of a step that is a function of numbers."""
    size = abs(value)
    names = tuple(f"a{i}" for i in range(len(of)))
    step = Program(names, ((operation, tuple(range(len(of)))),), (len(of),))
    for i, (name, (a, of_argument)) in enumerate(zip(names, of, strict=True)):
        own = operation == "normal_cdf"  # a factor of its argument is rounded: far out it counts
        if np.all(of_argument == 0) and not own:
            continue
        if operation in _KINKED:
            slope: Any = 1.0  # at a kink, that of either side
        else:
            at = [b for b, _ in of]
            if operation in ("sqrt", "log"):  # whose slopes are largest at the end next to 0
                at[i] = np.maximum(a - unit * of_argument, unit * of_argument)
            slope_of = gradients(step, ("_0",), (name,))
            slope = abs(slope_of.evaluate(tools, np.float64(0), [*at, np.float64(1)])[0])
        size = size + np.where(of_argument == 0, 0.0, slope * of_argument)
        size = size + slope * abs(a) if own else size
    return size
