"""Arrays of any framework as NumPy or CuPy arrays, and back; and an array as rows.

NumPy and CuPy arrays are taken as they are. Any other array comes and goes by DLPack, without a
copy. DLPack also orders the streams: the producer makes CuPy's current stream wait for the array,
and CuPy makes the consumer's stream wait for the result.
"""

from __future__ import annotations

import contextlib
import copy
import numbers
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cupynorm._environment import check_not_forked, import_cupy

__all__ = [
    "DTYPES",
    "Family",
    "address_of",
    "check_known",
    "check_no_mask",
    "device_of",
    "dtype_name",
    "family_of",
    "is_number",
    "is_numpy",
    "on_device_of",
    "rounded",
    "rounded_to_odd",
    "row_stride",
    "rows_side_by_side",
    "sum_to_shape",
    "to_numpy",
    "widened",
]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {np.dtype(name): name for name in ("float64", "float32", "float16")} | {
    BFLOAT16: "bfloat16"
}
FLOATS = tuple(DTYPES.values())
_OF_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_OF_NAMES |= {name: np.dtype(name) for name in ("uint8", "int8")}
# CuPy has their bytes.
_OF_NAMES |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), np.dtype(np.uint8))

NO_STRIDES = "{} must be False for JAX arrays, which have no strides; got True"

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13


class Family:
    """The arrays that one call may mix: those of one framework."""

    def __init__(self, array_type: type, label: str, *, is_cupy: bool = False) -> None:
        self.array_type = array_type
        self.label = label
        self.is_cupy = is_cupy

    def with_device_of(self, array: Any) -> Family:
        """Return the family of one call, whose arrays must be where its first one is.

        DLPack and NumPy know one CPU. JAX may have several CPU devices.
        """
        return self

    def take(
        self, name: str, array: Any, *, output: bool = False, dtypes: tuple[str, ...] = FLOATS
    ) -> Any:
        """Return an argument as a NumPy or CuPy array that shares its memory.

        A torch tensor that is a negated view is copied, since its memory has the other sign. A
        tensor of zeros without memory is copied too. A dtype outside `dtypes` may be refused here,
        if the array could not be converted.
        """
        self.check_type(name, array)
        if self.is_cupy:
            check_not_forked()
        if isinstance(array, np.matrix):
            return array.view(np.ndarray)  # whose operations are those of arrays
        return array

    def check_type(self, name: str, array: Any, besides: str = "") -> None:
        """Raise TypeError unless it is an array of the framework, or `besides`, in words."""
        if not isinstance(array, self.array_type):
            is_first = name in ("x", "y")  # to which a call's other arrays are compared
            alike = "" if is_first else ", as the other arrays of the call are"
            raise TypeError(
                f"{name} must be {besides}a {self.label}{alike}; got {_type_name(array)}"
            )
        if is_numpy(array):
            check_no_mask(name, array)

    def check_holds(self, name: str, dtype: np.dtype[Any]) -> None:
        """Raise TypeError if the framework, as it is configured, has no arrays of a dtype."""

    def check_has_strides(self, name: str) -> None:
        """Raise ValueError if the framework has none, as the argument of this name wants."""

    def give(self, array: Any) -> Any:
        """Return a result as an array of the framework."""
        return array

    def give_as(self, dtype: str, array: Any) -> Any:
        """Return a result whose bytes are of a dtype, as uint8 where the framework lacks it."""
        return array if self.is_cupy else array.view(np.dtype(dtype))

    def give_present(self, array: Any) -> Any:
        """Return a result, or None if there is none."""
        return None if array is None else self.give(array)

    def give_back(self, target: Any, array: Any) -> Any:
        """Return an output that the caller gave and `array` has written."""
        return target


NUMPY = Family(np.ndarray, "NumPy array")
_LABELS = {"torch": "torch tensor", "jax": "JAX array"}


