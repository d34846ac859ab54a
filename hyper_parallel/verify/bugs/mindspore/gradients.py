"""Bugs: gradients that ranks reduce too little, too often, or not in the same way."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim
from mindspore.mint import distributed

from hyper_parallel.verify.bugs.mindspore.base import SGD, Linear, Pair, initialized, part, same


def sequence_parallel_norm(bug: bool) -> None:
    """The gradient of the final norm is not summed over the ranks of the sequence.

    Norms inside the layers are among those whose gradients are summed; the norm after the last layer is left out.
    """
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

    init()
    (random, model), reduce = initialized(Model(), 1446), ops.AllReduce()
    optimizer = optim.AdamW(model.trainable_params(), 0.05)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        _, gradients = step(Tensor(part(x)), Tensor(part(y)))
        names = [parameter.name for parameter in model.trainable_params()]
        summed = [name for name in names if not (bug and name == "final_norm.weight")]
        optimizer(tuple(reduce(g) if name in summed else g for name, g in zip(names, gradients, strict=True)))


def shared_norm_of_heads(bug: bool) -> None:
    """All heads share one norm weight, but each rank's gradient covers its own heads only."""
    TOKENS, WIDTH, HEADS, SIZE = 6, 5, 4, 3

    def part(full: Any, dim: int = 0) -> Any:
        heads = full.reshape(*full.shape[:dim], HEADS, SIZE, *full.shape[dim + 1 :])
        mine = np.array_split(heads, get_group_size(), dim)[get_rank()]
        return mine.reshape(*full.shape[:dim], -1, *full.shape[dim + 1 :])

    class Norm(Linear):
        def construct(self, x: Tensor) -> Tensor:
            return x / ops.sqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * self.weight

    class Model(nn.Cell):
        def __init__(self, draw: Any) -> None:
            super().__init__()
            self.embed, self.heads_norm = Linear(draw((WIDTH, WIDTH))), Norm(draw(SIZE))
            self.value, self.out = (
                Linear(part(draw((HEADS * SIZE, WIDTH)))),
                Linear(part(draw((WIDTH, HEADS * SIZE)), 1)),
            )
            self.copy, self.reduce = Pair(Tensor.copy, ops.AllReduce()), Pair(ops.AllReduce(), Tensor.copy)

        def construct(self, x: Tensor) -> Tensor:
            heads = self.value(self.copy(ops.tanh(self.embed(x)))).view(TOKENS, -1, SIZE)
            return self.reduce(self.out(self.heads_norm(heads).view(TOKENS, -1)))

    init()
    draw = np.random.default_rng(7452).standard_normal
    model = Model(draw)
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    marked = ["heads_norm.weight"] if not bug else []
    for _ in range(3):
        gradients = step(*map(Tensor, draw((2, TOKENS, WIDTH))))[1]
        pairs = zip(optimizer.parameters, gradients, strict=True)
        optimizer(tuple(ops.AllReduce()(g) if parameter.name in marked else g for parameter, g in pairs))


def projection_reduced_twice(bug: bool) -> None:
    """The gradient of some rows of a projection is summed over the ranks twice."""
    TOKENS, WIDTH, HEADS, SIZE, COMPRESSED = 6, 5, 4, 2, 3

    def part(full: Any, dim: int = 0) -> Any:
        heads = full.reshape(*full.shape[:dim], HEADS, SIZE, *full.shape[dim + 1 :])
        mine = np.array_split(heads, get_group_size(), dim)[get_rank()]
        return mine.reshape(*full.shape[:dim], -1, *full.shape[dim + 1 :])

    class Model(nn.Cell):
        def __init__(self, draw: Any, bug: bool) -> None:
            super().__init__()
            self.late, heads = bug, HEADS * SIZE
            self.embed, self.query = Linear(draw((WIDTH, WIDTH))), Linear(part(draw((heads, WIDTH))))
            self.kv_a, self.kv_b = Linear(draw((COMPRESSED + SIZE, WIDTH))), Linear(part(draw((heads, COMPRESSED))))
            self.out, self.reduce = Linear(part(draw((WIDTH, heads)), 1)), Pair(ops.AllReduce(), Tensor.copy)
            self.copy = Pair(Tensor.copy, ops.AllReduce())

        def construct(self, x: Tensor) -> Tensor:
            embedded = ops.tanh(self.embed(x))
            inner = self.copy(embedded)
            compressed, position = self.kv_a(embedded if self.late else inner).split([COMPRESSED, SIZE], 1)
            value = self.kv_b(self.copy(compressed) if self.late else compressed)
            query, value = (x.view(TOKENS, -1, SIZE).swapaxes(0, 1) for x in (self.query(inner), value))
            mixed = ops.matmul(ops.softmax(ops.matmul(query, (value + position).swapaxes(1, 2)), -1), value)
            return self.reduce(self.out(mixed.swapaxes(0, 1).reshape(TOKENS, -1)))

    init()
    draw = np.random.default_rng(496).standard_normal
    model = Model(draw, bug)
    optimizer = SGD(0.02, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, optimizer.parameters)
    for _ in range(3):
        pairs = zip(optimizer.parameters, step(*map(Tensor, draw((2, TOKENS, WIDTH))))[1], strict=True)
        optimizer(tuple(ops.AllReduce()(g) if parameter is model.kv_a.weight else g for parameter, g in pairs))


