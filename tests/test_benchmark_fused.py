"""The benchmark of norms of `cupynorm.fuse`: what it checks, on NumPy arrays and CPU tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_doubles import without_compiler

from benchmarks import exchange, fused, results
from benchmarks.fused import NORMS, OfFused

SYNTHETIC = Path(__file__).parent / "data" / "synthetic_results.json"
PROBLEMS = [
    OfFused(norm.norm, direction, 5, 64, "bfloat16", "float32", kind=kind)  # type: ignore[arg-type]
    for kind, (norm, _) in NORMS.items()
    for direction in ("forward", "backward")
]


class OursOnHost(fused.Ours):
    """Runs on NumPy arrays."""

    def synchronize(self) -> None: ...


class OptionOnHost(fused.Option):
    """Runs on NumPy arrays."""

    def synchronize(self) -> None: ...


def name_of(problem: OfFused) -> str:
    return f"{problem.kind}-{problem.direction}"


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_the_check_is_of_every_output(problem: OfFused) -> None:
    given, backend = fused.inputs(problem, 0, np), OursOnHost()
    if fused.is_measured(problem, OptionOnHost()):
        by_option = OptionOnHost().prepare(problem, given).run()
        assert fused.check(problem, backend, given, by_option, np)["status"] == "ok"
    outputs = backend.prepare(problem, given).run()
    assert len(outputs) == len(problem.outputs)
    record = fused.check(problem, backend, given, outputs, np)
    assert record["status"] == "ok", record
    for index, name in enumerate(problem.outputs):
        spoiled = [output.copy() for output in outputs]
        spoiled[index][-1] = spoiled[index][-1] * 1.25 + 1
        record = fused.check(problem, backend, given, spoiled, np)
        assert record["reason"].startswith(f"{name} is off by")


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_torch_computes_the_same(problem: OfFused, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    given = fused.inputs(problem, 0, np)
    for backend in (fused.Face(), fused.Compiled()):
        tensors = {name: exchange.to_torch(array) for name, array in given.items()}
        outputs = backend.prepare_tensors(problem, tensors).run()
        record = fused.check(problem, backend, given, outputs, np)
        assert record["status"] == "ok", (backend.name, record)


def test_the_problems_and_their_bytes() -> None:
    measured = fused.problems()
    assert len(measured) == 2 * (5 + 4 + 2 * 3)
    gated = next(p for p in measured if p.kind == "gated" and p.cols == 1024)
    assert gated.bytes == 3 * 32768 * 1024 * 2
    stored = next(p for p in measured if p.kind == "added and stored")
    assert stored.matrices == (2, 2)
    backward = next(p for p in measured if p.kind == "gated" and p.direction == "backward")
    assert backward.matrices == (3, 2)
    for problem in measured:
        names = {
            b.name for b in (kind() for kind in fused.BACKENDS) if fused.is_measured(problem, b)
        }
        assert ("fla" in names) == (problem.kind == "gated")
        assert ("cupynorm's option" in names) == (
            problem.kind in ("added and stored", "clamped ReLU")
        )
        assert ("mamba" in names) == problem.kind.startswith("gated")


def test_the_table_has_a_line_for_each_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import report

    source, readme = tmp_path / "fused.json", tmp_path / "README.md"
    found = results.load(SYNTHETIC)
    found["measurements"] = [
        {
            **dataclasses.asdict(problem), "backend": name, "status": "ok",
            "times": {"call": {"median": time, "low": time, "high": time, "runs": 3}},
        }
        for problem in PROBLEMS
        for name, time in (("limit, CuPy", 2e-6), ("cupynorm", 2.5e-6))
    ]  # fmt: skip
    results.save(found, source)
    begin, end = report.markers("fused")
    readme.write_text(f"before\n{begin}\n{end}\nafter\n")
    report.main(["--fused", str(source), "--readme", str(readme)])
    text = readme.read_text(encoding="utf-8")
    for problem in PROBLEMS:
        assert f"| {problem.kind} | {problem.direction} | 5x64 | 2.0 | 2.5 | 0.80 |" in text


@pytest.mark.gpu
def test_it_is_measured_beside_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(fused, monkeypatch)
    few = {kind: (norm, ((64, 256),)) for kind, (norm, _) in NORMS.items()}
    monkeypatch.setattr(fused, "NORMS", few)
    path = tmp_path / "fused.json"
    assert fused.main([str(path)]) == 0
    found = results.load(path, "benchmarks.fused")
    assert found["complete"]
    for record in found["measurements"]:
        if record["backend"] in ("limit, CuPy", "cupynorm", "cupynorm's option", "cupynorm.torch"):
            assert record["status"] == "ok", record
