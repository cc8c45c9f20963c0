"""Steps of whole models with the norms of several libraries.

``python -m benchmarks.models models.json``

Two models, of bfloat16: a stack of pre-norm blocks, and transformers' Llama. Both have random
weights and RMSNorm. A step of training is a forward and a backward pass, without an optimizer. A
step of decoding is a forward pass of some rows of one token, without earlier keys and values. Each
is timed eager, by torch.compile, and as a CUDA graph of the eager step. The host's time counts, and
the L2 is not flushed, as in use. The libraries take turns, and each one's output is compared with
that of torch.nn.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.backends import KINDS, discover
from benchmarks.faces import microseconds
from benchmarks.measure import reason
from cupynorm._environment import gpu_problem

MODELS = ("blocks", "llama")
MODES = ("eager", "graph", "compiled")
# Hidden size: layers, and the batch and length of training.
SIZES = {1024: (8, 8, 1024), 2048: (6, 4, 2048), 4096: (2, 2, 2048)}
ROWS = (1, 16, 64)  # of decoding
OWN, OURS = "torch.nn", "cupynorm"
RESIDUAL = "cupynorm, residual="  # the blocks hand x and the residual to the norm
FUSED = "cupynorm, compile_options"
LIBRARIES = (OWN, "transformers", "liger", "quack", OURS, RESIDUAL, FUSED)
FORMULA_ERROR = 2e-2  # the relative error in the 2-norm that bfloat16 allows two models
# The table's columns after torch.nn's: in each, the first library that a case has.
COLUMNS = {
    "ours": (OURS,),
    "ours, with the residual": (RESIDUAL, FUSED),
    "Liger": ("liger",),
    "QuACK": ("quack",),
    "transformers": ("transformers",),
}
HEAD = ("step", f"{OWN}, ms", *COLUMNS)


@dataclass(frozen=True)
class Case:
    """What one step does."""

    model: str
    hidden: int
    layers: int
    batch: int
    length: int
    training: bool
    mode: str

    def __str__(self) -> str:
        what = "training" if self.training else "decoding"
        return (
            f"{self.model} {self.hidden}, {self.layers} layers, {what} "
            f"{self.batch}x{self.length}, {self.mode}"
        )


def cases(
    models: Sequence[str], sizes: Sequence[int], modes: Sequence[str], rows: Sequence[int] | None
) -> Iterator[Case]:
    """Yield the cases, those that compile last: torch compiles in processes that take host time.

    If rows are given, these are decoded, and nothing is trained.
    """
    for mode, model, hidden in itertools.product(modes, models, sizes):
        layers, batch, length = SIZES[hidden]
        if rows is None:
            yield Case(model, hidden, layers, batch, length, True, mode)
        for decoded in rows or ROWS:
            yield Case(model, hidden, layers, decoded, 1, False, mode)


# ---- the models ----------------------------------------------------------------------------------


@functools.cache
def block_class() -> Any:
    """Return a pre-norm block of attention and two linear layers."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, hidden: int, takes_residual: bool) -> None:
            super().__init__()
            self.heads, self.takes_residual = hidden // 64, takes_residual
            self.norm_1, self.norm_2 = (nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
            self.to_heads = nn.Linear(hidden, 3 * hidden, bias=False)
            self.from_heads = nn.Linear(hidden, hidden, bias=False)
            self.up = nn.Linear(hidden, 4 * hidden, bias=False)
            self.down = nn.Linear(4 * hidden, hidden, bias=False)

        def attend(self, x: Any) -> Any:
            heads = self.to_heads(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            return self.from_heads(mixed.transpose(1, 2).flatten(2))

        def forward(self, x: Any, residual: Any) -> tuple[Any, Any]:
            """Return what is to be added to the residual, and the residual."""
            if self.takes_residual and residual is not None:
                x, residual = self.norm_1(x, residual=residual)
            else:
                residual = x if residual is None else residual + x
                x = self.norm_1(residual)
            x = self.attend(x)
            if self.takes_residual:
                x, residual = self.norm_2(x, residual=residual)
            else:
                residual = residual + x
                x = self.norm_2(residual)
            return self.down(nn.functional.gelu(self.up(x))), residual

    class Blocks(nn.Module):
        def __init__(self, hidden: int, layers: int, takes_residual: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(hidden, takes_residual) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            residual: torch.Tensor | None = None
            for block in self.blocks:
                x, residual = block(x, residual)
            return residual + x

    return Blocks


def llama(hidden: int, layers: int) -> Any:
    """Return Llama, which is given embeddings."""
    from torch import nn
    from transformers import LlamaConfig, LlamaModel

    class Llama(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.model = LlamaModel(config)

        def forward(self, x: Any) -> Any:
            return self.model(inputs_embeds=x).last_hidden_state

    config = LlamaConfig(
        vocab_size=32,  # of no use
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 128 * 128,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        use_cache=False,
    )
    return Llama(config)


def is_of(case: Case, library: str) -> bool:
    """Tell whether a case has a library."""
    if library == RESIDUAL:  # transformers adds the residual itself, and compile_options fuses it
        return case.model == "blocks" and case.mode != "compiled"
    if library == "transformers":
        return case.model == "llama"
    return library != FUSED or case.mode == "compiled"


def build(case: Case, library: str, device: str) -> Any:
    """Return a model with the norms of a library."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        if case.model == "llama":
            model = llama(case.hidden, case.layers)
        else:
            model = block_class()(case.hidden, case.layers, library == RESIDUAL)
        model = model.to(torch.bfloat16)
        swap(model, library)
    return model


def swap(model: Any, library: str) -> None:
    """Put a library's norms in place of a model's."""
    from torch import nn

    if library == "transformers":
        return
    if library in (OURS, RESIDUAL, FUSED):
        import cupynorm.torch

        if not cupynorm.torch.replace_norms(model).replaced:
            raise RuntimeError("no norm was replaced")
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not type(child).__name__.endswith("RMSNorm"):
                continue
            eps = getattr(child, "eps", None) or child.variance_epsilon
            hidden = child.weight.shape[0]
            if library == "liger":
                of_liger = importlib.import_module("liger_kernel.transformers.rms_norm")
                # "gemma" computes in float32 throughout, as all others do.
                made = of_liger.LigerRMSNorm(hidden, eps, casting_mode="gemma", in_place=False)
            elif library == "quack":
                made = importlib.import_module("quack.rmsnorm").QuackRMSNorm(hidden, eps=eps)
            else:
                made = nn.RMSNorm(hidden, eps=eps)
            made.weight = child.weight
            setattr(module, name, made)


# ---- their steps ---------------------------------------------------------------------------------


class Step:
    """A step of a model, which returns its output."""

    def __init__(self, case: Case, library: str, device: str) -> None:
        import torch

        model = build(case, library, device)
        generator = torch.Generator(device).manual_seed(1)

        def drawn() -> Any:
            shape = (case.batch, case.length, case.hidden)
            return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

        self.x, self.dy = drawn(), drawn()
        self.training = case.training
        self.leaves = [self.x, *model.parameters()]
        for leaf in self.leaves:
            leaf.requires_grad_(case.training)
        self.model = model
        if case.mode == "compiled":
            options = None
            if library == FUSED:
                import cupynorm.torch

                options = cupynorm.torch.compile_options()
            self.model = torch.compile(model, dynamic=False, options=options)
        self.run: Callable[[], Any] = self._captured() if case.mode == "graph" else self._eager

    def _eager(self) -> Any:
        import torch

        if not self.training:
            with torch.no_grad():
                return self.model(self.x)
        y = self.model(self.x)
        y.backward(self.dy)
        for leaf in self.leaves:
            leaf.grad = None
        return y.detach()

    def _captured(self) -> Callable[[], Any]:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._eager()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = self._eager()

        def replay() -> Any:
            graph.replay()
            return y

        return replay


def relative_error(y: Any, expected: Any) -> float:
    difference = (y.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def measure(case: Case, libraries: Sequence[str], rounds: int, calls: int, device: str) -> Any:
    """Return a record of each library for which there is a step."""
    import torch

    torch._dynamo.reset()
    gc.collect()  # models of the last case, which refer to their own steps
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    steps: dict[str, Step] = {}
    records: list[dict[str, Any]] = []
    expected = None
    for library in (library for library in libraries if is_of(case, library)):
        record = {"case": str(case), **vars(case), "library": library}
        try:
            step = Step(case, library, device)
            y = step.run()
            wait()
            if library == OWN:
                expected = y.clone()
            if expected is None:
                raise RuntimeError(f"there is no output of {OWN} to compare with")
            error = relative_error(y, expected)
            if not error < FORMULA_ERROR:
                raise RuntimeError(f"the output is off by {error:.2g} of its 2-norm")
            record |= {"error": error, "peak_bytes": peak(step, device)}
            steps[library] = step
        except Exception as problem:  # of a library that is missing, or fails
            record["reason"] = reason(problem)
        records.append(record)

    def finished(step: Step) -> None:
        for _ in range(calls):
            step.run()
        wait()

    runs = {name: functools.partial(finished, step) for name, step in steps.items()}
    taken = microseconds(runs, rounds, 1, wait)
    for record in records:
        if times := taken.get(record["library"]):
            ms = [1e-3 * time / calls for time in times]
            tokens = case.batch * case.length / (1e-3 * statistics.median(ms))
            record |= {"ms": statistics.median(ms), "rounds_ms": ms, "tokens_per_second": tokens}
    return records


def peak(step: Step, device: str) -> int | None:
    """Return the most memory that a step allocates: its activations, and all gradients."""
    import torch

    if device != "cuda" or step.run != step._eager:
        return None
    step.run()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


# ---- the command ---------------------------------------------------------------------------------


def row(records: Sequence[dict[str, Any]]) -> str:
    """Return a line of the table, in Markdown: torch.nn's time, and the ratios of others to it."""
    taken = {record["library"]: record for record in records if "ms" in record}
    own = taken.get(OWN)
    cells = [records[0]["case"], "" if own is None else f"{own['ms']:.3f}"]
    for libraries in COLUMNS.values():
        record = next((taken[name] for name in libraries if name in taken), None)
        if record is None or own is None:
            cells.append("")
            continue
        pairs = zip(record["rounds_ms"], own["rounds_ms"], strict=True)
        cells.append(f"{statistics.median(a / b for a, b in pairs):.3f}")
    return f"| {' | '.join(cells)} |"


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of a file's records."""
    yield from head()
    for _, of_case in itertools.groupby(records, lambda record: record["case"]):
        yield row(list(of_case))


def head() -> tuple[str, str]:
    return f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--show", action="store_true", help="print the table of a file instead")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, help="decode these alone")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.show:
        print(*table(results.load(options.results)["measurements"]), sep="\n")
        return 0
    if options.results.exists():
        parser.error(f"{options.results} exists: name another file")
    if missing := gpu_problem():
        print(f"There is nothing to time: {missing}.")
        return 1
    _, versions = discover(set(options.libraries) & set(KINDS))
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    report = results.new(versions, list(sys.argv[1:] if arguments is None else arguments))
    print(*head(), sep="\n")
    for case in cases(options.models, options.sizes, options.modes, options.rows):
        calls = 3 if case.training else 20
        libraries = [name for name in LIBRARIES if name == OWN or name in options.libraries]
        records = measure(case, libraries, options.rounds, calls, "cuda")
        report["measurements"] += records
        print(row(records), flush=True)
        results.save(report, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
