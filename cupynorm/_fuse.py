"""`cupynorm.fuse`: a norm with a way in and a way out that a user writes in Python.

The prologue and the epilogue are programs: see `_expressions`. Between them is a norm of this
library. NumPy arrays are computed in float64, and others in the compute dtype. On a GPU a call is a
kernel of its own where one serves it: see `_fused_calls`. Elsewhere each step of a program is an
operation of the arrays' framework.
"""

from __future__ import annotations

import collections
import functools
import keyword
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupynorm import _arrays, _checks, norms, reference
from cupynorm._arrays import dtype_name
from cupynorm._environment import check_not_forked
from cupynorm._expressions import Program, functions, gradients, kind_of, of_numpy, trace
from cupynorm._operation import EPS, Axis, Norm

__all__ = [
    "NUMPY_TOOLS",
    "Fused",
    "FusedForward",
    "Given",
    "Options",
    "Tools",
    "fuse",
]

_NOT_NAMES = (
    *("weight", "bias", "eps", "axis", "zero_centered", "out_dtype", "y"),
    *("backward", "architecture"),  # of `kernel_source`
)
_INPUTS = (*_arrays.FLOATS, "bool")


class Options(NamedTuple):
    """What a call is told in addition to its arrays."""

    eps: float | None = None
    axis: Axis = None
    zero_centered: bool = False
    out_dtype: Any = None


class Given(NamedTuple):
    """The arrays of a call. The inputs are by name, and may be numbers."""

    x: Any
    weight: Any
    bias: Any
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Tools:
    """What a framework's arrays are computed with.

    `widen` and `cast` take the name of a dtype: the compute dtype, and one to round to. `number`
    and `broadcast` take an array for its dtype and its shape; what `broadcast` returns is
    C-contiguous. `stored` rounds a value of the compute dtype to one of a name, and returns it in
    the compute dtype again, with the gradient of the value. `normalize` takes the norm's name, its
    arrays and options, and returns y, mean and rstd, in the dtype of its x. The latter two may be
    None. Where the framework does not differentiate, `differentiate` returns the gradients of x,
    weight and bias: from the norm's name, dy, x, weight, bias, mean, rstd and the options. Only
    NumPy and CuPy need `sum_to_shape`, for gradients. `memory`: how kernels reach the arrays, None
    if they do not.
    """

    functions: Mapping[str, Callable[..., Any]]  # the operations of programs
    widen: Callable[[Any, str], Any]
    cast: Callable[[Any, str], Any]
    copy: Callable[[Any], Any]
    number: Callable[[float, Any], Any]
    broadcast: Callable[[Any, Any], Any]
    stored: Callable[[Any, str], Any]
    normalize: Callable[..., tuple[Any, Any, Any]]
    differentiate: Callable[..., tuple[Any, Any, Any]] | None = None
    sum_to_shape: Callable[[Any, tuple[int, ...]], Any] | None = None  # undoes a broadcast
    memory: Any = None


class FusedForward(NamedTuple):
    """What `Fused.forward` returns, and `Fused.backward` takes.

    Attributes
    ----------
    y : array
        The first output.
    outputs : tuple of arrays
        All outputs: those of the epilogue, then those of the prologue.
    mean, rstd : array or None
        The statistics of each row, as `NormForward` has them.
    given : Given
        The arguments: x, weight, bias, and the inputs by name.
    options : Options
        eps, axis, zero_centered and out_dtype.
    norm : Fused
        The norm whose forward returned it.
    """

    y: Any
    outputs: tuple[Any, ...]
    mean: Any
    rstd: Any
    given: Given
    options: Options
    norm: Fused


