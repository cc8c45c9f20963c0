"""The host's time of calls by torch and by JAX: each framework's own norms, and these.

``python -m benchmarks.faces faces.json``

The arrays are so small that the host decides a call's time. Nothing waits for the device. Its queue
holds the launches of a round. Calls to compare take turns, and the ratio is the median of the
rounds' ratios, since the host drifts by more than the calls differ. The weights have x's dtype, the
only one for which torch's own norms have kernels.

JAX has one norm in a program, forward or with its backward pass, and a norm of several. Each is
compiled in three ways. XLA's default makes a command buffer (a CUDA graph) of five operations or
more. Without command buffers, Python launches each of cupynorm's kernels. Or all operations are in
one buffer. Torch has eager calls: without gradients, recorded for them, and with the backward pass
to x and to the weights. It has the same for a compiled block of a norm, an activation and a sum,
and for a compiled chain of additions, norms and matrix products. There `compile_options` moves the
additions into the norms. Without products, inductor would make one kernel of several of its norms.
The chain is also timed as torch's mode "reduce-overhead" has it, which replays CUDA graphs.
QuACK's RMSNorm takes part if it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.backends.jax_peer import formula
from benchmarks.host import SHAPE
from benchmarks.measure import reason
from cupynorm._bench import EPS, Problem

NORMS = ("rms_norm", "layer_norm")
OURS = "cupynorm"
CHAIN = 8  # norms in one program
BLOCK = "compiled block"
CHAINED = f"compiled chain of {CHAIN}"
REPLAYED = f"{CHAINED}, as CUDA graphs"
# XLA's options by what they do to a program of any length.
COMMAND_BUFFERS: dict[str, dict[str, str | int]] = {
    "": {},
    ", without command buffers": {"xla_gpu_enable_command_buffer": ""},
    ", in a command buffer": {"xla_gpu_graph_min_graph_size": 1},
}

# What is timed, its calls by library, and how many norms one call has.
Group = tuple[str, dict[str, Callable[[], object]], int]


def microseconds(
    calls: dict[str, Callable[[], object]], rounds: int, times: int, wait: Callable[[], object]
) -> dict[str, list[float]]:
    """Return each call's time in each of some rounds, without a first round.

    The calls take turns, in every other round from the last to the first.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds + 1):
        for name, call in list(calls.items())[:: -1 if done % 2 else 1]:
            wait()
            start = time.perf_counter()
            for _ in range(times):
                call()
            taken[name].append(1e6 * (time.perf_counter() - start) / times)
            wait()
    return {name: values[1:] for name, values in taken.items()}


# ---- torch ---------------------------------------------------------------------------------------


def torch_norms(norm: str) -> dict[str, Any]:
    """Return the functions of x, weight and, of LayerNorm, bias."""
    import torch

    import cupynorm.torch

    eps = EPS[norm]  # type: ignore[index]
    own, mine = getattr(torch.nn.functional, norm), getattr(cupynorm.torch, norm)
    found = {
        "torch": lambda x, *affine: own(x, x.shape[-1:], *affine, eps=eps),
        OURS: lambda x, *affine: mine(x, *affine, eps=eps),
    }
    if norm == "rms_norm" and torch.cuda.is_available():
        with contextlib.suppress(ImportError):
            # By its full name: the package has a function of the same name.
            rmsnorm = importlib.import_module("quack.rmsnorm").rmsnorm
            found["quack"] = lambda x, weight: rmsnorm(x, weight, eps=eps)
    return found


def compiled(norms: dict[str, Any], kind: str, backend: str, device: str) -> dict[str, Any]:
    """Return compiled functions of each norm, and a chain that has its additions in the norms."""
    import torch
    from torch._inductor import list_mode_options

    import cupynorm.torch

    torch._dynamo.reset()
    options = list_mode_options("reduce-overhead") if kind == REPLAYED else None
    variants = [(name, function, options) for name, function in norms.items()]
    if kind != BLOCK and backend == "inductor":
        fused = cupynorm.torch.compile_options() | (options or {})
        variants.append((f"{OURS}, compile_options", norms[OURS], fused))
    size = SHAPE[-1]
    square = torch.randn((size, size), device=device, dtype=torch.bfloat16) / size**0.5
    found = {}
    for name, function, options in variants:

        def block(*tensors: Any, function: Any = function) -> Any:
            return torch.nn.functional.silu(function(*tensors)) + tensors[0]

        def chain(x: Any, *affine: Any, function: Any = function) -> Any:
            stream = x
            for _ in range(CHAIN):
                stream = stream + x
                x = function(stream, *affine) @ square
            return x

        program = block if kind == BLOCK else chain
        # Compiled code is kept with its function, and would be searched among the others'.
        program.__code__ = program.__code__.replace()
        found[name] = torch.compile(program, backend=backend, fullgraph=True, options=options)
    return found


def torch_passes(leaves: Sequence[Any], dy: Any) -> dict[str, Callable[[Any], object]]:
    import torch

    def infer(function: Any) -> Any:
        with torch.no_grad():
            return function(*leaves)

    def train(function: Any) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, dy)

    return {"no_grad": infer, "forward": lambda f: f(*leaves), "and backward": train}


def works(run: Callable[[Any], object], function: Any) -> bool:
    """Tell whether a library takes a call, and compile it. The others are timed without it."""
    try:
        run(function)
    except Exception as error:
        print(f"not timed: {reason(error)}", file=sys.stderr)
        return False
    return True


