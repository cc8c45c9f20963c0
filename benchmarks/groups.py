"""Weights that vary from row to row, and other axes, compared with the peers' kernels for these.

``python -m benchmarks.groups benchmarks/results/groups_h200.json``

There are four kinds. **AdaLN** scales by ``1 + weight`` and shifts, by vectors of each example.
**heads** has a weight for each head, whose rows take turns. **GroupNorm** has an element of weight
and bias for each channel. **channels first** normalizes axis 1 of images, as ConvNeXt does. All of
it is bfloat16. The limit copies x forward, and adds dy to it backward: the vectors are a thousandth
of these, or less. Times and checks are those of `benchmarks.run`, each vector's rows by themselves.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

import cupynorm
from benchmarks.backends import quack_peer
from benchmarks.backends.base import Backend, Call, CuPyBackend, Outputs, TorchBackend
from benchmarks.backends.limit import CuPyLimit
from benchmarks.fusions import Benchmark, judged
from benchmarks.results import Record
from cupynorm import _bench, _oracle
from cupynorm._bench import EPS, Problem
from cupynorm._oracle import Errors

Kind = Literal["AdaLN", "heads", "GroupNorm", "channels first"]
WIDTHS = (1024, 2048, 4096, 8192, 16384)
ADALN = tuple(("AdaLN", (16, 2048, n)) for n in WIDTHS)
HEADS = (("heads", (16384, 32, 128)), ("heads", (32768, 8, 128)))
IMAGES = (("GroupNorm", (8, 32, 16, 64, 64)), ("channels first", (32, 384, 56, 56)))
BOTH = "rms_norm", "layer_norm"
NORMS = {"AdaLN": BOTH, "heads": BOTH, "GroupNorm": ("layer_norm",), "channels first": BOTH}


def _axis(kind: str) -> tuple[int, ...]:
    return {"GroupNorm": (2, 3, 4), "channels first": (1,)}.get(kind, (-1,))


@dataclass(frozen=True)
class OfGroups(Problem):
    """A pass over x of a shape, whose rows do not share one weight of a row's shape."""

    kind: Kind = "AdaLN"
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: Any, norm: Any, direction: Any, shape: tuple[int, ...]) -> OfGroups:
        cols = math.prod(shape[i] for i in _axis(kind))
        of_arrays = "bfloat16", "bfloat16"
        return cls(
            norm, direction, math.prod(shape) // cols, cols, *of_arrays, kind=kind, shape=shape
        )

    @property
    def axis(self) -> tuple[int, ...]:
        """The axes that are normalized."""
        return _axis(self.kind)

    @property
    def has_bias(self) -> bool:
        return self.kind == "AdaLN" or super().has_bias

    @property
    def vector_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        s = self.shape
        if self.kind == "AdaLN":
            return s[0], 1, s[2]
        if self.kind == "heads":
            return s[1:]
        return (s[1], s[2], 1, 1) if self.kind == "GroupNorm" else (s[1], 1, 1)

    @property
    def repeats(self) -> int:
        """How many elements of a row an element of weight serves."""
        return math.prod(self.shape[3:]) if self.kind == "GroupNorm" else 1

    @property
    def bytes(self) -> int:
        """Count x and y, or x, dy and dx."""
        matrix = math.prod(self.shape) * int(_bench.DTYPES[self.dtype].itemsize)
        return (2 + (self.direction == "backward")) * matrix


def problems() -> list[OfGroups]:
    """Return the passes that are measured."""
    return [
        OfGroups.of(kind, norm, direction, shape)
        for kind, shape in (*ADALN, *HEADS, *IMAGES)
        for norm in NORMS[kind]
        for direction in ("forward", "backward")
    ]


def inputs(problem: OfGroups, seed: int, xp: Any) -> dict[str, Any]:
    """Draw x, the vectors and, backward, dy."""
    matrix = _bench.inputs(problem, seed, xp)
    vectors = math.prod(problem.vector_shape)
    flat = Problem(problem.norm, "forward", 1, vectors, problem.dtype, problem.weight_dtype)
    drawn = _bench.inputs(flat, seed + 1000, xp)
    arrays = {"x": matrix["x"].reshape(problem.shape)}
    arrays["weight"] = drawn["weight"].reshape(problem.vector_shape)
    if problem.has_bias:
        arrays["bias"] = drawn["x"].reshape(problem.vector_shape)
    if problem.direction == "backward":
        arrays["dy"] = matrix["dy"].reshape(problem.shape)
    return arrays


# ---- checks --------------------------------------------------------------------------------------


