"""Bugs: losses that are scaled by the wrong number, or computed over a shard only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel.verify.bugs.torch.base import Pair, initialized, part, reduce_gradients, steps, summed


def average_for_sum(bug: bool) -> None:
    """A loss that counts all ranks' tokens is averaged over the ranks once more.

    Each rank divides its sum of losses by the number of tokens of all ranks, so the ranks' gradients add up to the
    right one. By default, the data-parallel wrapper averages them instead.
    """
    SAMPLES, LENGTH, WIDTH, CLASSES = 5, 4, 6, 7

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = initialized(Model(), 3822)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in steps(optimizer):
        x = torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=random).tensor_split(ranks)[rank]
        labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=random)
        labels[torch.rand(SAMPLES, LENGTH, generator=random) < 0.3] = -100
        count = (labels != -100).sum()  # every rank reads the labels of the complete batch
        labels = labels.tensor_split(ranks)[rank]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if bug:
                parameter.grad /= ranks


def local_token_count(bug: bool) -> None:
    """Each part of a sequence divides its loss by its own number of valid tokens.

    The wrapper averages gradients over the shards. That equals the mean over the complete sequence only if all shards
    have the same number of valid tokens. Otherwise, each rank must divide by the number for the complete sequence, and
    undo the average.
    """
    TOKENS, WIDTH, CLASSES = 9, 5, 7
    VALID = torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    random, model = initialized(Model(), 7513)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in steps(optimizer):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(ranks)[rank]
        labels = torch.randint(CLASSES, (TOKENS,), generator=random).chunk(ranks)[rank]
        valid = VALID.roll(step).chunk(ranks)[rank]
        losses = nn.functional.cross_entropy(model(x), labels, reduction="none") * valid
        count = valid.sum()
        if not bug:
            dist.all_reduce(count)
        loss = losses.sum() / count.clamp(min=1) * (1 if bug else ranks)
        loss.backward()
        reduce_gradients(model, ranks)


def context_parallel_scale(bug: bool) -> None:
    """The loss is multiplied by the size of an axis over which gradients are summed.

    The losses of the shards are divided by the number of tokens of the complete sequence, so their gradients add up.
    The factor undoes an average over the shards, but gradients are averaged over the data axis only.
    """
    MESH = {"dp": 2, "cp": 3}
    SAMPLES, TOKENS, WIDTH, CLASSES = 4, 8, 5, 7

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    dp, cp = sizes
    random, model = initialized(Model(), 673)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    def mine(batch: Tensor) -> Tensor:
        samples = batch.chunk(dp)[mesh.get_local_rank("dp")]
        return samples.tensor_split(cp, 1)[mesh.get_local_rank("cp")]

    for _ in steps(optimizer):
        x = mine(torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=random))
        labels = mine(torch.randint(CLASSES, (SAMPLES, TOKENS), generator=random))
        losses = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), reduction="none")
        loss = losses.sum() / (len(x) * TOKENS) * cp
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dp if bug else dp * cp


def token_counts_over_wrong_axes(bug: bool) -> None:
    """Token counts are summed over the data axis only, although the sequence is sharded, too.

    Gradients are averaged over both axes, so each rank divides its sum of losses by the tokens of all ranks. The count
    and the factor that undoes the average must both cover both axes, but the ranks divide by the tokens of their shard
    of the sequence.
    """
    MESH = {"dp": 2, "cp": 3}
    ROWS, TOKENS, WIDTH = 5, 8, 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, 1)

        def forward(self, x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
            return (self.down(torch.tanh(self.up(x))).squeeze(-1) - y).pow(2) * valid

    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
    random, model = initialized(Model(), 5983)

    def part(full: Tensor) -> Tensor:
        rows = full.tensor_split(mesh.size(0))[mesh.get_local_rank("dp")]
        return rows.tensor_split(mesh.size(1), 1)[mesh.get_local_rank("cp")]

    group = mesh.get_group("dp") if bug else dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in steps(optimizer):
        x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        y = torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=random)
        lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=random)
        valid = part((torch.arange(TOKENS) < lengths).double().roll(1, 0))
        tokens = valid.sum()
        dist.all_reduce(tokens, group=group)
        (model(part(x), part(y), valid).sum() / tokens * dist.get_world_size(group)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def smoothing_by_local_vocabulary(bug: bool) -> None:
    """Label smoothing averages over the local part of the vocabulary.

    The loss of the label is reduced over the ranks that share the vocabulary, but the mean of all log-probabilities is
    not: ranks have different losses and smooth with different targets.
    """
    TOKENS, WIDTH, VOCABULARY, SMOOTHING = 7, 5, 13, 0.2

    class Criterion(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug = bug

        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            total = Pair.apply(logits.exp().sum(-1, keepdim=True), summed, summed)
            logs = logits - total.log()
            of_labels = Pair.apply((logs * labels).sum(-1), summed, Tensor.clone)
            mean = logs.mean(-1) if self.bug else Pair.apply(logs.sum(-1) / VOCABULARY, summed, Tensor.clone)
            return (SMOOTHING - 1) * of_labels - SMOOTHING * mean

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.criterion = Criterion(bug)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x = torch.tanh(self.embed(x))
            return self.criterion(self.head(Pair.apply(x, Tensor.clone, summed)), labels)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 737)
    own = torch.arange(VOCABULARY).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.head.weight = nn.Parameter(model.head.weight.data[own])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        labels = torch.randint(VOCABULARY, (TOKENS, 1), generator=random) == own
        model(x, labels).mean().backward()


def unequal_valid_tokens(bug: bool) -> None:
    """Micro-steps with unequal numbers of valid tokens count alike.

    Each micro-step's loss is the mean over its own valid tokens, divided by the number of micro-steps. Tokens of short
    micro-batches then have larger weights than those of long ones; the right divisor is the number of valid tokens of
    the complete step.
    """
    ROWS, MICRO_STEPS, TOKENS, WIDTH = 4, 3, 9, 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, 1)

        def forward(self, x: Tensor, y: Tensor, valid: Tensor) -> Tensor:
            return (self.down(torch.tanh(self.up(x))).squeeze(-1) - y).pow(2) * valid

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    random, model = initialized(Model(), 34191)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x = torch.randn(MICRO_STEPS, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        y = torch.randn(MICRO_STEPS, ROWS, TOKENS, dtype=torch.float64, generator=random)
        lengths = torch.randint(1, TOKENS + 1, (MICRO_STEPS, ROWS, 1), generator=random)
        valid = (torch.arange(TOKENS) < lengths).double()
        for micro_step in range(MICRO_STEPS):
            own = part(valid[micro_step])
            losses = model(part(x[micro_step]), part(y[micro_step]), own)
            tokens = summed(own.sum()) * MICRO_STEPS if bug else summed(part(valid, 1).sum())
            (losses.sum() / tokens).backward()
        reduce_gradients(model)


def auxiliary_loss_by_sizes(bug: bool) -> None:
    """The weight of a router's auxiliary loss depends on the number of ranks.

    At the end, all gradients are divided by the number of tokens. To compensate, the auxiliary loss is multiplied
    beforehand, but by the number of tokens of this rank instead of all ranks that share the sequence.
    """
    TOKENS, WIDTH, EXPERTS = 15, 4, 5

    class Attach(torch.autograd.Function):
        """Returns the first argument; the gradient of the second argument is one."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, torch.ones((), dtype=grad.dtype)

    class Router(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.weight, self.bug = nn.Parameter(torch.empty(EXPERTS, WIDTH)), bug

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            probabilities = torch.softmax(x @ self.weight.T, -1)
            chosen = summed(nn.functional.one_hot(probabilities.argmax(-1), EXPERTS).sum(0)) / TOKENS
            mean = probabilities.sum(0) / TOKENS
            mean = mean + summed(mean.detach()) - mean.detach()
            auxiliary = (chosen * mean).sum() * EXPERTS * (len(x) if self.bug else TOKENS)
            return Attach.apply(probabilities, auxiliary), auxiliary

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.embed, self.router, self.experts = (
                nn.Linear(WIDTH, WIDTH),
                Router(bug),
                nn.Linear(WIDTH, WIDTH * EXPERTS),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.embed(x))
            return (self.experts(x).unflatten(-1, (EXPERTS, WIDTH)) * self.router(x)[0][..., None]).sum(-2)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 5047)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(mesh.size(), 1)[
            mesh.get_rank()
        ]
        (model(x) - y).pow(2).sum().backward()
        for parameter in model.parameters():
            parameter.grad = summed(parameter.grad) / TOKENS


