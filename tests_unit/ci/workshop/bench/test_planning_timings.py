"""Figures of planning: what large meshes cost."""

import itertools
import math
from dataclasses import replace

import pytest

from hyper_parallel.core.dtensor import exchange
from hyper_parallel.core.dtensor.cheapest_steps import MAX_SUMMED
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.transition import clear_transition_cache, plan_transition
from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.base import use_transport
from hyper_parallel.verify.explain import rehearsed_transport
from workshop.bench import planning_timings
from workshop.bench.planning_timings import planning_figures

pytestmark = pytest.mark.platforms("torch")


def test_every_promised_figure_is_timed():
    """Plans on small and large meshes, and explanations of a small and a large model, have a budget of seconds each."""
    assert [(figure.name, figure.budget) for figure in planning_figures()] == [
        ("slowest plan on 64x64 ranks", 0.05),
        ("slowest plan on 512x8 ranks", 0.05),
        ("slowest plan on 1024x8x8 ranks", 1.0),
        ("10,000 plans on 8 ranks", 1.0),
        ("10,000 plans on 2x3 ranks", 1.0),
        ("explain 46 M parameters on 64x8 ranks", 2.0),
        ("explain 70 B parameters on 512x8 ranks", 10.0),
    ]


def test_plans_are_timed(monkeypatch):
    """The figure is the time of the slowest of many plans."""
    monkeypatch.setattr(planning_timings, "_PLANS", 12)
    seconds, problem = planning_timings._slowest_plan((3, 2))
    assert seconds > 0
    assert problem == ""


def test_models_are_explained(monkeypatch):
    """The model of the figure is explained without values, and nothing about its plan is wrong."""
    seconds, problem = planning_timings._explained("small", (4, 2))
    assert seconds > 0
    assert problem == ""
    explained = planning_timings.explain_model
    monkeypatch.setattr(
        planning_timings,
        "explain_model",
        lambda *args, **options: replace(explained(*args, **options), wrong=["a gradient"], with_values="it reads"),
    )
    assert planning_timings._explained("small", (4, 2))[1] == "a gradient; with values: it reads"


def test_many_plans_are_timed(monkeypatch):
    """The figure is the time of exactly as many plans as its name says, none of which was made before."""
    made = []
    monkeypatch.setattr(planning_timings, "_MANY", 70)
    monkeypatch.setattr(planning_timings, "plan_transition", lambda *pair: made.append(plan_transition(*pair)))
    seconds, problem = planning_timings._many_plans((2,))
    assert seconds > 0
    assert problem == ""
    assert len({id(plan) for plan in made}) == len(made) == 5 * 16  # whole rounds, of which 70 plans count


@pytest.mark.parametrize("sizes", [(64, 64), (512, 8), (1024, 8, 8)])
def test_arrays_of_a_plan_do_not_grow_with_ranks_times_ranks(sizes, monkeypatch):
    """A reduction whose price would take arrays of all ranks times all partial values is not priced."""
    priced, sum_parts = [], exchange.sum_parts

    def counted(source, target, slice_axes, reduced, origin):
        count = math.prod(sizes[axis] for axis in slice_axes) * math.prod(sizes[axis] for axis in reduced)
        priced.append(count)
        return sum_parts(source, target, slice_axes, reduced, origin)

    monkeypatch.setattr(exchange, "sum_parts", counted)
    with use_platform("torch"), use_transport(rehearsed_transport("torch", math.prod(sizes), 0)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "cp")[: len(sizes)])
        clear_transition_cache()
        places = itertools.product((Shard(0), Replicate(), Partial()), repeat=len(sizes))
        for before, after in itertools.islice(itertools.product(list(places), repeat=2), 0, None, 7):
            source, target = (Layout.place(mesh, placements, (1000, 777, 65)) for placements in (before, after))
            assert plan_transition(source, target).steps or source is target
    assert all(count <= MAX_SUMMED for count in priced)
    assert priced or sizes != (1024, 8, 8)  # where some are small enough
