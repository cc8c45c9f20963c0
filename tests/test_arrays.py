from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Problem, make_values, problems

import cupynorm
from cupynorm import _arrays
from cupynorm._arrays import family_of, row_stride
from cupynorm.reference import Array, Norm

# ---- row_stride ----------------------------------------------------------------------------------


def addresses(shape: tuple[int, ...], strides: tuple[int, ...], k: int) -> Array:
    """Return the bytes from the first element to each element, row by row."""
    indices = np.indices(shape).reshape(len(shape), -1)
    row = int(np.prod(shape[len(shape) - k :]))
    return (np.array(strides) @ indices).reshape(-1, row)


def assert_row_stride(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    for k in range(1, len(shape) + 1):
        actual = addresses(shape, strides, k)
        rows, columns = np.indices(actual.shape)
        stride = row_stride(shape, strides, itemsize, k)
        if stride is not None:
            np.testing.assert_array_equal(actual, (rows * stride + columns) * itemsize)
            continue
        # Only the distance of the first two rows could be the stride.
        between = actual[1, 0] if len(actual) > 1 else 0
        as_if = rows * between + columns * itemsize
        assert between % itemsize or not np.array_equal(actual, as_if)


@st.composite
def views(draw: st.DrawFn) -> Array:
    """Draw a view that slicing, reversing, transposing, reshaping and broadcasting may make."""
    word = draw(st.sampled_from(["u2", "u4", "u8"]))
    array = np.zeros(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)), word)
    for step in draw(st.lists(st.sampled_from(["slice", "transpose", "expand"]), max_size=3)):
        if step == "slice":
            steps = st.sampled_from([1, 1, 1, 2, -1])
            starts = st.integers(0, 1)
            array = array[tuple(slice(draw(starts), None, draw(steps)) for _ in array.shape)]
        elif step == "transpose":
            array = array.transpose(draw(st.permutations(range(array.ndim))))
        else:
            axis = draw(st.integers(0, array.ndim))
            array = np.expand_dims(array, axis)
            shape = list(array.shape)
            shape[axis] = draw(st.integers(1, 3))
            array = np.broadcast_to(array, shape)
    assume(array.size)
    return array


@given(views())
@settings(max_examples=200)
def test_row_stride_of_views(array: Array) -> None:
    assert_row_stride(array.shape, array.strides, array.itemsize)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(-9, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 6]),
)
@settings(max_examples=200)
def test_row_stride_of_any_strides(axes: list[tuple[int, int]], unit: int) -> None:
    """Strides need not be whole elements: a field of a structured array has such strides."""
    shape, strides = (tuple(values) for values in zip(*axes, strict=True))
    assert_row_stride(shape, tuple(unit * s for s in strides), 2)
    assert_row_stride((*shape, 3), (*(unit * s for s in strides), 2), 2)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple),
    gap=st.integers(-3, 9),
    data=st.data(),
)
def test_row_stride_is_found_where_rows_are_equally_far(
    shape: tuple[int, ...], gap: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(shape)))
    leading = shape[: len(shape) - k]
    n = int(np.prod(shape[len(shape) - k :]))
    strides, step = [], 1
    for axis in reversed(range(len(shape))):
        if axis == len(shape) - k - 1:
            step += gap
        # NumPy, torch and CuPy each give an axis of one element another stride.
        strides.append(data.draw(st.integers(-99, 99)) if shape[axis] == 1 else step)
        step *= shape[axis]
    strides = [4 * s for s in reversed(strides)]
    found = row_stride(shape, strides, 4, k)
    assert found == n + gap or (int(np.prod(leading)) == 1 and found is not None)


# ---- arrays of each framework --------------------------------------------------------------------

FRAMEWORKS = ("numpy", "torch", "jax")
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _jax_on_the_cpu_with_float64(request: pytest.FixtureRequest) -> Any:
    """Without it, JAX has no float64. With a GPU, JAX would put arrays there."""
    if "jax" in request.node.name:
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            yield
    else:
        yield


