"""Steps after backward with a fault have no certificate; the right step next to each has one, for every weight."""

from types import SimpleNamespace

import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard, defer_grad_reduce, distribute_tensor, fully_shard
from hyper_parallel.core.dtensor.dtensor import to_local
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel import clip
from hyper_parallel.verify import ModelCase, ParallelPlan
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.prove.data_axes import prove_groups
from hyper_parallel.verify.prove.plan import certify

pytestmark = pytest.mark.platforms("torch")

BATCH, WIDTH = 8, 12


def case(**options):
    """Return a case of two layers."""
    import torch

    def batch():
        return torch.ones(BATCH, WIDTH), torch.ones(BATCH, 5)

    def build():
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))

    return lambda: ModelCase(build, [batch()], lambda out, _: (out * out).sum(), **options)


def split(model, mesh):
    """Shard the first weight and bias by their rows over the last axis, and the second weight by its columns."""
    import torch

    for layer, name, dim in ((model[0], "weight", 0), (model[0], "bias", 0), (model[2], "weight", 1)):
        places = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
        value = distribute_tensor(getattr(layer, name).detach(), mesh, places)
        setattr(layer, name, torch.nn.Parameter(value))
    return model


PLAN = ParallelPlan(split, batch={"dp": Shard(0)})
MESH = ((2, 2), ("dp", "tp"))


def certified(**options):
    """Certify the plan with these options of the case."""
    return certify(case(**options), lambda _: PLAN, *MESH)


def assert_right(found):
    """Check that every weight's new value is proven."""
    assert (found.ok, found.wrong, found.open, found.updates) == (True, [], [], 4), found.text()


def assert_wrong(found, text):
    """Check that there is no certificate, because of ``text``."""
    assert not found.ok
    assert any(text in line for line in found.wrong), found.text()


def local_optimizer(update):
    """Return an optimizer that calls ``update(parameter, gradient)`` on DTensors."""
    import torch

    class Local(torch.optim.Optimizer):
        """Updates parameters one by one."""

        @torch.no_grad()
        def step(self):
            """Update each parameter."""
            for parameter in self.param_groups[0]["params"]:
                update(parameter, parameter.grad)

    return lambda parameters: Local(parameters, {})


def descend(parameter, gradient):
    """Step on local tensors."""
    to_local(parameter).add_(to_local(gradient), alpha=-0.1)


def descend_by_a_share(parameter, gradient):
    """Step on a rank's term of a pending sum over ``dp``."""
    places = [Partial(), *gradient.placements[1:]]
    parameter.to_local().add_(gradient.redistribute(placements=places).to_local(), alpha=-0.1)


def deferred(*, early):
    """Return a step that defers reductions, and steps the optimizer in the block or behind it."""

    def step(training):
        with defer_grad_reduce():
            loss = training.loss()
            loss.backward()
            if early:
                training.optimizer.step()
        if not early:
            training.optimizer.step()
        return loss

    return step


def test_an_optimizer_on_gradients_that_are_not_reduced():
    """A weight that every rank has may not be written with a rank's share of its gradient."""
    optimizer = local_optimizer(descend)
    assert_right(certified(optimizer=optimizer, step=deferred(early=False)))
    with pytest.raises(InputError, match=r"the gradient of parameter 0 of group 0 \(weight of linear\) is still f32"):
        certified(optimizer=optimizer, step=deferred(early=True))
    found = certified(optimizer=local_optimizer(descend_by_a_share))
    assert_wrong(
        found, "2.bias is written with what is not proven: add_ on dp: add: not linear, and an operand is a pending sum"
    )


@pytest.mark.parametrize(
    "axes, text",
    [
        (lambda mesh, _: (mesh, ()), "not linear, and an operand is a pending sum"),
        (lambda mesh, axes: (mesh, axes[:-1]), "not linear, and an operand is a pending sum"),
        (lambda mesh, axes: (mesh, (*axes, 0)), "takes the sum of what every rank has whole"),
    ],
    ids=["a norm per rank", "a norm that misses an axis", "a norm that counts each rank's copy"],
)
def test_a_norm_over_other_axes(axes, text, monkeypatch):
    """The norm is reduced over exactly the axes that split the gradients."""
    assert_right(certified(optimizer="adamw", clip=1.0))
    right = clip._shard_axes
    monkeypatch.setattr(clip, "_shard_axes", lambda gradient: axes(*right(gradient)))
    assert_wrong(certified(optimizer="adamw", clip=1.0), text)


