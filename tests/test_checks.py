"""Frameworks that do not mix, outputs on a GPU, and then what must be accepted.

`test_wrong_calls` has the table of wrong arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from correct_calls import ALL_DTYPES, SHAPE, correct, every_function, zeros

import cupynorm
from cupynorm import _checks, _warmup
from cupynorm._layout import ForwardInRegisters, few_rows_configs, forward_config
from cupynorm._operation import ITEMSIZE, BackwardSpec, ForwardSpec

# ---- frameworks ----------------------------------------------------------------------------------


def convert(framework: str, array: np.ndarray) -> Any:
    if framework == "numpy":
        return array
    module = pytest.importorskip({"torch": "torch", "jax": "jax.numpy"}[framework])
    return module.asarray(array)


LABELS = {"numpy": "NumPy array", "torch": "torch tensor", "jax": "JAX array"}
TYPES = {"numpy": "numpy.ndarray", "torch": "torch.Tensor", "jax": "jaxlib.ArrayImpl"}


@every_function
@pytest.mark.parametrize(
    ("framework", "other"),
    [(a, b) for a in LABELS for b in LABELS if a != b],
)
def test_frameworks_do_not_mix(function: Callable[..., Any], framework: str, other: str) -> None:
    arguments = correct(function)
    unwritten = {name: a.copy() for name, a in arguments.items()}
    theirs = {name: convert(framework, a) for name, a in arguments.items()}
    if framework == "jax":
        theirs = {name: a for name, a in theirs.items() if name not in ("out", "dx")}
    for name in theirs:
        if name == "x":
            continue
        mixed = theirs | {name: convert(other, arguments[name])}
        with pytest.raises(TypeError) as raised:
            function(**mixed)
        message = str(raised.value)
        besides = "True, False, None or " if name == "bias" and "dy" in theirs else ""
        assert message.startswith(f"{name} must be {besides}a {LABELS[framework]}")
        assert TYPES[other] in message
    for name, array in unwritten.items():
        np.testing.assert_array_equal(arguments[name], array)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *(((1, 1, 8), -1), ((5, 8), -1), ((1, 7), -1), ((7,), -1), ((8, 3), -1)),
        *(((3,), 0), ((2, 1), 0), ((1, 3, 1), 0)),
        *(((3,), (-2, -1)), ((24,), (-2, -1)), ((1, 3, 8), (-2, -1))),
        *(((2, 3, 8), None), ((7,), None), ((0,), None)),
    ],
)
def test_a_weight_is_refused_alike_everywhere(name: str, shape: Any, axis: Any) -> None:
    torch = pytest.importorskip("torch", minversion="2.11")
    jnp = pytest.importorskip("jax.numpy")
    import cupynorm.jax
    import cupynorm.torch

    messages = []
    for face, module in ((cupynorm, np), (cupynorm.torch, torch), (cupynorm.jax, jnp)):
        x = module.ones((3, 8))
        with pytest.raises(ValueError, match=name) as raised:
            face.layer_norm(x, **{name: module.ones(shape)}, axis=axis)
        messages.append((raised.type, str(raised.value)))
    assert messages == messages[:1] * 3


@every_function
def test_jax_arrays_are_no_outputs(function: Callable[..., Any]) -> None:
    pytest.importorskip("jax")
    arguments = {name: convert("jax", a) for name, a in correct(function).items()}
    name = "out" if "out" in arguments else "dx"
    with pytest.raises(TypeError, match=f"{name} must be None for JAX arrays.*immutable"):
        function(**arguments)
    assert np.all(np.asarray(arguments[name]) == 777)


# ---- outputs on a GPU: contiguous rows, one stride apart -----------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "k"),
    [
        ((3, 4), (16, 4), 1),
        ((3, 4), (20, 4), 1),
        ((3, 4), (-16, 4), 1),
        ((2, 3, 4), (48, 16, 4), 2),
        ((2, 3, 4), (60, 20, 4), 1),
        ((1, 4), (0, 4), 1),
        ((0, 4), (16, 8), 1),
    ],
)
def test_an_output_of_separate_rows_is_writable(
    shape: tuple[int, ...], strides: tuple[int, ...], k: int
) -> None:
    _checks._check_writable("out", gpu_array(shape, strides), k)


@pytest.mark.parametrize(
    ("shape", "strides", "k"),
    [
        ((3, 4), (4, 12), 1),  # transposed
        ((3, 4), (32, 8), 1),  # every second column
        ((3, 4), (0, 4), 1),  # one row for all
        ((3, 4), (12, 4), 1),  # overlapping
        ((3, 4), (-12, 4), 1),
        ((3, 4), (18, 4), 1),  # not a whole number of elements
        ((2, 3, 4), (72, 20, 4), 1),  # two strides
        ((2, 3, 4), (60, 20, 4), 2),
    ],
)
def test_an_output_of_other_rows_is_not(
    shape: tuple[int, ...], strides: tuple[int, ...], k: int
) -> None:
    with pytest.raises(ValueError, match="out must hold contiguous rows") as raised:
        _checks._check_writable("out", gpu_array(shape, strides), k)
    assert str(strides) in str(raised.value)


def test_an_output_whose_axes_are_moved_may_have_any_layout() -> None:
    _checks._check_writable("out", gpu_array((3, 4), (4, 12)), None)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        _checks._check_writable("out", gpu_array((3, 4), (4, 4)), None)


def gpu_array(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Stand in for a CuPy float32 array."""
    size = int(np.prod(shape))
    data = SimpleNamespace(ptr=512)
    return SimpleNamespace(
        shape=shape, strides=strides, itemsize=4, ndim=len(shape), size=size, data=data
    )


