"""Norms of `cupynorm.fuse` in JAX without a GPU: the formula, and NumPy behind XLA's FFI."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np
import pytest
from fused_norms import Call, calls
from hypothesis import HealthCheck, assume, given, settings
from strategies import DTYPES
from thorough import THOROUGH, examples, one_in

jax = pytest.importorskip("jax", minversion="0.10.2")

import jax.numpy as jnp  # noqa: E402
import jax_passes  # noqa: E402
import jax_plans  # noqa: E402
from fused_gpu import GATED, MANY, drawn  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_calls import check_fused, through_layers  # noqa: E402
from test_jax import (  # noqa: E402
    cpu,  # noqa: F401 - a fixture
    forget_what_was_traced,
    kernels,  # noqa: F401 - a fixture
    path,  # noqa: F401 - a fixture
    values,
)

import cupynorm  # noqa: E402
import cupynorm.jax  # noqa: E402
import cupynorm.math as cm  # noqa: E402
from cupynorm.jax import _fusion, _kernels  # noqa: E402

few = settings(
    max_examples=examples(8, of=12), deadline=None, suppress_health_check=list(HealthCheck)
)


def targets(function: Any, *arguments: Any) -> list[str]:
    """Return our calls in a compiled program, in their order."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    return re.findall(r'custom_call_target="cupynorm\.(\w+)"', program)


FORWARD, BACKWARD = "fused_forward", "fused_backward"


# ---- values --------------------------------------------------------------------------------------


@few
@given(calls())
def test_drawn_norms(call: Call) -> None:
    wide = call.of(convert=lambda array: array.astype(np.float64) if array.dtype != bool else array)
    outputs = wide if isinstance(wide, tuple) else (wide,)
    assume(all(np.isfinite(output.astype(np.float64)).all() for output in outputs))
    forget_what_was_traced()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_kernels._providers, "cpu", lambda: jax_plans)
        patch.setitem(_kernels._fused_providers, "cpu", lambda: jax_passes)
        check_fused(call)
    forget_what_was_traced()


def call_of_many(shape: tuple[int, ...], k: int, **others: Any) -> Call:
    row, column = shape[-k:], (*shape[:-k], *k * (1,))
    inputs = {
        "r": drawn(1, shape, np.float16),
        "a": drawn(2, column),
        "s": drawn(3, row, DTYPES["bfloat16"]),
        "z": drawn(4, shape, DTYPES["bfloat16"]),
        "c": drawn(5, shape) > 0,
    }
    axis = tuple(range(-k, 0))
    options = {"zero_centered": True, "out_dtype": (None, "float16", "float32", None)}
    options["axis"] = axis
    arrays = drawn(6, shape), drawn(7, row, DTYPES["bfloat16"]), drawn(8, row)
    return Call(MANY, *arrays, options, inputs | others)


@pytest.mark.parametrize("k", [1, 2])
def test_inputs_at_every_place(k: int, path: str) -> None:
    shape = (3, 2, 4, 10)
    check_fused(call_of_many(shape, k))
    others = {"a": drawn(2, ()), "z": drawn(4, (2, 1, 10)), "s": drawn(3, (1, 1, 1, 1)), "c": 1.5}
    check_fused(call_of_many(shape, k, **others))


@pytest.mark.parametrize("x", DTYPES)
def test_every_dtype(x: str, path: str) -> None:
    for i, z in enumerate(DTYPES):
        turn = (list(DTYPES).index(x) + i + (path == "kernels")) % one_in(2)
        arrays = values((3, 2, 33), x, 1), values((33,), z, 2)
        inputs = {"z": values((3, 2, 33), z, 3)}
        others = {"z": values((3, 1, 1), z, 3)}
        ways = ({"out_dtype": z}, inputs), ({"eps": 1e-3}, others)
        for options, told in ways[turn :: one_in(2)]:
            check_fused(Call(GATED, *arrays, None, options, told))


