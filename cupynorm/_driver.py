"""Launches by the CUDA driver.

CuPy's Function converts each argument on its own, 5.3 us a launch (H200's host). Here one struct
packs them all, into memory whose addresses the driver is given.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

__all__ = ["Kernel", "driver"]

INVALID_CONTEXT = 201


def driver() -> Any:
    """Return CuPy's functions of the CUDA driver."""
    import cupy

    return cupy.cuda.driver


# The arguments of a launch, where their addresses are, and those addresses.
_Frame = tuple[Any, int, Any]


class Kernel:
    """A loaded kernel, ready to launch from any thread.

    Parameters
    ----------
    name : str
        What errors call it.
    function : object
        CuPy's Function; `ptr` is the driver's handle, and the object keeps its module loaded.
    block_threads, shared_bytes : int
        Of every launch.
    parameters : str
        The kernel's parameters in the format of `struct`: P for a pointer, q for a long long, f and
        d for a float and a double.
    """

    def __init__(
        self, name: str, function: Any, block_threads: int, shared_bytes: int, parameters: str
    ) -> None:
        self._name = name
        self._function = function
        self._handle = function.ptr
        self._block_threads = block_threads
        self._shared_bytes = shared_bytes
        self._parameters = parameters
        self._pack_into = struct.Struct(parameters).pack_into
        self._launch = driver().launchKernel
        # A launch takes one and puts it back: no two of them, in whatever threads, share one.
        self._frames: list[_Frame] = []

    def launch(self, stream: int, blocks: int, arguments: tuple[float, ...]) -> None:
        """Launch on a stream of the current device.

        Raises
        ------
        RuntimeError
            If the driver refuses.
        """
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = self._new_frame()
        values, addresses, _ = frame
        self._pack_into(values, 0, *arguments)
        handle, threads, shared_bytes = self._handle, self._block_threads, self._shared_bytes
        try:
            self._launch(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, addresses, 0)
        except RuntimeError as error:
            if getattr(error, "status", None) != INVALID_CONTEXT:
                raise RuntimeError(
                    f"{self._name} cannot be launched with {blocks} blocks of {threads} threads "
                    f"and {shared_bytes} bytes of shared memory: {error}"
                ) from error
            # A thread has no context before its first call of the runtime that needs one.
            import cupy

            cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
            self._launch(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, addresses, 0)
        self._frames.append(frame)

    def _new_frame(self) -> _Frame:
        letters = self._parameters
        values = ctypes.create_string_buffer(struct.calcsize(letters))
        start = ctypes.addressof(values)
        offsets = (struct.calcsize(letters[:i] + f"0{p}") for i, p in enumerate(letters))
        addresses = (ctypes.c_void_p * len(letters))(*(start + offset for offset in offsets))
        return values, ctypes.addressof(addresses), addresses
