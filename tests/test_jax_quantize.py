"""Quantized norms of cupynorm.jax: NumPy behind XLA's FFI for the kernels, and what falls back.

The steps of jax.numpy are in test_quantize.py, and several devices in test_jax_sharding.py.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from quantized_gpu import FLOAT8, HOWS, SCALE, same, told_in

jax = pytest.importorskip("jax", minversion="0.10.2")

import jax.numpy as jnp  # noqa: E402
import jax_plans  # noqa: E402
from test_jax import (  # noqa: E402
    XLA_ERRORS,
    calls_of,
    cpu,  # noqa: F401 - a fixture
    forget_what_was_traced,
    kernels,  # noqa: F401 - a fixture
    path,  # noqa: F401 - a fixture
    values,
)

import cupynorm  # noqa: E402
import cupynorm.jax  # noqa: E402
from cupynorm import Quantize, testing  # noqa: E402
from cupynorm._operation import QuantizedSpec  # noqa: E402
from cupynorm.jax import _kernels  # noqa: E402

by_kernels = pytest.mark.usefixtures("kernels")
by_each = pytest.mark.usefixtures("path")  # the formula and the kernels

NORMS = ("rms_norm", "layer_norm")
ROWS = Quantize(FLOAT8[0], "row")
STATIC = Quantize("int8", SCALE)

X, WEIGHT = values((6, 5, 512), "bfloat16", 1), values((512,), "float32", 2)
RESIDUAL = values((6, 5, 512), "float32", 3)


def calls_within(program: Any) -> list[str]:
    """Return our calls in a compiled program."""
    return re.findall(r'custom_call_target="cupynorm\.(\w+)"', program.as_text())


def run(function: Callable[..., Any], *arrays: Any) -> tuple[list[str], tuple[np.ndarray, ...]]:
    """Return our calls in a function's program, and its results."""
    program = jax.jit(function).lower(*arrays).compile()
    return calls_within(program), tuple(map(np.asarray, program(*arrays)))


def check(norm: str, how: Quantize, called: str, x: Any, *vectors: Any, **options: Any) -> None:
    """Check what a call launches, and its results."""
    residual = options.pop("residual", None)

    def function(x: Any, residual: Any, scale: Any) -> Any:
        told = how if scale is None else dataclasses.replace(how, scale=scale)
        given = options | {"residual": residual, "quantize": told}
        return getattr(cupynorm.jax, norm)(x, *vectors, **given)

    found, results = run(function, x, residual, how.given)
    assert found == [called]
    told = {"eps": 1e-6 if norm == "rms_norm" else 1e-5, "residual": residual, "quantize": how}
    testing.check_quantized(norm, results, x, *vectors, **told | options)


# ---- one kernel ----------------------------------------------------------------------------------


@by_kernels
@pytest.mark.parametrize("i", range(len(HOWS)))
@pytest.mark.parametrize("residual", [None, RESIDUAL], ids=["x", "residual"])
def test_one_kernel_quantizes(i: int, residual: Any) -> None:
    norm = NORMS[(i + (residual is None)) % 2]
    bias = values((512,), "float16", 4) if norm == "layer_norm" else None
    options = {"residual": residual, "zero_centered": i % 3 == 0}
    check(norm, HOWS[i], "quantized", X, WEIGHT, bias, **options)


@by_kernels
@pytest.mark.parametrize("how", [ROWS, STATIC, HOWS[9]], ids=["row", "static", "MX"])
def test_an_eager_call_is_that_of_jit(how: Quantize) -> None:
    function = functools.partial(cupynorm.jax.layer_norm, quantize=told_in(how, jnp.asarray))
    results = function(X, WEIGHT, residual=RESIDUAL)
    compiled = jax.jit(function)(X, WEIGHT, residual=RESIDUAL)
    for actual, expected in zip(results, compiled, strict=True):
        same(actual, expected)
    assert results[0].dtype == np.dtype(how.dtype)


@by_kernels
def test_a_block_of_128_may_be_the_row() -> None:
    how = Quantize(FLOAT8[0], "block", block=128)
    for n in (128, 64):
        x = X[..., :n]
        check("rms_norm", how, "quantized", x)
        _, (_, scale) = run(lambda x: cupynorm.jax.rms_norm(x, quantize=how), x)
        assert scale.shape == (6, 5, 1)


@by_kernels
def test_rows_of_several_axes_and_axes_that_are_moved() -> None:
    x, weight = values((4, 8, 96), "float32", 5), values((8, 96), "float32", 6)
    for how in (ROWS, STATIC):
        check("rms_norm", how, "quantized", x, weight, axis=(1, 2))
        check("layer_norm", how, "quantized", x, weight[:, :1], axis=1, residual=x[::-1].copy())


