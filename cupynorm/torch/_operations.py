"""The passes as operations that torch differentiates, batches, traces, compiles and shards.

A call on plain tensors goes straight to the kernels, through an autograd.Function where gradients
are recorded: what torch.library puts around an operation costs more than the launch. Where torch
must see the call, under torch.compile and export, in a dispatch mode, or with a subclass such as
DTensor, it is an operation of torch.library, with the same formulas.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from cupynorm import _checks
from cupynorm._operation import ALWAYS_READ, BACKWARD, FORWARD, KINDS, Kind, Pass, Spec, shape_of
from cupynorm._prepared import remember
from cupynorm.torch import _formulas, _kernels
from cupynorm.torch._kernels import (
    NUMPY_DTYPES,
    Asked,
    Tensors,
    backward_spec,
    check_tensor,
    compute_type,
    forward_spec,
    to_options,
)

__all__ = ["PLAIN", "norm_backward", "norm_forward", "normalize", "normalize_plain"]

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))

# What an operation takes behind the tensors that its pass reads. That begins with an int, from
# which on DTensor tells calls apart. Both begin as `Asked`.
SHARED = "int k, str norm, float eps, bool zero_centered"
FORWARD_OPTIONS = f"{SHARED}, float[]? relu, ScalarType? out_dtype, bool training"
BACKWARD_OPTIONS = f"{SHARED}, ScalarType? bias_dtype"
_COUNT_SHARED = len(SHARED.split(", "))


def _split(table: Pass, arguments: tuple[Any, ...]) -> tuple[Tensors, Asked, Any]:
    """Return what an operation was given: tensors, what is asked, and the last option."""
    count = len(table.reads)
    return arguments[:count], arguments[count:-1], arguments[-1]


# ---- which way a call goes -----------------------------------------------------------------------


# By names of this module: to look each up in torch's takes a tenth of a microsecond.
_is_grad_enabled = torch.is_grad_enabled
_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # elsewhere a dispatch mode tells
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_jit_tracing = torch._C._is_tracing
_transforms_active = torch._C._are_functorch_transforms_active
_functorch = torch._C._functorch
_is_wrapped = _functorch.is_functorch_wrapped_tensor
# Gradients that autograd batches, of is_grads_batched=True, are tensors as others but for this.
_is_batched = _functorch.is_legacy_batchedtensor


def _is_seen(*tensors: Any) -> bool:
    """Tell whether torch must see a call on these tensors; transforms are another matter."""
    return bool(_dispatch_modes() or _is_jit_tracing() or any(map(_says_more, tensors)))


def _says_more(tensor: Any) -> bool:
    """Tell whether a tensor is more than the numbers in its memory, of which torch knows."""
    if type(tensor) not in PLAIN:
        return True
    return tensor is not None and bool(
        not (tensor.is_cuda or tensor.is_cpu)
        or tensor.is_neg()  # as the imaginary part of a conjugate, whose memory has the other sign
        or tensor._is_zerotensor()  # which has no memory
        or _is_wrapped(tensor)  # has none of its own
        or _is_batched(tensor)
    )


def _alive(name: str, tensor: Any) -> Any:
    """Return what a tensor that has outlived its transform stands for, as torch does."""
    if tensor is None or not _is_wrapped(tensor):
        return tensor
    while _functorch.is_dead_tensor_wrapper(tensor):
        tensor = _functorch.unwrap_if_dead(tensor)
    if _functorch.is_batchedtensor(tensor) and not _transforms_active():
        raise ValueError(f"{name} must not outlive the torch.func.vmap of which it is one example")
    return tensor


def _is_asked_for_gradients(tensors: Tensors) -> bool:
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _is_recorded(tensors: Tensors) -> bool:
    """Tell whether gradients of a call on these tensors may be asked for."""
    if not torch.is_grad_enabled():
        return False
    if _is_asked_for_gradients(tensors):
        return True
    # Within a transform, only its own tensors say so.
    return torch.compiler.is_compiling() or _transforms_active()


def normalize_plain(tensors: Tensors, asked: Asked) -> Any:
    """Return what `normalize` does, of tensors of the `PLAIN` types."""
    if (
        _is_traced_by_dynamo()
        or _transforms_active()
        or _dispatch_modes()
        or _is_jit_tracing()
        or forward_ad._current_level >= 0
    ):
        return normalize(tensors, asked)
    try:
        if _is_grad_enabled() and _is_asked_for_gradients(tensors):
            return _apply_recorded(*tensors, asked)
        return _kernels.forward(tensors, asked, False)[0]
    except (RuntimeError, ValueError):  # of what has no memory here: to ask first takes time
        if not _is_seen(*tensors):
            raise
    return normalize(tensors, asked)


def normalize(tensors: Tensors, asked: Asked) -> Any:
    """Return y; what `norm_backward` needs is kept where gradients may be asked for."""
    if not torch.compiler.is_compiling():
        tensors = tuple(map(_alive, FORWARD.reads, tensors))
    return norm_forward(tensors, asked, _is_recorded(tensors))[0]


def norm_forward(tensors: Tensors, asked: Asked, training: bool) -> tuple[Any, ...]:
    """Return y and, for training, what `norm_backward` needs.

    An array that does not apply is None, or empty where the call was an operation of torch.library.
    """
    arguments: Any = (*tensors, *asked, training)
    if torch.compiler.is_compiling():
        _share_out()
        return _forward_operation(*arguments)
    if _transforms_active():
        return _Forward.apply(*arguments)
    if _is_seen(*tensors):
        _share_out()
        return _forward_operation(*arguments)
    if training or forward_ad._current_level >= 0:  # where it says that it has no jvp
        return _apply_forward(*arguments)
    return _kernels.forward(tensors, asked, training)


def norm_backward(
    tensors: Tensors, asked: Asked, bias_dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """Return dx, dweight and dbias, each None where it does not apply."""
    if torch.compiler.is_compiling():
        run = _backward_seen
    elif _transforms_active():
        run = _Backward.apply
    elif not PLAIN.issuperset(map(type, tensors)) or _dispatch_modes() or _is_jit_tracing():
        run = _backward_seen
    else:
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:  # as in norm_forward
            try:
                return _kernels.backward(tensors, asked, bias_dtype)
            except (RuntimeError, ValueError):  # as in normalize_plain
                if not _is_seen(*tensors):
                    raise
        dy, *others = map(_alive, BACKWARD.reads, tensors)
        tensors = dy, *others
        run = _backward_seen if _is_batched(dy) else _apply_backward
    return run(*tensors, *asked, bias_dtype)


def _backward_seen(*arguments: Any) -> tuple[Any, ...]:
    return _none_for_absent(
        _backward_operation(*arguments), _present(BACKWARD, *_split(BACKWARD, arguments))
    )


_presences: dict[Any, tuple[bool, ...]] = {}


def _present(table: Pass, tensors: Tensors, asked: Asked, last: Any) -> tuple[bool, ...]:
    """Tell which results there are: the norm, the last option and what is None say that."""
    _, norm, *_ = asked
    key = table.name, norm, last, *map(type, tensors), *map(type, asked)
    found = _presences.get(key)
    if found is None:
        dtypes = _SPECS[table.name](tensors, asked, last).dtypes
        found = tuple(dtypes[name] is not None for name in table.writes)
        remember(_presences, key, found)
    return found


_SPECS: dict[str, Callable[..., Spec]] = {"forward": forward_spec, "backward": backward_spec}


def _none_for_absent(results: Any, present: tuple[bool, ...]) -> tuple[Any, ...]:
    return tuple([t if there else None for t, there in zip(results, present, strict=True)])


# ---- derivatives ---------------------------------------------------------------------------------

# The results of a backward pass are the gradients of what the forward pass reads, in its order. Of
# that and its results, this is what a backward pass reads beside dy.
_kept = operator.itemgetter(
    *map((FORWARD.reads + FORWARD.writes).index, (n for n in BACKWARD.reads if n != "dy"))
)
_BIAS = FORWARD.reads.index("bias")
_NO_ROWS = [i for i, name in enumerate(FORWARD.writes) if KINDS[name] is not Kind.ROWS]


def _keep_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, asked, ctx.training = _split(FORWARD, inputs)
    ctx.mark_non_differentiable(*[output[i] for i in _NO_ROWS if output[i] is not None])
    ctx.set_materialize_grads(False)
    results = _none_for_absent(output, _present(FORWARD, tensors, asked, ctx.training))
    ctx.save_for_backward(*_kept(tensors + results))
    ctx.asked = asked[:_COUNT_SHARED]
    ctx.bias_dtype = None if tensors[_BIAS] is None else tensors[_BIAS].dtype


def _differentiate_forward(ctx: Any, dy: Any, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    if not ctx.training:
        raise RuntimeError("norm_forward was called with training=False: nothing was kept for it")
    bias_dtype = ctx.bias_dtype if ctx.needs_input_grad[_BIAS] else None
    gradients = norm_backward((dy, *ctx.saved_tensors), ctx.asked, bias_dtype)
    return _padded(ctx, gradients)


def _padded(ctx: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return gradients of the first arguments, and None for each of the others."""
    return (*gradients, *(None,) * (len(ctx.needs_input_grad) - len(gradients)))


