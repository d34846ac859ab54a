"""Names of an earlier release: gradients by a function, delayed parameters, reports in files, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import DTensor, Replicate, Shard, ShardingPlan, distribute_tensor, init_device_mesh, shard_module
from hyper_parallel.compat.layouts import combine_layout, load_layout, save_layout
from hyper_parallel.errors import LayoutError, UnsupportedOnBackend
from hyper_parallel.verify.simulate import simulate

mindspore_only = pytest.mark.platforms("mindspore")


def network():
    """A product with a weight of 5 x 7, whose values an initializer draws; three ranks divide neither."""
    import mindspore as ms

    class Product(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            draws = ms.common.initializer.initializer("normal", [5, 7], ms.float32)
            self.weight = ms.Parameter(draws, name="weight")

        def construct(self, x):
            return ms.mint.tanh(ms.mint.matmul(x, self.weight))

    return Product()


def train():
    """The loss and gradient of the sharded product, and those of plain tensors of the same values."""
    import mindspore as ms
    from mindspore.nn.utils import no_init_parameters

    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    with no_init_parameters():
        model = network()
    plan = ShardingPlan({"weight": [Shard(1)]}, {"input": ([Replicate()],)}, {"output": [Replicate()]})
    shard_module(model, mesh, plan)
    assert hyper_parallel.init_parameters(model) is model
    draw = np.random.default_rng(0)
    x, cotangent = (ms.Tensor(draw.normal(size=size).astype(np.float32)) for size in ((4, 5), (4, 7)))
    run = hyper_parallel.parallelize_value_and_grad(
        lambda value: (model(value) * distribute_tensor(cotangent, mesh, [Replicate()])).sum(), [model.weight]
    )
    loss, (gradient,) = run(x)
    assert isinstance(gradient, DTensor)
    plain = network()
    plain.weight.set_data(model.weight.full_tensor())
    wanted, (by_weight,) = ms.value_and_grad(lambda value: (plain(value) * cotangent).sum(), None, [plain.weight])(x)
    np.testing.assert_allclose(float(loss.full_tensor()), float(wanted), rtol=1e-5)
    np.testing.assert_allclose(gradient.full_tensor().asnumpy(), by_weight.asnumpy(), rtol=1e-4, atol=1e-6)
    return float(np.abs(by_weight.asnumpy()).max())


@mindspore_only
def test_gradients_are_those_of_one_device():
    """``parallelize_value_and_grad`` of delayed, then initialized, weights needs no factor."""
    assert all(largest > 0 for largest in simulate(train, 3, platform="mindspore"))


@mindspore_only
def test_what_has_no_single_gradient_is_refused():
    """Seeds, and a function of several results, are refused with what to call instead."""
    import mindspore as ms

    weight = ms.Parameter(ms.Tensor(np.ones((2, 3), np.float32)))
    with pytest.raises(UnsupportedOnBackend) as seeds:
        hyper_parallel.parallelize_value_and_grad(weight.sum, [weight], sens=[0.5])
    assert str(seeds.value) == (
        "parallelize_value_and_grad: sens=[0.5] is not supported; multiply the result of fn by it"
    )
    run = hyper_parallel.parallelize_value_and_grad(lambda: (weight.sum(), weight), [weight])
    with pytest.raises(TypeError) as several:
        run()
    assert str(several.value).splitlines()[0] == (
        "parallelize_value_and_grad: fn returned 2 results and must return one; "
        "call hyper_parallel.value_and_grad(fn, None, weights, has_aux=True)"
    )


@pytest.mark.platforms("torch")
def test_pytorch_has_backward_instead():
    """On PyTorch ``parallelize_value_and_grad`` is refused as ``value_and_grad`` is."""

    def body():
        with pytest.raises(UnsupportedOnBackend, match=r"loss\.backward\(\)"):
            hyper_parallel.parallelize_value_and_grad(abs, [])

    simulate(body, 1, platform="torch")


def test_reports_in_files(tmp_path):
    """Reports of ranks are written, read and joined; a rank in two files is refused."""
    for rank in range(3):
        save_layout({str(rank): {"weight": {"tensor_map": (rank, -1)}}}, tmp_path / f"{rank}.layout")
    save_layout({"0": {}}, str(tmp_path / "other.json"))
    assert load_layout(str(tmp_path / "2.layout")) == {"2": {"weight": {"tensor_map": [2, -1]}}}
    assert combine_layout(str(tmp_path)) == {str(rank): {"weight": {"tensor_map": [rank, -1]}} for rank in range(3)}
    (tmp_path / "again.layout").write_text(json.dumps({"1": {}}), encoding="utf-8")
    with pytest.raises(LayoutError) as twice:
        combine_layout(tmp_path)
    assert str(twice.value) == (
        f"combine_layout: {tmp_path / 'again.layout'} has rank 1, and so has another file of {tmp_path}"
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("hsdp", "hsdp: the sharded data parallelism of an earlier release; call fully_shard(module, mesh=mesh)"),
        ("hsdp_sync_stream", "hsdp_sync_stream: of hsdp; fully_shard, which takes its place, waits by itself"),
        (
            "HSDPCell",
            "HSDPCell: the sharded data parallelism of an earlier release; call fully_shard(module, mesh=mesh)",
        ),
    ],
)
def test_earlier_data_parallelism_names_fully_shard(name, message):
    """What was replaced by ``fully_shard`` says so when it is used."""
    with pytest.raises(UnsupportedOnBackend) as refused:
        getattr(hyper_parallel, name)()
    assert str(refused.value) == message
