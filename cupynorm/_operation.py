"""One description of the operation: the arrays and options of each pass.

Each array of a pass has a kind, which gives its shape. It has a dtype from the spec, or is absent.
Checks, keys, allocations, launches and the rules for torch and JAX all come from the tables here.
Nothing here knows sizes, addresses or devices.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cupynorm._groups import Groups

__all__ = [
    "ALWAYS_READ",
    "BACKWARD",
    "CPP_TYPES",
    "EPS",
    "FORWARD",
    "ITEMSIZE",
    "KINDS",
    "MOVED_BY_PACKS",
    "QUANTIZED",
    "SUMS",
    "Axis",
    "BackwardSpec",
    "ForwardSpec",
    "Int",
    "Kind",
    "Norm",
    "NormBackward",
    "NormForward",
    "Options",
    "Pass",
    "QuantizedSpec",
    "Relu",
    "Spec",
    "bitmask_bytes",
    "compute_dtype",
    "has_residual",
    "shape_of",
    "shapes_of_results",
    "sharing",
]

Norm = Literal["rms_norm", "layer_norm"]
Relu = tuple[float, float] | None
Int = int | np.integer[Any]
Axis = Int | Sequence[Int] | None
EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}  # the defaults of the public functions

# ---- dtypes --------------------------------------------------------------------------------------

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# The kernels' name of each dtype. An absent operand is None in both languages.
CPP_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "float8_e8m0fnu": "unsigned char",  # a scale, as its bits
    None: "None",
}


def compute_dtype(x: str) -> str:
    """Return the dtype in which rows of x are computed and their statistics stored."""
    return "float64" if x == "float64" else "float32"


# ---- arrays --------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """What an array of a pass holds, and its shape for an x of (*kept, *normalized)."""

    ROWS = "as x, rows one stride apart"
    VECTOR = "broadcasts to x: what the elements of each row are scaled or shifted by"
    STATISTIC = "kept: a number a row"
    BITS = "(*kept, ceil(N / 8)): a bit an element"
    SCALES = (
        "one; or (*kept, 1, ...), one a row; or (*kept, ceil(N / block)): what q is multiplied by"
    )
    NUMBER = "(1,): one of all rows"


KINDS = {
    **dict.fromkeys(("x", "residual", "y", "residual_out"), Kind.ROWS),
    **dict.fromkeys(("dy", "dresidual_out", "dx", "dresidual"), Kind.ROWS),
    **dict.fromkeys(("weight", "bias", "dweight", "dbias"), Kind.VECTOR),
    **dict.fromkeys(("mean", "rstd"), Kind.STATISTIC),
    "bitmask": Kind.BITS,
    "scale": Kind.SCALES,
    "amax": Kind.NUMBER,
}
ALWAYS_READ = frozenset(("x", "dy", "rstd"))  # a pass that reads these always has them

# One access moves several elements of these.
MOVED_BY_PACKS = frozenset((Kind.ROWS, Kind.VECTOR))

# They are sums over rows. A caller's arrays for them are aligned to their elements alone.
SUMS = "dweight", "dbias"


def bitmask_bytes(n: int) -> int:
    """Return the bytes of a row of n bits."""
    return -(-n // 8)


def shape_of(kind: Kind, x_shape: Sequence[Any], k: int) -> tuple[Any, ...]:
    """Return the shape of an array of a kind, for an x whose last k axes are normalized.

    A VECTOR has no such shape: weight and bias have their own, and so have their gradients. Nor
    have SCALES.
    """
    if kind in (Kind.VECTOR, Kind.SCALES):
        raise ValueError("a vector's shape is its own, and so is that of scales")
    kept, normalized = tuple(x_shape[: len(x_shape) - k]), tuple(x_shape[len(x_shape) - k :])
    if kind is Kind.ROWS:
        return kept + normalized
    if kind is Kind.NUMBER:
        return (1,)
    if kind is Kind.BITS:
        return (*kept, bitmask_bytes(math.prod(normalized)))
    return kept


# ---- passes --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pass:
    """The arrays of a pass by name, in the order in which kernels take them."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    dtypes_asked: dict[str, str]  # from an array's name to the option that sets its dtype
    arguments: tuple[str, ...]  # what a caller may give: inputs, and places for outputs
    takes_scratch: bool  # as a launch's last operand, even where none is needed

    @property
    def operands(self) -> tuple[str, ...]:
        """A launch's operands: an address for each array, and then a stride if it has rows."""
        return tuple(
            operand
            for name in self.reads + self.writes
            for operand in ((name, f"{name}_stride") if KINDS[name] is Kind.ROWS else (name,))
        )


