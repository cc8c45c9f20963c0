"""What the GPU tests share: arrays to the device and back, memory of NaN, threads that wait."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from cupynorm import NormBackward, NormForward, _background, _compile, _plans


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


def threads_that_wait(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let threads compile, with nothing loaded so far. They wait for what is returned."""
    from cupynorm import _calls  # which needs CuPy

    monkeypatch.delenv(_background.SWITCH)
    for name in ("_functions", "_modules", "_locks"):
        monkeypatch.setattr(_compile, name, {})
    monkeypatch.setattr(_background, "_started", {})
    monkeypatch.setattr(_calls, "calls", {})
    for function in vars(_plans).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    load, may_load = _compile.load_behind, threading.Event()

    def load_later(*task: Any) -> None:
        assert may_load.wait(60)
        load(*task)

    monkeypatch.setattr(_compile, "load_behind", load_later)
    return may_load


def wait_for_threads() -> None:
    end = time.monotonic() + 60
    while _background._threads:
        assert time.monotonic() < end
        time.sleep(0.01)
