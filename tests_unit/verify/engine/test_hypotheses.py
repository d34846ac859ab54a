"""Classes of errors that the numbers of hand-made records show."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.engine.hypotheses import _tells_elements_apart
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Region, Run

RNG = np.random.default_rng(21)
MESH = {"dp": 2, "tp": 2}


def record(kind, name, step, value, call=0):
    """Return a record of module ``name`` without its last part."""
    return Record(kind, name, name.rpartition(".")[0] if kind != "output" else name, step, call, np.asarray(value))


def first(whole, ranks, mesh=None):
    """Return the first difference between records of the reference and of ranks."""
    reference = Run([RankRecords(0, whole)])
    parallel = Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])
    verdict = compare_runs(reference, [reference], parallel, mesh=mesh or {"dp": len(ranks)})
    assert verdict.first is not None
    return verdict.first


# -- losses ------------------------------------------------------------------------------------------------------------


def losses(values, expected, mesh=None, step=0):
    """Return the cause of ranks' losses."""
    return first(
        [record("loss", "loss", step, expected)], [[record("loss", "loss", step, v)] for v in values], mesh
    ).cause


def test_losses_by_counts():
    """Losses that ranks divide by their own counts are reported with the counts, along an axis too."""
    values = RNG.random(3)
    cause = losses(values, (values * [5, 7, 2]).sum() / 14)
    assert (cause.kind, cause.axis) == ("scaled-by-count", "dp")
    assert cause.evidence.startswith("the mean over dp weighted with 5 : 7 : 2 equals the reference within ")
    table = RNG.random((2, 2))
    cause = losses(table.reshape(-1), (table.mean(0) * [3, 4]).sum() / 7, MESH)
    assert (cause.kind, cause.axis) == ("scaled-by-count", "tp")


def test_losses_by_sizes_and_ratios():
    """A loss that is off by a size of a group or by a ratio of counts is reported; any other is not explained."""
    assert (losses([2.5 / 3] * 3, 2.5).kind, losses([7.5] * 3, 2.5).axis) == ("scaled-by-size", "dp")
    cause = losses([0.3, 0.4], 0.35 * 9 / 11)
    assert (cause.kind, cause.evidence) == (
        "scaled-by-count",
        "the mean over dp of the ranks' values is the reference's times 11/9, a ratio of counts",
    )
    assert losses([0.3, 0.4], np.pi).kind == "unexplained"
    assert losses([0.3, 0.3], np.pi).kind == "unexplained"


@pytest.mark.parametrize(
    "factors, kind", [((1.0, 1.5), "gradient"), ((4.0, 1.5), "loss"), ((1.5, 1.5), "loss"), ((1.0, 4.0), "loss")]
)
def test_losses_that_a_schedule_scales_later(factors, kind):
    """Losses of the last stage that are 4 times the single device's: named unless gradients show that they are right.

    They are right where a gradient is, and no gradient is off by the same factor.
    """
    losses, parts = RNG.random(3), RNG.standard_normal((2, 3, 2))

    def records(stages, scale, factors):
        found = []
        for stage in stages:
            found.append(record("weight", f"{stage}.w", -1, parts[stage]))
            found.append(record("gradient", f"{stage}.w", 0, parts[stage] ** 2 * factors[stage]))
        return [
            *found,
            *(record("loss", "loss", 0, loss * scale, call) for call, loss in enumerate(losses) if 1 in stages),
        ]

    found = first(records((0, 1), 1.0, (1.0, 1.0)), [records((0,), 4.0, factors), records((1,), 4.0, factors)])
    assert found.kind == kind


def test_losses_by_powers_of_two():
    """Losses that are the reference's after other powers of two on the ranks have other scales; thirds are none."""
    values = np.random.default_rng(4).random(3)
    cause = losses(values, (values * [0.5, 0.5, 1.0]).mean())
    assert (cause.kind, cause.axis) == ("scaled", "dp")
    assert cause.evidence == (
        "the mean over dp of the ranks' losses times 0.5, 0.5, 1 is the reference's: the ranks scale their losses by "
        "different powers of two"
    )
    assert losses(values, (values * [1 / 3, 1.0, 1.7]).mean()).kind == "unexplained"


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_records(power):
    """Return the reference's records, each rank's, and the norms of the parts."""
    sharded, single = RNG.standard_normal((6, 2)), 3 * RNG.standard_normal(4)
    parts = [sharded[:4], sharded[4:]]

    def size(*arrays):
        return np.linalg.norm(np.concatenate([array.reshape(-1) for array in arrays]), power)

    def records(part):
        values = [record("weight", "a.w", -1, part), record("weight", "b.w", -1, single)]
        return [*values, record("gradient", "a.w", 0, part), record("gradient", "b.w", 0, single)]

    return records, sharded, single, parts, size


