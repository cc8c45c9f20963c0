from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from residuals import OfCupyNorm, WithResidual, check_residual, residual_problems
from strategies import DTYPES, Problem, make_values, problems
from sums import WithSums, check_sums, problems_with_sums

from cupynorm import reference, testing
from cupynorm._operation import NormBackward
from cupynorm.reference import Array, Float64, Norm, round_once, sum_to_shape

NORMS: tuple[Norm, ...] = ("rms_norm", "layer_norm")
both_norms = pytest.mark.parametrize("norm", NORMS)


def run_forward(norm: Norm, *arrays: Array | None, **options: Any) -> Any:
    return getattr(reference, f"{norm}_forward")(*arrays, **options)


def run_backward(
    norm: Norm, dy: Array, x: Array, weight: Array | None, forward: Any, **options: Any
) -> NormBackward:
    statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
    result = getattr(reference, f"{norm}_backward")(dy, x, weight, *statistics, **options)
    assert isinstance(result, NormBackward)
    return result


# ---- gradients -----------------------------------------------------------------------------------


def numerical_gradient(function: Callable[[Float64], float], at: Float64) -> Float64:
    gradient = np.empty_like(at)
    # The cube root of the unit roundoff balances both errors of a central difference.
    step = 6e-6
    for index in np.ndindex(at.shape):
        moved = at.copy()
        moved[index] = at[index] + step
        above = function(moved)
        moved[index] = at[index] - step
        gradient[index] = (above - function(moved)) / (2 * step)
    return gradient


def assert_gradient(actual: Array, function: Callable[[Float64], float], at: Float64) -> None:
    expected = numerical_gradient(function, at)
    # The errors of a central difference are about step**2 = 4e-11, since the values' size is 1.
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < 1e-8 * (1 + np.abs(expected).max())


# x, axis, weight, bias
GRADIENT_SHAPES = {
    "one axis": ((3, 5), None, (5,), (5,)),
    "one row": ((5,), None, (5,), (5,)),
    "one column": ((4, 1), None, (1,), (1,)),
    "no weight": ((3, 5), -1, None, None),
    "bias alone": ((2, 3, 4), (-2, -1), None, (3, 4)),
    "two axes": ((2, 3, 4), (-2, -1), (3, 4), (3, 4)),
    "all axes": ((2, 3), (0, 1), (2, 3), (2, 3)),
    "leading axes": ((2, 3, 4), -1, (4,), (4,)),
    "per head": ((2, 3, 4), None, (3, 4), (3, 4)),
    "per example": ((2, 3, 4), -1, (2, 1, 4), (2, 1, 4)),
    "per row": ((2, 3, 4), -1, (3, 1), (2, 3, 4)),
    "one for all": ((2, 3, 4), (-2, -1), (1,), (1, 1)),
    "groups of channels": ((2, 2, 3, 2, 2), (2, 3, 4), (2, 3, 1, 1), (2, 3, 1, 1)),
    "channels": ((2, 3, 2, 2), 1, (3, 1, 1), (3, 1, 1)),
    "channels, bias alone": ((2, 3, 4), 1, None, (3, 1)),
    "first axis": ((3, 4), 0, (3, 1), (3, 1)),
    "first and last axis": ((2, 3, 4), (0, 2), (2, 1, 4), (2, 1, 4)),
    "unlike axes": ((2, 3, 4), 1, (4,), (2, 1, 1)),
}


@both_norms
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("case", GRADIENT_SHAPES)
def test_backward_is_the_derivative_of_forward(norm: Norm, zero_centered: bool, case: str) -> None:
    shape, axis, weight_shape, bias_shape = GRADIENT_SHAPES[case]
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, *shape))
    weight = None if weight_shape is None else rng.standard_normal(weight_shape)
    bias = None if bias_shape is None else rng.standard_normal(bias_shape)
    options: Any = {"axis": axis, "zero_centered": zero_centered and weight is not None}

    def loss(x: Array, weight: Array | None, bias: Array | None) -> float:
        return float(np.sum(dy * run_forward(norm, x, weight, bias, eps=0.1, **options).y))

    forward = run_forward(norm, x, weight, bias, eps=0.1, **options)
    result = run_backward(
        norm, dy, x, weight, forward, bias=False if bias is None else bias, **options
    )
    assert_gradient(result.dx, lambda at: loss(at, weight, bias), x)
    if weight is None:
        assert result.dweight is None
    else:
        assert_gradient(result.dweight, lambda at: loss(x, at, bias), weight)
    if bias is None:
        assert result.dbias is None
    else:
        assert_gradient(result.dbias, lambda at: loss(x, weight, at), bias)


