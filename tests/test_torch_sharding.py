"""Several processes: DTensor without communication, FSDP2 and DDP, over gloo and NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results

HERE = Path(__file__).parent


def run(backend: str, processes: int) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    if not torch.distributed.is_available():
        pytest.skip("needs a build of torch with torch.distributed")
    if backend == "nccl" and not torch.cuda.is_available():
        pytest.skip("needs a build of torch with CUDA")
    path = os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(HERE / "sharding_torch.py"), backend, str(processes)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"all right: {backend}, {processes} processes" in done.stdout


def test_two_processes_without_a_gpu() -> None:
    run("gloo", 2)


def measured(path: Path, env: dict[str, str]) -> dict[tuple[str, int], Any]:
    arguments = [str(path), "--shape", "8x64", "--layers", "3", "--devices", "1", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sharding_torch", *arguments],
        cwd=HERE.parent,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    records = results.read(path, "a report")["measurements"]
    found = {(record["scaling"], record["devices"]): record for record in records}
    rows = {key: record["rows"] for key, record in found.items()}
    assert rows == {("weak", 1): 8, ("strong", 1): 8, ("weak", 2): 16, ("strong", 2): 8}
    for (_, count), record in found.items():
        assert record["layers"] == 3
        assert record["forward"]["collectives"] == []
        sums = ["3 c10d_functional.all_reduce"] if count > 1 else []
        assert record["step"]["collectives"] == sums
    return found


def check_speedups(found: dict[tuple[str, int], Any], mode: str) -> None:
    for (scaling, count), record in found.items():
        one, work = found[scaling, 1], count if scaling == "weak" else 1
        for name in ("forward", "step"):
            expected = work * one[name][f"{mode}seconds"] / record[name][f"{mode}seconds"]
            speedup = record[name][f"{mode}speedup"]
            assert speedup == pytest.approx(expected, rel=1e-5)  # of six digits


def test_the_benchmark_of_scaling_without_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    if not torch.distributed.is_available():
        pytest.skip("needs a build of torch with torch.distributed")
    found = measured(tmp_path / "results.json", {"CUDA_VISIBLE_DEVICES": ""})
    check_speedups(found, "")
    for record in found.values():
        for name in ("forward", "step"):
            assert not {"graph_seconds", "graph_speedup"} & record[name].keys()


@pytest.mark.gpu
def test_the_benchmark_of_scaling_as_called_and_as_a_graph(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, there are {torch.cuda.device_count()}")
    found = measured(tmp_path / "results.json", {})
    for record in found.values():
        assert "not_captured" not in record["forward"] | record["step"]
    for mode in ("", "graph_"):
        check_speedups(found, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_over_nccl(processes: int) -> None:
    run("nccl", processes)
