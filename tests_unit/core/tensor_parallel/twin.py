"""A model and its dense twin: the parallel model must have the values of the twin on one device."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hyper_parallel import DTensor, distribute_tensor, init_device_mesh
from hyper_parallel.verify import simulate

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def random(*shape, seed=0):
    """Normal float64 values from a fresh generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomized(model, seed=7):
    """Random float64 values for every parameter, since zeros and ones could hide an error."""
    model.double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + index) * 0.5)
    return model


class MLP(nn.Module):
    """``width -> hidden -> out`` with a smooth nonlinearity."""

    def __init__(self, width=7, hidden=10, out=5, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, out, bias=bias)

    def forward(self, x):
        """``x_…D -> y_…O``."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A norm, an MLP and a residual, as for sequence parallelism."""

    def __init__(self, width=7, hidden=10):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden, width)

    def forward(self, x):
        """``x_BLD -> y_BLD``."""
        return x + self.mlp(self.norm(x))


class Twin:
    """The dense run, under random cotangents of the global output."""

    def __init__(self, model, *inputs, seed=3):
        self.model = copy.deepcopy(model)
        self.inputs = [tensor.clone() for tensor in inputs]
        for tensor in self.inputs:
            tensor.requires_grad_(tensor.is_floating_point())
        self.output = self.model(*self.inputs)
        self.cotangent = random(*self.output.shape, seed=seed)
        self.output.backward(self.cotangent)
        self.fresh = copy.deepcopy(model)

    def copy(self):
        """A model to parallelize, without gradients."""
        return copy.deepcopy(self.fresh)

    def assert_gradients(self, model):
        """Assert that every gradient of ``model`` is the twin's, with no factor."""
        compared = 0
        for name, theirs in self.model.named_parameters(remove_duplicate=False):
            mine = dict(model.named_parameters(remove_duplicate=False))[name].grad
            same(mine, theirs.grad, f"gradient of {name}")
            compared += 1
        assert compared

    def assert_same(self, model):
        """Assert that output and all gradients of ``model``, whose input and output are whole, are the twin's."""
        x = self.inputs[0].detach().clone().requires_grad_()
        y = model(x)
        same(y, self.output, "output")
        y.backward(self.cotangent)
        same(x.grad, self.inputs[0].grad, "gradient of the input")
        self.assert_gradients(model)

    def assert_trains(self, make_model, run, optimizer, steps=3):
        """Weights of the parallel model stay the twin's over ``steps`` optimizer steps.

        Args:
            make_model: parallelizes a copy.
            run: one forward and backward of the parallel model under the cotangent.
            optimizer: a key of :data:`OPTIMIZERS`.
            steps: number of steps.
        """
        dense, model = copy.deepcopy(self.fresh), make_model(self.copy())
        dense_steps, steps_ = OPTIMIZERS[optimizer](dense.parameters()), OPTIMIZERS[optimizer](model.parameters())
        inputs = [tensor.detach() for tensor in self.inputs]
        for _ in range(steps):
            dense_steps.zero_grad()
            dense(*inputs).backward(self.cotangent)
            dense_steps.step()
            steps_.zero_grad()
            run(model)
            steps_.step()
            for (name, theirs), mine in zip(dense.named_parameters(), model.parameters(), strict=True):
                same(mine, theirs, f"weight {name}")


def whole(value):
    """The global value of a DTensor; a plain tensor unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(mine, theirs, what):
    """Assert equality up to rounding in float64."""
    torch.testing.assert_close(
        whole(mine).detach(), theirs.detach(), rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def local_shard(value, mesh, placements):
    """The local shard of a dense tensor, as a plain tensor."""
    return distribute_tensor(value.detach(), mesh, placements).to_local()


def gather(local, mesh, placements, shape):
    """The global value of plain local shards."""
    return DTensor.from_local(local.detach(), mesh, placements, shape=shape).full_tensor()


def on_mesh(shape, fn, names=None):
    """Run ``fn(mesh)`` on every rank of a simulated mesh; the results in rank order."""
    size = 1
    for axis in shape:
        size *= axis

    def rank():
        return fn(init_device_mesh("cpu", shape, mesh_dim_names=names))

    return simulate(rank, size, platform="torch")
