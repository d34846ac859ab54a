"""What values are on a rank: regions, declarations, values before training, other parameters."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.comparison import compare_runs
from hyper_parallel.verify.frameworks.contract.records import Pending, RankRecords, Record, Region, Run

RNG = np.random.default_rng(8)


def values(name, array, *, kind="weight", steps=(-1, 0), region=None):
    """Return records of one value in several steps."""
    module = name.rpartition(".")[0]
    return [Record(kind, name, module, step, 0, array, region) for step in steps]


def verdict(whole, ranks, **settings):
    """Return the verdict on records."""
    reference = Run([RankRecords(0, whole)])
    parallel = Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])
    return compare_runs(reference, [reference], parallel, **settings)


def test_a_tensor_says_its_region_and_pending_sum():
    """A region gives the box, uneven and in two dims; a pending sum over ranks is done before comparing."""
    array = RNG.standard_normal((5, 6))
    boxes = [(0, 0, 3, 4), (0, 4, 3, 2), (3, 0, 2, 4), (3, 4, 2, 2)]
    ranks = []
    for row, column, height, width in boxes:
        part = array[row : row + height, column : column + width]
        region = Region((5, 6), (row, column))
        ranks.append(values("a.weight", part, region=region))
    assert verdict(values("a.weight", array), ranks, mesh={"dp": 2, "tp": 2}).equal
    share = RNG.standard_normal((5, 6))
    region = Region((5, 6), (0, 0), (Pending("sum", (0, 1)),))
    parts = [share, array - share]
    pending = [values("a", part, kind="output", steps=(0,), region=region) for part in parts]
    result = verdict(values("a", array, kind="output", steps=(0,)), pending)
    assert result.equal
    alone = verdict(values("a", array, kind="output", steps=(0,)), [pending[0], []])
    assert not alone.equal
    pending[1][0] = Record("output", "a", "", 0, 0, parts[1][:3], region)
    assert not verdict(values("a", array, kind="output", steps=(0,)), pending).equal


def test_constant_parameters_are_placed_like_their_module():
    """A bias of zeros lies where the weight's rows lie; a norm of another module like the only rows of these sizes."""
    weight = RNG.standard_normal((7, 3))
    whole = [*values("a.weight", weight), *values("a.bias", np.zeros(7)), *values("b.weight", np.ones(7))]
    ranks = [
        [*values("a.weight", weight[rows]), *values("a.bias", np.zeros(7)[rows]), *values("b.weight", np.ones(7)[rows])]
        for rows in (slice(0, 4), slice(4, 7))
    ]
    result = verdict(whole, ranks, mesh={"tp": 2})
    assert result.equal, result.text()
    changed = np.arange(7.0)
    whole[3] = Record("weight", "a.bias", "a", 0, 0, changed)
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        ranks[rank][3] = Record("weight", "a.bias", "a", 0, 0, changed[rows])
    assert verdict(whole, ranks, mesh={"tp": 2}).equal


def test_empty_flat_and_permuted_parts():
    """A rank without rows, flat pieces of a raveled weight, and fused rows are placed."""
    weight = RNG.standard_normal((6, 4))
    empty = [values("a.weight", weight), values("a.weight", weight[:0])]
    assert verdict(values("a.weight", weight), empty).equal
    flat = [values("a.weight", weight.reshape(-1)[:13]), values("a.weight", weight.reshape(-1)[13:])]
    assert verdict(values("a.weight", weight), flat).equal
    fused = [values("a.weight", weight[[0, 2, 4]]), values("a.weight", weight[[1, 3, 5]])]
    assert verdict(values("a.weight", weight), fused).equal
    result = verdict(values("a.weight", weight), [values("a.weight", weight[[0, 2, 4]])] * 2)
    assert result.first.why == "12 of the single device's 24 elements are on no rank"
    assert result.first.cause.evidence == "12 elements (in rows 1, 3, 5) are on no rank, and 12 are on several"


def test_declared_values():
    """A declaration places weights, gradients and outputs; a local value is compared with nothing.

    An output without a place is listed where the gradients of its step are right, and needs a declaration otherwise.
    """
    weight = np.ones((4, 3))
    lines = {"a.weight": "shard(0) over tp", "output a": "local", "gradient a.*": "shard(0) over tp"}
    gradient = RNG.standard_normal((4, 3))
    whole = [*values("a.weight", weight), *values("a.weight", gradient, kind="gradient", steps=(0,))]
    whole += values("a", RNG.standard_normal(5), kind="output", steps=(0,))
    ranks = [
        [
            *values("a.weight", weight[rows]),
            *values("a.weight", gradient[rows], kind="gradient", steps=(0,)),
            *values("a", RNG.standard_normal(3), kind="output", steps=(0,)),
        ]
        for rows in (slice(0, 1), slice(1, 4))
    ]
    result = verdict(whole, ranks, mesh={"tp": 2}, declared=lines)
    assert result.equal
    assert "output" not in result.counts
    del lines["output a"]
    result = verdict(whole, ranks, mesh={"tp": 2}, declared=lines)
    why = "[3] on rank 0 matches no part of the reference's [5]"
    assert result.unplaced == []
    line = f"the output of a: {why}, but all gradients, optimizer states and weights are equal"
    assert line in result.skipped
    untrained = [[record for record in records if record.kind != "gradient"] for records in (whole, *ranks)]
    result = verdict(untrained[0], untrained[1:], mesh={"tp": 2}, declared=lines)
    (line,) = result.unplaced
    assert line == f'the output of a: {why}; declare it, e.g. {{"output a": "shard(0) over tp"}}'
    assert result.equal


def test_a_weight_that_is_no_part_is_told():
    """Initial values that are nowhere in the reference's differ on their rank."""
    weight = RNG.standard_normal((6, 4))
    result = verdict(values("a.weight", weight), [values("a.weight", weight[:3]), values("a.weight", weight[3:] + 1)])
    assert (result.first.ranks, result.first.step) == ((1,), -1)
    assert result.first.why == "[3, 4] is not a part of the single device's [6, 4]"


@pytest.mark.parametrize("shape", [(3, 4), (4,)])
def test_states_follow_their_parameter_or_are_numbers(shape):
    """A state of the parameter's shape follows it; a step counter is the same everywhere."""
    weight, state = RNG.standard_normal((2 * shape[0], *shape[1:])), RNG.standard_normal((2 * shape[0], *shape[1:]))
    parts = (slice(0, shape[0]), slice(shape[0], None))

    def records(rows):
        return [
            *values("a.weight", weight[rows]),
            *values("a.weight:exp_avg", state[rows], kind="state", steps=(0,)),
            *values("a.weight:step", np.asarray(1.0), kind="state", steps=(0,)),
        ]

    result = verdict(records(slice(None)), [records(rows) for rows in parts])
    assert result.equal
    assert result.counts["state"] == 4
