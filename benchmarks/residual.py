"""The norm of a sum, compared with an addition before the norm and with the peers' fused kernels.

``python -m benchmarks.residual benchmarks/results/residual_h200.json``

Forward adds x and the residual, and writes the sum and its norm. Backward reads dy, the sum and the
sum's own gradient. It writes one dx and the gradients of the weights. All of it is bfloat16. The
limit moves as many bytes. Times and checks are those of `benchmarks.run`. The sum must have the
bits of an addition that is rounded once.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupynorm
from benchmarks.backends import quack_peer
from benchmarks.backends.base import Call, CuPyBackend, Outputs, TorchBackend
from benchmarks.backends.torch_peers import formula
from benchmarks.fusions import Benchmark, judged
from benchmarks.measure import same_bits
from benchmarks.results import Record
from cupynorm import _bench, _oracle
from cupynorm._bench import EPS, Problem

POWERS = (1024, 4096, 8192, 16384)
LARGE = tuple(itertools.product((32768, 4096), POWERS))
SHAPES = (
    *LARGE,
    *itertools.product((16, 1), POWERS),
    *((16384, cols) for cols in (768, 2304, 2560, 3072, 3584, 5120, 7168, 12288)),
)


@dataclass(frozen=True)
class OfSum(Problem):
    """The norm of x + residual, or its gradient."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("y", "residual_out") if self.direction == "forward" else super().outputs

    @property
    def bytes(self) -> int:
        """Count four matrices: half of them read forward, three read backward."""
        matrix = self.rows * self.cols * int(_bench.DTYPES[self.dtype].itemsize)
        return super().bytes + matrix * (2 if self.direction == "forward" else 1)


def inputs(problem: Problem, seed: int, xp: Any) -> dict[str, Any]:
    """Draw what a plain pass takes, the residual and the sum's gradient; add the sum."""
    arrays = _bench.inputs(problem, seed, xp)
    arrays["residual"] = _bench.inputs(problem, seed + 1000, xp)["x"]
    arrays["total"] = added(arrays["x"], arrays["residual"], xp)
    if problem.direction == "backward":
        arrays["dresidual_out"] = _bench.inputs(problem, seed + 2000, xp)["x"]
    return arrays


def added(x: Any, residual: Any, xp: Any) -> Any:
    """Return the sum of two bfloat16 arrays, rounded once, to nearest even."""
    total = _oracle.widen(x) + _oracle.widen(residual)
    bits = total.astype(np.float32).view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits >> np.uint32(16)).astype(np.uint16).view(x.dtype)


class Limit(CuPyBackend):
    """A copy of two matrices forward, the sum of three backward."""

    name = "limit, CuPy"
    kind = "limit"

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        import cupy

        x = inputs["x"].reshape(-1)
        if problem.direction == "forward":
            source = cupy.concatenate((x.view("u1"), x.view("u1")))
            target = cupy.empty_like(source)
            return Call(
                lambda: target.data.copy_from_device_async(source.data, target.nbytes) or ()
            )
        read = [inputs[name].reshape(-1).view("c16") for name in ("dy", "total", "dresidual_out")]
        add = cupy.ElementwiseKernel("T a, T b, T c", "T d", "d = a + b + c", "add_three")
        target = cupy.empty_like(read[0])

        def run() -> tuple[()]:
            add(*read, target)
            return ()

        return Call(run)


class Ours(CuPyBackend):
    """The residual in the norm's pass."""

    name = "cupynorm"
    kind = "ours"

    def version(self) -> str:
        return cupynorm.__version__

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        weights = inputs["weight"], inputs.get("bias")
        given = {"eps": EPS[problem.norm], "residual": inputs["residual"]}
        if problem.direction == "forward":
            function = getattr(cupynorm, problem.norm)
            return Call(lambda: function(inputs["x"], *weights, **given))
        stored = getattr(cupynorm, f"{problem.norm}_forward")(inputs["x"], *weights, **given)
        means = [] if stored.mean is None else [stored.mean]
        arguments = inputs["dy"], inputs["total"], inputs["weight"], *means, stored.rstd
        backward = getattr(cupynorm, f"{problem.norm}_backward")

        def run() -> Outputs:
            found = backward(*arguments, dresidual_out=inputs["dresidual_out"])
            return tuple(getattr(found, name) for name in problem.outputs)

        return Call(run)


