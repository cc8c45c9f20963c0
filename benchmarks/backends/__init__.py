"""The libraries, in the order of the tables. Each is used if it can be imported."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.backends.base import Backend
from benchmarks.backends.cudnn_peer import Cudnn
from benchmarks.backends.jax_peer import Jax
from benchmarks.backends.liger_peer import Liger
from benchmarks.backends.limit import CuPyLimit, TorchLimit
from benchmarks.backends.ours import Ours, OursWithoutClusters
from benchmarks.backends.ours_jax import OursJax
from benchmarks.backends.ours_torch import OursTorch
from benchmarks.backends.quack_peer import Quack
from benchmarks.backends.torch_peers import Compiled, Eager, Functional

ALL: tuple[type[Backend], ...] = (
    CuPyLimit,
    TorchLimit,
    Ours,
    OursTorch,
    OursJax,
    OursWithoutClusters,
    Quack,
    Cudnn,
    Liger,
    Compiled,
    Functional,
    Eager,
    Jax,
)
KINDS = {backend.name: backend.kind for backend in ALL}


def discover(names: Iterable[str] = ()) -> tuple[dict[str, Backend], dict[str, str]]:
    """Return the usable backends, and for each backend its version or why it is missing.

    `names` restricts them. The first of the limits is always there, since every ratio needs one.
    """
    names = tuple(names)
    found: dict[str, Backend] = {}
    facts: dict[str, str] = {}
    for cls in ALL:
        if names and cls.name not in names and cls.kind != "limit":
            continue
        backend = cls()
        try:
            facts[cls.name] = backend.version()
        except Exception as error:  # a broken installation raises anything
            facts[cls.name] = f"missing: {type(error).__name__}: {error}"
        else:
            found[cls.name] = backend
    return found, facts
