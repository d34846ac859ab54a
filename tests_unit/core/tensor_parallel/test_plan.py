from __future__ import annotations

import pytest

from hyper_parallel import (
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel.plan import check_plan, matched_modules, uneven_outputs
from hyper_parallel.errors import PlanError, UnsupportedModuleError

pytestmark = pytest.mark.platforms("torch")


def attention(heads=4, kv_heads=2):
    """Query, key, value and output projections, and a module with the number of heads."""
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_heads, self.n_kv_heads = heads, kv_heads
            self.wq, self.wk = nn.Linear(8, 8), nn.Linear(8, 4)
            self.wv, self.wo = nn.Linear(8, 4), nn.Linear(8, 8)

    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": Attention(), "norm": nn.LayerNorm(8)})])})


PLAN = {
    "layers.*.attn.w[qkv]": ColwiseParallel(),
    "layers.*.attn.wo": RowwiseParallel(),
    "layers.*.norm": SequenceParallel(),
}

LOCAL_HEADS = "; with use_local_output=False the outputs of its linear layers stay DTensors, whose heads need not be"


def checked(twin, build, plan, world=2):
    """The report of a rank."""
    return twin.on_mesh((world,), lambda mesh: check_plan(build(), mesh, plan))[0]


def test_a_fitting_plan_has_nothing_to_say(twin):
    """A fitting plan has no problem and no note, and raises nothing."""
    report = checked(twin, attention, PLAN)
    assert (report.problems, report.notes) == ((), ())
    report.raise_problems()


def test_heads_must_divide(twin):
    """A rank holds whole heads, of keys and values too; uneven features alone are no problem."""
    report = checked(twin, lambda: attention(4, 2), PLAN, world=4)
    assert report.problems == (
        (
            "layers.0.attn: n_kv_heads=2 is not divisible by the 4 ranks of the parallel axis; ReplicateKV() for its "
            "key and value layers gives each rank the heads that it needs" + LOCAL_HEADS
        ),
    )
    report = checked(twin, lambda: attention(5, 3), PLAN, world=3)
    assert report.problems == (
        "layers.0.attn: n_heads=5 is not divisible by the 3 ranks of the parallel axis" + LOCAL_HEADS,
    )


@pytest.mark.parametrize("style", [
    ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=Replicate()),
])  # fmt: skip
def test_heads_need_not_divide_where_no_rank_sees_a_part(twin, style):
    """A DTensor, or the whole output, has all heads on every rank."""
    plan = {**PLAN, "layers.*.attn.w[qkv]": style}
    assert checked(twin, lambda: attention(5, 3), plan, world=3).problems == ()


def test_local_outputs_of_unequal_sizes_are_told(twin):
    """Of a model that fails, the layers are listed whose local outputs have another size on another rank."""

    def hints(plan, size=3):
        return twin.on_mesh((size,), lambda mesh: uneven_outputs(attention(), mesh, plan))[0]

    fix = (
        "; with use_local_output=False an output stays a DTensor, which can be reshaped into heads on any number of "
        "ranks, with output_layouts=Replicate() every rank gets all features"
    )
    start, layer = "local tensors of unequal sizes on 3 ranks: the", "layers.0.attn"
    assert hints(PLAN) == [
        f"{start} 8 features of {layer}.wq{fix}", f"{start} 4 features of {layer}.wk, {layer}.wv{fix}"
    ]  # fmt: skip
    assert hints(PLAN, 2) == []
    assert hints({**PLAN, "layers.*.attn.w[qkv]": ColwiseParallel(use_local_output=False)}) == []


def test_heads_do_not_matter_where_attention_is_whole(twin):
    """Only a projection sharded by its output features splits heads."""
    report = checked(twin, lambda: attention(5, 3), {"layers.*.attn.*": NoParallel()}, world=2)
    assert report.problems == ()


