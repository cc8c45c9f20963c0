"""The kernels of norms of `cupynorm.fuse`, written from drawn programs, on the host."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from fused_gpu import FUSED, GATED, MANY, HostMemory, check, drawn, on_host, passes
from fused_norms import Call, calls, function_of
from host.build import Build, compiler_problem
from host.gpu import Gpu
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from thorough import examples

import cupynorm
import cupynorm.math as cm
from cupynorm import _fused_calls, testing
from cupynorm._arrays import to_numpy
from cupynorm._compile import fused_backward_instantiations, fused_forward_instantiation
from cupynorm._fuse import Given, Options
from cupynorm._fused_source import Input, Spec, backward_op, forward_op
from cupynorm._layout import (
    fused_backward,
    fused_backward_bytes,
    fused_forward,
    reduction_of_gradients,
    shared_limit,
)
from cupynorm._layout.architectures import ARCHITECTURES
from cupynorm._operation import ITEMSIZE

needs_compiler = pytest.mark.skipif(
    compiler_problem() is not None, reason=f"needs a C++ compiler: {compiler_problem()}"
)
PHASES = Phase.explicit, Phase.reuse, Phase.generate


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    gpu = Gpu(Build())
    gpu.blocks_at_once = 1
    return gpu


@needs_compiler
@given(calls())
# Each takes seconds to compile, so a failure is not made smaller.
@settings(
    max_examples=examples(4, of=6),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=PHASES,
)
def test_drawn_norms(gpu: Gpu, call: Call) -> None:
    call = dataclasses.replace(call, options=call.options | {"axis": -1})
    wide = call.of(convert=lambda array: array.astype(np.float64) if array.dtype != bool else array)
    outputs = wide if isinstance(wide, tuple) else (wide,)
    assume(all(np.isfinite(output.astype(np.float64)).all() for output in outputs))
    n = call.x.shape[-1]
    vectors = {}
    for name in ("weight", "bias"):
        vector = getattr(call, name)
        if vector is not None:  # others are left to operations of a framework
            row = np.broadcast_to(vector, call.x.shape).reshape(-1, n)[0]
            vectors[name] = row.copy()
    check(gpu, dataclasses.replace(call, **vectors))


BFLOAT16 = ml_dtypes.bfloat16
LENGTHS = {  # of rows that share a warp, have one, several, and a cluster of blocks
    "parts of a warp": (5, 100),
    "a warp": (3, 2, 1000),
    "several warps": (3, 4100),
    "a cluster": (2, 36864),
}


@needs_compiler
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_every_length(gpu: Gpu, length: str) -> None:
    shape = LENGTHS[length]
    n = shape[-1:]
    inputs = {"z": drawn(3, shape, BFLOAT16)}
    weight = drawn(1, n)
    check(gpu, Call(GATED, drawn(2, shape, BFLOAT16), weight, None, {}, inputs))


@needs_compiler
def test_odd_functions_keep_the_sign_of_zero(gpu: Gpu) -> None:
    odd = cupynorm.fuse("rms_norm", epilogue=lambda y, z: (cm.tanh(z), cm.erf(z)))
    z = np.array([[0.0, -0.0, 1e-30, -1e-30]], np.float32)
    with gpu.fresh_memory(), on_host(gpu):
        found = odd(gpu.memory.array(np.ones_like(z)), z=gpu.memory.array(z))
        tanh, erf = map(gpu.to_numpy, found)
    assert gpu.launched
    np.testing.assert_array_equal(np.signbit(tanh), np.signbit(z))
    np.testing.assert_array_equal(np.signbit(erf), np.signbit(z))
    np.testing.assert_array_equal(tanh, z)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 2, 70), (70, 40)])
def test_inputs_at_every_place(gpu: Gpu, shape: tuple[int, ...]) -> None:
    """An input of x's shape, one a row, of all rows, of one element, and one that is copied."""
    n, column = shape[-1:], (*shape[:-1], 1)
    inputs = {
        "r": drawn(1, shape, np.float16),
        "a": drawn(2, column),
        "s": drawn(3, n, BFLOAT16),
        "z": drawn(4, (shape[-2], 1)),
        "c": drawn(5, shape) > 0,
    }
    options = {"zero_centered": True, "out_dtype": (None, "float16", np.float64, None)}
    call = Call(MANY, drawn(6, shape), drawn(7, n), drawn(8, n), options, inputs)
    check(gpu, call)
    inputs |= {"a": drawn(2, ()), "c": 1.5}
    check(gpu, dataclasses.replace(call, inputs=inputs))