@dataclass(frozen=True, repr=False)
class Fused:
    """A norm with a way in and a way out. `fuse` makes one.

    Two are equal if they take the same steps on arguments of the same names and order. It can be
    pickled.
    """

    norm: Norm
    prologue: Program  # of x and inputs: the value to normalize, and further outputs
    epilogue: Program  # of y, which is normalized and scaled, x and inputs: the outputs
    # The calls of kernels so far, by all that they depend on: see `_fused_calls`.
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)
    inputs: tuple[str, ...] = field(init=False, compare=False)  # the names of the further inputs

    def __post_init__(self) -> None:
        names = dict.fromkeys((*self.prologue.arguments[1:], *self.epilogue.arguments[1:]))
        object.__setattr__(self, "inputs", tuple(name for name in names if name != "x"))

    def __repr__(self) -> str:
        parts = [repr(self.norm)]
        if self.prologue != _PLAIN:
            parts.append(f"prologue={self.prologue}")
        if self.epilogue != _IDENTITY:
            parts.append(f"epilogue={self.epilogue}")
        return f"cupynorm.fuse({', '.join(parts)})"

    def __reduce__(self) -> Any:
        return Fused, (self.norm, self.prologue, self.epilogue)

    @property
    def count(self) -> int:
        """How many outputs there are."""
        return len(self.epilogue.results) + len(self.prologue.results) - 1

    @property
    def class_of_gradients(self) -> Any:
        """The class of what `backward` returns."""
        return _gradients_of(self.inputs)

    def __call__(
        self,
        /,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        eps: float | None = None,
        axis: Axis = None,
        zero_centered: bool = False,
        out_dtype: Any = None,
        **inputs: Any,
    ) -> Any:
        """Compute the norm.

        Parameters
        ----------
        x, weight, bias, axis, zero_centered
            As for `rms_norm`. torch tensors and JAX arrays may be differentiated, traced, compiled
            and batched, as those of `cupynorm.torch` and `cupynorm.jax`.
        eps : float, optional
            The default is that of the norm: 1e-6 for rms_norm, and 1e-5 for layer_norm.
        out_dtype : dtype, or tuple of dtypes, optional
            The dtype of each output. The default, None, is x's.
        **inputs : array or float
            The further arguments of the prologue and the epilogue, by their names. Arrays broadcast
            to x's shape by NumPy's rule. They have one of the four dtypes, or hold bools, which
            count as 0 and 1 and have no gradient.

        Returns
        -------
        array, or tuple of arrays
            The outputs of the epilogue, then those of the prologue. Each has x's shape.

        Raises
        ------
        TypeError, ValueError, NotImplementedError, ImportError, RuntimeError
            As for `rms_norm`, and if the inputs are not those that the functions name.
        """
        told = (False, eps, axis, zero_centered, out_dtype, tuple(inputs))
        found = self._again((x, weight, bias, *inputs.values()), told)
        if found is not None:
            outputs = found[0]
            return outputs[0] if len(outputs) == 1 else outputs
        options = Options(eps, axis, zero_centered, out_dtype)
        given = Given(x, weight, bias, inputs)
        adapter = _adapter_of(x)
        if adapter is not None:
            outputs = adapter(self, given, options)
        else:
            outputs = self._forward(given, options, statistics=False).outputs
        return outputs[0] if len(outputs) == 1 else outputs

    def forward(
        self,
        /,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        eps: float | None = None,
        axis: Axis = None,
        zero_centered: bool = False,
        out_dtype: Any = None,
        **inputs: Any,
    ) -> FusedForward:
        """Compute the norm, and return what `backward` needs. The arguments are those of a call."""
        given, options = (
            Given(x, weight, bias, inputs),
            Options(eps, axis, zero_centered, out_dtype),
        )
        told = (True, *options, tuple(inputs))
        found = self._again((x, weight, bias, *inputs.values()), told)
        if found is not None:
            outputs, mean, rstd = found
            return FusedForward(outputs[0], outputs, mean, rstd, given, options, self)
        return self._forward(given, options, statistics=True)

    def _again(self, arrays: tuple[Any, ...], told: tuple[Any, ...], outputs: int = 0) -> Any:
        """Return what an earlier call on CuPy arrays like these would, None if there was none."""
        if type(arrays[0]).__module__ != "cupy":
            return None
        return _launched().again(_memory(), self, arrays, told, outputs)

    def _forward(self, given: Given, options: Options, *, statistics: bool) -> FusedForward:
        """Compute the norm of arrays of NumPy, of CuPy or by DLPack."""
        family, taken, compute = self.taken(given, options)
        tools = _tools_of(taken.x)
        dtypes = self.dtypes_of_outputs(taken.x.dtype, options.out_dtype)
        found = None
        if tools.memory is not None:
            told = options, compute, dtypes
            by_kernels = _launched().forward
            found = by_kernels(tools.memory, self, taken, *told, statistics=statistics)
        if found is None:
            with np.errstate(all="ignore"):
                outputs, mean, rstd = self.apply(tools, taken, options, compute, dtypes)
            mean, rstd = (None if s is None else tools.cast(s, compute) for s in (mean, rstd))
        else:
            outputs, mean, rstd = found
        results = tuple(map(family.give, outputs))
        mean, rstd = map(family.give_present, (mean, rstd))
        return FusedForward(results[0], results, mean, rstd, given, options, self)

    def backward(self, dy: Any, forward: FusedForward) -> Any:
        """Compute the gradients.

        Parameters
        ----------
        dy : array, or sequence of arrays
            The gradient of each output, in their order. None stands for 0.
        forward : FusedForward
            What `forward` returned. The norm is computed again from the arguments that it holds, so
            these must not have changed.

        Returns
        -------
        named tuple
            ``dx``, ``dweight``, ``dbias``, and for each input its name behind a ``d``, such as
            ``dz``. Each has the shape and dtype of its argument, and is None if that was not
            given, or is a number or of bools. Sums go in a fixed order.

        Raises
        ------
        TypeError, ValueError
            If dy does not fit the outputs, or forward is another object, or of another norm.
        """
        self.check_own(forward)
        given, options = forward.given, forward.options
        x, weight, bias, inputs = given
        of = dy if isinstance(dy, tuple | list) else (dy,)
        arrays = (x, weight, bias, *inputs.values(), forward.mean, forward.rstd, *of)
        found = self._again(arrays, ("backward", *options, tuple(inputs)), len(of))
        if found is not None:
            return found
        family, taken, compute = self.taken(given, options)
        tools = _tools_of(taken.x)
        dtypes = self.dtypes_of_outputs(taken.x.dtype, options.out_dtype)
        of_outputs = self.taken_gradients(family, dy, taken.x)
        found = None
        if tools.memory is not None:
            kept = (None if s is None else family.take("forward", s) for s in forward[2:4])
            found = _launched().backward(
                *(tools.memory, self, taken, options, compute, dtypes, of_outputs), *kept
            )
        if found is None:
            made = self._gradients_by_steps(tools, taken, options, compute, dtypes, of_outputs)
            found = (made.get(name) for name in ("x", "weight", "bias", *self.inputs))
        return self.class_of_gradients(*map(family.give_present, found))

    def kernel_source(
        self,
        /,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        backward: bool = False,
        architecture: int = 90,
        eps: float | None = None,
        axis: Axis = None,
        zero_centered: bool = False,
        out_dtype: Any = None,
        **inputs: Any,
    ) -> dict[str, str]:
        """Return the CUDA C++ that a call compiles and runs, to be read; it needs no GPU.

        Parameters
        ----------
        x, weight, bias, eps, axis, zero_centered, out_dtype, **inputs
            As for a call. Only the shapes and dtypes of arrays count. They are assumed to be
            contiguous and aligned.
        backward : bool
            Whether to return the kernels of the backward pass, for gradients of the outputs'
            dtypes.
        architecture : int
            The compute capability of the GPU, 90 for 9.0.

        Returns
        -------
        dict of str to str
            By the names of the kernels, in the order of their launches. In each text the steps of
            the prologue and the epilogue are in the struct ``Op`` at the end. It is empty if no
            kernel serves the call, and the steps are operations of the framework.

        Raises
        ------
        TypeError, ValueError
            As for a call.

        Examples
        --------
        >>> import numpy as np
        >>> import cupynorm
        >>> softcap = cupynorm.fuse("rms_norm", epilogue=lambda y: 30 * cupynorm.math.tanh(y / 30))
        >>> sources = softcap.kernel_source(np.ones((8, 1024), np.float32))
        >>> [line.strip() for line in sources["fused_forward"].splitlines() if "tangent(v" in line]
        ['const T v3 = hyperbolic_tangent(v2);']
        """
        options = Options(eps, axis, zero_centered, out_dtype)
        given = Given(x, weight, bias, inputs)
        self.check_names(given)
        for name, array in (("x", x), ("weight", weight), ("bias", bias), *inputs.items()):
            is_number = name in inputs and _arrays.is_number(array)
            if not (array is None or hasattr(array, "dtype") or is_number):
                _arrays.family_of(name, array)  # says what it must be
        from cupynorm._warmup import LEAST_COMPUTE_CAPABILITY

        if not isinstance(backward, bool):
            raise TypeError(f"backward must be True or False, got {backward!r}")
        if not isinstance(architecture, int) or architecture < LEAST_COMPUTE_CAPABILITY:
            raise ValueError(
                "architecture must be a compute capability of at least "
                f"{LEAST_COMPUTE_CAPABILITY}, such as 90; got {architecture!r}"
            )
        compute = self.check(given, options)
        dtypes = self.dtypes_of_outputs(x.dtype, out_dtype)
        told = options, compute, dtypes
        from cupynorm._fused_calls import sources

        return sources(self, given, *told, backward=backward, architecture=architecture)

    # ---- steps, on the arrays of any framework ----

    def apply(
        self, tools: Tools, given: Given, options: Options, compute: str, dtypes: Sequence[str]
    ) -> tuple[tuple[Any, ...], Any, Any]:
        """Return the outputs, of these dtypes, and the statistics."""
        wide, _, stored, (y, mean, rstd) = self._normalized(tools, given, options, compute, dtypes)
        results = _evaluate(tools, self.epilogue, wide | {"y": y}, y)
        outputs = _outputs(tools, results, self.epilogue.copies(), y, dtypes)
        return (*outputs, *stored), mean, rstd

    def _normalized(
        self, tools: Tools, given: Given, options: Options, compute: str, dtypes: Sequence[str]
    ) -> tuple[dict[str, Any], Any, list[Any], tuple[Any, Any, Any]]:
        """Return x and inputs in the compute dtype, the value, what is stored, and its norm."""
        x = tools.widen(given.x, compute)
        wide = {"x": x} | {
            name: tools.number(array, x)
            if _arrays.is_number(array)
            else tools.widen(array, compute)
            for name, array in given.inputs.items()
        }
        first, *others = _evaluate(tools, self.prologue, wide, x)
        of_stored, copies = dtypes[len(self.epilogue.results) :], self.prologue.copies()
        stored = _outputs(tools, others, copies[1:], x, of_stored)
        value = tools.widen(tools.broadcast(first, x), compute)
        of_value, *of_others = self.prologue.results
        if of_value in of_others:  # what is normalized is what a reader of the output sees
            value = tools.stored(value, of_stored[of_others.index(of_value)])
        normalized = tools.normalize(
            self.norm, value, given.weight, given.bias, **self._of_norm(options)
        )
        return wide, value, stored, normalized

    def gradients_of_elements(
        self,
        tools: Tools,
        given: Given,
        options: Options,
        compute: str,
        dtypes: Sequence[str],
        of_outputs: Sequence[Any],
    ) -> dict[str, Any]:
        """Return gradients by name; those of x and inputs are not yet summed to their shapes."""
        wide, value, _, (y, mean, rstd) = self._normalized(tools, given, options, compute, dtypes)
        wide_of = [None if of is None else tools.widen(of, compute) for of in of_outputs]
        count = len(self.epilogue.results)
        without = {
            name
            for name, array in given.inputs.items()
            if _arrays.is_number(array) or dtype_name(array.dtype) == "bool"
        }
        found = _pulled_back(tools, self.epilogue, wide | {"y": y}, wide_of[:count], without)
        of_y = tools.widen(tools.broadcast(found.pop("y"), value), compute)
        assert tools.differentiate is not None  # noqa: S101 - else autograd does it
        of_value, of_weight, of_bias = tools.differentiate(
            *(self.norm, of_y, value, given.weight, given.bias, mean, rstd),
            **self._of_norm(options),
        )
        before = _pulled_back(tools, self.prologue, wide, [of_value, *wide_of[count:]], without)
        for name, gradient in before.items():
            found[name] = found[name] + gradient if name in found else gradient
        return found | {"weight": of_weight, "bias": of_bias}

    def _gradients_by_steps(
        self, tools: Tools, taken: Given, options: Options, compute: str, *others: Any
    ) -> dict[str, Any]:
        """Return gradients by name, of NumPy or CuPy arrays, by operations of their framework."""
        with np.errstate(all="ignore"):
            found = self.gradients_of_elements(tools, taken, options, compute, *others)
            for name, array in (("x", taken.x), *taken.inputs.items()):
                if name in found:
                    whole = tools.widen(tools.broadcast(found[name], taken.x), compute)
                    assert tools.sum_to_shape is not None  # noqa: S101 - of NumPy and CuPy
                    summed = tools.sum_to_shape(whole, array.shape)
                    found[name] = tools.cast(summed, dtype_name(array.dtype))
        return found

    def eps(self, options: Options) -> float:
        """Return what a call adds to the variance or mean square."""
        return EPS[self.norm] if options.eps is None else options.eps

    def _of_norm(self, options: Options) -> dict[str, Any]:
        return {
            "eps": self.eps(options),
            "axis": options.axis,
            "zero_centered": options.zero_centered,
        }

    # ---- checks ----

    def check_names(self, given: Given) -> None:
        """Check that a call has each input, and no other."""
        missing = [name for name in self.inputs if given.inputs.get(name) is None]
        unknown = [name for name in given.inputs if name not in self.inputs]
        if missing or unknown:
            expected = ", ".join(self.inputs) or "none"
            absent = [
                f"{name} is None" if name in given.inputs else f"{name} is missing: give it by name"
                for name in missing
            ]
            fault = (absent or [f"got {name}" for name in unknown])[0]
            raise TypeError(f"the inputs of {self!r} are {expected}, but {fault}")

    def check(self, given: Given, options: Options) -> str:
        """Check a call, but not the types and devices of its arrays. Return the compute dtype."""
        axes = _checks.normalized_axes(given.x.ndim, options.axis)
        dtypes = {}
        named = {"x": given.x, "weight": given.weight, "bias": given.bias, **given.inputs}
        for name, array in named.items():
            if array is None:
                continue
            if name in given.inputs and _arrays.is_number(array):
                _check_number(name, array)
                continue
            allowed = _INPUTS if name in given.inputs else _arrays.FLOATS
            dtypes[name] = dtype_name(array.dtype)
            if dtypes[name] not in allowed:
                *others, last = allowed
                expected = f"{', '.join(others)} or {last}"
                raise TypeError(f"{name}.dtype must be {expected}, got {array.dtype}")
            shape, x_shape = tuple(array.shape), tuple(given.x.shape)
            if name not in given.inputs:
                _checks.check_vector(name, shape, x_shape, axes)
            elif not _checks.broadcasts(shape, x_shape):
                raise ValueError(f"{name} must broadcast to x's shape, {x_shape}; got {shape}")
        _checks.check_zero_centered(options.zero_centered, has_weight=given.weight is not None)
        wide = any(dtypes[name] == "float64" for name in ("x", *given.inputs) if name in dtypes)
        compute = "float64" if wide else "float32"
        _checks.check_numbers(np.dtype(compute), self.eps(options), None)
        return compute

    def dtypes_of_outputs(self, of_x: Any, out_dtype: Any) -> tuple[str, ...]:
        """Return the names of the outputs' dtypes, from that of x and what was asked for."""
        asked = out_dtype if isinstance(out_dtype, tuple | list) else (out_dtype,) * self.count
        if len(asked) != self.count:
            raise ValueError(
                f"out_dtype must be a dtype or {self.count} of them, one for each output; got "
                f"{len(asked)}"
            )
        return tuple(_float_name("out_dtype", of_x if dtype is None else dtype) for dtype in asked)

    def check_own(self, forward: Any) -> None:
        """Check that it is what this norm's forward returned."""
        if not isinstance(forward, FusedForward):
            raise TypeError(
                f"forward must be what this norm's forward returned, got {kind_of(forward)}"
            )
        if forward.norm is not self and forward.norm != self:
            raise ValueError(
                f"forward must be what this norm's forward returned, got that of {forward.norm}"
            )

    def taken(self, given: Given, options: Options) -> tuple[Any, Given, str]:
        """Return a call's family, its arrays as NumPy or CuPy arrays, and the compute dtype."""
        self.check_names(given)
        named = {"x": given.x, "weight": given.weight, "bias": given.bias, **given.inputs}
        for name, array in named.items():
            if _arrays.is_traced(array):
                raise TypeError(
                    f"{name} must not be traced by JAX: call the norm itself, which JAX "
                    f"differentiates; got {kind_of(array)}"
                )
        family = _arrays.family_of("x", given.x).with_device_of(given.x)

        def take(name: str, array: Any, dtypes: tuple[str, ...] = _arrays.FLOATS) -> Any:
            return array if array is None else family.take(name, array, dtypes=dtypes)

        def take_input(name: str, array: Any) -> Any:
            if _arrays.is_number(array):
                return array
            family.check_type(name, array, besides="a number or ")
            return take(name, array, _INPUTS)

        taken = Given(
            take("x", given.x),
            take("weight", given.weight),
            take("bias", given.bias),
            {name: take_input(name, array) for name, array in given.inputs.items()},
        )
        compute = self.check(taken, options)
        for name, array in taken.inputs.items():
            if not _arrays.is_number(array):
                _checks.check_device(name, array, taken.x)
        return family, taken, compute

    def taken_gradients(self, family: Any, dy: Any, x: Any) -> list[Any]:
        """Return the gradients of the outputs as NumPy or CuPy arrays, None for those of 0."""
        given = list(dy) if isinstance(dy, tuple | list) else [dy]
        if len(given) != self.count or all(of is None for of in given):
            raise ValueError(
                f"dy must have a gradient for each of {self.count} outputs, not all of them None; "
                f"got {len(given)}, of which {sum(of is None for of in given)} are None"
            )
        taken = [None if of is None else family.take("dy", of) for of in given]
        for of in taken:
            if of is not None:
                _checks.to_dtype("dy.dtype", of.dtype)
                _checks.check_device("dy", of, x)
                if of.shape != x.shape:
                    raise ValueError(f"dy must have shape {x.shape}, got {of.shape}")
        return taken