def convert(framework: str, array: Array | None) -> Any:
    """Return the array in another framework. torch keeps its strides."""
    if framework == "numpy" or array is None:
        return array
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray(array)
    torch = pytest.importorskip("torch")
    if array.dtype != DTYPES["bfloat16"]:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def type_of(framework: str) -> type:
    if framework == "numpy":
        return np.ndarray
    module = pytest.importorskip(framework)
    return module.Tensor if framework == "torch" else module.Array


def dtype_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def address_of(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.data_ptr() if hasattr(array, "data_ptr") else array.unsafe_buffer_pointer()


def to_numpy(array: Any) -> Array:
    if dtype_of(array) == "bfloat16" and not isinstance(array, np.ndarray):
        if hasattr(array, "data_ptr"):
            torch = pytest.importorskip("torch")
            return array.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return np.asarray(array)


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


@each_framework
@each_dtype
def test_taking_an_array_copies_nothing(framework: str, dtype: str) -> None:
    values = make_values("normal", (3, 5), dtype, seed=0)
    theirs = convert(framework, values)
    taken = family_of("x", theirs).take("x", theirs)
    assert type(taken) is np.ndarray
    assert_same_bits(taken, values)
    assert address_of(taken) == address_of(theirs)
    if framework == "numpy":
        assert taken is theirs


VIEWS = {
    "columns": lambda x: x[:, 2:7],
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.T,
    "odd offset": lambda x: x[1:, 1:],
    "three axes": lambda x: x.reshape(2, 3, 8)[:, :, :4],
    "one row for all": lambda x: x[:1, :],
    "no rows": lambda x: x[:0],
}


@pytest.mark.parametrize("view", VIEWS)
@each_dtype
def test_a_torch_view_keeps_its_strides(dtype: str, view: str) -> None:
    values = make_values("normal", (6, 8), dtype, seed=0)
    theirs = VIEWS[view](convert("torch", values))
    if view == "one row for all":
        theirs = theirs.expand(6, 8)
    taken = family_of("x", theirs).take("x", theirs, output=True)
    if theirs.numel():
        assert address_of(taken) == theirs.data_ptr()
        assert taken.strides == tuple(taken.itemsize * s for s in theirs.stride())
    assert_same_bits(taken.copy(), to_numpy(theirs.contiguous()))


@each_framework
@each_dtype
@pytest.mark.parametrize("shape", [(3, 5), (5,), (), (0, 5)])
def test_results_are_given_in_the_framework(
    framework: str, dtype: str, shape: tuple[int, ...]
) -> None:
    anything = convert(framework, np.zeros(1, np.float32))
    family = family_of("x", anything)
    values = make_values("normal", (*shape, 1), dtype, seed=0)[..., 0]
    given = family.give(values)
    assert isinstance(given, type_of(framework))
    assert dtype_of(given) == dtype
    assert_same_bits(to_numpy(given), values)
    if values.size and framework != "jax":  # XLA copies arrays that are not aligned to 64 bytes
        assert address_of(given) == address_of(values)


@each_framework
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@settings(max_examples=20)
@given(data=st.data())
def test_a_framework_computes_the_same_bits(
    framework: str, norm: Norm, data: st.DataObject
) -> None:
    problem: Problem = data.draw(problems(norms=(norm,)))
    arrays = {name: getattr(problem, name) for name in ("dy", "x", "weight", "bias")}
    theirs = {name: convert(framework, array) for name, array in arrays.items()}
    results = []
    for dy, x, weight, bias in (arrays.values(), theirs.values()):
        options: dict[str, Any] = {"axis": problem.axis, "zero_centered": problem.zero_centered}
        more = problem.forward_options
        forward = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, **more)
        y = getattr(cupynorm, norm)(x, weight, bias, **more)
        wanted = problem.wants_dbias if bias is None else bias
        statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
        backward = getattr(cupynorm, f"{norm}_backward")(
            dy, x, weight, *statistics, bias=wanted, bitmask=forward.bitmask, **options
        )
        results.append((*forward, y, *backward))
    for expected, actual in zip(*results, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert isinstance(actual, type_of(framework))
            assert_same_bits(to_numpy(actual), expected)


@each_framework
@pytest.mark.parametrize("shape", [(3, 5), (16,), (2, 0), (0, 9), (2, 3, 17)])
def test_bits_are_packed_and_unpacked_in_a_framework(
    framework: str, shape: tuple[int, ...]
) -> None:
    mask = np.random.default_rng(0).random(shape) < 0.5
    packed = cupynorm.pack_bitmask(convert(framework, mask))
    assert isinstance(packed, type_of(framework))
    assert_same_bits(to_numpy(packed), np.packbits(mask, axis=-1, bitorder="little"))
    unpacked = cupynorm.unpack_bitmask(packed, shape[-1])
    assert isinstance(unpacked, type_of(framework))
    assert_same_bits(to_numpy(unpacked), mask)


@each_framework
def test_up_to_64_axes(framework: str) -> None:
    x = make_values("normal", (6, 9), "float32", seed=0)
    shape = (2, *(1,) * 61, 3, 9)
    weight, fewer, more = (convert(framework, a) for a in (x[0], x, x.reshape(shape)))
    results = []
    for x in (fewer, more):
        forward = cupynorm.layer_norm_forward(x, relu=(-0.5, 0.5))
        statistics = {name: getattr(forward, name) for name in ("mean", "rstd", "bitmask")}
        backward = cupynorm.layer_norm_backward(x, x, weight, **statistics)
        mask = cupynorm.unpack_bitmask(forward.bitmask, 9)
        fields = [field for field in (*forward, *backward) if field is not None]
        results.append((*fields, mask, cupynorm.pack_bitmask(mask)))
    for expected, actual in zip(*results, strict=True):
        assert actual.ndim in (1, 63, 64)
        assert_same_bits(to_numpy(actual).reshape(expected.shape), to_numpy(expected))


def test_views_are_packed_and_unpacked_as_their_copies() -> None:
    mask = np.random.default_rng(0).random((40, 24)) < 0.5
    for name, view in VIEWS.items():
        if name != "three axes":
            expected = np.packbits(view(mask), axis=-1, bitorder="little")
            assert_same_bits(cupynorm.pack_bitmask(view(mask)), expected)
            assert_same_bits(
                to_numpy(cupynorm.pack_bitmask(view(convert("torch", mask)))), expected
            )
    packed = np.packbits(mask, axis=-1, bitorder="little")
    assert_same_bits(cupynorm.unpack_bitmask(packed.repeat(2, axis=1)[:, ::2], 24), mask)


def test_a_dtype_that_jax_has_not_enabled() -> None:
    jax = pytest.importorskip("jax")
    # The fixture turned float64 on. By default JAX has it off.
    wide = jax.numpy.ones(4, "float64")
    with jax.enable_x64(False):
        x = jax.numpy.ones((2, 4), "float32")
        with pytest.raises(TypeError, match=r"out_dtype must be .*, got float64 without x64"):
            cupynorm.rms_norm(x, out_dtype="float64")
        with pytest.raises(TypeError, match=r"weight\.dtype must be .*, got float64 without x64"):
            cupynorm.rms_norm(x, wide)
        with pytest.raises(TypeError, match=r"dx_dtype must be .*, got float64 without x64"):
            cupynorm.rms_norm_backward(x, x, None, x[:, 0], dx_dtype="float64")
        assert cupynorm.rms_norm(x, out_dtype="float16").dtype == np.float16


DEVICES = """
import jax, numpy as np, cupynorm
first, second = jax.devices("cpu")
jax.config.update("jax_default_device", first)  # there may be a GPU
ones = lambda device, *shape, dtype="float32": jax.device_put(np.ones(shape, dtype), device)

for dtype in ("float32", "bfloat16"):
    x, weight = ones(second, 2, 8, dtype=dtype), ones(second, 8, dtype=dtype)
    forward = cupynorm.layer_norm_forward(x, weight, weight, relu=(0, 1))
    backward = cupynorm.layer_norm_backward(
        x, x, weight, forward.mean, forward.rstd, bitmask=forward.bitmask
    )
    mask = cupynorm.unpack_bitmask(forward.bitmask, 8)
    fields = [field for field in (*forward, *backward) if field is not None]
    for array in (*fields, mask, cupynorm.pack_bitmask(mask)):
        assert array.device == second, array.device

weight = jax.numpy.ones(8)  # on the first, but committed to none
assert cupynorm.rms_norm(x, weight).device == second

rstd = forward.rstd
for name, call in {
    "weight": lambda: cupynorm.rms_norm(x, ones(first, 8)),
    "bias": lambda: cupynorm.rms_norm(x, None, ones(first, 8)),
    "dy": lambda: cupynorm.rms_norm_backward(ones(first, 2, 8), x, None, rstd),
    "rstd": lambda: cupynorm.rms_norm_backward(x, x, None, ones(first, 2)),
    "bitmask": lambda: cupynorm.rms_norm_backward(
        x, x, None, rstd, bitmask=ones(first, 2, 1, dtype="uint8")
    ),
}.items():
    try:
        call()
    except ValueError as error:
        assert str(error) == f"{name} must be on x's device, cpu:1; got cpu:0", error
    else:
        raise AssertionError(name)
"""


def test_jax_arrays_stay_on_their_cpu_device() -> None:
    pytest.importorskip("jax")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# ---- outputs and gradients in torch --------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_torch_outputs_are_written_in_place_and_returned(norm: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = make_values("normal", (2, 3, 5), dtype, seed=0)
    x, weight = convert("torch", values), convert("torch", values[0, 0])
    # A slice of a wider tensor. The other columns must stay as they are.
    wide = torch.full((2, 3, 9), 7.0, dtype=x.dtype)
    out = wide[..., 2:7]
    before = out.data_ptr()
    forward = getattr(cupynorm, f"{norm}_forward")(x, weight, out=out)
    expected = getattr(cupynorm, norm)(x, weight)
    assert forward.y is out
    assert out.data_ptr() == before
    assert torch.equal(out, expected)
    assert torch.all(wide[..., :2] == 7)
    assert torch.all(wide[..., 7:] == 7)
    assert getattr(cupynorm, norm)(x, weight, out=out) is out

    statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
    backward = getattr(cupynorm, f"{norm}_backward")
    dy = torch.ones_like(x)
    expected = backward(dy, x, weight, *statistics).dx
    assert backward(dy, x, weight, *statistics, dx=dy).dx is dy
    assert torch.equal(dy, expected)


@each_dtype
def test_a_torch_weight_keeps_a_sum_of_its_gradients(dtype: str) -> None:
    """As Megatron's main_grad: a slice of one buffer, to which a function of autograd adds."""
    torch = pytest.importorskip("torch")
    x = convert("torch", make_values("normal", (2, 3, 5), dtype, seed=0))
    weight = torch.nn.Parameter(torch.ones(3, 1, dtype=x.dtype))
    buffer = torch.full((11,), 7.0, dtype=x.dtype)
    main_grad = buffer[3:6].view(3, 1)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            made = cupynorm.rms_norm_forward(x, weight.detach(), axis=1)
            ctx.save_for_backward(x, weight, made.rstd)
            return made.y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight, rstd = ctx.saved_tensors
            into = {"dweight": main_grad, "accumulate": True}
            made = cupynorm.rms_norm_backward(dy, x, weight.detach(), rstd, axis=1, **into)
            assert made.dweight is main_grad
            return made.dx, None

    expected, version = main_grad.clone(), main_grad._version
    for dy in (torch.ones_like(x), x):
        Norm.apply(x.clone().requires_grad_(), weight).backward(dy)
        leaf = weight.detach().clone().requires_grad_()
        cupynorm.torch.rms_norm(x, leaf, axis=1).backward(dy)
        expected += leaf.grad
    assert weight.grad is None
    assert main_grad._version > version
    assert (buffer[:3] == 7).all()
    assert (buffer[6:] == 7).all()
    tolerance = 4 * torch.finfo(x.dtype).eps  # a gradient was rounded before it was added
    torch.testing.assert_close(main_grad, expected, rtol=tolerance, atol=0)


@each_dtype
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_pinned_tensors_are_on_the_cpu(
    norm: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    x, dy = (convert("torch", make_values("normal", (3, 5), dtype, seed)) for seed in (1, 2))
    weight, out, dx = x[0].clone(), torch.empty_like(x), torch.empty_like(x)

    def both(**outputs: Any) -> Any:
        forward = getattr(cupynorm, f"{norm}_forward")(
            x, weight, relu=(-1, 1), out=outputs.get("out")
        )
        statistics = [s for s in (forward.mean, forward.rstd) if s is not None]
        backward = getattr(cupynorm, f"{norm}_backward")(
            dy, x, weight, *statistics, bias=weight, bitmask=forward.bitmask, dx=outputs.get("dx")
        )
        mask = cupynorm.unpack_bitmask(forward.bitmask, 5)
        return (*forward, *backward, mask, cupynorm.pack_bitmask(mask))

    expected = both()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)  # pinning takes a GPU
    assert x.__dlpack_device__()[0] == 3
    actual = both(out=out, dx=dx)
    assert any(result is out for result in actual)
    assert any(result is dx for result in actual)
    monkeypatch.undo()
    for one, other in zip(actual, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_torch_out_may_have_another_dtype() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0).reshape(3, 4)
    out = torch.empty(3, 4, dtype=torch.bfloat16)
    assert cupynorm.rms_norm(x, out=out) is out
    assert torch.equal(out, cupynorm.rms_norm(x, out_dtype=torch.bfloat16))


@each_dtype
@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
def test_a_tensor_that_requires_grad_is_refused(name: str, dtype: str) -> None:
    """Its gradient would be lost without an error."""
    torch = pytest.importorskip("torch")
    shapes = {"x": (3, 4), "weight": (4,), "bias": (4,), "out": (3, 4)}
    arrays = {n: torch.ones(shape, dtype=getattr(torch, dtype)) for n, shape in shapes.items()}
    arrays[name].requires_grad_()
    with pytest.raises((TypeError, ValueError, BufferError), match=r"requires? grad|detach"):
        cupynorm.layer_norm(**arrays)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
def test_a_tensor_with_a_tangent_is_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(TypeError, match=r"weight has a tangent, .* pass weight\.detach\(\)"):
            cupynorm.rms_norm(x, dual[0])
        assert torch.equal(cupynorm.rms_norm(dual.detach()), cupynorm.rms_norm(x))


@pytest.mark.parametrize("saved", ["x", "dy"])
def test_autograd_knows_of_what_was_written(saved: str) -> None:
    torch = pytest.importorskip("torch")
    factor = torch.ones(3, 4, requires_grad=True)
    array = torch.arange(12.0).reshape(3, 4)
    product = factor * array
    if saved == "x":
        cupynorm.rms_norm(array, out=array)
    else:
        x = torch.ones(3, 4)
        rstd = cupynorm.rms_norm_forward(x).rstd
        cupynorm.rms_norm_backward(array, x, None, rstd, dx=array)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@each_dtype
def test_a_tensor_that_negates_what_lies_in_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(1.0, 13, dtype=getattr(torch, dtype)).reshape(3, 4)
    negated = torch._neg_view(values)
    assert torch.equal(cupynorm.layer_norm(negated), cupynorm.layer_norm(-values))
    assert torch.equal(cupynorm.rms_norm(values, negated[0]), cupynorm.rms_norm(values, -values[0]))
    with pytest.raises(TypeError, match="out must not be a view that negates"):
        cupynorm.rms_norm(values, out=negated)
    assert torch.equal(values[0], torch.arange(1.0, 5, dtype=values.dtype))


@each_dtype
def test_a_tensor_of_zeros_without_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bias = torch.arange(1.0, 5, dtype=getattr(torch, dtype))
    zeros = torch._efficientzerotensor((3, 4), dtype=bias.dtype)
    for x in (zeros, torch._neg_view(zeros)):
        assert torch.equal(cupynorm.layer_norm(x, bias=bias), bias.expand(3, 4))
    assert not cupynorm.rms_norm(bias, zeros[0]).any()
    with pytest.raises(TypeError, match=r"out must be readable in place .*: it has no memory"):
        cupynorm.rms_norm(torch.ones(3, 4, dtype=bias.dtype), out=zeros)


@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_a_tensor_whose_memory_was_freed_is_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = {"x": torch.ones(2, 4), "weight": torch.ones(4), "out": torch.ones(2, 4)}
    arrays[name].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=rf"{name} must be readable in place .*: it has no memory"):
        cupynorm.rms_norm(**arrays)


