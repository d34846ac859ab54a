"""Names of the modules, parameters and buffers of the models that a program calls, without the names of wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelNames", "is_wrapper"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Children in which ``torch.compile``, checkpoint wrappers and FSDP keep the module that they wrap."""


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` only wraps another one: by PyTorch, or as its sole child ``module``, as DDP does."""
    return _wrapped(module) is not None


def _wrapped(module: nn.Module) -> str | None:
    children = dict(module.named_children())
    for name in _WRAPPERS:
        if name in children:
            return name
    return "module" if list(children) == ["module"] and next(module.parameters(recurse=False), None) is None else None


class ModelNames:
    """The models of a program, in the order in which they are first called.

    A model is a module that is called from outside of any other module. The first one with parameters has no prefix;
    others go by their class, ``Discriminator.layers.0``, with a number where there are several.
    """

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}
        self._paths: dict[int, str] = {}

    def add(self, module: nn.Module) -> bool:
        """Add a module that is called from outside; return whether it is a new model."""
        model = _unwrapped(module)
        if id(model) in self._paths:
            self._scan(self._paths[id(model)], module)
            return False
        has_parameters = next(model.parameters(), None) is not None
        first = has_parameters and "" not in self._models
        self._models["" if first else self._prefix(model)] = model
        self._scan(next(reversed(self._models)), module)
        return True

    def path_of(self, module: nn.Module, parent: str) -> str:
        """Return the path of a module; that of a part that no model has is its class after ``parent``'s path."""
        path = self._paths.get(id(module))
        if path is None:
            for prefix, model in self._models.items():
                self._scan(prefix, model)
            path = self._paths.get(id(module))
        return "/".join(filter(None, (parent, _class_name(module)))) if path is None else path

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the models by name, a shared one by its first."""
        return self._named("named_parameters")

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by name."""
        return self._named("named_buffers")

    def _named(self, method: str) -> dict[str, Any]:
        named: dict[str, Any] = {}
        seen: set[int] = set()
        for prefix, model in self._models.items():
            wrappers = {path for path, module in model.named_modules() if is_wrapper(module)}
            for path, value in getattr(model, method)():
                if id(value) not in seen:
                    seen.add(id(value))
                    named[_joined(prefix, _stripped(path, wrappers))] = value
        return named

    def _prefix(self, model: nn.Module) -> str:
        name = _class_name(model)
        taken = sum(prefix.partition("#")[0] == name for prefix in self._models)
        return f"{name}#{taken + 1}" if taken else name

    def _scan(self, prefix: str, root: nn.Module) -> None:
        wrappers = {path for path, module in root.named_modules() if is_wrapper(module)}
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), _joined(prefix, _stripped(path, wrappers)))


def _unwrapped(module: nn.Module) -> nn.Module:
    name = _wrapped(module)
    while name is not None:
        module = getattr(module, name)
        name = _wrapped(module)
    return module


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _joined(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))


def _stripped(path: str, wrappers: set[str]) -> str:
    """Return ``path`` without the parts that lead from a wrapper to what it wraps."""
    parts = path.split(".")
    kept = []
    for position, part in enumerate(parts):
        is_child = ".".join(parts[:position]) in wrappers and part in (*_WRAPPERS, "module")
        if not is_child:
            kept.append(part)
    return ".".join(kept)
