"""What type checkers are told of the norms' results."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupynorm import reference

pytest.importorskip("mypy")

ROOT = Path(__file__).parent.parent
NAMES = """
from typing import Any, TypeAlias, TypeVar
import numpy as np
from typing_extensions import assert_type
import cupynorm, cupynorm.jax, cupynorm.torch
from cupynorm import reference
class Array: ...
class Wide: ...
x: Array
wide: Wide
maybe: Wide | None
quantize: cupynorm.Quantize
perhaps: cupynorm.Quantize | None
numbers: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Number = TypeVar("Number", bound=np.generic)
OfNumPy: TypeAlias = np.ndarray[Any, np.dtype[Number]]
"""
NUMPY = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
REVEALED = {
    "cupynorm.rms_norm(x)": "Array",
    "cupynorm.layer_norm(x, x, eps=1e-3, axis=-1, residual=None)": "Array",
    "cupynorm.rms_norm(x, axis=np.int64(1))": "Array",
    "cupynorm.layer_norm(x, axis=(np.int64(0), 1))": "Array",
    "cupynorm.supports('rms_norm', np.int64(4), np.float32)": "str | None",
    "cupynorm.rms_norm(x, residual=wide)": "tuple[Array, Wide]",
    "cupynorm.layer_norm(x, residual=wide, relu=(0, 6))": "tuple[Array, Wide]",
    "cupynorm.rms_norm(x, residual=maybe)": "tuple[Array, Wide] | Array",
    "cupynorm.fused.rms_norm_gated(x, None, wide, gate_first=True)": "Array",
    "cupynorm.fused.deep_norm(x, wide, 2.0, x, axis=-1)": "Array",
    "cupynorm.fused.l2_norm(x)": "Array",
    # A dtype may change the type, of a NumPy array.
    "cupynorm.fused.rms_norm_gated(numbers, None, numbers, out_dtype='float16')": "Any",
    "cupynorm.fused.l2_norm(numbers, out_dtype='float16')": "Any",
    "cupynorm.rms_norm(numbers, out_dtype='float16')": "Any",
    "cupynorm.layer_norm(numbers, residual=x, residual_dtype='float16')": "Any",
    "reference.rms_norm(numbers, out_dtype='float16')": NUMPY,
    "cupynorm.rms_norm(x, quantize=None)": "Any",
    "cupynorm.rms_norm(x, residual=x, quantize=quantize)": "tuple[Any, ...]",
    "cupynorm.layer_norm(x, quantize=perhaps)": "tuple[Any, ...] | Any",
    "cupynorm.dequantize(x, numbers)": "Array",
    "cupynorm.pack_bitmask(x)": "Array",
    "cupynorm.unpack_bitmask(x, 3)": "Array",
    "reference.layer_norm(numbers, residual=numbers)": f"tuple[{NUMPY}, {NUMPY}]",
    # The project's configuration has mypy know nothing of torch and JAX.
    **{
        f"cupynorm.{face}.{norm}({arguments})": revealed
        for face in ("torch", "jax")
        for norm in ("rms_norm", "layer_norm")
        for arguments, revealed in {
            "x": "Any",
            "x, residual=x": "tuple[Any, Any]",
            "x, quantize=None": "Any",
            "x, quantize=quantize": "tuple[Any, ...]",
            "x, quantize=perhaps": "tuple[Any, ...] | Any",
            "x, residual=x, quantize=quantize": "tuple[Any, ...]",
        }.items()
    },
}
OF_NUMPY = {  # whose dtype a call changes
    "cupynorm.dequantize(numbers, numbers)": "np.float32",
    "cupynorm.pack_bitmask(numbers)": "np.uint8",
    "cupynorm.unpack_bitmask(numbers, 3)": "np.bool_",
}
REFUSED = {
    "cupynorm.rms_norm(x, esp=1e-3)": 'Unexpected keyword argument "esp"',
    "cupynorm.layer_norm(x, eps='small')": "No overload variant",
    "cupynorm.torch.layer_norm(x, eps=None)": "No overload variant",
    "cupynorm.jax.rms_norm(x, out=x)": 'Unexpected keyword argument "out"',
}


def test_results_have_the_type_of_their_arrays(tmp_path: Path) -> None:
    program = tmp_path / "calls.py"
    held = [f"assert_type({call}, OfNumPy[{dtype}])" for call, dtype in OF_NUMPY.items()]
    calls = [*(f"reveal_type({call})" for call in REVEALED), *held, *REFUSED]
    program.write_text(NAMES + "\n".join(calls), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said: dict[str, str] = {}
    for line, text in re.findall(r"calls\.py:(\d+): (?:note|error): (.*)", done.stdout):
        said.setdefault(calls[int(line) - NAMES.count("\n") - 1], text.replace("calls.", ""))
    assert {call: said.get(f"reveal_type({call})", "") for call in REVEALED} == {
        call: f'Revealed type is "{revealed}"' for call, revealed in REVEALED.items()
    }, done.stdout + done.stderr
    assert [said[call] for call in held if call in said] == []
    for call, words in REFUSED.items():
        assert words in said.get(call, ""), call


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("cupynorm.norms", "_AnyOptions"),
        ("cupynorm.reference", "_Options"),
        ("cupynorm.torch._functions", "_Options"),
        ("cupynorm.jax", "_Options"),
    ],
)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_overloads_have_every_option(module: str, options: str, norm: str) -> None:
    if module.split(".")[1] in ("torch", "jax"):
        pytest.importorskip(module.split(".")[1])
    functions = importlib.import_module(module)
    typed = {"x", "weight", "bias", "eps", "residual", *getattr(functions, options).__annotations__}
    if functions is not reference:
        typed.add("quantize")
    assert typed == {*inspect.signature(getattr(functions, norm)).parameters}
