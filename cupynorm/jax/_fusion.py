"""A norm of `cupynorm.fuse` as an operation that JAX may batch, and split over devices.

Its inputs are of two kinds. Those of x's shape are rows. All others are vectors, as weight and bias
are: they have as many axes as x, broadcast to it, and have gradients of their own shapes. Where no
kernel serves a pass, its steps are operations of jax.numpy around a norm of this package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

import cupynorm.jax
from cupynorm import _fuse, _fused_calls
from cupynorm._arrays import to_numpy
from cupynorm._driver import MOST_BLOCKS
from cupynorm._expressions import functions
from cupynorm._fuse import Fused, Given, Tools
from cupynorm._operation import BackwardSpec, ForwardSpec, Kind, Options
from cupynorm.jax import _formula, _kernels
from cupynorm.jax._derivatives import present, wide
from cupynorm.jax._operations import Operation, is_inside, repeated, split, split_as, varying_alike
from cupynorm.jax._rules import Function, Linear
from cupynorm.jax._vectors import as_rows, for_each, sum_to

__all__ = ["OPERATIONS", "Fusion", "Spec", "differentiable"]

Arrays = dict[str, Any]
INPUT = "in_"  # before the names of inputs, which may be those of other arrays

# ---- steps ---------------------------------------------------------------------------------------


def _cast(values: Any, dtype: str) -> Any:
    return _formula.cast(jnp.asarray(values), to_numpy(dtype))


def _stored(value: Any, dtype: str) -> Any:
    """Round a value, by an addition that is exact if the result is finite."""
    # Without the barrier, XLA may leave out a cast to a narrower dtype and back.
    rounded = jax.lax.optimization_barrier(_cast(value, dtype)).astype(value.dtype)
    return value + jax.lax.stop_gradient(rounded - value)


def _differentiable_norm(norm: str, x: Any, *vectors: Any, **options: Any) -> tuple[Any, Any, Any]:
    function = cupynorm.jax.rms_norm if norm == "rms_norm" else cupynorm.jax.layer_norm
    return function(x, *vectors, **options), None, None


# JAX differentiates these.
OPERATIONS = Tools(
    functions(
        jnp,
        erf=jax.scipy.special.erf,
        erfc=jax.scipy.special.erfc,
        # JAX would differentiate the formulas of these to NaN where exp overflows.
        sigmoid=jax.nn.sigmoid,
        softplus=jax.nn.softplus,
        abs=lambda a: a * jnp.sign(a),  # JAX's own has a derivative of 1 at 0
    ),
    widen=_cast,
    cast=_cast,
    copy=lambda array: array,
    number=lambda value, like: jnp.full((), float(value), like.dtype),
    broadcast=lambda values, like: jnp.broadcast_to(values, like.shape),
    stored=_stored,
    normalize=_differentiable_norm,
)

# What computes an operation: with its kernel wherever it is, or by its formula here.
Run = Callable[[Operation], Callable[..., Any]]


def _norm_by(
    run: Run,
    norm: Any,
    x: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float,
    axis: Any,
    zero_centered: bool,
) -> tuple[Any, Any, Any]:
    """Return y and the statistics."""
    options = Options(norm, len(axis), zero_centered, eps, training=True)
    arrays = {"x": x, "weight": weight, "bias": bias}
    spec = ForwardSpec.of(options, _dtypes(arrays))
    made = _computed(run, Operation(spec, options), arrays)
    return made["y"], made.get("mean"), made["rstd"]


def _gradients_by(
    run: Run,
    norm: Any,
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    *,
    eps: float,
    axis: Any,
    zero_centered: bool,
) -> tuple[Any, Any, Any]:
    """Return the gradients of x, weight and bias. Those of the latter are wide."""
    options = Options(norm, len(axis), zero_centered, eps)
    given = {"weight": weight, "bias": bias}
    arrays = _of_one_shape(x.shape, len(axis), given)
    arrays = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, **arrays}
    dtypes = _dtypes(arrays)
    of_bias = wide(dtypes["x"] or "", dtypes["bias"])
    spec = BackwardSpec.of(options, dtypes | {"dbias": of_bias})
    made = _computed(run, Operation(spec, options), arrays)
    sums = (
        None if array is None else _as_shape(made[f"d{name}"], array.shape)
        for name, array in given.items()
    )
    return made["dx"], *sums


def _dtypes(arrays: Arrays) -> dict[str, str | None]:
    return {name: None if array is None else array.dtype.name for name, array in arrays.items()}


def _computed(run: Run, operation: Operation, arrays: Arrays) -> Arrays:
    results = run(operation)(*(arrays[name] for name in operation.operands))
    return dict(zip(operation.results, results, strict=True))


def _of_one_shape(shape: tuple[int, ...], k: int, vectors: Arrays) -> Arrays:
    """Return weight and bias, widened, in the one shape that a backward pass gives gradients."""
    row, ones = shape[len(shape) - k :], (1,) * (len(shape) - k)
    given = {n: as_rows(a, len(shape)) for n, a in vectors.items() if a is not None}
    common = np.broadcast_shapes(*(array.shape for array in given.values()))
    if all(array.shape == ones + row for array in given.values()):
        given = {name: array.reshape(row) for name, array in given.items()}
    else:
        given = {name: jnp.broadcast_to(array, common) for name, array in given.items()}
        given = {"weight": jnp.ones_like(given["bias"])} | given if "bias" in given else given
    return dict.fromkeys(vectors) | given


def _as_shape(array: Any, shape: tuple[int, ...]) -> Any:
    return array.reshape(shape) if array.size == math.prod(shape) else sum_to(array, shape)


def _tools_by(run: Run) -> Tools:
    normalize, differentiate = (functools.partial(f, run) for f in (_norm_by, _gradients_by))
    return replace(OPERATIONS, normalize=normalize, differentiate=differentiate)


_BY_FORMULAS = _tools_by(lambda operation: operation.formula)
_BY_OPERATIONS = _tools_by(lambda operation: operation)


# ---- passes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A pass of a norm of `cupynorm.fuse`. Dtypes are given by name.

    `given`: the kinds of x, weight, bias and the inputs, by name. `constant`: the inputs that have
    no gradient. `outputs`: the dtypes of the outputs. `of_outputs`: which of these have gradients,
    in a backward pass.
    """

    fused: Fused
    compute: str
    given: tuple[tuple[str, Kind], ...]
    constant: tuple[str, ...]
    outputs: tuple[str, ...]
    store_statistics: bool = False
    of_outputs: tuple[int, ...] = ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return ("mean", "rstd") if self.fused.norm == "layer_norm" else ("rstd",)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The names of what has a gradient."""
        return tuple(name for name, _ in self.given if name not in self.constant)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what the pass reads."""
        names = tuple(name for name, _ in self.given)
        of_outputs = (f"dy_{k}" for k in self.of_outputs)
        return (*names, *self.statistics, *of_outputs) if self.of_outputs else names

    @property
    def writes(self) -> tuple[str, ...]:
        """The names of what the pass writes."""
        if self.of_outputs:
            return tuple(f"d{name}" for name in self.differentiated)
        outputs = (f"y_{k}" for k in range(len(self.outputs)))
        return (*outputs, *(self.statistics if self.store_statistics else ()))


