"""Weights that broadcast over rows in groups, and rows that lie side by side: layouts and kernels.

Kernels run on the host, as in test_host_kernels.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from host.build import Build, compiler_problem
from host.gpu import Caller, Gpu, launched
from hypothesis import given, settings
from hypothesis import strategies as st
from residuals import assert_bits
from strategies import DTYPES, make_values
from sums import check_sums, problem_of, with_sums

from cupynorm import testing
from cupynorm._arrays import rows_side_by_side
from cupynorm._compile import Instantiation
from cupynorm._groups import check_alike, clusters_of_group, common_shape, groups_of
from cupynorm._layout import strided
from cupynorm._operation import BackwardSpec, ForwardSpec

# ---- what belongs together -----------------------------------------------------------------------


@st.composite
def broadcasts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Draw x's shape, how many of its axes are normalized, and the shape of a weight."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)))
    weight = tuple(n if draw(st.booleans()) else 1 for n in shape)
    return shape, draw(st.integers(1, len(shape))), weight


@given(broadcasts(), st.integers(1, 9))
@settings(max_examples=300)
def test_groups_have_every_row_once_and_its_own_vector(drawn: Any, clusters: int) -> None:
    shape, k, weight = drawn
    weight = common_shape(shape, k, [weight])
    check_alike(shape, k, weight=weight)
    groups = groups_of(shape, k, weight, weight)
    kept, row = shape[: len(shape) - k], math.prod(shape[len(shape) - k :])
    if groups is None:
        assert math.prod(weight) == row
        assert set(weight[: len(kept)]) <= {1}
        return
    numbers = groups.numbers(row, clusters)
    elements = np.arange(math.prod(weight)).reshape(weight)
    wanted = np.broadcast_to(elements, shape).reshape(-1, row)
    found = np.full_like(wanted, -1)
    places = set()
    for cluster in range(numbers["n_groups"] * clusters):
        # As place_of_block in kernels/groups.cuh has it.
        quotient = cluster * numbers["n_magic"] >> numbers["n_shift"]
        take_turns = numbers["row_step"] > 1
        divisor = numbers["n_groups"] if take_turns else numbers["n_clusters"]
        remainder = cluster - quotient * divisor
        group, within = (remainder, quotient) if take_turns else (quotient, remainder)
        places.add((group, within))
        first = group % numbers["n_vectors"] * numbers["weight_step"]
        for r in range(within, groups.rows, clusters):
            at = group * numbers["group_step"] + r * numbers["row_step"]
            assert found[at, 0] == -1
            found[at] = first + np.arange(row) // numbers["n_repeats"]
    assert len(places) == numbers["n_groups"] * clusters
    np.testing.assert_array_equal(found, wanted)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_cluster_is_divided_exactly(divisor: int, cluster: int) -> None:
    groups = groups_of((3, 2), 1, (3, 1), None)
    assert groups is not None
    numbers = dataclasses.replace(groups, inner=2).numbers(2, divisor)
    assert cluster * numbers["n_magic"] < 2**64
    assert cluster * numbers["n_magic"] >> numbers["n_shift"] == cluster // divisor


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300))
def test_waves_of_clusters_take_no_longer_than_one_cluster_for_each_group(
    rows: int, groups: int, at_once: int
) -> None:
    def time(clusters: int) -> int:
        return -(-groups * clusters // at_once) * (-(-rows // clusters) + 1)

    clusters = clusters_of_group(rows, groups, at_once)
    assert 1 <= clusters <= rows
    assert time(clusters) <= time(1)


def test_vectors_of_other_forms_say_to_what_they_must_be_broadcast() -> None:
    with pytest.raises(NotImplementedError, match=r"broadcast it to \(2, 3, 4, 8\)"):
        check_alike((2, 3, 4, 8), 1, weight=(2, 1, 4, 8), bias=(8,))
    with pytest.raises(NotImplementedError, match=r"bias of shape \(3, 1, 1\).*\(1, 3, 1, 8\)"):
        check_alike((2, 3, 4, 8), 1, weight=(3, 1, 8), bias=(3, 1, 1))
    check_alike((2, 3, 4, 8), 1, weight=(3, 1, 8), bias=(8,))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_rows_side_by_side_are_found(shape: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    array = np.empty([shape[order.index(i)] for i in range(len(shape))], np.int16)
    array = array.transpose([order.index(i) for i in range(len(shape))]).transpose(order)
    inner = rows_side_by_side(array.shape, array.strides, 2, k)
    m, n = math.prod(array.shape[: len(shape) - k]), math.prod(array.shape[len(shape) - k :])
    places = np.lib.stride_tricks.as_strided(
        np.arange(array.size, dtype=np.int16), array.shape, array.strides
    ).reshape(m, n)

    def has(inner: int) -> bool:
        wanted = np.arange(array.size).reshape(m // inner, n, inner).swapaxes(1, 2).reshape(m, n)
        return bool(np.array_equal(places, wanted))

    if inner is None:
        assert n == 1 or not any(has(i) for i in range(2, m + 1) if m % i == 0)
    else:
        assert has(inner)


@pytest.mark.parametrize("architecture", [75, 90, 120])
@pytest.mark.parametrize("x", list(DTYPES))
def test_tiles_of_rows_side_by_side_fit_or_there_are_none(x: str, architecture: int) -> None:
    for norm, n in itertools.product(("rms_norm", "layer_norm"), (1, 96, 384, 2048, 70000)):
        forward = ForwardSpec(norm, x, x, x, x, False, True, False)  # type: ignore[arg-type]
        backward = BackwardSpec(norm, x, "float32", x, x, False, False)  # type: ignore[arg-type]
        for spec in (forward, backward):
            config = strided(spec, n, 1, architecture)
            if n == 70000:
                assert config is None
            elif config is not None:
                most = {75: 64, 90: 227, 120: 99}[architecture] << 10
                assert config.shared_bytes * config.blocks_per_multiprocessor <= most
            else:
                assert n > 384 or x == "float64"


# ---- the kernels ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A norm over some axes of an x, with a weight and a bias of these shapes."""

    name: str
    norm: str
    shape: tuple[int, ...]
    axis: Any
    weight: tuple[int, ...] | None
    bias: tuple[int, ...] | None
    dtypes: tuple[str, str] = ("bfloat16", "float32")  # x's, and weight's and bias's
    relu: tuple[float, float] | None = None
    scale: float = 1.0
    kernels: tuple[str, ...] = ()  # those that run

    def __str__(self) -> str:
        return f"{self.name}, {self.norm}"

    @property
    def zero_centered(self) -> bool:
        return self.weight is not None and len(self.name) % 2 == 0