_PLAIN, _IDENTITY = Program(("x",), (), (0,)), Program(("y",), (), (0,))


def fuse(
    norm: Norm,
    *,
    prologue: Callable[..., Any] | None = None,
    epilogue: Callable[..., Any] | None = None,
) -> Fused:
    """Make a norm of your own, with its gradient, from what it computes on the way in and out.

    The functions are called once, with stand-ins for an element of each array, and must return
    expressions of these. They may use ``+ - * / **``, comparisons, numbers and the functions of
    `cupynorm.math`.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        The norm in between, with its weight and bias.
    prologue : callable, optional
        Takes x, and inputs by names of your choice. Returns the value to normalize, or a tuple of
        that and further outputs. If an output is the value itself, it is rounded first, and what is
        normalized is what the first such output holds. So
        ``lambda x, residual: (x + residual, x + residual)`` does what the residual of `rms_norm`
        does.
    epilogue : callable, optional
        Takes y, which is normalized, scaled and shifted, and inputs. One of these may be called x:
        it is the x of the call. Others may be the prologue's. Returns an output, or a tuple of
        outputs.

    Returns
    -------
    Fused
        A function of ``x, weight=None, bias=None``, with the inputs by name.

    Raises
    ------
    TypeError
        If a function cannot be traced: it branches on a value, calls what is not in
        `cupynorm.math`, or writes to an argument. The message names the line, and what to write.
    ValueError
        If norm is another, or an input has a name that has a meaning already.

    See Also
    --------
    cupynorm.fused : norms of this kind that models use.

    Examples
    --------
    >>> import numpy as np
    >>> import cupynorm
    >>> gated = cupynorm.fuse("rms_norm", epilogue=lambda y, z: y * cupynorm.math.silu(z))
    >>> gated
    cupynorm.fuse('rms_norm', epilogue=lambda y, z: y * (z * sigmoid(z)))
    >>> x, z = np.array([[3.0, -4.0]]), np.array([[0.0, 1.0]])
    >>> gated(x, z=z).round(3)
    array([[ 0.   , -0.827]])
    >>> forward = gated.forward(x, z=z)
    >>> gated.backward(np.ones_like(x), forward).dz.round(3)
    array([[ 0.424, -1.05 ]])
    """
    _checks.check_norm(norm)
    before = _PLAIN if prologue is None else trace("prologue", prologue, "x")
    after = _IDENTITY if epilogue is None else trace("epilogue", epilogue, "y")
    for name in (*before.arguments[1:], *after.arguments[1:]):
        if keyword.iskeyword(f"d{name}"):
            raise ValueError(f"an input must not be called {name}: its gradient would be d{name}")
        if name in _NOT_NAMES:
            raise ValueError(f"an input must not be called {name}, which has a meaning already")
    return Fused(norm, before, after)


