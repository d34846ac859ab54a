"""``hyper-parallel explain``: what a plan shards and communicates, without running it."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.cli import main
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
    """A file with a model and its plan."""
    path = tmp_path / "mlp.py"
    path.write_text(SPEC)
    return path


@pytest.mark.platforms("torch")
def test_thousands_of_ranks(spec, capsys):
    """The command says what 4096 ranks would hold and send; no rank runs."""
    asked = ["explain", f"{spec}:model", "--plan", f"{spec}:plan", "--mesh", "512x8", "--platform", "torch"]
    assert main(asked) == 0
    assert capsys.readouterr().out == TEXT.format(spec=spec)
    assert main([*asked, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["parameters"][0] == {"path": "up.weight", "layout": "f32[10@tp, 6]", "bytes": 48, "of": 240}
    assert [(one["module"], one["phase"], one["bytes"]) for one in told["collectives"]] == [
        ("down", "forward", 124), ("down", "backward", 136), ("up", "backward", 104)
    ]  # fmt: skip


@pytest.mark.platforms("torch")
def test_a_model_that_raises_is_told_as_the_users_own_mistake(spec, capsys):
    """What the model or its loss raises is told with the line of the user's file; a refusal speaks for itself."""
    lines = spec.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.endswith("out.missing"))
    asked = ["--plan", f"{spec}:plan", "--platform", "torch", "--mesh", "2x2"]
    assert main(["explain", f"{spec}:failing", *asked]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: SPEC: the model under PLAN raised AttributeError: 'TorchDTensor' object has no "
        f"attribute 'missing'\n  {spec}:{at}, in <lambda>: {lines[at - 1].strip()}\n"
    )
    assert main(["explain", f"{spec}:narrow", *asked]) == 2
    assert capsys.readouterr().err.startswith("hyper-parallel: error: linear(")


@pytest.mark.platforms("torch")
def test_what_only_other_ranks_know_is_not_guessed(spec, capsys):
    """A program that asks others what they hold is refused, and so is one without a mesh."""
    asked = ["explain", f"{spec}:asking", "--plan", f"{spec}:plan", "--platform", "torch"]
    assert main([*asked, "--mesh", "2x2"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: all_gather_object(): only the other ranks know its result, and in a rehearsal there "
        "are none; run the program in a simulated world: hyper-parallel verify model\n"
    )
    assert main(asked) == 2
    assert "give --mesh, such as 2x2, or --world-size" in capsys.readouterr().err


def test_it_says_what_a_simulated_world_does(platform_name):
    """On a small mesh the collectives and layouts are those of the verified run, byte by byte."""
    scenario = scenario_named("2x2-rms-tied")
    told = explain_model(
        scenario.case, scenario.plan, scenario.mesh_shape, scenario.mesh_names, platform=platform_name, name="it"
    )
    ran = verify_scenario(scenario, platform=platform_name, steps=1)
    assert ran.ok, ran.text()
    assert told.traffic == ran.traffic
    assert told.parameters == ran.parameter_layouts
    assert told.text().startswith(f"it on {platform_name}, mesh dp=2 x tp=2\n")