@needs_compiler
@pytest.mark.parametrize("kept", [(3,), (2, 3)])
def test_vectors_of_their_own_for_each_row_have_no_kernel(gpu: Gpu, kept: tuple[int, ...]) -> None:
    x = drawn(1, (*kept, 8))
    for vectors in ((drawn(2, x.shape), None), (None, drawn(3, x.shape))):
        check(gpu, Call(GATED, x, *vectors, {}, {"z": drawn(4, x.shape)}), by_kernels=False)


@needs_compiler
def test_rows_apart_and_at_odd_addresses(gpu: Gpu) -> None:
    whole = drawn(1, (6, 71), BFLOAT16)
    with gpu.fresh_memory(), on_host(gpu):
        x, z = (gpu.memory.array(whole)[:, first : first + 64] for first in (1, 7))
        found = GATED.forward(x, z=z)
        y = gpu.to_numpy(found.y)
    testing.check_fused(GATED, y, whole[:, 1:65], z=whole[:, 7:71])


@needs_compiler
@pytest.mark.parametrize("scale", [1e38, 1e25, 1e-25, 0.0])
def test_rows_out_of_range_and_their_neighbours(gpu: Gpu, scale: float) -> None:
    for norm in ("rms_norm", "layer_norm"):
        fused = cupynorm.fuse(norm, prologue=lambda x, r: x - r)  # type: ignore[arg-type]
        x, r = drawn(1, (4, 40)), drawn(2, (4, 40))
        usual = x.copy()
        x[1] *= np.float32(scale)
        r[1] *= np.float32(scale)
        with gpu.fresh_memory(), on_host(gpu):
            put = gpu.memory.array
            y, y_usual = (gpu.to_numpy(fused(put(a), r=put(r))) for a in (x, usual))
        check(gpu, Call(fused, x, None, None, {}, {"r": r}))
        np.testing.assert_array_equal(y[[0, 2, 3]], y_usual[[0, 2, 3]])


@needs_compiler
def test_bits_do_not_depend_on_the_number_of_rows(gpu: Gpu) -> None:
    x, z = drawn(1, (40, 72), BFLOAT16), drawn(2, (40, 72), BFLOAT16)
    with gpu.fresh_memory(), on_host(gpu):
        put = gpu.memory.array
        forward = GATED.forward(put(x), z=put(z))
        y, dx = gpu.to_numpy(forward.y), gpu.to_numpy(GATED.backward(put(z), forward).dx)
        few = GATED.forward(put(x[7:9]), z=put(z[7:9]))
        np.testing.assert_array_equal(gpu.to_numpy(few.y), y[7:9])
        found = GATED.backward(put(z[7:9]), few)
        np.testing.assert_array_equal(gpu.to_numpy(found.dx), dx[7:9])


@needs_compiler
@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "architecture", "n"),
    # Of one block and of a cluster. The last tile is not whole.
    [(np.float64, 75, 9001), (BFLOAT16, 75, 20004), (np.float32, 90, 131073)],
)
def test_rows_that_are_read_again(dtype: Any, architecture: int, n: int) -> None:
    gpu = Gpu(Build(), architecture=architecture)
    shape = (3, n)
    inputs = {
        "r": drawn(1, shape, dtype),
        "a": drawn(2, (3, 1)),
        "s": drawn(3, (n,), BFLOAT16),
        "z": drawn(4, shape),
        "c": drawn(5, shape) > 0,
    }
    x = drawn(6, shape, dtype)
    x[1] += 100
    check(gpu, Call(MANY, x, drawn(7, (n,)), drawn(8, (n,)), {"zero_centered": True}, inputs))
    of_rows = [kernel for kernel in gpu.launched if kernel.name.startswith("fused")]
    assert all(("kStreams", True) in kernel.layout for kernel in of_rows)


