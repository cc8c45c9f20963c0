"""What the tests of cupynorm.torch share: tensors in given layouts, and the check of a problem."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st
from strategies import DTYPES, Problem, make_values
from thorough import THOROUGH

import cupynorm.torch
from cupynorm import NormBackward, NormForward, testing
from cupynorm._operation import FORWARD
from cupynorm.reference import round_once
from cupynorm.torch import _kernels

NORMS = ("rms_norm", "layer_norm")

# Second derivatives are compared along a drawn direction, or element by element.
FAST = not THOROUGH

# The configuration of small models of transformers.
SIZES_OF_MODELS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


# Which operands of a problem are negated views. In half of the draws none are.
NEGATED = st.just(frozenset()) | st.frozensets(
    st.sampled_from(["x", "dy", "weight", "bias", "residual"])
)

# The dtypes of a residual and of the sum, or no residual.
ResidualDtypes = tuple[str, str]
RESIDUALS = st.none() | st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)))


def to_torch(array: Any, device: str = "cpu", negated: bool = False) -> Any:
    """Copy a NumPy array to a device, with the same strides and alignment.

    If `negated`, its memory holds the values with the other sign, and the tensor is a negated view.
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
    problem: Problem,
    device: str = "cpu",
    negated: frozenset[str] = frozenset(),
    dtypes: ResidualDtypes | None = None,
) -> dict[str, float]:
    """Check y, what is kept for backward, and the gradients that autograd returns.

    With `dtypes`, of a residual and of the sum, check a call with a residual.
    """
    arrays = problem.on(np)
    # A gradient has the dtype of its tensor.
    with np.errstate(all="ignore"):
        dy_values = round_once(arrays["dy"].astype(np.float64), problem.out_dtype)
    arrays["dy"] = problem.layouts["dy"].apply(np, dy_values)
    arrays["residual"] = ds_array = None
    if dtypes is not None:
        of_residual, of_total = (DTYPES[name] for name in dtypes)
        shape, k = problem.x.shape, problem.k
        values = make_values("normal", shape, of_residual, problem.seed + 4, k)
        # The residual has dy's layout, and ds has x's.
        arrays["residual"] = problem.layouts["dy"].apply(np, values)
        values = make_values("mixed_rows", shape, of_total, problem.seed + 5, k)
        ds_array = problem.layouts["x"].apply(np, values)
    tensors = {name: to_torch(array, device, name in negated) for name, array in arrays.items()}
    dy, ds = tensors.pop("dy"), to_torch(ds_array, device, "dy" in negated)
    options: dict[str, Any] = problem.forward_options
    options["out_dtype"] = getattr(torch, problem.out_dtype.name)
    options["residual_dtype"] = None if dtypes is None else getattr(torch, dtypes[1])

    def call() -> tuple[Any, ...]:
        results = getattr(cupynorm.torch, problem.norm)(**tensors, **options)
        return results if isinstance(results, tuple) else (results,)

    with torch.no_grad():
        inferred = call()
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None}
    results = call()
    for one, other in zip(inferred, results, strict=True):
        assert other.is_contiguous()
        assert_same_bits(one, other)
    given = (dy,) if ds is None else (dy, ds)
    found = torch.autograd.grad(results, list(leaves.values()), given)
    gradients = dict(zip(leaves, found, strict=True))

    # What autograd keeps, but does not hand out.
    plain = {n: t if t is None else t.detach().resolve_neg() for n, t in tensors.items()}
    row = problem.x.shape[problem.x.ndim - problem.k :]
    for name in ("weight", "bias"):
        plain[name] = None if plain[name] is None else plain[name].reshape(row)
    kept = _kernels.run(
        FORWARD,
        tuple(plain[name] for name in FORWARD.reads),
        (
            problem.k,
            problem.norm,
            problem.eps,
            problem.zero_centered,
            problem.relu,
            options["out_dtype"],
            options["residual_dtype"],
            True,
        ),
    )
    forward = NormForward(*map(to_numpy, kept))
    for name, tensor in zip(("y", "residual_out"), results, strict=False):
        assert_same_bits(tensor, getattr(NormForward(*kept), name))
    host = (arrays["x"], arrays["weight"], arrays["bias"])
    of_sum: dict[str, Any] = {}
    of_gradients: dict[str, Any] = {}
    if dtypes is not None:
        of_sum = {"residual": arrays["residual"], "residual_dtype": of_total}
        of_gradients = {"dx_dtype": problem.x.dtype, "dresidual_dtype": of_residual}
    ratios = testing.check_forward(
        problem.norm, forward, *host, **problem.forward_options, **of_sum
    )
    names = ("x", "weight", "bias", "residual")
    backward = NormBackward(*(to_numpy(gradients.get(name)) for name in names))
    ratios |= testing.check_backward(
        problem.norm,
        backward,
        arrays["dy"],
        arrays["x"] if dtypes is None else forward.residual_out,
        arrays["weight"],
        forward.mean,
        forward.rstd,
        bias=False if arrays["bias"] is None else arrays["bias"],
        bitmask=forward.bitmask,
        dresidual_out=ds_array,
        **of_gradients,
        **problem.options,
    )
    return ratios


__all__ = [
    "DTYPES",
    "NEGATED",
    "NORMS",
    "RESIDUALS",
    "assert_same_bits",
    "check_problem",
    "to_numpy",
    "to_torch",
]
