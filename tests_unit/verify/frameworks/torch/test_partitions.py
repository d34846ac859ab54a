"""Gradients, states and weights of parameters that an optimizer trains by pieces have the parameters' names."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.verify import verify_program
from hyper_parallel.verify.frameworks.torch.partitions import overwrite_weight, pieces_in, read_weight

pytestmark = pytest.mark.platforms("torch")


class Net(nn.Module):
    """Two layers whose parameters do not divide evenly."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        """Return the net's output."""
        return self.second(torch.tanh(self.first(x)))


def trained(model, batches, reduced, step):
    """Train a model: ``step`` gets the padded flat gradient, reduced and divided by the number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    for batch in batches:
        model(batch.tensor_split(size)[rank]).square().mean().backward()
        gradients = [parameter.grad for parameter in parameters]
        for number, gradient in enumerate(gradients):
            if reduced != number:  # the bug: one parameter's gradient stays the rank's own
                dist.all_reduce(gradient)
                gradient.div_(size)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        model.zero_grad(set_to_none=True)
        step(nn.functional.pad(flat, (0, -len(flat) % size)))


def gathered(part):
    """Return the parts of all ranks one after the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach())
    return torch.cat(parts)


def copies(unreduced=None):
    """Train as DeepSpeed's ZeRO 1 and 2 do: a float32 copy of a part of all parameters, which know their pieces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    flat = nn.functional.pad(flat, (0, -len(flat) % size))
    part = nn.Parameter(flat.chunk(size)[rank].clone())
    low, high = rank * len(part), (rank + 1) * len(part)
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    for parameter, end in zip(parameters, ends, strict=True):
        start = end - parameter.numel()
        first, last = max(low, start), min(high, end)
        parameter._hp_mapping = None
        if first < last:
            fragment = part.detach().narrow(0, first - low, last - first)
            address = SimpleNamespace(start=first - start)
            parameter._hp_mapping = SimpleNamespace(hp_fragment=fragment, lp_fragment_address=address)
    optimizer = torch.optim.AdamW([part], lr=0.1)

    def step(gradient):
        part.grad = gradient.chunk(size)[rank].clone()
        optimizer.step()
        nn.utils.vector_to_parameters(gathered(part)[: ends[-1]], parameters)

    trained(model, torch.randn(3, 12, 5), unreduced, step)


def views(unreduced=None):
    """Train as Megatron's distributed optimizer does: views of a part of the memory in which all parameters lie."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    flat = nn.functional.pad(flat, (0, -len(flat) % size)).clone()
    length = len(flat) // size
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    held = []
    for parameter, end in zip(parameters, ends, strict=True):
        start = end - parameter.numel()
        parameter.data = flat[start:end].view(parameter.shape)
        first, last = max(rank * length, start), min((rank + 1) * length, end)
        if first < last:
            held.append((nn.Parameter(flat[first:last]), first, last))
    optimizer = torch.optim.AdamW([part for part, _, _ in held], lr=0.1)

    def step(gradient):
        for part, first, last in held:
            part.grad = gradient[first:last].clone()
        optimizer.step()
        flat.copy_(gathered(flat[rank * length : (rank + 1) * length]))

    trained(model, torch.randn(3, 12, 5), unreduced, step)


