"""Plans that compute by NumPy, at the addresses that XLA's CPU client hands out.

With them in place of the kernels, everything between a traced call and its launch runs on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from strategies import DTYPES

from cupynorm import reference
from cupynorm._operation import BackwardSpec, ForwardSpec, bitmask_bytes, compute_dtype


def array(address: int, shape: tuple[int, ...], dtype: str | None) -> Any:
    """Return the memory at an address as an array; None where an array is absent."""
    assert (address == 0) == (dtype is None)
    if dtype is None:
        return None
    kind = DTYPES.get(dtype, np.dtype(np.uint8))
    memory = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def write(target: Any, values: Any) -> None:
    assert (target is None) == (values is None)
    if target is not None:
        target[...] = values


@dataclass(frozen=True)
class ForwardPlan:
    spec: ForwardSpec
    n: int
    m: int

    def scratch_bytes(self, m: int) -> int:
        return 16 if m % 3 == 2 else 0

    def prepared(self, m: int, *numbers: float) -> Any:
        def launch(stream: int, operands: tuple[int, ...]) -> None:
            *arrays, scratch = operands if self.scratch_bytes(m) else (*operands, 0)
            self.launch(stream, m, *arrays, scratch, *numbers)

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
        scratch: int,
        eps: float,
        lower: float,
        upper: float,
    ) -> None:
        spec, rows, row = self.spec, (m, self.n), (self.n,)
        assert (stream, m) == (0, self.m)
        assert x_stride == y_stride == self.n
        assert (scratch != 0) == (self.scratch_bytes(m) != 0)
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        stored = compute_dtype(spec.x) if spec.store_statistics else None
        result = getattr(reference, f"{spec.norm}_forward")(
            array(x, rows, spec.x),
            array(weight, row, spec.weight),
            array(bias, row, spec.bias),
            eps=eps,
            zero_centered=spec.zero_centered,
            relu=(lower, upper) if spec.relu else None,
            out_dtype=DTYPES[spec.y],
        )
        write(array(y, rows, spec.y), result.y)
        if stored:
            write(array(rstd, (m,), stored), result.rstd)
            has_mean = spec.norm == "layer_norm"
            write(array(mean, (m,), stored if has_mean else None), result.mean)
            bits = "uint8" if spec.relu else None
            write(array(bitmask, (m, bitmask_bytes(self.n)), bits), result.bitmask)


@dataclass(frozen=True)
class BackwardPlan:
    spec: BackwardSpec
    n: int
    m: int

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
        spec, rows, row = self.spec, (m, self.n), (self.n,)
        assert (stream, m) == (0, self.m)
        assert dy_stride == x_stride == dx_stride == self.n
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        stored = compute_dtype(spec.x)
        statistics = [array(rstd, (m,), stored)]
        if spec.norm == "layer_norm":
            statistics.insert(0, array(mean, (m,), stored))
        bias = False if spec.dbias is None else np.empty(row, DTYPES[spec.dbias])
        result = getattr(reference, f"{spec.norm}_backward")(
            array(dy, rows, spec.dy),
            array(x, rows, spec.x),
            array(weight, row, spec.weight),
            *statistics,
            bias=bias,
            bitmask=array(bitmask, (m, bitmask_bytes(self.n)), "uint8" if spec.bitmask else None),
            zero_centered=spec.zero_centered,
        )
        write(array(dx, rows, spec.x), result.dx)
        write(array(dweight, row, spec.weight), result.dweight)
        write(array(dbias, row, spec.dbias), result.dbias)


def forward_plan(spec: ForwardSpec, m: int, n: int, vector: int, device: int) -> ForwardPlan:
    assert n % vector == 0
    return ForwardPlan(spec, n, m)


def backward_plan(spec: BackwardSpec, m: int, n: int, vector: int, device: int) -> BackwardPlan:
    assert n % vector == 0
    return BackwardPlan(spec, n, m)
