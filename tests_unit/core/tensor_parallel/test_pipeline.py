"""Stages and schedules of PyTorch's pipelines run over parallelized modules, and train as one device does."""

from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.errors import MixedTensorError, RankFailedError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

STAGES = [["embed", "layers.0"], ["layers.1"], ["layers.2"], ["norm", "head"]]
TOKENS, WIDTH, LENGTH = 13, 5, 3


def make_model():
    """Embeddings, three blocks of odd widths, a norm and the output layer."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(TOKENS, WIDTH)
            self.layers = nn.ModuleList([Block(7), Block(9), Block(3)])
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    torch.manual_seed(0)
    model = Model().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def batch(step):
    """Tokens and their targets, eight sequences."""
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(TOKENS, (2, 8, LENGTH), generator=generator).unbind()


def mean_loss(logits, targets):
    """The mean over tokens."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def whole(x):
    """A copy of all of a tensor that may be a DTensor."""
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def part_of(model, stages):
    """The modules of these stages, called one after the other."""
    from torch import nn

    return nn.Sequential(*(model.get_submodule(name) for names in stages for name in names))


def results_of(model, step_once):
    """Loss and gradients of each of two optimizer steps, and the weights after them: of what this rank holds."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, tensors = [], {}
    for step in range(2):
        losses.append(step_once(*batch(step)))
        own = {name: x for name, x in model.named_parameters() if x.grad is not None}
        tensors |= {f"gradient of {name} in step {step}": whole(x.grad) for name, x in own.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, tensors | {name: whole(x) for name, x in own.items()}


def on_one_device():
    """The results of training without a pipeline."""
    model = make_model()
    network = part_of(model, STAGES)

    def step_once(tokens, targets):
        loss = mean_loss(network(tokens), targets)
        loss.backward()
        return loss.detach()

    return results_of(model, step_once)


def tensor_plan():
    """Blocks and both vocabulary layers sharded, whole activations between modules."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan():
    """Activations between modules, and so between stages, are this rank's part of the sequence."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": SequenceParallel(use_local_output=True),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def in_stages(schedule_name, count, make_plan):
    """The results of the ranks of 2 x 2: stages by turns on two ranks, each on two ranks by a plan or fully sharded."""
    import torch
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    pipeline, inner = mesh["pp"], mesh["inner"]
    rank, group, device = pipeline.get_local_rank(), pipeline.get_group(), torch.device("cpu")
    model, joined = make_model(), len(STAGES) // count
    parts = {i: part_of(model, STAGES[i * joined : (i + 1) * joined]) for i in range(rank, count, 2)}
    if make_plan:
        parallelize_module(model, inner, make_plan())
    else:
        for part in parts.values():
            fully_shard(part, mesh=inner)
    stages = [pipelining.PipelineStage(part, i, count, device, group=group) for i, part in parts.items()]
    schedule = getattr(pipelining, schedule_name)(stages if count > 2 else stages[0], 4, loss_fn=mean_loss)

    def step_once(tokens, targets):
        if not make_plan:
            tokens, targets = (each.chunk(2)[inner.get_local_rank()] for each in (tokens, targets))
        losses = []
        last = {"target": targets, "losses": losses} if count - 1 in parts else {}
        schedule.step(*([tokens] if 0 in parts else []), **last)
        return torch.stack(losses).mean().detach() if losses else None

    return results_of(model, step_once)


@pytest.mark.parametrize(
    "schedule, count, make_plan",
    [
        ("ScheduleGPipe", 2, tensor_plan),
        ("Schedule1F1B", 2, tensor_plan),
        ("Schedule1F1B", 2, sequence_plan),
        ("Schedule1F1B", 2, None),
        ("ScheduleInterleaved1F1B", 4, tensor_plan),
    ],
)
def test_stages_train_as_one_device(schedule, count, make_plan):
    """The loss, every gradient and every weight of two steps with four micro-batches are those of one device."""
    import torch

    losses, tensors = on_one_device()
    ranks = simulate(in_stages, 4, "torch", args=(schedule, count, make_plan))
    assert ranks[0][1].keys() | ranks[2][1].keys() == tensors.keys()
    for _, ours in ranks:
        for name, x in ours.items():
            torch.testing.assert_close(x, tensors[name], rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)
    for step, loss in enumerate(losses):
        ours = torch.stack([rank[0][step] for rank in ranks[2:]])
        means = ours if make_plan else ours.mean(0, keepdim=True)  # fully sharded, a rank has half of the batch
        torch.testing.assert_close(means, loss.expand_as(means), rtol=1e-12, atol=0)


def error_of(program, world_size, *arguments):
    """The error that ends a rank of the program."""
    with pytest.raises(RankFailedError) as caught:
        simulate(program, world_size, "torch", args=arguments)
    error = caught.value
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def test_a_schedule_that_takes_weights_apart_from_inputs_is_refused():
    """Zero-bubble schedules write plain gradients to DTensors; nothing trains by them."""
    error = error_of(in_stages, 4, "ScheduleInterleavedZeroBubble", 4, tensor_plan)
    assert isinstance(error, MixedTensorError)
    assert str(error) == "grad of a DTensor must be a DTensor, got Tensor"


def test_a_dtensor_between_stages_is_refused():
    """Stages pass plain tensors: the last layer of a stage must not return a DTensor."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def body():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
        rank = mesh.get_local_rank("pp")
        style = RowwiseParallel(use_local_output=rank == 1)
        layer = parallelize_module(nn.Sequential(nn.Linear(5, 5)), mesh["tp"], {"0": style})
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
        data = torch.ones(4, 5)
        schedule.step(*([data] if rank == 0 else []), **({"target": data} if rank == 1 else {}))

    error = error_of(body, 2)
    assert isinstance(error, MixedTensorError)
    assert str(error) == (
        "copy_: a plain tensor [2, 5] cannot be written with DTensors; write the result of full_tensor(), and clip "
        "gradients of plain and distributed parameters with hyper_parallel.clip_grad_norm_"
    )
