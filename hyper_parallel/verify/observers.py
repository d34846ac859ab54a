"""Observers of a model's modules, by hooks: their outputs in forward order, and the gradients of those outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._tree import CONTAINERS, named_leaves
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.verify.compare import magnitude

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["CotangentObserver", "ModuleOutput", "OutputObserver", "gather_output", "global_array"]

_BIASES = ("bias", "beta")
"""Names of bias parameters in PyTorch and MindSpore layers."""


@dataclass(frozen=True)
class ModuleOutput:
    """One tensor in the output of a module.

    Attributes:
        module: the module's path.
        name: the path, with the number of the call and the position in the output where there are several.
        value: the tensor.
    """

    module: str
    name: str
    value: Any


class OutputObserver:
    """Collects the outputs of every module of a model during a forward, innermost first.

    Hooks run in the order of registration: an observer attached before a model is parallelized sees the modules' own
    outputs, one attached after it the outputs that their styles return.

    Attributes:
        outputs: of the forward since :meth:`clear`, by name.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module; a shared module is known by its first path."""
        self.platform = platform
        self.outputs: dict[str, ModuleOutput] = {}
        self._calls: dict[str, int] = {}
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            if id(module) not in attached:
                attached.add(id(module))
                platform.register_forward_hook(module, self._hook(path))

    def clear(self) -> None:
        """Clear the recorded outputs."""
        self.outputs.clear()
        self._calls.clear()

    def _hook(self, path: str) -> Any:
        def record(module: Any, args: Any, output: Any) -> None:
            del module, args
            count = self._calls[path] = self._calls.get(path, 0) + 1
            call = f"#{count}" if count > 1 else ""
            for name, value in named_leaves(f"{path or '(model)'}{call}", output, CONTAINERS):
                if self.platform.is_tensor(value):
                    self.outputs[name] = ModuleOutput(path, name, value)

        return record


class CotangentObserver:
    """Measures the largest gradient of the output of every module that adds a bias, by the bias's path.

    The gradient of a bias is the sum of the gradient of its module's output over tokens. Where that sum is zero (a
    normalization over the batch, or softmax, removes the bias again), rounding leaves noise of the size of its terms.
    Measured against itself, or against other gradients, such noise looks like a fault; measured against the terms, it
    is what rounding allows.

    Attributes:
        largest: since :meth:`clear`; calls of a module add up.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module that adds a bias."""
        self.platform = platform
        self.largest: dict[str, float] = {}
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            parameters = platform.direct_parameters(module)
            names = [name for name in _BIASES if parameters.get(name) is not None]
            if names and id(module) not in attached:
                attached.add(id(module))
                paths = [f"{path}.{name}" if path else name for name in names]
                platform.register_forward_hook(module, self._hook(paths))

    def clear(self) -> None:
        """Forget the last backward."""
        self.largest.clear()

    def _hook(self, paths: list[str]) -> Callable[..., None]:
        def record(gradient: Any) -> None:
            size = magnitude(np.asarray(self.platform.tensor_to_numpy(self.platform.detach(gradient))))
            for path in paths:
                self.largest[path] = self.largest.get(path, 0.0) + size

        def attach(module: Any, args: Any, output: Any) -> None:
            del module, args
            if self.platform.is_tensor(output):
                self.platform.watch_gradient(output, record)

        return attach


def gather_output(platform: Platform, outer: Any, inner: Any, shape: tuple[int, ...]) -> tuple[Any, str]:
    """Return the global value of a module's output; every rank must call it.

    Args:
        platform: the framework.
        outer: the output that the module's style returns.
        inner: the module's own output.
        shape: the single-device shape.

    Returns:
        a NumPy array, or None and why the global value is unknown.
    """
    if isinstance(outer, DTensor):
        return global_array(platform, outer), ""
    transport = platform.transport()
    same = tuple(outer.shape) == shape
    if all(transport.all_gather_object(same, tuple(range(transport.world_size)))):
        return platform.tensor_to_numpy(platform.detach(outer)), ""
    if isinstance(inner, DTensor):
        return global_array(platform, inner), ""
    return None, "its output is a plain local tensor without a layout"


def global_array(platform: Platform, value: Any) -> Any:
    """Return the global value of a plain tensor or DTensor as a NumPy array."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()  # type: ignore[attr-defined] # every framework's class has detach
    return platform.tensor_to_numpy(platform.detach(value))
