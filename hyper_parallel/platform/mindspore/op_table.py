"""MindSpore's names: which operator is which canonical one.

Operators arrive as strings. A spelling is one line of its family's table: the name, the canonical operator, and its
parameters in canonical names where they differ from the rule's own order. What needs more than a line is composed of
canonical operators, in ``primitives.py`` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hyper_parallel.platform.mindspore import (
    batch_norm,
    composed_index,
    composed_linalg,
    composed_methods,
    composed_nn,
    composed_pointwise,
    composed_reduce,
    composed_shape,
    composed_spatial,
    losses,
    op_table_index,
    op_table_nn,
    op_table_pointwise,
    op_table_random,
    op_table_reduce,
    op_table_shape,
    python_functions,
)
from hyper_parallel.platform.mindspore.op_line import Line
from hyper_parallel.platform.mindspore.primitives import COMPOSED

__all__ = ["lines"]

FAMILIES = (
    op_table_pointwise,
    op_table_reduce,
    op_table_shape,
    op_table_index,
    op_table_nn,
    op_table_random,
)
# Each registers what it composes.
COMPOSING = (
    composed_pointwise,
    composed_linalg,
    composed_reduce,
    composed_shape,
    batch_norm,
    composed_index,
    composed_methods,
    composed_nn,
    composed_spatial,
    losses,
    python_functions,
)


@cache
def lines() -> dict[str, Any]:
    """What to call per MindSpore operator name: ``line(dispatcher, primitive, args, kwargs)``."""
    table: dict[str, Callable[..., Any]] = {}
    for family in FAMILIES:
        # CPU kernels compute in-place operators and leave the tensor as it was: results are written.
        for texts, orders, in_place in (("SAME", "REORDERED", False), ("IN_PLACE", "IN_PLACE_REORDERED", True)):
            for name, op in _pairs(getattr(family, texts, "")):
                table[name] = Line(name, op, in_place=in_place)
            for name, (op, signature) in getattr(family, orders, {}).items():
                table[name] = Line(name, op, signature, in_place=in_place)
    table.update(COMPOSED)
    return table


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))
