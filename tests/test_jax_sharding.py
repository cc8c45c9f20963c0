"""Over several devices, no rows travel: see jax_sharding.py for the programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", minversion="0.10.2")

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["formula", "kernels"])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what each program's devices exchange, or its error."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "jax_sharding.py", request.param],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
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


@pytest.mark.parametrize(
    "kind",
    [
        "whole rows",
        "with_a_mesh_set",
        "with_relu",
        "under_vmap",
        "through_layers",
        "second_derivatives",
        "shard_map",
        "gradient within shard_map",
    ],
)
def test_whole_rows_exchange_nothing_but_the_gradients_of_weight_and_bias(
    report: dict[str, Any], kind: str
) -> None:
    for name, collectives in exchanged(report, kind).items():
        assert {kind for kind, _ in collectives} == {"all-reduce"}, name
        # Of layers, those of all three at once; of two axes, in both.
        types = {t for _, types in collectives for t in types}
        assert types <= {"f32[64]", "f32[3,64]", "f32[4,16]"}, name


def test_only_a_kernel_gathers_rows_that_a_shard_map_leaves_split(report: dict[str, Any]) -> None:
    (collectives,) = exchanged(report, "split over the other, Auto").values()
    # In float32, in which the CPU exchanges 16 bits.
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
