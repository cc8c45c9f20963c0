"""Programs over four virtual CPU devices: are they right, and what do the devices exchange?

test_jax_sharding.py runs this as a script, and sets the number of devices. The script writes JSON.
With the argument "kernels", NumPy behind XLA's FFI replaces the formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import jax_passes
import jax_plans
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_calls import on_host
from strategies import DTYPES, make_values
from thorough import THOROUGH

import cupynorm
import cupynorm.jax
from cupynorm import NormBackward, Quantize, reference, testing
from cupynorm._operation import Options
from cupynorm.jax import _kernels, _operations
from cupynorm.jax._operations import Operation

NORM = "layer_norm"
SHAPE = (8, 6, 64)
# With bfloat16, a sum over devices in anything narrower than float32 would show.
X, DY = (make_values("normal", SHAPE, DTYPES["bfloat16"], seed) for seed in (1, 2))
WEIGHT, BIAS = (make_values("normal", SHAPE[-1:], DTYPES["bfloat16"], seed) for seed in (3, 4))
RESIDUAL = make_values("normal", SHAPE, np.float32, 6)
STORED = reference.layer_norm_forward(X, WEIGHT, BIAS)

norm = cupynorm.jax.layer_norm


def step(x: Any, weight: Any, bias: Any, dy: Any, norm: Any = norm) -> Any:
    y, pull_back = jax.vjp(norm, x, weight, bias)
    return y, *pull_back(dy)


def check(results: Any, first: int = SHAPE[0], vectors: Any = (WEIGHT, BIAS)) -> None:
    """Check y and the gradients of a step over the first of the rows."""
    y, *gradients = (np.asarray(result) for result in results)
    weight, bias = (a.astype(d.dtype) for a, d in zip(vectors, gradients[1:], strict=True))
    testing.check_forward(NORM, y, X[:first], weight, bias, eps=1e-5)
    given = (DY[:first], X[:first], weight, STORED.mean[:first], STORED.rstd[:first])
    testing.check_backward(NORM, NormBackward(*gradients), *given, bias=bias)


def residual_step(x: Any, residual: Any, weight: Any, bias: Any, dy: Any, norm: Any = norm) -> Any:
    """A step whose residual and s are float32. dy is the cotangent of both y and s."""
    (y, s), pull_back = jax.vjp(
        lambda x, residual, *affine: norm(x, *affine, residual=residual),
        *(x, residual, weight, bias),
    )
    return y, s, *pull_back((dy, dy.astype(s.dtype)))


def check_residual(results: Any, first: int = SHAPE[0]) -> None:
    """Check y, s and the gradients of a step over the first of the rows."""
    y, s, dx, dresidual, *sums = (np.asarray(result) for result in results)
    weight, bias = (a.astype(d.dtype) for a, d in zip((WEIGHT, BIAS), sums, strict=True))
    testing.check_forward(
        NORM, (y, s), X[:first], weight, bias, eps=1e-5, residual=RESIDUAL[:first]
    )
    stored = reference.layer_norm_forward(s, weight, bias)
    testing.check_backward(
        NORM,
        NormBackward(dx, *sums, dresidual),
        *(DY[:first], s, weight, stored.mean, stored.rstd),
        bias=bias,
        dresidual_out=DY[:first].astype(s.dtype),
        dx_dtype=dx.dtype,
    )


COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def collectives(compiled: Any) -> list[tuple[str, list[str]]]:
    """Return what the devices exchange: each operation, and the types of its results."""
    found = COLLECTIVE.findall(compiled.as_text())
    return [(kind, re.findall(r"\w+\[[\d,]*\]", types)) for types, kind in found]


def mesh_of(sizes: tuple[int, ...], kind: AxisType) -> Any:
    names = ("a", "b")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))


def put(mesh: Any, x: Any, row: Any) -> list[Any]:
    specs = (x, row, row, x)
    arrays = (X, WEIGHT, BIAS, DY)
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    program = jax.jit(function).lower(*arguments).compile()
    check(program(*arguments))
    return collectives(program)


def with_named_shardings(sizes: tuple[int, ...], kind: AxisType, x: Any, row: Any) -> Any:
    return compiled(step, *put(mesh_of(sizes, kind), x, row))


def with_a_weight_split_otherwise(kind: AxisType) -> Any:
    """Data is split over one axis, parameters over another. y is split as x is."""
    arguments = put(mesh_of((2, 2), kind), P("b"), P("a"))
    program = jax.jit(step).lower(*arguments).compile()
    y, dx, *_ = results = program(*arguments)
    check(results)
    for rows in (y, dx):
        assert rows.sharding.is_equivalent_to(arguments[0].sharding, rows.ndim), rows.sharding
    return collectives(program)


def with_a_mesh_set(kind: AxisType) -> Any:
    mesh = mesh_of((4,), kind)
    with jax.set_mesh(mesh):
        return compiled(step, *put(mesh, P("a"), P()))


def made_outside_of_a_set_mesh(kind: AxisType) -> Any:
    """No array is on the mesh, and no program has a sharding."""
    batched = functools.partial(step, norm=jax.vmap(norm, in_axes=(0, None, None)))
    with jax.set_mesh(mesh_of((2, 2), kind)):
        for array, function in (
            *((jnp.asarray, step), (jnp.asarray, jax.jit(batched))),
            *((np.asarray, jax.jit(step)), (np.asarray, batched)),
        ):
            check(function(*(array(a) for a in (X, WEIGHT, BIAS, DY))))
    return []


def weights_alone_on_the_mesh(kind: AxisType) -> Any:
    _, *vectors, _ = put(mesh_of((4,), kind), P("a"), P("a"))
    for function in (step, jax.jit(step)):
        check(function(jnp.asarray(X), *vectors, jnp.asarray(DY)))
    return []


def a_dy_made_outside_of_the_mesh(kind: AxisType) -> Any:
    mesh = mesh_of((4,), kind)
    with jax.set_mesh(mesh):
        return compiled(step, *put(mesh, P("a"), P())[:3], DY)


def with_axes_of_one_device(kind: AxisType) -> Any:
    """Axes of one device are axes of an Explicit mesh too, next to others of each kind."""
    for sizes, rows, row in (((1, 4), "a", "b"), ((4, 1), "b", "a")):
        for other in (kind, AxisType.Auto):
            kinds = tuple(kind if name == rows else other for name in ("a", "b"))
            mesh = jax.make_mesh(sizes, ("a", "b"), axis_types=kinds)
            compiled(step, *put(mesh, P(rows), P(row)))
            check_fused(jax.jit(fused_step)(*put_fused(mesh, P(rows))), fused_arrays())
    return []


def with_relu_and_a_bias_alone(kind: AxisType) -> Any:
    """The bitmask comes before the operand that stands for the bias."""
    x, bias = np.asarray(X, np.float32), np.asarray(BIAS, np.float32)

    def loss(x: Any, bias: Any) -> Any:
        return jnp.sum(jnp.sin(norm(x, bias=bias, relu=(-0.5, 1.0))))

    arguments = put(mesh_of((4,), kind), P("a"), P())
    arguments = [a.astype(np.float32) for a in (arguments[0], arguments[2])]
    alone = jax.jit(jax.grad(loss, (0, 1)))
    program = alone.lower(*arguments).compile()
    for one, other in zip(program(*arguments), alone(x, bias), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return collectives(program)


def with_uneven_rows(count: int) -> Any:
    """The last rows of X are NaN. They are cut off, but stay in their device's memory."""
    arguments = put(mesh_of((count,), AxisType.Auto), P("a"), P())
    x, weight, bias, dy = arguments
    x, dy = (jax.device_put(a.at[-1].set(jnp.nan), a.sharding) for a in (x, dy))

    def cut(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        y, dx, *sums = step(x[:-1], weight, bias, dy[:-1])
        # A result's rows must be split evenly.
        return *(jnp.pad(a, ((0, 1), (0, 0), (0, 0))) for a in (y, dx)), *sums

    program = jax.jit(cut).lower(x, weight, bias, dy).compile()
    y, dx, *sums = program(x, weight, bias, dy)
    check((y[:-1], dx[:-1], *sums), first=SHAPE[0] - 1)
    return collectives(program)


# ---- weight and bias that vary from row to row ---------------------------------------------------

EXAMPLES, HEADS = (SHAPE[0], 1, SHAPE[2]), SHAPE[1:]  # their shapes


def vectors_of(shape: tuple[int, ...]) -> list[Any]:
    return [make_values("normal", shape, DTYPES["bfloat16"], seed) for seed in (3, 4)]


def with_vectors(
    sizes: tuple[int, ...], kind: AxisType, rows: Any, shape: tuple[int, ...], along: Any
) -> Any:
    """Weight and bias are of a shape, and split along its axes. y and dx are split as x is."""
    mesh, vectors = mesh_of(sizes, kind), vectors_of(shape)
    arguments = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((X, *vectors, DY), (rows, along, along, rows), strict=True)
    ]
    program = jax.jit(step).lower(*arguments).compile()
    y, dx, *_ = results = program(*arguments)
    check(results, vectors=vectors)
    for array in (y, dx):
        assert array.sharding.is_equivalent_to(arguments[0].sharding, array.ndim), array.sharding
    return collectives(program)


