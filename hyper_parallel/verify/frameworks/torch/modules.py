"""Names of the modules of a PyTorch program without wrappers, and why modules are called, such as recomputation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.torch.versions import current_graph_task_id
from hyper_parallel.verify.frameworks.contract.modules import BaseModelNames, joined

__all__ = ["ModelNames", "infers_shapes", "is_wrapper", "recomputes"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names of the children in which ``torch.compile``, checkpoint wrappers and FSDP keep the wrapped module."""

_HIDDEN = (*_WRAPPERS, "module")

_LIBRARIES = (str(Path(str(torch.__file__)).parent), str(Path(__file__).parents[3]))
_SHAPE_INFERENCE = ("_forward_metadata_inference", "_shape_inference")  # in pipeline stages of different releases


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` only wraps a module: as a wrapper of PyTorch, or with a single child ``module``."""
    return _wrapped(module, dict(module.named_children())) is not None


def _wrapped(module: nn.Module, children: Mapping[str, nn.Module]) -> str | None:
    for name in _WRAPPERS:
        if name in children:
            return name
    return "module" if list(children) == ["module"] and next(module.parameters(recurse=False), None) is None else None


class ModelNames(BaseModelNames):
    """Names of the modules, parameters and buffers of a program's models."""

    def unwrapped(self, module: nn.Module) -> nn.Module:
        """Return the innermost module that a module wraps, or the module itself."""
        while True:
            children = dict(module.named_children())
            name = _wrapped(module, children)
            if name is None:
                return module
            module = children[name]

    def class_name(self, module: nn.Module) -> str:
        """Return the name of a module's class, without the prefix of FSDP2."""
        return type(module).__name__.removeprefix("FSDP")

    def has_parameters(self, model: nn.Module) -> bool:
        """Return whether a model has any parameter."""
        return next(model.parameters(), None) is not None

    def walk(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules of ``root`` with their paths."""
        yield from _walk(root, "", set())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the models by name, shared ones by their first name."""
        return self._named("_parameters")

    def buffers(self) -> dict[str, Any]:
        """Return all buffers by name."""
        return self._named("_buffers")

    def _named(self, registry: str) -> dict[str, Any]:
        named: dict[str, Any] = {}
        seen: set[int] = set()
        for prefix, model in self.models.items():
            for path, module in self.walk(model):
                for name, value in getattr(module, registry).items():
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        named[joined(joined(prefix, path), name)] = value
        return named


def _walk(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths; the paths have no components for wrappers."""
    if module in seen:
        return
    seen.add(module)
    yield path, module
    children = dict(module.named_children())
    wraps = bool(children) and _wrapped(module, children) is not None
    for name, child in children.items():
        yield from _walk(child, path if wraps and name in _HIDDEN else joined(path, name), seen)


def infers_shapes() -> bool:
    """Return whether a pipeline stage calls its module on empty tensors, to infer the shapes of its results."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame: Any = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_name in _SHAPE_INFERENCE:
            return True
        frame = frame.f_back
    return False


def recomputes() -> bool:
    """Return whether backward is running, which means that the called modules are recomputed."""
    return bool(current_graph_task_id() != -1)
