"""Norms of queries and keys compute on a rank's heads, and their weights' gradients are those of all heads."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    HeadNorm,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.verify import simulate

torch_only = pytest.mark.platforms("torch")

WIDTH = 3


def attention(heads, kv_heads, heads_first, counts=True):
    """Causal attention with norms of queries and keys, of [B, L, H, E] or of [B, H, L, E]."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            if counts:
                self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
            self.head_dim, self.num_key_value_groups = WIDTH, heads // kv_heads
            self.q, self.o = nn.Linear(5, heads * WIDTH), nn.Linear(heads * WIDTH, 5)
            self.k, self.v = (nn.Linear(5, kv_heads * WIDTH) for _ in range(2))
            self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (-1, WIDTH)) for layer in (self.q, self.k, self.v))
            if heads_first:
                q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            q, k = self.q_norm(q), self.k_norm(k)
            if not heads_first:
                q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
            attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            return self.o(attended.transpose(1, 2).flatten(2))

    return Attention()


def check(twin, module, plan, world):
    """Under ``plan`` the output and all gradients are those of one device; return the placements of a norm's weight."""
    ref = twin.Twin(twin.randomized(module), twin.random(2, 5, 5))

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, plan)
        ref.assert_same(model)
        return model.q_norm.weight.placements

    assert twin.on_mesh((world,), rank, ("tp",)) == [(Replicate(),)] * world


@torch_only
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("heads, kv_heads, world", [(4, 2, 2), (6, 3, 3), (6, 2, 3), (4, 1, 4)])
def test_every_gradient_is_that_of_one_device(twin, heads, kv_heads, world, heads_first):
    """Either order of dims, as many key heads as ranks or fewer, which are repeated; by name as in Transformers."""
    plan = {
        "q": "colwise",
        "[kv]": "colwise" if kv_heads % world == 0 else "replicate_kv",
        "[qk]_norm": "replicated_with_grad_allreduce",
        "o": "rowwise",
    }
    check(twin, attention(heads, kv_heads, heads_first), plan, world)


@torch_only
def test_numbers_of_heads_may_be_unknown(twin):
    """The values do not depend on which dim the heads are."""
    plan = {"[qkv]": ColwiseParallel(), "[qk]_norm": HeadNorm(), "o": RowwiseParallel()}
    for heads_first in (False, True):
        check(twin, attention(4, 2, heads_first, counts=False), plan, 2)


@torch_only
def test_a_dtensor_keeps_its_layout(twin):
    """The norm of a DTensor is a DTensor of the same layout, whose heads the ranks need not divide."""
    from hyper_parallel import distribute_tensor

    norm = twin.randomized(attention(4, 2, heads_first=False)).q_norm
    x = twin.random(2, 5, 3, WIDTH)

    def rank(mesh):
        style = HeadNorm(use_local_output=False)
        assert repr(style) == "HeadNorm(use_local_output=False)"
        y = parallelize_module(copy.deepcopy(norm), mesh, style)(distribute_tensor(x, mesh, [Shard(2)]))
        assert y.placements == (Shard(2),)
        twin.same(y, norm(x), "output")

    twin.on_mesh((2,), rank, ("tp",))


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("world", [2, 3])
def test_a_norm_of_mindspore(world):
    """The gradients of gain and shift are sums over all heads; that of the input is the rank's."""
    random = np.random.default_rng(0)
    x, cotangent = (random.standard_normal((2, 5, 6, WIDTH)).astype(np.float32) for _ in range(2))

    def gradients(own, mesh=None):
        import mindspore as ms

        norm = ms.nn.LayerNorm((WIDTH,))
        if mesh is not None:
            parallelize_module(norm, mesh, HeadNorm())

        def loss(value):
            return (norm(value) * ms.Tensor(cotangent[own])).sum()

        into, weights = ms.grad(loss, 0, norm.trainable_params())(ms.Tensor(x[own]))
        return into.asnumpy(), [grad.full_tensor().asnumpy() if mesh else grad.asnumpy() for grad in weights]

    def on_rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        part = 6 // world
        return gradients(np.s_[:, :, mesh.rank * part : (mesh.rank + 1) * part], mesh)

    into, weights = gradients(np.s_[:])
    ranks = simulate(on_rank, world, platform="mindspore")
    np.testing.assert_allclose(np.concatenate([of_rank for of_rank, _ in ranks], 2), into, rtol=1e-4, atol=1e-5)
    for _, of_rank in ranks:
        for gradient, expected in zip(of_rank, weights, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
