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

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
PROGRAMMATIC_STREAM_SERIALIZATION = 6

SHARED_BYTES_WITHOUT_ASKING = 48 << 10
PORTABLE_CLUSTER_BLOCKS = 8


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


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    )


class _Frame:
    """What the driver reads in a launch: a config, and the arguments with their addresses."""

    def __init__(self, config: LaunchConfig, offsets: tuple[int, ...], size: int) -> None:
        self.config = LaunchConfig.from_buffer_copy(config)
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
    cluster_blocks : int
        Blocks of a cluster, of which a grid consists.
    overlaps : bool
        Whether blocks may start before the kernel launched before it has ended: programmatic
        dependent launch.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        block_threads: int,
        shared_bytes: int,
        parameters: str,
        cluster_blocks: int = 1,
        overlaps: bool = False,
    ) -> None:
        self.name = name
        self._function = function
        self._handle = ctypes.c_void_p(function.ptr)
        if shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
            self._set(MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        if cluster_blocks > PORTABLE_CLUSTER_BLOCKS:
            self._set(NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        values: dict[int, tuple[int, ...]] = {}
        if cluster_blocks > 1:
            values[CLUSTER_DIMENSION] = (cluster_blocks, 1, 1)
        if overlaps:
            values[PROGRAMMATIC_STREAM_SERIALIZATION] = (1,)
        attributes = (LaunchAttribute * len(values))()
        for attribute, (identifier, value) in zip(attributes, values.items(), strict=True):
            attribute.id = identifier
            attribute.value[: len(value)] = value
        self._attributes = attributes  # the driver reads them in each launch
        self._config = LaunchConfig(
            *(0, 1, 1, block_threads, 1, 1, shared_bytes, None),
            ctypes.addressof(attributes) if values else None,
            len(values),
        )
        self._cluster_blocks = cluster_blocks
        self._layout = (
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
            frame = _Frame(self._config, *self._layout)
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

    def clusters_at_once(self) -> int:
        """Return how many clusters the current device runs at the same time."""
        config = LaunchConfig.from_buffer_copy(self._config)
        config.grid_x = self._cluster_blocks
        found = ctypes.c_int()
        status = library().cuOccupancyMaxActiveClusters(
            ctypes.byref(found), self._handle, ctypes.byref(config)
        )
        if status:
            raise RuntimeError(f"{self.name} cannot have clusters: {_describe(status)}")
        return found.value

    def _set(self, attribute: int, value: int) -> None:
        status = library().cuFuncSetAttribute(self._handle, attribute, value)
        if status:
            raise RuntimeError(f"{self.name} cannot be given {value}: {_describe(status)}")


def _describe(status: int) -> str:
    """Name an error of the driver, and say what it means."""
    texts = []
    for function in (library().cuGetErrorName, library().cuGetErrorString):
        text = ctypes.c_char_p()
        if function(status, ctypes.byref(text)) == 0 and text.value:
            texts.append(text.value.decode())
    return ", ".join(texts) or f"CUDA error {status}"
