"""The whole contract, every member and its documented errors, over simulated ranks; and the suite's own alarms."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.platform.contract.inventory import MEMBERS
from hyper_parallel.platform.contract.ledger import Gap
from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.simulated import SimulatedTransport
from hyper_parallel.transport.work import Work
from hyper_parallel.verify.contract import suite
from hyper_parallel.verify.contract.communication import in_flight
from hyper_parallel.verify.contract.results import ContractOutcome, Footprint, examine, load
from hyper_parallel.verify.contract.suite import CHECKS, run_contract
from hyper_parallel.verify.contract.world import ContractCheck
from hyper_parallel.verify.pages.contract_page import contract_page


def expected(platform_name, facets=tuple(MEMBERS)):
    """What every member must do: be served, or refuse for the ledger's reason."""
    gaps = {gap.member: f"gap: {gap.reason}" for gap in platform_named(platform_name).gaps}
    return {member: gaps.get(member, "served") for facet in facets for member in MEMBERS[facet]}


@pytest.mark.parametrize("facet", CHECKS)
def test_a_facet_does_what_the_contract_says(platform_name, facet):
    """Every member of a facet works on both ranks, or refuses and stands in the ledger with the reason."""
    assert run_contract(platform_name, 2, facets=[facet]) == expected(platform_name, [facet])


def test_every_member_on_three_ranks(platform_name, reports):
    """All facets in one world of an odd size; the outcome is written for the page over all reports."""
    found = examine(platform_name, 3)
    path = found.write(reports)
    assert found.members == expected(platform_name), found.failures()
    assert path.name == f"contract-{platform_name}-cpu-simulated.json"
    assert found in load(reports)[0]


def test_four_ranks(platform_name):
    """An even number of ranks beyond two, where pairs and squares exist."""
    facets = ["identity", "groups", "collectives", "differentiable"]
    assert set(run_contract(platform_name, 4, facets=facets).values()) == {"served"}


@pytest.mark.platforms("torch")
def test_a_listed_gap_that_works_is_found(monkeypatch):
    """A ledger that lists a member which is served fails the suite, so no gap outlives its reason."""
    platform = platform_named("torch")
    monkeypatch.setattr(type(platform), "gaps", (Gap("noop_context_fn", "none", "nothing"),))
    monkeypatch.setattr(suite, "_PROBES", {"noop_context_fn": ()})
    with pytest.raises(RankFailedError, match="noop_context_fn is in the gap ledger of torch and works"):
        run_contract("torch", 2, facets=["memory"])


@pytest.mark.platforms("torch")
def test_an_unlisted_gap_is_found(monkeypatch):
    """A member that refuses without standing in the ledger fails the suite."""

    def refuse(_):
        raise UnsupportedOnBackend("not today")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [ContractCheck(("micro_batch",), refuse)])
    with pytest.raises(RankFailedError, match="micro_batch: refused, but not in the gap ledger: not today"):
        run_contract("torch", 2, facets=["pipeline"])


@pytest.mark.platforms("torch")
def test_a_member_without_a_check_is_found(monkeypatch):
    """A suite that forgets a member fails."""
    monkeypatch.setitem(suite.CHECKS, "pipeline", [])
    with pytest.raises(RankFailedError, match=r"no check covers \['micro_batch'\]"):
        run_contract("torch", 2, facets=["pipeline"])


@pytest.mark.platforms("torch")
def test_a_start_that_completes_is_found(monkeypatch):
    """A transport that carries a started collective out before it returns fails the suite, by a deadlock."""

    def at_once(self, operation, *args):
        result = getattr(self, operation)(*args)
        return Work(operation, lambda: result)

    monkeypatch.setattr(SimulatedTransport, "start", at_once)
    monkeypatch.setitem(suite.CHECKS, "collectives", [ContractCheck(tuple(MEMBERS["collectives"]), in_flight)])
    with pytest.raises(RankFailedError, match="deadlock, no rank can go on"):
        run_contract("torch", 2, facets=["collectives"])


@pytest.mark.platforms("torch")
def test_a_failure_is_part_of_the_outcome(monkeypatch):
    """Where a facet fails the others still run, and the outcome says on which rank and why."""

    def fail(w):
        if w.rank == 1:
            raise AssertionError("three\nlines\n")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [ContractCheck(("micro_batch",), fail)])
    found = examine("torch", 2, facets=["identity", "pipeline"])
    failed = {"micro_batch": "failed: rank 1: AssertionError: three lines"}
    assert found.members == {**expected("torch", ["identity"]), **failed}
    assert not found.ok
    assert found.failures() == failed


