"""Liger: Triton kernels, by their autograd functions."""

from __future__ import annotations

from typing import Any

from benchmarks.backends.base import Call, TorchBackend
from benchmarks.backends.torch_peers import by_autograd
from cupynorm._bench import EPS, Problem


class Liger(TorchBackend):
    name = "liger"
    modules = ("torch", "liger_kernel.ops.rms_norm", "liger_kernel.ops.layer_norm")
    distribution = "liger-kernel"
    compiles = True

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        eps = EPS[problem.norm]
        if problem.norm == "layer_norm":
            return by_autograd(
                problem, lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, eps), tensors
            )
        # "gemma" computes in float32 throughout, as all others do. Its backward pass writes dx over
        # dy by default. So it gets its own dy, restored before each run.
        given = tensors.get("dy")
        if given is not None:
            tensors = tensors | {"dy": given.clone()}
        call = by_autograd(
            problem, lambda x, w: LigerRMSNormFunction.apply(x, w, eps, 0.0, "gemma"), tensors
        )
        if given is None:
            return call
        own = tensors["dy"]
        return Call(call.run, reset=lambda: own.copy_(given), note="dx written over dy")
