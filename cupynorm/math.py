"""Functions for the prologues and epilogues of `cupynorm.fuse`.

They take the arguments of such a function, expressions of these, and numbers. Each is safe where a
formula of other functions would overflow or lose digits. A NaN stays a NaN. Derivatives at a kink
are those of torch and JAX, with one exception: at its bounds, `clip` passes nothing on to x.
"""

from __future__ import annotations

import math as _math
from typing import Any

from cupynorm._expressions import Expression, as_condition, as_expression

__all__ = [
    "abs",
    "clip",
    "erf",
    "exp",
    "gelu",
    "log",
    "maximum",
    "minimum",
    "relu",
    "sigmoid",
    "silu",
    "softplus",
    "sqrt",
    "tanh",
    "where",
]


def _made(operation: str, **values: Any) -> Any:
    """Return a value that an operation makes of others, by their names in messages."""
    operands = _expressions(**values)
    return operands[0].builder.made(operation, *operands)


def _expressions(**values: Any) -> list[Any]:
    found = [value for value in values.values() if isinstance(value, Expression)]
    builder = found[0].builder if found else None
    return [as_expression(name, value, builder) for name, value in values.items()]


def abs(x: Any) -> Any:
    """Return the absolute value of x. Its derivative at 0 is 0."""
    return _made("abs", x=x)


def clip(x: Any, lower: Any, upper: Any) -> Any:
    """Return x, at least `lower` and at most `upper`. At a bound, x has no gradient."""
    x, lower, upper = _expressions(x=x, lower=lower, upper=upper)
    return where(x >= upper, upper, where(x <= lower, lower, x))


def erf(x: Any) -> Any:
    """Return the error function of x."""
    return _made("erf", x=x)


def exp(x: Any) -> Any:
    """Return e to the power of x."""
    return _made("exp", x=x)


def gelu(x: Any, approximate: str = "none") -> Any:
    """Return x times the share of a normal distribution that is below x.

    With ``approximate="tanh"`` it is ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``.
    The source of both is Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415.
    """
    if approximate == "none":
        return x * _made("normal_cdf", x=x)
    if approximate == "tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 * u
        (x,) = _expressions(x=x)
        return x * sigmoid(2 * _math.sqrt(2 / _math.pi) * (x + 0.044715 * x**3))
    raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")


def log(x: Any) -> Any:
    """Return the natural logarithm of x."""
    return _made("log", x=x)


def maximum(x: Any, other: Any) -> Any:
    """Return the larger of two values. Where they are equal, each has half of the gradient."""
    return _made("maximum", x=x, other=other)


def minimum(x: Any, other: Any) -> Any:
    """Return the smaller of two values. Where they are equal, each has half of the gradient."""
    return _made("minimum", x=x, other=other)


def relu(x: Any) -> Any:
    """Return x where it is positive, and 0 elsewhere. Its derivative at 0 is 0."""
    (x,) = _expressions(x=x)
    return where(x <= 0, 0, x)


def sigmoid(x: Any) -> Any:
    """Return ``1 / (1 + exp(-x))``."""
    return _made("sigmoid", x=x)


def silu(x: Any) -> Any:
    """Return ``x * sigmoid(x)``, also called swish."""
    (x,) = _expressions(x=x)
    return x * sigmoid(x)


def softplus(x: Any) -> Any:
    """Return ``log(1 + exp(x))``."""
    return _made("softplus", x=x)


def sqrt(x: Any) -> Any:
    """Return the square root of x."""
    return _made("sqrt", x=x)


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of x."""
    return _made("tanh", x=x)


def where(condition: Any, x: Any, other: Any) -> Any:
    """Return x where a condition holds, and `other` elsewhere.

    A condition is made of comparisons, with ``&``, ``|`` and ``~`` between them, or is an input of
    bools. Both sides are computed. If the one that is not taken has an infinite slope or is NaN
    there, so is the gradient, as with torch's and JAX's own `where`.
    """
    held = as_condition(condition)
    values = (as_expression(n, v, held.builder) for n, v in (("x", x), ("other", other)))
    return held.builder.made("where", held, *values)
