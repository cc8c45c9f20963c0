"""What the GPU tests share: arrays to the device and back, and memory that holds NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm import NormBackward, NormForward


def to_numpy(array: Any) -> Any:
    """Return a CuPy array, or a result that holds some, as NumPy arrays."""
    import cupy

    if array is None:
        return None
    if isinstance(array, NormForward | NormBackward):
        return type(array)(*map(to_numpy, array))
    word = f"u{array.dtype.itemsize}"
    return cupy.asnumpy(array.view(word)).view(array.dtype)


def to_cupy(array: Any) -> Any:
    """Bring a NumPy array to the GPU. Its bytes travel as integers: CuPy may lack the dtype."""
    import cupy

    if array is None:
        return None
    return cupy.asarray(np.asarray(array).view(f"u{array.dtype.itemsize}")).view(array.dtype)


def poison() -> None:
    """Make CuPy's pool hand out NaN, so that memory that nothing wrote does not look right.

    Every dtype reads 0xFF as NaN. Freed blocks keep their contents, and the pool splits the large
    block for later arrays.
    """
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    cupy.full(1 << 28, 0xFF, np.uint8)
