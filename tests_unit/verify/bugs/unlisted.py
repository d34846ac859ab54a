"""Broken training programs that are not in the corpus: errors of the same classes in other clothes.

Each function trains a small model on its rank, broken if asked to. It is written for `torch.distributed`, and a world
of one is the single-device program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 5, 7, 3


@dataclass(frozen=True)
class Unlisted:
    """A program, its mesh, the first wrong value and the class of the error."""

    train: Callable[[bool], None]
    mesh: dict[str, int]
    differs: tuple[str, str]
    cause: str


PROGRAMS: dict[str, Unlisted] = {}


def unlisted(mesh, differs, cause):
    """Add a program to the table."""

    def add(train):
        PROGRAMS[train.__name__] = Unlisted(train, mesh, differs, cause)
        return train

    return add


class Pair(torch.autograd.Function):
    """One function of the value, another of its gradient."""

    @staticmethod
    def forward(ctx, x, ahead, back):
        """Apply the first."""
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx, grad):
        """Apply the second."""
        return ctx.back(grad), None, None


def keep(x):
    """The value itself."""
    return x.clone()


def summed(partial, group=None):
    """Sum over a group."""
    total = partial.clone()
    dist.all_reduce(total, group=group)
    return total


def make_mesh(**axes):
    """The mesh, of size one in a world of one."""
    sizes = tuple(axes.values()) if dist.get_world_size() > 1 else (1,) * len(axes)
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(axes))


def part(full, dim=0):
    """This rank's part."""
    return full.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def drawn(model, seed):
    """The model in double precision with random parameters."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.double().parameters():
        parameter.data.normal_(generator=random)
    return model, random


def batch(random, *shape):
    """Random inputs and targets."""
    return torch.randn(2, *(shape or (ROWS, WIDTH)), dtype=torch.float64, generator=random)


def mlp(hidden=6):
    """Two layers."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))


def update(optimizer):
    """One step of the optimizer."""
    optimizer.step()
    optimizer.zero_grad()


def reduce_gradients(model, group=None):
    """Sum all gradients."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


@unlisted({"dp": 3}, ("gradient", "2.*"), "scaled-by-count")
def accumulation_divided_twice(bug):
    """The loss is divided by the number of micro-batches, and the gradient again."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        for _ in range(4):
            x, y = batch(random)
            ((model(part(x)) - part(y)).pow(2).sum() / ROWS / 4).backward()
        reduce_gradients(model)
        for parameter in model.parameters():
            parameter.grad /= 4 if bug else 1
        update(optimizer)


class Tied(nn.Module):
    """An embedding that is the head, too; a stage has one of its uses or both."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)


@unlisted({"pp": 2}, ("gradient", "embed.weight"), "missing-reduction")
def tied_weight_of_stages(bug):
    """First and last stage each have the tied weight, and do not add their gradients."""
    mesh = make_mesh(pp=2)
    first, last = mesh.get_local_rank() == 0, mesh.get_local_rank() == mesh.size() - 1

    class Stage(Tied):
        def forward(self, ids):
            x = self.embed(ids) if first else torch.empty(ROWS, WIDTH, dtype=torch.float64)
            if not first:
                dist.recv(x, 0)
                x.requires_grad_()
            self.received = x
            return torch.tanh(self.middle(x)) @ self.embed.weight.T if last else x

    model, random = drawn(Stage(), 2)
    if not last:
        model.middle = nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        ids, labels = torch.randint(11, (2, ROWS), generator=random)
        outputs = model(ids)
        if last:
            nn.functional.cross_entropy(outputs, labels).backward()
            if not first:
                dist.send(model.received.grad, 0)
        else:
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            outputs.backward(gradient)
        if not bug:
            dist.all_reduce(model.embed.weight.grad)
        update(optimizer)


class ShardedNorm(nn.Module):
    """Root mean square norm over a sharded dim."""

    def __init__(self, size, reduce):
        super().__init__()
        self.weight, self.size, self.reduce = nn.Parameter(torch.empty(size)), size, reduce

    def forward(self, x):
        """Normalize."""
        squares = x.pow(2).sum(-1, keepdim=True)
        mean = Pair.apply(squares, summed, summed) / self.size if self.reduce else squares / x.shape[-1]
        return x / mean.sqrt() * self.weight


class NormedHeads(nn.Module):
    """A column-parallel layer, a norm over its outputs, a row-parallel layer."""

    def __init__(self, reduce):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 8, bias=False), ShardedNorm(8, reduce)
        self.down = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        """Outputs, equal on all ranks."""
        return Pair.apply(self.down(self.norm(self.up(Pair.apply(x, keep, summed)))), summed, keep)


@unlisted({"tp": 3}, ("output", "norm"), "missing-reduction")
def norm_over_a_shard(bug):
    """A norm over a sharded dim uses the mean of the local part."""
    make_mesh(tp=3)
    model, random = drawn(NormedHeads(not bug), 3)
    for module, dim in ((model.up, 0), (model.norm, 0), (model.down, 1)):
        module.weight = nn.Parameter(part(module.weight.data, dim).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        x, y = batch(random)
        (model(x) - y).pow(2).mean().backward()
        update(optimizer)


@unlisted({"dp": 3}, ("weight", "0.weight"), "not-updated")
def broadcast_from_another_owner(bug):
    """Each rank updates some parameters, which are then sent by a rank that did not."""
    mesh = make_mesh(dp=3)
    model, random = drawn(mlp(), 4)
    parameters, world = list(model.parameters()), mesh.size()
    optimizer = torch.optim.AdamW([p for i, p in enumerate(parameters) if i % world == mesh.get_local_rank()], lr=0.02)
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        optimizer.step()
        for i, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, (i + bug) % world)
        model.zero_grad()


@unlisted({"dp": 3}, ("rate", "*"), "scaled-by-size")
def rate_scaled_by_world(bug):
    """The learning rate is multiplied by the number of ranks although the batch is the same."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * (dist.get_world_size() if bug else 1))
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        update(optimizer)