# ---- expressions on arrays -----------------------------------------------------------------------


def _evaluate(tools: Tools, program: Program, arrays: Mapping[str, Any], like: Any) -> list[Any]:
    return program.evaluate(tools, like, [arrays[name] for name in program.arguments])


def _outputs(
    tools: Tools, results: Sequence[Any], copies: Sequence[bool], like: Any, dtypes: Sequence[str]
) -> list[Any]:
    """Return results in the shape of an array and in these dtypes, as arrays of their own."""
    outputs = (
        tools.cast(tools.broadcast(result, like), dtype)
        for result, dtype in zip(results, dtypes, strict=False)
    )
    return [tools.copy(o) if again else o for o, again in zip(outputs, copies, strict=True)]


def _pulled_back(
    tools: Tools,
    program: Program,
    arrays: Mapping[str, Any],
    of_results: Sequence[Any],
    without: set[str],
) -> dict[str, Any]:
    """Return the gradients of the arguments, some left out, from those of the results."""
    given = {f"_{i}": of for i, of in enumerate(of_results) if of is not None}
    wanted = tuple(name for name in program.arguments if name not in without)
    found = gradients(program, tuple(given), wanted)
    like = next(iter(arrays.values()))
    return dict(zip(wanted, _evaluate(tools, found, {**arrays, **given}, like), strict=True))


