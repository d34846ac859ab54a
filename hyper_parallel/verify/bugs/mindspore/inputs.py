"""Bugs: inputs, masks, positions and random numbers of the wrong rank."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim

from hyper_parallel.verify.bugs.mindspore.base import SGD, Linear, Pair, initialized, part, same


def rank_of_another_group(bug: bool) -> None:
    """A rank picks its tokens by its rank in another group; equal group sizes hid it."""
    MESH = {"ep": 2, "tp": 3}
    SAMPLES, TOKENS, WIDTH, HIDDEN = 4, 9, 5, 7

    class Pair(nn.Cell):
        def __init__(self, ahead: Any, back: Any) -> None:
            super().__init__()
            self.ahead, self.back = ahead, back

        def construct(self, x: Tensor) -> Tensor:
            return self.ahead(x)

        def bprop(self, *values: Tensor) -> Any:
            return (self.back(values[-1]),)

    class Experts(nn.Cell):
        def __init__(self, draw: Any, tp: int, group: str, chunk: int) -> None:
            super().__init__()
            self.up, self.down = Linear(draw((HIDDEN, WIDTH))), Linear(draw((WIDTH, HIDDEN)))
            gather = ops.AllGather(group=group)
            self.cut = Pair(lambda full: full.chunk(tp)[chunk].copy(), gather)
            self.gather = Pair(gather, lambda full: full.chunk(tp)[get_rank() % tp].copy())

        def construct(self, x: Tensor) -> Tensor:
            return self.gather(self.down(ops.tanh(self.up(self.cut(x)))))

    class Model(nn.Cell):
        def __init__(self, embed: nn.Cell, moe: nn.Cell) -> None:
            super().__init__()
            self.embed, self.moe = embed, moe

        def construct(self, x: Tensor) -> Tensor:
            return self.moe(self.embed(x))

    init()
    ep, tp = MESH.values() if get_group_size() > 1 else (1, 1)
    batch, place = divmod(get_rank(), tp)
    create_group(f"tp-{batch}", [batch * tp + rank for rank in range(tp)])
    create_group(f"ep-{place}", [rank * tp + place for rank in range(ep)])
    draw = np.random.default_rng(2842).standard_normal
    model = Model(Linear(draw((WIDTH, WIDTH))), Experts(draw, tp, f"tp-{batch}", batch if bug else place))
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    for _ in range(3):
        gradients = step(*(Tensor(v) for v in np.split(draw((2, TOKENS, SAMPLES, WIDTH)), ep, 2)[batch]))[1]
        embed, *experts = (ops.AllReduce(group=f"ep-{place}")(gradient) / ep for gradient in gradients)
        optimizer((embed, *(ops.AllReduce(group=f"tp-{batch}")(gradient) for gradient in experts)))


def equal_positions(bug: bool) -> None:
    """All ranks of a sharded sequence use the positions of the first shard.

    Each rank counts the positions of its tokens from zero, as a single device does. Only the first rank's are right.
    """
    TOKENS, WIDTH = 8, 5

    class Positions(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.table = Parameter(Tensor(np.ones((TOKENS, WIDTH))))

        def construct(self, ids: Tensor) -> Tensor:
            return ops.gather(self.table, ids, 0)

    class Model(nn.Cell):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.positions = bug, Positions()
            self.embed, self.out = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

        def construct(self, x: Tensor) -> Tensor:
            ids = np.arange(len(x)) if self.bug else part(np.arange(TOKENS))
            return self.out(ops.tanh(self.embed(x) + self.positions(Tensor(ids, ms.int32))))

    init()
    (random, model), reduce = initialized(Model(bug), 563), ops.AllReduce()
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(part(x).copy()), Tensor(part(y).copy()))
        optimizer(tuple(reduce(gradient) for gradient in gradients))


def dropout_stream_per_rank(bug: bool) -> None:
    """Ranks that hold the same activations draw dropout masks of their own.

    Activations between the sharded layers are replicated, and their dropout must draw from the stream that the ranks
    share. With a seed per rank, replicas differ, and later sums combine several masks.
    """
    TOKENS, WIDTH, HIDDEN = 5, 4, 8

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.copy, self.sum, self.dropout = (
                Pair(same, ops.AllReduce()),
                Pair(ops.AllReduce(), same),
                nn.Dropout(p=0.3),
            )
            self.embed = nn.Dense(WIDTH, WIDTH, dtype=ms.float64)
            self.up = nn.Dense(WIDTH, HIDDEN, has_bias=False, dtype=ms.float64)
            self.down = nn.Dense(HIDDEN, WIDTH, has_bias=False, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            x = self.dropout(ops.tanh(self.embed(x)))
            return x + self.sum(self.down(ops.tanh(self.up(self.copy(x)))))

    init()
    ms.set_seed(5 + get_rank() if bug else 5)  # before the dropout is created, which reads its seed then
    random, model = np.random.default_rng(4828), Model()
    model.set_train()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    for cell, dim in ((model.up, 0), (model.down, 1)):
        cell.weight = Parameter(Tensor(part(cell.weight.asnumpy(), dim).copy()), name=cell.weight.name)
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        optimizer(step(Tensor(x), Tensor(y))[1])


def all_to_all_unequal(bug: bool) -> None:
    """A rank without tokens for the experts leaves out their all-to-all.

    The rank whose batch has no tokens for the experts skips the layer and its all-to-all, while the other ranks wait in
    theirs. Ranks without tokens must participate.
    """
    ROWS, TOKENS, WIDTH = 3, 3, 4

    class Model(nn.Cell):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.embed = bug, nn.Dense(WIDTH, WIDTH, dtype=ms.float64)
            self.swap = ops.AlltoAll(get_group_size(), 1, 1)

        def construct(self, x: Tensor, routed: Tensor) -> Tensor:
            x = ops.tanh(self.embed(x))
            if self.bug and not routed.sum():
                return x
            return x + self.swap(ops.tanh(self.swap(x * routed)))

    init()
    (random, model), reduce = initialized(Model(bug), 5794), ops.AllReduce()
    rows = slice(get_rank(), get_rank() + 1) if get_group_size() > 1 else slice(None)
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y, routed: ((model(x, routed) - y) ** 2).sum(), None, model.trainable_params())
    for number in range(3):
        x, y = random.normal(size=(2, ROWS, TOKENS, WIDTH))
        routed = np.ones((ROWS, TOKENS, 1))
        routed[number] = 0.0
        _, gradients = step(*(Tensor(full[rows].copy()) for full in (x, y, routed)))
        optimizer(tuple(reduce(gradient) for gradient in gradients))
