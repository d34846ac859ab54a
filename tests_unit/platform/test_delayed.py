"""Models that are built without storage."""

from __future__ import annotations

import time

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.simulate import simulate


def test_8_gib_over_8_ranks_are_built_without_storage(platform_name):
    """A model of 8 GiB of parameters is built and laid out over 8 ranks at once, and allocates nothing but its name."""

    def rank():
        import resource

        from hyper_parallel.core.dtensor.mesh import DeviceMesh
        from hyper_parallel.core.dtensor.module import place_parameter
        from hyper_parallel.core.dtensor.placements import Shard

        platform = platform_named(platform_name)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        mesh = DeviceMesh("cpu", list(range(8)))
        held = 0
        for _ in range(8):
            with platform.init_on_device(platform.meta_device):
                layer = platform.linear_layer(1 << 14, 1 << 14, dtype=platform.str_to_dtype("float32"))
            for name in ("weight", "bias"):
                place_parameter(platform, layer, name, mesh, [Shard(0)])
            for one in platform.parameters_dict(layer).values():
                assert platform.is_meta(platform.get_param_local_data(one))
                assert one.local_shape[0] == (1 << 14) // 8
                held += one.shape[0] * (one.shape[1] if len(one.shape) > 1 else 1) * 4
        seconds = time.process_time() - start
        return held, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

    found = simulate(rank, 8, platform_name)
    for held, seconds, grown in found:
        assert held > 8 << 30
        assert seconds < 2
        assert grown < 256 << 20


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
