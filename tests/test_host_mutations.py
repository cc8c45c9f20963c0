"""Small mistakes in the kernels, each of which the host run must notice, and for the right reason.

A mutation is a text of `kernels/` and another in its place. One that survives means that a case is
missing in host/checks.py.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
from host.build import Build, compiler_problem
from host.checks import (
    CASES,
    FAR_ROWS,
    FEW,
    Case,
    check_case,
    check_clip_values,
    check_far_rows,
    check_neighbours,
    kernels_of,
)
from host.gpu import Gpu
from host.staged import STAGED, Staged

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

# What a mutation is caught by: a report of the runtime, or a value that exceeds its bound.
OUT_OF_BOUNDS = "out of bounds|uninitialized: (reads|fetches)"  # as what lies behind the array
RACE = "race: "
UNWRITTEN = "uninitialized|was never written"
STUCK = "no thread can go on|lanes of a warp disagree"
MISALIGNED = "misaligned"
VALUE = "times the bound"
BITS = "wrong bits in all"
BITS_OF = "bits of "

FAR = "rows more than 2**31 elements apart"
BOUNDS = "values on the bounds of a ReLU"
BESIDE = "rows beside rows out of range"


def case(
    name: str, norm: str = "layer_norm", x: str | None = None, cases: list[Case] = CASES
) -> Case:
    return next(c for c in cases if c.name == name and c.norm == norm and x in (None, c.x))


@dataclasses.dataclass(frozen=True)
class FewRows:
    """A case whose rows have the kernels of few."""

    case: Case


def few(name: str, norm: str = "layer_norm", x: str | None = None) -> FewRows:
    return FewRows(case(name, norm, x, FEW))


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    caught_by: str
    on: Case | FewRows | Staged | str

    def __str__(self) -> str:
        return self.name


def staged(file: str, norm: str = "layer_norm", regime: str = "normal", **how: int) -> Staged:
    """Return the first staged kernel that is so."""
    return next(
        s
        for s in STAGED
        if (s.file, s.norm, s.regime) == (file, norm, regime)
        and all(getattr(s, name) == value for name, value in how.items())
    )


LOADING = """    if (first + begin < n) {
#pragma unroll
      for (int offset = 0; offset < Vector * static_cast<int>(sizeof(T)); offset += kBytes) {
        read_words"""
STORING = LOADING.replace("read_words", "write_words")

AFFINE = """#pragma unroll
  for (int p = 0; p < PacksPerThread; ++p) {
    if constexpr (!HoldWeight) {
      StageOfWeight::template fetch<Vector>(stage_of_weight, p, weight, first_column(p),
                                            end_of_row(p));
    }
    if constexpr (!HoldBias) {
      StageOfBias::template fetch<Vector>(stage_of_bias, p, bias, first_column(p), end_of_row(p));
    }
  }
"""

ANNOUNCING = """      ask();
    }
    if constexpr (ClusterBlocks > 1) {
      if (rank % 32 == 0 && (block == 0 ? sends : rank == 0)) {
        expect_bytes(mailbox(reductions % 2),
                     kSlots * kSentBytes<Count, T> + static_cast<int>(sizeof(word)));
      }
    }
"""

SUB_WARP = case("sub_warp_odd", x="bfloat16")
WARPS = case("warps", x="float32")
WARPS_ODD = case("warps_odd", x="bfloat16")
CLUSTER_STREAM, CLUSTER_COEFFICIENTS = case("cluster_tiles"), case("cluster_odd")
STREAM, STREAM_LONG = case("stream_odd"), case("stream_long")
TURNS, STREAM_TURNS = case("turns"), case("stream_turns")
MANY = case("many_partials")
RELU, RELU_STREAM = case("relu_sub_warp", x="float32"), case("relu_stream_odd")
WILD_MEAN = case("range_mean_1e6", x="float32")

STAGED_FORWARD, STAGED_BACKWARD = staged("forward_staged.cu"), staged("backward.cu")
CLUSTER_FORWARD = staged("forward_staged.cu", cluster_blocks=2)
CLUSTER_BACKWARD = staged("backward.cu", cluster_blocks=2)
WIDE_BACKWARD = staged("backward.cu", n=301)
TEAMS_BACKWARD = staged("backward.cu", n=1000)

FEW_ROWS, LONE_ROW = few("warps"), few("lone_relu_warps_odd")
FEW_MEAN = few("range_mean_1e6", x="float32")
FEW_RELU, FEW_GAP = few("relu_warps"), few("block")
COLUMNS, COLUMNS_BIAS = few("columns", "rms_norm"), few("columns_bias", "rms_norm")
COLUMNS_MEAN, COLUMNS_IN_PLACE = few("columns_mean"), few("columns_in_place")
BULK = staged("backward.cu", bulk=True, m=7)
BULK_TEAMS = staged("backward.cu", bulk=True, teams=3, m=37)
BULK_CLUSTER = staged("backward.cu", bulk=True, cluster_blocks=2, m=20)
SHARED_SUMS, SHARED_SUMS_OF_TEAMS = (
    staged("backward.cu", shared_sums=2, teams=teams) for teams in (1, 4)
)
HELD_SUMS = staged("backward.cu", hold_sums=True)

COUNTED = staged("forward_staged.cu", counted=True, m=40)
COUNTED_WARPS = staged("forward_staged.cu", counted=True, cluster_blocks=3, m=60)
COUNTED_CLUSTER = staged("forward_staged.cu", counted=True, cluster_blocks=2, m=40)
STRIPS = staged("backward_strips.cu", m=37)
STRIPS_BITMASK = staged("backward_strips.cu", bitmask=True)

MUTATIONS = [
    # ---- bounds ----
    Mutation(
        "load reads past the row",
        "pack.cuh",
        LOADING,
        LOADING.replace("< n)", "<= n)"),
        OUT_OF_BOUNDS,
        WARPS,
    ),
    Mutation(
        "store writes past the row",
        "pack.cuh",
        STORING,
        STORING.replace("< n)", "<= n)"),
        f"{OUT_OF_BOUNDS}|{RACE}",
        WARPS,
    ),
    Mutation(
        "inside counts one column more",
        "pack.cuh",
        "return first + i / Vector * Vector < n;",
        "return first + i / Vector * Vector <= n;",
        f"{VALUE}|{OUT_OF_BOUNDS}",
        WILD_MEAN,
    ),
    Mutation(
        "inside counts every column",
        "pack.cuh",
        "return first + i / Vector * Vector < n;",
        "return true;",
        f"{VALUE}|{OUT_OF_BOUNDS}",
        WARPS_ODD,
    ),
    Mutation(
        "accesses of 16 bytes whatever the alignment",
        "pack.cuh",
        "Vector * static_cast<int>(sizeof(T)) < 16 ? Vector * static_cast<int>(sizeof(T)) : 16;",
        "16;",
        MISALIGNED,
        WARPS_ODD,
    ),
    Mutation(
        "a 16-bit element in the wrong half of its word",
        "pack.cuh",
        "static_cast<unsigned>(loaded) << (8 * (offset % 4))",
        "static_cast<unsigned>(loaded)",
        VALUE,
        WARPS_ODD,
    ),
    Mutation(
        "a team past the last row reads",
        "forward.cu",
        "load<Vector>(packs[p], own_x, p * kStep, left_of_row(p), policy);",
        "load<Vector>(packs[p], own_x, p * kStep, n_left, policy);",
        OUT_OF_BOUNDS,
        SUB_WARP,
    ),
    Mutation(
        "what lies past the weight's end is prefetched",
        "forward.cu",
        "if (first < n_cols) prefetch(row + first);",
        "prefetch(row + first);",
        OUT_OF_BOUNDS,
        WARPS_ODD,
    ),
    Mutation(
        "a row past the last is fetched ahead",
        "forward.cu",
        "if (row < n_rows && first < n_cols) prefetch(",
        "if (first < n_cols) prefetch(",
        OUT_OF_BOUNDS,
        WARPS_ODD,
    ),
    Mutation(
        "what lies past the end of a row ahead is fetched",
        "forward.cu",
        "if (row < n_rows && first < n_cols) prefetch(",
        "if (row < n_rows) prefetch(",
        OUT_OF_BOUNDS,
        WARPS_ODD,
    ),
    Mutation(
        "rows fetched ahead lie one after the other",
        "forward.cu",
        "prefetch(x + (row * x_stride + first));",
        "prefetch(x + (row * n_cols + first));",
        OUT_OF_BOUNDS,
        case("block", x="bfloat16"),
    ),
    Mutation(
        "a team past the last row writes",
        "forward.cu",
        "store<Vector>(normalized, own_y, p * kStep, left_of_row(p));",
        "store<Vector>(normalized, own_y, p * kStep, n_left);",
        OUT_OF_BOUNDS,
        SUB_WARP,
    ),
    Mutation(
        "a block of a cluster for a row of its own",
        "forward.cu",
        "block_index() / ClusterBlocks * team.kTeams",
        "block_index() * team.kTeams",
        OUT_OF_BOUNDS,
        few("few_split"),
    ),
    Mutation(
        "each block of a cluster has its part of a row of few",
        "team.cuh",
        "Split ? p * ClusterBlocks + block : block * PacksPerThread + p",
        "block * PacksPerThread + p",
        f"{OUT_OF_BOUNDS}|{RACE}",
        few("few_split_odd"),
    ),
    *(
        Mutation(
            f"sums sent before mailboxes are open, {kernel}",
            file,
            "team.meet();",
            "",
            f"{RACE}|{STUCK}|mailbox",
            on,
        )
        for kernel, file, on in (
            ("few rows", "forward.cu", few("few_split")),
            ("staged", "forward_staged.cu", CLUSTER_FORWARD),
            ("streaming", "forward_streaming.cu", CLUSTER_STREAM),
            ("backward", "backward.cu", CLUSTER_BACKWARD),
            ("coefficients", "backward_streaming.cu", CLUSTER_COEFFICIENTS),
            ("few rows backward", "backward_resident.cu", few("columns_cluster")),
        )
    ),
    Mutation(
        "a cluster's barrier at which nobody arrives",
        "team.cuh",
        "      arrive_at_cluster_barrier();\n",
        "",
        "without having arrived",
        few("few_split"),
    ),
    Mutation(
        "every block of a cluster writes the statistics",
        "forward.cu",
        "team.rank == 0 && team.block == 0",
        "team.rank == 0",
        RACE,
        few("few_split"),
    ),
    Mutation(
        "a team past the last row reads rstd",
        "backward.cu",
        "beside.rstd = rstd[of_row];",
        "beside.rstd = rstd[of_row + n_rows];",
        OUT_OF_BOUNDS,
        STAGED_BACKWARD,
    ),
    Mutation(
        "the tail of a streamed row dropped",
        "stream.cuh",
        "base += Columns) visit(base, Columns);\n    if (rest > 0) visit(end, rest);",
        "base += Columns) visit(base, Columns);",
        f"{VALUE}|{UNWRITTEN}",
        STREAM,
    ),
    Mutation(
        "a column too many in the reduction",
        "reduce_partials.cu",
        "column + kWidth < n_cols ? kWidth : n_cols - column",
        "column + kWidth < n_cols ? kWidth : n_cols - column + 1",
        f"{OUT_OF_BOUNDS}|{UNWRITTEN}",
        SUB_WARP,
    ),
    # ---- addresses ----
    Mutation(
        "a 32-bit offset of a row of x",
        "forward.cu",
        "x + (row * x_stride + first_column(0))",
        "x + (static_cast<int>(row * x_stride) + first_column(0))",
        f"{OUT_OF_BOUNDS}|{VALUE}",  # if what is there happens to be the case's own
        FAR,
    ),
    Mutation(
        "a 32-bit offset of a row of y",
        "forward.cu",
        "y + (row * y_stride + first_column(0))",
        "y + (static_cast<int>(row * y_stride) + first_column(0))",
        f"{OUT_OF_BOUNDS}|{VALUE}",  # if what is there happens to be the case's own
        FAR,
    ),
    Mutation(
        "a 32-bit offset of a row of dy",
        "backward.cu",
        "dy + row * dy_stride",
        "dy + static_cast<int>(row * dy_stride)",
        f"{OUT_OF_BOUNDS}|{VALUE}",  # if what is there happens to be the case's own
        FAR,
    ),
    Mutation(
        "a 32-bit offset of a streamed row of y",
        "forward_streaming.cu",
        "y + row_index * y_stride",
        "y + static_cast<int>(row_index * y_stride)",
        f"{OUT_OF_BOUNDS}|{VALUE}",  # if what is there happens to be the case's own
        FAR,
    ),
    Mutation(
        "a 32-bit offset of a streamed row of dx",
        "backward_streaming.cu",
        "dx + row * dx_stride",
        "dx + static_cast<int>(row * dx_stride)",
        f"{OUT_OF_BOUNDS}|{VALUE}",  # if what is there happens to be the case's own
        FAR,
    ),
    Mutation(
        "y stored by the stride of x",
        "forward.cu",
        "y + (row * y_stride",
        "y + (row * x_stride",
        OUT_OF_BOUNDS,
        case("block"),
    ),
    Mutation(
        "dy fetched by the stride of dx",
        "backward.cu",
        "dy + row * dy_stride",
        "dy + row * dx_stride",
        f"{OUT_OF_BOUNDS}|{VALUE}",
        case("block"),
    ),
    Mutation(
        "weights one column on",
        "forward.cu",
        "load<Vector>(weights[p], weight, first_column(p), end_of_row(p))",
        "load<Vector>(weights[p], weight + Vector, first_column(p), end_of_row(p))",
        OUT_OF_BOUNDS,
        WARPS,
    ),
    Mutation(
        "the weight of another column",
        "gradient.cuh",
        "g *= weight_at<ZeroCentered, T>(weights, i);",
        "g *= weight_at<ZeroCentered, T>(weights, i ^ 1);",
        VALUE,
        WARPS_ODD,
    ),
    Mutation(
        "each thread takes the row of its rank",
        "backward.cu",
        "long long row = group * kTeams + team.team;",
        "long long row = group * kTeams + team.rank;",
        f"{RACE}|{OUT_OF_BOUNDS}",
        TEAMS_BACKWARD,
    ),
    Mutation(
        "a row ends as far from each thread's first column as from its own",
        "backward.cu",
        ": n_cols - counted_from;",
        ": n_cols;",
        f"{OUT_OF_BOUNDS}|{RACE}",
        case("sub_warp", x="float32"),
    ),
    Mutation(
        "dx from each row's first column",
        "backward.cu",
        "dx + row * dx_stride + counted_from;",
        "dx + row * dx_stride;",
        f"{RACE}|{VALUE}|{UNWRITTEN}",
        TEAMS_BACKWARD,
    ),
    Mutation(
        "a copy of the wrong row of x",
        "backward.cu",
        "fetched_x += rows_a_turn * x_stride;",
        "fetched_x += kTeams * x_stride;",
        VALUE,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "prefetch of the wrong row, streaming",
        "backward_streaming.cu",
        "prefetch(row + n_partials);",
        "prefetch(row + 1);",
        VALUE,
        case("stream"),
    ),
    Mutation(
        "rstd of the block's first row",
        "backward.cu",
        "beside.rstd = rstd[of_row];",
        "beside.rstd = rstd[of_row - team.team];",
        VALUE,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "chunks and tiles exchanged",
        "backward_streaming.cu",
        "chunk = block_index() / tiles;",
        "chunk = block_index() % tiles;",
        OUT_OF_BOUNDS,
        STREAM,
    ),
    Mutation(
        "a coefficient of another kind",
        "backward_streaming.cu",
        "Centered ? coefficients[n_rows + row]",
        "Centered ? coefficients[row]",
        VALUE,
        STREAM,
    ),
    Mutation(
        "a coefficient of no row",
        "backward_streaming.cu",
        "coefficients[n_rows + row] = ",
        "coefficients[n_rows - row] = ",
        f"{RACE}|{UNWRITTEN}",
        STREAM,
    ),
    # ---- barriers ----
    Mutation(
        "no barrier in a reduction",
        "team.cuh",
        "      } else if constexpr (kTeams == 1) {\n        block_barrier();\n",
        "      } else if constexpr (kTeams == 1) {\n",
        f"{RACE}|{UNWRITTEN}",
        STAGED_BACKWARD,
    ),
    Mutation(
        "no barrier before the block's partials are summed",
        "backward.cu",
        "      block_barrier();\n      T* const so_far",
        "      T* const so_far",
        f"{RACE}|{UNWRITTEN}",
        TEAMS_BACKWARD,
    ),
    Mutation(
        "no barrier after the block's partials are summed",
        "backward.cu",
        "      }\n      block_barrier();\n    }",
        "      }\n    }",
        RACE,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "no barrier between the groups and their sum",
        "reduce_partials.cu",
        "  block_barrier();\n",
        "",
        f"{RACE}|{UNWRITTEN}",
        WARPS,
    ),
    Mutation(
        "a barrier in a branch",
        "reduce_partials.cu",
        "  block_barrier();\n",
        "  if (group == 0) block_barrier();\n",
        STUCK,
        WARPS,
    ),
    Mutation(
        "a block tells its sum before its warps have theirs",
        "team.cuh",
        "            named_barrier(1, BlockThreads);\n",
        "",
        f"{RACE}|{UNWRITTEN}|{STUCK}",
        CLUSTER_FORWARD,
    ),
    Mutation(
        "warps that do not tell their block's sum",
        "team.cuh",
        "            arrive_at_barrier(1, BlockThreads);\n",
        "",
        STUCK,
        CLUSTER_FORWARD,
    ),
    Mutation(
        "every warp of a block tells its sum",
        "team.cuh",
        "if (tells && lane < ClusterBlocks) {",
        "if (lane < ClusterBlocks) {",
        f"{RACE}|mailbox",
        CLUSTER_FORWARD,
    ),
    Mutation(
        "all blocks of a cluster tell theirs in one place",
        "team.cuh",
        "kByBlocks ? block : block * kWarps + warp",
        "kByBlocks ? 0 : block * kWarps + warp",
        f"{RACE}|{UNWRITTEN}|{VALUE}",
        CLUSTER_FORWARD,
    ),
    Mutation(
        "the sums of warps where those of blocks are",
        "team.cuh",
        "return slots_behind<Count, T>(2 * kSlots);",
        "return slots_behind<Count, T>(0);",
        f"{RACE}|{VALUE}",
        CLUSTER_FORWARD,
    ),
    Mutation(
        "all teams at one named barrier",
        "team.cuh",
        "named_barrier(team + 1, RowThreads)",
        "named_barrier(1, RowThreads)",
        f"{RACE}|{UNWRITTEN}",
        WARPS_ODD,
    ),
    Mutation(
        "a named barrier of the whole block",
        "team.cuh",
        "named_barrier(team + 1, RowThreads)",
        "named_barrier(team + 1, BlockThreads)",
        STUCK,
        WARPS_ODD,
    ),
    Mutation(
        "the scratch's halves do not take turns",
        "team.cuh",
        "(reductions % 2 * kTeams + team) *",
        "team *",
        RACE,
        STAGED_BACKWARD,
    ),
    # ---- rows in bulk ----
    Mutation(
        "a row is asked for before the last one there is done with",
        "backward.cu",
        "constexpr int kLate = kAhead ? 2 : 1;",
        "constexpr int kLate = 1;",
        RACE,
        BULK_CLUSTER,
    ),
    Mutation(
        "a row is asked for in the place of the present one",
        "backward.cu",
        "stage - kLate : stage - kLate + Stages",
        "stage - kLate + 1 : stage - kLate + 1",
        RACE,
        BULK,
    ),
    Mutation(
        "a mailbox's second time not told from its first, of rows",
        "backward.cu",
        "? parity ^ 1 : parity",
        "? parity : parity",
        f"{RACE}|{STUCK}",
        BULK,
    ),
    Mutation(
        "no wait for a row",
        "backward.cu",
        "        wait_for_bytes<false>(mailbox + stage, parity);\n",
        "",
        RACE,
        BULK,
    ),
    Mutation(
        "no wait for a cluster's next row",
        "backward.cu",
        "if constexpr (Bulk) wait_for_bytes<false>(mailbox + next_stage, next_parity);",
        "",
        RACE,
        BULK_CLUSTER,
    ),
    Mutation(
        "a team past the last row sums the row before",
        "backward.cu",
        "        for (int p = 0; p < PacksPerThread; ++p) {\n          StageOfX::write(Pack",
        "        for (int p = 0; p < 0; ++p) {\n          StageOfX::write(Pack",
        VALUE,
        BULK_TEAMS,
    ),
    Mutation(
        "teams share their mailboxes",
        "backward.cu",
        "(kTeams > 1 ? team.team * Stages : 0)",
        "0",
        "mailbox",
        BULK_TEAMS,
    ),
    Mutation(
        "all teams' rows where the first one's are",
        "backward.cu",
        "const int thread = thread_index() - kAsker,",
        "const int thread = 0 * kAsker,",
        f"{RACE}|{UNWRITTEN}",
        BULK_TEAMS,
    ),
    Mutation(
        "the rows of a cluster's blocks begin at the row's start",
        "backward.cu",
        "column = first_column(0) - kAsker * kLength;",
        "column = 0;",
        VALUE,
        BULK_CLUSTER,
    ),
    Mutation(
        "rows past the last are asked for",
        "backward.cu",
        "if (of_row >= n_rows) return;",
        "",
        OUT_OF_BOUNDS,
        BULK,
    ),
    Mutation(
        "the weight's place is kept though it is held",
        "forward_staged.cu",
        "stage_of_weight + (HoldWeight ? 0 : StageOfWeight::kBytes)",
        "stage_of_weight + StageOfWeight::kBytes",
        OUT_OF_BOUNDS,
        staged("forward_staged.cu", stage_bias=True),
    ),
    Mutation(
        "the bias over the weight",
        "forward_staged.cu",
        "stage_of_weight + (HoldWeight ? 0 : StageOfWeight::kBytes)",
        "stage_of_weight",
        f"{RACE}|{VALUE}",
        STAGED_FORWARD,
    ),
    Mutation(
        "the stage of partials over the scratch",
        "backward.cu",
        "stage_of_weight + (HoldWeight ? 0 : StageOfWeight::kBytes)",
        "stages",
        RACE,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "the stage of partials one column too long",
        "backward.cu",
        "of_teams + team.team * kColumns,",
        "of_teams + team.team * kColumns + kLength,",
        OUT_OF_BOUNDS,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "teams share their slots",
        "team.cuh",
        "(reductions % 2 * kTeams + team) *",
        "(reductions % 2 * kTeams) *",
        RACE,
        TEAMS_BACKWARD,
    ),
    Mutation(
        "the values of warps overlap",
        "team.cuh",
        "if (lane == 0) all[warp] = slot_of(values);",
        "if (lane == 0) all[warp / 2] = slot_of(values);",
        f"{RACE}|{UNWRITTEN}",
        STAGED_BACKWARD,
    ),
    # ---- shuffles ----
    Mutation(
        "a butterfly without its widest step",
        "team.cuh",
        "int distance = Lanes / 2;",
        "int distance = Lanes / 4;",
        VALUE,
        SUB_WARP,
    ),
    Mutation(
        "a butterfly over the whole warp",
        "team.cuh",
        "(RowThreads < 32 ? RowThreads : 32)>(values)",
        "32>(values)",
        VALUE,
        SUB_WARP,
    ),
    Mutation(
        "lanes without a warp count",
        "team.cuh",
        "if (Slots == kLanes || rank % kLanes < Slots) slot = slots[rank % kLanes];",
        "slot = slots[rank % kLanes < Slots ? rank % kLanes : 0];",
        VALUE,
        staged("backward.cu", row_threads=96),
    ),
    Mutation(
        "teams past the last row leave",
        "forward.cu",
        "const bool active = team.kTeams == 1 || row < n_rows;",
        "const bool active = team.kTeams == 1 || row < n_rows;\n  if (!active) return;",
        STUCK,
        SUB_WARP,
    ),
    Mutation(
        "a team decides for its warp",
        "team.cuh",
        "RowThreads < 32 ? any_in_warp(condition) : condition",
        "condition",
        STUCK,
        case("sub_warp_mixed"),
    ),
    # ---- the clamped ReLU ----
    Mutation(
        "a value on the lower bound is inside",
        "relu.cuh",
        "set_if_strictly_between(bits, 1u << i, y, lower, upper);",
        "if (lower <= y && y < upper) bits |= 1u << i;",
        BITS_OF,
        BOUNDS,
    ),
    Mutation(
        "a value on the upper bound is inside",
        "relu.cuh",
        "set_if_strictly_between(bits, 1u << i, y, lower, upper);",
        "if (lower < y && y <= upper) bits |= 1u << i;",
        BITS_OF,
        BOUNDS,
    ),
    Mutation(
        "y is not clamped from above",
        "relu.cuh",
        "between(y, lower, upper)",
        "between(y, lower, larger(y, lower))",
        VALUE,
        RELU,
    ),
    Mutation(
        "y is not clamped from below",
        "relu.cuh",
        "between(y, lower, upper)",
        "between(y, y < upper ? y : upper, upper)",
        VALUE,
        RELU,
    ),
    Mutation(
        "NaN is clamped",
        "relu.cuh",
        "between(y, lower, upper)",
        "y > lower ? (y < upper ? y : upper) : lower",
        VALUE,
        case("relu_nonfinite"),
    ),
    Mutation(
        "NaN is inside",
        "relu.cuh",
        "set_if_strictly_between(bits, 1u << i, y, lower, upper);",
        "if (!(y <= lower || y >= upper)) bits |= 1u << i;",
        BITS,
        case("relu_nonfinite"),
    ),
    Mutation(
        "the bits of rounded y",
        "forward.cu",
        "if constexpr (Relu) clamp<",
        "values[i] = convert<T>(convert<Y>(values[i]));\n        if constexpr (Relu) clamp<",
        BITS,
        case("relu_warps_odd", x="bfloat16"),
    ),
    Mutation(
        "the bits of rounded y, streaming",
        "forward_streaming.cu",
        "if constexpr (Relu) clamp<",
        "values[i] = convert<T>(convert<Y>(values[i]));\n        if constexpr (Relu) clamp<",
        BITS,
        case("relu_stream"),
    ),
    Mutation(
        "the bits of rounded y, staged",
        "forward_staged.cu",
        "if constexpr (Relu) clamp<",
        "values[i] = convert<T>(convert<Y>(values[i]));\n        if constexpr (Relu) clamp<",
        BITS,
        staged("forward_staged.cu", n=333, bitmask=True),
    ),
    Mutation(
        "spare bits are set, staged",
        "relu.cuh",
        "bits &= left > 0 ? (1u << left) - 1 : 0u;",
        "",
        BITS,
        staged("forward_staged.cu", n=268, bitmask=True),
    ),
    Mutation(
        "spare bits of packs of 4 are set",
        "relu.cuh",
        "if constexpr (Vector < 8) {",
        "if constexpr (Vector < 4) {",
        BITS,
        staged("forward_staged.cu", n=268, bitmask=True),
    ),
    Mutation(
        "spare bits are set",
        "relu.cuh",
        "bits &= left > 0 ? (1u << left) - 1 : 0u;",
        "",
        BITS,
        case("relu_warps_odd", x="bfloat16"),
    ),
    Mutation(
        "spare bits are set, streaming",
        "relu.cuh",
        "bits &= left > 0 ? (1u << left) - 1 : 0u;",
        "",
        BITS,
        RELU_STREAM,
    ),
    Mutation(
        "bits of another pack of the byte",
        "relu.cuh",
        "bits << (first % 8)",
        "bits",
        BITS,
        RELU,
    ),
    Mutation(
        "neighbours' bits left out",
        "relu.cuh",
        "lanes < 8 / Length",
        "lanes < 4 / Length",
        BITS,
        RELU,
    ),
    Mutation(
        "every neighbour stores the byte",
        "relu.cuh",
        "first % 8 == 0 && first < n",
        "first < n",
        RACE,
        RELU,
    ),
    Mutation(
        "a byte stored past the row",
        "relu.cuh",
        "first % 8 == 0 && first < n",
        "first % 8 == 0",
        f"{OUT_OF_BOUNDS}|{RACE}",
        RELU,
    ),
    Mutation(
        "a byte read past the row",
        "relu.cuh",
        "first < n ? row[first / 8] : 0u",
        "row[first / 8]",
        OUT_OF_BOUNDS,
        RELU,
    ),
    Mutation(
        "rows of bits overlap",
        "relu.cuh",
        "(n_cols + 7) / 8;",
        "n_cols / 8;",
        f"{RACE}|{UNWRITTEN}",
        case("relu_warps_odd", x="float32"),
    ),
    Mutation(
        "lanes of a streamed row leave",
        "forward_streaming.cu",
        "        store_bits<Vector, kLength>(",
        "        if (first < columns) store_bits<Vector, kLength>(",
        STUCK,
        RELU_STREAM,
    ),
    Mutation(
        "dy is not masked",
        "backward.cu",
        "if constexpr (Bitmask) keep(pack, of_row.bits[p], first_column(p));",
        "",
        VALUE,
        RELU,
    ),
    Mutation(
        "dy is masked by the next row's bits",
        "backward.cu",
        "read_dy(stage, p, current)",
        "read_dy(stage, p, next)",
        VALUE,
        case("relu_warps", x="float32"),
    ),
    Mutation(
        "dy is masked by the first bits of its byte",
        "relu.cuh",
        "byte >> (first % 8)",
        "byte",
        VALUE,
        RELU,
    ),
    Mutation(
        "the third element is masked by another's bit",
        "relu.cuh",
        "1u << 14 | 1u << 21",
        "1u << 14 | 1u << 20",
        VALUE,
        RELU,
    ),
    Mutation(
        "the second half of a pack is masked by the first one's bits",
        "relu.cuh",
        "(bits >> 4) * kToTops",
        "(bits & 15u) * kToTops",
        VALUE,
        case("relu_warps_odd", x="bfloat16"),
    ),
    Mutation(
        "dbias of dy as it came",
        "backward.cu",
        "dbias[p][i] += upstream;",
        "dbias[p][i] += StageOfDY::read(place + StageOfX::kBytes, p).template get<T>(i);",
        r"dbias.* times the bound",
        RELU,
    ),
    Mutation(
        "row coefficients of dy as it came",
        "backward_streaming.cu",
        "keep(pack_dy, load_bits(bitmask + row * bitmask_bytes(n_cols), first, n_cols), first);",
        "",
        VALUE,
        RELU_STREAM,
    ),
    Mutation(
        "columns of dy as it came",
        "backward_streaming.cu",
        "if constexpr (Bitmask) keep(row_dy, next_bits, first);",
        "",
        VALUE,
        RELU_STREAM,
    ),
    Mutation(
        "one of two 16-bit elements is kept",
        "relu.cuh",
        "last_element % 4);",
        "first_element % 4);",
        VALUE,
        case("relu_sub_warp", x="bfloat16"),
    ),
    # ---- weight gradients and statistics ----
    Mutation(
        "the last rows' gradients are not written",
        "backward.cu",
        "  }\n  flush_all(true);\n}",
        "  }\n}",
        UNWRITTEN,
        WARPS,
    ),
    Mutation(
        "a flush forgets the ones before", "backward.cu", "    flushed = true;\n", "", VALUE, TURNS
    ),
    Mutation(
        "a flush forgets the ones before, streaming",
        "backward_streaming.cu",
        "    flushed = true;\n",
        "",
        VALUE,
        STREAM_TURNS,
    ),
    Mutation(
        "the first flush adds to nothing",
        "backward.cu",
        "bool flushed = false;",
        "bool flushed = true;",
        UNWRITTEN,
        WARPS,
    ),
    Mutation(
        "gradients are kept after a flush",
        "backward.cu",
        "        gradient[p][i] = 0;\n",
        "",
        VALUE,
        staged("backward.cu", m=150),
    ),
    Mutation(
        "dbias in the place of dweight",
        "backward.cu",
        "flush(dbias, kDWeight ? 1 : 0, complete)",
        "flush(dbias, 0, complete)",
        UNWRITTEN,
        WARPS,
    ),
    Mutation(
        "sums of rows over the gradients of teams",
        "backward.cu",
        "stage_of_teams + (kTeams > 1 ? kTeams * StageOfSums::kBytes : 0)",
        "stage_of_teams",
        f"{RACE}|{VALUE}",
        SHARED_SUMS_OF_TEAMS,
    ),
    Mutation(
        "sums of rows behind a weight that is held",
        "backward.cu",
        "stage_of_weight + (HoldWeight ? 0 : StageOfWeight::kBytes)",
        "stage_of_weight + StageOfWeight::kBytes",
        OUT_OF_BOUNDS,
        staged("backward.cu", shared_sums=2, teams=1, hold_weight=True),
    ),
    Mutation(
        "both gradients' sums of rows in one place",
        "backward.cu",
        "stage_of_sums + index * StageOfSums::kBytes",
        "stage_of_sums",
        VALUE,
        SHARED_SUMS,
    ),
    Mutation(
        "sums of rows begin with what shared memory held",
        "backward.cu",
        "if (flushed) sums = StageOfSums::read(place, p);",
        "sums = StageOfSums::read(place, p);",
        UNWRITTEN,
        SHARED_SUMS,
    ),
    Mutation(
        "complete sums stay in shared memory",
        "backward.cu",
        "if (complete || !(shared || HoldSums)) {",
        "if (!(shared || HoldSums)) {",
        UNWRITTEN,
        SHARED_SUMS,
    ),
    Mutation(
        "complete sums of teams stay in shared memory",
        "backward.cu",
        "T* const now = complete ? target : so_far;",
        "T* const now = so_far;",
        UNWRITTEN,
        SHARED_SUMS_OF_TEAMS,
    ),
    Mutation(
        "held sums of rows are not added to",
        "backward.cu",
        "          sums.set(held_sums[p]);\n",
        "",
        VALUE,
        HELD_SUMS,
    ),
    Mutation(
        "the blocks' partials overlap",
        "backward.cu",
        "(index * groups + group) * n_cols",
        "(index + group) * n_cols",
        f"{RACE}|{UNWRITTEN}",
        STAGED_BACKWARD,
    ),
    Mutation(
        "a group of partials dropped",
        "reduce_partials.cu",
        "row < kSums;",
        "row < kSums - 1;",
        VALUE,
        MANY,
    ),
    Mutation(
        "half of a warp's groups of partials",
        "reduce_partials.cu",
        "distance >= kLanes",
        "distance > kLanes",
        VALUE,
        MANY,
    ),
    Mutation(
        "all groups of partials, not a warp's first, in shared memory",
        "reduce_partials.cu",
        "thread_index() % 32 < kLanes",
        "thread_index() % 32 <= kLanes",
        RACE,
        MANY,
    ),
    Mutation(
        "the first partials of each group, as many as are on their way at once, alone",
        "reduce_partials.cu",
        "left -= kAtOnce * Groups",
        "left = 0",
        VALUE,
        MANY,
    ),
    Mutation(
        "the first partial of each group alone",
        "reduce_partials.cu",
        "left > i * Groups ? n : 0",
        "i == 0 ? n : 0",
        VALUE,
        MANY,
    ),
    Mutation(
        "xhat is not centred again",
        "backward.cu",
        ", means.h);",
        ", T(0));",
        VALUE,
        staged("backward.cu", regime="mean_1e6"),
    ),
    Mutation(
        "xhat is not centred again, streaming",
        "backward_streaming.cu",
        "if constexpr (Centered) xhat -= recentre;",
        "",
        VALUE,
        case("stream_mean"),
    ),
    # ---- strips ----
    Mutation(
        "one strip is not waited for",
        "backward_strips.cu",
        "static_cast<unsigned>(group / kPlaces + 1) * strips);",
        "static_cast<unsigned>(group / kPlaces + 1) * strips - 1);",
        f"{UNWRITTEN}|{RACE}",
        STRIPS,
    ),
    Mutation(
        "nobody says that a strip is there",
        "backward_strips.cu",
        "      report_arrival(arrived + place * kCountStride);\n",
        "",
        STUCK,
        STRIPS,
    ),
    Mutation(
        "a strip is there before its sums are",
        "backward_strips.cu",
        "      named_barrier(summed(group), kMeeting);\n",
        "      report_arrival(arrived + place * kCountStride);\n"
        "      named_barrier(summed(group), kMeeting);\n",
        f"{UNWRITTEN}|{RACE}",
        STRIPS,
    ),
    Mutation(
        "a block that is ahead counts for one that is not",
        "backward_strips.cu",
        """      report_arrival(arrived + place * kCountStride);
      wait_for_arrivals(arrived + place * kCountStride,
                        static_cast<unsigned>(group / kPlaces + 1) * strips);
""",
        """      report_arrival(arrived);
      wait_for_arrivals(arrived, static_cast<unsigned>(group + 1) * strips);
""",
        f"{UNWRITTEN}|{RACE}",
        STRIPS,
    ),
    Mutation(
        "a barrier serves two messengers",
        "backward_strips.cu",
        "return 1 + kMessengers + group % kMessengers;",
        "return 1 + kMessengers + group % kAhead;",
        f"{RACE}|{UNWRITTEN}|twice",
        STRIPS,
    ),
    Mutation(
        "a group takes the place of one that other blocks still read",
        "backward_strips.cu",
        "T* const exchanged = exchange + place * GroupRows",
        "T* const exchanged = exchange + group % (kPlaces - 1) * GroupRows",
        RACE,
        STRIPS,
    ),
    Mutation(
        "statistics take the place of a group whose dx is written",
        "backward_strips.cu",
        "return of_rows + group % kPlaces * GroupRows;",
        "return of_rows + group % (kPlaces - 1) * GroupRows;",
        RACE,
        STRIPS,
    ),
    Mutation(
        "sums of warps are told before they are there",
        "backward_strips.cu",
        "      named_barrier(summed(group), kMeeting);\n",
        "",
        f"{UNWRITTEN}|{RACE}",
        STRIPS,
    ),
    Mutation(
        "means are used before they are there",
        "backward_strips.cu",
        "    named_barrier(known(group), kMeeting);\n",
        "",
        f"{UNWRITTEN}|{RACE}",
        STRIPS,
    ),
    Mutation(
        "sums of a row past the last",
        "backward_strips.cu",
        "const int row = begin + k < rows ? begin + k : rows - 1;",
        "const int row = begin + k;",
        UNWRITTEN,
        staged("backward_strips.cu", m=11),
    ),
    Mutation(
        "a group is not waited for",
        "backward_strips.cu",
        "      wait_for_copies<kStages - 1 - kAhead>();\n",
        "",
        RACE,
        STRIPS,
    ),
    Mutation(
        "the first group is not waited for",
        "backward_strips.cu",
        "    wait_for_copies<kStages - 1>();\n",
        "",
        RACE,
        STRIPS,
    ),
    Mutation(
        "rows past the last are copied",
        "backward_strips.cu",
        "const int n = row < n_rows ? n_own : 0;",
        "const int n = n_own;",
        OUT_OF_BOUNDS,
        STRIPS,
    ),
    Mutation(
        "rows past the last are written",
        "backward_strips.cu",
        "for (int r = 0; r < rows_of(group); ++r) {",
        "for (int r = 0; r < GroupRows; ++r) {",
        f"{OUT_OF_BOUNDS}|{RACE}",  # as what lies behind dx
        STRIPS,
    ),
    Mutation(
        "strips of dy as it came",
        "backward_strips.cu",
        "      keep(pack, load_bits(bytes, first, row < n_rows ? n_cols : 0), first);\n",
        "",
        VALUE,
        STRIPS_BITMASK,
    ),
    Mutation(
        "the last group's weight gradients are lost",
        "backward_strips.cu",
        " || group + 1 == groups) {",
        ") {",
        VALUE,
        STRIPS,
    ),
    Mutation(
        "weight gradients count twice",
        "backward_strips.cu",
        "        of_weight[i] = of_bias[i] = 0;\n",
        "",
        VALUE,
        staged("backward_strips.cu", m=150),
    ),
    Mutation(
        "xhat is not centred again, strips",
        "backward_strips.cu",
        ", of_row.means.h);",
        ", T(0));",
        VALUE,
        staged("backward_strips.cu", regime="mean_1e6"),
    ),
    Mutation(
        "the mean's rounding stays in y",
        "forward_staged.cu",
        "const T offset = -statistics.correction * scale.of_row;",
        "const T offset = 0;",
        VALUE,
        staged("forward_staged.cu", regime="mean_1e6", cluster_blocks=2),
    ),
    Mutation(
        "the mean's rounding stays in y, streaming",
        "forward_streaming.cu",
        "const T offset = -statistics.correction * scale.of_row;",
        "const T offset = 0;",
        VALUE,
        case("stream_mean"),
    ),
    Mutation(
        "every thread of a team writes rstd",
        "forward.cu",
        "if (active && team.rank == 0 && team.block == 0)",
        "if (active)",
        RACE,
        WARPS,
    ),
    Mutation(
        "a row out of range stays there",
        "forward.cu",
        "if (team.any(wild)) {",
        "if (false) {",
        VALUE,
        case("range_extreme", "rms_norm", "float32"),
    ),
    Mutation(
        "a short row out of range stays there",
        "forward.cu",
        "if (team.any(wild)) {",
        "if (false) {",
        VALUE,
        case("range_extreme", x="float64"),
    ),
    Mutation(
        "rows beside one out of range are scaled as it is",
        "forward.cu",
        "if (wild) scale = scale_in_unit(statistics.variance, eps, unit);",
        "scale = scale_in_unit(statistics.variance, eps, unit);",
        BITS_OF,
        BESIDE,
    ),
    *(
        Mutation(
            f"few rows are all written as most are, {where.case.norm}, {where.case.n}",
            "forward.cu",
            "    if (usual) {\n",
            "    {\n",
            VALUE,
            where,
        )
        for where in (
            few("few_extreme", "rms_norm"),
            few("few_extreme"),
            few("few_warp_extreme"),
        )
    ),
    Mutation(
        "few rows that are far off are not measured again",
        "forward.cu",
        "      recentre(far);\n      far = false;",
        "      far = false;",
        VALUE,
        few("few_mean"),
    ),
    Mutation(
        "few rows leave no statistics",
        "forward.cu",
        "      store_statistics();\n      normalize(statistics.shift);\n      return;",
        "      normalize(statistics.shift);\n      return;",
        UNWRITTEN,
        few("few_warp"),
    ),
    Mutation(
        "the next pack's weight is not asked for",
        "forward.cu",
        "if (p + 1 < PacksPerThread) load_affine(p + 1);",
        "",
        VALUE,
        case("block", x="bfloat16"),
    ),
    Mutation(
        "rows beside one with a mean are measured again with it",
        "forward.cu",
        "if (far) statistics = again;",
        "statistics = again;",
        BITS_OF,
        BESIDE,
    ),
    Mutation(
        "the mean of an outlier's row is left where the first round found it",
        "statistics.cuh",
        "constexpr T kMost = T(4) / Columns;",
        "constexpr T kMost = 2;",
        VALUE,
        case("outlier"),
    ),
    Mutation(
        "rows beside one with a mean are settled with it",
        "forward.cu",
        "if (far) settle(statistics);",
        "settle(statistics);",
        BITS_OF,
        BESIDE,
    ),
    Mutation(
        "a mean is left where the first round found it",
        "forward.cu",
        "if (team.any(far)) {",
        "if (false) {",
        VALUE,
        case("range_mean_1e6", x="float64"),
    ),
    Mutation(
        "a row that was brought into range is not measured again",
        "forward.cu",
        "        measure_from(T(0));\n",
        "",
        VALUE,
        case("range_extreme", "rms_norm", "float32"),
    ),
    Mutation(
        "a first mean far off is kept in a row that was brought into range",
        "forward.cu",
        "bool recentred = false;",
        "bool recentred = unit != T(1);",
        VALUE,
        case("warps_off_guess_wild"),
    ),
    Mutation(
        "a first mean far off is kept",
        "forward.cu",
        "if (Centered ? recentred || !was_far(statistics) : only_round) break;",
        "break;",
        VALUE,
        case("warps_off_guess"),
    ),
    Mutation(
        "the largest power of two has no reciprocal",
        "statistics.cuh",
        "float_from_bits(exponent < least ? least : exponent < most ? exponent : most)",
        "float_from_bits(exponent < least ? least : exponent)",
        VALUE,
        case("range_limit", "rms_norm", "float32"),
    ),
    Mutation(
        "a row of zeros in units of zero",
        "statistics.cuh",
        "float_from_bits(exponent < least ? least : exponent < most ? exponent : most)",
        "float_from_bits(exponent < most ? exponent : most)",
        VALUE,
        case("range_zero_eps", "rms_norm", "float32"),
    ),
    Mutation(
        "a first mean far off is kept, streaming",
        "forward_streaming.cu",
        "again || !was_far(statistics)",
        "true",
        VALUE,
        case("stream_odd_start"),
    ),
    Mutation(
        "the second round from the first mean, streaming",
        "forward_streaming.cu",
        "    statistics.shift += statistics.correction;\n",
        "",
        VALUE,
        case("stream_odd_start"),
    ),
    Mutation(
        "columns past a streamed row count",
        "forward_streaming.cu",
        "inside<Vector>(x.first_column(p), i, columns) ? statistics.shift : T(0)",
        "statistics.shift",
        VALUE,
        case("stream_mean"),
    ),
    Mutation(
        "the second walk misses the row's start",
        "stream.cuh",
        "base = end - Columns; base >= 0;",
        "base = end - Columns; base > 0;",
        UNWRITTEN,
        STREAM_LONG,
    ),
    Mutation(
        "the second walk misses the row's end",
        "stream.cuh",
        "    if (rest > 0) visit(end, rest);\n#pragma unroll 1\n    for (long long base = end",
        "#pragma unroll 1\n    for (long long base = end",
        UNWRITTEN,
        STREAM_LONG,
    ),
    Mutation(
        "a tile's columns from the row's first",
        "forward_streaming.cu",
        "load<Vector>(weights, weight + base, first, columns)",
        "load<Vector>(weights, weight, first, columns)",
        VALUE,
        STREAM_LONG,
    ),
    Mutation(
        "a tile's bits from the row's first",
        "forward_streaming.cu",
        "bitmask_bytes(n_cols) + base / 8",
        "bitmask_bytes(n_cols)",
        f"{BITS}|{RACE}|{UNWRITTEN}",
        case("relu_stream_long"),
    ),
    Mutation(
        "a unit left out of a streamed row",
        "forward_streaming.cu",
        "const T in_unit = of_x.packs[p].template get<T>(i) * inv_unit;",
        "const T in_unit = of_x.packs[p].template get<T>(i);",
        VALUE,
        case("stream_wild"),
    ),
    Mutation(
        "eps left out of a row out of range",
        "statistics.cuh",
        "const T ratio = longer > T(0) ? shorter / longer : T(0);",
        "const T ratio = 0;",
        VALUE,
        case("range_near_eps", x="float32"),
    ),
    Mutation(
        "the first element of a pack is not looked at",
        "forward.cu",
        "for (int i = 0; i < kLength; ++i) {\n        largest[0]",
        "for (int i = 1; i < kLength; ++i) {\n        largest[0]",
        VALUE,
        case("range_lone", "rms_norm", "float32"),
    ),
    Mutation(
        "a tile too many",
        "backward_streaming.cu",
        "const long long tiles = (n_cols + kTile - 1) / kTile;",
        "const long long tiles = n_cols / kTile + 1;",
        f"{UNWRITTEN}|{VALUE}",
        case("stream_tiles"),
    ),
    Mutation(
        "an element past the pack is looked at",
        "forward_streaming.cu",
        "        for (int i = 0; i < kLength; ++i) {\n          largest[0]",
        "        for (int i = 0; i <= kLength; ++i) {\n          largest[0]",
        "outside a local array",
        case("stream_wild"),
    ),
    Mutation(
        "a warp's rows out of range stay there",
        "team.cuh",
        "RowThreads < 32 ? any_in_warp(condition) : condition",
        "RowThreads < 32 ? false : condition",
        VALUE,
        case("sub_warp_wild", "rms_norm"),
    ),
    Mutation(
        "the sign stays in the largest element",
        "forward.cu",
        "larger(absolute(packs[p].template get<T>(i)), largest[0])",
        "larger(packs[p].template get<T>(i), largest[0])",
        VALUE,
        case("range_lone", "rms_norm", "float32"),
    ),
    Mutation(
        "a NaN row has an infinite rstd",
        "statistics.cuh",
        "if (variance != variance) return {variance, variance};",
        "",
        VALUE,
        case("range_nonfinite_eps_0", "rms_norm", "float32"),
    ),
    Mutation(
        "eps vanishes in the unit of a constant row",
        "statistics.cuh",
        "if (variance == T(0) && eps > T(0)) return {T(0), reciprocal_square_root(eps)};",
        "",
        VALUE,
        case("range_equal_huge"),
    ),
    Mutation(
        "the product of mean and rstd is rounded",
        "gradient.cuh",
        "product = -mean * below;",
        "product = -mean * rstd * (below / rstd);",
        VALUE,
        case("range_equal"),
    ),
    Mutation(
        "the mean of h is that of d",
        "gradient.cuh",
        "      h = sums[2] * significand * inv_n;",
        "      h = sums[2] * inv_n;",
        VALUE,
        staged("backward.cu", regime="mean_1e6"),
    ),
    Mutation(
        "the mean of g * xhat is that of g * d",
        "gradient.cuh",
        "mean_of_g_xhat(sums[0] * significand, ",
        "mean_of_g_xhat(sums[0], ",
        VALUE,
        staged("backward.cu"),
    ),
    Mutation(
        "of few rows, xhat is not centred again",
        "backward_resident.cu",
        ", means.h);",
        ", T(0));",
        VALUE,
        FEW_MEAN,
    ),
    Mutation(
        "of few rows, each has the weight gradients of the first",
        "backward_resident.cu",
        "dweight + row * n_cols",
        "dweight",
        f"{RACE}|{UNWRITTEN}",
        COLUMNS_IN_PLACE,
    ),
    Mutation(
        "of few rows, dbias is that of xhat",
        "backward_resident.cu",
        "write<Vector>(of_bias,",
        "write<Vector>(of_weight,",
        VALUE,
        LONE_ROW,
    ),
    Mutation(
        "of few rows, each has the rstd of the first",
        "backward_resident.cu",
        "row_rstd = rstd[row]",
        "row_rstd = rstd[0]",
        VALUE,
        FEW_ROWS,
    ),
    Mutation(
        "of few rows, the bitmask lets all dy through",
        "backward_resident.cu",
        "      keep(row_dy[p],",
        "      if (false) keep(row_dy[p],",
        VALUE,
        FEW_RELU,
    ),
    Mutation(
        "of few rows, dx is stored with dy's stride",
        "backward_resident.cu",
        "dx + row * dx_stride",
        "dx + row * dy_stride",
        f"{OUT_OF_BOUNDS}|{UNWRITTEN}",
        FEW_GAP,
    ),
    Mutation(
        "of columns, xhat is not centred again",
        "backward_resident.cu",
        ", mean_of_h);",
        ", T(0));",
        VALUE,
        COLUMNS_MEAN,
    ),
    Mutation(
        "of columns, each row is centred as the first",
        "backward_resident.cu",
        "? means_of_h[row] :",
        "? means_of_h[0] :",
        VALUE,
        COLUMNS_MEAN,
    ),
    Mutation(
        "of columns, each row has the mean of the first",
        "backward_resident.cu",
        "row < n_rows ? mean[row] :",
        "row < n_rows ? mean[0] :",
        VALUE,
        COLUMNS_MEAN,
    ),
    Mutation(
        "rows keep to themselves how they are centred",
        "backward_resident.cu",
        "means_of_h[row] = means.h;",
        "static_cast<void>(0);",
        UNWRITTEN,
        COLUMNS_MEAN,
    ),
    Mutation(
        "all blocks of a cluster say how a row is centred",
        "backward_resident.cu",
        "if (team.block == 0 && team.rank == 0) means_of_h",
        "if (team.rank == 0) means_of_h",
        RACE,
        few("columns_cluster"),
    ),
    Mutation(
        "of columns, each warp sums all rows",
        "backward_resident.cu",
        "for (int begin = warp;",
        "for (int begin = 0;",
        VALUE,
        COLUMNS,
    ),
    Mutation(
        "of columns, rows are summed that others are under way with",
        "backward_resident.cu",
        "begin += kAtOnce * kWarps",
        "begin += kWarps",
        VALUE,
        COLUMNS,
    ),
    Mutation(
        "of columns, rows past the last are loaded",
        "backward_resident.cu",
        "row < n_rows ? n_cols : 0;",
        "n_cols;",
        OUT_OF_BOUNDS,
        COLUMNS,
    ),
    Mutation(
        "of columns, each row has the rstd of the first",
        "backward_resident.cu",
        "row < n_rows ? rstd[row] : T(0)",
        "rstd[0]",
        VALUE,
        COLUMNS,
    ),
    Mutation(
        "of columns, the bitmask lets all dy through",
        "backward_resident.cu",
        "        keep(row_dy[k],",
        "        if (false) keep(row_dy[k],",
        VALUE,
        COLUMNS,
    ),
    Mutation(
        "of columns, the warps' sums are not waited for",
        "backward_resident.cu",
        "  block_barrier();\n\n  // 2. All warps' sums.",
        "  // 2. All warps' sums.",
        UNWRITTEN,
        COLUMNS_BIAS,
    ),
    Mutation(
        "of columns, dbias is stored past the row's end",
        "backward_resident.cu",
        "    if (column < n_cols) {",
        "    if (true) {",
        OUT_OF_BOUNDS,
        COLUMNS_BIAS,
    ),
    Mutation(
        "of columns, dbias is added to what is of dweight",
        "backward_resident.cu",
        "own_sums[(kGradients - 1) * kColumns + i] = of_bias[i]",
        "own_sums[i] = of_bias[i]",
        UNWRITTEN,
        COLUMNS,
    ),
    Mutation(
        "blocks of columns begin a cluster early",
        "backward_resident.cu",
        "block_index() - n_rows * ClusterBlocks",
        "block_index() - n_rows",
        STUCK,
        few("staged_cluster", "rms_norm"),
    ),
    # ---- stages and clusters ----
    Mutation(
        "gradients of several teams are kept after a flush",
        "backward.cu",
        "        for (int i = 0; i < kLength; ++i) gradient[p][i] = 0;\n",
        "",
        VALUE,
        staged("backward.cu", m=300),
    ),
    Mutation(
        "the rows under way are one more than their stages",
        "backward.cu",
        "        wait_for_copies<Stages - 1>();\n      } else if (kTeams",
        "        wait_for_copies<Stages>();\n      } else if (kTeams",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "the rows under way are one more than their stages, forward",
        "forward_staged.cu",
        "wait_for_copies<Stages - 2>();",
        "wait_for_copies<Stages - 1>();",
        RACE,
        STAGED_FORWARD,
    ),
    Mutation(
        "the rows under way are one more than four stages",
        "forward_staged.cu",
        "wait_for_copies<Stages - 2>();",
        "wait_for_copies<Stages - 1>();",
        RACE,
        staged("forward_staged.cu", regime="mean_1e6", stages=4),
    ),
    Mutation(
        "no wait for the first row",
        "forward_staged.cu",
        "wait_for_copies<1>();\n",
        "",
        RACE,
        STAGED_FORWARD,
    ),
    Mutation(
        "the rows after the second are never asked for",
        "forward_staged.cu",
        "for (int stage = 2; stage < Stages; ++stage)",
        "for (int stage = 2; stage < 2; ++stage)",
        f"{RACE}|{UNWRITTEN}",
        staged("forward_staged.cu", stages=3),
    ),
    Mutation(
        "the weight comes with the third row, not the second",
        "forward_staged.cu",
        AFFINE + "  fetched_all(1);\n",
        "  fetched_all(1);\n" + AFFINE,
        RACE,
        staged("forward_staged.cu", stages=3),
    ),
    Mutation(
        "the rows of a cluster after the second are never asked for, backward",
        "backward.cu",
        "    fetch_rows(kFirst, kFetched);\n  } else if",
        "  } else if",
        f"{RACE}|{UNWRITTEN}",
        staged("backward.cu", stages=3, cluster_blocks=3),
    ),
    Mutation(
        "nor those of teams that copy in bulk",
        "backward.cu",
        "    fetch_rows(kFirst, kFetched);\n  }\n  X*",
        "  }\n  X*",
        f"{STUCK}|mailbox",
        staged("backward.cu", bulk=True, stages=4, teams=1, cluster_blocks=1),
    ),
    Mutation(
        "the wait for the first row counts all stages",
        "backward.cu",
        "wait_for_copies<kFirst - 1>();",
        "wait_for_copies<Stages - 1>();",
        RACE,
        staged("backward.cu", stages=3, cluster_blocks=3),
    ),
    Mutation(
        "a team without a row waits for its first",
        "backward.cu",
        "if (row < n_rows) wait_for_bytes<false>(mailbox, 0);",
        "wait_for_bytes<false>(mailbox, 0);",
        STUCK,
        staged("backward.cu", bulk=True, teams=3, m=5),
    ),
    Mutation(
        "the stage stays",
        "backward.cu",
        "stage = next_stage;",
        "",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "the stage stays, forward",
        "forward_staged.cu",
        "stage = next_stage;",
        "",
        OUT_OF_BOUNDS,
        STAGED_FORWARD,
    ),
    Mutation(
        "an infinity leaves NaN behind it",
        "stream.cuh",
        "if (lost != lost) lost = 0;",
        "",
        VALUE,
        case("stream_infinite_x_12300", "rms_norm"),
    ),
    Mutation(
        "centring makes an infinity of what rounding left",
        "gradient.cuh",
        "absolute(sum_of_g) <= Range<T>::kLargest ? mean_of_h * sum_of_g : T(0)",
        "mean_of_h * sum_of_g",
        VALUE,
        case("infinite_dy_300"),
    ),
    Mutation(
        "the place of copies stays",
        "backward.cu",
        "own = own + (stage + 1 == Stages ? -(Stages - 1) * kStageBytes : kStageBytes);",
        "",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "the place of copies leaves the stages",
        "forward_staged.cu",
        "(stage + 1 == Stages ? -(Stages - 1) * StageOfX::kBytes : StageOfX::kBytes)",
        "StageOfX::kBytes",
        OUT_OF_BOUNDS,
        STAGED_FORWARD,
    ),
    Mutation(
        "dy copied over x",
        "backward.cu",
        "fetch(own + StageOfX::kBytes,",
        "fetch(own,",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "pieces of a pack onto one, whole",
        "stage.cuh",
        "own + (p * kPieces + piece) * BlockThreads * kPieceBytes",
        "own + p * kPieces * BlockThreads * kPieceBytes",
        RACE,
        staged("backward.cu", n=504),
    ),
    Mutation(
        "a pack past the row copied",
        "stage.cuh",
        "piece * kPieceBytes, first < n,",
        "piece * kPieceBytes, true,",
        OUT_OF_BOUNDS,
        STAGED_BACKWARD,
    ),
    Mutation(
        "copies are no group",
        "backward.cu",
        "    commit_copies();\n    fetched += ",
        "    fetched += ",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "copies go on past the last row",
        "backward.cu",
        "const int n = fetched < n_rows ? left_of_row(p) : 0;",
        "const int n = left_of_row(p);",
        OUT_OF_BOUNDS,
        STAGED_BACKWARD,
    ),
    Mutation(
        "a row of dy copied as often as its stage",
        "backward.cu",
        "fetched_dy += rows_a_turn * dy_stride;",
        "",
        VALUE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "rows counted slower than copied",
        "forward_staged.cu",
        "fetched += groups;",
        "fetched += groups - 1;",
        f"{OUT_OF_BOUNDS}|{VALUE}|did not wait",
        STAGED_FORWARD,
    ),
    Mutation(
        "stages that overlap",
        "backward.cu",
        "kStageBytes = StageOfX::kBytes + StageOfDY::kBytes;",
        "kStageBytes = StageOfX::kBytes;",
        RACE,
        STAGED_BACKWARD,
    ),
    Mutation(
        "the stage of the weight over that of rows",
        "forward_staged.cu",
        "stage_of_weight = stages + Stages * StageOfX::kBytes;",
        "stage_of_weight = stages;",
        RACE,
        STAGED_FORWARD,
    ),
    Mutation(
        "a copy past the row",
        "stage.cuh",
        "const bool valid = inside<Vector>(first, element, n);",
        "const bool valid = true;",
        OUT_OF_BOUNDS,
        STAGED_BACKWARD,
    ),
    Mutation(
        "a copy past the row by one access",
        "stage.cuh",
        "const bool valid = inside<Vector>(first, element, n);",
        "const bool valid = inside<Vector>(first, element, n + 1);",
        OUT_OF_BOUNDS,
        STAGED_BACKWARD,
    ),
    Mutation(
        "an access's validity for the whole pack",
        "stage.cuh",
        "const bool valid = inside<Vector>(first, element, n);",
        "const bool valid = first < n;",
        OUT_OF_BOUNDS,
        WIDE_BACKWARD,
    ),
    Mutation(
        "pieces of a pack onto one",
        "stage.cuh",
        "char* target = place(stage, p, begin / kPieceBytes) +",
        "char* target = place(stage, p, 0) +",
        f"{RACE}|{UNWRITTEN}",
        staged("backward.cu", n=504),
    ),
    Mutation(
        "all packs in the first one's place",
        "stage.cuh",
        "stage + ((p * kPieces + piece) * BlockThreads",
        "stage + (piece * BlockThreads",
        RACE,
        staged("backward.cu", n=1000),
    ),
    Mutation(
        "the place of the thread beside",
        "stage.cuh",
        "char* target = place(stage, p, begin / kPieceBytes)",
        "char* target = place(stage, p, begin / kPieceBytes) + kPieceBytes",
        f"{RACE}|{UNWRITTEN}|{OUT_OF_BOUNDS}",
        STAGED_BACKWARD,
    ),
    Mutation(
        "the blocks of a cluster at the same columns",
        "team.cuh",
        "block * PacksPerThread + p;",
        "p;",
        f"{RACE}|{UNWRITTEN}",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "the columns of a cluster overlap",
        "team.cuh",
        "block * PacksPerThread + p;",
        "block + p;",
        f"{RACE}|{UNWRITTEN}",
        staged("backward.cu", n=504, packs_per_thread=2),
    ),
    Mutation(
        "one mailbox for two",
        "team.cuh",
        "        open_mailbox(mailbox(1));\n",
        "",
        "no mailbox is open",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "a block expects what it sends itself",
        "team.cuh",
        "kSlots * kSentBytes<Count, T>);\n        bool",
        "kSentBytes<Count, T>);\n        bool",
        f"{RACE}|{UNWRITTEN}|{STUCK}",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "every block expects for all warps",
        "team.cuh",
        "send<Operation>(values, rank == 0);",
        "send<Operation>(values, rank % 32 == 0);",
        "already expects",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "the last block of a cluster hears nothing",
        "team.cuh",
        "tells && lane < ClusterBlocks",
        "tells && lane < ClusterBlocks - 1",
        STUCK,
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "a mailbox's second time not told from its first",
        "team.cuh",
        "reductions / 2 % 2",
        "0",
        f"{RACE}|{UNWRITTEN}|{STUCK}",
        CLUSTER_FORWARD,
    ),
    Mutation(
        "no wait for the mailbox",
        "team.cuh",
        "        wait_for_bytes<true>(mailbox(reductions % 2), reductions / 2 % 2);\n",
        "",
        f"{RACE}|{UNWRITTEN}",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "slots over the mailboxes",
        "team.cuh",
        "static_cast<char*>(dynamic_shared_memory()) + kMailboxBytes;",
        "static_cast<char*>(dynamic_shared_memory());",
        "mailbox",
        CLUSTER_BACKWARD,
    ),
    Mutation(
        "a block past the first 8 dropped",
        "team.cuh",
        "while (power < n)",
        "while (2 * power < n)",
        VALUE,
        staged("backward.cu", cluster_blocks=9),
    ),
    Mutation(
        "every block of a cluster writes rstd",
        "forward_staged.cu",
        "team.block == 0 && team.rank == 0",
        "team.rank == 0",
        RACE,
        CLUSTER_FORWARD,
    ),
    Mutation(
        "every block of a cluster writes rstd, streaming",
        "forward_streaming.cu",
        "team.block == 0 && team.rank == 0",
        "team.rank == 0",
        RACE,
        CLUSTER_STREAM,
    ),
    Mutation(
        "every block of a cluster writes the coefficients",
        "backward_streaming.cu",
        "team.block == 0 && team.rank == 0",
        "team.rank == 0",
        RACE,
        CLUSTER_COEFFICIENTS,
    ),
    Mutation(
        "a cluster's blocks take rows of their own, streaming",
        "forward_streaming.cu",
        "row_index = block_index() / ClusterBlocks;",
        "row_index = block_index();",
        OUT_OF_BOUNDS,
        CLUSTER_STREAM,
    ),
    Mutation(
        "a cluster's blocks take rows of their own, backward",
        "backward_streaming.cu",
        "row = block_index() / ClusterBlocks;",
        "row = block_index();",
        OUT_OF_BOUNDS,
        CLUSTER_COEFFICIENTS,
    ),
    Mutation(
        "each block of a cluster takes the columns of the first",
        "stream.cuh",
        "(ClusterBlocks > 1 ? block_in_cluster() * BlockThreads : 0) + thread_index()",
        "thread_index()",
        f"{UNWRITTEN}|{RACE}",
        CLUSTER_STREAM,
    ),
    Mutation(
        "a cluster's blocks take rows of their own",
        "forward_staged.cu",
        "const int group = static_cast<int>(block_index() / ClusterBlocks);",
        "const int group = static_cast<int>(block_index());",
        "has ended",
        CLUSTER_FORWARD,
    ),
    # ---- rows by a count ----
    Mutation(
        "a row that was dealt out is handed out again",
        "forward_staged.cu",
        "first_counted = (Stages + kTurns) * groups;",
        "first_counted = (Stages + kTurns) * groups - 1;",
        RACE,
        COUNTED,
    ),
    Mutation(
        "a row is left out behind those that are dealt out",
        "forward_staged.cu",
        "first_counted = (Stages + kTurns) * groups;",
        "first_counted = (Stages + kTurns) * groups + 1;",
        UNWRITTEN,
        COUNTED,
    ),
    Mutation(
        "one warp has every turn",
        "forward_staged.cu",
        "turn = turn + 1 == kTurns ? 0 : turn + 1;",
        "",
        UNWRITTEN,
        COUNTED,
    ),
    Mutation(
        "rows in turn step too far",
        "forward_staged.cu",
        "asked += kTurns * groups;",
        "asked += (kTurns + 1) * groups;",
        UNWRITTEN,
        staged("forward_staged.cu", counted=False),
    ),
    Mutation(
        "each block of a cluster says which row is next",
        "forward_staged.cu",
        "const bool sends = team.block == 0 && warp == turn;",
        "const bool sends = warp == turn;",
        f"{STUCK}|mailbox|{RACE}",
        COUNTED_CLUSTER,
    ),
    Mutation(
        "the row that was asked for is forgotten",
        "forward_staged.cu",
        "rows[Stages - 1] = fetched;",
        "",
        "does not end",
        COUNTED,
    ),
    Mutation(
        "the word of the reduction before",
        "team.cuh",
        "words[(reductions + 1) % 2]",
        "words[reductions % 2]",
        "uninitialized",
        COUNTED,
    ),
    Mutation(
        "words that overwrite each other",
        "team.cuh",
        "int* const place = words + reductions % 2;",
        "int* const place = words;",
        f"{RACE}|uninitialized",
        COUNTED,
    ),
    Mutation(
        "a word that nobody waits for",
        "team.cuh",
        "kSlots * kSentBytes<Count, T> + static_cast<int>(sizeof(word))",
        "kSlots * kSentBytes<Count, T>",
        f"{RACE}|mailbox|{STUCK}|uninitialized",
        COUNTED_CLUSTER,
    ),
    Mutation(
        "who asks does not announce",
        "team.cuh",
        "rank % 32 == 0 && (block == 0 ? sends : rank == 0)",
        "rank == 0",
        "race: counts up",
        COUNTED_WARPS,
    ),
    Mutation(
        "asks once it has announced",
        "team.cuh",
        ANNOUNCING,
        ANNOUNCING.replace("      ask();\n", "") + "    if (sends) ask();\n",
        "race: counts up",
        COUNTED_WARPS,
    ),
    Mutation(
        "the first mean of another row",
        "forward_staged.cu",
        "      if constexpr (Stages == 2) load_first_pack(fetched);\n",
        "",
        "bits of rows in turn",
        COUNTED,
    ),
    Mutation(
        "each lane sends a word of its own",
        "team.cuh",
        "from_first_lane(word)",
        "word",
        f"{RACE}|{UNWRITTEN}|{VALUE}|{STUCK}|has ended",
        COUNTED_CLUSTER,
    ),
    *(
        Mutation(
            f"a first mean far off is kept, {where.name}",
            "statistics.cuh",
            "return T(1.5) * absolute(statistics.correction) > statistics.magnitude;",
            "return false;",
            VALUE,
            where,
        )
        for where in map(case, ("warps_off_guess", "staged_off_guess", "stream_off_guess"))
    ),
    Mutation(
        "the first mean of a lane's own pack",
        "statistics.cuh",
        "sum += shuffle_xor(sum, distance);",
        "",
        VALUE,
        case("stream_off_guess"),
    ),
    Mutation(
        "rows whose squares vanish are measured from 0",
        "statistics.cuh",
        ">= kMost * statistics.variance",
        "> kMost * statistics.variance",
        VALUE,
        case("minute_1"),
    ),
    Mutation(
        "the second round from the first mean",
        "forward_staged.cu",
        "again.shift = statistics.shift + statistics.correction;",
        "again.shift = statistics.shift;",
        VALUE,
        case("staged_off_guess"),
    ),
    Mutation(
        "padded columns count",
        "forward_staged.cu",
        "(is_inside ? shift : T(0))",
        "shift",
        VALUE,
        staged("forward_staged.cu", regime="mean_1e6", cluster_blocks=2),
    ),
    Mutation(
        "padded columns count, backward",
        "gradient.cuh",
        "is_inside ? offset : T(0)",
        "offset",
        VALUE,
        staged("backward.cu", regime="mean_1e6", cluster_blocks=2),
    ),
    Mutation(
        "columns past a streamed row count, backward",
        "backward_streaming.cu",
        "inside<Vector>(first, i, n_cols) ? row_mean : T(0)",
        "row_mean",
        VALUE,
        dataclasses.replace(case("stream_odd"), regime="mean_1e4"),
    ),
    Mutation(
        "a thread's last pack is not compared with the row's end",
        "team.cuh",
        "p + 1 < PacksPerThread ? kColumns : n;",
        "p < PacksPerThread ? kColumns : n;",
        OUT_OF_BOUNDS,
        WARPS_ODD,
    ),
]


def run(build: Build, on: Case | FewRows | Staged | str) -> None:
    if isinstance(on, Staged):
        on.check(build)
        return
    if isinstance(on, Case):
        build.compile(kernels_of([on]))
        check_case(build, on)
        return
    if isinstance(on, FewRows):
        build.compile(kernels_of([on.case], few_rows=True))
        check_case(build, on.case, few_rows=True)
        return
    if on is BOUNDS:
        check_clip_values(Gpu(build), "float32", 83)
        return
    if on is BESIDE:
        check_neighbours(Gpu(build), "layer_norm", "float32", 40)
        return
    for n, architecture in FAR_ROWS:
        check_far_rows(Gpu(build, architecture=architecture), n)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_is_caught(mutation: Mutation) -> None:
    build = Build({mutation.file: ((mutation.old, mutation.new),)})
    with pytest.raises(AssertionError) as caught:
        run(build, mutation.on)
    message = str(caught.value)
    print(f"{mutation.name}: {message}")
    assert "g++" not in message
    assert re.search(mutation.caught_by, message)
