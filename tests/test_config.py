from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupynorm import _compile, _plans
from cupynorm._compile import (
    ARGUMENTS,
    Instantiation,
    backward_instantiations,
    forward_instantiation,
    kernels_directory,
    source,
)
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardInRegisters,
    BackwardPipelined,
    BackwardStreaming,
    ForwardInRegisters,
    ForwardPipelined,
    ForwardStreaming,
    backward_config,
    backward_pipelined_bytes,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
    pack_length,
    reduction_bytes,
    shared_limit,
)
from cupynorm._layout.architectures import MOST_CLUSTER_BLOCKS, REGISTERS_PER_MULTIPROCESSOR
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Norm

NORMS = ("rms_norm", "layer_norm")
DTYPES = ("float64", "float32", "float16", "bfloat16")
OPTIONAL = (None, *DTYPES)
SWITCH = (False, True)
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

Spec = ForwardSpec | BackwardSpec
Config = (
    ForwardInRegisters
    | ForwardPipelined
    | ForwardStreaming
    | BackwardPipelined
    | BackwardColumnParallel
    | BackwardStreaming
)

# Every spec there is.
FORWARD = tuple(
    ForwardSpec(*fields)
    for fields in itertools.product(
        NORMS, DTYPES, OPTIONAL, OPTIONAL, DTYPES, SWITCH, SWITCH, SWITCH
    )
    if fields[2] is not None or not fields[5]
)
BACKWARD = tuple(
    BackwardSpec(*fields)
    for fields in itertools.product(NORMS, DTYPES, DTYPES, OPTIONAL, OPTIONAL, SWITCH, SWITCH)
    if fields[3] is not None or not fields[5]
)

# Rows longer than any but streaming kernels take, as the table below has them.
MOST = 300_000


def widths() -> st.SearchStrategy[int]:
    """Draw N, each power of two as often as the next."""
    octaves = st.integers(1, MOST.bit_length())
    return octaves.flatmap(lambda o: st.integers(2 ** (o - 1), min(2**o, MOST)))


specs = st.sampled_from(FORWARD) | st.sampled_from(BACKWARD)
forward_specs = st.sampled_from(FORWARD)
backward_specs = st.sampled_from(BACKWARD)


def vectors(spec: Spec, n: int) -> list[int]:
    """Return what `vector` may be: the powers of two that divide the pack and the row."""
    return [v for v in (1, 2, 4, 8) if pack_length(spec.x) % v == 0 and n % v == 0]


def configure(spec: Spec, n: int, vector: int, architecture: int = 90) -> Config:
    if isinstance(spec, ForwardSpec):
        return forward_config(spec, n, vector, architecture)
    return backward_config(spec, n, vector, architecture)


def instantiate(spec: Spec, config: Any) -> tuple[Instantiation, ...]:
    if isinstance(spec, ForwardSpec):
        return (forward_instantiation(spec, config),)
    return backward_instantiations(spec, config)


def is_streaming(config: Config) -> bool:
    """Tell whether no block or cluster holds a row."""
    return isinstance(config, (ForwardStreaming, BackwardStreaming, BackwardColumnParallel))


def team_of(config: Any) -> int:
    """Return the threads of a block that work on one row."""
    threads: int = getattr(config, "row_threads", config.block_threads)
    return threads


def length_of(spec: Spec, config: Any) -> int:
    """Return the elements of a pack: of rows in registers it may be one of 8 bytes."""
    length: int = getattr(config, "pack_length", pack_length(spec.x))
    return length


def check_row(spec: Spec, n: int, config: Any) -> None:
    clustered = getattr(config, "cluster_blocks", 1)
    tile = clustered * team_of(config) * length_of(spec, config)
    assert tile * config.packs_per_thread >= n, "the row does not fit"
    told = clustered == 1 or isinstance(config, ForwardPipelined) or config.packs_per_thread <= 4
    assert config.full == (told and tile * config.packs_per_thread == n)
    if clustered > 1:
        assert 2 * n > tile * config.packs_per_thread, "half the blocks have nothing to do"
    elif not isinstance(config, ForwardPipelined):
        assert tile * (config.packs_per_thread - 1) < n, "no thread has a use for its last pack"


# ---- how a row lies over threads -----------------------------------------------------------------


@given(specs, widths(), st.sampled_from(ARCHITECTURES))
@settings(max_examples=500)
def test_a_row_fits_its_team_and_no_pack_is_idle(spec: Spec, n: int, architecture: int) -> None:
    for vector in vectors(spec, n):
        config = configure(spec, n, vector, architecture)
        if not is_streaming(config):
            check_row(spec, n, config)


def most_at_once(config: ForwardInRegisters) -> int:
    return config.blocks_per_multiprocessor * config.rows_per_block


@given(
    forward_specs,
    widths() | st.sampled_from((5120, 8192, 10240, 12288, 14336, 16384)),
    st.sampled_from(ARCHITECTURES),
)
@settings(max_examples=500)
def test_few_rows_differ_only_in_what_does_not_show(
    spec: ForwardSpec, n: int, architecture: int
) -> None:
    for vector in vectors(spec, n):
        config = forward_config(spec, n, vector, architecture)
        if not isinstance(config, ForwardInRegisters):
            continue
        few_rows = few_rows_configs(spec, config, n, architecture, 132)
        most = [rows for rows, _ in few_rows]
        assert most == sorted(set(most))
        assert not config.rare_last
        assert config.cluster_blocks == 1
        for rows, few in few_rows:
            assert few.cluster_blocks * few.row_threads * few.packs_per_thread == (
                config.row_threads * config.packs_per_thread
            )
            split = few.cluster_blocks > 1
            folded = few.folded
            short = few.packs_per_thread != config.packs_per_thread and not folded
            hidden = ["rare_last", "hold_weight", "blocks_per_multiprocessor"]
            hidden += ["blocks_ahead", "blocks_ahead_if_large"]
            hidden += ["row_threads"] * (split or short or folded)
            hidden += ["packs_per_thread"] * (short or folded) + ["folded"] * folded
            hidden += ["block_threads"] * (split or folded) + ["cluster_blocks"] * split
            same = {name: getattr(config, name) for name in hidden}
            assert dataclasses.replace(few, **same) == config
            threads = few.blocks_per_multiprocessor * few.block_threads
            # None is fetched ahead where all run at once.
            none = architecture < 90 or (few != config and (few.rare_last or not short))
            assert (few.blocks_ahead == 0) == none
            if short:  # a warp sums 4 packs a thread as twice the lanes do 2
                assert (config.packs_per_thread, few.packs_per_thread) == (4, 2)
                assert (spec.norm, spec.x) == ("layer_norm", "bfloat16")
                assert few.row_threads <= 32
                assert threads <= 768
                if few.rare_last:
                    assert rows == 132 * few.blocks_per_multiprocessor * few.rows_per_block
                else:
                    assert rows * n <= 2**23 < (rows + 1) * n
                continue
            if few.row_threads < 32:
                rare_last = spec.norm == "layer_norm"
                bytes_of_x = config.packs_per_thread * config.pack_length * ITEMSIZE[spec.x]
                assert bytes_of_x <= 64 or not rare_last  # which would spill
                assert few == dataclasses.replace(
                    config, blocks_ahead=0, blocks_ahead_if_large=0, rare_last=rare_last
                )
                assert rows == 132 * config.blocks_per_multiprocessor * config.rows_per_block
                continue
            if split:
                assert architecture >= 90
                assert spec.x != "float64"
                assert few.row_threads == few.block_threads >= 64
                assert few.row_threads % 32 == 0
                assert few.rare_last
                assert rows * few.cluster_blocks == 132  # multiprocessors
            if few.rare_last:
                assert spec.weight or spec.bias
                assert few.hold_weight
                assert threads <= 512
            elif few != config:
                assert (few.packs_per_thread, few.hold_weight) == (8, False)
                if spec.norm == "layer_norm":
                    assert architecture == 90
                    assert folded == (spec.x != "float32")
                assert most_at_once(few) > most_at_once(config)
                assert threads <= 1024
            if folded:  # a warp has the sums of two, and each thread the packs of two
                assert 2 * few.row_threads == config.row_threads
                assert few.packs_per_thread == 2 * config.packs_per_thread
                assert few.row_threads % 32 == 0
                assert few.rows_per_block == 1


def few_rows_backward(
    spec: BackwardSpec, config: BackwardPipelined, m: int, architecture: int, **options: bool
) -> BackwardInRegisters | None:
    """Return the configuration of m rows, if they have one of their own on 132 multiprocessors."""
    found = few_rows_backward_configs(spec, config, architecture, 132, **options)
    return next((few for most, few in found if m <= most), None)


