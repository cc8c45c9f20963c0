from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynorm._config import (
    REGISTERS_PER_MULTIPROCESSOR,
    ResidentBackward,
    ResidentForward,
    StreamingBackward,
    StreamingForward,
    backward_config,
    forward_config,
    pack_length,
)
from cupynorm._jit import (
    Instantiation,
    backward_instantiations,
    forward_instantiation,
    kernels_directory,
    source,
)
from cupynorm._spec import ITEMSIZE, BackwardSpec, ForwardSpec

NORMS = ("rms_norm", "layer_norm")
DTYPES = ("float64", "float32", "float16", "bfloat16")
OPTIONAL = (None, *DTYPES)
SWITCH = (False, True)

Spec = ForwardSpec | BackwardSpec
Config = ResidentForward | StreamingForward | ResidentBackward | StreamingBackward

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

# Rows far longer than any that registers hold, as the table below has them.
MOST = 300_000


def widths() -> st.SearchStrategy[int]:
    """Draw N, each power of two as often as the next."""
    octaves = st.integers(1, MOST.bit_length())
    return octaves.flatmap(lambda o: st.integers(2 ** (o - 1), min(2**o, MOST)))


specs = st.sampled_from(FORWARD) | st.sampled_from(BACKWARD)
forward_specs = st.sampled_from(FORWARD)


def vectors(spec: Spec, n: int) -> list[int]:
    """Return what `vector` may be: the powers of two that divide the pack and the row."""
    return [v for v in (1, 2, 4, 8) if pack_length(spec.x) % v == 0 and n % v == 0]


def configure(spec: Spec, n: int, vector: int) -> Config:
    if isinstance(spec, ForwardSpec):
        return forward_config(spec, n, vector)
    return backward_config(spec, n, vector)


def instantiate(spec: Spec, config: Any) -> tuple[Instantiation, ...]:
    if isinstance(spec, ForwardSpec):
        return (forward_instantiation(spec, config),)
    return backward_instantiations(spec, config)


def blocks_at_once(config: Any) -> int:
    """Return the blocks that a multiprocessor must hold at once: one of a backward pass."""
    return config.blocks_per_multiprocessor if isinstance(config, ResidentForward) else 1


def is_resident(config: Config) -> bool:
    return isinstance(config, (ResidentForward, ResidentBackward))


def check_row(spec: Spec, n: int, config: Any) -> None:
    tile = config.row_threads * pack_length(spec.x)
    assert tile * config.packs_per_thread >= n, "the row does not fit"
    assert tile * (config.packs_per_thread - 1) < n, "no thread has a use for its last pack"


# ---- how a row lies over threads -----------------------------------------------------------------


@given(specs, widths())
@settings(max_examples=500)
def test_a_row_fits_its_team_and_no_pack_is_idle(spec: Spec, n: int) -> None:
    for vector in vectors(spec, n):
        config = configure(spec, n, vector)
        if is_resident(config):
            check_row(spec, n, config)


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_usual_row_fits_its_team_and_no_pack_is_idle(direction: str, x: str) -> None:
    spec: Spec = ForwardSpec("layer_norm", x, "float32", "float32", x, False, True, False)
    if direction == "backward":
        spec = BackwardSpec("layer_norm", x, x, "float32", "float32", False, False)
    idle: list[list[int]] = []  # the first and last N of each stretch
    length = pack_length(x)
    for n in range(length, 4 * 1024 * length + 1, length):
        config: Any = configure(spec, n, length)
        if not is_resident(config):
            break
        try:
            check_row(spec, n, config)
        except AssertionError:
            if idle and idle[-1][1] == n - length:
                idle[-1][1] = n
            else:
                idle.append([n, n])
    assert idle == []


