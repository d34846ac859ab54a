"""``clip_grad_norm_`` for parameters of any layout on any mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.platform.select import current_platform, platform_of

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["clip_grad_norm_", "total_norm"]

_EPSILON = 1e-6

# A mesh, and those of its axes that shard a gradient.
ShardAxes = tuple["DeviceMesh | None", tuple[int, ...]]


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Scale gradients in place so that their global norm is at most ``max_norm``.

    Every element of the global gradients counts once, even if several ranks hold it. Partial gradients are reduced
    first. Costs one small all-reduce per combination of mesh and sharding axes.

    Args:
        parameters: one parameter, or an iterable of them; DTensors and plain ones may be mixed.
        max_norm: bound of the norm.
        norm_type: order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the norm is not finite, before anything is scaled.
        foreach: accepted as in PyTorch's signature, without effect.

    Returns:
        the norm before clipping, a plain 0-d tensor, equal on all ranks; on a rank outside of the mesh of all the
        gradients, an empty tensor.

    Raises:
        ValueError: ``norm_type`` is not positive, or ``max_norm`` is negative or NaN.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        MeshLookupError: this rank is outside of the mesh of some of the gradients, so their norm is unknown to it.
    """
    del foreach
    if not max_norm >= 0:  # a negative bound would change the gradients' signs
        msg = f"clip_grad_norm_: max_norm must not be negative, got {max_norm}"
        raise ValueError(msg)
    listed = _as_list(parameters)
    platform = platform_of(listed[0]) if listed else current_platform()
    gradients = [
        gradient for gradient in (_reduced_gradient(platform, each) for each in listed) if gradient is not None
    ]
    norm = _checked_norm("clip_grad_norm_", platform, gradients, norm_type, error_if_nonfinite)
    if not gradients or tuple(norm.shape) == (0,):
        return norm
    factor = platform.clamp_max(max_norm / (norm + _EPSILON), 1.0)
    for gradient in gradients:
        platform.scale_(to_local(gradient), factor)
        if isinstance(gradient, DTensor):
            gradient.drop_views()
    return norm


def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """Return the norm of all elements of tensors on any meshes, as :func:`clip_grad_norm_` computes it for gradients.

    Args:
        tensors: one tensor, or an iterable of them; DTensors and plain ones may be mixed.
        norm_type: as for :func:`clip_grad_norm_`.
        error_if_nonfinite: raise if the norm is not finite.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        MeshLookupError: this rank is outside of the mesh of some of the tensors.
    """
    listed = [each.reduce_partial() if isinstance(each, DTensor) else each for each in _as_list(tensors)]
    platform = platform_of(listed[0]) if listed else current_platform()
    return _checked_norm("get_total_norm", platform, listed, norm_type, error_if_nonfinite)


def _checked_norm(
    what: str, platform: Platform, gradients: list[Any], norm_type: float, error_if_nonfinite: bool
) -> Any:
    order = float(norm_type)
    if not order > 0:
        msg = f"{what}: norm_type must be positive, got {norm_type}"
        raise ValueError(msg)
    if not gradients:
        return platform.zeros(())
    outside = [isinstance(gradient, DTensor) and gradient.device_mesh.coordinate is None for gradient in gradients]
    if all(outside):
        return platform.zeros((0,))
    if any(outside):
        gradients[outside.index(True)].device_mesh.own_coordinate()
    norm = _global_norm(platform, gradients, order)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        unscaled = "; nothing was scaled (error_if_nonfinite=False scales anyway)" if what == "clip_grad_norm_" else ""
        msg = f"{what}: the {order:g}-norm of the gradients is {float(norm)}{unscaled}"
        raise RuntimeError(msg)
    return norm


def _as_list(parameters: Any) -> list[Any]:
    single = hasattr(parameters, "shape") or not isinstance(parameters, Iterable)
    return [parameters] if single else list(parameters)


def _reduced_gradient(platform: Platform, parameter: Any) -> Any:
    """Return the parameter's gradient, reduced if it was partial, or None."""
    gradient = platform.gradient_of(parameter)
    if isinstance(gradient, DTensor) and gradient.layout.partials:
        gradient = gradient.reduce_partial()
        platform.set_gradient(parameter, gradient)
    return gradient


def _global_norm(platform: Platform, gradients: list[Any], order: float) -> Any:
    """Return the global norm: power sums per set of sharding axes are reduced over these axes, then added."""
    join = platform.maximum if order == math.inf else lambda first, second: first + second
    power_sums: dict[ShardAxes, Any] = {}
    for gradient in gradients:
        power_sum = platform.power_sum(to_local(gradient), order)
        shard_axes = _shard_axes(gradient)
        power_sums[shard_axes] = power_sum if shard_axes not in power_sums else join(power_sums[shard_axes], power_sum)
    total = None
    for shard_axes, power_sum in power_sums.items():
        reduced = _reduced(platform, power_sum, shard_axes, "max" if order == math.inf else "sum")
        total = reduced if total is None else join(total, reduced)
    return total if order in (1.0, math.inf) else platform.root(total, order)


def _shard_axes(gradient: Any) -> ShardAxes:
    if not isinstance(gradient, DTensor):
        return None, ()
    layout = gradient.layout
    return layout.mesh, tuple(sorted(axis for axes in layout.dim_axes for axis in axes))


def _reduced(platform: Platform, power_sum: Any, shard_axes: ShardAxes, op: str) -> Any:
    mesh, axes = shard_axes
    if mesh is None or not axes:
        return power_sum
    return platform.transport().all_reduce(power_sum, op, mesh.ranks_along(axes))
