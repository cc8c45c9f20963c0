"""cupynorm.torch on the CPU: values, derivatives, transforms, compilation, modules, errors.

What a GPU call does up to its launch runs here too, with NumPy plans instead of the kernels.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import math
import re
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
# ruff: noqa: E402 - what follows needs torch

import numpy as np
import torch.nn.functional as F
import torch_plans
from hypothesis import HealthCheck, given, settings
from strategies import Problem, problems
from thorough import in_pairs, one_in
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_checks import FAST, NEGATED, NORMS, RESIDUALS, assert_same_bits, check_problem, to_numpy

import cupynorm.torch
from cupynorm import _prepared, testing
from cupynorm._operation import BACKWARD, FORWARD
from cupynorm.reference import round_once
from cupynorm.torch import (
    LayerNorm,
    RMSNorm,
    _formulas,
    _kernels,
    _operations,
    layer_norm,
    rms_norm,
)

# torch itself still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

RELU = (-0.5, 0.7)
FORWARD_TOO = {"check_forward_ad": True, "check_batched_forward_grad": True}
NORM = RMSNorm(8, bias=True)


@pytest.fixture(autouse=True)
def compile_anew() -> None:
    """Let no test find what others compiled: dynamo compiles one function only so many times."""
    torch._dynamo.reset()


def drawn(*shape: int, dtype: Any = torch.float64, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_()


def operands(dtype: Any = torch.float64) -> tuple[Any, Any, Any]:
    return drawn(3, 5, 8, dtype=dtype), drawn(8, dtype=dtype, seed=1), drawn(8, dtype=dtype, seed=2)


def formula(norm: str, x: Any, weight: Any, bias: Any) -> Any:
    """The norm with a clamped ReLU, by torch's own operations, which all of torch can transform."""
    if norm == "layer_norm":
        return F.layer_norm(x, weight.shape, weight, bias).clamp(*RELU)
    return (F.rms_norm(x, weight.shape, weight, 1e-6) + bias).clamp(*RELU)