PIPELINED = ("backward_pipelined", "reduce_partials")
REPEATED = ("backward_pipelined", "reduce_repeats")
STREAMED = ("backward_coefficients", "backward_columns")
STRIDED = ("forward_strided", "backward_strided", "reduce_partials")

CALLS = (
    Call("heads", "rms_norm", (3, 5, 4, 128), None, (4, 128), None, kernels=PIPELINED),
    Call("adaln", "layer_norm", (2, 70, 96), None, (2, 1, 96), (2, 1, 96), kernels=PIPELINED),
    Call(
        *("one weight, many biases", "layer_norm", (2, 7, 96), None, (96,), (2, 1, 96)),
        relu=(0.0, 3.0),
    ),
    Call("outer and inner", "layer_norm", (2, 3, 5, 40), None, (3, 1, 40), (3, 1, 40)),
    Call("a weight a row", "rms_norm", (9, 48), None, (9, 48), (9, 48), ("float32", "bfloat16")),
    Call("a number a row", "layer_norm", (9, 48), None, (9, 1), (9, 1), kernels=REPEATED),
    Call(
        *("groups of channels", "layer_norm", (2, 4, 3, 6, 4), (2, 3, 4), (4, 3, 1, 1)),
        (4, 3, 1, 1),
        kernels=REPEATED,
    ),
    Call(
        *("groups by single columns", "layer_norm", (2, 2, 3, 7), (2, 3), (2, 3, 1), (2, 3, 1)),
        *(("float16", "float16"), (0.0, 2.0)),
    ),
    Call("repeats alone", "rms_norm", (3, 4, 6), (1, 2), (4, 1), None, ("float32", "float32")),
    Call(
        *("pipelined", "layer_norm", (2, 3, 12288), None, (3, 12288), (3, 12288)),
        *(("float32", "float32"), (-1.0, 1.0)),
        kernels=("forward_pipelined", *PIPELINED),
    ),
    Call(
        *("pipelined, by index", "layer_norm", (2, 2, 16, 1200), (2, 3), (2, 16, 1), (2, 16, 1)),
        kernels=("forward_pipelined", *REPEATED),
    ),
    Call(
        *("rows of all groups", "layer_norm", (3, 11, 4, 64), (2, 3), (11, 4, 1), (11, 4, 1)),
        kernels=REPEATED,
    ),
    Call(
        *("rows of all groups by clusters", "layer_norm", (2, 3, 16, 1024), (2, 3), (3, 16, 1)),
        *((3, 16, 1), ("bfloat16", "bfloat16"), (0.0, 2.0)),
        kernels=REPEATED,
    ),
    Call(
        *("rows of all groups, one weight", "rms_norm", (7, 6, 5, 136), (2, 3), (5, 1), (6, 5, 1)),
        ("float32", "float16"),
        kernels=REPEATED,
    ),
    Call(
        *("rows of all groups out of range", "layer_norm", (9, 5, 4, 96), (2, 3), (5, 4, 1), None),
        ("float32", "bfloat16"),
        scale=1e25,
        kernels=REPEATED,
    ),
    Call(
        *("streamed", "rms_norm", (2, 2, 3, 70001), (2, 3), (2, 3, 1), None),
        relu=(0.0, 2.0),
        kernels=(*STREAMED, "reduce_repeats"),
    ),
    Call(
        *("streamed by packs", "layer_norm", (1, 2, 1, 240000), (2, 3), (2, 1, 1), (2, 1, 1)),
        kernels=(*STREAMED, "reduce_repeats"),
    ),
    Call("apart", "layer_norm", (3, 5, 4, 24), None, (3, 1, 4, 24), (24,), kernels=PIPELINED),
    Call(
        *("a weight for each and a bias by channels", "layer_norm", (2, 3, 4, 6), (1, 2, 3)),
        *((2, 1, 1, 1), (3, 4, 1), ("bfloat16", "bfloat16")),
    ),
    Call("bias alone", "rms_norm", (2, 5, 3, 8), None, None, (2, 1, 3, 1), ("float32", "float16")),
    Call("apart, moved", "layer_norm", (4, 8, 3), 1, (4, 1, 1), (8, 1), ("float16", "bfloat16")),
    Call("apart, no rows", "layer_norm", (2, 0, 4, 8), None, (2, 1, 4, 8), (8,)),
    Call("no examples", "layer_norm", (0, 3, 8), None, (0, 1, 8), (8,)),
    Call("no examples by index", "rms_norm", (0, 3, 8), None, (0, 1, 1), (0, 1, 1)),
    Call("no rows", "rms_norm", (0, 4, 6), (1, 2), (4, 1), None, ("float32", "float32")),
    Call("float64", "layer_norm", (4, 3, 64), None, (4, 1, 64), (4, 1, 64), ("float64",) * 2),
    Call("channels", "layer_norm", (12, 40, 16, 8), 1, (40, 1, 1), (40, 1, 1), kernels=STRIDED),
    Call(
        *("channels at any address", "rms_norm", (3, 33, 7, 3), 1, (33, 1, 1), None),
        ("float32", "float32"),
        kernels=STRIDED,
    ),
    Call(
        *("channels out of range", "layer_norm", (9, 70, 50), 1, (70, 1), (70, 1)),
        ("float32", "bfloat16"),
        scale=1e25,
        kernels=STRIDED,
    ),
    Call(
        *("columns, tiny", "rms_norm", (130, 64), 0, (130, 1), (130, 1), ("float32", "float32")),
        scale=1e-25,
        kernels=STRIDED,
    ),
    Call("many channels", "layer_norm", (1, 2000, 24), 1, (2000, 1), (2000, 1), kernels=STRIDED),
    Call("several axes", "rms_norm", (2, 5, 9, 24), (1, 2), (5, 9, 1), None, kernels=STRIDED),
    Call("moved", "layer_norm", (3, 40, 4), (0, 2), (3, 1, 4), None, kernels=PIPELINED),
    Call("channels with a ReLU", "layer_norm", (2, 40, 8), 1, (40, 1), None, relu=(0.0, 2.0)),
)


