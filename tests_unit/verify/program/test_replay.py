"""Ranks that draw dropout for their own samples, or decide near ties otherwise, run with the reference's draws."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.verify import verify_program

pytestmark = pytest.mark.platforms("torch")

DROPPED = "dropout: each rank draws for its own samples; "
TIES = " are near ties that ranks decide otherwise, with margins within the bounds; the reference's were replayed"


class Attention(nn.Module):
    """Self-attention with dropout inside the fused function, causal, and an in-place dropout of what it returns."""

    def __init__(self, inplace):
        super().__init__()
        self.qkv, self.inplace = nn.Linear(6, 18), inplace

    def forward(self, x):
        """Attend, and drop."""
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, is_causal=True)
        return F.dropout(y.clamp(min=-0.1) * (y > 0), 0.25, self.training, inplace=self.inplace)


def drop(seed=0, p=0.2, sharded=True, inplace=False, recompute=False):
    """Train with dropout; each rank seeds its generator by ``seed`` times its rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, attention, last = nn.Linear(5, 6), Attention(inplace), nn.Linear(6, 2)
    drops = nn.Dropout(p if world == 1 or rank else 0.2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention, self.drops, self.last = first, attention, drops, last

        def forward(self, x):
            inner = lambda value: self.drops(self.attention(value))  # noqa: E731 - one line
            x = self.first(x)
            return self.last(checkpoint(inner, x, use_reentrant=False) if recompute else inner(x))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(2, 7, 4, 5)
    cotangents = torch.randn(2, 7, 4, 2)
    torch.manual_seed(3 + seed * rank)
    for each in zip(data, cotangents, strict=True):
        x, g = (value.tensor_split(world)[rank] if sharded else value for value in each)
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1 if sharded else world
        optimizer.step()
        optimizer.zero_grad()


WORLDS = [pytest.param(2, marks=pytest.mark.sweep), 3, pytest.param(4, marks=pytest.mark.sweep)]
"""Those of 2 and 4 run the same code as 3, which leaves unequal shares."""


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"recompute": True}], ids=str)
def test_masks_that_ranks_draw_for_their_own_samples_are_replayed(world, options):
    """Independent dropout of data parallelism is right: the reference's masks are replayed, and the report says so."""
    report = verify_program(functools.partial(drop, seed=10, **options), world)
    assert report.ok, report.text()
    assert report.verdict.counts["mask"] == 6 * world
    (line,) = [note for note in report.verdict.notes if note.startswith(DROPPED)]
    assert line.endswith(" masks of the reference were replayed")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])  # the same code for any world
def test_masks_that_ranks_share_or_that_replicas_do_not_are_errors(world):
    """One mask for different samples, and different masks for one activation, are errors with their cause."""
    shared = verify_program(functools.partial(drop, seed=0), world)
    assert (shared.verdict.first.kind, shared.verdict.first.cause.kind) == ("mask", "random-shared")
    replicated = verify_program(functools.partial(drop, seed=10, sharded=False), world)
    assert (replicated.verdict.first.kind, replicated.verdict.first.cause.kind) == ("mask", "random-differs")
    assert not any(note.startswith(DROPPED) for note in shared.verdict.notes + replicated.verdict.notes)


def test_a_rate_that_differs_shows_behind_a_replayed_mask():
    """A rank that drops with another probability scales by another factor, whatever the mask."""
    report = verify_program(functools.partial(drop, seed=10, p=0.5), 2)
    assert not report.ok
    assert (report.verdict.first.kind, report.verdict.first.name, report.verdict.first.ranks) == (
        "output", "drops", (0,),
    )  # fmt: skip


