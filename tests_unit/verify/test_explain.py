"""``hyper-parallel explain``: layouts and collectives of a plan, without running it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from hyper_parallel.cli import main
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import explain
from hyper_parallel.verify.explain import explain_model
from hyper_parallel.verify.model import verify_scenario
from hyper_parallel.verify.scenarios import scenario_named

SPEC = """\
import numpy as np
import torch
from hyper_parallel import ColwiseParallel, RowwiseParallel, Replicate, Shard, local_map

class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def model():
    batch = (np.ones((1030, 6), np.float32), np.zeros((1030, 6), np.float32))
    return Mlp(), [batch], lambda out, batch: ((out - batch[1]) ** 2).mean()

def plan(mesh):
    return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}

def half(mesh):
    return {"up": ColwiseParallel(output_layouts=Replicate())}

def narrow():
    batch = (np.ones((4, 5), np.float32), np.zeros((4, 6), np.float32))
    return Mlp(), [batch], lambda out, batch: out.sum()

def failing():
    return Mlp(), model()[1], lambda out, batch: out.missing

def asking():
    def loss(out, batch):
        return local_map(torch.sin, out_placements=[Shard(0), Replicate()])(out).sum()
    return {**dict(zip(("model", "batches"), model()[:2])), "loss": loss}
"""

TEXT = """\
{spec}:model on torch, mesh dp=512 x tp=8
    parameter    layout         bytes on a rank   of
    up.weight    f32[10@tp, 6]               48  240
    up.bias      f32[10@tp]                   8   40
    down.weight  f32[6, 10@tp]               48  240
    down.bias    f32[6]                      24   24
    4 parameters, 128 of 544 bytes on a rank
  collectives of one training step, bytes received by the worst rank:
    module  phase     collective  over  count  bytes  implicit
    down    forward   all_reduce  tp        1    124
    down    backward  all_reduce  dp        2    136
    up      backward  all_reduce  dp        2    104
    5 collectives, 364 bytes