def ours(norm: str, x: Any, weight: Any, bias: Any) -> Any:
    return getattr(cupynorm.torch, norm)(x, weight, bias, relu=RELU)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_an_older_torch_is_refused() -> None:
    program = (
        "import torch; torch.__version__ = type(torch.__version__)('2.10.1'); import cupynorm.torch"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: cupynorm.torch needs torch 2.11 or newer, found 2.10.1" in done.stderr


def test_importing_cupynorm_imports_no_torch() -> None:
    code = "import sys, cupynorm; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_torch_face_does_not_import_torchs_compiler() -> None:
    code = "import sys, cupynorm.torch; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- values --------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(), NEGATED, RESIDUALS)
def test_values(problem: Problem, negated: frozenset[str], residual: Any) -> None:
    check_problem(problem, negated=negated, dtypes=residual)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(problems(), NEGATED, RESIDUALS)
def test_values_by_way_of_plans(problem: Problem, negated: frozenset[str], residual: Any) -> None:
    with torch_plans.in_place_of_kernels() as plans:
        check_problem(problem, negated=negated, dtypes=residual)
        assert plans.launches


# ---- launches ------------------------------------------------------------------------------------


def test_strided_rows_are_launched_where_they_lie() -> None:
    qkv = torch.randn(4, 6, 3 * 64)
    q = qkv[..., 64:128]
    gradients = torch.randn(4, 6, 128)
    dy = gradients[..., :64]
    weight = torch.randn(64, requires_grad=True)
    with torch_plans.in_place_of_kernels() as plans:
        y = rms_norm(q, weight)
        y.backward(dy)
    forward, backward = plans.launches
    assert (forward["x"], forward["x_stride"], forward["m"]) == (q.data_ptr(), 192, 24)
    assert (backward["x"], backward["x_stride"]) == (q.data_ptr(), 192)
    assert (backward["dy"], backward["dy_stride"]) == (dy.data_ptr(), 128)
    assert forward["weight"] == backward["weight"] == weight.data_ptr()
    assert [plan.vector for plan in plans.made] == [4, 4]


@pytest.mark.parametrize("shape", [(3, 1, 8), (1, 1, 8)])
def test_strides_of_axes_of_one_element_are_not_looked_at(shape: tuple[int, ...]) -> None:
    plain = torch.randn(shape)
    odd = torch.empty_strided(shape, (8 if shape[0] > 1 else 999, 7, 1)).copy_(plain)
    weight = torch.randn(8, requires_grad=True)
    for first, second in ((plain, odd), (odd, plain)):
        results = []
        with torch_plans.in_place_of_kernels() as plans:
            for x in (first, second):
                x = x.detach().requires_grad_()
                y = rms_norm(x, weight)
                assert y.is_contiguous()
                results.append((y, *torch.autograd.grad(y, (x, weight), x.detach())))
            assert len(_kernels.calls) == 2  # one call of each pass
            assert [plan.vector for plan in plans.made] == [4, 4]
        for a, b in zip(*results, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("other", ["x", "residual", "dy", "ds", "weight", "bias"])
def test_calls_on_tensors_of_other_strides_are_told_apart(other: str) -> None:
    rows, row = torch.randn(6, 8), torch.randn(8)
    like = row if other in ("weight", "bias") else rows
    # Contiguous, with a gap after each row or element, with a wider one, and no rows at all.
    layouts = [like, *(torch.randn(*like.shape[:-1], n)[..., :8] for n in (12, 16))]
    layouts += [torch.randn(8, 6).T] if like is rows else [torch.randn(8, 2)[:, 0]]

    def run(tensor: torch.Tensor) -> list[torch.Tensor]:
        given = dict.fromkeys(("x", "residual", "dy", "ds"), rows)
        given |= {"weight": row, "bias": row, other: tensor}
        names = ("x", "weight", "bias", "residual")
        leaves = {name: given[name].detach().requires_grad_() for name in names}
        results = layer_norm(**leaves)
        gradients = torch.autograd.grad(results, [*leaves.values()], (given["dy"], given["ds"]))
        return [*results, *gradients]

    expected = []
    for tensor in layouts:
        with torch_plans.in_place_of_kernels():
            expected.append(run(tensor))
    with torch_plans.in_place_of_kernels():
        for tensor, alone in zip(layouts, expected, strict=True):
            for a, b in zip(run(tensor), alone, strict=True):
                assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_each_operand_has_an_alignment_of_its_own(name: str) -> None:
    x, memory = torch.randn(4, 64).bfloat16(), torch.randn(64 + 16)
    start = -(memory.data_ptr() // 4) % 8 + 4
    with torch_plans.in_place_of_kernels() as plans:
        rms_norm(x, **{name: memory[start : start + 64]})
    assert plans.made[0].vector == 4  # 8 elements of float32 would be 32 bytes


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_alignment_has_a_plan_of_its_own(order: tuple[int, int]) -> None:
    memory = torch.randn(4 * 64 + 1)
    with torch_plans.in_place_of_kernels() as plans:
        for start in order * 2:
            x = memory[start : start + 4 * 64].view(4, 64)
            assert_same_bits(rms_norm(x), rms_norm(x.clone()))
    # The copies are aligned.
    assert {plan.vector: len(plan.launches) for plan in plans.made} == {4: 6, 1: 2}
    assert len(plans.made) == 2


def test_eager_calls_go_straight_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("a detour")

    monkeypatch.setattr(_operations, "norm_forward", fail)
    x, weight, bias = operands()
    with torch_plans.in_place_of_kernels() as plans:
        with torch.no_grad():
            layer_norm(x, weight, bias)
        layer_norm(x, weight, bias).sum().backward()
    assert [launch["m"] for launch in plans.launches] == [15] * 3


@pytest.mark.parametrize("leaf", range(3))
def test_one_leaf_is_enough_to_be_recorded(leaf: int) -> None:
    given = operands()
    expected = torch.autograd.grad(layer_norm(*given).pow(3).sum(), given)[leaf]
    alone = [tensor.detach() for tensor in given]
    alone[leaf].requires_grad_()
    layer_norm(*alone).pow(3).sum().backward()
    assert_same_bits(alone[leaf].grad, expected)


def test_other_layouts_are_copied() -> None:
    x = torch.randn(64, 4).T.requires_grad_()
    with torch_plans.in_place_of_kernels() as plans:
        layer_norm(x).sum().backward()
    forward, backward = plans.launches
    assert forward["x"] != x.data_ptr()
    assert forward["x_stride"] == backward["x_stride"] == backward["dy_stride"] == 64


def test_inference_stores_nothing() -> None:
    x = torch.randn(4, 8)
    weight = torch.randn(8, requires_grad=True)
    with torch_plans.in_place_of_kernels() as plans:
        with torch.no_grad():
            layer_norm(x, weight, relu=RELU)
        layer_norm(x, relu=RELU)
        layer_norm(x, weight, relu=RELU)
    stored = [
        [launch[name] != 0 for name in ("mean", "rstd", "bitmask")] for launch in plans.launches
    ]
    assert stored == [[False] * 3, [False] * 3, [True] * 3]
    assert [plan.spec.store_statistics for plan in plans.made] == [False, False, True]


def test_a_bias_that_wants_no_gradient_has_no_sum() -> None:
    x, weight, bias = operands()
    with torch_plans.in_place_of_kernels() as plans:
        layer_norm(x, weight, bias.detach()).sum().backward()
    assert plans.launches[-1]["dbias"] == 0
    assert plans.made[-1].spec.dbias is None


def test_one_plan_serves_every_number_of_rows() -> None:
    with torch_plans.in_place_of_kernels() as plans:
        for m in (1, 2, 7):
            rms_norm(torch.randn(m, 8))
        rms_norm(torch.randn(7, 8))
        assert [plan.n for plan in plans.made] == [8, 8, 8]  # a cache of plans makes them one plan
        assert [launch["m"] for launch in plans.launches] == [1, 2, 7, 7]


def test_calls_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prepared, "MOST_CALLS", 4)
    monkeypatch.setattr(_kernels, "calls", {})
    for m in range(1, 12):
        rms_norm(torch.ones(m, 8))
        assert len(_kernels.calls) <= 4


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operations() -> None:
    x, weight, bias = operands()
    with Seen() as seen:
        layer_norm(x, weight, bias).sum().backward()
    assert "cupynorm.norm_forward.default" in seen.names
    assert "cupynorm.norm_backward.default" in seen.names


def test_numpy_leaves_memory_resizable() -> None:
    weight = torch.ones(8)
    rms_norm(torch.randn(4, 8), weight)
    weight.untyped_storage().resize_(0)  # as FSDP does


# ---- derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("relu", [None, RELU], ids=["plain", "relu"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["weight", "zero_centered"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_first_and_second_order(norm: str, zero_centered: bool, relu: Any) -> None:
    def function(*arguments: Any) -> Any:
        options = {"zero_centered": zero_centered, "relu": relu, "eps": 0.1}
        return getattr(cupynorm.torch, norm)(*arguments, **options)

    assert gradcheck(function, operands(), **FORWARD_TOO)
    assert gradgradcheck(function, operands(), check_fwd_over_rev=True, fast_mode=FAST)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_without_operands_and_over_several_axes(norm: str) -> None:
    function = getattr(cupynorm.torch, norm)
    x, weight, bias = drawn(3, 4, 2), drawn(4, 2, seed=1), drawn(2, seed=2)
    for call, arguments in (
        (lambda x: function(x), (x,)),
        (lambda x: function(x, axis=(-2, -1)), (x,)),
        (lambda x, weight: function(x, weight, axis=(-2, -1)), (x, weight)),
        (lambda x, bias: function(x, None, bias), (x, bias)),
        (function, (drawn(6), drawn(6, seed=1), drawn(6, seed=2))),
        (lambda x, weight: function(x, weight.reshape(1, 4, 2), axis=(1, 2)), (x, weight)),
    ):
        assert gradcheck(call, arguments, **FORWARD_TOO)
        assert gradgradcheck(call, arguments, check_fwd_over_rev=True, fast_mode=FAST)


def by_hand(x: Any, weight: Any, bias: Any) -> Any:
    """LayerNorm where torch's own is wrong: in third derivatives, and forward over reverse."""
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5) * weight + bias


def test_third_derivatives() -> None:
    x, weight, bias = drawn(2, 4), drawn(4, seed=1), drawn(4, seed=2)

    def third(norm: Any) -> Any:
        total = norm(x)
        for _ in range(3):
            (total,) = torch.autograd.grad(total.pow(3).sum(), x, create_graph=True)
        return total

    assert_close(
        third(lambda x: layer_norm(x, weight, bias)), third(lambda x: by_hand(x, weight, bias))
    )


def test_a_gradient_expanded_from_one_value() -> None:
    x, weight, _ = operands()
    layer_norm(x, weight).sum().backward()
    expected = torch.autograd.grad(F.layer_norm(x, (8,), weight).sum(), (x, weight))
    assert_close((x.grad, weight.grad), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_kept_goes_through_hooks_and_may_come_back_otherwise_laid_out(norm: str) -> None:
    x, weight, bias = operands(torch.float32)

    def unpack(tensor: Any) -> Any:
        spread = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
        return spread.select(-1, 1).copy_(tensor)

    kept: list[Any] = []
    with torch_plans.in_place_of_kernels() as plans:
        for _ in range(2):  # a new layout after a known one, and once more
            expected = torch.autograd.grad(ours(norm, x, weight, bias).sum(), (x, weight, bias))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, unpack):
                y = ours(norm, x, weight, bias)
            actual = torch.autograd.grad(y.sum(), (x, weight, bias))
            for a, b in zip(actual, expected, strict=True):
                assert_same_bits(a, b)
    statistics = 1 if norm == "rms_norm" else 2
    assert len(kept) == 2 * (2 + statistics + 1)  # and the bits of relu
    assert len(plans.launches) == 8


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_that_autograd_batches(norm: str) -> None:
    x, weight, bias = operands()
    dy = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    found = []
    for function in (ours, formula):
        y = function(norm, x, weight, bias)
        options = {"is_grads_batched": True, "create_graph": True}
        first = torch.autograd.grad(y, (x, weight, bias), dy, **options)
        second = torch.autograd.grad(first[0].pow(2).sum(), (x, weight))
        of_x = torch.autograd.functional.jacobian(
            lambda x, f=function: f(norm, x, weight, bias), x, vectorize=True
        )
        found.append((*first, *second, of_x))
    assert_close(*found)


def test_no_rows() -> None:
    x, weight = drawn(0, 4, 8), drawn(8)
    for context in (torch.enable_grad, torch_plans.in_place_of_kernels):
        with context():
            y = rms_norm(x, weight)
            dx, dweight = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
        assert y.shape == dx.shape == (0, 4, 8)
        assert not dweight.any()


@pytest.mark.parametrize(
    "shape", [(0, 8), (2, 0, 8), (0, 3, 8), (3, 1, 8), (1, 1, 1), (8,), (0, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [torch.enable_grad, torch_plans.in_place_of_kernels])
def test_results_have_the_strides_of_a_program_that_is_traced(
    context: Any, dtype: Any, shape: tuple[int, ...]
) -> None:
    operations = torch.ops.cupynorm
    n = shape[-1]
    row = torch.ones(n, dtype=dtype)
    for x in (torch.ones(shape, dtype=dtype), torch.ones(*shape[:-1], n + 4, dtype=dtype)[..., :n]):

        def both(x: Any, weight: Any) -> Any:
            options = (1, "layer_norm", 1e-5, False, RELU, None, None, True)
            forward = operations.norm_forward(x, x, weight, weight, *options)
            _, mean, rstd, bitmask, total = forward
            kept = (weight, mean, rstd, bitmask)
            options = (1, "layer_norm", 1e-5, False, None, torch.float64, dtype)
            return *forward, *operations.norm_backward(x, total, x, *kept, *options)

        with FakeTensorMode() as mode:
            expected = both(mode.from_tensor(x), mode.from_tensor(row))
        with context():
            actual = both(x, row)
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape
            # torch does not look at the strides of axes of one element.
            steps = [
                [s for n, s in zip(t.shape, t.stride(), strict=True) if n != 1] for t in (a, b)
            ]
            assert steps[0] == steps[1]


def test_bits_of_more_than_32_axes() -> None:
    x = drawn(*(1,) * 30, 2, 1, 3, 8)
    (dx,) = torch.autograd.grad(rms_norm(x, relu=RELU).sum(), x)
    flat = x.detach().reshape(6, 8).requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm(flat, relu=RELU).sum(), flat)
    assert_same_bits(dx, expected.reshape(x.shape))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    x, weight, bias = operands()
    expected = torch.autograd.grad(ours("layer_norm", x, weight, bias).sum(), (x, weight))
    checkpoint(ours, "layer_norm", x, weight, bias, use_reentrant=reentrant).sum().backward()
    assert_close((x.grad, weight.grad), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_forward_mode_by_transforms(norm: str) -> None:
    arguments = tuple(t.detach() for t in operands())
    along = tuple(drawn(*t.shape, seed=9 + i).detach() for i, t in enumerate(arguments))
    mine = functools.partial(ours, norm)

    def plain(*operands: Any) -> Any:
        return formula(norm, *operands) if norm == "rms_norm" else by_hand(*operands).clamp(*RELU)

    assert_close(jvp(mine, arguments, along), jvp(plain, arguments, along))

    def scalar(function: Any) -> Any:
        return lambda *a: (function(*a).sin() * function(*a)).sum()

    for derivative in (
        hessian(scalar(mine), (0, 1, 2)),
        jacrev(jacfwd(scalar(mine), (0, 1, 2)), (0, 1, 2)),
    ):
        assert_close(derivative(*arguments), hessian(scalar(plain), (0, 1, 2))(*arguments))
    of_examples = vmap(lambda x, t: jvp(mine, (x, *arguments[1:]), (t, *along[1:]))[1])
    assert_close(of_examples(arguments[0], along[0]), jvp(plain, arguments, along)[1])
    for f in (mine, lambda *a: getattr(cupynorm.torch, norm)(*a)):  # with bits and without
        traced = make_fx(lambda *t, f=f: jvp(f, arguments, t)[1])(*along)  # with operations
        assert_close(traced(*along), jvp(f, arguments, along)[1])
    with pytest.raises(NotImplementedError, match=r"use jacfwd\(jacrev\(f\)\) for "):
        jacfwd(jacfwd(scalar(mine)))(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tangents_have_the_dtypes_of_their_arrays(dtype: torch.dtype) -> None:
    x, residual, weight, bias = (t.detach() for t in summands(dtype, torch.float32))

    def function(x: Any, residual: Any) -> Any:
        return fused("layer_norm", x, residual, weight, bias)

    (y, total), (of_y, of_total) = jvp(function, (x, residual), (x, residual))
    assert (of_y.dtype, of_total.dtype) == (y.dtype, total.dtype)
    with torch.no_grad():  # nothing is kept for a backward pass, but the bits are
        assert_same_bits(jvp(function, (x, residual), (x, residual))[1][0], of_y)
    wide = [t.double() for t in (x, residual)]
    _, exact = jvp(lambda x, r: function(x, r)[0], tuple(wide), tuple(wide))
    several = 64 * torch.finfo(torch.float32).eps  # 16 roundings of values up to 4
    torch.testing.assert_close(of_y, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=several)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("way", ["linearize", "mode", "subclass", "negated"])
@pytest.mark.parametrize("norm", NORMS)
def test_forward_mode_where_torch_sees_the_call(norm: str, way: str) -> None:
    x, weight, bias = (t.detach() for t in operands())
    along = drawn(*x.shape, seed=9).detach()

    def function(x: Any) -> Any:
        return ours(norm, x, weight, bias)

    _, expected = jvp(function, (x,), (along,))
    if way == "linearize":
        _, push = linearize(function, x)
        assert_close(push(along), expected)
        return
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, along)
        if way == "subclass":
            dual = dual.as_subclass(Subclass)
        if way == "negated":
            dual = forward_ad.make_dual(torch.complex(x, -x), torch.complex(x, -along)).conj().imag
        with FlopCounterMode(display=False) if way == "mode" else contextlib.nullcontext():
            y = function(dual)
        assert_close(forward_ad.unpack_dual(y).tangent, expected)


class Doubled(torch.Tensor):
    """Its results are twice those of the operation."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None):
        results = super().__torch_function__(function, types, arguments, named or {})
        if getattr(function, "_opname", "") != "norm_forward":
            return results
        return [2 * results[0], *results[1:]]


@pytest.mark.parametrize("norm", NORMS)
def test_a_subclass_has_its_own_way_with_a_call(norm: str) -> None:
    x, weight, bias = operands()
    dy = drawn(*x.shape, seed=9).detach()
    y = ours(norm, x, weight, bias)
    (expected,) = torch.autograd.grad(y, x, dy)
    changed = ours(norm, x.as_subclass(Subclass), weight, bias)
    changed += 1  # results are no views
    assert_same_bits(changed.as_subclass(torch.Tensor), y + 1)
    assert_same_bits(torch.autograd.grad(changed, x, dy)[0].as_subclass(torch.Tensor), expected)
    twice = ours(norm, x.as_subclass(Doubled), weight, bias).as_subclass(torch.Tensor)
    assert_same_bits(twice, 2 * y)
    (dx,) = torch.autograd.grad(twice, x, dy)
    assert_same_bits(dx.as_subclass(torch.Tensor), 2 * expected)


def test_forward_mode_of_an_exported_norm_is_refused() -> None:
    x = torch.randn(2, 8)
    exported = torch.export.export(RMSNorm(8), (x,)).module()
    with pytest.raises(NotImplementedError, match=r"exported norm of .* has no jvp"):
        jvp(exported, (x,), (x,))
    # Values without a tangent work.
    _, tangent = jvp(lambda v: v * exported(x), (x,), (x,))
    assert_close(tangent, x * exported(x))


# ---- a residual ----------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IN_PLACE_OF_A_GPU = [torch.enable_grad, torch_plans.in_place_of_kernels]


def summands(dtype: Any = torch.float64, of_residual: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return x, a residual, weight and bias."""
    x, weight, bias = operands(dtype)
    return x, drawn(3, 5, 8, dtype=of_residual or dtype, seed=4), weight, bias


def fused(norm: str, x: Any, residual: Any, weight: Any, bias: Any, **options: Any) -> Any:
    function = getattr(cupynorm.torch, norm)
    return function(x, weight, bias, residual=residual, relu=RELU, **options)


def unfused(norm: str, x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    return formula(norm, x + residual, weight, bias), x + residual


@pytest.mark.parametrize("context", IN_PLACE_OF_A_GPU)
@pytest.mark.parametrize("of_total", [None, *DTYPES])
@pytest.mark.parametrize("of_residual", DTYPES)
@pytest.mark.parametrize("of_x", DTYPES)
def test_a_residual_is_added_first_and_the_sum_returned(
    of_x: Any, of_residual: Any, of_total: Any, context: Any
) -> None:
    x, residual, weight, bias = (t.detach() for t in summands(of_x, of_residual))
    total = of_total or of_residual
    wide = torch.float64 in (of_x, of_residual, total)
    compute = torch.float64 if wide else torch.float32
    expected = _formulas.round_once(x.to(compute) + residual.to(compute), total)
    with context():
        for leaf in (x, x.clone().requires_grad_()):
            y, s = fused("rms_norm", leaf, residual, weight, bias, residual_dtype=of_total)
            assert y.dtype == of_x
            assert_same_bits(s, expected)
            assert_same_bits(
                y, rms_norm(expected, weight, bias, relu=RELU, out_dtype=of_x).detach()
            )


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_with_a_residual(norm: str, wanted: tuple[int, ...]) -> None:
    """Gradients of y and of the sum, and of each alone."""

    def function(*arguments: Any) -> Any:
        results = fused(norm, *arguments, eps=0.1)
        return tuple(results[i] for i in wanted)

    assert gradcheck(function, summands(), **FORWARD_TOO)
    assert gradgradcheck(function, summands(), check_fwd_over_rev=True, fast_mode=FAST)
    without = summands()[:2]
    assert gradgradcheck(
        lambda x, residual: function(x, residual, None, None), without, fast_mode=FAST
    )


@pytest.mark.parametrize("norm", NORMS)
def test_second_derivatives_of_gradients_of_two_dtypes(norm: str) -> None:
    x, residual, weight, bias = summands(torch.float64, torch.float32)
    along = drawn(3, 5, 8, seed=5).detach()
    found = []
    for function in (
        lambda *a: fused(norm, *a, residual_dtype=torch.float64),
        lambda *a: unfused(norm, *a),
    ):
        results = function(x, residual, weight, bias)
        first = torch.autograd.grad(total(results), (x, residual), create_graph=True)
        assert [t.dtype for t in first] == [torch.float64, torch.float32]
        for gradient in first:
            slopes = torch.autograd.grad((gradient * along).sum(), (x, weight), retain_graph=True)
            found.append(slopes)
    half = len(found) // 2
    torch.testing.assert_close(found[:half], found[half:], rtol=1e-5, atol=1e-5)


def test_third_derivatives_with_a_residual() -> None:
    x, residual, weight, bias = (t[..., :3].detach().requires_grad_() for t in summands())

    def third(f: Any) -> Any:
        y, s = f("rms_norm", x, residual, weight, bias)
        total = y * s
        for leaf in (x, residual, x):
            (total,) = torch.autograd.grad(total.pow(3).sum(), leaf, create_graph=True)
        return total

    assert_close(third(fused), third(unfused))


@pytest.mark.parametrize("context", IN_PLACE_OF_A_GPU)
@pytest.mark.parametrize("given", ["both", "dy", "ds"])
@pytest.mark.parametrize("leaves", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("of_residual", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_of_what_wants_them_in_its_dtype(
    of_residual: Any, leaves: tuple[int, ...], given: str, context: Any
) -> None:
    tensors = [t.detach() for t in summands(torch.bfloat16, of_residual)]
    for i in leaves:
        tensors[i].requires_grad_()
    with context() as plans:
        y, s = fused("layer_norm", *tensors)
        assert s.requires_grad == (0 in leaves or 1 in leaves)
        dy, ds = torch.randn(3, 5, 8).to(y.dtype), torch.randn(3, 5, 8).to(s.dtype)
        pairs = [(y, dy), (s, ds)] if given == "both" else [(y, dy)] if given == "dy" else [(s, ds)]
        pairs = [(result, gradient) for result, gradient in pairs if result.requires_grad]
        if not pairs:
            return
        torch.autograd.backward(*zip(*pairs, strict=True))
    has_dy, has_ds = (any(of is result for of, _ in pairs) for result in (y, s))
    kept = _kernels.run(FORWARD, tuple(t.detach() for t in tensors), (*TOLD_OF_ONE, True))
    exact = torch.zeros(3, 5, 8, dtype=torch.float64)
    sums: Any = (None, None)
    if has_dy:
        read = (dy, s.detach(), ds if has_ds else None, tensors[2].detach(), *kept[1:4])
        told = (1, "layer_norm", 1e-5, False, torch.float64, None, torch.bfloat16)
        exact, *sums, _ = _kernels.run(BACKWARD, read, told)
    elif has_ds:
        exact = ds.double()
    for i, expected in enumerate((exact, exact, *sums)):
        gradient = tensors[i].grad
        assert (gradient is None) == (i not in leaves or (i > 1 and not has_dy))
        if gradient is not None:
            assert gradient.dtype == tensors[i].dtype
            assert_same_bits(gradient, _formulas.round_once(expected, gradient.dtype))
    if plans is not None:
        spec = plans.made[-1].spec
        assert len(plans.launches) == 1 + has_dy
        if has_dy:
            both = {0, 1} <= set(leaves) and of_residual != torch.bfloat16
            assert spec.dresidual == (str(of_residual).rpartition(".")[2] if both else None)
            assert (spec.dresidual_out is not None) == has_ds


# The arguments that `fused` gives layer_norm for one axis.
TOLD_OF_ONE = (1, "layer_norm", 1e-5, False, RELU, None, None)


@pytest.mark.parametrize("norm", NORMS)
def test_of_a_residual_only_the_sum_is_kept(norm: str) -> None:
    x, residual, weight, bias = summands(torch.float32)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, s = fused(norm, x, residual, weight, bias)
    addresses = {tensor.data_ptr() for tensor in kept}
    assert {s.data_ptr(), weight.data_ptr()} <= addresses
    assert not {x.data_ptr(), residual.data_ptr(), y.data_ptr()} & addresses
    assert len(kept) == (4 if norm == "rms_norm" else 5)
    y, s = fused(norm, x, residual, weight, bias)
    with torch.no_grad():
        s.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


AS_SUMMANDS = {
    "leaves": lambda a, b: (a, b),
    "a view": lambda a, b: (a.view(3, 5, 8), b),
    "views": lambda a, b: (a.view(3, 5, 8), b.view(3, 5, 8)),
    "twice one": lambda a, b: (a, a),
    "views of one": lambda a, b: (a.view(3, 5, 8), a.view(3, 5, 8)),
    "what is used again": lambda a, b: (a * 2, b * 3),
}


@pytest.mark.parametrize("given", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("how", AS_SUMMANDS)
@pytest.mark.parametrize("norm", NORMS)
def test_one_gradient_of_two_is_added_to_in_neither(
    norm: str, how: str, given: tuple[int, ...]
) -> None:
    leaves, results = summands()[:2], []
    for _ in range(3):
        x, residual = AS_SUMMANDS[how](*leaves)
        of_norm = fused(norm, x, residual, None, None)
        again = x.sin().sum() + residual.exp().sum() if "again" in how else 0
        before = [0 if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        sum([of_norm[i].pow(3).sum() for i in given], again).backward()
        used = [leaf for leaf in leaves if leaf.grad is not None]
        results.append([leaf.grad - had for leaf, had in zip(used, before, strict=False)])
    for later in results[1:]:
        assert_close(later, results[0])
    memory = {leaf.grad.untyped_storage().data_ptr() for leaf in used}
    assert len(memory) == len(used) == (1 if "one" in how else 2)


OVER_SUMMANDS: dict[str, Any] = {
    "vmap": lambda f: vmap(f, (0, 0, None, None)),
    "vmap of x alone": lambda f: vmap(f, (1, None, None, None)),
    "vmap of the residual alone": lambda f: vmap(f, (None, 1, None, None)),
    "vmap over weights": lambda f: vmap(f, (None, 1, 0, None)),
    "grad": lambda f: grad(lambda *a: total(f(*a)), (0, 1, 2, 3)),
    "gradients of each example": lambda f: vmap(
        grad(lambda *a: total(f(*a)), (0, 1, 2, 3)), (0, 0, None, None)
    ),
    "gradients of each residual": lambda f: vmap(
        grad(lambda *a: total(f(*a)), (0, 1, 2)), (None, 1, None, None)
    ),
    "jacobians": lambda f: jacrev(f, (0, 1, 2)),
    "second derivatives": lambda f: jacrev(grad(lambda *a: total(f(*a)), 1), (0, 1, 2)),
    "pull-backs of both": lambda f: (
        lambda *a: torch.func.vjp(f, *a)[1](
            tuple(torch.full((3, 5, 8), n, dtype=torch.float64) for n in (2, 3))
        )
    ),
    "many at once": lambda f: (
        lambda *a: vmap(torch.func.vjp(f, *a)[1])(
            (torch.ones(2, 3, 5, 8, dtype=torch.float64),) * 2
        )
    ),
}


def total(results: Any) -> Any:
    y, s = results
    return y.pow(3).sum() + s.pow(2).sum()


@pytest.mark.parametrize("context", IN_PLACE_OF_A_GPU)
@pytest.mark.parametrize("transform", OVER_SUMMANDS)
@pytest.mark.parametrize("norm", NORMS)
def test_transforms_with_a_residual(norm: str, transform: str, context: Any) -> None:
    given = [t.detach() for t in summands()]
    if "weights" in transform:
        given[2] = drawn(5, 8, seed=1).detach()
    if any(words in transform for words in ("over weights", "each residual", "residual alone")):
        given[0] = given[0][:, 0]
    if "x alone" in transform:
        given[1] = given[1][:, 0]
    over = OVER_SUMMANDS[transform]
    function = over(lambda *a: fused(norm, *a))
    expected = over(lambda *a: unfused(norm, *a))(*given)
    with context():
        assert_close(function(*given), expected)
        # Before 2.13, torch itself cannot trace the jacobians of several results.
        if transform != "jacobians" or torch.__version__ >= "2.13":
            assert_close(make_fx(function)(*given)(*given), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_with_a_residual_that_autograd_batches(norm: str) -> None:
    given = summands()
    many = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    found = []
    for function in (fused, unfused):
        options = {"is_grads_batched": True, "create_graph": True, "retain_graph": True}
        y, s = function(norm, *given)
        both = torch.autograd.grad((y, s), given, (many, 2 * many), **options)
        of_sum = torch.autograd.grad(s, given[:2], many, **options)
        second = torch.autograd.grad(both[1].pow(2).sum(), given[:3])
        found.append((*both, *of_sum, *second))
    assert_close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_a_residual(reentrant: bool) -> None:
    given = summands()
    expected = torch.autograd.grad(total(fused("layer_norm", *given)), given)
    total(checkpoint(fused, "layer_norm", *given, use_reentrant=reentrant)).backward()
    assert_close(tuple(t.grad for t in given), expected)


def test_a_vmap_with_a_residual_is_one_launch() -> None:
    given = [t.detach() for t in summands()]
    each = grad(lambda *a: total(fused("layer_norm", *a)), (0, 1))
    with torch_plans.in_place_of_kernels() as plans:
        vmap(each, (0, 0, None, None))(*given)
    assert [launch["m"] for launch in plans.launches] == [15, 15]
    backward = plans.made[-1].spec
    assert (backward.dresidual_out, backward.dresidual) == ("float64", None)


def test_strided_rows_of_a_residual_are_launched_where_they_lie() -> None:
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8, requires_grad=True)
    residual = torch.randn(4, 24)[:, 8:16]
    ds = torch.randn(4, 16)[:, :8]
    with torch_plans.in_place_of_kernels() as plans:
        x.requires_grad_()
        _, s = rms_norm(x, weight, residual=residual.requires_grad_())
        (s * 1).backward(ds)
        y, s = rms_norm(x, weight, residual=residual)
        torch.autograd.backward((y, s), (y.detach(), ds))
    forward, _, backward = plans.launches
    assert (forward["residual"], forward["residual_stride"]) == (residual.data_ptr(), 24)
    assert backward["x"] == s.data_ptr()
    assert (backward["dresidual_out"], backward["dresidual_out_stride"]) == (ds.data_ptr(), 16)
    assert backward["dresidual"] not in (0, backward["dx"])
    specs = [plan.spec for plan in plans.made]
    assert (specs[0].branch, specs[0].residual, specs[0].x) == ("bfloat16", "float32", "float32")
    assert (specs[-1].dx, specs[-1].dresidual) == ("bfloat16", "float32")


def test_scratch_of_a_call_with_a_wider_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = torch.randn(5, 8).bfloat16(), torch.randn(5, 8)
    made: list[Any] = []

    with torch_plans.in_place_of_kernels() as plans:
        original = _kernels._empty

        def empty(*arguments: Any) -> Any:
            made.append(original(*arguments))
            return made[-1]

        monkeypatch.setattr(_kernels, "_empty", empty)
        rms_norm(x, residual=residual)
        total, y, scratch = sorted(made, key=lambda tensor: -tensor.nbytes)
        assert scratch.nbytes == plans.made[0].scratch_bytes(5)
        assert (y.dtype, total.dtype) == (x.dtype, residual.dtype)


def test_a_call_whose_kernel_stands_in_is_prepared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(5, 8)
    with torch_plans.in_place_of_kernels() as plans:
        load = _kernels._load

        def standing_in(*arguments: Any) -> Any:
            plan = load(*arguments)
            plan.stands_in = len(plans.made) <= 2
            return plan

        monkeypatch.setattr(_kernels, "_load", standing_in)
        for _ in range(5):
            rms_norm(x)
    assert [len(plan.launches) for plan in plans.made] == [1, 1, 3]


@pytest.mark.parametrize("norm", NORMS)
def test_opcheck_with_a_residual(norm: str) -> None:
    operations = torch.ops.cupynorm
    x, residual, weight, bias = summands(torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    for first, dtype in ((x, None), (half, None), (half, torch.float16))[:: one_in(2)]:
        options = (1, norm, 1e-5, False, [0.0, math.inf], None, dtype, True)
        arguments: Any = (first, residual, weight, bias, *options)
        torch.library.opcheck(operations.norm_forward.default, arguments)
        _, mean, rstd, bitmask, s = operations.norm_forward(
            *(t.detach() for t in arguments[:4]), *options
        )
        kept = (weight, mean if norm == "layer_norm" else None, rstd, bitmask)
        dy, ds = (drawn(*x.shape, dtype=t, seed=3) for t in (torch.float32, s.dtype))
        for total, of_x, of_residual in (
            (ds, torch.bfloat16, torch.float32),
            (None, torch.float64, torch.float16),
            (ds, None, None),
        )[:: one_in(2)]:
            options = (1, norm, 1e-5, False, of_x, of_residual, torch.float64)
            arguments = (dy, s.detach().requires_grad_(), total, *kept, *options)
            torch.library.opcheck(operations.norm_backward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_compiled_with_a_residual(norm: str, dtype: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, backend=counter, fullgraph=True, dynamic=True)
    _, _, weight, bias = summands(torch.float32)
    for m in (3, 5, 7):
        x, residual = drawn(m, 8, dtype=dtype), drawn(m, 8, dtype=torch.float32, seed=m)
        leaves = (x, residual, weight, bias)
        found = []
        for function in (compiled, fused):
            results = function(norm, *leaves)
            gradients = torch.autograd.grad(total(results), leaves)
            of_sum = torch.autograd.grad(function(norm, *leaves)[1].sum(), leaves[:2])
            with torch.no_grad():
                found.append((*results, *gradients, *of_sum, *function(norm, *leaves)))
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)
    with pytest.raises(RuntimeError, match="residual must have shape"):
        compiled(norm, x, residual[:, :7], weight, bias)


def test_exported_with_a_residual() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(8)

        def forward(self, x: Any, residual: Any) -> Any:
            return self.norm(x, residual)

    block, given = Block(), [t.detach() for t in summands(torch.bfloat16, torch.float32)[:2]]
    for exported in (
        torch.export.export(block, tuple(given)).module(),
        torch.jit.trace(block, tuple(given), check_trace=False),
    ):
        for a, b in zip(exported(*given), block(*given), strict=True):
            assert_same_bits(a.detach(), b.detach())


def test_autocast_with_a_residual() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            x = torch.empty(4, 8, device="cuda", dtype=torch.float16)
            for dtype in DTYPES:
                y, s = layer_norm(x, residual=x.to(dtype))
                assert (y.dtype, s.dtype) == (torch.float32, dtype)
            y, s = layer_norm(x, residual=x, out_dtype=x.dtype, residual_dtype=torch.float32)
            assert (y.dtype, s.dtype) == (x.dtype, torch.float32)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_modules_with_a_residual(module: Any, affine: bool) -> None:
    norm = module(8, elementwise_affine=affine)
    for x, residual in (
        [t.detach() for t in summands(torch.float32, dtype)[:2]] for dtype in DTYPES[1:]
    ):
        y, s = norm(x, residual)
        assert_same_bits(s, (x + residual).to(residual.dtype))
        if residual.dtype == x.dtype:
            assert_same_bits(y.detach(), norm(s).detach())
        traced = torch.fx.symbolic_trace(norm)
        for arguments in ((x, residual), (x,)):
            torch.testing.assert_close(traced(*arguments), norm(*arguments), rtol=0, atol=0)
    if module is RMSNorm:  # without eps: the epsilon of the dtype that the sum is computed in
        wide = x.double() * 1e-4
        expected = rms_norm(wide, eps=torch.finfo(torch.float64).eps)
        y, _ = rms_norm(wide.float(), residual=wide - wide.float(), eps=None, out_dtype=wide.dtype)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="residual must have shape"):
        norm(x, residual[:2])


def test_a_subclass_sees_the_residual() -> None:
    seen: list[Any] = []

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append((function, args, kwargs))
            return super().__torch_function__(function, types, args, kwargs or {})

    class Proxy:
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            return function, args, kwargs

    x, residual, weight, bias = (t.detach() for t in summands())
    y, s = fused("rms_norm", x, residual.as_subclass(Subclass), weight, bias)
    for a, b in zip((y, s), fused("rms_norm", x, residual, weight, bias), strict=True):
        assert_same_bits(a.as_subclass(torch.Tensor), b)
    proxy = Proxy()
    function, args, kwargs = rms_norm(x, weight, bias, residual=proxy, residual_dtype=x.dtype)
    assert function is rms_norm
    assert [a is b for a, b in zip(args, (x, weight, bias), strict=True)] == [True] * 3
    assert kwargs["residual"] is proxy
    assert kwargs["residual_dtype"] == x.dtype


def test_jagged_tensors_with_a_residual() -> None:
    offsets = torch.tensor([0, 3, 8, 9])
    values = [drawn(9, 8, dtype=torch.float32, seed=i) for i in range(2)]
    x, residual = (torch.nested.nested_tensor_from_jagged(v, offsets) for v in values)
    weight = torch.randn(8)
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    expected = rms_norm(values[0], weight, residual=values[1], residual_dtype=torch.float64)
    for function in (rms_norm, compiled):
        results = function(x, weight, residual=residual, residual_dtype=torch.float64)
        for result, flat in zip(results, expected, strict=True):
            assert result.is_nested
            assert_same_bits(result.values(), flat)
            assert (x + result).shape == x.shape
    gradients = torch.autograd.grad(total([t.values() for t in results]), values)
    for a, b in zip(gradients, torch.autograd.grad(total(expected), values), strict=True):
        assert_same_bits(a, b)
    others = torch.nested.nested_tensor_from_jagged(values[1], torch.tensor([0, 2, 8, 9]))
    with pytest.raises(ValueError, match=r"residual must be of x's shape, .* share its offsets"):
        rms_norm(x, residual=others)
    for one, other, of in ((x, values[1], "a dense tensor"), (x, strided(values), "torch.strided")):
        with pytest.raises(TypeError, match=f"residual must be nested as x, .* got {of}"):
            rms_norm(one, residual=other)
    with pytest.raises(TypeError, match="residual must be a dense tensor, got a nested one"):
        rms_norm(values[0], residual=residual)


def strided(parts: Any) -> Any:
    return torch.nested.nested_tensor([part.detach() for part in parts])


def test_the_gaps_of_jagged_tensors_with_a_residual() -> None:
    memory = [drawn(2, 4, 8, seed=i) for i in range(2)]
    with torch.no_grad():
        memory[1][0, 2:] = math.nan
    begins, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    x = torch.nested.narrow(memory[0], 1, begins, lengths, layout=torch.jagged)
    residual = torch.nested.nested_tensor_from_jagged(
        memory[1].reshape(8, 8), x.offsets(), x.lengths()
    )
    weight = drawn(8, seed=2)
    y, s = rms_norm(x, weight, residual=residual)
    flat = [torch.cat([m[0, :2], m[1, 1:]]) for m in memory]
    expected = rms_norm(flat[0], weight, residual=flat[1])
    for result, of_flat in zip((y, s), expected, strict=True):
        assert_close(torch.cat(result.unbind()), of_flat)
    leaves = (*memory, weight)
    found = torch.autograd.grad(total([torch.cat(t.unbind()) for t in (y, s)]), leaves)
    assert_close(found, torch.autograd.grad(total(expected), leaves))
    elsewhere = torch.nested.nested_tensor_from_jagged(
        memory[1].reshape(8, 8), x.offsets().clone(), x.lengths()
    )
    with pytest.raises(ValueError, match="share its offsets"):
        rms_norm(x, residual=elsewhere)


def test_strided_nested_tensors_with_a_residual() -> None:
    parts = [[drawn(n, 8, dtype=torch.float32, seed=n + i) for n in (3, 5, 1)] for i in range(2)]
    results = rms_norm(strided(parts[0]), residual=strided(parts[1]), residual_dtype=torch.float64)
    pairs = zip(*parts, strict=True)
    expected = [rms_norm(a, residual=b, residual_dtype=torch.float64) for a, b in pairs]
    for result, flat in zip(results, zip(*expected, strict=True), strict=True):
        for one, other in zip(result.unbind(), flat, strict=True):
            assert_same_bits(one, other)
    with pytest.raises(ValueError, match="residual must have parts of shapes"):
        rms_norm(strided(parts[0]), residual=strided(parts[1][:2]))
    nothing = torch.nested.nested_tensor([], dtype=torch.float64)
    y, s = rms_norm(nothing, residual=nothing, residual_dtype=torch.float32)
    assert (y.dtype, s.dtype) == (torch.float64, torch.float32)


def test_dtypes_that_a_backward_operation_is_told() -> None:
    x, rstd = torch.ones(3, 8), torch.ones(3)
    options = {"bias_dtype": None, "dx_dtype": None, "dresidual_dtype": None}
    call = functools.partial(
        torch.ops.cupynorm.norm_backward, *(x, x, None, None, None, rstd, None)
    )
    shared = (1, "rms_norm", 1e-6, False)
    for context in (torch.enable_grad, lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        with context():
            for name in options:
                told = options | {name: torch.int8}
                with pytest.raises(TypeError, match=f"{name} must be float64, .* torch.int8"):
                    call(*shared, told["dx_dtype"], told["dresidual_dtype"], told["bias_dtype"])
            for of_x in (None, torch.float32):
                with pytest.raises(ValueError, match="dresidual_dtype must not be dx's"):
                    call(*shared, of_x, torch.float32, None)
    with pytest.raises(ValueError, match=r"dresidual_out must have shape \(3, 8\), got \(3, 4\)"):
        torch.ops.cupynorm.norm_backward(
            *(x, x, x[:, :4], None, None, rstd, None), *shared, None, None, None
        )


# ---- transforms of functions ---------------------------------------------------------------------


TRANSFORMS = {
    "vmap": lambda f: vmap(f, (1, None, None)),
    "vmap over weights": lambda f: vmap(f, (1, 0, None)),
    "vmap over weights and biases": lambda f: vmap(f, (None, 0, 0)),
    "nested vmap": lambda f: vmap(vmap(f, (0, None, None)), (0, None, None)),
    "grad": lambda f: grad(lambda *a: f(*a).pow(3).sum(), (0, 1, 2)),
    "grad of x through vmap": lambda f: grad(
        lambda *a: vmap(f, (0, None, None))(*a).pow(3).sum(), 0
    ),
    "gradients of each example": lambda f: vmap(
        grad(lambda *a: f(*a).pow(3).sum(), (0, 1, 2)), (0, None, None)
    ),
    "gradients of each model": lambda f: vmap(
        grad(lambda *a: f(*a).pow(3).sum(), (0, 1, 2)), (1, 0, None)
    ),
    "gradients of each example of each batch": lambda f: vmap(
        vmap(grad(lambda *a: f(*a).pow(3).sum(), 1), (0, None, None)), (0, None, None)
    ),
    "jacobians": lambda f: jacrev(f, (0, 1)),
    "second derivatives of each example": lambda f: vmap(
        jacrev(grad(lambda *a: f(*a).pow(3).sum(), 1), 0), (0, None, None)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_transforms(norm: str, transform: str) -> None:
    x, weight, bias = (t.detach() for t in operands())
    if "weights" in transform or "model" in transform:
        weight = drawn(5, 8, seed=1).detach()
        bias = drawn(5, 8, seed=2).detach() if "biases" in transform else bias
    over = TRANSFORMS[transform]
    actual = over(lambda *a: ours(norm, *a))(x, weight, bias)
    assert_close(actual, over(lambda *a: formula(norm, *a))(x, weight, bias))


def test_vmap_of_shared_weights_is_one_launch() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    with torch_plans.in_place_of_kernels() as plans:
        vmap(grad(lambda x, weight: rms_norm(x, weight).sum(), 1), (0, None))(x, weight)
    assert [launch["m"] for launch in plans.launches] == [15, 15]


def test_vmap_over_no_examples() -> None:
    x, affine = torch.randn(0, 3, 8), torch.randn(0, 8)
    assert vmap(rms_norm)(x, affine).shape == (0, 3, 8)
    assert vmap(layer_norm, (None, 0, 0))(torch.randn(3, 8), affine, affine).shape == (0, 3, 8)
    dx, dweight = vmap(grad(lambda *a: layer_norm(*a, relu=(0, 6)).sum(), (0, 1)))(x, affine)
    assert (dx.shape, dweight.shape) == (x.shape, affine.shape)


TRACED = {
    "grad": lambda f: grad(lambda *a: f(*a).pow(3).sum(), (0, 1, 2)),
    "jacobian": lambda f: jacrev(f, 1),
    "second derivative": lambda f: jacrev(grad(lambda *a: f(*a).pow(3).sum(), 1), 0),
}


@pytest.mark.parametrize(
    ("norm", "transform", "mode"), in_pairs(NORMS, TRACED, ("real", "fake", "symbolic"))
)
def test_a_trace_of_a_transform_has_the_operations(norm: str, transform: str, mode: str) -> None:
    function = TRACED[transform](lambda *a: ours(norm, *a))
    given, *others = ([t.detach() for t in operands()] for _ in range(2))
    traced = make_fx(function, tracing_mode=mode)(*given)
    for tensor in others[0]:
        tensor.mul_(1.5)
    assert_close(traced(*others[0]), function(*others[0]))


@pytest.mark.parametrize("norm", NORMS)
def test_a_transform_on_the_meta_device(norm: str) -> None:
    arrays = [t.detach().to("meta") for t in operands()]
    gradients = grad(lambda *a: ours(norm, *a).sum(), (0, 1, 2))(*arrays)
    assert [(g.shape, g.device) for g in gradients] == [(a.shape, a.device) for a in arrays]


@pytest.mark.parametrize("value", [0.0, 0.1, 1e17, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("n", [1, 7, 8, 1000])
def test_formulas_of_rows_of_equal_values(n: int, value: float) -> None:
    # xhat is 0. Its gradient is that of x - mean, times 1 / sqrt(eps). The same goes for the
    # gradient through dweight.
    x = torch.full((2, n), value, requires_grad=True)
    weight, along = torch.ones(n, requires_grad=True), torch.linspace(-1, 2, n)
    (dweight,) = torch.autograd.grad(layer_norm(x, weight).sum(), weight, create_graph=True)
    (slope,) = torch.autograd.grad(dweight @ along, x)
    expected = (along - along.mean()).expand(2, n) / 1e-5**0.5
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-2)
    of_each = vmap(grad(lambda w, x: layer_norm(x, w).sum()), (None, 0))(weight, x.detach())
    assert torch.equal(of_each, torch.zeros(2, n))


@pytest.mark.parametrize(
    ("scale", "shift", "eps"), [(1e25, 0, 1e-5), (1e-25, 0, 0.0), (1, 1e6, 1e-5)]
)
@pytest.mark.parametrize("norm", NORMS)
def test_formulas_are_as_stable_as_kernels(
    norm: str, scale: float, shift: float, eps: float
) -> None:
    x, weight = (scale * drawn(3, 4, 8) + shift).detach().float(), drawn(8, seed=1).detach().float()

    def weight_gradient(x: Any, weight: Any) -> Any:
        cubes = getattr(cupynorm.torch, norm)(x, weight, eps=eps).pow(3)
        return torch.autograd.grad(cubes.sum(), weight, create_graph=True)[0]

    def of_each(x: Any, weight: Any) -> Any:
        return vmap(
            grad(lambda w, x: getattr(cupynorm.torch, norm)(x, w, eps=eps).pow(3).sum()), (None, 0)
        )(weight, x)

    def slope(x: Any, weight: Any) -> Any:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(weight_gradient(x, weight).sum(), (x, weight))

    wide = x.double(), weight.double()
    found = [of_each(x, weight), *slope(x, weight)]
    for actual, expected in zip(found, [of_each(*wide), *slope(*wide)], strict=True):
        largest = expected.abs().max()
        torch.testing.assert_close(actual.double() / largest, expected / largest, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_formulas_round_float64_once(dtype: Any) -> None:
    step = torch.finfo(dtype).eps
    above_a_tie = torch.tensor([1.0, -1.0], dtype=torch.float64) * (1 + step / 2 + 2.0**-40)
    expected = torch.tensor([1 + step, -1 - step], dtype=dtype)
    x = torch.ones(3, 2, dtype=torch.float64)  # so xhat is 1 too, and P(a) is a
    weight, bias = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)

    def loss(weight: Any, bias: Any, x: Any) -> Any:
        return (rms_norm(x, weight, bias, eps=0) * above_a_tie).sum()

    for gradient in vmap(grad(loss, (0, 1)), (None, None, 0))(weight, bias, x[:, None]):
        assert_same_bits(gradient, expected.expand(3, 2))

    dy = torch.ones(1, 2, dtype=dtype, requires_grad=True)
    x, weight = x[:1].requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight, eps=0, out_dtype=dtype)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    for gradient in torch.autograd.grad(dx, (dy, weight), above_a_tie[None]):
        assert_same_bits(gradient.flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_round_once(dtype: Any) -> None:
    info = torch.finfo(dtype)
    sizes = torch.logspace(-150, 150, 1201, 2, dtype=torch.float64)
    steps = (info.smallest_normal * info.eps * torch.arange(0, 9, 0.25)).double()
    around = torch.cat([torch.tensor([1, 1 + info.eps / 2, info.max, math.inf]), steps]).double()
    values = torch.cat([sizes, *(around * (1 + shift) for shift in (-(2.0**-40), 0, 2.0**-40))])
    values = torch.cat([values, -values, torch.tensor([math.nan])]).requires_grad_()
    rounded = _formulas.round_once(values, dtype)
    expected = round_once(values.detach().numpy(), to_numpy(rounded).dtype)
    np.testing.assert_array_equal(to_numpy(rounded.double()), expected.astype(np.float64))
    signs = torch.signbit(rounded), torch.signbit(values)
    assert torch.equal(*(sign[:-1] for sign in signs))  # for all but the NaN
    rounded.sum().backward()
    assert bool((values.grad == 1).all())


# ---- tensors whose memory does not say what their values are -------------------------------------


def outlived(tensor: Any, transform: Any = grad) -> Any:
    """Return what stands for a tensor after the transform around it has ended."""
    kept: list[Any] = []
    transform(lambda t: kept.append(t) or t.sum())(tensor)
    return kept[0]


def zeros(tensor: Any) -> Any:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# Tensors that stand for a tensor's values, or for as many zeros.
STANDING_FOR = {
    "negated": lambda t: torch._neg_view(-t),
    "of a conjugate": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "zeros": zeros,
    "negated zeros": lambda t: torch._neg_view(zeros(t)),
    "outlived": outlived,
    "outlived twice": lambda t: outlived(outlived(t)),
    "outlived and negated": lambda t: outlived(torch._neg_view(-t)),
}


def recorded(f: Any, given: Any, dy: Any, leaves: Any, **options: Any) -> tuple[Any, ...]:
    found = torch.autograd.grad(f(*given), leaves, dy, materialize_grads=True, **options)
    return tuple(found)


def recorded_twice(f: Any, given: Any, dy: Any, leaves: Any) -> tuple[Any, ...]:
    first = recorded(f, given, dy, leaves, create_graph=True)
    total = sum(g.pow(2).sum() for g in first)
    return *first, *torch.autograd.grad(total, leaves, materialize_grads=True)


def without_gradients(f: Any, given: Any, dy: Any, leaves: Any) -> Any:
    with torch.no_grad():
        return f(*given)


def in_a_dispatch_mode(f: Any, given: Any, dy: Any, leaves: Any) -> Any:
    with Seen():
        return recorded(f, given, dy, leaves)


def of_each_example(f: Any, given: Any, dy: Any, leaves: Any) -> Any:
    one = grad(lambda x, weight, bias, dy: (f(x, weight, bias) * dy).sum(), (0, 1, 2))
    return vmap(one, (0, None, None, 0))(*given, dy)


def of_a_trace(f: Any, given: Any, dy: Any, leaves: Any) -> Any:
    return make_fx(f)(*(torch.ones(t.shape, dtype=t.dtype) for t in given))(*given)


def of_jagged_values(f: Any, given: Any, dy: Any, leaves: Any) -> Any:
    x, *affine = given
    offsets = torch.tensor([0, 2, 3])
    return f(torch.nested.nested_tensor_from_jagged(x, offsets), *affine).values()


WAYS: dict[str, Any] = {
    "without gradients": without_gradients,
    "gradients": recorded,
    "gradients of the second order": recorded_twice,
    "gradients that autograd batches": lambda f, given, dy, leaves: recorded(
        f, given, torch.stack([dy, 2 * dy]), leaves, is_grads_batched=True
    ),
    "checkpointed": lambda f, *given: recorded(
        lambda *a: checkpoint(f, *a, use_reentrant=False), *given
    ),
    "in a dispatch mode": in_a_dispatch_mode,
    "traced": of_a_trace,
    "jagged": of_jagged_values,
    "vmap": lambda f, given, dy, leaves: vmap(f, (0, None, None))(*given),
    "vjp": lambda f, given, dy, leaves: torch.func.vjp(f, *given)[1](dy),
    "gradients of each example": of_each_example,
    "compiled": lambda f, given, dy, leaves: torch.compile(f, backend="aot_eager")(*given),
}


@pytest.mark.parametrize(
    ("kind", "way", "context"),
    in_pairs(STANDING_FOR, WAYS, (torch.enable_grad, torch_plans.in_place_of_kernels)),
)
def test_what_stands_for_a_tensor_has_its_values(kind: str, way: str, context: Any) -> None:
    leaves = operands()
    plain = [*leaves, drawn(3, 5, 8, seed=3).detach()]
    # torch itself cannot multiply by a dy that outlived two transforms, inside others.
    count = 3 if (kind, way) == ("outlived twice", "gradients of each example") else 4
    # The norms take turns from one kind and way to the next.
    turn = list(STANDING_FOR).index(kind) + list(WAYS).index(way)
    for i in range(count):
        norm = NORMS[(turn + i) % 2]
        given = list(plain)
        given[i] = STANDING_FOR[kind](plain[i])
        meant = list(plain)
        if "zeros" in kind:
            meant[i] = torch.zeros_like(plain[i])
        expected = WAYS[way](lambda *a, n=norm: formula(n, *a), meant[:3], meant[3], leaves)
        with context():
            actual = WAYS[way](lambda *a, n=norm: ours(n, *a), given[:3], given[3], leaves)
        assert_close(actual, expected)


def test_a_tensor_of_functionalize_that_outlived_it_is_computed_on_as_torch_does() -> None:
    x = torch.randn(3, 8)
    expected = rms_norm(x)
    for context in (torch.enable_grad, torch_plans.in_place_of_kernels):
        with context():
            y = rms_norm(outlived(x, torch.func.functionalize))
        values = torch._from_functional_tensor(y) if torch._is_functional_tensor(y) else y
        assert_same_bits(values, expected)


@pytest.mark.parametrize("context", [torch.enable_grad, torch_plans.in_place_of_kernels])
def test_what_has_no_memory_is_refused_by_name(context: Any) -> None:
    given = {"x": torch.ones(2, 3, 8), "weight": torch.ones(8), "bias": torch.ones(8)}
    example = outlived(torch.ones(4, 2, 3, 8), vmap)
    row = outlived(torch.ones(4, 8), vmap)
    for name, tensor in given.items():
        freed = torch.ones_like(tensor)
        freed.untyped_storage().resize_(0)
        for recorded in (False, True):
            x = given["x"].clone().requires_grad_(recorded)
            with context():
                with pytest.raises(ValueError, match=f"{name} must have memory, got .* address 0"):
                    rms_norm(**given | {"x": x, name: freed})
                words = rf"{name} must not outlive the torch.func.vmap"
                with pytest.raises(ValueError, match=words):
                    rms_norm(**given | {"x": x, name: example if name == "x" else row})
    x = given["x"].clone().requires_grad_()
    with context():
        y = rms_norm(x)
        for create_graph in (False, True):
            with pytest.raises(ValueError, match=r"dy must not outlive the torch.func.vmap"):
                torch.autograd.grad(y, x, example, create_graph=create_graph)
        freed = torch.ones_like(y)
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="dy must have memory"):
            torch.autograd.grad(y, x, freed)


PULLED: dict[str, Any] = {
    "once": lambda f, given, dy: torch.func.vjp(f, *given)[1](dy),
    "again": lambda f, given, dy: (lambda pull: (pull(dy), pull(2 * dy)))(
        torch.func.vjp(f, *given)[1]
    ),
    "without recording": lambda f, given, dy: torch.no_grad()(torch.func.vjp(f, *given)[1])(dy),
    "beside something else": lambda f, given, dy: torch.func.vjp(
        lambda *a: (f(*a), a[0] + 1), *given, has_aux=True
    )[1](dy),
    "of the bias": lambda f, given, dy: torch.func.vjp(lambda bias: f(*given[:2], bias), given[2])[
        1
    ](dy),
    "of the weight": lambda f, given, dy: torch.func.vjp(
        lambda w: f(given[0], w, given[2]), given[1]
    )[1](dy),
    "many at once": lambda f, given, dy: vmap(torch.func.vjp(f, *given)[1])(
        torch.stack([dy, 2 * dy])
    ),
    "of a gradient": lambda f, given, dy: torch.func.vjp(
        lambda *a: grad(lambda x: (f(x, *a[1:]) * dy).sum())(a[0]), *given
    )[1](dy),
    "of a pull-back": lambda f, given, dy: torch.func.vjp(
        lambda dy, *a: torch.func.vjp(f, *a)[1](dy)[0], dy, *given
    )[1](dy),
    "within grad": lambda f, given, dy: grad(
        lambda x: torch.func.vjp(f, x, *given[1:])[1](dy)[0].pow(2).sum()
    )(given[0]),
    "and differentiated": lambda f, given, dy: torch.autograd.grad(
        sum(g.pow(2).sum() for g in torch.func.vjp(f, *given)[1](dy)), given[:2]
    ),
    "of each example": lambda f, given, dy: torch.func.vjp(
        lambda *a: vmap(f, (0, None, None))(*a), *given
    )[1](dy),
    "jacrev": lambda f, given, dy: jacrev(lambda x: torch.func.vjp(f, x, *given[1:])[1](dy)[0])(
        given[0]
    ),
}


@pytest.mark.parametrize("context", [torch.enable_grad, torch_plans.in_place_of_kernels])
@pytest.mark.parametrize("how", PULLED)
@pytest.mark.parametrize("norm", NORMS)
def test_pull_backs_of_vjp(norm: str, how: str, context: Any) -> None:
    given, dy = operands(), drawn(3, 5, 8, seed=3).detach()
    expected = PULLED[how](lambda *a: formula(norm, *a), given, dy)
    with context():
        actual = PULLED[how](lambda *a: ours(norm, *a), given, dy)
    assert_close(actual, expected)


# ---- operations of torch.library -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "dtype", "count", "relu"),
    in_pairs(NORMS, (torch.float32, torch.bfloat16), range(3), (None, [0.0, math.inf])),
)
def test_opcheck(norm: str, dtype: Any, count: int, relu: Any) -> None:
    """With so many of weight and bias."""
    operations = torch.ops.cupynorm
    x, weight, bias = operands(torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    w, b = weight if count else None, bias if count == 2 else None
    options = (1, norm, 1e-5, False, relu, torch.float32, None, True)
    torch.library.opcheck(operations.norm_forward.default, (x, None, w, b, *options))
    _, mean, rstd, bitmask, _ = operations.norm_forward(x.detach(), None, w, b, *options)
    kept = (mean if norm == "layer_norm" else None, rstd, None if relu is None else bitmask)
    dy = drawn(*x.shape, dtype=torch.float32, seed=3)
    options = (1, norm, 1e-5, False, None, None, None if b is None else b.dtype)
    arguments = (dy, x, None, w, *kept, *options)
    torch.library.opcheck(operations.norm_backward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_inference_has_no_gradient(norm: str, dtype: Any) -> None:
    operations = torch.ops.cupynorm
    x, weight, _ = operands(torch.float32)
    x = x.detach().to(dtype).requires_grad_()
    inference = (1, norm, 1e-5, False, None, None, None, False)
    y, *_ = operations.norm_forward(x, None, weight, None, *inference)
    with pytest.raises(RuntimeError, match="training=False"):
        y.sum().backward()
    torch.library.opcheck(
        operations.norm_forward.default, (x.detach(), None, weight.detach(), None, *inference)
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("norm", NORMS)
def test_compiled_once_for_any_batch(norm: str, backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    def block(x: Any, weight: Any, bias: Any) -> Any:
        return 2 * getattr(cupynorm.torch, norm)(x, weight, bias, relu=(0, math.inf))

    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    _, weight, bias = operands(torch.float32)
    for m in (3, 5, 7, 13):
        x, dy = drawn(m, 8, dtype=torch.float32, seed=m), torch.randn(m, 8)
        y, expected = compiled(x, weight, bias), block(x, weight, bias)
        assert_same_bits(y, expected)
        for a, b in zip(
            torch.autograd.grad(y, (x, weight, bias), dy),
            torch.autograd.grad(expected, (x, weight, bias), dy),
            strict=True,
        ):
            assert_same_bits(a, b)
    # dynamo also compiles an empty graph of what it takes for constant.
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes) > 1]) == 1
    with torch.no_grad():
        assert_same_bits(compiled(x, weight, bias), block(x, weight, bias))


def test_compiled_once_for_any_width_with_a_relu() -> None:
    compiled = torch.compile(layer_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    # Compiled for the first width, for widths with bitmasks of several bytes, and never again.
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for n in (8, 24, 40, 56, 72, 88):
            x, weight = drawn(4, n, dtype=torch.float32), torch.randn(n)
            assert_same_bits(
                compiled(x, weight, relu=RELU).detach(), layer_norm(x, weight, relu=RELU).detach()
            )


@pytest.mark.parametrize("norm", NORMS)
def test_a_compiled_program_calls_the_kernels_at_once(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(getattr(cupynorm.torch, norm), backend="aot_eager", fullgraph=True)
    x, weight, bias = operands(torch.float32)
    compiled(x, weight, bias).sum().backward()
    with torch.no_grad():
        expected = compiled(x, weight, bias)

    def fail() -> None:
        raise AssertionError("passed on by way of the dispatcher")

    monkeypatch.setattr(torch._C, "_AutoDispatchBelowAutograd", fail)
    compiled(x, weight, bias).sum().backward()
    with torch.no_grad():
        assert_same_bits(compiled(x, weight, bias), expected)
    # With gradients it does go through the dispatcher: autograd records it.
    options = (1, norm, 1e-5, False, None, None, None, True)
    with pytest.raises(AssertionError, match="by way of the dispatcher"):
        torch.ops.cupynorm.norm_forward(x, None, weight, bias, *options)


def test_compiled_strided_rows_are_not_copied() -> None:
    compiled = torch.compile(lambda qkv, weight: rms_norm(qkv[..., 8:16], weight), fullgraph=True)
    qkv, weight = torch.randn(4, 24), torch.randn(8)
    with torch.no_grad(), torch_plans.in_place_of_kernels() as plans:
        compiled(qkv, weight)
    assert [launch["x"] for launch in plans.launches] == [qkv[:, 8:].data_ptr()]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, weight: rms_norm(x, weight, axis=-1),
        lambda x, weight: layer_norm(x, axis=(-2, -1), out_dtype=torch.float64),
        lambda x, weight: layer_norm(x, weight, zero_centered=True),
        lambda x, weight: rms_norm(x),
        lambda x, weight: vmap(lambda x: rms_norm(x, weight))(x),
        lambda x, weight: checkpoint(rms_norm, x, weight, use_reentrant=False).sin(),
        lambda x, weight: NORM(x),
    ],
)
def test_compiled_options(call: Any) -> None:
    x, weight, _ = operands(torch.float32)
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(x, weight)
    assert_same_bits(y, call(x, weight))
    y.sum().backward()


def test_compiled_with_an_axis_that_varies() -> None:
    x = torch.randn(3, 4, 8)

    def both(x: Any, first: int, last: int) -> Any:
        return rms_norm(x, axis=last), rms_norm(x, axis=(first, last))

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    for first, last in ((-2, -1), (1, 2), (-2, 2)):
        for actual, expected in zip(compiled(x, first, last), both(x, first, last), strict=True):
            assert_same_bits(actual, expected)


UNBACKED: dict[str, Any] = {
    "weight": lambda norm, x, weight: norm(x, weight),
    "bias": lambda norm, x, weight: norm(x, None, weight),
    "axis": lambda norm, x, weight: norm(x, weight, weight, axis=-1),
    "relu": lambda norm, x, weight: norm(x, weight, relu=RELU),
}


@pytest.mark.parametrize("call", UNBACKED)
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_compiled_once_for_a_width_that_is_marked_unbacked(norm: Any, call: str) -> None:
    def function(x: Any, weight: Any) -> Any:
        return UNBACKED[call](norm, x, weight)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for n in (16, 24, 1):
        x, weight = drawn(3, n), drawn(n, seed=1)
        for tensor in (x, weight):
            mark_unbacked(tensor, tensor.ndim - 1)
        actual, expected = compiled(x, weight), function(x, weight)
        assert_same_bits(actual, expected)
        for a, b in zip(
            torch.autograd.grad(actual.pow(2).sum(), (x, weight)),
            torch.autograd.grad(expected.pow(2).sum(), (x, weight)),
            strict=True,
        ):
            assert_same_bits(a, b)
    assert len([graph for graph in counter.graphs if len(graph.graph.nodes) > 1]) == 1
    words = (
        r"must have the shape of x\\*'s normalized axes, \(16,\)"  # torch 2.14 escapes the quote
    )
    with pytest.raises(RuntimeError, match=words):
        compiled(drawn(3, 16), drawn(15))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_a_compiled_module_takes_a_width_that_is_marked_unbacked(module: Any, affine: bool) -> None:
    norm = module(8, elementwise_affine=affine)
    x = torch.randn(3, 8)
    mark_unbacked(x, 1)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(x).detach(), norm(x).detach())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("relu", [None, RELU])
def test_exported_with_widths_that_depend_on_values(relu: Any, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, weight: Any, chosen: Any, also: Any) -> Any:
            x, weight = x[:, chosen.nonzero()[:, 0]], weight[also.nonzero()[:, 0]]
            return layer_norm(x, weight, relu=relu)

    x, weight, chosen = torch.randn(3, 20), torch.randn(20), torch.arange(20) % 2 == 0
    exported = torch.export.export(Model(), (x, weight, chosen, ~chosen), strict=strict).module()
    fewer = torch.arange(20) % 5 == 0
    for a, b in ((chosen, chosen), (fewer, fewer.roll(1))):
        expected = layer_norm(x[:, a], weight[b], relu=relu)
        assert_same_bits(exported(x, weight, a, b), expected)
    with pytest.raises((RuntimeError, ValueError), match=r"Eq\(u1, u0\)"):
        exported(x, weight, chosen, fewer)


def test_compiled_with_an_eps_of_numpys() -> None:
    compiled = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    for eps in (1e-3, 0.5):
        assert_same_bits(compiled(x, eps=np.float64(eps)), rms_norm(x, eps=eps))


def test_exported_and_traced() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LayerNorm(8)

        def forward(self, x: Any) -> Any:
            return self.norm(x)

    model, x = Model(), torch.randn(3, 8)
    rows = {"x": {0: torch.export.Dim("rows")}}
    exported = torch.export.export(model, (x,), dynamic_shapes=rows)
    assert torch.ops.cupynorm.norm_forward.default in [n.target for n in exported.graph.nodes]
    other = torch.randn(7, 8)
    traced = torch.jit.trace(model, (x,), check_trace=False)  # it traces again without gradients
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    modules = (
        *(exported.module(), exported.run_decompositions().module()),
        *(traced, torch.jit.load(saved)),
    )
    expected = torch.autograd.grad(model(other).pow(2).sum(), list(model.parameters()))
    for module in modules:
        assert_same_bits(module(other), model(other))
        actual = torch.autograd.grad(module(other).pow(2).sum(), list(module.parameters()))
        for a, b in zip(actual, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize(("least", "records"), [(9, True), (2, False)])
def test_exported_with_a_relu_for_any_width(least: int, records: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return rms_norm(x, relu=RELU)

    width = {"x": {1: torch.export.Dim("width", min=least)}}
    with torch.set_grad_enabled(records):
        exported = torch.export.export(Model(), (torch.randn(3, 100),), dynamic_shapes=width)
    for n in (least, 17, 200):
        x = torch.randn(3, n)
        assert_same_bits(exported.module()(x), rms_norm(x, relu=RELU))


def test_meta_and_fake_tensors() -> None:
    y = rms_norm(torch.empty(3, 8, device="meta"), relu=(0, 6))
    assert (y.device.type, y.shape) == ("meta", (3, 8))
    with FakeTensorMode():
        x = torch.empty(8, 3, device="cuda", dtype=torch.bfloat16).T
        y = rms_norm(x, torch.empty(8, device="cuda"))
    assert (y.device.type, y.dtype, y.stride()) == ("cuda", torch.bfloat16, (8, 1))


# ---- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_on_the_cpu_is_that_of_torch(norm: str) -> None:
    row = torch.ones(8, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.randn(4, 8, dtype=dtype)
            theirs = getattr(F, norm)(x, (8,), row.to(dtype))
            assert getattr(cupynorm.torch, norm)(x, row.to(dtype)).dtype == theirs.dtype


def test_layer_norm_under_autocast_for_cuda_gives_float32() -> None:
    given: dict[Any, Any] = {}
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                x = torch.empty(4, 8, device="cuda", dtype=dtype)
                given[dtype] = layer_norm(x).dtype
            half = torch.empty(4, 8, device="cuda", dtype=torch.float16)
            chosen = layer_norm(half, out_dtype=torch.float16).dtype
            # float16 before torch 2.13, float32 from then on.
            mine, theirs = rms_norm(half).dtype, F.rms_norm(half, (8,)).dtype
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert given == {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }
    assert chosen == torch.float16
    assert mine == theirs


# ---- modules -------------------------------------------------------------------------------------

MODULES = ((RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm))


@pytest.mark.parametrize(("mine", "theirs"), MODULES)
def test_modules_are_made_as_torchs_are(mine: Any, theirs: Any) -> None:
    expected = list(inspect.signature(theirs).parameters.values())
    actual = list(inspect.signature(mine).parameters.values())
    positional = [p for p in actual if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in expected]
    taken = list(inspect.signature(mine.forward).parameters)
    assert taken == [*inspect.signature(theirs.forward).parameters, "residual"]
    for arguments, options in (
        ((8,), {}),
        (([4, 2], 1e-3), {}),
        ((8,), {"elementwise_affine": False}),
        ((8,), {"dtype": torch.bfloat16, "device": "meta"}),
    ):
        a, b = mine(*arguments, **options), theirs(*arguments, **options)
        assert repr(a) == f"cupynorm.torch.{b!r}"
        assert isinstance(a, theirs)
        assert {k: (v.shape, v.dtype, v.device) for k, v in a.state_dict().items()} == {
            k: (v.shape, v.dtype, v.device) for k, v in b.state_dict().items()
        }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mine", "theirs"), MODULES)
def test_modules_compute_what_torchs_do(mine: Any, theirs: Any, dtype: Any) -> None:
    x = 1e-3 * drawn(5, 4, 2, dtype=dtype).detach()  # so small that eps has an effect
    for options in ({}, {"elementwise_affine": False}, {"eps": 1e-3}):
        a, b = mine([4, 2], dtype=dtype, **options), theirs([4, 2], dtype=dtype, **options)
        for parameter in b.parameters():
            torch.nn.init.normal_(parameter)
        a.load_state_dict(b.state_dict())
        b.load_state_dict(a.state_dict())
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if b.eps is None else b.eps
        numpy = [to_numpy(t) for t in (x, *b.parameters())]
        norm = "rms_norm" if mine is RMSNorm else "layer_norm"
        check = {"eps": eps, "axis": (-2, -1)}
        testing.check_forward(norm, to_numpy(a(x)), *numpy, **check)
        torch.testing.assert_close(a(x), b(x))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_a_module_of_two_axes_as_torch_sees_it(module: Any, affine: bool) -> None:
    norm = module((4, 2), 1e-5, affine)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 3, 4, 2)
    expected = norm(x).detach()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True, dynamic=True)
    exported = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    parameters = dict(norm.named_parameters())
    batched = vmap(lambda x: torch.func.functional_call(norm, parameters, x))
    for seen in (compiled, exported.module(), batched):
        assert_same_bits(seen(x).detach(), expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("mine", "theirs"), MODULES)
def test_a_module_of_torchs_becomes_one_of_these(mine: Any, theirs: Any, affine: bool) -> None:
    norm = theirs(8, 1e-5, affine)
    reference, state = copy.deepcopy(norm), norm.state_dict()
    norm.__class__ = mine
    assert repr(norm) == repr(mine(8, 1e-5, affine))
    assert norm.state_dict().keys() == state.keys()
    saved = io.BytesIO()
    torch.save(norm, saved)
    saved.seek(0)
    x, dy = torch.randn(3, 8), torch.randn(3, 8)
    options = {"backend": "aot_eager", "fullgraph": True}
    for each in (norm, copy.deepcopy(norm), torch.load(saved, weights_only=False)):
        each.load_state_dict(state)
        each.reset_parameters()
        for call in (each, torch.compile(each, **options)):
            results = []
            for module, function in ((each, call), (reference, reference)):
                leaf = x.clone().requires_grad_()
                leaves = (leaf, *module.parameters())
                y = function(leaf)
                results.append((y, *torch.autograd.grad(y, leaves, dy)))
            torch.testing.assert_close(*results)


def test_the_bias_of_an_rms_norm_whose_class_was_changed() -> None:
    norm, x = torch.nn.RMSNorm(8), torch.randn(3, 8)
    norm.__class__ = RMSNorm
    assert norm.bias is None
    norm.relu = (0.0, 1.0)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,)).clamp(0, 1))
    norm.relu = None
    plain = norm(x)
    norm.bias = torch.nn.Parameter(torch.ones(8))
    torch.testing.assert_close(norm(x), plain + 1)
    assert norm.state_dict().keys() == {"weight", "bias"}
    del norm.bias
    assert norm.bias is None
    made = RMSNorm(8, bias=True)
    torch.nn.utils.parametrize.register_parametrization(made, "bias", torch.nn.Tanh())
    torch.nn.init.ones_(made.parametrizations.bias.original)
    torch.testing.assert_close(made(x), plain + math.tanh(1))
    torch.nn.utils.parametrize.remove_parametrizations(made, "bias")
    del made.bias
    torch.testing.assert_close(made(x), plain)
    assert repr(made) == repr(RMSNorm(8))
    with pytest.raises(AttributeError, match="'RMSNorm' object has no attribute 'bias'"):
        made.bias  # noqa: B018


@pytest.mark.parametrize("module", [RMSNorm(8), LayerNorm(8)])
def test_expanded_weights_are_refused(module: Any) -> None:
    words = r"weight must not be an ExpandedWeight, .* use torch.func.vmap and torch.func.grad"
    with pytest.raises(NotImplementedError, match=words):
        call_for_per_sample_grads(module)(torch.randn(3, 8))


def test_what_the_modules_add() -> None:
    norm = RMSNorm(8, bias=True, zero_centered=True, relu=(0, 6))
    assert repr(norm) == (
        "cupynorm.torch.RMSNorm((8,), eps=None, elementwise_affine=True, zero_centered=True, "
        "relu=(0, 6), bias=True)"
    )
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert not norm.weight.any()
    assert not norm.bias.any()
    assert repr(type("Mine", (RMSNorm,), {})(8)).startswith("Mine((8,), ")
    x = torch.randn(3, 8)
    expected = rms_norm(x, eps=torch.finfo(torch.float32).eps, relu=(0, 6))
    assert_same_bits(norm(x), expected)
    torch.nn.init.ones_(norm.weight)
    norm.reset_parameters()
    assert not norm.weight.any()
    assert not LayerNorm(8, zero_centered=True).weight.any()
    assert_same_bits(rms_norm(x, eps=None), RMSNorm(8)(x).detach())


NAMES = {RMSNorm: "x", LayerNorm: "input"}  # of what torch.nn's forward takes


@pytest.mark.parametrize("elementwise_affine", [True, False])
@pytest.mark.parametrize(
    ("normalized_shape", "shape"),
    [
        *(((8,), (3, 7)), ((4, 2), (3, 8)), ((3, 8), (8,)), ((8,), ()), ((), (3,))),
        *(((4, 1), (3, 4, 8)), ((1, 8), (3, 8))),
    ],
)
@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_a_module_blames_an_x_that_does_not_fit(
    module: Any, normalized_shape: Any, shape: Any, elementwise_affine: bool
) -> None:
    norm = module(normalized_shape, elementwise_affine=elementwise_affine)
    named = f"{NAMES[module]} must end in the axes of normalized_shape, "
    words = f"{named}{normalized_shape}; got shape {shape}"
    with pytest.raises(ValueError, match=re.escape(words)):
        norm(torch.ones(shape))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("module", [RMSNorm, LayerNorm])
def test_a_compiled_module_blames_an_x_that_does_not_fit(module: Any, dynamic: Any) -> None:
    norm = torch.compile(module(8, elementwise_affine=False), backend="aot_eager", dynamic=dynamic)
    norm(torch.ones(3, 8))
    for shape in ((3, 7), (8, 1), (7,)):
        named = f"{NAMES[module]} must end in the axes of normalized_shape, "
        words = f"{named}(8,); got shape {shape}"
        with pytest.raises(ValueError, match=re.escape(words)):
            norm(torch.ones(shape))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerNorm(8),
        lambda: LayerNorm(8, zero_centered=True),
        lambda: LayerNorm(8, relu=(0, 6)),
        lambda: RMSNorm(8, 1e-5, bias=True),
    ],
)
def test_a_transformer_layer_infers_what_it_trains(make: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.norm1, layer.norm2 = make(), make()
    layer = copy.deepcopy(layer)
    x = torch.randn(3, 5, 8)
    trained = layer(x).detach()
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), trained)


def test_numbers_of_a_module() -> None:
    x = torch.randn(3, 8)
    relu = (np.float32(0), np.float64(6))
    for made in (
        LayerNorm(8, eps=np.float64(1e-5), zero_centered=np.True_),
        RMSNorm(8, eps=np.float32(1e-5), relu=relu),
    ):
        assert type(made.eps) is float
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), made(x))


@pytest.mark.parametrize("module", [LayerNorm, RMSNorm])
def test_numbers_of_a_shape(module: Any) -> None:
    assert module(n for n in (3, 8)).normalized_shape == (3, 8)
    made = module(np.int64(8), elementwise_affine=False)
    assert type(made.normalized_shape[0]) is int
    x = torch.randn(3, 8)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), made(x))


def test_numbers_of_a_compiled_call() -> None:
    x = torch.randn(3, 8)

    def call(x: Any) -> Any:
        return rms_norm(x, eps=np.float32(1e-5), relu=(np.float32(0), np.float64(1)))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), call(x))