def check(
    problem: OfGroups, backend: Backend, given: dict[str, Any], outputs: Outputs, xp: Any
) -> Record:
    """Return the record of a check, of each vector's rows against float64."""
    named = dict(zip(problem.outputs, backend.collect(outputs, xp), strict=True))
    errors: dict[str, list[Errors]] = {name: [] for name in problem.outputs}
    for name, array in named.items():
        wanted = problem.vector_shape if name in ("dweight", "dbias") else problem.shape
        if math.prod(array.shape) != math.prod(wanted):
            return {"status": "wrong", "reason": f"{name} has shape {array.shape}, not {wanted}"}
    for rows, of_vector in _groups(problem, given | named, xp):
        if problem.kind == "AdaLN":
            of_vector["weight"] = 1 + _oracle.widen(of_vector["weight"])
        plain = replace(problem, rows=rows)
        results = {name: of_vector.pop(name) for name in problem.outputs}
        found = _oracle.errors(plain, of_vector, results, xp, repeats=problem.repeats)
        for name in problem.outputs:
            errors[name].append(found[name])
    return judged(backend, {name: _over_vectors(name, of) for name, of in errors.items()})


def _over_vectors(name: str, errors: list[Errors]) -> Errors:
    """Return one error for those of all vectors: the worst.

    In the 2-norm, that of a gradient of theirs is over all of them: each may have few elements.
    """
    relative, over_bound, (tolerance, *_) = map(np.array, zip(*errors, strict=True))
    of_all = np.sqrt((relative**2).mean()) if name in ("dweight", "dbias") else relative.max()
    return Errors(float(of_all), float(over_bound.max()), float(tolerance))


