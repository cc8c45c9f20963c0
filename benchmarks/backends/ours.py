"""cupynorm on CuPy arrays, as configured for this GPU and for one without clusters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cupynorm
from benchmarks.backends.base import Call, CuPyBackend, Outputs
from cupynorm import _bench, _calls, _plans
from cupynorm._bench import Problem


def forget() -> None:
    """Forget plans and calls: they depend on the architecture, and on the choices of layouts."""
    for function in vars(_plans).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
    _calls.calls.clear()


class Ours(CuPyBackend):
    name = "cupynorm"
    kind = "ours"
    compiles = True

    def version(self) -> str:
        super().version()
        return cupynorm.__version__

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        return Call(_bench.ours(problem, inputs))


class OursWithoutClusters(Ours):
    """An A100's kernels and layouts, on this GPU."""

    name = "cupynorm (as on sm_80)"
    kind = "face"
    emulated = True

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        with _as_on(80):
            call = _bench.ours(problem, inputs)

        def run() -> Outputs:
            with _as_on(80):
                return call()

        return Call(run)


@contextmanager
def _as_on(architecture: int) -> Iterator[None]:
    """Have calls configured for another architecture. Nothing remembered crosses over."""
    forget()
    try:
        with mock.patch.object(_plans, "architecture", return_value=architecture):
            yield
    finally:
        forget()
