"""Graphs of cuDNN for what cupynorm does in a call: a norm, a weight around zero, a clamped ReLU.

They are built as cuDNN's own samples build them, of torch tensors, and then run again and again.
cuDNN calls the weight scale and rstd the inverse variance; its bitmask has the layout of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

Outputs = dict[str, Any]
Run = Callable[[], Outputs]


@cache
def handle(stream: int) -> Any:
    """Return a handle; one a stream, since a handle has one."""
    import cudnn

    created = cudnn.create_handle()
    cudnn.set_stream(handle=created, stream=stream)
    return created


class _Graph:
    """A graph, the memory of its tensors, and what it returns."""

    def __init__(self) -> None:
        import cudnn
        import torch

        self.handle = handle(torch.cuda.current_stream().cuda_stream)
        self.graph = cudnn.pygraph(
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.memory: dict[Any, Any] = {}
        self.outputs: Outputs = {}

    def given(self, tensor: Any) -> Any:
        """Return the node of a matrix, of a row, or of None."""
        if tensor is None:
            return None
        # Rows and columns are the first two of four axes.
        data = (tensor if tensor.ndim == 2 else tensor[None])[..., None, None]
        node = self.graph.tensor_like(data)
        self.memory[node] = data
        return node

    def number(self, value: float) -> Any:
        import torch

        data = torch.full((1, 1, 1, 1), value, dtype=torch.float32)
        node = self.graph.tensor_like(data)
        self.memory[node] = data
        return node

    def weight(self, tensor: Any, zero_centered: bool) -> Any:
        node = self.given(tensor)
        return self.graph.add(a=node, b=self.number(1.0)) if zero_centered else node

    def result(self, name: str, node: Any, tensor: Any, dtype: Any = None) -> None:
        """Have a node written to a tensor that is returned under the name."""
        node.set_output(True).set_data_type(tensor.dtype if dtype is None else dtype)
        self.memory[node] = (tensor if tensor.ndim == 2 else tensor[None])[..., None, None]
        self.outputs[name] = tensor

    def build(self) -> Run:
        import cudnn
        import torch

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        size = max(1, self.graph.get_workspace_size())
        workspace = torch.empty(size, device="cuda", dtype=torch.uint8)

        def run() -> Outputs:
            self.graph.execute(self.memory, workspace, handle=self.handle)
            return self.outputs

        return run


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
) -> Run:
    """Return a forward pass of matrix x: y and, in training, mean, rstd and bitmask as they apply.

    Statistics are of shape (rows, 1), the bitmask of (rows, columns / 8).
    """
    import cudnn
    import torch

    g = _Graph()
    phase = cudnn.norm_forward_phase
    y, *statistics = getattr(g.graph, norm.replace("_", ""))(
        norm_forward_phase=phase.TRAINING if training else phase.INFERENCE,
        input=g.given(x),
        scale=g.weight(weight, zero_centered),
        bias=g.given(bias),
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
) -> Run:
    """Return a backward pass: dx, dweight and, if asked for, dbias, of the dtypes of x and weight.

    LayerNorm's always has a dbias.
    """
    import cudnn
    import torch

    g = _Graph()
    gradient = g.given(dy)
    if bitmask is not None:
        bits = g.graph.tensor(
            name="bitmask",
            dim=(*x.shape, 1, 1),
            stride=(x.shape[1], 1, 1, 1),
            data_type=cudnn.data_type.BOOLEAN,
        )
        g.memory[bits] = bitmask[..., None, None]
        gradient = g.graph.mul(a=gradient, b=bits)
    operands = {
        "grad": gradient,
        "input": g.given(x),
        "scale": g.weight(weight, zero_centered),
        "inv_variance": g.given(rstd),
    }
    if norm == "rms_norm":
        dx, dscale, *db = g.graph.rmsnorm_backward(**operands, has_dbias=dbias)
    else:
        dx, dscale, *db = g.graph.layernorm_backward(**operands, mean=g.given(mean))
    g.result("dx", dx, torch.empty_like(x))
    g.result("dweight", dscale, torch.empty_like(weight))
    if dbias or norm == "layer_norm":
        g.result("dbias", db[0], torch.empty_like(weight))
    return g.build()