class _DLPackFamily(Family):
    def __init__(self, array_type: type, namespace: ModuleType) -> None:
        root = namespace.__name__.split(".")[0]
        super().__init__(array_type, _LABELS.get(root, f"{root} array"))
        self.namespace = namespace
        self.immutable = namespace.__name__ == "jax.numpy"
        self.is_torch = namespace.__name__ == "torch"
        self.device: Any = None  # where a call's arrays are, if they are JAX's

    def with_device_of(self, array: Any) -> Family:
        if not self.immutable:
            return self
        family = copy.copy(self)
        family.device = array.device
        return family

    def take(
        self, name: str, array: Any, *, output: bool = False, dtypes: tuple[str, ...] = FLOATS
    ) -> Any:
        array = super().take(name, array)
        if output and self.immutable:
            raise TypeError(f"{name} must be None for JAX arrays, which are immutable")
        if self.is_torch:
            array = self._without_autograd(name, array, output=output)
        if str(array.dtype).rpartition(".")[2] not in dtypes:
            *others, last = dtypes
            expected = f"{', '.join(others)} or {last}" if others else last
            raise TypeError(f"{name}.dtype must be {expected}, got {array.dtype}")
        try:
            taken = self._import(name, array)
        except (BufferError, RuntimeError, ValueError) as error:
            if type(error).__module__.startswith("cupy"):
                raise  # a fault of the GPU, not of the argument
            raise TypeError(f"{name} must be readable in place by DLPack: {error}") from error
        self.check_holds(f"{name}.dtype", taken.dtype)
        # JAX has several CPU devices. It moves an array that is not committed to one.
        elsewhere = self.device is not None and array.device != self.device
        if is_numpy(taken) and elsewhere and array.committed:
            raise ValueError(f"{name} must be on x's device, {self.device}; got {array.device}")
        return taken

    def _without_autograd(self, name: str, tensor: Any, *, output: bool) -> Any:
        """Return a torch tensor that is no more than the numbers in its memory."""
        torch = self.namespace
        other = self._other_than_plain(tensor)
        if other is not None:
            raise TypeError(
                f"{name} must be a plain tensor, got {other}: the norms of cupynorm.torch take "
                "others"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}")
        if tensor.requires_grad and torch.is_grad_enabled():
            instead = f"pass {name}.detach()"
            if not output:
                instead = (
                    f"call the function of cupynorm.torch, or a norm of cupynorm.fuse itself; or "
                    f"{instead}, and compute its gradient with the backward function"
                )
            raise TypeError(f"{name} requires grad, which would be lost here: {instead}")
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise TypeError(
                f"{name} has a tangent, which would be lost here: call the function of "
                f"cupynorm.torch, or pass {name}.detach()"
            )
        # The imaginary part of a conjugate is one. DLPack hands out what is not negated.
        if tensor.is_neg():
            if output:
                raise TypeError(f"{name} must not be a view that negates, got one: is_neg()")
            tensor = tensor.resolve_neg()
        if tensor._is_zerotensor() and not output:  # it has no memory
            tensor = tensor.clone()
        # Within torch.func.grad, a detached tensor belongs to the transform.
        return tensor.detach() if tensor.requires_grad else tensor

    def _other_than_plain(self, tensor: Any) -> str | None:
        """Name the kind of a torch tensor that is more than its memory, or return None."""
        torch = self.namespace
        # This comes first: torch.compile would trace the rest. Other threads may be compiling.
        if torch.compiler.is_dynamo_compiling():
            return "one that is being compiled"
        # The memory of a DTensor or a FakeTensor is not what its shape says.
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"a {type(tensor).__qualname__}"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "one of a transform, such as torch.func.vmap"
        # A trace by torch.jit or make_fx would record the result as a constant.
        proxy = torch._C._TorchDispatchModeKey.PROXY
        if (
            torch._C._is_tracing()
            or torch._C._get_dispatch_mode(proxy) is not None
            or torch._ops._get_dispatch_mode_pre_dispatch(proxy) is not None
        ):
            return "one within a trace"
        return "a nested one" if tensor.is_nested else None

    def check_holds(self, name: str, dtype: np.dtype[Any]) -> None:
        if self.immutable and sys.modules["jax"].dtypes.canonicalize_dtype(dtype) != dtype:
            raise TypeError(f"{name} must be one that JAX has enabled, got {dtype} without x64")
        if dtype == BFLOAT16 and not hasattr(self.namespace, "bfloat16"):
            raise TypeError(f"{name} must be one that {self.namespace.__name__} has, got bfloat16")

    def check_has_strides(self, name: str) -> None:
        if self.immutable:
            raise ValueError(NO_STRIDES.format(name))

    def _import(self, name: str, array: Any) -> Any:
        device_type, device = array.__dlpack_device__()
        if self.is_torch and array.numel() and not array.data_ptr():
            raise ValueError("it has no memory, its storage was freed")  # NumPy takes any
        if device_type in (_DLPACK_CPU, _DLPACK_CUDA_HOST):  # of the host, pinned or not
            if str(array.dtype).rpartition(".")[2] != "bfloat16":
                return np.from_dlpack(array)
            # NumPy's DLPack knows no bfloat16.
            if self.immutable:
                return np.asarray(array)
            return np.from_dlpack(array.view(self.namespace.int16)).view(BFLOAT16)
        if device_type in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            check_not_forked()
            return import_cupy(f"{name} is on GPU {device}").from_dlpack(array)
        raise TypeError(
            f"{name} must be on the CPU or on a CUDA GPU, got DLPack device type {device_type}"
        )

    def _export(self, array: Any) -> Any:
        """Return a CuPy array as one of the framework, whose stream waits for it."""
        with on_device_of(array):  # CuPy orders the current stream of the current device
            return self.namespace.from_dlpack(array)

    def give(self, array: Any) -> Any:
        if not is_numpy(array):
            return self._export(array)
        options = {} if self.device is None else {"device": self.device}
        if array.dtype == BFLOAT16:
            crossed = self.namespace.from_dlpack(array.view(np.int16), **options)
            given = crossed.view(self.namespace.bfloat16)
        else:
            given = self.namespace.from_dlpack(array, **options)
        if self.immutable:
            given.block_until_ready()  # at exit JAX's client waits for ever for pending work
        return given

    def give_as(self, dtype: str, array: Any) -> Any:
        given, found = self.give(array), getattr(self.namespace, dtype, None)
        return given if found is None else given.view(found)

    def give_back(self, target: Any, array: Any) -> Any:
        if self.is_torch:
            # What autograd saved of it has changed.
            self.namespace.autograd.graph.increment_version(target)
        if not is_numpy(array):
            self._export(array)
        return target


