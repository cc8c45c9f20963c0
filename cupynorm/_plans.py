"""What a pass does on a device, prepared once, on addresses: no array of any framework.

A plan holds loaded kernels. A launch allocates, compiles and synchronizes nothing, so that it can
be captured, and called from whatever owns the memory: addresses and streams are integers, an
absent operand's address is 0, strides of rows count elements. The plan's device must be current.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from cupynorm import _driver, _jit
from cupynorm._config import (
    ResidentForward,
    StreamingBackward,
    backward_config,
    forward_config,
    pack_length,
)
from cupynorm._spec import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

__all__ = ["BackwardPlan", "ForwardPlan", "backward_plan", "forward_plan"]

# The column kernel of the streaming backward uses up to 64 registers at 256 threads.
COLUMN_BLOCKS_PER_MULTIPROCESSOR = 4


def _load(kernel: _jit.Instantiation, device: int, parameters: str) -> _driver.Kernel:
    return _driver.Kernel(
        kernel.expression,
        _jit.load(kernel, device),
        kernel.block_threads,
        kernel.shared_bytes,
        parameters,
    )


def _real(x: str) -> str:
    """Return struct's letter for the compute dtype."""
    return "d" if compute_dtype(x) == "float64" else "f"


@functools.cache
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


# ---- forward -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardPlan:
    """A forward pass over rows of n elements."""

    kernel: _driver.Kernel
    rows_per_block: int
    n: int

    def launch(
        self,
        stream: int,
        m: int,
        x: int,
        x_stride: int,
        weight: int,
        bias: int,
        y: int,
        y_stride: int,
        mean: int,
        rstd: int,
        eps: float,
    ) -> None:
        """Normalize m rows."""
        if m:
            n = self.n
            self.kernel.launch(
                stream,
                -(-m // self.rows_per_block),
                (x, x_stride, weight, bias, y, y_stride, mean, rstd, m, n, 1 / n, eps),
            )


@functools.cache
def forward_plan(spec: ForwardSpec, n: int, vector: int, device: int) -> ForwardPlan:
    """Return a forward pass ready to launch on `device`, the current one.

    `vector` is how many elements one access may move: a power of two up to a pack that divides n,
    every stride and, in elements, every address.
    """
    config = forward_config(spec, n, vector)
    real = _real(spec.x)
    return ForwardPlan(
        _load(_jit.forward_instantiation(spec, config), device, f"PqPPPqPPqq{real}{real}"),
        config.rows_per_block if isinstance(config, ResidentForward) else 1,
        n,
    )


# ---- backward ------------------------------------------------------------------------------------


class BackwardPlan(Protocol):
    """A backward pass over rows of n elements."""

    def scratch_parts(self, m: int) -> tuple[int, ...]:
        """Return the bytes of each array that a pass over m rows keeps in its scratch."""

    def scratch_bytes(self, m: int) -> int:
        """Return the bytes of scratch that a pass over m rows needs, aligned to 16 bytes."""
        return sum(self.scratch_parts(m))

    def launch(
        self,
        stream: int,
        m: int,
        dy: int,
        dy_stride: int,
        x: int,
        x_stride: int,
        weight: int,
        mean: int,
        rstd: int,
        dx: int,
        dx_stride: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        """Compute the gradients of m rows, and their sums; of no rows, these are 0."""


@dataclass(frozen=True)
class _Reduction:
    """The sum of partial weight gradients."""

    kernel: _driver.Kernel
    blocks: int
    n: int

    def launch(self, stream: int, partials: int, dweight: int, dbias: int, n_partials: int) -> None:
        self.kernel.launch(stream, self.blocks, (partials, dweight, dbias, n_partials, self.n))


@dataclass(frozen=True)
class _ResidentBackwardPlan(BackwardPlan):
    """One persistent kernel, each of whose blocks writes a row of partial sums a gradient."""

    kernel: _driver.Kernel
    reduction: _Reduction | None
    rows_per_block: int
    most_blocks: int
    row_bytes: int  # of all gradients
    n: int

    def _blocks(self, m: int) -> int:
        return min(-(-m // self.rows_per_block), self.most_blocks)

    def scratch_parts(self, m: int) -> tuple[int, ...]:
        return (self._blocks(m) * self.row_bytes,)

    def launch(
        self,
        stream: int,
        m: int,
        dy: int,
        dy_stride: int,
        x: int,
        x_stride: int,
        weight: int,
        mean: int,
        rstd: int,
        dx: int,
        dx_stride: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        n, blocks = self.n, self._blocks(m)
        if m:
            self.kernel.launch(
                stream,
                blocks,
                (
                    *(dy, dy_stride, x, x_stride, weight, mean, rstd),
                    *(dx, dx_stride, scratch, m, n, 1 / n),
                ),
            )
        if self.reduction:
            self.reduction.launch(stream, scratch, dweight, dbias, blocks)


@dataclass(frozen=True)
class _StreamingBackwardPlan(BackwardPlan):
    """One kernel for the coefficients of each row, one that walks down the columns."""

    coefficients: _driver.Kernel
    columns: _driver.Kernel
    reduction: _Reduction | None
    tiles: int
    most_chunks: int
    row_bytes: int  # of all gradients
    coefficient_bytes: int
    n: int

    def _chunks(self, m: int) -> int:
        return min(m, self.most_chunks)

    def scratch_parts(self, m: int) -> tuple[int, ...]:
        return self._chunks(m) * self.row_bytes, 3 * m * self.coefficient_bytes

    def launch(
        self,
        stream: int,
        m: int,
        dy: int,
        dy_stride: int,
        x: int,
        x_stride: int,
        weight: int,
        mean: int,
        rstd: int,
        dx: int,
        dx_stride: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        n, chunks = self.n, self._chunks(m)
        if m:
            coefficients = scratch + chunks * self.row_bytes
            operands = (dy, dy_stride, x, x_stride, weight, mean, rstd, coefficients)
            self.coefficients.launch(stream, m, (*operands, m, n, 1 / n))
            self.columns.launch(
                stream,
                self.tiles * chunks,
                (*operands, dx, dx_stride, scratch, chunks, m, n),
            )
        if self.reduction:
            self.reduction.launch(stream, scratch, dweight, dbias, chunks)


@functools.cache
def backward_plan(spec: BackwardSpec, n: int, vector: int, device: int) -> BackwardPlan:
    """Return a backward pass ready to launch on `device`, the current one; `vector` as above."""
    config = backward_config(spec, n, vector)
    kernels = _jit.backward_instantiations(spec, config)
    real, itemsize = _real(spec.x), ITEMSIZE[compute_dtype(spec.x)]
    reduction = None
    if spec.gradients:
        blocks = spec.gradients * -(-n // 32)
        reduction = _Reduction(_load(kernels[-1], device, "PPPqq"), blocks, n)
    row_bytes = spec.gradients * n * itemsize
    multiprocessors = _multiprocessors(device)
    if isinstance(config, StreamingBackward):
        tiles = -(-n // (config.column_threads * pack_length(spec.x)))
        return _StreamingBackwardPlan(
            coefficients=_load(kernels[0], device, f"PqPqPPPPqq{real}"),
            columns=_load(kernels[1], device, "PqPqPPPPPqPqqq"),
            reduction=reduction,
            tiles=tiles,
            most_chunks=-(-multiprocessors * COLUMN_BLOCKS_PER_MULTIPROCESSOR // tiles),
            row_bytes=row_bytes,
            coefficient_bytes=itemsize,
            n=n,
        )
    return _ResidentBackwardPlan(
        kernel=_load(kernels[0], device, f"PqPqPPPPqPqq{real}"),
        reduction=reduction,
        rows_per_block=config.rows_per_block,
        most_blocks=multiprocessors,
        row_bytes=row_bytes,
        n=n,
    )
