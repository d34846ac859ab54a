"""``routed_experts`` on MindSpore: the values and gradients of one device."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    load_balancing_loss,
    routed_experts,
    router_z_loss,
)
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

WIDTH, HIDDEN = 5, 7


def expert(rows, up, bias, down):
    """Two layers; the bias is what MindSpore's own gradient of no rows would be wrong for."""
    return (rows @ up + bias) ** 2 @ down


def values(tokens, count, unused):
    """Return x, router, experts' parameters, a cotangent, and a mask of the experts that no token chooses."""
    random = np.random.default_rng(tokens * 10 + count)
    shapes = (tokens, WIDTH), (WIDTH, count), (count, WIDTH, HIDDEN), (count, HIDDEN), (count, HIDDEN, WIDTH + 1)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in (*shapes, (tokens, WIDTH + 1))]
    mask = np.zeros(count, np.float32)
    mask[list(unused)] = -1e3
    return [*arrays, mask]


def run(place, arrays, choices, capacity_factor):
    """Return output, loss and gradients; ``place`` makes a tensor of an array for tokens, experts or all."""
    import mindspore as ms

    x, router, up, bias, down, cotangent, mask = arrays
    inputs = [place(x, "tokens"), place(router, None), *(place(each, "experts") for each in (up, bias, down))]
    mask, cotangent = place(mask, None), place(cotangent, "tokens")

    def loss(x, router, *stacked):
        logits = x @ router + mask
        probabilities = ms.ops.softmax(logits, -1)
        weights, experts = ms.ops.topk(probabilities, choices)
        y = routed_experts(x, experts, weights, stacked, expert, capacity_factor=capacity_factor)
        auxiliary = 0.3 * load_balancing_loss(probabilities, experts) + 0.07 * router_z_loss(logits)
        return (y * cotangent).sum() + auxiliary, y

    (total, y), gradients = ms.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True)(*inputs)
    return [y, total, *gradients]


def on_rank(shape, names, arrays, choices, capacity_factor):
    """Return the whole of everything on one rank of a mesh."""
    import mindspore as ms

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = {
        "tokens": [Shard(0)] * mesh.ndim,
        "experts": [Shard(0) if name == "ep" else Replicate() for name in names],
        None: [Replicate()] * mesh.ndim,
    }

    def place(array, kind):
        return distribute_tensor(ms.Tensor(array), mesh, placements[kind])

    return [np.array(value.full_tensor().asnumpy()) for value in run(place, arrays, choices, capacity_factor)]


def on_one_device(arrays, choices, capacity_factor):
    """Return everything of plain tensors."""
    import mindspore as ms

    return [
        np.array(value.asnumpy()) for value in run(lambda array, _: ms.Tensor(array), arrays, choices, capacity_factor)
    ]


@pytest.mark.parametrize(
    "shape, names, tokens, count, choices, unused, capacity_factor",
    [
        ((2,), ("ep",), 13, 5, 2, (), None),
        ((3,), ("ep",), 11, 7, 3, (0, 1, 2, 5), None),
        ((4,), ("ep",), 3, 2, 1, (), None),
        ((2, 2), ("dp", "ep"), 17, 4, 2, (2, 3), 0.6),
    ],
)
def test_values_and_gradients_are_those_of_one_device(shape, names, tokens, count, choices, unused, capacity_factor):
    """Ranks may have no tokens and no experts, experts no tokens, and tokens may be dropped."""
    arrays = values(tokens, count, unused)
    (expected,) = simulate(on_one_device, 1, platform="mindspore", args=(arrays, choices, capacity_factor))
    for array in expected[4:]:
        assert not any(array[index].any() for index in unused)
    args = (shape, names, arrays, choices, capacity_factor)
    for actual in simulate(on_rank, math.prod(shape), platform="mindspore", args=args):
        for value, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value, right, rtol=2e-5, atol=2e-5)


def test_one_device_is_that_of_numpy():
    """The reference itself: each token's chosen experts, weighted."""

    def on_device():
        import mindspore as ms

        x, _, up, bias, down, *_ = arrays
        experts, weights = np.array([[0, 2], [2, 0], [0, 0]], np.int32), np.arange(6, dtype=np.float32).reshape(3, 2)
        tensors = [ms.Tensor(each) for each in (x, experts, weights, up, bias, down)]
        y = routed_experts(*tensors[:3], tensors[3:], expert)
        right = [
            sum(w * ((row @ up[e] + bias[e]) ** 2 @ down[e]) for e, w in zip(*pair, strict=True))
            for row, *pair in zip(x, experts, weights, strict=True)
        ]
        return y.asnumpy(), np.stack(right)

    arrays = values(3, 3, ())
    ((y, right),) = simulate(on_device, 1, platform="mindspore")
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
