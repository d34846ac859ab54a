"""Names of the modules in a program's models, for all frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

__all__ = ["BaseModelNames", "joined"]


class BaseModelNames(ABC):
    """The models of a program, in the order in which they are first called.

    A model is a module that is not called by another module. The names of the first model with parameters have no
    prefix. For every other model the prefix is its class, as in ``Discriminator.layers.0``, with a number if several
    models have this class.

    Attributes:
        models: the models by prefix.
    """

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self._paths: dict[int, str] = {}

    def add(self, module: Any) -> None:
        """Add a module that is not called by another module."""
        model = self.unwrapped(module)
        prefix = self._paths.get(id(model))
        known = prefix is not None
        if prefix is None:
            prefix = "" if self.has_parameters(model) and "" not in self.models else self._prefix(model)
            self.models[prefix] = model
        if not known or module is not model:
            self._scan(prefix, module)

    def path_of(self, module: Any, parent: str) -> str:
        """Return the path of a module; if no model contains it, the path ``parent`` and the module's class."""
        path = self._paths.get(id(module))
        if path is None:
            for prefix, model in self.models.items():
                self._scan(prefix, model)
            path = self._paths.get(id(module))
        return "/".join(filter(None, (parent, self.class_name(module)))) if path is None else path

    @abstractmethod
    def unwrapped(self, module: Any) -> Any:
        """Return the innermost module that a module wraps, or the module itself."""

    @abstractmethod
    def class_name(self, module: Any) -> str:
        """Return the name of a module's class."""

    @abstractmethod
    def has_parameters(self, model: Any) -> bool:
        """Return whether a model has any parameter."""

    @abstractmethod
    def walk(self, root: Any) -> Iterator[tuple[str, Any]]:
        """Yield all modules of ``root``, or of the module that it wraps, with their paths."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Return all parameters of the models by name, shared ones by their first name."""

    @abstractmethod
    def buffers(self) -> dict[str, Any]:
        """Return all buffers by name."""

    def _prefix(self, model: Any) -> str:
        name = self.class_name(model)
        taken = sum(prefix.partition("#")[0] == name for prefix in self.models)
        return f"{name}#{taken + 1}" if taken else name

    def _scan(self, prefix: str, root: Any) -> None:
        for path, module in self.walk(root):
            self._paths.setdefault(id(module), joined(prefix, path))


def joined(prefix: str, path: str) -> str:
    """Return a path inside a model, preceded by the model's prefix, which may be empty."""
    return f"{prefix}.{path}" if prefix and path else prefix or path
