"""cupynorm.jax without a GPU: the formula, and NumPy behind XLA's FFI instead of the kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from axes import CALLS, EPS, RELU, arrays_of, axes_of, before_relu
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, OVERFLOWS, REGIMES, largest_in_range, make_values, scaled
from thorough import THOROUGH, in_pairs, one_in

jax = pytest.importorskip("jax", minversion="0.10.2")

import jax.numpy as jnp  # noqa: E402
import jax_passes  # noqa: E402
import jax_plans  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_calls import check, gradients_through_layers  # noqa: E402

import cupynorm  # noqa: E402
import cupynorm.jax  # noqa: E402
from cupynorm import reference, testing  # noqa: E402
from cupynorm._operation import FORWARD, BackwardSpec, ForwardSpec  # noqa: E402
from cupynorm.jax import _derivatives, _fusion, _kernels, _operations, _xla  # noqa: E402

NORMS = ("rms_norm", "layer_norm")


def forget_what_was_traced() -> None:
    for function in (
        *(_derivatives.differentiable, _operations._batched, _operations._partitioned),
        *(_fusion.differentiable, _fusion._batched),
    ):
        function.cache_clear()


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let NumPy, which XLA calls, replace the formula of every norm."""
    forget_what_was_traced()
    monkeypatch.setitem(_kernels._providers, "cpu", lambda: jax_plans)
    monkeypatch.setitem(_kernels._fused_providers, "cpu", lambda: jax_passes)
    yield monkeypatch
    forget_what_was_traced()


PATHS = "formula", "kernels"


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "kernels":
        request.getfixturevalue("kernels")
    return request.param


def values(shape: tuple[int, ...], dtype: str = "float64", seed: int = 0) -> Any:
    return make_values("normal", shape, DTYPES[dtype], seed)


# ---- values --------------------------------------------------------------------------------------


# The lengths take turns.
@pytest.mark.parametrize(
    ("dtype", "value", "n"),
    [
        (dtype, value, n)
        for i, dtype in enumerate(("float32", "bfloat16"))
        for j, value in enumerate((0.0, 0.1, 1e17, 1e20, 1e30, 3e38))
        for n in (1, 7, 1000)[(i + j) % one_in(3) :: one_in(3)]
    ],
)
def test_rows_of_equal_values(dtype: str, value: float, n: int) -> None:
    x, bias = np.full((2, n), value, DTYPES[dtype]), np.full(n, 5, DTYPES[dtype])
    for eps in (1e-5, 1e-12):
        y = cupynorm.jax.layer_norm(x, bias=bias, eps=eps)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.full((2, n), 5.0))
    check("layer_norm", x, bias, bias, dy=values((2, n), dtype))


def test_a_gradient_where_x_less_its_mean_overflows() -> None:
    x = np.full((2, 64), 1e38, np.float32)
    x[0, 5], x[1, 7] = -3e38, 2e38
    mean = x.astype(np.float64).mean(axis=1, keepdims=True)
    assert np.abs(x - mean).max() > np.finfo(np.float32).max
    ones = np.ones(64, np.float32)
    check("layer_norm", x, ones, ones, dy=values((2, 64), "float32"))


# One case in five runs, so norms, dtypes, lengths and factors all take turns.
@pytest.mark.parametrize(
    ("norm", "dtype", "n", "factors"),
    [
        *itertools.product(
            NORMS, ("float32", "bfloat16"), (1, 7, 300), (*OVERFLOWS, (1e37, 1e37, 1e37))
        )
    ][:: one_in(5)],
)
def test_products_may_overflow_on_the_way_to_dx(
    norm: str, dtype: str, n: int, factors: Any
) -> None:
    of_x, of_dy, of_weight = factors
    x, dy = scaled(values((5, n), dtype, 1), of_x), values((5, n), dtype, 2)
    dy[::2] = scaled(dy[::2], of_dy)
    dy[2, ::3] = 1e-3  # next to huge ones: only an x of 0 shows that they count
    x[2, ::6] = 0
    check(norm, x, scaled(values((n,), "float32", 3), of_weight), dy=dy)


@pytest.mark.parametrize(
    ("norm", "dtype", "n"), in_pairs(NORMS, ("float32", "bfloat16"), (2, 7, 300))
)
def test_the_last_addition_of_dx_may_overflow(norm: str, dtype: str, n: int) -> None:
    x, dy, weight = largest_in_range(
        values((5, n), dtype, 1), values((5, n), dtype, 2), values((n,), "float32", 3)
    )
    check(norm, x, weight, dy=dy)


@pytest.mark.parametrize(
    ("x", "weight", "norm", "path"), in_pairs(DTYPES, DTYPES, NORMS, PATHS), indirect=["path"]
)
def test_every_pair_of_x_and_weight(x: str, weight: str, norm: str, path: str) -> None:
    # y has the weight's dtype.
    affine = values((96,), weight, 2)
    check(norm, values((5, 2, 96), x, 1), affine, affine, dy=values((5, 2, 96), weight, 3))


@pytest.mark.parametrize(
    ("norm", "weight", "bias", "k"), in_pairs(NORMS, (False, True), (False, True), (1, 2))
)
def test_every_choice_of_operands(
    norm: str, weight: bool, bias: bool, k: int, kernels: Any
) -> None:
    x, dy = values((4, 3, 10), "float32", 1), values((4, 3, 10), "bfloat16", 2)
    shape = x.shape[-k:]
    check(
        norm,
        x,
        values(shape, "float16", 3) if weight else None,
        values(shape, "float32", 4) if bias else None,
        dy=dy,
        k=k,
        zero_centered=weight,
        eps=1e-3,
    )


@pytest.mark.parametrize(
    ("norm", "relu", "path"), in_pairs(NORMS, ((0, 1), (-0.5, np.inf)), PATHS), indirect=["path"]
)
def test_relu(norm: str, relu: tuple[float, float], path: str) -> None:
    x, dy = values((4, 3, 10), "bfloat16", 1), values((4, 3, 10), "float32", 2)
    for k in (1, 2):
        weight, bias = (values(x.shape[-k:], "float32", seed) for seed in (3, 4))
        check(norm, x, weight, bias, dy=dy, k=k, relu=relu)


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 0.0)])
def test_a_bound_of_minus_zero_is_zero(bounds: tuple[float, float], path: str) -> None:
    """The two bounds are equal, but a call with one must not be taken for a call with the other."""
    x = values((4, 33), "float32")
    negative = tuple(bound or -0.0 for bound in bounds)
    for relu in (negative, bounds):
        for f in (cupynorm.jax, cupynorm):
            y = np.asarray(f.rms_norm(x, relu=relu))
            assert (y == 0).any()
            assert not np.signbit(y[y == 0]).any()


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_formula_holds_in_every_regime(norm: str, regime: str) -> None:
    x = make_values(regime, (5, 200), np.float32, 1)
    weight, dy = values((200,), "float32", 2), values((5, 200), "float32", 3)
    check(norm, x, weight, dy=dy, optimized=True)


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 8), ("float16", 11)])
def test_float64_is_rounded_to_16_bits_once(dtype: str, digits: int, path: str) -> None:
    # Rounding through float32 ends in a tie, and would round the first number down.
    bias = np.array([1 + 2.0**-digits + 2**-40, -(1 + 2.0**-digits + 2**-40), 1, 0])
    x = np.zeros((2, 4))
    check("layer_norm", x, bias=bias, dy=values(x.shape, dtype, 2))
    # The gradients are rounded once too.
    check("layer_norm", x, bias=bias.astype(DTYPES[dtype]), dy=np.stack([bias, 0 * bias]))


