"""Each part of a sequence divides its loss by its own number of valid tokens. Reported in Megatron-LM 7513.

The reducer averages gradients over the parts. That equals the whole sequence's mean only if all parts have equally many
valid tokens; otherwise each must divide by the whole sequence's number, and undo the average.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"cp": 3}
DIFFERS = ("loss", None)
CAUSE = "scaled-by-count"
TOKENS, WIDTH = 9, 5
VALID = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1.0])


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

    def construct(self, x: Tensor) -> Tensor:
        return self.head(ops.tanh(self.body(x)))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model, reduce, ranks = np.random.default_rng(7513), Model(), ops.AllReduce(), get_group_size()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def loss(x: Tensor, y: Tensor, valid: Tensor, count: Tensor) -> Tensor:
        losses = ((model(x) - y) ** 2).sum(-1) * valid
        return losses.sum() / ops.maximum(count, 1.0) * (1 if bug else ranks)

    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(loss, None, model.trainable_params())
    for number in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        valid = Tensor(part(np.roll(VALID, number)).copy())
        count = valid.sum() if bug else reduce(valid.sum())
        _, gradients = step(Tensor(part(x)), Tensor(part(y)), valid, count)
        optimizer(tuple(reduce(gradient) / ranks for gradient in gradients))