class Peer(TorchBackend):
    """A function of x, residual and the weights that returns the norm and the sum."""

    def function(self, problem: Problem) -> Callable[..., Any]:
        raise NotImplementedError

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch

        function = self.function(problem)
        given = [
            tensors[name]
            for name in ("x", "residual", "weight", "bias")
            if tensors.get(name) is not None
        ]
        if problem.direction == "forward":

            def forward() -> Outputs:
                with torch.no_grad():
                    return tuple(function(*given))

            return Call(forward)
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        results = function(*leaves)
        gradients = tensors["dy"], tensors["dresidual_out"]

        def backward() -> Outputs:
            dx, _, *others = torch.autograd.grad(results, leaves, gradients, retain_graph=True)
            return (dx, *others)

        return Call(backward)


class Apart(Peer):
    """A user's code without it: torch's addition, then our norm."""

    name = "torch add, cupynorm"
    modules = ("torch", "cupynorm.torch")

    def function(self, problem: Problem) -> Callable[..., Any]:
        import cupynorm.torch

        norm = getattr(cupynorm.torch, problem.norm)

        def apart(x: Any, residual: Any, *weights: Any) -> Any:
            total = x + residual
            return norm(total, *weights, eps=EPS[problem.norm]), total

        return apart


class Eager(Peer):
    name = "torch eager"

    def function(self, problem: Problem) -> Callable[..., Any]:
        norm = formula(problem)

        def eager(x: Any, residual: Any, *weights: Any) -> Any:
            total = x + residual
            return norm(total, *weights), total

        return eager


class Compiled(Eager):
    name = "torch.compile"

    def function(self, problem: Problem) -> Callable[..., Any]:
        import torch
        import torch._functorch.config

        # The gradient is taken many times from one forward pass.
        torch._functorch.config.donated_buffer = False
        torch._dynamo.reset()
        return torch.compile(super().function(problem), dynamic=False, fullgraph=True)


class Quack(quack_peer.Quack):
    """QuACK's functions. Its LayerNorm takes no residual."""

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        rmsnorm = importlib.import_module("quack.rmsnorm")
        given = {"residual": tensors["residual"], "eps": EPS[problem.norm]}
        x, weight = tensors["x"], tensors["weight"]
        if problem.direction == "forward":
            return Call(lambda: rmsnorm.rmsnorm_fwd(x, weight, **given)[:2])
        *_, rstd = rmsnorm.rmsnorm_fwd(x, weight, **given, store_rstd=True)
        arguments = tensors["total"], weight, tensors["dy"], rstd, tensors["dresidual_out"]
        return Call(lambda: rmsnorm.rmsnorm_bwd(*arguments, has_residual=True)[:2])


class Liger(Peer):
    """Liger's function. It has none for LayerNorm."""

    name = "liger"
    modules = ("torch", "liger_kernel.ops.fused_add_rms_norm")
    distribution = "liger-kernel"

    def function(self, problem: Problem) -> Callable[..., Any]:
        module = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")
        apply = module.LigerFusedAddRMSNormFunction.apply
        # "gemma" computes in float32 throughout, as all others do.
        return lambda x, r, w: apply(x, r, w, EPS[problem.norm], 0.0, "gemma", False)


BACKENDS = (Limit, Ours, Apart, Quack, Liger, Compiled, Eager)


def is_measured(problem: Problem, backend: Any) -> bool:
    """Tell whether a library has the operation. The compiler takes seconds for each shape."""
    if isinstance(backend, (Quack, Liger)):
        return problem.norm == "rms_norm"
    return not isinstance(backend, Eager) or (problem.rows, problem.cols) in LARGE


def check(
    problem: Problem, backend: Any, inputs: dict[str, Any], outputs: Outputs, xp: Any
) -> Record:
    """Return the record of a check: y and dx against float64, the sum by its bits."""
    named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
    total = named.pop("residual_out", inputs["total"])
    if not same_bits([inputs["total"]], [total], xp):
        return {"status": "wrong", "reason": "the sum is not x + residual, rounded once"}
    plain = Problem(**{name: getattr(problem, name) for name in Problem.__dataclass_fields__})
    return judged(backend, _oracle.errors(plain, {**inputs, "x": inputs["total"]}, named, xp))


def title(record: Record) -> tuple[str, str, str]:
    """Return what a table says of a problem."""
    return record["norm"], record["direction"], f"{record['rows']}x{record['cols']}"


def problems() -> list[OfSum]:
    """Return the passes that are measured."""
    return [
        OfSum(norm, direction, *shape, "bfloat16", "bfloat16")  # type: ignore[arg-type]
        for norm in ("rms_norm", "layer_norm")
        for shape in SHAPES
        for direction in ("forward", "backward")
    ]


BENCHMARK = Benchmark(
    "benchmarks.residual",
    problems,
    BACKENDS,
    inputs,
    check,
    is_measured,
    ("norm", "direction", "MxN"),
    title,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
