"""Plans that compute by NumPy, at the addresses that XLA's CPU client hands out.

They replace the kernels, so everything between a traced call and its launch runs on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy_kernels
from strategies import DTYPES

from cupynorm._groups import Groups
from cupynorm._layout import quantized_config
from cupynorm._operation import (
    KINDS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    NormBackward,
    NormForward,
    QuantizedSpec,
    Spec,
)

ARCHITECTURE = 90  # whose kernels quantize


def arrays_of(
    spec: Spec, m: int, n: int, groups: Groups | None, operands: tuple[int, ...]
) -> dict[str, Any]:
    """Return what is at the operands' addresses, except scratch: arrays by name, or None."""
    arrays, given = {}, iter(operands)
    for name in spec.table.reads + spec.table.writes:
        address, kind, dtype = next(given), KINDS[name], spec.dtypes[name]
        if kind is Kind.ROWS:
            assert next(given) == n, f"{name}_stride"
        assert (address == 0) == (dtype is None), name
        shape = numpy_kernels.shape(name, m, n, groups, spec)
        arrays[name] = None if dtype is None else array(address, shape, dtype)
    assert not [*given]
    return arrays


def array(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    kind = DTYPES.get(dtype) or np.dtype(dtype)
    memory = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def write(spec: Spec, arrays: dict[str, Any], result: NormForward | NormBackward) -> None:
    is_given = isinstance(spec, QuantizedSpec) and spec.scale_given
    for name in spec.writes:
        if name == "scale" and is_given:
            continue
        arrays[name][...] = getattr(result, name)


@dataclass(frozen=True)
class ForwardPlan:
    spec: ForwardSpec
    n: int
    m: int
    stands_in: ClassVar[bool] = False

    def scratch_bytes(self, m: int) -> int:
        return 16 if m % 3 == 2 else 0

    def prepared(self, m: int, *numbers: Any) -> Any:
        def launch(stream: int, operands: tuple[int, ...]) -> None:
            *arrays, scratch = operands if self.scratch_bytes(m) else (*operands, 0)
            self.launch(stream, m, arrays, scratch, *numbers)

        return launch

    def launch(self, stream: int, m: int, operands: Any, scratch: int, *numbers: Any) -> None:
        spec, (*told, groups) = self.spec, numbers
        assert (stream, m) == (0, self.m)
        assert (scratch != 0) == (self.scratch_bytes(m) != 0)
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        numpy_kernels.check_groups(spec, m, groups)
        arrays = arrays_of(spec, m, self.n, groups, operands)
        write(spec, arrays, self.compute(groups, arrays, *told))

    def compute(self, groups: Groups | None, arrays: dict[str, Any], *told: float) -> NormForward:
        return numpy_kernels.forward(self.spec, groups, arrays, *told)


class QuantizedPlan(ForwardPlan):
    spec: QuantizedSpec

    def compute(self, groups: Groups | None, arrays: dict[str, Any], *told: float) -> NormForward:
        assert groups is None
        return numpy_kernels.quantized(self.spec, arrays, *told)


@dataclass(frozen=True)
class BackwardPlan:
    spec: BackwardSpec
    n: int
    m: int
    stands_in: ClassVar[bool] = False

    def scratch_bytes(self, m: int, groups: Groups | None) -> int:
        return 4 * m + 12 + (0 if groups is None else groups.count)

    def prepared(self, m: int, groups: Groups | None) -> Any:
        return lambda stream, operands: self.launch(stream, m, groups, operands)

    def launch(self, stream: int, m: int, groups: Groups | None, operands: Any) -> None:
        spec = self.spec
        assert (stream, m) == (0, self.m)
        *addresses, scratch = operands
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m, groups))
        numpy_kernels.check_groups(spec, m, groups)
        arrays = arrays_of(spec, m, self.n, groups, tuple(addresses))
        write(spec, arrays, numpy_kernels.backward(spec, groups, arrays))


def forward_plan(
    spec: ForwardSpec, m: int, n: int, vector: int, device: int, *, soon: bool
) -> ForwardPlan:
    assert n % vector == 0
    return ForwardPlan(spec, n, m)


def quantized_plan(
    spec: QuantizedSpec, m: int, n: int, vector: int, device: int, *, soon: bool
) -> QuantizedPlan | None:
    has_kernel = quantized_config(spec, n, vector, ARCHITECTURE) is not None
    return QuantizedPlan(spec, n, m) if has_kernel else None


def backward_plan(
    spec: BackwardSpec, m: int, n: int, vector: int, device: int, *, soon: bool
) -> BackwardPlan:
    assert n % vector == 0
    return BackwardPlan(spec, n, m)
