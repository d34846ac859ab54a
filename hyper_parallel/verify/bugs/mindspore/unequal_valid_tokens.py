"""Micro-steps with unequal numbers of valid tokens count alike. Reported in transformers 34191.

Each micro-step's loss is the mean over its own valid tokens, divided by the number of micro-steps. Tokens of short
micro-batches then weigh more than those of long ones; the divisor is the number of valid tokens of the whole step.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"dp": 3}
DIFFERS = ("loss", "loss")
CAUSE = "scaled-by-count"
MICRO_STEPS, ROWS, TOKENS, WIDTH = 3, 4, 9, 3


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(WIDTH, 5, dtype=ms.float64), nn.Dense(5, 1, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x))).squeeze(-1)


def part(full: np.ndarray) -> Tensor:
    return Tensor(np.array_split(full, get_group_size())[get_rank()].copy())


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(34191), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def loss(x: Tensor, y: Tensor, valid: Tensor, tokens: Tensor) -> Tensor:
        return ((model(x) - y) ** 2 * valid).sum() / tokens

    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(loss, None, model.trainable_params())
    for _ in range(3):
        x = random.normal(size=(MICRO_STEPS, ROWS, TOKENS, WIDTH))
        y = random.normal(size=(MICRO_STEPS, ROWS, TOKENS))
        valid = (np.arange(TOKENS) < random.integers(1, TOKENS + 1, (MICRO_STEPS, ROWS, 1))).astype(np.float64)
        total = [0.0] * 4
        for number in range(MICRO_STEPS):
            own = part(valid[number])
            tokens = reduce(own.sum()) * MICRO_STEPS if bug else Tensor(valid.sum())
            _, gradients = step(part(x[number]), part(y[number]), own, tokens)
            total = [before + reduce(gradient) for before, gradient in zip(total, gradients, strict=True)]
        optimizer(tuple(total))


def single() -> None:
    """Train without the bug, which one device has, too."""
    train(bug=False)
