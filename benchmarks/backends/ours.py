"""cupynorm on CuPy arrays."""

from __future__ import annotations

from typing import Any

import cupynorm
from benchmarks.backends.base import Call, CuPyBackend
from cupynorm import _bench
from cupynorm._bench import Problem


class Ours(CuPyBackend):
    name = "cupynorm"
    kind = "ours"
    compiles = True

    def version(self) -> str:
        super().version()
        return cupynorm.__version__

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        return Call(_bench.ours(problem, inputs))