# ---- warmup and supports -------------------------------------------------------------------------


def test_kernel_source_is_of_the_kernels_that_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    from cupynorm import _compile, _plans

    def sources(plan: Any) -> dict[str, str]:
        return {kernel.name: kernel.source() for kernel in plan}

    gpu = SimpleNamespace(compute_capability="90", attributes={"MultiProcessorCount": 12})
    monkeypatch.setattr(_warmup, "_device_problem", lambda: None)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: gpu)
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)

    class Loaded(_compile.Instantiation):
        def clusters_at_once(self, *, alone: bool = False) -> int:
            return 3

        def blocks_at_once(self) -> int:
            return 100

    monkeypatch.setattr(_compile, "load", lambda kernel, device: Loaded(**vars(kernel)))
    for norm, n, (weight, bias) in itertools.product(
        ("rms_norm", "layer_norm"),
        (96, 1003, 4096, 65536, 262144),
        ((None, None), ("float32", None), ("float32", "bfloat16")),
    ):
        vector = min(8, n & -n)
        dtypes = norm, n, "bfloat16", weight, bias
        dbias = bias or (None if norm == "rms_norm" else weight or "bfloat16")
        of_dy = BackwardSpec(norm, "bfloat16", "float32", weight, dbias, False, True)
        for rows, m in ((1, 1), (40, 40), (None, 10**9)):
            for stored in (False, True):
                spec = ForwardSpec(
                    norm, "bfloat16", weight, bias, "float16", weight is not None, stored, False
                )
                plan = _plans.forward_plan(spec, m, n, vector, -7)
                assert cupynorm.kernel_source(
                    *dtypes,
                    out_dtype="float16",
                    zero_centered=weight is not None,
                    statistics=stored,
                    rows=rows,
                ) == sources([plan.kernel])
            of_sums = {"dweight": weight and "float64", "dbias": dbias and "float64"}
            given = replace(of_dy, **of_sums, bitmask=False, sums_given=True, accumulate=True)
            kernels = _plans.backward_plan(given, m, n, vector, -7).kernels
            options: dict[str, Any] = {"dy_dtype": "float32", "backward": True, "rows": rows}
            adds = {"gradient_dtype": "float64", "accumulate": True}
            assert cupynorm.kernel_source(*dtypes, **options, **adds) == sources(kernels)
            kernels = _plans.backward_plan(of_dy, m, n, vector, -7).kernels
            options = {"dy_dtype": "float32", "relu": True, "backward": True}
            assert cupynorm.kernel_source(*dtypes, **options, rows=rows) == sources(kernels)
            for residual in ("bfloat16", "float32"):
                options = {"residual_dtype": residual, "rows": rows}
                of_sum = replace(
                    ForwardSpec(norm, residual, weight, bias, "bfloat16", False, False, False),
                    **{"branch": "bfloat16", "residual": residual},
                )
                wide = min(vector, 16 // ITEMSIZE[residual])
                plan = _plans.forward_plan(of_sum, m, n, wide, -7)
                assert cupynorm.kernel_source(*dtypes, **options) == sources([plan.kernel])
                differ = residual != "bfloat16"
                of_inputs = replace(
                    BackwardSpec(norm, residual, "bfloat16", weight, dbias, False, False),
                    dresidual_out=residual,
                    dx="bfloat16" if differ else None,
                    dresidual=residual if differ else None,
                )
                kernels = _plans.backward_plan(of_inputs, m, n, wide, -7).kernels
                assert cupynorm.kernel_source(*dtypes, **options, backward=True) == sources(kernels)


def test_a_launch_has_no_more_blocks_than_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", exc_type=ImportError)
    from cupynorm import _background, _driver, _plans
    from cupynorm._groups import groups_of

    kernel = SimpleNamespace(
        clusters_at_once=lambda: 3,
        blocks_at_once=lambda: 100,
        prepared=lambda blocks, _: launched.append(blocks),
    )
    launched: list[int] = []
    monkeypatch.setattr(_background, "load", lambda kernels, device: len(kernels) * (kernel,))
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    spec = BackwardSpec("layer_norm", *4 * ("float32",), False, False, grouped=True, repeats=2)
    plan = _plans.backward_plan(spec, 1 << 30, 2, 2, -8)
    for vectors in (1 << 20, 1 << 30):
        shape = (vectors, 1)
        groups = groups_of((1, vectors, 2), 1, shape, shape)
        if 2 * vectors <= _driver.MOST_BLOCKS:
            plan.prepared(vectors, groups)
            assert launched[-1] == 2 * vectors
        else:
            with pytest.raises(NotImplementedError, match=r"at most 2147483647 elements together"):
                plan.prepared(vectors, groups)


def test_kernel_source_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warmup, "gpu_problem", lambda: "the GPU is on holiday")
    arguments: tuple[Any, ...] = ("layer_norm", 1 << 20, "float32", "float32")
    usual = cupynorm.kernel_source(*arguments)
    assert usual == cupynorm.kernel_source(*arguments, architecture=90)
    assert usual != cupynorm.kernel_source(*arguments, architecture=80)
    assert list(usual) == ["norm_forward_streaming"]
    assert "#include" not in usual["norm_forward_streaming"]


