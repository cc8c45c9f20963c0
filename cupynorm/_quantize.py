"""Quantized outputs of the norms: eight bits an element, and scales to multiply them by.

A norm writes y in the dtype `via`. `scales_of` and `codes_of` then quantize it, by operations of
NumPy, CuPy or jax.numpy. `cupynorm.torch` has them in torch's.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar, overload

import ml_dtypes
import numpy as np

from cupynorm import _arrays, _checks
from cupynorm._arrays import dtype_name
from cupynorm._operation import ForwardSpec, Options, QuantizedSpec

__all__ = [
    "BLOCK_MX",
    "LARGEST",
    "MX_SCALE",
    "PER_POWER",
    "Quantize",
    "amax_of",
    "check_call",
    "check_quantize",
    "check_scale_dtype",
    "codes_of",
    "dequantize",
    "dtype_of_scales",
    "dtype_of_y",
    "expanded",
    "new_by_columns",
    "of_arrays",
    "pass_of_kernel",
    "power_of",
    "scales_of",
    "strides_by_column",
    "taken_scale",
]

# Of each dtype, the largest number, and one over the largest power of two.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
PER_POWER = {dtype: 2.0 ** (1 - math.frexp(largest)[1]) for dtype, largest in LARGEST.items()}
MX_SCALE = "float8_e8m0fnu"
BLOCK, BLOCK_MX = 128, 32

_Array = TypeVar("_Array")
_SCALE_MIN, _SCALE_MAX = 2.0**-126, float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Quantize:
    """How `rms_norm` and `layer_norm` quantize their output: the argument ``quantize``.

    ``q = saturate(round(y / scale))``. y is rounded to `via` first. The quotient is a float32
    (float64 where y is). It is rounded to the nearest number of `dtype`, a tie to the even one.
    What is beyond dtype's range becomes its end, and so does an infinity.

    Parameters
    ----------
    dtype : dtype
        q's dtype: float8_e4m3fn, float8_e5m2 or int8, by its name or as one of ml_dtypes, torch or
        jax.numpy.
    scale : array or {"row", "block"}
        An array of one float32, of x's framework, serves all elements and is returned as it is.
        With "row" each row gets a scale of its own, and with "block" each block of a row:
        ``max|y| / L`` there, clipped to [scale_min, scale_max]. L is 448 for float8_e4m3fn, 57344
        for float8_e5m2, and 127 for int8.
    block : {None, 128, 32}
        How many elements of a row share a scale, if scale is "block". The last block of a row may
        be shorter. Scales of 128 are float32. Scales of 32 are powers of two in float8_e8m0fnu, as
        the microscaling formats have them, and int8 has none of these.
    via : dtype, "x" or None
        The dtype that y is rounded to before it is quantized. The default, "x", is x's dtype. None
        is the compute dtype, float32 (float64 where x is): y is not rounded in between.
    scale_min, scale_max : float
        Bounds of a computed scale, within the normal numbers of float32. The defaults are the
        least and the largest of these.
    column_major : bool
        Whether scales of blocks of 128 lie column by column in memory, for products of matrices by
        DeepGEMM, FlashInfer or CUTLASS. Their shape is the same, and their strides are those of
        (..., M) for M rows, with the least multiple of 4 that is not below M for the last axis: a
        column begins at 16 bytes. What lies between columns is not written. JAX has no strides.
    amax : bool
        Whether ``max|y|`` of all rows together, y as it is rounded to `via`, is a result as well:
        an array of one float32, behind the scale. Delayed scaling finds the next scale from it.

    Raises
    ------
    TypeError, ValueError
        If an argument is another one, or does not fit the others.

    See Also
    --------
    dequantize : the way back.

    Notes
    -----
    A NaN stays NaN in a float8 dtype, and is 0 in int8. It does not count in max|y|: the rest of
    its row keeps its digits. An infinity does count, and so gives the scale scale_max. A row of
    zeros has the scale scale_min, and q is 0. So no scale is ever 0, infinite or NaN. For amax the
    same counts, and there are no bounds: it may be 0, as it is of no rows, or infinite.

    The scale of a block of 32 is the largest power of two that is not above ``max|y| / P``, also
    after clipping. P is the largest power of two of dtype, 256 or 32768. This is the rule of the
    OCP Microscaling Formats (MX) Specification 1.0, section 6.3. Elements above L times the scale
    saturate.

    The bits of a row of q and of its scales depend on that row alone. They are the same in all
    frameworks if those of y are, except the sign of a NaN. On a GPU and in JAX, subnormal numbers
    may count as zeros.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> x = np.array([[3.0, -4.0], [0.5, 0.5]], dtype=np.float32)
    >>> q, scale = cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", "row"))
    >>> q
    array([[  95, -127],
           [ 127,  127]], dtype=int8)
    >>> cupynorm.dequantize(q, scale).round(2)
    array([[ 0.85, -1.13],
           [ 1.  ,  1.  ]], dtype=float32)
    """

    dtype: Any
    scale: Any
    block: int | None = None
    via: Any = "x"
    scale_min: float = _SCALE_MIN
    scale_max: float = _SCALE_MAX
    column_major: bool = False
    amax: bool = False

    def __post_init__(self) -> None:
        """Check the fields. Dtypes become their names."""
        object.__setattr__(self, "dtype", _to_name("dtype", self.dtype))
        given = not isinstance(self.scale, str)
        if given:
            _check_given(self.scale)
        elif self.scale not in ("row", "block"):
            raise ValueError(
                f"scale must be 'row', 'block' or an array of one element, got {self.scale!r}"
            )
        blocks = (BLOCK, BLOCK_MX) if self.is_by_block else (None,)
        if not isinstance(self.block, int | np.integer | None) or self.block not in blocks:
            expected = "128 or 32 with" if self.is_by_block else "None without"
            raise ValueError(f"block must be {expected} scale='block', got {self.block!r}")
        object.__setattr__(self, "block", None if self.block is None else int(self.block))
        if self.block == BLOCK_MX and self.dtype == "int8":
            raise ValueError("block must be 128 for int8, got 32")
        if self.via is not None and not (isinstance(self.via, str) and self.via == "x"):
            via = dtype_name(self.via)
            if via not in _arrays.FLOATS:  # torch.compile does not trace the conversion
                via = _arrays.DTYPES[_checks.to_dtype("via", self.via)]
            object.__setattr__(self, "via", via)
        for name in ("scale_min", "scale_max"):
            bound = getattr(self, name)
            if not _arrays.is_number(bound) or isinstance(bound, bool):
                raise TypeError(f"{name} must be a real number, got {bound!r}")
            if not _SCALE_MIN <= bound <= _SCALE_MAX:
                raise ValueError(f"{name} must be a positive normal float32 number, got {bound!r}")
            object.__setattr__(self, name, float(np.float32(bound)))
        if self.scale_min > self.scale_max:
            raise ValueError(
                f"scale_min must be at most scale_max, {self.scale_max}; got {self.scale_min}"
            )
        if given and (self.scale_min, self.scale_max) != (_SCALE_MIN, _SCALE_MAX):
            raise ValueError("scale_min and scale_max must be left out if scale is an array")
        for name in ("column_major", "amax"):
            flag = getattr(self, name)
            if not isinstance(flag, bool | np.bool_):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
            object.__setattr__(self, name, bool(flag))
        if self.column_major and self.block != BLOCK:
            raise ValueError("column_major must be False without block=128, got True")

    @property
    def is_by_block(self) -> bool:
        """Whether each block has a scale."""
        return not self.is_given and self.scale == "block"

    @property
    def is_given(self) -> bool:
        """Whether the scale is an array of the caller's."""
        return not isinstance(self.scale, str)

    @property
    def given(self) -> Any:
        """The scale that is given, or None."""
        return self.scale if self.is_given else None

    def __eq__(self, other: object) -> bool:
        """Tell whether another one asks for the same. A given scale is equal to itself alone."""
        if not isinstance(other, Quantize):
            return NotImplemented
        return self.told == other.told and self.given is other.given

    def __hash__(self) -> int:
        """Return the hash of what equal ones have in common."""
        return hash(self.told)

    @property
    def told(self) -> tuple[Any, ...]:
        """All that a call depends on, except a given scale."""
        how = "given" if self.is_given else self.scale
        bounds = self.scale_min, self.scale_max
        return self.dtype, how, self.block, self.via, *bounds, self.column_major, self.amax

    @property
    def scale_dtype(self) -> str:
        """The dtype of the scales."""
        return dtype_of_scales(self.block)


