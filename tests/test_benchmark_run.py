"""The benchmark's command lines: what they run, resume, refuse and print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_doubles import README, SYNTHETIC, FakeBackend, FakeClock, reference_outputs
from rich.console import Console

import cupynorm
from benchmarks import calls, compare, host, problems, regimes, relu, results, run, summary
from benchmarks.backends import ALL
from benchmarks.backends.base import Call
from benchmarks.display import Display
from benchmarks.measure import measure
from benchmarks.timing import Timing
from cupynorm import __main__ as command
from cupynorm import _bench, _bench_command
from cupynorm._bench import Problem


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


def test_commands_that_are_written_down_are_understood(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no results file
    text = README.read_text(encoding="utf-8") + run.__doc__
    commands = re.findall(r"^ *python -m benchmarks\.run (.+)$", text, re.MULTILINE)
    parsed = [run.parse(shlex.split(command)) for command in commands]
    assert [options.results.name for options in parsed] == ["results.json"] * 2
    assert [options.resume for options in parsed] == [False, True]
    assert parsed[1].backends == ["cupynorm"]


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
    assert path.read_text(encoding="utf-8") == "measured"
    assert run.parse([str(path), "--resume"]).resume
    assert run.parse([str(path), "--compile-share", "0", "2"]).compile_share == [0, 2]


@pytest.mark.parametrize("module", [run, relu, regimes, calls])
def test_what_needs_a_gpu_says_so(module, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(module, "gpu_problem", lambda: "a test hides it")
    monkeypatch.setitem(sys.modules, "cupy", None)  # so that nothing asks it for a device
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
    monkeypatch.setattr(os, "environ", dict(os.environ))  # run sets JAX's cache folder
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
    for share in (0, 1):  # both have equal work
        run.compile_share(chosen, set(), share, 2, None)
        assert compiled == ["quack", "liger"] * half + ["torch.compile"] * half
        compiled.clear()


@pytest.fixture
def on_numpy(monkeypatch) -> list:
    """Make runs measure two backends on NumPy arrays. Return those whose first call is timed."""

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
    if room:  # as in a new process
        monkeypatch.setattr(_bench, "inputs", inputs)
    assert run.main(arguments) == 0
    resumed = results.load(path)
    assert resumed["complete"]
    right = ("ok", None)
    why = "no memory for the inputs: MemoryError: Out of memory allocating 512 bytes"
    large = right if room else ("failed", why)
    found = [(r["cols"], (r["status"], r.get("reason"))) for r in resumed["measurements"]]
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
    before = (tmp_path / "results.json").read_text(encoding="utf-8")
    monkeypatch.setattr(results, "machine", lambda: {"gpu": "GPU", "uuid": "01234567"})
    with pytest.raises(SystemExit, match=r"machine: uuid '89abcdef', now '01234567'$"):
        run.main(arguments)
    assert (tmp_path / "results.json").read_text(encoding="utf-8") == before
    older = results.load(tmp_path / "results.json")
    del older["machine"]["uuid"]
    results.save(older, tmp_path / "results.json")
    with pytest.raises(SystemExit, match=r"machine: uuid 'unknown', now '01234567'$"):
        run.main(arguments)


def test_comparison_warns_where_the_method_differs(tmp_path, on_numpy, capsys) -> None:
    synthetic = results.load(SYNTHETIC)
    assert "method" not in synthetic  # older than the field, so method 1
    path = tmp_path / "new.json"
    assert run.main([str(path), "--tables", "throughput", *NARROW]) == 0
    begun = results.load(path)
    assert begun["method"] == results.METHOD == 5
    results.save(synthetic | {"method": begun["method"]}, path)
    capsys.readouterr()
    warning = "WARNING: the method differs: "
    assert compare.main([str(SYNTHETIC), str(path)]) == 0
    assert f"{warning}1, 5 (METHOD of benchmarks/results.py)" in capsys.readouterr().out
    assert compare.main([str(path), str(path)]) == 0
    results.save(synthetic | {"method": 1}, path)
    assert compare.main([str(SYNTHETIC), str(path)]) == 0
    assert warning not in capsys.readouterr().out


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
    other = {"backend": "liger", "cache": "cold"}  # not available now
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
                record = asdict(problem) | {"backend": name}
                records.append(record | outcome | {"times": times})
            display.finished(problem)
        # A problem measured again later, as tune does, is among the newest.
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
    assert "…" not in shown  # only whole columns, as many as fit
    assert "quack" in shown
    assert "eager" not in shown


def test_bench_without_gpu_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "gpu_problem", lambda: "a test hides it")
    assert command.main(["bench"]) == 1
    assert "There is nothing to time: a test hides it." in capsys.readouterr().out


def bench_on_numpy(monkeypatch, wrong: str = "") -> list[str]:
    """Make bench run on NumPy arrays, with one output off. Return the list of what it does."""
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
        # cuDNN has the graph in float32 only, and only if it is installed and new enough.
        if problem.dtype == "float32" and "cuDNN" in cell:
            assert cell["cuDNN"]["status"] != "wrong", cell["cuDNN"]
            assert list(cell["cuDNN"].get("errors", ())) in ([], list(cell["relu"]["errors"]))
