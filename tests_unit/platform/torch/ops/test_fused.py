"""Fused optimizers of PyTorch on DTensor parameters, against the same optimizers on plain parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

SHAPES = [(5, 3), (7,), (1, 4), (2, 3)]
PLACED = {
    (3,): [[Shard(0)], [Replicate()], [Shard(0)], None],
    (2, 2): [[Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(0), Replicate()]],
}
OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, 0.05, weight_decay=0.1, fused=True),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, 0.05, amsgrad=True, maximize=True, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.05), weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, fused=True),
}


def placed(array, mesh, placements):
    """The values as a DTensor, or a plain tensor without placements."""
    plain = torch.tensor(array)
    return plain if placements is None else distribute_tensor(plain, mesh, placements)


def trained(make, parameters, gradients):
    """The parameters after one step for each list of gradients."""
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


@pytest.mark.parametrize("mesh_shape", PLACED)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name, mesh_shape):
    """A fused step of uneven, empty, replicated and plain parameters is that of one device, without communication."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape) for shape in SHAPES]
    steps = [[rng.standard_normal(shape) for shape in SHAPES] for _ in range(3)]
    plain = [torch.nn.Parameter(torch.tensor(array)) for array in values]
    expected = trained(OPTIMIZERS[name], plain, [[torch.tensor(array) for array in step] for step in steps])

    def run():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
        places = PLACED[mesh_shape]
        parameters = [
            torch.nn.Parameter(placed(*arguments)) for arguments in zip(values, [mesh] * 4, places, strict=True)
        ]
        gradients = [[placed(*arguments) for arguments in zip(step, [mesh] * 4, places, strict=True)] for step in steps]
        with record_events() as log:
            trained(OPTIMIZERS[name], parameters, gradients)
        return [
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            for parameter in parameters
        ], len(log)

    for results, events in simulate(run, int(np.prod(mesh_shape)), "torch"):
        assert events == 0
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result.detach(), wanted.detach(), rtol=1e-12, atol=1e-14)


def test_scaled_gradients():
    """A scale, plain or a DTensor, divides the gradients; a step is skipped if found_inf is set."""
    whole, slope = torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)
    options = {
        "weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False,
        "is_first_step": True,
    }  # fmt: skip

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        results = []
        for stop in (0.0, 1.0):
            x, grad = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (whole, slope))
            scale = distribute_tensor(torch.tensor(4.0), mesh)
            torch._fused_sgd_([x], [grad], [], grad_scale=scale, found_inf=torch.tensor(stop), **options)
            results.append(x.full_tensor().tolist())
        return results

    assert simulate(run, 2, "torch") == [[(whole - 0.125).tolist(), whole.tolist()]] * 2


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad"])
def test_aliases_see_a_step(name):
    """After a step an alias computes with the new values, and a view that had to be a copy is refused."""
    weight, rows = torch.arange(12.0, dtype=torch.float64).reshape(4, 3), torch.ones(2, 3, dtype=torch.float64)
    plain = torch.nn.Parameter(weight.clone())
    expected = trained(OPTIMIZERS[name], [plain], [[torch.ones_like(weight)]])[0].detach()

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parameter = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        batch = distribute_tensor(rows, mesh, [Shard(0)])
        alias, moved = parameter.detach().requires_grad_(), parameter.detach().view(3, 4)
        before = torch.nn.functional.linear(batch, alias).full_tensor()
        trained(OPTIMIZERS[name], [parameter], [[distribute_tensor(torch.ones_like(weight), mesh, [Shard(0)])]])
        with pytest.raises(UnsupportedOperatorError, match="a view of a tensor that was written since is stale"):
            moved.sum()
        return before, torch.nn.functional.linear(batch, alias).full_tensor()

    for before, after in simulate(run, 2, "torch"):
        torch.testing.assert_close(before.detach(), rows @ weight.T)
        torch.testing.assert_close(after.detach(), rows @ expected.T)


