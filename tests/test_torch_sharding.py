"""Several processes: DTensor without communication, FSDP2 and DDP, over gloo and over NCCL."""

from __future__ import annotations

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


@pytest.mark.gpu
@pytest.mark.parametrize("processes", [2, 4])
def test_gpus(processes: int) -> None:
    run("nccl", processes)