@pytest.mark.parametrize(
    "power, made, kind, words",
    [
        (2, lambda s, p, o: [s(p[0], o), s(p[1], o)], "norm-local", "the norm of each rank's own part"),
        (2, lambda s, p, o: [s(p[0], o)] * 2, "norm-local", "the norm of rank 0's part"),
        (2, lambda s, p, o: [s(*p, o, o)] * 2, "norm-counted-twice", "the norm over dp of every rank's part"),
        (2, lambda s, p, o: [s(*p, o, o) / 2**0.5] * 2, "norm-local", "the norm of the mean over dp of the ranks'"),
        (2, lambda s, p, o: [s(p[0], o) + s(p[1], o)] * 2, "norm-counted-twice", "the sum over dp of the ranks' norms"),
        (2, lambda s, p, o: [s(*p, *p, o)] * 2, "norm-counted-twice", "the norm that counts sharded parameters 2"),
        (2, lambda s, p, _: [s(*p)] * 2, "norm-local", "the norm that counts sharded parameters 1 times, replicated"),
        (np.inf, lambda s, p, o: [s(p[0], o) + s(p[1], o)] * 2, "norm-counted-twice", "the sum over dp of the ranks'"),
        (1, lambda s, p, o: [s(p[0], o), s(p[1], o)], "norm-local", "the norm of each rank's own part"),
        (2, lambda s, p, o: [1.2345 * s(*p, o)] * 2, "unexplained", "no hypothesis fits the numbers"),
    ],
)  # fmt: skip
def test_norms(power, made, kind, words):
    """What a norm counts is found, for the 2-norm, the inf-norm and the 1-norm."""
    records, sharded, single, parts, size = norm_records(power)
    right = record("norm", "gradient norm", 0, size(sharded, single))
    norms = made(size, parts, single)
    ranks = [
        [*records(part), record("norm", "gradient norm", 0, norm)] for part, norm in zip(parts, norms, strict=True)
    ]
    cause = first([*records(sharded), right], ranks).cause
    assert cause.kind == kind
    assert cause.evidence.startswith(words), cause.evidence


@pytest.mark.parametrize(
    "group_of, words",
    [
        (lambda rank: [rank], "the norm of each rank's own part is "),
        (lambda rank: [rank - rank % 2, rank - rank % 2 + 1], "the norm over tp alone is "),
    ],
)
def test_norms_over_a_group_that_has_not_all_pieces(group_of, words):
    """A norm over the wrong group, where ranks train pieces of replicated weights and some have none of a weight.

    Gradients are recorded before they are clipped and when the optimizer gets them; of a weight of which it has no
    element, a rank records the latter alone.
    """
    gradients = {name: RNG.standard_normal(size) for name, size in (("a.w", 6), ("b.w", 5), ("c.w", 4))}
    weights = {name: RNG.standard_normal(value.size) for name, value in gradients.items()}
    bounds = [0, 4, 8, 12, 15]  # of the ranks' pieces in all weights, one after the other
    pieces = [slice(*pair) for pair in pairwise(bounds)]
    flat, total = np.concatenate([*gradients.values()]), np.linalg.norm(np.concatenate([*gradients.values()]))
    own = [float(np.linalg.norm(np.concatenate([flat[pieces[each]] for each in group_of(rank)]))) for rank in range(4)]

    def records(norm, clipped, piece):
        found = [record("weight", name, -1, value) for name, value in weights.items()]
        begin = 0
        for name, value in gradients.items():
            place = slice(max(piece.start - begin, 0), max(min(piece.stop - begin, value.size), 0))
            scaled = (value, clipped[begin : begin + value.size])
            for call, part in enumerate(scaled if value[place].size else scaled[1:]):
                region = Region((value.size,), (place.start if value[place].size else 0,))
                made = record("gradient", name, 0, part[place], call)
                found.append(replace(made, region=None if piece == slice(0, flat.size) else region))
            begin += value.size
        found.append(record("norm", "gradient norm", 0, norm))
        updated = np.concatenate([*weights.values()]) - clipped
        starts = np.cumsum([value.size for value in weights.values()])[:-1]
        return [
            *found,
            *(record("weight", *each) for each in zip(weights, [0] * 3, np.split(updated, starts), strict=True)),
        ]

    wrong = np.concatenate([flat[piece] / norm for piece, norm in zip(pieces, own, strict=True)])
    ranks = [records(norm, wrong, piece) for piece, norm in zip(pieces, own, strict=True)]
    difference = first(records(total, flat / total, slice(0, flat.size)), ranks, MESH)
    assert (difference.kind, difference.name, difference.cause.kind) == ("norm", "gradient norm", "norm-local")
    assert difference.cause.evidence.startswith(words), difference.cause.evidence


