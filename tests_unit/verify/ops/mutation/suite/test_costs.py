"""The costs of plans."""

from __future__ import annotations

from hyper_parallel.core.dtensor import cheapest_steps
from hyper_parallel.core.dtensor.steps import Slice
from hyper_parallel.verify.ops.mutation.suite import costs


def test_planning_ends(monkeypatch):
    """After a limited number of layouts the search takes its best plan; a search that goes on is noticed."""
    assert list(costs.late_plans()) == []
    assert cheapest_steps.MAX_STATES == 2000
    monkeypatch.setattr(cheapest_steps, "cheapest_steps", lambda source, _: (Slice(source, source, ()),))
    differences = list(costs.late_plans())
    assert [text.partition(": ")[0] for text in differences] == [
        f"0 layouts expanded of {limit}" for limit in (1, 2, 3)
    ]