class Router(nn.Module):
    """Top-1 and top-2 experts by scores that two experts share for some tokens, but for the order of the sum."""

    def __init__(self, choose):
        super().__init__()
        gate = torch.randn(5, 12)
        gate[1] = gate[0].flip(0)
        self.gate, self.choose = gate, choose
        self.experts = nn.ModuleList(nn.Linear(12, 3) for _ in range(5))

    def forward(self, x, split):
        """Send each row to the experts that are chosen for it."""
        rank, world = dist.get_rank(), dist.get_world_size()
        columns = torch.arange(12).tensor_split(world)[rank] if split else torch.arange(12)
        scores = x[:, columns] @ self.gate[:, columns].T
        if split:
            dist.all_reduce(scores)
        chosen = self.choose(scores)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        weights = torch.tensor([1.0, 0.5])[: chosen.shape[1], None]
        return (torch.gather(out, 1, chosen[..., None].expand(-1, -1, 3)) * weights).sum(1)


def route(choose, split=True, steps=2, scale=1.0):
    """Train a router whose scores ranks add up in another order; ``scale`` is an error of one expert's gradient."""
    torch.manual_seed(0)
    model = Router(choose)
    optimizer = torch.optim.SGD(model.experts.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(11, 1) * torch.tensor([1.0, 1.0]).repeat_interleave(6)
        x = torch.cat([x, torch.randn(9, 12)])[torch.randperm(20)]
        g = torch.randn(20, 3)
        rank, world = dist.get_rank(), dist.get_world_size()
        if not split:
            x, g = x.tensor_split(world)[rank], g.tensor_split(world)[rank]
        (model(x, split) * g).sum().backward()
        for parameter in model.experts.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world if split else 1
        if world > 1:
            model.experts[1].weight.grad *= scale
        optimizer.step()
        optimizer.zero_grad()


CHOICES = {
    "topk": lambda scores: scores.topk(2, -1).indices,
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "max": lambda scores: torch.max(scores, dim=1)[1][:, None],
    "sort": lambda scores: torch.sort(scores, descending=True, stable=True)[1][:, :1],
    "argsort": lambda scores: torch.argsort(scores.T, 0, descending=True).T[:, :2],
}


@pytest.mark.parametrize("operator", CHOICES)
@pytest.mark.parametrize("world", WORLDS)
def test_near_ties_that_flip_are_replayed(operator, world):
    """Where rounding decides which expert a token gets, ranks take the reference's choice."""
    report = verify_program(functools.partial(route, CHOICES[operator]), world, allow=["equal-data"])
    assert report.ok, report.text()
    assert report.verdict.counts["weight"] == 30 * world
    (line,) = [note for note in report.verdict.notes if note.endswith(TIES)]
    assert line.startswith("decisions: ")


@pytest.mark.parametrize("scale", [*(pytest.param(scale, marks=pytest.mark.sweep) for scale in (0.0, 0.5)), 1.001])
def test_replayed_choices_hide_no_error(scale):
    """Behind replayed near ties, a gradient that is wrong by a thousandth differs, and nothing before it."""
    program = functools.partial(route, CHOICES["topk"], scale=scale)
    report = verify_program(program, 3, allow=["equal-data"])
    first = report.verdict.first
    assert (first.kind, first.name, first.step) == ("gradient", "experts.1.weight", 0)
    assert any(note.endswith(TIES) for note in report.verdict.notes)


def test_choices_without_a_flip_change_nothing():
    """Ranks that decide as the reference does are compared as they are."""
    report = verify_program(functools.partial(route, CHOICES["topk"], split=False), 3)
    assert report.ok, report.text()
    assert not any(TIES in note for note in report.verdict.notes)


POOLS = {
    "1d": lambda scores: F.max_pool1d(scores[:, None], 2, 2).flatten(1),
    "2d": lambda scores: nn.MaxPool2d(2)(scores.reshape(-1, 2, 3, 2).transpose(1, 2)).flatten(1),
    "3d": lambda scores: F.max_pool3d(scores.reshape(-1, 1, 3, 2, 2), (1, 1, 2)).flatten(1),
    "of one sample": lambda scores: F.max_pool1d(scores, 3, 1, 1)[:, ::2],
    "adaptive": lambda scores: nn.AdaptiveMaxPool1d(6)(scores[:, None]).flatten(1),
    "adaptive, 2d": lambda scores: F.adaptive_max_pool2d(scores.reshape(-1, 2, 3, 2), (3, 1)).flatten(1),
}


def pool(choose, steps=2, scale=1.0):
    """Train weights of which two are equal but for the order of their sum; only the larger one gets a gradient."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = torch.arange(12).tensor_split(world)[rank]
    layer = nn.Linear(12, 12, bias=False)
    with torch.no_grad():
        layer.weight[1::2] = layer.weight[::2].flip(1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(9, 1).expand(9, 12)
        part = x[:, columns] @ layer.weight[:, columns].T
        total = part.detach().clone()
        dist.all_reduce(total)
        out = choose(part + (total - part.detach()))
        (out * torch.randn(out.shape)).sum().backward()
        dist.all_reduce(layer.weight.grad)
        if world > 1:
            layer.weight.grad[2:4] *= scale
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("operator", POOLS)
@pytest.mark.parametrize("world", WORLDS)
def test_windows_of_max_pooling_whose_maxima_are_near_ties_are_replayed(operator, world):
    """Where rounding decides which element of a window is the maximum, its gradient goes where the reference's goes."""
    report = verify_program(functools.partial(pool, POOLS[operator]), world, allow=["equal-data"])
    assert report.ok, report.text()
    assert report.verdict.counts["weight"] == 3 * world
    (line,) = [note for note in report.verdict.notes if note.endswith(TIES)]
    assert line.startswith("decisions: ")


def test_replayed_windows_hide_no_error():
    """Behind replayed maxima, the gradient of one row that is wrong by a thousandth differs."""
    report = verify_program(functools.partial(pool, POOLS["2d"], scale=1.001), 3, allow=["equal-data"])
    first = report.verdict.first
    assert (first.kind, first.name, first.step) == ("gradient", "optimizer 0, parameter 0", 0)
    assert any(note.endswith(TIES) for note in report.verdict.notes)


def test_a_choice_that_is_no_near_tie_is_an_error():
    """Right scores of which another index is chosen differ first, with both scores and the rounding tolerance."""

    def second(scores):
        return scores.topk(2, -1).indices if dist.get_world_size() == 1 else wrong(scores)

    def wrong(scores):
        return scores.topk(2, -1, largest=False).indices

    report = verify_program(functools.partial(route, second, split=False), 2)
    assert not report.ok
    first = report.verdict.first
    assert (first.kind, first.name, first.ranks, first.step) == ("choice", "(model) topk", (0, 1), 0)
    assert first.why.startswith("rank 0 chooses index ")
    assert " where the single device chooses " in first.why


class Noise(nn.Module):
    """Noise in several spellings, one of them on a weight that all ranks share if they draw it alike."""

    def __init__(self, shared):
        super().__init__()
        self.first, self.last, self.shared = nn.Linear(5, 6), nn.Linear(6, 2), shared

    def forward(self, x):
        """Add and multiply noise."""
        x = self.first(x)
        x = x * torch.empty_like(x).uniform_(0.9, 1.1) + 0.1 * torch.randn_like(x)
        keep = torch.bernoulli(torch.full_like(x, 0.7))
        x = x * keep + torch.rand(*x.shape) + torch.zeros_like(x).exponential_()
        return self.last(x) + (0.1 * torch.randn(2) if self.shared else 0.0)


def jitter(shared=False, seed=10):
    """Train with noise; each rank seeds its generator by ``seed`` times its rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Noise(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, cotangents = torch.randn(2, 7, 5), torch.randn(2, 7, 2)
    torch.manual_seed(3 + seed * rank)
    for each in zip(data, cotangents, strict=True):
        x, g = (value.tensor_split(world)[rank] for value in each)
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world", WORLDS)
def test_noise_that_ranks_draw_for_their_own_samples_is_replayed(world):
    """Random numbers of modules are replayed as masks are, in each spelling; rank 0 starts as the reference does."""
    report = verify_program(jitter, world)
    assert report.ok, report.text()
    (line,) = [note for note in report.verdict.notes if note.startswith("random numbers: ")]
    assert line == (
        f"random numbers: each rank draws for its own samples; {10 * world - 1} draws of the reference were replayed"
    )


def test_noise_that_ranks_should_share_is_not_replayed():
    """Numbers that have the same sizes on every rank must be equal there; those of one stream are shared."""
    for program in (functools.partial(jitter, shared=True), functools.partial(jitter, seed=0)):
        report = verify_program(program, 2)
        assert not report.ok
        assert (report.verdict.first.kind, report.verdict.first.name) == ("output", "last")
        assert not any(note.startswith("random numbers: ") for note in report.verdict.notes)


class Experts(nn.Module):
    """Each row goes to one of three experts, which drop elements of the rows that they get."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(5, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x):
        """Route by noisy scores."""
        x = self.first(x)
        scores = self.gate(x)
        chosen = (scores + 0.3 * torch.randn_like(scores)).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                out[rows] = expert(x[rows]) * scores[rows, number, None]
        return out


def noisy_experts():
    """Train experts whose routing and masks are drawn by each rank; in each step other rows reach an expert."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, cotangents = torch.randn(3, 31, 5), torch.randn(3, 31, 6)
    torch.manual_seed(3 + 10 * rank)
    for each in zip(data, cotangents, strict=True):
        x, g = (value.tensor_split(world)[rank] for value in each)
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.sweep), 3])
def test_masks_of_rows_that_a_draw_has_chosen_are_replayed_behind_it(world):
    """Which rows an expert drops elements of is known when the noise before it is replayed, step by step."""
    report = verify_program(noisy_experts, world)
    assert report.ok, report.text()
    assert any(note.startswith(DROPPED) for note in report.verdict.notes)
    assert any(note.startswith("random numbers: ") for note in report.verdict.notes)


class Traced(nn.Module):
    """Chooses and draws for one sample at a time, under a transform of functions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)

    def forward(self, x):
        """Multiply each sample by its largest element, and by noise."""
        x = self.first(x)
        noise = torch.vmap(torch.rand_like, randomness="same")(x)
        return torch.vmap(lambda row: row * row.topk(1).values + row.max(-1)[0])(x) * noise[:1]


