"""Launches through a driver that reads the arguments as the real one does, and notes them."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cupynorm import _driver

HANDLE, STREAM = 2**47 + 16, 2**46 + 8


class DriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA_ERROR_{status}: too much")
        self.status = status


class Driver:
    """Reads arguments of a format, as a kernel with these parameters would; errors in order."""

    def __init__(self, parameters: str, errors: tuple[int, ...] = ()) -> None:
        self.parameters = parameters
        self.errors = list(errors)
        self.launches: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def launchKernel(self, *given: int) -> None:
        *config, addresses, extra = given
        assert extra == 0
        size = len(self.parameters) * struct.calcsize("P")
        read = struct.unpack(f"{len(self.parameters)}P", ctypes.string_at(addresses, size))
        values = (
            struct.unpack(letter, ctypes.string_at(address, struct.calcsize(letter)))[0]
            for letter, address in zip(self.parameters, read, strict=True)
        )
        assert all(a % struct.calcsize(p) == 0 for a, p in zip(read, self.parameters, strict=True))
        self.launches.append((tuple(config), tuple(values)))
        status = self.errors.pop(0) if self.errors else 0
        if status:
            raise DriverError(status)


def kernel(
    monkeypatch: pytest.MonkeyPatch, parameters: str, errors: tuple[int, ...] = ()
) -> tuple[_driver.Kernel, Driver]:
    driver = Driver(parameters, errors)
    monkeypatch.setattr(_driver, "driver", lambda: driver)
    function = SimpleNamespace(ptr=HANDLE)
    return _driver.Kernel("norm<float>", function, 96, 1234, parameters), driver


def config(blocks: int, stream: int) -> tuple[int, ...]:
    """Return what the driver gets before the arguments."""
    return HANDLE, blocks, 1, 1, 96, 1, 1, 1234, stream


def test_the_driver_gets_every_number_where_it_looks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, driver = kernel(monkeypatch, "PfqdPf")
    first = (2**48 - 1, 0.1, -(2**62), 0.1, 0, 2.0**-126)
    second = (0, 3.4e38, 2**63 - 1, 1e-308, 7, 0.5)
    launched.launch(STREAM, 2**31 - 1, first)
    launched.launch(0, 1, second)
    rounded = struct.unpack("2f", struct.pack("2f", 0.1, 3.4e38))
    assert driver.launches == [
        (config(2**31 - 1, STREAM), (first[0], rounded[0], *first[2:])),
        (config(1, 0), (second[0], rounded[1], *second[2:])),
    ]


def test_a_refused_launch_says_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, driver = kernel(monkeypatch, "q", (701, 0))
    with pytest.raises(RuntimeError) as caught:
        launched.launch(STREAM, 5, (1,))
    for words in ("norm<float>", "5 blocks", "96 threads", "1234 bytes", "CUDA_ERROR_701"):
        assert words in str(caught.value)
    launched.launch(STREAM, 6, (2,))
    assert driver.launches[-1] == (config(6, STREAM), (2,))


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    runtime = SimpleNamespace(getDevice=lambda: 3, setDevice=made.append)
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launched, driver = kernel(monkeypatch, "q", (_driver.INVALID_CONTEXT, 0))
    launched.launch(STREAM, 5, (1,))
    assert made == [3]
    assert driver.launches == [(config(5, STREAM), (1,))] * 2


@pytest.mark.parametrize("arguments", [(), (1, 2.0), (1, 2.0, 3, 4), (1, "x", 3), (2**64, 1.0, 1)])
def test_arguments_that_do_not_fit_are_not_launched(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...]
) -> None:
    launched, driver = kernel(monkeypatch, "Pfq")
    with pytest.raises((struct.error, OverflowError)):
        launched.launch(STREAM, 1, arguments)
    assert driver.launches == []


def test_threads_do_not_mix_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver runs without the interpreter's lock."""
    launched, driver = kernel(monkeypatch, "qqqq")
    inside = threading.Barrier(2)

    def slow(*given: int) -> None:
        inside.wait(10)  # both have packed before either is read
        driver.launchKernel(*given)

    launched._launch = slow

    def call(i: int) -> None:
        for turn in range(50):
            launched.launch(i, 100 * i + turn + 1, (100 * i + turn,) * 4)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(driver.launches) == sorted(
        (config(100 * i + turn + 1, i), (100 * i + turn,) * 4)
        for i in range(2)
        for turn in range(50)
    )
    assert len(launched._frames) == 2
