"""Random values by place in memory: the same in every world."""

import numpy as np

from hyper_parallel.verify.frameworks.contract.case_changes import INPUT_SPREAD, CaseChanges, kept_elements, noise_of


def test_values_depend_on_seed_and_size_only():
    """Every world draws the same values for memory of one size."""
    for draw in (noise_of, kept_elements):
        assert np.array_equal(draw(3, 35), draw(3, 35))
        assert not np.array_equal(draw(3, 35), draw(4, 35))
        assert draw(3, 35).shape == (35,)
    assert abs(noise_of(0, 10_000).std() - INPUT_SPREAD) < 0.05


def test_masks_lose_more_elements_at_the_start_of_their_memory():
    """Parts of one mask select different numbers of elements."""
    kept = kept_elements(0, 10_000)
    assert kept[:5000].mean() < 0.6
    assert kept[5000:].mean() > 0.8


def test_no_changes_are_the_default():
    """An empty change changes nothing."""
    assert CaseChanges() == CaseChanges({}, 1.0, {}, None, None, strided=False)
