"""Models that are built without storage."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.module import place_parameter
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate

# What allocators and the descriptions of parameters take.
SLACK = 4 << 20
# What is drawn at a time, and rounded.
SCRATCH = 2 << 20


def test_8_gib_over_8_ranks_are_built_without_storage(platform_name):
    """A model of 8 GiB of parameters is built and laid out over 8 ranks, and the process grows by no part of it."""

    def rank():
        from hyper_parallel.verify.contract.footprint import growth_of

        platform, held = platform_named(platform_name), []

        def build():
            for _ in range(8):
                layer = delayed_layer(platform, 1 << 14)
                for one in platform.parameters_dict(layer).values():
                    assert platform.is_meta(platform.get_param_local_data(one))
                    assert one.local_shape[0] == (1 << 14) // 8
                    held.append(math.prod(one.shape) * platform.get_param_type_size(one))

        delayed_layer(platform, 8)  # what the first one imports is not the model's
        return growth_of(build), sum(held)

    for grown, held in simulate(rank, 8, platform_name):
        assert held > 8 << 30
        assert grown < SLACK  # a weight is 1 GiB, and a rank's part of it 128 MiB


def test_a_rank_materialises_its_shard_alone(platform_name):
    """Of a weight of 64 MiB over 8 ranks each takes its 8; what it draws with, in float64 too, is bounded."""

    def rank():
        from hyper_parallel.verify.contract.footprint import growth_of

        platform = platform_named(platform_name)
        platform.init_parameters(delayed_layer(platform, 8))
        layer = delayed_layer(platform, 1 << 12)
        grown = growth_of(lambda: platform.init_parameters(layer))
        weight = platform.parameters_dict(layer)["weight"]
        return grown, platform.get_tensor_storage_size(platform.get_param_local_data(weight))

    for grown, stored in simulate(rank, 8, platform_name):
        assert stored == 8 << 20
        assert grown < stored + SCRATCH


def delayed_layer(platform, size):
    """A square linear layer without storage, its parameters sharded over the world of 8."""
    with platform.init_on_device(platform.meta_device):
        layer = platform.linear_layer(size, size, dtype=platform.str_to_dtype("float32"))
    for name in ("weight", "bias"):
        place_parameter(platform, layer, name, DeviceMesh("cpu", list(range(8))), [Shard(0)])
    return layer


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
