"""Short forms of the loads of ``soak.py``: what a rank's process uses stays flat."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture(scope="module")
def soak(load_file):
    """The module ``soak.py`` beside this file."""
    return load_file(Path(__file__).with_name("soak.py"))


@pytest.mark.parametrize("kind", ["collectives", "groups", "steps"])
def test_simulated_ranks_use_no_more_from_round_to_round(soak, kind):
    """After thirty rounds simulated ranks use the memory, threads and descriptors that they used after three."""
    before, after = soak.simulate(getattr(soak, kind), 3, "torch", (30,))[0]
    assert soak.grown(before, after) == ""


def test_real_ranks_use_no_more_from_round_to_round(soak):
    """Groups that come and go leave no socket and no thread behind in a real rank."""
    before, after = soak.launch(soak.groups, 3, "torch", (30,))[0]
    assert soak.grown(before, after) == ""


def test_growth_is_named(soak):
    """A thread or a descriptor more is growth; memory has a bound."""
    before, limit = soak.Usage(1000, 4, 9), soak.MEMORY
    assert soak.grown(before, soak.Usage(1000 + limit, 4, 9)) == ""
    assert soak.grown(before, soak.Usage(1001 + limit, 5, 8)) == f"memory 1000 -> {1001 + limit}, threads 4 -> 5"