@by_kernels
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_a_static_scale_is_an_operand_and_comes_back_as_it_is(shape: tuple[int, ...]) -> None:
    scale = jnp.asarray(SCALE.reshape(shape))
    norm = lambda x, of: cupynorm.jax.rms_norm(x, quantize=Quantize("int8", of))  # noqa: E731
    assert calls_of(norm, X, scale) == [["x", "scale", "y"]]
    q, of_q = jax.jit(norm)(X, scale)
    same(of_q, scale)
    testing.check_quantized("rms_norm", (np.asarray(q), SCALE), X, quantize=STATIC, eps=1e-6)
    held = Quantize("int8", jax.device_put(SCALE))
    same(jax.jit(lambda x: cupynorm.jax.rms_norm(x, quantize=held))(X)[0], q)


# ---- what falls back -----------------------------------------------------------------------------

WIDE = values((3, 32768), "bfloat16", 7)


@pytest.mark.parametrize(
    ("case", "x", "weight", "options"),
    [
        ("a row is longer than registers hold", WIDE, None, {}),
        ("packs do not divide a row", X[..., :33].copy(), None, {}),
        ("float64", values((3, 64), "float64", 8), None, {}),
        ("a sum of float64", X, None, {"residual": X.astype(np.float64)}),
        ("a ReLU", X, WEIGHT, {"relu": (-0.5, 1.0)}),
        ("a weight for each head", X, values((5, 512), "float32", 9), {}),
        ("a weight along an axis", X, values((5, 1), "float32", 9), {"axis": (1, 2)}),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
@by_kernels
@pytest.mark.parametrize("how", [ROWS, STATIC], ids=["row", "static"])
def test_steps_follow_a_kernel_that_cannot_quantize(
    case: str, x: Any, weight: Any, options: dict[str, Any], how: Quantize
) -> None:
    check("rms_norm", how, "forward", x, weight, **options)


@by_kernels
def test_a_block_that_no_team_of_threads_has_falls_back() -> None:
    check("layer_norm", Quantize("int8", "block", block=128), "forward", X[..., :160].copy())


@by_each
def test_amax_is_that_of_a_call_and_of_each_example() -> None:
    how = Quantize(FLOAT8[0], "row", amax=True)
    norm = functools.partial(cupynorm.jax.rms_norm, residual=RESIDUAL, quantize=how)
    called, results = run(norm, X)
    assert called == (["forward"] if "cpu" in _kernels.platforms() else [])
    testing.check_quantized("rms_norm", results, X, residual=RESIDUAL, quantize=how, eps=1e-6)
    each = jax.vmap(lambda x: cupynorm.jax.rms_norm(x, quantize=how)[2])(X)
    assert each.shape == (6, 1)
    for amax, x in zip(each, X, strict=True):
        same(amax, cupynorm.jax.rms_norm(x, quantize=how)[2])
    with pytest.raises(NotImplementedError, match=r"^quantize has no gradient"):
        jax.grad(lambda x: cupynorm.jax.rms_norm(x, quantize=how)[2].sum())(X)


@by_kernels
def test_devices_must_all_have_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = jax_plans.quantized_plan
    monkeypatch.setattr(_kernels, "_ordinals", lambda platform: devices[platform])
    devices: dict[str, Any] = {"cpu": (0, 1), "cuda": ()}
    check("rms_norm", ROWS, "quantized", X)
    on_second = lambda *a, **b: plan(*a, **b) if a[4] else None  # noqa: E731
    monkeypatch.setattr(jax_plans, "quantized_plan", on_second)
    forget_what_was_traced()
    check("rms_norm", ROWS, "forward", X)
    devices["cpu"] = ()
    forget_what_was_traced()
    check("rms_norm", ROWS, "forward", X)


@by_kernels
def test_a_program_of_another_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    function = jax.jit(lambda x: cupynorm.jax.rms_norm(x, quantize=ROWS))
    program = function.lower(X).compile()
    with monkeypatch.context() as patch:
        patch.setattr(jax_plans, "quantized_plan", lambda *a, **b: None)
        patch.setattr(_kernels._HANDLERS[2], "_launches", {})
        with pytest.raises(XLA_ERRORS, match="GPU 0 has no kernel that quantizes rows of 512"):
            jax.block_until_ready(program(X))


# ---- what a program says -------------------------------------------------------------------------


@by_kernels
def test_a_program_says_all_that_its_calls_need() -> None:
    how = Quantize(FLOAT8[1], "block", block=32, scale_min=0.5)
    function = jax.jit(lambda x: cupynorm.jax.rms_norm(x, quantize=how))
    (call,) = re.findall(r'call = "({.*?}})"', function.lower(X).as_text().replace("\\22", '"'))
    spec = QuantizedSpec(
        *("rms_norm", "bfloat16", None, None, "bfloat16", False, False, False),
        q="float8_e5m2",
        scale="float8_e8m0fnu",
        scale_columns=32,
    )
    assert json.loads(call) == {
        **{"m": 30, "n": 512, "groups": None, "eps": 1e-6, "relu": None, "scratch": 0},
        "scale_bounds": [0.5, how.scale_max],
        "arrays": ["x", "y", "scale"],
        "spec": dataclasses.asdict(spec),
    }


def test_a_program_that_is_exported_without_a_gpu_quantizes_by_steps() -> None:
    norm = jax.jit(lambda x: cupynorm.jax.rms_norm(x, quantize=ROWS))
    allowed = jax.export.DisabledSafetyCheck.custom_call("cupynorm.forward")
    platforms = ["cpu", "cuda"] if not _kernels._ordinals("cuda") else ["cpu"]
    exported = jax.export.export(norm, platforms=platforms, disabled_checks=[allowed])(X)
    assert "cupynorm.quantized" not in exported.mlir_module()
    for actual, expected in zip(exported.call(X), norm(X), strict=True):
        same(actual, expected)


# ---- transformations -----------------------------------------------------------------------------


@by_kernels
@pytest.mark.parametrize("how", [ROWS, STATIC, HOWS[7], HOWS[10]])
def test_vmap_over_rows_is_one_call(how: Quantize) -> None:
    told = told_in(how, jnp.asarray)

    def norm(x: Any, residual: Any) -> Any:
        q, scale, total = cupynorm.jax.layer_norm(x, WEIGHT, residual=residual, quantize=told)
        return (q, total) if how.is_given else (q, scale, total)

    whole = jax.jit(norm)(X, RESIDUAL)
    for each in (jax.vmap(norm), jax.vmap(norm, 1, 1), jax.vmap(jax.vmap(norm))):
        called, results = run(each, X, RESIDUAL)
        assert called == ["quantized"]
        for actual, expected in zip(results, whole, strict=True):
            same(actual, expected)


@by_each
def test_vmap_over_weights_or_scales_is_a_loop_over_the_batch() -> None:
    weights, scales = values((6, 512), "float32", 10), np.float32([[0.1], [0.02]] * 3)
    norm = lambda x, weight, scale: cupynorm.jax.rms_norm(  # noqa: E731
        x, weight, quantize=Quantize(FLOAT8[0], scale)
    )
    for axes in ((0, 0, None), (0, None, 0), (None, None, 0), (0, 0, 0)):
        arrays = (
            X if axes[0] == 0 else X[0],
            weights if axes[1] == 0 else WEIGHT,
            scales if axes[2] == 0 else SCALE,
        )
        called, (q, of_q) = run(jax.vmap(norm, in_axes=axes), *arrays)
        assert called == (["forward"] if "cpu" in _kernels.platforms() else [])
        for i in range(6):
            one = [a[i] if axis == 0 else a for a, axis in zip(arrays, axes, strict=True)]
            same(of_q[i], one[2])
            how = Quantize(FLOAT8[0], one[2])
            result = q[i], one[2]
            testing.check_quantized("rms_norm", result, *one[:2], quantize=how, eps=1e-6)


@by_each
def test_gradients_are_refused() -> None:
    def back(x: Any, residual: Any, weight: Any, scale: Any) -> Any:
        how = Quantize(FLOAT8[0], scale)
        q, of_q, total = cupynorm.jax.rms_norm(x, weight, residual=residual, quantize=how)
        return cupynorm.dequantize(q, of_q).sum() + total.sum()

    message = r"^quantize has no gradient: call the norm on jax.lax.stop_gradient of its arguments"
    arrays = X.astype(np.float32), RESIDUAL, WEIGHT, SCALE
    for i in range(4):
        for function in (back, jax.jit(back)):
            with pytest.raises(NotImplementedError, match=message):
                jax.grad(function, i)(*arrays)
        with pytest.raises(NotImplementedError, match=message):
            jax.jvp(lambda a, i=i: back(*arrays[:i], a, *arrays[i + 1 :]), *2 * ((arrays[i],),))
    assert not np.any(jax.grad(lambda x: back(*jax.lax.stop_gradient((x, *arrays[1:]))))(arrays[0]))


@by_each
def test_no_rows() -> None:
    for how in HOWS:
        norm = functools.partial(cupynorm.jax.rms_norm, quantize=told_in(how, jnp.asarray))
        q, scale = jax.jit(norm)(np.zeros((0, 3, 512), np.float32))
        assert (q.shape, q.dtype) == ((0, 3, 512), np.dtype(how.dtype))
        blocks = 512 // how.block if how.block else 1
        assert scale.shape == ((1,) if how.is_given else (0, 3, blocks))