def test_what_lies_apart_is_refused():
    """A fused step refuses gradients of other layouts, partial values and read-only views by name."""
    options = {
        "weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False, "maximize": False,
        "is_first_step": True,
    }  # fmt: skip

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        values = torch.ones(5, 2)
        rows, columns = (distribute_tensor(values, mesh, [Shard(dim)]) for dim in (0, 1))
        pending = DTensor.from_local(values, mesh, [Partial()])
        messages = []
        for x, grad in ((rows, columns), (pending, pending), (rows, values)):
            with pytest.raises(LayoutError) as caught:
                torch._fused_sgd_([x], [grad], [], **options)
            messages.append(str(caught.value).partition(": ")[2].partition(";")[0])
        with pytest.raises(UnsupportedOperatorError):
            torch._fused_sgd_([rows.t().reshape(-1)], [rows.t().reshape(-1)], [], **options)
        return messages

    assert simulate(run, 2, "torch")[0] == [
        "parameter 0 cannot be stepped in one kernel: self f32[5@tp, 2] and grads f32[5, 2@tp]",
        "parameter 0 cannot be stepped in one kernel: self f32[5, 2] + Partial(sum)@tp",
        "parameter 0 cannot be stepped in one kernel: self f32[5@tp, 2] and grads plain f32[5, 2]",
    ]


# -- torch.amp.GradScaler with DTensor parameters, against plain ones --------------------------------------------------

SCALED = {
    (2,): [[Shard(0)], [Replicate()], [Shard(1)]],
    (3,): [[Shard(0)], [Replicate()]],
    (2, 2): [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Shard(0)]],
}


def trained_with_scaler(parameters, inputs):
    """Values and scales after five steps, in the second of which one element of the gradient overflows."""
    optimizer = torch.optim.SGD(parameters, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        target = inputs[1 if step == 1 else 0]
        loss = sum(((p - x) ** 2 * (step + 1)).sum() for p, x in zip(parameters, target, strict=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("mesh_shape", SCALED)
def test_five_steps_with_an_overflow(mesh_shape):
    """A step that overflows on one rank is skipped on all; values and scales are those of the plain run."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 3)), rng.standard_normal((3, 2))]
    good = [rng.standard_normal((5, 3)), rng.standard_normal((3, 2))]
    bad = [good[0].copy(), good[1].copy()]
    bad[0][4, 2] = np.inf  # in the last rank's shard
    plain = [torch.tensor(array, requires_grad=True) for array in arrays]
    inputs = [[torch.tensor(array) for array in each] for each in (good, bad)]
    scales = trained_with_scaler(plain, inputs)
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]

    def run():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
        whole = [[distribute_tensor(tensor, mesh) for tensor in each] for each in inputs]
        for places in SCALED[mesh_shape]:
            parameters = [distribute_tensor(torch.tensor(array).requires_grad_(), mesh, places) for array in arrays]
            assert trained_with_scaler(parameters, whole) == scales
            assert [list(p.grad.placements) for p in parameters] == [places] * 2
            for parameter, exact in zip(parameters, plain, strict=True):
                torch.testing.assert_close(parameter.detach().full_tensor(), exact.detach(), rtol=1e-12, atol=1e-12)

    simulate(run, int(np.prod(mesh_shape)), "torch")


def test_what_one_rank_finds_all_know():
    """The overflow flag is all-reduced once per mesh; partial gradients are refused."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        grads = [distribute_tensor(torch.tensor([1.0, 2.0, torch.nan]), mesh, [Shard(0)]), torch.ones(2)]
        overflow, scale = torch.zeros(1), torch.tensor(0.5)
        with record_events() as log:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, scale)
        assert [(event.collective, event.argument, event.implicit) for event in log] == [
            ("all_reduce", "found_inf", False)
        ]
        assert overflow.item() == 1.0
        assert grads[0].full_tensor()[:2].tolist() == [0.5, 1.0]
        assert grads[1].tolist() == [0.5, 0.5]
        owing = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        assert owing.layout is Layout.place(mesh, [Partial()], (2,))
        with pytest.raises(UnsupportedOperatorError) as caught:
            torch._amp_foreach_non_finite_check_and_unscale_([owing], overflow, scale)
        return str(caught.value)

    assert simulate(run, 2, "torch")[1] == (
        "_amp_foreach_non_finite_check_and_unscale_: gradient 0 is f32[2] + Partial(sum)@tp: a partial sum may be "
        "finite or not until it is reduced; use parameter.grad = parameter.grad.reduce_partial() first"
    )
