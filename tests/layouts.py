"""Which layouts are chosen for the cases in data/layouts.txt: `python tests/layouts.py`.

A line has a case, " -> " and the layout that is chosen for it. README.md says more. The command
sorts the lines and writes the layouts anew. A new case is a line without a layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cupynorm._compile import Instantiation, backward_instantiations, forward_instantiation
from cupynorm._layout import (
    backward_config,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
)
from cupynorm._layout.reduction import Reduction
from cupynorm._operation import BackwardSpec, ForwardSpec

FILE = Path(__file__).parent / "data" / "layouts.txt"

Spec = ForwardSpec | BackwardSpec

DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Shorter names of layouts' fields.
FIELDS = {
    "row_threads": "row",
    "blocks_per_multiprocessor": "blocks",
    "packs_per_thread": "packs",
    "pack_length": "pack",
    "cluster_blocks": "cluster",
}


def configure(spec: Spec, n: int, vector: int, architecture: int = 90, **options: bool) -> Any:
    """Return the layout of many rows."""
    if isinstance(spec, ForwardSpec):
        return forward_config(spec, n, vector, architecture)
    return backward_config(spec, n, vector, architecture, **options)


def few_rows(
    spec: Spec, n: int, many: Any, architecture: int, multiprocessors: int = 132, **options: bool
) -> tuple[tuple[int, Any], ...]:
    """Return the layouts of few rows, each after the most rows that it is for."""
    if isinstance(spec, ForwardSpec):
        return few_rows_configs(spec, many, n, architecture, multiprocessors)
    return few_rows_backward_configs(spec, many, architecture, multiprocessors, **options)


def instantiate(spec: Spec, config: Any) -> tuple[Instantiation, ...]:
    """Return the kernels of a layout."""
    if isinstance(spec, ForwardSpec):
        return (forward_instantiation(spec, config),)
    return backward_instantiations(spec, config)


def parsed(case: str) -> tuple[Spec, dict[str, Any]]:
    """Return the spec of a case, and its other words: sm, n, vector, rows, on and options."""
    direction, norm, x, *words = case.split()
    given: dict[str, Any] = {"weight": None, "bias": None, "rows": None, "on": 132}
    for word in words:
        name, _, value = word.replace("sm_", "sm=").partition("=")
        given[name] = DTYPES.get(value) or (int(value) if value else True)
    other = given.pop("y" if direction == "forward" else "dy", DTYPES[x])
    operands, centred = (given.pop("weight"), given.pop("bias")), given.pop("zero_centered", False)
    if direction == "forward":
        relu = given.pop("relu", False)
        return ForwardSpec(norm, DTYPES[x], *operands, other, centred, True, relu), given
    bitmask = given.pop("bitmask", False)
    return BackwardSpec(norm, DTYPES[x], other, *operands, centred, bitmask), given


def told(config: Any) -> str:
    """Return a layout in words, without False, 0, None and what the line says elsewhere."""
    words = [type(config).__name__.removeprefix("Forward").removeprefix("Backward")]
    for name, value in vars(config).items():
        if isinstance(value, Reduction):
            words.append(f"groups={value.groups}x{value.width}/{value.vector}")
        elif value and name not in ("vector", "block_threads"):
            words.append(name if value is True else f"{FIELDS.get(name, name)}={value}")
    return " ".join(words)


def chosen(case: str) -> str:
    """Return the layout of a case, its kernels' blocks, and the most rows that it is for."""
    spec, given = parsed(case)
    n, sm, rows = given["n"], given["sm"], given["rows"]
    config = configure(spec, n, given["vector"], sm)
    if rows is not None:
        dx_given = {"dx_given": True} if "dx_given" in given else {}
        tiers = few_rows(spec, n, config, sm, given["on"], **dx_given)
        most, config = next((tier for tier in tiers if rows <= tier[0]), ("all", config))
    kernels = instantiate(spec, config)
    threads = "+".join(str(kernel.block_threads) for kernel in kernels)
    shared = "+".join(str(kernel.shared_bytes) for kernel in kernels)
    found = f"{told(config)} threads={threads} shared={shared}"
    return found if rows is None else f"{found} most_rows={most}"


def place(case: str) -> tuple[Any, ...]:
    """Return a case's sort key, which puts both sides of a threshold next to each other."""
    _, given = parsed(case)
    before, _, behind = case.partition(" n=")
    return before, given["n"], given["vector"], given["on"], given["rows"] or 0, behind


def lines_of(text: str) -> list[str]:
    """Return the lines of these cases, sorted, with the layouts that are chosen now."""
    cases = {line.partition(" -> ")[0].strip() for line in text.splitlines()}
    return [f"{case} -> {chosen(case)}" for case in sorted(cases, key=place)]


if __name__ == "__main__":
    lines = lines_of(FILE.read_text(encoding="utf-8"))
    FILE.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
