"""Before the first call: what is supported here, compiling it ahead, and its source to read."""

from __future__ import annotations

import itertools
import numbers
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from cupynorm._arrays import DTYPES
from cupynorm._checks import check_norm, check_zero_centered, to_dtype
from cupynorm._compile import backward_instantiations, forward_instantiation
from cupynorm._environment import gpu_problem
from cupynorm._layout import (
    BackwardConfig,
    backward_config,
    few_rows_backward_configs,
    few_rows_configs,
    forward_config,
    pack_length,
    quantized_config,
)
from cupynorm._operation import BackwardSpec, ForwardSpec, Int, Norm, Options, Spec
from cupynorm._quantize import Quantize, check_quantize, dtype_of_y, pass_of_kernel

__all__ = ["kernel_source", "supports", "warmup"]

LEAST_COMPUTE_CAPABILITY = 75
# The target of sources if there is no GPU: an H100 or H200.
USUAL_ARCHITECTURE, USUAL_MULTIPROCESSORS = 90, 132


def supports(
    norm: Norm,
    n: Int | Iterable[Int],
    x_dtype: Any,
    weight_dtype: Any = None,
    bias_dtype: Any = None,
    *,
    dy_dtype: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    gradient_dtype: Any = None,
    accumulate: bool = False,
    zero_centered: bool = False,
    relu: bool = False,
    quantize: Quantize | None = None,
    backward: bool = True,
) -> str | None:
    """Say why GPU arrays of these dtypes and widths are not supported here, or return None.

    NumPy arrays of the four dtypes are supported everywhere.

    Parameters
    ----------
    norm, n, x_dtype, weight_dtype, bias_dtype, dy_dtype, out_dtype, residual_dtype, \
gradient_dtype, accumulate, zero_centered, relu, quantize, backward
        As for `warmup`.

    Returns
    -------
    str or None
        The reason. It names the argument, or what the machine lacks.

    Examples
    --------
    >>> import cupynorm
    >>> cupynorm.supports("rms_norm", 4096, "int8")
    'x_dtype must be float64, float32, float16 or bfloat16, got int8'
    """
    try:
        _specs(locals())
        _widths(n)
    except (TypeError, ValueError) as error:
        return str(error)
    return _device_problem()


def warmup(
    norm: Norm,
    n: Int | Iterable[Int],
    x_dtype: Any,
    weight_dtype: Any = None,
    bias_dtype: Any = None,
    *,
    dy_dtype: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    gradient_dtype: Any = None,
    accumulate: bool = False,
    zero_centered: bool = False,
    relu: bool = False,
    quantize: Quantize | None = None,
    backward: bool = True,
) -> None:
    """Compile and load, on the current GPU, what later calls on any number of rows will launch.

    A first call compiles its kernels, some tenths of a second each, unless CuPy's disk cache has
    them. A call that is captured into a CUDA graph must find them loaded. Arrays are assumed to be
    aligned to 16 bytes, and so are rows if n allows it. Others have kernels of their own, which
    only such a call loads.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        Which norm.
    n : int or iterable of int
        Elements of a row, the product of the normalized axes, or several such widths. Not a shape.
    x_dtype : dtype
        The dtype of x and dx; float64, float32, float16 or bfloat16.
    weight_dtype, bias_dtype : dtype, optional
        The dtypes of weight and bias and of their gradients; None if there is none. The backward
        functions' defaults are warmed too: for LayerNorm, a gradient of the bias in the weight's
        dtype.
    dy_dtype, out_dtype : dtype, optional
        The dtypes of dy and y; by default x's.
    residual_dtype : dtype, optional
        The dtype of the residual, of its sum with x and of their gradients, if there is a residual.
    gradient_dtype : dtype, optional
        The dtype of the arrays that backward is given for dweight and dbias, if it is given any.
    accumulate : bool
        Whether backward adds to these.
    zero_centered : bool
        As for `rms_norm`.
    relu : bool
        Whether y is clamped, and backward is given the bitmask. The bounds do not matter.
    quantize : Quantize, optional
        As for `rms_norm`, if y is quantized. The value of a scale and its bounds do not matter.
        Where no kernel quantizes y, the norm's kernel is compiled that writes it. The operations of
        CuPy or torch that follow are then loaded by the first call alone.
    backward : bool
        Whether the forward that keeps its statistics and the backward are wanted too.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.
    RuntimeError
        If no GPU can be used, the current one is older than compute capability 7.5, or CuPy cannot
        write the cache of its kernels.

    Examples
    --------
    >>> import cupynorm
    >>> cupynorm.warmup("layer_norm", [768, 4096], "bfloat16", "float32")  # doctest: +SKIP
    """
    specs, widths = _specs(locals()), _widths(n)
    problem = _device_problem()
    if problem:
        raise RuntimeError(f"cupynorm cannot compile for a GPU here: {problem}")
    import cupy

    from cupynorm import _background
    from cupynorm._plans import (
        architecture,
        backward_plan,
        few_rows,
        few_rows_backward,
        forward_plan,
        kernels_of,
    )

    device = cupy.cuda.Device().id
    passes = [
        (width, _quantized(spec, quantize, width, architecture(device)))
        for width, spec in itertools.product(widths, specs)
    ]
    for (width, spec), dx_given in itertools.product(passes, (False, True)):
        kernels = kernels_of(spec, width, _vector(spec, width), device, dx_given=dx_given)
        _background.start(kernels, device)
    for width, spec in passes:
        vector = _vector(spec, width)
        # One row, or a few, may have kernels of their own.
        if isinstance(spec, ForwardSpec):
            few = (most for most, _ in few_rows(spec, width, vector, device))
            for m in (*few, sys.maxsize):
                forward_plan(spec, m, width, vector, device)
        else:
            for dx_given in (False, True):
                tiers = few_rows_backward(spec, width, vector, device, dx_given)
                for m in (*(most for most, _ in tiers), sys.maxsize):
                    backward_plan(spec, m, width, vector, device, dx_given=dx_given)


