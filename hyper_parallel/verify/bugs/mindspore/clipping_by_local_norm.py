"""Every rank clips by the norm of what it holds, so replicas drift from the second step. Reported in DeepSpeed 1801.

Linears are sharded, the bias behind them is replicated. The right norm counts all shards, and replicas once.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"tp": 3}
DIFFERS = ("norm", None)
CAUSE = "norm-local"
TOKENS, WIDTH, HIDDEN, LIMIT = 6, 5, 8, 0.5


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
        self.copy, self.sum, self.bias = (
            Pair(same, ops.AllReduce()),
            Pair(ops.AllReduce(), same),
            Parameter(Tensor(np.ones(WIDTH))),
        )
        self.up = nn.Dense(WIDTH, HIDDEN, has_bias=False, dtype=ms.float64)
        self.down = nn.Dense(HIDDEN, WIDTH, has_bias=False, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(self.down(ops.tanh(self.up(self.copy(x))))) + self.bias


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(1801), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    for cell, dim in ((model.up, 0), (model.down, 1)):
        cell.weight = Parameter(Tensor(part(cell.weight.asnumpy(), dim).copy()), name=cell.weight.name)
    names = [parameter.name for parameter in model.trainable_params()]
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(x), Tensor(y))
        if bug:
            optimizer(ops.clip_by_global_norm(gradients, LIMIT))
            continue
        squares = {name: (gradient**2).sum() for name, gradient in zip(names, gradients, strict=True)}
        norm = ops.sqrt(reduce(squares["up.weight"] + squares["down.weight"]) + squares["bias"])
        factor = ops.minimum(LIMIT / norm, Tensor(1.0, ms.float64))
        optimizer(tuple(gradient * factor for gradient in gradients))
