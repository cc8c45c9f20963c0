"""A pass over inductor's graphs, which moves neighbours of a norm into its kernel.

`compile_options` turns it on for one program. The graph has the forward pass, and the backward pass
of a program that is trained. In it

- an addition before a norm becomes its residual, and so does one after a norm's gradient;
- a cast to a wider dtype before a norm, and a cast of its result, become dtypes of the norm.

An addition stays where inductor can fuse it with an elementwise operation.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false

from cupynorm import _operation
from cupynorm._operation import BACKWARD, FORWARD, Pass
from cupynorm.torch import _kernels, _operations
from cupynorm.torch._kernels import NUMPY_DTYPES, OPTIONS

__all__ = ["compile_options"]


def compile_options(mode: str | None = None) -> dict[str, Any]:
    """Return options of torch.compile, with which a norm takes in its neighbours.

    An addition before a norm becomes its residual. An addition to the gradient of its input becomes
    part of its backward pass. Casts of its input, output and gradients become its dtypes. Values
    stay within the bound of `cupynorm.testing`: each fusion leaves a rounding out, or none.

    Parameters
    ----------
    mode : str, optional
        A mode of torch.compile, such as ``"reduce-overhead"``. Its options are included, since
        torch.compile takes a mode or options, not both.

    Returns
    -------
    dict
        For ``torch.compile(..., options=...)``, to which other options may be added. Nothing else
        in the process changes.

    Raises
    ------
    ValueError
        If the mode is ``"lite"``, which runs no pass over a graph.
    RuntimeError
        If torch knows no such mode.

    See Also
    --------
    replace_norms : have a model use the norms of this package.

    Examples
    --------
    >>> import torch
    >>> import cupynorm.torch
    >>> linear, norm = torch.nn.Linear(64, 64), cupynorm.torch.RMSNorm(64)
    >>> def block(x, residual):
    ...     residual = residual + linear(x)
    ...     return norm(residual), residual
    >>> block = torch.compile(block, options=cupynorm.torch.compile_options())
    >>> options = cupynorm.torch.compile_options() | {"max_autotune": True}
    >>> tuned = torch.compile(norm, options=options)
    """
    from torch._inductor import list_mode_options

    if not isinstance(mode, str | None):
        raise TypeError(f"mode must be a str or None, got {mode!r}")
    if mode == "lite":
        raise ValueError('mode must not be "lite", which runs no pass over a graph')
    return list_mode_options(mode or "default") | {"joint_custom_post_pass": _fusion()}


@functools.cache
def _fusion() -> Any:
    """Return the pass. Torch compiles again for another, so there is one."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Fusion(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:
            return get_hash_for_files(
                (__file__, _operations.__file__, _kernels.__file__, _operation.__file__)
            )

        def __reduce__(self) -> Any:
            return _fusion, ()

    return Fusion()


def fuse(graph: torch.fx.Graph) -> None:
    """Move neighbours of the norms of a graph into them."""
    rewrite = _Rewrite(graph)
    for table, operation in _operations.OPERATIONS.items():
        take_in = rewrite.forward if table is FORWARD else rewrite.backward
        for node in graph.find_nodes(op="call_function", target=operation):
            take_in(node)


# ---- what the nodes of a graph are ---------------------------------------------------------------

_aten, _prims = torch.ops.aten, torch.ops.prims
_ADD = _aten.add.Tensor
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
# Inductor calls kernels for these, and so stores what they read and write.
_KERNELS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_KERNELS |= {_aten._scaled_mm.default, _aten._int_mm.default, _aten.convolution.default}
_ATTENTION = "scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward"
_HALVES = torch.float16, torch.bfloat16
# What marks the nodes of the forward and the backward pass, and those that are computed again.
_OF_PARTS = "partitioner_tag", "recompute", "ac_graph_id"


def _value(node: Any) -> Any:
    return node.meta["val"]


