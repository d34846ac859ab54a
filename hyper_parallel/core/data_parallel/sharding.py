"""``fully_shard``: parameters are sharded over the data axis, and gathered only while their module computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from hyper_parallel.core.data_parallel.meshes import DataAxes, data_axes, placed, sharded_layout
from hyper_parallel.core.data_parallel.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.parameter_paths import MADE_BY_FULLY_SHARD
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.dtensor.steps import narrow_box
from hyper_parallel.errors import ArgumentTypeError, PlanError, UnsupportedOnBackend
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hyper_parallel.core.data_parallel.meshes import DataParallelMeshDims, ShardPlacementResult
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["REPLICATED", "fully_shard", "groups_of", "shard_group"]


ModuleT = TypeVar("ModuleT")

_GROUP = "_hyper_parallel_fully_sharded"
REPLICATED = "_hyper_parallel_replicated"
_TAKEN: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Parameters that ``fully_shard`` has replaced, by identity, as long as a module or the program refers to them.
"""
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Shard | ShardPlacementResult | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> ModuleT:
    """Shard the parameters of ``module`` over a data axis (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).

    The parameters that are not in the group of a submodule form one group: one all-gather before the module's forward,
    one before its backward, and one reduce-scatter of its gradients, which are averaged over the data axis and the
    replicas. Parameters of several dtypes form a group for each. Apply it to submodules first, to the whole model last,
    and build the optimizer afterwards: the step of an optimizer that holds parameters from before raises PlanError.

    Parameters may be DTensors of tensor parallelism, over other axes of the mesh that ``mesh`` is a slice of. They
    become DTensors on the mesh of both, where the data axis splits dim 0 of each tensor-parallel shard, or another dim
    by ``shard_placement_fn``. With ``dp_mesh_dims`` they may also be DTensors on all of ``mesh``, replicated along the
    data axes. Gradients of values that are sharded over these axes are then those of one device. Gradients of values
    that are replicated in name but differ between ranks are averaged, as for plain tensors.

    A list of modules shares one group, which is gathered when each of them is called. On PyTorch a module's class gets
    the methods of :class:`hyper_parallel.FSDPModule`. Parameters may be frozen and unfrozen between passes, on all
    ranks alike; a module with parameters that were added or removed later is rejected at its next forward.

    Parameters may be on the meta device: call ``module.to_empty(device=...)``, initialise or load all values, and build
    the optimizer, before the first forward. Random initial values are those of ``manual_seed``, equal for every
    number of ranks.

    On MindSpore each call of the module gathers and reduces by itself; a backward that reads no parameter, such as that
    of an embedding, gathers none. Parameters must be read as attributes of their cell.

    Args:
        module: the module, or a list of modules, changed in place. All ranks hold the same values; each keeps its
            shards of them.
        mesh: the data axis, by default the current mesh; with two axes, parameters are replicated along the first. With
            ``dp_mesh_dims``, a mesh of more axes.
        reshard_after_forward: free the gathered parameters after forward, and gather them again for backward. None
            frees them except in the outermost module, whose backward follows at once. An integer is the number of
            ranks over which they stay sharded between the passes: 1 keeps them gathered, others free them.
        shard_placement_fn: returns the placement of a parameter, ``Shard(dim)``; None is dim 0. It may return a
            ``ShardPlacementResult`` with other data axes: parameters of the same axes form a group.
        mp_policy: dtypes in which to compute and reduce, by default the parameters'.
        offload_policy: location of the shards; ``CPUOffloadPolicy()`` changes nothing if the CPU computes.
        ignored_params: parameters that are not sharded, and whose gradients are not reduced.
        dp_mesh_dims: names of the data axes of ``mesh``; several that shard are flattened into one.

    Returns:
        ``module``.

    Raises:
        MeshError: (a ValueError) the mesh has more than two axes, or lacks an axis of ``dp_mesh_dims``.
        PlanError: (a ValueError) the module was sharded before, is a container that is never called, has a parameter
            that cannot be sharded, or DTensors on the data axes among other parameters, or an option has an unknown
            value.
        ArgumentTypeError: (a TypeError) ``mp_policy`` is not a policy, or has a dtype that is not floating.
        UnsupportedOnBackend: (a NotImplementedError) shards in host memory for a device with memory of its own; a list
            on MindSpore.
    """
    mesh = resolve_mesh(mesh)
    _check_offload(offload_policy, mesh)
    axes = data_axes(mesh, dp_mesh_dims)
    place = partial(placed, shard_placement_fn, axes)
    return shard_group(module, axes, reshard_after_forward, mp_policy, ignored_params, place)


def _check_offload(offload: OffloadPolicy | None, mesh: DeviceMesh) -> None:
    if isinstance(offload, CPUOffloadPolicy) and mesh.device_type != "cpu":
        msg = (
            f"fully_shard: CPUOffloadPolicy() is not supported on {mesh.device_type}, which has memory of its own; "
            "leave it out"
        )
        raise UnsupportedOnBackend(msg)