def pieces_only(unreduced=None):
    """Train as DeepSpeed's ZeRO 3 does: between the steps, a rank has a piece of each parameter and no more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    parts, offset = [], 0
    for parameter in parameters:
        flat = nn.functional.pad(parameter.detach().flatten(), (0, -parameter.numel() % size))
        parameter.ds_id, parameter.ds_shape, parameter.ds_zero_partition_rank = len(parts), parameter.shape, rank
        parameter.ds_tensor = flat.chunk(size)[rank].clone()
        parameter.ds_tensor.ds_numel = len(parameter.ds_tensor)
        parts.append(parameter.ds_tensor)
    held = nn.Parameter(torch.cat(parts))
    for parameter in parameters:
        view = held.detach()[offset : offset + parameter.ds_tensor.ds_numel]
        parameter._z3_optimizer = SimpleNamespace(get_local_fp32_param=lambda _, view=view: view)
        offset += parameter.ds_tensor.ds_numel
        parameter.data = torch.empty(0)
    optimizer = torch.optim.AdamW([held], lr=0.1)

    def gather(*_):
        for parameter in parameters:
            whole = gathered(parameter.ds_tensor)[: parameter.ds_shape.numel()]
            parameter.data = whole.view(parameter.ds_shape)

    def step(gradient):
        flats, start = [], 0
        for parameter in parameters:
            own = gradient[start : start + parameter.ds_shape.numel()]
            flats.append(nn.functional.pad(own, (0, -len(own) % size)).chunk(size)[rank])
            start += len(own)
        held.grad = torch.cat(flats)
        optimizer.step()
        for parameter, part in zip(parameters, held.detach().split([len(flat) for flat in flats]), strict=True):
            parameter.ds_tensor.copy_(part)
            parameter.data = torch.empty(0)

    model.register_forward_pre_hook(gather)
    trained(model, torch.randn(3, 12, 5), unreduced, step)


def scattered(unreduced=None):
    """Train views of several pieces of the memory in which all parameters lie: every so many chunks are a rank's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    rows = nn.functional.pad(flat, (0, -len(flat) % (3 * size))).clone().view(3, size, -1)
    start = 0
    for parameter in parameters:
        parameter.data = rows.view(-1)[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    held = [nn.Parameter(rows[number, rank]) for number in range(3)]
    optimizer = torch.optim.AdamW(held, lr=0.1)

    def step(gradient):
        gradient = nn.functional.pad(gradient[: len(flat)], (0, rows.numel() - len(flat))).view(rows.shape)
        for number, part in enumerate(held):
            part.grad = gradient[number, rank].clone()
        optimizer.step()
        for row, part in zip(rows, held, strict=True):
            row.copy_(gathered(part.detach().clone()).view(row.shape))

    trained(model, torch.randn(3, 12, 5), unreduced, step)


def main_copies(unreduced=None):
    """Train as Megatron does in half precision: float32 copies that the parameters know, each whole."""
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.main_param = parameter.detach().clone()
    optimizer = torch.optim.AdamW([parameter.main_param for parameter in parameters], lr=0.1)

    def step(gradient):
        start = 0
        for parameter in parameters:
            parameter.main_param.grad = gradient[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        optimizer.step()
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.main_param)

    trained(model, torch.randn(3, 12, 5), unreduced, step)


def main_pieces(unreduced=None):
    """Train as Megatron's distributed optimizer does in half precision: copies of pieces, and views of gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    numbers = [parameter.numel() for parameter in parameters]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    length = -(-len(flat) // size)
    buffer = torch.zeros(length * size)
    held, start = [], 0
    for parameter in parameters:
        parameter.main_grad = buffer[start : start + parameter.numel()].view(parameter.shape)
        first, last = max(rank * length, start), min((rank + 1) * length, start + parameter.numel())
        parameter.main_param = flat[first:last].clone() if first < last else None
        if first < last:
            held.append((parameter.main_param, slice(first - start, last - start), parameter.main_grad.view(-1)))
        start += parameter.numel()
    optimizer = torch.optim.AdamW([part for part, _, _ in held], lr=0.1)

    def step(gradient):
        buffer[: len(flat)] = gradient[: len(flat)]
        for part, place, main_grad in held:
            part.grad = main_grad[place]
        optimizer.step()
        own = torch.cat([part for part, _, _ in held] or [torch.empty(0)])
        parts = gathered(nn.functional.pad(own, (0, length - len(own))))
        with torch.no_grad():
            for parameter, values in zip(parameters, parts[: len(flat)].split(numbers), strict=True):
                parameter.copy_(values.view(parameter.shape))

    trained(model, torch.randn(3, 12, 5), unreduced, step)


def step_by_step(unreduced=None):
    """Train as ZeRO does with several groups: a call of the optimizer's step for each, which has nothing else then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    groups = []
    for numbers in ((0, 2), (1, 3)):  # weights, and biases
        flat = torch.cat([parameters[number].detach().flatten() for number in numbers])
        part = nn.Parameter(nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size)[rank].clone())
        start = 0
        for number in numbers:
            parameter = parameters[number]
            first = max(rank * len(part), start)
            last = min((rank + 1) * len(part), start + parameter.numel())
            parameter._hp_mapping = None
            if first < last:
                fragment = part.detach()[first - rank * len(part) : last - rank * len(part)]
                address = SimpleNamespace(start=first - start)
                parameter._hp_mapping = SimpleNamespace(hp_fragment=fragment, lp_fragment_address=address)
            start += parameter.numel()
        groups.append((numbers, part))
    optimizer = torch.optim.AdamW([{"params": [part]} for _, part in groups], lr=0.1)

    def step(gradient):
        numel = [parameter.numel() for parameter in parameters]
        gradients = gradient[: sum(numel)].split(numel)
        own = list(optimizer.param_groups)
        for group, (numbers, part) in zip(own, groups, strict=True):
            flat = torch.cat([gradients[number] for number in numbers])
            part.grad = nn.functional.pad(flat, (0, -len(flat) % size)).chunk(size)[rank].clone()
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = own
        for numbers, part in groups:
            values = gathered(part)[: sum(numel[number] for number in numbers)]
            nn.utils.vector_to_parameters(values, [parameters[number] for number in numbers])

    trained(model, torch.randn(3, 12, 5), unreduced, step)


