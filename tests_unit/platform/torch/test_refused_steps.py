"""Optimizer steps are refused while a gradient is not reduced, and on parameters that were replaced."""

import pytest
import torch

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED
from hyper_parallel.platform.torch.refused_steps import refuse_wrong_steps, set_replaced, set_unreduced

pytestmark = pytest.mark.platforms("torch")


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
        "run the last backward before the step outside of it"
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
