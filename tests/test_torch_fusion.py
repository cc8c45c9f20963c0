"""cupynorm.torch.compile_options: what norms of a compiled program take in, and what it computes.

Most programs here run operation by operation, after inductor's passes over their graphs. Inductor's
C++ takes seconds to compile, and differs from eager calls in more roundings than are left out here.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
from collections import Counter
from math import nan
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
# ruff: noqa: E402 - what follows needs torch

import torch.nn.functional as F
import torch_plans
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import THOROUGH, examples
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from torch_checks import SIZES_OF_MODELS

from cupynorm.torch import _fusion, _inductor, compile_options, layer_norm, replace_norms, rms_norm

# torch itself still uses what it deprecates, and warns about caches.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function.*should not be inst:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]

N = 16
HALVES = torch.float16, torch.bfloat16
NORMS = {"rms_norm": rms_norm, "layer_norm": layer_norm}


@pytest.fixture(autouse=True)
def compile_anew() -> Any:
    """Let no test find what others compiled, in memory or on disk."""
    import torch._inductor.config as config

    torch._dynamo.reset()
    torch.manual_seed(0)
    with config.patch(force_disable_caches=True, compile_threads=1):
        yield


class Change(NamedTuple):
    """How many nodes of each kind a graph used before the pass, and how many after it."""

    before: Counter[str]
    after: Counter[str]
    graph: Any

    def fewer(self, kind: str) -> int:
        return self.before[kind] - self.after[kind]


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """What the pass did to each graph since the test began."""
    return noted(monkeypatch)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    seen: list[Change] = []
    fuse = _fusion.fuse

    def note(graph: Any) -> None:
        before = kinds(graph)
        fuse(graph)
        graph.lint()
        seen.append(Change(before, kinds(graph), graph))

    monkeypatch.setattr(_fusion, "fuse", note)
    return seen


def kinds(graph: Any) -> Counter[str]:
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.users]
    counted = Counter("add" for node in nodes if node.target is torch.ops.aten.add.Tensor)
    counted.update("cast" for node in nodes if _fusion._cast_dtype(node) is not None)
    return counted


def fewer(changes: list[Change]) -> tuple[int, int]:
    """Return how many additions and casts are gone, in all graphs."""
    return sum(c.fewer("add") for c in changes), sum(c.fewer("cast") for c in changes)


def traced(f: Any, **options: Any) -> Any:
    """Compile a function into graphs that run operation by operation."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.decomposition import select_decomp_table

    def pass_over(graph: Any) -> None:
        with config.patch(compile_options()):
            _recursive_joint_graph_passes(graph)

    def infer(graph: Any, inputs: Any) -> Any:
        pass_over(graph)
        return boxed_nop(graph, inputs)

    def partition(graph: Any, inputs: Any, **told: Any) -> Any:
        pass_over(graph)
        return min_cut_rematerialization_partition(graph, inputs, **told)

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    return torch.compile(f, backend=backend, fullgraph=True, **options)


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def computed(f: Any, inputs: Any) -> list[Any]:
    """Return the results of a function, and the gradients of its arguments."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    results = f(*leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    dys = [drawn(*t.shape, dtype=t.dtype, seed=9 + i) for i, t in enumerate(results)]
    gradients = torch.autograd.grad(results, leaves, dys, allow_unused=True)
    return [*(t.detach() for t in results), *gradients]


def assert_near(actual: list[Any], expected: list[Any], unit: float) -> None:
    """Assert that tensors differ by at most `unit` times their norms."""
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            a, b = a.double(), b.double()
            assert (a - b).norm() <= unit * b.norm()


def assert_as_eager(f: Any, inputs: Any, unit: float = 2.0**-20, compiled: Any = traced) -> None:
    assert_near(computed(compiled(f), inputs), computed(f, inputs), unit)
    with torch.no_grad():
        results, expected = compiled(f)(*inputs), f(*inputs)
    pairs = [t if isinstance(t, tuple) else (t,) for t in (results, expected)]
    assert_near(*map(list, pairs), unit)


# ---- additions -----------------------------------------------------------------------------------


def block(x: Any, stream: Any, weight: Any, matrix: Any) -> Any:
    """Two branches next to a stream, with a norm before each, and a last norm."""
    stream = stream + x @ matrix
    stream = stream + rms_norm(stream, weight) @ matrix
    return layer_norm(stream, weight), stream


def operands(dtype: Any = torch.float32, of_stream: Any = None) -> tuple[Any, ...]:
    stream = drawn(4, N, dtype=of_stream or dtype, seed=1)
    weight = drawn(N, dtype=of_stream or dtype, seed=2)
    return drawn(4, N, dtype=dtype), stream, weight, drawn(N, N, dtype=dtype, seed=3) / 4


@pytest.mark.parametrize(
    ("dtype", "of_stream", "unit"),
    [
        (torch.float64, None, 2.0**-48),
        (torch.float32, None, 2.0**-19),
        (torch.bfloat16, None, 2.0**-6),
        (torch.float16, None, 2.0**-9),
        (torch.bfloat16, torch.float32, 2.0**-6),
    ],
)
def test_additions_become_parts_of_the_passes(
    dtype: Any, of_stream: Any, unit: float, changes: list[Change]
) -> None:
    def with_casts(x: Any, stream: Any, weight: Any, matrix: Any) -> Any:
        stream = stream + x @ matrix
        stream = stream + rms_norm(stream, weight).to(dtype) @ matrix
        return layer_norm(stream, weight), stream

    assert_as_eager(with_casts, operands(dtype, of_stream), unit)
    # Each norm has an addition before it. The gradients of its two users are added too.
    assert [change.fewer("add") for change in changes] == [4, 2]
    # The norm's result is cast once. Its gradients had casts too: dy, and both dresiduals.
    assert [change.after["cast"] for change in changes] == [0, 0]


def test_a_norm_takes_in_one_addition_and_another_its_sum(changes: list[Change]) -> None:
    def both(x: Any, stream: Any, weight: Any, _: Any) -> Any:
        total = x + stream
        return rms_norm(total, weight), layer_norm(total, weight), total

    assert_as_eager(both, operands())
    assert fewer(changes[1:]) == (1, 0)
    # Two gradients are added to the sum's. The two gradients of the weight are added too.
    assert changes[0].before["add"] == 4
    assert changes[0].after["add"] == 1


def test_of_two_gradients_the_later_takes_in_the_other(changes: list[Change]) -> None:
    def both(x: Any, w: Any) -> Any:
        return rms_norm(x, w), layer_norm(x)

    assert_as_eager(both, (drawn(4, N), drawn(N)))
    assert changes[0].fewer("add") == 1


class NormalizedLater(torch.autograd.Function):
    """Doubles a sum. Only its backward pass normalizes the sum."""

    @staticmethod
    def forward(ctx: Any, total: Any, weight: Any) -> Any:
        ctx.save_for_backward(total, weight)
        return 2 * total

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        total, weight = ctx.saved_tensors
        return dy * rms_norm(total, weight), None


# Norms that have nothing to take in, or should not.
APART = {
    "a product beside it": lambda x, r, w, m: rms_norm(2 * x + r, w),
    "a product of both": lambda x, r, w, m: rms_norm(x * r + x, w),
    "alpha": lambda x, r, w, m: rms_norm(torch.add(x, r, alpha=2), w),
    "a row": lambda x, r, w, m: rms_norm(x + w, w),
    "a number": lambda x, r, w, m: rms_norm(x + 1, w),
    "a size": lambda x, r, w, m: rms_norm(x + x.shape[0], w),
    "a view of it": lambda x, r, w, m: rms_norm((x + r).view(2, 2, N), w),
    "a weight of it": lambda x, r, w, m: (lambda s: rms_norm(s, s[0] * w))(x + r),
    "a weight and a bias of it": lambda x, r, w, m: (lambda s: layer_norm(s, s[1], s[0]))(x + r),
    "a weight that it is": lambda x, r, w, m: (lambda s: rms_norm(s, s))(x[0] + r[0]),
    "a norm in the backward pass": lambda x, r, w, m: NormalizedLater.apply(x + r, w),
}


@pytest.mark.parametrize("which", APART)
def test_an_addition_that_stays(which: str, changes: list[Change]) -> None:
    function, inputs = APART[which], operands()
    dynamic = True if which == "a size" else None
    compiled = functools.partial(traced, dynamic=dynamic)
    assert_as_eager(function, inputs, compiled=compiled)
    assert len(changes) == 2
    forward = [n for c in changes for n in c.graph.nodes if "norm_forward" in str(n.target)]
    assert not any(_fusion._arguments(_fusion.FORWARD, n)["residual"] for n in forward)


def test_an_addition_of_ints_stays(changes: list[Change]) -> None:
    with torch.no_grad():
        inputs = drawn(4, N), torch.arange(4 * N).view(4, N)
        expected = layer_norm(inputs[0] + inputs[1])
        assert_near([traced(lambda x, ints: layer_norm(x + ints))(*inputs)], [expected], 0.0)
    assert fewer(changes) == (0, 0)


def test_a_sum_of_one_tensor_with_itself(changes: list[Change]) -> None:
    assert_as_eager(lambda x, r, w, m: rms_norm(x + x, w), operands())
    assert fewer(changes) == (2, 0)  # the gradient adds dx and dx


def test_a_sum_that_lies_otherwise(changes: list[Change]) -> None:
    """A kernel would return the sum row by row. A view of its memory would differ."""

    def transposed(x: Any, r: Any, w: Any) -> Any:
        total = x + r
        return rms_norm(total, w), total, torch.as_strided(total, (N,), (1,))

    inputs = drawn(N, N).T, drawn(N, N, seed=1).T, drawn(N, seed=2)
    with torch.no_grad():
        assert_near(list(traced(transposed)(*inputs)), list(transposed(*inputs)), 0.0)
    assert fewer(changes) == (0, 0)


def test_a_sum_that_is_written_into_later(changes: list[Change]) -> None:
    def both(x: Any, r: Any, w: Any, m: Any) -> Any:
        total = x + r
        y, values = rms_norm(total, w), total.view(-1)
        return y, values.index_put((torch.tensor([0, 3]),), torch.tensor(7.0)), 3 * total

    assert_as_eager(both, operands())
    assert changes[1].fewer("add") == 1


def test_a_residual_that_is_given(changes: list[Change]) -> None:
    def both(x: Any, r: Any, w: Any, m: Any) -> Any:
        y, total = rms_norm(x + r, w, residual=x @ m)
        return y, total

    assert_as_eager(both, operands())
    assert changes[1].fewer("add") == 0


def test_what_is_added_to_dx_is_not_added_to_dresidual(changes: list[Change]) -> None:
    def both(x: Any, r: Any, w: Any, m: Any) -> Any:
        y, _ = rms_norm(x, w, residual=r)
        return y, x @ m

    assert_as_eager(both, operands(torch.bfloat16, torch.float32), 2.0**-7)
    assert fewer(changes) == (0, 0)


@pytest.mark.parametrize("norm", NORMS)
def test_a_relu_and_axes(norm: str, changes: list[Change]) -> None:
    def clamped(x: Any, r: Any, w: Any) -> Any:
        return NORMS[norm](x + r, w, axis=(-2, -1), relu=(-0.5, 0.5), zero_centered=True)

    assert_as_eager(clamped, (drawn(3, 4, N), drawn(3, 4, N, seed=1), drawn(4, N, seed=2)))
    assert fewer(changes) == (2, 0)


def test_a_branch_that_is_a_graph_of_its_own(changes: list[Change]) -> None:
    def function(x: Any, r: Any, w: Any, m: Any) -> Any:
        def added(x: Any, r: Any) -> Any:
            return rms_norm(x + r, w)

        return torch.cond(x.sum() > 0, added, lambda x, r: rms_norm(x, w), (x, r))

    compiled, (x, *others) = traced(function), operands()
    with torch.no_grad():
        for inputs in ((x.abs(), *others), (-x.abs(), *others)):
            assert_near([compiled(*inputs)], [function(*inputs)], 0.0)
    assert fewer(changes) == (1, 0)


def test_one_program_for_any_number_of_rows(changes: list[Change]) -> None:
    compiled = traced(block)
    for rows in (5, 3, 8, 13):
        x, stream, weight, matrix = operands()
        x, stream = drawn(rows, N), drawn(rows, N, seed=1)
        for tensor in (x, stream):
            torch._dynamo.mark_dynamic(tensor, 0)
        leaves = [t.requires_grad_() for t in (x, stream, weight, matrix)]
        gradients = [
            torch.autograd.grad(sum(t.square().sum() for t in f(*leaves)), leaves)
            for f in (compiled, block)
        ]
        assert_near(*map(list, gradients), 2.0**-19)
    (change,) = changes
    assert change.fewer("add") == 4


# ---- what is kept for the backward pass ----------------------------------------------------------


def kept(f: Any, inputs: Any) -> Any:
    """Return how many bytes a function keeps for its backward pass."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, id):
        f(*(t.clone().requires_grad_() for t in inputs))
    return sum(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fuses", [True, False])
def test_as_much_is_kept_as_with_the_norms_of_torch(
    fuses: bool, norm: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's norms, too, each y that a product reads is kept, not computed again."""

    def function(normalized: Any) -> Any:
        def blocks(x: Any, stream: Any, weight: Any, matrix: Any) -> Any:
            stream = stream + x @ matrix
            stream = stream + normalized(stream, weight) @ matrix
            return normalized(stream, weight) @ matrix

        return blocks

    if not fuses:
        monkeypatch.setattr(_fusion, "fuse", lambda graph: None)
    of_torch = function(lambda x, weight: getattr(F, norm)(x, (N,), weight, eps=1e-5))
    expected = kept(traced(of_torch), operands(dtype))
    torch._dynamo.reset()
    # Of a row of LayerNorm, torch may keep one float32 where cupynorm keeps a mean and an rstd.
    means = 2 * 4 * torch.float32.itemsize if norm == "layer_norm" else 0  # two norms, four rows
    assert kept(traced(function(NORMS[norm])), operands(dtype)) <= expected + means


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_takes_in_what_is_within(
    changes: list[Change], monkeypatch: pytest.MonkeyPatch
) -> None:
    def within(stream: Any, weight: Any, matrix: Any) -> Any:
        stream = stream + rms_norm(stream @ matrix, weight)
        return stream + layer_norm(stream, weight) @ matrix

    def function(x: Any, stream: Any, weight: Any, matrix: Any) -> Any:
        for _ in range(2):
            stream = checkpoint(within, stream, weight, matrix, use_reentrant=False)
        return stream

    assert_as_eager(function, operands())
    assert changes[0].fewer("add") == 4
    for node in changes[0].graph.nodes:
        if "cupynorm" in str(node.target):
            assert all(_fusion._is_of_one_part(node, result) for result in node.users)
    fused = kept(traced(function), operands())
    monkeypatch.setattr(_fusion, "fuse", lambda graph: None)
    torch._dynamo.reset()
    assert fused <= kept(traced(function), operands())


@pytest.mark.parametrize("inside", ["norm", "sum"])
def test_nothing_is_taken_in_across_the_border_of_a_checkpoint(
    inside: str, changes: list[Change]
) -> None:
    def function(x: Any, stream: Any, weight: Any, matrix: Any) -> Any:
        def total(x: Any) -> Any:
            return x @ matrix + stream @ matrix

        def norm(total: Any) -> Any:
            return rms_norm(total, weight)

        if inside == "norm":
            y = checkpoint(norm, total(x), use_reentrant=False)
        else:
            y = norm(checkpoint(total, x, use_reentrant=False))
        return y.bfloat16() @ matrix.bfloat16()

    assert_near(computed(traced(function), operands()), computed(function, operands()), 2.0**-6)
    assert changes[0].fewer("add") == 0
    # The cast of y's gradient is next to its norm. So is the cast of y, but that may be outside.
    assert changes[0].fewer("cast") == (1 if inside == "norm" else 2)


# ---- casts ---------------------------------------------------------------------------------------


def test_casts_become_dtypes(changes: list[Change]) -> None:
    def function(x: Any, w: Any) -> Any:
        return layer_norm(x.float(), w, w).bfloat16()

    assert_as_eager(function, (drawn(4, N, dtype=torch.bfloat16), drawn(N)), 2.0**-7)
    assert [change.after["cast"] for change in changes] == [0, 0]
    assert [change.before["cast"] for change in changes] == [4, 2]


def test_a_cast_to_a_narrower_dtype_before_a_norm_is_one(changes: list[Change]) -> None:
    def function(x: Any, w: Any) -> Any:
        return rms_norm(x.bfloat16().float(), w)

    assert_as_eager(function, (drawn(4, N), drawn(N)), 2.0**-7)
    assert changes[1].after["cast"] == 1


@pytest.mark.parametrize(("of", "to"), [HALVES, HALVES[::-1]])
def test_a_cast_to_another_half_stays(of: Any, to: Any, changes: list[Change]) -> None:
    """Taking the cast in would lose an overflow of float16, or add one."""
    y = drawn(4, N, dtype=of), drawn(N)
    assert_as_eager(lambda x, w: rms_norm(x, w).to(to), y, 2.0**-6)
    assert fewer(changes) == (0, 0)


def test_a_result_of_two_dtypes_keeps_the_wider(changes: list[Change]) -> None:
    def function(x: Any, w: Any) -> Any:
        y = rms_norm(x, w)
        return y, y.bfloat16()

    assert_as_eager(function, (drawn(4, N), drawn(N)), 2.0**-7)
    assert changes[1].fewer("cast") == 0


def test_a_gradient_of_two_dtypes_is_written_as_both(changes: list[Change]) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        return rms_norm(x.float() + r, w)

    assert_as_eager(function, (*operands(torch.bfloat16, torch.float32)[:2], drawn(N)), 2.0**-7)
    assert [change.after["cast"] for change in changes] == [0, 0]


def test_a_gradient_that_is_only_cast_to_go_on_is_written_once(changes: list[Change]) -> None:
    def function(x: Any, r: Any, w: Any) -> Any:
        return rms_norm(x.sin().float() + r, w)

    inputs = *operands(torch.bfloat16, torch.float32)[:2], drawn(N)
    assert_as_eager(function, inputs, 2.0**-7)
    assert fewer(changes) == (0, 0)


@pytest.mark.parametrize(
    ("of", "to"), [(torch.bfloat16, torch.float64), (torch.float64, torch.float32)]
)
def test_rows_are_computed_in_the_dtype_that_they_are_cast_to(
    of: Any, to: Any, changes: list[Change]
) -> None:
    def function(x: Any) -> Any:
        return layer_norm(x.to(to), out_dtype=torch.float64)

    with torch.no_grad():
        x = drawn(4, N, dtype=of)
        assert_near([traced(function)(x)], [function(x)], 0.0)
    assert fewer(changes) == (0, 0)


def test_under_autocast_no_cast_is_left_beside_a_norm(changes: list[Change]) -> None:
    def function(x: Any, stream: Any, w: Any, matrix: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            stream = stream + F.linear(x, matrix)
            return stream + F.linear(layer_norm(stream, w), matrix)

    assert_as_eager(function, operands(), 2.0**-6)
    for change in changes:
        for node in change.graph.nodes:
            if "cupynorm" in str(node.target):
                beside = [
                    *node.all_input_nodes,
                    *(u for result in node.users for u in result.users),
                ]
                assert not any(_fusion._cast_dtype(n) for n in beside)


# ---- drawn programs ------------------------------------------------------------------------------


DTYPES = torch.float64, torch.float32, *HALVES
STEPS = st.tuples(
    st.sampled_from(["add", "add", "cast", "norm", "norm", "residual", "view", "mul", "mm"]),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from(DTYPES),
)


def run_steps(steps: Any, x: Any, r: Any, w: Any) -> Any:
    values = [x, r]
    for kind, i, j, dtype in steps:
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        if kind == "add":
            values.append(a + b)
        elif kind == "cast":
            values.append(a.to(dtype))
        elif kind == "norm":
            values.append(NORMS[list(NORMS)[j % 2]](a, w))
        elif kind == "residual":
            values.extend(rms_norm(a, w, residual=b))
        elif kind == "view":
            values.append(a.view(2, 2, N).relu().view(4, N))
        elif kind == "mul":
            values.append(a * b)
        else:
            values.append(a @ w.expand(N, N).to(a.dtype))
    return tuple(values[:1:-2])  # the other values may not be stored


@settings(
    max_examples=examples(12, of=200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(STEPS, min_size=3, max_size=8), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_drawn_programs(steps: Any, of_x: Any, of_r: Any) -> None:
    torch._dynamo.reset()
    inputs = drawn(4, N, dtype=of_x), drawn(4, N, dtype=of_r, seed=1), drawn(N, seed=2) / 4
    f = functools.partial(run_steps, steps)
    assert_as_eager(f, inputs, 2.0**-4)


# ---- programs that inductor generates ------------------------------------------------------------


def test_a_generated_program_calls_the_passes_without_a_dispatch(changes: list[Change]) -> None:
    import torch._inductor.config as config
    from torch._inductor.utils import run_and_get_code

    before = config.save_config_portable()
    options, inputs = compile_options(), operands()
    compiled = torch.compile(block, options=options, fullgraph=True)
    results, codes = run_and_get_code(computed, compiled, inputs)
    assert_near(results, computed(block, inputs), 2.0**-18)
    assert changes[0].fewer("add") == 4
    # The options and the pass belong to what was compiled with them.
    assert config.save_config_portable() == before
    assert config.joint_custom_post_pass is None
    torch._dynamo.reset()
    with torch.no_grad():
        _, plain = run_and_get_code(torch.compile(block, fullgraph=True), *inputs)
    assert len(changes) == 1
    for name, calls in (
        ("norm_forward", codes[:1]),
        ("norm_backward", codes[1:]),
        ("norm_forward", plain),
    ):
        assert "\n".join(calls).count(f"= cupynorm.torch._inductor.{name}(True, ") == 2
    torch._dynamo.reset()
    with torch.no_grad():
        _, dynamic = run_and_get_code(torch.compile(block, dynamic=True), *inputs)
    assert "\n".join(dynamic).count("= cupynorm.torch._inductor.norm_forward(False, ") == 2
    for program in (*codes, *plain, *dynamic):
        assert "ops.cupynorm.norm_forward.default(" not in program
        assert "ops.cupynorm.norm_backward.default(" not in program


class Block(nn.Module):
    def forward(self, *operands: Any) -> Any:
        return block(*operands)


@pytest.mark.skipif(not THOROUGH, reason="compiles C++ for a minute: CUPYNORM_THOROUGH=1")
def test_programs_of_cpp(changes: list[Change], tmp_path: Any) -> None:
    inputs, options = operands(), compile_options()
    compiled = torch.compile(block, options=options | {"cpp_wrapper": True}, fullgraph=True)
    assert_near(computed(compiled, inputs), computed(block, inputs), 2.0**-18)
    assert changes.pop().fewer("add") == 4
    with torch.no_grad():
        exported = torch.export.export(Block(), inputs)
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "block.pt2"), inductor_configs=options
        )
        loaded = torch._inductor.aoti_load_package(path)
        assert_near(list(loaded(*inputs)), list(block(*inputs)), 2.0**-18)
    assert changes.pop().fewer("add") == 2


def test_options_are_the_same_each_time() -> None:
    assert compile_options() == compile_options()
    passed = pickle.loads(pickle.dumps(compile_options()))
    assert passed == compile_options()


@pytest.mark.parametrize("is_static", [True, False])
def test_a_bound_call_takes_a_negated_gradient(is_static: bool) -> None:
    x, weight, dy = drawn(3, 8), drawn(8, seed=1), drawn(3, 8, seed=2)
    negated = torch.complex(torch.zeros(3, 8), -dy).conj().imag
    assert negated.is_neg()
    forward = _inductor.norm_forward(is_static, 1, "rms_norm", 1e-6, False, None, None, None, True)
    told = (1, "rms_norm", 1e-6, False, None, None, None)
    backward, another = (_inductor.norm_backward(is_static, *told) for _ in range(2))
    y, rstd = torch.full_like(x, nan), torch.full((3,), nan)
    forward(x, None, weight, None, y, None, rstd, None, None)
    assert torch.equal(y, rms_norm(x, weight))
    expected, found = ([torch.full_like(t, nan) for t in (x, weight)] for _ in range(2))
    another(dy, x, None, weight, None, rstd, None, *expected, None, None)
    assert not any(gradient.isnan().any() for gradient in expected)
    for gradient in (negated, dy, negated):
        backward(gradient, x, None, weight, None, rstd, None, *found, None, None)
        for result, right in zip(found, expected, strict=True):
            assert torch.equal(result, right)
            result.fill_(nan)


@pytest.mark.parametrize("is_static", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_a_bound_call_writes_into_what_it_is_given(is_static: bool, first: int) -> None:
    forward = _inductor.norm_forward(is_static, 1, "rms_norm", 1e-6, False, None, None, None, True)
    told = (1, "rms_norm", 1e-6, False, None, None, torch.float32)
    backward = _inductor.norm_backward(is_static, *told)
    with torch_plans.in_place_of_kernels() as plans:
        for i, shift in enumerate((first, 0, 1, 0)):  # elements: those of 1 are less aligned
            memory = torch.full((3, 4 * N + 4), nan)
            y, total, dx = (row[shift : 4 * N + shift].view(4, N) for row in memory)
            x, r, weight = drawn(4, N, seed=i), drawn(4, N, seed=7), drawn(N, seed=8)
            rstd, (dweight, dbias) = torch.full((4,), nan), torch.full((2, N), nan)
            forward(x, r, weight, None, y, None, rstd, None, total)
            backward(y, total, None, weight, None, rstd, None, dx, dweight, dbias, None)
            ran = [plan for plan in plans.made if plan.launches]
            assert [plan.vector for plan in ran] == 2 * [1 if shift else 4]
            leaf, scale = total.clone().requires_grad_(), weight.clone().requires_grad_()
            expected = rms_norm(leaf, scale)
            assert torch.equal(total, x + r)
            assert torch.equal(y, expected)
            right = torch.autograd.grad(expected, (leaf, scale), y)
            assert torch.equal(dx, right[0])
            assert torch.equal(dweight, right[1])
            assert torch.equal(dbias, y.double().sum(0).float())
            for plan in plans.made:
                plan.launches.clear()


def test_calls_that_are_given_other_results_are_told_apart() -> None:
    forward = _inductor.norm_forward(False, 1, "rms_norm", 1e-6, False, None, None, None, False)
    x = drawn(0, N)
    with torch_plans.in_place_of_kernels():
        forward(x, None, None, None, torch.empty_like(x), None, None, None, None)
        forward(x, None, None, None, None, None, None, None, None)


def test_a_mode_goes_with_the_options(changes: list[Change]) -> None:
    from torch._inductor import list_mode_options

    options = compile_options("reduce-overhead")
    assert options.pop("joint_custom_post_pass")
    assert options == list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}
    assert list(compile_options()) == ["joint_custom_post_pass"]
    assert list(list_mode_options("default")) == []
    with pytest.raises(RuntimeError, match="Unrecognized mode=fast"):
        compile_options("fast")
    options = compile_options("reduce-overhead")
    with torch.no_grad():
        inputs = operands()
        results = torch.compile(block, options=options, fullgraph=True)(*inputs)
        assert_near(list(results), list(block(*inputs)), 2.0**-18)
    assert fewer(changes) == (2, 0)
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(block, mode="reduce-overhead", options=options)


# ---- models of transformers ----------------------------------------------------------------------

SIZES = SIZES_OF_MODELS | {
    # GPT-2's names, and no dropout
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any) -> Any:
        return self.model(input_ids=ids, use_cache=False).logits


def language_model(kind: str, dtype: Any, layers: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **SIZES, num_hidden_layers=layers)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    assert replace_norms(model).replaced
    return Logits(model.eval())


def learned(model: Any, forward: Any) -> list[Any]:
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = F.cross_entropy(forward(ids).flatten(0, 1).double(), ids.flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("kind", "dtype", "layers", "unit"),
    [
        # Results in float32 have the same bits, except for the softmax of Gemma 2.
        ("llama", torch.float64, 2, 2.0**-40),
        ("llama", torch.bfloat16, 1, 2.0**-4),
        ("gpt2", torch.float64, 1, 2.0**-40),
        ("gemma2", torch.float64, 1, 2.0**-20),
        ("qwen3", torch.float64, 1, 2.0**-40),
    ],
)
def test_blocks_of_a_model(
    kind: str,
    dtype: Any,
    layers: int,
    unit: float,
    changes: list[Change],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = language_model(kind, dtype, layers, monkeypatch)
    assert_near(learned(model, traced(model)), learned(model, model), unit)
    with torch.no_grad():
        ids = torch.arange(3, 15)[None]
        assert_near([traced(model)(ids)], [model(ids)], unit)
    # A layer adds to the stream twice, before a norm each. The gradients of each norm's input are
    # added too, since the input has another user. Only the last norm's input has none.
    assert [change.fewer("add") for change in changes] == [4 * layers, 2 * layers]
