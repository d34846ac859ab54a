"""Layouts of sharded parameters: the data axis splits what tensor parallelism has left on a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import common_mesh
from hyper_parallel.errors import MeshError, PlanError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["sharded_layout"]


def sharded_layout(path: str, parameter: Any, mesh: DeviceMesh, dim: int | None = 0) -> Layout:
    """Return the layout of the shards of ``parameter``, a DTensor, over the last axis of ``mesh`` as well.

    The dim is split by tensor parallelism first, if at all, and each of those parts over the data axis: a data group
    holds the tensor-parallel shard.

    Args:
        path: name of the parameter.
        parameter: a DTensor on a mesh of other axes.
        mesh: the data axis, or the axis of replicas and the data axis.
        dim: that the data axis splits; None: each of its ranks holds all that tensor parallelism has left on it.

    Raises:
        PlanError: the parameter is partial, or its mesh and ``mesh`` are not slices of one mesh.
    """
    layout = parameter.layout
    notation = layout.notation(parameter.dtype)
    if layout.partials:
        msg = f"fully_shard: parameter {path} is a DTensor {notation}; reduce it first, with reduce_partial()"
        raise PlanError(msg)
    try:
        whole = common_mesh(mesh, layout.mesh)
    except MeshError as error:
        msg = (
            f"fully_shard: parameter {path} is a DTensor {notation} on {layout.mesh!r}, which is not a slice of one "
            f"mesh with {mesh!r}; build one mesh of all axes, and pass slices of it to tensor parallelism and to "
            "fully_shard"
        )
        raise PlanError(msg) from error
    axes = [whole.axis(name) for name in layout.mesh.names]
    dim_axes = [tuple(axes[axis] for axis in split) for split in layout.dim_axes]
    if dim is not None:
        dim_axes[dim] = (*dim_axes[dim], whole.axis(mesh.names[-1]))
    return Layout.of(whole, dim_axes, (), layout.shape)
