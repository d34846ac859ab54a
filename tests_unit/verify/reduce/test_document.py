"""Files of each format: what is read, what is written in place, what is refused."""

import difflib
import re
from pathlib import Path

import pytest

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.reduce.document import read_document
from hyper_parallel.verify.reduce.layers import frequencies, frequency_text
from hyper_parallel.verify.reduce.reduction import reduce_document
from hyper_parallel.verify.report_files import parse_toml

CONFIGS = Path(__file__).parent / "configs"
TEXTS = ["gpt2-345m.args", "mixtral-8x7b.sh", "deepseek-v3.args", "torchtitan-llama3-8b.toml",
         "mindformers-llama3-8b.yaml"]  # fmt: skip


def reduced(name, text=None, mesh=None, tmp_path=None):
    """Return the reduction of a file, or of another text under its name."""
    path = CONFIGS / name
    if text is not None:
        path = tmp_path / name
        path.write_text(text)
    return reduce_document(read_document(path), mesh or {})


def numbers(text, names):
    """Return the numbers that follow some names in a text."""
    return {name: int(re.search(rf"{name}[ =:\"]+(\d+)", text)[1]) for name in names}


@pytest.mark.parametrize("name", TEXTS)
def test_only_numbers_of_changed_keys_change(name):
    """Comments, order and all other words are as they were: as many words change as values."""
    reduction = reduced(name)
    large, small = (re.split(r"(\s+)", text) for text in ((CONFIGS / name).read_text(), reduction.text))
    assert len(large) == len(small)
    changed = [pair for pair in zip(large, small, strict=True) if pair[0] != pair[1]]
    assert len(changed) == len(reduction.changed)
    assert len(reduction.changed) >= 4
    letters = [re.sub(r"\d+B?|debugmodel", "", word) for pair in changed for word in pair]
    assert letters[::2] == letters[1::2]


@pytest.mark.parametrize("name", ["gpt2-345m.args", "deepseek-v3.args", "mixtral-8x7b.sh"])
def test_arguments_of_megatron_keep_their_relations(name):
    """What Megatron requires of its arguments is so in the small ones: layers, heads and batches are divided."""
    text = reduced(name).text
    found = numbers(text, ["num-layers", "hidden-size", "num-attention-heads", "micro-batch-size", "global-batch-size"])
    stages = {"gpt2-345m.args": 2, "mixtral-8x7b.sh": 4, "deepseek-v3.args": 1}[name]
    assert found["num-layers"] % stages == 0
    assert found["num-layers"] >= 2 * stages
    assert found["hidden-size"] % found["num-attention-heads"] == 0
    assert found["num-attention-heads"] % 2 == 0
    assert found["global-batch-size"] % (2 * found["micro-batch-size"]) == 0
    assert found["global-batch-size"] >= 4


def test_variables_of_a_script_are_followed():
    """An argument that is a variable is changed where the script assigns it; comments name no argument."""
    text = reduced("mixtral-8x7b.sh").text
    assert "\nexport PP=2   # stages\n" in text
    assert '\nEP="2"\n' in text
    assert "\nTP=${TP:-1}\n" in text
    assert "--num-layers is that of" in text
    assert "\n    --num-layers-per-virtual-pipeline-stage 2\n" in text


def test_frequencies_of_expert_layers():
    """Megatron's lists of layers are read and written; anything else is left alone."""
    assert frequencies("([0]*3+[1]*2)") == [0, 0, 0, 1, 1]
    assert frequencies("([1]*2+[0])*2") == [1, 1, 0, 1, 1, 0]
    assert frequencies("[0]+[1]") == [0, 1]
    assert (frequencies("[i for i in x]"), frequencies(3)) == (None, None)
    assert frequency_text([0, 0, 1]) == "([0]*2+[1]*1)"
    assert "--moe-layer-freq '([0]*2+[1]*2)'" in reduced("deepseek-v3.args").text


def test_a_torchtitan_file_keeps_its_types():
    """The small file parses, its axes are 2, and -1 remains what it means."""
    small = parse_toml(reduced("torchtitan-llama3-8b.toml").text)
    assert small["parallelism"] == {
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 1, "context_parallel_degree": 2,
    }  # fmt: skip
    assert small["model"]["flavor"] == "debugmodel"
    assert small["training"]["seq_len"] % 8 == 0


def test_a_local_batch_fills_the_stages(tmp_path):
    """A local batch of torchtitan has at least a sample for each stage, and a global one is a multiple of it."""
    text = (CONFIGS / "torchtitan-llama3-8b.toml").read_text()
    text = text.replace("local_batch_size = 1", "local_batch_size = 16\nglobal_batch_size = 4096")
    text = text.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 8")
    small = parse_toml(reduced("torchtitan-llama3-8b.toml", text, tmp_path=tmp_path).text)["training"]
    assert small["local_batch_size"] == 4
    assert small["global_batch_size"] % (4 * 2) == 0


