"""What a model's modules put out, kept in forward order by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.compare import magnitude

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["CotangentObserver", "ModuleOutput", "OutputObserver", "gather", "whole"]

_ADDED = ("bias", "beta")
"""Names under which PyTorch's and MindSpore's layers hold what they add to their output."""


@dataclass(frozen=True)
class ModuleOutput:
    """One tensor that a module put out.

    Attributes:
        module: the module's path.
        name: the path, with the number of the call and the place in the output where there are several.
        value: the tensor.
    """

    module: str
    name: str
    value: Any


class OutputObserver:
    """Outputs of every module of ``model``, innermost first, as they appear during a forward.

    Hooks run in the order of registration: an observer attached before a model is parallelized sees what the
    modules themselves compute, one attached after it what they hand on.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module; a shared one is known by its first path."""
        self.platform = platform
        self.seen: dict[str, ModuleOutput] = {}
        self._calls: dict[str, int] = {}
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            if id(module) not in attached:
                attached.add(id(module))
                platform.register_forward_hook(module, self._hook(path))

    def clear(self) -> None:
        """Forget the last forward."""
        self.seen.clear()
        self._calls.clear()

    def _hook(self, path: str) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            del module, args
            count = self._calls[path] = self._calls.get(path, 0) + 1
            call = f"#{count}" if count > 1 else ""
            for place, value in _tensors(self.platform, output, ""):
                name = f"{path or '(model)'}{call}{place}"
                self.seen[name] = ModuleOutput(path, name, value)

        return keep


class CotangentObserver:
    """The largest gradient of the output of every module of ``model`` that has a bias, by the bias's path.

    Attributes:
        largest: of the steps since :meth:`clear`; a module that runs several times adds up.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module that adds a bias."""
        self.platform = platform
        self.largest: dict[str, float] = {}
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            held = platform.direct_parameters(module)
            names = [name for name in _ADDED if held.get(name) is not None]
            if names and id(module) not in attached:
                attached.add(id(module))
                paths = [f"{path}.{name}" if path else name for name in names]
                platform.register_forward_hook(module, self._hook(paths))

    def clear(self) -> None:
        """Forget the last backward."""
        self.largest.clear()

    def _hook(self, paths: list[str]) -> Callable[..., None]:
        def keep(gradient: Any) -> None:
            size = magnitude(np.asarray(self.platform.tensor_to_numpy(self.platform.detach(gradient))))
            for path in paths:
                self.largest[path] = self.largest.get(path, 0.0) + size

        def attach(module: Any, args: Any, output: Any) -> None:
            del module, args
            if self.platform.is_tensor(output):
                self.platform.watch_gradient(output, keep)

        return attach


def gather(platform: Platform, outer: Any, inner: Any, shape: tuple[int, ...]) -> tuple[Any, str]:
    """The whole value of an output as a NumPy array, or None and why it cannot be had; every rank must call it.

    Args:
        platform: the framework.
        outer: what the module handed on.
        inner: what it computed itself.
        shape: the single-device shape.
    """
    if isinstance(outer, DTensor):
        return whole(platform, outer), ""
    transport = platform.transport()
    same = tuple(outer.shape) == shape
    if all(transport.all_gather_object(same, tuple(range(transport.world_size)))):
        return platform.tensor_to_numpy(platform.detach(outer)), ""
    if isinstance(inner, DTensor):
        return whole(platform, inner), ""
    return None, "its output is a plain local tensor, of which nothing says how it belongs to the whole"


def whole(platform: Platform, value: Any) -> Any:
    """A plain tensor or DTensor as a NumPy array of the global value."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()  # type: ignore[attr-defined] # every framework's class has detach
    return platform.tensor_to_numpy(platform.detach(value))


def _tensors(platform: Platform, output: Any, place: str) -> Iterator[tuple[str, Any]]:
    if platform.is_tensor(output):
        yield place, output
    elif isinstance(output, (list, tuple)):
        for index, item in enumerate(output):
            yield from _tensors(platform, item, f"{place}[{index}]")
    elif isinstance(output, dict):
        for key, item in output.items():
            yield from _tensors(platform, item, f"{place}[{key!r}]")
