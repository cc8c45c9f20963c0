"""The benchmark of groups: what it checks, on NumPy arrays and on torch's CPU tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmark_doubles import check_table, without_compiler

from benchmarks import exchange, groups, results
from benchmarks.groups import NORMS, OfGroups

SHAPES = {
    "AdaLN": (3, 5, 32),
    "heads": (7, 3, 16),
    "GroupNorm": (2, 3, 4, 5, 2),
    "channels first": (2, 6, 3, 5),
}
PROBLEMS = [
    OfGroups.of(kind, norm, direction, shape)
    for kind, shape in SHAPES.items()
    for norm in NORMS[kind]
    for direction in ("forward", "backward")
]


class OursOnHost(groups.Ours):
    """Runs on NumPy arrays."""

    def synchronize(self) -> None: ...


def name_of(problem: OfGroups) -> str:
    return f"{problem.kind}-{problem.operation}"


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_the_check_is_of_every_output(problem: OfGroups) -> None:
    given, backend = groups.inputs(problem, 0, np), OursOnHost()
    outputs = backend.prepare(problem, given).run()
    assert groups.check(problem, backend, given, outputs, np)["status"] == "ok"
    for index, name in enumerate(problem.outputs):
        spoiled = [output.copy() for output in outputs]
        spoiled[index][-1] = spoiled[index][-1] * 1.25 + 1
        record = groups.check(problem, backend, given, spoiled, np)
        assert record["reason"].startswith(f"{name} is off by")
        record = groups.check(problem, backend, given, [o[:1] for o in outputs], np)
        assert "has shape" in record["reason"]


@pytest.mark.parametrize("problem", PROBLEMS, ids=name_of)
def test_torch_computes_the_same(problem: OfGroups) -> None:
    pytest.importorskip("torch")
    backend = groups.Eager()
    given = groups.inputs(problem, 0, np)
    tensors = {name: exchange.to_torch(array) for name, array in given.items()}
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    exact = [o.bfloat16() for o in backend.prepare_tensors(problem, wide).run()]
    record = groups.check(problem, backend, given, exact, np)
    assert record["status"] == "ok", record


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "shape"), [("AdaLN", (4, 64, 256)), ("heads", (256, 4, 128))])
def test_a_peer_may_round_between_its_steps(
    kind: str, shape: tuple[int, ...], direction: str
) -> None:
    pytest.importorskip("torch")
    backend, problem = groups.Eager(), OfGroups.of(kind, "layer_norm", direction, shape)
    given = groups.inputs(problem, 0, np)
    tensors = {name: exchange.to_torch(array) for name, array in given.items()}
    outputs = backend.prepare_tensors(problem, tensors).run()
    record = groups.check(problem, backend, given, outputs, np)
    assert record["status"] == "ok", record
    assert max(over for _, over in record["errors"].values()) > 64  # where its terms cancel
    first = outputs[0].reshape(-1, problem.cols)
    first[-1] = first[0]
    record = groups.check(problem, backend, given, outputs, np)
    assert record["reason"].startswith(f"{problem.outputs[0]} is off by")
    first[-1] = float("nan")
    record = groups.check(problem, backend, given, outputs, np)
    assert record["errors"][problem.outputs[0]] == [None, None]


def test_what_the_compiler_gets_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for problem in PROBLEMS:
        given = groups.inputs(problem, 0, np)
        tensors = {name: exchange.to_torch(array) for name, array in given.items()}
        outputs = groups.Compiled().prepare_tensors(problem, tensors).run()
        record = groups.check(problem, groups.Compiled(), given, outputs, np)
        assert record["status"] == "ok", (problem, record)


def test_the_problems_are_those_of_models() -> None:
    measured = groups.problems()
    assert len(measured) == 2 * (2 * 5 + 2 * 2 + 1 + 2)
    assert {p.kind for p in measured} == set(SHAPES)
    adaln = next(p for p in measured if p.kind == "AdaLN" and p.direction == "backward")
    assert adaln.bytes == 3 * 16 * 2048 * 1024 * 2
    assert adaln.outputs == ("dx", "dweight", "dbias")
    libraries = [kind() for kind in groups.BACKENDS]
    for problem in measured:
        there = {b.name for b in libraries if groups.is_measured(problem, b)}
        peer = {"AdaLN": "liger", "heads": "quack"}.get(problem.kind)
        expected = {peer} if problem.norm == "rms_norm" and peer else set()
        assert there - {"limit, CuPy", "cupynorm", "torch", "torch.compile"} == expected


def test_the_table_is_made_from_the_file(tmp_path: Path) -> None:
    times = {"limit, CuPy": 2e-6, "cupynorm": 2.5e-6, "torch": 5e-6}
    row = "| AdaLN | rms_norm | forward | 3x5x32 | 2.0 | 2.5 | 0.80 |"
    check_table("groups", PROBLEMS[0], times, row, tmp_path)


@pytest.mark.gpu
def test_it_is_measured_beside_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(groups, monkeypatch)
    monkeypatch.setattr(groups, "ADALN", ())
    monkeypatch.setattr(groups, "HEADS", (("heads", (64, 4, 128)),))
    monkeypatch.setattr(groups, "IMAGES", (("channels first", (2, 64, 8, 8)),))
    path = tmp_path / "groups.json"
    assert groups.main([str(path)]) == 0
    found = results.load(path, "benchmarks.groups")
    assert found["complete"]
    for record in found["measurements"]:
        if record["backend"] in ("limit, CuPy", "cupynorm"):
            assert record["status"] == "ok", record
