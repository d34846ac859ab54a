"""Shared code of the programs: shards and sums over all ranks, random weights, three steps of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Pair(torch.autograd.Function):
    """Applies one function to the value in forward, and a second function to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Any, back: Any) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad), None, None


def part(full: Tensor, dim: int = 0) -> Tensor:
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def summed(partial: Tensor) -> Tensor:
    total = partial.clone()
    dist.all_reduce(total)
    return total


def initialized(model: nn.Module, seed: int) -> tuple[torch.Generator, nn.Module]:
    """Return a random generator, and the model in float64 with weights drawn from it."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.double().parameters():
        parameter.data.normal_(generator=random)
    return random, model


def reduce_gradients(model: nn.Module, divisor: int = 1) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if divisor != 1:
            parameter.grad /= divisor


def steps(optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yield the numbers of three training steps; after each iteration, the optimizer steps."""
    for step in range(3):
        yield step
        optimizer.step()
        optimizer.zero_grad()
