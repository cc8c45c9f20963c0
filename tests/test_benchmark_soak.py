"""benchmarks.soak: calls that a seed repeats, failures that name theirs, and memory that grows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
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
        {one.sums is None for one in drawn},
        {one.place for one in drawn},
        {one.fused and str(one.fused.fused) for one in drawn},
        {one.quantize and one.quantize.told for one in drawn},
    ):
        assert len(what) > 1
    # JAX has its own dtype of y.
    kinds = {
        (one.problem.norm, one.place, one.problem.x.dtype, str(one.residual), str(one.quantize))
        for one in drawn
        if one.framework != "JAX"
    }
    assert len(kinds) <= soak.KINDS


def test_every_way_at_every_place_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MOST_ELEMENTS", 1)
    monkeypatch.setattr(soak, "WIDTHS", (4,))
    drawn = [soak.draw(seed, ("NumPy",)) for seed in range(soak.KINDS)]
    quantized = [one.quantize for one in drawn if one.quantize]
    assert {how.told for how in quantized} == {how.told for how in soak.QUANTIZED}
    norms = {str(one.fused.fused) for one in drawn if one.fused}
    assert norms == {str(fused) for fused in soak.FUSED}
    for plain in (
        [one for one in drawn if not (one.residual or one.sums or one.quantize or one.fused)],
        [one for one in drawn if one.sums],
    ):
        assert {one.place for one in plain} == {*soak.PLACES}


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
    ticks = itertools.count()
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    found = soak.soak(checks(fails_at=12), 10.0, 10)
    # Four calls in the first half, and these again.
    assert (found["calls"], found["distinct"]) == ({"NumPy": 9}, 4)
    assert found["failed"] == [12, 12]
    assert found["worst"] == {"NumPy": 0.0}
    assert soak.main([str(path), "--seconds", "6", "--seed", "11"]) == 1
    assert json.loads(path.read_text(encoding="utf-8"))["failed"] == [12, 12]
    assert soak.main(["--seconds", "6", "--seed", "13"]) == 0


@pytest.mark.parametrize(
    "arguments", [("--seconds", "0"), ("--seconds", "nan"), ("--seed", "-1"), ("--only", "-3")]
)
def test_a_run_of_no_calls_is_refused(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        soak.main(arguments)
    assert f"{arguments[0]} must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("of_process", "grown"),
    [
        ((100, 140, 180), {"CuPy": 512, "process": 80 << 20}),
        ((100, 180, 180), {"CuPy": 512}),
        ((100, 90, 180), {"CuPy": 512}),
        ((100, 132, 164), {"CuPy": 512}),  # within the tolerance
    ],
)
def test_memory_that_grows_is_told(
    of_process: tuple[int, ...],
    grown: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = (
        {"CuPy": 256 * i, "device": i << 30, "process": nbytes << 20}
        for i, nbytes in enumerate(of_process)
    )
    monkeypatch.setattr(soak, "memory", lambda: next(held))
    found = soak.soak(checks(fails_at=-1), 0.5, 0)
    assert found["grown"] == grown
    assert "memory GREW: CuPy 0.0 MiB" in capsys.readouterr().out


def test_memory_of_the_process_and_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    before = soak.memory()
    if "process" not in before:
        pytest.skip("needs Linux")
    kept = np.ones(1 << 23)
    assert soak.memory()["process"] - before["process"] >= kept.nbytes / 2
    devices = [SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 3}) for _ in range(2)]
    jax = SimpleNamespace(local_devices=lambda: devices, clear_caches=lambda: None)
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert soak.memory()["JAX"] == 6


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


@pytest.mark.parametrize("way", ["fused", "quantize"])
def test_wrong_results_are_found(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MOST_ELEMENTS", 2**12)
    monkeypatch.setattr(soak, "REGIMES", ("normal",))
    monkeypatch.setattr(soak, "REGIMES_OF_FUSED", ("normal",))
    face = soak.face_of(soak.Caller(np, np.array, lambda result: result))
    wrong = dataclasses.replace(face, get=lambda array: -array)
    drawn = [soak.draw(seed, ("NumPy",)) for seed in range(100)]
    checked = [one for one in drawn if getattr(one, way) is not None]
    assert len(checked) > 5
    for one in checked:
        face.check(one)
        with pytest.raises(AssertionError, match=r"^(output 0|scale|q|residual_out)\["):
            wrong.check(one)
