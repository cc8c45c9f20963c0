"""The benchmark of quantized norms: what it checks, on NumPy arrays and on torch's CPU tensors."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmark_doubles import without_compiler

from benchmarks import exchange, quantized, results
from benchmarks.quantized import KINDS, OfQuantized

NORMS = ("rms_norm", "layer_norm")


def problem_of(norm: str, kind: str) -> OfQuantized:
    return OfQuantized(norm, "forward", 33, 256, "bfloat16", "bfloat16", kind=kind)


class OursOnHost(quantized.Ours):
    """Runs on NumPy arrays."""

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_check_is_of_every_output(norm: str, kind: str) -> None:
    problem = problem_of(norm, kind)
    inputs, backend = quantized.inputs(problem, 0, np), OursOnHost()
    outputs = backend.prepare(problem, inputs).run()
    record = quantized.check(problem, backend, inputs, outputs, np)
    assert record["status"] == "ok", record
    for index in range(len(problem.outputs)):
        spoiled = [output.copy() for output in outputs]
        spoiled[index].reshape(-1).view("u1")[1] ^= 0x40
        record = quantized.check(problem, backend, inputs, tuple(spoiled), np)
        assert record["status"] == "wrong"


@pytest.mark.parametrize("backend", [quantized.Apart, quantized.Compiled])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_computes_the_same(kind: str, backend: type, monkeypatch) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = problem_of("layer_norm", kind)
    inputs = quantized.inputs(problem, 0, np)
    tensors = {name: exchange.to_torch(array) for name, array in inputs.items()}
    outputs = backend().prepare_tensors(problem, tensors).run()
    record = quantized.check(problem, backend(), inputs, outputs, np)
    assert record["status"] == "ok", record


def written(q: Any, y: Any, scale: Any) -> None:
    q.copy_((y / scale).clamp(-448, 448))


def normalized(x: Any, weight: Any, eps: float, bias: Any = None) -> Any:
    x = x.float()
    if bias is None:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.float()
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def by_blocks(q: Any, y: Any, scale: Any) -> None:
    blocks = y.unflatten(-1, (-1, 128))
    scale.copy_(blocks.abs().amax(-1) / 448)
    written(q, y, scale.repeat_interleave(128, -1))


def flashinfer_norm() -> ModuleType:
    """Return a stand-in for flashinfer.norm, by the signatures of version 0.7."""

    def rmsnorm_quant(out, input, weight, scale, eps=1e-6, enable_pdl=None):
        written(out, normalized(input, weight, eps), scale)

    def layernorm_quant(out, input, gemma, beta, scale, eps=1e-6):
        assert str(gemma.dtype) == str(beta.dtype) == "torch.float32"
        written(out, normalized(input, gemma, eps, beta), scale)

    def fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps=1e-6, enable_pdl=None):
        written(out, normalized(residual.add_(input), weight, eps), scale)

    def fused_add_rmsnorm_fp8_block_quant(
        out, block_scale, normed_out, input, residual, weight, eps=1e-6, enable_pdl=None
    ):
        rows = len(input)
        assert block_scale.is_contiguous()
        assert block_scale.shape == (input.shape[1] // 128, (rows + 3) // 4 * 4)
        normed_out.copy_(normalized(residual.add_(input), weight, eps))
        by_blocks(out, normed_out.float(), block_scale.T[:rows])

    module = ModuleType("flashinfer.norm")
    vars(module).update({f.__name__: f for f in locals().values() if callable(f)})
    return module


def operations_of_vllm() -> SimpleNamespace:
    """Return a stand-in for vLLM's operations, by the schemas of version 0.33."""

    def rms_norm_static_fp8_quant(result, input, weight, scale, epsilon):
        written(result, normalized(input, weight, epsilon), scale)

    def fused_add_rms_norm_static_fp8_quant(result, input, residual, weight, scale, epsilon):
        written(result, normalized(residual.add_(input), weight, epsilon), scale)

    def rms_norm_dynamic_per_token_quant(result, input, weight, scale, epsilon, scale_ub, residual):
        assert scale_ub is None
        assert residual is None
        y = normalized(input, weight, epsilon)
        scale.copy_(y.abs().amax(-1, keepdim=True) / 448)
        written(result, y, scale)

    def rms_norm_per_block_quant(
        result, input, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed
    ):
        assert (scale_ub, group_size, is_scale_transposed) == (None, 128, False)
        by_blocks(result, normalized(residual.add_(input), weight, epsilon), scale)

    return SimpleNamespace(**{f.__name__: f for f in locals().values() if callable(f)})


@pytest.mark.parametrize("backend", [quantized.FlashInfer, quantized.VLLM])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", NORMS)
def test_peers_are_called_as_they_say(norm: str, kind: str, backend: type, monkeypatch) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    package, of_flashinfer = ModuleType("flashinfer"), flashinfer_norm()
    package.norm = of_flashinfer
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", of_flashinfer)
    monkeypatch.setattr(torch.ops, "_C", operations_of_vllm(), raising=False)
    problem, peer = problem_of(norm, kind), backend()
    has_it = norm == "rms_norm" or (kind == "static" and backend is quantized.FlashInfer)
    has_it &= kind != "row" or backend is quantized.VLLM
    assert quantized.is_measured(problem, peer) == has_it
    if not has_it:
        return
    inputs = quantized.inputs(problem, 0, np)
    tensors = {name: exchange.to_torch(array.copy()) for name, array in inputs.items()}
    call = peer.prepare_tensors(problem, tensors)
    assert (call.reset is None) == (not problem.adds)
    for _ in range(2):
        record = quantized.check(problem, peer, inputs, call.run(), np)
        assert record["status"] == "ok", record
        if call.reset is not None:
            call.reset()


@pytest.mark.gpu
def test_it_is_measured_beside_the_limit(tmp_path, monkeypatch) -> None:
    without_compiler(quantized, monkeypatch)
    monkeypatch.setattr(quantized, "SHAPES", ((64, 768),))
    path = tmp_path / "quantized.json"
    assert quantized.main([str(path)]) == 0
    found = results.load(path)
    assert found["complete"]
    for _, cell in results.by_problem(found["measurements"]):
        assert cell["limit, CuPy"]["status"] == "ok", cell["limit, CuPy"]
        assert cell["cupynorm"]["status"] == "ok", cell["cupynorm"]
