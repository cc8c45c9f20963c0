"""cupynorm.jax on GPUs: the kernels within XLA's programs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import threads_that_wait, wait_for_threads
from quantized_gpu import HOWS, SCALE, by_oracle, same, told_in
from strategies import DTYPES, make_values

from cupynorm._environment import gpu_problem

jax = pytest.importorskip("jax", minversion="0.10.2")

import jax.numpy as jnp  # noqa: E402
import jax_sharding  # noqa: E402
from fused_gpu import GATED, call_of_many  # noqa: E402
from fused_norms import Call  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_calls import check, check_fused, gradients_through_layers  # noqa: E402

import cupynorm  # noqa: E402
import cupynorm.jax  # noqa: E402
from cupynorm import Quantize, _compile, _driver, _plans, reference, testing  # noqa: E402
from cupynorm.jax import _formula, _kernels  # noqa: E402


def jax_gpus() -> int:
    # JAX is not started if the tests are skipped anyway.
    if gpu_problem():
        return 0
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


GPUS = jax_gpus()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs JAX with CUDA: jax.devices('cuda') has none"),
]

NORMS = ("rms_norm", "layer_norm")


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float64_is_rounded_once(dtype: str) -> None:
    bits = np.arange(0x3C00, 0x4400, dtype=np.uint16)
    numbers = bits.view(DTYPES[dtype]).astype(np.float64)
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate([ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)])
    values = np.concatenate([values, -values])
    found = jax.jit(lambda x: _formula.cast(3 * x, dtype))(values / 3)
    expected = reference.round_once(3 * (values / 3), DTYPES[dtype])
    np.testing.assert_array_equal(np.asarray(found), expected)


def values(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return make_values("normal", shape, DTYPES[dtype], seed)


def targets(program: Any) -> list[str]:
    """Return our calls in a compiled program."""
    return re.findall(r'custom_call_target="cupynorm\.(\w+)"', program.as_text())


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_every_pair_of_x_and_weight(norm: str, x: str, weight: str) -> None:
    for n in (1000, 4096):
        affine = values((n,), weight, 2)
        check(norm, values((67, n), x, 1), affine, affine, dy=values((67, n), weight, 3))


@pytest.mark.parametrize("relu", [None, (0.0, 1.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_every_choice_of_operands(norm: str, weight: bool, bias: bool, relu: Any) -> None:
    x, dy = values((5, 3, 33), "bfloat16", 1), values((5, 3, 33), "float16", 2)
    for k in (1, 2):
        check(
            norm,
            x,
            values(x.shape[-k:], "float16", 3) if weight else None,
            values(x.shape[-k:], "float32", 4) if bias else None,
            dy=dy,
            k=k,
            zero_centered=weight,
            relu=relu,
        )


@pytest.mark.parametrize("norm", NORMS)
def test_two_axes_of_512_make_one_row_of_262144(norm: str) -> None:
    x, weight = values((6, 512, 512), "bfloat16", 1), values((512, 512), "bfloat16", 2)
    check(norm, x, weight, dy=values(x.shape, "bfloat16", 3), k=2)


def test_no_rows() -> None:
    x, weight = jnp.zeros((0, 8)), jnp.ones(8)
    y, pull_back = jax.vjp(cupynorm.jax.rms_norm, x, weight)
    dx, dweight = pull_back(y)
    assert y.shape == dx.shape == x.shape
    np.testing.assert_array_equal(dweight, 0)


@pytest.mark.parametrize("n", [33, 768, 4096, 40000])
@pytest.mark.parametrize("norm", NORMS)
def test_the_bits_are_those_of_the_plain_functions(norm: str, n: int) -> None:
    x, dy = (jnp.asarray(values((129, n), "bfloat16", seed)) for seed in (1, 2))
    weight = jnp.asarray(values((n,), "float32", 3))
    y, pull_back = jax.vjp(getattr(cupynorm.jax, norm), x, weight)
    dx, dweight = pull_back(dy)
    stored = getattr(cupynorm, f"{norm}_forward")(x, weight)
    statistics = (stored.rstd,) if norm == "rms_norm" else (stored.mean, stored.rstd)
    plain = getattr(cupynorm, f"{norm}_backward")(dy, x, weight, *statistics, bias=False)
    for one, other in ((y, stored.y), (dx, plain.dx), (dweight, plain.dweight)):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


# ---- weights that vary from row to row -----------------------------------------------------------

# Shapes of x, weight and bias, and how many axes are normalized.
BROADCAST: dict[str, tuple[Any, Any, Any, int]] = {
    "AdaLN": ((4, 33, 1024), (4, 1, 1024), (4, 1, 1024), 1),
    "heads": ((3, 17, 8, 128), (8, 128), None, 1),
    "heads of examples": ((3, 17, 8, 64), (3, 1, 8, 64), (3, 1, 8, 64), 1),
    "channels": ((2, 12, 9, 20), (12, 1, 1), (12, 1, 1), 3),
    "groups of channels": ((2, 3, 4, 9, 20), (3, 4, 1, 1), (3, 4, 1, 1), 3),
    "an odd width": ((5, 7, 333), (5, 1, 333), (333,), 1),
    "a bias alone": ((5, 7, 256), None, (5, 1, 256), 1),
    "apart": ((3, 5, 4, 96), (3, 1, 4, 96), (96,), 1),
    "a long row": ((3, 4, 40000), (3, 1, 40000), (3, 1, 40000), 1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", BROADCAST)
@pytest.mark.parametrize("norm", NORMS)
def test_weights_that_broadcast(norm: str, case: str, dtype: str) -> None:
    shape, of_weight, of_bias, k = BROADCAST[case]
    weight, bias = (
        None if of is None else values(of, dtype, seed)
        for of, seed in ((of_weight, 2), (of_bias, 3))
    )
    centered = weight is not None
    for relu in (None, (-0.5, 1.0)):
        options = {"k": k, "zero_centered": centered, "relu": relu}
        check(norm, values(shape, dtype, 1), weight, bias, dy=values(shape, dtype, 4), **options)
    residual, total = (values(shape, "float32", seed) for seed in (5, 6))
    options = {"dy": values(shape, dtype, 4), "residual": residual, "dresidual_out": total}
    check(norm, values(shape, dtype, 1), weight, bias, k=k, **options)


@pytest.mark.parametrize("case", ["AdaLN", "heads", "groups of channels"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_bits_of_groups_are_those_of_the_plain_functions(norm: str, case: str) -> None:
    shape, of_weight, _, k = BROADCAST[case]
    x, dy = (jnp.asarray(values(shape, "bfloat16", seed)) for seed in (1, 2))
    weight, bias = (jnp.asarray(values(of_weight, "float32", seed)) for seed in (3, 4))
    axis = tuple(range(-k, 0))
    function = functools.partial(getattr(cupynorm.jax, norm), axis=axis)
    y, pull_back = jax.vjp(function, x, weight, bias)
    stored = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, axis=axis)
    statistics = (stored.rstd,) if norm == "rms_norm" else (stored.mean, stored.rstd)
    plain = getattr(cupynorm, f"{norm}_backward")(
        *(dy, x, weight, *statistics), bias=bias, axis=axis
    )
    expected = stored.y, plain.dx, plain.dweight, plain.dbias
    for one, other in zip((y, *pull_back(dy)), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_vmap_of_weights_is_one_launch_each_way_and_right() -> None:
    x, weights, bias = values((4, 3, 64)), values((4, 64), seed=1), values((64,), seed=2)

    def gradients(x: Any, weight: Any, bias: Any) -> Any:
        loss = lambda *a: jnp.sum(jnp.sin(cupynorm.jax.layer_norm(*a)))  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(x, weight, bias)

    batched = jax.vmap(gradients, in_axes=(0, 0, None))
    program = jax.jit(batched).lower(x, weights, bias).compile()
    assert sorted(targets(program)) == ["backward", "forward"]
    found = program(x, weights, bias)
    for i in range(4):
        for one, other in zip(found, gradients(x[i], weights[i], bias), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5)


# ---- a residual ----------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_every_pair_of_x_and_residual(norm: str, x: str, residual: str) -> None:
    for n in (1000, 4096):
        weight = values((n,), "float32", 3)
        for total in (None, values((67, n), residual, 5)):
            check(
                norm,
                values((67, n), x, 1),
                weight,
                dy=values((67, n), x, 4),
                residual=values((67, n), residual, 2),
                dresidual_out=total,
            )


@pytest.mark.parametrize("norm", NORMS)
def test_a_residual_beside_other_options(norm: str) -> None:
    x, dy = (values((5, 3, 33), "bfloat16", seed) for seed in (1, 2))
    residual, bias = values(x.shape, "float32", 3), values((3, 33), "float16", 4)
    options = {"dy": dy, "k": 2, "relu": (-0.5, 1.0), "residual": residual}
    for dtype in ("float32", "bfloat16"):
        options |= {"residual_dtype": DTYPES[dtype], "dresidual_out": values(x.shape, dtype, 5)}
        check(norm, x, values((3, 33), "bfloat16", 6), bias, zero_centered=True, **options)
        check(norm, x, **options)


@pytest.mark.parametrize("n", [33, 768, 4096, 40000])
@pytest.mark.parametrize("norm", NORMS)
def test_the_bits_with_a_residual_are_those_of_the_plain_functions(norm: str, n: int) -> None:
    x, dy = (jnp.asarray(values((129, n), "bfloat16", seed)) for seed in (1, 2))
    weight, residual, total = (
        jnp.asarray(values(shape, "float32", seed))
        for seed, shape in ((3, (n,)), (4, x.shape), (5, x.shape))
    )
    function = lambda x, residual, weight: getattr(cupynorm.jax, norm)(  # noqa: E731
        x, weight, residual=residual
    )
    (y, s), pull_back = jax.vjp(function, x, residual, weight)
    dx, dresidual, dweight = pull_back((dy, total))
    stored = getattr(cupynorm, f"{norm}_forward")(x, weight, residual=residual)
    statistics = (stored.rstd,) if norm == "rms_norm" else (stored.mean, stored.rstd)
    plain = getattr(cupynorm, f"{norm}_backward")(
        *(dy, stored.residual_out, weight, *statistics),
        bias=False,
        dresidual_out=total,
        dx_dtype=x.dtype,
    )
    for one, other in (
        *((y, stored.y), (s, stored.residual_out), (dx, plain.dx)),
        *((dresidual, plain.dresidual), (dweight, plain.dweight)),
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_residual_is_one_launch_each_way() -> None:
    x, residual, weight = values((4, 64)), values((4, 64), seed=1), values((64,), seed=2)

    def loss(x: Any, residual: Any, weight: Any) -> Any:
        y, s = cupynorm.jax.rms_norm(x, weight, residual=residual)
        return jnp.sum(jnp.sin(y) * jnp.cos(s))

    def pair(x: Any, residual: Any, weight: Any) -> Any:
        s = x + residual
        return jnp.sum(jnp.sin(cupynorm.jax.rms_norm(s, weight)) * jnp.cos(s))

    gradient = jax.grad(loss, (0, 1, 2))
    program = jax.jit(gradient).lower(x, residual, weight).compile()
    assert sorted(targets(program)) == ["backward", "forward"]
    expected = jax.grad(pair, (0, 1, 2))(x, residual, weight)
    for one, other in zip(program(x, residual, weight), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# ---- quantized outputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1024, 4096])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("how", HOWS, ids=repr)
@pytest.mark.parametrize("norm", NORMS)
def test_quantized_bits_are_those_of_the_plain_functions(
    norm: str, how: Quantize, residual: bool, n: int
) -> None:
    x = jnp.asarray(make_values("nonfinite", (129, n), DTYPES["bfloat16"], n))
    weight, added = jnp.asarray(values((n,), seed=1)), jnp.asarray(values((129, n), seed=2))
    told = told_in(how, jnp.asarray)
    given = {"residual": added if residual else None, "quantize": told}
    function = functools.partial(getattr(cupynorm.jax, norm), **given)
    program = jax.jit(function).lower(x, weight).compile()
    assert targets(program) == ["quantized"]
    plain = getattr(cupynorm, norm)(x, weight, **given)
    for results in (program(x, weight), function(x, weight)):
        for actual, expected in zip(results, plain, strict=True):
            same(actual, expected)


def test_a_quantizing_call_is_one_launch(launches: list[int]) -> None:
    x, weight = jnp.asarray(values((64, 4096), "bfloat16")), jnp.asarray(values((4096,), seed=1))
    how = Quantize("float8_e4m3fn", "block", block=128)
    norm = lambda x: cupynorm.jax.rms_norm(x, weight, residual=x, quantize=how)  # noqa: E731
    plain = cupynorm.rms_norm(x, weight, residual=x, quantize=how)
    for wrap, shape in ((lambda f: f, (64, 4096)), (jax.vmap, (4, 16, 4096))):
        function = jax.jit(wrap(norm), compiler_options={"xla_gpu_enable_command_buffer": ""})
        assert targets(function.lower(x.reshape(shape)).compile()) == ["quantized"]
        launches.clear()
        results = jax.block_until_ready(function(x.reshape(shape)))
        assert len(launches) == 1
        for actual, expected in zip(results, plain, strict=True):
            same(actual.reshape(expected.shape), expected)


def test_quantized_rows_in_a_command_buffer(launches: list[int]) -> None:
    runs, x = 20, jnp.asarray(values((65, 2048), "float16"))
    scale = jnp.asarray(SCALE)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    def network(x: Any, scale: Any) -> Any:
        rows = cupynorm.jax.layer_norm(x, quantize=Quantize("float8_e5m2", "row"))
        return *rows, cupynorm.jax.rms_norm(x, quantize=Quantize("int8", scale))[0]

    for _ in range(runs):
        results = [np.asarray(a) for a in network(x, scale)]
    assert 0 < len(launches) < runs
    rows = cupynorm.layer_norm(x, quantize=Quantize("float8_e5m2", "row"))
    q, _ = cupynorm.rms_norm(x, quantize=Quantize("int8", scale))
    for actual, expected in zip(results, (*rows, q), strict=True):
        same(actual, expected)


def test_no_quantizing_kernel_is_loaded_after_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = values((7, 1240), "float16")  # of no other test
    how = Quantize("int8", "row", scale_min=0.001)
    lowered = jax.jit(lambda x: cupynorm.jax.layer_norm(x, quantize=how)).lower(x)

    def fail(*arguments: Any) -> None:
        raise AssertionError("loaded too late")

    monkeypatch.setattr(_compile, "load", fail)
    found = lowered.compile()(x)
    assert targets(lowered.compile()) == ["quantized"]
    testing.check_quantized("layer_norm", tuple(map(np.asarray, found)), x, quantize=how, eps=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "of_weight", "relu"),
    [
        ((129, 40000), "bfloat16", (40000,), None),
        ((129, 33), "bfloat16", (33,), None),
        ((129, 256), "float64", (256,), None),
        ((129, 3, 256), "float32", (3, 256), None),
        ((129, 256), "float32", (256,), (-0.5, 1.0)),
    ],
)
@pytest.mark.parametrize("dtype_of_q", ["int8", "float8_e4m3fn"])
def test_xla_quantizes_what_no_kernel_does(
    shape: Any, dtype: str, of_weight: Any, relu: Any, dtype_of_q: str
) -> None:
    x, weight = values(shape, dtype), values(of_weight, seed=1)
    for scale in ("row", SCALE):
        how = Quantize(dtype_of_q, scale, via=None)
        norm = functools.partial(cupynorm.jax.rms_norm, relu=relu)
        quantizing = functools.partial(norm, quantize=told_in(how, jnp.asarray))
        program = jax.jit(quantizing).lower(x, weight).compile()
        assert targets(program) == ["forward"]
        y = norm(x, weight, out_dtype=np.float64 if dtype == "float64" else np.float32)
        for actual, expected in zip(
            program(x, weight), by_oracle(how, np.asarray(y), -1), strict=True
        ):
            same(actual, expected)


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_of_finite_differences(norm: str) -> None:
    function = getattr(cupynorm.jax, norm)
    arrays = values((3, 2, 8), "float64"), values((8,), "float64", 1), values((8,), "float64", 2)
    check_grads(function, arrays, order=2)


def test_vmap_is_one_launch_each_way_and_right() -> None:
    x, weight = values((4, 3, 64)), values((64,), seed=1)

    def gradients(norm: Any, x: Any, weight: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(norm(*a))), (0, 1))(x, weight)

    batched = jax.vmap(cupynorm.jax.layer_norm, in_axes=(0, None))
    program = jax.jit(lambda *a: gradients(batched, *a)).lower(x, weight).compile()
    assert sorted(targets(program)) == ["backward", "forward"]
    whole = gradients(cupynorm.jax.layer_norm, x, weight)
    for one, other in zip(program(x, weight), whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_layers_in_a_rematerialized_scan_are_those_of_a_loop() -> None:
    found, expected = gradients_through_layers(values((3, 256)), values((4, 256), seed=1))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# ---- norms of cupynorm.fuse ----------------------------------------------------------------------

# From parts of a warp to rows that are read again.
FUSED_LENGTHS = 40, 333, 4096, 20000, 300000


@pytest.mark.parametrize("n", FUSED_LENGTHS)
def test_a_fused_norm_with_inputs_at_every_place(n: int) -> None:
    check_fused(call_of_many(70 if n < 1000 else 5, n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_of_each_dtype(dtype: str) -> None:
    for n in (1000, 4096):
        vector = values((n,), dtype, 3)
        inputs = {"z": values((33, n), dtype, 2)}
        check_fused(Call(GATED, values((33, n), dtype, 1), vector, None, {}, inputs))
        inputs = {"z": values((1, 1), dtype, 2)}
        check_fused(Call(GATED, values((33, n), "bfloat16", 1), vector, vector, {}, inputs))


@pytest.mark.parametrize("n", FUSED_LENGTHS)
def test_the_bits_of_a_fused_norm_are_those_of_cupy(n: int) -> None:
    call = call_of_many(70 if n < 1000 else 5, n)
    x, weight, bias = (jnp.asarray(a) for a in (call.x, call.weight, call.bias))
    inputs = {name: jnp.asarray(a) for name, a in call.inputs.items() if name != "c"}

    def function(x: Any, weight: Any, bias: Any, inputs: Any) -> Any:
        return call.fused(x, weight, bias, c=1.0, **inputs, **call.options)

    outputs, pull_back = jax.vjp(jax.jit(function), x, weight, bias, inputs)
    of = [jnp.asarray(values(x.shape, seed=k)) for k in range(len(outputs))]
    dx, dweight, dbias, of_inputs = pull_back(tuple(of))
    plain = call.fused.forward(x, weight, bias, c=1.0, **inputs, **call.options)
    expected = call.fused.backward(of, plain)
    pairs = [*zip(outputs, plain.outputs, strict=True), (dx, expected.dx)]
    pairs += [(dweight, expected.dweight), (dbias, expected.dbias)]
    pairs += [(of_inputs[name], getattr(expected, f"d{name}")) for name in inputs]
    for one, other in pairs:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_fused_norm_is_one_call_each_way() -> None:
    x, z, weight = values((64, 1024)), values((64, 1024), seed=1), values((1024,), seed=2)

    def loss(x: Any, z: Any, weight: Any) -> Any:
        return jnp.sum(GATED(x, weight, z=z) ** 2)

    step = jax.grad(loss, (0, 1, 2))
    arrays = tuple(map(jnp.asarray, (x, z, weight)))
    for function, expected in (
        (loss, ["fused_forward"]),
        (step, ["fused_forward", "fused_backward"]),
    ):
        assert targets(jax.jit(function).lower(*arrays).compile()) == expected
    batched = jax.grad(
        lambda *a: jnp.sum(jax.vmap(lambda x, z: GATED(x, a[2], z=z))(*a[:2]) ** 2), (0, 1, 2)
    )
    whole = tuple(a.reshape(4, 16, -1) if a.ndim > 1 else a for a in arrays)
    compiled = jax.jit(batched).lower(*whole).compile()
    assert targets(compiled) == ["fused_forward", "fused_backward"]
    for one, other in zip(compiled(*whole), step(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(one).reshape(other.shape), other)


def test_numbers_of_a_fused_norm_are_no_part_of_a_program() -> None:
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, a: a * y)
    x = jnp.asarray(values((65, 1024)))
    y = np.asarray(scaled(x, a=1))
    function = jax.jit(lambda x, a: scaled(x, a=a))
    assert targets(function.lower(x, 2.0).compile()) == ["fused_forward"]
    for a in (0.5, 2.0, -4.0):
        for found in (scaled(x, a=a), function(x, a)):
            np.testing.assert_array_equal(found, a * y)
    slope = jax.jit(jax.grad(lambda a: jnp.sum(scaled(x, a=a))))(jnp.float32(2))
    np.testing.assert_allclose(slope, y.astype(np.float64).sum(), rtol=1e-5, atol=1e-2)


def test_derivatives_of_a_fused_norm_are_those_of_finite_differences() -> None:
    x, z, weight = values((5, 33), "float64"), values((5, 33), "float64", 1), values((33,), seed=2)
    function = jax.jit(lambda x, z: GATED(x, jnp.asarray(weight), z=z))
    check_grads(function, (jnp.asarray(x), jnp.asarray(z)), order=2)


@pytest.mark.parametrize("layers", [8, 2])
def test_a_command_buffer_replays_fused_norms(layers: int, launches: list[int]) -> None:
    runs = 20
    weights = jnp.asarray(values((layers, 512), seed=1))
    options = {} if layers >= 5 else {"xla_gpu_graph_min_graph_size": 1}

    def loss(x: Any, z: Any, weights: Any) -> Any:
        for weight in weights:
            x = GATED(x, weight, z=z)
        return jnp.sum(x * z)

    step = jax.grad(loss, (0, 1, 2))
    replayed = jax.jit(step, compiler_options=options)
    launched = jax.jit(step, compiler_options={"xla_gpu_enable_command_buffer": ""})
    x, z = (jnp.asarray(values((64, 512), seed=seed)) for seed in (2, 3))
    expected = launched(x, z, weights)
    launches.clear()
    for _ in range(runs):
        found = [np.asarray(array) for array in replayed(x, z, weights)]
    assert 0 < len(launches) < runs * 3 * layers / 2
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- launches ------------------------------------------------------------------------------------


def see_launches(patch: pytest.MonkeyPatch, seen: Callable[[int], None]) -> None:
    """Call a function with the stream before each launch, prepared earlier or not."""
    prepared = _driver.Kernel.prepared

    def prepared_and_seen(*arguments: Any) -> _driver.Launch:
        launch = prepared(*arguments)

        def see_and_launch(stream: int, operands: Any) -> None:
            seen(stream)
            launch(stream, operands)

        return see_and_launch

    patch.setattr(_driver.Kernel, "prepared", prepared_and_seen)
    for handler in _kernels._HANDLERS:
        patch.setattr(handler, "_launches", {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the stream of each launch."""
    streams: list[int] = []
    see_launches(monkeypatch, streams.append)
    return streams


