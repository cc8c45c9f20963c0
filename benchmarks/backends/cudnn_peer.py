"""cuDNN: the norm nodes of its graph API, one node a graph, built once.

Forward takes weight and bias in the dtype of x. With wider ones it is three to five times slower,
with short rows up to fourteen (H200).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks import cudnn_graphs
from benchmarks.backends.base import Call, TorchBackend
from benchmarks.cudnn_graphs import Graph
from cupynorm._bench import ALL_ONES, EPS, Problem


class Cudnn(TorchBackend):
    name = "cuDNN"
    modules = ("torch", "cudnn")
    distribution = "nvidia-cudnn-frontend"

    def __init__(self) -> None:
        self._built: dict[Problem, Graph] = {}

    def version(self) -> str:
        frontend = super().version()
        import cudnn

        return f"{cudnn.backend_version_string()}, frontend {frontend}"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import torch

        note = None
        if problem.direction == "forward" and problem.weight_dtype != problem.dtype:
            note = "weight in x's dtype"
            tensors = {name: tensor.to(tensors["x"].dtype) for name, tensor in tensors.items()}
        given = {name: tensors[name] for name in ("x", "weight")}
        if problem.direction == "backward":
            given |= {"dy": tensors["dy"], "mean": None}
            mean, given["rstd"] = _statistics(problem, given["x"])
            if problem.norm == "layer_norm":
                given["mean"] = mean
        else:
            given["bias"] = tensors.get("bias")
        run = self.bound(problem, given, lambda: _build(problem, given))
        for output in run.outputs.values():
            output.view(torch.uint8).fill_(ALL_ONES)
        return once(run, problem.outputs, note)

    def bound(self, problem: Problem, given: dict[str, Any], build: Callable[[], Graph]) -> Graph:
        """Return the problem's graph on the arrays given.

        It is built once for all sets of arrays and streams. It is forgotten when another problem
        comes, unless that is the other direction of the same.
        """
        if problem not in self._built:
            forward = dataclasses.replace(problem, direction="forward")
            self._built = {
                other: graph
                for other, graph in self._built.items()
                if dataclasses.replace(other, direction="forward") == forward
            }
            self._built[problem] = build()
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        return self._built[problem].bind(**tensors)


def once(
    run: Callable[[], dict[str, Any]], names: tuple[str, ...], note: str | None = None
) -> Call:
    """Return the call that runs a graph, once, and returns its outputs of these names."""

    def call() -> tuple[Any, ...]:
        outputs = run()
        return tuple(outputs[name] for name in names)

    return Call(call, note=note)


def _build(problem: Problem, given: dict[str, Any]) -> Graph:
    if problem.direction == "forward":
        options = {"eps": EPS[problem.norm], "training": False}
        return cudnn_graphs.forward(problem.norm, **given, **options)
    return cudnn_graphs.backward(problem.norm, **given, dbias=problem.has_bias)


def _statistics(problem: Problem, x: Any) -> tuple[Any, Any]:
    """Return mean and rstd, of shape (rows, 1), a piece at a time to save memory."""
    import torch

    means, rstds = [], []
    for piece in x.split(max(1, (1 << 26) // problem.cols)):
        wide = piece.double() if problem.norm == "layer_norm" else piece.float()
        mean = wide.mean(-1, keepdim=True)
        centred = wide - mean if problem.norm == "layer_norm" else wide
        means.append(mean)
        rstds.append(torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS[problem.norm]))
    return torch.cat(means).float(), torch.cat(rstds).float()