def test_a_tensor_that_outlived_its_transform_is_refused() -> None:
    torch = pytest.importorskip("torch")
    kept: list[Any] = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(torch.ones(2, 4))
    with pytest.raises(TypeError, match="x must be a plain tensor, got one of a transform"):
        cupynorm.rms_norm(kept[0])


# ---- families ------------------------------------------------------------------------------------


@pytest.mark.parametrize("subclass", ["torch's", "the caller's"])
def test_a_subclass_belongs_to_its_framework(subclass: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 4)

    class Own(torch.Tensor):
        pass

    own = x.as_subclass(Own)
    if subclass == "torch's":
        own = torch.nn.Parameter(x, requires_grad=False)
    assert torch.equal(cupynorm.rms_norm(x, own[0], eps=0), x)
    assert torch.equal(cupynorm.rms_norm(own, x[0], eps=0), x)


def test_a_memory_map_is_a_numpy_array() -> None:
    x = np.ones((2, 4), np.float32).view(np.memmap)
    assert np.all(cupynorm.rms_norm(x, np.ones(4, np.float32), eps=0) == 1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int32", "complex64", "bool"])
def test_a_tensor_of_another_dtype_is_a_type_error(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"x.* must be .*float64, float32, float16 or bfloat16"):
        cupynorm.rms_norm(torch.ones(2, 4).to(getattr(torch, dtype)))


@pytest.mark.parametrize("where", ["meta", "sparse"])
def test_a_tensor_without_memory_is_named(where: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 4)
    x = x.to("meta") if where == "meta" else x.to_sparse()
    with pytest.raises((TypeError, ValueError), match="x must"):
        cupynorm.rms_norm(x)


@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_a_tensor_of_other_memory_is_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses import FakeTensorMode

    arrays = {"x": torch.ones(2, 4), "weight": torch.ones(4), "out": torch.ones(2, 4)}
    fake = FakeTensorMode().from_tensor(arrays[name])  # its memory may be anything, as a DTensor's
    with pytest.raises(TypeError, match=f"{name} must be a plain tensor, got a FakeTensor"):
        cupynorm.rms_norm(**arrays | {name: fake})


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    "how", ["functionalize", "vmap", "grad", "make_fx", "pre_dispatch", "trace", "compile"]
)
def test_a_tensor_that_stands_for_others_is_refused(how: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(2, 4)
    transform = {
        "functionalize": torch.func.functionalize,
        "vmap": torch.func.vmap,
        "grad": torch.func.grad,
        "make_fx": make_fx,
        "pre_dispatch": lambda function: make_fx(function, pre_dispatch=True),
        "trace": lambda function: torch.jit.trace(function, x),
        "compile": torch.compile,
    }[how]
    with pytest.raises(TypeError, match=r"x must be a plain tensor, got one .* cupynorm\.torch"):
        transform(lambda x: cupynorm.rms_norm(x * 1).sum())(x)
    assert torch.isfinite(cupynorm.rms_norm(x)).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.nested.as_nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])
    with pytest.raises(TypeError, match="x must be a plain tensor, got a nested one"):
        cupynorm.rms_norm(x)


