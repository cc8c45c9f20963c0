"""Quantized outputs: each bit as the oracle has it, for NumPy, CuPy, torch and JAX."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import to_cupy, to_numpy
from host.build import Build, compiler_problem
from host.gpu import Gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_gpu import (
    AMAX,
    BY_COLUMN,
    FLOAT8,
    HOWS,
    QUANTIZED,
    SCALE,
    boundaries,
    by_oracle,
    check_each_number,
    check_quantized_kernel,
    kernels_of,
    on_host,
    same,
    told_in,
)
from strategies import DTYPES, Problem, make_values, problems

import cupynorm
from cupynorm import Quantize, _quantize, reference, testing
from cupynorm._compile import forward_instantiation
from cupynorm._layout import few_rows_configs, forward_config, quantized_config
from cupynorm._operation import ForwardSpec, Options
from cupynorm._quantize import pass_of_kernel

BUILD = Build()


def name_of(how: Quantize) -> str:
    options = "-amax" * how.amax + "-by column" * how.column_major
    return f"{how.dtype}-{how.scale}-{how.block}{options}"


every_how = pytest.mark.parametrize("how", [*HOWS, *AMAX[1::5]], ids=name_of)
every_layout = pytest.mark.parametrize("how", [*HOWS, *AMAX[1::5], *BY_COLUMN], ids=name_of)


def via_of(how: Quantize, x: Any) -> Any:
    """Return the dtype that y is rounded to, of an x without a residual."""
    if how.via is None:
        return np.float64 if x.dtype == np.float64 else np.float32
    return x.dtype if how.via == "x" else np.dtype(how.via)


# ---- the arithmetic ------------------------------------------------------------------------------


def by_numpy(values: np.ndarray, dtype: str) -> np.ndarray:
    return _quantize.codes_of(np, values, np.float32(1), dtype)


def by_jax(values: np.ndarray, dtype: str) -> np.ndarray:
    jnp = pytest.importorskip("jax", minversion="0.10.2").numpy
    return np.asarray(_quantize.codes_of(jnp, jnp.asarray(values), jnp.float32(1), dtype))


def by_torch(values: np.ndarray, dtype: str) -> np.ndarray:
    torch = pytest.importorskip("torch", minversion="2.11")
    from cupynorm.torch import _quantize as of_torch

    codes = of_torch.codes_of(in_torch(values), torch.ones(()), dtype, None)
    return codes.view(torch.uint8).numpy()


def in_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", minversion="2.11")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def in_numpy(tensor: Any) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == importlib.import_module("torch").bfloat16:
        return tensor.view(importlib.import_module("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def saturated(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values in a dtype, by ml_dtypes and NumPy."""
    if dtype == "int8":
        return np.nan_to_num(np.clip(np.rint(values), -128, 127)).astype(np.int8)
    largest = _quantize.LARGEST[dtype]
    return np.clip(values, -largest, largest).astype(dtype)


def test_what_asks_for_the_same_is_equal() -> None:
    """So jax.jit, which may have it in static_argnames, traces once for it."""
    one = Quantize("int8", "block", block=128, via=None)
    assert one == Quantize("int8", "block", 128, None)
    assert hash(one) == hash(Quantize("int8", "block", 128, None))
    for other in (
        Quantize("int8", "block", 128),
        Quantize("int8", "block", 128, None, scale_max=2),
        Quantize("int8", "block", 128, None, amax=True),
        Quantize("int8", "row", via=None),
        "int8",
    ):
        assert one != other
    scale = np.array([0.5], np.float32)
    assert Quantize("int8", scale) == Quantize("int8", scale)
    assert Quantize("int8", scale) != Quantize("int8", scale.copy())


@np.errstate(all="ignore")
@pytest.mark.parametrize("codes_by", [by_numpy, by_jax, by_torch])
@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
@pytest.mark.parametrize("source", ["float16", "bfloat16", "boundaries"])
def test_each_number_rounds_as_ml_dtypes_has_it(codes_by: Any, dtype: str, source: str) -> None:
    if source == "boundaries":
        values = boundaries(dtype)
    else:
        values = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[source])
    expected = saturated(values.astype(np.float32), dtype)
    same(codes_by(values, dtype).view(dtype), expected)
    same(reference.nearest(values.astype(np.float64), np.dtype(dtype)), expected)


@np.errstate(all="ignore")
@pytest.mark.parametrize("codes_by", [by_numpy, by_torch])
@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
def test_float64_is_rounded_once(codes_by: Any, dtype: str) -> None:
    values = boundaries(dtype).astype(np.float64)
    values = np.concatenate([values, values * (1 + 2.0**-40), values * (1 - 2.0**-40), [1e300]])
    q, _ = reference.quantize(values[None], dtype, np.float32([1]))
    same(codes_by(values, dtype).view(dtype), q[0])


# ---- NumPy ---------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Quantize]:
    problem = draw(problems(broadcast=draw(st.booleans())))
    how = draw(st.sampled_from((*HOWS, *AMAX, *BY_COLUMN)))
    if how.is_by_block and problem.axis not in (None, (problem.x.ndim - 1,), (-1,)):
        how = dataclasses.replace(how, scale="row", block=None, column_major=False)
    return problem, how


