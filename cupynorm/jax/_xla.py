"""XLA's foreign function interface, spoken by ctypes: Python functions that XLA calls.

XLA hands a handler one pointer, to a call frame: the header xla/ffi/api/c_api.h under
`jax.ffi.include_dir()` is its definition. All of its fields are words of 8 bytes, or are read as
the low half of one, so that memory is seen here as one array of words, and a field is its index.
Each call carries one attribute, `call`, a string that says all that the addresses do not: it
survives in a compilation cache and in an exported program, as an index of this process would not.

Nothing is allocated on the device, compiled or waited for; no lock is held.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

__all__ = ["Handler", "Launch", "Prepare"]

# Launch on a stream (0 where there is none), on the addresses of the operands and results.
Launch = Callable[[int, Sequence[int]], object]
# From the call's string and the device's ordinal to its launch.
Prepare = Callable[[str, int], Launch]

# Any address in user space, on any machine, is within it: nothing is read until it is indexed.
_memory = (ctypes.c_uint64 * (1 << 53)).from_address(0)

# XLA_FFI_CallFrame, in words. args and rets are {struct_size, extension, size, types, pointers},
# attrs {struct_size, extension, size, types, names, values}.
FRAME_SIZE, FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT = 0, 1, 2, 3
OPERAND_COUNT, OPERANDS = 7, 9
RESULT_COUNT, RESULTS = 12, 14
ATTRIBUTES = 20
FRAME_BYTES = 168
# XLA_FFI_Buffer is {struct_size, extension, dtype, data, rank, dims}.
BUFFER_DATA = 3
# XLA_FFI_Api is {struct_size, extension, version (3 words), internal, functions}.
ERROR_CREATE, ERROR_MESSAGE, ERROR_DESTROY, STREAM_GET, DEVICE_ORDINAL_GET = 6, 7, 8, 10, 23
API_BYTES = 192
# XLA_FFI_Metadata_Extension is {struct_size, type, next, metadata}; XLA_FFI_Metadata is
# {struct_size, version {struct_size, extension, major and minor}, traits}.
EXTENSION_TYPE, METADATA = 1, 3
METADATA_EXTENSION = 1
METADATA_VERSION, METADATA_TRAITS = 3, 4
METADATA_BYTES = 36
COMMAND_BUFFER_COMPATIBLE = 1
# The oldest version of the interface, which each later one accepts: no field here is newer.
MAJOR, MINOR = 0, 1

INTERNAL = 13

# It keeps the interpreter's lock, which would cost more to give up and take than these calls do.
_function = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)


class Handler:
    """A target of `jax.ffi.ffi_call` on one platform; it stays registered for ever.

    Raises
    ------
    ImportError
        If the structures of the installed jaxlib are not those that are read here.
    """

    def __init__(self, target: str, platform: str, prepare: Prepare) -> None:
        self._prepare = prepare
        self._on_stream = platform == "CUDA"
        self._launches: dict[tuple[bytes, int], Launch] = {}
        self.refusal: str | None = None
        self._callback = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(self._called)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        # XLA asks for the metadata now or, of a platform that is not there, never.
        jax.ffi.register_ffi_target(
            target, jax.ffi.pycapsule(address), platform=platform, api_version=1
        )
        if self.refusal:
            raise ImportError(self.refusal)

    def _called(self, frame: int) -> int:
        # An exception that left a callback would be printed, and its return value garbage.
        try:
            return self._answer(frame)
        except BaseException as error:
            return _error(_memory[(frame >> 3) + FRAME_API], f"{type(error).__name__}: {error}")

    def _answer(self, frame: int) -> int:
        memory, header = _memory, frame >> 3
        extension = memory[header + FRAME_EXTENSION] >> 3
        if extension and memory[extension + EXTENSION_TYPE] & 0xFFFFFFFF == METADATA_EXTENSION:
            return self._describe(header, memory[extension + METADATA] >> 3)
        if self.refusal:
            raise ImportError(self.refusal)
        api = memory[header + FRAME_API] >> 3
        context = memory[header + FRAME_CONTEXT]
        device = _ask(api, DEVICE_ORDINAL_GET, context)
        stream = _ask(api, STREAM_GET, context) if self._on_stream else 0
        start = memory[header + OPERANDS] >> 3
        buffers = memory[start : start + memory[header + OPERAND_COUNT]]
        start = memory[header + RESULTS] >> 3
        buffers += memory[start : start + memory[header + RESULT_COUNT]]
        # The one attribute is a string: a pointer to its first byte and its length.
        attribute = memory[memory[header + ATTRIBUTES] >> 3] >> 3
        call = ctypes.string_at(memory[attribute], memory[attribute + 1])
        launch = self._launches.get((call, device))
        if launch is None:
            launch = self._launches[call, device] = self._prepare(call.decode(), device)
        launch(stream, [memory[(buffer >> 3) + BUFFER_DATA] for buffer in buffers])
        return 0

    def _describe(self, header: int, metadata: int) -> int:
        """Answer what XLA asks at registration, and look whether the structures fit."""
        api = _memory[header + FRAME_API] >> 3
        self.refusal = _misfit(
            {
                "call frame": (_memory[header + FRAME_SIZE], FRAME_BYTES),
                "metadata": (_memory[metadata], METADATA_BYTES),
                "API": (_memory[api], API_BYTES),
            }
        )
        _memory[metadata + METADATA_VERSION] = MAJOR | MINOR << 32
        traits = COMMAND_BUFFER_COMPATIBLE if self._on_stream else 0
        ctypes.c_uint32.from_address((metadata + METADATA_TRAITS) << 3).value = traits
        return 0


def _misfit(sizes: dict[str, tuple[int, int]]) -> str | None:
    """Say which structures are smaller than what is read of them, or return None."""
    small = [f"{name} {is_} (of {least})" for name, (is_, least) in sizes.items() if is_ < least]
    if not small:
        return None
    return (
        f"jaxlib {jaxlib.__version__} is not one that cupynorm.jax can be called by: of XLA's FFI "
        f"structures, these have too few bytes: {', '.join(small)}"
    )


_functions: dict[int, Any] = {}


def _call(api: int, function: int, arguments: Any) -> int:
    """Call a function of XLA_FFI_Api, all of which take one structure that begins with its size."""
    address = _memory[api + function]
    called = _functions.get(address)
    if called is None:
        called = _functions[address] = _function(address)
    return called(arguments)  # type: ignore[no-any-return]


def _ask(api: int, getter: int, context: int) -> int:
    """Return what a getter writes after the context that it is asked about."""
    arguments = (ctypes.c_uint64 * 4)(32, 0, context, 0)
    error = _call(api, getter, arguments)
    if error:
        raise RuntimeError(_message(api, error))
    return arguments[3]


def _message(api: int, error: int) -> str:
    """Return the message of an error of XLA's, and free it."""
    arguments = (ctypes.c_uint64 * 5)(40, 0, error, 0, 0)
    _call(api, ERROR_MESSAGE, arguments)
    message = ctypes.string_at(arguments[3]).decode()
    _call(api, ERROR_DESTROY, (ctypes.c_uint64 * 3)(24, 0, error))
    return message


def _error(api: int, message: str) -> int:
    text = ctypes.create_string_buffer(message.encode())
    arguments = (ctypes.c_uint64 * 4)(28, 0, ctypes.addressof(text), INTERNAL)
    return _call(api >> 3, ERROR_CREATE, arguments)
