"""Graphs of cuDNN for the work of a cupynorm call: a norm, zero_centered, a clamped ReLU.

They are built like those of cuDNN's own samples, from torch tensors, and then run again and again.
cuDNN calls the weight scale and rstd the inverse variance. Its bitmask has the layout of ours.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

Outputs = dict[str, Any]


@cache
def handle(stream: int) -> Any:
    """Return a handle, one for each stream, since a handle has one."""
    import cudnn

    created = cudnn.create_handle()
    cudnn.set_stream(handle=created, stream=stream)
    return created


class Graph:
    """A graph, bound to the tensors that it reads and writes. Calling it returns those written."""

    def __init__(self) -> None:
        import cudnn
        import torch

        self.handle = handle(torch.cuda.current_stream().cuda_stream)
        self.graph = cudnn.pygraph(
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.nodes: dict[str, Any] = {}
        self.memory: dict[Any, Any] = {}
        self.outputs: Outputs = {}

    def given(self, name: str, tensor: Any) -> Any:
        """Return the node of a matrix, of a row, or of None."""
        if tensor is None:
            return None
        self.nodes[name] = node = self.graph.tensor_like(_axes(tensor))
        self.memory[node] = _axes(tensor)
        return node

    def number(self, value: float) -> Any:
        import torch

        data = torch.full((1, 1, 1, 1), value, dtype=torch.float32)
        node = self.graph.tensor_like(data)
        self.memory[node] = data
        return node

    def weight(self, tensor: Any, zero_centered: bool) -> Any:
        node = self.given("weight", tensor)
        return self.graph.add(a=node, b=self.number(1.0)) if zero_centered else node

    def result(self, name: str, node: Any, tensor: Any, dtype: Any = None) -> None:
        """Have a node written to a tensor that is returned under the name."""
        node.set_output(True).set_data_type(tensor.dtype if dtype is None else dtype)
        self.nodes[name] = node
        self.memory[node] = _axes(tensor)
        self.outputs[name] = tensor

    def build(self) -> Graph:
        import cudnn

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._allocate_workspace()
        return self

    def _allocate_workspace(self) -> None:
        import torch

        size = max(1, self.graph.get_workspace_size())
        self.workspace = torch.empty(size, device="cuda", dtype=torch.uint8)

    def bind(self, **tensors: Any) -> Graph:
        """Return the same graph on other tensors, with its own outputs, on the current stream.

        Building takes long, and is needed once for tensors of the same shapes and dtypes.
        """
        import torch

        bound = copy.copy(self)
        bound.handle = handle(torch.cuda.current_stream().cuda_stream)
        bound.outputs = {name: torch.empty_like(output) for name, output in self.outputs.items()}
        bound.memory = self.memory | {
            self.nodes[name]: _axes(tensor) for name, tensor in (tensors | bound.outputs).items()
        }
        bound._allocate_workspace()
        return bound

    def __call__(self) -> Outputs:
        self.graph.execute(self.memory, self.workspace, handle=self.handle)
        return self.outputs


def _axes(tensor: Any) -> Any:
    """Return a matrix or a row with four axes.

    Rows and columns are the first two. cuDNN normalizes those in which a weight is not of size 1.
    """
    return (tensor if tensor.ndim == 2 else tensor[None])[..., None, None]


def forward(
    norm: str,
    x: Any,
    weight: Any,
    bias: Any,
    *,
    eps: float,
    zero_centered: bool = False,
    relu: tuple[float, float] | None = None,
    training: bool = True,
) -> Graph:
    """Return a forward pass of matrix x: y and, in training, mean, rstd and bitmask if any.

    Statistics have shape (rows, 1), and the bitmask (rows, columns / 8).
    """
    import cudnn
    import torch

    g = Graph()
    phase = cudnn.norm_forward_phase
    y, *statistics = getattr(g.graph, norm.replace("_", ""))(
        norm_forward_phase=phase.TRAINING if training else phase.INFERENCE,
        input=g.given("x", x),
        scale=g.weight(weight, zero_centered),
        bias=g.given("bias", bias),
        epsilon=g.number(eps),
    )
    rows, cols = x.shape
    if relu is not None:
        lower, upper = relu
        y = g.graph.relu(input=y, lower_clip=lower, upper_clip=upper)
        if training:
            above = g.graph.cmp_gt(input=y, comparison=g.number(lower))
            below = g.graph.cmp_lt(input=y, comparison=g.number(upper))
            for mask in (above, below):
                mask.set_data_type(cudnn.data_type.BOOLEAN)
            bits = torch.empty((rows, cols // 8), dtype=torch.uint8, device="cuda")
            inside = g.graph.logical_and(a=above, b=below)
            g.result("bitmask", inside, bits, cudnn.data_type.BOOLEAN)
    g.result("y", y, torch.empty_like(x))
    if training:
        names = ("rstd",) if norm == "rms_norm" else ("mean", "rstd")
        for name, node in zip(names, statistics, strict=True):
            g.result(name, node, torch.empty((rows, 1), dtype=torch.float32, device="cuda"))
    return g.build()


def backward(
    norm: str,
    dy: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    dbias: bool,
    zero_centered: bool = False,
    bitmask: Any = None,
) -> Graph:
    """Return a backward pass: dx, dweight and, if asked for, dbias, in the dtypes of x and weight.

    LayerNorm's always has a dbias.
    """
    import cudnn
    import torch

    g = Graph()
    gradient = g.given("dy", dy)
    if bitmask is not None:
        bits = g.graph.tensor(
            name="bitmask",
            dim=(*x.shape, 1, 1),
            stride=(x.shape[1], 1, 1, 1),
            data_type=cudnn.data_type.BOOLEAN,
        )
        g.nodes["bitmask"] = bits
        g.memory[bits] = _axes(bitmask)
        gradient = g.graph.mul(a=gradient, b=bits)
    operands = {
        "grad": gradient,
        "input": g.given("x", x),
        "scale": g.weight(weight, zero_centered),
        "inv_variance": g.given("rstd", rstd),
    }
    if norm == "rms_norm":
        dx, dscale, *db = g.graph.rmsnorm_backward(**operands, has_dbias=dbias)
    else:
        dx, dscale, *db = g.graph.layernorm_backward(**operands, mean=g.given("mean", mean))
    g.result("dx", dx, torch.empty_like(x))
    g.result("dweight", dscale, torch.empty_like(weight))
    if dbias or norm == "layer_norm":
        g.result("dbias", db[0], torch.empty_like(weight))
    return g.build()