@given(
    backward_specs, widths(), st.sampled_from(ARCHITECTURES), st.integers(1, 2000), st.booleans()
)
@settings(max_examples=500)
def test_few_rows_have_the_teams_of_many_in_the_backward(
    spec: BackwardSpec, n: int, architecture: int, m: int, dx_given: bool
) -> None:
    for vector in vectors(spec, n):
        config = backward_config(spec, n, vector, architecture)
        if not isinstance(config, BackwardPipelined):
            continue
        few = few_rows_backward(spec, config, m, architecture, dx_given=dx_given)
        whole_warps = config.row_threads >= 32
        if few is None:
            assert m > 64 // config.cluster_blocks or not whole_warps
            continue
        for name in ("row_threads", "packs_per_thread", "cluster_blocks", "vector", "full"):
            assert getattr(few, name) == getattr(config, name), name
        layer_norm = spec.norm == "layer_norm"
        alone = m == 1 and whole_warps
        columns = spec.gradients and not dx_given and not alone
        if layer_norm:
            columns = columns and config.row_threads >= 128 and architecture >= 90
        if few.column_threads:
            assert columns
            assert few.reduction is None
            assert few.column_lanes in (4, 8, 16, 32)
            # Those that are added up one after another.
            assert m <= 64 * (few.column_threads // few.column_lanes)
            if layer_norm:
                assert few.block_threads == few.row_threads
            else:
                assert few.block_threads == few.column_threads
        else:
            assert few.column_lanes == 0
            assert not columns or m > 64 // config.cluster_blocks
            assert (few.reduction is None) == (alone or not spec.gradients)
        kernels = backward_instantiations(spec, few)
        names = ["norm_backward_in_registers"]
        if few.reduction:
            names.append("reduce_partials")
        elif few.column_threads and layer_norm:
            names.append("norm_backward_in_registers_columns")
        assert [kernel.name for kernel in kernels] == names
        assert [kernel.overlaps for kernel in kernels] == [False, True][: len(names)]
        if few.column_threads or few.rows_per_block == 1:
            assert all(kernel.shared_bytes <= 48 << 10 for kernel in kernels)


def beside_columns(
    spec: BackwardSpec, n: int, architecture: int = 90, multiprocessors: int = 132
) -> list[tuple[int, BackwardInRegisters]]:
    """Return what rows beside blocks of columns have, behind the most rows."""
    config = backward_config(spec, n, min(n & -n, pack_length(spec.x)), architecture)
    assert isinstance(config, BackwardPipelined)
    found = few_rows_backward_configs(spec, config, architecture, multiprocessors)
    return [(rows, few) for rows, few in found if few.column_threads]


def columns_spec(norm: str, x: str, **others: Any) -> BackwardSpec:
    spec = BackwardSpec(norm, x, x, x, None if norm == "rms_norm" else x, False, False)  # type: ignore[arg-type]
    return dataclasses.replace(spec, **others)


@pytest.mark.parametrize(
    ("norm", "x", "n", "tiers"),
    [
        # The most rows, the lanes of columns, their threads, the rows of a block and its blocks a
        # multiprocessor.
        ("rms_norm", "bfloat16", 8, [(64, 16, 256, 256, 1), (768, 4, 256, 256, 1)]),
        ("rms_norm", "bfloat16", 64, [(64, 16, 256, 32, 1), (768, 4, 256, 32, 1)]),
        ("rms_norm", "bfloat16", 1024, [(64, 16, 256, 8, 1), (768, 4, 256, 8, 1)]),
        ("rms_norm", "bfloat16", 2048, [(64, 16, 256, 2, 1), (1536, 4, 256, 2, 1)]),
        ("rms_norm", "bfloat16", 2052, [(64, 16, 192, 2, 1), (256, 4, 192, 2, 1)]),
        ("rms_norm", "bfloat16", 4096, [(64, 16, 256, 1, 1), (1536, 4, 256, 1, 1)]),
        ("rms_norm", "bfloat16", 5120, [(64, 16, 256, 2, 1), (768, 8, 256, 2, 1)]),
        ("rms_norm", "bfloat16", 8192, [(64, 16, 512, 1, 1), (768, 8, 512, 1, 1)]),
        ("rms_norm", "bfloat16", 16384, [(256, 16, 256, 1, 1)]),
        ("rms_norm", "bfloat16", 65536, [(64, 32, 256, 1, 1)]),
        ("rms_norm", "bfloat16", 131072, [(16, 32, 256, 1, 1)]),
        ("rms_norm", "float32", 1024, [(64, 16, 256, 2, 1), (768, 4, 256, 2, 1)]),
        ("rms_norm", "float32", 4096, [(64, 16, 512, 1, 1), (768, 8, 512, 1, 1)]),
        ("layer_norm", "bfloat16", 1024, []),
        ("layer_norm", "bfloat16", 2048, [(64, 16, 256, 1, 8), (256, 8, 512, 1, 8)]),
        ("layer_norm", "bfloat16", 2044, [(64, 16, 256, 1, 1), (256, 8, 512, 1, 1)]),
        ("layer_norm", "bfloat16", 4096, [(64, 16, 256, 1, 4), (640, 8, 512, 1, 4)]),
        ("layer_norm", "bfloat16", 4100, [(64, 16, 256, 1, 1), (256, 8, 512, 1, 1)]),
        ("layer_norm", "bfloat16", 6144, [(64, 16, 256, 1, 2), (426, 8, 512, 1, 2)]),
        ("layer_norm", "bfloat16", 8192, [(64, 16, 256, 1, 2), (320, 8, 512, 1, 2)]),
        ("layer_norm", "bfloat16", 32768, [(64, 16, 256, 1, 1), (128, 32, 512, 1, 1)]),
        ("layer_norm", "float64", 1024, [(64, 16, 256, 1, 1), (256, 8, 512, 1, 1)]),
    ],
)
def test_rows_beside_blocks_of_columns(
    norm: str, x: str, n: int, tiers: list[tuple[int, ...]]
) -> None:
    assert [
        (
            rows,
            few.column_lanes,
            few.column_threads,
            few.rows_per_block,
            few.blocks_per_multiprocessor,
        )
        for rows, few in beside_columns(columns_spec(norm, x), n)
    ] == tiers


def test_fewer_rows_are_beside_blocks_of_columns_of_smaller_gpus_and_wider_dy() -> None:
    def most(norm: str, n: int, multiprocessors: int = 132, **others: Any) -> int:
        spec = columns_spec(norm, "bfloat16", **others)
        return beside_columns(spec, n, multiprocessors=multiprocessors)[-1][0]

    assert [most("rms_norm", 2048, number) for number in (160, 132, 66, 1)] == [1536, 1536, 768, 64]
    assert [most("layer_norm", 8192, number) for number in (132, 66, 16)] == [320, 160, 64]
    assert most("rms_norm", 1024, 44) == 256  # a third, not rounded on the way
    assert most("rms_norm", 16384, 16) == 256  # of clusters
    assert most("rms_norm", 4096, dy="float32") == 1024
    assert most("layer_norm", 8192, dy="float32") == 213


def test_layer_norms_wide_rows_beside_columns_have_the_registers_that_they_need() -> None:
    for others in ({"dy": "float32"}, {"weight": "float64"}):
        for _, few in beside_columns(columns_spec("layer_norm", "bfloat16", **others), 4096):
            assert few.blocks_per_multiprocessor == 1


def test_no_layer_norm_is_beside_columns_without_overlap() -> None:
    assert beside_columns(columns_spec("layer_norm", "bfloat16"), 4096, 80) == []
    assert beside_columns(columns_spec("rms_norm", "bfloat16"), 4096, 80)


@given(backward_specs, widths(), st.sampled_from(ARCHITECTURES), st.booleans())
@settings(max_examples=500)
def test_blocks_of_several_rows_are_in_one_round(
    spec: BackwardSpec, n: int, architecture: int, dx_given: bool
) -> None:
    for vector in vectors(spec, n):
        config = backward_config(spec, n, vector, architecture)
        if not isinstance(config, BackwardPipelined):
            continue
        found = few_rows_backward_configs(spec, config, architecture, 132, dx_given=dx_given)
        most = [rows for rows, _ in found]
        assert most == sorted(set(most))
        assert len({few for _, few in found}) == len(found)  # none is there twice
        of_several = [
            (rows, few) for rows, few in found if few.rows_per_block > 1 and not few.column_threads
        ]
        assert found[len(found) - len(of_several) :] == tuple(of_several)
        for rows, few in of_several:
            assert rows == few.rows_per_block * 132
            assert few.rows_per_block.bit_count() == 1
            # Each row's gradients are added one after another, and a barrier is for several warps.
            assert few.rows_per_block <= (64 if few.row_threads <= 32 else 15)
            for name in ("row_threads", "packs_per_thread", "cluster_blocks", "vector", "full"):
                assert getattr(few, name) == getattr(config, name), name
            assert few.cluster_blocks == 1
            assert few.reduction == config.reduction
            assert not config.cells
            rows_kernel, sums = backward_instantiations(spec, few)
            assert rows_kernel.block_threads == few.block_threads <= 1024
            assert rows_kernel.shared_bytes <= shared_limit(architecture)
            assert sums.overlaps


@pytest.mark.parametrize(
    ("x", "n", "architecture", "rows"),
    [
        ("bfloat16", 8, 90, []),
        ("bfloat16", 32, 90, [32, 64]),
        ("bfloat16", 128, 90, [8, 16, 32, 64]),
        ("bfloat16", 1024, 90, [4, 8, 16]),
        ("bfloat16", 1024, 86, [2, 4, 8]),  # teams of 64 threads
        ("bfloat16", 2048, 90, [2, 4, 8]),
        ("bfloat16", 4096, 90, [2, 4]),
        ("bfloat16", 6144, 90, [2]),
        ("bfloat16", 16384, 90, []),
        ("float32", 1024, 90, [2, 4, 8]),
        ("float32", 4096, 90, [2]),
    ],
)
def test_blocks_of_several_rows(x: str, n: int, architecture: int, rows: list[int]) -> None:
    spec = BackwardSpec("rms_norm", x, x, x, None, False, False)
    config = backward_config(spec, n, pack_length(x), architecture)
    assert isinstance(config, BackwardPipelined)
    found = few_rows_backward_configs(spec, config, architecture, 132, dx_given=True)
    assert [few.rows_per_block for _, few in found if few.rows_per_block > 1] == rows
    # Beside columns, of which no dx is given, where those are for fewer rows.
    beside = few_rows_backward_configs(spec, config, architecture, 132)
    most = max(most for most, few in beside if few.column_threads)
    of_several = [few.rows_per_block for _, few in beside if few.reduction]
    assert of_several == [teams for teams in rows if teams * 132 > most]


def test_rows_are_fetched_ahead_by_what_all_multiprocessors_hold() -> None:
    def config(norm: Norm, x: str, n: int, architecture: int = 90) -> ForwardInRegisters:
        bias = x if norm == "layer_norm" else None
        spec = ForwardSpec(norm, x, x, bias, x, False, False, False)
        found = forward_config(spec, n, pack_length(x), architecture)
        assert isinstance(found, ForwardInRegisters)
        return found

    for norm, n in itertools.product(get_args(Norm), (64, 256, 1024, 3584, 4096, 8192, 12288)):
        of = config(norm, "bfloat16", n)
        ahead = of.blocks_ahead * of.rows_per_block * n * 2  # bytes
        at_once = 128 * of.blocks_per_multiprocessor * of.rows_per_block * n * 2
        assert (ahead == at_once) if of.packs_per_thread <= 4 else (ahead < at_once)
        assert 2 << 20 <= ahead <= 8 << 20
    for x in ("bfloat16", "float16"):
        long = config("layer_norm", x, 16384)
        assert (long.block_threads, long.blocks_per_multiprocessor) == (512, 2)
        assert (long.blocks_ahead, long.blocks_ahead_if_large) == (128, 128)
    for of in (
        config("rms_norm", "bfloat16", 1024, 86),
        config("layer_norm", "bfloat16", 1024, 80),
        config("layer_norm", "bfloat16", 16384, 80),
    ):
        assert (of.blocks_ahead, of.blocks_ahead_if_large) == (0, 0)


@pytest.mark.parametrize(
    ("norm", "x", "weight", "n", "share"),
    [
        *(("layer_norm", "bfloat16", "float32", n, 1) for n in (64, 256, 640, 1024)),
        *(("layer_norm", "bfloat16", "float32", n, 0.5) for n in (2048, 4096)),
        # By the fewest threads.
        *(("layer_norm", "bfloat16", "float32", n, 0) for n in (3072, 6144, 8192)),
        *(("layer_norm", "bfloat16", "bfloat16", n, 0) for n in (3072, 6144, 12288)),
        ("layer_norm", "bfloat16", "bfloat16", 8192, 0.5),
        *(("layer_norm", "float16", "float16", n, 0.5) for n in (3072, 7168, 8192, 9728)),
        *(("layer_norm", "float32", "float32", n, 0.5) for n in (1536, 5120)),
        *(("rms_norm", "bfloat16", "float32", n, 0) for n in (256, 1024, 4096, 16384)),
        *(("rms_norm", "bfloat16", "float32", n, share) for n, share in ((6144, 0), (8192, 0.5))),
        ("rms_norm", "bfloat16", "bfloat16", 8192, 0),  # which is held
        ("rms_norm", "float32", "float32", 4096, 0),
    ],
)
def test_of_a_large_x_some_rows_are_fetched_ahead(
    norm: Norm, x: str, weight: str, n: int, share: float
) -> None:
    bias = weight if norm == "layer_norm" else None
    spec = ForwardSpec(norm, x, weight, bias, x, False, False, False)
    config = forward_config(spec, n, pack_length(x), 90)
    assert isinstance(config, ForwardInRegisters)
    assert config.blocks_ahead_if_large == int(share * config.blocks_ahead)
    for _, few in few_rows_configs(spec, config, n, 90, 132):
        assert few.blocks_ahead_if_large == few.blocks_ahead or few == config


def test_decoding_has_kernels_of_its_own() -> None:
    for n, bias in itertools.product((4096, 5120, 8192, 10000, 16384, 24576), ("bfloat16", None)):
        spec = ForwardSpec(
            "layer_norm", "bfloat16", "bfloat16", bias, "bfloat16", False, False, False
        )
        config = forward_config(spec, n, 8, 90)
        assert isinstance(config, ForwardInRegisters)
        few_rows = few_rows_configs(spec, config, n, 90, 132)
        blocks = {8192: [4, 1], 16384: [4, 2, 1], 24576: [4, 2, 1]}.get(n, [1])
        held = [few for _, few in few_rows if few.rare_last]
        assert [few.cluster_blocks for few in held] == blocks, n
        assert [few for _, few in few_rows][: len(held)] == held, n


@pytest.mark.parametrize(
    ("norm", "x", "n", "relu", "blocks"),
    [
        ("layer_norm", "bfloat16", 8000, False, []),  # 128 threads
        ("layer_norm", "float16", 12288, False, [4]),
        ("layer_norm", "bfloat16", 16384, True, [4, 2]),
        ("layer_norm", "bfloat16", 24576, True, []),  # 8 packs, beside which it would spill
        ("rms_norm", "bfloat16", 8192, False, []),
        ("rms_norm", "bfloat16", 16384, False, [4]),
        ("rms_norm", "bfloat16", 16384, True, []),
    ],
)
def test_few_long_rows_are_those_of_clusters(
    norm: Norm, x: str, n: int, relu: bool, blocks: list[int]
) -> None:
    bias = x if norm == "layer_norm" else None
    spec = ForwardSpec(norm, x, x, bias, x, False, False, relu)
    config = forward_config(spec, n, 8, 90)
    assert isinstance(config, ForwardInRegisters)
    found = few_rows_configs(spec, config, n, 90, 132)
    rows = [(rows, few.cluster_blocks) for rows, few in found if few.cluster_blocks > 1]
    assert rows == [(132 // count, count) for count in blocks]


@pytest.mark.parametrize(
    ("norm", "n", "held"),
    [("rms_norm", 4096, True), ("rms_norm", 2048, False), ("layer_norm", 4096, False)],
)
def test_the_weight_of_long_rows_of_float64_is_held(norm: Norm, n: int, held: bool) -> None:
    spec = ForwardSpec(norm, "float64", "float64", None, "float64", False, False, False)
    config = forward_config(spec, n, 2, 90)
    assert isinstance(config, ForwardInRegisters)
    assert config.hold_weight == held


@pytest.mark.parametrize(
    ("weight", "n", "held", "blocks"),
    [
        ("bfloat16", 1024, [8], []),
        ("bfloat16", 8192, [2], []),
        ("bfloat16", 10240, [3], [6]),
        ("bfloat16", 12288, [2], [5]),
        ("bfloat16", 16384, [8, 2], [4]),
        ("float32", 16384, [4, 1], [2, 4]),
        (None, 16384, [], [2, 4]),
    ],
)
def test_few_rows_of_rms_norm_hold_the_weight_or_more_of_the_longest_run_at_once(
    weight: str | None, n: int, held: list[int], blocks: list[int]
) -> None:
    spec = ForwardSpec("rms_norm", "bfloat16", weight, None, "bfloat16", False, False, False)
    config = forward_config(spec, n, 8, 90)
    assert isinstance(config, ForwardInRegisters)
    few_rows = [few for _, few in few_rows_configs(spec, config, n, 90, 132)]
    assert [few.blocks_per_multiprocessor for few in few_rows] == held + blocks
    assert [few.rare_last for few in few_rows] == [True] * len(held) + [False] * len(blocks)
    assert (config in few_rows) == (len(blocks) == 2)
    # As on GPUs without clusters, where nobody has measured it.
    before = forward_config(spec, n, 8, 80)
    assert isinstance(before, ForwardInRegisters)
    assert all(few.rare_last for _, few in few_rows_configs(spec, before, n, 80, 132))
    # Nor where it would spill.
    for option in ({"bias": "bfloat16"}, {"y": "float32"}):
        other = dataclasses.replace(spec, **option)  # type: ignore[arg-type]
        config = forward_config(other, n, 8, 90)
        assert isinstance(config, ForwardInRegisters)
        assert all(few.rare_last for _, few in few_rows_configs(other, config, n, 90, 132))


def test_a_plan_loads_only_the_kernel_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Instantiation):
        def clusters_at_once(self) -> int:
            return 3

        def prepared(self, blocks: int, numbers: dict[str, float]) -> int:
            return blocks

    loaded: list[Instantiation] = []

    def load(kernel: Instantiation, device: int) -> Instantiation:
        loaded.append(Loaded(**vars(kernel)))
        return loaded[-1]

    monkeypatch.setattr(_compile, "load", load)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    device = -1  # whose plans nobody else makes
    spec = ForwardSpec("layer_norm", "float32", "float32", None, "float32", False, False, False)
    (fewest, split), (most, config) = _plans.few_rows(spec, 4096, 4, device)
    assert (fewest, most) == (12 // split.cluster_blocks, 12 * config.blocks_per_multiprocessor)
    for m in (fewest, 1):
        fewer = _plans.forward_plan(spec, m, 4096, 4, device)
        assert loaded == [fewer.kernel]
        assert fewer.prepared(m, 0.5, 2.0, 3.0) == 4 * m
    loaded.clear()
    for m in (most, fewest + 1):
        few = _plans.forward_plan(spec, m, 4096, 4, device)
        assert loaded == [few.kernel]
        assert few.prepared(m, 0.5, 2.0, 3.0) == m
    for m in (most + 1, 10**9):
        many = _plans.forward_plan(spec, m, 4096, 4, device)
        assert loaded == [few.kernel, many.kernel]
    assert few.kernel != many.kernel
    plans = {_plans.forward_plan(spec, m, 64, 1, device) for m in (1, 10**9)}
    assert loaded == [few.kernel, many.kernel, *(plan.kernel for plan in plans)]
    assert len(plans) == 1

    loaded.clear()
    spec = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
    tiers = [most for most, _ in _plans.few_rows(spec, 16384, 8, device)]
    assert tiers == [3, *(12 * blocks for blocks in (1, 2, 4))]
    kernels = [
        _plans.forward_plan(spec, m, 16384, 8, device).kernel
        for m in (1, *itertools.chain.from_iterable((most, most + 1) for most in tiers))
    ]
    split, held, many, at_once = dict.fromkeys(kernels)
    assert kernels == [split, split, held, held, many, many, at_once, at_once, many]
    assert list(dict.fromkeys(loaded)) == [split, held, many, at_once]

    loaded.clear()
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 132)
    of_dy = BackwardSpec("layer_norm", "float32", "float32", "float32", "float32", False, False)
    alone, two, most_of_few, most, more = (
        _plans.backward_plan(of_dy, m, 4096, 4, device) for m in (1, 2, 64, 320, 321)
    )
    assert two is most_of_few
    assert loaded == [*alone.kernels, *two.kernels, *most.kernels, *more.kernels]
    assert [len(plan.kernels) for plan in (alone, two, most, more)] == [1, 2, 2, 2]
    assert (alone.scratch_bytes(1), two.scratch_bytes(2)) == (0, 2 * 4)  # a mean a row
    assert [type(plan) for plan in (alone, two, most, more)] == [_plans.InRegistersPlan] * 3 + [
        _plans.PipelinedPlan
    ]
    # 16 packs of 4 columns each, then 8.
    assert [plan.column_blocks for plan in (alone, two, most)] == [0, 4096 // 64, 4096 // 32]
    two_in_place = _plans.backward_plan(of_dy, 2, 4096, 4, device, dx_given=True)
    assert two_in_place.scratch_bytes(2) == 2 * 2 * 4096 * 4
    assert _plans.backward_plan(of_dy, 0, 4096, 4, device) is more  # sums no partials to 0

    loaded.clear()
    of_dy = dataclasses.replace(of_dy, norm="rms_norm", dbias=None)
    alone, two, most, more = (
        _plans.backward_plan(of_dy, m, 4096, 4, device) for m in (1, 2, 768, 769)
    )
    assert loaded == [*alone.kernels, *two.kernels, *most.kernels, *more.kernels]
    assert [len(plan.kernels) for plan in (alone, two, most, more)] == [1, 1, 1, 2]
    assert [plan.scratch_bytes(2) for plan in (alone, two, most)] == [0, 0, 0]
    # dx written over dy takes what another block still needs.
    assert [plan.column_blocks for plan in (alone, two, most)] == [0, 4096 // 64, 4096 // 32]
    alone_in_place, two_in_place, many_in_place = (
        _plans.backward_plan(of_dy, m, 4096, 4, device, dx_given=True) for m in (1, 2, 300)
    )
    assert (alone_in_place, many_in_place) == (alone, more)
    assert (two_in_place.column_blocks, two_in_place.scratch_bytes(2)) == (0, 2 * 4096 * 4)
    assert isinstance(two_in_place, _plans.InRegistersPlan)


def test_several_rows_a_block_are_planned_up_to_what_runs_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_compile, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 40)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    spec = BackwardSpec("layer_norm", "float32", "float32", "float32", "float32", False, False)
    row = 2 * 1024 * 4  # partials of both gradients
    for m, rows, partials in ((257, 8, 33), (319, 8, 40), (320, 8, 40)):
        plan = _plans.backward_plan(spec, m, 1024, 4, -4)
        assert isinstance(plan, _plans.InRegistersPlan)
        assert plan.rows_per_partial == rows
        assert plan.scratch_bytes(m) == partials * row
    assert _plans.backward_plan(spec, 64, 1024, 4, -4).rows_per_partial == 1
    assert isinstance(_plans.backward_plan(spec, 321, 1024, 4, -4), _plans.PipelinedPlan)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "without_room", ["backward_pipelined.cu", "backward_in_registers.cu", None]
)
def test_few_rows_have_clusters_where_many_have_them(
    monkeypatch: pytest.MonkeyPatch, without_room: str | None, m: int, norm: Any
) -> None:
    def load(kernel: Instantiation, device: int) -> Any:
        room = 0 if kernel.file == without_room else 1
        return SimpleNamespace(file=kernel.file, clusters_at_once=lambda: room)

    monkeypatch.setattr(_compile, "load", load)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    for function in (_plans.few_rows_backward_plan, _plans.many_rows_backward_plan):
        monkeypatch.setattr(_plans, function.__name__, function.__wrapped__)
    spec = BackwardSpec(norm, "float32", "float32", "float32", None, False, False)
    few, many = (_plans.backward_plan(spec, rows, 33000, 4, -3) for rows in (m, 10**9))
    assert isinstance(few, _plans.InRegistersPlan) == (without_room is None)
    assert (few.cluster_blocks, few.kernels[0].file) == {
        "backward_pipelined.cu": (1, "backward_streaming.cu"),
        "backward_in_registers.cu": (many.cluster_blocks, "backward_pipelined.cu"),
        None: (many.cluster_blocks, "backward_in_registers.cu"),
    }[without_room]
    assert (many.cluster_blocks > 1) == (without_room != "backward_pipelined.cu")
    if without_room is None:
        # 32 packs of 4 a block: in clusters of the rows', or by a kernel of their own.
        in_clusters = norm == "rms_norm"
        assert few.column_blocks == (m > 1) * (264 if in_clusters else 258)
        assert few.column_kernel == (m > 1 and norm == "layer_norm")


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_usual_row_fits_its_team_and_no_pack_is_idle(direction: str, x: str) -> None:
    spec: Spec = ForwardSpec("layer_norm", x, "float32", "float32", x, False, True, False)
    if direction == "backward":
        spec = BackwardSpec("layer_norm", x, x, "float32", "float32", False, False)
    length = pack_length(x)
    for n in range(length, 4 * 1024 * length + 1, length):
        check_row(spec, n, configure(spec, n, length))


@given(specs, widths(), st.sampled_from(ARCHITECTURES))
@settings(max_examples=500)
def test_blocks_are_whole_teams_that_every_gpu_can_hold(
    spec: Spec, n: int, architecture: int
) -> None:
    for vector in vectors(spec, n):
        config: Any = configure(spec, n, vector, architecture)
        if is_streaming(config):
            continue
        team, block = team_of(config), config.block_threads
        assert team % 32 == 0 or (team < 32 and team & (team - 1) == 0)
        assert block % 32 == 0
        assert block % team == 0
        assert block <= 1024
        if team > 32:
            assert block // team <= 15, "named barriers, of which 0 is the block's own"
        # sm_75 holds 1024 threads on a multiprocessor, the least of all.
        threads = getattr(config, "blocks_per_multiprocessor", 1) * block
        assert 1 <= threads <= 1024
        assert REGISTERS_PER_MULTIPROCESSOR // threads >= 64
        if n <= 32 * pack_length(spec.x):
            assert team <= 32, "a row of up to 32 packs is one warp's"
        assert config.vector == vector


@given(specs, widths(), st.sampled_from(ARCHITECTURES))
@settings(max_examples=500)
def test_clusters_are_powers_of_two_of_architectures_that_have_them(
    spec: Spec, n: int, architecture: int
) -> None:
    config = configure(spec, n, 1, architecture)
    blocks = getattr(config, "cluster_blocks", 1)
    assert blocks & (blocks - 1) == 0
    assert blocks <= (MOST_CLUSTER_BLOCKS if architecture >= 90 else 1)


@given(specs, widths())
def test_streaming_blocks_are_whole_warps(spec: Spec, n: int) -> None:
    config: Any = configure(spec, n, 1, 80)
    if not is_streaming(config):
        return
    names = (
        ("block_threads",)
        if isinstance(config, ForwardStreaming)
        else ("row_threads", "column_threads")
    )
    for name in names:
        assert getattr(config, name) % 32 == 0
        assert getattr(config, name) <= 1024


# ---- what the bits of a row depend on ------------------------------------------------------------


def row_layout(config: Any) -> tuple[Any, ...]:
    """Return what decides the order in which a row is summed."""
    if isinstance(config, ForwardStreaming):
        # Not packs_per_thread: whatever is on its way at once, sums are added pack by pack.
        return type(config), config.cluster_blocks, config.block_threads
    if isinstance(config, BackwardStreaming):
        return type(config), config.cluster_blocks, config.row_threads, config.column_threads
    if isinstance(config, BackwardColumnParallel):
        return type(config), config.strips, config.strip_threads
    clustered = getattr(config, "cluster_blocks", 1)
    return type(config), team_of(config), config.packs_per_thread, clustered


@given(specs, widths(), st.sampled_from(ARCHITECTURES))
@settings(max_examples=500)
def test_bits_do_not_depend_on_alignment(spec: Spec, n: int, architecture: int) -> None:
    layouts = {row_layout(configure(spec, n, vector, architecture)) for vector in vectors(spec, n)}
    assert len(layouts) == 1


@given(forward_specs, widths())
@settings(max_examples=300)
def test_y_does_not_depend_on_whether_statistics_are_stored(spec: ForwardSpec, n: int) -> None:
    other = dataclasses.replace(spec, store_statistics=not spec.store_statistics)
    for vector in vectors(spec, n):
        assert configure(spec, n, vector) == configure(other, n, vector)


@given(specs, st.lists(widths(), min_size=1, max_size=5))
def test_a_config_depends_on_nothing_but_its_arguments(spec: Spec, ns: list[int]) -> None:
    first = [configure(spec, n, 1) for n in ns]
    assert first == [configure(spec, n, 1) for n in reversed(ns)][::-1]
    assert hash(spec) == hash(dataclasses.replace(spec))


# ---- the regimes ---------------------------------------------------------------------------------

# The longest row of each regime in turn, in KiB of x; all longer ones are streamed. A change here
# changes bits and speed, and is meant to be seen. The weight (and LayerNorm's bias) is float32, dy
# and y have x's dtype.
RESIDENT, PIPELINED = ForwardInRegisters, ForwardPipelined
LONGEST: dict[int, tuple[tuple[tuple[type, int], ...], ...]] = {
    # architecture: RMSNorm forward, LayerNorm forward, RMSNorm backward, LayerNorm backward
    90: (
        ((RESIDENT, 32), (PIPELINED, 1024)),
        ((RESIDENT, 24), (PIPELINED, 896)),
        ((BackwardPipelined, 448), (BackwardColumnParallel, 1024)),
        ((BackwardPipelined, 448), (BackwardColumnParallel, 1024)),
    ),
    80: (
        ((RESIDENT, 32),),
        ((RESIDENT, 48),),
        ((BackwardPipelined, 24),),
        ((BackwardPipelined, 24),),
    ),
    86: (
        ((RESIDENT, 32),),
        ((RESIDENT, 48),),
        ((BackwardPipelined, 16),),
        ((BackwardPipelined, 16),),
    ),
}


@pytest.mark.parametrize("architecture", LONGEST)
def test_the_longest_rows(architecture: int) -> None:
    longest = []
    for norm, bias in (("rms_norm", None), ("layer_norm", "float32")):
        longest.append(
            regimes(
                ForwardSpec(norm, "bfloat16", "float32", bias, "bfloat16", False, True, False),
                architecture,
            )
        )
    for norm, bias in (("rms_norm", None), ("layer_norm", "float32")):
        longest.append(
            regimes(
                BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False),
                architecture,
            )
        )
    assert tuple(longest) == LONGEST[architecture]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_rows_that_a_cluster_holds_are_not_read_twice(architecture: int) -> None:
    plain = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, True, False)
    held = ForwardPipelined if architecture >= 90 else ForwardStreaming
    for n in (24576, 28664, 28668, 28672, 28680, 32760, 32764, 32768):
        vector = n & -n if n % 8 else 8
        for changes in ({}, {"relu": True, "zero_centered": True}, {"bias": "float32"}):
            spec = dataclasses.replace(plain, **changes)  # type: ignore[arg-type]
            assert type(forward_config(spec, n, vector, architecture)) is held, n