def trusted(norm):
    """Return an optimizer whose rate depends on norms of weights and gradients (LAMB)."""

    def update(parameter, gradient):
        ratio = norm(parameter) / (norm(gradient) + 1e-6)
        if isinstance(ratio, DTensor) or not isinstance(parameter, DTensor):
            parameter.add_(gradient * ratio, alpha=-0.1)
        else:
            to_local(parameter).add_(to_local(gradient) * ratio, alpha=-0.1)

    return local_optimizer(update)


def test_an_optimizer_with_a_norm_per_rank():
    """A norm of a shard is not that of the weight."""
    assert_right(certified(optimizer=trusted(lambda value: value.norm())))
    found = certified(optimizer=trusted(lambda value: to_local(value).norm()))
    assert_wrong(found, "is written with what is not proven")


def test_a_gradient_that_is_averaged_over_another_axis():
    """The sum over the data axis is divided by its number of ranks, not by that of another axis."""

    def parallel(factor):
        def apply(model, mesh):
            fully_shard(model, mesh=mesh["dp"])
            if factor:
                model.set_gradient_divide_factor(mesh["tp"].size())

        return lambda _: apply

    assert certify(case(), parallel(factor=False), (2, 3), ("dp", "tp")).wrong == []
    found = certify(case(), parallel(factor=True), (2, 3), ("dp", "tp"))
    assert_wrong(found, "(model): fully_shard: the result is 2/3 of the value")


def group(**changes):
    """Return a group of one parameter of six rows on two ranks, with one thing changed."""
    from hyper_parallel.core.data_parallel.plan import plan_flat
    from hyper_parallel.core.dtensor.layout import Layout

    mesh = DeviceMesh.abstract("cpu", (2, 3), tuple(range(6)), ("dp", "tp"))
    layout = Layout.of(mesh, changes.get("axes", ((0,), ())), (), (6, 4))
    plan = plan_flat([changes.get("shape", (6, 4))], 2)
    sharded = SimpleNamespace(layout=layout, grad=0)
    member = SimpleNamespace(sharded=sharded, slot=plan.slots[0], accumulated=None)
    options = SimpleNamespace(ranks=mesh.ranks_along((0,)), replicas=(0,), count=2)
    rows = changes.get("rows", plan)
    return SimpleNamespace(options=options, members=[member], plan=rows, gradient_plan=rows, divide_factor=None)


@pytest.mark.parametrize(
    "changes, collectives, text",
    [
        ({}, ("all_gather", "reduce_scatter"), ""),
        ({}, ("all_gather",), "m: fully_shard: no reduce_scatter over dp runs, which its gradients need"),
        ({"shape": (4, 4)}, ("all_gather", "reduce_scatter"),
         "m: fully_shard: a parameter [4, 4] is cut otherwise than float [6, 4] {dim 0: dp} says"),
        ({"axes": ((0, 1), ())}, ("all_gather", "reduce_scatter"), "m: fully_shard: a parameter [6, 4] is cut"),
        ({"rows": SimpleNamespace(slots=[SimpleNamespace(offset=1, size=12)], row=12)},
         ("all_gather", "reduce_scatter"), "m: fully_shard: parameters overlap in a row"),
    ],
)  # fmt: skip
def test_groups_of_parameters(changes, collectives, text):
    """Collectives that are missing, rows that overlap, and shards that are not cut as their layout says are refused."""
    events = [SimpleNamespace(module="m", source="", collective=each, axes=("dp",)) for each in collectives]
    found = prove_groups([("m", group(**changes))], events, lambda ranks: ("dp",) if len(ranks) > 1 else ())
    assert len(found.wrong) == bool(text)
    assert all(line.startswith(text[:40]) for line in found.wrong), found.wrong
    assert found.collectives == ({("m", each, ("dp",)) for each in collectives} if not text else set())
