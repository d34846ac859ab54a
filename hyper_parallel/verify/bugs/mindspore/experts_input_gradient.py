"""The input's gradient of sharded experts is cut instead of reduce-scattered. Reported in torchtitan 1805."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"tp": 3}
DIFFERS = ("gradient", "embed.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH, HIDDEN, EXPERTS = 9, 4, 7, 2


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
    return np.array_split(full, get_group_size(), dim)[get_rank()]


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
        self.embed, self.router = Linear(draw((WIDTH, WIDTH))), Linear(draw((EXPERTS, WIDTH)))
        self.ups = nn.CellList([Linear(part(draw((HIDDEN, WIDTH)))) for _ in range(EXPERTS)])
        self.downs = nn.CellList([Linear(part(draw((WIDTH, HIDDEN)), 1)) for _ in range(EXPERTS)])
        self.gather = Pair(
            ops.AllGather(), lambda full: Tensor(part(full.asnumpy())) if bug else ops.ReduceScatter()(full)
        )
        self.scatter = Pair(ops.ReduceScatter(), ops.AllGather())

    def construct(self, x: Tensor) -> Tensor:
        weights, x = ops.softmax(self.router(x), -1), self.embed(x)
        tokens = self.gather(x)
        experts = [down(ops.tanh(up(tokens))) for up, down in zip(self.ups, self.downs, strict=True)]
        return x + (weights[..., None] * self.scatter(ops.stack(experts, 1))).sum(1)


def train(bug: bool) -> None:
    init()
    draw = np.random.default_rng(1805).standard_normal
    model = Model(draw, bug)
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, optimizer.parameters)
    for _ in range(3):
        embed, router, *experts = step(*(Tensor(part(values)) for values in draw((2, TOKENS, WIDTH))))[1]
        optimizer((ops.AllReduce()(embed), ops.AllReduce()(router), *experts))
