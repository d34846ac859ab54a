"""Bugs: gradient norms, optimizers, hooks and checkpoints that do not cover the complete model."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, init
from mindspore.experimental import optim

from hyper_parallel.verify.bugs.mindspore.base import Pair, initialized, part, same


def clipping_by_local_norm(bug: bool) -> None:
    """Every rank clips by the norm of its own gradients, so replicas drift apart from the second step on.

    Linears are sharded, and the bias after them is replicated. The right norm includes all shards, and each replicated
    value once.
    """
    TOKENS, WIDTH, HIDDEN, LIMIT = 6, 5, 8, 0.5

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.copy, self.sum, self.bias = (
                Pair(same, ops.AllReduce()),
                Pair(ops.AllReduce(), same),
                Parameter(Tensor(np.ones(WIDTH))),
            )
            self.up = nn.Dense(WIDTH, HIDDEN, has_bias=False, dtype=ms.float64)
            self.down = nn.Dense(HIDDEN, WIDTH, has_bias=False, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            return self.sum(self.down(ops.tanh(self.up(self.copy(x))))) + self.bias

    init()
    (random, model), reduce = initialized(Model(), 1801), ops.AllReduce()
    for cell, dim in ((model.up, 0), (model.down, 1)):
        cell.weight = Parameter(Tensor(part(cell.weight.asnumpy(), dim).copy()), name=cell.weight.name)
    names = [parameter.name for parameter in model.trainable_params()]
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(x), Tensor(y))
        if bug:
            optimizer(ops.clip_by_global_norm(gradients, LIMIT))
            continue
        squares = {name: (gradient**2).sum() for name, gradient in zip(names, gradients, strict=True)}
        norm = ops.sqrt(reduce(squares["up.weight"] + squares["down.weight"]) + squares["bias"])
        factor = ops.minimum(LIMIT / norm, Tensor(1.0, ms.float64))
        optimizer(tuple(gradient * factor for gradient in gradients))


def optimizer_of_unsharded_parameters(bug: bool) -> None:
    """The optimizer holds the parameters from before sharding, and the model never learns.

    Preparing a model for several ranks replaces the parameters of its cells. An optimizer that was created
    earlier updates tensors that no cell reads any more.
    """
    SAMPLES, WIDTH = 6, 7

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Dense(WIDTH, WIDTH, has_bias=False, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            return ops.tanh(self.layer(x))

    init()
    (random, model), reduce = initialized(Model(), 2665), ops.AllReduce()
    before = optim.AdamW(model.trainable_params(), 0.02)
    if get_group_size() > 1:
        model.layer.weight = Parameter(Tensor(model.layer.weight.asnumpy().copy()), name="layer.weight")
    optimizer = before if bug else optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / SAMPLES, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, SAMPLES, WIDTH))
        _, gradients = step(Tensor(part(x).copy()), Tensor(part(y).copy()))
        optimizer(tuple(reduce(gradient) for gradient in gradients))
