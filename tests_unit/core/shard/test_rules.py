"""One quick check of every rule; the tests in rules/ are exhaustive and untraced."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Rule, find_rule, rule_names
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.ops.selection import Effort
from hyper_parallel.verify.ops.sweep import sweep_operator

rules.load()
MANY = {"choices": 1, "splits": 1, "both_values": False, "reproducers": False, "redistributed": 0, "missing": 0}
ROWS = Effort(meshes=((2,),), public=False, **MANY)  # every claimed row on plain tensors, one choice of sizes
WHOLE = Effort(meshes=((2,),), rule_level=False, **MANY)  # what is made of other operators has no rows of its own


def swept(name, platform):
    """The outcome of an operator on two ranks."""
    effort = ROWS if isinstance(find_rule(name), Rule) else WHOLE
    return sweep_operator(platform, name, effort).outcome


@pytest.mark.platforms("torch")
def test_every_rule_holds_on_two_ranks():
    """Each claimed row holds, forward and backward, for one choice of sizes; decompositions run on DTensors."""
    outcomes = {name: swept(name, "torch") for name in rule_names()}
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in ("ok", "exempt")} == {}


def normal(*shape):
    """Random numbers of both signs."""
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


ZERO = np.zeros((), np.int64)
# Calls that a program seldom makes: numbers without dims, and options of another time.
ODD = {
    "a mask": ("F.scaled_dot_product_attention(a, a, a, attn_mask=b)", [normal(1, 2, 3, 4), normal(1, 2, 3, 3)]),
    "windows of a number": ("a.unfold(0, 1, 1)", [normal()]),
    "all dims transformed": ("torch.fft.fftn(a).abs()", [normal(3, 2)]),
    "gathered by a number": ("torch.gather(a, 0, b)", [normal(3), ZERO]),
    "selected of a number": ("torch.index_select(a, 0, b)", [normal(), np.zeros(1, np.int64)]),
    "scattered by a number": ("torch.scatter(a, 0, b, 2.5)", [normal(3), ZERO]),
    "whole numbers gathered": ("torch.gather(a, 0, b)", [np.arange(3) + 1, np.array([2, 0])]),
    "whole numbers selected": ("torch.index_select(a, 0, b)", [np.arange(3) + 1, np.array([2, 0])]),
    "added to a number": ("torch.index_add(a, 0, b, c)", [normal(), np.zeros(1, np.int64), normal()]),
    "filled by a number": ("torch.index_fill(a, 0, b, c)", [normal(3), np.array([1]), normal()]),
    "nothing seen otherwise": ("torch.cat([a.view(4, 0, 1), b], 1)", [normal(0, 4), normal(4, 2, 1)]),
    "an old flag": ("F.mse_loss(a, b, size_average=False)", [normal(3, 2), normal(2, 3).T]),
    "a weight, not reduced": ("F.mse_loss(a, b, weight=a + 3, reduction='none')", [normal(3, 2), normal(2, 3).T]),
    "windows rounded up": ("F.max_pool1d(a, 3, 2, 1, ceil_mode=True)", [normal(2, 3, 6)]),
    "the nuclear norm": ("torch.norm(a, 'nuc')", [normal(3, 2)]),
    "a number made flat": ("torch.flatten(a)", [normal()]),
}  # fmt: skip


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_are_seldom_made(name):
    """Values and gradients are the plain ones on two ranks."""
    import torch

    text, arrays = ODD[name]

    def call(*operands):
        return eval(text, {"torch": torch, "F": torch.nn.functional, **dict(zip("abcd", operands, strict=False))})  # noqa: S307

    report = check_function(call, arrays, (2,), platform="torch", limit=2)
    assert report.ok, report.wrong[:3] or report.rejected[:3]
    assert not report.rejected


@pytest.mark.platforms("mindspore")
def test_every_row_holds_on_mindspore():
    """Each claimed row of the operators that MindSpore has holds; the spellings' own tests run decompositions."""
    names = [name for name in rule_names() if isinstance(find_rule(name), Rule)]
    outcomes = {name: sweep_operator("mindspore", name, ROWS).outcome for name in names}
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in ("ok", "exempt", "absent")} == {}
