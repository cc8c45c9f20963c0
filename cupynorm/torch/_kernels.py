"""Forward and backward passes on plain tensors, outside autograd.

On a GPU the kernels compute, into memory of torch's allocator and on torch's current stream. On the
CPU `cupynorm.reference` does. Everything that depends only on shapes, strides, dtypes, devices and
options is checked and prepared once, and remembered. A call then costs its allocations, the
addresses and the launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, cast

import numpy as np
import torch

from cupynorm import _checks, reference
from cupynorm._arrays import BFLOAT16, DTYPES, row_stride
from cupynorm._environment import import_cupy
from cupynorm._groups import Groups, check_alike, groups_of
from cupynorm._layout import pack_length
from cupynorm._operation import (
    BACKWARD,
    FORWARD,
    ITEMSIZE,
    KINDS,
    MOVED_BY_PACKS,
    QUANTIZED,
    BackwardSpec,
    ForwardSpec,
    Kind,
    Options,
    Pass,
    QuantizedSpec,
    Spec,
    shapes_of_results,
)
from cupynorm._prepared import Dialect, key_function, remember, run_maker
from cupynorm._quantize import pass_of_kernel, strides_by_column

__all__ = [
    "NUMPY_DTYPES",
    "OPTIONS",
    "SHARED",
    "Call",
    "Tensors",
    "Told",
    "by_name",
    "check_dense",
    "check_dtypes_told",
    "check_tensor",
    "compute_type",
    "compute_type_of_total",
    "find",
    "from_schema",
    "options_of",
    "run",
    "spec_of",
    "told_by_name",
]

NUMPY_DTYPES = {getattr(torch, name): dtype for dtype, name in DTYPES.items()}
NAMES = {getattr(torch, name): name for name in ITEMSIZE}

Tensors = tuple[Any, ...]  # the inputs of a pass, in the order of its table
# What a call is told in addition to its tensors, in the order of `OPTIONS`. Calls are remembered by
# it. It is a tuple, since an object takes longer to make.
Told = tuple[Any, ...]
Run = Callable[[Tensors], Any]

# Their names, and their types in a schema of torch's. An operation takes them after the tensors of
# its pass. The first is an int, and DTensor tells calls apart from there on.
SHARED = {"k": "int", "norm": "str", "eps": "float", "zero_centered": "bool"}
OPTIONS = {
    FORWARD: SHARED
    | {"relu": "float[]?", "out_dtype": "ScalarType?", "residual_dtype": "ScalarType?"}
    | {"training": "bool"},
    BACKWARD: SHARED | dict.fromkeys(("dx_dtype", "dresidual_dtype", "bias_dtype"), "ScalarType?"),
}


def by_name(table: Pass, tensors: Tensors) -> dict[str, Any]:
    """Return the tensors that a pass reads, by name."""
    return dict(zip(table.reads, tensors, strict=True))


def told_by_name(table: Pass, told: Told) -> dict[str, Any]:
    """Return what a pass is told, by name."""
    return dict(zip(OPTIONS[table], told, strict=True))


def options_of(table: Pass, told: Told, groups: Groups | None = None) -> Options:
    """Return the options of a pass. Its dtypes belong to a spec."""
    named = told_by_name(table, told).items()
    options = {name: value for name, value in named if not name.endswith("_dtype")}
    return Options(**options, groups=groups)


_RELU = list(OPTIONS[FORWARD]).index("relu")


def from_schema(table: Pass, told: Told) -> Told:
    """Return what an operation of torch.library was told. Its relu comes as a list."""
    if table is FORWARD and told[_RELU] is not None:
        return *told[:_RELU], tuple(told[_RELU]), *told[_RELU + 1 :]
    return told


def spec_of(table: Pass, tensors: Tensors, told: Told, groups: Groups | None = None) -> Spec:
    """Return what a pass computes. Only the dtypes that it is told are checked."""
    options = options_of(table, told, groups)
    dtypes, named = {}, told_by_name(table, told)
    for name, tensor in by_name(table, tensors).items():
        dtypes[name] = None if tensor is None else NAMES.get(tensor.dtype, "uint8")
    for name, option in (table.dtypes_asked | {"dbias": "bias_dtype"}).items():
        dtype = named.get(option)
        dtypes[name] = None if dtype is None else DTYPES[_checks.to_dtype(option, dtype)]
    if table is FORWARD:
        return ForwardSpec.of(options, dtypes)
    if dtypes["dresidual"] == (dtypes["dx"] or dtypes["x"]):
        raise ValueError(
            f"dresidual_dtype must not be dx's: dresidual is dx then; got {dtypes['dresidual']}"
        )
    return BackwardSpec.of(options, dtypes)


def compute_type(dtype: Any) -> torch.dtype:
    """Return the dtype that rows of a dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_type_of_total(x: Any, residual: Any, residual_dtype: Any) -> torch.dtype:
    """Return the dtype that the rows of a forward pass are computed in."""
    return compute_type(x.dtype if residual is None else residual_dtype or residual.dtype)


