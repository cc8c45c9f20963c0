"""cupynorm.jax with weights that vary from row to row: what the kernels get, and per example.

Other axes than the last, and more of such weights, are in test_jax.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES
from thorough import examples, one_in

jax = pytest.importorskip("jax", minversion="0.10.2")

import jax.numpy as jnp  # noqa: E402
import jax_plans  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_calls import check  # noqa: E402
from test_jax import (  # noqa: E402
    calls_of,
    cpu,  # noqa: F401 - a fixture
    forget_what_was_traced,
    looped,
    values,
)

import cupynorm  # noqa: E402
import cupynorm.jax  # noqa: E402
from cupynorm import testing  # noqa: E402
from cupynorm._groups import Groups  # noqa: E402
from cupynorm._operation import BackwardSpec, Options  # noqa: E402
from cupynorm.jax import _kernels  # noqa: E402

NORMS = ("rms_norm", "layer_norm")


@contextlib.contextmanager
def by_kernels() -> Iterator[None]:
    """Let NumPy, which XLA calls, replace the formula."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_kernels._providers, "cpu", lambda: jax_plans)
        forget_what_was_traced()
        yield
    forget_what_was_traced()


# ---- values --------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Draw shapes, where each axis of a vector is x's or 1, and the axes of 1 before may lack."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))

    def vector() -> Any:
        if draw(st.integers(0, 4)) == 0:
            return None
        sizes = [n if draw(st.booleans()) else 1 for n in shape]
        leading = next((i for i, n in enumerate(sizes) if n != 1), len(sizes))
        return tuple(sizes[draw(st.integers(0, leading)) :])

    return {
        "norm": draw(st.sampled_from(NORMS)),
        "shapes": (shape, vector(), vector()),
        "k": draw(st.integers(1, len(shape))),
        "dtypes": [draw(st.sampled_from(list(DTYPES))) for _ in range(4)],
        "zero_centered": draw(st.booleans()),
        "relu": draw(st.sampled_from([None, (-0.5, 0.7)])),
        "residual": draw(st.booleans()),
    }


@pytest.mark.parametrize("context", [contextlib.nullcontext, by_kernels])
@settings(max_examples=examples(6, of=100))
@given(calls())
def test_values(context: Any, call: dict[str, Any]) -> None:
    *of_each, of_y = call["dtypes"]
    x, weight, bias = (
        None if shape is None else values(shape, dtype, seed)
        for seed, (shape, dtype) in enumerate(zip(call["shapes"], of_each, strict=True))
    )
    residual = values(x.shape, of_y, 4) if call["residual"] else None
    with context():
        check(
            *(call["norm"], x, weight, bias),
            dy=values(x.shape, of_y, 3),
            k=call["k"],
            eps=1e-3,
            zero_centered=call["zero_centered"] and weight is not None,
            relu=call["relu"],
            residual=residual,
            dresidual_out=None if residual is None else values(x.shape, of_y, 5),
        )


def test_values_with_vectors_that_kernels_read_elsewhere() -> None:
    """Each is broadcast for the kernel: to further axes of x, or to the other's shape."""
    x, dy = (values((2, 3, 4, 5), "bfloat16", seed) for seed in (1, 2))
    with by_kernels():
        for of_weight, of_bias, k in (
            *(((2, 1, 4, 5), (5,), 1), ((5,), (2, 1, 1, 5), 1), ((3, 1, 1), (4, 1), 1)),
            *(((3, 1, 5), (5,), 2), ((), (1, 5), 1), (None, (3, 1, 1), 2), (None, (5,), 2)),
        ):
            weight = None if of_weight is None else values(of_weight, "bfloat16", 3)
            bias = values(of_bias, "float16", 4)
            check("layer_norm", x, weight, bias, dy=dy, k=k, zero_centered=weight is not None)


