"""Quantized norms, compared with other libraries, torch's operations after a norm, torch.compile.

``python -m benchmarks.quantized benchmarks/results/quantized_h200.json``

RMSNorm and LayerNorm of bfloat16 rows give float8_e4m3fn, as for inference. There are four kinds.
**static** has one scale, which is given. **row** finds one for each row. **add, static** and **add,
1x128** add a residual first and write the sum. The latter finds a scale for each 128 elements. The
limit copies as many bytes as these must move. Times are those of `benchmarks.run`.

FlashInfer compiles its kernels on first use. vLLM's are in an extension module, which is enough: of
its package nothing else is imported.
"""

from __future__ import annotations

import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

import cupynorm
from benchmarks.backends.base import Call, CuPyBackend, Outputs, TorchBackend
from benchmarks.backends.torch_peers import formula
from benchmarks.fusions import Benchmark, judged
from benchmarks.residual import added
from benchmarks.results import Record
from cupynorm import Quantize, _bench, _oracle, testing
from cupynorm._bench import EPS, Problem
from cupynorm._oracle import Errors

Kind = Literal["static", "row", "add, static", "add, 1x128"]
KINDS: tuple[Kind, ...] = ("static", "row", "add, static", "add, 1x128")
NAMES = "q", "scale", "residual_out"
DTYPE, LARGEST, SCALE = "float8_e4m3fn", 448.0, np.float32(5 / 448)
WIDTHS = (1024, 2048, 4096, 8192, 16384)
SHAPES = (*itertools.product((32768, 4096), WIDTHS), *itertools.product((16,), WIDTHS[::2]))
COMPARED = (*((32768, cols) for cols in WIDTHS[::2]), (16, 4096))
CHECKED_ROWS = 16
# Half a step of three bits is at most a 16th, and on average 0.026 in the 2-norm.
TOLERANCE = 2**-5


@dataclass(frozen=True)
class OfQuantized(Problem):
    """A norm whose result is quantized."""

    kind: Kind = "static"

    @property
    def adds(self) -> bool:
        return self.kind.startswith("add")

    @property
    def is_static(self) -> bool:
        return self.kind.endswith("static")

    @property
    def outputs(self) -> tuple[str, ...]:
        scale = () if self.is_static else ("scale",)  # which is the caller's
        return ("q", *scale, *(("residual_out",) if self.adds else ()))

    @property
    def bytes(self) -> int:
        """Count x, q and, if it is added, the residual and the sum."""
        elements = self.rows * self.cols
        of_scales = elements // 32 if self.kind == "add, 1x128" else 0
        return elements * (7 if self.adds else 3) + of_scales


def quantize_of(problem: OfQuantized, given: Any) -> Quantize:
    if problem.is_static:
        return Quantize(DTYPE, given)
    if problem.kind == "row":
        return Quantize(DTYPE, "row")
    return Quantize(DTYPE, "block", block=128)


def inputs(problem: OfQuantized, seed: int, xp: Any) -> dict[str, Any]:
    """Draw what a plain pass takes; add the scale, and the residual if there is one."""
    arrays = _bench.inputs(problem, seed, xp)
    arrays["scale"] = xp.full(1, SCALE)
    if problem.adds:
        arrays["residual"] = _bench.inputs(problem, seed + 1000, xp)["x"]
    return arrays


class Limit(CuPyBackend):
    """A copy of half as many bytes as must move."""

    name = "limit, CuPy"
    kind = "limit"

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        import cupy

        nbytes = problem.bytes // 2
        source = cupy.random.randint(0, 255, nbytes, np.uint8)
        target = cupy.empty_like(source)
        return Call(lambda: target.data.copy_from_device_async(source.data, nbytes) or ())


class Ours(CuPyBackend):
    name = "cupynorm"
    kind = "ours"

    def version(self) -> str:
        return cupynorm.__version__

    def prepare(self, problem: Any, inputs: dict[str, Any]) -> Call:
        function = getattr(cupynorm, problem.norm)
        arrays = inputs["x"], inputs["weight"], inputs.get("bias")
        options = {"residual": inputs.get("residual"), "eps": EPS[problem.norm]}
        quantize = quantize_of(problem, inputs["scale"])

        def run() -> Outputs:
            q, scale, *total = function(*arrays, **options, quantize=quantize)
            return (q, *total) if problem.is_static else (q, scale, *total)

        return Call(run)