# ---- calls ---------------------------------------------------------------------------------------


def gated(x: Any, z: Any, weight: Any = None) -> Any:
    return GATED(x, weight, z=z)


def arrays_of(*shapes: tuple[int, ...], dtype: str = "float64") -> Any:
    return tuple(jnp.asarray(values(shape, dtype, i)) for i, shape in enumerate(shapes, 1))


def test_a_norm_is_one_call_each_way(kernels: Any) -> None:
    x, z, weight = arrays_of((3, 2, 8), (3, 2, 8), (8,), dtype="float32")
    assert targets(gated, x, z, weight) == [FORWARD]
    step = jax.grad(lambda *a: jnp.sum(gated(*a) ** 2), (0, 1, 2))
    assert targets(step, x, z, weight) == [FORWARD, BACKWARD]
    assert targets(cupynorm.fused.l2_norm, x) == [FORWARD]


def test_what_no_kernel_serves_is_operations_around_a_norm(kernels: Any) -> None:
    x, z, heads = arrays_of((3, 2, 8), (3, 2, 8), (2, 8))
    assert targets(gated, x, z, heads) == ["forward"]
    assert targets(lambda x, z: GATED(x, z=z, axis=1), x, z) == ["forward"]
    assert targets(gated, x[:0], z[:0]) == []


def description_of(function: Any, *arguments: Any) -> Any:
    text = jax.jit(function).lower(*arguments).as_text().replace("\\22", '"').replace("\\\\", "\\")
    found = [json.loads(call) for call in re.findall(r'call = "({.*?}})"', text)]
    return found[-1]


def test_a_program_says_all_that_its_calls_need(kernels: Any) -> None:
    """It may be cached or run in another process, so it must not depend on this one."""
    x, z, s = arrays_of((3, 2, 8), (3, 2, 1), (8,), dtype="float32")
    odd = cupynorm.fuse(
        "layer_norm",
        prologue=lambda x, ß: (x + ß, x + ß),
        epilogue=lambda y, s: cm.where(y < np.inf, y * -0.0 + s / 3, np.nan),
    )

    def function(x: Any, z: Any, s: Any) -> Any:
        return odd(x, s, ß=z, s=s, eps=1e-3, zero_centered=True, out_dtype=(None, "bfloat16"))

    def step(*arrays: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(function(*a)[0]), (0, 1, 2))(*arrays)

    call = description_of(function, x, z, s)
    assert call.pop("spec")["epilogue"]["steps"][0] == ["number", [float("inf")]]
    assert call == {
        **{"m": 6, "n": 8, "eps": 1e-3, "scratch": 0},
        "values": {"stride_in_x": 8, "step_in_ß": 1},
        "arrays": ["in_x", "weight", "in_ß", "in_s", "y_0", "y_1"],
    }
    for f in (function, step):
        given = description_of(f, x, z, s)
        spec = _kernels._fused_spec(given["spec"])
        assert json.loads(json.dumps(dataclasses.asdict(spec))) == given["spec"]
        assert hash(spec)
        assert (spec.prologue, spec.epilogue) == (odd.prologue, odd.epilogue)
    assert spec.of_outputs == ("float32", None)
    assert given["scratch"] == 16 * 6
    assert given["arrays"][-4:] == ["d_ß", "d_weight", "d_s", "scratch"]


def test_a_program_with_less_scratch_than_its_device_needs(kernels: Any) -> None:
    x, z, weight = arrays_of((3, 2, 8), (3, 2, 8), (8,), dtype="float32")
    step = jax.grad(lambda *a: jnp.sum(gated(*a)), (0, 1, 2))
    call = description_of(step, x, z, weight)
    message = r"has 95 bytes of scratch for 6 rows of 8, and GPU 0 needs 96: "
    with pytest.raises(ValueError, match=message):
        _kernels._prepare_fused("cpu", json.dumps(call | {"scratch": 95}), 0, 7)


