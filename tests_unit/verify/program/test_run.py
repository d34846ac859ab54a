"""A program is run on one rank and on several, as torchrun would, and compared; what makes no sense is refused."""

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify import record, verify_program
from hyper_parallel.verify.input_error import InputError

pytestmark = pytest.mark.platforms("torch")

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from helper import batches

def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in batches(int(sys.argv[1])):
        model(x.tensor_split(world)[rank]).square().sum().backward()
        for position, parameter in enumerate(model.parameters()):
            if "--bug" not in sys.argv or position != 1:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    print("trained", __name__, __file__)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
    sys.exit(0)
"""
HELPER = """
import torch

def batches(count):
    return [torch.randn(7, 5, dtype=torch.float64) for _ in range(count)]
"""


@pytest.fixture
def script(tmp_path):
    """A data-parallel script with a module of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    return str(tmp_path / "train.py")


def train(loss=None, steps=2, before=None):
    """Train a data-parallel model by hand."""
    if before is not None:
        before()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(6, 5, dtype=torch.float64).tensor_split(world)[rank]
        (loss or (lambda y: y.square().sum()))(model(x)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def refusal(program, world_size=2, **options):
    """Return the message with which a program is refused; no thread or process is left."""
    threads = threading.active_count()
    with pytest.raises(InputError) as caught:
        verify_program(program, world_size, platform="torch", **options)
    assert threading.active_count() == threads
    return str(caught.value)


def test_a_script_runs_as_torchrun_starts_it(script, capsys):
    """Arguments, environment, ``__main__`` and modules beside the script are there; it prints to stderr."""
    report = verify_program(script, 3, platform="torch", args=["2"])
    assert report.ok, report.text()
    assert (report.steps, report.verdict.counts["gradient"]) == (2, 24)
    out, err = capsys.readouterr()
    assert out == ""
    trained = f"trained __main__ {script}"
    assert err.splitlines() == [
        *(f"{script} on one rank prints:", trained),
        *(f"{script} on 3 ranks prints:", *[trained] * 3),
    ]


def test_a_pattern_of_no_output_is_refused():
    """A pattern of --only that matches nothing is refused, instead of comparing less than was asked for."""
    assert refusal(train, only=["(model)", "layers.*"]) == (
        "--only 'layers.*' matches no output, mask or value of the program; they have the path of their module, such "
        "as layers.0.up, and (model) is the whole"
    )


def test_a_declaration_of_no_value_is_refused():
    """A misspelt name of --declare is refused with names that are near, unless --only leaves out what it may name."""
    declared = {"weight": "replica", "weights": "replica"}
    message = "--declare 'weights' matches no value of the program; did you mean weight?"
    assert refusal(train, declared=declared) == message
    assert verify_program(train, 2, platform="torch", declared=declared, only=["(model)"]).ok


def test_a_bug_is_found_with_its_cause(script):
    """One gradient that is not reduced is the first difference, and its cause is reported."""
    report = verify_program(script, 3, platform="torch", args=["2", "--bug"])
    first = report.verdict.first
    assert (first.kind, first.name, first.step, first.cause.kind) == ("gradient", "0.bias", 0, "missing-reduction")
    assert not report.ok
    assert report.json()["verdict"]["first"]["name"] == "0.bias"


def test_real_processes_give_the_same_verdict(script):
    """The same program over gloo, in processes."""
    report = verify_program(script, 2, platform="torch", args=["1"], launch="processes")
    assert report.ok, report.text()


def test_functions_and_meshes(tmp_path):
    """A function may take a mesh, whose axes have size 1 in the reference; its own single form may be another one."""
    sizes = []

    def parallel(mesh):
        sizes.append((mesh.mesh_dim_names, tuple(mesh.mesh.shape)))
        train()

    report = verify_program(parallel, mesh={"dp": 2, "tp": 1}, single=train, platform="torch", steps=1)
    assert report.ok, report.text()
    assert sizes == [(("dp", "tp"), (2, 1))] * 2
    assert report.steps == 1
    assert report.text().startswith(
        "test_functions_and_meshes.<locals>.parallel on torch: 2 simulated ranks (dp=2, tp=1) against a "
        "single device, 1 optimizer step, seed 0, "
    )
    (tmp_path / "own.py").write_text(SCRIPT.replace("int(sys.argv[1])", "2"))
    (tmp_path / "helper.py").write_text(HELPER)
    assert verify_program(f"{tmp_path}/own.py:main", 2, platform="torch").ok
    assert f"{tmp_path}/own.py:stop: the file has no function 'stop'; it has batches, main" in refusal(
        f"{tmp_path}/own.py:stop"
    )


def test_a_rank_that_fails_is_in_the_report():
    """A program that fails only on several ranks is not equal, and the report shows its traceback."""

    def program():
        if dist.get_rank() == 1:
            msg = "no such shard"
            raise ArithmeticError(msg)
        train()

    report = verify_program(program, 2, platform="torch")
    assert not report.ok
    assert "FAILED on 2 ranks: ArithmeticError: no such shard\nrank 1 of 2 failed" in report.text()
    assert report.json()["failure"].startswith("rank 1 of 2 failed")


def test_unequal_calls_are_a_cause():
    """Ranks that call different collectives are distinguished from other failures."""

    def program():
        if dist.get_rank() == 1:
            dist.barrier()
        train()

    report = verify_program(program, 3, platform="torch")
    assert (report.ok, report.kind) == (False, "unequal-calls")
    assert "  cause: unequal-calls: ranks call different collectives\n" in report.text()


def test_the_same_command_gives_the_same_report():
    """Seeds are fixed."""
    first, second = (verify_program(train, 2, platform="torch").verdict.to_json() for _ in range(2))
    assert first == second


# What makes no sense


def test_a_file_that_is_missing_or_no_python(tmp_path):
    """The file is checked before anything runs."""
    assert refusal(f"{tmp_path}/no.py") == f"FILE: there is no file {tmp_path}/no.py"
    (tmp_path / "bad.py").write_text("x = 1\ny = (\n")
    assert refusal(f"{tmp_path}/bad.py") == f"FILE: {tmp_path}/bad.py:2 is not Python: '(' was never closed"
    assert refusal(train, args=["--fast"]) == (
        "FILE 'train' is a function, which takes no arguments ['--fast']; only scripts do"
    )


def test_numbers_that_make_no_sense():
    """One rank is the reference itself; no steps compare nothing."""
    assert refusal(train, 1) == (
        "--world-size is 1: the program on one rank is the reference; compare it with at least 2 ranks"
    )
    assert refusal(train, steps=0) == "--steps is 0; at least one step must be compared"
    assert refusal(train, launch="cloud") == "--launch 'cloud' must be simulated, processes or threads"
    message = refusal(lambda left, right: left + right)
    assert message.endswith("<lambda> takes left, right; it must take nothing, a mesh, or rank and world_size")
    message = refusal(lambda rank, settings: settings[rank])
    assert message.endswith(
        "<lambda> takes rank, settings; it must take nothing, a mesh, or rank and world_size: verify a function that "
        "calls it, such as `def ranks(rank): test_numbers_that_make_no_sense.<locals>.<lambda>(...)`"
    )


def test_a_device_that_is_not_here(monkeypatch):
    """A device that PyTorch does not see, and one named beside torchrun's own, are refused before anything runs."""
    with pytest.raises(UnsupportedOnBackend, match=r"^--device npu: torch sees no such device here, only cpu; "):
        verify_program(print, 2, device="npu")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ValueError, match=r"^--device npu: a program under torchrun chooses its device itself; leave "):
        verify_program(print, 2, device="npu")


