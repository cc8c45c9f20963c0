"""cuDNN: the norm nodes of its graph API, one node a graph, built once."""

from __future__ import annotations

from typing import Any

from benchmarks.backends.base import Call, TorchBackend
from cupynorm._bench import EPS, Problem


class Cudnn(TorchBackend):
    name = "cuDNN"
    modules = ("torch", "cudnn")
    distribution = "nvidia-cudnn-frontend"

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}  # one a stream, since a handle has one
        # Building takes long, and the graph of one set of arrays is that of all.
        self._built: tuple[Problem | None, Any, dict[str, Any]] = (None, None, {})

    def version(self) -> str:
        frontend = super().version()
        import cudnn

        return f"{cudnn.backend_version_string()}, frontend {frontend}"

    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        import cudnn
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        if stream not in self._handles:
            self._handles[stream] = cudnn.create_handle()
            cudnn.set_stream(handle=self._handles[stream], stream=stream)
        handle = self._handles[stream]

        x, weight = tensors["x"], tensors["weight"]
        given = {"x": x, "weight": weight}
        if problem.direction == "forward":
            given["epsilon"] = torch.full((1, 1), EPS[problem.norm], dtype=torch.float32)
            if problem.has_bias:
                given["bias"] = tensors["bias"]
        else:
            given["dy"] = tensors["dy"]
            mean, given["rstd"] = _statistics(problem, x)
            if problem.norm == "layer_norm":
                given["mean"] = mean
        results = {
            name: torch.empty_like(x if name in ("y", "dx") else weight) for name in problem.outputs
        }
        memory = {name: _axes(tensor) for name, tensor in (given | results).items()}
        if self._built[0] != problem:
            self._built = (problem, *_build(problem, memory, handle))
        _, graph, nodes = self._built
        pack = {nodes[name]: data for name, data in memory.items()}
        workspace = torch.empty(
            max(1, graph.get_workspace_size()), device=x.device, dtype=torch.uint8
        )
        outputs = tuple(results.values())

        def run() -> tuple[Any, ...]:
            graph.execute(pack, workspace, handle=handle)
            return outputs

        for output in outputs:
            output.view(torch.uint8).fill_(0xFF)
        return Call(run)


def _axes(tensor: Any) -> Any:
    """Return a matrix or a row with four axes.

    Rows and columns are the first two: those of a weight of size 1 elsewhere are normalized.
    """
    return (tensor if tensor.ndim == 2 else tensor[None])[..., None, None]


def _build(problem: Problem, memory: dict[str, Any], handle: Any) -> tuple[Any, dict[str, Any]]:
    """Return the graph of tensors like those in memory, and its nodes by their names."""
    import cudnn

    types = {
        "bfloat16": cudnn.data_type.BFLOAT16,
        "float16": cudnn.data_type.HALF,
        "float32": cudnn.data_type.FLOAT,
        "float64": cudnn.data_type.DOUBLE,
    }
    graph = cudnn.pygraph(
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    nodes = {
        name: graph.tensor_like(data)
        for name, data in memory.items()
        if name not in problem.outputs
    }
    if problem.direction == "forward":
        results = getattr(graph, problem.norm.replace("_", ""))(
            norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
            input=nodes["x"],
            scale=nodes["weight"],
            bias=nodes.get("bias"),
            epsilon=nodes["epsilon"],
        )[:1]
    elif problem.norm == "rms_norm":
        results = graph.rmsnorm_backward(
            grad=nodes["dy"],
            input=nodes["x"],
            scale=nodes["weight"],
            inv_variance=nodes["rstd"],
            has_dbias=False,
        )[:2]
    else:
        results = graph.layernorm_backward(
            grad=nodes["dy"],
            input=nodes["x"],
            scale=nodes["weight"],
            mean=nodes["mean"],
            inv_variance=nodes["rstd"],
        )
    for name, node in zip(problem.outputs, results, strict=True):
        dtype = str(memory[name].dtype).removeprefix("torch.")
        node.set_output(True).set_data_type(types[dtype])
        nodes[name] = node
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, nodes


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
