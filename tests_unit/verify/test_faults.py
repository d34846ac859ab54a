"""Faults in models whose activations are sharded by sequence, and in embeddings: the module that has them is named."""

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase

VOCABULARY, WIDTH, HIDDEN, CLASSES = 17, 6, 10, 7


def torch_net():
    """An embedding and three linear layers on PyTorch."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.up, self.down, self.head = (
                nn.Linear(WIDTH, HIDDEN),
                nn.Linear(HIDDEN, WIDTH),
                nn.Linear(WIDTH, CLASSES),
            )

        def forward(self, ids):
            return self.head(torch.tanh(self.down(torch.tanh(self.up(self.embed(ids))))))

    return Net()


def mindspore_net():
    """The same on MindSpore, whose embedding calls its weight ``embedding_table``."""
    from mindspore import mint, nn

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.up, self.down = mint.nn.Linear(WIDTH, HIDDEN), mint.nn.Linear(HIDDEN, WIDTH)
            self.head = mint.nn.Linear(WIDTH, CLASSES)

        def construct(self, ids):
            return self.head(mint.tanh(self.down(mint.tanh(self.up(self.embed(ids))))))

    return Net()


def case_of(platform_name):
    """A function that returns the model with batches of an odd and a prime size."""

    def case():
        rng = np.random.default_rng(0)
        batches = [
            (rng.integers(0, VOCABULARY, (3, 7)), rng.standard_normal((3, 7, CLASSES), np.float32)) for _ in range(2)
        ]
        build = torch_net if platform_name == "torch" else mindspore_net
        return ModelCase(build, batches, lambda output, batch: ((output - batch[-1]) ** 2).sum())

    return case


def by_sequence(mesh):
    """A plan that returns local shards of the sequence between the layers."""
    del mesh
    rows = Shard(1)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }


def by_feature(mesh):
    """A plan that shards the embedding by its features."""
    del mesh
    return {"embed": ColwiseParallel(output_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}


def report_of(platform_name, world, fault, plan):
    """The report on one step with a fault."""
    return verify_model(case_of(platform_name), plan, (world,), ("tp",), platform=platform_name, steps=1, inject=fault)


FAULTS = ["drop-allreduce@down", "drop-allreduce@embed", "double-bias@down", "wrong-shard-dim@down"]


def must_name_the_module(platform_name, world, fault):
    """The first difference is in an output of the module that has the fault, or in its weight if that is wrong."""
    report = report_of(platform_name, world, fault, by_sequence)
    assert not report.ok
    assert report.faulty_module == fault.partition("@")[2], report.text()
    assert report.first.kind == ("weight" if fault.startswith("wrong-shard-dim") else "output")


@pytest.mark.untraced
@pytest.mark.platforms("torch")
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_before_a_scattered_sum_is_found_there(world, fault):
    """The module whose sum is scattered over the sequence is named, not the one that reads its shard."""
    must_name_the_module("torch", world, fault)


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize(
    "world, fault",  # one every day: PyTorch has them all
    [
        pytest.param(2, FAULTS[0], marks=pytest.mark.sweep),
        (3, FAULTS[1]),
        pytest.param(4, FAULTS[2], marks=pytest.mark.sweep),
    ],
)
def test_a_fault_before_a_scattered_sum_is_found_there_on_mindspore(world, fault):
    """The same on MindSpore, whose ranks are processes: a fault per number of ranks."""
    must_name_the_module("mindspore", world, fault)


@pytest.mark.parametrize("world", [3])
def test_local_shards_of_the_sequence_are_compared_whole(platform_name, world):
    """Without a fault every output of the plan is compared and equal."""
    report = report_of(platform_name, world, None, by_sequence)
    assert report.ok, report.text()
    assert report.skipped == []


@pytest.mark.parametrize("world", [2])
def test_an_embedding_may_be_cut_along_the_wrong_dim(platform_name, world):
    """The weight of an embedding is found by what the framework calls it."""
    report = report_of(platform_name, world, "wrong-shard-dim@embed", by_feature)
    assert not report.ok
    assert report.faulty_module == "embed", report.text()
