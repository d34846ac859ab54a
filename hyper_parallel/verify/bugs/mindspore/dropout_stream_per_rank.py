"""Ranks that hold the same activations draw dropout masks of their own. Reported in Megatron-LM 4828.

Activations between the sharded layers are replicated, and their dropout must draw from the stream that the ranks share.
A seed per rank makes replicas differ, and the sums behind them mix several masks.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"tp": 3}
DIFFERS = ("mask", "dropout")
CAUSE = "random-differs"
TOKENS, WIDTH, HIDDEN = 5, 4, 8


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


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.copy, self.sum, self.dropout = Pair(same, ops.AllReduce()), Pair(ops.AllReduce(), same), nn.Dropout(p=0.3)
        self.embed = nn.Dense(WIDTH, WIDTH, dtype=ms.float64)
        self.up = nn.Dense(WIDTH, HIDDEN, has_bias=False, dtype=ms.float64)
        self.down = nn.Dense(HIDDEN, WIDTH, has_bias=False, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        x = self.dropout(ops.tanh(self.embed(x)))
        return x + self.sum(self.down(ops.tanh(self.up(self.copy(x)))))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    ms.set_seed(5 + get_rank() if bug else 5)  # before the dropout is made, which takes its seed then
    random, model = np.random.default_rng(4828), Model()
    model.set_train()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    for cell, dim in ((model.up, 0), (model.down, 1)):
        cell.weight = Parameter(Tensor(part(cell.weight.asnumpy(), dim).copy()), name=cell.weight.name)
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        optimizer(step(Tensor(x), Tensor(y))[1])
