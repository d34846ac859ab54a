"""Tensors that wait for a collective when they are first read."""

from __future__ import annotations

import pytest

from hyper_parallel.transport.work import Work

pytestmark = pytest.mark.platforms("torch")


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
