"""The results of mutation testing."""

from hyper_parallel.core.shard import rules
from workshop.mutation.report import MutantResult, Score

rules.load()


def test_the_score():
    """Equivalents do not count; a mutant that kills its process counts as killed; too few mutants or kills fail."""
    score = Score("torch", 3, 0)
    for number, outcome in enumerate(["killed", "equivalent", "survived", "none", "true"]):
        score.add(MutantResult(f"f#{number}", "torch", "k", "c", outcome, "d", 9))
    assert score.score == 1 / 2
    assert score.strict == 1 / 3
    score.add(MutantResult.lost("g#0", "torch", "killed by SIGSEGV"))
    data = score.json()
    assert {name: data[name] for name in ("mutants", "killed", "equivalent", "true", "survived", "generated")} == {
        "mutants": 5, "killed": 2, "equivalent": 1, "true": 1, "survived": 1, "generated": 9,
    }  # fmt: skip
    assert data["survivors"] == [{"op": "f", "kind": "k", "change": "c", "full": "d"}]
    assert data["operators"]["f"] == {
        "mutants": 4, "killed": 1, "equivalent": 1, "true": 1, "survived": 1,
    }  # fmt: skip
    assert score.ok(0.6)
    assert not score.ok(0.7)
    score.wanted = 6
    assert not score.ok(0.6)
    assert MutantResult.lost("g#1", "torch", "did not finish within 120 s\nstack").outcome == "survived"
