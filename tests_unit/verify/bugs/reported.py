"""Broken training programs after reports of public projects, written before the hypotheses that they test were read.

They are added to the table of ``unlisted.py``, whose words they use.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from hyper_parallel_unlisted import (
    Pair,
    batch,
    drawn,
    keep,
    make_mesh,
    mlp,
    part,
    reduce_gradients,
    summed,
    unlisted,
    update,
)
from torch import nn

STEPS = 3


def joined(x, dim=0):
    """The parts of all ranks, one after the other; parts may be uneven."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = torch.zeros(ranks, dtype=torch.long)
    sizes[rank] = x.shape[dim]
    sizes = summed(sizes).tolist()
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    full = torch.zeros(shape, dtype=x.dtype)
    full.narrow(dim, sum(sizes[:rank]), x.shape[dim]).copy_(x.detach())
    return summed(full)


def mean_loss(model, random, rows=12):
    """The mean loss of this rank's part of a batch."""
    x, y = batch(random, rows, 5)
    return (model(part(x)) - part(y)).pow(2).mean()


def average_gradients(model):
    """Average all gradients."""
    reduce_gradients(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


@unlisted({"dp": 3}, ("gradient", "2.*"), "missing-reduction")
def micro_batches_of_each_rank(bug):
    """Ranks cut their own part into micro-batches, and reduce after the first instead of the last."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch(random, 12, 5)
        for number, (a, b) in enumerate(zip(part(x).chunk(2), part(y).chunk(2), strict=True)):
            ((model(a) - b).pow(2).mean() / 2).backward()
            if number == (0 if bug else 1):
                average_gradients(model)
        update(optimizer)


def sharded_step(model, optimizer_of):
    """Train a model whose optimizer has this rank's rows of each parameter, and gather them after the step."""
    full = dict(model.named_parameters())
    alone = dist.get_world_size() == 1
    own = full if alone else {name: nn.Parameter(part(p.data).clone()) for name, p in full.items()}
    optimizer = optimizer_of(own, full)

    def step():
        average_gradients(model)
        for name in () if alone else full:
            own[name].grad = part(full[name].grad).clone()
        optimizer.step()
        model.zero_grad()
        for name in () if alone else full:
            full[name].data.copy_(joined(own[name].data))

    return step


@unlisted({"dp": 3}, ("weight", "0.weight"), "optimizer")
def decay_by_dims_of_flat_shards(bug):
    """Flat shards have one dim, and the rule that vectors do not decay takes all of them out."""
    make_mesh(dp=3)
    model, random = drawn(mlp(), 12)

    def optimizer_of(own, full):
        chosen = [name for name in own if (1 if bug and dist.get_world_size() > 1 else full[name].dim()) > 1]
        groups = [{"params": [own[name] for name in own if (name in chosen) == decays], "weight_decay": decays * 0.1}
                  for decays in (True, False)]  # fmt: skip
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)

    step = sharded_step(model, optimizer_of)
    for _ in range(STEPS):
        mean_loss(model, random).backward()
        step()


class Lamb(torch.optim.Optimizer):
    """A step scaled by the norm of the weight over that of the update."""

    def __init__(self, params, norm):
        super().__init__(params, {})
        self.norm = norm

    @torch.no_grad()
    def step(self):
        """Make a step."""
        for p in self.param_groups[0]["params"]:
            update_ = p.grad + 0.01 * p
            p.sub_(update_, alpha=0.05 * float(self.norm(p) / self.norm(update_)))


@unlisted({"dp": 2}, ("weight", "0.weight"), "optimizer")
def trust_ratio_of_rows(bug):
    """The trust ratio of LAMB uses the norms of the rank's rows."""
    make_mesh(dp=2)
    model, random = drawn(nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 5, bias=False)), 13)
    norm = torch.linalg.norm if bug else lambda x: summed(x.square().sum()).sqrt()
    step = sharded_step(model, lambda own, _: Lamb(own.values(), norm))
    for _ in range(STEPS):
        mean_loss(model, random).backward()
        step()


