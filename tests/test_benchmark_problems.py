"""The benchmark's problems, and its check of right and wrong results. No GPU is needed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_doubles import SMALL, reference_outputs

from benchmarks import problems, timing
from benchmarks.timing import Timing, profiled, rotations
from cupynorm import _bench, _oracle
from cupynorm._bench import DTYPES, Problem

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
    hidden, odd = (list(problems.select(name)) for name in ("hidden", "odd"))
    assert len(set(hidden)) == len(hidden) == 4 * len(problems.HIDDEN)
    assert all(p.cols & (p.cols - 1) for p in hidden)
    assert len(set(odd)) == len(odd) == 4 * len(problems.ODD)
    assert all(p.cols % 2 for p in odd)


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
    assert rotations(125, cache_bytes=1000) == 50
    assert rotations(126, cache_bytes=1000) == 2
    assert rotations(4000, cache_bytes=1000) == 2
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

    def call() -> None:  # two kernels. The first takes longer from round to round
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
    events.clear()
    assert profiled([call] * 15, *arguments).runs == 45  # each call in each round
    events.clear()
    profiled([call, call], *arguments)
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


# ---- right or wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_oracle_agrees_with_the_bounds_of_testing(problem, monkeypatch) -> None:
    monkeypatch.setattr(_oracle, "CHUNK_ELEMENTS", 10 * problem.cols)
    arrays = _bench.inputs(problem, 0, np)
    outputs, ratios = reference_outputs(problem, arrays)
    found = _oracle.errors(problem, arrays, outputs, np)
    assert _oracle.verdict(found) is None
    for name, errors in found.items():
        # The reference is float64 too, but rounds elsewhere. Its stored statistics are rounded.
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
    # The norm over all rows shows a float32 row of zeros, but not a row that is a little off.
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
