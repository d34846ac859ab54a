"""How a compiled region runs: which operators are left of what was traced, and the node of autograd that runs them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel
from hyper_parallel.platform.torch import region_graph, region_run

pytestmark = pytest.mark.platforms("torch")


class Attention(nn.Module):
    """Operators that leave many views: products of matrices of several dims, and heads that are moved."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x):
        """``x_BLD -> y_BLD``."""
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 2, 3).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return torch.tanh(self.out(mixed.transpose(1, 2).reshape(batch, length, 6)))


def two_views(y):
    """Two views of one tensor."""
    return y.t(), y.view(-1)


def result_and_views(y):
    """A tensor and two of its views."""
    return y, y.detach(), y.t()


WAYS = {
    "new": lambda x, w: (x * w).exp(),
    "a sum": lambda x, w: x + w,
    "a view": lambda x, w: (x * w).t(),
    "a view of a view": lambda x, w: (x * w).view(-1, 1).view(-1),
    "two views of one": lambda x, w: two_views(x * w),
    "a result and its views": lambda x, w: result_and_views((x * w).tanh()),
    "the same twice": lambda x, w: (x * w,) * 2,
    "the argument": lambda x, w: (x, x * w),
    "a view of the argument": lambda x, w: (x.t(), x * w),
    "one that needs no gradient": lambda x, w: (x * w, (x > 0).to(x.dtype), x.detach() * 2),
    "nothing that needs one": lambda x, w: (x.detach() * w.detach(), x > 0),
    "turned and turned back": lambda x, w: ((x.t().t() * w).t().t() @ w.view(-1, 1).expand(-1, 1), w.t().t() + x),
    "a strided view": lambda x, w: (x * w).as_strided((2, 2), (1, 2)).exp(),
    "parts": lambda x, w: tuple((x * w).sin().unbind(0)),
}


class Ways(nn.Module):
    """One of several kinds of results, of which most alias something."""

    def __init__(self, way):
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        """Of ``x`` of shape (3, 4)."""
        return WAYS[self.way](x, self.weight)


def rounds(way, *, compiled, grad, seeded=lambda seed: seed, after=lambda y: y * 1):
    """Values and gradients of three calls."""
    module, found = Ways(way), []
    module = hyper_parallel.compile(module) if compiled else module
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(3, 4, requires_grad=grad)
        with torch.set_grad_enabled(grad):
            outputs = module(x)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        found += [output.detach().clone() for output in outputs]
        used = [after(output) for output in outputs if output.requires_grad]
        assert bool(used) == (grad and way != "nothing that needs one")
        if used:
            seeds = [seeded(torch.rand(output.shape)) for output in used]
            found += torch.autograd.grad(used, [x, module.weight], seeds, allow_unused=True)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_results_that_alias_have_the_values_of_the_uncompiled_module(way):
    """Whatever results share memory with, values, gradients and their absence are those of the uncompiled module."""
    strided = {"seeded": lambda seed: torch.stack([seed, seed], -1)[..., 0]}
    for options in ({"grad": True}, {"grad": True, **strided}, {"grad": False}):
        for mine, theirs in zip(*(rounds(way, compiled=how, **options) for how in (True, False)), strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("way", ["a sum", "a view", "a view of a view"])
def test_results_may_be_written_to(way):
    """An operator that writes to a result of the compiled module has the gradients that it has uncompiled."""
    mine, theirs = (rounds(way, compiled=how, grad=True, after=lambda y: y.mul_(2)) for how in (True, False))
    assert all(map(torch.equal, mine, theirs))


def graph_sizes(monkeypatch, module, x):
    """Numbers of operators of forward and backward."""
    sizes, original = [], region_graph._function_of

    def counting(graph):
        sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return original(graph)

    monkeypatch.setattr(region_graph, "_function_of", counting)
    hyper_parallel.compile(module)(x)
    return sizes[:2]


def test_operators_that_change_nothing_are_left_out(monkeypatch):
    """Views that equal another tensor of the graph are no calls; products, which are, have the same bits."""
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 5, 6, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    assert graph_sizes(monkeypatch, module, x) == [34, 42]
    got = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    assert all(map(torch.equal, got, expected))


class Recorder(TorchDispatchMode):
    """Keeps the operators that are called."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note and call."""
        self.called.append(func)
        return func(*args, **kwargs or {})


_X, _BATCH = torch.ones(2, 3), torch.ones(2, 3, 3)
_ARGUMENTS = {
    "add": [(_X, _X), (_X, 2), (_X, 0.5)],
    "mul": [(_X, _X), (_X, 2), (_X, 0.5)],
    "as_strided": [(_X, [3], [1]), (_X, [3], [1], 2)],
    "as_strided_copy": [(_X, [3], [1]), (_X, [3], [1], 2)],
    "bmm": [(_BATCH, _BATCH)],
    "clone": [(_X,)],
    "expand": [(_X, [4, 2, 3])],
    "mm": [(_X, _X.T)],
    "native_layer_norm": [(_X, [3], None, None, 1e-5), (_X, [3], _X[0], _X[0], 1e-5)],
    "t": [(_X,)],
    "transpose": [(_X, 0, 1), (_X, -2, -1)],
    "view": [(_X, [6]), (_X, [3, -1])],
}


@pytest.mark.parametrize("overload", region_graph._PUBLIC, ids=str)
def test_public_functions_call_just_the_operator(overload):
    """The functions that stand for operators in generated code call these operators, once, whatever the arguments."""
    for arguments in _ARGUMENTS[overload.name().removeprefix("aten::").partition(".")[0]]:
        with Recorder() as recorder:
            result = region_graph._PUBLIC[overload](*arguments)
        assert recorder.called == [overload]
        for mine, theirs in zip(
            *(each if isinstance(each, tuple) else [each] for each in (result, overload(*arguments))), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_backward_empties_what_it_takes():
    """What forward saved is freed after the operator that reads it last, unless the graph is retained."""
    given = []

    def backward(taken):
        given.append(taken)
        gradients = [taken[0] * taken[1], None]
        taken.clear()
        return gradients

    x, other = torch.ones(3, requires_grad=True), torch.ones(2)
    halves = region_run.Halves(lambda inputs: [inputs[0] * 2, inputs[0] + 4], 2, 1, backward, [(1,)])
    run = region_run.single_node(halves, [x, other], [x * 2])
    run(x, other)[0].sum().backward()
    assert x.grad.tolist() == [5, 5, 5]
    assert given == [[]]
