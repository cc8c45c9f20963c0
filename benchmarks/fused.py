"""Norms of `cupynorm.fuse`, compared with the limit and with others who fuse the same.

``python -m benchmarks.fused benchmarks/results/fused_h200.json``

Each is one line of Python, as `NORMS` has it. All of it is bfloat16, with a float32 weight where
there is one. The limit moves as many bytes: it copies the arrays of a forward pass, and adds those
of a backward pass. Times are those of `benchmarks.run`. Outputs and gradients are compared with the
same steps in float64, which are CuPy's operations around a norm.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupynorm
import cupynorm.math as of
from benchmarks.backends.base import Backend, Call, CuPyBackend, Outputs, TorchBackend
from benchmarks.fusions import Benchmark
from benchmarks.results import Record
from cupynorm import _bench, _fuse, _oracle
from cupynorm._bench import Problem

LARGE = tuple((32768, cols) for cols in (1024, 4096, 8192, 16384))
HEADS = (1048576, 128)
OF_OPTIONS = ((32768, 4096), (32768, 16384), (16, 4096))  # of what the plain norms do by an option
RELU = (0.0, 6.0)

NORMS: dict[str, tuple[cupynorm.Fused, tuple[tuple[int, int], ...]]] = {
    "gated": (
        cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * of.silu(z)),
        (HEADS, *LARGE),
    ),
    "gated first": (
        cupynorm.fuse("rms_norm", prologue=lambda x, z: x * of.silu(z)),
        ((32768, 4096),),
    ),
    "DeepNorm": (
        cupynorm.fuse("layer_norm", prologue=lambda x, branch: 2.5 * x + branch),
        ((32768, 4096),),
    ),
    "added and stored": (
        cupynorm.fuse("rms_norm", prologue=lambda x, r: (x + r, x + r)),
        OF_OPTIONS,
    ),
    "clamped ReLU": (
        cupynorm.fuse("rms_norm", epilogue=lambda y: of.clip(y, *RELU)),
        OF_OPTIONS,
    ),
    "soft cap": (
        cupynorm.fuse("rms_norm", epilogue=lambda y: 30 * of.tanh(y / 30)),
        ((32768, 4096),),
    ),
    "GELU gate": (
        cupynorm.fuse("layer_norm", epilogue=lambda y, z: y * of.gelu(z)),
        ((32768, 4096),),
    ),
}
# Peers round y before they gate it, and gradients of two terms before these are added.
MOST_ROUNDINGS = 4


@dataclass(frozen=True)
class OfFused(Problem):
    """A pass of a norm of NORMS."""

    kind: str = "gated"

    @property
    def fused(self) -> cupynorm.Fused:
        return NORMS[self.kind][0]

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.direction == "forward":
            return tuple(f"output {k}" for k in range(self.fused.count))
        return ("dx", *(f"d{name}" for name in self.fused.inputs), "dweight")

    @property
    def matrices(self) -> tuple[int, int]:
        """How many arrays of x's shape are read, and how many are written."""
        read = 1 + len(self.fused.inputs)
        backward = self.direction == "backward"
        return (read + self.fused.count, read) if backward else (read, self.fused.count)

    @property
    def bytes(self) -> int:
        """Count the arrays of x's shape."""
        matrix = self.rows * self.cols * int(_bench.DTYPES[self.dtype].itemsize)
        return sum(self.matrices) * matrix


def problems() -> list[OfFused]:
    """Return the passes that are measured."""
    return [
        OfFused(fused.norm, direction, *shape, "bfloat16", "float32", kind=kind)  # type: ignore[arg-type]
        for kind, (fused, shapes) in NORMS.items()
        for shape in shapes
        for direction in ("forward", "backward")
    ]


def inputs(problem: OfFused, seed: int, xp: Any) -> dict[str, Any]:
    """Draw x, the weight, the inputs and, backward, the gradients of the outputs."""
    plain = Problem(problem.norm, "forward", problem.rows, problem.cols, "bfloat16", "float32")

    def drawn(number: int) -> Any:
        return _bench.inputs(plain, seed + 1000 * number, xp)["x"]

    arrays = {"x": drawn(0), "weight": _bench.inputs(plain, seed, xp)["weight"]}
    for number, name in enumerate(problem.fused.inputs, 1):
        arrays[name] = drawn(number)
    if problem.direction == "backward":
        for k in range(problem.fused.count):
            arrays[f"dy {k}"] = drawn(10 + k)
    return arrays


def _given(problem: OfFused, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in problem.fused.inputs}


def _of_outputs(problem: OfFused, arrays: dict[str, Any]) -> list[Any]:
    return [arrays[f"dy {k}"] for k in range(problem.fused.count)]


# ---- checks --------------------------------------------------------------------------------------

ROWS_AT_ONCE = 2**25  # elements


