"""How to compute it: the regime, and how a row is laid over threads.

Pure functions of the spec, the row length N, the GPU's architecture and `vector`, the elements
moved by one access. What the bits of a row depend on (row_threads or, of pipelined rows,
block_threads, packs_per_thread, pack_length, cluster_blocks; strips and their strip_threads)
follows from the spec, N and the architecture alone, and from whether the GPU has room for clusters,
or for strips all at once; vector decides only what does not show in y, the statistics and dx. Few
rows may be laid out otherwise, by kernels that give the same bits.

A pack is 16 bytes of x, or 8 where a configuration's pack_length says so. Registers and shared
memory bound what a block may hold: tests/test_compile.py compiles those of some row lengths for
every supported architecture and fails on a spill that it does not list.

`forward` and `backward` choose, and lay out what is read twice; each other way to lay rows out has
a module. `reduction` sums weight gradients, `architectures` is what a GPU has.
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
from cupynorm._layout.forward import ForwardStreaming, forward_config
from cupynorm._layout.forward_in_registers import (
    ForwardInRegisters,
    few_rows_configs,
    forward_in_registers_bytes,
)
from cupynorm._layout.forward_pipelined import ForwardPipelined, forward_pipelined_bytes
from cupynorm._layout.reduction import partials_stride, reduction_bytes

__all__ = [
    "BackwardColumnParallel",
    "BackwardConfig",
    "BackwardInRegisters",
    "BackwardPipelined",
    "BackwardStreaming",
    "ForwardInRegisters",
    "ForwardPipelined",
    "ForwardStreaming",
    "backward_column_parallel_bytes",
    "backward_columns_bytes",
    "backward_config",
    "backward_in_registers_bytes",
    "backward_pipelined_bytes",
    "column_parallel_counts_bytes",
    "column_parallel_exchange_bytes",
    "few_rows_backward_configs",
    "few_rows_configs",
    "forward_config",
    "forward_in_registers_bytes",
    "forward_pipelined_bytes",
    "gpu_of",
    "pack_length",
    "partials_stride",
    "reduction_bytes",
    "shared_limit",
    "team_bytes",
    "without_clusters",
]
