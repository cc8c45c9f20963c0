"""What holds for every layout and plan. data/layouts.txt has the layouts that are chosen."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layouts import FILE, Spec, configure, few_rows, instantiate, lines_of, parsed
from thorough import one_in

import cupynorm
from cupynorm import _compile, _plans
from cupynorm._compile import (
    ARGUMENTS,
    Instantiation,
    forward_instantiation,
    kernels_directory,
    source,
)
from cupynorm._groups import groups_of
from cupynorm._layout import BackwardColumnParallel as Strips
from cupynorm._layout import (
    BackwardInRegisters,
    BackwardPipelined,
    BackwardStreaming,
    ForwardInRegisters,
    ForwardPipelined,
    ForwardStreaming,
    architectures,
    backward_column_parallel,
    backward_in_registers,
    column_parallel_counts_bytes,
    fused,
    pack_length,
    partials_stride,
    shared_limit,
    strided,
)
from cupynorm._layout.backward_pipelined import _backward_registers
from cupynorm._operation import BACKWARD as BACKWARD_PASS
from cupynorm._operation import FORWARD as FORWARD_PASS
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec, Norm, compute_dtype, sharing

NORMS = ("rms_norm", "layer_norm")
DTYPES = ("float64", "float32", "float16", "bfloat16")
OPTIONAL = (None, *DTYPES)
SWITCH = (False, True)
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 103, 120)

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

MOST = 300_000  # elements. Only streaming kernels take longer rows


def widths() -> st.SearchStrategy[int]:
    """Draw N: each octave is as likely as the next, or N fills packs or warps."""
    octaves = st.integers(1, MOST.bit_length())
    any_length = octaves.flatmap(lambda o: st.integers(2 ** (o - 1), min(2**o, MOST)))
    packs = octaves.flatmap(lambda o: st.integers(1, 31).map(lambda i: min(2 ** (o - 1) * i, MOST)))
    return any_length | packs | st.integers(1, 160).map(lambda warps: 256 * warps)


specs = st.sampled_from(FORWARD) | st.sampled_from(BACKWARD)
capabilities = st.sampled_from(ARCHITECTURES)


def vectors(spec: Spec, n: int) -> list[int]:
    """Return the values of `vector`: the powers of two that divide the pack and the row."""
    return [v for v in (1, 2, 4, 8) if pack_length(spec.x) % v == 0 and n % v == 0]


class Chosen(NamedTuple):
    """A layout, and what it was chosen for."""

    spec: Any
    n: int
    architecture: int
    vector: int
    config: Any

    @property
    def length(self) -> int:
        """The elements of a pack. For rows in registers a pack may have 8 bytes."""
        return int(getattr(self.config, "pack_length", pack_length(self.spec.x)))

    @property
    def team(self) -> int:
        """The threads of a block that work on one row."""
        config = self.config
        return int(config.row_threads if hasattr(config, "row_threads") else config.block_threads)


def every_layout(spec: Spec, n: int, architecture: int) -> Iterator[Chosen]:
    """Yield the layouts of rows of n elements, for few and many rows, at any address."""
    for vector in vectors(spec, n):
        many = configure(spec, n, vector, architecture)
        few = list(few_rows(spec, n, many, architecture))
        if isinstance(spec, BackwardSpec):
            few += few_rows(spec, n, many, architecture, dx_given=True)
        for config in dict.fromkeys([many, *(config for _, config in few)]):
            yield Chosen(spec, n, architecture, vector, config)


HELD = ForwardInRegisters | ForwardPipelined | BackwardPipelined | BackwardInRegisters


# ---- which layouts are chosen --------------------------------------------------------------------


def test_the_layouts_chosen_are_those_that_were_kept() -> None:
    kept = FILE.read_text(encoding="utf-8").splitlines()
    now = lines_of("\n".join(kept))
    changes = list(difflib.unified_diff(kept, now, "kept", "chosen", n=0, lineterm=""))
    how = "if they are meant, run `python tests/layouts.py`, and look at the diff of layouts.txt:"
    assert not changes, "\n".join(["other layouts are chosen;", how, *changes[:40]])


def test_the_kept_cases_are_of_every_kind() -> None:
    of = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        case, _, layout = line.partition(" -> ")
        spec, given = parsed(case)
        kinds = spec.x, given["sm"], layout.split()[0], given["rows"] is None
        of.setdefault((type(spec), spec.norm), set()).update(kinds)
    expected = {*DTYPES, 75, 80, 90, 100, 120, "InRegisters", "Pipelined", "Streaming", *SWITCH}
    for direction, norm in itertools.product((ForwardSpec, BackwardSpec), NORMS):
        assert of[direction, norm] >= expected


# ---- properties of every layout ------------------------------------------------------------------


def holds_the_row_and_no_pack_is_idle(chosen: Chosen) -> None:
    config, n, length = chosen.config, chosen.n, chosen.length
    if isinstance(config, Strips):
        assert n % length == 0
        assert -(-n // (length * config.strip_threads)) == config.strips
    if not isinstance(config, HELD):
        return
    tile = config.cluster_blocks * chosen.team * length
    room = tile * config.packs_per_thread
    assert room >= n, "the row does not fit"
    if config.cluster_blocks == 1 or isinstance(config, ForwardInRegisters):
        # kernels/team.cuh compares only the last pack with the row's end.
        assert tile * (config.packs_per_thread - 1) <= n, "a pack of each thread is idle"
    else:
        assert 2 * n > room, "half the blocks have nothing to do"
    forward = isinstance(chosen.spec, ForwardSpec)
    told = forward or config.cluster_blocks == 1 or config.packs_per_thread <= 4
    assert config.full == (told and room == n)


def is_of_whole_warps_and_teams(chosen: Chosen) -> None:
    """The conditions of kernels/team.cuh, and those of clusters."""
    config, team, cluster = chosen.config, chosen.team, chosen.config.cluster_blocks
    assert config.vector == chosen.vector
    assert cluster in (1, 2, 4, 8, 16)
    assert cluster == 1 or architectures.gpu_of(chosen.architecture).clusters
    for kernel in instantiate(chosen.spec, config):
        assert kernel.block_threads % 32 == 0
        assert 32 <= kernel.block_threads <= 1024
        assert kernel.cluster_blocks in (1, cluster)
    if not isinstance(config, HELD):
        return
    assert team % 32 == 0 or team in (1, 2, 4, 8, 16)
    if chosen.n <= 32 * pack_length(chosen.spec.x):
        assert team <= 32, "a row of up to 32 packs is one warp's"
    (teams, rest), warps = divmod(config.block_threads, team), max(1, team // 32)
    assert rest == 0
    assert warps == 1 or teams <= 15, "named barriers, of which 0 is the block's own"
    assert cluster == 1 or teams == 1
    of_warps = warps if isinstance(config, ForwardInRegisters) or cluster == 1 else 1
    assert cluster * of_warps * (1 + getattr(config, "folded", False)) <= 32, "a lane reads each"
    if isinstance(config, ForwardPipelined) and cluster > 1:  # no larger than it must be
        assert chosen.n > cluster // 2 * 2048 * chosen.length


def leaves_each_thread_registers(chosen: Chosen) -> None:
    config, spec = chosen.config, chosen.spec
    threads = getattr(config, "blocks_per_multiprocessor", 1) * chosen.team
    if isinstance(config, HELD):
        threads = config.blocks_per_multiprocessor * config.block_threads
        assert 1 <= threads <= 1024, "sm_75 holds no more"
    assert architectures.REGISTERS_PER_MULTIPROCESSOR // threads >= 64
    if isinstance(config, BackwardPipelined):
        whole = -(-threads // 128) * 128  # each quarter of a multiprocessor has whole warps
        assert min(255, 65536 // whole // 8 * 8) >= _backward_registers(
            spec,
            config.packs_per_thread,
            vector=config.vector,
            hold_weight=config.hold_weight,
            clustered=config.cluster_blocks > 1,
        )


def finds_the_shared_memory_that_there_is(chosen: Chosen) -> None:
    config, limit = chosen.config, shared_limit(chosen.architecture)
    first, *others = [kernel.shared_bytes for kernel in instantiate(chosen.spec, config)]
    assert all(size % 16 == 0 and size <= limit for size in (first, *others))
    blocks = getattr(config, "blocks_per_multiprocessor", 1)
    if isinstance(config, ForwardPipelined) and chosen.vector < chosen.length:
        blocks = 1  # two clusters have the weight in shared memory there, and mostly run alone
    assert blocks * (first + 1024) <= limit + 1024, "a block's own KiB is the system's"


def is_one_that_the_kernels_compile(chosen: Chosen) -> None:
    """The conditions of static_asserts, and of the code that copies."""
    config, spec, architecture = chosen.config, chosen.spec, chosen.architecture
    whole, access = chosen.vector == chosen.length, chosen.vector * ITEMSIZE[spec.x]
    pipelined = isinstance(config, ForwardPipelined | BackwardPipelined)
    if pipelined:
        assert config.stages >= 2
        assert not config.cells or (access <= 4 and architecture >= 80)
    if isinstance(config, ForwardInRegisters):
        bytes_of_x = config.packs_per_thread * config.pack_length * ITEMSIZE[spec.x]
        assert bytes_of_x <= 128
        assert not spec.relu or config.row_threads * config.pack_length >= 8
        assert config.row_threads <= 32 or config.rows_per_block == 1
        assert config.cluster_blocks == 1 or chosen.vector > 1
        assert not config.folded or (config.full and config.packs_per_thread % 2 == 0)
        assert config.blocks_ahead_if_large <= config.blocks_ahead
        assert config.blocks_ahead == 0 or architecture >= 90
    elif isinstance(config, ForwardPipelined):
        assert not config.hold_bias or config.hold_weight
        assert not (config.hold_weight and architectures.is_wide(spec))
    elif isinstance(config, BackwardPipelined):
        assert spec.weight or not config.hold_weight
        held = spec.norm == "rms_norm" and access >= 8 and not config.cells
        assert held or not config.hold_row
        wider = ITEMSIZE[spec.dy] > ITEMSIZE[spec.x]
        assert not config.through_l1 or (wider and not config.cells and architecture == 90)
        assert config.shared_sums <= spec.gradients
        sums = config.rows_per_block == 1 and config.shared_sums + 1 == spec.gradients
        assert sums or not config.hold_sums
        ahead = config.cluster_blocks > 1 and not config.hold_row
        late = 0 if config.hold_row else 2 if ahead else 1
        in_bulk = architecture >= 90 and config.full and whole and config.row_threads >= 64
        assert not config.bulk or (in_bulk and config.stages > late + ahead)
    elif isinstance(config, BackwardInRegisters):
        alone = config.rows_per_block == 1
        assert alone or spec.norm == "rms_norm" or config.column_lanes == 0
    elif isinstance(config, Strips):
        without = configure(spec, chosen.n, chosen.vector, architecture, column_parallel=False)
        assert isinstance(without, BackwardStreaming)
        assert architecture >= 90
        assert config.strips <= backward_column_parallel.MAX_STRIPS
        for most in (9, 12):  # sums of all rows, or of half of them, at once
            sums = config.group_rows * (3 if spec.norm == "layer_norm" else 1)
            assert sums <= most or config.group_rows % 2 == 0


CHECKS = (
    holds_the_row_and_no_pack_is_idle,
    is_of_whole_warps_and_teams,
    leaves_each_thread_registers,
    finds_the_shared_memory_that_there_is,
    is_one_that_the_kernels_compile,
)

# At addresses that are no multiples of a pack, the blocks are wider than those of whole packs.
IN_PAIRS = ForwardSpec("layer_norm", "bfloat16", "float32", "float16", "float32", *3 * (False,))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@given(specs, widths(), capabilities)
@example(IN_PAIRS, 44336, 90)
@settings(max_examples=200)
def test_every_layout(
    check: Callable[[Chosen], None], spec: Spec, n: int, architecture: int
) -> None:
    for chosen in every_layout(spec, n, architecture):
        check(chosen)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_usual_layouts_of_many_lengths(norm: Norm, x: str, architecture: int) -> None:
    bias, length = ("float32" if norm == "layer_norm" else None), pack_length(x)
    forward = ForwardSpec(norm, x, "float32", bias, x, False, True, False)
    backward = BackwardSpec(norm, x, x, "float32", bias, False, False)
    packs = (*range(1, 64, 7), *range(64, 2048, 160), *range(2048, 5000, 512))
    for spec, n in itertools.product((forward, backward), packs):
        for here in (n * length - 1, n * length, n * length + length // 2):
            found = list(every_layout(spec, here, architecture)) if here else []
            assert len({row_layout(chosen.config) for chosen in found}) <= 1
            for chosen, check in itertools.product(found, CHECKS):
                check(chosen)


# ---- what the bits of a row depend on ------------------------------------------------------------


def row_layout(config: Any) -> tuple[Any, ...]:
    """Return what decides the order in which a row is summed."""
    if isinstance(config, ForwardStreaming):
        # packs_per_thread does not count: sums are added pack by pack, whatever is in flight.
        return type(config), config.cluster_blocks, config.block_threads
    if isinstance(config, BackwardStreaming):
        return type(config), config.cluster_blocks
    if isinstance(config, Strips):
        return type(config), config.strips, config.strip_threads
    if isinstance(config, ForwardPipelined):
        return type(config), config.cluster_blocks, config.block_threads, config.packs_per_thread
    if isinstance(config, ForwardInRegisters):
        # A cluster counts as one block with all its threads, and a folded thread as two. A warp
        # sums 4 packs a thread as twice the lanes sum 2.
        threads, packs = config.cluster_blocks * config.row_threads, config.packs_per_thread
        if config.folded or (packs == 4 and threads < 32):
            threads, packs = 2 * threads, packs // 2
        return type(config), threads, packs, config.pack_length
    # For few rows as for many.
    return BackwardPipelined, config.cluster_blocks, config.row_threads, config.packs_per_thread


@given(specs, widths() | st.integers(8192, 1 << 17), capabilities)
@example(ForwardSpec("layer_norm", *4 * ("bfloat16",), False, True, True), 20008, 90)
@settings(max_examples=250)
def test_bits_do_not_depend_on_alignment_or_the_number_of_rows(
    spec: Spec, n: int, architecture: int
) -> None:
    assert len({row_layout(c.config) for c in every_layout(spec, n, architecture)}) == 1


@given(st.sampled_from(FORWARD), widths(), capabilities)
def test_y_does_not_depend_on_whether_statistics_are_stored(
    spec: ForwardSpec, n: int, architecture: int
) -> None:
    other = dataclasses.replace(spec, store_statistics=not spec.store_statistics)
    found, others = (list(every_layout(one, n, architecture)) for one in (spec, other))
    assert [chosen.config for chosen in found] == [chosen.config for chosen in others]
    if not spec.relu:  # inference and training share their kernels
        for chosen in found:
            kernels = (forward_instantiation(one, chosen.config) for one in (spec, other))
            assert len(set(kernels)) == 1


@given(specs, st.lists(widths(), min_size=1, max_size=5))
def test_a_layout_depends_on_nothing_but_its_arguments(spec: Spec, ns: list[int]) -> None:
    first = [configure(spec, n, 1) for n in ns]
    assert first == [configure(spec, n, 1) for n in reversed(ns)][::-1]
    assert hash(spec) == hash(dataclasses.replace(spec))


# ---- few rows ------------------------------------------------------------------------------------


@given(specs, widths(), capabilities, st.integers(1, 200), st.booleans())
@settings(max_examples=400)
def test_few_rows_differ_only_in_what_does_not_show(
    spec: Any, n: int, architecture: int, multiprocessors: int, dx_given: bool
) -> None:
    forward = isinstance(spec, ForwardSpec)
    options = {} if forward else {"dx_given": dx_given}
    shown = ("pack_length",) if forward else ("row_threads", "packs_per_thread", "cluster_blocks")
    for vector in vectors(spec, n):
        many = configure(spec, n, vector, architecture)
        found = few_rows(spec, n, many, architecture, multiprocessors, **options)
        most = [rows for rows, _ in found]
        assert most == sorted(most)
        assert forward or len(set(most)) == len(found)
        assert len({few for _, few in found}) == len(found)  # no layout is there twice
        for rows, few in found:
            for name in (*shown, "vector", "full"):
                assert getattr(few, name) == getattr(many, name), name
            if forward:
                check_few_forward(spec, n, many, rows, few, multiprocessors)
            else:
                assert not (few.column_threads and dx_given), "no block reads what others write"
                check_few_backward(spec, many, rows, few, architecture, multiprocessors)


def check_few_forward(
    spec: ForwardSpec, n: int, many: Any, rows: int, few: Any, multiprocessors: int
) -> None:
    assert (many.cluster_blocks, many.folded, many.rare_last) == (1, False, False)
    at_once = few.rows_per_block * few.blocks_per_multiprocessor * multiprocessors
    if few.cluster_blocks > 1:
        at_once = multiprocessors // few.cluster_blocks
    if few.packs_per_thread < many.packs_per_thread and not few.rare_last:
        assert rows * n <= 2**23 < (rows + 1) * n
    else:
        assert rows == at_once
        assert few == many or few.blocks_ahead == 0  # if all run at once
    if few.rare_last and few.row_threads >= 32 and few.packs_per_thread == many.packs_per_thread:
        assert few.hold_weight
        assert spec.weight or spec.bias


def check_few_backward(
    spec: BackwardSpec, many: Any, rows: int, few: Any, architecture: int, multiprocessors: int
) -> None:
    kernels, layer_norm = instantiate(spec, few), spec.norm == "layer_norm"
    assert [kernel.overlaps for kernel in kernels] == [False, True][: len(kernels)]
    columns, of_several = few.column_threads > 0, few.rows_per_block > 1
    alone = rows == 1 and not columns and not of_several
    assert (few.reduction is None) == (alone or columns or not spec.gradients)
    if columns:
        # A thread adds up at most kTurns rows, one after another.
        assert rows <= 64 * (few.column_threads // few.column_lanes)
        assert few.column_lanes in (4, 8, 16, 32)
        assert few.block_threads == (few.row_threads if layer_norm else few.column_threads)
        assert architecture >= 90 or not layer_norm  # its second kernel overlaps
        assert all(kernel.shared_bytes <= 48 << 10 for kernel in kernels)
    elif of_several:  # as many rows as run at once
        assert rows == few.rows_per_block * multiprocessors
        assert few.rows_per_block <= 64
        assert few.reduction == many.reduction
    else:  # each block writes a partial
        assert few.row_threads >= 32
        assert rows <= 64


# ---- what the kernels have as well ---------------------------------------------------------------


def python(expression: str) -> str:
    """Return a C++ constant expression as a Python expression."""
    expression = re.sub(r"//.*|\b(Layout|Op)::", "", expression)
    expression = expression.replace("/", "//").replace("&&", " and ")
    expression = re.sub(r"static_cast<int>\((sizeof\(\w+\))\)", r"\1", expression)
    expression = re.sub(r"sizeof\((\w+)\)", r"sizeof_\1", expression)
    expression = re.sub(r"\s+", " ", re.sub(r"!(?!=)", " not ", expression))
    either = r"(\2 if \1 else \3)"
    innermost = r"\(([^()]*)\?([^()]*):([^()]*)\)"
    while re.search(innermost, expression):
        expression = re.sub(innermost, either, expression)
    return re.sub(r"^(.*)\?(.*):(.*)$", either, expression)


def constants(file: str, names: str, **known: Any) -> dict[str, Any]:
    """Return constants of a file of `kernels/`. Each may use earlier ones, and `known`."""
    text = (kernels_directory() / file).read_text(encoding="utf-8")
    text = re.sub(r"(constexpr int k\w+ = [^;,]+), (k\w+ =)", r"\1; constexpr int \2", text)
    for name in names.split():
        found = re.search(rf"constexpr (?:int|bool) {name} =\s*([^;]+);", text)
        assert found is not None, f"{file} has no {name}"
        known[name] = eval(python(found[1]), {}, known)
    return known


def stage_bytes(dtype: str | None, packs: int, threads: int, length: int, lanes: int = 0) -> int:
    """Return the bytes of a Stage, as kernels/stage.cuh has it."""
    sizes = {"Length": length, "PacksPerThread": packs, "BlockThreads": threads, "CellLanes": lanes}
    names = "kCells kPackBytes kPieceBytes kPlaces kBytes"
    found = constants("stage.cuh", names, **sizes, sizeof_T=ITEMSIZE.get(dtype or "", 0))
    return int(found["kBytes"])


def team_scratch_bytes(chosen: Chosen, itemsize: int) -> int:
    """Return the shared memory of reductions, as kernels/team.cuh has it."""
    config = chosen.config
    found = constants(
        "team.cuh",
        "kTeams kWarps kByBlocks kSlots kMaxValues kMailboxBytes kAll kBytes",
        RowThreads=chosen.team,
        BlockThreads=getattr(config, "block_threads", chosen.team),
        ClusterBlocks=config.cluster_blocks,
        Split=isinstance(config, ForwardInRegisters),
        Folded=getattr(config, "folded", False),
        sizeof_T=itemsize,
    )
    return 0 if found["kSlots"] == 1 else -(-int(found["kBytes"]) // 128) * 128


def bytes_of_kernels(chosen: Chosen) -> list[int]:
    """Return the shared memory of a layout's kernels, by the constants of their sources."""
    spec, config, length = chosen.spec, chosen.config, chosen.length
    itemsize, packs = ITEMSIZE[compute_dtype(spec.x)], getattr(config, "packs_per_thread", 1)
    if isinstance(config, Strips):
        found = constants("backward_column_parallel.cu", "kAhead kStages kMessengers kPlaces")
        row = sum(stage_bytes(d, 1, config.strip_threads, length) for d in (spec.x, spec.dy))
        sums = 3 if spec.norm == "layer_norm" else 1
        of_warps = found["kMessengers"] * config.strip_threads // 32 * sums
        known = found["kPlaces"] * 5  # mean, rstd and three means of each row
        return [config.group_rows * (found["kStages"] * row + (of_warps + known) * itemsize)]
    size, others = team_scratch_bytes(chosen, itemsize), []
    threads = getattr(config, "block_threads", chosen.team)
    if isinstance(config, ForwardPipelined | BackwardPipelined):
        lanes = min(32, chosen.team) * config.cells
        read = (spec.x, spec.dy) if isinstance(spec, BackwardSpec) else (spec.x,)
        row = sum(stage_bytes(d, packs, threads, length, lanes) for d in read)
        weight = None if config.hold_weight else spec.weight
        size += config.stages * row + stage_bytes(weight, packs, threads, length)
    if isinstance(config, ForwardPipelined):
        bias = None if config.hold_bias else spec.bias
        size += 128 + stage_bytes(bias, packs, threads, length)
    elif isinstance(config, ForwardInRegisters):
        unaligned = chosen.vector == 1 and ITEMSIZE[spec.x] <= 4 and packs > 2
        if unaligned and ITEMSIZE[spec.y] <= 4:  # words that lanes exchange
            size += threads * length * ITEMSIZE[spec.y]
    elif isinstance(config, BackwardPipelined):
        teams = config.rows_per_block
        mailboxes = {"kTeams": teams, "kStages": config.stages, "sizeof_Mailbox": 8}
        found = constants("backward_pipelined.cu", "kMailboxBytes", kBulk=config.bulk, **mailboxes)
        tiles = (teams if teams > 1 and spec.gradients else 0) + config.shared_sums
        size += found["kMailboxBytes"] + tiles * chosen.team * packs * length * itemsize
    elif isinstance(config, BackwardInRegisters):
        columns = config.column_threads // 32 * config.column_lanes
        sums = spec.gradients * columns * length * itemsize
        if columns and spec.norm == "layer_norm":
            others.append(sums)
        elif not columns and config.rows_per_block > 1:
            size += spec.gradients * threads * packs * length * itemsize
        size = max(size, sums * (not others))
    elif isinstance(config, BackwardStreaming):
        others.append(0)
    reduction = getattr(config, "reduction", None)
    if reduction is not None:
        sizes = {"kBlockThreads": reduction.block_threads, "kGroups": reduction.groups}
        names = "kWidth kLanes kColumns kWarps kSums"
        found = constants("reduce_partials.cu", names, **sizes, sizeof_T=itemsize)
        assert (reduction.width, reduction.columns) == (found["kWidth"], found["kColumns"])
        assert reduction.vector == (1 if chosen.n % reduction.width else reduction.width)
        assert reduction.groups in (1, 2, 4, 8, 16, 32, 64)
        others.append(found["kSums"] * found["kColumns"] * itemsize)
    return [size, *others]


