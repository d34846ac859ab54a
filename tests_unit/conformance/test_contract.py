"""The contract's checks on simulated ranks, and the errors of the suite itself."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import RankFailedError, UnsupportedOnBackend
from hyper_parallel.platform.contract.ledger import Gap
from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.simulated.transport import SimulatedTransport
from hyper_parallel.transport.work import Work
from workshop.conformance import suite
from workshop.conformance.communication import in_flight
from workshop.conformance.inventory import MEMBERS
from workshop.conformance.suite import CHECKS, run_contract
from workshop.conformance.world import ContractCheck


def expected(platform_name, facets=tuple(MEMBERS)):
    """Return the state of every member: served, or a gap with the ledger's reason."""
    gaps = {gap.member: f"gap: {gap.reason}" for gap in platform_named(platform_name).gaps}
    return {member: gaps.get(member, "served") for facet in facets for member in MEMBERS[facet]}


@pytest.mark.parametrize("facet", CHECKS)
def test_a_facet_does_what_the_contract_says(platform_name, facet):
    """Every member of a facet works on both ranks, or is refused and is in the gap ledger with the reason."""
    assert run_contract(platform_name, 2, facets=[facet]) == expected(platform_name, [facet])


def test_four_ranks(platform_name):
    """The facets of communication hold on four ranks, too."""
    facets = ["identity", "groups", "collectives", "differentiable"]
    assert set(run_contract(platform_name, 4, facets=facets).values()) == {"served"}


@pytest.mark.platforms("torch")
def test_a_listed_gap_that_works_is_found(monkeypatch):
    """A gap ledger that lists a member that works fails the suite, so no gap outlives its reason."""
    platform = platform_named("torch")
    monkeypatch.setattr(type(platform), "gaps", (Gap("noop_context_fn", "none", "nothing"),))
    monkeypatch.setattr(suite, "_PROBES", {"noop_context_fn": ()})
    with pytest.raises(RankFailedError, match="noop_context_fn is in the gap ledger of torch and works"):
        run_contract("torch", 2, facets=["memory"])


@pytest.mark.platforms("torch")
def test_an_unlisted_gap_is_found(monkeypatch):
    """A member that refuses and is not in the gap ledger fails the suite."""

    def refuse(_):
        raise UnsupportedOnBackend("not today")

    monkeypatch.setitem(suite.CHECKS, "pipeline", [ContractCheck(("micro_batch",), refuse)])
    with pytest.raises(RankFailedError, match="micro_batch: refused, but not in the gap ledger: not today"):
        run_contract("torch", 2, facets=["pipeline"])


@pytest.mark.platforms("torch")
def test_a_member_without_a_check_is_found(monkeypatch):
    """A suite without a check of a member fails."""
    monkeypatch.setitem(suite.CHECKS, "pipeline", [])
    with pytest.raises(RankFailedError, match=r"no check covers \['micro_batch'\]"):
        run_contract("torch", 2, facets=["pipeline"])


@pytest.mark.platforms("torch")
def test_a_start_that_completes_is_found(monkeypatch):
    """A transport that completes a collective before its start returns fails the suite, by a deadlock."""

    def at_once(self, operation, *args):
        result = getattr(self, operation)(*args)
        return Work(operation, lambda: result)

    monkeypatch.setattr(SimulatedTransport, "start", at_once)
    monkeypatch.setitem(suite.CHECKS, "collectives", [ContractCheck(tuple(MEMBERS["collectives"]), in_flight)])
    with pytest.raises(RankFailedError, match="deadlock, no rank can go on"):
        run_contract("torch", 2, facets=["collectives"])
