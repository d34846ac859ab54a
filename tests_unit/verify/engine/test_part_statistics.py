"""Causes: statistics of a part, unequal rows, kept gradients, other inputs and targets; masks without a dropout."""

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import Group, RankRecords, Record, Run

ROWS, WIDTH = 9, 6
PARTS = (slice(0, 4), slice(4, 7), slice(7, 9))


def random(*shape):
    """Random numbers."""
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def run(*ranks):
    """A run whose ranks have these outputs, by module, after equal outputs of a first module."""
    groups = [Group("dp", tuple(range(len(ranks))))]
    return Run([
        RankRecords(rank, [Record("output", name, name, 0, 0, value) for name, value in outputs.items()], groups)
        for rank, outputs in enumerate(ranks)
    ])  # fmt: skip


def first_difference(single, ranks):
    """The first difference of ranks from a single device's outputs; repeats move by one unit in the last place."""
    moved = [run({name: value * (1 + sign * 2.0**-52) for name, value in single.items()}) for sign in (1, -1)]
    return compare_runs(run(single), moved, run(*ranks)).first


def rows_of(embed):
    """Each rank's rows of the first output, which tell where the others lie."""
    return [{"embed": embed[rows]} for rows in PARTS]


def kept(seed, *shape):
    """A dropout mask."""
    return np.random.default_rng(seed).random(shape) >= 0.3


def test_equal_masks_on_different_rows_are_a_shared_stream():
    """Ranks that drop the same elements of their own rows share a random stream; masks of other sizes are compared."""
    embed, hidden, mask = random(ROWS, 2), random(ROWS, WIDTH), kept(1, ROWS, WIDTH)
    own = kept(2, 4, WIDTH)
    ranks = rows_of(embed)
    for rank, rows in zip(ranks, PARTS, strict=True):
        rank["dropout"] = hidden[rows] * own[: rows.stop - rows.start] / 0.7
    first = first_difference({"embed": embed, "dropout": hidden * mask / 0.7}, ranks)
    assert (first.name, first.cause.kind, first.cause.axis) == ("dropout", "random-shared", "dp")
    assert "but draw equal masks" in first.cause.evidence


def test_other_masks_are_other_random_numbers():
    """Masks that differ from the reference's, and between ranks, are other numbers than the single device's."""
    embed, hidden = random(ROWS, 2), random(ROWS, WIDTH)
    ranks = rows_of(embed)
    for seed, (rank, rows) in enumerate(zip(ranks, PARTS, strict=True)):
        rank["dropout"] = hidden[rows] * kept(seed, rows.stop - rows.start, WIDTH)
    first = first_difference({"embed": embed, "dropout": hidden * kept(9, ROWS, WIDTH)}, ranks)
    assert first.cause.kind == "random-differs"


def test_dropout_that_the_reference_does_not_do_is_named():
    """An output with dropped elements where the reference has none is dropout that should be off."""
    embed, hidden, mask = random(ROWS, 2), random(ROWS, WIDTH), kept(3, ROWS, WIDTH)
    ranks = [rank | {"dropout": (hidden * mask / 0.7)[rows]} for rank, rows in zip(rows_of(embed), PARTS, strict=True)]
    first = first_difference({"embed": embed, "dropout": hidden}, ranks)
    assert first.cause.kind == "random-differs"
    assert first.cause.evidence.endswith("the single device drops none")


def test_rows_that_are_masked_are_no_dropout():
    """Zeros in whole rows are a mask of tokens, not random numbers."""
    embed, hidden = random(ROWS, 2), random(ROWS, WIDTH)
    valid = (np.arange(ROWS) % 3 > 0)[:, None]
    other = hidden * np.roll(valid, 1, 0)
    ranks = [rank | {"router": other[rows]} for rank, rows in zip(rows_of(embed), PARTS, strict=True)]
    first = first_difference({"embed": embed, "router": hidden * valid}, ranks)
    assert first.cause.kind == "components"


def test_a_norm_over_a_shard_lacks_a_reduction():
    """Rows that are multiples of the reference's, each by its own factor, over a sharded dim: a norm of the part."""
    first, hidden = random(5, 12), random(5, 12) + 3
    columns = (slice(0, 5), slice(5, 9), slice(9, 12))
    normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True))
    ranks = [
        {"up": first[:, part], "norm": hidden[:, part] / np.sqrt((hidden[:, part] ** 2).mean(1, keepdims=True))}
        for part in columns
    ]
    difference = first_difference({"up": first, "norm": normed}, ranks)
    assert (difference.name, difference.cause.kind, difference.cause.axis) == ("norm", "missing-reduction", "dp")
    assert difference.cause.evidence.startswith("each row is the reference's times a factor of its own, on ranks 0, 1")


