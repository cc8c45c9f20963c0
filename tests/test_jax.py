"""cupynorm.jax without a GPU: the formula, and in place of the kernels, NumPy behind XLA's FFI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

jax = pytest.importorskip("jax", minversion="0.10.2")


NORMS = ("rms_norm", "layer_norm")


@pytest.fixture(autouse=True)
def on_the_cpu_with_float64() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        yield


@pytest.fixture(params=["formula", "kernels"], autouse=False)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        use_numpy_kernels(monkeypatch)
    return request.param
