"""Results of the contract: a failing facet is reported next to the others, and results are restored from files."""

from __future__ import annotations

import pytest

from hyper_parallel.platform.select import platform_named
from workshop.conformance import suite
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.results import ContractOutcome, Footprint, examine, load
from workshop.conformance.world import ContractCheck


def expected(platform_name, facets=tuple(MEMBERS)):
    """Return the state of every member: served, or a gap with the ledger's reason."""
    gaps = {gap.member: f"gap: {gap.reason}" for gap in platform_named(platform_name).gaps}
    return {member: gaps.get(member, "served") for facet in facets for member in MEMBERS[facet]}


def test_every_member_on_three_ranks(platform_name, reports):
    """All facets hold in one world of three ranks; the outcome is written for the page over all reports."""
    outcome = examine(platform_name, 3)
    path = outcome.write(reports)
    assert outcome.members == expected(platform_name), outcome.failures()
    assert path.name == f"contract-{platform_name}-cpu-simulated.json"
    assert outcome in load(reports)[0]


@pytest.mark.platforms("torch")
def test_a_failure_is_part_of_the_outcome(monkeypatch):
    """If a facet fails the others still run, and the outcome names the rank and the reason."""

    def fail(w):
        if w.rank == 1:
            raise AssertionError("three\nlines\n")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [ContractCheck(("micro_batch",), fail)])
    outcome = examine("torch", 2, facets=["identity", "pipeline"])
    failed = {"micro_batch": "failed: rank 1: AssertionError: three lines"}
    assert outcome.members == {**expected("torch", ["identity"]), **failed}
    assert not outcome.ok
    assert outcome.failures() == failed


def mixed_outcome():
    """An outcome with a member that is served, a gap and a failure."""
    members = {"get_rank": "served", "checkpoint": "gap: <none>", "swap_wrapper": "failed: rank 1: x < y"}
    gap = {"member": "checkpoint", "reason": "<none>", "substitute": "nothing", "devices": ["cpu", "npu"]}
    return ContractOutcome("torch", "cpu", "simulated", 2, members, [gap], "2026-01-02T03:04:05+00:00")


def test_results_are_read_as_they_were_written(tmp_path):
    """Results read from their files equal those that were written."""
    figures = Footprint("torch", {"plain": 8, "checkpoint": 4, "swap": 1}, "today")
    paths = [mixed_outcome().write(tmp_path), figures.write(tmp_path)]
    assert [path.name for path in paths] == ["contract-torch-cpu-simulated.json", "footprint-torch.json"]
    assert load(tmp_path) == ([mixed_outcome()], [figures])


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "it is not an object"),
        ('{"platform": "torch"}', "Footprint.__init__() missing 1 required positional argument: 'peaks'"),
        ('{"platform": "torch", "peaks": {"swap": 1}}', "'plain'"),
    ],
)
def test_a_foreign_result_is_refused(tmp_path, content, reason):
    """A file with another content is refused by name, with the cure."""
    path = tmp_path / "footprint-torch.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="footprint-torch") as caught:
        load(tmp_path)
    message = f"{path} is not a result of `python ci/workshop contract` ({reason}); delete it, or run that again"
    assert str(caught.value) == message
