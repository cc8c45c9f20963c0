"""A second call of a norm of `cupynorm.fuse`, on the arrays of each framework.

They lie over the host's memory. Nothing is launched, and what a launch is given is recorded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupynorm
import cupynorm.math as cm
from cupynorm import _fused_calls, _plans
from cupynorm._fuse import Given, Options

FUSED = cupynorm.fuse("layer_norm", epilogue=lambda y, z, a, b: y * cm.silu(z) * a + b)
SHAPE = 6, 64


class Kernel:
    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self.kernel, self.launched = kernel, launched

    def local_bytes(self) -> int:
        return 0

    def blocks_at_once(self) -> int:
        return 1

    def prepared(self, blocks: int, numbers: dict[str, float]) -> Any:
        names = [name for name, _ in self.kernel.arguments if name not in numbers]

        def launch(stream: int, operands: tuple[Any, ...]) -> None:
            given = dict(zip(names, operands, strict=True))
            self.launched.append((self.kernel.name, blocks, numbers, stream, given))

        return launch


class OfCuPy:
    """CuPy's arrays, with an allocator that needs no GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy: Any = pytest.importorskip("cupy")
        from cupynorm import _fused_arrays

        stream = SimpleNamespace(ptr=7, is_capturing=lambda: False)
        self.current = 0
        for name, value in (
            ("_get_device", lambda: self.current),
            ("_get_current_stream", lambda: stream),
            ("_alloc", self.allocate),
            ("on", lambda device: contextlib.nullcontext()),
        ):
            monkeypatch.setattr(_fused_arrays, name, value)
        self.memory = _fused_arrays.CuPyMemory()
        self.alignment = 512
        self.cupy.cuda.set_allocator(self.allocate)

    def allocate(self, nbytes: int, device: int = 0, offset: int = 0) -> Any:
        memory = np.zeros(nbytes + 1024, np.uint8)
        start = memory.ctypes.data
        start += -start % 512 + offset + self.alignment % 512
        unowned = self.cupy.cuda.UnownedMemory(start, nbytes, memory, device)
        return self.cupy.cuda.MemoryPointer(unowned, 0)

    def array(self, shape: Any, dtype: str = "float32", device: int = 0, offset: int = 0) -> Any:
        return self.cupy.ndarray(shape, dtype, self.allocate(1 << 14, device, offset))

    def close(self) -> None:
        self.cupy.cuda.set_allocator(self.cupy.get_default_memory_pool().malloc)


