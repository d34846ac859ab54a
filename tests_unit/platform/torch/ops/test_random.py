"""Random operators of PyTorch: kernels on plain tensors, and dropout of whole channels."""

import pytest
import torch

from hyper_parallel import Shard, distribute_tensor, init_device_mesh
from hyper_parallel.platform.torch.ops.registry import local_op
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

DROPOUTS = ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@pytest.mark.parametrize("name", ["rand_like", "randn_like"])
def test_kernels_sample_like_their_operand(name):
    """A kernel that samples on plain tensors gives the shape and dtype of its operand."""
    sampled = local_op(name)(x=torch.zeros(3, 5, dtype=torch.float64))
    assert (sampled.shape, sampled.dtype) == ((3, 5), torch.float64)
    assert sampled.unique().numel() > 1


def test_kernels_sample_integers_and_flags():
    """Integers lie in the half-open range, and a probability of 0 or 1 leaves no choice."""
    integers = local_op("randint_like")(x=torch.zeros(40), low=2, high=4, dtype=torch.int64)
    assert set(integers.tolist()) <= {2, 3}
    assert integers.dtype == torch.int64
    assert local_op("bernoulli")(x=torch.tensor([0.0, 1.0]), generator=None).tolist() == [0.0, 1.0]


def test_operators_that_their_rule_samples_have_no_kernel():
    """An operator whose numbers the plan samples is never run on a plain local tensor."""
    with pytest.raises(AssertionError, match="sampled by their rule"):
        local_op("uniform")(torch.zeros(2))


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_that_drops_nothing_returns_its_operand(name):
    """Outside of training, or with probability 0, dropout returns the operand, in both forms."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.arange(30.0).reshape(3, 2, 5), mesh, [Shard(0)])
        functions = (getattr(torch, name), getattr(torch, f"{name}_"))
        return [function(x, p, train) is x for function in functions for p, train in ((0.5, False), (0.0, True))]

    assert simulate(body, 2, platform="torch") == [[True] * 4] * 2


@pytest.mark.parametrize("name", DROPOUTS)
def test_both_forms_of_dropout_agree(name):
    """With probability 1 the function and its in-place form give the same tensor, on every rank."""

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        whole = torch.arange(1.0, 41.0).reshape(4, 2, 5)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        dropped = getattr(torch, name)(x, 1.0, True)
        written = getattr(torch, f"{name}_")(x.clone(), 1.0, True)
        plain = getattr(torch, name)(whole, 1.0, True)
        return [torch.equal(value.full_tensor(), plain) for value in (dropped, written)]

    assert simulate(body, 3, platform="torch") == [[True, True]] * 3


def test_dropout_refuses_what_pytorch_refuses():
    """A probability outside [0, 1], and channels of a vector, are errors with PyTorch's words."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        messages = []
        for call in (lambda: torch.alpha_dropout(x, 1.5, True), lambda: torch.feature_dropout(x, 0.5, True)):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    expected = [
        "dropout probability has to be between 0 and 1, but got 1.5",
        "Feature dropout requires at least 2 dimensions in the input",
    ]
    assert simulate(body, 2, platform="torch") == [expected] * 2