def test_a_yaml_of_mindformers_is_read_by_lines():
    """Only the model's keys and axes change; sequences, anchors and literal texts are left alone."""
    reduction = reduced("mindformers-llama3-8b.yaml")
    values = reduction.structure.document.values
    assert values["model.model_config.num_layers"] == 32
    assert values["output_dir"] == "'./output'"
    assert values["load_checkpoint"] == "''"
    assert values["runner_config.sink_mode"] is True
    assert values["train_dataset.batch_size"] == 1
    assert not any("per_print_times" in key or "notes." in key for key in values)
    text = (CONFIGS / "mindformers-llama3-8b.yaml").read_text()
    changed = [line for line in difflib.ndiff(text.splitlines(), reduction.text.splitlines()) if line[0] == "-"]
    assert len(changed) == len(reduction.changed)


def test_lists_and_stages_in_yaml(tmp_path):
    """Stages of each rank become two; a list of zeros splits nothing; other notations are left alone."""
    text = (CONFIGS / "mindformers-llama3-8b.yaml").read_text()
    text = text.replace("offset: 0", "offset: [0, 0, 0, 0]\n    pp_interleave_num: 4\n    other: {a: 1}\n    - 3")
    reduction = reduced("mindformers-llama3-8b.yaml", text, tmp_path=tmp_path)
    assert numbers(reduction.text, ["num_layers", "pp_interleave_num"]) == {"num_layers": 8, "pp_interleave_num": 2}
    assert "other: {a: 1}" in reduction.text


REFUSED = r"""
gpt2-345m.args | --num-layers 24 | --num-layers $LAYERS | FILE: num-layers is '$LAYERS'; it must be an integer of at least 1
gpt2-345m.args | size 4 | size 0 | FILE: pipeline-model-parallel-size is 0; it must be an integer of at least 1
gpt2-345m.args | --num-layers 24 | | FILE cannot be reduced as arguments of Megatron: it has no num-layers
gpt2-345m.args | --fp16 | --decoder-first-pipeline-num-layers 3 | FILE: decoder-first-pipeline-num-layers splits the layers by hand; reduce a copy without it, and split that by hand
mixtral-8x7b.sh | stage 4 | stage 3 | FILE: num-layers is 32, not a multiple of 4 stages times num-layers-per-virtual-pipeline-stage, which is 3; correct one of them
mindformers-llama3-8b.yaml | offset: 0 | offset: [1, 0, 0, -1] | FILE: model.model_config.offset splits the layers by hand; reduce a copy without it, and split that by hand
mindformers-llama3-8b.yaml | offset: 0 | \n\toffset: 0 | FILE cannot be read as a YAML of MindFormers: line 71 is indented by a tab
torchtitan-llama3-8b.toml | [model] | [model | FILE cannot be read as a TOML of torchtitan: Expected ']' at the end of a table declaration (at line 11, column 7)
torchtitan-llama3-8b.toml | flavor = | size = {x = 1}\n"flavor" = | FILE: model.flavor cannot be replaced where it stands; write it on a line of its own
"""  # noqa: E501 - a table of messages


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_file_that_cannot_be_reduced_is_refused(row, tmp_path):
    """Numbers that are missing, contradictory or in another notation are errors with file and key."""
    name, old, new, message = (cell.strip() for cell in row.replace(" | |", " |  |").split(" | "))
    text = (CONFIGS / name).read_text()
    assert old in text
    with pytest.raises(InputError) as error:
        _ = reduced(name, text.replace(old, new.replace(r"\n", "\n").replace(r"\t", "\t"), 1), tmp_path=tmp_path).text
    assert str(error.value).replace(str(tmp_path / name), "FILE") == message


def test_a_mesh_that_contradicts_the_file_is_refused():
    """An axis that the file names and --mesh too must have one size."""
    message = (
        f"--mesh says pp=2, but {CONFIGS / 'gpt2-345m.args'} has pipeline-model-parallel-size 4; leave one of them"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        reduced("gpt2-345m.args", mesh={"pp": 2})
    assert reduced("gpt2-345m.args", mesh={"pp": 4, "dp": 8}).structure.axes["dp"] == (8, 3)


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "config.json",
            b"{",
            " cannot be read as a Hugging Face config: Expecting property name enclosed in double quotes",
        ),
        ("config.json", b"[1]", " cannot be read as a Hugging Face config: it must be a JSON object"),
        ("config.json", b"\xff", " cannot be read: it is not text"),
        ("config.json", None, " cannot be read: No such file or directory"),
        (
            "train.py",
            b"import torch",
            " is not a configuration of a known format; known formats are .json of Hugging Face, ",
        ),
    ],
)
def test_what_is_not_a_config_is_refused(name, content, message, tmp_path):
    """A file that cannot be read or parsed is an error with its name."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_document(path)
    assert str(error.value).startswith(f"{path}{message}")
