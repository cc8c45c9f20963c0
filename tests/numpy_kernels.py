"""What the kernels compute, by NumPy, from arrays as a launch finds them in memory.

The fake plans of torch and JAX launch this. Vectors of groups lie one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynorm import reference
from cupynorm._arrays import to_numpy
from cupynorm._groups import Groups
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    KINDS,
    BackwardSpec,
    ForwardSpec,
    Kind,
    NormBackward,
    NormForward,
    QuantizedSpec,
    Spec,
    shape_of,
)


def check_groups(spec: Spec, m: int, groups: Groups | None) -> None:
    """Check that a spec and a launch over m rows are told of the same groups."""
    assert spec.grouped == (groups is not None)
    assert bool(spec.repeats) == (groups is not None and groups.repeats > 1)
    assert groups is None or groups.outer * groups.vectors * groups.inner == m


def shape(
    name: str, m: int, n: int, groups: Groups | None, spec: Spec | None = None
) -> tuple[int, ...]:
    """Return an array's shape. Vectors of groups are rows of their own."""
    if KINDS[name] is Kind.SCALES:
        assert isinstance(spec, QuantizedSpec)
        return (1,) if spec.scale_given else (m, -(-n // (spec.scale_columns or n)))
    if KINDS[name] is not Kind.VECTOR:
        return shape_of(KINDS[name], (m, n), 1)
    if groups is None:
        return (n,)
    numbers = groups.numbers(n, 1)
    elements = n // numbers["n_repeats"]
    step = numbers["weight_step" if name.endswith("weight") else "bias_step"]
    assert step in (0, elements)
    return (numbers["n_vectors"] if step else 1, elements)


def _vector_of_row(m: int, n: int, groups: Groups) -> Any:
    """Return which vector each row has, as kernels/groups.cuh says."""
    numbers = groups.numbers(n, 1)
    found = np.full(m, -1)
    for group in range(numbers["n_groups"]):
        for row in range(groups.rows):
            place = group * numbers["group_step"] + row * numbers["row_step"]
            assert found[place] == -1
            found[place] = group % numbers["n_vectors"]
    assert (found >= 0).all()
    return found


def _of_rows(vectors: Any, m: int, n: int, groups: Groups | None) -> Any:
    """Return vectors as an array for all rows."""
    if vectors is None or groups is None:
        return vectors
    return vectors[_vector_of_row(m, n, groups) % len(vectors)].repeat(groups.repeats, 1)


def _sums(name: str, of_rows: Any, groups: Groups) -> Any:
    """Return a gradient of vectors, from that of each row."""
    m, n = of_rows.shape
    rows, elements = shape(name, m, n, groups)
    total = np.zeros((rows, elements))
    parts = of_rows.reshape(m, elements, groups.repeats).sum(2)
    np.add.at(total, _vector_of_row(m, n, groups) % rows, parts)
    return total


def forward(
    spec: ForwardSpec, groups: Groups | None, arrays: dict[str, Any], *numbers: float
) -> NormForward:
    """Return the results of a forward pass. The numbers are eps and the bounds of a ReLU."""
    eps, lower, upper = numbers
    read = {name: arrays[name] for name in FORWARD.reads}
    m, n = read["x"].shape
    read |= {name: _of_rows(read[name], m, n, groups) for name in ("weight", "bias")}
    result: NormForward = getattr(reference, f"{spec.norm}_forward")(
        **read,
        eps=eps,
        axis=-1,
        zero_centered=spec.zero_centered,
        relu=(lower, upper) if spec.relu else None,
        out_dtype=to_numpy(spec.y),
        residual_dtype=to_numpy(spec.x) if spec.residual else None,
    )
    return result


def quantized(
    spec: QuantizedSpec, arrays: dict[str, Any], eps: float, *bounds: float
) -> NormForward:
    """Return the results of a forward pass whose y is quantized. The bounds are those of scales."""
    result = forward(spec.of_y, None, arrays, eps, 0.0, 0.0)
    block = spec.scale_columns or None
    how = arrays["scale"] if spec.scale_given else "block" if block else "row"
    scale_min, scale_max = bounds
    q, scale = reference.quantize(
        result.y, spec.q, how, block=block, scale_min=scale_min, scale_max=scale_max
    )
    return result._replace(y=q, scale=scale)


def backward(spec: BackwardSpec, groups: Groups | None, arrays: dict[str, Any]) -> NormBackward:
    """Return the results of a backward pass."""
    read = {name: arrays[name] for name in BACKWARD.reads}
    m, n = read["x"].shape
    like = None if spec.dbias is None else np.empty((n,), to_numpy(spec.dbias))
    if groups is not None:  # the sums are the kernels' own, and are rounded once
        weight = _of_rows(read["weight"], m, n, groups)
        read["weight"] = None if weight is None else weight.astype(np.float64)
        like = None if like is None else np.empty((m, n))
    if spec.norm == "rms_norm":
        del read["mean"]
    of_x = to_numpy(spec.dtypes["dx"])
    result: NormBackward = getattr(reference, f"{spec.norm}_backward")(
        **read,
        bias=False if like is None else like,
        axis=-1,
        zero_centered=spec.zero_centered,
        dx_dtype=of_x,
        dresidual_dtype=to_numpy(spec.dresidual) if spec.dresidual else of_x,
    )
    if groups is not None:
        for name in {"dweight", "dbias"}.intersection(spec.writes):
            sums = _sums(name, getattr(result, name), groups)
            rounded = reference.round_once(sums, to_numpy(spec.dtypes[name]))
            result = result._replace(**{name: rounded})
    return result
