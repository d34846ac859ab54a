"""Token counts are summed over the data axis only, although the sequence is sharded, too. Reported in verl 5983.

Gradients are averaged over both axes, so each rank divides its sum of losses by the tokens of all ranks. The count and
the factor that undoes the average both belong to both axes; here ranks divide by the tokens of their part of the
sequence.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init

MESH = {"dp": 2, "cp": 3}
DIFFERS = ("loss", "loss")
CAUSE = "scaled-by-count"
ROWS, TOKENS, WIDTH = 5, 8, 3


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
        self.up, self.down = nn.Dense(WIDTH, 7, dtype=ms.float64), nn.Dense(7, 1, dtype=ms.float64)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x))).squeeze(-1)


def train(bug: bool) -> None:
    init()
    axes = {axis: group(axis) for axis in MESH}
    random, model, reduce, ranks = np.random.default_rng(5983), Model(), ops.AllReduce(), get_group_size()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def part(full: np.ndarray) -> Tensor:
        rows = np.array_split(full, get_group_size(axes["dp"]))[get_rank(axes["dp"])]
        return Tensor(np.array_split(rows, get_group_size(axes["cp"]), 1)[get_rank(axes["cp"])].copy())

    def loss(x: Tensor, y: Tensor, valid: Tensor, tokens: Tensor) -> Tensor:
        return ((model(x) - y) ** 2 * valid).sum() / tokens * counted

    counted = get_group_size(axes["dp"]) if bug else ranks
    count = ops.AllReduce("sum", axes["dp"]) if bug else reduce
    optimizer = nn.Momentum(model.trainable_params(), 0.02, 0.9)
    step = ms.value_and_grad(loss, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(ROWS, TOKENS, WIDTH)), random.normal(size=(ROWS, TOKENS))
        lengths = random.integers(2, TOKENS + 1, (ROWS, 1))
        valid = part(np.roll(np.arange(TOKENS) < lengths, 1, 0).astype(np.float64))
        _, gradients = step(part(x), part(y), valid, count(valid.sum()))
        optimizer(tuple(reduce(gradient) / ranks for gradient in gradients))