def test_two_axes_of_512_make_one_row(path: str) -> None:
    x, weight = values((2, 512, 512), "bfloat16", 1), values((512, 512), "bfloat16", 2)
    check("rms_norm", x, weight, dy=values(x.shape, "bfloat16", 3), k=2)


@pytest.mark.parametrize(
    ("n", "relu", "path"), in_pairs((8, 128), (None, (0, 1)), PATHS), indirect=["path"]
)
def test_no_rows(n: int, relu: Any, path: str) -> None:
    norm = functools.partial(cupynorm.jax.layer_norm, relu=relu)
    x, weight = np.zeros((0, 2, n), np.float32), values((n,), "float32")
    y, pull_back = jax.vjp(norm, x, weight, weight)
    dx, dweight, dbias = pull_back(y)
    assert y.shape == dx.shape == x.shape
    np.testing.assert_array_equal(np.stack([dweight, dbias]), 0)
    slope = jax.jit(jax.grad(lambda weight: jnp.sum(norm(x, weight) ** 2)))
    np.testing.assert_array_equal(jax.jacrev(slope)(weight), np.zeros((n, n)))


def test_a_weight_with_leading_axes_of_one_keeps_them_in_its_gradient(path: str) -> None:
    x, weight = values((3, 8)), values((1, 8), seed=1)

    def loss(weight: Any) -> Any:
        return jnp.sum(cupynorm.jax.rms_norm(x, weight, axis=-1) ** 2)

    gradient = jax.grad(loss)(weight)
    assert gradient.shape == weight.shape
    np.testing.assert_allclose(gradient[0], jax.grad(loss)(weight[0]), rtol=1e-12)


# ---- weights that vary over kept axes, and other axes than the last ------------------------------


@pytest.mark.parametrize("case", CALLS)
def test_any_axes_and_weights_that_broadcast(case: str, path: str) -> None:
    """Values and gradients are those of jax.numpy, which sums in other orders.

    The formula gets the norm that the kernels do not.
    """
    norm = NORMS[(list(CALLS).index(case) + (path == "kernels")) % 2]
    x, weight, bias, residual, dy, of_total = arrays_of(case)
    axis, centered = CALLS[case][1], weight is not None
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def function(arrays: Any) -> Any:
        options = {"eps": EPS, "axis": axis, "relu": RELU, "zero_centered": centered}
        return getattr(cupynorm.jax, norm)(**arrays, **options)

    def formula(arrays: Any) -> Any:
        s, scale = arrays["x"] + arrays["residual"], arrays.get("weight")
        y = before_relu(
            *(jnp, norm, axes_of(case), s),
            None if scale is None else 1 + scale,
            arrays.get("bias"),
        )
        return jnp.clip(y, *RELU), s

    results = []
    for f in (function, formula):
        (y, s), pull_back = jax.vjp(jax.jit(f), arrays)
        assert 0 < np.mean(np.isin(y, RELU)) < 1
        results.append((y, s, pull_back((dy, of_total))))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("of", "x_dtype", "path"),
    in_pairs(
        (
            *(("per head", "rms_norm", "float64"), ("GroupNorm", "layer_norm", "float32")),
            *(("channels", "layer_norm", "float16"), ("unlike axes", "rms_norm", "bfloat16")),
        ),
        ("float64", "bfloat16"),
        PATHS,
    ),
    indirect=["path"],
)
def test_a_weight_that_broadcasts_is_applied_before_the_one_rounding(
    of: tuple[str, str, str], x_dtype: str, path: str
) -> None:
    case, norm, dtype = of
    x, weight, bias, _, dy, _ = arrays_of(case)
    x, dy = (a.astype(DTYPES[x_dtype]) for a in (x, dy))
    weight, bias = (a.astype(DTYPES[dtype]) for a in (weight, bias))
    axis = CALLS[case][1]
    function = functools.partial(getattr(cupynorm.jax, norm), eps=EPS, axis=axis)
    y, pull_back = jax.vjp(jax.jit(function), x, weight, bias)
    given: Any = {"eps": EPS, "axis": axis}
    testing.check_forward(norm, np.asarray(y), x, weight, bias, **given)
    narrow = np.asarray(function(x, weight, bias, out_dtype=DTYPES[dtype]))
    testing.check_forward(norm, narrow, x, weight, bias, out_dtype=DTYPES[dtype], **given)
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, **given)
    result = cupynorm.NormBackward(*map(np.asarray, pull_back(dy)))
    stored = forward.mean, forward.rstd
    testing.check_backward(norm, result, dy, x, weight, *stored, bias=bias, axis=axis)


@pytest.mark.parametrize("case", ["float64", "gradient"])
def test_a_weight_per_head_costs_no_second_rounding(case: str, path: str) -> None:
    tie = 1 + 2.0**-8 + 2**-40  # through float32 it would be rounded to 1
    x, heads = np.zeros((1, 2, 4)), np.full((2, 4), tie)
    if case == "float64":
        y = cupynorm.jax.layer_norm(x, bias=heads, out_dtype="bfloat16")
    else:
        bias = np.zeros((2, 4), DTYPES["bfloat16"])
        _, pull_back = jax.vjp(lambda bias: cupynorm.jax.layer_norm(x, bias=bias), bias)
        (y,) = pull_back(jnp.asarray(heads[None]))
    np.testing.assert_array_equal(np.asarray(y, np.float64), np.full(y.shape, 1 + 2.0**-7))


@pytest.mark.parametrize("case", ["per head", "channels"])
def test_second_derivatives_with_any_axes_are_those_of_finite_differences(
    case: str, path: str
) -> None:
    x, weight, bias, *_ = arrays_of(case)
    function = jax.jit(functools.partial(cupynorm.jax.layer_norm, axis=CALLS[case][1], eps=EPS))
    with jax.numpy_rank_promotion("raise"):
        jax.grad(lambda *a: jnp.sum(function(*a) ** 2), (0, 1, 2))(x, weight, bias)
    check_grads(function, (x, weight, bias), order=2, modes=["rev"])


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_each_order_are_those_of_finite_differences(norm: str, path: str) -> None:
    function = getattr(cupynorm.jax, norm)
    x, weight, bias = values((3, 2, 8)), values((8,), seed=1), values((8,), seed=2)
    compiled = jax.jit(function)
    check_grads(compiled, (x, weight, bias), order=2)
    centered = jax.jit(lambda x, weight: function(x, weight, zero_centered=True))
    check_grads(centered, (x, weight), order=1)
    # The others take turns, so that each norm has both, and each path has both.
    if THOROUGH or (norm == "rms_norm") == (path == "kernels"):
        check_grads(compiled, (x,), order=3, modes=["rev"])
    if THOROUGH or (norm == "rms_norm") == (path == "formula"):
        over_two = jax.jit(functools.partial(function, axis=(-2, -1), zero_centered=True))
        check_grads(over_two, (x, values((2, 8), seed=3)), order=2, modes=["rev"])


