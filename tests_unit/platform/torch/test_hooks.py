"""Every hook that PyTorch offers is called on parallel modules as on one device, with equal values, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as global_hooks

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.data_parallel import fully_shard, no_sync, replicate
from hyper_parallel.errors import PlanError, UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """Two layers of odd sizes, the first one called twice; keyword arguments reach the module."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        for seed, parameter in enumerate(self.double().parameters()):
            parameter.data.copy_(numbers(*parameter.shape, seed=10 + seed))

    def forward(self, x, *, scale):
        """Compute."""
        for _ in range(2):
            x = x + self.down(torch.tanh(self.up(x))) * scale
        return x


def sharded(model, mesh):
    """One group."""
    return fully_shard(model, mesh=mesh)


def sharded_parts(model, mesh):
    """A group for each layer, of which two gradients are reduced in a backward."""
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def averaged(model, mesh):
    """Averaged gradients, in small buckets."""
    return replicate(model, mesh, bucket_cap_mb=0.0001)


def tensor_parallel(model, mesh):
    """Both styles of linear layers."""
    styles = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
    return parallelize_module(model, mesh, styles)


def distributed(model, mesh):
    """Replicated parameters as DTensors."""
    return distribute_module(model, mesh)


def compiled(model, mesh):
    """Graphs of both styles of linear layers."""
    return hyper_parallel.compile(tensor_parallel(model, mesh))


def compiled_shards(model, mesh):
    """Graphs of what is gathered around them."""
    return sharded(hyper_parallel.compile(model), mesh)


def compiled_copies(model, mesh):
    """Graphs of which gradients are averaged."""
    return averaged(hyper_parallel.compile(model), mesh)


COMPILED = (compiled, compiled_shards, compiled_copies)
DATA_PARALLEL = (sharded, sharded_parts, averaged, compiled_shards, compiled_copies)
KINDS = (*DATA_PARALLEL, tensor_parallel, distributed, compiled)


def whole(value):
    """Values on every rank, without a layout."""
    if isinstance(value, (tuple, list)):
        return [whole(each) for each in value]
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items() if name != "_metadata"}
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


class Log(dict):
    """What hooks have been called with, by name: autograd promises no order of hooks of different tensors."""

    def note(self, name, *values):
        """Note a call."""
        self.setdefault(name, []).append(whole(values))

    def of(self, name, *, values=True, result=None):
        """A hook that notes its arguments."""

        def hook(*args, **kwargs):
            self.note(name, args if values else len(args), kwargs)
            return result(*args) if result else None

        return hook


# -- hooks of parameters: called with the gradient of the training ----------------------------------------------------


def gradient_hook(model, optimizer, log):
    """Sees each gradient."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(log.of(name))


def changing_gradient_hooks(model, optimizer, log):
    """One after the other change the gradient; neither is linear."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(log.of(f"first of {name}", result=lambda gradient: gradient * gradient))
        parameter.register_hook(log.of(f"second of {name}", result=lambda gradient: gradient / gradient.abs().max()))


def removed_hooks(model, optimizer, log):
    """A removed hook is not called, and another one still is."""
    for name, parameter in model.named_parameters():
        handles = [parameter.register_hook(log.of("removed")), parameter.register_hook(log.of(name))]
        handles.append(parameter.register_post_accumulate_grad_hook(log.of("removed too")))
        handles[0].remove()
        handles[2].remove()


def accumulated_hook(model, optimizer, log):
    """Sees the parameter with its gradient."""
    for name, parameter in model.named_parameters():
        seen = log.of(name)
        parameter.register_post_accumulate_grad_hook(lambda p, seen=seen: seen(p, p.grad))


def optimizer_in_backward(model, optimizer, log):
    """Steps and clears the gradient."""
    steps = {parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter):
        steps[parameter].step()
        steps[parameter].zero_grad()
        log.note("step")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def optimizer_hooks(model, optimizer, log):
    """Around the step, and around both directions of the state dict."""
    optimizer.register_step_pre_hook(log.of("before", result=None))
    optimizer.register_step_post_hook(log.of("after"))
    optimizer.register_state_dict_pre_hook(log.of("before state_dict"))
    optimizer.register_state_dict_post_hook(log.of("after state_dict", values=False))
    optimizer.register_load_state_dict_pre_hook(log.of("before load_state_dict", values=False))
    optimizer.register_load_state_dict_post_hook(log.of("after load_state_dict"))