@given(specs, widths())
@settings(max_examples=500)
def test_blocks_are_whole_teams_that_every_gpu_can_hold(spec: Spec, n: int) -> None:
    for vector in vectors(spec, n):
        config: Any = configure(spec, n, vector)
        if not is_resident(config):
            continue
        team, block = config.row_threads, config.block_threads
        assert team % 32 == 0 or (team < 32 and team & (team - 1) == 0)
        assert block % 32 == 0
        assert block % team == 0
        assert config.rows_per_block == block // team
        assert block <= 1024
        if team > 32:
            assert block // team <= 15, "named barriers, of which 0 is the block's own"
        # sm_75 holds 1024 threads on a multiprocessor, the least of all.
        assert 1 <= blocks_at_once(config) * block <= 1024
        if n <= 32 * pack_length(spec.x):
            assert team <= 32, "a row of up to 32 packs is one warp's"
        assert config.vector == vector


@given(specs, widths())
def test_streaming_blocks_are_whole_warps(spec: Spec, n: int) -> None:
    config: Any = configure(spec, n, 1)
    if is_resident(config):
        return
    names = (
        ("block_threads",)
        if isinstance(config, StreamingForward)
        else ("row_threads", "column_threads")
    )
    for name in names:
        assert getattr(config, name) % 32 == 0
        assert getattr(config, name) <= 1024


# ---- what the bits of a row depend on ------------------------------------------------------------


def row_layout(config: Any) -> tuple[Any, ...]:
    """Return what decides the order in which a row is summed."""
    if isinstance(config, StreamingForward):
        return type(config), config.block_threads
    if isinstance(config, StreamingBackward):
        return type(config), config.row_threads, config.column_threads
    return type(config), config.row_threads, config.packs_per_thread


@given(specs, widths())
@settings(max_examples=500)
def test_bits_do_not_depend_on_alignment(spec: Spec, n: int) -> None:
    assert len({row_layout(configure(spec, n, vector)) for vector in vectors(spec, n)}) == 1


@given(forward_specs, widths())
@settings(max_examples=300)
def test_y_does_not_depend_on_whether_statistics_are_stored(spec: ForwardSpec, n: int) -> None:
    other = dataclasses.replace(spec, store_statistics=not spec.store_statistics)
    for vector in vectors(spec, n):
        assert forward_config(spec, n, vector) == forward_config(other, n, vector)


@given(specs, st.lists(widths(), min_size=1, max_size=5))
def test_a_config_depends_on_nothing_but_its_arguments(spec: Spec, ns: list[int]) -> None:
    first = [configure(spec, n, 1) for n in ns]
    assert first == [configure(spec, n, 1) for n in reversed(ns)][::-1]
    assert hash(spec) == hash(dataclasses.replace(spec))


# ---- the regimes ---------------------------------------------------------------------------------

# The longest row held in registers: a change here changes bits and speed, and is meant to be seen.
# The weight (and bias) of the first column is float32, dy and y have x's dtype; "float64 weight"
# differs in that alone; "no gradients" has neither weight nor bias.
LONGEST = {
    # x: forward, forward float64 weight, backward, backward float64 weight, backward no gradients
    "float64": (6144, 6144, 2304, 2304, 2304),
    "float32": (12288, 4096, 4608, 2048, 4608),
    "float16": (16384, 8192, 8192, 4096, 9216),
    "bfloat16": (16384, 8192, 8192, 4096, 9216),
}


