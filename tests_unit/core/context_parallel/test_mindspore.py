"""Context-parallel attention on MindSpore: two forms; the ring is refused."""

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel import Shard
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE, GRAD = (RNG.standard_normal((2, heads, 7, 4)).astype(np.float32) for heads in (4, 2, 2, 4))


def expected(causal):
    """Return the result of one device, and its gradients, in double precision."""
    query, key, value, grad = (array.astype(np.float64) for array in (QUERY, KEY, VALUE, GRAD))
    key, value = (array.repeat(2, 1) for array in (key, value))
    scores = query @ key.swapaxes(-2, -1) / 2
    if causal:
        scores = np.where(np.tri(7, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    into = grad @ value.swapaxes(-2, -1)
    into = weights * (into - (into * weights).sum(-1, keepdims=True)) / 2
    whole = [into.swapaxes(-2, -1) @ query, weights.swapaxes(-2, -1) @ grad]
    return [weights @ value, into @ key, *(array.reshape(2, 2, 2, 7, 4).sum(2) for array in whole)]


@pytest.mark.parametrize("form", ["gather", "all_to_all"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_forms_that_move_placements(world, form, causal):
    """Grouped heads and an uneven sequence: the result and every gradient are those of one device."""

    def on_rank():
        import mindspore as ms

        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        *inputs, grad = (hp.distribute_tensor(ms.Tensor(a), mesh, [Shard(2)]) for a in (QUERY, KEY, VALUE, GRAD))

        def loss(query, key, value):
            result = hp.context_parallel_attention(query, key, value, axis="cp", form=form, is_causal=causal)
            return (result * grad).sum(), result

        (_, result), grads = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(*inputs)
        return [tensor.full_tensor().asnumpy() for tensor in (result, *grads)]

    for actual in simulate(on_rank, world, platform="mindspore"):
        for one, right in zip(actual, expected(causal), strict=True):
            np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)


def test_the_ring_is_refused():
    """The message names the forms that work."""

    def on_rank():
        import mindspore as ms

        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        tensors = [hp.distribute_tensor(ms.Tensor(array), mesh, [Shard(2)]) for array in (QUERY, KEY, VALUE)]
        with pytest.raises(UnsupportedOnBackend) as caught:
            hp.context_parallel_attention(*tensors, axis="cp", form="ring")
        return str(caught.value)

    message = (
        "context_parallel_attention: form='ring' is not supported by MindSpore; use form='gather' or form='all_to_all'"
    )
    assert simulate(on_rank, 2, platform="mindspore") == [message] * 2
