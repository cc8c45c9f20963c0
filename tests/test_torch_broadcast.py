"""cupynorm.torch with weights that broadcast over x, and over any axes of it; GroupNorm.

Nothing here needs a GPU.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
# ruff: noqa: E402 - what follows needs torch

import torch.nn.functional as F
import torch_plans
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch_checks import FAST, NORMS, assert_same_bits, to_numpy

import cupynorm.torch
from cupynorm import NormBackward, testing
from cupynorm._groups import Groups
from cupynorm.torch import GroupNorm, LayerNorm, layer_norm, rms_norm

CONTEXTS = [torch.enable_grad, torch_plans.in_place_of_kernels]
RELU = (-0.5, 0.7)

# x's shape, weight's, bias's and the axes.
CASES = {
    "AdaLN": ((2, 3, 8), (2, 1, 8), (2, 1, 8), None),
    "heads": ((2, 3, 4, 8), (4, 8), (4, 8), -1),
    "heads without a bias": ((2, 3, 4, 8), (4, 8), None, -1),
    "a bias for each example": ((2, 3, 8), None, (2, 1, 8), None),
    "a weight for all and a bias for each": ((2, 3, 8), (8,), (2, 1, 8), None),
    "channels first": ((2, 6, 3, 4), (6, 1, 1), (6, 1, 1), 1),
    "channels": ((2, 6, 3, 4), (6, 1, 1), (6, 1, 1), (1, 2, 3)),
    "groups of channels": ((2, 3, 2, 5), (3, 2, 1), (3, 2, 1), (-2, -1)),
    "the first axis and the last": ((3, 2, 4), (3, 1, 4), (4,), (0, 2)),
    "one number": ((3, 8), (1,), (1,), None),
    "one number without axes": ((3, 8), (), (8,), None),
    "the last of two axes": ((2, 3, 4), (4,), (1, 4), (1, 2)),
    "apart": ((2, 3, 4, 8), (2, 1, 4, 8), (8,), None),
}


@pytest.fixture(autouse=True)
def compile_anew() -> None:
    """Let no test find what others compiled: dynamo compiles one function only so many times."""
    torch._dynamo.reset()


def drawn(shape: Any, seed: int = 0, dtype: Any = torch.float64) -> Any:
    if shape is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(name: str, dtype: Any = torch.float64) -> tuple[list[Any], Any]:
    """Return x, weight and bias of a case, those that there are, and the norm of them."""
    *shapes, axis = CASES[name]
    arrays = [drawn(shape, i, dtype) for i, shape in enumerate(shapes)]
    present = [array is not None for array in arrays]

    def call(norm: Any, *given: Any, **options: Any) -> Any:
        left = iter(given)
        x, *vectors = (next(left) if there else None for there in present)
        return norm(x, *vectors, axis=axis, **options)

    return [array for array in arrays if array is not None], call


def formula(norm: str) -> Any:
    """Return the norm with a clamped ReLU, by torch's own operations."""

    def of(x: Any, weight: Any, bias: Any, axis: Any) -> Any:
        axes = -1 if axis is None else axis
        d = x - x.mean(axes, keepdim=True) if norm == "layer_norm" else x
        eps = 1e-5 if norm == "layer_norm" else 1e-6
        y = d * (d.square().mean(axes, keepdim=True) + eps).rsqrt()
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).clamp(*RELU)

    return of


def ours(norm: str) -> Any:
    return lambda *a, axis: getattr(cupynorm.torch, norm)(*a, axis=axis, relu=RELU)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# ---- values --------------------------------------------------------------------------------------


@st.composite
def shapes_and_axes(draw: st.DrawFn) -> tuple[Any, ...]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axes = draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))

    def vector() -> Any:
        if draw(st.integers(0, 5)) == 0:
            return None
        sizes = [n if draw(st.booleans()) else 1 for n in shape]
        leading = next((i for i, n in enumerate(sizes) if n != 1), len(sizes))
        return tuple(sizes[draw(st.integers(0, leading)) :])

    signed = tuple(a - len(shape) if draw(st.booleans()) else a for a in axes)
    return shape, vector(), vector(), signed