def test_a_program_for_a_gpu_is_exported_without_one() -> None:
    x, z, weight = arrays_of((3, 8), (3, 8), (8,), dtype="float32")
    names = "fused_forward", "fused_backward", "forward", "backward"
    allowed = [jax.export.DisabledSafetyCheck.custom_call(f"cupynorm.{name}") for name in names]
    export = functools.partial(
        jax.export.export, platforms=["cpu", "cuda"], disabled_checks=allowed
    )
    exported = export(jax.jit(gated))(x, z)
    assert "cupynorm.fused_forward" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(x, z), jax.jit(gated)(x, z))
    # No vector has a gradient, so there is no scratch, which would depend on the GPU.
    slope = jax.jit(jax.grad(lambda x, z: jnp.sum(gated(x, z))))
    assert "cupynorm.fused_backward" in export(slope)(x, z).mlir_module()
    slope = jax.jit(jax.grad(lambda x, z, weight: jnp.sum(gated(x, z, weight))))
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"gradients for cuda can be compiled"):
            export(slope)(x, z, weight)


def test_numbers_are_no_part_of_a_program(kernels: Any) -> None:
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, a: a * y)
    (x,) = arrays_of((3, 8))
    function = jax.jit(lambda x, a: scaled(x, a=a))
    for a in (1.5, 2, np.float32(0.5), 3.0):
        for found in (scaled(x, a=a), function(x, a), scaled(x, a=np.asarray(a))):
            np.testing.assert_allclose(found, float(a) * cupynorm.rms_norm(x), rtol=1e-6)
    made = _fusion.differentiable.cache_info().misses
    scaled(jnp.asarray(x), a=7.25)
    assert _fusion.differentiable.cache_info().misses == made
    assert targets(lambda x, a: scaled(x, a=a), x, 1.5) == [FORWARD]
    (given,) = description_of(jax.grad(lambda x: jnp.sum(scaled(x, a=2.5))), x)["spec"]["inputs"]
    assert (given["place"], given["gradient"]) == ("number", None)
    # Of a traced number there is a gradient, but of an integer none.
    slope = jax.grad(lambda a: jnp.sum(scaled(x, a=a)))(1.5)
    np.testing.assert_allclose(slope, np.sum(cupynorm.rms_norm(x)), rtol=1e-12)
    integer = jax.grad(lambda x, a: jnp.sum(scaled(x, a=a)))(x, 2)
    real = jax.grad(lambda x, a: jnp.sum(scaled(x, a=a)))(x, 2.0)
    np.testing.assert_allclose(integer, real, rtol=1e-12)


def test_a_traced_number_does_not_widen_the_computation(kernels: Any) -> None:
    """JAX gives it float64 if that is enabled."""
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, a, r: a * y + r)

    def function(x: Any, a: Any, r: Any) -> Any:
        return scaled(x, a=a, r=r)

    for x, r, compute in (
        ("float32", "float32", "float32"),
        ("bfloat16", "float64", "float64"),
        ("float64", "float32", "float64"),
    ):
        arrays = jnp.asarray(values((3, 8), x)), 0.1, jnp.asarray(values((3, 8), r, 1))
        assert description_of(function, *arrays)["spec"]["x"] == x
        of_a, of_r = description_of(function, *arrays)["spec"]["inputs"]
        assert (of_a["dtype"], of_r["dtype"]) == (compute, r)
        np.testing.assert_array_equal(jax.jit(function)(*arrays), function(*arrays))