def check(
    problem: OfFused, backend: Backend, given: dict[str, Any], outputs: Outputs, xp: Any
) -> Record:
    """Return the record of a check: each output's error over its largest value, in roundings."""
    named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
    expected = _expected(problem, given, xp)
    errors = {}
    for name, array in named.items():
        wide = _oracle.widen(array.reshape(expected[name].shape)).astype(np.float64)
        largest = float(abs(expected[name]).max())
        errors[name] = float(abs(wide - expected[name]).max()) / largest
    roundings = 1 if backend.kind == "ours" else MOST_ROUNDINGS
    most = {n: roundings * (2.0**-8 if n != "dweight" else 2.0**-10) for n in errors}
    wrong = [f"{n} is off by {e:.2g} of its largest" for n, e in errors.items() if not e <= most[n]]
    return {
        "status": "wrong" if wrong else "ok",
        "reason": "; ".join(wrong) or None,
        "errors": {name: [error, error / most[name]] for name, error in errors.items()},
    }


def _expected(problem: OfFused, arrays: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Return the outputs or gradients in float64, by steps of CuPy."""
    tools = dataclasses.replace(_fuse._tools_of(arrays["x"]), memory=None)
    rows = max(1, ROWS_AT_ONCE // problem.cols)
    parts: dict[str, list[Any]] = {}
    fused = problem.fused
    for first in range(0, problem.rows, rows):
        part = slice(first, first + rows)
        wide = {
            name: _oracle.widen(a if name == "weight" else a[part]).astype(np.float64)
            for name, a in arrays.items()
        }
        given = _fuse.Given(wide["x"], wide["weight"], None, _given(problem, wide))
        options, count = _fuse.Options(), fused.count
        dtypes = ("float64",) * count
        if problem.direction == "forward":
            # A sum that is stored is normalized as it is stored.
            stored = ("bfloat16",) * (count - len(fused.epilogue.results))
            dtypes = dtypes[len(stored) :] + stored
            found = dict(enumerate(fused.apply(tools, given, options, "float64", dtypes)[0]))
            found = {f"output {k}": _oracle.widen(array) for k, array in found.items()}
        else:
            of = _of_outputs(problem, wide)
            dtypes = (*dtypes[: len(fused.epilogue.results)], *("bfloat16",) * count)[:count]
            by_name = fused.gradients_of_elements(tools, given, options, "float64", dtypes, of)
            found = {f"d{name}": array for name, array in by_name.items()}
        for name in problem.outputs:
            parts.setdefault(name, []).append(found[name])
    return {
        name: sum(some) if name == "dweight" else xp.concatenate(some)
        for name, some in parts.items()
    }


# ---- libraries -----------------------------------------------------------------------------------


class Limit(CuPyBackend):
    """As many bytes: a copy forward, and backward what reads and writes as many arrays."""

    name = "limit, CuPy"
    kind = "limit"

    def prepare(self, problem: Any, inputs: dict[str, Any]) -> Call:
        import cupy

        read, written = problem.matrices
        matrix = inputs["x"].nbytes
        if problem.direction == "forward":
            nbytes = matrix * (read + written) // 2
            source, target = (cupy.zeros(nbytes, "u1") for _ in range(2))
            return Call(lambda: target.data.copy_from_device_async(source.data, nbytes) or ())
        names = [f"a{i}" for i in range(read)]
        targets = [f"b{i}" for i in range(written)]
        steps = "; ".join(f"{target} = {' + '.join(names)}" for target in targets)
        add = cupy.ElementwiseKernel(
            ", ".join(f"T {name}" for name in names),
            ", ".join(f"T {target}" for target in targets),
            steps,
            "add_all",
        )
        sources = [cupy.zeros(matrix // 16, "c16") for _ in names]
        results = [cupy.empty(matrix // 16, "c16") for _ in targets]

        def run() -> tuple[()]:
            add(*sources, *results)
            return ()

        return Call(run)


class Ours(CuPyBackend):
    name = "cupynorm"
    kind = "ours"

    def version(self) -> str:
        return cupynorm.__version__

    def prepare(self, problem: Any, inputs: dict[str, Any]) -> Call:
        fused, given = problem.fused, _given(problem, inputs)
        x, weight = inputs["x"], inputs["weight"]
        if problem.direction == "forward":
            call = functools.partial(fused, x, weight, **given)
            return Call(lambda: made if isinstance(made := call(), tuple) else (made,))
        stored = fused.forward(x, weight, **given)
        of = _of_outputs(problem, inputs)

        def run() -> Outputs:
            found = fused.backward(of, stored)
            return tuple(getattr(found, name) for name in problem.outputs)

        return Call(run)


class Option(Ours):
    """The plain norm's residual= and relu=. Their backward passes read the sum, and the bits."""

    name = "cupynorm's option"

    def prepare(self, problem: Any, inputs: dict[str, Any]) -> Call:
        x, weight = inputs["x"], inputs["weight"]
        adds = problem.kind == "added and stored"
        given = {"residual": inputs["r"]} if adds else {"relu": RELU}
        if problem.direction == "forward":
            call = functools.partial(cupynorm.rms_norm, x, weight, **given)
            return Call(lambda: made if isinstance(made := call(), tuple) else (made,))
        stored = cupynorm.rms_norm_forward(x, weight, **given)
        of, *of_sum = _of_outputs(problem, inputs)
        more = {"dresidual_out": of_sum[0]} if adds else {"bitmask": stored.bitmask}
        arguments = of, stored.residual_out if adds else x, weight, stored.rstd

        def run() -> Outputs:
            found = cupynorm.rms_norm_backward(*arguments, **more)
            return (found.dx, *([found.dresidual] if adds else []), found.dweight)

        return Call(run)


class Peer(TorchBackend):
    """A function of x, the weight and the inputs that returns a tuple of outputs."""

    def function(self, problem: OfFused) -> Callable[..., Any]:
        raise NotImplementedError

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        import torch

        function = self.function(problem)
        names = ("x", *problem.fused.inputs, "weight")
        given = [tensors[name] for name in names]
        if problem.direction == "forward":

            def forward() -> Outputs:
                with torch.no_grad():
                    return tuple(function(*given))

            return Call(forward)
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        results = function(*leaves)
        of = _of_outputs(problem, tensors)
        return Call(lambda: torch.autograd.grad(results, leaves, of, retain_graph=True))


class Face(Peer):
    """cupynorm on torch tensors, by autograd."""

    name = "cupynorm.torch"
    kind = "face"
    modules = ("torch", "cupynorm.torch")

    def function(self, problem: OfFused) -> Callable[..., Any]:
        names = problem.fused.inputs

        def face(x: Any, *others: Any) -> Any:
            *given, weight = others
            made = problem.fused(x, weight, **dict(zip(names, given, strict=True)))
            return made if isinstance(made, tuple) else (made,)

        return face


class Compiled(Peer):
    """The same steps in float32, by torch's compiler."""

    name = "torch.compile"

    def function(self, problem: OfFused) -> Callable[..., Any]:
        import torch
        import torch._functorch.config

        from cupynorm.torch._fuse import _TOOLS

        # The gradient is taken many times from one forward pass.
        torch._functorch.config.donated_buffer = False
        torch._dynamo.reset()
        fused, eps = problem.fused, _bench.EPS[problem.norm]

        def formula(x: Any, *others: Any) -> Any:
            *given, weight = (tensor.float() for tensor in others)
            named = {"x": x.float(), **dict(zip(fused.inputs, given, strict=True))}
            before = [named[name] for name in fused.prologue.arguments]
            value, *stored = fused.prologue.evaluate(_TOOLS, named["x"], before)
            stored = [one.to(x.dtype) for one in stored]
            if problem.norm == "layer_norm":
                value = value - value.mean(-1, keepdim=True)
            y = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight
            named["y"] = y
            after = [named[name] for name in fused.epilogue.arguments]
            made = fused.epilogue.evaluate(_TOOLS, y, after)
            return (*(one.to(x.dtype) for one in made), *stored)

        return torch.compile(formula, dynamic=False, fullgraph=True)


class Fla(Peer):
    """flash-linear-attention's RMSNorm with a gate behind it."""

    name = "fla"
    modules = ("torch", "fla.modules.norm.fused_norm_gate")
    distribution = "fla-core"

    def function(self, problem: OfFused) -> Callable[..., Any]:
        module = importlib.import_module("fla.modules.norm.fused_norm_gate")
        eps = _bench.EPS[problem.norm]
        return lambda x, z, weight: (module.rms_norm_gated(x, z, weight, None, eps=eps),)


class Mamba(Peer):
    """Mamba-2's, as flash-linear-attention has it."""

    name = "mamba"
    modules = ("torch", "fla.modules.norm.layernorm_gated")
    distribution = "fla-core"

    def function(self, problem: OfFused) -> Callable[..., Any]:
        module = importlib.import_module("fla.modules.norm.layernorm_gated")
        last = problem.kind == "gated"
        eps = _bench.EPS[problem.norm]

        def gated(x: Any, z: Any, weight: Any) -> Any:
            options = {"norm_before_gate": last, "is_rms_norm": True}
            return (module.layernorm_fn(x, weight, None, z=z, eps=eps, **options),)

        return gated


BACKENDS = (Limit, Ours, Option, Face, Fla, Mamba, Compiled)


def is_measured(problem: OfFused, backend: Backend) -> bool:
    """Tell whether a library has the operation."""
    if isinstance(backend, Option):
        return problem.kind in ("added and stored", "clamped ReLU")
    if isinstance(backend, Fla):
        return problem.kind == "gated"
    if isinstance(backend, Mamba):
        return problem.kind in ("gated", "gated first")
    return True


def title(record: Record) -> tuple[str, ...]:
    """Return what a table says of a problem."""
    return record["kind"], record["direction"], f"{record['rows']}x{record['cols']}"


BENCHMARK = Benchmark(
    "benchmarks.fused",
    problems,
    BACKENDS,
    inputs,
    check,
    is_measured,
    ("norm", "direction", "MxN"),
    title,
    (
        "The largest errors against float64, over the largest value of the output, and that over "
        "what is allowed: a rounding for cupynorm, and four for others, which round between steps.",
        "over the largest",
        "over what is allowed",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