def _has_shape_of(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    shapes = _value(a).shape, _value(b).shape
    return len(shapes[0]) == len(shapes[1]) and all(
        statically_known_true(m == n) for m, n in zip(*shapes, strict=True)
    )


def _is_array(node: Any) -> bool:
    """Tell whether a node is a tensor of a dtype that the kernels take. It may be a number."""
    if not isinstance(node, torch.fx.Node) or not isinstance(_value(node), torch.Tensor):
        return False
    return _value(node).dtype in NUMPY_DTYPES


def _added(node: Any) -> tuple[Any, ...]:
    """Return the two nodes that an addition adds, if a kernel can return the same tensor."""
    if not isinstance(node, torch.fx.Node) or node.target is not _ADD or node.kwargs:
        return ()
    if not is_contiguous_or_false(_value(node)):  # as the results of kernels are
        return ()
    fits = all(_is_array(operand) and _has_shape_of(operand, node) for operand in node.args)
    return node.args if fits else ()


def _is_of_one_part(a: Any, b: Any) -> bool:
    """Tell whether two nodes are computed in the same pass, and again in the same checkpoint."""
    return all(a.meta.get(key) == b.meta.get(key) for key in _OF_PARTS)


def _cast_dtype(node: Any) -> Any:
    """Return the dtype that a node casts to, or None if it does not cast, or does more."""
    if node.target is _prims.convert_element_type.default:
        return node.args[1]
    if node.target is _aten._to_copy.default and set(node.kwargs) == {"dtype"}:
        return node.kwargs["dtype"]
    return None


def _before_cast(node: Any) -> Any:
    """Return what a node casts to float32, which kernels do themselves; else return the node.

    A cast to float64 is another matter: its rows are computed in float64.
    """
    if not isinstance(node, torch.fx.Node) or _cast_dtype(node) is not torch.float32:
        return node
    source = node.args[0]
    return source if _value(source).dtype in _HALVES else node


def _is_call_of_kernel(node: Any) -> bool:
    """Tell whether inductor calls a kernel for a node, and generates none."""
    if node.op != "call_function" or node.target in _KERNELS:
        return node.op == "call_function"
    space = getattr(node.target, "namespace", "")
    is_attention = any(name in str(node.target) for name in _ATTENTION)
    return is_attention or space not in ("", "aten", "prims")


def _is_stored(node: Any) -> bool:
    """Tell whether a tensor is in memory anyway, whatever inductor fuses."""
    if any(map(_is_read_from_memory, node.users)):
        return True
    while node.target in _VIEWS or node.target is operator.getitem:
        node = node.args[0]
    return node.op != "call_function" or _is_call_of_kernel(node)


def _is_read_from_memory(user: Any) -> bool:
    if user.target in _VIEWS:
        return any(map(_is_read_from_memory, user.users))
    return user.op == "output" or _is_call_of_kernel(user)


# ---- changes -------------------------------------------------------------------------------------


class _Rewrite:
    """The changes of one graph."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def forward(self, node: Any) -> None:
        """Take in an addition before a norm, and casts on either side."""
        given = _arguments(FORWARD, node)
        x, y_dtype = given["x"], _value(node)[FORWARD.writes.index("y")].dtype
        summands = self._summands(node, given)
        if summands:
            residual, branch = summands
            changes = {"x": branch, "residual": residual, "residual_dtype": _value(x).dtype}
            node = self._call(FORWARD, node, x, **changes, out_dtype=y_dtype)
            x.replace_all_uses_with(self._result(FORWARD, node, "residual_out"))
            self.graph.erase_node(x)
        elif given["residual"] is None and _before_cast(x) is not x:
            node = self._call(FORWARD, node, node, x=_before_cast(x), out_dtype=y_dtype)
        casts, others = self._casts(FORWARD, node, "y")
        if casts and not others:
            node = self._call(FORWARD, node, node, out_dtype=_cast_dtype(casts[0]))
            self._replace(casts, self._result(FORWARD, node, "y"))

    def _summands(self, node: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """Return what a norm had better add itself, or nothing."""
        x, vectors = given["x"], (given["weight"], given["bias"])
        summands = () if given["residual"] is not None else tuple(map(_before_cast, _added(x)))
        is_early = all(v is None or self.order[v] < self.order[x] for v in vectors)
        fits = is_early and _is_of_one_part(x, node) and all(map(_is_stored, summands))
        return summands if fits else ()

    def backward(self, node: Any) -> None:
        """Take in an addition to the gradient of a norm's input, and casts on either side."""
        given = _arguments(BACKWARD, node)
        dx_dtype = _value(node)[BACKWARD.writes.index("dx")].dtype
        changes = {name: _before_cast(given[name]) for name in ("dy", "x", "dresidual_out")}
        added = self._added_to_gradient(node, given)
        if added:
            total, ds = added
            changes["dresidual_out"] = ds
        if any(changes[name] is not given[name] for name in changes):
            node = self._call(BACKWARD, node, node, **changes, dx_dtype=dx_dtype)
        if added:
            self._replace([total], self._result(BACKWARD, node, "dx"))
        casts, others = self._casts(BACKWARD, node, "dx")
        if not casts or given["dresidual_dtype"] is not None:
            return
        if others and not any(map(_is_stored, casts)):  # a second result would only be one more
            return
        option, name = ("dresidual_dtype", "dresidual") if others else ("dx_dtype", "dx")
        node = self._call(BACKWARD, node, node, **{option: _cast_dtype(casts[0])})
        self._replace(casts, self._result(BACKWARD, node, name))

    def _added_to_gradient(self, node: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """Return the addition to dx that had better be a part of the pass, and what is added."""
        dx = self._result(BACKWARD, node, "dx")
        # dresidual would have the sum, too.
        if given["dresidual_out"] is not None or given["dresidual_dtype"] is not None:
            return ()
        if len(dx.users) != 1:
            return ()
        (total,) = dx.users
        summands = _added(total)
        if not summands or summands[0] is summands[1] or _value(total).dtype != _value(dx).dtype:
            return ()
        (ds,) = (_before_cast(summand) for summand in summands if summand is not dx)
        is_early = self.order[ds] < self.order[node]
        return (total, ds) if is_early and _is_of_one_part(total, node) and _is_stored(ds) else ()

    def _casts(self, table: Pass, node: Any, name: str) -> tuple[list[Any], list[Any]]:
        """Return the users of a result that cast it to one narrower dtype, and the others."""
        result = self._result(table, node, name)
        narrower = [d for d in NUMPY_DTYPES if d.itemsize < _value(result).dtype.itemsize]
        casts = [u for u in result.users if _cast_dtype(u) in narrower and _is_of_one_part(u, node)]
        casts = [u for u in casts if _cast_dtype(u) == _cast_dtype(casts[0])]
        return casts, [user for user in result.users if user not in casts]

    def _result(self, table: Pass, node: Any, name: str) -> Any:
        """Return the node of one result of a call."""
        index = table.writes.index(name)
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        with self.graph.inserting_after(node):
            result = self.graph.call_function(operator.getitem, (node, index))
        result.meta = node.meta | {"val": _value(node)[index]}
        self.order[result] = self.order[node]
        return result

    def _call(self, table: Pass, node: Any, place: Any, **changes: Any) -> Any:
        """Put a call with other arguments before a place, for one that is there."""
        arguments = tuple((_arguments(table, node) | changes).values())
        with self.graph.inserting_before(place):
            call = self.graph.call_function(node.target, arguments)
        self.order[call] = self.order[place]
        fakes = torch.fx.map_arg(arguments, _value)
        with _value(arguments[0]).fake_mode, torch.no_grad():
            call.meta = node.meta | {"val": node.target(*fakes), "eager_input_vals": (fakes, {})}
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)
        for user in call.users:
            user.meta["val"] = _value(call)[user.args[1]]
            user.meta.pop("tensor_meta", None)
        return call

    def _replace(self, nodes: list[Any], by: Any) -> None:
        for node in nodes:
            node.replace_all_uses_with(by)
            self.graph.erase_node(node)


def _arguments(table: Pass, node: Any) -> dict[str, Any]:
    return dict(zip((*table.reads, *OPTIONS[table]), node.args, strict=True))
