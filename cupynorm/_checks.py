"""Validation of the arguments of the public functions.

Errors name the argument, what came and what was expected, before anything is allocated or written.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cupynorm._arrays import (
    BFLOAT16,
    DTYPES,
    FLOATS,
    Family,
    address_of,
    check_known,
    device_of,
    is_numpy,
    row_stride,
    to_numpy,
)
from cupynorm._groups import Groups, groups_of
from cupynorm._operation import (
    ALWAYS_READ,
    BACKWARD,
    FORWARD,
    KINDS,
    SUMS,
    Axis,
    BackwardSpec,
    ForwardSpec,
    Kind,
    Norm,
    Options,
    Pass,
    compute_dtype,
    has_residual,
    shape_of,
)

__all__ = [
    "Asked",
    "AskedBackward",
    "as_called",
    "broadcasts",
    "check_arrays",
    "check_backward",
    "check_call",
    "check_device",
    "check_forward",
    "check_memory",
    "check_norm",
    "check_numbers",
    "check_pair",
    "check_rows",
    "check_vector",
    "check_zero_centered",
    "like_or_whether",
    "moved",
    "must_broadcast",
    "normalized_axes",
    "order_of",
    "to_dtype",
    "to_eps",
]

_REAL = numbers.Real, BFLOAT16.type


def normalized_axes(x_ndim: int, axis: Axis) -> tuple[int, ...]:
    """Return the axes of x that are normalized, ascending."""
    if axis is None:
        if x_ndim == 0:
            raise ValueError("x must have at least one axis, got a 0-dimensional array")
        return (x_ndim - 1,)
    axes = axis if isinstance(axis, Sequence) else (axis,)
    if isinstance(axis, str | bytes) or not all(
        isinstance(a, numbers.Integral) and not isinstance(a, bool) for a in axes
    ):
        check_known(axis=axis)
        raise TypeError(f"axis must be an int, a tuple of ints or None, got {axis!r}")
    places = [int(a) + x_ndim if a < 0 else int(a) for a in axes]
    # torch.compile can neither sort nor use `in` if an axis varies.
    found = tuple(i for i in range(x_ndim) if any(place == i for place in places))
    if not axes or len(found) != len(axes):
        raise ValueError(
            f"axis must name axes of x, each once, such as -1 or (-2, -1); got {axis!r} for an x "
            f"of {x_ndim} axes"
        )
    return found


def order_of(x_ndim: int, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return all axes of x with the normalized ones last; None if they are."""
    k = len(axes)
    if axes == tuple(range(x_ndim - k, x_ndim)):
        return None
    return (*(i for i in range(x_ndim) if not any(i == a for a in axes)), *axes)


def moved(order: tuple[int, ...], name: str, array: Any) -> Any:
    """Return an array of a pass with x's axes in an order. A vector gets all of these axes."""
    if KINDS.get(name, Kind.VECTOR) is Kind.ROWS:  # `like` is a vector
        return array.transpose(order)
    if KINDS.get(name, Kind.VECTOR) is Kind.VECTOR:
        return array.reshape((1,) * (len(order) - array.ndim) + array.shape).transpose(order)
    return array