@pytest.mark.parametrize("n", [9216, 12288, 16384])
def test_rms_norm_with_a_wide_bias_stays_in_registers(n: int) -> None:
    spec = ForwardSpec("rms_norm", "bfloat16", "float32", "float32", "bfloat16", False, True, False)
    config = forward_config(spec, n, 8, 90)
    assert isinstance(config, ForwardInRegisters)
    assert isinstance(forward_config(spec, 2 * 16384, 8, 90), ForwardPipelined)
    of_layer_norm = forward_config(dataclasses.replace(spec, norm="layer_norm"), 16384, 8, 90)
    assert isinstance(of_layer_norm, ForwardPipelined)


@pytest.mark.parametrize("n", [20480, 32768, 131072])
@pytest.mark.parametrize("norm", NORMS)
def test_pipelined_rows_of_4_packs_hold_weight_and_bias(norm: Any, n: int) -> None:
    for zero_centered, relu in itertools.product(SWITCH, SWITCH):
        spec = ForwardSpec(
            norm, "bfloat16", "float32", "float32", "bfloat16", zero_centered, True, relu
        )
        config = forward_config(spec, n, 8, 90)
        assert isinstance(config, ForwardPipelined)
        if config.packs_per_thread == 4:
            assert (config.hold_weight, config.hold_bias, config.stages) == (True, True, 3)
        else:
            assert (norm, n, config.packs_per_thread) == ("layer_norm", 20480, 5)


@pytest.mark.parametrize("n", [5120, 6144, 8192])
def test_a_narrow_weight_of_long_rows_is_held_where_threads_are_many(n: int) -> None:
    plain = ForwardSpec("rms_norm", "bfloat16", "bfloat16", None, "bfloat16", False, False, False)
    for zero_centered, relu in itertools.product(SWITCH, SWITCH):
        spec = dataclasses.replace(plain, zero_centered=zero_centered, relu=relu)
        config = forward_config(spec, n, 8, 90)
        assert isinstance(config, ForwardInRegisters)
        held = not (zero_centered or relu)
        threads = 1024 if held else 768
        blocks = threads // config.block_threads
        assert (config.hold_weight, config.blocks_per_multiprocessor) == (held, blocks)


@pytest.mark.parametrize("n", [130000, 131072, 262144])
def test_what_is_held_changes_no_bits(n: int) -> None:
    spec = ForwardSpec(
        "layer_norm", "bfloat16", "float32", "float32", "bfloat16", False, True, False
    )
    held, aside = (forward_config(spec, n, vector, 90) for vector in (8, 1))
    assert isinstance(held, ForwardPipelined)
    assert isinstance(aside, ForwardPipelined)
    assert (held.hold_weight, held.stages) == (True, 3)
    assert (aside.hold_weight, aside.hold_bias, aside.stages, aside.cells) == (True, False, 3, True)
    alike = {"hold_bias": True, "vector": 8, "cells": False}
    alike["through_l1"] = n == 130000  # whose rows do not begin at lines
    assert dataclasses.replace(aside, **alike) == held


@pytest.mark.parametrize(
    ("norm", "x", "n", "clusters", "relu", "counted"),
    [
        ("layer_norm", "bfloat16", 16384, 3, False, True),
        # By clusters of 2, of 4 of which two are at once, of 4, of 16 of which two are, and of 16.
        *(("layer_norm", "bfloat16", n, 2, True, n < 65536) for n in (32768, 40960, 65536)),
        *(("layer_norm", "bfloat16", n, 2, False, False) for n in (163840, 262144)),
        # By clusters of 4, of 8, of 16 with 6, 7, 4 and, in two stages, 8 packs a thread.
        *(("layer_norm", "float32", n, 2, False, True) for n in (32768, 65536, 98304, 229376)),
        *(("layer_norm", "float32", n, 2, True, False) for n in (131072, 262144)),
        ("layer_norm", "float64", 32768, 2, False, False),
        *(("rms_norm", "bfloat16", n, 2, n > 65536, True) for n in (32768, 65536, 131072, 262144)),
    ],
)
def test_many_rows_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    norm: Any,
    x: str,
    n: int,
    clusters: int,
    relu: bool,
    counted: bool,
) -> None:
    done: list[Any] = []

    def prepared(blocks: int, numbers: dict[str, float]) -> Any:
        return lambda stream, operands: done.append((stream, blocks, operands, numbers))

    kernel = SimpleNamespace(clusters_at_once=lambda: 2, prepared=prepared)
    monkeypatch.setattr(_compile, "load", lambda *_: kernel)
    monkeypatch.setattr(_plans, "set_to_zero", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    plan_of = _plans.forward_plan_of
    monkeypatch.setattr(_plans, plan_of.__name__, plan_of.__wrapped__)
    bias = "float32" if norm == "layer_norm" else None
    spec = ForwardSpec(norm, x, "float32", bias, x, False, False, relu)
    plan = _plans.forward_plan(spec, 1, n, pack_length(x), -5)
    for m, scratch in itertools.product(
        (0, 1, 32 * clusters - 1, 32 * clusters, 10**6), (0, 1 << 20)
    ):
        done.clear()
        many = counted and m >= 32 * clusters
        assert plan.scratch_bytes(m) == (16 if many else 0)
        # Of a program made for other GPUs JAX may have none.
        operands = *range(1, 10), *((scratch,) if many else ())
        plan.prepared(m, 0.5, 2.0, 3.0)(5, operands)
        blocks = min(m, clusters) * plan.cluster_blocks
        numbers = {"n_rows": m, "n_cols": n, "inv_n": 1 / n, "eps": 0.5, "lower": 2.0, "upper": 3.0}
        launch = 5, blocks, operands, numbers if many else numbers | {"count": 0}
        zeroed = [(5, scratch, 16)] if many and scratch else []
        assert done == zeroed + ([launch] if m else [])


def test_rows_that_come_and_go_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(blocks: int, numbers: dict[str, float]) -> Any:
        return numbers

    kernel = SimpleNamespace(clusters_at_once=lambda: 2, prepared=prepared)
    monkeypatch.setattr(_compile, "load", lambda *_: kernel)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 3)
    spec = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
    for n in (64, 8192, 16384, 1 << 20):
        plan = _plans.forward_plan(spec, 10**6, n, 8, -6)
        assert plan.scratch_bytes(10**6) == 0
        sizes = {"n_rows": 10**6, "n_cols": n, "inv_n": 1 / n}
        assert plan.prepared(10**6, 0.5, 2.0, 3.0) == sizes | {
            "eps": 0.5,
            "lower": 2.0,
            "upper": 3.0,
        }


