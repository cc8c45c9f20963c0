"""Over several devices, no rows are exchanged. jax_sharding.py has the programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from thorough import THOROUGH

pytest.importorskip("jax", minversion="0.10.2")

HERE = Path(__file__).parent
# How drawn rows become uneven.
WAYS = {
    *("constraint", "constraint of two axes", "one row", "last row off", "first column off"),
    "token in front",
}


@pytest.fixture(scope="module", params=["formula", "kernels"])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what each program's devices exchange, or its error."""
    # XLA decides what devices exchange before it makes code. This saves most of the time for code.
    ours = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {ours}"
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "jax_sharding.py", request.param],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == 4
    return found["cases"] | {"path": request.param}


def exchanged(report: dict[str, Any], kind: str) -> dict[str, list[tuple[str, list[str]]]]:
    cases = {name: case for name, case in report.items() if name.startswith(kind)}
    assert cases
    return {name: case["collectives"] for name, case in cases.items()}


def test_every_program_is_right(report: dict[str, Any]) -> None:
    errors = {n: c["error"] for n, c in report.items() if n != "path" and "error" in c}
    assert not errors, "\n".join(f"{name}: {error}" for name, error in errors.items())


def test_drawn_shardings_have_uneven_ones_of_each_kind(report: dict[str, Any]) -> None:
    drawn = [case for name, case in report.items() if name.startswith("drawn ")]
    uneven = [case for case in drawn if case.get("padded")]
    options = "mesh_set", "k", "norm", "relu", "weight", "bias", "order", "residual"

    def counted(name: str) -> Counter[Any]:
        return Counter(str(case[name]) for case in uneven)

    if not THOROUGH:
        assert {case["way"] for case in drawn} == {*WAYS, "axis split in two", "even"}
        assert {case["order"] for case in drawn} == {1, 2}
        if report["path"] == "kernels":
            assert set(counted("way")) == WAYS
            assert all(len(counted(name)) == 2 for name in ("padded", *options))
        return
    plain = [case for case in drawn if not case["residual"]]
    assert (len(plain), len(drawn)) == (59, 83)
    assert len(uneven) >= 36
    ways = counted("way")
    assert set(ways) == WAYS
    assert min(ways.values()) >= 4, ways
    assert counted("padded")["2"] >= 5
    for name in options:
        assert min(counted(name).values()) >= 6, name
        assert len(counted(name)) == 2, name
    assert counted("shardy")["False"] >= 3
    # The kinds that JAX allows on an Explicit mesh.
    assert sum(case.get("kind") == "Explicit" for case in plain) == 4
    assert sum(case.get("way") == "axis split in two" for case in plain) == 6
    added = [case for case in drawn if case["residual"]]
    assert {case["order"] for case in added} == {1, 2}
    assert {case["kind"] for case in added} == {"Auto", "Explicit"}


@pytest.mark.parametrize(
    "kind",
    [
        "whole rows",
        "uneven rows",
        "with_a_mesh_set",
        "a_dy_made_outside",
        "with_relu",
        "under_vmap",
        "through_layers",
        "a_stream_through_layers",
        "second_derivatives",
        "shard_map",
        "gradient within shard_map",
        "a residual",
    ],
)
def test_whole_rows_exchange_nothing_but_the_gradients_of_weight_and_bias(
    report: dict[str, Any], kind: str
) -> None:
    for name, collectives in exchanged(report, kind).items():
        assert {kind for kind, _ in collectives} == {"all-reduce"}, name
        # f32[3,64] is for all three layers at once, f32[4,16] for two axes.
        types = {t for _, types in collectives for t in types}
        assert types <= {"f32[64]", "f32[3,64]", "f32[4,16]"}, name


