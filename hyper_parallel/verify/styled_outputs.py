"""Placements of plain tensors that styles return, from the layouts of their modules' outputs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel.styles.base import style_of
from hyper_parallel.verify.frameworks.contract.records import Region

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["StyledOutputs"]


class StyledOutputs:
    """Infers the placements of plain tensors that the styled modules of a model return.

    A style of this library reduces partial values of its module's output and returns the complete output or a shard. If
    it returns a plain tensor, the layout of the module's own output and the shape of the tensor determine which shard.
    """

    def __init__(self, platform: Platform, model: Any) -> None:
        """Attach to every module before styles do, because hooks run in the order of registration."""
        self._layouts: dict[int, Layout] = {}
        modules = {id(module): module for _, module in platform.get_cells_and_names(model)}
        for module in modules.values():
            platform.register_forward_hook(module, self._note)

    def _note(self, module: Any, args: Any, output: Any) -> None:
        del args
        if isinstance(output, DTensor):
            self._layouts[id(module)] = output.layout
        else:
            self._layouts.pop(id(module), None)

    def place(self, module: Any, value: Any) -> Region | None:
        """Return the placement of the plain output ``value`` of ``module``; None if it cannot be determined."""
        own = self._layouts.get(id(module))
        if own is None or style_of(module) is None or isinstance(value, DTensor):
            return None
        shape = tuple(int(size) for size in value.shape)
        if not own.partials and shape == tuple(own.local_shape or ()):
            return _region(own)
        if shape == tuple(own.shape or ()):
            return Region(shape, (0,) * len(shape))
        scattered = [layout for layout in _scattered(own) if tuple(layout.local_shape) == shape]
        return _region(scattered[0]) if len(scattered) == 1 else None


def _region(layout: Layout) -> Region:
    return Region(tuple(layout.shape or ()), tuple(interval[0] for interval in layout.local_box()))


def _scattered(layout: Layout) -> list[Layout]:
    """Return the layouts in which each pending sum of ``layout`` is scattered along a dim."""
    axes = [axis for axis, _ in layout.partials]
    layouts = []
    for dims in product(range(layout.ndim), repeat=len(axes)):
        candidate = layout
        for axis, dim in zip(axes, dims, strict=True):
            candidate = candidate.with_placement(axis, Shard(dim))
        layouts.append(candidate)
    return layouts if axes else []
