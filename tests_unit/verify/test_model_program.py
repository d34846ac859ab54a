"""Training compared with a single device: what is compared, and which runs are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, NoParallel, RowwiseParallel, parallelize_module
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.program import _require_equal_batches
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan

USER = Path(__file__).parent / "user"
NO_GRADIENT = (
    "SPEC: the first step gives no parameter a gradient other than zero, so nothing would be verified; the loss must "
    "depend on the model's output, without detach() or no_grad() on the way"
)
FROZEN = (
    "SPEC: none of the model's 4 parameters has a floating dtype and requires grad, so there is nothing to train; "
    "leave at least one unfrozen"
)


def user_report(platform_name, name, mesh=(2, 2), **options):
    """Return the report of one of the cases in ``user/``, with the batch split too."""
    spec, plan = (f"{USER / platform_name}_case.py:{function}" for function in (name, "plan"))
    return verify_model(spec, plan, mesh, ("dp", "tp"), platform=platform_name, **options)


def model(changed=None, dtype="float64", dropout=0.0):
    """Return two linear layers, the first frozen, and a counting buffer; `changed` is wrong on parallel ranks."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)
            self.drop = nn.Dropout(dropout)
            self.up.weight.requires_grad_(False)
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x):
            parallel = isinstance(self.up.weight, DTensor)
            with torch.no_grad():
                self.seen += 1 + (changed == "buffer" and parallel)
                if changed == "frozen" and parallel:
                    self.up.weight.to_local().add_(0.5)
            return self.down(self.drop(torch.tanh(self.up(x))))

    return Net().to(getattr(torch, dtype))


def report_of(seeds=None, **options):
    """Return the report of two steps on three ranks; every call of SPEC takes the next of `seeds`."""
    import torch

    dtype = options.get("dtype", "float64")

    def case():
        rng = np.random.default_rng(0 if seeds is None else next(seeds))
        batches = [(rng.standard_normal((4, 5)), rng.standard_normal((4, 3))) for _ in range(2)]
        if dtype != "float64":
            batches = [tuple(torch.tensor(array, dtype=getattr(torch, dtype)) for array in batch) for batch in batches]
        return ModelCase(lambda: model(**options), batches, lambda out, batch: ((out - batch[-1]) ** 2).mean())

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return verify_model(case, lambda _: plan, (3,), ("tp",), platform="torch", steps=2)


def test_a_plan_that_changes_nothing_names_what_splits_the_batch(platform_name):
    """``{}`` on a data axis is refused with the plan for data parallelism, and that plan is verified and equal."""
    spec = f"{USER / platform_name}_case.py:case"
    with pytest.raises(InputError) as caught:
        verify_model(spec, lambda _: {}, (3,), ("dp",), platform=platform_name)
    assert str(caught.value) == (
        "PLAN gives no module a style and splits no batch, so every rank would train like the single device and "
        "nothing would be verified; for data parallelism return hyper_parallel.verify.ParallelPlan({}, "
        "batch={'dp': Shard(0)}), or give a module a style by its path"
    )
    remedy = ParallelPlan({}, batch={"dp": Shard(0)})
    assert verify_model(spec, lambda _: remedy, (3,), ("dp",), platform=platform_name, steps=1).ok


@pytest.mark.platforms("torch")
def test_frozen_parameters_and_buffers_are_compared():
    """Frozen parameters and buffers of a correct plan are compared and equal, infinities of a mask included."""
    report = report_of()
    assert report.ok, report.text()
    assert (report.counts["weight"], report.counts["gradient"], report.counts["buffer"]) == (36, 18, 18)


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("changed, name", [("frozen", "up.weight"), ("buffer", "seen")])
def test_a_change_that_no_gradient_shows_is_found(changed, name):
    """A frozen weight or a buffer that differs on the ranks is reported as a divergence of its own."""
    report = report_of(changed=changed)
    assert not report.ok
    assert name in {check.name for check in report.checks if not check.ok}


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("bound, equal", [(10.0, True), (1e-3, False)])
def test_a_step_that_clips_once_more_is_found_if_it_changes_anything(bound, equal):
    """Clipping that leaves the gradients as they are is not a difference; what it removes is one of the gradients."""

    def clipping(*bounds):
        def step(training):
            loss = training.loss()
            loss.backward()
            for limit in bounds:
                training.clip(limit)
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss

        return step

    report = verify_model(
        lambda: ModelCase(model, batches(), mean_square, step=clipping(10.0)),
        lambda _: ParallelPlan({"up": ColwiseParallel(), "down": RowwiseParallel()}, step=clipping(10.0, bound)),
        (3,),
        ("tp",),
        platform="torch",
        steps=1,
    )
    assert report.ok == equal, report.text()
    assert equal or report.first.kind == "gradient"


