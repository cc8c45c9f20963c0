"""Launches through a driver that reads the arguments as the real one does, and records them.

CuPy's own function launches kernels without attributes. The driver's function, which is C, launches
the others.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from cupynorm import _compile, _driver

CONFIG = "@7IPPI"  # CUlaunchConfig
ATTRIBUTE = "@I4x16I"  # CUlaunchAttribute
HANDLE, STREAM = 2**47 + 16, 2**46 + 8

# What a kernel may have apart from its parameters, and the attributes of its launch.
WAYS: dict[str, tuple[dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "plain": ({}, {}),
    "cluster": ({"cluster_blocks": 4}, {4: (4, 1, 1)}),
    "overlapping": ({"overlaps": True}, {6: (1,)}),
    "both": ({"cluster_blocks": 16, "overlaps": True}, {4: (16, 1, 1), 6: (1,)}),
    "at once": ({"at_once": True}, {2: (1,)}),
}
ways = pytest.mark.parametrize("way", WAYS)


def size_of(letters: str) -> int:
    """Return the bytes of a struct in C."""
    return struct.calcsize(f"{letters}0{max(letters, key=struct.calcsize)}")


def named(letters: str) -> tuple[tuple[str, str], ...]:
    """Return the members of a struct, with the letters as names: a, b, c, ..."""
    return tuple((chr(ord("a") + i), letter) for i, letter in enumerate(letters))


class DriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: too much")
        self.status = status


Launch = tuple[tuple[int, ...], dict[int, tuple[int, ...]], tuple[float, ...]]


class Driver:
    """Reads a struct of one format, as a kernel with this argument would, and returns statuses.

    Attributes
    ----------
    launches : list of tuple
        Handle, grid, block, shared memory and stream; attributes; arguments.
    """

    CUDADriverError = DriverError

    def __init__(self, letters: str, statuses: tuple[int, ...] = ()) -> None:
        self.letters = letters
        self.statuses = list(statuses)
        self.launches: list[Launch] = []
        self.by_config = 0
        self.set: list[tuple[int, int, int]] = []
        self.clusters_at_once = 0
        self.blocks_at_once = 0
        pointer, c_int = ctypes.c_void_p, ctypes.c_int
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(c_int, *(pointer,) * 4)(self._launch)
        self.cuFuncSetAttribute = ctypes.CFUNCTYPE(c_int, pointer, c_int, c_int)(self._set)
        self.cuOccupancyMaxActiveClusters = ctypes.CFUNCTYPE(
            c_int, ctypes.POINTER(c_int), pointer, pointer
        )(self._count)
        self.cuOccupancyMaxActiveBlocksPerMultiprocessor = ctypes.CFUNCTYPE(
            c_int, ctypes.POINTER(c_int), pointer, c_int, ctypes.c_size_t
        )(self._count_blocks)

    def launchKernel(self, *given: int) -> None:
        *config, addresses, extra = given
        assert extra == 0
        status = self._note(tuple(config), {}, addresses)
        if status:
            raise DriverError(status)

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert extra is None
        self.by_config += 1
        (*shape, stream), attributes = self._read(config)
        return self._note((function, *shape, stream or 0), attributes, arguments)

    def _read(self, config: int) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
        """Return a config's numbers and its attributes."""
        *numbers, start, count = struct.unpack(
            CONFIG, ctypes.string_at(config, struct.calcsize(CONFIG))
        )
        size = struct.calcsize(ATTRIBUTE)
        assert bool(start) == bool(count)
        attributes = {}
        for i in range(count):
            identifier, *value = struct.unpack(ATTRIBUTE, ctypes.string_at(start + i * size, size))
            length = 3 if identifier == 4 else 1
            assert not any(value[length:])
            attributes[identifier] = tuple(value[:length])
        return tuple(numbers), attributes

    def _note(
        self, config: tuple[int, ...], attributes: dict[int, tuple[int, ...]], addresses: int
    ) -> int:
        (address,) = struct.unpack("P", ctypes.string_at(addresses, struct.calcsize("P")))
        assert address % struct.calcsize("P") == 0
        # As in C: each member at a multiple of its size, the end at one of the largest member's
        # size.
        values = struct.unpack_from(self.letters, ctypes.string_at(address, size_of(self.letters)))
        self.launches.append((config, attributes, values))
        return self.statuses.pop(0) if self.statuses else 0

    def _set(self, function: int, attribute: int, value: int) -> int:
        self.set.append((function, attribute, value))
        return self.statuses.pop(0) if self.statuses else 0

    def _count(self, found: Any, function: int, config: int) -> int:
        assert function == HANDLE
        self.launches.append((*self._read(config), ()))
        found[0] = self.clusters_at_once
        return self.statuses.pop(0) if self.statuses else 0

    def _count_blocks(self, found: Any, function: int, threads: int, shared_bytes: int) -> int:
        assert (function, threads, shared_bytes) == (HANDLE, 96, 1234)
        found[0] = self.blocks_at_once
        return self.statuses.pop(0) if self.statuses else 0