def test_a_norm_that_no_rank_has():
    """A norm that only the reference computes is listed: the ranks may clip in another way."""
    records, sharded, single, parts, size = norm_records(2)
    right = record("norm", "gradient norm", 0, size(sharded, single))
    reference = Run([RankRecords(0, [*records(sharded), right])])
    parallel = Run([RankRecords(rank, records(part)) for rank, part in enumerate(parts)])
    verdict = compare_runs(reference, [reference], parallel, mesh={"dp": 2})
    assert verdict.first is None
    assert "the gradient norm: missing on all ranks in some step" in verdict.skipped


# -- random masks ------------------------------------------------------------------------------------------------------


def masked(kind, masks, shown):
    """Return the first difference where ranks of two halves of a batch have ``masks``; ``shown`` is the reference's."""
    base = RNG.standard_normal((6, 5))
    before = RNG.standard_normal((6, 5))
    halves = [slice(0, 4), slice(4, 6)]

    def values(mask, rows):
        array = mask if kind == "mask" else base[rows] * mask
        return [record("output", "a", 0, before[rows]), record(kind, "drop", 0, array)]

    return first(values(shown, slice(None)), [values(mask, rows) for mask, rows in zip(masks, halves, strict=True)])


@pytest.mark.parametrize("kind", ["mask", "output"])
def test_shared_masks(kind):
    """Ranks of different rows with the same mask share a random stream."""
    shown = RNG.random((6, 5)) > 0.4
    difference = masked(kind, [np.concatenate([shown[:2], shown[2:4]]), shown[:2]], shown)
    assert (difference.kind, difference.cause.kind, difference.cause.axis) == (kind, "random-shared", "dp")
    assert "hold different parts (rows 0:4 of 6 in dim 0; rows 4:6 of 6 in dim 0) but draw equal masks" in (
        difference.cause.evidence
    )


def test_masks_of_replicas_and_other_streams():
    """Replicas with different masks, and masks that are just others than the single device's, differ."""
    shown = RNG.random((6, 5)) > 0.4
    other = RNG.random((6, 5)) > 0.4
    cause = first(
        [record("mask", "d", 0, shown)], [[record("mask", "d", 0, shown)], [record("mask", "d", 0, other)]]
    ).cause
    assert (cause.kind, cause.evidence) == (
        "random-differs",
        "ranks 0 and 1 hold the same part (replica) but draw different masks",
    )
    cause = masked("mask", [other[:4], other[4:]], shown).cause
    assert (cause.kind, cause.axis) == ("random-differs", "")


def test_dropout_where_the_reference_has_none():
    """Zeros among scaled values are dropout, though no mask was recorded; whole rows of zeros are not."""
    array = RNG.standard_normal((6, 5))
    kept = RNG.random((6, 5)) > 0.4
    rank = [record("output", "a", 0, array * kept / 0.6)]
    cause = first([record("output", "a", 0, array)], [rank, rank]).cause
    assert (cause.kind, cause.evidence) == (
        "random-differs",
        "some elements are zero and the others scaled, as by dropout, but the single device drops none",
    )
    rows = array * (np.arange(6) != 2)[:, None]
    rank = [record("output", "a", 0, rows)]
    assert first([record("output", "a", 0, array)], [rank, rank]).cause.kind == "components"


# -- gradients, outputs, weights ---------------------------------------------------------------------------------------


