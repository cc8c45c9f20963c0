"""One backend on one problem: prepared, checked, captured, timed, and what went wrong if not."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import oracle
from benchmarks.backends.base import Backend, Outputs, Replay
from benchmarks.timing import Clock
from cupynorm._bench import Problem

Record = dict[str, Any]
Check = Callable[[Problem, Backend, dict[str, Any], Outputs, Any], Record]


def check(
    problem: Problem, backend: Backend, inputs: dict[str, Any], outputs: Outputs, xp: Any
) -> Record:
    """Return whether the outputs are right, why not, and the error of each."""
    named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
    return judge(problem, inputs, named, xp)


def judge(
    problem: Problem, inputs: dict[str, Any], named: dict[str, Any], xp: Any, **options: Any
) -> Record:
    """Return the verdict of `benchmarks.oracle`, whose `errors` takes the options."""
    try:
        found = oracle.errors(problem, inputs, named, xp, **options)
    except AssertionError as error:
        return {"status": "wrong", "reason": str(error)}
    wrong = oracle.verdict(found)
    return {
        "status": "wrong" if wrong else "ok",
        "reason": wrong,
        "errors": {name: [_finite(value) for value in e[:2]] for name, e in found.items()},
    }


def measure(
    problem: Problem,
    backend: Backend,
    sets: Sequence[dict[str, Any]],
    clock: Clock,
    xp: Any,
    check: Check = check,
) -> Record:
    """Return the record of a measurement; an exception becomes its reason."""
    record: Record = {**asdict(problem), "bytes": problem.bytes, "backend": backend.name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record |= _measure(problem, backend, sets, clock, xp, check)
    except Exception as error:  # whatever a library raises is its answer
        record |= {"status": "failed", "reason": reason(error)}
    gc.collect()
    try:
        backend.release()
    except Exception as error:
        record.setdefault("reason", reason(error))
    return record


def reason(error: BaseException) -> str:
    """Return the type and the first lines of an error, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _measure(
    problem: Problem,
    backend: Backend,
    sets: Sequence[dict[str, Any]],
    clock: Clock,
    xp: Any,
    check: Check,
) -> Record:
    calls = [backend.prepare(problem, inputs) for inputs in sets]
    record: Record = {"note": calls[0].note}
    checked = backend.kind != "limit"
    backend.poison(problem, sets[0])
    outputs = calls[0].run()
    backend.synchronize()
    if checked:
        record |= check(problem, backend, sets[0], outputs, xp)
        if record["status"] == "wrong":
            return record
    del outputs
    replays: list[Replay] = []
    try:
        for inputs in sets:
            replay = backend.capture(problem, inputs)
            if replay is not None:
                replays.append(replay)
    except Exception as error:
        replays = []
        record["not_captured"] = reason(error)
        backend.synchronize()
    if replays:
        replays[0].launch()
        backend.synchronize()
        if checked:
            again = check(problem, backend, sets[0], replays[0].outputs, xp)
            if again["status"] == "wrong":
                return record | again | {"reason": f"replayed: {again['reason']}"}
    times = backend.measure(clock, calls, replays)
    if backend.not_captured:
        record["not_captured"] = backend.not_captured
    return {"status": "ok", **record, "times": {name: asdict(t) for name, t in times.items()}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows no NaN