def test_tensors_beside_a_transform_or_a_compiler_are_as_others() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.randn(2, 4), torch.randn(2, 4)
    expected = cupynorm.rms_norm(weight)
    found = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(cupynorm.rms_norm(weight))
        return graph.forward

    def scaled(x: Any) -> Any:
        found.append(cupynorm.rms_norm(weight))
        return (x * found[-1]).sum()

    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert torch.equal(torch.func.grad(scaled)(x), expected)
    torch.func.vmap(scaled)(x[None])
    assert len(found) == 3
    assert all(torch.equal(y, expected) for y in found)


def test_jax_arrays_given_back_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # Work that is pending when the process ends may keep JAX's client from ending.
    jax = pytest.importorskip("jax")
    taken = []

    def from_dlpack(array: Any, **options: Any) -> Any:
        given = SimpleNamespace(block_until_ready=lambda: taken.append(array.dtype))
        return SimpleNamespace(view=lambda dtype: given) if array.dtype == np.int16 else given

    x = jax.numpy.ones((2, 4), "float32"), jax.numpy.ones((2, 4), "bfloat16")
    monkeypatch.setattr(jax.numpy, "from_dlpack", from_dlpack)
    for array in x:
        cupynorm.rms_norm(array)
    assert len(taken) == len(x)


