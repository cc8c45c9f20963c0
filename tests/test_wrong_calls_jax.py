"""Wrong calls with JAX's arrays: each one's error, whole, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10.2")

import jax
import jax.numpy as jnp

import cupynorm
import cupynorm.jax
from cupynorm import reference

FOUR = "float64, float32, float16 or bfloat16"
X, W = np.ones((2, 3, 8), np.float32), np.ones(8, np.float32)
ROWS = cupynorm.Quantize("int8", "row")
BY_COLUMN = cupynorm.Quantize("int8", "block", block=128, column_major=True)

OF_BOTH: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda norm: norm([1.0]), TypeError, "x must be a JAX or NumPy array, got builtins.list"),
    (lambda norm: norm(None), TypeError, "x must be a JAX or NumPy array, got builtins.NoneType"),
    (
        lambda norm: norm(X, 1.0),
        TypeError,
        "weight must be a JAX or NumPy array, got builtins.float",
    ),
    (
        lambda norm: norm(X, W, "bias"),
        TypeError,
        "bias must be a JAX or NumPy array, got builtins.str",
    ),
    (lambda norm: norm(X.astype(np.int32)), TypeError, f"x.dtype must be {FOUR}, got int32"),
    (lambda norm: norm(X, W.astype(np.int8)), TypeError, f"weight.dtype must be {FOUR}, got int8"),
    (
        lambda norm: norm(X, np.ma.masked_less(W, 0)),
        TypeError,
        "weight must have no mask, which would be lost: pass weight.filled()",
    ),
    *(
        (
            lambda norm, name=name, shape=shape, axis=axis: norm(
                *(X, W)[: 2 if name == "bias" else 1], **{name: np.ones(shape)}, axis=axis
            ),
            ValueError,
            f"{name} must have the shape of x's normalized axes, {of_row}, or broadcast to x's "
            f"shape, (2, 3, 8); got {shape}",
        )
        for name in ("weight", "bias")
        for shape, axis, of_row in (
            ((4,), None, (8,)),
            ((5, 8), -1, (8,)),
            ((1, 1, 1, 8), -1, (8,)),
            ((3,), 1, (3, 1)),
        )
    ),
    (
        lambda norm: norm(X[..., :0]),
        ValueError,
        "x must have at least one element in each row, got shape (2, 3, 0)",
    ),
    (
        lambda norm: norm(X[:, :0], axis=1),
        ValueError,
        "x must have at least one element in each row, got shape (2, 0, 8)",
    ),
    (lambda norm: norm(X[0, 0, 0]), TypeError, "x must be a JAX or NumPy array, got numpy.float32"),
    (
        lambda norm: norm(jnp.zeros(())),
        ValueError,
        "x must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda norm: norm(X, eps=-1.0),
        ValueError,
        "eps must be a finite number of at least 0, got -1.0",
    ),
    (lambda norm: norm(X, eps=None), TypeError, "eps must be a real number, got None"),
    (
        lambda norm: norm(X, eps=jnp.float32(1e-6)),
        TypeError,
        "eps must be a real number, got Array(1.e-06, dtype=float32): pass float(eps)",
    ),
    (
        lambda norm: norm(X, axis=(0, 3)),
        ValueError,
        "axis must name axes of x, each once, such as -1 or (-2, -1); got (0, 3) for an x of 3 "
        "axes",
    ),
    (
        lambda norm: norm(X, axis="-1"),
        TypeError,
        "axis must be an int, a tuple of ints or None, got '-1'",
    ),
    (
        lambda norm: norm(X, zero_centered=True),
        ValueError,
        "zero_centered must be False without a weight, got True",
    ),
    (
        lambda norm: norm(X, W, zero_centered=1),
        TypeError,
        "zero_centered must be True or False, got 1",
    ),
    (
        lambda norm: norm(X, relu=(1, 0)),
        ValueError,
        "relu must be (lower, upper) with lower < upper as float32, got (1, 0)",
    ),
    (
        lambda norm: norm(X, relu=6),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got 6",
    ),
    (lambda norm: norm(X, out_dtype="int8"), TypeError, f"out_dtype must be {FOUR}, got int8"),
    (
        lambda norm: norm(X, residual=1.0),
        TypeError,
        "residual must be a JAX or NumPy array, got builtins.float",
    ),
    (
        lambda norm: norm(X, residual=X.astype(np.int32)),
        TypeError,
        f"residual.dtype must be {FOUR}, got int32",
    ),
    (
        lambda norm: norm(X, residual=X[0]),
        ValueError,
        "residual must have shape (2, 3, 8), got (3, 8)",
    ),
    (
        lambda norm: norm(X, residual=X, residual_dtype="int8"),
        TypeError,
        f"residual_dtype must be {FOUR}, got int8",
    ),
    (
        lambda norm: norm(X, residual_dtype="float32"),
        ValueError,
        "residual_dtype must be None without a residual, got float32",
    ),
    (
        lambda norm: norm([1.0], quantize=ROWS),
        TypeError,
        "x must be a JAX or NumPy array, got builtins.list",
    ),
    (
        lambda norm: norm(X.astype(np.int32), quantize=ROWS),
        TypeError,
        f"x.dtype must be {FOUR}, got int32",
    ),
    (
        lambda norm: norm(X, residual=X[0], quantize=ROWS),
        ValueError,
        "residual must have shape (2, 3, 8), got (3, 8)",
    ),
    (
        lambda norm: norm(X, quantize="int8"),
        TypeError,
        "quantize must be a cupynorm.Quantize or None, got 'int8'",
    ),
    (
        lambda norm: norm(X, quantize=cupynorm.Quantize("int8", W[:1].astype(np.float16))),
        TypeError,
        "quantize.scale.dtype must be float32, got float16",
    ),
    (
        lambda norm: norm(X, quantize=BY_COLUMN),
        ValueError,
        "quantize.column_major must be False for JAX arrays, which have no strides; got True",
    ),
    (
        lambda norm: norm(X, quantize=ROWS, out_dtype="float16"),
        ValueError,
        "out_dtype must be None with quantize, which has via; got float16",
    ),
]


def traced(norm: Any) -> Any:
    """Return the norm as a program that is compiled, unless an array is none of NumPy's."""

    def call(*arrays: Any, **options: Any) -> Any:
        if any(type(array) is not np.ndarray for array in arrays):
            return norm(*arrays, **options)
        return jax.jit(lambda *arrays: norm(*arrays, **options))(*arrays)

    return call


