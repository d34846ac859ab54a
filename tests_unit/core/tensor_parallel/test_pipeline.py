"""Stages and schedules of PyTorch's pipelines run over parallelized modules: they train and save as one device does."""

from __future__ import annotations

import math

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    NoParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    clip_grad_norm_,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.checkpoint import load, save
from hyper_parallel.errors import CheckpointError, MixedTensorError, RankFailedError
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


def is_here(x):
    """Whether this rank holds some of a tensor."""
    return not isinstance(x, DTensor) or x.device_mesh.get_coordinate() is not None


def optimizer_of(model):
    """The optimizer of all parameters."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.01)


def results_of(model, step_once, optimizer=None):
    """Results and gradients of each of two optimizer steps, and the weights after them: of what this rank holds."""
    optimizer = optimizer or optimizer_of(model)
    losses, tensors = [], {}
    for step in range(2):
        losses.append(step_once(*batch(step)))
        own = {name: x for name, x in model.named_parameters() if x.grad is not None and is_here(x)}
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


@pytest.mark.untraced
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
    """Zero-bubble schedules take gradients at nodes of local operations; nothing trains by them, or without them."""
    error = error_of(in_stages, 4, "ScheduleInterleavedZeroBubble", 4, tensor_plan)
    assert isinstance(error, RuntimeError)
    assert str(error) == "GradientEdge's first object must be an autograd.graph.Node but got LocalNode"


def test_a_dtensor_between_stages_is_refused():
    """Stages pass plain tensors: the last layer of a stage must not return a DTensor."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, _utils

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
    if not hasattr(_utils, "TensorMeta"):  # as in PyTorch 2.10, which sends the output itself, without data
        assert str(error) == (
            "a pickled DTensor has layout f32[2, 5], on a mesh without rank 1, with a local tensor [2, 5]; load the "
            "file that this rank wrote, or send the result of full_tensor(): pipeline stages return plain tensors"
        )
        return
    assert isinstance(error, MixedTensorError)
    assert str(error) == (
        "copy_: a plain tensor [2, 5] can be written only with DTensors of one element that are replicated and need "
        "no gradient; write the result of full_tensor()"
    )


MAX_NORM = 0.05


def make_tied_model(tied, is_one_parameter=True):
    """The model; if it is tied, the output layer has the weights of the embeddings, as one parameter or a second."""
    model = make_model()
    if tied and is_one_parameter:
        model.head.weight = model.embed.weight
    elif tied:
        model.head.load_state_dict({"weight": model.embed.weight, "bias": model.head.bias})
    return model


def clipped_on_one_device(tied):
    """The norms, gradients and weights of one device that clips, with its optimizer."""
    from torch import nn

    model = make_tied_model(tied)
    network, optimizer = part_of(model, STAGES), optimizer_of(model)

    def step_once(tokens, targets):
        mean_loss(network(tokens), targets).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    return *results_of(model, step_once, optimizer), optimizer


def give_stages_their_meshes(model, meshes):
    """Parallelize each stage over its mesh; all ranks have all parameters, and hold those of their stage."""
    block = {"norm": NoParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    styles = {"norm": NoParallel(), **tensor_plan()}
    for mesh, stages in zip(meshes, (STAGES[:2], STAGES[2:]), strict=True):
        for name in (name for names in stages for name in names):
            parallelize_module(model.get_submodule(name), mesh, styles.get(name, block))


def clipped_in_stages(folder, tied):
    """The norms, gradients and weights of the ranks of 2 x 2, which save a checkpoint."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    model = make_tied_model(tied, is_one_parameter=False)
    give_stages_their_meshes(model, [DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)) for ranks in mesh.mesh])
    part = part_of(model, STAGES[2 * index : 2 * index + 2])
    schedule = Schedule1F1B(PipelineStage(part, index, 2, torch.device("cpu"), group=group), 4, loss_fn=mean_loss)
    optimizer, shared = optimizer_of(model), (model.embed.weight, model.head.weight)[index]

    def step_once(tokens, targets):
        schedule.step(*([tokens] if index == 0 else []), **({"target": targets} if index == 1 else {}))
        if tied:
            dist.all_reduce(shared.grad.to_local(), group=group)
        counted = [x for x in part.parameters() if not (tied and index == 1 and x is shared)]
        power_sum = clip_grad_norm_(counted, math.inf) ** 2
        dist.all_reduce(power_sum, group=group)
        norm = power_sum.sqrt()
        nn.utils.clip_grads_with_norm_(part.parameters(), MAX_NORM, norm)
        for x in model.parameters():
            if not is_here(x):
                x.grad = torch.zeros_like(x)  # no elements, so that the optimizer has a state of every parameter
        return norm

    results = results_of(model, step_once, optimizer)
    with pytest.raises(
        CheckpointError, match="the tensors of ranks \\[2, 3\\] differ from those of rank 0 in names, dtypes or shapes"
    ):
        save(part, folder)
    saved = {name: x for name, x in model.state_dict().items() if not (tied and name == "head.weight")}
    save({"model": saved} if tied else {"model": saved, "optimizer": optimizer}, folder)
    return results


def loaded(folder, tied, world_size=1):
    """Weights and the optimizer's state of the checkpoint, on one device or over all ranks."""
    model = make_tied_model(tied)
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {**tensor_plan(), "norm": NoParallel()})
    optimizer = optimizer_of(model)
    load({"model": model} if tied else {"model": model, "optimizer": optimizer}, folder)
    tensors = {name: whole(x) for name, x in model.named_parameters()}
    return tensors | optimizer_tensors(optimizer)


def optimizer_tensors(optimizer):
    """The state of every parameter, in order."""
    states = optimizer.state_dict()["state"].items()
    return {f"{key} of parameter {index}": whole(x) for index, state in states for key, x in state.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_stages_clip_and_save_as_one_device(tied, tmp_path):
    """Tied weights of two stages stay equal, the norm is that of all stages, and checkpoints have the model's names."""
    import torch

    norms, tensors, optimizer = clipped_on_one_device(tied)
    assert min(norms) > MAX_NORM
    twin = {name.replace("embed", "head"): x for name, x in tensors.items() if tied and "embed" in name}
    ranks = simulate(clipped_in_stages, 4, "torch", args=(tmp_path, tied))
    assert ranks[0][1].keys() | ranks[2][1].keys() == tensors.keys() | twin.keys()
    for ours, ours_tensors in ranks:
        torch.testing.assert_close(torch.stack(ours), torch.stack(norms), rtol=1e-12, atol=0)
        for name, x in ours_tensors.items():
            torch.testing.assert_close(x, (tensors | twin)[name], rtol=1e-9, atol=1e-12)
    expected = {name: x for name, x in tensors.items() if "gradient" not in name}
    expected |= {} if tied else optimizer_tensors(optimizer)
    for ours in (loaded(tmp_path, tied), *simulate(loaded, 3, "torch", args=(tmp_path, tied, 3))):
        assert ours.keys() == expected.keys()
        for name, x in ours.items():
            torch.testing.assert_close(x, expected[name], rtol=1e-9, atol=1e-12)