@given(cases())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_quantized_is_the_unfused_spelling(case: tuple[Problem, Quantize]) -> None:
    problem, how = case
    function, options = getattr(cupynorm, problem.norm), problem.forward_options
    options.pop("out_dtype")
    arrays = problem.x, problem.weight, problem.bias
    y = function(*arrays, **options, out_dtype=via_of(how, problem.x))
    result = function(*arrays, **options, quantize=how)
    expected = by_oracle(how, y, problem.axis)
    for actual, exact in zip(result, expected, strict=True):
        same(actual, exact)
    testing.check_quantized(problem.norm, result, *arrays, **options, quantize=how)
    result = result[:2]
    q, scale = (array.astype(np.float64) for array in result)
    assert np.all(np.isfinite(scale) & (scale > 0))
    if how.block:
        scale = np.repeat(scale, how.block, axis=-1)[..., : q.shape[-1]]
    with np.errstate(all="ignore"):
        same(
            cupynorm.dequantize(*result),
            (q * scale.reshape(() if scale.size == 1 else scale.shape)).astype(np.float32),
        )


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("via", ["x", None])
def test_the_sum_comes_behind_the_scale(norm: Any, via: Any) -> None:
    x = make_values("normal", (5, 200), np.float16, 1)
    residual = make_values("normal", (5, 200), np.float64, 2)
    how = Quantize("float8_e4m3fn", "block", block=128, via=via)
    function = getattr(cupynorm, norm)
    q, scale, total = result = function(x, residual=residual, quantize=how)
    y, expected = function(x, residual=residual, out_dtype="float64" if via is None else x.dtype)
    same(total, expected)
    for actual, exact in zip((q, scale), by_oracle(how, y), strict=True):
        same(actual, exact)
    eps = 1e-6 if norm == "rms_norm" else 1e-5
    testing.check_quantized(norm, result, x, residual=residual, quantize=how, eps=eps)


@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
def test_rows_that_are_not_finite_or_zero(dtype: str) -> None:
    y = np.float32([[0, 0, 0], [np.nan, 1, -0.5], [np.inf, 1, -2], [np.nan] * 3, [1e-44, 0, 0]])
    how = Quantize(dtype, "row", scale_max=1e30)
    q, scale, _ = _quantize.of_arrays(y, (-1,), how, None)
    largest = _quantize.LARGEST[dtype]
    least = np.float32(2.0**-126)
    same(scale, np.float32([[least], [1 / np.float64(largest)], [1e30], [least], [least]]))
    nan, half = (0, -64) if dtype == "int8" else (np.nan, -largest / 2)
    rows = [[0] * 3, [nan, largest, half], [largest, 0, -0.0], [nan] * 3, [0] * 3]
    same(q.view(dtype), np.array(rows).astype(dtype))


def test_an_infinity_leaves_nothing_of_its_row() -> None:
    x = np.float16([[1, 2, 3, 4]])
    weight = np.float32([1e6, 1, 1, 1])  # overflows float16
    how = Quantize("float8_e4m3fn", "row")
    q, scale = cupynorm.rms_norm(x, weight, quantize=how)
    assert scale == np.finfo(np.float32).max
    assert q.astype(np.float32).tolist() == [[448, 0, 0, 0]]
    for affine in ((weight, None), (None, np.float32([np.inf, 0, 0, 0]))):
        result = cupynorm.rms_norm(x, *affine, quantize=how)
        testing.check_quantized("rms_norm", result, x, *affine, quantize=how, eps=1e-6)


def test_a_given_scale_has_any_shape_of_one_element() -> None:
    x = make_values("normal", (4, 100), np.float32, 13)
    expected, _ = cupynorm.rms_norm(x, quantize=Quantize("int8", SCALE))
    for shape in ((), (1, 1, 1)):
        how = Quantize("int8", SCALE.reshape(shape))
        result = cupynorm.rms_norm(x, quantize=how)
        same(result[0], expected)
        assert result[1] is how.scale
        testing.check_quantized("rms_norm", result, x, quantize=how, eps=1e-6)
        other = dataclasses.replace(how, scale=np.float32([0.5]).reshape(shape))
        with pytest.raises(AssertionError, match=r"^scale\[.*\] is 0\.03.*, expected 0\.5 to 0\.5"):
            testing.check_quantized("rms_norm", result, x, quantize=other, eps=1e-6)


def test_scales_of_mx_are_the_powers_of_two_of_its_specification() -> None:
    tops = np.float32([0.5, 0.75, 1.0, 448.0, 511.0, 512.0, 2.0**-130, 3e38])
    y = np.zeros((len(tops), 33), np.float32)
    y[:, 3], y[:, 32] = -tops, 1
    q, scale, _ = _quantize.of_arrays(y, (-1,), Quantize("float8_e4m3fn", "block", block=32), None)
    scale = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    # 2**-126 is the least scale.
    assert np.log2(scale[:, 0]).tolist() == [-9, -9, -8, 0, 0, 1, -126, 119]
    assert np.log2(scale[:, 1]).tolist() == [-8] * 8
    last = q.view("float8_e4m3fn").astype(np.float64)
    assert last[:, 3].tolist() == [-256, -384, -256, -448, -448, -256, -0.0625, -448]
    assert np.all(last[:, 32] == 256)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("options", [{}, {"relu": (-0.5, 1.0)}, {"axis": 0}])
def test_statistics_and_a_straight_through_gradient(norm: str, options: dict[str, Any]) -> None:
    x, dy = (make_values("normal", (6, 96), np.float32, i) for i in (30, 31))
    forward, infer = (getattr(cupynorm, name) for name in (f"{norm}_forward", norm))
    how = Quantize("float8_e4m3fn", "row", via=None)
    stored, plain = forward(x, **options, quantize=how), forward(x, **options)
    q, scale = infer(x, **options, quantize=how)
    same(stored.y, q)
    same(stored.scale, scale)
    for name in ("mean", "rstd", "bitmask", "residual_out"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(plain, name))
    sums = forward(x, residual=x, quantize=how)
    same(sums.residual_out, 2 * x)
    same(sums.y, infer(x, residual=x, quantize=how)[0])
    with pytest.raises(ValueError, match=r"^out must be None with quantize, got a ndarray"):
        forward(x, out=x, quantize=how)
    if options:
        return
    # The product of q and scale is y and an error that does not depend on x's small steps.
    statistics = (stored.rstd,) if norm == "rms_norm" else (stored.mean, stored.rstd)
    dx = getattr(cupynorm, f"{norm}_backward")(dy, x, None, *statistics).dx.astype(np.float64)
    step = make_values("normal", x.shape, np.float64, 32) * 1e-4
    wide = x.astype(np.float64)
    slope = ((infer(wide + step) - infer(wide - step)) * dy).sum() / 2
    np.testing.assert_allclose((dx * step).sum(), slope, rtol=1e-5)