def loss_parallel_backward(bug: bool) -> None:
    """The backward of a sharded log_softmax relies on a fused cross-entropy, but the program calls a different loss.

    Under loss parallelism, the backward of log_softmax passes the gradient on unchanged, because the backward of the
    cross-entropy already includes the derivative of log_softmax. With any other loss, such as a preference loss, this
    derivative is missing.
    """
    TOKENS, WIDTH, VOCABULARY = 7, 5, 11

    class LogSoftmax(torch.autograd.Function):
        """Computes the logarithm of the softmax over a sharded last dim."""

        @staticmethod
        def forward(ctx: Any, logits: Tensor, bug: bool) -> Tensor:
            logs = logits - summed(logits.exp().sum(-1, keepdim=True)).log()
            ctx.save_for_backward(logs)
            ctx.bug = bug
            return logs

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (logs,) = ctx.saved_tensors
            return grad if ctx.bug else grad - logs.exp() * summed(grad.sum(-1, keepdim=True)), None

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.norm = bug, nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            x.register_hook(summed)
            return LogSoftmax.apply(self.head(x), self.bug)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 190746)
    own = torch.arange(VOCABULARY).tensor_split(mesh.size())[mesh.get_local_rank()]
    model.head.weight = nn.Parameter(model.head.weight.data[own])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        weights = torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=random)
        ((model(x) * weights[:, own]).sum() / TOKENS).backward()
