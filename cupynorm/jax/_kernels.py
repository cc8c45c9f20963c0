"""The kernels as targets of XLA: loaded when a program is traced, launched when it runs.

Each call describes itself in JSON. So a program from a compilation cache, or one that another
process exported, says which kernels it needs, and its first launch loads them. Another kernel with
the same bits may stand in at first, as in the calls of CuPy.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from cupynorm._environment import import_cupy
from cupynorm._groups import Groups
from cupynorm._layout import pack_length
from cupynorm._operation import BackwardSpec, ForwardSpec, QuantizedSpec, Spec
from cupynorm.jax._xla import Handler, Launch

__all__ = ["call", "has_kernel", "platforms"]

ALIGNMENT = 16  # bytes, of every buffer. XLA's alignment is a multiple of it

# The other operands of a launch: rows lie one after the other, and an absent array has the address
# 0.
STRIDE, ABSENT = "stride", "absent"

NO_PLANS = (
    "gradients for {0} can be compiled or exported only where JAX has such a device, on which "
    "their scratch depends: jax.devices('{0}') has none"
)


def _cuda_plans() -> Any:
    import_cupy("x is on a GPU")
    from cupynorm import _plans

    return _plans


# The platforms with kernels, each with a function that returns the module of its plans.
_providers: dict[str, Callable[[], Any]] = {"cuda": _cuda_plans}


def platforms() -> tuple[str, ...]:
    """Return the platforms that have kernels, as `jax.lax.platform_dependent` names them."""
    return tuple(_providers)


# ---- when a program is traced --------------------------------------------------------------------


def has_kernel(platform: str, spec: QuantizedSpec, m: int, n: int) -> bool:
    """Tell whether each device has a kernel that quantizes. Nobody knows it of missing devices."""
    plans = [_plan(platform, spec, m, n, device) for device in _ordinals(platform)]
    return bool(plans) and None not in plans


def call(
    platform: str,
    spec: Spec,
    m: int,
    n: int,
    groups: Groups | None,
    numbers: dict[str, Any],
    operands: dict[str, Any],
    results: dict[str, Any],
) -> tuple[Any, ...]:
    """Stage out a pass over m rows of n elements, by the names of its operands and results.

    The results are given as types. Scratch, if needed, is one more result, which is dropped here.
    """
    plans = [_plan(platform, spec, m, n, device) for device in _ordinals(platform)]
    if not plans and isinstance(spec, BackwardSpec):
        dy = _not_compiled.bind(operands["dy"], message=NO_PLANS.format(platform))
        operands = operands | {"dy": dy}
    results = {name: _on_mesh(result) for name, result in results.items()}
    size = max((_scratch_bytes(plan, spec, m, groups) for plan in plans), default=0)
    if size:
        # Made of a result: under shard_map, it varies over the same axes.
        like = next(iter(results.values()))
        scratch = jax.eval_shape(
            lambda like: jnp.broadcast_to(like.ravel()[0].astype(jnp.uint8), (size,)), like
        )
        results = results | {"scratch": _on_mesh(scratch)}
    numbers = numbers | {"scratch": size}
    description = {
        "m": m,
        "n": n,
        "groups": None if groups is None else asdict(groups),
        **numbers,
        "arrays": [*operands, *results],
        "spec": asdict(spec),
    }
    given = jax.ffi.ffi_call(_TARGETS[type(spec)], list(results.values()))(
        *operands.values(), call=json.dumps(description)
    )
    return tuple(array for name, array in zip(results, given, strict=True) if name != "scratch")


def _on_mesh(result: Any) -> Any:
    """Return the type of a result, with the mesh along which it varies.

    `jax.eval_shape` names none where some axes are Auto, as in a shard_map over the others, and
    `ffi_call` takes no type that varies along the axes of no mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if result.sharding is not None or mesh.empty:
        return result
    return jax.ShapeDtypeStruct(
        result.shape,
        result.dtype,
        sharding=NamedSharding(mesh, PartitionSpec()),
        manual_axis_type=result.manual_axis_type,
    )


@functools.cache
def _ordinals(platform: str) -> tuple[int, ...]:
    """Return the ordinals of this process's devices; none if the platform is missing."""
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        return ()
    return tuple(device.local_hardware_id for device in devices)


def _plan(platform: str, spec: Spec, m: int, n: int, device: int, stream: int = 0) -> Any:
    """Return the plan for m aligned rows that lie one after the other, loaded on the device.

    It is None if no kernel serves a pass that quantizes. `stream` is that of a launch. While XLA
    captures it for a command buffer, nothing stands in.
    """
    plans = _providers[platform]()
    divisors = n | pack_length(spec.x)
    vector = divisors & -divisors
    with _current(platform, device, stream):
        return getattr(plans, f"{spec.table.name}_plan")(spec, m, n, vector, device, soon=True)


