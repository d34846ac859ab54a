"""Programs with one error each, whose cause the report must name: what only shows in a whole run of ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather

from hyper_parallel.verify import verify_program

pytestmark = pytest.mark.platforms("torch")


def average(model, world):
    """Average gradients over the ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def skip(skips=True):
    """Train; the last rank leaves out its second step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        x, g = torch.randn(12, 5).tensor_split(world)[rank], torch.randn(12, 3).tensor_split(world)[rank]
        optimizer.zero_grad()
        (model(x) * g).sum().mul(world).backward()
        average(model, world)
        if not (skips and world > 1 and rank == world - 1 and step == 1):
            optimizer.step()


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        """Return logits."""
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def untie():
    """Train a model whose head has a copy of the embedding on ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Tied()
    if world > 1:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        ids = torch.randint(0, 11, (12, 5)).chunk(world)[rank]
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        average(model, world)
        optimizer.step()


def clip_stage():
    """Train two stages of a pipeline, each of which clips by the norm of its own gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6) for _ in range(4)]
    stage = nn.Sequential(*layers[rank * 4 // world : (rank + 1) * 4 // world])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.2)
    for _ in range(2):
        x, y = torch.randn(9, 6), 4 * torch.randn(9, 6)
        optimizer.zero_grad()
        if rank:
            x = torch.empty(9, 6)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = stage(x)
        if rank == world - 1:
            F.mse_loss(out, y).backward()
        else:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        if rank:
            dist.send(x.grad, rank - 1)
        norm = torch.stack([each.grad.norm() for each in stage.parameters()]).norm()
        for each in stage.parameters():
            each.grad *= 0.3 / norm
        optimizer.step()


def clip_columns_in_half_precision():
    """Train columns and rows of two matrices under autocast; each rank clips by the norm of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, last = nn.Linear(8, 24, bias=False), nn.Linear(24, 4, bias=False)
    first.weight = nn.Parameter(first.weight.detach().chunk(world)[rank].clone())
    last.weight = nn.Parameter(last.weight.detach().chunk(world, 1)[rank].clone())
    model = nn.Sequential(first, nn.Tanh(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(30, 8), torch.randn(30, 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x).float()
        whole = out.detach().clone()
        dist.all_reduce(whole)
        F.mse_loss(out + (whole - out.detach()), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


class Convolutions(nn.Module):
    """Convolutions over a dim whose parts ranks hold; the rows of neighbours are exchanged, or swapped."""

    def __init__(self, swaps):
        super().__init__()
        self.first, self.last, self.swaps = nn.Conv1d(2, 5, 3), nn.Conv1d(5, 2, 3), swaps

    def around(self, x):
        """Return a part with a row of each neighbour."""
        rank, world = dist.get_rank(), dist.get_world_size()
        parts, zero = all_gather(x.contiguous()), torch.zeros_like(x[..., :1])
        left = parts[rank - 1][..., -1:] if rank else zero
        right = parts[rank + 1][..., :1] if rank < world - 1 else zero
        return torch.cat([right, x, left] if self.swaps and world > 1 else [left, x, right], -1)

    def forward(self, x):
        """Convolve twice."""
        return self.last(self.around(torch.tanh(self.first(self.around(x)))))


def convolve(swaps):
    """Train convolutions whose parts get the rows of the other neighbour."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Convolutions(swaps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, g = torch.randn(3, 2, 24).chunk(world, 2)[rank], torch.randn(3, 2, 24).chunk(world, 2)[rank]
        optimizer.zero_grad()
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


class Causal(nn.Module):
    """A language model whose sequence is sharded: each rank has its rows of a causal attention."""

    def __init__(self, masks):
        super().__init__()
        self.embed, self.place, self.mix, self.head = (
            nn.Embedding(9, 6),
            nn.Embedding(12, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 9),
        )
        self.masks = masks

    def forward(self, ids, rows):
        """Return logits of the rank's rows."""
        x = self.embed(ids) + self.place(rows)
        keys = torch.cat(all_gather(x.contiguous()), 1)
        if self.masks:  # a rank takes its rows for the first ones
            rows = torch.arange(len(rows))
        scores = (x @ keys.mT).masked_fill(rows[:, None] < torch.arange(keys.shape[1]), -torch.inf)
        return self.head(x + self.mix(scores.softmax(-1) @ keys))


def shift(late=False, masks=False):
    """Train on the next word; with ``late``, each rank shifts the words of its own part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Causal(masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        ids, last = torch.randint(0, 9, (3, 12)), torch.full((3, 1), -100)
        targets = torch.cat([ids[:, 1:], last], 1).chunk(world, 1)[rank]
        ids = ids.chunk(world, 1)[rank]
        if late:
            targets = torch.cat([ids[:, 1:], last], 1)
        optimizer.zero_grad()
        logits = model(ids, torch.arange(12).chunk(world)[rank])
        (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 33).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_that_a_rank_leaves_out_is_named(world):
    """A rank that goes backward as often and steps less often has left out a step, however its values differ."""
    first = verify_program(skip, world).verdict.first
    assert (first.step, first.ranks, first.cause.kind) == (1, (world - 1,), "skipped-step")
    assert first.cause.evidence == (
        f"rank {world - 1} has 2 losses in step 2 where the single device has 1, and equally many in total: the "
        "optimizer skips its step after the first of them, as it does when gradients overflow"
    )
    assert verify_program(functools.partial(skip, skips=False), world).ok


@pytest.mark.parametrize("world", [2, 3])
def test_a_weight_that_ranks_do_not_share_between_modules_is_named(world):
    """The gradient of a tied weight lacks that of a copy which only ranks have."""
    first = verify_program(untie, world).verdict.first
    assert (first.kind, first.name, first.cause.kind) == ("gradient", "embed.weight", "untied")
    assert first.cause.evidence.startswith("with the gradient of head.weight, a weight that only the ranks have, ")


def test_stages_that_clip_by_their_own_norm_are_named():
    """Each stage's gradients are off by a factor of their own, which is the ratio of two norms."""
    first = verify_program(clip_stage, 2).verdict.first
    assert (first.kind, first.cause.kind) == ("gradient", "norm-local")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_of_the_wrong_neighbour_are_named(world):
    """Where every part is wrong at its ends, parts lie where most of their elements are right; the ends are named."""
    first = verify_program(functools.partial(convolve, True), world).verdict.first
    assert (first.kind, first.name, first.cause.kind) == ("output", "first", "boundary")
    assert verify_program(functools.partial(convolve, False), world).ok


@pytest.mark.parametrize("world", [2, 3])
def test_targets_that_a_rank_shifts_in_its_own_part_are_named(world):
    """Targets that are shifted after the sequence was sharded lack the first word of the next part."""
    first = verify_program(functools.partial(shift, late=True), world).verdict.first
    assert (first.kind, first.cause.kind) == ("loss", "targets")
    assert "with other targets: on rank " in first.cause.evidence
    assert "differ, -100, -100, -100 for " in first.cause.evidence
    assert verify_program(shift, world).ok


def test_a_mask_of_other_rows_is_named():
    """A mask that is computed from the rank's own row numbers hides what the single device's rows see."""
    first = verify_program(functools.partial(shift, masks=True), 2).verdict.first
    assert (first.kind, first.name, first.ranks, first.cause.kind) == ("output", "mix", (1,), "hidden")
    assert "the scores are the single device's (rows 6:12 of 12 in dim 1), but " in first.cause.evidence


def test_a_norm_of_own_shards_is_named_in_half_precision():
    """Norms of the ranks' own shards are recognised although gradients are rounded to half precision."""
    report = verify_program(clip_columns_in_half_precision, 3, platform="torch", upcast=False)
    first = report.verdict.first
    assert (first.kind, first.cause.kind) == ("norm", "norm-local"), report.text()
    assert first.cause.evidence.startswith("the norm of each rank's own part is ")
