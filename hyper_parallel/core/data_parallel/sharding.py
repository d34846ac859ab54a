"""``fully_shard``: parameters are sharded over the data axis, and gathered only while their module computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from hyper_parallel.core.data_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import common_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.dtensor.steps import narrow_box
from hyper_parallel.errors import MeshError, PlanError, UnsupportedOnBackend
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["REPLICATED", "dim_to_split", "fully_shard", "groups_of", "shard_group", "sharded_layout"]


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


ModuleT = TypeVar("ModuleT")

_GROUP = "_hyper_parallel_fully_sharded"
REPLICATED = "_hyper_parallel_replicated"
_MOST_AXES = 2
_TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Parameters that ``fully_shard`` has replaced, by identity, while another module or the program holds them."""


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
) -> ModuleT:
    """Shard the parameters of ``module`` over a data axis (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).

    The parameters that no ``fully_shard`` of a submodule has taken form one group: one all-gather before the module's
    forward, one before its backward, and one reduce-scatter of its gradients, which are averaged over the data axis and
    the replicas. Parameters of several dtypes form a group for each. Apply it to submodules first, to the whole model
    last, and build the optimizer afterwards: the step of an optimizer that holds parameters from before raises
    PlanError.

    Parameters may be DTensors of tensor parallelism, over other axes of the mesh that ``mesh`` is a slice of. They
    become DTensors on the mesh of both, where the data axis splits dim 0 of each tensor-parallel shard, or
    another dim by ``shard_placement_fn``.

    A list of modules shares one group, which is gathered when each of them is called. On PyTorch a module's class gets
    the methods of :class:`hyper_parallel.FSDPModule`. Parameters may be frozen and unfrozen between passes, on all
    ranks alike; what is added to or removed from a module later is refused at its next forward.

    Parameters may be on the meta device: call ``module.to_empty(device=...)``, initialise or load all values, and build
    the optimizer, before the first forward. Random initial values are those of ``manual_seed``, equal for every
    number of ranks.

    On MindSpore each call of the module gathers and reduces by itself; a backward that reads no parameter, as that of
    an embedding, gathers none. Parameters must be read as attributes of their cell.

    Args:
        module: the module, or a list of modules, changed in place. All ranks hold the same values; each keeps its
            shards of them.
        mesh: the data axis, by default the current mesh; with two axes, parameters are replicated along the first.
        reshard_after_forward: free the gathered parameters after forward, and gather them again for backward. None
            frees them except in the outermost module, whose backward follows at once. A number, over how many ranks a
            part may be kept: 1 keeps them whole, others free all.
        shard_placement_fn: returns the placement of a parameter, ``Shard(dim)``; None is dim 0.
        mp_policy: dtypes in which to compute and reduce, by default the parameters'.
        offload_policy: where shards are; ``CPUOffloadPolicy()`` changes nothing where the CPU computes.
        ignored_params: parameters that stay as they are, and whose gradients are left alone.

    Returns:
        ``module``.

    Raises:
        MeshError: (a ValueError) the mesh has more than two axes.
        PlanError: (a ValueError) the module was sharded before, has a parameter that cannot be sharded, or an option
            has a value that does not exist.
        UnsupportedOnBackend: (a NotImplementedError) shards in host memory for a device with memory of its own; a list
            on MindSpore.
    """
    mesh = resolve_mesh(mesh)
    _check_offload(offload_policy, mesh)
    reshard = _reshard(reshard_after_forward, mesh)
    return shard_group(
        module, mesh, reshard, mp_policy, ignored_params or (), partial(dim_to_split, shard_placement_fn)
    )


def _check_offload(offload: OffloadPolicy | None, mesh: DeviceMesh) -> None:
    if isinstance(offload, CPUOffloadPolicy) and mesh.device_type != "cpu":
        msg = (
            f"fully_shard: CPUOffloadPolicy() is not supported on {mesh.device_type}, which has memory of its own; "
            "leave it out"
        )
        raise UnsupportedOnBackend(msg)