def with_vectors_and_uneven_rows(count: int) -> Any:
    """As `with_uneven_rows`, with vectors for each example that are as uneven."""
    mesh, (weight, bias) = mesh_of((count,), AxisType.Auto), vectors_of(EXAMPLES)
    arguments = [
        jax.device_put(a, NamedSharding(mesh, P("a"))).at[-1].set(jnp.nan)
        for a in (X, weight, bias, DY)
    ]

    def cut(*arrays: Any) -> Any:
        results = step(*(a[:-1] for a in arrays))
        return [jnp.pad(a, ((0, 1), (0, 0), (0, 0))) for a in results]

    program = jax.jit(cut).lower(*arguments).compile()
    results = [np.asarray(a)[:-1] for a in program(*arguments)]
    check(results, SHAPE[0] - 1, (weight[:-1], bias[:-1]))
    return collectives(program)


def with_vectors_under_shard_map(tracked: bool, gradient_within: bool) -> Any:
    mesh, vectors = mesh_of((4,), AxisType.Auto), vectors_of(EXAMPLES)
    if gradient_within:
        function: Any = jax.shard_map(
            step, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=tracked
        )
    else:
        split = jax.shard_map(norm, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=tracked)
        function = functools.partial(step, norm=split)
    program = jax.jit(function).lower(X, *vectors, DY).compile()
    check(program(X, *vectors, DY), vectors=vectors)
    return collectives(program)


def with_vectors_under_vmap(kind: AxisType) -> Any:
    """Each example has a weight of its own, and all share the bias, or none has one."""
    mesh, (weight, _) = mesh_of((4,), kind), vectors_of((SHAPE[0], SHAPE[2]))
    rows = NamedSharding(mesh, P("a"))
    x, weights, dy = (jax.device_put(a, rows) for a in (X, weight, DY))
    bias = jax.device_put(BIAS, NamedSharding(mesh, P()))
    batched = functools.partial(step, norm=jax.vmap(norm, in_axes=(0, 0, None)))
    program = jax.jit(batched).lower(x, weights, bias, dy).compile()
    y, dx, dweight, dbias = program(x, weights, bias, dy)
    check((y, dx, dweight[:, None], dbias), vectors=(weight[:, None], BIAS))
    return collectives(program)


def put_residual(mesh: Any, rows: Any, of_residual: Any) -> list[Any]:
    (x, *_), (_, weight, bias, dy) = put(mesh, rows, P()), put(mesh, of_residual, P())
    residual = jax.device_put(RESIDUAL, NamedSharding(mesh, of_residual))
    return [x, residual, weight, bias, dy]


def with_a_residual(sizes: tuple[int, ...], kind: AxisType, rows: Any, of_residual: Any) -> Any:
    arguments = put_residual(mesh_of(sizes, kind), rows, of_residual)
    program = jax.jit(residual_step).lower(*arguments).compile()
    results = program(*arguments)
    check_residual(results)
    for array, like in zip(results[:4], (*2 * arguments[1:2], *arguments[:2]), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, array.ndim), array.sharding
    return collectives(program)


def with_a_residual_split_otherwise(
    kind: AxisType, shardy: bool, rows: Any, of_residual: Any, of_dy: Any
) -> Any:
    """Each kept axis is split as in the array that splits it."""
    mesh, common = mesh_of((2, 2), kind), P("a", "b")
    if P() in (rows, of_residual):
        common = P("a")
    if kind is AxisType.Explicit:  # JAX wants dy to have y's type
        of_dy = common
    (x, residual, weight, bias, _) = put_residual(mesh, rows, of_residual)
    dy = jax.device_put(DY, NamedSharding(mesh, of_dy))
    arguments = (x, residual, weight, bias, dy)
    jax.config.update("jax_use_shardy_partitioner", shardy)
    try:
        # Each call has a new function. JAX would reuse the other partitioner's program for an old
        # one.
        program = jax.jit(lambda *given: residual_step(*given)).lower(*arguments).compile()
        results = program(*arguments)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    check_residual(results)
    for array in results[:2]:
        expected = NamedSharding(mesh, common)
        assert array.sharding.is_equivalent_to(expected, array.ndim), array.sharding
    if kind is AxisType.Explicit:  # a gradient has the type of its input
        forward = jax.jit(lambda x, residual, *affine: norm(x, *affine, residual=residual))
        program = forward.lower(*arguments[:-1]).compile()
    return collectives(program)


def with_a_residual_and_uneven_rows(count: int) -> Any:
    """As `with_uneven_rows`."""
    arguments = put_residual(mesh_of((count,), AxisType.Auto), P("a"), P("a"))
    x, residual, weight, bias, dy = arguments
    x, residual, dy = (jax.device_put(a.at[-1].set(jnp.nan), a.sharding) for a in (x, residual, dy))

    def cut(x: Any, residual: Any, weight: Any, bias: Any, dy: Any) -> Any:
        *rows, dweight, dbias = residual_step(x[:-1], residual[:-1], weight, bias, dy[:-1])
        return *(jnp.pad(a, ((0, 1), (0, 0), (0, 0))) for a in rows), dweight, dbias

    program = jax.jit(cut).lower(x, residual, weight, bias, dy).compile()
    *rows, dweight, dbias = program(x, residual, weight, bias, dy)
    check_residual((*(a[:-1] for a in rows), dweight, dbias), first=SHAPE[0] - 1)
    return collectives(program)