def state_dict_hooks(model, optimizer, log):
    """Around both directions of the state dict of a module."""
    model.register_state_dict_pre_hook(log.of("before state_dict"))
    model.up.register_state_dict_post_hook(log.of("after state_dict"))
    model.down.register_load_state_dict_pre_hook(log.of("before load_state_dict"))
    model.register_load_state_dict_post_hook(log.of("after load_state_dict"))


PARAMETER_HOOKS = (
    gradient_hook, changing_gradient_hooks, removed_hooks, accumulated_hook, optimizer_in_backward, optimizer_hooks,
    state_dict_hooks,
)  # fmt: skip


def train(model, register, batches, count, place=lambda value: value):
    """Register hooks, and take three steps, the last one of two accumulated passes; the log, gradients and weights."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Log()
    register(model, optimizer, log)
    for step, passes in enumerate((1, 1, 2)):
        for _ in range(passes):
            loss = 0
            for x, cotangent in batches[step]:
                loss = loss + (model(place(x), scale=1.5) * place(cotangent)).sum() / count
            loss.backward()
        log.note("gradients", [parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    return log, whole(list(model.parameters()))


def batches_of(world):
    """By step and rank: input and cotangent."""
    return [
        [(numbers(3, 5, seed=s * 10 + r), numbers(3, 5, seed=90 + s * 10 + r)) for r in range(world)] for s in range(3)
    ]


def assert_same(mine, theirs, what):
    """Equal structure, and values equal up to rounding."""
    assert type(mine) is type(theirs), what
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10, msg=lambda text: f"{what}: {text}")
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs), what
        for name, value in mine.items():
            assert_same(value, theirs[name], f"{what}, {name}")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), what
        for number, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_same(*pair, f"{what}, {number}")
    else:
        assert mine == theirs, what


def assert_logs_equal(mine, theirs):
    """The same names, each with the same calls."""
    assert sorted(mine) == sorted(theirs)
    for name, calls in theirs.items():
        assert_same(mine[name], calls, name)


@pytest.mark.parametrize("register", PARAMETER_HOOKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_hooks_of_parameters_and_optimizers(kind, register, world):
    """Each is called as often as on one device, with the gradients and weights of one device, and trains it alike."""

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        batches, shared = batches_of(world), kind in DATA_PARALLEL
        wanted = train(Model(), register, batches, world)
        own = [[step[mesh.rank]] for step in batches] if shared else batches
        place = (lambda value: value) if shared else (lambda value: distribute_tensor(value, mesh))
        log, weights = train(kind(Model(), mesh), register, own, 1 if shared else world, place)
        assert_logs_equal(log, wanted[0])
        assert_same(weights, wanted[1], "weights")

    simulate(rank, world, "torch")


# -- hooks of modules and graphs: called with what this rank computes --------------------------------------------------


def forward_hooks(model, log):
    """With and without keyword arguments, before and after; each may change values."""
    model.register_forward_pre_hook(log.of("pre", result=lambda _, args: (args[0] * 2,)))
    model.register_forward_pre_hook(log.of("pre first"), prepend=True)
    model.register_forward_pre_hook(
        log.of("pre of all", result=lambda _, args, kwargs: (args, {"scale": kwargs["scale"] + 1})), with_kwargs=True
    )
    model.up.register_forward_hook(log.of("post", result=lambda *given: given[-1] * 2))
    model.register_forward_hook(log.of("post of all"), with_kwargs=True, always_call=True)
    model.register_forward_hook(log.of("post first"), prepend=True)


def backward_hooks(model, log):
    """Before and after; each may change gradients."""
    for module in (model, model.up):
        module.register_full_backward_hook(log.of("post", result=lambda *given: tuple(x * 2 for x in given[1])))
        module.register_full_backward_pre_hook(log.of("pre", result=lambda *given: tuple(x * x for x in given[1])))


def hooks_of_all_modules(model, log):
    """Those that PyTorch calls for every module; removed at the end."""
    own = {model, model.up, model.down}

    def ours(name):
        note = log.of(name)
        return lambda module, *args: note(module, *args) if module in own else None

    return [
        global_hooks.register_module_forward_pre_hook(ours("pre")),
        global_hooks.register_module_forward_hook(ours("post")),
        global_hooks.register_module_full_backward_pre_hook(ours("backward pre")),
        global_hooks.register_module_full_backward_hook(ours("backward")),
    ]


def hooks_of_values(model, log):
    """A hook and a kept gradient of what forward computes."""

    def watch(_, args, out):
        if out.requires_grad:
            out.register_hook(log.of("gradient", result=lambda gradient: gradient * gradient))

    model.up.register_forward_hook(watch)
    model.register_forward_hook(watch)


def hooks_of_several_values(model, log):
    """Called once with the gradients of several outputs, or with the first one."""
    outputs = []

    def watch(_, args, out):
        outputs.append(out)
        if len(outputs) == 2:
            graph.register_multi_grad_hook(outputs, log.of("all"))
            graph.register_multi_grad_hook(outputs, log.of("any"), mode="any")

    model.up.register_forward_hook(watch)


def saving_hooks(model, log):
    """Whatever is saved goes through them; entered at the forward of the whole, left after it."""
    hooks = graph.saved_tensors_hooks(lambda x: -2 * x, lambda x: x / -2)
    model.register_forward_pre_hook(lambda *_: hooks.__enter__(), prepend=True)
    model.register_forward_hook(lambda *_: hooks.__exit__())


def own_forward_hooks(model, log):
    """Of the whole alone, before and after; each changes values."""
    model.register_forward_pre_hook(log.of("pre", result=lambda _, args: (args[0] * 2,)))
    model.register_forward_pre_hook(
        log.of("pre of all", result=lambda _, args, kwargs: (args, {"scale": kwargs["scale"] + 1})), with_kwargs=True
    )
    model.register_forward_hook(log.of("post of all"), with_kwargs=True, always_call=True)
    model.register_forward_hook(log.of("post first", result=lambda *given: given[-1] * 2), prepend=True)


def own_backward_hooks(model, log):
    """Of the whole alone, before and after; each changes gradients."""
    model.register_full_backward_hook(log.of("post", result=lambda *given: tuple(x * 2 for x in given[1])))
    model.register_full_backward_pre_hook(log.of("pre", result=lambda *given: tuple(x * x for x in given[1])))


def hooks_of_the_result(model, log):
    """One of the result, which changes its gradient, and those of argument and result together."""

    def watch(_, args, out):
        out.register_hook(log.of("gradient", result=lambda gradient: gradient * gradient))
        for mode in ("all", "any"):
            graph.register_multi_grad_hook([out, args[0]], log.of(mode), mode=mode)

    model.register_forward_hook(watch)


OWN_HOOKS = (own_forward_hooks, own_backward_hooks, hooks_of_the_result, hooks_of_all_modules, saving_hooks)
PART_HOOKS = (forward_hooks, backward_hooks, hooks_of_values, hooks_of_several_values)
MODULE_HOOKS = [
    (kind, register) for kind in KINDS for register in (*OWN_HOOKS, *(() if kind in COMPILED else PART_HOOKS))
]


@pytest.mark.parametrize("kind, register", MODULE_HOOKS)
@pytest.mark.parametrize("world", [2, 3])
def test_hooks_of_modules_and_values(kind, register, world):
    """Each sees and changes what one device has with this rank's batch; so do gradients."""

    def run(model, x, cotangent, place):
        log = Log()
        handles = register(model, log) or []
        x = place(x.clone()).requires_grad_()
        try:
            (model(x, scale=1.5) * place(cotangent)).sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        return log, whole([x.grad, *(parameter.grad for parameter in model.parameters())])

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        shared = kind in DATA_PARALLEL
        (batches, *_) = batches_of(world)
        runs = [run(Model(), *batch, lambda value: value) for batch in batches]
        log, gradients = runs[mesh.rank] if shared else runs[0]
        if shared:
            gradients = [
                gradients[0],
                *(torch.stack(each).mean(0) for each in zip(*(g[1:] for _, g in runs), strict=True)),
            ]
        place = (lambda value: value) if shared else (lambda value: distribute_tensor(value, mesh))
        mine = run(kind(Model(), mesh), *batches[mesh.rank if shared else 0], place)
        assert_logs_equal(mine[0], log)
        assert_same(mine[1], gradients, "gradients")

    simulate(rank, world, "torch")