@both_norms
@pytest.mark.parametrize("case", GRADIENT_SHAPES)
def test_blocks_of_one_row_give_what_a_single_block_does(
    norm: Norm, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, axis, *affine = GRADIENT_SHAPES[case]
    rng = np.random.default_rng(0)
    x, dy, residual = rng.standard_normal((3, *shape)).astype(np.float32)
    weight, bias = (None if of is None else rng.standard_normal(of) for of in affine)
    options: Any = {"axis": axis, "eps": 0.1, "relu": (-0.5, 0.5), "residual": residual}

    def results() -> tuple[Any, Any]:
        forward = run_forward(norm, x, weight, bias, **options)
        backward = run_backward(
            norm,
            *(dy, forward.residual_out, weight, forward),
            bias=False if bias is None else bias,
            bitmask=forward.bitmask,
            axis=axis,
            dresidual_out=residual,
            dresidual_dtype=np.float64,
        )
        return forward, backward

    whole = results()
    monkeypatch.setattr(reference, "BLOCK", 1)
    for found, expected in zip(results(), whole, strict=True):
        for name, array in expected._asdict().items():
            if name in ("dweight", "dbias") and array is not None:  # float64, in another order
                np.testing.assert_allclose(getattr(found, name), array, rtol=0, atol=1e-14)
            else:
                np.testing.assert_array_equal(getattr(found, name), array, strict=True)


@both_norms
@pytest.mark.parametrize("relu", [(-0.5, 0.8), (0.0, np.inf), (-np.inf, 0.0)])
@pytest.mark.parametrize(
    "case", ["one axis", "no weight", "two axes", "per head", "channels", "first and last axis"]
)
def test_backward_is_the_derivative_of_the_clamped_forward(
    norm: Norm, relu: tuple[float, float], case: str
) -> None:
    shape, axis, weight_shape, bias_shape = GRADIENT_SHAPES[case]
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, *shape))
    weight = None if weight_shape is None else rng.standard_normal(weight_shape)
    bias = None if bias_shape is None else rng.standard_normal(bias_shape)
    options: Any = {"eps": 0.1, "axis": axis, "relu": relu}

    def loss(x: Array, weight: Array | None, bias: Array | None) -> float:
        return float(np.sum(dy * run_forward(norm, x, weight, bias, **options).y))

    forward = run_forward(norm, x, weight, bias, **options)
    assert 0 < np.unpackbits(forward.bitmask).sum() < x.size
    result = run_backward(
        norm,
        dy,
        x,
        weight,
        forward,
        axis=axis,
        bias=False if bias is None else bias,
        bitmask=forward.bitmask,
    )
    assert_gradient(result.dx, lambda at: loss(at, weight, bias), x)
    if weight is not None:
        assert_gradient(result.dweight, lambda at: loss(x, at, bias), weight)
    if bias is not None:
        assert_gradient(result.dbias, lambda at: loss(x, weight, at), bias)


@both_norms
def test_dbias_is_like_the_weight_unless_a_bias_says_otherwise(norm: Norm) -> None:
    x = make_values("normal", (4, 3), "float32", 0)
    weight = make_values("normal", (3,), "float16", 1)
    forward = run_forward(norm, x, weight)
    by_default = run_backward(norm, x, x, weight, forward).dbias
    assert (by_default is None) == (norm == "rms_norm")
    assert run_backward(norm, x, x, weight, forward, bias=False).dbias is None
    assert run_backward(norm, x, x, weight, forward, bias=True).dbias.dtype == np.float16
    assert run_backward(norm, x, x, None, forward, bias=True).dbias.dtype == np.float32
    given_bias = make_values("normal", (3,), "bfloat16", 2)
    dbias = run_backward(norm, x, x, weight, forward, bias=given_bias).dbias
    assert dbias.dtype == given_bias.dtype
    assert dbias.shape == (3,)