_READ_FORWARD = "x", "residual", "weight", "bias"
_READ_BACKWARD = "dy", "x", "dresidual_out", "weight", "mean", "rstd", "bitmask"

FORWARD = Pass(
    "forward",
    reads=_READ_FORWARD,
    writes=("y", "mean", "rstd", "bitmask", "residual_out"),
    dtypes_asked={"y": "out_dtype", "residual_out": "residual_dtype"},
    arguments=(*_READ_FORWARD, "y", "residual_out"),
    takes_scratch=False,
)
QUANTIZED = Pass(  # a forward pass whose y has eight bits an element: `QuantizedSpec`
    "quantized",
    reads=_READ_FORWARD,
    writes=(*FORWARD.writes, "scale", "amax"),
    dtypes_asked=FORWARD.dtypes_asked,
    arguments=(*_READ_FORWARD, "residual_out", "scale"),  # a scale that is given is only read
    takes_scratch=False,
)
BACKWARD = Pass(  # x is the normalized array: the forward's residual_out, if there is one
    "backward",
    reads=_READ_BACKWARD,
    writes=("dx", "dweight", "dbias", "dresidual"),
    dtypes_asked={"dx": "dx_dtype", "dresidual": "dresidual_dtype"},
    # like: the bias, if dbias is to have its shape
    arguments=(*_READ_BACKWARD, "dx", *SUMS, "like"),
    takes_scratch=True,
)


@dataclass(frozen=True)
class Options:
    """What a pass is told in addition to its arrays.

    `k`: how many trailing axes of x are normalized. `training`: the statistics are stored and, with
    relu, the bits. `has_residual`: a backward pass returns dresidual. It is dx if both have one
    dtype. `scale_bounds`: those of the scales that a quantized pass computes. `sums_given`: dweight
    or dbias is written to a caller's array. `accumulate`: it is added to that. `groups`: how rows
    share weight and bias; None if these are one row for all. `order`: the axes of the caller's x in
    the order that they have here, if they were moved.
    """

    norm: Norm
    k: int
    zero_centered: bool = False
    eps: float = 0.0
    relu: Relu = None
    training: bool = False
    has_residual: bool = False
    scale_bounds: tuple[float, float] | None = None
    sums_given: bool = False
    accumulate: bool = False
    groups: Groups | None = None
    order: tuple[int, ...] | None = None

    @property
    def axis(self) -> tuple[int, ...]:
        """The normalized axes, as the public functions take them."""
        return tuple(range(-self.k, 0))

    @property
    def numbers(self) -> tuple[float, float, float]:
        """The numbers for a forward plan: eps and the epilogue's bounds, any if it has none."""
        return (self.eps, *(self.relu or self.scale_bounds or (0.0, 0.0)))


