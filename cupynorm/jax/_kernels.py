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

from cupynorm import _fused_source
from cupynorm._environment import import_cupy
from cupynorm._expressions import Program
from cupynorm._groups import Groups
from cupynorm._layout import pack_length
from cupynorm._operation import BackwardSpec, ForwardSpec, QuantizedSpec, Spec
from cupynorm.jax._xla import Handler, Launch

__all__ = ["call", "call_fused", "fused_platforms", "has_kernel", "platforms"]

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


def _cuda_passes() -> Any:
    import_cupy("x is on a GPU")
    from cupynorm import _fused_calls

    return _fused_calls


# The platforms with kernels, each with a function that returns the module of its plans. Then the
# same for norms of `cupynorm.fuse`.
_providers: dict[str, Callable[[], Any]] = {"cuda": _cuda_plans}
_fused_providers: dict[str, Callable[[], Any]] = {"cuda": _cuda_passes}


def platforms() -> tuple[str, ...]:
    """Return the platforms that have kernels, as `jax.lax.platform_dependent` names them."""
    return tuple(_providers)


def fused_platforms() -> tuple[str, ...]:
    """Return the platforms that have kernels of norms of `cupynorm.fuse`."""
    return tuple(_fused_providers)


# ---- when a program is traced --------------------------------------------------------------------


def has_kernel(platform: str, spec: QuantizedSpec, m: int, n: int) -> bool:
    """Tell whether there are devices, and each has a kernel that quantizes."""
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
        operands = _without_plans(platform, "dy", operands)
    size = max((_scratch_bytes(plan, spec, m, groups) for plan in plans), default=0)
    description = {
        "m": m,
        "n": n,
        "groups": None if groups is None else asdict(groups),
        **numbers,
    }
    return _staged(_TARGETS[type(spec)], spec, description, operands, results, size)


def call_fused(
    platform: str,
    spec: _fused_source.Spec,
    m: int,
    n: int,
    numbers: dict[str, Any],
    operands: dict[str, Any],
    results: dict[str, Any],
) -> tuple[Any, ...]:
    """Stage out a pass of a norm of `cupynorm.fuse`, as `call` does.

    The names are those of the kernel's arguments. `numbers` has eps, and the strides and steps of
    its arrays in `values`.
    """
    plans = [_pass(platform, spec, n, device) for device in _ordinals(platform)]
    if not plans and spec.of_outputs and spec.sums_over_rows:
        operands = _without_plans(platform, "rstd", operands)
    size = max((plan.scratch_bytes(m) for plan in plans), default=0)
    forward, backward = _FUSED_TARGETS
    target = backward if spec.of_outputs else forward
    return _staged(target, spec, {"m": m, "n": n, **numbers}, operands, results, size)


def _without_plans(platform: str, name: str, operands: dict[str, Any]) -> dict[str, Any]:
    """Return operands of which the one of a name cannot be compiled."""
    array = _not_compiled.bind(operands[name], message=NO_PLANS.format(platform))
    return operands | {name: array}


