"""The costs of plans."""

from __future__ import annotations

from hyper_parallel import Shard
from hyper_parallel.core.dtensor import cheapest_steps
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.steps import Slice
from hyper_parallel.core.dtensor.transition import plan_transition
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.ops.claims import mesh_of
from workshop.mutation.suite import costs


def test_planning_ends(monkeypatch):
    """After a limited number of layouts the search takes its best plan; a search that goes on is noticed."""
    assert list(costs.late_plans()) == []
    assert cheapest_steps.MAX_STATES == 2000
    monkeypatch.setattr(cheapest_steps, "cheapest_steps", lambda source, _: (Slice(source, source, ()),))
    differences = list(costs.late_plans())
    assert [text.partition(": ")[0] for text in differences] == [
        f"0 layouts expanded of {limit}" for limit in (1, 2, 3)
    ]


def test_changes_of_placement_that_are_refused_have_no_costs(monkeypatch):
    """Costs are those of plans and their adjoints; a change that has no plan is left out."""
    layouts = [Layout.place(mesh_of((2,)), [Shard(dim)], (7, 5)) for dim in (0, 1)]
    there, back = plan_transition(*layouts), plan_transition(*reversed(layouts))

    def refusing(source, target):
        if source is target:
            raise LayoutError("no plan")
        return plan_transition(source, target)

    monkeypatch.setattr(costs, "plan_transition", refusing)
    assert list(costs._plans(layouts)) == [there, there.linear.adjoint, back, back.linear.adjoint]