@pytest.mark.parametrize("register", PART_HOOKS)
@pytest.mark.parametrize("kind", COMPILED)
def test_hooks_of_parts_of_a_compiled_module_are_refused(kind, register):
    """Graphs do not call submodules: neither before the first call of the whole, nor after it."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        place = (lambda x: x) if kind in DATA_PARALLEL else (lambda x: distribute_tensor(x, mesh))
        for calls in range(2):
            model = kind(Model(), mesh)
            for _ in range(calls):
                model(place(numbers(3, 5)), scale=1.5)
            register(model, Log())
            with pytest.raises(PlanError) as caught:
                model(place(numbers(3, 5)), scale=1.5)
            assert str(caught.value).startswith("compile: up has a hook, ")
            assert str(caught.value).endswith(
                ", which a compiled graph would not call; register it on the compiled module itself, or do not compile"
            )

    simulate(rank, 2, "torch")


class Registering(nn.Module):
    """A layer whose forward registers a hook."""

    def __init__(self, register):
        super().__init__()
        self.up, self.down, self.register = nn.Linear(5, 7), nn.Linear(7, 5), register

    def forward(self, x, *, scale=1.0):
        """``x_BD -> y_BD``."""
        y = self.up(x)
        self.register(self, y)
        return self.down(y * y) * scale


REGISTERED = {
    "register_hook": [
        lambda _, y: y.register_hook(print),
        lambda module, _: module.up.weight.register_hook(print),
        lambda _, y: graph.register_multi_grad_hook([y], print),
        lambda _, y: graph.register_multi_grad_hook([y, y * 2], print, mode="any"),
    ],
    "register_post_accumulate_grad_hook": [
        lambda module, _: module.up.bias.register_post_accumulate_grad_hook(print),
    ],
    "retain_grad": [lambda _, y: y.retain_grad()],
}


@pytest.mark.parametrize("kind", [compiled, compiled_copies])
@pytest.mark.parametrize("name, register", [(name, each) for name, several in REGISTERED.items() for each in several])
def test_hooks_that_a_compiled_forward_registers_are_refused(kind, name, register):
    """They would be called while the graph is traced, and never again."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        model = kind(Registering(register), mesh)
        with pytest.raises(UnsupportedOperatorError) as caught:
            model(distribute_tensor(numbers(3, 5).float(), mesh) if kind is compiled else numbers(3, 5).float())
        assert str(caught.value) == (
            f"compile: forward of Registering calls {name} of a tensor, which a graph would not call again; register "
            "hooks on the result of the compiled module or on its parameters, outside of its forward"
        )

    simulate(rank, 2, "torch")


