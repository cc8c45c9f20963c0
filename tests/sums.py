"""The check of sums over rows that are written to given arrays, or added to what these hold.

For kernels on a GPU or on the host, or for NumPy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from residuals import assert_bits, rows_of
from strategies import DTYPES, HEIGHTS, Layout, Problem, dtypes, make_values, problems

from cupynorm import testing
from cupynorm.reference import Array, compute_dtype, round_once

NAMES = "dweight", "dbias"
# Widths of each regime that writes sums: parts of a warp up to several warps, clusters of blocks,
# columns, streamed rows.
WIDTHS = (1, 5, 8, 40, 300, 1000, 2048, 4096, 4097, 8192, 16384, 20004, 65544, 98304, 131072)


@dataclasses.dataclass(frozen=True)
class WithSums:
    """A problem, the dtypes of given arrays, and at which element of aligned memory they begin."""

    problem: Problem
    dtypes: dict[str, np.dtype[Any]]
    offset: int


@st.composite
def problems_with_sums(draw: st.DrawFn, widths: tuple[int, ...] = (), **options: Any) -> WithSums:
    """Draw a problem with places for its sums. If widths are given, its rows have one of them."""
    problem = draw(problems(**options))
    if options.get("broadcast"):  # whose axes may have moved, which layouts do not know
        plain = dict.fromkeys(problem.layouts, Layout())
        problem = dataclasses.replace(problem, layouts=plain)
    if widths:
        problem = rows_of(
            problem, draw(st.sampled_from(HEIGHTS[:5])), draw(st.sampled_from(widths))
        )
    return WithSums(
        problem, {name: draw(dtypes()) for name in NAMES}, draw(st.sampled_from((0, 0, 1, 4)))
    )


def problem_of(call: Any, arrays: dict[str, Array]) -> Problem:
    """Return a call of test_groups.py as a problem."""
    axis = (-1,) if call.axis is None else call.axis
    axis = axis if isinstance(axis, tuple) else (axis,)
    return Problem(
        norm=call.norm,
        k=len(axis),
        eps=1e-5,
        axis=axis,
        zero_centered=False,
        relu=call.relu,
        out_dtype=arrays["x"].dtype,
        wants_dbias=True,
        regime="normal",
        seed=1,
        layouts=dict.fromkeys(arrays, Layout()),
        **arrays,
    )


def check_sums(caller: Any, drawn: WithSums) -> None:
    """Check what is written to given arrays, and what is added: once, and rounded once.

    `caller` is as in `residuals.check_residual`.
    """
    problem = drawn.problem
    compute = np.dtype(np.float64) if caller.xp is np else compute_dtype(problem.x)
    on_gpu = problem.on(caller.xp)
    operands = on_gpu["x"], on_gpu["weight"], on_gpu["bias"]
    forward = caller.forward(problem.norm, *operands, **problem.forward_options)
    host = caller.get(forward)
    arguments = on_gpu["dy"], on_gpu["x"], on_gpu["weight"], forward.mean, forward.rstd
    known = {"bitmask": forward.bitmask, **problem.options}
    known["bias"] = problem.wants_dbias if problem.bias is None else on_gpu["bias"]

    def run(before: dict[str, Array], accumulate: bool) -> Any:
        layout = Layout(offset=drawn.offset)
        into = {name: layout.apply(caller.xp, array) for name, array in before.items()}
        result = caller.backward(problem.norm, *arguments, **known, **into, accumulate=accumulate)
        gradients = caller.get(result)
        for name, array in into.items():
            assert_bits(caller.get(array), getattr(gradients, name), f"the given {name}")
        testing.check_backward(
            *(problem.norm, gradients, problem.dy, problem.x, problem.weight),
            *(host.mean, host.rstd),
            bias=problem.backward_bias,
            bitmask=host.bitmask,
            **problem.options,
            **before,
            accumulate=accumulate,
        )
        return gradients

    plain = caller.get(caller.backward(problem.norm, *arguments, **known))
    shapes = {
        name: getattr(plain, name).shape for name in NAMES if getattr(plain, name) is not None
    }
    if not shapes:
        return
    sums = run({name: np.full(shape, np.nan, compute) for name, shape in shapes.items()}, False)
    assert_bits(sums.dx, plain.dx, "dx")
    before = {
        name: make_values("normal", shape, drawn.dtypes[name], problem.seed + 5)
        for name, shape in shapes.items()
    }
    for array in before.values():
        array.reshape(-1)[:1] = -0.0  # of no rows it stays so
    written, added, again = run(before, False), run(before, True), run(before, True)
    for name, held in before.items():
        of_rows, dtype = getattr(sums, name), held.dtype
        assert_bits(getattr(written, name), round_once(of_rows.astype(np.float64), dtype), name)
        wide = np.promote_types(compute, np.float64 if dtype == np.float64 else np.float32)
        with np.errstate(all="ignore"):
            total = held.astype(wide) + of_rows.astype(wide)
        if problem.x.size == 0:
            total = held
        # A GPU may take subnormal numbers for zeros.
        sizes = np.abs(np.stack([np.asarray(a, np.float64) for a in (held, of_rows, total)]))
        usual = ~((sizes > 0) & (sizes < np.finfo(np.float32).tiny)).any(axis=0)
        expected = round_once(np.asarray(total, np.float64), dtype)
        actual = getattr(added, name)
        assert_bits(getattr(again, name), actual, f"{name}, added again")
        assert_bits(actual[usual], expected[usual], f"{name}, added")


def with_sums(problem: Problem, dweight: str, dbias: str, offset: int = 0) -> WithSums:
    return WithSums(problem, {"dweight": DTYPES[dweight], "dbias": DTYPES[dbias]}, offset)
