"""Every rule once, in the quickest way: what the exhaustive tests of this folder check many times, untraced."""

from __future__ import annotations

import pytest

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.verify.ops.sweep import Effort, sweep_operator

rules.load()
MANY = {"choices": 1, "draws": 1, "both": False, "reproducers": False, "moved": 0, "missing": 0}
ROWS = Effort(meshes=((2,),), public=False, **MANY)  # every claimed row on plain tensors, one choice of sizes
WHOLE = Effort(meshes=((2,),), rule_level=False, **MANY)  # what is made of other operators has no rows of its own


def swept(name, platform):
    """Outcome of one operator on two ranks."""
    effort = ROWS if isinstance(find_rule(name), Rule) else WHOLE
    return sweep_operator(platform, name, effort).outcome


@pytest.mark.platforms("torch")
def test_every_rule_holds_on_two_ranks():
    """Each claimed row, forward and backward, with one choice of sizes; what is composed runs on DTensors."""
    found = {name: swept(name, "torch") for name in rule_names()}
    assert {name: outcome for name, outcome in found.items() if outcome not in ("ok", "exempt")} == {}


@pytest.mark.platforms("mindspore")
def test_every_row_holds_on_mindspore():
    """The same of every rule whose operator MindSpore has; what is composed is called by the spellings' own tests."""
    names = [name for name in rule_names() if isinstance(find_rule(name), Rule)]
    found = {name: sweep_operator("mindspore", name, ROWS).outcome for name in names}
    assert {name: outcome for name, outcome in found.items() if outcome not in ("ok", "exempt", "absent")} == {}