def gradient(expected, actual, mesh=None, name="a.weight"):
    """Return the cause of replicated gradients, whose parameter every rank has."""
    weight = record("weight", name, -1, np.arange(np.size(expected), dtype=float).reshape(np.shape(expected)))
    after = record("weight", name, 0, np.arange(np.size(expected), dtype=float).reshape(np.shape(expected)) + 1)
    wrong = record("weight", name, 0, np.asarray(after.value) + 1)
    ranks = [
        [
            weight,
            *([] if value is None else [record("gradient", name, 0, value)]),
            after if value is expected else wrong,
        ]
        for value in actual
    ]
    return first([weight, record("gradient", name, 0, expected), after], ranks, mesh).cause


def test_weighted_shares():
    """Replicas whose weighted sum is the reference's lack a reduction, whatever the weights."""
    shares = RNG.standard_normal((3, 4, 5))
    cause = gradient((shares * np.array([0.5, 0.3, 0.2])[:, None, None]).sum(0), shares)
    assert (cause.kind, cause.axis) == ("missing-reduction", "dp")
    assert cause.evidence.startswith(
        "the ranks' gradients over dp, weighted with 0.5, 0.3, 0.2, add up to the reference"
    )


def test_shares_of_unknown_weights():
    """Replicas that all differ and are all wrong have their own shares; where one is right, replicas differ."""
    expected, shares = RNG.standard_normal((4, 5)), RNG.standard_normal((3, 4, 5))
    assert gradient(expected, shares).kind == "missing-reduction"
    assert gradient(expected, [expected, expected + 1, expected]).kind == "replicas-differ"


@pytest.mark.parametrize("shares, words", [([0.5, 0.5], "sum"), ([0.9, 1.1], "mean")])
def test_shares_that_hide_in_wide_bounds(shares, words):
    """Shares that differ by less than elements may are a missing reduction if they are it as a whole."""
    expected = 1 + RNG.random((4, 5))
    apart = 0.02 * np.array([1, -1])[:, None, None] * RNG.standard_normal((4, 5))
    weight = record("weight", "a.w", -1, np.arange(20.0).reshape(4, 5))
    after = record("weight", "a.w", 0, np.arange(20.0).reshape(4, 5))

    def run(*gradients):
        off = [0] if len(gradients) == 1 else [1] * len(gradients)
        return Run([
            RankRecords(rank, [weight, record("gradient", "a.w", 0, g), record("weight", "a.w", 0, after.value + o)])
            for rank, (g, o) in enumerate(zip(gradients, off, strict=True))
        ])  # fmt: skip

    moved = [run(expected * (1 + 0.006 * sign)) for sign in (1, -1)]
    parts = [share * expected + part for share, part in zip(shares, apart, strict=True)]
    cause = compare_runs(run(expected), moved, run(*parts), mesh={"dp": 2}).first.cause
    assert (cause.kind, cause.axis) == ("missing-reduction", "dp")
    assert cause.evidence.startswith(f"{words} over dp of the ranks' gradients equals the reference within ")
    assert " % as a whole; the nearest alone within " in cause.evidence


def test_one_wrong_element_has_no_factor():
    """One number is a multiple of any other: where a rank has one wrong element, no factor is claimed."""
    expected = RNG.standard_normal((4, 5))
    wrong = [expected.copy(), expected.copy()]
    wrong[0][0, 0], wrong[1][2, 1] = 7.3, -9.1
    assert gradient(expected, wrong).kind not in {"scaled", "scaled-by-size", "scaled-by-count"}


def test_factors():
    """Another factor per rank is a ratio of counts; one that no size makes is said to be that."""
    expected = RNG.standard_normal((4, 5))
    assert gradient(expected, [expected * 3 / 5, expected * 7 / 5]).kind in {"missing-reduction", "scaled-by-count"}
    cause = gradient(expected, [expected * np.pi] * 2)
    assert cause.kind == "scaled"
    assert cause.evidence.endswith("which is not a size of a group and no ratio of counts")
    literal = gradient(expected, [expected * 0.47] * 2)
    assert literal.kind == "scaled"
    assert literal.evidence == (
        "the ranks' gradients are the reference's times 0.47, which is not a size of a group and no ratio of counts"
    )
    assert gradient(expected, [expected / 6] * 4, MESH).kind == "scaled-by-count"
    assert gradient(expected, [expected / 4] * 4, MESH).kind == "average-for-sum"