def test_nothing_recorded_and_no_step():
    """A run in which nothing was compared is an error."""
    assert refusal(lambda: None) == (
        "test_nothing_recorded_and_no_step.<locals>.<lambda> on rank 0 of 1: nothing was recorded; it calls no module, "
        "makes no optimizer step and records no value: call the training in the file itself, or record values by "
        'hyper_parallel.verify.record("name", value)'
    )
    assert refusal(lambda: nn.Linear(2, 2)(torch.ones(2))) == (
        "test_nothing_recorded_and_no_step.<locals>.<lambda> on rank 0 of 1: no optimizer step happened, so no "
        "gradient "
        "and no update would be compared; let it train for at least one step, or record values by "
        'hyper_parallel.verify.record("name", value)'
    )
    assert verify_program(lambda: record("x", 1.5), 2, platform="torch").ok

    def no_backward():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2))
        optimizer.step()

    assert refusal(no_backward) == (
        "test_nothing_recorded_and_no_step.<locals>.no_backward on rank 0 of 1: its optimizers saw no gradient of any "
        "parameter, so nothing is trained that could be compared; call backward before the optimizer's step, and let "
        "gradients be synchronized before it"
    )


def test_a_rank_that_makes_no_step_is_no_bad_input():
    """One rank alone trains: the others are what is wrong."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(6, 5).tensor_split(world)[rank]).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 0:
            optimizer.step()

    report = verify_program(program, 3, platform="torch")
    assert not report.ok
    assert report.verdict.incomplete == [
        f"rank {rank} makes no optimizer step, the reference makes 1" for rank in (1, 2)
    ]


def test_a_rank_that_alone_evaluates_after_training():
    """What one rank does after the last step is not a step that the others lack."""

    def program():
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = torch.randn(7, 5)
        model(rows.tensor_split(dist.get_world_size())[rank]).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0:
            with torch.no_grad():
                model(rows)

    report = verify_program(program, 2, platform="torch")
    assert report.ok, report.text()


@pytest.mark.parametrize("flat", [False, True])
def test_optimizers_sharded_by_hand(flat):
    """What is left in ``grad`` of parameters that no optimizer of the rank has is listed; flat copies are compared."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        owned = list(model.parameters())[rank::world]
        if flat:
            pieces = torch.cat([value.detach().flatten() for value in model.parameters()]).tensor_split(world)
            owned = [nn.Parameter(pieces[rank].clone())]
        optimizer = torch.optim.SGD(owned, lr=0.1, momentum=0.9)
        for _ in range(2):
            model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
            if flat:
                whole = torch.cat([value.grad.flatten() for value in model.parameters()])
                dist.all_reduce(whole)
                owned[0].grad = whole.tensor_split(world)[rank]
            else:
                for number, value in enumerate(model.parameters()):
                    dist.reduce(value.grad, number % world)
            optimizer.step()
            share(model, owned, flat)
            model.zero_grad()

    def share(model, owned, flat):
        rank, world = dist.get_rank(), dist.get_world_size()
        if flat:
            size = sum(value.numel() for value in model.parameters())
            whole = torch.zeros(size)
            whole.tensor_split(world)[rank].copy_(owned[0].detach())
            dist.all_reduce(whole)
            nn.utils.vector_to_parameters(whole, model.parameters())
        else:
            for number, value in enumerate(model.parameters()):
                dist.broadcast(value.data, number % world)

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    ranks = "0, 1, 2" if flat else "1, 2"
    line = f"gradient of 0.weight on ranks {ranks}: no optimizer there has the parameter"
    assert line in report.verdict.skipped
    assert not any("they have no name" in line for line in report.verdict.skipped)
    assert report.verdict.counts["state"] == (6 if flat else 8)  # of pieces of a flat weight, which are compared


