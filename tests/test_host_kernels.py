"""Every regime of every kernel, run on the host: values, and what a GPU would hide.

host/runtime.cpp finds accesses out of bounds, reads of what nothing wrote, races, and barriers that
not all threads reach. Such a finding fails the test with the kernel, block, thread and line.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from host.build import Build, compiler_problem
from host.checks import (
    ADDRESSES,
    CASES,
    FAR_ROWS,
    FEW,
    NORMS,
    OVERFLOWING,
    SHORT_ROWS,
    SUMS,
    Case,
    OfSums,
    check_addresses,
    check_case,
    check_clip_values,
    check_far_rows,
    check_neighbours,
    check_overflows,
    check_problem,
    check_subnormal_rstd,
    check_sums_of,
    kernels_of,
    may_overflow,
    moved,
)
from host.gpu import Caller, Gpu, launched
from host.pipelined import PIPELINED, Pipelined
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from residuals import (
    RESIDUAL_WIDTHS,
    WithResidual,
    assert_bits,
    check_residual,
    residual_problems,
    with_residual,
)
from strategies import DTYPES, OVERFLOWS, Layout, Problem, make_values, problems
from sums import WIDTHS, WithSums, check_sums, problems_with_sums
from thorough import THOROUGH, by_turns, examples, of_each_name, one_in

from cupynorm._compile import Instantiation

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

# The norms take turns. Of the cases of one name, every third runs, so that dtypes take turns too.
# Tests of mutations and of lines choose among all cases.
IN_TURN = of_each_name(by_turns(CASES))
COLUMNS = [case for case in FEW if case.name.startswith("columns")]  # both norms decide their lanes
FEW_IN_TURN = [*of_each_name(by_turns(case for case in FEW if case not in COLUMNS)), *COLUMNS]
PIPELINED_IN_TURN = by_turns(PIPELINED)[:: one_in(3)]
ADDRESSES_IN_TURN = by_turns(ADDRESSES)

# The cases of these names that run anyway, if their products overflow.
OF_NAMES = OVERFLOWING | {case.name: case for case in IN_TURN if may_overflow(case)}
# Names alternate between many rows and few. Names that were chosen for their backward kernels have
# both norms, and both numbers of rows unless the kernels are the same. The strips of RMSNorm, which
# take long, are a part of LayerNorm's.
NAMES = [name for name in OVERFLOWING if f"{name}, layer_norm" not in OVERFLOWING]
IN_TURN_OVERFLOWING = [
    (name, i % 2 == 0) for i, name in enumerate([n for n in NAMES if ", " not in n][:: one_in(4)])
]
IN_TURN_OVERFLOWING += [
    (name, few_rows)
    for name in NAMES
    if ", " in name and (THOROUGH or name != "cluster_tiles, rms_norm")
    for few_rows in (False, True)
    if not (few_rows and name.startswith(("stream, ", "cluster_tiles, ")))
]


@pytest.fixture(scope="module")
def kernels() -> list[Instantiation]:
    return [*kernels_of(IN_TURN), *kernels_of(FEW_IN_TURN, few_rows=True)]


@pytest.fixture(scope="module")
def build(kernels: list[Instantiation]) -> Build:
    build = Build()
    # This includes kernels that single tests launch. Compiling them together is faster.
    others = [
        kernels_of([OF_NAMES[name]], few_rows=few_rows) for name, few_rows in IN_TURN_OVERFLOWING
    ]
    others += [kernels_of(moved(case)) for case in ADDRESSES_IN_TURN]
    build.compile([*kernels, *kernels_of(FEW_IN_TURN), *itertools.chain(*others)])
    return build


@settings(max_examples=examples(4, of=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=residual_problems(RESIDUAL_WIDTHS), few_rows=st.booleans())
def test_any_residual(drawn: WithResidual, few_rows: bool) -> None:
    build = Build()
    build.compile(launched(lambda gpu: check_residual(Caller(gpu), drawn), few_rows=few_rows))
    gpu = Gpu(build, few_rows=few_rows)
    with gpu.fresh_memory():
        check_residual(Caller(gpu), drawn)


def test_a_lone_row_of_a_cluster_in_place() -> None:
    """A block loads the beginning of a next row. If there is none, another writes y over it."""
    operands = {"x": "float64", "weight": None, "bias": None, "wants_dbias": False}
    problem = Case("lone", "layer_norm", 1, 4097, **operands).problem()
    drawn = with_residual(problem, "float64", "float64", layout=Layout())
    gpu = Gpu(Build())
    with gpu.fresh_memory():
        check_residual(Caller(gpu), drawn)
    assert any(k.name == "norm_forward_pipelined" for k in gpu.launched if k.cluster_blocks == 2)


@settings(max_examples=examples(2, of=40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=problems_with_sums(WIDTHS), few_rows=st.booleans(), architecture=st.sampled_from([75, 90])
)
def test_any_given_sums(drawn: WithSums, few_rows: bool, architecture: int) -> None:
    build, of_gpu = Build(), {"architecture": architecture, "few_rows": few_rows}
    build.compile(launched(lambda gpu: check_sums(Caller(gpu), drawn), **of_gpu))
    gpu = Gpu(build, **of_gpu)
    with gpu.fresh_memory():
        check_sums(Caller(gpu), drawn)


@pytest.mark.parametrize("of", SUMS, ids=str)
def test_sums_in_given_arrays_by_each_kernel_that_writes_them(of: OfSums) -> None:
    gpu = check_sums_of(Build(), of)
    writers = {kernel.name for kernel in gpu.launched if ("kAccumulates", True) in kernel.op}
    assert writers == {of.kernel}


@pytest.mark.parametrize(
    ("norm", "n", "architecture", "residual"),
    [
        (*of, residual)
        for i, of in enumerate(
            (
                *(("layer_norm", 40, 90), ("rms_norm", 1001, 90), ("layer_norm", 4096, 90)),
                *(("rms_norm", 20000, 90), ("layer_norm", 20004, 75)),
            )
        )
        for residual in ("float32", "bfloat16")[i % one_in(2) :: one_in(2)]
    ],
)
def test_a_row_with_a_residual_has_the_same_bits_in_any_batch(
    norm: str, n: int, architecture: int, residual: str
) -> None:
    """Two runs give the same bits too, sums over rows included. Few rows have their own kernels."""
    x, dy = (make_values("mean_1e2", (19, n), DTYPES["bfloat16"], seed) for seed in (1, 2))
    to_add, of_total = (make_values("normal", (19, n), DTYPES[residual], seed) for seed in (3, 4))
    weight = make_values("normal", (n,), DTYPES["float32"], 5)
    everything, build = slice(None), Build()

    def launch(gpu: Gpu, where: slice = everything) -> dict[str, Any]:
        put = gpu.memory.array
        forward = gpu.forward(
            *(norm, put(x[where]), put(weight)), residual=put(to_add[where]), eps=1e-5
        )
        backward = gpu.backward(
            *(norm, put(dy[where]), forward.residual_out, put(weight)),
            *(forward.mean, forward.rstd),
            bias=True,
            dresidual_out=put(of_total[where]),
            dx_dtype=x.dtype,
            dresidual_dtype=to_add.dtype,
        )
        return gpu.to_numpy(forward)._asdict() | gpu.to_numpy(backward)._asdict()

    def run(where: slice, few_rows: bool) -> dict[str, Any]:
        gpu = Gpu(build, architecture=architecture, few_rows=few_rows)
        with gpu.fresh_memory():
            return launch(gpu, where)

    parts, kernels = (slice(7, 8), slice(3, 9)), []
    for where, few_rows in ((everything, False), *((part, True) for part in parts)):
        of_gpu = {"architecture": architecture, "few_rows": few_rows}
        kernels += launched(functools.partial(launch, where=where), **of_gpu)
    build.compile(kernels)
    whole, again = run(everything, False), run(everything, False)
    for name, array in whole.items():
        assert_bits(again[name], array, f"{name} again")
    for where in parts:
        for few_rows in (False, True):
            for name, array in run(where, few_rows).items():
                if name not in ("dweight", "dbias"):
                    assert_bits(array, None if whole[name] is None else whole[name][where], name)


@pytest.mark.parametrize("case", IN_TURN, ids=str)
def test_case(build: Build, case: Case) -> None:
    check_case(build, case)


@pytest.mark.parametrize("case", [c for c in IN_TURN if c.m * c.n < 50_000][::7], ids=str)
def test_a_call_made_again(build: Build, case: Case) -> None:
    gpu = case.gpu(build)
    check_problem(gpu, case.problem())
    once = gpu.launched.copy()
    gpu.repeats = True
    gpu.launched.clear()
    check_problem(gpu, case.problem())
    if case.offset == case.weight_offset == 0:
        assert len(gpu.launched) == 2 * len(once)


@pytest.fixture(scope="module")
def pipelined_build() -> Build:
    build = Build()
    build.compile(pipelined.kernel() for pipelined in PIPELINED_IN_TURN)
    return build


@pytest.mark.parametrize("pipelined", PIPELINED_IN_TURN, ids=str)
def test_pipelined_kernel(pipelined_build: Build, pipelined: Pipelined) -> None:
    pipelined.check(pipelined_build)


@pytest.fixture(scope="module")
def build_without_policies() -> Build:
    # As before sm_90.
    build = Build({"stage.cuh": (("kCopiesTakePolicies && ", "false && "),)})
    build.compile(pipelined.kernel() for pipelined in PIPELINED_IN_TURN[::8])
    return build


@pytest.mark.parametrize("pipelined", PIPELINED_IN_TURN[::8], ids=str)
def test_pipelined_kernel_whose_copies_take_no_policy(
    build_without_policies: Build, pipelined: Pipelined
) -> None:
    pipelined.check(build_without_policies)


@settings(max_examples=examples(3, of=40), suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_any_problem(build: Build, problem: Problem) -> None:
    gpu = Gpu(None)
    check_problem(gpu, problem)
    build.compile(gpu.launched)
    check_problem(Gpu(build), problem)


@pytest.mark.parametrize(
    ("n", "x"),
    [
        (n, x)
        for i, n in enumerate((1, 3, 8, 12, 83, 1001, 12290))
        for x in list(DTYPES)[i % (2 * one_in(2)) :: 2 * one_in(2)]
    ],
)
def test_a_value_on_a_bound_is_not_inside(build: Build, x: str, n: int) -> None:
    check_clip_values(Gpu(build), x, n)


@pytest.mark.parametrize("n", SHORT_ROWS)
@pytest.mark.parametrize("x", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_keeps_its_bits_beside_rows_out_of_range(
    build: Build, norm: str, x: str, n: int
) -> None:
    check_neighbours(Gpu(build), norm, x, n)


@pytest.mark.parametrize(
    ("name", "few_rows", "factors"),
    [
        (*of, OVERFLOWS[i % one_in(len(OVERFLOWS)) :: one_in(len(OVERFLOWS))])
        for i, of in enumerate(IN_TURN_OVERFLOWING)
    ],
)
def test_products_may_overflow_on_the_way_to_dx(
    build: Build, name: str, few_rows: bool, factors: Any
) -> None:
    check_overflows(build, OF_NAMES[name], few_rows=few_rows, factors=factors)


@pytest.mark.parametrize("case", ADDRESSES_IN_TURN, ids=str)
def test_a_row_has_the_same_bits_at_any_address(build: Build, case: Case) -> None:
    check_addresses(build, case)


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("n", [300, 4100])
def test_gradients_of_rows_whose_rstd_is_subnormal(build: Build, n: int, few_rows: bool) -> None:
    check_subnormal_rstd(Gpu(build, few_rows=few_rows), n)


@pytest.mark.parametrize(("n", "architecture"), FAR_ROWS)
def test_rows_more_than_2_to_the_31_elements_apart(build: Build, n: int, architecture: int) -> None:
    check_far_rows(Gpu(build, architecture=architecture), n)


@pytest.mark.parametrize("name", ["cluster", "pipelined_cluster"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_gpu_without_room_for_a_cluster(build: Build, norm: str, name: str) -> None:
    case = next(case for case in CASES if (case.name, case.norm) == (name, norm))
    with_clusters, without = case.gpu(None), case.gpu(None)
    without.clusters_at_once = 0
    for gpu in (with_clusters, without):
        check_problem(gpu, case.problem())
    assert any(kernel.cluster_blocks > 1 for kernel in with_clusters.launched)
    assert all(kernel.cluster_blocks == 1 for kernel in without.launched)
    build.compile(without.launched)
    gpu = case.gpu(build)
    gpu.clusters_at_once = 0
    check_problem(gpu, case.problem())


def test_a_gpu_without_room_for_the_cluster_of_few_rows() -> None:
    case = next(case for case in FEW if case.name == "few_split")
    with_clusters, without = (case.gpu(None, few_rows=True) for _ in range(2))
    without.clusters_at_once = 0
    for gpu, blocks in ((with_clusters, 4), (without, 1)):
        check_problem(gpu, case.problem())
        of_forward = [k.cluster_blocks for k in gpu.launched if k.file == "forward_in_registers.cu"]
        assert of_forward == [blocks] * 2


@pytest.mark.parametrize("norm", NORMS)
def test_a_gpu_whose_blocks_do_not_all_run_at_once(build: Build, norm: str) -> None:
    case = next(case for case in CASES if (case.name, case.norm) == ("cluster_tiles", norm))
    at_once, others = case.gpu(None), case.gpu(None)
    others.blocks_at_once = 1
    for gpu in (at_once, others):
        check_problem(gpu, case.problem())
    assert [kernel.at_once for kernel in at_once.launched] == [False, False, True]
    assert not any(kernel.at_once for kernel in others.launched)
    assert [kernel.cluster_blocks for kernel in others.launched[2:]] == [4, 1, 1]
    build.compile(others.launched)
    gpu = case.gpu(build)
    gpu.blocks_at_once = 1
    check_problem(gpu, case.problem())


@pytest.mark.parametrize("case", FEW_IN_TURN, ids=str)
def test_few_rows_have_the_bits_of_many(build: Build, case: Case) -> None:
    build.compile(kernels_of([case]))
    results = [check_case(build, case, few_rows=few_rows) for few_rows in (False, True)]
    for many, few in zip(*results, strict=True):
        nan = np.isnan(many) & np.isnan(few)  # only here it may have either sign
        bits, of_few = (np.where(nan, 0, y.view(f"u{y.itemsize}")) for y in (many, few))
        np.testing.assert_array_equal(bits, of_few)


@pytest.mark.parametrize("x", DTYPES)
def test_few_rows_have_kernels_of_their_own(x: str) -> None:
    case = next(c for c in CASES if (c.name, c.norm, c.x) == ("block", "layer_norm", x))
    case = dataclasses.replace(case, y=None)  # not wider than x
    many, few = (kernels_of([case], few_rows=few_rows) for few_rows in (False, True))
    assert len(many) == len(few)
    assert not set(many) & set(few)


# ---- what the cases reach ------------------------------------------------------------------------


def regimes(kernel: Instantiation) -> Iterator[str]:
    """Name what is special about the members of a kernel's Op and Layout."""
    name, members = kernel.name, dict((*kernel.op, *kernel.layout))
    if name not in ("norm_forward_in_registers", "norm_backward_pipelined"):
        yield name
        if kernel.cluster_blocks > 1:
            yield f"{name}, a row to a cluster"
        if name == "norm_backward_in_registers":
            lanes, blocks = members["kColumnLanes"], members["kClusterBlocks"]
            row_threads, block_threads = members["kRowThreads"], members["kBlockThreads"]
            assert isinstance(row_threads, int)
            assert isinstance(block_threads, int)
            team = "a warp or less" if row_threads <= 32 else "several warps"
            if row_threads < block_threads:
                beside = " beside columns" if lanes else ""
                yield f"{name}, several rows{beside} to {team} each"
            if lanes and not members["kCentered"]:
                yield f"{name}, columns by {lanes} lanes"
                if blocks != 1:
                    yield f"{name}, columns in clusters of {blocks}"
        elif name == "norm_backward_in_registers_columns":
            yield f"{name} by {members['kColumnLanes']} lanes"
        return
    team_threads, packs = members["kRowThreads"], members["kPacksPerThread"]
    assert isinstance(team_threads, int)
    parts = {32: "one warp"}
    size = parts.get(team_threads, "part of a warp" if team_threads < 32 else "several warps")
    yield f"{name}, a row to {size}"
    if 32 < team_threads < kernel.block_threads:
        yield f"{name}, several rows to several warps each"
    if packs != 1:
        yield f"{name}, several packs a thread"
    yield f"{name}, rows that {'fill' if members['kFull'] else 'do not fill'} their packs"
    yield f"{name}, accesses of {'one element' if members['kVector'] == 1 else 'several elements'}"
    yield f"{name}, {'with' if members['kHoldWeight'] else 'without'} the weight held"
    if kernel.cluster_blocks > 1:
        yield f"{name}, a row to a cluster"
    others = {
        "kRareLast": "what is rare last",
        "kBlocksAhead": "rows fetched ahead",
        "kFolded": "threads that are two",
        "kHoldRow": "rows held",
        "kSharedSums": "sums of rows in shared memory",
        "kHoldSums": "sums of rows held",
    }
    yield from (f"{name}, {what}" for member, what in others.items() if members.get(member))
    of_8_bytes = {"double": 1, "float": 2}.get(str(members["X"]), 4)
    if members.get("kPackLength") == of_8_bytes:
        yield f"{name}, packs of 8 bytes"