def _staged(
    target: str,
    spec: Any,
    description: dict[str, Any],
    operands: dict[str, Any],
    results: dict[str, Any],
    size: int,
) -> tuple[Any, ...]:
    """Stage out a call with so many bytes of scratch, as a description says it."""
    results = {name: _on_mesh(result) for name, result in results.items()}
    if size:
        # Made of a result: under shard_map, it varies over the same axes.
        like = next(iter(results.values()))
        scratch = jax.eval_shape(
            lambda like: jnp.broadcast_to(like.ravel()[0].astype(jnp.uint8), (size,)), like
        )
        results = results | {"scratch": _on_mesh(scratch)}
    description = description | {"scratch": size, "arrays": [*operands, *results]}
    given = jax.ffi.ffi_call(target, list(results.values()))(
        *operands.values(), call=json.dumps(description | {"spec": asdict(spec)})
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


def _pass(platform: str, spec: _fused_source.Spec, n: int, device: int, stream: int = 0) -> Any:
    """Return a pass of a norm of `cupynorm.fuse`, loaded on the device, as `_plan` does."""
    passes = _fused_providers[platform]()
    with _current(platform, device, stream):
        return passes.pass_of(spec, n, device)


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
    if kind is BackwardSpec:
        _check_scratch(what, needed, device)
    places = {name: i for i, name in enumerate((*arrays, STRIDE, ABSENT))}
    names = [STRIDE if o.endswith("_stride") else o for o in kind.table.operands]
    if kind.table.takes_scratch or needed:
        names.append("scratch")
    take = operator.itemgetter(*(places.get(name, places[ABSENT]) for name in names))
    bounds = what.get("scale_bounds") or what.get("relu") or (0.0, 0.0)
    numbers = () if kind is BackwardSpec else (what["eps"], *bounds)
    launch_plan = plan.prepared(m, *numbers, groups)
    return _on_buffers(platform, device, arrays, launch_plan, take, (n, 0)), not plan.stands_in


def _prepare_fused(
    platform: str, description: str, device: int, stream: int
) -> tuple[Launch, bool]:
    """Return the launch of a call of a norm of `cupynorm.fuse`, as `_prepare` does."""
    what = json.loads(description)
    arrays, values = what["arrays"], what["values"]
    plan = _pass(platform, _fused_spec(what["spec"]), what["n"], device, stream)
    _check_scratch(what, plan.scratch_bytes(what["m"]), device)
    places = {name: i for i, name in enumerate((*arrays, *values, ABSENT))}
    places["partials"] = places.get("scratch", places[ABSENT])
    take = operator.itemgetter(*(places.get(name, places[ABSENT]) for name in plan.operands))
    launch = plan.prepared(what["m"], what["eps"])
    return _on_buffers(platform, device, arrays, launch, take, (*values.values(), 0)), True


def _fused_spec(fields: dict[str, Any]) -> _fused_source.Spec:
    """Return a spec from what JSON made of its fields."""

    def program(arguments: Any, steps: Any, results: Any) -> Program:
        of_steps = ((operation, tuple(operands)) for operation, operands in steps)
        return Program(tuple(arguments), tuple(of_steps), tuple(results))

    programs = {name: program(**fields[name]) for name in ("prologue", "epilogue")}
    inputs = tuple(_fused_source.Input(**given) for given in fields["inputs"])
    outputs = {name: tuple(fields[name]) for name in ("outputs", "of_outputs")}
    return _fused_source.Spec(**fields | programs | outputs | {"inputs": inputs})


def _check_scratch(what: dict[str, Any], needed: int, device: int) -> None:
    if needed > what["scratch"]:
        raise ValueError(
            f"the program has {what['scratch']} bytes of scratch for {what['m']} rows of "
            f"{what['n']}, and GPU {device} needs {needed}: it was made for other GPUs, make it "
            "anew"
        )


def _on_buffers(
    platform: str, device: int, arrays: Sequence[str], launch_plan: Launch, take: Any, known: Any
) -> Launch:
    """Return a launch on addresses of XLA's buffers. `take` picks from these and from `known`."""

    def launch(stream: int, addresses: Sequence[int]) -> None:
        if functools.reduce(operator.or_, addresses) % ALIGNMENT:
            at = ", ".join(f"{a} at {b:#x}" for a, b in zip(arrays, addresses, strict=True))
            raise ValueError(f"arrays must be aligned to {ALIGNMENT} bytes, got {at}")
        launch_plan(stream, take((*addresses, *known)))

    return launch if platform != "cuda" else _on(device, launch)


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
_FUSED_TARGETS = "cupynorm.fused_forward", "cupynorm.fused_backward"
_PREPARED: dict[str, Callable[..., tuple[Launch, bool]]] = {
    **{target: functools.partial(_prepare, kind) for kind, target in _TARGETS.items()},
    **dict.fromkeys(_FUSED_TARGETS, _prepare_fused),
}
# On the CPU too, though no program calls them there. XLA looks at each when it is registered, but
# never at those of a missing platform.
_HANDLERS = [
    Handler(target, registered, functools.partial(prepare, platform))
    for platform, registered in (("cpu", "cpu"), ("cuda", "CUDA"))
    for target, prepare in _PREPARED.items()
]
