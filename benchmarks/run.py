"""Measure all libraries: ``python -m benchmarks.run results.json --set quick``.

Without options it measures the standard set. They narrow it, and a file can be measured in parts:

    python -m benchmarks.run results.json --resume --shapes 32768x4096 8x4096 --backends cupynorm

torch.compile takes most of the time. With `--workers 14` on 16 cores it takes up to 2.4 s a
problem forward and 6.6 s backward. The others together take 3 s. GPUs of one kind can share the
problems, each with a file of its own for `benchmarks.join`. The file names the commit. In a copy
without git, `COMMIT=...` in the environment names it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import problems, results, summary
from benchmarks.backends import ALL, discover
from benchmarks.backends.base import Backend
from benchmarks.display import Display
from benchmarks.host import STATES, first_calls, host_times, line
from benchmarks.measure import failed, measure, reason
from benchmarks.timing import Clock, rotations
from cupynorm import _bench
from cupynorm._bench import Problem
from cupynorm._environment import gpu_problem

TABLES = ("throughput", "host", "first")
Done = set[tuple[Problem, str]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="the JSON file to write")
    several = problems.add_selection(parser, "standard")
    names = [backend.name for backend in ALL]
    about = f"only the limits and some of {problems.one_of(names)}"
    several("--backends", "NAME", about, choices=names)
    several("--tables", "TABLE", f"only some of {problems.one_of(TABLES)}", TABLES, choices=TABLES)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        metavar="T",
        help="start nothing new after T minutes",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="compile ahead in N processes (default: none)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what the results file has, measure the rest"
    )
    # This tells a worker to compile every n-th remaining problem from the i-th on, and measure
    # nothing.
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    options.problems = problems.selected(parser, options)
    if options.results.exists() and not (options.resume or options.compile_share):
        parser.error(f"{options.results} exists: --resume goes on with it, or name another file")
    return options


def compile_ahead(arguments: Sequence[str], workers: int, seconds: float) -> None:
    """Fill the disk caches from several processes, so that measurements find them warm.

    torch.compile's choices in such a crowd are of no use, and go to caches that are dropped. Most
    of its time is the compiling for those choices, and Triton keeps that.
    """
    print(f"compiling ahead in {workers} processes", flush=True)
    command = [sys.executable, "-m", "benchmarks.run", *arguments, "--compile-share"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = [
            subprocess.Popen(
                [*command, str(share), str(workers)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ
                | {
                    "TORCHINDUCTOR_CACHE_DIR": f"{folder}/{share}",
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                },
            )
            for share in range(workers)
        ]
        deadline = time.monotonic() + seconds
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def compile_share(
    chosen: Sequence[Problem], done: Done, share: int, workers: int, names: Any
) -> None:
    """Compile for every n-th problem. Those that tune take longest and come last."""
    import cupy

    backends = [backend for backend in discover(names)[0].values() if backend.compiles]
    left = [
        (problem, todo)
        for tunes in (False, True)
        for problem in chosen
        if (todo := [b for b in backends if b.tunes == tunes and (problem, b.name) not in done])
    ]
    for problem, todo in left[share::workers]:
        for backend in todo:
            # An error is reported where it is measured.
            with contextlib.suppress(Exception):
                backend.prepare(problem, _bench.inputs(problem, 0, cupy)).run()
                backend.synchronize()
            gc.collect()
            backend.release()
        cupy.get_default_memory_pool().free_all_blocks()


def finished(report: dict[str, Any] | None) -> Done:
    """Return what a results file has already."""
    records = [] if report is None else report["measurements"]
    return {(results.problem_of(r), r["backend"]) for r in records}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(arguments)
    missing = gpu_problem()
    if missing:
        print(f"There is nothing to time: {missing}.")
        return 1
    chosen: list[Problem] = options.problems
    # Processes share the code that JAX compiles, and Triton for torch.compile, only if told where.
    # JAX would cache only what took a second.
    for name, folder in (
        ("JAX_COMPILATION_CACHE_DIR", "jax_compilation_cache"),
        ("TRITON_CACHE_DIR", "triton_cache"),
    ):
        os.environ.setdefault(name, str(Path(tempfile.gettempdir()) / folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    resume = options.resume and options.results.exists()
    try:
        report = results.load(options.results, "benchmarks.run") if resume else None
    except ValueError as error:
        raise SystemExit(f"--resume: {error}") from error
    done = finished(report)
    if options.compile_share:
        compile_share(chosen, done, *options.compile_share, options.backends)
        return 0

    started = time.monotonic()
    deadline = started + 60 * options.minutes
    backends, facts = discover(options.backends)
    # A library's own handler says only that it crashed. This one says in which call.
    faulthandler.enable(sys.__stderr__)
    if report is None:
        if options.resume:
            print(f"{options.results} does not exist: it is begun")
        report = results.new(facts, arguments)
    else:
        try:
            results.resume(report, arguments)
        except ValueError as error:
            raise SystemExit(f"--resume: {error}") from error
        report["backends"] |= facts
    compiling = any(backend.compiles for backend in backends.values())
    if options.workers and compiling and "throughput" in options.tables:
        compile_ahead(arguments, options.workers, 60 * options.minutes / 3)

    earlier = report.get("elapsed_seconds", 0.0)

    def save() -> None:
        report["elapsed_seconds"] = earlier + time.monotonic() - started
        results.save(report, options.results)

    clock = Clock()
    stopped = None
    passes = _passes(chosen, backends.values()) if "throughput" in options.tables else []
    as_called = [backend for backend in backends.values() if not backend.emulated]
    with Display(report, list(backends), len(passes)) as display:
        if "host" in options.tables:
            timed = {(r["operation"], r["backend"]) for r in report["host"]}
            for record in host_times(as_called, timed):
                report["host"].append(record)
                display.say(line("host", record))
                save()
        # Imports so far stay. So it is quick to collect what each backend leaves behind.
        gc.collect()
        gc.freeze()
        fresh = True  # this process has measured nothing
        for problem, measured in passes:
            todo = [b for b in measured if (problem, b.name) not in done]
            if todo and time.monotonic() > deadline:
                stopped = f"out of time after {options.minutes:g} minutes"
            elif todo:
                try:
                    stopped = _measure_all(problem, todo, clock, report, display)
                    fresh = False
                except MemoryError as error:
                    # Some libraries keep memory until the process ends. A new process may then have
                    # room, but no more than one that has measured nothing.
                    if fresh:
                        why = f"no memory for the inputs: {reason(error)}"
                        report["measurements"] += [failed(problem, b, why) for b in todo]
                    else:
                        stopped = f"no memory is left for the inputs, {reason(error)}"
            display.finished(problem)
            save()
            if stopped:
                break
        if "first" in options.tables and not stopped:
            called = _called(report)
            left = [backend for backend in as_called if backend.name not in called]
            for record in first_calls(left, deadline):
                others = [r for r in report["first_calls"] if not _same_first_call(r, record)]
                report["first_calls"] = [*others, record]
                display.say(line("first call", record))
                save()
            called = _called(report)
            left = [b for b in left if b.name not in called and b.kind != "limit"]
            if left:
                stopped = f"out of time after {options.minutes:g} minutes"
                display.say(f"no first call of {', '.join(b.name for b in left)}")
        report["complete"] = stopped is None and results.is_whole(report)
        save()
        for name, fact in report["backends"].items():
            display.say(f"{name} {fact}")
        for sentence in map(summary.sentence, summary.summarize(report["measurements"])):
            display.say(sentence)
        if stopped:
            display.say(f"{stopped}: --resume goes on")
        for name, count in _unreached(passes, finished(report)).items():
            display.say(f"{name} was not reached on {count} of {len(chosen)} problems")
    return 1 if stopped else 0


def _called(report: dict[str, Any]) -> set[str]:
    """Return the backends that have all first calls, on the cache that they share."""
    seen = {(r["backend"], r["cache"]) for r in report["first_calls"]}
    return {name for name, _ in seen if seen >= {(name, cache) for cache in STATES}}


def _same_first_call(one: results.Record, other: results.Record) -> bool:
    return all(one[key] == other[key] for key in ("backend", "cache"))


def _passes(
    chosen: Sequence[Problem], backends: Collection[Backend]
) -> list[tuple[Problem, list[Backend]]]:
    """Return what is measured in turn: all problems, and then again by backends that tune."""
    rounds = ([b for b in backends if b.tunes == tunes] for tunes in (False, True))
    return [(problem, measured) for measured in rounds if measured for problem in chosen]


def _unreached(passes: Iterable[tuple[Problem, list[Backend]]], done: Done) -> Counter[str]:
    """Return how many problems each backend was not measured on."""
    return Counter(
        backend.name
        for problem, measured in passes
        for backend in measured
        if (problem, backend.name) not in done
    )


def _measure_all(
    problem: Problem,
    backends: Sequence[Any],
    clock: Clock,
    report: dict[str, Any],
    display: Display,
) -> str | None:
    """Measure a problem; if nothing more can be measured, say why.

    A MemoryError says that its inputs do not fit.
    """
    import cupy

    try:
        sets = [
            _bench.inputs(problem, seed, cupy)
            for seed in range(rotations(problem.bytes, clock.cache_bytes))
        ]
        cupy.get_default_memory_pool().free_all_blocks()
        for backend in backends:
            display.begin(problem, backend.name)
            report["measurements"].append(measure(problem, backend, sets, clock, cupy))
            cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        # An error that outlives its call: no kernel runs in this process any more.
        return f"the GPU was lost, {reason(error)}"
    return None


if __name__ == "__main__":
    sys.exit(main())