def with_a_residual_under_shard_map(tracked: bool) -> Any:
    mesh = mesh_of((4,), AxisType.Auto)
    rows, row = P("a"), P()
    specs = {"in_specs": (rows, rows, row, row), "out_specs": (rows, rows)}
    # As in `under_shard_map`.
    weight, bias = (a if tracked else a.astype(np.float32) for a in (WEIGHT, BIAS))
    split = jax.shard_map(
        lambda x, residual, *affine: norm(x, *affine, residual=residual),
        mesh=mesh,
        check_vma=tracked,
        **specs,
    )

    def split_norm(x: Any, *affine: Any, residual: Any) -> Any:
        return split(x, residual, *affine)

    step = functools.partial(residual_step, norm=split_norm)
    program = jax.jit(step).lower(X, RESIDUAL, weight, bias, DY).compile()
    results = program(X, RESIDUAL, weight, bias, DY)
    check_residual(results)
    return collectives(program)


def a_stream_through_layers(kind: AxisType) -> Any:
    """A scan adds branches to a stream, in float32. One device must give the same."""
    arrays = np.asarray(X, np.float32), RESIDUAL
    weights = make_values("normal", (3, *SHAPE[-1:]), np.float32, 5)

    def loss(x: Any, residual: Any, weights: Any) -> Any:
        def layer(carry: Any, weight: Any) -> Any:
            branch, stream = carry
            y, stream = norm(branch, weight, residual=stream)
            return (jnp.sin(y), stream), None

        y, stream = jax.lax.scan(jax.checkpoint(layer), (x, residual), weights)[0]
        return jnp.sum(y * stream)

    mesh = mesh_of((4,), kind)
    specs = (P("a"), P("a"), P())
    arguments = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((*arrays, weights), specs, strict=True)
    ]
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    program = gradient.lower(*arguments).compile()
    for split, whole in zip(program(*arguments), gradient(*arrays, weights), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)
    return collectives(program)


def eagerly(kind: AxisType) -> Any:
    mesh = mesh_of((2, 2), kind)
    check(step(*put(mesh, P("a", "b"), P())))
    with jax.set_mesh(mesh):  # whose other axis splits no row
        check(step(*put(mesh, P("a"), P())))
    return []


def with_relu(kind: AxisType, normalized: tuple[int, ...] = SHAPE[-1:]) -> Any:
    """The gradient of a clamped norm, in float32. One device must give the same."""
    arrays = [
        a.astype(np.float32).reshape(*a.shape[:-1], *normalized) for a in (X, WEIGHT, BIAS, DY)
    ]
    clamped = functools.partial(norm, axis=tuple(range(-len(normalized), 0)), relu=(0.0, 1.0))
    mesh = mesh_of((2, 2), kind)
    split = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, (P("a", "b"), P(), P(), P("a", "b")), strict=True)
    ]
    of_clamped = jax.jit(functools.partial(step, norm=clamped))
    program = of_clamped.lower(*split).compile()
    for one, other in zip(program(*split), of_clamped(*arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return collectives(program)


def with_relu_over_two_axes(kind: AxisType) -> Any:
    return with_relu(kind, (4, 16))


def under_vmap(kind: AxisType) -> Any:
    batched = jax.vmap(norm, in_axes=(0, None, None))
    return compiled(functools.partial(step, norm=batched), *put(mesh_of((4,), kind), P("a"), P()))


def under_shard_map(count: int, tracked: bool, gradient_within: bool) -> Any:
    mesh = mesh_of((count,), AxisType.Auto)
    rows, row = P("a"), P()
    # Without tracking, JAX itself sums the gradients over the devices, in the dtype that it gets.
    weight, bias = (a if tracked else a.astype(np.float32) for a in (WEIGHT, BIAS))
    if gradient_within:
        specs = {"in_specs": (rows, row, row, rows), "out_specs": (rows, rows, row, row)}
        function: Any = jax.shard_map(step, mesh=mesh, check_vma=tracked, **specs)
    else:
        split = jax.shard_map(
            norm, mesh=mesh, in_specs=(rows, row, row), out_specs=rows, check_vma=tracked
        )
        function = functools.partial(step, norm=split)
    return compiled(function, X, weight, bias, DY)


def under_shard_map_over_one_axis(kind: AxisType, x: Any) -> Any:
    """The other axis of the mesh is Auto or Explicit inside, as it is outside."""
    mesh = mesh_of((2, 2), kind)
    specs = {"in_specs": (P("a"), P(), P()), "out_specs": P("a"), "axis_names": {"a"}}
    split = jax.shard_map(norm, mesh=mesh, **specs)
    return compiled(functools.partial(step, norm=split), *put(mesh, x, P()))


def through_layers(kind: AxisType) -> Any:
    """Rematerialized layers in a scan, in float32. One device must give the same."""
    x = np.asarray(X, np.float32)
    weights = make_values("normal", (3, *SHAPE[-1:]), np.float32, 5)

    def loss(x: Any, weights: Any) -> Any:
        def layer(x: Any, weight: Any) -> Any:
            return x + norm(x, weight), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    mesh = mesh_of((4,), kind)
    arguments = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("a")), (weights, P()))
    ]
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    program = gradient.lower(*arguments).compile()
    for split, whole in zip(program(*arguments), gradient(x, weights), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)
    return collectives(program)


def second_derivatives(kind: AxisType) -> Any:
    def slope(x: Any, weight: Any) -> Any:
        gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(norm(*a))), (0, 1))(x, weight)
        return sum(jnp.sum(jnp.square(g)) for g in gradients)

    return on_a_mesh_as_on_one_device(kind, jax.grad(slope, (0, 1)))


def second_derivatives_by_forward_mode(kind: AxisType) -> Any:
    def product(x: Any, weight: Any) -> Any:
        gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(norm(*a))), (0, 1))
        return jax.jvp(gradients, (x, weight), (x, weight))[1]

    return on_a_mesh_as_on_one_device(kind, product)


# ---- quantized outputs ---------------------------------------------------------------------------

STATIC = Quantize("float8_e5m2", np.float32([0.02]))
QUANTIZED = (
    *(Quantize("int8", "row"), Quantize("float8_e4m3fn", "block", block=128), STATIC),
    Quantize("float8_e4m3fn", "block", block=32),
)


def quantized(
    how: Quantize, function: Any, *arguments: Any, called: str = "quantized", **options: Any
) -> Any:
    """Check a function that quantizes x, a residual or None, and by a scale or None."""
    program = jax.jit(function).lower(*arguments).compile()
    results = program(*arguments)
    found = tuple(map(np.asarray, results))
    given = {"x": X, "eps": 1e-5} | options
    testing.check_quantized(NORM, found, quantize=how, **given)
    calls = re.findall(r'custom_call_target="cupynorm\.(\w+)"', program.as_text())
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    assert calls == ([called] if platform in _kernels.platforms() else []), calls
    return results, collectives(program)