@needs_compiler
def test_many_rows_that_are_read_again() -> None:
    """A cluster has at most kTurns of them, though more run at once then."""
    gpu = Gpu(Build(), architecture=75)
    gpu.blocks_at_once = 1
    shape = (130, 8200)
    inputs = {"z": drawn(2, shape, BFLOAT16)}
    check(gpu, Call(GATED, drawn(1, shape), drawn(3, shape[-1:]), None, {}, inputs))


@needs_compiler
def test_a_slice_of_a_gpu_has_no_clusters(gpu: Gpu) -> None:
    shape = (2, 36864)
    call = Call(GATED, drawn(1, shape), None, None, {}, {"z": drawn(2, shape)})
    with mock.patch.object(gpu, "clusters_at_once", 0):
        check(gpu, call)
    assert {kernel.cluster_blocks for kernel in gpu.launched} == {1}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "architecture"), [("parts of a warp", 90), ("rows that are read again", 75)]
)
def test_launches_at_addresses_are_those_of_calls(name: str, architecture: int) -> None:
    """Frameworks that allocate all arrays launch the same kernels, and get the same bits."""
    call, _ = FUSED[f"fused, {name}"]
    gpu = Gpu(Build(), architecture=architecture)
    call.fused.prepared.clear()
    with gpu.fresh_memory(), on_host(gpu):
        outputs, gradients, of_outputs = passes(call, gpu.memory.array, gpu.to_numpy)
        by_calls = [str(kernel) for kernel in gpu.launched]
        gpu.launched.clear()
        memory = HostMemory(gpu)
        put = gpu.memory.array
        inputs = {name: put(array) for name, array in call.inputs.items()}
        arrays = Given(*(put(a) for a in (call.x, call.weight, call.bias)), inputs)
        options, dtypes = Options(**call.options), call.fused.dtypes_of_outputs(call.x.dtype, None)
        given: dict[str, Any] = {}
        (m, n), made = call.x.shape, {}
        for of in ([], [put(array) for array in of_outputs]):
            told = memory, call.fused, arrays, options, "float32", dtypes, of
            arranged = _fused_calls.arranged(*told)
            assert arranged is not None
            given = {"in_x": arrays.x, "weight": arrays.weight, "bias": arrays.bias, **given}
            for name, array in inputs.items():
                for copy in arranged.copies[f"in_{name}"]:
                    array = copy(array)
                given[f"in_{name}"] = array
            given |= {f"dy_{k}": array for k, array in enumerate(of)}
            spec = arranged.spec
            of_rows = {one.name: one.gradient for one in spec.rows}
            new = {f"y_{k}": (m, n, dtype) for k, dtype in enumerate(dtypes)}
            new |= dict.fromkeys(("mean", "rstd"), (m, 1, "float32"))
            if of:
                new = {f"d_{name}": (m, n, of_rows[name]) for name in spec.differentiated.rows}
                new |= {f"d_{name}": (m, 1, "float32") for name in spec.differentiated.numbers}
                new |= {f"d_{name}": (1, n, dtype) for name, dtype in spec.sums_over_rows}
            made = {
                name: gpu.memory.empty((rows, columns), to_numpy(dtype))
                for name, (rows, columns, dtype) in new.items()
            }
            given |= made
            one = _fused_calls.pass_of(spec, n, 0)
            given["partials"] = gpu.memory.empty(max(1, one.scratch_bytes(m)), "u1")
            operands = (
                arranged.values[name] if name in arranged.values else given[name].ctypes.data
                for name in one.operands
            )
            one.prepared(m, call.fused.eps(options))(0, tuple(operands))
        assert [str(kernel) for kernel in gpu.launched] == by_calls
        for k, output in enumerate(outputs):
            np.testing.assert_array_equal(gpu.to_numpy(given[f"y_{k}"]), output)
        for name, array in made.items():
            expected = getattr(gradients, name.replace("_", "", 1))
            np.testing.assert_array_equal(gpu.to_numpy(array).reshape(expected.shape), expected)


