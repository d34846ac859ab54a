"""Pipeline stages and schedules: outputs and gradients are those of one device, in orders that end."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
from hyper_parallel.compat.pipeline import (
    CommComputeOverlap,
    HookCoordinator,
    HookRole,
    MetaStepType,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from hyper_parallel.compat.schedules import (
    FORWARD,
    Step,
    gpipe,
    interleaved,
    one_forward_one_backward,
    rounds_of,
    runs_to_its_end,
)
from hyper_parallel.errors import PlanError, UnsupportedOnBackend
from hyper_parallel.platform.select import get_platform
from hyper_parallel.verify import verify_program
from hyper_parallel.verify.simulate import simulate


def most_activations(order):
    """The most forwards without their backwards."""
    now = most = 0
    for step in order:
        now += 1 if step.kind == FORWARD else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_orders_end_and_keep_as_many_activations_as_their_formulas(ranks):
    """Every order computes all, once, and ends; a rank keeps the number of activations that the schedule promises."""
    for count in range(1, 10):
        for make, kept in (
            (gpipe, [count] * ranks),
            (one_forward_one_backward, [min(count, ranks - rank) for rank in range(ranks)]),
        ):
            orders = make(ranks, count)
            assert runs_to_its_end(orders, ranks)
            assert [most_activations(order) for order in orders] == kept
        for chunks in (2, 3):
            rounds = rounds_of(ranks, count)
            assert sum(rounds) == count
            orders = interleaved(ranks, chunks, rounds)
            assert runs_to_its_end(orders, ranks * chunks)
            for rank, order in enumerate(orders):
                stages = range(rank, ranks * chunks, ranks)
                assert sorted(order) == sorted(Step(kind, s, m) for kind in "FB" for s in stages for m in range(count))
                if set(rounds) == {ranks}:
                    formula = (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1
                    assert most_activations(order) == min(formula, chunks * count)


def test_an_order_in_which_ranks_wait_for_each_other_is_noticed():
    """A backward before its forward, and a forward before that of the stage before, never run."""
    assert not runs_to_its_end([[Step("B", 0, 0), Step("F", 0, 0)]], 1)
    crossed = [[Step("F", 0, 0), Step("F", 2, 0), Step("F", 0, 1)], [Step("F", 1, 1), Step("F", 1, 0)]]
    assert not runs_to_its_end(crossed, 4)


def array(*shape, seed=0):
    """Normal float32 values from a fresh generator."""
    return (0.6 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


STAGES, WIDTHS = 4, (5, 3, 4, 6, 2)


def stage_module(index):
    """A layer that hands on two tensors, of which one stays as it is; the last returns one."""
    platform = get_platform()

    class Layer(platform.Module):
        def __init__(self):
            super().__init__()
            weight = platform.from_numpy(array(WIDTHS[index], WIDTHS[index + 1], seed=index))
            self.weight = platform.new_parameter(weight, requires_grad=True, name="weight")
            if not hasattr(self, "forward"):
                self.construct = self.compute

        def compute(self, x, carried=None, *, scale):
            carried = x.sum() if carried is None else carried
            result = (x @ self.weight).exp() * scale
            return (result * carried).sum() if index == STAGES - 1 else (result, carried)

        forward = construct = compute

    return Layer()


def batch(count):
    """Rows of all micro-batches, and a factor per row."""
    return array(3 * count, WIDTHS[0], seed=9), 1 + 0.1 * array(3 * count, 1, seed=10)


def enable_backward():
    """``backward`` on the framework of this rank."""
    if "MindSpore" in type(get_platform()).__name__:
        enable_mindspore_backward_compat()


def one_device(count):
    """Losses of micro-batches, and gradients of all weights, on one device."""
    platform = get_platform()
    enable_backward()
    layers, losses = [stage_module(index) for index in range(STAGES)], []
    rows, scales = batch(count)
    for micro in range(count):
        part = slice(3 * micro, 3 * micro + 3)
        passed = (platform.from_numpy(rows[part]),)
        for layer in layers:
            passed = layer(*passed, scale=platform.from_numpy(scales[part]))
        passed.backward()
        losses.append(float(platform.tensor_to_numpy(platform.detach(passed))))
    return losses, [platform.tensor_to_numpy(layer.weight.grad).copy() for layer in layers]


def pipelined(kind, count):
    """The same, by a schedule: losses, which the last rank has, and gradients of this rank's stages."""
    platform = get_platform()
    enable_backward()
    ranks = platform.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    layers = {index: stage_module(index) for index in range(mesh.get_local_rank(), STAGES, ranks)}
    stages = [PipelineStage(layer, index, STAGES, mesh=mesh) for index, layer in layers.items()]
    schedule = kind(stages if len(stages) > 1 else stages[0], 1)
    schedule.micro_batch_num = count
    schedule._init_round_layout()
    schedule.split_micro_batch = platform.micro_batch(count)
    schedule.build_exec_order()
    schedule.register_custom_function(MetaStepType.OVERLAP_B_F, None)  # no step calls it
    for stage in stages:
        stage.recompute_one_chunk(0)
    rows, scales = map(platform.from_numpy, batch(count))
    runs = [schedule.run(rows, scale=scales) for _ in range(2)]
    return (
        [[float(platform.tensor_to_numpy(platform.detach(loss))) for loss in run] for run in runs],
        {index: platform.tensor_to_numpy(layer.weight.grad).copy() for index, layer in layers.items()},
    )