def kernel_source(
    norm: Norm,
    n: int,
    x_dtype: Any,
    weight_dtype: Any = None,
    bias_dtype: Any = None,
    *,
    dy_dtype: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    gradient_dtype: Any = None,
    accumulate: bool = False,
    zero_centered: bool = False,
    relu: bool = False,
    quantize: Quantize | None = None,
    backward: bool = False,
    statistics: bool = False,
    rows: int | None = None,
    architecture: int | None = None,
) -> dict[str, str]:
    """Return the CUDA C++ that a call compiles and runs, to be read; it needs no GPU.

    Parameters
    ----------
    norm : {"rms_norm", "layer_norm"}
        Which norm.
    n : int
        Elements of a row, the product of the normalized axes.
    x_dtype, weight_dtype, bias_dtype, dy_dtype, out_dtype, residual_dtype, gradient_dtype, \
accumulate, zero_centered, relu, quantize
        As for `warmup`. Arrays are assumed to be aligned as there.
    backward : bool
        Whether to return the kernels of the backward pass, not of the forward pass. They have the
        gradients that it returns by default and, with a bias_dtype, that of a bias of this dtype.
    statistics : bool
        Whether the forward pass keeps what backward needs: `rms_norm_forward`, not `rms_norm`.
    rows : int, optional
        How many rows, since few of them may have kernels of their own. By default many.
    architecture : int, optional
        The compute capability of the GPU, 90 for 9.0. By default the current GPU's or, without one,
        90. Which rows are few depends on the current GPU's multiprocessors, or else on 132.

    Returns
    -------
    dict of str to str
        By the names of the kernels, in the order of their launches: one of a forward pass, one to
        three of a backward pass. Each text is complete: the templates, then the structs `Op` and
        `Layout`. The kernel is `name<Op, Layout>`. The first line has the flags that its bits
        depend on.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit.

    Examples
    --------
    >>> import cupynorm
    >>> sources = cupynorm.kernel_source(
    ...     "rms_norm", 4096, "bfloat16", "float32", backward=True, architecture=90
    ... )
    >>> list(sources)
    ['norm_backward_pipelined', 'reduce_partials']
    >>> "struct Op {" in sources["reduce_partials"]
    True
    """
    asked = locals()
    if not isinstance(n, numbers.Integral) or isinstance(n, bool):
        raise TypeError(f"n must be an int, got {n!r}")
    (width,) = _widths(n)
    specs = _specs(asked)
    _check_flag("statistics", statistics)
    if backward and statistics:
        raise ValueError("statistics must be False for a backward pass, got True")
    m = _at_least("rows", rows, 1, sys.maxsize)
    usual_architecture, multiprocessors = _current_gpu()
    capability = _at_least(
        "architecture", architecture, LEAST_COMPUTE_CAPABILITY, usual_architecture
    )
    if backward:
        backwards = [spec for spec in specs if isinstance(spec, BackwardSpec)]
        of_dy = backwards[0 if bias_dtype is None else -1]
        config: BackwardConfig = backward_config(of_dy, width, _vector(of_dy, width), capability)
        tiers = few_rows_backward_configs(of_dy, config, capability, multiprocessors)
        config = next((few for most, few in tiers if m <= most), config)
        kernels = backward_instantiations(of_dy, config)
    else:
        forward = next(spec for spec in specs if isinstance(spec, ForwardSpec))
        forward = replace(forward, store_statistics=bool(statistics))
        forward = _quantized(forward, quantize, width, capability)
        layout = forward_config(forward, width, _vector(forward, width), capability)
        fewer = few_rows_configs(forward, layout, width, capability, multiprocessors)
        layout = next((few for most, few in fewer if m <= most), layout)
        kernels = (forward_instantiation(forward, layout),)
    return {kernel.name: kernel.source() for kernel in kernels}


