"""The comparison itself: it must pass a careful kernel and fail every careless one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import emulation
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, REGIMES, WIDTHS, dtypes, make_values

import cupynorm
from cupynorm import math as cm
from cupynorm import reference
from cupynorm._operation import Norm, NormBackward, NormForward
from cupynorm.reference import Array
from cupynorm.testing import (
    assert_one_rounding,
    check_backward,
    check_forward,
    check_fused,
    check_fused_backward,
)

NORMS: tuple[Norm, ...] = ("rms_norm", "layer_norm")
both_norms = pytest.mark.parametrize("norm", NORMS)


# ---- a careful kernel passes ---------------------------------------------------------------------


@both_norms
@pytest.mark.parametrize("regime", REGIMES)
@given(
    st.tuples(*[dtypes()] * 5),
    st.integers(1, 9),
    st.sampled_from(WIDTHS),
    st.sampled_from([0.0, 1e-6, 1e-5, 1e-3]),
    st.booleans(),
    st.sampled_from(["normal", "mixed_rows", "tiny"]),
    st.integers(0, 2**32 - 1),
)
def test_a_careful_kernel_passes(
    norm: Norm,
    regime: str,
    types: tuple[Any, ...],
    m: int,
    n: int,
    eps: float,
    zero_centered: bool,
    dy_regime: str,
    seed: int,
) -> None:
    x_type, weight_type, bias_type, dy_type, out_type = types
    x = make_values(regime, (m, n), x_type, seed)
    dy = make_values(dy_regime, (m, n), dy_type, seed + 1)
    weight = make_values("normal", (n,), weight_type, seed + 2)
    bias = make_values("normal", (n,), bias_type, seed + 3)
    wide = x.astype(np.float64)
    if norm == "layer_norm" and np.any(wide.min(axis=1) == wide.max(axis=1)):
        eps = max(eps, 1e-6)  # with an eps of 0, equal values have no LayerNorm
    options: Any = {"eps": eps, "zero_centered": zero_centered, "out_dtype": out_type}
    forward = emulation.forward(norm, x, weight, bias, **options)
    check_forward(norm, forward, x, weight, bias, **options)
    backward = emulation.backward(
        norm,
        dy,
        x,
        weight,
        forward.mean,
        forward.rstd,
        dbias=bias_type,
        zero_centered=zero_centered,
    )
    check_backward(
        norm,
        backward,
        dy,
        x,
        weight,
        forward.mean,
        forward.rstd,
        bias=bias,
        zero_centered=zero_centered,
    )


@both_norms
@pytest.mark.parametrize("regime", ["normal", "mean_1e6", "constant_rows"])
def test_a_careful_kernel_passes_on_the_longest_rows(norm: Norm, regime: str) -> None:
    x = make_values(regime, (3, 262_144), "float32", 0)
    forward = emulation.forward(norm, x, None, None, eps=1e-6)
    check_forward(norm, forward, x, eps=1e-6)


# ---- a careless one does not ---------------------------------------------------------------------

# bug: (norms, regime, dtype of x, dtype of y, eps)
FORWARD_BUGS: dict[str, tuple[tuple[Norm, ...], str, str, str, float]] = {
    "n_minus_1": (NORMS, "normal", "float32", "float32", 1e-6),
    "last_dropped": (NORMS, "normal", "float32", "float32", 1e-6),
    "last_8_dropped": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "last_32nd_dropped": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "eps_omitted": (NORMS, "tiny", "bfloat16", "bfloat16", 1e-6),
    "eps_1e-5_for_1e-6": (NORMS, "zero_rows", "float32", "float32", 1e-6),
    "rstd_rounded_early": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "xhat_rounded_early": (NORMS, "normal", "float16", "float16", 1e-6),
    "one_pass_variance": (("layer_norm",), "mean_1e2", "float32", "float16", 1e-5),
    "not_recentred": (("layer_norm",), "mean_1e6", "float32", "float32", 1e-5),
    "weight_shifted": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "zero_centered_mistaken": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "bias_missing": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "last_column_unwritten": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "rows_swapped": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "one_nan": (NORMS, "normal", "bfloat16", "bfloat16", 1e-6),
    "nan_dropped": (NORMS, "nonfinite", "float32", "float32", 1e-6),
    "infinity_clamped": (NORMS, "normal", "float32", "float16", 1e-6),
}


@pytest.mark.parametrize("n", [768, 4096])
@pytest.mark.parametrize(
    ("bug", "norm"), [(bug, norm) for bug, (norms, *_) in FORWARD_BUGS.items() for norm in norms]
)
def test_a_careless_forward_is_killed(bug: str, norm: Norm, n: int) -> None:
    _, regime, x_type, y_type, eps = FORWARD_BUGS[bug]
    x = make_values(regime, (33, n), x_type, 0)
    weight = make_values("normal", (n,), "float32", 1)
    bias = make_values("normal", (n,), "float32", 2)
    if bug == "infinity_clamped":
        weight *= np.float32(1e6)
    if bug == "xhat_rounded_early":
        bias *= np.float32(1e-3)
    options: Any = {"eps": eps, "out_dtype": DTYPES[y_type]}
    right = emulation.forward(norm, x, weight, bias, **options)
    check_forward(norm, right, x, weight, bias, **options)
    wrong = emulation.forward(norm, x, weight, bias, bug=bug, **options)
    # For y alone. Statistics do not show in a forward pass for inference.
    with pytest.raises(AssertionError, match="y"):
        check_forward(norm, wrong.y, x, weight, bias, **options)


BACKWARD_BUGS: dict[str, tuple[tuple[Norm, ...], str, str]] = {
    "n_minus_1": (NORMS, "normal", "float32"),
    "last_dropped": (NORMS, "normal", "float32"),
    "last_8_dropped": (NORMS, "normal", "bfloat16"),
    "last_32nd_dropped": (NORMS, "normal", "bfloat16"),
    "slope_missing": (NORMS, "normal", "bfloat16"),
    "mean_of_g_missing": (("layer_norm",), "normal", "bfloat16"),
    "rstd_missing": (NORMS, "mixed_rows", "bfloat16"),
    "weight_shifted": (NORMS, "normal", "bfloat16"),
    "zero_centered_mistaken": (NORMS, "normal", "bfloat16"),
    "xhat_rounded_early": (NORMS, "normal", "bfloat16"),
    "not_recentred": (("layer_norm",), "mean_1e6", "float32"),
    "row_missing": (NORMS, "normal", "bfloat16"),
    "sums_in_16_bits": (NORMS, "normal", "bfloat16"),
    "dweight_of_dy": (NORMS, "normal", "bfloat16"),
    "dbias_shifted": (NORMS, "normal", "bfloat16"),
}


@pytest.mark.parametrize("n", [768, 4096])
@pytest.mark.parametrize(
    ("bug", "norm"), [(bug, norm) for bug, (norms, *_) in BACKWARD_BUGS.items() for norm in norms]
)
def test_a_careless_backward_is_killed(bug: str, norm: Norm, n: int) -> None:
    _, regime, x_type = BACKWARD_BUGS[bug]
    x = make_values(regime, (33, n), x_type, 0)
    dy = make_values("normal", (33, n), x_type, 1)
    # A mean in g makes it not orthogonal to 1. LayerNorm removes that part.
    weight = 1 + make_values("normal", (n,), "float32", 2)
    _, mean, rstd, *_ = emulation.forward(norm, x, weight, None, eps=1e-6)
    given: Any = (dy, x, weight, mean, rstd)
    right = emulation.backward(norm, *given, dbias=weight.dtype)
    check_backward(norm, right, *given, bias=True)
    wrong = emulation.backward(norm, *given, dbias=weight.dtype, bug=bug)
    with pytest.raises(AssertionError):
        check_backward(norm, wrong, *given, bias=True)


@pytest.mark.parametrize("field", ["dx", "dweight", "dbias"])
@pytest.mark.parametrize("planted", [np.nan, np.inf, 0.0])
def test_one_wrong_element_of_a_backward_is_found(field: str, planted: float) -> None:
    x, dy = (make_values("normal", (33, 65), "float32", seed) for seed in (0, 1))
    weight = make_values("normal", (65,), "float32", 2)
    _, mean, rstd, *_ = reference.layer_norm_forward(x, weight)
    result = reference.layer_norm_backward(dy, x, weight, mean, rstd)
    getattr(result, field)[..., -1] = planted
    with pytest.raises(AssertionError, match=field):
        check_backward("layer_norm", result, dy, x, weight, mean, rstd, bias=True)


# ---- norms of cupynorm.fuse ----------------------------------------------------------------------

GATED = {
    "last": {"epilogue": lambda y, z: y * cm.silu(z)},
    "first": {"prologue": lambda x, z: x * cm.silu(z)},
    "first, and stored": {"prologue": lambda x, z: (x * cm.silu(z), x * cm.silu(z))},
}


@both_norms
@pytest.mark.parametrize("gate", GATED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_with_an_infinity_have_exact_zeros_and_nan(norm: Norm, gate: str, dtype: str) -> None:
    x, z, dy = (make_values("normal", (3, 8), dtype, seed) for seed in (0, 1, 2))
    weight = make_values("normal", (8,), "float32", 3)
    x[0, 3], x[1, 5] = np.inf, -np.inf
    fused = cupynorm.fuse(norm, **GATED[gate])
    forward = fused.forward(x, weight, z=z)
    gradients = fused.backward([dy] * fused.count, forward)
    ratios = check_fused(fused, forward.outputs, x, weight, z=z)
    assert check_fused(fused, forward, x, weight, z=z) == ratios
    check_fused_backward(fused, gradients, [dy] * fused.count, forward)
    is_rms = norm == "rms_norm"
    expected = np.where(np.arange(8) == 3, np.nan, 0.0 if is_rms else np.nan)
    np.testing.assert_array_equal(np.abs(forward.y[0]), expected)
    for place, planted in ((0, 1e-30), (0, np.nan if is_rms else 0.0), (3, 0.0), (3, np.inf)):
        wrong = forward.y.copy()
        wrong[0, place] = planted
        with pytest.raises(AssertionError, match=r"output 0\[0, "):
            check_fused(fused, (wrong, *forward.outputs[1:]), x, weight, z=z)


# ---- shapes, dtypes, fields ----------------------------------------------------------------------

X = make_values("normal", (4, 6), "float32", 0)
Y, MEAN, RSTD, *_ = reference.layer_norm_forward(X, eps=1e-6)
SQUARE_RSTD = reference.rms_norm_forward(X).rstd


@pytest.mark.parametrize(
    ("norm", "result", "message"),
    [
        ("layer_norm", Y[:, :-1], "y must have shape"),
        ("layer_norm", Y.astype(np.float64), "y must have dtype"),
        ("layer_norm", NormForward(Y, None, RSTD), "mean must not be None"),
        ("layer_norm", NormForward(Y, MEAN, None), "rstd must not be None"),
        ("layer_norm", NormForward(Y, MEAN[:, None], RSTD), "mean must have shape"),
        ("layer_norm", NormForward(Y, MEAN, RSTD.astype(np.float16)), "rstd must have dtype"),
        ("layer_norm", NormForward(Y, MEAN, RSTD, MEAN), "bitmask must be None"),
        ("rms_norm", NormForward(reference.rms_norm(X), MEAN, SQUARE_RSTD), "mean must be None"),
        ("rms_norm", Y, "y"),
        ("layer_norm", NormForward(Y, MEAN, SQUARE_RSTD), "rstd"),
        ("layer_norm", NormForward(Y, RSTD, RSTD), "mean"),
    ],
)
def test_a_wrong_forward_result_is_refused(
    norm: Norm, result: NormForward | Array, message: str
) -> None:
    check_forward("layer_norm", NormForward(Y, MEAN, RSTD), X, eps=1e-6)
    with pytest.raises(AssertionError, match=message):
        check_forward(norm, result, X, eps=1e-6)


def test_a_wrong_backward_result_is_refused() -> None:
    dx, dweight, dbias, _ = reference.rms_norm_backward(X, X, X[0], SQUARE_RSTD, bias=True)

    def check(result: NormBackward, bias: bool = True) -> None:
        check_backward("rms_norm", result, X, X, X[0], None, SQUARE_RSTD, bias=bias)

    check(NormBackward(dx, dweight, dbias))
    with pytest.raises(AssertionError, match="dbias must be None"):
        check(NormBackward(dx, dweight, dbias), bias=False)
    with pytest.raises(AssertionError, match="dbias must not be None"):
        check(NormBackward(dx, dweight, None))
    with pytest.raises(AssertionError, match="dweight must have dtype float32"):
        check(NormBackward(dx, dweight.astype(np.float64), dbias))


RELU = (-0.5, 0.25)
CLAMPED = reference.layer_norm_forward(X, eps=1e-6, relu=RELU)


def clamped(**changes: Any) -> NormForward:
    return CLAMPED._replace(**changes)


def with_bit(row: int, column: int) -> Array:
    """Return the bitmask with one bit inverted."""
    bitmask = CLAMPED.bitmask.copy()
    bitmask[row, 0] ^= 1 << column
    return bitmask


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (clamped(bitmask=None), "bitmask must not be None"),
        (clamped(bitmask=CLAMPED.bitmask[:, 0]), "bitmask must have shape"),
        (clamped(bitmask=CLAMPED.bitmask.view(np.int8)), "bitmask must have dtype"),
        (
            clamped(bitmask=with_bit(2, 5)),
            r"bitmask\[2\] has 1 wrong bits .* that of column 5, is ",
        ),
        (clamped(bitmask=with_bit(0, 6)), r"bitmask\[0\] .* a spare one, is 1"),
        (clamped(bitmask=~CLAMPED.bitmask), "bitmask"),
        (clamped(y=Y), r"y\[.* times the bound"),
        (clamped(y=np.clip(Y, -0.5, 0.2500001)), r"y\[.* exactly 0.25"),
        (clamped(y=np.where(Y > 0.25, np.nextafter(np.float32(0.25), 1), CLAMPED.y)), "y"),
    ],
)
def test_a_wrong_relu_is_refused(result: NormForward, message: str) -> None:
    check_forward("layer_norm", CLAMPED, X, eps=1e-6, relu=RELU)
    check_forward("layer_norm", CLAMPED.y, X, eps=1e-6, relu=RELU)
    with pytest.raises(AssertionError, match=message):
        check_forward("layer_norm", result, X, eps=1e-6, relu=RELU)
    with pytest.raises(AssertionError, match="bitmask must be None"):
        check_forward("layer_norm", CLAMPED, X, eps=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_only_bits_that_rounding_may_decide_are_free(exact: bool) -> None:
    y64 = reference.forward_float64(
        "layer_norm", X, None, None, k=1, eps=1e-6, zero_centered=False
    ).y
    bound = np.float32(y64[1, 3])
    if not exact:
        bound += np.float32(1e-5)  # float32's rounding does not reach it
    relu = (float(bound), np.inf)
    right = reference.layer_norm_forward(X, eps=1e-6, relu=relu)
    inverted = right.bitmask.copy()
    inverted[1, 0] ^= 1 << 3
    check_forward("layer_norm", right, X, eps=1e-6, relu=relu)
    if exact:
        check_forward("layer_norm", right._replace(bitmask=inverted), X, eps=1e-6, relu=relu)
        return
    with pytest.raises(AssertionError, match="that of column 3"):
        check_forward("layer_norm", right._replace(bitmask=inverted), X, eps=1e-6, relu=relu)


@pytest.mark.parametrize("field", ["dx", "dweight", "dbias"])
def test_gradients_of_an_unmasked_dy_are_refused(field: str) -> None:
    arguments = (X, X, X[0], CLAMPED.mean, CLAMPED.rstd)
    right = reference.layer_norm_backward(*arguments, bitmask=CLAMPED.bitmask)
    check_backward("layer_norm", right, *arguments, bias=True, bitmask=CLAMPED.bitmask)
    whole = reference.layer_norm_backward(*arguments)
    wrong = right._replace(**{field: getattr(whole, field)})
    with pytest.raises(AssertionError, match=field):
        check_backward("layer_norm", wrong, *arguments, bias=True, bitmask=CLAMPED.bitmask)


# ---- many rows -----------------------------------------------------------------------------------


@both_norms
def test_rows_in_chunks_are_rows_at_once(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = (make_values("normal", (3, 11, 2, 8), "bfloat16", seed) for seed in (0, 1))
    weight = make_values("normal", (2, 8), "float32", 2)
    axis = (-2, -1)
    options: Any = {"eps": 1e-6, "relu": (0, 6), "axis": axis}
    forward = getattr(reference, f"{norm}_forward")(x, weight, **options)
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(reference, f"{norm}_backward")(
        dy, x, weight, *statistics, bias=True, bitmask=forward.bitmask, axis=axis
    )

    def ratios() -> list[float]:
        found = check_forward(norm, forward, x, weight, **options)
        found |= check_backward(
            norm,
            backward,
            dy,
            x,
            weight,
            forward.mean,
            forward.rstd,
            bias=True,
            bitmask=forward.bitmask,
            axis=axis,
        )
        return list(found.values())

    at_once = ratios()
    monkeypatch.setattr("cupynorm.testing.CHUNK_ELEMENTS", 5 * 16)
    # dweight and dbias are added in another order, in float64.
    np.testing.assert_allclose(ratios(), at_once, rtol=1e-6)
    forward.y[2, 1, 0, 3] = np.nan
    with pytest.raises(AssertionError, match=r"y\[20:\]\[3, 0, 3\]"):
        check_forward(norm, forward, x, weight, **options)


# ---- one element ---------------------------------------------------------------------------------


def ratio(actual: Any, exact: float, magnitude: float = 0.0, compute: Any = np.float32) -> float:
    values = np.array([exact]), np.array([magnitude])
    return assert_one_rounding(np.array([actual]), *values, compute, "value")


def is_refused(*args: Any) -> bool:
    try:
        ratio(*args)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 23), ("float16", 10), ("bfloat16", 7)])
@pytest.mark.parametrize("exponent", [-9, 0, 3])
def test_half_a_unit_in_the_last_place_is_the_bound(dtype: str, digits: int, exponent: int) -> None:
    value = DTYPES[dtype].type(2.0**exponent)
    ulp = 2.0 ** (exponent - digits)
    just_in, just_out = (2.0**exponent + ulp * part for part in (0.49, 0.51))
    assert ratio(value, just_in, compute=np.float64) == pytest.approx(0.98)
    assert is_refused(value, just_out, 0.0, np.float64)


def test_the_magnitude_adds_16_units_of_the_compute_dtype() -> None:
    exact = 1 + 2.0**-18
    assert is_refused(np.float64(1), exact, 3.9, np.float32)
    assert not is_refused(np.float64(1), exact, 4.1, np.float32)
    assert is_refused(np.float64(1), exact, 4.1, np.float64)


def test_infinity_only_where_exact_rounds_to_it() -> None:
    f16, inf = np.float16, np.inf
    assert not is_refused(f16(inf), 65520.0)
    assert is_refused(f16(-inf), 65520.0)
    assert is_refused(f16(65504), 65520.0)
    assert is_refused(f16(inf), 65519.0)
    assert not is_refused(f16(65504), 65519.0)
    # Close to the threshold the noise decides.
    assert not is_refused(f16(inf), 65519.97, 65520.0)
    assert not is_refused(f16(65504), 65520.03, 65520.0)
    assert is_refused(f16(inf), 65519.9, 65520.0)
    assert is_refused(f16(65504), 65520.1, 65520.0)
    assert not is_refused(f16(inf), inf)
    assert is_refused(f16(-inf), inf)
    assert is_refused(f16(65504), inf)
    # A value that overflows in the compute dtype is infinite in a wider output too.
    assert not is_refused(np.float64(inf), 1e39)
    assert is_refused(np.float64(inf), 1e39, 0.0, np.float64)


def test_nan_only_where_exact_is_nan() -> None:
    assert is_refused(np.float32(np.nan), 1.0)
    assert is_refused(np.float32(1.0), np.nan)
    assert is_refused(np.float32(np.inf), np.nan)
    assert is_refused(np.float32(np.nan), np.inf)
    assert ratio(np.float32(np.nan), np.nan, np.nan) == 0.0


def test_float32_may_flush_what_is_not_normal() -> None:
    subnormal = 2.0**-127
    assert not is_refused(np.float32(0), subnormal)
    assert is_refused(np.float32(0), 4 * subnormal)
    assert is_refused(np.float64(0), subnormal, 0.0, np.float64)
    for dtype in (np.float32, DTYPES["bfloat16"].type):
        assert not is_refused(dtype(0), subnormal, 0.0, np.float64)
        assert is_refused(dtype(0), 4 * subnormal, 0.0, np.float64)


def test_what_is_tiny_beside_a_rows_largest_element_may_be_flushed() -> None:
    x = np.ones((1, 1000), np.float32)
    x[0, 0] = 2.0**127
    rstd = 1 / np.sqrt(np.square(x.astype(np.float64)).mean(axis=1))
    y = (x * rstd[:, None]).astype(np.float32)
    y[0, 1:] = 0  # 1e-37, and 2**-127 in the row's unit
    for scale, is_right in ((1, True), (64, False)):
        rows = x.copy()
        rows[0, 1:] *= scale
        result = NormForward(y, None, rstd.astype(np.float32))
        with contextlib.nullcontext() if is_right else pytest.raises(AssertionError, match="y"):
            check_forward("rms_norm", result, rows, eps=1e-6)


def test_the_message_tells_the_worst_element() -> None:
    exact = np.ones((2, 3))
    actual = exact.astype(np.float32)
    actual[1, 2], actual[0, 1] = 3.0, 1.5
    with pytest.raises(AssertionError, match=r"y\[1, 2\] is 3\.0, exactly 1\.0: off by 2\.0, "):
        assert_one_rounding(actual, exact, exact, np.float32, "y")
    with pytest.raises(AssertionError, match=r"y must have shape \(2, 3\), got \(3, 2\)"):
        assert_one_rounding(actual.T, exact, exact, np.float32, "y")
    assert assert_one_rounding(actual[:0], exact[:0], exact[:0], np.float32, "y") == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual": np.ones(2, np.int64)}, "y must have a floating dtype up to float64, got int64"),
        ({"actual": np.ones(2, "c8")}, "y must have a floating dtype up to float64, got complex64"),
        ({"compute_dtype": "float16"}, "compute_dtype must be float32 or float64, got float16"),
        ({"compute_dtype": "foo"}, "compute_dtype must be float32 or float64, got foo"),
    ],
)
def test_arguments_that_cannot_be_compared(changes: dict[str, Any], message: str) -> None:
    right = {"actual": np.ones(2, np.float32), "exact": np.ones(2), "magnitude": [1.0, 1.0]}
    right |= {"compute_dtype": np.float32, "name": "y"}
    assert assert_one_rounding(**right) == 0.0
    with pytest.raises(TypeError) as raised:
        assert_one_rounding(**right | changes)
    assert str(raised.value) == message


def test_dtypes_may_be_torchs() -> None:
    torch = pytest.importorskip("torch")
    half, single = torch.float16, torch.float32
    given: dict[str, Any] = {"residual": X, "out_dtype": half, "residual_dtype": single}
    check_forward("layer_norm", reference.layer_norm_forward(X, **given), X, eps=1e-5, **given)
    arguments = X, X, X[0], MEAN, RSTD
    asked: dict[str, Any] = {"dx_dtype": half, "dresidual_dtype": single}
    found = reference.layer_norm_backward(*arguments, **asked)
    check_backward("layer_norm", found, *arguments, bias=True, **asked)


GATE = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cm.silu(z))
STORED = GATE.forward(X, z=X)
GRADIENTS = GATE.backward(X, STORED)
PLAIN = cupynorm.fuse("rms_norm")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: check_fused("rms_norm", Y, X),  # type: ignore[arg-type]
            "fused must be a norm of cupynorm.fuse, got str",
        ),
        (
            lambda: check_fused(GATE, Y, [1.0], z=X),  # type: ignore[arg-type]
            "x must be a NumPy array; got builtins.list",
        ),
        (
            lambda: check_fused(GATE, Y, X, z=[1.0]),
            "z must be a number or a NumPy array, as the other arrays of the call are; got "
            "builtins.list",
        ),
        (
            lambda: check_fused_backward(cupynorm.rms_norm, GRADIENTS, X, STORED),  # type: ignore[arg-type]
            "fused must be a norm of cupynorm.fuse, got function",
        ),
        (
            lambda: check_fused_backward(GATE, None, X, STORED),
            "result must have dx, dweight, dbias, dz, got NoneType",
        ),
        (
            lambda: check_fused_backward(GATE, tuple(GRADIENTS), X, STORED),
            "result must have dx, dweight, dbias, dz, got tuple",
        ),
        (
            lambda: check_fused_backward(GATE, GRADIENTS, X, Y),
            "forward must be what this norm's forward returned, got numpy.ndarray",
        ),
        (
            lambda: check_fused_backward(PLAIN, GRADIENTS, X, STORED),
            f"forward must be what this norm's forward returned, got that of {GATE}",
        ),
    ],
)
def test_what_is_no_call_of_a_fused_norm(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert str(raised.value) == message
