"""Targets of losses and masks of attention scores are recorded with the numbers that they are applied to."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.verify.frameworks.torch.applied import FUNCTIONS, applied

pytestmark = pytest.mark.platforms("torch")

MASK = torch.tensor([[False, True, True], [False, False, True]])


def record(name, *args, **kwargs):
    """Return what a call records: its name, numbers, and targets or mask."""
    seen = []
    applied(name, lambda *each: seen.append(each), args, kwargs)
    return seen


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_targets_have_the_logits_of_their_rows(name):
    """Classes go last and at most sixteen of them identify a row, wherever the function has them."""
    logits, target = torch.randn(4, 20, 3), torch.randint(20, (4, 3))
    ((function, numbers, given),) = record(name, logits, target=target)
    assert function == name
    torch.testing.assert_close(numbers, logits.movedim(1, -1).flatten(0, 1)[:, :16], rtol=0, atol=0)
    assert torch.equal(given, target.flatten())
    ((_, numbers, given),) = record(name, logits[:, :, 0], target[:, 0], reduction="sum")
    assert (numbers.shape, given.shape) == ((4, 16), (4,))


def test_a_mask_has_the_scores_that_it_hides():
    """A mask that fills with a large negative number hides scores; one head of several is recorded."""
    scores = torch.randn(5, 2, 2, 3)
    for name, value in (("masked_fill", float("-inf")), ("masked_fill_", torch.tensor(-1e9)), ("masked_fill", -10000)):
        ((function, numbers, given),) = record(name, scores, MASK, value)
        assert function == "masked_fill"
        assert torch.equal(numbers, scores[:, 0])
        assert torch.equal(given, MASK.expand(5, 2, 3))
    ((_, numbers, _),) = record("masked_fill", scores[0, 0], mask=MASK, value=-1e30)
    assert torch.equal(numbers, scores[0, 0])


def test_fused_attention_has_the_scores_of_its_queries_and_keys():
    """The scores of a fused attention are computed again, and a causal mask is written out; half precision is exact."""
    query, key = torch.randn(5, 2, 2, 4).bfloat16(), torch.randn(5, 2, 3, 4).bfloat16()
    ((_, numbers, given),) = record("scaled_dot_product_attention", query, key, key, ~MASK)
    torch.testing.assert_close(numbers, query[:, 0].float() @ key[:, 0].float().mT)
    assert torch.equal(given, MASK.expand(5, 2, 3))
    ((_, numbers, given),) = record("scaled_dot_product_attention", query[0], key[0], key[0], is_causal=True)
    assert (numbers.shape, given.tolist()) == ((2, 2, 3), [MASK.tolist()] * 2)


@pytest.mark.parametrize(
    "name, args",
    [
        ("cross_entropy", (torch.randn(4, 3), torch.rand(4, 3))),  # probabilities
        ("cross_entropy", (torch.randn(3), torch.tensor(1))),  # one row
        ("cross_entropy", (torch.randn(4, 3, requires_grad=True).to("meta"), torch.randint(3, (4,)))),
        ("masked_fill", (torch.randn(2, 3), MASK, 0.0)),  # hides no score
        ("masked_fill", (torch.randn(3), MASK[0], -1e9)),
        ("masked_fill", (torch.zeros(1, 1).expand(1025, 1024), torch.zeros(1, 1, dtype=torch.bool), -1e9)),  # large
        ("scaled_dot_product_attention", (torch.randn(2, 2, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4))),
        ("scaled_dot_product_attention", (*[torch.randn(2, 2, 4)] * 3, torch.randn(2, 2))),  # adds to the scores
        ("scaled_dot_product_attention", (*[torch.zeros(1, 1).expand(1025, 1)] * 3, None, 0.0, True)),  # large
    ],
)
def test_other_calls_are_not_recorded(name, args):
    """Without integer targets, a hiding mask, or plain tensors of at most a million elements, nothing is recorded."""
    assert record(name, *args) == []


def test_every_function_is_known():
    """Each function exists, and is called by names that the recorder distinguishes."""
    assert all(callable(getattr(owner, name)) for owner, name in FUNCTIONS)
    assert (F, "cross_entropy") in FUNCTIONS
