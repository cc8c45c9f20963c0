"""NVRTC compiles the configurations for every supported architecture, without a GPU.

With CUPYNORM_THOROUGH=1, these are compiled for sm_90, which has clusters: all configurations of
whole bfloat16 packs, each by the operation that takes the most registers; a quarter of those that
are moved in smaller pieces; an eighth of those of other dtypes. For sm_80, which has no clusters,
it is an eighth of all.

Without it, sm_80 gets a sixth of these, and sm_90 a 72nd. On sm_90 one kernel at least is of each
kind that is known to spill, and more of them wait for another kernel. The other architectures get a
64th of what takes the most registers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from thorough import one_in

from cupynorm import kernel_source
from cupynorm._bench import FLUSH, Clock
from cupynorm._compile import (
    ARGUMENTS,
    OPTIONS,
    Instantiation,
    arguments_of,
    backward_instantiations,
    forward_instantiation,
    source,
)
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardConfig,
    BackwardPipelined,
    ForwardInRegisters,
    ForwardPipelined,
    ForwardStreaming,
    backward_config,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
    pack_length,
    strided,
)
from cupynorm._operation import CPP_TYPES, ITEMSIZE, BackwardSpec, ForwardSpec

pytest.importorskip("cupy", reason="needs CuPy for NVRTC", exc_type=ImportError)
from cupy.cuda import nvrtc

Spec = TypeVar("Spec")
Config = TypeVar("Config")

# sm_86 and sm_89 have the machine code of sm_80, with less shared memory for a block.
ARCHITECTURES = ("75", "80", "90", "100", "120")

# CuPy adds these options to every compilation.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")

# One width in packs for each regime and each number of packs a thread holds: sub-warp, warp,
# several teams in a block, one team of the most threads, a cluster, streaming. The last of these
# fill the registers. row_threads alone changes only addresses, not what a thread holds. 97 and 2000
# are not full rows.
PACKS = (8, 32, 97, 128, 1024, 2000, 8192, 40_000)


def usual(x: str) -> tuple[str, ...]:
    """Weight, bias, y and dy as most callers have them."""
    return ("float32", "float32", x, x)


def widest(x: str) -> tuple[str, ...]:
    """Weight, bias, y and dy that take the most registers."""
    return ("float64", "float64", "float64", "float64")


@functools.cache
def instantiations(architecture: int) -> list[Instantiation]:
    # Elsewhere the code is that of one of these two in other instructions. So a sixteenth of what
    # takes the most registers is compiled there, and an eighth without clusters: compiling is a
    # third of CI's time. Nearly all code that spills is for 16 bits. The float16 code is the
    # bfloat16 code except for its conversions and a few layouts. So float16 is only compiled with
    # clusters, and not where single elements are moved, which takes twice as long as whole packs.
    every = architecture in (80, 90)
    kernels: dict[Instantiation, None] = {}

    def add(
        n: int,
        vectors: Iterable[int],
        forward: Sequence[ForwardSpec] = (),
        backward: Sequence[BackwardSpec] = (),
    ) -> None:
        for vector in vectors:
            if vector == 1 and any(spec.x == "float16" for spec in (*forward, *backward)):
                continue
            kernels.update(dict.fromkeys(forward_kernels(n, vector, architecture, *forward)))
            kernels.update(dict.fromkeys(backward_kernels(n, vector, architecture, *backward)))

    for norm, x, operands, packs in itertools.product(
        ("rms_norm", "layer_norm"),
        ("float64", "float32", *(("float16",) if architecture == 90 else ()), "bfloat16"),
        (usual, widest) if every else (usual,),
        PACKS,
    ):
        weight, bias, y, dy = operands(x)
        length = pack_length(x)
        # LayerNorm takes more than RMSNorm. Shorter rows have the same kernels with fewer threads.
        if operands is widest and (packs < 1024 or norm == "rms_norm"):
            continue
        # The ReLU where most registers are taken already, and once where lanes share a byte.
        relus = (False,)
        if packs >= 1024 or packs == 8:
            relus = (True, False) if every else (True,)
        forward = [ForwardSpec(norm, x, weight, bias, y, True, True, relu) for relu in relus]
        backward = [BackwardSpec(norm, x, dy, weight, bias, True, relu) for relu in relus]
        add(packs * length, (length,), forward, backward)
        # At any address. RMSNorm's rows fill their packs. LayerNorm's, which take more registers,
        # do not, like most rows.
        add(packs * length - (norm == "layer_norm"), (1,), forward, backward)
    # x with a residual of each width, in each regime. Elsewhere only the widest residual.
    dtypes = ("bfloat16", "float32") if architecture == 90 else ("bfloat16",)
    for norm, branch, residual, packs in itertools.product(
        ("rms_norm", "layer_norm"),
        dtypes,
        dtypes,
        (64, 300, 512, 1024, 2048, 8192, 40_000) if architecture == 90 else (512, 8192),
    ):
        n, bias = packs * pack_length(residual), "float32" if norm == "layer_norm" else None
        given = {"zero_centered": False, "weight": "float32"}
        of_sum = ForwardSpec(
            *(norm, residual), **given, bias=bias, y=branch, store_statistics=True, relu=False,
            branch=branch, residual=residual,
        )  # fmt: skip
        of_inputs = BackwardSpec(
            *(norm, residual), **given, dy=branch, dbias=bias, bitmask=False,
            dresidual_out=residual, dx=None if branch == residual else branch,
            dresidual=None if branch == residual else residual,
        )  # fmt: skip
        add(n, (pack_length(residual),), [of_sum], [of_inputs])
    for norm, x in itertools.product(("rms_norm", "layer_norm"), ("float32", "bfloat16")):
        bare = ForwardSpec(norm, x, None, None, x, False, False, False)
        add(4096, (pack_length(x),), [bare])
        for bias in (None, "float32"):
            gradients = BackwardSpec(norm, x, x, None, bias, False, False)
            add(4096, (pack_length(x),), (), [gradients])
    # Rows that fill their packs: 3, 5 and 7 packs a thread, and teams of other sizes. Rows that do
    # not, and do not begin at lines: 3 and 6 packs a thread in clusters of 2, and clusters of 8.
    at_no_lines = (2501, 5143, 8193)
    plain, zero_centered, relu, both = (False, False), (True, False), (False, True), (True, True)
    for x, packs, (norm, bias) in itertools.product(
        ("float32", "bfloat16") if every else ("bfloat16",),
        (40, 64, 96, 160, 448, 576, 896, 1152, 2304, *at_no_lines) if every else (160, 576, 896),
        (("rms_norm", None), ("layer_norm", "float32")),
    ):
        choices = (both, plain) if every else (both,)
        forward = [ForwardSpec(norm, x, "float32", bias, x, c, True, r) for c, r in choices]
        backward = [BackwardSpec(norm, x, x, "float32", bias, c, r) for c, r in choices]
        length = pack_length(x)
        add(packs * length, (length,), forward, backward)
        if packs in at_no_lines:
            continue
        add(packs * length - (norm == "layer_norm"), (1,), forward, backward)
        if packs in (40, 160, 576, 1152, 2304):  # moved by accesses of 8 bytes
            add(packs * length - length // 2, (length // 2,), forward, backward)
    # RMSNorm's rows that stay in registers: 2, 3, 5 and 6 packs a thread, in one to four blocks.
    for x, packs, bias in (
        *(("bfloat16", packs, None) for packs in (640, 672, 1472, 1536, 1664, 5120)),
        *(("float32", packs, None) for packs in (672, 1536, 5120)),
        *(("bfloat16", packs, "float32") for packs in (384, 512)),
    ):
        kept = BackwardSpec("rms_norm", x, x, "float32", bias, True, False)
        add(packs * pack_length(x), (pack_length(x),), (), [kept])
    # Rows that do not begin at lines and leave no room in L1. LayerNorm's have 7 packs a thread, in
    # a block and in two, by 448 threads and, forward, by two clusters at once. RMSNorm's come
    # through L1 too.
    for norm, packs in (*(("layer_norm", n) for n in (835, 1289, 3251)), ("rms_norm", 835)):
        x, bias = "bfloat16", "bfloat16" if norm == "layer_norm" else None
        for centred, clamped in (both, plain) if architecture == 90 else ():
            add(packs * 8, (8,), (), [BackwardSpec(norm, x, x, x, bias, centred, clamped)])
    if architecture == 90:
        for centred, clamped in (both, plain):
            long = ForwardSpec("layer_norm", *4 * ("bfloat16",), centred, True, clamped)
            add(26008, (8,), [long])
    # 16 packs of 8 bytes a thread, and 8 of 16 for the longest rows. Fewer packs, also at other
    # addresses.
    for packs in (750, 2500, 2900):
        eight = ForwardSpec("layer_norm", *4 * ("bfloat16",), True, True, True)
        add(packs * 8 - 4, (4,), [eight])
    for packs in (38, 513) if architecture == 90 else (38,):
        for norm in ("rms_norm", "layer_norm"):
            short = ForwardSpec(norm, *4 * ("bfloat16",), True, True, True)
            add(packs * 8 - 4, (1, 4), [short])
    # 14 packs for LayerNorm's float16. Few rows in clusters.
    add(15996, (4,), [ForwardSpec("layer_norm", *4 * ("float16",), True, True, True)])
    add(8188, (4,), [ForwardSpec("layer_norm", *4 * ("bfloat16",), False, True, False)])
    # Cells of another size for dy than for x, with a float32 weight held or not.
    for (x, dy), packs in itertools.product(
        (("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")),
        (17, 160, 640, 1300, 2304, 8192) if every else (),
    ):
        length = pack_length(x)
        for norm, vector in (("layer_norm", 1), ("rms_norm", 1), ("layer_norm", 4 // ITEMSIZE[x])):
            mixed = BackwardSpec(norm, x, dy, "float32", "float32", True, False)
            add(packs * length - vector, (vector,), (), [mixed])
    # 6 and 7 packs a thread of LayerNorm's rows that leave others empty, and of either norm's rows
    # in clusters of 8. 5 packs in clusters, where full rows have the kernels of others.
    for x, packs, bitmask in (
        *(("bfloat16", packs, False) for packs in (200, 800, 3000, 12288, 14336)),
        *(("float16", 3000, False), ("float32", 800, True), ("bfloat16", 2560, True)),
    ):
        length = pack_length(x)
        many = [
            BackwardSpec("layer_norm", x, x, "float32", "float32", True, bitmask),
            BackwardSpec("rms_norm", x, x, "float32", None, True, bitmask),
        ]
        add(packs * length, (1, length), (), many)
    # 8 packs a thread for LayerNorm, by 5 to 12 warps, and for few rows with weight and bias held.
    x = "bfloat16"
    choices = (both, plain) if every else (plain,)
    eights = [ForwardSpec("layer_norm", x, x, x, x, c, True, r) for c, r in choices]
    for packs in (1250, 3072):
        add(packs * 8, (8,), eights)
    # 8 packs a thread for few rows with a ReLU. Without a bias, most is held.
    if every:
        clamped = [ForwardSpec("layer_norm", x, x, b, x, False, True, True) for b in (x, None)]
        for packs in (1250, 2000, 3072):
            add(packs * 8, (8,), clamped)
        add(8192, (4,), [ForwardSpec("layer_norm", *4 * ("float32",), True, True, True)])
        add(16384, (8,), [ForwardSpec("rms_norm", x, x, None, x, False, True, True)])
    # LayerNorm of float16, by 9 to 16 warps, with two blocks a multiprocessor.
    long = [ForwardSpec("layer_norm", "float16", *3 * ("float16",), c, True, r) for c, r in choices]
    for packs in (1664, 1984, 2048):
        add(packs * 8, (8,), long)
    # 8 packs a thread for RMSNorm in registers.
    for x, weight in itertools.product(("float32", "float16", "bfloat16"), ("float32", None)):
        eight = ForwardSpec("rms_norm", x, weight, None, x, False, True, False)
        add(2048 * pack_length(x), (1, pack_length(x)), [eight])
    # 4 packs and the weight held, by 64 registers or 80, for rows that fill them and others.
    for n, weight, most in (
        (2696, "float32", True),
        (3072, "float32", False),
        (5632, "bfloat16", False),
        (6144, "bfloat16", False),
    ):
        held = ForwardSpec("rms_norm", "bfloat16", weight, None, "bfloat16", False, most, most)
        add(n, (8,), [held])
    # By 64 registers: LayerNorm's 4 packs of float16, few rows of 8 packs of float32, and few rows
    # whose threads stand for two each. By 72 registers: LayerNorm's 8 packs of bfloat16.
    for x, n in (
        *(("float16", 5632), ("float16", 10240), ("float32", 5120), ("float16", 12288)),
        *(("bfloat16", 16384), ("bfloat16", 14336), ("bfloat16", 18432)),
    ):
        add(n, (pack_length(x),), [ForwardSpec("layer_norm", *4 * (x,), False, True, False)])
    # RMSNorm holds the weight of float64 rows in 8 packs a thread.
    x = "float64"
    for centred, clamped in (both, plain) if every else (plain,):
        add(4096, (2,), [ForwardSpec("rms_norm", x, x, None, x, centred, True, clamped)])
    # From sm_90 on, rows of float64, and float32 rows of two blocks or more, are copied in bulk.
    for norm, (x, n), (centred, clamped) in itertools.product(
        ("rms_norm", "layer_norm"),
        (("float64", 768), ("float64", 4096), ("float32", 8192), ("float32", 16384)),
        (both, plain) if architecture >= 90 else (),
    ):
        bias = x if norm == "layer_norm" else None
        add(n, (pack_length(x),), (), [BackwardSpec(norm, x, x, x, bias, centred, clamped)])
    # Rows that 16 blocks stage in no other way: LayerNorm's with the bias in shared memory or,
    # without a ReLU, with 8 packs of float32 held.
    for norm, x, packs, (centred, clamped) in itertools.product(
        ("rms_norm", "layer_norm"),
        ("float32", "bfloat16"),
        (6, 8),
        (plain, zero_centered, both),
    ):
        weight = "float32" if packs == 6 else x
        bias = weight if norm == "layer_norm" else None
        longest = ForwardSpec(norm, x, weight, bias, x, centred, True, clamped)
        for vector in (1, pack_length(x)):
            n = 16 * 512 * packs * pack_length(x)
            config = forward_config(longest, n, vector, architecture)
            kernels[forward_instantiation(longest, config)] = None
            if x == "float32" and packs == 8:
                biased = dataclasses.replace(longest, bias="float32", store_statistics=False)
                config = forward_config(biased, n, vector, architecture)
                kernels[forward_instantiation(biased, config)] = None
    # Clusters of 16 blocks that hold 4 packs of weight and bias, with full blocks and without.
    for packs, rest, y in ((30720, 0, "bfloat16"), (32768, 0, "bfloat16"), (32768, 8, "float32")):
        for centred, clamped in (plain, relu) if y == "bfloat16" else (both,):
            held = ForwardSpec(
                "layer_norm", "bfloat16", "float32", "float32", y, centred, True, clamped
            )
            config = forward_config(held, packs * 8 - rest, 8, architecture)
            kernels[forward_instantiation(held, config)] = None
    # By a count: 16 blocks of 4 packs, two clusters of 16 at once, and 5 packs or more of float32.
    for norm, x, n in (
        *(("rms_norm", x, 32768 * pack_length(x)) for x in ("bfloat16", "float32")),
        *(("layer_norm", "float32", n) for n in (98304, 163840, 229376)),
    ):
        bias = "float32" if norm == "layer_norm" else None
        for centred, clamped in (both, plain):
            counted = ForwardSpec(norm, x, "float32", bias, x, centred, True, clamped)
            config = forward_config(counted, n, pack_length(x), architecture)
            kernels[forward_instantiation(counted, config)] = None
    # 16 blocks that stage 7 packs a thread spill most where they have least else to hold.
    for x, weight, y, centred in (
        ("bfloat16", "bfloat16", "bfloat16", False),
        ("bfloat16", "float32", "bfloat16", True),
        ("float16", "float16", "bfloat16", False),
    ):
        seven = ForwardSpec("layer_norm", x, weight, weight, y, centred, False, False)
        for vector in (1, 2, 4, 8):
            config = forward_config(seven, 7 * 65536, vector, architecture)
            kernels[forward_instantiation(seven, config)] = None
    # Two clusters at once: 5 packs a thread with a ReLU, 6 and 7 without, which spill like those.
    for (norm, x, packs, weight, y), rest in itertools.product(
        (
            *(("layer_norm", x, 5, "float32", x) for x in ("float32", "bfloat16")),
            *(("layer_norm", x, 6, "float32", x) for x in ("float32", "bfloat16")),
            *(("layer_norm", "bfloat16", packs, "bfloat16", "bfloat16") for packs in (5, 6, 7)),
            *(("layer_norm", "float16", packs, "float16", "float32") for packs in (6, 7)),
            ("layer_norm", "float32", 7, "float32", "float32"),
            ("rms_norm", "bfloat16", 6, "float32", "bfloat16"),
        ),
        (0, 1),
    ):
        bias = weight if norm == "layer_norm" else None
        most = packs < 7 and weight == "float32"
        two = ForwardSpec(norm, x, weight, bias, y, most, most, packs == 5)
        n = (256 * (2 if packs == 7 else 4) * packs - rest) * pack_length(x)
        # Odd rows by 224 threads of 7 packs, for which there is room.
        odd = n - 1 - (256 * pack_length(x) if packs == 7 else 0)
        for length, vector in ((n, 1), (n, pack_length(x)), (odd, 1)):
            config = forward_config(two, length, vector, architecture)
            kernels[forward_instantiation(two, config)] = None
    # Cells that spill: 6 packs by two clusters, 4 packs by one.
    for (weight, n, stored), centred in itertools.product(
        (("bfloat16", 163841, False), ("float32", 52827, True)), (False, True)
    ):
        spilling = ForwardSpec(
            "layer_norm", "bfloat16", weight, weight, "bfloat16", centred, stored, False
        )
        config = forward_config(spilling, n, 1, architecture)
        kernels[forward_instantiation(spilling, config)] = None
    # Rows with a third stage for the weight they hold. Some fill their packs.
    for stored, (centred, clamped), packs in itertools.product(
        (False, True), (plain, zero_centered, relu), (9000, 16384)
    ):
        held = ForwardSpec(
            "layer_norm", "bfloat16", "float32", "float32", "bfloat16", centred, stored, clamped
        )
        config = forward_config(held, packs * 8, 8, architecture)
        kernels[forward_instantiation(held, config)] = None
    # Rows in groups, whose columns share elements or do not, and rows side by side.
    for norm, x, shared in (
        *(("layer_norm", "bfloat16", False), ("layer_norm", "bfloat16", True)),
        *(("rms_norm", "bfloat16", False), ("layer_norm", "float32", False)),
    ):
        if not every and (shared or x == "float32"):
            continue
        weight, bias, y, dy = usual(x)
        length = pack_length(x)
        sharing = {"grouped": True, "repeats": length if shared else 0}
        for packs in (128, 512, 2048, 8192) if architecture == 90 else (512, 8192):
            grouped = ForwardSpec(norm, x, weight, bias, y, True, True, False, **sharing)
            of_grouped = BackwardSpec(norm, x, dy, weight, bias, True, False, **sharing)
            add(packs * length, (length,), (grouped,), (of_grouped,))
        for n, vector in itertools.product((96, 384), (1, length)):
            alone = ForwardSpec(norm, x, weight, bias, y, True, True, False)
            of_alone = BackwardSpec(norm, x, dy, weight, bias, True, False)
            for spec in (alone, of_alone):
                config = strided(spec, n, vector, architecture)
                of_tiles = backward_instantiations if spec is of_alone else forward_instantiation
                found = of_tiles(spec, config)
                kernels.update(dict.fromkeys(found if spec is of_alone else (found,)))
    # Strips: few threads with long groups, and the most threads.
    for norm, x, wide, packs in itertools.product(
        ("rms_norm", "layer_norm"),
        ("float64", "float32", "float16", "bfloat16"),
        (False, True),
        (24_576, 32_768, 49_152, 65_536),
    ):
        if not every and (wide or x == "float16"):
            continue
        if packs in (32_768, 49_152) and (wide or x in ("float64", "float16")):
            continue
        weight, bias, _, dy = (widest if wide else usual)(x)
        n = packs * pack_length(x)
        for vector, of_dy in itertools.product((1, pack_length(x)), dict.fromkeys((dy, "float32"))):
            if of_dy != dy and (wide or x == "float64" or packs < 65_536):
                continue
            strips = [
                BackwardSpec(norm, x, of_dy, weight, bias, bitmask, bitmask)
                for bitmask in (True, False)
            ]
            config = backward_config(strips[0], n, vector, architecture)
            if isinstance(config, BackwardColumnParallel):
                add(n, (vector,), (), strips)
    # Streamed by two blocks a multiprocessor, with 32 registers a thread.
    for x, zero_centered in itertools.product(("float32", "float16", "bfloat16"), (False, True)):
        for weight in ("float32", x) if zero_centered else ("float32", x, None):
            streamed = ForwardSpec("rms_norm", x, weight, None, x, zero_centered, True, False)
            for vector in (1, pack_length(x)):
                config = forward_config(streamed, 4096 * pack_length(x), vector, architecture)
                kernels[forward_instantiation(streamed, config)] = None
    # Streamed by clusters, with 64 registers a thread.
    for norm, x, y in itertools.product(
        ("rms_norm", "layer_norm"), ("float32", "bfloat16"), ("float32", "bfloat16")
    ):
        for weight, bias in ((x, "float32"), ("float32", x), (None, None)):
            zero_centered = weight == "float32"
            streamed = ForwardSpec(norm, x, weight, bias, y, zero_centered, True, False)
            config = forward_config(streamed, 40_000 * pack_length(x), pack_length(x), architecture)
            kernels[forward_instantiation(streamed, config)] = None

    def number(kernel: Instantiation) -> int:
        """Choose by the kernel alone, so that other kernels change nothing."""
        return zlib.crc32(str(kernel).encode())

    def share(kernel: Instantiation) -> int:
        if architecture != 90:
            return 8 * one_in(6) if architecture == 80 else 16 * one_in(4)
        members = members_of(kernel)
        every_nth = 8
        if members["X"] == "bfloat16":
            every_nth = 1 if members["kVector"] == 8 else 4
        if kernel.overlaps:  # all kernels that wait for another one, or most
            return every_nth * (one_in(3) if "columns" in kernel.name else 1)
        return every_nth * one_in(72)

    few = (*several_rows_kernels(architecture), *columns_kernels(architecture))
    chosen = [kernel for kernel in kernels if number(kernel) % share(kernel) == 0]
    chosen += [kernel for kernel in few if number(kernel) % one_in(48) == 0]
    if architecture == 90:  # one at least of each kind that spills
        every = {str(kernel): kernel for kernel in (*kernels, *few)}
        for kind in SPILLED:
            own = [kernel for name, kernel in every.items() if re.match(kind, name)]
            assert own, f"no kernel is of the kind {kind}"
            chosen.append(min(own, key=number))
    return list(dict.fromkeys(chosen))


def members_of(kernel: Instantiation) -> dict[str, str | bool | int]:
    """Return the members of a kernel's Op and Layout."""
    return dict((*kernel.op, *kernel.layout))