@pytest.mark.parametrize(
    "kind, ranks, count",
    [
        (ScheduleGPipe, 4, 3),
        (Schedule1F1B, 4, 6),
        (ScheduleInterleaved1F1B, 2, 4),
        (ScheduleInterleaved1F1B, 2, 5),
        (ScheduleInterleaved1F1B, 1, 2),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(kind, ranks, count, platform_name):
    """Two runs add up twice the gradients of one device; the last stage's rank has each micro-batch's result."""
    ((losses, gradients),) = simulate(one_device, 1, platform=platform_name, args=(count,))
    results = simulate(pipelined, ranks, platform=platform_name, args=(kind, count))
    for rank, (runs, found) in enumerate(results):
        assert sorted(found) == list(range(rank, STAGES, ranks))
        for index, gradient in found.items():
            np.testing.assert_allclose(gradient, 2 * gradients[index], rtol=2e-4)
        for run in runs:
            np.testing.assert_allclose(run, losses if rank == ranks - 1 else [], rtol=1e-5)


def test_overlap_runs_both_one_after_the_other():
    """What overlaps on devices is called in turn, backward first, and the hooks of its threads wait for nothing."""
    overlap, seen = CommComputeOverlap(), []
    overlap.run(fwd_fn=lambda: seen.append("forward"), bwd_fn=lambda: seen.append("backward"))
    assert seen == ["backward", "forward"]
    coordinator = overlap.coordinator
    assert isinstance(coordinator, HookCoordinator)
    assert not coordinator.is_enabled()
    assert coordinator.rendezvous(HookRole.COMPUTE) is coordinator.notify_dispatched(HookRole.COMM) is None


def hooked():
    """A product with hooks at every position that programs name, and its gradient."""
    platform, coordinator = get_platform(), CommComputeOverlap().coordinator
    enable_backward()
    weight = platform.new_parameter(platform.from_numpy(array(3, 2)), requires_grad=True, name="weight")
    x = platform.from_numpy(array(4, 3, seed=1)) @ weight
    for position in ("CHUNK_START", "A", "B", "C", "D", "D_LAST", "CHUNK_END"):
        x = platform.differentiable_sync_hook(x, position, coordinator)
    (x * x).sum().backward()
    return platform.tensor_to_numpy(weight.grad).copy()


def test_hooks_of_overlap_change_nothing(platform_name):
    """Forward and backward pass every position of the threads that overlap, with the gradient of a plain product."""
    (found,) = simulate(hooked, 1, platform=platform_name)
    rows, weight = array(4, 3, seed=1), array(3, 2)
    np.testing.assert_allclose(found, 2 * rows.T @ (rows @ weight), rtol=1e-5)


def refusals():
    """What is refused, and its words; and a run without backward."""
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    own, layer = mesh.get_local_rank(), stage_module(0)

    def message(call):
        with pytest.raises((PlanError, UnsupportedOnBackend)) as caught:
            call()
        return str(caught.value)

    def stage(index, stages=2, **options):
        return PipelineStage(layer, index, stages, mesh=mesh, **options)

    nothing = PipelineStage(print, own, 2, mesh=mesh)
    seen = [
        message(lambda: PipelineStage(layer, 0, 2)),
        message(lambda: stage(1 - own)),
        message(lambda: Schedule1F1B(stage(own, 4), 2)),
        message(lambda: ScheduleGPipe([stage(own, 4), stage(own + 2, 4)], 2)),
        message(lambda: nothing._gradients or nothing.get_last_stage_sens(None)),
    ]
    only = PipelineStage(lambda x: x * 2, own, 2, mesh=mesh, has_backward=False)
    (outputs,) = ScheduleGPipe(only, 1).run(platform.from_numpy(array(2, 3))) or [None]
    assert (outputs is None) == (own == 0)
    if own:
        np.testing.assert_array_equal(platform.tensor_to_numpy(outputs), 4 * array(2, 3))
    return seen


def test_what_does_not_fit_is_refused(platform_name):
    """Wrong stages and what is not supported are refused with their words; forward-only stages only compute."""
    for own, found in enumerate(simulate(refusals, 2, platform=platform_name)):
        mesh, place, many, several, nothing = found
        assert mesh == "PipelineStage: mesh is None; it must have the ranks of the pipeline as its one axis"
        assert place.startswith(f"PipelineStage: stage {1 - own} of 2 is not on rank {own} of DeviceMesh(")
        assert many == "Schedule1F1B: 1 stages on each of 2 ranks are not 4"
        assert several == "ScheduleGPipe: 2 stages on a rank; it takes one, ScheduleInterleaved1F1B several"
        assert nothing == f"PipelineStage: stage {own} returns NoneType; stages exchange plain tensors"


OWN_PATHS = """
import numpy as np
from mindspore import Parameter, Tensor, mint, nn
from hyper_parallel import get_platform, init_device_mesh
from hyper_parallel.compat.activation_checkpoint import enable_mindspore_backward_compat
from hyper_parallel.compat.pipeline import PipelineStage, Schedule1F1B

class Layer(nn.Cell):
    def __init__(self, index):
        super().__init__()
        values = 0.4 * np.random.default_rng(index).standard_normal((5 + index, 6 + index))
        self.weight = Parameter(Tensor(values.astype(np.float32)), name="weight")

    def construct(self, x):
        return mint.tanh(mint.matmul(x, self.weight))

class MeanSquare(nn.Cell):
    def construct(self, x):
        return (x * x).mean()

enable_mindspore_backward_compat()
world = get_platform().get_world_size()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))
rank = mesh.get_local_rank()
stage = nn.SequentialCell([Layer(0), Layer(1), Layer(2), MeanSquare()][2 * rank : None if rank == world - 1 else 2])
optimizer = nn.SGD(stage.trainable_params(), 0.1)
draw = np.random.default_rng(9)
for _ in range(2):
    x = Tensor(draw.standard_normal((9, 5)).astype(np.float32))
    if world > 1:
        Schedule1F1B(PipelineStage(stage, rank, world, mesh=mesh), 3).run(x)
    else:
        for start in (0, 3, 6):
            stage(x[start : start + 3]).backward()
    weights = stage.trainable_params()
    if WRONG and rank == 1:
        weights[0].grad = weights[0].grad * 1.5
    optimizer(tuple(each.grad for each in weights))
    for each in weights:
        each.grad = None
"""


@pytest.mark.platforms("mindspore")
@pytest.mark.parametrize("wrong", [False, True])
def test_stages_whose_cells_have_paths_of_their_own_are_compared(wrong, tmp_path):
    """``0`` of the second stage is ``2`` of the whole model, by its weights; its wrong gradient has that name.

    The second stage's output is the loss, a single number, and the first one's is not.
    """
    (tmp_path / "train.py").write_text(OWN_PATHS.replace("WRONG", str(wrong)))
    report = verify_program(str(tmp_path / "train.py"), 2, platform="mindspore")
    assert report.ok is not wrong, report.text()
    assert "0 on rank 1 is compared with the reference's 2" in report.verdict.notes
    assert "the model's output on rank 0: they have only some of its parameters, as pipeline stages do" in report.text()
    if wrong:
        first = report.verdict.first
        assert (first.kind, first.name, first.step, first.ranks) == ("gradient", "2.weight", 0, (1,))
    else:
        assert report.verdict.counts["gradient"] == 6