def test_nothing_is_loaded_after_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = values((7, 1234), "float16"), values((1234,), "float64")
    step = jax.jit(lambda *a: jax.vjp(cupynorm.jax.layer_norm, *a)[1](a[0]))
    lowered = step.lower(x, weight)

    def fail(*arguments: Any) -> None:
        raise AssertionError("loaded too late")

    monkeypatch.setattr(_compile, "load", fail)
    dx, dweight = lowered.compile()(x, weight)
    assert np.isfinite(np.asarray(dx, np.float32)).all()
    assert np.isfinite(dweight).all()


def test_an_error_in_a_launch_is_an_exception_and_the_next_call_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no launch today")

    x = values((3, 64))
    function = jax.jit(cupynorm.jax.rms_norm)
    expected = np.asarray(function(x))
    with monkeypatch.context() as patch:
        see_launches(patch, fail)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no launch today"):
            function(x).block_until_ready()
    np.testing.assert_array_equal(function(x), expected)


@pytest.mark.parametrize("layers", [8, 2])
def test_a_command_buffer_replays_launches_without_python(layers: int, launches: list[int]) -> None:
    runs = 20
    weights = jnp.asarray(values((layers, 512), seed=1))
    # XLA makes a command buffer of so few operations only if it is told to.
    options = {} if layers >= 5 else {"xla_gpu_graph_min_graph_size": 1}

    @functools.partial(jax.jit, compiler_options=options)
    def network(x: Any) -> Any:
        for weight in weights:
            x = cupynorm.jax.rms_norm(x, weight)
        return x

    # XLA records again if addresses have changed. Here they are the same in every run.
    x = jnp.asarray(values((64, 512)))
    for _ in range(runs):
        found = np.asarray(network(x))
    assert 0 < len(launches) < runs * layers / 2
    for weight in weights:
        x = cupynorm.rms_norm(x, weight)
    np.testing.assert_array_equal(found, x)