@every_how
def test_a_row_does_not_depend_on_the_others(how: Quantize) -> None:
    x = make_values("nonfinite", (9, 300), np.float32, 3)
    whole = cupynorm.layer_norm(x, quantize=how)
    for row in range(9):
        alone = cupynorm.layer_norm(x[row : row + 1], quantize=how)
        for actual, expected in zip(alone[:2], whole[:2], strict=True):
            same(actual, expected if expected is how.scale else expected[row : row + 1])


@pytest.mark.parametrize(
    ("kept", "strides"),
    [((6,), (4, 32)), ((2, 3), (12, 4, 32)), ((4, 2), (8, 4, 32)), ((0,), (4, 0)), ((), (16,))],
)
def test_columns_begin_at_16_bytes(kept: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x = make_values("normal", (*kept, 300), np.float32, 5)
    for how in BY_COLUMN:
        rows = dataclasses.replace(how, column_major=False)
        q, scale, expected_q, expected = (
            array for told in (how, rows) for array in cupynorm.rms_norm(x, quantize=told)[:2]
        )
        same(scale, expected)
        assert scale.strides == strides
        same(cupynorm.dequantize(q, scale), cupynorm.dequantize(expected_q, expected))


def in_frameworks(y: np.ndarray) -> Any:
    """Yield amax of an array by each framework that is here."""
    yield _quantize.amax_of(np, y)
    if importlib.util.find_spec("jax"):
        jax = importlib.import_module("jax")
        with jax.enable_x64(True):
            yield np.asarray(_quantize.amax_of(jax.numpy, jax.numpy.asarray(y)))
    if importlib.util.find_spec("torch"):
        from cupynorm.torch import _quantize as of_torch

        yield of_torch.amax_of(in_torch(y)).numpy()


def test_amax_of_what_is_not_finite_and_of_nothing() -> None:
    for values, expected in (
        (np.float32([[np.nan, -3], [2, np.nan]]), 3),
        (np.float32([[np.nan, -np.inf, 2]]), np.inf),
        (np.float16([[np.nan]]), 0),
        (np.float32([[-0.0]]), 0),
        (np.zeros((0, 8), np.float32), 0),
        (np.array([[-1e300]]), np.inf),
        (np.array([[-1 / 3]]), 1 / 3),
    ):
        with np.errstate(over="ignore"):
            found = reference.amax(values), *in_frameworks(values)
        for amax in found:
            same(amax, np.float32([expected]))
    x = make_values("normal", (0, 300), np.float32, 1)
    for how in AMAX:
        q, _, amax = result = cupynorm.rms_norm(x, quantize=how)
        assert q.shape == x.shape
        assert amax == 0
        testing.check_quantized("rms_norm", result, x, quantize=how, eps=1e-6)


@pytest.mark.parametrize("bound", [1.0, 0.7])
def test_vllm_for_each_token(bound: float) -> None:
    x = make_values("mixed_rows", (40, 256), DTYPES["bfloat16"], 4)
    x[0] = 0
    least, upper = np.float32(1 / (448 * 512)), np.float32(bound)
    y = cupynorm.rms_norm(x, np.full(256, 0.3, np.float32)).astype(np.float32)
    scale = np.maximum(np.minimum(np.abs(y).max(1, keepdims=True), upper) / np.float32(448), least)
    how = Quantize(FLOAT8[0], "row", scale_min=1 / (448 * 512), scale_max=upper / np.float32(448))
    ours = cupynorm.rms_norm(x, np.full(256, 0.3, np.float32), quantize=how)
    same(ours[0], saturated(y / scale, FLOAT8[0]))
    same(ours[1], scale)


def test_dtypes_by_any_name() -> None:
    for name in FLOAT8:
        for dtype in (name, getattr(ml_dtypes, name), np.dtype(name)):
            assert Quantize(dtype, "row").dtype == name
    assert Quantize(np.int8, "row", via=ml_dtypes.bfloat16).via == "bfloat16"


def test_bytes_as_cupy_has_them() -> None:
    x = make_values("normal", (4, 100), np.float32, 5)
    for how in HOWS:
        q, scale = cupynorm.rms_norm(x, quantize=how)
        expected = cupynorm.dequantize(q, scale)
        if how.dtype != "int8":
            q = q.view(np.uint8)
        if how.block == 32:
            scale = scale.view(np.uint8)
        testing.check_quantized("rms_norm", (q, scale), x, quantize=how, eps=1e-6)
        same(cupynorm.dequantize(q, scale, dtype=how.dtype), expected)


# ---- the check -----------------------------------------------------------------------------------


def test_the_check_finds_one_wrong_code_and_one_wrong_scale() -> None:
    x = make_values("normal", (6, 256), np.float32, 6)
    how = Quantize("float8_e4m3fn", "block", block=128)
    q, scale = cupynorm.rms_norm(x, quantize=how)

    def check(*result: Any) -> float:
        return testing.check_quantized("rms_norm", result, x, quantize=how, eps=1e-6)

    assert check(q, scale) < 1e-3
    off = q.copy()
    off.view(np.uint8)[2, 1] ^= 1
    with pytest.raises(AssertionError, match=r"^q\[2, 1\] is .*; 1 are wrong in all"):
        check(off, scale)
    for factor in (1 - 2e-6, 1 + 2e-6):
        wide = scale.copy()
        wide[3, 0] *= factor
        with pytest.raises(AssertionError, match=r"^scale\[3, 0\] is .*; 1 are wrong in all"):
            check(q, wide)
    with pytest.raises(AssertionError, match="scale must have shape"):
        check(q, scale[:, :1])
    with pytest.raises(AssertionError, match="q must have dtype float8_e4m3fn, got float8_e5m2"):
        check(q.view(ml_dtypes.float8_e5m2), scale)
    with pytest.raises(AssertionError, match=r"^result must be q, scale, a tuple"):
        check(q, scale, q)
    how = dataclasses.replace(how, amax=True)
    amax = reference.amax(cupynorm.rms_norm(x))
    assert check(q, scale, amax) < 1e-3
    for factor in (1 - 2e-6, 1 + 2e-6):
        with pytest.raises(AssertionError, match=r"^amax\[0\] is .*; 1 are wrong in all"):
            check(q, scale, amax * np.float32(factor))
    with pytest.raises(AssertionError, match=r"^result must be q, scale, amax, a"):
        check(q, scale)


# ---- the kernels, on the host --------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


def has_kernel(n: int, x: str, how: Quantize = HOWS[0], **others: Any) -> bool:
    of_y: Any = {"norm": "rms_norm", "x": x, "weight": x, "bias": None, "y": x, **others}
    of_y |= {"zero_centered": False, "store_statistics": False, "relu": False}
    spec, _ = pass_of_kernel(ForwardSpec(**of_y), Options("rms_norm", 1), how.told, n)
    divisors = n | 16 // np.dtype(DTYPES[x]).itemsize
    return quantized_config(spec, n, divisors & -divisors, 90) is not None


def test_which_rows_have_a_kernel() -> None:
    """docs/quantize.md says so."""
    of_sum = {"branch": "bfloat16", "residual": "float32"}
    assert all(has_kernel(n, "bfloat16") for n in range(8, 16385, 8))
    assert all(has_kernel(n, x) for n, x in ((8192, "float32"), (1004, "float16"), (4, "float32")))
    assert has_kernel(8192, "float32", **of_sum)
    assert not has_kernel(4096, "float64")
    assert not has_kernel(32768, "bfloat16")
    assert not has_kernel(16384, "float32")
    assert not has_kernel(4096, "bfloat16", weight="float64")
    # Packs of two elements would have half a word of codes.
    assert not any(has_kernel(n, "float32") for n in (10, 4098))
    assert not any(has_kernel(n, "float32", **of_sum) for n in (10, 1002))
    blocks, mx = HOWS[6], HOWS[9]
    assert (blocks.block, mx.block) == (128, 32)
    lengths = (*range(8, 129, 8), *range(456, 16385, 8))
    assert all(has_kernel(n, "bfloat16", blocks) for n in lengths)
    assert all(has_kernel(n, "bfloat16", mx) for n in range(128, 16385, 8))


@needs_compiler
@pytest.mark.parametrize("few_rows", [False, True])
def test_kernels_have_the_bits_of_the_oracle(few_rows: bool) -> None:
    BUILD.compile(k for name in QUANTIZED for k in kernels_of(name, few_rows=few_rows))
    gpu = Gpu(BUILD, few_rows=few_rows)
    gpu.repeats = True
    for name in QUANTIZED:
        check_quantized_kernel(gpu, name)
    assert {kernel.name for kernel in gpu.launched} == {"norm_forward_in_registers"}


@needs_compiler
@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("n", [128, 1000, 4096])
def test_kernels_find_the_largest_of_all_rows(n: int, few_rows: bool) -> None:
    gpu, how = Gpu(BUILD, few_rows=few_rows), AMAX[0]
    for seed in range(12):
        x = make_values("normal", (9, n), np.float16, seed)
        place = np.unravel_index(np.random.default_rng(seed).integers(x.size), x.shape)
        x[place] = -100
        with gpu.fresh_memory():
            *_, amax = gpu.quantized("rms_norm", gpu.cupy.array(x), eps=1e-6, quantize=how)
            y = gpu.to_numpy(gpu.forward("rms_norm", gpu.cupy.array(x), eps=1e-6).y)
            same(gpu.to_numpy(amax), reference.amax(y))
            assert abs(y[place]) == amax
    with gpu.fresh_memory():
        none = gpu.quantized("rms_norm", gpu.cupy.array(x[:0]), eps=1e-6, quantize=how)
        assert gpu.to_numpy(none[2]) == 0


@needs_compiler
@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
def test_kernels_round_each_number(dtype: str) -> None:
    for source in ("float16", "bfloat16", "boundaries"):
        check_each_number(on_host(Gpu(BUILD)), dtype, source)


@pytest.mark.parametrize("architecture", ["75", "90", "120"])
def test_the_kernels_do_not_spill(architecture: str) -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    from test_compile import compiled

    norms, dtype = (("rms_norm", None), ("layer_norm", "bfloat16")), "bfloat16"
    hows = (*HOWS[:9], *AMAX[:9]) if architecture == "90" else (*HOWS[:2], *AMAX[:2])
    kernels = []
    for i, how in enumerate(hows):
        (norm, bias), n = norms[i % 2], (4096, 16384, 1024)[i % 3]
        via = {"x": dtype, None: "float32"}.get(how.via, how.via)
        residual = (dtype, dtype) if i % 4 == 3 else (None, None)
        of_y: Any = ForwardSpec(
            norm,
            dtype,
            dtype,
            bias,
            via,
            False,
            False,
            False,
            *residual,  # type: ignore[arg-type]
        )
        spec, _ = pass_of_kernel(of_y, Options(of_y.norm, 1), how.told, n)
        config = quantized_config(spec, n, 8, int(architecture))
        assert config is not None
        kernels.append(forward_instantiation(spec, config))
    for kernel, log in compiled(tuple(kernels), architecture).logs.items():
        assert re.search(r"\b0 bytes spill stores", log), (str(kernel), log)


# ---- compiled ahead ------------------------------------------------------------------------------


def of_calls(n: int, how: Quantize, residual: str | None, stored: bool) -> tuple[Any, Any]:
    """Return the pass of a call on bfloat16 with a float32 weight, and its layout for many rows."""
    via = {"x": "bfloat16", None: "float32"}.get(how.via, how.via)
    dtypes: Any = residual or "bfloat16", "float32", None, via
    of_y = ForwardSpec("rms_norm", *dtypes, False, stored, False, residual and "bfloat16", residual)
    spec, _ = pass_of_kernel(of_y, Options("rms_norm", 1), how.told, n)
    vector = min(4 if residual else 8, n & -n)
    config = quantized_config(spec, n, vector, 90)
    return (of_y, forward_config(of_y, n, vector, 90)) if config is None else (spec, config)


@pytest.mark.parametrize("n", [128, 1003, 1024, 4096, 32768])
def test_kernel_source_is_of_the_kernel_that_quantizes(n: int) -> None:
    for how, residual, stored in itertools.product(
        (*HOWS, *AMAX[:2]), (None, "float32"), (False, True)
    ):
        kernel = forward_instantiation(*of_calls(n, how, residual, stored))
        asked: Any = {"residual_dtype": residual, "statistics": stored, "architecture": 90}
        sources = cupynorm.kernel_source(
            "rms_norm", n, "bfloat16", "float32", quantize=how, **asked
        )
        assert sources == {kernel.name: kernel.source()}
        quantizes = "Epilogue = Quantize;" in kernel.structs()
        assert quantizes == (n in (128, 1024, 4096))


def test_warmup_loads_the_kernels_that_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    from cupynorm import _compile, _plans, _warmup

    loaded: list[Any] = []
    kernel = SimpleNamespace(clusters_at_once=lambda alone=False: 1)
    monkeypatch.setattr(_warmup, "_device_problem", lambda: None)
    device = SimpleNamespace(id=-3)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: device)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    monkeypatch.setattr(_compile, "load", lambda wanted, device: loaded.append(wanted) or kernel)
    for n, how in itertools.product((4096, 32768), (HOWS[0], AMAX[1], HOWS[6])):
        device.id -= 1  # where nothing is loaded yet
        for stored in (False, True):
            spec, many = of_calls(n, how, None, stored)
            few = [config for _, config in few_rows_configs(spec, many, n, 90, 12)]
            loaded.clear()
            asked: Any = {"quantize": how, "backward": stored}
            cupynorm.warmup("rms_norm", n, "bfloat16", "float32", **asked)
            forward = {k for k in loaded if "forward" in k.file}
            assert forward == {forward_instantiation(spec, config) for config in (*few, many)}
            assert any("backward" in k.file for k in loaded) == stored