def test_layer_norm_backward_takes_the_mean_as_no_more_than_a_shift() -> None:
    x = make_values("mean_1e6", (5, 64), "float32", 0)
    dy, weight = make_values("normal", (6, 64), "float32", 1)[:5], x[0] - 1e6
    forward = reference.layer_norm_forward(x, weight)
    exact = reference.layer_norm_backward(dy, x, weight, forward.mean, forward.rstd)
    moved = reference.layer_norm_backward(dy, x, weight, forward.mean + 0.5, forward.rstd)
    for result in (exact, moved):
        testing.check_backward(
            "layer_norm", result, dy, x, weight, forward.mean, forward.rstd, bias=True
        )


# ---- against torch -------------------------------------------------------------------------------


@both_norms
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("row", [(2,), (7,), (300,), (3, 40), (2 * reference.DOT + 9,)])
def test_torch_agrees(norm: Norm, dtype: str, row: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    arrays = [make_values("normal", shape, dtype, i) for i, shape in enumerate([(9, *row)] * 2)]
    weight = make_values("normal", row, dtype, 2)
    bias = make_values("normal", row, dtype, 3) if norm == "layer_norm" else None
    x, w, b = (None if a is None else torch.tensor(a) for a in (arrays[0], weight, bias))
    for leaf in (x, w, b):
        if leaf is not None:
            leaf.requires_grad_()
    function = getattr(torch.nn.functional, norm)
    y = function(x, row, w, eps=1e-3) if b is None else function(x, row, w, b, eps=1e-3)
    y.backward(torch.tensor(arrays[1]))
    options: Any = {"eps": 1e-3, "axis": tuple(range(-len(row), 0))}
    testing.check_forward(norm, y.detach().numpy(), arrays[0], weight, bias, **options)
    forward = run_forward(norm, arrays[0], weight, bias, **options)
    result = NormBackward(x.grad.numpy(), w.grad.numpy(), None if b is None else b.grad.numpy())
    testing.check_backward(
        norm,
        result,
        arrays[1],
        arrays[0],
        weight,
        forward.mean,
        forward.rstd,
        bias=bias is not None,
        axis=options["axis"],
    )


# ---- every kind of problem -----------------------------------------------------------------------


def test_a_row_of_nearly_equal_values_is_centred_exactly() -> None:
    for n in (1000, 10007):
        x = np.ones((1, n), np.float32)
        x[0, 0] += 2.0**-23
        forward = reference.layer_norm_forward(x, eps=0.0)
        exact = -1 / math.sqrt(n - 1)  # of all but the first
        np.testing.assert_array_equal(forward.y[0, 1:], np.float32(exact))
        np.testing.assert_array_equal(forward.y[0, 0], np.float32(math.sqrt(n - 1)))


@given(problems(broadcast=True))
def test_every_result_is_one_rounding_from_exact(problem: Problem) -> None:
    p = problem
    forward = run_forward(p.norm, p.x, p.weight, p.bias, **p.forward_options)
    testing.check_forward(p.norm, forward, p.x, p.weight, p.bias, **p.forward_options)
    more = {"bias": p.backward_bias, "bitmask": forward.bitmask, **p.options}
    backward = run_backward(p.norm, p.dy, p.x, p.weight, forward, **more)
    testing.check_backward(
        p.norm,
        backward,
        p.dy,
        p.x,
        p.weight,
        forward.mean,
        forward.rstd,
        **more,
    )


@given(problems())
def test_layouts_hold_the_values_and_nothing_else_is_read(problem: Problem) -> None:
    for name, moved in problem.on(np).items():
        original = getattr(problem, name)
        if original is not None:
            assert moved.dtype == original.dtype
            np.testing.assert_array_equal(
                moved.view(f"u{moved.itemsize}"), original.view(f"u{moved.itemsize}")
            )


@both_norms
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-900, 900))
def test_a_power_of_two_changes_no_bit_of_y(norm: Norm, seed: int, exponent: int) -> None:
    x = np.random.default_rng(seed).standard_normal((3, 17))
    plain, scaled = (run_forward(norm, z, eps=0.0) for z in (x, np.ldexp(x, exponent)))
    np.testing.assert_array_equal(plain.y, scaled.y)
    np.testing.assert_array_equal(np.ldexp(plain.rstd, -exponent), scaled.rstd)


