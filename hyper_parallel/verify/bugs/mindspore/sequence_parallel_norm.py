"""The gradient of the final norm is not summed over the ranks of the sequence. Reported in Megatron-LM 1446.

Norms inside the layers are among those whose gradients are summed; the norm after the last layer is left out.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"tp": 3}
DIFFERS = ("gradient", "final_norm.weight")
CAUSE = "missing-reduction"
TOKENS, WIDTH = 7, 5


class Norm(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(WIDTH)))

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-6) * self.weight


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.final_norm = Norm(), Norm()
        self.layer = nn.Dense(WIDTH, WIDTH, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.final_norm(x + ops.tanh(self.layer(self.norm(x))))


def part(full: np.ndarray, dim: int = 0) -> np.ndarray:
    return np.array_split(full, get_group_size(), dim)[get_rank()]


def train(bug: bool) -> None:
    init()
    random, model, reduce = np.random.default_rng(1446), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    optimizer = optim.AdamW(model.trainable_params(), 0.05)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(part(x)), Tensor(part(y)))
        names = [parameter.name for parameter in model.trainable_params()]
        summed = [name for name in names if not (bug and name == "final_norm.weight")]
        optimizer(tuple(reduce(g) if name in summed else g for name, g in zip(names, gradients, strict=True)))
