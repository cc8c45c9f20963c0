"""One measurement of the benchmark: a problem by a library, timed, profiled and checked."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_doubles import SMALL, FakeBackend, FakeClock

from benchmarks import calls, cudnn_graphs, host, problems, regimes, relu, results, run
from benchmarks.backends import ALL, cudnn_peer, discover, quack_peer
from benchmarks.backends.base import Call
from benchmarks.measure import measure
from benchmarks.timing import Clock, host_seconds
from cupynorm import _bench, _oracle, reference
from cupynorm._bench import Problem


class RecordingCupy:
    """A CuPy that records what the clock asks of it, in order."""

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


def test_no_more_than_four_runs_are_queued(recording) -> None:
    assert len(Clock().sample([recording.call("run")], 9)) == 9
    order = [event for event in recording.order if event in ("run", "wait")]
    assert order == [*["run"] * 4, "wait", *["run"] * 4, "wait", "run", "wait"]


def test_each_set_of_arrays_is_warm_before_it_is_timed(recording) -> None:
    Clock().measure([recording.call(f"run {i}") for i in range(8)])
    runs = [event for event in recording.order if event.startswith("run")]
    assert runs[:10] == [f"run {i}" for i in (*range(8), 0, 1)]


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
    """Runs on NumPy arrays. If `flipped`, one bit of each row is inverted, in column 7."""

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
    results = backend.prepare(problem, inputs).run()
    outputs = [output.copy() for output in results if output is not None]
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
    """Replaces a graph of cuDNN: outputs of any values, arrays it reads, and a count of runs."""

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
    """Replace the graphs of cuDNN. Return the directions built and what each run read."""
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
    for call, tensors in zip(calls, sets, strict=True):  # each call reads its own tensors
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
        else ["norm_backward_column_parallel"]
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


# ---- the parts of a call ------------------------------------------------------------------------


@pytest.mark.gpu
def test_calls_prints_each_call_and_each_part(capsys) -> None:
    assert calls.main("bfloat16", "bfloat16") == 0
    printed = capsys.readouterr().out
    fused = "fused rms_norm_backward, 2048x1024"
    for name in ("rms_norm, out=", "layer_norm_backward, dx=", fused, "driver alone"):
        assert name in printed