def _reshard(reshard: Any, mesh: DeviceMesh) -> bool | None:
    """Whether to free parameters after forward; a number is one of ranks that divides the data axis."""
    if reshard is None or isinstance(reshard, bool):
        return reshard
    size = mesh.shape[-1]
    if not isinstance(reshard, int) or reshard < 1 or size % reshard:
        ranks = f"the {size} ranks of {mesh.names[-1]}"
        msg = f"fully_shard: reshard_after_forward={reshard!r} must be true, false or a divisor of {ranks}"
        raise PlanError(msg)
    return reshard != 1


def dim_to_split(place: Callable[[Any], Any] | None, parameter: Any) -> int:
    """Return the dim of ``parameter`` to split.

    Args:
        place: ``shard_placement_fn`` of :func:`fully_shard`.
        parameter: of the module.

    Raises:
        PlanError: (a ValueError) ``place`` returns no shard of one of its dims.
    """
    placement = None if place is None else place(parameter)
    if placement is None:
        return 0
    ndim = len(parameter.shape)
    if not isinstance(placement, Shard) or not -ndim <= placement.dim < ndim:
        msg = (
            f"fully_shard: shard_placement_fn returned {placement!r} for a parameter of shape {list(parameter.shape)}; "
            "it must be Shard(dim) of one of its dims, or None"
        )
        raise PlanError(msg)
    return placement.dim % ndim


