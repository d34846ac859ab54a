"""Mixed precision of cells (``to_float``, amp levels O1 to O3) on DTensors.

While such a cell runs, MindSpore casts the floating-point operands of each operator that it calls, except views.
Operators on DTensors are dispatched before MindSpore casts, so their operands are cast here. Kernels then run with
casting switched off, because they consist of several of MindSpore's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mindspore
from mindspore import Tensor, ops

from hyper_parallel._tree import CONTAINERS, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.mindspore.versions import MixedPrecisionType, pynative_executor

__all__ = ["ACTIVE", "COMPOSED", "cast_operands", "noting_precision", "noting_reset", "switched_off"]

_DTYPES = {
    MixedPrecisionType.FP16: mindspore.float16,
    MixedPrecisionType.FP32: mindspore.float32,
    MixedPrecisionType.BF16: mindspore.bfloat16,
}
_FLOATING = frozenset({mindspore.float16, mindspore.bfloat16, mindspore.float32, mindspore.float64})

ACTIVE: list[Any] = []
"""Dtypes of the cells that run, the innermost last; None where nothing is cast."""

# Operators whose operands MindSpore does not cast, measured on 2.10, without those whose names end in View.
_KEEPING = frozenset({
    "copied", "BroadcastTo", "Chunk", "DeprecatedTranspose", "ExpandAs", "ExpandDims", "FlattenExt", "Meshgrid",
    "Narrow", "Reshape", "Slice", "Split", "SplitTensor", "Squeeze", "TExt", "ToDtype", "Transpose", "ViewAs",
    "numpy.clip", "numpy.flip", "numpy.fmod", "numpy.tril", "numpy.triu", "ops.clip_by_global_norm", "typeof",
})  # fmt: skip


COMPOSED = frozenset({"XLogYScalarOther", "XLogYScalarSelf"})
"""Operators that MindSpore composes of several others; it casts their results, too."""


def noting_precision(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that MindSpore calls before and after a cell runs, to copy its private stack of dtypes."""

    @wraps(plain)
    def set_type(executor: Any, kind: Any, is_push: bool = True) -> Any:
        if is_push:
            ACTIVE.append(_DTYPES.get(kind))
        elif ACTIVE:
            ACTIVE.pop()
        return plain(executor, kind, is_push)

    return set_type


def noting_reset(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that clears MindSpore's stack after an exception in a cell, to clear :data:`ACTIVE` as well."""

    @wraps(plain)
    def clear(executor: Any) -> Any:
        ACTIVE.clear()
        return plain(executor)

    return clear


@contextmanager
def switched_off() -> Iterator[None]:
    """Prevent MindSpore from casting operands inside this context."""
    pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET)
    try:
        yield
    finally:
        pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def cast_operands(operators: Any, name: str, operands: Any, *, is_method: bool = False) -> Any:
    """Return the operands of an operator as MindSpore would cast them in the running cell.

    Call it inside :func:`switched_off`.

    Args:
        operators: the canonical operators, as functions of DTensors.
        name: name of MindSpore's operator.
        operands: positional or keyword arguments.
        is_method: whether the operator was called as a tensor method; some methods differ from the function.
    """
    dtype = next((kind for kind in reversed(ACTIVE[:-1])), None)  # the innermost entry is that of switched_off
    if dtype is None or _keeps(name, operands, is_method=is_method):
        return operands

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in _FLOATING or leaf.dtype == dtype:
            return leaf
        return operators.cast(leaf, dtype=dtype) if isinstance(leaf, DTensor) else ops.cast(leaf, dtype)

    return tree_map(cast, operands, CONTAINERS)


def _keeps(name: str, operands: Any, *, is_method: bool) -> bool:
    if is_method and name in ("FlattenExt", "UnstackExtView"):  # x.unbind() and x.flatten(1) call older ones on CPU
        return name == "FlattenExt" and not (isinstance(operands, tuple) and any(operands[1:2]))
    if name == "__getitem__" and isinstance(operands, tuple):
        return _is_view(operands[1])
    if name in ("numpy.maximum", "numpy.minimum") and isinstance(operands, tuple):
        return not all(isinstance(each, Tensor) for each in operands[:2])
    return name in _KEEPING or name.endswith("View")


def _is_view(index: Any) -> bool:
    """Whether an index makes a view in MindSpore; tensors do not, nor does a slice that is not in a tuple."""
    items = index if isinstance(index, tuple) else (index,)
    return not isinstance(index, slice) and all(
        type(item) is int or item is None or item is Ellipsis or isinstance(item, slice) for item in items
    )
