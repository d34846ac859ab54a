"""Tasks of a sweep: which operators share a worker, and how the time is shared."""

import json
from unittest.mock import Mock

import pytest

from hyper_parallel.cli import main, verify_ops
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import rule_names
from hyper_parallel.verify.ops import tasks
from hyper_parallel.verify.ops.selection import QUICK, Effort
from hyper_parallel.verify.ops.sweep import sweep_operator
from hyper_parallel.verify.ops.tasks import library_tasks

rules.load()


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_all_operators_share_alike(platform):
    """A full sweep has a task with an equal share per operator on plain tensors; a quick sweep has no shares."""
    planned = library_tasks(platform, rule_names(), Effort())
    sharing = [task for task in planned if task["share"]]
    assert len({task["share"] for task in sharing}) == 1
    assert all(len(task["ops"]) == 1 and task["effort"]["rule_level"] for task in sharing)
    assert {op for task in planned for op in task["ops"]} == set(rule_names())
    assert not any(task["share"] for task in library_tasks(platform, rule_names(), QUICK))


@pytest.mark.platforms("torch")
def test_no_operator_is_left_out_for_lack_of_time(capsys, monkeypatch):
    """Without time to share, every operator is checked on the first sizes of each sample, on both levels."""
    monkeypatch.setattr(verify_ops, "_SECONDS", 0.0)
    named = ["softmax", "clone", "zero"]
    assert main(["verify", "ops", "--op", *named, "--mesh", "2", "--platform", "torch", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {operator["op"] for operator in report["operators"]} == set(named)
    for operator in report["operators"]:
        least = sweep_operator("torch", operator["op"], Effort(meshes=((2,),), choices=1))
        assert operator["checks"] == least.checks > 0
        assert operator["rows"] == least.rows > 0


def test_operators_that_nobody_declares_are_refused_with_near_names():
    """A name that is neither the file's nor the library's is reported with what the file has, and similar names."""
    task = {"file": "ops.py", "platform": "torch"}
    assert tasks._unknown(["mine", "add"], ["mine"], task) == ""
    message = tasks._unknown(["mines"], ["mine"], task)
    assert message.startswith("--op: ops.py on torch has no 'mines'; it declares mine; did you mean mine")
    assert tasks._unknown(["nothing_alike_xyzzy"], [], task) == (
        "--op: ops.py on torch has no 'nothing_alike_xyzzy'; it declares no operator"
    )


@pytest.mark.platforms("torch")
def test_a_file_that_cannot_be_loaded_is_refused(monkeypatch, tmp_path):
    """A worker says why it cannot take a user's file, or the operators asked for; it checks nothing."""
    for name in ("warnings", "gc", "faulthandler"):  # a worker has its process to itself
        monkeypatch.setattr(tasks, name, Mock())
    file = tmp_path / "user.py"
    events = []
    for text, ops in (("import nothing_of_this_name", ["*"]), ("", ["nosuch"])):
        file.write_text(text)
        tasks.run(tasks.task_of("torch", ops, QUICK, file=str(file)), events.append)
    assert [event["event"] for event in events] == ["refused", "refused"]
    assert "nothing_of_this_name" in events[0]["why"]
    assert events[1]["why"].startswith(f"--op: {file} on torch has no 'nosuch'; it declares no operator")
