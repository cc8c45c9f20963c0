"""The errors on hard rows, of a library that is right and of ones that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_doubles import FakeBackend

from benchmarks import accuracy
from cupynorm._bench import Problem


def problem(direction: str) -> Problem:
    return Problem("layer_norm", direction, 8, 48, *accuracy.PAIR)


@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_x_is_of_its_kind(kind: str) -> None:
    scale, mean = accuracy.KINDS[kind]
    x = accuracy.inputs(problem("forward"), kind, np)["x"]
    assert x.dtype == np.float32
    wide = x.astype(np.float64)
    assert abs(wide.mean() - mean) < scale
    assert 0.5 * scale < wide.std() < 2 * scale


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_the_reference_is_within_its_bound_on_every_kind(kind: str, direction: str) -> None:
    record = accuracy.measure(problem(direction), kind, FakeBackend(), np)
    assert record["status"] == "ok"
    assert record["kind"] == kind
    assert all(over_bound <= 1 for _, over_bound in record["errors"].values())


def test_the_table_has_a_row_an_output_and_says_what_failed() -> None:
    records = [
        accuracy.measure(problem(direction), "mean 1e6", FakeBackend(fault), np)
        | {"backend": fault or "right"}
        for fault in ("", "wrong", "refuses")
        for direction in ("forward", "backward")
    ]
    head, _, *rows = accuracy.table(records)
    assert head == "| norm | x | output | right | wrong | refuses |"
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [row[2] for row in cells] == ["y", "dx", "dweight", "dbias"]
    assert all(row[:2] == ["layer_norm", "mean 1e6"] for row in cells)
    by_output = {row[2]: row[3:] for row in cells}
    assert by_output["y"][0].startswith(tuple("0123456789"))
    assert float(by_output["y"][1].split("(")[1].strip(")")) > 1e6
    assert by_output["y"][2] == by_output["dx"][2] == "failed"


def test_without_a_gpu_it_says_so(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(accuracy, "gpu_problem", lambda: "a test hides it")
    assert accuracy.main([str(tmp_path / "a.json")]) == 1
    assert "There is nothing to measure: a test hides it." in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
