"""Values that are right on the ranks together: rows of calls, and counts that add up, on small runs in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.verify.engine.pairing import PairedRuns
from hyper_parallel.verify.engine.unions import adds_up, is_union
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Record, Run

COUNT = ("buffer", "seen", 0, 0)


def _calls(*values):
    """Return the records of the calls of one module in one step."""
    return [Record("output", "head", "head", 0, call, value) for call, value in enumerate(values)]


def _paired(single, ranks):
    """Return both runs, by the records of the single device and of each rank."""
    reference = Run([RankRecords(0, single)])
    parallel = Run([RankRecords(rank, records) for rank, records in enumerate(ranks)])
    return PairedRuns(reference, [reference, reference], parallel, None, None)


def _is_union(single, *ranks, lacks=lambda _rank, _module: False):
    return is_union(_paired(_calls(*single), [_calls(*rank) for rank in ranks]), "head", 0, lacks)


def _rows(count, width=5, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def test_rows_that_ranks_cut_into_calls_of_their_own_are_a_union():
    """The ranks have all rows between them, however many calls they make of them."""
    rows = _rows(11)
    assert _is_union([rows], [rows[:3], rows[3:7]], [rows[7:]])
    assert _is_union([rows[:4], rows[4:]], [rows[:7]], [rows[7:]])


def test_rows_that_no_rank_has_are_missed():
    """A union lacks no row."""
    rows = _rows(11)
    assert not _is_union([rows], [rows[:3]], [rows[4:]])


def test_wrong_rows_are_no_union():
    """A row that the single device lacks is not in a union."""
    rows = _rows(11)
    wrong = rows[7:].copy()
    wrong[2, 3] += 0.5
    assert not _is_union([rows], [rows[:7]], [wrong])


def test_calls_of_other_widths_are_no_union():
    """Rows of several widths have no common place."""
    rows = _rows(11)
    assert not _is_union([rows[:6], rows[6:, :4]], [rows[:6]], [rows[6:]])
    assert not _is_union([rows], [rows[:6]], [rows[6:, :4]])


def test_a_stage_without_the_module_may_have_another_output():
    """A rank that lacks the module's parameters, as another stage of a pipeline does, is left out."""
    rows = _rows(11)
    stages = ([rows[:6]], [rows[6:]], [rows[:, :4]])
    assert _is_union([rows], *stages, lacks=lambda rank, module: (rank, module) == (2, "head"))
    assert not _is_union([rows], *stages)


def _counted(adds, start=2.0, total=None, groups=None):
    """Return whether a count that each rank raises by its own number is right together."""
    before = np.full(3, start)
    after = before + (sum(adds) if total is None else total)
    records = lambda value: [Record(*COUNT[:2], "", -1, 0, before), Record(*COUNT[:2], "", 0, 0, value)]  # noqa: E731
    runs = _paired(records(after), [records(before + add) for add in adds])
    return adds_up(runs, COUNT, groups or [list(range(len(adds)))])


@pytest.mark.parametrize("adds", [(3, 4), (1, 0, 5), (2, 2, 2, 7)])
def test_counts_that_ranks_raise_add_up(adds):
    """What the ranks of a group have added is together what the single device has added."""
    assert _counted(adds)
    assert not _counted(adds, total=sum(adds) + 1)


def test_only_whole_numbers_are_counts():
    """Fractions that add up are an average that was not taken."""
    assert not _counted((0.25, 0.75))


def test_groups_have_every_rank_once():
    """Groups that leave out a rank, or have one twice, say nothing."""
    assert not _counted((3, 4, 0), groups=[[0, 1]])
    assert not _counted((3, 4), groups=[[0, 1], [1]])


def test_a_rank_without_the_count_does_not_add_up():
    """Each rank of a group must have the value, in its shape."""
    before, after = np.zeros(3), np.full(3, 7.0)
    single = [Record(*COUNT[:2], "", -1, 0, before), Record(*COUNT[:2], "", 0, 0, after)]
    for other in ([], [Record(*COUNT[:2], "", 0, 0, after[:2])]):
        assert not adds_up(_paired(single, [single, other]), COUNT, [[0, 1]])
