"""Promises of a launch besides values: bits, memory, streams, graphs, devices, compilations."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import (
    kernels_of_many_rows,
    poison,
    threads_that_wait,
    to_cupy,
    to_numpy,
    wait_for_threads,
)
from strategies import DTYPES, make_values

import cupynorm
from cupynorm import _calls, _compile, _driver, testing
from cupynorm._layout import forward_config, gpu_of, pack_length
from cupynorm._operation import BackwardSpec, ForwardSpec
from cupynorm._plans import (
    LEAST_COUNTED,
    architecture,
    few_rows,
    few_rows_backward,
    forward_plan,
)

pytestmark = pytest.mark.gpu

NORMS = ("rms_norm", "layer_norm")


def run(
    norm: str, x: Any, weight: Any, dy: Any, residual: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Return forward and backward results for arrays that are on the GPU.

    The residual is also used as the gradient of the sum.
    """
    given: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    if residual is not None:
        given = {"residual": residual}
        asked = {"dresidual_out": residual}
        asked |= {"dx_dtype": x.dtype, "dresidual_dtype": residual.dtype}
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, **given, **options)
    statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
    total = x if residual is None else forward.residual_out
    return forward, getattr(cupynorm, f"{norm}_backward")(
        dy, total, weight, *statistics, bias=True, **asked, **options
    )


def residual_of(shape: tuple[int, ...], name: str | None, seed: int) -> Any:
    return None if name is None else to_cupy(make_values("normal", shape, DTYPES[name], seed))


def assert_same_rows(part: tuple[Any, Any], whole: tuple[Any, Any], where: slice) -> None:
    """Compare what depends on rows alone, in two runs. The second run has other rows too."""
    for of_part, of_whole in zip(part, whole, strict=True):
        for name in ("y", "mean", "rstd", "residual_out", "dx", "dresidual"):
            mine = getattr(of_part, name, None)
            if mine is not None:
                assert_same_bits(mine, getattr(of_whole, name)[where])


