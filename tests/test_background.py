"""Threads that compile kernels while calls go on, with a compiler that waits until it is told."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynorm import _background, _compile, _driver, _plans, _warmup
from cupynorm._operation import BackwardSpec, ForwardSpec

cupy = pytest.importorskip("cupy", exc_type=ImportError)

FORWARD = ForwardSpec("rms_norm", "bfloat16", "float32", None, "bfloat16", False, False, False)
BACKWARD = BackwardSpec("layer_norm", "bfloat16", "bfloat16", "float32", "float32", False, False)
N, VECTOR = 4096, 8
FEW, MANY = 16, 10**6  # rows
SOON = 10.0  # seconds, in which a thread gets its turn on any machine
devices = itertools.count(2000)  # plans of each test are its own


def made_kernel(name: str, *rest: Any) -> Any:
    return SimpleNamespace(name=name, clusters_at_once=lambda alone=False: 1)


class Compiler:
    """It makes kernels when `may_end` is set; those in `wrong` never."""

    def __init__(self) -> None:
        self.device = next(devices)
        self.begun: list[Any] = []
        self.made: list[Any] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.wrong: set[Any] = set()
        self.capturing = False

    def module(self, code: str, **options: Any) -> Any:
        """Stand for cupy.RawModule."""
        return SimpleNamespace(get_function=lambda name: self._compile(code))

    def _compile(self, code: str) -> Any:
        self.begun.append(code)
        assert self.may_end.wait(SOON)
        if code in self.wrong:
            raise RuntimeError("it cannot be compiled")
        self.made.append(code)
        return SimpleNamespace(kernel=None)

    def forward(self, m: int, soon: bool = True, n: int = N) -> Any:
        return _plans.forward_plan(FORWARD, m, n, VECTOR, self.device, soon=soon)

    def backward(self, m: int, n: int = N, spec: BackwardSpec = BACKWARD) -> Any:
        return _plans.backward_plan(spec, m, n, VECTOR, self.device, soon=True)

    def kernel_of_many(self) -> Any:
        *_, kernel = _plans.kernels_of(FORWARD, N, VECTOR, self.device, dx_given=False)
        return kernel


def until(condition: Any) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def at_rest() -> bool:
    return _background._threads == 0 and not _background._waiting


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    device = SimpleNamespace(compute_capability="90", use=lambda: None, id=made.device)
    monkeypatch.setattr(cupy.cuda, "Device", lambda index=None: device)
    monkeypatch.setattr(cupy, "RawModule", made.module)
    monkeypatch.setattr(_driver, "allow_loading_beside_captures", lambda: None)
    monkeypatch.setattr(_driver, "Kernel", made_kernel)
    monkeypatch.setattr(_compile, "is_capturing", lambda: made.capturing)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    monkeypatch.setattr(_background, "_most_threads", lambda: 4)
    for name in ("_functions", "_modules", "_locks"):
        monkeypatch.setattr(_compile, name, {})
    monkeypatch.setattr(_background, "_started", {})
    monkeypatch.delenv(_background.SWITCH, raising=False)
    yield made
    made.may_end.set()
    until(at_rest)


def test_a_kernel_with_the_same_bits_stands_in(compiler: Compiler) -> None:
    few = compiler.forward(FEW)
    assert not few.stands_in
    compiler.may_end.clear()
    for _ in range(3):
        plan = compiler.forward(MANY)  # it would wait for `may_end`
        assert plan.stands_in
        assert plan.kernel is few.kernel
    assert compiler.forward(FEW) is few
    until(lambda: len(compiler.begun) == 2)
    compiler.may_end.set()
    until(lambda: not compiler.forward(MANY).stands_in)
    own = compiler.forward(MANY)
    assert own.kernel is not few.kernel
    assert own is compiler.forward(MANY, soon=False)
    assert len(compiler.begun) == len(compiler.made) == 2


def test_the_plan_of_many_rows_stands_in_for_that_of_few(compiler: Compiler) -> None:
    many = compiler.forward(MANY)
    compiler.may_end.clear()
    assert compiler.forward(FEW).kernel is many.kernel
    assert len(compiler.made) == 1


def test_the_kernel_of_the_most_rows_stands_in(compiler: Compiler) -> None:
    n = 16384
    tiers = _plans.few_rows(FORWARD, n, VECTOR, compiler.device)
    fewest, more = (compiler.forward(most, soon=False, n=n) for most, _ in tiers[:2])
    assert fewest.kernel is not more.kernel
    compiler.may_end.clear()
    assert compiler.forward(MANY, n=n).kernel is more.kernel


def test_a_call_that_is_prepared_each_time_starts_nothing_again(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (FEW, MANY):
        compiler.forward(m, soon=False)
        compiler.forward(m)
        compiler.backward(m)
    until(at_rest)
    for module, name in (
        (_background, "start"),
        (_compile, "forward_instantiation"),
        (_compile, "backward_instantiations"),
    ):
        monkeypatch.setattr(module, name, None)
    for m in (FEW, MANY):
        assert compiler.forward(m)
        assert compiler.backward(m)


def test_a_plan_that_is_not_wanted_soon_waits_for_its_own_kernel(compiler: Compiler) -> None:
    few = compiler.forward(FEW, soon=False)
    many = compiler.forward(MANY, soon=False)
    assert not many.stands_in
    assert few.kernel is not many.kernel


def test_nothing_stands_in_if_it_is_turned_off(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_background.SWITCH, "0")
    few, many = compiler.forward(FEW), compiler.forward(MANY)
    assert not many.stands_in
    assert few.kernel is not many.kernel
    compiler.backward(FEW)
    assert len(compiler.made) == 4
    assert at_rest()
    assert not _background._started


def test_a_call_meets_the_error_that_a_thread_met(compiler: Compiler) -> None:
    compiler.forward(FEW)
    compiler.wrong.add(compiler.kernel_of_many().source())
    assert compiler.forward(MANY).stands_in
    until(at_rest)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="it cannot be compiled"):
            compiler.forward(MANY)
    assert compiler.forward(FEW).kernel


def test_a_captured_call_waits_for_a_thread(compiler: Compiler) -> None:
    few = compiler.forward(FEW)
    compiler.may_end.clear()
    assert compiler.forward(MANY).stands_in
    compiler.capturing = True
    threading.Timer(0.05, compiler.may_end.set).start()
    plan = compiler.forward(MANY)
    assert not plan.stands_in
    assert plan.kernel is not few.kernel


def test_a_captured_call_meets_the_error_of_the_thread_that_it_waited_for(
    compiler: Compiler,
) -> None:
    compiler.forward(FEW)
    compiler.wrong.add(compiler.kernel_of_many().source())
    compiler.may_end.clear()
    assert compiler.forward(MANY).stands_in
    compiler.capturing = True
    threading.Timer(0.05, compiler.may_end.set).start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="it cannot be compiled"):
            compiler.forward(MANY)
    compiler.wrong.clear()  # as if a folder could be written again
    compiler.capturing = False
    kernel = compiler.forward(MANY).kernel
    compiler.capturing = True
    _plans.forward_plan_of.cache_clear()
    assert compiler.forward(MANY).kernel is kernel


def test_nothing_is_compiled_for_a_captured_call(compiler: Compiler) -> None:
    few = compiler.forward(FEW)
    compiler.capturing = True
    assert compiler.forward(FEW) is few
    with pytest.raises(RuntimeError, match="would invalidate the CUDA graph being captured"):
        compiler.forward(MANY)  # the graph would keep what stands in
    with pytest.raises(RuntimeError, match="would invalidate the CUDA graph being captured"):
        compiler.backward(MANY)
    assert len(compiler.begun) == 1
    assert not _background._started


def test_the_kernels_of_other_numbers_of_rows_come_behind(compiler: Compiler) -> None:
    compiler.backward(FEW)
    until(at_rest)
    begun = len(compiler.begun)
    rows = 1, FEW, 64, 256, 640, 4096, MANY
    plans = [compiler.backward(m) for m in rows]
    assert not any(plan.stands_in for plan in plans)
    assert len({kernel.name for plan in plans for kernel in plan.kernels}) == begun
    assert len(compiler.begun) == begun == len(compiler.made)


@pytest.mark.parametrize("m", [1, FEW, 640, MANY])
@pytest.mark.parametrize("n", [N, 4 * N])  # wide rows are held by clusters
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_first_call_waits_for_its_own_kernels_alone(
    compiler: Compiler, norm: Any, n: int, m: int
) -> None:
    spec = replace(BACKWARD, norm=norm, dbias=BACKWARD.dbias if norm == "layer_norm" else None)
    compiler.may_end.clear()
    plans: list[Any] = []
    call = threading.Thread(target=lambda: plans.append(compiler.backward(m, n, spec)))
    call.start()
    until(lambda: compiler.begun)
    time.sleep(0.05)  # in which others would begin
    begun = set(compiler.begun)
    assert len(begun) == len(compiler.begun)
    compiler.may_end.set()
    call.join(SOON)
    until(at_rest)
    assert len(begun) == len(plans[0].kernels)
    assert set(compiler.made) == {
        kernel.source()
        for kernel in _plans.kernels_of(spec, n, VECTOR, compiler.device, dx_given=False)
    }
    assert begun < set(compiler.made)


def test_the_kernels_of_a_pass_are_compiled_at_once(compiler: Compiler) -> None:
    compiler.may_end.clear()
    call = threading.Thread(target=compiler.backward, args=(MANY,))
    call.start()
    until(lambda: len(compiler.begun) >= 2)
    compiler.may_end.set()
    call.join(SOON)
    names = {kernel.name.split("<")[0] for kernel in compiler.backward(MANY).kernels}
    assert names == {"norm_backward_pipelined", "reduce_partials"}


def test_warmup_compiles_by_all_threads(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_warmup, "_device_problem", lambda: None)
    compiler.may_end.clear()
    call = threading.Thread(
        target=_warmup.warmup, args=("rms_norm", N, "bfloat16", "float32"), daemon=True
    )
    call.start()
    until(lambda: len(compiler.begun) == 4)
    compiler.may_end.set()
    call.join(SOON)
    assert not call.is_alive()
    assert len(set(compiler.made)) == len(compiler.made)


def test_many_threads_compile_a_kernel_once(compiler: Compiler) -> None:
    plans: list[Any] = []
    calls = [
        threading.Thread(target=lambda m=m: plans.append((m, compiler.forward(m))))
        for m in 8 * [FEW, MANY]
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join(SOON)
    until(at_rest)
    assert len(plans) == len(calls)
    assert len(compiler.made) == 2
    own = {m: compiler.forward(m).kernel for m in (FEW, MANY)}
    assert all(plan.stands_in or plan.kernel is own[m] for m, plan in plans)


def test_without_threads_the_calls_compile(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    few = compiler.forward(FEW)
    assert compiler.forward(MANY).kernel is few.kernel  # it asked for a thread
    many = compiler.forward(MANY)
    assert not many.stands_in
    assert many.kernel is not few.kernel
    assert len(compiler.backward(MANY).kernels) == 2
    assert at_rest()


def test_a_thread_does_what_another_one_could_not_begin(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def start_one(thread: Any) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    compiler.may_end.clear()
    kernels = set(_plans.kernels_of(BACKWARD, N, VECTOR, compiler.device, dx_given=False))
    _background.start(kernels, compiler.device)
    compiler.may_end.set()
    until(at_rest)
    assert len(compiler.made) == len(kernels) > 2


def run_python(program: str) -> tuple[float, str]:
    """Return how long a program ran after it said END, and what it said."""
    setup = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(_compile.__file__).parents[1])!r})
from cupynorm import _background, _compile
kernels = [_compile.Instantiation("epilogue.cuh", "k", (), (("kOf", i),), (), 32, 0)
           for i in range(40)]
_compile.is_capturing = lambda: False
begun = []
def load_behind(kernel, device):
    print("began", flush=True)
    begun.append(kernel)
    time.sleep(1)
_compile.load_behind = load_behind
def wait_for(count):
    while len(begun) < count:
        time.sleep(0.001)
_background._most_threads = lambda: 2
"""
    done = subprocess.run(
        [sys.executable, "-c", setup + program],
        env={name: value for name, value in os.environ.items() if name != _background.SWITCH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    ended = time.time()
    said = next(line for line in done.stdout.splitlines() if line.startswith("END"))
    return ended - float(said.split()[1]), done.stdout


def test_the_interpreter_exits_after_the_compilations_at_hand() -> None:
    taken, said = run_python(
        "_background.start(kernels, 0); wait_for(2); print('END', time.time(), flush=True)"
    )
    assert 2 <= said.count("began") < 10  # not 40, which would take 20 seconds
    assert taken < 10


def test_a_thread_that_goes_on_at_the_exit_does_not_hang() -> None:
    _, said = run_python(
        """
def late():
    threading.main_thread().join()
    _background.start(kernels, 0)
    _background._started[kernels[-1], 0].result()
    print("late", flush=True)
threading.Thread(target=late).start()
print('END', time.time(), flush=True)
"""
    )
    assert "late" in said
    assert "began" not in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_begins_anew() -> None:
    _, said = run_python(
        """
import os, warnings
warnings.simplefilter("ignore")
_background.start(kernels, 0)
wait_for(2)
_compile._locks[kernels[0]] = threading.Lock()
_compile._locks[kernels[0]].acquire()
child = os.fork()
if child == 0:
    assert not _compile._locks
    assert not _background._waiting and not _background._started and _background._threads == 0
    _background.start(kernels[:1], 0)
    _background._started[kernels[0], 0].result(10)
    print("child", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print('END', time.time(), flush=True)
"""
    )
    assert "child" in said