@needs_compiler
def test_what_no_kernel_serves(gpu: Gpu) -> None:
    """Weights of groups and other axes are left to operations."""
    x, z = drawn(1, (2, 3, 8)), drawn(2, (2, 3, 8))
    check(gpu, Call(GATED, x, drawn(3, (3, 8)), None, {}, {"z": z}), by_kernels=False)
    check(gpu, Call(GATED, x, None, None, {"axis": 1}, {"z": z}), by_kernels=False)


# ---- layouts and text ----------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.integers(1, 300000),
    st.sampled_from(("float64", "float32", "bfloat16")),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
def test_layouts_hold_the_row(
    architecture: int, n: int, x: str, read: int, heavy_value: bool, heavy_epilogue: bool
) -> None:
    compute = "float64" if x == "float64" else "float32"
    of_arrays: Any = (x, compute, n, [x] * read, ["float32"])
    common: Any = {"vector": 1, "architecture": architecture}
    common |= {"heavy_value": heavy_value, "heavy_epilogue": heavy_epilogue}
    for config in (
        fused_forward(*of_arrays, **common),
        fused_backward(*of_arrays, kept=2, **common),
    ):
        blocks = config.blocks_per_multiprocessor
        assert blocks * config.block_threads <= ARCHITECTURES[architecture].threads
        if config.streams:
            continue
        threads = config.row_threads * config.cluster_blocks
        step = threads * config.pack_length
        assert step * config.packs_per_thread >= n
        if config.cluster_blocks == 1:  # see `end_of_row` in kernels/team.cuh
            assert step * (config.packs_per_thread - 1) < n
        assert config.full == (step * config.packs_per_thread == n)
        assert config.block_threads % config.row_threads == 0
        assert config.block_threads % 32 == 0
    nbytes = fused_backward_bytes(x, compute, [x] * read, config)
    assert nbytes <= shared_limit(architecture, blocks)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("x", ["float64", "float32", "bfloat16"])
