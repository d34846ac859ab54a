"""Bugs: inputs, masks, positions and random numbers of the wrong rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_parallel.verify.bugs.torch.base import Pair, initialized, part, reduce_gradients, steps, summed


def rank_of_another_group(bug: bool) -> None:
    """A rank picks its tokens by its rank in another group; equal group sizes hid it.

    Ranks with the same batch divide its tokens among the experts. Each rank should take the chunk with its index in the
    tensor group, but takes the chunk with its index in the expert group. So some tokens are computed several times and
    others never.
    """
    MESH = {"ep": 2, "tp": 3}
    SAMPLES, TOKENS, WIDTH, HIDDEN = 4, 9, 5, 7

    class Experts(nn.Module):
        def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            self.group, self.size, self.own = mesh.get_group("tp"), mesh["tp"].size(), mesh.get_local_rank("tp")
            self.chunk = mesh.get_local_rank("ep" if bug else "tp")

        def gather(self, rows: Tensor) -> Tensor:
            parts = [torch.empty_like(rows) for _ in range(self.size)]
            dist.all_gather(parts, rows.contiguous(), group=self.group)
            return torch.cat(parts, 1)

        def forward(self, x: Tensor) -> Tensor:
            mine = Pair.apply(x, lambda full: full.chunk(self.size, 1)[self.chunk].clone(), self.gather)
            outputs = self.down(torch.tanh(self.up(mine)))
            return Pair.apply(outputs, self.gather, lambda full: full.chunk(self.size, 1)[self.own].clone())

    class Model(nn.Module):
        def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
            super().__init__()
            self.embed, self.moe = nn.Linear(WIDTH, WIDTH), Experts(mesh, bug)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return x + self.moe(x)

    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    random, model = initialized(Model(mesh, bug), 2842)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    batch, batches = mesh.get_local_rank("ep"), mesh["ep"].size()
    for _ in steps(optimizer):
        x, y = torch.randn(2, SAMPLES, TOKENS, WIDTH, dtype=torch.float64, generator=random).chunk(batches, 1)[batch]
        (model(x) - y).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
            parameter.grad /= batches
        for parameter in model.moe.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))


def mask_over_wrong_group(bug: bool) -> None:
    """A padding mask is cut for the ranks of another group of the same size.

    The model is given its tensor-parallel groups explicitly: ranks 0, 2, 4 and 1, 3, 5. The mask is sliced by the
    rank's position in the default groups, 0 to 2 and 3 to 5: it has the right length but belongs to other tokens.
    """
    ROWS, TOKENS, WIDTH, EXPERTS = 3, 9, 4, 5

    class Router(nn.Linear):
        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            return torch.softmax(super().forward(x), -1) * valid

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.router, self.experts = (
                nn.Linear(WIDTH, WIDTH),
                Router(WIDTH, EXPERTS),
                nn.Linear(EXPERTS, WIDTH),
            )

        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            x = torch.tanh(self.embed(x))
            return x * self.experts(self.router(x, valid))

    alone = dist.get_world_size() == 1
    mesh = init_device_mesh("cpu", (1, 1) if alone else (3, 2), mesh_dim_names=("tp", "dp"))
    random, model = initialized(Model(), 5563)

    def part(full: Tensor, rank: int) -> Tensor:
        return full.tensor_split(mesh.size(1), 1)[mesh.get_local_rank("dp")].tensor_split(mesh.size(0))[rank]

    rank = mesh.get_local_rank("tp")
    rank_for_mask = dist.get_rank() % mesh.size(0) if bug else rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, ROWS, WIDTH, dtype=torch.float64, generator=random)
        lengths = torch.randint(2, TOKENS, (ROWS, 1), generator=random)
        valid = torch.arange(TOKENS)[:, None, None] < lengths
        ((model(part(x, rank), part(valid, rank_for_mask)) - part(y, rank)).pow(2).sum() / TOKENS).backward()
        reduce_gradients(model)


def equal_positions(bug: bool) -> None:
    """All ranks of a sharded sequence use the positions of the first shard.

    Each rank counts the positions of its tokens from zero, as a single device does. Only the first rank's are right.
    """
    TOKENS, WIDTH = 8, 5

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.embed, self.positions = bug, nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            ids = torch.arange(len(x)) if self.bug else part(torch.arange(TOKENS))
            return self.out(torch.tanh(self.embed(x) + self.positions(ids)))

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sp",))
    random, model = initialized(Model(bug), 563)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        reduce_gradients(model)


def uneven_boundaries(bug: bool) -> None:
    """Two tensors with equal placements, but different boundaries between shards, are multiplied shard by shard.

    Both have the placement "dim 0 is sharded", so nothing is redistributed. The ranks have 0, 2 and 4 rows of one
    tensor and 1, 1 and 4 rows of the other. Broadcasting makes the local products possible, and the first row is
    multiplied by the second row's factor.
    """
    POINTS, WIDTH = 6, 3
    SHARDS, SCALE_SHARDS = [0, 2, 4], [1, 1, 4]

    class Scale(nn.Module):
        def __init__(self, points: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(points, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class Model(nn.Module):
        def __init__(self, points: int) -> None:
            super().__init__()
            self.scale, self.out = Scale(points), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.scale(x)))

    def redistribute(x: Tensor, sizes: list[int], new_sizes: list[int]) -> Tensor:
        full = x.new_zeros(POINTS, WIDTH)
        full.split(sizes)[dist.get_rank()].copy_(x)
        dist.all_reduce(full)
        return full.split(new_sizes)[dist.get_rank()]

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("domain",))
    sizes, scale_sizes = (SHARDS, SCALE_SHARDS) if mesh.size() > 1 else ([POINTS], [POINTS])
    random, model = initialized(Model(POINTS), 1943)
    model.scale.weight = nn.Parameter(model.scale.weight.data.split(scale_sizes)[mesh.get_local_rank()].clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x = torch.randn(POINTS, WIDTH, dtype=torch.float64, generator=random).split(sizes)[mesh.get_local_rank()]
        (model(x if bug else redistribute(x, sizes, scale_sizes)).pow(2).sum() / POINTS).backward()
        dist.all_reduce(model.out.weight.grad)


def dropout_stream_per_rank(bug: bool) -> None:
    """Ranks that hold the same activations draw dropout masks of their own.

    Without sequence parallelism the activations between the sharded layers are replicated, and their dropout must draw
    from the stream that the ranks share. With a stream per rank, replicas differ, and later sums combine several masks.
    """
    TOKENS, WIDTH, HIDDEN = 5, 4, 8

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
            self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.dropout(torch.tanh(self.embed(x)))
            hidden = torch.tanh(self.up(Pair.apply(x, Tensor.clone, summed)))
            return x + Pair.apply(self.down(hidden), summed, Tensor.clone)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 4828)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    torch.manual_seed(dist.get_rank() if bug else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()


def dropout_stream_shared(bug: bool) -> None:
    """Ranks that hold different tokens draw the same dropout mask.

    The random stream is that of the data axis, over which the sequence is not sharded. Ranks that share a sequence
    start the stream with the same seed and drop the same elements of their shards. Each should draw the part of the
    mask for its own tokens.
    """
    TOKENS, WIDTH, HIDDEN = 8, 4, 6

    class Dropout(nn.Dropout):
        def __init__(self, bug: bool) -> None:
            super().__init__(0.3)
            self.bug, self.random = bug, torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            shape = x.shape if self.bug else (TOKENS, HIDDEN)
            kept = torch.rand(shape, dtype=torch.float64, generator=self.random) >= self.p
            return x * (kept if self.bug else part(kept)) / (1 - self.p)

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.up, self.dropout, self.down = nn.Linear(WIDTH, HIDDEN), Dropout(bug), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.dropout(torch.tanh(self.up(x))))

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    random, model = initialized(Model(bug), 4828)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        reduce_gradients(model)


def dropout_in_evaluation(bug: bool) -> None:
    """Dropout stays active in evaluation.

    The attention passes its dropout rate to a function without a training mode, so `eval()` has no effect on it. The
    validation losses are noisy and too high, but training itself is right.
    """
    ROWS, TOKENS, WIDTH = 4, 5, 3

    class Dropout(nn.Dropout):
        def __init__(self, bug: bool) -> None:
            super().__init__(0.3)
            self.bug, self.random = bug, torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training and not self.bug:
                return x
            kept = torch.rand(ROWS, *x.shape[1:], dtype=torch.float64, generator=self.random) >= self.p
            return x * part(kept) / (1 - self.p)

    class Attention(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            self.dropout = Dropout(bug)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(torch.softmax(self.query(x) @ self.key(x).mT, -1)) @ self.value(x)

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.attention, self.out = Attention(bug), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x))

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    random, model = initialized(Model(bug), 33844)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model.train()(part(x)) - part(y)).pow(2).sum() / ROWS).backward()
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.eval()(part(x.flip(0)))


def all_to_all_unequal(bug: bool) -> None:
    """A rank without tokens for the experts leaves out their all-to-all.

    Some batches have no tokens for the last layer of experts. The rank with such a batch skips the layer and its two
    all-to-alls, while the other ranks wait in theirs. Ranks without tokens must participate with empty messages.
    """
    ROWS, TOKENS, WIDTH, EXPERTS = 3, 4, 3, 3

    class Exchange(torch.autograd.Function):
        """Sends rows to other ranks; the backward sends their gradients back."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, sizes: list[int], new_sizes: list[int]) -> Tensor:
            ctx.sizes, ctx.new_sizes = sizes, new_sizes
            received = x.new_empty(sum(new_sizes), WIDTH)
            dist.all_to_all_single(received, x.contiguous(), new_sizes, sizes)
            return received

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return Exchange.apply(grad, ctx.new_sizes, ctx.sizes), None, None

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug, self.embed = bug, nn.Linear(WIDTH, WIDTH)
            self.experts = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in range(EXPERTS)})

        def forward(self, x: Tensor, experts: Tensor) -> Tensor:
            x = torch.tanh(self.embed(x))
            chosen = (experts >= 0).nonzero()[:, 0]
            if self.bug and not len(chosen):
                return x
            order = chosen[experts[chosen].argsort(stable=True)]
            world, count = dist.get_world_size(), EXPERTS // dist.get_world_size()
            counts = torch.bincount(experts[chosen], minlength=EXPERTS)
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            sizes, new_sizes = counts.view(world, -1).sum(1).tolist(), received.view(world, count).sum(1).tolist()
            tokens = Exchange.apply(x[order], sizes, new_sizes).split(received.view(world, count).sum(0).tolist())
            outputs = [self.experts[str(dist.get_rank() * count + i)](rows) for i, rows in enumerate(tokens)]
            return x.index_add(0, order, Exchange.apply(torch.cat(outputs), new_sizes, sizes))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    random, model = initialized(Model(bug), 5794)
    own = torch.arange(EXPERTS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    model.experts = nn.ModuleDict({name: expert for name, expert in model.experts.items() if int(name) in own})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in steps(optimizer):
        x, y = torch.randn(2, ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        experts = torch.randint(EXPERTS, (ROWS, TOKENS), generator=random)
        experts[step] = -1
        x, y, experts = (
            full.tensor_split(mesh.size())[mesh.get_local_rank()].flatten(0, 1) for full in (x, y, experts)
        )
        ((model(x, experts) - y).pow(2).sum() / (ROWS * TOKENS)).backward()
        for parameter in model.embed.parameters():
            dist.all_reduce(parameter.grad)
