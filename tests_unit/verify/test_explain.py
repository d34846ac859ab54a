"""``hyper-parallel explain``: layouts and collectives of a plan, without running it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from hyper_parallel.cli import main
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import explain, explained_step
from hyper_parallel.verify.explain import explain_model
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.model.run import verify_scenario
from hyper_parallel.verify.prove.table import proven_calls, rows_of_call
from hyper_parallel.verify.scenarios import scenario_named

SPEC = """\
import numpy as np
import torch
from hyper_parallel import ColwiseParallel, NoParallel, RowwiseParallel, Replicate, Shard, local_map

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

def handing_over_rows(mesh):
    return {"up": ColwiseParallel(output_layouts=Shard(0)), "down": NoParallel(input_layout=Shard(0))}

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
  memory of a rank in bytes:
    weights            128
    gradients          128
    optimizer          128
    kept for backward  168
    sum                552
  collectives of one training step, bytes received by the worst rank:
    module  phase     collective  over  count  bytes  implicit
    down    forward   all_reduce  tp        1    124
    down    backward  all_reduce  dp        2    136
    up      backward  all_reduce  dp        2    104
    5 collectives, 364 bytes
  time of these collectives, one after the other:
    over  a link of          ranks  count  bytes   time
    dp    25 GB/s and 15 us    512      4    240  60 us
    tp    200 GB/s and 5 us      8      1    124   5 us
    65 us a step
  rows of 12 operator calls: 11 proven for every size, 1 tested on small sizes
    tested: mean: Shard(0) -> Partial(sum)
  checked: 4 gradients are laid out as their parameters
  checked: ranks 0 and 4095 run the same 5 collectives in the same order
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
def test_memory_is_measured_on_a_device(spec, monkeypatch, capsys):
    """With --device the step runs with values, and the most bytes that a device had in use are shown; CPU plays it."""
    platform = platform_named("torch")
    monkeypatch.setattr(harness_of(platform), "on_device", lambda _device: nullcontext(), raising=False)
    monkeypatch.setattr(platform, "to_device", lambda tensor, _device: tensor, raising=False)
    monkeypatch.setattr(harness_of(platform), "peak_bytes", lambda _device: lambda: 4096, raising=False)
    monkeypatch.setattr(explain, "device_errors", lambda _platform, _device: nullcontext())
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
    """A dim with fewer rows than there are ranks along its axes is reported, with the number of empty ranks."""
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
    """An exception of the model or its loss, and a refusal of an operator, are reported with the user's line."""
    lines = spec.read_text().splitlines()
    line_number = next(number for number, line in enumerate(lines, 1) if line.endswith("out.missing"))
    options = ["--plan", f"{spec}:plan", "--platform", "torch", "--mesh", "2x2"]
    assert main(["explain", f"{spec}:failing", *options]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: SPEC: the model under PLAN raised AttributeError: 'TorchDTensor' object has no "
        f"attribute 'missing'\n  {spec}:{line_number}, in <lambda>: {lines[line_number - 1].strip()}\n"
    )
    assert main(["explain", f"{spec}:narrow", *options]) == 2
    call = next(number for number, line in enumerate(lines, 1) if "self.up(" in line)
    assert capsys.readouterr().err == (
        "hyper-parallel: error: the model under PLAN: up: linear(x=f32[4@dp, 5], weight=f32[10@tp, 6], "
        "bias=f32[10@tp]): x has 5 features, weight expects 6\n"
        f"  {spec}:{call}, in forward: {lines[call - 1].strip()}\n"
    )


