"""How DTensor splits the operations: any axis that is kept may be, with no communication."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register"]


@functools.cache
def register() -> None:
    """Give DTensor the rules, once."""
    register_sharding(torch.ops.cupynorm.norm_forward.default)(_forward)
    register_sharding(torch.ops.cupynorm.norm_backward.default)(_backward)


def _forward(x: Any, weight: Any, bias: Any, k: int, norm: str, *options: Any) -> list[Any]:
    *_, relu, _, training = options
    there = (True, training and norm == "layer_norm", training, training and relu is not None)

    def rule(rows: Any) -> tuple[list[Any], list[Any]]:
        results = [rows if is_there else Replicate() for is_there in there]
        return results, [rows, *map(_replicated, (weight, bias)), *(None,) * 7]

    return [rule(rows) for rows in _splits(x, k)]


def _backward(
    dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, bitmask: Any, k: int, *options: Any
) -> list[Any]:
    bias_dtype = options[-1]

    def rule(rows: Any) -> tuple[list[Any], list[Any]]:
        total = Replicate() if rows == Replicate() else Partial("sum")
        results = [
            rows,
            Replicate() if weight is None else total,
            Replicate() if bias_dtype is None else total,
        ]
        statistics = [None if s is None else rows for s in (mean, rstd, bitmask)]
        return results, [rows, rows, _replicated(weight), *statistics, *(None,) * 5]

    return [rule(rows) for rows in _splits(x, k)]


def _splits(x: Any, k: int) -> list[Any]:
    return [Replicate(), *(Shard(axis) for axis in range(x.ndim - k))]


def _replicated(tensor: Any) -> Any:
    return None if tensor is None else Replicate()
