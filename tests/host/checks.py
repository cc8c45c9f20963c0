"""Cases that reach every regime of every kernel, and a case's check, as in test_gpu_values."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from strategies import (
    DTYPES,
    OVERFLOWS,
    RELUS,
    Layout,
    Problem,
    largest_in_range,
    make_values,
    scaled,
)
from sums import check_sums, with_sums
from thorough import THOROUGH, one_in

from cupynorm import pack_bitmask, testing
from cupynorm._compile import Instantiation
from cupynorm._layout import pack_length
from host.build import Build
from host.gpu import ARCHITECTURE, Caller, Gpu, launched

__all__ = [
    "ADDRESSES",
    "CASES",
    "FAR_ROWS",
    "FEW",
    "OVERFLOWING",
    "SUMS",
    "Case",
    "OfSums",
    "check_addresses",
    "check_case",
    "check_clip_values",
    "check_far_rows",
    "check_overflows",
    "check_problem",
    "check_subnormal_rstd",
    "check_sums_of",
    "kernels_of",
    "may_overflow",
    "moved",
]

# N and architecture: rows in registers, in shared memory, and streamed. Then rows at any address.
FAR_ROWS = ((64, 90), (8232, 90), (8232, 75), (131, 90), (8233, 90))

# N of rows that share a warp.
SHORT_ROWS = (5, 40, 96)

NORMS = ("rms_norm", "layer_norm")
STEP = {"rms_norm": 0, "layer_norm": 1}


# An H200's multiprocessors: choices that depend on how many rows run at once are as there.
H200: dict[str, Any] = {"multiprocessors": 132}


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward and backward call. Dtypes are names, and None for an absent operand."""

    name: str
    norm: str
    m: int
    n: int
    x: str = "float32"
    weight: str | None = "float32"
    bias: str | None = "float32"
    y: str | None = None
    dy: str | None = None
    regime: str = "normal"
    dy_regime: str = "normal"
    eps: float = 1e-5
    zero_centered: bool = False
    relu: tuple[float, float] | None = None
    wants_dbias: bool = True
    gap: int = 0
    offset: int = 0
    weight_offset: int = 0  # and of the bias
    in_place: bool = False
    multiprocessors: int = 2

    def __str__(self) -> str:
        return f"{self.name}-{self.norm}-{self.x}-{self.m}x{self.n}"

    def gpu(self, build: Build | None, *, few_rows: bool = False) -> Gpu:
        # Without clusters and with little shared memory. Such rows are streamed, and the host still
        # has time for them.
        architecture = 75 if "stream" in self.name else ARCHITECTURE
        return Gpu(build, self.multiprocessors, architecture, few_rows)

    @property
    def infers(self) -> bool:
        """Whether inference runs too. Its kernels are those of forward except for statistics."""
        return self.in_place or zlib.crc32(str(self).encode()) % one_in(3) == 0

    def problem(self) -> Problem:
        shape, layout = (self.m, self.n), Layout(gap=self.gap, offset=self.offset)
        affine = Layout(offset=self.weight_offset)
        x, dy = DTYPES[self.x], DTYPES[self.dy or self.x]

        def row(dtype: str | None, seed: int) -> Any:
            return dtype and make_values("normal", (self.n,), DTYPES[dtype], seed)

        return Problem(
            norm=self.norm,
            k=1,
            eps=self.eps,
            axis=(-1,),
            zero_centered=self.zero_centered,
            relu=self.relu,
            out_dtype=DTYPES[self.y or self.x],
            wants_dbias=self.wants_dbias,
            regime=self.regime,
            seed=1,
            layouts={"x": layout, "dy": layout, "weight": affine, "bias": affine},
            x=self._values(shape, x),
            dy=make_values(self.dy_regime, shape, dy, 2),
            weight=row(self.weight, 3),
            bias=row(self.bias, 4),
        )

    def _values(self, shape: tuple[int, ...], dtype: Any) -> Any:
        values = make_values("normal", shape, np.float64, 1)
        largest = float(ml_dtypes.finfo(dtype).max)
        if self.regime == "limit":
            values /= np.abs(values).max()
            values *= largest
        elif self.regime == "equal_huge":
            values[...] = 2.0**126
        elif self.regime == "equal":
            values[...] = 1e9 / np.arange(3, 3 + len(values))[:, None]
        elif self.regime == "lone":  # the rest of a row vanishes next to its first element
            values[:, 0] = -1e20
            values *= 1e10
        elif self.regime == "lone_limit":  # the others are tiny in the row's unit
            values[:, 0] = largest / 2
        elif self.regime == "outlier":  # all elements but one are near the mean, which is not 0
            outliers = np.linspace(0.5, 1, len(values)) * self.n**0.5
            values = values / 100 + np.linspace(1, 2, len(values))[:, None]
            values[:, -1] *= outliers
        elif self.regime == "pair":  # all but two lie at the mean, 2 to 6 standard errors from 0
            means = np.linspace(1, 2, len(values))[:, None]
            away = means * self.n / 2**1.5 * np.linspace(0.34, 1.05, len(values))[::-1, None]
            values = np.broadcast_to(means, values.shape).copy()
            values[:, -1:] += away
            values[:, self.n // 2 : self.n // 2 + 1] -= away
        elif self.regime == "off_guess":  # near the mean, except two and the first ones, far off
            means = np.linspace(1, 2, len(values))[:, None]
            deviation = means * np.linspace(0.05, 0.7, len(values))[:, None]
            values = means * (1 + values / 1000)
            values[:, -1:] += deviation * (self.n / 2) ** 0.5
            values[:, self.n // 2 : self.n // 2 + 1] -= deviation * (self.n / 2) ** 0.5
            values[:, :64] += 1.3 * deviation
            values[:, 64:128] -= 1.3 * deviation
            if "wild" in self.name:
                values *= 1e25
        elif self.regime == "near_eps":  # eps is as large as the variance
            values *= self.eps**0.5
        else:
            return make_values(self.regime, shape, dtype, 1)
        return values.astype(dtype)


def check_case(build: Build, case: Case, *, few_rows: bool = False) -> tuple[Any, ...]:
    gpu = case.gpu(build, few_rows=few_rows)
    return check_problem(gpu, case.problem(), in_place=case.in_place, infers=case.infers)


def kernels_of(cases: Iterable[Case], *, few_rows: bool = False) -> list[Instantiation]:
    """Return the kernels that some cases launch, so that they can be compiled in parallel."""
    kernels: list[Instantiation] = []
    for case in cases:
        gpu = case.gpu(None, few_rows=few_rows)
        check_problem(gpu, case.problem(), in_place=case.in_place, infers=case.infers)
        kernels += gpu.launched
    return list(dict.fromkeys(kernels))


def check_problem(
    gpu: Gpu, problem: Problem, *, in_place: bool = False, infers: bool = True
) -> tuple[Any, ...]:
    """Run inference if wanted, forward and backward, and check every field of each.

    Return what depends on one row alone: y, the statistics and dx.
    """
    x, dy, weight, bias = problem.x, problem.dy, problem.weight, problem.bias
    with gpu.fresh_memory():
        on_gpu = problem.on(gpu.cupy)
        forward_arguments = (problem.norm, on_gpu["x"], on_gpu["weight"], on_gpu["bias"])
        options = problem.forward_options
        infer = None
        if infers:
            infer = gpu.forward(*forward_arguments, **options, store_statistics=False)
        forward = gpu.forward(*forward_arguments, **options)
        wanted = problem.wants_dbias if bias is None else on_gpu["bias"]
        backward = gpu.backward(
            problem.norm,
            on_gpu["dy"],
            on_gpu["x"],
            on_gpu["weight"],
            forward.mean,
            forward.rstd,
            bias=wanted,
            bitmask=forward.bitmask,
            **problem.options,
            dx=on_gpu["dy"] if in_place else None,
        )
        if in_place:
            out = on_gpu["x"]
            infer = gpu.forward(*forward_arguments, **options, store_statistics=False, out=out)
        host, gradients = gpu.to_numpy(forward), gpu.to_numpy(backward)
        of_rows = tuple(field for field in (*host[:3], gradients.dx) if field is not None)
        if gpu.build is None:
            return of_rows
        if infer is not None:
            testing.check_forward(problem.norm, gpu.to_numpy(infer), x, weight, bias, **options)
        testing.check_forward(problem.norm, host, x, weight, bias, **options)
        testing.check_backward(
            problem.norm,
            gradients,
            dy,
            x,
            weight,
            host.mean,
            host.rstd,
            bias=problem.backward_bias,
            bitmask=host.bitmask,
            **problem.options,
        )
        return of_rows


@dataclasses.dataclass(frozen=True)
class OfSums:
    """A problem whose sums a kernel writes to given arrays, which are aligned to their elements."""

    kernel: str
    norm: str
    m: int
    n: int
    x: str = "bfloat16"
    architecture: int = ARCHITECTURE
    few_rows: bool = False

    def __str__(self) -> str:
        return f"sums by {self.kernel}-{self.norm}-{self.x}-{self.m}x{self.n}"


SUMS = (
    OfSums("reduce_partials", "layer_norm", 7, 300),
    OfSums("reduce_partials", "rms_norm", 70, 2048, few_rows=True),
    OfSums("norm_backward_in_registers", "rms_norm", 5, 1000, few_rows=True),
    OfSums("norm_backward_in_registers_columns", "layer_norm", 5, 4096, few_rows=True),
    OfSums("norm_backward_column_parallel", "layer_norm", 2, 140004, "float32"),
    OfSums("reduce_partials", "rms_norm", 3, 20004, "float64", architecture=75),
)


def check_sums_of(build: Build, of: OfSums) -> Gpu:
    """Check sums, those of shorter rows also by calls that are made again. Return what ran."""
    problem = Case(str(of), of.norm, of.m, of.n, of.x, "bfloat16", "float16").problem()
    drawn = with_sums(problem, "float16", "float64", offset=1)
    of_gpu: dict[str, Any] = {"architecture": of.architecture, "few_rows": of.few_rows}
    build.compile(launched(lambda gpu: check_sums(Caller(gpu), drawn), **of_gpu))
    gpu = Gpu(build, **of_gpu)
    gpu.repeats = THOROUGH or of.n < 100_000
    with gpu.fresh_memory():
        check_sums(Caller(gpu), drawn)
    return gpu


def check_far_rows(gpu: Gpu, n: int) -> None:
    """Check rows that lie more than 2**31 elements apart, in memory that nothing touches."""
    far = Layout(gap=2**31 + 8 - n)
    values, dy = (make_values("normal", (2, n), DTYPES["bfloat16"], seed) for seed in (1, 2))
    weight = make_values("normal", (n,), DTYPES["float64"], 3)
    with gpu.fresh_memory():
        x, gpu_dy, y, dx = (gpu.memory.sparse(rows, far) for rows in (values, dy, values, dy))
        gpu_weight = gpu.cupy.array(weight)
        forward = gpu.forward("layer_norm", x, gpu_weight, eps=1e-5, out=y)
        backward = gpu.backward(
            "layer_norm",
            gpu_dy,
            x,
            gpu_weight,
            forward.mean,
            forward.rstd,
            bias=False,
            dx=dx,
        )
        host, gradients = gpu.to_numpy(forward), gpu.to_numpy(backward)
        testing.check_forward("layer_norm", host, values, weight, eps=1e-5)
        testing.check_backward(
            "layer_norm", gradients, dy, values, weight, host.mean, host.rstd, bias=False
        )


def check_neighbours(gpu: Gpu, norm: str, x_dtype: str, n: int) -> None:
    """Check that rows keep their bits if a row in the same warp is measured again."""
    dtype = DTYPES[x_dtype]
    huge = make_values("normal", (10, n), dtype, 2) * dtype.type(1e30)
    offset = make_values("mean_1e2", (10, n), dtype, 3)
    for regime, again in (("mean_1e2", huge), ("normal", huge), ("normal", offset)):
        rows = make_values(regime, (20, n), dtype, 1)
        beside = rows.copy()
        beside[1::2] = again
        with gpu.fresh_memory():
            alone, among = (
                gpu.to_numpy(gpu.forward(norm, gpu.cupy.array(x), eps=1e-6)) for x in (rows, beside)
            )
        for a, b in ((alone.y, among.y), (alone.rstd, among.rstd)):
            bits = (kept[::2].view(f"u{kept.itemsize}") for kept in (a, b))
            np.testing.assert_array_equal(*bits, "bits of neighbours")


def check_overflows(
    build: Build, case: Case, *, few_rows: bool, factors: Sequence[Any] = OVERFLOWS
) -> None:
    """Check dx of rows where float32 overflows on the way to dx. Others keep their bits."""
    tame = case.problem()
    others = tame.dy.copy()
    # Elsewhere such a row is NaN if dx is written over dy.
    in_place = case.in_place and case.name.startswith(("stream", "cluster"))
    for of_x, of_dy, of_weight in factors:
        wild = others.copy()
        wild[::2] = scaled(others[::2], of_dy)
        kept = []
        for dy in (wild, others):
            problem = dataclasses.replace(
                tame,
                x=scaled(tame.x, of_x),
                dy=dy,
                weight=None if tame.weight is None else scaled(tame.weight, of_weight),
            )
            gpu = case.gpu(build, few_rows=few_rows)
            *_, dx = check_problem(gpu, problem, in_place=in_place, infers=case.infers)
            kept.append(dx[1::2].view(f"u{dx.itemsize}"))
        np.testing.assert_array_equal(*kept, "bits beside rows whose products overflow")
    x, dy, weight = largest_in_range(
        tame.x, tame.dy, tame.weight, k=tame.k, zero_centered=tame.zero_centered
    )
    problem = dataclasses.replace(tame, x=x, dy=dy, weight=weight)
    gpu = case.gpu(build, few_rows=few_rows)
    check_problem(gpu, problem, in_place=in_place, infers=case.infers)
    if case.in_place:  # such a row is right as long as its means are finite
        problem = dataclasses.replace(tame, dy=scaled(others, 1e30))
        check_problem(case.gpu(build, few_rows=few_rows), problem, in_place=True)


def moved(case: Case) -> list[Case]:
    return [dataclasses.replace(case, offset=offset) for offset in (0, 1, 2, 5)]


def check_addresses(build: Build, case: Case) -> None:
    """Check that rows have the same bits at any address."""
    cases = moved(case)
    build.compile(kernels_of(cases))
    first, *others = (check_case(build, one) for one in cases)
    for other in others:
        for a, b in zip(first, other, strict=True):
            bits = (of_rows.view(f"u{of_rows.itemsize}") for of_rows in (a, b))
            np.testing.assert_array_equal(*bits, "bits of rows at other addresses")


def check_subnormal_rstd(gpu: Gpu, n: int) -> None:
    """Check gradients of float64 rows with such large deviations that rstd is subnormal."""
    x, dy = (make_values("normal", (7, n), np.dtype(np.float64), seed) for seed in (1, 2))
    x = np.copysign(5e307, x)
    weight = make_values("normal", (n,), np.dtype(np.float64), 3)
    mean, rstd = np.zeros(7), np.full(7, 1 / 5e307)
    assert 0 < rstd[0] < np.finfo(np.float64).smallest_normal
    operands = dy, x, weight, mean, rstd
    with gpu.fresh_memory():
        arguments = map(gpu.cupy.array, operands)
        gradients = gpu.to_numpy(gpu.backward("layer_norm", *arguments, bias=True))
    testing.check_backward("layer_norm", gradients, *operands, bias=True)


def check_clip_values(gpu: Gpu, x_dtype: str, n: int) -> None:
    """Check bits where y is exactly a bound: a bias of 1 or -1, and a weight of 0.

    Then check backward, with a dy that is NaN where a bit is not set.
    """
    x = make_values("normal", (5, n), DTYPES[x_dtype], 1)
    weight = np.zeros(n, np.float32)
    bias = np.random.default_rng(0).choice([np.float32(-1), np.float32(1)], n)
    positive = np.broadcast_to(bias > 0, x.shape)
    relu_bits = {
        (-1.0, 1.0): np.zeros_like(positive),
        (-1.0, 2.0): positive,
        (-2.0, 1.0): ~positive,
        (-2.0, 2.0): np.ones_like(positive),
    }
    with gpu.fresh_memory():
        on_gpu, *operands = map(gpu.cupy.array, (x, weight, bias))
        for relu, bits in relu_bits.items():
            forward = gpu.forward("layer_norm", on_gpu, *operands, eps=1e-5, relu=relu)
            host = gpu.to_numpy(forward)
            np.testing.assert_array_equal(host.y, np.broadcast_to(bias, x.shape))
            np.testing.assert_array_equal(host.bitmask, pack_bitmask(bits), f"bits of {relu}")
            dy = np.where(bits, x, np.full((), np.nan, x.dtype))
            arguments = (gpu.cupy.array(dy), on_gpu, None, forward.mean, forward.rstd)
            gradients = gpu.to_numpy(
                gpu.backward("layer_norm", *arguments, bias=True, bitmask=forward.bitmask)
            )
            arguments = (dy, x, None, host.mean, host.rstd)
            testing.check_backward(
                "layer_norm", gradients, *arguments, bias=True, bitmask=host.bitmask
            )


def _cases() -> list[Case]:
    """Return rows of every length at which a regime begins, in each dtype, with varied options."""
    cases = []
    for norm in NORMS:
        for i, x in enumerate(DTYPES, STEP[norm]):
            pack, other = pack_length(x), list(DTYPES)[(i + 1) % 4]
            # Packs in a row: parts of a warp, a warp, whole warps, and the most that registers
            # hold.
            cases += [
                Case("one_element", norm, 67, 1, x, weight=None, bias=None, wants_dbias=i % 2 == 0),
                Case("sub_warp", norm, 37, 3 * pack, x, bias=None, dy=other, wants_dbias=False),
                Case("sub_warp_odd", norm, 70, 7 * pack + 1, x, weight=other, zero_centered=True),
                Case("warp", norm, 19, 31 * pack, x, "float32", other, gap=pack, offset=pack),
                # A byte of the bitmask comes from one thread's packs, from its neighbours', and
                # from both.
                Case("relu_one_thread", norm, 70, 2 * pack - 1, x, other, relu=RELUS[1]),
                Case("relu_two_threads", norm, 37, 4 * pack, x, None, other, relu=RELUS[0]),
                Case("relu_sub_warp", norm, 21, 9 * pack + 1, x, y="bfloat16", relu=RELUS[1]),
                Case("relu_warps", norm, 7, 150 * pack, x, dy=other, relu=RELUS[i], gap=pack),
                Case("relu_warps_odd", norm, 5, 290 * pack + 3, x, bias=None, relu=RELUS[1]),
                Case("warp_of_packs", norm, 9, 64 * pack - 2, x, weight=None, gap=6, y="bfloat16"),
                Case("warps", norm, 11, 150 * pack, x, zero_centered=i % 2 == 0),
                Case("in_place", norm, 13, 90 * pack, x, bias=None, in_place=True),
                Case("warps_odd", norm, 5, 290 * pack + 1, x, other, None, offset=1),
                Case("weight_beside", norm, 4, 75 * pack + 3, x, weight_offset=1),
                Case("block", norm, 3, 1000 * pack, x, x, x, y=other, gap=8),
            ]
        cases += [
            # Rows with float64 operands are streamed from a shorter length on.
            Case("stream", norm, 9, 8232, "bfloat16", "float64", None, wants_dbias=False),
            Case("stream_odd", norm, 3, 4101, "float32", "float64", "float32", zero_centered=True),
            Case("stream_tiles", norm, 3, 10240, "bfloat16", "float64", offset=8),
            Case("stream_float64", norm, 3, 6148, "float64", None, "float64", dy="float32"),
            # Whole tiles and a rest. Two blocks a multiprocessor, where clusters are possible too.
            Case("stream_long", norm, 2, 32776, "bfloat16", "float64", "float32"),
            Case("two_blocks", norm, 3, 20008, "bfloat16", bias=None),
            Case("stream_odd_start", norm, 3, 12304, "float32", bias=None, regime="odd_start"),
            Case("stream_in_place", norm, 5, 12304, "float32", in_place=True, gap=4),
            Case("relu_stream", norm, 5, 8232, "bfloat16", "float64", relu=RELUS[1]),
            Case("relu_stream_long", norm, 2, 16400, "bfloat16", "float64", relu=RELUS[1]),
            Case("relu_stream_odd", norm, 3, 12299, "float32", dy="float64", relu=RELUS[1]),
            Case("relu_stream_float64", norm, 3, 6149, "float64", relu=RELUS[2], in_place=True),
            Case("relu_in_place", norm, 13, 720, "bfloat16", relu=RELUS[3], in_place=True),
            Case("relu_nonfinite", norm, 9, 300, "float16", regime="nonfinite", relu=RELUS[0]),
            Case("stream_wild", norm, 4, 12296, "float32", None, None, regime="extreme", eps=0.0),
            Case("stream_nonfinite", norm, 6, 12300, "float32", None, regime="nonfinite"),
            Case("pipelined_cluster", norm, 3, 8200, "float64", "float64", dy="float32"),
            # Longer than clusters hold: streamed by clusters. Whole packs go backward in strips.
            Case("cluster", norm, 3, 65541, "float64", None, dy="float32", gap=2),
            Case("cluster_tiles", norm, 2, 140004, "float32", zero_centered=True, gap=4),
            Case("cluster_odd", norm, 2, 131077, "float32", "bfloat16", None, offset=1),
            Case("cluster_in_place", norm, 3, 131076, "float32", bias=None, in_place=True),
            Case("cluster_wild", norm, 4, 131082, "float32", None, regime="extreme", eps=0.0),
            Case("cluster_nonfinite", norm, 6, 65541, "float64", regime="nonfinite"),
            Case("cluster_odd_start", norm, 2, 131086, "float32", regime="odd_start"),
            Case("cluster_mean", norm, 2, 131082, "float32", regime="mean_1e6"),
            Case("relu_cluster", norm, 2, 262152, "bfloat16", relu=RELUS[1]),
            Case("relu_cluster_odd", norm, 2, 65541, "float64", y="float16", relu=RELUS[1]),
            # More rows than one team, or one chunk of rows, adds up in registers.
            Case("turns", norm, 300, 1030, "float32", multiprocessors=1),
            Case("turns_bias", norm, 280, 1024, "float64", None, multiprocessors=1),
            Case("stream_turns", norm, 132, 4112, "bfloat16", dy="float64", multiprocessors=1),
            Case("sub_warp_wild", norm, 33, 40, "bfloat16", regime="extreme"),
            Case("sub_warp_mixed", norm, 90, 40, "bfloat16", regime="mixed_rows", eps=1e-35),
            Case("stream_mean", norm, 5, 12300, "float32", regime="mean_1e6", gap=2),
            Case("many_partials", norm, 340, 4104, "float16", multiprocessors=200),
        ]
        for x in ("float32", "float64", "bfloat16"):
            for regime in ("extreme", "minute", "mixed_rows", "zero_rows", "nonfinite", "mean_1e6"):
                n = 24 if x == "float64" else 1100
                cases.append(Case("range_" + regime, norm, 7, n, x, bias=None, regime=regime))
            # The squares of mean and deviation vanish. With eps, no row is out of range.
            for n in (1, 2, 5):
                cases.append(Case(f"minute_{n}", norm, 67, n, x, None, None, regime="minute"))
        for x, n in (("bfloat16", 40), ("float32", 300), ("float64", 2048), ("float32", 12300)):
            name = f"{'stream_' if n == 12300 else ''}infinite_dy_{n}"
            cases.append(Case(name, norm, 13, n, x, bias=None, dy_regime="infinities"))
            cases.append(Case(name.replace("dy", "x"), norm, 13, n, x, regime="infinities"))
    for x, n in (("float32", 300), ("float64", 300), ("float32", 12300), ("float64", 6150)):
        cases += [
            Case("range_limit", "rms_norm", 3, n, x, regime="limit"),
            Case("range_lone", "rms_norm", 3, n, x, regime="lone"),
            Case("range_near_eps", "layer_norm", 3, n, x, regime="near_eps", eps=1e-36),
            Case("range_nonfinite_eps_0", "rms_norm", 9, n, x, regime="nonfinite", eps=0.0),
            Case("range_zero_eps", "rms_norm", 7, n, x, regime="zero_rows", eps=0.0),
        ]
    # Rows that fill two blocks of fewer threads, and teams of 3, 5 and 7 packs a thread.
    cases += [
        Case("filled", "rms_norm", 2, 24576, "bfloat16", bias=None, regime="mixed_rows"),
        Case("filled_relu", "rms_norm", 2, 24576, "bfloat16", bias=None, relu=RELUS[1]),
        Case("filled_zero", "rms_norm", 2, 28672, "bfloat16", bias=None, zero_centered=True),
    ]
    for norm in NORMS:
        cases += [
            Case("of_3_packs", norm, 70, 192, "bfloat16", relu=RELUS[1]),
            Case("of_5_packs", norm, 37, 1280, "bfloat16"),
            Case("of_7_packs", norm, 9, 3584, "bfloat16"),
        ]
    # In packs of 8 bytes forward, also at addresses that allow only smaller accesses.
    for norm in NORMS:
        cases += [
            Case("halves", norm, 70, 100, "bfloat16", relu=RELUS[1]),
            Case("halves_tiny", norm, 67, 12, "float16", relu=RELUS[1]),
            Case("halves_of_5", norm, 37, 300, "bfloat16"),
            Case("halves_warps", norm, 5, 2052, "bfloat16", y="float32", regime="mixed_rows"),
            Case("halves_narrow", norm, 5, 4100, "bfloat16", "bfloat16", "bfloat16"),
            Case("halves_in_place", norm, 13, 302, "float32", in_place=True),
            Case("halves_odd", norm, 7, 1500, "bfloat16", offset=1),
            # By accesses of two 16-bit elements. Rows of odd length.
            Case("halves_in_pairs", norm, 21, 258, "bfloat16", relu=RELUS[1]),
            Case("halves_of_pairs", norm, 67, 6, "float16", relu=RELUS[1]),
            Case("halves_weight_beside", norm, 5, 1002, *3 * ("bfloat16",), weight_offset=1),
            Case("halves_of_odd", norm, 37, 201, "float32", "bfloat16", relu=RELUS[1]),
            Case("halves_of_long_odd", norm, 3, 6001, "bfloat16", in_place=True, gap=2),
        ]
    # At any address. A row ends in the last thread's next cell, and shares its first cell with the
    # row before, which is written in place.
    for norm in NORMS:
        cases += [
            Case("unaligned", norm, 21, 129, "bfloat16"),
            Case("unaligned_in_place", norm, 7, 1031, "float16", in_place=True, offset=1, gap=2),
            Case("unaligned_wild", norm, 5, 515, "bfloat16", regime="extreme"),
            Case("unaligned_wide_y", norm, 5, 259, "float16", y="float32", relu=RELUS[1]),
            Case("unaligned_mean", norm, 6, 261, regime="mean_1e6"),
        ]
    # For few rows: more rows than a warp has in flight. The last case is not one of these, since dx
    # overwrites dy.
    for norm in NORMS:
        cases += [
            Case("columns", norm, 37, 4099, "bfloat16", relu=RELUS[1]),
            Case("columns_gap", norm, 70, 1200, "float32", "bfloat16", None, gap=8, **H200),
            Case("columns_teams", norm, 67, 1032, "bfloat16", "bfloat16", **H200),
            Case("columns_bias", norm, 23, 600, "float64", None, dy="float32"),
            Case("columns_in_place", norm, 13, 1200, "float32", in_place=True),
        ]
    cases.append(Case("columns_mean", "layer_norm", 9, 1200, "float32", regime="mean_1e6"))
    cases.append(Case("columns_cluster", "layer_norm", 2, 16384, "float32", bias=None))
    cases.append(Case("outlier", "layer_norm", 60, 511, "float32", bias=None, regime="outlier"))
    for n in (64, 511, 512):
        cases.append(Case(f"pair_{n}", "layer_norm", 60, n, "float32", bias=None, regime="pair"))
    for name, n in (("warps", 4096), ("pipelined", 10240), ("stream", 12304)):
        name = f"{name}_off_guess"
        cases.append(Case(name, "layer_norm", 4, n, "float32", bias=None, regime="off_guess"))
    cases.append(
        Case(
            "warps_off_guess_wild", "layer_norm", 4, 4096, "float32", None, None, regime="off_guess"
        )
    )
    # N is a power of two, so that the mean is exact. dx of a constant row has no other mean.
    for n in (256, 2048):
        cases.append(Case("range_equal_huge", "layer_norm", 3, n, "float32", regime="equal_huge"))
    for x, n in (("float32", 2049), ("float64", 300)):
        cases.append(Case("range_equal", "layer_norm", 3, n, x, regime="equal"))
        cases.append(Case("range_equal_eps_0", "layer_norm", 3, n, x, regime="equal", eps=0.0))
    cases.append(Case("lone_limit", "rms_norm", 3, 2000, bias=None, regime="lone_limit"))
    return cases


CASES = _cases()


def may_overflow(case: Case) -> bool:
    """Return whether the numbers of a case's dtypes go so far that its products overflow."""
    return (
        case.regime == case.dy_regime == "normal"
        and case.x in ("float32", "bfloat16")
        and "float16" not in (case.dy, case.y)
        and case.n > 8
    )


# One for each name: a row in every regime of the backward pass.
OVERFLOWING = {case.name: case for case in CASES if may_overflow(case)}
OVERFLOWING |= {
    f"{case.name}, {case.norm}": case
    for case in CASES
    if case.name in ("cluster_tiles", "stream", "two_blocks", "columns_gap", "columns_cluster")
}

# Rows of whole packs, which may also lie at multiples of 16 bytes, and others. LayerNorm subtracts
# a value that the first elements decide, before it sums.
ADDRESSES = [
    Case("addresses", norm, 5, n, x, bias=None, regime="mean_1e2")
    for norm in NORMS
    for x, n in (
        *(("float32", 1160), ("float32", 1163), ("float32", 1162)),
        *(("bfloat16", 2328), ("bfloat16", 300), ("float16", 131)),
    )
]

# Cases for which few rows may have their own kernels, and some of a lone row.
_LONGER = ("warp", "in_place", "block", "relu_warps", "range")
FEW = [case for case in CASES if case.name.startswith(_LONGER) and case.m <= 64][::3]
FEW += [case for case in CASES if case.name in ("pipelined_cluster", "infinite_dy_300")]
FEW += [case for case in CASES if case.name.startswith("columns")]
for _norm in NORMS:
    FEW += [
        Case("few_warp", _norm, 7, 1024, "bfloat16", regime="mixed_rows"),
        Case("few_warp_odd", _norm, 5, 1000, "float16", regime="nonfinite"),
        Case("few_extreme", _norm, 7, 1200, "float32", bias=None, regime="extreme"),
        Case("few_halves", _norm, 7, 1500, "bfloat16", "bfloat16", None, regime="mixed_rows"),
        Case("few_halves_short", _norm, 21, 300, "float16", bias=None, relu=RELUS[1]),
        Case("few_halves_of_7", _norm, 21, 204, "bfloat16", "bfloat16"),
    ]
FEW += [
    Case("few_mean", "layer_norm", 7, 1024, "bfloat16", regime="mean_1e6"),
    Case("few_warp_extreme", "layer_norm", 7, 1024, "bfloat16", regime="extreme"),
    Case("few_off_guess", "layer_norm", 7, 2048, "float32", regime="off_guess"),
    Case("few_off_guess_wild", "layer_norm", 5, 1200, "float32", None, None, regime="off_guess"),
]
# Less than a warp, with fewer packs a thread, and a cluster for each row.
FEW += [
    Case("few_short", "layer_norm", 37, 256, "bfloat16", regime="mixed_rows"),
    Case("few_short_odd", "layer_norm", 21, 504, "bfloat16", "bfloat16", None, relu=RELUS[1]),
    Case("few_short_mean", "layer_norm", 33, 248, "bfloat16", None, regime="mean_1e2", gap=8),
    # More rows than run at once.
    *(
        Case("few_short_more", "layer_norm", 60, 256, "bfloat16", regime=regime, multiprocessors=1)
        for regime in ("mixed_rows", "mean_1e2")
    ),
    # As many packs a thread. Rare steps come last.
    Case("few_short_thin", "layer_norm", 37, 120, "float16", regime="mixed_rows"),
    Case("few_short_thin_mean", "layer_norm", 21, 64, "float32", regime="mean_1e2", gap=4),
    Case("few_short_wild", "layer_norm", 33, 40, "float32", regime="extreme", eps=1e-35),
]
_SPLIT: dict[str, Any] = {"weight": "bfloat16", "bias": "bfloat16", "multiprocessors": 12}
_PAIRS = _SPLIT | {"multiprocessors": 6}
for _norm in NORMS:
    FEW += [
        Case("few_split", _norm, 3, 16384, "bfloat16", **_SPLIT),
        Case("few_split_odd", _norm, 2, 16376, "bfloat16", gap=8, **_SPLIT),
    ]
FEW += [
    Case("few_split_halves", "layer_norm", 3, 8188, "bfloat16", gap=4, **_SPLIT),
    Case("few_split_mean", "layer_norm", 2, 8192, "bfloat16", regime="off_guess", **_SPLIT),
    Case("few_split_wild", "layer_norm", 3, 4092, "float32", regime="extreme", **_SPLIT),
    Case("few_split_in_place", "layer_norm", 3, 8184, "float16", in_place=True, **_SPLIT),
    Case("few_split_relu", "layer_norm", 3, 4096, "float32", relu=RELUS[1], **_SPLIT),
    # By clusters of two, since fewer multiprocessors have room for them.
    Case("few_pairs", "layer_norm", 3, 16384, "bfloat16", **_PAIRS),
    Case("few_pairs_odd", "layer_norm", 2, 16376, "bfloat16", gap=8, regime="off_guess", **_PAIRS),
    Case("few_pairs_wild", "layer_norm", 3, 8192, "float32", regime="extreme", **_PAIRS),
]
# More rows than run at once, with threads that count as two each.
_FOLDED: dict[str, Any] = {"multiprocessors": 1, "gap": 8}
FEW += [
    Case("few_folded", "layer_norm", 3, n, x, x, x, regime=regime, **_FOLDED)
    for n, x, regime in (
        (16384, "bfloat16", "mixed_rows"),
        (16384, "bfloat16", "extreme"),
        (12288, "float16", "off_guess"),
    )
]
# More rows than hold the weight at once. All of them run at once anyway.
FEW.append(Case("few_at_once", "rms_norm", 9, 10240, "bfloat16", bias=None, regime="extreme"))
FEW += [dataclasses.replace(case, name=f"lone_{case.name}", m=1) for case in FEW[::8]]
# More rows than blocks, in the backward: several rows a block, and fewer in the last one.
_TEAMS: dict[str, Any] = {"multiprocessors": 9}
for _norm in NORMS:
    FEW += [
        Case("few_teams", _norm, 70, 768, "float32", regime="mixed_rows", **_TEAMS),
        Case("few_teams_bias", _norm, 66, 768, "float32", None, "float32", gap=4, **_TEAMS),
        Case("few_teams_odd", _norm, 67, 764, "bfloat16", relu=RELUS[1], gap=4, **_TEAMS),
        Case("few_teams_in_place", _norm, 66, 1200, "float32", in_place=True, multiprocessors=18),
    ]
FEW += [
    Case("few_teams_mean", "layer_norm", 71, 512, "bfloat16", regime="mean_1e2", **_TEAMS),
    Case(
        "few_teams_bad",
        "layer_norm",
        71,
        512,
        "float32",
        bias=None,
        dy_regime="nonfinite",
        **_TEAMS,
    ),
]