def test_dtypes_of_numbers_and_of_weak_arrays(kernels: Any) -> None:
    """What is a number to Python or JAX neither widens the computation nor is rounded for it."""
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, a: a * y)
    x, wide = values((3, 8), "float32"), values((3, 8))
    with jax.enable_x64(False):
        found = scaled(jnp.asarray(x), a=np.float64(1.5))
        np.testing.assert_array_equal(found, scaled(jnp.asarray(x), a=1.5))
        assert found.dtype == np.float32
    exact = 0.1 * cupynorm.rms_norm(np.full((2, 4), 0.3))
    weak = jnp.full((2, 4), 0.3)
    assert jax.typeof(weak).weak_type
    for a in (0.1, jnp.full((2, 4), 0.1)):
        for found in (scaled(weak, a=a), jax.jit(lambda x, a: scaled(x, a=a))(weak, a)):
            np.testing.assert_allclose(found, exact, rtol=1e-14)
    with pytest.raises(TypeError, match=r"^a\.dtype must be"):
        scaled(weak, a=jnp.full((2, 4), 3))  # an integer to JAX too, and no number
    many = 2**24 + 1
    found = jax.jit(lambda x, a: scaled(x, a=a))(wide, many)
    np.testing.assert_allclose(found, many * cupynorm.rms_norm(wide), rtol=1e-14)


def test_what_holds_an_array_counts_as_it(path: str) -> None:
    """As flax's parameters do."""

    class Holder:
        def __init__(self, array: Any) -> None:
            self.array = jnp.asarray(array)

        def __jax_array__(self) -> Any:
            return self.array

    x, z, weight = values((3, 8)), values((3, 8), seed=1), values((8,), seed=2)
    expected = GATED(jnp.asarray(x), jnp.asarray(weight), z=jnp.asarray(z))
    held = GATED(jnp.asarray(x), Holder(weight), z=Holder(z))
    np.testing.assert_array_equal(held, expected)
    traced = jax.jit(lambda x, weight, z: GATED(x, Holder(weight), z=Holder(z)))
    np.testing.assert_allclose(traced(x, weight, z), expected, rtol=1e-12)


def test_a_vector_that_lone_rows_share_is_one(kernels: Any) -> None:
    """So it is no array of rows, each way, if a norm of one row is mapped."""
    scaled = cupynorm.fuse("rms_norm", epilogue=lambda y, s, z: y * s + z)
    x, z, s = values((5, 8)), values((5, 8), seed=1), values((8,), seed=2)
    mapped = jax.vmap(lambda x, z, s: scaled(x, s=s, z=z), in_axes=(0, 0, None))
    places = {of["name"]: of["place"] for of in description_of(mapped, x, z, s)["spec"]["inputs"]}
    assert places == {"s": "vector", "z": "rows"}
    np.testing.assert_allclose(mapped(x, z, s), scaled(x, s=s, z=z), rtol=1e-12)


def test_forward_under_jit_says_what_to_call() -> None:
    x = values((3, 8))
    said = "must not be traced by JAX: call the norm itself, which JAX differentiates; got"
    with pytest.raises(TypeError, match=f"^x {said}"):
        jax.jit(lambda x: GATED.forward(x, z=x).outputs[0])(x)
    with pytest.raises(TypeError, match=f"^z {said}"):
        jax.jit(lambda z: GATED.forward(x, z=z).outputs[0])(x)


def test_an_input_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match=r"are z, but z is None$"):
        GATED(values((3, 8)), z=None)


def test_float64_must_be_enabled() -> None:
    x, z = arrays_of((3, 8), (3, 8))
    narrow = x.astype("float32")
    with jax.enable_x64(False):
        with pytest.raises(TypeError, match=r"out_dtype .* float64 without x64"):
            GATED(narrow, z=narrow, out_dtype="float64")
        with pytest.raises(TypeError, match=r"z.dtype .* float64 without x64"):
            GATED(narrow, z=z)


def test_numpy_arrays_beside_x() -> None:
    x, z = arrays_of((3, 8), (3, 8), dtype="float32")
    row = np.linspace(0.5, 2, 8)  # of float64, which JAX takes for float32
    with jax.enable_x64(False):
        y = GATED(x, row, z=np.asarray(z))
        np.testing.assert_allclose(y, GATED(x, jnp.asarray(row), z=z), rtol=1e-6)
        with pytest.raises(TypeError, match=r"weight must be a JAX or NumPy .*; got float"):
            GATED(x, 2.0, z=z)
        masked = np.ma.masked_array(row, row > 1)
        for arguments in ({"weight": masked, "z": z}, {"z": masked}):
            name = next(n for n, a in arguments.items() if a is masked)
            with pytest.raises(TypeError, match=f"{name} .*mask"):
                GATED(x, **arguments)


