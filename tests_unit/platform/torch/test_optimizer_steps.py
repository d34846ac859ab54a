"""Steps of PyTorch's optimizers on local tensors: where they are taken, and their values against plain parameters."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.errors import PlanError, UnsupportedOperatorError
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED
from hyper_parallel.platform.torch.optimizer_steps import (
    on_local_tensors,
    refuse_wrong_steps,
    set_replaced,
    set_unreduced,
)
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

OPTIMIZERS = {
    "adadelta": lambda ps: torch.optim.Adadelta(ps, 0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "adam": lambda ps: torch.optim.Adam(ps, 0.05, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.05, foreach=True),
    "adamax": lambda ps: torch.optim.Adamax(ps, 0.05),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.05, t0=1),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.05),
    "radam": lambda ps: torch.optim.RAdam(ps, 0.05, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.05, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.05),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),
}


def trained(make, parameters, gradients):
    """The parameters after one step for each list of gradients."""
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_optimizer_steps_as_on_one_device(world):
    """Five steps on uneven shards, with momentum and state, give the values of plain parameters."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal((5, 3)), rng.standard_normal((4,))]
    tensors = [[torch.tensor(rng.standard_normal(array.shape)) for array in arrays] for _ in range(5)]
    plain = {
        name: trained(make, [torch.tensor(array, requires_grad=True) for array in arrays], tensors)
        for name, make in OPTIMIZERS.items()
    }

    def run():
        mesh = init_device_mesh("cpu", (world,))
        places = ([Shard(0)], [Replicate()])

        def placed(values):
            return [distribute_tensor(value, mesh, place) for value, place in zip(values, places, strict=True)]

        stepped = {}
        for name, make in OPTIMIZERS.items():
            parameters = [value.requires_grad_() for value in placed(map(torch.tensor, arrays))]
            trained(make, parameters, [placed(step) for step in tensors])
            stepped[name] = [parameter.full_tensor().detach() for parameter in parameters]
        return stepped

    for stepped in simulate(run, world, "torch"):
        for name, expected in plain.items():
            for value, whole in zip(stepped[name], expected, strict=True):
                torch.testing.assert_close(value, whole.detach(), msg=lambda text, name=name: f"{name}: {text}")


def row(mesh, placement=None):
    """A DTensor of one row; replicated by default."""
    return DTensor.from_local(torch.ones(2), mesh, [placement or Replicate()])


def kinds(mesh, *lists, **options):
    """What a step is given: per list the types of its tensors."""
    seen = []

    def step(*lists, **_):
        seen.extend([[type(value) for value in values] for values in lists])

    with torch.no_grad():
        on_local_tensors(step)(*lists, **options)
    return seen


def counter():
    """A counter of steps, which is plain."""
    return torch.tensor(1.0)


CONVERTED = {
    "alike": lambda mesh: (([row(mesh)], [row(mesh)], [counter()]), {"lr": 0.1}),
    "several layouts in a list": lambda mesh: (
        ([row(mesh), row(mesh, Shard(0))], [row(mesh), row(mesh, Shard(0))]),
        {},
    ),
    "nothing kept": lambda mesh: (([row(mesh)], []), {}),
}
DISPATCHED = {
    "plain parameters": lambda _: (([torch.ones(2)], [torch.ones(2)]), {}),
    "no lists": lambda _: ((), {}),
    "plain among them": lambda mesh: (([row(mesh), torch.ones(2)], [row(mesh), torch.ones(2)]), {}),
    "two layouts in a row": lambda mesh: (([row(mesh)], [row(mesh, Shard(0))]), {}),
    "pending": lambda mesh: (([row(mesh, Partial())], [row(mesh, Partial())]), {}),
    "a plain tensor beside a DTensor": lambda mesh: (([row(mesh)], [torch.ones(2)]), {}),
    "state to be made": lambda mesh: (([row(mesh)], [None]), {}),
    "fewer gradients": lambda mesh: (([row(mesh), row(mesh)], [row(mesh)]), {}),
    "fused": lambda mesh: (([row(mesh)], [row(mesh)]), {"fused": True}),
    "differentiable": lambda mesh: (([row(mesh)], [row(mesh)]), {"differentiable": True}),
    "a rate that is a DTensor": lambda mesh: (([row(mesh)], [row(mesh)]), {"lr": row(mesh)}),
    "by position": lambda mesh: (([row(mesh)], [row(mesh)], True), {}),
}