def _keep_for_second_backward(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.asked, bias_dtype = _split(BACKWARD, inputs)
    dy, x, weight, _, _, bitmask = tensors
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(dy, x, weight, bitmask)
    ctx.has_bias = bias_dtype is not None


def _differentiate_backward(ctx: Any, a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    dy, x, weight, bitmask = ctx.saved_tensors
    given = a, None if weight is None else b, c if ctx.has_bias else None
    options = to_options(*ctx.asked)
    return _padded(ctx, _formulas.gradients_of_backward(given, dy, x, weight, bitmask, options))


# ---- a batch of calls at once --------------------------------------------------------------------


def _forward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap, which makes one call of many where the weight is shared."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        tensors, asked, training = _split(FORWARD, arguments)
        options, dims = (*asked, training), in_dims[: len(tensors)]
        named = list(zip(FORWARD.reads, tensors, dims, strict=True))
        is_shared = all(dim is None for name, _, dim in named if KINDS[name] is Kind.VECTOR)
        if is_shared or info.batch_size == 0:
            together = (
                _batched(t, dim, info.batch_size)
                if KINDS[name] is Kind.ROWS
                else _of_example(t, dim)
                for name, t, dim in named
            )
            results = run(*together, *options)
        else:
            examples = [
                run(*(_example(t, dim, i) for _, t, dim in named), *options)
                for i in range(info.batch_size)
            ]
            results = tuple(
                None if parts[0] is None else torch.stack(parts)
                for parts in zip(*examples, strict=True)
            )
        present = _present(FORWARD, tensors, asked, training)
        return results, _none_for_absent((0,) * len(present), present)

    return rule


def _batched(tensor: Any, dim: int | None, size: int) -> Any:
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _of_example(tensor: Any, dim: int | None) -> Any:
    """Return a tensor like one of an example, where there is none."""
    return tensor if dim is None else tensor.new_empty(tensor.movedim(dim, 0).shape[1:])


def _example(tensor: Any, dim: int | None, i: int) -> Any:
    return tensor if dim is None else tensor.select(dim, i)


def _backward_of_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule for vmap: one call for dx, and formulas for the sums of each example."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        tensors, asked, bias_dtype = _split(BACKWARD, arguments)
        options = to_options(*asked)
        dims = in_dims[: len(tensors)]
        batched = (_batched(t, d, info.batch_size) for t, d in zip(tensors, dims, strict=True))
        dy, x, weight, mean, rstd, bitmask = batched
        k, dtype = options.k, compute_type(x)
        w = _formulas.effective_weight(options, weight, dtype)
        if weight is not None:
            w = w.reshape(info.batch_size, *(1,) * (x.ndim - 1 - k), *weight.shape[1:])
        inside = _formulas.masked(dy, bitmask, k, dtype)
        # Of what is multiplied and masked before, the pass is one without a weight, bias and bits.
        *shared, _ = asked
        dx, dweight, dbias = run(inside * w, x, None, mean, rstd, None, *shared, False, None)
        if weight is not None:
            xhat, _ = _formulas.normalized(options, x)
            sums = _formulas.sum_over_rows(inside * xhat, 1, k)
            dweight = _formulas.round_once(sums, weight.dtype)
        if bias_dtype is not None:
            dbias = _formulas.round_once(_formulas.sum_over_rows(inside, 1, k), bias_dtype)
        present = _present(BACKWARD, tensors, asked, bias_dtype)
        return (dx, dweight, dbias), _none_for_absent((0,) * len(present), present)

    return rule


# ---- as functions of autograd --------------------------------------------------------------------


def _refuse_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "the norms of cupynorm.torch have no jvp, the forward mode of autograd: use "
        "jacrev(jacrev(f)) for hessian(f)"
    )


class _Forward(torch.autograd.Function):
    # What lies below the transforms may be a tracer's, or a subclass, as well.
    @staticmethod
    def forward(*arguments: Any) -> Any:
        tensors, asked, training = _split(FORWARD, arguments)
        if _is_seen(*tensors):
            _share_out()
            return _forward_operation(*arguments)
        return _kernels.forward(tensors, asked, training)

    setup_context = staticmethod(_keep_for_backward)
    backward = staticmethod(_differentiate_forward)
    vmap = staticmethod(_forward_of_batch(lambda *a: norm_forward(*_split(FORWARD, a))))
    jvp = staticmethod(_refuse_forward_mode)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        tensors, asked, bias_dtype = _split(BACKWARD, arguments)
        if _is_seen(*tensors):
            return _backward_seen(*arguments)
        return _kernels.backward(tensors, asked, bias_dtype)

    setup_context = staticmethod(_keep_for_second_backward)
    backward = staticmethod(_differentiate_backward)
    vmap = staticmethod(_backward_of_batch(lambda *a: norm_backward(*_split(BACKWARD, a))))
    jvp = staticmethod(_refuse_forward_mode)


class _Recorded(torch.autograd.Function):
    """`_Forward` where no transform looks on: what is kept is no result, and options are one."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        tensors, asked, bias = arguments[:-1], arguments[-1], arguments[_BIAS]
        results = _kernels.forward(tensors, asked, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*_kept(tensors + results))
        ctx.options = asked, None if bias is None else bias.dtype
        return results[0]

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        asked, bias_dtype = ctx.options
        if bias_dtype is not None and not ctx.needs_input_grad[_BIAS]:
            bias_dtype = None
        tensors = dy, *ctx.saved_tensors
        return *norm_backward(tensors, asked[:_COUNT_SHARED], bias_dtype), None


# Past what Function.apply does for transforms of functions, which costs 13 us.
_apply_recorded = super(torch.autograd.Function, _Recorded).apply
_apply_forward = super(torch.autograd.Function, _Forward).apply
_apply_backward = super(torch.autograd.Function, _Backward).apply


# ---- as operations of torch.library --------------------------------------------------------------


def _empty_for_none(like: torch.Tensor, tensors: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return tensors that an operation may return: it has no optional results."""
    return tuple([like.new_empty(0) if t is None else t for t in tensors])


def _run_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, asked, training = _split(FORWARD, arguments)
    *shared, relu, out_dtype = asked
    if relu is not None:  # as a list
        asked = *shared, tuple(relu), out_dtype
    return _empty_for_none(tensors[0], _kernels.forward(tensors, asked, training))


def _check_row(name: str, tensor: Any, normalized: Any) -> None:
    def message() -> str:
        return (
            f"{name} must have the shape of x's normalized axes, {tuple(normalized)}; got "
            f"{tuple(tensor.shape)}"
        )

    torch._check_value(tensor.ndim == len(normalized), message)
    for size, wanted in zip(tensor.shape, normalized, strict=True):
        torch._check_value(size == wanted, message)  # when the program runs, if not known before


def _outline_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    # What the kernels will ask for, when a program is traced: shapes may be symbolic.
    tensors, asked, training = _split(FORWARD, arguments)
    options, (*_, out_dtype) = to_options(*asked), asked
    given = {n: t for n, t in zip(FORWARD.reads, tensors, strict=True) if t is not None}
    x = given["x"]
    normalized = x.shape[x.ndim - options.k :]
    for name, tensor in given.items():
        check_tensor(name, tensor, x)
        if KINDS[name] is Kind.VECTOR:
            _check_row(name, tensor, normalized)
    if any(isinstance(size, int) and size == 0 for size in normalized):
        raise ValueError(
            f"x must have at least one element in each row, got shape {tuple(x.shape)}"
        )
    if out_dtype is not None:
        _checks.to_dtype("out_dtype", out_dtype)
    _checks.check_zero_centered(options.zero_centered, has_weight="weight" in given)
    relu = None if options.relu is None else tuple(options.relu)
    _checks.check_numbers(NUMPY_DTYPES[compute_type(x)], options.eps, relu)
    return _outlines(forward_spec(tensors, asked, training), x, options.k)


def _outlines(spec: Spec, x: Any, k: int) -> tuple[torch.Tensor, ...]:
    """Return tensors of the shapes and dtypes of a pass's results."""
    results = (
        x.new_empty(shape_of(KINDS[name], x.shape, k), dtype=getattr(torch, dtype))
        if (dtype := spec.dtypes[name]) is not None
        else None
        for name in spec.table.writes
    )
    return _empty_for_none(x, tuple(results))


def _run_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, asked, bias_dtype = _split(BACKWARD, arguments)
    return _empty_for_none(tensors[1], _kernels.backward(tensors, asked, bias_dtype))


def _outline_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, asked, bias_dtype = _split(BACKWARD, arguments)
    spec, x = backward_spec(tensors, asked, bias_dtype), tensors[BACKWARD.reads.index("x")]
    return _outlines(spec, x, to_options(*asked).k)


def _schema(table: Pass, options: str) -> str:
    reads = (f"Tensor{'' if name in ALWAYS_READ else '?'} {name}" for name in table.reads)
    writes = (f"Tensor {name}" for name in table.writes)
    return f"({', '.join(reads)}, {options}) -> ({', '.join(writes)})"


# torch.library.impl does not hand on the keys.
_library = torch.library.Library("cupynorm", "FRAGMENT")
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _has_tangent(argument: Any) -> bool:
    if not isinstance(argument, torch.Tensor):
        return False
    return forward_ad.unpack_dual(argument).tangent is not None


def _define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    outline: Callable[..., Any],
    setup_context: Callable[..., Any],
    backward: Callable[..., Any],
    of_batch: Callable[..., Any],
) -> Any:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"cupynorm::{name}", outline)
    operation = getattr(torch.ops.cupynorm, name).default
    recorded = make_autograd_impl(operation, Info(backward, setup_context))

    def dispatched(keys: Any, *arguments: Any) -> Any:
        """Do as torch.library.register_autograd, but pass on at once what nobody else looks at.

        A compiled program comes here in each call, its gradients long taken care of.
        """
        if forward_ad._current_level >= 0 and any(map(_has_tangent, arguments)):
            _refuse_forward_mode()
        asked = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        following = (keys & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId()
        if asked or following not in _DEVICES:
            return recorded(keys, *arguments)
        return run(*arguments)

    _library.impl(name, dispatched, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"cupynorm::{name}", of_batch(operation))
    return operation


_forward_operation = _define(
    "norm_forward",
    _schema(FORWARD, FORWARD_OPTIONS),
    _run_forward,
    _outline_forward,
    _keep_for_backward,
    _differentiate_forward,
    _forward_of_batch,
)
_backward_operation = _define(
    "norm_backward",
    _schema(BACKWARD, BACKWARD_OPTIONS),
    _run_backward,
    _outline_backward,
    _keep_for_second_backward,
    _differentiate_backward,
    _backward_of_batch,
)


# ---- split over devices --------------------------------------------------------------------------


def _share_out() -> None:
    """Tell DTensor how the operations are split, if it is in use; importing it takes a while."""
    if "torch.distributed.tensor" in sys.modules:
        _register_splits()


# As torch.compiler.assume_constant_result does, which would import the compiler for it: 1.6 s.
_share_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register_splits() -> None:
    """Give DTensor the rules, once."""
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_forward_operation)(functools.partial(_splits, FORWARD))
    register_sharding(_backward_operation)(functools.partial(_splits, BACKWARD))


def _splits(table: Pass, *arguments: Any) -> list[Any]:
    """Return how results and arguments may be split: any axis that is kept, with nothing to send.

    Rows are split as x is, with all that has an entry a row. A weight is the same everywhere, and
    its gradient a sum that is still to be added up.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    tensors, asked, last = _split(table, arguments)
    x, whole = tensors[table.reads.index("x")], Replicate()
    metas = tuple(t if t is None else t.tensor_meta for t in tensors)
    present = _present(table, metas, asked, last)

    def rule(rows: Any) -> tuple[list[Any], list[Any]]:
        of_vector = whole if rows == whole else Partial("sum")
        results = [
            whole if not there else of_vector if KINDS[name] is Kind.VECTOR else rows
            for name, there in zip(table.writes, present, strict=True)
        ]
        reads = [
            None if t is None else whole if KINDS[name] is Kind.VECTOR else rows
            for name, t in zip(table.reads, tensors, strict=True)
        ]
        return results, [*reads, *(None,) * (len(arguments) - len(tensors))]

    axes = range(x.ndim - to_options(*asked).k)
    return [rule(rows) for rows in (whole, *map(Shard, axes))]
