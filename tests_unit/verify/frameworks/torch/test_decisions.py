"""Operators that choose are recorded as rows, and return what the reference chose if they are asked to."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.verify.frameworks.torch.decisions import decided, pooled

pytestmark = pytest.mark.platforms("torch")

CALLS = {
    "topk": lambda x: (torch.topk, (x, 2), {}),
    "topk of a dim": lambda x: (torch.Tensor.topk, (x, 2, 0), {}),
    "topk by name": lambda x: (torch.topk, (), {"input": x, "k": 3, "dim": 1, "largest": False}),
    "sort": lambda x: (torch.sort, (x,), {}),
    "sort of a dim": lambda x: (torch.sort, (x, 0, True), {}),
    "stable sort": lambda x: (torch.sort, (x,), {"stable": True, "dim": 1}),
    "argsort": lambda x: (torch.argsort, (x, -2), {}),
    "argmax": lambda x: (torch.argmax, (x, 1), {}),
    "argmax of all": lambda x: (torch.argmax, (x,), {}),
    "argmin that keeps its dim": lambda x: (torch.argmin, (x,), {"dim": 0, "keepdim": True}),
    "max": lambda x: (torch.max, (x, 1), {}),
    "min that keeps its dim": lambda x: (torch.Tensor.min, (x, 0, True), {}),
}


def indices_of(result):
    """Return the indices of an operator's result."""
    return result if isinstance(result, torch.Tensor) else result.indices


@pytest.mark.parametrize("call", CALLS)
def test_indices_are_replaced_and_values_gathered(call):
    """The result of another input's choice is the values of this input there, with its gradients."""
    torch.manual_seed(0)
    x, other = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    operator, args, kwargs = CALLS[call](x)
    seen = []

    def record(name, scores, chosen, dim):
        seen.append((name, scores, chosen, dim))
        return None if len(seen) == 1 else wanted

    plain = decided(operator, operator.__name__, record, args, kwargs)
    (_, scores, chosen, dim) = seen[0]
    assert torch.equal(indices_of(plain).reshape(-1), chosen.reshape(-1))
    assert scores.dim() == chosen.dim()
    flat = scores.dim() == 1
    moved = torch.equal(scores, x.reshape(-1) if flat else x)
    assert moved
    elsewhere = CALLS[call](other)
    found = indices_of(elsewhere[0](*elsewhere[1], **elsewhere[2]))
    wanted = found.reshape(chosen.shape)
    replaced = decided(operator, operator.__name__, record, args, kwargs)
    assert torch.equal(indices_of(replaced), found)
    if not isinstance(replaced, torch.Tensor):
        assert type(replaced) is type(plain)
        assert torch.equal(replaced.values.reshape(-1), torch.gather(x, dim, wanted).reshape(-1))
        g = torch.randn_like(replaced.values)
        (gradient,) = torch.autograd.grad((replaced.values * g).sum(), x)
        assert torch.equal(gradient, torch.zeros_like(x).scatter_add(dim, wanted, g.reshape(wanted.shape)))


@pytest.mark.parametrize(
    "call",
    [
        (torch.max, (torch.ones(3),), {}),
        (torch.max, (torch.ones(3), torch.zeros(3)), {}),
        (torch.argsort, (torch.arange(4),), {}),
        (torch.argmax, (torch.ones(1),), {}),
        (torch.argmax, (torch.ones(3, device="meta"),), {}),
        (torch.topk, (torch.ones(3), 1), {"out": (torch.ones(1), torch.ones(1, dtype=torch.int64))}),
        (torch.argmax, (torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {})),), {}),
    ],
    ids=["one number", "of two tensors", "integers", "one element", "meta", "out", "subclass"],
)
def test_what_is_no_decision_is_not_recorded(call):
    """Extrema without indices, integers, single elements, results that are given, and subclasses are left alone."""
    operator, args, kwargs = call
    decided(operator, operator.__name__, lambda *_: pytest.fail("recorded"), args, kwargs)


WINDOWS = {
    "1d": ("max_pool1d_with_indices", (3, 4, 9), (2, 2)),
    "2d, padded and overlapping": ("max_pool2d_with_indices", (2, 3, 7, 5), (3, 2, 1)),
    "2d of one sample": ("max_pool2d_with_indices", (3, 7, 5), (2,)),
    "3d, dilated": ("max_pool3d_with_indices", (2, 2, 5, 6, 7), (2, 1, 0, 2)),
    "adaptive": ("adaptive_max_pool2d_with_indices", (2, 3, 7, 5), ((3, 2),)),
}


@pytest.mark.parametrize("windows", WINDOWS)
def test_maxima_of_windows_are_replaced_with_their_gradients(windows):
    """A sample is a row of numbers; with the places of another input's maxima, values and gradients are from there."""
    name, shape, args = WINDOWS[windows]
    operator = getattr(F, name)
    torch.manual_seed(0)
    x, other = torch.randn(shape, requires_grad=True), torch.randn(shape)
    seen = []

    def record(kind, samples, chosen, dim):
        seen.append((kind, samples, chosen))
        assert dim == 1
        return None if len(seen) == 1 else wanted

    values, indices = pooled(operator, name, record, (x, *args), {})
    assert torch.equal(values, operator(x, *args)[0])
    assert torch.equal(indices, operator(x, *args)[1])
    kind, samples, chosen = seen[0]
    assert f"{kind}_with_indices" == name
    assert torch.equal(samples.gather(1, chosen).reshape(values.shape), values)
    elsewhere = operator(other, *args)[1]
    wanted = chosen + (elsewhere - indices).reshape(chosen.shape)
    values, indices = pooled(operator, name, record, (x, *args), {})
    assert torch.equal(indices, elsewhere)
    assert torch.equal(values.reshape(-1), samples.gather(1, wanted).reshape(-1))
    g = torch.randn_like(values)
    (gradient,) = torch.autograd.grad((values * g).sum(), x)
    expected = torch.zeros(samples.shape).scatter_add(1, wanted, g.reshape(wanted.shape))
    assert torch.allclose(gradient, expected.reshape(shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [torch.randn(2, 3, 8), torch.ones(1, 1, 1, requires_grad=True)], ids=["constant", "one"])
def test_maxima_without_a_gradient_are_not_recorded(x):
    """What max-pooling returns does not jump: without a gradient, or of one number, nothing is decided."""
    pooled(torch.max_pool1d, "max_pool1d", lambda *_: pytest.fail("recorded"), (x, 1), {})
