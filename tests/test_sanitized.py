"""What compute-sanitizer is to see: that the cases reach every kernel, and are right with NumPy."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sanitized
from fused_gpu import on_host, passes
from host.build import compiler_problem
from host.checks import Case
from host.gpu import Caller, Gpu, launched
from sanitized import (
    AXES,
    CALLS_OF_FUSED,
    CASES,
    CLASSES,
    GROUPS,
    NAMES,
    RESIDUALS,
    SUMS,
    TOOLS,
    OfFused,
    Sanitized,
)
from strategies import DTYPES, Layout

from cupynorm._compile import Instantiation, kernels_directory
from cupynorm._layout import pack_length

pytest.importorskip("cupy", exc_type=ImportError)  # plans are chosen for it

MULTIPROCESSORS = 132  # of an H200


class Launches(Caller):
    """A GPU that launches nothing, in the form that a case takes."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.build, self.cupy, self.to_numpy = None, gpu.cupy, gpu.to_numpy
        self.fresh_memory, self.quantized = gpu.fresh_memory, gpu.quantized


def launched_by(one: Any) -> list[Instantiation]:
    """Return the kernels that a case launches on an H200."""

    def run(gpu: Gpu) -> None:
        if not isinstance(one, OfFused):
            one.check(Launches(gpu))
            return
        call = CALLS_OF_FUSED[one.name]
        call.fused.prepared.clear()
        with on_host(gpu, MULTIPROCESSORS):
            passes(call, gpu.memory.array, gpu.to_numpy)
        call.fused.prepared.clear()  # these calls launch nothing

    return launched(run, multiprocessors=MULTIPROCESSORS, few_rows=not one.many)