def test_the_cases_reach_every_regime(kernels: list[Instantiation]) -> None:
    of_cases = {*kernels, *(pipelined.kernel() for pipelined in PIPELINED_IN_TURN)}
    reached = {regime for kernel in of_cases for regime in regimes(kernel)}
    print("\n".join(sorted(reached)))
    assert {
        "norm_forward_in_registers, a row to part of a warp",
        "norm_forward_in_registers, a row to one warp",
        "norm_forward_in_registers, a row to several warps",
        "norm_forward_in_registers, several packs a thread",
        "norm_forward_in_registers, packs of 8 bytes",
        "norm_forward_in_registers, accesses of one element",
        "norm_forward_in_registers, accesses of several elements",
        "norm_forward_in_registers, rows that fill their packs",
        "norm_forward_in_registers, rows that do not fill their packs",
        "norm_forward_in_registers, with the weight held",
        "norm_forward_in_registers, without the weight held",
        "norm_forward_in_registers, what is rare last",
        "norm_forward_in_registers, threads that are two",
        "norm_forward_in_registers, rows fetched ahead",
        "norm_forward_in_registers, a row to a cluster",
        "norm_forward_pipelined",
        "norm_forward_streaming",
        "norm_forward_streaming, a row to a cluster",
        "norm_backward_pipelined, a row to part of a warp",
        "norm_backward_pipelined, a row to one warp",
        "norm_backward_pipelined, a row to several warps",
        "norm_backward_pipelined, several rows to several warps each",
        "norm_backward_pipelined, several packs a thread",
        "norm_backward_pipelined, accesses of one element",
        "norm_backward_pipelined, accesses of several elements",
        "norm_backward_pipelined, rows that fill their packs",
        "norm_backward_pipelined, rows that do not fill their packs",
        "norm_backward_pipelined, with the weight held",
        "norm_backward_pipelined, without the weight held",
        "norm_backward_pipelined, rows held",
        "norm_backward_pipelined, sums of rows in shared memory",
        "norm_backward_pipelined, sums of rows held",
        "norm_backward_in_registers",
        "norm_backward_in_registers, a row to a cluster",
        "norm_backward_in_registers, several rows to a warp or less each",
        "norm_backward_in_registers, several rows to several warps each",
        "norm_backward_in_registers, several rows beside columns to a warp or less each",
        "norm_backward_in_registers, several rows beside columns to several warps each",
        "norm_backward_in_registers, columns by 4 lanes",
        "norm_backward_in_registers, columns by 16 lanes",
        "norm_backward_in_registers, columns by 32 lanes",
        "norm_backward_in_registers, columns in clusters of 2",
        "norm_backward_in_registers, columns in clusters of 4",
        "norm_backward_in_registers_columns by 8 lanes",
        "norm_backward_in_registers_columns by 16 lanes",
        "norm_backward_coefficients",
        "norm_backward_coefficients, a row to a cluster",
        "norm_backward_columns",
        "norm_backward_column_parallel",
        "reduce_partials",
    } <= reached
