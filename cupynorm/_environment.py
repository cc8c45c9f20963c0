"""What this machine has: versions, the GPU, the kernel cache, or why one of them is missing."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

__all__ = [
    "cache_is_writable",
    "check_not_forked",
    "describe",
    "gpu_name",
    "gpu_problem",
    "import_cupy",
    "nvrtc_problem",
]

NO_CACHE = "CuPy cannot be imported, as it cannot make its kernel cache"
USE_A_FOLDER = "set CUPY_CACHE_DIR to a folder that can be written"
FORKED = (
    "a process that was forked from one that used CUDA cannot use it: start processes by "
    "multiprocessing's 'spawn' or 'forkserver'"
)
INITIALIZATION_ERROR = 3  # cudaErrorInitializationError


def import_cupy(reason: str) -> Any:
    """Return CuPy, or raise ImportError with the reason that it is needed and what to do."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"{reason}, and cupynorm's GPU path needs CuPy: install cupynorm[cuda12] or "
            f"cupynorm[cuda13], as your driver's CUDA is 12 or 13 ({error})"
        ) from error
    except OSError as error:
        raise ImportError(f"{reason}, and {NO_CACHE}: {error}; {USE_A_FOLDER}") from error
    return cupy


@functools.cache
def gpu_problem() -> str | None:
    """Say why no GPU can be used and what to do about it; None if one can."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return f"CuPy needs {error.name}, which is not installed"
        return (
            "CuPy is not installed (pip install 'cupynorm[cuda12]' or 'cupynorm[cuda13]', in a "
            "clone '.[cuda12]' or '.[cuda13]', as the driver's CUDA is 12 or 13)"
        )
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    except OSError as error:
        return f"{NO_CACHE}: {error} ({USE_A_FOLDER})"
    if tuple(map(int, cupy.__version__.split(".")[:2])) < (14, 2):
        return f"CuPy 14.2 or newer is needed, found {cupy.__version__}"
    runtime = cupy.cuda.runtime
    try:
        if runtime.driverGetVersion() == 0:
            return "no NVIDIA driver is installed (https://www.nvidia.com/drivers)"
        count = runtime.getDeviceCount()
        if count:
            runtime.getDevice()  # in some forked processes this alone fails
    except runtime.CUDARuntimeError as error:
        return _explained(error)
    return None if count else "the driver shows no device (see CUDA_VISIBLE_DEVICES, nvidia-smi)"


def _explained(error: Any) -> str:
    """Return an error of CUDA's runtime with what to do about it."""
    if error.status == INITIALIZATION_ERROR and _is_forked:
        return f"{error} ({FORKED})"
    return f"{error} (see CUDA_VISIBLE_DEVICES, nvidia-smi)"


def check_not_forked() -> None:
    """Raise RuntimeError in a process that was forked from one that used CUDA.

    CUDA's errors would not say what to do.
    """
    problem = gpu_problem() if _is_forked else None
    if problem and FORKED in problem:  # others are said where the GPU is used
        raise RuntimeError(f"cupynorm cannot use the GPU here: {problem}")


_is_forked = False


def _begin_anew() -> None:
    """Ask again, in a forked process, which may lack what its parent had."""
    global _is_forked
    _is_forked = True
    gpu_problem.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def nvrtc_problem() -> str | None:
    """Say why kernels cannot be compiled and what to do about it; None if they can."""
    from cupy.cuda import nvrtc

    install = (
        "install cupynorm[cuda12] or cupynorm[cuda13], as your CuPy is cupy-cuda12x or cupy-cuda13x"
    )
    try:
        version = nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip()
        return f"CuPy does not find NVRTC, which compiles the kernels: {install} ({reason})"
    if version < (12, 1):
        return f"NVRTC 12.1 or newer is needed, found {'.'.join(map(str, version))}: {install}"
    return None


def gpu_name() -> str:
    """Name the current GPU."""
    return str(_device_properties()["name"].decode())


def describe() -> dict[str, str]:
    """Return what a report of a bug should start with."""
    facts = {
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "NumPy": importlib.metadata.version("numpy"),
        "ml_dtypes": importlib.metadata.version("ml_dtypes"),
    }
    for name, package in (("torch", "torch"), ("JAX", "jax")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(package)
    with contextlib.suppress(ImportError, OSError):
        facts |= _cupy_facts()
    problem = gpu_problem()
    if problem:
        return facts | {"GPU": f"none, {problem}"}
    return facts | _gpu_facts() | {"kernel cache": _kernel_cache()}


def _cupy_facts() -> dict[str, str]:
    import cupy

    nvrtc = nvrtc_problem() or ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return {"CuPy": cupy.__version__, "NVRTC": nvrtc}


def _gpu_facts() -> dict[str, str]:
    import cupy

    runtime, properties = cupy.cuda.runtime, _device_properties()
    return {
        "GPU": f"{gpu_name()}, {properties['totalGlobalMem'] / 2**30:.0f} GiB, "
        f"compute capability {properties['major']}.{properties['minor']}, "
        f"device {cupy.cuda.Device().id} of {runtime.getDeviceCount()}",
        "CUDA driver": _dotted(runtime.driverGetVersion()),
        "CUDA runtime": _dotted(runtime.runtimeGetVersion()),
    }


def _device_properties() -> dict[str, Any]:
    import cupy

    properties: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return properties


def _dotted(version: int) -> str:
    """Spell CUDA's 1000 * major + 10 * minor."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _cache_folder() -> Path:
    # As CuPy does; pathlib raises where there is no home.
    default = os.path.expanduser("~/.cupy/kernel_cache")  # noqa: PTH111
    return Path(os.environ.get("CUPY_CACHE_DIR", default))


def cache_is_writable() -> bool:
    """Tell whether CuPy can keep kernels. If not, a new one fails unless it stays in memory."""
    folder = _cache_folder()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:  # os.access lets root write everything
        with tempfile.TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False


def _kernel_cache() -> str:
    if cache_is_writable():
        return f"{_cache_folder()}, writable"
    return (
        f"{_cache_folder()}, NOT writable: {USE_A_FOLDER}, or CUPY_CACHE_IN_MEMORY to 1 to compile "
        "anew in each process"
    )
