"""Plans by name, in the convention of Transformers, and a model's own plan."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from hyper_parallel import DTensor, init_device_mesh, parallelize_module
from hyper_parallel.core.tensor_parallel.plan import flat_plan
from hyper_parallel.core.tensor_parallel.plan_names import STYLE_NAMES, own_plan, resolve_plan
from hyper_parallel.errors import PlanError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

BASE_PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.router": "colwise_rep",
    "layers.*.mixer": "rowwise_rep",
    "layers.*.norm": "replicate",
    "layers.*.shared.up": "local_colwise",
    "layers.*.shared.down": "local_rowwise",
    "layers.*.shared": "local",
    "layers.*": "gather",
}


def make_model():
    """A model with a base model, layers of odd sizes, and plans as Transformers has them."""
    import torch
    from torch import nn

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    class Layer(Pair):
        def __init__(self):
            super().__init__()
            self.shared, self.norm = Pair(), nn.LayerNorm(6)
            self.router, self.mixer = nn.Linear(6, 5), nn.Linear(5, 6)

        def forward(self, x):
            x = self.norm(x)
            return x + super().forward(x) + self.shared(x) + self.mixer(self.router(x).softmax(-1))

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(11, 6), nn.ModuleList([Layer(), Layer()])

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x

    class Model(nn.Module):
        base_model_prefix = "model"

        def __init__(self):
            super().__init__()
            self.model, self.head = Base(), nn.Linear(6, 11)
            self._tp_plan = {"head": "colwise_rep"}
            self.config = SimpleNamespace(base_model_tp_plan=BASE_PLAN)

        def forward(self, ids):
            return self.head(self.model(ids))

    return Model()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_models_own_plan_gives_the_values_of_one_device(world):
    """Loss and all gradients are those of one device, whatever the sizes."""
    import torch

    torch.manual_seed(2)
    dense = make_model()
    ids = torch.randint(0, 11, (3, 5))

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        single, model = copy.deepcopy(dense), copy.deepcopy(dense)
        parallelize_module(model, mesh, "auto")
        losses = [each(ids).square().mean() for each in (single, model)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        sharded = 0
        for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
            gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(gradient, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")
            sharded += isinstance(mine, DTensor) and mine.layout.local_shape != tuple(mine.shape)
        return sharded

    # Rank 0: embedding, head (2), and per layer up, router, shared up (2 each), down, mixer, shared down (1 each).
    assert simulate(rank, world, platform="torch")[0] == 1 + 2 + 2 * (3 * 2 + 3)


def test_names_and_styles_may_be_mixed():
    """A nested mapping of names, styles and globs; a name alone is the style of the module itself."""
    import torch

    from hyper_parallel import RowwiseParallel

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        pair = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 6), "b": torch.nn.Linear(6, 3)})
        parallelize_module(torch.nn.ModuleDict({"x": pair}), mesh, {"x": {"[a]": "colwise", "b": RowwiseParallel()}})
        assert str(pair["a"].weight.placements) == "(Shard(0),)"
        assert str(pair["b"].weight.placements) == "(Shard(1),)"
        layer = parallelize_module(torch.nn.Linear(4, 6), mesh, "rowwise")
        assert str(layer.weight.placements) == "(Shard(1),)"

    simulate(rank, 2, platform="torch")


def test_unknown_names_are_refused_with_suggestions():
    """All of them at once; packed weights say what to do."""
    import torch

    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 6)})
    with pytest.raises(PlanError) as info:
        resolve_plan(module, {"a": "colwize", "b": {"c": "xyz"}, "d": "local_packed_rowwise"})
    assert str(info.value) == (
        "parallelize_plan: 'a': there is no style 'colwize' (did you mean 'colwise' or 'colwise_rep'?); 'b.c': "
        "there is no style 'xyz'; 'd': 'local_packed_rowwise' is not supported: shards of a packed weight would "
        "mix its "
        "blocks; use one layer per block (to load a checkpoint that has the packed weight, map the name of each "
        f"layer's weight to a Block of it); styles by name: {', '.join(STYLE_NAMES)}, local, gather, ep_router"
    )
    with pytest.raises(PlanError) as info:
        resolve_plan(module, "auto")
    assert str(info.value) == (
        "parallelize_plan: ModuleDict has no plan of its own (tp_plan, or base_model_tp_plan of its config); pass "
        "styles by path"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "packed_colwise",
            "shards of a packed weight would mix its blocks; use one layer per block (to load a checkpoint",
        ),
        (
            "grouped_gemm",
            (
                "styles are for modules, not for parameters; give the module the style 'ep_dispatch_experts', in the "
                "same mapping"
            ),
        ),
        ("moe_identity_expert", "such experts are not stacked; leave the module with these experts out of the plan"),
        ("local_params", "styles lay out layers; leave this parameter, and the layers that compute with it, out"),
        (
            "all_reduce",
            "row-wise layers already sum their output over the ranks; if another layer returns a partial sum, use",
        ),
    ],
)
def test_names_without_a_style_say_what_to_do(name, message):
    """Also beside experts, whose own parameters alone are laid out with them."""
    import torch

    with pytest.raises(PlanError) as info:
        resolve_plan(torch.nn.Identity(), {"a": "moe_tp_experts", "b.c": name, "a.d": "rowwise"})
    assert str(info.value).startswith(f"parallelize_plan: 'b.c': {name!r} is not supported: {message}")


def test_entries_of_parameters_of_experts_are_left_out():
    """In the same mapping, nested or not; elsewhere, and for other modules, an entry is its own."""
    import torch

    for plan in (
        {"x.experts": "moe_tp_experts", "x.experts.up": "packed_colwise", "x.experts.down": "rowwise"},
        {"x": {"experts": "ep_dispatch_experts", "experts.*": "grouped_gemm", "gate": "ep_router"}},
        {"x": {"experts": {"": "moe_tp_experts", "up": "colwise", "down": "packed_rowwise"}}},
    ):
        flat = dict(flat_plan(resolve_plan(torch.nn.Identity(), plan)))
        assert {path: type(style).__name__ for path, style in flat.items()} == {"x.experts": "ExpertParallel"}
    plan = resolve_plan(torch.nn.Identity(), {"x": "moe_tp_experts", "y": "rowwise", "x.z.up": "colwise"})
    assert list(plan) == ["x", "y", "x.z.up"]


def test_a_models_own_plan_leaves_out_what_the_model_does_not_have():
    """It is written for all models of a kind; if nothing matches, all of it is an error."""
    import torch

    class Model(torch.nn.Sequential):
        tp_plan = {"0": "colwise", "1.weight": "packed_colwise", "*.mlp.up": "colwise"}  # noqa: RUF012 - as there

    model = Model(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    assert own_plan(model) == {"0": "colwise", "1.weight": "packed_colwise"}
    assert own_plan(Model()) == Model.tp_plan


def test_paths_of_a_models_own_plan_begin_at_the_model():
    """Paths of the configuration begin at the base model, which may be the model itself."""
    model = make_model()
    plan = own_plan(model)
    assert plan["model.layers.*.up"] == plan["head"].removesuffix("_rep") == "colwise"
    model.model.config = model.config
    assert own_plan(model.model) == BASE_PLAN
