"""The whole contract, every member and its documented errors, over simulated ranks; and the suite's own alarms."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.platform.contract.inventory import MEMBERS
from hyper_parallel.platform.contract.ledger import Gap
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.contract import suite
from hyper_parallel.verify.contract.matrix import page, summary
from hyper_parallel.verify.contract.suite import CHECKS, check_contract, run_contract
from hyper_parallel.verify.contract.world import Check


@pytest.mark.parametrize("facet", CHECKS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_facet_does_what_the_contract_says(platform_name, world, facet):
    """Every member of a facet works on every rank, or refuses and stands in the ledger with the reason."""
    found = run_contract(platform_name, world, facets=[facet])
    assert set(found) == set(MEMBERS[facet])
    gaps = {gap.member: f"gap: {gap.reason}" for gap in platform_named(platform_name).gaps}
    assert found == {member: gaps.get(member, "served") for member in found}


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
    with pytest.raises(RankFailedError, match="noop_context_fn stands in the gap ledger of torch and works"):
        run_contract("torch", 2, facets=["memory"])


@pytest.mark.platforms("torch")
def test_an_unlisted_gap_is_found(monkeypatch):
    """A member that refuses without standing in the ledger fails the suite."""

    def refuse(_):
        raise UnsupportedOnBackend("not today")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [Check(("micro_batch",), refuse)])
    with pytest.raises(RankFailedError, match="micro_batch: refused, but not in the gap ledger: not today"):
        run_contract("torch", 2, facets=["pipeline"])


@pytest.mark.platforms("torch")
def test_a_member_without_a_check_is_found(monkeypatch):
    """A suite that forgets a member fails."""
    monkeypatch.setitem(suite.CHECKS, "pipeline", [])
    with pytest.raises(RankFailedError, match=r"no check covers \['micro_batch'\]"):
        run_contract("torch", 2, facets=["pipeline"])


def test_the_matrix_shows_every_member():
    """The page has a row per member and tells a gap's reason."""
    column = (("torch", "cpu", "simulated"), {"get_rank": "served", "checkpoint": "gap: <none>"})
    shown = page([column])
    assert all(f"<code>{member}</code>" in shown for members in MEMBERS.values() for member in members)
    assert "gap: &lt;none&gt;" in shown
    assert summary([column]) == "torch / cpu / simulated: 1 of 2 served\n  checkpoint: <none>"
    assert callable(check_contract)
