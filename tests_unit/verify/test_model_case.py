"""The values that a SPEC and a PLAN function may return."""

import pytest

from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel
from hyper_parallel.platform.select import use_platform
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan, array_of_numbers, as_case, as_plan
from hyper_parallel.verify.scenarios import scenario_named


class Model:
    """A class with the methods of a module."""

    def forward(self):
        """Return nothing."""


def loss(output, batch):
    """Return nothing."""
    del batch
    return output


def test_three_spellings_of_a_case():
    """A ModelCase, a triple and a mapping mean the same, and the model is copied before training."""
    model = Model()
    fields = {"batches": [(1, 2)], "loss": loss}
    for value in (ModelCase(model, **fields), (model, [(1, 2)], loss), {"model": model, **fields}):
        case = as_case(value)
        built = case.build()
        assert type(built) is Model
        assert built is not model
    built = as_case({"build": Model, **fields})
    assert as_case(built) is built
    assert type(built.build()) is Model
    assert as_case((Model, [(1, 2)], loss)).build is Model


def test_inputs_are_all_but_the_last_by_default():
    """The model gets all arrays of a batch except the last, or as many as the case sets; batches repeat."""
    case = ModelCase(Model, [(1, 2, 3), (4, 5, 6)], loss)
    assert case.micro_batches(3) == [(4, 5, 6)]
    assert case.model_inputs((4, 5, 6)) == (4, 5)
    accumulating = ModelCase(Model, [(1, 2), (3, 4), (5, 6)], loss, accumulate=2)
    assert [accumulating.micro_batches(step) for step in range(2)] == [[(1, 2), (3, 4)], [(5, 6), (1, 2)]]
    assert ModelCase(Model, [(1,)], loss, inputs=1).model_inputs((1,)) == (1,)


NO_CASE = (
    "SPEC returned an object of type int; it must return three items (model, batches, loss), a mapping with these "
    "keys, or a hyper_parallel.verify.ModelCase"
)
NO_FIELDS = (
    "SPEC returned a mapping with keys lose, model; it must have the keys build (or model), batches and "
    "loss, and may have inputs, optimizer, learning_rate, scheduler, step, accumulate, clip, hooks, context"
)


@pytest.mark.parametrize(
    "value, text",
    [
        (7, NO_CASE),
        ({"model": Model, "lose": 1}, NO_FIELDS),
        ((7, [(1,)], loss), ("ModelCase: build is an object of type int; it must be a model, or a function that "
         "builds one")),
        ((Model, [], loss), "ModelCase: batches is empty; give at least one tuple of arrays"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "optimizer": "lion"},
            "ModelCase: optimizer 'lion' is unknown; known optimizers: sgd, adamw"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "optimizer": object()},
            ("ModelCase: optimizer is an object of type object; it must be 'sgd' or 'adamw', or a function of the list "
             "of parameters: each of the two models needs an optimizer of its own parameters")),
        ({"model": Model, "batches": [(1,)], "loss": loss, "scheduler": 3},
            "ModelCase: scheduler is an object of type int; it must be a function"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "accumulate": 0},
            "ModelCase: accumulate is 0; it must be the number of batches per step, at least 1"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "clip": -1.0},
            "ModelCase: clip is -1.0; it must be the largest allowed norm of the gradients, a number above 0"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "clip": 1.0, "step": loss},
            "ModelCase: step= does its own clipping; leave out clip=, and call training.clip(max_norm) in step"),
    ],
)  # fmt: skip
def test_wrong_cases(value, text):
    """A value that is not a case is refused with its type and the accepted ones."""
    with pytest.raises(InputError) as caught:
        as_case(value)
    assert str(caught.value) == text


def test_plans():
    """A bare mapping splits the batch over dp where there are several axes, and keeps it plain on one."""
    styles = {"fc": ColwiseParallel()}
    assert as_plan(styles, ("tp",)) == ParallelPlan(styles, None)
    assert as_plan(styles, ("dp", "tp")) == ParallelPlan(styles, {"dp": Shard(0)})
    assert as_plan(styles, ("pp", "tp")) == ParallelPlan(styles, {})
    own = ParallelPlan(styles, {"tp": Shard(1)})
    assert as_plan(own, ("tp",)) is own
    with pytest.raises(InputError) as caught:
        as_plan([1], ("tp",))
    assert str(caught.value) == (
        "PLAN returned an object of type list; it must return a mapping of module patterns to styles, a "
        "function of model and mesh, "
        "or a hyper_parallel.verify.ParallelPlan"
    )


@pytest.mark.platforms("torch")
def test_a_completed_plan_trains_like_one_device():
    """The layer that the plan leaves plain gets a style under which all values are equal; options are kept."""
    scenario = scenario_named("3-tutorial")
    with use_platform("torch"):
        plan = ParallelPlan({"up": "colwise_rep"}, optimizer="sgd").complete(scenario.case().build())
    assert (list(plan.styles), plan.optimizer) == (["up", "down"], "sgd")
    report = verify_model(scenario.case, lambda _: plan, (3,), ("tp",), platform="torch", steps=1)
    assert report.ok, report.text()
    assert len(report.parameter_layouts) == 4  # all of them are DTensors


@pytest.mark.platforms("torch")
def test_batches_of_dtensors_have_outputs_of_dtensors():
    """Where batches are DTensors, the output of the completed model is one; of a function nothing is known."""
    import torch

    def head(batch):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        styles = {"0": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
        return ParallelPlan(styles, batch).complete(model).styles["1"]

    assert (head(None).use_local_output, head({}).use_local_output) == (True, False)
    with pytest.raises(InputError) as caught:
        ParallelPlan(loss).complete(None)
    assert str(caught.value) == (
        "ParallelPlan.complete: styles is a function, so nothing is known about what it covers; give styles by path"
    )


def test_a_function_is_a_plan():
    """A function of model and mesh is a plan by itself; its options replace those of the case."""
    assert as_plan(loss, ("dp", "tp")) == ParallelPlan(loss, None)
    case = ModelCase(Model, [(1,)], loss, hooks=loss)
    assert ParallelPlan(loss, optimizer="adamw").applied_to(case) == ModelCase(
        Model, [(1,)], loss, optimizer="adamw", hooks=loss
    )


@pytest.mark.parametrize(
    "options, text",
    [
        ({"styles": [1]}, ("ParallelPlan: styles is an object of type list; it must be a mapping of module patterns to "
            "styles, or a function of model and mesh")),
        ({"styles": {}, "optimizer": "lion"}, ("ParallelPlan: optimizer 'lion' is unknown; known optimizers: "
         "sgd, adamw")),
        ({"styles": {}, "step": 1}, "ParallelPlan: step is an object of type int; it must be a function"),
    ],
)  # fmt: skip
def test_wrong_plans(options, text):
    """An option that is not a function is refused by name."""
    with pytest.raises(InputError) as caught:
        ParallelPlan(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize("item, kind", [([[1.0], [1.0, 2.0]], "list"), ("text", "str"), ([None], "list")])
def test_an_array_of_a_batch_holds_numbers(item, kind):
    """Rows of different lengths, text and objects are no array of numbers."""
    with pytest.raises(InputError) as raised:
        array_of_numbers(item, 1)
    assert str(raised.value) == f"SPEC: array 1 of a batch is an object of type {kind}; it must be an array of numbers"