@pytest.mark.parametrize("context", CONTEXTS)
@given(
    shapes_and_axes(),
    st.sampled_from(NORMS),
    st.tuples(*[st.sampled_from(list(DTYPES))] * 3),
    st.booleans(),
    st.integers(0, 9),
)
def test_values(
    context: Any, shapes: Any, norm: str, dtypes: Any, zero_centered: bool, seed: int
) -> None:
    *shapes, axis = shapes
    zero_centered = zero_centered and shapes[1] is not None
    of_each = [getattr(torch, name) for name in dtypes]
    tensors = [drawn(s, seed + i, d) for i, (s, d) in enumerate(zip(shapes, of_each, strict=True))]
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor is not None]
    options: dict[str, Any] = {"eps": 1e-5, "axis": axis, "zero_centered": zero_centered}
    dy = drawn(shapes[0], seed + 3, of_each[0])
    with context():
        y = getattr(cupynorm.torch, norm)(*tensors, **options)
        found = iter(torch.autograd.grad(y, leaves, dy))
    x, weight, bias = map(to_numpy, tensors)
    testing.check_forward(norm, to_numpy(y), x, weight, bias, **options)
    kept = getattr(cupynorm, f"{norm}_forward")(x, weight, bias, **options)
    gradients = [None if tensor is None else to_numpy(next(found)) for tensor in tensors]
    testing.check_backward(
        norm,
        NormBackward(*gradients),
        to_numpy(dy),
        *(x, weight, kept.mean, kept.rstd),
        bias=False if bias is None else bias,
        axis=axis,
        zero_centered=zero_centered,
    )


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_residual_over_any_axis(norm: str, context: Any) -> None:
    shape = 2, 6, 3
    x, residual, weight = drawn(shape), drawn(shape, 1), drawn((6, 1), 2)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    dy, ds = drawn(shape, 3), drawn(shape, 4)
    with context():
        results = getattr(cupynorm.torch, norm)(x, weight, axis=1, residual=residual)
        found = torch.autograd.grad(results, leaves, (dy, ds))
    total = x + residual
    assert_same_bits(results[1], total)
    y = getattr(cupynorm.torch, norm)(total.mT, weight[:, 0]).mT
    assert_close(results[0], y)
    assert_close(found, torch.autograd.grad((y, total), leaves, (dy, ds)))


@pytest.mark.parametrize("norm", NORMS)
def test_expanded_weights_have_the_values_of_torchs_norm(norm: str) -> None:
    x, weight, bias = drawn((2, 3, 8)), drawn((2, 1, 8), 1), drawn((2, 1, 8), 2)
    mine = getattr(cupynorm.torch, norm)(x, weight, bias, eps=1e-5)
    for i in range(2):
        theirs = getattr(F, norm)(x[i], (8,), weight[i, 0], eps=1e-5) + bias[i, 0]
        assert_close(mine[i], theirs)


# ---- what is launched ----------------------------------------------------------------------------


def made(*arguments: Any, **options: Any) -> Any:
    """Return the plans of a step of layer_norm."""
    leaves = [t.requires_grad_() for t in arguments if t is not None]
    with torch_plans.in_place_of_kernels() as plans:
        y = layer_norm(*arguments, **options)
        torch.autograd.grad(y.sum(), leaves)
    return plans


def test_kernels_get_the_groups_of_rows() -> None:
    x, n = torch.randn(2, 3, 4, 8), 8
    for weight, outer, vectors, inner in (
        (torch.ones(2, 1, 1, n), 1, 2, 12),
        (torch.ones(3, 1, n), 2, 3, 4),
        (torch.ones(4, n), 6, 4, 1),
        (torch.ones(3, 4, n), 2, 12, 1),
    ):
        plans = made(x, weight, weight.clone())
        expected = Groups(outer, vectors, inner, 1, weight=True, bias=True)
        assert [plan.groups for plan in plans.made] == [expected] * 2
        assert [launch["m"] for launch in plans.launches] == [24, 24]
        assert plans.launches[0]["weight"] == weight.data_ptr()  # not copied
    for shape in ((n,), (1, n), (1, 1, 1, n)):
        plans = made(x, torch.ones(shape), torch.ones(shape))
        assert [plan.groups for plan in plans.made] == [None, None]


