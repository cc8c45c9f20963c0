"""What the tests of cupynorm.torch share: tensors in given layouts, and the check of a problem."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from strategies import DTYPES, Problem

import cupynorm.torch
from cupynorm import NormBackward, NormForward, testing
from cupynorm.reference import round_once
from cupynorm.torch import _kernels

NORMS = ("rms_norm", "layer_norm")


# Which operands of a problem are views that negate: none in half of the cases.
NEGATED = st.just(frozenset()) | st.frozensets(st.sampled_from(["x", "dy", "weight", "bias"]))


def to_torch(array: Any, device: str = "cpu", negated: bool = False) -> Any:
    """Copy a NumPy array to a device, element by element at the same distances and alignment.

    Where it is to be `negated`, its memory has the other sign, which the tensor makes good.
    """
    if array is None:
        return None
    dtype = getattr(torch, array.dtype.name)
    bits = array.view(f"i{array.itemsize}")
    strides = [s // array.itemsize for s in array.strides]
    last = sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    offset = array.ctypes.data % 64 // array.itemsize
    span = np.lib.stride_tricks.as_strided(bits, (max(last, 0) + 1,), (array.itemsize,))
    if array.size == 0:
        span = np.zeros(1, bits.dtype)
    base = torch.zeros(offset + span.size, dtype=torch.from_numpy(bits[:0].reshape(-1)).dtype)
    base[offset:] = torch.from_numpy(span.copy())
    memory = base.to(device).view(dtype)
    if negated:
        memory.neg_()
    tensor = memory[offset:].as_strided(array.shape, strides, offset)
    return torch._neg_view(tensor) if negated else tensor


def to_numpy(tensor: Any) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().cpu().contiguous().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def assert_same_bits(a: Any, b: Any) -> None:
    a, b = to_numpy(a), to_numpy(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def check_problem(
    problem: Problem, device: str = "cpu", negated: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Check y, what is kept for backward, and the gradients that autograd returns."""
    arrays = problem.on(np)
    # A gradient has the dtype of what it is the gradient of.
    with np.errstate(all="ignore"):
        dy_values = round_once(arrays["dy"].astype(np.float64), problem.out_dtype)
    arrays["dy"] = problem.layouts["dy"].apply(np, dy_values)
    tensors = {name: to_torch(array, device, name in negated) for name, array in arrays.items()}
    dy = tensors.pop("dy")
    function = getattr(cupynorm.torch, problem.norm)
    options: dict[str, Any] = problem.forward_options
    options["out_dtype"] = getattr(torch, problem.out_dtype.name)

    with torch.no_grad():
        inferred = function(*tensors.values(), **options)
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    y = function(*tensors.values(), **options)
    assert y.is_contiguous()
    assert_same_bits(inferred, y)
    gradients = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))

    # What autograd keeps, which it does not hand out.
    x, *affine = (t if t is None else t.detach().resolve_neg() for t in tensors.values())
    row = x.shape[x.ndim - problem.k :]
    kept = _kernels.forward(
        (x, *(t if t is None else t.reshape(row) for t in affine)),
        (
            problem.k,
            problem.norm,
            problem.eps,
            problem.zero_centered,
            problem.relu,
            options["out_dtype"],
        ),
        True,
    )
    assert_same_bits(kept[0], y)
    forward = NormForward(*map(to_numpy, kept))
    host = (arrays["x"], arrays["weight"], arrays["bias"])
    ratios = testing.check_forward(problem.norm, forward, *host, **problem.forward_options)
    backward = NormBackward(*(to_numpy(gradients.get(n)) for n in ("x", "weight", "bias")))
    ratios |= testing.check_backward(
        problem.norm,
        backward,
        arrays["dy"],
        arrays["x"],
        arrays["weight"],
        forward.mean,
        forward.rstd,
        bias=False if arrays["bias"] is None else arrays["bias"],
        bitmask=forward.bitmask,
        **problem.options,
    )
    return ratios


__all__ = [
    "DTYPES",
    "NEGATED",
    "NORMS",
    "assert_same_bits",
    "check_problem",
    "to_numpy",
    "to_torch",
]
