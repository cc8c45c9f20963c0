"""The passes as operations that torch differentiates, batches, traces, compiles and shards.

A call on plain tensors goes straight to the kernels, through an autograd.Function if gradients are
recorded. torch.library's wrapping of an operation costs more than the launch. Sometimes torch must
see the call: under torch.compile and export, in a dispatch mode, or with a subclass such as
DTensor. Then it is an operation of torch.library, with the same formulas.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from cupynorm import _checks
from cupynorm._arrays import to_numpy
from cupynorm._operation import (
    ALWAYS_READ,
    BACKWARD,
    FORWARD,
    KINDS,
    Kind,
    Pass,
    compute_dtype,
    shapes_of_results,
)
from cupynorm._prepared import remember
from cupynorm.torch import _formulas, _inductor, _kernels
from cupynorm.torch._kernels import (
    OPTIONS,
    SHARED,
    Tensors,
    Told,
    by_name,
    check_dtypes_told,
    check_tensor,
    compute_type,
    compute_type_of_total,
    options_of,
    spec_of,
    told_by_name,
)
from cupynorm.torch._vectors import alike

__all__ = [
    "OPERATIONS",
    "PLAIN",
    "check_distributed",
    "is_distributed",
    "is_seen",
    "norm_backward",
    "norm_forward",
    "normalize",
    "normalize_plain",
]

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
# The last option of a forward pass. Adding one tuple to another takes the least time.
INFERRING, TRAINING = (False,), (True,)


def _split(table: Pass, arguments: tuple[Any, ...]) -> tuple[Tensors, Told]:
    """Return what an operation was given: tensors, and what it is told."""
    count = len(table.reads)
    return arguments[:count], arguments[count:]


# ---- which way a call goes -----------------------------------------------------------------------


# Names of this module: each look-up in torch's takes a tenth of a microsecond.
_is_grad_enabled = torch.is_grad_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # elsewhere a dispatch mode tells
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing
_transforms_active = torch._C._are_functorch_transforms_active
_functorch = torch._C._functorch
_is_wrapped = _functorch.is_functorch_wrapped_tensor
# This alone marks the gradients that autograd batches for is_grads_batched=True.
_is_batched = _functorch.is_legacy_batchedtensor


def is_seen(*tensors: Any) -> bool:
    """Tell whether torch must see a call on these tensors. Transforms are asked elsewhere."""
    return bool(_dispatch_modes() or _is_jit_tracing() or any(map(_says_more, tensors)))


def _says_more(tensor: Any) -> bool:
    """Tell whether torch knows more about a tensor than the numbers in its memory."""
    if type(tensor) not in PLAIN:
        return True
    return tensor is not None and bool(
        not (tensor.is_cuda or tensor.is_cpu)
        or tensor.is_neg()  # such as the imaginary part of a conjugate: the sign in memory differs
        or tensor._is_zerotensor()  # has no memory
        or _is_wrapped(tensor)  # has none of its own
        or _is_batched(tensor)
    )


def _alive(name: str, tensor: Any) -> Any:
    """Return the tensor behind one that has outlived its transform, as torch does."""
    if tensor is None or not _is_wrapped(tensor):
        return tensor
    while _functorch.is_dead_tensor_wrapper(tensor):
        tensor = _functorch.unwrap_if_dead(tensor)
    if _functorch.is_batchedtensor(tensor) and not _transforms_active():
        raise ValueError(f"{name} must not outlive the torch.func.vmap of which it is one example")
    return tensor


def _is_in_forward_mode() -> bool:
    return bool(forward_ad._current_level >= 0)


def _has_tangents(tensors: Tensors) -> bool:
    """Tell whether a tensor has a tangent. Calls that autograd batches do not count."""
    if not _is_in_forward_mode() or any(t is not None and _is_batched(t) for t in tensors):
        return False
    return any(map(_has_tangent, tensors))


def _has_tangent(argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    return forward_ad.unpack_dual(argument).tangent is not None


def _is_asked_for_gradients(tensors: Tensors) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _is_recorded(tensors: Tensors) -> bool:
    """Tell whether derivatives of a call on these tensors may be asked for."""
    if _is_in_forward_mode():
        return True
    if not torch.is_grad_enabled():
        return False
    if _is_asked_for_gradients(tensors):
        return True
    # Within a transform, only its own tensors record gradients.
    return torch.compiler.is_compiling() or _transforms_active()


def normalize_plain(tensors: Tensors, told: Told) -> Any:
    """Do as `normalize`, on tensors of the `PLAIN` types."""
    if (
        _is_traced_by_dynamo()
        or _transforms_active()
        or _dispatch_modes()
        or _is_jit_tracing()
        or forward_ad._current_level >= 0
    ):
        return normalize(tensors, told)
    try:
        if _is_grad_enabled() and _is_asked_for_gradients(tensors):
            return _apply_recorded(*tensors, told)
        results = _kernels.find(FORWARD, tensors, told + INFERRING)(tensors)
        return results[_Y] if tensors[_RESIDUAL] is None else (results[_Y], results[_TOTAL])
    except (RuntimeError, ValueError):  # the tensor has no memory here; a check first takes time
        if not is_seen(*tensors):
            raise
    return normalize(tensors, told)


def normalize(tensors: Tensors, told: Told) -> Any:
    """Return y, and with a residual x + residual.

    `told` lacks whether what `norm_backward` needs is kept: where gradients may be asked for.
    """
    if not torch.compiler.is_compiling():
        tensors = tuple(map(_alive, FORWARD.reads, tensors))
    results = norm_forward(tensors, told + (TRAINING if _is_recorded(tensors) else INFERRING))
    return results[_Y] if tensors[_RESIDUAL] is None else (results[_Y], results[_TOTAL])


def norm_forward(tensors: Tensors, told: Told) -> tuple[Any, ...]:
    """Return y, for training what `norm_backward` needs, and x + residual.

    An array that does not apply is None, or empty if the call was an operation of torch.library.
    """
    arguments: Any = (*tensors, *told)
    if torch.compiler.is_compiling():
        _share_out()
        return _forward_operation(*arguments)
    if _transforms_active():
        _check_forward_mode_is_alone()
        return _Forward.apply(*arguments)
    if _has_tangents(tensors):
        return _apply_forward(*arguments)
    if is_seen(*tensors):
        _share_out()
        try:
            if not _goes_to_dtensor(tensors):
                return _forward_operation(*arguments)
            *_, training = told
            return _apply_forward(*arguments) if training else _below_autograd(FORWARD, *arguments)
        except RuntimeError:  # DTensor raises it for our errors, and torch for a wrong option
            _check_outline(tensors, told)
            check_distributed(by_name(FORWARD, tensors))
            raise
    *_, training = told
    if training or _is_in_forward_mode():
        return _apply_forward(*arguments)
    return _kernels.run(FORWARD, tensors, told)


def norm_backward(tensors: Tensors, told: Told) -> tuple[Any, ...]:
    """Return dx, dweight, dbias and dresidual, each None where it does not apply."""
    if torch.compiler.is_compiling():
        run = _backward_seen
    elif _transforms_active():
        _check_forward_mode_is_alone()
        run = _Backward.apply
    elif _has_tangents(tensors):
        run = _apply_backward
    elif not PLAIN.issuperset(map(type, tensors)) or _dispatch_modes() or _is_jit_tracing():
        run = _backward_seen
        if _goes_to_dtensor(tensors):
            run = _apply_backward if torch.is_grad_enabled() else _backward_below_autograd
    else:
        if not (torch.is_grad_enabled() or _is_in_forward_mode()):
            try:
                return _kernels.run(BACKWARD, tensors, told)
            except (RuntimeError, ValueError):  # as in normalize_plain
                if not is_seen(*tensors):
                    raise
        tensors = tuple(map(_alive, BACKWARD.reads, tensors))
        batched = any(tensor is not None and _is_batched(tensor) for tensor in tensors)
        run = _backward_seen if batched else _apply_backward
    return run(*tensors, *told)


def _backward_seen(*arguments: Any) -> tuple[Any, ...]:
    return _none_for_absent(
        _backward_operation(*arguments), _present(BACKWARD, *_split(BACKWARD, arguments))
    )


def _goes_to_dtensor(tensors: Tensors) -> bool:
    """Tell whether a call is DTensor's alone: other subclasses may change or unwrap it."""
    return is_distributed(tensors[0]) and not (_dispatch_modes() or _is_jit_tracing())


