"""What is checked of an operator: placements on DTensors, columns of the coverage matrix."""

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
    """Per column its state."""
    return {name: column["state"] for name, column in report.json()["coverage"].items()}


def test_columns_of_a_rule(platform_name):
    """A contraction is checked in every column; an operator on truths has no gradient, and says so."""
    report = sweep_operator(platform_name, "matmul", QUICK)
    assert tuple(report.json()["coverage"]) == COLUMNS
    assert set(states(report).values()) == {"checked"}
    assert report.coverage()["forward"]["checked"] == report.checks
    assert report.coverage()["partial"]["checked"] == report.features["partial"] > 0
    assert states(sweep_operator(platform_name, "logical_not", QUICK))["backward"] == "not applicable"


@pytest.mark.platforms("torch")
def test_columns_of_a_decomposition():
    """It has no rows: what its operands' placements can show counts, with what the public path checked."""
    assert isinstance(find_rule("diagflat"), Decomposition)
    report = sweep_operator("torch", "diagflat", QUICK)
    assert report.json()["coverage"]["uneven"]["state"] == "checked"
    assert report.features["uneven"] <= report.checks


@pytest.mark.platforms("torch")
def test_what_was_not_tried_is_not_exercised():
    """Only one axis: several axes are not exercised, and a pending reduction that gelu has not is not applicable."""
    report = sweep_operator("torch", "gelu", Effort(meshes=((2,),), choices=1, splits=1, redistributed=0, missing=0))
    assert states(report)["several axes"] == "not exercised"
    assert states(report)["partial"] == "not applicable"


def test_a_condition_that_sizes_divide_is_never_uneven():
    """A dim that must divide offers even chunks only; summands in the result alone are pending reductions too."""
    even = Row((Shard(0),), (Shard(0),), even=((0, 0),))
    assert row_columns([even]) == set()
    assert row_columns([even, Row((Shard(1),), (Partial("sum"),))]) == {"uneven", "partial"}
    assert row_columns([Row((Replicate(),), (Replicate(),))]) == set()


def test_what_operands_offer_where_no_rows_say_it():
    """A number has no dim to cut, and what is no number at all no reduction; a row of numbers has both."""
    assert operand_columns([np.ones(3)]) == {"uneven", "partial"}
    assert operand_columns([np.ones((), bool)]) == {"partial"}
    assert operand_columns([np.array("a", object)]) == set()


def test_reports_of_one_operator_are_one_line():
    """What two processes found adds up, and what either one could have shown is applicable."""
    first, second = (OperatorReport("f", "torch", checks=2, offers={"forward"}), OperatorReport("f", "torch"))
    second.offers.add("uneven")
    first.merge(second)
    assert states(first) == {
        "forward": "checked", "backward": "not applicable", "uneven": "not exercised",
        "several axes": "not applicable", "partial": "not applicable",
    }  # fmt: skip
    assert OperatorReport.from_json(first.json()).coverage() == first.coverage()


def test_an_operator_that_a_framework_lacks():
    """Nothing is applicable to it."""
    report = OperatorReport("f", "torch", offers={"uneven"}, absent=True)
    assert set(states(report).values()) == {"not applicable"}


OPERATORS = ["mm", "ifft2", "mean"]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("op", OPERATORS)
def test_every_row_runs_on_dtensors_on_every_mesh(op):
    """Also apart from the rule level, where a check runs as many rows at once as fit, and also rows with conditions."""
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
def test_what_the_rule_level_checks_does_not_count_again():
    """Apart from it only the placements that had to move count; alone every one does."""
    effort = Effort(meshes=((2,), (3,)), rule_level=False, choices=1, missing=0, redistributed=1)
    alone = sweep_operator("torch", "matmul", effort)
    assert alone.checks == alone.public > 0
    report = sweep_operator("torch", "matmul", Effort(**{**vars(effort), "separate": True}))
    assert 0 < report.checks <= len(samples_of("matmul"))
    assert report.checks < report.public


@pytest.mark.platforms("torch")
def test_a_row_that_no_sizes_can_show_is_named(monkeypatch):
    """With its mesh: somebody has to bring a sample."""
    monkeypatch.setattr(sweep, "_CONDITION_CHOICES", 1)
    report = sweep_operator("torch", "ifft2", Effort(rule_level=False, choices=1, missing=0))
    assert report.unshown == ["4: Shard(1) -> Shard(1)"]
    again = type(report).from_json(report.json())
    assert again.unshown == report.unshown
    again.merge(report)
    assert (again.rows, again.unshown) == (2 * report.rows, report.unshown)