def name_of_input(name: str) -> str:
    """Return what an input is called here, or in a kernel, by the name that the user gave it."""
    return name if name in ("x", "weight", "bias") else f"{INPUT}{name}"


class _Memory(_fused_calls.Shapes):
    """JAX's arrays, as `_fused_calls.arranged` takes them."""

    def cast(self, array: Any, dtype: str) -> Any:  # type: ignore[override]
        return array.astype(to_numpy(dtype))

    def expanded(self, array: Any, shape: tuple[int, ...]) -> Any:  # type: ignore[override]
        return jnp.broadcast_to(array, shape)


@dataclass(frozen=True)
class Fusion(Operation):
    """A pass of a norm of `cupynorm.fuse` over the last k axes."""

    spec: Spec  # type: ignore[assignment]  # it has what an Operation asks of one

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of its arrays by name."""
        kinds = dict(self.spec.given)
        outputs = {f"{d}y_{k}": Kind.ROWS for d in ("", "d") for k in range(self.count)}
        gradients = {f"d{name}": kind for name, kind in kinds.items()}
        return kinds | gradients | outputs | dict.fromkeys(self.spec.statistics, Kind.STATISTIC)

    @property
    def count(self) -> int:
        """How many outputs the norm has."""
        return len(self.spec.outputs)

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that have kernels."""
        return _kernels.fused_platforms()

    def named(self, operands: Any) -> Arrays:
        """Return the items of operands by name."""
        return dict(zip(self.operands, operands, strict=True))

    def shapes(self, operands: Any) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the results by name."""
        named = self.named(operands)
        x = named["x"]
        of_kind = {Kind.ROWS: x.shape, Kind.STATISTIC: x.shape[: len(x.shape) - self.options.k]}
        return {
            name: named[name[1:]].shape if name[1:] in named else of_kind[self.kinds[name]]
            for name in self.results
        }

    def without_padding(self, valid: dict[int, Any], local: Any) -> Any:
        """Return a device's operands without what lies outside the whole array.

        A step may be infinite where an input is 0. So the last row inside takes the place, with
        gradients of 0.
        """
        shape = self.x_of(local).shape

        def inside(name: str, array: Any) -> Any:
            # A vector that examples share may lack leading axes.
            lacks = len(shape) - array.ndim if self.kinds[name] is Kind.VECTOR else 0
            for i, count in valid.items():
                axis, n = i - lacks, shape[i]
                if axis >= 0 and array.shape[axis] == n:
                    places = jnp.minimum(jnp.arange(n), jnp.maximum(count - 1, 0))
                    array = jnp.take(array, places, axis=axis)
            if not name.startswith("dy_"):
                return array
            mask = is_inside(valid, shape)
            columns = jnp.expand_dims(mask, tuple(range(mask.ndim, array.ndim)))
            return jnp.where(columns, array, 0)

        return tuple(inside(*one) for one in zip(self.operands, local, strict=True))

    def __call__(self, *operands: Any) -> Any:
        return _batched(self)(*operands)

    # ---- by operations ----

    def formula(self, *operands: Any) -> Any:
        """Return the results as jax.numpy computes them."""
        return self._by_steps(_BY_FORMULAS, self.named(operands))

    def elsewhere(self, *operands: Any) -> Any:
        """Return the results by the norm's own operation, which has kernels."""
        return self._by_steps(_BY_OPERATIONS, self.named(operands))

    def outputs(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return the outputs, by operations that JAX may differentiate."""
        return self._applied(OPERATIONS, arrays)[0]

    def _applied(self, tools: Tools, arrays: Arrays) -> tuple[tuple[Any, ...], Any, Any]:
        spec, given, told = self.spec, self._given(arrays), self._told
        return spec.fused.apply(tools, given, told, spec.compute, spec.outputs)

    def _given(self, arrays: Arrays) -> Given:
        inputs = {name: arrays[name_of_input(name)] for name in self.spec.fused.inputs}
        return Given(arrays["x"], arrays.get("weight"), arrays.get("bias"), inputs)

    @property
    def _told(self) -> _fuse.Options:
        options = self.options
        return _fuse.Options(options.eps, options.axis, options.zero_centered)

    def _by_steps(self, tools: Tools, arrays: Arrays) -> Any:
        spec, x = self.spec, arrays["x"]
        if spec.of_outputs:
            of = [arrays.get(f"dy_{k}") for k in range(self.count)]
            told = self._given(arrays), self._told, spec.compute, spec.outputs, of
            found = spec.fused.gradients_of_elements(tools, *told)
            made = {
                f"d{name}": self._summed(found[name.removeprefix(INPUT)], x, arrays[name])
                for name in spec.differentiated
            }
        else:
            outputs, mean, rstd = self._applied(tools, arrays)
            made = {"mean": mean, "rstd": rstd}
            made |= {f"y_{k}": output for k, output in enumerate(outputs)}
        # An array of numbers alone varies over no axes of a surrounding shard_map.
        return tuple(varying_alike([made[name], x])[0] for name in self.results)

    def _summed(self, gradient: Any, x: Any, like: Any) -> Any:
        """Return a gradient in the shape and the dtype of what it is the gradient of."""
        if jnp.shape(gradient) != like.shape:
            gradient = sum_to(jnp.broadcast_to(gradient, x.shape), like.shape)
        return _cast(gradient, like.dtype.name)

    # ---- by kernels ----

    def arranged(self, arrays: Arrays) -> _fused_calls.Call | None:
        """Return the pass as kernels take it, None if they do not serve it."""
        spec, memory = self.spec, _Memory()
        of_outputs = [arrays.get(f"dy_{k}") for k in range(self.count)] if spec.of_outputs else []
        call = _fused_calls.arranged(
            *(memory, spec.fused, self._given(arrays), self._told, spec.compute, spec.outputs),  # type: ignore[arg-type]
            of_outputs,
        )
        if call is None or call.m > MOST_BLOCKS:
            return None
        inputs = tuple(
            replace(one, gradient=None) if name_of_input(one.name) in spec.constant else one
            for one in call.spec.inputs
        )
        return replace(call, spec=replace(call.spec, inputs=inputs))

    def is_served(self, operands: Any) -> bool:
        """Tell whether there is a kernel."""
        return self.arranged(self.named(operands)) is not None

    def kernel(self, platform: str, *operands: Any) -> Any:
        """Return the results as the kernels of a platform compute them."""
        arrays = self.named(operands)
        x, call = arrays["x"], self.arranged(arrays)
        assert call is not None  # noqa: S101 - a part of an array that a kernel serves
        k, spec = self.options.k, call.spec
        given = {f"{INPUT}x" if name == "x" else name: array for name, array in arrays.items()}
        for name, copies in call.copies.items():
            for copy in copies:
                given[name] = copy(given[name])

        def typed(shape: tuple[int, ...], dtype: str | None) -> Any:
            def made(x: Any) -> Any:
                return jnp.broadcast_to(x.ravel()[0].astype(to_numpy(dtype or "")), shape)

            return jax.eval_shape(made, x)

        if not spec.of_outputs:
            dtypes = {f"y_{i}": dtype for i, dtype in enumerate(spec.outputs)}
            dtypes |= dict.fromkeys(self.spec.statistics, spec.compute)
            shapes = self.shapes(operands)
            types = {name: typed(shapes[name], dtypes[name]) for name in self.results}
        else:
            of_rows = {one.name: one.gradient for one in spec.rows}
            column = (*x.shape[: x.ndim - k], *k * (1,))
            names = spec.differentiated
            types = {f"d_{n}": typed(x.shape, of_rows[n]) for n in names.rows}
            types |= {f"d_{n}": typed(column, spec.compute) for n in names.numbers}
            row = x.shape[x.ndim - k :]
            types |= {f"d_{n}": typed(row, dtype) for n, dtype in spec.sums_over_rows}
        numbers = {"eps": self.options.eps, "values": call.values}
        found = _kernels.call_fused(platform, spec, call.m, call.n, numbers, given, types)
        made = dict(zip(types, found, strict=True))
        if not spec.of_outputs:
            return found
        return tuple(
            _as_shape(made[f"d_{name.removeprefix(INPUT)}"], arrays[name].shape).astype(
                arrays[name].dtype
            )
            for name in self.spec.differentiated
        )


# ---- batched -------------------------------------------------------------------------------------


@functools.cache
def _batched(operation: Fusion) -> Any:
    def call(*operands: Any) -> Any:
        return split(operation, *operands)

    def rule(size: int, batched: list[bool], *operands: Any) -> tuple[Any, tuple[bool, ...]]:
        """Return the results of one call, for which the batch is a leading axis."""
        like, given, inserted = operands[batched.index(True)], [], {}
        of_x = operation.x_of(operands)
        ndim = of_x.ndim - operation.x_of(batched)
        for name, is_there, operand in zip(operation.operands, batched, operands, strict=True):
            array = operand
            # A vector may be shared, but if it has a gradient, it is one for each example.
            is_vector = operation.kinds[name] is Kind.VECTOR
            is_shared = not is_there and is_vector and f"d{name}" not in operation.results
            if not is_there and not is_shared:
                array = repeated(like, array, size)
            if is_vector and not is_shared:
                inserted[f"d{name}"] = ndim + 1 - array.ndim
                array = for_each(array, ndim)
            given.append(array)
        computed = operation if operation.is_served(given) else operation.elsewhere
        made = zip(operation.results, computed(*given), strict=True)
        results = tuple(
            jax.lax.squeeze(array, tuple(range(1, 1 + inserted.get(name, 0))))
            for name, array in made
        )
        return results, (True,) * len(results)

    batched = custom_vmap(call)
    batched.def_vmap(rule)
    return jax.jit(batched, inline=True)


# ---- differentiated ------------------------------------------------------------------------------


@functools.cache
def differentiable(operation: Fusion) -> Any:
    """Return a function of arrays by name and of their vectors, widened. It returns the outputs.

    In reverse, the first derivative is the backward pass. Forward mode and further derivatives are
    those of operations of jax.numpy around a norm. They are with respect to the widened vectors, as
    in `_derivatives.differentiable`. The forward pass reads vectors as given, and these count as
    constants.
    """
    spec = operation.spec
    storing = replace(operation, spec=replace(spec, store_statistics=True))

    def forward(operation: Fusion, arrays: Arrays) -> tuple[tuple[Any, ...], Arrays]:
        """Return the outputs, and the statistics by name."""
        made = operation.by_name(**arrays)
        return tuple(made.pop(f"y_{k}") for k in range(operation.count)), made

    def infer(arrays: Arrays, widened: Arrays) -> Any:
        return forward(operation, arrays)[0]

    def train(arrays: Arrays, widened: Arrays) -> Any:
        return forward(storing, arrays)

    def backward(arrays: Arrays, of_outputs: Arrays, stored: Arrays) -> Arrays:
        given = tuple(k for k in range(operation.count) if f"dy_{k}" in of_outputs)
        told = replace(operation, spec=replace(spec, of_outputs=given))
        named = arrays | of_outputs | stored
        operands = [named[name] for name in told.operands]
        computed = told if told.is_served(operands) else told.elsewhere
        return dict(zip(told.results, computed(*operands), strict=True))

    def infer_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (outputs, _), (slopes, _) = train_jvp(primals, tangents)
        return outputs, slopes

    def train_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (arrays, widened), (of_arrays, of_widened) = primals, tangents
        outputs, stored = trained(arrays, widened)
        along = {name: of_widened.get(name, of_arrays[name]) for name in spec.differentiated}
        slopes = pushed(arrays | widened | stored, present(along))
        # Nothing goes on through the statistics: see gradients_jvp.
        return (outputs, stored), (slopes, dict.fromkeys(stored))

    def push(kept: Arrays, tangents: Arrays) -> Any:
        primals = {name: kept[name] for name in tangents}
        return jax.jvp(lambda moved: operation.outputs(kept | moved), (primals,), (tangents,))[1]

    def pull(kept: Arrays, cotangents: Any) -> Arrays:
        # JAX takes a dy that is not split as y is, such as one that is not on y's Explicit mesh.
        of_outputs = {
            f"dy_{k}": split_as(kept["x"], of) for k, of in enumerate(cotangents) if of is not None
        }
        if not of_outputs:
            return {}
        stored = {name: kept[name] for name in spec.statistics}
        found: Arrays = gradients({n: kept[n] for n in spec.reads}, of_outputs, stored)
        return found

    def gradients_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # As functions of x, since the statistics were computed from it.
        arrays, of_outputs, _ = primals
        slopes = present(tangents[0]) | present(tangents[1])

        def formula(moved: Arrays) -> Arrays:
            own, of = ({n: moved.get(n, a) for n, a in part.items()} for part in primals[:2])
            outputs, pull_back = jax.vjp(
                lambda some: operation.outputs(own | some),
                {name: own[name] for name in spec.differentiated},
            )
            cotangents = (
                of.get(f"dy_{k}", jnp.zeros_like(output)) for k, output in enumerate(outputs)
            )
            (found,) = pull_back(tuple(cotangents))
            return {f"d{name}": found[name] for name in spec.differentiated}

        moved = {name: (arrays | of_outputs)[name] for name in slopes}
        # Until it is transposed, only what the formula reads is kept.
        _, made = jax.jvp(jax.checkpoint(formula), (moved,), (slopes,))
        return gradients(*primals), made

    trained, gradients = Function(train, train_jvp), Function(backward, gradients_jvp)
    vectors = frozenset(name for name, kind in spec.given if kind is Kind.VECTOR)
    pushed = Linear(push, pull, spec.outputs, vectors, alike=False)
    return jax.jit(Function(infer, infer_jvp), inline=True)
