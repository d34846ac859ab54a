"""Reduced configurations: the relations of the large one, checked on the files, with no code of the reduction."""

import itertools
import json
from pathlib import Path

import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce import solver
from hyper_parallel.verify.reduce.costs import parameters
from hyper_parallel.verify.reduce.document import read_document
from hyper_parallel.verify.reduce.reduction import reduce_document
from hyper_parallel.verify.reduce.structure import read_structure

CONFIGS = Path(__file__).parent / "configs"
BILLIONS = {
    "deepseek-v3": 671, "gemma-2-9b": 9.24, "jamba-v0.1": 51.6, "llama-3-8b": 8.03, "llama-3.1-70b": 70.6,
    "mixtral-8x7b": 46.7, "phi-3-mini-128k": 3.82, "qwen2.5-7b": 7.62, "qwen3-30b-a3b": 30.5, "qwen3-next-80b-a3b": 80,
}  # fmt: skip
"""Parameters of each model, as its authors publish them."""
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size", "q_lora_rank", "kv_lora_rank")
MESHES = [{}, {"tp": 4, "pp": 4, "dp": 8}, {"tp": 2, "ep": 4, "cp": 2}, {"pp": 3, "dp": 6}]
CASES = [pytest.param(name, mesh, id=f"{name}-{mesh}") for name in BILLIONS for mesh in MESHES]


def both(name, mesh):
    """Return the large and the small configuration."""
    path = CONFIGS / f"{name}.json"
    return json.loads(path.read_text()), json.loads(reduce_document(read_document(path), mesh).text)


