"""``NoParallel``: replicate a module's parameters and activations, so that it accepts and returns DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.tensor_parallel.styles.base import ReplicatedStyle, options
from hyper_parallel.core.tensor_parallel.styles.boundary import Boundary, check_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.tensor_parallel.styles.base import BoundaryLayout

__all__ = ["NoParallel"]

_ENTERED = "_hyper_parallel_entered"
"""Attribute of a DTensor that a module made of its plain input: the module's id."""


class NoParallel(ReplicatedStyle):
    """Replicate a module's parameters and buffers, and compute all of it on every rank along tp.

    ::

        x_BLD     [B, L, D]          @tp Replicate       (input_layout -> Replicate)
        w         complete           @tp Replicate
        y_BLD     [B, L, D]          @tp Replicate       (-> output_layout)

    Args:
        input_layout: layout of a plain input along tp. By default every rank has all of it; on a mesh of several axes,
            where it might be a part of a batch, the ranks compare its values. DTensors keep their own layout.
        output_layout: wanted layout of the output; Replicate by default.
        use_local_output: return the local tensor instead of a DTensor; with None, exactly if the input was a plain
            tensor.
    """

    def __init__(
        self, *, input_layout: Any = None, output_layout: Any = None, use_local_output: bool | None = True
    ) -> None:
        name = type(self).__name__
        self._takes_whole = input_layout is None
        self.input_layout = check_spec(Replicate() if input_layout is None else input_layout, "input_layout", name)
        self.output_layout = check_spec(Replicate() if output_layout is None else output_layout, "output_layout", name)
        self.use_local_output = use_local_output

    def outputs(self) -> Sequence[BoundaryLayout]:
        """The output, in the wanted layout."""
        return ((self.output_layout, self.use_local_output),)

    def _enter(self, edge: Boundary, value: Any, name: str) -> DTensor:
        if self._takes_whole and edge.mesh.ndim > 1:
            entered = edge.move(edge.enter_whole(value, name), Replicate(), name)
        else:
            entered = edge.move(edge.enter(value, self.input_layout, name), Replicate(), name)
        if not isinstance(value, DTensor):
            entered.__dict__[_ENTERED] = id(edge.cell)  # a new DTensor, used by this call only
        return entered

    def _returns_local(self, cell: Any, entered: Any) -> bool:
        if self.use_local_output is None:
            return bool(entered.__dict__.get(_ENTERED) == id(cell))
        return self.use_local_output

    def _leave(self, edge: Boundary, value: Any, *, local: bool) -> Any:
        if not isinstance(value, DTensor):
            return value
        moved = edge.move(value, self.output_layout, "output")
        return moved.to_local() if local else moved

    def __repr__(self) -> str:
        """Return the style with all its options."""
        return options(self, "input_layout", "output_layout", "use_local_output")
