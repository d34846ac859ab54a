"""Calls on plain tensors: only what is followed from the parameters to the new weights is certified."""

import pytest

from hyper_parallel import ColwiseParallel, DTensor, Partial, Replicate, Shard, local_map
from hyper_parallel.core.dtensor.dtensor import to_local
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify import ModelCase, ParallelPlan
from hyper_parallel.verify.prove.plan import certify

pytestmark = pytest.mark.platforms("torch")

WIDTH = 8
PLAIN_OUTPUT = "up: what is computed with its plain output [4, 16@tp]"
OF_WHOLE = "an all-reduce over tp takes the sum of what every rank has whole"
NOT_OF_ONE_DEVICE = (
    "whether these are the calls of one device, which does not run the program: the model raised AttributeError: "
    "'Parameter' object has no attribute 'device_mesh'"
)
STEP = "gradient clipping and the optimizer's step: "


def certified(between, output=None, **options):
    """Certify a model that computes its loss by ``between(model, plain output of its only layer)``."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.scale = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.ones(()))
            self.attend = nn.MultiheadAttention(1, 1)

        def forward(self, x):
            return between(self, self.up(x))

    def case():
        x = torch.zeros(4, WIDTH)
        return ModelCase(Model, [(x, x)], lambda value, _: value, **options)

    styles = {"up": ColwiseParallel(output_layouts=output)}
    return certify(case, lambda _: ParallelPlan(styles), (2,), ("tp",))


def replicated(model, value):
    """Return the sum of a value that is declared to be complete on every rank."""
    return DTensor.from_local(value, model.up.weight.device_mesh, [Replicate()]).sum().full_tensor()


def assigned(model, h):
    """Return a rank's sum by way of an assignment."""
    del model
    y = h.new_zeros(())
    y[...] = h.square().sum()
    return y


def written_by_a_view(model, h):
    """Return a rank's sum by way of a view."""
    y = h.new_zeros(1)
    y.view(()).copy_(h.sum())
    return replicated(model, y)


def assigned_and_declared(model, h):
    """Declare the same to be complete."""
    y = h.new_zeros(4, 2)
    y[:, 0] = h.sum(1)
    return replicated(model, y)


def with_a_backward_of_its_own(model, h):
    """Scale a shard by a function whose gradient of the scale is a rank's share."""
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, scale):
            ctx.save_for_backward(h, scale)
            return h * (scale * 2)

        @staticmethod
        def backward(ctx, gradient):
            h, scale = ctx.saved_tensors
            return gradient * scale * 2, (gradient * h).sum() * 2

    scaled = Scale.apply(h.square(), model.scale)
    return DTensor.from_local(scaled, model.up.weight.device_mesh, [Shard(1)]).sum().full_tensor()


def attention(model, h):
    """Declare the attention of ranks' sums, which comes with None in place of weights, to be complete."""
    sums = h.sum(1, keepdim=True)
    return replicated(model, model.attend(sums, sums, sums, need_weights=False)[0])


@pytest.mark.parametrize(
    "between", [assigned, written_by_a_view, assigned_and_declared, with_a_backward_of_its_own, attention]
)
def test_values_that_no_recorded_call_makes(between):
    """A rank's share that an assignment, a view, a backward of its own or mixed results hide is not covered."""
    found = certified(between)
    assert found.wrong == []
    assert PLAIN_OUTPUT in found.open, found.text()


def test_calls_that_no_law_proves():
    """Many results, other numbers on a rank, and calls that fail on sizes alone are listed once, with the reason."""
    import torch

    def between(model, h):
        rows = h.unbind(0)[0].sum() + h.unbind(0)[1].sum()
        other = model.scale * h.shape[1]
        with torch.no_grad():
            model.scale.copy_(h.sum())
        declared = DTensor.from_local(h, model.up.weight.device_mesh, [Shard(1)])
        return declared.square().sum().full_tensor() + 0 * other + 0 * rows

    leaf = "a leaf Variable that requires grad is being used in an in-place operation."
    assert certified(between).open == [
        PLAIN_OUTPUT,
        "(model): that a plain tensor is [4, 16@tp]",
        "(model): unbind on tp: it has many results",
        "(model): mul on tp: not traced: a rank calls it with other numbers",
        f"(model): copy_ on tp: not traced: {leaf}",
        NOT_OF_ONE_DEVICE,
    ]


def test_regions_with_other_values():
    """Numbers among the arguments and None among the results of local_map, and an average of equal values, are fine."""

    def parts(x, factor):
        return x * factor, None

    def between(model, h):
        mesh = model.up.weight.device_mesh
        shard = DTensor.from_local(h, mesh, [Shard(1)])
        doubled, _ = local_map(parts, out_placements=([Shard(1)], None))(shard, 2.0)
        mean = DTensor.from_local(model.scale * 3, mesh, [Partial("avg")])
        return doubled.square().sum().full_tensor() + mean.full_tensor()

    found = certified(between)
    assert (found.status, found.wrong, found.open) == (3, [], [NOT_OF_ONE_DEVICE]), found.text()


def whole(model, h):
    """Return a loss of the gathered output and the scale."""
    return (h * model.scale).square().sum()


def twice(between=lambda _: None):
    """Return a step that adds up the gradients of two losses."""

    def step(training):
        training.loss().backward()
        between(training)
        loss = training.loss()
        loss.backward()
        training.optimizer.step()
        return loss

    return step


