"""Converts to and from ``torch.distributed.tensor.DTensor`` with shared storage, for PyTorch's tools such as DCP."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from hyper_parallel._caches import CacheInfo, Owners, register, register_owners
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.errors import ArgumentTypeError, MeshError, UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.transport.base import active_transport

if TYPE_CHECKING:
    from torch.distributed import tensor as peer

    from hyper_parallel.core.dtensor.dtensor import DTensor

__all__ = ["from_torch", "own_mesh", "own_placement", "require_ascending", "to_torch", "torch_mesh"]

_REDUCTIONS = {"prod": "product"}
_OURS = {theirs: ours for ours, theirs in _REDUCTIONS.items()}
_THEIRS = ("sum", "avg", "max", "min", "product")
# Meshes of PyTorch by simulated rank or by world, then by mesh of this library.
_MESHES: WeakKeyDictionary[Any, WeakKeyDictionary[DeviceMesh, Any]] = WeakKeyDictionary()
_WORLDS: Owners[WeakKeyDictionary[DeviceMesh, Any]] = Owners()
_LOCK = threading.Lock()
register_owners(_WORLDS, lambda meshes: CacheInfo("meshes of PyTorch", len(meshes), None))


def to_torch(tensor: DTensor) -> peer.DTensor:
    """Return the tensor as PyTorch's own DTensor, over the same storage and on the same graph.

    The first call with a mesh creates PyTorch's mesh of it, and groups that do not exist yet: all ranks of the mesh
    must call it.

    Raises:
        UnsupportedOnBackend: ``torch.distributed`` is not initialised.
        UnsupportedOperatorError: a layout that PyTorch's DTensor does not have.
        MeshError: ranks descend along an axis of the mesh.
    """
    from torch.distributed import tensor as peer

    if not distributed.is_initialized():
        msg = (
            "to_torch: PyTorch's DTensor needs an initialised world; call torch.distributed.init_process_group() first"
        )
        raise UnsupportedOnBackend(msg)
    layout = tensor.layout
    _refuse_uneven(layout)
    placements = [_theirs(placement) for placement in layout.placements]
    shape = torch.Size(layout.shape or ())
    converted = peer.DTensor.from_local(
        tensor.to_local(), torch_mesh(layout.mesh), placements, run_check=False, shape=shape, stride=_dense(shape)
    )
    return converted  # noqa: RET504 - the annotation of from_local is looser


def from_torch(tensor: peer.DTensor) -> tuple[torch.Tensor, Layout]:
    """Return the local tensor of PyTorch's own DTensor, on the same graph, and its layout in this library.

    Raises:
        ArgumentTypeError: ``tensor`` is not PyTorch's DTensor.
        UnsupportedOperatorError: a placement that only PyTorch has.
    """
    from torch.distributed import tensor as peer

    value: object = tensor
    if not isinstance(value, peer.DTensor):
        msg = f"from_torch: expected a torch.distributed.tensor.DTensor, got {type(value).__name__}"
        raise ArgumentTypeError(msg)
    layout = Layout.place(own_mesh(tensor.device_mesh), tensor.placements, tuple(tensor.shape))
    _refuse_uneven(layout)
    grads = [_theirs(placement) for placement in dual(layout).placements]
    return tensor.to_local(grad_placements=grads), layout


def _theirs(placement: Placement) -> Any:
    from torch.distributed import tensor as peer

    from hyper_parallel.platform.torch.versions import StridedShard as TheirStridedShard

    if isinstance(placement, StridedShard):
        return TheirStridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return peer.Shard(placement.dim)
    if isinstance(placement, Partial):
        reduction = _REDUCTIONS.get(placement.reduce_op, placement.reduce_op)
        if reduction not in _THEIRS:
            msg = f"to_torch: PyTorch's DTensor has no {placement!r}; use x = x.reduce_partial() first"
            raise UnsupportedOperatorError(msg)
        return peer.Partial(reduction)
    return peer.Replicate()


def own_placement(placement: Any) -> Any:
    """Convert a placement of PyTorch to one of this library; return other values unchanged.

    Raises:
        UnsupportedOperatorError: only PyTorch has such a placement.
    """
    from torch.distributed import tensor as peer

    from hyper_parallel.platform.torch.versions import StridedShard as TheirStridedShard

    if not isinstance(placement, peer.Placement):
        return placement
    theirs: Any = placement
    if type(placement) is TheirStridedShard:
        return StridedShard(theirs.dim, int(theirs.split_factor))
    if type(placement) is peer.Shard:
        return Shard(placement.dim)
    if type(placement) is peer.Partial and placement.reduce_op in _THEIRS:
        reduction: Any = _OURS.get(placement.reduce_op, placement.reduce_op)
        return Partial(reduction)
    if type(placement) is peer.Replicate:
        return Replicate()
    msg = f"PyTorch's {placement!r} has no counterpart here; redistribute the tensor to Shard or Replicate first"
    raise UnsupportedOperatorError(msg)


def own_mesh(mesh: Any) -> Any:
    """Convert a mesh of PyTorch to a DeviceMesh of this library; return other values unchanged."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if not isinstance(mesh, TorchMesh):
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.tolist(), mesh_dim_names=mesh.mesh_dim_names)