def of(how: Quantize) -> Any:
    """Return the norm that quantizes so, as a function of x, a residual and a scale."""

    def function(x: Any, residual: Any = None, scale: Any = None) -> Any:
        told = how if scale is None else dataclasses.replace(how, scale=scale)
        return norm(x, WEIGHT, residual=residual, quantize=told)

    return function


def quantized_rows(kind: AxisType, sizes: tuple[int, ...] = (2, 2)) -> Any:
    mesh, exchanged = mesh_of(sizes, kind), []
    rows = NamedSharding(mesh, P(*("a", "b")[: len(sizes)]))
    x, residual = (jax.device_put(a, rows) for a in (X, RESIDUAL))
    for how in QUANTIZED:
        places = (jnp.asarray, functools.partial(jax.device_put, device=NamedSharding(mesh, P())))
        for scale in [put(how.scale) for put in places] if how.is_given else [None]:
            for added in (None, residual) if "cpu" in _kernels.platforms() else (residual,):
                results, found = quantized(
                    *(how, of(how), x, added, scale),
                    **{"weight": WEIGHT, "residual": None if added is None else RESIDUAL},
                )
                exchanged += found
                for array in results:
                    if array.size > 1:
                        assert array.sharding.is_equivalent_to(rows, array.ndim), array.sharding
    eager = of(QUANTIZED[0])(x, residual)
    for one, other in zip(eager, of(QUANTIZED[0])(X, RESIDUAL), strict=True):
        np.testing.assert_array_equal(one, other)
    return exchanged


def quantized_rows_under_vmap(kind: AxisType) -> Any:
    x, exchanged = jax.device_put(X, NamedSharding(mesh_of((4,), kind), P("a"))), []
    for how in QUANTIZED[:2]:
        _, found = quantized(how, jax.vmap(of(how)), x, weight=WEIGHT)
        exchanged += found
    scales = jax.device_put(np.full((8, 1), 0.02, np.float32), x.sharding)
    each = lambda x, scales: jax.vmap(  # noqa: E731
        lambda x, scale: of(STATIC)(x, None, scale)[0]
    )(x, scales)
    program = jax.jit(each).lower(x, scales).compile()
    found = np.asarray(program(x, scales)), STATIC.scale
    testing.check_quantized(NORM, found, X, WEIGHT, quantize=STATIC, eps=1e-5)
    return exchanged + collectives(program)


def quantized_rows_that_are_cut(kind: AxisType) -> Any:
    x, exchanged = jax.device_put(X, NamedSharding(mesh_of((2, 2), kind), P("a", None, "b"))), []
    for how in QUANTIZED:
        scale = None if how.given is None else jnp.asarray(how.given)
        _, found = quantized(how, of(how), x, None, scale, weight=WEIGHT)
        exchanged += found
    how = dataclasses.replace(QUANTIZED[1], amax=True)
    quantized(how, of(how), x, None, called="forward", weight=WEIGHT)
    return exchanged


def amax_of_rows(kind: AxisType) -> Any:
    """That of all devices, though the last row, which some of them have, is cut off."""
    how = Quantize("int8", "row", amax=True)
    mesh = mesh_of((2, 2), kind)
    x, residual = (jax.device_put(a, NamedSharding(mesh, P("a", "b"))) for a in (X, RESIDUAL))
    given = {"weight": WEIGHT, "residual": RESIDUAL}
    _, found = quantized(how, of(how), x, residual, called="forward", **given)
    uneven = jax.device_put(X, NamedSharding(mesh_of((4,), AxisType.Auto), P("a")))
    uneven = jax.device_put(uneven.at[-1, :, 0].set(1e30), uneven.sharding)
    amax = jax.jit(lambda x: of(how)(x[:-1])[2])(uneven)
    np.testing.assert_array_equal(amax, of(how)(jnp.asarray(X[:-1]))[2])
    assert found
    assert {(operation, *types) for operation, types in found} == {("all-reduce", "f32[]")}, found
    return []


def quantized_rows_under_shard_map(count: int, tracked: bool) -> Any:
    mesh, exchanged = mesh_of((count,), AxisType.Auto), []
    for how in QUANTIZED:

        def rows(x: Any, residual: Any, how: Quantize = how) -> Any:
            q, scale, total = of(how)(x, residual, how.given)
            return (q, total) if how.is_given else (q, scale, total)

        split = jax.shard_map(rows, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=tracked)

        def function(x: Any, residual: Any, split: Any = split, how: Quantize = how) -> Any:
            q, *scale, total = split(x, residual)
            return q, jnp.asarray(how.scale) if how.is_given else scale[0], total

        _, found = quantized(how, function, X, RESIDUAL, weight=WEIGHT, residual=RESIDUAL)
        exchanged += found
    return exchanged


def quantized_rows_that_are_uneven(count: int) -> Any:
    """As `with_uneven_rows`."""
    x = jax.device_put(X, NamedSharding(mesh_of((count,), AxisType.Auto), P("a")))
    x, exchanged = jax.device_put(x.at[-1].set(jnp.nan), x.sharding), []
    for how in QUANTIZED[:2]:

        def cut(x: Any, how: Quantize = how) -> Any:
            wide = [a.astype(np.float32) for a in of(how)(x[:-1])]
            return [jnp.pad(a, ((0, 1), (0, 0), (0, 0))) for a in wide]

        program = jax.jit(cut).lower(x).compile()
        q, scale = (np.asarray(a)[:-1] for a in program(x))
        q = q.astype(np.dtype(how.dtype))
        testing.check_quantized(NORM, (q, scale), X[:-1], WEIGHT, quantize=how, eps=1e-5)
        exchanged += collectives(program)
    return exchanged


def quantized_from_float64(kind: AxisType) -> Any:
    """No array has the dtype that y is rounded to. XLA's thread must know it all the same."""
    how = Quantize("float8_e4m3fn", "row", via="float64")
    x = np.asarray(X, np.float32)
    with jax.enable_x64(True):
        on_mesh = jax.device_put(x, NamedSharding(mesh_of((4,), kind), P("a")))
        results, exchanged = quantized(how, of(how), on_mesh, called="forward", x=x, weight=WEIGHT)
        for one, other in zip(results, jax.jit(of(how))(x), strict=True):
            np.testing.assert_array_equal(one, other)
    return exchanged


def forward_mode(kind: AxisType) -> Any:
    def push(x: Any, weight: Any) -> Any:
        def pair(x: Any, weight: Any) -> Any:
            return norm(x, weight, weight, residual=x, relu=(-0.5, 1.0))

        along_both = jax.jvp(pair, (x, weight), (x, weight))
        return *along_both, jax.jvp(lambda weight: pair(x, weight), (weight,), (weight,))

    return on_a_mesh_as_on_one_device(kind, push)


