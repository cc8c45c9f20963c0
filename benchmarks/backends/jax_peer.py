"""JAX: XLA's own kernels of the formula.

XLA launches on its own streams, and events elsewhere do not see those. So "kernels" is the
profiler's time of them, each run after a flush that has ended, and a charge. The charge is what
events around a CUDA graph add for all others. It is measured on cupynorm's forward kernel on the
first rows of the same arrays, which is timed both ways. A kernel of one number is charged up to 0.6
us less, as events follow a flush that has just ended: 8 rows of 1024 took cupynorm 5.54 us so, and
by the profiler and that number's charge 5.06 (RMSNorm, H200). Without a profiler, "queue" is the
wall clock of a queue of calls. For small arrays that is the host's time, and the L2 may hold the
arrays. The backward pass gets x, weight, bias and dy, and computes the statistics again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import exchange
from benchmarks.backends.base import Backend, Call, Outputs, Replay
from benchmarks.backends.ours import Ours
from benchmarks.timing import Clock, Timing, launch_seconds, profiled, wall_clock
from cupynorm._bench import EPS, Problem

MOST_CHARGED_BYTES = 1 << 20  # of the kernel that measures the charge of a launch


def formula(problem: Problem) -> Callable[..., Any]:
    """Return the norm of x, weight and, for LayerNorm, bias, in the compute dtype."""
    import jax
    import jax.numpy as jnp

    eps = EPS[problem.norm]
    wide = "float64" if problem.dtype == "float64" else "float32"

    def norm(x: Any, weight: Any, *bias: Any) -> Any:
        wide_x = x.astype(wide)
        if problem.norm == "layer_norm":
            wide_x = wide_x - wide_x.mean(-1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.square(wide_x).mean(-1, keepdims=True) + eps)
        y = wide_x * rstd * weight.astype(wide)
        return (y + bias[0].astype(wide) if bias else y).astype(x.dtype)

    return norm


class Jax(Backend):
    name = "JAX"
    modules = ("jax",)
    distribution = "jax"
    compiles = True

    def __init__(self) -> None:
        self._jitted: tuple[Problem | None, Any] = (None, None)
        self._charged: list[Callable[[], object]] = []

    def version(self) -> str:
        # The other libraries need memory too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
        version = super().version()
        import jax

        jax.config.update("jax_enable_x64", True)
        return version

    def jitted(self, problem: Problem) -> Any:
        """Return `jax.jit`'s function for a problem, compiled once for all sets of arrays."""
        if self._jitted[0] != problem:
            self._jitted = (problem, self.jit(problem))
        return self._jitted[1]

    def jit(self, problem: Problem) -> Any:
        import jax

        norm = formula(problem)

        def gradient(dy: Any, *arguments: Any) -> Any:
            return jax.vjp(norm, *arguments)[1](dy)

        return jax.jit(norm if problem.direction == "forward" else gradient)

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        arrays = {name: exchange.to_jax(array) for name, array in inputs.items()}
        arguments = [arrays[name] for name in ("dy", "x", "weight", "bias") if name in arrays]
        function = self.jitted(problem)

        def run() -> Outputs:
            result = function(*arguments)
            return result if isinstance(result, tuple) else (result,)

        return Call(run)

    def collect(self, outputs: Outputs, xp: Any) -> list[Any]:
        return [exchange.from_jax(output, xp) for output in outputs]

    def poison(self, problem: Problem, inputs: dict[str, Any]) -> None:
        """Do nothing: nobody can write to memory that XLA manages."""

    def synchronize(self) -> None:
        import jax

        jax.block_until_ready(jax.device_put(0.0) + 1)

    def release(self) -> None:
        """Let go of the other kernels. XLA keeps its pool, which is limited."""
        self._charged.clear()

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay | None:
        """Capture the call that measures a launch's charge, on up to a MiB; not JAX's call."""
        rows = min(problem.rows, max(1, MOST_CHARGED_BYTES // (problem.bytes // problem.rows)))
        first = dataclasses.replace(problem, direction="forward", rows=rows)
        replay = Ours().capture(first, inputs | {"x": inputs["x"][:rows]})
        self._charged.append(replay.launch)
        return None

    def measure(
        self, clock: Clock, calls: Sequence[Call], replays: Sequence[Replay]
    ) -> dict[str, Timing]:
        import cupy
        import jax

        runs = [call.run for call in calls]
        self.not_captured = None
        try:
            kernels = profiled(
                runs,
                jax.block_until_ready,
                clock.flush,
                cupy.cuda.Device().synchronize,
                launch_seconds(clock, self._charged),
            )
        # No torch, no permission to profile, kernels that do not add up, or none to be charged.
        except Exception as error:
            self.not_captured = f"timed by the wall clock: {error!r}"
            return {"queue": wall_clock(runs, jax.block_until_ready)}
        return {"kernels": kernels}
