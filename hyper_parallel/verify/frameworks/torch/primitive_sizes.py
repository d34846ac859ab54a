"""Records the conditions on symbolic sizes of a trace, except those that affect only strides, or only broadcasting.

A tensor may have any stride along a dim of size 1, and any strides if it has no elements. Strides that a trace assumes
for larger sizes are therefore possible at sizes 0 and 1, too, and the operator takes the traced steps on tensors with
these strides. Whether a dim of size 1 broadcasts to size 1 or is an ordinary dim makes no difference: the same elements
are read.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hyper_parallel.platform.torch.versions import FakeTensorMode, broadcasting, layouts, node_metadata, view_layouts

__all__ = ["TraceSizes"]


def _codes(module: Any, *names: str) -> frozenset[CodeType]:
    """Return the code objects of those functions in ``module`` that this version of PyTorch has."""
    found = [getattr(getattr(module, name, None), "__code__", None) for name in names]
    return frozenset(code for code in found if code is not None)


_LAYOUTS = _codes(
    layouts, "is_contiguous", "is_contiguous_for_memory_format", "is_channels_last_contiguous_2d",
    "is_channels_last_contiguous_3d", "are_strides_like_channels_last_or_false", "are_strides_like_channels_last",
    "is_non_overlapping_and_dense_or_false", "compute_elementwise_output_logical_to_physical_perm",
    "compute_elementwise_output_strides", "suggest_memory_format", "clone_preserve_strides",
) | _codes(view_layouts, "_reshape_view_helper_core_alg")  # fmt: skip
"""Functions that compute only the strides of a result."""
_METADATA = _codes(node_metadata, "_extract_tensor_metadata") | _codes(view_layouts, "contiguous")
"""Functions that read sizes and strides without computing: for a node of the trace, or for ``contiguous``."""
_BROADCASTING = _codes(view_layouts, "_broadcast_shapes", "_maybe_broadcast") | _codes(broadcasting, "infer_size")
_REQUIRED = _codes(layouts, "infer_size")
"""Functions that raise an error unless the condition is true, such as a view with a different number of elements."""
_DISPATCH = _codes(FakeTensorMode, "dispatch")
"""The function that computes sizes and strides of the result of one step of the trace."""
_DEPTH = 40
"""Number of stack frames that are searched for the function that evaluates a condition."""


_RELATIONS = ("Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan")


class TraceSizes(ShapeEnv):
    """Records the conditions on sizes under which a trace is valid.

    Attributes:
        small: symbols whose values are 0 or 1; every condition on them is recorded.
    """

    small: frozenset[Any] = frozenset()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.required = set[str]()
        """Conditions on sizes without which PyTorch raises an error."""

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Return whether a condition is true; record it unless it is an inequality about layouts or broadcasting."""
        kind = type(orig_expr).__name__
        if kind in _RELATIONS and self.small.isdisjoint(orig_expr.free_symbols) and _changes_no_value(orig_expr):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            equal = kind in _RELATIONS[:2] and bool(answer) == (kind == "Equality")
            if not equal or not any(side.is_Symbol for side in orig_expr.args):
                return answer
        if kind == "Equality" and _is_asked_by(_REQUIRED):
            self.required.add(str(orig_expr))
        return super().evaluate_expr(orig_expr, *args, **kwargs)


def _is_asked_by(codes: frozenset[CodeType]) -> bool:
    frame: Any = sys._getframe(2)  # noqa: SLF001 - only the stack shows which function evaluates the condition
    for _ in range(_DEPTH):
        if frame is None or frame.f_code in codes:
            return frame is not None
        if frame.f_code in _DISPATCH:
            return False
        frame = frame.f_back
    return False


def _changes_no_value(relation: Any) -> bool:
    """Whether a relation is evaluated for the strides of a step's result, or to find dims of size 1 that broadcast."""
    frame: Any = sys._getframe(2)  # noqa: SLF001 - only the stack shows which function evaluates the condition
    layout = False
    for _ in range(_DEPTH):
        if frame is None:
            return False
        code = frame.f_code
        if code in _METADATA or (code in _BROADCASTING and 1 in relation.args) or (layout and code in _DISPATCH):
            return True
        layout, frame = layout or code in _LAYOUTS, frame.f_back
    return False