@both_norms
@given(seed=st.integers(0, 2**32 - 1))
def test_a_row_depends_on_no_other_row(norm: Norm, seed: int) -> None:
    x = make_values("nonfinite", (7, 65), "float32", seed)
    together = run_forward(norm, x)
    for i, row in enumerate(x):
        alone = run_forward(norm, row)
        np.testing.assert_array_equal(alone.y, together.y[i])
        np.testing.assert_array_equal(alone.rstd, together.rstd[i])


@both_norms
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "mean_1e6", "nonfinite"]),
    dtype=st.sampled_from(list(DTYPES)),
    m=st.integers(1, 20),
    n=st.integers(1, 300) | st.sampled_from([4096, 8195, 16385]),
    block=st.sampled_from([1, 1 << 10, 1 << 16]),
)
def test_no_bit_of_a_row_depends_on_its_block(
    norm: Norm,
    seed: int,
    kind: str,
    dtype: str,
    m: int,
    n: int,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "BLOCK", block)
    x, dy = (make_values(of, (m, n), dtype, seed + i) for i, of in enumerate((kind, "normal")))
    weight = make_values("normal", (n,), "float32", seed + 2)

    def results(rows: slice) -> list[Array | None]:
        forward = run_forward(norm, x[rows], weight, out_dtype=np.float64)
        backward = run_backward(norm, dy[rows], x[rows], weight, forward, dx_dtype=np.float64)
        return [*forward[:3], backward.dx]

    together = results(slice(None))
    for i in range(m):
        for alone, among in zip(results(slice(i, i + 1)), together, strict=True):
            if among is not None and alone is not None:
                np.testing.assert_array_equal(alone[0], among[i])


# ---- special values and ranges -------------------------------------------------------------------

INF, NAN = np.inf, np.nan


@both_norms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_of_subnormal_numbers_whose_rstd_is_out_of_range(norm: Norm, dtype: str) -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(-9, 10, (3, 64)).astype(np.float64)
    least = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    x = np.concatenate([whole[:2] * least, whole[2:]]).astype(dtype)  # the last row stays as it is
    weight, dy = rng.standard_normal(64, np.float32), rng.standard_normal(x.shape)
    forward = run_forward(norm, x, weight, eps=0.0, out_dtype="float64")
    like = run_forward(norm, whole, weight, eps=0.0)
    np.testing.assert_array_equal(np.isinf(forward.rstd), [True, True, False])
    # Values of narrower dtypes are multiplied by rstd, not divided by its inverse.
    np.testing.assert_allclose(forward.y, like.y, rtol=0 if dtype == "float64" else 2**-51, atol=0)
    for stored, of_whole in zip(forward[1:3], like[1:3], strict=True):
        if stored is not None:
            of_whole[2] = stored[2]
    gradients = run_backward(norm, dy, x, weight, forward, bias=True)
    expected = run_backward(norm, dy, whole, weight, like, bias=True)
    with np.errstate(over="ignore"):
        expected.dx[:2] /= least
    np.testing.assert_array_equal(gradients.dweight, expected.dweight)
    np.testing.assert_array_equal(gradients.dbias, expected.dbias)
    np.testing.assert_array_equal(gradients.dx, round_once(expected.dx, dtype))
    if dtype != "float64":
        stored = (forward.mean, forward.rstd)
        testing.check_backward(norm, gradients, dy, x, weight, *stored, bias=True)


