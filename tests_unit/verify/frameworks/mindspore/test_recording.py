"""What the recorder of MindSpore programs takes: names, calls, regions, and nothing that changes the program."""

import sys

import numpy as np
import pytest

from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.record_log import ProgramStopped, RecordLimits, RecordLog, record
from hyper_parallel.verify.frameworks.contract.records import Group, Region
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

PARAMETERS = ["first.weight", "first.bias", "second.weight", "second.bias"]


def make_net(probability=0.3):
    """Two layers with a dropout between them."""
    import mindspore as ms
    from mindspore import Tensor, nn, ops

    class Net(nn.Cell):
        """Computes in float64."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Dense(5, 7, dtype=ms.float64), nn.Dense(7, 3, dtype=ms.float64)
            self.dropout = nn.Dropout(p=probability)
            self.register_buffer("count", Tensor(2.0))

        def construct(self, x):
            """Computes."""
            return self.second(self.dropout(ops.tanh(self.first(x))))

    return Net().set_train()


def train(net, steps=2, optimizer=None, clip=None):
    """Train a model on random rows; the losses."""
    import mindspore as ms
    from mindspore import Tensor, ops
    from mindspore.experimental import optim

    random = np.random.default_rng(3)
    optimizer = optimizer or optim.AdamW(net.trainable_params(), 0.1)
    step = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    losses = []
    for _ in range(steps):
        loss, gradients = step(Tensor(random.normal(size=(4, 5))))
        losses.append(float(loss))
        optimizer(gradients if clip is None else ops.clip_by_global_norm(gradients, clip))
    return losses


def recorded(program, perturbation=None, **limits):
    """Return the records of a program in this process."""
    from hyper_parallel.verify.frameworks.mindspore.hooks import recording

    log = RecordLog(0, RecordLimits(**limits), perturbation)
    try:
        with recording(log):
            program()
    except ProgramStopped:
        pass
    return log.result()


def names(result, kind, step=0):
    """Return the names of the records of one kind and step, in order."""
    return [entry.name for entry in result.records if entry.kind == kind and entry.step == step]


def values(result, kind, step=0):
    """Return the values of the records of one kind and step, in order."""
    return [entry.value for entry in result.records if entry.kind == kind and entry.step == step]


def test_a_step_leaves_everything_under_the_models_names():
    """Every kind is taken, weights and buffers also before training, with the call sites of losses and norms."""
    from mindspore import nn

    kinds = [nn.Cell.__call__, nn.Optimizer.__call__]
    result = recorded(lambda: train(make_net(), clip=0.5))
    assert names(result, "output") == ["first", "dropout", "second", "(model)"]
    assert names(result, "mask") == ["dropout"]
    assert names(result, "loss") == ["loss"]
    assert names(result, "norm") == ["gradient norm", "clip factor"]
    assert names(result, "gradient") == names(result, "weight") == names(result, "weight", -1) == PARAMETERS
    assert names(result, "buffer", -1) == names(result, "buffer", 1) == ["count"]
    kept = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert names(result, "state") == [f"{name}:{kind}" for kind in kept for name in PARAMETERS]
    assert names(result, "rate", 1) == ["optimizer 0, group 0"]
    assert values(result, "rate", 1)[0] == pytest.approx(0.1)
    norm, factor = values(result, "norm")
    clipped = np.sqrt(sum((gradient**2).sum() for gradient in values(result, "gradient")))
    assert clipped == pytest.approx(min(0.5, float(norm)))
    assert float(factor) == pytest.approx(min(1.0, 0.5 / float(norm)))
    sites = {entry.kind: entry.site for entry in result.records if entry.site}
    assert all(site.startswith(__file__) for site in sites.values())
    assert set(sites) == {"loss", "norm", "output", "gradient", "state", "weight", "buffer"}
    assert result.records[0].step == -1
    assert set(result.notes) == {"inputs", "contiguous inputs", "own gradients", "optimizers", "optimizer steps"}
    assert (result.notes["optimizers"], result.notes["optimizer steps"]) == (["AdamW"], 2)
    assert len(result.notes["own gradients"]["all parameters"]) == len(PARAMETERS)
    assert result.groups == []
    assert [nn.Cell.__call__, nn.Optimizer.__call__] == kinds


def test_recording_changes_no_value():
    """Losses with and without a recorder are the same bits."""
    from mindspore import Tensor

    def run(record_it):
        net = make_net(0.0)
        random = np.random.default_rng(5)
        for parameter in net.get_parameters():
            parameter.set_data(Tensor(random.normal(size=parameter.shape)))
        losses = []
        if record_it:
            recorded(lambda: losses.extend(train(net)))
        else:
            losses = train(net)
        return losses

    assert run(record_it=True) == run(record_it=False)


def test_evaluation_limits_and_values_of_the_program():
    """Outputs outside of a differentiation say so, ``only`` and ``steps`` bound, ``record`` adds, no mask without p."""
    from mindspore import Tensor

    def program():
        net = make_net(0.0)
        net.set_train(False)
        net(Tensor(np.ones((4, 5))))
        record("ones", Tensor(np.ones(2)))
        train(net, 9)

    result = recorded(program, steps=2, only=("second", "ones"))
    assert names(result, "output") == ["second (no_grad)", "second"]
    assert names(result, "value") == ["ones"]
    assert names(result, "mask") == []
    assert result.notes["optimizer steps"] == 2


def test_wrappers_recomputation_and_other_optimizers():
    """TrainOneStepCell is not a part of a name, recomputed cells count once, schedules and groups have rates."""
    from mindspore import Tensor, nn

    net = make_net(0.0)
    net.first.recompute()
    layers = [net.first.trainable_params(), net.second.trainable_params()]
    schedule = nn.exponential_decay_lr(0.1, 0.5, 4, 1, 1)
    optimizer = nn.Momentum([{"params": layers[0], "lr": 0.2}, {"params": layers[1], "lr": schedule}], 0.1, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)

    def program():
        for _ in range(2):
            step(Tensor(np.ones((4, 5))), Tensor(np.zeros((4, 3))))

    result = recorded(program)
    assert names(result, "output") == ["first", "dropout", "second", "(model)", "MSELoss"]
    assert names(result, "loss") == ["loss"]
    assert names(result, "gradient", 1) == names(result, "weight", -1) == PARAMETERS
    assert names(result, "state") == [f"{name}:moments" for name in PARAMETERS]
    assert np.allclose(values(result, "rate"), [0.2, 0.2, 0.1, 0.1])
    assert np.allclose(values(result, "rate", 1), [0.2, 0.2, 0.05, 0.05])


class Doubled:
    """Doubles inputs, weights and gradients: the changes of a repeat, large enough to see."""

    def perturbed_input(self, name, array, dtype=""):
        """Double."""
        del name, dtype
        return array * 2

    def perturbed_gradient(self, name, step, array):
        """Triple."""
        del name, step
        return array * 3


class Rounded(Doubled):
    """Leaves everything alone but outputs in half precision and their gradients."""

    def perturbed_input(self, name, array, dtype=""):
        """Keep."""
        del name, dtype
        return array

    def perturbed_gradient(self, name, step, array):
        """Keep."""
        del name, step
        return array

    def rounded(self, name, array, dtype=""):
        """Double outputs, triple their gradients."""
        assert dtype == "float16"
        return array * (3 if name.startswith("gradient") else 2)


def test_half_precision_is_noted_and_perturbed():
    """A cell whose output is in half precision is noted; a repeat changes the output, and its gradient."""
    import mindspore as ms
    from mindspore import Tensor, nn

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.half = nn.Dense(2, 2, weight_init="ones", bias_init="zeros").to_float(ms.float16)

        def construct(self, x):
            return self.half(x).astype(ms.float32) * 0.5

    def program():
        net = Net()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.0)
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(Tensor([[1.0, 3.0]]))
        optimizer(gradients)

    plain, changed = recorded(program), recorded(program, Rounded())
    assert plain.notes["half precision"]
    assert changed.notes["half precision"]
    assert [each.tolist() for each in values(plain, "output")] == [[[4, 4]], [[2, 2]]]
    assert [each.tolist() for each in values(changed, "output")] == [[[4, 4]], [[4, 4]]]
    for before, after in zip(values(plain, "gradient"), values(changed, "gradient"), strict=True):
        np.testing.assert_array_equal(after, 3 * before)


def test_half_precision_inside_of_rewritten_cells(monkeypatch, tmp_path):
    """With amp_level O1 cells return float32 numbers that were rounded to float16: they are noted and moved as such."""
    import mindspore as ms
    from mindspore import Tensor, amp, nn

    monkeypatch.setattr(sys, "path", list(sys.path))  # MindSpore adds the folder of each class that it rewrites
    monkeypatch.chdir(tmp_path)  # and writes the new source into the working folder

    def program(level, value):
        net = nn.SequentialCell(nn.Dense(2, 2, weight_init="ones", bias_init="zeros"))
        net = amp.auto_mixed_precision(net, level)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.0)
        _, gradients = ms.value_and_grad(lambda x: net(x).sum(), None, optimizer.parameters)(Tensor([[value, 3.0]]))
        optimizer(gradients)

    narrow = 1.0009765625  # of float16
    runs = [recorded(lambda: program("O1", narrow), change) for change in (None, Rounded())]
    assert all(run.notes["half precision"] for run in runs)
    plain, changed = (values(run, "output")[-1] for run in runs)
    np.testing.assert_array_equal(changed, 2 * plain)
    assert "half precision" not in recorded(lambda: program("O0", narrow)).notes


def test_perturbed_repeats():
    """A perturbation changes inputs, weights and gradients, each once, and keeps gradients of what was computed."""
    from mindspore import Tensor, nn

    def program():
        net = make_net(0.0)
        for parameter in net.get_parameters():
            parameter.set_data(Tensor(np.full(parameter.shape, 0.1)))
        train(net, 1, nn.Momentum(net.trainable_params(), 0.1, 0.0))

    plain, changed = recorded(program), recorded(program, Doubled())
    for before, after in zip(values(plain, "weight", -1), values(changed, "weight", -1), strict=True):
        np.testing.assert_array_equal(after, 2 * before)
    x = np.random.default_rng(3).normal(size=(4, 5))
    np.testing.assert_allclose(values(changed, "output")[0], 2 * x @ np.full((5, 7), 0.2) + 0.2, rtol=1e-12)
    weight, moved = values(changed, "weight", -1)[0], values(changed, "weight")[0]
    # A gradient is recorded as backward has made it; the optimizer gets the changed one.
    np.testing.assert_allclose(weight - moved, 0.1 * 3 * values(changed, "gradient")[0], rtol=1e-6)


def test_weights_are_taken_when_the_program_goes_on():
    """What a program writes after the optimizer's step belongs to the step, after the last and between two as well."""
    from mindspore import Tensor, nn

    def program():
        net = make_net(0.0)
        first, *others = net.trainable_params()
        optimizers = [nn.Momentum([first], 0.1, 0.0), nn.Momentum(others, 0.1, 0.0)]
        for step in (1, 0, 1, 0):  # whether a forward comes before
            if step:
                net(Tensor(np.ones((2, 5))))
            for optimizer in optimizers:
                optimizer(tuple(Tensor(np.ones(each.shape)) for each in optimizer.parameters))
            written.append(float(len(written)))
            first.set_data(Tensor(np.full(first.shape, written[-1])))

    written = []
    result = recorded(program)
    name = next(entry.name for entry in result.records if entry.kind == "weight")
    taken = [entry for entry in result.records if (entry.kind, entry.name) == ("weight", name) and entry.step >= 0]
    assert [(entry.step, entry.value.max(), entry.value.min()) for entry in taken] == [(n, n, n) for n in range(4)]


