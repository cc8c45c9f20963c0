"""benchmarks.tune: a measurement tells apart each row of the tuning tables."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from benchmarks import tune, turns
from benchmarks.tuning_cases import CASES
from cupynorm import _calls, _plans
from cupynorm._layout import forward_config
from cupynorm._layout.tuning_sm90 import ROWS, Forward
from cupynorm._operation import ForwardSpec

NOTES = Path(__file__).parents[1] / "benchmarks" / "notes.md"
KEY = "Forward.max_packs"


def test_each_row_has_a_case() -> None:
    assert list(CASES) == list(ROWS)


@pytest.mark.parametrize("key", ROWS)
def test_each_candidate_of_a_row_changes_a_layout(key: str) -> None:
    """A candidate that leaves all layouts alone measures nothing, nor does a shape that stays."""
    told_apart = [tune.differing(key, problem) for problem in tune.problems_of(key)]
    assert all(told_apart)
    assert all(any(choice in found for found in told_apart) for choice in CASES[key][1])


@pytest.mark.parametrize("key", ROWS)
def test_each_row_has_its_note(key: str) -> None:
    headings = re.findall(r"^### (.*)$", NOTES.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
    assert anchors.count(ROWS[key].note) == 1
    assert re.search(r"\d", ROWS[key].gain)


def test_a_choice_is_replaced_for_a_while_and_plans_are_forgotten(monkeypatch) -> None:
    planned = functools.cache(lambda: Forward.max_packs)
    monkeypatch.setattr(_plans, "few_rows", planned)
    for choice in (7, 9):
        _calls.calls["of many"] = planned
        assert planned() == 2048
        with tune.replaced(KEY, choice):
            assert not _calls.calls
            assert planned() == Forward.max_packs == choice
            _calls.calls["of these"] = planned
        assert not _calls.calls


def test_a_choice_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError, match="inside"), tune.replaced(KEY, 7):
        raise KeyError("inside")
    assert Forward.max_packs == 2048


def test_the_layout_told_is_that_of_the_case() -> None:
    (problem,) = tune.problems_of("ForwardInRegisters.widths")
    assert (problem.rows, problem.cols, problem.weight_dtype) == (37449, 3584, "float32")
    spec = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
    assert tune.layout(problem) == forward_config(spec, 3584, 8, 90)


def test_candidates_are_captured_with_their_choice_and_the_winner_is_told(monkeypatch) -> None:
    """Timing is replaced: what is timed is the layout that was chosen during its capture."""
    monkeypatch.setattr(tune.CuPyBackend, "capture", lambda self, problem, _: tune.layout(problem))
    monkeypatch.setattr(tune.CuPyBackend, "release", lambda self: None)
    captured = []

    def time(problem, backends, clock, rounds, xp):
        captured.extend(backend.capture(problem, {}) for backend in backends)
        return [3e-6, 2e-6][: len(backends)], [True]

    monkeypatch.setattr(turns, "time", time)
    pytest.importorskip("cupy", exc_type=ImportError)
    (problem,) = tune.problems_of(KEY)
    line = tune.measured(KEY, problem, None, 1, (90, 132))
    assert captured[0] == tune.layout(problem) != captured[1]
    assert line.endswith(": 2048 3.00, 1024 2.00 us; 1024 wins, gain of 2048 -33.3 %")
    short = tune.Problem("rms_norm", "forward", 8, 64, "bfloat16", "float32")
    assert "the same layout" in tune.measured(KEY, short, None, 1, (90, 132))


def test_the_command_lists_and_without_a_gpu_says_what_it_would_measure(
    monkeypatch, capsys
) -> None:
    assert tune.main([]) == 0
    assert capsys.readouterr().out.count("notes.md#") == len(ROWS)
    monkeypatch.setattr(tune, "gpu_problem", lambda: "there is no GPU")
    assert tune.main(["Reduction", KEY]) == 1
    out = capsys.readouterr().out
    assert "there is no GPU" in out
    assert "  rms_norm backward 4096x768 bfloat16,bfloat16: 64, 16, 32\n" in out
    assert "  layer_norm forward 512x16384 bfloat16,bfloat16: 2048, 1024\n" in out
    with pytest.raises(SystemExit):
        tune.main(["Forward.max"])
    assert "Forward.max is no row and no table" in capsys.readouterr().err
