"""benchmarks.soak: calls that a seed repeats, failures that name theirs, and memory that grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import soak

FRAMEWORKS = ("CuPy", "JAX", "torch")


def test_a_seed_decides_everything_and_kinds_are_few() -> None:
    drawn = [soak.draw(seed, FRAMEWORKS) for seed in range(300)]
    for seed in (0, 7, 299):
        again, first = soak.draw(seed, FRAMEWORKS), drawn[seed]
        assert str(again) == str(first)
        for name in ("x", "dy", "weight"):
            one, other = getattr(again.problem, name), getattr(first.problem, name)
            np.testing.assert_array_equal(one, other)
    for what in (
        {one.framework for one in drawn},
        {one.problem.regime for one in drawn},
        {one.stream for one in drawn},
        {one.in_place for one in drawn},
        {one.residual is None for one in drawn},
    ):
        assert len(what) > 1
    # JAX has its own dtype of y.
    kinds = {
        (one.problem.norm, one.problem.x.dtype, one.problem.x.shape[1:], str(one.residual))
        for one in drawn
    }
    assert len(kinds) <= soak.KINDS


def checks(fails_at: int) -> dict[str, Any]:
    def check(drawn: soak.Drawn) -> None:
        if drawn.problem.seed == fails_at:
            raise AssertionError("y[0, 0] is 1.0, exactly 2.0")
        soak.testing.assert_one_rounding(np.ones(1), np.ones(1), np.ones(1), np.float64, "y")

    return {"NumPy": check}


def test_a_failing_call_prints_its_seed_and_a_run_tells_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(soak, "frameworks_here", lambda: checks(fails_at=12))
    path = tmp_path / "soak.json"
    assert soak.main(["--only", "11"]) == 0
    assert soak.main(["--only", "12"]) == 1
    assert "seed 12 FAILED: NumPy " in capsys.readouterr().out
    found = soak.soak(checks(fails_at=12), 1.0, 10)
    assert found["failed"] == [12]
    assert found["calls"]["NumPy"] > 3
    assert found["worst"] == {"NumPy": 0.0}
    assert soak.main([str(path), "--seconds", "1", "--seed", "11"]) == 1
    assert json.loads(path.read_text())["failed"] == [12]
    assert soak.main(["--seconds", "0.5", "--seed", "13"]) == 0


def test_memory_that_grows_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = iter([{"CuPy": 0, "device": 1 << 30}, {"CuPy": 512, "device": 2 << 30}])
    monkeypatch.setattr(soak, "memory", lambda: next(held))
    found = soak.soak(checks(fails_at=-1), 0.5, 0)
    assert found["grown"] == {"CuPy": 512}
    assert "memory GREW: CuPy 0.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("framework", ["NumPy", "torch", "JAX"])
def test_calls_of_each_framework_are_checked(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = soak.frameworks_here().get(framework)
    if check is None:
        pytest.skip(f"needs {framework} on the CPU")
    monkeypatch.setattr(soak, "MOST_ELEMENTS", 2**12)
    monkeypatch.setattr(soak, "WIDTHS", (5, 40, 300))
    tally = soak.Tally()
    for seed in range(3 if framework == "JAX" else 20):
        soak.call(seed, {framework: check}, tally)
    assert tally.failed == []
    assert 0 < tally.worst[framework] <= 1
    compare = soak.testing.assert_one_rounding
    monkeypatch.setattr(
        soak.testing, "assert_one_rounding", lambda actual, *rest: compare(-actual, *rest)
    )
    soak.call(0, {framework: check}, tally)
    assert tally.failed == [0]