@pytest.mark.parametrize(
    ("shape", "of_weight"), [((0, 3, 8), (0, 1, 8)), ((2, 0, 8), (2, 1, 8)), ((0, 4, 8), (4, 1))]
)
def test_no_rows(shape: Any, of_weight: Any) -> None:
    x, weight = np.zeros(shape), values(of_weight)
    gradients = step(x, weight, weight)  # by the formula: there is nothing to launch
    assert [g.shape for g in gradients] == [shape, of_weight, of_weight]
    assert not any(np.any(g) for g in gradients)


# ---- what is launched ----------------------------------------------------------------------------


def groups_of(function: Any, *arrays: Any) -> list[Any]:
    """Return the groups of each of our calls in a program."""
    text = jax.jit(function).lower(*arrays).as_text().replace("\\22", '"')
    found = re.findall(r'"groups": (null|\{.*?\})', text)
    return [None if of is None else Groups(**of) for of in map(json.loads, found)]


def step(*arrays: Any, **options: Any) -> Any:
    given = tuple(i for i, array in enumerate(arrays) if array is not None)

    def loss(*arrays: Any) -> Any:
        return jnp.sum(jnp.sin(cupynorm.jax.layer_norm(*arrays, **options)))

    return jax.grad(loss, given)(*arrays)


def test_kernels_get_the_groups_of_rows() -> None:
    x, n = values((2, 3, 4, 8)), 8
    with by_kernels():
        for weight, outer, vectors, inner in (
            *(((4, n), 6, 4, 1), ((3, 1, n), 2, 3, 4), ((2, 1, 1, n), 1, 2, 12)),
            *(((3, 4, n), 2, 12, 1), ((2, 1, 4, n), 1, 24, 1)),
        ):
            expected = Groups(outer, vectors, inner, 1, weight=True, bias=True)
            arrays = x, values(weight, seed=1), values(weight, seed=2)
            assert groups_of(step, *arrays) == [expected] * 2
        channels = values((3, 1, 1), seed=1)
        over_two = functools.partial(step, axis=(-3, -2, -1))
        expected = Groups(2, 1, 1, 32, weight=False, bias=False)
        assert groups_of(over_two, x, channels, channels) == [expected] * 2
        for weight in ((n,), (1, n)):
            assert groups_of(step, x, values(weight), values(weight)) == [None, None]


def test_a_step_is_one_call_each_way() -> None:
    x, heads = values((2, 3, 4, 8)), values((4, 8), seed=1)
    forward, backward = ["x", "weight", "bias", "y", "mean", "rstd"], ["dx", "dweight", "dbias"]
    with by_kernels():
        for arrays in ((x, heads, heads), (x, values((8,)), heads), (x, None, heads)):
            found = calls_of(step, *arrays)
            assert found == [forward, ["dy", "x", "weight", "mean", "rstd", *backward]]


def test_a_program_with_less_scratch_than_its_groups_need() -> None:
    groups = Groups(1, 2, 3, 1, weight=True, bias=False)
    dtypes = {"x": "float32", "dy": "float32", "weight": "float32", "dbias": None}
    spec = BackwardSpec.of(Options("rms_norm", 1, groups=groups), dtypes)
    needed = jax_plans.BackwardPlan(spec, 8, 6).scratch_bytes(6, groups)
    call = {"m": 6, "n": 8, "groups": dataclasses.asdict(groups)}
    call["spec"] = dataclasses.asdict(spec)
    call["arrays"] = ["dy", "x", "weight", "rstd", "dx", "dweight", "scratch"]
    with by_kernels():
        for scratch in (needed, needed - 1):
            told = json.dumps(call | {"scratch": scratch})
            with (
                contextlib.nullcontext()
                if scratch == needed
                else pytest.raises(ValueError, match=f"has {scratch} bytes .* needs {needed}: ")
            ):
                _kernels._prepare(BackwardSpec, "cpu", told, 0, 7)