# ---- derivatives ---------------------------------------------------------------------------------


def of_many(x: Any, r: Any, a: Any, s: Any, z: Any, weight: Any, bias: Any) -> Any:
    """A sum of all outputs, of an input at every place."""
    c = jnp.arange(x.size).reshape(x.shape) % 2 > 0
    y, other, stored, apart = MANY(x, weight, bias, r=r, a=a, s=s, z=z, c=c)
    return jnp.sum(jnp.sin(y) + other * stored + jnp.cos(apart))


ARRAYS_OF_MANY = (3, 2, 8), (3, 2, 8), (3, 2, 1), (8,), (2, 1), (8,), (8,)


def test_gradients_of_each_order_are_those_of_finite_differences(path: str) -> None:
    arrays = arrays_of(*ARRAYS_OF_MANY)
    # Of an input at every place, second derivatives of the formula take longest.
    check_grads(jax.jit(of_many), arrays, order=2 if THOROUGH or path == "kernels" else 1)
    if THOROUGH or path == "formula":
        check_grads(jax.jit(gated), arrays[:2], order=3, modes=["rev"])


def test_derivatives_of_one_array_alone(path: str) -> None:
    arrays = arrays_of(*ARRAYS_OF_MANY)
    whole = jax.jit(jax.grad(of_many, tuple(range(7))))(*arrays)
    _, along = jax.jvp(of_many, arrays, arrays)
    for i, gradient in enumerate(whole):
        np.testing.assert_allclose(jax.grad(of_many, i)(*arrays), gradient, rtol=1e-9, atol=1e-12)
    slopes = [
        jax.jvp(lambda array: of_many(*arrays[:i], array, *arrays[i + 1 :]), (a,), (a,))[1]  # noqa: B023
        for i, a in enumerate(arrays)
    ]
    np.testing.assert_allclose(sum(slopes), along, rtol=1e-9)
    products = (np.sum(g * a) for g, a in zip(whole, arrays, strict=True))
    np.testing.assert_allclose(sum(products), along, rtol=1e-9)


def test_an_output_that_is_not_used_has_no_gradient(kernels: Any) -> None:
    split = cupynorm.fuse("rms_norm", prologue=lambda x, r: (x + r, x + r))
    x, r = arrays_of((3, 8), (3, 8))
    for k, dtypes in enumerate((["float64", None], [None, "float64"])):
        step = jax.grad(lambda *a: jnp.sum(split(*a[:1], r=a[1])[k] ** 2), (0, 1))  # noqa: B023
        assert description_of(step, x, r)["spec"]["of_outputs"] == dtypes
        dx, dr = step(x, r)
        np.testing.assert_allclose(dx, dr)
    np.testing.assert_allclose(dx, 2 * (x + r))
    for k in range(2):
        check_grads(jax.jit(lambda x, r: split(x, r=r)[k]), (x, r), order=2)  # noqa: B023


