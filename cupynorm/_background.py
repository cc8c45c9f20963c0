"""Kernels that threads compile while calls go on.

NVRTC lets other threads run. What a thread has compiled is the same kernel that a call would have
compiled. A call that needs a kernel which a thread is compiling waits for it. If it is still
queued, the call compiles it, or waits for its turn if the call is captured.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from cupynorm import _compile, _driver
from cupynorm._compile import Instantiation

__all__ = ["SWITCH", "is_on", "is_wanted_now", "load", "start"]

SWITCH = "CUPYNORM_BACKGROUND"  # a variable of the environment; 0 turns all this off
MOST_THREADS = 8  # a backward pass over any number of rows has about as many kernels

_Task = tuple[Instantiation, int]

_lock = threading.Lock()
_waiting: deque[_Task] = deque()
_threads = 0
_started: dict[_Task, Future[None]] = {}  # of the kernels that threads load or loaded


def is_on() -> bool:
    """Tell whether threads may compile."""
    return os.environ.get(SWITCH, "1") != "0"


def start(kernels: Iterable[Instantiation], device: int) -> None:
    """Have threads load kernels on a device, except those that are loaded or were started.

    Nothing is started while the current stream is captured into a CUDA graph.
    """
    global _threads
    if not is_on() or _compile.is_capturing():
        return
    for kernel in kernels:
        task = kernel, device
        with _lock:
            if task in _started or _compile.is_loaded(*task):
                continue
            _started[task] = Future()
            _waiting.append(task)
            has_threads = _threads >= _most_threads()
            _threads += not has_threads
        if not has_threads:
            try:
                threading.Thread(target=_work, name="cupynorm").start()
            except BaseException as error:
                _give_up()
                # A RuntimeError says that the interpreter exits, or that there are no more threads.
                if not isinstance(error, RuntimeError):
                    raise


def is_wanted_now(kernel: Instantiation, device: int) -> bool:
    """Tell whether a call should have this kernel, even if it has to wait for it.

    That is so if it is loaded, or if threads are turned off. It is so if the threads are done with
    it and it is not loaded: the call shall meet the error. And it is so if the call is captured
    into a CUDA graph, which would keep another kernel for ever.
    """
    if not is_on() or _compile.is_loaded(kernel, device) or _compile.is_capturing():
        return True
    started = _started.get((kernel, device))
    return started is not None and started.done()


def load(kernels: Iterable[Instantiation], device: int) -> tuple[_driver.Kernel, ...]:
    """Return the kernels on the current device. Compile what is missing.

    The caller compiles the first, and threads compile the others meanwhile. `_compile.load` says
    what it raises. A call that is captured waits for what was given to threads before, and raises
    what they raised.
    """
    first, *others = kernels
    if others:
        start(others, device)
    return tuple(_loaded(kernel, device) for kernel in (first, *others))


def _loaded(kernel: Instantiation, device: int) -> _driver.Kernel:
    started = _started.get((kernel, device))
    if started and not _compile.is_loaded(kernel, device) and _compile.is_capturing():
        started.result()
    return _compile.load(kernel, device)


def _most_threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(max((usable or 1) - 1, 1), MOST_THREADS)


def _work() -> None:
    """Load one kernel after another, until none waits."""
    global _threads
    while True:
        with _lock:
            if not _waiting:
                _threads -= 1
                return
            task = _waiting.popleft()
        try:
            if threading.main_thread().is_alive():  # else the interpreter waits for this thread
                _compile.load_behind(*task)
        except Exception as error:  # the call that needs the kernel meets the same
            _started[task].set_exception(error)
        else:
            _started[task].set_result(None)


def _give_up() -> None:
    """Leave what waits to the calls that need it, if there is no thread for it."""
    global _threads
    with _lock:
        _threads -= 1
        if _threads:
            return
        left = list(_waiting)
        _waiting.clear()
    for task in left:
        _started[task].set_result(None)


def _begin_anew() -> None:
    """Forget, in a forked process, the threads of its parent."""
    global _lock, _threads
    _lock, _threads = threading.Lock(), 0
    _waiting.clear()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
