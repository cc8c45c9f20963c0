"""How to compute it: the regime, and how a row is laid over threads.

Pure functions of the spec, the row length N, the GPU's architecture and `vector`, the elements
moved by one access. What the bits of a row depend on (row_threads or, of staged rows,
block_threads, packs_per_thread, pack_length, cluster_blocks; strips and their strip_threads)
follows from the spec, N and the architecture alone, and from whether the GPU has room for clusters,
or for strips all at once; vector decides only what does not show in y, the statistics and dx. Few
rows may be laid out otherwise, by kernels that give the same bits.

A pack is 16 bytes of x, or 8 where a configuration's pack_length says so. Registers and shared
memory bound what a block may hold: tests/test_compile.py compiles those of some row lengths for
every supported architecture and fails on a spill that it does not list.

`_forward` and `_backward` choose, and lay out what is read twice; each other way to lay rows out
has a module: `_resident`, `_few_rows`, `_staged`, `_strips`. `_reduction` sums weight gradients,
`_limits` is what a GPU has.
"""

from cupynorm._config._backward import BackwardConfig, StreamingBackward, backward_config
from cupynorm._config._backward_resident import (
    ResidentBackward,
    few_rows_backward_configs,
    resident_backward_bytes,
    resident_columns_bytes,
)
from cupynorm._config._backward_staged import StagedBackward, staged_backward_bytes
from cupynorm._config._backward_strips import (
    StripsBackward,
    strips_backward_bytes,
    strips_counts_bytes,
    strips_exchange_bytes,
)
from cupynorm._config._forward import StreamingForward, forward_config
from cupynorm._config._forward_few_rows import few_rows_configs
from cupynorm._config._forward_resident import ResidentForward, resident_forward_bytes
from cupynorm._config._forward_staged import StagedForward, staged_forward_bytes
from cupynorm._config._limits import (
    FIRST_WITH_OVERLAP,
    pack_length,
    shared_limit,
    team_bytes,
)
from cupynorm._config._reduction import partials_stride, reduction_bytes

__all__ = [
    "FIRST_WITH_OVERLAP",
    "BackwardConfig",
    "ResidentBackward",
    "ResidentForward",
    "StagedBackward",
    "StagedForward",
    "StreamingBackward",
    "StreamingForward",
    "StripsBackward",
    "backward_config",
    "few_rows_backward_configs",
    "few_rows_configs",
    "forward_config",
    "pack_length",
    "partials_stride",
    "reduction_bytes",
    "resident_backward_bytes",
    "resident_columns_bytes",
    "resident_forward_bytes",
    "shared_limit",
    "staged_backward_bytes",
    "staged_forward_bytes",
    "strips_backward_bytes",
    "strips_counts_bytes",
    "strips_exchange_bytes",
    "team_bytes",
]
