"""The optimizer holds the parameters from before sharding, and the model never learns. Reported in accelerate 2665.

Preparing a model for several ranks puts new parameters into its cells. An optimizer that was made before updates
tensors that no cell reads.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"dp": 3}
DIFFERS = ("weight", "layer.weight")
CAUSE = "not-updated"
SAMPLES, WIDTH = 6, 7


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(WIDTH, WIDTH, has_bias=False, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return ops.tanh(self.layer(x))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(2665), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    before = optim.AdamW(model.trainable_params(), 0.02)
    if get_group_size() > 1:
        model.layer.weight = Parameter(Tensor(model.layer.weight.asnumpy().copy()), name="layer.weight")
    optimizer = before if bug else optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / SAMPLES, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, SAMPLES, WIDTH))
        _, gradients = step(Tensor(part(x).copy()), Tensor(part(y).copy()))
        optimizer(tuple(reduce(gradient) for gradient in gradients))
