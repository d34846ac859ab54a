"""A rank without tokens for the experts leaves out their all-to-all. Reported in DeepSpeed 5794.

The rank that holds a batch without tokens for the experts skips the layer, and with it an all-to-all, while the others
wait in theirs. Ranks without tokens must take part.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"ep": 3}
DIFFERS = ("calls", None)
CAUSE = "unequal-calls"
ROWS, TOKENS, WIDTH = 3, 3, 4


class Model(nn.Cell):
    def __init__(self, bug: bool) -> None:
        super().__init__()
        self.bug, self.embed = bug, nn.Dense(WIDTH, WIDTH, dtype=ms.float64)
        self.swap = ops.AlltoAll(get_group_size(), 1, 1)

    def construct(self, x: Tensor, routed: Tensor) -> Tensor:
        x = ops.tanh(self.embed(x))
        if self.bug and not routed.sum():
            return x
        return x + self.swap(ops.tanh(self.swap(x * routed)))


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(5794), Model(bug), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    rows = slice(get_rank(), get_rank() + 1) if get_group_size() > 1 else slice(None)
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y, routed: ((model(x, routed) - y) ** 2).sum(), None, model.trainable_params())
    for number in range(3):
        x, y = random.normal(size=(2, ROWS, TOKENS, WIDTH))
        routed = np.ones((ROWS, TOKENS, 1))
        routed[number] = 0.0
        _, gradients = step(*(Tensor(full[rows].copy()) for full in (x, y, routed)))
        optimizer(tuple(reduce(gradient) for gradient in gradients))