@pytest.mark.parametrize("n", [4, [4, 8], (4,), range(1, 3), [], np.int64(4), np.array([4, 8])])
def test_supports_says_why_no_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch, n: Any) -> None:
    monkeypatch.setattr(_warmup, "gpu_problem", lambda: "the GPU is on holiday")
    assert cupynorm.supports("rms_norm", n, "float16") == "the GPU is on holiday"
    with pytest.raises(RuntimeError, match="the GPU is on holiday"):
        cupynorm.warmup("rms_norm", n, "float16", "float32", backward=False)


def test_a_gpu_may_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    old = SimpleNamespace(id=3, compute_capability="70")
    monkeypatch.setattr(_warmup, "gpu_problem", lambda: None)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: old)
    problem = cupynorm.supports("rms_norm", 4096, "bfloat16")
    assert problem == "GPU 3 has compute capability 7.0, and 7.5 is the least supported"
    with pytest.raises(RuntimeError, match=r"compute capability 7\.0"):
        cupynorm.warmup("rms_norm", 4096, "bfloat16")
    old.compute_capability = "75"
    assert cupynorm.supports("rms_norm", 4096, "bfloat16") is None


def test_warmup_loads_the_kernels_of_few_rows_and_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    from cupynorm import _compile, _plans

    loaded = []
    monkeypatch.setattr(_warmup, "_device_problem", lambda: None)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(id=-2))
    monkeypatch.setattr(_plans, "multiprocessors", lambda device: 12)
    monkeypatch.setattr(_plans, "architecture", lambda device: 90)
    kernel = SimpleNamespace(clusters_at_once=lambda alone=False: 1)
    monkeypatch.setattr(_compile, "load", lambda wanted, device: loaded.append(wanted) or kernel)
    cupynorm.warmup("layer_norm", 4096, "float32", "float32")
    spec = ForwardSpec("layer_norm", "float32", "float32", None, "float32", False, False, False)
    many = forward_config(spec, 4096, 4, 90)
    assert isinstance(many, ForwardInRegisters)
    few = [config for _, config in few_rows_configs(spec, many, 4096, 90, 12)]
    assert loaded[:3] == [_compile.forward_instantiation(spec, config) for config in (*few, many)]
    names = [kernel.name for kernel in loaded[6:]]
    few, many = ["norm_backward_in_registers"], ["norm_backward_pipelined", "reduce_partials"]
    few_and_columns = [*few, "norm_backward_in_registers_columns"]
    few_and_sums = [*few, "reduce_partials"]  # for a given dx
    assert names[: len(names) // 2] == [*few_and_columns, *many, *few_and_sums]
    assert names[len(names) // 2 :] == names[: len(names) // 2]  # without the bias gradient

    # 12 multiprocessors run 96 rows at once, 8 a block. One row a block is for up to 64 rows.
    loaded.clear()
    cupynorm.warmup("layer_norm", 1024, "float32", "float32")
    names = [k.name for k in loaded if "forward" not in k.file]
    assert names == 2 * [*few_and_columns, *few_and_sums, *many, *few_and_sums]

    loaded.clear()
    cupynorm.warmup("rms_norm", 4096, "float32", "float32")
    names = [kernel.name for kernel in loaded[4:]]
    beside_columns = 2 * few  # for up to 64 rows and up to 69, with the same kernel
    assert names == [*beside_columns, *many, *few_and_sums]


@pytest.mark.parametrize(
    ("norm", "bias", "dbias"),
    [
        ("layer_norm", None, {"float32", None}),
        ("layer_norm", "float32", {"float32"}),
        ("layer_norm", "bfloat16", {"float32", "bfloat16"}),
        ("rms_norm", None, {None}),
        ("rms_norm", "bfloat16", {None, "bfloat16"}),
    ],
)
def test_warmup_is_for_the_defaults_of_backward_as_well(
    norm: Any, bias: str | None, dbias: set[str | None]
) -> None:
    asked = dict.fromkeys(_warmup._DTYPES_ASKED.values()) | {"norm": norm, "bias_dtype": bias}
    asked |= {"x_dtype": "bfloat16", "weight_dtype": "float32"}
    asked |= {"zero_centered": False, "relu": False, "quantize": None, "backward": True}
    for gradient, accumulate in ((None, False), ("float64", False), ("float64", True)):
        told = {"gradient_dtype": gradient, "accumulate": accumulate}
        specs = [s for s in _warmup._specs(asked | told) if isinstance(s, BackwardSpec)]
        assert {spec.dbias for spec in specs} == {d and (gradient or d) for d in dbias}
        assert {spec.dtypes["dweight"] for spec in specs} == {gradient or "float32"}
        assert {(s.sums_given, s.accumulate) for s in specs} == {(gradient is not None, accumulate)}


# ---- what must be accepted -----------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("shape", "axis", "kept"), [((0, 4), -1, (0,)), ((2, 0, 3, 4), (-2, -1), (2, 0))]
)
def test_no_rows_give_empty_results_and_zero_gradients(
    norm: str, shape: tuple[int, ...], axis: Any, kept: tuple[int, ...]
) -> None:
    row = shape[len(kept) :]
    x, weight, bias = zeros(*shape), np.ones(row, np.float16), np.ones(row, np.float64)
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, axis=axis)
    assert (forward.y.shape, forward.y.dtype) == (shape, np.float32)
    assert forward.rstd.shape == kept
    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(cupynorm, f"{norm}_backward")
    dx, dweight, dbias, _ = backward(x, x, weight, *statistics, bias=bias, axis=axis)
    assert dx.shape == shape
    assert (dweight.shape, dweight.dtype, np.count_nonzero(dweight)) == (row, np.float16, 0)
    assert (dbias.shape, dbias.dtype, np.count_nonzero(dbias)) == (row, np.float64, 0)


