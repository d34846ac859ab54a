from __future__ import annotations

from types import SimpleNamespace

import pytest

from hyper_parallel import (
    ColwiseParallel,
    NoParallel,
    ReplicateKV,
    RowwiseParallel,
    Shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel.plan import check_plan, uneven_outputs
from hyper_parallel.core.tensor_parallel.styles.heads import HeadCounts
from hyper_parallel.errors import PlanError, UnsupportedModuleError
from hyper_parallel.verify import simulate

torch_only = pytest.mark.platforms("torch")

PLAN = {"q": "colwise", "[kv]": "replicate_kv", "o": "rowwise"}
NO_COUNTS = (
    "ReplicateKV: Linear does not keep its numbers of heads (num_attention_heads and num_key_value_heads, itself or in "
    "its config); pass ReplicateKV(heads=..., kv_heads=...)"
)
INDIVISIBLE = (
    "ReplicateKV: 6 query heads are not divisible by the 4 ranks of the parallel axis; with "
    "ColwiseParallel(use_local_output=False) for queries, keys and values all three stay DTensors, whose heads need "
    "not be"
)


def attention(heads=6, kv_heads=2, width=3, **own):
    """Causal attention as in Transformers: heads of the configuration, and groups of its own."""
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
            self.head_dim, self.num_key_value_groups = width, heads // kv_heads
            self.q, self.o = nn.Linear(5, heads * width), nn.Linear(heads * width, 5)
            self.k, self.v = nn.Linear(5, kv_heads * width), nn.Linear(5, kv_heads * width, bias=False)
            vars(self).update(own)

        def forward(self, x):
            q, k, v = (layer(x).view(*x.shape[:-1], -1, width).transpose(1, 2) for layer in (self.q, self.k, self.v))
            k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
            attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            return self.o(attended.transpose(1, 2).flatten(2))

    return Attention()


@torch_only
@pytest.mark.parametrize("heads, kv_heads, world", [(8, 2, 4), (6, 2, 3), (6, 3, 2), (3, 1, 3), (4, 2, 2), (12, 4, 3)])
def test_every_rank_has_the_heads_that_its_queries_use(twin, heads, kv_heads, world):
    """Fewer heads than ranks, or a number that they do not divide: all gradients are those of one device."""
    ref = twin.Twin(twin.randomized(attention(heads, kv_heads)), twin.random(2, 4, 5))

    def rank(mesh):
        model = parallelize_module(ref.copy(), mesh, PLAN)
        assert model.k.weight.placements == (Shard(0),)
        ref.assert_same(model)
        return model.num_key_value_groups * model.k(ref.inputs[0].detach()).shape[-1]

    assert twin.on_mesh((world,), rank, ("tp",)) == [heads * 3 // world] * world


@torch_only
def test_beside_a_data_axis_heads_stay_dtensors(twin):
    """The output is a shard of the repeated heads along tp, and keeps its placement along the other axis."""
    ref = twin.Twin(twin.randomized(attention(6, 1)), twin.random(3, 4, 5))
    columns = ColwiseParallel(use_local_output=False)
    plan = {"q": columns, "[kv]": ReplicateKV(use_local_output=False), "o": RowwiseParallel(use_local_output=False)}

    def rank(mesh):
        from hyper_parallel import Replicate, distribute_tensor

        model = parallelize_module(ref.copy(), mesh, plan)
        x = distribute_tensor(ref.inputs[0].detach().requires_grad_(), mesh, [Shard(0), Replicate()])
        keys = model.k(x)
        assert (keys.placements, tuple(keys.shape)) == ((Shard(0), Shard(2)), (3, 4, 9))
        y = model(x)
        twin.same(y, ref.output, "output")
        y.backward(distribute_tensor(ref.cotangent, mesh, [Shard(0), Replicate()]))
        twin.same(x.grad, ref.inputs[0].grad, "gradient of the input")
        ref.assert_gradients(model)

    twin.on_mesh((2, 3), rank, ("dp", "tp"))


@torch_only
@pytest.mark.parametrize("local", [True, False])
def test_indivisible_query_heads_are_right_as_dtensors(twin, local):
    """What the message advises computes the values of one device: 5 heads on 3 ranks, 1 key/value head."""
    ref = twin.Twin(twin.randomized(attention(5, 1)), twin.random(2, 4, 5))
    whole = ColwiseParallel(use_local_output=False)

    def rank(mesh):
        if local:
            with pytest.raises(PlanError, match="5 query heads are not divisible by the 3 ranks"):
                parallelize_module(ref.copy(), mesh, PLAN)
            return
        model = parallelize_module(ref.copy(), mesh, {"[qkv]": whole, "o": RowwiseParallel()})
        ref.assert_same(model)

    twin.on_mesh((3,), rank, ("tp",))


@torch_only
def test_numbers_of_heads_may_be_given(twin):
    """A layer alone, without a module that keeps them; without numbers it is refused."""

    def rank(mesh):
        from torch import nn

        layer = parallelize_module(nn.Linear(4, 6), mesh, ReplicateKV(heads=4, kv_heads=1))
        single = ReplicateKV(heads=4, kv_heads=1).apply(nn.Linear(4, 6), mesh)
        with pytest.raises(UnsupportedModuleError) as caught:
            ReplicateKV(heads=4).apply(nn.Linear(4, 6), mesh)
        assert str(caught.value) == NO_COUNTS.replace("Linear", "NoneType")
        return [tuple(each(twin.random(3, 4).float()).shape) for each in (layer, single)]

    assert twin.on_mesh((2,), rank)[0] == [(3, 6), (3, 6)]


@torch_only
@pytest.mark.parametrize("build, plan, world, problem", [
    (attention, PLAN, 4, f"k: {INDIVISIBLE}"),
    (lambda: attention(6, 4), PLAN, 2, "k: ReplicateKV: 6 query heads are not a multiple of 4 key/value heads"),
    (lambda: attention(6, 2, num_key_value_groups=1), PLAN, 2,
     ("k: ReplicateKV: num_key_value_groups=1 of the attention module, but 6 query heads and 2 key/value heads make "
      "groups of 3")),
    (attention, {**PLAN, "[kv]": ReplicateKV(heads=8, kv_heads=4)}, 2,
     "k: ReplicateKV: 6 output features are not those of 4 key/value heads"),
    (lambda: attention(6, 2, config=None), {"q": "colwise", "o": "rowwise", "k": ReplicateKV(heads=3)}, 3,
     f"k: {NO_COUNTS.replace('Linear', 'Attention')}"),
    (attention, {"k": "replicate_kv", "v": "colwise", "o": "rowwise"}, 2,
     ("k: ReplicateKV, but no layer next to it with the 18 features of 6 query heads is ColwiseParallel")),
])  # fmt: skip
def test_heads_that_do_not_fit_are_problems_of_the_plan(twin, build, plan, world, problem):
    """Each with its numbers, before any parameter is changed."""
    assert twin.on_mesh((world,), lambda mesh: check_plan(build(), mesh, plan).problems)[0][0] == problem


@torch_only
def test_other_layers_are_refused(twin):
    """An embedding has no heads, and an activation no weight."""
    from torch import nn

    def rank(mesh):
        model = nn.ModuleDict({"a": nn.Embedding(4, 4), "b": nn.ReLU()})
        return check_plan(model, mesh, {"*": ReplicateKV(heads=2, kv_heads=2)}).problems

    assert twin.on_mesh((2,), rank)[0] == (
        "a: ReplicateKV supports linear layers, not Embedding",
        "b: ReplicateKV supports linear and embedding layers, not ReLU",
    )


@torch_only
def test_heads_of_a_configuration_are_checked(twin):
    """Attention of Transformers keeps the numbers in its config; an MLP with the same config has no heads."""

    def rank(mesh):
        plans = [{**PLAN, "[kv]": "colwise"}, PLAN, {"*": NoParallel()}]
        return [check_plan(attention(8, 2), mesh, plan).problems for plan in plans], uneven_outputs(
            attention(8, 2), mesh, PLAN
        )

    problems, uneven = twin.on_mesh((4,), rank)[0]
    message = (
        "the module: num_key_value_heads=2 is not divisible by the 4 ranks of the parallel axis; ReplicateKV() for its "
        "key and value layers gives each rank the heads that it needs; with use_local_output=False the outputs of its "
        "linear layers stay DTensors, whose heads need not be"
    )
    assert problems == [(message,), (), ()]
    assert uneven == []


def test_options_are_shown():
    """``repr`` shows every option."""
    assert repr(ReplicateKV(heads=4, kv_heads=2)) == (
        "ReplicateKV(heads=4, kv_heads=2, input_layouts=(Replicate(),), use_local_output=True)"
    )


def test_heads_are_repeated_until_the_ranks_divide_them():
    """The smallest number that both the heads and the ranks divide."""
    counts = HeadCounts(12, 4)
    assert [counts.repeated(size) for size in (1, 2, 3, 4, 6)] == [4, 4, 12, 4, 12]
    assert (counts.groups, counts.repeated_groups(3), counts.repeated_groups(2)) == (3, 1, 3)
    assert HeadCounts.of(SimpleNamespace(n_heads=4, n_kv_heads=2)) == HeadCounts(4, 2)
    assert HeadCounts.of(SimpleNamespace(n_heads=4)) is None
    assert HeadCounts(4, 0).problem(1) == "4 query heads are not a multiple of 0 key/value heads"


@pytest.mark.platforms("mindspore")
def test_mindspore_layers_get_their_heads():
    """The output of each rank and the gradients of weight, bias and input, with no factor."""
    import numpy as np

    rng = np.random.default_rng(3)
    weight, bias, x = rng.standard_normal((6, 4)), rng.standard_normal(6), rng.standard_normal((3, 4))
    cotangents = rng.standard_normal((3, 3, 6))

    def rank():
        import mindspore
        from mindspore import Tensor, nn

        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        dense = nn.Dense(4, 6, weight_init=Tensor(weight), bias_init=Tensor(bias), dtype=mindspore.float64)
        layer = parallelize_module(dense, mesh, ReplicateKV(heads=6, kv_heads=2))
        cotangent = Tensor(cotangents[mesh.rank])

        def loss(x):
            y = layer(x)
            return (y * cotangent).sum(), y

        (_, y), (dx, dw) = mindspore.value_and_grad(loss, 0, layer.trainable_params(), has_aux=True)(Tensor(x))
        return y.asnumpy(), dx.asnumpy(), [gradient.full_tensor().asnumpy() for gradient in dw]

    # Heads 0 and 1 of 3 features, each three times: two per rank.
    heads = [[0, 0], [0, 1], [1, 1]]
    features = [[head * 3 + i for head in own for i in range(3)] for own in heads]
    whole = np.zeros((3, 6))
    for own, cotangent in zip(features, cotangents, strict=True):
        np.add.at(whole.T, own, cotangent.T)
    for own, (y, dx, (dw, db)) in zip(features, simulate(rank, 3, "mindspore"), strict=True):
        np.testing.assert_allclose(y, (x @ weight.T + bias)[:, own], rtol=1e-12)
        np.testing.assert_allclose(dx, whole @ weight, rtol=1e-12)
        np.testing.assert_allclose(dw, whole.T @ x, rtol=1e-12)
        np.testing.assert_allclose(db, whole.sum(0), rtol=1e-12)
