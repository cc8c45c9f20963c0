"""What the notebooks on cuDNN's samples share, apart from the norms themselves."""

from __future__ import annotations

from functools import cache

import matplotlib.pyplot as plt
import numpy as np

# Of relative 2-norms, by the dtype of a result. float16: room for two roundings; float32: for sums
# of a few thousand terms, in any sensible order.
TOLERANCES = {"float16": 2**-10, "float32": 1e-6}


# ---- where the arrays live -----------------------------------------------------------------------


def array_module():
    """Return cupy where there is a GPU, else numpy; print which."""
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except (ImportError, RuntimeError) as error:
        print(f"On the CPU: {error}")
        return np
    print(f"On the GPU, with CuPy {cupy.__version__}")
    return cupy


def has_torch():
    """Return whether torch can be used; print its version, or why not."""
    try:
        import torch
    except ImportError as error:
        print(f"Without PyTorch: {error}")
        return False
    print(f"PyTorch {torch.__version__}")
    return True


def has_cudnn(least_version):
    """Return whether cuDNN can be used, through torch; print its version, or why not."""
    try:
        import cudnn
        import torch

        version = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:  # the last where libcudnn is missing
        print(f"Without cuDNN: {error}")
        return False
    if not torch.cuda.is_available():
        print("Without cuDNN: this PyTorch has no GPU")
        return False
    if version < least_version:
        print(f"Without cuDNN: this is {version}, and {least_version} is needed")
        return False
    print(f"cuDNN {version}, its frontend {cudnn.__version__}")
    return True


def host(array):
    """Bring an array or a tensor to NumPy."""
    if isinstance(array, np.ndarray):
        return array
    return array.get() if hasattr(array, "get") else array.detach().cpu().numpy()


def to_torch(array):
    """Copy an array to a tensor on the GPU; without one, to a tensor of float64 on the CPU."""
    import torch

    if isinstance(array, np.ndarray) or not torch.cuda.is_available():
        # On a CPU torch sums up a column one row after the other, in the array's own dtype.
        return torch.tensor(host(array), dtype=torch.float64)
    return torch.from_dlpack(array).clone()


# ---- comparisons ---------------------------------------------------------------------------------


def distance(actual, wanted):
    """Return the 2-norm of the difference, relative to that of `wanted`."""
    actual, wanted = (host(array).astype(np.float64) for array in (actual, wanted))
    return np.linalg.norm(actual.reshape(wanted.shape) - wanted) / np.linalg.norm(wanted)


def assert_close_as_in_the_samples(ours, theirs):
    """Assert that two results are as close as cuDNN's samples ask for, element by element."""
    for name, array in ours.items():
        is_gradient = name in ("dx", "dweight", "dbias")
        np.testing.assert_allclose(
            host(theirs[name]).astype(np.float64).reshape(array.shape),
            host(array).astype(np.float64),
            atol=2e-4 if is_gradient else 5e-3,
            rtol=2e-4 if is_gradient else 3e-3,
            err_msg=name,
        )


def compare(sides, exact):
    """Print the error of each side's results, and how far the first is from the others.

    Both are relative 2-norms; those of the first side must be within `TOLERANCES`.
    """
    first, *others = sides
    columns = [f"error of {side}" for side in sides] + [f"{first} - {side}" for side in others]
    print(" " * 8 + "".join(f"{column:>19}" for column in columns))
    for name, wanted in exact.items():
        ours = sides[first][name]
        errors = [distance(side[name], wanted) for side in sides.values()]
        apart = [distance(sides[side][name], ours) for side in others]
        print(f"{name:<8}" + "".join(f"{number:19.1e}" for number in errors + apart))
        tolerance = TOLERANCES[ours.dtype.name]
        assert all(number <= tolerance for number in (errors[0], *apart)), name


# ---- cuDNN ---------------------------------------------------------------------------------------


@cache
def _cudnn_handle():
    import cudnn

    return cudnn.create_handle()


class CudnnGraph:
    """A graph of cuDNN on CuPy arrays: `graph` has the nodes, this its memory.

    cuDNN is given tensors of four axes, of which rows and columns are the first two; a vector is a
    single row.
    """

    def __init__(self):
        import cudnn

        self.graph = cudnn.pygraph(
            handle=_cudnn_handle(),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        self._memory = {}
        self._results = {}

    @staticmethod
    def _tensor(array):
        import torch

        tensor = torch.from_dlpack(array)
        return (tensor if tensor.ndim == 2 else tensor[None])[..., None, None]

    def given(self, array):
        """Return the node of an array."""
        tensor = self._tensor(array)
        node = self.graph.tensor_like(tensor)
        self._memory[node] = tensor
        return node

    def number(self, value):
        """Return the node of a number, which stays on the CPU."""
        import torch

        tensor = torch.full((1, 1, 1, 1), value, dtype=torch.float32)
        node = self.graph.tensor_like(tensor)
        self._memory[node] = tensor
        return node

    def bits(self, bitmask):
        """Return the node of a bitmask, of as many columns as it has bits."""
        import cudnn

        rows, columns = len(bitmask), 8 * bitmask.shape[1]
        node = self.graph.tensor(
            name="bitmask",
            dim=(rows, columns, 1, 1),
            stride=(columns, 1, 1, 1),
            data_type=cudnn.data_type.BOOLEAN,
        )
        self._memory[node] = self._tensor(bitmask)
        return node

    def returns(self, name, node, array, dtype=None):
        """Have a node written to an array, which `run` returns under the name."""
        tensor = self._tensor(array)
        node.set_output(True).set_data_type(tensor.dtype if dtype is None else dtype)
        self._memory[node] = tensor
        self._results[name] = array

    def build(self):
        """Return `run`, a function that computes the results on CuPy's current stream."""
        import cudnn
        import cupy
        import torch

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        size = max(1, self.graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        handle = _cudnn_handle()

        def run():
            cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
            self.graph.execute(self._memory, workspace, handle=handle)
            return self._results

        return run


# ---- times ---------------------------------------------------------------------------------------


@cache
def _stream():
    """Return a stream that can be captured, as the default one cannot."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def microseconds(call, calls=100, replays=7):
    """Return the GPU's time for a call, of many in a row that are captured into one CUDA graph.

    No time of the host is in it. Arrays that fit into the L2 cache stay there from call to call.
    """
    import cupy

    cupy.cuda.Device().synchronize()
    with _stream() as stream:
        call()  # compiles and loads kernels, and has memory for the captured calls
        stream.synchronize()
        stream.begin_capture()
        for _ in range(calls):
            call()
        graph = stream.end_capture()
        times = []
        for _ in range(replays):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            graph.launch()
            end.record()
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end))  # in milliseconds
    return 1e3 * float(np.median(times)) / calls


def show_times(times):
    """Draw bars of microseconds: under each name a time forward and one backward."""
    height = 0.8 / len(times)
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.6 * len(times)), layout="constrained")
    for i, (name, pair) in enumerate(times.items()):
        bars = axes.barh(np.arange(2) + i * height, pair, height=0.9 * height, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(np.arange(2) + (len(times) - 1) * height / 2, ["forward", "backward"])
    axes.set(xlabel="microseconds", title="Arrays in the L2 cache")
    axes.margins(x=0.12)  # room for the numbers
    axes.invert_yaxis()
    figure.legend(loc="outside right upper")
    plt.show()