def test_an_infinity_makes_nan_of_itself_and_zero_of_its_row() -> None:
    forward = reference.rms_norm_forward(np.array([[1.0, INF, -2.0], [1.0, 1.0, 1.0]]), eps=0.0)
    np.testing.assert_array_equal(forward.y, [[0, NAN, 0], [1, 1, 1]])
    np.testing.assert_array_equal(forward.rstd, [0, 1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("planted", [INF, -INF, NAN])
def test_a_row_that_is_not_finite_has_no_layer_norm(planted: float, dtype: str) -> None:
    x = np.array([[1.0, planted, 3.0], [-1.0, 0.0, 1.0]], dtype)
    forward = reference.layer_norm_forward(x)
    for field in (forward.y, forward.mean, forward.rstd):
        assert np.all(np.isnan(field[0]))
        assert not np.any(np.isnan(field[1]))


def test_nan_stays_in_its_row() -> None:
    forward = reference.rms_norm_forward(np.array([[1.0, NAN], [1.0, 1.0]]), eps=0.0)
    np.testing.assert_array_equal(forward.y, [[NAN, NAN], [1, 1]])
    np.testing.assert_array_equal(forward.rstd, [NAN, 1])


@both_norms
def test_zero_rows(norm: Norm) -> None:
    x = np.zeros((2, 3), np.float32)
    with_eps, without = (run_forward(norm, x, eps=eps) for eps in (0.25, 0.0))
    np.testing.assert_array_equal(with_eps.y, x)
    np.testing.assert_array_equal(with_eps.rstd, [2, 2])
    np.testing.assert_array_equal(without.y, np.full_like(x, NAN))
    np.testing.assert_array_equal(without.rstd, [INF, INF])


@both_norms
def test_no_rows(norm: Norm) -> None:
    x, weight = np.zeros((0, 2, 3), np.float16), np.ones(3, np.float32)
    forward = run_forward(norm, x, weight)
    assert forward.y.shape == (0, 2, 3)
    assert forward.rstd.shape == (0, 2)
    backward = run_backward(norm, x, x, weight, forward, bias=True)
    assert backward.dx.shape == (0, 2, 3)
    np.testing.assert_array_equal(backward.dweight, np.zeros(3, np.float32))
    np.testing.assert_array_equal(backward.dbias, np.zeros(3, np.float32))


@both_norms
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("float64", 1e200), ("float64", 1e-200), ("float32", 1e25), ("bfloat16", 1e25)],
)
def test_no_scale_is_out_of_range(norm: Norm, dtype: str, scale: float) -> None:
    x = np.array([[3, -4, 0, 0], [2, 2, -2, -2]], np.float64)
    scaled = round_once(x * scale, DTYPES[dtype])
    forward = run_forward(norm, scaled, eps=0.0, out_dtype=np.float64)
    testing.check_forward(norm, forward, scaled, eps=0.0, out_dtype=np.float64)
    assert np.abs(forward.y).max() > 1
    assert np.all(np.isfinite(forward.rstd) & (forward.rstd > 0))


@pytest.mark.parametrize("value", [1e200, -1e200, 1e-200])
def test_equal_values_of_any_size_have_a_layer_norm_of_zero(value: float) -> None:
    forward = reference.layer_norm_forward(np.full((1, 4), value), eps=0.25)
    np.testing.assert_array_equal(forward.y, np.zeros((1, 4)))
    np.testing.assert_array_equal(forward.mean, [value])
    np.testing.assert_array_equal(forward.rstd, [2.0])


def test_a_gradient_where_x_less_its_mean_overflows() -> None:
    rng = np.random.default_rng(0)
    dy, x = rng.standard_normal((2, 8)), rng.uniform(6, 7, (2, 8))
    x[:, 1] = -7
    assert np.all(np.abs(x - x.mean(axis=1, keepdims=True)).max(axis=1) > 8)  # times 2**1021
    large, small = (
        run_backward("layer_norm", dy, v, None, run_forward("layer_norm", v, eps=0.0))
        for v in (x * 2.0**1021, x * 2.0**900)
    )
    assert np.isfinite(large.dx).all()
    # dx is around the least normal number.
    np.testing.assert_allclose(large.dx, small.dx * 2.0**-121, rtol=0, atol=2.0**-1070)


