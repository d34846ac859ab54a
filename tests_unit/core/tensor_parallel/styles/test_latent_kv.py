"""The projection to latent keys and values: all gradients are those of one device, also through the shared key."""

from types import SimpleNamespace

import pytest

from hyper_parallel import LatentKV, init_device_mesh, parallelize_module
from hyper_parallel.errors import PlanError, UnsupportedModuleError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

HEADS, WIDTH, LATENT, SHARED = 6, 3, 5, 2


def attention(shared=SHARED):
    """Attention to latent keys and values, with one more key that all heads share."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(qk_rope_head_dim=shared)
            self.q, self.kv_a = nn.Linear(7, HEADS * (WIDTH + SHARED)), nn.Linear(7, LATENT + SHARED)
            self.kv_b, self.o = nn.Linear(LATENT, HEADS * 2 * WIDTH), nn.Linear(HEADS * WIDTH, 7)

        def forward(self, x):
            latent, key = self.kv_a(x).split([LATENT, SHARED], -1)
            q = self.q(x).unflatten(-1, (-1, WIDTH + SHARED)).transpose(1, 2)
            k, v = self.kv_b(latent).unflatten(-1, (-1, 2 * WIDTH)).transpose(1, 2).chunk(2, -1)
            k = torch.cat([k, key[:, None].expand(*k.shape[:-1], SHARED)], -1)
            return self.o((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))

    return Attention()


@pytest.mark.parametrize("world", [2, 3])
def test_every_gradient_is_that_of_one_device(twin, world):
    """Of the input and of every parameter; by name as in Transformers."""
    ref = twin.Twin(twin.randomized(attention()), twin.random(2, 4, 7))

    def rank(mesh):
        plan = {"q": "colwise", "kv_a": "mla_kv_a_proj", "kv_b": "colwise", "o": "rowwise"}
        model = parallelize_module(ref.copy(), mesh, plan)
        ref.assert_same(model)

    twin.on_mesh((world,), rank, ("tp",))


def test_what_does_not_fit_is_refused():
    """Before a parameter is changed, with the numbers."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanError) as info:
            parallelize_module(attention(shared=9), mesh, {"kv_a": LatentKV()})
        assert str(info.value).endswith(
            "- kv_a: LatentKV: the shared key has 9 features; it must have at least 1 of the 7 output features, not all"
        )
        cases = {
            "LatentKV: NoneType does not keep the features of the shared key (qk_rope_head_dim, itself or in its "
            "config); pass LatentKV(shared=...)": (LatentKV(), torch.nn.Linear(2, 3)),
            "LatentKV supports linear layers, not ReLU": (LatentKV(shared=2), torch.nn.ReLU()),
        }
        for message, (style, module) in cases.items():
            with pytest.raises(UnsupportedModuleError) as info:
                style.apply(module, mesh)
            assert str(info.value) == message
        layer = LatentKV(shared=1).apply(torch.nn.Linear(2, 3), mesh)
        assert layer(torch.ones(1, 2)).shape == (1, 3)
        with pytest.raises(UnsupportedModuleError) as info:
            LatentKV(shared=1).apply(layer, mesh)
        assert str(info.value) == "it is already parallelized by LatentKV"

    simulate(rank, 2, platform="torch")
    assert repr(LatentKV(shared=2)) == "LatentKV(shared=2)"
    assert len(LatentKV().outputs()) == 1
