"""Recomputation and swap of activations: gradients are those of the plain module, and the original is kept."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.compat.activation_checkpoint import (
    CheckpointPolicy,
    SwapManager,
    checkpoint_wrapper,
    swap_wrapper,
)
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compare(*, imperative):
    """Gradients of a wrapped cell and function, by a transform or by ``backward``, beside those of the plain cell."""
    import mindspore as ms
    from mindspore import Parameter, Tensor, mint, nn

    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat

    runs = []

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(array(5, 4)), name="weight")

        def construct(self, x):
            runs.append(1)
            return mint.tanh(mint.matmul(x, self.weight))

    plain, x, cotangent = Layer(), Tensor(0.3 * array(3, 5, seed=1)), Tensor(array(3, 4, seed=2))
    if imperative:
        enable_mindspore_backward_compat()

    def gradient(call):
        def loss():
            return (call(x) * cotangent).sum()

        if not imperative:
            return ms.grad(loss, None, [plain.weight])()[0].asnumpy()
        plain.weight.grad = None
        loss().backward()
        return plain.weight.grad.asnumpy().copy()

    expected, seen = gradient(plain), []

    def policy(tensor):
        seen.append(tensor.shape)
        return CheckpointPolicy.MUST_SAVE if len(seen) == 1 else CheckpointPolicy.MUST_SWAP

    recomputed, swapped = checkpoint_wrapper(plain, early_stop=False), swap_wrapper(plain, policy_fn=policy)
    assert recomputed.unwrap_cell is swapped.unwrap_cell is plain
    assert recomputed.weight is plain.weight
    assert [name for name, _ in recomputed.cells_and_names()] == [""]
    runs.clear()
    np.testing.assert_allclose(gradient(recomputed), expected, rtol=1e-6)
    assert len(runs) == 2
    np.testing.assert_allclose(gradient(swapped), expected, rtol=1e-6)
    assert seen
    function = checkpoint_wrapper(plain.construct)
    np.testing.assert_allclose(gradient(function), expected, rtol=1e-6)
    SwapManager().set_forward_prefetch_layer(recomputed, swapped)
    return True


def plain_recomputation():
    """The error of MindSpore's own recomputation under ``backward``, or nothing."""
    import mindspore as ms
    from mindspore import mint

    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
    from hyper_parallel.platform.mindspore.versions.older import recompute_to_the_end

    enable_mindspore_backward_compat()
    x = ms.Tensor(array(3, 5))
    x.requires_grad = True
    try:
        recompute_to_the_end(mint.tanh, x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("imperative", [False, True])
def test_gradients_are_those_of_the_plain_module(imperative):
    """A wrapped cell or function has the gradients of the plain one, by transforms and by ``backward``."""
    if imperative and (refusal := simulate(plain_recomputation, 1, platform="mindspore")[0]):
        pytest.skip(f"MindSpore itself recomputes nothing in backward: {refusal}")
    assert simulate(lambda: compare(imperative=imperative), 2, platform="mindspore") == [True] * 2


def names_in_a_network():
    """Names of parameters after each layer's cell was replaced by a wrapper of it, and of a wrapper of a new cell."""
    from mindspore import nn

    class Layer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.up = nn.Dense(3, 2, has_bias=False)

    network = nn.Cell()
    network.layers = nn.CellList([Layer(), Layer()])
    for layer, wrapper in zip(network.layers, (checkpoint_wrapper, swap_wrapper), strict=True):
        layer.up = wrapper(layer.up)
    network.new = checkpoint_wrapper(nn.Dense(3, 2, has_bias=False))
    return [parameter.name for parameter in network.get_parameters()]


def test_parameters_keep_the_names_of_their_network():
    """A wrapper that takes the place of its cell leaves names alone, so that those of layers still differ."""
    names = simulate(names_in_a_network, 1, platform="mindspore")[0]
    assert names == ["layers.0.up.weight", "layers.1.up.weight", "new.weight"]


def test_what_is_not_supported_is_refused():
    """Recomputed outputs, and swap of functions, are refused by name."""
    with pytest.raises(UnsupportedOnBackend, match=r"^checkpoint_wrapper: output_recompute=True is not supported; "):
        checkpoint_wrapper(abs, output_recompute=True)
    with pytest.raises(UnsupportedOnBackend, match=r"^swap_wrapper: <built-in function abs> is not a module; "):
        swap_wrapper(abs)