def forward_mode_under_shard_map(tracked: bool, within: bool) -> Any:
    mesh = mesh_of((4,), AxisType.Auto)
    rows = {"in_specs": (P("a"), P()), "out_specs": P("a"), "mesh": mesh, "check_vma": tracked}

    def push(x: Any, weight: Any) -> Any:
        split = norm if within else jax.shard_map(norm, **rows)
        return jax.jvp(split, (x, weight), (x, weight))

    function = jax.shard_map(push, **rows) if within else push
    return on_a_mesh_as_on_one_device(
        AxisType.Auto, function, lambda x, weight: jax.jvp(norm, (x, weight), (x, weight))
    )


def on_a_mesh_as_on_one_device(kind: AxisType, function: Any, alone: Any = None) -> Any:
    """Check a function of split rows and a weight, in float32. One device must give the same."""
    x, weight = np.asarray(X, np.float32), np.asarray(WEIGHT, np.float32)
    mesh = mesh_of((4,), kind)
    arguments = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("a")), (weight, P()))]
    program = jax.jit(function).lower(*arguments).compile()
    found, expected = (
        jax.tree.leaves(r) for r in (program(*arguments), jax.jit(alone or function)(x, weight))
    )
    for split, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-3, atol=1e-3)
    return collectives(program)


# ---- a norm of cupynorm.fuse ---------------------------------------------------------------------

# Where a is 0, as padding may be, its steps are not finite.
FUSED = cupynorm.fuse(
    "layer_norm",
    prologue=lambda x, r, a: x + r / a,
    epilogue=lambda y, z, s: y * cupynorm.math.silu(z) + s,
)
NAMES = ("x", "weight", "r", "a", "z", "s")


def fused_arrays() -> dict[str, Any]:
    """Return arguments by name: rows, one element a row, and vectors that rows share."""
    z = make_values("normal", SHAPE, DTYPES["bfloat16"], 7)
    a = 1 + np.abs(make_values("normal", (*SHAPE[:-1], 1), np.float32, 8))
    return dict(zip(NAMES, (X, WEIGHT, RESIDUAL, a, z, BIAS), strict=True))


def fused_norm(x: Any, weight: Any, r: Any, a: Any, z: Any, s: Any) -> Any:
    return FUSED(jnp.asarray(x), weight, r=r, a=a, z=z, s=s)


def fused_step(dy: Any, *arrays: Any, norm: Any = fused_norm) -> Any:
    y, pull_back = jax.vjp(norm, *arrays)
    return y, *pull_back(dy)


def check_fused(results: Any, arrays: dict[str, Any], first: int = SHAPE[0]) -> None:
    """Check y and the gradients of a step over the first of the rows."""
    y, *gradients = (np.asarray(result) for result in results)
    given = {n: a[:first] if a.shape[:1] == SHAPE[:1] else a for n, a in arrays.items()}
    testing.check_fused(FUSED, y, **given)
    forward = FUSED.forward(given.pop("x"), **given)
    named = {f"d{name}": g for name, g in zip(NAMES, gradients, strict=True)}
    found = FUSED.backward(DY[:first], forward)._replace(**named)
    testing.check_fused_backward(FUSED, found, DY[:first], forward)


def put_fused(mesh: Any, rows: Any) -> list[Any]:
    """Return dy and the arguments, which are split as the rows are."""
    split = {"x", "r", "a", "z"}
    specs = [rows, *(rows if name in split else P() for name in NAMES)]
    given = (DY, *fused_arrays().values())
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(given, specs, strict=True)]


def fused(sizes: tuple[int, ...], kind: AxisType, rows: Any) -> Any:
    arguments = put_fused(mesh_of(sizes, kind), rows)
    program = jax.jit(fused_step).lower(*arguments).compile()
    results = program(*arguments)
    check_fused(results, fused_arrays())
    for array in results[:2]:
        assert array.sharding.is_equivalent_to(arguments[1].sharding, array.ndim), array.sharding
    return collectives(program)


def fused_with_rows_split_otherwise(kind: AxisType) -> Any:
    """The rows of x are split over one axis, and those of an input over another."""
    mesh, (dy, *arrays) = mesh_of((2, 2), kind), put_fused(mesh_of((2, 2), kind), P("a"))
    given = dict(zip(NAMES, arrays, strict=True))
    given["z"] = jax.device_put(given["z"], NamedSharding(mesh, P(None, "b")))
    if kind is AxisType.Explicit:  # JAX wants dy to have y's type
        dy = jax.device_put(dy, NamedSharding(mesh, P("a", "b")))
    program = jax.jit(fused_step).lower(dy, *given.values()).compile()
    check_fused(program(dy, *given.values()), fused_arrays())
    types = {t for _, types in collectives(program) for t in types}
    parts = {"f32[4,6,1]", "f32[4,6,64]", "f32[8,3,64]"}  # what another device has of an array
    assert types <= parts | {"f32[1,1,64]"}, types
    return []


def fused_and_uneven_rows(count: int, first: int) -> Any:
    """As `with_uneven_rows`. Devices may be left without a row."""
    arguments = put_fused(mesh_of((count,), AxisType.Auto), P("a"))
    is_split = [a.shape[:1] == SHAPE[:1] for a in arguments]
    arguments = [
        jax.device_put(a.at[first:].set(jnp.nan), a.sharding) if split else a
        for a, split in zip(arguments, is_split, strict=True)
    ]

    def cut(*arrays: Any) -> Any:
        given = (a[:first] if split else a for a, split in zip(arrays, is_split, strict=True))
        y, dx, dweight, dr, da, dz, ds = fused_step(*given)
        # A result's rows must be split evenly.
        behind = SHAPE[0] - first
        y, dx, dr, da, dz = (jnp.pad(a, ((0, behind), (0, 0), (0, 0))) for a in (y, dx, dr, da, dz))
        return y, dx, dweight, dr, da, dz, ds

    program = jax.jit(cut).lower(*arguments).compile()
    found = [a[:first] if a.shape[:1] == SHAPE[:1] else a for a in program(*arguments)]
    check_fused(found, fused_arrays(), first)
    return collectives(program)


def fused_under_shard_map(tracked: bool, gradient_within: bool) -> Any:
    mesh = mesh_of((4,), AxisType.Auto)
    arrays = fused_arrays()
    # As in `under_shard_map`.
    arrays |= {n: a if tracked else a.astype(np.float32) for n, a in arrays.items() if a.ndim == 1}
    specs = tuple(P("a") if a.shape[:1] == SHAPE[:1] else P() for a in arrays.values())
    told: dict[str, Any] = {"mesh": mesh, "check_vma": tracked}
    if gradient_within:
        function: Any = jax.shard_map(
            fused_step, in_specs=(P("a"), *specs), out_specs=(P("a"), *specs), **told
        )
    else:
        split = jax.shard_map(fused_norm, in_specs=specs, out_specs=P("a"), **told)
        function = functools.partial(fused_step, norm=split)
    program = jax.jit(function).lower(DY, *arrays.values()).compile()
    check_fused(program(DY, *arrays.values()), arrays)
    return collectives(program)


