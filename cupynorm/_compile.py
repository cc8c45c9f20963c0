"""From spec and config to a loaded kernel.

An instantiation names one kernel of `kernels/`, with its operation and its layout. Its source is
the kernel with all includes pasted in, and those two after it as short C++. CuPy's disk cache keys
on the source text, so an edited header gives a new key. Each instantiation is one RawModule. It is
compiled when the present device first needs it, and all threads share it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cupynorm import _driver
from cupynorm._environment import USE_A_FOLDER, nvrtc_problem
from cupynorm._fused_source import Spec as FusedSpec
from cupynorm._fused_source import backward_op, forward_op
from cupynorm._layout import (
    BackwardColumnParallel,
    BackwardConfig,
    BackwardInRegisters,
    BackwardPipelined,
    ForwardInRegisters,
    ForwardPipelined,
    ForwardStreaming,
    FusedBackward,
    FusedForward,
    Reduction,
    Strided,
    backward_column_parallel_bytes,
    backward_columns_bytes,
    backward_in_registers_bytes,
    backward_pipelined_bytes,
    forward_in_registers_bytes,
    forward_pipelined_bytes,
    fused_backward_bytes,
    fused_forward_bytes,
    gpu_of,
    reduction_bytes,
    team_bytes,
)
from cupynorm._operation import (
    BACKWARD,
    CPP_TYPES,
    FORWARD,
    BackwardSpec,
    ForwardSpec,
    QuantizedSpec,
    compute_dtype,
)

__all__ = [
    "ARGUMENTS",
    "OPTIONS",
    "Instantiation",
    "arguments_of",
    "backward_instantiations",
    "forward_instantiation",
    "fused_backward_instantiations",
    "fused_forward_instantiation",
    "is_capturing",
    "is_loaded",
    "kernels_directory",
    "load",
    "load_behind",
    "source",
]

# If the compiler chose contractions, they could differ between instantiations, and so could the
# bits of a row. The kernels say where a multiply-add is fused.
OPTIONS = ("-std=c++17", "--fmad=false")


# The members of a struct: each one's name and value, or its type if that is a str.
Members = tuple[tuple[str, str | bool | int], ...]

_FORWARD = ("n_rows", "n_cols", "inv_n", "eps", "lower", "upper", *FORWARD.operands)
_BACKWARD = ("n_rows", "n_cols", "inv_n", *BACKWARD.operands)

# The structs of arguments in kernels/operation.cuh, by the names of their members.
ARGUMENTS = {
    "ForwardArguments": _FORWARD,
    "QuantizedArguments": (*_FORWARD, "scale", "amax"),
    "ForwardPipelinedArguments": (*_FORWARD, "count"),
    "BackwardArguments": _BACKWARD,
    "BackwardPipelinedArguments": (*_BACKWARD, "partials"),
    "BackwardInRegistersArguments": (*_BACKWARD, "means_of_h"),
    "BackwardColumnParallelArguments": (*_BACKWARD, "arrived", "exchange"),
    "ForwardStridedArguments": (*_FORWARD, "n_inner"),
    "BackwardStridedArguments": (*_BACKWARD, "partials", "n_inner"),
    "BackwardStreamingArguments": (*_BACKWARD, "partials", "coefficients", "n_partials"),
    "ReductionArguments": ("n_partials", "n_cols", "partials", "dweight", "dbias"),
}
# Those of a grouped pass begin with these.
_GROUPS = (
    *("n_groups", "n_vectors", "n_repeats", "n_clusters", "n_magic", "n_shift"),
    *("group_step", "row_step", "weight_step", "bias_step"),
)


def arguments_of(struct: str, spec: ForwardSpec | BackwardSpec) -> tuple[tuple[str, str], ...]:
    """Return the members of a struct of arguments with their letters in the format of `struct`."""

    def letter(name: str) -> str:
        if name.startswith("n_") or name.endswith(("_stride", "_step")):
            return "q"
        if name in ("inv_n", "eps", "lower", "upper"):
            return "d" if compute_dtype(spec.x) == "float64" else "f"
        return "P"

    names = (*(_GROUPS if spec.grouped else ()), *ARGUMENTS[struct])
    return tuple((name, letter(name)) for name in names)


@dataclass(frozen=True)
class Instantiation:
    """A kernel of `kernels/` for an operation and a layout, and how it is launched.

    `op` and `layout` are the members of the two structs that are its template arguments.
    `arguments` are those of the struct that it takes. `_driver.Kernel` explains these and the
    others.
    """

    file: str
    name: str
    op: Members
    layout: Members
    arguments: tuple[tuple[str, str], ...]
    block_threads: int
    shared_bytes: int
    cluster_blocks: int = 1
    overlaps: bool = False
    at_once: bool = False
    code: str = ""  # further members of the Op, which are no numbers and no names of types

    def __str__(self) -> str:
        members = ", ".join(f"{name}={_cpp(value)}" for name, value in (*self.op, *self.layout))
        return f"{self.name}<{members}>"

    def expression(self, suffix: str = "") -> str:
        """Return the kernel's name in C++, if the structs' names have a suffix."""
        return f"{self.name}<Op{suffix}, Layout{suffix}>"

    def structs(self, suffix: str = "") -> str:
        """Return the definitions of these structs."""
        op = _struct(f"Op{suffix}", self.op, self.code)
        return op + _struct(f"Layout{suffix}", self.layout)

    def source(self) -> str:
        """Return the whole text that is compiled."""
        head = f"// {self.expression()}, of the Op and Layout at the end; {' '.join(OPTIONS)}\n"
        return f"{head}{source(self.file)}\n// {self.expression()}, of these:\n{self.structs()}"


def _cpp(value: str | bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _struct(name: str, members: Members, code: str = "") -> str:
    lines = (
        f"  using {member} = {value};"
        if isinstance(value, str)
        else f"  static constexpr {type(value).__name__} {member} = {_cpp(value)};"
        for member, value in members
    )
    return "\n".join((f"struct {name} {{", *lines, *((code,) if code else ()), "};", ""))


def _op(options: dict[str, str | bool | int], **dtypes: str | None) -> Members:
    """Return the members of an Op: the options, and the dtypes by the names of their types."""
    return (*((name, CPP_TYPES[dtype]) for name, dtype in dtypes.items()), *options.items())


def _layout(config: Any, only: Iterable[str] = ()) -> Members:
    """Return the members of a Layout: a configuration's fields, or some; kVector for vector.

    A field that is neither a number nor a flag is left out.
    """
    names = only or [field.name for field in dataclasses.fields(config)]
    values = ((name, getattr(config, name)) for name in names)
    return tuple(
        (f"k{name.title().replace('_', '')}", value)
        for name, value in values
        if isinstance(value, int)
    )


def _sharing(spec: ForwardSpec | BackwardSpec) -> dict[str, str | bool | int]:
    return {"kGrouped": spec.grouped, "kRepeats": spec.repeats}


STRIDED = "block_threads", "lanes", "blocks_per_multiprocessor", "scratch_bytes", "vector"


def forward_instantiation(
    spec: ForwardSpec, config: ForwardInRegisters | ForwardPipelined | ForwardStreaming | Strided
) -> Instantiation:
    """Return the kernel of a forward pass."""
    options: dict[str, str | bool | int] = {
        "Prologue": "AddResidual" if spec.residual else "Plain",
        "Epilogue": "Clamp" if spec.relu else "Identity",
        "kCentered": spec.norm == "layer_norm",
        "kZeroCentered": spec.zero_centered,
        "kStoresBits": spec.relu and spec.store_statistics,
        **_sharing(spec),
    }
    read = {"X": spec.x, "Branch": spec.dtypes["x"], "Residual": spec.residual}
    dtypes = read | {"Weight": spec.weight, "Bias": spec.bias, "Y": spec.dtypes["y"]}
    if isinstance(spec, QuantizedSpec):
        options |= {"Epilogue": "Quantize", "kGivenScale": spec.scale_given}
        by_column = spec.column_major and spec.scale_columns > 0
        options |= {"kScaleColumns": spec.scale_columns, "kColumnMajor": by_column}
        options["kFindsAmax"] = spec.amax
        dtypes |= {"Via": spec.y, "Scale": spec.scale}
    op = _op(options, **dtypes)
    if isinstance(config, Strided):
        return Instantiation(
            "forward_strided.cu",
            "norm_forward_strided",
            op,
            _layout(config, STRIDED),
            arguments_of("ForwardStridedArguments", spec),
            config.block_threads,
            config.shared_bytes,
        )
    threads, blocks = config.block_threads, config.cluster_blocks
    if isinstance(config, ForwardInRegisters):
        regime, struct = "in_registers", "ForwardArguments"
        if isinstance(spec, QuantizedSpec):
            struct = "QuantizedArguments"
        shared_bytes = forward_in_registers_bytes(spec, config)
    elif isinstance(config, ForwardPipelined):
        regime, struct = "pipelined", "ForwardPipelinedArguments"
        shared_bytes = forward_pipelined_bytes(spec, config)
    else:
        regime, struct = "streaming", "ForwardArguments"
        shared_bytes = team_bytes(spec.x, threads, threads, blocks)
    return Instantiation(
        f"forward_{regime}.cu",
        f"norm_forward_{regime}",
        op,
        _layout(config),
        arguments_of(struct, spec),
        threads,
        shared_bytes,
        blocks,
    )


def backward_instantiations(
    spec: BackwardSpec, config: BackwardConfig | Strided
) -> tuple[Instantiation, ...]:
    """Return the kernels of a backward pass in the order of their launches.

    The last one sums the partials, if there are any.
    """
    compute = compute_dtype(spec.x)

    def op(dweight: str | None, dbias: str | None, **of_sums: bool) -> Members:
        """Return the Op of a kernel that writes weight gradients of these dtypes, or none."""
        options: dict[str, str | bool | int] = {
            "Epilogue": "Clamp" if spec.bitmask else "Identity",
            "kCentered": spec.norm == "layer_norm",
            "kZeroCentered": spec.zero_centered,
            **_sharing(spec),
            **of_sums,
        }
        dtypes = {"X": spec.x, "DY": spec.dy, "Weight": spec.weight}
        dtypes |= {"DWeight": dweight, "DBias": dbias, "DX": spec.dtypes["dx"]}
        dtypes |= {"DResidualOut": spec.dresidual_out, "DResidual": spec.dresidual}
        return _op(options, **dtypes)

    how_written = {"kGiven": spec.sums_given, "kAccumulates": spec.accumulate}
    gradients = op(spec.dtypes["dweight"], spec.dbias, **how_written)
    partials = op(spec.weight and compute, spec.dbias and compute)
    if isinstance(config, BackwardInRegisters):
        beside_kernel = config.column_threads > 0 and spec.norm == "layer_norm"
        of_gradients = partials if config.reduction is not None or beside_kernel else gradients
        arguments = arguments_of("BackwardInRegistersArguments", spec)
        fields = [f.name for f in dataclasses.fields(config) if f.name != "column_threads"]
        of_rows = config
        if spec.norm == "layer_norm":  # whose kernel does not depend on how many lanes they are
            of_rows = dataclasses.replace(config, column_lanes=min(config.column_lanes, 1))
        passes: tuple[Instantiation, ...] = (
            Instantiation(
                "backward_in_registers.cu",
                "norm_backward_in_registers",
                of_gradients,
                _layout(of_rows, fields),
                arguments,
                config.block_threads,
                backward_in_registers_bytes(spec, config),
                config.cluster_blocks,
            ),
        )
        if beside_kernel:
            of_columns = dataclasses.replace(config, block_threads=config.column_threads)
            # A weight's gradient is the same if it is stored around zero.
            without_weight = (m for m in gradients if m[0] != "kZeroCentered")
            columns = Instantiation(
                "backward_in_registers.cu",
                "norm_backward_in_registers_columns",
                tuple(without_weight),
                _layout(of_columns, ("block_threads", "column_lanes", "vector")),
                arguments,
                config.column_threads,
                backward_columns_bytes(spec, config),
                overlaps=True,
            )
            passes = (*passes, columns)
    elif isinstance(config, BackwardPipelined):
        passes = (
            Instantiation(
                "backward_pipelined.cu",
                "norm_backward_pipelined",
                partials,
                _layout(config),
                arguments_of("BackwardPipelinedArguments", spec),
                config.block_threads,
                backward_pipelined_bytes(spec, config),
                config.cluster_blocks,
            ),
        )
    elif isinstance(config, Strided):
        passes = (
            Instantiation(
                "backward_strided.cu",
                "norm_backward_strided",
                partials,
                _layout(config, STRIDED),
                arguments_of("BackwardStridedArguments", spec),
                config.block_threads,
                config.shared_bytes,
            ),
        )
    elif isinstance(config, BackwardColumnParallel):
        passes = (
            Instantiation(
                "backward_column_parallel.cu",
                "norm_backward_column_parallel",
                gradients,
                _layout(config, ("strip_threads", "group_rows", "vector")),
                arguments_of("BackwardColumnParallelArguments", spec),
                config.block_threads,
                backward_column_parallel_bytes(spec, config),
                at_once=True,
            ),
        )
    else:
        arguments = arguments_of("BackwardStreamingArguments", spec)
        threads = config.row_threads
        passes = (
            Instantiation(
                "backward_streaming.cu",
                "norm_backward_coefficients",
                op(None, None),
                _layout(config, ("cluster_blocks", "row_threads", "vector")),
                arguments,
                threads,
                team_bytes(spec.x, threads, threads, config.cluster_blocks),
                config.cluster_blocks,
            ),
            Instantiation(
                "backward_streaming.cu",
                "norm_backward_columns",
                partials,
                _layout(config, ("column_threads", "vector")),
                arguments,
                config.column_threads,
                0,
            ),
        )
    if config.reduction is None:
        return passes
    written = {"DWeight": spec.dtypes["dweight"], "DBias": spec.dbias}
    of_sums = _op(_sharing(spec) | how_written, X=compute, **written)
    if spec.repeats:
        threads = config.reduction.block_threads
        repeats = Instantiation(
            "reduce_repeats.cu",
            "reduce_repeats",
            of_sums,
            _layout(config.reduction, ("block_threads",)),
            arguments_of("ReductionArguments", spec),
            threads,
            team_bytes(spec.x, threads, threads, 1),
            overlaps=True,
        )
        return (*passes, repeats)
    arguments = arguments_of("ReductionArguments", spec)
    reduction = _sum_of_partials(config.reduction, of_sums, arguments)
    return (*passes, reduction)


def _sum_of_partials(
    reduction: Reduction, op: Members, arguments: tuple[tuple[str, str], ...]
) -> Instantiation:
    return Instantiation(
        "reduce_partials.cu",
        "reduce_partials",
        op,
        _layout(reduction, ("block_threads", "groups", "vector")),
        arguments,
        reduction.block_threads,
        reduction_bytes(reduction),
        overlaps=True,
    )


def fused_forward_instantiation(spec: FusedSpec, config: FusedForward) -> Instantiation:
    """Return the kernel of a forward pass of a norm of `cupynorm.fuse`."""
    op = forward_op(spec)
    return Instantiation(
        "fused_forward.cu",
        "fused_forward",
        (),
        _layout(config),
        op.arguments,
        config.block_threads,
        fused_forward_bytes(spec.compute, config),
        config.cluster_blocks,
        code=op.text,
    )


def fused_backward_instantiations(
    spec: FusedSpec, config: FusedBackward, reduction: Reduction
) -> tuple[Instantiation, ...]:
    """Return the kernels of a backward pass: that of the rows, and then the sums of partials.

    Each of the latter sums two gradients, except the last.
    """
    op = backward_op(spec)
    of_rows = Instantiation(
        "fused_backward.cu",
        "fused_backward",
        (),
        _layout(config),
        op.arguments,
        config.block_threads,
        fused_backward_bytes(spec.x, spec.compute, [dtype for _, dtype in spec.read], config),
        config.cluster_blocks,
        code=op.text,
    )
    names = ARGUMENTS["ReductionArguments"]
    arguments = tuple((name, "q" if name.startswith("n_") else "P") for name in names)
    dtypes = [dtype for _, dtype in spec.sums_over_rows]
    sums = (
        _sum_of_partials(
            reduction,
            _op(
                {"kGrouped": False, "kRepeats": 0, "kGiven": False, "kAccumulates": False},
                X=spec.compute,
                DWeight=dtypes[k],
                DBias=dtypes[k + 1] if k + 1 < len(dtypes) else None,
            ),
            arguments,
        )
        for k in range(0, len(dtypes), 2)
    )
    return (of_rows, *sums)


_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@cache
def kernels_directory() -> Path:
    """Return the directory of the CUDA sources: in the package, or next to it in a checkout."""
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
    """Return a file of `kernels/` with the first include of each file replaced by its text."""
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

# A forked process has no thread that would release those of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)


def is_loaded(kernel: Instantiation, device: int) -> bool:
    """Tell whether a kernel is ready to launch on a device."""
    return (kernel, device) in _functions


def is_capturing() -> bool:
    """Tell whether the current stream is captured into a CUDA graph."""
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())


def load(kernel: Instantiation, device: int) -> _driver.Kernel:
    """Return the kernel on `device`, the current one, ready to launch; compile it if needed.

    Raises
    ------
    RuntimeError
        If it is not loaded while the current stream is captured into a CUDA graph, which loading
        would invalidate. If CuPy cannot write its kernel cache, or finds no NVRTC, or
        one before 12.1.
    cupy.cuda.compiler.CompileException
        If the kernel cannot be compiled.
    """
    function = _functions.get((kernel, device))
    if function is not None:
        return function
    if is_capturing():
        raise RuntimeError(
            f"{kernel} is not loaded yet, and loading it would invalidate the CUDA "
            "graph being captured: call cupynorm.warmup(...), or make this very call, once before "
            "the capture begins"
        )
    return _load(kernel, device)


def load_behind(kernel: Instantiation, device: int) -> None:
    """Load a kernel in a thread of its own. Other threads may capture CUDA graphs meanwhile."""
    import cupy

    _driver.allow_loading_beside_captures()
    cupy.cuda.Device(device).use()
    _load(kernel, device)


def _load(kernel: Instantiation, device: int) -> _driver.Kernel:
    import cupy
    from cupy.cuda.compiler import CompileException

    with _locks.setdefault(kernel, threading.Lock()):
        function = _functions.get((kernel, device))
        if function is None:
            module = _modules.get(kernel)
            if module is None:
                module = cupy.RawModule(
                    code=kernel.source(),
                    options=OPTIONS,
                    name_expressions=[kernel.expression()],
                )
            capability = int(cupy.cuda.Device(device).compute_capability)
            try:
                handle = module.get_function(kernel.expression()).kernel
            except (OSError, RuntimeError, CompileException) as error:
                problem = nvrtc_problem()
                if problem is None and not isinstance(error, OSError):
                    raise
                raise RuntimeError(
                    problem
                    or f"{kernel} cannot be kept in CuPy's kernel cache: {error}; "
                    f"{USE_A_FOLDER}, or CUPY_CACHE_IN_MEMORY to 1"
                ) from error
            function = _driver.Kernel(
                str(kernel),
                handle,
                kernel.block_threads,
                kernel.shared_bytes,
                kernel.arguments,
                kernel.cluster_blocks,
                # Elsewhere it changes nothing, and the launch takes the host longer.
                kernel.overlaps and gpu_of(capability).overlap,
                kernel.at_once,
            )
            _modules[kernel] = module
            _functions[kernel, device] = function
    return function
