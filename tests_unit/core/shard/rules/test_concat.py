"""Joining and splitting tensors on PyTorch."""

import pytest
import torch

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


JOINS = {
    "cat": (lambda x, y: torch.cat([x, y], 1), (4, 3), (4, 5)),
    "cat first": (lambda x, y: torch.cat((x, y)), (4, 3), (5, 3)),
    "cat of one twice": (lambda x: torch.cat([x, x], 0), (4, 3)),
    "stack": (lambda x, y: torch.stack([x, y], -1), (4, 3), (4, 3)),
    "hstack": (lambda x, y: torch.hstack([x, y]), (4, 3), (4, 5)),
    "vstack": (lambda x, y: torch.vstack([x, y]), (3,), (5, 3)),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(holds, name):
    """Concatenated tensors are brought to one layout in which the joined dim is whole."""
    holds(JOINS[name][0], *JOINS[name][1:])


SPLITS = {
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": torch.unbind,
    "split": lambda x: x.split(2, 1),
    "split by sizes": lambda x: torch.split(x, [1, 4], dim=1),
    "split into one": lambda x: x.split(7),
    "chunk": lambda x: x.chunk(3, -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1),
    "tensor_split at": lambda x: x.tensor_split((1, 3), 1),
    "split_copy": lambda x: torch.split_copy(x, 2, 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits(holds, name):
    """Every part of a split has the plain elements; the split dim is whole."""
    holds(SPLITS[name], (4, 5, 6))


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.vstack])
def test_partial_extrema_are_reduced_before_they_join_complex_numbers(ranks, join):
    """Partial(max) is reduced before it is joined into a complex result, since complex numbers have no order."""
    numbers = torch.complex(torch.arange(6.0).reshape(2, 3) - 7, torch.arange(6.0).reshape(2, 3) * 2 - 9)

    def run(mesh):
        x = DTensor.from_local(torch.full((2, 3), 1.0 + mesh.get_local_rank()), mesh, [Partial("max")])
        result = join([x, distribute_tensor(numbers.clone(), mesh, [Replicate()])])
        return torch.equal(result.full_tensor(), join([torch.full((2, 3), 3.0), numbers]))

    assert ranks(3, run) == [True] * 3


MISFITS = {
    "split": (lambda x: x.split(-1, 1), (4, 3), "split(x=f64[4@tp, 3]): split size -1 is not positive"),
    "split by sizes": (
        lambda x: x.split((1, 1), 1), (4, 3),
        "split(x=f64[4@tp, 3]): sections [1, 1] do not add up to dim 1 of size 3",
    ),
    "chunk": (lambda x: x.chunk(0, 1), (4, 3), "chunk(x=f64[4@tp, 3]): chunks must be positive, got 0"),
    "tensor_split": (
        lambda x: x.tensor_split("12", 1), (4, 3),
        "tensor_split: indices must be a list of numbers, or a tensor of them",
    ),
    "tensor_split in none": (
        lambda x: x.tensor_split(0, 1), (4, 3), "tensor_split: the number of sections must be positive, got 0",
    ),
    "cat": (
        lambda x, y: torch.cat([x, y]), (4, 3), (4, 2),
        "cat(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ outside dim 0",
    ),
    "stack": (
        lambda x, y: torch.stack([x, y]), (4, 3), (4, 2),
        "stack(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


BEYOND = {
    "nothing to unbind": (
        lambda x: x.unbind(1), (4, 0),
        "unbind(x=f64[4@tp, 0]): dim 1 of [4, 0] is empty, so it cannot be unbound",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_only_one_device_can_do_is_refused(refuses, name):
    """A call that has no meaning on local shards raises an error with the reason."""
    refuses(*BEYOND[name], plain_too=False)


@pytest.mark.parametrize("world", [2, 3])
def test_a_single_part_keeps_the_strides_of_its_base(world):
    """A tensor split into one part may be written from its base: both have the same strides, as on one device."""

    def program(base):
        x = base.narrow(1, 1, 1)
        (part,) = x.split(1, 0)
        (chunk,) = x.chunk(1, 0)
        part[...] = x
        chunk.copy_(x)
        return [(tensor.stride(), tensor.tolist()) for tensor in (x, part, chunk)]

    def on_rank():
        return program(distribute_tensor(base.clone(), init_device_mesh("cpu", (world,)), [Replicate()]))

    base = torch.randn(1, 2, 1)
    assert simulate(on_rank, world, "torch") == [program(base)] * world
