"""Shape and dtype of an operator's outputs, asked of the framework without any of the call's values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.schema import OpSchema, TensorMeta
from hyper_parallel.errors import LayoutError
from hyper_parallel.platform.select import current_platform

__all__ = ["meta_of"]


def meta_of(schema: OpSchema, func: Callable[..., Any], dtypes: Sequence[Any]) -> TensorMeta | tuple[TensorMeta, ...]:
    """What ``func`` gives for the schema's arguments.

    Args:
        schema: the call.
        func: the operator on plain tensors, called as the schema is written.
        dtypes: of the tensors, in order.

    Raises:
        LayoutError: (a ValueError) not one dtype per tensor, or a layout without global shape.
    """
    layouts = schema.args_spec
    if len(dtypes) != len(layouts):
        msg = f"{schema.op}: {len(dtypes)} dtypes for {len(layouts)} tensors; give one per tensor, in order"
        raise LayoutError(msg)
    rest = iter(dtypes)
    args = [_filled(value, rest) for value in schema.args_schema]
    named = {name: _filled(value, rest) for name, value in schema.kwargs_schema.items()}
    found = func(*args, **named)
    platform = current_platform()
    if platform.is_tensor(found):
        return TensorMeta(tuple(found.shape), found.dtype)
    return tuple(TensorMeta(tuple(one.shape), one.dtype) for one in found if platform.is_tensor(one))


def _filled(value: Any, dtypes: Iterator[Any]) -> Any:
    """Tensors in place of layouts: PyTorch's without storage, MindSpore's of zeros, since it has no others."""
    if isinstance(value, Layout):
        if value.shape is None:
            msg = f"{value!r} has no global shape; use layout.with_shape(...)"
            raise LayoutError(msg)
        return current_platform().zeros(value.shape, next(dtypes), "meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, dtypes) for item in value)
    return value
