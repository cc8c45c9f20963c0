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
import torch

from cupynorm import reference
from cupynorm._arrays import to_numpy
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    ITEMSIZE,
    KINDS,
    MOVED_BY_PACKS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    shape_of,
)
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
        assert self.spec.grouped == (self.groups is not None)
        repeats = self.groups is not None and self.groups.repeats > 1
        assert bool(self.spec.repeats) == repeats
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
            shape = self.shape(name)
            found[name] = memory(address, shape, dtype and to_numpy(dtype), stride)
        return found

    def run(self, arrays: dict[str, Any], *numbers: float) -> None:
        raise NotImplementedError

    def bytes_of_scratch(self) -> int:
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Return an array's shape. A vector that varies has rows of its own."""
        if KINDS[name] is not Kind.VECTOR:
            return shape_of(KINDS[name], (self.m, self.n), 1)
        if self.groups is None:
            return (self.n,)
        numbers = self.groups.numbers(self.n, 1)
        elements = self.n // numbers["n_repeats"]
        step = numbers["weight_step" if name.endswith("weight") else "bias_step"]
        assert step in (0, elements)
        return (numbers["n_vectors"] if step else 1, elements)

    def vector_of_row(self) -> Any:
        """Return which vector each row has, as kernels/groups.cuh says."""
        numbers, groups = self.groups.numbers(self.n, 1), self.groups
        found = np.full(self.m, -1)
        for group in range(numbers["n_groups"]):
            for row in range(groups.rows):
                place = group * numbers["group_step"] + row * numbers["row_step"]
                assert found[place] == -1
                found[place] = group % numbers["n_vectors"]
        assert (found >= 0).all()
        return found

    def of_rows(self, vectors: Any) -> Any:
        """Return vectors as an array for all rows."""
        if vectors is None or self.groups is None:
            return vectors
        return vectors[self.vector_of_row() % len(vectors)].repeat(self.groups.repeats, 1)

    def sums(self, name: str, of_rows: Any) -> Any:
        """Return a gradient of vectors, from that of each row."""
        rows, elements = self.shape(name)
        total = np.zeros((rows, elements))
        parts = of_rows.reshape(self.m, elements, self.groups.repeats).sum(2)
        np.add.at(total, self.vector_of_row() % rows, parts)
        return total

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
        spec, (eps, lower, upper) = self.spec, numbers
        read = {name: arrays[name] for name in FORWARD.reads}
        read |= {name: self.of_rows(read[name]) for name in ("weight", "bias")}
        result = getattr(reference, f"{spec.norm}_forward")(
            **read,
            eps=eps,
            axis=-1,
            zero_centered=spec.zero_centered,
            relu=(lower, upper) if spec.relu else None,
            out_dtype=to_numpy(spec.y),
            residual_dtype=to_numpy(spec.x) if spec.residual else None,
        )
        self.write(arrays, result)


class BackwardPlan(Plan):
    spec: BackwardSpec

    def scratch_bytes(self, m: int, groups: Any) -> int:
        return 4 * m + 12 + (0 if groups is None else groups.count)

    def bytes_of_scratch(self) -> int:
        return self.scratch_bytes(self.m, self.groups)

    def run(self, arrays: dict[str, Any], *numbers: float) -> None:
        spec, read = self.spec, {name: arrays[name] for name in BACKWARD.reads}
        like = None if spec.dbias is None else np.empty((self.n,), to_numpy(spec.dbias))
        if self.groups is not None:  # the sums are the kernels' own, and are rounded once
            weight = self.of_rows(read["weight"])
            read["weight"] = None if weight is None else weight.astype(np.float64)
            like = None if like is None else np.empty((self.m, self.n))
        if spec.norm == "rms_norm":
            del read["mean"]
        of_x = to_numpy(spec.dtypes["dx"])
        result = getattr(reference, f"{spec.norm}_backward")(
            **read,
            bias=False if like is None else like,
            axis=-1,
            zero_centered=spec.zero_centered,
            dx_dtype=of_x,
            dresidual_dtype=to_numpy(spec.dresidual) if spec.dresidual else of_x,
        )
        if self.groups is not None:
            for name in {"dweight", "dbias"}.intersection(spec.writes):
                sums = reference.round_once(
                    self.sums(name, getattr(result, name)), to_numpy(spec.dtypes[name])
                )
                result = result._replace(**{name: sums})
        self.write(arrays, result)


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