def _below_autograd(table: Pass, *arguments: Any) -> tuple[Any, ...]:
    """Return an operation's results where nothing records gradients, or a Function does.

    DTensor then gets the call at once. torch's autograd of operations takes as long again.
    """
    with torch._C._AutoDispatchBelowAutograd():
        results = OPERATIONS[table](*arguments)
    return _none_for_absent(results, _present(table, *_split(table, arguments)))


_backward_below_autograd = functools.partial(_below_autograd, BACKWARD)


_presences: dict[Any, tuple[bool, ...]] = {}


def _present(table: Pass, tensors: Tensors, told: Told) -> tuple[bool, ...]:
    """Tell which results there are, by the norm, the last option and which inputs are None."""
    _, norm, *_, last = told
    key = table, norm, last, *map(type, tensors), *map(type, told)
    found = _presences.get(key)
    if found is None:
        dtypes = spec_of(table, tensors, told).dtypes
        found = tuple(dtypes[name] is not None for name in table.writes)
        remember(_presences, key, found)
    return found


def _none_for_absent(results: Any, present: tuple[bool, ...]) -> tuple[Any, ...]:
    return tuple([t if there else None for t, there in zip(results, present, strict=True)])


# ---- derivatives ---------------------------------------------------------------------------------


def _getter(names: tuple[str, ...], wanted: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that picks elements of a tuple by name."""
    return operator.itemgetter(*map(names.index, wanted))


_X, _RESIDUAL, _BIAS = map(FORWARD.reads.index, ("x", "residual", "bias"))
_Y, _TOTAL = map(FORWARD.writes.index, ("y", "residual_out"))

# A call keeps all that its backward pass reads, except the gradients. That pass's x is the
# normalized array: the sum, if there was a residual.
_GIVEN = ("dy", "dresidual_out")
_KEPT = tuple(name for name in BACKWARD.reads if name not in _GIVEN)
_OF_SUM = tuple("residual_out" if name == "x" else name for name in _KEPT)
_kept = _getter(FORWARD.reads + FORWARD.writes, _KEPT)
_kept_of_sum = _getter(FORWARD.reads + FORWARD.writes, _OF_SUM)
_in_order = _getter(_GIVEN + _KEPT, BACKWARD.reads)

# The gradients of the arrays that a forward pass reads. dresidual is dx if both have one dtype.
_OF_READS = tuple(f"d{name}" for name in FORWARD.reads)
_gradients = _getter(BACKWARD.writes, _OF_READS)
_gradients_of_one_dtype = _getter(
    BACKWARD.writes, tuple("dx" if name == "dresidual" else name for name in _OF_READS)
)
_NO_GRADIENTS = (None,) * len(FORWARD.reads)

# The arrays of the first backward pass that a second one reads.
_READ_AGAIN = ("dy", "x", "weight", "bitmask")
_read_again = _getter(BACKWARD.reads, _READ_AGAIN)


def _keep(ctx: Any, tensors: Tensors, told: Told, results: Tensors) -> None:
    """Keep what `_differentiate` needs."""
    ctx.set_materialize_grads(False)
    residual, bias = tensors[_RESIDUAL], tensors[_BIAS]
    bias_dtype = None if bias is None else bias.dtype
    if residual is None:
        ctx.noted = told[: len(SHARED)], bias_dtype, None, False
        ctx.save_for_backward(*_kept(tensors + results))
    else:
        of_rows = tensors[_X].dtype, residual.dtype, results[_TOTAL].dtype
        is_apart = all(ctx.needs_input_grad[i] and _is_of_leaf(tensors[i]) for i in (_X, _RESIDUAL))
        ctx.noted = told[: len(SHARED)], bias_dtype, of_rows, is_apart
        ctx.save_for_backward(*_kept_of_sum(tensors + results))


def _is_of_leaf(tensor: Any) -> bool:
    """Tell whether a tensor is a view of a leaf, which its gradient reaches as a view, too.

    A leaf keeps a gradient to which nobody else refers, and adds others to it in place. Two that
    get views of one gradient would both keep its memory, as they do after torch's own addition.
    """
    return tensor._base is not None and tensor._base.is_leaf


def _differentiate(ctx: Any, dy: Any, ds: Any) -> tuple[Any, ...]:
    """Return the gradients of a forward pass's inputs, given those of y and x + residual."""
    told, bias_dtype, of_rows, is_apart = ctx.noted
    gradients, dx_dtype, dresidual_dtype = _gradients, None, None
    if of_rows is not None:
        of_x, of_residual, of_total = of_rows
        if not (ctx.needs_input_grad[_X] and ctx.needs_input_grad[_RESIDUAL]):
            of_x = of_residual = of_x if ctx.needs_input_grad[_X] else of_residual  # one is enough
        dx_dtype = None if of_x == of_total else of_x
        if of_residual != of_x:
            dresidual_dtype = of_residual
        else:
            gradients = _gradients_apart if is_apart else _gradients_of_one_dtype
    if dy is not None:
        if bias_dtype is not None and not ctx.needs_input_grad[_BIAS]:
            bias_dtype = None
        tensors = _in_order((dy, ds, *ctx.saved_tensors))
        return gradients(norm_backward(tensors, (*told, dx_dtype, dresidual_dtype, bias_dtype)))
    if ds is None:
        return _NO_GRADIENTS
    found = dict.fromkeys(BACKWARD.writes) | {"dx": _formulas.round_once(ds, of_x)}
    if dresidual_dtype is not None:
        found["dresidual"] = _formulas.round_once(ds, of_residual)
    return gradients(tuple(found.values()))


def _gradients_apart(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Do as `_gradients_of_one_dtype`, with a copy for the residual."""
    gradients = _gradients_of_one_dtype(found)
    return tuple([t.clone() if i == _RESIDUAL else t for i, t in enumerate(gradients)])


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, told = _split(FORWARD, inputs)
    *_, ctx.training = told
    results = _none_for_absent(output, _present(FORWARD, tensors, told))
    ctx.mark_non_differentiable(*_without_gradients(ctx, output, results))
    _keep(ctx, tensors, told, results)


def _without_gradients(ctx: Any, output: Any, results: Tensors) -> Iterator[Any]:
    """Return the results that have no gradient."""
    for name, tensor, result in zip(FORWARD.writes, output, results, strict=True):
        if tensor is None:
            continue
        if result is None or KINDS[name] is not Kind.ROWS:
            yield tensor
        elif name == "residual_out" and not (_has_gradients(ctx) or _is_in_forward_mode()):
            yield tensor


def _has_gradients(ctx: Any) -> bool:
    """Tell whether x + residual has gradients, as it has in torch."""
    return bool(ctx.needs_input_grad[_X] or ctx.needs_input_grad[_RESIDUAL])


def _differentiate_forward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    dy, ds = gradients[_Y], gradients[_TOTAL]
    if dy is not None and not ctx.training:
        raise RuntimeError("norm_forward was called with training=False: nothing was kept for it")
    return _padded(ctx, _differentiate(ctx, dy, ds))


def _padded(ctx: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return gradients of the first arguments, and None for each of the others."""
    return (*gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients)))


