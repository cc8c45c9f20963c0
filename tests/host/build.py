"""From an instantiation to a function on the host: by g++, as `cupynorm._compile` does by NVRTC.

A build is a directory. It holds the files of `kernels/`, edited or not, with the host's device.cuh
instead of the GPU's. It also holds shared libraries of instantiations, which are compiled when they
are first needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from thorough import one_in

from cupynorm._compile import Instantiation, kernels_directory

__all__ = ["Build", "Edits", "Entry", "KernelError", "compiler_problem", "runtime"]

HERE = Path(__file__).resolve().parent

# -fsanitize makes g++ announce each access to the runtime, which has the functions that g++ calls.
# -Og takes four fifths of the time of -O1. Nothing is fused that the kernels do not fuse: see
# cupynorm._compile.OPTIONS.
COMMON = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
CHECKED = (
    *("-Og", "-gdwarf-4", "-g1", "-fsanitize=thread"),
    *("-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables"),
)
# These take half the time again, so thorough.py gives them to one kernel in ten.
ARITHMETIC = ("-fsanitize=bounds-strict,shift,signed-integer-overflow,integer-divide-by-zero",)
ARITHMETIC_OF = one_in(10)
COUNTED = ("-O0", "--coverage", "-DCOVERAGE")

KERNELS_A_LIBRARY = 32  # at most. Together they take 40% less time to compile than one by one

SECONDS_A_DAY = 86400

INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)

# For each file, what is replaced in it: each text by another.
Edits = dict[str, tuple[tuple[str, str], ...]]


class KernelError(AssertionError):
    """Something that a kernel must not do, and where it did so."""


@functools.cache
def compiler_problem() -> str | None:
    """Return why kernels cannot be built and run here, or None."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        return f"the host runtime is written for Linux x86_64, not {machine}"
    missing = [tool for tool in ("g++", "addr2line", "gcov") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} in PATH" if missing else None