@functools.cache
def _gradients_of(inputs: tuple[str, ...]) -> Any:
    """Return the class of what a backward pass returns, which has a field for each input."""
    made: Any = collections.namedtuple(  # type: ignore[misc]  # its fields vary
        "FusedBackward", ["dx", "dweight", "dbias", *(f"d{name}" for name in inputs)]
    )

    class FusedBackward(made):
        __slots__ = ()

        def __reduce__(self) -> Any:
            return _backward_of, (inputs, tuple(self))

    return FusedBackward


def _backward_of(inputs: tuple[str, ...], gradients: tuple[Any, ...]) -> Any:
    return _gradients_of(inputs)(*gradients)


# ---- tools ---------------------------------------------------------------------------------------


def _check_number(name: str, value: Any) -> None:
    try:
        float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be in the range of float64, got {reprlib.repr(value)}"
        ) from None


def _adapter_of(x: Any) -> Any:
    """Return what differentiates and traces calls on arrays of x's framework, if there is such."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(x, torch.Tensor):
        from cupynorm.torch import _fuse as of_torch

        return of_torch.call
    if jax is not None and isinstance(x, jax.Array):
        from cupynorm.jax import _fuse as of_jax

        return of_jax.call
    return None


def _float_name(name: str, dtype: Any) -> str:
    """Return the name of one of the four dtypes."""
    found = dtype_name(dtype)  # torch.compile can trace this, but not NumPy's dtypes
    return found if found in _arrays.FLOATS else _arrays.DTYPES[_checks.to_dtype(name, dtype)]


def _normalize(norm: Norm, *arrays: Any, **options: Any) -> tuple[Any, Any, Any]:
    result = getattr(norms, f"{norm}_forward")(*arrays, **options)
    return result.y, result.mean, result.rstd


def _differentiate(
    norm: Norm, dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, **options: Any
) -> tuple[Any, Any, Any]:
    statistics = (rstd,) if norm == "rms_norm" else (mean, rstd)
    options |= {"bias": False if bias is None else bias}
    del options["eps"]
    found = getattr(norms, f"{norm}_backward")(dy, x, weight, *statistics, **options)
    return found.dx, found.dweight, found.dbias


@functools.cache
def _launched() -> Any:
    """Return the module of the kernels, which needs CuPy."""
    check_not_forked()
    from cupynorm import _fused_calls

    return _fused_calls


if hasattr(os, "register_at_fork"):  # calls that the parent made would be made again
    os.register_at_fork(after_in_child=_launched.cache_clear)


@functools.cache
def _memory() -> Any:
    """Return CuPy's arrays, as kernels take them."""
    from cupynorm._fused_arrays import CuPyMemory

    return CuPyMemory()


