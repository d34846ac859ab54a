"""``torch._foreach_*`` on lists of DTensors, as optimizers call them.

Where all operands of every element have one layout without partial values, one call runs on all local tensors.
Otherwise each element is an operation of its own, with its own placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.torch.ops.registry import decomposition

Call = Callable[..., Any]
_LAYOUT, _LOCAL, _READONLY = attrgetter("_layout"), attrgetter("_local"), attrgetter("_readonly")


def _foreach(name: str, element: Call, element_in_place: Call) -> None:
    """Register ``torch._foreach_<name>`` and ``torch._foreach_<name>_``, given the operation on one element."""
    signature = "x, y=None, third=None, fourth=None, *, alpha=None, value=None, scalars=None, weight=None"
    call, writing = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    decomposition(call, signature=signature)(_runner(call, element, in_place=False))
    decomposition(writing, signature=signature)(_runner(writing, element_in_place, in_place=True))


def _runner(call: Call, element: Call, *, in_place: bool) -> Call:
    def run(ops: Any, **arguments: Any) -> Any:
        named = {name: arguments.pop(name) for name in ("alpha", "value", "scalars", "weight")}
        named = {name: value for name, value in named.items() if value is not None}
        columns = [column for column in arguments.values() if column is not None]
        first = columns[0]
        if not first:
            return first if in_place else []
        layouts = _shared_layouts([*columns, *named.values()])
        if layouts is not None:
            outs = call(*map(_locals_of, columns), **named)
            return _written(first) if in_place else list(map(ops.platform.wrap, outs, layouts))
        if any(
            isinstance(column, (list, tuple)) and len(column) != len(first) for column in [*columns, *named.values()]
        ):
            return call(*map(_locals_of, columns), **named)  # PyTorch raises the error
        columns.extend(named.pop(name) for name in ("scalars", "weight") if name in named)
        results = [element(*row, **named) for row in _rows(columns, len(first))]
        return first if in_place else results

    return run


def _shared_layouts(columns: list[Any]) -> list[Any] | None:
    """Return each element's layout, if all its operands have it, without partial values, and may be written."""
    first, *others = columns
    layouts = _layouts_of(first)
    if layouts is None or any(isinstance(column, DTensor) for column in others):
        return None
    if any(layout.partials or layout.mesh.coordinate is None for layout in set(layouts)):
        return None
    if any(reason is not None for reason in map(_READONLY, first)):
        return None
    return layouts if all(_has_layouts(column, layouts) for column in others) else None


def _layouts_of(column: Any) -> list[Any] | None:
    """Return the layouts of DTensors; None if another value is among them."""
    try:
        return list(map(_LAYOUT, column))
    except AttributeError:
        return None


def _has_layouts(column: Any, layouts: list[Any]) -> bool:
    """Whether the elements of ``column``, if it is a list, are numbers or DTensors of ``layouts``."""
    if not isinstance(column, (list, tuple)):
        return True
    if len(column) != len(layouts):
        return False
    own = _layouts_of(column)
    if own is not None:
        return all(map(is_, own, layouts))
    return not any(
        isinstance(operand, Tensor) and getattr(operand, "_layout", None) is not layout
        for operand, layout in zip(column, layouts, strict=True)
    )


def _locals_of(column: Any) -> Any:
    if not isinstance(column, (list, tuple)):
        return column
    try:
        return list(map(_LOCAL, column))
    except AttributeError:
        return [operand._local if isinstance(operand, DTensor) else operand for operand in column]


def _rows(columns: list[Any], count: int) -> Iterator[list[Any]]:
    for index in range(count):
        yield [column[index] if isinstance(column, (list, tuple)) else column for column in columns]


def _written(tensors: Any) -> Any:
    for tensor in tensors:
        tensor.drop_views()
    return tensors


for _name in (
    "abs", "neg", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "reciprocal", "sign", "floor",
    "ceil", "round", "trunc", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "sigmoid", "erf",
    "erfc", "lgamma", "frac",
    "add", "sub", "mul", "div", "pow", "lerp",
):  # fmt: skip
    _foreach(_name, getattr(torch, _name), getattr(Tensor, f"{_name}_"))
_foreach("maximum", torch.maximum, lambda x, y: x.copy_(torch.maximum(x, y)))
_foreach("minimum", torch.minimum, lambda x, y: x.copy_(torch.minimum(x, y)))
_foreach("clamp_min", lambda x, y: torch.clamp(x, min=y), lambda x, y: x.clamp_(min=y))
_foreach("clamp_max", lambda x, y: torch.clamp(x, max=y), lambda x, y: x.clamp_(max=y))
_foreach(
    "addcmul",
    lambda x, y, z, value=1: torch.addcmul(x, y, z, value=value),
    lambda x, y, z, value=1: x.addcmul_(y, z, value=value),
)
_foreach(
    "addcdiv",
    lambda x, y, z, value=1: torch.addcdiv(x, y, z, value=value),
    lambda x, y, z, value=1: x.addcdiv_(y, z, value=value),
)


@decomposition("_foreach_norm", signature="x, ord=2, dtype=None")
def _norm(_ops: Any, x: Any, ord: Any, dtype: Any) -> list[Any]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in x]


@decomposition("_foreach_copy_", signature="x, y, non_blocking=False")
def _copy(_ops: Any, x: Any, y: Any, non_blocking: Any) -> Any:
    for target, source in zip(x, y, strict=True):
        target.copy_(source, non_blocking)
    return x


@decomposition("_foreach_zero_", signature="x")
def _zero(_ops: Any, x: Any) -> Any:
    for tensor in x:
        tensor.zero_()
    return x


@decomposition("_foreach_clone", signature="x, *, memory_format=None")
def _clone(_ops: Any, x: Any, memory_format: Any) -> list[Any]:
    del memory_format  # local tensors are dense
    return [tensor.clone() for tensor in x]


@decomposition("_foreach_max", signature="x")
def _max(_ops: Any, x: Any) -> list[Any]:
    return [tensor.max() for tensor in x]


@decomposition("_foreach_powsum", signature="x, ord=2, dtype=None")
def _powsum(_ops: Any, x: Any, ord: Any, dtype: Any) -> list[Any]:
    return [(tensor if dtype is None else tensor.to(dtype)).abs().pow(ord).sum() for tensor in x]


@decomposition("_foreach_mm", signature="x, y")
def _mm(_ops: Any, x: Any, y: Any) -> list[Any]:
    return [torch.mm(*pair) for pair in zip(x, y, strict=True)]
