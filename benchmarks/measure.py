"""One backend on one problem: prepared, checked, captured, timed, or why not."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.backends.base import Backend, Outputs, Replay
from benchmarks.timing import Clock
from cupynorm import _oracle
from cupynorm._bench import Problem

Record = dict[str, Any]

MOST_SAID = 300  # characters that are kept of an error

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
    """Return the verdict of `cupynorm._oracle`. Its `errors` takes the options."""
    try:
        found = _oracle.errors(problem, inputs, named, xp, **options)
    except ValueError as error:
        return {"status": "wrong", "reason": str(error)}
    wrong = _oracle.verdict(found)
    return {
        "status": "wrong" if wrong else "ok",
        "reason": wrong,
        "errors": {name: [finite(value) for value in e[:2]] for name, e in found.items()},
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
    record = _begun(problem, backend)
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


def failed(problem: Problem, backend: Backend, why: str) -> Record:
    """Return the record of a measurement that could not begin."""
    return _begun(problem, backend) | {"status": "failed", "reason": why}


def _begun(problem: Problem, backend: Backend) -> Record:
    return {**asdict(problem), "backend": backend.name}


def reason(error: BaseException) -> str:
    """Return the type and the first lines of an error, on one line."""
    text = " ".join(str(error).split())
    cut = "…" if len(text) > MOST_SAID else ""
    return f"{type(error).__name__}: {text[:MOST_SAID]}{cut}"


def _measure(
    problem: Problem,
    backend: Backend,
    sets: Sequence[dict[str, Any]],
    clock: Clock,
    xp: Any,
    check: Check,
) -> Record:
    calls = [backend.prepare(problem, inputs) for inputs in sets]
    backend.poison(problem, sets[0])
    outputs = calls[0].run()
    backend.synchronize()
    record: Record = {"note": calls[0].note}
    checked = backend.kind != "limit"
    right: list[Any] = []
    if checked:
        right = backend.collect(outputs, xp)
        record |= check(problem, backend, sets[0], outputs, xp)
        if record["status"] == "wrong":
            return record
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
            replayed = backend.collect(replays[0].outputs, xp)
            if not same_bits(right, replayed, xp):
                again = check(problem, backend, sets[0], replays[0].outputs, xp)
                if again["status"] == "wrong":
                    return record | again | {"reason": f"replayed: {again['reason']}"}
    del outputs, right
    times = backend.measure(clock, calls, replays)
    if backend.not_captured:
        record["not_captured"] = backend.not_captured
    return {"status": "ok", **record, "times": {name: asdict(t) for name, t in times.items()}}


def same_bits(right: Sequence[Any], outputs: Sequence[Any], xp: Any) -> bool:
    """Tell whether arrays are like those found right, in dtype, shape and every bit."""

    def same(a: Any, b: Any) -> bool:
        bits = f"u{a.dtype.itemsize}"
        return a.dtype == b.dtype and bool(xp.array_equal(a.view(bits), b.view(bits)))

    return all(same(a, b) for a, b in zip(right, outputs, strict=True))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN
