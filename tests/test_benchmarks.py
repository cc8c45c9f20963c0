"""The parts of the benchmark that need no GPU, on invented figures and on recorded ones."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, astuple, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

from rich.console import Console  # noqa: E402

import cupynorm  # noqa: E402
from benchmarks import (  # noqa: E402
    calls,
    compare,
    cudnn_graphs,
    host,
    join,
    plots,
    problems,
    regimes,
    relu,
    report,
    results,
    run,
    scaling,
    summary,
    timing,
    turns,
)
from benchmarks.backends import ALL, cudnn_peer, discover, quack_peer  # noqa: E402
from benchmarks.backends.base import Backend, Call, Replay  # noqa: E402
from benchmarks.display import Display  # noqa: E402
from benchmarks.measure import measure, reason  # noqa: E402
from benchmarks.timing import Clock, Timing, host_seconds, profiled, rotations  # noqa: E402
from cupynorm import __main__ as command  # noqa: E402
from cupynorm import _bench, _bench_command, _oracle, reference, testing  # noqa: E402
from cupynorm._bench import DTYPES, EPS, Problem  # noqa: E402

SYNTHETIC = Path(__file__).parent / "data" / "synthetic_results.json"
SYNTHETIC_RELU = SYNTHETIC.with_name("synthetic_relu.json")
README = ROOT / "benchmarks" / "README.md"
RECORDED = README.with_name("results") / "h200.json"  # the last complete run
SHOWN = RECORDED.with_name("h200_c8ebcad.json")  # the newest


@pytest.fixture
def synthetic() -> dict:
    return results.load(SYNTHETIC)


# ---- problems and bytes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "direction", "matrices", "vectors"),
    [
        ("rms_norm", "forward", 2, 1),
        ("rms_norm", "backward", 3, 2),  # PyTorch's get_memory_bytes of RMSNormBackward
        ("layer_norm", "forward", 2, 2),
        ("layer_norm", "backward", 3, 3),
    ],
)
def test_bytes_are_those_of_each_array_once(norm, direction, matrices, vectors) -> None:
    problem = Problem(norm, direction, 32768, 256, "bfloat16", "float32")
    assert problem.bytes == matrices * 32768 * 256 * 2 + vectors * 256 * 4
    arrays = _bench.inputs(Problem(norm, direction, 3, 256, "bfloat16", "float32"), seed=0, xp=np)
    assert {
        name: array.shape for name, array in arrays.items() if array.ndim == 2
    } == dict.fromkeys(("x", "dy") if direction == "backward" else ("x",), (3, 256))


def test_full_set_is_every_shape_pair_and_operation() -> None:
    full = list(problems.select("full"))
    assert len(set(full)) == len(full) == len(problems.SHAPES) * 5 * 4
    assert set(problems.select("standard")) <= set(full)
    assert set(problems.select("quick")) <= set(full)
    hidden = list(problems.select("hidden"))
    assert len(set(hidden)) == len(hidden) == 4 * len(problems.HIDDEN)
    assert all(p.cols & (p.cols - 1) for p in hidden)


def test_selection_narrows_by_operation_shape_and_pair() -> None:
    chosen = problems.select("quick", ["layer_norm forward"], [(7, 9)], [("float16", "float16")])
    assert list(chosen) == [Problem("layer_norm", "forward", 7, 9, "float16", "float16")]
    assert {p.dtype for p in problems.select("standard", pairs=[problems.PAIRS[4]])} == {"float64"}


def test_the_standard_set_ends_with_decoding_and_its_backward_passes() -> None:
    chosen = list(problems.select("standard"))
    assert len(set(chosen)) == len(chosen) == 35 * 4
    shapes = [(p.rows, p.cols) for p in chosen]
    assert shapes[: 4 * len(problems.TRAINING) : 4] == list(problems.TRAINING)
    decode, others = 4 * len(problems.DECODE), 4 * 35 - 4 * len(problems.DECODE)
    assert not set(shapes[:others]) & set(problems.DECODE)
    assert {p.direction for p in chosen[others : others + decode // 2]} == {"forward"}
    assert {p.direction for p in chosen[others + decode // 2 :]} == {"backward"}


def test_only_what_the_cache_could_hold_is_rotated() -> None:
    assert rotations(1000, cache_bytes=1000) == 2
    assert rotations(4001, cache_bytes=1000) == 1


def test_timing_is_the_median_of_rounds_and_their_spread() -> None:
    assert Timing.of([[1, 2, 9], [4, 4, 4], [3, 3, 3]]) == Timing(3, 2, 4, 9)


def test_a_profile_is_split_into_runs_and_rounds(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    cuda = torch.autograd.DeviceType.CUDA
    events: list = []

    def kernel(name: str, microseconds: float) -> None:
        span = SimpleNamespace(start=len(events), elapsed_us=lambda: microseconds)
        events.insert(0, SimpleNamespace(name=name, device_type=cuda, time_range=span))

    def call() -> None:  # two kernels, which take longer from round to round
        done = sum(event.name in ("first", "second") for event in events) // 2
        kernel("first", 1.0 + done // 10)
        kernel("second", 2.0)

    def flush() -> None:
        for name in ("flush_read", "flush_demote", "Memset (Device)"):
            kernel(name, 100.0)

    session = nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: session)
    arguments = (lambda _: None, flush, lambda: None)
    found = profiled([call, call], *arguments, launch=1e-6)
    assert astuple(found) == pytest.approx((5e-6, 4e-6, 6e-6, 30))
    kernel("stray", 1.0)
    with pytest.raises(RuntimeError, match="121 kernels in 30 runs"):
        profiled([call, call], *arguments)


def test_a_launch_is_charged_what_events_measure_beside_the_kernel(monkeypatch) -> None:
    waits = []
    device = SimpleNamespace(synchronize=lambda: waits.append("waited"))
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    )

    def alone(launches, wait, flush, synchronize) -> Timing:
        assert waits == ["waited"]
        assert (launches, flush) == (["launch"], "flush")
        return Timing(2e-6, 2e-6, 2e-6, 30)

    monkeypatch.setattr(timing, "profiled", alone)
    clock = SimpleNamespace(flush="flush", measure=lambda launches: Timing(5e-6, 5e-6, 5e-6, 30))
    assert timing.launch_seconds(clock, ["launch"]) == pytest.approx(3e-6)


# ---- checkouts by turns --------------------------------------------------------------------------


@pytest.fixture
def checkouts(tmp_path: Path) -> list[Path]:
    """Two folders whose cupynorm says whose it is, by a module that is imported at the call."""
    bench = """
def ours(problem, inputs):
    def call():
        from cupynorm import _late
        return (_late.NAME,)
    return call
"""
    roots = [tmp_path / name for name in ("old", "new")]
    for root in roots:
        package = root / "cupynorm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "_bench.py").write_text(bench)
        (package / "_late.py").write_text(f"NAME = {root.name!r}\n")
    return roots


def test_checkouts_lie_beside_each_other_in_one_process(checkouts, tmp_path) -> None:
    before = {name: module for name, module in sys.modules.items() if "cupynorm" in name}
    old, new = map(turns.Checkout, checkouts)
    for checkout in (old, new, old):
        with checkout.current():
            assert checkout.prepare(None, {}).run() == (checkout.root.name,)
        assert {n: m for n, m in sys.modules.items() if "cupynorm" in n} == before
    with pytest.raises(ValueError, match="must have a package cupynorm in it"):
        turns.Checkout(tmp_path)  # it has checkouts in it
    assert sys.modules["cupynorm"] is before["cupynorm"]


def test_launches_take_turns_in_both_directions() -> None:
    seconds, order = {"a": 2.0, "b": 3.0}, []

    def sample(launches, runs) -> list[float]:
        order.append(launches[0])
        late = 100.0 if len(order) <= 2 else 0.0  # the first round
        return [50.0, *(seconds[launches[0]] + late for _ in range(runs - 1))]

    assert turns.medians(SimpleNamespace(sample=sample), [["a"], ["b"]], 3) == [2.0, 3.0]
    assert "".join(order) == "abbaabba"


def test_turns_are_a_table_with_what_differs(checkouts, monkeypatch, capsys) -> None:
    cupy = SimpleNamespace(get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=list))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(turns, "gpu_problem", lambda: None)
    monkeypatch.setattr(turns, "Clock", lambda: "clock")
    timed = []

    def time(problem, them, clock, rounds, xp) -> tuple[list[float], list[bool]]:
        timed.append((problem, [one.root.name for one in them], clock, rounds, xp))
        return [5e-6, 4e-6], [problem.direction == "backward"]

    monkeypatch.setattr(turns, "time", time)
    roots = [str(root) for root in checkouts]
    chosen = ["--shapes", "8x1024", "--operations", "rms_norm forward", "rms_norm backward"]
    assert turns.main([*roots, *chosen, "--rounds", "3"]) == 0
    problems_timed = [
        Problem("rms_norm", d, 8, 1024, "bfloat16", "float32") for d in ("forward", "backward")
    ]
    assert timed == [(p, ["old", "new"], "clock", 3, cupy) for p in problems_timed]
    names, *table = capsys.readouterr().out.splitlines()
    assert names == f"[0] {roots[0]} [1] {roots[1]}"
    assert [line.split() for line in table] == [
        "us; speed over [0] [0] [1] [1]".split(),
        "rms_norm forward 8x1024 bfloat16,float32 5.00 4.00 1.250 bits of [1] differ".split(),
        "rms_norm backward 8x1024 bfloat16,float32 5.00 4.00 1.250".split(),
        "geometric mean of 2 1.250".split(),
    ]
    with pytest.raises(SystemExit):
        turns.main([roots[0], "nowhere"])
    assert "nowhere must have a package cupynorm in it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        turns.main([*roots, "--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err


def test_turns_without_a_gpu_say_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(turns, "gpu_problem", lambda: "no GPU")
    assert turns.main([str(results.ROOT)]) == 1
    assert capsys.readouterr().out == "There is nothing to time: no GPU.\n"


@pytest.mark.gpu
def test_a_checkout_beside_itself(capsys) -> None:
    root = str(results.ROOT)
    arguments = [root, root, "--shapes", "8x1024", "--operations", "rms_norm forward"]
    assert turns.main([*arguments, "--rounds", "1"]) == 0
    *_, line, mean = capsys.readouterr().out.splitlines()
    assert line.startswith("rms_norm forward 8x1024 bfloat16,float32 ")
    assert "differ" not in line
    assert mean.startswith("geometric mean of 1 ")


# ---- right or wrong ------------------------------------------------------------------------------


def reference_outputs(problem: Problem, arrays: dict) -> tuple[dict, dict]:
    """Return the outputs of the reference and their ratios by `cupynorm.testing`."""
    eps, weight, bias = EPS[problem.norm], arrays["weight"], arrays.get("bias")
    forward = getattr(reference, f"{problem.norm}_forward")(arrays["x"], weight, bias, eps=eps)
    if problem.direction == "forward":
        ratios = testing.check_forward(problem.norm, forward.y, arrays["x"], weight, bias, eps=eps)
        return {"y": forward.y}, ratios
    statistics = (forward.mean, forward.rstd)
    given = statistics if problem.norm == "layer_norm" else (forward.rstd,)
    backward = getattr(reference, f"{problem.norm}_backward")(
        arrays["dy"], arrays["x"], weight, *given, bias=problem.has_bias
    )
    ratios = testing.check_backward(
        problem.norm, backward, arrays["dy"], arrays["x"], weight, *statistics,
        bias=problem.has_bias,
    )  # fmt: skip
    return {name: getattr(backward, name) for name in problem.outputs}, ratios


SMALL = [
    Problem(norm, direction, 33, 48, *pair)
    for norm, direction, pair in itertools.product(
        ("rms_norm", "layer_norm"), ("forward", "backward"), problems.PAIRS
    )
]


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_oracle_agrees_with_the_bounds_of_testing(problem, monkeypatch) -> None:
    monkeypatch.setattr(_oracle, "CHUNK_ELEMENTS", 10 * problem.cols)
    arrays = _bench.inputs(problem, 0, np)
    outputs, ratios = reference_outputs(problem, arrays)
    found = _oracle.errors(problem, arrays, outputs, np)
    assert _oracle.verdict(found) is None
    for name, errors in found.items():
        # The reference is float64 too, rounded elsewhere; its stored statistics are rounded.
        assert errors.over_bound == pytest.approx(ratios[name], abs=0.35)


@pytest.mark.parametrize("problem", SMALL, ids=str)
@pytest.mark.parametrize("bad", [np.nan, 1000.0])
def test_oracle_finds_one_wrong_element_of_each_output(problem, bad) -> None:
    arrays = _bench.inputs(problem, 0, np)
    outputs, _ = reference_outputs(problem, arrays)
    for name in problem.outputs:
        wrong = {key: value.copy() for key, value in outputs.items()}
        wrong[name].reshape(-1)[-1] = bad
        assert name in (_oracle.verdict(_oracle.errors(problem, arrays, wrong, np)) or "")


@pytest.mark.parametrize("problem", SMALL[::5], ids=str)
def test_oracle_names_an_output_of_another_layout(problem) -> None:
    arrays = _bench.inputs(problem, 0, np)
    outputs, _ = reference_outputs(problem, arrays)
    name = problem.outputs[0]
    for changed, said in (
        ({name: outputs[name][:-1]}, f"{name} has shape (32, 48), not (33, 48)"),
        ({name: outputs[name].astype(np.complex64)}, f"{name} is {np.dtype(np.complex64)}"),
    ):
        assert _oracle.what_is_wrong(problem, arrays, outputs | changed, np) == said
    others = {key: value for key, value in outputs.items() if key != name}
    assert f"only {list(others)}" in _oracle.what_is_wrong(problem, arrays, others, np)
    assert _oracle.what_is_wrong(problem, arrays, outputs, np) is None


def test_oracle_names_a_bitmask_of_another_shape() -> None:
    problem = Problem("rms_norm", "forward", 3, 48, "float32", "float32")
    arrays, bitmask = _bench.inputs(problem, 0, np), np.zeros((3, 5), np.uint8)
    with pytest.raises(ValueError, match=r"bitmask has shape \(3, 5\), not \(3, 6\)"):
        _oracle.wrong_bits(problem, arrays, bitmask, (0.0, 1.0), np)


def test_what_is_poisoned_reads_as_nan(monkeypatch) -> None:
    made = []

    def empty_like(array):
        made.append(np.zeros_like(array))
        return made[-1]

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty_like=empty_like))
    arrays = {f"{i}": np.zeros((3, i), dtype) for i, dtype in enumerate(DTYPES.values(), 1)}
    _bench.poison(arrays)
    assert [block.shape for block in made] == [array.shape for array in arrays.values()]
    assert all(np.isnan(block.astype(np.float64)).all() for block in made)


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "y"), ("float32", "dx")])
def test_oracle_finds_a_row_that_the_norm_of_all_does_not_show(dtype, name) -> None:
    direction = "forward" if name == "y" else "backward"
    problem = Problem("rms_norm", direction, 100000, 8, dtype, dtype)
    arrays = _bench.inputs(problem, 0, np)
    outputs, _ = reference_outputs(problem, arrays)
    right = outputs[name][7].copy()
    # The norm over all rows shows a row of zeros in float32, but not one that is a little off.
    outputs[name][7] = 0 if dtype == "bfloat16" else right * np.float32(1.0005)
    found = _oracle.errors(problem, arrays, outputs, np)
    assert found[name].relative < found[name].tolerance
    assert f"{name} has an element off" in (_oracle.verdict(found) or "")


def test_every_dtype_holds_the_weights_exactly() -> None:
    for dtype in DTYPES:
        arrays = _bench.inputs(Problem("layer_norm", "forward", 2, 500, "float32", dtype), 0, np)
        for name in ("weight", "bias"):
            values = _oracle.widen(arrays[name])
            assert np.unique(values).size > 10
            for other in DTYPES.values():
                assert np.array_equal(values.astype(other).astype(np.float64), values)


# ---- one measurement -----------------------------------------------------------------------------


class RecordingCupy:
    """What the clock asks of CuPy, and in which order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.device = device = SimpleNamespace(
            attributes={"L2CacheSize": 8, "MultiProcessorCount": 3},
            compute_capability="75",
            synchronize=lambda: self.order.append("wait"),
        )
        self.RawModule = lambda code, options: SimpleNamespace(get_function=self.kernel)
        self.cuda = SimpleNamespace(
            Device=lambda: device,
            Event=lambda: SimpleNamespace(record=lambda: self.order.append("event")),
            alloc=lambda size: SimpleNamespace(
                memset_async=lambda value, size: self.order.append(f"memset {size}")
            ),
            get_current_stream=lambda: SimpleNamespace(
                synchronize=lambda: self.order.append("wait")
            ),
            get_elapsed_time=lambda start, end: 2.0,
        )

    def call(self, what: str) -> Callable[[], None]:
        return lambda: self.order.append(what)

    def kernel(self, name: str) -> Callable[..., None]:
        return lambda grid, block, arguments: self.order.append(f"{name} {arguments[1]}")


@pytest.fixture
def recording(monkeypatch) -> RecordingCupy:
    fake = RecordingCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.mark.parametrize(
    ("capability", "flush"),
    [("75", ["memset 32"]), ("100", ["flush_read 16", "flush_demote 16", "memset 32"])],
)
def test_a_run_is_flushed_and_reset_before_its_events(recording, capability, flush) -> None:
    recording.device.compute_capability = capability
    calls, resets = ([recording.call(f"{what} {i}") for i in range(2)] for what in ("run", "reset"))
    assert Clock().sample(calls, 3, resets) == [2e-3] * 3
    turns = [[f"reset {i}", *flush, "event", f"run {i}", "event"] for i in (0, 1, 0)]
    assert recording.order == [*itertools.chain(*turns), "wait"]


def test_the_host_waits_for_the_device_before_and_after_what_it_times(recording) -> None:
    synchronize = recording.cuda.Device().synchronize
    measured = host_seconds(recording.call("run"), synchronize)
    assert measured.runs == 3
    order = [(what, len(list(same))) for what, same in itertools.groupby(recording.order)]
    counts = [count for what, count in order if what == "run"]
    assert counts == [100, 1000, 1000, 1000]
    assert order[0] == order[-1] == ("wait", 1)


def test_first_calls_are_made_on_an_empty_cache_and_then_on_that_one(monkeypatch) -> None:
    made = []

    def process(command, env, **options):
        assert command[1:3] == ["-m", "benchmarks.host"]
        assert abs(float(command[4]) - time.time()) < 60
        caches = [Path(env[name]) for name in host.CACHES]
        made.append((command[3], {cache.exists() for cache in caches}))
        for cache in caches:
            cache.mkdir(exist_ok=True)
        if command[3] == "liger":
            raise subprocess.CalledProcessError(1, command, stderr="noise\nno GPU\n")
        return SimpleNamespace(stdout='noise\n{"import_seconds": 1.0, "first_seconds": 2.0}\n')

    monkeypatch.setattr(host.subprocess, "run", process)
    backends = [
        SimpleNamespace(name=name, kind=kind)
        for name, kind in (("quack", "peer"), ("a copy", "limit"), ("liger", "peer"))
    ]
    records = list(host.first_calls(backends, time.monotonic() + 60))
    assert made == [(name, {exists}) for name in ("quack", "liger") for exists in (False, True)]
    assert [r["cache"] for r in records] == ["cold", "warm"] * 2
    assert [r.get("first_seconds") for r in records] == [2.0, 2.0, None, None]
    assert [r.get("reason") for r in records] == [None, None, "no GPU", "no GPU"]
    assert not list(host.first_calls(backends, time.monotonic() - 1))


class FakeClock:
    cache_bytes = 0

    def measure(self, calls, resets=()) -> Timing:
        return Timing(2e-6, 1e-6, 3e-6, 3)


class FakeBackend(Backend):
    """cupynorm's reference, on NumPy arrays, with a fault if wanted."""

    name = "quack"
    modules = ("numpy",)
    distribution = "numpy"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def prepare(self, problem, inputs) -> Call:
        if self.fault == "refuses":
            raise RuntimeError("no such\n  width")
        outputs, _ = reference_outputs(problem, inputs)
        if self.fault == "wrong":
            outputs[problem.outputs[0]][0, 0] += 1000
        return Call(lambda: tuple(outputs.values()), note="noted")

    def capture(self, problem, inputs) -> Replay:
        if self.fault == "not captured":
            raise RuntimeError("no graph")
        outputs = self.prepare(problem, inputs).run()
        if self.fault == "wrong replay":
            outputs[0][...] = np.nan
        elif self.fault == "other bits":  # as of sums in another order
            outputs[0][0, 0] = np.nextafter(outputs[0][0, 0], outputs[0].dtype.type(np.inf))
        return Replay(lambda: None, outputs)

    def collect(self, outputs, xp) -> list:
        return list(outputs)

    def poison(self, problem, inputs) -> None: ...
    def synchronize(self) -> None: ...
    def release(self) -> None: ...


@pytest.mark.parametrize(
    ("fault", "status", "reason", "timed"),
    [
        ("", "ok", None, {"call", "kernels"}),
        ("not captured", "ok", None, {"call"}),
        ("refuses", "failed", "RuntimeError: no such width", set()),
        ("wrong", "wrong", "y is off by", set()),
        ("wrong replay", "wrong", "replayed: y is off by", set()),
        ("other bits", "ok", None, {"call", "kernels"}),
    ],
)
def test_a_measurement_tells_what_went_wrong(fault, status, reason, timed) -> None:
    problem = SMALL[0]
    record = measure(problem, FakeBackend(fault), [_bench.inputs(problem, 0, np)], FakeClock(), np)
    assert record["status"] == status
    assert set(record.get("times", ())) == timed
    assert record["reason"] is None if reason is None else record["reason"].startswith(reason)
    assert results.problem_of(record) == problem
    assert (results.seconds(record) is not None) == bool(timed)
    phases = ["prepare"]
    if fault != "refuses":
        phases += ["check"] if fault == "wrong" else ["check", "capture"]
    phases += ["time"] if timed else []
    assert list(record["wall"]) == [*phases, "release"]
    json.dumps(record)


@pytest.mark.parametrize(("fault", "timed"), [("", {"kernels"}), ("not captured", {"call"})])
def test_what_is_emulated_is_timed_as_kernels_alone_where_it_can_be(fault, timed) -> None:
    backend = FakeBackend(fault)
    backend.emulated = True
    inputs = [_bench.inputs(SMALL[0], 0, np)]
    assert set(measure(SMALL[0], backend, inputs, FakeClock(), np)["times"]) == timed


def test_what_tunes_is_measured_after_all_others() -> None:
    quick, slow = FakeBackend(""), FakeBackend("")
    slow.tunes = True
    assert run._passes(SMALL[:2], [slow, quick]) == [
        *((problem, [quick]) for problem in SMALL[:2]),
        *((problem, [slow]) for problem in SMALL[:2]),
    ]
    assert run._passes(SMALL[:1], [slow]) == [(SMALL[0], [slow])]


def test_a_replay_is_checked_in_full_only_where_its_bits_differ(monkeypatch) -> None:
    checks = []
    errors = _oracle.errors

    def counted(*arguments):
        checks.append(arguments)
        return errors(*arguments)

    monkeypatch.setattr(_oracle, "errors", counted)
    for fault, expected in (("", 1), ("other bits", 2), ("wrong replay", 2)):
        checks.clear()
        measure(SMALL[0], FakeBackend(fault), [_bench.inputs(SMALL[0], 0, np)], FakeClock(), np)
        assert len(checks) == expected, fault


class ReluOnHost(relu.Ours):
    """On NumPy arrays, with another bit in column 7 of each row if wanted."""

    def __init__(self, relu: tuple[float, float] | None, flipped: bool = False) -> None:
        super().__init__("on the host", relu)
        self.flipped = flipped

    def prepare(self, problem, inputs) -> Call:
        call = super().prepare(problem, inputs)
        if not self.flipped:
            return call
        if problem.direction == "forward":
            *rest, bitmask = call.run()
            bitmask[:, 0] ^= 1 << 7
            return Call(lambda: (*rest, bitmask))
        forward = dataclasses.replace(problem, direction="forward")
        _, mean, rstd, bitmask = self.prepare(forward, inputs).run()
        return Call(
            lambda: reference.layer_norm_backward(
                inputs["dy"], inputs["x"], inputs["weight"], mean, rstd, bitmask=bitmask
            )
        )

    def synchronize(self) -> None: ...


def relu_check(backend, direction, dtype="float32", fault=None, change=None) -> dict:
    problem = Problem("layer_norm", direction, 33, 44, dtype, "float32")
    inputs = _bench.inputs(problem, 0, np)
    if change is not None:
        change(inputs)
    outputs = [output.copy() for output in backend.prepare(problem, inputs).run()]
    if fault is not None:
        fault(*outputs)
    return relu.check(problem, backend, inputs, outputs, np)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bounds", [None, relu.RELU])
def test_check_of_the_relu_is_of_every_output(bounds, dtype) -> None:
    backend = ReluOnHost(bounds)
    forward = relu_check(backend, "forward", dtype)
    assert forward["status"] == "ok"
    assert list(forward["errors"]) == ["y", "mean", "rstd"]
    assert forward.get("wrong_bits") == (None if bounds is None else 0)
    backward = relu_check(backend, "backward", dtype)
    assert backward["status"] == "ok"
    assert list(backward["errors"]) == ["dx", "dweight", "dbias"]

    def spoil(index):
        def fault(*outputs):
            outputs[index][-1] = outputs[index][-1] * 1.25 + 1

        return fault

    for direction, names in (("forward", relu.STORED[:3]), ("backward", backward["errors"])):
        for index, name in enumerate(names):
            record = relu_check(backend, direction, dtype, spoil(index))
            assert record["status"] == "wrong"
            assert record["reason"].startswith(f"{name} is off by")


def test_check_of_the_relu_counts_wrong_bits_away_from_the_bounds() -> None:
    def flip(y, mean, rstd, bitmask):
        bitmask[:, 0] ^= 1 << 7

    def on_a_bound(inputs):
        inputs["weight"][7] = inputs["bias"][7] = 0

    backend = ReluOnHost(relu.RELU)
    record = relu_check(backend, "forward", fault=flip)
    assert (record["status"], record["wrong_bits"]) == ("wrong", 33)
    assert record["reason"] == "33 wrong bits"
    record = relu_check(backend, "forward", fault=flip, change=on_a_bound)
    assert (record["status"], record["wrong_bits"]) == ("ok", 0)


def test_check_of_the_relu_takes_the_bits_that_backward_read() -> None:
    assert relu_check(ReluOnHost(relu.RELU, flipped=True), "forward")["status"] == "wrong"
    assert relu_check(ReluOnHost(relu.RELU, flipped=True), "backward")["status"] == "ok"


def test_check_of_the_relu_holds_cupynorm_to_its_bound() -> None:
    def one_step(y, *rest):
        y.view(np.uint16)[0, np.argmax(y[0])] += 1

    backend = ReluOnHost(relu.RELU)
    record = relu_check(backend, "forward", "bfloat16", one_step)
    assert (record["status"], record["reason"]) == ("wrong", "beyond the bound: y")
    backend.kind = "peer"
    assert relu_check(backend, "forward", "bfloat16", one_step)["status"] == "ok"


def test_discovery_names_every_backend_with_a_version_or_a_reason() -> None:
    found, facts = discover()
    assert list(facts) == [backend.name for backend in ALL]
    assert set(found) == {name for name, fact in facts.items() if not fact.startswith("missing")}
    for name, fact in facts.items():
        assert fact, name
    restricted, facts = discover(["cupynorm"])
    assert [name for name in facts if not name.startswith("limit")] == ["cupynorm"]
    assert set(restricted) <= set(facts)


def test_the_version_of_quack_names_that_of_its_compiler(monkeypatch) -> None:
    versions = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}
    monkeypatch.setattr(quack_peer.Quack, "modules", ())
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    assert quack_peer.Quack().version() == "0.6.5, cutlass-dsl 4.8.1"


@pytest.mark.parametrize("problem", SMALL, ids=str)
@pytest.mark.parametrize(
    "name", ["torch eager", "torch.nn.functional", "cupynorm (torch)", "JAX", "cupynorm (JAX)"]
)
def test_peers_that_run_on_the_cpu_are_given_the_same_problem(name, problem) -> None:
    pytest.importorskip("jax" if "JAX" in name else "torch")
    if name == "torch.nn.functional" and problem.norm == "layer_norm" and "16" in problem.dtype:
        pytest.skip("torch on the CPU sums the gradients in 16 bits")
    backend = discover([name])[0][name]
    arrays = _bench.inputs(problem, 0, np)
    outputs = backend.collect(backend.prepare(problem, arrays).run(), np)
    named = dict(zip(problem.outputs, outputs, strict=True))
    assert _oracle.verdict(_oracle.errors(problem, arrays, named, np)) is None


class FakeGraph:
    """In place of a graph of cuDNN: outputs of any values, what it reads, and a count of runs."""

    def __init__(self, names, runs, tensors=()):
        import torch

        self.outputs = {name: torch.zeros(4, 8) for name in names}
        self.runs = runs
        self.tensors = dict(tensors)

    def bind(self, **tensors):
        return FakeGraph(self.outputs, self.runs, tensors)

    def __call__(self):
        self.runs.append(self.tensors)
        return self.outputs


@pytest.fixture
def cudnn_builds(monkeypatch) -> tuple[list, list]:
    """Replace the graphs of cuDNN; return the directions built and what each run read."""
    pytest.importorskip("torch")
    builds: list[str] = []
    runs: list[dict] = []
    forward, gradients = (*relu.STORED, "y"), ("dx", "dweight", "dbias")
    for name, outputs in (("forward", forward), ("backward", gradients)):

        def build(*args, name=name, outputs=outputs, **options):
            builds.append(name)
            return FakeGraph(outputs, runs)

        monkeypatch.setattr(cudnn_graphs, name, build)
    return builds, runs


def cudnn_tensors() -> dict:
    import torch

    matrices = {name: torch.ones(4, 8) for name in ("x", "dy")}
    return matrices | {name: torch.ones(8) for name in ("weight", "bias")}


@pytest.mark.parametrize("operation", problems.OPERATIONS)
@pytest.mark.parametrize("backend", [cudnn_peer.Cudnn, relu.Cudnn])
def test_a_call_runs_a_graph_of_cudnn_once(backend, operation, cudnn_builds) -> None:
    (problem,) = problems.select("quick", [operation], [(4, 8)])
    _, runs = cudnn_builds
    call = backend().prepare_tensors(problem, cudnn_tensors())
    before = len(runs)
    for _ in range(3):
        call.run()
    assert len(runs) == before + 3


@pytest.mark.parametrize("operation", problems.OPERATIONS)
@pytest.mark.parametrize("backend", [cudnn_peer.Cudnn, relu.Cudnn])
def test_a_graph_of_cudnn_is_built_once_a_problem(backend, operation, cudnn_builds) -> None:
    first, second = problems.select("quick", [operation], [(4, 8), (2, 16)])
    builds, runs = cudnn_builds
    cudnn = backend()
    sets = [cudnn_tensors() for _ in range(2)]
    calls = [cudnn.prepare_tensors(first, tensors) for tensors in sets]
    needed = {first.direction} | ({"forward"} if backend is relu.Cudnn else set())
    assert (len(builds), set(builds)) == (len(needed), needed)
    for call, tensors in zip(calls, sets, strict=True):  # each reads its own
        call.run()
        name = "x" if first.direction == "forward" else "dy"
        assert runs[-1][name].data_ptr() == tensors[name].data_ptr()
    cudnn.prepare_tensors(second, cudnn_tensors())
    cudnn.prepare_tensors(first, sets[0])
    assert len(builds) == 3 * len(needed)


def printed_by_ncu(kernels) -> str:
    rows = ["==PROF== Connected to process 1", '"ID","Kernel Name","Metric Name","Metric Value"']
    for i, name in enumerate(kernels):
        for j, metric in enumerate(regimes.METRICS):
            rows.append(
                f'"{i}","void {name}<float, 4>(const float *)","{metric}","{1000 * j + 1:,}"'
            )
    return "\n".join(rows)


SEEN_BY_NCU = [
    name
    for _, problem in regimes.REGIMES
    for name in (
        ["norm_forward"]
        if problem.direction == "forward"
        else ["norm_backward_strips"]
        if problem.cols == 262144
        else ["norm_backward", "reduce_partials"]
    )
]


def test_kernels_seen_by_ncu_belong_to_their_regimes() -> None:
    records = regimes.parse(printed_by_ncu(SEEN_BY_NCU))
    assert [r["kernel"] for r in records] == SEEN_BY_NCU
    assert [r["cols"] for r in records[-3:]] == [65536, 65536, 262144]
    assert {r["seconds"] for r in records} == {1e-9}
    assert {r["bytes_written"] for r in records} == {3001}
    assert all(len(row) == len(regimes.HEAD) for row in regimes.table(records))


@pytest.mark.parametrize(
    "seen", [SEEN_BY_NCU[:-1], SEEN_BY_NCU[:3], [*SEEN_BY_NCU, "norm_forward"]]
)
def test_kernels_too_many_or_too_few_for_the_regimes_are_refused(seen) -> None:
    with pytest.raises(ValueError, match="ncu must see"):
        regimes.parse(printed_by_ncu(seen))


def test_a_results_file_is_whole_when_all_that_is_there_measured_all() -> None:
    (first, second) = problems.select("quick", ["rms_norm forward"], [(4, 8), (4, 16)])
    records = [
        {**asdict(problem), "backend": name} for problem in (first, second) for name in ("a", "b")
    ]
    facts = {"a": "1.0", "b": "2.0", "c": "missing: ImportError"}
    assert results.is_whole({"measurements": records, "backends": facts})
    assert not results.is_whole({"measurements": records[:-1], "backends": facts})
    assert not results.is_whole({"measurements": records, "backends": facts | {"c": "3.0"}})
    assert results.is_whole(
        {"measurements": records, "backends": facts | {"cupynorm (JAX)": "0.1"}}
    )


@pytest.mark.parametrize("operation", problems.OPERATIONS)
@pytest.mark.parametrize("name", ["JAX", "cupynorm (JAX)"])
def test_jax_compiles_a_problem_once_for_all_its_arrays(name, operation) -> None:
    pytest.importorskip("jax")
    backend = discover([name])[0][name]
    (problem,) = problems.select("quick", [operation], [(16, 64)])
    compiled = [problem, replace(problem, rows=17)]
    for each in compiled:
        for seed in (0, 1):
            backend.prepare(each, _bench.inputs(each, seed, np)).run()
        functions = backend.jitted(each)
        functions = functions if isinstance(functions, tuple) else (functions,)
        assert {function._cache_size() for function in functions} - {0} == {1}


# ---- the file and what is made of it -------------------------------------------------------------


def test_a_file_survives_saving(tmp_path, synthetic) -> None:
    results.save(synthetic, tmp_path / "new" / "file.json")
    assert results.load(tmp_path / "new" / "file.json") == synthetic
    assert (tmp_path / "new" / "file.json").read_text() == SYNTHETIC.read_text()


def test_a_file_of_another_format_is_refused(tmp_path, synthetic) -> None:
    results.save(synthetic | {"format": 0}, tmp_path / "file.json")
    with pytest.raises(ValueError, match="of format 1, got one of 0"):
        results.load(tmp_path / "file.json")


def test_the_lower_of_call_and_kernels_counts(synthetic) -> None:
    record = synthetic["measurements"][0]
    assert results.seconds(record) == record["times"]["kernels"]["median"]
    assert results.gigabytes_per_second(record) == pytest.approx(
        record["bytes"] / record["times"]["kernels"]["median"] / 1e9
    )


def test_jax_without_a_profiler_counts_by_its_queue_of_calls(synthetic, tmp_path) -> None:
    own = [record for record in synthetic["measurements"] if record["backend"] == "JAX"]
    for record in own:
        record["times"] = {"queue": dict.fromkeys(("median", "low", "high"), 1e-9) | {"runs": 3}}
        assert results.seconds(record) == 1e-9
        assert results.seconds(record, called=True) is None
    assert {ratio.peer for ratio in summary.ratios(synthetic["measurements"])} == {"JAX"}
    path = tmp_path / "results.json"
    results.save(synthetic, path)
    report.main([str(path)])
    assert compare.main([str(SYNTHETIC), str(path), "--backends", "JAX", "--fail-below", "1"]) == 0
    assert compare.main([str(path), str(SYNTHETIC), "--backends", "JAX", "--fail-below", "1"]) == 1


def test_summary_is_of_the_best_peer_on_each_shape(synthetic) -> None:
    found = summary.ratios(synthetic["measurements"])
    times = {
        (results.problem_of(r), r["backend"]): results.seconds(r) for r in synthetic["measurements"]
    }
    assert len(found) == 12
    for ratio in found:
        ours = times[ratio.problem, "cupynorm"]
        assert ratio.peer == "torch.compile"
        assert ratio.to_peer == times[ratio.problem, "torch.compile"] / ours
        assert ratio.to_limit == times[ratio.problem, "limit, CuPy"] / ours
    summaries = summary.summarize(synthetic["measurements"])
    assert [s.operation for s in summaries] == list(problems.OPERATIONS)
    product = np.prod([r.to_peer for r in found[:1] + found[4:5] + found[8:9]])
    assert summaries[0].to_peer == pytest.approx(product ** (1 / 3))
    assert summaries[0].worst == min(
        (r for r in found if r.problem.operation == summaries[0].operation),
        key=lambda r: r.to_peer,
    )
    assert "ahead on 3 of 3" in summary.sentence(summaries[0])


def test_summary_counts_neither_the_wrong_nor_the_missing(synthetic) -> None:
    for record in synthetic["measurements"]:
        if record["backend"] == "torch.compile":
            record["status"] = "wrong"
    assert {r.peer for r in summary.ratios(synthetic["measurements"])} == {"quack"}
    alone = [r for r in synthetic["measurements"] if r["backend"] == "cupynorm"]
    assert {r[1:] for r in summary.ratios(alone)} == {(None, None, None, None, ())}
    line = summary.sentence(summary.summarize(alone)[0])
    assert line == "rms_norm forward: timed 3 of 3 shapes"
    assert summary.summarize([]) == []


def test_kernels_are_compared_with_kernels_and_calls_with_calls() -> None:
    def record(backend, call, kernels):
        problem = Problem("rms_norm", "forward", 8, 4096, "bfloat16", "bfloat16")
        times = {name: {"median": time} for name, time in (("call", call), ("kernels", kernels))}
        times = {name: timing for name, timing in times.items() if timing["median"]}
        return asdict(problem) | {
            "bytes": problem.bytes, "backend": backend, "status": "ok", "times": times
        }  # fmt: skip

    ours, quack, liger = (
        record("cupynorm", 8.0, 5.0), record("quack", 6.0, 7.0), record("liger", 90.0, 4.0)
    )  # fmt: skip
    limit = record("limit, CuPy", 2.0, 3.0)
    found = summary.ratios([ours, quack, liger, limit])[0]
    assert (found.peer, found.to_peer, found.as_called) == ("liger", 4 / 5, 6 / 8)
    assert found.to_limit == 2 / 5  # a limit's are both its own
    line = summary.sentence(summary.summarize([ours, quack, liger, limit])[0])
    assert "0.800 of the best peer (geometric means), ahead on 0 of 1, worst 0.800 of liger" in line
    assert "as called 0.750, ahead on 0 of 1" in line
    # One that was not captured has its call; one with kernels alone is no call to compare with.
    found = summary.ratios([ours, record("torch eager", 4.5, None), record("JAX", None, 4.75)])[0]
    assert (found.peer, found.to_peer, found.as_called) == ("torch eager", 4.5 / 5, 4.5 / 8)


def test_a_faster_face_of_cupynorm_changes_no_ratio(synthetic) -> None:
    measured = synthetic["measurements"]
    before = summary.summarize(measured)
    for face in ("cupynorm (torch)", "cupynorm (JAX)"):
        for record in [r for r in measured if r["backend"] == "cupynorm"]:
            faster = copy.deepcopy(record) | {"backend": face}
            faster["times"]["kernels"]["median"] /= 2
            measured.append(faster)
    assert summary.summarize(measured) == before


def test_summary_names_what_cupynorm_was_not_timed_on(synthetic) -> None:
    ours = [r for r in synthetic["measurements"] if r["backend"] == "cupynorm"]
    wrong, failed = (
        r
        for r in ours
        if r["norm"] == "rms_norm" and r["direction"] == "forward" and r is not ours[0]
    )
    wrong["status"] = "wrong"
    failed["status"] = "failed"
    found = summary.summarize(synthetic["measurements"])[0]
    assert (found.shapes, found.compared) == (3, 1)
    assert found.missing == [results.problem_of(wrong), results.problem_of(failed)]
    names = "; ".join(map(summary.label, found.missing))
    assert f"rms_norm forward: timed 1 of 3 shapes, without {names}, " in summary.sentence(found)
    ours[0]["status"] = "failed"
    assert "timed 0 of 3 shapes" in summary.sentence(
        summary.summarize(synthetic["measurements"])[0]
    )


def test_summary_names_peers_without_a_time_and_marks_the_shapes_not_measured(synthetic) -> None:
    measured = synthetic["measurements"]
    first, second, _ = (
        p for p, _ in results.by_problem(measured) if p.operation == "rms_norm forward"
    )

    def of(problem, backend):
        return next(
            r for r in measured if results.problem_of(r) == problem and r["backend"] == backend
        )

    before = summary.summarize(measured)[0]
    assert before.incomplete == 0
    # A peer that failed was given its chance; one without a record might have been the best.
    of(first, "quack")["status"] = "failed"
    measured.remove(of(second, "torch.compile"))
    found = {r.problem: r for r in summary.ratios(measured)}
    assert found[first].unmeasured == ()
    assert found[second].unmeasured == ("torch.compile",)
    after = summary.summarize(measured)[0]
    assert after.incomplete == 1
    assert after.partial == before.partial | {"quack": 2, "torch.compile": 2}
    assert "peers timed on fewer: quack 2, " in summary.sentence(after)
    # One that an operation was not measured with at all is missing there as well.
    others = [
        r
        for r in measured
        if r["backend"] != "torch.compile" or results.problem_of(r).operation != first.operation
    ]
    after = summary.summarize(others)[0]
    assert (after.incomplete, after.partial["torch.compile"]) == (3, 0)


def test_a_figure_has_three_digits() -> None:
    figures = {0.5: "0.50", 9.994: "9.99", 9.996: "10.0", 99.94: "99.9", 99.96: "100", 1234: "1234"}
    assert {value: summary.digits(value) for value in figures} == figures


def test_plots_are_written_as_png_and_svg_and_the_same_each_time(tmp_path, synthetic) -> None:
    paths = plots.draw(synthetic, tmp_path / "a")
    assert len(paths) == 4 * 2 * 2
    for path in paths:
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml" in start
    svg = next(path for path in paths if path.name == "rms_norm_forward_speed.svg")
    plots.draw(synthetic, tmp_path / "b")
    assert (tmp_path / "b" / svg.name).read_bytes() == svg.read_bytes()


def test_a_plotted_line_joins_only_shapes_of_the_same_number_of_rows(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    shapes = ((32768, 512), (1048576, 128), (32768, 256), (1048576, 64), (8192, 1024))
    own = [first | {"rows": rows, "cols": cols} for rows, cols in shapes]
    (axes,) = plots.lines("rms_norm forward", [*own, own[0] | {"backend": "limit, CuPy"}]).axes
    found = [(line.get_label(), tuple(line.get_xdata())) for line in axes.lines]
    assert found[:2] == [("copy", (512,)), ("cupynorm", (64, 128))]
    assert [widths for _, widths in found[2:]] == [(256, 512), (1024,)]
    assert all(name.startswith("_") for name, _ in found[2:])  # in the legend once
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["64", "128", "256, M = 32768", "512, M = 32768", "1024, M = 8192"]


def test_a_plotted_line_is_broken_where_its_backend_has_no_time(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    own = [first | {"rows": 32768, "cols": cols} for cols in (256, 512, 1024, 2048)]
    quack = [own[0], own[1] | {"status": "failed"}, *own[2:]]
    records = [*own, *(r | {"backend": "quack"} for r in quack)]
    records += [own[n] | {"backend": "liger"} for n in (0, 3)]
    (axes,) = plots.lines("rms_norm forward", records).axes
    found = [tuple(line.get_xdata()) for line in axes.lines]
    assert found == [(256, 512, 1024, 2048), (256,), (1024, 2048), (256,), (2048,)]


def decoding_record(first: dict, rows: int, cols: int, seconds: float) -> dict:
    timing = {"median": seconds, "low": seconds, "high": seconds, "runs": 3}
    return first | {"rows": rows, "cols": cols, "times": {"call": timing}}


def test_decoding_is_drawn_over_the_limit_a_panel_a_width(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    shapes = ((8, 4096), (1, 4096), (64, 1024), (64, 4096), (512, 1024), (3, 4096))
    own = [decoding_record(first, *shape, 5.0) for shape in shapes]
    limits = [
        decoding_record(first | {"backend": name}, *shape, seconds)
        for shape in shapes
        for name, seconds in (("limit, CuPy", 6.0), ("limit, torch", 4.0))
    ]
    missing = [r | {"backend": "quack"} for r in own if r["rows"] != 8]
    slow = [decoding_record(first | {"backend": "torch eager"}, 8, 4096, 12.0)]
    figure = plots.decoding("rms_norm forward", own + limits + missing + slow)
    found = {
        axes.get_title(): [
            (line.get_color(), [(round(x), y) for x, y in line.get_xydata()])
            for line in axes.lines
            if line.get_marker() != "None"
        ]
        for axes in figure.axes
    }
    ours, quack, eager = plots.COLOURS[0], plots.COLOURS[4], plots.COLOURS[9]
    # By their places among the numbers of rows, 1, 8, 64 and 512; the copy is the faster one.
    assert found == {
        "N = 1024": [(colour, [(2, 1.25), (3, 1.25)]) for colour in (ours, quack)],
        "N = 4096": [
            (ours, [(0, 1.25), (1, 1.25), (2, 1.25)]),
            *((quack, [(place, 1.25)]) for place in (0, 2)),
            (eager, [(1, 3)]),
        ],
    }
    for axes in figure.axes:
        starts = [line.get_xdata()[0] for line in axes.lines if line.get_marker() != "None"]
        assert len(set(starts)) == len(starts)  # side by side
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "8", "64", "512"]
        assert axes.get_ylim() == (0.95, 2)
        assert axes.get_yscale() == "linear"
    assert figure.get_suptitle().endswith("; beyond 2 times the copy not shown")
    assert figure.get_supylabel() == "time over the copy's"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["copy", "cupynorm", "quack", "torch eager"]
    # One that lacks a width stands in the legend where it does in the tables.
    face = [r | {"backend": "cupynorm (torch)"} for r in own if r["cols"] == 4096]
    (legend,) = plots.decoding("rms_norm forward", own + limits + missing + face).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["copy", "cupynorm", "cupynorm (torch)", "quack"]
    # Of cupynorm all is shown.
    late = decoding_record(first, 512, 1024, 9.0)
    behind = plots.decoding("rms_norm forward", [*own, *limits, *slow, late])
    assert behind.axes[0].get_ylim() == (0.95, 2.3)
    assert behind.get_suptitle().endswith("; beyond 2.3 times the copy not shown")
    near = plots.decoding("rms_norm forward", own + limits)
    assert near.axes[0].get_ylim() == (0.95, 1.3)
    assert "beyond" not in near.get_suptitle()
    assert plots.decoding("one M of a width", [own[0], own[2]]) is None
    assert plots.decoding("no decoding", [own[-1]]) is None


def test_decoding_without_a_time_of_the_limit_has_no_line_there(synthetic) -> None:
    first = next(r for r in synthetic["measurements"] if r["backend"] == "cupynorm")
    own = [decoding_record(first, rows, 4096, 5e-6) for rows in (1, 8, 64)]
    limits = [r | {"backend": "limit, CuPy"} for r in own]
    limits[1] |= {"status": "failed"}
    (axes,) = plots.decoding("rms_norm forward", own + limits).axes
    lines = [tuple(line.get_ydata()) for line in axes.lines if line.get_marker() != "None"]
    assert lines == [(1,), (1,)]


def host_record(backend: str, operation: str, low: float, median: float, high: float) -> dict:
    seconds = {"median": 1e-6 * median, "low": 1e-6 * low, "high": 1e-6 * high, "runs": 3}
    return {"backend": backend, "operation": operation, "seconds": seconds}


def test_host_times_have_their_spread_where_there_is_one(tmp_path) -> None:
    host = [
        host_record("limit, CuPy", "rms_norm forward", 4.0, 4.0, 4.1),
        host_record("limit, CuPy", "layer_norm forward", 4.1, 4.1, 4.1),
        host_record("limit, CuPy", "rms_norm backward", 10.0, 10.16, 10.2),
        host_record("limit, torch", "layer_norm backward", 7.0, 7.0, 7.0),
        host_record("cupynorm", "rms_norm forward", 8.0, 8.5, 9.96),
        host_record("cupynorm", "layer_norm forward", 20.0, 20.0, 20.0),
        {"backend": "cupynorm", "operation": "rms_norm backward", "reason": "none"},
    ]

    def written(records: list[dict]) -> str:
        path = tmp_path / "results.json"
        results.save(results.load(SYNTHETIC) | {"host": records, "first_calls": []}, path)
        report.main([str(path)])
        return path.with_suffix(".md").read_text()

    text = written(host)
    assert "| limit, CuPy | 4.0 | 10.2 | 4.1 |  |" in text
    assert "| cupynorm | 8.5 (8.0 to 10.0) | failed | 20.0 |  |" in text
    assert "The host drifts" not in text
    host.append(host_record("limit, CuPy", "layer_norm backward", 7.0, 7.0, 7.0))
    assert "its medians differ by up to 45%" in written(host)


def test_small_problems_are_shown_in_microseconds_and_the_limit_says_what_counted(tmp_path) -> None:
    def record(backend, rows, cols, call, kernels):
        problem = Problem("rms_norm", "forward", rows, cols, "bfloat16", "bfloat16")
        times = {
            name: {"median": value, "low": value, "high": value, "runs": 3}
            for name, value in (("call", call), ("kernels", kernels))
        }
        return asdict(problem) | {
            "bytes": problem.bytes, "backend": backend, "status": "ok", "times": times
        }  # fmt: skip

    measured = [
        record("limit, CuPy", 8, 4096, 4e-6, 3.5e-6),
        record("limit, torch", 8, 4096, 5e-6, 6e-6),
        record("cupynorm", 8, 4096, 5e-6, 4.375e-6),
        record("liger", 8, 4096, 44.04e-6, 5.25e-6),
        record("limit, CuPy", 512, 16384, 24e-6, 26e-6),
        record("cupynorm", 512, 16384, 32e-6, 30e-6),
        record("JAX", 512, 16384, 50e-6, 24e-6),
        record("cupynorm", 7, 100, 15e-6, 16e-6),
    ]
    file = results.load(SYNTHETIC) | {"measurements": measured, "host": [], "first_calls": []}
    results.save(file, tmp_path / "mine.json")
    report.main([str(tmp_path / "mine.json")])
    lines = (tmp_path / "mine.md").read_text(encoding="utf-8").splitlines()
    fast, slow = (f"{1e-9 * measured[4]['bytes'] / seconds:.0f}" for seconds in (24e-6, 30e-6))
    for line in (
        "| 8x4096 | bfloat16, bfloat16 | 3.50 g | 5.00 c | 4.38 | 5.25 | 0.80 | 1.20* |",
        f"| 512x16384 | bfloat16, bfloat16 | {fast} c | {slow} | {fast} | 0.80 | 0.80*† |",
        "| 8x4096 | bfloat16, bfloat16 | 5.00 / 4.38 | 44.0 / 5.25 |  |",
        "| 512x16384 | bfloat16, bfloat16 | 32.0 / 30.0 |  | 50.0 / 24.0 |",
    ):
        assert line in lines
    assert not any(line.startswith("| 7x100 ") and "/" in line for line in lines)


def test_a_report_is_written_beside_the_file_or_into_the_one_named(tmp_path, capsys) -> None:
    source, named = tmp_path / "mine.json", tmp_path / "named.md"
    shutil.copy(SYNTHETIC, source)
    report.main([str(source)])
    assert f"written into {tmp_path / 'mine.md'}" in capsys.readouterr().out
    text = (tmp_path / "mine.md").read_text(encoding="utf-8")
    assert text.startswith(f"# Benchmark\n\n{report.BEGIN}\n\nFrom [mine.json](mine.json), ")
    assert text.endswith(f"\n\n{report.END}\n")
    for link in re.findall(r"\((mine/\w+\.\w+)\)", text):
        assert (tmp_path / link).is_file()
    named.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    report.main([str(source), "--readme", str(named)])
    section = text.removeprefix("# Benchmark\n\n")
    assert named.read_text(encoding="utf-8") == f"before\n{section}after\n"


@pytest.mark.parametrize("module", [report, compare])
def test_a_file_that_is_not_there_is_named(module, tmp_path, capsys) -> None:
    missing = str(tmp_path / "missing.json")
    with pytest.raises(SystemExit):
        module.main([missing] if module is report else [str(SYNTHETIC), missing])
    assert f"there is no file {missing}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("read", "expected", "right"),
    [
        (lambda path: report.main([path]), "benchmarks.run", "run"),
        (lambda path: report.main(["--relu", path]), "benchmarks.relu", "relu"),
        (
            lambda path: report.main(["--scaling", path]),
            "benchmarks.sharding_torch or benchmarks.sharding_jax",
            "sharding",
        ),
        (lambda path: compare.main([str(SYNTHETIC), path]), "benchmarks.run", "run"),
        (lambda path: compare.main([path, str(SYNTHETIC)]), "benchmarks.run", "run"),
    ],
)
def test_a_file_of_another_kind_is_named_and_what_was_expected(
    read, expected, right, tmp_path, capsys
) -> None:
    recorded = {
        "run": SYNTHETIC,
        "relu": SYNTHETIC_RELU,
        "regimes": RECORDED.with_name("regimes_h200.json"),
        "sharding": RECORDED.with_name("sharding_torch_h200.json"),
    }
    texts = {name: path.read_bytes() for name, path in recorded.items() if name != right}
    texts |= {"text": b"no JSON", "bytes": b"\xff\xfe", "list": b"[1]", "format": b'{"format": 1}'}
    for name, text in texts.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(text)
        with pytest.raises(SystemExit) as stopped:
            read(str(path))
        assert stopped.value.code == 2
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"error: {path} must be a file of {expected}, " in message
        assert ", got " in message
    assert {path.stem for path in tmp_path.iterdir()} == texts.keys()  # nothing is written


def test_only_a_file_of_a_run_is_resumed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run, "gpu_problem", lambda: None)
    path = tmp_path / "results.json"
    shutil.copy(SYNTHETIC_RELU, path)
    with pytest.raises(SystemExit, match=f"{path} must be a file of benchmarks.run, got one of"):
        run.main([str(path), "--resume"])