def assert_same_bits(a: Any, b: Any) -> None:
    a, b = to_numpy(a), to_numpy(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


# ---- bits ----------------------------------------------------------------------------------------


WIDTHS = (
    *(5, 64, 768, 769, 1792, 2048, 4096, 4097, 6400, 8192, 12288, 20001, 25600, 40000),
    *(98304, 163840, 200704, 262144, 262152),
)


@pytest.mark.parametrize(
    ("n", "residual"),
    [
        *((n, None) for n in WIDTHS),
        *((n, residual) for n in WIDTHS[::3] for residual in ("float32", "bfloat16")),
    ],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_alignment(
    norm: str, name: str, n: int, residual: str | None
) -> None:
    import cupy

    # More rows than have kernels of their own.
    shape = (4096 if n < 65536 else 128, n)
    rows = to_cupy(make_values("mean_1e2", shape, DTYPES[name], 1))
    dy = to_cupy(make_values("normal", shape, DTYPES[name], 2))
    weight = to_cupy(make_values("normal", (n,), np.float32, 3))
    to_add = residual_of(shape, residual, 4)

    def part_of(array: Any, where: slice, *, shift: bool) -> Any:
        if array is None or not shift:
            return None if array is None else array[where]
        # The same rows, one element further in memory: narrower accesses, equal bits.
        part = array[where].view(f"u{array.itemsize}")
        base = cupy.empty(part.size + 1, part.dtype)
        base[1:] = part.reshape(-1)
        return base[1:].reshape(part.shape).view(array.dtype)

    whole = run(norm, rows, weight, dy, to_add)
    for where in (slice(100, 101), slice(100, 107), slice(0, shape[0])):
        for shift in (False, True):
            x, gradient, added = (part_of(a, where, shift=shift) for a in (rows, dy, to_add))
            assert_same_rows(run(norm, x, weight, gradient, added), whole, where)


@pytest.mark.parametrize("n", [5, 40, 64, 256])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_has_the_same_bits_beside_rows_out_of_range(norm: str, name: str, n: int) -> None:
    rows = make_values("mean_1e2", (1000, n), DTYPES[name], 1)
    beside = rows.copy()
    beside[1::2] = make_values("normal", (500, n), DTYPES[name], 2) * rows.dtype.type(1e30)
    forward = getattr(cupynorm, f"{norm}_forward")
    alone, among = forward(to_cupy(rows)), forward(to_cupy(beside))
    assert_same_bits(among.y[::2], alone.y[::2])
    assert_same_bits(among.rstd[::2], alone.rstd[::2])


@pytest.mark.parametrize("residual", [None, "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("m", "n"), [(3001, 64), (3001, 1024), (3001, 8192), (3001, 40000), (131, 262152)]
)
@pytest.mark.parametrize("norm", NORMS)
def test_ten_runs_give_the_same_bits(norm: str, m: int, n: int, residual: str | None) -> None:
    x = to_cupy(make_values("normal", (m, n), DTYPES["bfloat16"], 1))
    dy = to_cupy(make_values("normal", (m, n), DTYPES["bfloat16"], 2))
    weight = to_cupy(make_values("normal", (n,), np.float32, 3))
    to_add = residual_of((m, n), residual, 4)
    first = run(norm, x, weight, dy, to_add)
    for _ in range(9):
        poison()
        again = run(norm, x, weight, dy, to_add)
        assert_same_rows(again, first, slice(None))
        for field in ("dweight", "dbias"):
            assert_same_bits(getattr(again[1], field), getattr(first[1], field))


def test_inference_and_training_give_the_same_y() -> None:
    x = to_cupy(make_values("normal", (33, 3000), DTYPES["float16"], 1))
    assert_same_bits(cupynorm.layer_norm(x), cupynorm.layer_norm_forward(x).y)


@pytest.mark.parametrize(("zero_centered", "relu"), [(False, None), (True, (-0.5, 0.75))])
@pytest.mark.parametrize(
    ("name", "weight"),
    [(name, weight) for name in ("float16", "bfloat16") for weight in (name, "float32")]
    + [("float32", "float32"), ("float64", "float64")],
)
@pytest.mark.parametrize("norm", NORMS)
def test_few_rows_have_the_bits_of_many(
    norm: Any, name: str, weight: str, zero_centered: bool, relu: tuple[float, float] | None
) -> None:
    had_their_own, in_clusters = [], []
    for n in (504, 1024, 2040, 4096, 8192, 12288, 16384):
        operands = [to_cupy(make_values("normal", (n,), DTYPES[weight], seed)) for seed in (2, 3)]
        call = functools.partial(
            getattr(cupynorm, f"{norm}_forward"), zero_centered=zero_centered, relu=relu
        )
        spec = ForwardSpec(norm, name, weight, weight, name, zero_centered, True, relu is not None)
        vector = pack_length(name)
        few = [most for most, _ in few_rows(spec, n, vector, 0)]
        if not few:
            continue
        had_their_own.append(n)
        sizes = (1, *few, few[-1] + 1)
        one, *plans = (forward_plan(spec, m, n, vector, 0) for m in sizes)
        assert one is plans[0]
        assert all(a.kernel is not b.kernel for a, b in itertools.pairwise(plans))
        if one.cluster_blocks > 1:
            in_clusters.append(n)
        for regime in ("normal", "mean_1e2", "mixed_rows", "extreme", "nonfinite"):
            rows = to_cupy(make_values(regime, (sizes[-1], n), DTYPES[name], 1))
            many = call(rows, *operands)
            for most in few:
                for of_many, of_few in zip(many, call(rows[:most], *operands), strict=True):
                    assert (of_many is None) == (of_few is None)
                    if of_few is not None:
                        assert_same_bits(of_many[:most], of_few)
    assert had_their_own
    if name == weight == "bfloat16":
        assert 504 in had_their_own
        # With both options, RMSNorm has no kernel for few rows of 16384.
        if not zero_centered and gpu_of(architecture(0)).clusters:
            assert in_clusters == ([8192, 16384] if norm == "layer_norm" else [16384])


@pytest.mark.parametrize("n", [256, 1000, 2048, 4096, 8192, 12288, 16384, 32768])
@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_backward_of_few_rows_has_dx_of_many(norm: Any, name: str, n: int) -> None:
    weight = make_values("normal", (n,), DTYPES[name], 3)
    spec = BackwardSpec(norm, name, name, name, name, False, False)
    divisors = n | pack_length(name)
    vector = divisors & -divisors
    tiers = [rows for rows, _ in few_rows_backward(spec, n, vector, 0, False)]
    most = tiers[-1]
    x, dy = (make_values("mean_1e2", (most + 1, n), DTYPES[name], seed) for seed in (1, 2))
    on_gpu = [to_cupy(array) for array in (x, weight, dy)]
    _, many = run(norm, *on_gpu)
    for m in sorted({1, 2, most // 3, most - 1, *tiers} - {0}):
        poison()
        forward, part = run(norm, on_gpu[0][:m], on_gpu[1], on_gpu[2][:m])
        assert_same_bits(part.dx, many.dx[:m])
        statistics = to_numpy(forward)[1:3]
        testing.check_backward(norm, to_numpy(part), dy[:m], x[:m], weight, *statistics, bias=True)
        _, again = run(norm, on_gpu[0][:m], on_gpu[1], on_gpu[2][:m])
        assert_same_bits(again.dweight, part.dweight)
        assert_same_bits(again.dbias, part.dbias)
        over, given = on_gpu[2][:m].copy(), (forward.mean, forward.rstd)[norm == "rms_norm" :]
        backward = getattr(cupynorm, f"{norm}_backward")
        in_place = backward(over, on_gpu[0][:m], on_gpu[1], *given, bias=True, dx=over)
        assert_same_bits(over, part.dx)
        testing.check_backward(
            norm, to_numpy(in_place), dy[:m], x[:m], weight, *statistics, bias=True
        )


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], None]]:
    """Wait for large tests of other workers. Yield a function that asks for free memory."""
    import cupy

    fcntl = pytest.importorskip("fcntl", reason="keeps large tests apart by flock")
    pool = cupy.get_default_memory_pool()

    def needs(gigabytes: int) -> None:
        pool.free_all_blocks()
        free, _ = cupy.cuda.runtime.memGetInfo()
        if free < gigabytes * 10**9:
            pytest.skip(f"needs {gigabytes} GB of free GPU memory, finds {free / 1e9:.0f}")

    # The workers of a run share the folder above their own.
    with (tmp_path_factory.getbasetemp().parent / "large-tests").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield needs
        pool.free_all_blocks()


def passes_into(
    norm: str, dy: Any, x: Any, weight: Any, bias: Any, y: Any, dx: Any
) -> tuple[Any, Any]:
    """Return forward and backward results. y and dx are written to given arrays."""
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, out=y)
    statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
    backward = getattr(cupynorm, f"{norm}_backward")(dy, x, weight, *statistics, bias=bias, dx=dx)
    assert forward.y is y
    assert backward.dx is dx
    return forward, backward


def check_passes(
    norm: Any, results: tuple[Any, Any], dy: Any, x: Any, weight: Any, bias: Any
) -> None:
    """Hold both passes to the reference. dy, x, weight and bias are NumPy arrays."""
    forward, backward = map(to_numpy, results)
    eps = 1e-6 if norm == "rms_norm" else 1e-5
    testing.check_forward(norm, forward, x, weight, bias, eps=eps)
    statistics = forward.mean, forward.rstd
    testing.check_backward(norm, backward, dy, x, weight, *statistics, bias=bias)


def check_repeated_rows(norm: str, rows: Any, m: int, most: int = 2**26) -> None:
    """Check every row of both passes over m rows. Row i is rows[i % len(rows)], of x and of dy.

    Rows have the bits of a call with few. About `most` elements are compared at a time.
    """
    import cupy

    period, n = rows.shape
    weight, bias = (make_values("normal", (n,), np.float32, seed) for seed in (2, 3))
    on_gpu = [to_cupy(array) for array in (rows, rows, weight, bias)]
    in_turn = cupy.arange(max(1, most // (period * n)) * period) % period
    parts = [slice(i, min(i + len(in_turn), m)) for i in range(0, m, len(in_turn))]
    x, y, dx = (cupy.empty((m, n), np.uint16) for _ in range(3))
    pattern = on_gpu[0].view(np.uint16)[in_turn]
    freed = cupy.empty((m + 64, 2), np.float32)  # where the pool then puts the statistics
    for part in parts:
        x[part] = pattern[: part.stop - part.start]
        y[part] = dx[part] = 0xFFFF  # NaN
        freed[part] = np.nan
    del freed
    x, y, dx = (array.view(rows.dtype) for array in (x, y, dx))
    forward, backward = passes_into(norm, x, x, *on_gpu[2:], y, dx)

    outputs = (cupy.empty((period, n), np.uint16).view(rows.dtype) for _ in range(2))
    few = passes_into(norm, *on_gpu, *outputs)
    check_passes(norm, few, rows, rows, weight, bias)
    for name, whole in {**forward._asdict(), "dx": dx}.items():
        if whole is None:
            continue
        word = f"u{whole.itemsize}"
        of_few = few[1].dx if name == "dx" else getattr(few[0], name)
        pattern = of_few.view(word)[in_turn]
        for part in parts:
            same = whole.view(word)[part] == pattern[: part.stop - part.start]
            assert bool(same.all()), f"{name}, rows {part.start} to {part.stop}"

    mean, rstd = (to_numpy(s) for s in (few[0].mean, few[0].rstd))
    wide = rows.astype(np.float64)
    xhat = (wide - (0 if mean is None else mean[:, None])) * rstd[:, None]
    times = np.full((period, 1), m // period)
    times[: m % period] += 1
    for name, of_row in (("dweight", wide * xhat), ("dbias", wide)):
        found = to_numpy(getattr(backward, name)).astype(np.float64)
        bound = 1e-5 * (times * np.abs(wide) * (np.abs(xhat) + 1)).sum(axis=0)
        assert (np.abs(found - (times * of_row).sum(axis=0)) <= bound).all(), name


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("m", "gigabytes"), [(70_000, 20), (131_080, 35)])
def test_more_than_2_to_the_31_and_to_the_32_elements(
    norm: str, m: int, gigabytes: int, large: Any
) -> None:
    large(gigabytes)
    rows = make_values("normal", (7, 32_768), DTYPES["bfloat16"], 1)
    check_repeated_rows(norm, rows, m)


@pytest.mark.parametrize("norm", NORMS)
def test_2_to_the_31_rows_but_one(norm: str, large: Any) -> None:
    large(40)  # x, y and dx have 4.3 GB each, mean and rstd 8.6
    check_repeated_rows(norm, make_values("normal", (1009, 1), DTYPES["bfloat16"], 1), 2**31 - 1)


def check_rows_apart(norm: str, m: int, n: int, apart: int) -> None:
    """Check both passes over rows that begin so far apart, and that only y and dx are written."""
    import cupy

    memory = cupy.empty((m, apart), np.uint16)
    for i in range(m):
        memory[i] = 0xFFFF  # NaN
    step = n + 8
    places = [slice(i * step, i * step + n) for i in range(4)]
    rows = [make_values("normal", (m, n), DTYPES["bfloat16"], seed) for seed in (1, 2)]
    vectors = [make_values("normal", (n,), np.float32, seed) for seed in (3, 4)]
    for place, values in zip(places, rows, strict=False):
        memory[:, place] = cupy.asarray(values.view(np.uint16))
    dy, x, y, dx = (memory[:, place].view(rows[0].dtype) for place in places)
    results = passes_into(norm, dy, x, *map(to_cupy, vectors), y, dx)
    check_passes(norm, results, *rows, *vectors)
    for place, values in zip(places, rows, strict=False):
        np.testing.assert_array_equal(to_numpy(memory[:, place]), values.view(np.uint16))
    gaps = [slice(place.stop, place.start + step) for place in places]
    for i, gap in itertools.product(range(m), (*gaps, slice(4 * step, apart))):
        assert bool((memory[i, gap] == 0xFFFF).all()), f"behind row {i}, in {gap}"


@pytest.mark.parametrize(
    ("n", "many"),
    [
        *((256, False), (256, True), (4096, False), (4096, True)),
        *((65_536, True), (262_144, True), (800_008, True)),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_rows_apart_span_more_than_2_to_the_32_elements(
    norm: str, n: int, many: bool, large: Any
) -> None:
    large(16)
    with kernels_of_many_rows() if many else contextlib.nullcontext():
        check_rows_apart(norm, 18, n, 2**28)


def check_rows_of(norm: str, name: str, m: int, n: int) -> None:
    import cupy

    rows = [make_values(of, (m, n), DTYPES[name], i) for i, of in enumerate(("normal", "mean_1e2"))]
    vectors = [make_values("normal", (n,), np.float32, seed) for seed in (3, 4)]
    word = f"u{rows[0].itemsize}"
    outputs = [cupy.full((m, n), np.iinfo(word).max, word).view(rows[0].dtype) for _ in range(2)]
    poison()
    results = passes_into(norm, *map(to_cupy, (*rows, *vectors)), *outputs)
    check_passes(norm, results, *rows, *vectors)


@pytest.mark.parametrize(
    ("name", "m", "n"), [("float32", 1, 2**24 + 3), ("bfloat16", 2, 2**24 + 8)]
)
@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_more_than_2_to_the_24_elements(norm: str, name: str, m: int, n: int) -> None:
    check_rows_of(norm, name, m, n)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_outputs_in_place(norm: str) -> None:
    # LayerNorm's weight gradients, for each n: by partials; with dx; in clusters with dx; by
    # partials, as n is beyond the limit.
    for n in (768, 769, 40000, 98304):
        x = to_cupy(make_values("normal", (37, n), DTYPES["float32"], 1))
        dy = to_cupy(make_values("normal", (37, n), DTYPES["float32"], 2))
        weight = to_cupy(make_values("normal", (n,), np.float32, 3))
        forward, backward = run(norm, x, weight, dy)
        same = x.copy()
        assert getattr(cupynorm, norm)(same, weight, out=same) is same
        assert_same_bits(same, forward.y)
        statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
        over = dy.copy()
        in_place = getattr(cupynorm, f"{norm}_backward")(
            over, x, weight, *statistics, bias=True, dx=over
        )
        assert in_place.dx is over
        assert_same_bits(over, backward.dx)
        # Blocks that read dy themselves sum few rows' weight gradients with dx, unless dx is dy.
        if n == 98304 or (n == 768 and norm == "layer_norm"):
            assert_same_bits(in_place.dweight, backward.dweight)
            assert_same_bits(in_place.dbias, backward.dbias)
        over[...] = dy
        again = getattr(cupynorm, f"{norm}_backward")(
            over, x, weight, *statistics, bias=True, dx=over
        )
        assert_same_bits(again.dweight, in_place.dweight)
        given = map(to_numpy, (dy, x, weight))
        testing.check_backward(norm, to_numpy(in_place), *given, *to_numpy(forward)[1:3], bias=True)


def test_a_slice_of_a_packed_qkv_is_neither_copied_nor_overrun() -> None:
    import cupy

    qkv = cupy.full((4, 128, 3 * 1024 + 8), 7.0, np.float32)
    values = make_values("normal", (4, 128, 1024), DTYPES["float32"], 1)
    q = qkv[..., 8 : 8 + 1024]
    q[...] = cupy.asarray(values)
    expected = cupynorm.rms_norm(cupy.ascontiguousarray(q))
    pool = cupy.get_default_memory_pool()
    target = cupy.empty_like(expected)
    cupynorm.rms_norm(q, out=target)
    before = pool.used_bytes()
    cupynorm.rms_norm(q, out=target)
    assert pool.used_bytes() == before
    assert_same_bits(target, expected)
    cupynorm.rms_norm(q, out=q)
    assert_same_bits(cupy.ascontiguousarray(q), expected)
    assert bool((qkv[..., :8] == 7).all())
    assert bool((qkv[..., 8 + 1024 :] == 7).all())


def test_an_address_inside_an_element_is_refused() -> None:
    import cupy

    memory = cupy.zeros(4 * 64 + 4, np.uint8)
    unaligned = cupy.ndarray((64,), np.float32, memptr=memory.data + 1)
    x = cupy.ones((5, 64), np.float32)
    with pytest.raises(ValueError, match="weight must be aligned to its elements of 4 bytes"):
        cupynorm.rms_norm(x, unaligned)
    with pytest.raises(ValueError, match="x must be aligned"):
        cupynorm.rms_norm(unaligned)
    with pytest.raises(ValueError, match="out must be aligned"):
        cupynorm.rms_norm(x[0], out=unaligned)


@pytest.mark.parametrize("norm", NORMS)
def test_no_rows(norm: str) -> None:
    import cupy

    for n in (768, 196608):
        x = cupy.empty((0, 4, n), np.float16)
        weight = cupy.ones(n, np.float32)
        poison()
        forward, backward = run(norm, x, weight, x)
        assert forward.y.shape == backward.dx.shape == (0, 4, n)
        assert forward.rstd.shape == (0, 4)
        assert not to_numpy(backward.dweight).any()
        assert not to_numpy(backward.dbias).any()


# ---- streams, graphs, threads, processes, devices ------------------------------------------------


def test_launches_follow_the_current_stream() -> None:
    import cupy

    x = to_cupy(make_values("normal", (4096, 4096), DTYPES["float32"], 1))
    expected = cupynorm.rms_norm(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        late = cupy.zeros_like(x)
        for _ in range(50):  # keeps the stream busy while the host runs ahead
            late += 1
        late[...] = x
        y = cupynorm.rms_norm(late)
    stream.synchronize()
    assert_same_bits(y, expected)


@pytest.mark.parametrize("norm", NORMS)
def test_kernels_that_fill_the_gpu_run_on_several_streams(norm: str) -> None:
    import cupy

    # Blocks of strips wait for each other. Kernels that fill the GPU run at the same time.
    x = to_cupy(make_values("normal", (40, 98304), DTYPES["float32"], 1))
    dy = to_cupy(make_values("normal", (40, 98304), DTYPES["float32"], 2))
    weight = to_cupy(make_values("normal", (98304,), np.float32, 3))
    _, expected = run(norm, x, weight, dy)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True, priority=p) for p in (0, 0, -1, -1)]
    results = []
    for _ in range(8):
        for stream in streams:
            with stream:
                beside = cupy.sqrt(x)
                results.append((run(norm, x, weight, dy)[1], beside))
    for stream in streams:
        stream.synchronize()
    for backward, _ in results:
        for field in ("dx", "dweight", "dbias"):
            assert_same_bits(getattr(backward, field), getattr(expected, field))


@pytest.mark.parametrize(
    ("norm", "name", "n", "relu"),
    [
        *(("layer_norm", "bfloat16", n, None) for n in (16384, 32760, 40960)),
        *(("layer_norm", "float32", n, None) for n in (12284, 32768, 65536, 98304, 229376)),
        *(("rms_norm", "bfloat16", n, None) for n in (32768, 131072, 163840)),
        ("rms_norm", "float32", 262144, None),
        *(("rms_norm", name, 262144, (0.0, 6.0)) for name in ("bfloat16", "float32")),
    ],
)
def test_many_rows_are_counted_each_once(
    norm: Any, name: str, n: int, relu: tuple[float, float] | None
) -> None:
    import cupy

    bias = "float32" if norm == "layer_norm" else None
    spec = ForwardSpec(norm, name, "float32", bias, name, False, True, relu is not None)
    vector = (n | pack_length(name)) & -(n | pack_length(name))
    plan = forward_plan(spec, 1, n, vector, 0)
    if plan.most_clusters is None:
        pytest.skip(f"this GPU does not stage rows of {n} {name}")
    m = LEAST_COUNTED * plan.most_clusters + 37
    assert plan.scratch_bytes(m) > plan.scratch_bytes(97) == 0
    few = to_cupy(make_values("mean_1e2", (97, n), DTYPES[name], 1))
    affine = [to_cupy(make_values("normal", (n,), np.float32, 2)) for _ in range(1 + bool(bias))]
    word = f"u{few.itemsize}"
    which = cupy.arange(m) % 97
    x = few.view(word)[which].view(few.dtype)
    forward = functools.partial(getattr(cupynorm, f"{norm}_forward"), relu=relu)
    expected = forward(few, *affine)

    def assert_right(result: Any) -> None:
        for of_few, of_many in zip(expected, result, strict=True):
            if of_few is not None:
                bits = f"u{of_few.itemsize}"
                assert bool((of_few.view(bits)[which] == of_many.view(bits)).all())

    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    for stream in streams * 2:
        with stream:
            results.append(forward(x, *affine))
    for stream in streams:
        stream.synchronize()
    for result in results:
        assert_right(result)
    with stream:
        stream.begin_capture()
        result = forward(x, *affine)
        graph = stream.end_capture()
    for _ in range(3):
        result.y.view(word)[...] = 0xABCD
        result.rstd.fill(np.nan)
        poison()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_right(result)


@pytest.mark.parametrize("residual", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_warm_call_is_captured_into_a_graph(norm: str, residual: str | None) -> None:
    import cupy

    for n in (1024, 40000, 98304):
        x = to_cupy(make_values("normal", (64, n), DTYPES["float32"], 1))
        dy = to_cupy(make_values("normal", (64, n), DTYPES["float32"], 2))
        weight = to_cupy(make_values("normal", (n,), np.float32, 3))
        to_add = residual_of((64, n), residual, 5)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            run(norm, x, weight, dy, to_add)
            stream.synchronize()
            stream.begin_capture()
            forward, backward = run(norm, x, weight, dy, to_add)
            graph = stream.end_capture()
        cupy.cuda.Device().synchronize()
        fresh = to_cupy(make_values("normal", (64, n), DTYPES["float32"], 4))
        x[...] = fresh
        if to_add is not None:
            to_add[...] = residual_of((64, n), residual, 6)
        poison()  # a replay must not depend on scratch that went back to the pool
        cupy.cuda.Device().synchronize()
        with stream:
            graph.launch(stream)
        stream.synchronize()
        expected = run(norm, fresh, weight, dy, to_add)
        assert_same_rows((forward, backward), expected, slice(None))
        assert_same_bits(backward.dweight, expected[1].dweight)


def test_a_copy_made_during_capture_lives_as_long_as_the_graph() -> None:
    import cupy

    columns = cupy.ones((64, 2048), np.float32)
    columns[...] = cupy.arange(2048, dtype=np.float32)
    x = columns[:, ::2]  # must be copied
    out = cupy.empty((64, 1024), np.float32)
    expected = cupynorm.rms_norm(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cupynorm.rms_norm(x, out=out)
        stream.synchronize()
        stream.begin_capture()
        cupynorm.rms_norm(x, out=out)
        graph = stream.end_capture()
        taken = [cupy.full((64, 1024), np.nan, np.float32) for _ in range(8)]
        out.fill(0)
        graph.launch(stream)
    stream.synchronize()
    assert_same_bits(out, expected)
    for array in taken:  # the memory that the graph writes was not given to others
        assert bool(cupy.isnan(array).all())


def test_copies_of_vectors_made_during_capture_live_as_long_as_the_graph() -> None:
    import cupy

    shape = (3, 40, 4, 64)
    drawn = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    x, dy = cupy.asarray(drawn)
    weight = cupy.arange(3 * 4 * 64, dtype=np.float16).reshape(3, 1, 4, 64) / 100
    bias = cupy.ones((64,), np.float32)
    rstd = cupynorm.rms_norm_forward(x, weight, bias).rstd

    def step() -> tuple[Any, ...]:
        y = cupynorm.rms_norm(x, weight, bias)
        return y, *cupynorm.rms_norm_backward(dy, x, weight, rstd, bias=bias)[:3]

    expected = step()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        results = step()
        graph = stream.end_capture()
        taken = [cupy.full(shape, np.nan, np.float32) for _ in range(8)]
        taken += [cupy.full((size,), np.nan, np.float32) for size in (64, 768) for _ in range(8)]
        graph.launch(stream)
    stream.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        assert_same_bits(result, wanted)
    for array in taken:
        assert bool(cupy.isnan(array).all())


def test_a_cold_call_in_a_capture_says_what_to_do() -> None:
    import cupy

    x = cupy.ones((4, 1237), np.float32)  # a width no other test uses
    cupynorm.rms_norm(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty((4, 1237), np.float32)
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"warmup.*before the capture"):
                cupynorm.layer_norm(x, bias=x[0], out=out)
            cupynorm.rms_norm(x, out=out)  # the capture itself is still good
        finally:
            graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert_same_bits(out, cupynorm.rms_norm(x))


def test_concurrent_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    built = []
    raw_module = cupy.RawModule

    def counted(**arguments: Any) -> Any:
        built.append(arguments["name_expressions"])
        time.sleep(0.05)
        return raw_module(**arguments)

    monkeypatch.setattr(cupy, "RawModule", counted)
    x = cupy.ones((4, 1301), np.float16)
    barrier, results = threading.Barrier(8), []

    def call() -> None:
        barrier.wait()
        results.append(cupynorm.layer_norm(x, zero_centered=False))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(built) == 1


def test_a_thread_that_has_not_used_the_gpu_yet() -> None:
    x = to_cupy(make_values("normal", (37, 1024), DTYPES["float32"], 1))
    weight = to_cupy(make_values("normal", (1024,), np.float32, 2))
    expected = cupynorm.rms_norm(x, weight)
    out = x.copy()
    cupynorm.rms_norm(x, weight, out=out)
    out.fill(0)
    problems = []

    def call() -> None:
        try:
            cupynorm.rms_norm(x, weight, out=out)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert problems == []
    assert_same_bits(out, expected)


@pytest.mark.parametrize("norm", NORMS)
def test_a_call_made_again_gives_new_arrays_with_the_same_bits(norm: str) -> None:
    x = to_cupy(make_values("normal", (37, 1024), DTYPES["bfloat16"], 1))
    weight = to_cupy(make_values("normal", (1024,), np.float32, 2))
    first, again = (run(norm, x, weight, x) for _ in range(2))
    for a, b in zip(first[0][:3] + first[1], again[0][:3] + again[1], strict=True):
        if a is not None:
            assert a.data.ptr != b.data.ptr
            assert_same_bits(a, b)


def test_a_refused_launch_names_the_error() -> None:
    instantiation = _compile.forward_instantiation(
        spec := ForwardSpec("rms_norm", "float32", None, None, "float32", False, False, False),
        forward_config(spec, 1024, 4, architecture(0)),
    )
    members = instantiation.arguments
    function = _compile.load(instantiation, 0)._function
    for overlaps in (False, True):
        kernel = _driver.Kernel("too large", function, 1 << 20, 0, members, overlaps=overlaps)
        with pytest.raises(RuntimeError, match=r"too large .* 1048576 threads .*CUDA_ERROR_"):
            kernel.prepared(1, {})(0, (0,) * len(members))
    with pytest.raises(RuntimeError, match=r"too large .* 1073741824: CUDA_ERROR_"):
        _driver.Kernel("too large", function, 1024, 1 << 30, members)


COUNT_COMPILATIONS = """
import cupy
from cupy.cuda import compiler

compiled = []
original = compiler._compile_using_nvrtc_no_warning

def counted(source, *arguments, **options):
    compiled.append(source)
    return original(source, *arguments, **options)

compiler._compile_using_nvrtc_no_warning = counted
import cupynorm

x = cupy.ones((8, 1024), cupy.float32)
forward = cupynorm.layer_norm_forward(x, x[0], x[0])
cupynorm.layer_norm_backward(x, x, x[0], forward.mean, forward.rstd)
print(sum("norm_forward" in s or "norm_backward" in s or "reduce_partials" in s for s in compiled))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", COUNT_COMPILATIONS],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert counts == [3, 0]  # few rows' forward, backward, its partials


def test_warmup_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    cupynorm.warmup("layer_norm", [1409, 2048], "bfloat16", "float32", "float32")
    monkeypatch.setattr(_compile, "_functions", dict(_compile._functions))
    monkeypatch.setattr(cupy, "RawModule", None)  # calling it would fail
    # One row of 2048, and few rows, have kernels of their own.
    for m, n in ((5, 1409), (1, 2048), (5, 2048), (4096, 2048)):
        x = to_cupy(make_values("normal", (m, n), DTYPES["bfloat16"], 1))
        weight = cupy.ones(n, np.float32)
        cupynorm.layer_norm(x, weight, weight)
        run_bias = cupynorm.layer_norm_forward(x, weight, weight)
        cupynorm.layer_norm_backward(x, x, weight, run_bias.mean, run_bias.rstd, bias=weight)
    assert cupynorm.supports("layer_norm", 1409, "bfloat16", "float32") is None


def test_a_tensor_on_another_device() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    values = make_values("normal", (37, 1000), DTYPES["float32"], 1)
    with cupy.cuda.Device(1):
        x = cupy.asarray(values)
        weight = cupy.ones(1000, np.float32)
    with cupy.cuda.Device(0):
        here = cupy.ones(1000, np.float32)
        forward, backward = run("layer_norm", x, weight, x)
        assert cupy.cuda.runtime.getDevice() == 0
        assert forward.y.device.id == backward.dweight.device.id == 1
        with cupy.cuda.Device(1):
            again, _ = run("layer_norm", x, weight, x)  # as the first call prepared it
        assert again.y.device.id == 1
        assert_same_bits(again.y, forward.y)
        with pytest.raises(ValueError, match="weight must be on x's device"):
            cupynorm.rms_norm(x, here)
    testing.check_forward(
        "layer_norm", to_numpy(forward), values, np.ones(1000, np.float32), eps=1e-5
    )


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_result_is_awaited_though_another_device_is_current(framework: str) -> None:
    import cupy

    module = pytest.importorskip(framework)
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    values = make_values("normal", (20000, 8192), DTYPES["float32"], 1)  # which take some 0.3 ms
    with cupy.cuda.Device(0):
        if framework == "torch":
            x = module.from_numpy(values).to("cuda:0")
        else:
            x = module.device_put(values, module.devices("cuda")[0])
        expected = np.asarray(cupy.asnumpy(cupynorm.rms_norm(cupy.asarray(values))))
    for _ in range(5):
        with cupy.cuda.Device(1):
            y = cupynorm.rms_norm(x)
            actual = y.cpu().numpy() if framework == "torch" else np.asarray(y)
        np.testing.assert_array_equal(actual, expected)
        with cupy.cuda.Device(0):  # what the next result's memory holds
            cupy.zeros(values.shape, np.float32)
        del y, actual


# ---- other frameworks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_torch_tensors_come_and_go_by_dlpack(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.float32).to(dtype)
    weight = torch.randn(1024, device="cuda")
    forward = cupynorm.layer_norm_forward(x, weight)
    assert isinstance(forward.y, torch.Tensor)
    assert forward.y.dtype == dtype
    assert forward.y.device == x.device
    gradient = cupynorm.layer_norm_backward(x, x, weight, forward.mean, forward.rstd)
    assert gradient.dx.dtype == dtype
    assert gradient.dweight.dtype == torch.float32

    def host(tensor: Any) -> Any:
        wide = tensor.double().cpu().numpy()
        return (
            wide.astype(ml_dtypes.bfloat16)
            if tensor.dtype == torch.bfloat16
            else (wide.astype(str(tensor.dtype).removeprefix("torch.")))
        )

    x_host, weight_host = host(x), host(weight)
    result = cupynorm.NormForward(host(forward.y), host(forward.mean), host(forward.rstd))
    testing.check_forward("layer_norm", result, x_host, weight_host, eps=1e-5)
    testing.check_backward(
        "layer_norm",
        cupynorm.NormBackward(*map(host, gradient[:3])),
        x_host,
        x_host,
        weight_host,
        result.mean,
        result.rstd,
        bias=True,
    )
    out = torch.empty_like(x)
    assert cupynorm.layer_norm(x, weight, out=out) is out
    torch.cuda.synchronize()
    assert torch.equal(out, forward.y)


@pytest.mark.parametrize("name", DTYPES)
def test_pinned_tensors_are_on_the_cpu(name: str) -> None:
    torch = pytest.importorskip("torch")
    x, dy = (torch.randn(5, 40).to(getattr(torch, name)) for _ in range(2))
    weight = torch.randn(40)
    mask = torch.rand(5, 40) < 0.5

    def both(pin: Any) -> Any:
        arguments = pin(x), pin(weight)
        out, dx = pin(torch.empty_like(x)), pin(torch.empty_like(x))
        forward = cupynorm.layer_norm_forward(*arguments, out=out, relu=(0, 1))
        bits = pin(forward.bitmask)
        statistics = pin(forward.mean), pin(forward.rstd)
        backward = cupynorm.layer_norm_backward(
            pin(dy), *arguments, *statistics, bias=pin(weight), bitmask=bits, dx=dx
        )
        assert forward.y is out
        assert backward.dx is dx
        packed = cupynorm.pack_bitmask(pin(mask)), cupynorm.unpack_bitmask(bits, 40)
        fields = [field for field in (*forward, *backward) if field is not None]
        return (*fields, *packed)

    def pinned(tensor: Any) -> Any:
        return tensor.pin_memory()

    assert pinned(x).__dlpack_device__()[0] == 3
    for one, other in zip(both(pinned), both(torch.clone), strict=True):
        assert torch.equal(one, other)


def test_torch_streams_are_ordered_both_ways() -> None:
    torch = pytest.importorskip("torch")
    source = torch.randn(8192, 4096, device="cuda")
    weight = torch.ones(4096, device="cuda")
    expected = 2 * cupynorm.rms_norm(source, weight)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            late = torch.zeros_like(source)
            for _ in range(30):
                late = late + 1
            late = source.clone()
            y = 2 * cupynorm.rms_norm(late, weight)  # read at once, on torch's side stream
            given = torch.zeros_like(source)
            cupynorm.rms_norm(late, weight, out=given)
            doubled = 2 * given  # the caller's output is ordered too
        stream.synchronize()
        assert torch.equal(y, expected)
        assert torch.equal(doubled, expected)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_jax_arrays_come_and_go_by_dlpack(name: str) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("needs JAX with a GPU")
    x = jax.random.normal(jax.random.PRNGKey(0), (64, 1024)).astype(name)
    weight = jax.random.normal(jax.random.PRNGKey(1), (1024,))
    forward = cupynorm.rms_norm_forward(x, weight)
    assert isinstance(forward.y, jax.Array)
    assert forward.y.dtype == x.dtype
    assert forward.y.devices() == x.devices()
    gradient = cupynorm.rms_norm_backward(x, x, weight, forward.rstd)
    x_host, weight_host = np.asarray(x), np.asarray(weight)
    result = cupynorm.NormForward(np.asarray(forward.y), None, np.asarray(forward.rstd))
    testing.check_forward("rms_norm", result, x_host, weight_host, eps=1e-6)
    testing.check_backward(
        "rms_norm",
        cupynorm.NormBackward(np.asarray(gradient.dx), np.asarray(gradient.dweight)),
        x_host,
        x_host,
        weight_host,
        None,
        result.rstd,
        bias=False,
    )
    with pytest.raises(TypeError, match="immutable"):
        cupynorm.rms_norm(x, out=x)


def test_mixed_frameworks_and_devices_are_refused() -> None:
    torch = pytest.importorskip("torch")
    import cupy

    x = cupy.ones((4, 8), np.float32)
    with pytest.raises(TypeError, match="weight must be a CuPy array"):
        cupynorm.rms_norm(x, np.ones(8, np.float32))
    with pytest.raises(TypeError, match="weight must be a CuPy array"):
        cupynorm.rms_norm(x, torch.ones(8, device="cuda"))
    on_gpu = torch.ones(4, 8, device="cuda")
    with pytest.raises(ValueError, match=f"weight must be on x's device, {on_gpu.device}; got cpu"):
        cupynorm.rms_norm(on_gpu, torch.ones(8))


@pytest.mark.parametrize("norm", NORMS)
def test_results_do_not_depend_on_what_threads_have_compiled(
    norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    may_load = threads_that_wait(monkeypatch)
    n = 3840  # of no other test, since CuPy remembers its modules
    rows, dy = (to_cupy(make_values("normal", (3000, n), DTYPES["bfloat16"], i)) for i in (1, 2))
    weight = to_cupy(make_values("normal", (n,), DTYPES["float32"], 3))
    forward = getattr(cupynorm, f"{norm}_forward")
    few = forward(rows[:8], weight)
    standing_in = forward(rows, weight)
    assert len(_calls.calls) == 1  # of few rows
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:  # a thread loads the kernel while this one captures
        for size in (8, 3000):
            forward(rows[:size], weight)  # CuPy has memory for the captured ones after these
        stream.synchronize()
        stream.begin_capture()
        captured = forward(rows[:8], weight)
        may_load.set()
        of_many = forward(rows, weight)  # it waits for the kernel
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    own = forward(rows, weight)
    assert len(_calls.calls) == 2
    for a, b, c in zip(standing_in, own, of_many, strict=True):
        assert (a is None) == (b is None) == (c is None)
        if a is not None:
            assert_same_bits(a, b)
            assert_same_bits(c, b)
    assert_same_bits(captured.y, few.y)
    assert_same_bits(few.y, own.y[:8])

    # A backward pass has its own kernels at once. Those of other numbers of rows come behind.
    statistics = [s for s in (own.mean, own.rstd) if s is not None]
    backward = getattr(cupynorm, f"{norm}_backward")
    sizes = 8, 200, 3000
    found = [backward(dy[:m], rows[:m], weight, *(s[:m] for s in statistics)) for m in sizes]
    wait_for_threads()
    for m, first in zip(sizes, found, strict=True):
        again = backward(dy[:m], rows[:m], weight, *(s[:m] for s in statistics))
        assert_same_bits(first.dx, again.dx)
        assert_same_bits(first.dweight, again.dweight)