def test_a_large_mean_costs_no_digit_of_the_variance() -> None:
    x = 1e12 + np.array([[-1.0, 1.0, -1.0, 1.0]])
    forward = reference.layer_norm_forward(x, eps=0.0)
    np.testing.assert_array_equal(forward.y, x - 1e12)
    np.testing.assert_array_equal(forward.rstd, [1.0])


def test_a_bitmask_has_the_bits_of_the_flattened_row_and_no_others() -> None:
    x = np.arange(-15, 15, dtype=np.float32).reshape(2, 3, 5)
    forward = reference.rms_norm_forward(x, axis=(1, 2), relu=(0, 1))
    inside = ((forward.y > 0) & (forward.y < 1)).reshape(2, 15)
    assert forward.bitmask.shape == (2, 2)
    np.testing.assert_array_equal(forward.bitmask, np.packbits(inside, axis=-1, bitorder="little"))


def test_the_bits_are_of_y_before_it_is_rounded() -> None:
    x = np.array([[1.0, -1.0]])
    bias = np.array([0.999, 0.0])
    forward = reference.rms_norm_forward(x * 0, bias=bias, relu=(0, 1), out_dtype="bfloat16")
    np.testing.assert_array_equal(forward.y.astype(np.float64), [[1.0, 0.0]])
    assert forward.bitmask[0] == 0b01


def test_nan_is_kept_by_a_clamp_and_has_no_bit() -> None:
    forward = reference.rms_norm_forward(np.array([[1.0, NAN], [1.0, 1.0]]), eps=0.0, relu=(0, 6))
    np.testing.assert_array_equal(forward.y, [[NAN, NAN], [1, 1]])
    np.testing.assert_array_equal(forward.bitmask, [[0], [3]])


def test_what_the_bitmask_drops_may_be_nan() -> None:
    x, bitmask = np.array([[3.0, -4.0]]), np.array([[1]], np.uint8)
    nan, zero = (
        reference.rms_norm_backward(
            np.array([[2.0, dropped]]), x, None, np.ones(1), bias=True, bitmask=bitmask
        )
        for dropped in (NAN, 0.0)
    )
    np.testing.assert_array_equal(nan.dbias, [2.0, 0.0])
    np.testing.assert_array_equal(nan.dx, zero.dx)


# ---- outputs -------------------------------------------------------------------------------------


@both_norms
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_dtypes_of_the_outputs(norm: Norm, x_dtype: str) -> None:
    x = make_values("normal", (2, 5), x_dtype, 0)
    weight = make_values("normal", (5,), "bfloat16", 1)
    statistics = np.float64 if x_dtype == "float64" else np.float32
    forward = run_forward(norm, x, weight)
    assert forward.y.dtype == x.dtype
    assert forward.rstd.dtype == statistics
    assert (forward.mean is None) == (norm == "rms_norm")
    assert run_forward(norm, x, weight, out_dtype=np.float16).y.dtype == np.float16
    backward = run_backward(norm, x, x, weight, forward, bias=True)
    assert backward.dx.dtype == x.dtype
    assert backward.dweight.dtype == weight.dtype


@both_norms
def test_out_may_be_x_and_dx_may_be_dy(norm: Norm) -> None:
    x, dy = (make_values("normal", (4, 9), "float32", seed) for seed in (0, 1))
    weight = make_values("normal", (9,), "float32", 2)
    forward = run_forward(norm, x, weight)
    backward = run_backward(norm, dy, x, weight, forward, bias=True)
    in_place = x.copy()
    assert run_forward(norm, in_place, weight, out=in_place).y is in_place
    np.testing.assert_array_equal(in_place, forward.y)
    given_dx = dy.copy()
    again = run_backward(norm, given_dx, x, weight, forward, bias=True, dx=given_dx)
    assert again.dx is given_dx
    for field, expected in zip(again, backward, strict=True):
        np.testing.assert_array_equal(field, expected)


@both_norms
def test_no_argument_is_written_and_out_sets_the_dtype(norm: Norm) -> None:
    x, weight = (
        make_values("normal", (4, 9), "float32", 0),
        make_values("normal", (9,), "float32", 1),
    )
    for array in (x, weight):
        array.flags.writeable = False
    out = np.empty((4, 9), np.float16)
    y = getattr(reference, norm)(x, weight, out=out)
    assert y is out
    forward = run_forward(norm, x, weight, out_dtype=np.float16)
    np.testing.assert_array_equal(y, forward.y)
    run_backward(norm, x, x, weight, forward)


