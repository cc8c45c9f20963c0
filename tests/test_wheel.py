"""The built wheel finds its kernels when pip installs it with only its dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
KERNELS = {path.name for path in (ROOT / "kernels").iterdir()}

PROBE = """
import json
import cupynorm
from cupynorm import _compile

folder = _compile.kernels_directory()
names = sorted(path.name for path in folder.iterdir())
print(json.dumps({
    "package": cupynorm.__file__,
    "folder": str(folder),
    "sizes": {name: len(_compile.source(name)) for name in names},
}))
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_package_kernels_and_license_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"cupynorm"}
    assert {Path(name).name for name in names if name.startswith("cupynorm/kernels/")} == KERNELS
    assert "cupynorm/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_finds_its_kernels(wheel: Path, tmp_path: Path) -> None:
    builder = venv.EnvBuilder(symlinks=os.name != "nt")
    builder.create(tmp_path / "clean")
    python = builder.ensure_directories(tmp_path / "clean").env_exe
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-index", "--no-deps", wheel),
    )
    (site,) = (tmp_path / "clean").rglob("site-packages")
    # The dependencies come from the environment of the tests. Its folder is searched last, so a
    # cupynorm that is installed there is not imported.
    folders = {str(Path(module.__file__).parent.parent) for module in (np, ml_dtypes)}
    (site / "dependencies.pth").write_text("\n".join(sorted(folders)))

    found = json.loads(run(python, "-I", "-c", PROBE, cwd=tmp_path))

    assert Path(found["package"]).is_relative_to(site)
    assert Path(found["folder"]).is_relative_to(site)
    assert set(found["sizes"]) == KERNELS
    assert KERNELS
    assert all(found["sizes"].values())


def test_source_distribution_holds_kernels_and_tests(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"kernels/{name}" for name in KERNELS} <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"} <= names