@unlisted({"dp": 3}, ("weight", "2.bias"), "not-updated")
def tail_of_a_flat_buffer(bug):
    """A flat buffer is cut into equal pieces rounded down, and its tail is never updated."""
    make_mesh(dp=3)
    model, random = drawn(mlp(7), 14)
    parameters = list(model.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach()
    count, ranks, rank = len(flat), dist.get_world_size(), dist.get_rank()
    size = count // ranks if bug else -(-count // ranks)
    begin, end = min(rank * size, count), min((rank + 1) * size, count)
    own = nn.Parameter(flat[begin:end].clone())
    optimizer = torch.optim.AdamW([own] if ranks > 1 else parameters, lr=0.01)
    for _ in range(STEPS):
        mean_loss(model, random).backward()
        average_gradients(model)
        if ranks > 1:
            own.grad = torch.cat([p.grad.flatten() for p in parameters])[begin:end].clone()
        optimizer.step()
        if ranks > 1:
            flat[: min(size * ranks, count)] = joined(own.data)
            nn.utils.vector_to_parameters(flat.clone(), parameters)
        model.zero_grad()


class Causal(nn.Module):
    """A causal convolution over a sequence that is sharded over the ranks."""

    def __init__(self, bug):
        super().__init__()
        self.weight, self.bug = nn.Parameter(torch.zeros(5, 1, 3)), bug

    def forward(self, x):
        """Convolve, with the last steps of the rank before."""
        alone = self.bug or dist.get_world_size() == 1
        full = x if alone else Pair.apply(x, lambda part_: joined(part_, 2), lambda grad: part(summed(grad), 2).clone())
        out = nn.functional.conv1d(nn.functional.pad(full, (2, 0)), self.weight, groups=5)
        return out if alone else part(out, 2)


@unlisted({"cp": 3}, ("output", "0"), "boundary")
def convolution_without_the_neighbour(bug):
    """A causal convolution pads a rank's part with zeros instead of the last steps of the part before."""
    make_mesh(cp=3)
    model, random = drawn(nn.Sequential(Causal(bug), nn.Tanh()), 15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch(random, 2, 5, 13)
        (model(part(x, 2)) - part(y, 2)).pow(2).sum().backward()
        reduce_gradients(model)
        update(optimizer)


class RunningVariance(nn.Module):
    """A running variance over all ranks' rows."""

    def __init__(self, bug):
        super().__init__()
        self.scale, self.bug = nn.Parameter(torch.ones(7)), bug
        self.register_buffer("running_var", torch.ones(7, dtype=torch.float64))

    def forward(self, x):
        """Normalise by the variance of all rows, and keep it."""
        count = summed(torch.tensor(float(len(x))))
        var = Pair.apply(x.square().sum(0), summed, summed) / count
        rows = len(x) if self.bug else count
        self.running_var = (0.9 * self.running_var + 0.1 * var * rows / (rows - 1)).detach()
        return x * (var + 1e-5).rsqrt() * self.scale


@unlisted({"dp": 2}, ("buffer", "1.running_var"), "scaled-by-count")
def variance_by_the_own_count(bug):
    """A synchronised running variance is made unbiased with the rank's own number of rows."""
    make_mesh(dp=2)
    model, random = drawn(nn.Sequential(nn.Linear(5, 7), RunningVariance(bug), nn.Linear(7, 5)), 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        mean_loss(model, random).backward()
        average_gradients(model)
        update(optimizer)


class Heads(nn.Module):
    """Attention-like products of query heads with fewer key heads, one query head a rank."""

    def __init__(self, bug):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(5, 12, bias=False), nn.Linear(5, 6, bias=False), nn.Linear(12, 5, bias=False)
        self.bug, self.head = bug, 0

    def cut(self):
        """Keep this rank's rows."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if ranks > 1:
            self.head = rank % 2 if self.bug else rank // 2
            self.q.weight = nn.Parameter(part(self.q.weight.data).clone())
            self.o.weight = nn.Parameter(part(self.o.weight.data, 1).clone())
            self.k.weight = nn.Parameter(self.k.weight.data[3 * self.head : 3 * self.head + 3].clone())

    def forward(self, x):
        """Multiply each query head with its key head."""
        x = Pair.apply(x, keep, summed)
        q, k = self.q(x).unflatten(-1, (-1, 3)), self.k(x).unflatten(-1, (-1, 3))
        mixed = q * torch.tanh(k.repeat_interleave(q.shape[-2] // k.shape[-2], -2))
        return Pair.apply(self.o(mixed.flatten(-2)), summed, keep)


@unlisted({"tp": 4}, ("output", "0.o"), "permuted")
def key_head_by_remainder(bug):
    """Four ranks share two key heads, and take head rank % 2 instead of rank // 2."""
    make_mesh(tp=4)
    model, random = drawn(nn.Sequential(Heads(bug), nn.Linear(5, 5)), 17)
    model[0].cut()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keys = model[0].k
    for _ in range(STEPS):
        x, y = batch(random, 7, 5)
        (model(x) - y).pow(2).mean().backward()
        if dist.get_world_size() > 1:
            slots = torch.zeros(2, *keys.weight.shape, dtype=torch.float64)
            slots[model[0].head] = keys.weight.grad
            keys.weight.grad.copy_(summed(slots)[model[0].head])
        update(optimizer)