def test_rows_over_an_axis_that_is_last_in_memory_are_launched_where_they_lie() -> None:
    x, weight = torch.randn(2, 3, 4, 6).permute(0, 3, 1, 2), torch.ones(6, 1, 1)
    assert made(x, weight, axis=1).launches[0]["x"] == x.data_ptr()
    x = x.detach().contiguous()
    assert made(x, weight.detach(), axis=1).launches[0]["x"] != x.data_ptr()


def test_a_call_that_repeats_is_not_arranged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynorm.torch import _functions

    x, weight = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    layer_norm(x, weight)
    monkeypatch.setattr(_functions, "alike", None)
    layer_norm(x, weight)


@pytest.mark.parametrize("context", CONTEXTS)
def test_vectors_of_as_many_axes_as_a_row_that_repeat_in_another_way(context: Any) -> None:
    x, weight, one = drawn((2, 3, 8)), drawn((8,), 1), drawn((1,), 2).requires_grad_()
    with context():
        y = layer_norm(x, weight, one)
        (dbias,) = torch.autograd.grad(y.sum(), one)
        alone = layer_norm(x, None, one)
        norm = LayerNorm((3, 8), dtype=torch.float64)
        norm.weight = torch.nn.Parameter(drawn((1, 8), 3))
        of_rows = norm(x)
    assert_close(y.detach(), F.layer_norm(x, (8,), weight) + one.detach())
    assert_close(dbias, torch.full((1,), 48.0, dtype=torch.float64))
    assert_close(alone.detach(), F.layer_norm(x, (8,)) + one.detach())
    assert_close(of_rows.detach(), F.layer_norm(x, (3, 8)) * norm.weight.detach())


# ---- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_first_and_second_order(norm: str, case: str) -> None:
    arrays, call = operands(case)
    leaves = [array.requires_grad_() for array in arrays]

    def function(*given: Any) -> Any:
        return call(ours(norm), *given)

    assert gradcheck(function, leaves, check_forward_ad=True, nondet_tol=0.0)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=FAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_narrow_weights_are_summed_before_they_are_rounded(dtype: Any) -> None:
    x, weight, bias = (
        drawn((64, 2, 8), 0, dtype),
        drawn((8,), 1, dtype),
        drawn((64, 1, 8), 2, dtype),
    )
    leaves = [weight.requires_grad_(), bias.requires_grad_()]
    dweight, _ = torch.autograd.grad(layer_norm(x, weight, bias).sum(), leaves)
    sums = F.layer_norm(x.double(), (8,)).sum((0, 1))
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(dweight.double(), sums, rtol=rounding, atol=1e-4)


