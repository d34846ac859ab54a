"""Tensors of MindSpore and host arrays: values reach the memory of a tensor, whatever device it is on."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.platforms("mindspore")


@pytest.fixture
def copies(monkeypatch):
    """Let this process seem to compute on Ascend: the array of a tensor is a copy there, and nothing is moved."""
    import mindspore

    from hyper_parallel.transport.frontends.mindspore_comm import host

    plain = mindspore.Tensor.asnumpy
    monkeypatch.setattr(host, "_CONTEXT", SimpleNamespace(get_param=lambda _: "Ascend"))
    monkeypatch.setattr(mindspore.Tensor, "asnumpy", lambda x: plain(x).copy())
    monkeypatch.setattr(mindspore.Tensor, "to", lambda x, place: x if place == "Ascend" else None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_values_reach_a_tensor_of_a_device(copies, dtype):
    """What is received, and what a perturbation changes, is written by a copy: the array would lose it silently."""
    import mindspore
    from mindspore import Tensor

    from hyper_parallel.transport.frontends.mindspore_comm.host import from_host, on_accelerator, to_host, write

    del copies
    kind = getattr(mindspore, dtype + "_" * (dtype == "bool"))
    values = to_host(Tensor([[1, 0, 3], [0, 5, 6]], kind))
    target = Tensor([[0, 0, 0], [0, 0, 0]], kind)
    assert on_accelerator()
    to_host(target)[...] = values
    assert not np.array_equal(to_host(target), values)
    write(target, values, "irecv")
    assert np.array_equal(to_host(target), values)
    assert np.array_equal(to_host(from_host(values.copy())), values)
    write(Tensor(np.zeros((0, 2), "float32")), np.zeros((0, 2), "float32"), "irecv")


def test_bfloat16_is_refused_under_another_numpy(monkeypatch):
    """Where NumPy cannot take bfloat16 from MindSpore, both ways say so with the fix; other dtypes pass."""
    import mindspore

    from hyper_parallel.errors import UnsupportedOnBackend
    from hyper_parallel.transport.frontends.mindspore_comm import host
    from hyper_parallel.transport.host.numpy_ops import BFLOAT16

    monkeypatch.setattr(host, "_NATIVE_BFLOAT16", None)
    text = (
        f"MindSpore {mindspore.__version__} cannot exchange bfloat16 with NumPy {np.__version__}: MindSpore was built "
        "with a different major version of NumPy; pip install 'numpy<2', or convert the tensor to float32"
    )
    for refused in (
        lambda: host.to_host(mindspore.Tensor([1.5], mindspore.bfloat16)),
        lambda: host.from_host(np.zeros(3, BFLOAT16)),
    ):
        with pytest.raises(UnsupportedOnBackend) as caught:
            refused()
        assert str(caught.value) == text
    np.testing.assert_array_equal(host.to_host(host.from_host(np.arange(3.0))), np.arange(3.0))