"""


@pytest.fixture
def spec(tmp_path):
    """Return a file with a model and its plan."""
    path = tmp_path / "mlp.py"
    path.write_text(SPEC)
    return path


@pytest.mark.platforms("torch")
def test_thousands_of_ranks(spec, capsys):
    """The command prints local shards and collectives of 4096 ranks; no rank runs."""
    command = ["explain", f"{spec}:model", "--plan", f"{spec}:plan", "--mesh", "512x8", "--platform", "torch"]
    assert main(command) == 0
    assert capsys.readouterr().out == TEXT.format(spec=spec)
    assert main([*command, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["rows"]
    assert document["parameters"][0] == {"path": "up.weight", "layout": "f32[10@tp, 6]", "bytes": 48, "of": 240}
    assert [(row["module"], row["phase"], row["bytes"]) for row in document["collectives"]] == [
        ("down", "forward", 124), ("down", "backward", 136), ("up", "backward", 104)
    ]  # fmt: skip


@pytest.mark.platforms("torch")
def test_memory_is_measured_on_a_card(spec, monkeypatch, capsys):
    """With --device the step runs with values, and the most bytes that a card had in use are shown; CPU plays it."""
    platform = platform_named("torch")
    monkeypatch.setattr(platform, "on_device", lambda _device: nullcontext(), raising=False)
    monkeypatch.setattr(platform, "to_device", lambda tensor, _device: tensor, raising=False)
    monkeypatch.setattr(platform, "peak_bytes", lambda _device: lambda: 4096, raising=False)
    monkeypatch.setattr(explain, "card_errors", lambda _platform, _device: nullcontext())
    command = ["explain", f"{spec}:model", "--plan", f"{spec}:plan", "--mesh", "2x2", "--device", "npu"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "    4096 bytes in use on npu at most, measured on rank 0 in this step\n" in printed
    assert "  built with values, because memory is measured on npu\n" in printed
    assert main([*command, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["rows"]
    assert (document["device"], document["peak_bytes"]) == ("npu", 4096)


@pytest.mark.platforms("torch")
def test_ranks_that_hold_nothing(spec, capsys):
    """A dim with fewer rows than there are ranks along its axes is told, with the number of empty ranks."""
    command = ["explain", f"{spec}:model", "--plan", f"{spec}:plan", "--platform", "torch", "--mesh"]
    note = "dim 0 of up.weight, dim 0 of up.bias, dim 1 of down.weight: size 10 over 12 ranks of tp, 2 of which hold"
    assert main([*command, "2x12"]) == 0
    assert f"    {note} nothing\n" in capsys.readouterr().out
    assert main([*command, "2x12", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["rows"]
    assert document["empty_shards"] == [f"{note} nothing"]
    assert main([*command, "2x10"]) == 0
    assert "hold nothing" not in capsys.readouterr().out


@pytest.mark.platforms("torch")
def test_a_parameter_that_the_plan_leaves_plain(spec, capsys):
    """A parameter that no style covers stays plain: every rank holds the whole of it, so no rank holds nothing."""
    command = ["explain", f"{spec}:model", "--plan", f"{spec}:half", "--platform", "torch", "--mesh", "12", "--json"]
    assert main(command) == 0
    (document,) = json.loads(capsys.readouterr().out)["rows"]
    assert document["parameters"] == [
        {"path": "up.weight", "layout": "f32[10@tp, 6]", "bytes": 24, "of": 240},
        {"path": "up.bias", "layout": "f32[10@tp]", "bytes": 4, "of": 40},
        {"path": "down.weight", "layout": "f32[6, 10] plain", "bytes": 240, "of": 240},
        {"path": "down.bias", "layout": "f32[6] plain", "bytes": 24, "of": 24},
    ]
    assert document["empty_shards"] == [
        "dim 0 of up.weight, dim 0 of up.bias: size 10 over 12 ranks of tp, 2 of which hold nothing"
    ]


@pytest.mark.platforms("torch")
def test_a_model_that_raises_is_an_input_error(spec, capsys):
    """An exception of the model or its loss is reported with the user's line; a refusal is reported unchanged."""
    lines = spec.read_text().splitlines()
    line_number = next(number for number, line in enumerate(lines, 1) if line.endswith("out.missing"))
    options = ["--plan", f"{spec}:plan", "--platform", "torch", "--mesh", "2x2"]
    assert main(["explain", f"{spec}:failing", *options]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: SPEC: the model under PLAN raised AttributeError: 'TorchDTensor' object has no "
        f"attribute 'missing'\n  {spec}:{line_number}, in <lambda>: {lines[line_number - 1].strip()}\n"
    )
    assert main(["explain", f"{spec}:narrow", *options]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: the model under PLAN: up: linear(x=f32[4@dp, 5], weight=f32[10@tp, 6], "
        "bias=f32[10@tp]): x has 5 features, weight expects 6\n"
    )


@pytest.mark.platforms("torch")
def test_what_only_other_ranks_know_is_not_guessed(spec, capsys):
    """A program that asks other ranks for objects is refused, and so is a command without a mesh."""
    command = ["explain", f"{spec}:asking", "--plan", f"{spec}:plan", "--platform", "torch"]
    assert main([*command, "--mesh", "2x2"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: all_gather_object(): only the other ranks know its result, and in a rehearsal there "
        "are none; run the program in a simulated world: hyper-parallel verify model\n"
    )
    assert main(command) == 2
    assert "give --mesh, such as 2x2, or --world-size" in capsys.readouterr().err


def test_it_agrees_with_a_simulated_world(platform_name):
    """On a small mesh the collectives, their bytes and the layouts are those of the verified run."""
    scenario = scenario_named("2x2-rms-tied")
    explanation = explain_model(
        scenario.case, scenario.plan, scenario.mesh_shape, scenario.mesh_names, platform=platform_name, name="it"
    )
    report = verify_scenario(scenario, platform=platform_name, steps=1)
    assert report.ok, report.text()
    assert explanation.traffic == report.traffic
    assert explanation.parameters == report.parameter_layouts
    assert explanation.text().startswith(f"it on {platform_name}, mesh dp=2 x tp=2\n")


SIZES = """\
import torch
from hyper_parallel import ColwiseParallel, RowwiseParallel

def model(width=6, reads=False):
    module = torch.nn.Sequential(torch.nn.Linear(width, 10 * width), torch.nn.Linear(10 * width, 3))
    def loss(out, batch):
        return out.sum() * (2.0 if reads and batch[0].sum().item() > 0 else 1.0)
    return module, [(torch.ones(2, width), torch.ones(2, 3))], loss

def large():
    return model(1 << 17)

def reading():
    return model(reads=True)

def large_and_reading():
    return model(1 << 17, reads=True)

def plan(mesh):
    return {"0": ColwiseParallel(), "1": RowwiseParallel()}
"""


@pytest.fixture
def sizes(tmp_path, monkeypatch):
    """Return the name of a module with models of several sizes."""
    (tmp_path / "sizes.py").write_text(SIZES)
    monkeypatch.chdir(tmp_path)
    return "sizes.py"


@pytest.mark.platforms("torch")
def test_a_model_larger_than_any_memory(sizes, capsys):
    """Tensors of a model of 640 GiB have no values; bytes and collectives are those of the formula."""
    assert main(["explain", f"{sizes}:large", "--plan", f"{sizes}:plan", "--mesh", "8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    width = 1 << 17
    assert [(parameter["bytes"], parameter["of"]) for parameter in row["parameters"]] == [
        (10 * width * width * 4 // 8, 10 * width * width * 4), (10 * width * 4 // 8, 10 * width * 4),
        (3 * 10 * width * 4 // 8, 3 * 10 * width * 4), (12, 12),
    ]  # fmt: skip
    assert [(event["module"], event["collective"]) for event in row["collectives"]] == [("1", "all_reduce")]
    assert row["with_values"] == ""


@pytest.mark.platforms("torch")
def test_a_program_that_reads_values(sizes, capsys):
    """A small one runs with values, and the text says why; a large one is refused with its size."""
    assert main(["explain", f"{sizes}:reading", "--plan", f"{sizes}:plan", "--mesh", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = next(line for line in lines if "built with values" in line)
    assert reason == (
        "  built with values, because without them: SPEC: the model under PLAN raised RuntimeError: Tensor.item() "
        "cannot be called on meta tensors"
    )
    assert main(["explain", f"{sizes}:large_and_reading", "--plan", f"{sizes}:plan", "--mesh", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "hyper-parallel: error: without values of tensors: SPEC: the model under PLAN raised Runtime"
    )
    assert error.endswith("; with values its parameters take 640 GiB, and explain makes at most 4 GiB\n")


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("name", ["2x2-rms-tied", "2x2-layer-untied", "3-rms-untied", "3-layer-tied"])
def test_values_do_not_change_the_explanation(name, monkeypatch):
    """With and without values, layouts, collectives and bytes of every scenario are the same."""
    scenario = scenario_named(name)
    arguments = (scenario.case, scenario.plan, scenario.mesh_shape, scenario.mesh_names)
    without = explain_model(*arguments, platform="torch", name="it")
    assert without.with_values == ""
    monkeypatch.setattr(explain, "_without_values", lambda run, _: (run(), ""))
    assert explain_model(*arguments, platform="torch", name="it") == without
