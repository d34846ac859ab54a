"""A loss that counts all ranks' tokens is averaged over the ranks once more. Reported in NeMo Automodel 3822.

Each rank divides its sum of losses by the number of tokens of all ranks, so the ranks' gradients add up to the right
one; the data-parallel reducer takes their average, as it does by default.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

MESH = {"dp": 3}
DIFFERS = ("gradient", "*")
CAUSE = "average-for-sum"
SAMPLES, WIDTH = 8, 6


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
    random, model, reduce = np.random.default_rng(3822), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def loss(x: Tensor, y: Tensor, valid: Tensor, count: float) -> Tensor:
        return ((model(x) - y) ** 2 * valid).sum() / count

    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    mean = get_group_size() if bug else 1
    for _ in range(3):
        x, y = random.normal(size=(2, SAMPLES, WIDTH))
        valid = random.random((SAMPLES, 1)) < 0.7
        count = valid.sum()  # every rank reads the whole batch's mask
        x, y, own = (Tensor(part(full)) for full in (x, y, valid.astype(np.float64)))
        step = ms.value_and_grad(loss, None, model.trainable_params())
        optimizer(tuple(reduce(gradient) / mean for gradient in step(x, y, own, float(count))[1]))