@pytest.mark.parametrize("pattern, hint", [
    ("layer.*.attn.wq", "children of the module: layers"),
    ("layers.*.atn.wq", "children of layers.0: attn, norm"),
    ("layers.1.attn.wq", "children of layers: 0"),
    ("layers.*.attn.wq.x", "children of layers.0.attn.wq: none"),
])  # fmt: skip
def test_an_unmatched_pattern_shows_what_there_is(twin, pattern, hint):
    """A misspelt key is a problem, and the children at the mismatch are listed."""
    report = checked(twin, attention, {pattern: ColwiseParallel()})
    assert report.problems == (f"{pattern!r} (ColwiseParallel) matches no module; {hint}",)


def test_tied_weights_with_conflicting_layouts(twin):
    """Tied weights with conflicting layouts are a problem that names both paths and layouts."""
    from torch import nn

    def build():
        model = nn.ModuleDict({"tok": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
        model["head"].weight = model["tok"].weight
        return model

    report = checked(twin, build, {"tok": ColwiseParallel(), "head": ColwiseParallel()})
    assert report.problems == (
        (
            "tied weight with conflicting layouts: tok.weight -> Shard(1) by ColwiseParallel, "
            "head.weight -> Shard(0) by ColwiseParallel"
        ),
    )
    assert checked(twin, build, {"tok": RowwiseParallel(), "head": ColwiseParallel()}).problems == ()


def test_two_styles_that_disagree_about_a_parameter(twin):
    """Overlapping patterns are fine as long as they agree on the weights."""
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    assert checked(twin, twin.MLP, {"fc1": ColwiseParallel(), "fc*": style}).problems == ()
    report = checked(twin, twin.MLP, {"fc1": ColwiseParallel(), "fc*": RowwiseParallel()})
    assert report.problems == (
        (
            "parameter with conflicting layouts: fc1.weight -> Shard(0) by ColwiseParallel, "
            "fc1.weight -> Shard(1) by RowwiseParallel"
        ),
        (
            "parameter with conflicting layouts: fc1.bias -> Shard(0) by ColwiseParallel, "
            "fc1.bias -> Replicate() by RowwiseParallel"
        ),
    )


def test_all_problems_are_one_error(twin):
    """Problems of every kind come together, with the notes."""
    plan = {"layers.*.attn.wq": ColwiseParallel(), "nothing": RowwiseParallel(), "layers.*.norm": RowwiseParallel()}
    report = checked(twin, lambda: attention(5, 2), plan)
    with pytest.raises(UnsupportedModuleError) as caught:
        report.raise_problems()
    assert str(caught.value) == (
        "the plan does not match the module (3 problems); no parameter was changed:\n  - 'nothing' (RowwiseParallel) "
        "matches no module; children of the module: layers\n  - layers.0.norm: RowwiseParallel supports linear and "
        "embedding layers, not LayerNorm\n"
        "  - layers.0.attn: n_heads=5 is not divisible by the 2 ranks of the parallel axis" + LOCAL_HEADS + "\n"
        "  - note: linear layer layers.0.attn.wk is not sharded, although its sibling layers are\n"
        "  - note: linear layer layers.0.attn.wv is not sharded, although its sibling layers are\n"
        "  - note: linear layer layers.0.attn.wo is not sharded, although its sibling layers are"
    )
    assert isinstance(caught.value, (PlanError, ValueError, NotImplementedError))


def test_a_layer_whose_weight_is_computed(twin):
    """A style on a layer with weight norm is refused before any weight is touched, with what to do first."""
    from torch import nn

    def build():
        return nn.ModuleDict({"fc": nn.utils.parametrizations.weight_norm(nn.Linear(3, 5))})

    assert checked(twin, build, {"fc": ColwiseParallel()}).problems == (
        (
            "fc: ColwiseParallel lays out parameters, but 'weight' of this ParametrizedLinear is computed from other "
            "parameters (as weight_norm, spectral_norm and pruning do); remove the parametrization first, with "
            "remove_parametrizations, remove_weight_norm or remove"
        ),
    )


@pytest.mark.parametrize("plan, message", [
    (3, "parallelize_plan must be a ParallelStyle or a mapping of paths to styles, got an object of type int"),
    ({"fc1": "colwise"}, ("parallelize_plan must be a ParallelStyle or a mapping of paths to styles, got an "
     "object of type str under 'fc1'")),
    ({"a": {"b": None}},
     "parallelize_plan must be a ParallelStyle or a mapping of paths to styles, got None under 'a.b'"),
    ({"fc1": ColwiseParallel},
     ("parallelize_plan must be a ParallelStyle or a mapping of paths to styles, got the class ColwiseParallel under "
      "'fc1'; pass an instance: ColwiseParallel()")),
    ({0: ColwiseParallel()}, "parallelize_plan: a path must be a string such as 'layers.0', got 0"),
])  # fmt: skip
def test_what_is_no_plan(twin, plan, message):
    """A plan of a wrong type raises a TypeError with its path, as in PyTorch."""
    with pytest.raises(TypeError) as caught:
        matched_modules(twin.MLP(), plan)
    assert str(caught.value) == message


def test_globs_match_segment_by_segment(twin):
    """In a glob a star does not match a dot, and case matters."""
    matched = matched_modules(attention(), {"layers.*.attn.w*": ColwiseParallel()})
    assert [match.path.rpartition(".")[2] for match in matched] == ["wq", "wk", "wv", "wo"]
    assert matched_modules(attention(), {"layers.*": ColwiseParallel()})[0].path == "layers.0"
    assert matched_modules(attention(), {"*": ColwiseParallel()})[0].path == "layers"
    assert matched_modules(attention(), {"LAYERS": ColwiseParallel()}) == []


def test_a_layer_is_parallelized_once(twin):
    """A second style on a layer is refused, since it would convert inputs and outputs twice."""

    def rank(mesh):
        model = parallelize_module(twin.MLP(), mesh, {"fc*": ColwiseParallel()})
        return check_plan(model, mesh, {"fc1": RowwiseParallel()}).problems

    assert twin.on_mesh((2,), rank)[0] == ("fc1: it is already parallelized by ColwiseParallel",)


def test_two_entries_for_one_layer(twin):
    """Two entries with the same layout for a layer are refused before the first one is applied."""
    report = checked(twin, twin.MLP, {"fc*": ColwiseParallel(), "fc1": ColwiseParallel(use_local_output=False)})
    assert report.problems == ("fc1: 'fc*' and 'fc1' both match it; a layer can have only one style",)


def test_an_entry_that_names_a_parameter(twin):
    """An entry for a parameter says that it is one, and names the module."""
    report = checked(twin, twin.MLP, {"fc1.weight": ColwiseParallel()})
    assert report.problems == (
        "'fc1.weight' (ColwiseParallel) matches no module; it is a parameter; name its module, 'fc1'",
    )


def stages():
    """What two stages of a pipeline have between them: an embedding, numbered layers, a pair of layers, and a head."""
    from torch import nn

    modules = {name: nn.Linear(6, 6) for name in ("0", "1", "up", "down", "head")}
    return nn.ModuleDict({"embed": nn.Embedding(11, 6), **modules})


def test_layers_of_other_stages_and_earlier_calls_are_no_mistake(twin):
    """A mesh of a part of the ranks may be a stage's: the head and numbered layers may be those of other stages."""
    first, last = {"embed": RowwiseParallel(), "0": ColwiseParallel()}, {"1": RowwiseParallel(), "head": NoParallel()}

    def notes(model, mesh, plan):
        return list(check_plan(model, mesh, plan).notes)

    def rank(mesh):
        model, tied = stages(), stages()
        tied["head"].weight = tied["embed"].weight
        told = [
            notes(model, mesh["tp"], first),
            notes(model, mesh["tp"], {"up": ColwiseParallel()}),
            notes(tied, mesh, {"embed": RowwiseParallel(use_local_output=False)}),
        ]
        parallelize_module(model, mesh["tp"], {**last, "up": NoParallel()})
        return [*told, notes(model, mesh["tp"], {"down": RowwiseParallel()})]

    unsharded = [f"linear layer {name} is not sharded, although its sibling layers are" for name in ("0", "1", "up")]
    down, head = (unsharded[0].replace(" 0 ", f" {name} ") for name in ("down", "head"))
    assert twin.on_mesh((2, 2), rank, ("pp", "tp"))[0] == [
        [],
        [*unsharded[:2], down, head],
        [*unsharded, down],
        unsharded[:1],
    ]