HEADS = """\
import numpy as np
import torch
from hyper_parallel import ColwiseParallel, RowwiseParallel

class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 16), torch.nn.Linear(16, 6)

    def forward(self, x):
        return self.down(self.up(x).unflatten(-1, (-1, 4)).softmax(-1).flatten(-2))

def case():
    batch = (np.ones((4, 6), np.float32), np.zeros((4, 6), np.float32))
    return Heads(), [batch], lambda out, batch: ((out - batch[1]) ** 2).mean()

def plan(mesh):
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}

def over_one(mesh):
    from hyper_parallel import parallelize_module
    return lambda model, mesh: parallelize_module(model, mesh["b"], plan(mesh))
"""


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "mesh, plan, local, advice",
    [
        ("512", "plan", 1, "the plan runs with tp=4, and fails with tp=8: use at most 4 ranks along tp"),
        ("6", "plan", 3, "the plan runs with tp=2, and fails with tp=3: use at most 2 ranks along tp"),
        ("a=4,b=128", "over_one", 1, "the plan runs with b=4, and fails with b=8: use at most 4 ranks along b"),
        ("5", "plan", None, None),  # the last rank holds no features, and no heads
        ("4", "plan", None, None),
        ("a=3,b=2", "over_one", None, None),
    ],
)
def test_a_plan_with_too_many_ranks_for_the_model_says_how_many_it_runs_with(
    tmp_path, capsys, mesh, plan, local, advice
):
    """Heads of four of 16 features: rehearsals of smaller axes tell, for ranks that hold a part of a head."""
    file = tmp_path / "heads.py"
    file.write_text(HEADS)
    status = main(["explain", f"{file}:case", "--plan", f"{file}:{plan}", "--mesh", mesh])
    err = capsys.readouterr().err
    if local is None:
        assert (status, err) == (0, "")
    else:
        assert status == 2
        line = next(n for n, text in enumerate(HEADS.splitlines(), 1) if "unflatten" in text)
        assert err == (
            "hyper-parallel: error: SPEC: the model under PLAN raised RuntimeError: unflatten: Provided sizes [-1, 4] "
            f"don't multiply up to the size of dim 1 ({local}) in the input tensor\n"
            f"  {file}:{line}, in forward: {HEADS.splitlines()[line - 1].strip()}\n"
            f"  {advice}, or shard less along it\n"
        )


