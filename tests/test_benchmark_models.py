"""benchmarks.models: steps of models. Here the models are small, and run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import models

torch = pytest.importorskip("torch", minversion="2.11")
BLOCKS = models.Case("blocks", 64, 2, 2, 8, True, "eager")


def test_a_step_trains_and_leaves_no_gradients() -> None:
    step = models.Step(BLOCKS, models.OWN, "cpu")
    seen: list[Any] = []
    for leaf in step.leaves:
        leaf.register_hook(seen.append)
    assert step.run().shape == step.x.shape
    assert len(seen) == len(step.leaves)
    assert all(leaf.grad is None for leaf in step.leaves)


def test_a_step_that_decodes_records_nothing() -> None:
    case = models.Case("blocks", 64, 2, 3, 1, False, "eager")
    y = models.Step(case, models.OURS, "cpu").run()
    assert y.shape == (3, 1, 64)
    assert not y.requires_grad


@pytest.mark.parametrize("library", [models.OURS, models.RESIDUAL])
def test_the_norms_are_those_of_the_library(library: str) -> None:
    names = {type(m).__module__ for m in models.build(BLOCKS, library, "cpu").modules()}
    assert "cupynorm.torch._modules" in names
    assert "torch.nn.modules.normalization" not in names


def test_llama_has_the_norms_of_a_library() -> None:
    pytest.importorskip("transformers", minversion="5")
    case = models.Case("llama", 128, 1, 2, 4, False, "eager")
    steps = [models.Step(case, name, "cpu") for name in ("transformers", models.OWN, models.OURS)]
    expected, *others = [step.run() for step in steps]
    for y in others:
        assert models.relative_error(y, expected) < models.FORMULA_ERROR
    for step, count in zip(steps, (0, 3, 0), strict=True):
        assert sum(type(m) is torch.nn.RMSNorm for m in step.model.modules()) == count


def test_each_library_has_a_record_and_a_missing_one_says_why() -> None:
    records = models.measure(BLOCKS, models.LIBRARIES, 2, 1, "cpu")
    by_library = {record["library"]: record for record in records}
    assert list(by_library) == [models.OWN, "liger", "quack", models.OURS, models.RESIDUAL]
    for library in (models.OWN, models.OURS, models.RESIDUAL):
        record = by_library[library]
        assert record["error"] < models.FORMULA_ERROR
        assert record["tokens_per_second"] == pytest.approx(16e3 / record["ms"])
        assert len(record["rounds_ms"]) == 2
    assert "ms" not in by_library["quack"]
    assert "quack" in by_library["quack"]["reason"]


def test_a_wrong_output_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = models.swap

    def wrong(model: Any, library: str) -> None:
        swap(model, library)
        if library == models.OURS:
            with torch.no_grad():
                model.blocks[0].norm_1.weight.mul_(1.5)

    monkeypatch.setattr(models, "swap", wrong)
    records = models.measure(BLOCKS, [models.OWN, models.OURS], 1, 1, "cpu")
    assert "ms" in records[0]
    assert "the output is off by" in records[1]["reason"]
    assert "ms" not in records[1]


def test_the_ratio_is_of_the_rounds() -> None:
    own = {"case": "a case", "library": models.OWN, "ms": 2.0, "rounds_ms": [1.0, 2.0, 4.0]}
    ours = {"case": "a case", "library": models.OURS, "ms": 3.0, "rounds_ms": [1.0, 3.0, 3.0]}
    fused = ours | {"library": models.RESIDUAL, "rounds_ms": [0.5, 1.0, 2.0]}
    assert models.row([own, ours, fused]) == "| a case | 2.000 | 1.000 | 0.500 |  |  |  |"
    assert models.row([ours]) == "| a case |  |  |  |  |  |  |"
    lines = list(models.table([own, ours, own | {"case": "another"}]))
    assert lines[2:] == [
        "| a case | 2.000 | 1.000 |  |  |  |  |",
        "| another | 2.000 |  |  |  |  |  |",
    ]


def test_every_mode_has_training_and_decoding() -> None:
    chosen = list(models.cases(models.MODELS, [1024], models.MODES, None))
    assert [case.mode for case in chosen] == ["eager"] * 8 + ["graph"] * 8 + ["compiled"] * 8
    rows = [case.batch for case in chosen if case.mode == "graph" and not case.training]
    assert rows == [*models.ROWS] * 2
    (decoded,) = models.cases(["llama"], [1024], ["compiled"], [64])
    assert (decoded.batch, decoded.length, decoded.training) == (64, 1, False)


def test_nothing_is_timed_in_the_place_of_a_file_or_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("kept", encoding="utf-8")
    with pytest.raises(SystemExit):
        models.main([str(kept)])
    assert "kept.json exists: name another file" in capsys.readouterr().err
    monkeypatch.setattr(models, "gpu_problem", lambda: "a test hides it")
    assert models.main([str(tmp_path / "new.json")]) == 1
    assert capsys.readouterr().out == "There is nothing to time: a test hides it.\n"
    assert not (tmp_path / "new.json").exists()
