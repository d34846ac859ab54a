"""Optimizer steps on local tensors: one conversion per step, instead of one per operator and list.

The functions that PyTorch's optimizers call (``torch.optim.adam.adam``, …) take lists: parameters, gradients and state.
A step is elementwise. If a parameter has the same layout as its gradient and state, each rank steps its own shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import open_blocks
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import unreduced_gradient
from hyper_parallel.platform.torch.dtensor import TorchDTensor

__all__ = [
    "local_lists",
    "on_local_tensors",
    "refuse_wrong_steps",
    "set_replaced",
    "set_unreduced",
    "sparse_on_local_tensors",
]


_UNREDUCED = "_unreduced"  # attribute of a parameter: the reason why its gradient is not reduced, by reducer
_REPLACED = "_replaced"  # attribute of a parameter that fully_shard has replaced: its place, such as Linear.weight


def set_unreduced(parameter: Any, reducer: str, reason: str | None, *, elsewhere: bool = False) -> None:
    """Record why the gradient of a parameter is not reduced.

    Args:
        parameter: parameter that an optimizer may step.
        reducer: function that reduces the gradient: ``fully_shard`` or ``replicate``.
        reason: reason for the message; None if the gradient is reduced.
        elsewhere: the gradient is not in ``parameter.grad`` before it is reduced.
    """
    vars(parameter).setdefault(_UNREDUCED, {})[reducer] = (reason, elsewhere)


def set_replaced(parameter: Any, place: str) -> None:
    """Record that ``fully_shard`` has replaced the parameter at ``place``, such as ``Linear.weight``."""
    vars(parameter)[_REPLACED] = place


@cache
def refuse_wrong_steps() -> None:
    """Make every optimizer step check its parameters from now on."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            _check(parameter, f"parameter {index} of group {number}")


def _check(parameter: Any, name: str) -> None:
    place = vars(parameter).get(_REPLACED)
    if place is not None:
        msg = (
            f"optimizer step: {name} is {place} from before fully_shard, which no longer trains; build the optimizer "
            "after fully_shard"
        )
        raise PlanError(msg)
    for reason, elsewhere in vars(parameter).get(_UNREDUCED, {}).values():
        if reason is not None and (elsewhere or parameter.grad is not None):
            raise unreduced_gradient(name, reason)


Step = Callable[..., None]
_LAYOUT, _LOCAL, _READONLY = attrgetter("_layout"), attrgetter("_local"), attrgetter("_readonly")
_DISTRIBUTED = {TorchDTensor}
# Options with which a step does more than elementwise operations on the lists.
_DISPATCHED = ("differentiable", "fused", "grad_scale", "found_inf")


def on_local_tensors(step: Step) -> Step:
    """Return ``step``, a function of ``torch.optim``, changed to run once on local tensors where that is equivalent.

    Otherwise its operators are dispatched one by one: if a parameter, its gradient and its state differ in layout, a
    reduction is pending, a tensor is read-only, state does not exist yet, or an option is not elementwise.
    """

    @wraps(step)
    def call(*lists: Any, **options: Any) -> None:
        columns = local_lists(lists, options)
        step(*(lists if columns is None else columns), **options)

    call.__dict__["__prepare_scriptable__"] = lambda: step  # TorchScript compiles steps of torch.distributed.optim
    return call


def sparse_on_local_tensors(step: Step) -> Step:
    """Wrap a step as :func:`on_local_tensors` does, but step sparse gradients one by one: mixed lists cannot dispatch.

    Args:
        step: a function of ``torch.optim`` that does not change its lists; without the option ``has_sparse_grad``, all
            gradients are sparse.
    """
    local = on_local_tensors(step)

    @wraps(step)
    def call(*lists: Any, **options: Any) -> None:
        if not options.get("has_sparse_grad", True):
            local(*lists, **options)
            return
        for row in zip(*lists, strict=True):
            local(*([value] for value in row), **options)

    call.__dict__["__prepare_scriptable__"] = lambda: step
    return call


def local_lists(lists: tuple[Any, ...], options: dict[str, Any]) -> list[Any] | None:
    """Return the lists with local tensors, or None to dispatch; the DTensors drop cached views of their values."""
    if not lists or not _are_distributed(lists[0]):
        return None
    if open_blocks() or torch.is_grad_enabled() or any(map(options.get, _DISPATCHED)):
        return None
    if any(isinstance(value, DTensor) for value in options.values()):
        return None
    layouts = list(map(_LAYOUT, lists[0]))
    if any(layout.partials for layout in set(layouts)):
        return None
    columns = [_local_list(values, layouts) for values in lists]
    if any(column is None for column in columns):
        return None
    for values, column in zip(lists, columns, strict=True):
        if values is not column:
            for tensor in values:
                tensor.drop_views()
    return columns


def _are_distributed(values: Any) -> bool:
    return type(values) is list and set(map(type, values)) == _DISTRIBUTED


def _local_list(values: Any, layouts: list[Any]) -> list[Any] | None:
    """Return the local tensors of writable DTensors in ``layouts``, or a list of counters; None for other lists."""
    if _are_distributed(values):
        same = len(values) == len(layouts) and all(map(is_, map(_LAYOUT, values), layouts))
        return list(map(_LOCAL, values)) if same and not any(map(_READONLY, values)) else None
    counters = type(values) is list and all(
        type(value) is int or (type(value) is torch.Tensor and not value.ndim) for value in values
    )
    return values if counters else None
