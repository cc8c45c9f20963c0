"""Hard rows, in each dtype, norm, pass and fusion, within the bound of `cupynorm.testing`.

A table says what a row is. NumPy computes it everywhere, and the kernels where there is a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import to_cupy, to_numpy
from residuals import OfCupyNorm
from strategies import DTYPES, make_values

from cupynorm import testing
from cupynorm.reference import Array, round_once

NORMS = ("rms_norm", "layer_norm")
ROWS = 3
# Parts of a warp, whole warps, and shared memory of clusters.
LARGEST = 2.0**900  # of float64, since the bound is computed in float64 too
# Three rows of these add up to a weight gradient in float32: |xhat| is at most sqrt(20480).
LARGEST_OF_DY = 2.0**118
WIDTHS = {"NumPy": (33, 1000), "CuPy": (33, 1000, 20480)}

Draw = Callable[[Array, Any], Array]  # from normal values and a dtype's finfo


def _last(of: Callable[[Any], float]) -> Draw:
    """Put one value into each row."""

    def draw(normal: Array, info: Any) -> Array:
        normal[:, -1] = of(info)
        return normal

    return draw


VALUES: dict[str, Draw] = {
    **{
        f"mean {mean:g} deviations": lambda normal, _, mean=mean: mean + normal
        for mean in (0.0, *(10.0**i for i in range(8)))
    },
    **{
        f"size {size:g}": lambda normal, _, size=size: size * normal
        for size in (1e-38, 1e-30, 1e-19, 1e-8, 1e8, 1e19, 1e30, 1e38)
    },
    "up to the largest": lambda normal, info: normal / abs(normal).max() * float(info.max),
    "all the largest": lambda normal, info: np.copysign(float(info.max), normal),
    "float16's largest": lambda normal, _: np.copysign(65504, normal),
    "subnormal": lambda normal, info: normal * float(info.smallest_normal) / 8,
    "the smallest": lambda normal, info: np.copysign(float(info.smallest_subnormal), normal),
    "one huge": _last(lambda info: float(info.max) / 2),
    "constant": lambda normal, _: np.full_like(normal, 3.3),
    "constant and the largest": lambda normal, info: np.full_like(normal, float(info.max)),
    "zero": lambda normal, _: np.zeros_like(normal),
    "one NaN": _last(lambda _: np.nan),
    "one inf": _last(lambda _: np.inf),
    "one -inf": _last(lambda _: -np.inf),
    "all inf": lambda normal, _: np.full_like(normal, np.inf),
}


def values_of(name: str, n: int, dtype: np.dtype[Any], most: float = LARGEST) -> Array:
    """Return rows of the table. What is beyond a dtype's numbers, or `most`, is the largest one."""
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    drawn = VALUES[name](np.random.default_rng(n).standard_normal((ROWS, n)), info)
    largest = min(float(info.max), most)
    within = np.clip(drawn, -largest, largest)
    return round_once(np.where(np.isinf(drawn), drawn, within), dtype)


def normal_of(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    return make_values("normal", shape, dtype, seed)


@pytest.fixture(params=["NumPy", pytest.param("CuPy", marks=pytest.mark.gpu)])
def computes(request: pytest.FixtureRequest) -> tuple[Any, tuple[int, ...]]:
    """Return what calls the public functions, and the widths of its rows."""
    if request.param == "NumPy":
        caller = OfCupyNorm(np, lambda array: array, lambda result: result)
    else:
        caller = OfCupyNorm(None, to_cupy, to_numpy)
    return caller, WIDTHS[request.param]


FUSIONS = ("none", "residual", "relu")


@pytest.fixture(params=FUSIONS)
def fusion(request: pytest.FixtureRequest) -> Any:
    return request.param


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass on rows x: its arguments by name, and its result as NumPy arrays."""

    arrays: dict[str, Array | None]
    options: dict[str, Any]
    result: Any

    @classmethod
    def of(cls, caller: Any, norm: str, x: Array, fusion: str) -> Forward:
        n = x.shape[-1]
        arrays = {
            "x": x,
            "weight": normal_of((n,), np.float32, 1),
            "bias": normal_of((n,), np.float32, 2) if norm == "layer_norm" else None,
            "residual": normal_of(x.shape, x.dtype, 3) if fusion == "residual" else None,
        }
        relu = (-0.5, 0.75) if fusion == "relu" else None
        options = {"eps": 1e-5, "relu": relu}
        given = {name: None if a is None else caller.put(a) for name, a in arrays.items()}
        return cls(arrays, options, caller.get(caller.forward(norm, **given, **options)))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_forward(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    caller, widths = computes
    for n in widths:
        forward = Forward.of(caller, norm, values_of(values, n, DTYPES[x]), fusion)
        testing.check_forward(norm, forward.result, **forward.arrays, **forward.options)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_backward(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    """The hard rows are those of x, and then those of dy."""
    caller, widths = computes
    for n in widths:
        normal = normal_of((ROWS, n), DTYPES[x], 4)
        of_dy = values_of(values, n, DTYPES[x], LARGEST if x == "float64" else LARGEST_OF_DY)
        for rows, dy in ((values_of(values, n, DTYPES[x]), normal), (normal, of_dy)):
            forward = Forward.of(caller, norm, rows, fusion)
            _, mean, rstd, bitmask, total, *_ = forward.result
            weight, known = forward.arrays["weight"], {"bias": norm == "layer_norm"}
            arrays = {"dy": dy, "x": rows if total is None else total, "weight": weight}
            arrays |= {"mean": mean, "rstd": rstd, "bitmask": bitmask}
            arrays["dresidual_out"] = None if total is None else normal
            given = {name: None if a is None else caller.put(a) for name, a in arrays.items()}
            result = caller.get(caller.backward(norm, **given, **known))
            testing.check_backward(norm, result, **arrays, **known)
