"""cupynorm on torch tensors, by autograd."""

from __future__ import annotations

from typing import Any

import cupynorm
from benchmarks.backends.base import Call, TorchBackend
from benchmarks.backends.torch_peers import by_autograd
from cupynorm._bench import EPS, Problem


class OursTorch(TorchBackend):
    name = "cupynorm (torch)"
    kind = "face"
    modules = ("torch", "cupynorm.torch")
    compiles = True

    def version(self) -> str:
        return f"{cupynorm.__version__}, torch {super().version()}"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import cupynorm.torch

        norm = getattr(cupynorm.torch, problem.norm)
        eps = EPS[problem.norm]
        return by_autograd(problem, lambda *arrays: norm(*arrays, eps=eps), tensors)