def fused_with_a_constant_under_shard_map() -> Any:
    """An output, and the gradient of an input, that depend on no array of the device."""
    norm = cupynorm.fuse(
        "rms_norm", epilogue=lambda y, z, s: (y * cupynorm.math.where(s > z, 1, 2), 2.0)
    )

    def constant_step(x: Any, z: Any, s: Any) -> Any:
        outputs, pull_back = jax.vjp(lambda x, z, s: norm(x, z=z, s=s), x, z, s)
        return *outputs, *pull_back(outputs)

    x, _, _, _, z, s = fused_arrays().values()
    rows, told = P("a"), {"in_specs": (P("a"), P("a"), P()), "mesh": mesh_of((4,), AxisType.Auto)}
    split = jax.shard_map(constant_step, out_specs=(*4 * (rows,), P()), **told)
    y, two, dx, dz, ds = map(np.asarray, jax.jit(split)(x, z, s))
    testing.check_fused(norm, (y, two), x, z=z, s=s)
    assert np.isfinite(dx.astype(np.float32)).all()
    assert not dz.any()
    assert not ds.any()
    return []


def fused_under_vmap(kind: AxisType) -> Any:
    axes = [0 if a.shape[:1] == SHAPE[:1] else None for a in fused_arrays().values()]
    arguments = put_fused(mesh_of((4,), kind), P("a"))
    step = functools.partial(fused_step, norm=jax.vmap(fused_norm, in_axes=axes))
    program = jax.jit(step).lower(*arguments).compile()
    check_fused(program(*arguments), fused_arrays())
    return collectives(program)


def fused_second_derivatives(kind: AxisType) -> Any:
    """In float32. One device must give the same."""
    arrays = [np.asarray(a, np.float32) for a in fused_arrays().values()]

    def slope(*arrays: Any) -> Any:
        gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(fused_norm(*a))), tuple(range(6)))(*arrays)
        return sum(jnp.sum(jnp.square(g)) for g in gradients)

    _, *split = put_fused(mesh_of((4,), kind), P("a"))
    split = [a.astype(np.float32) for a in split]
    function = jax.jit(jax.grad(slope, tuple(range(6))))
    program = function.lower(*split).compile()
    for one, whole in zip(program(*split), function(*map(jnp.asarray, arrays)), strict=True):
        np.testing.assert_allclose(one, whole, rtol=2e-3, atol=2e-3)
    return collectives(program)


