"""Arrays between libraries, without a copy if they allow it.

They go as integers of the same size, since not every library's DLPack knows bfloat16.
"""

from __future__ import annotations

from typing import Any

from cupynorm._bench import DTYPES


def torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def to_torch(array: Any) -> Any:
    import torch

    bits = torch.from_dlpack(array.view(f"i{array.itemsize}"))
    return bits.view(torch_dtype(array.dtype.name))


def from_torch(tensor: Any, xp: Any) -> Any:
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.detach().contiguous().view(getattr(torch, f"int{8 * tensor.element_size()}"))
    return xp.from_dlpack(bits).view(DTYPES.get(name, name))  # NumPy knows the names of integers


def to_jax(array: Any) -> Any:
    import jax

    bits = jax.dlpack.from_dlpack(array.view(f"u{array.itemsize}"))
    return jax.lax.bitcast_convert_type(bits, array.dtype.name)


def from_jax(array: Any, xp: Any) -> Any:
    import jax

    name = array.dtype.name
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return xp.from_dlpack(jax.block_until_ready(bits)).view(DTYPES[name])
