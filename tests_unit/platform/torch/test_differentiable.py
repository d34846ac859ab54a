"""Differentiation by PyTorch's tape, and tensors that wait for a collective when they are first read."""

from __future__ import annotations

import pytest

from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.transport.work import Work

pytestmark = pytest.mark.platforms("torch")


def test_vjp_pulls_back_every_cotangent():
    """A vector-Jacobian product sums over all outputs with their cotangents."""
    import torch

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    seeds = [torch.tensor([1.0, -1.0]), torch.tensor([2.0, 5.0])]
    outs, grads = get_torch_platform().vjp(lambda a, b: [a * b, a + b], [x, y], seeds, [True, True])
    assert [tensor.tolist() for tensor in outs] == [[3, 8], [4, 6]]
    assert [tensor.tolist() for tensor in grads] == [[5, 1], [3, 3]]


def test_unwanted_and_unused_inputs_differ():
    """An input without request has None, an unused one zeros, and the inputs are unchanged."""
    import torch

    inputs = [torch.ones(2), torch.ones(2), torch.ones(2)]
    _, grads = get_torch_platform().vjp(lambda a, b, _: [a * b], inputs, [torch.ones(2)], [True, False, True])
    assert grads[0].tolist() == [1, 1]
    assert grads[1] is None
    assert grads[2].tolist() == [0, 0]
    assert not any(tensor.requires_grad for tensor in inputs)


def test_seeds_may_wait_for_the_outputs():
    """Seeds may be a function of the outputs; an output without a seed, or without gradient, is left out."""
    import torch

    x = torch.tensor([1.0, 2.0])
    _, grads = get_torch_platform().vjp(
        lambda a: [a * a, a.argmax()], [x], lambda outs: [torch.full_like(outs[0], 2.0), None], [True]
    )
    assert grads[0].tolist() == [4, 8]
    assert get_torch_platform().vjp(lambda a: [a > 0], [x], [None], [True])[1][0].tolist() == [0, 0]


# -- tensors of collectives in flight ---------------------------------------------------------------------------------


def started():
    """A leaf, a tensor on its graph whose values arrive at the first wait, and the list of waits."""
    import torch

    from hyper_parallel.platform.torch.differentiable import async_tensor

    leaf, waits = torch.zeros(2, 3, requires_grad=True), []
    output = leaf * 1

    def arrive():
        waits.append(1)
        output.detach().fill_(7)

    return leaf, async_tensor(output, Work("all_to_all", arrive)), waits


def test_metadata_does_not_wait():
    """Reading metadata does not wait for the values."""
    _, x, waits = started()
    assert (tuple(x.shape), x.dtype.is_floating_point, x.requires_grad, x.size(0), x.ndim) == ((2, 3), True, True, 2, 2)
    assert waits == []


@pytest.mark.parametrize(
    "use",
    [
        lambda x: (x + 1) - 1,
        lambda x: x.reshape(3, 2),
        lambda x: x[0],
        lambda x: __import__("torch").cat([x, x]),
        lambda x: __import__("torch").nn.functional.relu(x) + 0,
        lambda x: x.detach().numpy() * 1,
        lambda x: x.to_sparse().to_dense(),
    ],
)
def test_the_first_use_waits_once(use):
    """The first operation waits and gives a plain tensor of the values; later ones do not wait."""
    import torch

    _, x, waits = started()
    values = use(x)
    assert type(values) is torch.Tensor or not isinstance(values, torch.Tensor)
    assert (values == 7).all()
    use(x)
    assert waits == [1]


def test_gradients_pass():
    """Gradients pass from a waiting tensor to the collective's input."""
    leaf, x, _ = started()
    (x * 3).sum().backward()
    assert leaf.grad.unique().tolist() == [3]


def test_functions_of_the_user_wait():
    """A custom autograd function waits for the values of its arguments."""
    import torch

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # noqa: ARG004 - the signature is PyTorch's
            """Twice."""
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # noqa: ARG004 - the same
            """Twice."""
            return grad * 2

    leaf, x, waits = started()
    out = Double.apply(x)
    assert out.detach().unique().tolist() == [14]
    out.sum().backward()
    assert waits == [1]
    assert leaf.grad.unique().tolist() == [2]
