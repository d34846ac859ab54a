"""The page of the contract: states of members, memory figures and gap ledgers."""

import re

from workshop.conformance.inventory import MEMBERS
from workshop.conformance.page import contract_page
from workshop.conformance.results import ContractOutcome, Footprint


def outcome():
    """Return an outcome with everything that the page must show."""
    members = {"get_rank": "served", "checkpoint": "gap: <none>", "swap_wrapper": "failed: rank 1: x < y"}
    gap = {"member": "checkpoint", "reason": "<none>", "substitute": "nothing", "devices": ["cpu", "npu"]}
    return ContractOutcome("torch", "cpu", "simulated", 2, members, [gap], "2026-01-02T03:04:05+00:00")


def test_the_matrix_shows_every_member():
    """The page has a row per member, with its failure, the reason of its gap, or that it was not run."""
    page = contract_page([outcome()], [])
    assert all(f"<code>{member}</code>" in page for members in MEMBERS.values() for member in members)
    assert page.count("not run</td>") == 97 - 3 + 2  # and no memory figures
    assert "gap: &lt;none&gt;" in page
    assert "failed: rank 1: x &lt; y" in page
    assert re.search(r'<th scope="row">torch / cpu / simulated<a [^>]*></a></th><td class="number">2</td>', page)
    assert "<td>2026-01-02T03:04:05+00:00</td>" in page
    assert "<td>checkpoint</td><td>cpu, npu</td><td>&lt;none&gt;</td><td>nothing</td>" in page
    assert outcome().text() == (
        "torch / cpu / simulated, 2 ranks: 1 of 3 served\n  checkpoint: gap: <none>\n"
        "  swap_wrapper: failed: rank 1: x < y"
    )


BUILT = {"parameters": 8 << 30, "seconds": 0.12, "grown": 200_000, "shard": 8 << 20, "filling": 9 << 20}


def test_the_memory_figures_are_shown():
    """The page has peaks, their part of plain training, and which of them exceed their limits."""
    footprint = Footprint(
        "mindspore", {"plain": 10 << 20, "checkpoint": 5 << 20, "selective": 8 << 20, "swap": 6 << 20}, "today", BUILT
    )
    page = contract_page([], [footprint])
    good, bad = '<td class="good">yes, at most {}</td>', '<td class="bad">failed: more than {}</td>'
    for mode, size, share, verdict in (
        ("checkpoint", "5.0", "0.50", good.format("0.50")),
        ("selective", "8.0", "0.80", good.format("0.90")),
        ("swap", "6.0", "0.60", bad.format("0.50")),
    ):
        numbers = f'<td class="number">{size}</td><td class="number">{share}</td>'
        assert re.search(rf'<th scope="row">mindspore, {mode}<a [^>]*></a></th>{re.escape(numbers + verdict)}', page)
    assert page.count("failed: more than") == 1
    line = (
        "8.0 GiB of parameters over 8 simulated ranks are laid out in 0.12 s of computing, growing a process by "
        "0.2 MiB; a shard of 8.0 MiB is filled in 9.0 MiB"
    )
    row = re.escape(f'</a></th><td>{line}</td><td class="good">yes</td>')
    assert re.search(rf'<th scope="row">mindspore<a [^>]*>{row}', page)
    assert footprint.built() == line
    slow = Footprint("torch", {"plain": 1}, "today", {**BUILT, "seconds": 2.1, "grown": 5 << 20, "filling": 11 << 20})
    assert not slow.ok
    assert slow.excess() == ["more than 2 s", "growth of more than 4 MiB", "more than 2 MiB in addition to the shard"]
    failed = "failed: more than 2 s, growth of more than 4 MiB, more than 2 MiB in addition to the shard"
    assert f'<td class="bad">{failed}</td>' in contract_page([], [slow])
    assert not footprint.ok
