"""The passes in programs that torch.compile's inductor generates.

A generated program would call an operation of torch.library, whose dispatch costs more than the
launch. Told of `lower`, it makes a function here for each call, when it is loaded.

Inductor keeps generated programs on disk, and another version of this package may load them. So the
names and arguments of `norm_forward` and `norm_backward` stay as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cupynorm._operation import BACKWARD, FORWARD, Pass
from cupynorm.torch import _kernels

__all__ = ["lower", "norm_backward", "norm_forward"]


def norm_forward(is_static: bool, *told: Any) -> Callable[..., tuple[Any, ...]]:
    """Return a function of tensors that runs the operation of this name with these options.

    It returns None for what does not apply. If the program is static, its tensors have the same
    shapes, dtypes and device in each call. Their strides are the same, except those of axes of one
    element.
    """
    return _bound(FORWARD, is_static, told)


def norm_backward(is_static: bool, *told: Any) -> Callable[..., tuple[Any, ...]]:
    """Do as `norm_forward`, for the other pass."""
    return _bound(BACKWARD, is_static, told)


def _bound(table: Pass, is_static: bool, told: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    run: Any = None
    told = _kernels.from_schema(table, told)

    def call(*tensors: Any) -> Any:
        nonlocal run
        if tensors[0].is_neg():  # x, or a gradient that comes from outside of the program
            tensors = (tensors[0].resolve_neg(), *tensors[1:])
        if run is not None:
            return run(tensors)
        results = _kernels.run(table, tensors, told)
        if is_static:  # a call has left what runs the others, unless its tensors were misaligned
            found = _kernels.find(table, tensors, told)
            run = None if isinstance(found, _kernels.Call) else found
        return results

    return call


def lower(operations: Mapping[Pass, Any]) -> None:
    """Have inductor make these functions, if it is in use. Importing it takes seconds."""
    if "torch._inductor.lowering" in sys.modules:
        for table, operation in operations.items():
            _register(table, operation)


@functools.cache
def _register(table: Pass, operation: Any) -> None:
    from torch._inductor import lowering
    from torch._inductor.ir import TensorBox

    lowering.add_needs_realized_inputs(operation)
    made = _kernel_class(table)

    @lowering.register_lowering(operation, type_promotion_kind=None)
    def lowered(*arguments: Any) -> Any:
        return tuple(map(TensorBox.create, made.create(operation, *arguments)))


def _kernel_class(table: Pass) -> Any:
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    class NormKernel(FallbackKernel):
        """A call of a function that the generated program makes when it is loaded."""

        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:  # which generates no Python
                maker = f"norm_{table.name}"
                self.python_kernel_name = f"{maker}_{wrapper.next_kernel_suffix()}"
                _, told = self._arguments()
                wrapper.add_import_once(f"import {__name__}")
                made = f"{__name__}.{maker}({', '.join((str(self._is_static()), *told))})"
                wrapper.define_kernel(self.python_kernel_name, made, gpu=False)
            super().codegen(wrapper)

        def codegen_args(self) -> Any:
            if V.graph.cpp_wrapper:
                return super().codegen_args()
            tensors, _ = self._arguments()
            return tensors

        def _arguments(self) -> tuple[list[str], list[str]]:
            """Return the code of the tensors, and of what the call is told."""
            arguments, count = super().codegen_args(), len(table.reads)
            return arguments[:count], arguments[count:]

        def _is_static(self) -> bool:
            sizes = (size for x in self.inputs for size in (*x.get_size(), *x.get_stride()))
            return all(getattr(size, "is_number", True) for size in sizes)

    return NormKernel