@pytest.fixture(scope="module")
def build() -> Build:
    if compiler_problem() is not None:
        pytest.skip(str(compiler_problem()))
    build = Build()
    of_few = (kernels_of(call, few_rows=True) for call in FEW)
    of_sums = (launched(functools.partial(check_sums_of, call)) for call in OF_SUMS)
    build.compile(itertools.chain(*map(kernels_of, CALLS), *of_few, *of_sums))
    return build


def run(gpu: Gpu, call: Call, arrays: dict[str, Any], zero_centered: bool) -> tuple[Any, Any, Any]:
    """Return what both passes give, and y without statistics. Weights may be stored around 0."""
    put = {name: None if a is None else gpu.memory.array(a) for name, a in arrays.items()}
    operands = put["x"], put["weight"], put["bias"]
    options: dict[str, Any] = {"axis": call.axis, "zero_centered": zero_centered}
    told = {"eps": 1e-5, "relu": call.relu, **options}
    y = gpu.forward(call.norm, *operands, **told, store_statistics=False)
    forward = gpu.forward(call.norm, *operands, **told)
    backward = gpu.backward(
        *(call.norm, put["dy"], put["x"], put["weight"], forward.mean, forward.rstd),
        bias=True if put["bias"] is None else put["bias"],
        bitmask=forward.bitmask,
        **options,
    )
    return gpu.to_numpy(forward), gpu.to_numpy(backward), gpu.to_numpy(y)


