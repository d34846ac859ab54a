"""Reports of how the parameters of a module are laid out, as programs that write checkpoints read them."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.select import get_platform, platform_of_argument

__all__ = ["get_current_layout", "get_global_layout"]

Report = dict[str, dict[str, dict[str, Any]]]


def get_current_layout(cell: Any) -> Report:
    """Return ``{rank: {parameter: facts}}`` with this rank alone; its number is a string.

    ``type`` and ``full_shape`` are of every parameter; ``device_matrix``, ``alias_name``, ``rank_list`` and
    ``tensor_map`` of DTensors.

    Args:
        cell: a module, or several, whose parameters have different names.
    """
    cells = cell if isinstance(cell, (list, tuple)) else [cell]
    facts: dict[str, dict[str, Any]] = {}
    for one in cells:
        platform = platform_of_argument(one, "get_current_layout: cell", module=True)
        facts.update({path: _facts(value) for path, value in platform.parameters_dict(one).items()})
    return {str(get_platform().get_rank()): facts}


def get_global_layout(cell: Any) -> Report:
    """Return the reports of all ranks, which all of them call. Arguments as for :func:`get_current_layout`."""
    platform = get_platform()
    everyone = tuple(range(platform.get_world_size()))
    reports = platform.transport().all_gather_object(get_current_layout(cell), everyone)
    return {rank: facts for report in reports for rank, facts in report.items()}


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
