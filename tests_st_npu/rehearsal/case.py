"""A small model of MindSpore and a plan for it, which ``explain`` looks at."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import mint, nn

from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify import ModelCase


class _Net(nn.Cell):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.up = mint.nn.Linear(6, 10, dtype=mindspore.float32)
        self.down = mint.nn.Linear(10, 5, dtype=mindspore.float32)

    def construct(self, x):
        return self.down(mint.tanh(self.up(x)))


def _loss(output, batch):
    error = output - batch[1]
    return (error * error).sum()


def case():
    """The model with one batch."""
    rng = np.random.default_rng(0)
    batch = [rng.standard_normal(shape).astype("float32") for shape in ((3, 6), (3, 5))]
    return ModelCase(_Net, [tuple(batch)], _loss, learning_rate=0.01)


def plan(mesh):
    """Column-wise, then row-wise."""
    del mesh
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}
