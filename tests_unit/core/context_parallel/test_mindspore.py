"""Context-parallel attention on MindSpore, in all forms: result and every gradient are those of one device."""

import itertools

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel import Shard
from hyper_parallel.core.context_parallel import attention
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("mindspore")

FORMS = ("gather", "all_to_all", "ring")


def drawn(length):
    """Return query, key, value and the gradient of the result, with two query heads for each head of keys."""
    random = np.random.default_rng(length)
    return [random.standard_normal((2, heads, length, 4)).astype(np.float32) for heads in (4, 2, 2, 4)]


def seen(kind, length):
    """Return which key each query sees: [S, S]."""
    if kind == "causal":
        return np.tri(length, dtype=bool)
    mask = np.random.default_rng(1).random((length, length)) > (0.4 if kind == "boolean" else -1)
    mask[1] &= kind != "boolean"  # a query that sees no key
    return mask


def expected(arrays, visible):
    """Return the result of one device, and its gradients, in double precision."""
    query, key, value, grad = (array.astype(np.float64) for array in arrays)
    key, value = (array.repeat(2, 1) for array in (key, value))
    scores = np.where(visible, query @ key.swapaxes(-2, -1) / 2, -np.inf)
    weights = np.exp(scores - np.where(visible.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    into = grad @ value.swapaxes(-2, -1)
    into = weights * (into - (into * weights).sum(-1, keepdims=True)) / 2
    whole = [into.swapaxes(-2, -1) @ query, weights.swapaxes(-2, -1) @ grad]
    return [weights @ value, into @ key, *(array.reshape(2, 2, 2, -1, 4).sum(2) for array in whole)]


def parallel(mesh, placements, arrays, **options):
    """Return the result and the gradients on ranks, whole."""
    import mindspore as ms

    *inputs, grad = (hp.distribute_tensor(ms.Tensor(array), mesh, placements) for array in arrays)

    def loss(query, key, value):
        result = hp.context_parallel_attention(query, key, value, axis="cp", **options)
        return (result * grad).sum(), result

    (_, result), grads = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(*inputs)
    return [tensor.full_tensor().asnumpy() for tensor in (result, *grads)]


def assert_equal(actual, wanted):
    """All arrays are equal but for the rounding of float32."""
    for array, right in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_every_form_is_attention(world):
    """Grouped heads, an uneven sequence, every mask: the result and every gradient are those of one device."""

    def on_rank():
        import mindspore as ms

        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        for form, kind in itertools.product(FORMS, ("none", "causal", "boolean")):
            mask = ms.Tensor(seen(kind, 7)) if kind == "boolean" else None
            options = {"form": form, "attn_mask": mask, "is_causal": kind == "causal"}
            assert_equal(parallel(mesh, [Shard(2)], drawn(7), **options), expected(drawn(7), seen(kind, 7)))

    simulate(on_rank, world, platform="mindspore")


def test_a_ring_with_an_empty_shard():
    """A rank without queries sends keys on, and gives gradients without elements."""

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        actual = parallel(mesh, [Shard(2)], drawn(2), form="ring", is_causal=True)
        assert_equal(actual, expected(drawn(2), seen("causal", 2)))

    simulate(on_rank, 3, platform="mindspore")


def test_a_ring_with_other_axes_and_a_balanced_order(monkeypatch):
    """Beside data parallelism, in tiles, with positions from ``balanced_order`` and a mask that is added per head."""
    monkeypatch.setattr(attention, "TILE", 2)
    order = hp.balanced_order(8, 2)
    added = np.random.default_rng(2).standard_normal((4, 8, 8)).astype(np.float32)

    def on_rank():
        import mindspore as ms

        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        shuffled = [array[:, :, order] for array in drawn(8)]
        actual = parallel(mesh, [Shard(0), Shard(2)], shuffled, form="ring", is_causal=True, positions=order)
        assert_equal(actual, [array[:, :, order] for array in expected(drawn(8), seen("causal", 8))])
        ring, gather = (
            parallel(mesh, [Shard(0), Shard(2)], drawn(8), form=form, attn_mask=ms.Tensor(added))
            for form in ("ring", "gather")
        )
        assert_equal(ring, gather)

    simulate(on_rank, 4, platform="mindspore")


def test_a_second_gradient_of_the_ring_is_refused():
    """The message names the forms that have one."""

    def on_rank():
        import mindspore as ms

        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        inputs = [hp.distribute_tensor(ms.Tensor(array), mesh, [Shard(2)]) for array in drawn(7)[:3]]

        def result(query):
            return hp.context_parallel_attention(query, *inputs[1:], axis="cp", form="ring").square().sum()

        with pytest.raises(UnsupportedOnBackend) as caught:
            ms.grad(lambda query: ms.grad(result)(query).square().sum())(inputs[0])
        return str(caught.value)

    message = (
        "context_parallel_attention: form='ring' has no second gradient (create_graph=True); use form='gather' or "
        "form='all_to_all'"
    )
    assert simulate(on_rank, 2, platform="mindspore") == [message] * 2


def test_a_query_that_sees_no_key_leaves_the_other_ones_alone():
    """On one device too its result is zero: MindSpore's softmax would make every later query's result NaN."""
    import mindspore as ms

    arrays, visible = drawn(7), seen("boolean", 7)
    added = np.where(visible, np.float32(0), np.float32(-np.inf))
    for mask in (visible, added):
        result = hp.context_parallel_attention(*map(ms.Tensor, arrays[:3]), axis="cp", attn_mask=ms.Tensor(mask))
        np.testing.assert_allclose(result.asnumpy(), expected(arrays, visible)[0], rtol=1e-5, atol=1e-5)