def on_one_rank(fn):
    """The result of ``fn(mesh)`` on the only rank of a mesh."""
    return simulate(lambda: fn(init_device_mesh("cpu", (1,))), 1, "torch")[0]


@pytest.mark.parametrize("name", CONVERTED)
def test_lists_of_one_layout_per_row_become_local(name):
    """A step gets plain tensors where each row has one layout; counters stay as they are."""

    def run(mesh):
        lists, options = CONVERTED[name](mesh)
        return all(kind is torch.Tensor for values in kinds(mesh, *lists, **options) for kind in values)

    assert on_one_rank(run)


@pytest.mark.parametrize("name", DISPATCHED)
def test_other_lists_are_dispatched(name):
    """Where local tensors would not do, the step gets the caller's own lists."""

    def run(mesh):
        lists, options = DISPATCHED[name](mesh)
        own = []
        with torch.no_grad():
            on_local_tensors(lambda *given, **_: own.extend(given))(*lists, **options)
        return len(own) == len(lists) and all(map(lambda a, b: a is b, own, lists))

    assert on_one_rank(run)


def test_a_recorded_step_and_a_skipping_block_are_dispatched():
    """With gradients enabled, or in SkipDTensorDispatch, the step gets the caller's own lists."""

    def run(mesh):
        lists, own = ([row(mesh)], [row(mesh)]), []
        step = on_local_tensors(lambda *given: own.extend(given))
        step(*lists)
        with torch.no_grad(), SkipDTensorDispatch():
            step(*lists)
        return [values is lists[number % 2] for number, values in enumerate(own)]

    assert on_one_rank(run) == [True] * 4


def test_a_tensor_that_may_not_be_written_is_refused():
    """State that is a copy of a view is not written silently: the step's own operators refuse it."""

    def run(mesh):
        parameter, state = row(mesh), row(mesh)
        state._readonly = "it is a copy"
        with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match="it is a copy"):
            on_local_tensors(lambda _, states: states[0].add_(1.0))([parameter], [state])
        return True

    assert on_one_rank(run)


def test_views_of_the_old_values_are_dropped():
    """A parameter that was redistributed before a step is redistributed anew after it."""

    def run():
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
        optimizer = torch.optim.SGD([weight], 1.0)
        seen = []
        for _ in range(2):
            loss = (weight.redistribute(placements=[Replicate()]) * 2.0).sum()
            seen.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert simulate(run, 2, "torch") == [[12.0, -4.0]] * 2


def test_steps_keep_their_signatures():
    """``inspect`` sees the parameters of PyTorch's own function."""
    from torch.optim.sgd import sgd

    assert list(inspect.signature(sgd).parameters)[:3] == ["params", "d_p_list", "momentum_buffer_list"]


def optimizer_of(*parameters):
    """Return an optimizer of one group per parameter, with checked steps."""
    refuse_wrong_steps()
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.5)


def test_each_reducer_has_a_reason_of_its_own():
    """A gradient that one of two reducers has reduced is refused until the other one has, too."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = optimizer_of(first, second)
    for parameter in (first, second):
        parameter.grad = torch.ones(2)
    set_unreduced(second, "replicate", ACCUMULATED)
    set_unreduced(second, "fully_shard", None, elsewhere=True)
    with pytest.raises(PlanError) as raised:
        optimizer.step()
    assert str(raised.value) == (
        "optimizer step: the gradient of parameter 0 of group 1 is not reduced: it was accumulated under no_sync(); "
        "before the step, run the last backward outside of no_sync()"
    )
    assert torch.equal(first, torch.ones(2)), "a part of the step was done"
    set_unreduced(second, "replicate", None)
    optimizer.step()
    assert torch.equal(second, torch.full((2,), 0.5))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_parameter_without_gradient(elsewhere):
    """Without a gradient there is nothing to reduce, unless it waits outside of the parameter."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(parameter)
    set_unreduced(parameter, "any", "it waits", elsewhere=elsewhere)
    if not elsewhere:
        optimizer.step()
        return
    with pytest.raises(
        PlanError, match=r"^optimizer step: the gradient of parameter 0 of group 0 is not reduced: it waits$"
    ):
        optimizer.step()


def test_a_replaced_parameter():
    """A parameter from before sharding is named by its place."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(parameter)
    set_replaced(parameter, "Linear.weight")
    with pytest.raises(PlanError) as raised:
        optimizer.step()
    assert str(raised.value) == (
        "optimizer step: parameter 0 of group 0 is Linear.weight from before fully_shard, which no longer trains; "
        "build the optimizer after fully_shard"
    )