@pytest.mark.parametrize("rows", [6, 10])
def test_autocast_raises_no_alarm_and_hides_no_factor(rows):
    """Gradients that were rounded to bfloat16 on each rank are right; those without a mean are not."""

    def program(factor=1.0):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            inputs, targets = (torch.randn(rows, size).tensor_split(world)[rank] for size in (5, 3))
            with torch.autocast("cpu", torch.bfloat16):
                out = model(inputs)
            (out.float() - targets).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad *= factor if world > 1 else 1.0
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(lambda: program(0.5), 2, platform="torch")
    assert report.ok, report.text()
    report = verify_program(program, 2, platform="torch")
    assert (report.verdict.first.kind, report.verdict.first.name) == ("gradient", "3.weight")
    assert report.verdict.first.cause.kind == "sum-for-average"


@pytest.mark.untraced
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_values_in_half_precision_raise_no_alarm(dtype):
    """A gradient of fewer than eight numbers in half precision may be off by its own rounding, not by float32's."""

    def program(factor=1.0):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Linear(9, 3)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            inputs, targets = (torch.randn(13, size).to(dtype).tensor_split(world)[rank] for size in (5, 3))
            ((model(inputs) - targets).square().sum() / 39).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad *= factor if world > 1 else 1.0
            optimizer.step()
            optimizer.zero_grad()

    for world in (2, 3):
        report = verify_program(program, world, platform="torch")
        assert report.ok, report.text()
    report = verify_program(lambda: program(2.0), 2, platform="torch")
    assert report.verdict.first.kind == "gradient"


def two_optimizers(broken):
    """Weights and biases have an optimizer each; broken, the second one steps once only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizers = [torch.optim.SGD([value], lr=0.1) for value in model.parameters()]
    for step in range(2):
        model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
        for value in model.parameters():
            dist.all_reduce(value.grad)
        for optimizer in optimizers if not (broken and step) else optimizers[:1]:
            optimizer.step()
        model.zero_grad()


def zeroed(broken):
    """Broken, a gradient is set to zero."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
    for value in model.parameters():
        dist.all_reduce(value.grad)
    if broken:
        model.bias.grad.zero_()
    optimizer.step()


def loaded_state(broken):
    """Weights of an earlier step are loaded; broken, by rank 0 alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
        for value in model.parameters():
            dist.all_reduce(value.grad)
        optimizer.step()
        if step == 1 and not (broken and rank):
            model.load_state_dict(kept)
        model.zero_grad()


def last_batch(broken):
    """The last batch is smaller and uneven; broken, ranks are averaged alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.randn(21, 5).split(8):
        rows = batch.tensor_split(world)[rank]
        model(rows).square().mean().backward()
        for value in model.parameters():
            value.grad *= 1 / world if broken else len(rows) / len(batch)
            dist.all_reduce(value.grad)
        optimizer.step()
        model.zero_grad()