def test_missing_and_zero_gradients():
    """A gradient that some ranks lack, or that is zero on them, is reported with the ranks."""
    expected = RNG.standard_normal((4, 5))
    cause = gradient(expected, [expected, None])
    assert (cause.kind, cause.evidence) == (
        "no-gradient",
        "rank 1 has the parameter, but the optimizer there sees no gradient of it",
    )
    cause = gradient(expected, [expected, 0 * expected, expected])
    assert (cause.kind, cause.evidence) == ("no-gradient", "it is zero on rank 1")
    assert gradient(expected, [expected / 3, 0 * expected, 2 * expected / 3]).kind == "missing-reduction"


def test_a_gradient_before_a_sharded_module():
    """A gradient that is wrong before a sharded module with right ones lacks a sum of gradients."""
    weight, own = RNG.standard_normal((3, 4)), RNG.standard_normal((5, 3))
    slope, before = RNG.standard_normal((5, 3)), RNG.standard_normal((3, 4))

    def records(part, value):
        initial = [record("weight", "embed.weight", -1, weight), record("weight", "experts.weight", -1, own[part])]
        return [
            *initial,
            record("gradient", "embed.weight", 0, value),
            record("gradient", "experts.weight", 0, slope[part]),
        ]

    wrong = before + RNG.standard_normal(before.shape)
    ranks = [records(part, wrong) for part in (slice(0, 3), slice(3, 5))]
    cause = first(records(slice(None), before), ranks, {"tp": 2}).cause
    assert (cause.kind, cause.axis) == ("missing-reduction", "tp")
    assert cause.evidence.endswith("nearest: the gradient of its input (not recorded) is not summed over tp")


def test_a_bias_added_by_every_rank():
    """An output that has a parameter of its module once per rank repeats it."""
    bias, out = RNG.standard_normal(5), RNG.standard_normal((4, 5))

    def records(value):
        return [Record("weight", "down.bias", "down", -1, 0, bias), record("output", "down", 0, value)]

    cause = first(records(out), [records(out + 2 * bias)] * 3, {"tp": 3}).cause
    assert (cause.kind, cause.axis) == ("repeated-reduction", "tp")
    assert cause.evidence == "minus 2 times down.bias it equals the reference: each of the 3 ranks of tp adds it"


def test_parts_that_were_not_added_up_although_each_has_the_bias():
    """Outputs whose sum over an axis is the reference's but for the bias of each rank lack that sum."""
    bias, parts = RNG.standard_normal(5), RNG.standard_normal((3, 4, 5))

    def records(value):
        return [Record("weight", "down.bias", "down", -1, 0, bias), record("output", "down", 0, value)]

    cause = first(records(parts.sum(0) + bias), [records(part + bias) for part in parts], {"tp": 3}).cause
    assert (cause.kind, cause.axis) == ("missing-reduction", "tp")
    assert cause.evidence == "the sum over tp of the ranks' outputs, minus 2 times down.bias, equals the reference"
    other = first(records(parts.sum(0) + 4 * bias), [records(part + bias) for part in parts], {"tp": 3}).cause
    assert other.kind != "missing-reduction" or "down.bias" not in other.evidence


def test_a_loss_of_an_output_that_is_still_to_be_added_up():
    """Where the last output before a wrong loss is right as a sum only, the sum is what is missing."""
    parts = RNG.standard_normal((3, 4, 5))

    def records(value):
        return [record("output", "down", 0, value), record("loss", "loss", 0, np.square(value).mean())]

    cause = first(records(parts.sum(0)), [records(part) for part in parts], {"tp": 3}).cause
    assert (cause.kind, cause.axis) == ("missing-reduction", "tp")
    assert cause.evidence == (
        "the output of down, the last one before the loss, is the reference's only as a sum over tp"
    )


def test_values_of_another_name():
    """An output that is another module's is permuted."""
    one, two = RNG.standard_normal((2, 4, 5))
    ranks = [[record("output", "a", 0, two), record("output", "b", 0, two)]] * 2
    cause = first([record("output", "a", 0, one), record("output", "b", 0, two)], ranks).cause
    assert (cause.kind, cause.evidence) == (
        "permuted",
        "rank 0 has the single device's b; rank 1 has the single device's b",
    )


