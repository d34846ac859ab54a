"""Functions on process groups that earlier releases exported; they use the current platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.platform.select import get_platform

__all__ = ["destroy_process_group", "get_backend", "get_process_group_ranks", "init_process_group", "split_group"]


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Join the world; repeated calls with the same arguments do nothing.

    Args:
        backend: gloo, nccl, hccl or mccl; by default the backend of the device.
        options: as for ``get_platform().init_process_group``.

    Raises:
        MeshError: (a ValueError) the rank has already joined a world with different arguments.
    """
    get_platform().init_process_group(backend, **options)


def destroy_process_group(group: Any = None) -> None:
    """Leave the world, or destroy one group.

    Args:
        group: a group of the framework; None is the world.

    Raises:
        MeshError: (a ValueError) ``group`` is not a group.
    """
    get_platform().destroy_process_group(group)


def get_process_group_ranks(group: Any = None) -> list[int]:
    """Return the global ranks of a group, in its order.

    Args:
        group: a group of the framework; None is the world.
    """
    return get_platform().get_process_group_ranks(group)


def get_backend(group: Any = None) -> str:
    """Return the name of a group's backend: gloo, nccl, hccl, simulated or single.

    Args:
        group: a group of the framework; None is the world.
    """
    return get_platform().get_backend(group)


def split_group(parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, **options: Any) -> Any:
    """Split a group into disjoint groups; return the caller's, or None if no list names the caller.

    Args:
        parent_pg: the group to split; None is the world.
        split_ranks: disjoint lists of global ranks.
        options: as for ``get_platform().split_group``.
    """
    return get_platform().split_group(parent_pg, split_ranks, **options)
