"""An observer of a model's modules, by hooks: their outputs in forward order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import CONTAINERS, named_leaves
from hyper_parallel.core.dtensor.dtensor import DTensor

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ModuleOutput", "OutputObserver", "gather_output", "global_array"]


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
        self._running: list[str] = []
        attached: set[int] = set()
        for path, module in platform.get_cells_and_names(model):
            if id(module) not in attached:
                attached.add(id(module))
                platform.register_forward_pre_hook(module, self._enter(path))
                platform.register_forward_hook(module, self._hook(path))

    @property
    def running(self) -> str:
        """The path of the innermost module that runs; empty in none, and in the model itself."""
        return self._running[-1] if self._running else ""

    def clear(self) -> None:
        """Clear the recorded outputs."""
        self.outputs.clear()
        self._calls.clear()
        self._running.clear()

    def _enter(self, path: str) -> Any:
        def enter(module: Any, args: Any) -> None:
            del module, args
            self._running.append(path)

        return enter

    def _hook(self, path: str) -> Any:
        def record(module: Any, args: Any, output: Any) -> None:
            del module, args
            if self._running:
                self._running.pop()
            count = self._calls[path] = self._calls.get(path, 0) + 1
            call = f"#{count}" if count > 1 else ""
            for name, value in named_leaves(f"{path or '(model)'}{call}", output, CONTAINERS):
                if self.platform.is_tensor(value):
                    self.outputs[name] = ModuleOutput(path, name, value)

        return record


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