def test_parameters_that_were_replaced_or_forgotten():
    """Gradients of parameters that the model has no more go by its names; parameters without an optimizer are noted."""
    from mindspore import Parameter, Tensor, nn

    def program():
        net = make_net(0.0)
        optimizer = nn.Momentum(net.first.trainable_params(), 0.1, 0.9)
        net.first.weight = Parameter(Tensor(net.first.weight.asnumpy()), name="first.weight")
        train(net, 1, optimizer)

    result = recorded(program)
    assert names(result, "gradient") == ["first.weight", "first.bias"]
    assert result.notes["parameters that no optimizer has"] == ["first.weight", "second.weight", "second.bias"]
    assert result.notes["parameters that no model has"] == [[7, 5]]


def on_a_rank():
    """Regions of DTensors, and the groups of this rank."""
    from mindspore import Tensor
    from mindspore.communication import create_group, get_rank
    from mindspore.mint import distributed

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.platform.select import get_platform

    rank = get_rank()
    log = RecordLog(rank)
    with harness_of(get_platform()).recording(log):
        create_group(f"tp-{rank}", [0, 1])
        create_group("others", [1 - rank])
        distributed.new_group([rank])
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        record("rows", distribute_tensor(Tensor(np.arange(5.0)), mesh, [Shard(0)]))
    result = log.result()
    return result.groups, result.records[0].region, result.records[0].value.tolist()


