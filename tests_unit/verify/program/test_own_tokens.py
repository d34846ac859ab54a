"""Auxiliary losses of routers: one of each rank's own tokens differs from that of all tokens, and is named."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.verify import verify_program

pytestmark = pytest.mark.platforms("torch")

TOKENS, WIDTH, EXPERTS = 24, 5, 4


class Layer(nn.Module):
    """A router, with experts that are rows of a matrix."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, dtype=torch.float64))

    def forward(self, x):
        """Return the tokens and the router's output."""
        scores = self.router(x)
        return x + scores.softmax(-1) @ self.experts, scores


class Model(nn.Module):
    """A linear layer, and layers with routers."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        """Return the tokens and the outputs of the routers."""
        x, scores = self.first(x), []
        for layer in self.layers:
            x, own = layer(x)
            scores.append(own)
        return x, scores


class Attach(torch.autograd.Function):
    """The identity, whose backward also starts that of a loss."""

    @staticmethod
    def forward(ctx, x, loss):
        """Return the first argument."""
        ctx.shape = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx, cotangent):
        """Return the cotangent, and one for the loss."""
        return cotangent, torch.ones(ctx.shape, dtype=cotangent.dtype)


def chosen_loss(scores):
    """Return the share of tokens in the top two times the mean probability, for each expert, added up."""
    shares = torch.zeros(len(scores), EXPERTS, dtype=torch.float64).scatter(1, scores.topk(2).indices, 1.0).mean(0)
    return EXPERTS * (shares * scores.softmax(-1).mean(0)).sum()


def entropy_loss(scores):
    """Return the negative entropy of the mean probability."""
    mean = scores.softmax(-1).mean(0)
    return (mean * mean.log()).sum()


def squared_loss(scores):
    """Return the square of the mean probability."""
    return scores.softmax(-1).mean(0).square().sum()


def training(balance, *, layers=1, together=False, attached=False, parts=1, factor=1.0):
    """Return a program that trains on the ranks' tokens; one rank computes the auxiliary loss of ``parts`` of them."""

    def auxiliary(scores):
        ranks = dist.get_world_size()
        cut = parts if ranks == 1 else 1
        losses = [balance(part) for part in scores.chunk(cut)]
        return 0.03 * sum(losses) / len(losses) * (factor if ranks > 1 else 1.0)

    def program():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = Model(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            whole = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
            x, y = whole.chunk(ranks, 1)[rank]
            x, scores = model(x)
            if together:
                added = auxiliary(torch.stack(scores, 1).flatten(0, 1))
            else:
                added = sum(auxiliary(own) for own in scores)
            if attached:
                x, added = Attach.apply(x, added), 0.0
            ((x - y).square().mean() + added).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize(
    "balance, options, evidence",
    [
        (chosen_loss, {}, "0.12 times the load-balancing loss (share of tokens in the top 2 times mean probability), "),
        (squared_loss, {}, "0.03 times the load-balancing loss (square of the mean probability), of each "),
        (entropy_loss, {"layers": 2}, "0.03 times the load-balancing loss (entropy of the mean probability), of each "),
        (
            chosen_loss,
            {"layers": 2, "together": True},
            "0.12 times the load-balancing loss (share of tokens in the top 2 times mean probability) of all routers ",
        ),
    ],
)
def test_an_auxiliary_loss_of_own_tokens_is_named(balance, options, evidence):
    """The formula, its coefficient and the residual are named; computed for the same parts on one rank, it passes."""
    report = verify_program(training(balance, **options), 2, platform="torch")
    assert report.status == 1
    assert (report.verdict.first.kind, report.verdict.first.cause.kind) == ("loss", "auxiliary-loss"), report.text()
    assert report.verdict.first.cause.axis == "world"
    assert report.verdict.first.cause.evidence.startswith(evidence)
    last = f"layers.{options.get('layers', 1) - 1}.router.weight"
    assert f" own tokens instead of all, explains the loss and the gradient of {last} but for " in (
        report.verdict.first.cause.evidence
    )
    assert report.verdict.first.cause.evidence.endswith(
        " % of the difference; if this is meant, compute it on one rank for the same parts, or verify with a "
        "coefficient of 0"
    )
    if not options:
        same = verify_program(training(balance, parts=2, **options), 2, platform="torch")
        assert same.status == 0, same.text()


def test_an_auxiliary_loss_that_no_loss_shows_is_named_at_the_gradient():
    """A loss whose backward is attached to an activation is found in the gradient of the router's weight."""
    report = verify_program(training(chosen_loss, attached=True), 2, platform="torch")
    assert (report.verdict.first.name, report.verdict.first.cause.kind) == (
        "layers.0.router.weight",
        "auxiliary-loss",
    ), report.text()
    assert " explains the gradient of layers.0.router.weight but for " in report.verdict.first.cause.evidence


def test_another_coefficient_is_no_loss_of_own_tokens():
    """A loss of all tokens with another coefficient on the ranks has another cause."""

    def all_tokens(scores):
        ranks = dist.get_world_size()
        mean = scores.softmax(-1).mean(0)
        whole = mean.detach().clone()
        dist.all_reduce(whole)
        return (2 * whole / ranks * mean).sum()  # the gradient of the squared mean of all tokens

    report = verify_program(training(all_tokens, factor=1.5), 2, platform="torch")
    assert report.status == 1
    assert report.verdict.first.cause.kind != "auxiliary-loss", report.text()