def test_batch_statistics_of_a_part_lack_a_reduction():
    """Columns that are multiples of the reference's, moved, over sharded rows: means of the rank's rows."""
    embed = random(16, WIDTH)

    def normalized(rows):
        return (rows - rows.mean(0)) / rows.std(0)

    ranks = [{"embed": rows, "norm": normalized(rows)} for rows in (embed[:6], embed[6:11], embed[11:])]
    difference = first_difference({"embed": embed, "norm": normalized(embed)}, ranks)
    assert (difference.name, difference.cause.kind) == ("norm", "missing-reduction")
    assert difference.cause.evidence.startswith("each column is the reference's times a factor and plus a shift of its")


def test_channel_statistics_of_a_part_lack_a_reduction():
    """Channels that are multiples of the reference's, moved, over sharded images: a batch norm of the rank's images."""
    images = random(9, 3, 4, 5)

    def normalized(part):
        return (part - part.mean((0, 2, 3), keepdims=True)) / part.std((0, 2, 3), keepdims=True)

    ranks = [{"conv": part, "norm": normalized(part)} for part in (images[:4], images[4:7], images[7:])]
    difference = first_difference({"conv": images, "norm": normalized(images)}, ranks)
    assert (difference.name, difference.cause.kind, difference.cause.axis) == ("norm", "missing-reduction", "dp")
    assert difference.cause.evidence.startswith(
        "each channel is the reference's times a factor and plus a shift of its"
    )
    ranks[1]["norm"] = np.sign(ranks[1]["norm"])
    assert first_difference({"conv": images, "norm": normalized(images)}, ranks).cause.kind == "components"


def test_rows_of_the_first_output_that_nobody_has_are_other_inputs():
    """The first value of a step differs in all rows of a rank whose weights are right: the inputs differ."""
    embed, ids = random(ROWS, WIDTH), random(ROWS, 3)
    ranks = [{"embed": embed[rows] + (rank == 2), "ids": ids[rows]} for rank, rows in enumerate(PARTS)]
    first = first_difference({"embed": embed, "ids": ids}, ranks)
    assert (first.name, first.ranks, first.cause.kind) == ("embed", (2,), "data")


def test_rows_of_a_model_that_nobody_trains_may_have_other_weights():
    """Of the first output of an average of weights, neither inputs nor weights are known: no cause is claimed."""
    embed, ids = random(ROWS, WIDTH), random(ROWS, 3)
    ranks = [{"ema.0 (no_grad)": embed[rows] + (rank == 2), "ids": ids[rows]} for rank, rows in enumerate(PARTS)]
    first = first_difference({"ema.0 (no_grad)": embed, "ids": ids}, ranks)
    assert (first.name, first.ranks, first.cause.kind) == ("ema.0 (no_grad)", (2,), "unexplained")
    assert first.cause.evidence == (
        "every row of the step's first output is wrong on rank 2; neither what went into it nor its parameters were "
        "recorded"
    )


def test_parts_of_other_ranks_are_found_although_they_match():
    """Rows that all ranks take from the front are wrong where other outputs of their sizes show the ranks' places."""
    embed, table = random(ROWS, 2), random(ROWS, WIDTH)
    ranks = [rank | {"positions": table[: len(rank["embed"])]} for rank in rows_of(embed)]
    first = first_difference({"embed": embed, "positions": table}, ranks)
    assert (first.name, first.ranks, first.cause.kind) == ("positions", (1, 2), "permuted")


def test_the_last_rank_has_the_rows_that_are_left():
    """A rank whose rows nothing shows has those that no other rank has, if they are as many."""
    table = random(ROWS, WIDTH)
    ranks = [{"scale": table[rows] * (1 if rank else [[2], [1], [1], [1]])} for rank, rows in enumerate(PARTS)]
    first = first_difference({"scale": table}, ranks)
    assert (first.name, first.ranks, first.placement) == ("scale", (0,), "rows 0:4 of 9 in dim 0")


def test_a_rate_of_another_step_is_a_schedule_that_moved_too_far():
    """A learning rate that the single device has in a later step is named with that step."""

    def rates(*values):
        records = [Record("rate", "group 0", "", step, 0, np.array(value)) for step, value in enumerate(values)]
        return Run([RankRecords(0, records), RankRecords(1, records)][: 2 if values[0] < 0.5 else 1])

    single = rates(0.5, 0.4, 0.3)
    first = compare_runs(single, [single], rates(0.4, 0.3, 0.2)).first
    assert (first.kind, first.step, first.cause.kind) == ("rate", 0, "stale")
    assert first.cause.evidence == "the rate in step 1 is the single device's in step 2"