class Peer(TorchBackend):
    """A library whose functions write to given tensors, and the sum over the residual."""

    kinds: ClassVar[dict[str, tuple[Kind, ...]]]  # by norm

    @abstractmethod
    def write(self, problem: Any, q: Any, tensors: dict[str, Any], eps: float) -> Outputs:
        """Write q, and return the other outputs."""

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        import torch

        x, given = tensors["x"], tensors.get("residual")
        eps, reset, note = EPS[problem.norm], None, None
        if given is not None:
            own = given.clone()
            tensors = tensors | {"residual": own}
            reset, note = lambda: own.copy_(given), "the sum written over the residual"

        def run() -> Outputs:
            q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
            return (q.view(torch.uint8), *self.write(problem, q, tensors, eps))

        return Call(run, reset, note)


class FlashInfer(Peer):
    """Functions of flashinfer.norm."""

    name = "flashinfer"
    modules = ("torch", "flashinfer.norm")
    distribution = "flashinfer-python"
    compiles = True
    kinds: ClassVar = {
        "rms_norm": ("static", "add, static", "add, 1x128"),
        "layer_norm": ("static",),
    }

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        if problem.norm == "layer_norm":
            affine = {name: tensors[name].float() for name in ("weight", "bias")}
            call = super().prepare_tensors(problem, tensors | affine)
            return replace(call, note="weight and bias in float32")
        call = super().prepare_tensors(problem, tensors)
        if problem.kind == "add, 1x128":
            return replace(call, note=f"{call.note}, and y written too")
        return call

    def write(self, problem: Any, q: Any, tensors: dict[str, Any], eps: float) -> Outputs:
        import torch
        from flashinfer import norm

        x, weight, given = tensors["x"], tensors["weight"], tensors["scale"]
        if problem.norm == "layer_norm":
            norm.layernorm_quant(q, x, weight, tensors["bias"], given, eps)
            return ()
        if not problem.adds:
            norm.rmsnorm_quant(q, x, weight, given, eps)
            return ()
        total = tensors["residual"]
        if problem.is_static:
            norm.fused_add_rmsnorm_quant(q, x, total, weight, given, eps)
            return (total,)
        columns = torch.empty((x.shape[1] // 128, -(-x.shape[0] // 4) * 4), device=x.device)
        y = torch.empty_like(x)
        norm.fused_add_rmsnorm_fp8_block_quant(q, columns, y, x, total, weight, eps)
        return columns.T[: x.shape[0]], total


class VLLM(Peer):
    """Operations of vLLM's extension."""

    name = "vllm"
    modules = ("torch", "vllm._C_stable_libtorch")
    distribution = "vllm"
    kinds: ClassVar = {"rms_norm": KINDS}

    def write(self, problem: Any, q: Any, tensors: dict[str, Any], eps: float) -> Outputs:
        import torch

        x, weight, given = tensors["x"], tensors["weight"], tensors["scale"]
        total, of_vllm = tensors.get("residual"), torch.ops._C
        if problem.kind == "static":
            of_vllm.rms_norm_static_fp8_quant(q, x, weight, given, eps)
            return ()
        if problem.kind == "add, static":
            of_vllm.fused_add_rms_norm_static_fp8_quant(q, x, total, weight, given, eps)
            return (total,)
        scale = torch.empty((x.shape[0], x.shape[1] // 128 if problem.adds else 1), device=x.device)
        if problem.kind == "row":
            of_vllm.rms_norm_dynamic_per_token_quant(q, x, weight, scale, eps, None, None)
            return (scale,)
        of_vllm.rms_norm_per_block_quant(q, x, weight, scale, eps, None, total, 128, False)
        return scale, total


class Apart(TorchBackend):
    """A user's code without it: our norm, then torch's operations."""

    name = "cupynorm, torch"
    modules = ("torch", "cupynorm.torch")

    def norm(self, problem: Any) -> Callable[..., Any]:
        import cupynorm.torch

        function = getattr(cupynorm.torch, problem.norm)
        return lambda *tensors: function(*tensors, eps=EPS[problem.norm])

    def function(self, problem: Any) -> Callable[..., Any]:
        import torch

        norm, outputs = self.norm(problem), problem.outputs

        def quantized(x: Any, residual: Any, given: Any, *weights: Any) -> Any:
            total = None if residual is None else x + residual
            y = norm(x if total is None else total, *weights).float()
            if problem.is_static:
                scale = wide = given
            elif problem.kind == "row":
                scale = wide = y.abs().amax(-1, keepdim=True) / LARGEST
            else:
                y = y.unflatten(-1, (-1, 128))
                wide = y.abs().amax(-1, keepdim=True) / LARGEST
                scale = wide.squeeze(-1)
            q = (y / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).reshape(x.shape)
            results = q.view(torch.uint8), scale, total
            return [r for name, r in zip(NAMES, results, strict=True) if name in outputs]

        return quantized

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        import torch

        function = self.function(problem)
        names = ("x", "residual", "scale", "weight", *(["bias"] if problem.has_bias else []))
        given = [tensors.get(name) for name in names]

        def run() -> Outputs:
            with torch.no_grad():
                return tuple(function(*given))

        return Call(run)


class Compiled(Apart):
    name = "torch.compile"
    modules = ("torch",)

    def norm(self, problem: Any) -> Callable[..., Any]:
        return formula(problem)

    def function(self, problem: Any) -> Callable[..., Any]:
        import torch

        torch._dynamo.reset()
        return torch.compile(super().function(problem), dynamic=False, fullgraph=True)


BACKENDS = (Limit, Ours, FlashInfer, VLLM, Compiled, Apart)


def check(problem: Any, backend: Any, inputs: dict[str, Any], outputs: Outputs, xp: Any) -> Record:
    """Return the record of a check: of q * scale, against float64, and of the sum by its bits.

    cupynorm's q and scales must be exact, on some rows.
    """
    named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
    x = inputs["x"]
    if problem.adds:
        x = added(x, inputs["residual"], xp)
        if not bool((x.view("u2") == named["residual_out"].view("u2")).all()):
            return {"status": "wrong", "reason": "the sum is not x + residual, rounded once"}
    rows = slice(0, problem.rows, max(1, problem.rows // CHECKED_ROWS))
    wide = _oracle.widen(x[rows])
    if problem.norm == "layer_norm":
        wide = wide - wide.mean(-1, keepdims=True)
    exact = wide / xp.sqrt((wide**2).mean(-1, keepdims=True) + EPS[problem.norm])
    exact = exact * _oracle.widen(inputs["weight"])
    if problem.has_bias:
        exact = exact + _oracle.widen(inputs["bias"])
    q, scale = named["q"].view("u1")[rows], named.get("scale", inputs["scale"])
    scale = scale[rows] if "scale" in named else scale
    found = cupynorm.dequantize(xp.ascontiguousarray(q), scale, dtype=DTYPE)
    error = float(xp.linalg.norm(found - exact) / xp.linalg.norm(exact))
    if backend.kind == "ours":
        host = {name: _to_host(array) for name, array in inputs.items()}
        of_rows = {name: host[name][rows] for name in ("x", "residual") if name in host}
        results = [_to_host(q), _to_host(scale)]
        results += [_to_host(named["residual_out"][rows])] if problem.adds else []
        try:
            testing.check_quantized(
                problem.norm,
                tuple(results),
                of_rows.pop("x"),
                host["weight"],
                host.get("bias"),
                **of_rows,
                quantize=quantize_of(problem, host["scale"]),
                eps=EPS[problem.norm],
            )
        except AssertionError as wrong:
            return {"status": "wrong", "reason": str(wrong)}
    return judged(backend, {"q": Errors(error, 0.0, TOLERANCE)})


def _to_host(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    word = f"u{array.dtype.itemsize}"
    return array.view(word).get().view(array.dtype)


def is_measured(problem: Any, backend: Any) -> bool:
    """Tell whether a library has the norm, and is timed. The compiler takes seconds for a shape."""
    if isinstance(backend, Apart):
        return (problem.rows, problem.cols) in COMPARED
    if isinstance(backend, Peer):
        return problem.kind in backend.kinds.get(problem.norm, ())
    return True


def title(record: Record) -> tuple[str, str, str]:
    """Return what a table says of a problem."""
    return record["norm"], record["kind"], f"{record['rows']}x{record['cols']}"


def problems() -> list[OfQuantized]:
    """Return the passes that are measured."""
    return [
        OfQuantized(norm, "forward", *shape, "bfloat16", "bfloat16", kind=kind)  # type: ignore[arg-type]
        for norm in ("rms_norm", "layer_norm")
        for kind in KINDS
        for shape in (COMPARED if kind == "add, static" else SHAPES)
    ]


BENCHMARK = Benchmark(
    "benchmarks.quantized",
    problems,
    BACKENDS,
    inputs,
    check,
    is_measured,
    ("norm", "kind", "MxN"),
    title,
    (
        "The largest error of q times its scale against float64, in the 2-norm, relative to the "
        "exact result.",
        "in the 2-norm",
        "",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