@pytest.mark.parametrize(
    ("axis", "k"),
    [
        (-1, 1),
        (2, 1),
        ((-1,), 1),
        ([2], 1),
        (np.int64(-1), 1),
        (range(2, 3), 1),
        ((-2, -1), 2),
        ((-1, -2), 2),
        ((1, -1), 2),
        ([1, 2], 2),
        ((0, 1, 2), 3),
    ],
)
def test_ways_to_name_trailing_axes(axis: Any, k: int) -> None:
    x = np.random.default_rng(0).random(SHAPE, np.float32)
    result = cupynorm.layer_norm_forward(x, axis=axis)
    assert result.rstd.shape == SHAPE[: 3 - k]
    rows = x.reshape(*SHAPE[: 3 - k], -1)
    np.testing.assert_array_equal(result.y.reshape(rows.shape), cupynorm.layer_norm(rows))


@pytest.mark.parametrize(
    ("row", "axis"), [((4,), None), ((4,), -1), ((3, 4), (-2, -1)), (SHAPE, (0, 1, 2))]
)
@pytest.mark.parametrize("given", ["", "weight", "bias", "weight and bias"])
def test_by_default_the_last_axis_is_normalized(row: Any, axis: Any, given: str) -> None:
    affine = {name: np.ones(row, np.float32) for name in given.split(" and ") if name}
    rstd = cupynorm.rms_norm_forward(zeros(*SHAPE), **affine, axis=axis).rstd
    assert rstd.shape == SHAPE[: 3 - len(row)]


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("axis", "row", "shape"),
    [
        (-1, (4,), (1, 4)),
        (-1, (4,), (1, 1, 4)),
        ((-2, -1), (3, 4), (1, 3, 4)),
    ],
)
def test_leading_axes_of_one_change_nothing_but_the_gradients_shape(
    norm: str, axis: Any, row: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.random((2, *SHAPE), np.float32)
    weight, bias = rng.random((2, *row), np.float32)
    forward = getattr(cupynorm, f"{norm}_forward")
    backward = getattr(cupynorm, f"{norm}_backward")
    plain = forward(x, weight, bias, axis=axis)
    wide = forward(x, weight.reshape(shape), bias.reshape(shape), axis=axis)
    np.testing.assert_array_equal(wide.y, plain.y)
    statistics = [s for s in (plain.mean, plain.rstd) if s is not None]
    expected = backward(dy, x, weight, *statistics, bias=bias, axis=axis)
    for dbias in (bias.reshape(shape), True):
        actual = backward(dy, x, weight.reshape(shape), *statistics, bias=dbias, axis=axis)
        assert actual.dweight.shape == actual.dbias.shape == shape
        np.testing.assert_array_equal(actual.dweight.reshape(row), expected.dweight)
        np.testing.assert_array_equal(actual.dbias.reshape(row), expected.dbias)
        np.testing.assert_array_equal(actual.dx, expected.dx)


@pytest.mark.parametrize(
    ("spelled", "dtype"),
    [
        *((name, name) for name in ALL_DTYPES),
        (np.float16, "float16"),
        (np.dtype("float64"), "float64"),
        (float, "float64"),
        ("f4", "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_ways_to_name_a_dtype(spelled: Any, dtype: str) -> None:
    assert cupynorm.rms_norm(zeros(2, 4), out_dtype=spelled).dtype == np.dtype(dtype)


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_the_dtypes_of_torch_and_jax_name_themselves(name: str) -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    for spelled in (getattr(torch, name), getattr(jnp, name)):
        assert cupynorm.layer_norm(zeros(2, 4), out_dtype=spelled).dtype == np.dtype(name)


@pytest.mark.parametrize("eps", [0, 0.0, 1, np.float32(1e-6), np.float64(1e-6)], ids=repr)
def test_eps_is_any_real_number(eps: Any) -> None:
    x = np.random.default_rng(0).random(SHAPE, np.float32)
    np.testing.assert_array_equal(
        cupynorm.layer_norm(x, eps=eps), cupynorm.layer_norm(x, eps=float(eps))
    )


@pytest.mark.parametrize(
    "relu",
    [(0, 6), [0, 6.0], (np.float32(0), np.int64(6)), (-0.0, Fraction(6))],
    ids=repr,
)
def test_relu_is_any_pair_of_real_numbers(relu: Any) -> None:
    x = 9 * np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    actual = cupynorm.layer_norm_forward(x, relu=relu)
    expected = cupynorm.layer_norm_forward(x, relu=(0.0, 6.0))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_bounds_beyond_the_compute_dtype_are_open() -> None:
    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    for relu in ((-math.inf, math.inf), (-(10**400), 10**400), (-1e300, 1e300)):
        forward = cupynorm.rms_norm_forward(x, relu=relu)
        np.testing.assert_array_equal(forward.y, cupynorm.rms_norm(x))
        assert np.all(forward.bitmask == 0b1111)


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((2, 4), (4, 4), True),
        ((2, 4), (12, 4), True),
        ((2, 4), (0, 4), True),
        ((2, 4), (2, 8), True),
        ((4, 3), (8, 12), True),
        ((3, 2), (8, 12), False),
        ((2, 4), (16, 4), False),
        ((4, 2), (-4, 16), False),
        ((1, 4), (0, 4), False),
        ((0, 4), (0, 0), False),
    ],
)
def test_an_output_that_overlaps_itself(
    shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool
) -> None:
    memory = zeros(64)
    x = zeros(*shape)
    out = np.lib.stride_tricks.as_strided(memory[32:], shape, strides)
    if not overlaps:
        assert cupynorm.rms_norm(x, out=out) is out
        return
    with pytest.raises(ValueError, match="out must not overlap itself; got strides"):
        cupynorm.rms_norm(x, out=out)


def test_numbers_of_bfloat16_are_numbers() -> None:
    x, one = zeros(2, 4), np.ones((), "bfloat16")[()]
    assert np.array_equal(cupynorm.rms_norm(x, eps=one, relu=(-one, one)), x)


def test_an_eps_of_minus_zero_is_zero() -> None:
    assert math.copysign(1, _checks.to_eps(-0.0)) == 1


def test_out_decides_the_dtype_and_may_be_x() -> None:
    x = np.random.default_rng(0).random(SHAPE, np.float32)
    half = np.empty(SHAPE, np.float16)
    expected = cupynorm.rms_norm(x, out_dtype="float16")
    assert cupynorm.rms_norm(x, out=half) is half
    np.testing.assert_array_equal(half, expected)
    expected = cupynorm.rms_norm(x)
    assert cupynorm.rms_norm_forward(x, out=x).y is x
    np.testing.assert_array_equal(x, expected)


def test_dx_may_be_dy() -> None:
    arguments = correct(cupynorm.layer_norm_backward)
    expected = cupynorm.layer_norm_backward(**arguments)
    expected = expected._replace(dx=expected.dx.copy())
    actual = cupynorm.layer_norm_backward(**arguments | {"dx": arguments["dy"]})
    assert actual.dx is arguments["dy"]
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_row_alone_has_statistics_without_axes() -> None:
    result = cupynorm.layer_norm_forward(zeros(4))
    assert result.mean.shape == result.rstd.shape == ()


@pytest.mark.parametrize("detached", [True, False])
def test_a_torch_parameter_without_gradient_is_a_tensor(detached: bool) -> None:
    torch = pytest.importorskip("torch")
    if detached:
        weight = torch.nn.Parameter(torch.full((4,), 2.0)).detach()
    else:
        weight = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
    x = torch.ones(3, 4)
    assert torch.equal(cupynorm.rms_norm(x, weight, eps=0), 2 * x)
    y = cupynorm.rms_norm(weight, x[0], eps=0)
    assert type(y) is torch.Tensor
    assert torch.equal(y, x[0])
