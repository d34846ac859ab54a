"""Lets MindSpore's dropout cells on plain tensors draw random numbers as DTensors do, by global element index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["active_dropouts", "indexed_draws"]


def active_dropouts(cells: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the dropout cells that drop elements, with their paths."""
    return [
        (path, cell)
        for path, cell in cells
        if "Dropout" in type(cell).__name__ and cell.training and float(getattr(cell, "p", 0.0) or 0.0) > 0
    ]


@contextmanager
def indexed_draws(cells: list[tuple[str, Any]], place: Callable[[Any], tuple[Any, Any, Any]]) -> Iterator[None]:
    """Let dropout ``cells`` draw from the random stream of DTensors, by making their operand a DTensor for the call.

    Args:
        cells: paths and cells.
        place: returns mesh, placements and global shape of a plain operand; called before the draw.
    """

    def drawing(construct: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, DTensor):
                return construct(x, *args, **kwargs)
            mesh, placements, whole = place(x)
            return construct(DTensor.from_local(x, mesh, placements, shape=whole), *args, **kwargs).to_local()

        return run

    distinct = {id(cell): cell for _, cell in cells}.values()
    for cell in distinct:
        vars(cell)["construct"] = drawing(cell.construct)
    try:
        yield
    finally:
        for cell in distinct:
            del vars(cell)["construct"]