def test_regions_and_groups():
    """A DTensor says which box it is; groups of this rank have the program's names without their numbers."""
    first, second = simulate(on_a_rank, 2, "mindspore")
    assert first == ([Group("tp", (0, 1)), Group("group 0", (0,))], Region((5,), (0,)), [0.0, 1.0, 2.0])
    assert second == ([Group("tp", (0, 1)), Group("group 1", (1,))], Region((5,), (3,)), [3.0, 4.0])


def _trained_imperatively():
    """Names and values of a step of ``backward``, and of an evaluation without gradients."""
    import mindspore as ms
    from mindspore import Tensor, mint
    from mindspore.experimental import optim

    from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
    from hyper_parallel.platform.select import get_platform

    def program():
        net = make_net(0.0)
        with ms._no_grad():
            net(Tensor(np.ones((4, 5))))
        enable_mindspore_backward_compat()
        optimizer = optim.AdamW(net.trainable_params(), 0.1)
        loss = (net(Tensor(np.ones((4, 5)))) ** 2).mean()
        loss.backward(Tensor(0.5, ms.float64))
        optimizer([parameter.grad for parameter in optimizer.parameters])
        mint.sum(net(Tensor(np.ones((4, 5))))).backward()

    log = RecordLog(0)
    with harness_of(get_platform()).recording(log):
        program()
    result = log.result()
    first, second = values(result, "loss"), values(result, "loss", 1)
    return (
        names(result, "output"), names(result, "output", 1), names(result, "gradient"), len(first), len(second),
        float(first[0]), float((values(result, "output")[-1] ** 2).mean()),
    )  # fmt: skip