def test_a_result_is_handed_over_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    current = ["another"]

    @contextlib.contextmanager
    def device() -> Iterator[None]:
        current.append("the result's")
        yield
        current.pop()

    seen: list[str] = []
    monkeypatch.setattr(torch, "from_dlpack", lambda array: seen.append(current[-1]))
    x = torch.ones(2)
    family = _arrays.family_of("x", x)
    family.give(SimpleNamespace(device=device()))
    family.give_back(x, SimpleNamespace(device=device()))
    assert seen == ["the result's"] * 2


def test_a_traced_array_is_a_type_error() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"x must be .*Tracer"):
        jax.jit(cupynorm.rms_norm)(jax.numpy.ones((2, 4)))


def foreign_array(monkeypatch: pytest.MonkeyPatch, device_type: int) -> Any:
    """Return an array of a made-up framework, on a device of a DLPack type."""

    class Foreign:
        dtype = "float32"

        def __dlpack__(self, **options: Any) -> None:
            raise AssertionError("must not be exported")

        def __dlpack_device__(self) -> tuple[int, int]:
            return device_type, 3

    Foreign.__module__ = "foreign.arrays"
    framework = ModuleType("foreign")
    framework.from_dlpack = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "foreign", framework)
    monkeypatch.setattr(_arrays, "_families", {})
    return Foreign()


