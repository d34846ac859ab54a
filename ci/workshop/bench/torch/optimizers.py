"""Optimizer steps for the benchmark: on plain parameters, on PyTorch's DTensors and on ours.

Twenty parameters of 8 x 16 local elements, half of them sharded and half replicated, so that what is measured is the
host's cost. The plain parameters are what one rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import tensor as peer

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard

__all__ = ["CASES", "optimizer_steps"]

CASES = 4
"""The number of optimizers that :func:`optimizer_steps` yields."""

_COUNT, _SHAPE = 20, (8, 16)


def optimizer_steps(peer_mesh: Any, mesh: Any) -> Iterator[tuple[str, float, list[Callable[[], Any]]]]:
    """Yield each optimizer by its name and budget, with its step on plain tensors, on PyTorch's DTensors and on ours.

    The budget is the ratio of our time to that on plain tensors.

    Args:
        peer_mesh: PyTorch's mesh.
        mesh: ours, of the same ranks.
    """
    makers: dict[str, tuple[float, Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
        "AdamW step, foreach": (1.3, lambda parameters: torch.optim.AdamW(parameters, foreach=True)),
        "AdamW step": (1.6, lambda parameters: torch.optim.AdamW(parameters, foreach=False)),
        "SGD step, foreach": (1.4, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True)),
        "SGD step": (1.6, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False)),
    }
    for name, (budget, make) in makers.items():
        yield name, budget, [make(parameters).step for parameters in _parameters(peer_mesh, mesh)]


def _parameters(peer_mesh: Any, mesh: Any) -> Iterator[list[Tensor]]:
    """Yield parameters with gradients: plain ones, PyTorch's DTensors, ours."""
    values = [torch.randn(_SHAPE, device=mesh.device_type) for _ in range(_COUNT)]
    theirs, ours = (peer.Shard(0), peer.Replicate()), (Shard(0), Replicate())
    yield [_with_grad(value) for value in values]
    yield [
        _with_grad(peer.DTensor.from_local(value, peer_mesh, [theirs[number % 2]], run_check=False))
        for number, value in enumerate(values)
    ]
    yield [_with_grad(DTensor.from_local(value, mesh, [ours[number % 2]])) for number, value in enumerate(values)]


def _with_grad(value: Tensor) -> Tensor:
    parameter = value.detach().clone().requires_grad_()
    parameter.grad = value.detach() * 0.01
    return parameter
