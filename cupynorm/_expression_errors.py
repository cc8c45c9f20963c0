"""How far the values of a program may be off, to first order.

Each value has a magnitude S: it may be off by ``16 * u * S``. `cupynorm.testing` derives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cupynorm._expressions import COMPARISONS, Program, gradients, trace

__all__ = ["Pair", "magnitudes", "of_formula", "of_numbers"]

Pair = tuple[Any, Any]  # a value and its magnitude, of float64
_KINKED = frozenset(("abs", "maximum", "minimum"))
_EXACT = _KINKED | {"negative", "sign"}  # whose results are not rounded
# Far out they are off by as much as if their argument was rounded.
_ROUNDING_WITHIN = frozenset(("normal_cdf", "normal_pdf"))
_STEEP_AT_0 = frozenset((("sqrt", 0), ("log", 0), ("divide", 1)))


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
            pairs.append(of_numbers(operands[0], compute))
        elif operation == "where":
            pairs.append(_of_where(of, unit))
        elif operation in COMPARISONS:
            (left, of_left), (right, of_right) = of
            size = of_left + of_right
            differ = operands[0] != operands[1]  # a value equals itself, whatever it lost
            is_open = (abs(left - right) <= unit * size) & (size > 0) & differ
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


def of_formula(
    function: Callable[..., Any], tools: Any, compute: np.dtype[Any], *pairs: Pair
) -> Pair:
    """Return what a function makes of values and their magnitudes."""
    program = trace("formula", function, "_0")
    known = dict(zip(program.arguments, pairs, strict=True))
    return magnitudes(program, tools, known, compute)[0]


def of_numbers(numbers: Any, compute: np.dtype[Any]) -> Pair:
    """Return numbers, which are off where the compute dtype does not hold them."""
    values = np.asarray(numbers, np.float64)
    size, info = abs(values), np.finfo(compute)
    with np.errstate(over="ignore"):
        lost = np.where(values.astype(compute) == values, 0.0, size)
    may_vanish = (size > 0) & (size < info.tiny)  # it may be taken for 0, and 0 is within its error
    return values, np.where(may_vanish, size / (4 * float(info.eps)), lost)


def _of_where(of: Sequence[Pair], unit: float) -> Pair:
    (holds, is_open), (one, of_one), (other, of_other) = of
    either = np.maximum(of_one, of_other) + abs(one - other) / unit
    return np.where(holds, one, other), np.where(is_open, either, np.where(holds, of_one, of_other))


def _size(operation: str, tools: Any, value: Any, of: Sequence[Pair], unit: float) -> Any:
    """Return the magnitude of a step that is a function of numbers."""
    size = 0.0 if operation in _EXACT else abs(value)
    if operation == "sign":  # a comparison with 0
        ((a, of_a),) = of
        return size + np.where((abs(a) <= unit * of_a) & (of_a > 0), 2 / unit, 0.0)
    names = tuple(f"a{i}" for i in range(len(of)))
    step = Program(names, ((operation, tuple(range(len(of)))),), (len(of),))
    for i, (name, (a, of_argument)) in enumerate(zip(names, of, strict=True)):
        rounds_within = operation in _ROUNDING_WITHIN
        if np.all(of_argument == 0) and not rounds_within:
            continue
        if operation in _KINKED:
            slope: Any = 1.0  # at a kink, that of either side
        else:
            at = [b for b, _ in of]
            if (operation, i) in _STEEP_AT_0:  # the slope is largest at the end next to 0
                at[i] = np.copysign(np.maximum(abs(a) - unit * of_argument, unit * of_argument), a)
            slope_of = gradients(step, ("_0",), (name,))
            slope = abs(slope_of.evaluate(tools, np.float64(0), [*at, np.float64(1)])[0])
        size = size + np.where(of_argument == 0, 0.0, slope * of_argument)
        size = size + slope * abs(a) if rounds_within else size
    return size
