"""Layouts of parameters as plain data, which can be sent to other processes, unlike a mesh with its world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["ParameterLayout", "parameter_layouts"]


@dataclass(frozen=True)
class ParameterLayout:
    """The layout of one parameter of the parallel model.

    Attributes:
        path: path of the parameter.
        shape: global shape.
        mesh_shape: sizes of the axes; empty if the parameter is a plain tensor, complete on every rank.
        mesh_names: names of the axes.
        ranks: ranks of the mesh, row-major.
        dim_axes: per dim the axes that shard it, outermost first.
        partials: pairs of axis and reduction.
    """

    path: str
    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    mesh_names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    dim_axes: tuple[tuple[int, ...], ...] = ()
    partials: tuple[tuple[int, str], ...] = ()

    @property
    def layout(self) -> Layout | None:
        """The layout, on a mesh without a world; None for a plain tensor."""
        if not self.mesh_shape:
            return None
        mesh = DeviceMesh.abstract("cpu", self.mesh_shape, self.ranks, self.mesh_names)
        return Layout.of(mesh, self.dim_axes, self.partials, self.shape)


def parameter_layouts(parameters: Mapping[str, Any]) -> list[ParameterLayout]:
    """Return the layout of every parameter of a model.

    Args:
        parameters: plain tensors or DTensors, by path.
    """
    return [_parameter_layout(path, value) for path, value in parameters.items()]


def _parameter_layout(path: str, value: Any) -> ParameterLayout:
    shape = tuple(int(size) for size in value.shape)
    if not isinstance(value, DTensor):
        return ParameterLayout(path, shape)
    layout, mesh = value.layout, value.layout.mesh
    return ParameterLayout(path, shape, mesh.shape, mesh.names, mesh.ranks, layout.dim_axes, layout.partials)
