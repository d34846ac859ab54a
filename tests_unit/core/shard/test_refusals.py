"""A value of the other framework among the operands is refused with the names of both."""

import numpy as np
import pytest

from hyper_parallel import Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.shard.refusals import check_framework
from hyper_parallel.errors import ArgumentTypeError
from hyper_parallel.platform.select import framework_of, use_platform

TO_TORCH = "convert a tensor first, as in torch.as_tensor(value.asnumpy())"
TO_MINDSPORE = "convert a tensor first, as in mindspore.Tensor(value.detach().numpy())"

MET = "was called with DTensors of"


def made(module):
    """Return an object of a class Tensor of a module."""
    return type("Tensor", (), {"__module__": module})()


def test_a_value_belongs_to_the_framework_of_its_type():
    """Bases count, and values of neither framework belong to none."""
    tensor = made("mindspore.common.tensor")
    assert framework_of(tensor) == "mindspore"
    assert framework_of(type("Mine", (type(tensor),), {})()) == "mindspore"
    assert framework_of(type(tensor)) == "mindspore"
    assert framework_of(3) == framework_of("torch") == framework_of(made("torchvision")) == ""


def test_the_other_frameworks_value_is_named():
    """The error has the operator, the framework that it runs on, the value's type and framework, and the fix."""
    check_framework("add", "torch", [1, None, made("torch"), np.ones(2)])
    with pytest.raises(ArgumentTypeError) as caught:
        check_framework("add", "torch", [1, made("mindspore.common.tensor")])
    assert isinstance(caught.value, TypeError)
    assert str(caught.value) == (f"add was called with DTensors of torch and with a Tensor of mindspore; {TO_TORCH}")
    with pytest.raises(
        ArgumentTypeError, match=r"matmul was called with DTensors of mindspore and with a Tensor of torch; convert"
    ):
        check_framework("matmul", "mindspore", [made("torch")])


@pytest.mark.platforms("torch", "mindspore", together=True)
def test_operators_refuse_the_other_frameworks_tensors():
    """A plain tensor and a DTensor of the other framework are refused on each, also after a call that was right."""
    import mindspore
    import torch

    def distributed(tensor, name):
        with use_platform(name):
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
            return distribute_tensor(tensor, mesh, [Shard(0)])

    plain, other = torch.arange(4.0), mindspore.Tensor(np.arange(4.0, dtype=np.float32))
    x, y = distributed(plain, "torch"), distributed(other, "mindspore")
    assert (x + x).full_tensor().tolist() == (y + y).full_tensor().asnumpy().tolist() == [0, 2, 4, 6]
    for call, text in {
        lambda: x + other: f"__add__ {MET} torch and with a Tensor of mindspore; {TO_TORCH}",
        lambda: x.mul_(other): f"mul_ {MET} torch and with a Tensor of mindspore; {TO_TORCH}",
        lambda: x + y: f"__add__ {MET} torch and with a MindSporeDTensor of mindspore; {TO_TORCH}",
        lambda: y + plain: f"add {MET} mindspore and with a Tensor of torch; {TO_MINDSPORE}",
        lambda: y + x: f"add {MET} mindspore and with a TorchDTensor of torch; {TO_MINDSPORE}",
    }.items():
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        assert str(caught.value) == text