def _scratch_bytes(plan: Any, spec: Spec, m: int, groups: Groups | None) -> int:
    """Return the bytes of scratch that a launch can use; a backward pass needs them."""
    of_groups = (groups,) if isinstance(spec, BackwardSpec) else ()
    return int(plan.scratch_bytes(m, *of_groups))


class _StreamOfXla(NamedTuple):
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle  # the version of CUDA's stream protocol


@contextlib.contextmanager
def _current(platform: str, device: int, stream: int) -> Iterator[None]:
    """Make a device and its stream current for a while: XLA relies on its threads' devices."""
    if platform != "cuda":
        yield
        return
    from cupy.cuda import Stream, runtime

    previous = runtime.getDevice()
    runtime.setDevice(device)
    try:
        with Stream.from_external(_StreamOfXla(stream)):
            yield
    finally:
        runtime.setDevice(previous)


# JAX traces the kernels of platforms that it may drop, so an error may come only when it compiles.
_not_compiled = Primitive("cupynorm_not_compiled")


def _refuse(*_: Any, message: str) -> NoReturn:
    raise NotImplementedError(message)


_not_compiled.def_abstract_eval(lambda array, message: array)
mlir.register_lowering(_not_compiled, _refuse)


# ---- when it runs --------------------------------------------------------------------------------


def _prepare(
    kind: type[Spec], platform: str, description: str, device: int, stream: int
) -> tuple[Launch, bool]:
    """Return the launch of a call on the addresses of its operands and results.

    And return whether it serves later calls: its kernel does not stand in for another.
    """
    what = json.loads(description)
    m, n, arrays = what["m"], what["n"], what["arrays"]
    spec, of_groups = kind(**what["spec"]), what.get("groups")
    groups = None if of_groups is None else Groups(**of_groups)
    plan = _plan(platform, spec, m, n, device, stream)
    if plan is None:
        raise ValueError(
            f"GPU {device} has no kernel that quantizes rows of {n} as the program has it: it was "
            "made for other GPUs, make it anew"
        )
    needed = _scratch_bytes(plan, spec, m, groups)
    # A forward pass only takes longer without scratch, if the program was made for other GPUs. Its
    # address is then 0.
    if kind is BackwardSpec and needed > what["scratch"]:
        raise ValueError(
            f"the program has {what['scratch']} bytes of scratch for {m} rows of {n}, and GPU "
            f"{device} needs {needed}: it was made for other GPUs, make it anew"
        )
    places = {name: i for i, name in enumerate((*arrays, STRIDE, ABSENT))}
    names = [STRIDE if o.endswith("_stride") else o for o in kind.table.operands]
    if kind.table.takes_scratch or needed:
        names.append("scratch")
    take = operator.itemgetter(*(places.get(name, places[ABSENT]) for name in names))
    bounds = what.get("scale_bounds") or what.get("relu") or (0.0, 0.0)
    numbers = () if kind is BackwardSpec else (what["eps"], *bounds)
    launch_plan = plan.prepared(m, *numbers, groups)

    def launch(stream: int, addresses: Sequence[int]) -> None:
        if functools.reduce(operator.or_, addresses) % ALIGNMENT:
            at = ", ".join(f"{a} at {b:#x}" for a, b in zip(arrays, addresses, strict=True))
            raise ValueError(f"arrays must be aligned to {ALIGNMENT} bytes, got {at}")
        launch_plan(stream, take((*addresses, n, 0)))

    return launch if platform != "cuda" else _on(device, launch), not plan.stands_in


def _on(device: int, launch: Launch) -> Launch:
    """Return a launch with its device current: XLA relies on its threads' devices."""
    from cupy.cuda.runtime import getDevice, setDevice

    def there(stream: int, addresses: Sequence[int]) -> object:
        previous = getDevice()
        if previous == device:
            return launch(stream, addresses)
        setDevice(device)
        try:
            return launch(stream, addresses)
        finally:
            setDevice(previous)

    return there


_TARGETS = {
    kind: f"cupynorm.{kind.table.name}" for kind in (ForwardSpec, BackwardSpec, QuantizedSpec)
}
# On the CPU too, though no program calls them there. XLA looks at each when it is registered, but
# never at those of a missing platform.
_HANDLERS = [
    Handler(target, registered, functools.partial(_prepare, kind, platform))
    for platform, registered in (("cpu", "cpu"), ("cuda", "CUDA"))
    for kind, target in _TARGETS.items()
]