class _Spec:
    """What the specs of both passes derive from their dtypes."""

    table: ClassVar[Pass]

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of each array of the table by its name, None if it is absent."""
        raise NotImplementedError

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the inputs that are present."""
        return _present(self, self.table.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        """The names of the arrays that are written."""
        return _present(self, self.table.writes)


@functools.cache
def _present(spec: _Spec, names: tuple[str, ...]) -> tuple[str, ...]:
    dtypes = spec.dtypes
    return tuple(name for name in names if dtypes[name] is not None)


MOST_ALIKE = 256  # elements: a pack of each thread of a warp


def sharing(groups: Groups | None) -> dict[str, Any]:
    """Return what a spec says of how rows share weight and bias."""
    repeats = 0 if groups is None or groups.repeats == 1 else groups.alike(MOST_ALIKE)
    return {"grouped": groups is not None, "repeats": repeats}


@dataclass(frozen=True)
class ForwardSpec(_Spec):
    """A forward pass to compile. Dtypes are given by name, None for an absent operand.

    `x` is what is normalized. With a residual, that is its sum with the `branch`.
    """

    table: ClassVar[Pass] = FORWARD

    norm: Norm
    x: str
    weight: str | None
    bias: str | None
    y: str
    zero_centered: bool
    store_statistics: bool  # and, with relu, the bitmask
    relu: bool
    branch: str | None = None
    residual: str | None = None
    grouped: bool = False  # as `Options.groups`
    repeats: int = 0  # `Groups.alike` if columns share elements of weight and bias

    @classmethod
    def of(cls, options: Options, dtypes: Mapping[str, str | None]) -> ForwardSpec:
        """Return the spec of a pass with these options, on arrays of these dtypes by name.

        y's dtype is by default x's, and residual_out's is the residual's.
        """
        x, residual = dtypes["x"] or "", dtypes.get("residual")
        return cls(
            norm=options.norm,
            x=(residual and dtypes.get("residual_out")) or residual or x,
            weight=dtypes["weight"],
            bias=dtypes["bias"],
            y=dtypes.get("y") or x,
            zero_centered=options.zero_centered,
            store_statistics=options.training,
            relu=options.relu is not None,
            branch=x if residual else None,
            residual=residual,
            **sharing(options.groups),
        )

    @property
    def returned(self) -> tuple[str, ...]:
        """The names of the results of a function that keeps nothing for backward."""
        return tuple(name for name in self.writes if KINDS[name] is Kind.ROWS)

    @property
    def without_residual(self) -> ForwardSpec:
        """The same pass on the sum. Its results have the same bits."""
        return dataclasses.replace(self, branch=None, residual=None)

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of each array of the table by its name, None if it is absent."""
        statistic = compute_dtype(self.x) if self.store_statistics else None
        return {
            "x": self.branch or self.x,
            "residual": self.residual,
            "weight": self.weight,
            "bias": self.bias,
            "y": self.y,
            "mean": statistic if self.norm == "layer_norm" else None,
            "rstd": statistic,
            "bitmask": "uint8" if self.store_statistics and self.relu else None,
            "residual_out": self.x if self.residual else None,
        }


@dataclass(frozen=True)
class QuantizedSpec(ForwardSpec):
    """A forward pass to compile whose y is quantized.

    The inherited fields are those of a pass that writes y in the dtype that it is rounded to first.
    """

    table: ClassVar[Pass] = QUANTIZED

    q: str = "int8"  # a dtype of eight bits
    scale: str = "float32"
    scale_given: bool = False  # one for all
    scale_columns: int = 0  # that share a scale; 0 if all of a row do
    column_major: bool = False  # whether scales of blocks lie column by column
    amax: bool = False  # whether that is a result

    @property
    def of_y(self) -> ForwardSpec:
        """The pass that writes y."""
        fields = dataclasses.fields(ForwardSpec)
        return ForwardSpec(**{field.name: getattr(self, field.name) for field in fields})

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of each array of the table by its name, None if it is absent."""
        amax = "float32" if self.amax else None
        return super().dtypes | {"y": self.q, "scale": self.scale, "amax": amax}


@dataclass(frozen=True)
class BackwardSpec(_Spec):
    """A backward pass to compile. A weight always has a dweight.

    `dx`: its dtype, if not x's. `dresidual`: its dtype, if it is not dx. `dweight`: its dtype, if
    not the weight's. `sums_given` and `accumulate` are as in `Options`.
    """

    table: ClassVar[Pass] = BACKWARD

    norm: Norm
    x: str
    dy: str
    weight: str | None
    dbias: str | None
    zero_centered: bool
    bitmask: bool
    dresidual_out: str | None = None
    dx: str | None = None
    dresidual: str | None = None
    grouped: bool = False
    repeats: int = 0
    dweight: str | None = None
    sums_given: bool = False
    accumulate: bool = False

    @classmethod
    def of(cls, options: Options, dtypes: Mapping[str, str | None]) -> BackwardSpec:
        """Return the spec of a pass with these options, on arrays of these dtypes by name.

        dx's dtype is by default x's, and dweight's the weight's. A dresidual without a dtype of its
        own is dx.
        """
        x, dresidual = dtypes["x"] or "", dtypes.get("dresidual")
        dx = dtypes.get("dx") or x
        weight, dweight = dtypes["weight"], dtypes.get("dweight")
        return cls(
            norm=options.norm,
            x=x,
            dy=dtypes["dy"] or "",
            weight=weight,
            dbias=dtypes["dbias"],
            zero_centered=options.zero_centered,
            bitmask=dtypes.get("bitmask") is not None,
            dresidual_out=dtypes.get("dresidual_out"),
            dx=None if dx == x else dx,
            dresidual=None if dresidual == dx else dresidual,
            dweight=None if dweight == weight else dweight,
            sums_given=options.sums_given,
            accumulate=options.accumulate,
            **sharing(options.groups),
        )

    @property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype of each array of the table by its name, None if it is absent."""
        statistic = compute_dtype(self.x)
        return {
            "dy": self.dy,
            "x": self.x,
            "dresidual_out": self.dresidual_out,
            "weight": self.weight,
            "mean": statistic if self.norm == "layer_norm" else None,
            "rstd": statistic,
            "bitmask": "uint8" if self.bitmask else None,
            "dx": self.dx or self.x,
            "dweight": self.dweight or self.weight,
            "dbias": self.dbias,
            "dresidual": self.dresidual,
        }

    @property
    def without_residual(self) -> BackwardSpec:
        """The same pass of a norm without a residual. Its sums are the same."""
        return dataclasses.replace(self, dresidual_out=None, dx=None, dresidual=None)

    @property
    def gradients(self) -> int:
        """How many gradients are summed over the rows."""
        return (self.weight is not None) + (self.dbias is not None)


Spec = ForwardSpec | BackwardSpec


def shapes_of_results(spec: Spec, k: int, arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a pass's results by name. `arrays` are its arguments by name."""
    x, weight, like = arrays["x"], arrays["weight"], arrays.get("like")
    kept, of_row = tuple(x.shape[: x.ndim - k]), tuple(x.shape[x.ndim - k :])
    of_weight = of_row if weight is None else tuple(weight.shape)
    own = {"dweight": of_weight, "dbias": of_weight if like is None else tuple(like.shape)}
    if isinstance(spec, QuantizedSpec):
        columns = spec.scale_columns
        own["scale"] = (*kept, -(-of_row[-1] // columns)) if columns else (*kept, *(1,) * k)
        if spec.scale_given:
            own["scale"] = tuple(arrays["scale"].shape)
    return {
        name: own[name] if name in own else shape_of(KINDS[name], x.shape, k)
        for name in spec.writes
    }


def has_residual(*given: Any) -> bool:
    """Tell from its options whether a backward pass is one of a norm with a residual.

    The options are dresidual_out, dx_dtype and dresidual_dtype.
    """
    return any(one is not None for one in given)


# ---- results -------------------------------------------------------------------------------------


class NormForward(NamedTuple):
    """Result of a forward pass; a field that does not apply is None.

    Attributes
    ----------
    y : array
        The normalized array, of x's shape.
    mean : array or None
        Mean of each row in the compute dtype, of x's shape without the normalized axes. None for
        RMSNorm.
    rstd : array
        ``1 / sqrt(variance + eps)`` of each row (RMSNorm: of the mean square), as ``mean``.
    bitmask : array of uint8 or None
        One bit an element, as `pack_bitmask` packs them: whether y was strictly between relu's
        bounds before it was rounded. The shape is x's without the normalized axes, and ceil(N / 8).
        None without relu.
    residual_out : array or None
        ``x + residual``. It is what was normalized, and is the x of the backward pass. None without
        a residual.
    scale : array or None
        What to multiply y by, if it was quantized. None otherwise.
    amax : array or None
        The largest magnitude of what was quantized, one float32 of all rows. None unless
        `Quantize` asks for it.
    """

    # Any: types of NumPy's arrays hold a dtype, and each field has one of its own.
    y: Any
    mean: Any = None
    rstd: Any = None
    bitmask: Any = None
    residual_out: Any = None
    scale: Any = None
    amax: Any = None


class NormBackward(NamedTuple):
    """Result of a backward pass; a field that does not apply is None.

    Attributes
    ----------
    dx : array
        Gradient of x, of its shape and dtype.
    dweight : array or None
        Gradient of the weight, of its shape and dtype, or the array given for it; None without a
        weight.
    dbias : array or None
        Gradient of the bias; None if it was not asked for.
    dresidual : array or None
        Gradient of the residual: dx itself if both have one dtype; None if there was none.
    """

    dx: Any
    dweight: Any = None
    dbias: Any = None
    dresidual: Any = None


# Pickles name them by the public module, so that this one may be renamed.
NormForward.__module__ = NormBackward.__module__ = "cupynorm"
