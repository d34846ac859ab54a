"""The loss is multiplied by the size of an axis over which gradients are summed. Reported in Megatron-LM 673.

Parts of a sequence divide by the whole sequence's number of tokens, so their gradients add up. The factor undoes an
average over the parts, but the gradients' average is over the data axis alone.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"dp": 2, "cp": 3}
DIFFERS = ("gradient", "*")
CAUSE = "scaled-by-size"
SAMPLES, TOKENS, WIDTH = 4, 8, 5


def group(axis: str) -> str:
    """Name of this rank's group along an axis of the mesh; the last axis varies fastest."""
    if get_group_size() == 1:
        return "hccl_world_group"
    places = np.arange(get_group_size()).reshape(tuple(MESH.values()))
    along = np.moveaxis(places, list(MESH).index(axis), -1).reshape(-1, MESH[axis])
    ranks = next(row.tolist() for row in along if get_rank() in row)
    name = f"{axis}-{ranks[0]}"
    create_group(name, ranks)
    return name


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

    def construct(self, x: Tensor) -> Tensor:
        return self.head(ops.tanh(self.body(x)))


def train(bug: bool) -> None:
    init()
    axes = {axis: group(axis) for axis in MESH}
    dp, cp = (get_group_size(name) for name in axes.values())
    random, model, reduce = np.random.default_rng(673), Model(), ops.AllReduce()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def part(batch: np.ndarray) -> Tensor:
        samples = np.array_split(batch, dp)[get_rank(axes["dp"])]
        return Tensor(np.array_split(samples, cp, 1)[get_rank(axes["cp"])].copy())

    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    scale = cp * dp / (SAMPLES * TOKENS)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() * scale, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, SAMPLES, TOKENS, WIDTH))
        _, gradients = step(part(x), part(y))
        optimizer(tuple(reduce(gradient) / (dp if bug else dp * cp) for gradient in gradients))