@given(specs, widths(), capabilities)
@settings(max_examples=200)
def test_shared_memory_is_what_the_kernels_lay_out(spec: Spec, n: int, architecture: int) -> None:
    for chosen in every_layout(spec, n, architecture):
        sizes = [kernel.shared_bytes for kernel in instantiate(spec, chosen.config)]
        assert sizes == bytes_of_kernels(chosen)


def test_constants_are_those_of_the_kernels() -> None:
    strips = backward_column_parallel
    names = "kAhead kStages kMessengers kPlaces kCountStride kMostStrips"
    found = constants("backward_column_parallel.cu", names)
    assert strips.STAGES == found["kStages"]
    assert strips.MESSENGERS == found["kMessengers"]
    assert strips.PLACES == found["kPlaces"]
    assert strips.MAX_STRIPS == found["kMostStrips"]
    counts = strips.PLACES + strips.WILD_PLACES
    assert column_parallel_counts_bytes() == counts * found["kCountStride"] * 4
    assert max(backward_in_registers.TEAMS) == constants("gradient.cuh", "kTurns")["kTurns"] == 64
    assert fused.STREAMED_ROWS <= constants("gradient.cuh", "kTurns")["kTurns"]
    most_teams = backward_in_registers.MAX_TEAMS_OF_SEVERAL_WARPS
    assert f"kTeams <= {most_teams}" in source("team.cuh")
    assert "return (n_cols + 7) & ~7LL;" in source("gradient.cuh")
    assert [partials_stride(n) for n in range(40)] == [(n + 7) & ~7 for n in range(40)]