def closures(broken):
    """An optimizer calls the model several times a step; broken, gradients stay local."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    inputs, targets = torch.randn(8, 5).tensor_split(world)[rank], torch.randn(8, 3).tensor_split(world)[rank]

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for value in model.parameters():
            if not broken:
                dist.all_reduce(value.grad)
                value.grad /= world
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / world

    for step in range(2):
        optimizer.step(closure) if step else optimizer.step(closure=closure)


@pytest.mark.parametrize(
    "program, kind, name, cause",
    [
        (two_optimizers, "gradient", "bias", "not-updated"),
        (zeroed, "gradient", "bias", "no-gradient"),
        (loaded_state, "weight", "weight", "replicas-differ"),
        (last_batch, "gradient", "weight", "scaled-by-count"),
        (closures, "gradient", "weight", "missing-reduction"),
    ],
)
def test_programs_of_others(program, kind, name, cause):
    """Right, they are equal; with a line broken, the first wrong tensor and its cause are named."""
    report = verify_program(lambda: program(False), 2, platform="torch")
    assert report.ok, report.text()
    first = verify_program(lambda: program(dist.get_world_size() > 1), 2, platform="torch").verdict.first
    assert (first.kind, first.name, first.cause.kind) == (kind, name, cause)


def test_clipping_in_another_way():
    """Ranks may clip by themselves what one device clips by a function: what the optimizer sees is compared."""

    def program(wrong=False):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
            for value in model.parameters():
                dist.all_reduce(value.grad)
            if world == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                norms = [value.grad.norm() for value in model.parameters()]
                norm = norms[0] if wrong else torch.stack(norms).norm()
                for value in model.parameters():
                    value.grad *= min(1.0, 0.5 / float(norm))
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 2, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 8
    assert any("norm" in line and "missing on all ranks" in line for line in report.verdict.skipped)
    report = verify_program(lambda: program(wrong=True), 2, platform="torch")
    assert (report.verdict.first.kind, report.verdict.first.step) in {("gradient", 0), ("norm", 0)}


def test_a_shard_of_rounding_noise():
    """The bias of an attention's keys has no gradient but rounding: a rank that holds just it raises no alarm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.MultiheadAttention(18, 3, batch_first=True)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            rows = torch.randn(12, 5, 18, generator=torch.Generator().manual_seed(step)).tensor_split(world)[rank]
            (model(rows, rows, rows, need_weights=False)[0].square().sum() * world * 1e-4).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()


