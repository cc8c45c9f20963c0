"""cupynorm on JAX arrays, in a jitted program, timed like JAX's own kernels.

Its backward pass is the function that `jax.vjp` returns, with the arrays that forward stored.
"""

from __future__ import annotations

from typing import Any

import cupynorm
from benchmarks import exchange
from benchmarks.backends.base import Call, Outputs
from benchmarks.backends.jax_peer import Jax
from cupynorm._bench import EPS, Problem


class OursJax(Jax):
    name = "cupynorm (JAX)"
    kind = "face"
    modules = ("jax", "cupynorm.jax")

    def version(self) -> str:
        return f"{cupynorm.__version__}, JAX {super().version()}"

    def jit(self, problem: Problem) -> Any:
        """Return the forward pass, one that also returns its `vjp`, and one that calls that."""
        import jax

        import cupynorm.jax

        norm = getattr(cupynorm.jax, problem.norm)

        def forward(*arrays: Any) -> Any:
            return norm(*arrays, eps=EPS[problem.norm])

        return (
            jax.jit(forward),
            jax.jit(lambda *arrays: jax.vjp(forward, *arrays)),
            jax.jit(lambda pull_back, dy: pull_back(dy)),
        )

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        arrays = {name: exchange.to_jax(array) for name, array in inputs.items()}
        arguments = [arrays[name] for name in ("x", "weight", "bias") if name in arrays]
        function, forward_and_vjp, gradient = self.jitted(problem)
        if problem.direction == "backward":
            _, pull_back = forward_and_vjp(*arguments)
            function, arguments = gradient, [pull_back, arrays["dy"]]

        def run() -> Outputs:
            result = function(*arguments)
            return result if isinstance(result, tuple) else (result,)

        return Call(run)