def _refuse_uneven(layout: Layout) -> None:
    """Reject dims that several axes split unevenly: the two libraries split those differently."""
    for dim, axes in enumerate(layout.dim_axes):
        size = (layout.shape or ())[dim]
        if len(axes) > 1 and size % layout.shard_count(dim):
            msg = (
                f"dim {dim} of {layout.notation()} is split unevenly by {len(axes)} axes, which PyTorch's DTensor "
                "splits differently; redistribute it to one axis first"
            )
            raise UnsupportedOperatorError(msg)


def torch_mesh(mesh: DeviceMesh) -> Any:
    """Return PyTorch's mesh, built once per rank; without the lock if ranks are threads that build it together.

    Raises:
        MeshError: ranks descend along an axis.
    """
    for axis in range(mesh.ndim):
        require_ascending(mesh, axis)
    rank = active_transport()
    if rank is not None:
        return _known(mesh, rank)
    with _LOCK:
        return _known(mesh, distributed.group.WORLD)


def require_ascending(mesh: DeviceMesh, axis: int) -> None:
    """Check that ranks ascend along an axis, as in PyTorch's groups, whose members are always in that order.

    Raises:
        MeshError: they descend somewhere in the mesh, on this rank's line or on another's.
    """
    if not _ascends(mesh.shape, mesh.ranks, axis):
        msg = (
            f"PyTorch's groups order their ranks, and along axis {mesh.names[axis]} of {mesh!r} ranks descend, so that "
            "its collectives would take shards for those of other ranks; make the mesh with ranks that ascend along "
            "every axis, or use this library's own functions, such as redistribute() and full_tensor()"
        )
        raise MeshError(msg)


@lru_cache(maxsize=1024)
def _ascends(shape: tuple[int, ...], ranks: tuple[int, ...], axis: int) -> bool:
    """Whether row-major ``ranks`` ascend along ``axis`` of a grid of ``shape``."""
    step = math.prod(shape[axis + 1 :])
    line = step * shape[axis]
    return all(ranks[at] < ranks[at + step] for at in range(len(ranks)) if at % line < line - step)


register("meshes that ascend", _ascends)


def _known(mesh: DeviceMesh, owner: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    meshes = _MESHES.setdefault(owner, WeakKeyDictionary())
    if mesh not in meshes:
        _WORLDS.add(meshes)
        ranks = torch.tensor(mesh.mesh, dtype=torch.int)
        theirs = TorchMesh(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        # As in DeviceMesh.from_group, which requires names. Ranks outside of the mesh need not call this.
        groups = mesh.get_all_groups()
        theirs._dim_group_names = [group.group_name for group in groups]  # noqa: SLF001 - no public spelling
        registry = getattr(theirs, "_pg_registry", {})  # before 2.12 groups are looked up in the world's registry
        registry.update({group.group_name: group for group in groups})
        meshes[mesh] = theirs
    return meshes[mesh]


def _dense(shape: torch.Size) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