def test_rows_of_a_few_packs_are_not_read_again(architecture: int, x: str) -> None:
    compute = "float64" if x == "float64" else "float32"
    packs = 256 if architecture > 75 else 128  # whose multiprocessors have less memory
    for read, heavy_value, heavy_epilogue in itertools.product(
        range(2, 6), (False, True), (False, True)
    ):
        for n in range(1, packs * 16 // ITEMSIZE[x] + 1, 37):
            config = fused_backward(
                *(x, compute, n, [x] * read, ["float32"]),
                kept=2,
                heavy_value=heavy_value,
                heavy_epilogue=heavy_epilogue,
                vector=1,
                architecture=architecture,
            )
            assert not config.streams


def spec_of(fused: cupynorm.Fused) -> Spec:
    inputs = tuple(Input(name, "rows", "float32", "float32") for name in fused.inputs)
    return Spec(
        fused.norm,
        fused.prologue,
        fused.epilogue,
        False,
        "float32",
        "float32",
        None,
        None,
        inputs,
        ("float32",) * fused.count,
    )


@pytest.mark.parametrize("n", [1000, 300000])
@pytest.mark.parametrize("architecture", ["75", "90", "120"])
def test_nvrtc_compiles_them(architecture: str, n: int) -> None:
    from test_compile import compiled

    of_weight = {"weight": "float32", "bias": "bfloat16"}
    for spec in (dataclasses.replace(spec_of(MANY), **of_weight), spec_of(GATED)):
        backward = dataclasses.replace(spec, of_outputs=("float32",) * len(spec.outputs))
        told = n, 4, int(architecture)
        forward_config = _fused_calls._forward_config(spec, *told)
        backward_config = _fused_calls._backward_config(backward, *told)
        reduction = reduction_of_gradients(1, "float32", n)
        kernels = fused_backward_instantiations(backward, backward_config, reduction)
        for kernel in (fused_forward_instantiation(spec, forward_config), *kernels):
            log = str(compiled((kernel,), architecture).logs)
            assert "registers" in log
            if n > 1000:
                assert " 0 bytes spill stores" in log


def test_steps_are_written_as_a_person_would() -> None:
    text = forward_op(spec_of(GATED)).text
    steps = ["const T v2 = sigmoid(v1);", "const T v3 = v1 * v2;", "const T v4 = v0 * v3;"]
    assert all(step in text for step in steps)
    backward = dataclasses.replace(spec_of(GATED), of_outputs=("float32",))
    text = backward_op(backward).text
    assert "sigmoid_of_pair(v1)" in text
    assert "sigmoid_of_negative(v1)" in text


def test_a_product_that_is_only_added_is_not_rounded() -> None:
    def steps(function: Any) -> str:
        return forward_op(spec_of(cupynorm.fuse("rms_norm", epilogue=function))).text

    assert "fused_multiply_add(v0, v1, v0)" in steps(lambda y, z: y + y * z)
    assert "fused_multiply_add(v0, v1, v0)" in steps(lambda y, z: y * z + y)
    assert "fused_multiply_add(-v0, v1, v0)" in steps(lambda y, z: y - y * z)
    assert "fused_multiply_add(v0, v1, -v0)" in steps(lambda y, z: y * z - y)
    assert "fused_multiply_add(v0, v0, -v3)" in steps(lambda y, z: y * y - z * z)
    twice = steps(lambda y, z: y * z + (y * z) * (y * z))
    assert "const T v2 = v0 * v1;" in twice
    assert "fused_multiply_add(v2, v2, v2)" in twice


def test_numbers_are_written_exactly() -> None:
    def function(x: Any) -> Any:
        return cm.where(x > np.inf, 0.1, -0.0) + x / 3 + x / 1e300 + np.nan

    text = forward_op(spec_of(cupynorm.fuse("rms_norm", prologue=function))).text
    for number in ("infinity<T>()", "T(0.1)", "T(-0.0)", "* T(0.3333333333333333)", "T(1e+300)"):
        assert number in text
    assert "not_a_number<T>()" in text


@pytest.mark.parametrize("name", ["int", "T", "row", "stride_in_x", "ß"])
def test_names_of_inputs_meet_no_names_of_the_kernel(gpu: Gpu, name: str) -> None:
    fused = cupynorm.fuse(
        "rms_norm",
        epilogue=function_of(("y", name), (lambda symbols: symbols["y"] * symbols[name],)),
    )
    if compiler_problem() is None:
        x = drawn(1, (3, 8))
        check(gpu, Call(fused, x, None, None, {}, {name: drawn(2, (3, 8))}))


def test_calls_are_remembered_by_all_that_they_depend_on(gpu: Gpu) -> None:
    fused = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y + z)
    x, z = drawn(1, (4, 16)), drawn(2, (4, 16))
    with gpu.fresh_memory(), on_host(gpu):
        put = gpu.memory.array
        for options in ({}, {"eps": 1e-3}, {"out_dtype": "float64"}, {"axis": (-1,)}):
            fused.forward(put(x), z=put(z), **options)
        fused.forward(put(x), z=put(z[:1]))
        fused.forward(put(x), z=1.5)
        assert len(fused.prepared) == 6
        odd = gpu.memory.array(np.zeros(4 * 16 + 1, np.float32))[1:].reshape(4, 16)
        for first, vector in ((odd, 1), (put(x), 4)):  # narrow accesses do not stay
            fused.forward(first, z=put(z), eps=0.5)
            assert ("kVector", vector) in gpu.launched[-1].layout


