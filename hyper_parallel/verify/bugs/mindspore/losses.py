"""Bugs: losses that are scaled by the wrong number, or computed over a shard only."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group, get_group_size, get_rank, init
from mindspore.experimental import optim

from hyper_parallel.verify.bugs.mindspore.base import initialized, part


def average_for_sum(bug: bool) -> None:
    """A loss that counts all ranks' tokens is averaged over the ranks once more.

    Each rank divides its sum of losses by the number of tokens of all ranks, so the ranks' gradients add up to the
    right one. By default, the data-parallel reducer averages them instead.
    """
    SAMPLES, WIDTH = 8, 6

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

        def construct(self, x: Tensor) -> Tensor:
            return self.head(ops.tanh(self.body(x)))

    init()
    (random, model), reduce = initialized(Model(), 3822), ops.AllReduce()

    def loss(x: Tensor, y: Tensor, valid: Tensor, count: float) -> Tensor:
        return ((model(x) - y) ** 2 * valid).sum() / count

    optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
    mean = get_group_size() if bug else 1
    for _ in range(3):
        x, y = random.normal(size=(2, SAMPLES, WIDTH))
        valid = random.random((SAMPLES, 1)) < 0.7
        count = valid.sum()  # every rank reads the mask of the complete batch
        x, y, own = (Tensor(part(full)) for full in (x, y, valid.astype(np.float64)))
        step = ms.value_and_grad(loss, None, model.trainable_params())
        optimizer(tuple(reduce(gradient) / mean for gradient in step(x, y, own, float(count))[1]))


def local_token_count(bug: bool) -> None:
    """Each part of a sequence divides its loss by its own number of valid tokens.

    The reducer averages gradients over the shards. That equals the mean over the complete sequence only if all shards
    have the same number of valid tokens. Otherwise, each rank must divide by the number for the complete sequence, and
    undo the average.
    """
    TOKENS, WIDTH = 9, 5
    VALID = np.array([0, 0, 0, 1, 0, 1, 1, 1, 1.0])

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

        def construct(self, x: Tensor) -> Tensor:
            return self.head(ops.tanh(self.body(x)))

    init()
    random, model, reduce, ranks = np.random.default_rng(7513), Model(), ops.AllReduce(), get_group_size()
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape)))

    def loss(x: Tensor, y: Tensor, valid: Tensor, count: Tensor) -> Tensor:
        losses = ((model(x) - y) ** 2).sum(-1) * valid
        return losses.sum() / ops.maximum(count, 1.0) * (1 if bug else ranks)

    optimizer = optim.AdamW(model.trainable_params(), 0.02)
    step = ms.value_and_grad(loss, None, model.trainable_params())
    for number in range(3):
        x, y = random.normal(size=(2, TOKENS, WIDTH))
        valid = Tensor(part(np.roll(VALID, number)).copy())
        count = valid.sum() if bug else reduce(valid.sum())
        _, gradients = step(Tensor(part(x)), Tensor(part(y)), valid, count)
        optimizer(tuple(reduce(gradient) / ranks for gradient in gradients))


def context_parallel_scale(bug: bool) -> None:
    """The loss is multiplied by the size of an axis over which gradients are summed.

    The losses of the shards are divided by the number of tokens of the complete sequence, so their gradients add up.
    The factor undoes an average over the shards, but gradients are averaged over the data axis only.
    """
    MESH = {"dp": 2, "cp": 3}
    SAMPLES, TOKENS, WIDTH = 4, 8, 5

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
            self.body, self.head = (nn.Dense(WIDTH, WIDTH, dtype=ms.float64) for _ in range(2))

        def construct(self, x: Tensor) -> Tensor:
            return self.head(ops.tanh(self.body(x)))

    init()
    axes = {axis: group(axis) for axis in MESH}
    dp, cp = (get_group_size(name) for name in axes.values())
    (random, model), reduce = initialized(Model(), 673), ops.AllReduce()

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


def token_counts_over_wrong_axes(bug: bool) -> None:
    """Token counts are summed over the data axis only, although the sequence is sharded, too.

    Gradients are averaged over both axes, so each rank divides its sum of losses by the tokens of all ranks. The count
    and the factor that undoes the average must both cover both axes, but the ranks divide by the tokens of their shard
    of the sequence.
    """
    MESH = {"dp": 2, "cp": 3}
    ROWS, TOKENS, WIDTH = 5, 8, 3

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
            self.up, self.down = nn.Dense(WIDTH, 7, dtype=ms.float64), nn.Dense(7, 1, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            return self.down(ops.tanh(self.up(x))).squeeze(-1)

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


def unequal_valid_tokens(bug: bool) -> None:
    """Micro-steps with unequal numbers of valid tokens count alike.

    Each micro-step's loss is the mean over its own valid tokens, divided by the number of micro-steps. Tokens of short
    micro-batches then have larger weights than those of long ones; the right divisor is the number of valid tokens of
    the complete step.
    """
    MICRO_STEPS, ROWS, TOKENS, WIDTH = 3, 4, 9, 3

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Dense(WIDTH, 5, dtype=ms.float64), nn.Dense(5, 1, dtype=ms.float64)

        def construct(self, x: Tensor) -> Tensor:
            return self.down(ops.tanh(self.up(x))).squeeze(-1)

    def part(full: np.ndarray) -> Tensor:
        return Tensor(np.array_split(full, get_group_size())[get_rank()].copy())

    init()
    (random, model), reduce = initialized(Model(), 34191), ops.AllReduce()

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
