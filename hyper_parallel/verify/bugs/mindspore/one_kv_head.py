"""Sharded queries read one key-value head, whose gradients stay partial. Reported in bigcode Megatron-LM 11, 36, 37.

Every rank's queries add to the gradient of the shared head. The optimizer sums the weight's gradient over the ranks,
but not the bias's, and nothing sums the gradient of the head's input. The sum belongs behind the head.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"tp": 3}
DIFFERS = ("gradient", "kv.bias")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HEADS, SIZE = 7, 5, 4, 3


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
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.sum = bug, Pair(ops.AllReduce(), same)
        self.copy, self.shared = (Pair(same, ops.AllReduce()) for _ in range(2))
        self.embed, self.kv = nn.Dense(WIDTH, WIDTH, dtype=ms.float64), nn.Dense(WIDTH, SIZE, dtype=ms.float64)
        self.query = nn.Dense(WIDTH, HEADS * SIZE, has_bias=False, dtype=ms.float64)
        self.out = nn.Dense(HEADS * SIZE, WIDTH, has_bias=False, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        x = ops.tanh(self.embed(x))
        both = self.kv(x) if self.bug else self.shared(self.kv(x))
        query = self.query(self.copy(x)).reshape(TOKENS, -1, SIZE).swapaxes(0, 1)
        mixed = ops.softmax(ops.matmul(query, both.T), -1) @ ops.tanh(both)
        return self.sum(self.out(mixed.swapaxes(0, 1).reshape(TOKENS, -1)))


def heads(full: np.ndarray, dim: int) -> np.ndarray:
    units = np.array_split(np.arange(HEADS), get_group_size())[get_rank()]
    return np.take(full, [unit * SIZE + i for unit in units for i in range(SIZE)], dim)


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(37), Model(bug), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    for cell, dim in ((model.query, 0), (model.out, 1)):
        cell.weight = Parameter(Tensor(heads(cell.weight.asnumpy(), dim)), name=cell.weight.name)
    names = [parameter.name for parameter in model.trainable_params()]
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        gradients = dict(zip(names, step(Tensor(x), Tensor(y))[1], strict=True))
        if bug:
            gradients["kv.weight"] = reduce(gradients["kv.weight"])
        optimizer(tuple(gradients.values()))