def _keep_for_second_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.told = _split(BACKWARD, inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*_read_again(tensors))
    ctx.present = _present(BACKWARD, tensors, ctx.told)
    total = by_name(BACKWARD, tensors)["dresidual_out"]
    ctx.of_total = None if total is None else total.dtype


def _differentiate_backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    given = dict(zip(BACKWARD.writes, _none_for_absent(gradients, ctx.present), strict=True))
    read = dict(zip(_READ_AGAIN, ctx.saved_tensors, strict=True))
    found = _formulas.gradients_of_backward(given, read, options_of(BACKWARD, ctx.told))
    total = found.pop("dresidual_out")
    if ctx.of_total is not None and total is not None:
        found["dresidual_out"] = _formulas.round_once(total, ctx.of_total)
    return _padded(ctx, tuple(map(found.get, BACKWARD.reads)))


# ---- forward mode --------------------------------------------------------------------------------


def _keep_for_both_modes(ctx: Any, inputs: Any, output: Any) -> None:
    _keep_for_backward(ctx, inputs, output)
    if _is_in_forward_mode():
        tensors, ctx.told = _split(FORWARD, inputs)
        results = _none_for_absent(output, _present(FORWARD, tensors, ctx.told))
        of_residual = tensors[_RESIDUAL] is not None
        ctx.save_for_forward(*(_kept_of_sum if of_residual else _kept)(tensors + results))
        ctx.dtypes = _dtypes_of_tangents(FORWARD, results)