# ---- plans ---------------------------------------------------------------------------------------

SCRATCH = 1 << 40  # its address, after all others


@dataclass
class Gpu:
    """A made-up GPU: its kernels record what is launched."""

    architecture: int = 90
    multiprocessors: int = 132
    clusters: int = 30  # clusters that run at once
    blocks: int = 1  # blocks of strips on a multiprocessor
    without_room: Any = ()  # kernels whose clusters do not fit
    loaded: list[Instantiation] = field(default_factory=list)
    launched: list[tuple[Instantiation, int, dict[str, Any]]] = field(default_factory=list)
    zeroed: list[tuple[int, int, int]] = field(default_factory=list)
    device: int = field(default_factory=itertools.count(1000).__next__)  # its plans are its own

    def __enter__(self) -> Gpu:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(_compile, "load", self._load)
        self._patch.setattr(_plans, "set_to_zero", lambda *given: self.zeroed.append(given))
        self._patch.setattr(_plans, "multiprocessors", lambda device: self.multiprocessors)
        self._patch.setattr(_plans, "architecture", lambda device: self.architecture)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def _load(self, kernel: Instantiation, device: int) -> Any:
        self.loaded.append(kernel)

        def prepared(blocks: int, numbers: dict[str, float]) -> Any:
            left = [name for name, _ in kernel.arguments if name not in numbers]

            def launch(stream: int, operands: tuple[int, ...]) -> None:
                assert stream == 5
                given = dict(zip(left, operands, strict=True)) | numbers
                self.launched.append((kernel, blocks, given))

            return launch

        def clusters_at_once(alone: bool = False) -> int:
            without = kernel in self.without_room or (alone and self.without_room)
            return 0 if without else self.clusters

        counts = {"clusters_at_once": clusters_at_once, "blocks_at_once": lambda: self.blocks}
        return SimpleNamespace(of=kernel, prepared=prepared, **counts)

    def plan(self, spec: Any, m: int, n: int, vector: int, **options: bool) -> Any:
        forward = isinstance(spec, ForwardSpec)
        plan_of: Any = _plans.forward_plan if forward else _plans.backward_plan
        return plan_of(spec, m, n, vector, self.device, **options)

    def launches(self, plan: Any, m: int, scratch: int = SCRATCH) -> Any:
        """Return what a plan launches over m rows, for operands 1, 2, ... and scratch."""
        self.launched.clear()
        self.zeroed.clear()
        forward = isinstance(plan, _plans.ForwardPlan)
        table = FORWARD_PASS if forward else BACKWARD_PASS
        operands = (*range(1, len(table.operands) + 1), scratch)
        if forward and not plan.scratch_bytes(m):
            operands = operands[:-1]
        plan.prepared(m, *((0.5, 2.0, 3.0) if forward else ()))(5, operands)
        return self.launched


