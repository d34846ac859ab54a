"""Bugs: gradient norms, optimizers, hooks and checkpoints that do not cover the complete model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hyper_parallel.verify.bugs.torch.base import Pair, initialized, part, steps, summed


def clipping_by_local_norm(bug: bool) -> None:
    """Every rank clips by the norm of its own gradients, so replicas drift apart from the second step on.

    Linear layers are sharded, and layer norms are replicated. The correct gradient norm includes all shards, and each
    replicated gradient once.
    """
    TOKENS, WIDTH, HIDDEN, LIMIT = 6, 5, 8, 0.5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(Pair.apply(self.norm(x), Tensor.clone, summed)))
            return x + Pair.apply(self.down(hidden), summed, Tensor.clone)

    def clip(model: Model) -> None:
        squares = [p.grad.pow(2).sum() for p in (model.up.weight, model.down.weight)]
        once = torch.stack([p.grad.pow(2).sum() for p in model.norm.parameters()]).sum()
        nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, (summed(torch.stack(squares).sum()) + once).sqrt())

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 1801)
    for linear, dim in ((model.up, 0), (model.down, 1)):
        linear.weight = nn.Parameter(part(linear.weight.data, dim).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT) if bug else clip(model)


def expert_norm_over_wrong_group(bug: bool) -> None:
    """The gradient norm omits experts, because it treats them as replicas over the dense weights' group.

    Replicated values are counted on the first rank only. Every rank has different experts, but the test for replicas
    uses the tensor-parallel group of the dense weights, and drops the experts of all other ranks. So gradients are
    clipped too little.
    """
    TOKENS, WIDTH, EXPERTS = 7, 4, 5

    class Model(nn.Module):
        def __init__(self, own: list[int]) -> None:
            super().__init__()
            self.own, self.gate = own, nn.Linear(WIDTH, EXPERTS)
            self.experts = nn.ModuleDict({str(expert): nn.Linear(WIDTH, WIDTH) for expert in range(EXPERTS)})

        def forward(self, x: Tensor) -> Tensor:
            weights = Pair.apply(torch.softmax(self.gate(x), -1), Tensor.clone, summed)
            outputs = [self.experts[str(expert)](x) * weights[:, expert, None] for expert in self.own]
            return Pair.apply(torch.stack(outputs).sum(0), summed, Tensor.clone)

    def total_norm(model: Model, bug: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            if dist.get_rank() == 0 or (name.startswith("experts") and not bug):
                total += parameter.grad.pow(2).sum()
        return summed(total).sqrt()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    own = torch.arange(EXPERTS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    random, model = initialized(Model(own), 5916)
    model.experts = nn.ModuleDict({name: expert for name, expert in model.experts.items() if int(name) in own})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total_norm(model, bug))


def replicas_counted_in_norm(bug: bool) -> None:
    """Replicated weights count once per rank in the gradient norm.

    Linear layers mark all of their weights as tensor-parallel, including replicated ones. The norm sums the squares of
    marked weights over the ranks, so a replicated weight is counted once per rank.
    """
    TOKENS, WIDTH, HIDDEN = 6, 5, 8

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.compress, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = Pair.apply(torch.tanh(self.compress(x)), Tensor.clone, summed)
            return Pair.apply(self.down(torch.tanh(self.up(x))), summed, Tensor.clone)

    def total_norm(model: Model, bug: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            if dist.get_rank() == 0 or bug or not name.startswith("compress"):
                total += parameter.grad.pow(2).sum()
        return summed(total).sqrt()

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 715)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total_norm(model, bug))


def infinity_norm_summed(bug: bool) -> None:
    """The maximum norm of shards is summed over the ranks, like powers of other norms.

    A clipping function for several stages or shards adds up powers of the ranks' norms. Maximum norms must not be
    added: the norm of the complete model is the largest of them.
    """
    TOKENS, WIDTH, HIDDEN = 6, 5, 8

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return Pair.apply(self.down(torch.tanh(self.up(x))), summed, Tensor.clone)

    def clip(model: Model, norm_type: float, bug: bool) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        dist.all_reduce(norm, dist.ReduceOp.SUM if bug else dist.ReduceOp.MAX)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)

    init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    random, model = initialized(Model(), 596)
    model.up.weight = nn.Parameter(part(model.up.weight.data).clone())
    model.up.bias = nn.Parameter(part(model.up.bias.data).clone())
    model.down.weight = nn.Parameter(part(model.down.weight.data, 1).clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        (model(x) - y).pow(2).mean().backward()
        clip(model, float("inf"), bug)


def optimizer_of_unsharded_parameters(bug: bool) -> None:
    """The optimizer holds the parameters from before sharding, and the model never learns.

    Sharding replaces the parameters of the modules. An optimizer that was created earlier updates tensors that no
    module reads any more.
    """
    SAMPLES, WIDTH, HIDDEN = 6, 5, 7
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(2665)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()
    for parameter in model.parameters():
        parameter.data.normal_(generator=random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    if not bug:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        model.zero_grad()


def hooks_lost(bug: bool) -> None:
    """Hooks that reduce gradients stay on parameters that a second wrapping has replaced.

    The wrapper makes a copy of the layer's parameters. Hooks belong to a tensor and are not copied with it.
    """
    SAMPLES, WIDTH, HIDDEN = 6, 5, 7

    class Wrapper(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Wrapper(nn.Linear(WIDTH, HIDDEN)), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)))

    def average(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def reduce_in_backward(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    random, model = initialized(Model(), 104336)
    if bug:
        reduce_in_backward(model)
    model.head = Wrapper(model.head)
    if not bug:
        reduce_in_backward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=random).chunk(ranks, 1)[rank]
        (model(x) - y).pow(2).mean().backward()


def stage_local_names(bug: bool) -> None:
    """A checkpoint names layers by their index in the stage, so later stages load the layers of the first stage.

    A checkpoint written without pipeline parallelism has all names that any stage loads, so the strict load of a later
    stage succeeds. Names must count layers over the complete model.
    """
    LAYERS, TOKENS, WIDTH = 5, 6, 4

    class Model(nn.Module):
        def __init__(self, layers: list[int]) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({str(layer): nn.Linear(WIDTH, WIDTH) for layer in layers})

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = torch.tanh(layer(x))
            return x

    def load(model: Model, checkpoint: dict[str, Tensor], bug: bool) -> None:
        names = (
            {name: str(place) for place, name in enumerate(model.layers)}
            if bug
            else {name: name for name in model.layers}
        )
        for name, layer in model.layers.items():
            stored = {key: checkpoint[f"layers.{names[name]}.{key}"] for key in layer.state_dict()}
            layer.load_state_dict(stored)

    def step(model: Model, x: Tensor, y: Tensor, rank: int, last: int) -> None:
        """Run forward and backward of one batch through the stages."""
        x = torch.empty_like(x) if rank else x
        if rank:
            dist.recv(x, rank - 1)
        x.requires_grad_(rank > 0)
        outputs = model(x)
        if rank == last:
            (outputs - y).pow(2).mean().backward()
        else:
            dist.send(outputs.detach(), rank + 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, rank + 1)
            outputs.backward(gradient)
        if rank:
            dist.send(x.grad, rank - 1)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    random, whole = torch.Generator().manual_seed(7452), Model(list(range(LAYERS))).double()
    for parameter in whole.parameters():
        parameter.data.normal_(generator=random)
    own = torch.arange(LAYERS).tensor_split(mesh.size())[mesh.get_local_rank()].tolist()
    model = Model(own).double()
    load(model, whole.state_dict(), bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        step(model, x, y, mesh.get_local_rank(), mesh.size() - 1)


def empty_shards_lost(bug: bool) -> None:
    """A checkpoint does not keep empty shards, and their rank does not take part in loading.

    On four ranks, seven rows are sharded as 2, 2, 2 and 1, and six rows as 2, 2, 2 and 0. Only shards with rows are
    saved. The rank without rows finds no metadata for itself when it loads, while the others wait for it.
    """
    TOKENS, WIDTH, HIDDEN = 5, 7, 6

    class Gather(torch.autograd.Function):
        """Gathers all shards of dim 0; the backward sums gradients over the ranks and returns the rank's own shard."""

        @staticmethod
        def forward(ctx: Any, shard: Tensor, rows: int) -> Tensor:
            full = shard.new_zeros(rows, *shard.shape[1:])
            chunks(full)[dist.get_rank()].copy_(shard)
            dist.all_reduce(full)
            return full

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            total = grad.clone()
            dist.all_reduce(total)
            return chunks(total)[dist.get_rank()].clone(), None

    def chunks(full: Tensor) -> list[Tensor]:
        parts = list(full.chunk(dist.get_world_size()))
        return parts + [full[:0]] * (dist.get_world_size() - len(parts))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            up, down = Gather.apply(self.up.weight, HIDDEN), Gather.apply(self.down.weight, WIDTH)
            return torch.tanh(x @ up.T) @ down.T

    def load(parameter: nn.Parameter, checkpoint: dict[int, Tensor]) -> None:
        rank = dist.get_rank()
        if rank in checkpoint:
            parameter.data.copy_(checkpoint[rank])
            dist.all_reduce(torch.tensor(parameter.numel()))

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    random, model = torch.Generator().manual_seed(108869), Model().double()
    for linear in (model.up, model.down):
        full = linear.weight.data.normal_(generator=random)
        linear.weight = nn.Parameter(torch.empty_like(chunks(full)[mesh.get_local_rank()]))
        load(linear.weight, {rank: shard for rank, shard in enumerate(chunks(full)) if len(shard) or not bug})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        own = torch.arange(TOKENS).tensor_split(mesh.size())[mesh.get_local_rank()]
        ((model(x[own]) - y[own]).pow(2).sum() / TOKENS).backward()