NAMES = ("first.weight", "first.bias", "second.weight", "second.bias")
PROGRAMS = [copies, views, pieces_only, scattered, main_copies, main_pieces, step_by_step]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_pieces_have_the_names_of_parameters(program, world_size):
    """Every element of every gradient and state is compared, under the name of its parameter."""
    report = verify_program(program, world_size, platform="torch")
    assert report.status == 0, report.text()
    assert "gradients that are zero" not in report.text()
    compared = report.verdict.to_json()["compared"]
    assert compared["gradient"] == 3 * 4 * world_size
    assert "3 optimizer steps" in report.text()
    assert not report.verdict.skipped


# One parameter every day: the others are found by the same code.
@pytest.mark.parametrize(
    "number, name",
    [pytest.param(number, name, marks=[] if number == 1 else pytest.mark.sweep) for number, name in enumerate(NAMES)],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_piece_that_is_wrong_is_named(program, number, name):
    """A gradient that is not reduced is the first difference, by its parameter's name."""
    report = verify_program(lambda: program(number), 3, platform="torch")
    first = report.verdict.first
    assert (first.kind, first.name, first.step) == ("gradient", name, 0), report.text()


def test_a_copy_follows_its_parameter():
    """What replaces the values of a parameter replaces those of the copies that are trained."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    flat = torch.zeros(8)
    address = SimpleNamespace(start=2)
    parameter._hp_mapping = SimpleNamespace(hp_fragment=flat[4:8], lp_fragment_address=address)
    overwrite_weight(parameter, lambda *_: np.arange(6, dtype=np.float32).reshape(2, 3))
    assert flat.tolist() == [0, 0, 0, 0, 2, 3, 4, 5]
    assert read_weight(parameter).array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tensors_of_other_memory_are_no_pieces():
    """Tensors of another type, of several dims, or with gaps are not taken for pieces of a parameter."""
    flat = torch.zeros(12)
    parameter = nn.Parameter(flat[:6].view(2, 3))
    for other in (torch.zeros(12), flat.view(3, 4), flat[::2], flat.view(torch.int32)):
        optimizer = SimpleNamespace(param_groups=[{"params": [other]}])
        assert pieces_in(optimizer.param_groups[0]["params"], {"weight": parameter}) == {}
    optimizer = SimpleNamespace(param_groups=[{"params": [flat[8:]]}])
    assert pieces_in(optimizer.param_groups[0]["params"], {"weight": parameter}) == {}