def test_runs_on_two_gpus_are_joined_if_they_are_alike(synthetic, tmp_path, capsys) -> None:
    paths = [tmp_path / f"{norm}.json" for norm in ("rms_norm", "layer_norm")]
    measured, host = synthetic["measurements"], synthetic["host"]
    for path, uuid in zip(paths, ("01234567", "89abcdef"), strict=True):
        own = [record for record in measured if record["norm"] == path.stem]
        part = synthetic | {"measurements": own, "started": uuid, "complete": True}
        part["machine"] = synthetic["machine"] | {"uuid": uuid}
        if path is paths[1]:
            part |= {"host": [], "first_calls": []}
        results.save(part, path)
    joined = tmp_path / "joined.json"
    arguments = [str(joined), *map(str, paths)]
    join.main(arguments)
    whole = results.load(joined, "benchmarks.run")
    assert sorted(map(str, whole["measurements"])) == sorted(map(str, measured))
    assert (whole["host"], whole["complete"]) == (host, True)
    assert whole["machine"]["uuid"] == "01234567 and 89abcdef"
    begun = [session["started"] for session in (whole, *whole["sessions"])]
    assert begun == ["01234567", "89abcdef"]
    report.main([str(joined)])
    text = joined.with_suffix(".md").read_text(encoding="utf-8")
    assert ", started 01234567, on 2 GPUs of one machine, each problem on one of them." in text

    def refused(*others: str) -> str:
        before = joined.read_text()
        with pytest.raises(SystemExit) as stopped:
            join.main([str(tmp_path / "none.json"), str(paths[0]), *others])
        assert stopped.value.code == 2
        assert not (tmp_path / "none.json").exists()
        assert joined.read_text() == before
        return capsys.readouterr().err

    first, other = map(results.load, paths)
    path = tmp_path / "other.json"
    for changed, name in (
        ({"commit": "1" * 40}, f"commit '{'0' * 40}' and '{'1' * 40}'"),
        ({"machine": other["machine"] | {"driver": "1.0"}}, "driver '0.0' and '1.0'"),
        ({"method": 7}, f"method of timing {first.get('method')} and 7"),
        ({"backends": {"quack": "2"}}, f"quack {first['backends']['quack']!r} and '2'"),
    ):
        results.save(other | changed, path)
        assert refused(str(path)).endswith(f"rms_norm.json and other.json differ: {name}\n")
    for changed, name in (
        ({"machine": first["machine"]}, "GPU 01234567"),
        ({"measurements": first["measurements"][:1]}, "problem Problem(norm='rms_norm', "),
        ({"host": host[-1:]}, f"host time ('{host[-1]['operation']}', "),
        ({"first_calls": first["first_calls"][:1]}, "first call ('cupynorm', "),
    ):
        results.save(other | {"first_calls": []} | changed, path)
        assert f"more than one of rms_norm.json, other.json has the {name}" in refused(str(path))
    with pytest.raises(SystemExit):
        join.main(arguments)
    assert f"{joined} exists: name another file" in capsys.readouterr().err


def test_the_readme_shows_the_recorded_results(tmp_path) -> None:
    source, readme = tmp_path / "results" / SHOWN.name, tmp_path / "README.md"
    source.parent.mkdir()
    shutil.copy(SHOWN, source)
    shutil.copy(README, readme)
    report.main([str(source), "--readme", str(readme)])
    assert readme.read_text(encoding="utf-8") == README.read_text(encoding="utf-8")
    drawn, kept = (path.with_suffix("").iterdir() for path in (source, SHOWN))
    assert {path.name for path in drawn} == {path.name for path in kept}


def test_recorded_bytes_are_those_of_the_problems() -> None:
    measured = results.load(RECORDED)["measurements"]
    assert measured
    for record in measured:
        assert record["bytes"] == results.problem_of(record).bytes


def test_the_recorded_run_has_every_library_on_every_problem() -> None:
    recorded = results.load(RECORDED)
    assert recorded["complete"]
    assert results.is_whole(recorded)
    measured = {problem for problem, _ in results.by_problem(recorded["measurements"])}
    assert measured == set(problems.select("standard"))
    timed = {(record["operation"], record["backend"]) for record in recorded["host"]}
    called = {(record["backend"], record["cache"]) for record in recorded["first_calls"]}
    for backend in ALL:
        if not backend.emulated:
            assert timed >= {(name, backend.name) for name in problems.OPERATIONS}
            assert backend.kind == "limit" or called >= {(backend.name, s) for s in host.STATES}


def test_rows_and_bars_are_in_the_order_of_the_set_whatever_was_measured_first(
    synthetic, tmp_path, monkeypatch
) -> None:
    bars: list[str] = []
    draw = plots.ratio_bars

    def seen(title, found):
        bars.extend(f"{ratio.problem.rows}x{ratio.problem.cols}" for ratio in found)
        return draw(title, found)

    monkeypatch.setattr(plots, "ratio_bars", seen)

    def rows(records: list) -> list[str]:
        results.save(synthetic | {"measurements": records}, tmp_path / "run.json")
        report.main([str(tmp_path / "run.json")])
        text = (tmp_path / "run.md").read_text(encoding="utf-8")
        return re.findall(r"^\| (\d+x\d+) \|", text, re.MULTILINE)

    def records(rows: int, cols: int) -> list[dict]:
        first = synthetic["measurements"][0] | {"rows": rows, "cols": cols}
        return [first | {"backend": name} for name in ("cupynorm", "quack")]

    # 7x256 is in no set.
    shapes = [(7, 256), (32768, 2048), (32768, 512), (32768, 1024)]
    found = rows([record for shape in shapes for record in records(*shape)])
    assert found == bars == ["32768x512", "32768x1024", "32768x2048", "7x256"]


def test_readme_section_is_made_from_the_file(tmp_path, monkeypatch) -> None:
    source, readme = tmp_path / "results" / "run.json", tmp_path / "README.md"
    source.parent.mkdir()
    shutil.copy(SYNTHETIC, source)
    shutil.copy(README, readme)
    drawn = [tmp_path / "results" / "run" / "rms_norm_forward_speed.png"]
    monkeypatch.setattr(plots, "draw", lambda results, folder: drawn)
    arguments = [str(source), "--readme", str(readme)]
    report.main(arguments)
    text = readme.read_text(encoding="utf-8")
    assert text.split(report.BEGIN)[0] == README.read_text().split(report.BEGIN)[0]
    assert "Synthetic GPU (no measurement)" in text
    assert "[run.json](results/run.json)" in text
    assert "(results/run/rms_norm_forward_speed.png)" in text
    assert "- liger, failed: rms_norm forward 1024x256 bfloat16,float32 and 3 more: " in text
    assert "- torch.nn.functional, wrong: " in text
    assert "- liger: dx written over dy" in text
    assert "| JAX | 500 + 2000 | failed |" in text
    assert "| quack | 4.0 | 4.0 | 4.0 | 4.0 |" in text
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text


