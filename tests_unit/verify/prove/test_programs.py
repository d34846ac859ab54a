"""A plan whose step computes something else than one device has no certificate; the right plan next to each has one."""

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    fully_shard,
    local_map,
    parallelize_module as parallelize,
)
from hyper_parallel.verify import ModelCase, ParallelPlan
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.prove.plan import certify

pytestmark = pytest.mark.platforms("torch")

WIDTH, HIDDEN, OUT, BATCH = 12, 16, 6, 8


def model(between=None):
    """Return two layers with a norm; ``between`` is applied to the hidden activations."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUT)
            self.norm = nn.LayerNorm(OUT)

        def forward(self, x):
            h = self.act(self.up(x))
            return self.norm(self.down(h if between is None else between(h)))

    torch.manual_seed(0)
    return Model()


def case(between=None, **options):
    """Return a case of the model."""
    import torch

    def made():
        batch = torch.ones(BATCH, WIDTH), torch.ones(BATCH, OUT)
        settings = {"optimizer": "adamw"} | options
        return ModelCase(lambda: model(between), [batch], lambda out, b: ((out - b[-1]) ** 2).mean(), **settings)

    return made


def styled(change=None, **options):
    """Return a plan of styles; ``change`` is called with the parallel model."""

    def apply(module, mesh):
        parallelize(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if change is not None:
            change(module)

    return lambda _: ParallelPlan(apply, **options)


def certified(plan, made=None):
    """Certify a plan on two ranks."""
    return certify(made or case(), plan, (2,), ("tp",))


def step(change=lambda _: None, scale=1.0, clears=True):
    """Return a step that changes gradients."""

    def run(training):
        if clears:
            training.optimizer.zero_grad()
        loss = training.loss()
        (loss * scale if scale != 1.0 else loss).backward()
        change(training)
        training.optimizer.step()
        return loss

    return run


def doubled(training):
    """Double every gradient."""
    for parameter in training.parameters:
        parameter.grad.mul_(2)


def by_data(training):
    """Halve a weight without its history."""
    training.parameters[0].data.mul_(0.5)


def hook(factor):
    """Return a change that hooks a weight's gradient."""
    return lambda module: module.up.weight.register_hook(lambda gradient: gradient * factor if factor else None)


def after_accumulation(module):
    """Hook a weight after its gradient is accumulated."""

    def double(parameter):
        parameter.grad.mul_(2)

    module.up.weight.register_post_accumulate_grad_hook(double)


def of_module(module):
    """Hook the gradient of a module's input."""
    module.down.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))


def without_norm(module):
    """Drop the norm."""
    from torch import nn

    module.norm = nn.Identity()


def other_activation(module):
    """Take another activation."""
    from torch import nn

    module.act = nn.ReLU()


def other_eps(module):
    """Take another eps."""
    module.norm.eps = 0.1


def patched(module):
    """Patch a forward."""
    forward = module.down.forward
    module.down.forward = lambda x: forward(x) * 0.5


def scaled_output(module):
    """Scale an output in a hook."""
    module.norm.register_forward_hook(lambda _, __, out: out + 1)


def frozen(module):
    """Freeze a weight."""
    module.norm.weight.requires_grad_(requires_grad=False)


def scaled_weight(module):
    """Scale a weight before the step."""
    import torch

    with torch.no_grad():
        module.norm.weight.mul_(2)


def stop_gradient(module):
    """Cut the graph at an activation."""
    module.act.register_forward_hook(lambda _, __, out: out.detach())