@pytest.mark.parametrize(
    ("norm", "n", "layout"),  # blocks of a cluster, threads of a block, packs of a thread
    [
        *(("layer_norm", n, layout) for n, layout in ((14336, (1, 448, 4)), (16384, (1, 512, 4)))),
        *(
            ("layer_norm", n, layout)
            for n, layout in ((28672, (2, 448, 4)), (262144, (16, 512, 4)))
        ),
        *(("rms_norm", n, layout) for n, layout in ((18432, (2, 384, 3)), (20480, (2, 320, 4)))),
        *(("rms_norm", n, layout) for n, layout in ((24576, (2, 384, 4)), (28672, (2, 448, 4)))),
        *(("rms_norm", n, layout) for n, layout in ((65536, (4, 512, 4)), (131072, (8, 512, 4)))),
    ],
)
def test_pipelined_rows_fill_their_blocks(norm: Any, n: int, layout: tuple[int, int, int]) -> None:
    bias = "float32" if norm == "layer_norm" else None
    plain = ForwardSpec(norm, "bfloat16", "float32", bias, "bfloat16", False, True, False)
    for spec, vector in itertools.product(
        (plain, dataclasses.replace(plain, relu=True)), (1, 2, 4, 8)
    ):
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardPipelined)
        assert config.full
        found = config.cluster_blocks, config.block_threads, config.packs_per_thread
        assert found == layout
    # One element less takes as many.
    config = forward_config(plain, n - 1, 1, 90)
    assert isinstance(config, ForwardPipelined)
    assert not config.full
    assert (config.cluster_blocks, config.block_threads, config.packs_per_thread) == layout


@pytest.mark.parametrize(
    ("norm", "weight", "n", "layout"),  # blocks of a cluster, threads of a block, packs of a thread
    [
        *(("layer_norm", "float32", *row) for row in ((18432, (2, 192, 6)), (20480, (2, 256, 5)))),
        *(("layer_norm", "bfloat16", *row) for row in ((28672, (2, 256, 7)), (49152, (4, 256, 6)))),
        *((norm, "float32", 163840, (16, 256, 5)) for norm in NORMS),
        *(("rms_norm", "float32", *row) for row in ((49152, (4, 256, 6)), (98304, (8, 256, 6)))),
    ],
)
def test_two_clusters_share_multiprocessors(
    norm: Any, weight: str, n: int, layout: tuple[int, int, int]
) -> None:
    bias = weight if norm == "layer_norm" else None
    plain = ForwardSpec(norm, "bfloat16", weight, bias, "bfloat16", False, True, False)
    configs = [forward_config(plain, n, vector, 90) for vector in (1, 2, 8)]
    for config in configs:
        assert isinstance(config, ForwardPipelined)
        assert (config.blocks_per_multiprocessor, config.stages, config.full) == (2, 3, True)
        assert (config.cluster_blocks, config.block_threads, config.packs_per_thread) == layout
        assert (config.hold_weight, config.hold_bias) == (True, False)
        assert config.cells == (config.vector < 8)
    # Of 228 KiB, with one that each block has besides.
    whole = forward_instantiation(plain, configs[-1])
    assert 2 * (whole.shared_bytes + 1024) <= 228 << 10
    # A row that ends within a pack takes more where it has to be copied by cells.
    for odd in (n - 1, n - 2, n - 4):
        shorter = forward_config(plain, odd, odd & -odd, 90)
        assert isinstance(shorter, ForwardPipelined)
        two = layout != (2, 256, 7) or odd % 4 == 0
        assert shorter.blocks_per_multiprocessor == (2 if two else 1)
        if two:
            found = (shorter.cluster_blocks, shorter.block_threads, shorter.packs_per_thread)
            assert (*found, shorter.hold_weight) == (*layout, True)
            bytes_of_two = 2 * (forward_instantiation(plain, shorter).shared_bytes + 1024)
            assert bytes_of_two <= 228 << 10
    # A ReLU beside more than 5 packs would spill more.
    clamped = forward_config(dataclasses.replace(plain, relu=True), n, 8, 90)
    assert isinstance(clamped, ForwardPipelined)
    few = n // 8 <= 5 * 256 * layout[0]
    assert clamped.blocks_per_multiprocessor == (2 if few else 1)


@pytest.mark.parametrize(
    ("norm", "n", "layout"),  # threads of a row, packs of a thread
    [
        *((norm, 192, (8, 3)) for norm in NORMS),
        *((norm, 320, (8, 5)) for norm in NORMS),
        *((norm, 640, (16, 5)) for norm in NORMS),
        *((norm, 1280, (32, 5)) for norm in NORMS),
        *((norm, 3584, (64, 7)) for norm in NORMS),
        *((norm, 4096, (128, 4)) for norm in NORMS),
        *(("rms_norm", 7168, (224, 4)), ("layer_norm", 7168, (128, 7))),
        *(("rms_norm", 12288, (192, 8)), ("rms_norm", 16384, (256, 8))),
    ],
)
def test_rows_in_registers_fill_their_teams(norm: Any, n: int, layout: tuple[int, int]) -> None:
    bias = "float32" if norm == "layer_norm" else None
    for x, vector in itertools.product(("float16", "bfloat16"), (1, 8)):
        spec = ForwardSpec(norm, x, "float32", bias, x, False, True, False)
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardInRegisters)
        assert config.full
        assert (config.row_threads, config.packs_per_thread) == layout


@pytest.mark.parametrize(
    ("n", "weight", "layout"),  # threads of a row, packs of a thread
    [
        *((n, "float32", layout) for n, layout in ((1024, (32, 4)), (1152, (32, 5)))),
        *((n, "bfloat16", layout) for n, layout in ((3000, (64, 6)), (4096, (128, 4)))),
        *((n, "float32", layout) for n, layout in ((8192, (128, 8)), (12288, (192, 8)))),
        *((n, "bfloat16", layout) for n, layout in ((8192, (256, 4)), (16384, (512, 4)))),
        (24576, "bfloat16", (384, 8)),
    ],
)
def test_layer_norm_has_fewest_threads(n: int, weight: str, layout: tuple[int, int]) -> None:
    plain = ForwardSpec("layer_norm", "bfloat16", weight, weight, "bfloat16", False, True, False)
    for spec, vector in itertools.product(
        (plain, dataclasses.replace(plain, relu=True)), (1, 2, 4, 8)
    ):
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardInRegisters)
        assert (config.row_threads, config.packs_per_thread) == layout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_only_last_packs_lie_past_the_end_of_a_row(norm: Any, x: str, architecture: int) -> None:
    # In a team of one block: so kernels/team.cuh compares no others with it.
    bias = x if norm == "layer_norm" else None
    for n, weight, option in itertools.product(range(1, 30000, 377), (x, "float32"), (False, True)):
        forward = ForwardSpec(norm, x, weight, bias, x, option, True, relu=option)
        backward = BackwardSpec(norm, x, x, weight, bias, option, option)
        for spec in (forward, backward):
            config = configure(spec, n, 1, architecture)
            if isinstance(config, ForwardInRegisters | ForwardPipelined | BackwardPipelined):
                threads = getattr(config, "row_threads", config.block_threads)
                blocks = getattr(config, "cluster_blocks", 1)
                slots = (config.packs_per_thread - 1) * threads
                assert blocks > 1 or n >= slots * length_of(spec, config), config


@pytest.mark.parametrize(
    ("norm", "n", "layout"),  # blocks of a cluster, threads of a row, its packs, rows of a block
    [
        *((norm, 64, (1, 8, 1, 32)) for norm in NORMS),
        *((norm, 320, (1, 8, 5, 16)) for norm in NORMS),
        *((norm, 768, (1, 32, 3, 4)) for norm in NORMS),
        *((norm, 1280, (1, 32, 5, 4)) for norm in NORMS),
        *((norm, 3072, (1, 128, 3, 3)) for norm in NORMS),
        *((norm, 4608, (1, 192, 3, 2)) for norm in NORMS),
        *((norm, 8192, (1, 512, 2, 1)) for norm in NORMS),
        *(("rms_norm", 12288, (2, 384, 2, 1)), ("layer_norm", 12288, (4, 128, 3, 1))),
        *((norm, 18432, (2, 384, 3, 1)) for norm in NORMS),
        ("layer_norm", 5376, (1, 224, 3, 2)),
        *(("rms_norm", 14336, (2, 448, 2, 1)), ("layer_norm", 14336, (2, 224, 4, 1))),
        *((norm, 16384, (2, 256, 4, 1)) for norm in NORMS),
        *((norm, 20480, (2, 256, 5, 1)) for norm in NORMS),
        *((norm, 32768, (4, 256, 4, 1)) for norm in NORMS),
        *(("rms_norm", 5120, (1, 128, 5, 2)), ("layer_norm", 5120, (1, 160, 4, 2))),
    ],
)
def test_rows_fill_their_teams_and_teams_a_multiprocessor(
    norm: Any, n: int, layout: tuple[int, int, int, int]
) -> None:
    bias = "float32" if norm == "layer_norm" else None
    for x, vector in itertools.product(("float16", "bfloat16"), (1, 8)):
        spec = BackwardSpec(norm, x, x, "float32", bias, False, False)
        config = backward_config(spec, n, vector, 90)
        assert isinstance(config, BackwardPipelined)
        assert config.full == (config.cluster_blocks == 1 or config.packs_per_thread <= 4)
        found = config.cluster_blocks, config.row_threads, config.packs_per_thread
        assert (*found, config.rows_per_block) == layout


@pytest.mark.parametrize(
    ("n", "of_layer_norm", "of_rms_norm"),  # as above
    [
        (1536, (1, 64, 3, 6), (1, 64, 3, 6)),  # as many slots by 6 packs a thread, unless in bulk
        (1544, (1, 32, 7, 4), (1, 128, 2, 4)),
        (1792, (1, 32, 7, 4), (1, 128, 2, 4)),
        (1800, (1, 128, 2, 4), (1, 128, 2, 4)),
        (3200, (1, 64, 7, 4), (1, 224, 2, 2)),
        (3584, (1, 224, 2, 2), (1, 224, 2, 2)),  # in bulk
        (6000, (1, 128, 6, 2), (1, 384, 2, 1)),
        (6400, (1, 128, 7, 2), (1, 416, 2, 1)),
        (7168, (1, 448, 2, 1), (1, 448, 2, 1)),
        (22016, (2, 256, 6, 1), (8, 128, 3, 1)),
        (25600, (2, 256, 7, 1), (4, 416, 2, 1)),
        (28672, (4, 224, 4, 1), (4, 224, 4, 1)),
        (53248, (4, 256, 7, 1), (8, 416, 2, 1)),
        (57344, (8, 224, 4, 1), (8, 224, 4, 1)),
        (98304, (8, 256, 6, 1), (8, 256, 6, 1)),
        (114688, (8, 256, 7, 1), (8, 256, 7, 1)),
        (200704, (16, 224, 7, 1), (16, 224, 7, 1)),
    ],
)
def test_rows_that_leave_packs_empty_and_the_longest_have_6_or_7_a_thread(
    n: int, of_layer_norm: tuple[int, int, int, int], of_rms_norm: tuple[int, int, int, int]
) -> None:
    for (norm, layout), bias, vector in itertools.product(
        (("layer_norm", of_layer_norm), ("rms_norm", of_rms_norm)), (None, "float32"), (1, 8)
    ):
        spec = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False)
        config = backward_config(spec, n, vector, 90)
        if norm == "rms_norm" and bias and n >= 98304:
            assert getattr(config, "packs_per_thread", 0) < 6
            continue
        if norm == "rms_norm" and bias is None and n == 6000:  # held, its weight as well
            layout = of_layer_norm
            assert getattr(config, "hold_row", False) == (vector == 8)
        assert isinstance(config, BackwardPipelined)
        found = config.cluster_blocks, config.row_threads, config.packs_per_thread
        assert (*found, config.rows_per_block) == layout, norm
        held = config.packs_per_thread < 6 or config.hold_row
        assert config.hold_weight == (vector == 8 and held)


@pytest.mark.parametrize("bias", [None, "float32"])
def test_rms_norms_rows_of_two_blocks_are_by_two_packs_a_thread(bias: str | None) -> None:
    for n, of_weight, of_both in (
        (10240, (1, 256, 5), (1, 320, 4)),
        (10248, (2, 352, 2), (1, 448, 3)),
        (11264, (2, 352, 2), (1, 352, 4)),
        (12288, (2, 384, 2), (4, 128, 3)),
        (14336, (2, 448, 2), (2, 224, 4)),
        (15360, (2, 480, 2), (2, 480, 2)),
        (16384, (2, 256, 4), (2, 256, 4)),
        (22528, (8, 128, 3), (8, 128, 3)),  # not by four
    ):
        spec = BackwardSpec("rms_norm", "bfloat16", "bfloat16", "float32", bias, False, False)
        for vector in (1, 8):
            config = backward_config(spec, n, vector, 90)
            assert isinstance(config, BackwardPipelined)
            found = config.cluster_blocks, config.row_threads, config.packs_per_thread
            assert found == (of_both if bias else of_weight), (n, vector)
    config = backward_config(dataclasses.replace(spec, bitmask=True), 12288, 8, 90)
    assert isinstance(config, BackwardPipelined)
    assert config.cluster_blocks == 4


