"""Constant tensors and writes into views, which MindSpore's own operators get wrong."""

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


def test_a_constant_has_its_value():
    """A constant has the dtype of Python's numbers by default, and any dtype that can represent it."""
    platform = platform_named("mindspore")
    wide = {"int64": 2**62 + 1, "float64": 0.1, "complex64": 1 + 2j, "complex128": 0.1 - 2j, "bfloat16": 2.5}
    for dtype, value in {**wide, "float32": 2.5, "bool": True, "int32": 7, "float16": float("inf")}.items():
        wanted_dtype = platform.str_to_dtype(dtype)
        for tensor in (
            platform.full((2,), value, wanted_dtype),
            platform.full_like(platform.zeros((2,)), value, wanted_dtype),
        ):
            assert tensor.dtype == wanted_dtype
            np.testing.assert_array_equal(platform.tensor_to_numpy(tensor), np.full(2, value))
    for dtype, value in {"float32": 2.5, "int64": 3, "bool": True, "complex64": 1 + 2j}.items():
        tensor = platform.full((2, 0, 3) if value is True else (), value)
        assert tensor.dtype == platform.str_to_dtype(dtype)
        np.testing.assert_array_equal(platform.tensor_to_numpy(tensor), np.full(tensor.shape, value))


@pytest.mark.parametrize("value, dtype", [(1 + 2j, "Float32"), (float("inf"), "Int64"), (float("nan"), "Int8")])
def test_a_value_that_the_dtype_lacks_is_refused(value, dtype):
    """A fill value that the dtype cannot represent is refused."""
    platform = platform_named("mindspore")
    with pytest.raises(ValueError, match="full: ") as caught:
        platform.full((2,), value, platform.str_to_dtype(dtype.lower()))
    assert str(caught.value) == f"full: {value} is not a {dtype}; pass a dtype that can represent it"


def _constants():
    from mindspore import Tensor, ops

    array = Tensor.from_numpy(np.ones((3, 2), np.complex64))
    x = distribute_tensor(array, init_device_mesh("cpu", (2,)), [Shard(0)])
    return [tensor.full_tensor().asnumpy() for tensor in (ops.full_like(x, 1 + 2j), ops.ones_like(x))]


def test_constants_like_complex_dtensors_are_complex():
    """Constants like a complex DTensor have an imaginary part in each shard."""
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


def _no_products(dtype):
    """MindSpore's own error for a product in this dtype, or nothing."""
    import mindspore

    two = mindspore.Tensor([2.0]).astype(dtype)
    try:
        (two * two).astype(mindspore.float32).asnumpy()
    except TypeError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("name", PARTS)
def test_members_write_into_parts_of_tensors(name, dtype):
    """Parameters, gradients and buffers that are parts of a larger tensor get the values that are written."""
    platform = platform_named("mindspore")
    wanted_dtype = platform.str_to_dtype(dtype)
    if refusal := _no_products(wanted_dtype):
        pytest.skip(f"MindSpore itself has no products of {dtype}: {refusal}")
    two = platform.full((), 2.0, wanted_dtype)
    for write in (
        lambda x: platform.update_param_data(x, x * two),
        lambda x: platform.load_into_param(x, x * two),
        lambda x: platform.set_gradient(x, x * two),
        lambda x: platform.scale_(x, two),
        lambda x: platform.fill_(x, x * two),
    ):
        whole = platform.from_numpy(BEFORE).astype(wanted_dtype)
        write(PARTS[name](whole))
        np.testing.assert_array_equal(platform.tensor_to_numpy(whole), _twice(BEFORE, name))


def test_gradients_that_are_parts_of_a_buffer_are_clipped():
    """Clipping gradients that are parts of a buffer scales them and leaves the rest of the buffer alone."""
    platform = platform_named("mindspore")
    buffer = platform.from_numpy(BEFORE)
    norm = platform.clip_grad_norm_([buffer[1:3]], 1.0)
    assert float(norm.asnumpy()) == pytest.approx(np.linalg.norm(BEFORE[1:3]))
    np.testing.assert_array_equal(buffer.asnumpy()[0], BEFORE[0])
    assert np.linalg.norm(buffer.asnumpy()[1:3]) == pytest.approx(1.0, rel=1e-5)


def _written():
    """DTensors whose local tensors are parts of larger ones, after writes of every kind, and their gradients."""
    import mindspore
    from mindspore import ops

    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (2,))
    written = {}
    for name, part in list(PARTS.items())[:3]:
        for placement in (Shard(0), Replicate()):
            for wanted_dtype, write in {
                "mul_": lambda x: x.mul_(2.0),
                "copy_": lambda x: x.copy_(x * 2.0),
                "assign": lambda x: ops.assign(x, x * 2.0),
            }.items():
                whole = platform.from_numpy(BEFORE)
                x = DTensor.from_local(part(whole), mesh, [placement])
                write(x)
                written[name, str(placement), wanted_dtype] = whole.asnumpy()

    def loss(whole):
        owned = whole * 1.0
        x = DTensor.from_local(owned[1:3], mesh, [Replicate()])
        x.mul_(3.0)
        return (owned * owned).sum()

    gradient = mindspore.grad(loss)(platform.from_numpy(BEFORE)).asnumpy()
    if _no_products(mindspore.bfloat16):
        return written, gradient, None
    with pytest.raises(UnsupportedOperatorError) as caught:
        mindspore.grad(loss)(platform.from_numpy(BEFORE).astype(mindspore.bfloat16))
    return written, gradient, str(caught.value)


def test_dtensors_of_parts_are_written():
    """A DTensor made from a part of a tensor is written in place, and gradients flow through the write."""
    for written, gradient, refused in simulate(_written, 2, "mindspore"):
        for (name, placement, wanted_dtype), array in written.items():
            np.testing.assert_array_equal(array, _twice(BEFORE, name), err_msg=f"{name}, {placement}, {wanted_dtype}")
        factors = np.array([[2], [18], [18]], np.float32)
        np.testing.assert_allclose(gradient, BEFORE * factors, rtol=1e-6)
        assert refused == (
            None
            if _no_products(platform_named("mindspore").str_to_dtype("bfloat16"))
            else "a part of a bfloat16 tensor cannot be written where gradients flow; use the out-of-place form"
        )
