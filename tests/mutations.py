"""How many mutants of the kernels the cases on the host notice: `python tests/mutations.py`.

Operators make the mutants from the kernels' text (host/mutants.py). Each mutant is run in a few of
the cases that it changes something in. If they do not notice it, a few dozen of all other cases
follow. A mutant that survives lacks a case, or changes nothing that can be noticed. In that case it
belongs in EQUIVALENT.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import fused_gpu
import quantized_gpu
import test_groups
from fused_gpu import FUSED, check_fused_call
from host.build import Build
from host.checks import (
    ADDRESSES,
    CASES,
    FAR_ROWS,
    FEW,
    OVERFLOWING,
    SUMS,
    Case,
    OfSums,
    check_addresses,
    check_case,
    check_clip_values,
    check_far_rows,
    check_neighbours,
    check_overflows,
    check_sums_of,
    kernels_of,
    may_overflow,
)
from host.gpu import Caller, Gpu, launched
from host.mutants import Mutant, all_mutants, instrumented
from host.pipelined import PIPELINED, Pipelined
from quantized_gpu import QUANTIZED, check_each_number, on_host
from residuals import check_residual, with_residual
from strategies import Layout, scaled
from test_groups import CALLS, Call

from cupynorm._compile import Instantiation

__all__ = ["Check", "all_checks"]


@dataclasses.dataclass(frozen=True)
class Check:
    """A check that may notice a mutant."""

    name: str
    kernels: Callable[[], list[Instantiation]]
    run: Callable[[Build], object]


def _of_case(case: Case, few_rows: bool) -> Check:
    return Check(
        f"{case}{' as few rows' if few_rows else ''}",
        lambda: kernels_of([case], few_rows=few_rows),
        lambda build: check_case(build, case, few_rows=few_rows),
    )


def _of_overflows(case: Case, few_rows: bool) -> Check:
    return Check(
        f"{case} overflowing{' as few rows' if few_rows else ''}",
        lambda: kernels_of([case], few_rows=few_rows),
        lambda build: check_overflows(build, case, few_rows=few_rows),
    )


def _of_pipelined(pipelined: Pipelined) -> Check:
    return Check(str(pipelined), lambda: [pipelined.kernel()], pipelined.check)


def _far_rows(build: Build) -> None:
    for n, architecture in FAR_ROWS:
        check_far_rows(Gpu(build, architecture=architecture), n)


def _with_residual(
    of: tuple[str, int, int],
    architecture: int,
    *,
    dtype: str,
    x: str = "bfloat16",
    few_rows: bool = False,
    overflowing: bool = False,
    multiprocessors: int = 2,
) -> Check:
    """Check x and a residual in rows with gaps. `overflowing`: products of dx overflow."""
    regime = "extreme" if overflowing else "normal"
    case = Case("residual", *of, x, regime=regime, gap=16, multiprocessors=multiprocessors)

    of_gpu = {"multiprocessors": multiprocessors, "architecture": architecture}

    def check(gpu: Gpu) -> None:
        problem = case.problem()
        drawn = with_residual(problem, dtype, dtype, layout=Layout(gap=24))
        if overflowing:  # dy times weight overflows, not dx, which contains that product
            assert drawn.dresidual_out is not None
            wide = {"dy": scaled(problem.dy, 1e20), "weight": scaled(problem.weight, 1e20)}
            drawn = dataclasses.replace(
                drawn,
                problem=dataclasses.replace(problem, **wide),
                dresidual_out=scaled(drawn.dresidual_out, 1e15),
            )
        check_residual(Caller(gpu), drawn)

    def run(build: Build) -> None:
        gpu = Gpu(build, few_rows=few_rows, **of_gpu)
        with gpu.fresh_memory():
            check(gpu)

    name = f"{case} + {dtype} on sm_{architecture}{' as few rows' if few_rows else ''}"
    return Check(
        f"{name}{' overflowing' if overflowing else ''}",
        lambda: launched(check, few_rows=few_rows, **of_gpu),
        run,
    )


# One for each regime that has lines of its own for a residual.
RESIDUALS = (
    *(
        _with_residual(of, architecture, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for of, architecture in (
            (("layer_norm", 37, 40), 90),
            (("rms_norm", 5, 1001), 90),
            (("layer_norm", 9, 4096), 90),
            (("rms_norm", 9, 20000), 90),
            (("layer_norm", 3, 20004), 75),
        )
    ),
    _with_residual(("rms_norm", 3, 2048), 90, dtype="float32", few_rows=True),
    _with_residual(("layer_norm", 5, 131072), 90, dtype="float32", multiprocessors=132),
    _with_residual(("layer_norm", 9, 3072), 80, dtype="bfloat16"),
    _with_residual(("layer_norm", 9, 12288), 90, dtype="float32", x="float32"),
    _with_residual(("layer_norm", 3, 4096), 90, dtype="float32", overflowing=True),
)


def _of_group(call: Call) -> Check:
    return Check(
        str(call),
        lambda: test_groups.kernels_of(call),
        lambda build: test_groups.check_values(build, call, few_rows=False),
    )


GROUPS = tuple(map(_of_group, CALLS))


def _of_sums(of: OfSums) -> Check:
    return Check(str(of), list, lambda build: check_sums_of(build, of))


GIVEN_SUMS = tuple(map(_of_sums, SUMS))


def _of_fused(name: str) -> Check:
    return Check(
        name,
        lambda: fused_gpu.kernels_of(*FUSED[name]),
        lambda build: check_fused_call(build, name),
    )


OF_FUSED = tuple(map(_of_fused, FUSED))


def _of_quantized(name: str) -> Check:
    return Check(
        name,
        lambda: quantized_gpu.kernels_of(name),
        lambda build: quantized_gpu.check_quantized_kernel(Gpu(build), name),
    )


def _each_number(dtype: str, source: str) -> Check:
    return Check(
        f"each quotient of {source} in {dtype}",
        list,
        lambda build: check_each_number(on_host(Gpu(build)), dtype, source),
    )


OF_QUANTIZED = (
    *map(_of_quantized, QUANTIZED),
    *(_each_number(dtype, "boundaries") for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")),
    _each_number("float8_e4m3fn", "bfloat16"),
)

PLACED = next(case for case in ADDRESSES if case.norm == "layer_norm")
# The kernels of these checks are compiled when they run.
OTHERS = [
    *RESIDUALS,
    *GROUPS,
    *GIVEN_SUMS,
    *OF_FUSED,
    *OF_QUANTIZED,
    *(
        Check(name, list, run)
        for name, run in (
            ("rows more than 2**31 elements apart", _far_rows),
            ("values on the bounds of a ReLU", lambda b: check_clip_values(Gpu(b), "float32", 83)),
            (
                "rows beside rows out of range",
                lambda b: check_neighbours(Gpu(b), "layer_norm", "float32", 40),
            ),
            ("rows at other addresses", lambda b: check_addresses(b, PLACED)),
        )
    ),
]


def all_checks() -> Iterator[Check]:
    """Yield the checks, grouped by name: a name stands for the first check that has it."""
    for few_rows, cases in ((False, CASES), (True, FEW)):
        yield from (_of_case(case, few_rows) for case in cases)
        yield from (_of_overflows(case, few_rows) for case in CASES if may_overflow(case))
    yield from map(_of_pipelined, PIPELINED)
    yield from OTHERS


def by_hand() -> list[str]:
    """Return the names of the checks that notice the mutations made by hand."""
    text = (Path(__file__).parent / "data" / "mutations.txt").read_text(encoding="utf-8")
    return [block.strip("\n").split("\n")[-1].split(": ", 1)[1] for block in text.split("\n\n")]


# These notice most of the other mutants: rows out of range, and rows that are computed again.
NAMED = ("range_", "stream_infinite", "stream_nonfinite", "outlier", "minute_2", "two_blocks")
WILD = ("cluster_tiles, rms_norm", "stream, rms_norm", "warps")


def few_checks(step: int = 1) -> list[Check]:
    """Return the checks that notice most for the time that they take, one in `step`."""
    every = list(all_checks())
    # Checks of rows that are computed again take long, so only these few are in.
    names = {name for name in by_hand() if "overflowing" not in name}
    names |= {f"{OVERFLOWING[name]} overflowing" for name in WILD}
    names |= {str(case) for case in CASES if case.name.startswith(NAMED) and case.x == "float32"}
    some = (*GROUPS, *GIVEN_SUMS, *OF_FUSED, *OF_QUANTIZED)
    alone = (*RESIDUALS, *some)
    names |= {check.name for check in some}
    # A name stands for the first check that has it.
    few = {check.name: check for check in reversed(every) if check.name in names}
    return [check for check in few.values() if check in alone or check not in OTHERS][::step]


def other_checks(every: int) -> list[Check]:
    few = {check.name for check in few_checks()}
    others = {check.name: check for check in all_checks() if check not in OTHERS}
    return [check for name, check in others.items() if name not in few][::every]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the check that noticed it, and how, or None."""

    check: str | None
    message: str


