"""Time is shared so that every operator is visited, whatever its letter, and every row runs on DTensors."""

import json

import pytest

from hyper_parallel.cli import main, verify_ops
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import rule_names
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.verify.ops import allotment, sweep
from hyper_parallel.verify.ops.allotment import Allotment
from hyper_parallel.verify.ops.effort import QUICK, Effort
from hyper_parallel.verify.ops.sweep import sweep_operator
from hyper_parallel.verify.ops.tasks import library_tasks, task_of

rules.load()


@pytest.fixture
def clock(monkeypatch):
    """The time, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(allotment.time, "monotonic", lambda: now[0])
    return now


def shared(ops="a", share=1.0, platform="torch"):
    """A task that shares time."""
    return task_of(platform, list(ops), Effort(), share=share)


def seconds(task):
    """What each of its operators gets."""
    return task["effort"]["seconds"]


def test_what_is_left_is_shared_among_those_that_wait(clock):
    """Two workers have twice the time; each operator gets its parts of it, whatever was used before it."""
    time_left = Allotment(40.0, 2)
    waiting = [shared("bc"), shared("d", 5.0)]
    assert seconds(time_left.given(shared(), waiting)) == 10.0
    clock[0] += 36.0  # a costly one
    assert seconds(time_left.given(waiting[0], waiting[1:])) == pytest.approx(8.0 / 7)
    clock[0] += 1.0
    assert seconds(time_left.given(waiting[1], [])) == 6.0


def test_no_operator_gets_more_than_its_effort_says(clock):
    """A few operators do not last as long as all."""
    assert clock[0] == 100.0
    assert seconds(Allotment(1000.0, 2).given(shared(), [])) == Effort().seconds


def test_late_operators_get_their_first_sizes(clock):
    """When the time is over nothing is left to share, and nobody is left out."""
    time_left = Allotment(10.0, 2)
    clock[0] += 11.0
    assert seconds(time_left.given(shared(), [shared()])) == 0.0


def test_a_task_that_shares_nothing_is_as_it_was():
    """Quick sweeps, files of users and mutants take what they need."""
    alone = task_of("torch", ["a"], Effort())
    assert Allotment(0.0, 2).given(alone, [shared()]) is alone


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_all_operators_share_alike(platform):
    """A full sweep has a task with a share per operator that runs on plain tensors; a quick one shares nothing."""
    found = library_tasks(platform, rule_names(), Effort())
    sharing = [task for task in found if task["share"]]
    assert len({task["share"] for task in sharing}) == 1
    assert all(len(task["ops"]) == 1 and task["effort"]["rule_level"] for task in sharing)
    assert {op for task in found for op in task["ops"]} == set(rule_names())
    assert not any(task["share"] for task in library_tasks(platform, rule_names(), QUICK))


@pytest.mark.platforms("torch")
def test_no_operator_is_left_out_for_lack_of_time(capsys, monkeypatch):
    """Without any time to share every operator has the first sizes of each sample, on both levels, and no others."""
    monkeypatch.setattr(verify_ops, "_SECONDS", 0.0)
    named = ["softmax", "clone", "zero"]
    assert main(["verify", "ops", "--op", *named, "--mesh", "2", "--platform", "torch", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {one["op"] for one in report["operators"]} == set(named)
    for one in report["operators"]:
        least = sweep_operator("torch", one["op"], Effort(meshes=((2,),), choices=1))
        assert one["checks"] == least.checks > 0
        assert one["rows"] == least.rows > 0


OPERATORS = ["mm", "ifft2", "mean"]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("op", OPERATORS)
def test_every_row_runs_on_dtensors_on_every_mesh(op):
    """Also apart from the rule level, where a check runs as many rows at once as fit, and also rows with conditions."""
    usual = Effort(rule_level=False, choices=1, missing=0)
    apart = Effort(rule_level=False, choices=1, missing=0, apart=True)
    one, other = sweep_operator("torch", op, usual), sweep_operator("torch", op, apart)
    assert one.outcome == "ok", one.text()
    assert other.rows == one.rows > 7
    assert other.unshown == one.unshown == []
    assert other.public < one.public
    assert not other.wrong
    assert not other.crash


@pytest.mark.platforms("torch")
def test_what_the_rule_level_checks_does_not_count_again():
    """Apart from it only the placements that had to move count; alone every one does."""
    one = Effort(meshes=((2,), (3,)), rule_level=False, choices=1, missing=0, moved=1)
    alone = sweep_operator("torch", "matmul", one)
    assert alone.checks == alone.public > 0
    report = sweep_operator("torch", "matmul", Effort(**{**vars(one), "apart": True}))
    assert 0 < report.checks <= len(samples_of("matmul"))
    assert report.checks < report.public


@pytest.mark.platforms("torch")
def test_a_row_that_no_sizes_can_show_is_named(monkeypatch):
    """With its mesh: somebody has to bring a sample."""
    monkeypatch.setattr(sweep, "_TRIED", 1)
    report = sweep_operator("torch", "ifft2", Effort(rule_level=False, choices=1, missing=0))
    assert report.unshown == ["4: Shard(1) -> Shard(1)"]
    again = type(report).from_json(report.json())
    assert again.unshown == report.unshown
    again.merge(report)
    assert (again.rows, again.unshown) == (2 * report.rows, report.unshown)
