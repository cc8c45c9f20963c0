"""cupynorm.torch on a GPU: values, autograd, compilation, graphs, streams, memory, devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
# ruff: noqa: E402 - what follows needs torch

import numpy as np
import torch.nn.functional as F
from conftest import ERROR_OVER_BOUND
from hypothesis import HealthCheck, given, settings
from strategies import DTYPES, Layout, Problem, make_values, problems
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint
from torch_checks import (
    NEGATED,
    NORMS,
    RESIDUALS,
    ResidualDtypes,
    assert_same_bits,
    check_problem,
    to_numpy,
)

import cupynorm.torch
from cupynorm import NormBackward, testing
from cupynorm.torch import GroupNorm, LayerNorm, RMSNorm, _kernels, layer_norm, rms_norm

pytestmark = [
    pytest.mark.gpu,
    # torch itself still uses what it deprecates.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

RELU = (-0.5, 0.7)

worst: dict[str, float] = {}


@pytest.fixture(autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    worst.clear()
    yield
    request.node.user_properties += [(ERROR_OVER_BOUND, item) for item in worst.items()]
    torch.cuda.empty_cache()


def check(
    problem: Problem, negated: frozenset[str] = frozenset(), residual: ResidualDtypes | None = None
) -> None:
    # The allocator hands out NaN, so that memory that nothing wrote does not look right.
    torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device="cuda")
    for field, ratio in check_problem(problem, "cuda", negated, residual).items():
        name = f"torch {problem.norm} {field}"
        worst[name] = max(ratio, worst.get(name, 0.0))


def operands(n: int = 1024, dtype: Any = torch.bfloat16, m: int = 64) -> tuple[Any, Any, Any]:
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Any:
        values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    return drawn(m, n), drawn(n), drawn(n)


def step(norm: str, x: Any, weight: Any, bias: Any, dy: Any) -> tuple[Any, ...]:
    y = getattr(cupynorm.torch, norm)(x, weight, bias, relu=RELU)
    return y, *torch.autograd.grad(y, (x, weight, bias), dy)


# ---- values --------------------------------------------------------------------------------------


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(), NEGATED, RESIDUALS)
def test_values(problem: Problem, negated: frozenset[str], residual: ResidualDtypes | None) -> None:
    check(problem, negated, residual)


@pytest.mark.parametrize("n", [768, 4096, 40000])
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_values_of_wide_rows(norm: str, x: str, n: int) -> None:
    for weight in DTYPES:
        for layout in (Layout(), Layout(gap=8), Layout(gap=1, offset=3)):
            check(
                Problem(
                    norm=norm,
                    k=1,
                    eps=1e-5,
                    axis=None,
                    zero_centered=True,
                    relu=RELU,
                    out_dtype=DTYPES[x],
                    wants_dbias=True,
                    regime="normal",
                    seed=0,
                    layouts={"x": layout, "dy": layout, "weight": Layout(), "bias": Layout()},
                    x=make_values("normal", (19, n), DTYPES[x], 1),
                    dy=make_values("normal", (19, n), DTYPES[x], 2),
                    weight=make_values("normal", (n,), DTYPES[weight], 3),
                    bias=make_values("normal", (n,), DTYPES[weight], 4),
                )
            )


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_first_and_second_order(norm: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    arrays = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64)
        for shape in ((5, 24), (24,), (24,))
    ]

    def function(*arguments: Any) -> Any:
        return getattr(cupynorm.torch, norm)(*arguments, relu=RELU)

    leaves = [array.requires_grad_() for array in arrays]
    assert gradcheck(function, leaves, nondet_tol=0.0)
    assert gradgradcheck(function, leaves)


def with_residual(norm: str, x: Any, residual: Any, *affine: Any) -> Any:
    return getattr(cupynorm.torch, norm)(x, *affine, residual=residual, relu=RELU)


def step_with_residual(norm: str, leaves: Any, dy: Any, ds: Any) -> tuple[Any, ...]:
    y, s = with_residual(norm, *leaves)
    both = torch.autograd.grad((y, s), leaves, (dy, ds), retain_graph=True)
    of_y = torch.autograd.grad(y, leaves, dy)
    return y, s, *both, *of_y


@pytest.mark.parametrize("n", [768, 1000, 4096, 24576, 40000])
@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_a_residual_is_added_first(norm: str, of_residual: Any, n: int) -> None:
    for m in (3, 700):
        x, weight, bias = operands(n, m=m)
        residual = torch.randn(m, n, device="cuda").to(of_residual).requires_grad_()
        leaves = (x, residual, weight, bias)
        dy, ds = torch.randn_like(x), torch.randn_like(residual)
        y, s, *gradients = step_with_residual(norm, leaves, dy, ds)
        assert_same_bits(s, x + residual)
        total = s.detach().requires_grad_()
        options = {"relu": RELU, "out_dtype": x.dtype}
        alone = getattr(cupynorm.torch, norm)(total, weight, bias, **options)
        assert_same_bits(y, alone)
        both, of_y = gradients[:4], gradients[4:]
        expected = torch.autograd.grad(alone, (total, weight, bias), dy)
        assert_same_bits(of_y[1], expected[0])
        assert_same_bits(of_y[0], expected[0].to(x.dtype))
        for found in (both, of_y):
            assert [g.dtype for g in found] == [leaf.dtype for leaf in leaves]
            # Their sums over the rows may have another order, so two roundings are allowed.
            for a, b in zip(found[2:], expected[1:], strict=True):
                torch.testing.assert_close(a, b, rtol=2**-7, atol=16 * 2**-24 * m)
        wide = expected[0].double() + ds.double()
        for gradient, leaf in zip(both[:2], leaves[:2], strict=True):
            torch.testing.assert_close(
                gradient.double(), wide, rtol=0, atol=4 * torch.finfo(leaf.dtype).eps * 8
            )


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_first_and_second_order_with_a_residual(norm: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float64).requires_grad_()
        for shape in ((5, 24), (5, 24), (24,), (24,))
    ]
    assert gradcheck(lambda *a: with_residual(norm, *a), leaves, nondet_tol=0.0)
    assert gradgradcheck(lambda *a: with_residual(norm, *a), leaves)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_with_a_residual(mode: str) -> None:
    torch._dynamo.reset()
    _, weight, bias = operands()

    def block(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        y, s = with_residual("layer_norm", x, residual, weight, bias)
        return 2 * y, s + 1

    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        residual = torch.randn(64, 1024, device="cuda", requires_grad=True)
        leaves, found = (x, residual, weight, bias), []
        given = (torch.randn_like(x), torch.randn_like(residual))
        for function in (compiled, block):
            results = function(*leaves)
            found.append((*results, *torch.autograd.grad(results, leaves, given)))
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16])
def test_captured_into_a_graph_with_a_residual(of_residual: Any) -> None:
    x, weight, bias = operands(4096)
    residual = torch.randn_like(x, dtype=of_residual).requires_grad_()
    leaves, given = (x, residual, weight, bias), (torch.randn_like(x), torch.randn_like(residual))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step_with_residual("layer_norm", leaves, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step_with_residual("layer_norm", leaves, *given)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        residual.copy_(torch.randn_like(residual))
    graph.replay()
    for a, b in zip(captured, step_with_residual("layer_norm", leaves, *given), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16])
def test_memory_of_a_call_with_a_residual(of_residual: Any) -> None:
    x, weight, _ = operands(4096, m=4096)
    residual = torch.randn_like(x, dtype=of_residual).requires_grad_()
    leaves, given = (x, residual, weight), (torch.randn_like(x), torch.randn_like(residual))
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(rms_norm(x, weight, residual=residual), leaves, given)
        held = torch.cuda.memory_allocated()
        results = rms_norm(x, weight, residual=residual)
        assert torch.cuda.memory_allocated() - held == x.nbytes + residual.nbytes + 4096 * 4
        before = torch.cuda.memory_allocated()
        dx, dresidual, dweight = torch.autograd.grad(results, leaves, given)
    after = torch.cuda.memory_allocated() + 4096 * 4
    is_one = of_residual == x.dtype
    assert (dx.data_ptr() == dresidual.data_ptr()) == is_one
    of_residual_alone = 0 if is_one else dresidual.nbytes
    assert after - before == dx.nbytes + of_residual_alone + dweight.nbytes


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_with_a_residual(norm: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(4, 64, device="cuda").to(dtype).requires_grad_()
        residual, weight = torch.randn(4, 64, device="cuda"), torch.ones(64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            y, s = getattr(cupynorm.torch, norm)(x, weight, residual=residual.to(dtype))
            assert y.dtype == getattr(cupynorm.torch, norm)(x, weight).dtype
        assert s.dtype == dtype
        (y.sum() + s.sum()).backward()
        assert x.grad.dtype == dtype


def test_a_gradient_expanded_from_one_value() -> None:
    x, weight, bias = operands(dtype=torch.float32)
    layer_norm(x, weight, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 64.0))


def test_modules_compute_what_torchs_do() -> None:
    x, *_ = operands(dtype=torch.float32)
    for mine, theirs in (
        (RMSNorm, torch.nn.RMSNorm),
        (LayerNorm, torch.nn.LayerNorm),
    ):
        a, b = mine(1024, device="cuda"), theirs(1024, device="cuda")
        torch.nn.init.normal_(b.weight)
        a.load_state_dict(b.state_dict())
        torch.testing.assert_close(a(x), b(x))


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_is_that_of_torch(norm: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(4, 64, device="cuda").to(dtype).requires_grad_()
        weight = torch.ones(64, device="cuda", dtype=dtype)
        with torch.autocast("cuda", torch.bfloat16):
            mine = getattr(cupynorm.torch, norm)(x, weight)
            theirs = getattr(F, norm)(x, (64,), weight)
        assert mine.dtype == theirs.dtype
        mine.sum().backward()
        assert x.grad.dtype == dtype


# ---- transforms and compilation ------------------------------------------------------------------


def test_gradients_of_each_example() -> None:
    x, weight, bias = (t.detach() for t in operands(64, torch.float32))
    x = x.reshape(8, 8, 64)

    def total(function: Any) -> Any:
        return grad(lambda *a: function(*a).pow(3).sum(), (0, 1, 2))

    mine = vmap(total(lambda *a: layer_norm(*a)), (0, None, None))(x, weight, bias)
    theirs = vmap(total(lambda x, w, b: F.layer_norm(x, (64,), w, b)), (0, None, None))
    for a, b in zip(mine, theirs(x, weight, bias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_opcheck(norm: str) -> None:
    x, weight, bias = operands(64)
    residual = x.detach().float().requires_grad_()
    operations = torch.ops.cupynorm
    for to_add in (None, residual):
        options = (1, norm, 1e-5, False, [0.0, math.inf], None, None, True)
        arguments = (x, to_add, weight, bias, *options)
        torch.library.opcheck(operations.norm_forward.default, arguments)
        with torch.no_grad():
            _, mean, rstd, bitmask, total = operations.norm_forward(*arguments)
        kept = (weight, mean if norm == "layer_norm" else None, rstd, bitmask)
        read = (x, x, None) if to_add is None else (x, total.requires_grad_(), residual)
        dtypes = (None, None) if to_add is None else (torch.bfloat16, torch.float32)
        arguments = (*read, *kept, 1, norm, 1e-5, False, *dtypes, torch.bfloat16)
        torch.library.opcheck(operations.norm_backward.default, arguments)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("norm", NORMS)
def test_compiled(norm: str, mode: str) -> None:
    torch._dynamo.reset()
    _, weight, bias = operands()

    def block(x: Any, weight: Any, bias: Any) -> Any:
        return 2 * getattr(cupynorm.torch, norm)(x, weight, bias, relu=RELU)

    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for _ in range(4):  # reduce-overhead first warms up, then records, then replays
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn_like(x)
        y = compiled(x, weight, bias)
        gradients = torch.autograd.grad(y, (x, weight, bias), dy)
        expected = block(x, weight, bias)
        assert_same_bits(y, expected)
        for a, b in zip(
            gradients, torch.autograd.grad(expected, (x, weight, bias), dy), strict=True
        ):
            assert_same_bits(a, b)


def test_compiled_once_for_any_batch() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda x, weight: rms_norm(x, weight).sin(), backend=counter, fullgraph=True, dynamic=True
    )
    _, weight, _ = operands()
    for m in (3, 50, 64, 7):
        x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16)
        compiled(x, weight).sum().backward()
    # dynamo also compiles an empty graph of what it takes for constant.
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes) > 1]) == 1


# ---- tensors whose memory does not say what their values are -------------------------------------


def outlived(tensor: Any) -> Any:
    """Return what stands for a tensor after the transform around it has ended."""
    kept: list[Any] = []
    grad(lambda t: kept.append(t) or t.sum())(tensor)
    return kept[0]


STANDING_FOR = {
    "negated": lambda t: torch._neg_view(-t),
    "of a conjugate": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "zeros": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "outlived": outlived,
}


@pytest.mark.parametrize("kind", STANDING_FOR)
@pytest.mark.parametrize("norm", NORMS)
def test_what_stands_for_a_tensor_has_its_values(norm: str, kind: str) -> None:
    leaves = operands(dtype=torch.float32)
    plain = [*leaves, torch.randn_like(leaves[0])]
    for i in range(4):
        results = []
        given, meant = list(plain), list(plain)
        given[i] = STANDING_FOR[kind](plain[i])
        if kind == "zeros":
            meant[i] = torch.zeros_like(plain[i])
        for *affine, dy in (given, meant):
            with torch.no_grad():
                inferred = getattr(cupynorm.torch, norm)(*affine, relu=RELU)
            y = getattr(cupynorm.torch, norm)(*affine, relu=RELU)
            assert_same_bits(inferred, y)
            options = {"materialize_grads": True}
            first = torch.autograd.grad(y, leaves, dy, create_graph=True, **options)
            second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves, **options)
            y, pull = torch.func.vjp(
                lambda *a: getattr(cupynorm.torch, norm)(*a, relu=RELU), *affine
            )
            results.append((y, *first, *second, *pull(dy)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_pull_backs_of_vjp(norm: str) -> None:
    given = operands(dtype=torch.float32)
    dy = torch.randn_like(given[0])
    y, pull = torch.func.vjp(lambda *a: getattr(cupynorm.torch, norm)(*a, relu=RELU), *given)
    expected = step(norm, *given, dy)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            for a, b in zip((y, *pull(dy)), expected, strict=True):
                assert_same_bits(a, b)
    many = vmap(pull)(torch.stack([dy, dy]))
    torch.testing.assert_close(many[0][1], expected[1])


def test_what_has_no_memory_is_refused() -> None:
    x, weight, _ = (t.detach() for t in operands())
    weight.untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(ValueError, match="weight must have memory"):
        rms_norm(x, weight)
    torch.cuda.synchronize()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, weight, bias = operands(dtype=torch.float32)
    expected = torch.autograd.grad(layer_norm(x, weight, bias).sum(), (x, weight, bias))
    checkpoint(layer_norm, x, weight, bias, use_reentrant=reentrant).sum().backward()
    for leaf, gradient in zip((x, weight, bias), expected, strict=True):
        assert_same_bits(leaf.grad, gradient)


# ---- graphs, streams, memory, devices ------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(64, 1024), (64, 40000), (2200, 24576)])  # last: counted
@pytest.mark.parametrize("norm", NORMS)
def test_captured_into_a_graph(norm: str, m: int, n: int) -> None:
    x, weight, bias = operands(n, m=m)
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(norm, x, weight, bias, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(norm, x, weight, bias, dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(norm, x, weight, bias, dy), strict=True):
        assert_same_bits(a, b)


def test_a_cold_call_in_a_capture_says_what_to_do() -> None:
    x = torch.randn(4, 1239, device="cuda")  # a width no other test uses
    rms_norm(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="before the capture"):
            layer_norm(x)
        y = rms_norm(x[:3])  # another number of rows, by the same kernel
    graph.replay()
    assert_same_bits(y, rms_norm(x[:3]))


@pytest.mark.parametrize("norm", NORMS)
def test_launches_follow_torchs_current_stream(norm: str) -> None:
    source, weight, bias = operands(4096, torch.float32, m=4096)
    dy = torch.randn_like(source)
    expected = step(norm, source, weight, bias, dy)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(source)
        for _ in range(50):  # keeps the stream busy while the host runs ahead
            late = late + 1
        late = source.detach().clone().requires_grad_()
        results = step(norm, late, weight, bias, dy)
    stream.synchronize()
    for a, b in zip(results, expected, strict=True):
        assert_same_bits(a, b)


def test_memory_is_of_torchs_allocator_and_only_what_is_stated() -> None:
    import cupy

    x, weight, bias = operands(4096, m=4096)
    dy = torch.randn_like(x)
    with torch.autograd.set_multithreading_enabled(False):  # its thread frees when it likes
        step("layer_norm", x, weight, bias, dy)
    pool = cupy.get_default_memory_pool()
    used, held = pool.total_bytes(), torch.cuda.memory_allocated()
    y = layer_norm(x, weight, bias)
    kept = torch.cuda.memory_allocated() - held
    assert kept == x.nbytes + 2 * 4096 * 4  # y, mean and rstd
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(y, (x, weight, bias), dy)
    after = torch.cuda.memory_allocated()
    assert after - before + 2 * 4096 * 4 == sum(g.nbytes for g in gradients)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    partials = 2 * 4 * multiprocessors * 4096 * 4
    assert torch.cuda.max_memory_allocated() - before <= x.nbytes + 2 * weight.nbytes + partials
    with torch.no_grad():
        held = torch.cuda.memory_allocated()
        inferred = layer_norm(x, weight, bias)
        assert torch.cuda.memory_allocated() - held == inferred.nbytes
    assert pool.total_bytes() == used


def test_a_slice_of_a_packed_qkv_is_not_copied() -> None:
    qkv = torch.randn(4, 128, 3 * 1024 + 8, device="cuda")
    q = qkv[..., 8 : 8 + 1024]
    expected = rms_norm(q.contiguous())
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = rms_norm(q)
    assert torch.cuda.max_memory_allocated() - held == y.nbytes
    assert_same_bits(y, expected)


def test_more_than_2_to_the_31_elements() -> None:
    m, n = 70_000, 32_768  # 2.3e9 elements, 4.6 GB
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    rows = torch.randn(7, n, device="cuda", dtype=torch.bfloat16)
    x = rows.repeat(m // 7, 1)
    y = rms_norm(x)
    assert_same_bits(y[-7:], rms_norm(rows))


@pytest.mark.parametrize("norm", NORMS)
def test_another_device(norm: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):  # XLA may have left another device current
        x, weight, bias = operands()
        dy = torch.randn_like(x)
        expected = step(norm, x, weight, bias, dy)
        moved = [t.detach().to("cuda:1").requires_grad_() for t in (x, weight, bias)]
        results = step(norm, *moved, dy.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    for a, b in zip(results, expected, strict=True):
        assert a.device.index == 1
        assert_same_bits(a, b)
    with pytest.raises(ValueError, match="weight must be on x's device, cuda:1; got cuda:0"):
        rms_norm(moved[0], weight)


def test_plans_are_shared_by_numbers_of_rows() -> None:
    x, weight, _ = operands()
    loaded = []
    original = _kernels._load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kernels, "calls", {})
        patch.setattr(_kernels, "_load", lambda *a: loaded.append(original(*a)) or loaded[-1])
        for m in (1, 5, 64):
            with torch.no_grad():
                rms_norm(x[:m], weight)
    assert len({id(plan) for plan in loaded}) == 1
    assert np.all([plan is loaded[0] for plan in loaded])


# ---- weights that broadcast, and any axis --------------------------------------------------------

# x's shape, that of weight and bias, the axes and, if it is another one, the bias's shape.
BROADCAST: dict[str, Any] = {
    "AdaLN": ((4, 33, 1024), (4, 1, 1024), None),
    "heads": ((3, 17, 8, 128), (8, 128), -1),
    "heads of examples": ((3, 17, 8, 64), (3, 1, 8, 64), -1),
    "channels": ((2, 12, 9, 20), (12, 1, 1), (1, 2, 3)),
    "axis=1": ((3, 96, 5, 7), (96, 1, 1), 1),
    "an odd width": ((5, 7, 333), (5, 1, 333), None),
    "a long row": ((3, 4, 40000), (3, 1, 40000), None),
    "a weight for all and a bias for each": ((3, 700, 64), (64,), None, (3, 1, 64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", BROADCAST)
@pytest.mark.parametrize("norm", NORMS)
def test_weights_that_broadcast(norm: str, case: str, dtype: Any) -> None:
    x_shape, shape, axis, *of_bias = BROADCAST[case]
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(s, generator=generator, device="cuda").to(dtype)
        for s in (x_shape, shape, *(of_bias or [shape]), x_shape)
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    options = {"eps": 1e-5, "axis": axis}

    def function(*given: Any) -> Any:
        return getattr(cupynorm.torch, norm)(*given, **options)

    y = function(*leaves)
    found = torch.autograd.grad(y, leaves, dy)
    host = [to_numpy(t) for t in leaves]
    for name, ratio in testing.check_forward(norm, to_numpy(y), *host, **options).items():
        worst[f"torch {norm} {name}"] = ratio
    kept = getattr(cupynorm, f"{norm}_forward")(*host, **options)
    testing.check_backward(
        norm,
        NormBackward(*map(to_numpy, found)),
        to_numpy(dy),
        *(*host[:2], kept.mean, kept.rstd),
        bias=host[2],
        axis=axis,
    )
    torch._dynamo.reset()  # it compiles one function only so many times
    again = torch.compile(function, fullgraph=True)(*leaves)
    assert_same_bits(again, y)
    for one, other in zip(torch.autograd.grad(again, leaves, dy), found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("groups", [1, 8, 32])
def test_a_group_norm(groups: int) -> None:
    theirs = torch.nn.GroupNorm(groups, 32, device="cuda", dtype=torch.float64)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    mine = GroupNorm(groups, 32, device="cuda", dtype=torch.float64)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 32, 9, 20, device="cuda", dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    results = []
    for module, call in ((theirs, theirs), (mine, mine), (mine, torch.compile(mine))):
        y = call(x)
        results.append((y, *torch.autograd.grad(y, [x, *module.parameters()], dy)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-10)


def test_the_gradients_of_each_example_come_from_the_kernels() -> None:
    x, weight, bias = (t.detach() for t in operands(512, torch.float32, 6 * 16))
    examples = x.reshape(6, 16, 512)

    def loss(x: Any, weight: Any, bias: Any) -> Any:
        return layer_norm(x, weight, bias).pow(3).sum()

    found = vmap(grad(loss, (1, 2)), (0, None, None))(examples, weight, bias)
    for i, example in enumerate(examples):
        # Both sum 16 rows in float32, perhaps in other orders.
        expected = grad(loss, (1, 2))(example, weight, bias)
        torch.testing.assert_close([f[i] for f in found], list(expected), rtol=1e-5, atol=1e-4)
