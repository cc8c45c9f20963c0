"""Stand-ins for a GPU's clock and for a library, in the tests of the benchmark."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from benchmarks import problems, report, results
from benchmarks.backends.base import Backend, Call, Replay
from benchmarks.timing import Timing
from cupynorm import reference, testing
from cupynorm._bench import EPS, Problem

ROOT = Path(__file__).parent.parent
README = ROOT / "benchmarks" / "README.md"
SYNTHETIC = Path(__file__).parent / "data" / "synthetic_results.json"


def reference_outputs(problem: Problem, arrays: dict) -> tuple[dict, dict]:
    """Return the outputs of the reference and their ratios by `cupynorm.testing`."""
    eps, weight, bias = EPS[problem.norm], arrays["weight"], arrays.get("bias")
    forward = getattr(reference, f"{problem.norm}_forward")(arrays["x"], weight, bias, eps=eps)
    if problem.direction == "forward":
        ratios = testing.check_forward(problem.norm, forward.y, arrays["x"], weight, bias, eps=eps)
        return {"y": forward.y}, ratios
    statistics = (forward.mean, forward.rstd)
    given = statistics if problem.norm == "layer_norm" else (forward.rstd,)
    backward = getattr(reference, f"{problem.norm}_backward")(
        arrays["dy"], arrays["x"], weight, *given, bias=problem.has_bias
    )
    ratios = testing.check_backward(
        problem.norm, backward, arrays["dy"], arrays["x"], weight, *statistics,
        bias=problem.has_bias,
    )  # fmt: skip
    return {name: getattr(backward, name) for name in problem.outputs}, ratios


SMALL = [
    Problem(norm, direction, 33, 48, *pair)
    for norm, direction, pair in itertools.product(
        ("rms_norm", "layer_norm"), ("forward", "backward"), problems.PAIRS
    )
]


class FakeClock:
    cache_bytes = 0

    def measure(self, calls, resets=()) -> Timing:
        return Timing(2e-6, 1e-6, 3e-6, 3)


class FakeBackend(Backend):
    """cupynorm's reference on NumPy arrays, with a fault if wanted."""

    name = "quack"
    modules = ("numpy",)
    distribution = "numpy"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def prepare(self, problem, inputs) -> Call:
        if self.fault == "refuses":
            raise RuntimeError("no such\n  width")
        outputs, _ = reference_outputs(problem, inputs)
        if self.fault == "wrong":
            outputs[problem.outputs[0]][0, 0] += 1000
        return Call(lambda: tuple(outputs.values()), note="noted")

    def capture(self, problem, inputs) -> Replay:
        if self.fault == "not captured":
            raise RuntimeError("no graph")
        outputs = self.prepare(problem, inputs).run()
        if self.fault == "wrong replay":
            outputs[0][...] = np.nan
        elif self.fault == "other bits":  # as if the sums had another order
            outputs[0][0, 0] = np.nextafter(outputs[0][0, 0], outputs[0].dtype.type(np.inf))
        return Replay(lambda: None, outputs)

    def collect(self, outputs, xp) -> list:
        return list(outputs)

    def poison(self, problem, inputs) -> None: ...
    def synchronize(self) -> None: ...
    def release(self) -> None: ...


def check_table(of: str, problem: Any, times: dict[str, float], row: str, folder: Path) -> None:
    """Check a row of the table that the report makes of a file of one problem's times."""
    source, readme = folder / f"{of}.json", folder / "README.md"
    found = results.load(SYNTHETIC)
    found["measurements"] = [
        {
            **dataclasses.asdict(problem), "backend": name, "status": "ok",
            "times": {"call": {"median": time, "low": time, "high": time, "runs": 3}},
        }
        for name, time in times.items()
    ]  # fmt: skip
    results.save(found, source)
    readme.write_text("before\n{}\n{}\nafter\n".format(*report.markers(of)))
    report.main([f"--{of}", str(source), "--readme", str(readme)])
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert row in text
    with pytest.raises(SystemExit):
        report.main([f"--{of}", str(SYNTHETIC)])


def without_compiler(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out torch.compile, which takes seconds for each problem."""
    others = [backend for backend in benchmark.BACKENDS if backend.name != "torch.compile"]
    less = dataclasses.replace(benchmark.BENCHMARK, backends=others)
    monkeypatch.setattr(benchmark, "BENCHMARK", less)