def reduced(tmp_path, changes, mesh=None, base="llama-3-8b"):
    """Return the small configuration of a public one with some keys changed; None removes a key."""
    content = json.loads((CONFIGS / f"{base}.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return json.loads(reduce_document(read_document(path), mesh or {}).text)


@pytest.mark.parametrize("name, mesh", CASES)
def test_ratios_and_divisions_are_kept(name, mesh):
    """Heads per key head, experts per token, and what an axis divides are as in the large model."""
    large, small = both(name, mesh)
    assert large["num_attention_heads"] // large["num_key_value_heads"] == (
        small["num_attention_heads"] // small["num_key_value_heads"]
    )
    tp = mesh.get("tp", 1 if mesh else 2)
    ranks = 4 if large["num_key_value_heads"] == 2 < tp else min(tp, 2)
    for key in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"):
        assert (large[key] % tp == 0) == (small[key] % ranks == 0), key
    assert small["num_key_value_heads"] > ranks or large["num_key_value_heads"] <= tp
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if key in large:
            assert small[key] >= 2 * small["num_experts_per_tok"]
            assert small[key] % small.get("n_group", 1) == 0
            assert "ep" not in mesh or (small[key] >= 4 and small[key] % 2 == 0)


@pytest.mark.parametrize("name, mesh", CASES)
def test_numbers_that_differ_still_differ(name, mesh):
    """No two sizes or fused widths become equal, widths have their order, and equal ones stay equal."""
    large, small = both(name, mesh)
    keys = [key for key in WIDTHS if key in large]
    for one, other in itertools.combinations(keys, 2):
        assert (large[one] > large[other]) == (small[one] > small[other])
        assert (large[one] == large[other]) == (small[one] == small[other])

    def dims(config):
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        head = config.get("head_dim") or config.get("v_head_dim") or config["hidden_size"] // heads
        fused = {"query": heads * head, "key": groups * head, "qkv": (heads + 2 * groups) * head,
                 "gate_up": 2 * config["intermediate_size"]}  # fmt: skip
        counts = {key: config[key] for key in (*keys, "num_attention_heads", "num_key_value_heads")}
        if "kv_lora_rank" in config:
            fused = {}
        elif small["num_key_value_heads"] == 1:
            del fused["key"]  # as wide as one head
        return {**fused, **counts, "head": head}

    before, after = dims(large), dims(small)
    for one, other in itertools.combinations(before, 2):
        assert before[one] == before[other] or after[one] != after[other], (one, other)


@pytest.mark.parametrize("name, mesh", CASES)
def test_every_kind_of_layer_remains_on_each_stage(name, mesh):
    """Every stage has a period of the layers, and at least two; dense layers lead where they did."""
    large, small = both(name, mesh)
    stages = {1: 1, 3: 3, 4: 2}[mesh.get("pp", 1)]
    period = max(large.get(key, 1) for key in ("attn_layer_period", "full_attention_interval"))
    assert small["num_hidden_layers"] >= stages * max(period, 2)
    assert (large["num_hidden_layers"] % mesh.get("pp", 1) == 0) == (small["num_hidden_layers"] % stages == 0)
    assert small["num_hidden_layers"] < large["num_hidden_layers"]
    assert (small.get("first_k_dense_replace", 0) > 0) == (large.get("first_k_dense_replace", 0) > 0)
    if "layer_types" in large:
        assert set(small["layer_types"]) == set(large["layer_types"])
        assert len(small["layer_types"]) == small["num_hidden_layers"]


@pytest.mark.parametrize("name, mesh", CASES)
def test_all_else_stays(name, mesh):
    """Keys, their order and everything that is not a size are as they were; special tokens are in the vocabulary."""
    large, small = both(name, mesh)
    assert list(small) == list(large)
    for key, value in large.items():
        if isinstance(value, (str, bool, float)) or value is None:
            assert small[key] == value
        if key.endswith("token_id"):
            for each in small[key] if isinstance(small[key], list) else [small[key]]:
                assert 0 <= each < small["vocab_size"]
    assert (large.get("bos_token_id") == large["eos_token_id"]) == (small.get("bos_token_id") == small["eos_token_id"])


def test_lists_of_kinds_of_layers(tmp_path):
    """Kinds of attention and of feed-forward layers that stand in lists keep their kinds, and are counted."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    lists = {"layer_types": kinds, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 46}
    small = reduced(tmp_path, {**lists, "full_attention_interval": None}, base="qwen3-next-80b-a3b")
    assert set(small["layer_types"]) == {"linear_attention", "full_attention"}
    assert set(small["mlp_layer_types"]) == {"dense", "sparse"}
    assert len(small["layer_types"]) == len(small["mlp_layer_types"]) == small["num_hidden_layers"]
    document = read_document(tmp_path / "config.json")
    structure = read_structure(document, {})
    assert parameters(document, structure.sizes, structure.pattern) / 1e9 == pytest.approx(76.4, rel=0.01)


def test_a_vocabulary_that_the_axis_does_not_divide_stays_so(tmp_path):
    """A multiple of four that eight ranks do not divide becomes a number that two ranks do not divide."""
    assert reduced(tmp_path, {"vocab_size": 50260}, {"tp": 8})["vocab_size"] % 2 == 1


def test_a_search_without_end_is_given_up(monkeypatch, tmp_path):
    """After a number of attempts the file is refused."""
    monkeypatch.setattr(solver, "_ATTEMPTS", 3)
    with pytest.raises(InputError, match="no smaller sizes relate to each other as these do"):
        reduced(tmp_path, {})


@pytest.mark.parametrize("name", BILLIONS)
def test_estimated_parameters_are_those_that_are_published(name):
    """The estimate of the large model is within one percent of its published number; the small has under 3 million."""
    document = read_document(CONFIGS / f"{name}.json")
    structure = read_structure(document, {})
    count = parameters(document, structure.sizes, structure.pattern)
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    small = reduce_document(document, {})
    assert parameters(document, small.sizes, small.pattern) < 3e6


def test_position_limits_keep_their_ratios():
    """A window, the limit before scaling and the limit after it keep their ratios; factors have one per pair."""
    large, small = both("phi-3-mini-128k", {})
    for key in ("original_max_position_embeddings", "sliding_window"):
        assert large["max_position_embeddings"] / large[key] == small["max_position_embeddings"] / small[key]
    pairs = small["hidden_size"] // small["num_attention_heads"] // 2
    for key in ("short_factor", "long_factor"):
        assert len(small["rope_scaling"][key]) == pairs
        assert small["rope_scaling"][key] == sorted(small["rope_scaling"][key])


def test_sections_of_a_rotary_embedding_fill_it(tmp_path):
    """Sections of several axes are as many as before, and their sum is the number of pairs."""
    small = reduced(tmp_path, {"rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}})
    assert len(small["rope_scaling"]["mrope_section"]) == 3
    assert sum(small["rope_scaling"]["mrope_section"]) == small["hidden_size"] // small["num_attention_heads"] // 2


def test_a_number_that_follows_from_others_follows_from_the_small_ones(tmp_path):
    """The scale of attention scores is a width of a head or as it was; the width of a query of MLA is a sum."""
    gemma = {"base": "gemma-2-9b"}
    assert (small := both("gemma-2-9b", {})[1])["query_pre_attn_scalar"] == small["head_dim"]
    small = reduced(tmp_path, {"query_pre_attn_scalar": 224}, **gemma)
    assert small["query_pre_attn_scalar"] == small["hidden_size"] // small["num_attention_heads"]
    assert reduced(tmp_path, {"query_pre_attn_scalar": 100}, **gemma)["query_pre_attn_scalar"] == 100
    small = reduced(tmp_path, {"qk_head_dim": 192}, base="deepseek-v3")
    assert small["qk_head_dim"] == small["qk_nope_head_dim"] + small["qk_rope_head_dim"]


def test_a_model_with_one_key_head_keeps_it(tmp_path):
    """One key head stays one, whatever the axis; two or more that ranks share stay two, on four ranks."""
    assert reduced(tmp_path, {"num_key_value_heads": 1})["num_key_value_heads"] == 1
    for keys, tp in ((4, 8), (2, 4), (2, 8), (8, 16)):
        assert reduced(tmp_path, {"num_key_value_heads": keys}, {"tp": tp})["num_key_value_heads"] == 2
        assert read_structure(read_document(tmp_path / "config.json"), {"tp": tp}).axes["tp"] == (tp, 4)
    assert reduced(tmp_path, {"num_key_value_heads": 8}, {"tp": 8})["num_key_value_heads"] == 2


def test_axes_that_could_be_mistaken_for_each_other_differ():
    """Data parallel of many ranks is 3 next to tensor parallel of 2; next to experts, and if it was 2, it is 2."""
    document = read_document(CONFIGS / "qwen3-30b-a3b.json")
    assert read_structure(document, {"tp": 4, "dp": 8}).axes["dp"] == (8, 3)
    assert read_structure(document, {"tp": 4, "dp": 2}).axes["dp"] == (2, 2)
    assert read_structure(document, {"tp": 4, "dp": 8, "ep": 8}).axes["dp"] == (8, 2)
    assert read_structure(document, {"dp": 8}).axes["dp"] == (8, 2)


def test_experts_that_groups_of_ranks_have_remain_so():
    """Data-parallel ranks stay a multiple of the expert-parallel ones, several times as many if they were."""
    document = read_document(CONFIGS / "qwen3-30b-a3b.json")
    for data, experts, small in ((8, 8, 2), (8, 4, 4), (16, 2, 4), (6, 2, 6), (4, 8, 2), (8, 1, 2)):
        axes = read_structure(document, {"dp": data, "ep": experts}).axes
        assert axes["dp"] == (data, small)
        assert axes["ep"] == (experts, min(experts, 2))


def test_an_axis_that_is_not_a_power_of_two_has_an_odd_number_of_ranks(tmp_path):
    """Seven ranks stay seven, six become three, and what they divide is divided."""
    small = reduced(tmp_path, {}, {"tp": 7}, base="qwen2.5-7b")
    assert small["num_attention_heads"] % 7 == 0
    small = reduced(tmp_path, {"num_attention_heads": 48, "hidden_size": 6144}, {"tp": 6})
    assert small["num_attention_heads"] % 3 == 0


def test_the_language_model_of_a_larger_model_is_reduced(tmp_path):
    """Sizes under text_config are those of the model; all others are left as they are, and listed."""
    path = tmp_path / "config.json"
    text = json.loads((CONFIGS / "llama-3-8b.json").read_text())
    path.write_text(json.dumps({"text_config": text, "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24}}))
    reduction = reduce_document(read_document(path), {})
    small = json.loads(reduction.text)
    assert small["vision_config"] == {"hidden_size": 1024, "num_hidden_layers": 24}
    assert small["text_config"] == both("llama-3-8b", {})[1]
    assert reduction.left == ("vision_config.hidden_size", "vision_config.num_hidden_layers")


REFUSED = """
num_hidden_layers=null | | FILE cannot be reduced as a Hugging Face config: it has no num_hidden_layers (n_layer, num_layers)
vocab_size=null | | FILE cannot be reduced as a Hugging Face config: it has no vocab_size
hidden_size="big" | | FILE: hidden_size is 'big'; it must be an integer of at least 1
hidden_size=-1 | | FILE: hidden_size is -1; it must be an integer of at least 1
hidden_size=4097 | | FILE: hidden_size is 4097, not a multiple of num_attention_heads, which is 32; correct one of them, or add head_dim
n_embd=1024 | | FILE: hidden_size is 4096 and n_embd is 1024, although they mean the same; leave one of them out
num_key_value_heads=5 | | FILE: num_attention_heads is 32, not a multiple of num_key_value_heads, which is 5; correct one of them
num_experts=12 | ep=8 | FILE: num_experts is 12, which ep=8 does not divide; correct the number, or the size of axis ep
bos_token_id=1 | tp=5 | FILE: num_attention_heads is 32, which tp=5 does not divide; correct the number, or the size of axis tp
hidden_size=32 | | FILE: no smaller sizes relate to each other as these do; verify the program with the file as it is
"""  # noqa: E501 - a table of messages


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_contradiction_is_refused_with_its_key(row, tmp_path):
    """A missing, invalid or contradictory size is an error with file, key and number."""
    change, mesh, message = (cell.strip() for cell in row.split("|"))
    key, _, value = change.partition("=")
    axes = {axis: int(size) for axis, _, size in [mesh.partition("=")] if axis}
    with pytest.raises(InputError) as error:
        reduced(tmp_path, {key: json.loads(value)}, axes)
    assert str(error.value).replace(str(tmp_path / "config.json"), "FILE") == message
