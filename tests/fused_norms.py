"""Drawn expressions, and calls of the norms that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from strategies import DTYPES

import cupynorm
import cupynorm.math as cm
from cupynorm.reference import Array, round_once

Make = Callable[[dict[str, Any]], Any]  # from symbols by name to an expression

# Functions of one and two values. None leaves the range of float32 soon, or has a slope that does.
ONE = (
    *(cm.silu, cm.sigmoid, cm.softplus, cm.relu, cm.tanh, cm.erf, cm.gelu, cm.abs),
    *(lambda v: cm.gelu(v, "tanh"), lambda v: cm.clip(v, -0.75, 1.25), lambda v: -v),
    *(lambda v: cm.sqrt(1 + v * v), lambda v: cm.log(1 + v**2), lambda v: cm.exp(-v * v)),
    *(lambda v: 1 / (1 + v * v), lambda v: v**2 / 4, lambda v: 0.3 * v - 1),
    *(lambda v: (0.1 + v * v) ** 1.5, lambda v: 2**v, lambda v: v * cm.where(v > 0, 1, 0.1)),
    *(lambda v: v * 2 ** cm.where(v > 0, -1, 1), lambda v: cm.sqrt(cm.abs(v) + 0.01)),
)
TWO = (
    *(lambda v, w: v + w, lambda v, w: v - w, lambda v, w: v * w, cm.maximum, cm.minimum),
    *(lambda v, w: v / (2 + cm.tanh(w)), lambda v, w: cm.where(w > v, v, v * w)),
    *(lambda v, w: cm.where((w > 0) & ~(v <= 0.5), w, 2 * v), lambda v, w: (v - w) / 3),
    lambda v, w: (0.5 + v * v) ** cm.tanh(w),
)


def one(function: Any, of: Make) -> Make:
    return lambda symbols: function(of(symbols))


def two(function: Any, of: Make, other: Make) -> Make:
    return lambda symbols: function(of(symbols), other(symbols))


def expressions(names: tuple[str, ...]) -> st.SearchStrategy[Make]:
    leaves = st.sampled_from(names).map(lambda name: lambda symbols: symbols[name])
    return st.recursive(
        leaves,
        lambda made: st.one_of(
            st.builds(one, st.sampled_from(ONE), made),
            st.builds(two, st.sampled_from(TWO), made, made),
        ),
        max_leaves=5,
    )


def function_of(names: tuple[str, ...], makes: tuple[Make, ...]) -> Callable[..., Any]:
    """Return a function of arguments with these names, as a user would write it."""
    text = f"lambda {', '.join(names)}: body(dict({', '.join(f'{n}={n}' for n in names)}))"

    def body(symbols: dict[str, Any]) -> Any:
        made = tuple(make(symbols) for make in makes)
        return made if len(made) > 1 else made[0]

    return eval(text, {"body": body})  # type: ignore[no-any-return]


@dataclasses.dataclass
class Call:
    """A norm, and the NumPy arrays and options of a call of it."""

    fused: cupynorm.Fused
    x: Array
    weight: Array | None
    bias: Array | None
    options: dict[str, Any]
    inputs: dict[str, Any]

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays that a gradient may be taken of."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, **self.inputs}
        return {
            name: array
            for name, array in named.items()
            if isinstance(array, np.ndarray) and array.dtype != np.bool_
        }

    def of(self, fused: Any = None, convert: Any = lambda array: array, **arrays: Any) -> Any:
        """Call the norm, or a method of it. Arrays are converted, and those given take part."""
        named = {"x": self.x, "weight": self.weight, "bias": self.bias, **self.inputs} | arrays
        given = {n: convert(a) if isinstance(a, np.ndarray) else a for n, a in named.items()}
        x, weight, bias = (given.pop(name) for name in ("x", "weight", "bias"))
        return (fused or self.fused)(x, weight, bias, **self.options, **given)


SHAPES = ((3, 5), (2, 3, 8), (1, 33), (2, 2, 2, 4))


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Call:
    norm = draw(st.sampled_from(("rms_norm", "layer_norm")))
    before, after = ("x", "b", "a"), ("y", "x", "z", "a", "b")
    prologue = draw(st.none() | expressions(before))
    stored = draw(st.sampled_from(("", "value", "other"))) if prologue else ""
    makes = () if prologue is None else (prologue,)
    if stored == "value":
        makes = (*makes, *makes)
    elif stored:
        makes = (*makes, draw(expressions(before)))
    outputs = tuple(draw(st.lists(expressions(after), min_size=1, max_size=2)))
    fused = cupynorm.fuse(
        norm,
        prologue=function_of(before, makes) if makes else None,
        epilogue=function_of(after, outputs),
    )
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    axis = draw(st.sampled_from((-1, 0, (0, -1))))

    def array(of: tuple[int, ...]) -> Array:
        return round_once(rng.standard_normal(of), DTYPES[draw(st.sampled_from(dtypes))])

    def shape_in() -> tuple[int, ...]:
        ones = draw(st.sets(st.integers(0, len(shape) - 1)))
        kept = tuple(1 if i in ones else n for i, n in enumerate(shape))
        return kept[draw(st.integers(0, len(shape))) :] if kept[:1] == (1,) else kept

    inputs: dict[str, Any] = {"b": array(shape_in()), "z": array(shape)}
    inputs["a"] = draw(st.floats(-2, 2) | st.just(rng.integers(0, 2, shape).astype(bool)))
    inputs = {name: inputs[name] for name in fused.inputs}
    weight = array(shape_in()) if draw(st.booleans()) else None
    bias = array(shape_in()) if draw(st.booleans()) else None
    count = fused.count
    out = draw(st.none() | st.sampled_from(dtypes))
    return Call(
        fused,
        array(shape),
        weight,
        bias,
        {
            "axis": axis,
            "eps": draw(st.sampled_from((None, 1e-3))),
            "zero_centered": weight is not None and draw(st.booleans()),
            "out_dtype": out if count == 1 else (out,) + (None,) * (count - 1),
        },
        inputs,
    )