def install(
    monkeypatch: pytest.MonkeyPatch, letters: str, statuses: tuple[int, ...] = ()
) -> Driver:
    driver = Driver(letters, statuses)
    monkeypatch.setattr(_driver, "driver", lambda: driver)
    monkeypatch.setattr(_driver, "library", lambda: driver)
    return driver


def make(letters: str, shared_bytes: int = 1234, **options: Any) -> _driver.Kernel:
    function = SimpleNamespace(ptr=HANDLE)
    return _driver.Kernel("norm<float>", function, 96, shared_bytes, named(letters), **options)


def kernel(
    monkeypatch: pytest.MonkeyPatch, way: str, letters: str, statuses: tuple[int, ...] = ()
) -> tuple[_driver.Kernel, Driver]:
    """Return a kernel, and a driver whose launches return the statuses, from the first on."""
    driver = install(monkeypatch, letters)
    made = make(letters, **WAYS[way][0])
    driver.statuses += statuses
    return made, driver


def config(blocks: int, stream: int) -> tuple[int, ...]:
    """Return what the driver gets before the attributes and arguments."""
    return HANDLE, blocks, 1, 1, 96, 1, 1, 1234, stream


@ways
def test_the_driver_gets_every_number_where_it_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    launched, driver = kernel(monkeypatch, way, "qfPdqPf")
    first = -(2**62), 0.1, 2**48 - 1, 0.1, 5, 0, 2.0**-126
    second = 2**63 - 1, 3.4e38, 0, 1e-308, -6, 7, 0.5
    # The operands are all arguments, none, those after some numbers, before some, or in between.
    for begin, end in ((0, 7), (0, 0), (2, 7), (0, 5), (2, 6)):

        def numbers(values: tuple[float, ...]) -> dict[str, float]:
            outside = [i for i in range(7) if not begin <= i < end]  # noqa: B023
            return {chr(ord("a") + i): values[i] for i in reversed(outside)}

        large = launched.prepared(2**31 - 1, numbers(first))
        small = launched.prepared(1, numbers(second))
        large(STREAM, first[begin:end])
        small(0, second[begin:end])
        large(0, second[begin:end])
        first_again = first[:begin] + second[begin:end] + first[end:]
        expected = [
            (config(2**31 - 1, STREAM), first),
            (config(1, 0), second),
            (config(2**31 - 1, 0), first_again),
        ]
        attributes = WAYS[way][1]
        assert driver.launches == [
            (where, attributes, struct.unpack("qfPdqPf", struct.pack("qfPdqPf", *values)))
            for where, values in expected
        ]
        driver.launches.clear()
    assert driver.by_config == (0 if way == "plain" else 15)


@ways
def test_a_refused_launch_says_what_and_why(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    launched, driver = kernel(monkeypatch, way, "q", (701, 0))
    launch = launched.prepared(5, {})
    with pytest.raises(RuntimeError) as caught:
        launch(STREAM, (1,))
    for words in ("norm<float>", "5 blocks", "96 threads", "1234 bytes", "CUDA_ERROR_701"):
        assert words in str(caught.value)
    launch(STREAM, (2,))
    assert driver.launches[-1] == (config(5, STREAM), WAYS[way][1], (2,))


@ways
def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    made = []
    runtime = SimpleNamespace(getDevice=lambda: 3, setDevice=made.append)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    missing = _driver.INVALID_CONTEXT
    launched, driver = kernel(monkeypatch, way, "q", (missing, 0, missing, 701))
    launch = launched.prepared(5, {})
    launch(STREAM, (1,))
    assert made == [3]
    assert driver.launches == [(config(5, STREAM), WAYS[way][1], (1,))] * 2
    with pytest.raises(RuntimeError, match=r"norm<float> .* 5 blocks .* CUDA_ERROR_701"):
        launch(STREAM, (1,))
    assert len(driver.launches) == 4


@ways
@pytest.mark.parametrize("arguments", [(), (1, 2.0), (1, 2.0, 3, 4), (1, "x", 3), (2**64, 1.0, 1)])
def test_arguments_that_do_not_fit_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, way: str, arguments: tuple[Any, ...]
) -> None:
    launched, driver = kernel(monkeypatch, way, "Pfq")
    launch = launched.prepared(1, {})
    with pytest.raises((struct.error, OverflowError)):
        launch(STREAM, arguments)
    if len(arguments) == 3:
        with pytest.raises((struct.error, OverflowError)):
            launched.prepared(1, dict(zip("abc", arguments, strict=True)))(STREAM, ())
    launch = launched.prepared(1, {"c": 3})
    with pytest.raises(struct.error):
        launch(STREAM, (1, 2.0, 3))
    assert driver.launches == []


