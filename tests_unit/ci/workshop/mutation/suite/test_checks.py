"""The checks that must notice mutants pass on the unchanged library."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.simulate import simulate
from workshop.mutation.suite import checks, costs
from workshop.mutation.suite.checks import FUNCTIONS, SCENARIOS, function_differences
from workshop.mutation.suite.fixture import Fixture


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_dispatcher_as_it_is_passes(scenario):
    """Each scenario passes on the unchanged library, so that only a mutant can make it fail."""
    simulate(lambda: scenario(Fixture((3,))), 3, "torch")


@pytest.mark.platforms("torch")
def test_functions_hold_as_they_are(monkeypatch):
    """Unchanged functions show no difference; a function that differs on DTensors is reported."""
    monkeypatch.setattr("workshop.mutation.suite.checks._FUNCTION_MESHES", (((2,), 4),))
    assert list(function_differences()) == []
    wrong = replace(FUNCTIONS[0], name="wrong", call=lambda _, x, y: x * 1 if isinstance(x, DTensor) else x * 2 + 0 * y)
    monkeypatch.setattr("workshop.mutation.suite.checks.FUNCTIONS", (wrong,))
    (difference,) = function_differences()
    assert difference.startswith("wrong on (2,): rank 0: ")


@pytest.mark.platforms("torch")
@pytest.mark.filterwarnings("ignore:Using backward")
def test_checks_pass_on_the_unchanged_library(monkeypatch):
    """Redistributions, scenarios and costs pass on the unchanged library; a cost that changes is reported."""
    assert list(checks._wrong_redistributions((2,), targets=2)) == [""]
    monkeypatch.setattr(checks, "SCENARIOS", SCENARIOS[:1])
    monkeypatch.setattr(checks, "_SCENARIO_MESHES", ((2,),))
    assert list(checks._run_scenarios()) == []
    monkeypatch.setattr(costs, "_ON_TWO", ((2,),))
    monkeypatch.setattr(costs, "_CALLS", costs._CALLS[4:5])
    with use_platform("torch"):
        for of in (costs.plan_costs, costs.search_efforts, costs.choice_costs):
            assert all(any(price) for price in of().values())
            assert list(checks._changed_costs(of)) == []
    changing = [{"softmax": (1, 2)}, {"softmax": (1, 3)}]
    assert list(checks._changed_costs(lambda: changing.pop(0))) == ["softmax: (1, 3), (1, 2) before"]
    checks._unchanged_costs.cache_clear()


@pytest.mark.platforms("torch")
def test_costs_are_kept_before_a_change(monkeypatch):
    """The costs that checks compare with are those of the library before the change; refused calls have none."""
    asked = []
    (in_place,) = (call for call in costs._CALLS if call.in_place)
    monkeypatch.setattr(costs, "_CALLS", (in_place,))
    monkeypatch.setattr(costs, "_ON_TWO", ((2,),))

    def choice_costs():
        asked.append("choices")
        return costs.choice_costs()

    with use_platform("torch"):
        checks.keep_costs((checks.function_differences, partial(checks._changed_costs, choice_costs)))
        assert asked == ["choices"]
        assert list(checks._changed_costs(choice_costs)) == []
    assert asked == ["choices"] * 2
    checks._unchanged_costs.cache_clear()
