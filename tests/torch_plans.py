"""Plans that compute by NumPy, at the addresses of torch's CPU tensors.

With them in place of the kernels, everything between a call and its launch runs on the CPU.
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
from strategies import DTYPES

from cupynorm import reference
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype
from cupynorm.torch import _kernels

STREAM = 0x5EED


def memory(address: int, shape: tuple[int, ...], dtype: Any, stride: int | None = None) -> Any:
    """Return what is at an address as an array; None where an array is absent."""
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


def write(target: Any, values: Any) -> None:
    assert (target is None) == (values is None)
    if target is not None:
        target[...] = values


@dataclass
class Plan:
    """A plan, and the arguments of its launches by name."""

    spec: Any
    n: int
    vector: int
    m: int
    launches: list[dict[str, Any]] = field(default_factory=list)

    def check(self, **addresses: tuple[int, str | None, int | None]) -> None:
        """Assert that accesses of `vector` elements are aligned."""
        assert self.n % self.vector == 0
        for name, (address, dtype, stride) in addresses.items():
            if dtype is not None:
                assert address % (self.vector * ITEMSIZE[dtype]) == 0, name
                assert stride is None or stride % self.vector == 0, name


class ForwardPlan(Plan):
    spec: ForwardSpec

    def scratch_bytes(self, m: int) -> int:
        return 16 if m % 3 == 2 else 0

    def prepared(self, m: int, eps: float, lower: float, upper: float) -> Any:
        def launch(stream: int, operands: tuple[int, ...]) -> None:
            size = self.scratch_bytes(m)
            if size:
                *operands, scratch = operands  # type: ignore[assignment]
                ctypes.memset(scratch, 0xFF, size)
            self.launch(stream, m, *operands, eps, lower, upper)

        assert m == self.m
        return launch

    def launch(
        self,
        stream: int,
        m: int,
        x: int,
        x_stride: int,
        weight: int,
        bias: int,
        y: int,
        y_stride: int,
        mean: int,
        rstd: int,
        bitmask: int,
        eps: float,
        lower: float,
        upper: float,
    ) -> None:
        self.launches.append(locals())
        spec, rows, row = self.spec, (m, self.n), (self.n,)
        assert stream == STREAM
        assert y_stride == self.n
        step = x_stride if m > 1 else None
        self.check(x=(x, spec.x, step), weight=(weight, spec.weight, None))
        self.check(bias=(bias, spec.bias, None))
        result = getattr(reference, f"{spec.norm}_forward")(
            memory(x, rows, DTYPES[spec.x], x_stride),
            memory(weight, row, spec.weight and DTYPES[spec.weight]),
            memory(bias, row, spec.bias and DTYPES[spec.bias]),
            eps=eps,
            axis=-1,
            zero_centered=spec.zero_centered,
            relu=(lower, upper) if spec.relu else None,
            out_dtype=DTYPES[spec.y],
        )
        write(memory(y, rows, DTYPES[spec.y]), result.y)
        stored = compute_dtype(spec.x) if spec.store_statistics else None
        has_mean = spec.norm == "layer_norm"
        write(memory(rstd, (m,), stored), result.rstd if stored else None)
        write(memory(mean, (m,), stored if has_mean else None), result.mean if stored else None)
        bits = np.uint8 if spec.relu and stored else None
        write(memory(bitmask, (m, -(-self.n // 8)), bits), result.bitmask if stored else None)


class BackwardPlan(Plan):
    spec: BackwardSpec

    def scratch_bytes(self, m: int) -> int:
        return 4 * m + 12

    def prepared(self, m: int) -> Any:
        return lambda stream, operands: self.launch(stream, m, *operands)

    def launch(
        self,
        stream: int,
        m: int,
        dy: int,
        dy_stride: int,
        x: int,
        x_stride: int,
        weight: int,
        mean: int,
        rstd: int,
        bitmask: int,
        dx: int,
        dx_stride: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        self.launches.append(locals())
        spec, rows, row = self.spec, (m, self.n), (self.n,)
        assert (stream, m) == (STREAM, self.m)
        assert dx_stride == self.n
        several = m > 1
        self.check(
            dy=(dy, spec.dy, dy_stride if several else None),
            x=(x, spec.x, x_stride if several else None),
            weight=(weight, spec.weight, None),
        )
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        stored = compute_dtype(spec.x)
        statistics = [memory(rstd, (m,), stored)]
        if spec.norm == "layer_norm":
            statistics.insert(0, memory(mean, (m,), stored))
        result = getattr(reference, f"{spec.norm}_backward")(
            memory(dy, rows, DTYPES[spec.dy], dy_stride),
            memory(x, rows, DTYPES[spec.x], x_stride),
            memory(weight, row, spec.weight and DTYPES[spec.weight]),
            *statistics,
            bias=False if spec.dbias is None else np.empty(row, DTYPES[spec.dbias]),
            bitmask=memory(bitmask, (m, -(-self.n // 8)), np.uint8 if spec.bitmask else None),
            axis=-1,
            zero_centered=spec.zero_centered,
        )
        write(memory(dx, rows, DTYPES[spec.x]), result.dx)
        write(memory(dweight, row, spec.weight and DTYPES[spec.weight]), result.dweight)
        write(memory(dbias, row, spec.dbias and DTYPES[spec.dbias]), result.dbias)


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
        _current_device=lambda: None,
        _current_stream=lambda device: STREAM,
    ):
        yield plans
