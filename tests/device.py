"""What runs on a GPU shares: arrays there and back, memory of NaN, plans, threads that wait."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
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


def forget_plans() -> None:
    """Have the plans of few rows chosen anew, and calls prepared."""
    from cupynorm import _calls  # which needs CuPy

    _plans.few_rows.cache_clear()
    _plans.few_rows_backward.cache_clear()
    _calls.calls.clear()


@contextlib.contextmanager
def kernels_of_many_rows() -> Iterator[None]:
    """Let few rows have the kernels of many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans, "few_rows_configs", lambda *_: ())
        patch.setattr(_plans, "few_rows_backward_configs", lambda *_, **__: ())
        forget_plans()
        yield
    forget_plans()


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
