"""An observer of a model's modules, by hooks: their outputs in forward order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from hyper_parallel._tree import CONTAINERS, named_leaves
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.dtensor.layout import Layout
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


def gather_output(
    platform: Platform, outer: Any, inner: Any, shape: tuple[int, ...], *, styled: bool = False
) -> tuple[Any, str]:
    """Return the global value of a module's output; every rank must call it.

    Args:
        platform: the framework.
        outer: the output that the module's style returns.
        inner: the module's own output.
        shape: the single-device shape.
        styled: the style is one of this library's, which returns a shard of the output, or all of it.

    Returns:
        a NumPy array, or None and why the global value is unknown.
    """
    if isinstance(outer, DTensor):
        return global_array(platform, outer), ""
    transport = platform.transport()
    shapes = transport.all_gather_object(tuple(outer.shape), tuple(range(transport.world_size)))
    if all(local_shape == shape for local_shape in shapes):
        return platform.tensor_to_numpy(platform.detach(outer)), ""
    if not isinstance(inner, DTensor):
        return None, "its output is a plain local tensor without a layout"
    layout = _scattered(inner.layout, shapes) if styled else None
    if layout is not None:
        return global_array(platform, platform.wrap(platform.detach(outer), layout)), ""
    return global_array(platform, inner), ""


def _scattered(layout: Layout, shapes: Sequence[tuple[int, ...]]) -> Layout | None:
    """Return the layout in which ranks have local tensors of ``shapes`` after the sums of ``layout`` were scattered.

    Args:
        layout: of the pending output.
        shapes: of the local tensors, by rank.

    Returns:
        None where no dim fits, or several do.
    """
    fitting = []
    axes = [axis for axis, _ in layout.partials]
    for dims in product(range(layout.ndim), repeat=len(axes)):
        candidate = layout
        for axis, dim in zip(axes, dims, strict=True):
            candidate = candidate.with_placement(axis, Shard(dim))
        local_shapes = (candidate.local_shape_at(layout.mesh.coordinate_of(rank)) for rank in layout.mesh.ranks)
        if all(local == shapes[rank] for local, rank in zip(local_shapes, layout.mesh.ranks, strict=True)):
            fitting.append(candidate)
    return fitting[0] if axes and len(fitting) == 1 else None


def global_array(platform: Platform, value: Any) -> Any:
    """Return the global value of a plain tensor or DTensor as a NumPy array."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    return platform.tensor_to_numpy(platform.detach(value))