def one_kv_head(bug: bool) -> None:
    """Sharded queries read one key-value head, whose gradients stay partial.

    Every rank's queries contribute to the gradient of the shared head. The optimizer sums the weight's gradient over
    the ranks, but not the bias's, and the gradient of the head's input is not summed. The fix is to sum directly after
    the head.
    """
    TOKENS, WIDTH, HEADS, SIZE = 7, 5, 4, 3

    class Model(nn.Cell):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.sum = bug, Pair(ops.AllReduce(), same)
            self.copy, self.shared = (Pair(same, ops.AllReduce()) for _ in range(2))
            self.embed, self.kv = nn.Dense(WIDTH, WIDTH, dtype=ms.float64), nn.Dense(WIDTH, SIZE, dtype=ms.float64)
            self.query = nn.Dense(WIDTH, HEADS * SIZE, has_bias=False, dtype=ms.float64)
            self.out = nn.Dense(HEADS * SIZE, WIDTH, has_bias=False, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            x = ops.tanh(self.embed(x))
            both = self.kv(x) if self.bug else self.shared(self.kv(x))
            query = self.query(self.copy(x)).reshape(TOKENS, -1, SIZE).swapaxes(0, 1)
            mixed = ops.softmax(ops.matmul(query, both.T), -1) @ ops.tanh(both)
            return self.sum(self.out(mixed.swapaxes(0, 1).reshape(TOKENS, -1)))

    def heads(full: np.ndarray, dim: int) -> np.ndarray:
        units = np.array_split(np.arange(HEADS), get_group_size())[get_rank()]
        return np.take(full, [unit * SIZE + i for unit in units for i in range(SIZE)], dim)

    init()
    (random, model), reduce = initialized(Model(bug), 37), ops.AllReduce()
    for cell, dim in ((model.query, 0), (model.out, 1)):
        cell.weight = Parameter(Tensor(heads(cell.weight.asnumpy(), dim)), name=cell.weight.name)
    names = [parameter.name for parameter in model.trainable_params()]
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        gradients = dict(zip(names, step(Tensor(x), Tensor(y))[1], strict=True))
        if bug:
            gradients["kv.weight"] = reduce(gradients["kv.weight"])
        optimizer(tuple(gradients.values()))


def router_weight(bug: bool) -> None:
    """Ranks route different tokens, and the router's gradient is not summed over them."""
    TOKENS, WIDTH, HIDDEN, EXPERTS = 9, 5, 7, 2

    class Model(nn.Cell):
        def __init__(self, draw: Any) -> None:
            super().__init__()
            self.router = Linear(draw((EXPERTS, WIDTH)))
            self.ups = nn.CellList([Linear(part(draw((HIDDEN, WIDTH)))) for _ in range(EXPERTS)])
            self.downs = nn.CellList([Linear(part(draw((WIDTH, HIDDEN)), 1)) for _ in range(EXPERTS)])
            self.gather, self.scatter = (
                Pair(ops.AllGather(), ops.ReduceScatter()),
                Pair(ops.ReduceScatter(), ops.AllGather()),
            )

        def construct(self, x: Tensor) -> Tensor:
            weights, tokens = ops.softmax(self.router(x), -1), self.gather(x)
            experts = [down(ops.tanh(up(tokens))) for up, down in zip(self.ups, self.downs, strict=True)]
            return x + (weights[..., None] * self.scatter(ops.stack(experts, 1))).sum(1)

    init()
    draw = np.random.default_rng(599).standard_normal
    model = Model(draw)
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, optimizer.parameters)
    for _ in range(3):
        router, *others = step(*(Tensor(part(values)) for values in draw((2, TOKENS, WIDTH))))[1]
        optimizer((router if bug else ops.AllReduce()(router), *others))


