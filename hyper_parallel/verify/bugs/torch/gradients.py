"""Bugs: gradients that ranks reduce too little, too often, or not in the same way."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyper_parallel.verify.bugs.torch.base import Pair, initialized, part, steps, summed


def sequence_parallel_norm(bug: bool) -> None:
    """The gradient of the final norm is not summed over the ranks of the sequence.

    Gradients of marked norms are summed. Norms inside the layers are marked; the norm after the last layer is not.
    """
    TOKENS, WIDTH, HIDDEN = 7, 5, 8

    def gather(shard: Tensor) -> Tensor:
        full = shard.new_zeros(TOKENS, *shard.shape[1:])
        part(full).copy_(shard)  # the ranks' shards differ in size: sum shards padded with zeros
        dist.all_reduce(full)
        return full

    def reduce_scatter(partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return part(total).clone()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.final_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(Pair.apply(self.norm(x), gather, reduce_scatter)))
            return self.final_norm(x + Pair.apply(self.down(hidden), reduce_scatter, gather))

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 1446)
    for linear, dim in ((model.up, 0), (model.down, 1)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    marked = [*model.norm.parameters(), *([] if bug else model.final_norm.parameters())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        loss = (model(part(x)) - part(y)).pow(2).sum() / TOKENS
        loss.backward()
        for parameter in marked:
            dist.all_reduce(parameter.grad)


def shared_norm_of_heads(bug: bool) -> None:
    """All heads share one norm weight, but each rank's gradient covers its own heads only.

    Heads are sharded, and the weight is replicated. Its gradient is summed over the ranks only if sequence parallelism
    is on, which it is not.
    """
    TOKENS, WIDTH, HEADS, SIZE = 6, 5, 4, 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.value, self.gate = (
                nn.Linear(WIDTH, HEADS * SIZE, bias=False),
                nn.Linear(WIDTH, HEADS * SIZE, bias=False),
            )
            self.heads_norm = nn.RMSNorm(SIZE)
            self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = Pair.apply(torch.tanh(self.embed(x)), Tensor.clone, summed)
            normed = self.heads_norm(self.value(x).view(TOKENS, -1, SIZE)).flatten(1)
            return Pair.apply(self.out(normed * torch.sigmoid(self.gate(x))), summed, Tensor.clone)

    def shard_heads(linear: nn.Linear, dim: int) -> None:
        heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
        linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 7452)
    for linear, dim in ((model.value, 0), (model.gate, 0), (model.out, 1)):
        shard_heads(linear, dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        if not bug:
            dist.all_reduce(model.heads_norm.weight.grad)


def projection_reduced_twice(bug: bool) -> None:
    """The gradient of some rows of a projection is summed over the ranks twice.

    A replicated projection has a compressed output, which the sharded second projection reads, and a positional output,
    which the heads read directly. The operator that sums gradients over the ranks in backward is placed before the
    second projection. So the later sum of the parameter's gradient over the ranks sums the compressed rows a second
    time. The fix is to place the operator before the first projection.
    """
    TOKENS, WIDTH, HEADS, SIZE, COMPRESSED = 6, 5, 4, 2, 3

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.late, heads = bug, HEADS * SIZE
            self.embed, self.query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, heads, bias=False)
            self.kv_b, self.kv_a = (
                nn.Linear(COMPRESSED, heads, bias=False),
                nn.Linear(WIDTH, COMPRESSED + SIZE, bias=False),
            )
            self.out = nn.Linear(heads, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            embedded = torch.tanh(self.embed(x))
            inner = Pair.apply(embedded, Tensor.clone, summed)
            compressed, position = self.kv_a(embedded if self.late else inner).split([COMPRESSED, SIZE], 1)
            value = self.kv_b(Pair.apply(compressed, Tensor.clone, summed) if self.late else compressed)
            query, value = (x.view(TOKENS, -1, SIZE).transpose(0, 1) for x in (self.query(inner), value))
            mixed = torch.softmax(query @ (value + position).mT, -1) @ value
            return Pair.apply(self.out(mixed.transpose(0, 1).flatten(1)), summed, Tensor.clone)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 496)
    for linear, dim in ((model.query, 0), (model.kv_b, 0), (model.out, 1)):
        heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
        linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        dist.all_reduce(model.kv_a.weight.grad)


def one_kv_head(bug: bool) -> None:
    """Sharded queries read one key-value head, whose gradients stay partial.

    Every rank's queries contribute to the gradient of the shared head. The optimizer sums the weight's gradient over
    the ranks, but not the bias's (bigcode Megatron-LM #11), and the gradient of the head's input is not summed (#36
    there). The fix is to sum directly after the head (#37 there).
    """
    TOKENS, WIDTH, HEADS, SIZE = 7, 5, 4, 3

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug = bug
            self.embed, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * SIZE)
            self.query = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
            self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.embed(x))
            both = self.kv(x)
            both = torch.tanh(both if self.bug else Pair.apply(both, Tensor.clone, summed))
            key, value = both.chunk(2, 1)
            query = self.query(Pair.apply(x, Tensor.clone, summed)).view(TOKENS, -1, SIZE).transpose(0, 1)
            mixed = torch.softmax(query @ key.T, -1) @ value
            return Pair.apply(self.out(mixed.transpose(0, 1).flatten(1)), summed, Tensor.clone)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 37)
    for linear, dim in ((model.query, 0), (model.out, 1)):
        heads = linear.weight.data.unflatten(dim, (HEADS, SIZE))
        linear.weight = nn.Parameter(part(heads, dim).flatten(dim, dim + 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        if bug:
            dist.all_reduce(model.kv.weight.grad)


def router_weight(bug: bool) -> None:
    """Ranks route different tokens, and the router's gradient is not summed over them.

    Under sequence parallelism the experts are sharded and gather the tokens; the replicated router reads only the
    rank's own tokens.
    """
    TOKENS, WIDTH, HIDDEN, EXPERTS = 8, 5, 7, 2

    def gather(shard: Tensor) -> Tensor:
        full = shard.new_zeros(TOKENS, *shard.shape[1:])
        part(full).copy_(shard)  # the ranks' shards differ in size: sum shards padded with zeros
        dist.all_reduce(full)
        return full

    def reduce_scatter(partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return part(total).clone()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
            self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(EXPERTS))
            self.downs = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(EXPERTS))

        def forward(self, x: Tensor) -> Tensor:
            probabilities = torch.softmax(self.router(x), -1)
            chosen = probabilities * nn.functional.one_hot(probabilities.argmax(-1), EXPERTS)
            tokens = Pair.apply(x, gather, reduce_scatter)
            experts = [down(torch.tanh(up(tokens))) for up, down in zip(self.ups, self.downs, strict=True)]
            return x + (chosen[..., None] * Pair.apply(torch.stack(experts, 1), reduce_scatter, gather)).sum(1)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 599)
    for linear, dim in (*((up, 0) for up in model.ups), *((down, 1) for down in model.downs)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        if not bug:
            dist.all_reduce(model.router.weight.grad)


def experts_input_gradient(bug: bool) -> None:
    """The gradient of the sharded experts' input is sliced instead of reduce-scattered.

    The experts read the local tensor of a gathered DTensor. Without `grad_placements`, its gradient is used as if it
    were complete, although it is a partial sum on every rank.
    """
    TOKENS, WIDTH, HIDDEN, EXPERTS = 9, 4, 7, 2

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
            self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            outputs = torch.tanh(x @ self.up) @ self.down
            return (weights.T[..., None] * outputs).sum(0)

    class Model(nn.Module):
        def __init__(self, mesh: DeviceMesh, bug: bool) -> None:
            super().__init__()
            self.mesh, self.bug = mesh, bug
            self.embed, self.router = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, EXPERTS, bias=False)
            self.experts = Experts()

        def gathered(self, shard: Tensor) -> DTensor:
            return DTensor.from_local(shard, self.mesh, [Shard(0)]).redistribute(placements=[Replicate()])

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gathered(torch.softmax(self.router(x), -1)).to_local(grad_placements=[Partial()])
            x = self.embed(x)
            tokens = self.gathered(x).to_local(grad_placements=None if self.bug else [Partial()])
            outputs = self.experts(tokens, weights)
            return (
                x + DTensor.from_local(outputs, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
            )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(mesh, bug), 1805)
    model.experts.up = nn.Parameter(part(model.experts.up.data, 2).clone())
    model.experts.down = nn.Parameter(part(model.experts.down.data, 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
        for parameter in (model.embed.weight, model.router.weight):
            dist.all_reduce(parameter.grad)


def all_reduce_without_backward(bug: bool) -> None:
    """A plain all-reduce in the forward drops the other ranks' gradients in the backward.

    A token's log-probability is its logit, which one rank has, less the logarithm of a sum over all ranks' vocabulary.
    Every rank's logits need the gradient of that sum, but the backward of a plain all-reduce passes it on only to the
    logits of the rank that has the token.
    """
    TOKENS, WIDTH, VOCABULARY = 7, 5, 11

    class Model(nn.Module):
        def __init__(self, bug: bool) -> None:
            super().__init__()
            self.bug = bug
            self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            logits = self.head(Pair.apply(torch.tanh(self.embed(x)), Tensor.clone, summed))
            total = logits.exp().sum(-1)
            if self.bug:
                dist.all_reduce(total)
            else:
                total = Pair.apply(total, summed, summed)
            mine = part(torch.arange(VOCABULARY))
            picked = torch.where(targets[:, None] == mine, logits - total.log()[:, None], 0.0).sum(-1)
            return Pair.apply(picked, summed, Tensor.clone)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(bug), 9947)
    model.head.weight = nn.Parameter(part(model.head.weight.data).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=random)
        targets = torch.randint(VOCABULARY, (TOKENS,), generator=random)
        (-model(x, targets).mean()).backward()


def axis_of_size_one(bug: bool) -> None:
    """Gradients are reduced only over a shard axis of size one, so replicas are never averaged.

    Hybrid sharding reduces over the shard axis, then over the replicas. With one shard it falls back to no sharding,
    and the fallback reduces only over the shard axis, which contains one rank.
    """
    MESH = {"replicate": 3, "shard": 1}
    SAMPLES, WIDTH, HIDDEN = 6, 5, 7

    def reduce_gradients(model: nn.Module, mesh: DeviceMesh, bug: bool) -> None:
        unsharded = mesh["shard"].size() == 1
        for axis in ("shard",) if bug and unsharded else ("shard", "replicate"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
                parameter.grad /= mesh[axis].size()

    sizes = tuple(MESH.values()) if dist.get_world_size() > 1 else (1, 1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(MESH))
    random = torch.Generator().manual_seed(7493)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in steps(optimizer):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()
        reduce_gradients(model, mesh, bug)


def branch_on_rank(bug: bool) -> None:
    """A branch leaves a parameter without gradient on some ranks, whose optimizers skip it.

    Only ranks whose samples have a picture run the picture encoder. The others contribute zeros to the reduction, so
    all ranks call the same collectives, but they have no gradient to which the result could be copied.
    """
    SAMPLES, WIDTH, PIXELS = 6, 5, 4

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.picture = nn.Linear(WIDTH, WIDTH), nn.Linear(PIXELS, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, text: Tensor, pictures: Tensor, has_picture: Tensor) -> Tensor:
            hidden = self.text(text)
            if has_picture.any():
                hidden = hidden.index_add(0, has_picture.nonzero()[:, 0], self.picture(pictures[has_picture]))
            return self.head(torch.tanh(hidden))

    def reduce_gradients(model: nn.Module, bug: bool) -> None:
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
            if not bug:
                parameter.grad = gradient

    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = initialized(Model(), 174862)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    has_picture = torch.tensor([True, False, False, False, True, True])
    for _ in steps(optimizer):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random)
        pictures = torch.randn(SAMPLES, PIXELS, dtype=torch.float64, generator=random)
        x, y, pictures, mine = (values.chunk(ranks)[rank] for values in (x, y, pictures, has_picture))
        (model(x, pictures, mine) - y).pow(2).mean().backward()
        reduce_gradients(model, bug)


def bias_on_every_rank(bug: bool) -> None:
    """Every rank adds the bias of a row-parallel linear before the sum."""
    TOKENS, WIDTH, HIDDEN = 6, 5, 8

    class ColumnParallel(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Pair.apply(x, Tensor.clone, summed))

    class RowParallel(nn.Linear):
        bug = False

        def forward(self, x: Tensor) -> Tensor:
            if self.bug:
                return Pair.apply(super().forward(x), summed, Tensor.clone)
            return Pair.apply(nn.functional.linear(x, self.weight), summed, Tensor.clone) + self.bias

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random = torch.Generator().manual_seed(1036)
    model = nn.Sequential()
    model.add_module("up", ColumnParallel(WIDTH, HIDDEN))
    model.add_module("tanh", nn.Tanh())
    model.add_module("down", RowParallel(HIDDEN, WIDTH))
    model.double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    up, _, down = model
    down.bug = bug
    up.weight, up.bias = (nn.Parameter(part(parameter.data).clone()) for parameter in (up.weight, up.bias))
    down.weight = nn.Parameter(part(down.weight.data, 1).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
