"""cuDNN's own samples, computed by both: RMSNorm, LayerNorm with a weight around zero, and one with
a clamped ReLU and its bitmask, at the samples' shapes, dtypes and tolerances.

Every element of each side is held to the float64 reference by the bound of `cupynorm.testing`, and
its error is printed. So the two differ by at most the sum of both bounds.

The declaration of cuDNN's graph implies that it keeps this bound. Operands are widened to float32,
and what lies between its nodes is float32, so it rounds to an output's dtype once. The factor 0 or
1 of the bitmask is exact. The sum 1 + weight has one rounding, as ours does. x varies about zero,
so a variance from the mean of squares loses nothing.

The order of cuDNN's sums is not known. But with terms that vary about zero no order matters.
Suppose that M terms were added one after the other, by roundings that do not agree. The deviation
of the error would be u * M / sqrt(6) times that of a term. The bound grants 16 * u * M times a
term's mean size, which is 0.8 deviations: 30 times as much. Only the sums over rows of the loss's
dy, whose terms have a mean, need an order like ours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from strategies import DTYPES, make_values

import cupynorm
from benchmarks import cudnn_graphs
from cupynorm import NormBackward, NormForward, reference, testing

pytestmark = pytest.mark.gpu

EPS = 1e-3


@dataclasses.dataclass(frozen=True)
class Sample:
    """The computation of one of cuDNN's samples, and the cuDNN version that it needs."""

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
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend", exc_type=ImportError)
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def need(sample: Sample) -> None:
    import cudnn

    if cudnn.backend_version() < sample.least_version:
        pytest.skip(f"needs cuDNN {sample.least_version}, this is {cudnn.backend_version()}")


def show(sample: Sample, exact: Any, sides: dict[str, Any], ratios: dict[str, Any]) -> None:
    """Print each side's errors: relative in the 2-norm, and the worst element's over its bound."""
    for name, wanted in exact._asdict().items():
        if name not in ratios["cupynorm"]:
            continue
        errors = []
        for side, outputs in sides.items():
            error = np.linalg.norm(getattr(outputs, name).astype(np.float64) - wanted)
            relative = error / np.linalg.norm(wanted)
            errors.append(f"{side} {relative:.2e} ({ratios[side][name]:.3f} of the bound)")
        print(f"{sample} {name}: {', '.join(errors)}")


def numbers(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_a_sample_of_cudnn(torch: Any, sample: Sample, capsys: pytest.CaptureFixture[str]) -> None:
    import cudnn

    need(sample)
    norm, dtype, shape = sample.norm, DTYPES[sample.dtype], (sample.m, sample.n)
    x = make_values("normal", shape, dtype, 1)
    weight, bias = (make_values("normal", (sample.n,), dtype, seed) for seed in (2, 3))
    wide_x, wide_weight, wide_bias = (a.astype(np.float64) for a in (x, weight, bias))
    gpu = [torch.from_numpy(a).cuda() for a in (x, weight, bias)]
    options = {"zero_centered": sample.zero_centered}

    # 1. Forward, for training and for inference.
    more: dict[str, Any] = {"eps": EPS, "relu": sample.relu, **options}
    stored = getattr(cupynorm, f"{norm}_forward")(*gpu, **more)
    run = cudnn_graphs.forward(norm, *gpu, **more)
    theirs = run()
    torch.cuda.synchronize()
    theirs = {name: a.reshape(sample.m, -1) for name, a in numbers(theirs).items()}
    theirs |= {name: theirs[name][:, 0] for name in ("mean", "rstd") if name in theirs}
    sides = {
        "cupynorm": NormForward(*(None if s is None else s.cpu().numpy() for s in stored)),
        "cuDNN": NormForward(**theirs),
    }
    ratios = {
        side: testing.check_forward(norm, outputs, x, weight, bias, **more)
        for side, outputs in sides.items()
    }
    infer = cudnn_graphs.forward(norm, *gpu, **more, training=False)()["y"]
    torch.cuda.synchronize()
    ours_infer = getattr(cupynorm, norm)(*gpu, **more)
    for y in (ours_infer, infer):
        testing.check_forward(norm, y.cpu().numpy(), x, weight, bias, **more)
    with capsys.disabled():
        print(f"\ncuDNN {cudnn.backend_version()}, its frontend {cudnn.__version__}")
        forward = getattr(reference, f"{norm}_forward")
        show(sample, forward(wide_x, wide_weight, wide_bias, **more), sides, ratios)
        if sample.relu is not None:
            differing = np.count_nonzero(sides["cupynorm"].bitmask != sides["cuDNN"].bitmask)
            print(f"{sample}: {differing} bytes of the bitmask differ")
            # About five of these three million elements are so close to a bound that either bit is
            # right.
            assert differing < 100
    tolerances = {"atol": 5e-3, "rtol": 5e-3 if sample.relu else 3e-3}  # the samples' own
    for name in ratios["cupynorm"]:
        a, b = (torch.from_numpy(getattr(outputs, name)) for outputs in sides.values())
        torch.testing.assert_close(b, a, **tolerances)
    torch.testing.assert_close(infer, ours_infer, **tolerances)

    # 2. Backward: of a mean squared error, as in the samples, then of a dy that is not tiny.
    _, mean, rstd, bitmask, *_ = sides["cupynorm"]
    target = make_values("normal", shape, np.float32, 4)
    y = sides["cupynorm"].y.astype(np.float32)
    loss = (2 * (y - target) / target.size).astype(dtype)
    for dy, tolerance in ((loss, 2e-4), (make_values("normal", shape, dtype, 5), None)):
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
        sides = {
            "cupynorm": NormBackward(*(None if g is None else g.cpu().numpy() for g in gradients)),
            "cuDNN": NormBackward(**({"dbias": None} | numbers(theirs))),
        }
        more = {"bias": sample.dbias, "bitmask": bitmask, **options}
        ratios = {
            side: testing.check_backward(norm, outputs, dy, x, weight, mean, rstd, **more)
            for side, outputs in sides.items()
        }
        given = [s.astype(np.float64) for s in (mean, rstd) if s is not None]
        wide = (dy.astype(np.float64), wide_x, wide_weight)
        exact = getattr(reference, f"{norm}_backward")(*wide, *given, **more)
        with capsys.disabled():
            show(sample, exact, sides, ratios)
        if tolerance is not None:  # the samples' own
            for name in ratios["cupynorm"]:
                a, b = (torch.from_numpy(getattr(outputs, name)) for outputs in sides.values())
                torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance)
