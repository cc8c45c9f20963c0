"""From spec and config to a loaded kernel.

An instantiation names one template of `kernels/` with its arguments. Its source is assembled with
the includes pasted in: CuPy's disk cache keys on the source text, so an edited header is a new key.
Each is one RawModule, compiled when first needed for the present device and shared by all threads.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cupynorm._config import (
    ResidentBackward,
    ResidentForward,
    StreamingBackward,
    StreamingForward,
    pack_length,
)
from cupynorm._spec import CPP_TYPES, ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

__all__ = [
    "OPTIONS",
    "Instantiation",
    "backward_instantiations",
    "forward_instantiation",
    "kernels_directory",
    "load",
    "source",
]

# A contraction chosen by the compiler could differ between instantiations, and with it the bits of
# a row: the kernels say themselves where a multiply-add is fused.
OPTIONS = ("-std=c++17", "--fmad=false")

# Groups of 32 threads that sum the blocks' partials side by side.
REDUCTION_GROUPS = 16


@dataclass(frozen=True)
class Instantiation:
    """A template of `kernels/` with its arguments, and how a block of it is launched."""

    file: str
    expression: str
    block_threads: int
    shared_bytes: int


def _instantiate(
    file: str, template: str, arguments: tuple[Any, ...], block_threads: int, shared_bytes: int
) -> Instantiation:
    spelled = (str(a).lower() if isinstance(a, bool) else str(a) for a in arguments)
    return Instantiation(file, f"{template}<{', '.join(spelled)}>", block_threads, shared_bytes)


def _team_bytes(row_threads: int, block_threads: int, x: str) -> int:
    """Return the shared memory of a Team's reductions: see kernels/team.cuh."""
    if row_threads <= 32:
        return 0
    itemsize = ITEMSIZE[compute_dtype(x)]
    return -(-2 * (block_threads // 32) * 3 * itemsize // 16) * 16


def forward_instantiation(
    spec: ForwardSpec, config: ResidentForward | StreamingForward
) -> Instantiation:
    """Return the kernel of a forward pass."""
    what = (
        *(CPP_TYPES[dtype] for dtype in (spec.x, spec.weight, spec.bias, spec.y)),
        spec.norm == "layer_norm",
        spec.zero_centered,
        spec.store_statistics,
        spec.relu,
    )
    if isinstance(config, StreamingForward):
        return _instantiate(
            "forward_streaming.cu",
            "norm_forward_streaming",
            (*what, config.block_threads, config.vector),
            config.block_threads,
            _team_bytes(config.block_threads, config.block_threads, spec.x),
        )
    how = (
        config.row_threads,
        config.block_threads,
        config.blocks_per_multiprocessor,
        config.packs_per_thread,
        config.vector,
    )
    return _instantiate(
        "forward.cu",
        "norm_forward",
        (*what, *how),
        config.block_threads,
        _team_bytes(config.row_threads, config.block_threads, spec.x),
    )


def backward_instantiations(
    spec: BackwardSpec, config: ResidentBackward | StreamingBackward
) -> tuple[Instantiation, ...]:
    """Return the kernels of a backward pass in the order of their launches.

    The last one sums the partials, where there are weight gradients.
    """
    compute = compute_dtype(spec.x)
    types = tuple(CPP_TYPES[dtype] for dtype in (spec.x, spec.dy, spec.weight))
    options = (spec.norm == "layer_norm", spec.zero_centered)
    dbias = spec.dbias is not None
    reduction: tuple[Instantiation, ...] = ()
    if spec.gradients:
        reduction = (
            _instantiate(
                "reduce_partials.cu",
                "reduce_partials",
                (*(CPP_TYPES[d] for d in (compute, spec.weight, spec.dbias)), REDUCTION_GROUPS),
                32 * REDUCTION_GROUPS,
                32 * REDUCTION_GROUPS * ITEMSIZE[compute],
            ),
        )
    if isinstance(config, StreamingBackward):
        return (
            _instantiate(
                "backward_streaming.cu",
                "norm_backward_coefficients",
                (*types, *options, spec.bitmask, config.row_threads, config.vector),
                config.row_threads,
                _team_bytes(config.row_threads, config.row_threads, spec.x),
            ),
            _instantiate(
                "backward_streaming.cu",
                "norm_backward_columns",
                (*types, *options, dbias, spec.bitmask, config.column_threads, config.vector),
                config.column_threads,
                0,
            ),
            *reduction,
        )
    how = (
        config.hold_weight,
        config.prefetch,
        config.row_threads,
        config.block_threads,
        config.packs_per_thread,
        config.vector,
    )
    shared_bytes = _team_bytes(config.row_threads, config.block_threads, spec.x)
    if spec.gradients:
        columns = config.packs_per_thread * pack_length(spec.x)
        shared_bytes += config.block_threads * columns * ITEMSIZE[compute]
    return (
        _instantiate(
            "backward.cu",
            "norm_backward",
            (*types, *options, dbias, spec.bitmask, *how),
            config.block_threads,
            shared_bytes,
        ),
        *reduction,
    )


_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@cache
def kernels_directory() -> Path:
    """Return the directory of the CUDA sources: in the package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for directory in (here / "kernels", here.parent / "kernels"):
        if (directory / "forward.cu").is_file():
            return directory
    raise FileNotFoundError(
        f"cupynorm's CUDA sources are neither in {here / 'kernels'} nor in "
        f"{here.parent / 'kernels'}: the installation is incomplete, install cupynorm again"
    )


@cache
def source(file: str) -> str:
    """Return a file of `kernels/` with every include replaced, once, by the included text."""
    pasted: set[str] = set()

    def paste(name: str) -> str:
        if name in pasted:
            return ""
        pasted.add(name)
        text = (kernels_directory() / name).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda match: paste(match[1]), text.replace("#pragma once\n", ""))

    return paste(file)


_functions: dict[tuple[Instantiation, int], Any] = {}
_modules: dict[Instantiation, Any] = {}
_locks: dict[Instantiation, threading.Lock] = {}


def load(kernel: Instantiation, device: int) -> Any:
    """Return the kernel's function on `device`, the current one; compile and load it at need.

    Raises
    ------
    RuntimeError
        If it is not loaded and the current stream is being captured into a CUDA graph, which
        loading would invalidate; or if the kernel cannot be compiled.
    """
    function = _functions.get((kernel, device))
    if function is not None:
        return function
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            f"{kernel.expression} is not loaded yet, and loading it would invalidate the CUDA "
            "graph being captured: call cupynorm.warmup(...), or this very function, once before "
            "the capture begins"
        )
    with _locks.setdefault(kernel, threading.Lock()):
        function = _functions.get((kernel, device))
        if function is None:
            module = _modules.get(kernel)
            if module is None:
                module = cupy.RawModule(
                    code=source(kernel.file),
                    options=OPTIONS,
                    name_expressions=[kernel.expression],
                )
            function = module.get_function(kernel.expression).kernel
            _modules[kernel] = module
            _functions[kernel, device] = function
    return function