def test_backward_of_a_tensor_is_a_differentiation():
    """With ``backward``, outputs are those of training, except under ``no_grad``; it starts from the loss."""
    (found,) = simulate(_trained_imperatively, 1, "mindspore")
    outputs, later, gradients, first, second, loss, expected = found
    cells = ["first", "dropout", "second", "(model)"]
    assert outputs == [*(f"{name} (no_grad)" for name in cells), *cells]
    assert later == cells
    assert gradients == PARAMETERS
    assert (first, second) == (1, 1)
    assert loss == pytest.approx(expected)


def test_known_defects_are_reported_at_the_call():
    """Calls that MindSpore computes wrongly are noted once, with their place; others are not."""
    import mindspore
    from mindspore import Tensor, mint

    def program():
        x = Tensor(np.ones((4, 6), np.float32))
        for _ in range(2):
            mint.split(x, 2, 1)
        x.copy_(x + 1)
        x.T.copy_(mint.ones((6, 4)))
        x.add_(1)
        rows = Tensor(np.ones((4, 3), np.float32))
        mint.cross(rows, rows[:1])
        rows.cross(rows)
        rows.index_add(0, Tensor([1, 0], mindspore.int32), rows[:2])
        x[:] = x + 1
        x[...] = 1.0
        x[...] = x + 1

    split = mint.split
    notes = recorded(program).notes["defects of the framework"]
    labels = ["mint.split", "Tensor.copy_", "Tensor.add_", "mint.cross", "Tensor.index_add", "x[...] = y"]
    assert list(notes) == labels
    assert all(f" at {__file__}:" in words for words in notes.values())
    assert notes["mint.split"].endswith(
        ": its gradient is wrong where one of several pieces is transposed; call mint.narrow for each piece"
    )
    assert mint.split is split
    assert "defects of the framework" not in recorded(lambda: Tensor(np.ones(3)) + 1).notes