@needs_compiler
@pytest.mark.parametrize(
    "inputs",
    [
        {"r": drawn(1, (2, 3, 16)), "a": 2.0, "s": drawn(3, (16,)), "z": drawn(4, (3, 16))},
        {"r": drawn(1, (3, 1)), "a": 2, "s": drawn(3, (1,)), "z": drawn(4, (2, 3, 16))},
    ],
)
def test_second_calls_are_prepared(gpu: Gpu, inputs: dict[str, Any]) -> None:
    """Bools and inputs that are spread out are copied again, and that is all."""
    inputs = inputs | {"c": drawn(5, (2, 3, 16)) > 0}
    call = Call(MANY, drawn(6, (2, 3, 16)), drawn(7, (16,)), None, {"axis": -1}, inputs)
    with mock.patch.object(_fused_calls, "arranged", wraps=_fused_calls.arranged) as arranged:
        check(gpu, call)
    assert arranged.call_count == 2  # for a pass each


# ---- torch's autograd around stand-ins for the kernels -------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have CPU tensors take the way of kernels. Return the passes that were asked for."""
    torch: Any = pytest.importorskip("torch")
    from cupynorm.torch import _fuse as of_torch

    asked: list[str] = []

    def on_numpy(given: Any) -> Any:
        def convert(array: Any) -> Any:
            return array.detach().numpy() if isinstance(array, torch.Tensor) else array

        inputs = {name: convert(array) for name, array in given.inputs.items()}
        return (*map(convert, given[:3]), inputs)

    def forward(memory: Any, fused: Any, given: Any, options: Any, *_: Any, **__: Any) -> Any:
        asked.append("forward")
        x, weight, bias, inputs = on_numpy(given)
        found = fused.forward(x, weight, bias, **options._asdict(), **inputs)
        return tuple(map(torch.from_numpy, found.outputs)), None, torch.from_numpy(found.rstd)

    def backward(
        memory: Any, fused: Any, given: Any, options: Any, _: Any, __: Any, of: Any, *___: Any
    ) -> Any:
        asked.append("backward")
        x, weight, bias, inputs = on_numpy(given)
        kept = fused.forward(x, weight, bias, **options._asdict(), **inputs)
        dy = [None if one is None else one.numpy() for one in of]
        found = fused.backward(dy, kept)
        return tuple(one if one is None else torch.from_numpy(one) for one in found)

    monkeypatch.setattr(of_torch, "_have_kernels", lambda given: True)
    monkeypatch.setattr(_fused_calls, "again", lambda *_, **__: None)
    monkeypatch.setattr(_fused_calls, "forward", forward)
    monkeypatch.setattr(_fused_calls, "backward", backward)
    return asked


def tensors(*shapes: tuple[int, ...]) -> Any:
    torch: Any = pytest.importorskip("torch")
    return [
        torch.from_numpy(drawn(i, s, np.float64)).requires_grad_() for i, s in enumerate(shapes)
    ]


def test_autograd_calls_the_kernels_and_differentiates_their_gradients(
    stand_ins: list[str],
) -> None:
    torch: Any = pytest.importorskip("torch")
    x, z, weight = tensors((3, 8), (8,), (8,))

    def function(*given: Any) -> Any:
        return GATED(given[0], given[2], z=given[1])

    assert torch.autograd.gradcheck(function, (x, z, weight))
    assert set(stand_ins) == {"forward", "backward"}
    stand_ins.clear()
    assert torch.autograd.gradgradcheck(function, (x, z, weight))
    assert "backward" not in stand_ins  # but the formulas