def test_strips_in_a_command_buffer() -> None:
    # A count set to zero and a cooperative launch, recorded and replayed.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    def gradients(dy: Any, *operands: Any) -> Any:
        return jax.vjp(cupynorm.jax.layer_norm, *operands)[1](dy)

    x, dy = (values((9, 98304), seed=seed) for seed in (1, 2))
    weight, bias = (values((98304,), seed=seed) for seed in (3, 4))
    dy, x, weight, bias = (jnp.asarray(array) for array in (dy, x, weight, bias))
    _, mean, rstd, *_ = cupynorm.layer_norm_forward(x, weight, bias)
    expected = cupynorm.layer_norm_backward(dy, x, weight, mean, rstd, bias=bias)[:3]
    for _ in range(5):
        for found, one in zip(gradients(dy, x, weight, bias), expected, strict=True):
            np.testing.assert_array_equal(found, one)


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_rows_that_are_counted_in_a_command_buffer(norm: str) -> None:
    x, weight = values((4300, 12288), seed=1), values((12288,), seed=2)
    function = getattr(cupynorm.jax, norm)
    expected = np.asarray(getattr(cupynorm, norm)(jnp.asarray(x), jnp.asarray(weight)))
    for options in ({}, {"xla_gpu_graph_min_graph_size": 1}):
        compiled = jax.jit(function, compiler_options=options)
        on_gpu = jnp.asarray(x), jnp.asarray(weight)
        lowered = compiled.lower(*on_gpu).as_text().replace("\\22", '"')
        assert '"scratch": 16' in lowered
        for _ in range(4):
            np.testing.assert_array_equal(compiled(*on_gpu), expected)


