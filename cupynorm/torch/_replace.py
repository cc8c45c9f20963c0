"""Norms of a model become those of this package, in place."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from cupynorm._checks import check_numbers
from cupynorm._operation import ITEMSIZE
from cupynorm.torch._modules import LayerNorm, RMSNorm, _Norm

__all__ = ["ReplacedNorms", "replace_norms"]

_OF_TORCH: dict[type, type] = {torch.nn.RMSNorm: RMSNorm, torch.nn.LayerNorm: LayerNorm}
_CALLED_A_NORM = re.compile(r"(rms|layer)_?norm", re.IGNORECASE)
_EPS = ("variance_epsilon", "eps")  # as other libraries call it
# What any module may have; Python 3.14 keeps annotations in the last one.
_OWN_FUNCTIONS = {"__init__", "forward", "extra_repr", "__annotate_func__"}


class _Left(Exception):
    """Why a norm is left as it is."""


class _Change(NamedTuple):
    name: str
    module: Any
    before: type
    after: type
    attributes: tuple[str, ...]  # that were set
    had: dict[str, Any]  # those of the same names before


class ReplacedNorms:
    """What `replace_norms` did to a model.

    Attributes
    ----------
    replaced : dict of str to str
        What each norm was, and what it is now, by its name in the model.
    left : dict of str to str
        Why each other norm was left.

    Examples
    --------
    >>> import torch
    >>> from cupynorm.torch import replace_norms
    >>> model = torch.nn.Sequential(torch.nn.RMSNorm(4, eps=1e-5), torch.nn.LayerNorm(4))
    >>> norms = replace_norms(model, where=lambda name, norm: name == "0")
    >>> norms
    1 norm replaced
      RMSNorm -> cupynorm.torch.RMSNorm((4,), eps=1e-05, elementwise_affine=True)
        0
    1 norm left
      LayerNorm: not chosen by where
        1
    >>> norms.undo()
    >>> model[0]
    RMSNorm((4,), eps=1e-05, elementwise_affine=True)
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._changes: list[_Change] = []

    def undo(self) -> None:
        """Give the norms the classes that they had. Parameters keep their values.

        Raises
        ------
        RuntimeError
            If something else has changed the class of one since. None is changed then.
        """
        for name, module, before, after, *_ in self._changes:
            if type(module) not in (before, after):
                raise RuntimeError(
                    f"{name or 'the model'} was made a {after.__name__}, and is a "
                    f"{type(module).__name__} now, which cannot be undone"
                )
        for _, module, before, after, attributes, had in self._changes:
            if type(module) is after:
                module.__class__ = before
                # What the class calls so may be a property, which cannot be deleted.
                own = vars(module)
                for attribute in attributes:
                    own.pop(attribute, None)
                    own["_parameters"].pop(attribute, None)
                own.update(had)

    def __repr__(self) -> str:
        lines = []
        for norms, done in ((self.replaced, "replaced"), (self.left, "left")):
            if norms or done == "replaced":
                lines.append(f"{len(norms)} norm{'' if len(norms) == 1 else 's'} {done}")
            named: dict[str, list[str]] = {}
            for name, text in norms.items():
                named.setdefault(text, []).append(name or "the model itself")
            for text, names in named.items():
                more = f" and {len(names) - 3} more" if len(names) > 4 else ""
                lines += [f"  {text}", f"    {', '.join(names[: 3 if more else 4])}{more}"]
        return "\n".join(lines)