def test_rows_of_a_fused_norm_exchange_nothing_but_the_gradients_of_vectors(
    report: dict[str, Any],
) -> None:
    for name, collectives in exchanged(report, "fused").items():
        assert {kind for kind, _ in collectives} == {"all-reduce"}, name
        types = {t for _, types in collectives for t in types}
        assert types <= {"f32[64]", "f32[1,64]", "f32[1,1,64]"}, name


@pytest.mark.parametrize("kind", ["vectors, ", "vectors under", "vectors and", "a vmap of vectors"])
def test_vectors_that_vary_along_split_axes_stay_with_their_rows(
    report: dict[str, Any], kind: str
) -> None:
    """Their gradients are summed over the other axes of the mesh alone."""
    summed = {
        "(4,) P('a',) (8, 1, 64) P('a',)": set(),
        "(2, 2) P('a', 'b') (8, 1, 64) P('a',)": {"f32[4,1,64]"},
        "(2, 2) P('a', 'b') (6, 64) P('b',)": {"f32[3,64]"},
        "(2, 2) P(('a', 'b'),) (6, 64) P()": {"f32[6,64]"},
        "(4, 1) P('a', 'b') (8, 1, 64) P('a',)": {"f32[2,1,64]"},  # over one device
        "(2, 2) P('a', 'b') (6, 64) P()": {"f32[3,64]"},
        "(2, 2) P('a',) (6, 64) P('b',)": {"f32[6,64]"},
        "a vmap of vectors": {"f32[64]"},  # of the bias that all share
    }
    for name, collectives in exchanged(report, kind).items():
        expected = next((summed[key] for key in summed if key in name), set())
        types = {t for kind, types in collectives if kind == "all-reduce" for t in types}
        assert types <= expected, name
        assert types or len(expected - {"f32[2,1,64]"}) == 0, name
        # What is split otherwise than the rows are is gathered, and its gradient.
        others = {t for kind, types in collectives if kind != "all-reduce" for t in types}
        assert others <= ({"f32[6,64]"} if "(6, 64) P(" in name else set()), name


def test_drawn_vectors_are_padded_with_their_rows(report: dict[str, Any]) -> None:
    drawn = [case for name, case in report.items() if name.startswith("vectors drawn")]
    assert any(case["padded"] for case in drawn if len(case["along"]) > 1)
    if report["path"] == "kernels":
        assert {case["way"] for case in drawn if case["padded"]} == WAYS


def test_a_forward_pass_exchanges_nothing(report: dict[str, Any]) -> None:
    for kind in ("forward of a residual", "forward_mode", "quantized_"):
        for name, collectives in exchanged(report, kind).items():
            if "that_are_cut" in name:
                assert {kind for kind, _ in collectives} == {"all-gather"}, name
            else:
                assert collectives == [], name


def test_only_a_kernel_gathers_rows_that_a_shard_map_leaves_split(report: dict[str, Any]) -> None:
    (collectives,) = exchanged(report, "split over the other, Auto").values()
    # The CPU exchanges 16-bit values as float32.
    gathered = {t for kind, types in collectives if kind == "all-gather" for t in types}
    assert gathered == ({"f32[4,6,64]"} if report["path"] == "kernels" else set())


def test_a_cut_weight_alone_is_gathered(report: dict[str, Any]) -> None:
    for name, collectives in exchanged(report, "cut weight").items():
        gathered = [types for kind, types in collectives if kind == "all-gather"]
        assert gathered, name
        assert {t for types in gathered for t in types} == {"f32[64]"}, name


def test_cut_rows_are_gathered_along_the_cut(report: dict[str, Any]) -> None:
    for name, collectives in exchanged(report, "cut rows").items():
        assert "all-gather" in {kind for kind, _ in collectives}, name


def test_a_kernel_that_xla_is_told_nothing_of_gathers_x(report: dict[str, Any]) -> None:
    if report["path"] == "formula":
        pytest.skip("the formula has no call that XLA knows nothing of")
    assert exchanged(report, "control") == {"control": [["all-gather", ["f32[8,6,64]"]]]}
