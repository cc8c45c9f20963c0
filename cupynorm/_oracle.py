"""Whether a result is right: against float64, on every element, with one tolerance for all.

A result is right if ``norm(result - exact) <= TOLERANCE[dtype] * norm(exact)`` for each output, by
that output's dtype, in float64 on the device. Also, no element's error may exceed MOST_BOUNDS times
the bound of `cupynorm.testing`, so that a few wrong rows are not lost in a million. Below that, the
ratio of an error to its bound is information: cupynorm promises 1 for itself, and nobody else
claims it.

The formulas are those of `cupynorm.testing`, on some rows at a time and on NumPy or CuPy arrays. So
a result of gigabytes is checked in a fraction of a second, where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupynorm import unpack_bitmask
from cupynorm._arrays import widened
from cupynorm._bench import EPS, Problem

# In units of roundoff: 2 for 16 bits, so that a library may round once more on the way. 128 for the
# others, so that it may sum a column of a million terms in some simple order.
TOLERANCE = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-17, "float64": 2**-46}
MOST_BOUNDS = 64.0  # a right library had at most 4, in a sum of 1048576 terms
CHUNK_ELEMENTS = 1 << 24


class Errors(NamedTuple):
    """The error of one output: relative in the 2-norm, and the worst element's over its bound."""

    relative: float
    over_bound: float
    tolerance: float


def widen(array: Any) -> Any:
    """Return the values in float64."""
    return widened(array, "float64")


def errors(
    problem: Problem,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    xp: Any,
    *,
    relu: tuple[float, float] | None = None,
    bitmask: Any = None,
    repeats: int = 1,
) -> dict[str, Errors]:
    """Return the `Errors` of each output; a ValueError names a wrong shape or dtype.

    No output of the problem may be missing. forward may have mean and rstd too. With relu, y was
    clamped. With a bitmask, backward counts dy as 0 where its bit is not set. If the inputs have
    dresidual_out, it is added to dx. Each element of weight and bias serves so many columns in turn
    as repeat.
    """
    if not set(problem.outputs) <= set(outputs):
        raise ValueError(f"of {problem.outputs} only {list(outputs)}")
    for name, output in outputs.items():
        wanted = _shape(problem, name, repeats)
        if output.shape != wanted:
            raise ValueError(f"{name} has shape {output.shape}, not {wanted}")
        if name in ("y", "dx") and output.dtype != inputs["x"].dtype:
            raise ValueError(f"{name} is {output.dtype}")
    if repeats > 1:
        repeated = [name for name in ("weight", "bias") if name in inputs]
        inputs = inputs | {name: xp.repeat(inputs[name], repeats) for name in repeated}
    tallies = {name: _Tally(output.dtype, problem, xp) for name, output in outputs.items()}
    sums: dict[str, Any] = {}
    for rows in _pieces(problem):
        exact, magnitude = _exact(problem, inputs, rows, xp, bitmask)
        if relu is not None:
            exact["y"] = xp.clip(exact["y"], *relu)
        for name in outputs:
            if name in ("dweight", "dbias"):
                total = sums.get(name, (0.0, 0.0))
                sums[name] = (total[0] + exact[name], total[1] + magnitude[name])
            else:
                tallies[name].add(outputs[name][rows], exact[name], magnitude[name])
    for name, columns in sums.items():
        exact_sum, magnitude_sum = (of.reshape(-1, repeats).sum(axis=1) for of in columns)
        tallies[name].add(outputs[name], exact_sum, magnitude_sum)
    return {name: tally.errors() for name, tally in tallies.items()}


def what_is_wrong(
    problem: Problem, inputs: dict[str, Any], outputs: dict[str, Any], xp: Any
) -> str | None:
    """Say what is wrong with outputs, or return None."""
    try:
        return verdict(errors(problem, inputs, outputs, xp))
    except ValueError as error:
        return str(error)