def test_transforms_of_functions_are_left_alone():
    """Under ``vmap`` a tensor stands for many: its choices and draws are not recorded, and the program runs."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = Traced()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, g = (torch.randn(7, size).tensor_split(world)[rank] for size in (5, 6))
        (model(x) * g).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    report = verify_program(program, 2)
    assert report.ok, report.text()


SIDES = (
    "thresholds: 1 of {} numbers are nearer to one than rounding moves them, and on its other side on a rank; the "
    "reference's sides were replayed"
)


def cross(size, recompute=False):
    """Train a ReLU, one of whose inputs is next to zero and lies on the other side, by ``size``, on its rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    first, last = nn.Linear(6, 9), nn.Linear(9, 2)
    data, cotangents = torch.randn(3, 7, 6), torch.randn(3, 7, 2)
    with torch.no_grad():
        first.bias[2] -= first(data[0])[5, 2] - size

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            h = self.first(x)
            if world > 1:
                h = h - 2 * torch.where(h.abs() < 2 * size, h, 0).detach()
            return self.last(checkpoint(F.relu, h, use_reentrant=False) if recompute else F.relu(h))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, g in zip(data, cotangents, strict=True):
        (model(x.tensor_split(world)[rank]) * g.tensor_split(world)[rank]).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "world, rows", [pytest.param(2, 3, marks=pytest.mark.sweep), (3, 2), pytest.param(4, 2, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_a_number_that_rounding_takes_across_a_threshold_is_replayed(world, rows, recompute):
    """A ReLU's input that rounding makes negative on a rank has another gradient, and is not an error."""
    report = verify_program(functools.partial(cross, 3e-7, recompute), world)
    assert report.ok, report.text()
    assert SIDES.format(9 * rows) in report.verdict.notes


def test_a_number_that_no_rounding_takes_across_a_threshold_is_an_error():
    """A ReLU's input that is wrong by more than rounding is reported."""
    report = verify_program(functools.partial(cross, 1e-3), 2)
    assert not report.ok
    assert not any(note.startswith("thresholds") for note in report.verdict.notes)
