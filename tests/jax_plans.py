"""Plans that compute by NumPy, at the addresses that XLA's CPU client hands out.

They replace the kernels, so everything between a traced call and its launch runs on the CPU.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from strategies import DTYPES

from cupynorm import reference
from cupynorm._operation import (
    KINDS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    NormBackward,
    NormForward,
    Spec,
    shape_of,
)


def arrays_of(spec: Spec, m: int, n: int, operands: tuple[int, ...]) -> dict[str, Any]:
    """Return what is at the operands' addresses, except scratch: arrays by name, or None."""
    arrays, given = {}, iter(operands)
    for name in spec.table.reads + spec.table.writes:
        address, kind, dtype = next(given), KINDS[name], spec.dtypes[name]
        if kind is Kind.ROWS:
            assert next(given) == n, f"{name}_stride"
        assert (address == 0) == (dtype is None), name
        shape = (n,) if kind is Kind.VECTOR else shape_of(kind, (m, n), 1)
        arrays[name] = None if dtype is None else array(address, shape, dtype)
    assert not [*given]
    return arrays


def array(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    kind = DTYPES.get(dtype, np.dtype(np.uint8))
    memory = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def write(spec: Spec, arrays: dict[str, Any], result: NormForward | NormBackward) -> None:
    for name in spec.writes:
        arrays[name][...] = getattr(result, name)


def dtype_of(name: str | None) -> Any:
    return None if name is None else DTYPES[name]


@dataclass(frozen=True)
class ForwardPlan:
    spec: ForwardSpec
    n: int
    m: int
    stands_in: ClassVar[bool] = False

    def scratch_bytes(self, m: int) -> int:
        return 16 if m % 3 == 2 else 0

    def prepared(self, m: int, *numbers: float) -> Any:
        def launch(stream: int, operands: tuple[int, ...]) -> None:
            *arrays, scratch = operands if self.scratch_bytes(m) else (*operands, 0)
            self.launch(stream, m, arrays, scratch, *numbers)

        return launch

    def launch(
        self, stream: int, m: int, operands: Any, scratch: int, eps: float, *relu: float
    ) -> None:
        spec = self.spec
        assert (stream, m) == (0, self.m)
        assert (scratch != 0) == (self.scratch_bytes(m) != 0)
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        arrays = arrays_of(spec, m, self.n, operands)
        result = getattr(reference, f"{spec.norm}_forward")(
            *(arrays[name] for name in ("x", "weight", "bias")),
            eps=eps,
            zero_centered=spec.zero_centered,
            relu=relu if spec.relu else None,
            out_dtype=DTYPES[spec.y],
            residual=arrays["residual"],
            residual_dtype=dtype_of(spec.dtypes["residual_out"]),
        )
        write(spec, arrays, result)


@dataclass(frozen=True)
class BackwardPlan:
    spec: BackwardSpec
    n: int
    m: int
    stands_in: ClassVar[bool] = False

    def scratch_bytes(self, m: int) -> int:
        return 4 * m + 12

    def prepared(self, m: int) -> Any:
        return lambda stream, operands: self.launch(stream, m, operands)

    def launch(self, stream: int, m: int, operands: Any) -> None:
        spec = self.spec
        assert (stream, m) == (0, self.m)
        *addresses, scratch = operands
        ctypes.memset(scratch, 0xFF, self.scratch_bytes(m))
        arrays = arrays_of(spec, m, self.n, tuple(addresses))
        names = ["dy", "x", "weight", *(name for name in ("mean", "rstd") if name in spec.reads)]
        dbias = arrays["dbias"]
        result = getattr(reference, f"{spec.norm}_backward")(
            *(arrays[name] for name in names),
            bias=False if dbias is None else dbias,
            bitmask=arrays["bitmask"],
            zero_centered=spec.zero_centered,
            dresidual_out=arrays["dresidual_out"],
            dx_dtype=dtype_of(spec.dx),
            dresidual_dtype=dtype_of(spec.dresidual),
        )
        write(spec, arrays, result)


def forward_plan(
    spec: ForwardSpec, m: int, n: int, vector: int, device: int, *, soon: bool
) -> ForwardPlan:
    assert n % vector == 0
    return ForwardPlan(spec, n, m)


def backward_plan(
    spec: BackwardSpec, m: int, n: int, vector: int, device: int, *, soon: bool
) -> BackwardPlan:
    assert n % vector == 0
    return BackwardPlan(spec, n, m)