def test_a_call_leaves_the_settings_of_numpy() -> None:
    x = np.array([[3e38, INF, 0.0]], np.float32)
    with np.errstate(all="warn", over="raise"):
        np.setbufsize(4096)
        before = np.getbufsize(), np.geterr()
        forward = reference.layer_norm_forward(x)
        reference.layer_norm_backward(x, x, x[0], forward.mean, forward.rstd)
        assert (np.getbufsize(), np.geterr()) == before


# ---- rounding and sums ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float64_is_rounded_once_at_every_tie(dtype: str) -> None:
    target = DTYPES[dtype]
    infinity = int(np.array(INF).astype(target).view(np.uint16))
    codes = np.arange(infinity + 1, dtype=np.uint16)
    values = codes.view(target).astype(np.float64)
    values[-1] = 2 * values[-2] - values[-3]  # infinity counts as this number in rounding
    below, above = codes[:-1], codes[1:]
    tie = (values[:-1] + values[1:]) / 2
    for number, expected in {
        "below": (np.nextafter(tie, 0), below),
        "tie": (tie, np.where(below % 2 == 0, below, above)),
        "above": (np.nextafter(tie, INF), above),
        "exact": (values[:-1], below),
    }.values():
        np.testing.assert_array_equal(round_once(number, target).view(np.uint16), expected)
        negative = round_once(-number, target).view(np.uint16)
        np.testing.assert_array_equal(negative, expected | 0x8000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_keeps_what_is_not_finite(dtype: str) -> None:
    rounded = round_once(np.array([INF, -INF, NAN, -0.0]), DTYPES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(rounded, [INF, -INF, NAN, 0.0])
    assert np.signbit(rounded[3])


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_sum_to_shape_undoes_a_broadcast(shape: list[int], drop: int, repeated: list[bool]) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
    target = tuple(1 if one else n for n, one in zip(shape, repeated, strict=False))[drop:]
    kept = (1,) * (array.ndim - len(target)) + target
    axes = tuple(a for a, n in enumerate(kept) if n == 1)
    np.testing.assert_array_equal(sum_to_shape(array, target), array.sum(axes).reshape(target))


@settings(suppress_health_check=list(HealthCheck))
@given(drawn=residual_problems())
def test_any_residual(drawn: WithResidual) -> None:
    check_residual(OfCupyNorm(np, np.array, lambda result: result), drawn)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_the_gradient_of_a_residual_by_finite_differences(norm: str) -> None:
    rng = np.random.default_rng(0)
    x, residual, of_y, of_total = rng.standard_normal((4, 3, 7))
    weight = rng.standard_normal(7)

    def loss(x: np.ndarray, residual: np.ndarray) -> float:
        y, total = getattr(reference, norm)(x, weight, eps=1e-3, residual=residual)
        return float(np.sum(y * of_y) + np.sum(total * of_total))

    result = getattr(reference, f"{norm}_forward")(x, weight, eps=1e-3, residual=residual)
    statistics = [result.rstd] if norm == "rms_norm" else [result.mean, result.rstd]
    backward = getattr(reference, f"{norm}_backward")
    found = backward(of_y, result.residual_out, weight, *statistics, dresidual_out=of_total)
    for name, place in (("dx", 0), ("dresidual", 1)):
        for index in ((0, 0), (2, 6)):
            step = np.zeros_like(x)
            step[index] = 1e-6
            up, down = [x, residual], [x, residual]
            up[place], down[place] = up[place] + step, down[place] - step
            slope = (loss(*up) - loss(*down)) / 2e-6
            assert getattr(found, name)[index] == pytest.approx(slope, rel=1e-6, abs=1e-8)


@settings(suppress_health_check=list(HealthCheck))
@given(drawn=problems_with_sums(broadcast=True))
def test_any_given_sums(drawn: WithSums) -> None:
    check_sums(OfCupyNorm(np, np.array, lambda result: result), drawn)
