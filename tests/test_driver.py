"""Launches through a driver that is C as the real one is, and notes what it was given."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cupynorm import _driver

CONFIG = "@7IPPI"  # CUlaunchConfig
HANDLE, STREAM = 2**47 + 16, 2**46 + 8


class Driver:
    """Reads arguments of a format, as a kernel with these parameters would; statuses in order."""

    def __init__(self, parameters: str, statuses: tuple[int, ...] = ()) -> None:
        self.parameters = parameters
        self.statuses = list(statuses)
        self.launches: list[tuple[tuple[int, ...], int, tuple[float, ...]]] = []
        pointer, c_int = ctypes.c_void_p, ctypes.c_int
        described = ctypes.POINTER(ctypes.c_char_p)
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(c_int, *(pointer,) * 4)(self._launch)
        self.cuGetErrorName = ctypes.CFUNCTYPE(c_int, c_int, described)(self._name)
        self.cuGetErrorString = ctypes.CFUNCTYPE(c_int, c_int, described)(self._explain)

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert extra is None
        size = struct.calcsize(CONFIG)
        addresses = struct.unpack(
            f"{len(self.parameters)}P",
            ctypes.string_at(arguments, len(self.parameters) * struct.calcsize("P")),
        )
        values = [
            struct.unpack(letter, ctypes.string_at(address, struct.calcsize(letter)))[0]
            for letter, address in zip(self.parameters, addresses, strict=True)
        ]
        self.launches.append(
            (struct.unpack(CONFIG, ctypes.string_at(config, size)), function, tuple(values))
        )
        return self.statuses.pop(0) if self.statuses else 0

    def _name(self, status: int, text: Any) -> int:
        if status != 701:
            return 1
        text[0] = b"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        return 0

    def _explain(self, status: int, text: Any) -> int:
        if status != 701:
            return 1
        text[0] = b"too many resources requested for launch"
        return 0


def kernel(
    monkeypatch: pytest.MonkeyPatch, parameters: str, statuses: tuple[int, ...] = ()
) -> tuple[_driver.Kernel, Driver]:
    driver = Driver(parameters, statuses)
    monkeypatch.setattr(_driver, "library", lambda: driver)
    function = SimpleNamespace(ptr=HANDLE)
    return _driver.Kernel("norm<float>", function, 96, 1234, parameters), driver


def test_the_driver_gets_every_number_where_it_looks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, driver = kernel(monkeypatch, "PfqdPf")
    first = (2**48 - 1, 0.1, -(2**62), 0.1, 0, 2.0**-126)
    second = (0, 3.4e38, 2**63 - 1, 1e-308, 7, 0.5)
    launched.launch(STREAM, 2**31 - 1, first)
    launched.launch(0, 1, second)
    rounded = struct.unpack("2f", struct.pack("2f", 0.1, 3.4e38))
    launches = [
        (
            (2**31 - 1, 1, 1, 96, 1, 1, 1234, STREAM, 0, 0),
            HANDLE,
            (first[0], rounded[0], *first[2:]),
        ),
        ((1, 1, 1, 96, 1, 1, 1234, 0, 0, 0), HANDLE, (second[0], rounded[1], *second[2:])),
    ]
    assert driver.launches == launches


def test_a_refused_launch_says_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, driver = kernel(monkeypatch, "q", (701, 9999, 0))
    with pytest.raises(RuntimeError) as caught:
        launched.launch(STREAM, 5, (1,))
    for words in ("norm<float>", "5 blocks", "96 threads", "1234 bytes"):
        assert words in str(caught.value)
    assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, too many resources" in str(caught.value)
    with pytest.raises(RuntimeError, match="CUDA error 9999"):
        launched.launch(STREAM, 5, (1,))
    launched.launch(STREAM, 6, (2,))
    assert driver.launches[-1][2] == (2,)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    runtime = SimpleNamespace(getDevice=lambda: 3, setDevice=made.append)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launched, driver = kernel(monkeypatch, "q", (_driver.INVALID_CONTEXT, 0))
    launched.launch(STREAM, 5, (1,))
    assert made == [3]
    assert driver.launches[0] == driver.launches[1]
    assert len(driver.launches) == 2


@pytest.mark.parametrize("arguments", [(), (1, 2.0), (1, 2.0, 3, 4), (1, "x", 3), (2**64, 1.0, 1)])
def test_arguments_that_do_not_fit_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    launched, driver = kernel(monkeypatch, "Pfq")
    with pytest.raises((struct.error, OverflowError)):
        launched.launch(STREAM, 1, arguments)
    assert driver.launches == []


def test_threads_do_not_mix_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver, as C, runs without the interpreter's lock."""
    launched, driver = kernel(monkeypatch, "qqqq")
    inside = threading.Barrier(2)

    def slow(*arguments: Any) -> int:
        inside.wait(10)  # both have packed before either is read
        return driver._launch(*arguments)

    launched._launch = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)(slow)

    def call(i: int) -> None:
        for turn in range(50):
            launched.launch(i, 100 * i + turn + 1, (100 * i + turn,) * 4)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = {(config[0], config[7], values) for config, _, values in driver.launches}
    assert given == {
        (100 * i + turn + 1, i, (100 * i + turn,) * 4) for i in range(2) for turn in range(50)
    }
    assert len(launched._frames) == 2
