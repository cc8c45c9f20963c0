"""CuPy's kernel cache and what may befall its files: each kernel is right, or an error says why.

NVRTC compiles for real, and CuPy reads and writes the files. Only the driver is missing: a module
keeps the code that it would load.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynorm import _compile, _driver
from cupynorm._layout import forward_config
from cupynorm._operation import ForwardSpec

cupy = pytest.importorskip("cupy", exc_type=ImportError)
compiler = cupy.cuda.compiler


class Module:
    """Stand for the driver's module."""

    def load(self, cubin: bytes) -> None:
        self.cubin = cubin

    def _set_mapping(self, mapping: dict[str, str]) -> None:
        self.mapping = mapping


def raw_module(code: str, options: Any, name_expressions: list[str]) -> Any:
    """Stand for cupy.RawModule, which compiles when it is first asked for a function."""

    def get_function(name: str) -> Any:
        module = compiler._compile_module_with_cache(
            code, options, arch="90", name_expressions=name_expressions
        )
        return SimpleNamespace(kernel=(module.mapping[name], module.cubin))

    return SimpleNamespace(get_function=get_function)


def without_a_driver(patch: Callable[[Any, str, Any], None], cache: Path) -> list[str]:
    """Have kernels compiled into a folder. Return the names of files that NVRTC compiled for."""
    compiled: list[str] = []
    compile_ = compiler._compile_using_nvrtc_no_warning

    def counted(source: str, options: Any, arch: Any, name: str, *rest: Any) -> Any:
        compiled.append(name)
        return compile_(source, options, arch, name, *rest)

    patch(compiler, "_compile_using_nvrtc_no_warning", counted)
    patch(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}", "cubin"))
    patch(compiler, "function", SimpleNamespace(Module=Module))
    patch(compiler, "_kernel_cache_backend", compiler._DiskKernelCacheBackend(str(cache)))
    patch(cupy, "RawModule", raw_module)
    patch(cupy.cuda, "Device", lambda index: SimpleNamespace(compute_capability="90"))
    patch(_compile, "is_capturing", lambda: False)
    patch(_driver, "Kernel", lambda name, handle, *_: handle)
    return compiled


def kernel() -> _compile.Instantiation:
    spec = ForwardSpec("rms_norm", "float32", None, None, "float32", False, False, False)
    return _compile.forward_instantiation(spec, forward_config(spec, 64, 4, 90))


def loaded() -> Any:
    """Return a kernel's name and code as a new process loads it."""
    for known in (_compile._functions, _compile._modules):
        known.clear()
    return _compile.load(kernel(), 0)


def code_of(text: bytes) -> bytes:
    """Return a file as CuPy writes it."""
    return hashlib.sha1(text).hexdigest().encode() + text


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("_functions", "_modules", "_locks"):
        monkeypatch.setattr(_compile, name, {})
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return without_a_driver(monkeypatch.setattr, tmp_path)


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_a_kernel_is_compiled_once_and_then_read(tmp_path: Path, compiled: list[str]) -> None:
    first, again = loaded(), loaded()
    assert first == again
    assert first[0].startswith("_Z")
    assert first[1].startswith(b"\x7fELF")
    assert compiled == [f"{the_file(tmp_path).name}.cu"]


FAULTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda kept: b"",
    "a part of the sum": lambda kept: kept[:39],
    "the sum alone": lambda kept: kept[:40],
    "half": lambda kept: kept[: len(kept) // 2],
    "all but a byte": lambda kept: kept[:-1],
    "one bit": lambda kept: kept[:-100] + bytes([kept[-100] ^ 1]) + kept[-99:],
    "more": lambda kept: kept + b"\0",
    "another program's": lambda kept: b"#!/bin/sh\n" * 100,
    # CuPy before 14.2 kept no names.
    "code without names": lambda kept: code_of(kept[kept.index(b"\x7fELF") :]),
    "a name that is cut": lambda kept: code_of(kept[40:60]),
    "nothing, with its sum": lambda kept: code_of(b""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_compiled_anew_and_mended(
    fault: str, tmp_path: Path, compiled: list[str]
) -> None:
    first = loaded()
    file = the_file(tmp_path)
    kept = file.read_bytes()
    file.write_bytes(FAULTS[fault](kept))
    for _ in range(2):
        assert loaded() == first
    assert len(compiled) == 2
    assert the_file(tmp_path).read_bytes() == kept


def test_a_cache_that_is_lost_or_blocked_is_named_with_what_to_do(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded()
    file = the_file(tmp_path)
    file.unlink()
    file.mkdir()  # it can be neither read nor written, by whomever
    said = (
        r"cannot be kept in CuPy's kernel cache: .*; set CUPY_CACHE_DIR to .* CUPY_CACHE_IN_MEMORY"
    )
    with pytest.raises(RuntimeError, match=said):
        loaded()
    shutil.rmtree(tmp_path)
    with pytest.raises(RuntimeError, match=said):
        loaded()
    tmp_path.mkdir()
    assert loaded() == first  # in the process that met the error
    shutil.rmtree(tmp_path)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert loaded()[1]


def test_a_full_disk_is_named_with_what_to_do(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "NamedTemporaryFile", no_space)  # which CuPy writes, then renames
        with pytest.raises(RuntimeError, match=r"cache: .*No space left on device; set CUPY"):
            loaded()
    assert not list(tmp_path.iterdir())
    assert loaded()[1]


COLD = """
import hashlib, sys, time
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from test_cache import loaded, without_a_driver

without_a_driver(setattr, Path(sys.argv[1]))
print(flush=True)
input()
name, code = loaded()
print(name, hashlib.sha1(code).hexdigest())
"""


def test_processes_that_start_cold_together_have_the_same_kernel(tmp_path: Path) -> None:
    package = Path(_compile.__file__).parents[1]
    paths = str(package), str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COLD, str(tmp_path), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout
        process.stdout.readline()  # it has imported everything
    results = set()
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        results.add(said)
    assert len(results) == 1
    assert len(results.pop().split()) == 2
    the_file(tmp_path)  # the only one: no part of another is left