def test_state_of_an_optimizer_in_an_optimizer():
    """PyTorch's ZeroRedundancyOptimizer keeps the state of its parameters in another optimizer, which is compared."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for _ in range(2):
            model(torch.randn(7, 5).tensor_split(world)[rank]).square().sum().backward()
            for value in model.parameters():
                dist.all_reduce(value.grad)
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 2, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["state"] == 2 * 2 * 3


def test_stages_that_learn_their_shapes():
    """PyTorch's pipeline stages call their module on empty tensors first, which is not a forward of the program."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        inputs, targets = torch.randn(8, 5), torch.randn(8, 5)
        if world > 1:
            part = nn.Sequential()
            part.add_module(str(rank), model[rank])
            model = part
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world == 1:
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                (nn.functional.mse_loss(model(x), y) / 4).backward()
        else:
            schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
            schedule.step(*([inputs] if rank == 0 else []), **({} if rank == 0 else {"target": targets}))
        optimizer.step()

    report = verify_program(program, 2, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 4


def train_in_virtual_stages(wrong):
    """Train four layers; a rank of two has two stages that do not follow each other."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 7), nn.Linear(7, 5)]
    batches, targets = torch.randn(2, 12, 5), torch.randn(2, 12, 5)
    parts = [nn.Sequential() for _ in range(world)]  # of two ranks, or the one that has all
    for number, layer in enumerate(layers[rank::world]):
        parts[number if world > 1 else 0].add_module(str(number * world + rank), layer)
    optimizer = torch.optim.AdamW([value for part in parts for value in part.parameters()], lr=0.01)
    stages = [PipelineStage(part, rank + 2 * place, 4, torch.device("cpu")) for place, part in enumerate(parts)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss) if world > 1 else None
    for inputs, target in zip(batches, targets, strict=True):
        if schedule is not None:
            schedule.step(*([inputs] if rank == 0 else []), **({} if rank == 0 else {"target": target}))
        for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True) if schedule is None else ():
            (nn.functional.mse_loss(parts[0](x), y) / 4).backward()
        for value in parts[1].parameters() if wrong and world > 1 and rank == 0 else ():
            value.grad /= 4
        optimizer.step()
        optimizer.zero_grad()


def test_virtual_stages_of_a_pipeline():
    """They are equal; means over micro-batches that one stage takes twice are named, not the losses.

    PyTorch's schedule divides gradients by the number of micro-batches, and the single device its losses.
    """
    report = verify_program(lambda: train_in_virtual_stages(wrong=False), 2, platform="torch")
    assert report.status == 0, report.text()
    assert report.verdict.counts["gradient"] == 2 * 8
    report = verify_program(lambda: train_in_virtual_stages(wrong=True), 2, platform="torch")
    first = report.verdict.first
    assert (first.kind, first.name.partition(".")[0], first.cause.kind) == ("gradient", "2", "scaled-by-size")


def test_a_reference_that_is_not_deterministic():
    """It is run twice, and the first value that differs is named."""
    count = []

    def noisy():
        count.append(1)
        train(loss=lambda y: y.sum() * len(count))

    assert refusal(noisy) == (
        "test_a_reference_that_is_not_deterministic.<locals>.noisy is not deterministic on one rank: run twice, loss "
        "'loss' of step 0 differs; seed every generator that it uses (torch.manual_seed, "
        "mindspore.set_seed, random.seed, numpy.random.seed), and keep time and object ids out of the training"
    )
    assert refusal(lambda: train(steps=count.append(1) or len(count))).endswith(
        " takes 4 optimizer steps in one run and 6 in another, and the steps that both take are equal: something other "
        "than the training ends it, such as a time limit; give it a number of steps that every run takes, such as "
        "--steps 1"
    )


def test_a_reference_that_fails():
    """Its error is the input's."""

    def failing():
        raise ArithmeticError

    name = "test_a_reference_that_fails.<locals>.failing"
    assert refusal(failing).startswith(
        f"{name} fails on one rank, which is the reference: ArithmeticError\n"
        "If it cannot run on one rank, change that, or name another reference (--single FILE, --single-args ARGS).\n"
        "rank 0 of 1 failed\n"
    )


def test_a_file_of_the_other_framework_is_one_line(tmp_path):
    """A script that fails on the framework of --platform, and imports only the other one, is told which to name."""
    file = tmp_path / "train.py"
    file.write_text("def net():\n    import mindspore\n\nraise ValueError('no tensor')\n")
    assert refusal(str(file)) == (
        f"{file} imports mindspore and does not run on torch (ValueError: no tensor); give --platform mindspore"
    )


def test_a_program_that_exits(tmp_path):
    """A status other than 0 is reported; ``os._exit`` ends the rank, not this process."""
    (tmp_path / "out.py").write_text("import os, sys\nos._exit(3) if sys.argv[1:] else sys.exit('no data')\n")
    words = "; a program that is verified must end with status 0"
    assert refusal(f"{tmp_path}/out.py") == (
        f"{tmp_path}/out.py: the program ended with sys.exit('no data') in a world of 1{words}"
    )
    assert refusal(f"{tmp_path}/out.py", args=["x"]) == (
        f"{tmp_path}/out.py: the program ended with sys.exit(3) in a world of 1{words}"
    )


def test_a_program_that_forks():
    """A child that goes on with the program is ended and told; one that works for itself is not."""

    def forks():
        if not os.fork():
            os._exit(0)

    assert verify_program(lambda: train(before=forks), 2, platform="torch").ok
    message = refusal(lambda: train(before=os.fork))
    assert message.startswith("test_a_program_that_forks.<locals>.<lambda> forks at ")
    assert message.endswith(
        ", and the child goes on with the program as a rank of its own; end it there with os._exit(0), or start "
        "processes with subprocess or multiprocessing"
    )


def test_a_program_that_never_ends():
    """The time limit ends it, and the error says where it was."""

    def endless():
        while True:
            pass

    get_torch_platform()  # builds it, which is not a part of the time
    assert refusal(endless, timeout=5.0).startswith(
        "test_a_program_that_never_ends.<locals>.endless did not end within 5 s in a world of 1; bound it with "
        "--steps, "
        "or give it more time with --timeout\nrank 0 of 1 did not finish within 5 s\n"
    )


def test_records_that_do_not_fit(tmp_path):
    """A run whose arrays do not fit in the scratch folder is refused before the repeats, and leaves nothing there."""
    assert refusal(train, budget=100, scratch=str(tmp_path)).startswith(
        f"train: no room in the scratch folder {tmp_path} for the bounds and the ranks' arrays: 260 bytes more are "
        "needed, and 0 bytes of 100 bytes are taken; compare fewer steps (--steps), leave out outputs"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="[no-tool] the system lists no open files")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_verification_leaves_no_file_of_its_scratch_folder_open(tmp_path, wrong):
    """An open file would keep its room on the disk after it is deleted, and a process has a limited number of them."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(11, 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(6, 11).tensor_split(world)[rank]).square().sum().backward()
            for parameter in () if wrong else model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    assert verify_program(program, 3, platform="torch", scratch=str(tmp_path)).ok is not wrong
    opened = [str(entry.readlink()) for entry in list(Path("/proc/self/fd").iterdir()) if entry.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_the_room_for_ranks_is_that_of_the_reference_at_least(tmp_path):
    """Where the reference leaves no room for the ranks' arrays on the disk, that is said before they run."""

    def wide():
        torch.manual_seed(0)
        model = nn.Linear(50, 40, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 50)).sum().backward()
        optimizer.step()

    phases = []
    kept = 4 * (2000 * 3 + 120 + 150)  # weight before and after, gradient, output; the input is not recorded
    message = refusal(wide, budget=kept + 10_000, scratch=str(tmp_path), progress=phases.append)
    assert "for the bounds and the ranks' arrays: " in message
    assert phases == ["reference"]
    report = verify_program(wide, 2, platform="torch", budget=10 * kept, scratch=str(tmp_path))
    assert "equal on 2 ranks: 4 parameters, 2 outputs, 2 losses, 2 gradients" in report.text()