def _quantized(spec: Spec, quantize: Quantize | None, n: int, capability: int) -> Spec:
    """Return the pass over rows of n elements that quantizes y itself, if that is wanted.

    If it is a forward pass, and there is a kernel for it; else the pass itself.
    """
    if quantize is None or not isinstance(spec, ForwardSpec):
        return spec
    quantized, _ = pass_of_kernel(spec, Options(spec.norm, 1), quantize.told, n)
    is_there = quantized_config(quantized, n, _vector(spec, n), capability) is not None
    return quantized if is_there else spec


def _vector(spec: Spec, n: int) -> int:
    """Return the elements of an access, if arrays are aligned and rows lie one after the other."""
    divisors = n | pack_length(spec.x)
    return divisors & -divisors


def _at_least(name: str, value: Any, least: int, default: int) -> int:
    """Return an argument that must be None, for the default, or an int of at least so many."""
    if value is None:
        return default
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int or None, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def _current_gpu() -> tuple[int, int]:
    """Return the compute capability and the multiprocessors of the current GPU, or the usual."""
    if _device_problem():
        return USUAL_ARCHITECTURE, USUAL_MULTIPROCESSORS
    import cupy

    device = cupy.cuda.Device()
    return int(device.compute_capability), int(device.attributes["MultiProcessorCount"])


# The arrays of a training step, and `warmup`'s names for their dtypes.
_DTYPES_ASKED = {
    "x": "x_dtype",
    "weight": "weight_dtype",
    "bias": "bias_dtype",
    "y": "out_dtype",
    "dy": "dy_dtype",
    "residual": "residual_dtype",
    "gradient": "gradient_dtype",
}


def _specs(asked: dict[str, Any]) -> list[Spec]:
    """Return the specs of a training step, or of inference, from the arguments of `warmup`."""
    norm, backward, relu = asked["norm"], asked["backward"], asked["relu"]
    check_norm(norm)
    dtypes: dict[str, str | None] = {}
    for array, name in _DTYPES_ASKED.items():
        is_absent = asked[name] is None and array != "x"
        dtypes[array] = None if is_absent else DTYPES[to_dtype(name, asked[name])]
    x, weight, residual = dtypes["x"], dtypes["weight"], dtypes["residual"]
    for name in ("zero_centered", "relu", "backward", "accumulate"):
        _check_flag(name, asked[name])
    quantize = asked["quantize"]
    if quantize is not None:
        check_quantize(quantize, asked["out_dtype"])
        like = np.empty(0, to_dtype("x_dtype", asked["x_dtype"]))
        dtypes["y"] = dtype_of_y(quantize, like, residual or x)
    gradient, accumulate = dtypes.pop("gradient"), bool(asked["accumulate"])
    if accumulate and gradient is None:
        raise ValueError("accumulate must be False without a gradient_dtype, got True")
    check_zero_centered(asked["zero_centered"], has_weight=weight is not None)
    bounds = (0.0, 0.0) if relu else None
    options = Options(norm, 1, zero_centered=bool(asked["zero_centered"]), relu=bounds)
    specs: list[Spec] = [ForwardSpec.of(options, dtypes)]
    if backward:
        specs.append(ForwardSpec.of(replace(options, training=True), dtypes))
        read = {"x": residual or x, "dy": dtypes["dy"] or x, "weight": weight}
        read |= {"dresidual_out": residual, "bitmask": "uint8" if relu else None}
        # Backward returns this by default: LayerNorm's has a dbias in the weight's dtype.
        default = (weight or x) if norm == "layer_norm" else None
        of_bias = (dbias and (gradient or dbias) for dbias in (default, dtypes["bias"]))
        given = replace(options, sums_given=gradient is not None, accumulate=accumulate)
        for dbias in dict.fromkeys(of_bias):
            written = {"dx": x, "dbias": dbias, "dresidual": residual}
            written["dweight"] = weight and (gradient or weight)
            specs.append(BackwardSpec.of(given, read | written))
    return specs


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _widths(n: Any) -> list[int]:
    # An array of no axes is iterable by its type alone.
    several = isinstance(n, Iterable) and not isinstance(n, str | bytes)
    widths = list(n) if several and getattr(n, "ndim", 1) != 0 else [n]
    for width in widths:
        if not isinstance(width, numbers.Integral) or isinstance(width, bool):
            raise TypeError(f"n must be an int or an iterable of ints, got {width!r}")
        if width < 1:
            raise ValueError(f"n must be at least 1, got {width}")
    return [int(width) for width in widths]


def _device_problem() -> str | None:
    problem = gpu_problem()
    if problem:
        return problem
    import cupy

    device = cupy.cuda.Device()
    if int(device.compute_capability) < LEAST_COMPUTE_CAPABILITY:
        return (
            f"GPU {device.id} has compute capability {int(device.compute_capability) / 10}, "
            f"and {LEAST_COMPUTE_CAPABILITY / 10} is the least supported"
        )
    return None
