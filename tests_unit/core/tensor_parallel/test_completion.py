"""Plans that are completed: models under them equal one device, and what cannot be determined is refused in words."""

from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    complete_plan,
    parallelize_module,
)
from hyper_parallel.errors import PlanError

pytestmark = pytest.mark.platforms("torch")

WIDTH, TOKENS = 6, 11
PAIRS = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
PAIRS_OF_DTENSORS = {
    "layers.*.up": ColwiseParallel(use_local_output=False),
    "layers.*.down": RowwiseParallel(use_local_output=False),
}


def make_model(*, tied=False):
    """Embeddings of tokens and positions, two blocks, a norm and a head, which may be tied to the embedding."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(5, WIDTH)
            self.layers, self.norm = nn.ModuleList([Block(9), Block(7)]), nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, TOKENS, bias=not tied)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return Model()


def make_attention(counts=()):
    """Attention of 3 heads with norms of queries and keys, a norm before, and a gate that is a parameter."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.q_norm, self.k_norm = nn.RMSNorm(2), nn.RMSNorm(2)
            vars(self).update(counts)

        def forward(self, x):
            q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            return self.o(y.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention, self.gate = nn.LayerNorm(WIDTH), Attention(), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return x + self.gate * self.attention(self.norm(x))

    return Model()


def assert_equals_one_device(twin, model, value, plan, world):
    """Output, all gradients and one optimizer step are those of one device; returns the plan and plain parameters."""
    ref = twin.Twin(twin.randomized(model), value)
    optimizer = twin.OPTIMIZERS["sgd"]
    optimizer(ref.model.parameters()).step()

    def rank(mesh):
        parallel = ref.copy()
        completed = complete_plan(parallel, plan)
        parallelize_module(parallel, mesh, completed)
        steps = optimizer(parallel.parameters())
        output = parallel(ref.inputs[0].detach())
        assert not isinstance(output, DTensor)
        twin.same(output, ref.output, "output")
        output.backward(ref.cotangent)
        ref.assert_gradients(parallel)
        steps.step()
        for (name, weight), theirs in zip(parallel.named_parameters(), ref.model.parameters(), strict=True):
            twin.same(weight, theirs, f"weight {name}")
        return completed, [name for name, weight in parallel.named_parameters() if not isinstance(weight, DTensor)]

    return twin.on_mesh((world,), rank)[0]


def ids():
    """Tokens of three sequences."""
    import torch

    return torch.randint(TOKENS, (3, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("world, tied, plan", [
    (2, False, {}),
    (3, False, PAIRS),
    (2, True, PAIRS),
    (3, False, PAIRS_OF_DTENSORS),
    (2, True, {**PAIRS, "embed": "embedding_rowwise"}),
    (3, True, {**PAIRS, "embed": ColwiseParallel(output_layouts=Replicate())}),
    (2, True, {**PAIRS_OF_DTENSORS, "embed": RowwiseParallel(use_local_output=False)}),
    (3, True, {**PAIRS_OF_DTENSORS, "head": "colwise_rep"}),
])  # fmt: skip
def test_a_completed_plan_equals_one_device(twin, world, tied, plan):
    """Whether styles return local tensors or DTensors, and weights are tied or not: every parameter has a layout."""
    completed, plain = assert_equals_one_device(twin, make_model(tied=tied), ids(), plan, world)
    assert list(completed)[: len(plan)] == list(plan)
    assert all(completed[path] is style for path, style in plan.items())
    assert not plain


@pytest.mark.parametrize("world", [2, 3])
def test_a_module_between_dtensors_returns_them(twin, world):
    """Norms of queries that are DTensors return DTensors, beside layers that return local tensors."""
    plan = {"attention.[qkv]": ColwiseParallel(use_local_output=False), "attention.o": RowwiseParallel()}
    completed, plain = assert_equals_one_device(twin, make_attention(), twin.random(2, 5, WIDTH), plan, world)
    assert list(completed)[2:] == ["norm", "attention.q_norm", "attention.k_norm"]
    assert plain == ["gate"]


def test_norms_of_local_heads_sum_their_gradients(twin):
    """Where numbers of heads tell that a norm is of the heads of queries or keys, it computes on those of its rank."""
    model = make_attention({"num_heads": 3, "num_kv_heads": 3})
    plan = {"attention.[qkv]": ColwiseParallel(), "attention.o": RowwiseParallel()}
    completed, plain = assert_equals_one_device(twin, model, twin.random(2, 5, WIDTH), plan, 3)
    assert [type(completed[f"attention.{name}_norm"]).__name__ for name in "qk"] == ["HeadNorm", "HeadNorm"]
    assert plain == ["gate"]
    text = FEATURES.format(entry="attention.[qkv]")
    assert text in refusal(make_attention({"num_heads": 6, "num_kv_heads": 6}), plan)


def make_mixture():
    """Kinds of modules that a style fits or does not: weight norm, a convolution, two inputs, own parameters, lists."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, y):
            return self.weight * x + y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
            self.conv, self.scale = nn.Conv1d(WIDTH, WIDTH, 1), Scale()
            self.shifts = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)
            self.again = self.normed

        def forward(self, x):
            x = self.scale(self.mlp(x), self.normed(x) + self.again(F.relu(x)))
            x = self.conv(x.transpose(1, 2)).transpose(1, 2) + sum(self.shifts)
            return self.encoder(x)

    return Model()


@pytest.mark.parametrize("world", [2, 3])
def test_what_no_style_fits_stays_plain_among_local_tensors(twin, world):
    """Modules of several inputs, parameters of modules with layers inside and lists of parameters stay plain."""
    plan = {"mlp.0": "colwise", "mlp.2": "rowwise", "encoder": {"linear1": "colwise", "linear2": "rowwise"}}
    completed, plain = assert_equals_one_device(twin, make_mixture(), twin.random(2, 5, WIDTH), plan, world)
    assert list(completed)[3:] == ["normed", "conv", "encoder.norm1", "encoder.norm2"]
    assert {name.rpartition(".")[0] for name in plain} == {
        "shifts", "scale", "encoder.self_attn", "encoder.self_attn.out_proj"
    }  # fmt: skip


def refusal(module, plan):
    """Why a plan is not completed."""
    with pytest.raises(PlanError) as caught:
        complete_plan(module, plan)
    return str(caught.value)


FEATURES = (
    "it may get local features from the entry {entry!r} (ColwiseParallel) or complete tensors; give that style "
    "use_local_output=False, or the module a style: RowwiseParallel() for a linear layer that gets these features, "
    "HeadNorm() for a norm of heads"
)


def test_modules_that_may_get_local_features_are_refused():
    """A forgotten second layer and norms of queries and keys may get a part, which no replicated module may."""
    assert refusal(make_model(), {"layers.*.up": "colwise"}) == (
        "complete_plan: no style can be determined for these modules:\n"
        f"  - layers.0.down (Linear): {FEATURES.format(entry='layers.*.up')}\n"
        f"  - layers.1.down (Linear): {FEATURES.format(entry='layers.*.up')}"
    )
    text = FEATURES.format(entry="attention.[qkv]")
    assert refusal(make_attention(), {"attention.[qkv]": ColwiseParallel(), "attention.o": RowwiseParallel()}) == (
        "complete_plan: no style can be determined for these modules:\n"
        f"  - attention.q_norm (RMSNorm): {text}\n"
        f"  - attention.k_norm (RMSNorm): {text}"
    )
    # As many features as the model has: o reads queries or the input, its size does not tell.
    assert f"  - attention.o (Linear): {text}\n" in refusal(make_attention(), {"attention.[qkv]": "colwise"})


def square():
    """Modules of one width in one module: sizes do not tell who reads whom."""
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.o, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.norm, self.q_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.o(self.q(self.norm(x))) * self.gate(x)

    return nn.Sequential(Model())


def test_names_tell_norms_of_queries_from_those_of_the_input():
    """Where all sizes are equal, a layer beside a pair and a norm get whole tensors, unless the norm is of queries."""
    text = FEATURES.format(entry="0.q")
    assert refusal(square(), {"0.q": "colwise", "0.o": "rowwise"}) == (
        f"complete_plan: no style can be determined for these modules:\n  - 0.q_norm (LayerNorm): {text}"
    )
    completed = complete_plan(square(), {"0.q": "colwise", "0.o": "rowwise", "0.q_norm": "replicate"})
    assert list(completed) == ["0.q", "0.o", "0.q_norm", "0.gate", "0.norm"]
    assert f"  - 0.gate (Linear): {text}\n" in refusal(square(), {"0.q": "colwise"})


def test_parameters_beside_layers_that_return_local_features():
    """A module's own parameter of the input's width works on whole tensors; of another size it may get a part."""
    import torch

    def build(size):
        model = square()
        model[0].scale = torch.nn.Parameter(torch.ones(size))
        return model

    plan = {"0.q": "colwise", "0.o": "rowwise", "0.q_norm": "replicate"}
    assert list(complete_plan(build(WIDTH), plan)) == ["0.q", "0.o", "0.q_norm", "0.gate", "0.norm"]
    assert refusal(build(()), plan) == (
        f"complete_plan: no style can be determined for these modules:\n  - 0 (Model): {FEATURES.format(entry='0.q')}"
    )


def test_features_that_leave_a_module_may_go_on_to_modules_beside_it():
    """Features that no layer reads inside of a module, such as an adapter, leave it to the modules beside it."""
    from torch import nn

    model = make_attention()
    for name in "qkvo":
        setattr(model.attention, name, nn.Sequential(getattr(model.attention, name)))
    plan = {"attention.[qkv].0": "colwise", "attention.o.0": "rowwise"}
    text = FEATURES.format(entry="attention.[qkv].0")
    assert refusal(model, plan) == (
        "complete_plan: no style can be determined for these modules:\n"
        f"  - attention.q_norm (RMSNorm): {text}\n"
        f"  - attention.k_norm (RMSNorm): {text}"
    )
    activated = nn.Sequential(nn.Linear(WIDTH, 9), nn.PReLU())
    assert refusal(activated, {"0": "colwise"}) == (
        f"complete_plan: no style can be determined for these modules:\n  - 1 (PReLU): {FEATURES.format(entry='0')}"
    )


SHARDS = (
    "it may get shards from the entry {entry} or complete tensors; give that style use_local_output=False, or the "
    "module a style, such as SequenceParallel(use_local_output=True) for shards of the sequence"
)


@pytest.mark.parametrize("style", [
    RowwiseParallel(output_layouts=Shard(1)),
    RowwiseParallel(output_layouts=(Shard(1),)),
    RowwiseParallel(output_layouts=("None", "tp", "None")),
    PrepareModuleInput(
        input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True),
    PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": None}, use_local_output=True),
    PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
    PrepareModuleInputOutput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_input=True, output_layouts=Replicate(),
        desired_output_layouts=Replicate()),
    NoParallel(output_layout=Shard(1), use_local_output=None),
    SequenceParallel(use_local_output=True),
])  # fmt: skip
def test_modules_that_may_get_local_shards_are_refused(style):
    """Where local tensors may be shards of the sequence, a module that gets one must have a style of the user."""
    from torch import nn

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    entries = {"0": style} if not type(style).__name__.startswith("Prepare") else {"0": "colwise_rep", "[0]": style}
    entry = f"{list(entries)[-1]!r} ({type(style).__name__})"
    assert refusal(model, entries) == (
        f"complete_plan: no style can be determined for these modules:\n  - 1 (LayerNorm): {SHARDS.format(entry=entry)}"
    )


@pytest.mark.parametrize("style", [
    PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=[("None", None, "None")]),
    PrepareModuleInputOutput(output_layouts=None, desired_output_layouts=None),
])  # fmt: skip
def test_conversions_to_dtensors_or_whole_tensors_leave_no_doubt(style):
    """Local shards alone leave doubt; a style for one path and for all of them may be given to one module."""
    from torch import nn

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    assert list(complete_plan(model, {"0": "colwise_rep", "[0]": style})) == ["0", "[0]", "1"]


def test_the_features_of_the_last_layer_leave_no_doubt():
    """Modules of the size of the input of the last layer do not get its local features."""
    assert list(complete_plan(make_model(), {"head": "colwise"})) == [
        "head", "embed", "places", "layers.*.norm", "layers.*.up", "layers.*.down", "norm",
    ]  # fmt: skip


def test_styles_that_may_place_more_than_they_say_are_refused():
    """A style of a user that lists no parameters may lay them out; one that lists them is known."""
    from torch import nn

    class Mark(ParallelStyle):
        apply = None

    class Listed(Mark):
        def placements_for(self, module):
            return dict.fromkeys(dict(module.named_parameters()), Shard(0))

    text = "may lay out {names} or not; let its placements_for return the placements of all parameters that it lays out"
    assert refusal(make_model(), {"layers.0": Mark(), "layers.1": "local"}) == (
        "complete_plan: no style can be determined for these modules:\n"
        f"  - layers.0.norm (LayerNorm): the entry 'layers.0' (Mark) {text.format(names='weight, bias')}\n"
        f"  - layers.0.up (Linear): the entry 'layers.0' (Mark) {text.format(names='weight, bias')}\n"
        f"  - layers.0.down (Linear): the entry 'layers.0' (Mark) {text.format(names='weight, bias')}"
    )
    pair = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)))
    assert list(complete_plan(pair, {"0.0": Listed(), "0.1": "rowwise"})) == ["0.0", "0.1"]
    assert "0.1 (Linear): it may get local features from the entry '0.0' (Listed)" in refusal(pair, {"0.0": Listed()})


def test_a_module_with_a_style_gets_no_second_one():
    """A style that converts inputs or outputs leaves parameters plain, and another would convert again."""
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    assert refusal(make_model(), {**PAIRS, "norm": style}) == (
        "complete_plan: no style can be determined for these modules:\n  - norm (LayerNorm): the entry 'norm' "
        "(PrepareModuleInput) leaves weight, bias plain, and a second style would convert inputs and outputs again; "
        "use NoParallel(input_layout=..., output_layout=...), which replicates parameters too, or call "
        "hyper_parallel.distribute_module(model, mesh) after parallelize_module to replicate all plain parameters"
    )


def test_a_tied_parameter_that_no_style_lays_out_alike_is_refused():
    """A norm's scale cannot be laid out as the shard of the layer that it is tied to."""
    from torch import nn

    model = nn.ModuleDict({"up": nn.Linear(WIDTH, 9), "norm": nn.LayerNorm(9)})
    model["norm"].bias = model["up"].bias
    assert refusal(model, {"up": "colwise_rep"}) == (
        "complete_plan: no style can be determined for these modules:\n"
        "  - norm (LayerNorm): bias is tied to a parameter that the entry 'up' (ColwiseParallel) lays out as Shard(0); "
        "no style does that here"
    )


def test_own_parameters_among_dtensors():
    """Among DTensors a module is replicated with all inside, but not beside modules with styles, which is refused."""
    import torch

    model = make_attention()
    plan = {
        "attention.[qkv]": ColwiseParallel(use_local_output=False),
        "attention.o": PAIRS_OF_DTENSORS["layers.*.down"],
    }
    assert refusal(model, plan) == (
        "complete_plan: no style can be determined for these modules:\n  - the module (Model): no style can "
        "replicate gate alone, because modules inside have styles; call hyper_parallel.distribute_module(model, "
        "mesh) after parallelize_module to replicate all plain parameters"
    )
    mixture = torch.nn.ModuleDict({"pair": torch.nn.Linear(WIDTH, WIDTH), "x": make_mixture()})
    completed = complete_plan(mixture, {"pair": PAIRS_OF_DTENSORS["layers.*.down"]})
    assert list(completed) == ["pair", "x"]  # with the parameters of its list and all modules


def test_the_output_of_the_model_may_stay_a_dtensor():
    """With plain_output=False the last layer returns a DTensor, as for labels that are DTensors."""
    plain, distributed = (
        complete_plan(make_model(), PAIRS_OF_DTENSORS, plain_output=value)["head"].use_local_output
        for value in (True, False)
    )
    assert (plain, distributed) == (True, False)


def test_what_is_left_alone(twin):
    """Modules that are named to be left alone, and those that a call before has parallelized, get no entry."""

    def rank(mesh):
        model = parallelize_module(make_model(), mesh, {**PAIRS, "head": "colwise_rep"})
        return list(complete_plan(model, {"layers": {"*": {"norm": "local"}}, "norm": "gather"}))

    assert twin.on_mesh((2,), rank)[0] == ["layers", "norm", "embed", "places"]


def test_numbered_paths_become_one_glob_where_all_of_them_agree():
    """A module that has another style, or none, keeps the others' paths; special characters are no globs."""
    from torch import nn

    model = make_model()
    assert list(complete_plan(model, {**PAIRS, "layers.1.norm": "replicate"})) == [
        *PAIRS, "layers.1.norm", "embed", "places", "layers.0.norm", "norm", "head",
    ]  # fmt: skip
    odd = nn.ModuleDict({"a[0]": nn.LayerNorm(2), "a0": nn.LayerNorm(2)})
    assert list(complete_plan(odd, {"a0": "replicate"})) == ["a0", "a[[]0]"]


def test_what_may_stand_for_a_plan():
    """A style, a name and the model's own plan are plans; what does not fit the model is refused as it is applied."""
    import torch

    layer = torch.nn.Linear(3, 5)
    assert list(complete_plan(layer, "colwise")) == [""]
    assert list(complete_plan(layer, ColwiseParallel())) == [""]
    model = make_model()
    model._tp_plan = PAIRS
    assert complete_plan(model, "auto").items() >= PAIRS.items()
    assert complete_plan(make_model(), {**PAIRS, "norm": "local"}).keys() >= PAIRS.keys()
    assert refusal(make_model(), {"upp": "colwise", "norm": "rowwise"}) == (
        "complete_plan: the plan does not match the module:\n"
        "  - 'upp' (ColwiseParallel) matches no module; children of the module: embed, places, layers, norm, head\n"
        "  - norm: RowwiseParallel supports linear and embedding layers, not LayerNorm"
    )
    assert refusal(make_model(), {"norm": {}}) == (
        "complete_plan: these paths need an entry for the module itself:\n"
        "  - 'norm' has entries for modules inside only; add one for '' as well"
    )
    with pytest.raises(TypeError, match="complete_plan: module must be a"):
        complete_plan(3, {})