def test_a_number_of_dims_zero_is_trained():
    """A parameter without dims is moved and displaced as any other."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        model.scale = nn.Parameter(torch.tensor(2.6592))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(6, 5).tensor_split(world)[rank]
            (model(x) * model.scale.exp()).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()


def test_replicas_with_other_bits_differ():
    """Ranks that hold the same weight with other bits differ, although each is within the rounding tolerance."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(50, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(6, 50).tensor_split(world)[rank]).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                if rank == 1:
                    parameter.grad *= 1 + 2.0**-23
            optimizer.step()
            optimizer.zero_grad()

    first = verify_program(program, 2, platform="torch").verdict.first
    assert (first.kind, first.name, first.step, first.ranks) == ("weight", "weight", 0, (0, 1))
    assert re.fullmatch(r"rank 1 holds the same part as rank 0, and \d+ of 150 elements have other bits", first.why)
    assert first.cause.kind == "replicas-differ"


def test_numbers_that_python_makes_of_float32_keep_its_unit():
    """An average that Python computes from float32 losses may be off by their rounding, a constant may not."""

    def program(constant=3):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.randn(510, 64).tensor_split(world)[rank]).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            record("loss per token", total.item() / world / 7)
            record("constant", 1 / constant + (1e-12 * (world - 1) if constant == 7 else 0))

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    first = verify_program(lambda: program(7), 2, platform="torch").verdict.first
    assert (first.kind, first.name) == ("value", "constant")


def test_a_norm_that_pytorch_sums_one_by_one(tmp_path):
    """The norm of a large tensor is off by what float32 sums lose, on one rank more than on shards; no alarm."""

    def program(factor=1.0):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(600, 1800, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(6, 600).tensor_split(world)[rank]).square().sum().backward()
        dist.all_reduce(model.weight.grad)
        squares = torch.stack([part.norm() for part in model.weight.grad.tensor_split(world)]).square()
        norm = squares.sum().sqrt() * (factor if world > 1 else 1.0)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()

    options = {"platform": "torch", "allow": ("one-step",), "scratch": str(tmp_path)}
    report = verify_program(program, 3, **options)
    assert report.ok, report.text()
    first = verify_program(lambda: program(1.01), 3, **options).verdict.first
    assert first.kind == "norm"
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_record_different_names():
    """``record`` must run alike on all ranks."""

    def program():
        train(steps=1)
        if dist.get_rank() == 0:
            record("extra", torch.ones(2))

    assert refusal(program, 3) == (
        "record('extra') of step 1, call 0, ran on rank 0 and not on ranks [1, 2]; every rank must record the same "
        "names "
        "equally often"
    )


def test_a_batch_size_per_rank_is_told():
    """A reference that sees other samples than the ranks together cannot agree with them; the message says why."""

    def per_rank():
        torch.manual_seed(dist.get_rank())
        x = torch.randn(4, 5, dtype=torch.float64)
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert refusal(per_rank, 3) == (
        "test_a_batch_size_per_rank_is_told.<locals>.per_rank: the reference is trained on a different batch from "
        "all ranks "
        "together, so they cannot agree: in the first step one rank alone sees 4 samples, the 3 ranks 12 different "
        "ones, "
        "8 of which the reference does not see; if its batch size of 4 is per rank, give the reference the whole batch "
        "with --single-args and the script's own option, or divide the batch by WORLD_SIZE in the script; if ranks are "
        "to see the same samples, seed their data alike"
    )


def _half_precision(factor=1.0, how="module", late=1.0):
    """A data-parallel program in bfloat16, whose gradient of the first weight is off by a factor on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.LayerNorm(70), nn.Linear(70, 9))
    if how == "module":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        x, y = torch.randn(24, 33).tensor_split(world)[rank], torch.randn(24, 9).tensor_split(world)[rank]
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            predicted = model(x if how == "autocast" else x.bfloat16())
        ((predicted.float() - y).square().sum() / 24).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if world > 1:
            model[0].weight.grad *= factor
            model[3].bias.grad *= late
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.untraced
@pytest.mark.parametrize("how", ["module", "autocast"])
def test_errors_of_a_few_percent_show_in_half_precision(how):
    """A gradient that is off by 6 % is found, whether in bfloat16 itself or in float32; right programs are equal."""
    right = verify_program(lambda: _half_precision(how=how), 3, platform="torch", upcast=True)
    assert right.ok, right.text()
    assert right.hardened[0].verdict.largest < 1
    assert right.hardened[0].verdict.power.largest < 1e-4
    wrong = verify_program(lambda: _half_precision(1.06, how), 2, platform="torch")
    assert not wrong.ok
    verdicts = [wrong.verdict, *(case.verdict for case in wrong.hardened)]
    first = next(verdict.first for verdict in verdicts if verdict.first is not None)
    assert (first.kind, first.name) == ("gradient", "0.weight")


def test_the_case_in_float32_decides_where_half_precision_cannot():
    """What is within bfloat16's bounds and wrong in float32 is not equal; the report shows both."""
    report = verify_program(lambda: _half_precision(late=1.004), 2, platform="torch", upcast=True)
    assert report.verdict.equal, report.text()
    assert not report.ok
    assert report.status == 1
    assert "upcast: what the program computes in half precision is computed in float32" in report.text()
    first = report.hardened[0].verdict.first
    assert (first.kind, first.name) == ("gradient", "3.bias")


