"""What the GPU tests share: arrays to the device and back, and memory that holds NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm import NormBackward, NormForward


def to_numpy(array: Any) -> Any:
    """Bring a CuPy array, or a result that holds some, to NumPy."""
    import cupy

    if array is None:
        return None
    if isinstance(array, NormForward | NormBackward):
        return type(array)(*map(to_numpy, array))
    word = f"u{array.dtype.itemsize}"
    return cupy.asnumpy(array.view(word)).view(array.dtype)


def to_cupy(array: Any) -> Any:
    """Bring a NumPy array to the GPU; its bytes travel as integers, whatever CuPy knows of it."""
    import cupy

    if array is None:
        return None
    return cupy.asarray(np.asarray(array).view(f"u{array.dtype.itemsize}")).view(array.dtype)


def poison() -> None:
    """Let CuPy's pool hand out NaN, so that nothing that was not written looks right.

    Every dtype reads 0xFF as NaN. Freed blocks keep what they hold, and the pool splits the large
    one for whatever comes next.
    """
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    cupy.full(1 << 28, 0xFF, np.uint8)
