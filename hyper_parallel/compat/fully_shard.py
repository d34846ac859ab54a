"""``fully_shard`` on MindSpore with the arguments and methods of another release.

Gradients are sums over all ranks: over the data axis, the replicas, and the tensor-parallel ranks that have a copy of
the parameter. Each of these tensor-parallel ranks has processed a different shard of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hyper_parallel.compat.refusals import refused_function
from hyper_parallel.core.data_parallel import policy
from hyper_parallel.core.data_parallel.meshes import DataAxes, data_axes, placed
from hyper_parallel.core.data_parallel.policy import CPUOffloadPolicy, OffloadPolicy
from hyper_parallel.core.data_parallel.sharding import groups_of, shard_group
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import framework_of, get_platform

__all__ = [
    "CPUOffloadPolicy",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "get_model_state_dict",
]

ModuleT = TypeVar("ModuleT")
_REDUCTIONS = ("avg", "mean", "sum")

get_model_state_dict = refused_function(
    "get_model_state_dict",
    "call the one of torch.distributed.checkpoint.state_dict, which accepts modules of this library",
)


@dataclass(frozen=True)
class MixedPrecisionPolicy(policy.MixedPrecisionPolicy):
    """Dtypes of a fully sharded module; see :class:`hyper_parallel.MixedPrecisionPolicy`.

    Attributes:
        apply_grad_on_fp32_main_grad: add reduced gradients to ``main_grad`` of each parameter, a float32 DTensor, and
            leave ``grad`` None.
    """

    apply_grad_on_fp32_main_grad: bool = False


class HSDPModule:
    """Base class that ``fully_shard`` adds to a module's class."""

    def set_reduce_op_type(self, op: str) -> None:
        """Set the reduction of this module's own gradients: ``"sum"`` or ``"avg"``, the default.

        Raises:
            ValueError: ``op`` is neither ``"sum"`` nor ``"avg"``.
        """
        if op not in _REDUCTIONS:
            msg = f"set_reduce_op_type: {op!r} is not one of {', '.join(_REDUCTIONS)}"
            raise ValueError(msg)
        for group in groups_of(self)[0]:
            group.reduction.averages = op != "sum"

    def set_requires_all_reduce(self, requires: bool) -> None:
        """Set whether later backwards reduce gradients over the replicas; until one does, partial sums are kept."""
        for group in _all_groups(self):
            group.reduction.over_replicas = requires

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters that this module and its submodules manage."""
        for group in _all_groups(self):
            group.drop_gradients()

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Accept modules to prefetch in forward; ignored, since each module is gathered when it is called."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Accept modules to prefetch in backward; ignored, since each module is gathered when its backward starts."""


class _RankState:
    """Base class of untrained DTensors that ``fully_shard`` ignores: each rank keeps its own values.

    For example, MindFormers declares the token counts of experts as replicated, lets each rank add its own counts, and
    sums them over the ranks itself before it uses them.
    """

    def add_(self, other: Any, **options: Any) -> Any:
        """Add in place; a plain tensor is added to this rank's values."""
        if isinstance(other, DTensor):
            return super().add_(other, **options)  # type: ignore[misc] # of the tensor's class
        with SkipDTensorDispatch():
            return super().add_(other, **options)  # type: ignore[misc]


def _all_groups(module: Any) -> list[Any]:
    own, nested = groups_of(module)
    return [*own, *nested]


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Shard | None] | None = None,
    mp_policy: policy.MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Any] | None = None,
    replicate_params: Iterable[Any] | None = None,
    comm_fusion: bool = False,
) -> ModuleT:
    """Shard the parameters of ``module``; see :func:`hyper_parallel.fully_shard`. Its class becomes an HSDPModule.

    Args:
        module: a cell, which is changed in place.
        mesh: the data axis, or the axis of replicas and the data axis.
        reshard_after_forward: as for :func:`hyper_parallel.fully_shard`.
        shard_placement_fn: returns the dim of a parameter to shard; None is dim 0.
        mp_policy: dtypes in which to compute and reduce.
        offload_policy: location of the shards.
        ignored_params: parameters, possibly of other modules, that are not changed.
        replicate_params: parameters that stay replicated; their gradients are reduced over all of ``mesh``.
        comm_fusion: ignored; parameters of one module always share one collective.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) the framework is PyTorch, or shards are in host memory while the
            device has its own memory.
        PlanError: (a ValueError) as for :func:`hyper_parallel.fully_shard`.
    """
    del comm_fusion
    if framework_of(module) == "torch":
        msg = f"{fully_shard.__module__}.fully_shard is for MindSpore; on PyTorch call hyper_parallel.fully_shard"
        raise UnsupportedOnBackend(msg)
    if isinstance(offload_policy, CPUOffloadPolicy) and get_platform().device_type() != "cpu":
        msg = "fully_shard: CPUOffloadPolicy() is not supported on devices with memory of their own; leave it out"
        raise UnsupportedOnBackend(msg)
    ignored = list(ignored_params or ())
    for parameter in ignored:
        if isinstance(parameter, DTensor) and not parameter.requires_grad:
            _add_base(parameter, _RankState)
    kept_whole = {id(parameter) for parameter in replicate_params or ()}

    axes = data_axes(mesh, None)

    def place(parameter: Any) -> tuple[DataAxes, int]:
        if id(parameter) in kept_whole:
            return DataAxes(mesh, shards_parameters=False), 0
        return placed(shard_placement_fn, axes, parameter)

    shard_group(module, axes, reshard_after_forward, mp_policy, ignored, place)
    for group in groups_of(module)[0]:
        group.reduction.adds_copies = True
        group.reduction.on_main_grad = getattr(mp_policy, "apply_grad_on_fp32_main_grad", False)
    _add_base(module, HSDPModule)
    return module


def _add_base(instance: Any, base: type) -> None:
    """Make ``instance`` an instance of ``base`` as well."""
    cls = type(instance)
    if not issubclass(cls, base):
        instance.__class__ = type(cls.__name__, (base, cls), {"__module__": cls.__module__})
