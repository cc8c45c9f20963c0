"""Kernels launched by the CUDA driver itself, through ctypes.

CuPy compiles and loads them; its launch takes 5 us of the host's time where this takes 3, and knows
neither clusters nor programmatic dependent launch. See cuLaunchKernelEx in the CUDA Driver API.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from functools import cache
from typing import Any

__all__ = ["Kernel"]

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PORTABLE_CLUSTER_BLOCKS = 8
_SHARED_BYTES_WITHOUT_ASKING = 48 << 10

# CUlaunchConfig: the grid's and the block's dimensions, the bytes of dynamic shared memory, the
# stream, the attributes and their number.
_CONFIG = struct.Struct("@7IPPI")
# CUlaunchAttribute: what it is, then its value.
_ATTRIBUTE = struct.Struct("@I4x3I52x")


@cache
def _driver() -> ctypes.CDLL:
    """Return the driver's library."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    return ctypes.CDLL(name)


def _check(what: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        name = text.value.decode() if text.value else f"error {status}"
        raise RuntimeError(f"{what}: the CUDA driver says {name}")


class _Call(threading.local):
    """What the driver reads during a launch: one for each thread, which may be interrupted."""

    def __init__(self, arguments: struct.Struct, offsets: list[int]) -> None:
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.arguments = ctypes.create_string_buffer(arguments.size)
        base = ctypes.addressof(self.arguments)
        self.addresses = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))


class Kernel:
    """A loaded kernel with all of its launch but the grid, the stream and the arguments.

    Parameters
    ----------
    name : str
        For messages.
    function : int
        The CUfunction.
    parameters : str
        The kernel's parameters, a letter each as of the struct module.
    block_threads, shared_bytes, cluster_blocks : int
        Threads of a block, its bytes of dynamic shared memory, and blocks of a cluster.
    overlaps : bool
        Whether its blocks may come before the kernel launched before it has ended.
    """

    def __init__(
        self,
        name: str,
        function: int,
        parameters: str,
        *,
        block_threads: int,
        shared_bytes: int,
        cluster_blocks: int = 1,
        overlaps: bool = False,
    ) -> None:
        self.name = name
        self.cluster_blocks = cluster_blocks
        self._launch = _driver().cuLaunchKernelEx
        self._function = ctypes.c_void_p(function)
        self._block_threads, self._shared_bytes = block_threads, shared_bytes
        if shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            self._set(_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        if cluster_blocks > _PORTABLE_CLUSTER_BLOCKS:
            self._set(_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        attributes = b""
        if cluster_blocks > 1:
            attributes += _ATTRIBUTE.pack(_CLUSTER_DIMENSION, cluster_blocks, 1, 1)
        if overlaps:
            attributes += _ATTRIBUTE.pack(_PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)
        self._attributes = ctypes.create_string_buffer(attributes, len(attributes) or 1)
        self._config_end = (
            ctypes.addressof(self._attributes),
            len(attributes) // _ATTRIBUTE.size,
        )
        self._arguments = struct.Struct("@" + parameters)
        offsets = [
            struct.calcsize("@" + parameters[: i + 1]) - struct.calcsize("@" + letter)
            for i, letter in enumerate(parameters)
        ]
        self._call = _Call(self._arguments, offsets)

    def __call__(self, blocks: int, stream: int, *arguments: Any) -> None:
        """Launch `blocks` blocks on a stream of the current device."""
        call = self._call
        _CONFIG.pack_into(
            call.config,
            0,
            *(blocks, 1, 1, self._block_threads, 1, 1, self._shared_bytes, stream),
            *self._config_end,
        )
        self._arguments.pack_into(call.arguments, 0, *arguments)
        status = self._launch(call.config, self._function, call.addresses, None)
        if status:
            _check(f"launching {self.name} on {blocks} blocks", status)

    def clusters_at_once(self) -> int:
        """Return how many clusters the current device runs at the same time."""
        config = ctypes.create_string_buffer(_CONFIG.size)
        _CONFIG.pack_into(
            config,
            0,
            *(self.cluster_blocks, 1, 1, self._block_threads, 1, 1, self._shared_bytes, 0),
            *self._config_end,
        )
        found = ctypes.c_int()
        status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, config)
        _check(f"asking how many clusters of {self.name} fit", status)
        return found.value

    def _set(self, attribute: int, value: int) -> None:
        status = _driver().cuFuncSetAttribute(self._function, attribute, value)
        _check(f"{self.name} with {self._shared_bytes} bytes of shared memory", status)
