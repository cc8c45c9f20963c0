"""Hard rows, in each dtype, norm, pass and fusion, within the bound of `cupynorm.testing`.

A table says what a row is. NumPy computes it everywhere, and the kernels where there is a GPU.
Some fusions meet every row in every dtype. The others take turns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import to_cupy, to_numpy
from residuals import OfCupyNorm
from strategies import DTYPES, make_values

import cupynorm
import cupynorm.math as cm
from cupynorm import Quantize, testing
from cupynorm._fuse import Given
from cupynorm.reference import Array, round_once

NORMS = ("rms_norm", "layer_norm")
ROWS = 3
# Parts of a warp, whole warps, and shared memory of clusters.
LARGEST = 2.0**900  # of float64, since the bound is computed in float64 too
# Three rows of these add up to a weight gradient in float32: |xhat| is at most sqrt(20480).
LARGEST_OF_DY = 2.0**118
# Of x and dy of a norm of `cupynorm.fuse`: rstd is no subnormal number, and docs/fuse.md.
LARGEST_OF_FUSED = 2.0**110, 2.0**80
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


PLAIN = ("none", "residual", "relu")
QUANTIZED = {
    "quantized by a given scale": Quantize("float8_e4m3fn", np.float32([0.037]), amax=True),
    "quantized by rows": Quantize("int8", "row"),
    "quantized by blocks of 128": Quantize("float8_e4m3fn", "block", block=128, via=None),
    "quantized by blocks of 32": Quantize("float8_e5m2", "block", block=32),
}
IN_TURN = ("zero_centered", "a weight for each row", "gate", *QUANTIZED)
GATED = {norm: cupynorm.fuse(norm, epilogue=lambda y, z: y * cm.silu(z)) for norm in NORMS}


def every_row(*fusions: str) -> Any:
    """Let a test have each row with those fusions that are plain or whose turn it is."""

    def cases() -> Iterator[Any]:
        of_all = (enumerate(names) for names in (NORMS, DTYPES, VALUES))
        for (i, norm), (j, x), (k, values) in itertools.product(*of_all):
            # Each kind of rows meets each fusion.
            turn = IN_TURN[(4 * i + j + k) % len(IN_TURN)]
            for fusion in fusions:
                if fusion in (*PLAIN, turn):
                    yield pytest.param(norm, x, values, fusion, id=f"{norm}-{x}-{values}-{fusion}")

    return pytest.mark.parametrize(("norm", "x", "values", "fusion"), [*cases()])


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass on rows x: its arguments by name, and its result as NumPy arrays."""

    arrays: dict[str, Array | None]
    options: dict[str, Any]
    result: Any

    @classmethod
    def of(cls, caller: Any, norm: str, x: Array, fusion: str) -> Forward:
        of_vectors = x.shape if fusion == "a weight for each row" else x.shape[-1:]
        arrays = {
            "x": x,
            "weight": normal_of(of_vectors, np.float32, 1),
            "bias": normal_of(of_vectors, np.float32, 2) if norm == "layer_norm" else None,
            "residual": normal_of(x.shape, x.dtype, 3) if fusion == "residual" else None,
        }
        relu = (-0.5, 0.75) if fusion == "relu" else None
        options = {"eps": 1e-5, "relu": relu, "zero_centered": fusion == "zero_centered"}
        given = {name: None if a is None else caller.put(a) for name, a in arrays.items()}
        return cls(arrays, options, caller.get(caller.forward(norm, **given, **options)))


@every_row(*PLAIN, "zero_centered", "a weight for each row")
def test_forward(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    caller, widths = computes
    for n in widths:
        forward = Forward.of(caller, norm, values_of(values, n, DTYPES[x]), fusion)
        testing.check_forward(norm, forward.result, **forward.arrays, **forward.options)


def rows_and_gradients(
    values: str, x: str, n: int, largest: tuple[float, float] = (LARGEST, LARGEST_OF_DY)
) -> Iterator[tuple[Array, Array]]:
    """Yield x and dy. The hard rows are those of x, and then those of dy."""
    dtype = DTYPES[x]
    of_x, of_dy = (LARGEST, LARGEST) if x == "float64" else largest
    normal = normal_of((ROWS, n), dtype, 4)
    yield values_of(values, n, dtype, of_x), normal
    yield normal, values_of(values, n, dtype, of_dy)


@every_row(*PLAIN, "zero_centered", "a weight for each row")
def test_backward(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    caller, widths = computes
    for n in widths:
        for rows, dy in rows_and_gradients(values, x, n):
            forward = Forward.of(caller, norm, rows, fusion)
            _, mean, rstd, bitmask, total, *_ = forward.result
            weight, bias = forward.arrays["weight"], forward.arrays["bias"]
            arrays = {"dy": dy, "x": rows if total is None else total, "weight": weight}
            arrays |= {"mean": mean, "rstd": rstd, "bitmask": bitmask}
            of_total = None if total is None else normal_of((ROWS, n), DTYPES[x], 4)
            arrays |= {"dresidual_out": of_total, "bias": False if bias is None else bias}
            zero_centered = fusion == "zero_centered"
            given = {
                n: caller.put(a) if isinstance(a, np.ndarray) else a for n, a in arrays.items()
            }
            result = caller.get(caller.backward(norm, **given, zero_centered=zero_centered))
            testing.check_backward(norm, result, **arrays, zero_centered=zero_centered)


@every_row("gate")
def test_gated(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    """A norm of `cupynorm.fuse`, forward and backward."""
    caller, widths = computes
    fused = GATED[norm]
    for n in widths:
        for rows, dy in rows_and_gradients(values, x, n, LARGEST_OF_FUSED):
            weight, z = normal_of((n,), np.float32, 1), normal_of(rows.shape, DTYPES[x], 5)
            given = [caller.put(array) for array in (rows, weight, z, dy)]
            forward = fused.forward(*given[:2], z=given[2], eps=1e-5)
            found = fused.backward(given[3], forward)
            gradients = type(found)(*(None if a is None else caller.get(a) for a in found))
            y = caller.get(forward.y)
            testing.check_fused(fused, y, rows, weight, z=z, eps=1e-5)
            host = forward._replace(outputs=(y,), given=Given(rows, weight, None, {"z": z}))
            testing.check_fused_backward(fused, gradients, dy, host)


@every_row(*QUANTIZED)
def test_quantized(norm: Any, x: str, values: str, fusion: str, computes: Any) -> None:
    caller, widths = computes
    how = QUANTIZED[fusion]
    told = dataclasses.replace(how, scale=caller.put(how.scale)) if how.is_given else how
    for n in widths:
        arrays = {"x": values_of(values, n, DTYPES[x]), "weight": normal_of((n,), np.float32, 1)}
        given = {name: caller.put(array) for name, array in arrays.items()}
        result = tuple(map(caller.get, caller.infer(norm, **given, eps=1e-5, quantize=told)))
        testing.check_quantized(norm, result, **arrays, eps=1e-5, quantize=how)