class OfTorch:
    """torch's tensors, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch: Any = pytest.importorskip("torch")
        from cupynorm.torch import _fuse

        class Memory(_fuse._Memory):
            def device(self, tensor: Any) -> int:
                return 0

            def on(self, device: int) -> Any:
                return contextlib.nullcontext()

        self.current = 0
        for name, value in (
            ("_current_device", lambda: self.current),
            ("_current_stream", lambda index: 7 + index),
            ("_empty", lambda shape, strides, dtype: self.torch.empty(shape, dtype=dtype)),
        ):
            monkeypatch.setitem(_fuse._DIALECT.names, name, value)
        self.memory = Memory()

    def array(self, shape: Any, dtype: str = "float32", offset: int = 0) -> Any:
        dtype = getattr(self.torch, dtype)
        size = offset // 4 + int(np.prod(shape))
        return self.torch.zeros(size, dtype=dtype)[offset // 4 :].reshape(shape)

    def close(self) -> None:
        pass


@pytest.fixture(params=[OfCuPy, OfTorch])
def of(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    of = request.param(monkeypatch)
    of.launched = []
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 4)
    background = SimpleNamespace(
        load=lambda kernels, device: tuple(Kernel(kernel, of.launched) for kernel in kernels)
    )
    monkeypatch.setattr(_fused_calls, "_background", background)
    plans = _fused_calls._forward_plan, _fused_calls._backward_plan
    for plan in plans:
        plan.cache_clear()
    FUSED.prepared.clear()
    yield of
    of.close()
    for plan in plans:
        plan.cache_clear()
    FUSED.prepared.clear()


def given_of(of: Any, **others: Any) -> Given:
    inputs = {"z": of.array(SHAPE), "a": 2.0, "b": of.array((SHAPE[0], 1))}
    return Given(of.array(SHAPE), of.array(SHAPE[1:]), None, inputs | others)


def arrays_of(given: Given) -> tuple[Any, ...]:
    return (given.x, given.weight, given.bias, *given.inputs.values())


def again(of: Any, given: Given, options: Options = Options()) -> Any:  # noqa: B008 - immutable
    told = (True, *options, tuple(given.inputs))
    return _fused_calls.again(of.memory, FUSED, arrays_of(given), told)


def forward(of: Any, given: Given, options: Options = Options()) -> Any:  # noqa: B008
    told = options, "float32", ("float32",)
    return _fused_calls.forward(of.memory, FUSED, given, *told, statistics=True)


def test_a_second_call_launches_what_the_first_did(of: Any) -> None:
    given = given_of(of)
    dy = of.array(SHAPE)
    assert again(of, given) is None
    first = forward(of, given)
    second = again(of, given)
    (y,), mean, rstd = second
    address = of.memory.address
    assert tuple(y.shape) == SHAPE
    assert tuple(mean.shape) == tuple(rstd.shape) == SHAPE[:1]
    before, after = (launch[-1] for launch in of.launched)
    made = {"y_0": y, "mean": mean, "rstd": rstd}
    assert after == before | {name: address(array) for name, array in made.items()}
    read = {"in_x": given.x, "weight": given.weight, "in_z": given.inputs["z"]}
    read["in_b"] = given.inputs["b"]
    assert {name: after[name] for name in read} == {n: address(a) for n, a in read.items()}
    assert (after["bias"], after["in_a"], after["stride_in_z"], after["step_in_b"]) == (0, 2, 64, 1)
    assert of.launched[0][:4] == of.launched[1][:4]
    assert of.launched[0][3] == 7
    assert address(first[0][0]) != address(y)

    of.launched.clear()
    told = given, Options(), "float32", ("float32",), [dy], mean, rstd
    for _ in range(2):
        found = _fused_calls.backward(of.memory, FUSED, *told)
    dx, dweight, dbias, dz, da, db = found
    assert found.dz is dz
    assert dbias is da is None
    assert [tuple(g.shape) for g in (dx, dweight, dz, db)] == [SHAPE, SHAPE[1:], SHAPE, (6, 1)]
    (_, first_sums, rows, sums) = (launch[-1] for launch in of.launched)
    assert (rows["dy_0"], rows["rstd"]) == (address(dy), address(rstd))
    assert rows["d_z"] == address(dz)
    assert sums["partials"] == rows["partials"] > 0
    assert sums["dweight"] == address(dweight)
    assert first_sums["dbias"] == sums["dbias"] == 0
    assert len(FUSED.prepared) == 2


def test_memory_that_is_less_aligned_is_not_written_by_packs(of: Any) -> None:
    if isinstance(of, OfTorch):
        pytest.skip("torch allocates at multiples of more than a pack")
    given, dy = given_of(of), of.array(SHAPE)
    told = given, Options(), "float32", ("float32",)
    _, mean, rstd = forward(of, given)
    backward = functools.partial(_fused_calls.backward, of.memory, FUSED, *told, [dy], mean, rstd)
    backward()
    of.launched.clear()
    of.alignment = 8
    assert again(of, given) is forward(of, given) is backward() is None
    assert not of.launched
    of.alignment = 512
    assert again(of, given) is not None
    assert backward() is not None


def test_other_calls_are_not_served(of: Any) -> None:
    given = given_of(of)
    forward(of, given)
    assert again(of, given) is not None
    assert again(of, given._replace(x=of.array(SHAPE, offset=4))) is None  # less aligned
    assert again(of, given._replace(x=of.array((7, 64)))) is None
    assert again(of, given_of(of, z=of.array(SHAPE, "float16"))) is None
    assert again(of, given_of(of, a=10**400)) is None
    assert again(of, given_of(of, a=of.array(()))) is None
    assert again(of, given_of(of, a="2")) is None
    for options in (Options(eps=1), Options(zero_centered=0), Options(axis=[1])):  # type: ignore[arg-type]
        assert again(of, given, options) is None
    if isinstance(of, OfCuPy):
        assert again(of, given_of(of, z=of.array(SHAPE, device=1))) is None
    of.current = 1
    assert again(of, given) is None


def test_each_options_have_a_call(of: Any) -> None:
    given = given_of(of)
    several = (Options(), Options(1e-3), Options(axis=(1,)), Options(out_dtype=("float32",)))
    for options in several:
        forward(of, given, options)
        assert again(of, given, options) is not None
    assert len(FUSED.prepared) == len(several)