def forward_kernels(
    n: int, vector: int, architecture: int, *specs: ForwardSpec
) -> Iterator[Instantiation]:
    """Yield the kernels of many rows, and of few rows that have some of their own."""

    def configs(
        spec: ForwardSpec,
    ) -> list[ForwardInRegisters | ForwardPipelined | ForwardStreaming]:
        config = forward_config(spec, n, vector, architecture)
        if not isinstance(config, ForwardInRegisters):
            return [config]
        few_rows = few_rows_configs(spec, config, n, architecture, multiprocessors=132)
        return [config, *(few for _, few in few_rows)]

    for spec, config in unlike(specs, configs):
        yield forward_instantiation(spec, config)


def backward_kernels(
    n: int, vector: int, architecture: int, *specs: BackwardSpec
) -> Iterator[Instantiation]:
    """Yield the kernels of many rows, and few rows' own kernels with the most registers."""

    def configs(spec: BackwardSpec) -> list[BackwardConfig]:
        config = backward_config(spec, n, vector, architecture)
        if not isinstance(config, BackwardPipelined):
            return [config]
        # A lone row's kernel stores the weight gradients in another type. It is compiled for
        # whole packs only, since single elements take longest to compile.
        lone = int(vector != pack_length(spec.x))
        tiers = [few for _, few in few_rows_backward_configs(spec, config, architecture, 132)]
        beside_columns = [few for few in tiers if few.column_threads][-1:]
        if not spec.bitmask:
            return [config, *beside_columns]
        of_a_row_each = [f for f in tiers if f.rows_per_block == 1 and not f.column_threads][lone:]
        return [config, *of_a_row_each, *beside_columns]

    for spec, config in unlike(specs, configs):
        yield from backward_instantiations(spec, config)


