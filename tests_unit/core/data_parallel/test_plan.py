from __future__ import annotations

import pytest

from hyper_parallel.core.data_parallel.plan import plan_flat


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_rows_hold_every_element_once(ranks):
    """Shards of all ranks add up to the parameters, slots do not overlap, and padding is less than a chunk per rank."""
    shapes = [(5, 3), (1,), (7, 2, 2), (0, 4), (4,)]
    plan = plan_flat(shapes, ranks)
    end = 0
    for shape, slot in zip(shapes, plan.slots, strict=True):
        assert slot.offset == end
        end += slot.size
        lengths = [slot.length(rank) for rank in range(ranks)]
        assert sum(lengths) == shape[0]
        assert all(0 <= length <= slot.chunk for length in lengths)
        assert slot.chunk == -(-shape[0] // ranks)
    assert (plan.row, plan.gathered) == (end, end * ranks)
