"""Pointwise operators whose own kernels in MindSpore read out of bounds, and weights per channel."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, init_device_mesh
from hyper_parallel.errors import (
    LayoutError,
)
from hyper_parallel.platform.select import platform_named, use_platform

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def positive(*shape):
    """Positive numbers."""
    return RNG.uniform(0.3, 2.0, shape).astype(F32)


def test_complex_numbers_of_parts_of_two_shapes(canonical):
    """Real and imaginary parts are broadcast; MindSpore's own kernels read out of bounds, or fail."""
    x, y = positive(5, 1), real(3)
    assert np.allclose(canonical("complex", x, y), x + 1j * y)
    assert np.allclose(canonical("polar", x, y), x * np.exp(1j * y))


def test_operands_of_two_shapes_are_broadcast(canonical):
    """MindSpore's own kernel of nextafter reads past the end of the smaller operand."""
    x, y = real(5, 3).astype(np.float64), real(3).astype(np.float64)
    assert (canonical("nextafter", x, y) == np.nextafter(x, y)).all()


def test_weights_that_fit_no_channel_are_refused():
    """A number of weights other than one or the channels is refused."""
    from mindspore import ops

    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        ones = lambda shape: platform_named("mindspore").from_numpy(np.ones(shape, np.float32))  # noqa: E731 - short
        x, weight = (DTensor.from_local(ones(shape), mesh, [Replicate()]) for shape in ((2, 1, 4), (3,)))
        with pytest.raises(LayoutError) as caught:
            ops.prelu(x, weight)
    assert str(caught.value) == "operator PReLU: 3 weights for [2, 1, 4]; expected 1, or 1, one per channel"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_mish_is_exact_to_rounding(canonical, dtype):
    """Mish is right to a few units in the last place, also where MindSpore's tanh is not, and for large values."""
    x = np.array([-30.0, -4.0, -2.0, 0.0, 0.5, 3.0, 4.0, 5.0, 8.0, 25.0, 90.0, 1000.0], dtype)
    wide = x.astype(np.float64)
    expected = wide * np.tanh(np.logaddexp(0.0, wide))
    np.testing.assert_allclose(canonical("mish", x), expected.astype(dtype), rtol=8 * np.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("name", ["elu", "celu", "selu"])
def test_gradients_at_the_kink_are_those_of_the_negative_side(name):
    """At zero an exponential linear unit has the slope of its negative side, not half of it."""
    import mindspore

    platform = platform_named("mindspore")
    kernel = platform.local_op(name)
    arguments = {"elu": (0.5,), "celu": (0.5,), "selu": ()}[name]
    gradient = mindspore.grad(lambda x: kernel(x, *arguments).sum())(platform.from_numpy(np.array([-1e-7, 0.0], F32)))
    left, kink = platform.tensor_to_numpy(gradient)
    np.testing.assert_allclose(kink, left, rtol=1e-5)