def _reshard(reshard: Any, axes: DataAxes) -> bool | None:
    """Return whether to free parameters after forward; a number must divide the size of the data axis."""
    if reshard is None or isinstance(reshard, bool):
        return reshard
    size = len(axes.ranks)
    if not isinstance(reshard, int) or reshard < 1 or size % reshard:
        ranks = f"the {size} ranks of {axes.mesh.names[-1]}" if axes.shards_parameters else "1"
        msg = f"fully_shard: reshard_after_forward={reshard!r} must be true, false or a divisor of {ranks}"
        raise PlanError(msg)
    return reshard != 1


def shard_group(
    module: ModuleT,
    axes: DataAxes,
    reshard: bool | int | None,
    policy: MixedPrecisionPolicy | None,
    ignored: Iterable[Any] | None,
    place: Callable[[Any], tuple[DataAxes, int]],
) -> ModuleT:
    """Do the work of :func:`fully_shard`.

    Args:
        module: as for :func:`fully_shard`.
        axes: the data axes of the module's own group, which is formed even without parameters.
        reshard: ``reshard_after_forward`` of :func:`fully_shard`.
        policy: ``mp_policy`` of :func:`fully_shard`.
        ignored: ``ignored_params`` of :func:`fully_shard`.
        place: returns the data axes of a parameter, and the dim that they shard.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise PlanError("fully_shard: the list of modules is empty")
    platform = platform_of_argument(modules[0], "fully_shard: module", module=True)
    policy = MixedPrecisionPolicy() if policy is None else policy
    _check_policy(platform, policy)
    for each in modules:
        _check(each)
    nested = list({id(group): group for each in modules for group in groups_of(each)[1]}.values())
    left_alone = {id(parameter) for parameter in _listed(platform, ignored)}
    found = [at for each in modules for at in _places(platform, each)]
    places = [at for at in found if id(at[3]) not in left_alone]
    homes = {id(parameter): place(parameter) for *_, parameter in places}
    for path, _, _, parameter in places:
        _check_parameter(path, parameter, *homes[id(parameter)], taken=_TAKEN.get(id(parameter)) is parameter)
    _check_data_axes(places, homes, nested)
    parts = _parts(platform, places, homes, _options_by_axes(axes, homes, reshard, policy))
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


def _listed(platform: Platform, ignored: Iterable[Any] | None) -> list[Any]:
    """Return the parameters in ``ignored``.

    Raises:
        PlanError: ``ignored`` is a single parameter, or holds something that is not a parameter.
    """
    if platform.is_tensor(ignored):
        raise PlanError("fully_shard: ignored_params is a parameter; pass a list of parameters")
    listed = [] if ignored is None else list(ignored)
    for each in listed:
        if not platform.is_tensor(each):
            held = f"the name {each!r}" if isinstance(each, str) else f"a {type(each).__name__}"
            msg = f"fully_shard: ignored_params holds {held}; pass the parameter itself"
            raise PlanError(msg)
    return listed


def _is_on_data_axes(parameter: Any, axes: DataAxes) -> bool:
    return isinstance(parameter, DTensor) and bool(axes.data_names(parameter.layout.mesh))


def _check_data_axes(
    places: list[tuple[str, Any, str, Any]], homes: dict[int, tuple[DataAxes, int]], nested: list[Any]
) -> None:
    """Refuse DTensors on the data axes among other parameters, whose gradients may be sums or means."""
    found = {_is_on_data_axes(each, homes[id(each)][0]): f"parameter {path}" for path, *_, each in places}
    for group in nested:
        for member in group.members[:1]:
            owner, name = member.owners[0]
            found.setdefault(group.options.on_data_axes, f"parameter {name} of the {type(owner).__name__} inside")
    if len(found) > 1:
        msg = (
            f"fully_shard: {found[True]} is a DTensor on the data axes, but {found[False]} is not: gradients of values "
            "that are sharded over those axes are summed for the first and averaged for the second; make all "
            "parameters DTensors on the complete mesh, as distribute_module(module, mesh) does, or none of them"
        )
        raise PlanError(msg)


def _options_by_axes(
    axes: DataAxes, homes: dict[int, tuple[DataAxes, int]], reshard: Any, policy: MixedPrecisionPolicy
) -> dict[DataAxes, FullyShardedOptions]:
    """Return options by data axes: ``axes``, and other axes that ``homes`` gives to some parameters."""
    found = dict.fromkeys([axes, *(own for own, _ in homes.values())])
    return {each: _options(each, reshard, policy) for each in found}


def _parts(
    platform: Platform,
    places: list[tuple[str, Any, str, Any]],
    homes: dict[int, tuple[DataAxes, int]],
    options: dict[DataAxes, FullyShardedOptions],
) -> list[tuple[FullyShardedOptions, list[Any]]]:
    """Return options and parameters of each group: those of the same axes and dtype."""
    parts = []
    for axes, chosen in options.items():
        members = [place for place in places if homes[id(place[3])][0] == axes]
        for part in _by_dtype(_sharded(platform, members, homes)):
            on_data_axes = any(_is_on_data_axes(each, axes) for each, *_ in part)
            parts.append((replace(chosen, on_data_axes=on_data_axes), part))
    return parts


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


def _check(module: Any) -> None:
    if hasattr(module, _GROUP):
        msg = f"fully_shard was applied to this {type(module).__name__} before; apply it once"
        raise PlanError(msg)

    platform = platform_of_argument(module, "fully_shard: module", module=True)
    if platform.is_container(module):
        msg = (
            f"fully_shard: this {type(module).__name__} is never called, so nothing would gather its parameters; "
            "apply fully_shard to each module inside, or to the module that contains it"
        )
        raise PlanError(msg)
    if any(hasattr(child, REPLICATED) for _, child in platform.get_cells_and_names(module)):
        msg = (
            f"fully_shard: replicate was applied to this {type(module).__name__} or a submodule of it; use only one "
            "of the two"
        )
        raise PlanError(msg)


def _check_policy(platform: Platform, policy: Any) -> None:
    missing = [name for name in _DTYPES if not hasattr(policy, name)]
    if missing:
        msg = f"fully_shard: mp_policy={policy!r} must be MixedPrecisionPolicy(param_dtype=..., ...)"
        raise ArgumentTypeError(msg)
    for name in _DTYPES:
        dtype = getattr(policy, name)
        if dtype is not None and not _is_floating(platform, dtype):
            msg = (
                f"fully_shard: mp_policy has {name}={dtype!r}, which must be None or a floating dtype of the framework"
            )
            raise ArgumentTypeError(msg)


def _is_floating(platform: Platform, dtype: Any) -> bool:
    try:
        return platform.is_real_floating(platform.zeros((0,), dtype))
    except (TypeError, ValueError, RuntimeError):  # not a dtype
        return False


def _options(axes: DataAxes, reshard: Any, policy: MixedPrecisionPolicy) -> FullyShardedOptions:
    return FullyShardedOptions(
        axes.ranks,
        axes.replicas,
        _reshard(reshard, axes),
        policy.param_dtype,
        policy.reduce_dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
    )


def _places(platform: Platform, module: Any) -> list[tuple[str, Any, str, Any]]:
    """Return path, owner, name and value of every parameter outside of nested groups, tied parameters once per path."""
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


def _check_parameter(path: str, parameter: Any, axes: DataAxes, dim: int, *, taken: bool) -> None:
    if taken:
        msg = (
            f"fully_shard: parameter {path} is shared with a module that is sharded by itself; shard both with one "
            "fully_shard of a module that holds them"
        )
        raise PlanError(msg)
    if hasattr(parameter, MADE_BY_FULLY_SHARD):
        msg = (
            f"fully_shard: parameter {path} was sharded before, by fully_shard of another module that holds it, such "
            "as one that contains this module; apply fully_shard to inner modules first, and then to the modules "
            "that contain them"
        )
        raise PlanError(msg)
    if axes.shards_parameters and not len(parameter.shape):
        msg = f"fully_shard: parameter {path} has no dim to shard; give it the shape (1,)"
        raise PlanError(msg)
    if isinstance(parameter, DTensor):
        sharded_layout(path, parameter, axes, dim)


def _sharded(
    platform: Platform, places: list[tuple[str, Any, str, Any]], homes: dict[int, tuple[DataAxes, int]]
) -> list[Any]:
    """Return for each parameter, tied ones once: value, sharded parameter, owners and names."""
    unique: dict[int, tuple[str, Any, list[tuple[Any, str]]]] = {}
    for path, owner, name, parameter in places:
        unique.setdefault(id(parameter), (path, parameter, []))[2].append((owner, name))
    result = []
    for path, parameter, _ in unique.values():
        platform.check_unhooked(parameter, path, "fully_shard")
    for path, parameter, owners in unique.values():
        shard = _shard(platform, path, parameter, *homes[id(parameter)])
        sharded = platform.new_parameter(shard, requires_grad=platform.needs_grad(parameter))
        setattr(sharded, MADE_BY_FULLY_SHARD, True)
        result.append((parameter, sharded, owners))
    return result


def _shard(platform: Platform, path: str, parameter: Any, axes: DataAxes, dim: int) -> Any:
    """Return this rank's shard of ``parameter``, in storage of its own."""
    if not isinstance(parameter, DTensor):
        placements = [*[Replicate()] * (axes.mesh.ndim - 1), Shard(dim) if axes.shards_parameters else Replicate()]
        return distribute_tensor(platform.detach(parameter), axes.mesh, placements, src_data_rank=None)
    layout = sharded_layout(path, parameter, axes, dim)
    local = platform.detach(parameter.to_local())
    own = narrow_box(local, parameter.layout.local_box(), layout.local_box(), platform)
    return platform.wrap(platform.contiguous(platform.copy(own)), layout)