def records(kind, name, values, module=""):
    """Records of a value in consecutive steps."""
    return [Record(kind, name, module, step, 0, np.asarray(value)) for step, value in enumerate(values)]


def first_of(single, ranks):
    """The first difference of ranks' records from a single device's, which repeat themselves."""
    reference = Run([RankRecords(0, single)])
    groups = [Group("dp", tuple(range(len(ranks))))]
    parallel = Run([RankRecords(rank, own, groups) for rank, own in enumerate(ranks)])
    return compare_runs(reference, [reference], parallel).first


def test_gradients_that_some_ranks_kept_are_stale():
    """The gradient of the step before, as often as ranks kept it, is what is too much."""
    before, after = random(WIDTH), random(WIDTH) ** 2
    own = records("gradient", "weight", (before, after + 2 * before))
    first = first_of(records("gradient", "weight", (before, after)), [own] * 3)
    assert (first.step, first.cause.kind) == (1, "stale")
    assert first.cause.evidence == (
        "minus 2 times the value of the previous step it equals the reference: that value was not cleared"
    )


def test_values_weighted_with_rows_lack_a_reduction():
    """A buffer that is the mean of the rank's rows is the reference's if it is weighted with the rows."""
    embed = random(ROWS, 4)
    single = [*records("output", "embed", [embed], "embed"), *records("buffer", "mean", [embed.mean(0)])]
    ranks = [
        [*records("output", "embed", [embed[rows]], "embed"), *records("buffer", "mean", [embed[rows].mean(0)])]
        for rows in PARTS
    ]
    first = first_of(single, ranks)
    assert (first.kind, first.cause.kind, first.cause.axis) == ("buffer", "missing-reduction", "dp")
    assert first.cause.evidence.startswith("the mean over dp weighted with the ranks' rows, 4 : 3 : 2, equals")


def test_gradients_of_means_over_unequal_rows_must_be_weighted():
    """Losses that are the reference's only if weighted with rows show why gradients averaged alike differ."""
    embed, gradient = random(ROWS, WIDTH), random(ROWS, WIDTH)
    losses = embed.sum(1) ** 2

    def trained(rows, mean):
        return [
            *records("output", "embed", [embed[rows]], "embed"),
            *records("loss", "loss", [losses[rows].mean()]),
            *records("gradient", "weight", [mean]),
        ]

    alike = np.mean([gradient[rows].mean(0) for rows in PARTS], axis=0)
    first = first_of(trained(slice(None), gradient.mean(0)), [trained(rows, alike) for rows in PARTS])
    assert (first.kind, first.cause.kind, first.cause.axis) == ("gradient", "scaled-by-count", "dp")
    assert first.cause.evidence.startswith("the ranks' losses are means over 4, 3, 2 rows, and only their mean over dp")


@pytest.mark.parametrize("summed", [True, False])
def test_losses_that_ranks_divide_by_their_number(summed):
    """Means over unequal rows that ranks divide by their number: what the gradients do tells whether rows weigh alike.

    Where the gradients are added up, each rank weighs the same, whatever its rows; where they are averaged, the loss is
    divided once too often, and gradients are as small as it is.
    """
    embed, gradient = random(ROWS, WIDTH), 1 + random(ROWS, WIDTH) / 9
    losses = embed.sum(1) ** 2

    def trained(rows, mean, loss):
        return [
            *records("output", "embed", [embed[rows]], "embed"),
            *records("loss", "loss", [loss]),
            *records("gradient", "weight", [mean]),
        ]

    alike = np.mean([gradient[rows].mean(0) for rows in PARTS], axis=0) / (1 if summed else len(PARTS))
    ranks = [trained(rows, alike, losses[rows].mean() / len(PARTS)) for rows in PARTS]
    first = first_of(trained(slice(None), gradient.mean(0), losses.mean()), ranks)
    assert (first.kind, first.cause.axis) == ("loss", "dp")
    if summed:
        assert first.cause.kind == "scaled-by-count"
        assert first.cause.evidence == (
            "the ranks' losses are means over 4, 3, 2 rows, each divided by dp (3), so that ranks with different "
            "numbers of rows count equally in the sum; weighted with the numbers of rows, the means average to the "
            "reference's"
        )
    else:
        assert first.cause.kind == "scaled-by-size"
        assert first.cause.evidence.startswith("the mean over dp, weighted with the rows of each rank, of the ranks'")


