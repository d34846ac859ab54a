"""MindSpore's own checkpoint functions and training loop serve cells with DTensor parameters as plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.errors import CheckpointError, PlanError, RankFailedError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

NAMES = ["0.weight", "0.bias", "1.gamma", "1.beta", "3.weight", "3.bias"]


def _net(seed):
    import mindspore
    from mindspore import nn

    mindspore.set_seed(seed)
    return nn.SequentialCell(nn.Dense(5, 7), nn.LayerNorm((7,)), nn.ReLU(), nn.Dense(7, 4))


def _parallel(seed):
    import mindspore

    from hyper_parallel.platform.select import platform_named

    del mindspore
    mesh = init_device_mesh("cpu", (platform_named("mindspore").get_world_size(),), mesh_dim_names=("tp",))
    styles = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
    return parallelize_module(_net(seed), mesh, styles), mesh.get_rank()


def _values(net):
    return {parameter.name: np.array(parameter.asnumpy()) for parameter in net.get_parameters()}


def _train(net, folder):
    """Train as a tutorial does; return losses, metrics, weights and the names of the checkpoints."""
    import mindspore as ms
    from mindspore import dataset, nn
    from mindspore.train import Callback, CheckpointConfig, Model, ModelCheckpoint

    class Losses(Callback):
        """Keeps the losses."""

        def __init__(self):
            self.losses = []

        def on_train_step_end(self, run_context):
            """Keep the step's loss."""
            self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))

    rng = np.random.default_rng(3)
    arrays = (rng.standard_normal((12, 5)).astype(np.float32), rng.integers(0, 4, 12).astype(np.int32))
    data = dataset.NumpySlicesDataset(arrays, column_names=["x", "y"], shuffle=False).batch(4)
    parameters = net.trainable_params()
    groups = [{"params": parameters[:2], "weight_decay": 0.01}, {"params": parameters[2:]}]
    optimizer = nn.Adam([*groups, {"order_params": parameters}], nn.piecewise_constant_lr([3, 20], [0.1, 0.05]))
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    scaling = ms.amp.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    model, losses = Model(net, loss, optimizer, metrics={"acc"}, loss_scale_manager=scaling), Losses()
    saving = ModelCheckpoint(directory=str(folder), config=CheckpointConfig(save_checkpoint_steps=2))
    model.train(2, data, callbacks=[losses, saving], dataset_sink_mode=False)
    metrics = model.eval(data, dataset_sink_mode=False)
    return losses.losses, metrics, _values(net), sorted(file.name for file in folder.glob("*.ckpt"))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_tutorials_training_is_that_of_a_single_device(world, tmp_path):
    """Model.train with groups, a schedule, loss scaling and callbacks: equal losses, metrics, weights and files."""
    import mindspore as ms

    start = str(tmp_path / "start.ckpt")
    ms.save_checkpoint(_net(1), start)

    def rank():
        import mindspore as ms

        parallel, number = _parallel(2)
        plain = _net(3)
        assert [ms.load_param_into_net(net, ms.load_checkpoint(start)) for net in (plain, parallel)] == [([], [])] * 2
        alone = _train(plain, tmp_path / f"alone{number}")
        together = _train(parallel, tmp_path / "together")
        ms.save_checkpoint(parallel, str(tmp_path / "end.ckpt"))
        return alone, together

    for alone, together in simulate(rank, world, "mindspore"):
        assert list(together[2]) == NAMES
        assert len(together[0]) == 6
        np.testing.assert_allclose(together[0], alone[0], rtol=1e-5)
        assert together[1] == alone[1]
        for name in NAMES:
            np.testing.assert_allclose(together[2][name], alone[2][name], rtol=1e-4, atol=1e-6)
        assert together[3] == alone[3]
    loaded = _net(4)
    assert ms.load_param_into_net(loaded, ms.load_checkpoint(str(tmp_path / "end.ckpt"))) == ([], [])
    for name, value in _values(loaded).items():
        np.testing.assert_array_equal(value, together[2][name])