def replace_norms(
    model: torch.nn.Module, where: Callable[[str, torch.nn.Module], bool] | None = None
) -> ReplacedNorms:
    """Make the norms of a model `RMSNorm` and `LayerNorm` of this package, in place.

    These are replaced:

    - ``torch.nn.RMSNorm`` and ``torch.nn.LayerNorm`` of any options, but no subclasses;
    - modules like ``LlamaRMSNorm`` of Hugging Face transformers: their class is named after
      RMSNorm or LayerNorm and derives from ``torch.nn.Module`` alone, they have one parameter,
      ``weight``, of one axis, ``eps`` or ``variance_epsilon``, and no number besides its width, and
      ``forward(x)`` computes RMSNorm, RMSNorm with a zero-centred weight as Gemma's, or LayerNorm.
      It is called on a few rows on the CPU to find out which, in training and out of it. Its
      results, their dtypes and their gradients count.

    A norm remains the same object and only changes its class. So it keeps its parameters, their
    dtype and device, its hooks, its training flag, the keys of its ``state_dict``, and all places
    in which it stands. Optimizers, DDP and FSDP2 do not notice.

    Parameters
    ----------
    model : torch.nn.Module
        It may be a norm itself.
    where : callable, optional
        It takes the name of a norm in the model and the norm, and tells whether to replace it.
        A norm that stands in several places goes by its first name. If it raises an error, nothing
        is replaced.

    Returns
    -------
    ReplacedNorms
        ``replaced`` and ``left`` say what was done and why not, ``undo()`` takes it back.

    Raises
    ------
    TypeError
        If model is not a ``torch.nn.Module``, or where cannot be called.

    See Also
    --------
    RMSNorm, LayerNorm : what the norms become.

    Notes
    -----
    The results are rounded once, to x's dtype. Llama's norm rounds to x's dtype before it
    multiplies by the weight, and then again. It returns float32 for a float32 weight and a bfloat16
    x, where this one returns bfloat16. An `RMSNorm` takes x by position or as ``x``, and a
    `LayerNorm` by position or as ``input``.

    Norms that are wrapped themselves, by ``fully_shard(norm)`` or a parametrization, have another
    class and are left. Replace them first. A norm in a block that is wrapped may be replaced
    before or after.

    Examples
    --------
    >>> import torch
    >>> from cupynorm.torch import replace_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.RMSNorm(4, eps=1e-6))
    >>> norms = replace_norms(model)
    >>> norms
    1 norm replaced
      RMSNorm -> cupynorm.torch.RMSNorm((4,), eps=1e-06, elementwise_affine=True)
        1
    >>> model(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    >>> norms.undo()
    >>> type(model[1])
    <class 'torch.nn.modules.normalization.RMSNorm'>
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if where is not None and not callable(where):
        raise TypeError(f"where must be callable, got {type(where).__name__}")
    norms = ReplacedNorms()
    found = []
    for name, module in model.named_modules():
        of_torch = isinstance(module, tuple(_OF_TORCH))
        called_a_norm = _CALLED_A_NORM.search(type(module).__name__) and not module._modules
        if not of_torch and not called_a_norm:
            continue
        try:
            if where is not None and not where(name, module):
                raise _Left("not chosen by where")
            found.append((name, module, *_counterpart(module)))
        except _Left as reason:
            norms.left[name] = f"{type(module).__name__}: {reason}"
    for name, module, after, attributes in found:  # where may have raised before: not by halves
        before = type(module)
        had = {key: vars(module)[key] for key in attributes if key in vars(module)}
        vars(module).update(attributes)
        module.__class__ = after
        norms.replaced[name] = f"{before.__name__} -> {module!r}"
        norms._changes.append(_Change(name, module, before, after, tuple(attributes), had))
    return norms


def _counterpart(module: Any) -> tuple[type, dict[str, Any]]:
    """Return the class that computes what the module does, and the attributes that it needs."""
    cls, weight = type(module), module._parameters.get("weight")
    if isinstance(module, _Norm):
        raise _Left("already of cupynorm.torch")
    if "forward" in vars(module):
        raise _Left("its forward was replaced on the module itself")
    if weight is not None:
        if weight.device.type not in ("cpu", "cuda", "meta"):
            raise _Left(f"its weight is on {weight.device}, neither the CPU nor a CUDA GPU")
        if str(weight.dtype).removeprefix("torch.") not in ITEMSIZE:
            raise _Left(f"its weight is of {weight.dtype}")
    eps: Any = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    if eps is not None or cls is not torch.nn.RMSNorm:  # whose eps may be the dtype's
        in_float64 = weight is not None and weight.dtype == torch.float64
        try:
            check_numbers(np.dtype("float64" if in_float64 else "float32"), eps, None)
        except (TypeError, ValueError) as error:
            raise _Left(f"its {error}") from None
    no_bias: dict[str, Any] = {} if "bias" in module._parameters else {"bias": None}
    if cls in _OF_TORCH:
        return _OF_TORCH[cls], no_bias
    if cls.__bases__ != (torch.nn.Module,):
        bases = " and ".join(base.__name__ for base in cls.__bases__)
        raise _Left(f"a subclass of {bases}, which may differ from it")
    functions = {name for name, value in vars(cls).items() if inspect.isfunction(value)}
    overridden = {name for name in functions - _OWN_FUNCTIONS if hasattr(torch.nn.Module, name)}
    if overridden:
        raise _Left(f"it has a {min(overridden)} of its own")
    taken = list(inspect.signature(cls.forward).parameters.values())
    if len(taken) != 2 or taken[1].kind is not taken[1].POSITIONAL_OR_KEYWORD:
        raise _Left("its forward does not take x alone")
    held = [name for name, p in module._parameters.items() if p is not None]
    if held != ["weight"] or module._buffers:
        raise _Left("it does not have a weight, and only that")
    if vars(cls).get("__slots__"):
        raise _Left("it has __slots__, so it cannot change its class")
    if weight.ndim != 1 or not weight.numel():
        raise _Left(f"its weight has the shape {tuple(weight.shape)}, and not one axis")
    n = weight.numel()
    for name, value in vars(module).items():
        number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
        if number and name not in _EPS and (isinstance(value, torch.Tensor) or value != n):
            raise _Left(f"its {name} may be a part of what it computes")
    try:
        # A dropout draws from torch's own generator. In inference mode nothing has gradients.
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=()):
            after, zero_centered = _formula(module, n, float(eps))
    except _Left:
        raise
    except Exception as error:  # of code that may be anybody's
        raise _Left(f"its forward fails on the CPU: {type(error).__name__}") from error
    return after, no_bias | {
        "normalized_shape": tuple(weight.shape),
        "eps": float(eps),
        "elementwise_affine": True,
        "zero_centered": zero_centered,
    }


def _formula(module: Any, n: int, eps: float) -> tuple[type, bool]:
    """Return whose formula the module computes, and whether its weight is zero-centred."""
    generator = torch.Generator("cpu").manual_seed(0)  # torch's own has other uses
    options = {"generator": generator, "device": "cpu", "dtype": torch.float32}
    weight = torch.nn.Parameter(torch.randn(n, **options))
    # Of these axes, some classes take another one than the last.
    tried = [torch.randn(*shape, n, **options) for shape in ((2,), (2, 3), (2, 3, 5))]
    for x in tried:
        x[1] *= math.sqrt(eps)  # where it matters how eps is added
    rows, dy = torch.randn(2, 4, n, **options)
    rms_norm, layer_norm = torch.nn.functional.rms_norm, torch.nn.functional.layer_norm
    formulas: dict[tuple[type, bool], _Function] = {
        (RMSNorm, False): lambda x, weight: rms_norm(x, (n,), weight, eps),
        (RMSNorm, True): lambda x, weight: rms_norm(x, (n,), 1 + weight, eps),
        (LayerNorm, False): lambda x, weight: layer_norm(x, (n,), weight, None, eps),
    }
    in_training, outside = (functools.partial(_forward, module, t) for t in (True, False))
    given = [(x, outside(x, weight)) for x in tried] + [(rows, in_training(rows, weight))]
    with contextlib.suppress(RuntimeError):  # some need a float32 weight
        outside(rows.bfloat16(), torch.nn.Parameter(weight.bfloat16()))
    for found, formula in formulas.items():
        expected = [(y, formula(x, weight)) for x, y in given]
        if all(torch.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True) for pair in expected):
            of_formula = _gradients(formula, rows, weight, dy)
            for forward in (in_training, outside):
                for a, b in zip(_gradients(forward, rows, weight, dy), of_formula, strict=True):
                    if a is None or not torch.allclose(a, b, rtol=1e-3, atol=1e-3):
                        raise _Left("its forward computes a norm, but has other gradients")
            return found
    raise _Left("its forward computes neither norm from x and weight")


_Function = Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]  # of x and weight


def _forward(
    module: Any, training: bool, x: torch.Tensor, weight: torch.nn.Parameter
) -> torch.Tensor:
    """Return what the module's forward would, in training or not, if this were its weight."""
    cls: Any = type(module)
    stand_in = cls.__new__(cls)  # the module may be on any device
    vars(stand_in).update(vars(module), training=training, _parameters={"weight": weight})
    given, before = x.clone(), weight.detach().clone()
    y = cls.forward(stand_in, given)
    if not (torch.equal(given, x) and torch.equal(weight, before)):
        raise _Left("its forward writes into x or its weight")
    if y.dtype != x.dtype:
        raise _Left(f"its forward returns {y.dtype} for {x.dtype}")
    return cast("torch.Tensor", y)


def _gradients(
    function: _Function, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor
) -> tuple[Any, ...]:
    """Return the gradients of x and weight, None for one that has none."""
    leaves = x.detach().requires_grad_(), torch.nn.Parameter(weight.detach())
    with torch.enable_grad():
        y = function(*leaves)
    if not y.requires_grad:
        return None, None
    return torch.autograd.grad(y, leaves, dy, allow_unused=True)