@pytest.mark.gpu
@pytest.mark.parametrize("how", [HOWS[0], AMAX[1], HOWS[6]], ids=["row", "static, amax", "blocks"])
def test_a_graph_may_capture_the_first_call_behind_warmup(
    how: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from cupynorm import _compile

    n, told = 1536, told_in(how, to_cupy)
    cupynorm.warmup("rms_norm", n, "bfloat16", "float32", quantize=told)
    assert cupynorm.supports("rms_norm", n, "bfloat16", "float32", quantize=told) is None
    monkeypatch.setattr(_compile, "_functions", dict(_compile._functions))
    monkeypatch.setattr(cupy, "RawModule", None)  # calling it would fail
    stream = cupy.cuda.Stream(non_blocking=True)
    for m in (1, 7, 300, 4096):
        x, weight = make_values("normal", (m, n), DTYPES["bfloat16"], m), np.ones(n, np.float32)
        put = to_cupy(x), to_cupy(weight)
        with stream:
            stream.begin_capture()
            captured = cupynorm.rms_norm(*put, quantize=told)
            stored = cupynorm.rms_norm_forward(*put, quantize=told)
            stream.end_capture().launch(stream)
            stream.synchronize()
        result = tuple(map(to_numpy, captured))
        testing.check_quantized("rms_norm", result, x, weight, quantize=how, eps=1e-6)
        np.testing.assert_array_equal(to_numpy(stored.y), result[0])


# ---- CuPy ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_layout
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_has_the_bits_of_the_oracle(how: Quantize, norm: str, dtype: str) -> None:
    function, told = getattr(cupynorm, norm), told_in(how, to_cupy)
    for m, n in ((7, 300), (300, 128), (70, 1024), (65, 1000), (40, 4096), (3, 70000)):
        x = make_values("nonfinite", (m, n), DTYPES[dtype], m + n)
        weight = make_values("normal", (n,), np.float32, 8)
        arrays = to_cupy(x), to_cupy(weight)
        for residual in (None, to_cupy(x[::-1].copy())):
            options = {"residual": residual}
            y = function(*arrays, **options, out_dtype=via_of(how, x))
            y, totals = (y, []) if residual is None else (y[0], [y[1]])
            q, scale, *rest = function(*arrays, **options, quantize=told)
            exact_q, exact_scale, *exact = by_oracle(how, to_numpy(y))
            same(to_numpy(q).view(how.dtype), exact_q)
            same(to_numpy(scale).view(exact_scale.dtype), exact_scale)
            if how.column_major:
                assert scale.strides == (4, 4 * -(-m // 4) * 4)
            for actual, expected in zip(rest, (*map(to_cupy, exact), *totals), strict=True):
                same(to_numpy(actual), to_numpy(expected))
            back = cupynorm.dequantize(q, scale, dtype=how.dtype)
            same(to_numpy(back), cupynorm.dequantize(exact_q, exact_scale))


@pytest.mark.gpu
def test_one_kernel_serves_rows_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    def refuse(*_: Any) -> Any:
        raise AssertionError("operations of CuPy quantized it")

    x, weight = make_values("normal", (64, 4096), DTYPES["bfloat16"], 20), np.ones(4096, np.float32)
    put = to_cupy(x), to_cupy(weight)
    for how in (*HOWS, *AMAX[:2], *BY_COLUMN):
        told, via = told_in(how, to_cupy), via_of(how, x)
        y = cupynorm.rms_norm(*put, out_dtype=via)
        expected = by_oracle(how, to_numpy(y))
        with monkeypatch.context() as patch:
            patch.setattr(_quantize, "of_arrays", refuse)
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                for _ in range(2):  # the second call is a prepared one
                    made = cupynorm.rms_norm(*put, quantize=told)
                stream.synchronize()
                stream.begin_capture()
                captured = cupynorm.rms_norm(*put, quantize=told)
                graph = stream.end_capture()
                captured[0].fill(0)
                graph.launch(stream)
            stream.synchronize()
        for results in (made, captured):
            for actual, exact in zip(results, expected, strict=True):
                same(to_numpy(actual).view(exact.dtype), exact)


@pytest.mark.gpu
def test_a_replayed_graph_finds_amax_again() -> None:
    import cupy

    x, weight = make_values("normal", (300, 1024), np.float16, 20), np.ones(1024, np.float16)
    put = to_cupy(x), to_cupy(weight)
    how = told_in(AMAX[1], to_cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupynorm.rms_norm(*put, quantize=how)
        stream.synchronize()
        stream.begin_capture()
        amax = cupynorm.rms_norm(*put, quantize=how)[2]
        graph = stream.end_capture()
        for factor in (1, 4, 0.25):  # it falls as well
            put[1].fill(factor)
            graph.launch(stream)
            stream.synchronize()
            y = cupynorm.rms_norm(x, weight * np.float16(factor))
            assert abs(to_numpy(amax)[0] / reference.amax(y)[0] - 1) < 1e-3


@pytest.mark.gpu
def test_amax_takes_rows_as_they_end_in_any_order() -> None:
    how = told_in(AMAX[1], to_cupy)
    for m, n in ((100_000, 128), (4096, 4096), (1, 16384)):
        x = make_values("normal", (m, n), DTYPES["bfloat16"], m)
        put = to_cupy(x)
        y = to_numpy(cupynorm.rms_norm(put))
        for _ in range(20):
            same(to_numpy(cupynorm.rms_norm(put, quantize=how)[2]), reference.amax(y))


def check_numbers_on_a_gpu(x: np.ndarray, weight: np.ndarray, how: Quantize) -> np.ndarray:
    q, _ = cupynorm.rms_norm(to_cupy(x), to_cupy(weight), eps=0.0, quantize=told_in(how, to_cupy))
    return to_numpy(q)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOAT8, "int8"])
@pytest.mark.parametrize("source", ["float16", "bfloat16", "boundaries"])
def test_a_gpu_rounds_each_number(dtype: str, source: str) -> None:
    check_each_number(check_numbers_on_a_gpu, dtype, source)


# ---- torch ---------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_numpys_bits(how: Quantize, dtype: str) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    x = make_values("nonfinite", (7, 300), DTYPES[dtype], 7)
    weight = make_values("normal", (300,), np.float32, 8)
    expected = cupynorm.layer_norm(x, weight, quantize=how)
    tensors, told = (in_torch(x), in_torch(weight)), told_in(how, in_torch)
    for function in (cupynorm.torch.layer_norm, cupynorm.layer_norm):
        result = function(*tensors, quantize=told)
        for actual, exact in zip(result, expected, strict=True):
            same(actual, exact)
            if exact.size > 1:
                assert [s * actual.itemsize for s in actual.stride()] == [*exact.strides]
        back = cupynorm.dequantize(*expected[:2])
        result = result[:2]
        same(cupynorm.dequantize(*result), back)
        of_bytes = (array.view(torch.uint8) if array.itemsize == 1 else array for array in result)
        if how.dtype != "int8":
            same(cupynorm.dequantize(*of_bytes, dtype=how.dtype), back)


@pytest.mark.parametrize("dtype", [np.float64, float, "f8", "double"])
def test_a_sum_of_float64_is_quantized_from_float64_however_it_is_named(dtype: Any) -> None:
    x, residual = np.random.default_rng(0).standard_normal((2, 64, 300)).astype(np.float32)
    given = {"residual": residual, "quantize": Quantize("int8", "row", via=None)}
    exact = cupynorm.rms_norm(x, residual_dtype="float64", **given)
    in_float32 = cupynorm.rms_norm(x, residual_dtype="float32", **given)
    assert (exact[1] != in_float32[1]).any()
    for actual, expected in zip(
        cupynorm.rms_norm(x, residual_dtype=dtype, **given), exact, strict=True
    ):
        same(actual, expected)


def test_a_number_without_axes_becomes_an_array() -> None:
    back = cupynorm.dequantize(np.array(3, np.int8), np.ones((), np.float32))
    assert isinstance(back, np.ndarray)
    assert (back, back.shape) == (3, ())


def test_torch_compiles_and_transforms() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    def function(x: Any, scale: Any) -> Any:
        scale = scale.reshape(1, 1, 1, 1)
        by_half = Quantize("int8", "row", via=torch.float16)
        of_blocks = Quantize(torch.float8_e4m3fn, "block", block=128)
        q, blocks, total = cupynorm.torch.rms_norm(x, residual=x, quantize=of_blocks)
        of_static = cupynorm.torch.layer_norm(x, quantize=Quantize(torch.int8, scale), axis=(0, 2))
        rows = cupynorm.torch.rms_norm(x, axis=1, quantize=Quantize(torch.float8_e5m2, "row"))
        of_mx = cupynorm.torch.rms_norm(x, quantize=Quantize("float8_e5m2", "block", block=32))
        asked = Quantize(torch.int8, scale, amax=True)
        *_, amax, again = cupynorm.torch.rms_norm(x, residual=x, quantize=asked)
        back = cupynorm.dequantize(q, blocks)
        _, columns = cupynorm.torch.rms_norm(x, quantize=BY_COLUMN[0])
        half = cupynorm.torch.rms_norm(x, quantize=by_half)
        return *half, *of_mx, q, blocks, total, *of_static, *rows, amax, again, back, columns

    x, scale = torch.randn(3, 4, 200), torch.tensor(0.02)
    expected = function(x, scale)
    assert expected[7].shape == x.shape
    for actual, exact in zip(
        torch.compile(function, fullgraph=True, backend="aot_eager")(x, scale),
        expected,
        strict=True,
    ):
        same(actual, exact)
        assert actual.stride() == exact.stride()


@pytest.mark.parametrize("how", [*HOWS, *AMAX[:7]], ids=repr)
def test_torchs_vmap_is_a_loop_over_the_batch(how: Quantize, request: Any) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    # Without a rule of their own, torch would call the operations once for each example.
    allow_calls_of_each = torch._C._functorch._set_vmap_fallback_enabled
    request.addfinalizer(lambda: allow_calls_of_each(True))
    allow_calls_of_each(False)
    x = torch.randn(3, 5, 2, 40)
    scales = torch.tensor([[0.01], [0.02]])
    for dim, at in ((2, lambda i: x[:, :, i]), (None, lambda i: x[:, :, 0])):
        if dim is None and not how.is_given:
            continue

        def norm(x: Any, scale: Any) -> Any:
            told = dataclasses.replace(how, scale=scale) if how.is_given else how
            return cupynorm.torch.rms_norm(x, quantize=told)

        found = torch.vmap(norm, (dim, 0))(x if dim else x[:, :, 0], scales)
        for i, scale in enumerate(scales):
            for actual, expected in zip(found, norm(at(i), scale), strict=True):
                same(actual[i], expected)


def test_torchs_vmap_of_rows_without_elements_has_an_amax_of_zero() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    how = Quantize("int8", "row", amax=True)
    rows = torch.vmap(lambda x: cupynorm.torch.rms_norm(x, quantize=how))(torch.ones(2, 0, 8))
    assert [tuple(array.shape) for array in rows] == [(2, 0, 8), (2, 0, 1), (2, 1)]
    assert rows[2].tolist() == [[0.0], [0.0]]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_calls_the_kernel(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch
    from cupynorm.torch import _quantize as of_torch

    def refuse(*_: Any) -> Any:
        raise AssertionError("operations of torch quantized it")

    x = make_values("normal", (64, 4096), DTYPES["bfloat16"], 21)
    weight = make_values("normal", (4096,), np.float32, 22)
    tensors = in_torch(x).cuda(), in_torch(weight).cuda()
    monkeypatch.setattr(of_torch, "codes_of", refuse)
    for how in (*HOWS, *AMAX[:2], *BY_COLUMN):
        told = told_in(how, lambda array: in_torch(array).cuda())

        def function(x: Any, weight: Any, told: Quantize = told) -> Any:
            return cupynorm.torch.rms_norm(x, weight, quantize=told, residual=x)[:-1]

        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True) if compiled else function
        via = getattr(torch, np.dtype(via_of(how, x)).name)
        y = cupynorm.torch.rms_norm(2 * tensors[0], tensors[1], out_dtype=via)
        expected = by_oracle(how, in_numpy(y))
        for _ in range(2):
            result = function(*tensors)
            for actual, exact in zip(result, expected, strict=True):
                same(actual, exact)
            if how.column_major:
                assert result[1].stride() == (1, 64)


@pytest.mark.parametrize("how", ["given", "row", "block"])
@pytest.mark.parametrize("adds", [False, True])
def test_torchs_operation_keeps_its_rules(how: str, adds: bool) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    from cupynorm.torch import _quantize as of_torch

    x, scale = torch.randn(3, 64), torch.tensor([0.1]) if how == "given" else None
    arguments = (x, x if adds else None, None, None, scale, 1, "rms_norm", 1e-6, False)
    by_block = how == "block"
    block = 128 if by_block else None
    arguments += (torch.float32, None, "int8", how, block, 1e-30, 1e30, by_block, adds)
    torch.library.opcheck(of_torch._compiled, arguments)


def test_torch_has_no_gradient_of_it() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    def back(x: Any) -> Any:
        quantize = Quantize("float8_e4m3fn", "row")
        return cupynorm.dequantize(*cupynorm.torch.rms_norm(x, quantize=quantize)).sum()

    def by_scale(scale: Any) -> Any:
        quantize = Quantize("float8_e4m3fn", scale)
        return cupynorm.dequantize(*cupynorm.torch.rms_norm(x, quantize=quantize)).sum()

    x, scale = torch.randn(3, 8), torch.tensor([0.5])
    compiled = torch.compile(back, fullgraph=True, backend="aot_eager")
    derivatives = [compiled(x.clone().requires_grad_()).backward]
    for function, at in ((back, x), (by_scale, scale)):
        derivatives += [
            function(at.clone().requires_grad_()).backward,
            lambda function=function, at=at: torch.func.grad(function)(at),
            lambda function=function, at=at: torch.func.jvp(function, (at,), (at,)),
        ]
    for derive in derivatives:
        with pytest.raises(NotImplementedError, match=r"^quantize has no gradient"):
            derive()
    assert not back(x).requires_grad


def test_torch_compiles_dequantize() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    for n, block in ((1000, 128), (300, 32)):
        x = in_torch(make_values("normal", (4, n), np.float32, 23))
        result = cupynorm.torch.rms_norm(x, quantize=Quantize(FLOAT8[0], "block", block=block))
        torch._dynamo.reset()
        compiled = torch.compile(cupynorm.dequantize, fullgraph=True)
        same(compiled(*result), cupynorm.dequantize(*result))


def test_torch_refuses_what_its_results_cannot_have() -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    import cupynorm.torch

    def rows(x: Any) -> Any:
        return cupynorm.torch.rms_norm(x, quantize=BY_COLUMN[0])

    with pytest.raises(ValueError, match=r"^quantize.column_major must be False within torch.vmap"):
        torch.vmap(rows)(torch.randn(3, 5, 300))
    with pytest.raises(ValueError, match=r"^scale must be on q's device, cpu; got meta"):
        cupynorm.dequantize(torch.zeros(2, dtype=torch.int8), torch.ones(1, device="meta"))


# ---- JAX -----------------------------------------------------------------------------------------


@every_how
@pytest.mark.parametrize(
    ("dtype", "compiled"), [("float32", False), ("float16", True), ("bfloat16", True)]
)
def test_jax_has_the_bits_of_the_oracle(how: Quantize, dtype: str, compiled: bool) -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    import cupynorm.jax

    x = make_values("nonfinite", (7, 300), DTYPES[dtype], 9)
    weight = make_values("normal", (300,), np.float32, 10)

    def function(x: Any) -> Any:
        told = told_in(how, jax.numpy.asarray)  # jit has the scale as a constant
        y = cupynorm.jax.rms_norm(x, weight, out_dtype=via_of(how, x))
        result = cupynorm.jax.rms_norm(x, weight, quantize=told)
        return y, *result, cupynorm.dequantize(*result[:2])

    y, *result, back = (jax.jit(function) if compiled else function)(x)
    expected = by_oracle(how, np.asarray(y))
    for actual, exact in zip(result, expected, strict=True):
        same(actual, exact)
    same(back, cupynorm.dequantize(*expected[:2]))
    of_bytes = (array.view(np.uint8) if array.itemsize == 1 else array for array in result[:2])
    if how.dtype != "int8":
        same(cupynorm.dequantize(*of_bytes, dtype=how.dtype), back)


def test_xla_divides_by_a_scale_that_it_knows() -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    from cupynorm.jax._quantize import quantized

    scale = np.float32([15 / 64])  # y * (1 / scale) is no tie where y / scale is one
    how = Quantize(FLOAT8[0], scale)
    y = (boundaries(how.dtype) * scale)[None]
    q, _ = jax.jit(lambda y: quantized(y, (-1,), how, jax.numpy.asarray(scale)))(y)
    same(q, by_oracle(how, y)[0])


@pytest.mark.parametrize("via", ["float16", "bfloat16"])
def test_xla_keeps_the_rounding_in_between(via: str) -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    import cupynorm.jax

    x = make_values("normal", (64, 1024), np.float32, 11)
    how = Quantize("float8_e5m2", np.float32([1]), via=via)
    result = jax.jit(lambda x: cupynorm.jax.rms_norm(x, quantize=how))(x)
    arrays = tuple(map(np.asarray, result))
    testing.check_quantized("rms_norm", arrays, x, quantize=how, eps=1e-6)
    exact = dataclasses.replace(how, via=None)
    with pytest.raises(AssertionError, match="are wrong in all"):  # else this shows nothing
        testing.check_quantized("rms_norm", arrays, x, quantize=exact, eps=1e-6)


def test_jax_transforms_and_refuses_gradients() -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    import cupynorm.jax

    x = make_values("normal", (2, 3, 160), np.float32, 12)
    rows = Quantize("int8", "block", block=128)
    whole = cupynorm.jax.layer_norm(x, residual=x, quantize=rows)
    each = jax.vmap(lambda x: cupynorm.jax.layer_norm(x, residual=x, quantize=rows))(x)
    for actual, expected in zip(each, whole, strict=True):
        same(actual, expected)
    traced = jax.jit(lambda x, of: cupynorm.jax.layer_norm(x, quantize=Quantize("int8", of)))
    same(traced(x, SCALE)[0], cupynorm.layer_norm(x, quantize=Quantize("int8", SCALE))[0])
    q, scale = cupynorm.layer_norm(jax.numpy.asarray(x), quantize=Quantize(FLOAT8[0], "row"))
    same(q, cupynorm.layer_norm(x, quantize=Quantize(FLOAT8[0], "row"))[0])
    assert isinstance(scale, jax.Array)

    def back(x: Any) -> Any:
        return cupynorm.dequantize(*cupynorm.jax.rms_norm(x, quantize=rows)).sum()

    def by_scale(scale: Any, amax: bool = False) -> Any:
        static = Quantize("int8", scale, amax=amax)
        return cupynorm.dequantize(*cupynorm.jax.rms_norm(x, quantize=static)[:2]).sum()

    for derive in (
        lambda: jax.grad(back)(x),
        lambda: jax.jvp(jax.jit(back), (x,), (x,)),
        lambda: jax.grad(by_scale)(SCALE),
        lambda: jax.jvp(lambda scale: by_scale(scale, amax=True), (SCALE,), (SCALE,)),
    ):
        with pytest.raises(NotImplementedError, match=r"^quantize has no gradient"):
            derive()
    assert not np.any(jax.grad(lambda x: back(jax.lax.stop_gradient(x)))(x))


def test_xla_divides_by_the_largest_number() -> None:
    jax = pytest.importorskip("jax", minversion="0.10.2")
    from cupynorm.jax._quantize import quantized

    for n in (1, 2, 200):
        y = make_values("normal", (400, n), np.float32, 24)
        for how in (Quantize("int8", "row"), Quantize("int8", "block", block=128)):
            found = jax.jit(lambda y, how=how: quantized(y, (-1,), how, None))(y)
            for actual, exact in zip(found, by_oracle(how, y), strict=True):
                same(actual, exact)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax.numpy"])
def test_scales_that_others_made_may_be_nan(framework: str) -> None:
    namespace = pytest.importorskip(framework)
    scale = namespace.asarray(np.array([[255, 1, 254]], np.uint8))
    if framework != "numpy":
        scale = scale.view(namespace.float8_e8m0fnu)
    ones = namespace.asarray(np.full((1, 96), 0x38, np.uint8))
    found = cupynorm.dequantize(ones, scale, dtype="float8_e4m3fn")
    expected = np.float32([np.nan, 2.0**-126, 2.0**127])
    np.testing.assert_array_equal(np.asarray(found)[0, ::32], expected)