def _type_name(array: Any) -> str:
    return f"{type(array).__module__.split('.')[0]}.{type(array).__qualname__}"


def family_of(name: str, array: Any) -> Family:
    """Return the array's family. The call's other arrays must share it."""
    kind = type(array)
    if kind not in _families:
        _families[kind] = _family_of_type(kind)
    family = _families[kind]
    if family is None:
        raise TypeError(
            f"{name} must be a NumPy or CuPy array, a torch tensor, a JAX array (within jit and "
            "grad, cupynorm.jax has the norms), or one of another library with __dlpack__ and a "
            f"from_dlpack function; got {_type_name(array)}"
        )
    return family


_families: dict[type[Any], Family | None] = {}


def _family_of_type(array_type: type[Any]) -> Family | None:
    if issubclass(array_type, np.ndarray):
        return NUMPY
    cupy = sys.modules.get("cupy")
    if cupy is not None and issubclass(array_type, cupy.ndarray):
        return Family(cupy.ndarray, "CuPy array", is_cupy=True)
    if not hasattr(array_type, "__dlpack__") or not hasattr(array_type, "__dlpack_device__"):
        return None
    # This is the class that defines __dlpack__: torch.Tensor for a Parameter or a user's subclass.
    base = next(c for c in reversed(array_type.__mro__) if hasattr(c, "__dlpack__"))
    root = base.__module__.split(".")[0]
    # JAX's arrays live in jaxlib, their functions in jax.numpy.
    namespace = sys.modules.get("jax.numpy" if root in ("jax", "jaxlib") else root)
    if namespace is None or not hasattr(namespace, "from_dlpack"):
        return None
    return _DLPackFamily(base, namespace)


def is_traced(array: Any) -> bool:
    """Tell whether JAX traces an array."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def check_known(**options: Any) -> None:
    """Raise TypeError for an option, or a part of one, that JAX traces."""
    for name, option in options.items():
        for value in option if isinstance(option, tuple | list) else (option,):
            if is_traced(value):
                raise TypeError(
                    f"{name} must be known when a program is traced: jit has it in "
                    f"static_argnames; got {value}"
                )


def check_no_mask(name: str, array: Any) -> None:
    """Raise TypeError for a NumPy array with a mask. This does not import numpy.ma."""
    if hasattr(array, "mask"):
        raise TypeError(f"{name} must have no mask, which would be lost: pass {name}.filled()")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of any framework."""
    return str(dtype).rpartition(".")[2]


def to_numpy(name: str | None) -> np.dtype[Any]:
    """Return the dtype for one of the names in specs."""
    dtype: np.dtype[Any] = _OF_NAMES[name or ""]
    return dtype


def is_numpy(array: Any) -> bool:
    """Tell a NumPy array from a CuPy array."""
    return isinstance(array, np.ndarray)