def test_relu_in_the_readme_is_made_from_the_file(tmp_path) -> None:
    source, readme = tmp_path / "relu.json", tmp_path / "README.md"
    shutil.copy(SYNTHETIC_RELU, source)
    shutil.copy(README, readme)
    arguments = ["--relu", str(source), "--readme", str(readme)]
    report.main(arguments)
    text, before = (path.read_text(encoding="utf-8") for path in (readme, README))
    assert text.split(report.BEGIN_RELU)[0] == before.split(report.BEGIN_RELU)[0]
    assert text.split(report.END_RELU)[1] == before.split(report.END_RELU)[1]
    for line in (
        "| cuDNN | 0.0.0, frontend 0.0.0 |",
        "| float32, float32 | 4096x768 | forward | 10.0 | 12.0 | 1.20 | 60.0 | 0.20 |",
        "| float32, float32 | 4096x768 | backward | 20.0 | 30.0 | 1.50 | wrong |  |",
        "| bfloat16, float32 | 32768x1024 | forward | 40.0 | 50.0 | 1.25 | failed |  |",
        "| float32, float32 | 4096x768 | y | 4.00e-08 | 0.250 | 4.50e-08 | 0.375 |",
        "| float32, float32 | 4096x768 | bitmask | 0 wrong |  | 0 wrong |  |",
        "| float32, float32 | 4096x768 | dx | 3.00e-08 | 0.250 | not finite |  |",
        "| bfloat16, float32 | 32768x1024 | y | 1.25e-03 | 0.938 |  |  |",
        "| bfloat16, float32 | 32768x1024 | bitmask | 0 wrong |  |  |  |",
        "- cuDNN, failed: layer_norm forward 32768x1024 bfloat16,float32: `RuntimeError: no plan`",
        "- cuDNN: RuntimeError: no graph",
    ):
        assert line in text.splitlines()
    assert text.count("| bitmask |") == 2
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("option", "source", "marker"),
    [
        ([], SYNTHETIC, report.BEGIN),
        (["--relu"], SYNTHETIC_RELU, report.BEGIN_RELU),
        (["--scaling"], RECORDED.with_name("sharding_jax_h200.json"), report.BEGIN_SCALING),
    ],
)
def test_a_readme_without_markers_is_left_alone(
    option, source, marker, tmp_path, monkeypatch, capsys
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    monkeypatch.setattr(plots, "draw", lambda *_: pytest.fail("the figures were drawn in vain"))
    for path, message in (
        (readme, f"error: {readme} must have the lines {marker!r} and "),
        (tmp_path / "none" / "README.md", f"error: there is no folder {tmp_path / 'none'}"),
    ):
        with pytest.raises(SystemExit) as stopped:
            report.main([*option, str(source), "--readme", str(path)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert readme.read_text() == "nothing"
    assert list(tmp_path.iterdir()) == [readme]


def test_a_report_names_what_lacks_a_host_time_or_a_first_call(tmp_path) -> None:
    file = results.load(SYNTHETIC)
    facts = {
        backend.name: "missing: none" if backend.name == "liger" else "0.0.0"
        for backend in ALL
        if backend.name not in ("torch eager", "JAX")
    }
    host = [host_record("cupynorm", "rms_norm forward", 8.0, 8.0, 8.0)]
    called = {"cache": "cold", "import_seconds": 1.0, "first_seconds": 1.0}
    first = [called | {"backend": backend.name} for backend in ALL if backend.name != "quack"]
    path = tmp_path / "results.json"
    results.save(file | {"backends": facts, "host": host, "first_calls": first}, path)
    report.main([str(path)])
    host_table, first_table = path.with_suffix(".md").read_text().split("### First call")
    without = "cupynorm (torch), cupynorm (JAX), quack, cuDNN, torch.compile, torch.nn.functional"
    assert f"\n\nNot measured: {without}.\n" in host_table
    assert "\n\nNot measured: quack.\n" in first_table


def test_a_reason_is_shown_without_its_traceback(tmp_path) -> None:
    file = results.load(SYNTHETIC)
    for record in file["measurements"]:
        if record["backend"] == "liger":
            record |= {"status": "failed", "reason": "E: `none` here Traceback (most) File /x"}
    path = tmp_path / "results.json"
    results.save(file, path)
    report.main([str(path)])
    assert " and 11 more: `E: none here …`\n" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("mark", ["…", ""])  # as recorded now, and in older files
@pytest.mark.parametrize(("words", "left_out"), [(30, False), (40, True)])
def test_a_reason_that_was_cut_says_so(words, left_out, mark, tmp_path) -> None:
    recorded = reason(ValueError("reasons " * words))
    assert recorded.endswith(" reas…" if left_out else " reasons")
    recorded = recorded.removesuffix("…") + mark * left_out
    file = results.load(SYNTHETIC)
    for record in file["measurements"]:
        if record["backend"] == "liger":
            record |= {"status": "failed", "reason": recorded, "not_captured": recorded}
    path = tmp_path / "results.json"
    results.save(file, path)
    report.main([str(path)])
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    shown = re.findall(r"liger\b.*: `?(ValueError: .*?)`?$", text, re.MULTILINE)
    assert len(shown) == 2
    for said in shown:
        assert re.fullmatch(r"ValueError:( reasons)+" + " …" * left_out, said)


def changed(synthetic: dict, factor: float) -> dict:
    """Return the results with cupynorm's kernels slower by a factor on one shape."""
    new = copy.deepcopy(synthetic)
    record = next(r for r in new["measurements"] if r["backend"] == "cupynorm")
    record["times"]["kernels"] = {
        key: value if key == "runs" else factor * value
        for key, value in record["times"]["kernels"].items()
    }
    return new


@pytest.mark.parametrize(("factor", "moved"), [(1.03, 0), (1.06, 1), (0.9, 1)])
def test_comparison_tells_what_moved_by_more_than_the_spread(synthetic, factor, moved) -> None:
    changes = list(compare.compare(synthetic, changed(synthetic, factor), ("cupynorm",)))
    assert len(changes) == 12
    assert sum(change.moved for change in changes) == moved
    assert changes[0].speedup == pytest.approx(1 / factor)
    assert all(change.speedup == 1 for change in changes[1:])


def slowed(record: dict, factor: float) -> None:
    for found in record["times"].values():
        found |= {key: factor * found[key] for key in ("median", "low", "high")}


def test_comparison_of_a_recorded_file_with_itself_changed_by_known_factors(
    tmp_path, capsys
) -> None:
    old = results.load(RECORDED)
    assert not any(change.moved for change in compare.compare(old, old))
    assert compare.drift(old, old)[1:] == (1, 1)
    # A small problem on which nobody but the limits is left.
    limited = next(results.problem_of(r) for r in old["measurements"] if r["rows"] == 64)
    old["measurements"] = [
        record
        for record in old["measurements"]
        if results.problem_of(record) != limited or record["backend"].startswith("limit")
    ]
    results.save(old, tmp_path / "old.json")
    new = copy.deepcopy(old)
    cells = dict(results.by_problem(new["measurements"]))
    large = [cell for p, cell in cells.items() if p.rows == 32768 and not summary.small(cell)]
    tiny = [cell for cell in cells.values() if summary.small(cell)]
    slowed(large[0]["limit, CuPy"], 1.25)
    slowed(large[0]["cupynorm"], 1.2)  # not moved: its limit did by more
    slowed(tiny[0]["limit, torch"], 1 / 1.2)
    slowed(tiny[0]["limit, CuPy"], 1.02)
    slowed(tiny[0]["cupynorm"], 1.15)  # not: one of its limits moved by more
    slowed(large[1]["cupynorm"], 1.1)  # moved: beyond its own limit and its spread
    slowed(large[2]["cupynorm"], 1 / 1.2)  # moved
    slowed(tiny[1]["cupynorm"], 1.15)  # moved, by less than the limit of another small one
    limits = [r for r in new["measurements"] if r["backend"] == "limit, CuPy"]
    alone = next(r for r in limits if results.problem_of(r) == limited)
    slowed(alone, 1.19)  # though nobody else was measured on it
    found = compare.drift(old, new)
    assert found[1:] == (1, 1)
    asked = [*(results.problem_of(cell["cupynorm"]) for cell in (large[0], tiny[0])), limited]
    assert [found.own[problem] for problem in asked] == pytest.approx([1.25, 1.2, 1.19])
    changes = list(compare.compare(old, new, ("cupynorm",)))
    moved = [results.problem_of(cell["cupynorm"]) for cell in (large[1], large[2], tiny[1])]
    assert {c.problem for c in changes if c.moved} == set(moved)
    results.save(new, tmp_path / "new.json")
    arguments = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"not in both files (0 of {len(changes)})" in printed
    assert f"3 of {len(changes)} moved" in printed
    assert compare.main([*arguments, "--fail-below", "0.9"]) == 1  # the small one
    assert compare.main([*arguments, "--fail-below", "0.86"]) == 0


def test_a_problem_without_its_limit_is_held_against_the_limits_of_its_size(
    tmp_path, capsys
) -> None:
    old = results.load(RECORDED)
    new = copy.deepcopy(old)
    cells = [cell for _, cell in results.by_problem(new["measurements"])]
    sizes = [[cell for cell in cells if summary.small(cell) == small] for small in (True, False)]
    for size, most in zip(sizes, (1.5, 1.2), strict=True):
        for cell, factor in zip(size[2:], np.linspace(1, most, len(size) - 2), strict=True):
            slowed(cell["limit, CuPy"], factor)
        for cell in size[:2]:
            new["measurements"].remove(cell["limit, CuPy"])
            new["measurements"].remove(cell["limit, torch"])
        bound = 1 + 0.9 * (most - 1)
        slowed(size[0]["cupynorm"], bound - 0.02)
        slowed(size[1]["cupynorm"], bound + 0.02)
    _, small, large = compare.drift(old, new)
    # Roughly: which of a limit's times counts may change with their length.
    assert (small, large) == pytest.approx((1.45, 1.18), abs=0.01)
    changes = list(compare.compare(old, new, ("cupynorm",)))
    beyond = {results.problem_of(size[1]["cupynorm"]) for size in sizes}
    assert {c.problem for c in changes if c.moved} == beyond
    for name, file in (("old", old), ("new", new)):
        results.save(file, tmp_path / f"{name}.json")
    assert compare.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), "--all"]) == 0
    printed = capsys.readouterr().out
    assert f"(4 of {len(changes)}), the 0.9 quantile" in printed
    assert f"{small:.3f} under 10 us, {large:.3f} from there on." in printed
    rules = re.findall(r" (\d\.\d{3}) ([lq])(?:  not moved)?$", printed, re.MULTILINE)
    assert len(rules) == len(changes)
    held = sorted(bound for bound, rule in rules if rule == "q")
    assert held == [f"{large:.3f}"] * 2 + [f"{small:.3f}"] * 2


def test_comparison_tells_what_else_differs(tmp_path, synthetic, capsys) -> None:
    new = copy.deepcopy(synthetic)
    new["machine"]["driver"] = "999.9"
    new["commit"] = "0123456789abcdef and changes"
    new["backends"]["cupynorm"] = "9.9"
    ours = [r for r in new["measurements"] if r["backend"] == "cupynorm"]
    for record in ours[-2:]:
        new["measurements"].remove(record)
    for record in ours[:-2]:
        record["status"] = "failed"
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    name = summary.label(results.problem_of(ours[-2]))
    for line in (
        "new: 0123456789ab and changes on Synthetic GPU (no measurement), driver 999.9",
        f"driver differs: {synthetic['machine']['driver']}, 999.9",
        f"cupynorm differs: {synthetic['backends']['cupynorm']}, 9.9",
        f"only in old: cupynorm: {ours[-2]['norm']} {ours[-2]['direction']} {name} and 1 more",
        "10 of 10 moved; none has a time in both files.",
    ):
        assert line in printed
    assert not any("method" in line for line in printed)
    with pytest.raises(SystemExit) as stopped:
        compare.main([*arguments, "--backends", "cupynorm (JAX)"])
    assert stopped.value.code == 2
    expected = f"{' and '.join(arguments)} must have problems of cupynorm (JAX) in common"
    assert expected in capsys.readouterr().err


def test_comparison_warns_where_the_method_differs(tmp_path, synthetic, on_numpy, capsys) -> None:
    assert "method" not in synthetic  # older than the field: method 1
    path = tmp_path / "new.json"
    assert run.main([str(path), "--tables", "throughput", *NARROW]) == 0
    begun = results.load(path)
    assert begun["method"] == results.METHOD == 3
    results.save(synthetic | {"method": begun["method"]}, path)
    capsys.readouterr()
    warning = "WARNING: the method differs: "
    assert compare.main([str(SYNTHETIC), str(path)]) == 0
    assert f"{warning}1, 3 (METHOD of benchmarks/results.py)" in capsys.readouterr().out
    assert compare.main([str(path), str(path)]) == 0
    results.save(synthetic | {"method": 1}, path)
    assert compare.main([str(SYNTHETIC), str(path)]) == 0
    assert warning not in capsys.readouterr().out


def test_comparison_has_columns_for_any_name(tmp_path, capsys) -> None:
    old = results.load(RECORDED)
    records = [r for r in old["measurements"] if r["backend"] == "cupynorm"][:2]
    records += [r | {"backend": "cupynorm (as on sm_80)"} for r in records]
    results.save(old | {"measurements": records}, tmp_path / "a.json")
    names = ["--all", "--backends", "cupynorm", "cupynorm (as on sm_80)"]
    assert compare.main([str(tmp_path / "a.json")] * 2 + names) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("GB/s", "cupynorm")) and "moved" not in line]
    rows += [line.removesuffix("  not moved") for line in lines if line.endswith("  not moved")]
    assert len(rows) == 5
    assert len({len(row) for row in rows}) == 1


def test_comparison_prints_and_fails_on_a_slowdown(tmp_path, synthetic, capsys) -> None:
    new = changed(synthetic, 1.1)
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--fail-below", "0.97"]) == 1
    assert compare.main([*arguments[::-1], "--fail-below", "0.97"]) == 0
    printed = capsys.readouterr().out
    assert "cupynorm: rms_norm forward 1024x256 bfloat16,float32" in printed
    assert "1 of 12 moved" in printed


def test_comparison_tells_that_a_result_became_wrong(synthetic, tmp_path, capsys) -> None:
    new = copy.deepcopy(synthetic)
    record = next(r for r in new["measurements"] if r["backend"] == "cupynorm")
    record |= {"status": "wrong"}
    change = next(compare.compare(synthetic, new, ("cupynorm",)))
    assert (change.old, change.new, change.moved) == ("ok", "wrong", True)
    results.save(new, tmp_path / "new.json")
    arguments = [str(SYNTHETIC), str(tmp_path / "new.json")]
    assert compare.main([*arguments, "--fail-below", "0.9"]) == 1
    assert compare.main([*arguments[::-1], "--fail-below", "0.9"]) == 0  # it became right
    assert capsys.readouterr().out.count("1 of 12 moved") == 2


# ---- command lines -------------------------------------------------------------------------------