@pytest.mark.parametrize(
    "numbers",
    [
        {"a": 1, "e": 2},  # no such argument
        {"b": 2.0},  # between operands
        {"a": 1, "b": 2.0},  # before an operand in the middle of 8 bytes
    ],
)
def test_numbers_that_leave_no_run_of_operands_are_refused(
    monkeypatch: pytest.MonkeyPatch, numbers: dict[str, float]
) -> None:
    launched, _ = kernel(monkeypatch, "plain", "qffP")
    with pytest.raises(ValueError, match=r"norm<float> cannot have .* of \['a', 'b', 'c', 'd'\]"):
        launched.prepared(1, numbers)


@ways
def test_threads_do_not_mix_their_arguments(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The driver runs without the interpreter's lock."""
    launched, driver = kernel(monkeypatch, way, "qqqq")
    inside = threading.Barrier(2)

    if way == "plain":

        def slow(*given: int) -> None:
            inside.wait(10)  # both have packed before either one is read
            places.add(given[-2])
            driver.launchKernel(*given)

        launched._start = slow
    else:

        def slow_by_config(*given: Any) -> int:
            inside.wait(10)
            places.add(given[2])
            return driver._launch(*given)

        launched._start_by_config = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)(
            slow_by_config
        )

    places: set[int] = set()
    launch = launched.prepared(7, {"c": 1, "d": 2})

    def call(i: int) -> None:
        for turn in range(50):
            launch(i, (100 * i + turn,) * 2)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [
        (config(7, i), (100 * i + turn, 100 * i + turn, 1, 2))
        for i in range(2)
        for turn in range(50)
    ]
    assert sorted((c, a) for c, _, a in driver.launches) == sorted(expected)
    assert len(places) == 2


# ---- what is asked for when a kernel is loaded ---------------------------------------------------

SHARED_SIZE, NON_PORTABLE = 8, 14  # CU_FUNC_ATTRIBUTE_...


@pytest.mark.parametrize(
    ("shared_bytes", "cluster_blocks", "asked"),
    [
        (48 << 10, 8, []),
        ((48 << 10) + 1, 1, [(HANDLE, SHARED_SIZE, (48 << 10) + 1)]),
        (0, 9, [(HANDLE, NON_PORTABLE, 1)]),
        (227 << 10, 16, [(HANDLE, SHARED_SIZE, 227 << 10), (HANDLE, NON_PORTABLE, 1)]),
    ],
)
def test_what_must_be_asked_for_is(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, cluster_blocks: int, asked: list[Any]
) -> None:
    driver = install(monkeypatch, "q")
    launched = make("q", shared_bytes, cluster_blocks=cluster_blocks)
    assert driver.set == asked
    launched.prepared(2 * cluster_blocks, {})(STREAM, (1,))
    assert driver.launches[0][0][7] == shared_bytes
    assert driver.set == asked


@pytest.mark.parametrize("options", [{"shared_bytes": 1 << 20}, {"cluster_blocks": 16}], ids=str)
def test_what_is_refused_is_named(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    install(monkeypatch, "q", (1,))
    value = options.get("shared_bytes", 1)
    with pytest.raises(RuntimeError, match=f"norm<float> .* {value}: CUDA_ERROR_1"):
        make("q", **options)


def test_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, "q")
    launched = make("q", at_once=True)
    driver.blocks_at_once = 3
    assert launched.blocks_at_once() == 3
    driver.statuses = [912]
    with pytest.raises(RuntimeError, match="norm<float> cannot be launched: CUDA_ERROR_912"):
        launched.blocks_at_once()