def test_a_state_differs_because_its_gradient_does():
    """A later difference is told as a symptom of the gradient's."""
    weight, expected = RNG.standard_normal((4, 5)), RNG.standard_normal((4, 5))

    def records(value, state):
        return [
            record("weight", "a.w", -1, weight), record("gradient", "a.w", 0, value), record("state", "a.w:m", 0, state)
        ]  # fmt: skip

    reference = Run([RankRecords(0, records(expected, expected))])
    parallel = Run([RankRecords(rank, records(expected / 2, expected / 2)) for rank in range(2)])
    verdict = compare_runs(reference, [reference], parallel, mesh={"dp": 2})
    gradient_cause, state_cause = (difference.cause for difference in verdict.differences)
    assert gradient_cause.kind == state_cause.kind == "average-for-sum"
    assert state_cause.evidence == f"the gradient of a.w differs from step 1 on: {gradient_cause.evidence}"


def test_stale_micro_batches():
    """An output that is that of the call before is stale."""
    one, two = RNG.standard_normal((2, 4, 5))
    ranks = [[record("output", "a", 0, one), record("output", "a", 0, one, 1)]] * 2
    cause = first([record("output", "a", 0, one), record("output", "a", 0, two, 1)], ranks).cause
    assert (cause.kind, cause.evidence) == ("stale", "it is the value of the previous call, on ranks 0, 1")


def test_sums_and_means_that_belong_elsewhere():
    """A sum where losses are averaged is reported; so is a size that is only a part of that mean."""
    expected = RNG.standard_normal((4, 5))
    weight = record("weight", "a.w", -1, expected)

    def cause(values, factor, mesh):
        reference = [weight, record("loss", "loss", 0, float(np.mean(values))), record("gradient", "a.w", 0, expected)]
        ranks = [
            [weight, record("loss", "loss", 0, value), record("gradient", "a.w", 0, expected * factor)]
            for value in values
        ]
        return first(reference, ranks, mesh).cause

    assert cause([0.25, 0.5, 0.9], 3, {"dp": 3}).kind == "sum-for-average"
    assert cause([0.25, 0.5, 0.9, 0.1, 0.2, 0.7], 3, {"dp": 2, "cp": 3}).kind == "scaled-by-size"
    found = cause([0.25, 0.5, 0.9], 9, {"dp": 3})
    assert (found.kind, found.axis) == ("scaled-by-size", "dp x dp")


def weight_after(update, *, state=None):
    """Return the first difference of a weight whose gradients are right, on two ranks with ``update(old, new)``."""
    old, grad = RNG.standard_normal((2, 6, 5))
    new = old - 0.1 * grad

    def records(weight):
        states = [] if state is None else [record("state", "w.weight:momentum", 0, grad)]
        return [
            record("weight", "w.weight", -1, old),
            record("gradient", "w.weight", 0, grad),
            *states,
            record("weight", "w.weight", 0, weight),
        ]

    return first(records(new), [records(update(old, new))] * 2, {"dp": 2})


def test_steps_of_an_optimizer():
    """A weight that alone is wrong after a step tells how the step differs: decay, rate, parts, or how far it is."""
    blocks = np.repeat([1.25, 0.5], [4, 2])[:, None]
    other = RNG.standard_normal((6, 5))
    by_parts = (
        "the update is the reference's rows 0:4 times 1.25, rows 4:6 times 0.5: the optimizer computes on the part of "
        "each rank of dp"
    )
    cases = [
        (lambda old, new: new - 0.003 * old, "plus -0.003 times the weight before the step: it decays otherwise"),
        (lambda old, new: old + 0.5 * (new - old), "the update is the reference's times 0.5"),
        (lambda old, new: old + blocks * (new - old), by_parts),
        (lambda _, new: new + other, "nearest: the update of rank 0 is "),
    ]
    for update, words in cases:
        difference = weight_after(update)
        assert (difference.kind, difference.cause.kind) == ("weight", "optimizer"), difference
        assert words in difference.cause.evidence
        assert difference.cause.evidence.startswith("the gradient and weight before the step are right; ")
    assert weight_after(cases[0][0], state=True).cause.evidence.startswith("the gradient, state and weight before")