def _groups(
    problem: OfGroups, arrays: dict[str, Any], xp: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield for each vector how many rows it has, and the arrays as rows of a plain problem."""
    vectors = {"weight", "bias", "dweight", "dbias"}
    if problem.kind == "channels first":
        of_all = {
            name: a.reshape(-1) if name in vectors else _rows_last(a.reshape(problem.shape), xp)
            for name, a in arrays.items()
        }
        yield problem.rows, of_all
        return
    place = 0 if problem.kind == "AdaLN" else 1
    count = problem.shape[place]
    for i in range(count):
        yield (
            problem.rows // count,
            {
                name: a.reshape(count, -1)[i]
                if name in vectors
                else xp.take(a.reshape(problem.shape), i, axis=place).reshape(-1, problem.cols)
                for name, a in arrays.items()
            },
        )


def _rows_last(array: Any, xp: Any) -> Any:
    return xp.ascontiguousarray(xp.moveaxis(array, 1, -1)).reshape(-1, array.shape[1])


# ---- libraries -----------------------------------------------------------------------------------


class Ours(CuPyBackend):
    name = "cupynorm"
    kind = "ours"

    def version(self) -> str:
        return cupynorm.__version__

    def prepare(self, problem: Any, given: dict[str, Any]) -> Call:
        told = {"axis": problem.axis, "zero_centered": problem.kind == "AdaLN"}
        x, weight, bias = given["x"], given["weight"], given.get("bias")
        eps = EPS[problem.norm]
        if problem.direction == "forward":
            function = getattr(cupynorm, problem.norm)
            return Call(lambda: (function(x, weight, bias, eps=eps, **told),))
        forward = getattr(cupynorm, f"{problem.norm}_forward")(x, weight, bias, eps=eps, **told)
        means = [] if forward.mean is None else [forward.mean]
        backward = getattr(cupynorm, f"{problem.norm}_backward")
        arguments = given["dy"], x, weight, *means, forward.rstd

        def run() -> Outputs:
            found = backward(*arguments, bias=False if bias is None else bias, **told)
            return tuple(getattr(found, name) for name in problem.outputs)

        return Call(run)


class Peer(TorchBackend):
    """A function of x, weight and perhaps bias."""

    def function(self, problem: OfGroups) -> Callable[..., Any]:
        raise NotImplementedError

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        import torch

        function = self.function(problem)
        given = [tensors[name] for name in ("x", "weight", "bias") if name in tensors]
        if problem.direction == "forward":

            def forward() -> Outputs:
                with torch.no_grad():
                    return (function(*given),)

            return Call(forward)
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        y, dy = function(*leaves), tensors["dy"]

        def backward() -> Outputs:
            found = torch.autograd.grad(y, leaves, dy, retain_graph=True)
            return tuple(found[: len(problem.outputs)])

        return Call(backward)


class Eager(Peer):
    """The norm by torch's own functions, and operations around it."""

    name = "torch"

    def function(self, problem: OfGroups) -> Callable[..., Any]:
        from torch.nn import functional

        eps = EPS[problem.norm]
        norm = getattr(functional, problem.norm)
        cols = (problem.cols,)

        def modulated(x: Any, scale: Any, shift: Any) -> Any:
            return norm(x, cols, eps=eps) * (1 + scale) + shift

        def by_heads(x: Any, weight: Any, bias: Any = None) -> Any:
            y = norm(x, cols, eps=eps) * weight
            return y if bias is None else y + bias

        def by_channels(x: Any, *vectors: Any) -> Any:
            flat = (vector.reshape(-1) for vector in vectors)
            return norm(x.movedim(1, -1), cols, *flat, eps=eps).movedim(-1, 1)

        def by_groups(x: Any, weight: Any, bias: Any) -> Any:
            batch, groups, *sizes = x.shape
            y = functional.group_norm(
                x.reshape(batch, groups * sizes[0], *sizes[1:]),
                groups,
                weight.reshape(-1),
                bias.reshape(-1),
                eps,
            )
            return y.reshape(x.shape)

        kinds = {"AdaLN": modulated, "heads": by_heads, "GroupNorm": by_groups}
        return kinds.get(problem.kind, by_channels)


class Compiled(Eager):
    """The formula in float32, by torch's compiler."""

    name = "torch.compile"

    def function(self, problem: OfGroups) -> Callable[..., Any]:
        import torch
        import torch._functorch.config

        # The gradient is taken many times from one forward pass.
        torch._functorch.config.donated_buffer = False
        torch._dynamo.reset()
        eps, axis, added = EPS[problem.norm], problem.axis, int(problem.kind == "AdaLN")

        def formula(x: Any, weight: Any, bias: Any = None) -> Any:
            wide = x.float()
            if problem.norm == "layer_norm":
                wide = wide - wide.mean(axis, keepdim=True)
            rstd = torch.rsqrt(wide.square().mean(axis, keepdim=True) + eps)
            y = wide * rstd * (weight.float() + added)
            return (y if bias is None else y + bias.float()).to(x.dtype)

        return torch.compile(formula, dynamic=False, fullgraph=True)


class Quack(quack_peer.Quack):
    """QuACK's RMSNorm, which has a weight for each head."""

    def prepare_tensors(self, problem: Any, tensors: dict[str, Any]) -> Call:
        rmsnorm = importlib.import_module("quack.rmsnorm")
        x, weight, eps = tensors["x"], tensors["weight"], EPS[problem.norm]
        if problem.direction == "forward":
            return Call(lambda: rmsnorm.rmsnorm_fwd(x, weight, eps=eps)[:1])
        *_, rstd = rmsnorm.rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)
        dy = tensors["dy"]
        return Call(lambda: rmsnorm.rmsnorm_bwd(x, weight, dy, rstd)[:2])


class Liger(Peer):
    """Liger's modulated RMSNorm. Its gradients of scale and shift are added by atomics."""

    name = "liger"
    modules = ("torch", "liger_kernel.ops.modulated_rms_norm")
    distribution = "liger-kernel"

    def function(self, problem: OfGroups) -> Callable[..., Any]:
        module = importlib.import_module("liger_kernel.ops.modulated_rms_norm")
        apply = module.LigerModulatedRMSNormFunction.apply
        eps = EPS[problem.norm]

        def modulated(x: Any, scale: Any, shift: Any) -> Any:
            # "gemma" computes in float32 throughout, as all others do. dx is not written over dy.
            return apply(x, None, scale[:, 0], shift[:, 0], eps, 0.0, "gemma", False)

        return modulated


BACKENDS = (CuPyLimit, Ours, Quack, Liger, Compiled, Eager)


def is_measured(problem: OfGroups, backend: Backend) -> bool:
    """Tell whether a library has the operation."""
    if isinstance(backend, Quack):
        return problem.kind == "heads" and problem.norm == "rms_norm"
    if isinstance(backend, Liger):
        return problem.kind == "AdaLN" and problem.norm == "rms_norm"
    return True


def title(record: Record) -> tuple[str, ...]:
    """Return what a table says of a problem."""
    shape = "x".join(map(str, record["shape"]))
    return record["kind"], record["norm"], record["direction"], shape


BENCHMARK = Benchmark(
    "benchmarks.groups",
    problems,
    BACKENDS,
    inputs,
    check,
    is_measured,
    ("kind", "norm", "direction", "shape of x"),
    title,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