def test_second_derivatives_of_a_clamped_norm(path: str) -> None:
    x, weight = values((3, 12)), values((12,), seed=1)
    clamped = jax.jit(functools.partial(cupynorm.jax.layer_norm, relu=(-0.6, 0.9)))
    assert 0 < np.mean(np.isin(clamped(x, weight), (-0.6, 0.9))) < 1
    check_grads(clamped, (x, weight), order=2)


def layered(weight: Any) -> Any:
    """A loss of rows that layers with one weight normalize, in a scan."""

    def layer(x: Any, _: Any) -> tuple[Any, None]:
        return cupynorm.jax.rms_norm(x, weight), None

    return jnp.sum(jax.lax.scan(layer, values((3, 8)), None, length=2)[0])


def slope_along(f: Any, v: Any, t: Any) -> Any:
    return jnp.sum(jax.grad(f)(v) * t)


def curvature_along(f: Any, v: Any, t: Any) -> Any:
    return jax.grad(lambda v: slope_along(f, v, t))(v)


def pair(v: Any) -> Any:
    return jnp.stack([v, 2 * v])


# With forward mode, and the same by reverse mode alone.
FORWARD_MODES = {
    "jvp": (lambda f, v, t: jax.jvp(f, (v,), (t,))[1], slope_along),
    "jvp of jit": (lambda f, v, t: jax.jvp(jax.jit(f), (v,), (t,))[1], slope_along),
    "jvp of checkpoint": (lambda f, v, t: jax.jvp(jax.checkpoint(f), (v,), (t,))[1], slope_along),
    "linearize": (lambda f, v, t: jax.linearize(f, v)[1](t), slope_along),
    "jacfwd": (lambda f, v, t: jax.jacfwd(f)(v), lambda f, v, t: jax.grad(f)(v)),
    "vmap of jvp": (
        lambda f, v, t: jax.vmap(lambda v, t: jax.jvp(f, (v,), (t,))[1])(pair(v), pair(t)),
        lambda f, v, t: jax.vmap(functools.partial(slope_along, f))(pair(v), pair(t)),
    ),
    "jacfwd of vmap": (
        lambda f, v, t: jax.jacfwd(jax.vmap(f))(pair(v)),
        lambda f, v, t: jax.jacrev(jax.vmap(f))(pair(v)),
    ),
    "jvp of grad": (lambda f, v, t: jax.jvp(jax.grad(f), (v,), (t,))[1], curvature_along),
    "grad of jvp": (
        lambda f, v, t: jax.grad(lambda v: jax.jvp(f, (v,), (t,))[1])(v),
        curvature_along,
    ),
    "grad of jvp by its tangent": (
        lambda f, v, t: jax.grad(lambda t: jax.jvp(f, (v,), (t,))[1])(t),
        lambda f, v, t: jax.grad(f)(v),
    ),
    "hessian": (lambda f, v, t: jax.hessian(f)(v), lambda f, v, t: jax.jacrev(jax.jacrev(f))(v)),
    "vmap of hessian": (
        lambda f, v, t: jax.vmap(jax.hessian(f))(pair(v)),
        lambda f, v, t: jax.vmap(jax.jacrev(jax.jacrev(f)))(pair(v)),
    ),
}


def of_x(x: Any) -> Any:
    weight = values((8,), seed=1)
    return jnp.sum(jnp.sin(cupynorm.jax.layer_norm(x, weight, weight, relu=(-0.6, 0.9))))


def of_weight(weight: Any) -> Any:
    x = values((3, 8), "float32", 2)
    y = cupynorm.jax.rms_norm(x, weight, weight, zero_centered=True, out_dtype=np.float64)
    return jnp.sum(jnp.sin(y))


def of_residual(residual: Any) -> Any:
    y, s = cupynorm.jax.rms_norm(values((3, 8), seed=3), residual=residual)
    return jnp.sum(jnp.sin(y) * jnp.cos(s))


@pytest.mark.parametrize("mode", FORWARD_MODES)
def test_forward_mode_gives_what_reverse_mode_gives(mode: str, kernels: Any) -> None:
    forward, reverse = FORWARD_MODES[mode]
    # The last one computes in float32, as its x is.
    functions = [(of_x, (3, 8)), (of_residual, (3, 8)), (of_weight, (8,))]
    if "vmap" in mode:  # what is mapped is known without it
        functions = functions[len(mode) % one_in(3) :: one_in(3)]
    arrays = [(values(shape, seed=4), values(shape, seed=5)) for _, shape in functions]

    @jax.jit
    def both(arrays: Any) -> Any:
        return [
            (forward(f, *vectors), reverse(f, *vectors))
            for (f, _), vectors in zip(functions, arrays, strict=True)
        ]

    *of_float64, of_float32 = both(arrays)
    for found, expected in of_float64:
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(*of_float32, rtol=1e-5, atol=1e-5)


TWICE = [(one, other) for one in (jax.jacrev, jax.jacfwd) for other in (jax.jacrev, jax.jacfwd)]


@pytest.mark.parametrize(("outer", "inner"), TWICE)
def test_second_derivatives_of_a_scan(outer: Any, inner: Any, kernels: Any) -> None:
    weight = values((8,), seed=1)
    twice = jax.jit(outer(inner(layered)))(weight)
    slope = jax.jit(jax.grad(layered))
    step = 1e-5
    for i, shift in enumerate(step * np.eye(8)):
        difference = slope(weight + shift) - slope(weight - shift)
        np.testing.assert_allclose(twice[i], difference / (2 * step), rtol=1e-5, atol=1e-7)