WRONG = [
    ("a hook of a parameter", styled(hook(0)), styled(hook(2)), 1,
     "(model): the parallel run also calls mul(the gradient that arrives at up.weight, 2), which one device does not"),
    ("a hook after accumulation", styled(), styled(after_accumulation), 1,
     "(model): the parallel run also calls mul_(the gradient of up.weight, 2), which one device does not"),
    ("a hook of a module", styled(), styled(of_module), 1,
     "(model): the parallel run also calls mul(gradient 0 that arrives at down, 2), which one device does not"),
    ("a step that scales gradients", styled(step=step()), styled(step=step(doubled)), 1,
     "(model): the parallel run also calls mul_(the gradient of up.weight, 2), which one device does not"),
    ("a step that scales the loss", styled(step=step()), styled(step=step(scale=0.5)), 1,
     "(loss): the parallel run also calls mul(f32[], 0.5), which one device does not"),
    ("a step that writes by data", styled(step=step()), styled(step=step(by_data)), 1,
     "(model): the parallel run also calls mul_(up.weight, 0.5), which one device does not"),
    ("a norm that is dropped", styled(), styled(without_norm), 3,
     ("down: the parallel run does not call layer_norm(f32[8, 6], (6,), weight=norm.weight, bias=norm.bias, "
     "eps=1e-05), which one device calls")),
    ("another activation", styled(), styled(other_activation), 1,
     ("(model): the parallel run calls relu(f32[8, 16], inplace=False), where one device calls gelu(f32[8, 16], "
     "approximate='none')")),
    ("another eps", styled(), styled(other_eps), 1,
     ("norm: the parallel run calls layer_norm(f32[8, 6], (6,), weight=norm.weight, bias=norm.bias, eps=0.1), "
     "where one device calls layer_norm(f32[8, 6], (6,), weight=norm.weight, bias=norm.bias, eps=1e-05)")),
    ("a patched forward", styled(), styled(patched), 1,
     "down: the parallel run also calls mul(f32[8, 6], 0.5), which one device does not"),
    ("a hook of an output", styled(), styled(scaled_output), 1,
     "(model): the parallel run also calls add(f32[8, 6], 1), which one device does not"),
    ("a frozen weight", styled(), styled(frozen), 3,
     ("(model): the parallel run has norm.weight, where one device has addcdiv_(f32[6], f32[6], f32[6], "
     "value=-1.0000000000000002)")),
    ("a weight that is scaled", styled(), styled(scaled_weight), 1,
     "(model): the parallel run also calls mul_(norm.weight, 2), which one device does not"),
    ("a gradient that is cut", styled(), styled(stop_gradient), 3,
     "(model): the parallel run also calls detach(f32[8, 16]), which one device does not"),
    ("another optimizer", styled(), styled(optimizer="sgd"), 3,
     ("(model): the parallel run calls add_(up.weight, f32[16, 12], alpha=-0.1), where one device calls "
     "addcdiv_(f32[16, 12], f32[16, 12], f32[16, 12], value=-1.0000000000000002)")),
]  # fmt: skip


@pytest.mark.parametrize("right, wrong, status, line", [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_steps_that_differ(right, wrong, status, line):
    """A difference from the step of one device is named: 1 if it changes values, 3 if it may."""
    found = certified(right)
    assert (found.status, found.open, found.wrong) == (0, [], []), found.text()
    found = certified(wrong)
    assert (found.status, [*found.wrong, *found.open][:1]) == (status, [line]), found.text()


@pytest.mark.parametrize(
    "between, status, line",
    [
        (lambda h: h, 0, ""),
        (
            lambda h: h * 2 if h.shape[-1] < HIDDEN else h,
            1,
            "(model): the parallel run also calls mul(f32[8, 16], 2), which one device does not",
        ),
    ],
)
def test_a_branch_of_the_model(between, status, line):
    """A branch that only the parallel run takes is a difference."""
    found = certified(styled(), case(between))
    assert (found.status, found.wrong[:1]) == (status, [line] if line else []), found.text()


def dtensors(scales):
    """Return a case whose model scales DTensors, and a plan that makes its batch one."""

    def between(h):
        return h * 2 if scales and isinstance(h, DTensor) else h

    return case(between), lambda _: ParallelPlan({}, batch={"tp": Shard(0)})


def test_a_branch_for_dtensors():
    """A branch that only DTensors take is a difference."""
    made, plan = dtensors(scales=False)
    assert certify(made, plan, (2,), ("tp",)).status == 0
    made, plan = dtensors(scales=True)
    found = certify(made, plan, (2,), ("tp",))
    line = "(model): the parallel run also calls __mul__(f32[8, 16], 2), which one device does not"
    assert (found.status, found.wrong) == (1, [line.replace("__mul__", "mul")]), found.text()


def test_what_is_not_covered_is_inconclusive():
    """A step that is not covered is no certificate: the status is 3, and the last line says so."""
    import torch

    class Frozen(torch.optim.SGD):
        """Writes nothing."""

        def step(self):
            """Do nothing."""

    found = certified(styled(optimizer=lambda weights: Frozen(weights, lr=0.1)))
    line = "gradient clipping and the optimizer's step: on tp nothing that is followed writes up.weight"
    assert (found.status, found.ok, found.open[0]) == (3, False, line)
    assert found.text().splitlines()[-1] == f"INCONCLUSIVE: not covered: {line} (and 1 more)"
    assert found.json()["status"] == 3


def test_collectives_of_torch_distributed():
    """A collective of torch.distributed is refused, and the message has the call that replaces it."""
    from torch import distributed

    def plan(mesh):
        def reducing(training):
            loss = training.loss()
            loss.backward()
            distributed.all_reduce(loss.detach(), group=mesh.get_group())
            training.optimizer.step()
            return loss

        return styled(step=reducing)(mesh)

    with pytest.raises(InputError) as caught:
        certified(plan)
    assert str(caught.value).splitlines()[0] == (
        "SPEC: the model under PLAN raised AttributeError: simulated ranks have no process group, so torch.distributed "
        "cannot call allreduce; the sum of the ranks' x over a mesh is hyper_parallel.DTensor.from_local(x, mesh, "
        "[hyper_parallel.Partial()]).full_tensor()"
    )


def test_fully_sharded_and_clipped_steps():
    """Gathered parameters, averaged gradients and clipping are those of one device."""

    def apply(module, mesh):
        parallelize(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])

    for clip, status in ((1.0, 0), (2.0, 0)):
        found = certify(case(clip=clip), lambda _: ParallelPlan(apply), (2, 2), ("dp", "tp"))
        assert (found.status, found.open) == (status, []), found.text()


def test_a_gradient_that_is_declared_complete_must_be():
    """A share of a gradient per rank is refused where it is declared complete, and allowed where it is summed."""
    import torch
    from torch import nn

    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.multiply = nn.Parameter(torch.ones(WIDTH)), torch.mul

        def forward(self, x):
            return self.multiply(x, self.gain)

    def made():
        return ModelCase(Gain, [(torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH))], lambda out, _: (out**2).sum())

    def plan(gradient):
        def apply(module, _):
            placed = [[Shard(0)], [gradient]]
            module.multiply = local_map(lambda x, gain: x * gain, [Shard(0)], in_grad_placements=placed)

        return lambda _: ParallelPlan(apply, batch={"tp": Shard(0)})

    assert certified(plan(Partial()), made).wrong == []
    found = certified(plan(Replicate()), made)
    line = "(model): the gradient of local_map(<lambda>) is a pending sum over tp, not reduced"
    assert (found.status, found.wrong) == (1, [line]), found.text()