def _in_processes(tasks: Sequence[Callable[[], str]]) -> Iterator[tuple[int, str]]:
    """Run each task in a process that may die. Yield its number and what it returns."""
    waiting = list(range(len(tasks)))[::-1]
    running: dict[int, tuple[int, int, bytes]] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            number = waiting.pop()
            ours, theirs = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(ours)
                answer = tasks[number]().encode()
                while answer:
                    answer = answer[os.write(theirs, answer) :]
                os._exit(0)
            os.close(theirs)
            running[ours] = number, pid, b""
        for ours in select.select(list(running), [], [])[0]:
            number, pid, answer = running[ours]
            if part := os.read(ours, 1 << 16):
                running[ours] = number, pid, answer + part
                continue
            os.close(ours)
            _, status = os.waitpid(pid, 0)
            del running[ours]
            yield number, answer.decode() if not status else f"killed by signal {status}"


def _asked(build: Build, checks: Sequence[Check], count: int) -> Iterator[tuple[int, float, bytes]]:
    """Yield each check's number, how long it takes, and the mutants that would change it."""

    def task(check: Check) -> str:
        build.runtime.library.choose_mutant(-1)
        begin = time.perf_counter()
        check.run(build)
        seconds = time.perf_counter() - begin
        asked = (str(i) for i in range(count) if build.runtime.library.mutant_asked(i))
        return f"{seconds}:{','.join(asked)}"

    for number, answer in _in_processes([lambda c=c: task(c) for c in checks]):
        seconds, _, asked = answer.partition(":")
        if not asked and "signal" in answer:
            raise RuntimeError(f"{checks[number].name} fails without a mutant: {answer}")
        yield number, float(seconds), [int(i) for i in asked.split(",") if i]