def test_layers_in_a_rematerialized_scan_are_those_of_a_loop(path: str) -> None:
    x, z, weights = arrays_of((3, 8), (3, 8), (4, 8))
    both = through_layers(lambda x, weight: gated(x, z, weight))
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(x, weights) for f in both)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)

    def twice(f: Any) -> Any:
        return jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(f, 1)(x, w) ** 2)))(weights)

    found, expected = map(twice, both)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_no_axis_is_added_silently(path: str) -> None:
    arrays = arrays_of(*ARRAYS_OF_MANY)
    step = jax.grad(of_many, tuple(range(7)))
    with jax.numpy_rank_promotion("raise"):
        found = step(*arrays)
    for one, other in zip(found, step(*arrays), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- batches -------------------------------------------------------------------------------------


def slopes_of_many(*arrays: Any) -> Any:
    return jax.grad(of_many, tuple(range(7)))(*arrays)


def along_many(*arrays: Any) -> Any:
    return jax.jvp(of_many, arrays, arrays)


@functools.cache
def of_examples(function: Any, path: str) -> Any:
    """Compile a function once for a path: examples have the same shapes along any axes."""
    return jax.jit(lambda *arrays: function(*arrays))


def looped(function: Any, axes: tuple[int | None, ...]) -> Any:
    def call(*arrays: Any) -> Any:
        size = next(a.shape[i] for a, i in zip(arrays, axes, strict=True) if i is not None)
        results = []
        for one in range(size):
            taken = (a if i is None else a.take(one, i) for a, i in zip(arrays, axes, strict=True))
            results.append(function(*taken))
        return jax.tree.map(lambda *parts: np.stack(parts), *results)

    return call


BATCHES = (
    (0, 0, None, None, None, None, None),
    (1, None, 0, None, None, None, None),
    (None, None, None, 0, 0, None, None),
    (0, 0, 0, 0, 0, 0, 0),
    (None, 0, None, None, None, 1, None),
)


@pytest.mark.parametrize("axes", BATCHES)
def test_vmap_is_a_loop_over_the_batch(axes: Any, path: str) -> None:
    shapes = zip(ARRAYS_OF_MANY, axes, strict=True)
    arrays = arrays_of(*(s if i is None else (*s[:i], 4, *s[i:]) for s, i in shapes))

    def batched(*arrays: Any) -> Any:
        return jnp.sum(jax.vmap(of_many, in_axes=axes)(*arrays))

    expected = {}
    turn = (BATCHES.index(axes) + (path == "kernels")) % one_in(2)
    for f in (slopes_of_many, *(of_many, along_many)[turn :: one_in(2)]):
        found = jax.jit(jax.vmap(f, in_axes=axes))(*arrays)
        expected[f] = looped(of_examples(f, path), axes)(*arrays)
        for one, other in zip(*map(jax.tree.leaves, (found, expected[f])), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
    # What all examples share has the sum of their gradients.
    found = jax.jit(jax.grad(batched, tuple(range(7))))(*arrays)
    for one, of_each, i in zip(found, expected[slopes_of_many], axes, strict=True):
        other = of_each.sum(0) if i is None else np.moveaxis(of_each, 0, i)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_the_gradient_of_a_vmap_over_rows_is_one_call_each_way(kernels: Any) -> None:
    x, z, weight = arrays_of((4, 3, 8), (4, 3, 8), (8,))
    batched = jax.vmap(gated, in_axes=(0, 0, None))
    step = jax.grad(lambda *a: jnp.sum(batched(*a) ** 2), (0, 1, 2))
    assert targets(step, x, z, weight) == [FORWARD, BACKWARD]
    scaled = jax.grad(lambda *a: jnp.sum(batched(*a) ** 2), (0, 1, 2))
    assert targets(scaled, x, z[:, :1, :1], weight) == [FORWARD, BACKWARD]
    inner = jax.vmap(jax.grad(lambda *a: jnp.sum(gated(*a) ** 2), (0, 1)))
    assert targets(inner, x, z) == [FORWARD, BACKWARD]


def test_a_weight_for_each_example_has_no_kernel_of_its_own(kernels: Any) -> None:
    x, z, weight = arrays_of((4, 3, 8), (4, 3, 8), (4, 8))
    step = jax.vmap(jax.grad(lambda *a: jnp.sum(gated(*a) ** 2), (0, 1, 2)))
    assert {FORWARD, BACKWARD}.isdisjoint(targets(step, x, z, weight))
    assert "backward" in targets(step, x, z, weight)
