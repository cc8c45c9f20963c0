"""Weights that vary over kept axes, and axes that are not the last, for NumPy arrays."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from axes import CALLS, EPS, RELU, arrays_of, axes_of, before_relu

import cupynorm
from cupynorm import NormBackward, NormForward, reference, testing
from cupynorm._layout.architectures import pack_length
from cupynorm._layout.strided import MOST_LANES

both_norms = pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
every_call = pytest.mark.parametrize("case", CALLS)
both_modules = pytest.mark.parametrize(
    "module", [cupynorm, reference], ids=["cupynorm", "reference"]
)

# Rows have at most 24 elements and arrays 144. Terms are of size 1 or so, and a few roundings apart
# in two programs that sum in different orders.
close = {"rtol": 0, "atol": 1e-12}


def run(
    module: ModuleType, norm: str, case: str, arrays: Any, **outputs: Any
) -> tuple[NormForward, NormBackward]:
    """Return both passes of a call with a residual and a relu."""
    x, weight, bias, residual, dy, of_total = arrays
    axis = CALLS[case][1]
    options = {"eps": EPS, "axis": axis, "relu": RELU, "residual": residual}
    forward = getattr(module, f"{norm}_forward")(x, weight, bias, **options)
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(module, f"{norm}_backward")(
        *(dy, forward.residual_out, weight, *statistics),
        **{"bias": False if bias is None else bias, "bitmask": forward.bitmask, "axis": axis},
        **{"dresidual_out": of_total, "dresidual_dtype": np.float32},
        **outputs,
    )
    return forward, backward


def summed(array: Any, like: Any) -> Any:
    """Return the gradient of an array that was broadcast."""
    padded = (1,) * (array.ndim - like.ndim) + like.shape
    repeated = tuple(i for i, n in enumerate(padded) if n == 1)
    return array.sum(repeated).reshape(like.shape)


@both_modules
@both_norms
@every_call
def test_results_are_those_of_plain_formulas(norm: str, case: str, module: ModuleType) -> None:
    arrays = arrays_of(case)
    x, weight, bias, residual, dy, of_total = arrays
    forward, backward = run(module, norm, case, arrays)
    axes, s = axes_of(case), x + residual
    centred = s - s.mean(axes, keepdims=True) if norm == "layer_norm" else s
    rstd = 1 / np.sqrt((centred**2).mean(axes, keepdims=True) + EPS)
    y = before_relu(np, norm, axes, s, weight, bias)
    inside = (RELU[0] < y) & (y < RELU[1])
    assert 0 < inside.sum() < inside.size
    np.testing.assert_array_equal(forward.residual_out, s)
    np.testing.assert_allclose(forward.y, np.clip(y, *RELU), **close)
    np.testing.assert_allclose(forward.rstd, rstd.squeeze(axes), **close)
    if norm == "layer_norm":
        np.testing.assert_allclose(forward.mean, s.mean(axes), **close)
    n = math.prod(x.shape[a] for a in axes)
    rows = np.moveaxis(inside, axes, range(-len(axes), 0)).reshape(*rstd.squeeze(axes).shape, n)
    np.testing.assert_array_equal(forward.bitmask, np.packbits(rows, -1, bitorder="little"))

    passed, xhat = dy * inside, centred * rstd
    g = passed * (1 if weight is None else weight)
    dx = g - xhat * (g * xhat).mean(axes, keepdims=True)
    dx = (dx - (g.mean(axes, keepdims=True) if norm == "layer_norm" else 0)) * rstd + of_total
    np.testing.assert_allclose(backward.dx, dx, **close)
    assert backward.dresidual.dtype == np.float32
    np.testing.assert_array_equal(backward.dresidual, backward.dx.astype(np.float32))
    for found, vector, gradient in (
        (backward.dweight, weight, passed * xhat),
        (backward.dbias, bias, passed),
    ):
        assert (found is None) == (vector is None)
        if vector is not None:
            np.testing.assert_allclose(found, summed(gradient, vector), **close)

    options = {"eps": EPS, "axis": CALLS[case][1], "relu": RELU, "residual": residual}
    inferred = getattr(module, norm)(x, weight, bias, **options)
    np.testing.assert_array_equal(inferred, (forward.y, forward.residual_out))


@both_modules
@both_norms
@every_call
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_expanded_weight_gives_the_same_bits(
    norm: str, case: str, dtype: str, module: ModuleType
) -> None:
    x, weight, bias, *others = arrays_of(case, dtype)
    whole = [None if a is None else np.broadcast_to(a, x.shape) for a in (weight, bias)]
    forward, backward = run(module, norm, case, (x, weight, bias, *others))
    wide_forward, wide_backward = run(module, norm, case, (x, *whole, *others))
    for name in NormForward._fields:
        np.testing.assert_array_equal(getattr(forward, name), getattr(wide_forward, name))
    for name in ("dx", "dresidual"):
        np.testing.assert_array_equal(getattr(backward, name), getattr(wide_backward, name))
    for name, vector in (("dweight", weight), ("dbias", bias)):
        if vector is not None:
            assert getattr(backward, name).shape == vector.shape
            assert getattr(wide_backward, name).shape == x.shape


@both_norms
@every_call
def test_the_checks_see_each_wrong_field(norm: Any, case: str) -> None:
    arrays = arrays_of(case, "float32")
    x, weight, bias, residual, dy, of_total = arrays
    forward, backward = run(cupynorm, norm, case, arrays)
    axis = CALLS[case][1]
    options: Any = {"eps": EPS, "axis": axis, "relu": RELU, "residual": residual}
    known: Any = {"bias": False if bias is None else bias, "bitmask": forward.bitmask, "axis": axis}
    known |= {"dresidual_out": of_total, "dresidual_dtype": np.float32}
    given = dy, forward.residual_out, weight, forward.mean, forward.rstd

    def check(forward: NormForward, backward: NormBackward) -> None:
        testing.check_forward(norm, forward, x, weight, bias, **options)
        testing.check_backward(norm, backward, *given, **known)

    check(forward, backward)
    testing.check_forward(norm, (forward.y, forward.residual_out), x, weight, bias, **options)
    for number, result in enumerate((forward, backward)):
        for name, array in result._asdict().items():
            if array is None:
                continue
            wrong = array.copy()
            wrong[(-1,) * array.ndim] += 1
            changed = [forward, backward]
            changed[number] = result._replace(**{name: wrong})
            with pytest.raises(AssertionError, match=name):
                check(*changed)
            changed[number] = result._replace(**{name: array[None]})
            shape = re.escape(str(array.shape))
            with pytest.raises(AssertionError, match=f"{name} must have shape {shape}, got"):
                check(*changed)


@both_modules
@both_norms
def test_outputs_that_are_given_are_returned(norm: str, module: ModuleType) -> None:
    arrays = arrays_of("channels")
    x, weight, bias, residual, *_ = arrays
    forward, backward = run(module, norm, "channels", arrays)
    out, total, dx = (np.full_like(x, 777) for _ in range(3))
    options = {"eps": EPS, "axis": 1, "relu": RELU, "residual": residual}
    again = getattr(module, f"{norm}_forward")(
        x, weight, bias, **options, out=out, residual_out=total
    )
    assert again.y is out
    assert again.residual_out is total
    np.testing.assert_array_equal(out, forward.y)
    np.testing.assert_array_equal(total, forward.residual_out)
    _, into = run(module, norm, "channels", arrays, dx=dx)
    assert into.dx is dx
    np.testing.assert_array_equal(dx, backward.dx)
    in_place = getattr(module, norm)(x, weight, bias, axis=1, eps=EPS, out=x)
    assert in_place is x


@both_modules
@both_norms
@pytest.mark.parametrize(
    ("axis", "shape"),
    [
        *((1, (6, 1, 1)), (None, (4,)), ((2, 3), (3, 4)), (0, (2, 1, 1, 1))),
        *(((0, 2), (2, 1, 3, 1)), ((1, 3), (6, 1, 4))),
    ],
)
def test_without_a_weight_dbias_broadcasts_from_the_normalized_axes(
    norm: str, axis: Any, shape: tuple[int, ...], module: ModuleType
) -> None:
    x, _, _, _, dy, _ = arrays_of("channels")
    forward = getattr(module, f"{norm}_forward")(x, axis=axis)
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(module, f"{norm}_backward")
    result = backward(dy, x, None, *statistics, bias=True, axis=axis)
    assert result.dbias.shape == shape
    np.testing.assert_allclose(result.dbias, summed(dy, np.empty(shape)), **close)
    given: Any = dy, x, None, forward.mean, forward.rstd
    testing.check_backward(norm, result, *given, bias=True, axis=axis)


def test_tiles_of_rows_side_by_side_are_counted_by_ints() -> None:
    _calls = pytest.importorskip("cupynorm._calls", exc_type=ImportError)
    rows = max(MOST_LANES.values()) * pack_length("bfloat16")
    assert _calls.MOST_ROWS_SIDE_BY_SIDE - 1 + rows - 1 < 2**31  # as strided.cuh rounds up