def outcomes():
    """A run with everything that a page must show."""
    members = {"get_rank": "served", "checkpoint": "gap: <none>", "swap_wrapper": "failed: rank 1: x < y"}
    gap = {"member": "checkpoint", "reason": "<none>", "substitute": "nothing", "devices": ["cpu", "npu"]}
    return ContractOutcome("torch", "cpu", "simulated", 2, members, [gap], "2026-01-02T03:04:05+00:00")


def test_the_matrix_shows_every_member():
    """The page has a row per member, and tells what failed, a gap's reason, and who was not run."""
    shown = contract_page([outcomes()], [])
    assert all(f"<code>{member}</code>" in shown for members in MEMBERS.values() for member in members)
    assert shown.count("not run</td>") == 95 - 3 + 2  # and no memory figures
    assert "gap: &lt;none&gt;" in shown
    assert "failed: rank 1: x &lt; y" in shown
    assert '<th scope="row">torch / cpu / simulated</th><td class="number">2</td>' in shown
    assert "<td>2026-01-02T03:04:05+00:00</td>" in shown
    assert "<td>checkpoint</td><td>cpu, npu</td><td>&lt;none&gt;</td><td>nothing</td>" in shown
    assert outcomes().text() == (
        "torch / cpu / simulated, 2 ranks: 1 of 3 served\n  checkpoint: gap: <none>\n"
        "  swap_wrapper: failed: rank 1: x < y"
    )


BUILT = {"parameters": 8 << 30, "seconds": 0.12, "grown": 200_000, "shard": 8 << 20, "filling": 9 << 20}


def test_the_memory_figures_are_shown():
    """Peaks, their part of plain training, and which of them is more than it may be."""
    found = Footprint(
        "mindspore", {"plain": 10 << 20, "checkpoint": 5 << 20, "selective": 8 << 20, "swap": 6 << 20}, "today", BUILT
    )
    shown = contract_page([], [found])
    good, bad = '<td class="good">yes, at most {}</td>', '<td class="bad">failed: more than {}</td>'
    for mode, size, share, verdict in (
        ("checkpoint", "5.0", "0.50", good.format("0.50")),
        ("selective", "8.0", "0.80", good.format("0.90")),
        ("swap", "6.0", "0.60", bad.format("0.50")),
    ):
        numbers = f'<td class="number">{size}</td><td class="number">{share}</td>'
        assert f'<th scope="row">mindspore, {mode}</th>{numbers}{verdict}' in shown
    assert shown.count("failed: more than") == 1
    line = (
        "8.0 GiB of parameters over 8 simulated ranks are laid out in 0.12 s of computing, growing a process by "
        "0.2 MiB; a shard of 8.0 MiB is filled in 9.0 MiB"
    )
    assert f'<th scope="row">mindspore</th><td>{line}</td><td class="good">yes</td>' in shown
    assert found.built() == line
    slow = Footprint("torch", {"plain": 1}, "today", {**BUILT, "seconds": 2.1, "grown": 5 << 20, "filling": 11 << 20})
    assert not slow.ok
    assert slow.excess() == ["more than 2 s", "growth of more than 4 MiB", "more than 2 MiB beside the shard"]
    failed = "failed: more than 2 s, growth of more than 4 MiB, more than 2 MiB beside the shard"
    assert f'<td class="bad">{failed}</td>' in contract_page([], [slow])
    assert not found.ok


def test_results_are_read_as_they_were_written(tmp_path):
    """Results come back from their files as they were."""
    figures = Footprint("torch", {"plain": 8, "checkpoint": 4, "swap": 1}, "today")
    paths = [outcomes().write(tmp_path), figures.write(tmp_path)]
    assert [path.name for path in paths] == ["contract-torch-cpu-simulated.json", "footprint-torch.json"]
    assert load(tmp_path) == ([outcomes()], [figures])


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "it is no object"),
        ('{"platform": "torch"}', "Footprint.__init__() missing 1 required positional argument: 'peaks'"),
        ('{"platform": "torch", "peaks": {"swap": 1}}', "'plain'"),
    ],
)
def test_a_foreign_result_is_refused(tmp_path, content, reason):
    """A file of that name with something else in it is named, with what to do."""
    path = tmp_path / "footprint-torch.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="footprint-torch") as caught:
        load(tmp_path)
    told = f"{path} is no result of `hyper-parallel verify contract` ({reason}); delete it, or run that again"
    assert str(caught.value) == told
