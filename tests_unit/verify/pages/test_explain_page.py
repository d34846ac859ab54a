"""The page of explained plans shows what was checked, pictures of mesh and shards, and the order of the plans."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.verify.explained_step import Memory
from hyper_parallel.verify.model_report import Traffic
from hyper_parallel.verify.pages.explain_page import explain_page
from hyper_parallel.verify.prove.table import ProvenCalls


def test_one_plan(samples):
    """Mesh, memory, prices, layouts with the layers that share them, collectives and what was checked are there."""
    page = explain_page([samples.explained()])
    assert "1 of 1 plans pass every check" in page
    assert "toy &lt;1&gt; on torch, dp=2 x tp=2" in page
    for part in ("holds", "a note", "layers.0-1.up: [7@tp, 3]", "kept for backward",
                 "Memory of a rank: 1.00\N{NO-BREAK SPACE}KiB",
                 "1 GB/s and 1 us", "2.64 us", "mesh dp=2 x tp=2", "plain"):  # fmt: skip
        assert part in page, part
    assert "Plans by the time" not in page


def test_rows_that_are_proven(samples):
    """The certificate's line is there, with the rows that are not proven; without a look-up there is none."""
    proofs = ProvenCalls("2026-11-30", {"proven": 3, "tested": 1}, (("tested", "embedding", "R, S0 -> P"),), ())
    page = explain_page([replace(samples.explained(), proofs=proofs)])
    assert all(text in page for text in (proofs.line(), "embedding", "R, S0 -&gt; P"))
    assert "<h3>Proofs</h3>" not in explain_page([samples.explained()])


def test_several_plans_and_what_is_wrong(samples):
    """Plans stand in the order of their rank; one that is wrong or could not be explained is not a success."""
    slow = replace(
        samples.explained(), plan="slow", wrong=["it is"], memory=Memory(1, 1, 1, None), traffic=[
            Traffic("", "forward", "all_reduce", (), 1, 1, 0)
        ],
    )  # fmt: skip
    page = explain_page([samples.explained(), slow], ["plan third is not explained: why"])
    assert "1 of 3 plans pass every check" in page
    assert page.index(">fast<") < page.index(">slow<")
    assert all(text in page for text in ("it is", "plan third is not explained: why", "other ranks", "not priced"))