def shard_group(
    module: ModuleT,
    mesh: DeviceMesh,
    reshard: bool | None,
    policy: MixedPrecisionPolicy | None,
    ignored: Iterable[Any],
    dim_of: Callable[[Any], int | None] = lambda _: 0,
) -> ModuleT:
    """Do the work of :func:`fully_shard`.

    Args:
        module: as there.
        mesh: the data axis, or the axis of replicas and the data axis.
        reshard: as there, like ``policy`` and ``ignored``.
        policy: see above.
        ignored: see above.
        dim_of: returns the dim of a parameter to split; None for one of which each rank keeps all, and whose
            gradients are reduced over all of ``mesh``.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise PlanError("fully_shard: the list of modules is empty")
    platform = platform_of_argument(modules[0], "fully_shard: module", module=True)
    for each in modules:
        _check(each, mesh)
    nested = list({id(group): group for each in modules for group in groups_of(each)[1]}.values())
    listed = list(ignored)
    for each in listed:
        if isinstance(each, str):
            msg = f"fully_shard: ignored_params holds the name {each!r}; pass the parameter itself"
            raise PlanError(msg)
    left_alone = {id(parameter) for parameter in listed}
    found = [place for each in modules for place in _places(platform, each)]
    places = [place for place in found if id(place[3]) not in left_alone]
    for path, _, _, parameter in places:
        _check_parameter(path, parameter, mesh, dim_of(parameter), taken=_TAKEN.get(id(parameter)) is parameter)
    options = _options(mesh, reshard, policy or MixedPrecisionPolicy())
    whole_options = replace(options, ranks=(mesh.rank,), replicas=tuple(mesh.ranks))
    split = [place for place in places if dim_of(place[3]) is not None]
    whole = [place for place in places if dim_of(place[3]) is None]
    parts = [(options, part) for part in _by_dtype(_sharded(platform, split, mesh, dim_of))]
    if whole:
        parts += [(whole_options, part) for part in _by_dtype(_sharded(platform, whole, mesh, dim_of))]
    groups = [platform.fully_sharded(module, chosen, part) for chosen, part in parts]
    _TAKEN.update({id(parameter): parameter for *_, parameter in places})
    for number, group in enumerate(groups):
        group.take([*nested, *groups[:number]])
    for group in groups:
        group.is_outermost = True  # until a module that holds this one is sharded
    for each in modules:
        setattr(each, _GROUP, groups)
        platform.with_sharded_methods(each)
    return module


def groups_of(module: Any) -> tuple[list[Any], list[Any]]:
    """Return the groups of ``module``, none if ``fully_shard`` was not applied to it, and those of its submodules."""
    platform = platform_of_argument(module, "fully_shard: module", module=True)
    nested = {id(child): getattr(child, _GROUP, []) for path, child in platform.get_cells_and_names(module) if path}
    own = getattr(module, _GROUP, [])
    found = {id(group): group for groups in nested.values() for group in groups if group not in own}
    return own, list(found.values())


def _by_dtype(parameters: list[Any]) -> list[list[Any]]:
    """Return the parameters of each dtype; one empty list if there are no parameters."""
    parts: dict[str, list[Any]] = {}
    for parameter in parameters:
        parts.setdefault(str(parameter[0].dtype), []).append(parameter)
    return list(parts.values()) or [[]]


def _check(module: Any, mesh: DeviceMesh) -> None:
    if mesh.ndim > _MOST_AXES:
        msg = (
            f"fully_shard: {mesh!r} has {mesh.ndim} axes; pass the data axis, as in mesh[{mesh.names[0]!r}], or an "
            f"axis of replicas and the data axis, as in mesh[{mesh.names[0]!r}, {mesh.names[1]!r}]"
        )
        raise MeshError(msg)
    if hasattr(module, _GROUP):
        msg = f"fully_shard was applied to this {type(module).__name__} before; apply it once"
        raise PlanError(msg)

    platform = platform_of_argument(module, "fully_shard: module", module=True)
    if any(hasattr(child, REPLICATED) for _, child in platform.get_cells_and_names(module)):
        msg = f"fully_shard: replicate was applied to this {type(module).__name__} or a submodule of it; use one"
        raise PlanError(msg)


def _options(mesh: DeviceMesh, reshard: bool | None, policy: MixedPrecisionPolicy) -> FullyShardedOptions:
    data = mesh.ndim - 1
    replicas = mesh.ranks_along((0,)) if data else (mesh.rank,)
    return FullyShardedOptions(
        mesh.ranks_along((data,)),
        replicas,
        reshard,
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
    )


def _places(platform: Platform, module: Any) -> list[tuple[str, Any, str, Any]]:
    """Return path, owner, name and value of every parameter outside of nested groups, tied ones once per path."""
    taken: list[str] = []
    places = []
    for path, child in platform.get_cells_and_names(module):
        if path and hasattr(child, _GROUP):
            taken.append(f"{path}.")
        if any(f"{path}.".startswith(start) for start in taken):
            continue
        for name, value in platform.direct_parameters(child).items():
            places.append((f"{path}.{name}" if path else name, child, name, value))
    return places


def _check_parameter(path: str, parameter: Any, mesh: DeviceMesh, dim: int | None, *, taken: bool) -> None:
    if taken:
        msg = (
            f"fully_shard: parameter {path} is shared with a module that is sharded by itself; shard both with one "
            "fully_shard of a module that holds them"
        )
        raise PlanError(msg)
    if dim is not None and not len(parameter.shape):
        msg = f"fully_shard: parameter {path} has no dim to shard; give it the shape (1,)"
        raise PlanError(msg)
    if isinstance(parameter, DTensor):
        sharded_layout(path, parameter, mesh, dim)


def _sharded(
    platform: Platform,
    places: list[tuple[str, Any, str, Any]],
    mesh: DeviceMesh,
    dim_of: Callable[[Any], int | None],
) -> list[Any]:
    """Return for each parameter, tied ones once: value, sharded parameter, owners and names."""
    unique: dict[int, tuple[str, Any, list[tuple[Any, str]]]] = {}
    for path, owner, name, parameter in places:
        unique.setdefault(id(parameter), (path, parameter, []))[2].append((owner, name))
    result = []
    for path, parameter, _ in unique.values():
        platform.check_unhooked(parameter, path, "fully_shard")
    for path, parameter, owners in unique.values():
        shard = _shard(platform, path, parameter, mesh, dim_of(parameter))
        sharded = platform.new_parameter(shard, requires_grad=platform.needs_grad(parameter))
        result.append((parameter, sharded, owners))
    return result


def _shard(platform: Platform, path: str, parameter: Any, mesh: DeviceMesh, dim: int | None) -> Any:
    """Return this rank's shard of ``parameter``, in storage of its own."""
    if not isinstance(parameter, DTensor):
        placements = [*[Replicate()] * (mesh.ndim - 1), Replicate() if dim is None else Shard(dim)]
        return distribute_tensor(platform.detach(parameter), mesh, placements, src_data_rank=None)
    layout = sharded_layout(path, parameter, mesh, dim)
    local = platform.detach(parameter.to_local())
    own = narrow_box(local, parameter.layout.local_box(), layout.local_box(), platform)
    return platform.wrap(platform.contiguous(platform.copy(own)), layout)
