"""Functions that JAX differentiates in both modes by rules: `jax.custom_vjp` with a forward mode.

`jax.custom_jvp` cannot stand in for it. Reverse mode transposes the formula of its rule, and JAX
drops the rule where the function is an inner part of a scan that is differentiated twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from cupynorm._operation import KINDS, Kind
from cupynorm.jax._operations import repeated
from cupynorm.jax._vectors import for_each

__all__ = ["Function", "Linear"]

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A function of arrays in tuples and dicts, and the rule of its derivative.

    The rule takes the arguments and their tangents, and returns the results and their tangents. A
    tangent of None is 0.
    """

    call: Callable[..., Any]
    jvp: Callable[[Any, Any], tuple[Any, Any]]

    def __call__(self, *arguments: Any) -> Any:
        program, results = jax.make_jaxpr(self.call, return_shape=True)(*arguments)
        operands, tree = jax.tree.flatten(arguments)
        of_results = jax.tree.structure(results)

        def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
            made, slopes = self.jvp(tree.unflatten(primals), tree.unflatten(tangents))
            return of_results.flatten_up_to(made), of_results.flatten_up_to(slopes)

        return of_results.unflatten(_function.bind(*operands, program=program, jvp=jvp))


_VECTORS = frozenset(name for name, kind in KINDS.items() if kind is Kind.VECTOR)


@dataclass(frozen=True)
class Linear:
    """A function of kept arrays and tangents, linear in these, whose results have x's shape.

    JAX may differentiate and batch `push`, which returns the results. It transposes the function to
    `pull` of the kept arrays and the results' cotangents. That returns those of the tangents, where
    "dx" is that of "x". None, or an absent name, stands for 0.
    """

    push: Callable[[Arrays, Arrays], Any]
    pull: Callable[[Arrays, Any], Arrays]
    dtypes: tuple[str | None, ...]  # of the results; None for absent ones
    vectors: frozenset[str] = _VECTORS  # which of the arrays are of that kind
    alike: bool = True  # whether all of these are many in a batch if one is

    def __call__(self, kept: Arrays, tangents: Arrays) -> Any:
        names = tuple(kept), tuple(tangents)
        made = _linear.bind(*kept.values(), *tangents.values(), function=self, names=names)
        return jax.tree.unflatten(self.tree, made)

    @property
    def tree(self) -> Any:
        """Which results are there."""
        return jax.tree.structure(self.dtypes)


_function, _linear = Primitive("cupynorm_function"), Primitive("cupynorm_linear")
_function.multiple_results = _linear.multiple_results = True


# ---- what JAX does with a function ---------------------------------------------------------------


def _call(*operands: Any, program: Any, jvp: Any) -> Any:
    return jaxpr_as_fun(program)(*operands)


def _jvp(primals: Any, tangents: Any, *, program: Any, jvp: Any) -> tuple[Any, Any]:
    made, slopes = jvp(list(primals), [None if isinstance(t, ad.Zero) else t for t in tangents])
    zeros = (
        ad.Zero(jax.typeof(a).to_tangent_aval()) if slope is None else slope
        for a, slope in zip(made, slopes, strict=True)
    )
    return made, list(zeros)


def _batch(operands: Any, axes: Any, *, program: Any, jvp: Any) -> tuple[Any, Any]:
    program = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), in_axes=tuple(axes)))(*operands)
    jvp = jax.vmap(jvp, in_axes=(list(axes), list(axes)))
    made = _function.bind(*operands, program=program, jvp=jvp)
    return made, len(made) * (0,)


_function.def_impl(_call)
_function.to_lojax = _call  # JAX 0.12 lowers by it, once all derivatives are taken
_function.def_abstract_eval(lambda *_, program, jvp: program.out_avals)
mlir.register_lowering(_function, mlir.lower_fun(_call))
ad.primitive_jvps[_function] = _jvp
batching.primitive_batchers[_function] = _batch


# ---- and with a linear function ------------------------------------------------------------------


def _split(names: Any, operands: Any) -> tuple[Arrays, Arrays]:
    of_kept, of_tangents = names
    return (
        dict(zip(of_kept, operands, strict=False)),
        dict(zip(of_tangents, operands[len(of_kept) :], strict=True)),
    )


def _push(*operands: Any, function: Linear, names: Any) -> Any:
    return jax.tree.leaves(function.push(*_split(names, operands)))


def _types(*operands: Any, function: Linear, names: Any) -> list[Any]:
    x = _split(names, operands)[0]["x"]
    return [x.update(dtype=jnp.dtype(dtype)) for dtype in jax.tree.leaves(function.dtypes)]


def _jvp_of_push(primals: Any, tangents: Any, **told: Any) -> Any:
    slopes = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_push, **told), primals, slopes)


def _transpose(cotangents: Any, *operands: Any, function: Linear, names: Any) -> list[Any]:
    kept, tangents = _split(names, operands)
    of_results = [None if isinstance(c, ad.Zero) else c for c in cotangents]
    found = function.pull(kept, function.tree.unflatten(of_results))
    return len(kept) * [None] + [found.get(f"d{name}") for name in tangents]


def _batch_linear(operands: Any, axes: Any, **told: Any) -> tuple[Any, Any]:
    function, (kept, tangents) = told["function"], told["names"]
    results, names = function.tree.num_leaves * (0,), (*kept, *tangents)
    many = {n for n, axis in zip(names, axes, strict=True) if axis is not None} & function.vectors
    is_alike = bool(many) and function.alike
    # Many tangents of one call have no kernel. Nor have many gradients of a bias without a weight.
    if all(axis is None for axis in axes[: len(kept)]) or (is_alike and "weight" not in kept):
        return jax.vmap(functools.partial(_push, **told), in_axes=tuple(axes))(*operands), results
    many = function.vectors if is_alike else many
    # The batch is a leading axis like others. So the transpose is one kernel.
    given = [a if i is None else jnp.moveaxis(a, i, 0) for a, i in zip(operands, axes, strict=True)]
    like = next(a for a, axis in zip(given, axes, strict=True) if axis is not None)
    x = kept.index("x")
    ndim = given[x].ndim - (axes[x] is not None)
    for i, (name, axis) in enumerate(zip(names, axes, strict=True)):
        if axis is None and (name in many or name not in function.vectors):
            given[i] = repeated(like, given[i], like.shape[0])
        if name in many:
            given[i] = for_each(given[i], ndim)
    return _linear.bind(*given, **told), results


_linear.def_impl(_push)
_linear.def_abstract_eval(_types)
mlir.register_lowering(_linear, mlir.lower_fun(_push))
ad.primitive_jvps[_linear] = _jvp_of_push
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch_linear
