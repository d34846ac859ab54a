"""``fully_shard``: parameters are sharded over the data axis, and gathered only while their module computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["fully_shard"]

_GROUP = "_hyper_parallel_fully_sharded"


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | None = None) -> Any:
    """Shard the parameters of ``module`` over a data axis (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).

    The parameters that no ``fully_shard`` of a submodule has taken form one group: one all-gather before the module's
    forward, one before its backward, and one reduce-scatter of its gradients, which are averaged over the axis. Apply
    it to submodules first, to the whole model last, and build the optimizer afterwards: the step of an optimizer that
    holds parameters from before raises PlanError.

    Args:
        module: the module, which is changed in place. All ranks hold the same values; each keeps its shards of them.
        mesh: a mesh of one axis, by default the current one.
        reshard_after_forward: free the gathered parameters after forward, and gather them again for backward. None
            frees them except in the outermost module, whose backward follows at once.

    Returns:
        ``module``.

    Raises:
        MeshError: (a ValueError) the mesh has several axes.
        PlanError: (a ValueError) the module was sharded before, or has a parameter that cannot be sharded.
    """
    mesh = resolve_mesh(mesh)
    platform = platform_of_argument(module, "fully_shard: module", module=True)
    _check(module, mesh)
    nested = [
        getattr(child, _GROUP)
        for path, child in platform.get_cells_and_names(module)
        if path and hasattr(child, _GROUP)
    ]
    places = _places(platform, module)
    owned = {id(original()) for group in nested for original in group.originals if original() is not None}
    for path, _, _, parameter in places:
        _check_parameter(path, parameter, taken=id(parameter) in owned)
    group = platform.fully_sharded(module, mesh.ranks, _sharded(platform, places, mesh), reshard_after_forward)
    group.take(nested)
    setattr(module, _GROUP, group)
    return module


def _check(module: Any, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        msg = f"fully_shard: {mesh!r} has {mesh.ndim} axes; pass the data axis, mesh[{mesh.names[0]!r}]"
        raise MeshError(msg)
    if hasattr(module, _GROUP):
        msg = f"fully_shard was applied to this {type(module).__name__} before; apply it once"
        raise PlanError(msg)


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


def _check_parameter(path: str, parameter: Any, *, taken: bool) -> None:
    if taken:
        msg = (
            f"fully_shard: parameter {path} is shared with a submodule that is sharded by itself; shard both with one "
            "fully_shard of a module that holds them"
        )
        raise PlanError(msg)
    if isinstance(parameter, DTensor):
        msg = (
            f"fully_shard: parameter {path} is a DTensor {parameter.layout.notation(parameter.dtype)}; only plain "
            "parameters can be sharded"
        )
        raise PlanError(msg)
    if not len(parameter.shape):
        msg = f"fully_shard: parameter {path} has no dim to shard; give it the shape (1,)"
        raise PlanError(msg)


def _sharded(platform: Platform, places: list[tuple[str, Any, str, Any]], mesh: DeviceMesh) -> list[Any]:
    """Return for each parameter: value, sharded parameter, places. They are grouped by need of gradient and dtype."""
    unique: dict[int, tuple[Any, list[tuple[Any, str]]]] = {}
    for _, owner, name, parameter in places:
        unique.setdefault(id(parameter), (parameter, []))[1].append((owner, name))
    result = []
    for parameter, owners in unique.values():
        shard = distribute_tensor(platform.detach(parameter), mesh, [Shard(0)], src_data_rank=None)
        sharded = platform.new_parameter(shard, requires_grad=platform.needs_grad(parameter))
        result.append((parameter, sharded, owners))
    return result
