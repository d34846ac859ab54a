"""A rank picks its tokens by its rank in another group; equal group sizes hid it. Reported in torchtitan 2842.

Ranks that hold the same batch share out its tokens to the experts. Each should take the chunk of its rank in the tensor
group; it takes that of its rank in the expert group, so that some tokens are computed several times and others never.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim

MESH = {"ep": 2, "tp": 3}
DIFFERS = ("output", "pick")
CAUSE = "permuted"
TOKENS, SAMPLES, WIDTH, HIDDEN = 9, 4, 5, 7


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


class Pair(nn.Cell):
    """One function of the value, another of its gradient."""

    def __init__(self, ahead: Any, back: Any) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def construct(self, x: Tensor) -> Tensor:
        return self.ahead(x)

    def bprop(self, *values: Tensor) -> tuple[Tensor]:
        return (self.back(values[-1]),)


class Model(nn.Cell):
    def __init__(self, axes: dict[str, str], bug: bool) -> None:
        super().__init__()
        size, gather = get_group_size(axes["tp"]), ops.AllGather(axes["tp"])
        own, chosen = get_rank(axes["tp"]), get_rank(axes["ep" if bug else "tp"])
        self.embed = nn.Dense(WIDTH, WIDTH, dtype=ms.float64)
        self.up, self.down = nn.Dense(WIDTH, HIDDEN, dtype=ms.float64), nn.Dense(HIDDEN, WIDTH, dtype=ms.float64)
        self.pick = Pair(lambda full: full.chunk(size)[chosen], gather)
        self.moe = Pair(gather, lambda full: full.chunk(size)[own])

    def construct(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return x + self.moe(self.down(ops.tanh(self.up(self.pick(x)))))


def train(bug: bool) -> None:
    init()
    axes = {axis: group(axis) for axis in MESH}
    random, model, batches = np.random.default_rng(2842), Model(axes, bug), get_group_size(axes["ep"])
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    names = [parameter.name for parameter in model.trainable_params()]
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    over_ep, over_tp = ops.AllReduce("sum", axes["ep"]), ops.AllReduce("sum", axes["tp"])
    for _ in range(3):
        both = np.array_split(random.normal(size=(2, TOKENS, SAMPLES, WIDTH)), batches, 2)[get_rank(axes["ep"])]
        gradients = [over_ep(gradient) / batches for gradient in step(*(Tensor(x.copy()) for x in both))[1]]
        pairs = zip(names, gradients, strict=True)
        optimizer(tuple(g if name.startswith("embed") else over_tp(g) for name, g in pairs))
