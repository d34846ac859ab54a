"""Process groups that a script builds with PyTorch's functions, or passes to them, next to meshes of this library.

The first messages in such a group, by which PyTorch's pipeline stages connect, are here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import distributed, empty_like

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.interop import require_ascending
from hyper_parallel.transport.real.c10d import C10dTransport

__all__ = ["built_within_the_limit", "group_of_mesh", "received_apart"]

Call = Callable[..., Any]


def group_of_mesh(resolve: Call) -> Call:
    """``_resolve_group`` and ``_expand_group``, which also accept a mesh of this library, or a mesh and an axis."""

    @wraps(resolve)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(group, DeviceMesh):
            group = _group_along(group)
        elif isinstance(group, (tuple, list)) and len(group) == _PAIR and isinstance(group[0], DeviceMesh):
            group = _group_along(*group)
        return resolve(group, *args, **kwargs)

    return call


_PAIR = 2


def _group_along(mesh: DeviceMesh, axis: int | str | None = None) -> Any:
    require_ascending(mesh, 0 if axis is None else mesh.axis(axis))
    return mesh.get_group(axis)


def built_within_the_limit(new_group: Call) -> Call:
    """``_new_group_with_tag``, which builds groups for ``new_group`` and PyTorch's meshes, with a time limit.

    In a gloo world without a coordinator, members that cannot reach each other would wait forever. They get the error
    of :meth:`C10dTransport.built` instead.
    """

    @wraps(new_group)
    def build(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        make = partial(new_group, ranks, timeout, backend, *args, **kwargs)
        if not distributed.is_initialized() or (backend or "gloo").lower() != "gloo":
            return make()
        platform: Any = TorchDTensor._platform
        world = platform.transport()
        members = tuple(range(world.world_size)) if ranks is None else tuple(sorted(ranks))
        return world.built(members, make) if isinstance(world, C10dTransport) else make()

    return build


def received_apart(first_messages: Call) -> Call:
    """``_get_init_p2p_neighbors_ops`` of a pipeline stage, with a tensor of its own for each receive.

    A stage between two others receives from both at once, into one tensor that nothing reads. A program
    that did so would be refused, since the values of the tensor depend on timing.
    """

    @wraps(first_messages)
    def messages(stage: Any) -> Any:
        found = first_messages(stage)
        for each in found:
            if each.op is distributed.irecv:
                each.tensor = empty_like(each.tensor)
        return found

    return messages