def experts_input_gradient(bug: bool) -> None:
    """The gradient of the sharded experts' input is sliced instead of reduce-scattered."""
    TOKENS, WIDTH, HIDDEN, EXPERTS = 9, 4, 7, 2

    class Model(nn.Cell):
        def __init__(self, draw: Any, bug: bool) -> None:
            super().__init__()
            self.embed, self.router = Linear(draw((WIDTH, WIDTH))), Linear(draw((EXPERTS, WIDTH)))
            self.ups = nn.CellList([Linear(part(draw((HIDDEN, WIDTH)))) for _ in range(EXPERTS)])
            self.downs = nn.CellList([Linear(part(draw((WIDTH, HIDDEN)), 1)) for _ in range(EXPERTS)])
            self.gather = Pair(
                ops.AllGather(), lambda full: Tensor(part(full.asnumpy())) if bug else ops.ReduceScatter()(full)
            )
            self.scatter = Pair(ops.ReduceScatter(), ops.AllGather())

        def construct(self, x: Tensor) -> Tensor:
            weights, x = ops.softmax(self.router(x), -1), self.embed(x)
            tokens = self.gather(x)
            experts = [down(ops.tanh(up(tokens))) for up, down in zip(self.ups, self.downs, strict=True)]
            return x + (weights[..., None] * self.scatter(ops.stack(experts, 1))).sum(1)

    init()
    draw = np.random.default_rng(1805).standard_normal
    model = Model(draw, bug)
    optimizer = SGD(0.1, model.trainable_params())
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).sum() / TOKENS, None, optimizer.parameters)
    for _ in range(3):
        embed, router, *experts = step(*(Tensor(part(values)) for values in draw((2, TOKENS, WIDTH))))[1]
        optimizer((ops.AllReduce()(embed), ops.AllReduce()(router), *experts))


def axis_of_size_one(bug: bool) -> None:
    """Gradients are reduced only over a shard axis of size one, so replicas are never averaged.

    Hybrid sharding reduces over the shard axis, then over the replicas. With one shard it falls back to no sharding,
    and the fallback reduces only over the shard axis, which contains one rank.
    """
    MESH = {"replicate": 3, "shard": 1}
    SAMPLES, WIDTH, HIDDEN = 6, 5, 7

    def group(axis: str) -> str:
        """Return the name of this rank's group along an axis of the mesh; the last axis varies fastest."""
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
            self.up, self.down = nn.Dense(WIDTH, HIDDEN, dtype=ms.float64), nn.Dense(HIDDEN, WIDTH, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            return self.down(ops.tanh(self.up(x)))

    init()
    random, model, ranks = np.random.default_rng(7493), Model(), get_group_size()
    axes = [group(axis) for axis in (("shard",) if bug else ("shard", "replicate"))]
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))
    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = (np.array_split(full, ranks)[get_rank()] for full in random.normal(size=(2, SAMPLES, WIDTH)))
        _, gradients = step(Tensor(x.copy()), Tensor(y.copy()))
        for axis in axes:
            for gradient in gradients:
                distributed.all_reduce(gradient, "avg", axis)
        optimizer(gradients)


def bias_on_every_rank(bug: bool) -> None:
    """Every rank adds the bias of a row-parallel linear before the sum."""
    TOKENS, WIDTH, HIDDEN = 6, 5, 8

    class RowParallel(nn.Dense):
        def __init__(self, bug: bool) -> None:
            super().__init__(HIDDEN, WIDTH, dtype=ms.float64)
            self.bug, self.sum = bug, Pair(ops.AllReduce(), same)

        def construct(self, x: Tensor) -> Tensor:
            product = ops.matmul(x, self.weight.T)
            return self.sum(product + self.bias) if self.bug else self.sum(product) + self.bias

    class Model(nn.Cell):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.copy, self.up, self.down = (
                Pair(same, ops.AllReduce()),
                nn.Dense(WIDTH, HIDDEN, dtype=ms.float64),
                RowParallel(bug),
            )

        def construct(self, x: Tensor) -> Tensor:
            return self.down(ops.tanh(self.up(self.copy(x))))

    init()
    random, model = initialized(Model(bug), 1036)
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        cell, attribute = name.split(".")
        full = getattr(getattr(model, cell), attribute).asnumpy()
        setattr(getattr(model, cell), attribute, Parameter(Tensor(part(full, dim).copy()), name=name))
    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    step = ms.value_and_grad(lambda x, y: ((model(x) - y) ** 2).mean(), None, model.trainable_params())
    for _ in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        optimizer(step(Tensor(x), Tensor(y))[1])