def wrong_bits(
    problem: Problem, inputs: dict[str, Any], bitmask: Any, relu: tuple[float, float], xp: Any
) -> int:
    """Count the bits that differ from exact y's, unless y is within a rounding of a bound."""
    wanted = (problem.rows, -(-problem.cols // 8))
    if bitmask.shape != wanted:
        raise ValueError(f"bitmask has shape {bitmask.shape}, not {wanted}")
    lower, upper = relu
    wrong = 0
    for rows in _pieces(problem):
        exact, magnitude = _exact(problem, inputs, rows, xp)
        y, slack = exact["y"], 16 * _unit(problem) * magnitude["y"]
        decided = (xp.abs(y - lower) > slack) & (xp.abs(y - upper) > slack)
        bits = unpack_bitmask(bitmask[rows], problem.cols)
        wrong = wrong + ((bits != ((lower < y) & (y < upper))) & decided).sum()
    return int(wrong)


def verdict(found: dict[str, Errors]) -> str | None:
    """Say what is wrong, or return None."""
    wrong = []
    for name, e in found.items():  # NaN is wrong too
        if not e.relative <= e.tolerance:
            wrong.append(f"{name} is off by {e.relative:.2g}, allowed {e.tolerance:.2g}")
        elif not e.over_bound <= MOST_BOUNDS:
            wrong.append(f"{name} has an element off by {e.over_bound:.2g} times its bound")
    return "; ".join(wrong) or None


def _shape(problem: Problem, name: str, repeats: int) -> tuple[int, ...]:
    if name in ("y", "dx"):
        return problem.rows, problem.cols
    return (problem.rows if name in ("mean", "rstd") else problem.cols // repeats,)


def _pieces(problem: Problem) -> Iterator[slice]:
    """Yield some rows at a time."""
    step = max(1, CHUNK_ELEMENTS // problem.cols)
    return (slice(start, start + step) for start in range(0, problem.rows, step))


def _exact(
    problem: Problem, inputs: dict[str, Any], rows: slice, xp: Any, bitmask: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the exact values and the magnitudes of some rows, as in `cupynorm.testing`."""
    x, w = widen(inputs["x"][rows]), widen(inputs["weight"])
    u = _unit(problem)

    def mean(values: Any) -> Any:
        return values.mean(axis=1, keepdims=True)

    centred = x - mean(x) if problem.norm == "layer_norm" else x
    rstd = 1 / xp.sqrt(mean(centred * centred) + EPS[problem.norm])
    xhat = centred * rstd
    size = xp.abs(xhat)
    if problem.direction == "forward":
        bias = widen(inputs["bias"]) if "bias" in inputs else xp.zeros_like(w)
        y = xhat * w
        exact = {"y": y + bias, "rstd": rstd[:, 0]}
        magnitude = {"y": xp.abs(y) + xp.abs(bias), "rstd": rstd[:, 0]}
        if problem.norm == "layer_norm":
            mean_size = mean(xp.abs(x))
            shift = 8 * u * mean_size * rstd
            inflation = 1 + shift * shift
            size = inflation * size + mean(size) + shift
            exact["mean"] = mean(x)[:, 0]
            magnitude = {
                "y": size * xp.abs(w) + xp.abs(bias),
                "mean": mean_size[:, 0],
                "rstd": (inflation * rstd)[:, 0],
            }
        return exact, magnitude
    dy = widen(inputs["dy"][rows])
    if bitmask is not None:
        dy = dy * unpack_bitmask(bitmask[rows], problem.cols)
    g = dy * w
    g_size = xp.abs(g)
    slope = mean(g * xhat)
    if problem.norm == "rms_norm":
        dx = rstd * (g - xhat * slope)
        dx_size = rstd * (g_size + size * mean(g_size * size))
    else:
        dx = rstd * (g - mean(g) - xhat * slope)
        h_size = size + mean(size)
        dx_size = g_size + mean(g_size) + h_size * xp.abs(slope) + size * mean(g_size * h_size)
        dx_size, size = rstd * dx_size, h_size
    if "dresidual_out" in inputs:
        added = widen(inputs["dresidual_out"][rows])
        dx, dx_size = dx + added, dx_size + xp.abs(added)
    exact = {"dx": dx, "dweight": (dy * xhat).sum(axis=0), "dbias": dy.sum(axis=0)}
    magnitude = {
        "dx": dx_size,
        "dweight": (xp.abs(dy) * size).sum(axis=0),
        "dbias": xp.abs(dy).sum(axis=0),
    }
    return {name: exact[name] for name in problem.outputs}, magnitude


def _unit(problem: Problem) -> float:
    return 2.0**-53 if problem.dtype == "float64" else 2.0**-24


class _Tally:
    """Sums the errors of one output, piece by piece, without leaving the device."""

    def __init__(self, dtype: np.dtype[Any], problem: Problem, xp: Any) -> None:
        self._xp, self._unit = xp, _unit(problem)
        self._tolerance = TOLERANCE[dtype.name]
        self._info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        self._tiny = float(np.finfo(np.float64 if problem.dtype == "float64" else "f4").tiny)
        self._squares = self._exact_squares = self._worst = 0.0

    def add(self, actual: Any, exact: Any, magnitude: Any) -> None:
        xp = self._xp
        error = xp.abs(widen(actual) - exact)
        slack = 16 * self._unit * magnitude
        exponent = xp.frexp(xp.abs(exact) + slack)[1] - 1
        spacing = xp.maximum(exponent, int(self._info.minexp)) - int(self._info.nmant) - 1
        bound = xp.ldexp(xp.ones_like(error), spacing) + slack + self._tiny
        self._squares = self._squares + (error * error).sum()
        self._exact_squares = self._exact_squares + (exact * exact).sum()
        self._worst = xp.maximum(self._worst, (error / bound).max())

    def errors(self) -> Errors:
        relative = np.sqrt(float(self._squares) / max(float(self._exact_squares), 1e-300))
        return Errors(float(relative), float(self._worst), self._tolerance)
