"""Functions on device grids (tuples of sizes) and tensor maps (tuples of the axis that shards each dim).

Axes of a tensor map count from the right. -1 means no axis; a tuple has several axes, outermost first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import LayoutError, UnsupportedOnBackend
from hyper_parallel.platform.select import get_platform, platform_of_argument

__all__ = [
    "DevMat",
    "RedistributionOperatorInfer",
    "_infer_slice_area_by_rank",
    "combine_layout",
    "get_current_layout",
    "get_global_layout",
    "load_layout",
    "save_layout",
]


def _infer_slice_area_by_rank(
    mesh_shape: Sequence[int], tensor_map: Sequence[Any], rank_id: int, full_shape: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the index range ``(begin, end)`` of each dim on the device at position ``rank_id`` of the grid.

    Args:
        mesh_shape: sizes of the grid.
        tensor_map: tensor map, see the module's docstring.
        rank_id: row-major position in the grid.
        full_shape: global sizes of the tensor.

    Raises:
        LayoutError: (a ValueError) the axes do not divide the size of their dim.
    """
    layout = _layout(mesh_shape, tensor_map, full_shape)
    for dim, size in enumerate(full_shape):
        if size % layout.shard_count(dim):
            msg = f"dim {dim} of {list(full_shape)} is not divisible by {layout.shard_count(dim)}"
            raise LayoutError(msg)
    return layout.local_box(rank_id)


class DevMat:
    """A grid of devices.

    Args:
        dev_mat: sizes of the grid.
    """

    def __init__(self, dev_mat: Sequence[int]) -> None:
        self._shape = tuple(dev_mat)

    def get_devices_along_dim(self, rank: int, rank_list: Sequence[int], dim: int | Sequence[int]) -> list[int]:
        """Return the ranks that differ from ``rank`` only along the axes ``dim``.

        Args:
            rank: a rank of the list.
            rank_list: ranks of the grid, row-major.
            dim: one or several axes, counted from the left.
        """
        axes = (dim,) if isinstance(dim, int) else tuple(dim)
        mesh = DeviceMesh.abstract("cpu", self._shape, tuple(rank_list), None).for_rank(rank)
        return list(mesh.ranks_along(tuple(mesh.axis(axis) for axis in axes)))


class RedistributionOperatorInfer:
    """The steps from one layout to the replicated layout; other targets are not supported.

    Args:
        dev_mat: sizes of the grid.
        in_tensor_map: tensor map of the tensor.
        out_tensor_map: tensor map of the target, without any axis.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) the target is not the replicated layout.
    """

    def __init__(self, dev_mat: Sequence[int], in_tensor_map: Sequence[Any], out_tensor_map: Sequence[Any]) -> None:
        if any(axis != -1 for axis in out_tensor_map):
            msg = f"RedistributionOperatorInfer: out_tensor_map {list(out_tensor_map)} is not replicated; "
            raise UnsupportedOnBackend(msg + "redistribute the DTensor itself")
        self._mesh_shape, self._map = tuple(dev_mat), tuple(in_tensor_map)

    def infer_ops_list(self, rank: int, rank_list: Sequence[int]) -> list[tuple[str, tuple[int, int, list[int]]]]:
        """Return one gather per sharded dim: ``("all_concat", (dim, number of shards, ranks with the shards))``.

        Args:
            rank: a rank of the list.
            rank_list: ranks of the grid, row-major.
        """
        layout, grid = _layout(self._mesh_shape, self._map), DevMat(self._mesh_shape)
        steps = []
        for dim, axes in enumerate(layout.dim_axes):
            if axes:
                ranks = grid.get_devices_along_dim(rank, rank_list, axes)
                steps.append(("all_concat", (dim, layout.shard_count(dim), ranks)))
        return steps


def _layout(mesh_shape: Sequence[int], tensor_map: Sequence[Any], shape: Sequence[int] | None = None) -> Layout:
    """Return the layout of a tensor map on a grid of ranks that are numbered from 0."""
    grid = tuple(mesh_shape)
    mesh = DeviceMesh.abstract("cpu", grid, tuple(range(math.prod(grid))), None)
    axes = [tuple(mesh.ndim - 1 - axis for axis in _axes(entry)) for entry in tensor_map]
    return Layout.of(mesh, axes, (), None if shape is None else tuple(shape))


def _axes(entry: Any) -> tuple[int, ...]:
    entries = (entry,) if isinstance(entry, int) else tuple(entry)
    return () if entries == (-1,) else entries


Report = dict[str, dict[str, dict[str, Any]]]


def get_current_layout(cell: Any) -> Report:
    """Return ``{rank: {parameter: facts}}`` for this rank only; the rank is a string.

    Every parameter has ``type`` and ``full_shape``; DTensors also have ``device_matrix``, ``alias_name``, ``rank_list``
    and ``tensor_map``.

    Args:
        cell: a module, or several modules whose parameters all have different names.
    """
    cells = cell if isinstance(cell, (list, tuple)) else [cell]
    facts: dict[str, dict[str, Any]] = {}
    for one in cells:
        platform = platform_of_argument(one, "get_current_layout: cell", module=True)
        facts.update({path: _facts(value) for path, value in platform.parameters_dict(one).items()})
    return {str(get_platform().get_rank()): facts}


def get_global_layout(cell: Any) -> Report:
    """Return the reports of all ranks, a collective call. Arguments as for :func:`get_current_layout`."""
    platform = get_platform()
    everyone = tuple(range(platform.get_world_size()))
    reports = platform.transport().all_gather_object(get_current_layout(cell), everyone)
    return {rank: facts for report in reports for rank, facts in report.items()}


def save_layout(layout_dict: Report, file_path: str | Path) -> None:
    """Write a report to a JSON file; sequences become lists."""
    Path(file_path).write_text(json.dumps(layout_dict), encoding="utf-8")


def load_layout(file_path: str | Path) -> Report:
    """Read the report from a file that :func:`save_layout` wrote."""
    report: Report = json.loads(Path(file_path).read_text(encoding="utf-8"))
    return report


def combine_layout(directory: str | Path) -> Report:
    """Return the reports of the files ``*.layout`` of a folder as one.

    Raises:
        LayoutError: (a ValueError) two files have the same rank.
    """
    combined: Report = {}
    for file in sorted(Path(directory).glob("*.layout")):
        for rank, facts in load_layout(file).items():
            if rank in combined:
                msg = f"combine_layout: {file} has rank {rank}, and so has another file of {directory}"
                raise LayoutError(msg)
            combined[rank] = facts
    return combined


def _facts(parameter: Any) -> dict[str, Any]:
    facts = {"type": str(parameter.dtype), "full_shape": tuple(parameter.shape)}
    if not isinstance(parameter, DTensor):
        return facts
    layout = parameter.layout
    return {
        **facts,
        "device_matrix": layout.mesh_shape,
        "alias_name": layout.alias_name,
        "rank_list": layout.rank_list,
        "tensor_map": layout.tensor_map,
    }
