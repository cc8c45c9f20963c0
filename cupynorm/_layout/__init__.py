"""How to compute it: the regime, and how a row is laid over threads.

These are pure functions of the spec, the row length N, the GPU's architecture and `vector`, the
elements of one access. The bits of a row depend on row_threads (block_threads of pipelined rows),
packs_per_thread, pack_length and cluster_blocks, or on strips and strip_threads. These follow from
the spec, N and the architecture alone, and from whether the GPU has room for clusters, or for all
strips at once. vector decides only what does not show in y, the statistics and dx. Few rows may
have another layout, by kernels that give the same bits.

A pack is 16 bytes of x, or 8 if a configuration's pack_length says so. Registers and shared memory
limit what a block may hold. tests/test_compile.py compiles the kernels of some row lengths for
every supported architecture. It fails on a spill that it does not list.

`forward` and `backward` choose, and lay out rows that are read twice. Each other way to lay rows
out has a module. `reduction` sums weight gradients, and `architectures` has the properties of GPUs.
"""

from cupynorm._layout.architectures import (
    gpu_of,
    pack_length,
    shared_limit,
    team_bytes,
    without_clusters,
)
from cupynorm._layout.backward import BackwardConfig, BackwardStreaming, backward_config
from cupynorm._layout.backward_column_parallel import (
    BackwardColumnParallel,
    backward_column_parallel_bytes,
    column_parallel_counts_bytes,
    column_parallel_exchange_bytes,
)
from cupynorm._layout.backward_in_registers import (
    BackwardInRegisters,
    backward_columns_bytes,
    backward_in_registers_bytes,
    few_rows_backward_configs,
)
from cupynorm._layout.backward_pipelined import BackwardPipelined, backward_pipelined_bytes
from cupynorm._layout.forward import ForwardStreaming, forward_config, quantized_config
from cupynorm._layout.forward_in_registers import (
    ForwardInRegisters,
    few_rows_configs,
    forward_in_registers_bytes,
)
from cupynorm._layout.forward_pipelined import ForwardPipelined, forward_pipelined_bytes
from cupynorm._layout.fused import (
    FusedBackward,
    FusedForward,
    fused_backward,
    fused_backward_bytes,
    fused_forward,
    fused_forward_bytes,
)
from cupynorm._layout.reduction import (
    Reduction,
    by_index,
    partials_stride,
    reduction_bytes,
    reduction_of_gradients,
)
from cupynorm._layout.strided import Strided, strided

__all__ = [
    "BackwardColumnParallel",
    "BackwardConfig",
    "BackwardInRegisters",
    "BackwardPipelined",
    "BackwardStreaming",
    "ForwardInRegisters",
    "ForwardPipelined",
    "ForwardStreaming",
    "FusedBackward",
    "FusedForward",
    "Reduction",
    "Strided",
    "backward_column_parallel_bytes",
    "backward_columns_bytes",
    "backward_config",
    "backward_in_registers_bytes",
    "backward_pipelined_bytes",
    "by_index",
    "column_parallel_counts_bytes",
    "column_parallel_exchange_bytes",
    "few_rows_backward_configs",
    "few_rows_configs",
    "forward_config",
    "forward_in_registers_bytes",
    "forward_pipelined_bytes",
    "fused_backward",
    "fused_backward_bytes",
    "fused_forward",
    "fused_forward_bytes",
    "gpu_of",
    "pack_length",
    "partials_stride",
    "quantized_config",
    "reduction_bytes",
    "reduction_of_gradients",
    "shared_limit",
    "strided",
    "team_bytes",
    "without_clusters",
]
