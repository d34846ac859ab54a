"""Tensors of one value, which MindSpore's own ``ops.full`` makes of another dtype or value."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import Shard, distribute_tensor, init_device_mesh
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import simulate

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