def test_rows_of_rms_norm_stay_in_registers_where_that_is_ahead() -> None:
    spec = BackwardSpec("rms_norm", "bfloat16", "bfloat16", "bfloat16", None, False, False)

    def held(spec: BackwardSpec, n: int, vector: int | None = None, architecture: int = 90) -> bool:
        divisors = n | pack_length(spec.x)
        config = backward_config(spec, n, vector or divisors & -divisors, architecture)
        assert isinstance(config, BackwardPipelined)
        return config.hold_row

    for n, expected in (
        *((n, False) for n in (64, 256, 512)),  # 1 and 2 packs of less than a warp or one
        *((n, True) for n in (768, 1024, 1280, 1536, 2048, 4096, 4100, 5120, 8192, 9216, 10240)),
        *((n, True) for n in (5136, 5376, 6000, 6136, 6144, 6152, 6656)),
        *((n, True) for n in (10248, 11264, 12288, 14336, 15360, 18432, 20480)),  # two blocks
        *((n, True) for n in (26000, 36864, 40960)),  # four, of many threads or packs
        *((n, False) for n in (16384, 32768, 33792)),  # 4 packs, or 352 threads of 3
        *((n, False) for n in (22528, 65536, 73728, 81920, 131072)),  # 8 and 16 blocks
    ):
        assert held(spec, n) == expected, n
        # By pairs or single elements dx waits in the row's place as well.
        assert not held(spec, n, 1)
        assert not held(dataclasses.replace(spec, norm="layer_norm", dbias="float32"), n)
        assert not held(dataclasses.replace(spec, dy="float32"), n)
    assert not held(spec, 16400)  # by two blocks of 352 threads, 3 packs each
    assert not held(spec, 9503, 1, 120)  # by single elements, whose cells do not fit there
    for x, dy, weight, expected in (
        *(("float32", dy, "float32", True) for dy in ("float32", "bfloat16")),
        *((x, x, "float64", False) for x in ("float64", "float32", "bfloat16")),
        ("bfloat16", "bfloat16", None, True),
    ):
        of_dtypes = dataclasses.replace(spec, x=x, dy=dy, weight=weight)
        assert held(of_dtypes, 2048) == expected, of_dtypes
    without = backward_config(dataclasses.replace(spec, weight=None), 12288, 8, 90)
    assert isinstance(without, BackwardPipelined)
    assert (without.cluster_blocks, without.row_threads) == (2, 384)
    assert held(dataclasses.replace(spec, zero_centered=True), 4096)
    assert not held(dataclasses.replace(spec, bitmask=True), 4096)
    for architecture in ARCHITECTURES:
        assert held(spec, 4096, architecture=architecture) == (architecture >= 80)
    # Beside a bias no more slots than three packs of 384 threads have, or fewer.
    with_bias = dataclasses.replace(spec, dbias="float32")
    assert held(with_bias, 4096)
    assert held(with_bias, 9216)
    assert not held(dataclasses.replace(with_bias, zero_centered=True), 9216)
    assert held(dataclasses.replace(with_bias, zero_centered=True), 4096)
    assert not held(with_bias, 5120)
    assert not held(with_bias, 1280)
    assert not held(with_bias, 9216, architecture=80)
    assert held(with_bias, 13312)
    assert not held(with_bias, 13312, architecture=120)
    # Nor without one more than five of 256.
    for n in (10752, 12288, 14336):
        assert not held(spec, n, architecture=80)


@pytest.mark.parametrize(
    ("norm", "bias", "n", "layout"),
    [
        *(("layer_norm", "float32", n, (128, 6, 2)) for n in (5136, 5368)),
        ("layer_norm", "float32", 5376, (224, 3, 2)),
        *(("rms_norm", "float32", n, (352, 2, 1)) for n in (5136, 5376)),
        *(("rms_norm", None, n, (128, 6, 2)) for n in (5136, 5376, 6136)),
        ("rms_norm", None, 5371, (224, 3, 2)),  # of no whole packs
        ("layer_norm", "float32", 10248, (448, 3, 1)),  # one team
        # Of no whole packs, without a held weight.
        *(("layer_norm", "float32", n, (224, 3, 2)) for n in (5130, 5137, 5369)),
    ],
)
def test_two_teams_of_224_threads_do_not_spill_beside_two_gradients(
    norm: Any, bias: str | None, n: int, layout: tuple[int, int, int]
) -> None:
    spec = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False)
    config = backward_config(spec, n, vectors(spec, n)[-1], 90)
    assert isinstance(config, BackwardPipelined)
    assert (config.row_threads, config.packs_per_thread, config.rows_per_block) == layout
    assert config.bulk == (n == 5376 and norm == "layer_norm")
    assert config.cells == (n % 4 > 0)
    if config.bulk:  # as it is on sm_90 alone
        elsewhere = backward_config(spec, n, 8, 100)
        assert isinstance(elsewhere, BackwardPipelined)
        assert (elsewhere.row_threads, elsewhere.packs_per_thread) == (128, 6)


@pytest.mark.parametrize("n", [10760, 10816, 11000, 12280])
def test_no_team_of_more_than_448_threads_has_3_packs(n: int) -> None:
    spec = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", False, False)
    config = backward_config(spec, n, 8, 80)
    assert isinstance(config, BackwardPipelined)
    assert config.packs_per_thread == 4


# Packs of a row that leave its thread too few registers for a bitmask beside two gradients.
OTHERWISE_WITH_BITMASK = {
    **{("layer_norm", x): [8, 16, 640] for x in ("float16", "bfloat16")},
    ("layer_norm", "float64"): [640],
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", DTYPES)
def test_a_bitmask_changes_no_layout(norm: Any, x: str) -> None:
    weight = "float64" if x == "float64" else "float32"
    bias = weight if norm == "layer_norm" else None
    length = pack_length(x)
    others = []
    for packs in (8, 16, 24, 32, 40, 64, 72, 96, 128, 160, 192, 256, 384, 512, 576, 640, 896):
        spec = BackwardSpec(norm, x, x, weight, bias, False, False)
        plain, masked = (
            backward_config(dataclasses.replace(spec, bitmask=bitmask), packs * length, length, 90)
            for bitmask in SWITCH
        )
        assert isinstance(plain, BackwardPipelined)
        assert isinstance(masked, BackwardPipelined)
        if norm == "rms_norm":  # which then holds no rows
            held = {field: getattr(masked, field) for field in ("hold_row", "bulk", "stages")}
            plain = dataclasses.replace(plain, **held, shared_sums=masked.shared_sums)
        if masked != plain:
            others.append(packs)
    assert others == OTHERWISE_WITH_BITMASK.get((norm, x), []), others


@pytest.mark.parametrize("n", [32, 64, 128])
def test_short_rows_of_layer_norm_have_more_threads_or_hold_weight_and_bias(n: int) -> None:
    def found(operands: str, *, relu: bool = False) -> tuple[int, bool]:
        spec = ForwardSpec(
            "layer_norm", "bfloat16", operands, operands, "bfloat16", False, False, relu
        )
        config = forward_config(spec, n, 8, 90)
        assert isinstance(config, ForwardInRegisters)
        return config.blocks_per_multiprocessor * config.block_threads, config.hold_weight

    assert found("float32") == (1024, False)
    assert found("float32", relu=True) == (768, False)
    assert found("bfloat16") == found("bfloat16", relu=True) == (640, True)


@pytest.mark.parametrize("n", [1000, 1024])
def test_a_warp_holds_the_weight_beside_4_packs_of_both_gradients(n: int) -> None:
    spec = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", False, False)
    config = backward_config(spec, n, 8, 90)
    assert isinstance(config, BackwardPipelined)
    assert (config.row_threads, config.packs_per_thread, config.hold_weight) == (32, 4, True)


@pytest.mark.parametrize(
    ("norm", "bias", "threads", "blocks"),
    [
        ("rms_norm", None, 256, 2),
        ("rms_norm", "float32", 256, 2),
        *(("layer_norm", "float32", 128, 4), ("layer_norm", None, 128, 4)),
    ],
)
def test_short_rows_of_layer_norm_have_smaller_blocks(
    norm: Any, bias: str | None, threads: int, blocks: int
) -> None:
    for n, bitmask in itertools.product((256, 512), SWITCH):
        spec = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, bitmask)
        config = backward_config(spec, n, 8, 90)
        assert isinstance(config, BackwardPipelined)
        assert (config.block_threads, config.blocks_per_multiprocessor) == (threads, blocks)
        assert config.hold_weight


@pytest.mark.parametrize(
    ("n", "architecture", "held"),
    [(7168, 90, True), (7168, 100, False), (8192, 100, True), (6656, 100, False)],
)
def test_a_weight_around_zero_beside_a_bitmask_is_held_where_it_does_not_spill(
    n: int, architecture: int, held: bool
) -> None:
    spec = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", True, True)
    without = (
        dataclasses.replace(spec, bitmask=False),
        dataclasses.replace(spec, zero_centered=False),
    )
    for one, expected in ((spec, held), *((other, True) for other in without)):
        config = backward_config(one, n, 8, architecture)
        assert isinstance(config, BackwardPipelined)
        # 6656 elements have 7 packs a thread without a bitmask.
        assert config.hold_weight == (expected and (one.bitmask or n != 6656))


