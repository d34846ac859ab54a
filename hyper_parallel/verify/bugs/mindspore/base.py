"""Shared code of the programs: shards over all ranks, random weights, small cells and an optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank


class Pair(nn.Cell):
    """Applies one function to the value in forward, and a second function to the gradient in backward."""

    def __init__(self, ahead: Any, back: Any) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def construct(self, x: Tensor) -> Tensor:
        return self.ahead(x)

    def bprop(self, *values: Tensor) -> Any:
        return (self.back(values[-1]),)


class Linear(nn.Cell):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return ops.matmul(x, self.weight.T)


class SGD(nn.Optimizer):
    def construct(self, gradients: Any) -> Any:
        pairs = zip(self.parameters, gradients, strict=True)
        return [ops.assign(parameter, parameter - self.get_lr() * gradient) for parameter, gradient in pairs]


def same(x: Tensor) -> Tensor:
    return x


def part(full: Any, dim: int = 0) -> Any:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def initialized(model: nn.Cell, seed: int) -> tuple[np.random.Generator, nn.Cell]:
    """Return a random generator, and the model with weights drawn from it."""
    random = np.random.default_rng(seed)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    return random, model
