"""benchmarks.faces: the host time of torch's and JAX's calls. Here it runs a call or two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", minversion="2.11")
pytest.importorskip("jax", minversion="0.10.2")

from benchmarks import faces, results

ROOT = Path(__file__).parent.parent


def test_the_ratio_is_of_the_rounds() -> None:
    taken = {"torch": [10.0, 20.0, 40.0], "cupynorm": [10.0, 30.0, 30.0], "quack": [7.0, 9.0, 8.0]}
    assert faces.row("forward", taken) == "| forward | 20.0 | 30.0 | 1.00 | quack 8.0 |"
    assert faces.row("forward", {"torch": [1.0]}) == "| forward | 1.0 |  |  |  |"


def test_calls_take_turns_after_a_round_that_does_not_count() -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "ab"}
    taken = faces.microseconds(calls, 2, 3, lambda: made.append("wait"))
    assert [*map(len, taken.values())] == [2, 2]
    a, b = (["wait", *3 * name, "wait"] for name in "ab")
    assert made == a + b + b + a + a + b


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kept.json", (), "kept.json exists: name another file"),
        ("new.json", ("--rounds", "0"), "--rounds and --calls must be at least 1"),
        ("new.json", ("--calls", "0"), "--rounds and --calls must be at least 1"),
    ],
)
def test_nothing_is_timed_for_nothing_or_in_the_place_of_a_file(
    name: str,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("kept", encoding="utf-8")
    with pytest.raises(SystemExit):
        faces.main([str(tmp_path / name), *options])
    assert message in capsys.readouterr().err
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["kept"]


def test_every_call_is_timed_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faces", str(path), "--rounds", "1", "--calls", "1"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not timed" not in done.stderr
    measured = results.read(path, "a report")["measurements"]
    assert len(measured) == 2 * (3 * 3) + 2 * (3 * 3)
    for record in measured:
        framework = record["what"].split()[0]
        assert set(record["microseconds"]) == {framework, "cupynorm"}
        assert all(times[0] > 0 for times in record["microseconds"].values())
        assert record["what"] in done.stdout