def _scaled_while_recorded():
    """A loss scaled and unscaled, and whether all is finite, with and without DTensors, while nothing is compiled."""
    import os

    from mindspore import Tensor, amp

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.platform.select import platform_named

    plain = Tensor(np.array([1.0, np.inf, 3.0], np.float32))
    tensor = distribute_tensor(plain, init_device_mesh("cpu", (2,)), [Shard(0)])
    scaler = amp.DynamicLossScaler(8.0, 2, 1)
    os.environ["MS_JIT"] = "0"
    try:
        with harness_of(platform_named("mindspore")).recording(RecordLog(RecordLimits())):
            scaled = scaler.scale(tensor)
            return (
                scaled.full_tensor().asnumpy(), scaler.unscale((scaled,))[0].full_tensor().asnumpy(),
                bool(amp.all_finite([tensor])), scaler.scale(plain).asnumpy(),
            )  # fmt: skip
    finally:
        del os.environ["MS_JIT"]


def test_loss_scalers_are_served_while_a_program_is_recorded():
    """What MindSpore compiles for loss scaling runs uncompiled there; DTensors are served as in compiled programs."""
    for scaled, unscaled, finite, plain in simulate(_scaled_while_recorded, 2, "mindspore", timeout=200):
        np.testing.assert_array_equal(scaled, [8.0, np.inf, 24.0])
        np.testing.assert_array_equal(unscaled, [1.0, np.inf, 3.0])
        assert finite is False
        np.testing.assert_array_equal(plain, scaled)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_of_half_precision_are_read_as_single_with_their_dtype(dtype):
    """A recorded value of half precision is the same number in float32, and says which dtype it had."""
    import mindspore

    from hyper_parallel.verify.frameworks.mindspore.local_values import read_tensor

    value = read_tensor(mindspore.Tensor([1.5, -0.25, 3.0], getattr(mindspore, dtype)))
    assert value.array.dtype == np.float32
    assert value.array.tolist() == [1.5, -0.25, 3.0]
    assert value.dtype == ("" if dtype == "float32" else dtype)
    assert read_tensor(None) is None


def test_what_a_program_saves_is_recorded(tmp_path):
    """Floating tensors whose names end with a parameter's are recorded when saved, in each form of the call."""
    import mindspore as ms
    from mindspore import Parameter

    net = make_net()
    path = str(tmp_path / "net.ckpt")

    def program():
        train(net)
        average = {f"average.{name}": 0.5 * value.asnumpy() for name, value in net.parameters_dict().items()}
        ms.save_checkpoint({**average, "local": np.ones(1), "first.bias": Parameter(net.first.bias)}, path)
        ms.save_checkpoint(save_obj=[{"name": "first.weight", "data": net.first.weight}], ckpt_file_name=path)
        ms.save_checkpoint(net, path)

    plain = ms.save_checkpoint
    result = recorded(program)
    assert ms.save_checkpoint is plain
    saved = names(result, "saved", 1)
    assert [name for name in saved if name.startswith("average.")] == [f"average.{name}" for name in PARAMETERS]
    assert (saved.count("first.weight"), saved.count("first.bias")) == (2, 2)
    assert set(saved) >= set(PARAMETERS)
    assert "local" not in saved
    assert names(result, "saved") == []
    sites = {entry.site for entry in result.records if entry.kind == "saved"}
    assert len(sites) == 3
    assert all(site.startswith(__file__) for site in sites)
