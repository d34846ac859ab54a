"""Names of the cells, parameters and buffers of the models that a program calls, without the names of wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, nn

__all__ = ["ModelNames", "is_wrapper"]

_WRAPPED = ((nn.TrainOneStepCell, "network"), (nn.WithLossCell, "_backbone"), (nn.WithEvalCell, "_network"))
"""Cells of MindSpore that train or evaluate a model, and the child in which they keep it."""


def is_wrapper(cell: nn.Cell) -> bool:
    """Return whether ``cell`` only trains or evaluates another one."""
    return _wrapped(cell) is not None


def _wrapped(cell: nn.Cell) -> Any:
    return next((getattr(cell, child) for kind, child in _WRAPPED if isinstance(cell, kind)), None)


class ModelNames:
    """The models of a program, in the order in which they are first called.

    A model is a cell that is called from outside of any other cell. The first one with parameters has no prefix; others
    go by their class, ``Discriminator.layers.0``, with a number where there are several. Names are the attributes that
    lead to a value: ``Parameter.name`` may be anything, and the same for two parameters.
    """

    def __init__(self) -> None:
        self._models: dict[str, nn.Cell] = {}
        self._paths: dict[int, str] = {}

    def add(self, cell: nn.Cell) -> None:
        """Add a cell that is called from outside."""
        model = cell
        while _wrapped(model) is not None:
            model = _wrapped(model)
        if id(model) in self._paths:
            return
        has_parameters = next(iter(model.get_parameters()), None) is not None
        first = has_parameters and "" not in self._models
        self._models["" if first else self._prefix(model)] = model
        self._scan()

    def path_of(self, cell: nn.Cell, parent: str) -> str:
        """Return the path of a cell; that of a part that no model has is its class after ``parent``'s path."""
        path = self._paths.get(id(cell))
        if path is None:
            self._scan()
            path = self._paths.get(id(cell))
        return "/".join(filter(None, (parent, type(cell).__name__))) if path is None else path

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters of the models by name, a shared one by its first."""
        return self._named("_params")

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by name."""
        return self._named("_buffers")

    def _named(self, table: str) -> dict[str, Any]:
        named: dict[str, Any] = {}
        seen: set[int] = set()
        for path, cell in self._cells():
            for name, value in (getattr(cell, table, None) or {}).items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    named[_joined(path, name)] = value
        return named

    def _cells(self) -> Iterator[tuple[str, nn.Cell]]:
        for prefix, model in self._models.items():
            for path, cell in model.cells_and_names():
                yield _joined(prefix, path), cell

    def _prefix(self, model: nn.Cell) -> str:
        name = type(model).__name__
        taken = sum(prefix.partition("#")[0] == name for prefix in self._models)
        return f"{name}#{taken + 1}" if taken else name

    def _scan(self) -> None:
        for path, cell in self._cells():
            self._paths.setdefault(id(cell), path)


def _joined(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))
