"""What the tests draw from: sizes, dtypes, values and memory layouts of one call.

Values come from a seed, so Hypothesis shrinks shapes and options but not numbers. A problem holds
NumPy arrays. `Problem.on` rebuilds the same layout with CuPy, stride by stride.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cupynorm.reference import Array, Norm, round_once

DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "float64": np.float64,
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
    }.items()
}

# Lengths around every power of two that a thread, a warp or a block may take at once, and odd ones
# in between. Rows longer than a block holds are left out: they are too slow to draw, and are tested
# by name.
WIDTHS = (
    *(1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 768, 769, 1000, 1023, 1024, 1025, 2048, 2050),
)
HEIGHTS = (0, 1, 2, 3, 7, 33)

# Bounds of a ReLU: exact in float32 and not, open to either side, and to both.
RELUS = ((0.0, 6.0), (-0.3, 0.7), (0.0, math.inf), (-math.inf, 0.1), (-math.inf, math.inf))

# How far a regime goes in each dtype. Squares of "huge" and "tiny" are in the range of the compute
# dtype. Squares of "extreme" and "minute" are not, except for float16, which has no such numbers.
SCALES = {
    "huge": {"float64": 1e100, "float32": 1e15, "float16": 1e4, "bfloat16": 1e15},
    "tiny": {"float64": 1e-100, "float32": 1e-15, "float16": 1e-4, "bfloat16": 1e-15},
    "extreme": {"float64": 1e200, "float32": 1e25, "float16": 1e4, "bfloat16": 1e25},
    "minute": {"float64": 1e-200, "float32": 1e-25, "float16": 1e-6, "bfloat16": 1e-25},
}
REGIMES = (
    *("normal", "mean_1e2", "mean_1e4", "mean_1e6", "mixed_rows", "mixed_elements"),
    *("odd_start", "zero_rows", "constant_rows", "nonfinite", *SCALES),
)


def make_values(regime: str, shape: tuple[int, ...], dtype: Any, seed: int, k: int = 1) -> Array:
    """Return values of a regime. A row is what the last k axes hold."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    kept = shape[: len(shape) - k] + (1,) * k
    values = rng.standard_normal(shape)
    some_rows = rng.random(kept) < 0.5
    if regime in SCALES:
        values *= SCALES[regime][dtype.name]
    elif regime.startswith("mean_"):
        # A narrow dtype needs a wider spread. Otherwise a row's elements would be a few values
        # only.
        mean = min(float(regime.removeprefix("mean_")), float(info.max) / 16)
        values = mean + values * (1 + 8 * float(info.eps) * mean)
    elif regime.startswith("mixed_"):
        decades = 2 if dtype == np.float16 else 8
        values *= 10 ** rng.uniform(-decades, decades, kept if regime == "mixed_rows" else shape)
    elif regime == "odd_start":  # the first elements say little about the row
        values = 100 + values
        values[..., :8] = 200
    elif regime == "zero_rows":
        values = np.where(some_rows, 0.0, values)
    elif regime == "constant_rows":
        decades = math.log10(SCALES["extreme"][dtype.name])
        constants = rng.standard_normal(kept) * 10 ** rng.uniform(-decades, decades, kept)
        values = np.where(some_rows, constants, values)
    elif regime == "infinities":  # at most one in each row
        n = math.prod(shape[len(shape) - k :])
        lone = np.arange(n) == rng.integers(0, n, (values.size // n, 1))
        infinity = np.copysign(np.inf, values)
        values = np.where(some_rows & lone.reshape(shape), infinity, values)
    elif regime == "nonfinite":
        planted = rng.choice([np.nan, np.inf, -np.inf], shape)
        values = np.where(some_rows & (rng.random(shape) < 0.01), planted, values)
    return round_once(values, dtype)


# Factors for normal x, dy and weight. With them products overflow float32 on the way to a dx that
# does not: g, its sums over a row, or both.
OVERFLOWS = ((1e30, 1e35, 1e3), (1e36, 1e36, 1e36), (1.0, 3e35, 1.0))


def scaled(values: Array, factor: float) -> Array:
    """Return values times a factor, clipped to what their dtype holds."""
    info: Any = ml_dtypes.finfo(values.dtype)  # type: ignore[no-untyped-call]
    product = values.astype(np.float64) * factor
    return round_once(np.clip(product, float(info.min), float(info.max)), values.dtype)


def largest_in_range(
    x: Array, dy: Array, weight: Array | None, *, k: int = 1, zero_centered: bool = False
) -> tuple[Array, Array, Array | None]:
    """Return x, dy and weight. In the first row only the last addition of dx overflows float32.

    g is 0 except in two places, where it is plus and minus the largest number. Its sum is 0, and
    xhat is alike in both places.
    """
    x, dy = x.copy(), dy.copy()
    n = math.prod(x.shape[x.ndim - k :])
    of_x, of_dy = (rows.reshape(-1, n)[0] for rows in (x, dy))
    of_x[...] = scaled(of_x, 4)
    of_x[[0, -1]] = 2, 2.5
    of_dy[...] = 0
    info: Any = ml_dtypes.finfo(dy.dtype)  # type: ignore[no-untyped-call]
    largest = min(float(info.max), float(np.finfo(np.float32).max))
    of_dy[[0, -1]] = largest, -largest
    if weight is not None:
        weight = weight.copy()
        weight.reshape(-1)[[0, -1]] = 0 if zero_centered else 1
    return x, dy, weight


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of an array lie in memory, counted in elements.

    Attributes
    ----------
    kind : str
        "rows": C order; "transposed": Fortran order; "columns": every second element of a row;
        "expanded": all rows are one row, of stride 0.
    k : int
        How many trailing axes make up a row.
    gap : int
        What is skipped between rows, as in a slice of a wider array.
    offset : int
        Where the first element is; anything odd leaves 16-byte alignment.
    """

    kind: str = "rows"
    k: int = 1
    gap: int = 0
    offset: int = 0

    def strides(self, shape: tuple[int, ...]) -> list[int]:
        if self.kind == "transposed":
            return [math.prod(shape[:axis]) for axis in range(len(shape))]
        strides, step = [], 2 if self.kind == "columns" else 1
        for axis in reversed(range(len(shape))):
            step += self.gap if axis == len(shape) - self.k - 1 else 0
            strides.append(0 if self.kind == "expanded" and axis < len(shape) - self.k else step)
            step *= shape[axis]
        return strides[::-1]

    def apply(self, xp: Any, values: Array) -> Any:
        """Return an array of module xp in this layout that holds the NumPy array values.

        The bytes travel as unsigned integers, so that xp need not know bfloat16 to copy it.
        """
        word = np.dtype(f"u{values.dtype.itemsize}")
        strides = self.strides(values.shape)
        last = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
        # NaN where nobody may read. A sanitizer takes a copy of some of 16 bytes for one of all.
        whole = -(-(self.offset + max(last, 0) + 1) * word.itemsize // 16) * 16
        base = np.full(whole // word.itemsize, 0xFF, word)
        byte_strides = [s * word.itemsize for s in strides]

        def view(module: Any, whole: Any) -> Any:
            tricks = module.lib.stride_tricks
            return tricks.as_strided(whole[self.offset :], values.shape, byte_strides)

        view(np, base)[...] = values.view(word)
        return view(xp, xp.asarray(base)).view(values.dtype)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of one forward and backward call."""

    norm: Norm
    k: int
    eps: float
    axis: tuple[int, ...] | None
    zero_centered: bool
    relu: tuple[float, float] | None
    out_dtype: np.dtype[Any]
    wants_dbias: bool
    regime: str
    seed: int
    layouts: dict[str, Layout]
    x: Array = dataclasses.field(repr=False)
    dy: Array = dataclasses.field(repr=False)
    weight: Array | None = dataclasses.field(repr=False)
    bias: Array | None = dataclasses.field(repr=False)
    description: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in ("x", "dy", "weight", "bias")}
        text = [f"{n} {a.dtype}{list(a.shape)}" for n, a in arrays.items() if a is not None]
        object.__setattr__(self, "description", ", ".join(text))

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that forward and backward share."""
        return {"axis": self.axis, "zero_centered": self.zero_centered}

    @property
    def forward_options(self) -> dict[str, Any]:
        """The keywords of forward."""
        alone = {"eps": self.eps, "out_dtype": self.out_dtype, "relu": self.relu}
        return self.options | alone

    @property
    def backward_bias(self) -> Any:
        """The bias argument of backward: the bias itself, or whether dbias is wanted."""
        return self.wants_dbias if self.bias is None else self.bias

    def on(self, xp: Any) -> dict[str, Any]:
        """Return x, dy, weight and bias as arrays of module xp, each in its layout."""
        arrays = {name: getattr(self, name) for name in ("x", "dy", "weight", "bias")}
        return {n: None if a is None else self.layouts[n].apply(xp, a) for n, a in arrays.items()}


def dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    return st.sampled_from(list(DTYPES.values()))


@st.composite
def layouts(draw: st.DrawFn, k: int, kinds: tuple[str, ...] = ("rows",)) -> Layout:
    """Draw a layout, plain in half of the cases."""
    if draw(st.booleans()):
        return Layout(k=k)
    kind = draw(st.sampled_from(kinds))
    return Layout(kind, k, gap=draw(st.sampled_from([0, 1, 8, 24])), offset=draw(st.integers(0, 9)))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Draw a shape, and the number of its trailing axes that are normalized."""
    rows: tuple[int, ...] = (draw(st.sampled_from(HEIGHTS)),)
    row: tuple[int, ...] = (draw(st.sampled_from(WIDTHS)),)
    rows = draw(st.sampled_from([rows, rows, (2, *rows), (1, *rows, 1), ()]))
    row = draw(st.sampled_from([row, row, row, (2, *row), (*row, 3)]))
    return rows + row, len(row)


@st.composite
def problems(
    draw: st.DrawFn,
    norms: tuple[Norm, ...] = ("rms_norm", "layer_norm"),
    regimes: tuple[str, ...] = REGIMES,
    broadcast: bool = False,
    x_dtypes: tuple[str, ...] = tuple(DTYPES),
) -> Problem:
    """Draw a problem. With `broadcast`, weight and bias may differ from row to row, of any axes."""
    norm = draw(st.sampled_from(norms))
    shape, k = draw(shapes())
    regime = draw(st.sampled_from(regimes))
    seed = draw(st.integers(0, 2**32 - 1))
    x_dtype = DTYPES[draw(st.sampled_from(x_dtypes))]
    dy_dtype, out_dtype = draw(dtypes()), draw(dtypes())
    weight_dtype = draw(st.none() | dtypes())
    bias_dtype = draw(st.none() | dtypes())
    weight_shape = bias_shape = shape[-k:]
    axis = tuple(range(-k, 0)) if k > 1 or draw(st.booleans()) else None
    order = list(range(len(shape)))  # of the axes of x
    if broadcast and axis is not None:
        order = draw(st.permutations(order))
        axis = tuple(order.index(place) for place in range(len(shape) - k, len(shape)))
        weight_shape = tuple(shape[i] if draw(st.booleans()) else 1 for i in order)
        bias_axes = order[draw(st.integers(0, len(order))) :]
        bias_shape = tuple(shape[i] if draw(st.booleans()) else 1 for i in bias_axes)
    kinds = ("rows", "transposed", "columns")
    where = {
        "x": draw(layouts(k, kinds)),
        "dy": draw(layouts(k, (*kinds, "expanded"))),
        "weight": draw(layouts(len(weight_shape))),
        "bias": draw(layouts(len(bias_shape))),
    }
    x = make_values(regime, shape, x_dtype, seed, k)
    dy_regime = draw(st.sampled_from(["normal", "mixed_rows"]))
    dy = where["dy"].apply(np, make_values(dy_regime, shape, dy_dtype, seed + 1, k))
    weight = weight_dtype and make_values("normal", weight_shape, weight_dtype, seed + 2)
    bias = bias_dtype and make_values("normal", bias_shape, bias_dtype, seed + 3)
    return Problem(
        norm=norm,
        k=k,
        eps=draw(_eps(norm, x, k)),
        axis=axis,
        zero_centered=weight_dtype is not None and draw(st.booleans()),
        relu=draw(st.none() | st.sampled_from(RELUS)),
        out_dtype=out_dtype,
        wants_dbias=draw(st.booleans()),
        regime=regime,
        seed=seed,
        layouts=where,
        x=where["x"].apply(np, x).transpose(order),
        dy=dy.transpose(order),
        weight=None if weight is None else where["weight"].apply(np, weight),
        bias=None if bias is None else where["bias"].apply(np, bias),
    )


def _eps(norm: Norm, x: Array, k: int) -> st.SearchStrategy[float]:
    """Draw eps. LayerNorm of equal values gets no 0: their variance is 0, or a rounding error."""
    rows = x.astype(np.float64).reshape(-1, math.prod(x.shape[-k:]))
    if norm == "layer_norm" and np.any(rows.min(axis=1) == rows.max(axis=1)):
        return st.sampled_from([1e-6, 1e-5, 1e-3])
    return st.sampled_from([1e-6, 1e-5, 1e-3, 0.0])
