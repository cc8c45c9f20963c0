"""QuACK: CuTe DSL kernels for Hopper and later, by its forward and backward functions."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from benchmarks.backends.base import Call, TorchBackend
from cupynorm._bench import EPS, Problem


class Quack(TorchBackend):
    name = "quack"
    modules = ("torch", "quack.rmsnorm")
    distribution = "quack-kernels"
    compiles = True

    def version(self) -> str:
        # Its kernels are written in this, and are as fast as this compiles them.
        language = importlib.metadata.version("nvidia-cutlass-dsl")
        return f"{super().version()}, cutlass-dsl {language}"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        # By its full name: the package has a function of the same name.
        rmsnorm = importlib.import_module("quack.rmsnorm")

        eps = EPS[problem.norm]
        x, weight, bias = tensors["x"], tensors["weight"], tensors.get("bias")
        note = None
        if problem.norm == "layer_norm" and problem.weight_dtype != "float32":
            note = "weight and bias in float32"
            weight, bias = weight.float(), bias.float()
        if problem.direction == "forward":
            if problem.norm == "rms_norm":
                return Call(lambda: rmsnorm.rmsnorm_fwd(x, weight, eps=eps)[:1])
            return Call(lambda: (rmsnorm.layernorm_fwd(x, weight, bias, eps=eps),), note=note)
        dy = tensors["dy"]
        if problem.norm == "rms_norm":
            *_, rstd = rmsnorm.rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)
            return Call(lambda: rmsnorm.rmsnorm_bwd(x, weight, dy, rstd)[:2])
        _, rstd, mean = rmsnorm.layernorm_fwd(
            x, weight, bias, eps=eps, return_rstd=True, return_mean=True
        )
        return Call(lambda: rmsnorm.layernorm_bwd(x, weight, dy, rstd, mean), note=note)
