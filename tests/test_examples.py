"""Every notebook in examples/ runs from its first cell to its last."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    if request.param.stem == "torch":
        pytest.importorskip("torch", minversion="2.11")
    if request.param.stem == "jax":
        pytest.importorskip("jax", minversion="0.10.2")
    return nbformat.read(request.param, as_version=4)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_notebook_runs(notebook: nbformat.NotebookNode) -> None:
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()


def test_notebook_imports_in_its_own_directory(
    notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jupyter starts a notebook there. Users would have cupynorm installed.
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code"][:1]
    if "sys.path" not in notebook.cells[0].source:
        pytest.skip("imports nothing from where it is")
    resources = {"metadata": {"path": str(ROOT / "examples")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


def test_the_pictures_of_a_notebook_are_kept_small(notebook: nbformat.NotebookNode) -> None:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [data["image/png"] for o in outputs if "image/png" in (data := o.get("data", {}))]
    for picture in pictures:  # examples/execute.py does this
        assert Image.open(io.BytesIO(base64.b64decode(picture))).mode == "P"


def test_notebook_has_the_outputs_of_one_whole_run_or_none(notebook: nbformat.NotebookNode) -> None:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if set(counts) == {None}:
        assert not any(cell.outputs for cell in code)
    else:
        assert counts == list(range(1, len(code) + 1))
        assert not any(o.output_type == "error" for cell in code for o in cell.outputs)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.gpu)])
def test_torch_over_several_devices(devices: int) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    if not torch.distributed.is_available():
        pytest.skip("needs a build of torch with torch.distributed")
    if 0 < torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} GPUs, there are {torch.cuda.device_count()}")
    done = subprocess.run(
        [sys.executable, "examples/torch_devices.py", "--devices", str(devices)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"backward of {devices} x (8, 64, 512): nothing is exchanged" in done.stdout
    assert "it took 1 all-reduce of 512 values" in done.stdout
