"""Programs over four virtual CPU devices: are they right, and what do their devices exchange?

Run as a script by test_jax_sharding.py, which sets how many devices there are; writes JSON. With
the argument "kernels", NumPy behind XLA's FFI takes the place of the formula.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_plans
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import DTYPES, make_values

import cupynorm.jax
from cupynorm import NormBackward, reference, testing
from cupynorm.jax import _kernels
from cupynorm.jax._operations import Forward

NORM = "layer_norm"
SHAPE = (8, 6, 64)
# bfloat16 would show a sum over devices in anything narrower than float32.
X, DY = (make_values("normal", SHAPE, DTYPES["bfloat16"], seed) for seed in (1, 2))
WEIGHT, BIAS = (make_values("normal", SHAPE[-1:], DTYPES["bfloat16"], seed) for seed in (3, 4))
STORED = reference.layer_norm_forward(X, WEIGHT, BIAS)

norm = cupynorm.jax.layer_norm


def step(x: Any, weight: Any, bias: Any, dy: Any, norm: Any = norm) -> Any:
    y, pull_back = jax.vjp(norm, x, weight, bias)
    return y, *pull_back(dy)


def check(results: Any) -> None:
    y, *gradients = (np.asarray(result) for result in results)
    weight, bias = (a.astype(d.dtype) for a, d in zip((WEIGHT, BIAS), gradients[1:], strict=True))
    testing.check_forward(NORM, y, X, weight, bias, eps=1e-5)
    given = (DY, X, weight, STORED.mean, STORED.rstd)
    testing.check_backward(NORM, NormBackward(*gradients), *given, bias=bias)


COLLECTIVE = re.compile(
    r"= (\([^)]*\)|\S+) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def collectives(compiled: Any) -> list[tuple[str, list[str]]]:
    """Return what devices exchange: each operation, and the types of what it yields."""
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
    """Data over one axis, parameters over another: y lies as x does."""
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


def eagerly(kind: AxisType) -> Any:
    check(step(*put(mesh_of((2, 2), kind), P("a", "b"), P())))
    return []


def with_relu(kind: AxisType, normalized: tuple[int, ...] = SHAPE[-1:]) -> Any:
    """The gradient of a clamped norm, against the same on one device, in float32."""
    arrays = [
        a.astype(np.float32).reshape(*a.shape[:-1], *normalized) for a in (X, WEIGHT, BIAS, DY)
    ]
    clamped = functools.partial(norm, axis=tuple(range(-len(normalized), 0)), relu=(0.0, 1.0))
    mesh = mesh_of((2, 2), kind)
    split = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(arrays, (P("a", "b"), P(), P(), P("a", "b")), strict=True)
    ]
    program = jax.jit(functools.partial(step, norm=clamped)).lower(*split).compile()
    for one, other in zip(program(*split), step(*arrays, norm=clamped), strict=True):
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
    # Untracked, JAX sums the gradients over the devices itself, in the dtype of what it is given.
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
    """The other axis of the mesh is as Auto or Explicit within it as without."""
    mesh = mesh_of((2, 2), kind)
    specs = {"in_specs": (P("a"), P(), P()), "out_specs": P("a"), "axis_names": {"a"}}
    split = jax.shard_map(norm, mesh=mesh, **specs)
    return compiled(functools.partial(step, norm=split), *put(mesh, x, P()))


def through_layers(kind: AxisType) -> Any:
    """Rematerialized layers in a scan, against the same on one device, in float32."""
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
    gradient = jax.grad(loss, (0, 1))
    program = jax.jit(gradient).lower(*arguments).compile()
    for split, whole in zip(program(*arguments), gradient(x, weights), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)
    return collectives(program)


def second_derivatives(kind: AxisType) -> Any:
    x, weight = np.asarray(X, np.float32), np.asarray(WEIGHT, np.float32)

    def slope(x: Any, weight: Any) -> Any:
        gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(norm(*a))), (0, 1))(x, weight)
        return sum(jnp.sum(jnp.square(g)) for g in gradients)

    mesh = mesh_of((4,), kind)
    arguments = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("a")), (weight, P()))]
    curvature = jax.grad(slope, (0, 1))
    program = jax.jit(curvature).lower(*arguments).compile()
    for split, whole in zip(program(*arguments), curvature(x, weight), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-3, atol=1e-3)
    return collectives(program)


def control() -> Any:
    """The kernel's call alone, of which XLA knows nothing: it must gather x to be right."""
    (x, *_) = put(mesh_of((4,), AxisType.Auto), P("a"), P())
    forward = Forward(FORWARD, 1, 1e-5)
    program = jax.jit(lambda x: forward.kernel("cpu", x)).lower(x).compile()
    program(x)[0].block_until_ready()
    return collectives(program)


FORWARD = cupynorm._spec.ForwardSpec(
    NORM,
    "bfloat16",
    None,
    None,
    "bfloat16",
    zero_centered=False,
    store_statistics=False,
    relu=False,
)

# Meshes, and how x lies on them with whole rows; then with rows that are split.
WHOLE = [
    ((4,), P("a")),
    ((2, 2), P("a")),
    ((2, 2), P("a", "b")),
    ((2, 2), P(None, "b")),
    ((2, 2), P(("a", "b"))),
]
CUT = [((4,), P(None, None, "a")), ((2, 2), P("a", None, "b"))]


ONE_OF_EACH = (
    with_a_mesh_set,
    with_relu,
    with_relu_over_two_axes,
    eagerly,
    under_vmap,
    through_layers,
    second_derivatives,
)


def cases(kernels: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sizes, spec in WHOLE:
            yield (
                f"whole rows, {kind.name} {sizes} {spec}",
                functools.partial(with_named_shardings, sizes, kind, spec, P()),
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
    for tracked in (True, False):
        yield f"shard_map, {tracked}", functools.partial(under_shard_map, 4, tracked, False)
    yield "gradient within shard_map", functools.partial(under_shard_map, 4, True, True)
    if kernels:
        yield "control", control


def main(path: str) -> None:
    if path == "kernels":
        _kernels._providers["cpu"] = lambda: jax_plans
    report = {}
    for name, case in cases(path == "kernels"):
        try:
            report[name] = {"collectives": case()}
        except Exception:
            report[name] = {"error": traceback.format_exc()}
    print(json.dumps({"devices": jax.device_count(), "cases": report}))


if __name__ == "__main__":
    main(sys.argv[1])