def drawn(call: Call) -> dict[str, Any]:
    of_x, of_vectors = (DTYPES[name] for name in call.dtypes)
    x = make_values("normal", call.shape, np.dtype(np.float64), 1)
    x[slice(1, None, 2) if call.scale > 1 else ...] *= call.scale  # every other example, if large
    vectors = {
        name: None if shape is None else make_values("normal", shape, of_vectors, seed)
        for name, shape, seed in (("weight", call.weight, 2), ("bias", call.bias, 3))
    }
    dy = make_values("normal", call.shape, np.dtype(np.float64), 4)
    if call.scale > 1e20:
        dy = dy * 1e30  # its products with x overflow
    return {"x": x.astype(of_x), "dy": dy.astype(of_x), **vectors}


# Those of which few rows have another kernel.
FEW = [call for call in CALLS if call.kernels[:1] == PIPELINED[:1]]


def kernels_of(call: Call, *, few_rows: bool = False) -> list[Instantiation]:
    arrays = drawn(call)
    return launched(lambda gpu: run(gpu, call, arrays, call.zero_centered), few_rows=few_rows)


def check_values(build: Build, call: Call, *, few_rows: bool) -> None:
    """Check every value of a call, that it launches its kernels, and that its bits come again."""
    arrays = drawn(call)
    x, dy, weight, bias = (arrays[name] for name in ("x", "dy", "weight", "bias"))
    gpu = Gpu(build, few_rows=few_rows)
    with gpu.fresh_memory():
        forward, backward, y = run(gpu, call, arrays, call.zero_centered)
        names = {kernel.name.removeprefix("norm_") for kernel in gpu.launched}
        again = run(gpu, call, arrays, call.zero_centered)
    assert names >= set(call.kernels)
    options: dict[str, Any] = {"axis": call.axis, "zero_centered": call.zero_centered}
    testing.check_forward(call.norm, forward, x, weight, bias, eps=1e-5, relu=call.relu, **options)
    assert_bits(y, forward.y, "y of inference")
    testing.check_backward(
        *(call.norm, backward, dy, x, weight, forward.mean, forward.rstd),
        bias=True if bias is None else bias,
        bitmask=forward.bitmask,
        **options,
    )
    for name, array in (forward._asdict() | backward._asdict()).items():
        if array is not None:
            assert_bits((again[0]._asdict() | again[1]._asdict())[name], array, f"{name} again")


@pytest.mark.parametrize(
    ("call", "few_rows"),
    [*zip(CALLS, itertools.repeat(False)), *zip(FEW, itertools.repeat(True))],
    ids=str,
)
def test_values(build: Build, call: Call, few_rows: bool) -> None:
    check_values(build, call, few_rows=few_rows)


