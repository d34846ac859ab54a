"""``replicate``: every rank holds the parameters, and gradients are averaged while backward computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.core.data_parallel.sharding import REPLICATED, groups_of
from hyper_parallel.core.dtensor.dtensor import DTensor, resolve_mesh
from hyper_parallel.errors import MeshError, PlanError
from hyper_parallel.platform.contract.replicated import ReplicatedOptions
from hyper_parallel.platform.select import platform_of_argument

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["replicate"]

ModuleT = TypeVar("ModuleT")

_MIB = 1024 * 1024


def replicate(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    *,
    bucket_cap_mb: float = 25,
    src_data_rank: int | None = 0,
) -> ModuleT:
    """Average the gradients of ``module`` over a data axis, in buckets, while backward computes (as PyTorch's DDP).

    After each backward outside of :func:`no_sync`, ``parameter.grad`` is the sum over the ranks divided by their
    number, whatever the sizes of their batches. The gradients are therefore those of one device if its loss is the
    average of the ranks' losses: with uneven batches, scale each rank's loss by the number of ranks times its share of
    the samples. A rank without a gradient of a parameter adds zero; a parameter that no rank used keeps the gradient
    None. On MindSpore the gradients that its transforms return are averaged, once backward has computed all; those of
    parameters that no rank used are zeros.

    A bucket is reduced once all its parameters have gradients, the last bucket first. Backward returns when all are
    reduced. Parameters may be DTensors of tensor parallelism over other axes of the mesh.

    Args:
        module: the module, which is hooked. Its parameters stay the same objects.
        mesh: the data axis, by default the current mesh; with several axes, gradients are averaged over all its ranks.
        bucket_cap_mb: size of a bucket in MiB.
        src_data_rank: position in ``mesh`` of the rank whose parameters and buffers are copied to all ranks; None:
            every rank keeps its own, which must be equal.

    Returns:
        ``module``.

    Raises:
        MeshError: (a ValueError) this rank is not in the mesh, or ``src_data_rank`` is not.
        PlanError: (a ValueError) ``replicate`` or ``fully_shard`` was applied before, a parameter is a DTensor over an
            axis of ``mesh``, or ``bucket_cap_mb`` is not positive.
    """
    mesh = resolve_mesh(mesh)
    platform = platform_of_argument(module, "replicate: module", module=True)
    _check(module, mesh, bucket_cap_mb, src_data_rank)
    for path, parameter in platform.parameters_dict(module).items():
        if isinstance(parameter, DTensor):
            _check_parameter(path, parameter, mesh)
    source = None if src_data_rank is None else mesh.ranks[src_data_rank]
    options = ReplicatedOptions(tuple(mesh.ranks), int(bucket_cap_mb * _MIB), source)
    setattr(module, REPLICATED, platform.replicated(module, options))
    return module


def _check(module: Any, mesh: DeviceMesh, bucket_cap_mb: float, src_data_rank: int | None) -> None:
    own, nested = groups_of(module)
    if own or nested:
        msg = f"replicate: fully_shard was applied to this {type(module).__name__} and reduces its gradients"
        raise PlanError(msg)
    if hasattr(module, REPLICATED):
        msg = f"replicate was applied to this {type(module).__name__} before; apply it once"
        raise PlanError(msg)
    if bucket_cap_mb <= 0:
        msg = f"replicate: bucket_cap_mb must be positive, got {bucket_cap_mb}"
        raise PlanError(msg)
    if mesh.get_coordinate() is None:
        msg = f"replicate: rank {mesh.rank} is not in {mesh!r}"
        raise MeshError(msg)
    if src_data_rank is not None and not 0 <= src_data_rank < len(mesh.ranks):
        msg = (
            f"replicate: src_data_rank {src_data_rank} is not a position in {mesh!r}, which has {len(mesh.ranks)} ranks"
        )
        raise MeshError(msg)


def _check_parameter(path: str, parameter: DTensor, mesh: DeviceMesh) -> None:
    own, here = parameter.layout.mesh, set(mesh.ranks)
    shared = here & set(own.ranks)
    if len(shared) > 1:
        msg = (
            f"replicate: parameter {path} is a DTensor on {own!r}, which shares ranks {sorted(shared)} with {mesh!r}; "
            "its gradient is reduced over them already; pass the data axis alone"
        )
        raise PlanError(msg)
