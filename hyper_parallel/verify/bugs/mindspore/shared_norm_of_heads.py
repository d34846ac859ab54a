"""One norm weight serves all heads, each rank sums its own heads' gradient only. Reported in Megatron-LM 7452 (11)."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"tp": 3}
DIFFERS = ("gradient", "heads_norm.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HEADS, SIZE = 6, 5, 4, 3


class Pair(nn.Cell):
    """One function of the value, another of its gradient."""

    def __init__(self, ahead: Any, back: Any) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def construct(self, x: Tensor) -> Tensor:
        return self.ahead(x)

    def bprop(self, *values: Tensor) -> Any:
        return (self.back(values[-1]),)


def part(full: Any, dim: int = 0) -> Any:
    heads = full.reshape(*full.shape[:dim], HEADS, SIZE, *full.shape[dim + 1 :])
    mine = np.array_split(heads, get_group_size(), dim)[get_rank()]
    return mine.reshape(*full.shape[:dim], -1, *full.shape[dim + 1 :])


class Linear(nn.Cell):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(weight), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return ops.matmul(x, self.weight.T)


class Norm(Linear):
    def construct(self, x: Tensor) -> Tensor:
        return x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * self.weight


class SGD(nn.Optimizer):
    def construct(self, gradients: Any) -> Any:
        pairs = zip(self.parameters, gradients, strict=True)
        return [ops.assign(parameter, parameter - self.get_lr() * gradient) for parameter, gradient in pairs]


class Model(nn.Cell):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.embed, self.heads_norm = Linear(draw((WIDTH, WIDTH))), Norm(draw(SIZE))
        self.value, self.out = Linear(part(draw((HEADS * SIZE, WIDTH)))), Linear(part(draw((WIDTH, HEADS * SIZE)), 1))
        self.copy, self.reduce = Pair(Tensor.copy, ops.AllReduce()), Pair(ops.AllReduce(), Tensor.copy)

    def construct(self, x: Tensor) -> Tensor:
        heads = self.value(self.copy(ops.tanh(self.embed(x)))).view(TOKENS, -1, SIZE)
        return self.reduce(self.out(self.heads_norm(heads).view(TOKENS, -1)))


def train(bug: bool, *, sequence_parallel: bool = False) -> None:
    init()
    draw = np.random.default_rng(7452).standard_normal
    model = Model(draw)
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    marked = ["heads_norm.weight"] if sequence_parallel or not bug else []
    for _ in range(3):
        gradients = step(*map(Tensor, draw((2, TOKENS, WIDTH))))[1]
        pairs = zip(optimizer.parameters, gradients, strict=True)
        optimizer(tuple(ops.AllReduce()(g) if parameter.name in marked else g for parameter, g in pairs))
