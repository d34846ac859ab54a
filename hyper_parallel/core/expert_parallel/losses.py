"""Auxiliary losses of a router over the tokens of all ranks; their values do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor, to_local
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of_argument

__all__ = ["load_balancing_loss", "router_z_loss"]


def load_balancing_loss(probabilities: Any, experts: Any) -> Any:
    """Return ``E * sum over e of f[e] * p[e]``, which is 1 if tokens are spread evenly, up to E if not.

    ``f[e]`` is the fraction of all assignments that chose expert ``e``, without gradient, and ``p[e]`` the mean of its
    probability over all tokens, both of the global batch (Switch Transformer; Fedus et al., 2022, equations 4 to 6).

    Args:
        probabilities: probabilities of the router, [T, E], floating; plain or a DTensor of any layout.
        experts: chosen experts, integers [T, k]; a DTensor if ``probabilities`` is one, else plain.

    Returns:
        a 0-d tensor; multiply it by its coefficient, 0.01 in the paper.

    Raises:
        PlanError: (a ValueError) the shapes do not match, or a tensor is empty.
    """
    shape, chosen = tuple(probabilities.shape), tuple(experts.shape)
    if len(shape) != 2 or len(chosen) != 2 or shape[0] != chosen[0] or 0 in (*shape, *chosen):
        msg = (
            f"load_balancing_loss: probabilities is {list(shape)}, experts {list(chosen)}; they must be [T, E] and "
            "[T, k], with no dim of size 0"
        )
        raise PlanError(msg)
    platform = platform_of_argument(probabilities, "load_balancing_loss: probabilities")
    every = platform.arange(0, shape[1], device=platform.device_of(to_local(experts)))
    if isinstance(experts, DTensor):
        every = DTensor.from_local(every, experts.device_mesh)
    assigned = (experts.unsqueeze(-1) == every).sum((0, 1))
    fractions = assigned.to(probabilities.dtype) / (chosen[0] * chosen[1])
    return (fractions * probabilities.mean(0)).sum() * shape[1]


def router_z_loss(logits: Any) -> Any:
    """Return the mean over all tokens of ``logsumexp(logits) ** 2`` (ST-MoE; Zoph et al., 2022, equation 5).

    Args:
        logits: logits of the router, [T, E], floating; plain or a DTensor of any layout.

    Returns:
        a 0-d tensor; multiply it by its coefficient, 0.001 in the paper.

    Raises:
        PlanError: (a ValueError) ``logits`` does not have two dims, or has no elements.
    """
    shape = tuple(logits.shape)
    if len(shape) != 2 or 0 in shape:
        msg = f"router_z_loss: logits is {list(shape)}; it must be [T, E], with no dim of size 0"
        raise PlanError(msg)
    return logits.logsumexp(-1).square().mean()