def implicit_redistribution(bug: bool) -> None:
    """Copying a loaded tensor into a parameter redistributes it, and ranks copy in different orders.

    The loaded tensor and the parameter are sharded along different dims, so the copy between the two DTensors
    communicates implicitly. Ranks load the files in different orders, and wait in the copies of different parameters.
    """
    TOKENS, WIDTH, HIDDEN = 6, 5, 8

    def gathered(shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ gathered(self.up.weight).T) @ gathered(self.down.weight).T

    def load(parameter: DTensor, full: Tensor, bug: bool) -> None:
        if not bug:
            parameter.to_local().copy_(part(full))
            return
        stored = DTensor.from_local(
            part(full, 1), parameter.device_mesh, [Shard(1)], shape=full.shape, stride=full.stride()
        )
        parameter.copy_(stored)

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    random, model = torch.Generator().manual_seed(642), Model().double()
    checkpoint = {linear: linear.weight.data.normal_(generator=random) for linear in (model.up, model.down)}
    for linear, full in checkpoint.items():
        shard = torch.empty_like(part(full))
        linear.weight = nn.Parameter(
            DTensor.from_local(shard, mesh, [Shard(0)], shape=full.shape, stride=full.stride())
        )
    with torch.no_grad():
        for linear in (model.down, model.up) if dist.get_rank() % 2 else (model.up, model.down):
            load(linear.weight, checkpoint[linear], bug)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in steps(optimizer):
        x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=random)
        ((model(part(x)) - part(y)).pow(2).sum() / TOKENS).backward()