# ---- the device, as it is reached ----------------------------------------------------------------


def _has_kernels(x: torch.Tensor) -> bool:
    return bool(x.is_cuda)


def _load(make: str, device: Any, spec: Spec, *sizes: int) -> Any:
    """Return a plan for the current device; compile and load its kernels if needed."""
    cupy = import_cupy("x is on a GPU")
    from cupynorm import _plans

    # On torch's stream, so that nothing is loaded while that is captured into a graph.
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)):
        return getattr(_plans, make)(spec, *sizes, device.index, soon=True)


# Without the objects that torch.cuda makes of them. A build without CUDA has neither.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# ---- tensors as the kernels take them ------------------------------------------------------------


def check_dense(name: str, tensor: Any) -> None:
    """Check that a tensor is dense. This comes first: others may have no shape to ask for."""
    if type(tensor).__name__ == "ExpandedWeight":  # torch refuses all that is asked here of one
        raise NotImplementedError(
            f"{name} must not be an ExpandedWeight, such as call_for_per_sample_grads makes: use "
            "torch.func.vmap and torch.func.grad for the gradients of each example"
        )
    if tensor is not None and (tensor.is_nested or tensor.layout is not torch.strided):
        nested = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {nested}")


def check_tensor(name: str, tensor: Any, x: Any) -> None:
    """Check everything about a tensor except its shape, which may be symbolic."""
    check_dense(name, tensor)
    if tensor.dtype not in NUMPY_DTYPES:
        raise TypeError(
            f"{name}.dtype must be float64, float32, float16 or bfloat16, got {tensor.dtype}"
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device, {x.device}; got {tensor.device}")


def check_dtypes_told(table: Pass, named: dict[str, Any]) -> None:
    """Check that the dtypes that a pass is told are torch's."""
    for name in table.dtypes_asked.values():
        if not isinstance(named[name], torch.dtype | None):
            raise TypeError(f"{name} must be a torch.dtype or None, got {named[name]!r}")


def _outline(name: str, tensor: Any, x: Any) -> Any:
    """Return a NumPy array of a tensor's shape and dtype, for the checks: it holds one element."""
    if tensor is None:
        return None
    check_tensor(name, tensor, x)
    return np.broadcast_to(np.zeros((), NUMPY_DTYPES[tensor.dtype]), tensor.shape)


def without_memory(name: str, tensor: Any) -> int:
    """Return 0, the address of an empty tensor; refuse one that keeps its values elsewhere."""
    if tensor.numel():
        raise ValueError(
            f"{name} must have memory, got {tensor.numel()} elements at address 0: its storage was "
            "freed, as FSDP frees that of parameters between calls"
        )
    return 0


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


# ---- calls ---------------------------------------------------------------------------------------

# Names of this module, which a call looks up.
# It allocates on the current device, in half of the time of `torch.empty_strided`.
_empty: Any = torch._C._dynamo.guards._empty_strided_cuda
_uint8 = torch.uint8

# A view that negates its memory has no key: torch must see it. Contiguous tensors need no strides:
# these are the same, except those of axes of one element. Results of a forward pass are only asked
# whether they are still contiguous, since hooks may bring back other tensors.
TORCH = Dialect(
    names=globals(),
    accepts=dict.fromkeys(MOVED_BY_PACKS, "not {0}.is_neg()"),
    signature={
        Kind.ROWS: "({0}.shape, {0}.is_contiguous() or {0}.stride(), {0}.dtype, {0}.device)",
        Kind.VECTOR: "({0}.shape, {0}.is_contiguous(), {0}.dtype, {0}.device)",
        Kind.STATISTIC: "{0}.is_contiguous()",
        Kind.BITS: "{0}.is_contiguous()",
    },
    device="",
    before="if _current_device() != index: return serve(arrays)",
    copy="{0} = {0}.contiguous()",
    look="",
    elsewhere="",
    address='{0}.data_ptr() or without_memory("{0}", {0})',
    checked=MOVED_BY_PACKS,
    checked_new=frozenset(),  # torch allocates at multiples of more than an access
    misaligned="return serve_by(arrays, {divisors})",
    allocate="_empty({0}_shape, {0}_strides, {0}_dtype)",
    stream="_current_stream(index)",
    handle="stream",
    # Freed on return. Only later work on this stream gets it again.
    scratch="scratch = _empty(scratch_shape, (1,), _uint8); scratch_address = scratch.data_ptr()",
)

# The function that runs each call so far. The key is everything that preparing it depended on,
# except the addresses and the current device.
calls: dict[Hashable, Run] = {}

_forward_key = key_function(TORCH, {}, FORWARD.reads)
_backward_key = key_function(TORCH, {}, BACKWARD.reads)


def run(table: Pass, tensors: Tensors, told: Told) -> tuple[Any, ...]:
    """Return what a pass writes, each None where it does not apply.

    weight and bias are as `_vectors.alike` returns them, and what a forward pass made is as it was
    returned. dbias is wanted where its dtype is told, and so is a dresidual in addition
    to dx.
    """
    return find(table, tensors, told)(tensors)


def find(table: Pass, tensors: Tensors, told: Told, into: Tensors = ()) -> Run:
    """Return what runs a pass on tensors like these, as `run` does.

    That takes these tensors and then, if there are any, those to write into, None where that does
    not apply. The latter are not checked, and must be contiguous; a scale is only read. A quantized
    pass that no kernel serves gives None.
    """
    try:
        key = (_backward_key if table is BACKWARD else _forward_key)(told, tensors)
        if into:
            key = key and (key, *[tensor is None for tensor in into])
        call = calls.get(key)
    except (TypeError, RuntimeError):  # unhashable or sparse: not accepted
        _check(table, tensors, told)
        raise
    if call is None:
        call = _prepare(key, *_check(table, tensors, told), tensors, into)
    return call


def _check(table: Pass, tensors: Tensors, told: Told) -> tuple[Spec, Options]:
    """Check a call; return what it computes, and how it is called."""
    if table is QUANTIZED:  # told as a forward pass, and then how y is quantized
        of_y, options = _check(FORWARD, tensors, told[:-1])
        x = by_name(table, tensors)["x"]
        n = math.prod(x.shape[x.ndim - options.k :])
        return pass_of_kernel(cast("ForwardSpec", of_y), options, told[-1], n)
    given, named = by_name(table, tensors), told_by_name(table, told)
    x = given["x"]
    if not (x.is_cuda or x.is_cpu):
        raise NotImplementedError(f"x must be on the CPU or a CUDA GPU, got {x.device}")
    if table is FORWARD:
        check_dtypes_told(table, named)
        k = named.pop("k")
        asked = _checks.Asked(**named, axis=tuple(range(-k, 0)))
        outlines = {name: _outline(name, tensor, x) for name, tensor in given.items()}
        spec, options = _checks.check_forward(outlines, asked)
        of_weight, of_bias = _shape(given["weight"]), _shape(given["bias"])
        check_alike(x.shape, k, weight=of_weight, bias=of_bias)
        of_dbias = x.shape[x.ndim - k :] if of_weight is None else of_weight
        if of_bias not in (None, of_dbias):
            shapes = tuple(of_dbias), tuple(of_bias)
            raise NotImplementedError(
                f"bias must have shape {shapes[0]}, as its gradient will; got {shapes[1]}"
            )
        return spec, options
    for name in ("x", "dy", "dresidual_out", "weight"):
        if given[name] is None:
            continue
        check_tensor(name, given[name], x)
        if KINDS[name] is Kind.ROWS and given[name].shape != x.shape:
            shapes = tuple(x.shape), tuple(given[name].shape)
            raise ValueError(f"{name} must have shape {shapes[0]}, got {shapes[1]}")
    of_weight = _shape(given["weight"])  # and of dbias
    check_alike(x.shape, named["k"], weight=of_weight)
    groups = groups_of(x.shape, named["k"], of_weight, of_weight)
    return spec_of(table, tensors, told, groups), options_of(table, told, groups)


def _shape(tensor: Any) -> Any:
    return None if tensor is None else tensor.shape


def _prepare(key: Hashable, spec: Spec, options: Options, tensors: Tensors, into: Tensors) -> Run:
    """Return and remember a function that runs a pass on tensors like these."""
    if key is None:
        raise RuntimeError("what negates its memory is for torch to see")
    if _has_kernels(by_name(spec.table, tensors)["x"]):
        return remember(calls, key, Call(key, spec, options, tensors, into))
    return remember(calls, key, functools.partial(_on_cpu, spec, options))


class Call:
    """A pass on a GPU, without its addresses.

    It prepares a `run` for each number of elements that one access may move: the largest power of
    two that divides the pack, the row, the strides and the addresses of inputs. The `run` of the
    most elements is remembered in place of this, unless its kernel stands in. It comes back here
    with less aligned tensors, or where another device is current.
    """

    def __init__(
        self, key: Hashable, spec: Spec, options: Options, tensors: Tensors, into: Tensors
    ) -> None:
        table = spec.table
        given = by_name(table, tensors) | dict(zip(table.writes, into, strict=False))
        x, k = given["x"], options.k
        self.key, self.spec, self.device = key, spec, x.device
        self.n = math.prod(x.shape[x.ndim - k :])
        self.m = x.numel() // self.n
        self.numbers = () if table is BACKWARD else options.numbers
        self.groups = options.groups
        self.known: dict[str, Any] = {"serve": self, "serve_by": self._serve_by}
        self.known["index"] = self.device.index
        # The arrays that accesses of several elements are made to: place, name and itemsize.
        self.wide: list[tuple[int, str, int]] = []
        self.copied: tuple[str, ...] = ()
        self.divisors = self.n | pack_length(spec.x)  # their lowest bit divides all but addresses
        self.runs: dict[int, Run] = {}
        self.arguments = tuple(given)
        self.given = tuple(name for name, tensor in given.items() if tensor is not None)
        self._look(given, k)
        self._allocate(given, k)

    def _look(self, given: dict[str, Any], k: int) -> None:
        """Note the layout of the arrays that are given."""
        for i, (name, tensor) in enumerate(given.items()):
            self.known |= {f"{name}_stride": self.n, f"{name}_mask": 0, f"{name}_itemsize": 1}
            if tensor is None:
                continue
            if not tensor.is_contiguous():
                stride = None
                if KINDS[name] is Kind.ROWS:
                    stride = row_stride(tensor.shape, tensor.stride(), 1, k)
                if stride is None:
                    self.copied += (name,)
                    continue
                self.known[f"{name}_stride"] = stride
                self.divisors |= stride
            if KINDS[name] in TORCH.checked:
                self.wide.append((i, name, tensor.itemsize))
                self.known[f"{name}_itemsize"] = tensor.itemsize

    def _allocate(self, given: dict[str, Any], k: int) -> None:
        """Note what is allocated."""
        for name, shape in shapes_of_results(self.spec, k, given).items():
            if name in self.given:
                continue
            self.known[f"{name}_dtype"] = getattr(torch, self.spec.dtypes[name] or "")
            self.known[f"{name}_shape"] = shape
            self.known[f"{name}_strides"] = _contiguous_strides(shape)
            self.known[f"{name}_stride"] = self.n
        if isinstance(self.spec, QuantizedSpec) and self.spec.column_major:
            self.known["scale_strides"] = strides_by_column(self.known["scale_shape"])

    def __call__(self, tensors: Tensors) -> Any:
        if _current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(tensors)
        divisors = 0
        for i, name, itemsize in self.wide:
            address = tensors[i].data_ptr() or without_memory(name, tensors[i])
            divisors |= address // itemsize
        return self._serve_by(tensors, divisors)

    def _serve_by(self, tensors: Tensors, divisors: int) -> Any:
        """Prepare a run with the accesses that these divisors allow."""
        divisors |= self.divisors
        vector = divisors & -divisors
        run = self.runs.get(vector)
        if run is None:
            name = f"{self.spec.table.name}_plan"
            plan = _load(name, self.device, self.spec, self.m, self.n, vector)
            if plan is None:  # of a quantized pass
                run = self.runs[vector] = _serve_nothing
                return run(tensors)
            run = self._prepared(plan, vector)
            if not plan.stands_in:
                self.runs[vector] = run
                if vector == self.divisors & -self.divisors:
                    remember(calls, self.key, run)
        return run(tensors)

    def _prepared(self, plan: Any, vector: int) -> Run:
        spec, table = self.spec, self.spec.table
        of_groups = (self.groups,) if table is BACKWARD else ()
        scratch_bytes = plan.scratch_bytes(self.m, *of_groups)
        known = self.known | {"launch": plan.prepared(self.m, *self.numbers, self.groups)}
        known["scratch_shape"] = (scratch_bytes,)
        if vector == self.divisors & -self.divisors:
            known |= {f"{name}_mask": vector * itemsize - 1 for _, name, itemsize in self.wide}
        make = run_maker(
            *(TORCH, table, self.arguments, self.given, spec.writes, "({fields})"),
            has_scratch=scratch_bytes > 0,
            copied=self.copied,
        )
        return make(known)


def _serve_nothing(tensors: Tensors) -> None:
    """Say that no kernel serves a call."""


# ---- on the CPU ----------------------------------------------------------------------------------


def _to_numpy(name: str, tensor: Any) -> Any:
    """Return a tensor as a contiguous array, in the same memory if it is contiguous there.

    By DLPack, since FSDP cannot resize memory that `Tensor.numpy` has given away.
    """
    if tensor is None:
        return None
    check_dense(name, tensor)  # one of MKLDNN's layout finds the remembered call of a dense one
    if not tensor.data_ptr():  # fails, too, where a launch would
        without_memory(name, tensor)
    plain = tensor.detach().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # NumPy's side of DLPack lacks it
        return np.from_dlpack(plain.view(torch.int16)).view(BFLOAT16)
    return np.from_dlpack(plain)


def _from_numpy(array: Any) -> Any:
    if array is None:
        return None
    if array.dtype == BFLOAT16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if array.size else tensor.new_empty(array.shape)  # its strides are no zeros


def _on_cpu(spec: Spec, options: Options, tensors: Tensors) -> tuple[Any, ...]:
    reads, into = tensors[: len(spec.table.reads)], tensors[len(spec.table.reads) :]
    arrays = {name: _to_numpy(name, t) for name, t in by_name(spec.table, reads).items()}
    written = reference.compute(spec, options, arrays)
    results = tuple(_from_numpy(written[name]) for name in spec.table.writes)
    for place, result in zip(into, results, strict=False):
        if place is not None:
            place.copy_(result)
    return results