def test_other_devices_are_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    array = foreign_array(monkeypatch, 10)
    with pytest.raises(TypeError, match=r"x must be on the CPU or on a CUDA GPU.*type 10"):
        cupynorm.rms_norm(array)


@pytest.mark.parametrize("device_type", [2, 13])
def test_a_gpu_array_without_cupy_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, device_type: int
) -> None:
    array = foreign_array(monkeypatch, device_type)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"x is on GPU 3.*cupynorm\[cuda12\].*cupynorm\[cuda13\]"):
        cupynorm.rms_norm(array)


def test_a_gpu_array_beside_a_kernel_cache_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = foreign_array(monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "cupy", raising=False)
        patch.setattr("builtins.__import__", mock.Mock(side_effect=FileExistsError("a file")))
        with pytest.raises(ImportError, match=r"x is on GPU 3, .* a file; set CUPY_CACHE_DIR to"):
            cupynorm.rms_norm(array)


def test_a_framework_without_from_dlpack_is_a_type_error(monkeypatch: pytest.MonkeyPatch) -> None:
    array = foreign_array(monkeypatch, 1)
    monkeypatch.delattr(sys.modules["foreign"], "from_dlpack")
    with pytest.raises(TypeError, match=r"x must be .*got foreign\."):
        cupynorm.rms_norm(array)