def widened(array: Any, dtype: str) -> Any:
    """Return an array of the four dtypes in a wider one.

    CuPy cannot cast bfloat16. Its bits are the upper half of float32's.
    """
    if array.dtype == BFLOAT16:
        array = (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(dtype, copy=False)


def rounded(xp: Any, values: Any, dtype: str) -> Any:
    """Return values, rounded once. CuPy cannot cast to bfloat16."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    is_wide = values.dtype == np.float64
    single = rounded_to_odd(xp, values) if is_wide else values.astype(np.float32)
    bits = single.view(np.uint32)
    to_even = (bits >> np.uint32(16)) & np.uint32(1)
    upper = (bits + np.uint32(0x7FFF) + to_even) >> np.uint32(16)
    upper = xp.where(xp.isnan(single), np.uint32(0x7FFF), upper)
    return upper.astype(np.uint16).view(BFLOAT16)


def rounded_to_odd(xp: Any, values: Any) -> Any:
    """Return float64 values as float32, whose last bit remembers if that was not exact.

    A further rounding to fewer bits then takes them for the values.
    """
    single = values.astype(np.float32)
    if xp.__name__ == "jax.numpy":
        # On a GPU XLA would compare the values with themselves, as if they were never rounded.
        single = sys.modules["jax"].lax.optimization_barrier(single)
    bits = single.view(np.uint32)
    toward_zero = bits - (xp.abs(single) > xp.abs(values)).astype(np.uint32)
    return xp.where(single == values, bits, toward_zero | np.uint32(1)).view(np.float32)


def sum_to_shape(array: Any, shape: tuple[int, ...]) -> Any:
    """Return the sum of a CuPy array over the axes along which this shape was repeated.

    CuPy adds in an order of its own, which is fixed. In float64 no order costs a digit.
    """
    full = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, of) in enumerate(zip(full, array.shape, strict=True)) if n != of)
    return (array.sum(axis=axes, dtype=np.float64) if axes else array).reshape(shape)


def device_of(array: Any) -> str:
    """Name the device of a NumPy or CuPy array."""
    return "cpu" if is_numpy(array) else f"cuda:{array.device.id}"


def on_device_of(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which CuPy works on the device of an array."""
    return contextlib.nullcontext() if is_numpy(array) else array.device


def address_of(array: Any) -> int:
    """Return the address of a NumPy or CuPy array."""
    return int(array.ctypes.data if is_numpy(array) else array.data.ptr)


def is_number(value: Any) -> bool:
    """Tell a real number from an array."""
    return isinstance(value, numbers.Real | ml_dtypes.bfloat16)


def row_stride(shape: Sequence[int], strides: Sequence[int], itemsize: int, k: int) -> int | None:
    """Return the distance in elements between rows of the last k axes.

    None if the array has no such distance: the leading axes do not collapse to one stride, the
    normalized axes are not contiguous, or a stride is not a whole number of elements.

    Examples
    --------
    >>> row_stride((4, 8, 16), (1536, 192, 4), 4, 1)  # 16 columns of 48
    48
    >>> row_stride((8, 4, 16), (192, 1536, 4), 4, 1) is None  # transposed rows
    True
    """
    leading = len(shape) - k
    contiguous = itemsize
    for size, stride in zip(reversed(shape[leading:]), reversed(strides[leading:]), strict=True):
        if size != 1 and stride != contiguous:
            return None
        contiguous *= size
    rows, collapsed = 1, contiguous
    for size, stride in zip(reversed(shape[:leading]), reversed(strides[:leading]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            collapsed = stride
        elif stride != collapsed * rows:
            return None
        rows *= size
    return None if collapsed % itemsize else collapsed // itemsize


def rows_side_by_side(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, k: int
) -> int | None:
    """Return how many rows of the last k axes lie side by side, so that an array is contiguous.

    Its memory then has the shape (outer, elements of a row, rows side by side). None if it has not.

    Examples
    --------
    >>> images = np.zeros((4, 3, 8, 8), np.float32).transpose(0, 2, 3, 1)  # channels are rows
    >>> rows_side_by_side(images.shape, images.strides, 4, 1)
    64
    """
    kept = len(shape) - k
    sizes = [(n, step) for n, step in zip(shape[kept:], strides[kept:], strict=True) if n > 1]
    rows = [(n, step) for n, step in zip(shape[:kept], strides[:kept], strict=True) if n > 1]
    if not sizes:
        return None
    inner, rest = 1, sizes[-1][1]
    while rows and inner * itemsize < rest:
        n, step = rows.pop()
        if step != inner * itemsize:
            return None
        inner *= n
    expected = inner * itemsize
    for n, step in (*reversed(sizes), *reversed(rows)):
        if step != expected:
            return None
        expected *= n
    return inner if inner > 1 else None
