"""Several processes: DTensor without communication, FSDP2 and DDP, over gloo and over NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(backend: str, processes: int) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("needs a build of torch with torch.distributed")
    if backend == "nccl" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs, there are {torch.cuda.device_count()}")
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


def test_the_benchmark_of_scaling_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("needs a build of torch with torch.distributed")
    results = tmp_path / "results.json"
    arguments = [str(results), "--shape", "8x64", "--devices", "2"]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.sharding_torch", *arguments],
        cwd=HERE.parent,
        check=True,
        timeout=300,
    )
    weak, strong = json.loads(results.read_text(encoding="utf-8"))["measurements"]
    assert (weak["rows"], strong["rows"]) == (16, 8)
    for record in (weak, strong):
        assert record["forward"]["collectives"] == {}
        assert record["step"]["collectives"] == {"c10d_functional.all_reduce": 1}
        assert record["forward"]["seconds"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [2, 4])
def test_gpus(processes: int) -> None:
    run("nccl", processes)