@pytest.mark.untraced
@pytest.mark.parametrize("near, weak, status", [(0.0, 1.0, 1), (1.0, 0.05, 1), (1.0, 1.0, 0)])
def test_a_large_error_within_the_bounds_of_half_precision_asks_for_float32(monkeypatch, near, weak, status):
    """The case in float32 runs by itself where a value is near its bounds, or where these hide 5 % of a gradient."""
    monkeypatch.setattr("hyper_parallel.verify.engine.power.WEAK", weak)
    monkeypatch.setattr("hyper_parallel.verify.program.run._NEAR", near)
    report = verify_program(lambda: _half_precision(late=1.004), 2, platform="torch")
    assert report.verdict.equal, report.text()
    assert (report.status, [case.title for case in report.hardened]) == (status, ["upcast"] * status)


def _single_precision(factor=1.0, only=None):
    """A data-parallel program in float32 on data from NumPy, with one gradient that is off by a factor on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3, dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = np.random.default_rng(0)
    for _ in range(2):
        x, y = (numbers.standard_normal((12, n)).astype(np.float32) for n in (7, 3))
        x, y = (torch.from_numpy(part).tensor_split(world)[rank] for part in (x, y))
        predicted = model(x)
        if only is not None and predicted.dtype != only:
            raise TypeError(f"this kernel is for {only}, not {predicted.dtype}")
        ((predicted - y.float()).square().sum() / 12).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model[2].bias.grad *= factor if world > 1 else 1.0
        optimizer.step()
        optimizer.zero_grad()


def test_a_program_in_float32_is_verified_in_float64_on_request():
    """What float32 cannot tell from rounding, float64 can; nothing of PyTorch stays changed."""
    plain = verify_program(_single_precision, 3, platform="torch")
    assert (plain.ok, plain.hardened) == (True, []), plain.text()
    right = verify_program(_single_precision, 3, platform="torch", upcast=True)
    assert right.ok, right.text()
    assert right.hardened[0].words == ["what the program computes in float32 is computed in float64"]
    assert right.hardened[0].verdict.power.largest < 1e-10
    report = verify_program(lambda: _single_precision(1 + 1e-8), 2, platform="torch", upcast=True)
    assert report.verdict.equal, report.text()
    assert report.status == 1
    first = report.hardened[0].verdict.first
    assert (first.kind, first.name) == ("gradient", "2.bias")
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(2).half().float().dtype == torch.float32


def test_kernels_of_one_dtype_cannot_be_upcast():
    """A program that does not run in the dtype that --upcast asks for is inconclusive, with the error."""
    report = verify_program(lambda: _single_precision(only=torch.float32), 2, platform="torch", upcast=True)
    assert report.equal, report.text()
    assert report.status == 3
    assert report.text().splitlines()[-1] == (
        "INCONCLUSIVE: it does not run in the wider dtype that --upcast asks for: TypeError: this kernel is for "
        "torch.float32, not torch.float64"
    )


def test_upcast_is_refused_where_it_cannot_be_done(monkeypatch):
    """--upcast of another framework, and under torchrun, is bad input, and not left out in silence."""
    module = "hyper_parallel.verify.program.run"
    monkeypatch.setattr(f"{module}.require_framework", lambda _: None)
    with pytest.raises(InputError) as caught:
        verify_program(_single_precision, 2, platform="mindspore", upcast=True)
    assert str(caught.value) == "--upcast is implemented for PyTorch; _single_precision uses mindspore"
    monkeypatch.setattr(f"{module}.started_by_torchrun", lambda: True)
    with pytest.raises(InputError) as caught:
        verify_program(_single_precision, 2, platform="torch", upcast=True)
    assert str(caught.value) == (
        "--upcast runs the ranks twice, which torchrun's processes cannot; leave out --upcast or torchrun"
    )


def test_power_is_part_of_the_verdict():
    """A verdict says which error of a gradient would have been noticed, and that a smaller one would not."""
    report = verify_program(train, 2, platform="torch")
    power = report.verdict.power
    assert 0 < power.median <= power.largest < 1e-10
    assert power.weakest in {"weight", "bias"}
    line = (
        f"  power: a gradient that is off by {100 * power.median:.2g} % would have been noticed in the median parameter"
    )
    assert line in report.text()
    assert report.json()["verdict"]["power"]["weakest"] == power.weakest
    for factor, equal in ((1 + 3 * power.largest, False), (1 + power.largest / 8, True)):

        def scaled(factor=factor):
            rank, world = dist.get_rank(), dist.get_world_size()
            torch.manual_seed(0)
            model = nn.Linear(5, 3).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(6, 5, dtype=torch.float64).tensor_split(world)[rank]).square().sum().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad *= factor if world > 1 else 1.0
                optimizer.step()
                optimizer.zero_grad()

        assert verify_program(scaled, 2, platform="torch").verdict.equal is equal


def test_outputs_of_a_run_that_trains_alike_are_listed():
    """What a model returns besides its loss is a rank's own, and gradients are right: equal, and listed."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = Spread()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            own = torch.randn(23, 5).tensor_split(world)[rank]
            y, _ = model(own)
            (y.square().sum() / 23).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x):
            y = self.down(self.up(x).tanh())
            return y, y.detach().std()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    why = "they differ, but all gradients, norms, optimizer states and weights are equal"
    assert any(line.endswith(why) for line in report.verdict.skipped)


