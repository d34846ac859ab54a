"""Dropout cells on plain MindSpore tensors that draw as DTensors do: by the global index of an element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["active_dropouts", "indexed_draws"]


def active_dropouts(cells: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the dropout cells that draw, with their paths."""
    return [
        (path, cell)
        for path, cell in cells
        if "Dropout" in type(cell).__name__ and cell.training and float(getattr(cell, "p", 0.0) or 0.0) > 0
    ]


@contextmanager
def indexed_draws(cells: list[tuple[str, Any]], place: Callable[[Any], tuple[Any, Any, Any]]) -> Iterator[None]:
    """Let dropout ``cells`` draw from the stream of DTensors: their plain operand is a DTensor for the call.

    Args:
        cells: paths and cells.
        place: mesh, placements and global shape of a plain operand; called before the draw.
    """
    plain: list[bool] = []

    def wrap(_cell: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        plain.append(isinstance(x, Tensor) and not isinstance(x, DTensor))
        if not plain[-1]:
            return args
        mesh, placements, whole = place(x)
        return DTensor.from_local(x, mesh, placements, shape=whole), *args[1:]

    def unwrap(_cell: Any, _args: Any, output: Any) -> Any:
        return output.to_local() if plain.pop() and isinstance(output, DTensor) else output

    handles = []
    for _, cell in cells:
        handles += [cell.register_forward_pre_hook(wrap), cell.register_forward_hook(unwrap)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