@pytest.mark.parametrize("norm", NORMS)
def test_y_has_the_bits_of_the_kernel(norm: str) -> None:
    x = values((3, 4, 33), "bfloat16", 1)
    weight, bias = values((4, 33), "float32", 2), values((3, 1, 33), "float32", 3)
    options = {"relu": (-0.5, 1.0), "zero_centered": True, "out_dtype": np.float32}
    expected = getattr(cupynorm, norm)(x, weight, bias, **options)
    with by_kernels():
        function = functools.partial(getattr(cupynorm.jax, norm), **options)
        np.testing.assert_array_equal(function(x, weight, bias), expected)
        of_example = jax.vmap(function, in_axes=(0, None, 0))
        np.testing.assert_array_equal(of_example(x, weight, bias[:, 0]), expected)


# ---- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("of_weight", "of_bias"), [((6,), (3, 1)), (None, (2, 1, 6))])
def test_derivatives_of_both_modes_are_those_of_finite_differences(
    of_weight: Any, of_bias: Any
) -> None:
    vectors = [values(shape, seed=1 + i) for i, shape in enumerate((of_weight, of_bias)) if shape]
    x, residual = values((2, 3, 6)), values((2, 3, 6), seed=3)

    def function(x: Any, residual: Any, *vectors: Any) -> Any:
        weight, bias = vectors if len(vectors) == 2 else (None, *vectors)
        centered = weight is not None
        options = {"residual": residual, "zero_centered": centered, "relu": (-1.1, 0.9)}
        return cupynorm.jax.layer_norm(x, weight, bias, **options)[0]

    with by_kernels():
        check_grads(jax.jit(function), (x, residual, *vectors), order=2)


# ---- a batch of vectors --------------------------------------------------------------------------

# Shapes of weight and bias, and which axes vmap takes from x, weight and bias.
BATCHES: dict[str, tuple[Any, Any, tuple[int | None, ...]]] = {
    "of weight and bias": ((4, 8), (4, 8), (0, 0, 0)),
    "of weights": ((4, 8), (8,), (0, 0, None)),
    "of biases": ((8,), (8, 4), (0, None, 1)),
    "of biases alone": (None, (4, 8), (1, None, 0)),
    "of vectors per head": ((4, 6, 8), (6, 8), (0, 0, None)),
    "of x": ((6, 1), (8,), (0, None, None)),
    "of vectors alone": ((4, 8), (4, 8), (None, 0, 0)),
}


@pytest.mark.parametrize(
    ("name", "context"),
    [
        *((name, by_kernels) for name in BATCHES),
        *((name, contextlib.nullcontext) for name in [*BATCHES][:: one_in(3)]),
    ],
)
def test_each_example_of_a_batch_has_its_gradients(name: str, context: Any) -> None:
    of_weight, of_bias, axes = BATCHES[name]
    norm = NORMS[list(BATCHES).index(name) % 2]
    x = values({0: (4, 3, 6, 8), 1: (3, 4, 6, 8), None: (3, 6, 8)}[axes[0]])
    weight = None if of_weight is None else values(of_weight, seed=1)
    bias = values(of_bias, seed=2)

    def gradients(x: Any, weight: Any, bias: Any) -> Any:
        def loss(arrays: Any) -> Any:
            y = getattr(cupynorm.jax, norm)(arrays["x"], arrays.get("weight"), arrays["bias"])
            return jnp.sum(jnp.sin(y))

        arrays = {"x": x, "weight": weight, "bias": bias}
        return jax.grad(loss)({name: a for name, a in arrays.items() if a is not None})

    there = [(a, axis) for a, axis in zip((x, weight, bias), axes, strict=True) if a is not None]
    given, taken = zip(*there, strict=True)

    def of_given(*given: Any) -> Any:
        return gradients(given[0], *([None] * (3 - len(given))), *given[1:])

    batched = jax.vmap(of_given, in_axes=taken)
    with context():
        found, expected = jax.jit(batched)(*given), looped(of_given, taken)(*given)
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-10, atol=1e-12)
        if context is by_kernels:
            assert ["dy" in call for call in calls_of(batched, *given)] == [False, True]


