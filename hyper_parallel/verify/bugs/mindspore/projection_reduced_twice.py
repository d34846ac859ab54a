"""Some rows of a projection get a gradient that was summed before and is summed again. Reported in AReno 496."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"tp": 3}
DIFFERS = ("gradient", "kv_a.weight")
CAUSE = "components"
TOKENS, WIDTH, HEADS, SIZE, COMPRESSED = 6, 5, 4, 2, 3


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


class SGD(nn.Optimizer):
    def construct(self, gradients: Any) -> Any:
        pairs = zip(self.parameters, gradients, strict=True)
        return [ops.assign(parameter, parameter - self.get_lr() * gradient) for parameter, gradient in pairs]


class Model(nn.Cell):
    def __init__(self, draw: Any, bug: bool) -> None:
        super().__init__()
        self.late, heads = bug, HEADS * SIZE
        self.embed, self.query = Linear(draw((WIDTH, WIDTH))), Linear(part(draw((heads, WIDTH))))
        self.kv_a, self.kv_b = Linear(draw((COMPRESSED + SIZE, WIDTH))), Linear(part(draw((heads, COMPRESSED))))
        self.out, self.reduce = Linear(part(draw((WIDTH, heads)), 1)), Pair(ops.AllReduce(), Tensor.copy)
        self.copy = Pair(Tensor.copy, ops.AllReduce())

    def construct(self, x: Tensor) -> Tensor:
        embedded = ops.tanh(self.embed(x))
        inner = self.copy(embedded)
        compressed, position = self.kv_a(embedded if self.late else inner).split([COMPRESSED, SIZE], 1)
        value = self.kv_b(self.copy(compressed) if self.late else compressed)
        query, value = (x.view(TOKENS, -1, SIZE).swapaxes(0, 1) for x in (self.query(inner), value))
        mixed = ops.matmul(ops.softmax(ops.matmul(query, (value + position).swapaxes(1, 2)), -1), value)
        return self.reduce(self.out(mixed.swapaxes(0, 1).reshape(TOKENS, -1)))


def train(bug: bool) -> None:
    init()
    draw = np.random.default_rng(496).standard_normal
    model = Model(draw, bug)
    optimizer = SGD(0.02, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    for _ in range(3):
        pairs = zip(optimizer.parameters, step(*map(Tensor, draw((2, TOKENS, WIDTH))))[1], strict=True)
        optimizer(tuple(ops.AllReduce()(g) if parameter is model.kv_a.weight else g for parameter, g in pairs))
