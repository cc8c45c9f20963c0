"""The benchmark of a residual: what it checks, on NumPy arrays and on torch's CPU tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmark_doubles import check_table, without_compiler

from benchmarks import exchange, residual, results
from benchmarks.residual import OfSum

NORMS = ("rms_norm", "layer_norm")
DIRECTIONS = ("forward", "backward")


def problem_of(norm: str, direction: str) -> OfSum:
    return OfSum(norm, direction, 33, 48, "bfloat16", "bfloat16")


class OursOnHost(residual.Ours):
    """Runs on NumPy arrays."""

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_check_is_of_every_output(norm, direction) -> None:
    problem = problem_of(norm, direction)
    inputs, backend = residual.inputs(problem, 0, np), OursOnHost()
    outputs = backend.prepare(problem, inputs).run()
    assert residual.check(problem, backend, inputs, outputs, np)["status"] == "ok"
    for index, name in enumerate(problem.outputs):
        spoiled = [output.copy() for output in outputs]
        spoiled[index][-1] = spoiled[index][-1] * 1.25 + 1
        record = residual.check(problem, backend, inputs, spoiled, np)
        assert record["status"] == "wrong"
        words = "the sum is not" if name == "residual_out" else f"{name} is off by"
        assert record["reason"].startswith(words)


def test_dx_without_the_gradient_of_the_sum_is_wrong() -> None:
    problem = problem_of("rms_norm", "backward")
    inputs = residual.inputs(problem, 0, np)
    inputs_without = {**inputs, "dresidual_out": None}
    outputs = OursOnHost().prepare(problem, inputs_without).run()
    record = residual.check(problem, OursOnHost(), inputs, outputs, np)
    assert record["reason"].startswith("dx is off by")


@pytest.mark.parametrize("kind", [residual.Apart, residual.Eager])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_torch_computes_the_same(norm, direction, kind) -> None:
    torch = pytest.importorskip("torch")
    problem, backend = problem_of(norm, direction), kind()
    inputs = residual.inputs(problem, 0, np)
    tensors = {name: exchange.to_torch(array) for name, array in inputs.items()}
    outputs = backend.prepare_tensors(problem, tensors).run()
    assert all(isinstance(output, torch.Tensor) for output in outputs)
    record = residual.check(problem, backend, inputs, outputs, np)
    assert record["status"] == "ok", record


def test_bytes_are_of_four_matrices() -> None:
    matrix = 33 * 48 * 2
    assert problem_of("rms_norm", "forward").bytes == 4 * matrix + 48 * 2
    assert problem_of("rms_norm", "backward").bytes == 4 * matrix + 2 * 48 * 2


def test_the_table_is_made_from_the_file(tmp_path: Path) -> None:
    times = {"limit, CuPy": 2e-6, "cupynorm": 2.5e-6, "torch add, cupynorm": 5e-6}
    row = "| rms_norm | backward | 33x48 | 2.0 | 2.5 | 0.80 | 5.0 |"
    check_table("residual", problem_of("rms_norm", "backward"), times, row, tmp_path)


@pytest.mark.gpu
def test_it_is_measured_beside_the_limit(tmp_path, monkeypatch) -> None:
    without_compiler(residual, monkeypatch)
    monkeypatch.setattr(residual, "SHAPES", ((64, 768),))
    path = tmp_path / "residual.json"
    assert residual.main([str(path)]) == 0
    found = results.load(path)
    assert found["complete"]
    cells = list(results.by_problem(found["measurements"]))
    assert len(cells) == 4
    for _, cell in cells:
        assert cell["limit, CuPy"]["status"] == "ok", cell["limit, CuPy"]
        assert cell["cupynorm"]["status"] == "ok", cell["cupynorm"]
