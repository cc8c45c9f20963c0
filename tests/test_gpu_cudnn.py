"""cuDNN's own samples, computed by both: RMSNorm, LayerNorm with a weight around zero, and one with
a clamped ReLU and its bitmask, at the samples' shapes, dtypes and tolerances.

Each side is held to the float64 reference by the tolerance that the benchmarks have for every
library, in units of the output's roundoff, and its error is printed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from strategies import DTYPES, make_values

import cupynorm
from benchmarks import cudnn_graphs
from benchmarks.oracle import TOLERANCE
from cupynorm import reference, testing

pytestmark = pytest.mark.gpu

EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class Sample:
    """What one of cuDNN's samples computes, and the cuDNN that it needs."""

    norm: str
    dtype: str
    n: int
    least_version: int
    zero_centered: bool = False
    relu: tuple[float, float] | None = None
    dbias: bool = True
    m: int = 4096

    def __str__(self) -> str:
        options = {
            "zero_centered": self.zero_centered,
            "relu": self.relu,
            "no_dbias": not self.dbias,
        }
        named = "-".join(name for name, on in options.items() if on)
        return "-".join(filter(None, (self.norm, self.dtype, str(self.n), named)))


SAMPLES = (
    Sample("rms_norm", "float16", 128, 90100),
    Sample("rms_norm", "float16", 768, 90100),
    Sample("rms_norm", "float16", 768, 90100, dbias=False),
    Sample("layer_norm", "float16", 768, 91000, zero_centered=True),
    Sample("layer_norm", "float32", 768, 91300, relu=(0.0, 6.0)),
)


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="compares with cuDNN by way of torch")
    cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend", exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    print(f"cuDNN {cudnn.backend_version()}, its frontend {cudnn.__version__}")
    return torch


def need(sample: Sample) -> None:
    import cudnn

    if cudnn.backend_version() < sample.least_version:
        pytest.skip(f"needs cuDNN {sample.least_version}, this is {cudnn.backend_version()}")


def relative(actual: Any, exact: Any) -> float:
    error = np.linalg.norm(actual.astype(np.float64) - exact)
    return float(error / np.linalg.norm(exact))


def compare(
    where: Sample, ours: dict[str, Any], theirs: dict[str, Any], exact: dict[str, Any]
) -> None:
    """Hold both sides to the exact values, and to each other."""
    for name, wanted in exact.items():
        a, b = (side[name].reshape(wanted.shape) for side in (ours, theirs))
        errors = [relative(side, wanted) for side in (a, b)]
        print(f"{where} {name}: relative error {errors[0]:.2e}, of cuDNN {errors[1]:.2e}")
        tolerance = TOLERANCE[a.dtype.name]
        assert max(errors) <= tolerance, f"{name}: {errors} where {tolerance:.1e} is allowed"
        assert a.dtype == b.dtype, name


def numbers(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_a_sample_of_cudnn(torch: Any, sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    need(sample)
    norm, dtype, shape = sample.norm, DTYPES[sample.dtype], (sample.m, sample.n)
    x = make_values("normal", shape, dtype, 1)
    weight, bias = (make_values("normal", (sample.n,), dtype, seed) for seed in (2, 3))
    gpu = [torch.from_numpy(a).cuda() for a in (x, weight, bias)]
    options = {"zero_centered": sample.zero_centered}

    # 1. Forward, for training and for inference.
    more: dict[str, Any] = {"eps": EPS, "relu": sample.relu, **options}
    stored = getattr(cupynorm, f"{norm}_forward")(*gpu, **more)
    ours = numbers({n: t for n, t in stored._asdict().items() if t is not None})
    run = cudnn_graphs.forward(norm, *gpu, **more)
    theirs_on_gpu = run()
    torch.cuda.synchronize()
    theirs = numbers(theirs_on_gpu)
    infer = cudnn_graphs.forward(norm, *gpu, **more, training=False)()["y"]
    torch.cuda.synchronize()
    result = getattr(reference, f"{norm}_forward")(
        *(a.astype(np.float64) for a in (x, weight, bias)), **more
    )
    exact = {n: a for n, a in result._asdict().items() if a is not None and n != "bitmask"}
    with capsys.disabled():
        print()
        compare(sample, ours, theirs, exact)
    tolerances = {"atol": 5e-3, "rtol": 5e-3 if sample.relu else 3e-3}  # of the samples
    for name in exact:
        a = torch.from_numpy(ours[name])
        torch.testing.assert_close(torch.from_numpy(theirs[name]).reshape(a.shape), a, **tolerances)
    torch.testing.assert_close(infer, getattr(cupynorm, norm)(*gpu, **more), **tolerances)
    if sample.relu is not None:
        check_bits(sample, x, weight, bias, ours["bitmask"], theirs["bitmask"])

    # 2. Backward: of a mean squared error, as in the samples, then of a dy that is not tiny.
    target = make_values("normal", shape, np.float32, 4)
    loss = (2 * (ours["y"].astype(np.float32) - target) / target.size).astype(dtype)
    for dy, is_tiny in ((loss, True), (make_values("normal", shape, dtype, 5), False)):
        gpu_dy = torch.from_numpy(dy).cuda()
        statistics = [s for s in (stored.mean, stored.rstd) if s is not None]
        gradients = getattr(cupynorm, f"{norm}_backward")(
            gpu_dy,
            *gpu[:2],
            *statistics,
            bias=sample.dbias,
            bitmask=stored.bitmask,
            **options,
        )
        ours = numbers({n: t for n, t in gradients._asdict().items() if t is not None})
        theirs = cudnn_graphs.backward(
            norm,
            gpu_dy,
            *gpu[:2],
            None if stored.mean is None else stored.mean[:, None],
            stored.rstd[:, None],
            dbias=sample.dbias,
            bitmask=stored.bitmask,
            **options,
        )()
        torch.cuda.synchronize()
        theirs = numbers(theirs)
        assert set(theirs) == set(ours)
        for name in ours:
            if is_tiny:
                sides = (torch.from_numpy(side[name]) for side in (theirs, ours))
                torch.testing.assert_close(*sides, atol=2e-4, rtol=2e-4)
        if not is_tiny:
            host = [None if s is None else s.cpu().numpy() for s in stored[1:]]
            wide = (a.astype(np.float64) for a in (dy, x, weight))
            result = getattr(reference, f"{norm}_backward")(
                *wide,
                *(s for s in host[:2] if s is not None),
                bias=sample.dbias,
                bitmask=host[2],
                **options,
            )
            with capsys.disabled():
                compare(
                    sample, ours, theirs, {n: a for n, a in result._asdict().items() if n in ours}
                )


def check_bits(sample: Sample, x: Any, weight: Any, bias: Any, ours: Any, theirs: Any) -> None:
    """Check that both have the bits of the exact y, but where float32's rounding decides."""
    assert theirs.shape == ours.shape
    assert sample.relu is not None
    compute = np.dtype(np.float32)
    bounds = testing._forward_bounds(
        sample.norm, x, weight, bias, 1, EPS, sample.zero_centered, compute
    )
    inside, either = testing._clamp_bounds(*bounds, x, sample.relu, compute)
    assert np.count_nonzero(either) < 100
    print(f"{sample}: {np.count_nonzero(ours != theirs)} bytes of the bitmask differ")
    for name, bitmask in (("bitmask", ours), ("cuDNN's bitmask", theirs)):
        testing._assert_bits(bitmask, inside, either, 1, name)