def test_options_of_a_run() -> None:
    narrowed = "--operations,layer_norm backward,--shapes,8x16,--backends,JAX,limit, torch"
    options = run.parse(["f.json", *re.split(",(?! )", narrowed), "--dtypes", "float16,float16"])
    assert options.problems == [Problem("layer_norm", "backward", 8, 16, "float16", "float16")]
    assert options.backends == ["JAX", "limit, torch"]
    assert run.parse(["f.json"]).problems == list(problems.select("standard"))
    assert run.parse(["f.json", "--set", "quick"]).problems == list(problems.select("quick"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["--shapes", text], f"must be rows x columns, as 32768x4096, got '{text}'")
            for text in ("3x", "3", "8x0", "8x8x8", "x")
        ),
        (["--dtypes", "float64,int8"], "must be one of bfloat16,float32 .*, got 'float64,int8'"),
        (["--set", "quick", "--dtypes", "float64,float64"], "no shape of --set quick has these"),
        *(
            (["--minutes", minutes], f"--minutes must be above 0, got {minutes}")
            for minutes in ("0", "-1", "nan")
        ),
    ],
)
def test_options_that_select_nothing_say_why(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        run.parse(["f.json", *arguments])
    assert re.search(message, capsys.readouterr().err)


def test_commands_of_the_readme_are_understood(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no results file is
    text = README.read_text(encoding="utf-8")
    command = r"^(?:CUDA_VISIBLE_DEVICES=\d )?python -m benchmarks\.run (.+)$"
    commands = re.findall(command, text, re.MULTILINE)
    parsed = [run.parse(shlex.split(command)) for command in commands]
    names = {"results.json", "h200.json", "a.json", "b.json"}
    assert {options.results.name for options in parsed} == names
    assert ["cupynorm", "quack"] in [options.backends for options in parsed]


def test_every_option_of_a_run_has_help(capsys) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--help"])
    shown = capsys.readouterr().out
    options = re.findall(r"^  (?:-h, )?--\w+", shown, re.MULTILINE)
    with_help = re.findall(r"^  (?:-h, )?--\w+.*?(?:  |\n {10,})\w", shown, re.MULTILINE)
    assert len(options) == len(with_help) == 10


def test_a_file_that_is_there_is_not_overwritten(tmp_path, capsys) -> None:
    path = tmp_path / "results.json"
    path.write_text("measured")
    with pytest.raises(SystemExit):
        run.main([str(path), "--set", "quick"])
    assert f"{path} exists: --resume goes on with it" in capsys.readouterr().err
    assert path.read_text() == "measured"
    assert run.parse([str(path), "--resume"]).resume
    assert run.parse([str(path), "--compile-share", "0", "2"]).compile_share == [0, 2]


@pytest.mark.parametrize("module", [run, relu, regimes, calls])
def test_what_needs_a_gpu_says_so(module, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(module, "gpu_problem", lambda: "a test hides it")
    monkeypatch.setitem(sys.modules, "cupy", None)  # nothing asks it for a device
    arguments = ("float32", "float32") if module is calls else ([str(tmp_path / "results.json")],)
    assert module.main(*arguments) == 1
    assert capsys.readouterr().out == "There is nothing to time: a test hides it.\n"
    assert not list(tmp_path.iterdir())


def test_workers_compile_only_what_is_left(monkeypatch, tmp_path) -> None:
    class Compiling(FakeBackend):
        compiles = True

        def prepare(self, problem, inputs) -> Call:
            compiled.append(problem)
            raise RuntimeError("reported where it is measured")

    path = tmp_path / "results.json"
    machine = {"commit": "0123456", "machine": {"gpu": "GPU"}}
    chosen = list(problems.select("quick"))
    measured = [chosen[0], chosen[5]]
    records = [asdict(problem) | {"backend": "quack", "status": "ok"} for problem in measured]
    records.append(asdict(chosen[1]) | {"backend": "liger", "status": "ok"})
    results.save(results.load(SYNTHETIC) | {"measurements": records} | machine, path)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # run tells JAX where to cache
    monkeypatch.setattr(_bench, "inputs", lambda *_: {})
    monkeypatch.setattr(run, "gpu_problem", lambda: None)
    monkeypatch.setattr(run, "discover", lambda _: ({"quack": Compiling()}, {}))
    monkeypatch.setattr(results, "commit", lambda: machine["commit"])
    monkeypatch.setattr(results, "machine", lambda: machine["machine"])
    compiled: list = []
    for share in "012":
        options = ["--set", "quick", "--resume", "--compile-share", share, "3"]
        assert run.main([str(path), *options]) == 0
    assert len(compiled) == len(chosen) - 2
    assert set(compiled) == set(chosen) - set(measured)
    machine["commit"] = "another"
    with pytest.raises(SystemExit, match=r"another commit .*: commit '0123456', now 'another'$"):
        run.main([str(path), "--resume"])


def test_workers_share_what_is_compiled_and_not_what_is_tuned(monkeypatch) -> None:
    started = []

    class Process:
        def __init__(self, command, *, env, **_) -> None:
            started.append((command[-3:], env))

        def wait(self, seconds: float | None = None) -> None:
            if seconds is not None:
                raise subprocess.TimeoutExpired("compiling", seconds)
            killed.append(self)

        def kill(self) -> None:
            killed.append(self)

    killed: list = []
    monkeypatch.setattr(run.subprocess, "Popen", Process)
    monkeypatch.setenv("TRITON_CACHE_DIR", "shared")
    run.compile_ahead(["results.json"], 2, 0.1)
    assert [end for end, _ in started] == [["--compile-share", str(i), "2"] for i in range(2)]
    environments = [env for _, env in started]
    assert {env["TRITON_CACHE_DIR"] for env in environments} == {"shared"}
    tuned = {env["TORCHINDUCTOR_CACHE_DIR"] for env in environments}
    assert len(tuned) == 2
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") not in tuned
    assert len(killed) == 4


def test_what_is_tuned_is_compiled_ahead_after_all_else(monkeypatch) -> None:
    compiled = []

    class Compiling(FakeBackend):
        name = "quack"
        compiles = True

        def prepare(self, problem, inputs) -> Call:
            compiled.append(self.name)
            raise RuntimeError("reported where it is measured")

    class Tuning(Compiling):
        name = "torch.compile"
        tunes = True

    pool = SimpleNamespace(free_all_blocks=lambda: None)
    fake = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(_bench, "inputs", lambda *_: {})

    class Another(Compiling):
        name = "liger"

    found = {backend.name: backend for backend in (Tuning(), Compiling(), Another())}
    monkeypatch.setattr(run, "discover", lambda _: (found, {}))
    chosen = list(problems.select("quick"))
    half = len(chosen) // 2
    for share in (0, 1):  # of equal work
        run.compile_share(chosen, set(), share, 2, None)
        assert compiled == ["quack", "liger"] * half + ["torch.compile"] * half
        compiled.clear()


@pytest.fixture
def on_numpy(monkeypatch) -> list:
    """Have runs measure two backends on NumPy arrays; return those whose first call is timed."""

    class Emulated(FakeBackend):
        name = "cupynorm (as on sm_80)"
        emulated = True

    def first_calls(backends, deadline):
        for backend in backends:
            asked.append(backend.name)
            yield from ({"backend": backend.name, "cache": cache} for cache in host.STATES)

    asked: list = []
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    device = SimpleNamespace(synchronize=lambda: None)
    runtime = SimpleNamespace(CUDARuntimeError=ZeroDivisionError)
    fake = SimpleNamespace(
        get_default_memory_pool=lambda: pool,
        cuda=SimpleNamespace(Device=lambda: device, runtime=runtime),
    )
    inputs = _bench.inputs
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(_bench, "inputs", lambda problem, seed, _: inputs(problem, seed, np))
    monkeypatch.setattr(run, "measure", lambda *args: measure(*args[:-1], np))
    monkeypatch.setattr(run, "Clock", FakeClock)
    monkeypatch.setattr(run, "gpu_problem", lambda: None)
    backends = {backend.name: backend for backend in (FakeBackend(), Emulated())}
    monkeypatch.setattr(run, "discover", lambda _: (backends, dict.fromkeys(backends, "1.0")))
    monkeypatch.setattr(run, "first_calls", first_calls)
    monkeypatch.setattr(results, "commit", lambda: "0123456")
    monkeypatch.setattr(results, "machine", lambda: {"gpu": "GPU", "uuid": "89abcdef"})
    return asked


NARROW = ("--operations", "rms_norm forward", "--shapes", "4x8", "4x16")


def test_a_run_is_begun_and_resumed_with_the_same_arguments(tmp_path, on_numpy, capsys) -> None:
    path = tmp_path / "results.json"
    arguments = [str(path), "--resume", "--tables", "throughput", *NARROW]
    assert run.main([*arguments, "--minutes", "1e-9"]) == 1
    shown = capsys.readouterr().out
    assert f"{path} does not exist: it is begun" in shown
    assert "out of time after 1e-09 minutes: --resume goes on\n" in shown
    assert "quack was not reached on 2 of 2 problems\n" in shown
    begun = results.load(path)
    assert (begun["measurements"], begun["complete"]) == ([], False)
    assert "sessions" not in begun
    assert run.main(arguments) == 0
    assert "not reached" not in capsys.readouterr().out
    resumed = results.load(path)
    assert {k: resumed[k] for k in ("started", "arguments")} == {
        k: begun[k] for k in ("started", "arguments")
    }
    (session,) = resumed["sessions"]
    assert session["arguments"] == ["results.json", *arguments[1:]]
    assert session["started"] >= begun["started"]
    assert len(resumed["measurements"]) == 4
    assert resumed["complete"]
    results.resume(resumed, arguments)
    assert not resumed["complete"]
    assert run.main(arguments) == 0
    again = results.load(path)
    assert (len(again["sessions"]), again["complete"]) == (2, True)


@pytest.mark.parametrize("room", [True, False])
def test_a_run_without_memory_for_inputs_says_so_and_goes_on(
    room, tmp_path, on_numpy, monkeypatch, capsys
) -> None:
    path = tmp_path / "results.json"
    inputs = _bench.inputs

    def full(problem, seed, xp):
        if problem.cols in (16, 24):
            raise MemoryError("Out of memory allocating 512 bytes")
        return inputs(problem, seed, xp)

    arguments = [str(path), "--resume", "--tables", "throughput", *NARROW, "4x24", "4x32"]
    monkeypatch.setattr(_bench, "inputs", full)
    assert run.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "no memory is left for the inputs, MemoryError: Out of memory" in shown
    assert ": --resume goes on\n" in shown
    stopped = results.load(path)
    assert not stopped["complete"]
    assert [record["cols"] for record in stopped["measurements"]] == [8, 8]
    if room:  # in a new process
        monkeypatch.setattr(_bench, "inputs", inputs)
    assert run.main(arguments) == 0
    resumed = results.load(path)
    assert resumed["complete"]
    right = ("ok", None)
    why = "no memory for the inputs: MemoryError: Out of memory allocating 512 bytes"
    large = right if room else ("failed", why)
    found = [(r["cols"], (r["status"], r["reason"])) for r in resumed["measurements"]]
    assert found[::2] == found[1::2] == [(8, right), (16, large), (24, large), (32, right)]


def test_an_interrupted_run_leaves_what_it_measured_and_how_long_it_took(
    tmp_path, on_numpy, monkeypatch
) -> None:
    path = tmp_path / "results.json"
    arguments = [str(path), "--resume", *NARROW]
    now = 0.0
    stop_at: int | None = 8
    measured = run.measure

    def measure_for_10_seconds(problem, *others):
        nonlocal now
        now += 10
        if problem.cols == stop_at:
            raise KeyboardInterrupt
        return measured(problem, *others)

    def one_first_call(backends, deadline):
        nonlocal now
        now += 5
        yield {"backend": "quack", "cache": "cold"}
        raise KeyboardInterrupt

    def interrupted() -> dict:
        with pytest.raises(KeyboardInterrupt):
            run.main(arguments)
        return results.load(path)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(run, "measure", measure_for_10_seconds)
    monkeypatch.setattr(run, "first_calls", one_first_call)
    left = interrupted()
    assert (len(left["host"]), left["measurements"], left["elapsed_seconds"]) == (4, [], 0)
    stop_at = 16
    left = interrupted()
    assert [record["cols"] for record in left["measurements"]] == [8, 8]
    assert left["elapsed_seconds"] == 20
    stop_at = None
    left = interrupted()
    assert (len(left["measurements"]), len(left["first_calls"])) == (4, 1)
    assert left["elapsed_seconds"] == 45


def test_a_run_on_another_gpu_is_not_resumed(tmp_path, on_numpy, monkeypatch) -> None:
    arguments = [str(tmp_path / "results.json"), "--resume", "--tables", "throughput", *NARROW]
    assert run.main(arguments) == 0
    before = (tmp_path / "results.json").read_text()
    monkeypatch.setattr(results, "machine", lambda: {"gpu": "GPU", "uuid": "01234567"})
    with pytest.raises(SystemExit, match=r"machine: uuid '89abcdef', now '01234567'$"):
        run.main(arguments)
    assert (tmp_path / "results.json").read_text() == before
    older = json.loads(before)
    del older["machine"]["uuid"]
    results.save(older, tmp_path / "results.json")
    with pytest.raises(SystemExit, match=r"machine: uuid 'unknown', now '01234567'$"):
        run.main(arguments)


def test_what_is_configured_anew_each_call_has_no_host_time(tmp_path, on_numpy) -> None:
    path = tmp_path / "results.json"
    assert run.main([str(path), *NARROW]) == 0
    found = results.load(path)
    assert {r["backend"] for r in found["measurements"]} == {"quack", "cupynorm (as on sm_80)"}
    assert {r["backend"] for r in found["host"]} == {"quack"}
    assert on_numpy == ["quack"]
    assert [backend.name for backend in ALL if backend.emulated] == ["cupynorm (as on sm_80)"]


def test_first_calls_that_time_did_not_suffice_for_are_named(
    tmp_path, on_numpy, monkeypatch, capsys
) -> None:
    path = tmp_path / "results.json"
    with monkeypatch.context() as patch:
        patch.setattr(run, "first_calls", lambda *_: iter(()))
        assert run.main([str(path), "--tables", "first"]) == 1
    assert "no first call of quack\n" in capsys.readouterr().out
    assert not results.load(path)["complete"]
    assert run.main([str(path), "--tables", "first", "--resume"]) == 0


def test_a_first_call_that_was_stopped_before_the_warm_one_is_made_again(
    tmp_path, on_numpy
) -> None:
    path = tmp_path / "results.json"
    arguments = [str(path), "--tables", "first", "--resume"]
    assert run.main(arguments) == 0
    whole = results.load(path)
    lone = {"backend": "quack", "cache": "cold", "reason": "of an earlier cache"}
    other = {"backend": "liger", "cache": "cold"}  # not there to be measured now
    results.save(whole | {"first_calls": [other, lone]}, path)
    assert run.main(arguments) == 0
    assert results.load(path)["first_calls"] == [other, *whole["first_calls"]]
    assert run.main(arguments) == 0
    assert results.load(path)["first_calls"] == [other, *whole["first_calls"]]
    assert on_numpy == ["quack"] * 2


def test_a_gpu_is_told_from_another_by_its_uuid(monkeypatch) -> None:
    properties = {
        "name": b"GPU",
        "uuid": bytes.fromhex("89abcdef0123"),
        "totalGlobalMem": 1,
        "multiProcessorCount": 1,
    }
    runtime = SimpleNamespace(
        getDeviceProperties=lambda _: properties,
        driverGetVersion=lambda: 1,
        runtimeGetVersion=lambda: 1,
    )
    device = SimpleNamespace(id=0, attributes={"L2CacheSize": 1}, compute_capability="90")
    nvrtc = SimpleNamespace(getVersion=lambda: (1, 0))
    cuda = SimpleNamespace(Device=lambda: device, runtime=runtime, nvrtc=nvrtc)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="1.0"))
    assert results.machine()["uuid"] == "89abcdef"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("cupynorm/a.py", True),
        ("kernels/a.cuh", True),
        ("benchmarks/a.py", True),
        ("benchmarks/backends/a.py", True),
        ("benchmarks/results/a.json", False),
        ("benchmarks/README.md", False),
        ("tests/a.py", False),
    ],
)
def test_a_commit_with_changes_of_what_is_measured_says_so(
    tmp_path, monkeypatch, changed, told
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.delenv("COMMIT", raising=False)
    path = tmp_path / changed
    path.parent.mkdir(parents=True)
    path.write_text("as committed")
    for step in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *step], check=True)
    assert re.fullmatch("[0-9a-f]{40}", results.commit())
    path.write_text("changed")
    assert results.commit().endswith(" and changes") == told