def test_two_losses():
    """The forward of every loss of a step is followed, and so are the weights that both train."""
    right = certified(whole, Replicate(), step=twice())
    assert (right.wrong, right.open, right.updates) == ([], [], 3), right.text()

    def worse_later(model, h):
        model.calls = getattr(model, "calls", 0) + 1
        complete = DTensor.from_local(h, model.up.weight.device_mesh, [Shard(1)]).square().sum().full_tensor()
        return whole(model, h) if model.calls % 2 == 0 else complete

    assert certified(worse_later, step=twice()).wrong == [
        "(loss): the loss is Partial(sum) on tp, not reduced",
        "(model): the gradient of scale is a pending sum over tp, not reduced",
    ]


def test_a_weight_that_is_written_between_two_losses():
    """A weight that a step also writes between two losses is not covered."""
    import torch

    @torch.no_grad()
    def decay(training):
        for weight in training.parameters:
            to_local(weight).mul_(0.9)

    found = certified(whole, Replicate(), step=twice(decay))
    line = f"{STEP}a weight, between two losses, is written by a call that is not followed"
    assert (found.wrong, line in found.open, found.updates) == ([], True, 0), found.text()


def updated(update):
    """Certify an optimizer of which ``update(weights, local tensors since it was built)`` is the step."""
    import torch

    class Local(torch.optim.Optimizer):
        def __init__(self, weights):
            super().__init__(weights, {})
            self.locals = list(map(to_local, weights))

        @torch.no_grad()
        def step(self):
            pairs = zip(self.param_groups[0]["params"], self.locals, strict=True)
            update(*zip(*(pair for pair in pairs if pair[0].grad is not None), strict=True))

    return certified(whole, Replicate(), optimizer=Local)


def descend(weights):
    """Update weights by their gradients."""
    for weight in weights:
        to_local(weight).sub_(to_local(weight.grad))


def kept(weights, local):
    """Write the local tensors that the optimizer has kept."""
    for weight, own in zip(weights, local, strict=True):
        own.sub_(to_local(weight.grad))


def averaged(weights, _):
    """Average what every rank has."""
    descend(weights[1:])
    weights[0].sub_(reduced(weights[0].grad, "avg", weights))


def summed(weights, _):
    """Sum up what every rank has."""
    descend(weights[1:])
    weights[0].sub_(reduced(weights[0].grad, "sum", weights))


def reduced(value, op, weights):
    """Reduce over all ranks."""
    return current_platform().transport().all_reduce(value, op, weights[1].device_mesh.ranks_along((0,)))


def summed_buffer(weights, _):
    """Sum up a buffer that an assignment has filled."""
    descend(weights[1:])
    buffer = weights[0].grad.new_zeros(())
    buffer[...] = to_local(weights[1]).sum()
    weights[0].sub_(reduced(buffer * 1, "sum", weights))


def share(weights, _):
    """Write a rank's share of a sum into a replicated weight."""
    descend(weights[1:])
    weights[0].copy_(to_local(weights[1]).sum())


def written_by_views(weights, _):
    """Write through a view."""
    descend(weights[1:])
    weights[0].view(1).sub_(to_local(weights[1]).sum())


def assigned_last(weights, _):
    """Write a rank's share by an assignment, after the last call that is followed."""
    descend(weights)
    weights[0][...] = to_local(weights[1]).sum()


def decayed_by_an_operator(weights, _):
    """Write a weight by an operator on DTensors, between two calls on its local tensor."""
    for weight in weights:
        to_local(weight).abs()
        weight.mul_(0.9)
        to_local(weight).sub_(to_local(weight.grad))


def by_size(weights, _):
    """Call other functions where a rank has few elements."""
    for weight in weights:
        local, gradient = to_local(weight), to_local(weight.grad)
        local.sub_(gradient) if local.shape != (WIDTH, WIDTH) else local.add_(-gradient)


@pytest.mark.parametrize(
    "update, wrong, uncovered",
    [
        (kept, "", ""),
        (averaged, "", ""),
        (summed, f"(model): scale is written with what is not proven: {OF_WHOLE}", ""),
        (share, "(model): scale is Replicate() on tp, and is written with Partial(sum)", ""),
        (summed_buffer, "", "scale is written: its value is not followed"),
        (written_by_views, "", "scale is written by a call that is not followed"),
        (assigned_last, "", "scale is written by a call that is not followed"),
        (decayed_by_an_operator, "", "up.weight is written by a call that is not followed"),
        (by_size, "", "on tp a rank does not call what one device calls"),
    ],
)  # fmt: skip
def test_weights_that_a_step_writes(update, wrong, uncovered):
    """A new weight is certified if all its writes are followed, and refused if it differs from that of one device."""
    found = updated(update)
    assert found.wrong == ([wrong] if wrong else []), found.text()
    assert [line for line in found.open if line.startswith(STEP)] == ([STEP + uncovered] if uncovered else [])
    assert found.updates == (0 if uncovered else 3)


def test_properties_that_are_tensors_are_calls():
    """A property whose value is a tensor, such as ``mT``, is recorded, of a parameter as well; sizes are not."""
    import torch

    from hyper_parallel.verify.frameworks.torch.primitives import ObservedCalls

    seen = []
    values = torch.ones(2, 3), torch.nn.Parameter(torch.ones(4, 5))
    with ObservedCalls(lambda _, args, __, result, ___: seen.append((args[0], tuple(result.shape)))):
        for each in values:
            assert (each.mT.shape, each.dtype) == (each.shape[::-1], torch.float32)
    found = [(value is given, shape) for (given, shape), value in zip(seen, values, strict=True)]
    assert found == [(True, (3, 2)), (True, (5, 4))]
