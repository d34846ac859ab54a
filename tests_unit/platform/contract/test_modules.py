"""Models built without storage."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import Shard, init_device_mesh
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.module import place_parameter
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.simulate import simulate
from workshop.conformance.footprint import delayed_layer


def test_a_rank_holds_its_shard_alone(platform_name):
    """Each of 8 ranks gets its rows of a weight, the last one none, equal to those of the gathered weight."""

    def rank():
        platform = platform_named(platform_name)
        layer = delayed_layer(platform, 20)
        random.manual_seed(7)
        platform.init_parameters(layer)
        weight = platform.parameters_dict(layer)["weight"]
        low, high = weight.layout.local_box()[0]
        whole, shard = (
            platform.tensor_to_numpy(platform.detach(tensor)) for tensor in (weight.full_tensor(), weight.to_local())
        )
        return shard.shape == (high - low, 20) and (whole[low:high] == shard).all(), whole.tolist(), high - low

    results = simulate(rank, 8, platform_name)
    assert all(equal for equal, *_ in results)
    assert all(whole == results[0][1] for _, whole, _ in results)
    assert len({value for row in results[0][1] for value in row}) > 300  # random, and no row twice
    assert [rows for *_, rows in results] == [3] * 6 + [2, 0]


def _drawn_by_all():
    """Name, mean, deviation, minimum and maximum of each initializer's numbers: the framework's own, and ours."""
    import mindspore
    from mindspore import nn
    from mindspore.common import initializer as kinds

    platform, results = platform_named("mindspore"), []
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("m",))
    for make in (
        kinds.Zero, kinds.One, lambda: kinds.Constant(0.3), lambda: kinds.Uniform(0.2), lambda: kinds.Normal(0.5, 1.5),
        kinds.TruncatedNormal, lambda: kinds.TruncatedNormal(1.0, 0.5, -1.0, 1.0), kinds.HeUniform,
        lambda: kinds.HeNormal(mode="fan_out", nonlinearity="relu"), kinds.XavierUniform, lambda: kinds.XavierNormal(2),
    ):  # fmt: skip
        mindspore.set_seed(3)
        own = kinds.initializer(make(), [121, 90], mindspore.float32).init_data().asnumpy()
        with platform.init_on_device("meta"):
            layer = nn.Dense(90, 121, kinds.initializer(make(), [121, 90], mindspore.float32), has_bias=False)
        place_parameter(platform, layer, "weight", mesh, [Shard(0)])
        random.manual_seed(5)
        platform.init_parameters(layer)
        sampled = layer.weight.full_tensor().asnumpy()
        results.append(
            (
                type(make()).__name__,
                *([value.mean(), value.std(), value.min(), value.max()] for value in (own, sampled)),
            )
        )
    return results


@pytest.mark.platforms("mindspore")
def test_sampled_shards_have_the_frameworks_distribution():
    """Shards sampled by each supported initializer have the distribution of MindSpore's own numbers."""
    for name, own, sampled in simulate(_drawn_by_all, 3, "mindspore")[0]:
        wide = max(own[1], 1e-6)  # one standard deviation; the extremes of ten thousand numbers lie a few apart
        np.testing.assert_allclose(sampled[:2], own[:2], atol=0.05 * wide, err_msg=name)
        bounded = name not in ("Normal", "HeNormal", "XavierNormal") and own[3] < 3 * wide
        np.testing.assert_allclose(sampled[2:], own[2:], atol=(0.02 if bounded else 1.5) * wide, err_msg=name)


@pytest.mark.platforms("mindspore")
def test_an_initializer_of_unknown_numbers_is_named():
    """An initializer that cannot sample shards is refused, with a list of those that can."""
    from mindspore import float32, nn
    from mindspore.common import initializer as kinds

    platform = platform_named("mindspore")
    with use_platform("mindspore"), platform.init_on_device("meta"):
        layer = nn.Dense(6, 6, kinds.initializer(kinds.Orthogonal(), [6, 6], float32), has_bias=False)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
    place_parameter(platform, layer, "weight", mesh, [Shard(0)])
    with use_platform("mindspore"), pytest.raises(PlanError) as caught:
        platform.init_parameters(layer)
    assert str(caught.value) == (
        "init_parameters: cannot sample a shard of weight (Orthogonal); initializers that can: Constant, HeNormal, "
        "HeUniform, Normal, One, TruncatedNormal, Uniform, XavierNormal, XavierUniform, Zero"
    )


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
    """By default only parameters are delayed, with include_buffers also buffers; ties survive initialization."""
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
