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
        pack: dict[Any, Any] = {}

        def given(tensor: Any) -> Any:
            # Rows and columns are the first two of four axes: those of a weight of size 1 elsewhere
            # are normalized.
            if tensor.ndim == 1:
                tensor = tensor[None]
            data = tensor[..., None, None]
            node = graph.tensor_like(data)
            pack[node] = data
            return node

        def result(node: Any, like: Any) -> Any:
            flat = torch.empty_like(like)
            node.set_output(True).set_data_type(types[str(like.dtype).removeprefix("torch.")])
            pack[node] = (flat if like.ndim == 2 else flat[None])[..., None, None]
            return flat

        x, weight = given(tensors["x"]), given(tensors["weight"])
        node = problem.norm.replace("_", "")
        if problem.direction == "forward":
            epsilon = torch.full((1, 1, 1, 1), EPS[problem.norm], dtype=torch.float32)
            epsilon_node = graph.tensor_like(epsilon)
            pack[epsilon_node] = epsilon
            bias = given(tensors["bias"]) if problem.has_bias else None
            y, *_ = getattr(graph, node)(
                norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
                input=x,
                scale=weight,
                bias=bias,
                epsilon=epsilon_node,
            )
            outputs = (result(y, tensors["x"]),)
        else:
            dy = given(tensors["dy"])
            mean, rstd = _statistics(problem, tensors["x"])
            if problem.norm == "rms_norm":
                gradients = graph.rmsnorm_backward(
                    grad=dy, input=x, scale=weight, inv_variance=given(rstd), has_dbias=False
                )[:2]
            else:
                gradients = graph.layernorm_backward(
                    grad=dy, input=x, scale=weight, mean=given(mean), inv_variance=given(rstd)
                )
            likes = (tensors["x"], *(tensors["weight"] for _ in gradients[1:]))
            outputs = tuple(result(g, like) for g, like in zip(gradients, likes, strict=True))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(
            max(1, graph.get_workspace_size()), device=tensors["x"].device, dtype=torch.uint8
        )

        def run() -> tuple[Any, ...]:
            graph.execute(pack, workspace, handle=handle)
            return outputs

        for output in outputs:
            output.view(torch.uint8).fill_(0xFF)
        return Call(run)


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