def test_what_is_saved_is_whole_and_written_once(tmp_path):
    """Cells, lists and dicts of DTensor parameters are saved whole; two names are two files."""
    import mindspore as ms

    def rank():
        import mindspore as ms

        net, number = _parallel(5)
        ms.save_checkpoint(net.parameters_dict(), str(tmp_path / "dict.ckpt"))
        ms.save_checkpoint(list(net.get_parameters()), str(tmp_path / "list.ckpt"))
        entries = [{"name": f"own.{name}", "data": value} for name, value in net.parameters_dict().items()]
        ms.save_checkpoint(entries, str(tmp_path / f"rank{number}.ckpt"))
        return _values(net)

    expected = simulate(rank, 3, "mindspore")[0]
    files = sorted(file.name for file in tmp_path.glob("*.ckpt"))
    assert files == ["dict.ckpt", "list.ckpt", "rank0.ckpt", "rank1.ckpt", "rank2.ckpt"]
    for file in files:
        values = ms.load_checkpoint(str(tmp_path / file))
        assert [name.removeprefix("own.") for name in values] == NAMES
        for name, value in values.items():
            np.testing.assert_array_equal(value.asnumpy(), expected[name.removeprefix("own.")])


def test_every_rank_learns_that_a_file_could_not_be_written(tmp_path):
    """The writer's error is its own; the other ranks raise a CheckpointError that names it."""
    (tmp_path / "taken.ckpt").mkdir()

    def rank():
        import mindspore as ms

        net, number = _parallel(5)
        try:
            ms.save_checkpoint(net, str(tmp_path / "taken.ckpt"))
        except Exception as error:  # noqa: BLE001 - whatever the writer gets
            return number, type(error).__name__, str(error)
        return number, "", ""

    (_, own, why), (_, kind, text) = simulate(rank, 2, "mindspore")
    assert own
    assert kind == CheckpointError.__name__
    file = tmp_path / "taken.ckpt"
    assert text == f"save_checkpoint: rank 0, which writes {file} for rank 1, could not: {why}"


def test_another_shape_is_refused_as_mindspore_does(tmp_path):
    """A checkpoint whose values do not fit the whole parameter raises, even if they fit a shard."""
    del tmp_path

    def rank():
        import mindspore as ms

        net, _ = _parallel(5)
        shard = net.trainable_params()[0].to_local()
        ms.load_param_into_net(net, {"0.weight": ms.Parameter(ms.Tensor(shard.asnumpy()))})

    with pytest.raises(RankFailedError, match="should have the same shape"):
        simulate(rank, 2, "mindspore")


def test_a_plain_cell_loads_whole_values_of_dtensors():
    """Parameters of a parallel cell load into a plain one, on every rank."""

    def rank():
        import mindspore as ms

        net, _ = _parallel(5)
        plain = _net(6)
        ms.load_param_into_net(plain, net.parameters_dict())
        expected = _values(net)
        return all(np.array_equal(value, expected[name]) for name, value in _values(plain).items())

    assert simulate(rank, 3, "mindspore") == [True] * 3


def test_initialized_data_stays_and_delayed_data_has_one_way():
    """``init_parameters_data`` keeps values; a DTensor without values is told how to get them."""

    def rank():
        from mindspore.nn.utils import no_init_parameters

        net, _ = _parallel(5)
        before = _values(net)
        net.init_parameters_data()
        kept = all(np.array_equal(value, before[name]) for name, value in _values(net).items())
        with no_init_parameters():
            delayed, _ = _parallel(7)
        try:
            delayed.init_parameters_data()
        except PlanError as error:
            return kept, str(error)
        return kept, ""

    for kept, text in simulate(rank, 2, "mindspore"):
        assert kept
        assert text == (
            "init_data: f32[7@tp, 5] has no values yet, and MindSpore would sample each shard by itself; "
            "call platform.init_parameters(module)"
        )