def _keep_for_second_derivatives(ctx: Any, inputs: Any, output: Any) -> None:
    _keep_for_second_backward(ctx, inputs, output)
    if _is_in_forward_mode():
        tensors, _ = _split(BACKWARD, inputs)
        ctx.save_for_forward(*_read_again(tensors))
        ctx.dtypes = _dtypes_of_tangents(BACKWARD, _none_for_absent(output, ctx.present))


def _dtypes_of_tangents(table: Pass, results: Tensors) -> dict[str, torch.dtype]:
    """Return the dtypes of the results that have a tangent."""
    return {
        name: tensor.dtype
        for name, tensor in zip(table.writes, results, strict=True)
        if tensor is not None and KINDS[name] in (Kind.ROWS, Kind.VECTOR)
    }


def _check_forward_mode_is_alone() -> None:
    """Refuse a forward mode within another: an autograd.Function would give 0 for the two."""
    stack = _functorch.get_interpreter_stack()
    if [interpreter.key() for interpreter in stack].count(_functorch.TransformType.Jvp) > 1:
        raise NotImplementedError(
            "torch has no forward mode of the forward mode of an autograd.Function, such as the "
            "norms of cupynorm.torch: use jacfwd(jacrev(f)) for jacfwd(jacfwd(f))"
        )