@pytest.mark.platforms("torch")
def test_half_precision_is_refused():
    """bfloat16 parameters are refused, because their bound would hide errors; the message names the cure."""
    with pytest.raises(InputError) as caught:
        report_of(dtype="bfloat16")
    assert str(caught.value) == (
        "SPEC: parameter up.weight is bfloat16, in which rounding hides what a wrong plan does; build the model in "
        "float64 or float32, where the same plan does the same"
    )


@pytest.mark.parametrize("name", ["with_options", "with_step"])
def test_options_of_a_case(platform_name, name):
    """Accumulation, clipping, a scheduler, a user's optimizer or step, and dropout train alike in both runs."""
    report = user_report(platform_name, name, steps=2)
    assert report.ok, report.text()
    assert {kind for kind, count in report.counts.items() if count} == {
        "output", "loss", "gradient", "weight", "norm", "state", "rate", "mask", "random"
    }  # fmt: skip
    assert report.settings["seed"] == "0"


@pytest.mark.platforms("torch")
def test_a_parallel_clip_by_local_norms_is_found():
    """A gradient that is wrong before it is clipped comes first, then the norm and the factor, before any weight."""
    report = verify_model(
        lambda: ModelCase(model, batches(), mean_square, clip=0.1),
        lambda _: ParallelPlan({"up": ColwiseParallel(), "down": RowwiseParallel()}, hooks=double_a_gradient),
        (3,),
        ("tp",),
        platform="torch",
        steps=1,
    )
    wrong = list(dict.fromkeys((check.kind, check.name) for check in report.checks if not check.ok))
    assert wrong[:3] == [("gradient", "down.bias"), ("norm", "gradient norm"), ("norm", "clip factor")]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("timeline", [False, True])
def test_times_are_taken_in_a_run_of_their_own(timeline):
    """A timeline has the calls of every rank in the last step, from ranks that run once more, if it is asked for."""
    calls = []

    def case():
        calls.append(1)
        return ModelCase(model, batches(), mean_square)

    report = verify_model(
        case, lambda _: {"up": ColwiseParallel(), "down": RowwiseParallel()}, (3,), ("tp",), platform="torch", steps=2,
        timeline=timeline,
    )  # fmt: skip
    assert report.ok, report.text()
    assert [[(call.operation, call.module) for call in rank] for rank in report.timeline] == (
        [[("all_reduce", "down")]] * 3 if timeline else []
    )
    assert len(calls) == 3 + 1 + 2 + 3 + 3 * timeline  # a look, the reference, its repeats, ranks


@pytest.mark.platforms("torch")
def test_a_function_parallelizes_and_may_return_the_model():
    """PLAN may return a function of model and mesh; the model that it returns is trained."""
    calls = []

    def parallelize(model, mesh):
        calls.append(mesh.names)
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    report = verify_model(
        lambda: ModelCase(model, batches(), mean_square),
        lambda _: parallelize,
        (2,),
        ("tp",),
        platform="torch",
        steps=1,
    )
    assert report.ok, report.text()
    assert calls == [("tp",)] * 2
    assert report.settings["plan"].endswith("parallelize")


def double_a_gradient(model):
    """Register a hook that doubles a gradient."""
    model.down.bias.register_hook(lambda gradient: gradient * 2)


def mean_square(output, batch):
    """Return the mean squared error."""
    return ((output - batch[-1]) ** 2).mean()


def as_it_is(_):
    """A plan whose function leaves the model as it is."""
    return lambda model, _: model


def batches():
    """Return two random batches."""
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((4, 5)), rng.standard_normal((4, 3))) for _ in range(2)]