@pytest.mark.parametrize("kind", COMPILED)
def test_what_a_compiled_forward_saves_goes_through_hooks(kind):
    """Packed as often as unpacked, at each call; and where such hooks are disabled, none is needed."""

    def rank():
        mesh, log = init_device_mesh("cpu", (2,)), Log()
        model = kind(Model(), mesh)
        place = (lambda x: x) if kind in DATA_PARALLEL else (lambda x: distribute_tensor(x, mesh))
        for call in range(1, 3):
            with graph.saved_tensors_hooks(log.of("pack", result=lambda x: x), log.of("unpack", result=lambda x: x)):
                y = model(place(numbers(3, 5, seed=call)), scale=1.5)
            y.sum().backward()
            assert len(log["pack"]) == len(log["unpack"]) > 3 * call
        with graph.disable_saved_tensors_hooks("not here"):
            model(place(numbers(3, 5)), scale=1.5).sum().backward()

    simulate(rank, 2, "torch")


@pytest.mark.parametrize("kind", DATA_PARALLEL)
def test_hooks_are_called_on_every_rank_if_one_has_a_gradient(kind):
    """A rank that did not use a parameter calls its hooks as often as the others, and nobody those of unused ones."""

    def rank():
        mesh = init_device_mesh("cpu", (3,))
        model, log = Model(), Log()
        model.some, model.none = (nn.Parameter(numbers(4, seed=seed)) for seed in (40, 41))
        forward = model.forward
        model.forward = lambda x, **named: forward(x, **named) + (model.some.sum() if mesh.rank == 1 else 0)
        kind(model, mesh)
        gradient_hook(model, None, log)
        for _ in range(2):  # the second gradient is added
            model(numbers(2, 5), scale=0.5).sum().backward()
        assert_same(log["some"], [[[torch.full((4,), 10 / 3, dtype=torch.float64)], {}]] * 2, "some")
        assert_same(whole(model.some.grad), torch.full((4,), 20 / 3, dtype=torch.float64), "gradient")
        assert "none" not in log
        assert model.none.grad is None

    simulate(rank, 3, "torch")