def _tools_of(x: Any) -> Tools:
    return NUMPY_TOOLS if _arrays.is_numpy(x) else _cupy()


NUMPY_TOOLS = Tools(
    of_numpy(),
    widen=lambda array, _: array.astype(np.float64),
    cast=lambda values, dtype: reference.round_once(np.asarray(values), _arrays.to_numpy(dtype)),
    copy=lambda array: array,  # a cast makes one
    number=lambda value, _: np.float64(float(value)),
    broadcast=lambda values, like: np.ascontiguousarray(np.broadcast_to(values, like.shape)),
    stored=lambda values, dtype: reference.round_once(values, _arrays.to_numpy(dtype)).astype(
        np.float64
    ),
    normalize=_normalize,
    differentiate=_differentiate,
    sum_to_shape=reference.sum_to_shape,
)


@functools.cache
def _cupy() -> Tools:
    import cupy
    from cupyx.scipy import special

    return Tools(
        functions(cupy, erf=special.erf, erfc=special.erfc),
        widen=_arrays.widened,
        cast=functools.partial(_arrays.rounded, cupy),
        copy=lambda array: array.copy(),
        number=lambda value, like: cupy.full((), float(value), like.dtype),
        broadcast=lambda values, like: cupy.ascontiguousarray(
            cupy.broadcast_to(cupy.asarray(values), like.shape)
        ),
        stored=lambda values, dtype: _arrays.widened(
            _arrays.rounded(cupy, values, dtype), values.dtype.name
        ),
        normalize=_normalize,
        differentiate=_differentiate,
        sum_to_shape=_arrays.sum_to_shape,
        memory=_memory(),
    )