def fused_cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a name and a function for each program."""
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sizes, rows in (((4,), P("a")), ((2, 2), P("a", "b")), ((2, 2), P(("a", "b")))):
            yield (
                f"fused rows, {kind.name} {sizes} {rows}",
                functools.partial(fused, sizes, kind, rows),
            )
        for function in (fused_under_vmap, fused_second_derivatives):
            yield f"{function.__name__}, {kind.name}", functools.partial(function, kind)
        yield (
            f"a fused norm, split otherwise, {kind.name}",
            functools.partial(fused_with_rows_split_otherwise, kind),
        )
    for tracked, within in ((True, True), (True, False), (False, False)):
        yield (
            f"fused under shard_map, {tracked} {within}",
            functools.partial(fused_under_shard_map, tracked, within),
        )
    yield "a fused norm, constant", fused_with_a_constant_under_shard_map
    for first in (7, 5):  # of 8 rows on 4 devices
        yield f"fused and {first} rows", functools.partial(fused_and_uneven_rows, 4, first)


# ---- drawn shardings -----------------------------------------------------------------------------

# How x gets rows that the devices do not share evenly. The last two ways give an even split. Rows
# that are cut off stay in their device's memory, and hold NaN.
WAYS: dict[str, Callable[[Any], Any]] = {
    "constraint": lambda x: x,
    "constraint of two axes": lambda x: x,
    "one row": lambda x: x[:1],
    "last row off": lambda x: x[:-1],
    "first column off": lambda x: x[:, 1:],
    "token in front": lambda x: jnp.concatenate([jnp.ones_like(x[:, :1]), x], axis=1),
    "axis split in two": lambda x: x.reshape(2, x.shape[0] // 2, *x.shape[1:]),
    "even": lambda x: x,
}
CONSTRAINED = (
    "constraint",
    "constraint of two axes",
    "one row",
)  # within the program: JAX does not put arrays this way


@dataclass(frozen=True)
class Draw:
    way: str
    kind: AxisType
    order: int  # of the derivatives
    mesh_set: bool
    shardy: bool
    sizes: tuple[int, ...]  # of the mesh
    spec: Any
    weight_spec: Any
    shape: tuple[int, ...]  # of x
    k: int
    norm: str
    weight: bool
    bias: bool
    relu: tuple[float, float] | None
    residual_spec: Any = None  # of a residual, if any
    along: tuple[int, ...] = ()  # the kept axes along which weight and bias vary


def draw(
    random: Random, way: str, kind: AxisType, order: int, mesh_set: bool, shardy: bool
) -> Draw:
    sizes = random.choice([(4,), (2, 2), (2, 2), (1, 4), (4, 1), (3,), (2,)])
    axis = int(way in ("first column off", "token in front"))
    kept = max(axis + 1, random.choice([1, 2, 2]))
    sides = [12] if sizes == (3,) else [4, 8, 12]
    if way == "constraint":
        axis, sides = random.randrange(kept), [1, 2, 3, 5, 6, 7, 9]
    if way == "constraint of two axes":
        sizes, kept, sides = (2, 2), 2, [1, 3, 5, 7]
    names = ("a", "b")[: len(sizes)]
    entries: list[Any] = [None] * kept
    several = [name for name, size in zip(names, sizes, strict=True) if size > 1]
    entries[axis] = random.choice([*several, names, names[::-1]])
    if way == "constraint of two axes" or (kept == 2 and sizes == (2, 2) and random.random() < 0.5):
        entries = random.sample(names, 2)
    row = random.choice([(6,), (16,), (2, 6)])
    rows = tuple(random.choice(sides) for _ in range(kept))
    whole = [None, *(n for n, size in zip(names, sizes, strict=True) if row[0] % size == 0)]
    return Draw(
        *(way, kind, order, mesh_set, shardy, sizes, P(*entries), P(random.choice(whole))),
        *((*rows, *row), len(row), random.choice(["rms_norm", "layer_norm"])),
        *(random.random() < 0.7, random.random() < 0.5, random.choice([None, (-0.5, 1.0)])),
    )


def drawn() -> list[Draw]:
    random, auto = Random(53), AxisType.Auto
    kinds = [
        (way, auto, order, mesh_set, True)
        for way in WAYS
        for order in (1, 1, 2)
        for mesh_set in (False, True)
    ]
    # On an Explicit mesh, JAX itself refuses an uneven split. Without Shardy, it refuses to return
    # an axis that it splits in two.
    kinds += [("even", AxisType.Explicit, order, True, True) for order in (1, 1, 1, 2)]
    kinds += [(way, auto, 1, False, False) for way in WAYS if way != "axis split in two"]
    plain = [draw(random, *kind) for kind in kinds]
    # These have each order, with a mesh set and without: the kinds repeat after six.
    some = (*plain[::5], *plain[2::5])
    added = (dataclasses.replace(d, residual_spec=spec_of_residual(random, d)) for d in some)
    return [*plain, *added]


def drawn_with_vectors() -> list[Draw]:
    """Draw shardings of rows each of which may have a weight and a bias of its own."""
    random = Random(59)
    ways = [(way, AxisType.Auto, shardy) for way in WAYS for shardy in (True, False)]
    ways.remove(("axis split in two", AxisType.Auto, False))  # as above
    ways.append(("even", AxisType.Explicit, True))
    plain = [
        draw(random, way, kind, 1, i % 4 < 2, shardy) for i, (way, kind, shardy) in enumerate(ways)
    ]
    found = []
    for one in plain:
        kept = len(one.shape) - one.k + (one.way == "axis split in two")
        along = tuple(random.sample(range(kept), random.randint(1, kept)))
        found.append(dataclasses.replace(one, weight=True, along=along, weight_spec=P()))
    return found


def spec_of_residual(random: Random, draw: Draw) -> Any:
    """Return how a residual is split: as x is, not at all, or along any one kept axis."""
    kept = len(draw.shape) - draw.k
    names = ("a", "b")[: len(draw.sizes)]
    along = [
        P(*axis * (None,), name)
        for axis in range(kept)
        for name, size in zip(names, draw.sizes, strict=True)
        if draw.shape[axis] % size == 0 or draw.way in CONSTRAINED
    ]
    return random.choice([draw.spec, draw.spec, P(), *along])


def plainly(norm: str, axes: Any, relu: Any, x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    """The norm in jax.numpy, on one device."""
    x = total = x if residual is None else x + residual
    y = x - x.mean(axes, keepdims=True) if norm == "layer_norm" else x
    y = y / jnp.sqrt((y * y).mean(axes, keepdims=True) + 1e-5)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    y = y if relu is None else jnp.clip(y, *relu)
    return y if residual is None else (y, total)


@jax.enable_x64(True)
def with_a_drawn_sharding(drawn: Draw) -> Any:
    """Check y and its derivatives. Return the draw and the number of axes that XLA padded.

    First derivatives are held to the oracle. Second derivatives are held to those of a plain norm
    on one device.
    """
    mesh = jax.make_mesh(
        drawn.sizes,
        ("a", "b")[: len(drawn.sizes)],
        axis_types=(drawn.kind,) * len(drawn.sizes),
        devices=jax.devices()[: math.prod(drawn.sizes)],
    )
    dtype = np.float32 if drawn.order == 1 else np.float64
    of_rows = WAYS[drawn.way](np.empty(drawn.shape)).shape
    kept = len(of_rows) - drawn.k
    vector = drawn.shape[-drawn.k :]
    if drawn.along:
        vector = tuple(n if i >= kept or i in drawn.along else 1 for i, n in enumerate(of_rows))
    x, weight, bias, residual = (
        make_values("normal", shape, dtype, seed)
        for seed, shape in enumerate((drawn.shape, vector, vector, drawn.shape))
    )
    for whole_rows in (x, residual):
        if drawn.way == "last row off":
            whole_rows[-1] = np.nan
        if drawn.way == "first column off":
            whole_rows[:, 0] = np.nan
    residual = None if drawn.residual_spec is None else residual
    weight, bias = weight if drawn.weight else None, bias if drawn.bias else None
    rows, to_add = (a if a is None else np.asarray(WAYS[drawn.way](a)) for a in (x, residual))
    options = {"eps": 1e-5, "axis": tuple(range(-drawn.k, 0)), "relu": drawn.relu}
    norm_of_rows = functools.partial(getattr(cupynorm.jax, drawn.norm), **options)
    plain_norm = functools.partial(plainly, drawn.norm, options["axis"], drawn.relu)
    within = drawn.way in CONSTRAINED
    specs = (drawn.spec, drawn.weight_spec, drawn.weight_spec, drawn.residual_spec)

    def split_norm(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return norm_of_rows(x, weight, bias, residual=residual)

    def first(norm: Any, constrained: bool, *arrays: Any) -> Any:
        """Return the results, their cotangents, and the gradients."""
        x, weight, bias, residual = arrays
        x, residual = (a if a is None else WAYS[drawn.way](a) for a in (x, residual))
        if constrained:
            x, residual = (
                a if a is None else jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))
                for a, spec in ((x, drawn.spec), (residual, drawn.residual_spec))
            )
        results, pull_back = jax.vjp(norm, x, weight, bias, residual)
        cotangents = jax.tree.map(jnp.cos, results)  # padded like the results
        return results, cotangents, pull_back(cotangents)

    def second(norm: Any, constrained: bool, *arrays: Any) -> Any:
        def slope(*arrays: Any) -> Any:
            _, _, gradients = first(norm, constrained, *arrays)
            return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(gradients))

        given = tuple(i for i, array in enumerate(arrays) if array is not None)
        return jax.grad(slope, given)(*arrays)

    arguments = [x, weight, bias, residual]
    if not within:
        arguments = [
            a if a is None else jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arguments, specs, strict=True)
        ]
    padded = []

    def without_padding(*given: Any) -> Any:
        _, mesh, kept, shape, (x, *_) = given
        parts = [math.prod(mesh.shape[name] for name in names) for names in kept]
        padded.append(sum(x.shape[i] * part != shape[i] for i, part in enumerate(parts)))
        return real(*given)

    real, _operations._without_padding = _operations._without_padding, without_padding
    fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    function = first if drawn.order == 1 else second
    jax.config.update("jax_use_shardy_partitioner", drawn.shardy)
    try:
        with jax.set_mesh(mesh) if drawn.mesh_set else contextlib.nullcontext():
            # Without Shardy, newer versions of JAX do not return rows that are split unevenly.
            whole = {} if drawn.shardy else {"out_shardings": NamedSharding(mesh, P())}
            split = fast(functools.partial(function, split_norm, within), **whole)
            found = split(*arguments)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
        _operations._without_padding = real
    if drawn.order == 1:
        results, cotangents, (dx, dweight, dbias, dresidual) = jax.tree.map(on_host, found)
        forward = getattr(cupynorm, f"{drawn.norm}_forward")(
            rows, weight, bias, residual=to_add, **options
        )
        testing.check_forward(drawn.norm, results, rows, weight, bias, residual=to_add, **options)
        dy, of_total = (cotangents, None) if to_add is None else cotangents
        testing.check_backward(
            drawn.norm,
            NormBackward(dx, dweight, dbias, dresidual),
            *(dy, rows if to_add is None else results[1], weight, forward.mean, forward.rstd),
            bias=False if bias is None else bias,
            bitmask=forward.bitmask,
            axis=options["axis"],
            dresidual_out=of_total,
        )
    else:
        expected = fast(functools.partial(second, plain_norm, False))(x, weight, bias, residual)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    seen = {name: getattr(drawn, name) for name in Draw.__annotations__ if "spec" not in name}
    seen["residual"] = drawn.residual_spec is not None
    return seen | {"kind": drawn.kind.name, "padded": max(padded, default=0)}


def control() -> Any:
    """The kernel's call alone. XLA knows nothing of it, and must gather x for a right result."""
    (x, *_) = put(mesh_of((4,), AxisType.Auto), P("a"), P())
    forward = Operation(FORWARD, Options(NORM, 1, eps=1e-5))
    program = jax.jit(lambda x: forward.kernel("cpu", x)).lower(x).compile()
    program(x)[0].block_until_ready()
    return collectives(program)


