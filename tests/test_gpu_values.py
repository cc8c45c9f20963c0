"""Every value that the kernels write, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import ERROR_OVER_BOUND
from device import forget_plans, kernels_of_many_rows, poison, to_cupy, to_numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from residuals import (
    RESIDUAL_WIDTHS,
    OfCupyNorm,
    WithResidual,
    check_residual,
    residual_problems,
    with_residual,
)
from strategies import (
    DTYPES,
    OVERFLOWS,
    RELUS,
    Layout,
    Problem,
    largest_in_range,
    make_values,
    problems,
    scaled,
)
from sums import WIDTHS as OF_SUMS
from sums import WithSums, problem_of, problems_with_sums, with_sums
from sums import check_sums as check_given_sums
from test_groups import CALLS as GROUPS
from test_groups import Call, drawn

import cupynorm
from cupynorm import _layout, _plans, testing

pytestmark = pytest.mark.gpu

EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}
NORMS = ("rms_norm", "layer_norm")

# For the report: the worst ratio of error to bound for each kind of problem and field.
worst: dict[str, float] = {}


def record(key: tuple[str, ...], ratios: dict[str, float]) -> None:
    for field, ratio in ratios.items():
        name = " ".join((*key, field))
        worst[name] = max(ratio, worst.get(name, 0.0))


@pytest.fixture(autouse=True, scope="module")
def few_rows_have_the_kernels_of_many() -> Iterator[None]:
    """test_gpu_runtime.py: few rows have y and dx of many. Here they use those kernels."""
    with kernels_of_many_rows():
        yield


@pytest.fixture
def kernels_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_plans, "few_rows_configs", _layout.few_rows_configs)
    monkeypatch.setattr(_plans, "few_rows_backward_configs", _layout.few_rows_backward_configs)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    worst.clear()
    yield
    request.node.user_properties += [(ERROR_OVER_BOUND, item) for item in worst.items()]


def check(
    norm: str,
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    dy: np.ndarray | None = None,
    key: tuple[str, ...] = (),
    wants_dbias: Any = None,
    out_dtype: Any = None,
    eps: float | None = None,
    relu: tuple[float, float] | None = None,
    **options: Any,
) -> None:
    """Run inference, forward and backward on the GPU, and check every field of each."""
    eps = EPS[norm] if eps is None else eps
    dy = make_values("normal", x.shape, x.dtype, 99) if dy is None else dy
    gpu = {"x": x, "dy": dy, "weight": weight, "bias": bias}
    check_arrays(
        norm,
        gpu,
        {n: to_cupy(a) for n, a in gpu.items()},
        wants_dbias,
        {"eps": eps, "out_dtype": out_dtype, "relu": relu},
        key,
        options,
    )


def check_arrays(
    norm: str,
    host: dict[str, Any],
    gpu: dict[str, Any],
    wants_dbias: Any,
    forward_options: dict[str, Any],
    key: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    poison()
    x, weight, bias, dy = (host[name] for name in ("x", "weight", "bias", "dy"))
    infer = getattr(cupynorm, norm)
    checks = forward_options | options
    y = infer(gpu["x"], gpu["weight"], gpu["bias"], **checks)
    testing.check_forward(norm, to_numpy(y), x, weight, bias, **checks)

    forward = getattr(cupynorm, f"{norm}_forward")(gpu["x"], gpu["weight"], gpu["bias"], **checks)
    result = to_numpy(forward)
    record((norm, *key), testing.check_forward(norm, result, x, weight, bias, **checks))

    statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
    wanted = wants_dbias if bias is None else gpu["bias"]
    backward = getattr(cupynorm, f"{norm}_backward")(
        gpu["dy"],
        gpu["x"],
        gpu["weight"],
        *statistics,
        bias=bool(wanted) if bias is None else wanted,
        bitmask=forward.bitmask,
        **options,
    )
    ratios = testing.check_backward(
        norm,
        to_numpy(backward),
        dy,
        x,
        weight,
        result.mean,
        result.rstd,
        bias=bool(wanted) if bias is None else bias,
        bitmask=result.bitmask,
        **options,
    )
    record((norm, *key), ratios)


def drawn_for_each(examples: int) -> Callable[[Any], Any]:
    """Draw some examples for each norm and dtype of x. Test processes share these tests."""

    def decorate(test: Any) -> Any:
        options = {"max_examples": examples, "suppress_health_check": list(HealthCheck)}
        drawn = settings(**options)(given(data=st.data())(test))
        for name, values in (("x", DTYPES), ("norm", NORMS)):
            drawn = pytest.mark.parametrize(name, values)(drawn)
        return drawn

    return decorate


@drawn_for_each(40)
def test_any_problem(norm: Any, x: str, data: st.DataObject) -> None:
    check_drawn(data.draw(problems(norms=(norm,), x_dtypes=(x,))), "any")


def check_residual_on_gpu(drawn: WithResidual) -> None:
    import cupy

    poison()
    check_residual(OfCupyNorm(cupy, to_cupy, to_numpy), drawn)


@drawn_for_each(12)
def test_any_residual(norm: str, x: str, data: st.DataObject) -> None:
    check_residual_on_gpu(data.draw(residual_problems(norms=(norm,), x_dtypes=(x,))))


@pytest.mark.usefixtures("kernels_of_few_rows")
@drawn_for_each(12)
def test_any_residual_of_few_rows(norm: str, x: str, data: st.DataObject) -> None:
    strategy = residual_problems(RESIDUAL_WIDTHS, norms=(norm,), x_dtypes=(x,))
    check_residual_on_gpu(data.draw(strategy))


def check_sums_on_gpu(drawn: WithSums) -> None:
    import cupy

    poison()
    check_given_sums(OfCupyNorm(cupy, to_cupy, to_numpy), drawn)


@drawn_for_each(12)
def test_any_given_sums(norm: str, x: str, data: st.DataObject) -> None:
    check_sums_on_gpu(data.draw(problems_with_sums(norms=(norm,), x_dtypes=(x,))))


@pytest.mark.usefixtures("kernels_of_few_rows")
@drawn_for_each(12)
def test_any_given_sums_of_few_rows(norm: str, x: str, data: st.DataObject) -> None:
    strategy = problems_with_sums(OF_SUMS, norms=(norm,), x_dtypes=(x,))
    check_sums_on_gpu(data.draw(strategy))


@pytest.mark.parametrize("call", GROUPS, ids=str)
def test_given_sums_of_groups(call: Call) -> None:
    check_sums_on_gpu(with_sums(problem_of(call, drawn(call)), "float32", "bfloat16", offset=1))


def test_a_place_for_sums_that_is_not_contiguous_is_told() -> None:
    import cupy

    x, rstd, total = (cupy.zeros(s, np.float32) for s in ((3, 4), (3,), (4, 2)))
    expected = "dweight must be C-contiguous, with the normalized axes last; got strides (8,)"
    with pytest.raises(ValueError, match=re.escape(expected)):
        cupynorm.rms_norm_backward(x, x, x[0], rstd, dweight=total[:, 0])


@pytest.mark.parametrize("m", [37, 1100])
@pytest.mark.parametrize("n", RESIDUAL_WIDTHS)
@pytest.mark.parametrize("norm", NORMS)
def test_residuals_of_each_width(norm: str, n: int, m: int) -> None:
    m = min(m, 2**24 // n + 3)
    for x, residual, total in (
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "float32", "float32"),
    ):
        problem = Problem(
            norm=norm,  # type: ignore[arg-type]
            k=1,
            eps=EPS[norm],
            axis=None,
            zero_centered=False,
            relu=None,
            out_dtype=DTYPES[x],
            wants_dbias=norm == "layer_norm",
            regime="normal",
            seed=n,
            layouts=dict.fromkeys(("x", "dy", "weight", "bias"), Layout()),
            x=make_values("normal", (m, n), DTYPES[x], n),
            dy=make_values("normal", (m, n), DTYPES[x], n + 1),
            weight=make_values("normal", (n,), DTYPES["float32"], n + 2),
            bias=None,
        )
        check_residual_on_gpu(with_residual(problem, residual, total, layout=Layout()))


@pytest.mark.parametrize("n", [3, 40, 1000, 4096, 16384, 20480, 100_000, 300_000])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_an_infinity_in_a_row(norm: str, x_dtype: str, n: int) -> None:
    dtype = DTYPES[x_dtype]
    x, infinite = (make_values(r, (9, n), dtype, 7) for r in ("normal", "infinities"))
    assert np.isinf(infinite).any(axis=1).sum() == np.isinf(infinite).sum() > 0
    weight = make_values("normal", (n,), dtype, 8)
    check(norm, infinite, weight, key=("infinite x",))
    check(norm, x, weight, dy=infinite, key=("infinite dy",))


@pytest.mark.usefixtures("kernels_of_few_rows")
@drawn_for_each(16)
def test_any_problem_of_few_rows(norm: Any, x: str, data: st.DataObject) -> None:
    check_drawn(data.draw(problems(norms=(norm,), x_dtypes=(x,))), "few")


def check_drawn(problem: Problem, kind: str) -> None:
    host = {name: getattr(problem, name) for name in ("x", "dy", "weight", "bias")}
    import cupy

    check_arrays(
        problem.norm,
        host,
        problem.on(cupy),
        problem.wants_dbias,
        problem.forward_options,
        (kind,),
        problem.options,
    )


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_every_pair_of_x_and_weight(norm: str, x: str, weight: str) -> None:
    for n in (512, 1000, 4096):
        check(
            norm,
            make_values("normal", (67, n), DTYPES[x], 1),
            make_values("normal", (n,), DTYPES[weight], 2),
            make_values("normal", (n,), DTYPES[weight], 3),
            key=(x, weight),
        )


# Every threshold of the configuration, in elements of 16-bit, 32-bit and 64-bit rows, with one
# element to each side: teams of 1 to 32 threads, several packs a thread, several teams a block,
# whole blocks, and streaming by one block and by clusters.
LONG = (
    1535,
    1536,
    2047,
    3072,
    4095,
    4097,
    5120,
    6144,
    8191,
    8192,
    8193,
    10240,
    12288,
    12289,
    16384,
    16385,
    24576,
    32768,
    50257,
    65536,
    131072,
    131073,
    163840,
    196600,
    262144,
    393216,
)


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("norm", NORMS)
def test_long_rows(norm: str, n: int) -> None:
    for name in ("bfloat16", "float32", "float64", "float16"):
        dtype = DTYPES[name]
        check(
            norm,
            make_values("normal", (5, n), dtype, n),
            make_values("normal", (n,), np.float32, n + 1),
            make_values("normal", (n,), np.float32, n + 2),
            zero_centered=n % 2 == 0,
        )


# Most of these fill their teams, of 1 to 8 packs a thread, in 16 bits.
FULL = (64, 96, 192, 320, 640, 768, 896, 1280, 1792, 2304, 3072, 3584, 4608, 5120, 7168)
FULL += (9216, 10240, 12288, 14336, 16384, 18432, 20480, 24576, 28672, 32768, 40960, 147456)


@pytest.mark.parametrize("n", FULL)
@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_fill_their_teams(norm: str, n: int) -> None:
    for name, options in itertools.product(
        ("bfloat16", "float32"), ({}, {"zero_centered": True}, {"relu": RELUS[1]})
    ):
        for m, regime in ((5, "mixed_rows"), (300, "normal")):
            check(
                norm,
                make_values(regime, (m, n), DTYPES[name], n),
                make_values("normal", (n,), np.float32, n + 1),
                make_values("normal", (n,), np.float32, n + 2) if norm == "layer_norm" else None,
                key=("full rows", name),
                **options,
            )


@pytest.mark.parametrize("n", [28672, 28664, 49152, 98296, 163840, 262144, 524288])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_clusters_beside_others(norm: str, name: str, n: int) -> None:
    # More rows than fit in shared memory at once, with weights of their own dtype.
    m = 200 if n < 50_000 else 70
    for regime, options in (("mixed_rows", {}), ("mean_1e2", {"relu": RELUS[0]})):
        check(
            norm,
            make_values(regime, (m, n), DTYPES[name], n),
            make_values("normal", (n,), DTYPES[name], n + 1),
            make_values("normal", (n,), DTYPES[name], n + 2) if norm == "layer_norm" else None,
            key=("clusters", name),
            **options,
        )


@pytest.mark.parametrize("n", [1, 3, 5, 8, 13, 100, 769, 1027, *LONG[::3]])
@pytest.mark.parametrize("norm", NORMS)
def test_relu_in_rows_of_any_length(norm: str, n: int) -> None:
    for i, (name, dtype) in enumerate(DTYPES.items()):
        check(
            norm,
            make_values("normal", (7, n), dtype, n),
            make_values("normal", (n,), np.float32, n + 1),
            make_values("normal", (n,), np.float32, n + 2),
            out_dtype=DTYPES["bfloat16"] if i % 2 else None,
            relu=RELUS[(n + i) % len(RELUS)],
            key=("relu", name),
        )


@pytest.mark.parametrize("n", [1, 3, 8, 12, 83, 1001, 12290])
@pytest.mark.parametrize("name", DTYPES)
def test_a_value_on_a_bound_is_not_inside(name: str, n: int) -> None:
    x = make_values("normal", (5, n), DTYPES[name], 1)
    bias = np.random.default_rng(0).choice([np.float32(-1), np.float32(1)], n)
    arrays = [to_cupy(a) for a in (x, 0 * bias, bias)]  # y equals the bias
    positive = np.broadcast_to(bias > 0, x.shape)
    for relu, bits in {
        (-1, 1): np.zeros_like(positive),
        (-1, 2): positive,
        (-2, 1): ~positive,
        (-2, 2): np.ones_like(positive),
    }.items():
        poison()
        bitmask = cupynorm.layer_norm_forward(*arrays, relu=relu).bitmask
        np.testing.assert_array_equal(to_numpy(bitmask), cupynorm.pack_bitmask(bits))
        np.testing.assert_array_equal(to_numpy(cupynorm.unpack_bitmask(bitmask, n)), bits)
        packed = cupynorm.pack_bitmask(to_cupy(bits))
        np.testing.assert_array_equal(to_numpy(packed), to_numpy(bitmask))


@pytest.mark.parametrize("shape", [(0, 9), (2, 0), (17,), (2, 3, 17)])
def test_bits_of_any_layout_are_packed_and_unpacked(shape: tuple[int, ...]) -> None:
    def spread(array: Any) -> Any:
        return to_cupy(np.repeat(array, 2, axis=-1))[..., ::2]

    mask = np.random.default_rng(0).random(shape) < 0.5
    packed = cupynorm.pack_bitmask(mask)
    for layout in (to_cupy, spread):
        poison()
        np.testing.assert_array_equal(to_numpy(cupynorm.pack_bitmask(layout(mask))), packed)
        unpacked = cupynorm.unpack_bitmask(layout(packed), shape[-1])
        np.testing.assert_array_equal(to_numpy(unpacked), mask)


@pytest.mark.parametrize("norm", NORMS)
def test_what_the_bitmask_drops_may_be_nan(norm: str) -> None:
    x = make_values("normal", (9, 1000), np.float32, 1)
    weight = make_values("normal", (1000,), np.float32, 2)
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, relu=(0, 1))
    kept = cupynorm.unpack_bitmask(forward.bitmask, 1000)
    dy = np.where(kept, make_values("normal", x.shape, np.float32, 3), np.float32(np.nan))
    # A bitmask with another layout in memory.
    spread = to_cupy(np.repeat(forward.bitmask, 2, axis=1))[:, ::2]
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(cupynorm, f"{norm}_backward")
    rest = [to_cupy(a) for a in (x, weight, *statistics)]
    result = backward(to_cupy(dy), *rest, bias=True, bitmask=spread)
    zeroed = backward(to_cupy(np.where(kept, dy, np.float32(0))), *rest, bias=True)
    for masked, same in zip(to_numpy(result), to_numpy(zeroed), strict=True):
        np.testing.assert_array_equal(masked, same)
    testing.check_backward(
        norm,
        to_numpy(result),
        dy,
        x,
        weight,
        forward.mean,
        forward.rstd,
        bias=True,
        bitmask=forward.bitmask,
    )


@pytest.mark.parametrize("m", [1, 16, 37, 70])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_in_strips(norm: str, name: str, m: int) -> None:
    length = 16 // DTYPES[name].itemsize
    regimes = ("mean_1e4", "extreme", "mixed_rows", "nonfinite", "zero_rows", "constant_rows")
    for packs, regime in zip((24576, 24576, 24600, 30001, 50000, 65536), regimes, strict=True):
        n = packs * length
        of_dy = np.float32 if packs in (30001, 65536) else DTYPES[name]
        check(
            norm,
            make_values(regime, (m, n), DTYPES[name], n + m),
            make_values("normal", (n,), np.float32, n + 1),
            None if m == 16 else make_values("normal", (n,), np.float32, n + 2),
            dy=make_values("normal", (m, n), of_dy, 99),
            relu=RELUS[1] if m == 37 else None,
            key=("strips", name),
        )


@pytest.mark.parametrize("norm", NORMS)
def test_two_axes_of_512_make_one_row_of_262144(norm: str) -> None:
    x = make_values("normal", (6, 512, 512), DTYPES["bfloat16"], 5)
    weight = make_values("normal", (512, 512), DTYPES["bfloat16"], 6)
    check(norm, x, weight, wants_dbias=True, axis=(-2, -1))
    half = DTYPES["bfloat16"]
    wide = x.astype(np.float32)
    check(norm, wide, weight, out_dtype=half, wants_dbias=False, axis=(-2, -1))


@pytest.mark.parametrize("n", [1, 3, 768, 8192, 40000])
@pytest.mark.parametrize(
    "regime",
    [
        "mean_1e2",
        "mean_1e4",
        "mean_1e6",
        "extreme",
        "minute",
        "huge",
        "tiny",
        "mixed_rows",
        "mixed_elements",
        "zero_rows",
        "constant_rows",
        "nonfinite",
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_every_regime(norm: str, regime: str, n: int) -> None:
    for name, dtype in DTYPES.items():
        check(
            norm,
            make_values(regime, (9, n), dtype, 11),
            make_values("normal", (n,), np.float32, 12),
            None,
            wants_dbias=True,
            key=(regime, name),
        )


@pytest.mark.parametrize("few_rows", [False, True])
@pytest.mark.parametrize("n", [3, 40, 1000, 4096, 8193, 16384, 20480, 100_000, 262_144, 300_000])
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_products_may_overflow_on_the_way_to_dx(
    norm: str, x_dtype: str, n: int, few_rows: bool, request: pytest.FixtureRequest
) -> None:
    if few_rows:
        request.getfixturevalue("kernels_of_few_rows")
    m, dtype = 37 if n < 50_000 else 5, DTYPES[x_dtype]
    for of_x, of_dy, of_weight in OVERFLOWS:
        x = scaled(make_values("normal", (m, n), dtype, 1), of_x)
        dy = make_values("normal", (m, n), dtype, 2)
        dy[::2] = scaled(dy[::2], of_dy)
        weight = scaled(make_values("normal", (n,), np.float32, 3), of_weight)
        check(norm, x, weight, dy=dy, wants_dbias=norm == "layer_norm", key=("overflows",))
    x, dy = (make_values("normal", (m, n), dtype, seed) for seed in (1, 2))
    x, dy, weight = largest_in_range(x, dy, make_values("normal", (n,), np.float32, 3))
    check(norm, x, weight, dy=dy, wants_dbias=norm == "layer_norm", key=("overflows",))


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-37])  # 1e-38 is subnormal, and counts as zero
def test_rms_norm_in_range_by_rescue_with_a_small_eps(eps: float) -> None:
    for scale in (1e-30, 1e-22, 1e25, 1e37):
        x = (make_values("normal", (4, 1024), np.float32, 3) * np.float32(scale)).astype(np.float32)
        check("rms_norm", x, eps=eps, wants_dbias=False)


def test_an_eps_of_minus_zero_is_zero() -> None:
    for norm in ("rms_norm", "layer_norm"):
        zeros = to_cupy(np.zeros((3, 1024), np.float32))
        result = getattr(cupynorm, f"{norm}_forward")(zeros, eps=-0.0)
        np.testing.assert_array_equal(to_numpy(result.rstd), np.full(3, np.inf))


def test_constant_rows_at_the_end_of_the_range() -> None:
    x = np.full((3, 1024), 1e38, np.float32)
    x[1] = 1.0
    check("layer_norm", x, wants_dbias=False)
    np.testing.assert_array_equal(to_numpy(cupynorm.layer_norm(to_cupy(x))), np.zeros_like(x))


@pytest.mark.parametrize("n", [40, 769, 2049, 9000, 66001])
@pytest.mark.parametrize("m", [3, 200])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_constant_rows_have_no_weight_gradient(name: str, m: int, n: int) -> None:
    x = np.broadcast_to(1e9 / np.arange(3, 3 + m)[:, None], (m, n)).astype(name)
    dy = to_cupy(make_values("normal", (m, n), DTYPES[name], 3))
    weight = to_cupy(make_values("normal", (n,), DTYPES[name], 4))
    rstd = np.full(m, 1e5**0.5, name)
    result = cupynorm.layer_norm_backward(
        dy, to_cupy(x), weight, to_cupy(x[:, 0].copy()), to_cupy(rstd)
    )
    np.testing.assert_array_equal(to_numpy(result.dweight), np.zeros(n))


def test_layer_norm_at_mean_1e6_is_right_to_1e_6() -> None:
    x = (1e6 + np.random.default_rng(0).standard_normal((64, 4096))).astype(np.float32)
    y = to_numpy(cupynorm.layer_norm(to_cupy(x))).astype(np.float64)
    exact = cupynorm.reference.forward_float64(
        "layer_norm", x, None, None, k=1, eps=1e-5, zero_centered=False
    ).y
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    print(f"float32 LayerNorm at mean 1e6: relative error {error:.2e}")
    assert error <= 1e-6


def test_rms_norm_at_1e25_is_right_to_1e_6() -> None:
    x = (1e25 * np.random.default_rng(0).standard_normal((64, 4096))).astype(np.float32)
    y = to_numpy(cupynorm.rms_norm(to_cupy(x))).astype(np.float64)
    exact = cupynorm.reference.forward_float64(
        "rms_norm", x, None, None, k=1, eps=1e-6, zero_centered=False
    ).y
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    print(f"float32 RMSNorm at 1e25: relative error {error:.2e}")
    assert error <= 1e-6


@pytest.mark.parametrize("m", [70_001, 1_000_003])
@pytest.mark.parametrize("norm", NORMS)
def test_many_short_rows(norm: str, m: int) -> None:
    for n, name in ((64, "bfloat16"), (5, "float32")):
        check(
            norm,
            make_values("normal", (m, n), DTYPES[name], 21),
            make_values("normal", (n,), np.float32, 22),
            wants_dbias=True,
            key=("tall", name),
        )


# With 4097, 8193 and 49153 float32, the places of a 16-bit dy are an odd number of 8-byte cells.
@pytest.mark.parametrize("n", [129, 777, 2561, 4097, 4098, 5197, 8193, 12292, 20001, 49153])
@pytest.mark.parametrize(("x", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_at_any_address_beside_others_of_another_dtype(
    norm: str, x: str, other: str, n: int
) -> None:
    import cupy

    m = 600 if n < 8192 else 300  # several rows for each block or cluster
    host = {
        "x": make_values("normal", (m, n), DTYPES[x], n),
        "dy": make_values("normal", (m, n), DTYPES[other], n + 1),
        "weight": make_values("normal", (n,), np.float32, n + 2),
        "bias": make_values("normal", (n,), np.float32, n + 3),
    }
    shifted = {name: Layout(offset=1).apply(cupy, array) for name, array in host.items()}
    check_arrays(norm, host, shifted, None, {"eps": EPS[norm]}, ("another dtype", x), {})


# Whole packs of 16 bits that do not lie at multiples of 128 bytes and go through L1, and accesses
# of 8 bytes.
@pytest.mark.parametrize(
    "n",
    [
        *(1000, 4104, 8200, 20008, 20592, 32776, 65544, 131080),
        *(100, 300, 1500, 4100, 8188, 10396, 20004, 28676, 131076, 200004),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_do_not_begin_at_lines(norm: str, n: int) -> None:
    import cupy

    rows = 6000 if n < 4096 else 300 if n < 30_000 else 40  # several rows for each team
    for name, m, options in (
        *(("bfloat16", rows, {}), ("float32", rows, {})),
        *(("bfloat16", 5, {"relu": RELUS[1]}), ("bfloat16", rows, {"zero_centered": True})),
    ):
        columns = n + 2 * (name == "float32")  # an access of 8 bytes moves two
        check(
            norm,
            make_values("normal", (m, columns), DTYPES[name], n),
            make_values("normal", (columns,), np.float32, n + 1),
            make_values("normal", (columns,), np.float32, n + 2) if norm == "layer_norm" else None,
            key=("not at lines", name),
            **options,
        )
    # In place, a line that L1 has may end in a row that another block writes.
    x, dy = (to_cupy(make_values("normal", (rows, n), DTYPES["bfloat16"], n + i)) for i in (3, 4))
    weight = cupy.ones(n, np.float32)
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight)
    statistics = (forward.rstd,) if norm == "rms_norm" else (forward.mean, forward.rstd)
    backward = getattr(cupynorm, f"{norm}_backward")
    given = x, weight, *statistics
    aside = backward(dy, *given, bias=True)
    over = dy.copy()
    in_place = backward(over, *given, bias=True, dx=over)
    assert in_place.dx is over
    for one, other in zip(aside[:3], in_place[:3], strict=True):
        assert (one.view(f"u{one.itemsize}") == other.view(f"u{one.itemsize}")).all()
    assert getattr(cupynorm, norm)(x, weight, out=x) is x
    assert (x.view("u2") == forward.y.view("u2")).all()


# Lanes copy and store the packs of these rows by halves: rows of a warp and of several, full and
# not, at lines, at none and at any address, in clusters and in strips.
@pytest.mark.parametrize(
    "n", [1024, 2056, 4096, 4104, 5376, 8192, 16384, 20001, 20480, 33000, 229376, 262144]
)
@pytest.mark.parametrize("norm", NORMS)
def test_y_and_dy_wider_than_x(norm: str, n: int) -> None:
    for x_dtype, wide, columns in (("float16", "float32", n), ("float32", "float64", n // 2)):
        shape = 2**22 // n, columns
        weight, bias = (make_values("normal", (columns,), np.float32, n + i) for i in (1, 2))
        check(
            norm,
            make_values("normal", shape, DTYPES[x_dtype], n),
            weight,
            bias if norm == "layer_norm" else None,
            dy=make_values("normal", shape, DTYPES[wide], n + 3),
            out_dtype=DTYPES[wide],
            key=("wide y and dy", x_dtype),
        )


def one_element_further(rows: Any) -> Any:
    """Return the same rows, where accesses of single elements move them."""
    import cupy

    longer = cupy.empty(rows.size + 1, rows.dtype)
    longer[1:] = rows.ravel()
    return longer[1:].reshape(rows.shape)


def check_sums(dweight: Any, terms: Any) -> None:
    error = abs(dweight - terms.sum(axis=0)) / abs(terms).sum(axis=0)
    assert float(error.max()) < 64 * 2**-24  # for 64 rows added in turn


# Each layout whose rows RMSNorm's backward keeps in registers, full and not, by accesses of 16
# bytes and of 8. There are so many rows that each team has several times as many as are in flight.
@pytest.mark.parametrize(
    "n",
    [
        *(768, 1024, 1280, 1536, 2048, 4096, 4100, 5120, 5376, 6136, 6144, 6656, 8192, 9216),
        *(10240, 12004, 12288, 13312, 18432, 20480, 26000, 36864, 40960),
    ],
)
@pytest.mark.parametrize("name", ["float16", "float32"])
def test_rows_kept_in_registers_have_the_bits_of_others(name: str, n: int) -> None:
    import cupy

    m = 2**25 // n
    random = cupy.random.default_rng(n)
    x, dy = (random.standard_normal((m, n), np.float32).astype(name) for _ in range(2))
    weight = random.standard_normal(n, np.float32)
    rstd = cupynorm.rms_norm_forward(x, weight).rstd
    found = cupynorm.rms_norm_backward(dy, x, weight, rstd)
    elsewhere = cupynorm.rms_norm_backward(dy, one_element_further(x), weight, rstd)
    assert (found.dx.view(f"u{x.itemsize}") == elsewhere.dx.view(f"u{x.itemsize}")).all()
    check_sums(found.dweight, dy.astype(np.float64) * x * rstd[:, None])


# Rows of whole packs that do not begin at lines of 128 bytes.
@pytest.mark.parametrize("n", [1608, 3160, 5204, 6680, 10312, 13004, 20008, 26008, 50488])
@pytest.mark.parametrize("name", ["float16", "float32"])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_at_no_lines_have_the_bits_of_others(norm: str, name: str, n: int) -> None:
    import cupy

    random = cupy.random.default_rng(n)
    shape = 2**25 // n, n
    x, dy = (random.standard_normal(shape, np.float32).astype(name) for _ in range(2))
    affine = [random.standard_normal(n, np.float32) for _ in range(1 + (norm == "layer_norm"))]

    def passes(x: Any, dy: Any) -> tuple[Any, ...]:
        forward = getattr(cupynorm, f"{norm}_forward")(x, *affine)
        statistics = [one for one in (forward.mean, forward.rstd) if one is not None]
        backward = getattr(cupynorm, f"{norm}_backward")(dy, x, affine[0], *statistics)
        return forward.y, forward.mean, forward.rstd, backward.dx, backward.dweight

    found = passes(x, dy)
    elsewhere = passes(one_element_further(x), one_element_further(dy))
    for one, other in zip(found[:-1], elsewhere[:-1], strict=True):
        if one is not None:
            assert (one.view(f"u{one.itemsize}") == other.view(f"u{one.itemsize}")).all()
    _, mean, rstd, _, dweight = found
    centred = x.astype(np.float64) - (0 if mean is None else mean[:, None])
    check_sums(dweight, dy * centred * rstd[:, None])


@pytest.mark.parametrize("norm", NORMS)
def test_the_gradient_of_a_mean_rounds_the_same_way_in_every_row(norm: str) -> None:
    for n, m in ((1024, 40_000), (8192, 33_000), (20_000, 9_000)):
        x = make_values("normal", (m, n), DTYPES["bfloat16"], 31)
        dy = np.broadcast_to(np.full(1, 0.1, np.float32), (m, n))
        import cupy

        gpu_dy = cupy.broadcast_to(cupy.full(1, 0.1, np.float32), (m, n))
        weight = make_values("normal", (n,), np.float32, 32)
        host = {"x": x, "dy": dy, "weight": weight, "bias": None}
        gpu = {"x": to_cupy(x), "dy": gpu_dy, "weight": to_cupy(weight), "bias": None}
        check_arrays(norm, host, gpu, True, {"eps": EPS[norm]}, ("constant dy",), {})


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 70_000))
def test_any_width(name: str, seed: int, n: int) -> None:
    norm = NORMS[seed % 2]
    check(
        norm,
        make_values("normal", (3, n), DTYPES[name], seed),
        make_values("normal", (n,), DTYPES[name], seed + 1),
        wants_dbias=True,
    )


@pytest.mark.parametrize("many", [False, True], ids=["once", "many rows"])
@pytest.mark.parametrize("call", GROUPS, ids=str)
def test_rows_in_groups_and_side_by_side(call: Call, many: bool) -> None:
    """Those of test_groups.py, and with more rows than run at once."""
    if many and 0 not in call.shape:
        repeated = call.shape[0] * max(1, 3_000_000 // int(np.prod(call.shape)))
        vectors = (
            s and ((repeated, *s[1:]) if s[0] == call.shape[0] and len(s) == len(call.shape) else s)
            for s in (call.weight, call.bias)
        )
        shape = (repeated, *call.shape[1:])
        if 0 not in np.atleast_1d(-1 if call.axis is None else call.axis):
            weight, bias = vectors
            call = dataclasses.replace(call, shape=shape, weight=weight, bias=bias)
    arrays = drawn(call)
    on_gpu = {name: None if a is None else to_cupy(a) for name, a in arrays.items()}
    x, weight, bias = (on_gpu[name] for name in ("x", "weight", "bias"))
    poison()
    forward = getattr(cupynorm, f"{call.norm}_forward")(
        x, weight, bias, eps=1e-5, axis=call.axis, relu=call.relu
    )
    means = [] if forward.mean is None else [forward.mean]
    poison()
    backward = getattr(cupynorm, f"{call.norm}_backward")(
        *(on_gpu["dy"], x, weight, *means, forward.rstd),
        bias=True if bias is None else bias,
        bitmask=forward.bitmask,
        axis=call.axis,
    )
    host, gradients = (type(r)(*map(to_numpy, r)) for r in (forward, backward))
    operands = arrays["x"], arrays["weight"], arrays["bias"]
    ratios = testing.check_forward(
        call.norm, host, *operands, eps=1e-5, axis=call.axis, relu=call.relu
    )
    ratios |= testing.check_backward(
        *(call.norm, gradients, arrays["dy"], *operands[:2], host.mean, host.rstd),
        bias=True if arrays["bias"] is None else arrays["bias"],
        bitmask=host.bitmask,
        axis=call.axis,
    )
    record(("groups", call.norm), ratios)


@pytest.mark.parametrize("axis", [1, (0, 2)])
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_over_any_axis(norm: str, axis: Any) -> None:
    x, dy = (to_cupy(make_values("normal", (4, 96, 8, 16), DTYPES["bfloat16"], i)) for i in (1, 2))
    forward = getattr(cupynorm, f"{norm}_forward")(x, axis=axis)
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(cupynorm, f"{norm}_backward")
    dx = backward(dy, x, None, *statistics, bias=False, axis=axis).dx
    for moved in (False, True):
        out, into = (to_cupy(np.zeros((4, 96, 8, 16), DTYPES["bfloat16"])) for _ in range(2))
        if moved:
            out, into = (to_cupy(np.zeros((16, 8, 96, 4), DTYPES["bfloat16"])).T for _ in range(2))
        assert getattr(cupynorm, norm)(x, axis=axis, out=out) is out
        found = backward(dy, x, None, *statistics, bias=False, axis=axis, dx=into)
        assert found.dx is into
        for actual, expected in ((out, forward.y), (into, dx)):
            np.testing.assert_array_equal(to_numpy(actual), to_numpy(expected))