@pytest.mark.parametrize("overlaps", [False, True])
def test_clusters_at_once(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    driver = install(monkeypatch, "q")
    launched = make("q", cluster_blocks=4, overlaps=overlaps)
    driver.clusters_at_once = 33
    assert launched.clusters_at_once() == 33
    attributes = {4: (4, 1, 1)} | ({6: (1,)} if overlaps else {})
    (numbers, read, _) = driver.launches[0]
    assert numbers[:7] == (4, 1, 1, 96, 1, 1, 1234)
    assert read == attributes
    driver.statuses = [912]
    with pytest.raises(RuntimeError, match="norm<float> cannot have clusters: CUDA_ERROR_912"):
        launched.clusters_at_once()


@pytest.mark.parametrize("shared_bytes", [1234, 60000])
def test_clusters_of_blocks_that_are_alone(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int
) -> None:
    driver = install(monkeypatch, "q")
    launched = make("q", shared_bytes, cluster_blocks=4)
    monkeypatch.setattr(_driver, "_shared_bytes_alone", lambda: 50000)
    driver.clusters_at_once = 33
    assert launched.clusters_at_once(alone=True) == 33
    assert launched.clusters_at_once() == 33
    alone = max(shared_bytes, 50000)
    assert driver.set[-1] == (HANDLE, 8, alone)
    assert [numbers[6] for numbers, *_ in driver.launches] == [alone, shared_bytes]


@pytest.mark.parametrize(("capability", "overlaps"), [("89", False), ("90", True), ("120", True)])
def test_kernels_overlap_where_a_gpu_can(
    monkeypatch: pytest.MonkeyPatch, capability: str, overlaps: bool
) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    made: list[bool] = []
    handle = SimpleNamespace(kernel=None)
    module = SimpleNamespace(get_function=lambda expression: handle)
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(
        cupy.cuda, "Device", lambda device: SimpleNamespace(compute_capability=capability)
    )
    monkeypatch.setattr(cupy, "RawModule", lambda **options: module)
    monkeypatch.setattr(_driver, "Kernel", lambda *arguments: made.append(arguments[6]))
    for name in ("_functions", "_modules", "_locks"):
        monkeypatch.setattr(_compile, name, {})
    for wanted in (False, True):
        kernel = _compile.Instantiation(
            "epilogue.cuh", "k", (("kWanted", wanted),), (), named("q"), 32, 0, overlaps=wanted
        )
        _compile.load(kernel, 0)
    assert made == [False, overlaps]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Return what CuPy calls to compile a kernel, which has nothing to return yet."""
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    compile_ = mock.Mock()
    stream = SimpleNamespace(is_capturing=lambda: False)
    device = SimpleNamespace(compute_capability="90")
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: device)
    monkeypatch.setattr(cupy, "RawModule", lambda **options: SimpleNamespace(get_function=compile_))
    for name in ("_functions", "_modules", "_locks"):
        monkeypatch.setattr(_compile, name, {})
    return compile_


KERNEL = _compile.Instantiation("epilogue.cuh", "k", (), (("kOf", 1),), named("q"), 32, 0)


def test_a_kernel_that_cannot_be_kept_is_named_with_what_to_do(failing: mock.Mock) -> None:
    failing.side_effect = PermissionError(13, "Permission denied", "/cache/a")
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"k<kOf=1> cannot be kept .* denied: '/cache/a'; set CUPY_CACHE_DIR to",
        ):
            _compile.load(KERNEL, 0)
    assert failing.call_count == 2


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_without_nvrtc_it_is_said_what_to_install(
    failing: mock.Mock, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import nvrtc

    failing.side_effect = missing = kind("no libnvrtc.so.12\n")
    monkeypatch.setattr(nvrtc, "getVersion", mock.Mock(side_effect=missing))
    expected = (
        "CuPy does not find NVRTC, which compiles the kernels: install cupynorm[cuda12] or "
        "cupynorm[cuda13], as your CuPy is cupy-cuda12x or cupy-cuda13x (no libnvrtc.so.12)"
    )
    with pytest.raises(RuntimeError) as caught:
        _compile.load(KERNEL, 0)
    assert str(caught.value) == expected


@pytest.mark.parametrize("found", [(12, 0), (12, 1)])
def test_an_old_nvrtc_is_said_with_what_is_needed(
    failing: mock.Mock, found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupy.cuda import compiler, nvrtc

    words = "Not a name of any known instruction: 'st.async'"
    failing.side_effect = error = compiler.CompileException(words, "", "k.cu", ())
    monkeypatch.setattr(nvrtc, "getVersion", lambda: found)
    with pytest.raises((RuntimeError, compiler.CompileException)) as caught:
        _compile.load(KERNEL, 0)
    if found < (12, 1):
        assert str(caught.value).startswith("NVRTC 12.1 or newer is needed, found 12.0: install")
    else:
        assert caught.value is error


def test_an_error_of_the_driver_stays_what_it_is(failing: mock.Mock) -> None:
    failing.side_effect = error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught:
        _compile.load(KERNEL, 0)
    assert caught.value is error
