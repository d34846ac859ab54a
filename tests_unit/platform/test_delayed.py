"""Models that are built without storage."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor import random
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.contract.footprint import delayed_layer
from hyper_parallel.verify.simulate import simulate


def test_a_rank_holds_its_shard_alone(platform_name):
    """Of a weight over 8 ranks each gets its rows, none on the last one; they are those of one weight, gathered."""

    def rank():
        platform = platform_named(platform_name)
        layer = delayed_layer(platform, 20)
        random.manual_seed(7)
        platform.init_parameters(layer)
        weight = platform.parameters_dict(layer)["weight"]
        low, high = weight.layout.local_box()[0]
        whole, piece = (
            platform.tensor_to_numpy(platform.detach(one)) for one in (weight.full_tensor(), weight.to_local())
        )
        return piece.shape == (high - low, 20) and (whole[low:high] == piece).all(), whole.tolist(), high - low

    found = simulate(rank, 8, platform_name)
    assert all(equal for equal, *_ in found)
    assert all(whole == found[0][1] for _, whole, _ in found)
    assert len({value for row in found[0][1] for value in row}) > 300  # drawn, and no row twice
    assert [rows for *_, rows in found] == [3] * 6 + [2, 0]


@pytest.mark.platforms("torch")
def test_a_module_that_cannot_fill_itself_is_named():
    """A delayed parameter of a module without reset_parameters is refused before anything is allocated."""
    import torch

    platform, module = platform_named("torch"), torch.nn.Module()
    module.child = torch.nn.Module()
    module.child.scale = torch.nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(PlanError) as caught:
        platform.init_parameters(module)
    assert str(caught.value) == (
        "init_parameters: child has delayed parameters or buffers and no reset_parameters() that fills them; add one"
    )


@pytest.mark.platforms("torch")
def test_buffers_stay_unless_asked_for():
    """Parameters alone are delayed by default; with include_buffers buffers are, too; ties survive filling."""
    import torch

    platform = platform_named("torch")
    with platform.init_on_device("meta"):
        norm = torch.nn.BatchNorm1d(3)
    assert (norm.weight.is_meta, norm.running_mean.is_meta) == (True, False)
    with platform.init_on_device("meta", include_buffers=True):
        tied = torch.nn.ModuleList([torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)])
        tied[1].weight = tied[0].weight
    assert tied[0].running_mean.is_meta
    platform.init_parameters(tied)
    assert tied[0].weight is tied[1].weight
    assert tied[0].running_var.tolist() == [1, 1, 1]