@overload
def dequantize(
    q: np.ndarray[Any, Any], scale: Any, *, dtype: Any = None
) -> np.ndarray[Any, np.dtype[np.float32]]: ...
@overload
def dequantize(q: _Array, scale: Any, *, dtype: Any = None) -> _Array: ...
def dequantize(q: Any, scale: Any, *, dtype: Any = None) -> Any:
    """Compute ``q * scale`` in float32, from the results of a norm with `Quantize`.

    Parameters
    ----------
    q : array
        Of NumPy, CuPy, torch or JAX, of float8_e4m3fn, float8_e5m2 or int8. CuPy has no float8
        dtypes: there it is of uint8 or int8.
    scale : array
        Of float32, with one element, a shape that broadcasts to q's, or one for each block of 128
        elements of the last axis. Of float8_e8m0fnu, which is uint8 in CuPy, one for each 32. It is
        on q's device.
    dtype : dtype, optional
        What the bytes of a q of uint8 stand for.

    Returns
    -------
    array of float32
        Of q's shape and framework. torch and JAX can trace the call.

    Raises
    ------
    TypeError, ValueError
        If a dtype or a shape is another one, or dtype is missing for uint8.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> q = np.array([[0x38, 0x7E]], np.uint8)
    >>> cupynorm.dequantize(q, np.float32([2]), dtype="float8_e4m3fn")
    array([[  2., 896.]], dtype=float32)
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(q, torch.Tensor):
        from cupynorm.torch._kernels import check_dense
        from cupynorm.torch._quantize import dequantized

        _check_kind(scale, torch.Tensor, "torch tensor")
        check_dense("q", q)
        check_dense("scale", scale)
        if scale.device != q.device:
            raise ValueError(f"scale must be on q's device, {q.device}; got {scale.device}")
    elif jax is not None and isinstance(q, jax.Array):
        from cupynorm.jax._quantize import dequantized

        _check_kind(scale, jax.Array, "JAX array")
    else:
        family = _arrays.family_of("q", q)
        q, scale = (family.take(n, a, dtypes=_BYTES) for n, a in (("q", q), ("scale", scale)))
        _checks.check_device("scale", scale, q)
        told = _check_codes(q, scale, dtype)
        with np.errstate(all="ignore"), _arrays.on_device_of(q), kept_if_captured(q):
            made = _dequantized(q, scale, *told)
            # NumPy makes a number of an array without axes.
            return family.give(np.asarray(made) if _arrays.is_numpy(q) else made)
    return dequantized(q, scale, *_check_codes(q, scale, dtype))


_BYTES = "float32", "int8", "uint8"


def _check_kind(scale: Any, kind: type, words: str) -> None:
    if not isinstance(scale, kind):
        raise TypeError(f"scale must be a {words}, as q is; got {type(scale).__name__}")


def _check_codes(q: Any, scale: Any, dtype: Any) -> tuple[str, int | None]:
    """Check the arguments of `dequantize`; return q's dtype, and the size of a block or None."""
    found = dtype_name(q.dtype)
    if dtype is not None:
        told = _to_name("dtype", dtype)
        expected = (told,) if told == "int8" else (told, "uint8")
        if found not in expected:
            words = " or ".join(expected)
            raise TypeError(f"q.dtype must be {words}, as dtype says; got {found}")
        found = told
    elif found == "uint8":
        raise TypeError("dtype must say what a q of uint8 stands for, got None")
    if found not in LARGEST:
        raise TypeError(f"q.dtype must be {_THREE}, got {found}")
    of_scale = dtype_name(scale.dtype)
    if of_scale not in ("float32", MX_SCALE, "uint8"):
        raise TypeError(f"scale.dtype must be float32 or {MX_SCALE}, got {of_scale}")
    return found, _block_of(tuple(q.shape), tuple(scale.shape), of_scale)


