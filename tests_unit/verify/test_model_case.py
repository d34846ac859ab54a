"""The values that a SPEC and a PLAN function may return."""

import pytest

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.verify.model_case import InputError, ModelCase, ParallelPlan, as_case, as_plan


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
    for value in ((model, [(1, 2)], loss), {"model": model, "batches": [(1, 2)], "loss": loss}):
        case = as_case(value)
        built = case.build()
        assert type(built) is Model
        assert built is not model
    built = as_case({"build": Model, "batches": [(1, 2)], "loss": loss})
    assert as_case(built) is built
    assert type(built.build()) is Model
    assert as_case((Model, [(1, 2)], loss)).build is Model


def test_inputs_are_all_but_the_last_by_default():
    """The model gets all arrays of a batch except the last, or as many as the case sets; batches repeat."""
    case = ModelCase(Model, [(1, 2, 3), (4, 5, 6)], loss)
    assert case.model_inputs(case.batch(3)) == (4, 5)
    assert ModelCase(Model, [(1,)], loss, inputs=1).model_inputs((1,)) == (1,)


NO_CASE = (
    "SPEC returned int; it must return a hyper_parallel.verify.ModelCase, a mapping of its fields, or "
    "(model, batches, loss)"
)
NO_FIELDS = (
    "SPEC returned a mapping with keys lose, model; it needs build (or model), batches, loss, "
    "and may have inputs, optimizer, learning_rate"
)


@pytest.mark.parametrize(
    "value, text",
    [
        (7, NO_CASE),
        ({"model": Model, "lose": 1}, NO_FIELDS),
        ((7, [(1,)], loss), "SPEC: model is int; give a module or a function that builds one"),
        ((Model, [], loss), "ModelCase: batches is empty; give at least one tuple of arrays"),
        ({"model": Model, "batches": [(1,)], "loss": loss, "optimizer": "lion"},
            "ModelCase: optimizer 'lion' is unknown; known: sgd, adamw"),
    ],
)  # fmt: skip
def test_wrong_cases(value, text):
    """A value that is no case is refused with its type and the accepted ones."""
    with pytest.raises(InputError) as caught:
        as_case(value)
    assert str(caught.value) == text


def test_plans():
    """A bare mapping splits the batch over dp where there are several axes, and keeps it plain on one."""
    styles = {"fc": object()}
    assert as_plan(styles, ("tp",)) == ParallelPlan(styles, None)
    assert as_plan(styles, ("dp", "tp")) == ParallelPlan(styles, {"dp": Shard(0)})
    assert as_plan(styles, ("pp", "tp")) == ParallelPlan(styles, {})
    own = ParallelPlan(styles, {"tp": Shard(1)})
    assert as_plan(own, ("tp",)) is own
    with pytest.raises(InputError) as caught:
        as_plan([1], ("tp",))
    assert str(caught.value) == (
        "PLAN returned list; it must return a mapping of module patterns to styles, "
        "or a hyper_parallel.verify.ParallelPlan"
    )
