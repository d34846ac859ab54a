"""Reports name values in the words of the field, and many values in one line."""

import pytest

from hyper_parallel.verify.engine.wording import count_words, ranks_words, summary, value_words, when_words
from hyper_parallel.verify.frameworks.contract.records import KINDS


@pytest.mark.parametrize(
    "kind, name, words",
    [
        ("loss", "loss", "the loss"),
        ("norm", "gradient norm", "the gradient norm"),
        ("norm", "clip factor", "the clip factor"),
        ("state", "layers.1.w:exp_avg", "optimizer state exp_avg of layers.1.w"),
        ("gradient", "head.weight", "the gradient of head.weight"),
        ("weight", "head.weight", "parameter head.weight"),
        ("buffer", "norm.mean", "buffer norm.mean"),
        ("value", "total loss", "recorded value total loss"),
        ("mask", "dropout", "the dropout mask of dropout"),
        ("rate", "optimizer 0, group 1", "the learning rate of optimizer 0, group 1"),
        ("output", "router[1]", "the output of router[1]"),
        ("output", "", "the model's output"),
        ("output", "(model)[0] (no_grad)", "the model's output[0] (no_grad)"),
    ],
)
def test_a_value_is_named_in_words(kind, name, words):
    """Every kind of value has its own words; none is called 'loss of loss'."""
    assert value_words(kind, name) == words
    assert summary([(kind, name)]).startswith("optimizer state of " if kind == "state" else words)


def test_counts_of_every_kind():
    """One value is singular, several are plural, for every kind that is recorded."""
    assert count_words("loss", 1) == "1 loss"
    assert count_words("loss", 3) == "3 losses"
    assert count_words("rate", 2) == "2 learning rates"
    assert all(
        count_words(kind, 1) != f"1 {kind}" or kind in {"loss", "gradient", "output", "buffer"} for kind in KINDS
    )


def test_when_a_value_was_recorded():
    """What the optimizer's step changes is recorded after it; a value of step -1 before training."""
    assert when_words("weight", -1) == "before training"
    assert when_words("gradient", 0) == "in step 1"
    assert when_words("state", 1) == "after step 2"
    assert when_words("loss", 0, 2) == "in step 1 (occurrence 3)"


def test_ranks_are_written_as_ranges():
    """Four and more ranks in a row are a range; fewer are listed."""
    assert ranks_words([2]) == "rank 2"
    assert ranks_words([2, 0, 1]) == "ranks 0, 1, 2"
    assert ranks_words([0, 1, 2, 3, 5, 7, 8, 9, 10]) == "ranks 0-3, 5, 7-10"


def test_many_values_are_one_line():
    """Layers are one pattern, entries of the optimizer's state are one parameter, and a fifth name is counted."""
    values = [("gradient", f"layers.{n}.{name}") for n in range(30) for name in ("w", "b")]
    values += [("state", f"layers.{n}.w:{entry}") for n in range(30) for entry in ("exp_avg", "exp_avg_sq")]
    values += [("weight", name) for name in "abcdef"] + [
        ("loss", "loss"),
        ("norm", "gradient norm"),
        ("norm", "clip factor"),
    ]
    assert summary(values) == (
        "gradients of layers.*.w, layers.*.b; optimizer state of layers.*.w; parameters a, b, c, d and 2 more; "
        "the loss; the gradient norm, clip factor"
    )
