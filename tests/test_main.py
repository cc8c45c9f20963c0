"""``python -m cupynorm``: its report, its verdicts and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import cupynorm
from cupynorm import __main__ as report
from cupynorm import _environment


def run_report(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cupynorm", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def test_version_is_all_that_is_printed_on_request() -> None:
    assert run_report("--version") == f"cupynorm {cupynorm.__version__}\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "cupynorm"], stdout=gone, stderr=subprocess.PIPE, check=False
        )
    assert (done.stderr, done.returncode) == (b"", 1)


def right_passes(printed: str) -> list[list[str]]:
    """Return norm, direction, shape and dtypes of the passes that the table calls right."""
    return [line.split()[:5] for line in printed.splitlines() if " right " in line]


def expected_passes(problems: tuple[report.Problem, ...]) -> list[list[str]]:
    return [
        [norm, direction, f"{rows}x{cols}", str(dtype), str(weight_dtype)]
        for rows, cols, dtype, weight_dtype in problems
        for norm in ("rms_norm", "layer_norm")
        for direction in ("forward", "backward")
    ]


@pytest.mark.parametrize("name", ["torch", "jax", "testing"])
def test_a_module_of_the_package_is_imported_on_first_use(name: str) -> None:
    if name != "testing":
        pytest.importorskip(name)
    program = f"""
import sys, cupynorm
assert "cupynorm.{name}" not in sys.modules
print(cupynorm.{name}.__name__)
try:
    cupynorm.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = f"cupynorm.{name}\nmodule 'cupynorm' has no attribute 'nothing'\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_module_whose_framework_is_missing_is_no_attribute(framework: str) -> None:
    program = f"""
import sys
class Missing:
    def find_spec(self, name, *rest):
        if name == "{framework}":
            raise ModuleNotFoundError("No module named {framework!r}", name=name)
sys.meta_path.insert(0, Missing())
import cupynorm
print(hasattr(cupynorm, "{framework}"))
try:
    cupynorm.{framework}
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = f"cupynorm.{framework} cannot be imported: No module named '{framework}'"
    assert (done.stdout, done.returncode) == (f"False\n{said}\n", 0), done.stderr


def test_without_gpu_says_so_and_every_pass_is_right() -> None:
    printed = run_report(CUDA_VISIBLE_DEVICES="")
    assert printed.startswith(f"cupynorm {cupynorm.__version__}\n")
    assert "No GPU can be used" in printed
    assert "on the CPU" in printed
    assert right_passes(printed) == expected_passes(report.CPU_PROBLEMS)


@pytest.mark.parametrize(
    ("driver", "devices", "said"),
    [
        (0, 0, "https://www.nvidia.com/drivers"),
        (13000, 0, "CUDA_VISIBLE_DEVICES"),
        (13000, 1, None),
    ],
)
def test_a_missing_gpu_is_said_with_what_to_do(
    driver: int, devices: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    runtime = cupy.cuda.runtime
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: driver)
    monkeypatch.setattr(runtime, "getDeviceCount", lambda: devices)
    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    problem = _environment.gpu_problem.__wrapped__()
    assert problem is None if said is None else said in problem


FORKED_CHILD = """
import os, sys, warnings
warnings.simplefilter("ignore")
import cupy
import numpy as np
import cupynorm
from cupynorm import _calls, _environment, _fuse, _fused_calls, norms