def _push_forward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    """Return the tangents of a forward pass's results."""
    read = dict(zip(_KEPT, ctx.saved_tensors, strict=True))
    given = dict(zip(FORWARD.reads, tangents, strict=False))
    found = _formulas.tangents_of_forward(given, read, options_of(FORWARD, ctx.told))
    return _rounded(ctx, FORWARD, found)


def _push_backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
    """Return the tangents of a backward pass's results."""
    read = dict(zip(_READ_AGAIN, ctx.saved_tensors, strict=True))
    given = dict(zip(BACKWARD.reads, tangents, strict=False))
    found = _formulas.tangents_of_backward(given, read, options_of(BACKWARD, ctx.told))
    return _rounded(ctx, BACKWARD, found)


def _rounded(ctx: Any, table: Pass, tangents: dict[str, Any]) -> tuple[Any, ...]:
    """Return tangents of the results that a pass wrote, in their dtypes."""
    return tuple(
        _formulas.round_once(tangents[name], ctx.dtypes[name]) if name in ctx.dtypes else None
        for name in table.writes
    )


# ---- a batch of calls at once --------------------------------------------------------------------


def _forward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap: one call, in which each example is a group of rows."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        tensors, told = _split(FORWARD, arguments)
        read = _batched(FORWARD, tensors, in_dims, info.batch_size)
        x, residual, weight, bias = read.values()
        named = told_by_name(FORWARD, told)
        compute = compute_type_of_total(x, residual, named["residual_dtype"])
        read["weight"], read["bias"] = alike(x, named["k"], weight, bias, compute)
        present = _present(FORWARD, tensors, told)
        return run(*read.values(), *told), _none_for_absent((0,) * len(present), present)

    return rule


def _batched(table: Pass, tensors: Tensors, dims: Any, size: int) -> dict[str, Any]:
    """Return what a pass reads by name, with an axis of examples first. Vectors may be shared."""
    x = table.reads.index("x")
    ndim = len(_shape_of_example(tensors[x], dims[x]))

    def batched(name: str, tensor: Any, dim: int | None) -> Any:
        if tensor is None:
            return None
        if KINDS[name] is not Kind.VECTOR:
            return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return tensor if dim is None else _for_each(tensor.movedim(dim, 0), ndim)

    named = zip(table.reads, tensors, dims[: len(tensors)], strict=True)
    return {name: batched(name, tensor, dim) for name, tensor, dim in named}


