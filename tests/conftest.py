"""The gpu marker and the Hypothesis profiles."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest
from hypothesis import settings
from thorough import THOROUGH

from cupynorm._background import SWITCH
from cupynorm._environment import gpu_name, gpu_problem

# The workers of pytest-xdist share the cores: more threads in each would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# By default JAX would take three quarters of a GPU at its first array. Tests of other workers would
# then fail.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Each call runs its own kernel, and no thread compiles others, except in tests of that.
os.environ[SWITCH] = "0"

# Inductor compiles two kernels or so in a process. A precompiled header takes as long as five.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# Inductor would first compile a C++ program for each kind of vectors, to see whether it runs. All
# processes must agree on this: they share a cache of programs, some of which would be for vectors.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Without optimization, XLA makes code in two thirds of the time, by its older emitters in half of
# that, and in one part, not 32, in three quarters of that. XLA ends the process if it does not know
# a flag, as a newer one may not know the last two.
if gpu_problem() and find_spec("jaxlib") and not THOROUGH:
    as_it_is = "--xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):
        as_it_is += " --xla_cpu_use_fusion_emitters=false"
        as_it_is += " --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {as_it_is}"

# Functions are traced again and again, mostly to programs that XLA compiled before. So JAX keeps
# programs while the tests run. Workers and the processes that they start share them.
if gpu_problem() and find_spec("jaxlib") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="cupynorm-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

settings.register_profile("dev", deadline=None, max_examples=50, print_blob=True)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# The slowest files. They go first, so that no core waits for one of them at the end. By itself
# pytest-xdist starts with the files that have the most tests.
LONGEST = (
    *("test_host_kernels.py", "test_jax.py", "test_jax_sharding.py", "test_compile.py"),
    *("test_host_mutations.py", "test_torch.py", "test_jax_fused.py", "test_examples.py"),
    *("test_quantize.py", "test_fused_kernels.py", "test_groups.py", "test_torch_fusion.py"),
    *("test_host_lines.py", "test_torch_broadcast.py", "test_fuse.py", "test_jax_broadcast.py"),
    *("test_config.py", "test_torch_sharding.py", "test_faces.py", "test_host_runtime.py"),
    *("test_docs.py", "test_numerics_matrix.py", "test_prepared.py", "test_sanitized.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "loadscopereorder", False):
        config.option.loadscopereorder = False
    # If a worker crashes, pytest-xdist hands out its finished files again, and waits for them for
    # ever. So the run ends there and names the test.
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"
    problem = gpu_problem()
    if problem and os.environ.get("CUPYNORM_REQUIRE_GPU", "0") != "0":
        raise pytest.UsageError(f"CUPYNORM_REQUIRE_GPU is set, but there is no GPU: {problem}")


def pytest_report_header() -> str:
    problem = gpu_problem()
    return f"gpu: none, {problem}" if problem else f"gpu: {gpu_name()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    problem = gpu_problem()
    if problem is None:
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA GPU: {problem}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def spare_the_garbage_collector() -> None:
    """Keep it away from imported objects: the benchmark runs it after each measurement."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def skip_what_nvrtc_does_not_know(request: pytest.FixtureRequest) -> None:
    """Skip a test that compiles for a GPU that is newer than this NVRTC: 12.8 knows them all."""
    callspec = getattr(request.node, "callspec", None)
    architecture = callspec.params.get("architecture") if callspec else None
    if isinstance(architecture, str):  # those of layouts are numbers
        cupy = pytest.importorskip("cupy", reason="needs CuPy for NVRTC", exc_type=ImportError)
        nvrtc = cupy.cuda.nvrtc
        try:
            known, found = nvrtc.getSupportedArchs(), ".".join(map(str, nvrtc.getVersion()))
        except (RuntimeError, OSError) as error:
            pytest.skip(f"needs NVRTC: {error}")
        if int(architecture) not in known:
            pytest.skip(f"needs an NVRTC that knows sm_{architecture}, found {found}")


@pytest.fixture(autouse=True)
def on_the_first_gpu(request: pytest.FixtureRequest) -> None:
    """Begin each GPU test on GPU 0: torch does not return to a device without a context."""
    if "gpu" in request.keywords:
        import cupy

        cupy.cuda.runtime.setDevice(0)


@pytest.fixture(autouse=True)
def give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return a GPU test's memory to the device, for the tests of other processes."""
    yield
    if "gpu" in request.keywords:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


# Tests that compare values record the worst ratio of error to bound as a user property of this
# name. User properties also travel from the workers of pytest-xdist.
ERROR_OVER_BOUND = "error/bound"

_worst: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, value in report.user_properties:
            if name == ERROR_OVER_BOUND:
                key, ratio = value
                _worst[key] = max(ratio, _worst.get(key, 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _worst:
        terminalreporter.section("largest error over bound")
    for key, ratio in sorted(_worst.items()):
        terminalreporter.write_line(f"{ratio:6.3f}  {key}")