@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_the_longest_row_in_registers(norm: Any, x: str) -> None:
    compared: tuple[Spec, ...] = (
        ForwardSpec(norm, x, "float32", "float32", x, False, True, False),
        ForwardSpec(norm, x, "float64", "float32", x, False, True, False),
        BackwardSpec(norm, x, x, "float32", "float32", False, False),
        BackwardSpec(norm, x, x, "float64", "float32", False, False),
        BackwardSpec(norm, x, x, None, None, False, False),
    )
    longest = []
    for spec in compared:
        length = pack_length(x)
        resident = [
            packs * length
            for packs in range(1, 20_000 // length)
            if is_resident(configure(spec, packs * length, 1))
        ]
        assert resident == list(range(length, resident[-1] + 1, length)), "shorter rows stream"
        longest.append(resident[-1])
    assert tuple(longest) == LONGEST[x]


@given(specs, widths())
def test_a_row_longer_than_one_in_registers_may_stream_and_no_shorter_one(
    spec: Spec, n: int
) -> None:
    if is_resident(configure(spec, n, 1)):
        for shorter in (n - 1, n - n // 4, n // 2 + 1, n // 3 + 1):
            assert is_resident(configure(spec, max(1, shorter), 1))


# ---- instantiations ------------------------------------------------------------------------------


@given(specs, widths())
@settings(max_examples=500)
def test_launches_need_no_opt_in(spec: Spec, n: int) -> None:
    for vector in vectors(spec, n):
        config: Any = configure(spec, n, vector)
        for kernel in instantiate(spec, config):
            assert 0 <= kernel.shared_bytes <= 48 * 1024
            assert kernel.shared_bytes % 16 == 0
            assert 32 <= kernel.block_threads <= 1024
            assert kernel.block_threads % 32 == 0
        if is_resident(config):
            # 64 KiB of shared memory and 65536 registers on a multiprocessor of sm_75; a thread
            # has at least the registers that 1024 threads leave.
            shared = instantiate(spec, config)[0].shared_bytes
            assert blocks_at_once(config) * shared <= 64 * 1024
            threads = blocks_at_once(config) * config.block_threads
            assert REGISTERS_PER_MULTIPROCESSOR // threads >= 64


# Row lengths, in packs, of every kind of config.
PACKS = (1, 8, 33, 64, 97, 200, 400, 1000, 1024, 2048, 5000)


@pytest.mark.parametrize("all_specs", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_expressions_say_all_that_a_spec_and_config_say(all_specs: tuple[Spec, ...]) -> None:
    seen: dict[tuple[str, ...], tuple[Spec, Config]] = {}
    launched: dict[str, Instantiation] = {}
    for spec, packs in itertools.product(all_specs, PACKS):
        for vector in (1, pack_length(spec.x)):
            config = configure(spec, packs * pack_length(spec.x), vector)
            kernels = instantiate(spec, config)
            expressions = tuple(kernel.expression for kernel in kernels)
            assert seen.setdefault(expressions, (spec, config)) == (spec, config)
            for kernel in kernels:
                assert launched.setdefault(kernel.expression, kernel) == kernel
    assert len(seen) > len(all_specs)


def test_an_expression_is_valid_cpp() -> None:
    for spec in FORWARD[::7] + BACKWARD[::7]:
        for packs in PACKS:
            config = configure(spec, packs * pack_length(spec.x), 1)
            for kernel in instantiate(spec, config):
                assert re.fullmatch(
                    r"[a-z_]+<((double|float|float16|bfloat16|None|true|false|\d+)(, |>$))+",
                    kernel.expression,
                )


@given(st.sampled_from(BACKWARD), widths())
def test_gradients_are_reduced_by_a_last_kernel(spec: BackwardSpec, n: int) -> None:
    config = backward_config(spec, n, 1)
    templates = [k.expression.partition("<")[0] for k in instantiate(spec, config)]
    resident = isinstance(config, ResidentBackward)
    assert templates == [
        *(
            ["norm_backward"]
            if resident
            else ["norm_backward_coefficients", "norm_backward_columns"]
        ),
        *(["reduce_partials"] if spec.weight or spec.dbias else []),
    ]
    if resident and config.rows_per_block > 1 and spec.gradients:
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
    used = {
        kernel.file
        for spec in FORWARD[::5] + BACKWARD[::5]
        for packs in PACKS
        for kernel in instantiate(spec, configure(spec, packs * pack_length(spec.x), 1))
    }
    assert sorted(used) == KERNELS
    pasted = {h for h in HEADERS if any(body(h) in source(file) for file in KERNELS)}
    assert pasted == set(HEADERS)


@pytest.mark.parametrize("spec", [FORWARD[-1], BACKWARD[-1]], ids=["forward", "backward"])
def test_an_expression_names_a_template_with_as_many_parameters(spec: Spec) -> None:
    for packs in PACKS:
        for kernel in instantiate(spec, configure(spec, packs * pack_length(spec.x), 1)):
            template, _, arguments = kernel.expression.partition("<")
            declared = re.search(
                rf"template <([^<>]*)>\s*__global__[^;{{]*\b{template}\(", source(kernel.file)
            )
            assert declared is not None, template
            assert len(declared[1].split(",")) == len(arguments.split(","))
