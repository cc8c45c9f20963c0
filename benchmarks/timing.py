"""How long work takes: on the device as called, on the device alone, and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cupynorm._bench import Clock, Timing

__all__ = [
    "Clock",
    "Timing",
    "host_seconds",
    "launch_seconds",
    "profiled",
    "rotations",
    "wall_clock",
]


def rotations(problem_bytes: int, cache_bytes: int) -> int:
    """Return how many sets of arrays take turns; a large one evicts itself.

    For a small one the addresses matter too: 16 sets of 64 x 4096 took 4.8 to 5.4 us, each the same
    time whenever it was measured (RMSNorm, bfloat16, H200). Rounds of such short runs have each of
    50 twice.
    """
    if problem_bytes > 4 * cache_bytes:
        return 1
    return 50 if problem_bytes <= cache_bytes // 8 else 2


def host_seconds(call: Callable[[], object], synchronize: Callable[[], object]) -> Timing:
    """Return the host's time of a call: many in a row, without waiting for the device."""
    times = []
    for calls in (100, 1000, 1000, 1000):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
        synchronize()
    return Timing.of([[seconds] for seconds in times[1:]])


def wall_clock(calls: Sequence[Callable[[], object]], wait: Callable[[Any], object]) -> Timing:
    """Return the time of a call in a queue of calls.

    It includes the host's time where that is longer, and the L2 is not flushed. It is the last
    resort, for a library with its own streams.
    """
    rounds = []
    for count in (5, 20, 20, 20):
        start = time.perf_counter()
        for run in range(count):
            result = calls[run % len(calls)]()
        wait(result)
        rounds.append([(time.perf_counter() - start) / count])
    return Timing.of(rounds[1:])


def profiled(
    calls: Sequence[Callable[[], object]],
    wait: Callable[[Any], object],
    flush: Callable[[], object],
    synchronize: Callable[[], object],
    launch: float = 0.0,
) -> Timing:
    """Return `launch` and the time that a call's kernels run, by torch's profiler.

    The profiler sees the kernels of the whole process, on any stream, JAX's too. Each run comes
    after a flush. Gaps between the kernels of a call do not count. Its memsets do not count either,
    since the flush's have the same name. All rounds, of ten runs or one of each call, are one
    session, since starting one takes long.
    """
    import torch

    runs = max(10, len(calls))
    total = Clock.ROUNDS * runs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for run in range(total):
            flush()
            synchronize()
            wait(calls[run % len(calls)]())
            synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.elapsed_us())
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(Clock.FLUSHES)
    )
    if not kernels or len(kernels) % total:
        raise RuntimeError(f"the profiler saw {len(kernels)} kernels in {total} runs")
    each = len(kernels) // total
    durations = [1e-6 * elapsed for _, elapsed in kernels]
    times = [launch + sum(durations[i : i + each]) for i in range(0, len(durations), each)]
    return Timing.of([times[i : i + runs] for i in range(0, total, runs)])


def launch_seconds(clock: Clock, launches: Sequence[Callable[[], object]]) -> float:
    """Return what events around CUDA graphs add to the time that `profiled` has of them."""
    import cupy

    synchronize = cupy.cuda.Device().synchronize
    synchronize()  # unfinished work would be in the profile
    alone = profiled(launches, lambda _: None, clock.flush, synchronize)
    return clock.measure(launches).median - alone.median