def columns_kernels(architecture: int) -> Iterator[Instantiation]:
    """Yield kernels of few rows whose weight gradients other blocks sum, one for each layout."""
    dtypes = [("bfloat16", "float32"), ("float64", "float64")]
    if architecture == 90:
        dtypes += [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float64")]
    for norm, (x, weight), packs in itertools.product(
        ("rms_norm", "layer_norm"), dtypes, (32, 128, 250, 256, 512, 1024)
    ):
        bias = weight if norm == "layer_norm" else None
        spec = BackwardSpec(norm, x, x, weight, bias, True, True)
        config = backward_config(spec, packs * pack_length(x), pack_length(x), architecture)
        if isinstance(config, BackwardPipelined):  # sm_75 streams the longest rows
            for _, few in few_rows_backward_configs(spec, config, architecture, 132):
                if few.column_threads:
                    yield from backward_instantiations(spec, few)


def several_rows_kernels(architecture: int) -> Iterator[Instantiation]:
    """Yield kernels of several rows a block, by the most threads that some row lengths have."""
    rows = [("bfloat16", "float32", packs) for packs in (128, 250, 256)]
    if architecture == 90:
        others = [("bfloat16", "bfloat16"), *((x, x) for x in ("float16", "float32", "float64"))]
        rows += [("bfloat16", "float32", packs) for packs in (16, 32, 96, 187.5, 512, 672)]
        rows += [(*dtypes, packs) for dtypes in others for packs in (32, 250)]
    for norm, (x, weight, packs), option in itertools.product(
        ("rms_norm", "layer_norm"), rows, (False, True)
    ):
        bias = weight if norm == "layer_norm" else None
        spec = BackwardSpec(norm, x, x, weight, bias, option, option)
        n = int(packs * pack_length(x))
        vector = pack_length(x) if packs == int(packs) else pack_length(x) // 2
        config = backward_config(spec, n, vector, architecture)
        assert isinstance(config, BackwardPipelined)
        tiers = few_rows_backward_configs(spec, config, architecture, 132)
        several = [few for _, few in tiers if few.rows_per_block > 1 and few.reduction]
        if several:
            yield backward_instantiations(spec, several[-1])[0]


def unlike(
    specs: Iterable[Spec], configs: Callable[[Spec], list[Config]]
) -> Iterator[tuple[Spec, Config]]:
    """Yield each configuration once, with the first of the operations that has it.

    If the operation with the most registers comes first, the kernels of the others are its own
    without a part.
    """
    known: list[Config] = []
    for spec in specs:
        for config in configs(spec):
            if config not in known:
                known.append(config)
                yield spec, config


def groups(kernels: list[Instantiation]) -> Iterator[tuple[Instantiation, ...]]:
    """Yield the kernels of a file in groups. A group is parsed once."""
    for file in {kernel.file: None for kernel in kernels}:
        own = [kernel for kernel in kernels if kernel.file == file]
        yield from (tuple(own[i : i + 24]) for i in range(0, len(own), 24))


@dataclass(frozen=True)
class Compiled:
    """Kernels of one file: what ptxas says of each, their symbols, and the machine code of all."""

    logs: dict[Instantiation, str]
    symbols: dict[str, Instantiation]
    cubin: bytes


@functools.cache  # tests of registers and of machine code share it
def compiled(kernels: tuple[Instantiation, ...], architecture: str) -> Compiled:
    """Compile kernels of one file."""
    file = kernels[0].file
    structs = "".join(kernel.structs(f"_{i}") for i, kernel in enumerate(kernels))
    expressions = {kernel: kernel.expression(f"_{i}") for i, kernel in enumerate(kernels)}
    program = nvrtc.createProgram(source(file) + structs, file, (), ())
    try:
        for expression in expressions.values():
            nvrtc.addNameExpression(program, expression)
        options = (*OPTIONS, *CUPY_OPTIONS, f"-arch=sm_{architecture}", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise AssertionError(f"{file}: {error}\n{nvrtc.getProgramLog(program)}") from error
        _, *logs = str(nvrtc.getProgramLog(program)).split("Compiling entry function '")
        by_name = dict(log.split("'", maxsplit=1) for log in logs)
        symbols = {nvrtc.getLoweredName(program, e): kernel for kernel, e in expressions.items()}
        # CuPy drops the last byte, as it expects a terminating zero. A cubin has none.
        cubin = nvrtc.getCUBIN(program) + b"\0"
        return Compiled({k: by_name[name] for name, k in symbols.items()}, symbols, cubin)
    finally:
        nvrtc.destroyProgram(program)


def kernels_with(name: str, **members: str) -> str:
    """Return a pattern of kernels with this name. The patterns of members must match too."""
    return f"{name}<" + "".join(rf"(?=.*\b{key}=({value})[,>])" for key, value in members.items())


# These kernels spill. Layouts that have enough registers are slower. SPILLED has the bytes. Times
# are on an H200.
# - LayerNorm of 18432, backward: 205 us with the weight held, 283 us by smaller blocks. With the
#   sums of its rows in shared memory it spills 32 bytes, and takes 224 us, not 228.
# - A ReLU and a 1 to be added spill most.
# - Messengers make strips faster. With them the widest strips leave too few registers for 16-bit
#   rows that are moved by single elements or have a bitmask.
# - By cells, rows take a third of the time in the backward. By cells, rows of 16 blocks take half
#   the time in the forward.
# - Before sm_90 no asynchronous copy has a policy. There, several teams keep so many addresses that
#   too few registers are left for a weight around zero that is held with a bitmask.
# - By two clusters at once, with 7 packs a thread, LayerNorm of 28672 takes 234 us. By one cluster
#   it takes 249 us.
# - 16 blocks hold 16-bit rows, with 5 packs a thread or more, that would be read twice otherwise.
#   With 4 packs, weight and bias held, 2048 rows of 262144 take 547 us, not 686. Storing float32 by
#   sectors takes 246 us for 512 rows, not 405. It spills 40 bytes with a ReLU and a 1 to be added.
# - With 7 packs, LayerNorm of 585 rows of 114688 takes 113 us in the backward. With 4 packs it
#   takes 123 us. At addresses that allow only single elements, 6 or 7 packs have the same bits.
# - A weight held with a bitmask and 5 packs of two gradients spills 80 to 120 bytes, if the
#   compiler knows that the row fills the packs.
# - With the weight held, LayerNorm of 13107 rows of 5197 float32, by cells and 448 threads, takes
#   235 us. Without it takes 239 us.
LAYER_NORM_BY_8_PACKS = kernels_with(
    "norm_forward_in_registers",
    X="bfloat16",
    kCentered="true",
    kRareLast="false",
    kBlocksAheadIfLarge="0",
    kHoldWeight="false",
    kPacksPerThread="8",
    kPackLength="8",
    kVector="8",
)
# On sm_120 nothing was measured. On an H200 with bfloat16, by 640 threads a multiprocessor and by
# 512: 20000 rows of 6004 take 127 us and 135 us, 10000 rows of 12004 take 138 us and 159 us.
LAYER_NORM_BY_PACKS_OF_8_BYTES = kernels_with(
    "norm_forward_in_registers",
    X="b?float16",
    kCentered="true",
    kRareLast="false",
    kHoldWeight="false",
    kPacksPerThread="1[1-6]",
    kPackLength="4",
    kVector="4",
)
# By cells, of odd length, with bfloat16 and float32 weight and bias on an H200: 5600 rows of 12001
# take 106 us, and 126 us by 384 threads a multiprocessor. 6990 rows of 9599, which spill most, take
# 98.7 us, and 99.6 us where they spilled less. 14563 rows of 4607 take 90.6 us, and 97.0 us by 640
# threads.
LAYER_NORM_BY_PACKS_OF_8_BYTES_ANYWHERE = kernels_with(
    "norm_forward_in_registers",
    X="bfloat16",
    kCentered="true",
    kRareLast="false",
    kHoldWeight="false",
    kPacksPerThread="1[2-6]",
    kPackLength="4",
    kVector="[12]",
)
# Few rows by 64 registers, bfloat16 on an H200: 512 rows of LayerNorm's 16384, whose threads
# stand for two each, take 13.6 us, not 15.1. RMSNorm's take 13.1 us, not 14.6.
FOLDED = kernels_with(
    "norm_forward_in_registers",
    X="b?float16",
    kRareLast="false",
    kBlocksAhead="0",
    kBlocksAheadIfLarge="0",
    kHoldWeight="false",
    kClusterBlocks="1",
    kFolded="true",
    kBlocksPerMultiprocessor="[456]",
    kPacksPerThread="8",
    kPackLength="8",
    kFull="true",
    kVector="8",
)
RMS_NORM_AT_ONCE = kernels_with(
    "norm_forward_in_registers",
    X="b?float16",
    kCentered="false",
    kZeroCentered="false",
    Epilogue="Identity",
    kRareLast="false",
    kBlocksAhead="0",
    kBlocksAheadIfLarge="0",
    kHoldWeight="false",
    kClusterBlocks="1",
    kFolded="false",
    kBlocksPerMultiprocessor="[456]",
    kPacksPerThread="8",
    kPackLength="8",
    kFull="true",
    kVector="8",
)
# bfloat16 on an H200: 11915 rows of 5632 take 66.6 us, and 69.5 us by 640 threads a multiprocessor.
# With a float32 weight, 24892 rows of 2696 take 70.8 us, not 75.1. On other GPUs this is so for
# full rows only.
RMS_NORM_HOLDS_4_PACKS = kernels_with(
    "norm_forward_in_registers",
    X="bfloat16",
    kCentered="false",
    kRareLast="false",
    kHoldWeight="true",
    kClusterBlocks="1",
    kPacksPerThread="4",
    kPackLength="8",
    kVector="8",
)
MANY_PACKS = kernels_with(
    "norm_backward_pipelined",
    X="b?float16",
    kPacksPerThread="[67]",
    kBlocksPerMultiprocessor="1",
    kFull="false",
    kVector="8",
)
MANY_PACKS_IN_CLUSTERS = kernels_with(
    "norm_backward_pipelined",
    X="b?float16",
    kClusterBlocks="[248]|16",
    kPacksPerThread="5",
    kBlocksPerMultiprocessor="1",
    kFull="false",
    kVector="8",
)
MANY_PACKS_BY_SINGLE_ELEMENTS = kernels_with(
    "norm_backward_pipelined",
    X="b?float16",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="[67]",
    kFull="false",
    kVector="1",
)
LAYER_NORM_IN_PAIRS = kernels_with(
    "norm_backward_pipelined",
    X="bfloat16",
    kStages="3",
    kClusterBlocks="2",
    kRowThreads="384",
    kBlockThreads="384",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="3",
    kFull="true",
    kVector="8",
)
BY_CELLS = kernels_with(
    "norm_backward_pipelined",
    X="b?float16",
    kCells="true",
    kPacksPerThread="[2-7]",
    kVector="[12]",
)
# The kernel that spills most of these. On sm_120 also LayerNorm's by 416 and 448 threads, where
# nothing was measured.
CELLS_BESIDE_A_BITMASK = kernels_with(
    "norm_backward_pipelined",
    X="bfloat16",
    DY="bfloat16",
    DBias="float",
    kCentered="true",
    kZeroCentered="true",
    Epilogue="Clamp",
    kHoldWeight="false",
    kRowThreads="192",
    kBlockThreads="384",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="3",
    kFull="false",
    kVector="1",
)
CELLS_ON_120 = kernels_with(
    "norm_backward_pipelined",
    X="bfloat16",
    kCells="true",
    kThroughL1="false",
    kStages="2",
    kClusterBlocks="1",
    kRowThreads="416|448",
    kBlockThreads="416|448",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="2",
    kFull="false",
    kVector="1",
)
HELD_BESIDE_CELLS = kernels_with(
    "norm_backward_pipelined",
    X="float",
    kHoldWeight="true",
    kHoldRow="false",
    kHoldSums="false",
    kBulk="false",
    kCells="true",
    kBlockThreads="448",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="3",
    kVector="1",
)
# Wide accesses: LayerNorm takes 162 us, not 170, for 8192 rows of 10396 (H200).
BY_8_BYTES = "|".join(
    kernels_with("norm_backward_pipelined", X=x, kVector=vector)
    for x, vector in (("b?float16", "4"), ("float", "2"), ("double", "1"))
)
# bfloat16 with a bitmask and a float32 weight around zero, on an H200: 1000 rows of 2000 take 12.6
# us for LayerNorm, and 13.2 us if they wait in shared memory. RMSNorm's take 10.5 us and 12.1 us.
BY_1024_THREADS = kernels_with(
    "norm_backward_in_registers",
    X="b?float16|double",
    kBlockThreads="1024",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="2",
)
RESIDENT_BY_PAIRS = kernels_with(
    "norm_backward_in_registers", X="b?float16", kPacksPerThread="[67]", kVector="1"
)
BESIDE_A_BITMASK = kernels_with(
    "norm_backward_pipelined",
    X="b?float16",
    DBias="float",
    kCentered="true",
    kZeroCentered="true",
    Epilogue="Clamp",
    kHoldWeight="true",
    kHoldRow="false",
    kSharedSums="2",
    kHoldSums="false",
    kBulk="false",
    kCells="false",
    kThroughL1="false",
    kClusterBlocks="1",
    kFull="true",
    kVector="8",
)
STRIPS_BY_SINGLE_ELEMENTS = kernels_with(
    "norm_backward_column_parallel",
    X="b?float16",
    kStripThreads="512",
    kGroupRows="[12]",
    kVector="1",
)
STRIPS_WITH_BITMASK = "|".join(
    kernels_with(
        "norm_backward_column_parallel",
        X="b?float16",
        Epilogue="Clamp",
        kStripThreads=threads,
        kGroupRows=rows,
        kVector="8",
    )
    for threads, rows in (("512", "[12]"), ("320", "4"))
)
# Few rows with a bitmask and a weight around zero, and the record of a row out of range. Other
# blocks sum their columns.
FEW_BESIDE_COLUMNS = kernels_with(
    "norm_backward_in_registers",
    X="bfloat16",
    kCentered="true",
    kZeroCentered="true",
    Epilogue="Clamp",
    kColumnLanes="1",
    kClusterBlocks="1",
    kRowThreads="128",
    kBlockThreads="128",
    kBlocksPerMultiprocessor="8",
    kPacksPerThread="2",
    kFull="false",
    kVector="8",
)
LAYER_NORM_BY_TWO_CLUSTERS = kernels_with(
    "norm_forward_pipelined",
    X="b?float16",
    kBlocksPerMultiprocessor="2",
    kPacksPerThread="[67]",
    kCells="false",
    kVector="8",
)
# bfloat16 with float32 weight and bias, on an H200: 5000 rows of 12289 take 130 us, and 144 us with
# the weight in shared memory.
LAYER_NORM_HELD_BESIDE_CELLS = kernels_with(
    "norm_forward_pipelined",
    X="bfloat16",
    kHoldWeight="true",
    kHoldBias="false",
    kStages="3",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="4",
    kCells="true",
    kVector="[12]",
)
LAYER_NORM_HELD_BY_16_BLOCKS = kernels_with(
    "norm_forward_pipelined",
    X="b?float16",
    kHoldWeight="true",
    kHoldBias="true",
    kStages="3",
    kClusterBlocks="16",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="4",
    kCounted="false",
    kCells="false",
    kVector="8",
)
# LayerNorm's rows of 4 packs with a residual, weight and bias held. They spill 8 bytes if all is
# bfloat16, at 1.01 of the limit for 32768 rows of 16384 (H200), and more if x is wider.
LAYER_NORM_BESIDE_A_RESIDUAL = kernels_with(
    "norm_forward_pipelined",
    Prologue="AddResidual",
    kCentered="true",
    kPacksPerThread="4",
    kHoldWeight="true",
    kHoldBias="true",
)
FEW_BESIDE_DRESIDUAL_OUT = kernels_with(
    "norm_backward_in_registers",
    DResidualOut="b?float16",
    kCentered="true",
    kColumnLanes="1",
    kPacksPerThread="2",
)
SPILLED = {
    LAYER_NORM_BESIDE_A_RESIDUAL: 56,
    FEW_BESIDE_DRESIDUAL_OUT: 8,
    LAYER_NORM_BY_8_PACKS: 16,
    LAYER_NORM_BY_PACKS_OF_8_BYTES_ANYWHERE: 88,
    FOLDED: 52,
    RMS_NORM_AT_ONCE: 8,
    MANY_PACKS: 48,
    MANY_PACKS_IN_CLUSTERS: 36,
    MANY_PACKS_BY_SINGLE_ELEMENTS: 64,
    LAYER_NORM_IN_PAIRS: 32,
    STRIPS_BY_SINGLE_ELEMENTS: 72,
    STRIPS_WITH_BITMASK: 48,
    FEW_BESIDE_COLUMNS: 8,
    BY_CELLS: 80,
    CELLS_BESIDE_A_BITMASK: 96,
    HELD_BESIDE_CELLS: 8,
    BY_8_BYTES: 16,
    BY_1024_THREADS: 32,
    RESIDENT_BY_PAIRS: 64,
    BESIDE_A_BITMASK: 16,
    LAYER_NORM_BY_TWO_CLUSTERS: 32,
    LAYER_NORM_HELD_BESIDE_CELLS: 24,
    LAYER_NORM_HELD_BY_16_BLOCKS: 40,
}
# RMSNorm of 13312 around zero, on sm_80. Nothing was measured there.
AROUND_ZERO_ON_80 = kernels_with(
    "norm_backward_pipelined",
    X="bfloat16",
    DY="bfloat16",
    Weight="float",
    DBias="None",
    kCentered="false",
    kZeroCentered="true",
    kRowThreads="416",
    kBlockThreads="416",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="4",
    kFull="true",
    kVector="8",
)
# On sm_80. Nothing was measured there.
FEW_BY_1024_THREADS_ON_80 = kernels_with(
    "norm_backward_in_registers",
    X="bfloat16",
    kColumnLanes="0",
    kClusterBlocks="1",
    kRowThreads="128",
    kBlockThreads="1024",
    kBlocksPerMultiprocessor="1",
    kPacksPerThread="2",
    kFull="false",
    kVector="8",
)
# Few rows of float32 with 8 packs, weight and bias held, on sm_100 and sm_120. Nothing was measured
# there.
FEW_OF_8_PACKS = kernels_with(
    "norm_forward_in_registers",
    X="float",
    kCentered="true",
    kRowThreads="160",
    kBlocksPerMultiprocessor="3",
    kPacksPerThread="8",
    kRareLast="true",
    kHoldWeight="true",
    kFull="true",
)
# Few float32 rows of groups with 8 packs, weight and bias held, in clusters of two. Nothing was
# measured there.
FEW_OF_GROUPS_BY_8_PACKS = kernels_with(
    "norm_forward_in_registers",
    X="float",
    kCentered="true",
    kGrouped="true",
    kRowThreads="128",
    kBlocksPerMultiprocessor="4",
    kPacksPerThread="8",
    kClusterBlocks="2",
    kRareLast="true",
    kHoldWeight="true",
    kFull="true",
)
ON_120 = {
    CELLS_ON_120: 144,
    FEW_OF_8_PACKS: 68,
    LAYER_NORM_BY_8_PACKS: 24,
    LAYER_NORM_BY_PACKS_OF_8_BYTES: 52,
    RMS_NORM_HOLDS_4_PACKS: 32,
}
SPILLED_ON = {
    "80": {AROUND_ZERO_ON_80: 8, FEW_BY_1024_THREADS_ON_80: 36},
    "90": {RMS_NORM_HOLDS_4_PACKS: 16, FEW_OF_GROUPS_BY_8_PACKS: 16},
    "100": {RMS_NORM_HOLDS_4_PACKS: 16, FEW_OF_8_PACKS: 32},
    "120": ON_120,
}
# These bytes are those of NVRTC 12.9, the last version of CUDA 12, which CI has. Other versions
# also spill elsewhere: 13.0 spills 4 bytes in two of these kernels, on sm_100 and sm_120. 13.2 and
# 13.5 spill up to 96 bytes in five, on sm_90.
BY_NVRTC = (12, 9)
BY_OTHERS = 96


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_configuration_spills_but_by_choice(architecture: str) -> None:
    least = 0 if nvrtc.getVersion() == BY_NVRTC else BY_OTHERS
    kernels = instantiations(int(architecture))
    logs: dict[Instantiation, str] = {}
    with ThreadPoolExecutor() as pool:  # NVRTC runs without the interpreter's lock
        for found in pool.map(lambda group: compiled(group, architecture), groups(kernels)):
            logs |= found.logs
    assert logs.keys() == set(kernels)
    problems = []
    for kernel, log in logs.items():
        registers = int(re.search(r"Used (\d+) registers", log)[1])
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        assert spilled, f"no report of spills in {log!r}"
        local = int(re.search(r"(\d+) bytes stack frame", log)[1])
        allowed = {"": least} | SPILLED | SPILLED_ON.get(architecture, {})
        most = max(n for kind, n in allowed.items() if re.match(kind, str(kernel)))
        # A warp gets registers in eights.
        too_many = -(-registers // 8) * 8 * kernel.block_threads > 65536
        # Wild rows of a group read a copy of the arguments, of 30 members.
        is_copied = kernel.name == "norm_backward_pipelined" and ("kGrouped", True) in kernel.op
        copied = 240 if is_copied else 0
        local = max(0, local - copied)
        an_array = local > max(spilled) + 8  # a frame is in steps of 8 bytes
        if max(*spilled, local) > most or an_array or too_many:
            problems.append(f"{kernel}: {registers} registers, spills {spilled}, {local} local")
    assert not problems, "\n".join(problems)


def spilled_bytes(kernel: Instantiation) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill", compiled((kernel,), "90").logs[kernel])))


@pytest.mark.parametrize(
    ("norm", "x", "n"),
    [
        *(("rms_norm", "bfloat16", 1000), ("layer_norm", "bfloat16", 4096)),
        *(("rms_norm", "float32", 2048), ("layer_norm", "float16", 400_000)),
    ],
)
def test_kernels_that_add_their_sums_spill_no_more_than_those_that_write_them(
    norm: str, x: str, n: int
) -> None:
    bias = x if norm == "layer_norm" else None
    plain = BackwardSpec(norm, x, x, x, bias, True, True)
    wide = dataclasses.replace(
        plain, dbias=bias and "float64", dweight="float64", sums_given=True, accumulate=True
    )
    config = backward_config(plain, n, pack_length(x), 90)
    tiers = few_rows_backward_configs(plain, config, 90, 132)
    of_columns = [few for _, few in tiers if few.column_threads][-1:]
    for one in (config, *of_columns):
        pairs = zip(*(backward_instantiations(spec, one) for spec in (plain, wide)), strict=True)
        changed = [(before, after) for before, after in pairs if before != after]
        assert len(changed) == 1
        for before, after in changed:
            assert spilled_bytes(after) <= spilled_bytes(before), str(after)


def disassembler() -> str | None:
    """Return the path of nvdisasm, from a toolkit or the wheel nvidia-cuda-nvdisasm."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    wheels = [str(path) for folder in folders for path in Path(folder).glob("cu*/bin")]
    return shutil.which("nvdisasm", path=os.pathsep.join([os.environ.get("PATH", ""), *wheels]))


def disassembled(
    kernels: tuple[Instantiation, ...], folder: Path, architecture: str = "90"
) -> dict[Instantiation, str]:
    """Return the machine code of kernels of one file."""
    found = compiled(kernels, architecture)
    path = folder / f"{abs(hash(kernels))}.cubin"
    path.write_bytes(found.cubin)
    command = [str(disassembler()), "-c", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *sections = re.split(r"\.section\s+\.text\.(\w+),", text)
    by_symbol = dict(zip(sections[::2], sections[1::2], strict=True))
    return {kernel: by_symbol[symbol] for symbol, kernel in found.symbols.items()}


def all_disassembled(
    kernels: list[Instantiation], folder: Path, architecture: str = "90"
) -> Iterator[tuple[Instantiation, str]]:
    """Yield kernels of any files, each with its machine code."""
    with ThreadPoolExecutor() as pool:
        parts = groups(list(dict.fromkeys(kernels)))
        for found in pool.map(lambda group: disassembled(group, folder, architecture), parts):
            yield from found.items()


def machine_code(
    matches: Callable[[Instantiation], object], folder: Path, architecture: str = "90"
) -> Iterator[tuple[Instantiation, str]]:
    """Yield the configurations that match, each with its machine code."""
    # In the groups of `test_no_configuration_spills_but_by_choice`, which are compiled already.
    every = groups(instantiations(int(architecture)))
    chosen = (kernel for group in every if any(map(matches, group)) for kernel in group)
    for kernel, code in all_disassembled(list(chosen), folder, architecture):
        if matches(kernel):
            yield kernel, code


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
def test_what_is_held_is_asked_for_before_the_row_is_measured(tmp_path: Path) -> None:
    held = {"Epilogue": "Identity", "kHoldWeight": True, "kVector": 8}.items()
    kernels: list[Instantiation] = []
    for weight, n in itertools.product(
        ("bfloat16", "float32"), (256, 1024, 2048, 3000, 4096, 8192)
    ):
        spec = ForwardSpec("rms_norm", "bfloat16", weight, None, "bfloat16", False, True, False)
        own = [k for k in forward_kernels(n, 8, 90, spec) if held <= members_of(k).items()]
        assert own, (weight, n)
        kernels += own
    for kernel, code in all_disassembled(kernels, tmp_path):
        asked, computed = (
            [found.start() for found in re.finditer(rf"\b{operation}", code)]
            for operation in ("LDG", "FFMA")
        )
        assert max(asked) < min(computed), str(kernel)


def check_places_of_copies(kernel: Instantiation, code: str) -> None:
    """Check that no part of a copy's address is in a uniform register: the policy is in one."""
    copies = re.findall(r"(?:LDGSTS|UBLKCP)[^;]*", code)  # asynchronous copies, in bulk or not
    assert copies, str(kernel)
    # The descriptor has the policy. It does not show which of the copies have one.
    wrong = [copy for copy in copies if ".128" in copy and re.search(r"\[R\d+\+UR", copy)]
    assert not wrong, f"{kernel}: {wrong[0]}"


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(
    ("architecture", "most"), [("90", 120 // one_in(15)), ("100", 2), ("120", 1)]
)
def test_no_copy_with_a_policy_has_a_part_of_its_place_in_a_uniform_register(
    architecture: str, most: int, tmp_path: Path
) -> None:
    def has_copies_with_policies(kernel: Instantiation) -> bool:
        members = members_of(kernel)
        pipelined = kernel.file in ("backward_pipelined.cu", "forward_pipelined.cu")
        return pipelined and members["X"] != "double" and members["kVector"] in (4, 8)

    checked = 0
    for kernel, code in machine_code(has_copies_with_policies, tmp_path, architecture):
        check_places_of_copies(kernel, code)
        checked += 1
    assert checked > most


# By themselves: of the widest kernels above, all strips have a bitmask.
@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("architecture", ["90", "100"])
def test_no_copy_to_strips_has_a_part_of_its_place_in_a_uniform_register(
    architecture: str, tmp_path: Path
) -> None:
    kernels: list[Instantiation] = []
    every = itertools.product(
        (("float32", 262144), ("bfloat16", 262144), ("float16", 400_000)),
        (("rms_norm", None), ("layer_norm", "float32")),
        (False, True),
    )
    step = one_in(2 if architecture == "90" else 3)
    for (x, n), (norm, bias), bitmask in itertools.islice(every, 0, None, step):
        spec = BackwardSpec(norm, x, x, "float32", bias, False, bitmask)
        config = backward_config(spec, n, pack_length(x), int(architecture))
        assert isinstance(config, BackwardColumnParallel)
        kernels += backward_instantiations(spec, config)
    for kernel, code in all_disassembled(kernels, tmp_path, architecture):
        check_places_of_copies(kernel, code)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
def test_kernels_wait_for_the_one_before_them(tmp_path: Path) -> None:
    overlapping = dict(machine_code(lambda kernel: kernel.overlaps, tmp_path))
    assert {kernel.name for kernel in overlapping} == {
        "norm_backward_in_registers_columns",
        "reduce_partials",
        "reduce_repeats",
    }
    of_bias_alone = [
        kernel
        for kernel in overlapping
        if members_of(kernel).get("Weight") == members_of(kernel)["DWeight"] == "None"
    ]
    assert of_bias_alone
    for kernel, code in overlapping.items():
        before, *after = code.split("ACQBULK")
        assert after, str(kernel)
        # A kernel reads the other's results, and writes anything, only after the wait. The gradient
        # of a bias alone reads nothing of them.
        assert "STG" not in before, str(kernel)
        assert ("LDG" in after[-1]) == (kernel not in of_bias_alone), str(kernel)
        assert ("LDG" in before) == ("columns" in kernel.name), str(kernel)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_the_next_kernel_is_let_start_where_one_of_ours_overlaps(norm: str, tmp_path: Path) -> None:
    x, followed = "bfloat16", {}
    for weight, bias in ((None, None), (x, x if norm == "layer_norm" else None)):
        spec = BackwardSpec(norm, x, x, weight, bias, False, False)
        many = backward_config(spec, 2048, 8, 90)
        assert isinstance(many, BackwardPipelined)
        for dx_given in (False, True):
            tiers = few_rows_backward_configs(spec, many, 90, 132, dx_given=dx_given)
            for config in (many, *(few for _, few in tiers)):
                first, *others = backward_instantiations(spec, config)
                followed[first] = any(other.overlaps for other in others)
    assert set(followed.values()) == {False, True}
    for kernel, code in all_disassembled(list(followed), tmp_path):
        assert ("PREEXIT" in code) == followed[kernel], str(kernel)


@pytest.mark.skipif(disassembler() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(
    ("architecture", "lengths"),
    [("90", (4096, 8192, 32768)), ("100", (4096, 8192, 32768)), ("120", (4096,))],
)
def test_copies_in_bulk_see_their_mailboxes(
    architecture: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    spec = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", False, False)
    configs = (backward_config(spec, n, 8, int(architecture)) for n in lengths)
    kernels = [backward_instantiations(spec, config)[0] for config in configs]
    for kernel, code in all_disassembled(kernels, tmp_path, architecture):
        before, *copied = code.split("UBLKCP")
        assert copied, str(kernel)
        # The fence must come after the last mailbox was opened: opening each one begins with a
        # fence of its own.
        assert "FENCE.VIEW.ASYNC" in before.rpartition("SYNCS.EXCH")[2], str(kernel)


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_the_flush_of_the_clock_compiles(architecture: str) -> None:
    program = nvrtc.createProgram(FLUSH, "flush.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-std=c++17", *CUPY_OPTIONS, f"-arch=sm_{architecture}"))
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    assert all(name.encode() in cubin for name in Clock.FLUSHES[1:])


@pytest.mark.parametrize("backward", [False, True])
def test_the_source_to_read_compiles(backward: bool) -> None:
    options: dict[str, Any] = {"relu": True, "backward": backward, "architecture": 90}
    sources = kernel_source("layer_norm", 1 << 20, "float16", "float32", "float32", **options)
    assert len(sources) == (3 if backward else 1)
    for name, text in sources.items():
        program = nvrtc.createProgram(text, "kernel.cu", (), ())
        try:
            nvrtc.addNameExpression(program, f"{name}<Op, Layout>")
            nvrtc.compileProgram(program, (*OPTIONS, *CUPY_OPTIONS, "-arch=sm_90"))
            assert name in nvrtc.getLoweredName(program, f"{name}<Op, Layout>")
        finally:
            nvrtc.destroyProgram(program)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("x", ["float64", "bfloat16"])
def test_arguments_are_where_the_kernel_looks_for_them(x: str, grouped: bool) -> None:
    spec = ForwardSpec("rms_norm", x, x, x, x, False, True, False, grouped=grouped)
    types = dict.fromkeys(("X", "DY", "Weight", "Bias", "Y", "DWeight", "DBias"), x)
    types |= dict.fromkeys(("Branch", "Residual", "DX", "DResidual", "DResidualOut", "Scale"), x)
    op = "".join(f"using {name} = {CPP_TYPES[dtype]};" for name, dtype in types.items())
    op += f"static constexpr bool kGrouped = {str(grouped).lower()};"
    asserts = [source("operation.cuh"), f"struct Op {{ {op} }};"]
    for name in ARGUMENTS:
        members, letters = arguments_of(name, spec), ""
        for member, letter in members:
            offset = struct.calcsize(f"{letters}0{letter}")
            size = struct.calcsize(letter)
            letters += letter
            place = f"__INTADDR__(&static_cast<{name}<Op>*>(nullptr)->{member})"
            asserts.append(f'static_assert({place} == {offset}, "{name}::{member}");')
            asserts.append(f'static_assert(sizeof({name}<Op>::{member}) == {size}, "{member}");')
        total = struct.calcsize(f"{letters}0P")
        asserts.append(f'static_assert(sizeof({name}<Op>) == {total}, "{name} has others");')
    program = nvrtc.createProgram("\n".join(asserts), "arguments.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, *CUPY_OPTIONS, "-arch=sm_90"))
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)


def test_the_source_is_self_contained() -> None:
    for kernel in instantiations(90):
        assert "#include" not in source(kernel.file)
