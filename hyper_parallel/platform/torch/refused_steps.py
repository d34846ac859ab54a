"""Optimizer steps that are refused: on gradients that are not reduced yet, and on parameters from before sharding."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import unreduced_gradient

__all__ = ["refuse_wrong_steps", "set_replaced", "set_unreduced"]

_UNREDUCED = "_unreduced"  # attribute of a parameter: why its gradient is not reduced, by what reduces it
_REPLACED = "_replaced"  # attribute of a parameter from before sharding: its module and name, and what replaced it


def set_unreduced(parameter: Any, reducer: str, reason: str | None, *, elsewhere: bool = False) -> None:
    """Note why the gradient of a parameter is not reduced.

    Args:
        parameter: that an optimizer may step.
        reducer: what reduces it: ``fully_shard`` or ``replicate``.
        reason: for the message; None if it is reduced.
        elsewhere: the gradient is not in ``parameter.grad`` before it is reduced.
    """
    vars(parameter).setdefault(_UNREDUCED, {})[reducer] = (reason, elsewhere)


def set_replaced(parameter: Any, place: str) -> None:
    """Note that ``fully_shard`` has put another parameter at ``place``, such as ``Linear.weight``."""
    vars(parameter)[_REPLACED] = place


@cache
def refuse_wrong_steps() -> None:
    """Let every optimizer step check its parameters, from now on."""
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
