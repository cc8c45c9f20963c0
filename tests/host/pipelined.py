"""Kernels that spread a row over stages, clusters or a grid, in the test's own configurations.

The configurations that cupynorm._layout chooses are for rows longer than the host has time for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from strategies import DTYPES, Layout, make_values

from cupynorm import NormBackward, NormForward, pack_bitmask, reference, testing
from cupynorm._compile import Instantiation, backward_instantiations, forward_instantiation
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardPipelined,
    ForwardPipelined,
    backward_column_parallel_bytes,
    column_parallel_counts_bytes,
    column_parallel_exchange_bytes,
    pack_length,
    partials_stride,
)
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype
from host.build import Build
from host.gpu import Array, Gpu

__all__ = ["PIPELINED", "Pipelined"]

REGIMES = ("mean_1e6", "extreme", "mixed_rows", "nonfinite", "zero_rows")
RELU = (-0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """One launch of the kernel of `file`, and what it is to compute. Dtypes are names."""

    file: str
    norm: str
    m: int
    n: int
    x: str = "float32"
    other: str | None = "float32"  # all other operands. None: like x, without weight and bias
    regime: str = "normal"
    eps: float = 1e-5
    zero_centered: bool = False
    dbias: bool = True
    in_place: bool = False
    gap: int | None = None  # between rows. None: as many elements as an access moves
    offset: int = 0  # of x
    stages: int = 2
    cluster_blocks: int = 1
    row_threads: int = 64  # in a block
    teams: int = 1
    packs_per_thread: int = 1
    hold_weight: bool = False
    stage_bias: bool = False  # even if the weight is held
    hold_row: bool = False
    shared_sums: int = 0
    hold_sums: bool = False
    bulk: bool = False
    bitmask: bool = False  # forward: what a ReLU stores
    groups: int = 2  # blocks of the grid, or clusters. Not of strips
    counted: bool | None = None  # rows by a count. None: a kernel without a count
    group_rows: int = 2  # of strips

    def __str__(self) -> str:
        over = f"{self.cluster_blocks}x{self.teams}x{self.row_threads}x{self.packs_per_thread}"
        if self.column_parallel:
            over = f"{self.strips}x{self.row_threads}x{self.group_rows}"
        what = f"{self.file.removesuffix('.cu')}-{self.norm}-{self.x}-{self.other}-{self.regime}"
        how = f"{'-bulk' if self.bulk else ''}{'-counted' if self.counted else ''}"
        how += f"-{self.shared_sums}_shared" if self.shared_sums else ""
        how += "-held" if self.hold_sums else ""
        how += "-row_held" if self.hold_row else ""
        return f"{what}-{self.m}x{self.n}-{over}-{self.stages}{how}"

    @property
    def column_parallel(self) -> bool:
        return self.file == "backward_column_parallel.cu"

    @property
    def is_forward(self) -> bool:
        return self.file == "forward_pipelined.cu"

    @property
    def strips(self) -> int:
        return -(-self.n // self.columns)

    @property
    def block_threads(self) -> int:
        return self.row_threads * self.teams

    @property
    def columns(self) -> int:
        """The columns for which the threads of one block have places."""
        return self.row_threads * self.packs_per_thread * pack_length(self.x)

    @property
    def vector(self) -> int:
        divisors = self.n | pack_length(self.x)
        return divisors & -divisors

    @property
    def cells(self) -> bool:
        unaligned = self.vector < pack_length(self.x) and ITEMSIZE[self.x] <= 4
        return unaligned and self.vector * ITEMSIZE[self.x] <= 4  # bytes of an access

    def kernel(self) -> Instantiation:
        """Return the instantiation, with its shared memory counted here."""
        full = self.n == self.cluster_blocks * self.columns
        row: dict[str, Any] = {
            "block_threads": self.block_threads,
            "blocks_per_multiprocessor": 1,
            "packs_per_thread": self.packs_per_thread,
            "cluster_blocks": self.cluster_blocks,
            "stages": self.stages,
            "vector": self.vector,
            "hold_weight": self.hold_weight,
            "cells": self.cells,
            "full": full,
        }
        if self.is_forward:
            y = self.other or self.x
            relu = self.bitmask
            spec = ForwardSpec(
                *(self.norm, self.x, self.other, self.other, y, self.zero_centered, True, relu)
            )
            kernel = forward_instantiation(
                spec,
                ForwardPipelined(
                    **row,
                    hold_bias=self.hold_weight and not self.stage_bias,
                    counted=self.counted is not None,
                ),
            )
        elif self.column_parallel:
            (kernel,) = backward_instantiations(self._spec, self._column_parallel_config)
        else:
            config = BackwardPipelined(
                **row,
                row_threads=self.row_threads,
                hold_row=self.hold_row,
                shared_sums=self.shared_sums,
                hold_sums=self.hold_sums,
                bulk=self.bulk,
                through_l1=False,
                total_ahead=False,
                reduction=None,
            )
            (kernel,) = backward_instantiations(self._spec, config)
        return dataclasses.replace(
            kernel,
            shared_bytes=self._shared_bytes(),
            # For two blocks that count. Otherwise the first takes all that is counted.
            at_once=self.column_parallel
            or (self.counted is not None and self.cluster_blocks == 1 and self.groups == 2),
        )

    def _shared_bytes(self) -> int:
        compute = ITEMSIZE[compute_dtype(self.x)]
        if self.column_parallel:
            return backward_column_parallel_bytes(self._spec, self._column_parallel_config)
        warps = max(1, self.row_threads // 32)
        scratch = 2 * self.teams * warps * 4 * compute if warps > 1 else 0
        if self.cluster_blocks > 1:
            of_warps = warps if warps > 1 else 0
            scratch = 16 + (2 * self.cluster_blocks + of_warps) * 4 * compute
        scratch = -(-scratch // 128) * 128
        elements = self.teams * self.columns
        x, other = ITEMSIZE[self.x], ITEMSIZE[self.other or self.x]
        held = self.hold_weight or self.other is None
        groups = elements // pack_length(self.x) // min(32, self.row_threads)  # of lanes
        if self.is_forward:
            scratch += 128 + self.stages * groups * 16 * self.cells
            operands = (not held) + (not held or self.stage_bias)
            return scratch + elements * (self.stages * x + operands * other)
        if self.bulk:
            scratch += -(-self.teams * self.stages * 8 // 128) * 128
        stages = elements * (self.stages * (x + other) + (0 if held else other))
        if self.cells:
            for size in (x, other):
                cell = min(16, pack_length(self.x) * size) if size <= 4 else 0
                stages += self.stages * -(-groups * cell // 16) * 16
        gradients = self.other is not None or self.dbias
        partials = elements * compute if self.teams > 1 and gradients else 0
        return scratch + stages + partials + self.shared_sums * self.columns * compute

    @property
    def _spec(self) -> BackwardSpec:
        other = self.other or self.x
        dbias = other if self.dbias else None
        return BackwardSpec(
            self.norm, self.x, other, self.other, dbias, self.zero_centered, self.bitmask
        )

    @property
    def _column_parallel_config(self) -> BackwardColumnParallel:
        return BackwardColumnParallel(self.strips, self.row_threads, self.group_rows, self.vector)

    def check(self, build: Build) -> None:
        """Run the kernel and check its results."""
        gpu = Gpu(build)
        dtype = DTYPES[self.other or self.x]
        gap = Layout(gap=self.vector if self.gap is None else self.gap)
        of_x = dataclasses.replace(gap, offset=self.offset)
        x = make_values(self.regime, (self.m, self.n), DTYPES[self.x], 1)
        weight, bias = (
            None if self.other is None else make_values("normal", (self.n,), dtype, seed)
            for seed in (2, 3)
        )
        with gpu.fresh_memory():
            on_gpu = of_x.apply(gpu.cupy, x)
            if not self.is_forward:
                dy = make_values("normal", x.shape, dtype, 4)
                dy_on_gpu = gap.apply(gpu.cupy, dy)
                found = self._check_backward(gpu, (dy, x, weight), (dy_on_gpu, on_gpu))
                if self.shared_sums or self.hold_sums or self.hold_row:
                    # The place where sums and rows wait does not show in the bits.
                    elsewhere = dataclasses.replace(
                        self,
                        shared_sums=0,
                        hold_sums=False,
                        hold_row=False,
                        in_place=False,
                    )
                    if self.hold_row and self.bulk:  # without held rows it needs one more stage
                        elsewhere = dataclasses.replace(elsewhere, stages=self.stages + 1)
                    again = gap.apply(gpu.cupy, dy), of_x.apply(gpu.cupy, x)
                    same = elsewhere._check_backward(gpu, (dy, x, weight), again)
                    for a, b in zip(found, same, strict=True):
                        bits = f"u{a.itemsize}"
                        np.testing.assert_equal(a.view(bits), b.view(bits), "bits of sums or dx")
            else:
                of_rows = self._check_forward(gpu, (x, weight, bias), on_gpu)
                if self.counted is not None:
                    # The bits do not show which block works on a row, or after which row.
                    in_turn = dataclasses.replace(self, counted=None, in_place=False)
                    again = of_x.apply(gpu.cupy, x)
                    in_order = in_turn._check_forward(gpu, (x, weight, bias), again)
                    for a, b in zip(of_rows, in_order, strict=True):
                        np.testing.assert_equal(
                            a is None or a.view(f"u{a.itemsize}"),
                            b is None or b.view(f"u{b.itemsize}"),
                            "bits of rows in turn",
                        )

    def _launch(self, gpu: Gpu, **arguments: Any) -> None:
        """Launch the kernel. Arrays of rows come with their stride, absent arrays as null."""
        kernel, compute = self.kernel(), np.dtype(compute_dtype(self.x)).type
        given = {"n_rows": self.m, "n_cols": self.n, "inv_n": compute(1 / self.n)}
        for name, argument in arguments.items():
            given[name] = 0 if argument is None else argument
            if isinstance(argument, Array) and argument.shape == (self.m, self.n):
                given[f"{name}_stride"] = argument.strides[0] // argument.itemsize
        blocks = self.strips if self.column_parallel else self.groups * self.cluster_blocks
        gpu.run(kernel, blocks, *(given.get(name, 0) for name, _ in kernel.arguments))

    def _check_forward(self, gpu: Gpu, host: Any, x: Array) -> NormForward:
        compute = np.dtype(compute_dtype(self.x)).type
        y = x if self.in_place else gpu.cupy.empty(x.shape, DTYPES[self.other or self.x])
        mean = gpu.cupy.empty(self.m, compute) if self.norm == "layer_norm" else None
        rstd = gpu.cupy.empty(self.m, compute)
        weight, bias = (None if row is None else gpu.cupy.array(row) for row in host[1:])
        lower, upper = [compute(bound) for bound in (RELU if self.bitmask else (-np.inf, np.inf))]
        bits = gpu.cupy.empty((self.m, -(-self.n // 8)), np.uint8) if self.bitmask else None
        count = gpu.cupy.zeros(1, np.int32) if self.counted else None
        numbers = {"eps": compute(self.eps), "lower": lower, "upper": upper, "count": count}
        arrays = {"x": x, "weight": weight, "bias": bias, "y": y, "mean": mean, "rstd": rstd}
        self._launch(gpu, **numbers, **arrays, bitmask=bits)
        found: NormForward = gpu.to_numpy(NormForward(y, mean, rstd, bits))
        testing.check_forward(
            self.norm,
            found,
            *host,
            eps=self.eps,
            axis=-1,
            zero_centered=self.zero_centered,
            relu=RELU if self.bitmask else None,
            out_dtype=y.dtype,
        )
        return found

    def _check_backward(self, gpu: Gpu, host: Any, rows: tuple[Array, Array]) -> tuple[Any, ...]:
        """Return dx and the partials, except for strips."""
        compute = np.dtype(compute_dtype(self.x)).type
        _, x, weight = host
        dx = rows[0] if self.in_place else gpu.cupy.empty(x.shape, x.dtype)
        forward = getattr(reference, f"{self.norm}_forward")(x, eps=self.eps, axis=-1)
        read = {"weight": weight, "mean": forward.mean, "rstd": forward.rstd}
        given = {n: None if row is None else gpu.cupy.array(row) for n, row in read.items()}
        given |= {"dy": rows[0], "x": rows[1], "dx": dx}
        dtype = x.dtype if weight is None else weight.dtype
        passes = np.random.default_rng(5).random(x.shape) < 0.5
        bitmask = pack_bitmask(passes) if self.bitmask else None
        given["bitmask"] = None if bitmask is None else gpu.cupy.array(bitmask)
        if self.column_parallel:
            dweight = None if weight is None else gpu.cupy.empty(self.n, dtype)
            dbias = gpu.cupy.empty(self.n, dtype) if self.dbias else None
            exchanged = column_parallel_exchange_bytes(self._spec, self._column_parallel_config)
            exchange = {
                "arrived": gpu.cupy.zeros(column_parallel_counts_bytes() // 4, np.uint32),
                "exchange": gpu.cupy.empty(exchanged // compute().itemsize, compute),
            }
            self._launch(gpu, **given, dweight=dweight, dbias=dbias, **exchange)
            gradients, found = (gpu.to_numpy(dweight), gpu.to_numpy(dbias)), ()
        else:
            wanted = weight is not None, self.dbias
            shape = (sum(wanted), self.groups, partials_stride(self.n))
            partials = gpu.cupy.empty(shape, compute)
            self._launch(gpu, **given, partials=partials)
            rows_of_sums = partials.reshape(-1, shape[-1])  # values after n are no sums
            of_rows = np.array([gpu.to_numpy(row[: self.n]) for row in rows_of_sums], compute)
            of_rows = of_rows.reshape(sum(wanted), self.groups, self.n)
            sums = iter(of_rows.sum(axis=1, dtype=np.float64).astype(dtype))
            found = gpu.to_numpy(dx), of_rows
            gradients = tuple(next(sums) if one else None for one in wanted)
        testing.check_backward(
            self.norm,
            NormBackward(gpu.to_numpy(dx), *gradients),
            *host,
            forward.mean,
            forward.rstd,
            bias=self.dbias,
            bitmask=bitmask,
            axis=-1,
            zero_centered=self.zero_centered,
        )
        return found


def _pipelined() -> Iterable[Pipelined]:
    for norm in ("rms_norm", "layer_norm"):
        for file in (
            "backward_pipelined.cu",
            "backward_column_parallel.cu",
            "forward_pipelined.cu",
        ):

            def pipelined(m: int, n: int, x: str = "float32", **how: Any) -> Pipelined:
                return Pipelined(file, norm, m, n, x, **how)  # noqa: B023

            if file == "backward_column_parallel.cu":
                yield from (
                    # Groups that the rows fill or do not: one group, two, and more than there are
                    # places.
                    *(pipelined(m, 600) for m in (1, 2, 3, 4, 5, 8, 11, 37)),
                    pipelined(9, 1024, group_rows=3, zero_centered=True),
                    pipelined(5, 512, other=None, dbias=False),
                    pipelined(7, 776, "float16", other="bfloat16", row_threads=32, group_rows=1),
                    pipelined(8, 400, row_threads=96, in_place=True, group_rows=4),
                    pipelined(70, 300, row_threads=32, dbias=False, in_place=True),
                    pipelined(13, 904, "bfloat16", other="float32", row_threads=32, group_rows=6),
                    pipelined(6, 252, "float64", other="float64", row_threads=32),
                    pipelined(6, 251, "bfloat16", other="bfloat16", row_threads=32),
                    pipelined(9, 470, "float64", other="float32", row_threads=64),
                    # More rows in a group than warps in a block. More strips than lanes in a warp.
                    pipelined(23, 4352, row_threads=32, group_rows=10),
                    *(
                        pipelined(m, n, x, bitmask=True, row_threads=32)
                        for m, n, x in ((7, 300, "float32"), (6, 333, "bfloat16"))
                    ),
                    # Sums of half a group at once. The last group has fewer rows than half.
                    *(
                        pipelined(m, 520, "bfloat16", bitmask=True, row_threads=32, group_rows=6)
                        for m in (20, 23)
                    ),
                    # More rows than weight gradients are summed for at once.
                    pipelined(150, 136, row_threads=32, group_rows=4),
                    *(pipelined(7, 520, regime=regime, row_threads=64) for regime in REGIMES),
                )
                continue
            yield from (
                pipelined(9, 200),
                pipelined(5, 256, other=None, dbias=False, packs_per_thread=2),
                pipelined(3, 520, "float16", other="bfloat16", packs_per_thread=2, stages=3),
                pipelined(8, 380, row_threads=96, in_place=True, hold_weight=True),
                # Accesses of 8 bytes, with the weight held and one team.
                pipelined(9, 500, "bfloat16", other="bfloat16", hold_weight=True),
                pipelined(9, 506, packs_per_thread=2, cluster_blocks=2, hold_weight=True),
                pipelined(11, 301, "bfloat16", other="float32", zero_centered=True, stages=3),
                pipelined(150, 250, "float64", other="float64", packs_per_thread=2, groups=1),
                # Few more than the 64 columns that the forward wants at least.
                pipelined(90, 69, regime="mean_1e6", row_threads=32),
                # Clusters: the last block is partly past the row's end, wholly past it, or full.
                pipelined(9, 500, cluster_blocks=2, zero_centered=True),
                pipelined(7, 504, "bfloat16", row_threads=32, cluster_blocks=3, stages=3),
                pipelined(3, 504, packs_per_thread=2, row_threads=32, cluster_blocks=2),
                pipelined(6, 512, other=None, row_threads=64, cluster_blocks=2, dbias=False),
                pipelined(
                    8,
                    300,
                    row_threads=32,
                    cluster_blocks=4,
                    # After the last row, LayerNorm's forward reads what another block may be
                    # writing, but does not use it.
                    in_place=file == "backward_pipelined.cu" or norm == "rms_norm",
                ),
                pipelined(2, 4500, row_threads=128, cluster_blocks=9),
                pipelined(3, 4500, regime="odd_start", row_threads=256, packs_per_thread=5),
                pipelined(70, 130, "float64", other="float32", cluster_blocks=2, groups=1),
                pipelined(7, 301, "float16", other="float32", cluster_blocks=2, row_threads=32),
                *(
                    pipelined(7, 290, regime=regime, row_threads=row_threads, cluster_blocks=blocks)
                    for regime in REGIMES
                    for row_threads, blocks in ((96, 1), (64, 2))
                ),
            )
            if file == "forward_pipelined.cu":
                # By cells with the weight held, like rows of two clusters, of odd length and not.
                for n, other in ((602, "bfloat16"), (605, "bfloat16"), (605, "float32")):
                    yield pipelined(
                        9,
                        n,
                        "bfloat16",
                        other=other,
                        gap=0,
                        cluster_blocks=2,
                        packs_per_thread=2,
                        hold_weight=True,
                        stage_bias=True,
                        stages=3,
                    )
            if file == "backward_pipelined.cu":
                yield pipelined(9, 492, "float16", other="float16", in_place=True, hold_weight=True)
                if norm == "rms_norm":
                    yield from _with_rows_held(pipelined)
                # Rows at odd addresses and even ones. x and dy are alike or not.
                yield from (
                    pipelined(9, 333, "bfloat16", other="bfloat16", gap=0, stages=3, groups=1),
                    pipelined(9, 333, "float16", other="bfloat16", gap=2, offset=1),
                    pipelined(
                        7, 605, "bfloat16", other="bfloat16", gap=0, cluster_blocks=2, in_place=True
                    ),
                    pipelined(
                        7, 605, other="bfloat16", gap=0, cluster_blocks=2, packs_per_thread=2
                    ),
                    pipelined(6, 333, other="bfloat16", gap=0, packs_per_thread=2),
                    # An odd number of 8-byte cells in a stage.
                    pipelined(6, 333, other="bfloat16", gap=0, row_threads=96, zero_centered=True),
                    pipelined(8, 37, "bfloat16", gap=0, bitmask=True, row_threads=32),
                )
            if file == "forward_pipelined.cu":
                # As many rows as are given out in advance, one more, and many. One to four warps
                # take turns, one does not. Also kernels that count, but get no count.
                yield from (
                    pipelined(1, 200, counted=True, groups=1),
                    *(pipelined(m, 200, counted=True) for m in (8, 9, 40)),
                    pipelined(40, 200, counted=False),
                    pipelined(40, 290, row_threads=96, counted=True, groups=3),
                    pipelined(70, 500, row_threads=128, counted=True, in_place=norm == "rms_norm"),
                    pipelined(50, 600, row_threads=160, stages=4, counted=True, regime="mean_1e6"),
                    *(
                        pipelined(m, 290, cluster_blocks=2, counted=counted, regime=regime)
                        for m, counted, regime in (
                            (6, True, "normal"),
                            (40, True, "normal"),
                            (40, False, "normal"),
                            (30, True, "extreme"),
                        )
                    ),
                    pipelined(
                        40,
                        504,
                        "bfloat16",
                        row_threads=32,
                        cluster_blocks=3,
                        stages=3,
                        counted=True,
                    ),
                    # The warp that asks for a row is not always the warp that has the sum.
                    pipelined(60, 1700, cluster_blocks=3, row_threads=160, counted=True),
                )
                # A ReLU's bits: from packs that share a byte, from whole packs and from single
                # elements.
                yield from (
                    pipelined(5, 268, bitmask=True, row_threads=96),
                    pipelined(4, 301, bitmask=True, packs_per_thread=2, zero_centered=True),
                    pipelined(5, 333, "bfloat16", other="bfloat16", cluster_blocks=2, bitmask=True),
                    pipelined(3, 131, "float64", other="float32", bitmask=True, row_threads=96),
                )
                # At any address, and out of range too: by cells, which are packs then.
                yield pipelined(6, 333, "bfloat16", other="bfloat16", gap=0, regime="extreme")
                yield pipelined(
                    7, 605, other="bfloat16", gap=0, cluster_blocks=2, packs_per_thread=2
                )
                for other, in_place in (("float32", False), ("float16", norm == "rms_norm")):
                    yield pipelined(
                        *(9, 333, "float16"),
                        other=other,
                        gap=2,
                        offset=1,
                        stages=3,
                        in_place=in_place,
                    )
                # A weight that is held, moved by single elements.
                yield pipelined(6, 333, other="bfloat16", packs_per_thread=2, hold_weight=True)
                # The weight alone.
                yield pipelined(
                    5, 512, row_threads=64, packs_per_thread=2, hold_weight=True, stage_bias=True
                )
                yield pipelined(5, 300, cluster_blocks=2, hold_weight=True, stage_bias=True)
                yield pipelined(11, 1000, "bfloat16", packs_per_thread=2, stages=3)
                # By 16 blocks, which ask for a held float32 bias when the sums are sent.
                yield pipelined(
                    3, 2048, row_threads=32, cluster_blocks=16, stages=3, hold_weight=True
                )
            if file == "backward_pipelined.cu":
                yield from (
                    # Teams of a block, some of them past the last row. Gradients are summed over
                    # the teams.
                    pipelined(37, 60, row_threads=16, teams=4, stages=3),
                    pipelined(300, 24, row_threads=8, teams=4, groups=1),
                    pipelined(90, 3, regime="mean_1e6", row_threads=1, teams=32),
                    pipelined(90, 3, regime="mean_1e6", row_threads=32),
                    pipelined(30, 28, row_threads=8, teams=8, in_place=True, hold_weight=True),
                    pipelined(21, 1000, "bfloat16", row_threads=64, teams=2, packs_per_thread=2),
                    pipelined(40, 40, regime="extreme", row_threads=16, teams=4),
                    pipelined(40, 40, regime="mixed_rows", eps=1e-35, row_threads=16, teams=4),
                    # In bulk: as many rows in a block as stages, one fewer, one more, and twice as
                    # many. Also teams past the last row, and clusters.
                    *(pipelined(m, 256, groups=1, stages=3, bulk=True) for m in (1, 2, 3, 4, 7)),
                    pipelined(9, 512, packs_per_thread=2, hold_weight=True, stages=4, bulk=True),
                    *(
                        pipelined(
                            m, 512, "bfloat16", other="bfloat16", teams=3, stages=4, bulk=True
                        )
                        for m in (5, 37)
                    ),
                    pipelined(
                        11,
                        1024,
                        "bfloat16",
                        teams=2,
                        packs_per_thread=2,
                        stages=2,
                        other="float16",
                        bulk=True,
                    ),
                    pipelined(140, 256, dbias=False, in_place=True, groups=1, stages=2, bulk=True),
                    *(
                        pipelined(m, 512, cluster_blocks=2, stages=4, bulk=True)
                        for m in (2, 8, 9, 20)
                    ),
                    pipelined(31, 768, cluster_blocks=3, groups=1, stages=6, bulk=True),
                    *(
                        pipelined(
                            21,
                            256,
                            "float64",
                            other="float64",
                            packs_per_thread=2 // cluster_blocks,
                            cluster_blocks=cluster_blocks,
                            hold_weight=True,
                            stages=5,
                            bulk=True,
                        )
                        for cluster_blocks in (1, 2)
                    ),
                    # Sums of more rows than registers add up, or as many. Both gradients are in
                    # shared memory, or one of them. The other is in partials or registers.
                    pipelined(128, 200, groups=1, shared_sums=2),
                    pipelined(129, 256, other=None, packs_per_thread=2, groups=1, shared_sums=1),
                    pipelined(130, 256, groups=1, hold_weight=True, shared_sums=2),
                    pipelined(
                        150,
                        250,
                        "float64",
                        other="float64",
                        packs_per_thread=2,
                        groups=1,
                        shared_sums=2,
                    ),
                    pipelined(140, 301, "bfloat16", groups=1, shared_sums=1, stages=3),
                    # Sums in partials, completed at once after others or later, with a part of the
                    # last pack. Also sums in shared memory, stored by sectors.
                    pipelined(64, 504, "bfloat16", other="bfloat16", groups=1),
                    pipelined(70, 498, "bfloat16", other="bfloat16", groups=1),
                    pipelined(70, 498, "bfloat16", other="bfloat16", groups=1, shared_sums=2),
                    *(
                        pipelined(
                            600,
                            24,
                            row_threads=8,
                            teams=4,
                            groups=1,
                            hold_weight=held,
                            shared_sums=sums,
                        )
                        for sums, held in ((1, False), (2, False), (2, True))
                    ),
                    *(
                        pipelined(
                            140,
                            512,
                            cluster_blocks=2,
                            groups=1,
                            stages=4,
                            bulk=True,
                            dbias=dbias,
                            hold_weight=dbias,
                            shared_sums=int(dbias),
                            hold_sums=True,
                        )
                        for dbias in (True, False)
                    ),
                )


def _with_rows_held(pipelined: Callable[..., Pipelined]) -> Iterable[Pipelined]:
    held = functools.partial(pipelined, hold_row=True)
    yield from (
        # Full rows and others, by accesses of 16 and 8 bytes. Rows past the last one.
        held(9, 200),
        held(37, 60, row_threads=16, teams=4, shared_sums=1, dbias=False, hold_weight=True),
        held(9, 506, packs_per_thread=2, in_place=True),
        held(21, 1000, "bfloat16", packs_per_thread=2, teams=2, stages=3, hold_weight=True),
        held(8, 492, "float16", other="float16", in_place=True, zero_centered=True),
        held(5, 256, other=None, dbias=False, packs_per_thread=2),
        held(7, 512, "bfloat16", other="bfloat16", bitmask=True, zero_centered=True),
        held(6, 252, "float64", other="float64", packs_per_thread=2),
        held(40, 40, regime="extreme", row_threads=16, teams=4),
        # In bulk: as many rows in a block as stages, one fewer, one more, and twice as many.
        *(held(m, 256, groups=1, stages=3, bulk=True) for m in (1, 2, 3, 4, 7)),
        held(37, 512, "bfloat16", other="bfloat16", teams=3, stages=2, bulk=True),
        # Clusters, which do not sum the next row ahead.
        held(9, 500, cluster_blocks=2),
        held(31, 760, cluster_blocks=3, groups=1, stages=3, bitmask=True),
        *(held(m, 512, cluster_blocks=2, stages=3, bulk=True) for m in (2, 8, 9, 20)),
    )


PIPELINED = list(_pipelined())
