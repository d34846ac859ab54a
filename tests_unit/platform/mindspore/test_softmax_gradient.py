"""The gradient of a softmax does not depend on which softmaxes were differentiated before it in the process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import get_mindspore_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}


def _softmaxes():
    from mindspore import mint, nn, ops

    return {
        "ops.softmax": ops.softmax,
        "ops.Softmax": lambda x, dim: ops.Softmax(dim)(x),
        "ops.Softmax of a tuple": lambda x, dim: ops.Softmax((dim,))(x),
        "nn.Softmax": lambda x, dim: nn.Softmax(dim)(x),
        "mint softmax": lambda x, dim: mint.nn.functional.softmax(x, dim=dim),
        "mint.nn.Softmax": lambda x, dim: mint.nn.Softmax(dim)(x),
    }


def _gradient(softmax, x, dim):
    import mindspore
    from mindspore import ops

    return mindspore.grad(lambda x: ops.sin(softmax(x, dim)).sum())(x).asnumpy()


def _expected(array, dim):
    """The gradient of ``sin(softmax(x)).sum()``, in float64."""
    array = array.astype(np.float64)
    powers = np.exp(array - array.max(dim, keepdims=True))
    softmax = powers / powers.sum(dim, keepdims=True)
    slope = np.cos(softmax)
    return softmax * (slope - (slope * softmax).sum(dim, keepdims=True))


def _errors(make, *names):
    """The largest error of each case that is wrong: for every dim and dtype first with size 1 there."""
    errors, random = {}, np.random.default_rng(17)
    softmaxes = {name: softmax for name, softmax in _softmaxes().items() if name in names or not names}
    shapes = [(3,), (2, 5)]
    for shape, dtype, (name, softmax) in itertools.product(shapes, TOLERANCE, softmaxes.items()):
        for dim in range(-len(shape), len(shape)):
            one = tuple(1 if index == dim % len(shape) else size for index, size in enumerate(shape))
            for case in (one, shape):
                array = random.standard_normal(case).astype(dtype)
                error = np.abs(_gradient(softmax, make(array), dim).astype(np.float64) - _expected(array, dim)).max()
                if not error <= TOLERANCE[dtype]:
                    errors[name, dtype, case, dim] = error
    return errors


def _plain():
    from mindspore import Tensor

    get_mindspore_platform()
    return _errors(Tensor)


def _distributed(dim):
    from mindspore import Tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    placement = Replicate() if dim is None else Shard(dim)
    return _errors(lambda array: distribute_tensor(Tensor(array), mesh, [placement]), "ops.softmax", "ops.Softmax")


def test_plain_gradients_are_right_after_an_axis_of_size_one():
    """Whatever spelling, number of dims, axis, sign of the axis and dtype of floats."""
    assert simulate(_plain, 1, "mindspore") == [{}]


@pytest.mark.parametrize("dim", [None, 0])
def test_gradients_of_dtensors_are_right_after_an_axis_of_size_one(dim):
    """The same for DTensors that are replicated or sharded, also along the axis, where a rank has nothing."""
    assert simulate(_distributed, 2, "mindspore", (dim,)) == [{}, {}]


def _spoiled_before_the_platform():
    import mindspore
    from mindspore import Tensor
    from mindspore.common.api import _pynative_executor

    from hyper_parallel.platform.mindspore import patches

    array = np.random.default_rng(18).standard_normal((2, 5)).astype(np.float32)
    plain = patches.pyboost_inner_prim.SoftmaxPrim_()  # the operator that no guard surrounds

    def gradient(values):
        return mindspore.grad(lambda x: mindspore.ops.sin(plain([x, 1])).sum())(Tensor(values)).asnumpy()

    _pynative_executor.clear_res()
    gradient(array[:, :1])
    spoiled = np.abs(gradient(array) - _expected(array, 1)).max()
    patches.forget_gradients()
    return spoiled, np.abs(gradient(array) - _expected(array, 1)).max()


def test_gradients_from_before_the_platform_are_forgotten():
    """What was spoiled before the guard existed is right after the platform's start; the guard is still needed."""
    ((before, after),) = simulate(_spoiled_before_the_platform, 1, "mindspore")
    assert before > 0.1
    assert after < TOLERANCE["float32"]


def _values_of_size_one():
    from mindspore import Tensor, ops

    arrays = [np.array([[value]], np.float32) for value in (3.0, np.nan, np.inf, -np.inf)]
    return [ops.softmax(Tensor(array), 1).asnumpy().item() for array in arrays]


def test_values_of_size_one_are_those_of_mindspore():
    """One for numbers, NaN for NaN and infinities, which have no softmax."""
    number, *others = simulate(_values_of_size_one, 1, "mindspore")[0]
    assert number == 1
    assert np.isnan(others).all()


def _compiled():
    import mindspore
    from mindspore import Tensor, ops

    get_mindspore_platform()

    @mindspore.jit(capture_mode="bytecode")
    def compiled(x):
        return ops.Softmax(1)(x) * 2

    return compiled(Tensor(np.ones((3, 1), np.float32))).asnumpy().tolist()


def test_compiled_functions_keep_the_operator():
    """Bytecode capture records MindSpore's own operator, also along an axis of size 1."""
    assert simulate(_compiled, 1, "mindspore") == [[[2.0], [2.0], [2.0]]]