def test_calls_from_several_threads_are_right() -> None:
    function = jax.jit(cupynorm.jax.layer_norm)
    arrays = [jnp.asarray(values((65, 768), seed=seed)) for seed in range(8)]
    expected = [np.asarray(cupynorm.layer_norm(x)) for x in arrays]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not np.array_equal(function(arrays[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_kernel_stands_in_until_a_thread_has_compiled_a_programs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_load = threads_that_wait(monkeypatch)
    x = jnp.asarray(values((3000, 3968), "bfloat16"))  # of no other test: CuPy remembers modules
    weight = jnp.asarray(values((3968,), seed=1))
    norm = functools.partial(cupynorm.jax.rms_norm, weight=weight)
    launched = jax.jit(norm, compiler_options={"xla_gpu_enable_command_buffer": ""})
    recorded = jax.jit(norm, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    few = np.asarray(launched(x[:8]))
    standing_in = [np.asarray(launched(x)) for _ in range(3)]
    assert len({kernel for kernel, _ in _compile._functions}) == 1
    threading.Timer(1, may_load.set).start()
    taken: set[tuple[bool, bool]] = set()  # while a stream was captured; a kernel that stands in
    forward_plan = _plans.forward_plan

    def seen(*arguments: Any, **options: Any) -> Any:
        plan = forward_plan(*arguments, **options)
        taken.add((_compile.is_capturing(), plan.stands_in))
        return plan

    monkeypatch.setattr(_plans, "forward_plan", seen)
    replayed = [np.asarray(recorded(x)) for _ in range(3)]
    assert (True, False) in taken
    assert (True, True) not in taken
    wait_for_threads()
    assert len({kernel for kernel, _ in _compile._functions}) == 2
    own = np.asarray(launched(x))
    for found in (*standing_in, *replayed):
        np.testing.assert_array_equal(found, own)
    np.testing.assert_array_equal(few, own[:8])


# ---- processes -----------------------------------------------------------------------------------

PENDING = """
import jax, jax.numpy as jnp, cupynorm.jax
function = jax.jit(lambda x, w: jax.vjp(cupynorm.jax.rms_norm, x, w)[1](x))
x, weight = jnp.ones((4096, 4096)), jnp.ones(4096)
results = [function(x, weight) for _ in range(50)]
"""


def run(program: str, **environment: str) -> str:
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_may_end_while_calls_are_pending() -> None:
    run(PENDING)


def check_of_cached(program: str, folder: Path) -> None:
    """Check that a program prints the same in a second process, which finds it in JAX's cache."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    first = run(program, **cache)
    assert any(folder.iterdir())
    assert run(program, **cache) == first


def test_a_cached_program_runs_in_another_process(tmp_path: Path) -> None:
    program = PENDING + "print(float(results[-1][1].sum()))"
    check_of_cached(program, tmp_path)


def test_a_cached_program_with_a_command_buffer_runs_in_another_process(tmp_path: Path) -> None:
    program = """
import jax, jax.numpy as jnp, cupynorm.jax
def chain(x):
    for _ in range(8):
        x = cupynorm.jax.rms_norm(x)
    return x
function = jax.jit(chain)
x = jnp.arange(4096 * 1000.0).reshape(4096, 1000)
print([float(function(x).sum()) for _ in range(4)])
"""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    first = run(program, **cache)
    assert run(program, **cache) == first


def test_a_cached_program_of_a_fused_norm_runs_in_another_process(tmp_path: Path) -> None:
    program = """
import jax, jax.numpy as jnp, cupynorm.jax
norm = cupynorm.fused.rms_norm_gated
function = jax.jit(jax.grad(lambda *a: norm(*a).sum(), (0, 1, 2)))
x = jnp.sin(jnp.arange(4096 * 1000.0)).reshape(4096, 1000)
print([float(abs(a).sum()) for a in function(x, x[0], x + 1)])
"""
    check_of_cached(program, tmp_path)


# ---- several GPUs --------------------------------------------------------------------------------

MESH = min(8, 1 << (GPUS.bit_length() - 1)) if GPUS else 0


@pytest.mark.parametrize(
    ("tracked", "gradient_within"), [(True, False), (False, False), (True, True)]
)
def test_a_shard_map_over_all_gpus(tracked: bool, gradient_within: bool) -> None:
    exchanged = jax_sharding.under_shard_map(MESH, tracked, gradient_within)
    assert {operation for operation, _ in exchanged} <= {"all-reduce"}
    assert MESH == 1 or exchanged


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_mesh_of_one_gpu(kind: AxisType) -> None:
    assert jax_sharding.with_named_shardings((1,), kind, P("a"), P()) == []
    assert jax_sharding.with_a_residual((1,), kind, P("a"), P("a")) == []
    assert jax_sharding.quantized_rows(kind, (1,)) == []
    assert jax_sharding.fused((1,), kind, P("a")) == []
    mesh = jax_sharding.mesh_of((1, 1), kind)
    with jax.set_mesh(mesh):  # outside of jit, by one of two axes
        jax_sharding.check(jax_sharding.step(*jax_sharding.put(mesh, P("a"), P())))


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_rows_stay_on_their_gpu(kind: AxisType) -> None:
    exchanged = jax_sharding.with_named_shardings((MESH,), kind, P("a"), P())
    assert {operation for operation, _ in exchanged} == {"all-reduce"}
    # The gradients of weight and bias. XLA may send both as one.
    assert {of for _, results in exchanged for of in results} <= {"f32[64]", "f32[128]"}
    # If the weight is split too, each GPU gathers the weight, and nothing else.
    exchanged = jax_sharding.with_named_shardings((MESH,), kind, P("a"), P("a"))
    gathered = {of for name, results in exchanged for of in results if name == "all-gather"}
    assert gathered <= {"bf16[64]", "f32[64]"}


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_residual_stays_on_its_gpu(kind: AxisType) -> None:
    exchanged = jax_sharding.with_a_residual((MESH,), kind, P("a"), P("a"))
    assert {operation for operation, _ in exchanged} == {"all-reduce"}


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_quantized_rows_stay_on_their_gpu(kind: AxisType) -> None:
    assert jax_sharding.quantized_rows(kind, (MESH,)) == []
    assert jax_sharding.quantized_rows_that_are_uneven(MESH) == []


@pytest.mark.parametrize("tracked", [True, False])
def test_quantized_rows_in_a_shard_map_over_all_gpus(tracked: bool) -> None:
    assert jax_sharding.quantized_rows_under_shard_map(MESH, tracked) == []


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_vectors_stay_with_their_rows(kind: AxisType) -> None:
    rows = P("a")
    assert jax_sharding.with_vectors((MESH,), kind, rows, jax_sharding.EXAMPLES, rows) == []
    exchanged = jax_sharding.with_vectors((MESH,), kind, rows, jax_sharding.HEADS, P())
    assert {operation for operation, _ in exchanged} == {"all-reduce"}


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_rows_of_a_fused_norm_stay_on_their_gpu(kind: AxisType) -> None:
    found = jax_sharding.fused((MESH,), kind, P("a"))
    assert {kind for kind, _ in found} == {"all-reduce"}


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
def test_uneven_rows_of_a_fused_norm_and_their_padding() -> None:
    jax_sharding.fused_and_uneven_rows(MESH, 7)


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
def test_uneven_rows_stay_on_their_gpu_and_their_padding_does_not_count() -> None:
    exchanged = jax_sharding.with_uneven_rows(MESH)
    assert {operation for operation, _ in exchanged} == {"all-reduce"}
    assert {of for _, results in exchanged for of in results} <= {"f32[64]", "f32[128]"}


# Without Shardy, JAX itself refuses uneven rows on GPUs (0.11.2: IndivisibleError).
OVER_TWO = [drawn for drawn in jax_sharding.drawn() if drawn.sizes == (2,) and drawn.shardy]


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs that JAX can use, has {GPUS}")
@pytest.mark.parametrize("drawn", OVER_TWO, ids=lambda drawn: f"{drawn.way}-{drawn.order}")
def test_drawn_shardings_over_two_gpus(drawn: Any) -> None:
    jax_sharding.with_a_drawn_sharding(drawn)