def test_a_transformer_infers_what_it_trains_where_it_is_padded() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    layer.norm1, layer.norm2 = LayerNorm(8, zero_centered=True), RMSNorm(8, 1e-5, bias=True)
    model = torch.nn.TransformerEncoder(layer, 2)  # makes a strided nested tensor of x
    x, padded = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    trained = model(x, src_key_padding_mask=padded).detach()
    model.eval()
    with torch.no_grad():
        inferred = model(x, src_key_padding_mask=padded)
    torch.testing.assert_close(inferred[~padded], trained[~padded])


@pytest.mark.parametrize(("mine", "theirs"), MODULES)
def test_strided_nested_tensors(mine: Any, theirs: Any) -> None:
    parts = [drawn(n, 8, dtype=torch.float32, seed=n).detach() for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(parts, requires_grad=True)
    y = mine(8, 1e-5)(x)
    expected = [theirs(8, 1e-5)(part.requires_grad_()) for part in parts]
    for one, other in zip(y.unbind(), expected, strict=True):
        torch.testing.assert_close(one, other)
    sum((part**2).sum() for part in y.unbind()).backward()
    sum((part**2).sum() for part in expected).backward()
    for one, other in zip(x.grad.unbind(), parts, strict=True):
        torch.testing.assert_close(one, other.grad, atol=1e-5, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="axis must not name axis 0"):
        layer_norm(x, axis=(0, 1, 2))
    nothing = torch.nested.nested_tensor([], dtype=torch.float64)
    assert layer_norm(nothing).dtype == torch.float64
    assert layer_norm(nothing, out_dtype=torch.float16).dtype == torch.float16
    plain = mine(8, elementwise_affine=False)
    for one, part in zip(plain(x).unbind(), parts, strict=True):
        assert_same_bits(one, plain(part))
    options = {"relu": RELU, "out_dtype": torch.float64, "axis": (-2, -1)}
    deep = torch.nested.nested_tensor([part.reshape(-1, 2, 4) for part in parts])
    for one, part in zip(rms_norm(deep, **options).unbind(), deep.unbind(), strict=True):
        assert_same_bits(one, rms_norm(part, **options))
    for affine in (True, False):
        with pytest.raises(ValueError, match=r"of normalized_shape, \(7,\); got shape \(3, 8\)"):
            mine(7, elementwise_affine=affine)(x)


@pytest.mark.parametrize(("mine", "theirs"), MODULES)
def test_jagged_tensors(mine: Any, theirs: Any) -> None:
    parts = [drawn(n, 8, dtype=torch.float32, seed=n).detach() for n in (3, 5, 1)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    a, b = mine(8), theirs(8)
    compiled = torch.compile(a, backend="aot_eager", fullgraph=True)
    expected = b(x)
    (slope,) = torch.autograd.grad(expected.values().pow(3).sum(), x)
    for module in (a, compiled):
        y = module(x)
        torch.testing.assert_close(y.values(), expected.values())
        assert (x + y).shape == x.shape  # with the same lengths
        (dx,) = torch.autograd.grad(y.values().pow(3).sum(), x)
        torch.testing.assert_close(dx.values(), slope.values(), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="axis must not name the ragged axis of x"):
        layer_norm(x, axis=(-2, -1))
    options = {"relu": RELU, "out_dtype": torch.float64}
    assert_same_bits(rms_norm(x, **options).values(), rms_norm(x.values(), **options))
    with pytest.raises(ValueError, match=r"weight must have the shape .*, \(8,\),.*; got \(5,\)"):
        rms_norm(x, torch.ones(5))
    for arguments in ((x, x), (x[0], x), (x, torch.ones(8), x)):
        name = "bias" if len(arguments) == 3 else "weight"
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got a nested one"):
            rms_norm(*arguments)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_know_nothing_of_what_lies_between_the_parts_of_a_jagged_tensor(
    norm: str,
) -> None:
    memory, (_, weight, bias) = drawn(2, 4, 8), operands()
    with torch.no_grad():
        memory[0, 2:], memory[1, :1] = math.nan, math.inf
    lengths = torch.tensor([2, 3])
    x = torch.nested.narrow(memory, 1, torch.tensor([0, 1]), lengths, layout=torch.jagged)
    assert x.lengths() is not None
    parts = ours(norm, x, weight, bias).unbind()
    whole = ours(norm, torch.cat([memory[0, :2], memory[1, 1:]]), weight, bias)
    assert_close(torch.cat(parts), whole)
    arrays = memory, weight, bias
    gradients = torch.autograd.grad(sum((part**2).sum() for part in parts), arrays)
    expected = torch.autograd.grad((whole**2).sum(), arrays)
    for one, other in zip(gradients, expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    "norm",
    [
        *(LayerNorm(8), RMSNorm(8), RMSNorm(8, elementwise_affine=False)),
        *(LayerNorm((4, 8)), RMSNorm((4, 8), elementwise_affine=False)),
    ],
    ids=str,
)
def test_traced_by_fx(norm: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), norm)
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(3, 4, 8)
    assert_same_bits(traced(x).detach(), model(x).detach())
    functions = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert functions == {layer_norm if isinstance(norm, LayerNorm) else rms_norm}


@pytest.mark.parametrize("eps", [lambda x: x.shape[0], lambda x: x.shape[0] * 1e-5])
def test_traced_with_an_eps_left_open(eps: Any) -> None:
    def function(x: Any) -> Any:
        return rms_norm(x, eps=eps(x))

    x = torch.randn(3, 8)
    traced = make_fx(function, tracing_mode="symbolic")(x)
    assert_same_bits(traced(x), function(x))


# ---- errors --------------------------------------------------------------------------------------

X = torch.ones(3, 4, 8)
W = torch.ones(8)


def test_a_sparse_gradient_is_refused() -> None:
    rows = layer_norm(X[0], W.clone().requires_grad_())
    looked_up = F.embedding(torch.tensor([0, 1]), rows, sparse=True)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"dy must be a dense tensor, .* torch.sparse_coo"):
            looked_up.sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"zero_centered": False}, {"zero_centered": 0}),
        ({"eps": 1}, {"eps": True}),
        ({"eps": 1}, {"eps": 1 + 0j}),
        ({"relu": (0, 1)}, {"relu": (False, True)}),
    ],
)
def test_what_equals_an_accepted_option_is_still_refused(
    accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    rms_norm(x, weight, **accepted)
    with pytest.raises(TypeError, match=next(iter(refused))):
        rms_norm(x, weight, **refused)


def test_numpys_true_is_true() -> None:
    with torch_plans.in_place_of_kernels() as plans:
        rms_norm(torch.ones(2, 24), torch.ones(24), zero_centered=np.True_)
    (plan,) = plans.made
    assert plan.spec.zero_centered is True  # C++ has a name for True, but not for NumPy's


def test_a_bound_of_minus_zero_is_zero() -> None:
    x = -torch.ones(2, 4)
    compiled = torch.compile(rms_norm, backend="eager", fullgraph=True)
    for function, context in itertools.product(
        (rms_norm, compiled), (torch.no_grad, torch_plans.in_place_of_kernels)
    ):
        with context():
            for lower in (-0.0, 0.0):
                y = function(x, relu=(lower, 6))
                assert not torch.signbit(y).any()