runtime = cupy.cuda.runtime
runtime.driverGetVersion = lambda: 13000
runtime.getDeviceCount = lambda: 1
runtime.getDevice = lambda: 0
assert _environment.gpu_problem() is None
# An array that says that it is on the GPU. Nothing reads it.
memory = np.ones((2, 8), np.float32)
unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0)
x = cupy.ndarray((2, 8), np.float32, cupy.cuda.MemoryPointer(unowned, 0))
gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * z)
norms._cupy_calls().calls["a key"] = _fuse._launched()
child = os.fork()
if child == 0:
    def fail():
        raise runtime.CUDARuntimeError(3)
    if "used" in sys.argv:
        runtime.getDevice = fail  # the count is still told
    assert not _calls.calls
    print(_environment.gpu_problem())
    _calls.first_call = lambda *_: sys.exit("it is launched")
    _fused_calls.again = lambda *_: sys.exit("it is launched again")
    for call in (
        lambda: cupynorm.rms_norm(x),
        lambda: cupynorm.rms_norm(x, quantize=cupynorm.Quantize("int8", "row")),
        lambda: gated(x, z=x),
        lambda: gated.forward(x, z=x),
        lambda: cupynorm.pack_bitmask(x.view(np.bool_)),
        lambda: cupynorm.dequantize(x.view(np.int8), x[:, :1]),
    )[: 6 if "used" in sys.argv else 1]:
        try:
            call()
        except (RuntimeError, SystemExit) as error:
            print(error)
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert _environment.gpu_problem() is None
assert "a key" in _calls.calls
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("used", [True, False])
def test_a_process_that_was_forked_says_so_if_its_parent_used_the_gpu(used: bool) -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    done = subprocess.run(
        [sys.executable, "-c", FORKED_CHILD, *(["used"] if used else [])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    problem, *calls = done.stdout.splitlines()
    if not used:
        assert (problem, calls) == ("None", ["it is launched"])
        return
    assert problem == (
        "cudaErrorInitializationError: initialization error (a process that was forked from one "
        "that used CUDA cannot use it: start processes by multiprocessing's 'spawn' or "
        "'forkserver')"
    )
    assert calls == 6 * [f"cupynorm cannot use the GPU here: {problem}"]


@pytest.mark.parametrize("version", ["13.6.0", "14.1.0rc1"])
def test_an_old_cupy_is_said_with_what_is_needed(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    monkeypatch.setattr(cupy, "__version__", version)
    problem = _environment.gpu_problem.__wrapped__()
    assert problem == f"CuPy 14.2 or newer is needed, found {version}"


def test_a_missing_cupy_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'cupy'", name="cupy")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "cupy", raising=False)
        patch.setattr("builtins.__import__", mock.Mock(side_effect=missing))
        problem = _environment.gpu_problem.__wrapped__()
    assert "pip install 'cupynorm[cuda12]' or 'cupynorm[cuda13]', in a clone '.[cuda12]'" in problem


@pytest.mark.parametrize("folder", ["{}/file", "{}/file/cache", ""])
def test_a_kernel_cache_that_cannot_be_made_is_said_with_what_to_do(
    folder: str, tmp_path: Path
) -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    (tmp_path / "file").write_text("")
    printed = run_report(CUPY_CACHE_DIR=folder.format(tmp_path))
    reason = "CuPy cannot be imported, as it cannot make its kernel cache: [Errno "
    said = [line for line in printed.splitlines() if reason in line]
    assert [line.split()[0] for line in said] == ["GPU", "No"]
    assert all("set CUPY_CACHE_DIR to a folder that can be written" in line for line in said)
    assert right_passes(printed) == expected_passes(report.CPU_PROBLEMS)


def test_a_home_without_room_for_a_kernel_cache_is_said_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    (tmp_path / "home").write_text("")
    program = "import cupynorm; print(cupynorm.supports('rms_norm', 64, 'float32'))"
    environment = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("CuPy cannot be imported, as it cannot make"), done.stderr
    assert str(tmp_path / "home/.cupy") in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [(), ("bench", "--shapes", "64x64")])
def test_a_kernel_cache_that_cannot_be_written_is_done_without(arguments: tuple[str, ...]) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("needs a folder that not even root can write: Linux's /proc")
    printed = run_report(*arguments, CUPY_CACHE_DIR="/proc")
    assert "/proc, NOT writable: set CUPY_CACHE_DIR to a folder that can be written" in printed
    assert "on the CPU" not in printed


@pytest.mark.gpu
def test_on_gpu_every_pass_is_right() -> None:
    printed = run_report()
    assert f"GPU           {_environment.gpu_name()}" in printed
    assert "on the CPU" not in printed
    assert right_passes(printed) == expected_passes(report.GPU_PROBLEMS)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "gpu_problem", lambda: "a test hides it")
    monkeypatch.setattr(report, "CPU_PROBLEMS", report.CPU_PROBLEMS[:1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("wrong", [np.nan, 0.1])
def test_a_wrong_result_is_named_and_fails(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = cupynorm.rms_norm_backward

    def one_value_off(*args, **kwargs):
        gradients = honest(*args, **kwargs)
        gradients.dweight[3] += wrong
        return gradients

    monkeypatch.setattr(cupynorm, "rms_norm_backward", one_value_off)
    assert report.main([]) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "WRONG " in line]
    assert line.startswith("rms_norm   backward")
    assert "dweight[3]" in line
    assert "1 of 4 results" in printed


def test_kernel_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "NOT writable" in _environment._kernel_cache()
    if Path("/proc").is_dir():  # not even root can write there
        monkeypatch.setenv("CUPY_CACHE_DIR", "/proc")
        assert "/proc, NOT writable: set CUPY_CACHE_DIR to" in _environment._kernel_cache()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert "NOT writable" not in _environment._kernel_cache()
    assert not list(tmp_path.glob("new*"))


def test_kernel_cache_is_reported_to_who_has_no_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("pathlib.Path.home", mock.Mock(side_effect=RuntimeError("no home")))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert str(tmp_path) in _environment._kernel_cache()