@pytest.fixture(scope="module")
def launches() -> list[tuple[Any, list[Instantiation]]]:
    """Return each case, and what it launches."""
    if compiler_problem() is not None:
        pytest.skip(str(compiler_problem()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanitized.testing, "check_quantized", lambda *_, **__: None)
        return [(one, launched_by(one)) for one in CASES]


def kernels_by_file() -> dict[str, set[str]]:
    """Return the names of all kernels, by the name of their file."""
    kernels = {}
    for path in kernels_directory().glob("*.cu"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(r"__global__[^{;]*?(\w+)\(\s*const __grid_constant__", text)
        assert len(found) == text.count("__global__"), path
        kernels[path.name] = {*found}
    return kernels


def test_all_kernels_are_found() -> None:
    assert kernels_by_file()["backward_streaming.cu"] == {
        *("norm_backward_coefficients", "norm_backward_columns")
    }
    assert all(kernels_by_file().values())


def test_each_kernel_is_launched(launches: Any) -> None:
    names = {kernel.name for _, found in launches for kernel in found}
    assert names == set().union(*kernels_by_file().values())


def test_each_kernel_meets_each_class_of_dtypes_and_each_option(launches: Any) -> None:
    classes, of_groups, options = defaultdict(set), defaultdict(set), defaultdict(set)
    for one, found in launches:
        if not isinstance(one, Sanitized):
            continue
        for kernel in found:
            name = f"{kernel.name} by clusters" if kernel.cluster_blocks > 1 else kernel.name
            by_name = of_groups if dict(kernel.op)["kGrouped"] else classes
            by_name[name].add((one.case.norm, one.case.x))
            if isinstance(one.case, Case):
                options[kernel.name].add(one.option)
    # One kernel serves groups alone.
    classes = of_groups | classes
    every = {(norm, x) for norm, names in CLASSES.items() for x in names}
    of_layer_norm = {of for of in every if of[0] == "layer_norm"}
    fewer = {
        "norm_forward_in_registers by clusters": {
            *(("rms_norm", "float32"), ("layer_norm", "float32"), ("layer_norm", "float16"))
        },
        "norm_forward_pipelined": {("layer_norm", "float16")},
        "norm_backward_in_registers_columns": of_layer_norm,
    }
    assert classes == {name: fewer.get(name, every) for name in classes}
    assert {name for name in classes if "clusters" in name} == {
        f"norm_{name} by clusters"
        for name in (
            *("forward_in_registers", "forward_pipelined", "forward_streaming"),
            *("backward_in_registers", "backward_pipelined", "backward_coefficients"),
        )
    }
    never = {
        "norm_backward_in_registers_columns": {"without weight and bias", "in place"},
        "reduce_partials": {"without weight and bias"},
    }
    every_option = {*NAMES, SUMS}
    assert dict(options) == {name: every_option - never.get(name, set()) for name in options}


def test_each_kernel_of_groups_meets_each_kind_of_vectors(launches: Any) -> None:
    """Elements of a vector serve one column, fewer than a pack has, or whole packs."""
    met = defaultdict(set)
    for one, found in launches:
        if one.option == GROUPS:
            for kernel in found:
                columns, pack = dict(kernel.op)["kRepeats"], pack_length(one.case.x)
                kind = "one column" if columns == 0 else "packs" if columns >= pack else "columns"
                met[kernel.name].add(kind)
    every = {"one column", "columns", "packs"}
    alone = {"reduce_partials": {"one column"}, "reduce_repeats": {"columns", "packs"}}
    # These find their group, or a group's partials.
    of_groups = re.compile(r"of_group<|sum_of_partials<")
    files = {
        p.name
        for p in kernels_directory().glob("*.cu")
        if of_groups.search(p.read_text(encoding="utf-8"))
    }
    names = set().union(*(kernels_by_file()[name] for name in files))
    assert met == {name: alone.get(name, every) for name in names}


def numpy_caller() -> sanitized.Caller:
    return sanitized.Caller(np, np.array, lambda result: result)


@pytest.mark.parametrize("name", [*NAMES, SUMS, GROUPS, AXES])
def test_the_reference_passes_and_a_wrong_result_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = [one for one in CASES if isinstance(one, Sanitized) and one.option == name][:1]
    monkeypatch.setattr(sanitized, "CASES", smallest)
    assert (smallest[0].residual is None) == (name not in RESIDUALS)
    assert sanitized.run(numpy_caller(), threads=2, says=True) == 1

    class Wrong(sanitized.Caller):
        def backward(self, *arguments: Any, **options: Any) -> Any:
            result = super().backward(*arguments, **options)
            result.dx[(-1,) * result.dx.ndim] += 1
            return result

    with pytest.raises(AssertionError, match=r"dx\[\d+(, \d+)+\] is"):
        sanitized.run(Wrong(np, np.array, lambda result: result), threads=2, says=False)


def test_the_reference_passes_for_norms_of_fuse_and_quantized_norms() -> None:
    for one in CASES:
        if not isinstance(one, Sanitized):
            one.check(numpy_caller())


def test_one_kernel_serves_each_quantized_norm(launches: Any) -> None:
    row_threads = []
    for one, found in launches:
        if one.option != "quantized":
            continue
        (kernel,) = found
        assert (kernel.name, kernel.cluster_blocks) == ("norm_forward_in_registers", 1)
        row_threads.append(dict(kernel.layout)["kRowThreads"])
    # A part of a warp, a warp and several warps share a row.
    assert min(row_threads) < 32 < max(row_threads)
    assert 32 in row_threads


def test_a_wrong_scale_does_not_pass() -> None:
    class Wrong(sanitized.Caller):
        def quantized(self, *arguments: Any, **options: Any) -> Any:
            q, scale, *totals = super().quantized(*arguments, **options)
            return (q, 1.01 * scale, *totals)

    with pytest.raises(AssertionError, match=r"^scale\[\d+, 0\] is"):
        sanitized.QUANTIZED[0].check(Wrong(np, np.array, lambda result: result))


def test_no_case_begins_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [one for one in CASES if isinstance(one, Sanitized)]
    few, many = ([one for one in cases if one.many == of][:2] for of in (False, True))
    monkeypatch.setattr(sanitized, "CASES", few + many)
    now, checked = 0.0, []

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    def check(one: Any, caller: Any) -> None:
        nonlocal now
        now += 7.0
        checked.append(one)

    monkeypatch.setattr(sanitized, "time", Clock)
    monkeypatch.setattr(sanitized.Sanitized, "check", check)
    # By then few rows have had their share, and many have the rest.
    assert sanitized.run(numpy_caller(), threads=1, says=False, seconds=12.0) == 2
    assert checked == [few[0], many[0]]


def test_the_first_cases_meet_all_kinds_of_rows_norms_and_dtypes() -> None:
    count = len(sanitized.ROWS) * len(CLASSES)
    of_rows = (one for one in CASES if isinstance(one, Sanitized) and isinstance(one.case, Case))
    first = [*of_rows][:count]
    assert len(first) == count
    assert len({(one.case.name.rpartition(", ")[0], one.case.norm) for one in first}) == len(first)
    assert {(one.case.norm, one.case.x) for one in first} == {
        (norm, x) for norm, names in CLASSES.items() for x in names
    }


def test_each_tool_runs_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def fake(command: tuple[str, ...], env: dict[str, str], **_: Any) -> Any:
        commands.append(command)
        assert env["CUPYNORM_BACKGROUND"] == "0"
        fails = "racecheck" in command
        said = "a race\n" if fails else "a case\ncases that ran: 7\n"
        return SimpleNamespace(returncode=int(fails), stdout=said)

    monkeypatch.setattr(sanitized, "gpu_problem", lambda: None)
    monkeypatch.setattr(subprocess, "run", fake)
    assert sanitized.main([]) == 1
    said = capsys.readouterr().out
    lines = said.splitlines()
    after = lines.index("a race")  # what the run that failed said, below its line
    assert lines[after - 1].startswith(f"racecheck: FAILED with 1, not all of {len(CASES)} cases, ")
    told = [line for line in lines if line not in ("", "a race")]
    assert [line.split(":")[0] for line in told] == ["alone", *TOOLS]
    assert said.count(f": passed, 7 of {len(CASES)} cases, ") == 4
    assert commands[0][1:] == (sanitized.__file__, "--run", "alone", "--seconds", "inf")
    assert commands[1][: len(sanitized.COMMAND)] == sanitized.COMMAND
    assert sanitized.main(["memcheck", "--seconds", "50"]) == 0
    assert commands[-1][-2:] == ("--seconds", "50.0")
    assert len(commands) == 1 + len(TOOLS) + 2
    with pytest.raises(SystemExit):
        sanitized.main(["memchek"])
    assert "tools: must be of memcheck, racecheck" in capsys.readouterr().err


# As racecheck of CUDA 13.0 says it.
SAID = """\
========= COMPUTE-SANITIZER
strips, plain-layer_norm-float16-3x262144
========= Error: Race reported between Read access at void norm_backward_column_parallel<Op, \
Layout>(BackwardColumnParallelArguments<T1>)+0x8140
=========     and Write access at void norm_backward_column_parallel<Op, \
Layout>(BackwardColumnParallelArguments<T1>)+0xb9b0 [512 hazards]
=========
clusters, many, wide residual-rms_norm-float32-128x16384
========= Error: Race reported between Write access at void norm_forward_pipelined<Op, \
Layout>(ForwardPipelinedArguments<T1>)+0x3ca0
=========     and Read access at void norm_forward_pipelined<Op, \
Layout>(ForwardPipelinedArguments<T1>)+0x1140 [7440 hazards]
=========     and Read access at void norm_forward_pipelined<Op, \
Layout>(ForwardPipelinedArguments<T1>)+0x3d40 [496 hazards]
=========
cases that ran: 17
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("norm_forward_pipelined", "norm_forward_streaming"),
        ("Error: Race", "Warning: Race"),
        ("2 hazards", "3 hazards"),
        ("cases that ran: 17", "Traceback"),
        ("Error: Race reported", "Something"),
    ],
)
def test_reports_of_what_a_tool_does_not_follow_do_not_count(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = SAID.replace(old, new)

    def fake(command: tuple[str, ...], **_: Any) -> Any:
        if "racecheck" not in command:
            return SimpleNamespace(returncode=0, stdout="cases that ran: 17\n")
        assert "--print-limit" in command
        return SimpleNamespace(returncode=1, stdout=said)

    monkeypatch.setattr(sanitized, "gpu_problem", lambda: None)
    monkeypatch.setattr(subprocess, "run", fake)
    passes = old == new
    assert sanitized.main(["racecheck"]) == (not passes)
    shown = capsys.readouterr().out
    assert ("racecheck: passed, 17 of " in shown) == passes
    assert ("does not count: norm_forward_pipelined, reports: 1. Sums of warps" in shown) == passes
    assert (said in shown) != passes
    assert sanitized.unfollowed("memcheck", SAID) is None


def test_kernels_that_a_tool_does_not_follow_are_there() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in kernels_directory().glob("*.cu"))
    for tool, kernel in sanitized.UNFOLLOWED:
        assert tool in TOOLS
        assert f" {kernel}(" in sources


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 3)])
def test_the_memory_of_an_input_ends_with_whole_pieces_of_16_bytes(
    shape: tuple[int, ...], dtype: str
) -> None:
    allocated = []

    class Module:
        lib = np.lib

        @staticmethod
        def asarray(base: np.ndarray) -> np.ndarray:
            allocated.append(base)
            return base

    values = np.ones(shape, dtype)
    array = Layout(offset=1, gap=1).apply(Module, values)
    (base,) = allocated
    assert base.nbytes % 16 == 0
    # A copy of the row's last bytes may be one of 16, and no other memory is there.
    last = array.ctypes.data + sum((n - 1) * s for n, s in zip(shape, array.strides, strict=True))
    assert 0 < base.ctypes.data + base.nbytes - last <= 16
    np.testing.assert_array_equal(array, values)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitized, "gpu_problem", lambda: "a test hides it")
    assert sanitized.main([]) == 1
    assert "There is nothing to run: a test hides it." in capsys.readouterr().out


def test_a_norm_has_all_dtypes_of_32_and_64_bits() -> None:
    assert {x for names in CLASSES.values() for x in names} == {*DTYPES}