def as_called(
    options: Options, written: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of a pass with the axes of the x that was given.

    An array that was given as an output is returned itself.
    """
    order = options.order
    if order is None:
        return dict(written)
    back = sorted(range(len(order)), key=order.__getitem__)
    weight, like = given["weight"], given.get("like")
    vectors = {"dweight": weight, "dbias": weight if like is None else like}
    kept, first = len(order) - options.k, min(order[-options.k :])

    def restored(name: str, array: Any) -> Any:
        if given.get(name) is not None:
            return given[name]
        if array is None or KINDS[name] not in (Kind.ROWS, Kind.VECTOR):
            return array
        if KINDS[name] is Kind.ROWS:
            return array.transpose(back)
        # The gradient of an absent bias broadcasts to x.
        whole = array if array.ndim == len(order) else array.reshape((1,) * kept + array.shape)
        whole, vector = whole.transpose(back), vectors[name]
        return whole.reshape(whole.shape[first:] if vector is None else tuple(vector.shape))

    return {name: restored(name, array) for name, array in written.items()}


def to_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """Return one of the four dtypes, from anything that names it, such as torch.bfloat16."""
    if isinstance(dtype, np.dtype) and dtype in DTYPES:
        return dtype
    is_array = hasattr(dtype, "shape") and not isinstance(dtype, np.dtype | type)
    # NumPy takes None for float64, and an array for its dtype.
    candidates = () if dtype is None or is_array else (dtype, str(dtype).rpartition(".")[2])
    for candidate in candidates:
        try:
            converted: np.dtype[Any] = np.dtype(candidate)
        except (TypeError, ValueError, SyntaxError):
            continue
        if converted in DTYPES:
            return converted
    check_known(**{name: dtype})
    got = type(dtype).__qualname__ if is_array else dtype
    raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {got}")


class Asked(NamedTuple):
    """The options of a forward call as a caller gave them, in the order of its key."""

    norm: Norm
    training: bool
    axis: Any
    zero_centered: Any
    eps: Any
    relu: Any = None
    out_dtype: Any = None
    residual_dtype: Any = None


class AskedBackward(NamedTuple):
    """The options of a backward call. If the bias is an array, it is the argument `like`."""

    norm: Norm
    axis: Any
    zero_centered: Any
    bias: bool | None
    dx_dtype: Any = None
    dresidual_dtype: Any = None
    accumulate: Any = False


def check_norm(norm: Any) -> None:
    """Check the name of a norm."""
    if not isinstance(norm, str) or norm not in ("rms_norm", "layer_norm"):
        raise ValueError(f"norm must be 'rms_norm' or 'layer_norm', got {norm!r}")


_PUBLIC_NAMES = {"y": "out", "like": "bias"}  # by the tables' names


def like_or_whether(bias: Any) -> tuple[Any, bool | None]:
    """Return the bias that dbias is to be like, or whether there is to be one."""
    if bias is None or type(bias) is bool:
        return None, bias
    return (None, bool(bias)) if isinstance(bias, np.bool_) else (bias, None)


def check_call(
    family: Family, given: Mapping[str, Any], asked: Asked | AskedBackward
) -> tuple[dict[str, Any], ForwardSpec | BackwardSpec, Options]:
    """Check a call on arrays of a family, by the names of its pass, None for those not given.

    Return them as NumPy or CuPy arrays, what to compile, and how to call it. The normalized axes
    are the last ones of these arrays: see `Options.order`.
    """
    table: Pass = FORWARD if isinstance(asked, Asked) else BACKWARD
    arrays = dict.fromkeys(given)
    required = ALWAYS_READ | ({"mean"} if asked.norm == "layer_norm" else set())
    for name, array in given.items():
        public = _PUBLIC_NAMES.get(name, name)
        if name == "like" and array is not None:
            family.check_type(public, array, besides="True, False, None or ")
        if array is not None or name in required:
            dtypes = ("uint8",) if KINDS.get(name) is Kind.BITS else FLOATS
            output = name in table.writes
            arrays[name] = family.take(public, array, output=output, dtypes=dtypes)
    return check_arrays(arrays, asked)


def check_arrays(
    arrays: dict[str, Any], asked: Asked | AskedBackward
) -> tuple[dict[str, Any], ForwardSpec | BackwardSpec, Options]:
    """Do as `check_call` with NumPy or CuPy arrays."""
    x = arrays["x"]
    axes = normalized_axes(x.ndim, asked.axis)
    order = order_of(x.ndim, axes)
    if isinstance(asked, AskedBackward):
        _check_sums(arrays, asked, axes)
    if order is not None:
        arrays = _checked_and_moved(arrays, order, axes)
        asked = asked._replace(axis=tuple(range(-len(axes), 0)))
    check: Any = check_forward if isinstance(asked, Asked) else check_backward
    spec, options = check(arrays, asked, moved=order is not None)
    return arrays, spec, replace(options, order=order)


def _check_sums(arrays: dict[str, Any], asked: AskedBackward, axes: tuple[int, ...]) -> None:
    """Check the shapes of the places for dweight and dbias, and that none to add to is missing."""
    accumulate, x_shape = asked.accumulate, arrays["x"].shape
    if not isinstance(accumulate, bool | np.bool_):
        raise TypeError(f"accumulate must be True or False, got {accumulate!r}")
    given = {name: arrays.get(name) for name in ("weight", "like", *SUMS)}
    shapes: dict[str, Any] = {n: None if a is None else a.shape for n, a in given.items()}
    if not accumulate and all(shapes[name] is None for name in SUMS):
        return
    check_rows(x_shape, axes)
    for name in ("weight", "like"):
        if shapes[name] is not None:
            check_vector(_PUBLIC_NAMES.get(name, name), shapes[name], x_shape, axes)
    wanted = {"dweight": shapes["weight"], "dbias": shapes["like"]}
    if asked.bias:
        of_weight = shapes["weight"]
        wanted["dbias"] = shape_of_row(x_shape, axes) if of_weight is None else of_weight
    conditions = "without a weight", "unless bias is True or an array"
    for (name, shape), condition in zip(wanted.items(), conditions, strict=True):
        if shapes[name] is None and shape is not None and accumulate:
            raise ValueError(f"{name} must be an array to add to if accumulate is True, got None")
        if shapes[name] is not None and shape is None:
            raise ValueError(f"{name} must be None {condition}, got {_shape_words(given[name])}")
        if shapes[name] not in (None, shape):
            raise ValueError(f"{name} must have shape {shape}, got {shapes[name]}")
    if accumulate and wanted["dweight"] is None and wanted["dbias"] is None:
        raise ValueError("accumulate must be False without a weight and a bias, got True")


def _checked_and_moved(
    arrays: dict[str, Any], order: tuple[int, ...], axes: tuple[int, ...]
) -> dict[str, Any]:
    """Return arrays with x's axes in an order. Messages tell the shapes that a caller knows."""
    x_shape = arrays["x"].shape
    check_rows(x_shape, axes)
    for name, array in arrays.items():
        if array is None:
            continue
        kind = KINDS.get(name, Kind.VECTOR)
        if kind is Kind.VECTOR:
            check_vector(_PUBLIC_NAMES.get(name, name), array.shape, x_shape, axes)
        elif kind is Kind.ROWS and array.shape != x_shape:
            raise ValueError(
                f"{_PUBLIC_NAMES.get(name, name)} must have shape {x_shape}, got {array.shape}"
            )
    return {
        name: None if array is None else moved(order, name, array) for name, array in arrays.items()
    }


def check_forward(
    arrays: dict[str, Any], asked: Asked, *, moved: bool = False
) -> tuple[ForwardSpec, Options]:
    """Check the arrays of a forward pass by name; return what to compile, and how to call it.

    The outputs may be missing. `moved`: the caller's arrays have their axes in another order.
    """
    x, residual = arrays["x"], arrays["residual"]
    y, total = arrays.get("y"), arrays.get("residual_out")
    k, groups = _check_operands(arrays, asked)
    dtypes, rows = _names_of(arrays, FORWARD.reads), None if moved else k
    dtypes["y"] = _check_output("out", "out_dtype", y, x, rows, asked.out_dtype, x)
    if residual is not None:
        _check_like("residual", residual, x, x.shape, None)
        told = "residual_out", "residual_dtype"
        dtypes["residual_out"] = _check_output(
            *told, total, x, rows, asked.residual_dtype, residual
        )
        _check_apart({"out": y, "residual_out": total})
    else:
        given = None if total is None else _shape_words(total)
        for name, got in (("dtype", asked.residual_dtype), ("out", given)):
            if got is not None:
                raise ValueError(f"residual_{name} must be None without a residual, got {got}")
    normalized = np.dtype(compute_dtype(dtypes.get("residual_out") or dtypes["x"] or ""))
    options = Options(
        norm=asked.norm,
        k=k,
        zero_centered=bool(asked.zero_centered),
        eps=to_eps(asked.eps),
        relu=check_numbers(normalized, asked.eps, asked.relu),
        training=asked.training,
        groups=groups,
    )
    return ForwardSpec.of(options, dtypes), options


def _shape_words(array: Any) -> str:
    return f"an array of shape {array.shape}"


def _check_output(
    name: str, dtype_name: str, out: Any, x: Any, k: int | None, asked: Any, like: Any
) -> str:
    """Check an output of x's shape, if it is given; return its dtype.

    The dtype is by default another array's, and may be asked for.
    """
    dtype = like.dtype if asked is None else to_dtype(dtype_name, asked)
    if out is not None:
        if asked is None:
            dtype = to_dtype(f"{name}.dtype", out.dtype)
        _check_like(name, out, x, x.shape, dtype)
        _check_writable(name, out, k)
    return str(DTYPES[dtype])


def _names_of(arrays: dict[str, Any], names: Iterable[str]) -> dict[str, str | None]:
    """Return the dtypes of arrays by their names."""
    return {n: None if arrays[n] is None else DTYPES.get(arrays[n].dtype, "uint8") for n in names}


def check_numbers(compute: np.dtype[Any], eps: Any, relu: Any) -> tuple[float, float] | None:
    """Check eps and the bounds of relu; return these, rounded to the compute dtype.

    A bound of -0.0 becomes 0.0, since a call is remembered by its bounds and the two are equal.
    """
    number = to_eps(eps)
    if not 0 <= number < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
    info = np.finfo(compute)
    if 0 < number < float(info.tiny) or number > float(info.max):
        raise ValueError(f"eps must be 0 or a normal {compute} number, got {eps!r}")
    if relu is None:
        return None
    check_pair(relu)
    with np.errstate(over="ignore"):
        lower, upper = (float(compute.type(_to_float(bound))) + 0.0 for bound in relu)
    if not lower < upper:
        raise ValueError(f"relu must be (lower, upper) with lower < upper as {compute}, got {relu}")
    return lower, upper


def to_eps(eps: Any) -> float:
    """Return eps as a float. -0.0 becomes 0.0, which gives a row of zeros rstd = inf."""
    if not isinstance(eps, _REAL) or isinstance(eps, bool):
        check_known(eps=eps)
        advice = ": pass float(eps)" if getattr(eps, "ndim", None) == 0 else ""
        raise TypeError(f"eps must be a real number, got {eps!r}{advice}")
    return _to_float(eps) + 0.0


def check_pair(relu: Any) -> None:
    """Check that bounds are two numbers."""
    if (
        not isinstance(relu, Sequence)
        or len(relu) != 2
        or not all(isinstance(b, _REAL) and not isinstance(b, bool) for b in relu)
    ):
        check_known(relu=relu)
        are_arrays = isinstance(relu, Sequence) and any(getattr(b, "ndim", None) == 0 for b in relu)
        advice = ": pass float(...) of each" if are_arrays else ""
        raise TypeError(
            f"relu must be a pair of real numbers (lower, upper) or None, got {relu!r}{advice}"
        )


def _to_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:
        return -math.inf if str(number).startswith("-") else math.inf


def check_backward(
    arrays: dict[str, Any], asked: AskedBackward, *, moved: bool = False
) -> tuple[BackwardSpec, Options]:
    """Check a backward pass, as `check_forward` does."""
    x, dresidual_out = arrays["x"], arrays["dresidual_out"]
    k, groups = _check_operands(arrays, asked)
    for name in ("dy", "dresidual_out"):
        if arrays[name] is not None:
            _check_like(name, arrays[name], x, x.shape, None)
    dtypes = _names_of(arrays, (*BACKWARD.reads, "like"))
    dtypes["dbias"] = (dtypes["weight"] or dtypes["x"]) if asked.bias else dtypes["like"]
    sums = {name: arrays[name] for name in SUMS if arrays.get(name) is not None}
    for name, array in sums.items():
        dtypes[name] = DTYPES[to_dtype(f"{name}.dtype", array.dtype)]
    given = asked.dx_dtype, asked.dresidual_dtype
    for (name, option), dtype in zip(BACKWARD.dtypes_asked.items(), given, strict=True):
        dtypes[name] = dtypes["x"] if dtype is None else DTYPES[to_dtype(option, dtype)]
    options = Options(
        norm=asked.norm,
        k=k,
        zero_centered=bool(asked.zero_centered),
        has_residual=has_residual(dresidual_out, *given),
        sums_given=bool(sums),
        accumulate=bool(asked.accumulate),
        groups=groups,
    )
    spec = BackwardSpec.of(options, dtypes)
    if arrays["mean"] is not None and spec.dtypes["mean"] is None:
        raise ValueError(f"mean must be None for {asked.norm}, got {_shape_words(arrays['mean'])}")
    for name in ("mean", "rstd", "bitmask", "dx"):
        if arrays[name] is not None:
            shape, dtype = shape_of(KINDS[name], x.shape, k), to_numpy(spec.dtypes[name])
            _check_like(name, arrays[name], x, shape, dtype)
    if arrays["dx"] is not None:
        _check_writable("dx", arrays["dx"], None if moved else k)
    for name, array in sums.items():
        check_memory(name, array, x)
        _check_sum_writable(name, array)
    _check_apart({"dx": arrays["dx"]} | sums)
    return spec, options


def _check_operands(
    arrays: dict[str, Any], asked: Asked | AskedBackward
) -> tuple[int, Groups | None]:
    """Check x, weight and bias, if given; return how many axes are normalized, and the groups."""
    x, weight = arrays["x"], arrays["weight"]
    bias = arrays["bias"] if "bias" in arrays else arrays["like"]
    to_dtype("x.dtype", x.dtype)
    check_memory("x", x, x)
    check_zero_centered(asked.zero_centered, has_weight=weight is not None)
    axes = normalized_axes(x.ndim, asked.axis)
    k = len(axes)
    check_rows(x.shape, axes)
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None:
            to_dtype(f"{name}.dtype", array.dtype)
            check_memory(name, array, x)
            check_vector(name, array.shape, x.shape, axes)
    of_weight, of_bias = (None if array is None else array.shape for array in (weight, bias))
    if isinstance(asked, AskedBackward) and asked.bias:
        of_bias = of_weight  # as dbias has
    return k, groups_of(x.shape, k, of_weight, of_bias)


def check_rows(x_shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Check that a row has an element."""
    if any(x_shape[i] == 0 for i in axes):
        raise ValueError(f"x must have at least one element in each row, got shape {x_shape}")


def check_vector(
    name: str, shape: tuple[int, ...], x_shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    """Check that a weight or bias broadcasts to x, whose given axes are normalized."""
    if not broadcasts(shape, x_shape):
        raise ValueError(must_broadcast(name, shape, x_shape, axes))


def broadcasts(shape: tuple[int, ...], x_shape: tuple[int, ...]) -> bool:
    """Tell whether an array broadcasts to x by NumPy's rule."""
    pairs = zip(reversed(shape), reversed(x_shape), strict=False)
    return len(shape) <= len(x_shape) and all(n == 1 or n == of_x for n, of_x in pairs)


def must_broadcast(
    name: str, shape: tuple[int, ...], x_shape: tuple[int, ...], axes: tuple[int, ...]
) -> str:
    """Return the message on a weight or bias that does not broadcast to x."""
    of_row = shape_of_row(x_shape, axes)
    return (
        f"{name} must have the shape of x's normalized axes, {of_row}, or broadcast to x's shape, "
        f"{x_shape}; got {shape}"
    )


def shape_of_row(x_shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the least shape that broadcasts to x and holds a row of its given axes."""
    return tuple(n if i in axes else 1 for i, n in enumerate(x_shape))[min(axes) :]


def check_zero_centered(zero_centered: Any, *, has_weight: bool) -> None:
    """Check an option by itself."""
    if not isinstance(zero_centered, bool | np.bool_):
        check_known(zero_centered=zero_centered)
        raise TypeError(f"zero_centered must be True or False, got {zero_centered!r}")
    if zero_centered and not has_weight:
        raise ValueError("zero_centered must be False without a weight, got True")


def check_device(name: str, array: Any, x: Any) -> None:
    """Check that a NumPy or CuPy array is where x is."""
    if is_numpy(array) != is_numpy(x) or (not is_numpy(x) and array.device != x.device):
        raise ValueError(f"{name} must be on x's device, {device_of(x)}; got {device_of(array)}")


def check_memory(name: str, array: Any, x: Any) -> None:
    """Check that an array is on x's device, at an address that its elements may have."""
    check_device(name, array, x)
    if not is_numpy(array) and array.data.ptr % array.itemsize:
        raise ValueError(
            f"{name} must be aligned to its elements of {array.itemsize} bytes, "
            f"got address {array.data.ptr:#x}"
        )


def _check_like(name: str, array: Any, x: Any, shape: tuple[int, ...], dtype: Any) -> None:
    check_memory(name, array, x)
    if dtype is None:
        to_dtype(f"{name}.dtype", array.dtype)
    elif array.dtype != dtype:
        raise TypeError(f"{name}.dtype must be {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")


def _check_writable(name: str, array: Any, k: int | None) -> None:
    """Check an output. On a GPU it has rows of its last k axes, or any layout if k is None."""
    if is_numpy(array) and not array.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    if is_numpy(array) or k is None:
        if _overlaps_itself(array):
            raise ValueError(
                f"{name} must not overlap itself; got strides {array.strides} for shape "
                f"{array.shape} of {array.itemsize} bytes"
            )
        return
    if array.size == 0:
        return
    stride = row_stride(array.shape, array.strides, array.itemsize, k)
    n = math.prod(array.shape[array.ndim - k :])
    if stride is None or (array.size > n and abs(stride) < n):
        raise ValueError(
            f"{name} must hold contiguous rows that do not overlap, one stride apart; got strides "
            f"{array.strides} for shape {array.shape}"
        )


def _check_sum_writable(name: str, array: Any) -> None:
    if is_numpy(array):
        _check_writable(name, array, 0)
    elif not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, with the normalized axes last; got strides "
            f"{array.strides} for shape {array.shape}"
        )


def _check_apart(outputs: Mapping[str, Any]) -> None:
    """Check that none of the arrays that are given to be written begins within another.

    Those with gaps may have another's elements there, so only their first element counts.
    """
    given = [(address_of(a), name, a) for name, a in outputs.items() if a is not None and a.size]
    given.sort(key=lambda of: of[0])
    for (start, name, array), (after, other, _) in itertools.pairwise(given):
        if after < start + (array.nbytes if array.flags.c_contiguous else array.itemsize):
            raise ValueError(f"{other} must be another array than {name}, got the same memory")


def _overlaps_itself(array: Any) -> bool:
    """Tell whether elements share memory."""
    if array.size == 0:
        return False
    axes = [(abs(step), n) for n, step in zip(array.shape, array.strides, strict=True) if n > 1]
    reach = array.itemsize  # what the axes of smaller strides cover
    for step, n in sorted(axes):
        if step < reach:
            break
        reach += step * (n - 1)
    else:
        return False
    # Axes may interleave without overlap.
    places = np.zeros(1, np.int64)
    for step, n in axes:
        places = np.add.outer(places, step * np.arange(n)).ravel()
    return bool(np.any(np.diff(np.sort(places)) < array.itemsize))
