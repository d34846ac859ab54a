"""``hyper-parallel verify redistribute``: its checks, counts and refusals."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.cli import main
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.steps import AllToAll
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.checker import redistribution
from hyper_parallel.verify.checker.redistribution import least_received, verify_redistribution


@pytest.mark.parametrize("mesh, transitions", [((2,), 49), ((3,), 49)])
def test_every_placement_to_every_placement(platform_name, mesh, transitions):
    """Every pair of placements gives the right values and gradients on uneven shards."""
    report = verify_redistribution(platform_name, mesh, (5, 3))
    assert report.ok, report.text()
    assert (report.transitions, report.gradients, report.refused) == (transitions, transitions, [])


@pytest.mark.platforms("torch")
def test_sums_and_shards_receive_the_least():
    """Only extrema, which are reduced before they are sharded, receive more than the fewest elements."""
    report = verify_redistribution("torch", (4,), (7, 5))
    assert report.ok, report.text()
    extrema = [line for line in report.above if "max" in line or "min" in line]
    assert report.above == extrema
    assert report.received >= report.least > 0


@pytest.mark.platforms("torch")
def test_a_wrong_step_is_found(monkeypatch):
    """A collective with wrong values fails the report, which names source and target."""
    apply = AllToAll.apply
    monkeypatch.setattr(AllToAll, "apply", lambda self, local, platform: apply(self, local, platform) + 1)
    report = verify_redistribution("torch", (2,), (4, 6))
    assert not report.ok
    assert any("[Shard(0)]" in line and "-> [Shard(1)]" in line for line in report.wrong)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "source, target, least",
    [
        (Shard(0), Replicate(), 6 * 2),  # two ranks lack a third, thrice
        (Replicate(), Shard(0), 0),
        (Shard(0), Shard(1), 4),  # each rank lacks two thirds of its column
        (Partial(), Replicate(), 6 * 4),  # two terms to whoever adds, two results back
        (Partial("avg"), Partial(), 0),
        (Partial("max"), Shard(1), 6 * 2),
        (Replicate(), Partial(), None),
    ],
)
def test_the_fewest_elements(source, target, least):
    """A rank receives each element that it lacks; of partial values, all but one are received."""
    mesh = DeviceMesh._interned("cpu", (3,), (0, 1, 2), ("x",), 0)
    layouts = [Layout.place(mesh, [placement], (3, 2)) for placement in (source, target)]
    assert least_received(*layouts) == least


@pytest.mark.platforms("torch")
def test_the_command(capsys):
    """The command runs the meshes of its options, and refuses a text that is not a mesh."""
    assert main(["verify", "redistribute", "--platform", "torch", "--mesh", "2", "--shape", "3x4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert [(run["mesh"], run["shape"], run["transitions"]) for run in document["runs"]] == [([2], [3, 4], 49)]
    assert main(["verify", "redistribute", "--platform", "torch", "--mesh", "2", "--shape", "3x4"]) == 0
    assert capsys.readouterr().out.startswith("torch, mesh 2, tensor [3, 4]: equal, 49 changes of placement")
    assert main(["verify", "redistribute", "--mesh", "x"]) == 2
    assert "--mesh 'x' must look like 3 or 2x3" in capsys.readouterr().err
    assert main(["verify", "redistribute", "--shape", "a"]) == 2
    assert "--shape 'a' must look like 7x5" in capsys.readouterr().err


@pytest.mark.platforms("torch")
def test_a_failure_is_reported_and_the_rest_goes_on(monkeypatch):
    """A step that raises or gives a wrong layout is wrong for its target; a refused plan is not counted."""

    def failing(self, local, platform):
        raise ArithmeticError("no exchange today")

    with monkeypatch.context() as patch:
        patch.setattr(AllToAll, "apply", failing)
        report = verify_redistribution("torch", (2,), (4, 6))
    assert not report.ok
    assert {line.partition(": ")[2] for line in report.wrong} == {"no exchange today"}
    assert {line.partition(": ")[0] for line in report.wrong} == {"to [Shard(0)]", "to [Shard(1)]"}
    assert report.transitions > 0

    def refusing(source, target):
        raise LayoutError("no way")

    with monkeypatch.context() as patch:
        patch.setattr(redistribution, "plan_transition", refusing)
        report = verify_redistribution("torch", (2,), (4,))
    assert report.transitions == 0
    assert "[Shard(0)] -> [Replicate()]: no way" in report.refused

    with monkeypatch.context() as patch:
        patch.setattr(DTensor, "redistribute", lambda self, **_: self * 1)
        report = verify_redistribution("torch", (2,), (4,))
    lines = [*report.wrong, *report.refused]
    assert any("asked for [Replicate()], got [4@" in line for line in lines), lines