def test_one_tensor_twice_and_an_output_without_a_gradient(stand_ins: list[str]) -> None:
    torch: Any = pytest.importorskip("torch")
    both = cupynorm.fuse("rms_norm", epilogue=lambda y, z: (y * z, z + 1))
    (x,) = tensors((3, 8))
    first, _ = both(x, z=x)
    (dx,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(both(x, z=x)[0].sum(), x)
    torch.testing.assert_close(dx, again)
    other = x.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad((cupynorm.torch.rms_norm(other) * other).sum(), other)
    torch.testing.assert_close(dx, expected)


def test_a_pass_without_a_kernel_is_left_to_operations(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(_fused_calls, "backward", lambda *_: None)
    x, z = tensors((3, 8), (3, 8))
    assert torch.autograd.gradcheck(lambda x, z: GATED(x, z=z), (x, z))
    monkeypatch.setattr(_fused_calls, "forward", lambda *_, **__: None)
    assert GATED(x, z=z).grad_fn.name() != "_ByKernelsBackward"
    with torch.no_grad(), pytest.raises(TypeError, match="or a torch tensor, as x is"):
        GATED(x, z=np.ones(8))


# ---- on a GPU ------------------------------------------------------------------------------------

GPU_SHAPES = {
    "heads": (40, 3, 128),
    "a row": (1, 1024),
    "several warps": (300, 5000),
    "many packs": (9, 16384),
    "a cluster": (5, 30000),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [GATED, MANY], ids=["gated", "many"])
@pytest.mark.parametrize("case", GPU_SHAPES)
def test_cupy_and_torch_on_a_gpu(case: str, fused: cupynorm.Fused) -> None:
    import cupy
    from device import to_cupy, to_numpy

    torch: Any = pytest.importorskip("torch")
    shape = GPU_SHAPES[case]
    n, column = shape[-1:], (*shape[:-1], 1)
    shapes = {"r": shape, "a": column, "s": n, "z": shape, "c": shape}
    inputs = {name: drawn(i, shapes[name]) for i, name in enumerate(fused.inputs)}
    call = Call(fused, drawn(7, shape), drawn(8, n), drawn(9, n), {}, inputs)
    of_outputs = [drawn(20 + i, shape) for i in range(fused.count)]
    forward = call.of(fused.forward, convert=to_cupy)
    found = fused.backward(list(map(to_cupy, of_outputs)), forward)
    outputs = tuple(map(to_numpy, forward.outputs))
    named = {"x": call.x, "weight": call.weight, "bias": call.bias}
    testing.check_fused(fused, outputs if fused.count > 1 else outputs[0], **named, **inputs)
    gradients = type(found)(*map(to_numpy, found))
    of_numpy = call.of(fused.forward)._replace(outputs=outputs)
    testing.check_fused_backward(fused, gradients, of_outputs, of_numpy)

    # The same kernels, on torch's tensors: the same bits.
    leaves = {name: torch.from_numpy(a).cuda().requires_grad_() for name, a in call.arrays.items()}
    x, weight, bias, *others = leaves.values()
    made = fused(x, weight, bias, **dict(zip(inputs, others, strict=True)))
    made = made if isinstance(made, tuple) else (made,)
    for one, array in zip(made, outputs, strict=True):
        np.testing.assert_array_equal(one.detach().cpu().numpy(), array)
    dy = [torch.from_numpy(of).cuda() for of in of_outputs]
    for one, other in zip(torch.autograd.grad(made, leaves.values(), dy), gradients, strict=True):
        np.testing.assert_array_equal(one.cpu().numpy(), other)
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
def test_a_graph_replays_them() -> None:
    import cupy

    x, z, weight = (cupy.asarray(drawn(i, s)) for i, s in enumerate(((50, 3, 64), (3, 1), (64,))))

    def both() -> Any:
        forward = GATED.forward(x, weight, z=z)  # z is copied, and its gradient summed
        return (forward.y, *(one for one in GATED.backward(x, forward) if one is not None))

    expected = [array.copy() for array in both()]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        both()
        stream.begin_capture()
        outputs = both()
        graph = stream.end_capture()
        for output in outputs:
            output.fill(float("nan"))
        scribbled = [cupy.full(10000, 1e30, "f4") for _ in range(20)]  # over memory that is free
        graph.launch()
        stream.synchronize()
    del scribbled
    for one, other in zip(outputs, expected, strict=True):
        cupy.testing.assert_array_equal(one, other)
