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

from cupynorm import _driver
from cupynorm._environment import USE_A_FOLDER
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardConfig,
    BackwardInRegisters,
    BackwardPipelined,
    ForwardInRegisters,
    ForwardPipelined,
    ForwardStreaming,
    backward_column_parallel_bytes,
    backward_columns_bytes,
    backward_in_registers_bytes,
    backward_pipelined_bytes,
    forward_in_registers_bytes,
    forward_pipelined_bytes,
    gpu_of,
    reduction_bytes,
    team_bytes,
)
from cupynorm._operation import CPP_TYPES, BackwardSpec, ForwardSpec, compute_dtype

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


@dataclass(frozen=True)
class Instantiation:
    """A template of `kernels/` with its arguments, and how it is launched: see `_driver.Kernel`."""

    file: str
    expression: str
    parameters: str
    block_threads: int
    shared_bytes: int
    cluster_blocks: int = 1
    overlaps: bool = False
    at_once: bool = False


def _expression(template: str, *arguments: Any) -> str:
    spelled = (str(a).lower() if isinstance(a, bool) else str(a) for a in arguments)
    return f"{template}<{', '.join(spelled)}>"


def _scalar(x: str) -> str:
    """Return the letter of the compute type among a kernel's parameters."""
    return "d" if compute_dtype(x) == "float64" else "f"


def forward_instantiation(
    spec: ForwardSpec, config: ForwardInRegisters | ForwardPipelined | ForwardStreaming
) -> Instantiation:
    """Return the kernel of a forward pass."""
    what = (
        *(CPP_TYPES[dtype] for dtype in (spec.x, spec.weight, spec.bias, spec.y)),
        spec.norm == "layer_norm",
        spec.zero_centered,
        spec.store_statistics,
        spec.relu,
    )
    operands = "PqPPPqPPP"  # x, x_stride, weight, bias, y, y_stride, mean, rstd, bitmask
    numbers = "qq" + 4 * _scalar(spec.x)  # n_rows, n_cols; inv_n, eps and the bounds of relu
    if isinstance(config, ForwardInRegisters):
        template = _expression(
            "norm_forward",
            *what,
            config.rare_last,
            config.blocks_ahead,
            config.blocks_ahead_if_large,
            config.hold_weight,
            config.cluster_blocks,
            config.folded,
            config.row_threads,
            config.block_threads,
            config.blocks_per_multiprocessor,
            config.packs_per_thread,
            config.pack_length,
            config.full,
            config.vector,
        )
        return Instantiation(
            "forward_in_registers.cu",
            template,
            operands + numbers,
            config.block_threads,
            forward_in_registers_bytes(spec, config),
            config.cluster_blocks,
        )
    if isinstance(config, ForwardPipelined):
        template = _expression(
            "norm_forward_pipelined",
            *what,
            config.hold_weight,
            config.hold_bias,
            config.stages,
            config.cluster_blocks,
            config.block_threads,
            config.blocks_per_multiprocessor,
            config.packs_per_thread,
            config.counted,
            config.cells,
            config.through_l1,
            config.turned,
            config.full,
            config.vector,
        )
        return Instantiation(
            "forward_pipelined.cu",
            template,
            operands + "P" + numbers,  # the count between them
            config.block_threads,
            forward_pipelined_bytes(spec, config),
            config.cluster_blocks,
        )
    threads = config.block_threads
    template = _expression(
        "norm_forward_streaming",
        *what,
        config.cluster_blocks,
        threads,
        config.blocks_per_multiprocessor,
        config.packs_per_thread,
        config.vector,
    )
    return Instantiation(
        "forward_streaming.cu",
        template,
        operands + numbers,
        threads,
        team_bytes(spec.x, threads, threads, config.cluster_blocks),
        config.cluster_blocks,
    )


