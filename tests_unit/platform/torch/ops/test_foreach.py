"""Optimizers of PyTorch on DTensor parameters, in their for-loop and foreach forms, against plain parameters."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.verify.checker.function import all_placements, check_function
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

OPTIMIZERS = {
    "sgd": lambda ps, foreach: torch.optim.SGD(ps, 0.1, foreach=foreach),
    "momentum": lambda ps, foreach: torch.optim.SGD(
        ps, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=foreach
    ),
    "adam": lambda ps, foreach: torch.optim.Adam(ps, 0.05, weight_decay=0.1, foreach=foreach),
    "amsgrad": lambda ps, foreach: torch.optim.Adam(ps, 0.05, amsgrad=True, maximize=True, foreach=foreach),
    "adamw": lambda ps, foreach: torch.optim.AdamW(ps, 0.05, weight_decay=0.1, foreach=foreach),
}


def trained(make, foreach, parameters, inputs):
    """The parameters after three steps on a loss that differs in each step."""
    optimizer = make(parameters, foreach)
    for step in range(3):
        loss = sum(((p - x) ** 2 * (step + 1)).sum() for p, x in zip(parameters, inputs, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@pytest.mark.untraced
def test_three_steps(name, foreach, mesh_shape):
    """Three steps give the parameters of the plain optimizer for all placements of two uneven parameters."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((5, 3)), rng.standard_normal((3,))]
    targets = [rng.standard_normal((5, 3)), rng.standard_normal((3,))]
    plain = [torch.tensor(array, requires_grad=True) for array in arrays]
    expected = [p.detach() for p in trained(OPTIMIZERS[name], foreach, plain, [torch.tensor(t) for t in targets])]

    def run():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=[f"m{axis}" for axis in range(len(mesh_shape))])
        whole = [Replicate()] * len(mesh_shape)
        wanted = [DTensor.from_local(torch.tensor(t), mesh, whole) for t in targets]
        first, second = (all_placements(array.ndim, len(mesh_shape)) for array in arrays)
        for number, places in enumerate(first):
            parameters = []
            for array, place in zip(arrays, (places, second[number % len(second)]), strict=True):
                shard = local_shard(array, Layout.place(mesh, place, array.shape), 7)
                parameters.append(
                    DTensor.from_local(torch.tensor(shard, requires_grad=True), mesh, place, shape=array.shape)
                )
            layouts = [p.layout for p in parameters]
            for result, exact in zip(trained(OPTIMIZERS[name], foreach, parameters, wanted), expected, strict=True):
                torch.testing.assert_close(result.detach().full_tensor(), exact, rtol=1e-12, atol=1e-12)
            assert [p.layout for p in parameters] == layouts

    simulate(run, int(np.prod(mesh_shape)), "torch", timeout=120)


FOREACH = {
    "add": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
    "mul": lambda x, y: torch._foreach_mul([x, y], 3.0),
    "div": lambda x, y: torch._foreach_div([x, y], [2.0, 4.0]),
    "sqrt": lambda x, y: torch._foreach_sqrt([x, y]),
    "lerp": lambda x, y: torch._foreach_lerp([x], [y], 0.3),
    "addcmul": lambda x, y: torch._foreach_addcmul([x, y], [y, y], [x, x], [2.0, 3.0]),
    "addcdiv": lambda x, y: torch._foreach_addcdiv([x, x], [y, y], [x, y], value=0.5),
    "maximum": lambda x, y: torch._foreach_maximum([x], [y]),
    "clamp_min": lambda x, y: torch._foreach_clamp_min([x, y], 1.0),
    "norm": lambda x, y: torch._foreach_norm([x, y]),
    "neg_": lambda x, y: writing(torch._foreach_neg_, [x * 1, y * 1]),
    "add_": lambda x, y: writing(torch._foreach_add_, [x * 1], [y]),
    "zero_": lambda x, y: [zeros + y for zeros in writing(torch._foreach_zero_, [x * 1])],
    "copy_": lambda x, y: writing(torch._foreach_copy_, [x.detach() * 1], [y.detach()]),
}


def writing(func, first, *rest):
    """Return the written list."""
    func(first, *rest)
    return first


@pytest.mark.parametrize("name", FOREACH)
def test_lists(name):
    """Each element of a foreach list has its own placements and gradients."""
    rng = np.random.default_rng(1)
    arrays = [rng.uniform(0.5, 2, (5, 3)), rng.uniform(0.5, 2, (5, 3))]
    report = check_function(FOREACH[name], arrays, (2,), platform="torch")
    assert report.all_held, (report.wrong[:3], report.rejected[:3])
    report = check_function(FOREACH[name], arrays, (2, 2), platform="torch", limit=12)
    assert report.all_held, (report.wrong[:3], report.rejected[:3])


def test_an_optimizer_step_costs_no_communication():
    """An optimizer step communicates nothing and runs on local tensors in one call."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        ps = [
            DTensor.from_local(torch.ones(4, 2, requires_grad=True), mesh, [placement])
            for placement in (Shard(0), Replicate())
        ]
        for foreach in (False, True):
            optimizer = torch.optim.AdamW(ps, foreach=foreach)
            for p in ps:
                (p * p).sum().backward()
            with record_events() as log:
                optimizer.step()
            assert log.collectives() == []
            optimizer.zero_grad()
        return True

    assert simulate(run, 2, "torch") == [True, True]


def test_lists_of_different_lengths_are_refused():
    """Lists that do not belong together raise PyTorch's own error, whatever the placements, and nothing is written."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        for placement in (Shard(0), Partial()):
            tensors = [DTensor.from_local(torch.ones(2, 3), mesh, [placement]) for _ in range(3)]
            for others in (tensors[:2], [*tensors, tensors[0]], [1.0, 2.0]):
                with pytest.raises(RuntimeError, match=r"must have (the )?same number"):
                    torch._foreach_add(tensors, others)
                with pytest.raises(RuntimeError, match=r"must have (the )?same number"):
                    torch._foreach_add_(tensors, others)
            assert all(tensor.to_local().eq(1).all() for tensor in tensors)
        return True

    assert simulate(run, 2, "torch") == [True, True]