def _shape_of_example(tensor: Any, dim: int | None) -> tuple[Any, ...]:
    return tuple(size for i, size in enumerate(tensor.shape) if i != dim)


def _for_each(vectors: Any, ndim: int) -> Any:
    """Return a vector for each example, as they broadcast over examples of so many axes."""
    size, *shape = vectors.shape
    return vectors.reshape(size, *(1,) * (ndim - len(shape)), *shape)


def _backward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap: one call, in which each example has a weight of its own."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        tensors, told = _split(BACKWARD, arguments)
        named, size = told_by_name(BACKWARD, told), info.batch_size
        read = _batched(BACKWARD, tensors, in_dims, size)
        x, weight, bias_dtype, k = read["x"], read["weight"], named["bias_dtype"], named["k"]
        dtypes = {"dweight": None if weight is None else weight.dtype, "dbias": bias_dtype}
        i, vectors, shape = BACKWARD.reads.index("weight"), weight, x.shape[x.ndim - k :]
        compute = compute_type(x.dtype)
        if weight is not None:
            shape = _shape_of_example(tensors[i], in_dims[i])
        elif bias_dtype is not None:  # ones give dbias its shape
            vectors = x.new_ones(shape, dtype=compute)
        if vectors is not None:
            if in_dims[i] is None:
                vectors = _for_each(vectors.expand(size, *shape), x.ndim - 1)
            read["weight"], _ = alike(x, k, vectors, None, compute)
            if bias_dtype is not None and read["weight"].shape != vectors.shape:
                named["bias_dtype"] = compute  # for the sum below
        found = dict(zip(BACKWARD.writes, run(*read.values(), *named.values()), strict=True))
        for name, dtype in dtypes.items():
            if dtype is not None:
                sums = found[name].sum_to_size(vectors.shape).reshape(size, *shape)
                found[name] = _formulas.round_once(sums, dtype)
        present = _present(BACKWARD, tensors, told)
        return _none_for_absent(found.values(), present), _none_for_absent(
            (0,) * len(present), present
        )

    return rule


# ---- as functions of autograd --------------------------------------------------------------------


class _Forward(torch.autograd.Function):
    # Below the transforms there may be a tracer's tensor, or a subclass.
    @staticmethod
    def forward(*arguments: Any) -> Any:
        tensors, told = _split(FORWARD, arguments)
        if is_seen(*tensors):
            _share_out()
            return _below_autograd(FORWARD, *arguments)
        return _kernels.run(FORWARD, tensors, told)

    setup_context = staticmethod(_keep_for_both_modes)
    backward = staticmethod(_differentiate_forward)
    vmap = staticmethod(_forward_of_batch(lambda *a: norm_forward(*_split(FORWARD, a))))
    jvp = staticmethod(_push_forward)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        tensors, told = _split(BACKWARD, arguments)
        if is_seen(*tensors):
            return _backward_below_autograd(*arguments)
        return _kernels.run(BACKWARD, tensors, told)

    setup_context = staticmethod(_keep_for_second_derivatives)
    backward = staticmethod(_differentiate_backward)
    vmap = staticmethod(_backward_of_batch(lambda *a: norm_backward(*_split(BACKWARD, a))))
    jvp = staticmethod(_push_backward)


class _Recorded(torch.autograd.Function):
    """`_Forward` without transforms: kept arrays are not results, and options are one argument."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        tensors, told = arguments[:-1], arguments[-1]
        results = _kernels.run(FORWARD, tensors, told + TRAINING)
        _keep(ctx, tensors, told, results)
        y, total = results[_Y], results[_TOTAL]
        if total is None:
            return y
        if not _has_gradients(ctx):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Any, ds: Any = None) -> Any:
        return *_differentiate(ctx, dy, ds), None


# This skips what Function.apply does for transforms of functions, which costs 13 us.
_apply_recorded = super(torch.autograd.Function, _Recorded).apply
_apply_forward = super(torch.autograd.Function, _Forward).apply
_apply_backward = super(torch.autograd.Function, _Backward).apply


# ---- as operations of torch.library --------------------------------------------------------------


def _empty_for_none(like: torch.Tensor, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return tensors that an operation may return: it has no optional results."""
    return tuple([like.new_empty(0) if t is None else t for t in tensors])