def refused(action, kind=sharded, world=2):
    """The error of ``action(model, mesh)`` on rank 0."""

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        model = kind(Model(), mesh)
        with pytest.raises((PlanError, UnsupportedOperatorError, RuntimeError)) as caught:
            action(model, mesh)
        return str(caught.value)

    return simulate(rank, world, "torch")[0]


_UNREDUCED = {
    sharded: (
        "fully_shard: the gradient of parameter weight of Linear is accumulated under no_sync(), and its hooks would "
        "not be called as on one device; remove them, or use other hooks"
    ),
    averaged: (
        "replicate: a parameter has hooks, which are called with averaged gradients, and those of this backward are "
        "accumulated under no_sync(); remove the hooks, or let each backward reduce"
    ),
}


@pytest.mark.parametrize("kind, why", _UNREDUCED.items())
def test_hooks_with_gradients_that_are_not_reduced_are_refused(kind, why):
    """Under no_sync nobody has the gradient of one device."""

    def action(model, mesh):
        model.up.weight.register_hook(lambda gradient: gradient)
        with no_sync(model):
            model(numbers(2, 5), scale=1).sum().backward()

    assert refused(action, kind) == why


def test_hooks_with_a_gradient_around_the_module_are_refused():
    """A shard that is used by itself gets part of its gradient from autograd, where the reduction adds the rest."""

    def action(model, mesh):
        model.up.weight.register_post_accumulate_grad_hook(print)
        (model(numbers(2, 5), scale=1).sum() + model.up.weight.square().sum().full_tensor()).backward()

    assert refused(action) == (
        "fully_shard: parameter weight of Linear got a gradient outside of the forward of its module, and its hooks "
        "would not be called as on one device; remove them, or use other hooks"
    )


def test_hooks_registered_in_forward_are_refused():
    """Inside of its module's forward a parameter is whole, and its gradient this rank's."""

    def action(model, mesh):
        model.up.register_forward_pre_hook(lambda up, _: up.bias.register_hook(print) and None)
        model(numbers(2, 5), scale=1).sum().backward()

    assert refused(action) == (
        "fully_shard: parameter bias of Linear got hooks in the forward of its module, and its hooks would not be "
        "called as on one device; remove them, or use other hooks"
    )


@pytest.mark.parametrize(
    "kind, place, event",
    [
        (sharded, "up.bias", "fully_shard"),
        (tensor_parallel, "bias of up (Linear)", "it was placed on the mesh"),
        (distributed, "bias of Linear", "it was placed on the mesh"),
    ],
)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_that_is_replaced_are_refused(kind, place, event, register):
    """Nobody would call them."""

    def action(model, mesh):
        other = Model()
        getattr(other.up.bias, register)(print)
        kind(other, mesh)

    assert refused(action) == (
        f"parameter {place} has hooks, which would not be called for the parameter that replaces it; register them "
        f"after {event}"
    )


def test_hooks_from_before_replicate_are_called():
    """Its parameters stay, with their hooks."""

    def rank():
        mesh, log = init_device_mesh("cpu", (2,)), Log()
        model = Model()
        gradient_hook(model, None, log)
        averaged(model, mesh)(numbers(2, 5, seed=mesh.rank), scale=1).sum().backward()
        for name, parameter in model.named_parameters():
            assert_same(log[name], [[[parameter.grad], {}]], name)

    simulate(rank, 2, "torch")


