"""``hyper-parallel reduce``: the file, the report as text and JSON, the budget."""

import json
from pathlib import Path

import pytest

from hyper_parallel.cli import main

CONFIGS = Path(__file__).parents[1] / "verify" / "reduce" / "configs"


def report(capsys, *words):
    """Run the command with --json; return its status and its report."""
    status = main(["reduce", *map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_report_lists_what_changed_what_was_kept_and_what_cannot_be_shown(capsys, tmp_path):
    """The text has every changed key with both numbers, and the lines on what is kept and hidden."""
    path = tmp_path / "small" / "config.json"
    words = ["reduce", str(CONFIGS / "deepseek-v3.json"), "--mesh", "pp=4,dp=8,tp=8,ep=8", "-o", str(path)]
    assert main(words) == 0
    text = capsys.readouterr().out
    small, large = json.loads(path.read_text()), json.loads((CONFIGS / "deepseek-v3.json").read_text())
    changed = [key for key in large if large[key] != small[key] and not isinstance(large[key], dict)]
    assert all(f"\n  {key}: {large[key]} -> {small[key]}\n" in text for key in changed)
    assert "DeepseekV3" not in text
    assert text.startswith(
        f"{CONFIGS / 'deepseek-v3.json'}: a Hugging Face config, mesh tp 8 -> 2, pp 4 -> 2, ep 8 -> 2"
    )
    assert "\n  experts: more than a token chooses, which is 4 instead of 8\n" in text
    assert "\n  every kind of layer, in its order: 5 of the 61 layers\n" in text
    assert "\n  axis pp: stages between the first and the last of 2, as 4 have\n" in text
    assert "\n  axes tp, dp: some have one size, so a reduction over the wrong one may pass\n" in text
    assert "\n  depth: range and rounding of half precision after 61 layers\n" in text
    assert "\nestimated: 671 G -> " in text
    assert text.endswith(f"\nwrote {path}\n")


def test_the_report_as_json(capsys):
    """JSON has the same facts; without --mesh two axes are assumed, and the report says so."""
    status, found = report(capsys, CONFIGS / "qwen3-next-80b-a3b.json")
    assert status == 0
    assert found["ok"] is True
    assert found["assumed"] == ["tp", "ep"]
    assert found["mesh"] == {"tp": [2, 2], "ep": [2, 2]}
    assert found["changed"]["num_hidden_layers"] == [48, 4]
    assert found["left"] == ["linear_conv_kernel_dim"]
    assert found["written"] is None
    assert 79e9 < found["estimate"]["parameters"][0] < 81e9
    main(["reduce", str(CONFIGS / "qwen3-next-80b-a3b.json")])
    text = capsys.readouterr().out
    assert "mesh tp 2 -> 2 (assumed), ep 2 -> 2 (assumed)\n" in text
    assert "\nleft as they are, though they look like sizes: linear_conv_kernel_dim 4\n" in text


def test_a_time_that_is_too_short_is_status_1(capsys):
    """An estimate above the budget is status 1; the report says by how much."""
    status, found = report(capsys, CONFIGS / "llama-3-8b.json", "--budget", "0.5")
    assert (status, found["ok"], found["budget"]) == (1, False, 0.5)
    assert main(["reduce", str(CONFIGS / "llama-3-8b.json"), "--budget", "0.5"]) == 1
    assert ", error: more than 0.5 s\n" in capsys.readouterr().out


def test_an_existing_file_is_replaced_if_asked(capsys, tmp_path):
    """--force replaces a file; long lists are abbreviated in the text."""
    path = tmp_path / "small.json"
    path.write_text("{}")
    words = ["reduce", str(CONFIGS / "phi-3-mini-128k.json"), "-o", str(path)]
    assert main(words) == 2
    assert main([*words, "--force"]) == 0
    assert json.loads(path.read_text())["model_type"] == "phi3"
    assert "\n  rope_scaling.long_factor: list of 48 -> " in capsys.readouterr().out


@pytest.mark.parametrize("name, words", [("mixtral-8x7b", "which is 2 as before"), ("llama-3-8b", "serves 4 query")])
def test_what_is_kept_is_named(name, words, capsys):
    """Ratios of experts and heads are in the report."""
    _, found = report(capsys, CONFIGS / f"{name}.json")
    assert any(words in sentence for sentence in found["kept"])


def test_a_file_without_sizes_has_no_estimate(capsys):
    """Of torchtitan only the mesh is known: there is no estimate, and the blind spots of its flavor are listed."""
    path = CONFIGS / "torchtitan-llama3-8b.toml"
    assert main(["reduce", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\nno estimate: the sizes of the model are not in the file; 8 simulated ranks\n" in f"{text}\n"
    assert "\n  model.flavor: ratios of heads and experts of 8B, which are in torchtitan's code\n" in text
    assert "\n  axis cp: rings of 4 ranks\n" in text
    status, found = report(capsys, path)
    assert (status, found["estimate"], found["ranks"]) == (0, None, 8)


def test_an_axis_of_seven_ranks_stays(capsys):
    """Nothing is said of axes that are as large as before, nor of rings of two ranks where there is none."""
    status, found = report(capsys, CONFIGS / "qwen2.5-7b.json", "--mesh", "tp=7")
    assert (status, found["mesh"]) == (0, {"tp": [7, 7]})
    assert not any(sentence.startswith("ax") for sentence in found["blind"])


def test_a_small_model_is_left_as_it_is(capsys, tmp_path):
    """Layers, vocabulary and experts that cannot be fewer are kept, and nothing is said of them."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8,
             "num_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 36}  # fmt: skip
    path.write_text(json.dumps(sizes))
    status, found = report(capsys, path)
    assert (status, found["changed"]) == (0, {})
    assert not any(sentence.startswith(("depth", "tokens", "experts", "seq")) for sentence in found["blind"])
    assert main(["reduce", str(path)]) == 0
    assert " k parameters" in capsys.readouterr().out
