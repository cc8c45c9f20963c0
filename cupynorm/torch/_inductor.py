"""The passes in programs that torch.compile's inductor generates.

A generated program would call an operation of torch.library, whose dispatch costs more than the
launch. Told of `lower`, it calls the functions here.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from cupynorm._operation import BACKWARD, FORWARD, Pass
from cupynorm.torch import _kernels

__all__ = ["lower", "norm_backward", "norm_forward"]


def _run(table: Pass, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    count = len(table.reads)
    return _kernels.run(table, arguments[:count], arguments[count:])


def norm_forward(*arguments: Any) -> tuple[Any, ...]:
    """Do as the operation of this name, with None for a result that does not apply."""
    *others, relu, out_dtype, residual_dtype, training = arguments
    if relu is not None:  # as a list
        relu = tuple(relu)
    return _run(FORWARD, (*others, relu, out_dtype, residual_dtype, training))


def norm_backward(*arguments: Any) -> tuple[Any, ...]:
    """Do as the operation of this name, with None for a result that does not apply."""
    return _run(BACKWARD, arguments)


def lower(*operations: Any) -> None:
    """Have inductor call the functions here, if it is in use. Importing it takes seconds."""
    if "torch._inductor.lowering" in sys.modules:
        for operation in operations:
            _register(operation)


@functools.cache
def _kernel_class() -> Any:
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.virtualized import V

    class NormKernel(FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper:  # there, no program in Python is generated
                wrapper.add_import_once(f"import {__name__}")
                name = self.op_overload.name().split("::")[1]
                self.python_kernel_name = f"{__name__}.{name}"
            super().codegen(wrapper)

    return NormKernel


@functools.cache
def _register(operation: Any) -> None:
    from torch._inductor import lowering
    from torch._inductor.ir import TensorBox

    lowering.add_needs_realized_inputs(operation)

    @lowering.register_lowering(operation, type_promotion_kind=None)
    def lowered(*arguments: Any) -> Any:
        return tuple(map(TensorBox.create, _kernel_class().create(operation, *arguments)))
