"""Every rank adds the bias of a row-parallel linear before the sum. Reported in text-generation-inference 1036."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"tp": 3}
DIFFERS = ("output", "down*")
CAUSE = "repeated-reduction"
TOKENS, WIDTH, HIDDEN = 6, 5, 8


class Pair(nn.Cell):
    """One function of the value, another of its gradient."""

    def __init__(self, ahead: Any, back: Any) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def construct(self, x: Tensor) -> Tensor:
        return self.ahead(x)

    def bprop(self, *values: Tensor) -> tuple[Tensor]:
        return (self.back(values[-1]),)


def same(x: Tensor) -> Tensor:
    return x


class RowParallel(nn.Dense):
    def __init__(self, bug: bool) -> None:
        super().__init__(HIDDEN, WIDTH, dtype=ms.float64)
        self.bug, self.sum = bug, Pair(ops.AllReduce(), same)

    def construct(self, x: Tensor) -> Tensor:
        product = ops.matmul(x, self.weight.T)
        return self.sum(product + self.bias) if self.bug else self.sum(product) + self.bias


class Model(nn.Cell):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.copy, self.up, self.down = (
            Pair(same, ops.AllReduce()),
            nn.Dense(WIDTH, HIDDEN, dtype=ms.float64),
            RowParallel(bug),
        )

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(self.copy(x))))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model = np.random.default_rng(1036), Model(bug)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        cell, attribute = name.split(".")
        full = getattr(getattr(model, cell), attribute).asnumpy()
        setattr(getattr(model, cell), attribute, Parameter(Tensor(part(full, dim).copy()), name=name))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        optimizer(step(Tensor(x), Tensor(y))[1])
