"""Wrong calls with torch's tensors: each one's error, whole, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", minversion="2.11")

import torch
import torch_plans
from torch._subclasses import FakeTensorMode

import cupynorm
from cupynorm import reference
from cupynorm.torch import (
    GroupNorm,
    LayerNorm,
    RMSNorm,
    compile_options,
    layer_norm,
    replace_norms,
    rms_norm,
)

FOUR = "float64, float32, float16 or bfloat16"
X, W = torch.ones(3, 4, 8), torch.ones(8)
BITS = torch.zeros(2, 3, dtype=torch.uint8)
ROWS = cupynorm.Quantize("int8", "row")
NUMBER, BOUNDS = torch.tensor(1.0), (torch.tensor(0.0), torch.tensor(1.0))

GATED = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * z)

Calls = list[tuple[Callable[[], Any], type[Exception], str]]

OF_FUNCTIONS: Calls = [
    (lambda: rms_norm(np.ones((2, 8))), TypeError, "x must be a torch tensor, got ndarray"),
    (lambda: rms_norm(None), TypeError, "x must be a torch tensor, got NoneType"),
    (lambda: rms_norm(X, [1.0] * 8), TypeError, "weight must be a torch tensor, got list"),
    (lambda: rms_norm(X, W, 1.0), TypeError, "bias must be a torch tensor, got float"),
    (lambda: rms_norm(X.int()), TypeError, f"x.dtype must be {FOUR}, got torch.int32"),
    (lambda: rms_norm(X, W.int()), TypeError, f"weight.dtype must be {FOUR}, got torch.int32"),
    (lambda: rms_norm(X, W, W.int()), TypeError, f"bias.dtype must be {FOUR}, got torch.int32"),
    (
        lambda: rms_norm(X.to_sparse(), W),
        TypeError,
        "x must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: rms_norm(X, W.to_sparse()),
        TypeError,
        "weight must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: rms_norm(X, W, W.to_sparse()),
        TypeError,
        "bias must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: rms_norm(X, W[None].to_sparse(), axis=-1),
        TypeError,
        "weight must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: rms_norm(X, W[:4]),
        ValueError,
        "weight must have the shape of x's normalized axes, (8,), or broadcast to x's shape, "
        "(3, 4, 8); got (4,)",
    ),
    (
        lambda: rms_norm(X, X[:2]),
        ValueError,
        "weight must have the shape of x's normalized axes, (8,), or broadcast to x's shape, "
        "(3, 4, 8); got (2, 4, 8)",
    ),
    (
        lambda: rms_norm(X, X[:2, :1, :1], axis=0),
        ValueError,
        "weight must have the shape of x's normalized axes, (3, 1, 1), or broadcast to x's shape, "
        "(3, 4, 8); got (2, 1, 1)",
    ),
    (
        lambda: rms_norm(X, X[:1, :1], X[None], axis=(-1, 1)),
        ValueError,
        "bias must have the shape of x's normalized axes, (4, 8), or broadcast to x's shape, "
        "(3, 4, 8); got (1, 3, 4, 8)",
    ),
    (
        lambda: rms_norm(X, None, W[:4]),
        ValueError,
        "bias must have the shape of x's normalized axes, (8,), or broadcast to x's shape, "
        "(3, 4, 8); got (4,)",
    ),
    (lambda: rms_norm(X, W.to("meta")), ValueError, "weight must be on x's device, cpu; got meta"),
    (lambda: rms_norm(X.to("meta"), W), ValueError, "weight must be on x's device, meta; got cpu"),
    (
        lambda: rms_norm(torch.ones(3, 0)),
        ValueError,
        "x must have at least one element in each row, got shape (3, 0)",
    ),
    (
        lambda: rms_norm(torch.ones(())),
        ValueError,
        "x must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: rms_norm(torch.ones(()), W),
        ValueError,
        "x must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: rms_norm(X, W, eps=-1.0),
        ValueError,
        "eps must be a finite number of at least 0, got -1.0",
    ),
    (lambda: rms_norm(X, W, eps="1"), TypeError, "eps must be a real number, got '1'"),
    (lambda: layer_norm(X, W, eps=None), TypeError, "eps must be a real number, got None"),
    (
        lambda: rms_norm(X, W, axis=3),
        ValueError,
        "axis must name axes of x, each once, such as -1 or (-2, -1); got 3 for an x of 3 axes",
    ),
    (
        lambda: rms_norm(X, W, axis=(-1, 2)),
        ValueError,
        "axis must name axes of x, each once, such as -1 or (-2, -1); got (-1, 2) for an x of 3 "
        "axes",
    ),
    (
        lambda: rms_norm(X, W, axis=range(0)),
        ValueError,
        "axis must name axes of x, each once, such as -1 or (-2, -1); got range(0, 0) for an x of "
        "3 axes",
    ),
    (
        lambda: rms_norm(X, W, axis="-1"),
        TypeError,
        "axis must be an int, a tuple of ints or None, got '-1'",
    ),
    (
        lambda: rms_norm(X, zero_centered=True),
        ValueError,
        "zero_centered must be False without a weight, got True",
    ),
    (
        lambda: rms_norm(X, W, zero_centered=None),
        TypeError,
        "zero_centered must be True or False, got None",
    ),
    (
        lambda: rms_norm(X, relu=6),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got 6",
    ),
    (
        lambda: rms_norm(X, relu=(False, True)),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got (False, True)",
    ),
    (
        lambda: rms_norm(X, relu=([0], [1])),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got ([0], [1])",
    ),
    (
        lambda: rms_norm(X, relu=np.array([0.0, 1.0])),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got array([0., 1.])",
    ),
    (
        lambda: rms_norm(X, relu=NUMBER),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got tensor(1.)",
    ),
    (
        lambda: rms_norm(X, relu=BOUNDS),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got (tensor(0.), tensor(1.)): "
        "pass float(...) of each",
    ),
    (lambda: rms_norm(X, eps=[1e-6]), TypeError, "eps must be a real number, got [1e-06]"),
    (lambda: rms_norm(X, eps=True), TypeError, "eps must be a real number, got True"),
    (
        lambda: rms_norm(X, eps=NUMBER),
        TypeError,
        "eps must be a real number, got tensor(1.): pass float(eps)",
    ),
    (
        lambda: rms_norm(X, eps=np.array([1e-6])),
        TypeError,
        "eps must be a real number, got array([1.e-06])",
    ),
    (
        lambda: rms_norm(X, relu=[6.0, 0.0]),
        ValueError,
        "relu must be (lower, upper) with lower < upper as float32, got (6.0, 0.0)",
    ),
    (
        lambda: rms_norm(X, out_dtype=[1]),
        TypeError,
        "out_dtype must be a torch.dtype or None, got [1]",
    ),
    (
        lambda: rms_norm(X, out_dtype="float32"),
        TypeError,
        "out_dtype must be a torch.dtype or None, got 'float32'",
    ),
    (
        lambda: rms_norm(X, out_dtype=torch.int8),
        TypeError,
        f"out_dtype must be {FOUR}, got torch.int8",
    ),
    (
        lambda: GATED(X, z="a"),
        TypeError,
        "z must be a number or a torch tensor, as x is; got str",
    ),
    (
        lambda: GATED(X, 2.0, z=X),
        TypeError,
        "weight must be a torch tensor, as x is; got float",
    ),
    (lambda: rms_norm(X, residual=1.0), TypeError, "residual must be a torch tensor, got float"),
    (
        lambda: rms_norm(X, residual=X.int()),
        TypeError,
        f"residual.dtype must be {FOUR}, got torch.int32",
    ),
    (
        lambda: rms_norm(X, residual=X[0]),
        ValueError,
        "residual must have shape (3, 4, 8), got (4, 8)",
    ),
    (
        lambda: rms_norm(X, residual=X[..., :7]),
        ValueError,
        "residual must have shape (3, 4, 8), got (3, 4, 7)",
    ),
    (
        lambda: rms_norm(X, residual=X[0], axis=1),
        ValueError,
        "residual must have shape (3, 4, 8), got (4, 8)",
    ),
    (
        lambda: rms_norm(X, residual=X[..., :7], axis=(0, 2)),
        ValueError,
        "residual must have shape (3, 4, 8), got (3, 4, 7)",
    ),
    (
        lambda: rms_norm(X, residual=X.to("meta")),
        ValueError,
        "residual must be on x's device, cpu; got meta",
    ),
    (
        lambda: rms_norm(X, residual=X.to_sparse()),
        TypeError,
        "residual must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: rms_norm(X, residual=X, residual_dtype="f4"),
        TypeError,
        "residual_dtype must be a torch.dtype or None, got 'f4'",
    ),
    (
        lambda: rms_norm(X, residual=X, residual_dtype=torch.int8),
        TypeError,
        f"residual_dtype must be {FOUR}, got torch.int8",
    ),
    (
        lambda: rms_norm(X, residual_dtype=X.dtype),
        ValueError,
        "residual_dtype must be None without a residual, got torch.float32",
    ),
    (
        lambda: rms_norm(X, eps=None, residual_dtype="f4", residual=X),
        TypeError,
        "residual_dtype must be a torch.dtype or None, got 'f4'",
    ),
    (
        lambda: rms_norm(np.ones((2, 8)), quantize=ROWS),
        TypeError,
        "x must be a torch tensor, got ndarray",
    ),
    (
        lambda: rms_norm(X.int(), quantize=ROWS),
        TypeError,
        f"x.dtype must be {FOUR}, got torch.int32",
    ),
    (
        lambda: rms_norm(X, quantize="int8"),
        TypeError,
        "quantize must be a cupynorm.Quantize or None, got 'int8'",
    ),
    (
        lambda: rms_norm(X, quantize=ROWS, out_dtype=torch.float16),
        ValueError,
        "out_dtype must be None with quantize, which has via; got torch.float16",
    ),
    (
        lambda: rms_norm(X, quantize=cupynorm.Quantize("int8", "block", block=128), axis=0),
        ValueError,
        "axis must be the last one if scale is 'block', got 0",
    ),
    (
        lambda: rms_norm(X, quantize=cupynorm.Quantize("int8", np.ones(1, np.float32))),
        TypeError,
        "quantize.scale must be a torch tensor, as x is; got ndarray",
    ),
    (
        lambda: rms_norm(X, quantize=cupynorm.Quantize("int8", W[0].half())),
        TypeError,
        "quantize.scale.dtype must be float32, got torch.float16",
    ),
    (
        lambda: rms_norm(X, quantize=cupynorm.Quantize("int8", W[0].to("meta"))),
        ValueError,
        "quantize.scale must be on x's device, cpu; got meta",
    ),
    (
        lambda: rms_norm(X, quantize=cupynorm.Quantize("int8", W[:1].to_sparse())),
        TypeError,
        "quantize.scale must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: cupynorm.dequantize(X.char().to_sparse(), W[:1]),
        TypeError,
        "q must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: cupynorm.dequantize(X.char(), W[:1].to_sparse()),
        TypeError,
        "scale must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: cupynorm.dequantize(X.char(), np.ones(1, np.float32)),
        TypeError,
        "scale must be a torch tensor, as q is; got ndarray",
    ),
    (
        lambda: cupynorm.dequantize(X, W[0]),
        TypeError,
        "q.dtype must be float8_e4m3fn, float8_e5m2 or int8, got float32",
    ),
]

OTHERS: Calls = [
    # a layout that is_contiguous() calls dense
    (
        lambda: rms_norm(X.to_mkldnn(), W),
        TypeError,
        "x must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: rms_norm(X, W.to_mkldnn()),
        TypeError,
        "weight must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: rms_norm(X, W, W.to_mkldnn()),
        TypeError,
        "bias must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: rms_norm(X, W, residual=X.to_mkldnn()),
        TypeError,
        "residual must be a dense tensor, got one of layout torch._mkldnn",
    ),
    # modules
    (
        lambda: RMSNorm("8"),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got '8'",
    ),
    (
        lambda: RMSNorm((8, 2.0)),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got (8, 2.0)",
    ),
    (
        lambda: LayerNorm(8.0),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got 8.0",
    ),
    (
        lambda: LayerNorm(None),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got None",
    ),
    (
        lambda: LayerNorm(True),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got True",
    ),
    (
        lambda: LayerNorm(torch.tensor(8.0)),
        TypeError,
        "normalized_shape must be an int or a tuple of ints, got tensor(8.)",
    ),
    (
        lambda: RMSNorm(8)(X.int()),
        TypeError,
        f"x.dtype must be {FOUR}, got torch.int32",
    ),
    (
        lambda: LayerNorm(8)(X.int()),
        TypeError,
        f"input.dtype must be {FOUR}, got torch.int32",
    ),
    (
        lambda: GroupNorm(2, 4)(X.int()),
        TypeError,
        f"input.dtype must be {FOUR}, got torch.int32",
    ),
    (
        lambda: GroupNorm(2, 8)(torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)),
        TypeError,
        "input must be a dense tensor, got a nested one",
    ),
    (lambda: LayerNorm(8)([1.0] * 8), TypeError, "input must be a torch tensor, got list"),
    (
        lambda: LayerNorm(8)(X.to_sparse()),
        TypeError,
        "input must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (lambda: LayerNorm(-8), ValueError, "normalized_shape must not be negative, got -8"),
    (lambda: RMSNorm((-1, 8)), ValueError, "normalized_shape must not be negative, got (-1, 8)"),
    (
        lambda: RMSNorm(8, dtype="float32"),
        TypeError,
        "dtype must be a torch.dtype or None, got 'float32'",
    ),
    (lambda: RMSNorm(8, dtype=torch.int8), TypeError, f"dtype must be {FOUR}, got torch.int8"),
    (
        lambda: LayerNorm(8, dtype=torch.float8_e5m2),
        TypeError,
        f"dtype must be {FOUR}, got torch.float8_e5m2",
    ),
    (
        lambda: RMSNorm(8, relu=(6, 0)),
        ValueError,
        "relu must be (lower, upper) with lower < upper as float64, got (6, 0)",
    ),
    (
        lambda: LayerNorm(8, relu=(6, 0)),
        ValueError,
        "relu must be (lower, upper) with lower < upper as float64, got (6, 0)",
    ),
    (
        lambda: RMSNorm(8, relu=True),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got True",
    ),
    (
        lambda: LayerNorm(8, relu=True),
        TypeError,
        "relu must be a pair of real numbers (lower, upper) or None, got True",
    ),
    (lambda: RMSNorm(8, zero_centered=1), TypeError, "zero_centered must be True or False, got 1"),
    (
        lambda: LayerNorm(8, zero_centered=1),
        TypeError,
        "zero_centered must be True or False, got 1",
    ),
    (
        lambda: RMSNorm(8, elementwise_affine=False, zero_centered=True),
        ValueError,
        "zero_centered must be False without a weight, got True",
    ),
    (
        lambda: LayerNorm(8, elementwise_affine=False, zero_centered=True),
        ValueError,
        "zero_centered must be False without a weight, got True",
    ),
    (
        lambda: RMSNorm(8, eps=-1.0),
        ValueError,
        "eps must be a finite number of at least 0, got -1.0",
    ),
    (
        lambda: LayerNorm(8, eps=-1.0),
        ValueError,
        "eps must be a finite number of at least 0, got -1.0",
    ),
    (lambda: LayerNorm(8, eps=None), TypeError, "eps must be a real number, got None"),
    (lambda: RMSNorm(8, eps="1"), TypeError, "eps must be a real number, got '1'"),
    (lambda: RMSNorm(8)(np.ones(8)), TypeError, "x must be a torch tensor, got ndarray"),
    (lambda: RMSNorm(8)(None), TypeError, "x must be a torch tensor, got NoneType"),
    (lambda: RMSNorm(8)(X.int()), TypeError, f"x.dtype must be {FOUR}, got torch.int32"),
    (
        lambda: RMSNorm(8)(X.to_mkldnn()),
        TypeError,
        "x must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (lambda: LayerNorm(8)(X, X[0]), ValueError, "residual must have shape (3, 4, 8), got (4, 8)"),
    (lambda: RMSNorm(8)(X, 1.0), TypeError, "residual must be a torch tensor, got float"),
    (lambda: RMSNorm(8).to("meta")(X), ValueError, "weight must be on x's device, cpu; got meta"),
    # models
    (lambda: replace_norms(X), TypeError, "model must be a torch.nn.Module, got Tensor"),
    (
        lambda: replace_norms(torch.nn.LayerNorm),
        TypeError,
        "model must be a torch.nn.Module, got type",
    ),
    (
        lambda: replace_norms([torch.nn.LayerNorm(8)]),
        TypeError,
        "model must be a torch.nn.Module, got list",
    ),
    (
        lambda: replace_norms(torch.nn.LayerNorm(8), where="norm"),
        TypeError,
        "where must be callable, got str",
    ),
    (
        lambda: compile_options(["lite"]),
        TypeError,
        "mode must be a str or None, got ['lite']",
    ),
    (
        lambda: compile_options("lite"),
        ValueError,
        'mode must not be "lite", which runs no pass over a graph',
    ),
    # bitmasks
    (lambda: cupynorm.pack_bitmask(X), TypeError, "mask.dtype must be bool, got torch.float32"),
    (lambda: cupynorm.pack_bitmask(BITS), TypeError, "mask.dtype must be bool, got torch.uint8"),
    (
        lambda: cupynorm.pack_bitmask(BITS[0, 0] == 0),
        ValueError,
        "mask must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: cupynorm.unpack_bitmask(X, 24),
        TypeError,
        "bitmask.dtype must be uint8, got torch.float32",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS == 0, 24),
        TypeError,
        "bitmask.dtype must be uint8, got torch.bool",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS[0, 0], 8),
        ValueError,
        "bitmask must have at least one axis, got a 0-dimensional array",
    ),
    (
        lambda: cupynorm.unpack_bitmask(BITS, 25),
        ValueError,
        "bitmask must have 4 bytes in each row of 25 bits, got shape (2, 3)",
    ),
    # cupynorm's own functions
    (
        lambda: cupynorm.rms_norm(X, W.numpy()),
        TypeError,
        "weight must be a torch tensor, as the other arrays of the call are; got numpy.ndarray",
    ),
    (
        lambda: cupynorm.rms_norm(X.to_sparse()),
        TypeError,
        "x must be a dense tensor, got one of layout torch.sparse_coo",
    ),
    (
        lambda: cupynorm.rms_norm(X.to_mkldnn()),
        TypeError,
        "x must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: cupynorm.rms_norm(X, W.to_mkldnn()),
        TypeError,
        "weight must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: cupynorm.rms_norm(X, out=X.to_mkldnn()),
        TypeError,
        "out must be a dense tensor, got one of layout torch._mkldnn",
    ),
    (
        lambda: cupynorm.rms_norm(X, W.clone().requires_grad_()),
        TypeError,
        "weight requires grad, which would be lost here: call the function of "
        "cupynorm.torch, or a norm of cupynorm.fuse itself; or pass weight.detach(), and compute "
        "its gradient with the backward function",
    ),
    (
        lambda: cupynorm.rms_norm(X, out=X.clone().requires_grad_()),
        TypeError,
        "out requires grad, which would be lost here: pass out.detach()",
    ),
    (lambda: cupynorm.rms_norm(X.int()), TypeError, f"x.dtype must be {FOUR}, got torch.int32"),
    (
        lambda: cupynorm.rms_norm(torch.nested.nested_tensor([W, W]), quantize=ROWS),
        TypeError,
        "x must be a plain tensor, got a nested one: the norms of cupynorm.torch take others",
    ),
    (
        lambda: cupynorm.rms_norm(torch.nested.nested_tensor([W, W])),
        TypeError,
        "x must be a plain tensor, got a nested one: the norms of cupynorm.torch take others",
    ),
    (
        lambda: cupynorm.rms_norm_backward(X, X, W, None),
        TypeError,
        "rstd must be a torch tensor, as the other arrays of the call are; got builtins.NoneType",
    ),
    (
        lambda: cupynorm.rms_norm_backward(X.to_mkldnn(), X, W, X[..., 0]),
        TypeError,
        "dy must be a dense tensor, got one of layout torch._mkldnn",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), OF_FUNCTIONS + OTHERS)
def test_a_wrong_call_is_told_what_is_wrong(
    call: Callable[[], Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ({}, {"bias": W}, {"residual": X}):  # a wrong call's key may be remembered
        rms_norm(X, W, **given)
    monkeypatch.delattr(reference, "compute")
    for _ in range(2):  # a refused call is not remembered
        with pytest.raises(error) as raised:
            call()
        assert (raised.type, str(raised.value)) == (error, message)


@pytest.mark.parametrize(("call", "error", "message"), OF_FUNCTIONS)
def test_a_wrong_call_launches_nothing(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with torch_plans.in_place_of_kernels() as plans:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message
        assert not plans.launches


@pytest.mark.parametrize(("call", "error", "message"), OF_FUNCTIONS)
def test_errors_come_when_a_call_is_traced(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error) as raised:
        call()
    assert (raised.type, str(raised.value)) == (error, message)
