"""Names of the cells of a MindSpore program, without wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, nn

from hyper_parallel.verify.frameworks.contract.modules import BaseModelNames, joined

__all__ = ["ModelNames", "is_wrapper"]

_WRAPPED = ((nn.TrainOneStepCell, "network"), (nn.WithLossCell, "_backbone"), (nn.WithEvalCell, "_network"))
"""Cells of MindSpore that train or evaluate a model, and the name of the child that is the model."""


def is_wrapper(cell: nn.Cell) -> bool:
    """Return whether ``cell`` only trains or evaluates a model, which is its child."""
    return _wrapped(cell) is not None


def _wrapped(cell: nn.Cell) -> Any:
    return next((getattr(cell, child) for kind, child in _WRAPPED if isinstance(cell, kind)), None)


class ModelNames(BaseModelNames):
    """Names of the cells, parameters and buffers of a program's models.

    The name of a value is the path of attributes that leads to it, because ``Parameter.name`` need not be unique.
    """

    def unwrapped(self, module: nn.Cell) -> nn.Cell:
        """Return the innermost cell that a cell trains or evaluates, or the cell itself."""
        while _wrapped(module) is not None:
            module = _wrapped(module)
        return module

    def class_name(self, module: nn.Cell) -> str:
        """Return the name of a cell's class."""
        return type(module).__name__

    def has_parameters(self, model: nn.Cell) -> bool:
        """Return whether a model has any parameter."""
        return next(iter(model.get_parameters()), None) is not None

    def walk(self, root: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
        """Yield all cells of the model that ``root`` trains or evaluates, with their paths."""
        yield from self.unwrapped(root).cells_and_names()

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters of the models by name, shared ones by their first name."""
        return self._named("_params")

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by name."""
        return self._named("_buffers")

    def _named(self, table: str) -> dict[str, Any]:
        named: dict[str, Any] = {}
        seen: set[int] = set()
        for prefix, model in self.models.items():
            for path, cell in self.walk(model):
                for name, value in (getattr(cell, table, None) or {}).items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        named[joined(joined(prefix, path), name)] = value
        return named
