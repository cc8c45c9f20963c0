"""The benchmark of quantized norms: what it checks, on NumPy arrays and on torch's CPU tensors."""

from __future__ import annotations

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