@pytest.mark.platforms("torch")
@pytest.mark.parametrize(
    "options, text",
    [
        ({"optimizer": lambda _: 3}, ("optimizer= returned an object of type int; it is called with the list of "
         "parameters and must")),
        ({"scheduler": lambda _: 3}, "scheduler= returned an object of type int; it must return an object with step()"),
        ({"step": lambda training: training.loss()}, "step= stepped its optimizer 0 times"),
        ({"step": lambda training: training.optimizer.step()}, "step= returned None; it must return the loss"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, text):
    """Functions that return something else, and steps without an update, are one line each."""
    with pytest.raises(InputError) as caught:
        verify_model(
            lambda: ModelCase(model, batches(), mean_square, **options), as_it_is, (2,), ("tp",), platform="torch"
        )
    assert text in str(caught.value)


@pytest.mark.platforms("torch")
def test_a_plan_that_leaves_everything_whole_shows_nothing():
    """A plan that only replicates is equal, and the report says that it cannot expose mistakes in a plan."""
    report = verify_model(
        lambda: ModelCase(model, batches(), mean_square), lambda _: {"": NoParallel()}, (2,), ("tp",),
        platform="torch", steps=2,
    )  # fmt: skip
    assert report.ok, report.text()
    line = "mistakes in a plan: this one shards no parameter and needs no collective; shard a module"
    assert f"blind spot: {line}\n" in report.text()


@pytest.mark.platforms("torch")
def test_a_reference_that_is_not_deterministic_is_refused():
    """A single-device model that gives other values when it runs again is refused, instead of widening its bounds."""
    import torch
    from torch import nn

    numbers = iter(range(1000))

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.start = nn.Linear(5, 3).double(), next(numbers)

        def forward(self, x):
            return self.fc(x) + torch.tensor(float(self.start))

    with pytest.raises(InputError) as caught:
        verify_model(lambda: ModelCase(Counting, batches(), mean_square), as_it_is, (2,), ("tp",), platform="torch")
    assert str(caught.value) == (
        "SPEC: the single-device model is not deterministic on one rank: run twice, output '(model)' of step 0 "
        "differs; seed every generator that it uses (torch.manual_seed, mindspore.set_seed, random.seed, "
        "numpy.random.seed), and keep time and object ids out of the training"
    )


@pytest.mark.platforms("torch")
def test_batches_that_differ_between_ranks_are_refused():
    """Batches that differ between ranks are refused, instead of calling the plan wrong."""
    with pytest.raises(InputError) as caught:
        report_of(seeds=itertools.count())
    assert str(caught.value) == (
        "SPEC: the batch of step 1 on rank 1 is not that of rank 0; every rank calls SPEC, so draw batches from a "
        "generator with a fixed seed, such as numpy.random.default_rng(0)"
    )


@pytest.mark.parametrize("steps, wrong", [(2, None), (3, None), (4, 4)])
def test_batches_are_compared_until_they_repeat(steps, wrong):
    """Two batches and three, repeated, are equal for three steps; the cost does not grow with the number of steps."""
    first, other = ["a", "b"][:steps], ["a", "b", "a"][:steps]
    if wrong is None:
        _require_equal_batches(first, other, 1, steps)
        _require_equal_batches(["a"], ["a"], 1, 10**12)
        return
    with pytest.raises(InputError, match=f"^SPEC: the batch of step {wrong} on rank 1 is not that of rank 0; "):
        _require_equal_batches(first, other, 1, steps)


@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)])
def test_a_bias_that_centring_takes_out_again(platform_name, mesh):
    """The rounding noise of a bias gradient that cancels is compared at the size of its terms: the plan passes."""
    report = user_report(platform_name, "centred", mesh)
    assert report.ok, report.text()


def test_a_fault_beside_the_bias_is_found(platform_name):
    """The same model is wrong when a bias is added twice."""
    report = user_report(platform_name, "centred", inject="double-bias@fc2")
    assert not report.ok


@pytest.mark.parametrize(
    "name, message",
    [
        ("frozen", FROZEN),
        ("detached_loss", NO_GRADIENT),
        (
            "loss_per_column",
            "SPEC: loss(output, batch) returned a tensor [5]; it must return one number: add .mean() or .sum()",
        ),
        (
            "loss_as_number",
            "SPEC: loss(output, batch) returned an object of type float; it must return a tensor of one number",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(platform_name, name, message):
    """Frozen models and losses without a gradient are refused as input errors that name the cure."""
    with pytest.raises(InputError) as caught:
        user_report(platform_name, name)
    assert str(caught.value) == message


@pytest.mark.platforms("torch")
def test_sizes_that_a_first_forward_infers():
    """Lazy modules get their sizes from the first batch before they are parallelised; what raises then is reported."""
    import torch
    from torch import nn

    def build():
        return nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.LazyLinear(3)).to(torch.float64)

    def plan(_):
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}

    report = verify_model(
        lambda: ModelCase(build, batches(), mean_square), plan, (3,), ("tp",), platform="torch", steps=2
    )
    assert report.ok, report.text()
    assert report.counts["gradient"] == 3 * 2 * 4
    with pytest.raises(InputError) as caught:
        verify_model(
            lambda: ModelCase(build, [(np.ones((2, 5)), np.ones(3))], mean_square, inputs=2), plan, (2,), ("tp",),
            platform="torch",
        )  # fmt: skip
    assert str(caught.value).startswith("SPEC: the first forward of the model, which infers sizes, ")


@pytest.mark.platforms("torch")
def test_a_model_that_is_not_on_the_device_is_refused():
    """A run on a device whose model names another device would verify nothing there."""
    from types import SimpleNamespace

    from hyper_parallel.verify.model.program import _check_device

    parameters = {
        "a": SimpleNamespace(device=SimpleNamespace(type="npu")),
        "b": SimpleNamespace(device=SimpleNamespace(type="cpu")),
    }
    _check_device(parameters, "cpu")
    with pytest.raises(InputError, match=r"^SPEC: parameter b is on cpu, and --device is npu, so nothing would be"):
        _check_device(parameters, "npu")
