"""MindSpore's side of the tensor facet."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint
from mindspore.common.initializer import initializer

from hyper_parallel.platform.select import platform_named

pytestmark = pytest.mark.platforms("mindspore")

DTYPES = [mindspore.bool_, mindspore.int32, mindspore.float32, mindspore.bfloat16, mindspore.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0)], ids=str)
def test_a_function_result_has_the_same_values(shape, dtype):
    """What a custom function returns has the values, shape and dtype of what it computed, non-finite ones included."""
    values = np.random.default_rng(3).normal(size=shape) * 3
    if values.size > 1:
        values.flat[:2] = [np.inf, -0.0] if dtype not in (mindspore.bool_, mindspore.int32) else [1, 0]
    data = Tensor(values.astype(np.complex64 if dtype == mindspore.complex64 else np.float32)).astype(dtype)
    result = platform_named("mindspore").function_result(data)
    assert (result.shape, result.dtype) == (data.shape, data.dtype)
    np.testing.assert_array_equal(*(_exact(tensor) for tensor in (result, data)))


def _exact(tensor):
    """Return the values in a dtype of NumPy's own, which has no bfloat16."""
    array = tensor.asnumpy()
    return array.astype(np.float32) if tensor.dtype == mindspore.bfloat16 else array


def test_a_function_result_may_have_no_values_yet():
    """A tensor whose values come later stays one."""
    platform = platform_named("mindspore")
    result = platform.function_result(initializer("normal", (2, 3), mindspore.float32))
    assert platform.is_meta(result)
    assert tuple(result.shape) == (2, 3)


def test_a_function_that_computes_a_view_has_second_gradients():
    """A custom function's result that was computed as a view stays on the graph while a gradient is differentiated."""
    platform = platform_named("mindspore")

    class Identity(platform.Function):
        @staticmethod
        def forward(ctx, x):
            del ctx
            return platform.function_result(Tensor.from_numpy(x.asnumpy()).reshape((-1,)).reshape(x.shape))

        @staticmethod
        def backward(ctx, grad):
            del ctx
            return Identity.apply(grad)

    random = np.random.default_rng(5)
    x, w = (Tensor(random.normal(size=size).astype(np.float32)) for size in ((2, 4), (4, 3)))

    def second(function):
        first = mindspore.grad(lambda x: mint.tanh(function(mint.matmul(x, w))).sum())
        return mindspore.grad(lambda x: (first(x) ** 2).sum())(x).asnumpy()

    expected = second(lambda x: x)
    assert np.abs(expected).min() > 1e-3
    np.testing.assert_allclose(second(Identity.apply), expected, rtol=1e-5)


def test_views_of_mindspore_are_not_told_apart():
    """No view is dense by chance, every shape can be viewed, and a dense copy has the values: views are read-only."""
    platform = platform_named("mindspore")
    values = Tensor(np.random.default_rng(7).normal(size=(2, 3)).astype(np.float32))
    turned = values.permute((1, 0))
    assert platform.dense_by_chance(turned, None) is False
    assert platform.can_view(turned, (3, 2), (6,)) is True
    copied = platform.dense_copy(turned)
    assert copied.is_contiguous()
    np.testing.assert_array_equal(copied.asnumpy(), values.asnumpy().T)
