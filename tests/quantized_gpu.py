"""What quantized norms are held to, and the checks of their kernels, on the host or on a GPU."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from host.gpu import Gpu, launched
from strategies import DTYPES, make_values

from cupynorm import Quantize, _quantize, reference
from cupynorm._compile import Instantiation

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALE = np.array([0.037], np.float32)
HOWS = (
    *(Quantize(dtype, scale) for dtype in (*FLOAT8, "int8") for scale in ("row", SCALE)),
    *(Quantize(dtype, "block", block=128, via=None) for dtype in (*FLOAT8, "int8")),
    *(Quantize(dtype, "block", block=32) for dtype in FLOAT8),
    Quantize("float8_e4m3fn", "row", via="bfloat16", scale_min=1e-3, scale_max=2e-3),
    Quantize("float8_e5m2", SCALE, via="float16"),
)
BY_COLUMN = (
    Quantize("float8_e4m3fn", "block", block=128, column_major=True),
    Quantize("int8", "block", block=128, via=None, column_major=True, amax=True),
)
AMAX = tuple(dataclasses.replace(how, amax=True) for how in HOWS)


def bits(array: Any) -> np.ndarray:
    """Return an array's bytes, all NaN alike."""
    if type(array).__module__ == "torch":
        array = array.detach().cpu()
        name = str(array.dtype).removeprefix("torch.")
        word = {1: "uint8", 2: "int16"}.get(array.itemsize)
        if word:
            array = array.view(getattr(importlib.import_module("torch"), word)).numpy()
            array = array.view(np.dtype(name))
    array = np.asarray(array)
    if array.dtype != np.int8:
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return np.ascontiguousarray(array)[..., None].view(np.uint8)


def same(actual: Any, expected: Any, name: str = "a result") -> None:
    assert str(actual.dtype).rpartition(".")[2] == str(expected.dtype).rpartition(".")[2]
    np.testing.assert_array_equal(bits(actual), bits(expected), f"bits of {name}")


def told_in(how: Quantize, convert: Callable[[np.ndarray], Any]) -> Quantize:
    return dataclasses.replace(how, scale=convert(how.scale)) if how.is_given else how


def by_oracle(how: Quantize, y: Any, axis: Any = None) -> tuple[np.ndarray, ...]:
    bounds = {"scale_min": how.scale_min, "scale_max": how.scale_max}
    result = reference.quantize(y, how.dtype, how.scale, block=how.block, axis=axis, **bounds)
    return (*result, reference.amax(y)) if how.amax else result


def boundaries(dtype: str) -> np.ndarray:
    """Return all numbers of a dtype, the middles between them, and what lies next to each."""
    numbers = reference.numbers_of(np.dtype(dtype))
    exact = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [numbers[-1] * 1.0625]])
    exact = np.concatenate([exact, -exact]).astype(np.float32)
    around = [np.nextafter(exact, np.float32(end)) for end in (np.inf, -np.inf)]
    return np.concatenate([exact, *around, np.float32([1e30, 1e-30, np.inf, -np.inf, np.nan])])


# ---- kernels -------------------------------------------------------------------------------------

# How a row is shared: a part of a warp, a warp, several warps, and their last packs past its end.
_KERNELS = (
    *((how, "bfloat16", 1024, None) for how in HOWS),
    (HOWS[1], "float16", 128, None),
    *((HOWS[0], "float16", n, None) for n in (4096, 1000, 5000)),
    (HOWS[0], "float32", 2048, None),
    (HOWS[5], "float32", 1000, "float32"),
    (HOWS[6], "bfloat16", 5000, "float32"),
    (HOWS[8], "float16", 1032, "float16"),  # a block begins behind the end
    (HOWS[7], "bfloat16", 128, "bfloat16"),
    (HOWS[0], "float16", 300, None),  # two rows share a warp
    *((AMAX[i], "bfloat16", n, None) for i, n in ((1, 4096), (3, 128), (9, 1024))),
    (AMAX[0], "float16", 300, None),
    (AMAX[6], "float16", 1032, "float32"),
    (AMAX[5], "float32", 2048, "float32"),
    *((BY_COLUMN[i % 2], "bfloat16", n, None) for i, n in enumerate((1024, 5000, 128))),
    (BY_COLUMN[1], "float16", 1032, "float32"),
)
QUANTIZED = {
    f"quantized {i}, {how.dtype} by {how.block or ('scale' if how.is_given else 'row')}, {x} {n}": i
    for i, (how, x, n, _) in enumerate(_KERNELS)
}


@dataclasses.dataclass
class Results:
    """What one call gives: its plain pass, quantized inference, quantized training."""

    y: np.ndarray
    totals: list[np.ndarray]
    q: np.ndarray
    scale: np.ndarray
    others: list[np.ndarray]
    stored: Any
    plain: Any