def assigned(module):
    """Replace the values of a weight."""
    import torch

    module.up.weight.data = torch.zeros(HIDDEN, WIDTH)


def doubling():
    """Return hooks that double what backward reads."""
    import torch

    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved * 2)


def halved():
    """Return a region of half precision."""
    import torch

    return torch.autocast("cpu")


RANK = "get_rank(), of which only the first rank's result is followed"


@pytest.mark.parametrize(
    "plan, line",
    [
        (
            lambda mesh: ParallelPlan(lambda module, own: (assigned(module), styled()(mesh).styles(module, own))[0]),
            "the parallel run calls zeros(16, 12), where one device calls up.weight",
        ),
        (styled(context=doubling), "the parallel run has a hook of saved tensors, and one device has none"),
        (
            styled(context=halved),
            "the parallel run has a region of autocast to torch.bfloat16, and one device has none",
        ),
        (
            lambda mesh: styled(lambda module: module.down.bias.zero_() if mesh.get_rank() else None)(mesh),
            f"the parallel run has {RANK}, and one device has none",
        ),
    ],
    ids=["data", "saved", "autocast", "rank"],
)
def test_what_sizes_do_not_show_is_inconclusive(plan, line):
    """New values of a weight, hooks of saved tensors, autocast and a read rank are found by where they are called."""
    found = certified(plan)
    assert (found.status, found.wrong) == (3, []), found.text()
    assert f"(model): {line}" in found.open


def test_a_function_that_the_plan_replaces_for_all_models(monkeypatch):
    """The step of one device runs before the plan, so that it does not get what the plan changes in modules."""
    from torch import nn
    from torch.nn import functional

    def plan(mesh):
        monkeypatch.setattr(functional, "gelu", lambda x, **_: functional.relu(x))
        return styled()(mesh)

    found = certified(plan)
    one = "gelu(f32[8, 16], approximate='none')"
    line = f"act: the parallel run calls relu(f32[8, 16], inplace=False), where one device calls {one}"
    assert isinstance(model().act, nn.GELU)
    assert (found.status, found.wrong) == (1, [line]), found.text()


def test_a_plain_weight_that_the_plan_writes():
    """A write to the data of a plain weight, before the styles, changes what is trained."""

    def apply(module, mesh):
        module.up.weight.data.mul_(2)
        parallelize(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    found = certified(lambda _: ParallelPlan(apply))
    line = "(model): the parallel run also calls mul_(up.weight, 2), which one device does not"
    assert (found.status, found.wrong) == (1, [line]), found.text()