def backward_instantiations(
    spec: BackwardSpec, config: BackwardConfig
) -> tuple[Instantiation, ...]:
    """Return the kernels of a backward pass in the order of their launches.

    The last one sums the partials, where there are any.
    """
    types = tuple(CPP_TYPES[dtype] for dtype in (spec.x, spec.dy, spec.weight))
    options = (spec.norm == "layer_norm", spec.zero_centered)
    dbias = spec.dbias is not None
    scalar = _scalar(spec.x)
    operands = "PqPqPPPP"  # dy, dy_stride, x, x_stride, weight, mean, rstd, bitmask
    compute = compute_dtype(spec.x)
    if isinstance(config, BackwardInRegisters):
        gradients = [spec.weight, spec.dbias]
        if config.reduction is not None:
            gradients = [None if dtype is None else compute for dtype in gradients]
        of_gradients = tuple(CPP_TYPES[dtype] for dtype in gradients)
        template = _expression(
            "norm_backward_in_registers",
            *types,
            *of_gradients,
            *options,
            spec.bitmask,
            config.column_lanes,
            config.cluster_blocks,
            config.row_threads,
            config.block_threads,
            config.blocks_per_multiprocessor,
            config.packs_per_thread,
            config.full,
            config.vector,
        )
        passes: tuple[Instantiation, ...] = (
            Instantiation(
                "backward_in_registers.cu",
                template,
                # dx, dx_stride, dweight, dbias, means_of_h; n_rows, n_cols; inv_n
                operands + "PqPPPqq" + scalar,
                config.block_threads,
                backward_in_registers_bytes(spec, config),
                config.cluster_blocks,
            ),
        )
        if config.column_threads and spec.norm == "layer_norm":
            threads = config.column_threads
            columns = Instantiation(
                "backward_in_registers.cu",
                _expression(
                    "norm_backward_in_registers_columns",
                    *(*types, *of_gradients, spec.bitmask),
                    *(config.column_lanes, threads, config.vector),
                ),
                operands + "PPPqq",  # means_of_h, dweight, dbias; n_rows, n_cols
                threads,
                backward_columns_bytes(spec, config),
                overlaps=True,
            )
            passes = (*passes, columns)
    elif isinstance(config, BackwardPipelined):
        template = _expression(
            "norm_backward",
            *types,
            *options,
            dbias,
            spec.bitmask,
            config.hold_weight,
            config.hold_row,
            config.shared_sums,
            config.hold_sums,
            config.bulk,
            config.cells,
            config.through_l1,
            config.turned,
            config.stages,
            config.cluster_blocks,
            config.row_threads,
            config.block_threads,
            config.blocks_per_multiprocessor,
            config.packs_per_thread,
            config.full,
            config.vector,
        )
        passes = (
            Instantiation(
                "backward_pipelined.cu",
                template,
                operands + "PqPqq" + scalar,  # dx, dx_stride, partials; n_rows, n_cols; inv_n
                config.block_threads,
                backward_pipelined_bytes(spec, config),
                config.cluster_blocks,
            ),
        )
    elif isinstance(config, BackwardColumnParallel):
        template = _expression(
            "norm_backward_column_parallel",
            *types,
            CPP_TYPES[spec.dbias],
            *options,
            spec.bitmask,
            config.strip_threads,
            config.group_rows,
            config.vector,
        )
        passes = (
            Instantiation(
                "backward_column_parallel.cu",
                template,
                # dx, dx_stride, dweight, dbias, arrived, exchange; n_rows, n_cols; inv_n
                operands + "PqPPPPqq" + scalar,
                config.block_threads,
                backward_column_parallel_bytes(spec, config),
                at_once=True,
            ),
        )
    else:
        threads, vector = config.row_threads, config.vector
        passes = (
            Instantiation(
                "backward_streaming.cu",
                _expression(
                    "norm_backward_coefficients",
                    *(*types, *options, spec.bitmask, config.cluster_blocks, threads, vector),
                ),
                operands + "Pqq" + scalar,  # coefficients; n_rows, n_cols; inv_n
                threads,
                team_bytes(spec.x, threads, threads, config.cluster_blocks),
                config.cluster_blocks,
            ),
            Instantiation(
                "backward_streaming.cu",
                _expression(
                    "norm_backward_columns",
                    *(*types, *options, dbias, spec.bitmask, config.column_threads, vector),
                ),
                operands + "PPqPqqq",  # coefficients, dx, dx_stride, partials; their number, ...
                config.column_threads,
                0,
            ),
        )
    if config.reduction is None:
        return passes
    reduction = Instantiation(
        "reduce_partials.cu",
        _expression(
            "reduce_partials",
            *(CPP_TYPES[d] for d in (compute, spec.weight, spec.dbias)),
            config.reduction.block_threads,
            config.reduction.groups,
            config.reduction.vector,
        ),
        "PPPqq",  # partials, dweight, dbias; n_partials, n_cols
        config.reduction.block_threads,
        reduction_bytes(config.reduction),
        overlaps=True,
    )
    return (*passes, reduction)


_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@cache
def kernels_directory() -> Path:
    """Return the directory of the CUDA sources: in the package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for directory in (here / "kernels", here.parent / "kernels"):
        if (directory / "forward_in_registers.cu").is_file():
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


_functions: dict[tuple[Instantiation, int], _driver.Kernel] = {}
_modules: dict[Instantiation, Any] = {}
_locks: dict[Instantiation, threading.Lock] = {}


def load(kernel: Instantiation, device: int) -> _driver.Kernel:
    """Return the kernel on `device`, the current one, ready to launch; compile it at need.

    Raises
    ------
    RuntimeError
        If it is not loaded and the current stream is being captured into a CUDA graph, which
        loading would invalidate; or if CuPy cannot write its kernel cache.
    cupy.cuda.compiler.CompileException
        If the kernel cannot be compiled.
    """
    function = _functions.get((kernel, device))
    if function is not None:
        return function
    import cupy

    if cupy.cuda.get_current_stream().is_capturing():
        raise RuntimeError(
            f"{kernel.expression} is not loaded yet, and loading it would invalidate the CUDA "
            "graph being captured: call cupynorm.warmup(...), or make this very call, once before "
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
            capability = int(cupy.cuda.Device(device).compute_capability)
            try:
                handle = module.get_function(kernel.expression).kernel
            except OSError as error:
                raise RuntimeError(
                    f"{kernel.expression} cannot be kept in CuPy's kernel cache: {error}; "
                    f"{USE_A_FOLDER}, or CUPY_CACHE_IN_MEMORY to 1"
                ) from error
            function = _driver.Kernel(
                kernel.expression,
                handle,
                kernel.block_threads,
                kernel.shared_bytes,
                kernel.parameters,
                kernel.cluster_blocks,
                # On others it changes nothing, but that a launch takes the host longer.
                kernel.overlaps and gpu_of(capability).overlap,
                kernel.at_once,
            )
            _modules[kernel] = module
            _functions[kernel, device] = function
    return function