@pytest.mark.parametrize("name", BATCHES)
def test_the_gradient_of_a_batch_is_one_call_each_way(name: str) -> None:
    of_weight, of_bias, axes = BATCHES[name]
    x = values({0: (4, 3, 6, 8), 1: (3, 4, 6, 8), None: (3, 6, 8)}[axes[0]])
    vectors = [values(s, seed=1 + i) for i, s in enumerate((of_weight, of_bias)) if s is not None]
    taken = (axes[0], *axes[3 - len(vectors) :])

    def norm(x: Any, *vectors: Any) -> Any:
        weight, bias = vectors if len(vectors) == 2 else (None, *vectors)
        return cupynorm.jax.layer_norm(x, weight, bias)

    def slopes(function: Any, *arrays: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), range(len(arrays)))(*arrays)

    batched = functools.partial(slopes, jax.vmap(norm, in_axes=taken))
    with by_kernels():
        found = jax.jit(batched)(x, *vectors)
        looped_norm = looped(norm, taken)
        # Of a bias alone only the forward pass is a call.
        backward = [] if name == "of biases alone" else [True]
        assert ["dy" in call for call in calls_of(batched, x, *vectors)] == [False, *backward]
        again = functools.partial(slopes, functools.partial(_unrolled, norm, taken))
        for one, other in zip(found, jax.jit(again)(x, *vectors), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
        batched_y = jax.vmap(norm, in_axes=taken)(x, *vectors)
        np.testing.assert_array_equal(batched_y, looped_norm(x, *vectors))


def _unrolled(function: Any, axes: Any, *arrays: Any) -> Any:
    return jnp.stack(
        [
            function(
                *(
                    a if i is None else jnp.take(a, one, i)
                    for a, i in zip(arrays, axes, strict=True)
                )
            )
            for one in range(4)
        ]
    )


def test_gradients_of_each_example_are_within_the_bounds() -> None:
    """A batch of narrow weights. Each example's gradient is rounded once."""
    x, dy = (values((4, 5, 6, 33), "bfloat16", seed) for seed in (1, 2))
    weight, bias = values((4, 6, 33), "bfloat16", 3), values((33,), "float16", 4)

    def pull(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(cupynorm.jax.layer_norm, x, weight, bias)
        return y, pull_back(dy)

    with by_kernels():
        y, gradients = jax.vmap(pull, in_axes=(0, 0, None, 0))(x, weight, bias, dy)
    for i in range(4):
        testing.check_forward("layer_norm", np.asarray(y[i]), x[i], weight[i], bias, eps=1e-5)
        kept = cupynorm.layer_norm_forward(x[i], weight[i], bias)
        result = cupynorm.NormBackward(*(np.asarray(g[i]) for g in gradients))
        stored = kept.mean, kept.rstd
        testing.check_backward("layer_norm", result, dy[i], x[i], weight[i], *stored, bias=bias)


def test_no_axis_is_added_silently() -> None:
    x, heads, weights = values((2, 3, 4, 8)), values((4, 8), seed=1), values((2, 8), seed=2)

    def slope(*arrays: Any) -> Any:
        return sum(jnp.sum(g**2) for g in step(*arrays))

    with by_kernels(), jax.numpy_rank_promotion("raise"):
        jax.grad(slope, (0, 1, 2))(x, heads, weights[0])
        jax.vmap(slope, in_axes=(0, None, 0))(x, heads, weights)


def test_vmap_of_weights_within_vmap() -> None:
    x, weights = values((2, 3, 4, 8)), values((2, 3, 8), seed=1)

    def slope(x: Any, weight: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.sin(cupynorm.jax.rms_norm(x, w))))(weight)

    twice = jax.vmap(jax.vmap(slope))
    with by_kernels():
        found = twice(x, weights)
        assert ["dy" in call for call in calls_of(twice, x, weights)] == [False, True]
        for index in np.ndindex(2, 3):
            expected = slope(x[index], weights[index])
            np.testing.assert_allclose(found[index], expected, rtol=1e-10, atol=1e-12)