def outcomes(
    chosen: Sequence[Mutant],
    checks: Sequence[Check],
    most: int = 12,
    log: Callable[[str], None] = lambda _: None,
) -> dict[Mutant, Outcome]:
    """Run each mutant in the checks that it could change, until one notices it."""
    build = Build(added=instrumented(chosen))
    begin = time.perf_counter()
    kernels = [kernel for check in checks for kernel in check.kernels()]
    build.compile(kernels)
    log(f"{len(checks)} checks compiled in {time.perf_counter() - begin:.0f} s")
    for kernel in kernels:
        build.load(kernel)
    begin = time.perf_counter()
    by_mutant: list[list[tuple[float, int]]] = [[] for _ in chosen]
    for number, seconds, asked in _asked(build, checks, len(chosen)):
        for mutant in asked:
            by_mutant[mutant].append((seconds, number))
    log(f"run once in {time.perf_counter() - begin:.0f} s")

    def task(mutant: int) -> str:
        # The quickest checks, and some of the others.
        mine = sorted(by_mutant[mutant])
        quick, slow = mine[: most * 2 // 3], mine[most * 2 // 3 :]
        for seconds, number in quick + slow[:: 1 + 3 * len(slow) // most]:
            # A run that takes longer is in an endless loop without an access.
            signal.setitimer(signal.ITIMER_REAL, 5 + 20 * seconds)
            build.runtime.library.choose_mutant(mutant)
            try:
                checks[number].run(build)
            except AssertionError as error:
                return f"{checks[number].name}\n{error}"
            except Exception as error:
                return f"{checks[number].name}\n{type(error).__name__}: {error}"
        return ""

    found = {}
    for number, answer in _in_processes([lambda m=m: task(m) for m in range(len(chosen))]):
        if "signal" in answer[:16]:
            found[chosen[number]] = Outcome("", answer)
        elif answer:
            found[chosen[number]] = Outcome(*answer.split("\n", 1))
        else:
            message = "passes" if by_mutant[number] else "no check is any different"
            found[chosen[number]] = Outcome(None, message)
    return found


# Mutants whose change no check could notice: operator, a text of the line, and the reason.
EQUIVALENT = (
    ("the bound itself", "a > b ? a : b", "equal numbers"),
    ("the bound itself", "variance < T(0) ? T(0) : variance", "zero is zero"),
    ("always so", "if (team.any(far))", "what was not far is measured again, and not used"),
    ("always so", "if (!in_words)", "what was read by words is read once more"),
    ("left of || dropped", "kTeams == 1 || row <", "the block's row exists"),
    ("term dropped", "(shift[i] + offset[i]) * unit[i]", "shift is their sum, rounded"),
    ("the bound itself", "other < kWarps", "what is loaded behind the last warp's is zero"),
    ("right of && dropped", "write_words<2>(pack.words, memory, 0)", "then no lane writes it"),
    ("term dropped", "last = (n_cols - 1) / kColumns", "a tile behind the row's end has nothing"),
    ("+ for -", "last = (n_cols - 1) / kColumns", "a tile behind the row's end has nothing"),
    ("factor dropped", "last = (n_cols - 1) / kColumns", "the same of many tiles"),
    ("always so", "raise_to(args.amax, of_warp)", "all lanes raise it to the same number"),
)


def sample(count: int) -> list[Mutant]:
    """Return `count` mutants, equally many of each file: those with the smallest hashes."""
    groups: dict[str, list[tuple[str, Mutant]]] = {}
    for mutant in all_mutants():
        if not any(what == mutant.operator and text in mutant.line for what, text, _ in EQUIVALENT):
            digest = hashlib.sha256(str(mutant).encode()).hexdigest()
            groups.setdefault(mutant.file, []).append((digest, mutant))
    ranked = [
        (rank, digest, mutant)
        for group in groups.values()
        for rank, (digest, mutant) in enumerate(sorted(group, key=lambda one: one[0]))
    ]
    return [mutant for *_, mutant in sorted(ranked, key=lambda one: one[:2])[:count]]


KINDS = (
    ("values", "times the bound|wrong bits|bits of|not equal|must be|not close"),
    ("races", "race"),
    ("out of bounds", "out of bounds|outside a local array|shift|overflow"),
    ("unwritten", "uninitialized|never written"),
    ("barriers", "no thread can go on|disagree|mailbox|arrived|has ended|twice"),
    ("no end", "does not end|signal 14"),
    ("misaligned", "misaligned"),
    ("crashes", "signal"),
)


def _kind(message: str) -> str:
    return next((kind for kind, what in KINDS if re.search(what, message)), "others")


def log(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sample", type=int, metavar="N", default=1 << 30, help="N of them, chosen by their lines")
    add("--only", metavar="TEXT", default="", help="those whose description has the text")
    add("--quick", action="store_true", help="half of the checks, and no others for survivors")
    add("--every", type=int, metavar="K", default=1, help="of these, in each K-th")
    add(
        "--least", type=float, default=0, help="exit with an error below this share of noticed ones"
    )
    add("--verbose", action="store_true", help="say what each is noticed by")
    options = parser.parse_args()
    chosen = [mutant for mutant in sample(options.sample) if options.only in str(mutant)]
    begin = time.perf_counter()
    found = outcomes(chosen, few_checks(2 if options.quick else 1), log=log)
    survivors = [mutant for mutant, outcome in found.items() if outcome.check is None]
    if survivors and not options.quick:
        log("\n".join((f"{len(survivors)} of {len(chosen)} survive these:", *map(str, survivors))))
        found |= outcomes(survivors, other_checks(options.every), 40, log)
        survivors = [mutant for mutant, outcome in found.items() if outcome.check is None]
    print(f"{len(chosen)} mutants in {time.perf_counter() - begin:.0f} s")
    print(Counter(_kind(o.message) for o in found.values() if o.check is not None))
    print(Counter(o.message for o in found.values() if o.check is None))
    if options.verbose:
        for mutant, outcome in found.items():
            if outcome.check is not None:
                print(f"{mutant}\n    {outcome.check}: {outcome.message[:300]}")
    for mutant in sorted(survivors, key=str):
        print(f"survives ({found[mutant].message}): {mutant}")
    share = 1 - len(survivors) / len(chosen)
    print(f"{share:.1%} of {len(chosen)} noticed")
    if share < options.least:
        sys.exit(f"fewer than {options.least:.0%} of the mutants are noticed")


if __name__ == "__main__":
    main()