def run(gpu: Gpu, name: str) -> Results:
    i = QUANTIZED[name]
    how, dtype, n, of_residual = _KERNELS[i]
    norm = ("rms_norm", "layer_norm")[i % 2]
    with gpu.fresh_memory():
        put = gpu.cupy.array
        values = make_values("nonfinite", (5, n), DTYPES[dtype], i)
        values[2] += DTYPES[dtype].type(50)  # so that zeros past the end are far from the mean
        values[3] = 0
        x = put(values)
        weight, bias = put(make_values("normal", (n,), np.float32, 8)), None
        if norm == "layer_norm":
            bias = put(make_values("normal", (n,), DTYPES[dtype], 9))
        options: dict[str, Any] = {"eps": 1e-5, "zero_centered": i % 3 == 0}
        if of_residual:
            options["residual"] = put(make_values("normal", (5, n), DTYPES[of_residual], 10))
        via = _quantize.dtype_of_y(how, x, options.get("residual", x).dtype)
        y = gpu.forward(norm, x, weight, bias, **options, out_dtype=via, store_statistics=False)
        y, *totals = map(gpu.to_numpy, y if of_residual else (y,))
        told = {**options, "quantize": told_in(how, put)}
        made = gpu.quantized(norm, x, weight, bias, **told)
        q, scale, *others = map(gpu.to_numpy, made)
        if how.column_major:
            assert made[1].strides == (4, 4 * 8)  # of 5 rows
        stored = gpu.to_numpy(gpu.quantized(norm, x, weight, bias, **told, training=True))
        plain = gpu.to_numpy(gpu.forward(norm, x, weight, bias, **options))
    return Results(y, totals, q, scale, others, stored, plain)


def kernels_of(name: str, *, few_rows: bool = False) -> list[Instantiation]:
    return launched(lambda gpu: run(gpu, name), few_rows=few_rows)


def check_quantized_kernel(gpu: Gpu, name: str) -> None:
    """Check a kernel on the host: q and scales as the oracle has them, of the y of a plain pass."""
    how, *_ = _KERNELS[QUANTIZED[name]]
    of = run(gpu, name)
    if how.amax:
        same(of.stored.amax, of.others[0], "amax")
    for actual, expected in ((of.stored.y, of.q), (of.stored.scale, of.scale)):
        of_bytes = (np.ascontiguousarray(array).view(np.uint8) for array in (actual, expected))
        np.testing.assert_array_equal(*of_bytes)
    for field in ("mean", "rstd"):
        np.testing.assert_array_equal(getattr(of.stored, field), getattr(of.plain, field))
    exact_q, exact_scale, *exact = by_oracle(how, of.y)
    same(of.scale.view(exact_scale.dtype), exact_scale, "scale")
    same(of.q.view(how.dtype), exact_q, "q")
    for other, expected in zip(of.others, (*exact, *of.totals), strict=True):
        same(other, expected, "amax or the sum")


def as_y(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield rows of 4096 weights: y is the weight where x is 1 and eps 0."""
    for first in range(0, len(values), 4096):
        yield np.pad(values[first : first + 4096], (0, max(0, first + 4096 - len(values))))


def check_each_number(quantized: Callable[..., Any], dtype: str, source: str) -> None:
    """Check a static scale on each number of a source: exact quotients, and those next to them."""
    if source == "boundaries":
        values = boundaries(dtype)
    else:
        values = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[source])
    wide = values.astype(np.float32)
    values[(wide != 0) & (abs(wide) < 2.0**-126)] = 0  # as GPUs take them
    x = np.ones((1, 4096), np.float32)
    via = None if source == "boundaries" else source
    # With the first ones a product with the reciprocal gives other codes of some bfloat16 numbers.
    wrong = [float.fromhex(f"0x1.{digits}") for digits in ("030c30", "042c86", "0469ee", "05ed0a")]
    odd = 0, np.inf, -np.inf, np.nan, 2.0**-100, -1.9 * 2.0**127
    near = (np.float32(1.5).view(np.int32) + np.int32([-9, -1, 0, 1, 2, 9])).view(np.float32)
    for scale in (*np.float32([*wrong, 0.037, -3, 2.0**-70, 2.0**70, *odd]), *near):
        with np.errstate(all="ignore"):
            product = (values.astype(np.float32) * scale).astype(values.dtype)
        for weight in as_y(product if source == "boundaries" and 0 < abs(scale) < 8 else values):
            how = Quantize(dtype, scale.reshape(1), via=via)
            q = quantized(x, weight, how)
            same(q.view(dtype), by_oracle(how, weight.astype(np.float32)[None])[0], "q")


def on_host(gpu: Gpu) -> Callable[[np.ndarray, np.ndarray, Quantize], np.ndarray]:
    """Return what quantizes for `check_each_number` by a kernel on the host."""

    def quantized(x: np.ndarray, weight: np.ndarray, how: Quantize) -> np.ndarray:
        put = gpu.cupy.array
        with gpu.fresh_memory():
            how = told_in(how, put)
            result = gpu.quantized("rms_norm", put(x), put(weight), eps=0.0, quantize=how)
            return np.array(gpu.to_numpy(result[0]))

    return quantized
