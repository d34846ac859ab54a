"""A program of which two runs are compared: options change the order of its sums, or make another computation of it."""

SCRIPT = '''
import argparse
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F

options = argparse.ArgumentParser()
options.add_argument("--variant", default="")
options.add_argument("--kind", default="tp")
options.add_argument("--seed", type=int, default=0)
options.add_argument("--data", type=int, default=1)
given = options.parse_args()
variant = given.variant

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
tp = world if given.kind == "tp" else 1
part = rank if given.kind == "tp" else 0
torch.manual_seed(given.seed)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if variant != "no_reduce" and tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if variant != "no_copy" and tp > 1:
            dist.all_reduce(grad)
        return grad


def linear(x, weight):
    """The product, its sum in the order that the variant asks for."""
    if variant == "halves":
        middle = x.shape[-1] // 2
        return F.linear(x[..., middle:], weight[:, middle:]) + F.linear(x[..., :middle], weight[:, :middle])
    if variant == "reversed":
        return F.linear(x.flip(-1), weight.flip(-1))
    if variant == "outer":
        return (x[..., None, :] * weight).sum(-1)
    if variant == "thirds":
        return sum(F.linear(a, b) for a, b in zip(x.tensor_split(3, -1), weight.tensor_split(3, -1)))
    if variant == "double":
        return F.linear(x.double(), weight.double()).float()
    if variant == "transposed":
        return (weight @ x.transpose(-1, -2)).transpose(-1, -2)
    if variant == "permuted":
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(5))
        return F.linear(x[..., order], weight[:, order])
    return F.linear(x, weight)


class Column(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(full.weight.data.tensor_split(tp)[part].clone())
        self.bias = nn.Parameter(full.bias.data.tensor_split(tp)[part].clone())

    def forward(self, x):
        x = linear(Copy.apply(x), self.weight)
        return x if variant == "no_bias" else x + self.bias


class Row(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        full = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(full.weight.data.tensor_split(tp, 1)[part].clone())
        self.bias = nn.Parameter(full.bias.data.clone())

    def forward(self, x):
        x = Reduce.apply(linear(x, self.weight))
        return x + self.bias * (2 if variant == "bias_twice" else 1)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) + 0.1 * torch.randn(size))

    def forward(self, x):
        squares = x.double().pow(2).flip(-1).mean(-1, keepdim=True).float() if variant == "mean" else (
            x.pow(2).mean(-1, keepdim=True))
        return x * torch.rsqrt(squares + (1e-3 if variant == "eps" else 1e-6)) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = Norm(24), Column(24, 48), Row(48, 24)

    def forward(self, x):
        hidden = F.gelu(self.up(self.norm(x)), approximate="tanh" if variant == "gelu" else "none")
        return x * (1.001 if variant == "residual" else 1) + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(9, 24), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 7)

    def forward(self, x):
        x = self.enter(x)
        if variant == "again":
            with torch.no_grad():
                self.blocks[0](x * 0.5)
        for block in reversed(self.blocks) if variant == "swapped" else self.blocks:
            x = block(x)
        return self.head(x.detach() if variant == "detached" else x)


model = Model()
if variant == "frozen":
    model.enter.weight.requires_grad_(False)
rate = {"rate": 0.011, "double_rate": 0.02}.get(variant, 0.01)
optimizer = torch.optim.AdamW(
    model.parameters(), lr=rate, weight_decay=0.0 if variant == "decay" else 0.1, foreach=variant == "foreach"
)
torch.manual_seed(given.data)
for step in range(2):
    x, y = torch.randn(12, 5, 9), torch.randn(12, 5, 7)
    if given.kind == "dp":
        x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    squares = (model(x) - y) ** 2
    if variant == "rows":
        loss = squares.mean(-1).flip(0).mean(0).mean()
    elif variant == "summed":
        loss = squares.sum() / squares.numel() * 2
    else:
        loss = squares.mean()
    loss.backward()
    if given.kind == "dp":
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if variant == "not_averaged" else world
    if variant == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if variant == "stale" and step:
        model.head.weight.grad.mul_(0.99)
    optimizer.step()
    if variant != "kept":
        optimizer.zero_grad()
'''

REORDERINGS = (
    *[(a, b, "tp", "") for a, b in ((1, 2), (2, 1), (2, 3), (2, 4), (4, 2), (3, 4))],
    *[(a, b, "dp", "") for a, b in ((1, 2), (2, 3), (4, 2), (3, 1))],
    *[
        (1, 1, "tp", name)
        for name in (
            "halves", "reversed", "outer", "thirds", "double", "transposed", "permuted", "mean", "rows", "foreach",
            "again",
        )
    ],
    *[(2, 3, "tp", name) for name in ("halves", "permuted", "outer", "mean")],
    *[(2, 2, "dp", name) for name in ("thirds", "reversed", "rows")],
    *[(3, 4, "dp", name) for name in ("double", "transposed")],
)  # fmt: skip
"""Ranks of A and of B, how they share the work, and a variant of B that computes the same in another order: 30."""

SEEDED = (
    (1, 1, "tp", "gelu", "blocks.0.down"),
    (2, 4, "tp", "gelu", "blocks.0.down"),
    (1, 1, "tp", "eps", "blocks.0.norm"),
    (2, 3, "tp", "bias_twice", "blocks.0.down"),
    (2, 2, "tp", "no_reduce", "blocks.0.down"),
    (2, 2, "tp", "no_copy", "blocks.1.norm"),
    (1, 2, "tp", "no_bias", "blocks.0.down"),
    (1, 1, "tp", "residual", "blocks.0"),
    (2, 2, "dp", "not_averaged", "head"),
    (1, 1, "tp", "swapped", "blocks.0.norm"),
    (1, 1, "tp", "detached", "blocks.1.down"),
    (2, 2, "tp", "kept", "head"),
    (1, 1, "tp", "rate", "optimizer 0, group 0"),
    (2, 3, "dp", "stale", "head"),
    (1, 1, "tp", "decay", "enter"),
)
"""The same with a variant that computes something else, and the module or value where that is first seen: 15.

The part of a wrong output that a rank has is not found in the right one: a missing bias is seen a module later."""
