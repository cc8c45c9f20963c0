"""Wrong calls of the public functions: each one's error, whole, before anything is computed.

`test_wrong_calls_torch` and `test_wrong_calls_jax` have those of the two faces.

The first table names an argument by its parameter, and applies to every function that has the
parameter. The others have a call a row.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from correct_calls import ARRAYS, BACKWARD, FORWARD, SHAPE, correct, parameters, zeros

import cupynorm
from cupynorm import reference, testing

FOUR = "float64, float32, float16 or bfloat16"
OF_CUPYNORM = FORWARD + BACKWARD
OF_REFERENCE = tuple(getattr(reference, function.__name__) for function in OF_CUPYNORM)


# ---- NumPy arrays --------------------------------------------------------------------------------


def read_only(*shape: int) -> np.ndarray:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Wrong:
    """Changes to a correct call, and the error that they cause in these functions."""

    changes: dict[str, Any]
    error: type[Exception]
    message: str
    functions: tuple[Callable[..., Any], ...] = OF_CUPYNORM + OF_REFERENCE

    def __str__(self) -> str:
        shown = (
            f"{name}:{value.dtype.str}{list(value.shape)}"
            if isinstance(value, np.ndarray)
            else f"{name}={value!r}"
            for name, value in self.changes.items()
        )
        return ",".join(shown)[:80]


def wrong(error: type[Exception], message: str, **changes: Any) -> Wrong:
    return Wrong(changes, error, message)


def quantized(error: type[Exception], message: str, **changes: Any) -> Wrong:
    changes = {"quantize": cupynorm.Quantize("int8", "row"), "out": None} | changes
    return Wrong(changes, error, message, OF_CUPYNORM)


NO_ARRAYS = {"builtins.list": [1.0, 2.0], "builtins.float": 1.0, "builtins.NoneType": None}
ANY_ARRAY = (
    "a NumPy or CuPy array, a torch tensor, a JAX array (within jit and grad, cupynorm.jax has the "
    "norms), or one of another library with __dlpack__ and a from_dlpack function"
)
ALIKE = "a NumPy array, as the other arrays of the call are"
SUMS = "dweight", "dbias"
IN_PART = zeros(6)
FIRST = zeros(24)
NAMED = "axis must name axes of x, each once, such as -1 or (-2, -1)"

WRONG = [
    # not an array
    *(
        Wrong({"x": value}, TypeError, f"x must be {expected}; got {kind}", functions)
        for kind, value in (NO_ARRAYS | {"numpy.float32": np.float32(1)}).items()
        for expected, functions in {ANY_ARRAY: OF_CUPYNORM, "a NumPy array": OF_REFERENCE}.items()
    ),
    *(
        wrong(TypeError, f"{name} must be {ALIKE}; got {kind}", **{name: value})
        for name in ARRAYS
        for kind, value in NO_ARRAYS.items()
        if name not in ("x", "bias") and (value is not None or name in ("dy", "mean", "rstd"))
    ),
    *(
        Wrong(
            {"bias": value},
            TypeError,
            f"bias must be {besides}{ALIKE}; got {kind}",
            tuple(
                f for f in OF_CUPYNORM + OF_REFERENCE if ("dy" in parameters(f)) == bool(besides)
            ),
        )
        for kind, value in {"builtins.list": [1.0], "builtins.int": 1}.items()
        for besides in ("", "True, False, None or ")
    ),
    *(
        wrong(
            TypeError,
            f"{name} must have no mask, which would be lost: pass {name}.filled()",
            **{name: np.ma.array(zeros(*SHAPE))},
        )
        for name in ARRAYS
    ),
    # dtypes
    *(
        wrong(
            TypeError,
            f"{name}.dtype must be {FOUR}, got {dtype}",
            **{name: zeros(*shape, dtype=dtype)},
        )
        for name, shape in {
            **dict.fromkeys(("x", "dy", "residual", "dresidual_out"), SHAPE),
            **dict.fromkeys(("out", "residual_out"), SHAPE),
            **{"weight": (4,), "bias": (4,)},
        }.items()
        for dtype in ("int32", "bool", "complex64", ">f4", "float8_e4m3fn")
    ),
    wrong(
        TypeError,
        f"x.dtype must be {FOUR}, got (numpy.record, [('f0', '<f4'), ('f1', '<f4')])",
        x=np.zeros(4, "f4,f4").view(np.recarray),
    ),
    *(
        wrong(
            TypeError,
            f"{name}.dtype must be float16, got float32",
            **{name: zeros(*SHAPE), f"{name.removesuffix('_out')}_dtype": "float16"},
        )
        for name in ("dx", "residual_out")
    ),
    wrong(
        TypeError, "out.dtype must be float16, got float32", out=zeros(*SHAPE), out_dtype="float16"
    ),
    *(
        wrong(
            TypeError,
            f"{name}.dtype must be float32, got {dtype}",
            **{name: zeros(*SHAPE[:ndim], dtype=dtype)},
        )
        for name, ndim in {"dx": 3, "mean": 2, "rstd": 2}.items()
        for dtype in ("float64", "float16")
    ),
    wrong(TypeError, "dx.dtype must be float32, got >f4", dx=zeros(*SHAPE, dtype=">f4")),
    *(
        wrong(TypeError, f"{name} must be {FOUR}, got {dtype}", **{name: dtype})
        for name in ("out_dtype", "residual_dtype", "dx_dtype", "dresidual_dtype")
        for dtype in ("int32", np.int8, int, "float8_e4m3fn", ">f4", "half a float", 1.5, [1])
    ),
    *(
        wrong(TypeError, f"out_dtype must be {FOUR}, got {dtype}", out_dtype=dtype)
        for dtype in (("f4", 2), "i4,(")
    ),
    # a residual's, without one
    wrong(
        ValueError,
        f"residual_out must be None without a residual, got an array of shape {SHAPE}",
        residual=None,
    ),
    wrong(
        ValueError,
        "residual_dtype must be None without a residual, got float32",
        residual=None,
        residual_out=None,
        residual_dtype="float32",
    ),
    # quantized
    quantized(
        TypeError, "quantize must be a cupynorm.Quantize or None, got 'int8'", quantize="int8"
    ),
    quantized(ValueError, "out must be None with quantize, got a ndarray", out=zeros(*SHAPE)),
    quantized(
        ValueError,
        "out_dtype must be None with quantize, which has via; got float16",
        out_dtype="float16",
    ),
    quantized(
        ValueError,
        "axis must be the last one if scale is 'block', got (1, 2)",
        quantize=cupynorm.Quantize("int8", "block", block=128),
        axis=(1, 2),
    ),
    quantized(
        TypeError,
        "quantize.scale.dtype must be float32, got float64",
        quantize=cupynorm.Quantize("int8", zeros(1, dtype="float64")),
    ),
    quantized(TypeError, f"x.dtype must be {FOUR}, got int32", x=zeros(*SHAPE, dtype="int32")),
    quantized(ValueError, f"residual must have shape {SHAPE}, got (2, 3)", residual=zeros(2, 3)),
    # shapes
    wrong(
        ValueError,
        "x must have at least one axis, got a 0-dimensional array",
        **{"x": zeros(), "weight": None, "bias": None},
    ),
    *(
        wrong(ValueError, f"{NAMED}; got {axis} for an x of 0 axes", x=zeros(), axis=axis)
        for axis in (0, -1)
    ),
    *(
        wrong(
            ValueError,
            f"x must have at least one element in each row, got shape {shape}",
            x=zeros(*shape),
            axis=axis,
        )
        for shape, axis in [
            *(((3, 0), None), ((3, 0), -1), ((3, 0, 4), (-2, -1)), ((0, 3), 0), ((2, 0, 3), 1))
        ]
    ),
    *(
        wrong(
            ValueError,
            f"{name} must have the shape of x's normalized axes, {of_row}, or broadcast to x's "
            f"shape, {SHAPE}; got {shape}",
            **{"weight": None} | {name: zeros(*shape), "axis": axis},
        )
        for name in ("weight", "bias")
        for axis, of_row, shapes in [
            *((axis, (4,), ((3,), (5, 4), (4, 3))) for axis in (None, -1)),
            (-1, (4,), ((0,), (1, 1, 1, 4), (2, 3, 4, 1), (1, 2, 3, 4))),
            ((-2, -1), (3, 4), ((3,), (12,), (2, 4))),
            (1, (3, 1), ((3,), (2, 1))),
            (0, (2, 1, 1), ((2,), (2, 1), (1, 2, 1, 1))),
            ((0, 2), (2, 1, 4), ((2, 4), (4, 2))),
        ]
        for shape in shapes
    ),
    *(
        # Shapes that NumPy would broadcast are wrong too.
        wrong(ValueError, f"{name} must have shape {SHAPE}, got {shape}", **{name: zeros(*shape)})
        for name in ("dy", "out", "dx", "residual", "residual_out", "dresidual_out")
        for shape in ((2, 4, 3), (3, 4), ())
    ),
    *(
        wrong(ValueError, f"{name} must have shape (2, 3), got {shape}", **{name: zeros(*shape)})
        for name in ("mean", "rstd")
        for shape in [(2,), (2, 3, 1), (3, 2), ()]
    ),
    Wrong(
        {"axis": (-2, -1), "weight": None, "bias": True},
        ValueError,
        "rstd must have shape (2,), got (2, 3)",
        (cupynorm.rms_norm_backward, reference.rms_norm_backward),
    ),
    # axis
    *(
        wrong(TypeError, f"axis must be an int, a tuple of ints or None, got {axis!r}", axis=axis)
        for axis in (-1.0, (-1.0,), "-1", "", b"", b"\x01", {-1}, True, (True,), (1, True))
    ),
    *(
        wrong(ValueError, f"{NAMED}; got {axis!r} for an x of 3 axes", axis=axis)
        for axis in ((-1, -1), (-1, 2), (0, -3, 1), (), [], 3, -4, (0, 3), (-4, -3, -2, -1))
    ),
    # options
    *(
        wrong(ValueError, f"eps must be a finite number of at least 0, got {eps!r}", eps=eps)
        for eps in (-1e-6, math.nan, math.inf, -math.inf, 10**400)
    ),
    *(
        wrong(ValueError, f"eps must be 0 or a normal float32 number, got {eps!r}", eps=eps)
        for eps in (1e-40, 1e39)
    ),
    *(
        wrong(TypeError, f"eps must be a real number, got {eps!r}", eps=eps)
        for eps in ("1e-6", None, 1j, [1e-6], True)
    ),
    wrong(
        TypeError,
        "eps must be a real number, got array(1.e-06): pass float(eps)",
        eps=np.array(1e-6),
    ),
    wrong(
        ValueError,
        "zero_centered must be False without a weight, got True",
        zero_centered=True,
        weight=None,
    ),
    *(
        wrong(TypeError, f"zero_centered must be True or False, got {value!r}", zero_centered=value)
        for value in (1, 0, None, "no")
    ),
    *(
        wrong(
            TypeError,
            f"relu must be a pair of real numbers (lower, upper) or None, got {relu!r}",
            relu=relu,
        )
        for relu in (True, 6, 6.0, (), (0,), (0, 1, 2), "06", ("0", "6"), (0, None), (False, True))
    ),
    wrong(
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got (0, array(6.)): pass "
        "float(...) of each",
        relu=(0, np.array(6.0)),
    ),
    *(
        wrong(
            ValueError,
            f"relu must be (lower, upper) with lower < upper as float32, got {relu}",
            relu=relu,
        )
        for relu in [
            *((6, 0), (1.0, 1.0), (math.nan, 6), (0, math.nan), (math.inf, math.inf)),
            (0, -(10**400)),
            (1, 1 + 1e-9),  # as float32
        ]
    ),
    # the bitmask of the backward functions
    *(
        wrong(
            TypeError,
            f"bitmask.dtype must be uint8, got {dtype}",
            bitmask=zeros(2, 3, 1, dtype=dtype),
        )
        for dtype in ("bool", "int8", "float32")
    ),
    *(
        wrong(
            ValueError,
            f"bitmask must have shape (2, 3, 1), got {shape}",
            bitmask=zeros(*shape, dtype="uint8"),
        )
        for shape in [SHAPE, (2, 3), (2, 3, 2), (6, 1), ()]
    ),
    wrong(
        ValueError,
        "bitmask must have shape (2, 2), got (2, 3, 1)",
        **{"axis": (-2, -1), "weight": None, "bias": True, "bitmask": zeros(2, 3, 1, dtype="u1")},
        **{name: zeros(2) for name in ("mean", "rstd")},
    ),
    # outputs
    *(
        wrong(
            ValueError,
            f"{name} must be writable, got a read-only array",
            **{name: read_only(*SHAPE)},
        )
        for name in ("out", "dx", "residual_out")
    ),
    wrong(
        ValueError,
        "out must be writable, got a read-only array",
        out=np.broadcast_to(zeros(4), SHAPE),
    ),
    wrong(
        ValueError,
        "dx must not overlap itself; got strides (48, 0, 4) for shape (2, 3, 4) of 4 bytes",
        dx=np.lib.stride_tricks.as_strided(zeros(24), SHAPE, (48, 0, 4)),
    ),
    wrong(
        ValueError,
        "residual_out must be another array than out, got the same memory",
        **dict.fromkeys(("out", "residual_out"), zeros(*SHAPE)),
    ),
    # places for sums, and what is added to
    *(
        wrong(TypeError, f"{name} must be {ALIKE}; got {kind}", **{name: value})
        for name in SUMS
        for kind, value in NO_ARRAYS.items()
        if value is not None
    ),
    *(
        wrong(
            TypeError,
            f"{name} must have no mask, which would be lost: pass {name}.filled()",
            **{name: np.ma.array(zeros(4))},
        )
        for name in SUMS
    ),
    *(
        wrong(
            TypeError, f"{name}.dtype must be {FOUR}, got {dtype}", **{name: zeros(4, dtype=dtype)}
        )
        for name in SUMS
        for dtype in ("int32", "bool", ">f4", "float8_e4m3fn")
    ),
    *(
        wrong(ValueError, f"{name} must have shape (4,), got {shape}", **{name: zeros(*shape)})
        for name in SUMS
        for shape in ((3,), (1,), (1, 4), (), SHAPE)
    ),
    *(
        wrong(
            ValueError,
            f"{name} must have shape (3, 1), got {shape}",
            **{"axis": 1, "weight": zeros(3, 1), "bias": True, name: zeros(*shape)},
        )
        for name in SUMS
        for shape in ((3,), (1, 3, 1), (1, 3), (2, 3, 4))
    ),
    *(
        wrong(
            ValueError,
            "dbias must have shape (3, 1), got (4,)",
            **{"axis": 1, "weight": None, "bias": True, "dbias": zeros(4), name: None},
        )
        for name in ("dx", "bitmask")
    ),
    wrong(
        ValueError,
        "dweight must be None without a weight, got an array of shape (4,)",
        weight=None,
        dweight=zeros(4),
    ),
    *(
        wrong(
            ValueError,
            "dbias must be None unless bias is True or an array, got an array of shape (4,)",
            bias=bias,
            dbias=zeros(4),
        )
        for bias in (False, None)
    ),
    *(
        wrong(ValueError, f"{name} must be writable, got a read-only array", **{name: read_only(4)})
        for name in SUMS
    ),
    *(
        wrong(
            ValueError,
            f"{name} must not overlap itself; got strides (0,) for shape (4,) of 4 bytes",
            **{name: np.lib.stride_tricks.as_strided(zeros(4), (4,), (0,))},
        )
        for name in SUMS
    ),
    wrong(
        ValueError,
        "dbias must be another array than dweight, got the same memory",
        **dict.fromkeys(SUMS, zeros(4)),
    ),
    wrong(
        ValueError,
        "dbias must be another array than dweight, got the same memory",
        **{name: IN_PART[2 * i :][:4] for i, name in enumerate(SUMS)},
    ),
    *(
        wrong(
            ValueError,
            f"{name} must be another array than dx, got the same memory",
            **{"dx": FIRST.reshape(SHAPE), name: FIRST[:4]},
        )
        for name in SUMS
    ),
    *(
        wrong(TypeError, f"accumulate must be True or False, got {value!r}", accumulate=value)
        for value in (1, 0, None, "no")
    ),
    wrong(
        ValueError,
        "dweight must be an array to add to if accumulate is True, got None",
        accumulate=True,
        dbias=zeros(4),
    ),
    *(
        wrong(
            ValueError,
            "dbias must be an array to add to if accumulate is True, got None",
            accumulate=True,
            dweight=zeros(4),
            bias=bias,
        )
        for bias in (True, zeros(1, 4))
    ),
    wrong(
        ValueError,
        "accumulate must be False without a weight and a bias, got True",
        accumulate=True,
        weight=None,
        bias=False,
    ),
]


@pytest.mark.parametrize(
    ("function", "case"),
    [
        pytest.param(function, case, id=f"{function.__module__}.{function.__name__}-{case}")
        for case in WRONG
        for function in case.functions
        if set(case.changes) <= set(parameters(function))
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    function: Callable[..., Any], case: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(reference, "compute")
    arguments = correct(function) | case.changes
    before = {n: a.tobytes() for n, a in arguments.items() if isinstance(a, np.ndarray)}
    with pytest.raises(case.error) as raised:
        function(**arguments)
    assert (raised.type, str(raised.value)) == (case.error, case.message)
    assert before == {n: arguments[n].tobytes() for n in before}


@pytest.mark.parametrize("function", OF_CUPYNORM + OF_REFERENCE)
def test_the_table_starts_from_a_correct_call(function: Callable[..., Any]) -> None:
    arguments = correct(function)
    function(**arguments)
    output = arguments.get("out", arguments.get("dx"))
    assert not np.any(output == 777)


@pytest.mark.parametrize("functions", [OF_CUPYNORM, OF_REFERENCE])
def test_every_argument_is_in_the_table(functions: tuple[Callable[..., Any], ...]) -> None:
    named = {n for case in WRONG if set(functions) & set(case.functions) for n in case.changes}
    assert named == {name for function in functions for name in parameters(function)}


@pytest.mark.parametrize("function", OF_CUPYNORM + OF_REFERENCE)
def test_nothing_is_allocated_before_the_last_check(function: Callable[..., Any]) -> None:
    x, rows = zeros(256, 1024), zeros(256)
    given = {"weight": None} | dict.fromkeys(("x", "dy", "residual", "dresidual_out"), x)
    given |= dict.fromkeys(("mean", "rstd"), rows)
    given |= dict.fromkeys(("out", "dx"), np.broadcast_to(x[:1], x.shape))
    arguments = {name: given[name] for name in parameters(function) if name in given}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="must be writable"):
            function(**arguments)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 8


# ---- calls by themselves -------------------------------------------------------------------------

BITS = np.zeros((2, 3), np.uint8)
X = np.ones((4, 6), np.float32)
EXACT = X.astype(np.float64)
STORED = reference.layer_norm_forward(X, eps=1e-6)
OF_X = reference.layer_norm_backward(X, X, None, STORED.mean, STORED.rstd)


def check_forward(
    norm: Any = "layer_norm", result: Any = STORED, x: Any = X, **changes: Any
) -> dict[str, float]:
    return testing.check_forward(norm, result, x, **{"eps": 1e-6} | changes)


def check_backward(
    norm: Any = "layer_norm",
    result: Any = OF_X,
    mean: Any = STORED.mean,
    rstd: Any = STORED.rstd,
    **changes: Any,
) -> dict[str, float]:
    given = X, X, None, mean, rstd
    return testing.check_backward(norm, result, *given, **{"bias": True} | changes)


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # bitmasks
    (
        lambda: cupynorm.pack_bitmask([True]),
        TypeError,
        f"mask must be {ANY_ARRAY}; got builtins.list",
    ),
    (
        lambda: cupynorm.pack_bitmask(None),
        TypeError,
        f"mask must be {ANY_ARRAY}; got builtins.NoneType",
    ),
    (lambda: cupynorm.pack_bitmask(BITS), TypeError, "mask.dtype must be bool, got uint8"),
    (
        lambda: cupynorm.pack_bitmask(np.ma.array(BITS, bool)),
        TypeError,
        "mask must have no mask, which would be lost: pass mask.filled()",
    ),
    (
        lambda: cupynorm.pack_bitmask(np.zeros((), bool)),
        ValueError,
        "mask must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: cupynorm.unpack_bitmask([1], 8),
        TypeError,
        f"bitmask must be {ANY_ARRAY}; got builtins.list",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS.view(np.int8), 24),
        TypeError,
        "bitmask.dtype must be uint8, got int8",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS == 0, 24),
        TypeError,
        "bitmask.dtype must be uint8, got bool",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS[0, 0], 8),
        TypeError,
        f"bitmask must be {ANY_ARRAY}; got numpy.uint8",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS[0, :1].reshape(()), 8),
        ValueError,
        "bitmask must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS, 16),
        ValueError,
        "bitmask must have 2 bytes in each row of 16 bits, got shape (2, 3)",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS, 0),
        ValueError,
        "bitmask must have 0 bytes in each row of 0 bits, got shape (2, 3)",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS, 25),
        ValueError,
        "bitmask must have 4 bytes in each row of 25 bits, got shape (2, 3)",
    ),
    (lambda: cupynorm.unpack_bitmask(BITS, -1), ValueError, "n must be at least 0, got -1"),
    (lambda: cupynorm.unpack_bitmask(BITS, 24.0), TypeError, "n must be an int, got 24.0"),
    (lambda: cupynorm.unpack_bitmask(BITS, True), TypeError, "n must be an int, got True"),
    (lambda: cupynorm.unpack_bitmask(BITS, None), TypeError, "n must be an int, got None"),
    # quantized outputs
    (
        lambda: reference.quantize(X, "int8", "rows"),
        ValueError,
        "scale must be 'row', 'block' or an array of one element, got 'rows'",
    ),
    (
        lambda: reference.quantize(X, "int8", "block"),
        ValueError,
        "block must be 128 or 32 with scale='block', got None",
    ),
    (
        lambda: reference.quantize([[1.0]], "int8", "row"),
        TypeError,
        "y must be a NumPy array; got builtins.list",
    ),
    (
        lambda: reference.quantize(X, "int8", EXACT[0, :1]),
        TypeError,
        "scale.dtype must be float32, got float64",
    ),
    (lambda: reference.amax(X.astype(int)), TypeError, f"y.dtype must be {FOUR}, got int64"),
    *(
        (lambda given=given: cupynorm.Quantize(**{"dtype": "int8", "scale": "row"} | given), *error)
        for given, *error in (
            (
                {"dtype": "float8_e4m3"},
                TypeError,
                "dtype must be float8_e4m3fn, float8_e5m2 or int8, got 'float8_e4m3'",
            ),
            (
                {"dtype": np.float32},
                TypeError,
                "dtype must be float8_e4m3fn, float8_e5m2 or int8, got <class 'numpy.float32'>",
            ),
            (
                {"scale": 0.1},
                TypeError,
                "scale must be 'row', 'block' or an array of one element, got 0.1",
            ),
            (
                {"scale": np.float32(0.5)},
                TypeError,
                "scale must be 'row', 'block' or an array of one element, got np.float32(0.5)",
            ),
            (
                {"scale": "block", "block": np.array([128, 1])},
                ValueError,
                "block must be 128 or 32 with scale='block', got array([128,   1])",
            ),
            (
                {"via": np.array([1, 2])},
                TypeError,
                f"via must be {FOUR}, got ndarray",
            ),
            (
                {"scale": "tensor"},
                ValueError,
                "scale must be 'row', 'block' or an array of one element, got 'tensor'",
            ),
            (
                {"scale": X},
                ValueError,
                "scale must be 'row', 'block' or an array of one element, got shape (4, 6)",
            ),
            ({"block": 128}, ValueError, "block must be None without scale='block', got 128"),
            (
                {"scale": "block"},
                ValueError,
                "block must be 128 or 32 with scale='block', got None",
            ),
            ({"scale": "block", "block": 32}, ValueError, "block must be 128 for int8, got 32"),
            ({"via": "int8"}, TypeError, f"via must be {FOUR}, got int8"),
            ({"scale_min": "0"}, TypeError, "scale_min must be a real number, got '0'"),
            (
                {"scale_min": 0},
                ValueError,
                "scale_min must be a positive normal float32 number, got 0",
            ),
            (
                {"scale_max": math.nan},
                ValueError,
                "scale_max must be a positive normal float32 number, got nan",
            ),
            (
                {"scale_min": 2, "scale_max": 1},
                ValueError,
                "scale_min must be at most scale_max, 1.0; got 2.0",
            ),
            (
                {"scale": X[:1, 0], "scale_max": 2},
                ValueError,
                "scale_min and scale_max must be left out if scale is an array",
            ),
            ({"amax": 1}, TypeError, "amax must be True or False, got 1"),
            ({"column_major": None}, TypeError, "column_major must be True or False, got None"),
            *(
                (
                    {"dtype": "float8_e5m2", "column_major": True} | given,
                    ValueError,
                    "column_major must be False without block=128, got True",
                )
                for given in ({}, {"scale": "block", "block": 32})
            ),
        )
    ),
    (
        lambda: cupynorm.dequantize(BITS, X[0, 0]),
        TypeError,
        "scale must be a NumPy array, as the other arrays of the call are; got numpy.float32",
    ),
    (
        lambda: cupynorm.dequantize(BITS, X[0, :1]),
        TypeError,
        "dtype must say what a q of uint8 stands for, got None",
    ),
    (
        lambda: cupynorm.dequantize(X, X[0, :1]),
        TypeError,
        "q.dtype must be float8_e4m3fn, float8_e5m2 or int8, got float32",
    ),
    (
        lambda: cupynorm.dequantize(BITS, X[0, :1], dtype="int8"),
        TypeError,
        "q.dtype must be int8, as dtype says; got uint8",
    ),
    (
        lambda: cupynorm.dequantize(BITS, EXACT[0, :1], dtype="float8_e5m2"),
        TypeError,
        "scale.dtype must be float32 or float8_e8m0fnu, got float64",
    ),
    (
        lambda: cupynorm.dequantize(BITS, X[:2, :2], dtype="float8_e5m2"),
        ValueError,
        "scale must have shape (2, 1), one for each 128 of the last axis of q, or broadcast to q; "
        "got (2, 2)",
    ),
    (
        lambda: cupynorm.dequantize(BITS, BITS[:, :2], dtype="float8_e5m2"),
        ValueError,
        "scale must have shape (2, 1), one for each 32 of the last axis of q; got (2, 2)",
    ),
    # testing
    (
        lambda: check_forward("rms"),
        ValueError,
        "norm must be 'rms_norm' or 'layer_norm', got 'rms'",
    ),
    (
        lambda: check_forward(x=[1.0]),
        TypeError,
        "x must be a NumPy array; got builtins.list",
    ),
    (lambda: check_forward(x=X.astype(int)), TypeError, f"x.dtype must be {FOUR}, got int64"),
    (
        lambda: check_forward(weight=X[:3]),
        ValueError,
        "weight must have the shape of x's normalized axes, (6,), or broadcast to x's shape, "
        "(4, 6); got (3, 6)",
    ),
    (
        lambda: check_forward(bias=X[0, :4]),
        ValueError,
        "bias must have the shape of x's normalized axes, (6,), or broadcast to x's shape, "
        "(4, 6); got (4,)",
    ),
    (
        lambda: check_forward(eps=-1),
        ValueError,
        "eps must be a finite number of at least 0, got -1",
    ),
    (lambda: check_forward(axis=2), ValueError, f"{NAMED}; got 2 for an x of 2 axes"),
    (
        lambda: check_forward(relu=6),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got 6",
    ),
    (
        lambda: check_forward(zero_centered=True),
        ValueError,
        "zero_centered must be False without a weight, got True",
    ),
    (lambda: check_forward(out_dtype="int8"), TypeError, f"out_dtype must be {FOUR}, got int8"),
    (lambda: check_forward(residual=X[0]), ValueError, "residual must have shape (4, 6), got (6,)"),
    (
        lambda: check_forward(residual_dtype="float32"),
        ValueError,
        "residual_dtype must be None without a residual, got float32",
    ),
    (
        lambda: check_forward(result=STORED.y, residual=X),
        TypeError,
        "result must be a NormForward or, with a residual, a pair of arrays; got ndarray",
    ),
    (
        lambda: check_forward(result=(STORED.y,), residual=X),
        TypeError,
        "result must be a NormForward or, with a residual, a pair of arrays; got tuple",
    ),
    (lambda: check_forward(result=[1.0]), TypeError, "y must be a NumPy array, got list"),
    (
        lambda: check_forward("rms_norm"),
        AssertionError,
        "mean must be None, got an array of shape (4,)",
    ),
    (
        lambda: check_backward("rms"),
        ValueError,
        "norm must be 'rms_norm' or 'layer_norm', got 'rms'",
    ),
    (
        lambda: check_backward("rms_norm"),
        ValueError,
        "mean must be None for rms_norm, got an array of shape (4,)",
    ),
    (
        lambda: check_backward(result=OF_X.dx),
        TypeError,
        "result must be a NormBackward, got ndarray",
    ),
    (
        lambda: check_backward(result=tuple(OF_X)),
        TypeError,
        "result must be a NormBackward, got tuple",
    ),
    (
        lambda: check_backward(rstd=None),
        TypeError,
        "rstd must be a NumPy array, as the other arrays of the call are; got builtins.NoneType",
    ),
    (
        lambda: check_backward(mean=None),
        TypeError,
        "mean must be a NumPy array, as the other arrays of the call are; got builtins.NoneType",
    ),
    (lambda: check_backward(mean=X), ValueError, "mean must have shape (4,), got (4, 6)"),
    (
        lambda: check_backward(rstd=STORED.rstd.astype(np.float16)),
        TypeError,
        "rstd.dtype must be float32, got float16",
    ),
    (
        lambda: check_backward(bias=1),
        TypeError,
        "bias must be True, False, None or a NumPy array, as the other arrays of the call "
        "are; got builtins.int",
    ),
    (lambda: check_backward(bitmask=X), TypeError, "bitmask.dtype must be uint8, got float32"),
    (
        lambda: check_backward(dresidual_out=X[0]),
        ValueError,
        "dresidual_out must have shape (4, 6), got (6,)",
    ),
    (
        lambda: check_backward(dx_dtype=int),
        TypeError,
        f"dx_dtype must be {FOUR}, got <class 'int'>",
    ),
    (
        lambda: testing.assert_one_rounding(X, EXACT, EXACT, np.float16, "y"),
        TypeError,
        "compute_dtype must be float32 or float64, got float16",
    ),
    (
        lambda: testing.assert_one_rounding(X, EXACT, EXACT, int, "y"),
        TypeError,
        "compute_dtype must be float32 or float64, got <class 'int'>",
    ),
    (
        lambda: testing.assert_one_rounding(X, EXACT, EXACT[:3], np.float32, "y"),
        ValueError,
        "the magnitude of y must broadcast to shape (4, 6), got (3, 6)",
    ),
    (
        lambda: testing.assert_one_rounding(X, EXACT, EXACT * math.inf, np.float32, "y"),
        ValueError,
        "the magnitude of y must be finite wherever its exact value is",
    ),
    (
        lambda: testing.assert_one_rounding(X, EXACT, EXACT * 0 - 0.5, np.float32, "y"),
        ValueError,
        "the magnitude of y must be at least 0, got -0.5",
    ),
    (
        lambda: testing.assert_one_rounding(X, [1.0], EXACT, np.float32, "y"),
        AssertionError,
        "y must have shape (1,), got (4, 6)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_a_wrong_call_is_told_what_is_wrong(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert (raised.type, str(raised.value)) == (error, message)


def test_what_the_calls_change_is_correct() -> None:
    check_forward()
    check_backward()


# ---- warmup, supports and kernel_source ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        *(
            ({"norm": norm}, ValueError, f"norm must be 'rms_norm' or 'layer_norm', got {norm!r}")
            for norm in ("rms", None)
        ),
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": [4, -1]}, ValueError, "n must be at least 1, got -1"),
        *(
            ({"n": n}, TypeError, f"n must be an int or an iterable of ints, got {wrong!r}")
            for n, wrong in (
                ([4, 4.0], 4.0),
                ("4096", "4096"),
                (4.0, 4.0),
                (None, None),
                (True, True),
                (np.array(4), np.array(4)),
            )
        ),
        ({"x_dtype": None}, TypeError, f"x_dtype must be {FOUR}, got None"),
        *(
            ({name: dtype}, TypeError, f"{name} must be {FOUR}, got {dtype}")
            for name in (
                *("x_dtype", "weight_dtype", "bias_dtype", "dy_dtype", "out_dtype"),
                *("residual_dtype", "gradient_dtype"),
            )
            for dtype in ("int8", ">f4", np.int32, "nonsense")
        ),
        (
            {"zero_centered": True},
            ValueError,
            "zero_centered must be False without a weight, got True",
        ),
        ({"zero_centered": 1}, TypeError, "zero_centered must be True or False, got 1"),
        ({"relu": (0, 6)}, TypeError, "relu must be True or False, got (0, 6)"),
        ({"backward": "no"}, TypeError, "backward must be True or False, got 'no'"),
        ({"accumulate": 1}, TypeError, "accumulate must be True or False, got 1"),
        (
            {"accumulate": True},
            ValueError,
            "accumulate must be False without a gradient_dtype, got True",
        ),
        (
            {"quantize": "int8"},
            TypeError,
            "quantize must be a cupynorm.Quantize or None, got 'int8'",
        ),
        (
            {"quantize": cupynorm.Quantize("int8", "row"), "out_dtype": "float32"},
            ValueError,
            "out_dtype must be None with quantize, which has via; got float32",
        ),
    ],
    ids=str,
)
def test_supports_says_what_warmup_raises(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"norm": "layer_norm", "n": 4, "x_dtype": "float32"} | changes
    with pytest.raises(error) as raised:
        cupynorm.warmup(**arguments)
    assert (raised.type, str(raised.value)) == (error, message)
    assert cupynorm.supports(**arguments) == message
    if not isinstance(arguments["n"], list):
        with pytest.raises(error) as of_source:
            cupynorm.kernel_source(**arguments)
        assert str(of_source.value) == message.replace(" or an iterable of ints", "")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": [4, 8]}, TypeError, "n must be an int, got [4, 8]"),
        ({"statistics": 1}, TypeError, "statistics must be True or False, got 1"),
        (
            {"statistics": True, "backward": True},
            ValueError,
            "statistics must be False for a backward pass, got True",
        ),
        *(
            ({name: value}, ValueError, f"{name} must be at least {least}, got {value}")
            for name, least in (("rows", 1), ("architecture", 75))
            for value in (0, -90)
        ),
        *(
            ({name: value}, TypeError, f"{name} must be an int or None, got {value!r}")
            for name in ("rows", "architecture")
            for value in (9.0, True, "sm_90")
        ),
        ({"architecture": 70}, ValueError, "architecture must be at least 75, got 70"),
    ],
    ids=str,
)
def test_kernel_source_says_which_argument_is_wrong(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        cupynorm.kernel_source(**{"norm": "layer_norm", "n": 4, "x_dtype": "float32"} | changes)
    assert (raised.type, str(raised.value)) == (error, message)
