"""RMSNorm and LayerNorm for torch: differentiable functions, and modules that use them.

`replace_norms` makes the norms of a model these modules. With `compile_options`, torch.compile
moves additions and casts into them.

CUDA tensors go to the kernels of this package, on torch's current stream and in memory of torch's
allocator. CPU tensors go to `cupynorm.reference`, which is exact and slow. Autograd, double
backward, forward mode, ``torch.func``, ``torch.compile(fullgraph=True)`` with dynamic shapes,
``torch.export``, ``torch.fx``, activation checkpointing, autocast, CUDA graphs, DTensor, FSDP2, DDP
and nested tensors are supported. ``torch.func.grad`` within ``torch.compile`` is not.
"""

import torch

if torch.__version__ < "2.11.0a0":  # previews of 2.11 call themselves so
    raise ImportError(f"cupynorm.torch needs torch 2.11 or newer, found {torch.__version__}")

from cupynorm.torch._functions import layer_norm, rms_norm
from cupynorm.torch._fuse import Fused
from cupynorm.torch._fusion import compile_options
from cupynorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cupynorm.torch._replace import ReplacedNorms, replace_norms

__all__ = [
    "Fused",
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "ReplacedNorms",
    "compile_options",
    "layer_norm",
    "replace_norms",
    "rms_norm",
]
