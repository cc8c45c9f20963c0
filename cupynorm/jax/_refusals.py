"""Identities that refuse what JAX would refuse in other words, or not at all.

They can refuse only when a program is compiled: JAX traces slopes that it may transpose, and the
kernels of platforms that it may drop.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["in_reverse", "not_compiled"]


def in_reverse(array: Any) -> Any:
    """Return an array as it is. It can be differentiated in reverse only."""
    return _in_reverse.bind(array)


def not_compiled(array: Any, message: str) -> Any:
    """Return an array as it is. It can be traced and transposed, but not computed."""
    return _not_compiled.bind(array, message=message)


FORWARD_MODE = (
    "the norms of cupynorm.jax have no forward mode (jvp, jacfwd, linearize): use "
    "jacrev(jacrev(f)) for hessian(f)"
)


def _refuse(*_: Any, message: str) -> NoReturn:
    raise NotImplementedError(message)


_in_reverse, _not_compiled = Primitive("cupynorm_in_reverse"), Primitive("cupynorm_not_compiled")

_in_reverse.def_abstract_eval(lambda array: array)
_in_reverse.def_impl(lambda array: array)
mlir.register_lowering(_in_reverse, lambda _, array: [array])
batching.defvectorized(_in_reverse)
ad.defjvp(_in_reverse, lambda slope, _: not_compiled(slope, FORWARD_MODE))

_not_compiled.def_abstract_eval(lambda array, message: array)
_not_compiled.def_impl(_refuse)
mlir.register_lowering(_not_compiled, _refuse)
# JAX batches no slope that it transposes.
batching.primitive_batchers[_not_compiled] = _refuse
ad.deflinear2(_not_compiled, lambda cotangent, *_, message: [cotangent])
