"""Plans that compute by NumPy, at the addresses of torch's CPU tensors.

They replace the kernels, so everything between a call and its launch runs on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import numpy_kernels
import torch

from cupynorm._arrays import to_numpy
from cupynorm._operation import ITEMSIZE, KINDS, MOVED_BY_PACKS, BackwardSpec, ForwardSpec
from cupynorm.torch import _kernels

STREAM = 0x5EED


def memory(address: int, shape: tuple[int, ...], dtype: Any, stride: int | None = None) -> Any:
    """Return what is at an address as an array, or None if an array is absent."""
    if dtype is not None and 0 in shape:
        return np.empty(shape, dtype)
    if address == 0 or dtype is None:
        assert address == 0
        assert dtype is None
        return None
    dtype = np.dtype(dtype)
    strides = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
    if stride is not None:
        strides[0] = stride * dtype.itemsize
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    block = np.frombuffer((ctypes.c_char * last).from_address(address), np.uint8)
    return np.ndarray(shape, dtype, block, strides=strides)


@dataclass
class Plan:
    """A plan, and the operands of its launches by name."""

    spec: Any
    n: int
    vector: int
    m: int
    groups: Any = None
    launches: list[dict[str, Any]] = field(default_factory=list)
    stands_in: bool = False

    def prepared(self, m: int, *numbers: Any) -> Any:
        *numbers, self.groups = numbers
        assert m == self.m
        numpy_kernels.check_groups(self.spec, m, self.groups)
        scratch_bytes = self.bytes_of_scratch()

        def launch(stream: int, operands: tuple[int, ...]) -> None:
            assert stream == STREAM
            if scratch_bytes:
                *operands, scratch = operands  # type: ignore[assignment]
                ctypes.memset(scratch, 0xFF, scratch_bytes)
            named = dict(zip(self.spec.table.operands, operands, strict=True))
            self.launches.append({"m": m, **named})
            self.run(self.arrays(named), *numbers)

        return launch

    def arrays(self, operands: dict[str, int]) -> dict[str, Any]:
        """Return what is at the addresses, None for 0, and check how that is aligned."""
        assert self.n % self.vector == 0
        table, found = self.spec.table, {}
        for name, dtype in self.spec.dtypes.items():
            address, stride = operands[name], operands.get(f"{name}_stride")
            if dtype is not None and name in table.writes:
                assert stride in (None, self.n), name
            if dtype is not None and KINDS[name] in MOVED_BY_PACKS:
                assert address % (self.vector * ITEMSIZE[dtype]) == 0, name
                assert stride is None or self.m <= 1 or stride % self.vector == 0, name
            shape = numpy_kernels.shape(name, self.m, self.n, self.groups)
            found[name] = memory(address, shape, dtype and to_numpy(dtype), stride)
        return found

    def run(self, arrays: dict[str, Any], *numbers: float) -> None:
        raise NotImplementedError

    def bytes_of_scratch(self) -> int:
        raise NotImplementedError

    def write(self, arrays: dict[str, Any], result: Any) -> None:
        """Write results where they are wanted."""
        for name in self.spec.writes:
            if arrays[name] is not None:
                arrays[name][...] = getattr(result, name)


class ForwardPlan(Plan):
    spec: ForwardSpec

    def scratch_bytes(self, m: int) -> int:
        return 16 if m % 3 == 2 else 0

    def bytes_of_scratch(self) -> int:
        return self.scratch_bytes(self.m)

    def run(self, arrays: dict[str, Any], *numbers: float) -> None:
        self.write(arrays, numpy_kernels.forward(self.spec, self.groups, arrays, *numbers))


class BackwardPlan(Plan):
    spec: BackwardSpec

    def scratch_bytes(self, m: int, groups: Any) -> int:
        return 4 * m + 12 + (0 if groups is None else groups.count)

    def bytes_of_scratch(self) -> int:
        return self.scratch_bytes(self.m, self.groups)

    def run(self, arrays: dict[str, Any], *numbers: float) -> None:
        self.write(arrays, numpy_kernels.backward(self.spec, self.groups, arrays))


class Plans:
    """All plans that were made."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def load(self, make: str, device: Any, spec: Any, *sizes: int) -> Plan:
        kind = {"forward_plan": ForwardPlan, "backward_plan": BackwardPlan}[make]
        m, n, vector = sizes
        self.made.append(kind(spec, n, vector, m))
        return self.made[-1]

    @property
    def launches(self) -> list[dict[str, Any]]:
        return [launch for plan in self.made for launch in plan.launches]


@contextmanager
def in_place_of_kernels() -> Iterator[Plans]:
    """Treat CPU tensors as if they were on a GPU."""
    plans = Plans()
    with mock.patch.multiple(
        _kernels,
        calls={},
        _has_kernels=lambda x: True,
        _load=plans.load,
        _empty=torch._C._dynamo.guards._empty_strided_cpu,
        _current_device=lambda: None,
        _current_stream=lambda device: STREAM,
    ):
        yield plans