def test_the_live_table_shows_the_progress_and_the_newest_rows() -> None:
    chosen = list(problems.select("standard"))[-50:]
    backends = [backend.name for backend in ALL]
    records: list = []
    screen = StringIO()
    console = Console(file=screen, width=120, height=40, force_terminal=True)
    with Display({"measurements": records}, backends, len(chosen), console) as display:
        for problem in chosen:
            display.begin(problem, backends[0])
            for name in backends:
                seconds = problem.bytes / 1234e9
                times = {"call": asdict(Timing(seconds, seconds, seconds, 1))}
                outcome = {"status": "failed"} if name == "quack" else {"status": "ok"}
                record = asdict(problem) | {"bytes": problem.bytes, "backend": name}
                records.append(record | outcome | {"times": times})
            display.finished(problem)
        # One measured again later, as by what tunes, is among the newest.
        display.begin(chosen[0], "torch.compile")
        records.append(records[0])
        display.begin(chosen[0], "torch.compile")
        frame = re.split(r"(?:\x1b\[1A\x1b\[2K)+", screen.getvalue())[-1]
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r", "").splitlines()
    assert len(lines) == 40 - 1
    assert all(len(line) <= 120 for line in lines)
    first, last = "rms fwd 8x16384 bf16,bf16", "layer bwd 512x16384 bf16,bf16"
    assert re.fullmatch(f"━+ 50/50 0:00:\\d\\d {first}, torch.compile *", lines[0])
    assert lines[2].split() == [
        "GB/s", "CuPy", "torch", "ours", "torch", "JAX", "sm_80", "quack", "cuDNN", "liger",
        "compile", "function", "eager", "JAX",
    ]  # fmt: skip
    cells = [*["1234"] * 6, "failed", *["1234"] * 6]
    assert lines[-2].split() == [*last.split(), *cells]
    assert lines[-1].split() == [*first.split(), *cells]
    narrow = Console(file=StringIO(), width=80, height=24, force_terminal=True)
    with Display({"measurements": records}, backends, len(chosen), narrow) as display:
        display.begin(chosen[0], "cuDNN")
    shown = narrow.file.getvalue()
    assert "…" not in shown  # whole columns, as many as there is room for
    assert "quack" in shown
    assert "eager" not in shown


def test_bench_without_gpu_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "gpu_problem", lambda: "a test hides it")
    assert command.main(["bench"]) == 1
    assert "There is nothing to time: a test hides it." in capsys.readouterr().out


def bench_on_numpy(monkeypatch, wrong: str = "") -> list[str]:
    """Have bench run on NumPy arrays, one output off; return the list of what it will do."""
    done = []

    class NotingClock(FakeClock):
        def measure(self, calls, resets=()) -> Timing:
            done.append("time")
            return super().measure(calls, resets)

    def ours(problem, arrays):
        outputs, _ = reference_outputs(problem, arrays)
        if wrong == "memory":
            raise MemoryError("no 8 GB")
        if wrong == "shape":
            outputs = {name: output[..., :-1] for name, output in outputs.items()}
        elif wrong in outputs:
            outputs[wrong].flat[3] += 1000

        def call():
            done.append("call")
            return tuple(outputs.values())

        return call

    monkeypatch.setattr(command, "gpu_problem", lambda: None)
    monkeypatch.setattr(command, "describe", dict)
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(_bench_command, "Clock", NotingClock)
    monkeypatch.setattr(_bench_command, "limit", lambda problem, arrays: None)
    monkeypatch.setattr(_bench_command, "poison", lambda arrays: done.append("poison"))
    monkeypatch.setattr(_bench_command, "ours", ours)
    return done


def test_bench_prints_a_line_a_pass(monkeypatch, capsys) -> None:
    done = bench_on_numpy(monkeypatch)
    assert command.main(["bench", "--shapes", "4x256", "3x64", "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("4x256 float16") == printed.count("3x64 float16") == 4
    assert printed.count("   1.00\n") == 8
    assert done == 8 * ["poison", "call", "time", "time"]


@pytest.mark.parametrize(
    ("wrong", "said", "count"),
    [
        ("y", "WRONG, not timed: y is off by", 2),
        ("dx", "WRONG, not timed: dx is off by", 2),
        ("dweight", "WRONG, not timed: dweight is off by", 2),
        ("dbias", "WRONG, not timed: dbias is off by", 1),
        ("shape", "WRONG, not timed: ", 4),
        ("memory", "not measured: no 8 GB", 4),
    ],
)
def test_bench_does_not_time_what_is_wrong(wrong, said, count, monkeypatch, capsys) -> None:
    done = bench_on_numpy(monkeypatch, wrong)
    assert command.main(["bench", "--shapes", "4x256"]) == 1
    printed = capsys.readouterr().out
    assert printed.count(said) == count
    assert f"{count} of 4 results are wrong or missing." in printed
    assert done.count("time") == 2 * (4 - count)


@pytest.mark.gpu
def test_bench_times_what_is_right_on_a_gpu(monkeypatch, capsys) -> None:
    arguments = ["bench", "--shapes", "512x1024", "--dtype", "float16"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("512x1024 float16") == 4
    assert "WRONG" not in printed

    def one_value_off(*args, **kwargs):
        y = rms_norm(*args, **kwargs)
        y[7, 5] += 2
        return y

    rms_norm = cupynorm.rms_norm
    monkeypatch.setattr(cupynorm, "rms_norm", one_value_off)
    assert command.main(arguments) == 1
    assert capsys.readouterr().out.count("WRONG, not timed: y") == 1


@pytest.mark.gpu
def test_run_measures_cupynorm_beside_the_limit(tmp_path) -> None:
    path = tmp_path / "results.json"
    names = ["--backends", "cupynorm", "--tables", "throughput", "host"]
    assert run.main([str(path), "--shapes", "64x4096", *names]) == 0
    found = results.load(path)
    assert found["complete"]
    for problem, cell in results.by_problem(found["measurements"]):
        assert cell["cupynorm"]["status"] == "ok", problem
        assert set(cell["cupynorm"]["times"]) == {"call", "kernels"}
    assert len(summary.summarize(found["measurements"])) == 4


@pytest.mark.gpu
def test_relu_is_measured_beside_the_plain_norm(tmp_path, monkeypatch) -> None:
    pairs = (("float32", "float32"), ("bfloat16", "float32"))
    monkeypatch.setattr(relu, "CASES", tuple(((64, 768), pair) for pair in pairs))
    path = tmp_path / "relu.json"
    assert relu.main([str(path)]) == 0
    found = results.load(path)
    assert found["complete"]
    cells = list(results.by_problem(found["measurements"]))
    assert len(cells) == 4
    for problem, cell in cells:
        for name in ("plain", "relu"):
            assert cell[name]["status"] == "ok", cell[name]
            assert set(cell[name]["times"]) == {"call", "kernels"}
        # cuDNN has the graph in float32 alone, if it is installed and new enough.
        if problem.dtype == "float32" and "cuDNN" in cell:
            assert cell["cuDNN"]["status"] != "wrong", cell["cuDNN"]
            assert list(cell["cuDNN"].get("errors", ())) in ([], list(cell["relu"]["errors"]))


# ---- several devices -----------------------------------------------------------------------------


def test_sharding_lists_what_is_exchanged_and_how_it_scales(tmp_path) -> None:
    pytest.importorskip("jax", minversion="0.10.2")
    options = ("--shape", "16x64", "--layers", "3", "--devices", "1", "4")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sharding_jax", tmp_path / "results.json", *options],
        cwd=ROOT,
        env=os.environ | devices,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["available"] == 4
    found = {(r["scaling"], r["devices"]): r for r in report["measurements"]}
    assert {key: r["rows"] for key, r in found.items()} == {
        ("weak", 1): 16,
        ("weak", 4): 64,
        ("strong", 1): 16,
        ("strong", 4): 16,
    }
    for (kind, count), record in found.items():
        assert record["forward"]["collectives"] == []
        assert record["layers"] == 3
        exchanged = " ".join(record["step"]["collectives"])  # XLA may send some as one
        assert exchanged.count("f32[64]") == (3 if count > 1 else 0)
        assert set(re.findall(r"all-\w+", exchanged)) <= {"all-reduce"}
        one, work = found[kind, 1], count if kind == "weak" else 1
        for name in ("forward", "step"):
            expected = work * one[name]["seconds"] / record[name]["seconds"]
            assert record[name]["speedup"] == pytest.approx(expected)


def scaling_record(devices: int, seconds: float, graph: dict) -> dict:
    call = {"seconds": seconds, "collectives": []}
    return {
        "scaling": "weak",
        "devices": devices,
        "rows": 8 * devices,
        "cols": 64,
        "layers": 2,
        "forward": dict(call),
        "step": call | {"collectives": ["2 all_reduce"]} | graph,
    }


def test_scaling_in_the_readme_is_made_from_the_files(tmp_path) -> None:
    one = scaling_record(1, 0.001, {"graph_seconds": 0.001})
    two = scaling_record(2, 0.004, {"graph_seconds": 0.0016})
    refused = scaling_record(4, 0.004, {"graph_seconds": None, "not_captured": "RuntimeError: no"})
    plain = scaling_record(2, 0.002, {})
    for record in (one, two, refused, plain):
        record["forward"] |= {k: None for k in record["step"] if k == "graph_seconds"}
        scaling.add_speedups(record, one)
    assert two["step"]["speedup"] == pytest.approx(0.5)
    assert two["step"]["graph_speedup"] == pytest.approx(1.25)
    assert refused["step"]["graph_speedup"] is refused["forward"]["graph_speedup"] is None
    assert "graph_speedup" not in plain["step"]
    facts = {"device": "GPU", "commit": "0123456", "norm": "rms_norm", "layers": 2}
    facts |= {"dtypes": ["bfloat16", "float32"]}
    sources = [tmp_path / "t.json", tmp_path / "j.json"]
    measured = {"torch": [one, two, refused], "jax": [plain]}
    for source, (name, records) in zip(sources, measured.items(), strict=True):
        source.write_text(json.dumps(facts | {name: "1.2", "measurements": records}))
    readme = tmp_path / "README.md"
    shutil.copy(README, readme)
    arguments = ["--readme", str(readme), "--scaling", *map(str, sources)]
    report.main(arguments)
    text = readme.read_text(encoding="utf-8")
    before = README.read_text(encoding="utf-8")
    assert text.split(report.BEGIN_SCALING)[0] == before.split(report.BEGIN_SCALING)[0]
    assert text.split(report.END_SCALING)[1] == before.split(report.END_SCALING)[1]
    for line in (
        "From [t.json](t.json), torch 1.2, GPU, commit 0123456: 2 rms_norm, x bfloat16, weights "
        "float32.",
        "| weak | 2 | 16x64 | as called | 4.000 | 0.50x | 4.000 | 0.50x | 2 all_reduce in step |",
        "| weak | 2 | 16x64 | CUDA graph |  |  | 1.600 | 1.25x | 2 all_reduce in step |",
        "Not captured into a CUDA graph, step: `RuntimeError: no`",
        "| weak | 2 | 16x64 | as called | 2.000 | 1.00x | 2.000 | 1.00x | 2 all_reduce in step |",
    ):
        assert line in text.splitlines()
    report.main(arguments)
    assert readme.read_text(encoding="utf-8") == text


@pytest.mark.gpu
def test_calls_prints_each_call_and_each_part(capsys) -> None:
    assert calls.main("bfloat16", "bfloat16") == 0
    printed = capsys.readouterr().out
    for name in ("rms_norm, out=", "layer_norm_backward, dx=", "driver alone"):
        assert name in printed