def test_hooks_that_return_something_else_are_refused():
    """As autograd does."""

    def action(model, mesh):
        model.up.weight.register_hook(lambda gradient: gradient[:1])
        model(numbers(2, 5), scale=1).sum().backward()

    assert refused(action, averaged) == "hook '<lambda>' must return a tensor of shape [7, 5]"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [sharded, sharded_parts, compiled_shards])
def test_backward_into_some_parameters_of_fully_shard_gives_these_their_gradients(kind, world):
    """``backward(inputs=)`` changes only those that it names and calls their hooks, as on one device."""
    chosen = ("up.bias", "down.weight")
    batches = [numbers(3, 5, seed=index) for index in range(world)]

    def train(model, batch):
        log = Log()
        for name in ("down.weight", "down.bias"):
            model.get_parameter(name).register_hook(log.of(name))
        for scale in (1, 2):  # a compiled module is traced in the first
            loss = model(batch, scale=scale).square().mean() + whole_sum(model.up.bias)
            loss.backward(inputs=[model.get_parameter(name) for name in chosen])
        return {**log, **{f"{name}.grad": whole(parameter.grad) for name, parameter in model.named_parameters()}}

    def whole_sum(parameter):
        total = parameter.square().sum()
        return total.full_tensor() if isinstance(total, DTensor) else total

    def rank():
        mesh = init_device_mesh("cpu", (world,))
        return train(kind(Model(), mesh), batches[mesh.rank])

    expected = train(Model(), torch.cat(batches))
    assert "down.bias" not in expected
    for gradients in simulate(rank, world, "torch"):
        assert_same(gradients, expected, "gradients")


@pytest.mark.parametrize("options", [{}, {"allow_unused": True}])
def test_returned_gradients_of_parameters_of_fully_shard_are_refused(options):
    """Nobody reduces gradients that are not accumulated; what a shard by itself gets is not one of those."""

    def action(model, mesh):
        loss = model.up.weight.square().sum()
        (gradient,) = torch.autograd.grad(loss, [model.up.weight])
        assert_same(whole(gradient), whole(model.up.weight * 2), "of the shards")
        torch.autograd.grad(model(numbers(2, 5), scale=1).sum(), list(model.parameters()), **options)

    assert refused(action) == (
        "torch.autograd.grad: gradients of parameters of fully_shard are reduced into their grad; call "
        "backward(inputs=...), and read grad"
    )


@pytest.mark.parametrize("kind", [sharded, averaged])
def test_hooks_on_several_parameters_are_refused(kind):
    """They count nodes of the graph, which end before gradients are reduced."""
    message = refused(lambda model, _: graph.register_multi_grad_hook(list(model.parameters()), print), kind)
    assert message == (
        "register_multi_grad_hook: a parameter of fully_shard or replicate has its gradient after the graph has run; "
        "call register_hook on each tensor"
    )


def test_nodes_of_the_graph_can_be_read_and_have_no_hooks():
    """They are of local operations, of which those of operands are read from them; their hooks would be local."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(numbers(3, 5), mesh, [Shard(0)]).requires_grad_()
        y = x * 2
        assert isinstance(y.grad_fn, graph.Node)
        assert y.grad_fn.name() == "MulBackward0"
        assert y.grad_fn == y.grad_fn
        ((leaf, _), *_) = y.grad_fn.next_functions
        for node, name in ((y.grad_fn, "MulBackward0"), (leaf, "torch::autograd::AccumulateGrad")):
            for register in (node.register_hook, node.register_prehook):
                with pytest.raises(UnsupportedOperatorError) as caught:
                    register(print)
                assert str(caught.value) == (
                    f"{register.__name__} of grad_fn of a DTensor: {name} is the node of a local operation, whose "
                    "hooks would see local gradients; call register_hook on the DTensor"
                )
        with pytest.raises(UnsupportedOperatorError) as caught:
            graph.get_gradient_edge(y)
        assert str(caught.value) == (
            "get_gradient_edge of a DTensor: the graph is one of local tensors; use torch.autograd.grad with the "
            "tensor, or its register_hook"
        )

    simulate(rank, 2, "torch")