@pytest.mark.platforms("torch")
def test_what_only_other_ranks_know_is_not_guessed(spec, capsys):
    """A program that asks other ranks for objects is refused, and so is a command without a mesh."""
    command = ["explain", f"{spec}:asking", "--plan", f"{spec}:plan", "--platform", "torch"]
    assert main([*command, "--mesh", "2x2"]) == 2
    assert capsys.readouterr().err == (
        "hyper-parallel: error: all_gather_object(): only the other ranks know its result, but this fake world has "
        "none; run the program in a simulated world: hyper-parallel verify model\n"
    )
    assert main(command) == 2
    assert "the number of ranks is missing; give --mesh, such as --mesh 2x2, or --world-size" in capsys.readouterr().err


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("ranks", [4, 512])
def test_local_shards_of_unequal_sizes(spec, ranks, capsys):
    """A plain tensor that a style takes has the global size that the style before has handed over."""
    command = ["explain", f"{spec}:model", "--plan", f"{spec}:handing_over_rows", "--platform", "torch"]
    assert main([*command, "--mesh", str(ranks)]) == 0
    text = capsys.readouterr().out
    assert f"checked: ranks 0 and {ranks - 1} run the same" in text


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
    proofs = proven_calls(platform_name, map(rows_of_call, explanation.plans))
    assert proofs == report.proofs
    assert proofs.counts["proven"] > 20
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
        "  built with values, because without them: SPEC: the model under PLAN: the result of item depends on values, "
        "and here the model runs without values; use a function whose result has a known size, such as "
        "torch.where(mask, x, 0) for x[mask], or verify model, which runs on values"
    )
    assert main(["explain", f"{sizes}:large_and_reading", "--plan", f"{sizes}:plan", "--mesh", "8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "hyper-parallel: error: without values of tensors: SPEC: the model under PLAN: the result of item depends on "
    )
    assert error.endswith("; with values its parameters take 640 GiB, and explain makes at most 4 GiB\n")


@pytest.mark.untraced
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


LAYERS = """\
import torch
from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, Shard, distribute_tensor, fully_shard
from hyper_parallel.platform.select import current_platform

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 24, bias=False), torch.nn.Linear(24, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList([Block() for _ in range(3)]), torch.nn.Linear(6, 3, bias=False)
        self.unused = torch.nn.Parameter(torch.zeros(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    batch = (torch.ones(16, 6), torch.zeros(16, 3))
    return {"build": Model, "batches": [batch], "loss": lambda out, batch: ((out - batch[1]) ** 2).mean(),
            "optimizer": "adamw"}

def twice():
    return {**model(), "accumulate": 2}

def tp(mesh):
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

def sharded(mesh):
    def parallelize(model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return parallelize

def by_rank(mesh):
    def parallelize(model, mesh):
        def hook(module, args, output):
            platform = current_platform()
            transport = platform.transport()
            if transport.rank == 0:
                transport.all_reduce(output.detach(), "sum", mesh.ranks_along((0,)))
        model.head.register_forward_hook(hook)
    return parallelize

def failing(mesh):
    def parallelize(model, mesh):
        def hook(module, args, output):
            if current_platform().transport().rank:
                raise ValueError("only here")
        model.head.register_forward_hook(hook)
    return parallelize

def unused(mesh):
    def parallelize(model, mesh):
        for number in range(5):
            setattr(model, f"more{number}", torch.nn.Parameter(torch.ones(2)))
    return parallelize

def odd_ranks(mesh):
    def parallelize(model, mesh):
        def hook(module, args, output):
            transport = current_platform().transport()
            transport.all_reduce(output.detach(), "sum", (0, 1, 3))
        model.head.register_forward_hook(hook)
    return parallelize

def uneven(mesh):
    def parallelize(model, mesh):
        tensor = distribute_tensor(torch.ones(5, 6), mesh, [Shard(0)])
        def hook(module, args, output):
            rows = (2,) if current_platform().transport().rank == 0 else (1,)
            tensor.redistribute(placements=[Replicate() if rows == (2,) else Shard(1)])
        model.head.register_forward_hook(hook)
    return parallelize
"""


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """Return the name of a module with a model of repeated layers, and several plans."""
    (tmp_path / "layers.py").write_text(LAYERS)
    monkeypatch.chdir(tmp_path)
    return "layers.py"


def rows_of(capsys, layers, *options, status=0):
    """Run the command on the model of the file ``layers``, and return the rows of its JSON."""
    assert main(["explain", f"{layers}:model", "--platform", "torch", "--json", *options]) == status
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.platforms("torch")
def test_memory_is_that_of_the_formula(layers, capsys):
    """Weights, gradients, optimizer state and what is kept for backward are counted in bytes of the local shards."""
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:tp", "--mesh", "8")
    weights = (3 * 2 * 24 * 6 // 8 + 6 * 3) * 4
    activations = (4 * 16 * 6 + 3 * 16 * 24 // 8 + 16 * 3) * 4  # inputs of layers, of the ReLU the output, the loss
    assert row["memory"] == {
        "weights": weights + 20,
        "gradients": weights,
        "optimizer": 2 * weights + 7 * 4,  # the number of steps is a tensor
        "activations": activations,
        "total": 4 * weights + 20 + 28 + activations,
    }
    assert row["notes"] == ["the loss does not depend on unused, which get no gradient"]


@pytest.mark.platforms("torch")
def test_fully_sharded_models_are_explained(layers, capsys):
    """Collectives of ``fully_shard`` have the module that they gather, their axis and the bytes of their rows."""
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:sharded", "--mesh", "8")
    assert row["ok"]
    assert row["with_values"] == ""
    events = [(event["module"], event["phase"], event["collective"], event["axes"]) for event in row["collectives"]]
    blocks = [f"blocks.{number}" for number in range(3)]
    assert sorted(events) == sorted([
        ("", "forward", "all_gather", ["tp"]), *((block, "forward", "all_gather", ["tp"]) for block in blocks),
        *((block, "backward", "all_gather", ["tp"]) for block in reversed(blocks)),
        *((block, "backward", "reduce_scatter", ["tp"]) for block in reversed(blocks)),
        ("", "backward", "reduce_scatter", ["tp"]),
    ])  # fmt: skip
    row_of_block = 24 * 6 // 8 + 24 + 8  # a shard of each weight, of 6 rows one for each rank, and a flag for each rank
    assert row["collectives"][1]["bytes"] == 7 * row_of_block * 4
    assert (
        main(["explain", f"{layers}:twice", "--plan", f"{layers}:sharded", "--mesh", "8", "--platform", "torch"]) == 0
    )
    assert "  blocks.0-2  forward   all_gather      tp        6 " in capsys.readouterr().out


@pytest.mark.platforms("torch")
def test_repeated_layers_are_one_row(layers, capsys):
    """Layers with the same in every column are one row of the text, which sums them and says how many they are."""
    assert main(["explain", f"{layers}:model", "--plan", f"{layers}:tp", "--mesh", "8", "--platform", "torch"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["blocks.0-2.up.weight", "f32[24@tp,", "6]", "216", "1728", "3"] in lines
    assert ["blocks.0-2.down", "forward", "all_reduce", "tp", "3", "2016"] in lines


@pytest.mark.platforms("torch")
def test_candidates_are_ranked(layers, capsys, tmp_path):
    """Of several plans the one whose collectives take least comes first; links decide; a plan that fails is named."""
    plans = ["--plan", f"{layers}:sharded", "--plan", f"{layers}:tp", "--mesh", "8"]
    assert [row["plan"] for row in rows_of(capsys, layers, *plans)] == [f"{layers}:tp", f"{layers}:sharded"]
    page = tmp_path / "plans.html"
    command = ["explain", f"{layers}:model", "--platform", "torch", *plans, "--html", str(page), "--link", "tp=0.001,1"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "plans by the time of their collectives in a step:\n"
        "    plan                  time  bytes received  collectives  bytes on a rank\n"
        f"    {layers}:tp       3.36 ms "
    )
    assert "    tp    0.001 GB/s and 1 us      8      5   3360  3.36 ms\n" in text
    assert all(part in page.read_text() for part in ("<svg", "blocks.0-2.up.weight", f"{layers}:sharded", "3.36 ms"))
    assert main([*command, "--plan", f"{layers}:absent"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"hyper-parallel: error: plan {layers}:absent on torch is not explained: PLAN '{layers}:absent'"
    )


@pytest.mark.platforms("torch")
def test_ranks_that_communicate_by_their_number(layers, capsys):
    """A collective that one rank runs and the other does not is wrong, and so is a rank that fails alone."""
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:by_rank", "--mesh", "4", status=1)
    assert row["wrong"] == [
        "collective 1 differs: on rank 0 forward of (model): all_reduce over tp; on rank 3 there is none"
    ]
    assert not row["ok"]
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:uneven", "--mesh", "4", status=1)
    assert row["wrong"][0] == (
        "collective 1 differs: on rank 0 forward of (model): all_gather over tp, f32[5@tp, 6] -> f32[5, 6]; on rank 3 "
        "forward of (model): all_to_all over tp, f32[5@tp, 6] -> f32[5, 6@tp]"
    )
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:failing", "--mesh", "4", status=1)
    assert row["wrong"] == [
        "rank 3 fails where rank 0 does not: SPEC: the model under PLAN raised ValueError: only here"
    ]
    assert (
        main(["explain", f"{layers}:model", "--plan", f"{layers}:failing", "--mesh", "4", "--platform", "torch"]) == 1
    )
    assert "\n  WRONG: rank 3 fails" in capsys.readouterr().out


@pytest.mark.platforms("torch")
def test_gradients_must_have_dual_layouts(layers, capsys, monkeypatch):
    """A gradient that is not laid out as its parameter asks for is wrong, and named with both layouts."""
    monkeypatch.setattr(explained_step, "dual", lambda layout: layout.with_shape((1, 1)))
    command = ["--plan", f"{layers}:sharded", "--mesh", "8"]
    (row,) = rows_of(capsys, layers, *command, status=1)
    assert row["wrong"][0] == "the gradient of blocks.0.up.weight is [24@tp, 6] and must be [1@tp, 1]"
    assert row["checked"] == []


@pytest.mark.platforms("torch")
def test_many_parameters_without_gradient(layers, capsys):
    """Of many parameters that get no gradient four are named."""
    (row,) = rows_of(capsys, layers, "--plan", f"{layers}:unused", "--mesh", "2")
    assert row["notes"] == [
        "the loss does not depend on unused, more0, more1, more2 and 2 others, which get no gradient"
    ]


@pytest.mark.platforms("torch")
def test_a_plan_that_cannot_be_priced_says_why(layers, capsys, tmp_path):
    """A collective over ranks that are no axes of the mesh has no price, and so the plan has none."""
    page = tmp_path / "plan.html"
    command = ["explain", f"{layers}:model", "--plan", f"{layers}:odd_ranks", "--mesh", "2x2", "--platform", "torch"]
    assert main([*command, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "    other ranks  unknown" in text
    assert "    not priced: (model): all_reduce in forward runs over ranks that are no axes of the mesh\n" in text
    assert "    not priced a step\n" in text
    assert "not priced" in page.read_text()


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("plan", ["tp", "sharded"])
def test_one_rank_and_no_collectives(layers, capsys, plan):
    """A mesh of one rank has nothing to compare, communicates nothing and is told so."""
    assert main(["explain", f"{layers}:model", "--plan", f"{layers}:{plan}", "--mesh", "1", "--platform", "torch"]) == 0
    text = capsys.readouterr().out
    assert "  no collectives\n" in text
    assert "same order" not in text