def _block_of(shape: tuple[int, ...], of_scale: tuple[int, ...], dtype: str) -> int | None:
    """Return how many elements of the last axis share a scale, None if scales broadcast."""
    if math.prod(of_scale) == 1 and dtype == "float32":
        return None
    if dtype == "float32" and _checks.broadcasts(of_scale, shape):
        return None
    if not shape:
        raise ValueError(f"q must have an axis for scales of {dtype}, got none")
    block = BLOCK if dtype == "float32" else BLOCK_MX
    expected = (*shape[:-1], -(-shape[-1] // block))
    if of_scale != expected:
        raise ValueError(
            f"scale must have shape {expected}, one for each {block} of the last axis of q"
            f"{', or broadcast to q' if dtype == 'float32' else ''}; got {of_scale}"
        )
    return block


# ---- calls of the norms --------------------------------------------------------------------------


def check_call(
    quantize: Any, x: Any, axis: Any, out_dtype: Any, out: Any = None
) -> tuple[int, ...]:
    """Check what a norm is told with `quantize`; return the normalized axes, from the end."""
    check_quantize(quantize, out_dtype)
    if out is not None:
        raise ValueError(f"out must be None with quantize, got a {type(out).__name__}")
    ndim = len(x.shape)
    axes = tuple(a - ndim for a in _checks.normalized_axes(ndim, axis))
    if quantize.is_by_block and axes != (-1,):
        raise ValueError(f"axis must be the last one if scale is 'block', got {axis!r}")
    return axes


def check_quantize(quantize: Any, out_dtype: Any) -> None:
    """Check that it is one, and that y has no other dtype."""
    if not isinstance(quantize, Quantize):
        raise TypeError(f"quantize must be a cupynorm.Quantize or None, got {quantize!r}")
    if out_dtype is not None:
        raise ValueError(f"out_dtype must be None with quantize, which has via; got {out_dtype}")


def dtype_of_y(quantize: Quantize, x: Any, total: Any) -> str:
    """Return the name of the dtype to round y to. What is normalized has the dtype `total`."""
    if quantize.via == "x":
        return dtype_name(x.dtype)
    if quantize.via is None:
        name = dtype_name(total)
        if name not in _arrays.FLOATS:  # what residual_dtype may be, such as float or "f8"
            with suppress(TypeError):  # a wrong one is named where it is taken
                name = _arrays.DTYPES[_checks.to_dtype("residual_dtype", total)]
        return "float64" if name == "float64" else "float32"
    return str(quantize.via)


def check_scale_dtype(scale: Any, name: str = "quantize.scale") -> None:
    """Check the dtype of a scale that is given, of any framework."""
    if dtype_name(scale.dtype) != "float32":
        raise TypeError(f"{name}.dtype must be float32, got {scale.dtype}")


def taken_scale(
    quantize: Quantize, family: _arrays.Family, x: Any, name: str = "quantize.scale"
) -> Any:
    """Return a given scale as a NumPy or CuPy array, checked; None if it is to be computed."""
    if not quantize.is_given:
        return None
    scale = family.take(name, quantize.scale, dtypes=("float32",))
    check_scale_dtype(scale, name)
    _checks.check_memory(name, scale, family.take("x", x))
    return scale


def pass_of_kernel(
    of_y: ForwardSpec, options: Options, told: tuple[Any, ...], n: int
) -> tuple[QuantizedSpec, Options]:
    """Return the pass over rows of n elements that quantizes y itself. `told`: `Quantize.told`."""
    dtype, how, block, _, *bounds, column_major, amax = told
    spec = QuantizedSpec(
        **{field.name: getattr(of_y, field.name) for field in fields(of_y)},
        q=dtype,
        scale=dtype_of_scales(block),
        scale_given=how == "given",
        scale_columns=0 if block == BLOCK and n <= BLOCK else block or 0,  # one block is the row
        column_major=column_major,
        amax=amax,
    )
    return spec, replace(options, scale_bounds=tuple(bounds))


def dtype_of_scales(block: int | None) -> str:
    """Return the dtype of the scales of blocks of so many elements, or of rows."""
    return MX_SCALE if block == BLOCK_MX else "float32"


def of_arrays(
    y: Any, axes: tuple[int, ...], quantize: Quantize, scale: Any
) -> tuple[Any, Any, Any]:
    """Return the codes of a NumPy or CuPy array, its scales, and its amax or None.

    `scale` is a given one, or None.
    """
    xp = _module_of(y)
    with np.errstate(all="ignore"), _arrays.on_device_of(y):
        if scale is None:
            scale = scales_of(xp, y, axes, quantize)
        if quantize.column_major:
            rows, scale = scale, new_by_columns(xp, scale.shape)
            scale[...] = rows
        factor = power_of(scale) if quantize.block == BLOCK_MX else scale
        factor = expanded(xp, factor, y.shape, quantize.block)
        amax = amax_of(xp, y) if quantize.amax else None
        return codes_of(xp, y, factor, quantize.dtype), scale, amax


def strides_by_column(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strides of column-major scales, in elements. Sizes may be symbolic."""
    *kept, _ = shape
    strides = tuple(math.prod(kept[i + 1 :]) for i in range(len(kept)))
    return (*strides, (math.prod(kept) + 3) // 4 * 4)


def new_by_columns(xp: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of NumPy or CuPy for column-major scales."""
    strides = strides_by_column(shape)
    whole = xp.empty(shape[-1] * strides[-1], np.float32)
    of_bytes = tuple(whole.itemsize * stride for stride in strides)
    return xp.lib.stride_tricks.as_strided(whole, shape, of_bytes)


# ---- arithmetic, of NumPy, CuPy and jax.numpy ----------------------------------------------------


# How two arrays are divided, or an array and a number: to the nearest number of their dtype.
Divide = Callable[[Any, Any], Any]


class _Float8(NamedTuple):
    mantissa: int  # bits
    bias: int
    largest: int  # the code of the largest finite number


_FLOAT8 = {"float8_e4m3fn": _Float8(3, 7, 0x7E), "float8_e5m2": _Float8(2, 15, 0x7B)}
_NAN = 0x7F  # the code of NaN, in both


def scales_of(
    xp: Any,
    y: Any,
    axes: tuple[int, ...],
    quantize: Quantize,
    divide: Divide = operator.truediv,
) -> Any:
    """Return the scales: float32, or the codes of float8_e8m0fnu."""
    size = _sizes(xp, y)
    if quantize.block is None:
        size = size.max(axis=axes, keepdims=True)
    else:
        *kept, n = size.shape
        spare = -n % quantize.block
        if spare:
            size = xp.pad(size, [(0, 0)] * len(kept) + [(0, spare)])
        size = size.reshape(*kept, (n + spare) // quantize.block, quantize.block).max(axis=-1)
    if quantize.block == BLOCK_MX:
        ratio = _narrowed(xp, size * size.dtype.type(PER_POWER[quantize.dtype]))
    else:
        largest = size.dtype.type(LARGEST[quantize.dtype])
        ratio = divide(size, largest).astype(np.float32)
    scale = xp.clip(ratio, np.float32(quantize.scale_min), np.float32(quantize.scale_max))
    if quantize.block != BLOCK_MX:
        return scale
    # The exponent's bits, of a positive normal number, are a code of float8_e8m0fnu.
    return (scale.view(np.uint32) >> np.uint32(23)).astype(np.uint8)


def amax_of(xp: Any, y: Any) -> Any:
    """Return the largest magnitude of all elements, an array of one float32."""
    size = _sizes(xp, y)
    largest = size.max() if y.size else xp.zeros((), size.dtype)
    return largest.astype(np.float32).reshape(1)


def _sizes(xp: Any, y: Any) -> Any:
    wide = _widened(y)
    return xp.where(xp.isnan(wide), wide.dtype.type(0), xp.abs(wide))


def power_of(codes: Any) -> Any:
    """Return the powers of two that codes of float8_e8m0fnu stand for, except the least one."""
    return (codes.astype(np.uint32) << np.uint32(23)).view(np.float32)


def expanded(xp: Any, scale: Any, shape: tuple[int, ...], block: int | None) -> Any:
    """Return scales that broadcast to a shape."""
    if block is not None:
        return xp.repeat(scale, block, axis=-1)[..., : shape[-1]]
    return scale.reshape(()) if scale.size == 1 else scale


def codes_of(xp: Any, y: Any, scale: Any, dtype: str, divide: Divide = operator.truediv) -> Any:
    """Return the codes of y / scale: int8, or uint8 for the float8 dtypes."""
    wide = _widened(y)
    ratio = divide(wide, scale.astype(wide.dtype, copy=False))
    return _encoded(xp, _narrowed(xp, ratio), dtype)


def _encoded(xp: Any, values: Any, dtype: str) -> Any:
    """Return the codes of float32 values, rounded to nearest, ties to even, and saturated."""
    if dtype == "int8":
        whole = xp.clip(xp.rint(values), np.float32(-128), np.float32(127))
        return xp.where(xp.isnan(values), np.float32(0), whole).astype(np.int8)
    mantissa, bias, largest = _FLOAT8[dtype]
    shift = 23 - mantissa
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    odd = (size >> np.uint32(shift)) & np.uint32(1)
    normal = (size + odd + np.uint32((1 << shift - 1) - 1)) >> np.uint32(shift)
    normal = normal - np.uint32(127 - bias << mantissa)
    # This sum has the spacing of dtype's subnormal numbers, so the addition rounds to them.
    offset = np.float32(2.0 ** (1 - bias + shift))
    subnormal = (xp.abs(values) + offset).view(np.uint32) - offset.view(np.uint32)
    is_subnormal = size < np.float32(2.0 ** (1 - bias)).view(np.uint32)
    code = xp.minimum(xp.where(is_subnormal, subnormal, normal), np.uint32(largest))
    code = code | ((bits >> np.uint32(24)) & np.uint32(0x80))
    return xp.where(xp.isnan(values), np.uint32(_NAN), code).astype(np.uint8)


def _dequantized(q: Any, scale: Any, dtype: str, block: int | None) -> Any:
    """Return q * scale of NumPy or CuPy arrays."""
    xp = _module_of(q)
    factor = _decoded(xp, scale, MX_SCALE) if block == BLOCK_MX else scale
    return _decoded(xp, q, dtype) * expanded(xp, factor, q.shape, block)


def _decoded(xp: Any, codes: Any, dtype: str) -> Any:
    """Return codes as float32. CuPy knows no float8."""
    if dtype == "int8":
        return codes.astype(np.float32)
    device = None if xp is np else codes.device.id
    return _numbers(xp, dtype, device)[codes.view(np.uint8).astype(np.int32)]


@functools.cache
def _numbers(xp: Any, dtype: str, device: int | None) -> Any:
    """Return the numbers of all codes, on the current device. Captured graphs may use the array."""
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float32)
    return xp.asarray(every)


def kept_if_captured(array: Any) -> AbstractContextManager[Any]:
    """Keep what CuPy allocates, next to an array of its own, if a CUDA graph captures it."""
    if _arrays.is_numpy(array):
        return nullcontext()
    from cupynorm import _calls

    return _calls.kept_if_captured()


def _module_of(array: Any) -> Any:
    if _arrays.is_numpy(array):
        return np
    import cupy

    return cupy


def _widened(y: Any) -> Any:
    return _arrays.widened(y, "float64" if y.dtype == np.float64 else "float32")


def _narrowed(xp: Any, values: Any) -> Any:
    """Return values as float32, which a further rounding to fewer bits takes for them."""
    return _arrays.rounded_to_odd(xp, values) if values.dtype == np.float64 else values


# ---- names ---------------------------------------------------------------------------------------

_THREE = "float8_e4m3fn, float8_e5m2 or int8"


def _to_name(name: str, dtype: Any) -> str:
    """Return the name of one of the dtypes of q, from anything that names it."""
    found = dtype_name(dtype)
    if found not in LARGEST and isinstance(dtype, type):  # as NumPy's and ml_dtypes' are
        found = np.dtype(dtype).name
    if found not in LARGEST:
        raise TypeError(f"{name} must be {_THREE}, got {dtype!r}")
    return found


def _check_given(scale: Any) -> None:
    """Check that a scale is an array of one element. Its dtype and device are a call's matter."""
    shape = getattr(scale, "shape", None)
    if shape is None or not hasattr(scale, "dtype") or _arrays.is_number(scale):
        raise TypeError(f"scale must be 'row', 'block' or an array of one element, got {scale!r}")
    if math.prod(shape) != 1:
        raise ValueError(
            f"scale must be 'row', 'block' or an array of one element, got shape {tuple(shape)}"
        )
