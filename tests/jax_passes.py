"""Passes of norms of `cupynorm.fuse` that compute by NumPy, at the addresses that XLA hands out.

They replace the kernels, as jax_plans.py does those of the plain norms.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import numpy as np
from strategies import DTYPES

from cupynorm import Fused, _fuse
from cupynorm._fuse import Given, Options
from cupynorm._fused_source import Spec, backward_op, forward_op
from cupynorm.reference import round_once, sum_to_shape

ALIKE = {"n_rows", "n_cols", "inv_n", "eps"}


def array(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    kind = DTYPES[dtype]
    memory = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Pass:
    spec: Spec
    n: int

    @property
    def operands(self) -> tuple[str, ...]:
        spec = self.spec
        op = (backward_op if spec.of_outputs else forward_op)(spec)
        targets = (f"d_{name}" for name, _ in spec.sums_over_rows if spec.of_outputs)
        return (*(name for name, _ in op.arguments if name not in ALIKE), *targets)

    def scratch_bytes(self, m: int) -> int:
        return 16 * m if self.spec.of_outputs and self.spec.sums_over_rows else 0

    def prepared(self, m: int, eps: float) -> Any:
        return lambda stream, operands: self.launch(stream, m, eps, operands)

    def launch(self, stream: int, m: int, eps: float, operands: tuple[int, ...]) -> None:
        spec, n = self.spec, self.n
        assert stream == 0
        assert spec.norm in ("rms_norm", "layer_norm")
        given = dict(zip(self.operands, operands, strict=True))
        ctypes.memset(given.pop("partials", 0), 0xFF, self.scratch_bytes(m))

        def taken(name: str, shape: tuple[int, ...], dtype: str | None) -> Any:
            address = given.pop(name)
            assert (address == 0) == (dtype is None), name
            return None if dtype is None else array(address, shape, dtype)

        def read(name: str, place: str, dtype: str | None) -> Any:
            if place == "rows":
                assert given.pop(f"stride_{name}") == n
                return taken(name, (m, n), dtype)
            if place == "vector":
                return taken(name, (n,), dtype)
            return taken(name, (m, 1) if given.pop(f"step_{name}") else (1, 1), dtype)

        x = read("in_x", "rows", spec.x)
        weight, bias = (taken(of, (n,), getattr(spec, of)) for of in ("weight", "bias"))
        inputs = {i.name: read(f"in_{i.name}", i.place, i.dtype) for i in spec.inputs}
        fused = Fused(spec.norm, spec.prologue, spec.epilogue)
        options = Options(eps, -1, spec.zero_centered, spec.outputs)
        arrays = Given(x, weight, bias, inputs)
        passed = self.backward if spec.of_outputs else self.forward
        for name, value in passed(fused, arrays, options, taken, read).items():
            target = given.pop(name)
            if target:  # statistics may not be wanted
                array(target, value.shape, str(value.dtype))[...] = value
        assert not given

    def forward(self, fused: Fused, arrays: Given, options: Options, taken: Any, read: Any) -> Any:
        x, weight, bias, inputs = arrays
        found = fused.forward(x, weight, bias, **options._asdict(), **inputs)
        statistics = {"mean": found.mean, "rstd": found.rstd}
        made = {
            name: np.zeros(0) if array is None else array.astype(self.spec.compute)
            for name, array in statistics.items()
        }
        return made | {f"y_{k}": output for k, output in enumerate(found.outputs)}

    def backward(self, fused: Fused, arrays: Given, options: Options, taken: Any, read: Any) -> Any:
        """Return the gradients, with the statistics that are given."""
        spec, x = self.spec, arrays.x
        m = len(x)
        of = [
            None if dtype is None else read(f"dy_{k}", "rows", dtype)
            for k, dtype in enumerate(spec.of_outputs)
        ]
        is_centered = spec.norm == "layer_norm"
        rstd = taken("rstd", (m,), spec.compute).astype(np.float64)
        mean = taken("mean", (m,), spec.compute if is_centered else None)
        mean = None if mean is None else mean.astype(np.float64)

        def normalized(norm: str, value: Any, weight: Any, bias: Any, **_: Any) -> Any:
            y = value if mean is None else value - mean[:, None]
            y = y * rstd[:, None]
            y = y - y.mean(-1, keepdims=True) if is_centered else y
            scale = 1.0 if weight is None else weight.astype(np.float64) + spec.zero_centered
            return y * scale + (0 if bias is None else bias.astype(np.float64)), mean, rstd

        tools = dataclasses.replace(_fuse.NUMPY_TOOLS, normalize=normalized)
        with np.errstate(all="ignore"):
            found = fused.gradients_of_elements(
                tools, arrays, options, spec.compute, spec.outputs, of
            )
        names, made = spec.differentiated, {}
        of_rows = {one.name: one.gradient for one in spec.rows}
        shapes: dict[str, Any] = {name: ((m, self.n), of_rows[name]) for name in names.rows}
        shapes |= dict.fromkeys(names.numbers, ((m, 1), spec.compute))
        shapes |= {name: ((self.n,), dtype) for name, dtype in spec.sums_over_rows}
        for name, (shape, dtype) in shapes.items():
            gradient = np.asarray(found[name], np.float64)
            if name not in ("weight", "bias"):
                gradient = sum_to_shape(np.broadcast_to(gradient, x.shape), shape)
            made[f"d_{name}"] = round_once(gradient, DTYPES[dtype])
        return made


def pass_of(spec: Spec, n: int, device: int) -> Pass:
    return Pass(spec, n)