def test_third_derivatives_of_a_scan(kernels: Any) -> None:
    weight, t = values((8,), seed=1), values((8,), seed=2)

    def curvature(weight: Any) -> Any:
        return curvature_along(layered, weight, t)

    step = 1e-5
    difference = (curvature(weight + step * t) - curvature(weight - step * t)) / (2 * step)
    for found in (
        curvature_along(lambda weight: slope_along(layered, weight, t), weight, t),
        jax.jvp(curvature, (weight,), (t,))[1],
    ):
        np.testing.assert_allclose(found, difference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_a_tangent_that_is_not_there_is_0(norm: str, path: str) -> None:
    shapes = {"x": (3, 8), "weight": (8,), "bias": (8,), "residual": (3, 8)}
    arrays = {name: values(shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    function = functools.partial(getattr(cupynorm.jax, norm), relu=(-0.6, 0.9))
    _, together = jax.jvp(lambda arrays: function(**arrays), (arrays,), (arrays,))
    parts = [
        jax.jvp(lambda array: function(**arrays | {name: array}), (array,), (array,))[1]  # noqa: B023
        for name, array in arrays.items()
    ]
    for sum_, *of_one in zip(together, *parts, strict=True):
        np.testing.assert_allclose(sum(of_one), sum_, rtol=1e-12, atol=1e-14)
    for of_s in (parts[1][1], parts[2][1]):  # s does not depend on weight and bias
        np.testing.assert_array_equal(of_s, 0)


@pytest.mark.parametrize(
    ("norm", "dtype", "path"), in_pairs(NORMS, DTYPES, PATHS), indirect=["path"]
)
def test_tangents_are_those_of_float64(norm: str, dtype: str, path: str) -> None:
    """Their dtypes are those of the arrays, and y's has an error of its own beside its rounding."""
    given = [values((5, 33), dtype, 1), values((5, 33), "float32", 2), values((33,), dtype, 3)]
    along = [values(a.shape, a.dtype.name, 4 + i) for i, a in enumerate(given)]

    def of(arrays: Any, tangents: Any, out: str) -> Any:
        dtypes = {"out_dtype": DTYPES[out], "residual_dtype": DTYPES["float32"]}
        return jax.jvp(lambda *a: fused(norm, *a, **dtypes), arrays, tangents)[1]

    of_y, of_s = of(given, along, dtype)
    assert (of_y.dtype, of_s.dtype) == (DTYPES[dtype], np.float32)
    wide = [[a.astype(np.float64) for a in arrays] for arrays in (given, along)]
    exact = np.asarray(of(*wide, "float64")[0])
    several = 64 * np.finfo(np.float32).eps  # some roundings of values up to 8
    error = np.abs(np.asarray(of_y, np.float64) - exact)
    assert (error <= several + np.abs(exact) * float(jnp.finfo(dtype).eps) / 2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tangent_of_float64_is_rounded_once(dtype: str, path: str) -> None:
    x, t = values((64, 65)), values((64, 65), seed=1)

    def along(out: str) -> Any:
        norm = functools.partial(cupynorm.jax.layer_norm, out_dtype=DTYPES[out])
        return np.asarray(jax.jvp(norm, (x,), (t,))[1])

    # Past a tie by less than float32 can tell, a tangent would be rounded down.
    unit = float(jnp.finfo(dtype).eps)
    bias = np.full(65, 1 + unit / 2 + unit * 2.0**-30)
    _, of_y = jax.jvp(
        lambda bias: cupynorm.jax.layer_norm(x, bias=bias, out_dtype=DTYPES[dtype]),
        (bias,),
        (bias,),
    )
    np.testing.assert_array_equal(np.asarray(of_y, np.float64), 1 + unit)
    np.testing.assert_array_equal(
        along(dtype), reference.round_once(along("float64"), DTYPES[dtype])
    )


def test_forward_mode_is_one_forward_call(kernels: Any) -> None:
    x, residual, weight = values((3, 8)), values((3, 8), seed=1), values((8,), seed=2)
    arrays = (x, residual, weight)

    def push(*tangents: Any) -> Any:
        return jax.jvp(functools.partial(fused, "rms_norm"), arrays, tangents)

    assert calls_of(push, *arrays) == [FORWARD_CALL]


def test_the_gradient_of_vmap_is_one_call_each_way(kernels: Any) -> None:
    x, weight = values((4, 3, 8)), values((8,))
    batched = jax.vmap(cupynorm.jax.rms_norm, in_axes=(0, None))
    step = jax.grad(lambda *a: jnp.sum(batched(*a) ** 2), (0, 1))
    assert calls_of(step, x, weight) == [["x", "weight", "y", "rstd"], BACKWARD_CALL]


def looped(function: Any, axes: tuple[int | None, ...]) -> Any:
    """Return a function's vmap, as a loop."""
    function = jax.jit(function)

    def call(*arrays: Any) -> Any:
        size = next(a.shape[i] for a, i in zip(arrays, axes, strict=True) if i is not None)
        results = []
        for one in range(size):
            taken = (a if i is None else a.take(one, i) for a, i in zip(arrays, axes, strict=True))
            results.append(function(*taken))
        return jax.tree.map(lambda *parts: np.stack(parts), *results)

    return call


@pytest.mark.parametrize(
    ("norm", "axes", "path"),
    in_pairs(NORMS, ((0, None), (1, None), (None, 0), (0, 0)), PATHS),
    indirect=["path"],
)
def test_vmap_is_a_loop_over_the_batch(norm: str, axes: Any, path: str) -> None:
    function = getattr(cupynorm.jax, norm)
    x = values((4, 4, 8))
    weight = values((4, 8) if axes[1] == 0 else (8,), seed=1)

    def gradients(x: Any, weight: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a, weight))), (0, 1))(x, weight)

    for f in (function, gradients):
        batched = jax.jit(jax.vmap(f, in_axes=axes))(x, weight)
        expected = looped(f, axes)(x, weight)
        for b, e in zip(jax.tree.leaves(batched), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(b, e, rtol=1e-10, atol=1e-12)


def test_vmap_of_a_clamped_norm(path: str) -> None:
    x, weight = values((4, 3, 12)), values((12,), seed=1)

    def loss(x: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(cupynorm.jax.rms_norm(x, weight, relu=(0, 1))))

    gradient = jax.grad(loss, (0, 1))
    batched = jax.vmap(gradient, in_axes=(0, None))(x, weight)
    for b, e in zip(batched, looped(gradient, (0, None))(x, weight), strict=True):
        np.testing.assert_allclose(b, e, rtol=1e-10, atol=1e-12)


def test_vmap_within_vmap(path: str) -> None:
    x = values((2, 3, 4, 8))
    twice = jax.vmap(jax.vmap(cupynorm.jax.layer_norm))
    np.testing.assert_allclose(twice(x), cupynorm.jax.layer_norm(x), rtol=1e-12, atol=1e-12)


def test_vmap_of_x_is_one_call_each_way(kernels: Any) -> None:
    x, weight = values((4, 3, 8)), values((8,))

    def step(x: Any, weight: Any) -> Any:
        batched = jax.vmap(cupynorm.jax.rms_norm, in_axes=(0, None))
        return jax.grad(lambda *a: jnp.sum(batched(*a) ** 2), (0, 1))(x, weight)

    program = jax.jit(step).lower(x, weight).compile().as_text()
    assert program.count('custom_call_target="cupynorm.forward"') == 1
    assert program.count('custom_call_target="cupynorm.backward"') == 1
    assert " while(" not in program


def test_jacobian(path: str) -> None:
    x, weight = values((2, 6)), values((6,), seed=1)
    jacobian = jax.jacrev(cupynorm.jax.layer_norm)(x, weight)
    step = 1e-6
    for index in np.ndindex(x.shape):
        shift = np.zeros_like(x)
        shift[index] = step
        difference = cupynorm.layer_norm(x + shift, weight) - cupynorm.layer_norm(x - shift, weight)
        found = jacobian[(..., *index)]
        np.testing.assert_allclose(found, difference / (2 * step), rtol=1e-5, atol=1e-7)


def test_layers_in_a_rematerialized_scan_are_those_of_a_loop(path: str) -> None:
    found, expected = gradients_through_layers(values((3, 8)), values((4, 8), seed=1))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


# ---- a residual ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "residual", "path"), in_pairs(DTYPES, DTYPES, PATHS), indirect=["path"]
)
def test_every_pair_of_x_and_residual(x: str, residual: str, path: str) -> None:
    place = 4 * list(DTYPES).index(x) + list(DTYPES).index(residual)
    norm, shape = NORMS[place % 2], (5, 2, 33)
    weight = values((33,), "float32", 3)
    # The sum has a dtype of its own, or not. It has a gradient for one of the two, in turn. The
    # formula gets the one for which the kernels get the other.
    turn = (place // 8 + (path == "kernels")) % one_in(2)
    for dtype in (None, list(DTYPES)[(place // 2) % 4])[turn :: one_in(2)]:
        has_total = (dtype is None) == (place % 4 in (0, 3))
        check(
            norm,
            values(shape, x, 1),
            weight,
            weight if has_total else None,
            dy=values(shape, "float32", 4),
            residual=values(shape, residual, 2),
            residual_dtype=None if dtype is None else DTYPES[dtype],
            dresidual_out=values(shape, dtype or residual, 5) if has_total else None,
        )


@pytest.mark.parametrize("norm", NORMS)
def test_a_residual_beside_other_options(norm: str, path: str) -> None:
    x, dy, total = (values((4, 3, 10), "bfloat16", seed) for seed in (1, 2, 3))
    residual, bias = values(x.shape, "float32", 4), values((3, 10), "float16", 5)
    weight = values((3, 10), "bfloat16", 6)
    options = {"dy": dy, "k": 2, "relu": (-0.5, 1.0), "eps": 1e-3, "residual": residual}
    options |= {"dresidual_out": total.astype(np.float32)}
    check(norm, x, weight, bias, zero_centered=True, **options)
    check(norm, x, None, None, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_normalized_is_the_rounded_sum(dtype: str, path: str) -> None:
    x, residual = values((64, 65), dtype, 1), values((64, 65), dtype, 2)
    norm = functools.partial(cupynorm.jax.layer_norm, out_dtype=np.float32)
    y, s = jax.jit(lambda x, residual: norm(x, residual=residual))(x, residual)
    assert (np.asarray(s, np.float64) != x.astype(np.float64) + residual.astype(np.float64)).any()
    np.testing.assert_array_equal(y, jax.jit(norm)(s))


@pytest.mark.parametrize("factor", [1e36, 3e38])
@pytest.mark.parametrize("norm", NORMS)
def test_dx_is_in_range_where_its_terms_are_not(norm: str, factor: float) -> None:
    """What the norm passes back overflows. What comes back to s brings it into range again."""
    x, residual = (values((5, 96), "float32", seed) for seed in (1, 2))
    x, residual = (scaled(a, 1e-3) for a in (x, residual))
    dy = scaled(values((5, 96), "float32", 3), factor / 1e3)
    weight = values((96,), "float32", 4)
    function = functools.partial(getattr(cupynorm, f"{norm}_forward"), weight=weight)
    forward = function((x + residual).astype(np.float32))
    statistics = {"rstd": forward.rstd.astype(np.float64)}
    if norm == "layer_norm":
        statistics["mean"] = forward.mean.astype(np.float64)
    wide = getattr(cupynorm, f"{norm}_backward")(
        *(a.astype(np.float64) for a in (dy, x + residual, weight)), **statistics, bias=False
    )
    largest = float(np.finfo(np.float32).max)
    assert (np.abs(wide.dx) > 1e35).any()
    total = (-np.clip(wide.dx, -largest, largest)).astype(np.float32)
    check(norm, x, weight, dy=dy, residual=residual, dresidual_out=total)
    check(norm, x, weight, dy=dy, residual=residual)


def unfused(norm: str, x: Any, residual: Any, *affine: Any, **options: Any) -> Any:
    s = x + residual
    return getattr(cupynorm.jax, norm)(s, *affine, **options), s


def fused(norm: str, x: Any, residual: Any, *affine: Any, **options: Any) -> Any:
    return getattr(cupynorm.jax, norm)(x, *affine, residual=residual, **options)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_with_a_residual_are_those_of_finite_differences(norm: str, path: str) -> None:
    x, residual = values((3, 2, 8)), values((3, 2, 8), seed=1)
    weight, bias = values((8,), seed=2), values((8,), seed=3)
    both = jax.jit(functools.partial(fused, norm))
    check_grads(both, (x, residual, weight, bias), order=2)
    turn = ((norm == "rms_norm") + (path == "kernels")) % one_in(2)
    for i in range(2)[turn :: one_in(2)]:
        one = jax.jit(lambda *a, i=i: both(*a)[i])
        check_grads(one, (x, residual, weight), order=2, modes=["rev"])


LOSSES = {
    "y": lambda y, s: jnp.sum(jnp.sin(y)),
    "s": lambda y, s: jnp.sum(jnp.sin(s)),
    "both": lambda y, s: jnp.sum(jnp.sin(y) * jnp.cos(s)),
}


@pytest.mark.parametrize("used", LOSSES)
def test_second_derivatives_with_a_residual_are_those_of_the_pair(used: str, path: str) -> None:
    arrays = [values(s, seed=seed) for seed, s in enumerate([(3, 8), (3, 8), (8,)])]

    def slope(norm: Any, *arrays: Any) -> Any:
        loss = lambda *a: LOSSES[used](*norm("rms_norm", *a))  # noqa: E731
        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*arrays))

    for function in (fused, unfused):
        found = [
            jax.grad(functools.partial(slope, f), (0, 1, 2))(*arrays) for f in (function, unfused)
        ]
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def calls_of(function: Any, *arrays: Any) -> list[list[str]]:
    """Return what each of our calls in a program reads and writes, except scratch."""
    text = jax.jit(function).lower(*arrays).as_text().replace("\\22", '"')
    found = re.findall(r'"arrays": (\[.*?\])', text)
    return [[name for name in json.loads(names) if name != "scratch"] for names in found]


FORWARD_CALL = ["x", "residual", "weight", "y", "rstd", "residual_out"]
BACKWARD_CALL = ["dy", "x", "weight", "rstd", "dx", "dweight"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("used", LOSSES)
def test_a_program_reads_only_what_comes_back(used: str, wrap: Any, kernels: Any) -> None:
    x, residual, weight = values((3, 8)), values((3, 8), seed=1), values((8,), seed=2)
    norm = wrap(functools.partial(fused, "rms_norm"))
    assert calls_of(norm, x, residual, weight) == [["x", "residual", "weight", "y", "residual_out"]]
    step = jax.grad(lambda *a: LOSSES[used](*norm(*a)), (0, 1, 2))
    calls = calls_of(step, x, residual, weight)
    if used == "s":  # the norm passes nothing back
        assert not [call for call in calls if "dy" in call]
        return
    read = ["dy", "x", "dresidual_out"] if used == "both" else ["dy", "x"]
    assert sorted(calls) == sorted([FORWARD_CALL, read + BACKWARD_CALL[2:]])


@pytest.mark.parametrize("branch", ["float32", "bfloat16"])
def test_s_is_all_that_is_kept_of_x_and_residual(branch: str, path: str) -> None:
    x, residual = values((3, 8), branch), values((3, 8), "float32", 1)
    affine = values((8,), "float32", 2), values((8,), "float32", 3)
    (_, s), pull_back = jax.vjp(functools.partial(fused, "layer_norm"), x, residual, *affine)
    kept = jax.tree.leaves(pull_back)
    assert sorted(a.shape for a in kept) == [(3,), (3,), (3, 8), (8,)]
    (rows,) = (a for a in kept if a.shape == (3, 8))
    np.testing.assert_array_equal(rows, s)


def test_arrays_alone_are_kept_for_second_derivatives(path: str) -> None:
    gradient = jax.grad(lambda x: jnp.sum(cupynorm.jax.layer_norm(x)))
    _, pull_back = jax.vjp(gradient, values((3, 8)))
    kept = [a.shape for a in jax.tree.leaves(pull_back) if a.ndim]
    assert kept == [(3, 8), (3, 8)]  # dy and x


@pytest.mark.parametrize(
    ("norm", "axes", "path"),
    in_pairs(NORMS, ((0, None), (1, None), (None, 0), (0, 1)), PATHS),
    indirect=["path"],
)
def test_vmap_with_a_residual_is_a_loop_over_the_batch(norm: str, axes: Any, path: str) -> None:
    axes = (*axes, None)
    of_batch = (4, 4, 8)
    x, residual = (
        values((4, 8) if axis is None else of_batch, seed=seed)
        for seed, axis in enumerate(axes[:2])
    )
    weight = values((8,), seed=2)

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda *a: LOSSES["both"](*fused(norm, *a)), (0, 1, 2))(*arrays)

    for f in (functools.partial(fused, norm), gradients):
        batched = jax.jit(jax.vmap(f, in_axes=axes))(x, residual, weight)
        expected = looped(f, axes)(x, residual, weight)
        for b, e in zip(jax.tree.leaves(batched), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(b, e, rtol=1e-10, atol=1e-12)


def stream(norm: Any, x: Any, residual: Any, weights: Any) -> Any:
    """A loss of layers whose branches are added to a stream in the norm that follows them."""

    def layer(carry: Any, weight: Any) -> Any:
        branch, s = carry
        y, s = norm("rms_norm", branch, s, weight)
        return (jnp.sin(y).astype(branch.dtype), s), None

    (y, s), _ = jax.lax.scan(jax.checkpoint(layer), (x, residual), weights)
    return jnp.sum(jnp.square(y.astype(s.dtype)) + jnp.square(s))


def test_a_stream_through_a_rematerialized_scan_is_that_of_the_pair(path: str) -> None:
    arrays = values((3, 8)), values((3, 8), seed=1), values((4, 8), seed=2)
    found, expected = (
        jax.jit(jax.grad(functools.partial(stream, norm), (0, 1, 2)))(*arrays)
        for norm in (fused, unfused)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    # A float32 stream also takes bfloat16 branches.
    narrow = values((3, 8), "bfloat16"), *(a.astype(np.float32) for a in arrays[1:])
    gradients = jax.grad(functools.partial(stream, fused), (0, 1, 2))(*narrow)
    assert [g.dtype for g in gradients] == [a.dtype for a in narrow]


def test_a_norm_with_a_residual_is_exported() -> None:
    norm = jax.jit(lambda x, residual: cupynorm.jax.rms_norm(x, residual=residual))
    allowed = jax.export.DisabledSafetyCheck.custom_call("cupynorm.forward")
    exported = jax.export.export(norm, platforms=["cpu", "cuda"], disabled_checks=[allowed])(X, X)
    assert "residual_out" in exported.mlir_module()
    for one, other in zip(exported.call(X, X), norm(X, X), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- what counts as an array ---------------------------------------------------------------------


class Held:
    """An array inside another class, like a module's parameter."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __jax_array__(self) -> Any:
        return self.array


def test_an_object_that_holds_an_array_is_one() -> None:
    x, weight, bias = values((3, 8)), values((8,), seed=1), values((8,), seed=2)
    expected = cupynorm.jax.layer_norm(x, weight, bias)
    for hold in (jnp.asarray, lambda array: array, Held):
        y = cupynorm.jax.layer_norm(Held(hold(x)), Held(hold(weight)), Held(hold(bias)))
        np.testing.assert_array_equal(y, expected)

    def gradient(hold: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(cupynorm.jax.rms_norm(x, hold(w)) ** 2))(weight)

    np.testing.assert_array_equal(gradient(Held), gradient(lambda weight: weight))
    with pytest.raises(TypeError, match=r"weight must be a JAX or NumPy array, got builtins.list"):
        cupynorm.jax.rms_norm(x, Held([1.0]))


def test_parameters_of_flax_are_arrays() -> None:
    nnx = pytest.importorskip("flax.nnx")
    x, weight = values((3, 8)), jnp.asarray(values((8,), seed=1))

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.scale = nnx.Param(weight)

        def __call__(self, x: Any) -> Any:
            return cupynorm.jax.rms_norm(x, self.scale)

    expected = jax.grad(lambda weight: jnp.sum(cupynorm.jax.rms_norm(x, weight) ** 2))(weight)
    for of in (lambda grad: grad, nnx.jit):
        gradients = of(nnx.grad(lambda module: jnp.sum(module(x) ** 2)))(Module())
        np.testing.assert_allclose(gradients["scale"][...], expected, rtol=1e-12)


# ---- errors --------------------------------------------------------------------------------------

X, ROW = np.ones((2, 3, 8), np.float32), np.ones(8, np.float32)


def test_symbolic_shapes_are_refused() -> None:
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8), np.float32)
    with pytest.raises(NotImplementedError, match=r"x must have a shape of numbers, got .*rows, 8"):
        jax.export.export(jax.jit(cupynorm.jax.rms_norm))(x)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("eps", 1e-3), ("axis", -1), ("zero_centered", True), ("relu", (0.0, 1.0))),
        *(("out_dtype", 1.0), ("residual_dtype", 1.0)),
    ],
)
def test_an_option_that_is_traced_is_refused(name: str, option: Any) -> None:
    message = f"{name} must be known when a program is traced: jit has it in static_argnames"
    how = cupynorm.Quantize("int8", "row")
    for value in (option, list(option)) if isinstance(option, tuple) else (option,):
        for quantize in (None, how):
            call = functools.partial(cupynorm.jax.rms_norm, X, quantize=quantize)
            with pytest.raises(TypeError, match=message):
                jax.jit(lambda option, call=call: call(**{name: option}))(value)


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        *((cupynorm.fuse("rms_norm"), n) for n in ("eps", "axis", "zero_centered", "out_dtype")),
        *((cupynorm.fused.l2_norm, n) for n in ("eps", "axis", "out_dtype")),
        *((cupynorm.rms_norm, n) for n in ("eps", "axis", "zero_centered", "out_dtype")),
    ],
)
def test_an_option_of_other_norms_that_is_traced_is_refused(norm: Any, name: str) -> None:
    x = jnp.asarray(X)
    message = f"{name} must be known when a program is traced: jit has it in static_argnames"
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda option: norm(x, **{name: option}))(1)


def test_no_axis_is_added_silently(path: str) -> None:
    x, weight, bias = values((3, 8)), values((8,), seed=1), values((8,), seed=2)

    def slope(*arrays: Any) -> Any:
        gradients = jax.grad(lambda *a: jnp.sum(cupynorm.jax.layer_norm(*a) ** 3), (0, 1, 2))
        return sum(jnp.sum(g**2) for g in gradients(*arrays))

    expected = jax.grad(slope, (0, 1))(x, weight, bias)
    with jax.numpy_rank_promotion("raise"):
        found = jax.grad(slope, (0, 1))(x, weight, bias)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_axis_is_added_silently_by_a_relu() -> None:
    def slope(x: Any) -> Any:
        return jax.grad(lambda v: jnp.sum(cupynorm.jax.layer_norm(v, relu=(-0.5, 0.5)) ** 2))(x)

    x = values((3, 11))
    with jax.numpy_rank_promotion("raise"):
        found = slope(x), jax.vmap(slope)(x)
    for one, other in zip(found, (slope(x), jax.vmap(slope)(x)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_keys_of_random_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"x.dtype must be float64.* got key<"):
        cupynorm.jax.rms_norm(jax.random.key(0))


def test_an_exported_program_runs_by_the_formula_and_has_the_kernel_for_cuda() -> None:
    norm = jax.jit(lambda x: cupynorm.jax.rms_norm(x))  # our own: JAX remembers programs
    allowed = jax.export.DisabledSafetyCheck.custom_call("cupynorm.forward")
    exported = jax.export.export(norm, platforms=["cpu", "cuda"], disabled_checks=[allowed])(X)
    assert "cupynorm.forward" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X), norm(X))


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_gradients_for_a_gpu_are_not_exported_without_one(
    platforms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels, "_ordinals", lambda platform: ())
    calls = ("cupynorm.forward", "cupynorm.backward")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(cupynorm.jax.rms_norm(x, ROW) ** 2)))
    message = r"gradients for cuda can be compiled or exported only where JAX has such a device"
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(gradient, platforms=platforms, disabled_checks=allowed)(X)
    exported = jax.export.export(gradient, platforms=["cpu"])(X)
    np.testing.assert_array_equal(exported.call(X), gradient(X))


def test_float64_must_be_enabled() -> None:
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"out_dtype .* float64 without"):
        cupynorm.jax.rms_norm(X, out_dtype="float64")
    message = r"residual_dtype .* float64 without"
    with jax.enable_x64(False), pytest.raises(TypeError, match=message):
        cupynorm.jax.rms_norm(X, residual=X, residual_dtype="float64")


# ---- how XLA splits rows ------------------------------------------------------------------------


def parts_of(sizes: tuple[int, ...], along: list[list[int]]) -> Any:
    """Return which part each device of a mesh has, along each axis of an array."""
    digits = np.indices(sizes).reshape(len(sizes), -1)
    return np.stack(
        [
            np.ravel_multi_index([digits[i] for i in axes], [sizes[i] for i in axes])
            if axes
            else 0 * digits[0]
            for axes in along
        ],
        axis=-1,
    )


@dataclasses.dataclass
class Split:
    """A sharding: which devices have which parts."""

    parts: Any

    @property
    def num_devices(self) -> int:
        return len(self.parts)

    def devices_indices_map(self, shape: tuple[int, ...]) -> Any:
        widths = shape // (self.parts.max(0) + 1)
        return {
            device: tuple(slice(p * w, (p + 1) * w) for p, w in zip(parts, widths, strict=True))
            for device, parts in enumerate(self.parts)
        }


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_mesh_is_found_for_each_sharding(sizes: list[int], data: Any) -> None:
    shape = tuple(sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    # Of the places that an array's axes offer, the last stands for no axis.
    places = [data.draw(st.integers(0, 3)) for _ in sizes]
    parts = parts_of(shape, [[i for i in order if places[i] == place] for place in range(3)])
    mesh, spec = _operations._common_split([Split(parts)], 3, 0)
    axes = [[mesh.axis_names.index(name) for name in names] for names in spec]
    np.testing.assert_array_equal(parts_of(mesh.axis_sizes or (1,), axes), parts)


def test_rows_in_an_order_that_no_mesh_has_are_taken_as_whole() -> None:
    for parts in ([[0], [1], [3], [2]], [[1], [0]], [[0, 0], [1, 1]]):
        mesh, spec = _operations._common_split([Split(np.array(parts))], len(parts[0]), 0)
        assert (mesh.axis_names, spec) == ((), len(parts[0]) * ((),))


@given(st.lists(st.integers(2, 3), min_size=1, max_size=4), st.data())
def test_rows_that_are_split_differently_are_gathered_only_where_they_must(
    sizes: list[int], data: Any
) -> None:
    """The last of the three axes is normalized."""
    shape, count = tuple(sizes), len(sizes)
    splits = []
    for _ in range(2):
        places = [data.draw(st.integers(0, 3)) for _ in sizes]
        splits.append([[i for i in range(count) if places[i] == place] for place in range(3)])
    first, second = (parts_of(shape, split) for split in splits)
    shardings = [None, *map(Split, (first, second)), None]
    mesh, spec = _operations._common_split(shardings, 3, 1)
    axes = [[mesh.axis_names.index(name) for name in names] for names in spec]
    common = parts_of(mesh.axis_sizes or (1,), axes)
    common = common if mesh.axis_sizes else np.zeros((len(first), 2), int)
    for i in range(2):
        assert common[:, i].max() >= first[:, i].max()
        assert any((common[:, i] == one[:, i]).all() for one in (first, second))
    for i in range(2):
        others = {axis for split in splits for axis in split[1 - i]}
        if not others & {axis for split in splits for axis in split[i]}:
            assert common[:, i].max() == max(one[:, i].max() for one in (first, second))


# ---- XLA's foreign function interface ------------------------------------------------------------

# An error of a call raises one of these. Which one depends on where JAX meets it.
XLA_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def test_an_error_in_a_launch_is_an_exception_and_the_next_call_is_right(kernels: Any) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no launch today: ü")

    function = jax.jit(cupynorm.jax.rms_norm)
    expected = np.asarray(function(X))
    with kernels.context() as patch:
        patch.setattr(jax_plans.ForwardPlan, "launch", fail)
        with pytest.raises(XLA_ERRORS, match="RuntimeError: no launch today: ü"):
            function(X).block_until_ready()
    np.testing.assert_array_equal(function(X), expected)


def operands_of(x: int, y: int) -> list[int]:
    """Return the operands of a forward pass over rows of 8 that has only x and y."""
    given = {"x": x, "y": y}
    return [8 if o.endswith("_stride") else given.get(o, 0) for o in FORWARD.operands]


def test_misaligned_arrays_are_refused(kernels: pytest.MonkeyPatch) -> None:
    launched = []
    kernels.setattr(jax_plans.ForwardPlan, "launch", lambda plan, *a: launched.append(a))
    spec = ForwardSpec("rms_norm", "float32", None, None, "float32", False, False, False)
    call = {"m": 3, "n": 8, "groups": None, "eps": 0.5, "relu": None, "scratch": 0}
    call |= {"arrays": ["x", "y"], "spec": dataclasses.asdict(spec)}
    description = json.dumps(call)
    launch, _ = _kernels._prepare(ForwardSpec, "cpu", description, 0, 7)
    launch(7, [32, 64])
    assert launched == [(7, 3, operands_of(32, 64), 0, 0.5, 0.0, 0.0, None)]
    with pytest.raises(ValueError, match="aligned to 16 bytes, got x at 0x20, y at 0x48"):
        launch(7, [32, 72])
    assert len(launched) == 1


def test_a_program_with_less_scratch_than_its_device_needs(kernels: Any) -> None:
    spec = BackwardSpec("rms_norm", "float32", "float32", None, None, False, False)
    call = {"m": 2, "n": 8, "groups": None, "arrays": ["dy", "x", "rstd", "dx", "scratch"]}
    call["spec"] = dataclasses.asdict(spec)
    needed = jax_plans.BackwardPlan(spec, 8, 2).scratch_bytes(2, None)
    _kernels._prepare(BackwardSpec, "cpu", json.dumps(call | {"scratch": needed}), 0, 7)
    with pytest.raises(ValueError, match=f"has {needed - 1} bytes .* GPU 0 needs {needed}: "):
        _kernels._prepare(BackwardSpec, "cpu", json.dumps(call | {"scratch": needed - 1}), 0, 7)
    spec = ForwardSpec("rms_norm", "float32", None, None, "float32", False, False, False)
    call = {"m": 2, "n": 8, "groups": None, "eps": 0.5, "relu": None}
    call["spec"] = dataclasses.asdict(spec)
    launched: list[Any] = []
    kernels.setattr(jax_plans.ForwardPlan, "launch", lambda plan, *a: launched.append(a))
    call["arrays"] = ["x", "y", "scratch"]
    launch, _ = _kernels._prepare(ForwardSpec, "cpu", json.dumps(call | {"scratch": 16}), 0, 7)
    launch(7, [32, 64, 96])
    # A forward pass can do without scratch.
    call["arrays"] = ["x", "y"]
    launch, _ = _kernels._prepare(ForwardSpec, "cpu", json.dumps(call | {"scratch": 0}), 0, 7)
    launch(7, [32, 64])
    assert launched == [(7, 2, operands_of(32, 64), s, 0.5, 0.0, 0.0, None) for s in (96, 0)]


def test_a_call_whose_kernel_stands_in_is_prepared_again(kernels: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    plan = jax_plans.forward_plan

    def counted(*arguments: Any, soon: bool) -> Any:
        made.append(soon)
        return plan(*arguments, soon=soon)

    kernels.setattr(jax_plans, "forward_plan", counted)
    function = jax.jit(lambda x: cupynorm.jax.rms_norm(x, eps=0.0625))  # as no other test has it
    kernels.setattr(jax_plans.ForwardPlan, "stands_in", True)
    expected = np.asarray(function(X))
    once = len(made)
    for stands_in, more in ((True, 1), (False, 2), (False, 2)):
        kernels.setattr(jax_plans.ForwardPlan, "stands_in", stands_in)
        np.testing.assert_array_equal(function(X), expected)
        assert len(made) == once + more
    assert all(made)


def test_a_program_says_all_that_its_calls_need(kernels: Any) -> None:
    """It may be cached or run in another process, so it must not depend on this one."""
    text = jax.jit(cupynorm.jax.rms_norm).lower(X, ROW).as_text().replace("\\22", '"')
    (call,) = re.findall(r'call = "({.*?}})"', text)
    assert json.loads(call) == {
        "m": 6,
        "n": 8,
        "groups": None,
        "eps": 1e-6,
        "relu": None,
        "scratch": 0,
        "arrays": ["x", "weight", "y"],
        "spec": dataclasses.asdict(
            ForwardSpec("rms_norm", "float32", "float32", None, "float32", False, False, False)
        ),
    }


def test_structures_that_are_too_small_are_refused() -> None:
    words = ctypes.c_uint64 * 32
    metadata, extension = words(36), words()
    extension[1:4] = _xla.METADATA_EXTENSION, 0, ctypes.addressof(metadata)
    api = words(192)
    frame = words(168, ctypes.addressof(extension), ctypes.addressof(api))
    handler = _kernels._HANDLERS[0]
    before = handler.refusal
    try:
        assert handler._called(ctypes.addressof(frame)) == 0
        assert handler.refusal is None
        assert metadata[:5] == [36, 0, 0, 1 << 32, 0]
        frame[0] -= 8
        handler._called(ctypes.addressof(frame))
        assert handler.refusal is not None
        assert "call frame 160 (of 168)" in handler.refusal
        with pytest.raises(XLA_ERRORS, match="too few bytes: call frame 160"):
            jax.ffi.ffi_call("cupynorm.forward", jax.ShapeDtypeStruct((), "float32"))(
                call="anything"
            ).block_until_ready()
    finally:
        handler.refusal = before


def api_of(*functions: Any) -> Any:
    """Return an API of functions that take a structure as words, and return an error."""
    kind = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64 * 5))
    wrapped = [kind(lambda given, function=f: function(given.contents) or 0) for f in functions]
    words = (ctypes.c_uint64 * 24)()
    _xla.API.pack_into(words, 0, *(ctypes.cast(f, ctypes.c_void_p).value for f in wrapped))
    api: Any = _xla._Api(ctypes.addressof(words))
    api.kept = wrapped
    return api


def test_threads_do_not_mix_what_they_ask() -> None:
    asked = threading.Barrier(2)

    def answer(question: Any) -> None:
        asked.wait(10)  # both have asked before either one is answered
        question[3] = question[2] + 1
        asked.wait(10)

    api = api_of(*5 * (answer,))
    answers: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        answers[first] = [api.ask(api.stream, first + turn) for turn in range(50)]

    threads = [threading.Thread(target=ask, args=(first,)) for first in (1000, 1 << 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {first: [first + turn + 1 for turn in range(50)] for first in (1000, 1 << 60)}


def test_what_xla_does_not_answer_is_an_error_with_its_message() -> None:
    text = ctypes.create_string_buffer("no stream today: ü".encode())
    destroyed = []

    def tell(question: Any) -> None:
        assert question[2] == 77
        question[3] = ctypes.addressof(text)

    def destroy(question: Any) -> None:
        destroyed.append(question[2])

    api = api_of(tell, tell, destroy, lambda question: 77, tell)
    with pytest.raises(RuntimeError, match="no stream today: ü"):
        api.ask(api.stream, 5)
    assert destroyed == [77]


def test_without_cupy_a_gpu_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"install cupynorm\[cuda12\] or cupynorm\[cuda13\]"):
        _kernels._cuda_plans()


def test_an_older_jax_is_refused() -> None:
    program = "import jax; jax.__version_info__ = (0, 10, 1); import cupynorm.jax"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: cupynorm.jax needs JAX 0.10.2 or newer" in done.stderr


def test_importing_cupynorm_imports_no_jax() -> None:
    program = "import cupynorm, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
