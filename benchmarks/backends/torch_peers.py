"""PyTorch: its formula eagerly, its own functions, and its compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.backends.base import Call, TorchBackend
from cupynorm._bench import EPS, Problem

Function = Callable[..., Any]


def formula(problem: Problem) -> Function:
    """Return the norm as a user writes it, in float32 or wider."""
    import torch

    eps = EPS[problem.norm]
    wide = torch.float64 if problem.dtype == "float64" else torch.float32

    def rms_norm(x: Any, weight: Any) -> Any:
        wide_x = x.to(wide)
        rstd = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        return (wide_x * rstd * weight).to(x.dtype)

    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        wide_x = x.to(wide)
        centred = wide_x - wide_x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return (centred * rstd * weight + bias).to(x.dtype)

    return rms_norm if problem.norm == "rms_norm" else layer_norm


def by_autograd(problem: Problem, function: Function, tensors: dict[str, Any]) -> Call:
    """Return the call of a differentiable function, or of its gradient."""
    import torch

    names = [name for name in ("x", "weight", "bias") if name in tensors]
    if problem.direction == "forward":
        arguments = [tensors[name] for name in names]

        def forward() -> tuple[Any]:
            with torch.no_grad():
                return (function(*arguments),)

        return Call(forward)
    leaves = [tensors[name].detach().requires_grad_() for name in names]
    y = function(*leaves)
    dy = tensors["dy"]
    return Call(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


class Eager(TorchBackend):
    name = "torch eager"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        return by_autograd(problem, formula(problem), tensors)


class Functional(TorchBackend):
    name = "torch.nn.functional"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch

        note = None
        if problem.weight_dtype != problem.dtype:
            # Its fused kernels take no other weight.
            note = "weight in x's dtype"
            tensors = {name: tensor.to(tensors["x"].dtype) for name, tensor in tensors.items()}
        row = (problem.cols,)
        norm = getattr(torch.nn.functional, problem.norm)
        eps = EPS[problem.norm]

        def function(x: Any, *affine: Any) -> Any:
            return norm(x, row, *affine, eps=eps)

        call = by_autograd(problem, function, tensors)
        return Call(call.run, note=note)


class Compiled(TorchBackend):
    name = "torch.compile"
    compiles = True
    tunes = True
    mode = "max-autotune-no-cudagraphs"

    def __init__(self) -> None:
        self._compiled: tuple[Problem | None, Function | None] = (None, None)

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch
        import torch._functorch.config

        # The gradient is taken many times from one forward pass.
        torch._functorch.config.donated_buffer = False
        if self._compiled[0] != problem:
            # Otherwise many shapes of one function make it dynamic, and then fall back to eager.
            torch._dynamo.reset()
            compiled = torch.compile(
                formula(problem), mode=self.mode, dynamic=False, fullgraph=True
            )
            self._compiled = (problem, compiled)
        function = self._compiled[1]
        assert function is not None
        return by_autograd(problem, function, tensors)