@pytest.mark.parametrize(
    ("shape", "clusters", "as_one"),
    [
        ((8, 32, 16, 64, 64), 15, True),
        ((8, 32, 16, 64, 64), 16, True),
        ((32, 32, 12, 56, 56), 30, True),
        ((256, 32, 16, 28, 28), 66, False),  # groups of many rows
        ((8, 32, 1, 64, 64), 0, False),  # one wave either way
    ],
)
def test_rows_of_all_groups_are_taken_as_one_where_that_takes_less_time(
    shape: tuple[int, ...], clusters: int, as_one: bool
) -> None:
    batch, count, channels, *image = shape
    m, n, repeats = batch * count, channels * math.prod(image), math.prod(image)
    groups = groups_of(shape, 3, (count, channels, 1, 1), (count, channels, 1, 1))
    spec = BackwardSpec("layer_norm", *("bfloat16",) * 4, False, False, **sharing(groups))
    gpu = Gpu(clusters=clusters or 30)
    with gpu:
        plan = gpu.plan(spec, m, n, 8)
        size = plan.scratch_bytes(m, groups)
        plan.prepared(m, groups)(5, (*range(1, len(BACKWARD_PASS.operands) + 1), SCRATCH))
    (rows, blocks, of_rows), (sums, _, of_sums) = gpu.launched
    at_once = clusters or 132
    assert (rows.name, sums.name) == ("norm_backward_pipelined", "reduce_repeats")
    assert (of_rows["n_groups"], of_rows["n_vectors"]) == (1 if as_one else count, count)
    assert of_rows["n_rows"] * of_rows["n_groups"] == m
    summed = repeats // of_sums["n_repeats"]
    assert summed == min(256, repeats & -repeats)
    if as_one:
        assert blocks == at_once * rows.cluster_blocks
        assert (of_sums["group_step"], of_sums["row_step"]) == (1, count)
        assert of_sums["n_partials"] == batch
    else:
        assert blocks <= 2 * at_once * rows.cluster_blocks
        assert (of_sums["group_step"], of_sums["row_step"]) == (of_sums["n_partials"], 1)
        teams = blocks // rows.cluster_blocks * plan.rows_per_partial
        assert of_sums["n_partials"] == teams // count
    assert size == 2 * count * of_sums["n_partials"] * -(-n // summed // 8) * 8 * 4


@given(
    specs,
    widths(),
    st.integers(0, 40) | st.integers(1, 5000) | st.sampled_from((10**6, 2**31)),
    st.builds(Gpu, capabilities, st.integers(1, 200), st.integers(0, 40)),
    st.booleans(),
)
@settings(max_examples=250)
def test_every_plan_covers_all_rows_within_its_scratch(
    spec: Any, n: int, m: int, gpu: Gpu, dx_given: bool
) -> None:
    with gpu:
        options = {} if isinstance(spec, ForwardSpec) else {"dx_given": dx_given}
        plan = gpu.plan(spec, m, n, vectors(spec, n)[-1], **options)
        size, launches = plan.scratch_bytes(m), gpu.launches(plan, m)
    assert plan.scratch_bytes(m + 1) >= size
    sizes = {"n_rows": m, "n_cols": n, "inv_n": 1 / n}
    for kernel, blocks, arguments in launches:
        assert blocks > 0
        assert blocks % kernel.cluster_blocks == 0
        assert kernel.cluster_blocks == 1 or gpu.clusters
        behind = [argument for argument in arguments.values() if argument >= SCRATCH]
        assert not size or max(behind, default=SCRATCH) < SCRATCH + size
    assert all(SCRATCH <= at <= SCRATCH + size - count for _, at, count in gpu.zeroed)
    if m == 0:  # the weight gradients of no rows are 0
        assert len(launches) == bool(getattr(plan, "reduction_blocks", 0) or gpu.zeroed)
    elif isinstance(plan, _plans.ForwardPlan):
        [(kernel, blocks, arguments)] = launches
        groups = -(-m // plan.rows_per_block)
        if plan.most_clusters is not None:  # clusters take rows one after another
            groups = min(groups, gpu.clusters if kernel.cluster_blocks > 1 else gpu.multiprocessors)
        assert blocks == groups * kernel.cluster_blocks
        assert arguments.items() >= (sizes | {"eps": 0.5, "lower": 2.0, "upper": 3.0}).items()
    elif isinstance(plan, _plans.InRegistersPlan | _plans.PipelinedPlan):
        groups = -(-m // plan.rows_per_partial)
        if isinstance(plan, _plans.PipelinedPlan):
            groups = min(groups, plan.most_partials)
        elif not plan.column_kernel:
            assert plan.column_blocks % plan.cluster_blocks == 0
            groups += plan.column_blocks // plan.cluster_blocks
        assert launches[0][1] == groups * plan.cluster_blocks
        assert launches[0][2].items() >= sizes.items()
    elif isinstance(plan, _plans.StreamingPlan):
        values = SCRATCH + size - 4 * m * plan.itemsize  # four of each row, after all partials
        assert [given["coefficients"] for *_, given in launches[:2]] == [values, values]
        assert plan.most_partials == -(-4 * gpu.multiprocessors // plan.tiles)
        assert plan.tiles == -(-n // (launches[1][0].block_threads * pack_length(spec.x)))
    if getattr(plan, "reduction_blocks", 0):
        partials = min(-(-m // plan.rows_per_partial), plan.most_partials)
        assert partials <= max(4 * gpu.multiprocessors, 64)
        assert size >= spec.gradients * partials * partials_stride(n) * plan.itemsize
        _, blocks, arguments = launches[-1]
        assert blocks == spec.gradients * plan.reduction_blocks
        place = 1 + BACKWARD_PASS.operands.index("dweight")
        sums = {"partials": SCRATCH, "dweight": place, "dbias": place + 1}
        assert arguments == sums | {"n_partials": partials, "n_cols": n}


@pytest.mark.parametrize("architecture", [90, 100, 103, 120])
def test_without_room_for_clusters_rows_have_layouts_that_fit(architecture: int) -> None:
    lengths = range(960, 3200, 64)
    for i, spec in enumerate(FORWARD[::61] + BACKWARD[::61]):
        for packs in lengths[i % one_in(3) :: one_in(3)]:  # they take turns
            n = packs * pack_length(spec.x)
            with Gpu(architecture, clusters=0) as gpu:
                for m in (1, 10**6):
                    gpu.plan(spec, m, n, pack_length(spec.x))
            found = [kernel for kernel in gpu.loaded if kernel.cluster_blocks == 1]
            assert max(kernel.shared_bytes for kernel in found) <= shared_limit(architecture)


def test_a_plan_loads_only_the_kernel_of_its_rows() -> None:
    spec = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
    with Gpu() as gpu:
        tiers = [most for most, _ in _plans.few_rows(spec, 16384, 8, gpu.device)]
        rows = (1, *itertools.chain.from_iterable((most, most + 1) for most in tiers), 10**9)
        kernels = [gpu.plan(spec, m, 16384, 8).kernel.of for m in rows]
        # For few rows: in a cluster, with the weight held, the same as for many, and with more rows
        # at once than for many.
        split, held, many, at_once = dict.fromkeys(kernels)
        assert kernels == [split, split, held, held, many, many, at_once, at_once, many, many]
        assert gpu.loaded == [split, held, many, at_once, many]  # many: for few rows, then for many
    with Gpu() as gpu:
        assert gpu.plan(spec, 1, 64, 1) is gpu.plan(spec, 10**9, 64, 1)
        assert len(gpu.loaded) == 1


@pytest.mark.parametrize("norm", NORMS)
def test_a_plan_of_few_rows_has_its_own_scratch_and_blocks_of_columns(norm: Norm) -> None:
    layer_norm, bias = norm == "layer_norm", "float32" if norm == "layer_norm" else None
    spec = BackwardSpec(norm, "float32", "float32", "float32", bias, False, False)
    with Gpu() as gpu:
        tiers = _plans.few_rows_backward(spec, 4096, 4, gpu.device, dx_given=False)
        (few, columns), (most, _) = tiers
        two, last, many = (gpu.plan(spec, m, 4096, 4) for m in (2, most, most + 1))
        assert gpu.plan(spec, few, 4096, 4) is gpu.plan(spec, 1, 4096, 4) is two
        assert gpu.loaded == [k.of for plan in (two, last, many) for k in plan.kernels]
        assert isinstance(last, _plans.InRegistersPlan)
        assert isinstance(many, _plans.PipelinedPlan)
        # A lane has a pack of 4 columns. LayerNorm's further kernel reads a mean of each row.
        further = 4096 // (4 * columns.column_lanes)
        assert two.scratch_bytes(2) == 2 * 4 * layer_norm
        blocks = [blocks for _, blocks, _ in gpu.launches(two, 2)]
        assert blocks == ([2, further] if layer_norm else [2 + further])
        # dx over dy overwrites what another block still needs.
        row, in_place = 4096 * 4, gpu.plan(spec, 2, 4096, 4, dx_given=True)
        assert (in_place.column_blocks, in_place.scratch_bytes(2)) == (0, spec.gradients * 2 * row)
        [(_, blocks, arguments), _] = gpu.launches(in_place, 2)
        of_bias = SCRATCH + (spec.gradients - 1) * 2 * row
        where = [arguments[name] for name in ("dweight", "dbias", "means_of_h")]
        assert (blocks, where) == (2, [SCRATCH, of_bias, SCRATCH])
        assert gpu.plan(spec, 0, 4096, 4) is many  # its sums are 0, over no partials
        [(*_, arguments)] = gpu.launches(many, 0)
        assert (arguments["n_partials"], arguments["n_cols"]) == (0, 4096)


def test_several_rows_a_block_are_planned_up_to_what_runs_at_once() -> None:
    spec = BackwardSpec("layer_norm", *4 * ("float32",), False, False)
    with Gpu(multiprocessors=40) as gpu:
        for m, partials in ((257, 33), (319, 40), (320, 40)):
            plan = gpu.plan(spec, m, 1024, 4)
            assert isinstance(plan, _plans.InRegistersPlan)
            assert plan.rows_per_partial == 8
            assert plan.scratch_bytes(m) == partials * 2 * 1024 * 4  # for both gradients
        assert gpu.plan(spec, 64, 1024, 4).rows_per_partial == 1
        assert isinstance(gpu.plan(spec, 321, 1024, 4), _plans.PipelinedPlan)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("without_room", ["many", "all", None])
def test_few_rows_have_clusters_where_many_have_them(without_room: str | None, norm: Norm) -> None:
    spec = BackwardSpec(norm, "float32", "float32", "float32", None, False, False)
    config = configure(spec, 33000, 4)
    few_configs = [few for _, few in few_rows(spec, 33000, config, 90, 3)]
    configs = {"many": [config], "all": [config, *few_configs], None: []}[without_room]
    with Gpu(without_room=[instantiate(spec, one)[0] for one in configs]) as gpu:
        few, many = (gpu.plan(spec, rows, 33000, 4) for rows in (2, 10**9))
    assert (many.cluster_blocks > 1) == (without_room is None)
    assert few.cluster_blocks == many.cluster_blocks
    assert isinstance(few, _plans.InRegistersPlan) == (without_room is None)
    if without_room is None:
        # The columns are summed in clusters like the rows', or by a kernel of their own.
        assert few.column_kernel == (norm == "layer_norm")
        assert few.column_kernel or few.column_blocks % config.cluster_blocks == 0
        assert few.column_blocks * 32 * 4 >= 33000


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("n", [64, 8192, 16384, 32768, 65536, 131072, 262144, 1 << 20])
def test_many_rows_are_counted_where_the_layout_says_so(norm: Norm, n: int) -> None:
    bias = "float32" if norm == "layer_norm" else None
    spec = ForwardSpec(norm, "float32", "float32", bias, "float32", False, False, False)
    with Gpu(multiprocessors=3, clusters=2) as gpu:
        config = configure(spec, n, 4)
        pipelined = isinstance(config, ForwardPipelined)
        clusters = 2 if config.cluster_blocks > 1 else 3
        plan = gpu.plan(spec, 10**6, n, 4)
        for m, scratch in itertools.product(
            (0, 1, 32 * clusters - 1, 32 * clusters, 10**6), (0, 1 << 20)
        ):
            many = pipelined and config.counted and m >= 32 * clusters
            assert plan.scratch_bytes(m) == (16 if many else 0)
            # JAX may have no scratch for a program that was made for other GPUs.
            launches, count = gpu.launches(plan, m, scratch), scratch if many else 0
            assert gpu.zeroed == ([(5, scratch, 16)] if count else [])
            counts = [count] if pipelined and m else []
            assert [given["count"] for *_, given in launches if "count" in given] == counts
            assert [given["n_rows"] for *_, given in launches] == ([m] if m else [])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("multiprocessors", "at_once"), [(132, 1), (127, 1), (64, 2), (63, 2)])
def test_strips_that_do_not_all_run_at_once_are_streamed(
    multiprocessors: int, at_once: int, norm: Norm
) -> None:
    spec = BackwardSpec(norm, "float32", "float32", "float32", None, False, False)
    with Gpu(multiprocessors=multiprocessors, blocks=at_once) as gpu:
        plan = gpu.plan(spec, 3, 262144, 4)
        if multiprocessors * at_once < 128:
            assert [kernel.of.at_once for kernel in plan.kernels] == [False] * 3
            return
        sums = 3 if norm == "layer_norm" else 1
        # The counts of eight groups of two rows, and each row's sums by 128 blocks. Those of two
        # wild rows have 16 warps for each block, in float64.
        of_wild_rows = 2 * (128 + sums * 128 * 16 * 8)
        for m in (3, 0):
            assert plan.scratch_bytes(m) == 8 * (128 + 2 * sums * 128 * 4) + of_wild_rows
            [(kernel, blocks, arguments)] = gpu.launches(plan, m)
            assert gpu.zeroed == [(5, SCRATCH, 10 * 128)]
            assert (kernel.at_once, blocks) == (True, 128)
            places = (arguments["arrived"], arguments["exchange"], arguments["n_rows"])
            assert places == (SCRATCH, SCRATCH + 10 * 128, m)


# ---- instantiations and sources ------------------------------------------------------------------

# Row lengths, in packs, of every kind of layout.
PACKS = (1, 8, 33, 64, 97, 200, 400, 1000, 1024, 2048, 5000, 20_000, 40_000, 200_000)

FILES = sorted(path.name for path in kernels_directory().iterdir())
KERNELS = [name for name in FILES if name.endswith(".cu")]
HEADERS = [name for name in FILES if name.endswith(".cuh")]


@pytest.mark.parametrize("all_specs", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_structs_say_all_that_a_spec_and_layout_say(all_specs: tuple[Spec, ...]) -> None:
    seen: dict[tuple[str, ...], tuple[Spec, Any]] = {}
    launched: dict[str, Instantiation] = {}
    for spec, packs in itertools.product(all_specs[::3], PACKS[::2]):
        for vector in (1, pack_length(spec.x)):
            config = configure(spec, packs * pack_length(spec.x), vector)
            kernels = instantiate(spec, config)
            sources = tuple(kernel.file + kernel.name + kernel.structs() for kernel in kernels)
            assert seen.setdefault(sources, (spec, config)) == (spec, config)
            for kernel, text in zip(kernels, sources, strict=True):
                assert launched.setdefault(text, kernel) == kernel
    assert len(seen) > len(all_specs[::3])


def test_structs_are_of_members_that_have_a_type_or_a_value() -> None:
    member = (
        r"  using [A-Z]\w* = (double|float|b?float16|None|Identity|Clamp|Plain|AddResidual);\n"
        r"|  static constexpr (bool k[A-Z]\w* = (true|false)|int k[A-Z]\w* = \d+);\n"
    )
    for spec, packs in itertools.product(FORWARD[::61] + BACKWARD[::61], PACKS):
        for kernel in instantiate(spec, configure(spec, packs * pack_length(spec.x), 1)):
            structs = rf"struct Op {{\n({member})+}};\nstruct Layout {{\n({member})+}};\n"
            assert re.fullmatch(structs, kernel.structs())
            assert re.fullmatch(r"[a-z_]+<Op_1, Layout_1>", kernel.expression("_1"))
            renamed = re.sub(r"struct (\w+)", r"struct \1_1", kernel.structs())
            assert kernel.structs("_1") == renamed


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
            # One that may quantize takes another struct then.
            plain = rf"using {declared[1]} =\s*typename Either<[\w:]+, \w+<Op>, (\w+)<Op>>::type;"
            chosen = re.search(plain, source(kernel.file)) or declared
            assert ARGUMENTS[chosen[1]] == tuple(name for name, _ in kernel.arguments)


def test_the_layout_has_what_the_kernel_uses_and_no_more() -> None:
    used: dict[str, set[str]] = {}
    for spec, packs in itertools.product(FORWARD[::61] + BACKWARD[::61], PACKS):
        for chosen in every_layout(spec, packs * pack_length(spec.x), 90):
            for kernel in instantiate(spec, chosen.config):
                used[kernel.file] = used.get(kernel.file, set()) | {n for n, _ in kernel.layout}
    for file, members in used.items():
        text = (kernels_directory() / file).read_text(encoding="utf-8")
        assert members == set(re.findall(r"\bLayout::(\w+)", text)), file


def body(header: str) -> str:
    """Return a header's text after its last include. It is pasted in one piece."""
    text = (kernels_directory() / header).read_text(encoding="utf-8")
    return re.split(r'^#(?:include ".*"|pragma once)\n', text, flags=re.MULTILINE)[-1]


@pytest.mark.parametrize("file", KERNELS)
def test_a_source_is_complete_and_pastes_a_header_once(file: str) -> None:
    text = source(file)
    assert "#include" not in text
    assert "#pragma once" not in text
    times = {header: text.count(body(header)) for header in HEADERS}
    assert set(times.values()) <= {0, 1}
    # Whatever a header needs comes before it.
    order = sorted((h for h in HEADERS if times[h]), key=lambda h: text.index(body(h)))
    for position, header in enumerate(order):
        own = (kernels_directory() / header).read_text(encoding="utf-8")
        needed = set(re.findall(r'#include "(.*)"', own))
        assert needed <= set(order[:position])
    assert body(file) in text


# What norms of rows that lie side by side may not have.
ALONE = {
    ForwardSpec: {"relu": False, "branch": None, "residual": None},
    BackwardSpec: {"bitmask": False, "dresidual_out": None, "dx": None, "dresidual": None},
}


def test_every_file_is_reachable_and_there_is_nothing_else() -> None:
    used = set()
    for spec, packs in itertools.product(FORWARD[::97] + BACKWARD[::97], PACKS):
        for chosen in every_layout(spec, packs * pack_length(spec.x), 90):
            used |= {kernel.file for kernel in instantiate(spec, chosen.config)}
    for spec in (FORWARD[0], BACKWARD[0]):
        by_index = dataclasses.replace(spec, weight="float32", grouped=True, repeats=1)
        alone = dataclasses.replace(spec, **ALONE[type(spec)])
        for of, config in (
            *((by_index, chosen.config) for chosen in every_layout(by_index, 1024, 90)),
            (alone, strided(alone, 96, 1, 90)),
        ):
            used |= {kernel.file for kernel in instantiate(of, config)}
    x, fused = np.zeros((4, 1024), np.float32), cupynorm.fuse("rms_norm")
    for backward in (False, True):
        names = fused.kernel_source(x, x[0], backward=backward)
        used |= {f"{name}.cu" for name in names}
    pasted = {h for h in HEADERS if any(body(h) in source(file) for file in KERNELS)}
    assert sorted(used | pasted) == FILES
    assert sorted(used) == KERNELS