def by_torch(device: str) -> Iterator[Group]:
    import torch

    backend = "inductor" if device == "cuda" else "aot_eager"  # which needs no C++ compiler
    # Compiled ones come last: torch compiles in processes that stay and take host time.
    kinds = ("eager", BLOCK, CHAINED, *([REPLAYED] if device == "cuda" else []))
    for kind, norm in itertools.product(kinds, NORMS):
        x = torch.randn(SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
        affine = [torch.rand_like(x[0]).detach() for _ in range(1 + (norm == "layer_norm"))]
        passes = torch_passes(
            [x, *(tensor.requires_grad_() for tensor in affine)], torch.randn_like(x)
        )
        functions = torch_norms(norm)
        if kind != "eager":
            functions = compiled(functions, kind, backend, device)
        if kind == REPLAYED:
            # Torch replays no graph while an earlier forward pass waits for its backward pass.
            del passes["forward"]
        for what, run in passes.items():
            calls = {
                name: functools.partial(run, f) for name, f in functions.items() if works(run, f)
            }
            yield (
                f"torch {norm}, {kind}, {what}",
                calls,
                CHAIN if kind in (CHAINED, REPLAYED) else 1,
            )


# ---- JAX -----------------------------------------------------------------------------------------


def by_jax() -> Iterator[Group]:
    import jax
    import jax.numpy as jnp

    import cupynorm.jax

    x = jnp.ones(SHAPE, jnp.bfloat16)
    for norm in NORMS:
        problem = Problem(norm, "forward", *SHAPE, x.dtype.name, x.dtype.name)
        mine = functools.partial(getattr(cupynorm.jax, norm), eps=EPS[problem.norm])
        affine = [jnp.ones(SHAPE[-1], x.dtype)] * (1 + (norm == "layer_norm"))
        functions: dict[str, Any] = {"JAX": formula(problem), OURS: mine}

        def chain(x: Any, *affine: Any, function: Any) -> Any:
            for _ in range(CHAIN):
                x = function(x, *affine)
            return x

        def step(x: Any, *affine: Any, function: Any) -> Any:
            y, pull_back = jax.vjp(function, x, *affine)
            return y, *pull_back(y)

        programs: tuple[tuple[str, Callable[[Any], Any], int], ...] = (
            ("forward", lambda f: f, 1),
            ("and backward", lambda f: functools.partial(step, function=f), 1),
            (f"forward of {CHAIN} in a row", lambda f: functools.partial(chain, function=f), CHAIN),
        )
        for (what, of_function, count), how in itertools.product(programs, COMMAND_BUFFERS):
            compiled = functools.partial(jax.jit, compiler_options=COMMAND_BUFFERS[how])
            calls = {
                name: functools.partial(compiled(of_function(f)), x, *affine)
                for name, f in functions.items()
            }
            yield f"JAX {norm}, {what}{how}", calls, count


# ---- the command ---------------------------------------------------------------------------------


def waits() -> tuple[str, Callable[[], object], Callable[[], object]]:
    """Return the device, and what waits for it by torch and by JAX."""
    import jax
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    return device, wait, lambda: jax.block_until_ready(jax.device_put(0.0) + 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faces", description=__doc__)
    parser.add_argument("results", type=Path, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="a round (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.results.exists():
        parser.error(f"{options.results} exists: name another file")
    if min(options.rounds, options.calls) < 1:
        parser.error(
            f"--rounds and --calls must be at least 1, got {options.rounds} and {options.calls}"
        )
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    import jax
    import torch

    device, wait_torch, wait_jax = waits()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    report: dict[str, Any] = {
        "device": name,
        "shape": SHAPE,
        "dtypes": ("bfloat16", "bfloat16"),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": results.commit(),
        "machine": results.machine() if device == "cuda" else None,
        "rounds": options.rounds,
        "calls": options.calls,
        "measurements": [],
    }
    print(f"{name}, torch {torch.__version__}, JAX {jax.__version__}; {SHAPE} bfloat16")
    print("| host, us a norm | own | cupynorm | of own | others |")
    print("| --- | --- | --- | --- | --- |")
    # JAX comes before torch, which compiles in processes that stay.
    for groups, wait in ((by_jax(), wait_jax), (by_torch(device), wait_torch)):
        for what, calls, count in groups:
            taken = microseconds(calls, options.rounds, options.calls, wait)
            taken = {who: [t / count for t in times] for who, times in taken.items()}
            report["measurements"].append({"what": what, "microseconds": taken})
            print(row(what, taken), flush=True)
            results.save(report, options.results)
    return 0


def row(what: str, taken: dict[str, list[float]]) -> str:
    """Return a line of the table, in Markdown."""
    own, *_ = taken
    median = {who: statistics.median(times) for who, times in taken.items()}
    cells = [what, f"{median[own]:.1f}", "", ""]
    if OURS in taken:
        ratio = statistics.median(b / a for a, b in zip(taken[own], taken[OURS], strict=True))
        cells[2:] = f"{median[OURS]:.1f}", f"{ratio:.2f}"
    others = [f"{who} {time:.1f}" for who, time in median.items() if who not in (own, OURS)]
    return f"| {' | '.join((*cells, ', '.join(others)))} |"


if __name__ == "__main__":
    sys.exit(main())