def test_a_loss_of_right_outputs_has_other_targets():
    """A loss that no size or count explains, after outputs that are all right, is computed with other targets."""
    embed = random(ROWS, WIDTH)
    single = [*records("output", "embed", [embed], "embed"), *records("loss", "loss", [1.0])]
    ranks = [
        [*records("output", "embed", [embed[rows]], "embed"), *records("loss", "loss", [0.1234567891 + rank**0.5])]
        for rank, rows in enumerate(PARTS)
    ]
    first = first_of(single, ranks)
    assert (first.kind, first.cause.kind) == ("loss", "loss")
    assert first.cause.evidence == (
        "every output before it equals the reference's, and no size, count or logarithm of a size explains the loss"
    )


def test_experts_are_no_stages():
    """A rank with other experts that calls the same gate has the model's output: a wrong one is found."""
    names = ("gate", "experts.0", "experts.1")
    outputs = {name: random(4, 1 + len(name)) for name in (*names, "")}
    weights = [Record("weight", f"{name}.weight", name, -1, 0, random(3, len(name))) for name in names]

    def called(own, scale):
        modules = [name for name in names if name in own]
        return [
            *(weight for weight in weights if weight.module in own),
            *(Record("output", name, name, 0, 0, outputs[name]) for name in modules),
            Record("output", "", "", 0, 0, outputs[""] * scale),
        ]

    first = first_of(called(names, 1), [called(("gate", "experts.0"), 2), called(("gate", "experts.1"), 1)])
    assert (first.kind, first.name, first.ranks) == ("output", "", (0,))


def test_without_evidence_there_is_no_cause():
    """A difference that was not measured, or is not a matrix, has no cause among statistics of a part."""
    from types import SimpleNamespace

    import numpy as np

    from hyper_parallel.verify.engine import part_statistics

    for name in ("local_statistics", "weighted_by_rows"):
        assert getattr(part_statistics, name)(None, None, {}, None) is None
        assert getattr(part_statistics, name)(None, None, {}, SimpleNamespace(ranks=())) is None
    row = SimpleNamespace(ranks=(0,), actual={0: np.ones(3)})
    assert part_statistics.local_statistics(None, None, {}, row) is None
    assert part_statistics.other_inputs(None, ("output", "", 0, 0), {}, None) is None
    bounds = SimpleNamespace(reference={})
    assert part_statistics.kept_value(SimpleNamespace(bounds=bounds), ("weight", "w", 1, 0), {}, row) is None


@pytest.mark.parametrize("side", ["first", "last"])
def test_rows_at_the_border_of_parts(side):
    """Rows that are wrong only next to another rank's part lack what that rank has; wrong rows elsewhere do not."""
    embed, conv = random(12, WIDTH), random(12, WIDTH)
    parts = (slice(0, 5), slice(5, 9), slice(9, 12))
    ranks = [{"embed": embed[rows], "conv": conv[rows].copy()} for rows in parts]
    for part in ranks[1:] if side == "first" else ranks[:-1]:
        part["conv"][slice(0, 2) if side == "first" else slice(-2, None)] += 1 + random(2, WIDTH) ** 2
    first = first_difference({"embed": embed, "conv": conv}, ranks)
    assert (first.name, first.cause.kind) == ("conv", "boundary")
    assert first.cause.evidence.startswith(f"only the {side} 2 rows of dim 0 of each part are wrong, on ranks ")
    ranks[1]["conv"][3 if side == "first" else 0] += 1
    assert first_difference({"embed": embed, "conv": conv}, ranks).cause.kind != "boundary"


def test_losses_that_are_not_divided_by_their_number():
    """A step's micro-batches whose mean losses add up to the reference's times their number are told so."""
    embed = random(ROWS, WIDTH)
    single = [*records("output", "embed", [embed], "embed"), *records("loss", "loss", [2**0.5])]
    values = 3**0.5, 7**0.5, 3 * 2**0.5 - 3**0.5 - 7**0.5
    own = [Record("loss", "loss", "", 0, call, np.array(value)) for call, value in enumerate(values)]
    ranks = [[*records("output", "embed", [embed], "embed"), *own]] * 2
    first = first_of(single, ranks)
    assert (first.kind, first.cause.kind) == ("loss", "scaled-by-count")
    assert first.cause.evidence == (
        "the step has 3 losses where the reference has 1, and their sum is 3 times the reference's: the losses are "
        "not divided by their number"
    )