def test_elements_that_a_step_leaves():
    """Elements of a weight that a step leaves bit for bit are not updated, wherever the others are right."""
    difference = weight_after(lambda old, new: np.where(np.arange(6)[:, None] < 5, new, old))
    assert difference.cause.kind == "not-updated"
    assert difference.cause.evidence == "the step left 10 of 60 elements unchanged, bit for bit, on ranks 0, 1"


def test_a_moving_average_of_another_share():
    """A buffer whose new share is scaled, as by a count of a part, is reported by that factor."""
    old, new = RNG.standard_normal((2, 9))

    def records(share):
        values = (old, 0.9 * old + 0.1 * share * new)
        return [record("buffer", "norm.running_var", step - 1, value) for step, value in enumerate(values)]

    cause = first(records(1.0), [records(1.1)] * 2, {"dp": 2}).cause
    assert cause.kind == "scaled"
    assert cause.evidence == (
        "what is new in it is the reference's times 1.1, and what it keeps is right, on ranks 0, 1"
    )


def test_a_running_variance_that_is_corrected_by_the_count_of_a_part():
    """The factor of n / (n - 1) of the numbers that a rank has is told with both counts, and another one is not."""
    old, new = RNG.standard_normal((2, 9))
    out = RNG.standard_normal((6, 9, 5))

    def records(part, share):
        values = (old, 0.9 * old + 0.1 * share * new)
        kept = [record("buffer", "norm.running_var", step - 1, value) for step, value in enumerate(values)]
        return [kept[0], record("output", "norm", 0, part), kept[1]]

    def cause(share):
        ranks = [records(part, share) for part in (out[:3], out[3:])]
        return first(records(out, 30 / 29), ranks, {"dp": 2}).cause

    found = cause(15 / 14)
    assert found.kind == "scaled-by-count"
    assert found.evidence == (
        "what is new in it is the reference's times 1.0357, and what it keeps is right, on ranks 0, 1: "
        "n / (n - 1) with 15, the numbers per channel of a rank, for 30"
    )
    assert cause(14 / 13).kind == "scaled"


def test_outputs_that_no_sum_makes_right():
    """Different outputs without a right sum are reported with the nearest; parts that do not fit and sums by name."""
    out, one, other = RNG.standard_normal((3, 4, 5))
    ranks = [[record("output", "o", 0, x)] for x in (one, other)]
    cause = first([record("output", "o", 0, out)], ranks, {"tp": 2}).cause
    assert cause.kind == "unexplained"
    assert cause.evidence.startswith(
        "ranks that should hold the same have different outputs, none of them the reference's, and no sum or mean of "
        "them is it; nearest: the "
    )
    q, k = RNG.standard_normal((8, 3)), RNG.standard_normal((4, 3))

    def rank(rows, keys, value):
        return [
            record("weight", "a.q.weight", -1, q[rows]),
            record("weight", "a.k.weight", -1, k[keys]),
            record("output", "a.o", 0, value),
        ]

    halves = (slice(0, 4), slice(4, 8)), (slice(2, 4), slice(0, 2))
    ranks = [rank(rows, keys, x) for rows, keys, x in zip(*halves, (one, other), strict=True)]
    cause = first(rank(slice(None), slice(None), out), ranks, {"tp": 2}).cause
    assert cause.kind == "permuted"
    assert cause.evidence == (
        "rank 0 holds the part from 0 to 50 % of a.q.weight, the part from 50 to 100 % of a.k.weight: they do not "
        "belong together"
    )
    before = [record("output", "o", 0, x) for x in (out, one, out - one)]
    after = [record("output", "norm", 0, x) for x in (np.tanh(out), np.tanh(one), np.tanh(out - one))]
    cause = first([before[0], after[0]], [[before[n], after[n]] for n in (1, 2)], {"tp": 2}).cause
    assert (cause.kind, cause.axis) == ("missing-reduction", "tp")
    assert cause.evidence == (
        "the output of o, the one before, is the reference's only as a sum over tp, and ranks that should hold the "
        "same here do not"
    )


def test_a_vector_that_fits_in_many_places_tells_no_order():
    """A vector whose tolerances are as wide as its elements are apart is not named a permutation."""
    total = np.arange(64.0)
    assert _tells_elements_apart(total[::-1], total, np.full(64, 0.4))
    assert not _tells_elements_apart(total[::-1], total, np.full(64, 1.4))
    assert _tells_elements_apart(total.reshape(8, 8), total.reshape(8, 8), np.full((8, 8), 1.4))