def test_micro_batches_of_a_rank_s_own_part_are_compared_as_a_step_s_union():
    """Calls that the ranks cut otherwise than the reference are compared together, with the sum of their losses."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            own = torch.randn(24, 5).tensor_split(world)[rank]
            for part in own.tensor_split(2):
                (model(part).square().sum() / 24).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["loss"] == 12
    assert report.verdict.counts["output"] == 48
    assert any(note.endswith("compared as the union of a step's calls") for note in report.verdict.notes)


def test_a_training_that_diverges_is_compared_until_it_does():
    """Steps in which the single device's numbers overflow are listed; those before are compared."""

    def program(factor=1.0):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
        for _ in range(8):
            model(torch.randn(12, 5).tensor_split(world)[rank]).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad *= factor if world > 1 else 1.0
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    assert any(line.endswith("(the training diverges)") for line in report.verdict.skipped)
    assert verify_program(lambda: program(1.001), 2, platform="torch").verdict.first.step == 0


def test_gradients_of_a_closure_are_those_that_the_optimizer_uses():
    """Where a closure runs the last backward, gradients are recorded after it; one that is not called leaves them."""

    def program(factor=1.0):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for first, second in torch.randn(2, 2, 6, 5):
            model(first.tensor_split(world)[rank]).square().sum().backward()

            def closure(second=second):
                loss = model(second.tensor_split(world)[rank]).square().sum()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad *= factor if world > 1 else 1.0
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["gradient"] == 12
    first = verify_program(lambda: program(1.5), 2, platform="torch").verdict.first
    assert (first.kind, first.step) == ("gradient", 0)


def test_what_a_program_saves_is_compared(tmp_path):
    """An average of weights that no module has is compared when it is saved, gathered or as shards; others are not."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def program(rate_of_others=0.5):
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        average = {name: value.to_local().clone() for name, value in get_model_state_dict(model).items()}
        for _ in range(2):
            model(torch.randn(12, 5).tensor_split(world)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in get_model_state_dict(model).items():
                average[name].lerp_(value.to_local(), 0.5 if rank == 0 else rate_of_others)
        whole = {}
        for name, value in get_model_state_dict(model).items():
            whole[name] = type(value).from_local(average[name], value.device_mesh, value.placements).full_tensor()
        checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=str(tmp_path / f"sharded{world}"))
        if rank == 0:
            torch.save({"average": whole, "local": torch.full((3,), float(world))}, tmp_path / "whole.pt")

    report = verify_program(program, 2, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["saved"] == 12  # of four parameters, both shards and the average on rank 0
    first = verify_program(lambda: program(0.25), 2, platform="torch").verdict.first
    assert (first.kind, first.step, first.ranks) == ("saved", 1, (0,))
    assert first.name.startswith("average.")


def test_a_closure_that_calls_the_model_first():
    """An optimizer whose closure makes the first forward has parameters by their names, and no other weights."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        x = torch.randn(12, 5, dtype=torch.float64).tensor_split(world)[rank]

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total

        for _ in range(2):
            optimizer.step(closure)

    report = verify_program(program, 3, platform="torch")
    assert report.ok, report.text()
    assert report.verdict.counts["weight"] == 3 * 4 * 3
    assert not [spot for spot in report.verdict.spots if spot.kind == "zero-gradients"]


@pytest.mark.parametrize("lost", [False, True])
def test_calls_that_ranks_cut_otherwise_are_compared_together(lost):
    """An evaluation in which each rank cuts every n-th sample into calls is right if the rows of all calls are."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(12, 5).tensor_split(world)[rank]).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            samples = torch.randn(17, 5)[rank::world]
            with torch.no_grad():
                for part in samples.split(4):
                    model(part + 1.0 if lost and rank == 1 and world > 1 else part)

    report = verify_program(program, 2, platform="torch")
    if lost:
        first = report.verdict.first
        assert (first.kind, first.name.endswith("(no_grad)"), first.step) == ("output", True, 1)
    else:
        assert report.ok, report.text()
        assert any(note.endswith("compared as the union of a step's calls") for note in report.verdict.notes)
        assert not report.verdict.unplaced


def test_other_data_on_some_ranks_is_a_bug_of_the_program():
    """Where some ranks have their part of one batch and others have not, the verdict is a difference, no bad input."""

    def program():
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            x = torch.randn(12, 5, generator=torch.Generator().manual_seed(7 if rank < 2 else 8))
            model(x.tensor_split(world)[rank]).square().sum().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

    report = verify_program(program, 3, platform="torch")
    assert report.status == 1
    assert report.verdict.first.cause.kind == "data"
