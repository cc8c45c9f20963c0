"""The check of one problem with a residual, for kernels on a GPU or on the host, or for NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from strategies import DTYPES, HEIGHTS, Layout, Problem, layouts, make_values, problems

import cupynorm
from cupynorm import testing
from cupynorm.reference import Array, compute_dtype

# Widths of each regime: parts of a warp up to several warps, clusters of blocks, columns, streamed
# rows. Some are whole packs.
RESIDUAL_WIDTHS = (
    *(1, 5, 8, 40, 100, 256, 300, 1000, 1600, 2048, 4096, 4097, 6144, 8192, 8200, 12288, 16384),
    *(20000, 20480, 32768, 49152, 65544, 98304, 131072),
)


@dataclasses.dataclass(frozen=True)
class WithResidual:
    """A problem and its residual. Without `dresidual_out`, the sum has no gradient."""

    problem: Problem
    residual: Array = dataclasses.field(repr=False)
    dresidual_out: Array | None = dataclasses.field(repr=False)
    total_dtype: np.dtype[Any]
    layout: Layout

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dx_dtype": self.problem.x.dtype, "dresidual_dtype": self.residual.dtype}


def with_residual(
    problem: Problem, residual: str, total: str, *, has_gradient: bool = True, layout: Layout
) -> WithResidual:
    shape, seed = problem.x.shape, problem.seed + 7
    values = make_values(problem.regime, shape, DTYPES[residual], seed, problem.k)
    gradient = None
    if has_gradient:
        gradient = make_values("normal", shape, DTYPES[total], seed + 1, problem.k)
    return WithResidual(problem, layout.apply(np, values), gradient, DTYPES[total], layout)


@st.composite
def residual_problems(
    draw: st.DrawFn, widths: tuple[int, ...] = (), **options: Any
) -> WithResidual:
    """Draw a problem with a residual. If widths are given, its rows have one of them."""
    problem = draw(problems(**options))
    if widths:
        n = draw(st.sampled_from(widths))
        m = draw(st.sampled_from(HEIGHTS[1:5]))
        problem = rows_of(problem, m, n)
    names = list(DTYPES)
    residual = draw(st.sampled_from(names))
    total = draw(st.sampled_from([residual, residual, *names]))
    kinds = ("rows", "transposed", "columns")
    return with_residual(
        problem,
        residual,
        total,
        has_gradient=draw(st.booleans()),
        layout=draw(layouts(problem.k, kinds)),
    )


def rows_of(problem: Problem, m: int, n: int) -> Problem:
    """Return a problem with the same dtypes and options, but m rows of n elements.

    There are fewer rows if they are long: the host would count more accesses than it allows.
    """
    m = min(m, 2**19 // n)

    def row(array: Array | None, seed: int) -> Array | None:
        return None if array is None else make_values("normal", (n,), array.dtype, seed)

    plain = dict.fromkeys(problem.layouts, Layout())
    return dataclasses.replace(
        problem,
        k=1,
        axis=None,
        eps=max(problem.eps, 1e-6),
        layouts=plain,
        x=make_values(problem.regime, (m, n), problem.x.dtype, problem.seed),
        dy=make_values("normal", (m, n), problem.dy.dtype, problem.seed + 1),
        weight=row(problem.weight, problem.seed + 2),
        bias=row(problem.bias, problem.seed + 3),
    )


def assert_bits(actual: Array | None, expected: Array | None, name: str) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None and expected is not None:
        assert actual.dtype == expected.dtype, name
        both_nan = np.isnan(actual) & np.isnan(expected)
        word = f"u{actual.itemsize}"
        bits = (np.ascontiguousarray(array).view(word) for array in (actual, expected))
        np.testing.assert_array_equal(*(np.where(both_nan, 0, b) for b in bits), f"bits of {name}")


def check_residual(caller: Any, drawn: WithResidual) -> None:
    """Check a forward and a backward pass, and that both have the bits of the unfused pair.

    `caller` has `put` and `get` for arrays. It also has `forward`, `infer` and `backward`, whose
    first argument is the norm.
    """
    problem, total_dtype = drawn.problem, drawn.total_dtype
    norm, options = problem.norm, problem.forward_options
    x, weight, bias = problem.x, problem.weight, problem.bias
    on_gpu = problem.on(caller.xp)
    operands = on_gpu["x"], on_gpu["weight"], on_gpu["bias"]
    residual = drawn.layout.apply(caller.xp, drawn.residual)
    given = {"residual": residual, "residual_dtype": total_dtype}

    result = caller.forward(norm, *operands, **given, **options)
    host = caller.get(result)
    testing.check_forward(
        norm, host, x, weight, bias, residual=drawn.residual, residual_dtype=total_dtype, **options
    )
    total = caller.put(host.residual_out)
    # If x is wider than the sum, the kernel of the sum may have no room.
    has_room = x.dtype.itemsize <= total_dtype.itemsize or x.shape[-1] < 4096
    if has_room:
        unfused = caller.get(caller.forward(norm, total, *operands[1:], **options))
        for name in ("y", "mean", "rstd", "bitmask"):
            assert_bits(getattr(host, name), getattr(unfused, name), name)
    y, summed = caller.infer(norm, *operands, **given, **options)
    assert_bits(caller.get(y), host.y, "y of inference")
    assert_bits(caller.get(summed), host.residual_out, "residual_out of inference")
    if caller.takes_in_place(norm, x.shape[-1]):
        check_in_place(caller, drawn, host)
    check_gradients(caller, drawn, on_gpu, result, host)


def check_in_place(caller: Any, drawn: WithResidual, host: Any) -> None:
    """Write y over x and the sum over the residual, or each over the other."""
    problem = drawn.problem
    x, residual = (caller.put(np.ascontiguousarray(a)) for a in (problem.x, drawn.residual))
    outputs = {}
    for array, of_x in ((x, True), (residual, False)):
        if array.dtype == problem.out_dtype and (of_x or "out" not in outputs):
            outputs["out"] = array
        elif array.dtype == drawn.total_dtype:
            outputs["residual_out"] = array
    options = problem.forward_options | {"residual_dtype": drawn.total_dtype}
    weight, bias = (None if a is None else caller.put(a) for a in (problem.weight, problem.bias))
    y, total = caller.infer(problem.norm, x, weight, bias, residual=residual, **outputs, **options)
    assert_bits(caller.get(y), host.y, "y in place")
    assert_bits(caller.get(total), host.residual_out, "residual_out in place")


def check_gradients(
    caller: Any, drawn: WithResidual, on_gpu: dict[str, Any], result: Any, host: Any
) -> None:
    problem = drawn.problem
    wanted = problem.wants_dbias if problem.bias is None else on_gpu["bias"]
    of_total = drawn.dresidual_out
    if of_total is not None:
        of_total = drawn.layout.apply(caller.xp, of_total)
    total = drawn.layout.apply(caller.xp, host.residual_out)
    arguments = on_gpu["dy"], total, on_gpu["weight"], result.mean, result.rstd
    known = {"bias": wanted, "bitmask": result.bitmask, **problem.options}
    gradients = caller.get(
        caller.backward(problem.norm, *arguments, **known, dresidual_out=of_total, **drawn.dtypes)
    )
    testing.check_backward(
        problem.norm,
        gradients,
        problem.dy,
        host.residual_out,
        problem.weight,
        host.mean,
        host.rstd,
        bias=problem.backward_bias,
        bitmask=host.bitmask,
        **problem.options,
        dresidual_out=drawn.dresidual_out,
        **drawn.dtypes,
    )
    if of_total is not None and drawn.total_dtype == problem.x.dtype:
        over = caller.put(drawn.dresidual_out)
        in_place = caller.backward(
            problem.norm, *arguments, **known, dresidual_out=over, dx=over, **drawn.dtypes
        )
        assert_bits(caller.get(in_place).dx, gradients.dx, "dx in place of dresidual_out")
        assert_bits(caller.get(over), gradients.dx, "dresidual_out, over which dx is written")
    # NumPy computes everything in float64, and rounds only the sum of the two gradients.
    compute = np.dtype(np.float64) if caller.xp is np else compute_dtype(host.residual_out)
    if drawn.total_dtype != compute or drawn.dresidual_out is None:
        return
    unfused = caller.get(caller.backward(problem.norm, *arguments, **known)).dx
    with np.errstate(all="ignore"):
        expected = unfused + drawn.dresidual_out
    # Rows in which some dx is not finite are only held to the bound.
    rows = np.isfinite(unfused).all(axis=-1, keepdims=True)
    for name, dtype in (("dx", problem.x.dtype), ("dresidual", drawn.residual.dtype)):
        if dtype == compute:
            actual = getattr(gradients, name)
            assert_bits(np.where(rows, actual, 0), np.where(rows, expected, 0), name)


class OfCupyNorm:
    """The public functions, in the form that `check_residual` takes."""

    def __init__(self, xp: Any, put: Any, get: Any) -> None:
        self.xp, self.put, self.get = xp, put, get

    def takes_in_place(self, norm: str, n: int) -> bool:
        return True

    def forward(self, norm: str, *arguments: Any, **options: Any) -> Any:
        return getattr(cupynorm, f"{norm}_forward")(*arguments, **options)

    def infer(self, norm: str, *arguments: Any, **options: Any) -> Any:
        return getattr(cupynorm, norm)(*arguments, **options)

    def backward(
        self, norm: str, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, **options: Any
    ) -> Any:
        statistics = (rstd,) if norm == "rms_norm" else (mean, rstd)
        return getattr(cupynorm, f"{norm}_backward")(dy, x, weight, *statistics, **options)