def regimes(spec: Spec, architecture: int) -> tuple[tuple[type, int], ...]:
    """Return each regime and the KiB of its longest row, but of the streaming one that is last."""
    length = pack_length(spec.x)
    packs = sorted({2**k * quarters // 4 for k in range(2, 17) for quarters in (4, 5, 6, 7)})
    kinds = [(type(configure(spec, p * length, 1, architecture)), p * 16 // 1024) for p in packs]
    *changes, last = [
        here
        for here, following in itertools.pairwise([*kinds, (type(None), 0)])
        if here[0] is not following[0]
    ]
    assert last[0] in (ForwardStreaming, BackwardStreaming)
    return tuple(changes)


@pytest.mark.parametrize(("architecture", "blocks"), [(80, 1), (90, 4), (120, 4)])
@pytest.mark.parametrize("norm", NORMS)
def test_long_rows_are_streamed_by_clusters(norm: str, architecture: int, blocks: int) -> None:
    forward = ForwardSpec(norm, "float32", "float32", "float32", "float32", False, True, False)
    backward = BackwardSpec(norm, "float32", "float32", "float32", "float32", False, False)
    for spec, vector in itertools.product((forward, backward), (1, 4)):
        config = configure(spec, 262148, vector, architecture)  # more than strips hold, too
        assert isinstance(config, (ForwardStreaming, BackwardStreaming))
        # RMSNorm's forward has four times as many, where a multiprocessor holds 2048 threads.
        more = spec is forward and norm == "rms_norm" and architecture in (90, 100)
        assert config.cluster_blocks == (4 * blocks if more else blocks)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [163840, 229376, 262144])
def test_full_long_rows_are_pipelined_by_16_blocks(norm: str, n: int) -> None:
    layer_norm = norm == "layer_norm"
    bias = "float32" if layer_norm else None
    plain = ForwardSpec(norm, "float32", "float32", bias, "float32", False, True, False)
    of_16_blocks = []
    for options, vector in itertools.product(({}, {"relu": True}, {"zero_centered": True}), (1, 4)):
        spec = dataclasses.replace(plain, **options)
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.cluster_blocks, config.packs_per_thread) == (16, n // 32768)
        assert config.hold_weight
        assert config.full
        most = layer_norm and n == 262144
        held = vector == 4 and not spec.relu  # else it spills
        assert config.cells == (vector == 1)
        two_of_cells = config.cells and layer_norm and n == 229376
        assert config.stages == (2 if (most and not held) or two_of_cells else 3)
        assert config.hold_bias == (most and held)
        # A block's shares of rows and, of LayerNorm, of the bias, behind its mailboxes, the sums of
        # 16 blocks, by turns, and of 16 warps, and what rows are asked for; a cell more a warp.
        shares = config.stages + (layer_norm and not config.hold_bias)
        shared_bytes = 896 + 128 + shares * (n // 16 * 4)
        shared_bytes += config.cells * config.stages * 16 * config.packs_per_thread * 16
        assert forward_instantiation(spec, config).shared_bytes == shared_bytes
        assert config.counted == (not (most and not held))
        alike = dataclasses.replace(config, vector=4, cells=False, stages=3)
        of_16_blocks.append(alike)
    assert len(set(of_16_blocks)) == (2 if layer_norm and n == 262144 else 1)
    for other in (
        dataclasses.replace(plain, weight="float64", bias=None),
        dataclasses.replace(plain, x="float64", y="float64", bias=None),
    ):
        rows = n * 4 // ITEMSIZE[other.x]
        assert isinstance(forward_config(other, rows, 1, 90), ForwardStreaming), other
    assert isinstance(forward_config(plain, n + 4, 4, 90), ForwardStreaming)
    assert isinstance(forward_config(plain, n, 4, 80), ForwardStreaming)


@pytest.mark.parametrize(("norm", "counted"), [("rms_norm", True), ("layer_norm", False)])
def test_the_bias_of_the_longest_rows_is_held_or_leaves_two_stages(
    norm: Any, counted: bool
) -> None:
    spec = ForwardSpec(norm, "float32", "float32", "float32", "float32", False, True, False)
    for relu, found in ((False, (3, True, True)), (True, (2, False, counted))):
        config = forward_config(dataclasses.replace(spec, relu=relu), 262144, 4, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.stages, config.hold_bias, config.counted) == found
    slim = forward_config(dataclasses.replace(spec, bias="bfloat16"), 262144, 4, 90)
    assert isinstance(slim, ForwardPipelined)
    assert (slim.stages, slim.hold_bias) == (3, False)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("packs", [5, 6, 7, 8])
def test_full_long_rows_of_16_bits_are_pipelined_by_16_blocks(norm: str, packs: int) -> None:
    layer_norm = norm == "layer_norm"
    bias = "float16" if layer_norm else None
    plain = ForwardSpec(norm, "float16", "float16", bias, "float16", False, True, False)
    n = 65536 * packs
    for vector in (1, 8):
        config = forward_config(plain, n, vector, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.cluster_blocks, config.packs_per_thread) == (16, packs)
        assert (config.hold_weight, config.hold_bias) == (True, False)
        assert config.cells == (vector == 1)
        assert config.stages == (2 if layer_norm and packs >= 8 - config.cells else 3)
    # What would spill, and what has no room.
    clamped = dataclasses.replace(plain, relu=True, y="float32")
    streamed = layer_norm and packs > 6
    assert isinstance(forward_config(clamped, n, 8, 90), ForwardStreaming) == streamed
    wide_affine = dataclasses.replace(plain, weight="float32", bias="float32")
    assert isinstance(forward_config(wide_affine, n, 8, 90), ForwardStreaming) == (packs == 8)


@pytest.mark.parametrize(("x", "n"), [("float32", 8192), ("float32", 5000), ("float64", 4096)])
def test_wide_rows_of_layer_norm_have_8_packs_a_thread(x: str, n: int) -> None:
    spec = ForwardSpec("layer_norm", x, "float32", "float32", x, False, True, False)
    for vector in (1, pack_length(x)):
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardInRegisters)
        assert (config.packs_per_thread, config.row_threads) == (8, 256 if n != 5000 else 160)
        # They do not hold 64 registers of weight and bias beside those packs and a row's end, nor
        # beside float64.
        wide = dataclasses.replace(spec, weight=x, bias=x)
        held = [few for _, few in few_rows_configs(wide, config, n, 90, 132) if few.hold_weight]
        assert len(held) == 3 * (x == "float32" and vector == 4 and n == 8192)
    assert isinstance(forward_config(spec, 2 * n, 1, 90), ForwardPipelined)


def test_full_rows_are_copied_in_bulk() -> None:
    plain = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", False, False)
    for n, blocks, stages in (
        *((1024, 1, None), (2048, 1, 4), (4096, 1, 4), (8192, 1, 4), (8184, 1, None)),
        *((12288, 4, 5), (16384, 2, None), (32768, 4, 6), (32760, 4, None)),
        *((65536, 8, 6), (131072, 16, 6)),
    ):
        for vector in (1, 8):
            config = backward_config(plain, n, vector, 90)
            assert isinstance(config, BackwardPipelined)
            in_bulk = vector == 8 and stages is not None
            assert (config.cluster_blocks, config.bulk) == (blocks, in_bulk), (n, vector)
            if in_bulk:
                assert config.stages == stages
                # Beside the stages and sums, a line of mailboxes.
                without = dataclasses.replace(config, bulk=False)
                sizes = [backward_pipelined_bytes(plain, one) for one in (config, without)]
                assert sizes[0] - sizes[1] == 128
                # The bits of a row are those of rows that are not.
                aside = backward_config(plain, n, 1, 90)
                for name in ("row_threads", "packs_per_thread", "cluster_blocks"):
                    assert getattr(config, name) == getattr(aside, name), name
    # RMSNorm of 16 bits those of two blocks alone, with a bias as without.
    for bias, n, vector in itertools.product((None, "float32"), (8192, 16384, 32768), (1, 8)):
        config = backward_config(
            dataclasses.replace(plain, norm="rms_norm", dbias=bias), n, vector, 90
        )
        assert isinstance(config, BackwardPipelined)
        in_bulk = (n, vector) == (16384, 8)
        assert (config.bulk, config.stages) == (in_bulk, 5 if in_bulk else 3)
    # Of float32 all clusters, of float64 all rows of two warps or more; the blocks of a row and the
    # stages of either norm.
    for x, n, blocks, of_rms_norm, of_layer_norm in (
        *(("float32", 4096, 1, None, 4), ("float32", 8192, 2, 5, 5)),
        # RMSNorm's by one team of 320 to 448 threads.
        *(("bfloat16", n, 1, None, 4) for n in (2048, 5376, 7680)),
        *(("bfloat16", 6144, 1, 4, 4), ("bfloat16", 10240, 1, 4, 4), ("float32", 3072, 1, 4, 4)),
        ("bfloat16", 32768, 4, None, 6),
        *(("float32", 16384, 4, 5, 6), ("float32", 65536, 16, 5, 6)),
        ("float32", 20480, 4, None, None),  # 5 packs a thread, too many beside the stages
        *(("float64", 512, 1, 4, 4), ("float64", 2048, 1, 4, 4), ("float64", 4096, 2, 5, 5)),
        *(("float64", 8192, 4, 5, 6), ("float64", 128, 1, None, None)),
        *(("float64", 6144, 8, 5, 5), ("float32", 12288, 8, 5, 5)),  # 3 blocks a multiprocessor
    ):
        for norm, stages in (("rms_norm", of_rms_norm), ("layer_norm", of_layer_norm)):
            of_norm = BackwardSpec(norm, x, x, x, x, False, False)
            config = backward_config(of_norm, n, pack_length(x), 90)
            assert isinstance(config, BackwardPipelined)
            assert (config.cluster_blocks, config.bulk) == (blocks, stages is not None), (x, n)
            assert not config.bulk or config.stages == stages, (norm, x, n)
    alone = dataclasses.replace(plain, norm="rms_norm", dbias=None)
    for n, in_bulk in (
        *((3584, False), (5376, False), (6144, True), (7168, True)),
        *((7680, False), (9216, False), (10240, False)),
        # By two blocks; three packs a thread that are held are not.
        *((11264, True), (12288, True), (14336, True), (15360, True), (18432, False)),
    ):
        config = backward_config(alone, n, 8, 90)
        assert isinstance(config, BackwardPipelined)
        assert config.bulk == in_bulk, n
    for other in (
        dataclasses.replace(plain, norm="rms_norm"),
        dataclasses.replace(plain, dy="float32"),
        dataclasses.replace(plain, weight=None, dbias=None),
    ):
        config = backward_config(other, 4096, pack_length(other.x), 90)
        assert isinstance(config, BackwardPipelined)
        assert not config.bulk, other
    for architecture in ARCHITECTURES:
        config = backward_config(plain, 4096, 8, architecture)
        assert isinstance(config, BackwardPipelined)
        assert config.bulk == (architecture == 90)


@pytest.mark.parametrize("norm", NORMS)
def test_rows_at_any_address_are_copied_by_cells_where_they_fit(norm: Any) -> None:
    bias = "float32" if norm == "layer_norm" else None
    for x, dy, more in (
        *(("bfloat16", "bfloat16", (16, 16)), ("float16", "float32", (16, 16))),
        *(("float32", "bfloat16", (16, 8)), ("float32", "float32", (16, 16))),
        ("float64", "float32", ()),
    ):
        spec = BackwardSpec(norm, x, dy, "float32", bias, False, False)
        for n, vector in itertools.product((63, 777, 4097, 20001, 4098, 4100, 4096), (1, 2, 4, 8)):
            if n % vector or vector > pack_length(x):
                continue
            config = backward_config(spec, n, vector, 90)
            assert isinstance(config, BackwardPipelined)
            small = vector < pack_length(x) and vector * ITEMSIZE[x] <= 4
            assert config.cells == (small and len(more) > 0), (n, vector)
            # A cell of each operand more for each warp, or each row of less than one, and what
            # makes 16 bytes of an odd number of 8.
            groups = config.block_threads // min(32, config.row_threads) * config.packs_per_thread
            without = dataclasses.replace(config, cells=False)
            sizes = [backward_pipelined_bytes(spec, one) for one in (config, without)]
            whole = sum((groups * cell + 15) // 16 * 16 for cell in more)
            assert sizes[0] - sizes[1] == config.stages * whole * small
    # Where shared memory has no room for them the layout, and with it the bits, are the same.
    # Before sm_80 no copy is asynchronous.
    spec = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False)
    for n, architecture, fits in (
        *((512, 86, False), (4096, 75, False), (600, 80, False), (6000, 90, True)),
        (1600, 90, norm == "rms_norm"),
    ):
        layouts = []
        for vector in (1, 2, 8):
            config = backward_config(spec, n, vector, architecture)
            assert isinstance(config, BackwardPipelined)
            assert config.cells == (fits and vector < 8), (n, architecture)
            layouts.append((config.cluster_blocks, config.row_threads, config.packs_per_thread))
        assert len(set(layouts)) == 1


@pytest.mark.parametrize("norm", NORMS)
def test_accesses_of_8_bytes_leave_the_layout_and_what_is_held_as_it_is(norm: Any) -> None:
    bias = "float32" if norm == "layer_norm" else None
    for x, ns in (("bfloat16", (100, 300, 1500, 4100, 8188, 20004)), ("float32", (302, 4102))):
        spec = BackwardSpec(norm, x, x, "float32", bias, False, False)
        length = pack_length(x)
        for n in ns:
            config = backward_config(spec, n, length // 2, 90)
            whole = backward_config(spec, n + length // 2, length, 90)
            assert isinstance(config, BackwardPipelined)
            assert isinstance(whole, BackwardPipelined)
            assert (config.hold_weight, config.cells) == (True, False), n
            # The sums of a lone team's rows are in partials, since L1 has what they would take.
            assert config.shared_sums == (whole.shared_sums if config.rows_per_block > 1 else 0)
            alike = {"full": False, "bulk": False, "through_l1": True, "vector": length // 2}
            alike |= {"shared_sums": config.shared_sums, "stages": config.stages}
            alike["reduction"] = config.reduction
            assert dataclasses.replace(whole, **alike) == config, n


@pytest.mark.parametrize("norm", NORMS)
def test_forward_accesses_of_8_bytes_hold_the_weight_as_those_of_16(norm: Any) -> None:
    def config(weight: str, n: int, vector: int) -> ForwardInRegisters | ForwardPipelined:
        bias = weight if norm == "layer_norm" else None
        spec = ForwardSpec(norm, "bfloat16", weight, bias, "bfloat16", False, False, False)
        found = forward_config(spec, n, vector, 90)
        assert isinstance(found, ForwardInRegisters | ForwardPipelined)
        if isinstance(found, ForwardInRegisters) and vector < 8:
            few = few_rows_configs(spec, found, n, 90, 132)
            # LayerNorm's weight and bias of 1500 and more elements of float32 leave no registers.
            too_many = norm == "layer_norm" and weight == "float32" and n >= 1500
            assert bool(few) == (vector == 4 and not too_many)
        return found

    # LayerNorm's of several warps hold none; 300 in packs of 8 bytes has twice the threads.
    most = {"rms_norm": {"float32": 1500, "bfloat16": 1500}, "layer_norm": {"bfloat16": 900}}[norm]
    for weight, n in itertools.product(("float32", "bfloat16"), (100, 300, 900, 1500, 4100)):
        assert config(weight, n, 4).hold_weight == (n <= most.get(weight, 0))
        assert not config(weight, n, 2).hold_weight
    # By one cluster both, but not a 16-bit weight in more than two blocks; by two the weight.
    for weight, n, held in (
        *(("float32", n, (True, True)) for n in (24580, 98308, 200004)),
        ("bfloat16", 28676, (True, True)),
        ("bfloat16", 114692, (False, False)),
        ("bfloat16", 40964, (True, False)),
    ):
        found = config(weight, n, 4)
        assert isinstance(found, ForwardPipelined)
        assert (found.hold_weight, found.hold_bias) == held, (weight, n)


@pytest.mark.parametrize("norm", NORMS)
def test_accesses_of_8_bytes_hold_no_weight_where_it_would_spill(norm: Any) -> None:
    bias = "float32" if norm == "layer_norm" else None
    plain = ForwardSpec(norm, "bfloat16", "float32", bias, "bfloat16", False, True, False)
    relu, wider = (dataclasses.replace(plain, **how) for how in ({"relu": True}, {"y": "float32"}))
    for spec in (plain, relu, wider):
        pipelined = forward_config(spec, 28676, 4, 90)
        assert isinstance(pipelined, ForwardPipelined)
        assert pipelined.packs_per_thread == 4
        assert pipelined.hold_weight == (norm == "rms_norm" or spec is plain)
    if norm == "rms_norm":
        for spec in (plain, relu, dataclasses.replace(plain, zero_centered=True)):
            slim = dataclasses.replace(spec, weight="bfloat16")
            in_registers = forward_config(slim, 300, 4, 90)
            assert isinstance(in_registers, ForwardInRegisters)
            assert in_registers.hold_weight == (spec is plain)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", ["float64", "float32", "float16", "bfloat16"])
def test_rows_of_no_whole_packs_in_registers_have_packs_of_8_bytes(norm: Any, x: str) -> None:
    # Where those are whole, at any address: the bits must not depend on it.
    length = pack_length(x)
    spec = ForwardSpec(norm, x, "float32", "float32", x, False, True, False)
    for packs, architecture in itertools.product((5, 13, 32, 38, 188, 513, 751), ARCHITECTURES):
        n = packs * length - length // 2
        halves = {}
        for vector in vectors(spec, n):
            config = forward_config(spec, n, vector, architecture)
            assert isinstance(config, ForwardInRegisters)
            of_whole = forward_config(spec, packs * length, length, architecture)
            assert isinstance(of_whole, ForwardInRegisters)
            halves[vector] = config.row_threads, config.packs_per_thread, config.pack_length
            if x == "float64":
                assert config.pack_length == length
                continue
            assert config.pack_length == length // 2
            # As many threads as of whole packs, or twice as many where they would have 4 and more.
            more = of_whole.row_threads < 32 and of_whole.packs_per_thread >= 4
            assert config.row_threads == of_whole.row_threads * (2 if more else 1)
        assert len(set(halves.values())) == 1
    for n in (188 * length, 188 * length - 1, 65 * length - 1, 64 * length - 1, 2 * length - 1):
        odd = n % 2 and (n < 64 * length or (norm == "layer_norm" and x == "bfloat16"))
        config = forward_config(spec, n, 1, 90)
        assert isinstance(config, ForwardInRegisters)
        assert config.pack_length == (length // 2 if odd and x != "float64" else length)


def test_long_odd_rows_of_layer_norm_wait_in_shared_memory() -> None:
    spec = ForwardSpec("layer_norm", *4 * ("bfloat16",), False, True, False)
    for n, resident in ((16383, True), (16385, False), (20001, False), (20002, True)):
        assert isinstance(forward_config(spec, n, n & -n, 90), ForwardInRegisters) == resident, n


def test_what_holds_the_weight_beside_cells() -> None:
    held = ForwardSpec(
        "layer_norm", "bfloat16", "float32", "float32", "bfloat16", False, True, False
    )
    for n, vector in ((12289, 1), (12290, 2), (28671, 1)):
        config = forward_config(held, n, vector, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.cells, config.hold_weight, config.hold_bias) == (True, True, False)
        assert config.blocks_per_multiprocessor == 1
    for n, how in itertools.product(
        (12289, 12290, 28671),
        ({"relu": True}, {"y": "float32"}, {"weight": "float64"}, {"bias": "float64"}),
    ):
        config = forward_config(dataclasses.replace(held, **how), n, n & -n, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.cells, config.hold_weight) == (True, False), (n, how)
    rms_norm = dataclasses.replace(held, norm="rms_norm", bias=None)
    config = forward_config(rms_norm, 98305, 1, 90)
    assert isinstance(config, ForwardPipelined)
    assert (config.cells, config.hold_weight) == (True, False)


@pytest.mark.parametrize(("y", "relu"), [("float32", False), ("bfloat16", True)])
def test_two_clusters_of_what_spills_beside_cells(y: str, relu: bool) -> None:
    spec = ForwardSpec("layer_norm", "bfloat16", "float32", "float32", y, False, True, relu)
    for n, vector, blocks, held in (
        (20001, 1, 1, False),
        (20002, 2, 1, False),
        (20004, 4, 2, True),
        (20004, 2, 2, False),
        (20008, 1, 2, False),
    ):
        config = forward_config(spec, n, vector, 90)
        assert isinstance(config, ForwardPipelined)
        assert (config.blocks_per_multiprocessor, config.hold_weight) == (blocks, held), n


def test_odd_rows_of_layer_norm() -> None:
    def layout(n: int, architecture: int = 90, **how: Any) -> tuple[int, ...]:
        spec = ForwardSpec("layer_norm", *4 * ("bfloat16",), False, True, False)
        config = forward_config(dataclasses.replace(spec, **how), n, 1, architecture)
        assert isinstance(config, ForwardInRegisters)
        found = (config.row_threads, config.packs_per_thread, config.pack_length)
        return *found, config.blocks_per_multiprocessor

    wide = {"weight": "float32", "bias": "float32"}
    # By 8 packs of 16 bytes, but for those of 96 threads, or by 6 with a narrow weight and bias.
    assert layout(5119, **wide) == (96, 14, 4, 6)
    assert layout(5121, **wide) == (128, 11, 4, 6)
    assert layout(6143, **wide) == (128, 12, 4, 6)
    assert layout(6145, **wide) == (128, 13, 4, 5)
    assert layout(12287) == (256, 6, 8, 3)
    assert layout(12289) == (224, 7, 8, 2)
    assert layout(777, weight="float32") == (32, 7, 4, 12)
    assert layout(777) == (16, 7, 8, 8)
    assert layout(777, **wide, x="float16")[2] == 8
    assert layout(1271, **wide) == (32, 10, 4, 10)  # by more of a warp a row it would spill
    # As many threads as registers allow, where it was measured.
    assert layout(4097) == (96, 6, 8, 8)
    assert layout(4097, architecture=100) == layout(4097, y="float32") == (96, 6, 8, 5)
    assert layout(4097, relu=True) == (96, 6, 8, 5)


@pytest.mark.parametrize(
    ("norm", "n", "relu", "vector", "layout"),
    [
        ("layer_norm", 2052, False, 4, (64, 9, 4, 8)),
        ("layer_norm", 2052, False, 2, (64, 9, 4, 12)),
        ("layer_norm", 3004, False, 4, (64, 12, 4, 12)),
        ("layer_norm", 4100, False, 4, (96, 11, 4, 8)),
        ("layer_norm", 4100, True, 4, (96, 11, 4, 6)),
        ("layer_norm", 4100, False, 2, (96, 11, 4, 8)),
        ("layer_norm", 4100, True, 2, (96, 11, 4, 5)),
        # At most accesses of 4 bytes, or of 2, of which 8 packs of 16 bytes are too many.
        ("layer_norm", 4098, False, 2, (96, 11, 4, 8)),
        ("layer_norm", 5762, False, 2, (128, 12, 4, 6)),
        ("layer_norm", 8190, False, 2, (256, 8, 4, 3)),
        ("layer_norm", 12002, False, 2, (192, 16, 4, 3)),
        ("layer_norm", 4097, False, 1, (96, 6, 8, 8)),
        ("layer_norm", 10241, False, 1, (224, 6, 8, 3)),
        ("rms_norm", 258, False, 2, (16, 5, 4, 12)),
        ("rms_norm", 4098, False, 2, (192, 6, 4, 4)),
        ("rms_norm", 511, False, 1, (32, 4, 4, 12)),
        ("rms_norm", 513, False, 1, (16, 5, 8, 10)),
        ("layer_norm", 8196, False, 4, (160, 13, 4, 4)),
        ("layer_norm", 12004, False, 4, (192, 16, 4, 3)),
        ("layer_norm", 20004, False, 4, (320, 16, 4, 2)),
        ("layer_norm", 23196, False, 4, (384, 8, 8, 2)),
        ("rms_norm", 4100, False, 4, (192, 6, 4, 4)),
        ("rms_norm", 12004, False, 4, (192, 16, 4, 2)),
        ("rms_norm", 4, True, 4, (2, 1, 4, 12)),
        ("rms_norm", 12, True, 1, (2, 2, 4, 12)),
    ],
)
def test_layouts_of_packs_of_8_bytes(
    norm: Any, n: int, relu: bool, vector: int, layout: tuple[int, ...]
) -> None:
    # Threads of a row, packs of a thread, elements of a pack, blocks of a multiprocessor.
    x = "bfloat16"
    bias = x if norm == "layer_norm" else None
    config = forward_config(ForwardSpec(norm, x, x, bias, x, False, True, relu), n, vector, 90)
    assert isinstance(config, ForwardInRegisters)
    found = (config.row_threads, config.packs_per_thread, config.pack_length)
    assert (*found, config.blocks_per_multiprocessor) == layout


@pytest.mark.parametrize("n", [204, 420, 8188, 12004, 16132, 16380])
def test_few_rows_of_packs_of_8_bytes_have_room_for_them(n: int) -> None:
    x = "bfloat16"
    for norm in NORMS:
        bias = x if norm == "layer_norm" else None
        spec = ForwardSpec(norm, x, x, bias, x, False, True, False)
        config = forward_config(spec, n, 4, 90)
        assert isinstance(config, ForwardInRegisters)
        assert config.pack_length == 4
        few_rows = few_rows_configs(spec, config, n, 90, 132)
        assert few_rows
        for _, few in few_rows:
            assert few.cluster_blocks * few.row_threads * few.packs_per_thread * 4 >= n
            # 16 packs a thread would spill.
            assert few.cluster_blocks == 1 or few.packs_per_thread <= 8


@pytest.mark.parametrize(("vector", "blocks"), [(8, 2), (4, 2), (2, 1), (1, 1)])
def test_rows_of_8_packs_a_thread_have_two_blocks_if_accesses_are_wide(
    vector: int, blocks: int
) -> None:
    x = "bfloat16"
    spec = ForwardSpec("layer_norm", x, x, x, x, False, True, False)
    config = forward_config(spec, 20000, vector, 90)
    assert isinstance(config, ForwardInRegisters)
    assert (config.packs_per_thread, config.blocks_per_multiprocessor) == (8, blocks)


@pytest.mark.parametrize(
    ("norm", "x", "weight", "n", "plain", "with_options", "elsewhere"),  # threads at once
    [
        ("rms_norm", "bfloat16", "bfloat16", 2696, 9 * 96, 9 * 96, 6 * 96),
        ("rms_norm", "bfloat16", "bfloat16", 3976, 7 * 128, 7 * 128, 5 * 128),
        ("rms_norm", "float16", "float16", 4872, 6 * 160, 4 * 160, 4 * 160),
        ("rms_norm", "bfloat16", "float32", 2696, 8 * 96, 8 * 96, 6 * 96),
        ("rms_norm", "bfloat16", "float32", 3976, 5 * 128, 5 * 128, 5 * 128),
        ("rms_norm", "float32", "float32", 1348, 6 * 96, 6 * 96, 6 * 96),  # not measured
        ("rms_norm", "bfloat16", "bfloat16", 4096, 8 * 128, 7 * 128, 5 * 128),  # full
        ("layer_norm", "float16", "float16", 4096, 6 * 128, 6 * 128, 6 * 128),
        ("layer_norm", "float16", "float16", 5120, 6 * 160, 6 * 160, 4 * 160),
        ("layer_norm", "float16", "float32", 8192, 4 * 256, 4 * 256, 3 * 256),
        ("layer_norm", "bfloat16", "bfloat16", 8192, 3 * 256, 3 * 256, 3 * 256),
    ],
)
def test_rows_of_4_packs_a_thread_have_the_registers_that_they_need(
    norm: Any, x: str, weight: str, n: int, plain: int, with_options: int, elsewhere: int
) -> None:
    bias = weight if norm == "layer_norm" else None
    spec = ForwardSpec(norm, x, weight, bias, x, False, False, False)

    def threads_of(spec: ForwardSpec, architecture: int) -> int:
        config = forward_config(spec, n, pack_length(x), architecture)
        assert isinstance(config, ForwardInRegisters)
        assert config.packs_per_thread == 4
        return config.block_threads * config.blocks_per_multiprocessor

    assert threads_of(spec, 90) == plain
    assert threads_of(spec, 80) == elsewhere
    for option in ("relu", "zero_centered"):
        assert threads_of(dataclasses.replace(spec, **{option: True}), 90) == with_options
    if x == "float16" and n != 4096:  # of which more would be spilled
        assert threads_of(dataclasses.replace(spec, y="float32"), 90) == elsewhere


def test_accesses_of_8_bytes_leave_rows_of_4_packs_their_registers() -> None:
    x = "float16"
    for norm, n, bias, threads in (
        ("layer_norm", 5120, x, 4 * 160),
        ("rms_norm", 1928, None, 12 * 64),
    ):
        spec = ForwardSpec(norm, x, x, bias, x, False, False, False)  # type: ignore[arg-type]
        config = forward_config(spec, n, 4, 90)
        assert isinstance(config, ForwardInRegisters)
        assert config.packs_per_thread == 4
        assert config.block_threads * config.blocks_per_multiprocessor == threads


@pytest.mark.parametrize(("n", "rows"), [(5120, 6), (6144, 5), (7168, None), (8192, 4)])
def test_few_rows_of_float32_of_layer_norm_run_at_once(n: int, rows: int | None) -> None:
    x = "float32"
    plain = ForwardSpec("layer_norm", x, x, x, x, False, False, False)

    def most_rows(spec: ForwardSpec, n: int, vector: int, architecture: int) -> set[int]:
        config = forward_config(spec, n, vector, architecture)
        assert isinstance(config, ForwardInRegisters)
        few = few_rows_configs(spec, config, n, architecture, 132)
        return {most // 132 for most, one in few if not one.hold_weight and one != config}

    assert most_rows(plain, n, 4, 90) == ({rows} if rows else set())
    for option in ({"relu": True}, {"zero_centered": True}, {"y": "float16"}):
        other = dataclasses.replace(plain, **option)  # type: ignore[arg-type]
        assert most_rows(other, n, 4, 90) == set()
    for others in ((n - 4, 4, 90), (n, 2, 90), (n, 4, 100)):
        assert most_rows(plain, *others) == set()


@pytest.mark.parametrize(
    ("n", "blocks", "elsewhere"),
    [(10240, 5, 5), (12288, 4, 4), (13312, 4, 3), (14336, 4, 3), (18432, 3, 2), (20480, 2, 2)],
)
def test_rows_of_layer_norm_by_224_to_288_threads_have_more_at_once(
    n: int, blocks: int, elsewhere: int
) -> None:
    spec = ForwardSpec("layer_norm", *4 * ("bfloat16",), False, False, False)
    for architecture, found in ((90, blocks), (100, elsewhere)):
        config = forward_config(spec, n, 8, architecture)
        assert isinstance(config, ForwardInRegisters)
        assert (config.packs_per_thread, config.blocks_per_multiprocessor) == (8, found)


@pytest.mark.parametrize(
    ("x", "n", "layout"),  # threads, packs of each, rows at once on a multiprocessor
    [
        ("float16", 10240, None),
        ("float16", 12288, (192, 8, 5)),
        ("float16", 13312, None),  # 6.5 warps
        ("float16", 14336, (224, 8, 4)),
        ("float16", 16384, (256, 8, 4)),
        ("bfloat16", 16384, (256, 8, 4)),
        ("bfloat16", 8192, None),
        ("bfloat16", 14336, None),  # 8 packs a thread as it is
    ],
)
def test_few_long_rows_of_layer_norm_are_folded(
    x: str, n: int, layout: tuple[int, int, int] | None
) -> None:
    plain = ForwardSpec("layer_norm", x, x, x, x, False, False, False)

    def folded(spec: ForwardSpec, n: int, vector: int, architecture: int) -> list[tuple[int, ...]]:
        config = forward_config(spec, n, vector, architecture)
        assert isinstance(config, ForwardInRegisters)
        return [
            (few.row_threads, few.packs_per_thread, most // 132)
            for most, few in few_rows_configs(spec, config, n, architecture, 132)
            if few.folded
        ]

    assert folded(plain, n, 8, 90) == ([layout] if layout else [])
    for other in ({"relu": True}, {"zero_centered": True}, {"y": "float32"}):
        assert folded(dataclasses.replace(plain, **other), n, 8, 90) == []  # type: ignore[arg-type]
    for others in ((n - 8, 8, 90), (n, 4, 90), (n, 8, 100)):
        assert folded(plain, *others) == []


@pytest.mark.parametrize(("vector", "has_some"), [(8, True), (4, False)])
def test_kernels_of_64_registers_are_of_whole_packs(vector: int, has_some: bool) -> None:
    x = "bfloat16"
    spec = ForwardSpec("rms_norm", x, x, None, x, False, True, False)
    config = forward_config(spec, 16384, vector, 90)
    assert isinstance(config, ForwardInRegisters)
    few = [one for _, one in few_rows_configs(spec, config, 16384, 90, 132)]
    threads = [one.block_threads * one.blocks_per_multiprocessor for one in few]
    assert (65536 // 64 in threads) == has_some


@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_do_not_begin_at_lines_come_by_way_of_l1_or_to_turned_places(norm: Any) -> None:
    bias, layer_norm = ("float32", True) if norm == "layer_norm" else (None, False)
    backward = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False)
    by_l1, turned, by_both, neither = (True, False), (False, True), (True, True), (False, False)
    short = dataclasses.replace(backward, weight="float64", dbias=None, bitmask=True)
    held = BackwardSpec("rms_norm", "bfloat16", "bfloat16", "bfloat16", None, False, False)
    narrow = dataclasses.replace(backward, x="float32")
    wide = dataclasses.replace(backward, dy="float32")
    for spec, n, vector, expected in (
        *((backward, n, 8, by_l1) for n in (1000, 1016, 4104, 20008, 65544)),
        *((backward, n, 8, neither) for n in (1024, 4096, 16384)),  # at lines
        (backward, 200008, 8, turned),  # 198 KiB
        (backward, 200001, 1, neither),  # by cells
        # RMSNorm's 448 threads of a block that holds rows; LayerNorm's 7 packs a thread.
        (backward, 6680, 8, turned if layer_norm else by_both),
        (dataclasses.replace(backward, bitmask=True), 6680, 8, by_l1),
        *((backward, n, vector, by_l1) for n, vector in ((1024, 1), (4096, 4))),  # elsewhere
        *((backward, n, 1, by_l1) for n in (777, 20001)),
        (backward, 4097, 1, by_l1),  # without its sums
        # Of LayerNorm, by 448 threads, they spill.
        (backward, 10399, 1, neither if layer_norm else by_l1),
        (backward, 10408, 8, turned if layer_norm else by_l1),
        (dataclasses.replace(backward, x="float32", dy="float32"), 4096, 4, neither),
        (dataclasses.replace(backward, x="float32"), 4112, 4, by_l1),  # dy alone
        (held, 13008, 8, by_l1),  # of two blocks
        (held, 6200, 8, by_both),
        (short, 280, 8, neither),  # which leave it no room, of less than a warp
        # Of packs of x and dy in places of other sizes, of which L1 has no room for LayerNorm's.
        (narrow, 5124, 4, neither if layer_norm else by_l1),
        # Of a wider dy all, with what L1 is left; of LayerNorm 200008 is in strips.
        *((wide, n, 8, by_l1) for n in (4096, 4104, 4608, 5376, 8192, 65536)),
        (wide, 200008, 8, neither if layer_norm else by_l1),
        (wide, 20001, 1, neither),  # by cells
    ):
        for architecture in (80, 90, 100):
            config = backward_config(spec, n, vector, architecture)
            found = neither
            if isinstance(config, BackwardPipelined):
                found = config.through_l1, config.turned
            assert found == (expected if architecture == 90 else neither), (spec, n, architecture)
    forward = ForwardSpec(norm, "bfloat16", "float32", bias, "bfloat16", False, False, False)
    for n, vector, expected in (
        *((n, 8, by_l1) for n in (16392, 24584, 131080)),
        *((n, 8, neither) for n in (16384, 32768)),
        (20008, 8, turned if layer_norm else by_l1),  # whose two blocks have 203 KiB
        *((24580, 4, by_l1), (20001, 1, neither)),  # by cells
        (20008, 4, neither if layer_norm else by_l1),  # of two pieces a pack
    ):
        for architecture in (80, 90, 100):
            pipelined = forward_config(forward, n, vector, architecture)
            found = neither
            if isinstance(pipelined, ForwardPipelined):
                found = pipelined.through_l1, pipelined.turned
            assert found == (expected if architecture == 90 else neither), (n, architecture)


@pytest.mark.parametrize(("norm", "n"), [("rms_norm", 4104), ("layer_norm", 3072)])
def test_rows_beside_a_wider_dy_have_fewer_stages_where_that_leaves_l1_room(
    norm: Any, n: int
) -> None:
    bias = "float16" if norm == "layer_norm" else None
    wide = BackwardSpec(norm, "float16", "float32", "float16", bias, False, False)
    for columns, architecture, stages in ((n, 90, 2), (n, 100, 3), (8192, 90, 3)):
        config = backward_config(wide, columns, 8, architecture)
        assert isinstance(config, BackwardPipelined)
        assert (config.stages, config.through_l1) == (stages, architecture == 90)


@pytest.mark.parametrize(
    ("norm", "dy", "n", "architecture", "held"),
    [
        ("layer_norm", "float32", 8192, 90, False),
        ("layer_norm", "bfloat16", 8192, 90, True),
        ("layer_norm", "float32", 8192, 100, True),
        ("layer_norm", "float32", 7168, 90, True),  # by 448 threads
        ("rms_norm", "float32", 8192, 90, True),
    ],
)
def test_a_weight_beside_a_wider_dy_is_not_held_where_it_would_spill(
    norm: Any, dy: str, n: int, architecture: int, held: bool
) -> None:
    bias = "float32" if norm == "layer_norm" else None
    spec = BackwardSpec(norm, "bfloat16", dy, "float32", bias, False, False)
    config = backward_config(spec, n, 8, architecture)
    assert isinstance(config, BackwardPipelined)
    assert config.hold_weight == held


@pytest.mark.parametrize("norm", NORMS)
def test_sums_of_rows_wait_in_shared_memory_or_registers(norm: Any) -> None:
    bias = "float32" if norm == "layer_norm" else None
    plain = BackwardSpec(norm, "bfloat16", "bfloat16", "float32", bias, False, False)
    for n, of_layer_norm, columns in (
        *((256, 2, 256), (4096, 2, 4096), (8192, 2, 8192), (16384, 2, 8192)),
        *((32768, 1, 8192), (131072, 1, 8192)),  # beside six stages
        *((20480, 1, 10240), (81920, 1, 10240)),  # 5 packs a thread, which spill into the L1
        *((5120, 1, 5120), (10240, 1, 10240)),  # bulk, but no clusters
    ):
        config = backward_config(plain, n, 8, 90)
        assert isinstance(config, BackwardPipelined)
        assert config.shared_sums == min(plain.gradients, of_layer_norm), n
        assert config.hold_sums == (norm == "layer_norm" and n in (32768, 131072)), n
        without = dataclasses.replace(config, shared_sums=0)
        sizes = [backward_pipelined_bytes(plain, one) for one in (config, without)]
        assert sizes[0] - sizes[1] == config.shared_sums * columns * 4
    bare = dataclasses.replace(plain, weight=None, dbias=None)
    for spec, vector in ((bare, 8), (plain, 1)):
        config = backward_config(spec, 8192, vector, 90)
        assert isinstance(config, BackwardPipelined)
        assert (config.shared_sums, config.hold_sums) == (0, False)
    # 64 KiB have room for one gradient's beside two stages of these rows.
    config = backward_config(plain, 4096, 8, 75)
    assert isinstance(config, BackwardPipelined)
    assert (config.shared_sums, config.hold_sums) == (1, False)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", DTYPES)
def test_strips_are_of_whole_packs_and_all_run_at_once(x: str, norm: str) -> None:
    length = pack_length(x)
    for dy, architecture in itertools.product((x, "float64"), ARCHITECTURES):
        spec = BackwardSpec(norm, x, dy, "float32", "float32", False, False)
        # Clusters of 16 hold rows of up to 28672 packs, but RMSNorm's with a bias of 20480.
        few = (20480, 20481, 24577) if norm == "rms_norm" else ()
        for packs in (20479, *few, 28673, 40_000, 65535, 65536, 65537):
            for n in (packs * length, packs * length - 1):
                config = backward_config(spec, n, vectors(spec, n)[-1], architecture)
                threads = -(-packs // 4096) * 32
                in_strips = n % length == 0 and 192 <= threads <= 512
                # Five groups of a row at least, and some sums.
                bytes_of_row = threads * length * (ITEMSIZE[x] + ITEMSIZE[dy])
                in_strips = in_strips and 5 * bytes_of_row < shared_limit(architecture) - 4096
                if not (in_strips and architecture >= 90):
                    assert not isinstance(config, BackwardColumnParallel), (n, architecture)
                    continue
                assert isinstance(config, BackwardColumnParallel), (n, architecture)
                assert config.strip_threads == threads
                assert config.block_threads == threads + 4 * 32
                assert (config.strips - 1) * threads < packs <= config.strips * threads
                assert 100 < config.strips <= 128
                # Half of a group of 4 or 6 is summed at once where a whole one is too much.
                assert config.group_rows in (1, 2, 3, 4, 6)
                shared_bytes = instantiate(spec, config)[0].shared_bytes
                assert 5 * config.group_rows * bytes_of_row < shared_bytes


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("multiprocessors", "at_once"), [(132, 1), (127, 1), (64, 2), (63, 2)])
def test_strips_that_do_not_all_run_at_once_are_streamed(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, at_once: int, norm: Any
) -> None:
    def load(kernel: Instantiation, device: int) -> Any:
        def prepared(blocks: int, numbers: dict[str, float]) -> Any:
            return lambda stream, operands: launched.append((kernel, blocks, operands, numbers))

        return SimpleNamespace(
            at_once=kernel.at_once,
            blocks_at_once=lambda: at_once,
            clusters_at_once=lambda: 30,
            prepared=prepared,
        )

    launched: list[Any] = []
    zeroed: list[Any] = []
    monkeypatch.setattr(_compile, "load", load)
    monkeypatch.setattr(_plans, "set_to_zero", lambda *arguments: zeroed.append(arguments))
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    plan_of = _plans.many_rows_backward_plan
    monkeypatch.setattr(_plans, plan_of.__name__, plan_of.__wrapped__)
    spec = BackwardSpec(norm, "float32", "float32", "float32", None, False, False)
    plan = _plans.backward_plan(spec, 3, 262144, 4, -3)
    if multiprocessors * at_once < 128:
        assert [kernel.at_once for kernel in plan.kernels] == [False] * 3
        assert plan.cluster_blocks == 4
        return
    sums = 3 if norm == "layer_norm" else 1
    for m in (3, 0):
        launched.clear()
        zeroed.clear()
        # The counts of eight groups of two rows, and each row's sums by 128 blocks; those of two
        # wild rows, by 16 warps of each, in float64.
        of_wild_rows = 2 * (128 + sums * 128 * 16 * 8)
        assert plan.scratch_bytes(m) == 8 * (128 + 2 * sums * 128 * 4) + of_wild_rows
        plan.prepared(m)(5, (*range(1, 13), 1 << 20))
        assert zeroed == [(5, 1 << 20, 10 * 128)]
        [(kernel, blocks, operands, numbers)] = launched
        assert kernel.at_once
        assert kernel.name == "norm_backward_column_parallel"
        assert blocks == 128
        assert operands == (*range(1, 13), 1 << 20, (1 << 20) + 10 * 128)
        assert numbers == {"n_rows": m, "n_cols": 262144, "inv_n": 1 / 262144}


@pytest.mark.parametrize(
    ("n", "groups"), [(1, 64), (8192, 64), (8193, 32), (65536, 8), (262144, 2), (1 << 40, 1)]
)
@pytest.mark.parametrize(("x", "itemsize"), [("bfloat16", 4), ("float64", 8)])
def test_long_rows_have_few_groups_of_partials(n: int, groups: int, x: str, itemsize: int) -> None:
    spec = BackwardSpec("rms_norm", x, x, "float32", None, False, False)
    for architecture in ARCHITECTURES:
        if isinstance(backward_config(spec, n, 1, architecture), BackwardColumnParallel):
            continue
        reduction = backward_config(spec, n, 1, architecture).reduction
        assert reduction is not None
        assert reduction.groups == groups
        # 16 bytes a thread of the sums; in shared memory, those of 8 warps or of fewer groups.
        width = 16 // itemsize
        assert reduction.vector == (1 if n % width else width)
        assert reduction.columns == 256 // groups * width
        assert reduction_bytes(reduction) == min(groups, 8) * reduction.columns * itemsize
        without = dataclasses.replace(spec, weight=None)
        assert backward_config(without, n, 1, architecture).reduction is None


# ---- instantiations ------------------------------------------------------------------------------


# At addresses that are no multiples of a pack, its blocks are wider than those of whole packs.
IN_PAIRS = ForwardSpec(
    "layer_norm", "bfloat16", "float32", "float16", "float32", False, False, False
)


@given(specs, widths(), st.sampled_from(ARCHITECTURES))
@example(IN_PAIRS, 44336, 90)
@settings(max_examples=500)
def test_blocks_have_the_shared_memory_that_there_is(spec: Spec, n: int, architecture: int) -> None:
    for vector in vectors(spec, n):
        config: Any = configure(spec, n, vector, architecture)
        for kernel in instantiate(spec, config):
            assert kernel.shared_bytes % 16 == 0
            assert 32 <= kernel.block_threads <= 1024
            assert kernel.block_threads % 32 == 0
        blocks = getattr(config, "blocks_per_multiprocessor", 1)
        if isinstance(config, ForwardPipelined) and vector < pack_length(spec.x):
            blocks = 1  # two clusters have the weight in shared memory there, and mostly run singly
        needed = blocks * (instantiate(spec, config)[0].shared_bytes + 1024)
        assert needed <= shared_limit(architecture) + 1024


# Row lengths, in packs, of every kind of config.
PACKS = (1, 8, 33, 64, 97, 200, 400, 1000, 1024, 2048, 5000, 20_000, 40_000, 200_000)


@pytest.mark.parametrize("all_specs", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_structs_say_all_that_a_spec_and_config_say(all_specs: tuple[Spec, ...]) -> None:
    seen: dict[tuple[str, ...], tuple[Spec, Config]] = {}
    launched: dict[str, Instantiation] = {}
    for spec, packs in itertools.product(all_specs, PACKS):
        for vector in (1, pack_length(spec.x)):
            config = configure(spec, packs * pack_length(spec.x), vector)
            kernels = instantiate(spec, config)
            sources = tuple(kernel.file + kernel.name + kernel.structs() for kernel in kernels)
            assert seen.setdefault(sources, (spec, config)) == (spec, config)
            for kernel, text in zip(kernels, sources, strict=True):
                assert launched.setdefault(text, kernel) == kernel
    assert len(seen) > len(all_specs)


def test_structs_are_of_members_that_have_a_type_or_a_value() -> None:
    member = (
        r"  using [A-Z]\w* = (double|float|float16|bfloat16|None|Identity|Clamp);\n"
        r"|  static constexpr (bool k[A-Z]\w* = (true|false)|int k[A-Z]\w* = \d+);\n"
    )
    for spec in FORWARD[::7] + BACKWARD[::7]:
        for packs in PACKS:
            config = configure(spec, packs * pack_length(spec.x), 1)
            for kernel in instantiate(spec, config):
                assert re.fullmatch(
                    rf"struct Op {{\n({member})+}};\nstruct Layout {{\n({member})+}};\n",
                    kernel.structs(),
                )
                assert re.fullmatch(r"[a-z_]+<Op_1, Layout_1>", kernel.expression("_1"))
                renamed = re.sub(r"struct (\w+)", r"struct \1_1", kernel.structs())
                assert kernel.structs("_1") == renamed


@given(st.sampled_from(BACKWARD), widths())
def test_gradients_are_reduced_by_a_last_kernel(spec: BackwardSpec, n: int) -> None:
    config: Any = configure(spec, n, 1)
    templates = [kernel.name for kernel in instantiate(spec, config)]
    pipelined = isinstance(config, BackwardPipelined)
    if isinstance(config, BackwardColumnParallel):
        assert templates == ["norm_backward_column_parallel"]
        return
    assert templates == [
        *(
            ["norm_backward_pipelined"]
            if pipelined
            else ["norm_backward_coefficients", "norm_backward_columns"]
        ),
        *(["reduce_partials"] if spec.weight or spec.dbias else []),
    ]
    if pipelined and config.rows_per_block > 1 and spec.gradients:
        # The teams of a block put their gradients together: one tile for each.
        tile = config.row_threads * config.packs_per_thread * pack_length(spec.x)
        itemsize = max(4, ITEMSIZE[spec.x])
        shared = instantiate(spec, config)[0].shared_bytes
        assert shared >= config.rows_per_block * tile * itemsize


# ---- sources -------------------------------------------------------------------------------------

FILES = sorted(path.name for path in kernels_directory().iterdir())
KERNELS = [name for name in FILES if name.endswith(".cu")]
HEADERS = [name for name in FILES if name.endswith(".cuh")]


def body(header: str) -> str:
    """Return a header's text from its last include on, which is pasted in one piece."""
    text = (kernels_directory() / header).read_text(encoding="utf-8")
    return re.split(r'^#(?:include ".*"|pragma once)\n', text, flags=re.MULTILINE)[-1]


def test_the_directory_holds_nothing_else() -> None:
    assert sorted(KERNELS + HEADERS) == FILES


@pytest.mark.parametrize("file", KERNELS)
def test_a_source_is_complete_and_pastes_a_header_once(file: str) -> None:
    text = source(file)
    assert "#include" not in text
    assert "#pragma once" not in text
    times = {header: text.count(body(header)) for header in HEADERS}
    assert set(times.values()) <= {0, 1}
    # What a header needs comes before it.
    order = sorted((h for h in HEADERS if times[h]), key=lambda h: text.index(body(h)))
    for position, header in enumerate(order):
        own = (kernels_directory() / header).read_text(encoding="utf-8")
        needed = set(re.findall(r'#include "(.*)"', own))
        assert needed <= set(order[:position])
    assert body(file) in text


def test_every_file_is_reachable() -> None:
    used = set()
    for spec in FORWARD[::5] + BACKWARD[::5]:
        for packs in PACKS:
            configs: list[Any] = [configure(spec, packs * pack_length(spec.x), 1)]
            if isinstance(configs[0], BackwardPipelined):
                few = few_rows_backward_configs(spec, configs[0], 90, 132)  # type: ignore[arg-type]
                configs += [config for _, config in few]
            used |= {kernel.file for config in configs for kernel in instantiate(spec, config)}
    assert sorted(used) == KERNELS
    pasted = {h for h in HEADERS if any(body(h) in source(file) for file in KERNELS)}
    assert pasted == set(HEADERS)


@pytest.mark.parametrize("spec", [FORWARD[-1], BACKWARD[-1]], ids=["forward", "backward"])
def test_a_kernel_is_passed_the_struct_that_is_packed_for_it(spec: Spec) -> None:
    for packs in PACKS:
        for kernel in instantiate(spec, configure(spec, packs * pack_length(spec.x), 1)):
            declared = re.search(
                rf"template <typename Op, typename Layout>\s*__global__[^;{{]*\b{kernel.name}\(\s*"
                r"const __grid_constant__ (\w+)<Op> \w+\) {",
                source(kernel.file),
            )
            assert declared is not None, kernel.name
            assert ARGUMENTS[declared[1]] == tuple(name for name, _ in kernel.arguments)


def test_the_layout_has_what_the_kernel_uses_and_no_more() -> None:
    used: dict[str, set[str]] = {}
    for spec in FORWARD[::5] + BACKWARD[::5]:
        for packs in PACKS:
            for kernel in instantiate(spec, configure(spec, packs * pack_length(spec.x), 1)):
                used[kernel.file] = used.get(kernel.file, set()) | {n for n, _ in kernel.layout}
    for file, members in used.items():
        text = (kernels_directory() / file).read_text(encoding="utf-8")
        assert members == set(re.findall(r"\bLayout::(\w+)", text)), file