def _run(table: Pass, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, told = _split(table, arguments)
    results = _kernels.run(table, tensors, _kernels.from_schema(table, told))
    return _empty_for_none(tensors[table.reads.index("x")], results)


def _check_shape(name: str, tensor: Any, wanted: Any) -> None:
    def message() -> str:
        return f"{name} must have shape {tuple(wanted)}, got {tuple(tensor.shape)}"

    torch._check_value(tensor.ndim == len(wanted), message)
    for size, expected in zip(tensor.shape, wanted, strict=True):
        torch._check_value(size == expected, message)  # when the program runs, if not known before


def _check_vector(name: str, tensor: Any, x: Any, k: int) -> None:
    axes = tuple(range(x.ndim - k, x.ndim))

    def message() -> str:
        return _checks.must_broadcast(name, tuple(tensor.shape), tuple(x.shape), axes)

    torch._check_value(tensor.ndim <= x.ndim, message)
    for size, of_x in zip(reversed(tensor.shape), reversed(x.shape), strict=False):
        if not (isinstance(size, int) and size == 1):
            torch._check_value(size == of_x, message)


def _check_outline(tensors: Tensors, told: Told) -> None:
    """Check what the kernels will ask for, when a program is traced: shapes may be symbolic."""
    options, named = options_of(FORWARD, told), told_by_name(FORWARD, told)
    check_dtypes_told(FORWARD, named)
    given = {n: t for n, t in by_name(FORWARD, tensors).items() if t is not None}
    x = given["x"]
    for name, tensor in given.items():
        check_tensor(name, tensor, x)
        if KINDS[name] is Kind.VECTOR:
            _check_vector(name, tensor, x, options.k)
        elif name == "residual":
            _check_shape(name, tensor, x.shape)
    if any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in options.axis):
        raise ValueError(
            f"x must have at least one element in each row, got shape {tuple(x.shape)}"
        )
    spec = spec_of(FORWARD, tensors, told)
    total = named["residual_dtype"]
    if total is not None and "residual" not in given:
        raise ValueError(f"residual_dtype must be None without a residual, got {total}")
    _checks.check_zero_centered(options.zero_centered, has_weight="weight" in given)
    relu = None if options.relu is None else tuple(options.relu)
    _checks.check_numbers(to_numpy(compute_dtype(spec.x)), options.eps, relu)


