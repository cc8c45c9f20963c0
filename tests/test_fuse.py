"""Norms of `cupynorm.fuse`: traces, values, gradients and errors, on arrays of each framework."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fused_norms import ONE, TWO, Call, calls, function_of
from hypothesis import given, settings

import cupynorm
import cupynorm.math as cm
from cupynorm import _arrays, _fuse, fused, reference, testing
from cupynorm._expressions import gradients, trace

FLOAT64 = ("float64",)
few = settings(max_examples=30, report_multiple_bugs=False)
GATED = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cm.silu(z))


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(call: Call, outputs: Any) -> None:
    testing.check_fused(
        call.fused, outputs, call.x, call.weight, call.bias, **call.options, **call.inputs
    )


def check_both(call: Call) -> None:
    """Check the outputs and the gradients of NumPy arrays."""
    forward = call.of(call.fused.forward)
    check(call, forward.outputs)
    rng = np.random.default_rng(6)
    dy = [rng.standard_normal(call.x.shape).astype(call.x.dtype) for _ in forward.outputs]
    found = call.fused.backward(dy, forward)
    testing.check_fused_backward(call.fused, found, dy, forward)


# ---- values --------------------------------------------------------------------------------------


@given(calls())
def test_numpy_arrays_are_one_rounding_from_exact(call: Call) -> None:
    outputs = call.of()
    assert all(type(output) is np.ndarray for output in as_tuple(outputs))
    check_both(call)


def float32_tools() -> _fuse.Tools:
    """Return tools of NumPy that round each operation to the compute dtype, as a GPU does."""
    return dataclasses.replace(
        _fuse.NUMPY_TOOLS,
        widen=lambda array, dtype: array.astype(dtype),
        number=lambda value, like: like.dtype.type(value),
        stored=lambda values, dtype: _fuse.NUMPY_TOOLS.stored(values, dtype).astype(values.dtype),
        normalize=lambda norm, x, *vectors, **options: tuple(
            None if a is None else a.astype(x.dtype)
            for a in _fuse._normalize(norm, x.astype(np.float64), *vectors, **options)
        ),
    )


@given(calls())
def test_the_compute_dtype_keeps_the_bound(call: Call) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fuse, "_tools_of", lambda x: float32_tools())
        check_both(call)


def test_the_check_sees_an_error_of_a_thousandth() -> None:
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((2, 4, 64)).astype(np.float32)
    y = GATED(x, z=z)
    assert testing.check_fused(GATED, y, x, z=z)[0] < 1
    y[1, 2] *= 1.001
    with pytest.raises(AssertionError, match=r"output 0\[1, 2\] is"):
        testing.check_fused(GATED, y, x, z=z)
    with pytest.raises(AssertionError, match="must have dtype"):
        testing.check_fused(GATED, y.astype(np.float64), x, z=z)


def test_the_check_lets_a_vanishing_number_be_0() -> None:
    switched = cupynorm.fuse("rms_norm", epilogue=lambda y, x, a: cm.where(a > 0, y, x))
    x = np.random.default_rng(16).standard_normal((2, 8), np.float32)
    for a in np.random.default_rng(17).uniform(1e-300, 1e-39, 50):
        testing.check_fused(switched, x, x, a=float(a))
    with pytest.raises(AssertionError, match="times the bound"):
        testing.check_fused(switched, x, x, a=1e-37)


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_a_sum_that_is_stored_is_what_is_normalized(residual_dtype: str) -> None:
    added = cupynorm.fuse("rms_norm", prologue=lambda x, residual: (x + residual, x + residual))
    rng = np.random.default_rng(1)
    x, residual = rng.standard_normal((2, 5, 96)).astype(ml_dtypes.bfloat16)
    residual = residual.astype(residual_dtype)
    weight = rng.standard_normal(96)
    y, total = added(x, weight, residual=residual, out_dtype=(None, residual_dtype))
    expected = cupynorm.rms_norm(x, weight, residual=residual)
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(total, expected[1])


def test_a_mask_is_a_condition() -> None:
    masked = cupynorm.fuse("rms_norm", epilogue=lambda y, kept: cm.where(~kept, 0, y / 0.5))
    x, kept = np.ones((2, 4)), np.array([True, False, True, True])
    expected = 2 * cupynorm.rms_norm(x) * kept
    np.testing.assert_array_equal(masked(x, kept=kept), expected)
    torch = pytest.importorskip("torch", minversion="2.11")
    y = masked(torch.from_numpy(x), kept=torch.from_numpy(kept))
    np.testing.assert_array_equal(y.numpy(), expected)
    assert masked.backward(x, masked.forward(x, kept=kept)).dkept is None
    assert GATED.backward(x, GATED.forward(x, z=2)).dz is None
    np.testing.assert_array_equal(masked(x, kept=True), 2 * cupynorm.rms_norm(x))


def test_outputs_are_arrays_of_their_own() -> None:
    both = cupynorm.fuse(
        "rms_norm", prologue=lambda x, z: (x, x, z), epilogue=lambda y, z: (y, z, y)
    )
    x, z = np.ones((2, 4)), np.ones(4)
    torch = pytest.importorskip("torch", minversion="2.11")
    for outputs in (both(x, z=z), both(torch.from_numpy(x), z=torch.from_numpy(z))):
        arrays = [np.asarray(output) for output in outputs]
        assert all(array.flags.c_contiguous and array.flags.writeable for array in arrays)
        for i, array in enumerate(arrays):
            array[...] = i
        assert [array[0, 0] for array in arrays] == [0, 1, 2, 3, 4]
    assert (x == 1).all()
    assert (z == 1).all()


def test_nan_stays_in_its_row() -> None:
    rng = np.random.default_rng(2)
    x, z = rng.standard_normal((2, 3, 8)).astype(np.float32)
    x[1, 3] = np.nan
    y = GATED(x, z=z)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], GATED(x[[0, 2]], z=z[[0, 2]]))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, z = np.zeros(shape, np.float32), np.ones(8)
    forward = GATED.forward(x, z=z)
    found = GATED.backward(x, forward)
    assert forward.y.shape == found.dx.shape == shape
    np.testing.assert_array_equal(found.dz, np.zeros(8))
    assert not any(testing.check_fused_backward(GATED, found, x, forward).values())


# ---- gradients -----------------------------------------------------------------------------------


@given(calls(FLOAT64))
def test_gradients_are_finite_differences(call: Call) -> None:
    """A step in a random direction changes the outputs as the gradients say.

    The error is that of central differences, some h**2, and of rounding, some u / h.
    """
    h = 1e-5
    rng = np.random.default_rng(3)
    forward = call.of(call.fused.forward)
    of_outputs = [rng.standard_normal(call.x.shape) for _ in forward.outputs]
    found = call.fused.backward(of_outputs, forward)
    for name, array in call.arrays.items():
        gradient = getattr(found, f"d{name}")
        assert gradient.shape == array.shape
        assert gradient.dtype == array.dtype
        direction = rng.standard_normal(array.shape)
        ends = [
            as_tuple(call.of(**{name: np.asarray(array + step * direction)})) for step in (h, -h)
        ]
        terms = [dy * (a - b) / (2 * h) for dy, a, b in zip(of_outputs, *ends, strict=True)]
        slope, size = sum(t.sum() for t in terms), sum(abs(t).sum() for t in terms)
        along = (gradient * direction).sum()
        if abs(slope - along) > 1e-5 * (size + abs(gradient * direction).sum() + 1):
            # There is a kink within the step. The gradient lies between the slopes of both sides.
            middle = as_tuple(call.of())
            sides = sorted(
                sum((dy * (a - b) / h).sum() for dy, a, b in zip(of_outputs, *pair, strict=True))
                for pair in ((ends[0], middle), (middle, ends[1]))
            )
            off = 1e-3 * (1 + abs(slope))
            assert sides[0] - off <= along <= sides[1] + off, name
            assert sides[1] - sides[0] > 1e-6 * (1 + abs(slope)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_rounded_once_and_have_their_arrays_dtypes(dtype: str) -> None:
    rng = np.random.default_rng(4)
    x, z, dy = rng.standard_normal((3, 4, 16)).astype(dtype)
    weight, scale = rng.standard_normal(16).astype(np.float16), rng.standard_normal((4, 1))
    both = cupynorm.fuse("layer_norm", epilogue=lambda y, z, scale: y * scale + cm.tanh(z))
    found = both.backward(dy, both.forward(x, weight, z=z, scale=scale))
    wide = [np.asarray(a, np.float64) for a in (x, weight, z, scale)]
    exact = both.backward(dy.astype(np.float64), both.forward(*wide[:2], z=wide[2], scale=wide[3]))
    for of, array, other in zip(
        (found.dx, found.dweight, found.dz, found.dscale),
        (x, weight, z, scale),
        (exact.dx, exact.dweight, exact.dz, exact.dscale),
        strict=True,
    ):
        np.testing.assert_array_equal(of, reference.round_once(other, array.dtype))
    assert found.dbias is None


def test_an_output_without_a_gradient_counts_as_zeros() -> None:
    two = cupynorm.fuse("rms_norm", epilogue=lambda y, z: (y * z, y + z))
    rng = np.random.default_rng(5)
    x, z, dy = rng.standard_normal((3, 2, 8))
    forward = two.forward(x, z=z)
    for ours, zeros in zip(
        two.backward((None, dy), forward), two.backward((0 * dy, dy), forward), strict=True
    ):
        np.testing.assert_array_equal(ours, zeros)


def value_and_slopes(function: Any, *points: Any) -> list[Any]:
    """Return what a function makes of arrays, and its derivative in each of them."""
    names = ("v", "w")[: len(points)]
    program = trace("function", function_of(names, (lambda s: function(*s.values()),)), "v")
    of = gradients(program, ("_0",), names)
    tools, like = _fuse.NUMPY_TOOLS, np.float64(0)
    values = program.evaluate(tools, like, points)
    return values + of.evaluate(tools, like, [*points, np.ones(points[0].shape)])


@pytest.mark.parametrize("i", range(len(ONE) + len(TWO)))
def test_a_derivative_is_a_finite_difference(i: int) -> None:
    function, h = (*ONE, *TWO)[i], 1e-6
    points = [np.array([0.7, -1.3, 2.1, -0.2]), np.array([-0.4, 1.7, 0.3, -2.2])]
    points = points[: 1 if i < len(ONE) else 2]
    _, *slopes = value_and_slopes(function, *points)
    for k, slope in enumerate(slopes):
        ends = (
            value_and_slopes(function, *(p + (n == k) * step for n, p in enumerate(points)))[0]
            for step in (h, -h)
        )
        difference = (next(ends) - next(ends)) / (2 * h)
        np.testing.assert_allclose(slope, difference, rtol=1e-7, atol=1e-8)


VALUES: Any = [  # by libm at 0.7
    (cm.sigmoid, lambda v: 1 / (1 + math.exp(-v))),
    (cm.silu, lambda v: v / (1 + math.exp(-v))),
    (cm.softplus, lambda v: math.log1p(math.exp(v))),
    (cm.gelu, lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2),
    (
        lambda v: cm.gelu(v, "tanh"),
        lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    ),
    (lambda v: v**2.5 + v**-1 + v**0.5 + v**0 + v**3, lambda v: v**2.5 + 1 / v + v**0.5 + 1 + v**3),
    (lambda v: cm.maximum(v, 0.5) - cm.minimum(v, 0.5), lambda v: v - 0.5),
    (lambda v: cm.clip(v, 1, 2) + cm.clip(v, -2, -1) + cm.clip(v, 1, -1), lambda v: -1.0),
    (
        lambda v: cm.exp(v) + cm.log(v) + cm.tanh(v),
        lambda v: math.exp(v) + math.log(v) + math.tanh(v),
    ),
    (lambda v: cm.erf(v) - abs(-v) + 3**v, lambda v: math.erf(v) - v + 3**v),
]


@pytest.mark.parametrize("i", range(len(VALUES)))
def test_functions_are_their_formulas(i: int) -> None:
    ours, formula = VALUES[i]
    value = value_and_slopes(ours, np.array([0.7]))[0]
    np.testing.assert_allclose(value, formula(0.7), rtol=1e-15)


@pytest.mark.parametrize(
    ("function", "at", "values"),
    [
        (cm.sigmoid, (-800.0, 800.0), (0, 1)),
        (cm.silu, (-800.0, 800.0), (0, 800)),
        (cm.softplus, (-800.0, 800.0), (0, 800)),
        (cm.gelu, (-800.0, 800.0), (0, 800)),
        (lambda v: cm.gelu(v, "tanh"), (-50.0, 50.0), (0, 50)),
        (cm.relu, (-1.0, 0.0), (0, 0)),
        (lambda v: cm.where(cm.abs(v) < math.inf, v, 0), (math.inf, 2.0), (0, 2)),
        (lambda v: (v - 2e308 / 1e10) / 4, (3.0, -3.0), (-math.inf, -math.inf)),
    ],
)
def test_functions_do_not_overflow(function: Any, at: Any, values: Any) -> None:
    with np.errstate(all="ignore"):
        value, slope = value_and_slopes(function, np.array(at))
    np.testing.assert_allclose(value, values, atol=1e-300)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    "function",
    [
        *(cm.relu, cm.gelu, cm.silu, cm.softplus, cm.abs, cm.tanh, lambda v: cm.clip(v, -1, 1)),
        *(lambda v: cm.maximum(v, 1.0), lambda v: cm.minimum(1.0, v)),
        *(lambda v: v - v, lambda v: 0 * v),
    ],
)
def test_a_nan_stays_one(function: Any) -> None:
    value = value_and_slopes(function, np.array([np.nan, 1.0]))[0]
    assert np.isnan(value).tolist() == [True, False]


# A function, a point, and its derivative there in each argument.
KINKS: Any = [
    (cm.abs, (0.0,), (0.0,)),
    (cm.relu, (0.0,), (0.0,)),
    (lambda v: cm.clip(v, 0, 1), (0.0,), (0.0,)),
    (lambda v: cm.clip(v, -1, 0), (0.0,), (0.0,)),
    (cm.maximum, (1.0, 1.0), (0.5, 0.5)),
    (cm.minimum, (1.0, 1.0), (0.5, 0.5)),
    (lambda v, w: cm.relu(v) ** w, (0.0, 2.0), (0.0, 0.0)),
    (lambda v: cm.where(v >= 0, 2 * v, v), (0.0,), (2.0,)),
    (lambda v, w: v**w, (0.0, 0.0), (0.0, 0.0)),
    (lambda v, w: v**w, (0.0, -1.0), (-math.inf, -math.inf)),
]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("i", range(len(KINKS)))
def test_derivatives_at_kinks(i: int, framework: str) -> None:
    function, at, slopes = KINKS[i]
    if framework == "jax" and i >= len(KINKS) - 2:
        pytest.skip("JAX gives NaN for 0**p")
    names = ("v", "w")[: len(at)]
    epilogue = function_of(
        ("y", *names), (lambda s: s["y"] * 0 + function(*(s[n] for n in names)),)
    )
    norm = cupynorm.fuse("rms_norm", epilogue=epilogue)
    x, inputs = (
        np.ones((1, 2)),
        {n: np.full((1, 2), value) for n, value in zip(names, at, strict=True)},
    )
    if framework == "numpy":
        gradients_ = norm.backward(np.ones((1, 2)), norm.forward(x, **inputs))
        found = [getattr(gradients_, f"d{name}") for name in names]
    elif framework == "torch":
        torch = pytest.importorskip("torch", minversion="2.11")
        leaves = {n: torch.from_numpy(a).requires_grad_() for n, a in inputs.items()}
        norm(torch.from_numpy(x), **leaves).sum().backward()
        found = [leaf.grad for leaf in leaves.values()]
    else:
        jax = pytest.importorskip("jax", minversion="0.10.2")
        given = {n: jax.numpy.asarray(a, "float32") for n, a in inputs.items()}
        of = jax.grad(lambda arrays: norm(jax.numpy.ones((1, 2)), **arrays).sum())(given)
        found = [of[name] for name in names]
    for gradient, slope in zip(found, slopes, strict=True):
        np.testing.assert_array_equal(np.asarray(gradient), np.full((1, 2), slope))


def test_a_program_keeps_the_order_of_a_function() -> None:
    centred = cupynorm.fuse("rms_norm", prologue=lambda x, r: (x - r) / 3)
    assert "(x - r) / 3" in repr(centred)
    x = (1 + np.arange(12) * 2.0**-23).reshape(2, 6).astype(np.float32)
    torch = pytest.importorskip("torch", minversion="2.11")
    y = centred(torch.from_numpy(x), r=torch.ones(2, 6), eps=0.0).numpy()
    testing.check_fused(centred, y, x, r=np.ones((2, 6), np.float32), eps=0.0)


def test_deep_functions_take_no_longer_than_their_length() -> None:
    def deep(y: Any) -> Any:
        for _ in range(200):
            y = y * cm.sigmoid(y)
        return y

    norm = cupynorm.fuse("rms_norm", epilogue=deep)
    assert len(repr(norm)) < 2000
    assert len(gradients(norm.epilogue, ("_0",), ("y",)).steps) < 10 * len(norm.epilogue.steps)
    x = np.ones((2, 4))
    assert np.isfinite(norm.backward(x, norm.forward(x)).dx).all()


# ---- wrong gradients -----------------------------------------------------------------------------

MIXED = cupynorm.fuse(
    "layer_norm",
    prologue=lambda x, r: x + r,
    epilogue=lambda y, x, z, a: y * cm.silu(z) + x * a,
)
# The same of an input c that equals one of the arguments, whose gradient lacks a term then.
LACKING: dict[str, Any] = {
    "x": lambda y, x, z, a, c: y * cm.silu(z) + c * a,
    "z": lambda y, x, z, a, c: y * (z * cm.sigmoid(c)) + x * a,
    "a": lambda y, x, z, a, c: y * cm.silu(z) + x * (a + c) / 2,
}
SHAPES = {"x": (6, 64), "weight": (64,), "bias": (64,), "r": (64,), "z": (6, 64), "a": (6, 1)}
GIVEN: dict[str, Any] = {
    name: np.random.default_rng(i).standard_normal(shape, np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}
DY = np.random.default_rng(14).standard_normal(SHAPES["x"], np.float32)


def forward_of(norm: cupynorm.Fused, **inputs: Any) -> Any:
    named = GIVEN | inputs
    x, weight, bias = (named.pop(name) for name in ("x", "weight", "bias"))
    return norm.forward(x, weight, bias, **named)


def check_is_seen(norm: cupynorm.Fused, wrong: Any, forward: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        testing.check_fused_backward(norm, wrong, DY, forward)


@pytest.mark.parametrize("name", GIVEN)
def test_the_check_sees_a_wrong_gradient(name: str) -> None:
    forward = forward_of(MIXED)
    found = MIXED.backward(DY, forward)
    assert testing.check_fused_backward(MIXED, found, DY, forward)[f"d{name}"] < 1
    right = getattr(found, f"d{name}")
    wrong = [right * np.float32(1 + 2.0**-10), right.astype(np.float16).astype(np.float32)]
    if name in LACKING:
        prologue = trace("prologue", lambda x, r: x + r, "x")
        lacking = cupynorm.Fused("layer_norm", prologue, trace("epilogue", LACKING[name], "y"))
        of_lacking = lacking.backward(DY, forward_of(lacking, c=GIVEN[name]))
        wrong.append(getattr(of_lacking, f"d{name}"))
    for one in wrong:
        message = rf"d{name}\[.* times the bound"
        check_is_seen(MIXED, found._replace(**{f"d{name}": one}), forward, message)
    for one in (None, right.astype(np.float64), right[:1]):  # a value, a dtype and a shape
        message = f"d{name} must"
        check_is_seen(MIXED, found._replace(**{f"d{name}": one}), forward, message)


def test_the_check_sees_a_gradient_that_takes_rstd_for_a_constant() -> None:
    plain = cupynorm.fuse("rms_norm")
    forward = plain.forward(GIVEN["x"])
    wrong = plain.backward(DY, forward)._replace(dx=DY * forward.rstd[:, None])
    check_is_seen(plain, wrong, forward, r"dx\[.* times the bound")


def test_the_check_sees_float16_between_the_epilogue_and_the_norm() -> None:
    forward = forward_of(MIXED)
    whole = _fuse.NUMPY_TOOLS.broadcast
    halves = dataclasses.replace(
        float32_tools(), broadcast=lambda values, like: whole(values, like).astype(np.float16)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fuse, "_tools_of", lambda x: halves)
        found = MIXED.backward(DY, forward)
    check_is_seen(MIXED, found, forward, r"dx\[.* times the bound")


# ---- torch and JAX -------------------------------------------------------------------------------


def torch_of(array: Any) -> Any:
    import torch

    array = np.array(array, order="C")  # which keeps an array of no axes one
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor: Any) -> Any:
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def with_torch_dtypes(call: Call) -> Call:
    import torch

    asked = call.options["out_dtype"]
    named = asked if isinstance(asked, tuple) else (asked,)
    found = tuple(d and getattr(torch, d) for d in named)
    options = call.options | {"out_dtype": found if isinstance(asked, tuple) else found[0]}
    return dataclasses.replace(call, options=options)


@few
@given(calls())
def test_torch_tensors(call: Call) -> None:
    pytest.importorskip("torch", minversion="2.11")
    outputs = as_tuple(with_torch_dtypes(call).of(convert=torch_of))
    check(call, tuple(map(from_torch, outputs)))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_gradient_of_a_stored_sum_is_not_rounded(framework: str) -> None:
    added = cupynorm.fuse("rms_norm", prologue=lambda x, residual: (x + residual, x + residual))
    rng = np.random.default_rng(12)
    x, residual, dy = rng.standard_normal((3, 4, 16)).astype(np.float32)
    forward = added.forward(x, residual=residual, out_dtype=(None, "bfloat16"))
    expected = added.backward((dy, None), forward)
    if framework == "torch":
        torch = pytest.importorskip("torch", minversion="2.11")
        leaf = torch.from_numpy(x).requires_grad_()
        y, _ = added(leaf, residual=torch.from_numpy(residual), out_dtype=(None, torch.bfloat16))
        y.backward(torch.from_numpy(dy))
        found = leaf.grad
    else:
        jax = pytest.importorskip("jax", minversion="0.10.2")

        def of(x: Any) -> Any:
            return added(x, residual=jax.numpy.asarray(residual), out_dtype=(None, "bfloat16"))[0]

        (found,) = jax.vjp(of, jax.numpy.asarray(x))[1](jax.numpy.asarray(dy))
    testing.check_fused_backward(
        added, expected._replace(dx=np.asarray(found)), (dy, None), forward
    )


@few
@given(calls(FLOAT64))
def test_torch_differentiates_as_the_expressions_do(call: Call) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    leaves = {name: torch_of(array).requires_grad_() for name, array in call.arrays.items()}
    outputs = as_tuple(with_torch_dtypes(call).of(**leaves, convert=torch_of))
    rng = np.random.default_rng(6)
    of_outputs = [rng.standard_normal(call.x.shape) for _ in outputs]
    used = [(o, torch_of(dy)) for o, dy in zip(outputs, of_outputs, strict=True) if o.requires_grad]
    if not used:
        return
    tensors, weights = zip(*used, strict=True)
    found = torch.autograd.grad(tensors, list(leaves.values()), weights, allow_unused=True)
    expected = call.fused.backward(of_outputs, call.of(call.fused.forward))
    for name, gradient in zip(leaves, found, strict=True):
        ours = getattr(expected, f"d{name}")
        actual = np.zeros_like(ours) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(actual, ours, rtol=1e-9, atol=1e-9 * (1 + abs(ours).max()))


def test_torch_transforms_and_compiles() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    two = cupynorm.fuse(
        "rms_norm", epilogue=lambda y, z, p: (y * cm.silu(z), cm.softplus(y) * p + cm.sigmoid(z))
    )
    x, z = torch.randn(2, 2, 5, dtype=torch.float64).requires_grad_()
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def of(x: Any, w: Any, z: Any) -> Any:
        return two(x, w, z=z, p=2.0)

    assert torch.autograd.gradcheck(of, (x, w, z))
    assert torch.autograd.gradgradcheck(of, (x, w, z))
    plain = of(x, w, z)
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")(x, w, z)
    batched = torch.func.vmap(of, in_dims=(0, None, 0))(x, w, z)
    for one, other, third in zip(plain, compiled, batched, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(one, third)


def test_a_module_of_torch(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    norm = cupynorm.torch.Fused(GATED, 8, zero_centered=True, dtype=torch.bfloat16)
    assert repr(norm).startswith("cupynorm.torch.Fused(cupynorm.fuse('rms_norm', epilogue=")
    assert not norm.weight.any()
    assert norm.bias is None
    x, z = torch.randn(2, 3, 8)
    y = norm(x, z=z)
    torch.testing.assert_close(y, fused.rms_norm_gated(x, None, z))
    y.sum().backward()
    assert norm.weight.grad.shape == (8,)
    torch.save(norm, tmp_path / "norm")
    loaded = torch.load(tmp_path / "norm", weights_only=False)
    assert torch.equal(loaded(z=z, x=x), y)
    assert cupynorm.torch.Fused(fused._DEEP, (2, 8)).bias.shape == (2, 8)
    with pytest.raises(ValueError, match=r"x must end in the axes of normalized_shape, \(8,\)"):
        norm(x[:, :4], z=z)
    with pytest.raises(TypeError, match=r"fused must be a norm of cupynorm.fuse, got 3"):
        cupynorm.torch.Fused(3, 8)


@settings(few, max_examples=10)  # JAX compiles each operation
@given(calls(("float32", "bfloat16")))
def test_jax_arrays(call: Call) -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    outputs = as_tuple(call.of(convert=jax.numpy.asarray))
    assert all(isinstance(output, jax.Array) for output in outputs)
    check(call, tuple(map(np.asarray, outputs)))


def test_jax_transforms_and_compiles() -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    rng = np.random.default_rng(7)
    arrays = rng.standard_normal((3, 4, 8)).astype(np.float32)
    x, z, dy = map(jax.numpy.asarray, arrays)

    def of(x: Any, z: Any) -> Any:
        return GATED(x, z=z)

    y, pull = jax.vjp(jax.jit(of), x, z)
    dx, dz = map(np.asarray, pull(dy))
    forward = GATED.forward(arrays[0], z=arrays[1])
    expected = GATED.backward(arrays[2], forward)
    testing.check_fused_backward(GATED, expected._replace(dx=dx, dz=dz), arrays[2], forward)
    np.testing.assert_allclose(jax.vmap(of)(x, z), y, atol=1e-6)
    unit = jax.jit(jax.grad(lambda x: (fused.l2_norm(x) * dy).sum()))(x)
    forward = fused._UNIT.forward(arrays[0], length=8**-0.5, eps=1e-6 / 8)
    expected = fused._UNIT.backward(arrays[2], forward)
    testing.check_fused_backward(
        fused._UNIT, expected._replace(dx=np.asarray(unit)), arrays[2], forward
    )


FORWARD_MODE = {
    "gated": lambda x, z: GATED(x, z=z),
    "gated before": lambda x, z: fused.rms_norm_gated(x, None, z, gate_first=True),
    "deep norm": lambda x, z: fused.deep_norm(x, z, 0.7),
    "l2 norm": lambda x, z: fused.l2_norm(x) * z,
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_agrees_with_reverse_mode(name: str, framework: str) -> None:
    of = FORWARD_MODE[name]
    arrays = np.random.default_rng(8).standard_normal((5, 2, 6)).astype(np.float32)
    tools: Any
    if framework == "torch":
        torch = pytest.importorskip("torch", minversion="2.11")
        tools, (x, z, dy, *tangents) = torch.func, map(torch.from_numpy, arrays)
    else:
        tools = jax = pytest.importorskip("jax", minversion="0.10.2")
        x, z, dy, *tangents = map(jax.numpy.asarray, arrays)
    _, slope = tools.jvp(of, (x, z), tuple(tangents))
    _, pull = tools.vjp(of, x, z)
    along = sum((g * t).sum() for g, t in zip(pull(dy), tangents, strict=True))
    np.testing.assert_allclose((slope * dy).sum(), along, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        tools.jacfwd(of, (0, 1))(x, z)[1], tools.jacrev(of, (0, 1))(x, z)[1], rtol=1e-4, atol=1e-5
    )

    def loss(x: Any) -> Any:
        return (of(x, z) * dy).sum()

    twice = tools.jacrev(tools.jacrev(loss))(x)
    np.testing.assert_allclose(tools.hessian(loss)(x), twice, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_compiled_norm_is_that_of_the_stored_sum(framework: str) -> None:
    added = cupynorm.fuse("rms_norm", prologue=lambda x, r: (x + r, x + r))
    rng = np.random.default_rng(13)
    x, r = rng.standard_normal((2, 4, 64)).astype(np.float32)
    if framework == "torch":
        torch = pytest.importorskip("torch", minversion="2.11")
        compiled = torch.compile(
            lambda x, r: added(x, r=r, out_dtype=(None, torch.bfloat16)), fullgraph=True
        )
        y, total = map(from_torch, compiled(torch.from_numpy(x), torch.from_numpy(r)))
    else:
        jax = pytest.importorskip("jax", minversion="0.10.2")
        jitted = jax.jit(lambda x, r: added(x, r=r, out_dtype=(None, "bfloat16")))
        y, total = map(np.asarray, jitted(x, r))
    testing.check_fused(added, (y, total), x, r=r, out_dtype=(None, "bfloat16"))


def test_torch_rounds_float64_once() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    both = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * 0 + z, prologue=lambda x, z: (x, z))
    for dtype, tie in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        z = torch.tensor([[1 + tie + 2.0**-30, 1.0]], dtype=torch.float64)
        for result in both(torch.ones(1, 2, dtype=getattr(torch, dtype)), z=z):
            assert result[0, 0].item() == 1 + 2 * tie
    x = torch.ones(1, 2, dtype=torch.float16, requires_grad=True)
    sloped = cupynorm.fuse("rms_norm", epilogue=lambda y, x, z: x * z)
    sloped(
        x, z=torch.tensor([[1 + 2.0**-11 + 2.0**-30, 1.0]], dtype=torch.float64)
    ).sum().backward()
    assert x.grad[0, 0].item() == 1 + 2.0**-10


def test_the_tail_of_gelu_keeps_the_bound() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    tail = cupynorm.fuse("rms_norm", epilogue=lambda y, z: cm.gelu(z))
    z = np.linspace(-13, 0, 4096, dtype=np.float32).reshape(4, 1024)
    y = tail(torch.ones(4, 1024), z=torch.from_numpy(z)).numpy()
    testing.check_fused(tail, y, np.ones_like(z), z=z)


def test_by_hand_with_the_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    x, z = torch.randn(2, 3, 8)
    forward = GATED.forward(x, z=z)
    found = GATED.backward(torch.ones_like(x), forward)
    assert all(isinstance(t, torch.Tensor) for t in (forward.y, forward.rstd, found.dx, found.dz))
    ours = GATED.backward(np.ones((3, 8), np.float32), GATED.forward(x.numpy(), z=z.numpy()))
    np.testing.assert_array_equal(found.dx.numpy(), ours.dx)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bfloat16_by_its_bits(dtype: str) -> None:
    rng = np.random.default_rng(10)
    ties = (1 + (2 * np.arange(9.0) + 1) * 2.0**-8)[:, None] + [0, 2.0**-40, -(2.0**-40)]
    values = np.concatenate(
        (rng.standard_normal(1000) * 10.0 ** rng.integers(-45, 39, 1000), ties.ravel(), -ties[0])
    )
    values = np.concatenate((values, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300]))
    with np.errstate(all="ignore"):
        values = values.astype(dtype)
        ours = _arrays.rounded(np, values, "bfloat16")
        expected = reference.round_once(values.astype(np.float64), ours.dtype)
    # NumPy compares no NaN of bfloat16.
    np.testing.assert_array_equal(ours.astype(np.float64), expected.astype(np.float64))
    np.testing.assert_array_equal(_arrays.widened(ours, "float64"), expected.astype(np.float64))


def test_sums_of_gradients() -> None:
    array = np.random.default_rng(11).standard_normal((3, 4, 5))
    for shape in ((3, 4, 5), (5,), (4, 1), (3, 1, 5), (), (1, 1, 1)):
        ours, expected = _arrays.sum_to_shape(array, shape), reference.sum_to_shape(array, shape)
        assert ours.shape == shape
        np.testing.assert_allclose(ours, expected, rtol=1e-13)


@pytest.mark.gpu
@few
@given(calls())
def test_cupy_arrays(call: Call) -> None:
    import cupy

    forward = call.of(call.fused.forward, convert=cupy.asarray)
    outputs = tuple(map(cupy.asnumpy, forward.outputs))
    check(call, outputs)
    dy = [np.ones(call.x.shape, call.x.dtype) for _ in forward.outputs]
    found = call.fused.backward(list(map(cupy.asarray, dy)), forward)
    of_numpy = call.of(call.fused.forward)._replace(outputs=outputs)
    gradients_ = type(found)(*(None if of is None else cupy.asnumpy(of) for of in found))
    testing.check_fused_backward(call.fused, gradients_, dy, of_numpy)


# ---- the ready-made ones -------------------------------------------------------------------------


def test_the_ready_made_norms_are_their_formulas() -> None:
    rng = np.random.default_rng(8)
    x, z, branch = rng.standard_normal((3, 4, 16))
    weight, bias = rng.standard_normal((2, 16))
    silu = z / (1 + np.exp(-z))

    def rms(v: Any) -> Any:
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * weight

    np.testing.assert_allclose(fused.rms_norm_gated(x, weight, z), rms(x) * silu)
    np.testing.assert_allclose(fused.rms_norm_gated(x, weight, z, gate_first=True), rms(x * silu))
    v = 2.5 * x + branch
    d = v - v.mean(-1, keepdims=True)
    expected = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(fused.deep_norm(x, branch, 2.5, weight, bias), expected)
    for axis in (None, 0, (0, 1)):
        along = -1 if axis is None else axis
        length = np.sqrt((x * x).sum(along, keepdims=True) + 1e-6)
        np.testing.assert_allclose(fused.l2_norm(x, axis=axis), x / length)
    assert fused.l2_norm(x, out_dtype="float16").dtype == np.float16


# ---- what a norm is, and what is none ------------------------------------------------------------


def test_a_norm_is_a_value() -> None:
    same = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * (z * cm.sigmoid(z)))
    assert same == GATED
    assert hash(same) == hash(GATED)
    assert same != cupynorm.fuse("layer_norm", epilogue=lambda y, z: y * (z * cm.sigmoid(z)))
    assert same != cupynorm.fuse("rms_norm", epilogue=lambda y, z: cm.silu(z) * y)
    zeros = [
        cupynorm.fuse("rms_norm", epilogue=of) for of in (lambda y: y / 0.0, lambda y: y / -0.0)
    ]
    assert zeros[0] != zeros[1]
    no_number = cupynorm.fuse("rms_norm", epilogue=lambda y: y + math.nan)
    assert pickle.loads(pickle.dumps(no_number)) == no_number
    again = pickle.loads(pickle.dumps(GATED))
    assert again == GATED
    x, z = np.random.default_rng(9).standard_normal((2, 3, 8))
    np.testing.assert_array_equal(again(x, z=z), GATED(z=z, x=x))
    np.testing.assert_array_equal(again(x, z=z), GATED.forward(z=z, x=x).y)
    found = GATED.backward(x, GATED.forward(x, z=z))
    copied = pickle.loads(pickle.dumps(found))
    assert type(copied) is type(found)
    np.testing.assert_array_equal(copied.dz, found.dz)
    assert repr(GATED) == "cupynorm.fuse('rms_norm', epilogue=lambda y, z: y * (z * sigmoid(z)))"
    assert repr(cupynorm.fuse("layer_norm")) == "cupynorm.fuse('layer_norm')"
    assert "prologue=lambda x, b: (x + b, b)" in repr(
        cupynorm.fuse("rms_norm", prologue=lambda v, b: (v + b, b))
    )


def branches(y: Any, z: Any) -> Any:
    if y > z:
        return y
    return z


def writes(y: Any) -> Any:
    y[0] = 1
    return y


LEAKED: list[Any] = []
cupynorm.fuse("rms_norm", epilogue=lambda y, z: (LEAKED.append(z), y)[1])

WRONG: dict[str, tuple[Any, str]] = {
    "a branch": (branches, r"`if y > z:`: a branch would be taken for all elements at once"),
    "what to write for it": (branches, r"write cupynorm\.math\.where\(condition, x, other\)"),
    "and": (lambda y: cm.where(y > 0 and y < 1, y, 0), "a branch would be taken"),
    "a function of NumPy": (lambda y: np.exp(y), "and the functions of cupynorm.math"),
    "a mean of NumPy": (lambda y: np.mean(y), "a mean or a maximum over elements has no place"),
    "a variance of NumPy": (lambda y: np.var(y), "a mean or a maximum over elements has no place"),
    "a function of math": (lambda y: math.exp(y), "an argument has no value yet"),
    "a method": (lambda y: y.mean(), "no attribute 'mean'. It may use"),
    "a write": (writes, r"`y\[0\] = 1`: an argument cannot be written to: return an expression"),
    "an index": (lambda y: y[0], "an argument is one element: it has no index"),
    "an array": (lambda y: cm.exp(np.ones(3)), "x must be an argument .* got numpy.ndarray"),
    "an array beside": (lambda y: np.ones(3) * y, "cannot be combined with a numpy.ndarray: give"),
    "a comparison": (lambda y: y > 0, "return an expression of its arguments.*got a comparison"),
    "a sum of comparisons": (lambda y: (y > 0) + y, r"where\(comparison, 1, 0\)"),
    "a negative comparison": (lambda y: -(y > 0), "a comparison is no number"),
    "a power of one": (lambda y: (y > 0) ** 0, "a comparison is no number"),
    "a value of another": (lambda y: y * LEAKED[0], "a value of another function has no place"),
    "a function of one": (lambda y: cm.exp(y > 0), "x must be a number, got a comparison"),
    "a condition": (lambda y: cm.where(True, y, 0), "a condition is made of comparisons"),
    "the rest": (lambda y: y % 2, "// and % are not among the operations"),
    "a large number": (lambda y: y * 10**400, r"10{17}\.\.\.0{19} is out of the range of float64"),
    "no expression": (lambda y: None, "return an expression of its arguments.*got a NoneType"),
    "no result": (lambda y: (), "it returns an empty tuple"),
    "a default": (lambda y, z=1: y, "take arguments without defaults, got z=1"),
    "any arguments": (lambda *y: y[0], r"plain arguments by name, got variadic positional \*y"),
    "a keyword": (lambda y, *, z: y, "plain arguments by name, got keyword-only z"),
    "no argument": (lambda: 1, "at least one argument, got none"),
    "no function": (3, "epilogue must be a function, got 3"),
    "no Python": (max, "epilogue must be a Python function whose arguments have names, got <built"),
}


# What a function returns, and how it takes its arguments, is not known of a line.
WITHOUT_A_LINE = {
    *("a comparison", "no expression", "no result", "a default", "any arguments", "a keyword"),
    *("no argument", "no function", "no Python"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_traced(case: str) -> None:
    function, message = WRONG[case]
    with pytest.raises(TypeError, match=message) as raised:
        cupynorm.fuse("rms_norm", epilogue=function)
    assert "epilogue" in str(raised.value)
    if case not in WITHOUT_A_LINE:
        assert re.search(r"test_fuse\.py:\d+, cannot be traced", str(raised.value))


X = np.ones((2, 8), np.float32)
CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "no z": (
        lambda: GATED(X),
        TypeError,
        r"the inputs of cupynorm\.fuse\(.*\) are z, but z is mis",
    ),
    "another": (lambda: GATED(X, z=X, a=1), TypeError, "are z, but got a"),
    "checked without z": (
        lambda: testing.check_fused(GATED, (X,), X),
        TypeError,
        "are z, but z is mis",
    ),
    "an option of other norms": (
        lambda: GATED(X, z=X, relu=(0, 6)),
        TypeError,
        "are z, but got relu",
    ),
    "gate_first": (
        lambda: cupynorm.fused.rms_norm_gated(X, None, X, gate_first=None),
        TypeError,
        "gate_first must be True or False, got None",
    ),
    "its shape": (
        lambda: GATED(X, z=X[:, :3]),
        ValueError,
        r"z must broadcast to x's shape, \(2, 8\); got \(2, 3\)",
    ),
    "its dtype": (
        lambda: GATED(X, z=X.astype(int)),
        TypeError,
        "z.dtype must be float64, float32, float16, bfloat16 or bool, got int64",
    ),
    "its kind": (lambda: GATED(X, z=[1.0]), TypeError, "z must be a number or a NumPy array.*list"),
    "x's dtype": (lambda: GATED(X.astype(int), z=1), TypeError, "x.dtype must be float64.*got int"),
    "the axis": (lambda: GATED(X, z=X, axis=2), ValueError, "axis must name axes of x"),
    "eps": (lambda: GATED(X, z=X, eps=-1.0), ValueError, "eps must be a finite number"),
    "zero": (lambda: GATED(X, z=X, zero_centered=True), ValueError, "False without a weight"),
    "a number": (lambda: GATED(X, z=10**400), ValueError, r"range of float64, got 10{17}\.\.\.0"),
    "forward": (
        lambda: GATED.backward(X, X),
        TypeError,
        r"forward must be what this norm's forward returned, got numpy\.ndarray",
    ),
    "another's forward": (
        lambda: GATED.backward(
            X, cupynorm.fuse("rms_norm", epilogue=lambda y, z: y + z).forward(X, z=X)
        ),
        ValueError,
        r"forward must be .*, got that of cupynorm\.fuse\('rms_norm'",
    ),
    "None": (lambda: GATED(X, z=None), TypeError, r"are z, but z is None"),
    "l2": (lambda: fused.l2_norm(np.ones((3, 0))), ValueError, "at least one element in each row"),
    "l2's x": (lambda: fused.l2_norm([1.0]), TypeError, "x must be a NumPy or CuPy array"),
    "l2's eps": (lambda: fused.l2_norm(X, eps=-1.0), ValueError, "eps must be .*got -1.0"),
    "dtypes": (
        lambda: GATED(X, z=X, out_dtype=("float16", None)),
        ValueError,
        "out_dtype must be a dtype or 1 of them, one for each output; got 2",
    ),
    "dtype": (lambda: GATED(X, z=X, out_dtype="int8"), TypeError, "out_dtype must be float64"),
    "dy": (
        lambda: GATED.backward((X, X), GATED.forward(X, z=X)),
        ValueError,
        "dy must have a gradient for each of 1 outputs, not all of them None; got 2, of which 0",
    ),
    "dy's shape": (
        lambda: GATED.backward(X[:1], GATED.forward(X, z=X)),
        ValueError,
        r"dy must have shape \(2, 8\), got \(1, 8\)",
    ),
    "norm": (lambda: cupynorm.fuse("batch_norm"), ValueError, "norm must be 'rms_norm' or"),
    "norms": (lambda: cupynorm.fuse(np.array(["", ""])), ValueError, "norm must be 'rms_norm' or"),
    "a name": (
        lambda: cupynorm.fuse("rms_norm", epilogue=lambda y, eps: y),
        ValueError,
        "an input must not be called eps, which has a meaning already",
    ),
    "a keyword": (
        lambda: cupynorm.fuse("rms_norm", epilogue=lambda y, ef: y),
        ValueError,
        "an input must not be called ef: its gradient would be def",
    ),
    "a weight": (lambda: GATED(X, 2.0, z=X), TypeError, "weight must be a NumPy array"),
    "the first name": (
        lambda: cupynorm.fuse("rms_norm", prologue=lambda v, x: v),
        ValueError,
        "prologue must name no input x",
    ),
    "an underscore": (
        lambda: cupynorm.fuse("rms_norm", epilogue=lambda y, _z: y),
        ValueError,
        "without a leading underscore, got _z",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_calls(case: str) -> None:
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call()


def test_wrong_calls_of_torch_and_jax() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    jax = pytest.importorskip("jax", minversion="0.10.2")
    x = torch.ones(2, 8)
    with pytest.raises(
        TypeError, match=r"z must be a number or a torch tensor, as x is; got numpy.ndarray"
    ):
        GATED(x, z=X)
    with pytest.raises(ValueError, match=r"z must be on x's device, cpu; got meta"):
        GATED(x, z=torch.ones(2, 8, device="meta"))
    with pytest.raises(TypeError, match=r"or a JAX or NumPy array, as x is; got torch"):
        GATED(jax.numpy.ones((2, 8)), z=x)
    with pytest.raises(TypeError, match=r"z.dtype must be .*got torch.int64"):
        GATED(x, z=torch.ones(2, 8, dtype=torch.int64))
