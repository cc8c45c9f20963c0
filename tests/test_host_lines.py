"""The cases on the host reach the lines of the kernels, as gcov counts them in its own build."""

from __future__ import annotations

from pathlib import Path

import pytest
from fused_gpu import FUSED, check_fused_call
from host.build import Build, compiler_problem
from host.checks import (
    CASES,
    FEW,
    OVERFLOWING,
    SUMS,
    Case,
    check_case,
    check_overflows,
    check_sums_of,
    kernels_of,
)
from host.coverage import coverage
from host.gpu import Caller, Gpu
from host.pipelined import PIPELINED
from quantized_gpu import QUANTIZED, check_each_number, check_quantized_kernel, on_host
from residuals import check_residual, with_residual
from strategies import OVERFLOWS, Layout
from test_groups import CALLS, check_values
from thorough import THOROUGH

pytestmark = [
    pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem())),
    pytest.mark.skipif(
        not THOROUGH, reason="builds all kernels again to count lines: CUPYNORM_THOROUGH=1 does so"
    ),
]

# What the other calls reach, these reach too.
REACHING = (
    *("channels out of range", "groups by single columns", "groups of channels"),
    *("pipelined, by index", "repeats alone", "several axes"),
    *("rows of all groups by clusters", "rows of all groups out of range"),
    *("streamed, ", "streamed by packs"),
)


def test_the_cases_reach_the_lines_of_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # They reach 98% of the statements. All cases reach 99.9%, in many times the time.
    cases, few, pipelined = CASES[::5], FEW[::4], PIPELINED[::3]
    calls = [call for call in CALLS if str(call).startswith(REACHING)]
    assert len(calls) == len(REACHING)
    build = Build(counts=tmp_path)
    pipelined_kernels = (one.kernel() for one in pipelined)
    build.compile([*kernels_of(cases), *kernels_of(few, few_rows=True), *pipelined_kernels])
    for case in cases:
        check_case(build, case)
    for case in few:
        check_case(build, case, few_rows=True)
    for one in pipelined:
        one.check(build)
    # Rows of strips that are computed again.
    strips = OVERFLOWING["cluster_tiles, rms_norm"]
    check_overflows(build, strips, few_rows=False, factors=OVERFLOWS[:1])
    for n, norm, sm, residual, regime in (
        (1000, "layer_norm", 90, "bfloat16", "normal"),
        (1001, "rms_norm", 90, "float32", "normal"),
        (20000, "layer_norm", 90, "float32", "extreme"),
        (20001, "layer_norm", 90, "float32", "odd_start"),
        (20004, "layer_norm", 75, "float32", "normal"),
    ):
        problem = Case("residual", norm, 3, n, regime=regime).problem()
        gpu = Gpu(build, architecture=sm)
        with gpu.fresh_memory():
            drawn = with_residual(problem, residual, residual, layout=Layout())
            check_residual(Caller(gpu), drawn)
    for call in calls:
        check_values(build, call, few_rows=False)
    for of in SUMS[:3]:
        check_sums_of(build, of)
    for name in FUSED:
        check_fused_call(build, name)
    for name in QUANTIZED:
        check_quantized_kernel(Gpu(build), name)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        check_each_number(on_host(Gpu(build)), dtype, "boundaries")
    total, missed = coverage(build)
    with capsys.disabled():
        share = 100 * (1 - len(missed) / total)
        print(f"\nkernels/: {share:.1f}% of {total} statements run on the host", *missed, sep="\n")
    assert len(missed) <= 0.02 * total, "\n".join(missed)