def is_distributed(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor. There are none before their module is imported."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def check_distributed(tensors: Mapping[str, Any]) -> None:
    """Check that all tensors are DTensors if x is one, and none otherwise."""
    x = tensors["x"]
    kind = "DTensor" if is_distributed(x) else "plain tensor"
    for name, tensor in tensors.items():
        if tensor is not None and is_distributed(tensor) != is_distributed(x):
            raise TypeError(f"{name} must be a {kind}, as x is; got a {type(tensor).__name__}")


def _outline(table: Pass, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return tensors of the shapes and dtypes of a pass's results."""
    _inductor.lower(OPERATIONS)
    tensors, told = _split(table, arguments)
    if table is FORWARD:
        _check_outline(tensors, told)
    given, (k, *_), spec = by_name(table, tensors), told, spec_of(table, tensors, told)
    results = {
        name: given["x"].new_empty(shape, dtype=getattr(torch, spec.dtypes[name] or ""))
        for name, shape in shapes_of_results(spec, k, given).items()
    }
    return _empty_for_none(given["x"], tuple(map(results.get, table.writes)))


def _schema(table: Pass) -> str:
    reads = (f"Tensor{'' if name in ALWAYS_READ else '?'} {name}" for name in table.reads)
    options = (f"{kind} {name}" for name, kind in OPTIONS[table].items())
    writes = (f"Tensor {name}" for name in table.writes)
    return f"({', '.join((*reads, *options))}) -> ({', '.join(writes)})"


# torch.library.impl does not hand on the keys.
_library = torch.library.Library("cupynorm", "FRAGMENT")
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _define(
    table: Pass,
    setup_context: Callable[..., Any],
    backward: Callable[..., Any],
    of_batch: Callable[..., Any],
) -> Any:
    name, run = f"norm_{table.name}", functools.partial(_run, table)
    _library.define(name + _schema(table), tags=_TAGS)
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"cupynorm::{name}", functools.partial(_outline, table))
    operation = getattr(torch.ops.cupynorm, name).default
    recorded = make_autograd_impl(operation, Info(backward, setup_context))

    def dispatched(keys: Any, *arguments: Any) -> Any:
        """Do as torch.library.register_autograd, but skip autograd if nothing records gradients.

        A compiled program comes here in each call, and has its own gradients.
        """
        if _is_in_forward_mode() and any(map(_has_tangent, arguments)):
            raise NotImplementedError(
                "a compiled or exported norm of cupynorm.torch has no jvp: take that of the "
                "function which was compiled or exported"
            )
        asked = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        following = (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
        if asked or following not in _DEVICES:
            return recorded(keys, *arguments)
        return run(*arguments)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"cupynorm::{name}", _without_none(of_batch(operation)))
    return operation


def _without_none(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap of an operation, which has no optional results."""

    def of_operation(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        results, dims = rule(info, in_dims, *arguments)
        return _empty_for_none(arguments[0], results), dims

    return of_operation


_forward_operation = _define(FORWARD, _keep_for_backward, _differentiate_forward, _forward_of_batch)
_backward_operation = _define(
    BACKWARD, _keep_for_second_backward, _differentiate_backward, _backward_of_batch
)
OPERATIONS = {FORWARD: _forward_operation, BACKWARD: _backward_operation}


# ---- split over devices --------------------------------------------------------------------------


def _share_out() -> None:
    """Tell DTensor how the operations are split, if it is in use. Importing it takes a while."""
    if "torch.distributed.tensor" in sys.modules:
        _register_splits()


# torch.compiler.assume_constant_result does this, but would import the compiler, for 1.6 s.
_share_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register_splits() -> None:
    """Give DTensor the rules, once."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_forward_operation)(functools.partial(_splits, FORWARD))
    register_sharding(_backward_operation)(functools.partial(_splits, BACKWARD))


def _splits(table: Pass, *arguments: Any) -> list[Any]:
    """Return how results and arguments may be split: along any kept axis, with nothing to send.

    Rows, and arrays with an entry for each row, are split as x is, and so is a weight that varies
    along the axis. Else it is the same everywhere, and its gradient is a partial sum.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    tensors, told = _split(table, arguments)
    x, whole, (k, *_) = by_name(table, tensors)["x"], Replicate(), told
    metas = tuple(t if t is None else t.tensor_meta for t in tensors)
    present = _present(table, metas, told)

    weight = by_name(table, metas)["weight"]

    def along(axis: int | None, meta: Any) -> Any:
        """Return how a vector is split where rows are split along an axis."""
        if axis is None or meta is None:
            return whole
        own = axis - x.ndim + len(meta.shape)
        return Shard(own) if own >= 0 and meta.shape[own] != 1 else whole

    def rule(axis: int | None) -> tuple[list[Any], list[Any]]:
        rows = whole if axis is None else Shard(axis)
        of_weight = along(axis, weight)
        of_vector = Partial("sum") if of_weight == whole != rows else of_weight
        results = [
            whole if not there else of_vector if KINDS[name] is Kind.VECTOR else rows
            for name, there in zip(table.writes, present, strict=True)
        ]
        reads = [
            None if meta is None else along(axis, meta) if KINDS[name] is Kind.VECTOR else rows
            for name, meta in zip(table.reads, metas, strict=True)
        ]
        return results, [*reads, *(None,) * len(told)]

    return [rule(axis) for axis in (None, *range(x.ndim - k))]
