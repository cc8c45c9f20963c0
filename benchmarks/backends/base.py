"""What a library must offer to be measured."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from benchmarks import exchange
from benchmarks.timing import Clock, Timing
from cupynorm import _bench
from cupynorm._bench import ALL_ONES, Problem

Outputs = tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call ready to be made, again and again.

    `reset` restores arguments that the call overwrites, outside the timing. `note` says what
    differs from the problem as stated.
    """

    run: Callable[[], Outputs]
    reset: Callable[[], object] | None = None
    note: str | None = None


@dataclass(frozen=True)
class Replay:
    """A captured call: `launch` runs its kernels alone, into `outputs`."""

    launch: Callable[[], object]
    outputs: Outputs
    reset: Callable[[], object] | None = None


class Backend(ABC):
    """A library, or one way of using it."""

    name: ClassVar[str]
    # A face is cupynorm other than on plain CuPy arrays: listed, and in no ratio.
    kind: ClassVar[Literal["limit", "peer", "ours", "face"]] = "peer"
    modules: ClassVar[tuple[str, ...]]  # those that it imports
    distribution: ClassVar[str]  # whose version is reported
    compiles: ClassVar[bool] = False  # on first use, into a disk cache that processes share
    tunes: ClassVar[bool] = False  # for up to a minute on first use, so it comes after the others
    emulated: ClassVar[bool] = False  # configured anew each call, so its host time is not a user's
    not_captured: str | None = None  # why the last measurement did not time the kernels alone

    def version(self) -> str:
        """Import the library and return its version; an ImportError says why it cannot be used."""
        for module in self.modules:
            importlib.import_module(module)
        return importlib.metadata.version(self.distribution)

    @abstractmethod
    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        """Return the call on the arrays given. All that a user does once is done here."""

    @abstractmethod
    def collect(self, outputs: Outputs, xp: Any) -> list[Any]:
        """Return the outputs as arrays of NumPy or CuPy."""

    @abstractmethod
    def poison(self, problem: Problem, inputs: dict[str, Any]) -> None:
        """Fill memory with NaN in which outputs are likely to be allocated."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def release(self) -> None:
        """Return cached memory to the device."""

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay | None:
        """Return the call as a CUDA graph, or None if the library cannot be captured."""
        return None

    def measure(
        self, clock: Clock, calls: Sequence[Call], replays: Sequence[Replay]
    ) -> dict[str, Timing]:
        """Return the device's time: of a call as a user makes it, and of its kernels alone."""
        times = {}
        if not (self.emulated and replays):
            times["call"] = clock.measure([c.run for c in calls], [c.reset for c in calls])
        if replays:
            launches, resets = [r.launch for r in replays], [r.reset for r in replays]
            times["kernels"] = clock.measure(launches, resets)
        return times


class CuPyBackend(Backend):
    """On CuPy arrays."""

    modules = ("cupy",)

    def version(self) -> str:
        import cupy

        return str(cupy.__version__)

    def collect(self, outputs: Outputs, xp: Any) -> list[Any]:
        return list(outputs)

    def poison(self, problem: Problem, inputs: dict[str, Any]) -> None:
        _bench.poison(inputs)

    def synchronize(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay:
        import cupy

        # Not the default stream, which cannot be captured. Its first run there loads kernels and
        # fills the stream's memory pool.
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            call = self.prepare(problem, inputs)
            call.run()
            stream.synchronize()
            stream.begin_capture()
            try:
                outputs = call.run()
            finally:
                graph = stream.end_capture()
        for output in outputs:
            output.view("u1").fill(ALL_ONES)
        # The call owns what the graph reads.
        return Replay(lambda graph=graph, call=call: graph.launch(), outputs)


class TorchBackend(Backend):
    """On torch tensors."""

    modules = ("torch",)
    distribution = "torch"

    @abstractmethod
    def prepare_tensors(self, problem: Problem, tensors: dict[str, Any]) -> Call:
        """Return the call, like `prepare`."""

    def prepare(self, problem: Problem, inputs: dict[str, Any]) -> Call:
        tensors = {name: exchange.to_torch(array) for name, array in inputs.items()}
        return self.prepare_tensors(problem, tensors)

    def collect(self, outputs: Outputs, xp: Any) -> list[Any]:
        return [exchange.from_torch(output, xp) for output in outputs]

    def poison(self, problem: Problem, inputs: dict[str, Any]) -> None:
        import torch

        tensors = [torch.empty_like(exchange.to_torch(inputs[name])) for name in inputs]
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(ALL_ONES)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def release(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def capture(self, problem: Problem, inputs: dict[str, Any]) -> Replay | None:
        import torch

        # Autograd runs a backward pass on the stream of its forward pass. So the call is prepared
        # on the stream that is captured.
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call = self.prepare(problem, inputs)
            for _ in range(2):
                call.run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                outputs = call.run()
        torch.cuda.synchronize()
        for output in outputs:
            # As integers of its size: an output may be a view with its axes moved.
            output.detach().view(getattr(torch, f"int{8 * output.itemsize}")).fill_(-1)
        if call.reset is not None:
            call.reset()
        # The call owns what the graph reads.
        return Replay(lambda graph=graph, call=call: graph.replay(), outputs, call.reset)
