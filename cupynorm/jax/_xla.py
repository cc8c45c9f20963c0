"""XLA's foreign function interface through ctypes: Python functions that XLA calls.

XLA hands a handler one pointer, to a call frame. The header xla/ffi/api/c_api.h under
`jax.ffi.include_dir()` defines it. This module sees memory as one array of bytes. `struct` reads
all fields of a structure at once: the 8 fields of a frame as fast as 2 by themselves. Each call
carries one attribute, `call`, a string with everything that the addresses do not say. It survives
in a compilation cache and in an exported program, where an index of this process would not.

A call that was prepared allocates, compiles and waits for nothing, and holds no lock.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

__all__ = ["Handler", "Launch", "Prepare"]

# Launch on a stream (0 where there is none), on the addresses of the operands and results.
Launch = Callable[[int, Sequence[int]], object]
# From the call's string, the device's ordinal and the stream to a launch, and to whether it serves
# later calls too.
Prepare = Callable[[str, int, int], tuple[Launch, bool]]

# Any address in user space, on any machine, is within it: nothing is read until it is indexed.
_memory: Any = (ctypes.c_char * sys.maxsize).from_address(0)

WORD = struct.Struct("Q")  # such as the first field of most structures, their size
# XLA_FFI_CallFrame: extension, API, context; number of operands, pointers to them; number of
# results, pointers to them; attributes.
FRAME = struct.Struct("8x 3Q 24x Q 8x Q 16x Q 8x Q 40x Q")
BUFFER = struct.Struct("24x Q")  # XLA_FFI_Buffer: data
SPAN = struct.Struct("2Q")  # XLA_FFI_ByteSpan: first byte, length
API = struct.Struct("48x 3Q 8x Q 96x Q")  # XLA_FFI_Api: the functions that _Api names
EXTENSION = struct.Struct("8x I 12x Q")  # XLA_FFI_Metadata_Extension: type, metadata
METADATA_EXTENSION = 1
# XLA_FFI_Metadata, behind three words: major and minor version of the interface, traits.
METADATA_START, METADATA = 24, struct.Struct("2i I")
COMMAND_BUFFER_COMPATIBLE = 1
# The oldest version of the interface, which each later one accepts: no field here is newer.
MAJOR, MINOR = 0, 1

INTERNAL = 13


class Handler:
    """A target of `jax.ffi.ffi_call` on one platform. It stays registered for ever.

    Raises
    ------
    ImportError
        If the structures of the installed jaxlib differ from those that this module reads.
    """

    def __init__(self, target: str, platform: str, prepare: Prepare) -> None:
        self._prepare = prepare
        self._on_stream = platform == "CUDA"
        self._launches: dict[tuple[bytes, int], Launch] = {}
        self.refusal: str | None = None
        self._callback = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)(self._called)
        address = ctypes.cast(self._callback, ctypes.c_void_p).value
        # XLA asks for the metadata now, or never for a missing platform.
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
            api = FRAME.unpack_from(_memory, frame)[1]
            return _api(api).error(f"{type(error).__name__}: {error}")

    def _answer(self, frame: int) -> int:
        memory = _memory
        fields = FRAME.unpack_from(memory, frame)
        extension, api, context, n_operands, operands, n_results, results, attributes = fields
        if extension:
            kind, metadata = EXTENSION.unpack_from(memory, extension)
            if kind == METADATA_EXTENSION:
                return self._describe(frame, api, metadata)
        if self.refusal:
            raise ImportError(self.refusal)
        xla = _api(api)
        device = xla.ask(xla.device_ordinal, context)
        stream = xla.ask(xla.stream, context) if self._on_stream else 0
        buffers = (
            *_words(n_operands).unpack_from(memory, operands),
            *_words(n_results).unpack_from(memory, results),
        )
        data = BUFFER.unpack_from
        # The one attribute is a string.
        (attribute,) = WORD.unpack_from(memory, attributes)
        start, length = SPAN.unpack_from(memory, attribute)
        call = memory[start : start + length]
        launch = self._launches.get((call, device))
        if launch is None:
            launch, serves_later_calls = self._prepare(call.decode(), device, stream)
            if serves_later_calls:
                self._launches[call, device] = launch
        launch(stream, [data(memory, buffer)[0] for buffer in buffers])
        return 0

    def _describe(self, frame: int, api: int, metadata: int) -> int:
        """Answer XLA's questions at registration, and check that the structures fit."""
        least = {
            "call frame": (frame, FRAME.size),
            "metadata": (metadata, METADATA_START + METADATA.size),
            "API": (api, API.size),
        }
        self.refusal = _misfit(
            {name: (*WORD.unpack_from(_memory, at), size) for name, (at, size) in least.items()}
        )
        traits = COMMAND_BUFFER_COMPATIBLE if self._on_stream else 0
        METADATA.pack_into(_memory, metadata + METADATA_START, MAJOR, MINOR, traits)
        return 0


@functools.cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"{count}Q")


def _misfit(sizes: dict[str, tuple[int, int]]) -> str | None:
    """Say which structures are smaller than the fields that are read, or return None."""
    small = [f"{name} {is_} (of {least})" for name, (is_, least) in sizes.items() if is_ < least]
    if not small:
        return None
    return (
        f"jaxlib {jaxlib.__version__} is not one that cupynorm.jax can be called by: of XLA's FFI "
        f"structures, these have too few bytes: {', '.join(small)}"
    )


# It keeps the interpreter's lock. Giving that up and taking it again would cost more.
_function = ctypes.PYFUNCTYPE(ctypes.c_size_t)

# XLA_FFI_Stream_Get_Args and XLA_FFI_DeviceOrdinal_Get_Args: size, extension, context, answer.
_Question = ctypes.c_uint64 * 4
# One takes 0.4 us to make. A caller takes one and puts it back, so no two threads share one.
_questions: list[Any] = []


class _Api:
    """The functions of XLA_FFI_Api. Each takes a structure that begins with its size."""

    def __init__(self, address: int) -> None:
        functions = map(_function, API.unpack_from(_memory, address))
        self._create, self._message, self._destroy, self.stream, self.device_ordinal = functions

    def ask(self, getter: Any, context: int) -> int:
        """Return the answer of `stream` or `device_ordinal` for a context."""
        try:
            question = _questions.pop()
        except IndexError:
            question = _Question(32)
        question[2] = context
        question[3] = 0  # its low half is an ordinal
        error = getter(question)
        if error:
            raise RuntimeError(self._taken(error))
        answer: int = question[3]
        _questions.append(question)
        return answer

    def _taken(self, error: int) -> str:
        """Return the message of an XLA error, and free the error."""
        arguments = (ctypes.c_uint64 * 4)(32, 0, error)
        self._message(arguments)
        message = ctypes.string_at(arguments[3]).decode()
        self._destroy((ctypes.c_uint64 * 3)(24, 0, error))
        return message

    def error(self, message: str) -> int:
        """Return an XLA error with a message."""
        text = ctypes.create_string_buffer(message.encode())
        arguments = (ctypes.c_uint64 * 4)(28, 0, ctypes.addressof(text), INTERNAL)
        return self._create(arguments)  # type: ignore[no-any-return]


_api = functools.cache(_Api)  # XLA has one table, for ever
