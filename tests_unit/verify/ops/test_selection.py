"""The parts of an operator that are checked: placements on DTensors, columns of the coverage matrix."""

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Decomposition, Row, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.verify.ops import sweep
from hyper_parallel.verify.ops.report import COLUMNS, OperatorReport
from hyper_parallel.verify.ops.selection import Effort, operand_columns, row_columns
from hyper_parallel.verify.ops.sweep import sweep_operator

rules.load()

QUICK = Effort(
    meshes=((3,), (2, 2)), choices=1, splits=1, both_values=False, public_meshes=((2,),), redistributed=0, missing=0
)


def states(report):
    """Return the state of each column."""
    return {name: column["state"] for name, column in report.json()["coverage"].items()}


def test_columns_of_a_rule(platform_name):
    """A contraction is checked in every column; the gradient of a boolean operator is not applicable."""
    report = sweep_operator(platform_name, "matmul", QUICK)
    assert tuple(report.json()["coverage"]) == COLUMNS
    assert set(states(report).values()) == {"checked"}
    assert report.coverage()["forward"]["checked"] == report.checks
    assert report.coverage()["partial"]["checked"] == report.features["partial"] > 0
    assert states(sweep_operator(platform_name, "logical_not", QUICK))["backward"] == "not applicable"


@pytest.mark.platforms("torch")
def test_columns_of_a_decomposition():
    """A decomposition has no rows: its columns come from its operands' placements and the public path's checks."""
    assert isinstance(find_rule("diagflat"), Decomposition)
    report = sweep_operator("torch", "diagflat", QUICK)
    assert report.json()["coverage"]["uneven"]["state"] == "checked"
    assert report.features["uneven"] <= report.checks


@pytest.mark.platforms("torch")
def test_columns_that_were_not_tried_are_not_exercised():
    """On one axis, several axes are not exercised; partial values, which gelu does not take, are not applicable."""
    report = sweep_operator("torch", "gelu", Effort(meshes=((2,),), choices=1, splits=1, redistributed=0, missing=0))
    assert states(report)["several axes"] == "not exercised"
    assert states(report)["partial"] == "not applicable"


def test_a_condition_that_sizes_divide_is_never_uneven():
    """A dim that must divide offers even shards only; partial values in the result alone count as partial, too."""
    even = Row((Shard(0),), (Shard(0),), even=((0, 0),))
    assert row_columns([even]) == set()
    assert row_columns([even, Row((Shard(1),), (Partial("sum"),))]) == {"uneven", "partial"}
    assert row_columns([Row((Replicate(),), (Replicate(),))]) == set()


def test_columns_of_operands():
    """A number has no dim to shard, an object no reduction; a vector of numbers has both."""
    assert operand_columns([np.ones(3)]) == {"uneven", "partial"}
    assert operand_columns([np.ones((), bool)]) == {"partial"}
    assert operand_columns([np.array("a", object)]) == set()


def test_reports_of_one_operator_are_one_line():
    """Merging two processes' reports adds counts, and a column that either one offers is applicable."""
    first, second = (OperatorReport("f", "torch", checks=2, offers={"forward"}), OperatorReport("f", "torch"))
    second.offers.add("uneven")
    first.merge(second)
    assert states(first) == {
        "forward": "checked", "backward": "not applicable", "uneven": "not exercised",
        "several axes": "not applicable", "partial": "not applicable",
    }  # fmt: skip
    assert OperatorReport.from_json(first.json()).coverage() == first.coverage()


def test_an_operator_that_a_framework_lacks():
    """No column is applicable to an operator that the framework lacks."""
    report = OperatorReport("f", "torch", offers={"uneven"}, absent=True)
    assert set(states(report).values()) == {"not applicable"}


OPERATORS = ["mm", "ifft2", "mean"]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("op", OPERATORS)
def test_every_row_runs_on_dtensors_on_every_mesh(op):
    """Every row runs on DTensors, rows with conditions included; beside a separate rule level in fewer checks."""
    usual = Effort(rule_level=False, choices=1, missing=0)
    apart = Effort(rule_level=False, choices=1, missing=0, separate=True)
    together, separate = sweep_operator("torch", op, usual), sweep_operator("torch", op, apart)
    assert together.outcome == "ok", together.text()
    assert separate.rows == together.rows > 7
    assert separate.unshown == together.unshown == []
    assert separate.public < together.public
    assert not separate.wrong
    assert not separate.crash


@pytest.mark.platforms("torch")
def test_checks_of_the_rule_level_do_not_count_again():
    """Beside a separate rule level, only placements that had to move count; alone, all count."""
    effort = Effort(meshes=((2,), (3,)), rule_level=False, choices=1, missing=0, redistributed=1)
    alone = sweep_operator("torch", "matmul", effort)
    assert alone.checks == alone.public > 0
    report = sweep_operator("torch", "matmul", Effort(**{**vars(effort), "separate": True}))
    assert 0 < report.checks <= len(samples_of("matmul"))
    assert report.checks < report.public


@pytest.mark.platforms("torch")
def test_a_row_that_no_sizes_can_show_is_named(monkeypatch):
    """A row that no sample's sizes can show is listed with its mesh, so that a sample is added."""
    monkeypatch.setattr(sweep, "_CONDITION_CHOICES", 1)
    report = sweep_operator("torch", "ifft2", Effort(rule_level=False, choices=1, missing=0))
    assert report.unshown == ["4: Shard(1) -> Shard(1)"]
    again = type(report).from_json(report.json())
    assert again.unshown == report.unshown
    again.merge(report)
    assert (again.rows, again.unshown) == (2 * report.rows, report.unshown)