NAMES_OF_SUMS = {
    *("one weight, many biases", "a number a row", "no rows", "float64", "channels", "moved"),
    *("apart", "apart, moved", "apart, no rows", "bias alone"),
    "a weight for each and a bias by channels",
}
OF_SUMS = [call for call in CALLS if call.name in NAMES_OF_SUMS]


def check_sums_of(call: Call, gpu: Gpu) -> None:
    problem = problem_of(call, drawn(call))
    check_sums(Caller(gpu), with_sums(problem, "float32", "bfloat16", offset=1))


@pytest.mark.parametrize("call", OF_SUMS, ids=str)
def test_sums_in_given_arrays(build: Build, call: Call) -> None:
    gpu = Gpu(build)
    with gpu.fresh_memory():
        check_sums_of(call, gpu)


@pytest.mark.parametrize("placed", ["dweight", "dbias"])
def test_one_given_sum_leaves_the_other_its_dtype(build: Build, placed: str) -> None:
    """One of weight and bias is repeated, so that both have one form."""
    gpu, narrow = Gpu(build), DTYPES["bfloat16"]
    with gpu.fresh_memory():
        put = gpu.memory.array
        x = put(np.random.default_rng(0).standard_normal((2, 3, 4, 24)).astype(np.float32))
        weight, bias = put(np.ones((2, 1, 4, 24), narrow)), put(np.ones(24, narrow))
        forward = gpu.forward("layer_norm", x, weight, bias, eps=1e-5)
        given = {placed: gpu.memory.zeros(bias.shape if placed == "dbias" else weight.shape, "f4")}
        kept = x, x, weight, forward.mean, forward.rstd
        found = gpu.backward("layer_norm", *kept, bias=bias, **given)
        assert getattr(found, placed).dtype == np.float32
        other = found.dbias if placed == "dweight" else found.dweight
        assert other.dtype == narrow


@pytest.mark.parametrize("call", [c for c in CALLS if c.name in ("adaln", "channels")], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(build: Build, call: Call) -> None:
    arrays = drawn(call)
    one = {
        name: a if a is None or a.shape[0] != call.shape[0] else a[:1] for name, a in arrays.items()
    }
    gpu = Gpu(build)
    with gpu.fresh_memory():
        (whole, of_whole, _), (part, of_part, _) = (
            run(gpu, call, given, zero_centered=False) for given in (arrays, one)
        )
    for name in ("y", "mean", "rstd"):
        assert_bits(getattr(part, name), getattr(whole, name)[:1], name)
    assert_bits(of_part.dx, of_whole.dx[:1], "dx")


@pytest.mark.parametrize("call", [c for c in CALLS if c.axis in (1, (0, 2))], ids=str)
def test_outputs_over_any_axis(build: Build, call: Call) -> None:
    gpu, arrays = Gpu(build), drawn(call)
    with gpu.fresh_memory():
        x, dy, weight, bias = (
            None if arrays[name] is None else gpu.memory.array(arrays[name])
            for name in ("x", "dy", "weight", "bias")
        )
        options: dict[str, Any] = {"axis": call.axis}
        forward = gpu.forward(call.norm, x, weight, bias, eps=1e-5, **options)
        given = weight, forward.mean, forward.rstd
        dx = gpu.backward(call.norm, dy, x, *given, bias=False, **options).dx
        results = [(forward.y.copy(), dx.copy())]
        for moved in (False, True):  # kernels write neither of the layouts that are moved
            shape = x.shape[::-1] if moved else x.shape
            places = [gpu.memory.array(np.full(shape, 7, x.dtype)) for _ in range(2)]
            places = [place.T if moved else place for place in places]
            y = gpu.forward(call.norm, x, weight, bias, eps=1e-5, out=places[0], **options).y
            found = gpu.backward(call.norm, dy, x, *given, bias=False, dx=places[1], **options)
            assert y is places[0]
            assert found.dx is places[1]
            results.append((y.copy(), found.dx.copy()))
        in_place = gpu.backward(call.norm, dy, x, *given, bias=False, dx=dy, **options).dx
        assert in_place is dy
    for one in results[1:]:
        for actual, expected in zip(one, results[0], strict=True):
            assert_bits(actual, expected, "in place")
    assert_bits(in_place.copy(), results[0][1], "over dy")
