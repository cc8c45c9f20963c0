"""Launches by the CUDA driver.

CuPy and CUDA's Python bindings convert each argument on its own. Here one struct packs them all
into memory that the driver was pointed to beforehand, and what does not change from launch to
launch is written once.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any

__all__ = ["Kernel", "library"]

INVALID_CONTEXT = 201


@functools.cache
def library() -> Any:
    """Return the CUDA driver's library, which a process that uses a GPU has loaded already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class _Frame:
    """What the driver reads in a launch: a config, and the arguments with their addresses."""

    def __init__(self, block_threads: int, shared_bytes: int, offsets: tuple[int, ...], size: int):
        self.config = LaunchConfig(0, 1, 1, block_threads, 1, 1, shared_bytes)
        self.arguments = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self.arguments)
        self.addresses = (ctypes.c_void_p * len(offsets))(*(start + o for o in offsets))
        self.config_pointer = ctypes.c_void_p(ctypes.addressof(self.config))
        self.addresses_pointer = ctypes.c_void_p(ctypes.addressof(self.addresses))


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
        self.name = name
        self._function = function
        self._handle = ctypes.c_void_p(function.ptr)
        self._layout = (
            block_threads,
            shared_bytes,
            tuple(struct.calcsize(parameters[:i] + f"0{p}") for i, p in enumerate(parameters)),
            struct.calcsize(parameters),
        )
        self._pack_into = struct.Struct(parameters).pack_into
        self._launch = library().cuLaunchKernelEx
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
            frame = _Frame(*self._layout)
        self._pack_into(frame.arguments, 0, *arguments)
        config = frame.config
        config.grid_x = blocks
        config.stream = stream
        status = self._launch(frame.config_pointer, self._handle, frame.addresses_pointer, None)
        if status == INVALID_CONTEXT:
            # A thread has no context before its first call of the runtime that needs one.
            import cupy

            cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
            status = self._launch(frame.config_pointer, self._handle, frame.addresses_pointer, None)
        self._frames.append(frame)
        if status:
            raise RuntimeError(
                f"{self.name} cannot be launched with {blocks} blocks of {config.block_x} threads "
                f"and {config.shared_bytes} bytes of shared memory: {_describe(status)}"
            )


def _describe(status: int) -> str:
    """Name an error of the driver, and say what it means."""
    texts = []
    for function in (library().cuGetErrorName, library().cuGetErrorString):
        text = ctypes.c_char_p()
        if function(status, ctypes.byref(text)) == 0 and text.value:
            texts.append(text.value.decode())
    return ", ".join(texts) or f"CUDA error {status}"