@unlisted({"dp": 3}, ("rate", "*"), "stale")
def scheduler_per_micro_batch(bug):
    """The schedule moves on with each micro-batch."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for _ in range(STEPS):
        for _ in range(2):
            x, y = batch(random)
            ((model(part(x)) - part(y)).pow(2).sum() / ROWS / 2).backward()
        reduce_gradients(model)
        update(optimizer)
        for _ in range(2 if bug else 1):
            scheduler.step()


class BatchNorm(nn.Module):
    """Batch normalization of the whole batch, or of the local part."""

    def __init__(self, local):
        super().__init__()
        self.weight, self.bias, self.local = nn.Parameter(torch.empty(WIDTH)), nn.Parameter(torch.empty(WIDTH)), local

    def forward(self, x):
        """Normalize."""
        total = keep if self.local else summed
        count = len(x) if self.local else ROWS
        mean = Pair.apply(x.sum(0), total, total) / count
        variance = Pair.apply((x - mean).pow(2).sum(0), total, total) / count
        return (x - mean) / (variance + 0.01).sqrt() * self.weight + self.bias


@unlisted({"dp": 3}, ("output", "1"), "missing-reduction")
def batch_norm_of_a_part(bug):
    """Batch statistics are those of the rank's part of the batch."""
    make_mesh(dp=3)
    model, random = drawn(nn.Sequential(nn.Linear(WIDTH, WIDTH), BatchNorm(bug), nn.Linear(WIDTH, WIDTH)), 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        update(optimizer)


@unlisted({"dp": 3}, ("gradient", "0.weight"), "repeated-reduction")
def reduced_by_hook_and_by_hand(bug):
    """A hook sums the gradient of one layer, and the loop sums all of them."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 8)
    if bug:
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        update(optimizer)


class Gathered(nn.Module):
    """The whole of outputs that are sharded along the last dim."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug

    def forward(self, x):
        """Gather; the gradient is the own part."""
        return Pair.apply(x, self.gather, lambda gradient: part(gradient, -1))

    def gather(self, x):
        """Gather along the first dim, and put the parts side by side."""
        parts = x.new_empty(dist.get_world_size() * len(x), x.shape[1])
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(len(x), -1) if self.bug else torch.cat(parts.split(len(x)), 1)


class GatheredColumns(nn.Module):
    """A column-parallel layer whose outputs are gathered."""

    def __init__(self, bug):
        super().__init__()
        self.up, self.gather, self.out = nn.Linear(WIDTH, 6), Gathered(bug), nn.Linear(6, WIDTH)

    def forward(self, x):
        """Outputs, equal on all ranks."""
        return self.out(torch.tanh(self.gather(self.up(Pair.apply(x, keep, summed)))))


@unlisted({"tp": 3}, ("output", "gather"), "permuted")
def gathered_along_another_dim(bug):
    """Gathered parts are laid one after the other where they belong side by side."""
    make_mesh(tp=3)
    model, random = drawn(GatheredColumns(bug), 9)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.up.bias = nn.Parameter(part(model.up.bias.data).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        x, y = batch(random)
        (model(x) - y).pow(2).mean().backward()
        update(optimizer)


class Whole(nn.Module):
    """The whole weight of a shard, gathered ahead of its use."""

    def __init__(self):
        super().__init__()
        self.shard = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.gathered = None

    def prefetch(self):
        """Gather the weight as it is now."""
        full = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        part(full).copy_(self.shard.data)
        dist.all_reduce(full)
        self.gathered = full

    def forward(self):
        """The gathered weight; its gradient goes to the shard."""
        return Pair.apply(self.shard, lambda _: self.gathered.clone(), lambda gradient: part(summed(gradient)))


class Prefetching(nn.Module):
    """A layer whose weight is gathered ahead."""

    def __init__(self):
        super().__init__()
        self.whole, self.out = Whole(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        """Outputs of this rank's rows."""
        return self.out(torch.tanh(x @ self.whole()))


@unlisted({"fsdp": 3}, ("output", "whole"), "stale")
def gathered_before_the_update(bug):
    """The weight of the next step is gathered before the optimizer changes it."""
    make_mesh(fsdp=3)
    model, random = drawn(Prefetching(), 10)
    model.whole.shard = nn.Parameter(part(model.whole.shard.data).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model.whole.prefetch()
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model.out)
        if bug:
            model.whole.prefetch()
        update(optimizer)
        if not bug:
            model.whole.prefetch()


@unlisted({"dp": 3}, ("gradient", "2.*"), "missing-reduction")
def last_micro_batch_without_sync(bug):
    """No micro-batch synchronizes the gradients, the last one included."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 11)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        for micro_batch in range(3):
            x, y = batch(random, 6, WIDTH)
            with wrapped.no_sync() if bug or micro_batch < 2 else nullcontext():
                ((wrapped(part(x)) - part(y)).pow(2).mean() / 3).backward()
        update(optimizer)


@unlisted({"dp": 2, "tp": 3}, ("gradient", "layers.2.bias"), "wrong-axis")
def bias_summed_over_model_ranks(bug):
    """The gradient of a replicated bias is summed over the axis where it is complete, not over the data axis."""
    mesh = make_mesh(dp=2, tp=3)
    model, random = drawn(mlp(), 12)
    for module, dim in ((model[0], 0), (model[2], 1)):
        shards = module.weight.data.tensor_split(mesh.size(1), dim)
        module.weight = nn.Parameter(shards[mesh.get_local_rank("tp")].clone())
    model[0].bias = nn.Parameter(model[0].bias.data.tensor_split(mesh.size(1))[mesh.get_local_rank("tp")].clone())
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            hidden = torch.tanh(self.layers[0](x))
            partial = nn.functional.linear(hidden, self.layers[2].weight)
            return Pair.apply(partial, lambda value: summed(value, tp), keep) + self.layers[2].bias

    whole = Whole()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = (full.tensor_split(mesh.size(0))[mesh.get_local_rank("dp")] for full in batch(random))
        ((whole(x) - y).pow(2).sum() / ROWS).backward()
        for parameter in (model[0].weight, model[0].bias, model[2].weight):
            dist.all_reduce(parameter.grad, group=dp)
        dist.all_reduce(model[2].bias.grad, group=tp if bug else dp)
        update(optimizer)


@unlisted({"dp": 3}, ("gradient", "2.*"), "sum-for-average")
def mean_losses_summed(bug):
    """Losses are means over the rank's rows, and their gradients are summed."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 13)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch(random, 6, WIDTH)
        (model(part(x)) - part(y)).pow(2).mean().backward()
        reduce_gradients(model)
        for parameter in model.parameters():
            parameter.grad /= 1 if bug else dist.get_world_size()
        update(optimizer)


@unlisted({"dp": 3}, ("weight", "0.weight"), "replicas-differ")
def initialized_per_rank(bug):
    """Each rank draws weights of its own, and nothing broadcasts them."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 14)
    if bug:
        drawn(model, 14 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch(random)
        ((model(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        update(optimizer)


class Attention(nn.Module):
    """Attention on a fused projection whose rows are queries, keys and values of the rank's heads."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 6, bias=False), nn.Linear(6, WIDTH, bias=False)

    def forward(self, x):
        """Outputs, equal on all ranks."""
        query, key, value = self.qkv(Pair.apply(x, keep, summed)).chunk(3, -1)
        heads = (value_.unflatten(-1, (-1, 2)).transpose(0, 1) for value_ in (query, key, value))
        query, key, value = heads
        mixed = torch.softmax(query @ key.mT / math.sqrt(2), -1) @ value
        return Pair.apply(self.out(mixed.transpose(0, 1).flatten(1)), summed, keep)


@unlisted({"tp": 3}, ("output", "out"), "permuted")
def fused_projection_cut_across(bug):
    """A fused projection is cut into even parts, so that ranks take rows of queries for keys."""
    make_mesh(tp=3)
    model, random = drawn(Attention(), 15)
    full = model.qkv.weight.data
    cut = part(full) if bug else torch.cat([part(rows) for rows in full.chunk(3)])
    model.qkv.weight = nn.Parameter(cut.clone())
    model.out.weight = nn.Parameter(part(model.out.weight.data, 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        x, y = batch(random)
        (model(x) - y).pow(2).mean().backward()
        update(optimizer)


@unlisted({"dp": 3}, ("output", "0"), "data")
def batches_shuffled_per_rank(bug):
    """Each rank shuffles the epoch with a seed of its own before it takes its rows."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 16)
    x, y = batch(random, 12, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        shuffle = torch.Generator().manual_seed(step + 100 * (dist.get_rank() if bug else 0))
        order = torch.randperm(12, generator=shuffle)[:ROWS]
        ((model(part(x[order])) - part(y[order])).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        update(optimizer)


class ShardedEmbedding(nn.Module):
    """An embedding whose rows are sharded."""

    def __init__(self, bug):
        super().__init__()
        self.weight, self.bug = nn.Parameter(torch.empty(11, WIDTH)), bug

    def forward(self, ids):
        """Rows, equal on all ranks."""
        own = part(torch.arange(11))
        local = ids - own[0]
        inside = (local >= 0) & (local < len(own))
        rows = self.weight[local.clamp(0, len(own) - 1)]
        return Pair.apply(rows if self.bug else rows * inside[:, None], summed, keep)


@unlisted({"tp": 3}, ("output", "0"), "components")
def rows_of_other_ranks_not_masked(bug):
    """A sharded embedding does not zero the rows of tokens that belong to other ranks."""
    make_mesh(tp=3)
    model, random = drawn(nn.Sequential(ShardedEmbedding(bug), nn.Linear(WIDTH, 11)), 17)
    model[0].weight = nn.Parameter(part(model[0].weight.data).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        ids, labels = torch.randint(11, (2, ROWS), generator=random)
        nn.functional.cross_entropy(model(ids), labels).backward()
        update(optimizer)


@unlisted({"fsdp": 3}, ("gradient", "2.*"), "sum-for-average")
def sharded_gradients_not_averaged(bug):
    """The factor by which fully_shard divides gradients is set to one, and losses are means over the rank's rows."""
    mesh = make_mesh(fsdp=3)
    model, random = drawn(mlp(), 18)
    fully_shard(model, mesh=mesh)
    if bug:
        model.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        x, y = batch(random, 6, WIDTH)
        (model(part(x)) - part(y)).pow(2).mean().backward()
        update(optimizer)


class TiedHead(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        """Logits."""
        return self.head(torch.tanh(self.middle(self.embed(ids))))


@unlisted({"tp": 3}, ("gradient", "embed.weight"), "components")
def untied_by_sharding(bug):
    """Sharding makes two parameters of the tied weight, which part from each other."""
    mesh = make_mesh(tp=3)
    model, random = drawn(TiedHead(), 19)
    rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, {"embed": rows, "head": ColwiseParallel(output_layouts=Replicate())})
    if not bug:
        model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    for _ in range(STEPS):
        ids, labels = torch.randint(11, (2, ROWS), generator=random)
        nn.functional.cross_entropy(model(ids), labels).backward()
        update(optimizer)