TRANSFORMS = {
    "vmap": lambda f, count: vmap(f, (0, *(None,) * (count - 1))),
    "vmap over vectors": lambda f, count: vmap(f, (None, *(-1,) * (count - 1))),
    "gradients of each example": lambda f, count: vmap(
        grad(lambda *a: f(*a).pow(3).sum(), tuple(range(count))), (0, *(None,) * (count - 1))
    ),
    "gradients of each model": lambda f, count: vmap(
        grad(lambda *a: f(*a).pow(3).sum(), tuple(range(count))), (0, *(-1,) * (count - 1))
    ),
    "gradients of vectors through vmap": lambda f, count: grad(
        lambda *a: vmap(f, (0, *(-1,) * (count - 1)))(*a).pow(3).sum(), tuple(range(count))
    ),
    "second derivatives of each example": lambda f, count: vmap(
        jacrev(grad(lambda *a: f(*a).pow(3).sum(), count - 1), 0), (0, *(None,) * (count - 1))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", NORMS)
def test_transforms(norm: str, case: str, transform: str) -> None:
    arrays, call = operands(case)
    over = TRANSFORMS[transform]
    if transform != "vmap over vectors":
        arrays[0] = drawn((3, *arrays[0].shape))
    if "vectors" in transform or "model" in transform:
        arrays[1:] = [drawn((3, *a.shape), i).movedim(0, -1) for i, a in enumerate(arrays[1:])]
    actual, expected = (
        over(lambda *a, by=by: call(by, *a), len(arrays))(*arrays)
        for by in (ours(norm), formula(norm))
    )
    assert_close(actual, expected)


def test_the_gradients_of_each_example_are_of_one_launch() -> None:
    x, weight, bias = torch.randn(5, 3, 4, 8), torch.randn(8), torch.randn(8)

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        return layer_norm(x, weight, bias).pow(3).sum()

    with torch_plans.in_place_of_kernels() as plans:
        found = vmap(grad(loss, (1, 2)), (0, None, None))(x, weight, bias)
    assert [plan.groups for plan in plans.made] == [
        None,
        Groups(1, 5, 12, 1, weight=True, bias=True),
    ]
    assert [launch["m"] for launch in plans.launches] == [60, 60]
    for i, example in enumerate(x):
        for one, other in zip(found, grad(loss, (1, 2))(example, weight, bias), strict=True):
            torch.testing.assert_close(one[i], other)


def test_gradients_that_autograd_batches() -> None:
    arrays, call = operands("heads")
    leaves = [array.requires_grad_() for array in arrays]
    y = call(ours("layer_norm"), *leaves)
    dy = drawn((4, *y.shape), 9)
    found = torch.autograd.grad(y, leaves, dy, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(dy):
        expected = torch.autograd.grad(y, leaves, one, retain_graph=True)
        assert_close([gradient[i] for gradient in found], list(expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    arrays, call = operands("AdaLN")
    leaves = [array.requires_grad_() for array in arrays]
    kept = call(ours("layer_norm"), *leaves)
    again = checkpoint(lambda *a: call(ours("layer_norm"), *a), *leaves, use_reentrant=reentrant)
    dy = drawn(kept.shape, 9)
    for one, other in zip(
        torch.autograd.grad(kept, leaves, dy), _gradients(again, leaves, dy), strict=True
    ):
        assert_same_bits(one, other)


def _gradients(y: Any, leaves: list[Any], dy: Any) -> list[Any]:
    y.backward(dy)  # a reentrant checkpoint knows nothing else
    return [leaf.grad for leaf in leaves]


# ---- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str, dynamic: bool) -> None:
    arrays, call = operands(case, torch.float32)
    leaves = [array.requires_grad_() for array in arrays]
    dy = drawn(arrays[0].shape, 9, torch.float32)

    def function(*given: Any) -> Any:
        return call(ours("layer_norm"), *given)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    results = [
        (y, *torch.autograd.grad(y, leaves, dy)) for y in (compiled(*leaves), function(*leaves))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "shapes", [((3, 1, 2, 8), (3, 1, 2, 8)), ((8,), (1700, 1, 1))], ids=["apart", "unlike"]
)
def test_a_compiled_program_sums_the_gradients_of_repeated_vectors_as_autograd_does(
    shapes: Any, context: Any
) -> None:
    leaves = [
        drawn(shape, i, torch.float32).requires_grad_()
        for i, shape in enumerate(((3, 1700, 2, 8), *shapes))
    ]
    dy = drawn(leaves[0].shape, 9, torch.float32)
    with context():
        results = []
        for function in (layer_norm, torch.compile(layer_norm, fullgraph=True)):
            y = function(*leaves)
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for eager, compiled in zip(*results, strict=True):
        assert_same_bits(compiled, eager)


def test_a_batch_of_repeated_vectors_is_compiled() -> None:
    shapes = (5, 2, 3, 4, 8), (2, 1, 4, 8), (5, 8)
    leaves = [drawn(shape, i).requires_grad_() for i, shape in enumerate(shapes)]
    of_each = vmap(layer_norm, (0, None, 0))
    compiled = torch.compile(of_each, backend="aot_eager", fullgraph=True)
    results = [f(*leaves) for f in (compiled, of_each)]
    assert_close(*results)
    assert_close(*(torch.autograd.grad(y.pow(3).sum(), leaves) for y in results))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_once_for_any_batch(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer_norm, backend=counter, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5):
        leaves = [torch.randn(batch, n, 8, requires_grad=True) for n in (4, 1, 1)]
        dy = torch.randn(batch, 4, 8)
        results = [
            (y, *torch.autograd.grad(y, leaves, dy))
            for y in (compiled(*leaves), layer_norm(*leaves))
        ]
        torch.testing.assert_close(*results)
    # dynamo also compiles an empty graph of what it takes for constant.
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes) > 1]) == 1


def test_compiled_once_for_a_width_that_is_marked_unbacked() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer_norm, backend=counter, fullgraph=True)
    for n in (1, 8):
        arrays = [torch.randn(2, m, n) for m in (3, 1, 1)]
        for array in arrays:
            mark_unbacked(array, 2)
        torch.testing.assert_close(compiled(*arrays), layer_norm(*arrays))
    assert counter.frame_count == 1


def test_exported_and_traced() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return layer_norm(x, weight, bias)

    def arguments(batch: int) -> tuple[Any, ...]:
        return tuple(torch.randn(batch, n, 8) for n in (4, 1, 1))

    batch = torch.export.Dim("batch")
    for strict in (False, True):
        program = torch.export.export(
            Net(), arguments(2), dynamic_shapes=[{0: batch}] * 3, strict=strict
        )
        for other in (arguments(2), arguments(5)):
            assert_same_bits(program.module()(*other), layer_norm(*other))
    traced = make_fx(lambda *a: layer_norm(*a), tracing_mode="symbolic")(*arguments(3))
    other = arguments(4)
    assert_same_bits(traced(*other), layer_norm(*other))


@pytest.mark.parametrize("norm", NORMS)
def test_opcheck(norm: str) -> None:
    x, weight, bias = drawn((2, 3, 8)), drawn((2, 1, 8), 1), drawn((2, 1, 8), 2)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(
        torch.ops.cupynorm.norm_forward,
        (x, None, *leaves[1:], 1, norm, 1e-5, False, list(RELU), None, None, True),
    )


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_an_operation_does_not_take_is_refused(context: Any) -> None:
    x, options = torch.randn(2, 3, 8), (1, "layer_norm", 1e-5, False, None, None, None, True)
    forward = torch.ops.cupynorm.norm_forward
    with context():
        with pytest.raises(NotImplementedError, match=r"weight of shape \(1, 8\) must vary over"):
            forward(x, None, torch.ones(1, 8), None, 2, *options[1:])
        for weight, shape in ((torch.ones(8), r"\(8,\)"), (None, r"\(8,\)")):
            with pytest.raises(
                NotImplementedError, match=rf"bias must have shape {shape}.* got \(2, 1, 8\)"
            ):
                forward(x, None, weight, torch.ones(2, 1, 8), *options)


# ---- nested tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_with_a_weight_for_each_head(layout: Any) -> None:
    parts = [drawn((n, 4, 8), n) for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    for shape in ((4, 8), (1, 1, 4, 8)):
        weight = drawn(shape, 9)
        for part, y in zip(parts, rms_norm(x, weight).unbind(), strict=True):
            assert_same_bits(y, rms_norm(part, weight.reshape(4, 8)))
    shared = "(0, 1)" if layout is torch.jagged else "(0,)"
    words = f"must be the same along axes {shared} of a nested x, got shape (3, 1, 1, 8)"
    for arguments, name in (
        ((drawn((3, 1, 1, 8)),), "weight"),
        ((None, drawn((3, 1, 1, 8))), "bias"),
    ):
        with pytest.raises(NotImplementedError) as raised:
            rms_norm(x, *arguments)
        assert str(raised.value) == f"{name} {words}"
    with pytest.raises(NotImplementedError) as raised:
        rms_norm(x, axis=-2)
    assert str(raised.value) == "axis must name the last axes of a nested x, got -2"


# ---- GroupNorm -----------------------------------------------------------------------------------


def pair(groups: int, channels: int, **options: Any) -> tuple[Any, Any]:
    """Return a module and torch's, with the same parameters."""
    theirs = torch.nn.GroupNorm(groups, channels, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    mine = GroupNorm(groups, channels, **options)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def test_a_group_norm_is_made_as_torchs_is() -> None:
    expected = inspect.signature(torch.nn.GroupNorm).parameters
    actual = inspect.signature(GroupNorm).parameters
    assert [(n, p.default) for n, p in actual.items() if n in expected] == [
        (n, p.default) for n, p in expected.items()
    ]
    for arguments, options in (
        ((2, 6), {}),
        ((3, 6, 1e-3, False), {}),
        ((1, 6), {"dtype": torch.bfloat16, "device": "meta"}),
    ):
        a, b = GroupNorm(*arguments, **options), torch.nn.GroupNorm(*arguments, **options)
        assert repr(a) == f"cupynorm.torch.{b!r}"
        assert isinstance(a, torch.nn.GroupNorm)
        assert {k: (v.shape, v.dtype, v.device) for k, v in a.state_dict().items()} == {
            k: (v.shape, v.dtype, v.device) for k, v in b.state_dict().items()
        }
    norm = GroupNorm(2, 6, bias=False)
    norm.reset_parameters()
    assert norm.bias is None
    assert torch.equal(norm.weight, torch.ones(6))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [*(((2, 6, 3, 4), g) for g in (1, 2, 3, 6)), ((2, 6), 3), ((3, 6, 5), 2), ((0, 6, 5), 2)],
)
def test_a_group_norm_computes_what_torchs_does(
    shape: Any, groups: int, affine: bool, context: Any
) -> None:
    mine, theirs = pair(groups, 6, affine=affine, dtype=torch.float64)
    x, dy = drawn(shape).requires_grad_(), drawn(shape, 1)
    results = []
    for norm in (mine, theirs):
        with context():
            y = norm(x)
            results.append((y, *torch.autograd.grad(y, [x, *norm.parameters()], dy)))
    assert results[0][0].is_contiguous()
    assert_close(*results)


def test_a_group_norm_as_torch_sees_it() -> None:
    norm, _ = pair(2, 6)
    x = torch.randn(3, 6, 4, 5)
    expected = norm(x).detach()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=True)
    batch = torch.export.Dim("batch")
    exported = torch.export.export(norm, (x,), dynamic_shapes=({0: batch},)).module()
    parameters = dict(norm.named_parameters())
    batched = vmap(lambda x: functional_call(norm, parameters, x[None])[0])
    traced = torch.fx.symbolic_trace(norm)
    for seen in (compiled, exported, batched, traced, copy.deepcopy(norm)):
        assert_same_bits(seen(x).detach(), expected)
    assert_same_bits(norm(x.to(memory_format=torch.channels_last)).detach(), expected)


def test_a_group_norm_of_torchs_becomes_one_of_these() -> None:
    mine, theirs = pair(2, 6)
    x = torch.randn(3, 6, 5)
    theirs.__class__ = GroupNorm
    assert repr(theirs) == repr(mine)
    assert_same_bits(theirs(x).detach(), mine(x).detach())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GroupNorm(2.0, 6), TypeError, "num_groups must be an int, got 2.0"),
        (lambda: GroupNorm(2, "6"), TypeError, "num_channels must be an int, got '6'"),
        (lambda: GroupNorm(True, 6), TypeError, "num_groups must be an int, got True"),
        (lambda: GroupNorm(0, 6), ValueError, "num_groups must be at least 1, got 0"),
        (
            lambda: GroupNorm(4, 6),
            ValueError,
            "num_channels must be a multiple of num_groups, 4; got 6",
        ),
        (
            lambda: GroupNorm(2, 6, eps=-1.0),
            ValueError,
            "eps must be a finite number of at least 0, got -1.0",
        ),
        (
            lambda: GroupNorm(2, 6, dtype="float32"),
            TypeError,
            "dtype must be a torch.dtype or None, got 'float32'",
        ),
        (
            lambda: GroupNorm(2, 6)(torch.ones(3, 4)),
            ValueError,
            "input must have num_channels, 6, on axis 1; got shape (3, 4)",
        ),
        (
            lambda: GroupNorm(2, 6)([1.0]),
            TypeError,
            "input must be a torch tensor, got list",
        ),
        (
            lambda: GroupNorm(2, 6)(torch.ones(3, 6, 0)),
            ValueError,
            "input must have elements in each group, got shape (3, 6, 0)",
        ),
        (
            lambda: GroupNorm(2, 6)(torch.ones(6)),
            ValueError,
            "input must have num_channels, 6, on axis 1; got shape (6,)",
        ),
        (
            lambda: GroupNorm(2, 6)(torch.ones(3, 6).to_sparse()),
            TypeError,
            "input must be a dense tensor, got one of layout torch.sparse_coo",
        ),
    ],
)
def test_a_wrong_call_of_a_group_norm(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