@pytest.mark.parametrize("norm", [cupynorm.jax.rms_norm, cupynorm.jax.layer_norm])
@pytest.mark.parametrize("way", [lambda norm: norm, traced], ids=["as it is", "traced"])
@pytest.mark.parametrize(("call", "error", "message"), OF_BOTH)
def test_a_wrong_call_is_told_what_is_wrong(
    call: Callable[[Any], Any],
    error: type[Exception],
    message: str,
    way: Any,
    norm: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(cupynorm.jax, "differentiable")
    with pytest.raises(error) as raised:
        call(way(norm))
    assert (raised.type, str(raised.value)) == (error, message)


@pytest.mark.parametrize("dtype", [">f4", "g", "O", "M8[s]", "U1"])
def test_a_dtype_that_jax_has_not(dtype: str) -> None:
    lacks = np.ones(8, "i8").astype(dtype)
    gated = cupynorm.fused.rms_norm_gated
    for name, call in (
        ("x", lambda: cupynorm.jax.rms_norm(lacks)),
        ("weight", lambda: cupynorm.jax.layer_norm(X, lacks)),
        ("z", lambda: gated(jnp.asarray(X), None, np.broadcast_to(lacks, X.shape))),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == f"{name}.dtype must be one that JAX has, got {lacks.dtype}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: cupynorm.rms_norm(x, out=x),
            "out must be None for JAX arrays, which are immutable",
        ),
        (
            lambda x: cupynorm.rms_norm_backward(x, x, x[0], x[:, 0], dweight=x[0]),
            "dweight must be None for JAX arrays, which are immutable",
        ),
        (
            lambda x: cupynorm.rms_norm(x, W),
            "weight must be a JAX array, as the other arrays of the call are; got numpy.ndarray",
        ),
        (lambda x: cupynorm.unpack_bitmask(x, 8), "bitmask.dtype must be uint8, got float32"),
    ],
)
def test_cupynorms_own_functions(
    call: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jnp.asarray(X)
    monkeypatch.delattr(reference, "compute")
    with pytest.raises(TypeError) as raised:
        call(x)
    assert str(raised.value) == message


def test_their_arrays_have_no_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.asarray(X)
    monkeypatch.delattr(reference, "compute")
    with pytest.raises(ValueError, match="column_major") as raised:
        cupynorm.rms_norm(x, quantize=BY_COLUMN)
    assert str(raised.value) == (
        "quantize.column_major must be False for JAX arrays, which have no strides; got True"
    )
