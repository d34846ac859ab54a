"""Targets and masks that differ where the numbers are the reference's are the cause of a wrong loss or output."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

ROWS, CLASSES = 8, 5
PARTS = np.s_[:4], np.s_[4:]
RNG = np.random.default_rng(3)
LOGITS, TARGETS = RNG.standard_normal((ROWS, CLASSES)), np.array([3, 1, 4, 2, 0, 4, 3, 1])
SCORES = RNG.standard_normal((2, 6, 6))
HIDDEN = np.broadcast_to(~np.tri(6, dtype=bool), (2, 6, 6))


def record(kind, name, value, module="", call=0):
    """Return a record of the first step."""
    return Record(kind, name, module, 0, call, np.asarray(value))


def first(whole, ranks):
    """Return the first difference between records of the reference and of ranks."""
    reference = Run([RankRecords(0, whole)])
    parallel = Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])
    return compare_runs(reference, [reference], parallel, mesh={"dp": len(ranks)}).first


def lost(logits, targets, loss):
    """Return the records of a loss."""
    name = "(model) cross_entropy"
    return [
        record("output", "", logits),
        record("operand", name, logits),
        record("applied", name, targets),
        record("loss", "loss", loss),
    ]


@pytest.mark.parametrize(
    "targets, evidence",
    [
        ([1, 4, 2, -1], "on rank 0, 4 of 4 differ, 1, 4, 2, -1 for 3, 1, 4, 2"),
        ([3, 1, 4, -1], "on rank 0, 1 of 4 differ, -1 for 2"),
        ([3, 1, -1, -1], "on rank 0, 2 of 4 differ, -1, -1 for 4, 2: -1 is in rows 2, 3"),
    ],
)
def test_targets_of_right_logits(targets, evidence):
    """Logits that are the reference's with other targets explain a loss, whatever its number would fit too."""
    ranks = [lost(LOGITS[PARTS[0]], np.array(targets), 1.0), lost(LOGITS[PARTS[1]], TARGETS[PARTS[1]], 1.0)]
    cause = first(lost(LOGITS, TARGETS, 2.0), ranks).cause
    assert cause.kind == "targets"
    assert cause.evidence == f"rank 0 has the single device's logits with other targets: {evidence}"


@pytest.mark.parametrize("by, words", [(-1, "next"), (1, "previous")])
def test_shifted_targets(by, words):
    """Targets that are those of a neighbouring row on every rank are shifted once too often, or not at all."""
    own = np.roll(TARGETS, by)
    ranks = [lost(LOGITS[part], own[part], 1.0 + number) for number, part in enumerate(PARTS)]
    cause = first(lost(LOGITS, TARGETS, 2.7), ranks).cause
    assert cause.kind == "targets"
    assert cause.evidence.startswith("ranks 0, 1 have the single device's logits with other targets: on rank 0, 4 of 4")
    assert cause.evidence.endswith(f": they are those of the {words} row")


def test_right_targets_explain_nothing():
    """Equal targets, and targets of numbers that are not in the reference, are no cause."""
    ranks = [lost(LOGITS[part], TARGETS[part], 1.2345 + number) for number, part in enumerate(PARTS)]
    assert first(lost(LOGITS, TARGETS, 2.7), ranks).cause.kind == "loss"
    for each in ranks:
        each[1:3] = [
            record("operand", "(model) cross_entropy", LOGITS[:4] + 1),
            record("applied", each[2].name, [7] * 4),
        ]
    assert first(lost(LOGITS, TARGETS, 2.7), ranks).cause.kind == "loss"


@pytest.mark.parametrize("pad", [0, -100])
def test_losses_over_unequal_numbers_of_targets(pad):
    """Losses that are the reference's if weighted with the ranks' numbers of targets are divided by each rank's own.

    The number that a loss ignores may be any: it is the most frequent one of a rank, or negative.
    """
    logits, targets, losses = RNG.standard_normal((200, CLASSES)), RNG.integers(1, 5, 200), RNG.random(2) + 1
    parts, counts = (np.s_[:100], np.s_[100:]), (97, 31)
    for part, count in zip(parts, counts, strict=True):
        targets[part][count:] = pad
    ranks = [lost(logits[part], targets[part], loss) for part, loss in zip(parts, losses, strict=True)]
    found = first(lost(logits, targets, np.average(losses, weights=counts)), ranks)
    assert (found.kind, found.cause.kind, found.cause.axis) == ("loss", "scaled-by-count", "dp")
    assert found.cause.evidence == (
        f"the mean of the ranks' losses weighted with their numbers of targets other than {pad} in the step, 97 : 31, "
        "equals the reference: each rank divides by its own number"
    )


def attended(scores, hidden, output, module="attention"):
    """Return the records of an attention."""
    records = []
    for call, (some, mask) in enumerate(zip(scores, hidden, strict=True)):
        records += [record("operand", f"{module} masked_fill", some, module, call)]
        records += [record("applied", f"{module} masked_fill", mask, module, call)]
    return [*records, record("output", "attention.proj", output, "attention.proj")]


def test_a_mask_of_right_scores():
    """In a ring, a rank sees blocks of the reference's scores; a block with the mask of another is named."""
    output = RNG.standard_normal((6, 4))
    rows, wrong = (np.s_[:, :3], np.s_[:, 3:]), np.broadcast_to(np.array([True]), (2, 3, 3))
    ranks = []
    for rank, part in enumerate(rows):
        blocks = [SCORES[part][..., 3 * block : 3 * block + 3] for block in (0, 1)]
        masks = [HIDDEN[part][..., 3 * block : 3 * block + 3] for block in (0, 1)]
        own = output[3 * rank : 3 * rank + 3]
        ranks.append(attended(blocks, [wrong, masks[1]] if rank else masks, own * (1 + rank) + rank))
    found = first(attended([SCORES], [HIDDEN], output), ranks)
    assert (found.ranks, found.cause.kind) == ((1,), "hidden")
    assert found.cause.evidence == (
        "in attention masked_fill on rank 1 (call 1 of the step), the scores are the single device's (rows 3:6 of 6 in "
        "dim 1, rows 0:3 of 6 in dim 2), but 18 of 18 elements of the mask differ: 18 are hidden that the single "
        "device keeps"
    )


def test_masks_of_other_modules_explain_nothing():
    """A mask in another module is no cause of an output, and neither is an equal one."""
    output = RNG.standard_normal((6, 4))
    whole = attended([SCORES], [HIDDEN], output, "other")
    ranks = [attended([SCORES], [~HIDDEN], output**2, "other") for _ in range(2)]
    assert first(whole, ranks).cause.kind != "hidden"
    ranks = [attended([SCORES], [HIDDEN], output**2) for _ in range(2)]
    assert first(attended([SCORES], [HIDDEN], output), ranks).cause.kind != "hidden"
