"""What compute-sanitizer is to see: that the cases reach every kernel, and are right with NumPy."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import residuals
import sanitized
from host.build import compiler_problem
from host.gpu import Caller, Gpu
from sanitized import CASES, CLASSES, NAMES, RESIDUALS, TOOLS
from strategies import DTYPES

pytest.importorskip("cupy", exc_type=ImportError)  # plans are chosen for it


class Launches(Caller):
    """An H200 that launches nothing, in the form that a case takes."""

    def __init__(self, *, few_rows: bool) -> None:
        gpu = Gpu(None, multiprocessors=132, few_rows=few_rows)
        super().__init__(gpu)
        self.build, self.cupy, self.to_numpy = None, gpu.cupy, gpu.to_numpy
        self.fresh_memory, self.launched = gpu.fresh_memory, gpu.launched


@pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
def test_each_kernel_meets_each_class_of_dtypes_and_each_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = SimpleNamespace(check_forward=lambda *_, **__: None)
    nothing.check_backward = nothing.check_forward
    monkeypatch.setattr(residuals, "testing", nothing)
    monkeypatch.setattr(residuals, "assert_bits", lambda *_: None)
    classes, options = defaultdict(set), defaultdict(set)
    for one in CASES:
        gpu = Launches(few_rows=not one.many)
        with np.errstate(all="ignore"):  # no kernel has written what is added here
            one.check(gpu)
        for kernel in gpu.launched:
            case = one.case
            clustered = " by clusters" if kernel.cluster_blocks > 1 else ""
            classes[kernel.name + clustered].add((case.norm, case.x))
            options[kernel.name].add(case.name.split(", ")[-1])
    every = {(norm, x) for norm, names in CLASSES.items() for x in names}
    of_layer_norm = {of for of in every if of[0] == "layer_norm"}
    assert dict(classes) == {
        "norm_forward_in_registers": every,
        "norm_forward_in_registers by clusters": {
            *(("rms_norm", "float32"), ("layer_norm", "float32"), ("layer_norm", "float16"))
        },
        "norm_forward_pipelined": {("layer_norm", "float16")},
        "norm_forward_pipelined by clusters": every,
        "norm_forward_streaming by clusters": every,
        "norm_backward_in_registers": every,
        "norm_backward_in_registers by clusters": every,
        "norm_backward_in_registers_columns": of_layer_norm,
        "norm_backward_pipelined": every,
        "norm_backward_pipelined by clusters": every,
        "norm_backward_column_parallel": every,
        "norm_backward_coefficients by clusters": every,
        "norm_backward_columns": every,
        "reduce_partials": every,
    }
    never = {
        "norm_backward_in_registers_columns": {"without weight and bias", "in place"},
        "reduce_partials": {"without weight and bias"},
    }
    assert dict(options) == {name: {*NAMES} - never.get(name, set()) for name in options}


def numpy_caller() -> sanitized.Caller:
    return sanitized.Caller(np, np.array, lambda result: result)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_passes_and_a_wrong_result_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = [one for one in CASES if one.case.name.endswith(f", {name}")][:1]
    monkeypatch.setattr(sanitized, "CASES", smallest)
    assert (smallest[0].residual is None) == (name not in RESIDUALS)
    sanitized.run(numpy_caller(), threads=2, says=True)

    class Wrong(sanitized.Caller):
        def backward(self, *arguments: Any, **options: Any) -> Any:
            result = super().backward(*arguments, **options)
            result.dx[-1, -1] += 1
            return result

    with pytest.raises(AssertionError, match=r"dx\[\d+, \d+\] is"):
        sanitized.run(Wrong(np, np.array, lambda result: result), threads=2, says=False)


def test_each_tool_runs_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def fake(command: tuple[str, ...], env: dict[str, str]) -> Any:
        commands.append(command)
        assert env["CUPYNORM_BACKGROUND"] == "0"
        return SimpleNamespace(returncode=int("racecheck" in command))

    monkeypatch.setattr(sanitized, "gpu_problem", lambda: None)
    monkeypatch.setattr(subprocess, "run", fake)
    assert sanitized.main([]) == 1
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines()[1:]] == ["alone", *TOOLS]
    assert said.count("passed") == 4
    assert "racecheck: FAILED with 1" in said
    assert commands[0][1:] == (sanitized.__file__, "--run", "alone")
    assert commands[1][: len(sanitized.COMMAND)] == sanitized.COMMAND
    assert sanitized.main(["memcheck"]) == 0
    assert len(commands) == 1 + len(TOOLS) + 2
    with pytest.raises(SystemExit):
        sanitized.main(["memchek"])
    assert "tools: must be of memcheck, racecheck" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "gpu_problem", lambda: "a test hides it")
    assert sanitized.main([]) == 1
    assert "There is nothing to run: a test hides it." in capsys.readouterr().out


def test_a_norm_has_all_dtypes_of_32_and_64_bits() -> None:
    assert {x for names in CLASSES.values() for x in names} == {*DTYPES}
