"""What a pass does on a device, prepared once: kernels, grids and scratch, on raw addresses.

Nothing here knows arrays: CuPy's, torch's and JAX's calls come together in these. A launch
allocates, compiles and synchronizes nothing. Addresses are integers, 0 for what is absent; strides
are in elements; the device is the current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cupynorm import _jit
from cupynorm._config import (
    ResidentForward,
    StagedBackward,
    StagedForward,
    StreamingBackward,
    backward_config,
    few_rows_config,
    forward_config,
    pack_length,
)
from cupynorm._driver import Kernel
from cupynorm._spec import ITEMSIZE, BackwardSpec, ForwardSpec, compute_dtype

__all__ = ["BackwardPlan", "ForwardPlan", "backward_plan", "forward_plan"]

# The column kernel of the streaming backward uses up to 64 registers at 256 threads.
COLUMN_BLOCKS_PER_MULTIPROCESSOR = 4

WITHOUT_CLUSTERS = 80  # an architecture


@cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a device has."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def architecture(device: int) -> int:
    """Return a device's compute capability, 90 for 9.0."""
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


@dataclass(frozen=True)
class ForwardPlan:
    """A forward pass over rows of n elements, for any number of rows.

    Up to `few_rows` rows are launched with `kernel_of_few`; the bits are the same.
    """

    kernel: Kernel
    n: int
    rows_per_block: int
    cluster_blocks: int
    most_clusters: int | None  # that take rows in turn; None where each has its own
    few_rows: int = 0
    kernel_of_few: Kernel | None = None

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
        bitmask: int,
        eps: float,
        lower: float,
        upper: float,
    ) -> None:
        """Launch it over m rows."""
        blocks = self.blocks(m)
        if blocks == 0:
            return
        n = self.n
        operands = (x, x_stride, weight, bias, y, y_stride, mean, rstd, bitmask)
        self.kernel_for(m).launch(stream, blocks, (*operands, m, n, 1 / n, eps, lower, upper))

    def kernel_for(self, m: int) -> Kernel:
        """Return the kernel that m rows are launched with."""
        few = self.kernel_of_few
        return self.kernel if few is None or m > self.few_rows else few

    def blocks(self, m: int) -> int:
        """Return how many blocks m rows take."""
        clusters = -(-m // self.rows_per_block)
        if self.most_clusters is not None:
            clusters = min(clusters, self.most_clusters)
        return clusters * self.cluster_blocks


@cache
def forward_plan(spec: ForwardSpec, n: int, vector: int, device: int) -> ForwardPlan:
    """Return a forward pass ready to launch on `device`, the current one; compile it at need."""
    config = forward_config(spec, n, vector, architecture(device))
    kernel = _jit.load(_jit.forward_instantiation(spec, config), device)
    clusters = multiprocessors(device)
    if not isinstance(config, ResidentForward) and config.cluster_blocks > 1:
        at_once = kernel.clusters_at_once()
        if at_once == 0:  # a slice of a GPU
            config = forward_config(spec, n, vector, WITHOUT_CLUSTERS)
            kernel = _jit.load(_jit.forward_instantiation(spec, config), device)
        else:
            clusters = at_once
    if isinstance(config, ResidentForward):
        few_rows, kernel_of_few = 0, None
        few = few_rows_config(spec, config)
        if few is not None:
            few_rows = few.rows_per_block * few.blocks_per_multiprocessor * clusters
            kernel_of_few = _jit.load(_jit.forward_instantiation(spec, few), device)
        return ForwardPlan(kernel, n, config.rows_per_block, 1, None, few_rows, kernel_of_few)
    in_turn = isinstance(config, StagedForward)
    return ForwardPlan(kernel, n, 1, config.cluster_blocks, clusters if in_turn else None)


@dataclass(frozen=True)
class BackwardPlan:
    """A backward pass over rows of n elements, for any number of rows.

    Scratch is one row of partial sums a cluster of blocks for each weight gradient, at most
    4 * multiprocessors rows of n values of the compute dtype, and three values a row of x where
    rows are too long for shared memory.
    """

    kernels: tuple[Kernel, ...]
    reduction: Kernel
    n: int
    gradients: int
    itemsize: int  # of the compute dtype
    rows_per_block: int
    cluster_blocks: int
    most_clusters: int
    tiles: int  # of columns, where rows are streamed; else 0
    reduction_blocks: int  # 0 without weight gradients

    def _partials(self, m: int) -> int:
        return min(-(-m // self.rows_per_block), self.most_clusters)

    def _partial_bytes(self, m: int) -> int:
        return -(-self.gradients * self._partials(m) * self.n * self.itemsize // 16) * 16

    def scratch_bytes(self, m: int) -> int:
        """Return the bytes of scratch that a launch over m rows needs, aligned to 16."""
        coefficients = 3 * m * self.itemsize if self.tiles else 0
        return self._partial_bytes(m) + coefficients

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
        bitmask: int,
        dx: int,
        dx_stride: int,
        dweight: int,
        dbias: int,
        scratch: int,
    ) -> None:
        """Launch it over m rows; of none, the weight gradients are 0."""
        n, kernels = self.n, self.kernels
        operands = (dy, dy_stride, x, x_stride, weight, mean, rstd, bitmask)
        partials = self._partials(m)
        if m and self.tiles:
            coefficients = scratch + self._partial_bytes(m)
            rows = (coefficients, m, n, 1 / n)
            kernels[0].launch(stream, m * self.cluster_blocks, (*operands, *rows))
            columns = (coefficients, dx, dx_stride, scratch, partials, m, n)
            kernels[1].launch(stream, self.tiles * partials, (*operands, *columns))
        elif m:
            outputs = (dx, dx_stride, scratch, m, n, 1 / n)
            kernels[0].launch(stream, partials * self.cluster_blocks, (*operands, *outputs))
        if self.reduction_blocks:
            arguments = (scratch, dweight, dbias, partials, n)
            self.reduction.launch(stream, self.reduction_blocks, arguments)


@cache
def backward_plan(spec: BackwardSpec, n: int, vector: int, device: int) -> BackwardPlan:
    """Return a backward pass ready to launch on `device`, the current one; compile it at need."""
    capability = architecture(device)
    config = backward_config(spec, n, vector, capability)
    kernels = _load_backward(spec, config, device)
    rows, tiles = 1, 0
    clusters = at_once = multiprocessors(device)
    if config.cluster_blocks > 1:
        at_once = kernels[0].clusters_at_once()
        if at_once == 0:  # a slice of a GPU
            config = backward_config(spec, n, vector, WITHOUT_CLUSTERS)
            kernels = _load_backward(spec, config, device)
            at_once = clusters
    if isinstance(config, StagedBackward):
        rows = config.rows_per_block
        clusters = at_once
        if config.cluster_blocks == 1:
            clusters *= config.blocks_per_multiprocessor
    else:
        tiles = -(-n // (config.column_threads * pack_length(spec.x)))
        clusters = -(-clusters * COLUMN_BLOCKS_PER_MULTIPROCESSOR // tiles)
    return BackwardPlan(
        kernels=kernels,
        reduction=kernels[-1],
        n=n,
        gradients=spec.gradients,
        itemsize=ITEMSIZE[compute_dtype(spec.x)],
        rows_per_block=rows,
        cluster_blocks=config.cluster_blocks,
        most_clusters=clusters,
        tiles=tiles,
        reduction_blocks=(
            0 if config.reduction is None else spec.gradients * -(-n // config.reduction.columns)
        ),
    )


def _load_backward(
    spec: BackwardSpec, config: StagedBackward | StreamingBackward, device: int
) -> tuple[Kernel, ...]:
    kernels = _jit.backward_instantiations(spec, config)
    return tuple(_jit.load(kernel, device) for kernel in kernels)
