"""Launches by the CUDA driver.

CuPy's Function converts each argument on its own, which takes 5.3 us a launch (H200's host). Here a
kernel has one argument, a struct. One call packs into it all that differs between launches. CuPy's
launchKernel takes half as long as ctypes, but knows no attributes. Kernels with attributes are
launched through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "MOST_BLOCKS",
    "Kernel",
    "Launch",
    "allow_loading_beside_captures",
    "driver",
    "library",
    "set_to_zero",
]

MOST_BLOCKS = (1 << 31) - 1  # of a launch

INVALID_CONTEXT = 201
CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_...

LOCAL_SIZE_BYTES = 3  # CU_FUNC_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_...
CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6

SHARED_BYTES_WITHOUT_ASKING = 48 << 10
PORTABLE_CLUSTER_BLOCKS = 8


def driver() -> Any:
    """Return CuPy's functions of the CUDA driver."""
    import cupy

    return cupy.cuda.driver


@functools.cache
def library() -> Any:
    """Return the CUDA driver's library. A process that uses a GPU has loaded it already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def _memset_async() -> Any:
    import cupy

    return cupy.cuda.runtime.memsetAsync


def _shared_bytes_alone() -> int:
    """Return how much shared memory no two blocks on one multiprocessor can have.

    It is half of what there is, since CUDA reserves some for each block.
    """
    import cupy

    attributes = cupy.cuda.Device().attributes
    return int(attributes["MaxSharedMemoryPerMultiprocessor"]) // 2


def set_to_zero(stream: int, address: int, nbytes: int) -> None:
    """Have a stream set memory of the current device to zero."""
    _memset_async()(address, 0, nbytes, stream)


def allow_loading_beside_captures() -> None:
    """Let this thread load modules while another one captures a CUDA graph.

    By default that would invalidate the graph.
    """
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    status = library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if status:
        raise driver().CUDADriverError(status)


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


# A struct ends, and its packed part begins, where a pointer or a long long may.
STRUCT_END = "0q"

# The arguments of a launch, what the driver gets for them, and their address.
_Frame = tuple[Any, Any, Any]

# A function that takes a stream and the operands.
Launch = Callable[[int, tuple[int, ...]], None]


class Kernel:
    """A loaded kernel.

    Parameters
    ----------
    name : str
        The kernel's name in errors.
    function : object
        CuPy's Function. `ptr` is the driver's handle, and the object keeps its module loaded.
    block_threads, shared_bytes : int
        The same in every launch.
    arguments : tuple of (str, str)
        The members of the struct that the kernel takes, with their letters in the format of
        `struct`: P for a pointer, q for a long long, f and d for a float and a double.
    cluster_blocks : int
        Blocks of a cluster. A grid consists of clusters.
    overlaps : bool
        Whether blocks may start before the previous kernel has ended: programmatic dependent
        launch.
    at_once : bool
        Whether all blocks run at the same time and wait for each other: cooperative launch.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        block_threads: int,
        shared_bytes: int,
        arguments: tuple[tuple[str, str], ...],
        cluster_blocks: int = 1,
        overlaps: bool = False,
        at_once: bool = False,
    ) -> None:
        self._name = name
        self._function = function
        self._handle = function.ptr
        self._block_threads = block_threads
        self._shared_bytes = shared_bytes
        self._cluster_blocks = cluster_blocks
        self._arguments = arguments
        self._letters = "".join(letter for _, letter in arguments)
        self._pack_into = struct.Struct(self._letters).pack_into
        self._size = struct.calcsize(self._letters + STRUCT_END)
        if shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
            self._set(MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        if cluster_blocks > PORTABLE_CLUSTER_BLOCKS:
            self._set(NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        values: dict[int, tuple[int, ...]] = {}
        if cluster_blocks > 1:
            values[CLUSTER_DIMENSION] = (cluster_blocks, 1, 1)
        if overlaps:
            values[PROGRAMMATIC_STREAM_SERIALIZATION] = (1,)
        if at_once:
            values[COOPERATIVE] = (1,)
        self._config: Any = None
        if not values:
            self._start = driver().launchKernel
            return
        attributes = (LaunchAttribute * len(values))()
        for attribute, (identifier, value) in zip(attributes, values.items(), strict=True):
            attribute.id = identifier
            attribute.value[: len(value)] = value
        self._attributes = attributes  # the driver reads them in each launch
        self._config = LaunchConfig(
            *(0, 1, 1, block_threads, 1, 1, shared_bytes, None),
            *(ctypes.addressof(attributes), len(values)),
        )
        self._start_by_config = library().cuLaunchKernelEx
        self._start = self._start_with_attributes

    def prepared(self, blocks: int, numbers: Mapping[str, float]) -> Launch:
        """Return a launch of so many blocks. It takes a stream of the current device and operands.

        `numbers` has some of the kernel's arguments by name, and the operands are the others. These
        must be adjacent, and the first must be a pointer or a long long. Threads may launch at the
        same time. A launch raises RuntimeError if the driver refuses it.
        """
        names = [name for name, _ in self._arguments]
        left = [i for i, name in enumerate(names) if name not in numbers]
        first, end = (left[0], left[-1] + 1) if left else (0, 0)
        offset = struct.calcsize(self._letters[:first] + STRUCT_END)
        own = struct.calcsize(self._letters[:first] + f"0{self._letters[first]}")
        if not numbers.keys() <= set(names) or end - first != len(left) or offset != own:
            raise ValueError(f"{self._name} cannot have {list(numbers)} of {names} beforehand")
        pack_into = struct.Struct(self._letters[first:end]).pack_into
        start, handle = self._start, self._handle
        threads, shared_bytes = self._block_threads, self._shared_bytes
        # A launch takes a frame and puts it back, so no two launches share one in any thread.
        frames = [self._new_frame(blocks, numbers)]

        def launch(stream: int, operands: tuple[int, ...]) -> None:
            try:
                frame = frames.pop()
            except IndexError:
                frame = self._new_frame(blocks, numbers)
            values, given, _ = frame
            pack_into(values, offset, *operands)
            try:
                start(handle, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, given, 0)
            except RuntimeError as error:
                self._start_after(error, stream, blocks, given)
            frames.append(frame)

        return launch

    def blocks_at_once(self) -> int:
        """Return how many blocks one multiprocessor of the current device runs at once."""
        found = ctypes.c_int()
        status = library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(found),
            ctypes.c_void_p(self._handle),
            ctypes.c_int(self._block_threads),
            ctypes.c_size_t(self._shared_bytes),
        )
        if status:
            error = driver().CUDADriverError(status)
            raise RuntimeError(f"{self._name} cannot be launched: {error}") from error
        return found.value

    def local_bytes(self) -> int:
        """Return the bytes of memory that a thread uses for want of registers."""
        found = ctypes.c_int()
        status = library().cuFuncGetAttribute(
            ctypes.byref(found), LOCAL_SIZE_BYTES, ctypes.c_void_p(self._handle)
        )
        if status:
            raise RuntimeError(f"{self._name}: {driver().CUDADriverError(status)}")
        return found.value

    def clusters_at_once(self, *, alone: bool = False) -> int:
        """Return how many of a kernel's clusters the current device runs at once.

        If `alone`, each block has a multiprocessor to itself. Where such clusters fit, any kernel's
        clusters of as many blocks do.
        """
        config = LaunchConfig.from_buffer_copy(self._config)
        config.grid_x = self._cluster_blocks
        if alone:
            config.shared_bytes = max(self._shared_bytes, _shared_bytes_alone())
            self._set(MAX_DYNAMIC_SHARED_SIZE_BYTES, config.shared_bytes)
        found = ctypes.c_int()
        status = library().cuOccupancyMaxActiveClusters(
            ctypes.byref(found), ctypes.c_void_p(self._handle), ctypes.byref(config)
        )
        if status:
            error = driver().CUDADriverError(status)
            raise RuntimeError(f"{self._name} cannot have clusters: {error}") from error
        return found.value

    def _set(self, attribute: int, value: int) -> None:
        status = library().cuFuncSetAttribute(ctypes.c_void_p(self._handle), attribute, value)
        if status:
            error = driver().CUDADriverError(status)
            raise RuntimeError(f"{self._name} cannot be given {value}: {error}") from error

    def _new_frame(self, blocks: int, numbers: Mapping[str, float]) -> _Frame:
        values = ctypes.create_string_buffer(self._size)
        self._pack_into(values, 0, *(numbers.get(name, 0) for name, _ in self._arguments))
        addresses = (ctypes.c_void_p * 1)(ctypes.addressof(values))
        if self._config is None:
            return values, ctypes.addressof(addresses), addresses
        config = LaunchConfig.from_buffer_copy(self._config)
        config.grid_x = blocks
        given = (ctypes.byref(config), ctypes.c_void_p(self._handle), ctypes.byref(addresses), None)
        return values, (config, given), addresses

    def _start_with_attributes(self, *numbers: Any) -> None:
        """Do what CuPy's launchKernel does, with attributes. The config has blocks and threads."""
        stream, (config, given), _ = numbers[8:]
        config.stream = stream
        status = self._start_by_config(*given)
        if status:
            raise driver().CUDADriverError(status)

    def _start_after(self, error: RuntimeError, stream: int, blocks: int, given: Any) -> None:
        """Launch again if only a context was missing, else say what was refused."""
        threads, shared_bytes = self._block_threads, self._shared_bytes
        if getattr(error, "status", None) == INVALID_CONTEXT:
            # A thread has no context before its first call of the runtime that needs one.
            import cupy

            cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
            numbers = (blocks, 1, 1, threads, 1, 1, shared_bytes, stream)
            try:
                self._start(self._handle, *numbers, given, 0)
            except RuntimeError as another:
                error = another
            else:
                return
        raise RuntimeError(
            f"{self._name} cannot be launched with {blocks} blocks of {threads} threads "
            f"and {shared_bytes} bytes of shared memory: {error}"
        ) from error
