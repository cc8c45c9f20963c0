"""The passes in programs that torch.compile's inductor generates.

A generated program would call an operation of torch.library, whose dispatch and allocations cost
more than the launch. Told of `lower`, it makes a function here for each call, when it is loaded.
The program allocates the results itself, often in memory that it has used before, and the function
writes into them.

Inductor keeps generated programs on disk, and another version of this package may load them. So the
names and arguments of `norm_forward` and `norm_backward` stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cupynorm._operation import BACKWARD, FORWARD, Pass
from cupynorm.torch import _kernels

__all__ = ["lower", "norm_backward", "norm_forward"]


def norm_forward(is_static: bool, *told: Any) -> Callable[..., None]:
    """Return a function that runs the operation of this name with these options.

    It takes the tensors that the pass reads, then those that it writes, contiguous and of the right
    shapes and dtypes, None for what does not apply. If the program is static, all have the same
    shapes, dtypes and device in each call. Their strides are the same, except those of axes of one
    element.
    """
    return _bound(FORWARD, is_static, told)


def norm_backward(is_static: bool, *told: Any) -> Callable[..., None]:
    """Do as `norm_forward`, for the other pass."""
    return _bound(BACKWARD, is_static, told)


def _bound(table: Pass, is_static: bool, told: tuple[Any, ...]) -> Callable[..., None]:
    run: Any = None
    told, count = _kernels.from_schema(table, told), len(table.reads)

    def call(*tensors: Any) -> None:
        nonlocal run
        if tensors[0].is_neg():  # x, or a gradient that comes from outside of the program
            tensors = (tensors[0].resolve_neg(), *tensors[1:])
        if run is not None:
            run(tensors)
            return
        found = _kernels.find(table, tensors[:count], told, tensors[count:])
        found(tensors)
        if is_static:  # a call has left what runs the others, unless its tensors were misaligned
            found = _kernels.find(table, tensors[:count], told, tensors[count:])
            run = None if isinstance(found, _kernels.Call) else found

    return call


def lower(operations: Mapping[Pass, Any]) -> None:
    """Have inductor make these functions, if it is in use. Importing it takes seconds."""
    if "torch._inductor.lowering" in sys.modules:
        for table, operation in operations.items():
            _register(table, operation)


@functools.cache
def _register(table: Pass, operation: Any) -> None:
    import torch
    from torch._inductor import lowering
    from torch._inductor.ir import ExternKernel, convert_shape_to_inductor
    from torch._inductor.virtualized import V

    generic = lowering.fallback_handler(operation, add_to_fallback_set=False)
    allocate = lowering.lowerings[torch.ops.aten.empty_strided.default]
    kernel = _kernel_class(table)
    lowering.add_needs_realized_inputs(operation)

    @lowering.register_lowering(operation, type_promotion_kind=None)
    def lowered(*arguments: Any) -> Any:
        if V.graph.cpp_wrapper:  # which generates no Python
            return generic(*arguments)
        with V.graph.fake_mode:
            found = ExternKernel.process_kernel(operation, *arguments)
        if not isinstance(found, tuple):  # from torch 2.14 on
            found = [getattr(found, field.name) for field in dataclasses.fields(found)]
        outlines, tensors, told, arranged, _ = found
        (arguments, _), count = arranged(tensors, told), len(table.reads)
        results = tuple(
            allocate(
                *map(convert_shape_to_inductor, (outline.size(), outline.stride())),
                dtype=outline.dtype,
                device=outline.device,
            )
            for outline in outlines
        )
        empty = [any(isinstance(size, int) and not size for size in x.size()) for x in outlines]
        # What does not apply is empty.
        written = [None if is_empty else x for x, is_empty in zip(results, empty, strict=True)]
        kernel(arguments[:count], written, arguments[count:])
        return results


def _kernel_class(table: Pass) -> Any:
    from torch._inductor.ir import ExternKernel, MutationOutput, NoneLayout
    from torch._inductor.virtualized import V

    class NormKernel(ExternKernel):
        """A call of a function that the generated program makes when it is loaded."""

        def __init__(self, reads: Any, writes: Any, told: Any) -> None:
            self.arrays, self.told = (*reads, *writes), told
            given = [array for array in self.arrays if array is not None]
            layout = NoneLayout(device=given[0].get_device())
            super().__init__(None, layout, self.unwrap_storage(given), ())
            self.mutation_outputs = [
                MutationOutput(layout, array, self) for array in writes if array is not None
            ]
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            name = f"norm_{table.name}"
            made = f"{name}_{wrapper.next_kernel_suffix()}"
            told = map(V.graph.wrapper_code.val_to_arg_str, (self._is_static(), *self.told))
            wrapper.add_import_once(f"import {__name__}")
            wrapper.define_kernel(made, f"{__name__}.{name}({', '.join(told)})", gpu=False)
            given = iter(self.inputs)
            tensors = (
                "None" if array is None else next(given).codegen_reference()
                for array in self.arrays
            )
            wrapper.writeline(f"{made}({', '.join(tensors)})")

        def get_outputs(self) -> Any:
            return list(self.mutation_outputs)

        def _is_static(self) -> bool:
            sizes = (size for x in self.inputs for size in (*x.get_size(), *x.get_stride()))
            return all(getattr(size, "is_number", True) for size in sizes)

    return NormKernel
