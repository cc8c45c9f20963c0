"""The limit: the same matrices read and written, and nothing computed.

A copy for a forward pass, a sum of two arrays into a third for a backward pass. The faster of these
counts.
"""

from __future__ import annotations

from typing import Any

from benchmarks.backends.base import Call, CuPyBackend, TorchBackend
from cupynorm import _bench
from cupynorm._bench import Problem


class CuPyLimit(CuPyBackend):
    name = "limit, CuPy"
    kind = "limit"

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        move = _bench.limit(problem, inputs)

        def run() -> tuple[()]:
            move()
            return ()

        return Call(run)


class TorchLimit(TorchBackend):
    name = "limit, torch"
    kind = "limit"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch

        x = tensors["x"]
        target = torch.empty_like(x)

        def copy() -> tuple[()]:
            target.copy_(x)
            return ()

        def add() -> tuple[()]:
            torch.add(x, tensors["dy"], out=target)
            return ()

        return Call(copy if problem.direction == "forward" else add)
