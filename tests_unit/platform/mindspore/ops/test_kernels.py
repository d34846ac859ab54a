"""Tensors of one value, and writes into parts of tensors, both of which MindSpore's own operators get wrong."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.errors import (
    UnsupportedOperatorError,
)
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def test_a_constant_has_the_value_it_was_given():
    """Of the dtype that Python's numbers have where none is said, and of every dtype that has the value."""
    platform = platform_named("mindspore")
    wide = {"int64": 2**62 + 1, "float64": 0.1, "complex64": 1 + 2j, "complex128": 0.1 - 2j, "bfloat16": 2.5}
    for dtype, value in {**wide, "float32": 2.5, "bool": True, "int32": 7, "float16": float("inf")}.items():
        kind = platform.str_to_dtype(dtype)
        for made in (platform.full((2,), value, kind), platform.full_like(platform.zeros((2,)), value, kind)):
            assert made.dtype == kind
            np.testing.assert_array_equal(platform.tensor_to_numpy(made), np.full(2, value))
    for dtype, value in {"float32": 2.5, "int64": 3, "bool": True, "complex64": 1 + 2j}.items():
        made = platform.full((2, 0, 3) if value is True else (), value)
        assert made.dtype == platform.str_to_dtype(dtype)
        np.testing.assert_array_equal(platform.tensor_to_numpy(made), np.full(made.shape, value))


@pytest.mark.parametrize("value, dtype", [(1 + 2j, "Float32"), (float("inf"), "Int64"), (float("nan"), "Int8")])
def test_a_value_that_the_dtype_lacks_is_refused(value, dtype):
    """An imaginary part or an infinity is not dropped."""
    platform = platform_named("mindspore")
    with pytest.raises(ValueError, match="full: ") as caught:
        platform.full((2,), value, platform.str_to_dtype(dtype.lower()))
    assert str(caught.value) == f"full: {value} is no {dtype}; give a dtype that has it"


def _constants():
    from mindspore import Tensor, ops

    given = Tensor.from_numpy(np.ones((3, 2), np.complex64))
    x = distribute_tensor(given, init_device_mesh("cpu", (2,)), [Shard(0)])
    return [made.full_tensor().asnumpy() for made in (ops.full_like(x, 1 + 2j), ops.ones_like(x))]


def test_constants_like_complex_dtensors_are_complex():
    """Each rank's piece has the imaginary part, too."""
    for full_like, ones_like in simulate(_constants, 2, "mindspore"):
        np.testing.assert_array_equal(full_like, np.full((3, 2), 1 + 2j, np.complex64))
        np.testing.assert_array_equal(ones_like, np.ones((3, 2), np.complex64))


PARTS = {
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:3],
    "transposed": lambda x: x.transpose(1, 0),
    "element": lambda x: x[1][2],
}


BEFORE = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def _twice(array, name):
    """``array``, of which this part is doubled."""
    want = array.copy()
    part = want[1:2, 2:3] if name == "element" else PARTS[name](want)
    part[...] = part * 2
    return want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("name", PARTS)
def test_members_write_into_parts_of_tensors(name, dtype):
    """Parameters, gradients and buffers that are parts of a larger tensor get the values they are given."""
    platform = platform_named("mindspore")
    kind = platform.str_to_dtype(dtype)
    two = platform.full((), 2.0, kind)
    for write in (
        lambda x: platform.update_param_data(x, x * two),
        lambda x: platform.load_into_param(x, x * two),
        lambda x: platform.set_gradient(x, x * two),
        lambda x: platform.scale_(x, two),
        lambda x: platform.fill_(x, x * two),
    ):
        whole = platform.from_numpy(BEFORE).astype(kind)
        write(PARTS[name](whole))
        np.testing.assert_array_equal(platform.tensor_to_numpy(whole), _twice(BEFORE, name))


def test_gradients_that_are_parts_of_a_buffer_are_clipped():
    """Their norm afterwards is the largest that was allowed; what else the buffer holds stays."""
    platform = platform_named("mindspore")
    buffer = platform.from_numpy(BEFORE)
    norm = platform.clip_grad_norm_([buffer[1:3]], 1.0)
    assert float(norm.asnumpy()) == pytest.approx(np.linalg.norm(BEFORE[1:3]))
    np.testing.assert_array_equal(buffer.asnumpy()[0], BEFORE[0])
    assert np.linalg.norm(buffer.asnumpy()[1:3]) == pytest.approx(1.0, rel=1e-5)


def _written():
    """DTensors whose pieces are parts of larger tensors, after writes of every kind, and their gradients."""
    import mindspore
    from mindspore import ops

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, part in list(PARTS.items())[:3]:
        for placement in (Shard(0), Replicate()):
            for kind, write in {
                "mul_": lambda x: x.mul_(2.0),
                "copy_": lambda x: x.copy_(x * 2.0),
                "assign": lambda x: ops.assign(x, x * 2.0),
            }.items():
                whole = platform.from_numpy(BEFORE)
                x = DTensor.from_local(part(whole), mesh, [placement])
                write(x)
                found[name, str(placement), kind] = whole.asnumpy()

    def loss(whole):
        owned = whole * 1.0
        x = DTensor.from_local(owned[1:3], mesh, [Replicate()])
        x.mul_(3.0)
        return (owned * owned).sum()

    gradient = mindspore.grad(loss)(platform.from_numpy(BEFORE)).asnumpy()
    with pytest.raises(UnsupportedOperatorError) as caught:
        mindspore.grad(loss)(platform.from_numpy(BEFORE).astype(mindspore.bfloat16))
    return found, gradient, str(caught.value)


def test_dtensors_of_parts_are_written():
    """A DTensor made from a part of a tensor is written where it lies, and gradients flow through the write."""
    for found, gradient, refused in simulate(_written, 2, "mindspore"):
        for (name, placement, kind), array in found.items():
            np.testing.assert_array_equal(array, _twice(BEFORE, name), err_msg=f"{name}, {placement}, {kind}")
        factors = np.array([[2], [18], [18]], np.float32)
        np.testing.assert_allclose(gradient, BEFORE * factors, rtol=1e-6)
        assert refused == (
            "a part of a bfloat16 tensor cannot be written where gradients flow; use the out-of-place form"
        )