def _compile(*arguments: str | Path) -> None:
    process = subprocess.run(["g++", *map(str, arguments)], capture_output=True, text=True)
    if process.returncode:
        raise KernelError(f"g++ fails: {process.stderr[:12000]}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


@functools.cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr


class Runtime:
    """The library that runs kernels. A process has one, since it holds the memory's shadow."""

    def __init__(self, cache: Path) -> None:
        source = HERE / "runtime.cpp"
        name = _digest(source.read_text(encoding="utf-8"), _compiler_version())
        self.path = cache / f"runtime-{name}.so"
        if not self.path.exists():
            # The C library's checks of longjmp would take a jump between stacks for an error.
            options = ("-O2", "-g", "-shared", "-U_FORTIFY_SOURCE")
            with tempfile.NamedTemporaryFile(dir=cache, suffix=".so", delete=False) as file:
                _compile(*COMMON, *options, source, "-o", file.name, "-ldl")
            Path(file.name).replace(self.path)
        self.library = ctypes.CDLL(str(self.path))
        self.library.first_unwritten.restype = ctypes.c_longlong
        self.library.report_message.restype = ctypes.c_char_p
        self.library.report_library.restype = ctypes.c_char_p
        self.library.report_offset.restype = ctypes.c_longlong

    def register(
        self, begins: np.ndarray, run: int, granule: int, initialized: bool, name: str
    ) -> None:
        """Let kernels touch `run` bytes from each address on."""
        begins = np.ascontiguousarray(begins, np.uint64)
        self.library.register_spans(
            begins.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_longlong(len(begins)),
            ctypes.c_longlong(run),
            granule,
            initialized,
            name.encode(),
        )

    def forget(self, address: int) -> None:
        """Take back the span that contains an address."""
        self.library.forget_span(ctypes.c_size_t(address))

    def forget_all(self) -> None:
        self.library.forget_all_spans()

    def set_to_zero(self, address: int, nbytes: int) -> None:
        """Write zeros, which kernels may then read."""
        self.library.set_to_zero(ctypes.c_size_t(address), ctypes.c_longlong(nbytes))

    def first_unwritten(self, address: int, nbytes: int) -> int:
        return int(
            self.library.first_unwritten(ctypes.c_size_t(address), ctypes.c_longlong(nbytes))
        )

    def launch(
        self,
        call: Any,
        grid: int,
        block: int,
        cluster_blocks: int,
        shared_bytes: int,
        arguments: Any,
        flush: bool,
        apart: bool,
    ) -> str | None:
        """Run a kernel. Return what is wrong with it, or None.

        `apart`: each block of a cluster gets ahead of the next one, as far as it can.
        """
        if self.library.launch(
            *(call, ctypes.c_longlong(grid), block, cluster_blocks),
            *(shared_bytes, arguments, int(flush), int(apart)),
        ):
            return None
        places = [
            _place(
                self.library.report_library(i).decode(),
                self.library.report_offset(i),
            )
            for i in range(self.library.report_places())
        ]
        message: str = self.library.report_message().decode()
        return re.sub(r"\{(\d+)\}", lambda match: places[int(match[1])], message)


@functools.cache
def cache_directory() -> Path:
    """Return the directory of builds. A build stays for a day after its last use."""
    cache = Path(tempfile.gettempdir()) / f"cupynorm-host-kernels-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid():
        raise PermissionError(f"{cache} belongs to another user")
    libraries = cache / "libraries"
    libraries.mkdir(exist_ok=True)
    for path in (*cache.iterdir(), *libraries.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another process finished or removed it
            if path != libraries and time.time() - path.stat().st_mtime > SECONDS_A_DAY:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
    return cache


@functools.cache
def runtime() -> Runtime:
    return Runtime(cache_directory())


def _place(library: str, offset: int) -> str:
    """Return the line of a place in a library, and the lines that it is inlined from."""
    command = ["addr2line", "-i", "-e", library, hex(offset)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [Path(line.split(" (discriminator")[0]).name for line in lines]
    kernels = [n for n in names if not n.startswith(("device.cuh", "runtime.cpp"))]
    return " in ".join(dict.fromkeys(kernels or names))


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: what calls it with its argument's address, and the argument's size."""

    call: Any
    argument_bytes: Callable[[], int]


class Build:
    """Kernels for the host, compiled from `kernels/` with some edits.

    Parameters
    ----------
    edits : dict
        What to replace in the sources. Each text must occur exactly once.
    added : dict
        By name, the texts of further files.
    counts : Path, optional
        An empty directory. With it, lines are counted there, and accesses are not checked.
    arithmetic_of : int
        One kernel in so many is also checked for undefined arithmetic and local arrays.
    """

    def __init__(
        self,
        edits: Edits | None = None,
        added: dict[str, str] | None = None,
        counts: Path | None = None,
        arithmetic_of: int = ARITHMETIC_OF,
    ) -> None:
        self.counts = counts
        self.arithmetic_of = arithmetic_of
        self.runtime = runtime()
        texts = {
            path.name: path.read_text(encoding="utf-8")
            for path in (*sorted(kernels_directory().iterdir()), HERE / "entry.hpp")
        }
        texts["device.cuh"] = (HERE / "device.cuh").read_text(encoding="utf-8")
        texts |= added or {}
        for name, replacements in (edits or {}).items():
            for old, new in replacements:
                assert texts[name].count(old) == 1, f"{name} must have {old!r} exactly once"
                texts[name] = texts[name].replace(old, new)
        self._texts = texts
        self.directory = cache_directory() / _digest(*itertools.chain(*texts.items()))
        self.directory.mkdir(exist_ok=True)
        os.utime(self.directory)
        for name, text in texts.items():
            if not (self.directory / name).exists():
                (self.directory / name).write_text(text, encoding="utf-8")
        self._entries: dict[Instantiation, Entry] = {}
        self._libraries: list[ctypes.CDLL] = []

    def _options(self, kernel: Instantiation) -> tuple[str, ...]:
        if self.counts:
            return (*COMMON, *COUNTED)
        chosen = zlib.crc32(str(kernel).encode()) % self.arithmetic_of == 0
        return (*COMMON, *CHECKED, *(ARITHMETIC if chosen else ()))

    def _sources(self, file: str) -> dict[str, str]:
        """Return a file and the files that it includes, by name."""
        sources, names = {}, [file]
        while names:
            name = names.pop()
            sources[name] = self._texts[name]
            names += set(INCLUDE.findall(sources[name])) - set(sources)
        return dict(sorted(sources.items()))

    def _name(self, kernel: Instantiation) -> str:
        """Name a kernel by its sources. An edit leaves kernels of other files as they are."""
        made_of = itertools.chain(*self._sources(kernel.file).items(), self._texts["entry.hpp"])
        own = kernel.expression(), kernel.structs()
        return _digest(*own, *made_of, *self._options(kernel), self.runtime.path.name)

    def _library(self, name: str) -> Path:
        return (self.counts or cache_directory() / "libraries") / f"{name}.so"

    def _compile_together(self, kernels: dict[str, Instantiation]) -> None:
        """Compile kernels of one file and one choice of options to a library, under their names."""
        # Another process may have compiled some of them first.
        kernels = {n: kernel for n, kernel in kernels.items() if not self._library(n).exists()}
        if not kernels:
            return
        first = next(iter(kernels))
        own = self._library(f"{first}-{os.getpid()}")
        source, built = own.with_suffix(".cpp"), own.with_suffix(".o")
        entries = (
            f"{kernel.structs(f'_{name}')}ENTRY({name}, {kernel.expression(f'_{name}')})"
            for name, kernel in kernels.items()
        )
        included = (f'#include "{name}"' for name in (kernels[first].file, "entry.hpp"))
        source.write_text("\n".join((*included, *entries, "")), encoding="utf-8")
        _compile(*self._options(kernels[first]), "-I", self.directory, "-c", source, "-o", built)
        # Without -fsanitize, which would bring along the sanitizers' own runtimes.
        coverage = ("--coverage",) if self.counts else ()
        rpath = f"-Wl,-rpath,{self.runtime.path.parent}"
        _compile("-shared", built, self.runtime.path, rpath, *coverage, "-o", own)
        for name in kernels:
            with contextlib.suppress(FileExistsError):
                self._library(name).hardlink_to(own)
        for path in (source, built, own):
            path.unlink()

    def compile(self, kernels: Iterable[Instantiation]) -> None:
        """Compile the missing kernels in parallel, some of a file together."""
        missing: dict[tuple[str, ...], list[tuple[str, Instantiation]]] = {}
        for kernel in dict.fromkeys(kernels):
            name = self._name(kernel)
            if self._library(name).exists():
                os.utime(self._library(name))
            else:
                alike = (kernel.file, *self._options(kernel))
                missing.setdefault(alike, []).append((name, kernel))
        groups = [
            dict(together[i : i + KERNELS_A_LIBRARY])
            for together in missing.values()
            for i in range(0, len(together), KERNELS_A_LIBRARY)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self._compile_together, groups))

    def load(self, kernel: Instantiation) -> Entry:
        if kernel not in self._entries:
            self.compile([kernel])
            name = self._name(kernel)
            library = ctypes.CDLL(str(self._library(name)))
            self._libraries.append(library)
            self._entries[kernel] = Entry(library[f"call_{name}"], library[f"bytes_of_{name}"])
        return self._entries[kernel]

    def write_counts(self) -> None:
        """Write what was counted to .gcda files."""
        for library in self._libraries:
            library.write_coverage()