FORWARD = cupynorm._operation.ForwardSpec(
    NORM,
    "bfloat16",
    None,
    None,
    "bfloat16",
    zero_centered=False,
    store_statistics=False,
    relu=False,
)

# Meshes, and how x is split on them: with whole rows, then with split rows.
WHOLE = [
    ((4,), P("a")),
    ((2, 2), P("a")),
    ((2, 2), P("a", "b")),
    ((2, 2), P(None, "b")),
    ((2, 2), P(("a", "b"))),
]
CUT = [((4,), P(None, None, "a")), ((2, 2), P("a", None, "b"))]

# How x, a residual and dy are split on a mesh of two axes.
OTHERWISE = [
    (P(), P("a"), P("a")),
    (P(), P("a"), P()),
    (P("a"), P(), P("a")),
    (P("a"), P("a", "b"), P("a", "b")),
    (P("a", "b"), P("a"), P(None, "b")),
    (P("a"), P(None, "b"), P("a")),
]

# Meshes, how x is split on them, and the shape of weight and bias and how they are split.
VECTORS = [
    ((4,), P("a"), EXAMPLES, P("a")),
    ((2, 2), P("a", "b"), EXAMPLES, P("a")),
    ((2, 2), P("a", "b"), HEADS, P("b")),
    ((2, 2), P(("a", "b")), HEADS, P()),
    ((4, 1), P("a", "b"), EXAMPLES, P("a")),
    ((2, 2), P("a", "b"), HEADS, P()),
    ((2, 2), P("a"), HEADS, P("b")),
]

ONE_OF_EACH = (
    with_a_mesh_set,
    made_outside_of_a_set_mesh,
    weights_alone_on_the_mesh,
    a_dy_made_outside_of_the_mesh,
    with_axes_of_one_device,
    with_relu,
    with_relu_over_two_axes,
    with_relu_and_a_bias_alone,
    eagerly,
    under_vmap,
    through_layers,
    a_stream_through_layers,
    second_derivatives,
    second_derivatives_by_forward_mode,
    forward_mode,
    quantized_rows,
    quantized_rows_under_vmap,
    quantized_rows_that_are_cut,
    amax_of_rows,
    quantized_from_float64,
)


def cases(kernels: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sizes, spec in WHOLE:
            yield (
                f"whole rows, {kind.name} {sizes} {spec}",
                functools.partial(with_named_shardings, sizes, kind, spec, P()),
            )
            yield (
                f"a residual, {kind.name} {sizes} {spec}",
                functools.partial(with_a_residual, sizes, kind, spec, spec),
            )
        for sizes, spec in CUT:
            yield (
                f"cut rows, {kind.name} {sizes} {spec}",
                functools.partial(with_named_shardings, sizes, kind, spec, P()),
            )
        yield (
            f"cut weight, {kind.name}",
            functools.partial(with_named_shardings, (4,), kind, P("a"), P("a")),
        )
        yield (
            f"cut weight along another axis, {kind.name}",
            functools.partial(with_a_weight_split_otherwise, kind),
        )
        over_one_axis = functools.partial(under_shard_map_over_one_axis, kind)
        yield f"shard_map over one axis, {kind.name}", functools.partial(over_one_axis, P("a"))
        yield f"split over the other, {kind.name}", functools.partial(over_one_axis, P("a", "b"))
        for function in ONE_OF_EACH:
            yield f"{function.__name__}, {kind.name}", functools.partial(function, kind)
    for kind, shardy in ((AxisType.Explicit, True), *((AxisType.Auto, s) for s in (True, False))):
        for specs in OTHERWISE:
            name = "a residual split otherwise"
            name = f"forward of {name}" if kind is AxisType.Explicit else name
            yield (
                f"{name}, {kind.name} {shardy} {specs}",
                functools.partial(with_a_residual_split_otherwise, kind, shardy, *specs),
            )
    # A part has each way among them: the kernels have one of five, and the formula one of eight.
    for i, one in enumerate(drawn()):
        if THOROUGH or (i % 5 == 2 if kernels else i % 8 == 5):
            yield f"drawn {i}", functools.partial(with_a_drawn_sharding, one)
    for tracked in (True, False):
        for within in (True, False):
            yield (
                f"forward_mode_under_shard_map, {tracked} {within}",
                functools.partial(forward_mode_under_shard_map, tracked, within),
            )
        yield (
            f"quantized_rows_under_shard_map, {tracked}",
            functools.partial(quantized_rows_under_shard_map, 4, tracked),
        )
        yield f"shard_map, {tracked}", functools.partial(under_shard_map, 4, tracked, False)
        yield (
            f"a residual under shard_map, {tracked}",
            functools.partial(with_a_residual_under_shard_map, tracked),
        )
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sizes, rows, shape, along in VECTORS:
            yield (
                f"vectors, {kind.name} {sizes} {rows} {shape} {along}",
                functools.partial(with_vectors, sizes, kind, rows, shape, along),
            )
        yield f"a vmap of vectors, {kind.name}", functools.partial(with_vectors_under_vmap, kind)
    for tracked, within in ((True, True), (True, False), (False, False)):
        yield (
            f"vectors under shard_map, {tracked} {within}",
            functools.partial(with_vectors_under_shard_map, tracked, within),
        )
    for i, one in enumerate(drawn_with_vectors()):
        # The kernels have each way, by one of the partitioners. The formula has every fourth.
        if THOROUGH or ((i // 2 + i) % 2 if kernels else i % 4 == 0):
            yield f"vectors drawn {i}", functools.partial(with_a_drawn_sharding, one)
    yield "vectors and uneven rows", functools.partial(with_vectors_and_uneven_rows, 4)
    yield "a residual and uneven rows", functools.partial(with_a_residual_and_uneven_rows, 4)
    yield (
        "quantized_rows_that_are_uneven",
        functools.partial(quantized_rows_that_are_uneven, 4),
    )
    yield "uneven rows", functools.partial(with_uneven_rows, 4)
    yield "gradient within shard_map", functools.partial(under_shard_map, 4, True, True)
    yield from fused_cases()
    if kernels:
        yield "control", control


def has_its_turn(name: str, kernels: bool) -> bool:
    """Return whether a program runs this kind of axes. The formula and the kernels share them."""
    kind = next((kind for kind in ("Auto", "Explicit") if kind in name), None)
    if THOROUGH or kind is None or name.startswith("split over the other, Auto"):
        return True
    return zlib.crc32(name.replace(kind, "").encode()) % 2 == ((kind == "Auto") != kernels)


def main(path: str) -> None:
    if path == "kernels":
        _kernels._providers["cpu"] = lambda: jax_plans
        _kernels._fused_providers["cpu"] = lambda: jax_passes
    report = {}
    for name, case in cases(path == "kernels"):
        if not has_its_turn(name, path == "kernels"):
            continue
        try:
            found = case()
            report[name] = found if isinstance(found, dict) else {"collectives": found}
        except Exception:
            report[name] = {"error": traceback.format_exc()}
    print(json.dumps({"devices": jax.device_count(), "cases": report}))


if __name__ == "__main__":
    main(sys.argv[1])
